// SPDX-License-Identifier: Apache-2.0
// The A/B study against what it stands for: kv.fidelity, token by token reading, the other engine.
import { afterAll, beforeAll, describe, expect, test } from 'vitest';
import type { KvPages } from '../../js/index.js';
import { attendEngine, parseScheme, runStudy, thawEngine } from '../../js/study.js';
import type { Engine, StudyOptions } from '../../js/study.js';
import { Reference } from '../../js/study/measure.js';
import { readTexts } from '../../js/study/tokens.js';
import { loadOrt, piece, readConfig, someIds } from './models.js';
import { halfModel } from './onnx-file.js';
import { backend, loadHere, readRepositoryFile } from './support.js';

let kv: KvPages;
let thaw: Engine;
/** In pieces beside the addon; loading both models in WebAssembly takes longer than all tests here. */
let attend: Engine;

beforeAll(async () => {
  kv = await loadHere();
  const ort = await loadOrt();
  // Threads of onnxruntime spin while they wait: more than one takes the processor from whatever else runs.
  const sessionOptions = { intraOpNumThreads: 1 };
  const whole = await readRepositoryFile('tests/data/models/tiny/onnx/model_int8.onnx');
  thaw = thawEngine(kv, ort, await ort.InferenceSession.create(whole, sessionOptions));
  attend = backend === 'native' ? await attendEngine({ kv, ort, config: await readConfig(), pieces: piece, sessionOptions }) : thaw;
}, 60_000);
afterAll(async () => {
  await thaw.dispose();
  if (attend !== thaw) await attend.dispose();
});

const study = (engine: Engine, schemes: readonly string[], more: Partial<StudyOptions> = {}) =>
  runStudy({
    kv,
    engine,
    schemes: schemes.map((scheme) => parseScheme(kv, scheme)),
    sequences: [{ name: 'text', ids: someIds(20), generate: 0 }],
    ...more,
  });

describe('measures', () => {
  test('are those of kv.fidelity, and zero for equal rows', () => {
    const vocabulary = 50;
    const rows = (seed: number) => Float32Array.from({ length: 8 * vocabulary }, (_, i) => 4 * Math.sin(i * seed));
    const [a, b] = [rows(1.7), rows(1.71)];
    const reference = new Reference(a, vocabulary);
    const compared = Array.from({ length: 8 }, (_, row) => reference.compare(row, b.subarray(row * vocabulary, (row + 1) * vocabulary), 3));
    const whole = kv.fidelity({ type: 'f32', dims: [8, vocabulary], data: a }, { type: 'f32', dims: [8, vocabulary], data: b });
    expect(compared.reduce((sum, { kl }) => sum + kl, 0) / 8).toBeCloseTo(whole.meanKl, 12);
    expect(compared.filter(({ same }) => same).length / 8).toBe(whole.top1);
    expect(Math.max(...compared.map(({ kl }) => kl))).toBeCloseTo(whole.maxKl, 12);
    const sum = [...b.subarray(0, vocabulary)].reduce((total, x) => total + Math.exp(x), 0);
    expect(compared[0]!.nll).toBeCloseTo(Math.log(sum) - b[3]!, 12);
    expect(reference.compare(2, a.subarray(2 * vocabulary, 3 * vocabulary), 0)).toMatchObject({ kl: 0, same: true });
  });
});

describe('study', { timeout: 60_000 }, () => {
  test('a dense scheme loses nothing, bf16 nearly nothing, four bits something', async () => {
    const text = (count: number) => ({ sequences: [{ name: 'text', ids: someIds(count), generate: 0 }] });
    const { schemes, baseline } = await study(thaw, ['f32', 'bf16', 'nvfp4', 'kv4'], text(72));
    const [f32, bf16, nvfp4, kv4] = schemes;
    expect(f32).toMatchObject({ kl: 0, maxKl: 0, top1: 1, keyRmse: 0, kept: 0, bits: 32, positions: 55 });
    expect(bf16!.kl).toBeGreaterThan(0);
    expect(bf16!.kl).toBeLessThan(1e-4);
    expect(bf16!.top1).toBeGreaterThan(0.98);
    expect(nvfp4!.kl).toBeGreaterThan(10 * bf16!.kl);
    expect(nvfp4).toMatchObject({ kept: 0, pageTokens: 16, key: 'nvfp4' });
    expect(nvfp4!.ratio.study).toBeCloseTo(3.556, 3);
    expect(nvfp4!.bits).toBeGreaterThan(4.5);
    expect(kv4!.kept).toBe(4);
    expect(kv4!.klBelowBaseline).toBeCloseTo(1 - kv4!.kl / nvfp4!.kl, 12);
    expect(baseline).toBe('nvfp4');
    const over = await study(attend, ['f32', 'bf16'], text(36));
    expect(over.schemes[0]).toMatchObject({ kl: 0, maxKl: 0, top1: 1, positions: 19 });
    expect(over.schemes[1]!.kl).toBeLessThan(1e-4);
  });

  // Of the second, a page of 16 is encoded when its last token is 6 behind the end, in the middle of the next page.
  test.each(['int4-kivi@4', 'int4-kivi@4+6'])('a chunk at a time is token by token: %s', async (name) => {
    const engine = attend;
    const ids = someIds(36);
    const { schemes } = await study(engine, [name], { sequences: [{ name: 'text', ids, generate: 0 }] });
    using dense = engine.createCache({ preset: 'f32', hot: 'f32', keepFirst: 0 });
    using cache = engine.createCache(parseScheme(kv, name).cache);
    let sum = 0;
    for (const [position, id] of ids.slice(0, -1).entries()) {
      const reference = new Reference(await engine.forward(dense, [id], 'all'), 2048);
      const { kl } = reference.compare(0, await engine.forward(cache, [id], 'all'), 0);
      if (position >= 16) sum += kl;
    }
    // Products of one row and of sixteen are rounded differently, and a rounding may move a code.
    expect(Math.abs(Math.log(schemes[0]!.kl / (sum / 19)))).toBeLessThan(0.2);
    expect(schemes[0]).toMatchObject({ kept: 4, recent: cache.keepRecent });
  });

  test('after a prompt, the first token sees the prompt dense, later ones its pages encoded', async () => {
    const engine = thaw;
    const { sequences, schemes } = await study(engine, ['int4/token/16', 'kivi4'], { sequences: [{ name: 'prompt', ids: someIds(40), generate: 12 }] });
    expect(sequences).toEqual([{ name: 'prompt', kind: 'prompt', tokens: 52, written: 12, positions: 11 }]);
    expect(schemes.map(({ positions, pageTokens }) => [positions, pageTokens])).toEqual([[11, 16], [11, 32]]);
    expect(schemes[0]!.perplexity).toBeUndefined();
    expect(schemes[0]!.byLength).toMatchObject([{ from: 0, to: 128, positions: 11 }]);
    expect(schemes[0]!.byLayer).toHaveLength(6);
  });

  test('of a model in f16: a dense scheme loses nothing, codes something', async () => {
    const ort = await loadOrt();
    const engine = thawEngine(kv, ort, await ort.InferenceSession.create(halfModel(), { intraOpNumThreads: 1 }));
    const ids = someIds(70).map((id) => id % 8);
    const { schemes, sequences } = await study(engine, ['f32', 'f16', 'int4/token'], { sequences: [{ name: 'text', ids, generate: 0 }] });
    expect(engine.shape).toEqual({ layers: 1, kvHeads: [2], headDim: [{ key: 8, value: 8 }] });
    expect(schemes.slice(0, 2)).toMatchObject([{ kl: 0, top1: 1 }, { kl: 0, top1: 1 }]);
    expect(schemes[2]!.kl).toBeGreaterThan(1e-7);
    expect(sequences[0]!.perplexity).toBeGreaterThan(1);
    // 69 tokens of keys and values, as past and as present without the last one.
    expect(engine.denseBytes).toBe(2 * 2 * (64 + 69) * 2 * 8);
    await engine.dispose();
  });

  test('refuses what it cannot measure, before anything runs', async () => {
    const engine = attend;
    await expect(study(engine, ['int4/token/16'], { sequences: [{ name: 'short', ids: someIds(16), generate: 0 }] })).rejects.toMatchObject({ code: 'ERR_ARGUMENT', argument: 'short' });
    const far: Engine = { ...thaw, forward: () => Promise.reject(new Error('ran')) };
    await expect(study(far, ['nvfp4'], { sequences: [{ name: 'long', ids: someIds(40), generate: 0 }, { name: 'short', ids: [1], generate: 0 }] })).rejects.toMatchObject({ code: 'ERR_ARGUMENT', argument: 'short', actual: '1' });
    await expect(study(engine, ['bf16', 'int5'])).rejects.toMatchObject({ code: 'ERR_SPEC' });
    await expect(study(engine, ['bf16', 'nvfp4'], { sequences: [] })).rejects.toMatchObject({ code: 'ERR_ARGUMENT' });
    await expect(study(engine, ['nvfp4'], { signal: AbortSignal.abort() })).rejects.toThrow(/abort/i);
    const narrow: Engine = { ...thaw, createCache: (options) => kv.createCache({ ...options, layers: 1, kvHeads: 1, headDim: 24 }), forward: () => Promise.reject(new Error('ran')) };
    await expect(study(narrow, ['int4/channel/16', 'nvfp4'])).rejects.toMatchObject({ code: 'ERR_SPEC', message: expect.stringMatching(/^scheme nvfp4: /) as string });
    expect(() => parseScheme(kv, 'a@b')).toThrow(/NAME=/);
  });
});

describe('texts of a JSON file', () => {
  test('are strings, chats and token ids, alone or in lists', () => {
    const chat = [{ role: 'user', content: 'Hi' }];
    expect(readTexts('a', 'f')).toEqual(['a']);
    expect(readTexts(chat, 'f')).toEqual([chat]);
    expect(readTexts([1, 2], 'f')).toEqual([[1, 2]]);
    expect(readTexts([{ tokens: [1] }, { text: 'a' }, { messages: chat }, chat, 'b'], 'f')).toEqual([[1], 'a', chat, chat, 'b']);
    for (const bad of [{}, [], [1, -1], ['a', 3], null]) expect(() => readTexts(bad, 'f')).toThrow(/^f: must hold texts/);
  });
});
