// SPDX-License-Identifier: Apache-2.0
// Reader of safetensors files: an 8-byte little-endian header length, a JSON header, then the tensors' bytes. Gives
// views, copies nothing that is aligned. Also public as `kvpages/safetensors`.
import { KvPagesError } from './errors.js';
import { bytesOf } from './tensor.js';

export { keyValueLayers } from './key-value-layers.js';
export type { KeyValueLayer } from './key-value-layers.js';

/** A tensor of the file; what `kv.quantize` and `kv.splitIntoPages` take where `type` is f32, f16 or bf16. */
export interface SafeTensor {
  readonly name: string;
  /** The file's word in lower case: `f32 f16 bf16 f64 i8 u8 i16 u16 i32 u32 i64 u64 bool f8_e4m3 f8_e5m2`. */
  readonly type: string;
  readonly dims: readonly number[];
  /** Position of its first byte in the file, and of the byte after its last one. */
  readonly begin: number;
  readonly end: number;
}

export interface SafeTensorsHeader {
  /** The header's `__metadata__`. */
  readonly metadata: Readonly<Record<string, string>>;
  /** In the order of the header. */
  readonly tensors: ReadonlyMap<string, SafeTensor>;
  /** Bytes before the first tensor: read these first where a file is large. */
  readonly headerBytes: number;
}

type View = new (buffer: ArrayBufferLike, byteOffset: number, length: number) => ArrayBufferView;
const types: Readonly<Record<string, readonly [bytes: number, view: View]>> = {
  f64: [8, Float64Array],
  f32: [4, Float32Array],
  f16: [2, Uint16Array],
  bf16: [2, Uint16Array],
  i64: [8, BigInt64Array],
  u64: [8, BigUint64Array],
  i32: [4, Int32Array],
  u32: [4, Uint32Array],
  i16: [2, Int16Array],
  u16: [2, Uint16Array],
  i8: [1, Int8Array],
  u8: [1, Uint8Array],
  bool: [1, Uint8Array],
  f8_e4m3: [1, Uint8Array],
  f8_e5m2: [1, Uint8Array],
};
const lengthBytes = 8;

function corrupt(message: string, byteOffset: number): KvPagesError {
  return new KvPagesError('ERR_CORRUPT', `safetensors: ${message} at byte ${byteOffset}`, {
    argument: 'bytes',
    byteOffset,
  });
}

/** Bytes of length field and header, from the first 8 bytes of a file. */
export function safetensorsHeaderBytes(start: Uint8Array): number {
  if (start.length < lengthBytes)
    throw corrupt(`the file ends within its header length, it has ${start.length} bytes`, start.length);
  const length = new DataView(start.buffer, start.byteOffset, lengthBytes).getBigUint64(0, true);
  // 100 MB is the format's own limit.
  if (length < 2n || length > 100_000_000n) throw corrupt(`the header length must be 2 to 100000000, got ${length}`, 0);
  return lengthBytes + Number(length);
}

/**
 * Reads the header.
 * @param start the file's first bytes, the whole header at least
 * @param fileBytes size of the file, to check the tensors against; the size of `start` by default
 */
export function readSafetensorsHeader(start: ArrayBufferLike | ArrayBufferView, fileBytes?: number): SafeTensorsHeader {
  const bytes = bytesOf(start, 'bytes');
  const headerBytes = safetensorsHeaderBytes(bytes);
  if (headerBytes > bytes.length) throw corrupt(`the header needs ${headerBytes} bytes, there are ${bytes.length}`, 0);
  let header: unknown;
  try {
    header = JSON.parse(new TextDecoder('utf-8', { fatal: true }).decode(bytes.slice(lengthBytes, headerBytes)));
  } catch (error) {
    throw corrupt(`the header is no JSON (${String(error)})`, lengthBytes);
  }
  if (typeof header !== 'object' || header === null || Array.isArray(header))
    throw corrupt('the header is no object', lengthBytes);
  const { __metadata__: metadata = {}, ...entries } = header as Record<string, unknown>;
  const tensors = new Map<string, SafeTensor>();
  for (const [name, entry] of Object.entries(entries)) {
    tensors.set(name, readEntry(name, entry, headerBytes, fileBytes ?? bytes.length));
  }
  return { metadata: metadata as Record<string, string>, tensors, headerBytes };
}

function readEntry(name: string, entry: unknown, headerBytes: number, fileBytes: number): SafeTensor {
  const { dtype, shape, data_offsets: offsets } = (entry ?? {}) as Record<string, unknown>;
  const isCount = (value: unknown): value is number => Number.isSafeInteger(value) && (value as number) >= 0;
  if (
    typeof dtype !== 'string' ||
    !Array.isArray(shape) ||
    !Array.isArray(offsets) ||
    offsets.length !== 2 ||
    ![...shape, ...offsets].every(isCount)
  ) {
    throw corrupt(`tensor '${name}' needs dtype, shape and data_offsets`, lengthBytes);
  }
  const type = dtype.toLowerCase();
  const size = types[type]?.[0];
  if (size === undefined) {
    throw new KvPagesError('ERR_UNSUPPORTED', `safetensors: tensor '${name}' has the unknown type ${dtype}`, {
      argument: 'bytes',
      actual: dtype,
    });
  }
  const [begin, end] = [headerBytes + (offsets[0] as number), headerBytes + (offsets[1] as number)];
  const need = (shape as number[]).reduce((product, dim) => product * dim, size);
  if (end < begin || end > fileBytes)
    throw corrupt(`tensor '${name}' ends at ${end}, the file at ${fileBytes},`, begin);
  if (end - begin !== need)
    throw corrupt(`tensor '${name}' needs ${need} bytes for ${dtype} [${shape}], has ${end - begin},`, begin);
  return { name, type, dims: shape as number[], begin, end };
}

/**
 * A tensor's elements from its bytes: a view where the address allows, else a copy. f16 and bf16 are `Uint16Array`s
 * of bits.
 */
export function safetensorsData(tensor: SafeTensor, bytes: Uint8Array): ArrayBufferView {
  const [size, View] = types[tensor.type]!;
  const source = bytes.byteOffset % size === 0 ? bytes : bytes.slice();
  return new View(source.buffer, source.byteOffset, source.length / size);
}

/**
 * Reads a whole file in memory.
 * @throws KvPagesError `ERR_CORRUPT` with `byteOffset`, `ERR_UNSUPPORTED` for an unknown element type
 */
export function readSafetensors(file: ArrayBufferLike | ArrayBufferView): {
  readonly metadata: Readonly<Record<string, string>>;
  readonly tensors: ReadonlyMap<string, SafeTensor & { readonly data: ArrayBufferView }>;
} {
  const bytes = bytesOf(file, 'bytes');
  const { metadata, tensors } = readSafetensorsHeader(bytes);
  const read = new Map<string, SafeTensor & { data: ArrayBufferView }>();
  for (const [name, tensor] of tensors) {
    // Lazily, since a file may hold more than is wanted and odd addresses are copied.
    read.set(name, {
      ...tensor,
      get data() {
        return safetensorsData(tensor, bytes.subarray(tensor.begin, tensor.end));
      },
    });
  }
  return { metadata, tensors: read };
}
