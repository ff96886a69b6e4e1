// SPDX-License-Identifier: Apache-2.0
// Past and present of models of onnxruntime, to and from a cache.
import { afterAll, beforeAll, describe, expect, test, vi } from 'vitest';
import type { KvPages, ModelCache } from '../../js/index.js';
import { importOrt, OrtPast } from '../../js/ort.js';
import type { Ort, OrtPastOptions, OrtSession, OrtTensor } from '../../js/ort.js';
import { inputsOf, loadOrt, openWhole, someIds } from './models.js';
import { carrier } from './onnx-file.js';
import { backend, errorOf, loadHere, noise, sha256 } from './support.js';

const dense = { key: 'f32', value: 'f32', hot: 'f32' } as const;

// Loading a model takes its time on a machine with other work.
vi.setConfig({ testTimeout: 60_000, hookTimeout: 60_000 });

let kv: KvPages;
let ort: Ort;
let whole: OrtSession;
const sessions: OrtSession[] = [];

beforeAll(async () => {
  kv = await loadHere();
  ort = await loadOrt();
  whole = await openWhole(ort);
});
afterAll(() => Promise.all([whole, ...sessions].map((session) => session?.release())));

async function open(file: Uint8Array): Promise<OrtSession> {
  const session = await ort.InferenceSession.create(file);
  sessions.push(session);
  return session;
}

type Outputs = Record<string, OrtTensor>;
const same = (a: OrtTensor, b: OrtTensor) => (a.data as Float32Array).every((x, i) => x === (b.data as Float32Array)[i]);
const bytes = (data: unknown) => new Uint8Array((data as Float32Array).slice().buffer as ArrayBuffer);

describe('a language model', () => {
  test('has the shape that its file says', () => {
    const past = new OrtPast(ort, whole);
    expect(past.shape).toEqual({ layers: 6, kvHeads: [2, 2, 2, 2, 2, 2], headDim: Array(6).fill({ key: 64, value: 64 }) });
    expect(past.inputs.slice(0, 3)).toEqual(['past_key_values.0.key', 'past_key_values.0.value', 'past_key_values.1.key']);
    expect(past.fetches.slice(-2)).toEqual(['present.5.key', 'present.5.value']);
  });

  test('gives the same logits bit for bit whether its past goes through a dense f32 cache or not', async () => {
    const ids = someIds(24);
    const past = new OrtPast(ort, whole);
    using cache = kv.createCache({ ...past.shape, ...dense });
    let direct: Outputs = past.feeds();
    for (let at = 0; at < ids.length; at += at === 0 ? 20 : 1) {
      const inputs = inputsOf(ort, ids.slice(at, at === 0 ? 20 : at + 1), at);
      const fetches = ['logits', ...past.fetches];
      const through = (await whole.run({ ...inputs, ...past.feeds(cache) }, fetches)) as Outputs;
      const beside = (await whole.run({ ...inputs, ...direct }, fetches)) as Outputs;
      expect(same(through['logits']!, beside['logits']!)).toBe(true);
      direct = Object.fromEntries(past.inputs.map((name, i) => [name, beside[past.fetches[i]!]!]));
      expect(past.append(cache, through)).toBe(at === 0 ? 20 : 1);
    }
    expect(cache.tokens).toBe(24);
  });

  test('sees the codes where pages are encoded', async () => {
    const past = new OrtPast(ort, whole);
    using cache = kv.createCache({ ...past.shape, preset: 'int3-kivi' });
    past.append(cache, (await whole.run({ ...inputsOf(ort, someIds(40), 0), ...past.feeds(cache) })) as Outputs);
    expect(cache.stats().pages).toMatchObject({ kept: 6, frozen: 12, hot: 6 });
    const { data } = past.feeds(cache)['past_key_values.3.key']!;
    expect(await sha256(bytes(data))).toBe(await sha256(bytes(cache.read(3).key.data)));
    expect(cache.stats().key.rmse).toBeGreaterThan(0.01);
  });

});

describe('other models', () => {
  const halves = (count: number, seed: number) => Uint16Array.from(noise(count, seed), (x) => (x < 0 ? 0x8000 : 0) | (0x3000 + Math.floor(Math.abs(x) * 256)));
  /** Runs a model that carries its past on, with new tokens of its own making. */
  async function step(session: OrtSession, past: OrtPast, cache: ModelCache, tokens: number, seed: number): Promise<Outputs> {
    const fresh = session.inputNames.filter((name) => name.startsWith('new.'));
    const feeds = fresh.map((name, i) => [name, new ort.Tensor('float16', halves(2 * tokens * 8, seed + i), [1, 2, tokens, 8])] as const);
    return (await session.run({ ...past.feeds(cache), ...Object.fromEntries(feeds) })) as Outputs;
  }
  const bits = ({ data }: OrtTensor) => new Uint16Array((data as Uint16Array).buffer, (data as Uint16Array).byteOffset, (data as Uint16Array).length);

  test('f16, names by pattern, layers that are not numbered in a row', async () => {
    const session = await open(carrier({ layers: [1, 4, 10], past: (l, s) => `mem/${s[0]}/${l}/in`, present: (l, s) => `mem/${s[0]}/${l}/out`, type: 'float16' }));
    const past = new OrtPast(ort, session, { names: { past: 'mem/{side}/{layer}/in', present: 'mem/{side}/{layer}/out', key: 'k', value: 'v' } });
    expect(past.inputs).toEqual(['mem/k/1/in', 'mem/v/1/in', 'mem/k/4/in', 'mem/v/4/in', 'mem/k/10/in', 'mem/v/10/in']);
    using cache = kv.createCache({ ...past.shape, key: 'f16', value: 'f16', hot: 'f16' });
    past.append(cache, await step(session, past, cache, 5, 1));
    const outputs = await step(session, past, cache, 3, 9);
    past.append(cache, outputs);
    expect(cache.tokens).toBe(8);
    const feeds = past.feeds(cache);
    for (const [i, name] of past.inputs.entries()) expect(bits(feeds[name]!)).toEqual(bits(outputs[past.fetches[i]!]!));
  });
});

// What follows is JavaScript's own, the same everywhere.
if (backend === 'native') {
  describe('in detail', () => {
    test('leaves the cache as it was where a layer is refused', async () => {
      const past = new OrtPast(ort, whole);
      using cache = kv.createCache({ ...past.shape, preset: 'kv4' });
      const outputs = (await whole.run({ ...inputsOf(ort, someIds(4), 0), ...past.feeds(cache) })) as Outputs;
      past.append(cache, outputs);
      const before = await sha256(cache.serialize());
      const more = { ...((await whole.run({ ...inputsOf(ort, someIds(2), 4), ...past.feeds(cache) })) as Outputs) };
      const data = Float32Array.from(more['present.4.value']!.data as Float32Array);
      data[data.length - 1] = Number.NaN;
      more['present.4.value'] = new ort.Tensor('float32', data, [1, 2, 6, 64]);
      expect(errorOf(() => past.append(cache, more))).toMatchObject({ code: 'ERR_NON_FINITE', layer: 4, side: 'value' });
      expect(await sha256(cache.serialize())).toBe(before);
    });

    test('outputs that hold the new tokens alone', () => {
      const layer = (tokens: number, seed: number) => new ort.Tensor('float32', noise(2 * tokens * 8, seed), [1, 2, tokens, 8]);
      const session = { inputNames: ['past_key_0', 'past_value_0'], outputNames: ['present_key_0', 'present_value_0'] } as unknown as OrtSession;
      const past = new OrtPast(ort, session, { presentHolds: 'new', kvHeads: 2, headDim: 8 });
      using cache = kv.createCache({ ...past.shape, ...dense });
      for (const tokens of [3, 1, 1]) expect(past.append(cache, { present_key_0: layer(tokens, tokens), present_value_0: layer(tokens, 5) })).toBe(tokens);
      expect(cache.tokens).toBe(5);
    });

    const dots = (l: number, s: string) => `past_key_values.${l}.${s}`;
    const presents = (l: number, s: string) => `present.${l}.${s}`;
    test.each<[string, () => Uint8Array, OrtPastOptions, object]>([
      ['no cache', () => carrier({ layers: [0], past: (_, s) => (s === 'key' ? 'input_ids' : 'attention_mask'), present: (l, s) => `logits.${l}.${s}` }), {}, { code: 'ERR_UNSUPPORTED', argument: 'session', expected: 'past_key_values.{layer}.{side}', actual: 'input_ids, new.0.key, attention_mask, new.0.value' }],
      ['other names', () => carrier({ layers: [0], past: (l, s) => `memory.${s}.${l}`, present: presents }), {}, { code: 'ERR_UNSUPPORTED', actual: 'memory.key.0, new.0.key, memory.value.0, new.0.value' }],
      ['names that are not there', () => carrier({ layers: [0], past: dots, present: presents }), { names: { past: 'p.{layer}.{side}', present: 'q.{layer}.{side}' } }, { code: 'ERR_UNSUPPORTED', expected: 'p.{layer}.{side}' }],
      ['names without a layer', () => carrier({ layers: [0], past: dots, present: presents }), { names: { past: 'past', present: 'present' } }, { code: 'ERR_ARGUMENT', argument: 'names.past' }],
      ['an output missing', () => carrier({ layers: [0, 1], past: dots, present: presents, without: 'present.1.value' }), {}, { code: 'ERR_MISMATCH', layer: 1, side: 'value', expected: 'present.1.value' }],
      ['another type', () => carrier({ layers: [0], past: dots, present: presents, type: 'int8' }), {}, { code: 'ERR_UNSUPPORTED', layer: 0, side: 'key', expected: 'float32 float16', actual: 'int8' }],
      ['three dims', () => carrier({ layers: [0], past: dots, present: presents, shape: ['batch', 'past', 16] }), {}, { code: 'ERR_UNSUPPORTED', expected: '[batch, kv_heads, tokens, head_dim]', actual: '[batch, past, 16]' }],
      ['sizes that the file does not say', () => carrier({ layers: [0], past: dots, present: presents, shape: ['batch', 'heads', 'past', 'dim'] }), {}, { code: 'ERR_ARGUMENT', argument: 'kvHeads' }],
    ])('refused: %s', async (_, file, options, fields) => {
      const session = await open(file());
      const error = errorOf(() => new OrtPast(ort, session, options));
      expect(error).toMatchObject(fields);
      expect(error.message).toMatch(/: must (have|be given|hold)/);
    });

    test('refused: outputs and caches that are not the model’s', async () => {
      const session = await open(carrier({ layers: [0], past: dots, present: presents }));
      const past = new OrtPast(ort, session);
      using cache = kv.createCache({ ...past.shape, ...dense });
      const tensor = (dims: number[], type = 'float32') => new ort.Tensor(type, new Float32Array(dims.reduce((a, b) => a * b, 1)), dims);
      const key = tensor([1, 2, 3, 8]);
      const refused = (outputs: Outputs) => errorOf(() => past.append(cache, outputs));
      expect(refused({ 'present.0.key': key })).toMatchObject({ code: 'ERR_MISMATCH', layer: 0, side: 'value' });
      expect(refused({ 'present.0.key': key, 'present.0.value': tensor([2, 2, 3, 8]) })).toMatchObject({ code: 'ERR_SHAPE', side: 'value', actual: '[2, 2, 3, 8]' });
      expect(refused({ 'present.0.key': tensor([1, 3, 3, 8]), 'present.0.value': key })).toMatchObject({ code: 'ERR_SHAPE', side: 'key' });
      const gpu = { type: 'float32', dims: [1, 2, 3, 8], location: 'gpu-buffer', get data() { throw new Error('not here'); } };
      expect(refused({ 'present.0.key': gpu, 'present.0.value': key })).toMatchObject({ code: 'ERR_UNSUPPORTED', actual: 'gpu-buffer' });
      past.append(cache, { 'present.0.key': key, 'present.0.value': key });
      expect(refused({ 'present.0.key': tensor([1, 2, 2, 8]), 'present.0.value': key })).toMatchObject({ code: 'ERR_MISMATCH', actual: '2 tokens' });
      expect(cache.tokens).toBe(3);

      using other = kv.createCache({ layers: 2, kvHeads: 2, headDim: 8 });
      expect(errorOf(() => past.feeds(other))).toMatchObject({ code: 'ERR_MISMATCH', argument: 'cache', expected: '1 layers', actual: '2 layers' });
      using wider = kv.createCache({ layers: 1, kvHeads: 2, headDim: { key: 8, value: 16 } });
      expect(errorOf(() => past.feeds(wider))).toMatchObject({ code: 'ERR_MISMATCH', layer: 0, side: 'value' });
      // A block of 32 along a head_dim of 8.
      expect(errorOf(() => kv.createCache({ ...past.shape, preset: 'mxfp4' }))).toMatchObject({ code: 'ERR_SPEC', layer: 0, side: 'key' });
    });

    test('onnxruntime is taken from where it is installed, or the error says how to install it', async () => {
      expect((await importOrt()).Tensor).toBe(ort.Tensor);
      const error = await importOrt('onnxruntime-of-nobody').catch((thrown: unknown) => thrown);
      expect(error).toMatchObject({ code: 'ERR_BACKEND', argument: 'ort' });
      expect((error as Error).message).toContain('npm install onnxruntime-of-nobody');
    });
  });
}
