// SPDX-License-Identifier: Apache-2.0
// The two ways to run a model on a ModelCache: cut at its attentions, which read the codes (`attend`), or whole, fed with what the
// cache thaws (`thaw`).
import { KvPagesError } from '../errors.js';
import type { KvPages } from '../kv-pages.js';
import type { ModelCache, ModelShape } from '../model-cache.js';
import { OrtPast } from '../ort.js';
import type { Ort, OrtSession, OrtTensor } from '../ort.js';
import { SplitModel } from '../runner.js';
import type { CacheOptions, SplitModelOptions } from '../runner.js';

export interface Engine {
  readonly kind: 'attend' | 'thaw';
  readonly shape: Pick<ModelShape, 'layers' | 'kvHeads' | 'headDim'>;
  /** Most bytes of keys and values that stood thawed or dense beside a cache. */
  readonly denseBytes: number;
  createCache(options: CacheOptions): ModelCache;
  /** Computes tokens that follow those in the cache, which holds them afterwards. `[tokens, vocabulary]`. */
  forward(cache: ModelCache, ids: readonly number[], logits: 'all' | 'last' | 'none', signal?: AbortSignal): Promise<Float32Array>;
  dispose(): Promise<void>;
}

/** A model in pieces, through `SplitModel`. */
export async function attendEngine(options: SplitModelOptions): Promise<Engine> {
  // Its own cache stays empty.
  const model = await SplitModel.create({ ...options, cacheOptions: { preset: 'f32' } });
  const { layers } = model.cache;
  return {
    kind: 'attend',
    shape: { layers: layers.length, kvHeads: layers[0]!.kvHeads, headDim: layers[0]!.key.headDim },
    denseBytes: 0,
    createCache: (cacheOptions) => model.createCache(cacheOptions),
    forward: (cache, ids, logits, signal) => model.forward(ids, { cache, logits, ...(signal && { signal }) }),
    dispose: () => model.dispose(),
  };
}

/**
 * A whole model with a past, through `OrtPast`.
 * @throws KvPagesError `ERR_UNSUPPORTED`, `ERR_MISMATCH` with `argument` where the model has other inputs or outputs
 */
export function thawEngine(kv: KvPages, ort: Ort, session: OrtSession): Engine {
  const past = new OrtPast(ort, session);
  const known = ['input_ids', 'attention_mask', 'position_ids'];
  const names = session.inputNames.filter((name) => !past.inputs.includes(name));
  const other = names.find((name) => !known.includes(name));
  if (other !== undefined || !names.includes('input_ids')) {
    throw new KvPagesError('ERR_UNSUPPORTED', `session: must have the input input_ids and beside the past none but ${known.join(', ')}, got ${names.join(', ')}`, {
      argument: 'session',
      expected: known.join(', '),
      actual: names.join(', '),
    });
  }
  if (!session.outputNames.includes('logits')) {
    throw new KvPagesError('ERR_MISMATCH', `session: must have the output logits, got ${session.outputNames.slice(0, 8).join(', ')}`, { argument: 'session', expected: 'logits' });
  }
  let denseBytes = 0;
  const row = (length: number, f: (i: number) => number) => new ort.Tensor('int64', BigInt64Array.from({ length }, (_, i) => BigInt(f(i))), [1, length]);
  return {
    kind: 'thaw',
    shape: past.shape,
    get denseBytes() {
      return denseBytes;
    },
    createCache: (options) => kv.createCache({ ...options, ...past.shape }),
    async forward(cache, ids, logits, signal) {
      signal?.throwIfAborted();
      const before = cache.tokens;
      const inputs: Record<string, OrtTensor> = {
        input_ids: row(ids.length, (i) => ids[i]!),
        attention_mask: row(before + ids.length, () => 1),
        position_ids: row(ids.length, (i) => before + i),
      };
      const pastFeeds = past.feeds(cache);
      const feeds = { ...Object.fromEntries(names.map((name) => [name, inputs[name]!])), ...pastFeeds };
      const outputs = (await session.run(feeds, [...(logits === 'none' ? [] : ['logits']), ...past.fetches])) as Record<string, OrtTensor>;
      past.append(cache, outputs);
      const sizes = [...Object.values(pastFeeds), ...past.fetches.map((name) => outputs[name]!)];
      denseBytes = Math.max(denseBytes, sizes.reduce((sum, { data }) => sum + (data as ArrayBufferView).byteLength, 0));
      if (logits === 'none') return new Float32Array(0);
      const all = floats(outputs['logits']!);
      return logits === 'last' ? all.subarray(all.length - all.length / ids.length) : all;
    },
    dispose: () => session.release(),
  };
}

function floats({ type, data }: OrtTensor): Float32Array {
  if (type === 'float32') return data as Float32Array;
  if (type !== 'float16') throw new KvPagesError('ERR_UNSUPPORTED', `logits: must be float32 or float16, got ${type}`, { argument: 'logits', actual: type });
  // A Float16Array where there is one, else its bits.
  if (!(data instanceof Uint16Array)) return Float32Array.from(data as Iterable<number>);
  return Float32Array.from(data, (bits) => {
    const exponent = (bits >> 10) & 31;
    const fraction = bits & 1023;
    const value = exponent === 0 ? fraction * 2 ** -24 : exponent === 31 ? (fraction ? NaN : Infinity) : (1 + fraction / 1024) * 2 ** (exponent - 15);
    return bits & 0x8000 ? -value : value;
  });
}
