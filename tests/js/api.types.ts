// SPDX-License-Identifier: Apache-2.0
// Checked by the compiler alone: what callers may write, and what they may not.
import { KvPagesError, load, PagedCache, QuantizedTensor } from '../../js/index.js';
import type { DenseTensor, DeviceInfo, ErrorCode, Figures, KvPages, ModelCache, QuantizeFigures, TensorLike } from '../../js/index.js';

type Equal<A, B> = (<T>() => T extends A ? 1 : 2) extends <T>() => T extends B ? 1 : 2 ? true : false;
function same<A, B>(_: Equal<A, B>): void {}

export async function uses(signal: AbortSignal): Promise<void> {
  const kv: KvPages = await load({
    backend: 'auto',
    kernels: 'reference',
    maxBytes: 1 << 20,
    wasm: new URL('https://example.org/kvpages.wasm'),
  });
  same<typeof kv.backend, 'cuda' | 'native' | 'wasm'>(true);
  // @ts-expect-error: no such backend
  await load({ backend: 'gpu' });
  // @ts-expect-error: no such kernels
  await load({ kernels: 'sse2' });

  const quantized = kv.quantize(new Float32Array(8), 'int8/tensor');
  same<typeof quantized, QuantizedTensor>(true);
  kv.quantize(
    { type: 'float16', dims: [1, 2, 3, 4], data: new Uint16Array(24) },
    { spec: 'kv4', side: 'key', valid: 2, nonFinite: 'pass' },
  );
  kv.quantize(
    { dtype: 'f32', shape: [8] as const, data: new SharedArrayBuffer(32) },
    { spec: 'int4/tensor/given', scale: 0.5, zeroPoint: 1 },
  );
  // @ts-expect-error: an array of numbers is no tensor
  kv.quantize([1, 2, 3], 'int8');
  // @ts-expect-error: the spec is missing
  kv.quantize(new Float32Array(8), {});
  // @ts-expect-error: no such side
  kv.quantize(new Float32Array(8), { spec: 'kv4', side: 'k' });

  const dense: DenseTensor = kv.dequantize(quantized, { type: 'bfloat16', start: 0, end: 1, out: new Uint16Array(8) });
  const again: TensorLike = dense;
  const figures: Figures = quantized.measure(again);
  void figures.sqnr;
  const lost: QuantizeFigures | undefined = quantized.figures;
  void lost?.errorPerToken[0];
  // @ts-expect-error: codes are no type to decode to
  kv.dequantize(quantized, { type: 'int8' });

  using cache = kv.createPagedCache([{ key: dense, value: quantized }]);
  same<typeof cache, PagedCache>(true);
  using model = kv.createCache({ layers: 1, kvHeads: 1, headDim: 8, device: 'cpu' });
  same<typeof model.device, 'cpu' | 'cuda'>(true);
  same<ReturnType<typeof model.to>, ModelCache>(true);
  same<typeof kv.device, DeviceInfo | undefined>(true);
  // @ts-expect-error: there is no such device
  model.to('gpu');
  const int4 = { type: 'int4', scale: 0.25, zeroPoint: 0 } as const;
  kv.quantizePagedCache(cache, [0], { key: int4, value: { type: 'bf16' } });
  // @ts-expect-error: both sides are needed
  kv.quantizePagedCache(cache, [0], { key: int4 });
  // @ts-expect-error: codes need a scale
  kv.quantizePagedCache(cache, [0], { key: int4, value: { type: 'uint8' } });
  // @ts-expect-error: doubles are rounded on the way in and never given out
  kv.dequantize(quantized, { type: 'float64' });
  // @ts-expect-error: the operator has no such type
  kv.quantizePagedCache(cache, [0], { key: int4, value: { type: 'int3', scale: 1 } });
  const later: PagedCache = await kv.quantizePagedCacheAsync(
    cache,
    new Set([0]),
    { key: int4, value: int4 },
    { signal, onProgress: ({ done, total }) => done / total },
  );
  const bytes: Uint8Array = later.serialize();
  kv.parse(bytes);
  kv.parse(new SharedArrayBuffer(8));
  // @ts-expect-error: text is no file
  kv.parse('bytes');
  // @ts-expect-error: made by load() and its methods only
  new PagedCache();

  try {
    cache.page(9);
  } catch (error) {
    if (error instanceof KvPagesError) {
      const code: ErrorCode = error.code;
      const page: number | undefined = error.page;
      const side: 'key' | 'value' | undefined = error.side;
      void [code, page, side];
    }
  }
}
