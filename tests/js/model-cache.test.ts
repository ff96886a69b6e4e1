// SPDX-License-Identifier: Apache-2.0
// ModelCache: append, freeze, attend, share, save and restore, and what it refuses.
import { beforeAll, describe, expect, it } from 'vitest';
import { KvPagesError, ModelCache } from '../../js/index.js';
import type { KvPages, ModelCacheOptions, TensorLike } from '../../js/index.js';
import { keyValueLayers, readSafetensors } from '../../js/safetensors.js';
import { backend, errorOf, inBrowser, loadHere, noise, readRepositoryFile, sha256 } from './support.js';

let kv: KvPages;
beforeAll(async () => {
  kv = await loadHere();
});

const shape = { layers: 2, kvHeads: 2, headDim: 16 } as const;
const options: ModelCacheOptions = { ...shape, key: 'lm4/token/64/mse/e4m3+center+hadamard', value: 'int4/token/16/mse/e4m3' };

/** Tokens of one layer, the same on every call with the same seed. */
function tokens(count: number, seed: number, heads = 2, width = 16): TensorLike {
  return { type: 'f32', dims: [heads, count, width], data: noise(heads * count * width, seed) };
}
function fill(cache: ModelCache, count: number, seed: number): void {
  for (let layer = 0; layer < cache.layers.length; ++layer) {
    cache.append(layer, tokens(count, seed + 2 * layer), tokens(count, seed + 2 * layer + 1));
  }
}
/** Everything that a cache holds, as text. */
const content = (cache: ModelCache) =>
  sha256(cache.serialize({ model: 'content' })).then((digest) => `${cache.tokens} ${digest}`);

async function failure(promise: Promise<unknown>): Promise<KvPagesError> {
  try {
    await promise;
  } catch (error) {
    expect(error).toBeInstanceOf(KvPagesError);
    return error as KvPagesError;
  }
  throw new Error('nothing was thrown');
}

describe('append and freeze', () => {
  it('keeps the first tokens, encodes full pages once and says what that lost', () => {
    using cache = kv.createCache(options);
    fill(cache, 100, 1);
    expect(cache.tokens).toBe(100);
    expect(cache.pages(0).every((page) => !page.key.frozen && page.key.format === 'bf16')).toBe(true);
    const { key, value } = cache.freeze();
    expect(key.pages).toBe(12);
    expect(key.elements).toBe(12 * 16 * 2 * 16);
    expect(key.rmse).toBeGreaterThan(0);
    expect(key.maxError).toBeGreaterThanOrEqual(key.rmse);
    expect(value.bytesBefore / value.bytesAfter).toBeGreaterThan(3);
    const pages = cache.pages(1);
    expect(pages.map((page) => [page.start, page.length])).toEqual([[0, 4], ...[0, 1, 2, 3, 4, 5].map((i) => [4 + 16 * i, 16])]);
    expect(pages.map((page) => page.key.frozen)).toEqual([false, true, true, true, true, true, true]);
    expect(pages[0]!.kept).toBe(true);
    expect(pages[1]!.key.format).toBe('lm4/token/16/mse/e4m3+center+hadamard');
    expect(cache.freeze().key.pages).toBe(0);
    const stats = cache.stats();
    expect(stats.pages).toEqual({ kept: 2, hot: 0, frozen: 12, shared: 0 });
    expect(stats.byteLength).toBe(Object.values(stats.bytes).reduce((sum, bytes) => sum + bytes, 0));
    expect(stats.key.rmse).toBeCloseTo(key.rmse, 12);
    expect(stats.bits.frozen).toBeGreaterThan(4);
    expect(kv.estimateBytes({ ...options, tokens: 100 }).byteLength).toBe(stats.byteLength);
  });

  it('takes all layers in one call, as one tensor, as a list, and strided', async () => {
    using one = kv.createCache(options);
    using list = kv.createCache(options);
    using strided = kv.createCache(options);
    const key = noise(2 * 2 * 5 * 16, 1);
    const value = noise(2 * 2 * 5 * 16, 2);
    const dims = [2, 2, 5, 16];
    one.appendAll({ dims, data: key }, { dims, data: value });
    const part = (data: Float32Array, layer: number) => ({ dims: [1, 2, 5, 16], data: data.subarray(layer * 160, layer * 160 + 160) });
    list.appendAll([part(key, 0), part(key, 1)], [part(value, 0), part(value, 1)]);
    // [layers, tokens, heads, head_dim] in memory, as some runtimes have it.
    const turned = (data: Float32Array) => {
      const out = new Float32Array(data.length);
      for (let l = 0; l < 2; ++l)
        for (let h = 0; h < 2; ++h)
          for (let t = 0; t < 5; ++t) out.set(data.subarray(((l * 2 + h) * 5 + t) * 16, ((l * 2 + h) * 5 + t) * 16 + 16), ((l * 5 + t) * 2 + h) * 16);
      return out;
    };
    const strides = [160, 16, 32, 1];
    strided.appendAll({ dims, strides, data: turned(key) }, { dims, strides, data: turned(value) });
    expect(await content(list)).toBe(await content(one));
    expect(await content(strided)).toBe(await content(one));
    // One tensor that is too long does not make up for one that is too short.
    const rest = (begin: number, end: number) => ({ dims: [2, 5, 16], data: key.subarray(begin, end) });
    expect(errorOf(() => list.appendAll([rest(0, 170), rest(170, 320)], [part(value, 0), part(value, 1)]))).toMatchObject({
      code: 'ERR_SHAPE',
      argument: 'keys[0]',
      expected: '640',
      actual: '680',
    });
    expect(await content(list)).toBe(await content(one));
    using single = kv.createCache({ ...options, layers: 1 });
    const alone = { dims: [2, 5, 16], data: turned(key).subarray(0, 160), strides: [16, 32, 1] };
    single.appendAll(alone, alone);
    expect(single.read(0).key).toEqual(one.read(0).key);
    const before = await content(one);
    // What a bf16 cannot hold is refused before pages that are due are encoded.
    using full = kv.createCache(options);
    fill(full, 100, 1);
    const held = await content(full);
    const huge = { dims: [2, 2, 5, 16], data: new Float32Array(320).fill(3.4e38) };
    expect(errorOf(() => full.appendAll({ dims, data: key }, huge)).message).toMatch(/^layer 0: values: must fit bf16/);
    expect(errorOf(() => full.append(1, { dims: [2, 10, 16], data: huge.data }, { dims: [2, 10, 16], data: key })).code).toBe('ERR_NON_FINITE');
    expect(await content(full)).toBe(held);
    const bad = key.slice();
    bad[300] = Number.NaN;
    expect(errorOf(() => one.appendAll({ dims, data: bad }, { dims, data: value }))).toMatchObject({ code: 'ERR_NON_FINITE', layer: 1, side: 'key' });
    expect(await content(one)).toBe(before);
  });

  it('takes a KIVI cache with its residual, other widths and specs per layer', () => {
    using cache = kv.createCache({
      layers: 2,
      kvHeads: [1, 2],
      headDim: [{ key: 8, value: 16 }, 32],
      key: ['kivi4', { spec: 'nvfp4', global: 'amax/448' }],
      value: 'kivi4',
      residual: 32,
      window: [0, 24],
      hot: 'f16',
    });
    expect(cache.pageTokens).toBe(32);
    expect(cache.layers[1]).toMatchObject({ kvHeads: 2, window: 24, key: { headDim: 32, spec: 'nvfp4', options: 'global=amax/448' } });
    cache.append(0, tokens(70, 1, 1, 8), tokens(70, 2, 1, 16));
    cache.append(1, tokens(70, 3, 2, 32), tokens(70, 4, 2, 32));
    cache.freeze();
    expect(cache.pages(0).map((page) => [page.key.frozen, page.value.frozen])).toEqual([
      [false, false],
      [true, true],
      [true, false],
      [false, false],
    ]);
  });

  it('gives kv3 the pages of 64 tokens that its scales need, or those that are asked for', () => {
    using cache = kv.createCache({ ...shape, headDim: 64, preset: 'kv3' });
    expect(cache.pageTokens).toBe(64);
    const wide = (count: number, seed: number) => tokens(count, seed, 2, 64);
    const append = (to: ModelCache, count: number, seed: number) => [0, 1].forEach((layer) => to.append(layer, wide(count, seed + layer), wide(count, seed + 7)));
    append(cache, 4 + 2 * 64 + 63, 1);
    cache.freeze();
    expect(cache.pages(1).map((page) => [page.start, page.length, page.key.format])).toEqual([
      [0, 4, 'bf16'],
      [4, 64, 'uint3/channel/64/mse/e4m3+hadamard'],
      [68, 64, 'uint3/channel/64/mse/e4m3+hadamard'],
      [132, 63, 'bf16'],
    ]);
    const { bits, pages } = cache.stats();
    expect(pages).toEqual({ kept: 2, hot: 2, frozen: 4, shared: 0 });
    const ofScale = 32 / (2 * 64 * 64); // one f32 for a side of a page
    expect(bits.key).toBeCloseTo(3 + 16 / 64 + ofScale, 12);
    expect(bits.value).toBeCloseTo(3 + 8 / 64 + ofScale, 12);
    expect(bits.frozen.toFixed(2)).toBe('3.19');

    using late = kv.createCache({ ...shape, headDim: 64, preset: 'kv3', keepFirst: 0, keepRecent: 16 });
    append(late, 79, 1);
    late.freeze();
    expect(late.pages(0).map((page) => [page.start, page.key.frozen])).toEqual([[0, false], [64, false]]);
    append(late, 1, 9);
    expect(late.freeze().value.pages).toBe(2);

    using short = kv.createCache({ ...shape, headDim: 64, preset: 'kv3', pageTokens: 16 });
    append(short, 4 + 32, 1);
    short.freeze();
    expect([short.pageTokens, short.stats().pages.frozen]).toEqual([16, 4]);
    expect(short.stats().bits.key).toBeCloseTo(3 + 16 / 16 + 4 * ofScale, 12); // a scale and a zero point for 16 tokens

    using narrow = kv.createCache({ ...shape, headDim: 40, preset: 'kv3' });
    expect(narrow.layers[0]).toMatchObject({ key: { spec: 'uint3/channel/64/mse/e4m3+hadamard' }, value: { spec: 'lm3/token/40/mse/e4m3+hadamard' } });
    [0, 1].forEach((layer) => narrow.append(layer, tokens(70, layer, 2, 40), tokens(70, 5, 2, 40)));
    expect(narrow.freeze().key.pages).toBe(2);
    expect(errorOf(() => kv.createCache({ ...shape, preset: 'kv3', residual: 32 })).message).toBe('residual: must be a multiple of pageTokens, 64, got 32');
  });

  it('shares, cuts, saves and goes on with pages of kv3, and with those that kv3 once was', async () => {
    const once = { key: 'lm3/token/64/mse/e4m3+center+hadamard', value: 'lm3/token/64/mse/e4m3+hadamard' };
    for (const [specs, pageTokens] of [[{ preset: 'kv3' }, 64], [once, 16]] as const) {
      using cache = kv.createCache({ ...shape, ...specs });
      fill(cache, 200, 1);
      cache.freeze();
      using branch = cache.fork();
      expect(branch.stats().pages.shared).toBe(branch.pages(0).length * 2);
      branch.truncate(150); // in a page of codes
      using same = kv.restore(branch.serialize());
      expect([same.pageTokens, same.tokens, same.layers[0]!.key.spec]).toEqual([pageTokens, 150, cache.layers[0]!.key.spec]);
      for (const each of [branch, same]) {
        fill(each, 60, 9);
        each.freeze();
      }
      expect(await content(same)).toBe(await content(branch));
      expect(cache.tokens).toBe(200);
    }
  });

  it('says how far an asynchronous freeze is, and stops', async () => {
    using cache = kv.createCache(options);
    fill(cache, 80, 1);
    const seen: number[] = [];
    const controller = new AbortController();
    const error = await failure(
      cache.freezeAsync({
        signal: controller.signal,
        onProgress: ({ done, total }) => {
          expect(total).toBe(2);
          seen.push(done);
          controller.abort(new Error('enough'));
        },
      }),
    );
    expect(error).toMatchObject({ code: 'ERR_ABORTED', cause: new Error('enough') });
    expect(seen).toEqual([1]);
    expect((await cache.freezeAsync()).key.pages).toBe(4);
  });
});

describe('attend', () => {
  /** Attention in float64 over what the cache thaws to, of one query that sees all, and the bounds of docs/attention.md. */
  function exact(cache: ModelCache, layer: number, queries: Float32Array, heads: number) {
    const { key, value } = cache.read(layer);
    const [, kvHeads, count, width] = key.dims;
    const { spec } = cache.layers[layer]!.key;
    const turned = { key: spec.includes('+hadamard'), value: cache.layers[layer]!.value.spec.includes('+hadamard') };
    const norm = (x: ArrayLike<number>, at: number) => Math.sqrt(Array.from({ length: width }, (_, d) => x[at + d]! ** 2).reduce((a, b) => a + b));
    const result = { out: [] as number[], lse: [] as number[], outBound: [] as number[], lseBound: [] as number[] };
    const u = 2 ** -24;
    for (let h = 0; h < heads; ++h) {
      const g = Math.floor((h * kvHeads) / heads);
      const rows = Array.from({ length: count }, (_, t) => (g * count + t) * width);
      const scores = rows.map((at) => {
        let score = 0;
        for (let d = 0; d < width; ++d) score += queries[h * width + d]! * key.data[at + d]!;
        return score / Math.sqrt(width);
      });
      const most = Math.max(...scores);
      const weights = scores.map((score) => Math.exp(score - most));
      const sum = weights.reduce((a, b) => a + b, 0);
      result.lse.push(most + Math.log(sum));
      for (let d = 0; d < width; ++d) {
        result.out.push(weights.reduce((a, weight, t) => a + (weight / sum) * value.data[rows[t]! + d]!, 0));
      }
      // |k| is at most |k - c| + |c|: this is no looser than what the text says.
      const q = norm(queries, h * width);
      const qMost = turned.key ? q : Math.max(...queries.subarray(h * width, (h + 1) * width).map(Math.abs));
      let relative = q * (width + 2 * (turned.key ? Math.log2(width) : 0) + 8) * u;
      if (!/^(u?int[23]|lm[23])/.test(spec)) relative += qMost * Math.sqrt(width) * 2 ** -15;
      if (spec.startsWith('lm4')) relative += q * 2 ** -10.5;
      const error = (Math.max(...rows.map((at) => norm(key.data, at))) / Math.sqrt(width)) * relative;
      const rest = (2 * count + 4 * (count / 256 + 2) + 2 * (turned.value ? Math.log2(width) : 0) + 128) * u;
      const largest = Math.max(...rows.map((at) => Math.max(...Array.from({ length: width }, (_, d) => Math.abs(value.data[at + d]!)))));
      const valueMost = turned.value ? Math.max(...rows.map((at) => norm(value.data, at))) : largest;
      result.outBound.push(Math.expm1(2 * error) * largest + rest * valueMost);
      result.lseBound.push(error + rest + 2 * u * Math.abs(result.lse[h]!));
    }
    return result;
  }

  it('is attention over the thawed cache within the stated bound, for every preset, on a real model', async () => {
    const { tensors } = readSafetensors(await readRepositoryFile('tests/data/smollm2-small.safetensors'));
    const past = keyValueLayers({ tensors });
    expect(past.map(({ layer }) => layer)).toEqual([0, 15, 29]);
    for (const { name } of kv.formats().presets) {
      using cache = kv.fromDense(past, { preset: name });
      cache.freeze();
      for (const [index, { layer }] of past.entries()) {
        // The last token's queries, as bf16 of the model.
        const bits = tensors.get(`query.${layer}`)!.data as Uint16Array;
        const query = new Float32Array(Uint32Array.from({ length: 9 * 64 }, (_, i) => bits[((i >> 6) * 83 + 82) * 64 + (i & 63)]! << 16).buffer);
        const { data, dims, lse } = cache.attend(index, { dims: [9, 1, 64], data: query }, { lse: true });
        expect(dims).toEqual([9, 1, 64]);
        const want = exact(cache, index, query, 9);
        expect(Math.max(...want.out.map((value, i) => Math.abs(value - data[i]!) / want.outBound[i >> 6]!)), name).toBeLessThan(1);
        expect(Math.max(...want.lse.map((value, i) => Math.abs(value - lse![i]!) / want.lseBound[i]!)), name).toBeLessThan(1);
      }
    }
  });

  it('takes caches in a batch, and memory for the result', () => {
    using a = kv.createCache(options);
    fill(a, 70, 1);
    using b = a.fork();
    fill(b, 3, 9);
    const query = noise(2 * 4 * 16, 7);
    const out = new Float32Array(2 * 4 * 16);
    const lse = new Float32Array(2 * 4);
    const both = kv.attendBatch([a, b], 1, { dims: [2, 4, 1, 16], data: query }, { out, lse });
    expect(both.data).toBe(out);
    expect(both.dims).toEqual([2, 4, 1, 16]);
    const single = b.attend(1, { dims: [4, 1, 16], data: query.subarray(64) }, { lse: true });
    expect(out.subarray(64)).toEqual(single.data);
    expect(lse.subarray(4)).toEqual(single.lse);
    expect(a.attend(1, { dims: [4, 1, 16], data: query.subarray(0, 64) }).data).toEqual(out.subarray(0, 64));
  });

  it('keeps to windows, sinks and sink logits', () => {
    using cache = kv.createCache({ ...options, key: 'f32', value: 'f32', hot: 'f32' });
    fill(cache, 40, 1);
    const query: TensorLike = { dims: [2, 1, 16], data: noise(32, 3) };
    const { value } = cache.read(0, { start: 39 });
    const last = cache.attend(0, query, { window: 1 });
    expect(last.data).toEqual(value.data);
    const first = cache.attend(0, query, { queryStart: 0 });
    expect(first.data).toEqual(cache.read(0, { end: 1 }).value.data);
    expect(cache.attend(0, query, { window: 1, sinks: 40, lse: true }).lse![0]).toBeCloseTo(cache.attend(0, query, { lse: true }).lse![0]!, 5);
    const drowned = cache.attend(0, query, { sinkLogits: [100, -100] });
    expect(Math.max(...drowned.data.subarray(0, 16).map(Math.abs))).toBeLessThan(1e-30);
    expect(drowned.data[20]).toBeCloseTo(cache.attend(0, query).data[20]!, 6);
  });
});

describe('sharing and cutting', () => {
  it('forks, truncates, drops, slices, and leaves the others alone', async () => {
    using cache = kv.createCache(options);
    fill(cache, 100, 1);
    cache.freeze();
    const before = await content(cache);
    const used = kv.usedBytes;
    using fork = cache.fork();
    expect(kv.usedBytes).toBe(used);
    expect(fork.stats().pages.shared).toBe(14);
    fork.truncate(50);
    fill(fork, 5, 50);
    expect(fork.tokens).toBe(55);
    expect(fork.pages(0).at(-2)).toMatchObject({ start: 36, length: 14, key: { frozen: true } });
    fork.dropBefore(40);
    expect(fork.pages(0).map((page) => page.start)).toEqual([0, 36, 50]);
    expect(errorOf(() => fork.truncate(20)).message).toBe('layer 0: tokens: tokens 4 to 35 have been dropped, got 20');
    using slice = cache.slice(20, 60);
    expect(slice.pages(1).map((page) => [page.start, page.length])).toEqual([[20, 16], [36, 16], [52, 8]]);
    expect(slice.read(0, { start: 30, end: 40 }).key.data).toEqual(cache.read(0, { start: 30, end: 40 }).key.data);
    expect(await content(cache)).toBe(before);
    // A layer's pages as onnx-light has them, and back.
    using paged = cache.toPaged(0);
    using other = cache.toPaged(1);
    expect(paged.pages.map((page) => page.length)).toEqual([4, 16, 16, 16, 16, 16, 16]);
    using back = kv.fromPaged([paged, other], options);
    expect(back.read(1).value.data).toEqual(cache.read(1).value.data);
    using parsed = kv.parse(paged.serialize());
    expect(parsed.tokens).toBe(100);
  });

  it('reads into memory of the caller, in any dense type', () => {
    using cache = kv.createCache({ ...options, hot: 'f32', preset: 'int8' });
    fill(cache, 6, 1);
    const key = new Float32Array(2 * 2 * 16);
    const result = cache.read(1, { start: 2, end: 4, out: { key } });
    expect(result.key.data).toBe(key);
    const source = noise(2 * 6 * 16, 3);
    expect(key[0]).toBe(source[2 * 16]);
    expect(key[32]).toBe(source[(6 + 2) * 16]);
    // Both or none.
    key.fill(7);
    const short = errorOf(() => cache.read(1, { start: 2, end: 4, out: { key, value: new Float32Array(3) } }));
    expect(short).toMatchObject({ code: 'ERR_BUFFER', argument: 'out.value', expected: '256', actual: '12' });
    expect(key.every((x) => x === 7)).toBe(true);
    expect(cache.read(0, { type: 'bfloat16' }).key).toMatchObject({ type: 'bf16', dims: [1, 2, 6, 16] });
    expect(cache.toDense({ start: 5 }).map((layer) => layer.value.dims)).toEqual([[1, 2, 1, 16], [1, 2, 1, 16]]);
  });

  it('gives everything back', async () => {
    const own = await loadHere();
    const cache = own.createCache(options);
    fill(cache, 40, 1);
    const fork = cache.fork();
    expect(own.usedBytes).toBeGreaterThan(0);
    cache.dispose();
    expect(errorOf(() => cache.append(0, tokens(1, 1), tokens(1, 1))).code).toBe('ERR_DISPOSED');
    expect(errorOf(() => cache.fork()).code).toBe('ERR_DISPOSED');
    fill(fork, 1, 2);
    expect(errorOf(() => kv.attendBatch([fork], 0, { dims: [1, 2, 1, 16], data: noise(32) })).message).toMatch(/must be of this instance/);
    fork.dispose();
    expect(own.usedBytes).toBe(0);
  });

  it.skipIf(backend === 'cuda')('lives in the host’s memory, and says so where a GPU is asked for', async () => {
    const cpu = await loadHere(); // never on a GPU
    using cache = cpu.createCache({ ...options, device: 'cpu' });
    fill(cache, 30, 3);
    expect([cache.device, cache.stats().device, cpu.device]).toEqual(['cpu', 'cpu', undefined]);
    using same = cache.to('cpu');
    expect(same.stats().pages.shared).toBe(same.pages(0).length * 2);
    expect(await content(same)).toBe(await content(cache));
    const file = cache.serialize();
    for (const refused of [
      () => cpu.createCache({ ...options, device: 'cuda' }),
      () => cache.to('cuda'),
      () => cpu.restore(file, { device: 'cuda' }),
      () => cpu.fromPaged([cache.toPaged(0), cache.toPaged(1)], { ...options, device: 'cuda' }),
    ]) {
      expect(errorOf(refused)).toMatchObject({ code: 'ERR_BACKEND', argument: 'device', expected: 'cpu', actual: 'cuda' });
    }
    expect(() => cache.to(1 as never)).toThrow(TypeError);
  });

  it('keeps to its limit and says so', () => {
    using cache = kv.createCache({ ...options, preset: 'int8', maxBytes: 20_000 });
    let error: KvPagesError | undefined;
    for (let i = 0; error === undefined; ++i) {
      try {
        cache.appendAll({ dims: [2, 2, 20, 16], data: noise(1280, i) }, { dims: [2, 2, 20, 16], data: noise(1280, i) });
      } catch (caught) {
        error = caught as KvPagesError;
      }
    }
    expect(error).toMatchObject({ code: 'ERR_LIMIT' });
    expect(cache.tokensOf(0)).toBe(cache.tokensOf(1));
    expect(cache.stats().byteLength).toBeLessThanOrEqual(20_000);
  });
});

describe('save and restore', () => {
  function example(): ModelCache {
    const cache = kv.createCache(options);
    fill(cache, 100, 1);
    cache.freeze();
    cache.truncate(90);
    fill(cache, 7, 5);
    return cache;
  }
  const ids = Uint32Array.from({ length: 97 }, (_, i) => i * 3);

  it('continues as if nothing had happened', async () => {
    using cache = example();
    const bytes = cache.serialize({ model: 'smollm2', tokenIds: ids });
    using restored = kv.restore(bytes, { ...shape, model: 'smollm2', key: options.key!, value: options.value! });
    expect(restored.model).toBe('smollm2');
    expect(restored.tokenIds).toEqual(ids);
    expect(restored.stats().key).toEqual(cache.stats().key);
    for (const each of [cache, restored]) {
      fill(each, 30, 70);
      each.freeze();
    }
    expect(await content(restored)).toBe(await content(cache));
  });

  it('has the same bytes on every backend', async () => {
    using cache = example();
    fill(cache, 20, 11);
    const bytes = cache.serialize({ model: 'same' });
    // Behind the header, which names the version that wrote it.
    const header = 16 + new DataView(bytes.buffer).getUint32(12, true) + 4;
    expect(await sha256(bytes.slice(header))).toBe('3e8b497b6310c018b291bfa78155a13af8da5965718ad06372f12787e8f487b5');
    // The file of version 1.
    const golden = await readRepositoryFile('tests/golden/envelope-v1.kvpages');
    using old = kv.restore(golden, { model: 'golden' });
    expect(old.tokens).toBe(89);
    expect(old.pages(0)[1]!.start).toBe(20);
  });

  it('goes through streams of the platform, page by page', async () => {
    using cache = example();
    const bytes = cache.serialize({ model: 'm' });
    const seen: number[] = [];
    const stream = cache.stream({ model: 'm', onProgress: ({ done, total }) => seen.push(done / total) });
    fill(cache, 9, 3); // nothing has been read yet
    const progress: number[] = [];
    using restored = await kv.restoreAsync(stream, { onProgress: ({ done, total }) => progress.push(done / total) });
    expect(seen.at(-1)).toBe(1);
    expect(progress.at(-1)).toBe(1);
    expect(restored.tokens).toBe(cache.tokens);
    const chunks: Uint8Array[] = [];
    await restored.writeTo(new WritableStream({ write: (chunk) => void chunks.push(chunk) }), { model: 'm' });
    expect(new Uint8Array(await new Blob(chunks as BlobPart[]).arrayBuffer())).toEqual(cache.serialize({ model: 'm' }));
    expect(await cache.serializeAsync({ model: 'm' })).toEqual(cache.serialize({ model: 'm' }));
    // Small portions, from any iterable.
    const portions = function* () {
      for (let at = 0; at < bytes.length; at += 1000) yield bytes.subarray(at, at + 1000);
    };
    using again = await kv.restoreAsync(portions());
    expect(again.tokens).toBe(97);
    using whole = await kv.restoreAsync(bytes.buffer);
    expect(whole.tokens).toBe(97);
  });

  it.skipIf(inBrowser)('goes through streams of Node', async () => {
    const { PassThrough, Readable } = await import('node:stream');
    using cache = example();
    const bytes = cache.serialize();
    const through = new PassThrough({ highWaterMark: 100 });
    const [restored] = await Promise.all([kv.restoreAsync(through), cache.writeTo(through).then(() => through.end())]);
    expect(restored.serialize()).toEqual(bytes);
    restored.dispose();
    using from = await kv.restoreAsync(Readable.from(cache.chunks()));
    expect(from.serialize()).toEqual(bytes);
  });

  it('stops when it is told to, and leaves nothing behind', async () => {
    using cache = example();
    const bytes = cache.serialize();
    const used = kv.usedBytes;
    const reason = new Error('enough');
    const controller = new AbortController();
    let cancelled: unknown;
    const waiting = new ReadableStream<Uint8Array>({
      start: (c) => c.enqueue(bytes.subarray(0, bytes.length / 2)),
      cancel: (why) => void (cancelled = why),
    });
    const restoring = failure(kv.restoreAsync(waiting, { signal: controller.signal }));
    setTimeout(() => controller.abort(reason), 20);
    expect(await restoring).toMatchObject({ code: 'ERR_ABORTED', cause: reason });
    await new Promise((resolve) => setTimeout(resolve, 0));
    expect(cancelled).toBe(reason);
    expect(kv.usedBytes).toBe(used);
    const writing = new AbortController();
    writing.abort(reason);
    expect(await failure(cache.serializeAsync({ signal: writing.signal }))).toMatchObject({ code: 'ERR_ABORTED', cause: reason });
    expect(await failure(kv.restoreAsync([bytes], { signal: writing.signal }))).toMatchObject({ code: 'ERR_ABORTED' });
    expect(cache.serialize()).toEqual(bytes);
  });

  it('stops in the middle of writing, and the stream hears of it', async () => {
    using cache = kv.createCache({ ...shape, key: 'f32', value: 'f32', hot: 'f32' });
    fill(cache, 5000, 1);
    const used = kv.usedBytes;
    const reason = new Error('enough');
    const controller = new AbortController();
    const seen: number[] = [];
    let ended: unknown;
    const sink = new WritableStream<Uint8Array>({ close: () => void (ended = 'closed'), abort: (why) => void (ended = why) });
    const onProgress = ({ done, total }: { done: number; total: number }) => {
      seen.push(done / total);
      controller.abort(reason);
    };
    const error = await failure(cache.writeTo(sink, { signal: controller.signal, onProgress }));
    expect(error).toMatchObject({ code: 'ERR_ABORTED', cause: reason });
    expect(ended).toBe(error);
    expect(seen.length).toBe(1);
    expect(seen[0]).toBeLessThan(1);
    expect(kv.usedBytes).toBe(used);
    // A sink that fails ends it as well.
    const broken = new WritableStream<Uint8Array>({ write: () => Promise.reject(reason) });
    await expect(cache.writeTo(broken)).rejects.toBe(reason);
    expect(kv.usedBytes).toBe(used);
    using restored = await kv.restoreAsync(cache.chunks());
    expect(restored.tokens).toBe(5000);
  });

  it('stops waiting for a sink that takes nothing any more', async () => {
    const own = await loadHere();
    using cache = own.createCache(options);
    fill(cache, 100, 1);
    const used = own.usedBytes;
    const reason = new Error('enough');
    const stuck = new Promise<void>(() => {});
    for (const sink of [new WritableStream<Uint8Array>({ write: () => stuck }), { write: () => false }]) {
      const controller = new AbortController();
      setTimeout(() => controller.abort(reason), 20);
      const error = await failure(cache.writeTo(sink, { signal: controller.signal }));
      expect(error).toMatchObject({ code: 'ERR_ABORTED', cause: reason });
      expect(own.usedBytes).toBe(used);
    }
    // One that closes by itself, or has done so.
    let close = () => {};
    const closing = { write: () => (setTimeout(() => close(), 5), true), once: (_: 'close', listener: () => void) => void (close = listener) };
    expect(await failure(cache.writeTo(closing))).toMatchObject({ code: 'ERR_ABORTED' });
    const lost = Object.assign(closing, { errored: reason });
    await expect(cache.writeTo(lost)).rejects.toBe(reason);
    const closed = new WritableStream<Uint8Array>();
    await closed.close();
    await expect(cache.writeTo(closed)).rejects.toThrow(new TypeError('sink: must not be closed'));
    for (const wrong of [
      () => cache.writeTo(new WritableStream(), { signal: 5 as never }),
      () => cache.freezeAsync({ signal: 5 as never }),
      () => own.restoreAsync([cache.serialize()], { signal: 5 as never }),
    ]) {
      await expect(wrong()).rejects.toThrow(new TypeError('signal: must be an AbortSignal, got 5'));
    }
    expect(own.usedBytes).toBe(used);
    await expect(cache.writeTo({} as never)).rejects.toThrow(new TypeError('sink: must be a WritableStream or a Node stream, got an Object'));
  });

  it.skipIf(inBrowser)('gives back what a generator that is left alone held', async () => {
    const { setFlagsFromString } = await import('node:v8');
    const { runInNewContext } = await import('node:vm');
    setFlagsFromString('--expose-gc');
    const collect = runInNewContext('gc') as () => void;
    const own = await loadHere();
    const begin = () => {
      using cache = own.createCache({ ...shape, key: 'f32', value: 'f32', hot: 'f32' });
      fill(cache, 5000, 1);
      expect(cache.chunks().next().done).toBe(false);
    };
    begin();
    expect(own.usedBytes).toBeGreaterThan(0);
    for (let tries = 0; tries < 50 && own.usedBytes > 0; ++tries) {
      collect();
      await new Promise((resolve) => setTimeout(resolve, 10));
    }
    expect(own.usedBytes).toBe(0);
  });

  it('refuses another model, shape or spec with both values, and any damage', () => {
    using cache = example();
    const bytes = cache.serialize({ model: 'smollm2' });
    expect(errorOf(() => kv.restore(bytes, { model: 'qwen' }))).toMatchObject({ code: 'ERR_MISMATCH', expected: 'qwen', actual: 'smollm2' });
    const expecting = { ...shape, key: options.key!, value: options.value! };
    expect(errorOf(() => kv.restore(bytes, { ...expecting, headDim: 32 }))).toMatchObject({ code: 'ERR_MISMATCH', expected: '32', actual: '16', layer: 0 });
    expect(errorOf(() => kv.restore(bytes, { ...expecting, value: 'int8/token' }))).toMatchObject({ code: 'ERR_MISMATCH', argument: 'value', layer: 0 });
    // What is not said is not asked for.
    for (const some of [shape, { ...shape, key: options.key! }, { ...shape, value: options.value! }]) {
      using restored = kv.restore(bytes, some);
      expect(restored.tokens).toBe(97);
    }
    expect(errorOf(() => kv.restore(bytes, { ...shape, preset: 'kv4' }))).toMatchObject({ code: 'ERR_MISMATCH', argument: 'value' });
    expect(errorOf(() => kv.restore(bytes, { ...shape, key: 'int8' }))).toMatchObject({ code: 'ERR_MISMATCH', argument: 'key' });
    expect(() => kv.restore(bytes, { layers: 2 })).toThrow(new TypeError('headDim: must be a number or { key, value }, got undefined'));
    const used = kv.usedBytes;
    for (let at = 0; at < bytes.length; at += 97) {
      const damaged = bytes.slice();
      damaged[at]! ^= 1 << at % 8;
      expect(errorOf(() => kv.restore(damaged)).byteOffset, `byte ${at}`).toBeTypeOf('number');
      expect(errorOf(() => kv.restore(bytes.subarray(0, at)))).toMatchObject({ code: 'ERR_CORRUPT', byteOffset: at });
    }
    expect(kv.usedBytes).toBe(used);
    expect(errorOf(() => kv.parse(bytes)).message).toMatch(/envelope, which restore reads/);
    expect(errorOf(() => kv.restore(new Uint8Array([10, 2, 8, 0, 0, 0, 0, 0, 0]))).message).toMatch(/PagedCacheProto is read by parse/);
  });
});

describe('refusals', () => {
  it('name the argument, the layer and both values', () => {
    using cache = kv.createCache(options);
    const one = tokens(1, 1);
    expect(errorOf(() => cache.append(2, one, one)).message).toBe('layer: must be 0 to 1, got 2');
    expect(errorOf(() => cache.append(1, one, tokens(2, 1)))).toMatchObject({ code: 'ERR_SHAPE', layer: 1, side: 'value' });
    expect(errorOf(() => cache.append(0.5, one, one)).code).toBe('ERR_ARGUMENT');
    cache.append(0, one, one);
    expect(errorOf(() => cache.serialize())).toMatchObject({ code: 'ERR_MISMATCH', layer: 1, expected: '1', actual: '0' });
    expect(errorOf(() => cache.attend(1, { dims: [2, 1, 16], data: noise(32) }))).toMatchObject({ code: 'ERR_MISMATCH', layer: 1 });
    expect(errorOf(() => cache.attend(0, { dims: [3, 1, 16], data: noise(48) })).code).toBe('ERR_SHAPE');
    expect(errorOf(() => cache.attend(0, { dims: [2, 1, 16], data: noise(32) }, { out: new Float32Array(31) })).code).toBe('ERR_BUFFER');
    expect(errorOf(() => cache.attend(0, { dims: [2, 1, 16], data: noise(32) }, { window: -1 }))).toMatchObject({ code: 'ERR_ARGUMENT', argument: 'window' });
    expect(errorOf(() => cache.attend(7, { dims: [2, 1, 16], data: noise(32) })).message).toBe('layer: must be 0 to 1, got 7');
    expect(errorOf(() => cache.truncate(2)).message).toBe('layer 0: tokens: must be 0 to the 1 tokens of the layer, got 2');
    expect(errorOf(() => cache.read(0, { end: 2 })).code).toBe('ERR_ARGUMENT');
    expect(errorOf(() => cache.read(0, { end: 1e12 })).message).toBe('end: must be an integer from 0 to 1, got 1e+12');
    expect(errorOf(() => cache.attend(0, { dims: [2, 1e9, 16], data: noise(32) })).code).toBe('ERR_SHAPE');
    expect(() => kv.fromPaged([cache as never], options)).toThrow(new TypeError('layers[0]: must be a PagedCache, got a ModelCache'));
    expect(errorOf(() => kv.createCache({ ...options, key: 'int9' }))).toMatchObject({ code: 'ERR_SPEC', layer: 0, side: 'key' });
    expect(errorOf(() => kv.createCache({ ...options, key: ['int8', 'int8', 'int8'] })).message).toBe(
      'key: needs one for all layers or one for each of the 2, got 3',
    );
    expect(errorOf(() => kv.createCache({ ...options, value: 'int8+center' })).code).toBe('ERR_SPEC');
    expect(errorOf(() => kv.createCache({ ...options, layers: 0 })).code).toBe('ERR_ARGUMENT');
    expect(() => kv.createCache({ ...options, kvHeds: 3 } as never)).toThrow(TypeError);
    expect(() => cache.append(0, 5 as never, one)).toThrow(new TypeError('keys: must be an object, got 5'));
    expect(() => cache.attend(0, one, { lse: 1 as never })).toThrow(TypeError);
    expect(() => cache.serialize({ tokenIds: [-1] })).toThrow(TypeError);
    expect(cache.tokensOf(1)).toBe(0);
  });

  it('know -1 and NaN from nothing given', () => {
    using cache = kv.createCache(options);
    fill(cache, 100, 1);
    const bad = { code: 'ERR_ARGUMENT', argument: 'layer', actual: '-1' };
    expect(errorOf(() => cache.freeze(-1))).toMatchObject(bad);
    expect(errorOf(() => cache.tokensOf(-1))).toMatchObject(bad);
    expect(errorOf(() => cache.dropBefore(50, { layer: -1 }))).toMatchObject(bad);
    expect(() => cache.freeze(Number.NaN)).toThrow(new TypeError('layer: must be a number, got NaN'));
    expect(() => cache.tokensOf(Number.NaN)).toThrow(TypeError);
    expect(() => cache.dropBefore(50, { layer: Number.NaN })).toThrow(TypeError);
    expect(cache.pages(0).length).toBe(7);
    expect(cache.pages(0).every((page) => !page.key.frozen)).toBe(true);
    const query: TensorLike = { dims: [2, 1, 16], data: noise(32) };
    for (const name of ['scale', 'queryStart', 'window']) {
      expect(() => cache.attend(0, query, { [name]: Number.NaN })).toThrow(new TypeError(`${name}: must be a number, got NaN`));
    }
    expect(errorOf(() => cache.attend(0, query, { lse: new Float32Array(0) }))).toMatchObject({ code: 'ERR_BUFFER', argument: 'lse', expected: '2' });
    expect(() => cache.attend(0, query, { sinkLogits: 5 as never })).toThrow(
      new TypeError('sinkLogits: must be a Float32Array or an array of numbers, got 5'),
    );
    expect(() => cache.attend(0, query, { sinkLogits: [1, '2'] as never })).toThrow(new TypeError('sinkLogits[1]: must be a number, got "2"'));
    // What f32 does not hold.
    expect(errorOf(() => cache.attend(0, query, { scale: 1e300 }))).toMatchObject({ code: 'ERR_ARGUMENT', argument: 'scale' });
    for (const softcap of [1e300, 1e-320, -1]) {
      expect(errorOf(() => cache.attend(0, query, { softcap }))).toMatchObject({ code: 'ERR_ARGUMENT', argument: 'softcap' });
    }
  });

  it('take a spec for one layer only, an option for one option', () => {
    expect(errorOf(() => kv.createCache({ ...options, key: 'int8/token\nint4/token' }))).toMatchObject({ code: 'ERR_SPEC', layer: 0, side: 'key' });
    const overflow = 'saturate,nonFinite=pass' as 'saturate';
    expect(() => kv.createCache({ ...options, key: { spec: 'int8/token', overflow } })).toThrow(TypeError);
    const pair = { key: tokens(3, 1), value: tokens(3, 2) };
    expect(errorOf(() => kv.fromDense([pair], options))).toMatchObject({ code: 'ERR_SHAPE', argument: 'past', expected: '2', actual: '1' });
  });
});
