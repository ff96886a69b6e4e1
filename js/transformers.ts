// SPDX-License-Identifier: Apache-2.0
// Stands in for transformers.js's DynamicCache: generate() reads its past out of a ModelCache and puts what is new into it. Public as
// `kvpages/transformers`. Knows transformers.js only by what generate() does with a cache: its enumerable properties are the inputs
// of the next run, update() takes the outputs of the last one.
import { KvPagesError } from './errors.js';
import type { KvPages } from './kv-pages.js';
import type { CacheStats, ModelCache, ModelCacheOptions } from './model-cache.js';
import { appendLayers, newTokens } from './ort.js';
import type { OrtTensor } from './ort.js';
import { disposeSymbol } from './owned.js';
import { denseType, requireObject, wrongType } from './tensor.js';

/** transformers.js's class `Tensor`. */
// eslint-disable-next-line @typescript-eslint/no-explicit-any
type TensorClass = new (type: any, data: any, dims: any) => { readonly ort_tensor: unknown };

/** Options of the cache but for the shape, which is the model's. */
export type QuantizedCacheOptions = Omit<ModelCacheOptions, 'layers' | 'kvHeads' | 'headDim'>;

export interface FromCacheOptions {
  /** transformers.js's class `Tensor`. */
  readonly Tensor: TensorClass;
  /** Type of the model's past, `float32` by default. */
  readonly type?: 'float32' | 'float16';
}

interface Layer {
  /** Names of the inputs. */
  readonly key: string;
  readonly value: string;
}

/** Names of what a ModelCache can hold; another entry (a convolution's state, an encoder's keys) stays the tensor that it is. */
const cached = /^past_key_values\.(\d{1,6})\.(?:decoder\.)?(key|value)$/;

/**
 * A cache for `generate` of transformers.js whose keys and values are quantized between the steps.
 *
 * ```js
 * const past_key_values = new QuantizedCache(kv, { preset: 'kv4' });
 * const output = await model.generate({ ...inputs, past_key_values, max_new_tokens: 64 });
 * console.log(past_key_values.stats().byteLength);
 * ```
 *
 * Pass it again, with all tokens so far, and the conversation goes on. One sequence (batch 1), on the CPU or WebAssembly. A step
 * thaws the past for the model, which is an unchanged graph; docs/models.md says what that means for memory.
 */
export class QuantizedCache {
  /** The past as generate() sees it, which is what the class that this one stands in for declares. */
  // eslint-disable-next-line @typescript-eslint/no-explicit-any
  [entry: string]: any;

  readonly #kv: KvPages;
  readonly #options: QuantizedCacheOptions;
  #cache: ModelCache | undefined;
  #layers: readonly Layer[] = [];
  #type: 'float32' | 'float16' = 'float32';
  #Tensor: TensorClass | undefined;
  /** The other side of the layer that was thawed last: the model asks for both, one after the other. */
  #spare: { readonly layer: number; readonly side: 'key' | 'value'; readonly data: unknown } | undefined;

  /** @param options preset or specs, pages and limits, as for `kv.createCache`; checked when the first token comes */
  constructor(kv: KvPages, options: QuantizedCacheOptions = {}) {
    requireObject(kv, 'kv');
    requireObject(options, 'options');
    this.#kv = kv;
    this.#options = options;
  }

  /**
   * Goes on with a cache that is there, a restored one for example. It belongs to the new object from now on.
   * `QuantizedCache.from(kv, kv.restore(bytes), { Tensor })`
   */
  static from(kv: KvPages, cache: ModelCache, options: FromCacheOptions): QuantizedCache {
    requireObject(cache, 'cache');
    requireObject(options, 'options');
    const { Tensor, type = 'float32' } = options;
    if (typeof Tensor !== 'function') throw wrongType('Tensor', "must be transformers.js's class Tensor", Tensor);
    const made = new QuantizedCache(kv);
    made.#adopt(cache, cache.layers.map((_, layer) => ({ key: `past_key_values.${layer}.key`, value: `past_key_values.${layer}.value` })), type, Tensor);
    return made;
  }

  /** The cache itself, once the model has been run: `cache.serialize()`, `cache.pages(0)`. */
  get cache(): ModelCache | undefined {
    return this.#cache;
  }

  /** Exact sizes of what is held between the steps. */
  stats(): CacheStats {
    return this.#held().stats();
  }

  /** Tokens that are held. */
  get_seq_length(): number {
    return this.#cache?.tokens ?? 0;
  }

  /**
   * Takes the present of a run: what is new in it goes into the cache, full pages are encoded.
   * @throws KvPagesError `ERR_UNSUPPORTED`, `ERR_SHAPE`, what `kv.createCache` and `append` throw; nothing has changed then
   */
  update(entries: Readonly<Record<string, OrtTensor>>): void {
    requireObject(entries, 'entries');
    const names = Object.keys(entries).filter((name) => cached.test(name));
    // Before the first run generate() makes up an empty past, whose dims may be 0 where the model's file has names for them.
    if (names.some((name) => !entries[name]?.dims.includes(0))) this.#append(entries, names);
    for (const name of Object.keys(entries)) {
      if (!names.includes(name)) this[name] = entries[name];
    }
  }

  /** A cache of its own with the same pages. */
  fork(): QuantizedCache {
    const made = new QuantizedCache(this.#kv, this.#options);
    if (this.#cache !== undefined) made.#adopt(this.#cache.fork(), this.#layers, this.#type, this.#Tensor!);
    for (const [name, tensor] of this.#others()) made[name] = tensor;
    return made;
  }

  /** Forgets tokens `tokens` and later. */
  truncate(tokens: number): void {
    const [other] = this.#others()[0] ?? [];
    if (other !== undefined) {
      throw new KvPagesError('ERR_UNSUPPORTED', `tokens: must stay, the model has a state that cannot go back (${other})`, { argument: 'tokens', actual: other });
    }
    this.#spare = undefined;
    this.#held().truncate(tokens);
  }

  /** Gives the memory back. `generate` does so itself only with a cache that it made. */
  async dispose(): Promise<void> {
    this[disposeSymbol]();
  }

  [disposeSymbol](): void {
    this.#spare = undefined;
    for (const name of Object.keys(this)) delete this[name];
    this.#cache?.dispose();
  }

  #held(): ModelCache {
    if (this.#cache !== undefined) return this.#cache;
    throw new KvPagesError('ERR_ARGUMENT', 'cache: must have been given to generate() first, it knows no model yet', { argument: 'cache' });
  }

  #others(): Array<[string, unknown]> {
    return Object.keys(this).filter((name) => !cached.test(name)).map((name) => [name, this[name]]);
  }

  #append(entries: Readonly<Record<string, OrtTensor>>, names: readonly string[]): void {
    const first = entries[names[0]!]!;
    requireObject(first, `entries['${names[0]}']`);
    const fresh = this.#cache === undefined;
    const layers = fresh ? layersOf(names) : this.#layers;
    const batch = first.dims[0];
    if (batch !== 1) {
      throw new KvPagesError('ERR_UNSUPPORTED', `${names[0]}: must be of one sequence, a cache holds no more, got a batch of ${batch}`, {
        argument: names[0]!,
        expected: '1',
        actual: String(batch),
      });
    }
    const sizeOf = (name: string) => {
      const { dims, type } = entries[name] ?? { dims: [], type: 'none' };
      if (denseType(type) !== 'f32' && denseType(type) !== 'f16') {
        throw new KvPagesError('ERR_UNSUPPORTED', `${name}: must be float32 or float16, got ${type}`, { argument: name, expected: 'float32 float16', actual: type });
      }
      return { heads: dims[1] ?? 0, headDim: dims[3] ?? 0 };
    };
    const sizes = layers.map(({ key, value }) => ({ key: sizeOf(key), value: sizeOf(value) }));
    const cache = fresh
      ? this.#kv.createCache({
          ...this.#options,
          layers: layers.length,
          kvHeads: sizes.map(({ key }) => key.heads),
          headDim: sizes.map(({ key, value }) => ({ key: key.headDim, value: value.headDim })),
        })
      : this.#cache!;
    try {
      const before = cache.tokens;
      const parts = layers.map((layer, index) => {
        const { kvHeads, key, value } = cache.layers[index]!;
        const part = (side: 'key' | 'value', headDim: number) => newTokens(entries[layer[side]], layer[side], { layer: index, side }, kvHeads, headDim, before);
        return { key: part('key', key.headDim), value: part('value', value.headDim) };
      });
      if (parts[0]!.key.dims[1] > 0) appendLayers(cache, parts, before);
    } catch (error) {
      if (fresh) cache.dispose();
      throw error;
    }
    this.#spare = undefined;
    if (fresh) this.#adopt(cache, layers, first.type as 'float32' | 'float16', first.constructor as TensorClass);
  }

  #adopt(cache: ModelCache, layers: readonly Layer[], type: 'float32' | 'float16', Tensor: TensorClass): void {
    this.#cache = cache;
    this.#layers = layers;
    this.#type = type;
    this.#Tensor = Tensor;
    layers.forEach((layer, index) => {
      for (const side of ['key', 'value'] as const) {
        Object.defineProperty(this, layer[side], { enumerable: true, configurable: true, get: () => this.#tensor(index, side) });
      }
    });
  }

  /** A tensor that is thawed when the model's run asks for its content, and held by nobody else. */
  #tensor(layer: number, side: 'key' | 'value'): unknown {
    const { kvHeads, [side]: info } = this.#cache!.layers[layer]!;
    const dims = [1, kvHeads, this.#cache!.tokensOf(layer), info.headDim];
    const thaw = () => new this.#Tensor!(this.#type, this.#thaw(layer, side), dims).ort_tensor;
    const shown = { type: this.#type, dims, size: dims.reduce((a, b) => a * b, 1), location: 'cpu' };
    const properties = Object.entries(shown).map(([name, value]) => [name, { value }] as const);
    return Object.create(this.#Tensor!.prototype as object, { ...Object.fromEntries(properties), ort_tensor: { get: thaw } });
  }

  #thaw(layer: number, side: 'key' | 'value'): unknown {
    const spare = this.#spare;
    this.#spare = undefined;
    if (spare?.layer === layer && spare.side === side) return spare.data;
    const other = side === 'key' ? 'value' : 'key';
    const both = this.#cache!.read(layer, { type: this.#type });
    this.#spare = { layer, side: other, data: plain(both[other].data) };
    return plain(both[side].data);
  }
}

/** Halves as bit patterns, which every onnxruntime takes. */
function plain(data: ArrayBufferView): ArrayBufferView {
  return data instanceof Float32Array ? data : new Uint16Array(data.buffer, data.byteOffset, data.byteLength / 2);
}

/** Key and value names by layer; a model may have cached layers and others. */
function layersOf(names: readonly string[]): Layer[] {
  const found = new Map<number, { key?: string; value?: string }>();
  for (const name of names) {
    const [, number, side] = cached.exec(name)!;
    const layer = found.get(Number(number)) ?? {};
    found.set(Number(number), layer);
    layer[side as 'key' | 'value'] = name;
  }
  return [...found]
    .sort(([a], [b]) => a - b)
    .map(([number, { key, value }], layer) => {
      if (key !== undefined && value !== undefined) return { key, value };
      throw new KvPagesError('ERR_MISMATCH', `past_key_values.${number}: must have a key and a value, got ${key ?? value} alone`, { layer });
    });
}
