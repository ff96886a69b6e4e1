// SPDX-License-Identifier: Apache-2.0
// Tensors as callers have them, read into bytes, type, dims and strides. Only JavaScript types are judged here; what
// the values mean is the core's business.
import { KvPagesError } from './errors.js';
import { viewName } from './binding.js';

/** Element types of dense data. `bf16` is bfloat16. */
export type DenseType = 'f32' | 'f16' | 'bf16';

/** A word for an element type: the library's own or onnxruntime's. */
export type DenseTypeWord = DenseType | 'float32' | 'float16' | 'bfloat16';

/**
 * Memory that a tensor may lie in. 16-bit floats are a `Uint16Array` of bit patterns, or a `Float16Array` where there
 * is one.
 */
export type TensorData = ArrayBufferView | ArrayBufferLike;

/**
 * Any tensor on the CPU: an `ort.Tensor`, a transformers.js tensor, or a plain object. Row-major; `dims` is
 * `[batch, kv_heads, tokens, head_dim]`, missing leading dims are 1.
 */
export interface TensorLike {
  /** Element type; `dtype` is the same. Left out, it follows from `data`: a `Uint16Array` and raw bytes need it. */
  readonly type?: string;
  readonly dtype?: string;
  readonly dims?: readonly number[];
  /** The same as `dims`. */
  readonly shape?: readonly number[];
  /** A typed array, or raw bytes (`ArrayBuffer`, `SharedArrayBuffer`, `Uint8Array`) of `type`. */
  readonly data: TensorData;
  /** Elements from one index to the next of each dim; left out, the tensor is contiguous. */
  readonly strides?: readonly number[];
  /** Bytes of `data` before the first element. */
  readonly byteOffset?: number;
}

/** A dense tensor as this package returns it. `data` is a `Float32Array` for f32, a `Float16Array` (a `Uint16Array`
 * where there is none) for f16, a `Uint16Array` of bit patterns for bf16. */
export interface DenseTensor {
  readonly type: DenseType;
  readonly dims: readonly [batch: number, kvHeads: number, tokens: number, headDim: number];
  readonly data: Float32Array | Uint16Array | TypedArray;
}

interface TypedArray extends ArrayBufferView {
  readonly length: number;
  readonly BYTES_PER_ELEMENT: number;
  [index: number]: number;
  subarray(begin?: number, end?: number): TypedArray;
}

/** A tensor in the form that the core takes. */
export interface RawTensor {
  readonly bytes: Uint8Array;
  readonly type: DenseType;
  readonly dims: readonly number[];
  readonly strides: readonly number[];
}

// Words come from callers, so they are not looked up in objects, which know 'constructor' too.
const aliases: ReadonlyMap<string, DenseType> = new Map([
  ['f32', 'f32'],
  ['float32', 'f32'],
  ['f16', 'f16'],
  ['float16', 'f16'],
  ['bf16', 'bf16'],
  ['bfloat16', 'bf16'],
]);
const elementBytes: ReadonlyMap<string, number> = new Map([
  ['f32', 4],
  ['f16', 2],
  ['bf16', 2],
]);
const viewTypes: Readonly<Record<string, readonly DenseType[]>> = {
  Float32Array: ['f32'],
  Float16Array: ['f16'],
  Uint16Array: ['f16', 'bf16'],
};

/** The library's word for a dense type; the word itself where it is none, for the core to refuse. */
export function denseType(word: string): string {
  return aliases.get(word) ?? word;
}

/** 0 for a word that is no dense type. */
export function bytesPerElement(type: DenseType): number {
  return elementBytes.get(type) ?? 0;
}

/** Name of a class. Bundlers put an underscore before that of a class which refers to itself. */
export function className(type: { readonly name: string }): string {
  return type.name.replace(/^_/, '');
}

/** A word for a value in a message. */
export function describeValue(value: unknown): string {
  if (value === null || value === undefined) return String(value);
  if (ArrayBuffer.isView(value)) return viewName(value);
  if (Array.isArray(value)) return 'an array';
  if (typeof value === 'object') {
    const name = className(value.constructor ?? { name: '' });
    return name ? `${/^[AEIO]/.test(name) ? 'an' : 'a'} ${name}` : 'an object';
  }
  if (typeof value === 'string') return JSON.stringify(value);
  return typeof value === 'number' || typeof value === 'boolean' ? String(value) : `a ${typeof value}`;
}

export function wrongType(argument: string, rule: string, value: unknown): TypeError {
  return new TypeError(`${argument}: ${rule}, got ${describeValue(value)}`);
}

export function requireObject(value: unknown, argument: string): asserts value is object {
  if (typeof value !== 'object' || value === null) throw wrongType(argument, 'must be an object', value);
}

/** An object of options; a key that is none (a typing mistake) must not be passed over. */
export function requireOptions(value: unknown, argument: string, options: readonly string[]): asserts value is object {
  requireObject(value, argument);
  for (const key of Object.keys(value)) {
    if (!options.includes(key))
      throw new TypeError(`${argument}.${key}: is no option; there are ${options.join(', ')}`);
  }
}

export function requireString(value: unknown, argument: string): string {
  if (typeof value !== 'string') throw wrongType(argument, 'must be a string', value);
  return value;
}

/** A spec string, or an object with one and options. */
export function requireSpec<Options extends { readonly spec: string }>(
  value: string | Options,
  argument: string,
  options: readonly string[],
): Partial<Options> {
  const object: unknown = typeof value === 'string' ? { spec: value } : value;
  if (typeof object !== 'object' || object === null) throw wrongType(argument, 'must be a spec string or an object with one', value);
  requireOptions(object, argument, options);
  return object as Partial<Options>;
}

export function requireNumber(value: unknown, argument: string): number {
  if (typeof value !== 'number') throw wrongType(argument, 'must be a number', value);
  return value;
}

/** A number where the core takes NaN for none given. */
export function requireGiven(value: unknown, argument: string): number {
  if (Number.isNaN(requireNumber(value, argument))) throw wrongType(argument, 'must be a number', value);
  return value as number;
}

/** An integer that the core's int32 holds; whether it is in range there is the core's question. */
export function requireInteger(value: unknown, argument: string): number {
  if (typeof value !== 'number' || (value | 0) !== value)
    throw wrongType(argument, 'must be an integer of 32 bits', value);
  return value;
}

/** Integers (an array, a typed array or another iterable of numbers or bigints) as the core takes them. */
export function int64Array(values: unknown, argument: string): BigInt64Array {
  if (typeof values !== 'object' || values === null || !(Symbol.iterator in values)) {
    throw wrongType(argument, 'must be an array of integers', values);
  }
  // Every call takes some of these: the usual case without an intermediate array.
  if (Array.isArray(values)) {
    const out = new BigInt64Array(values.length);
    let i = 0;
    while (i < out.length && Number.isSafeInteger(values[i])) out[i] = BigInt(values[i++] as number);
    if (i === out.length) return out;
  }
  return BigInt64Array.from(
    Array.from(values as Iterable<unknown>, (value, i) => {
      if (typeof value === 'bigint' && BigInt.asIntN(64, value) === value) return value;
      if (typeof value !== 'number' || !Number.isSafeInteger(value))
        throw wrongType(`${argument}[${i}]`, 'must be an integer', value);
      return BigInt(value);
    }),
  );
}

/** Dims or strides as numbers; bigints are taken too. */
function wholeNumbers(values: unknown, argument: string): number[] {
  if (typeof values !== 'object' || values === null || !(Symbol.iterator in values))
    throw wrongType(argument, 'must be an array of integers', values);
  return Array.from(values as Iterable<unknown>, (value, i) => {
    const number = typeof value === 'bigint' ? Number(value) : value;
    if (!Number.isSafeInteger(number)) throw wrongType(`${argument}[${i}]`, 'must be an integer', value);
    return number as number;
  });
}

function notPositive(value: number, argument: string): KvPagesError {
  return new KvPagesError('ERR_ARGUMENT', `${argument}: must be > 0, got ${value}`, { argument, actual: String(value) });
}

/** A number where the core takes 0 for none given. */
export function requirePositive(value: unknown, argument: string): number {
  const number = requireNumber(value, argument);
  if (number <= 0) throw notPositive(number, argument);
  return number;
}

/** Tokens to read; left out it is all of them, for which -1 is the core's word and no caller's. */
export function requireValid(valid: unknown): number {
  if (valid === undefined) return -1;
  const tokens = requireNumber(valid, 'valid');
  if (tokens < 0) throw notPositive(tokens, 'valid');
  return tokens;
}

/** Options of a spec that do not stand in its string. */
export const specOptions = ['overflow', 'global', 'rule', 'nonFinite', 'hadamardRun'] as const;

/** These in the words that the core takes, `name=value` separated by commas. */
export function optionWords(options: { readonly [name in (typeof specOptions)[number]]?: unknown }, prefix = ''): string {
  return specOptions
    .flatMap((name) => {
      const value: unknown = options[name];
      if (value === undefined) return [];
      if ((typeof value !== 'string' && typeof value !== 'number') || /[,\n]/.test(String(value)))
        throw wrongType(`${prefix}${name}`, 'must be a word or a number', value);
      return [`${name}=${value}`];
    })
    .join(',');
}

/** Bytes of any buffer or view, not copied. */
export function bytesOf(value: unknown, argument: string): Uint8Array {
  const isView = ArrayBuffer.isView(value);
  if (!isView && !isBuffer(value))
    throw wrongType(argument, 'must be an ArrayBuffer, a SharedArrayBuffer or a view of one', value);
  try {
    return isView ? new Uint8Array(value.buffer, value.byteOffset, value.byteLength) : new Uint8Array(value);
  } catch {
    throw wrongType(argument, 'must not lie in memory that was transferred away', value);
  }
}

function isBuffer(value: unknown): value is ArrayBufferLike {
  const name = Object.prototype.toString.call(value);
  return name === '[object ArrayBuffer]' || name === '[object SharedArrayBuffer]';
}

/** Reads a tensor. `type` and `dims` stand in where a bare typed array has none. */
export function readTensor(
  tensor: unknown,
  argument: string,
  fallback: { type?: string | undefined; dims?: readonly number[] | undefined } = {},
): RawTensor {
  if (ArrayBuffer.isView(tensor))
    return readTensor({ data: tensor, dims: fallback.dims ?? [elementsOf(tensor)] }, argument, { type: fallback.type });
  requireObject(tensor, argument);
  const source = tensor as Partial<TensorLike> & { location?: unknown; dequantize?: () => DenseTensor };
  // A QuantizedTensor has dims and data as well, but its codes are no elements.
  if (typeof source.dequantize === 'function') return readTensor(source.dequantize(), argument, fallback);
  if (typeof source.location === 'string' && !['cpu', 'cpu-pinned', 'none'].includes(source.location)) {
    throw new KvPagesError(
      'ERR_UNSUPPORTED',
      `${argument}: must hold its data on the CPU, got one on ${source.location}; call getData() first`,
      {
        argument,
        expected: 'cpu',
        actual: source.location,
      },
    );
  }
  const own = { type: source.type ?? source.dtype, dims: source.dims ?? source.shape };
  for (const name of ['type', 'dims'] as const) {
    if (fallback[name] !== undefined && own[name] !== undefined)
      throw new TypeError(`${name}: stands in for a ${argument} that has none, and this one has its own`);
  }
  const word = own.type ?? fallback.type;
  if (word !== undefined) requireString(word, own.type === undefined ? 'type' : `${argument}.type`);
  const dims = own.dims ?? fallback.dims;
  const sizes = wholeNumbers(dims, `${argument}.dims`);
  const strides = source.strides === undefined ? [] : wholeNumbers(source.strides, `${argument}.strides`);
  const { bytes, type } = readData(source.data, word, argument, source.byteOffset ?? 0);
  return { bytes, type: type as DenseType, dims: sizes, strides };
}

function elementsOf(view: ArrayBufferView): number {
  return (view as TypedArray).length;
}

function readData(
  data: unknown,
  word: string | undefined,
  argument: string,
  byteOffset: number,
): { bytes: Uint8Array; type: string } {
  const at = `${argument}.data`;
  if (ArrayBuffer.isView(data) && viewName(data) === 'Float64Array') {
    if (word !== undefined && word !== 'f64' && word !== 'float64' && denseType(word) !== 'f32') {
      throw wrongType(at, `must be a ${viewsOf(word)} for type ${word}`, data);
    }
    const source = data as Float64Array;
    const rounded = new Float32Array(
      byteOffset === 0 ? source : source.subarray(requireWhole(byteOffset, 8, argument)),
    );
    return { bytes: new Uint8Array(rounded.buffer), type: 'f32' };
  }
  const raw =
    isBuffer(data) ||
    (ArrayBuffer.isView(data) && ['Uint8Array', 'Uint8ClampedArray', 'DataView'].includes(viewName(data)));
  if (raw) {
    if (word === undefined) throw wrongType(`${argument}.type`, 'must be given for raw bytes', word);
    const type = denseType(word);
    const bytes = skip(bytesOf(data, at), byteOffset, argument);
    return { bytes: aligned(bytes, elementBytes.get(type) ?? 1), type };
  }
  const types = ArrayBuffer.isView(data) ? viewTypes[viewName(data)] : undefined;
  if (types === undefined) {
    throw wrongType(at, 'must be a Float32Array, Float64Array, Float16Array, Uint16Array or raw bytes', data);
  }
  if (word === undefined && types.length > 1)
    throw wrongType(`${argument}.type`, `must be ${types.join(' or ')} for a Uint16Array`, word);
  const type = word === undefined ? types[0]! : denseType(word);
  if (!types.includes(type as DenseType) && elementBytes.has(type))
    throw wrongType(at, `must be a ${viewsOf(type)} for type ${word}`, data);
  return { bytes: skip(bytesOf(data, at), byteOffset, argument), type };
}

function viewsOf(word: string): string {
  const names = Object.keys(viewTypes).filter((name) => viewTypes[name]!.includes(denseType(word) as DenseType));
  return names.join(' or ') || 'typed array';
}

function requireWhole(byteOffset: number, size: number, argument: string): number {
  if (!Number.isSafeInteger(byteOffset) || byteOffset < 0 || byteOffset % size !== 0) {
    throw wrongType(`${argument}.byteOffset`, `must be a multiple of ${size}`, byteOffset);
  }
  return byteOffset / size;
}

function skip(bytes: Uint8Array, byteOffset: number, argument: string): Uint8Array {
  if (byteOffset === 0) return bytes;
  const begin = requireWhole(byteOffset, 1, argument);
  return bytes.subarray(begin);
}

/** The core reads whole elements, so raw bytes at an odd address are copied. */
function aligned(bytes: Uint8Array, size: number): Uint8Array {
  return bytes.byteOffset % size === 0 ? bytes : bytes.slice();
}

type Float16Constructor = new (buffer: ArrayBufferLike, byteOffset?: number, length?: number) => TypedArray;
const Float16 = (globalThis as { Float16Array?: Float16Constructor }).Float16Array;

/** A new array for dense elements. */
export function denseArray(type: DenseType, bytes: Uint8Array): DenseTensor['data'] {
  if (type === 'f32') return new Float32Array(bytes.buffer, bytes.byteOffset, bytes.byteLength / 4);
  const View = type === 'f16' && Float16 !== undefined ? Float16 : (Uint16Array as unknown as Float16Constructor);
  return new View(bytes.buffer, bytes.byteOffset, bytes.byteLength / 2);
}

/** Bytes of a caller's output array, which must fit the type. */
export function outputBytes(out: unknown, type: string, argument: string): Uint8Array {
  if (!ArrayBuffer.isView(out)) throw wrongType(argument, 'must be a typed array', out);
  const name = viewName(out);
  const types = viewTypes[name] ?? (name === 'Uint8Array' ? [type] : []);
  if (!types.includes(type as DenseType) && elementBytes.has(type))
    throw wrongType(argument, `must be a ${viewsOf(type)} for type ${type}`, out);
  const bytes = bytesOf(out, argument);
  if (bytes.byteOffset % (elementBytes.get(type) ?? 1) !== 0)
    throw wrongType(argument, 'must start at a multiple of its element size', out);
  return bytes;
}
