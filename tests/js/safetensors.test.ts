// SPDX-License-Identifier: Apache-2.0
import { describe, expect, it } from 'vitest';
import { readSafetensors, readSafetensorsHeader, safetensorsHeaderBytes } from '../../js/safetensors.js';
import { errorOf, hex, readRepositoryFile } from './support.js';

/** A file of a header and bytes. */
function fileOf(header: unknown, data: number[] | Uint8Array = [], pad = 0): Uint8Array {
  const text = new TextEncoder().encode(typeof header === 'string' ? header : JSON.stringify(header));
  const file = new Uint8Array(8 + text.length + pad + data.length);
  new DataView(file.buffer).setBigUint64(0, BigInt(text.length + pad), true);
  file.set(text, 8);
  file.fill(0x20, 8 + text.length, 8 + text.length + pad);
  file.set(data, 8 + text.length + pad);
  return file;
}
const entry = (dtype: string, shape: number[], ...data_offsets: number[]) => ({ dtype, shape, data_offsets });

describe('the safetensors reader', () => {
  it('reads a real file', async () => {
    const bytes = await readRepositoryFile('tests/data/smollm2-small.safetensors');
    const { metadata, tensors } = readSafetensors(bytes);
    expect(metadata['tokens']).toBe('83');
    expect(tensors.get('past_key_values.0.key')).toMatchObject({ type: 'bf16', dims: [1, 3, 83, 64] });
    const key = tensors.get('past_key_values.15.key')!;
    expect(key.data).toBeInstanceOf(Uint16Array);
    expect(hex(key.data)).toBe(hex(bytes.subarray(key.begin, key.end)));
    const total = [...tensors.values()].reduce((sum, tensor) => sum + tensor.end - tensor.begin, 0);
    expect(total + safetensorsHeaderBytes(bytes)).toBe(bytes.length);
    // The header alone is enough where the size is given.
    const header = readSafetensorsHeader(bytes.subarray(0, safetensorsHeaderBytes(bytes)), bytes.length);
    expect([...header.tensors.keys()]).toEqual([...tensors.keys()]);
  });

  it('reads every type, at odd addresses too', () => {
    const header = {
      a: entry('U8', [1], 0, 1),
      b: entry('F32', [2], 1, 9),
      c: entry('I64', [1], 9, 17),
      d: entry('BF16', [], 17, 19),
      e: entry('F64', [0, 3], 19, 19),
    };
    const data = [
      7,
      ...new Uint8Array(Float32Array.of(1.5, -2).buffer),
      ...new Uint8Array(BigInt64Array.of(-5n).buffer),
      0x80,
      0x3f,
    ];
    for (let pad = 0; pad < 8; ++pad) {
      const { tensors } = readSafetensors(fileOf(header, data, pad));
      expect(tensors.get('a')!.data).toEqual(Uint8Array.of(7));
      expect(tensors.get('b')!.data).toEqual(Float32Array.of(1.5, -2));
      expect(tensors.get('c')!.data).toEqual(BigInt64Array.of(-5n));
      expect(tensors.get('d')!.data).toEqual(Uint16Array.of(0x3f80));
      expect(tensors.get('e')!.data).toEqual(new Float64Array(0));
    }
  });

  const bad: Array<[string, Uint8Array, string, number | undefined]> = [
    ['an empty file', new Uint8Array(0), 'ERR_CORRUPT', 0],
    ['a cut length', new Uint8Array(7), 'ERR_CORRUPT', 7],
    ['a header longer than the file', Uint8Array.of(200, 0, 0, 0, 0, 0, 0, 0, 1), 'ERR_CORRUPT', 0],
    ['a huge header', Uint8Array.of(255, 255, 255, 255, 255, 255, 255, 255, 1), 'ERR_CORRUPT', 0],
    ['no JSON', fileOf('{"a":'), 'ERR_CORRUPT', 8],
    ['JSON that is no object', fileOf('[1]'), 'ERR_CORRUPT', 8],
    ['an entry that is null', fileOf({ a: null }), 'ERR_CORRUPT', 8],
    ['a negative dim', fileOf({ a: entry('U8', [-1], 0, 1) }, [0]), 'ERR_CORRUPT', 8],
    ['a dim that is text', fileOf({ a: { dtype: 'U8', shape: ['1'], data_offsets: [0, 1] } }, [0]), 'ERR_CORRUPT', 8],
    ['an unknown type', fileOf({ a: entry('F3', [1], 0, 1) }, [0]), 'ERR_UNSUPPORTED', undefined],
    ['data past the end', fileOf({ a: entry('U8', [2], 0, 2) }, [0]), 'ERR_CORRUPT', 61],
    ['data that do not fit the shape', fileOf({ a: entry('F32', [2], 0, 4) }, [0, 0, 0, 0]), 'ERR_CORRUPT', 62],
    [
      'a shape that overflows',
      fileOf({ a: entry('F32', [2 ** 40, 2 ** 40], 0, 4) }, [0, 0, 0, 0]),
      'ERR_CORRUPT',
      undefined,
    ],
  ];
  for (const [name, file, code, byteOffset] of bad) {
    it(`refuses ${name}`, () => {
      const error = errorOf(() => readSafetensors(file));
      expect(error.code).toBe(code);
      if (byteOffset !== undefined) expect(error.byteOffset).toBe(byteOffset);
      expect(error.message).toMatch(/^safetensors: /);
    });
  }
});
