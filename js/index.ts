// SPDX-License-Identifier: Apache-2.0
// What users import; nothing else is public.
import { openHere } from '#load';
import { KvPages } from './kv-pages.js';
import type { LoadOptions } from './kv-pages.js';

export { KvPagesError } from './errors.js';
export type { ErrorCode, ErrorFields } from './errors.js';
export { KvPages } from './kv-pages.js';
export type {
  Backend,
  BackendInfo,
  DeviceInfo,
  Formats,
  Kernels,
  LoadOptions,
  QuantizeOptions,
  TypeInfo,
  WasmSource,
} from './kv-pages.js';
export { ModelCache } from './model-cache.js';
export type {
  Attention,
  AttendOptions,
  ByteSink,
  ByteSource,
  CacheDevice,
  CachePage,
  CachePageSide,
  CacheStats,
  FreezeFigures,
  HeadDim,
  LayerInfo,
  ModelCacheOptions,
  ModelShape,
  ReadOptions,
  RestoreOptions,
  SaveOptions,
  SideSpec,
} from './model-cache.js';
export { PagedCache } from './paged-cache.js';
export type {
  AsyncOptions,
  Destination,
  Page,
  PagedCacheOptions,
  PageFigures,
  PageInfo,
  PageSource,
} from './paged-cache.js';
export { ClusterBank, SortedProfile } from './profile.js';
export type {
  AnomalyReport,
  BankOptions,
  BankReceipt,
  ClusterOptions,
  ClusterTokenConservation,
  ClusterTokens,
  Fidelity,
  FloatTensor,
  KvCacheOptions,
  ProfileInfo,
  ProfileOptions,
  QuantizedCluster,
  QuantizedKv,
  RestoredCluster,
  ValueTensor,
} from './profile.js';
export { QuantizedTensor } from './quantized-tensor.js';
export type { DequantizeOptions, Figures, QuantizeFigures, TensorInfo } from './quantized-tensor.js';
export type { DenseTensor, DenseType, DenseTypeWord, TensorData, TensorLike } from './tensor.js';

/**
 * Loads the core and makes an instance of it, with kernels and a memory limit of its own. Browsers, workers, Deno,
 * Bun and edge runtimes get WebAssembly; Node gets the addon where it loads, on a GPU where it finds one, else WebAssembly. `kv.backend`,
 * `kv.kernels` and `kv.reason` say what was chosen and why.
 * @throws KvPagesError `ERR_BACKEND` where a backend or kernels that were asked for cannot be had; nothing else is
 *   taken instead
 */
export async function load(options: LoadOptions = {}): Promise<KvPages> {
  const { loaded, kernels, maxBytes } = await openHere(options);
  return new KvPages(loaded, kernels, maxBytes);
}
