// SPDX-License-Identifier: Apache-2.0
// Runs a language model that is cut at its attentions: onnxruntime computes the pieces, a ModelCache attends over its codes between
// them, so no dense past exists anywhere. Public as `kvpages/runner`.
import { KvPagesError } from './errors.js';
import type { KvPages } from './kv-pages.js';
import type { AttendOptions, ModelCache, ModelCacheOptions } from './model-cache.js';
import { importOrt } from './ort.js';
import type { Ort, OrtSession, OrtTensor } from './ort.js';
import { pause, throwIfAborted } from './pause.js';
import { atLeast, sampler } from './sampling.js';
import type { SamplingOptions } from './sampling.js';
import { requireObject, requireOptions, wrongType } from './tensor.js';
import type { TensorData } from './tensor.js';

export type { Ort, OrtSession, OrtTensor } from './ort.js';
export type { SamplingOptions } from './sampling.js';

/** What is read of a model's `config.json`. */
export interface SplitModelConfig {
  readonly num_hidden_layers: number;
  readonly num_attention_heads: number;
  readonly num_key_value_heads?: number;
  readonly hidden_size?: number;
  readonly head_dim?: number | null;
  readonly vocab_size?: number;
  readonly eos_token_id?: number | readonly number[] | null;
}

/** What `InferenceSession.create` takes: an address or a path, or the file's bytes. */
export type PieceSource = string | Uint8Array | ArrayBufferLike;

export interface SplitModelOptions {
  readonly kv: KvPages;
  readonly config: SplitModelConfig;
  /** The pieces in order, layers + 1 of them, or a function that gives one when it is loaded. */
  readonly pieces: readonly PieceSource[] | ((piece: number) => PieceSource | Promise<PieceSource>);
  /** A module of onnxruntime; the installed one (`importOrt`) by default. */
  readonly ort?: Ort;
  /** Passed to `InferenceSession.create`; a function gives them per piece. */
  readonly sessionOptions?: object | ((piece: number) => object);
  /** The cache of the model: preset or specs, pages, limits. */
  readonly cacheOptions?: CacheOptions;
  /** Scale, sinks and softcap of the model's attention, where they are not the usual ones. */
  readonly attention?: Pick<AttendOptions, 'scale' | 'sinks' | 'softcap'>;
  readonly signal?: AbortSignal;
  /** Called after each piece that is loaded. */
  readonly onProgress?: (progress: { readonly done: number; readonly total: number }) => void;
}

/** Options of a cache but for the shape, which is the model's. */
export type CacheOptions = Omit<ModelCacheOptions, 'layers' | 'kvHeads' | 'headDim'>;

export interface ForwardOptions {
  /** The sequence that the tokens go on; the model's own cache by default. */
  readonly cache?: ModelCache;
  /** Logits of `all` tokens (the default), of the `last` one, or `none`. */
  readonly logits?: 'all' | 'last' | 'none';
  readonly signal?: AbortSignal;
}

export interface GenerateOptions extends SamplingOptions {
  readonly cache?: ModelCache;
  /** 128 by default. */
  readonly maxNewTokens?: number;
  /** Tokens that end the text; those of `config.eos_token_id` by default. */
  readonly stop?: readonly number[];
  /** Tokens that are computed at once at the beginning; all by default. Fewer need less memory. */
  readonly chunkTokens?: number;
  /** May change the logits before a token is chosen. */
  readonly onLogits?: (logits: Float32Array) => void;
  readonly signal?: AbortSignal;
}

type TokenIds = Iterable<number | bigint>;

interface Shape {
  readonly layers: number;
  readonly heads: number;
  readonly kvHeads: number;
  readonly headDim: number;
}

/**
 * A model cut at its attentions, with a cache of one sequence.
 *
 * ```js
 * const model = await SplitModel.create({ kv, config, pieces, cacheOptions: { preset: 'kv4' } });
 * for await (const token of model.generate(tokenIds)) show(token);
 * ```
 */
export class SplitModel {
  /** The sequence that `forward` and `generate` go on where they get no other. */
  readonly cache: ModelCache;
  readonly config: SplitModelConfig;
  readonly #ort: Ort;
  readonly #kv: KvPages;
  readonly #sessions: readonly OrtSession[];
  readonly #shape: Shape;
  readonly #options: CacheOptions;
  readonly #attention: Pick<AttendOptions, 'scale' | 'sinks' | 'softcap'>;
  readonly #busy = new WeakSet<ModelCache>();
  #disposed = false;
  #paused = 0;

  private constructor(ort: Ort, sessions: readonly OrtSession[], shape: Shape, cache: ModelCache, options: SplitModelOptions) {
    this.#ort = ort;
    this.#kv = options.kv;
    this.#sessions = sessions;
    this.#shape = shape;
    this.#options = options.cacheOptions ?? {};
    this.#attention = options.attention ?? {};
    this.cache = cache;
    this.config = options.config;
  }

  /**
   * Loads the pieces one after the other.
   * @throws KvPagesError `ERR_MISMATCH` with `argument` where a piece has other inputs, outputs or sizes; `ERR_BACKEND` where there
   *   is no onnxruntime; what `kv.createCache` throws; `ERR_ABORTED`. Nothing stays loaded then.
   */
  static async create(options: SplitModelOptions): Promise<SplitModel> {
    requireOptions(options, 'options', ['kv', 'config', 'pieces', 'ort', 'sessionOptions', 'cacheOptions', 'attention', 'signal', 'onProgress']);
    const { kv, config, pieces, sessionOptions = {}, cacheOptions = {}, signal, onProgress } = options;
    requireObject(kv, 'kv');
    const shape = shapeOf(config);
    const total = shape.layers + 1;
    if (typeof pieces !== 'function') {
      if (!Array.isArray(pieces)) throw wrongType('pieces', 'must be an array or a function', pieces);
      if (pieces.length !== total) throw mismatch('pieces', `must be ${total}, one more than the layers`, String(total), String(pieces.length));
    }
    // Before the pieces are loaded, so that a wrong spec is found at once.
    const cache = kv.createCache({ ...cacheOptions, layers: shape.layers, kvHeads: shape.kvHeads, headDim: shape.headDim });
    const sessions: OrtSession[] = [];
    try {
      const ort = options.ort ?? (await importOrt());
      for (let piece = 0; piece < total; ++piece) {
        throwIfAborted(signal, `${piece} of ${total} pieces`);
        const source = typeof pieces === 'function' ? await pieces(piece) : (pieces as readonly PieceSource[])[piece]!;
        const session = await ort.InferenceSession.create(source, typeof sessionOptions === 'function' ? sessionOptions(piece) : sessionOptions);
        sessions.push(session);
        checkPiece(session, piece, shape);
        onProgress?.({ done: piece + 1, total });
      }
      return new SplitModel(ort, sessions, shape, cache, options);
    } catch (error) {
      cache.dispose();
      await Promise.allSettled(sessions.map((session) => session.release()));
      throw error;
    }
  }

  /** An empty cache of the model's shape, for another sequence or another preset. It belongs to the caller. */
  createCache(options: CacheOptions = this.#options): ModelCache {
    const { layers, kvHeads, headDim } = this.#shape;
    return this.#kv.createCache({ ...options, layers, kvHeads, headDim });
  }

  /**
   * Computes tokens that follow those in the cache. The cache holds them afterwards; on an error it is as before.
   * @returns logits `[tokens, vocabulary]`, of all tokens, of the last one, or none
   * @throws KvPagesError `ERR_ARGUMENT`, `ERR_ABORTED`, and what `append` and `attend` throw
   */
  async forward(tokenIds: TokenIds, options: ForwardOptions = {}): Promise<Float32Array> {
    requireOptions(options, 'options', ['cache', 'logits', 'signal']);
    const { cache = this.cache, logits = 'all', signal } = options;
    const ids = this.#ids(tokenIds);
    if (!['all', 'last', 'none'].includes(logits)) throw wrongType('logits', "must be 'all', 'last' or 'none'", logits);
    if (this.#disposed) throw new KvPagesError('ERR_DISPOSED', 'model: must not be disposed', { argument: 'model' });
    if (this.#busy.has(cache)) throw new KvPagesError('ERR_ARGUMENT', 'cache: must not be in another forward that is not over', { argument: 'cache' });
    const before = cache.tokens;
    this.#busy.add(cache);
    try {
      return await this.#run(ids, cache, before, logits, signal);
    } catch (error) {
      if (!cache.disposed) cache.truncate(before);
      throw error;
    } finally {
      this.#busy.delete(cache);
    }
  }

  async #run(ids: BigInt64Array, cache: ModelCache, before: number, wanted: 'all' | 'last' | 'none', signal: AbortSignal | undefined): Promise<Float32Array> {
    const { Tensor } = this.#ort;
    const { layers, heads, headDim } = this.#shape;
    const tokens = ids.length;
    const positions = new Tensor('int64', BigInt64Array.from(ids, (_, i) => BigInt(before + i)), [1, tokens]);
    // One array for all layers: a piece is through with it when its run is over.
    const room = new Float32Array(heads * tokens * headDim);
    let feeds: Record<string, OrtTensor> = { input_ids: new Tensor('int64', ids, [1, tokens]), position_ids: positions };
    for (let layer = 0; layer < layers; ++layer) {
      await this.#breathe();
      throwIfAborted(signal, `${layer} of ${layers} layers; the cache is as before`);
      const { hidden_out: hidden, query, key, value } = (await this.#sessions[layer]!.run(feeds)) as Record<string, OrtTensor>;
      cache.append(layer, tensorOf(key!), tensorOf(value!));
      if (wanted === 'none' && layer === layers - 1) return new Float32Array(0);
      const { data } = cache.attend(layer, { ...tensorOf(query!), dims: [heads, tokens, headDim] }, { ...this.#attention, out: room });
      feeds = { hidden: hidden!, attention: new Tensor('float32', data, [1, heads, tokens, headDim]), position_ids: positions };
    }
    throwIfAborted(signal, `${layers} of ${layers} layers; the cache is as before`);
    const { position_ids: _, ...last } = feeds;
    const outputs = (await this.#sessions[layers]!.run(wanted === 'last' && tokens > 1 ? lastToken(last, Tensor) : last)) as Record<string, OrtTensor>;
    const { data } = outputs['logits']!;
    return data as Float32Array;
  }

  /** onnxruntime-web on one thread lets nothing else run, neither a click nor the timer that aborts. */
  async #breathe(): Promise<void> {
    if (performance.now() - this.#paused < 32) return;
    await pause();
    this.#paused = performance.now();
  }

  /**
   * Computes the tokens and goes on by itself, token by token as they come.
   *
   * The last token that it gives is not in the cache yet: a next call begins with it. Ended early (`break`, `signal`), the cache
   * holds what was computed.
   * @returns `stop` after one of the stop tokens, which is not given, `length` after `maxNewTokens`
   */
  async *generate(tokenIds: TokenIds, options: GenerateOptions = {}): AsyncGenerator<number, 'stop' | 'length', undefined> {
    const names = ['cache', 'maxNewTokens', 'temperature', 'topK', 'topP', 'seed', 'stop', 'chunkTokens', 'onLogits', 'signal'];
    requireOptions(options, 'options', names);
    const { cache = this.cache, onLogits, signal } = options;
    const stop = stopTokens(options.stop ?? [this.config.eos_token_id ?? []].flat());
    const maxNewTokens = atLeast(options.maxNewTokens ?? 128, 0, 'maxNewTokens');
    if (onLogits !== undefined && typeof onLogits !== 'function') throw wrongType('onLogits', 'must be a function', onLogits);
    const choose = sampler(options);
    const ids = this.#ids(tokenIds);
    const chunk = atLeast(options.chunkTokens ?? ids.length, 1, 'chunkTokens');
    const more = { cache, ...(signal === undefined ? {} : { signal }) };
    let at = 0;
    for (; at + chunk < ids.length; at += chunk) await this.forward(ids.subarray(at, at + chunk), { ...more, logits: 'none' });
    let next: TokenIds = ids.subarray(at);
    for (let made = 0; made < maxNewTokens; ++made) {
      const logits = await this.forward(next, { ...more, logits: 'last' });
      onLogits?.(logits);
      const token = choose(logits);
      if (stop.has(token)) return 'stop';
      yield token;
      next = [token];
    }
    return 'length';
  }

  /** Gives the sessions and the model's own cache up. */
  async dispose(): Promise<void> {
    if (this.#disposed) return;
    this.#disposed = true;
    this.cache.dispose();
    await Promise.all(this.#sessions.map((session) => session.release()));
  }

  #ids(tokenIds: TokenIds): BigInt64Array {
    if (typeof tokenIds !== 'object' || tokenIds === null || !(Symbol.iterator in tokenIds)) throw wrongType('tokenIds', 'must be an array of integers', tokenIds);
    const { vocab_size: end = Number.MAX_SAFE_INTEGER } = this.config;
    const ids = BigInt64Array.from(Array.from(tokenIds), (id, i) => {
      const value = Number(id);
      if (Number.isSafeInteger(value) && value >= 0 && value < end) return BigInt(value);
      throw new KvPagesError('ERR_ARGUMENT', `tokenIds[${i}]: must be an integer from 0 to ${end - 1}, got ${String(id)}`, {
        argument: `tokenIds[${i}]`,
        expected: `0 to ${end - 1}`,
        actual: String(id),
      });
    });
    if (ids.length === 0) throw new KvPagesError('ERR_ARGUMENT', 'tokenIds: must have one token or more, got 0', { argument: 'tokenIds' });
    return ids;
  }
}

function stopTokens(tokens: readonly number[]): ReadonlySet<number> {
  if (!Array.isArray(tokens)) throw wrongType('stop', 'must be an array of integers', tokens);
  return new Set(tokens.map((token, i) => atLeast(token, 0, `stop[${i}]`)));
}

function shapeOf(config: SplitModelConfig): Shape {
  requireObject(config, 'config');
  const number = (value: unknown, name: string): number => {
    if (typeof value === 'number' && Number.isSafeInteger(value) && value > 0) return value;
    throw new KvPagesError('ERR_ARGUMENT', `config.${name}: must be a number above 0, got ${String(value)}`, { argument: `config.${name}`, actual: String(value) });
  };
  const heads = number(config.num_attention_heads, 'num_attention_heads');
  return {
    layers: number(config.num_hidden_layers, 'num_hidden_layers'),
    heads,
    kvHeads: number(config.num_key_value_heads ?? heads, 'num_key_value_heads'),
    headDim: number(config.head_dim ?? number(config.hidden_size, 'hidden_size') / heads, 'head_dim'),
  };
}

function mismatch(argument: string, rule: string, expected: string, actual: string): KvPagesError {
  return new KvPagesError('ERR_MISMATCH', `${argument}: ${rule}, got ${actual}`, { argument, expected, actual });
}

/** Names, types and, where the file has them, sizes of a piece. */
function checkPiece(session: OrtSession, piece: number, { layers, heads, kvHeads, headDim }: Shape): void {
  const argument = `pieces[${piece}]`;
  const [first, last] = [piece === 0, piece === layers];
  const inputs = first ? ['input_ids', 'position_ids'] : ['hidden', 'attention', ...(last ? [] : ['position_ids'])];
  const outputs = last ? ['logits'] : ['hidden_out', 'query', 'key', 'value'];
  const same = (wanted: readonly string[], found: readonly string[], kind: string) => {
    if (wanted.length === found.length && wanted.every((name) => found.includes(name))) return;
    throw mismatch(argument, `must have the ${kind} ${wanted.join(', ')}`, wanted.join(', '), found.join(', '));
  };
  same(inputs, session.inputNames, 'inputs');
  same(outputs, session.outputNames, 'outputs');
  const sizes: Readonly<Record<string, number>> = { query: heads, attention: heads, key: kvHeads, value: kvHeads };
  for (const { name, type, shape } of [...(session.inputMetadata ?? []), ...(session.outputMetadata ?? [])]) {
    if (!name.endsWith('_ids') && type !== undefined && type !== 'float32') throw mismatch(`${argument}.${name}`, 'must be float32', 'float32', type);
    const wanted = sizes[name];
    if (wanted === undefined || shape === undefined || shape.length === 0) continue;
    const fits = shape.length === 4 && [wanted, undefined, headDim].every((size, i) => size === undefined || typeof shape[i + 1] !== 'number' || shape[i + 1] === size);
    if (!fits) throw mismatch(`${argument}.${name}`, `must be [batch, ${wanted}, tokens, ${headDim}]`, `[batch, ${wanted}, tokens, ${headDim}]`, `[${shape.join(', ')}]`);
  }
}

/** A tensor of onnxruntime as the cache takes it; `data` is a getter that copies nothing. */
function tensorOf({ type, dims, data }: OrtTensor): { type: string; dims: readonly number[]; data: TensorData } {
  return { type, dims, data: data as TensorData };
}

/** The rows of the last token, so that the vocabulary's matrix is not multiplied for the others. */
function lastToken(feeds: Readonly<Record<string, OrtTensor>>, Tensor: Ort['Tensor']): Record<string, OrtTensor> {
  return Object.fromEntries(
    Object.entries(feeds).map(([name, tensor]) => {
      const data = tensor.data as Float32Array;
      const [tokens, width] = tensor.dims.slice(-2) as [number, number];
      const runs = data.length / (tokens * width);
      const rows = new Float32Array(runs * width);
      for (let run = 0; run < runs; ++run) rows.set(data.subarray(((run + 1) * tokens - 1) * width, (run + 1) * tokens * width), run * width);
      return [name, new Tensor(tensor.type, rows, [...tensor.dims.slice(0, -2), 1, width])];
    }),
  );
}
