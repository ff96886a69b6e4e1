// SPDX-License-Identifier: Apache-2.0
// The live cache of a running model: all layers of one sequence. Methods of KvPages that make one, in a class of their own.
import type { Core } from './binding.js';
import { KvPagesError } from './errors.js';
import { Owned } from './owned.js';
import type { Session } from './owned.js';
import { PagedCache } from './paged-cache.js';
import type { AsyncOptions } from './paged-cache.js';
import { pause, requireSignal, throwIfAborted } from './pause.js';
import { ProfileMethods } from './profile.js';
import {
  bytesOf,
  bytesPerElement,
  denseArray,
  denseType,
  int64Array,
  outputBytes,
  optionWords,
  readTensor,
  requireGiven,
  requireNumber,
  requireObject,
  requireOptions,
  requirePositive,
  requireSpec,
  requireString,
  specOptions,
  wrongType,
} from './tensor.js';
import type { DenseTensor, DenseType, DenseTypeWord, RawTensor, TensorLike } from './tensor.js';

/** A spec with what does not change decoding. */
export interface SideSpec {
  /** A spec string or a preset's name. */
  readonly spec: string;
  readonly overflow?: 'saturate' | 'nan';
  readonly global?: 'amax/2688' | 'amax/448' | 'amax/6' | number;
  readonly rule?: 'floor' | 'ceil';
  /** NaN and infinities in appended tokens: `error` (the default), `saturate` or `pass`. */
  readonly nonFinite?: 'error' | 'saturate' | 'pass';
  readonly hadamardRun?: 'largest' | 'llama-key' | 'llama-value';
}

/** head_dim of both sides, or of each. */
export type HeadDim = number | { readonly key: number; readonly value: number };

/** What a model's cache looks like: one value for all layers, or a list with one per layer. */
export interface ModelShape {
  readonly layers: number;
  /** KV heads. */
  readonly kvHeads: number | readonly number[];
  readonly headDim: HeadDim | readonly HeadDim[];
  /** Names the specs of keys and values, `kv4` by default. */
  readonly preset?: string;
  /** Spec of keys, in place of the preset's. */
  readonly key?: string | SideSpec | ReadonlyArray<string | SideSpec>;
  /** Spec of values, in place of the preset's. */
  readonly value?: string | SideSpec | ReadonlyArray<string | SideSpec>;
}

export interface ModelCacheOptions extends ModelShape {
  /** Tokens of a page; 16 by default, or the spec's block along tokens where that is longer. */
  readonly pageTokens?: number;
  /** The first tokens, in a page of their own that stays dense: 4 by default. */
  readonly keepFirst?: number;
  /** A page is encoded when its last token is at least this far behind the end: 0 by default. */
  readonly keepRecent?: number;
  /** KIVI's residual, a multiple of `pageTokens`: keys are encoded so many tokens at a time, values when older. Off by default. */
  readonly residual?: number;
  /** Type of dense pages, `bf16` by default. */
  readonly hot?: DenseTypeWord;
  /** Window of a layer in tokens for `attend`, 0 (the default) for none. */
  readonly window?: number | readonly number[];
  /** Most bytes that the cache and its forks may hold together, on a device too; 0 (the default) for no limit of their own. */
  readonly maxBytes?: number;
  /** Where it lives: `cuda` needs `load({ backend: 'cuda' })` and is the default there. */
  readonly device?: CacheDevice;
}
/** The host's memory, or a GPU's. The bytes of codes and scales are the same. */
export type CacheDevice = 'cpu' | 'cuda';
const shapeOptions: readonly string[] = ['layers', 'kvHeads', 'headDim', 'preset', 'key', 'value'];
const cacheOptions: readonly string[] = [
  ...shapeOptions,
  'pageTokens',
  'keepFirst',
  'keepRecent',
  'residual',
  'hot',
  'window',
  'maxBytes',
  'device',
];

/** What encoding pages of one side lost and saved. */
export interface FreezeFigures {
  readonly pages: number;
  readonly elements: number;
  readonly rmse: number;
  readonly maxError: number;
  /** Elements whose code is at the end of its range while the value lies beyond it. */
  readonly saturated: number;
  readonly bytesBefore: number;
  readonly bytesAfter: number;
}

/** Exact sizes of a cache. */
export interface CacheStats {
  /** Where it lies; not of an estimate. */
  readonly device?: CacheDevice;
  /** Tokens appended, dropped ones included: the most of any layer. */
  readonly tokens: number;
  readonly byteLength: number;
  readonly bytes: {
    readonly kept: number;
    readonly hot: number;
    readonly codes: number;
    readonly scales: number;
    readonly zeros: number;
    readonly globals: number;
    readonly centers: number;
  };
  /** Pages of all layers; a page counts as frozen when both sides are. `shared`: held by another object too. */
  readonly pages: { readonly kept: number; readonly hot: number; readonly frozen: number; readonly shared: number };
  readonly sharedBytes: number;
  /** Bits per valid element: of frozen pages of each side, their mean, and of everything. */
  readonly bits: {
    readonly key: number;
    readonly value: number;
    readonly frozen: number;
    readonly overall: number;
  };
  /** What encoding the keys that are held lost. */
  readonly key: FreezeFigures;
  readonly value: FreezeFigures;
}

/** One side of a page of a layer. */
export interface CachePageSide {
  /** `bf16`, or the spec of its codes. */
  readonly format: string;
  readonly byteLength: number;
  readonly frozen: boolean;
  readonly rmse?: number;
  readonly maxError?: number;
  readonly saturated?: number;
}
/** A page of a layer. */
export interface CachePage {
  /** Position of its first token. */
  readonly start: number;
  readonly length: number;
  readonly capacity: number;
  /** Whether it holds the tokens of `keepFirst`. */
  readonly kept: boolean;
  readonly key: CachePageSide;
  readonly value: CachePageSide;
}

/** How a layer is made. */
export interface LayerInfo {
  readonly kvHeads: number;
  readonly window: number;
  readonly key: { readonly headDim: number; readonly spec: string; readonly options: string };
  readonly value: { readonly headDim: number; readonly spec: string; readonly options: string };
}
interface CacheInfo {
  readonly device: CacheDevice;
  readonly model: string;
  readonly tokenIds: number;
  readonly pageTokens: number;
  readonly keepFirst: number;
  readonly keepRecent: number;
  readonly residual: number;
  readonly hot: DenseType;
  readonly layers: readonly LayerInfo[];
}

export interface AttendOptions {
  /** Factor of q . k, 1 / sqrt(head_dim) by default. */
  readonly scale?: number;
  /** Position of the first query; the layer's tokens minus the queries by default. */
  readonly queryStart?: number;
  /** Tokens that a query looks back, itself included; 0 for all. The layer's own by default. */
  readonly window?: number;
  /** Tokens at positions below this are visible through any window. */
  readonly sinks?: number;
  /** score = softcap * tanh(score / softcap), before the mask. */
  readonly softcap?: number;
  /** A learned logit per query head in the softmax's denominator. */
  readonly sinkLogits?: Float32Array | readonly number[];
  /** Memory for the result. */
  readonly out?: Float32Array;
  /** Whether the log-sum-exp of each query's scores is wanted, or memory for it. */
  readonly lse?: boolean | Float32Array;
}

export interface Attention {
  /** `[heads, tokens, head_dim]` of the values; `[caches, heads, tokens, head_dim]` of a batch. */
  readonly data: Float32Array;
  readonly dims: readonly number[];
  /** `[heads, tokens]`, where it was asked for. */
  readonly lse?: Float32Array;
}

export interface ReadOptions {
  readonly start?: number;
  readonly end?: number;
  /** `f32` by default. */
  readonly type?: DenseTypeWord;
}

export interface SaveOptions {
  /** A tag of the model, which `restore` can ask for. */
  readonly model?: string;
  /** One per token. */
  readonly tokenIds?: Uint32Array | readonly number[];
}

/** What a file must be. `layers`, `kvHeads` and `headDim` go together; specs count where one is given, without a preset by default. */
export interface RestoreOptions extends Partial<ModelShape> {
  /** The tag that the file must have; any by default. */
  readonly model?: string;
  readonly maxBytes?: number;
  /** As for `createCache`. */
  readonly device?: CacheDevice;
}

/** Bytes as they come: a WHATWG stream, a Node stream, or anything that can be iterated. */
export type ByteSource =
  | ReadableStream<Uint8Array>
  | AsyncIterable<Uint8Array>
  | Iterable<Uint8Array>
  | ArrayBufferLike
  | ArrayBufferView;

/** A WHATWG stream, or as much of Node's as is used. */
export type ByteSink = WritableStream<Uint8Array> | NodeSink;
interface NodeSink {
  write(chunk: Uint8Array, callback: (error?: Error | null) => void): boolean;
  once?(event: 'close', listener: () => void): unknown;
  off?(event: 'close', listener: () => void): unknown;
  readonly errored?: Error | null;
}

/** Bytes of a file that are handled at once. */
const chunkBytes = 1 << 20;

/** A file on its way, given back with the generator that reads or writes it, also where that is left alone. */
class Transfer extends Owned {
  get id(): number {
    return this.handle;
  }
}

/**
 * Keys and values of all layers of one sequence, appended to as tokens come. Full pages are encoded once, by the next append or
 * by `freeze`, and never again; `attend` reads them as they are. Forks share pages until one of them writes.
 */
export class ModelCache extends Owned {
  #info: CacheInfo | undefined;

  /** @internal */
  constructor(session: Session, handle: number) {
    super(session, handle);
  }

  get #read(): CacheInfo {
    if (this.#info === undefined || this.disposed) this.#info = this.session.core.json('kvp_cache_info', this.handle);
    return this.#info!;
  }
  /** Position behind the last token, the most of any layer; dropped tokens count. */
  get tokens(): number {
    return this.session.core.number('kvp_cache_tokens', this.handle, Number.NaN);
  }
  /** Where the cache lives. */
  get device(): CacheDevice {
    return this.#read.device;
  }
  /** How the layers are made, specs with every part spelt out. */
  get layers(): readonly LayerInfo[] {
    return this.#read.layers;
  }
  get pageTokens(): number {
    return this.#read.pageTokens;
  }
  get keepFirst(): number {
    return this.#read.keepFirst;
  }
  get keepRecent(): number {
    return this.#read.keepRecent;
  }
  get residual(): number {
    return this.#read.residual;
  }
  /** Type of dense pages. */
  get hot(): DenseType {
    return this.#read.hot;
  }
  /** Tag of the file that the cache was restored from; empty where there was none. */
  get model(): string {
    return this.#read.model;
  }
  /** Token ids of the file that the cache was restored from. */
  get tokenIds(): Uint32Array {
    const ids = new Uint32Array(this.#read.tokenIds);
    this.session.core.call('kvp_cache_token_ids', this.handle, ids);
    return ids;
  }

  /** Tokens appended to a layer. */
  tokensOf(layer: number): number {
    return this.session.core.number('kvp_cache_tokens', this.handle, requireGiven(layer, 'layer'));
  }
  /** Pages of a layer, by position. */
  pages(layer: number): readonly CachePage[] {
    return this.session.core.json<{ pages: CachePage[] }>('kvp_cache_layer', this.handle, requireNumber(layer, 'layer'))
      .pages;
  }

  /**
   * Encodes the layer's pages that are due, then stores tokens, rounded to the type of dense pages.
   * @param keys `[kv_heads, tokens, head_dim]`, a batch of 1 in front is accepted; f32, f16 or bf16, strides too
   * @param values the same tokens
   * @throws KvPagesError `ERR_SHAPE`, `ERR_NON_FINITE`, `ERR_LIMIT`, `ERR_MEMORY` with `layer` and `side`; no token is stored then,
   * but pages that were due may have been encoded where memory or the limit ran out
   */
  append(layer: number, keys: TensorLike, values: TensorLike): void {
    requireNumber(layer, 'layer');
    this.session.core.call('kvp_cache_append', this.handle, layer, ...tensorArguments(keys, 'keys'), ...tensorArguments(values, 'values'));
  }

  /**
   * The same for all layers in one call; all or nothing.
   * @param keys `[layers, kv_heads, tokens, head_dim]`, or one tensor per layer
   */
  appendAll(keys: TensorLike | readonly TensorLike[], values: TensorLike | readonly TensorLike[]): void {
    this.session.core.call('kvp_cache_append_all', this.handle, ...layersArguments(keys, 'keys'), ...layersArguments(values, 'values'));
  }

  /**
   * Encodes every page that is due, of one layer or of all.
   * @returns what that lost and saved
   */
  freeze(layer?: number): { readonly key: FreezeFigures; readonly value: FreezeFigures } {
    const figures = new Float64Array(14);
    this.session.core.call('kvp_cache_freeze', this.handle, layer === undefined ? Number.NaN : requireGiven(layer, 'layer'), figures);
    return { key: freezeFigures(figures, 0), value: freezeFigures(figures, 7) };
  }

  /** The same layer by layer, with a pause after each. Ended by `signal`, the layers that are done stay so. */
  async freezeAsync(options: AsyncOptions = {}): Promise<{ readonly key: FreezeFigures; readonly value: FreezeFigures }> {
    requireOptions(options, 'options', ['signal', 'onProgress']);
    const total = this.layers.length;
    const sums = { key: freezeFigures(new Float64Array(14), 0), value: freezeFigures(new Float64Array(14), 7) };
    for (let layer = 0; layer < total; ++layer) {
      if (layer > 0) await pause();
      throwIfAborted(options.signal, `${layer} layers`);
      const { key, value } = this.freeze(layer);
      sums.key = addFigures(sums.key, key);
      sums.value = addFigures(sums.value, value);
      options.onProgress?.({ done: layer + 1, total });
    }
    return sums;
  }

  /**
   * softmax(scale Q K^T) V over a layer, from the codes; rules and error bound: docs/attention.md.
   * @param queries `[heads, tokens, head_dim]`, heads a multiple of the KV heads; query head h reads KV head h / (heads / kvHeads)
   * @throws KvPagesError `ERR_MISMATCH` where an earlier layer has another number of tokens, `ERR_SHAPE`, `ERR_ARGUMENT`
   */
  attend(layer: number, queries: TensorLike, options: AttendOptions = {}): Attention {
    requireNumber(layer, 'layer');
    return attend(this.session, 'kvp_cache_attend', this.handle, layer, queries, this.layers[layer]?.value.headDim ?? 0, options);
  }

  /**
   * Thaws tokens `start` to `end` (all by default) of both sides.
   * @returns `[1, kv_heads, end - start, head_dim]` each
   * @throws KvPagesError `ERR_ARGUMENT` where tokens of the range have been dropped
   */
  read(
    layer: number,
    options: ReadOptions & { readonly out?: { readonly key?: ArrayBufferView; readonly value?: ArrayBufferView } } = {},
  ): { readonly key: DenseTensor; readonly value: DenseTensor } {
    requireNumber(layer, 'layer');
    requireOptions(options, 'options', ['start', 'end', 'type', 'out']);
    const { start = 0, end = this.tokensOf(layer), type: word = 'f32', out = {} } = options;
    requireNumber(start, 'start');
    requireNumber(end, 'end');
    requireOptions(out, 'out', ['key', 'value']);
    const type = denseType(requireString(word, 'type')) as DenseType;
    const info = this.layers[layer];
    const kvHeads = info?.kvHeads ?? 0;
    const there = end <= this.tokensOf(info === undefined ? 0 : layer); // else the core says what is wrong with the range
    const side = (name: 'key' | 'value') => {
      const headDim = info?.[name].headDim ?? 0;
      const size = there ? kvHeads * Math.max(0, end - start) * headDim * bytesPerElement(type) : 0;
      const given = out[name];
      const bytes = given === undefined ? new Uint8Array(Number.isSafeInteger(size) ? size : 0) : outputBytes(given, type, `out.${name}`);
      const tensor = (): DenseTensor => ({
        type,
        dims: [1, kvHeads, end - start, headDim],
        data: given === undefined ? denseArray(type, bytes) : (given as Float32Array),
      });
      return { bytes, tensor };
    };
    const key = side('key');
    const value = side('value');
    this.session.core.call('kvp_cache_read', this.handle, layer, start, end, type, key.bytes, value.bytes);
    return { key: key.tensor(), value: value.tensor() };
  }

  /** All layers thawed: `read` of every layer. */
  toDense(options: ReadOptions = {}): Array<{ readonly key: DenseTensor; readonly value: DenseTensor }> {
    return this.layers.map((_, layer) => this.read(layer, options));
  }

  /** A layer as onnx-light's pages, which share the cache's memory where that is the host's; starts count from 0. */
  toPaged(layer: number): PagedCache {
    return new PagedCache(this.session, this.session.core.handle('kvp_cache_to_paged', this.handle, requireNumber(layer, 'layer')));
  }

  /**
   * Forgets tokens `tokens` and later in all layers. A page that was encoded keeps its codes and is not written again.
   * @throws KvPagesError `ERR_ARGUMENT` beyond a layer's end, or where the position lies in a gap of dropped tokens
   */
  truncate(tokens: number): void {
    this.session.core.call('kvp_cache_truncate', this.handle, requireNumber(tokens, 'tokens'));
  }

  /** Forgets pages that end at or before a position, of one layer or of all; never the kept one. Positions stay. */
  dropBefore(tokens: number, options: { readonly layer?: number } = {}): void {
    requireOptions(options, 'options', ['layer']);
    const layer = options.layer === undefined ? Number.NaN : requireGiven(options.layer, 'layer');
    this.session.core.call('kvp_cache_drop_before', this.handle, requireNumber(tokens, 'tokens'), layer);
  }

  /** A cache of tokens `start` to `end` with shared pages and unchanged positions. `start` is the start of a page. */
  slice(start: number, end: number = this.tokens): ModelCache {
    requireNumber(start, 'start');
    return new ModelCache(this.session, this.session.core.handle('kvp_cache_slice', this.handle, start, requireNumber(end, 'end')));
  }

  /** A cache of its own with the same pages: for a beam, or for another request with the same beginning. */
  fork(): ModelCache {
    return new ModelCache(this.session, this.session.core.handle('kvp_cache_fork', this.handle));
  }

  /**
   * The same cache on a device or in the host's memory, with the same codes and scales: nothing is encoded anew. Where it is there
   * already, a fork; else it has a limit of its own, as large.
   * @throws KvPagesError `ERR_BACKEND` where the instance has no such device, `ERR_LIMIT`, `ERR_MEMORY`, `ERR_DEVICE`
   */
  to(device: CacheDevice): ModelCache {
    return new ModelCache(this.session, this.session.core.handle('kvp_cache_move', this.handle, requireString(device, 'device')));
  }

  /** Exact sizes. */
  stats(): CacheStats {
    return this.session.core.json('kvp_cache_stats', this.handle);
  }

  /**
   * The file of the whole cache (docs/envelope.md), which `kv.restore` reads.
   * @throws KvPagesError `ERR_MISMATCH` where layers have different numbers of tokens
   */
  serialize(options: SaveOptions = {}): Uint8Array<ArrayBuffer> {
    return joined([...this.chunks(options)]);
  }

  /** The same piece by piece, with pauses. */
  async serializeAsync(options: SaveOptions & AsyncOptions = {}): Promise<Uint8Array<ArrayBuffer>> {
    const parts: Uint8Array[] = [];
    for await (const part of this.#pieces(options)) parts.push(part);
    return joined(parts);
  }

  /** The file in pieces of about 1 MB, of the cache as it is when the first one is asked for: `Readable.from(cache.chunks())`. */
  *chunks(options: SaveOptions = {}): Generator<Uint8Array<ArrayBuffer>, void, undefined> {
    const { core } = this.session;
    const writer = this.#writer(options, ['model', 'tokenIds']);
    try {
      for (let progress = progressOf(core, writer.id); progress.done < progress.total; progress = progressOf(core, writer.id))
        yield nextPiece(core, writer.id);
    } finally {
      writer.dispose();
    }
  }

  /** The file as a WHATWG stream. */
  stream(options: SaveOptions & AsyncOptions = {}): ReadableStream<Uint8Array> {
    const pieces = this.#pieces(options);
    return new ReadableStream<Uint8Array>(
      {
        async pull(controller) {
          const { done, value } = await pieces.next();
          if (done) controller.close();
          else controller.enqueue(value);
        },
        async cancel() {
          await pieces.return();
        },
      },
      { highWaterMark: 0 },
    );
  }

  /**
   * Writes the file into a stream of the platform or of Node, not faster than it takes the bytes. The stream stays open where it
   * is Node's; a WHATWG stream is closed, or aborted after an error.
   */
  async writeTo(sink: ByteSink, options: SaveOptions & AsyncOptions = {}): Promise<void> {
    requireObject(sink, 'sink');
    if (!('getWriter' in sink) && typeof sink.write !== 'function') throw wrongType('sink', 'must be a WritableStream or a Node stream', sink);
    // A sink that takes nothing any more does not keep an abort from being seen.
    const { aborted, forget } = whenAborted(options.signal, 'aborted while waiting for the sink');
    let web: WritableStreamDefaultWriter<Uint8Array> | undefined;
    try {
      web = 'getWriter' in sink ? sink.getWriter() : undefined;
      const put = web === undefined ? nodePut(sink as NodeSink) : webPut(web);
      for await (const piece of this.#pieces(options)) {
        if (options.signal?.aborted) await aborted;
        await Promise.race([put(piece), aborted]);
      }
      await web?.close();
    } catch (error) {
      // Nobody waits for the sink to have heard of it.
      web?.abort(error).catch(() => {});
      throw error;
    } finally {
      forget();
      web?.releaseLock();
    }
  }

  async *#pieces(options: SaveOptions & AsyncOptions): AsyncGenerator<Uint8Array<ArrayBuffer>, void, undefined> {
    const { core } = this.session;
    const { signal, onProgress } = options;
    throwIfAborted(signal, 'nothing');
    const writer = this.#writer(options, ['model', 'tokenIds', 'signal', 'onProgress']);
    try {
      for (let progress = progressOf(core, writer.id); progress.done < progress.total; ) {
        if (progress.done > 0) await pause();
        throwIfAborted(signal, `${progress.done} of ${progress.total} parts`);
        const piece = nextPiece(core, writer.id);
        progress = progressOf(core, writer.id);
        onProgress?.(progress);
        yield piece;
      }
    } finally {
      writer.dispose();
    }
  }

  #writer(options: SaveOptions, allowed: readonly string[]): Transfer {
    requireOptions(options, 'options', allowed);
    const { model = '', tokenIds = [] } = options;
    const { core } = this.session;
    return new Transfer(
      this.session,
      core.handle('kvp_save_create', this.handle, requireString(model, 'model'), uint32Array(tokenIds, 'tokenIds')),
    );
  }
}

/** Methods of KvPages on caches of models. */
export abstract class ModelCacheMethods extends ProfileMethods {
  /**
   * An empty cache.
   * `kv.createCache({ layers: 30, kvHeads: 3, headDim: 64, preset: 'kv4' })`
   * @throws KvPagesError `ERR_SPEC`, `ERR_ARGUMENT` with `layer` and `side`, `ERR_BACKEND` where there is no such device
   */
  createCache(options: ModelCacheOptions): ModelCache {
    return withConfig(this.session, options, (config) => {
      const { core, instance } = this.session;
      return new ModelCache(this.session, core.handle('kvp_cache_create', instance, config, maxBytesOf(options), deviceOf(options)));
    });
  }

  /** What a cache of `tokens` tokens will take when its pages are frozen. Nothing is allocated. */
  estimateBytes(options: ModelCacheOptions & { readonly tokens: number }): CacheStats {
    requireObject(options, 'options');
    const { tokens, ...shape } = options;
    return withConfig(this.session, shape, (config) =>
      this.session.core.json<CacheStats>('kvp_cache_estimate', config, requireNumber(tokens, 'tokens')),
    );
  }

  /**
   * A cache of keys and values that are already there, one pair per layer; its full pages are encoded by the next append or by
   * `freeze`. Without `layers`, `kvHeads` and `headDim` they are those of the tensors.
   */
  fromDense(
    past: ReadonlyArray<{ readonly key: TensorLike; readonly value: TensorLike }>,
    options: Partial<ModelCacheOptions> = {},
  ): ModelCache {
    if (!Array.isArray(past)) throw wrongType('past', 'must be an array of { key, value }', past);
    requireObject(options, 'options');
    const pairs = past.map((pair: { readonly key: TensorLike; readonly value: TensorLike }, i) => {
      requireObject(pair as unknown, `past[${i}]`);
      return { key: readTensor(pair.key, `past[${i}].key`), value: readTensor(pair.value, `past[${i}].value`) };
    });
    const { layers = pairs.length } = options;
    if (layers !== pairs.length) {
      throw new KvPagesError('ERR_SHAPE', `past: needs one pair per layer, ${layers}, got ${pairs.length}`, {
        argument: 'past',
        expected: `${layers}`,
        actual: `${pairs.length}`,
      });
    }
    const shape: ModelCacheOptions = {
      layers,
      kvHeads: pairs.map(({ key }) => key.dims.at(-3) ?? 1),
      headDim: pairs.map(({ key, value }) => ({ key: key.dims.at(-1) ?? 1, value: value.dims.at(-1) ?? 1 })),
      ...options,
    };
    const cache = this.createCache(shape);
    try {
      past.forEach((pair, layer) => cache.append(layer, pair.key, pair.value));
    } catch (error) {
      cache.dispose();
      throw error;
    }
    return cache;
  }

  /**
   * A cache of one paged cache per layer, whose pages it shares. Encoded pages stay as they are; a first dense page of
   * `keepFirst` tokens is the kept one; a last dense page with room goes on.
   * @throws KvPagesError `ERR_MISMATCH`, `ERR_SHAPE`, `ERR_UNSUPPORTED` with `layer` and `page`
   */
  fromPaged(layers: readonly PagedCache[], options: ModelCacheOptions): ModelCache {
    if (!Array.isArray(layers)) throw wrongType('layers', 'must be an array of PagedCache', layers);
    const handles = Uint32Array.from(layers, (layer, i) => Owned.handleOf(layer, PagedCache, this.session, `layers[${i}]`));
    return withConfig(this.session, options, (config) => {
      const { core, instance } = this.session;
      return new ModelCache(this.session, core.handle('kvp_cache_from_paged', instance, config, maxBytesOf(options), deviceOf(options), handles));
    });
  }

  /**
   * Reads the file that `cache.serialize` gives. All is checked first; all or nothing.
   * @param options what the file must be: `model`, and the shape and specs in the words of `createCache`
   * @throws KvPagesError `ERR_CORRUPT`, `ERR_UNSUPPORTED` with `byteOffset`; `ERR_MISMATCH` with `expected` and `actual`
   */
  restore(bytes: ArrayBufferLike | ArrayBufferView, options: RestoreOptions = {}): ModelCache {
    const { core } = this.session;
    const whole = bytesOf(bytes, 'bytes');
    const reader = this.#reader(options, []);
    try {
      const figures = new Float64Array(2);
      for (let at = 0; at < whole.length; at += chunkBytes) {
        core.call('kvp_restore_feed', reader.id, whole.subarray(at, at + chunkBytes), figures);
      }
      return new ModelCache(this.session, core.handle('kvp_restore_finish', reader.id));
    } finally {
      reader.dispose();
    }
  }

  /**
   * The same from a stream of the platform or of Node, from any iterable of bytes, or from bytes, page by page: no more than a
   * page is held beside the cache. A source that is not read to its end is cancelled.
   */
  async restoreAsync(source: ByteSource, options: RestoreOptions & AsyncOptions = {}): Promise<ModelCache> {
    const { core } = this.session;
    const reader = this.#reader(options, ['signal', 'onProgress']);
    const { signal, onProgress } = options;
    try {
      const figures = new Float64Array(2);
      for await (const chunk of chunksOf(source, signal)) {
        const bytes = bytesOf(chunk, 'source');
        for (let at = 0; at < bytes.length; at += chunkBytes) {
          throwIfAborted(signal, `${figures[1]} pages; nothing has been restored`);
          core.call('kvp_restore_feed', reader.id, bytes.subarray(at, at + chunkBytes), figures);
          if (figures[0]! > 0) onProgress?.({ done: figures[1]!, total: figures[0]! });
          await pause();
        }
      }
      throwIfAborted(signal, `${figures[1]} pages; nothing has been restored`);
      return new ModelCache(this.session, core.handle('kvp_restore_finish', reader.id));
    } finally {
      reader.dispose();
    }
  }

  /**
   * `attend` of several caches in one call.
   * @param queries `[caches, heads, tokens, head_dim]`
   * @returns `[caches, heads, tokens, head_dim]`
   */
  attendBatch(caches: readonly ModelCache[], layer: number, queries: TensorLike, options: AttendOptions = {}): Attention {
    if (!Array.isArray(caches)) throw wrongType('caches', 'must be an array of ModelCache', caches);
    requireNumber(layer, 'layer');
    const handles = Uint32Array.from(caches, (cache, i) => Owned.handleOf(cache, ModelCache, this.session, `caches[${i}]`));
    const headDim = caches[0]?.layers[layer]?.value.headDim ?? 0;
    return attend(this.session, 'kvp_cache_attend_batch', handles, layer, queries, headDim, options);
  }

  #reader(options: RestoreOptions, more: readonly string[]): Transfer {
    requireOptions(options, 'options', ['model', 'maxBytes', 'device', ...shapeOptions, ...more]);
    const { core, instance } = this.session;
    const { model, layers, kvHeads, headDim, preset, key, value } = options;
    const says = (spec: unknown) => (spec === undefined && preset === undefined ? 0 : 1);
    const create = (config: number) =>
      new Transfer(
        this.session,
        core.handle(
          'kvp_restore_create',
          instance,
          config,
          says(key),
          says(value),
          model === undefined ? 0 : 1,
          model === undefined ? '' : requireString(model, 'model'),
          maxBytesOf(options),
          deviceOf(options),
        ),
      );
    if ([layers, kvHeads, headDim, preset, key, value].every((part) => part === undefined)) return create(0);
    const shape = { layers, kvHeads, headDim, preset: preset ?? 'f32', key, value };
    const given = Object.fromEntries(Object.entries(shape).filter(([, part]) => part !== undefined));
    return withConfig(this.session, given as unknown as ModelCacheOptions, create);
  }
}

function maxBytesOf(options: { readonly maxBytes?: number }): number {
  return options.maxBytes === undefined ? 0 : requireNumber(options.maxBytes, 'maxBytes');
}

/** '' for the instance's own. */
function deviceOf(options: { readonly device?: CacheDevice }): string {
  return options.device === undefined ? '' : requireString(options.device, 'device');
}

/** Writes a piece into a stream of Node. */
function nodePut(sink: NodeSink): (piece: Uint8Array) => Promise<void> {
  return (piece) =>
    new Promise((resolve, reject) => {
      // A stream that is destroyed forgets the callback of the write that it is at.
      const closed = () => reject(sink.errored ?? new KvPagesError('ERR_ABORTED', 'the sink was closed before it had taken everything', {}));
      sink.once?.('close', closed);
      sink.write(piece, (error) => {
        sink.off?.('close', closed);
        if (error) reject(error);
        else resolve();
      });
    });
}

/** Writes a piece into a stream of the platform. */
function webPut(sink: WritableStreamDefaultWriter<Uint8Array>): (piece: Uint8Array) => Promise<void> {
  // Node 20 answers a write into a closed stream with an internal assertion.
  let closed = false;
  sink.closed.then(
    () => (closed = true),
    () => {},
  );
  return async (piece) => {
    if (closed) throw new TypeError('sink: must not be closed');
    await sink.write(piece);
  };
}

/** A promise that rejects when `signal` says so, until it is told to forget it. */
function whenAborted(signal: AbortSignal | undefined, message: string): { readonly aborted: Promise<never>; readonly forget: () => void } {
  requireSignal(signal);
  let stop = () => {};
  const aborted = new Promise<never>((_, reject) => {
    stop = () => reject(new KvPagesError('ERR_ABORTED', message, {}, { cause: signal?.reason }));
    signal?.addEventListener('abort', stop);
  });
  aborted.catch(() => {}); // also where nobody waits for it
  return { aborted, forget: () => signal?.removeEventListener('abort', stop) };
}

/** Calls `use` with a configuration, which is given up afterwards. */
function withConfig<T>(session: Session, options: ModelCacheOptions, use: (config: number) => T): T {
  requireOptions(options, 'options', cacheOptions);
  const { preset = 'kv4', window = 0, pageTokens, keepFirst = 4, keepRecent = 0, residual = 0, hot = 'bf16' } = options;
  requireString(preset, 'preset');
  const dims = listOf<HeadDim>(options.headDim).map((dim: HeadDim, i) => {
    if (typeof dim === 'number') return { key: dim, value: dim };
    const at = `headDim${Array.isArray(options.headDim) ? `[${i}]` : ''}`;
    const sides: { readonly key: number; readonly value: number } = dim;
    if (typeof dim !== 'object') throw wrongType(at, 'must be a number or { key, value }', dim);
    requireOptions(dim as unknown, at, ['key', 'value']);
    return { key: requireNumber(sides.key, `${at}.key`), value: requireNumber(sides.value, `${at}.value`) };
  });
  const { key: keySpec = preset, value: valueSpec = preset } = options;
  const key = sideWords(keySpec, 'key');
  const value = sideWords(valueSpec, 'value');
  const config = session.core.handle(
    'kvp_config_create',
    requireNumber(options.layers, 'layers'),
    int64Array(listOf(options.kvHeads), 'kvHeads'),
    int64Array(dims.map((dim) => dim.key), 'headDim'),
    int64Array(dims.map((dim) => dim.value), 'headDim'),
    int64Array(listOf(window), 'window'),
    key.specs,
    value.specs,
    key.options,
    value.options,
    pageTokens === undefined ? 0 : requirePositive(pageTokens, 'pageTokens'),
    requireNumber(keepFirst, 'keepFirst'),
    requireNumber(keepRecent, 'keepRecent'),
    requireNumber(residual, 'residual'),
    denseType(requireString(hot, 'hot')),
  );
  try {
    return use(config);
  } finally {
    session.core.call('kvp_release', config);
  }
}

function listOf<T>(value: T | readonly T[]): readonly T[] {
  return Array.isArray(value) ? (value as readonly T[]) : [value as T];
}

/** Specs and options of one side, a line for each. */
function sideWords(side: string | SideSpec | ReadonlyArray<string | SideSpec>, argument: string): { specs: string; options: string } {
  const at = (i: number) => (Array.isArray(side) ? `${argument}[${i}]` : argument);
  const sides = listOf(side).map((one, i) => requireSpec<SideSpec>(one, at(i), ['spec', ...specOptions]));
  // A line feed stands between layers.
  const specs = sides.map((one, i) => requireString(one.spec, `${at(i)}.spec`).replaceAll('\n', ' '));
  const options = sides.map((one, i) => optionWords(one, `${at(i)}.`));
  return { specs: specs.join('\n'), options: options.join('\n') };
}

type TensorArguments = [bytes: Uint8Array, type: string, dims: BigInt64Array, strides: BigInt64Array];

function tensorArguments(tensor: unknown, argument: string): TensorArguments {
  const { bytes, type, dims, strides } = readTensor(tensor, argument);
  return [bytes, type, int64Array(dims, `${argument}.dims`), int64Array(strides, `${argument}.strides`)];
}

/** One tensor for all layers, or one per layer: those are laid one after the other, so that one call takes them. */
function layersArguments(tensors: unknown, argument: string): TensorArguments {
  if (!Array.isArray(tensors)) return tensorArguments(tensors, argument);
  const raw = tensors.map((tensor: unknown, i) => readTensor(tensor, `${argument}[${i}]`));
  const type = raw[0]?.type ?? 'f32';
  const other = raw.findIndex((tensor) => tensor.type !== type);
  if (other >= 0) {
    throw new KvPagesError('ERR_ARGUMENT', `${argument}[${other}]: must have the type of the first tensor, ${type}, got ${raw[other]!.type}`, {
      argument: `${argument}[${other}]`,
      layer: other,
      expected: type,
      actual: raw[other]!.type,
    });
  }
  const dims = raw.flatMap((tensor, i) => {
    const inner = tensor.dims.slice(-3);
    if (inner.length !== 3 || tensor.dims.slice(0, -3).some((dim) => dim !== 1)) {
      throw new KvPagesError('ERR_SHAPE', `${argument}[${i}]: must be [kv_heads, tokens, head_dim], got [${tensor.dims}]`, {
        argument: `${argument}[${i}]`,
        layer: i,
      });
    }
    return inner;
  });
  const sizes = int64Array(dims, `${argument}.dims`);
  const parts = raw.map((tensor, i) => contiguousBytes(tensor, `${argument}[${i}]`));
  return [joined(parts), type, sizes, new BigInt64Array(0)];
}

/** Bytes of a tensor of three dims without its strides; laid side by side, one that is too long would make up for one that is too short. */
function contiguousBytes({ bytes, type, dims, strides }: RawTensor, argument: string): Uint8Array {
  const [heads = 0, tokens = 0, width = 0] = dims.slice(-3);
  if (strides.length === 0) {
    const size = heads * tokens * width * bytesPerElement(type);
    if (bytesPerElement(type) === 0 || bytes.length === size) return bytes; // of another type the core says that it takes none
    throw new KvPagesError('ERR_SHAPE', `${argument}: dims need ${size} bytes, got ${bytes.length}`, {
      argument,
      expected: `${size}`,
      actual: `${bytes.length}`,
    });
  }
  const [headStride = 0, tokenStride = 0, step = 0] = strides.slice(-3);
  const row = width * bytesPerElement(type);
  const last = ((heads - 1) * headStride + (tokens - 1) * tokenStride) * bytesPerElement(type) + row;
  if (strides.length !== dims.length || step !== 1 || headStride < 0 || tokenStride < 0 || last > bytes.length) {
    throw new KvPagesError('ERR_SHAPE', `${argument}: strides must be one per dim, 1 for the last, and within the data, got [${strides}] for [${dims}]`, {
      argument,
    });
  }
  const out = new Uint8Array(heads * tokens * row);
  for (let head = 0; head < heads; ++head) {
    for (let token = 0; token < tokens; ++token) {
      const from = (head * headStride + token * tokenStride) * bytesPerElement(type);
      out.set(bytes.subarray(from, from + row), (head * tokens + token) * row);
    }
  }
  return out;
}

function joined(parts: readonly Uint8Array[]): Uint8Array<ArrayBuffer> {
  const out = new Uint8Array(parts.reduce((sum, part) => sum + part.length, 0));
  let at = 0;
  for (const part of parts) {
    out.set(part, at);
    at += part.length;
  }
  return out;
}

const attendOptions = ['scale', 'queryStart', 'window', 'sinks', 'softcap', 'sinkLogits', 'out', 'lse'];

function attend(
  session: Session,
  name: string,
  caches: number | Uint32Array,
  layer: number,
  queries: unknown,
  headDim: number,
  options: AttendOptions,
): Attention {
  requireOptions(options, 'options', attendOptions);
  const raw = readTensor(queries, 'queries');
  const number = (key: 'scale' | 'queryStart' | 'window' | 'sinks' | 'softcap', fallback: number) =>
    options[key] === undefined ? fallback : requireGiven(options[key], key);
  const numbers = Float64Array.of(
    number('scale', Number.NaN),
    number('queryStart', Number.NaN),
    number('window', Number.NaN),
    number('sinks', 0),
    number('softcap', 0),
    options.lse === undefined || options.lse === false ? 0 : 1,
  );
  const outer = raw.dims.slice(0, -1);
  const rows = outer.reduce((product, dim) => product * dim, 1);
  const size = rows > 0 && rows <= raw.bytes.length ? rows * headDim : 0; // more rows than bytes: the core refuses the dims
  const { out = new Float32Array(size), lse = false, sinkLogits = [] } = options;
  if (!(out instanceof Float32Array)) throw wrongType('out', 'must be a Float32Array', out);
  if (typeof lse !== 'boolean' && !(lse instanceof Float32Array)) throw wrongType('lse', 'must be a boolean or a Float32Array', lse);
  const logs = lse === true ? new Float32Array(size === 0 ? 0 : rows) : lse === false ? undefined : lse;
  session.core.call(
    name,
    caches,
    layer,
    raw.bytes,
    raw.type,
    int64Array(raw.dims, 'queries.dims'),
    int64Array(raw.strides, 'queries.strides'),
    numbers,
    float32Array(sinkLogits, 'sinkLogits'),
    out,
    logs ?? new Float32Array(0),
  );
  return { data: out, dims: [...outer, headDim], ...(logs === undefined ? {} : { lse: logs }) };
}

function freezeFigures(figures: Float64Array, at: number): FreezeFigures {
  const [pages, elements, rmse, maxError, saturated, bytesBefore, bytesAfter] = figures.subarray(at, at + 7) as unknown as [
    number,
    number,
    number,
    number,
    number,
    number,
    number,
  ];
  return { pages, elements, rmse, maxError, saturated, bytesBefore, bytesAfter };
}
function addFigures(a: FreezeFigures, b: FreezeFigures): FreezeFigures {
  const elements = a.elements + b.elements;
  return {
    pages: a.pages + b.pages,
    elements,
    rmse: elements === 0 ? 0 : Math.sqrt((a.rmse ** 2 * a.elements + b.rmse ** 2 * b.elements) / elements),
    maxError: Math.max(a.maxError, b.maxError),
    saturated: a.saturated + b.saturated,
    bytesBefore: a.bytesBefore + b.bytesBefore,
    bytesAfter: a.bytesAfter + b.bytesAfter,
  };
}

function float32Array(values: Float32Array | readonly number[], argument: string): Float32Array {
  if (values instanceof Float32Array) return values;
  if (!Array.isArray(values)) throw wrongType(argument, 'must be a Float32Array or an array of numbers', values);
  return Float32Array.from(values as number[], (value, i) => requireNumber(value, `${argument}[${i}]`));
}

function uint32Array(values: Uint32Array | readonly number[], argument: string): Uint32Array {
  if (values instanceof Uint32Array) return values;
  if (!Array.isArray(values)) throw wrongType(argument, 'must be a Uint32Array or an array of integers', values);
  return Uint32Array.from(values as number[], (value, i) => {
    if (typeof value !== 'number' || value >>> 0 !== value) throw wrongType(`${argument}[${i}]`, 'must be an integer of 32 bits, not negative', value);
    return value;
  });
}

function progressOf(core: Core, writer: number): { readonly done: number; readonly total: number } {
  const figures = new Float64Array(2);
  core.call('kvp_save_progress', writer, figures);
  return { done: figures[1]!, total: figures[0]! };
}

function nextPiece(core: Core, writer: number): Uint8Array<ArrayBuffer> {
  const blob = core.handle('kvp_save_next', writer, chunkBytes);
  try {
    const bytes = new Uint8Array(core.number('kvp_blob_size', blob));
    core.call('kvp_blob_read', blob, bytes);
    return bytes;
  } finally {
    core.call('kvp_release', blob);
  }
}

/** Chunks of any source; a waiting source does not keep an abort from being seen, and is cancelled when it is left early. */
async function* chunksOf(source: ByteSource, signal: AbortSignal | undefined): AsyncGenerator<Uint8Array, void, undefined> {
  if (typeof source !== 'object' || source === null) throw wrongType('source', 'must be a stream, an iterable of bytes, or bytes', source);
  if (ArrayBuffer.isView(source) || !('getReader' in source || Symbol.asyncIterator in source || Symbol.iterator in source)) {
    yield bytesOf(source, 'source');
    return;
  }
  let next: () => Promise<IteratorResult<Uint8Array>>;
  let leave: (reason: unknown) => unknown;
  if ('getReader' in source) {
    const reader = source.getReader();
    next = () => reader.read() as Promise<IteratorResult<Uint8Array>>;
    leave = (reason) => reader.cancel(reason);
  } else {
    const iterator = Symbol.asyncIterator in source ? source[Symbol.asyncIterator]() : source[Symbol.iterator]();
    next = async () => iterator.next();
    leave = () => iterator.return?.();
  }
  let ended = false;
  const { aborted, forget } = whenAborted(signal, 'aborted while waiting for bytes; nothing has been restored');
  try {
    throwIfAborted(signal, 'nothing');
    for (;;) {
      const { done, value } = await Promise.race([next(), aborted]);
      if (done) {
        ended = true;
        return;
      }
      yield value;
    }
  } finally {
    forget();
    if (!ended) {
      // A generator that hangs must not keep the caller: nobody waits for the source to have stopped.
      void (async () => leave(signal?.reason))().catch(() => {});
    }
  }
}
