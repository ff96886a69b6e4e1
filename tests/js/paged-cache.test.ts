// SPDX-License-Identifier: Apache-2.0
// Pages: the seed example, the operator's vectors, sharing, lifetime, the asynchronous form.
import { beforeAll, describe, expect, it } from 'vitest';
import { KvPagesError, PagedCache, QuantizedTensor } from '../../js/index.js';
import type { KvPages } from '../../js/index.js';
import { backend, errorOf, hex, inBrowser, loadHere, noise } from './support.js';

let kv: KvPages;
beforeAll(async () => {
  kv = await loadHere();
});

const { NaN: nan } = Number;

/** Page 0 of two tokens, and the page of onnx-light's example: start 2, one of two tokens valid, the rest NaN. */
function seedCache(): PagedCache {
  const first = { type: 'f32', dims: [1, 1, 2, 4], data: Float32Array.from({ length: 8 }, (_, i) => i / 8) };
  const key = Float32Array.of(-1.3, -0.4, 0.3, 1.2, nan, nan, nan, nan);
  const value = Float32Array.of(-0.8, -0.3, 0.2, 0.7, nan, nan, nan, nan);
  return kv.createPagedCache([
    { key: first, value: first },
    { key: { dims: [1, 1, 2, 4], data: key }, value: { dims: [1, 1, 2, 4], data: value }, length: 1 },
  ]);
}
const int4AndUint4 = {
  key: { type: 'int4', scale: 0.25, zeroPoint: 0 },
  value: { type: 'uint4', scale: 0.125, zeroPoint: 8 },
} as const;

describe('the seed example', () => {
  it('gives the published bytes, also after a round trip through a file', () => {
    const source = seedCache();
    const before = hex(source.serialize());
    const quantized = kv.quantizePagedCache(source, [1], int4AndUint4);
    const restored = kv.parse(quantized.serialize());
    for (const cache of [quantized, restored]) {
      expect(cache.pages.map(({ start, length, capacity }) => [start, length, capacity])).toEqual([
        [0, 2, 2],
        [2, 1, 2],
      ]);
      const { key, value } = cache.page(1);
      expect(hex(key.codes)).toBe('eb510000');
      expect(hex(value.codes)).toBe('62ea8888');
      expect(key.spec).toBe('int4/tensor/given/f32');
      expect([key.scales, key.zeroPoints]).toEqual([Float32Array.of(0.25), Int8Array.of(0)]);
      expect([value.scales, value.zeroPoints]).toEqual([Float32Array.of(0.125), Uint8Array.of(8)]);
      // Page 0 is untouched.
      expect(hex(cache.page(0).key.data)).toBe(hex(source.page(0).key.data));
      expect(cache.page(0).key.kind).toBe('dense');
    }
    expect(hex(source.serialize())).toBe(before);
    // The messages of the encoded payloads, byte for byte.
    const file = hex(quantized.serialize());
    expect(file).toContain(
      '0a130816120810014a040000803e1a0510164a01001a160a14080112100a0208010a0208010a0208020a0208042204eb510000',
    );
    expect(file).toContain(
      '0a130815120810014a040000003e1a0510154a01081a160a14080112100a0208010a0208010a0208020a020804220462ea8888',
    );
    expect(hex(restored.serialize())).toBe(file);
  });

  it('says what each converted page lost', async () => {
    const source = seedCache();
    const quantized = kv.quantizePagedCache(source, [1], int4AndUint4);
    const measure = (side: 'key' | 'value') => quantized.page(1)[side].measure(source.page(1)[side], { valid: 1 });
    expect(quantized.figures).toHaveLength(1);
    const { page, key, value } = quantized.figures[0]!;
    expect(page).toBe(1);
    expect(key).toMatchObject(measure('key'));
    expect(value).toMatchObject(measure('value'));
    expect(key.rmse + value.rmse).toBeGreaterThan(0);
    expect(key.errorPerToken).toHaveLength(1);
    expect(key.bitsPerElement).toBe(quantized.page(1).key.bitsPerElement);
    expect((await kv.quantizePagedCacheAsync(source, [1], int4AndUint4)).figures).toEqual(quantized.figures);
    expect([source.figures, kv.parse(quantized.serialize()).figures]).toEqual([[], []]);
    // Measured too late.
    const late = kv.quantizePagedCache(source, [1], int4AndUint4);
    source.dispose();
    expect(errorOf(() => late.figures).code).toBe('ERR_DISPOSED');
    expect(quantized.figures[0]!.page).toBe(1);
  });

  it('restores to FLOAT16 and BFLOAT16 with zeros in unused rows', () => {
    const quantized = kv.quantizePagedCache(seedCache(), [1], int4AndUint4);
    const dense = quantized.quantize([1], { key: { type: 'f16' }, value: { type: 'bf16', scale: 1 } });
    for (const cache of [dense, kv.parse(dense.serialize())]) {
      const { key, value } = cache.page(1);
      expect([key.spec, value.spec]).toEqual(['f16', 'bf16']);
      expect(hex(key.data)).toBe('00bd00b80034003d0000000000000000');
      expect(hex(value.data)).toBe('40bf80be803e403f0000000000000000');
    }
  });

  it('takes the words of onnxruntime for dense types', () => {
    const quantized = kv.quantizePagedCache(seedCache(), [1], {
      key: { type: 'float16' },
      value: { type: 'bfloat16' },
    });
    expect(quantized.pages[1]!.key.spec).toBe('f16');
    expect(quantized.pages[1]!.value.spec).toBe('bf16');
  });
});

describe('quantizePagedCache', () => {
  it('converts, saturates and requantizes as onnx-light does', () => {
    const keys = Float32Array.from({ length: 8 }, (_, i) => 0.25 * (i - 3));
    const values = Float32Array.from({ length: 12 }, (_, i) => 1 + 0.25 * (i - 3));
    const dense = kv.splitIntoPages(
      { dims: [1, 1, 4, 2], data: keys },
      { dims: [1, 1, 4, 3], data: values },
      { pageTokens: 2 },
    );
    expect(dense.pages.map((page) => page.start)).toEqual([0, 2]);
    const first = dense.quantize([1], {
      key: { type: 'int2', scale: 0.25, zeroPoint: -2 },
      value: { type: 'uint8', scale: 0.25, zeroPoint: 128 },
    });
    expect(hex(first.page(1).key.codes)).toBe('53');
    expect(hex(first.page(1).value.codes)).toBe('8788898a8b8c');
    expect(first.page(1).key.dequantize().data).toEqual(Float32Array.of(0.25, 0.5, 0.75, 0.75));
    const second = first.quantize([1], {
      key: { type: 'int8', scale: 0.5 },
      value: { type: 'uint4', scale: 0.5, zeroPoint: 8 },
    });
    expect(hex(second.page(1).key.codes)).toBe('00010202');
    expect(hex(second.page(1).value.codes)).toBe('ccdcee');
  });

  it('keeps partial pages of several batches and heads, for all nine types', () => {
    const rows = (width: number) => {
      const data = new Float32Array(2 * 2 * 3 * width).fill(nan);
      for (let outer = 0; outer < 4; ++outer)
        for (let c = 0; c < width; ++c) data[outer * 3 * width + c] = 0.25 * (((outer + c) % 4) - 2);
      return { dims: [2, 2, 3, width], data };
    };
    const source = kv.createPagedCache([{ key: rows(3), value: rows(2), length: 1 }]);
    const expected = {
      int2: [0, '0e004c004002400e00', '0e3000049000'],
      uint2: [2, 'a4aae6aaeaa8eaa4aa', 'a49aaaae3aaa'],
      int4: [0, 'fe000000f010000000100e00001 0fe000000', 'fe00000f00001 00000e10000'],
      uint4: [8, '7688888878988888889886888898 76888888', '768888878888 988888698888'],
      int8: [0, undefined, undefined],
      uint8: [128, undefined, undefined],
    } as const;
    for (const [type, [zeroPoint, key, value]] of Object.entries(expected)) {
      const to = { type: type as 'int2', scale: 0.25, zeroPoint };
      const encoded = source.quantize([0], { key: to, value: to });
      const page = encoded.page(0);
      if (key !== undefined) {
        expect([type, hex(page.key.codes)]).toEqual([type, key.replaceAll(' ', '')]);
        expect([type, hex(page.value.codes)]).toEqual([type, value.replaceAll(' ', '')]);
      } else {
        expect(page.key.codes.filter((_, i) => i % 9 >= 3).every((code) => code === zeroPoint)).toBe(true);
      }
      for (const [tensor, width] of [
        [page.key, 3],
        [page.value, 2],
      ] as const) {
        const { data } = tensor.dequantize();
        expect(Array.from(data)).toEqual(Array.from(rows(width).data, (x) => (Number.isNaN(x) ? 0 : x)));
      }
    }
    for (const type of ['f32', 'f16', 'bf16'] as const) {
      const page = source.quantize([0], { key: { type }, value: { type } }).page(0);
      expect(Array.from(page.key.dequantize().data)).toEqual(
        Array.from(rows(3).data, (x) => (Number.isNaN(x) ? 0 : x)),
      );
    }
  });

  it('shares what it does not change and leaves its source alone', () => {
    const source = seedCache();
    const used = kv.usedBytes;
    const copy = source.quantize([], int4AndUint4);
    expect(kv.usedBytes).toBe(used);
    expect(hex(copy.serialize())).toBe(hex(source.serialize()));
    const clone = source.clone();
    expect(kv.usedBytes).toBe(used);
    source.dispose();
    expect(clone.tokens).toBe(3);
    expect(copy.page(0).key.kind).toBe('dense');
  });

  it('passes over no key that it does not know', () => {
    const cache = seedCache();
    const call = (destinations: object) => () => cache.quantize([1], destinations as never);
    expect(call({ ...int4AndUint4, valeu: 1 })).toThrow(
      new TypeError('destinations.valeu: is no option; there are key, value'),
    );
    expect(call({ ...int4AndUint4, key: { type: 'int4', scale: 1, zeropoint: 3 } })).toThrow(
      new TypeError('key.zeropoint: is no option; there are type, scale, zeroPoint'),
    );
    expect(call({ ...int4AndUint4, key: { type: 'int4' } })).toThrow(
      new TypeError('key.scale: must be a number, got undefined'),
    );
    expect(() => cache.serialize({ output: 1 } as never)).toThrow(
      new TypeError('options.output: is no option; there are out'),
    );
    // A page of another cache goes in as it is.
    expect(kv.createPagedCache([cache.page(0)]).tokens).toBe(2);
  });

  it('has a name and a text that its file and the caches made of it keep', () => {
    const page = seedCache().page(0);
    const cache = kv.createPagedCache([page], { name: 'Ebene 3 \u{1F511}', docString: '' });
    expect([cache.name, cache.docString]).toEqual(['Ebene 3 \u{1F511}', '']);
    for (const other of [kv.parse(cache.serialize()), cache.quantize([0], int4AndUint4), cache.clone()])
      expect([other.name, other.docString]).toEqual([cache.name, cache.docString]);
    expect(kv.createPagedCache([page], { name: undefined } as never).name).toBeUndefined();
    expect(() => kv.createPagedCache([page], { name: 3 as never })).toThrow(TypeError);
    expect(() => kv.createPagedCache([page], { title: 'x' } as never)).toThrow(TypeError);
  });

  it('accepts an empty cache and an empty selection', () => {
    const empty = kv.createPagedCache();
    expect(empty.serialize()).toEqual(new Uint8Array(0));
    expect(kv.parse(new Uint8Array(0)).pages).toEqual([]);
    expect(empty.quantize([], int4AndUint4).pages).toEqual([]);
  });

  it('takes indices of any integer kind', () => {
    for (const indices of [[1], Int32Array.of(1), Uint8Array.of(1), BigInt64Array.of(1n), new Set([1]), [1n]]) {
      expect(seedCache().quantize(indices as number[], int4AndUint4).pages[1]!.key.kind).toBe('encoded');
    }
  });
});

describe('objects', () => {
  it('are refused after dispose', () => {
    const cache = seedCache();
    const { key } = cache.page(0);
    cache.dispose();
    cache.dispose();
    expect(cache.disposed).toBe(true);
    for (const use of [
      () => cache.pages,
      () => cache.serialize(),
      () => cache.clone(),
      () => cache.page(0),
      () => cache.quantize([0], int4AndUint4),
    ]) {
      expect(errorOf(use)).toMatchObject({
        code: 'ERR_DISPOSED',
        message: 'cache: has been disposed',
        argument: 'cache',
      });
    }
    expect(key.dequantize().data.length).toBe(8);
    key.dispose();
    expect(errorOf(() => key.dequantize()).code).toBe('ERR_DISPOSED');
    expect(errorOf(() => kv.createPagedCache([{ key, value: key }])).code).toBe('ERR_DISPOSED');
  });

  it('work with `using`', () => {
    const used = kv.usedBytes;
    const cache = seedCache();
    expect(kv.usedBytes).toBeGreaterThan(used);
    cache[Symbol.dispose]();
    expect(cache.disposed).toBe(true);
  });

  it('of another instance are recognised', async () => {
    const other = await loadHere();
    const cache = other.createPagedCache();
    const error = errorOf(() => kv.quantizePagedCache(cache, [], int4AndUint4));
    expect(error).toMatchObject({
      code: 'ERR_ARGUMENT',
      message: `cache: must be of this instance, got one of another load() (${backend})`,
      argument: 'cache',
    });
    const tensor = other.quantize(new Float32Array(4), 'f32');
    expect(errorOf(() => kv.dequantize(tensor)).argument).toBe('tensor');
    expect(errorOf(() => kv.createPagedCache([{ key: tensor, value: tensor }])).argument).toBe('pages[0].key');
  });

  it('of another class are a TypeError', () => {
    expect(() => kv.quantizePagedCache({} as PagedCache, [], int4AndUint4)).toThrow(
      new TypeError('cache: must be a PagedCache, got an Object'),
    );
    expect(() => kv.dequantize(seedCache() as never)).toThrow(
      new TypeError('tensor: must be a QuantizedTensor, got a PagedCache'),
    );
    expect(() => kv.parse('text' as never)).toThrow(
      new TypeError('bytes: must be an ArrayBuffer, a SharedArrayBuffer or a view of one, got "text"'),
    );
  });

  it('carry errors whose stack leads to the caller', () => {
    function callerOfKvPages(): void {
      kv.quantizePagedCache(seedCache(), [7], int4AndUint4);
    }
    const error = errorOf(callerOfKvPages);
    expect(error).toBeInstanceOf(KvPagesError);
    expect(error.name).toBe('KvPagesError');
    expect(error.stack).toContain('callerOfKvPages');
    expect(String(error)).toBe(`KvPagesError: ${error.message}`);
  });

  it('of pages share their memory', () => {
    const cache = seedCache();
    const used = kv.usedBytes;
    const page = cache.page(0);
    expect(page.key).toBeInstanceOf(QuantizedTensor);
    expect(kv.usedBytes).toBe(used);
    const again = kv.createPagedCache([{ key: page.key, value: page.value }]);
    expect(kv.usedBytes).toBe(used);
    cache.dispose();
    expect(hex(again.page(0).key.data)).toBe(hex(page.key.data));
  });
});

describe('serialize', () => {
  it('writes into memory of exactly its size, an offset view too', () => {
    const cache = seedCache();
    const bytes = cache.serialize();
    const room = new Uint8Array(bytes.length + 2).fill(0xa5);
    const out = room.subarray(1, -1);
    expect(cache.serialize({ out }).buffer).toBe(room.buffer);
    expect(hex(room)).toBe(`a5${hex(bytes)}a5`);
    for (const length of [0, bytes.length - 1, bytes.length + 1]) {
      const wrong = new Uint8Array(length).fill(0xa5);
      expect(errorOf(() => cache.serialize({ out: wrong }))).toMatchObject({
        code: 'ERR_BUFFER',
        expected: String(bytes.length),
      });
      expect(wrong.every((byte) => byte === 0xa5)).toBe(true);
    }
  });

  it('parses offset and shared views and leaves them alone', () => {
    const bytes = seedCache().serialize();
    const room = new Uint8Array(new SharedArrayBuffer(bytes.length + 3)).fill(0xff);
    room.set(bytes, 3);
    expect(hex(kv.parse(room.subarray(3)).serialize())).toBe(hex(bytes));
    expect(hex(room)).toBe(`ffffff${hex(bytes)}`);
    expect(kv.parse(bytes.buffer as ArrayBuffer).tokens).toBe(3);
  });

  it('refuses every truncation with a code and a position, or gives a cache that passes every check', () => {
    const bytes = kv.quantizePagedCache(seedCache(), [1], int4AndUint4).serialize();
    let refused = 0;
    for (let length = 1; length < bytes.length; ++length) {
      try {
        const cache = kv.parse(bytes.subarray(0, length));
        // A cut between two pages leaves a shorter, valid cache.
        expect(cache.quantize([], int4AndUint4).pages.length).toBeLessThan(2);
        cache.dispose();
      } catch (error) {
        expect(error).toBeInstanceOf(KvPagesError);
        expect((error as KvPagesError).byteOffset ?? (error as KvPagesError).page).toBeTypeOf('number');
        ++refused;
      }
    }
    expect(refused).toBeGreaterThan(bytes.length - 3);
  });
});

describe('parse', () => {
  it('refuses every flipped bit with a code and a position, or gives a cache that passes every check', () => {
    const bytes = kv.quantizePagedCache(seedCache(), [1], int4AndUint4).serialize();
    const before = hex(bytes);
    let [refused, accepted] = [0, 0];
    for (let bit = 0; bit < bytes.length * 8; ++bit) {
      bytes[bit >> 3]! ^= 1 << (bit & 7);
      try {
        const cache = kv.parse(bytes);
        // Passing every check: the operator and the writer take it, and what they write is read again.
        const again = kv.parse(cache.quantize([], int4AndUint4).serialize());
        expect(again.pages).toEqual(cache.pages);
        ++accepted;
        cache.dispose();
        again.dispose();
      } catch (error) {
        expect(error).toBeInstanceOf(KvPagesError);
        expect((error as KvPagesError).byteOffset).toBeTypeOf('number');
        expect((error as KvPagesError).message.length).toBeGreaterThan(10);
        ++refused;
      }
      bytes[bit >> 3]! ^= 1 << (bit & 7);
    }
    expect(hex(bytes)).toBe(before);
    expect(refused).toBeGreaterThan(300);
    expect(accepted).toBeGreaterThan(300);
  });
});

describe.skipIf(inBrowser)('the garbage collector', () => {
  it('gives back what nobody disposed', async () => {
    const { setFlagsFromString } = await import(/* @vite-ignore */ 'node:v8');
    const { runInNewContext } = await import(/* @vite-ignore */ 'node:vm');
    setFlagsFromString('--expose-gc');
    const collect = runInNewContext('gc') as () => void;
    const own = await loadHere();
    for (let i = 0; i < 50; ++i) own.quantize(new Float32Array(1000), 'f32');
    const kept = own.quantize(new Float32Array(1000), 'f32');
    expect(own.usedBytes).toBe(51 * 4000);
    for (let tries = 0; tries < 50 && own.usedBytes > 4000; ++tries) {
      collect();
      await new Promise((resolve) => setTimeout(resolve, 10));
    }
    expect(own.usedBytes).toBe(4000);
    expect(kept.dequantize().data.length).toBe(1000);
  });
});

describe('quantizePagedCacheAsync', () => {
  const all = { key: { type: 'int8', scale: 0.05 }, value: { type: 'uint4', scale: 0.5, zeroPoint: 8 } } as const;
  const source = () =>
    kv.splitIntoPages({ dims: [1, 2, 40, 8], data: noise(640) }, { dims: [1, 2, 40, 4], data: noise(320, 2) });

  it('gives what the synchronous form gives, with progress, and lets events run between pages', async () => {
    const cache = source();
    const progress: string[] = [];
    let ticks = 0;
    const timer = setInterval(() => ++ticks, 0);
    const result = await kv.quantizePagedCacheAsync(cache, [2, 0, 1], all, {
      onProgress: ({ done, total }) => progress.push(`${done}/${total}`),
    });
    clearInterval(timer);
    expect(progress).toEqual(['1/3', '2/3', '3/3']);
    expect(hex(result.serialize())).toBe(hex(cache.quantize([0, 1, 2], all).serialize()));
  });

  it('ends with ERR_ABORTED and changes nothing', async () => {
    // An instance of its own: in the shared one the garbage collector may free objects of other tests meanwhile.
    const own = await loadHere();
    const cache = own.parse(source().serialize());
    const before = hex(cache.serialize());
    const used = own.usedBytes;
    const controller = new AbortController();
    const work = own.quantizePagedCacheAsync(cache, [0, 1, 2], all, {
      signal: controller.signal,
      onProgress: ({ done }) => done === 2 && controller.abort(new Error('enough')),
    });
    await expect(work).rejects.toMatchObject({ name: 'KvPagesError', code: 'ERR_ABORTED', cause: new Error('enough') });
    expect(hex(cache.serialize())).toBe(before);
    expect(own.usedBytes).toBe(used);
    await expect(own.quantizePagedCacheAsync(cache, [0], all, { signal: AbortSignal.abort() })).rejects.toMatchObject({
      code: 'ERR_ABORTED',
    });
  });

  it('refuses a signal that is none', async () => {
    const cache = kv.splitIntoPages({ dims: [1, 1, 2, 2], data: noise(4) }, { dims: [1, 1, 2, 2], data: noise(4) });
    const to = { type: 'f16' } as const;
    await expect(kv.quantizePagedCacheAsync(cache, [], { key: to, value: to }, { signal: 5 as never })).rejects.toThrow(
      new TypeError('signal: must be an AbortSignal, got 5'),
    );
  });

  it('refuses what the synchronous form refuses, with the same text', async () => {
    const cache = source();
    for (const [indices, destinations] of [
      [[0, 0], all],
      [[0, 3], all],
      [[-1], all],
      [[0], { ...all, key: { type: 'int8', scale: 0 } }],
      [[], { ...all, value: { type: 'uint4', scale: 1, zeroPoint: 16 } }],
    ] as const) {
      const expected = errorOf(() => kv.quantizePagedCache(cache, indices, destinations));
      await expect(kv.quantizePagedCacheAsync(cache, indices, destinations)).rejects.toMatchObject({
        code: expected.code,
        message: expected.message,
      });
    }
  });
});

describe('splitIntoPages', () => {
  it('cuts tensors with several heads, bit for bit', () => {
    const key = { dims: [2, 3, 5, 4], data: noise(120) };
    const value = { type: 'bf16', dims: [2, 3, 5, 2], data: Uint16Array.from({ length: 60 }, (_, i) => i * 1000) };
    const cache = kv.splitIntoPages(key, value, { pageTokens: 2 });
    expect(cache.pages.map(({ start, length, capacity }) => [start, length, capacity])).toEqual([
      [0, 2, 2],
      [2, 2, 2],
      [4, 1, 1],
    ]);
    expect(cache.tokens).toBe(5);
    for (let index = 0; index < 3; ++index) {
      const page = cache.page(index);
      const tokens = page.length;
      expect(page.key.dims).toEqual([2, 3, tokens, 4]);
      for (let head = 0; head < 6; ++head) {
        const from = (head * 5 + page.start) * 4;
        expect(page.key.data.subarray(head * tokens * 4, (head + 1) * tokens * 4)).toEqual(
          key.data.subarray(from, from + tokens * 4),
        );
        const at = (head * 5 + page.start) * 2;
        expect(page.value.data.subarray(head * tokens * 2, (head + 1) * tokens * 2)).toEqual(
          value.data.subarray(at, at + tokens * 2),
        );
      }
    }
  });

  it('refuses what does not fit', () => {
    const x = { dims: [1, 1, 4, 2], data: new Float32Array(8) };
    expect(errorOf(() => kv.splitIntoPages(x, { dims: [1, 1, 3, 2], data: new Float32Array(6) }))).toMatchObject({
      code: 'ERR_SHAPE',
      argument: 'value',
    });
    expect(errorOf(() => kv.splitIntoPages({ dims: [1, 1, 5, 2], data: new Float32Array(8) }, x))).toMatchObject({
      code: 'ERR_SHAPE',
      argument: 'key',
    });
    expect(errorOf(() => kv.splitIntoPages(x, x, { pageTokens: 0 }))).toMatchObject({
      code: 'ERR_ARGUMENT',
      argument: 'pageTokens',
    });
    expect(() => kv.splitIntoPages(x, x, { pageTokens: 1.5 })).toThrow(TypeError);
    for (const dims of [[-4, -2], [1, 1, 2 ** 40, 0], [0, 1, 2 ** 40, 2], [1, 1, 1, 4, 2], [8]]) {
      const data = new Float32Array(dims.includes(0) ? 0 : 8);
      expect(errorOf(() => kv.splitIntoPages({ dims, data }, { dims, data }))).toMatchObject({ code: 'ERR_SHAPE', argument: 'key' });
    }
    expect(errorOf(() => kv.splitIntoPages(x, { ...x, type: 'f8' }))).toMatchObject({
      code: 'ERR_ARGUMENT',
      message: 'value: type must be f32, f16 or bf16, got f8',
      argument: 'value',
    });
  });

  it('refuses strides that are none, and more elements than there is memory for', () => {
    const x = { dims: [4, 2], data: new Float32Array(8) };
    expect(() => kv.splitIntoPages({ ...x, strides: [1.5, 1] }, x)).toThrow(new TypeError('key.strides[0]: must be an integer, got 1.5'));
    expect(errorOf(() => kv.splitIntoPages(x, { ...x, strides: [9, 1] }))).toMatchObject({ code: 'ERR_SHAPE', argument: 'value' });
    const spread = { dims: [2 ** 20, 2 ** 20, 2 ** 12], strides: [0, 0, 0], data: new Float32Array(1) };
    expect(errorOf(() => kv.splitIntoPages(spread, x))).toMatchObject({ code: 'ERR_MEMORY', argument: 'key' });
  });
});

describe('createPagedCache', () => {
  it('says which tensor it refuses', () => {
    const fit = { dims: [1, 1, 2, 2], data: new Float32Array(4) };
    const short = { dims: [1, 1, 2, 2], data: new Float32Array(3) };
    expect(errorOf(() => kv.createPagedCache([{ key: fit, value: fit }, { key: fit, value: short }]))).toMatchObject({
      code: 'ERR_SHAPE',
      argument: 'pages[1].value',
      message: expect.stringMatching(/^pages\[1\]\.value: dims \[1, 1, 2, 2\] need 4 f32 elements/),
    });
  });
});
