// SPDX-License-Identifier: Apache-2.0
// Bytes are the contract: real keys and values give the same file on every backend and all kernels, and the one that
// is on record.
import { describe, expect, it } from 'vitest';
import { load } from '../../js/index.js';
import type { Destination, KvPages } from '../../js/index.js';
import { readSafetensors } from '../../js/safetensors.js';
import golden from './golden.json';
import { backend, hex, inBrowser, loadHere, noise, readRepositoryFile, sha256 } from './support.js';

const { tensors } = readSafetensors(await readRepositoryFile('tests/data/smollm2-small.safetensors'));

const destinations: Record<string, readonly [key: Destination, value: Destination]> = {
  'int4-uint4': [
    { type: 'int4', scale: 1.25 },
    { type: 'uint4', scale: 0.25, zeroPoint: 8 },
  ],
  'int8-uint8': [
    { type: 'int8', scale: 0.125 },
    { type: 'uint8', scale: 0.01, zeroPoint: 128 },
  ],
  'int2-uint2': [
    { type: 'int2', scale: 3 },
    { type: 'uint2', scale: 0.5, zeroPoint: 2 },
  ],
  'f16-f32': [{ type: 'f16' }, { type: 'f32' }],
};

/** Files of all layers: pages 1, 3 and 4 and the short last one converted, the others dense. */
function files(kv: KvPages): Record<string, Uint8Array<ArrayBuffer>> {
  const made: Record<string, Uint8Array<ArrayBuffer>> = {};
  for (const layer of [0, 15, 29]) {
    const dense = kv.splitIntoPages(
      tensors.get(`past_key_values.${layer}.key`)!,
      tensors.get(`past_key_values.${layer}.value`)!,
    );
    for (const [name, [key, value]] of Object.entries(destinations)) {
      made[`${layer}/${name}`] = kv
        .quantizePagedCache(dense, [5, 1, 3, 4], { key, value })
        .serialize() as Uint8Array<ArrayBuffer>;
    }
  }
  return made;
}

async function digests(kv: KvPages): Promise<Record<string, string>> {
  const entries = await Promise.all(
    Object.entries(files(kv)).map(async ([name, bytes]) => [name, await sha256(bytes)]),
  );
  return Object.fromEntries(entries) as Record<string, string>;
}

/** Everything that an encoding consists of, for every spec of the core. */
function encodings(kv: KvPages): Record<string, string> {
  // Odd sizes: partial groups of codes, short blocks and vectors that do not fill a register.
  const shapes = [
    [1, 2, 5, 64],
    [1, 1, 19, 33],
  ];
  return Object.fromEntries(
    kv.formats().specs.flatMap((spec) =>
      shapes.map((dims): [string, string] => {
        const count = dims.reduce((product, dim) => product * dim, 1);
        try {
          const given = spec.includes('/given') ? { scales: new Float32Array(scalesOf(spec, dims)).fill(0.37) } : {};
          const tensor = kv.quantize({ dims, data: noise(count, dims[3]) }, { spec, ...given });
          const arrays = [tensor.codes, tensor.scales, tensor.zeroPoints, tensor.data, tensor.dequantize().data]
            .map(hex)
            .join(' ');
          tensor.dispose();
          return [`${spec} ${dims}`, arrays];
        } catch (error) {
          return [`${spec} ${dims}`, String(error)];
        }
      }),
    ),
  );
}

function scalesOf(spec: string, [batch, heads, tokens, width]: number[]): number {
  const [, axis, block] = spec.split('/');
  const size = Number(block);
  if (axis === 'head') return heads!;
  if (axis === 'token') return batch! * heads! * tokens! * Math.ceil(width! / (size || width!));
  if (axis === 'channel') return batch! * heads! * Math.ceil(tokens! / (size || 16)) * width!;
  return 1;
}

function bytesOf(view: ArrayBufferView): Uint8Array {
  return new Uint8Array(view.buffer, view.byteOffset, view.byteLength);
}

describe('bytes', () => {
  it('of real pages are the ones on record', async () => {
    const kv = await loadHere();
    expect(await digests(kv)).toEqual(golden);
  });

  it('of real pages are the same with all kernels', async () => {
    const kv = await loadHere();
    for (const { name, available } of kv.backends().kernels) {
      if (available) expect([name, await digests(await loadHere({ kernels: name }))]).toEqual([name, golden]);
    }
  });

  it('of every spec are the same with all kernels', { timeout: 120_000 }, async () => {
    const expected = encodings(await loadHere({ kernels: 'reference' }));
    expect(Object.values(expected).filter((text) => !text.includes('Error')).length).toBeGreaterThan(30);
    const kv = await loadHere();
    for (const { name, available } of kv.backends().kernels) {
      if (available && name !== 'reference') expect(encodings(await loadHere({ kernels: name }))).toEqual(expected);
    }
  });

  it('survive a round trip through a file', async () => {
    const kv = await loadHere();
    for (const bytes of Object.values(files(kv))) expect(hex(kv.parse(bytes).serialize())).toBe(hex(bytes));
  });
});

describe.skipIf(inBrowser || backend !== 'native')('the addon and WebAssembly', () => {
  it("give the same bytes and read each other's files", async () => {
    const native = await loadHere();
    const wasm = await load({ backend: 'wasm' });
    expect([native.backend, wasm.backend]).toEqual(['native', 'wasm']);
    const [nativeFiles, wasmFiles] = [files(native), files(wasm)];
    for (const [name, bytes] of Object.entries(nativeFiles)) {
      expect(hex(wasmFiles[name]!)).toBe(hex(bytes));
      const [a, b] = [native.parse(wasmFiles[name]!), wasm.parse(bytes)];
      for (const index of [0, 5]) {
        expect(hex(a.page(index).key.dequantize().data)).toBe(hex(b.page(index).key.dequantize().data));
        expect(hex(a.page(index).value.dequantize({ type: 'bf16' }).data)).toBe(
          hex(b.page(index).value.dequantize({ type: 'bf16' }).data),
        );
      }
    }
  });

  it('give the same encodings of every spec over 200 random shapes', { timeout: 300_000 }, async () => {
    const [native, wasm] = [await loadHere(), await load({ backend: 'wasm' })];
    const blocks = new Map(native.formats().types.map(({ name, block }) => [name, block]));
    const values = noise(4096, 5);
    let state = 9;
    const random = (below: number) => {
      state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
      return Math.floor((state / 2 ** 32) * below);
    };
    let same = 0;
    const widths = [1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65];
    for (const row of native.formats().specs) {
      const type = row.split('/')[0]!;
      const block = blocks.get(type)! || 1;
      const dense = ['f32', 'f16', 'bf16'].includes(type);
      for (let round = 0; round < 200; ++round) {
        const width = Math.ceil(widths[random(widths.length)]! / block) * block;
        // Small, so that there is time for many; a page with rows that are not valid now and then.
        const tokens = 1 + random(Math.max(1, Math.min(35, Math.floor(300 / width))));
        const dims = [1 + random(2), 1 + random(2), tokens, width];
        const count = dims.reduce((product, dim) => product * dim, 1);
        const at = random(values.length - count);
        const tensor = { dims, data: values.subarray(at, at + count) };
        const spec = round % 2 === 1 && !dense ? `${row}+hadamard` : row;
        const given = row.includes('/given') ? { scales: new Float32Array(scalesOf(row, dims)).fill(0.37) } : {};
        const options = { spec, ...given, ...(round % 3 === 2 ? { valid: 1 + random(tokens) } : {}) };
        const [a, b] = [native.quantize(tensor, options), wasm.quantize(tensor, options)];
        const parts = (from: typeof a) => [from.codes, from.scales, from.zeroPoints, from.data, from.dequantize().data].map(bytesOf);
        const [one, other] = [parts(a), parts(b)];
        if (one.every((bytes, i) => Buffer.compare(bytes, other[i]!) === 0)) ++same;
        else expect([options, dims, one.map(hex)]).toEqual([options, dims, other.map(hex)]);
        a.dispose();
        b.dispose();
      }
    }
    expect(same).toBe(native.formats().specs.length * 200);
  });

  it('give the same encodings of every spec', { timeout: 120_000 }, async () => {
    expect(encodings(await load({ backend: 'wasm' }))).toEqual(encodings(await loadHere()));
  });
});
