// SPDX-License-Identifier: Apache-2.0
// The pages of one layer's keys and values.
import type { Core } from './binding.js';
import { KvPagesError } from './errors.js';
import { Owned } from './owned.js';
import type { Session } from './owned.js';
import { pause, throwIfAborted } from './pause.js';
import { QuantizedTensor, readContiguous } from './quantized-tensor.js';
import type { QuantizeFigures, TensorInfo } from './quantized-tensor.js';
import {
  bytesOf,
  bytesPerElement,
  denseType,
  int64Array,
  requireInteger,
  requireNumber,
  requireOptions,
  requirePositive,
  requireString,
  wrongType,
} from './tensor.js';
import type { DenseTypeWord, TensorLike } from './tensor.js';

/** A page as `PagedCache.pages` lists it. */
export interface PageInfo {
  /** Position of its first token. */
  readonly start: number;
  /** Valid tokens; the first rows of K and V. */
  readonly length: number;
  /** Tokens that K and V have room for. */
  readonly capacity: number;
  readonly key: TensorInfo;
  readonly value: TensorInfo;
}

/** A page with its tensors, which share the cache's memory and live on their own. */
export interface Page extends Pick<PageInfo, 'start' | 'length' | 'capacity'> {
  readonly key: QuantizedTensor;
  readonly value: QuantizedTensor;
}

/** A page to be added: tensors `[batch, kv_heads, capacity, head_dim]`. */
export interface PageSource {
  readonly key: TensorLike | QuantizedTensor;
  readonly value: TensorLike | QuantizedTensor;
  /** Position of the first token; by default where the page before ends. */
  readonly start?: number;
  /** Valid tokens; by default all. */
  readonly length?: number;
}

/** What one side of the chosen pages becomes: codes of an integer type, or dense elements. */
export type Destination =
  | {
      readonly type: 'int8' | 'uint8' | 'int4' | 'uint4' | 'int2' | 'uint2';
      /** Step between codes: finite and > 0 as f32. */
      readonly scale: number;
      /** Code of the value 0, within the type's range; 0 by default. */
      readonly zeroPoint?: number;
    }
  | {
      readonly type: DenseTypeWord;
      /** Not used, but checked as above where it is given: onnx-light's operator has it for every type. */
      readonly scale?: number;
      readonly zeroPoint?: number;
    };

export interface PagedCacheOptions {
  /** Texts that the file keeps. */
  readonly name?: string;
  readonly docString?: string;
}

/** What `quantizePagedCache` lost in one page. */
export interface PageFigures {
  /** Index of the page. */
  readonly page: number;
  readonly key: QuantizeFigures;
  readonly value: QuantizeFigures;
}

export interface AsyncOptions {
  /** Ends the work between two pages with `ERR_ABORTED`; nothing has changed then. */
  readonly signal?: AbortSignal;
  /** Called after each page. */
  readonly onProgress?: (progress: { readonly done: number; readonly total: number }) => void;
}

/**
 * Pages of keys and values, each side of each page dense or encoded by itself. Operations give new caches, which
 * share all pages that did not change; a cache once made stays as it is. The form of onnx-light's `PagedCacheProto`.
 */
export class PagedCache extends Owned {
  #info: { name?: string; docString?: string; pages: readonly PageInfo[] } | undefined;

  #made: { readonly from: PagedCache; readonly indices: readonly number[] } | undefined;
  #figures: readonly PageFigures[] = [];

  /** @internal `made`: the cache whose pages were converted, and which. */
  constructor(session: Session, handle: number, made?: { readonly from: PagedCache; readonly indices: readonly number[] }) {
    super(session, handle);
    this.#made = made;
  }

  /**
   * Of a cache that `quantizePagedCache` made: what was lost in each converted page, in the order of the page indices, measured over
   * the valid tokens when this is first read. The cache before is referred to until then, or until `dispose`. Empty for other caches.
   * @throws KvPagesError `ERR_DISPOSED` where the cache before was disposed of first, `ERR_UNSUPPORTED` where it holds an encoding
   *   that this version cannot read
   */
  get figures(): readonly PageFigures[] {
    if (this.#made === undefined) return this.#figures;
    const { from, indices } = this.#made;
    this.#figures = indices.map((page) => {
      const before = from.page(page);
      const after = this.page(page);
      try {
        return {
          page,
          key: after.key.figuresAgainst(before.key, before.length),
          value: after.value.figuresAgainst(before.value, before.length),
        };
      } finally {
        for (const tensor of [before.key, before.value, after.key, after.value]) tensor.dispose();
      }
    });
    this.#made = undefined;
    return this.#figures;
  }

  override dispose(): void {
    this.#made = undefined;
    super.dispose();
  }

  get #read(): { name?: string; docString?: string; pages: readonly PageInfo[] } {
    if (this.#info === undefined || this.disposed) this.#info = this.session.core.json('kvp_paged_info', this.handle);
    return this.#info!;
  }
  /** The cache's name, which its file keeps. */
  get name(): string | undefined {
    return this.#read.name;
  }
  get docString(): string | undefined {
    return this.#read.docString;
  }
  get pages(): readonly PageInfo[] {
    return this.#read.pages;
  }
  /** Valid tokens of all pages. */
  get tokens(): number {
    return this.pages.reduce((sum, page) => sum + page.length, 0);
  }
  /** Bytes of all payloads, K and V, rows past a page's length included. */
  get byteLength(): number {
    return this.pages.reduce((sum, page) => sum + page.key.byteLength + page.value.byteLength, 0);
  }

  /** The tensors of page `index`. @throws KvPagesError `ERR_ARGUMENT` where there is no such page */
  page(index: number): Page {
    requireNumber(index, 'page');
    const side = (name: string) =>
      new QuantizedTensor(this.session, this.session.core.handle('kvp_paged_payload', this.handle, index, name));
    const key = side('key');
    const value = side('value');
    const { start, length, capacity } = this.pages[index]!;
    return { start, length, capacity, key, value };
  }

  /** The same as `kv.quantizePagedCache(this, pageIndices, destinations)`. */
  quantize(
    pageIndices: Iterable<number | bigint>,
    destinations: { readonly key: Destination; readonly value: Destination },
  ): PagedCache {
    return quantizePagedCache(this.session, this, pageIndices, destinations);
  }

  /**
   * Bytes of a `PagedCacheProto`, fields in onnx-light's order.
   * @param options.out memory to write into, of exactly the serialized size
   * @throws KvPagesError `ERR_BUFFER` where `out` has another size
   */
  serialize(options: { readonly out?: ArrayBufferView } = {}): Uint8Array {
    requireOptions(options, 'options', ['out']);
    const { core } = this.session;
    const bytes =
      options.out === undefined
        ? new Uint8Array(core.number('kvp_paged_serialized_size', this.handle))
        : bytesOf(options.out, 'out');
    core.call('kvp_paged_serialize', this.handle, bytes);
    return bytes;
  }

  /** A cache of its own with the same pages; their memory is shared. */
  clone(): PagedCache {
    return new PagedCache(this.session, this.session.core.handle('kvp_paged_clone', this.handle));
  }
}

/** @internal */
export function parsePagedCache(session: Session, bytes: unknown): PagedCache {
  return new PagedCache(session, session.core.handle('kvp_paged_parse', session.instance, bytesOf(bytes, 'bytes')));
}

/** @internal */
export function quantizePagedCache(
  session: Session,
  cache: unknown,
  pageIndices: unknown,
  destinations: unknown,
): PagedCache {
  const handle = Owned.handleOf(cache, PagedCache, session, 'cache');
  const indices = int64Array(pageIndices, 'pageIndices');
  const { core } = session;
  const made = { from: cache as PagedCache, indices: Array.from(indices, Number) };
  return new PagedCache(session, core.handle('kvp_paged_quantize', handle, indices, ...readDestinations(destinations)), made);
}

type DestinationArguments = [
  keyScale: number,
  keyType: string,
  keyZero: number,
  valueScale: number,
  valueType: string,
  valueZero: number,
];

function readDestinations(destinations: unknown): DestinationArguments {
  requireOptions(destinations, 'destinations', ['key', 'value']);
  const { key, value } = destinations as Partial<Record<string, unknown>>;
  return [...readDestination(key, 'key'), ...readDestination(value, 'value')];
}

function readDestination(destination: unknown, argument: string): [scale: number, type: string, zero: number] {
  requireOptions(destination, argument, ['type', 'scale', 'zeroPoint']);
  const { type, scale, zeroPoint = 0 } = destination as Partial<Destination>;
  const word = denseType(requireString(type, `${argument}.type`));
  const needsNoScale = scale === undefined && (word === 'f32' || word === 'f16' || word === 'bf16');
  return [
    needsNoScale ? 1 : requireNumber(scale, `${argument}.scale`),
    word,
    requireInteger(zeroPoint, `${argument}.zeroPoint`),
  ];
}

/** @internal */
export async function quantizePagedCacheAsync(
  session: Session,
  cache: unknown,
  pageIndices: unknown,
  destinations: unknown,
  options: AsyncOptions = {},
): Promise<PagedCache> {
  requireOptions(options, 'options', ['signal', 'onProgress']);
  const { signal, onProgress } = options;
  const handle = Owned.handleOf(cache, PagedCache, session, 'cache');
  const indices = int64Array(pageIndices, 'pageIndices');
  const words = readDestinations(destinations);
  const { core } = session;
  const count = BigInt((cache as PagedCache).pages.length);
  // Page by page the core cannot see that an index comes twice, nor refuse a later one before the first page is done.
  const valid = new Set(indices).size === indices.length && indices.every((index) => index >= 0n && index < count);
  let current = core.handle('kvp_paged_quantize', handle, valid ? new BigInt64Array(0) : indices, ...words);
  try {
    for (let done = 0; done < indices.length; ++done) {
      if (done > 0) await pause();
      throwIfAborted(signal, `${done} pages; nothing has changed`);
      const next = core.handle('kvp_paged_quantize', current, indices.slice(done, done + 1), ...words);
      core.call('kvp_release', current);
      current = next;
      onProgress?.({ done: done + 1, total: indices.length });
    }
    throwIfAborted(signal, `${indices.length} pages; nothing has changed`);
  } catch (error) {
    core.call('kvp_release', current);
    throw error;
  }
  return new PagedCache(session, current, { from: cache as PagedCache, indices: Array.from(indices, Number) });
}

/** @internal */
export function createPagedCache(session: Session, pages: unknown, options: PagedCacheOptions = {}): PagedCache {
  requireOptions(options, 'options', ['name', 'docString']);
  if (typeof pages !== 'object' || pages === null || !(Symbol.iterator in pages))
    throw wrongType('pages', 'must be an array of pages', pages);
  const { core } = session;
  const cache = core.handle('kvp_paged_create', session.instance);
  try {
    for (const [field, text] of Object.entries(options))
      if (text !== undefined) core.call('kvp_paged_label', cache, field, requireString(text, `options.${field}`));
    let position = 0;
    let index = 0;
    for (const page of pages as Iterable<unknown>) {
      const at = `pages[${index++}]`;
      // Of a page of another cache the capacity follows from its tensors.
      requireOptions(page, at, ['key', 'value', 'start', 'length', 'capacity']);
      const { key, value, start = position, length } = page as Partial<PageSource>;
      requireNumber(start, `${at}.start`);
      if (length !== undefined) requireNumber(length, `${at}.length`);
      withPayload(session, key, `${at}.key`, (keyHandle, capacity) =>
        withPayload(session, value, `${at}.value`, (valueHandle) => {
          core.call('kvp_paged_add', cache, start, length ?? capacity, keyHandle, valueHandle);
          position = start + (length ?? capacity);
        }),
      );
    }
    core.call('kvp_paged_validate', cache);
  } catch (error) {
    core.call('kvp_release', cache);
    throw error;
  }
  return new PagedCache(session, cache);
}

/**
 * Calls `use` with a handle of the tensor; one that was made for it is given up afterwards (pages keep what they
 * share).
 */
function withPayload(
  session: Session,
  tensor: unknown,
  argument: string,
  use: (handle: number, capacity: number) => void,
): void {
  if (tensor instanceof QuantizedTensor) {
    use(Owned.handleOf(tensor, QuantizedTensor, session, argument), tensor.dims[2]);
    return;
  }
  const raw = readContiguous(tensor, argument);
  const handle = densePayload(session.core, session.instance, raw, argument);
  try {
    use(handle, raw.dims.at(-2) ?? 1);
  } finally {
    session.core.call('kvp_release', handle);
  }
}

function densePayload(core: Core, instance: number, raw: ReturnType<typeof readContiguous>, argument: string): number {
  try {
    return core.handle('kvp_payload_dense', instance, raw.bytes, raw.type, int64Array(raw.dims, `${argument}.dims`));
  } catch (error) {
    // The core has one name for every tensor; which one it was is known here.
    if (!(error instanceof KvPagesError) || error.argument !== 'tensor') throw error;
    const { code, message, expected, actual } = error;
    const fields = { argument, ...(expected === undefined ? {} : { expected }), ...(actual === undefined ? {} : { actual }) };
    throw new KvPagesError(code, message.replace(/^tensor/, argument), fields, { cause: error });
  }
}

/** @internal */
export function splitIntoPages(session: Session, key: unknown, value: unknown, pageTokens: unknown): PagedCache {
  const tokensPerPage = requirePositive(requireInteger(pageTokens, 'pageTokens'), 'pageTokens');
  const sides = [sliceTokens(session, key, 'key'), sliceTokens(session, value, 'value')] as const;
  const [keyTokens, valueTokens] = [sides[0].tokens, sides[1].tokens];
  if (keyTokens !== valueTokens) {
    throw new KvPagesError('ERR_SHAPE', `value: must have the ${keyTokens} tokens of key, got ${valueTokens}`, {
      argument: 'value',
      expected: String(keyTokens),
      actual: String(valueTokens),
    });
  }
  const pages: PageSource[] = [];
  for (let start = 0; start < keyTokens; start += tokensPerPage) {
    const end = Math.min(keyTokens, start + tokensPerPage);
    pages.push({ start, key: sides[0].slice(start, end), value: sides[1].slice(start, end) });
  }
  return createPagedCache(session, pages);
}

function sliceTokens(
  session: Session,
  tensor: unknown,
  argument: string,
): { tokens: number; slice(start: number, end: number): TensorLike } {
  const raw = readContiguous(tensor, argument);
  const { bytes, type, dims } = raw;
  // The core refuses what is no type.
  if (bytesPerElement(type) === 0) densePayload(session.core, session.instance, raw, argument);
  const [width = 1, tokens = 1] = [...dims].reverse();
  const rowBytes = width * bytesPerElement(type);
  const heads = dims.slice(0, -2).reduce((product, dim) => product * dim, 1);
  // No tokens are no pages; of anything else there must be some.
  const empty = dims.some((dim, axis) => dim < (axis === dims.length - 2 ? 0 : 1));
  if (dims.length < 2 || dims.length > 4 || empty || bytes.length !== heads * tokens * rowBytes) {
    throw new KvPagesError(
      'ERR_SHAPE',
      `${argument}: needs 2 to 4 dims [batch, kv_heads, tokens, head_dim] for ${bytes.length} bytes of ${type}, got [${dims}]`,
      {
        argument,
      },
    );
  }
  return {
    tokens,
    slice(start, end) {
      const part = new Uint8Array(heads * (end - start) * rowBytes);
      for (let head = 0; head < heads; ++head) {
        const from = bytes.subarray((head * tokens + start) * rowBytes, (head * tokens + end) * rowBytes);
        part.set(from, head * (end - start) * rowBytes);
      }
      return { type, dims: [...dims.slice(0, -2), end - start, width], data: part };
    },
  };
}
