// SPDX-License-Identifier: Apache-2.0
// transformers.js itself generates on our cache: with its own onnxruntime, in Node and in Chromium.
import { AutoModelForCausalLM, AutoTokenizer, DynamicCache, env, Tensor, TextGenerationPipeline } from '@huggingface/transformers';
import type { PreTrainedModel, PreTrainedTokenizer, TextGenerationOutput } from '@huggingface/transformers';
import { afterAll, beforeAll, describe, expect, test, vi } from 'vitest';
import type { CacheStats, KvPages } from '../../js/index.js';
import { QuantizedCache } from '../../js/transformers.js';
import { backend, errorOf, inBrowser, loadHere } from './support.js';

const prompt = 'It was in the month of June that Miss Elliot had been in the country. She had been there a fortnight, when her father,';
/** Four times that: seven full pages. */
const text = Array(4).fill(prompt).join(' ');
const dense = { key: 'f32', value: 'f32', hot: 'f32' } as const;

// Loading a model takes its time on a machine with other work.
vi.setConfig({ testTimeout: 60_000, hookTimeout: 60_000 });

let kv: KvPages;
let model: PreTrainedModel;
let tokenizer: PreTrainedTokenizer;

beforeAll(async () => {
  kv = await loadHere();
  env.allowLocalModels = true;
  env.allowRemoteModels = false;
  env.useBrowserCache = false;
  env.useFSCache = false;
  env.useWasmCache = false;
  env.localModelPath = inBrowser ? '/tests/data/models/' : new URL('../data/models/', import.meta.url).pathname;
  const { wasm } = env.backends.onnx;
  if (inBrowser && wasm !== undefined) {
    wasm.wasmPaths = '/node_modules/@huggingface/transformers/node_modules/onnxruntime-web/dist/';
    wasm.numThreads = 1;
  }
  tokenizer = await AutoTokenizer.from_pretrained('tiny');
  model = await AutoModelForCausalLM.from_pretrained('tiny', { dtype: 'int8', device: inBrowser ? 'wasm' : 'cpu' });
});
afterAll(() => model?.dispose());

async function generate(past_key_values: DynamicCache | null, words: string, max_new_tokens: number): Promise<number[]> {
  const output = await model.generate({ ...tokenizer(words), past_key_values, max_new_tokens, do_sample: false });
  return Array.from((output as Tensor).data as BigInt64Array, Number);
}

describe('generate', () => {
  test('gives the tokens of its own cache where ours is dense f32, also when a second call goes on', async () => {
    const own = new DynamicCache();
    const ours = new QuantizedCache(kv, dense);
    const first = await generate(own, prompt, 16);
    expect(await generate(ours, prompt, 16)).toEqual(first);
    expect(ours.get_seq_length()).toBe(first.length - 1);
    const longer = `${tokenizer.decode(first)} and his wife`;
    const second = await generate(own, longer, 8);
    expect(await generate(ours, longer, 8)).toEqual(second);
    expect(ours.get_seq_length()).toBe(second.length - 1);
    expect(ours.get_seq_length()).toBe(own.get_seq_length());
    await ours.dispose();
  });

  test('runs on codes, and holds the bytes that were estimated', async () => {
    const before = kv.usedBytes;
    const coarse = new QuantizedCache(kv, { key: 'int2/tensor', value: 'int2/tensor', keepFirst: 0 });
    const specs = { key: 'lm4/token/64/mse/e4m3+center+hadamard', value: 'lm4/token/64/mse/e4m3+hadamard' };
    const fine = new QuantizedCache(kv, specs);
    const sequence = await generate(fine, text, 12);
    expect(sequence).not.toEqual(await generate(coarse, text, 12));
    expect((await generate(null, text, 12)).slice(0, 6)).toEqual(sequence.slice(0, 6));

    const tokens = sequence.length - 1;
    const { layers } = fine.cache!;
    const estimate = kv.estimateBytes({ layers: 6, kvHeads: 2, headDim: 64, ...specs, tokens });
    const stats = fine.stats();
    expect(stats.byteLength).toBe(estimate.byteLength);
    expect(stats.bytes).toEqual(estimate.bytes);
    // The core's own count of what it took, which leaves g (4 bytes a page) out.
    const g = (stats: CacheStats) => stats.bytes.globals;
    expect(kv.usedBytes - before).toBe(stats.byteLength - g(stats) + coarse.stats().byteLength - g(coarse.stats()));
    // Of codes 4 bits, of a scale for 64 of them 1 byte, of g 4 bytes a page, of centres 2 bytes a channel; dense are the kept tokens
    // and the page that is not full, whose room is taken.
    const frozen = Math.floor((tokens - 4) / 16) * 16;
    const elements = 2 * layers.length * 2 * 64;
    expect(stats.bits.frozen).toBeCloseTo(4 + 8 / 64 + 32 / (16 * 2 * 64) + (16 * layers.length * 2 * 64) / (elements * frozen), 9);
    const bytes = (elements * (4 + 16) * 16 + elements * frozen * stats.bits.frozen) / 8;
    expect(stats.byteLength).toBeCloseTo(bytes, 6);
    // Of the f32 tensors that transformers.js keeps itself.
    expect((elements * tokens * 4) / stats.byteLength).toBeGreaterThan(5);
    await Promise.all([fine.dispose(), coarse.dispose()]);
    expect(kv.usedBytes).toBe(before);
  });

});

// What follows is JavaScript's own, the same everywhere.
if (backend === 'native') {
  describe('generate, in detail', () => {
    test('goes on from a fork, from a shorter past and from a saved cache as from the first', async () => {
      const past = new QuantizedCache(kv, { preset: 'int4-kivi' });
      const begun = await generate(past, prompt, 6);
      const saved = past.cache!.serialize();
      const branch = past.fork();
      const continued = `${tokenizer.decode(begun)} and`;
      const once = await generate(past, continued, 6);
      expect(await generate(branch, continued, 6)).toEqual(once);
      past.truncate(begun.length - 1);
      expect(await generate(past, continued, 6)).toEqual(once);
      expect(await generate(QuantizedCache.from(kv, kv.restore(saved), { Tensor }), continued, 6)).toEqual(once);
    });

    test('also through a pipeline', async () => {
      const past_key_values = new QuantizedCache(kv, dense);
      const writer = new TextGenerationPipeline({ task: 'text-generation', model, tokenizer });
      const options = { max_new_tokens: 4, do_sample: false, past_key_values };
      const [written] = (await writer(prompt, options)) as TextGenerationOutput;
      const own = (await writer(prompt, { max_new_tokens: 4, do_sample: false })) as TextGenerationOutput;
      expect(written).toEqual(own[0]);
      expect(past_key_values.get_seq_length()).toBeGreaterThan(30);
    });
  });

  describe('what cannot be', () => {
    const entry = (dims: number[], type: 'float32' | 'int8' = 'float32') => {
      const size = dims.reduce((a, b) => a * b, 1);
      return new Tensor(type, type === 'int8' ? new Int8Array(size) : new Float32Array(size), dims);
    };
    const layer = (key: Tensor, value = key) => ({ 'past_key_values.0.key': key, 'past_key_values.0.value': value });

    test('is a named error, and the cache is as before', async () => {
      const past = new QuantizedCache(kv, { preset: 'mxfp4' });
      const refused = (entries: Record<string, Tensor>) => errorOf(() => past.update(entries));
      expect(refused(layer(entry([2, 2, 3, 64])))).toMatchObject({ code: 'ERR_UNSUPPORTED', argument: 'past_key_values.0.key', actual: '2' });
      expect(refused(layer(entry([1, 2, 3, 64], 'int8')))).toMatchObject({ code: 'ERR_UNSUPPORTED', actual: 'int8' });
      expect(refused({ 'past_key_values.0.key': entry([1, 2, 3, 64]) })).toMatchObject({ code: 'ERR_MISMATCH', layer: 0 });
      // Blocks of 32 along a head_dim of 40.
      expect(refused(layer(entry([1, 2, 3, 40])))).toMatchObject({ code: 'ERR_SPEC', layer: 0, side: 'key' });
      expect(errorOf(() => past.stats())).toMatchObject({ code: 'ERR_ARGUMENT', argument: 'cache' });
      expect(Object.keys(past)).toEqual([]);

      past.update(layer(entry([1, 2, 3, 64])));
      expect(refused(layer(entry([1, 2, 4, 64]), entry([1, 2, 4, 32])))).toMatchObject({ code: 'ERR_SHAPE', layer: 0, side: 'value' });
      expect(refused(layer(entry([1, 2, 2, 64])))).toMatchObject({ code: 'ERR_MISMATCH', actual: '2 tokens' });
      expect(past.get_seq_length()).toBe(3);
      expect(Object.keys(past)).toEqual(['past_key_values.0.key', 'past_key_values.0.value']);
      expect(errorOf(() => new QuantizedCache(kv, { preset: 'kv9' }).update(layer(entry([1, 2, 3, 64]))))).toMatchObject({ code: 'ERR_SPEC' });
      await past.dispose();
      expect(past.cache!.disposed).toBe(true);
    });

    test('a past in f16 goes in and comes out as it is', async () => {
      const halves = Uint16Array.from({ length: 2 * 3 * 64 }, (_, i) => 0x3000 + i);
      const past = new QuantizedCache(kv, { key: 'f16', value: 'f16', hot: 'f16' });
      const tensor = new Tensor('float16', halves, [1, 2, 3, 64]);
      past.update(layer(tensor));
      const shown = past['past_key_values.0.value'] as Tensor;
      expect(shown).toBeInstanceOf(Tensor);
      expect([shown.type, shown.dims, shown.size, shown.location]).toEqual(['float16', [1, 2, 3, 64], 384, 'cpu']);
      expect(Array.from(new Uint16Array((shown.data as Uint16Array).buffer))).toEqual([...halves]);
      await past.dispose();
    });

    test('states of other kinds stay tensors, which a shorter past does not have', () => {
      const past = new QuantizedCache(kv);
      const state = entry([1, 8, 4]);
      past.update({ ...layer(entry([1, 2, 3, 64])), 'past_conv.1': state });
      expect(past['past_conv.1']).toBe(state);
      expect(past.fork()['past_conv.1']).toBe(state);
      expect(errorOf(() => past.truncate(1))).toMatchObject({ code: 'ERR_UNSUPPORTED', actual: 'past_conv.1' });
    });
  });
}
