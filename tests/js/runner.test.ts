// SPDX-License-Identifier: Apache-2.0
// The split model against the whole one, and generation on its cache.
import { afterAll, beforeAll, describe, expect, test, vi } from 'vitest';
import type { KvPages, KvPagesError } from '../../js/index.js';
import { OrtPast } from '../../js/ort.js';
import type { Ort, OrtSession, OrtTensor } from '../../js/ort.js';
import { SplitModel } from '../../js/runner.js';
import type { GenerateOptions, SamplingOptions, SplitModelOptions } from '../../js/runner.js';
import { sampler } from '../../js/sampling.js';
import { inputsOf, loadOrt, oneThread, openWhole, piece, readConfig, someIds } from './models.js';
import { backend, loadHere, sha256 } from './support.js';

const dense = { key: 'f32', value: 'f32', hot: 'f32' } as const;

// Loading a model takes its time on a machine with other work.
vi.setConfig({ testTimeout: 60_000, hookTimeout: 60_000 });

let kv: KvPages;
let ort: Ort;
let whole: OrtSession;
let model: SplitModel;

beforeAll(async () => {
  kv = await loadHere();
  ort = await loadOrt();
  whole = await openWhole(ort);
  model = await SplitModel.create({ kv, ort, config: await readConfig(), pieces: piece, sessionOptions: oneThread, cacheOptions: dense });
});
afterAll(async () => {
  await model?.dispose();
  await whole?.release();
});

const logitsOf = (outputs: Record<string, OrtTensor>) => outputs['logits']!.data as Float32Array;
const largestDifference = (a: Float32Array, b: Float32Array) => a.reduce((most, x, i) => Math.max(most, Math.abs(x - b[i]!)), 0);

describe('logits', () => {
  test('are those of the whole model within 1e-4 on a dense f32 cache', async () => {
    const ids = someIds(60);
    const past = new OrtPast(ort, whole);
    const outputs = (await whole.run({ ...inputsOf(ort, ids, 0), ...past.feeds() })) as Record<string, OrtTensor>;
    using cache = model.createCache();
    const first = await model.forward(ids.slice(0, 40), { cache });
    const rest = await model.forward(ids.slice(40), { cache });
    const logits = Float32Array.from([...first, ...rest]);
    expect(logits.length).toBe(60 * 2048);
    expect(largestDifference(logits, logitsOf(outputs))).toBeLessThan(1e-4);
  });
});

describe('codes', () => {
  test('are attended as the whole model attends them thawed, within 1e-3, token by token', async () => {
    const past = new OrtPast(ort, whole);
    const rotated = { key: 'lm4/token/64/mse/e4m3+center+hadamard', value: 'lm4/token/64/mse/e4m3+hadamard' };
    for (const specs of [rotated, { preset: 'nvfp4' }]) {
      using cache = model.createCache({ ...specs, pageTokens: 16, keepFirst: 4, hot: 'f32' });
      await model.forward(someIds(68), { cache, logits: 'none' });
      for (let token = 0; token < 2; ++token) {
        // The same codes for both: what the next append would encode.
        cache.freeze();
        using before = cache.fork();
        const outputs = (await whole.run({ ...inputsOf(ort, [token], before.tokens), ...past.feeds(before) })) as Record<string, OrtTensor>;
        expect(largestDifference(await model.forward([token], { cache }), logitsOf(outputs))).toBeLessThan(1e-3);
      }
      expect(cache.stats().pages).toMatchObject({ kept: 6, frozen: 24, hot: 6 });
      expect(cache.stats().bits.frozen).toBeLessThan(4.7);
    }
  });
});

async function all<T>(tokens: AsyncIterable<T>): Promise<T[]> {
  const list: T[] = [];
  for await (const token of tokens) list.push(token);
  return list;
}

describe('generation', () => {
  test('is greedy, whether the prompt is computed at once or in parts', async () => {
    const texts: number[][] = [];
    for (const chunkTokens of [50, 7]) {
      using cache = model.createCache();
      texts.push(await all(model.generate(someIds(50), { cache, chunkTokens, maxNewTokens: 8, stop: [] })));
      expect(cache.tokens).toBe(57);
    }
    expect(texts[0]!.length).toBe(8);
    expect(texts[1]).toEqual(texts[0]);
  });

  test('lets timers run, also one that ends it', async () => {
    using cache = model.createCache({ preset: 'kv4' });
    const controller = new AbortController();
    setTimeout(() => controller.abort('late'), 20);
    const endless = all(model.generate([5], { cache, stop: [], maxNewTokens: 2000, signal: controller.signal }));
    await expect(endless).rejects.toMatchObject({ code: 'ERR_ABORTED', cause: 'late' });
  });
});

// What follows is JavaScript's own, the same everywhere.
if (backend === 'native') {
  describe('in detail', () => {
    test('logits of the last token are the last row', async () => {
      using all = model.createCache();
      using last = model.createCache();
      const rows = await model.forward(someIds(9), { cache: all });
      const row = await model.forward(someIds(9), { cache: last, logits: 'last' });
      expect(row.length).toBe(2048);
      expect(largestDifference(row, rows.subarray(8 * 2048))).toBeLessThan(1e-5);
    });
    test('goes on in a later call, from its last token', async () => {
      using once = model.createCache();
      using twice = model.createCache();
      const whole = await all(model.generate(someIds(9), { cache: once, maxNewTokens: 8, stop: [] }));
      const first = await all(model.generate(someIds(9), { cache: twice, maxNewTokens: 3, stop: [] }));
      const rest = await all(model.generate(first.slice(-1), { cache: twice, maxNewTokens: 5, stop: [] }));
      expect([...first, ...rest]).toEqual(whole);
    });

    test('samples, the same with the same seed', async () => {
      const draw = async (options: GenerateOptions) => {
        using cache = model.createCache({ preset: 'kv4' });
        return await all(model.generate(someIds(9), { cache, maxNewTokens: 6, stop: [], ...options }));
      };
      const sampled = await draw({ temperature: 2, topK: 5, seed: 11 });
      expect(await draw({ temperature: 2, topK: 5, seed: 11 })).toEqual(sampled);
      expect(await draw({ temperature: 2, topK: 5, seed: 12 })).not.toEqual(sampled);
    });

    test('draws tokens as often as they are likely', () => {
      // 0.5, 0.25, 0.125, ... of tokens 10, 11, 12, ...
      const logits = new Float32Array(100).fill(-Infinity);
      logits.set(Float32Array.from({ length: 20 }, (_, i) => -i * Math.LN2), 10);
      const shares = (options: SamplingOptions) => {
        const choose = sampler({ seed: 1, temperature: 1, ...options });
        const tokens = Array.from({ length: 1500 }, () => choose(logits));
        return [10, 11, 12, 13, 14].map((token) => tokens.filter((drawn) => drawn === token).length / 1500);
      };
      const near = (found: number[], wanted: number[]) => found.forEach((share, i) => expect(Math.abs(share - wanted[i]!)).toBeLessThan(wanted[i] === 0 ? 1e-9 : 0.05));
      near(shares({}), [0.5, 0.25, 0.125, 0.0625, 0.03125]);
      near(shares({ topP: 0.7 }), [2 / 3, 1 / 3, 0, 0, 0]);
      near(shares({ topP: 0.999 }), [0.5, 0.25, 0.125, 0.0625, 0.03125]);
      near(shares({ topK: 3, temperature: 0.5 }), [16 / 21, 4 / 21, 1 / 21, 0, 0]);
      near(shares({ topK: 4, topP: 0.75 }), [2 / 3, 1 / 3, 0, 0, 0]);
      expect([sampler({ temperature: 1, topP: 0 }), sampler({ temperature: 1, topK: 1 }), sampler({})].map((choose) => choose(logits))).toEqual([10, 10, 10]);
    });

    test('ends at a stop token, at the length, by break and by a signal', async () => {
      using cache = model.createCache();
      const force = (tokens: number[]) => (logits: Float32Array) => void logits.fill(0).fill(1, tokens[0], tokens.shift()! + 1);
      const tokens = model.generate([5], { cache, onLogits: force([7, 8, 0, 9]) });
      expect([await tokens.next(), await tokens.next(), await tokens.next()]).toEqual([
        { done: false, value: 7 },
        { done: false, value: 8 },
        { done: true, value: 'stop' },
      ]);
      expect(await model.generate([5], { cache, maxNewTokens: 0 }).next()).toEqual({ done: true, value: 'length' });
      expect(cache.tokens).toBe(3);
      for await (const token of model.generate([5], { cache, stop: [] })) {
        expect(token).toBeGreaterThanOrEqual(0);
        break;
      }
      expect(cache.tokens).toBe(4);
      const controller = new AbortController();
      const stopped = all(model.generate([5], { cache, stop: [], signal: controller.signal, onLogits: () => cache.tokens === 6 && controller.abort('enough') }));
      await expect(stopped).rejects.toMatchObject({ code: 'ERR_ABORTED', cause: 'enough' });
      expect(cache.tokens).toBe(6);
    });
  });

  describe('what cannot be', () => {
    const failure = (promise: Promise<unknown>) => promise.then(() => undefined, (error: unknown) => error as KvPagesError);

    test('tokens, caches and calls are refused by name, and the cache is as before', async () => {
      using cache = model.createCache({ preset: 'kv4' });
      await model.forward(someIds(20), { cache });
      const before = await sha256(cache.serialize());
      expect(await failure(model.forward([1, 2048], { cache }))).toMatchObject({ code: 'ERR_ARGUMENT', argument: 'tokenIds[1]', actual: '2048' });
      expect(await failure(model.forward([1.5], { cache }))).toMatchObject({ code: 'ERR_ARGUMENT', argument: 'tokenIds[0]' });
      expect(await failure(model.forward([], { cache }))).toMatchObject({ code: 'ERR_ARGUMENT', argument: 'tokenIds' });
      expect(await failure(model.generate([1], { cache, temperature: -1 }).next())).toMatchObject({ code: 'ERR_ARGUMENT', argument: 'temperature' });
      expect(await failure(model.generate([1], { cache, topP: 2 }).next())).toMatchObject({ code: 'ERR_ARGUMENT', argument: 'topP' });
      expect(await failure(model.generate([1], { cache, chunkTokens: 0 }).next())).toMatchObject({ code: 'ERR_ARGUMENT', argument: 'chunkTokens' });
      expect(await failure(model.generate([1, 2, 3], { cache, chunkTokens: 1, maxNewTokens: -1 }).next())).toMatchObject({ code: 'ERR_ARGUMENT', argument: 'maxNewTokens' });
      expect(await failure(model.generate([1, 2, 3], { cache, chunkTokens: 1, stop: [5, 1.5] }).next())).toMatchObject({ code: 'ERR_ARGUMENT', argument: 'stop[1]', actual: '1.5' });
      expect(await failure(model.generate([1], { cache, stop: 2 as never }).next())).toMatchObject({ name: 'TypeError', message: expect.stringMatching(/^stop: must be an array of integers, got /) as string });
      expect(await failure(model.generate([1], { cache, onLogits: 'log' as never }).next())).toMatchObject({ name: 'TypeError', message: expect.stringMatching(/^onLogits: must be a function/) as string });
      expect(cache.tokens).toBe(20);
      const [first, second] = [model.forward([1], { cache, logits: 'last' }), failure(model.forward([1], { cache }))];
      expect(await second).toMatchObject({ code: 'ERR_ARGUMENT', argument: 'cache' });
      await first;
      cache.truncate(20);
      expect(await sha256(cache.serialize())).toBe(before);
      using small = model.createCache({ preset: 'kv4', maxBytes: 30_000 });
      expect(await failure(model.forward(someIds(60), { cache: small }))).toMatchObject({ code: 'ERR_LIMIT' });
      expect(small.layers.map((_, layer) => small.tokensOf(layer))).toEqual(Array(6).fill(0));
      using wrong = kv.createCache({ layers: 6, kvHeads: 3, headDim: 64 });
      expect(await failure(model.forward([1], { cache: wrong }))).toMatchObject({ code: 'ERR_SHAPE', layer: 0 });
    });

    test('a forward that ends in the middle takes its tokens back', async () => {
      using cache = model.createCache({ preset: 'kv4' });
      await model.forward(someIds(20), { cache });
      const before = await sha256(cache.serialize());
      const { signal } = new AbortController();
      Object.defineProperties(signal, { aborted: { get: () => cache.tokensOf(2) > 20 }, reason: { value: 'no more' } });
      const running = failure(model.forward(someIds(9), { cache, signal }));
      expect(await running).toMatchObject({ code: 'ERR_ABORTED', cause: 'no more', message: 'aborted after 3 of 6 layers; the cache is as before' });
      expect(await sha256(cache.serialize())).toBe(before);
      expect(cache.layers.map((_, layer) => cache.tokensOf(layer))).toEqual(Array(6).fill(20));
    });

    test('pieces, configurations and specs that do not fit are refused by name', async () => {
      const config = await readConfig();
      const create = (options: Partial<SplitModelOptions>) => failure(SplitModel.create({ kv, ort, config, pieces: piece, sessionOptions: oneThread, ...options }));
      const used = kv.usedBytes;
      let loaded = 0;
      const counted = (index: number) => (++loaded, piece(index));
      expect(await create({ pieces: counted, cacheOptions: { preset: 'kv9' } })).toMatchObject({ code: 'ERR_SPEC' });
      expect(await create({ pieces: counted, config: { ...config, head_dim: 40 }, cacheOptions: { preset: 'mxfp4' } })).toMatchObject({ code: 'ERR_SPEC', side: 'key' });
      expect(await create({ pieces: [] })).toMatchObject({ code: 'ERR_MISMATCH', argument: 'pieces', expected: '7', actual: '0' });
      expect(await create({ config: { ...config, num_hidden_layers: 0 } })).toMatchObject({ code: 'ERR_ARGUMENT', argument: 'config.num_hidden_layers' });
      expect(loaded).toBe(0);
      expect(await create({ pieces: (index) => piece(index === 0 ? 6 : index) })).toMatchObject({ code: 'ERR_MISMATCH', argument: 'pieces[0]', actual: 'hidden, attention' });
      expect(await create({ config: { ...config, num_attention_heads: 8 } })).toMatchObject({ code: 'ERR_MISMATCH', argument: 'pieces[0].query' });
      const controller = new AbortController();
      const aborted = create({ signal: controller.signal, onProgress: ({ done }) => done === 2 && controller.abort() });
      expect(await aborted).toMatchObject({ code: 'ERR_ABORTED', message: 'aborted after 2 of 7 pieces' });
      expect(kv.usedBytes).toBe(used);
    });
  });
}
