// SPDX-License-Identifier: Apache-2.0
// One tensor in the core, encoded or dense, and what can be asked of it.
import { Owned } from './owned.js';
import type { Session } from './owned.js';
import { KvPagesError } from './errors.js';
import {
  bytesPerElement,
  denseArray,
  denseType,
  int64Array,
  outputBytes,
  readTensor,
  requireNumber,
  requireOptions,
  requireString,
  requireValid,
} from './tensor.js';
import type { DenseTensor, DenseType, DenseTypeWord, RawTensor, TensorLike } from './tensor.js';

/** What the core says of one tensor; `kv.quantize` and pages share the form. */
export interface TensorInfo {
  /**
   * `dense`: elements; `encoded`: codes with scales; `opaque`: an encoding that this version carries but cannot read.
   */
  readonly kind: 'dense' | 'encoded' | 'opaque';
  /** In words, for messages and tables: `f16`, `int4/axis 2/block 16` of an affine layout, another's spec, `opaque (Q4_K)`. */
  readonly format: string;
  /** The spec string with every part spelt out; absent for opaque tensors and for affine layouts that no spec has. */
  readonly spec?: string;
  /** Element type of the codes or of the dense data. */
  readonly type?: string;
  /** `[batch, kv_heads, tokens, head_dim]`; of a page, tokens is its capacity. */
  readonly dims: readonly [batch: number, kvHeads: number, tokens: number, headDim: number];
  /** Affine encodings: dim that has several scales, -1 for one scale for all. */
  readonly axis?: number;
  /** Affine encodings: elements per scale along `axis`, 0 for one scale per index. */
  readonly block?: number;
  /** The f32 that all scales of `e4m3` type, and those of nvfp4, are relative to. */
  readonly global?: number;
  /** Length of the rotated runs of `+hadamard`, 0 without. */
  readonly hadamard?: number;
  /** Bytes of each array that is held. */
  readonly bytes: Readonly<Record<'data' | 'codes' | 'scales' | 'zeros' | 'global' | 'center' | 'message', number>>;
  /** Their sum. */
  readonly byteLength: number;
  /** Bits that are held per element, scales and zero points included. */
  readonly bitsPerElement?: number;
}

/** What an encoding lost, over the valid tokens, computed in float64: NaN or Infinity where the values before or after are. */
export interface Figures {
  /** Root of the mean squared error. */
  readonly rmse: number;
  /** Largest absolute error. */
  readonly maxError: number;
  /** Signal to quantization noise in dB; Infinity where nothing was lost. */
  readonly sqnr: number;
  /** Root mean square of the source. */
  readonly signalRms: number;
  /** Elements beyond the range of the codes, which were clamped to its end. */
  readonly saturated: number;
  /** Elements that were compared. */
  readonly elements: number;
}

/** What a quantize call lost, and what its result takes. */
export interface QuantizeFigures extends Figures {
  /** Mean absolute error of each valid token, over batch, heads and head_dim; NaN where a value is not finite. */
  readonly errorPerToken: Float64Array;
  /** Largest gap between the distribution functions of the values before and after; NaN where one is not finite. */
  readonly ksDistance: number;
  /** Bits that are held per element, scales and zero points included. */
  readonly bitsPerElement: number;
  /** How many times smaller than 16-bit elements the result is. */
  readonly memoryRatio: number;
}

export interface DequantizeOptions {
  /** Element type of the result, `f32` by default. */
  readonly type?: DenseTypeWord;
  /** First token, 0 by default. */
  readonly start?: number;
  /** Token after the last one; all by default. */
  readonly end?: number;
  /**
   * Array to write into, of exactly batch * kv_heads * (end - start) * head_dim elements of `type`. Left as it was on
   * failure.
   */
  readonly out?: ArrayBufferView;
}

/**
 * An immutable tensor in the core's memory, made by `kv.quantize` or taken from a page. Holds memory until `dispose`
 * (or the garbage collector) gives it back.
 */
export class QuantizedTensor extends Owned {
  #info: TensorInfo | undefined;
  #source: { readonly tensor: TensorLike; readonly valid: number | undefined } | undefined;
  #figures: QuantizeFigures | undefined;

  /** @internal `source`: the tensor that this one was made from, with dims of any number. */
  constructor(session: Session, handle: number, source?: { readonly raw: RawTensor; readonly valid: number | undefined }) {
    super(session, handle);
    if (source === undefined) return;
    const { bytes, type, dims, strides } = source.raw;
    const missing = Array<number>(Math.max(0, 4 - dims.length)).fill(1);
    this.#source = {
      tensor: {
        type,
        dims: [...missing, ...dims],
        data: bytes,
        ...(strides.length === 0 ? {} : { strides: [...missing.map(() => 0), ...strides] }),
      },
      valid: source.valid,
    };
  }

  /**
   * Of a tensor that `kv.quantize` made: what was lost, measured when this is first read, against the tensor that was passed then.
   * Its data are referred to until this is read, or `dispose` called: read it before you write to them. `undefined` for tensors from
   * elsewhere; `measure` compares those.
   * @throws KvPagesError `ERR_DISPOSED`
   */
  get figures(): QuantizeFigures | undefined {
    if (this.#figures === undefined && this.#source !== undefined) {
      this.#figures = this.figuresAgainst(this.#source.tensor, this.#source.valid);
      this.#source = undefined;
    }
    return this.#figures;
  }

  /** @internal */
  figuresAgainst(source: TensorLike | QuantizedTensor, valid: number | undefined): QuantizeFigures {
    const { core, instance } = this.session;
    const before = readContiguous(source, 'source');
    const measured = this.measure({ type: before.type, dims: before.dims, data: before.bytes }, valid === undefined ? {} : { valid });
    const [batch, heads, tokens, width] = this.dims;
    const end = valid ?? tokens;
    // Tokens outermost, as the core's measure per token wants them.
    const dims = [end, batch, heads, width];
    const turn = (data: ArrayBufferView, type: DenseType, rows: number) => {
      const strides = [width, heads * rows * width, rows * width, 1];
      return [readContiguous({ type, dims, data, strides }, 'source').bytes, type, int64Array(dims, 'dims')] as const;
    };
    const one = turn(before.bytes, before.type, tokens);
    const restored = this.dequantize({ end });
    const other = turn(restored.data, 'f32', end);
    const errorPerToken = new Float64Array(end);
    const isFinite = couldMeasure(() => core.call('kvp_metrics_error_per_token', ...one, ...other, errorPerToken));
    if (!isFinite) {
      const row = (of: typeof one, token: number) => {
        const bytes = of[0].byteLength / end;
        return [of[0].subarray(token * bytes, (token + 1) * bytes), of[1], int64Array([1, batch, heads, width], 'dims')] as const;
      };
      for (let token = 0; token < end; ++token) {
        const error = errorPerToken.subarray(token, token + 1);
        const call = () => core.call('kvp_metrics_error_per_token', ...row(one, token), ...row(other, token), error);
        if (!couldMeasure(call)) error[0] = Number.NaN;
      }
    }
    const elements = batch * heads * tokens * width;
    return {
      ...measured,
      errorPerToken,
      ksDistance: isFinite ? core.number('kvp_metrics_ks_distance', instance, ...one, ...other) : Number.NaN,
      bitsPerElement: this.bitsPerElement ?? 0,
      memoryRatio: (elements * 2) / this.byteLength,
    };
  }

  override dispose(): void {
    this.#source = undefined;
    super.dispose();
  }

  /** Everything the core knows about this tensor. */
  get info(): TensorInfo {
    return (this.#info ??= this.session.core.json<TensorInfo>('kvp_payload_info', this.handle));
  }
  get kind(): TensorInfo['kind'] {
    return this.info.kind;
  }
  /** Spec string with every part spelt out, `f32` `f16` `bf16` for dense data, `undefined` for an opaque encoding and for an affine
   * layout that no spec has. */
  get spec(): string | undefined {
    return this.info.spec;
  }
  /** `[batch, kv_heads, tokens, head_dim]`. */
  get dims(): TensorInfo['dims'] {
    return this.info.dims;
  }
  /** Bytes of all that is held: codes, scales, zero points, global scale, centre. */
  get byteLength(): number {
    return this.info.byteLength;
  }
  /** Bits per element, scales included; `undefined` for an opaque encoding. */
  get bitsPerElement(): number | undefined {
    return this.info.bitsPerElement;
  }

  /** Copy of the packed codes: a little-endian bit stream in tensor order, low code first. Empty for dense data. */
  get codes(): Uint8Array {
    return this.#array('codes');
  }
  /**
   * Copy of the scales: `Float32Array` for scale-type f32, `Uint16Array` of bit patterns for f16 and bf16, else code
   * bytes.
   */
  get scales(): Float32Array | Uint16Array | Uint8Array {
    return typedScales(this.#array('scales'), this.#scaleType);
  }
  /** Copy of the zero points, one per scale: `Int8Array` for signed codes, else `Uint8Array`; of calibration `kivi` the
   * minima, in the scales' type. Empty where all are 0. */
  get zeroPoints(): Int8Array | Uint8Array | Uint16Array | Float32Array {
    const bytes = this.#array('zeros');
    if (this.spec?.split('/').includes('kivi')) return typedScales(bytes, this.#scaleType);
    return this.info.type?.startsWith('int') ? new Int8Array(bytes.buffer) : bytes;
  }
  /** Copy of the elements of a dense tensor, empty for an encoded one. */
  get data(): DenseTensor['data'] {
    return denseArray(this.kind === 'dense' ? (this.spec as DenseType) : 'f32', this.#array('data'));
  }

  /**
   * Decodes tokens `[start, end)` of every batch and head.
   * @returns a dense tensor `[batch, kv_heads, end - start, head_dim]`; its `data` is `out` where that was given.
   * @throws KvPagesError `ERR_BUFFER` (`out` has another size), `ERR_UNSUPPORTED` (opaque), `ERR_ARGUMENT`,
   *   `ERR_DISPOSED`
   */
  dequantize(options: DequantizeOptions = {}): DenseTensor {
    requireOptions(options, 'options', ['type', 'start', 'end', 'out']);
    const word = options.type === undefined ? 'f32' : denseType(requireString(options.type, 'type'));
    const { out } = options;
    const start = options.start === undefined ? 0 : requireNumber(options.start, 'start');
    const [batch, heads, tokens, width] = this.dims;
    const end = options.end === undefined ? tokens : requireNumber(options.end, 'end');
    const rows = Math.max(0, end - start) || 0;
    const type = word as DenseType;
    // A range or type that the core will refuse needs no memory.
    const possible = rows <= tokens && Number.isInteger(rows) && bytesPerElement(type) > 0;
    const bytes =
      out === undefined
        ? new Uint8Array(possible ? batch * heads * rows * width * bytesPerElement(type) : 0)
        : outputBytes(out, word, 'out');
    this.session.core.call('kvp_dequantize', this.handle, start, end, word, bytes);
    return {
      type,
      dims: [batch, heads, rows, width],
      data: out === undefined ? denseArray(type, bytes) : (out as DenseTensor['data']),
    };
  }

  /**
   * Compares the first `valid` tokens (all by default) with the dense tensor that they were made from, of the same
   * dims.
   * @throws KvPagesError `ERR_SHAPE` (other dims), `ERR_UNSUPPORTED` (opaque)
   */
  measure(source: TensorLike | QuantizedTensor, options: { readonly valid?: number } = {}): Figures {
    requireOptions(options, 'options', ['valid']);
    const { bytes, type, dims } = readContiguous(source, 'source');
    const valid = requireValid(options.valid);
    const figures = new Float64Array(6);
    this.session.core.call('kvp_measure', this.handle, bytes, type, int64Array(dims, 'source.dims'), valid, figures);
    const [rmse, maxError, sqnr, signalRms, saturated, elements] = figures as unknown as [
      number,
      number,
      number,
      number,
      number,
      number,
    ];
    return { rmse, maxError, sqnr, signalRms, saturated, elements };
  }

  get #scaleType(): string {
    if (this.info.axis !== undefined) return 'f32'; // affine
    // The last part of a spec, modifiers apart; schemes have no parts and keep their scales as bytes.
    return this.spec?.split('+')[0]!.split('/').at(-1) ?? '';
  }

  #array(name: 'data' | 'codes' | 'scales' | 'zeros'): Uint8Array<ArrayBuffer> {
    const bytes = new Uint8Array(this.info.bytes[name]);
    this.session.core.call('kvp_payload_array', this.handle, name, bytes);
    return bytes;
  }
}

/** False where values are not finite, which `nonFinite`, `overflow` and narrow scales may let in. */
function couldMeasure(call: () => void): boolean {
  try {
    call();
    return true;
  } catch (error) {
    if (error instanceof KvPagesError && error.code === 'ERR_NON_FINITE') return false;
    throw error;
  }
}

function typedScales(bytes: Uint8Array<ArrayBuffer>, type: string): Float32Array | Uint16Array | Uint8Array {
  return type === 'f32'
    ? new Float32Array(bytes.buffer)
    : type === 'f16' || type === 'bf16'
      ? new Uint16Array(bytes.buffer)
      : bytes;
}

/** A tensor whose elements lie one after the other: a strided one is gathered. */
export function readContiguous(
  tensor: unknown,
  argument: string,
  fallback?: Parameters<typeof readTensor>[2],
): Omit<RawTensor, 'strides'> {
  const { bytes, type, dims, strides } = readTensor(tensor, argument, fallback);
  if (strides.length === 0) return { bytes, type, dims };
  const size = bytesPerElement(type);
  const count = dims.reduce((product, dim) => product * dim, 1);
  const last = dims.reduce((sum, dim, axis) => sum + (dim - 1) * strides[axis]!, 0);
  if (
    strides.length !== dims.length ||
    [...dims, ...strides].some((number) => number < 0) ||
    !(count === 0 || (last + 1) * size <= bytes.length)
  ) {
    throw new KvPagesError(
      'ERR_SHAPE',
      `${argument}: strides must be one per dim, not negative and within the data, got [${strides}] for [${dims}]`,
      {
        argument,
      },
    );
  }
  const gathered = gatheringRoom(count * size, argument);
  const index = dims.map(() => 0);
  for (let to = 0; to < count; ++to) {
    const from = index.reduce((sum, i, axis) => sum + i * strides[axis]!, 0) * size;
    gathered.set(bytes.subarray(from, from + size), to * size);
    for (let axis = index.length - 1; axis >= 0 && ++index[axis]! === dims[axis]; --axis) index[axis] = 0;
  }
  return { bytes: gathered, type, dims };
}

/** A few bytes of data may be many elements with strides of 0. */
function gatheringRoom(bytes: number, argument: string): Uint8Array<ArrayBuffer> {
  try {
    return new Uint8Array(bytes);
  } catch (cause) {
    throw new KvPagesError('ERR_MEMORY', `${argument}: no memory for the ${bytes} bytes of its elements`, { argument }, { cause });
  }
}
