// SPDX-License-Identifier: Apache-2.0
// The split model against the whole one, and generation on its cache.
import { afterAll, beforeAll, describe, expect, test, vi } from 'vitest';
import type { KvPages } from '../../js/index.js';
import { OrtPast } from '../../js/ort.js';
import type { Ort, OrtSession, OrtTensor } from '../../js/ort.js';
import { SplitModel } from '../../js/runner.js';
import { inputsOf, loadOrt, openWhole, piece, readConfig, someIds } from './models.js';
import { loadHere } from './support.js';

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
  model = await SplitModel.create({ kv, ort, config: await readConfig(), pieces: piece, cacheOptions: dense });
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
  test('of the last token are the last row', async () => {
    using all = model.createCache();
    using last = model.createCache();
    const rows = await model.forward(someIds(9), { cache: all });
    const row = await model.forward(someIds(9), { cache: last, logits: 'last' });
    expect(row.length).toBe(2048);
    expect(largestDifference(row, rows.subarray(8 * 2048))).toBeLessThan(1e-5);
  });
});

describe('generation', () => {
  test('goes on where it was, greedily, whether the prompt is computed at once or in parts', async () => {
    const texts: number[][] = [];
    for (const chunkTokens of [50, 7]) {
      using cache = model.createCache();
      const tokens: number[] = [];
      for await (const token of model.generate(someIds(50), { cache, chunkTokens, maxNewTokens: 8, stop: [] })) tokens.push(token);
      expect(cache.tokens).toBe(57);
      texts.push(tokens);
    }
    expect(texts[0]!.length).toBe(8);
    expect(texts[1]).toEqual(texts[0]);
  });
});
