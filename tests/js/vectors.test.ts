// SPDX-License-Identifier: Apache-2.0
// The affine golden vectors (tests/vectors), made by other implementations: every case is decoded, and encoded where
// a spec or the page operator says the same.
import { beforeAll, describe, expect, it } from 'vitest';
import type { KvPages, QuantizeOptions } from '../../js/index.js';
import { readSafetensors } from '../../js/safetensors.js';
import { hex, loadHere, readRepositoryFile } from './support.js';

interface Parameters {
  dtype: string;
  shape: number[];
  axis?: number | null;
  block?: number;
  length?: number;
  page?: boolean;
}

const { metadata, tensors } = readSafetensors(await readRepositoryFile('tests/vectors/affine.safetensors'));
const names = Object.keys(metadata).filter((name) => name.startsWith('case/'));

let kv: KvPages;
beforeAll(async () => {
  kv = await loadHere();
});

function bytesOf(name: string): Uint8Array {
  const { data } = tensors.get(name)!;
  return new Uint8Array(data.buffer, data.byteOffset, data.byteLength);
}

/** The spec whose scales lie as in the case, undefined where none does (a scale per channel over all tokens). */
function specOf({ dtype, axis, block = 0 }: Parameters, rank: number): string | undefined {
  if (axis === null || axis === undefined) return `${dtype}/tensor/given`;
  const dim = axis < 0 ? axis + rank : axis;
  if (dim === 1 && block === 0) return `${dtype}/head/given`;
  if (dim === 3 && block > 0) return `${dtype}/token/${block}/given`;
  if (dim === 2 && block > 0) return `${dtype}/channel/${block}/given`;
  return undefined;
}

describe('the affine vectors', () => {
  it('are all there', () => {
    expect(names.length).toBe(129);
  });

  for (const name of names) {
    it(name.slice(5), () => {
      const parameters = JSON.parse(metadata[name]!) as Parameters;
      const { dtype, shape, block = 0, length } = parameters;
      const scales = tensors.get(`${name}/scale`)!.data as Float32Array;
      const zeroPoints = tensors.get(`${name}/zero_point`)!.data as Int8Array | Uint8Array;
      const axis = parameters.axis ?? undefined;
      const shift = 4 - shape.length;
      const layout = axis === undefined ? {} : { axis: axis < 0 ? axis + 4 : axis + shift, block };

      const decoded = kv.fromCodes({
        type: dtype,
        dims: shape,
        codes: bytesOf(`${name}/packed`),
        scales,
        zeroPoints,
        ...layout,
      });
      for (const type of ['f32', 'f16', 'bf16'] as const) {
        if (!tensors.has(`${name}/y_${type}`)) continue;
        expect([type, hex(decoded.dequantize({ type }).data)]).toEqual([type, hex(bytesOf(`${name}/y_${type}`))]);
      }

      const source = {
        type: 'f32',
        dims: shape,
        data: bytesOf(tensors.has(`${name}/x`) ? `${name}/x` : `${name}/x_bits`),
      };
      const spec = specOf(parameters, shape.length);
      if (spec !== undefined) {
        const options: QuantizeOptions = {
          spec,
          scales: [...scales],
          zeroPoints: [...zeroPoints],
          ...(length === undefined ? {} : { valid: length }),
        };
        const encoded = kv.quantize(source, options);
        expect(hex(encoded.codes)).toBe(hex(bytesOf(`${name}/packed`)));
        expect(hex(encoded.scales)).toBe(hex(scales));
      }
      if (axis === undefined && shape.length === 4) {
        const cache = kv.createPagedCache([
          { key: source, value: source, ...(length === undefined ? {} : { length }) },
        ]);
        const to = { type: dtype as 'int8', scale: scales[0]!, zeroPoint: zeroPoints[0]! };
        const page = cache.quantize([0], { key: to, value: to }).page(0);
        expect(hex(page.key.codes)).toBe(hex(bytesOf(`${name}/packed`)));
        expect(hex(page.value.codes)).toBe(hex(bytesOf(`${name}/packed`)));
      }
    });
  }

  it('requantize: an encoded page is decoded and encoded again', () => {
    const pairs = names.filter((name) => name.endsWith('-source')).map((name) => name.slice(0, -7));
    expect(pairs.length).toBeGreaterThanOrEqual(4);
    for (const name of pairs) {
      const from = JSON.parse(metadata[`${name}-source`]!) as Parameters;
      const to = JSON.parse(metadata[name]!) as Parameters;
      const layout = from.axis === null || from.axis === undefined ? {} : { axis: from.axis, block: from.block ?? 0 };
      const tensor = kv.fromCodes({
        type: from.dtype,
        dims: from.shape,
        codes: bytesOf(`${name}-source/packed`),
        scales: tensors.get(`${name}-source/scale`)!.data as Float32Array,
        zeroPoints: tensors.get(`${name}-source/zero_point`)!.data as Uint8Array,
        ...layout,
      });
      const destination = {
        type: to.dtype as 'int8',
        scale: (tensors.get(`${name}/scale`)!.data as Float32Array)[0]!,
        zeroPoint: (tensors.get(`${name}/zero_point`)!.data as Uint8Array)[0]!,
      };
      const cache = kv
        .createPagedCache([{ key: tensor, value: tensor }])
        .quantize([0], { key: destination, value: destination });
      expect(hex(cache.page(0).value.codes)).toBe(hex(bytesOf(`${name}/packed`)));
    }
  });
});
