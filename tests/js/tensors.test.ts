// SPDX-License-Identifier: Apache-2.0
// Tensors in every form that callers have them in, quantize and dequantize of one tensor.
import { Tensor } from 'onnxruntime-common';
import { beforeAll, describe, expect, it } from 'vitest';
import type { KvPages, QuantizeOptions, SideSpec, TensorLike } from '../../js/index.js';
import { errorOf, hex, loadHere, noise } from './support.js';

let kv: KvPages;
beforeAll(async () => {
  kv = await loadHere();
});

const spec = { spec: 'int8/tensor/given', scale: 0.05, zeroPoint: 0 } as const;
const dims = [1, 2, 4, 8];
const x = noise(64);

/** What the codes must be, by the rule: float32 division, ties to even, clamp. */
function codesOf(values: ArrayLike<number>, scale: number): Int8Array {
  const step = Math.fround(scale);
  return Int8Array.from(values, (value) => {
    const quotient = Math.fround(value / step);
    const floor = Math.floor(quotient);
    const rest = quotient - floor;
    const rounded = rest > 0.5 || (rest === 0.5 && floor % 2 !== 0) ? floor + 1 : floor;
    return Math.max(-128, Math.min(127, rounded));
  });
}

const bf16 = Uint16Array.from(new Uint32Array(x.buffer), (bits) => bits >>> 16);
const widened = new Float32Array(Uint32Array.from(bf16, (bits) => bits << 16).buffer);

describe('a tensor', () => {
  const expected = hex(codesOf(x, 0.05));
  const shared = new Float32Array(new SharedArrayBuffer(66 * 4), 8, 64);
  shared.set(x);
  const offset = new Float32Array(70).subarray(3, 67);
  offset.set(x);
  const odd = new Uint8Array(64 * 4 + 1).subarray(1);
  odd.set(new Uint8Array(x.buffer));
  const padded = new Float32Array(64 + 5);
  padded.set(x, 5);
  // Tokens outermost: [tokens, heads, head_dim] in memory.
  const strided = new Float32Array(64);
  for (let h = 0; h < 2; ++h)
    for (let t = 0; t < 4; ++t) strided.set(x.subarray((h * 4 + t) * 8, (h * 4 + t + 1) * 8), (t * 2 + h) * 8);

  const forms: Record<string, TensorLike> = {
    'with type and dims': { type: 'f32', dims, data: x },
    'with dtype and shape': { dtype: 'float32', shape: dims, data: x },
    'of an untyped object': { dims, data: x },
    'with leading dims left out': { dims: [2, 4, 8], data: x },
    'in shared memory': { dims, data: shared },
    'at an offset': { dims, data: offset },
    'with a byteOffset': { dims, data: padded, byteOffset: 20 },
    'as an ArrayBuffer': { type: 'f32', dims, data: x.buffer },
    'as bytes at an odd address': { type: 'f32', dims, data: odd },
    'with strides': { dims, data: strided, strides: [64, 8, 16, 1] },
    'of doubles': { dims, data: Float64Array.from(x) },
    'of doubles that say so': { type: 'float64', dims, data: Float64Array.from(x) },
    'like one of onnxruntime': { type: 'float32', dims, data: x, location: 'cpu' } as TensorLike,
  };
  for (const [name, tensor] of Object.entries(forms)) {
    it(`is read ${name}`, () => {
      const quantized = kv.quantize(tensor, spec);
      expect(hex(quantized.codes)).toBe(expected);
      expect(quantized.dims).toEqual(dims);
      quantized.dispose();
    });
  }

  it('may be one of onnxruntime', () => {
    expect(hex(kv.quantize(new Tensor('float32', x, dims), spec).codes)).toBe(expected);
    // Where there is a Float16Array, onnxruntime holds float16 in one.
    const half = new Tensor('float16', Uint16Array.of(0x3c00, 0xc100), [1, 2]);
    expect(Array.from(kv.quantize(half, 'f32').data)).toEqual([1, -2.5]);
    const brought = new Tensor(
      'float32',
      kv.quantize(new Tensor('float32', x, dims), spec).dequantize().data as Float32Array,
      dims,
    );
    expect(hex(kv.quantize(brought, spec).codes)).toBe(expected);
    expect(() => kv.quantize(new Tensor('int32', new Int32Array(2), [2]), spec)).toThrow(TypeError);
  });

  it('may be a bare typed array', () => {
    expect(hex(kv.quantize(x, spec).codes)).toBe(expected);
    expect(kv.quantize(x, spec).dims).toEqual([1, 1, 1, 64]);
    expect(kv.quantize(x, { ...spec, dims }).dims).toEqual(dims);
    expect(hex(kv.quantize(bf16, { ...spec, dims, type: 'bf16' }).codes)).toBe(hex(codesOf(widened, 0.05)));
  });

  it('of doubles is rounded to f32 first', () => {
    for (const type of ['f64', 'float64'])
      expect(hex(kv.quantize({ type, dims, data: Float64Array.from(x) }, spec).codes)).toBe(expected);
    // Just above a tie in float64, on it in float32.
    const double = 0.5 * 2 ** 0 + 1e-12;
    expect(kv.quantize(Float64Array.of(double), { ...spec, scale: 1 }).codes).toEqual(Uint8Array.of(0));
  });

  it('of 16-bit floats is read as bits', () => {
    const codes = hex(codesOf(widened, 0.05));
    for (const type of ['bf16', 'bfloat16'])
      expect(hex(kv.quantize({ type, dims, data: bf16 }, spec).codes)).toBe(codes);
    expect(hex(kv.quantize({ type: 'bf16', dims, data: new Uint8Array(bf16.buffer) }, spec).codes)).toBe(codes);
    // 1.0, -2.5, 65504 and the smallest subnormal in binary16.
    const half = Uint16Array.of(0x3c00, 0xc100, 0x7bff, 0x0001);
    expect(Array.from(kv.quantize({ type: 'float16', dims: [4], data: half }, 'f32').data)).toEqual([
      1,
      -2.5,
      65504,
      2 ** -24,
    ]);
  });

  const Float16 = (globalThis as { Float16Array?: new (values: number[]) => ArrayBufferView }).Float16Array;
  it.runIf(Float16)('may be a Float16Array', () => {
    const tensor = kv.quantize({ dims: [2], data: new Float16!([1, -2.5]) }, 'f16');
    expect(hex(tensor.data)).toBe('003c00c1');
    expect(tensor.data).toBeInstanceOf(Float16);
    expect(Array.from(tensor.dequantize({ type: 'f16' }).data)).toEqual([1, -2.5]);
  });

  it('is not changed', () => {
    const before = hex(x);
    kv.quantize({ dims, data: x }, 'int8/token');
    kv.quantize({ dims, data: x }, 'bf16');
    expect(hex(x)).toBe(before);
  });

  it('whose memory was transferred away is refused in words', () => {
    const data = new Float32Array(64);
    structuredClone(data, { transfer: [data.buffer] });
    expect(() => kv.quantize({ dims, data }, spec)).toThrow(
      new TypeError('tensor.data: must not lie in memory that was transferred away, got Float32Array'),
    );
    expect(() => kv.parse(data.buffer)).toThrow(
      new TypeError('bytes: must not lie in memory that was transferred away, got an ArrayBuffer'),
    );
  });

  it('on a GPU is refused in words', () => {
    const tensor = {
      type: 'float32',
      dims,
      location: 'gpu-buffer',
      get data(): Float32Array {
        throw new Error('must not be asked for');
      },
    };
    expect(errorOf(() => kv.quantize(tensor, spec))).toMatchObject({
      code: 'ERR_UNSUPPORTED',
      message: 'tensor: must hold its data on the CPU, got one on gpu-buffer; call getData() first',
      argument: 'tensor',
      expected: 'cpu',
      actual: 'gpu-buffer',
    });
  });

  const wrong: Array<[unknown, string]> = [
    [null, 'tensor: must be an object, got null'],
    [3, 'tensor: must be an object, got 3'],
    [{}, 'tensor.dims: must be an array of integers, got undefined'],
    [{ dims: 4, data: x }, 'tensor.dims: must be an array of integers, got 4'],
    [{ dims: ['4'], data: x }, 'tensor.dims[0]: must be an integer, got "4"'],
    [{ dims: [1.5], data: x }, 'tensor.dims[0]: must be an integer, got 1.5'],
    [{ dims: {}, data: x }, 'tensor.dims: must be an array of integers, got an Object'],
    [{ dims, data: x, strides: 5 }, 'tensor.strides: must be an array of integers, got 5'],
    [{ dims, data: x, strides: {} }, 'tensor.strides: must be an array of integers, got an Object'],
    [{ dims: [4, 2], data: x, strides: [1.5, 1] }, 'tensor.strides[0]: must be an integer, got 1.5'],
    [
      { dims, data: [1, 2] },
      'tensor.data: must be a Float32Array, Float64Array, Float16Array, Uint16Array or raw bytes, got an array',
    ],
    [
      { dims, data: new Int32Array(64) },
      'tensor.data: must be a Float32Array, Float64Array, Float16Array, Uint16Array or raw bytes, got Int32Array',
    ],
    [{ dims, data: new Uint16Array(64) }, 'tensor.type: must be f16 or bf16 for a Uint16Array, got undefined'],
    [{ dims, data: new Uint8Array(64) }, 'tensor.type: must be given for raw bytes, got undefined'],
    [{ type: 'bf16', dims, data: x }, 'tensor.data: must be a Uint16Array for type bf16, got Float32Array'],
    [
      { type: 'f16', dims, data: x },
      'tensor.data: must be a Float16Array or Uint16Array for type f16, got Float32Array',
    ],
    [{ type: 1, dims, data: x }, 'tensor.type: must be a string, got 1'],
    [{ dims, data: x, byteOffset: 1.5 }, 'tensor.byteOffset: must be a multiple of 1, got 1.5'],
  ];
  for (const [tensor, message] of wrong) {
    it(`of the wrong JavaScript type is a TypeError: ${message}`, () => {
      expect(() => kv.quantize(tensor as TensorLike, spec)).toThrow(new TypeError(message));
    });
  }
});

describe('quantize', () => {
  it('is not misled by words that every object knows', () => {
    for (const type of ['constructor', 'toString', '__proto__']) {
      expect(errorOf(() => kv.quantize({ type, dims, data: x }, spec))).toMatchObject({
        code: 'ERR_ARGUMENT',
        message: `tensor: type must be f32, f16 or bf16, got ${type}`,
      });
      expect(errorOf(() => kv.quantize(x, spec).dequantize({ type: type as 'f32' })).code).toBe('ERR_ARGUMENT');
    }
  });

  it('refuses options that it does not know and values of the wrong type', () => {
    const call = (options: object) => () => kv.quantize(x, options as never);
    expect(call({ spec: 'int8', scales_: 1 })).toThrow(/^spec\.scales_: is no option; there are spec, /);
    expect(call({ spec: 8 })).toThrow(new TypeError('spec: must be a string, got 8'));
    expect(call({})).toThrow(new TypeError('spec: must be a string, got undefined'));
    expect(call({ spec: 'int8', scale: '1' })).toThrow(new TypeError('scale: must be a number, got "1"'));
    expect(call({ spec: 'int8', scale: 1, scales: [1] })).toThrow(
      new TypeError('scale: give either one or a list, not both'),
    );
    expect(call({ spec: 'int8', zeroPoint: 0.5 })).toThrow(
      new TypeError('zeroPoint: must be an integer of 32 bits, got 0.5'),
    );
    expect(call({ spec: 'int8', valid: '2' })).toThrow(new TypeError('valid: must be a number, got "2"'));
    expect(errorOf(call({ spec: 'int8', valid: -1 }))).toMatchObject({ code: 'ERR_ARGUMENT', argument: 'valid', actual: '-1' });
    expect(call({ spec: 'e4m3', overflow: Symbol('nan') })).toThrow(new TypeError('overflow: must be a word or a number, got a symbol'));
    expect(call({ spec: 'e4m3', overflow: 'nan,nonFinite=pass' })).toThrow(
      new TypeError('overflow: must be a word or a number, got "nan,nonFinite=pass"'),
    );
    for (const nothing of [undefined, null, 5]) {
      expect(() => kv.quantize(x, nothing as never)).toThrow(new TypeError(`spec: must be a spec string or an object with one, got ${nothing}`));
    }
    // What stands in for a tensor's own type and dims must not be passed over.
    expect(call({ spec: 'int8', type: 5 })).toThrow(new TypeError('type: must be a string, got 5'));
    const tensor = { type: 'f32', dims: [1, x.length], data: x };
    for (const name of ['type', 'dims'] as const) {
      expect(() => kv.quantize(tensor, { spec: 'int8', [name]: tensor[name] })).toThrow(
        new TypeError(`${name}: stands in for a tensor that has none, and this one has its own`),
      );
    }
  });

  it('refuses options that the spec has no use for', () => {
    const call = (options: QuantizeOptions) => errorOf(() => kv.quantize(x, options));
    expect(call({ spec: 'int8', overflow: 'nan' }).message).toBe('options: overflow goes with e4m3 and e5m2 only, got int8/tensor/absmax/f32');
    expect(call({ spec: 'f16', scale: 1 }).message).toBe("scale: only goes with calibration 'given'; f16 has none");
    expect(() => kv.createCache({ layers: 1, kvHeads: 1, headDim: 64, key: null as never })).toThrow(
      new TypeError('key: must be a spec string or an object with one, got null'),
    );
    expect(errorOf(() => kv.createCache({ layers: 1, kvHeads: 1, headDim: 64, pageTokens: 0 })).message).toBe('pageTokens: must be > 0, got 0');
    const side = (key: SideSpec) => errorOf(() => kv.createCache({ layers: 1, kvHeads: 1, headDim: 64, key }));
    expect(side({ spec: 'kivi4', rule: 'ceil' })).toMatchObject({ code: 'ERR_ARGUMENT', layer: 0, side: 'key' });
    expect(side({ spec: 'int8', hadamardRun: 'llama-key' }).message).toMatch(/hadamardRun goes with \+hadamard only, got int8\/tensor\/absmax\/f32$/);
  });

  it('refuses specs that are none, and says what is allowed', () => {
    for (const spec of ['int9', '', 'INT8', ' int8', 'int8\u0000', 'é', 'x'.repeat(10000)]) {
      const error = errorOf(() => kv.quantize(x, spec));
      expect(error).toMatchObject({ code: 'ERR_SPEC', argument: 'spec' });
      expect(error.expected).toContain('int8, uint8');
    }
  });

  it('reads only the valid tokens', () => {
    const data = new Float32Array(64).fill(Number.NaN);
    for (let h = 0; h < 2; ++h) data.set(x.subarray(h * 32, h * 32 + 16), h * 32);
    const quantized = kv.quantize({ dims, data }, { ...spec, valid: 2 });
    const codes = new Int8Array(quantized.codes.buffer);
    const expected = codesOf(
      data.map((value) => (Number.isNaN(value) ? 0 : value)),
      0.05,
    );
    expect(Array.from(codes)).toEqual(Array.from(expected));
    expect(errorOf(() => kv.quantize({ dims, data }, { ...spec, valid: 3 })).code).toBe('ERR_NON_FINITE');
  });

  it('keeps in dense types what is not finite, if that is let in', () => {
    const data = Float32Array.of(Number.NaN, Infinity, -Infinity, 1e6);
    for (const nonFinite of ['saturate', 'pass'] as const) {
      expect(Array.from(kv.quantize(data, { spec: 'f32', nonFinite }).data)).toEqual([Number.NaN, Infinity, -Infinity, 1e6]);
      expect(hex(kv.quantize(data, { spec: 'f16', nonFinite }).data)).toBe('007e007c00fc007c');
    }
    expect(errorOf(() => kv.quantize(data, 'f32')).code).toBe('ERR_NON_FINITE');
  });

  it('takes no -1 for all tokens', () => {
    const quantized = kv.quantize({ dims, data: x }, spec);
    for (const valid of [-1, -2, 5])
      expect(errorOf(() => quantized.measure({ dims, data: x }, { valid }))).toMatchObject({ code: 'ERR_ARGUMENT', argument: 'valid' });
  });

  it('tells sizes and bits exactly', () => {
    const quantized = kv.quantize({ dims: [1, 1, 16, 64], data: noise(1024) }, 'int4/token/64');
    expect(quantized.kind).toBe('encoded');
    expect(quantized.spec).toBe('int4/token/64/absmax/f32');
    expect(quantized.codes.length).toBe(512);
    expect(quantized.scales).toBeInstanceOf(Float32Array);
    expect(quantized.scales.length).toBe(16);
    expect(quantized.byteLength).toBe(512 + 64);
    expect(quantized.bitsPerElement).toBe(4.5);
  });

  it('measures what was lost', () => {
    const data = noise(1024);
    const tensor = { dims: [1, 1, 16, 64], data };
    const quantized = kv.quantize(tensor, { spec: 'int4/tensor/given', scale: 0.5 });
    const restored = quantized.dequantize().data;
    const errors = Array.from(data, (value, i) => Math.abs(value - restored[i]!));
    const figures = quantized.measure(tensor);
    expect(figures.elements).toBe(1024);
    expect(figures.maxError).toBe(Math.max(...errors));
    expect(figures.rmse).toBeCloseTo(Math.sqrt(errors.reduce((sum, e) => sum + e * e, 0) / 1024), 12);
    expect(figures.signalRms).toBeCloseTo(Math.sqrt(data.reduce((sum, e) => sum + e * e, 0) / 1024), 12);
    expect(figures.sqnr).toBeCloseTo(20 * Math.log10(figures.signalRms / figures.rmse), 9);
    expect(figures.saturated).toBe(
      data.filter((value) => Math.round(value / 0.5) > 7 || Math.round(value / 0.5) < -8).length,
    );
    expect(kv.measure(quantized, kv.quantize(tensor, 'f32'))).toEqual(figures);
  });

  it('come with every quantize call, of strided, narrow and partly valid tensors too', () => {
    const data = noise(1024);
    // [tokens, heads, head_dim] in memory, half precision, 5 of 8 tokens valid.
    const half = kv.quantize({ dims: [1024], data }, 'f16').data;
    const tensor = { type: 'f16', dims: [2, 8, 64], data: half, strides: [64, 128, 1] } as const;
    const quantized = kv.quantize(tensor, { spec: 'int4/token/16/mse/e4m3', valid: 5 });
    const { errorPerToken, ksDistance, bitsPerElement, memoryRatio, ...figures } = quantized.figures!;
    expect(figures).toEqual(quantized.measure({ ...tensor, dims: [1, 2, 8, 64], strides: [0, 64, 128, 1] }, { valid: 5 }));
    expect(figures.elements).toBe(2 * 5 * 64);
    // codes, scales, and the f32 that the scales are relative to
    expect(quantized.byteLength).toBe(512 + 64 + 4);
    expect([bitsPerElement, memoryRatio]).toEqual([(8 * 580) / 1024, (1024 * 2) / 580]);
    expect([quantized.bitsPerElement, kv.memoryRatio(quantized)]).toEqual([bitsPerElement, memoryRatio]);
    const before = kv.quantize(tensor, 'f32').data as Float32Array;
    const after = quantized.dequantize().data as Float32Array;
    const pick = (from: Float32Array, token: number) =>
      Float32Array.from([0, 1].flatMap((head) => [...from.subarray((head * 8 + token) * 64, (head * 8 + token + 1) * 64)]));
    for (let token = 0; token < 5; ++token) {
      const [one, other] = [pick(before, token), pick(after, token)];
      const mean = one.reduce((sum, value, i) => sum + Math.abs(value - other[i]!), 0) / 128;
      expect(errorPerToken[token]).toBeCloseTo(mean, 12);
    }
    expect(errorPerToken.length).toBe(5);
    const valid = (from: Float32Array) => Float32Array.from([0, 1, 2, 3, 4].flatMap((token) => [...pick(from, token)]));
    expect(ksDistance).toBe(kv.ksDistance(valid(before), valid(after)));
    expect(ksDistance).toBeGreaterThan(0);
    expect(quantized.figures).toBe(quantized.figures);
    quantized.dispose();
    // A bare array; nothing lost; tensors from elsewhere have nothing to be compared with.
    expect(kv.quantize(data, { spec: 'f32' }).figures).toMatchObject({ rmse: 0, maxError: 0, sqnr: Infinity, ksDistance: 0, saturated: 0 });
    const scales = [0.5];
    expect(kv.fromCodes({ type: 'int8', dims: [1, 1, 1, 8], codes: new Uint8Array(8), scales }).figures).toBeUndefined();
  });

  it('come with values that are not finite too: NaN where they are in the way', () => {
    const data = noise(256);
    data[64] = Number.NaN;
    data[130] = Infinity;
    const tensor = { dims: [1, 1, 4, 64], data };
    const expected = kv.quantize({ dims: [1, 1, 1, 64], data: data.slice(0, 64) }, 'int8/token/64').figures!;
    for (const nonFinite of ['saturate', 'pass'] as const) {
      const figures = kv.quantize(tensor, { spec: 'int8/token/64', nonFinite }).figures!;
      expect(figures).toMatchObject({ rmse: NaN, maxError: NaN, sqnr: NaN, signalRms: NaN, ksDistance: NaN, elements: 256, bitsPerElement: 8.5 });
      expect([...figures.errorPerToken].map(Number.isNaN)).toEqual([false, true, true, false]);
      expect(figures.errorPerToken[0]).toBe(expected.errorPerToken[0]);
    }
    // Finite before, not after.
    const nan = kv.quantize(Float32Array.of(464, 465), { spec: 'e4m3/tensor/given', scale: 1, overflow: 'nan' }).figures!;
    expect(nan).toMatchObject({ rmse: NaN, sqnr: NaN, saturated: 1, ksDistance: NaN });
    expect(nan.errorPerToken).toEqual(Float64Array.of(NaN));
    const half = kv.quantize({ dims: [2, 1], data: Float32Array.of(1, 1e6) }, 'f16').figures!;
    expect(half).toMatchObject({ rmse: Infinity, maxError: Infinity, sqnr: -Infinity });
    expect(half.errorPerToken).toEqual(Float64Array.of(0, NaN));
  });

  it('are not there once the tensor is disposed of', () => {
    const quantized = kv.quantize({ dims, data: x }, spec);
    quantized.dispose();
    expect(quantized.figures).toBeUndefined();
  });
});

describe('dequantize', () => {
  it('gives f32, f16 and bf16, whole or in part', () => {
    const quantized = kv.quantize({ dims, data: x }, { ...spec, scale: 0.25 });
    const whole = quantized.dequantize();
    expect(whole).toMatchObject({ type: 'f32', dims });
    expect(Array.from(whole.data)).toEqual(Array.from(codesOf(x, 0.25), (code) => code * 0.25));
    const part = kv.dequantize(quantized, { start: 1, end: 3 });
    expect(part.dims).toEqual([1, 2, 2, 8]);
    for (let h = 0; h < 2; ++h)
      expect(part.data.subarray(h * 16, h * 16 + 16)).toEqual(whole.data.subarray(h * 32 + 8, h * 32 + 24));
    const brain = quantized.dequantize({ type: 'bfloat16' });
    expect(brain.type).toBe('bf16');
    expect(brain.data).toEqual(
      Uint16Array.from(new Uint32Array((whole.data as Float32Array).buffer), (bits) => bits >>> 16),
    );
    expect(quantized.dequantize({ start: 2, end: 2 }).data.length).toBe(0);
  });

  it("writes into the caller's array: shared, at an offset, of raw bytes", () => {
    const quantized = kv.quantize({ dims, data: x }, spec);
    const expected = hex(quantized.dequantize().data);
    const room = new Float32Array(new SharedArrayBuffer(68 * 4)).fill(-1);
    const out = room.subarray(2, 66);
    expect(quantized.dequantize({ out }).data).toBe(out);
    expect(hex(out)).toBe(expected);
    expect([room[1], room[66]]).toEqual([-1, -1]);
    const bytes = new Uint8Array(256);
    quantized.dequantize({ out: bytes });
    expect(hex(bytes)).toBe(expected);
  });

  it("leaves the caller's array alone where it refuses", () => {
    const quantized = kv.quantize({ dims, data: x }, spec);
    for (const length of [0, 63, 65]) {
      const out = new Float32Array(length).fill(7);
      expect(errorOf(() => quantized.dequantize({ out }))).toMatchObject({
        code: 'ERR_BUFFER',
        argument: 'out',
        expected: '256',
        actual: String(length * 4),
      });
      expect(out.every((value) => value === 7)).toBe(true);
    }
    const out = new Float32Array(64).fill(7);
    for (const options of [{ start: -1 }, { end: 5 }, { start: 3, end: 2 }, { start: 0.5 }, { start: Number.NaN }]) {
      expect(errorOf(() => quantized.dequantize({ out, ...options })).code).toBe('ERR_ARGUMENT');
    }
    expect(out.every((value) => value === 7)).toBe(true);
    expect(() => quantized.dequantize({ out, type: 'f16' })).toThrow(
      new TypeError('out: must be a Float16Array or Uint16Array for type f16, got Float32Array'),
    );
    expect(errorOf(() => quantized.dequantize({ type: 'int8' as 'f32' })).code).toBe('ERR_ARGUMENT');
  });
});

describe('a quantized tensor', () => {
  it('goes in wherever a tensor does, as what it decodes to', () => {
    const tensor = { dims: [1, 2, 4, 32], data: noise(256) };
    for (const spec of ['int8/token', 'bf16']) {
      const quantized = kv.quantize(tensor, spec);
      const dense = quantized.dequantize();
      const [again, expected] = [kv.quantize(quantized, 'int4/token'), kv.quantize(dense, 'int4/token')];
      expect(hex(again.codes)).toBe(hex(expected.codes));
      expect(again.figures).toEqual(expected.figures);
      expect(kv.quantizeKvCache(quantized)).toEqual(kv.quantizeKvCache(dense));
      expect(hex(kv.splitIntoPages(quantized, quantized).serialize())).toBe(hex(kv.splitIntoPages(dense, dense).serialize()));
      using cache = kv.createCache({ layers: 1, kvHeads: 2, headDim: 32 });
      cache.append(0, quantized, quantized);
      expect(cache.tokens).toBe(4);
    }
  });
});

describe('fromCodes', () => {
  it('takes per-axis and blocked codes', () => {
    const codes = Uint8Array.of(0x21, 0x43, 0x65, 0x87);
    const tensor = kv.fromCodes({
      type: 'uint4',
      dims: [1, 1, 2, 4],
      codes,
      scales: [1, 2],
      axis: 2,
      zeroPoints: Uint8Array.of(1, 0),
    });
    expect(Array.from(tensor.dequantize().data)).toEqual([0, 1, 2, 3, 10, 12, 14, 16]);
    const blocked = kv.fromCodes({ type: 'uint4', dims: [1, 1, 2, 4], codes, scales: [1, 2, 3, 4], axis: 3, block: 2 });
    expect(Array.from(blocked.dequantize().data)).toEqual([1, 2, 6, 8, 15, 18, 28, 32]);
    expect(hex(blocked.codes)).toBe('21436587');
    // A scale per token of all heads is no spec's.
    expect([tensor.spec, tensor.info.format, tensor.scales]).toEqual([undefined, 'uint4/axis 2', Float32Array.of(1, 2)]);
    expect([blocked.spec, blocked.info.format]).toEqual(['uint4/token/2/given/f32', 'uint4/axis 3/block 2']);
    const cache = kv.createPagedCache([{ key: tensor, value: blocked }]);
    const restored = kv.parse(cache.serialize());
    expect(Array.from(restored.page(0).key.dequantize().data)).toEqual([0, 1, 2, 3, 10, 12, 14, 16]);
    expect(Array.from(restored.page(0).value.dequantize().data)).toEqual([1, 2, 6, 8, 15, 18, 28, 32]);
  });
});
