// SPDX-License-Identifier: Apache-2.0
// What load() gives: one instance of the core and everything that makes objects in it.
import { Core } from './binding.js';
import type { CoreFunctions } from './binding.js';
import type { ErrorCode } from './errors.js';
import { disposeSymbol, Owned } from './owned.js';
import type { Session } from './owned.js';
import {
  createPagedCache,
  PagedCache,
  parsePagedCache,
  quantizePagedCache,
  quantizePagedCacheAsync,
  splitIntoPages,
} from './paged-cache.js';
import type { AsyncOptions, Destination, PagedCacheOptions, PageSource } from './paged-cache.js';
import { ModelCacheMethods } from './model-cache.js';
import { QuantizedTensor } from './quantized-tensor.js';
import type { DequantizeOptions, Figures } from './quantized-tensor.js';
import {
  int64Array,
  optionWords,
  readTensor,
  requireInteger,
  requireNumber,
  requireObject,
  requireOptions,
  requireSpec,
  requireString,
  requireValid,
  specOptions,
  wrongType,
} from './tensor.js';
import type { DenseTensor, TensorLike } from './tensor.js';

/** Where the core runs: `native` is Node's addon, `wasm` WebAssembly, `cuda` the addon with a GPU. */
export type Backend = 'cuda' | 'native' | 'wasm';
/** SIMD kernels of the core, `reference` for plain loops. All give the same bytes. */
export type Kernels = 'reference' | 'sse4' | 'avx2' | 'avx512' | 'neon' | 'wasm128';

/** Where the WebAssembly module comes from. */
export type WasmSource = string | URL | BufferSource | Response | WebAssembly.Module | PromiseLike<Response>;

export interface LoadOptions {
  /** `auto` (the default) takes, in Node, the addon where it loads, with a GPU where it finds one that it can use, and
   * WebAssembly otherwise. Another word is that or an error.
   * In Node the environment variable `KVPAGES_BACKEND` stands in where the option is not given. */
  readonly backend?: 'auto' | Backend;
  /** `auto` (the default) takes the best that the processor has. `KVPAGES_KERNELS` stands in as for `backend`. */
  readonly kernels?: 'auto' | Kernels;
  /**
   * Most bytes that objects of this instance may hold together; 0 (the default) for no limit. Beyond it: `ERR_LIMIT`.
   */
  readonly maxBytes?: number;
  /** The WebAssembly module, where it is not beside the package's script: bundles, workerd, extensions. */
  readonly wasm?: WasmSource;
}

/** A backend of this environment: whether it can be had, and why not. */
export interface BackendInfo {
  readonly backend: Backend;
  readonly available: boolean;
  /** What was found, in words. */
  readonly reason: string;
}

/** The GPU of an instance. */
export interface DeviceInfo {
  readonly name: 'cuda';
  /** Name, compute capability, driver. */
  readonly description: string;
  /** Bytes of its memory that the instance has taken: caches in pieces of a pool, and working memory. */
  readonly heldBytes: number;
  /** The failure after which it does nothing any more; caches that lie there are lost, those elsewhere and files are not. */
  readonly error?: string;
}

/** An element type of specs. */
export interface TypeInfo {
  /** The word in a spec. */
  readonly name: string;
  readonly family: 'dense' | 'integer' | 'float' | 'levels' | 'scheme';
  readonly bits: number;
  readonly signed: boolean;
  /** Number in ONNX's TensorProto.DataType, 0 where it has none that an affine layout may store. */
  readonly onnx: number;
  /** Elements of a scheme's block, 0 where the spec chooses. */
  readonly block: number;
}

/** Everything that a spec can say. */
export interface Formats {
  readonly types: readonly TypeInfo[];
  /** Names for a spec for keys and one for values. */
  readonly presets: ReadonlyArray<{ readonly name: string; readonly key: string; readonly value: string }>;
  /** Every type x axis x calibration x scale-type that there is, every part spelt out. */
  readonly specs: readonly string[];
}

interface Catalogue extends Formats {
  readonly version: string;
  readonly status: Readonly<Record<string, number>>;
  readonly kernels: ReadonlyArray<{ readonly name: Kernels; readonly available: boolean }>;
}

/** A spec string with what does not change decoding. */
export interface QuantizeOptions {
  /** `type[/axis[/block]][/calibration][/scale-type][+center][+hadamard]`, or a preset's name. */
  readonly spec: string;
  /** Calibration `given`: the one scale of axis `tensor`. f32, finite, > 0. */
  readonly scale?: number;
  /** Calibration `given`: one scale per group, in the order of the format's scales. */
  readonly scales?: Float32Array | readonly number[];
  /** Calibration `given`: code of the value 0, one for all groups; 0 by default. */
  readonly zeroPoint?: number;
  /** Calibration `given`: one zero point per scale. */
  readonly zeroPoints?: Int32Array | readonly number[];
  /** Which half of a preset. */
  readonly side?: 'key' | 'value';
  /** Only the first `valid` tokens are read; the others hold what their scales make of zeros, which is 0 for most formats. All by
   * default. */
  readonly valid?: number;
  /** Type of a bare typed array's elements, where the array does not say it. */
  readonly type?: string;
  /** Dims of a bare typed array, `[batch, kv_heads, tokens, head_dim]`; one dim of its length by default. */
  readonly dims?: readonly number[];
  /** Float codes beyond the largest value: `saturate` (the default) or `nan`. */
  readonly overflow?: 'saturate' | 'nan';
  /** nvfp4: the global scale, `amax/2688` (the default), `amax/448` or `amax/6` of the largest magnitude; a number is taken as given. */
  readonly global?: 'amax/2688' | 'amax/448' | 'amax/6' | number;
  /** MX: `floor` (the default, may clip) or `ceil`. */
  readonly rule?: 'floor' | 'ceil';
  /** NaN and infinities in the valid tokens: `error` (the default), `saturate` or `pass`. */
  readonly nonFinite?: 'error' | 'saturate' | 'pass';
  /** Length of the runs of `+hadamard`: `largest` (the default) power of two that divides head_dim; `llama-key`, `llama-value`: what
   * llama.cpp rotates its keys and values by, and no rotation where 64 does not divide head_dim. */
  readonly hadamardRun?: 'largest' | 'llama-key' | 'llama-value';
}
const quantizeOptions: readonly string[] = [
  'spec',
  'scale',
  'scales',
  'zeroPoint',
  'zeroPoints',
  'side',
  'valid',
  'type',
  'dims',
  ...specOptions,
];

/** What a loader found out before an instance is made.
 * @internal */
export interface Loaded {
  readonly functions: CoreFunctions;
  readonly backend: Backend;
  readonly reason: string;
  readonly backends: readonly BackendInfo[];
}

/** One loaded core. Objects of one instance do not go into calls of another. */
export class KvPages extends ModelCacheMethods {
  readonly #session: Session;
  readonly #loaded: Loaded;
  readonly #catalogue: Catalogue;
  #alive = true;

  /** Use `load()`.
   * @internal */
  constructor(loaded: Loaded, kernels: string, maxBytes: number) {
    super();
    const core = new Core(loaded.functions);
    this.#loaded = loaded;
    this.#catalogue = core.json<Catalogue>('kvp_catalogue');
    const instance = core.handle('kvp_instance_create', kernels, maxBytes);
    try {
      if (loaded.backend === 'cuda') core.call('kvp_instance_device', instance, 'cuda');
    } catch (error) {
      core.call('kvp_release', instance);
      throw error;
    }
    this.#session = { core, instance, backend: loaded.backend };
  }

  /** @internal */
  protected override get session(): Session {
    return this.#session;
  }

  get #info(): { kernels: Kernels; usedBytes: number; maxBytes: number; device?: DeviceInfo } {
    return this.#session.core.json('kvp_instance_info', this.#session.instance);
  }
  /** Where the core runs. */
  get backend(): Backend {
    return this.#loaded.backend;
  }
  /** Why it runs there. */
  get reason(): string {
    return this.#loaded.reason;
  }
  /** The kernels in use. */
  get kernels(): Kernels {
    return this.#info.kernels;
  }
  /** The GPU where `backend` is `cuda`. */
  get device(): DeviceInfo | undefined {
    return this.#info.device;
  }
  /** Bytes that objects of this instance hold, on a device too. */
  get usedBytes(): number {
    return this.#info.usedBytes;
  }
  /** Version of the core. */
  get version(): string {
    return this.#catalogue.version;
  }
  /** The core's error codes with their numbers in the C ABI. */
  get errorCodes(): Readonly<Record<ErrorCode, number>> {
    return Object.fromEntries(Object.entries(this.#catalogue.status).filter(([, number]) => number !== 0)) as Record<
      ErrorCode,
      number
    >;
  }

  /** Every backend with the reason why it can or cannot be had here, and the kernels of the loaded core. */
  backends(): { readonly backends: readonly BackendInfo[]; readonly kernels: Catalogue['kernels'] } {
    return { backends: this.#loaded.backends, kernels: this.#catalogue.kernels };
  }

  /** Every type, preset and allowed spec. */
  formats(): Formats {
    const { types, presets, specs } = this.#catalogue;
    return { types, presets, specs };
  }

  /**
   * Encodes a tensor. Given scales:
   * `kv.quantize(x, { spec: 'int4/tensor/given', scale: 0.25, zeroPoint: 0 })`; found scales:
   * `kv.quantize(x, 'int8/token/64')`.
   * @param tensor row-major `[batch, kv_heads, tokens, head_dim]`, fewer dims are padded with 1 in front; not
   *   changed, and copied: only `figures` of the result looks at it again
   * @returns the encoded tensor; its `figures` say what was lost
   * @param spec a spec string, a preset's name, or an object with a spec and options
   * @throws KvPagesError `ERR_SPEC`, `ERR_SHAPE`, `ERR_NON_FINITE` (names the first index), `ERR_ARGUMENT`,
   *   `ERR_LIMIT`, `ERR_MEMORY`
   */
  quantize(tensor: TensorLike | ArrayBufferView, spec: string | QuantizeOptions): QuantizedTensor {
    const options = requireSpec<QuantizeOptions>(spec, 'spec', quantizeOptions);
    const raw = readTensor(tensor, 'tensor', { type: options.type, dims: options.dims });
    const { core, instance } = this.#session;
    const handle = core.handle(
      'kvp_quantize',
      instance,
      raw.bytes,
      raw.type,
      int64Array(raw.dims, 'tensor.dims'),
      int64Array(raw.strides, 'tensor.strides'),
      requireValid(options.valid),
      requireString(options.spec, 'spec'),
      options.side === undefined ? '' : requireString(options.side, 'side'),
      optionWords(options),
      Float32Array.from(numbers(options.scale, options.scales, 'scale', requireNumber)),
      Int32Array.from(numbers(options.zeroPoint, options.zeroPoints, 'zeroPoint', requireInteger)),
    );
    return new QuantizedTensor(this.#session, handle, { raw, valid: options.valid });
  }

  /**
   * Decodes an encoded or dense tensor, or some of its tokens.
   * @returns a dense tensor `[batch, kv_heads, end - start, head_dim]`
   * @throws KvPagesError `ERR_BUFFER`, `ERR_UNSUPPORTED`, `ERR_ARGUMENT`, `ERR_DISPOSED`
   */
  dequantize(tensor: QuantizedTensor, options?: DequantizeOptions): DenseTensor {
    Owned.handleOf(tensor, QuantizedTensor, this.#session, 'tensor');
    return tensor.dequantize(options);
  }

  /**
   * Takes codes that were packed elsewhere, in the form of onnx-light's affine layout.
   * @param parts.codes packed codes in tensor order, low code first, exactly ceil(elements * bits / 8) bytes
   * @param parts.axis dim that has several scales; left out: one scale for all
   * @param parts.block elements per scale along `axis`; left out: one scale per index
   * @param parts.zeroPoints one byte per scale, a number of the type or its low bits; left out: 0
   * @throws KvPagesError `ERR_SHAPE`, `ERR_ARGUMENT`, `ERR_UNSUPPORTED`
   */
  fromCodes(parts: {
    readonly type: string;
    readonly dims: readonly number[];
    readonly codes: ArrayBufferView;
    readonly scales: Float32Array | readonly number[];
    readonly zeroPoints?: Int8Array | Uint8Array;
    readonly axis?: number;
    readonly block?: number;
  }): QuantizedTensor {
    requireOptions(parts, 'parts', ['type', 'dims', 'codes', 'scales', 'zeroPoints', 'axis', 'block']);
    const { type, dims, codes, scales, zeroPoints, axis = -1, block = 0 } = parts;
    if (!ArrayBuffer.isView(codes)) throw wrongType('codes', 'must be a typed array', codes);
    if (zeroPoints !== undefined && !ArrayBuffer.isView(zeroPoints))
      throw wrongType('zeroPoints', 'must be a typed array', zeroPoints);
    const bytes = (view: ArrayBufferView) => new Uint8Array(view.buffer, view.byteOffset, view.byteLength);
    const handle = this.#session.core.handle(
      'kvp_payload_affine',
      this.#session.instance,
      bytes(codes),
      requireString(type, 'type'),
      int64Array(dims, 'dims'),
      Float32Array.from(numbers(undefined, scales, 'scale', requireNumber)),
      zeroPoints === undefined ? new Uint8Array(0) : bytes(zeroPoints),
      requireInteger(axis, 'axis'),
      requireNumber(block, 'block'),
    );
    return new QuantizedTensor(this.#session, handle);
  }

  /** The same as `tensor.measure(source)`: what an encoding lost against the tensor that it was made from. */
  measure(
    tensor: QuantizedTensor,
    source: TensorLike | QuantizedTensor,
    options?: { readonly valid?: number },
  ): Figures {
    Owned.handleOf(tensor, QuantizedTensor, this.#session, 'tensor');
    return tensor.measure(source, options);
  }

  /**
   * A cache of given pages. The whole is checked: starts from 0 without gaps, lengths within capacities, equal shapes.
   * @throws KvPagesError `ERR_SHAPE`, `ERR_ARGUMENT`, `ERR_MISMATCH` with `page` and `side`
   */
  createPagedCache(pages: Iterable<PageSource> = [], options: PagedCacheOptions = {}): PagedCache {
    return createPagedCache(this.#session, pages, options);
  }

  /**
   * Cuts one layer's keys and values into dense pages, bit for bit.
   * @param key `[batch, kv_heads, tokens, head_dim]`, f32, f16 or bf16
   * @param value the same tokens; its head_dim and type may be others
   * @param options.pageTokens tokens per page, 16 by default; the last page is as long as what is left
   */
  splitIntoPages(key: TensorLike, value: TensorLike, options: { readonly pageTokens?: number } = {}): PagedCache {
    requireOptions(options, 'options', ['pageTokens']);
    const { pageTokens = 16 } = options;
    return splitIntoPages(this.#session, key, value, pageTokens);
  }

  /**
   * Reads a serialized `PagedCacheProto`; zero bytes are an empty cache. All or nothing.
   * @param bytes not changed, not kept
   * @throws KvPagesError `ERR_CORRUPT`, `ERR_UNSUPPORTED`, `ERR_SHAPE` with `byteOffset` and `page` where known
   */
  parse(bytes: ArrayBufferLike | ArrayBufferView): PagedCache {
    return parsePagedCache(this.#session, bytes);
  }

  /**
   * Converts the chosen pages (onnx-light's operator `QuantizePagedCache`): each side is decoded, then encoded with
   * the given scale and zero point, or stored dense. Only valid tokens are read, unused rows become 0; all other
   * pages are shared.
   * @param cache not changed
   * @param pageIndices positions in `cache.pages`, each once, in any order; none is allowed
   * @param destinations what keys and what values become
   * @returns a new cache; every page of `cache` is checked first, and nothing is published on failure
   * @throws KvPagesError `ERR_ARGUMENT`, `ERR_NON_FINITE`, `ERR_UNSUPPORTED`, `ERR_LIMIT` with `page` and `side`
   *   where known
   */
  quantizePagedCache(
    cache: PagedCache,
    pageIndices: Iterable<number | bigint>,
    destinations: { readonly key: Destination; readonly value: Destination },
  ): PagedCache {
    return quantizePagedCache(this.#session, cache, pageIndices, destinations);
  }

  /**
   * `quantizePagedCache` page by page, letting events run between pages. The same result and the same errors, and
   * `ERR_ABORTED`.
   */
  quantizePagedCacheAsync(
    cache: PagedCache,
    pageIndices: Iterable<number | bigint>,
    destinations: { readonly key: Destination; readonly value: Destination },
    options?: AsyncOptions,
  ): Promise<PagedCache> {
    return quantizePagedCacheAsync(this.#session, cache, pageIndices, destinations, options);
  }

  /** Gives the instance up. Objects that it made live on until they are disposed; new ones cannot be made. */
  dispose(): void {
    if (!this.#alive) return;
    this.#alive = false;
    this.#session.core.call('kvp_release', this.#session.instance);
  }

  [disposeSymbol](): void {
    this.dispose();
  }
}

/** One value for all, or a list of them. */
function numbers(
  one: unknown,
  list: unknown,
  argument: string,
  require: (value: unknown, argument: string) => number,
): number[] {
  if (one !== undefined) {
    if (list !== undefined) throw new TypeError(`${argument}: give either one or a list, not both`);
    return [require(one, argument)];
  }
  if (list === undefined) return [];
  if (typeof list !== 'object' || list === null || !(Symbol.iterator in list))
    throw wrongType(`${argument}s`, 'must be an array of numbers', list);
  return Array.from(list as Iterable<unknown>, (value, i) => require(value, `${argument}s[${i}]`));
}
