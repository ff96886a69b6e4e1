/* SPDX-License-Identifier: Apache-2.0
 *
 * kvpages: the C ABI. Every function is declared, documented and listed here and nowhere else; the bindings for
 * Node and WebAssembly are generated from the list at the end.
 *
 * Rules
 * - Every function returns a status: 0, or a negative number of core/status.h. kvp_last_error tells the rest.
 * - Parameters are scalars (int32_t, uint32_t, double) and (pointer, length) pairs: `const` pointers are inputs,
 *   others outputs. Lengths count elements of the pointed-to type. Text is UTF-8, not terminated.
 * - Outputs are written only when the status is 0.
 * - Handles are uint32_t: 20 bits slot, 12 bits generation; 0 is never valid. They belong to the calling thread.
 * - Text and other results of unknown size come as a blob handle (kvp_blob_size, kvp_blob_read, kvp_release).
 * - Tensors are row-major [batch, kv_heads, tokens, head_dim]; fewer dims are padded with 1 in front.
 */
#ifndef KVPAGES_H_
#define KVPAGES_H_

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define KVP_EXPORT __declspec(dllexport)
#else
#define KVP_EXPORT __attribute__((visibility("default"), used))
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---- The library ---- */

/* Blob, text: one line per function of this header, its name and one letter per parameter (abi/describe.h). */
KVP_EXPORT int32_t kvp_describe(uint32_t* blob, size_t blob_len);

/* Blob, JSON: version, status codes, types, presets, all specs, kernels of this build with their availability. */
KVP_EXPORT int32_t kvp_catalogue(uint32_t* blob, size_t blob_len);

/* Blob, JSON, of the last failed call on this thread: code, message and, where known, argument, side, layer, page,
 * byteOffset, expected, actual. */
KVP_EXPORT int32_t kvp_last_error(uint32_t* blob, size_t blob_len);

/* Bytes of a blob. */
KVP_EXPORT int32_t kvp_blob_size(uint32_t blob, double* bytes, size_t bytes_len);

/* Copies a blob; `out` must hold exactly its bytes (ERR_BUFFER). */
KVP_EXPORT int32_t kvp_blob_read(uint32_t blob, uint8_t* out, size_t out_len);

/* Gives up any handle. ERR_DISPOSED when it is not alive. */
KVP_EXPORT int32_t kvp_release(uint32_t handle);

/* ---- Instances ---- */

/* kernels: "auto", "reference", "sse4", "avx2", "avx512", "neon", "wasm128" (ERR_BACKEND when it is not there).
 * max_bytes: limit on the bytes that objects of this instance hold, 0 for none. */
KVP_EXPORT int32_t kvp_instance_create(const char* kernels, size_t kernels_len, double max_bytes, uint32_t* instance,
                                       size_t instance_len);

/* Gives an instance a device, "cuda": from then on it encodes and decodes there, and its new caches live there. ERR_BACKEND where
 * there is none (then why), ERR_DEVICE, ERR_MEMORY. */
KVP_EXPORT int32_t kvp_instance_device(uint32_t instance, const char* device, size_t device_len);

/* Blob, JSON: kernels in use, usedBytes, maxBytes, and of its device, where it has one: name, description, heldBytes, and error, the
 * failure after which it can do nothing any more. */
KVP_EXPORT int32_t kvp_instance_info(uint32_t instance, uint32_t* blob, size_t blob_len);

/* Blob, JSON, of the GPU of this machine: usable, reason (why, or why not), device (name, compute capability, driver; "" where
 * there is none). The first call opens it; environment: docs/cuda.md. */
KVP_EXPORT int32_t kvp_device_probe(uint32_t* blob, size_t blob_len);

/* ---- Payloads: one tensor, dense or encoded, immutable ---- */

/* A dense payload from `data` of `type` ("f32", "f16", "bf16"; little-endian, row-major), copied bit for bit.
 * ERR_SHAPE when the data do not fit the dims. */
KVP_EXPORT int32_t kvp_payload_dense(uint32_t instance, const uint8_t* data, size_t data_len, const char* type,
                                     size_t type_len, const int64_t* dims, size_t dims_len, uint32_t* payload,
                                     size_t payload_len);

/* An affine payload from packed codes, as onnx-light's AffineLayoutProto: axis -1 (per tensor) or 0..3, block 0 for
 * one scale per index of the axis. zeros: one byte per scale, or none. */
KVP_EXPORT int32_t kvp_payload_affine(uint32_t instance, const uint8_t* codes, size_t codes_len, const char* type,
                                      size_t type_len, const int64_t* dims, size_t dims_len, const float* scales,
                                      size_t scales_len, const uint8_t* zeros, size_t zeros_len, int32_t axis,
                                      double block, uint32_t* payload, size_t payload_len);

/* Encodes the first `valid` tokens (-1: all) of a tensor. strides: elements, one per dim, or none for contiguous.
 * spec: a spec string or a preset's name; side: "key", "value" or "" picks a preset's half. options: "name=value"
 * words separated by commas (overflow, global, rule, nonFinite, hadamardRun). scales, zeros: for calibration `given`.
 * ERR_SPEC, ERR_SHAPE, ERR_NON_FINITE (names the first index), ERR_MEMORY, ERR_LIMIT. */
KVP_EXPORT int32_t kvp_quantize(uint32_t instance, const uint8_t* data, size_t data_len, const char* type,
                                size_t type_len, const int64_t* dims, size_t dims_len, const int64_t* strides,
                                size_t strides_len, double valid, const char* spec, size_t spec_len, const char* side,
                                size_t side_len, const char* options, size_t options_len, const float* scales,
                                size_t scales_len, const int32_t* zeros, size_t zeros_len, uint32_t* payload,
                                size_t payload_len);

/* Decodes tokens [begin, end) of every batch and head to `type` ("f32", "f16", "bf16"), contiguous
 * [batch, kv_heads, end - begin, head_dim]. ERR_BUFFER when `out` has another size; ERR_UNSUPPORTED for a structured
 * encoding that this version does not know. */
KVP_EXPORT int32_t kvp_dequantize(uint32_t payload, double begin, double end, const char* type, size_t type_len,
                                  uint8_t* out, size_t out_len);

/* Blob, JSON: kind, spec, dims, bytes of each array, global, axis, block, bitsPerElement. */
KVP_EXPORT int32_t kvp_payload_info(uint32_t payload, uint32_t* blob, size_t blob_len);

/* Copies one array: "data", "codes", "scales", "zeros", "center", "message". ERR_BUFFER when `out` has another size. */
KVP_EXPORT int32_t kvp_payload_array(uint32_t payload, const char* name, size_t name_len, uint8_t* out, size_t out_len);

/* Six figures of the first `valid` tokens against their dense source: rmse, max error, SQNR in dB, rms of the source,
 * saturated elements, elements. */
KVP_EXPORT int32_t kvp_measure(uint32_t payload, const uint8_t* data, size_t data_len, const char* type, size_t type_len,
                               const int64_t* dims, size_t dims_len, double valid, double* figures, size_t figures_len);

/* ---- Paged caches: onnx-light's PagedCacheProto ---- */

/* An empty cache. name and doc_string are not set. */
KVP_EXPORT int32_t kvp_paged_create(uint32_t instance, uint32_t* cache, size_t cache_len);

/* Sets the cache's text `field`, "name" or "docString"; files keep both. */
KVP_EXPORT int32_t kvp_paged_label(uint32_t cache, const char* field, size_t field_len, const char* text, size_t text_len);

/* Adds a page that shares two payloads; nothing is checked before kvp_paged_validate but the handles. */
KVP_EXPORT int32_t kvp_paged_add(uint32_t cache, double start, double length, uint32_t key, uint32_t value);

/* Checks the whole cache: starts from 0 without gaps, lengths within capacity, equal shapes, scales finite and > 0. */
KVP_EXPORT int32_t kvp_paged_validate(uint32_t cache);

/* A cache with the same pages (payloads shared). */
KVP_EXPORT int32_t kvp_paged_clone(uint32_t cache, uint32_t* out, size_t out_len);

/* Blob, JSON: name, docString, and per page start, length, capacity, and of key and value kind, spec, dims, bytes. */
KVP_EXPORT int32_t kvp_paged_info(uint32_t cache, uint32_t* blob, size_t blob_len);

/* A payload of page `page`; side is "key" or "value". */
KVP_EXPORT int32_t kvp_paged_payload(uint32_t cache, double page, const char* side, size_t side_len, uint32_t* payload,
                                     size_t payload_len);

/* onnx-light's ai.rt::QuantizePagedCache: a new cache whose pages `indices` are converted; other pages are shared.
 * Types: int8 uint8 int4 uint4 int2 uint2 (codes) or f32 f16 bf16 (dense). zero: the zero point's value; scales must
 * be finite f32 > 0 for dense destinations too. Checks and their order: onnx-light's. */
KVP_EXPORT int32_t kvp_paged_quantize(uint32_t cache, const int64_t* indices, size_t indices_len, double key_scale,
                                      const char* key_type, size_t key_type_len, int32_t key_zero, double value_scale,
                                      const char* value_type, size_t value_type_len, int32_t value_zero, uint32_t* out,
                                      size_t out_len);

/* Reads a serialized PagedCacheProto; all or nothing. ERR_CORRUPT, ERR_UNSUPPORTED with byteOffset and page. */
KVP_EXPORT int32_t kvp_paged_parse(uint32_t instance, const uint8_t* bytes, size_t bytes_len, uint32_t* cache,
                                   size_t cache_len);

/* Exact bytes of the serialized cache. */
KVP_EXPORT int32_t kvp_paged_serialized_size(uint32_t cache, double* bytes, size_t bytes_len);

/* Serializes in onnx-light's field order. ERR_BUFFER unless out_len is the serialized size. */
KVP_EXPORT int32_t kvp_paged_serialize(uint32_t cache, uint8_t* out, size_t out_len);

/* ---- One scale for a tensor, sorted profiles, clusters: after mixle 0.8.2 ----
 * Tensors here may have any rank (at most 32 dims) and also type "f64". compat: "" or "gen2", or "gen1" for the numbers
 * of mixle's first generation. Arithmetic is float64 unless said otherwise. */

/* mode "int8": scale = f32 max|x| / 127 (1 where that is 0), code = x / scale rounded to even and held in -127..127.
 * "fp8": e4m3, scale = max(max|x| / 448, 1) as a float64, code of x / scale in f32; with gen1 scale 1 and codes NaN
 * beyond 464. codes: one byte per element. ERR_NON_FINITE (names the first index), ERR_SHAPE (empty). */
KVP_EXPORT int32_t kvp_kv_quantize(const uint8_t* data, size_t data_len, const char* data_type, size_t data_type_len,
                                   const int64_t* data_dims, size_t data_dims_len, const char* mode, size_t mode_len,
                                   const char* compat, size_t compat_len, uint8_t* codes, size_t codes_len,
                                   double* scale, size_t scale_len);

/* code * scale in f32. ERR_ARGUMENT unless the scale is finite and > 0 as f32. */
KVP_EXPORT int32_t kvp_kv_dequantize(const uint8_t* codes, size_t codes_len, double scale, const char* mode,
                                     size_t mode_len, float* out, size_t out_len);

/* Mean |x - restored| of kvp_kv_quantize over all but the leading dim, one figure per index of it. */
KVP_EXPORT int32_t kvp_kv_error_per_token(uint32_t instance, const uint8_t* data, size_t data_len,
                                          const char* data_type, size_t data_type_len, const int64_t* data_dims,
                                          size_t data_dims_len, const char* mode, size_t mode_len, const char* compat,
                                          size_t compat_len, double* errors, size_t errors_len);

/* A sorted profile: the top_k largest magnitudes exactly, a fitted "gaussian" or "gamma" for all other values, and the
 * rank of each. D, the Kolmogorov-Smirnov distance of the fit, is its receipt; with D over the threshold (0 to 1), or
 * fewer than 2 values to fit, it holds the dense values. ERR_NON_FINITE, ERR_ARGUMENT, ERR_SHAPE, ERR_LIMIT. */
KVP_EXPORT int32_t kvp_profile_fit(uint32_t instance, const uint8_t* data, size_t data_len, const char* data_type,
                                   size_t data_type_len, const int64_t* data_dims, size_t data_dims_len, double top_k,
                                   const char* family, size_t family_len, double threshold, const char* compat,
                                   size_t compat_len, uint32_t* profile, size_t profile_len);

/* Blob, JSON: dims, type of the values, d, fallback, headCount, tailCount, indexBytes, family, mu and sigma2 or k and theta,
 * byteLength (of the serialized form; of gen1 its estimate), generation. */
KVP_EXPORT int32_t kvp_profile_info(uint32_t profile, uint32_t* blob, size_t blob_len);

/* Copies "values" (head values by descending magnitude, or all), "head" or "permutation" (indices of indexBytes). */
KVP_EXPORT int32_t kvp_profile_array(uint32_t profile, const char* name, size_t name_len, uint8_t* out,
                                     size_t out_len);

/* Writes the tensor in the profile's type: the head exact, every tail value replaced by the fitted quantile of its rank. */
KVP_EXPORT int32_t kvp_profile_reconstruct(uint32_t profile, uint8_t* out, size_t out_len);

/* mixle's bytes, magic MSPQ; out_len is byteLength. ERR_UNSUPPORTED for gen1. */
KVP_EXPORT int32_t kvp_profile_serialize(uint32_t profile, uint8_t* out, size_t out_len);

/* Reads MSPQ bytes; all or nothing. ERR_CORRUPT, ERR_UNSUPPORTED, ERR_LIMIT with byteOffset. */
KVP_EXPORT int32_t kvp_profile_parse(uint32_t instance, const uint8_t* bytes, size_t bytes_len, uint32_t* profile,
                                     size_t profile_len);

/* Scores a tensor, less as many of its largest magnitudes as the profile's head has, against the profile's fit. Three
 * figures: D, limit = max(ratio * D of the profile, D of the profile + margin), 1 where D is over the limit. */
KVP_EXPORT int32_t kvp_profile_anomaly(uint32_t profile, const uint8_t* data, size_t data_len, const char* data_type,
                                       size_t data_type_len, const int64_t* data_dims, size_t data_dims_len,
                                       double ratio, double margin, double* figures, size_t figures_len);

/* Kolmogorov-Smirnov distance of all values of a tensor to the profile's fit. */
KVP_EXPORT int32_t kvp_profile_ks(uint32_t profile, const uint8_t* data, size_t data_len, const char* data_type,
                                  size_t data_type_len, const int64_t* data_dims, size_t data_dims_len,
                                  double* distance, size_t distance_len);

/* Stores a chunk of tokens: of each cluster the outliers as kvp_kv_quantize does, the other members as sorted profiles.
 * keys and values: [tokens, ...] of equal dims. counts: members and outliers of each cluster; indices: its members, then
 * its outliers, cluster after cluster. outlier_keys, outlier_values: nothing, or the rows that the caller holds for the
 * outliers, which must be equal to the rows that they name. ERR_ARGUMENT, ERR_MISMATCH (members are no exact partition of
 * the tokens, or a row differs), ERR_SHAPE, ERR_NON_FINITE. */
KVP_EXPORT int32_t kvp_clusters_quantize(uint32_t instance, const uint8_t* keys, size_t keys_len,
                                         const char* keys_type, size_t keys_type_len, const int64_t* keys_dims,
                                         size_t keys_dims_len, const uint8_t* values, size_t values_len,
                                         const char* values_type, size_t values_type_len, const int64_t* values_dims,
                                         size_t values_dims_len, const int64_t* ids, size_t ids_len,
                                         const int64_t* counts, size_t counts_len, const int32_t* indices,
                                         size_t indices_len, const uint8_t* outlier_keys, size_t outlier_keys_len,
                                         const uint8_t* outlier_values, size_t outlier_values_len, const char* mode,
                                         size_t mode_len, const char* compat, size_t compat_len, const char* family,
                                         size_t family_len, double tail_top_k, uint32_t* clusters,
                                         size_t clusters_len);

/* Blob, JSON: receipt (input, member, outlier, tail), and per cluster id, memberCount, outlierCount, tailCount. */
KVP_EXPORT int32_t kvp_clusters_info(uint32_t clusters, uint32_t* blob, size_t blob_len);

/* Copies the "members", "outliers" or "tail" (ascending) of cluster `index`. */
KVP_EXPORT int32_t kvp_clusters_indices(uint32_t clusters, double index, const char* name, size_t name_len,
                                        int32_t* out, size_t out_len);

/* Codes and scale of a cluster's outliers; side is "key" or "value". */
KVP_EXPORT int32_t kvp_clusters_outliers(uint32_t clusters, double index, const char* side, size_t side_len,
                                         uint8_t* codes, size_t codes_len, double* scale, size_t scale_len);

/* Profile of a cluster's tail; ERR_ARGUMENT where it has none. */
KVP_EXPORT int32_t kvp_clusters_tail(uint32_t clusters, double index, const char* side, size_t side_len,
                                     uint32_t* profile, size_t profile_len);

/* Checks that every token is stored once. Seven counts per cluster: members, outliers, tail; stored rows of outlier keys,
 * outlier values, tail keys, tail values. indices: members, outliers, tail, cluster after cluster. receipt: four counts,
 * tokens, members, outliers, tail. */
KVP_EXPORT int32_t kvp_clusters_verify(double tokens, const int64_t* ids, size_t ids_len, const int64_t* counts,
                                       size_t counts_len, const int32_t* indices, size_t indices_len, double* receipt,
                                       size_t receipt_len);

/* An empty bank of clusters. */
KVP_EXPORT int32_t kvp_bank_create(uint32_t instance, double kv_heads, double head_dim, double max_clusters,
                                   uint32_t* bank, size_t bank_len);

/* Takes in a chunk, keys and values [batch, tokens, kv_heads, head_dim]: a birth where every head scores the mean key of the
 * chunk below birth_threshold in all clusters, merges of clusters nearer than merge_threshold (NaN: 2.65 + 6 / sqrt of the
 * smaller count), and, with `update` not 0 and no birth, a soft update. All or nothing. Blob, JSON: birthed, updated,
 * merged, mergeDistances, clusters, misfitScalar, perCluster (misfit, members, outliers: the outlier_top_k worst members). */
KVP_EXPORT int32_t kvp_bank_ingest(uint32_t bank, const uint8_t* keys, size_t keys_len, const char* keys_type,
                                   size_t keys_type_len, const int64_t* keys_dims, size_t keys_dims_len,
                                   const uint8_t* values, size_t values_len, const char* values_type,
                                   size_t values_type_len, const int64_t* values_dims, size_t values_dims_len,
                                   double birth_threshold, double merge_threshold, double outlier_top_k,
                                   int32_t update, uint32_t* blob, size_t blob_len);

/* Blob, JSON: kvHeads, headDim, maxClusters, clusters (alive). */
KVP_EXPORT int32_t kvp_bank_info(uint32_t bank, uint32_t* blob, size_t blob_len);

/* Copies one array of the alive clusters, [kv_heads, clusters, ...]: "count", "meanKeys", "meanValues", "keyVariances"
 * (each head_dim wide), "covariances" (value x key, head_dim * head_dim). */
KVP_EXPORT int32_t kvp_bank_array(uint32_t bank, const char* name, size_t name_len, double* out, size_t out_len);

/* A bank of its own with the same state. */
KVP_EXPORT int32_t kvp_bank_clone(uint32_t bank, uint32_t* out, size_t out_len);

/* ---- Measures, float64 ---- */

/* Root of the mean squared difference of two tensors of equal dims. */
KVP_EXPORT int32_t kvp_metrics_rmse(const uint8_t* a, size_t a_len, const char* a_type, size_t a_type_len,
                                    const int64_t* a_dims, size_t a_dims_len, const uint8_t* b, size_t b_len,
                                    const char* b_type, size_t b_type_len, const int64_t* b_dims, size_t b_dims_len,
                                    double* rmse, size_t rmse_len);

/* Mean |a - b| over all but the leading dim, one figure per index of it. */
KVP_EXPORT int32_t kvp_metrics_error_per_token(const uint8_t* a, size_t a_len, const char* a_type, size_t a_type_len,
                                               const int64_t* a_dims, size_t a_dims_len, const uint8_t* b,
                                               size_t b_len, const char* b_type, size_t b_type_len,
                                               const int64_t* b_dims, size_t b_dims_len, double* errors,
                                               size_t errors_len);

/* Logits [..., vocabulary], a the reference. Four figures: share of positions with the same largest entry, mean and largest
 * sum p (log p - log q) in nats, positions. -Infinity is a masked entry; NaN and +Infinity are ERR_NON_FINITE. */
KVP_EXPORT int32_t kvp_metrics_fidelity(const uint8_t* a, size_t a_len, const char* a_type, size_t a_type_len,
                                        const int64_t* a_dims, size_t a_dims_len, const uint8_t* b, size_t b_len,
                                        const char* b_type, size_t b_type_len, const int64_t* b_dims,
                                        size_t b_dims_len, double* figures, size_t figures_len);

/* Largest gap between the distribution functions of two tensors' values. */
KVP_EXPORT int32_t kvp_metrics_ks_distance(uint32_t instance, const uint8_t* a, size_t a_len, const char* a_type,
                                           size_t a_type_len, const int64_t* a_dims, size_t a_dims_len,
                                           const uint8_t* b, size_t b_len, const char* b_type, size_t b_type_len,
                                           const int64_t* b_dims, size_t b_dims_len, double* distance,
                                           size_t distance_len);

/* 2 / (bits / 8 + scale_bits / 8 / block): bytes of 16-bit elements over those of codes with their scales. */
KVP_EXPORT int32_t kvp_metrics_memory_ratio(double bits, double block, double scale_bits, double* ratio,
                                            size_t ratio_len);

/* ---- Model caches: keys and values of all layers of one sequence ---- */

/* What a cache is made like, for kvp_cache_create, kvp_cache_estimate, kvp_cache_from_paged and kvp_restore_create.
 * heads (KV heads), key_dims and value_dims (head_dim), windows (tokens, 0 for none): one for all layers, or one per
 * layer. key, value: spec strings or presets separated by line feeds, and key_options, value_options: "name=value" words
 * of each; one for all layers, or one per layer. page_tokens 0: 16, or the longest block along tokens. residual: KIVI's,
 * 0 for none. hot: type of dense pages. ERR_SPEC, ERR_ARGUMENT with layer and side. */
KVP_EXPORT int32_t kvp_config_create(double layers, const int64_t* heads, size_t heads_len, const int64_t* key_dims,
                                     size_t key_dims_len, const int64_t* value_dims, size_t value_dims_len,
                                     const int64_t* windows, size_t windows_len, const char* key, size_t key_len,
                                     const char* value, size_t value_len, const char* key_options, size_t key_options_len,
                                     const char* value_options, size_t value_options_len, double page_tokens,
                                     double keep_first, double keep_recent, double residual, const char* hot,
                                     size_t hot_len, uint32_t* config, size_t config_len);

/* An empty cache. max_bytes: limit on what it and its forks hold together, 0 for none. device: "cpu", "cuda", or "" for the
 * instance's own (ERR_BACKEND when it has no such). */
KVP_EXPORT int32_t kvp_cache_create(uint32_t instance, uint32_t config, double max_bytes, const char* device,
                                    size_t device_len, uint32_t* cache, size_t cache_len);

/* Blob, JSON as kvp_cache_stats: what a cache of `tokens` tokens takes after freeze. Nothing is allocated. */
KVP_EXPORT int32_t kvp_cache_estimate(uint32_t config, double tokens, uint32_t* blob, size_t blob_len);

/* Freezes the pages of a layer that are due, then stores tokens: keys and values [kv_heads, tokens, head_dim] (a batch of 1
 * in front is accepted) f32, f16 or bf16, rounded to the hot type; strides: elements, one per dim, or none. ERR_SHAPE,
 * ERR_NON_FINITE, ERR_LIMIT, ERR_MEMORY with layer and side; the tokens stay as they were then. */
KVP_EXPORT int32_t kvp_cache_append(uint32_t cache, double layer, const uint8_t* keys, size_t keys_len,
                                    const char* key_type, size_t key_type_len, const int64_t* key_dims,
                                    size_t key_dims_len, const int64_t* key_strides, size_t key_strides_len,
                                    const uint8_t* values, size_t values_len, const char* value_type,
                                    size_t value_type_len, const int64_t* value_dims, size_t value_dims_len,
                                    const int64_t* value_strides, size_t value_strides_len);

/* The same for all layers, all or nothing. dims: [layers, kv_heads, tokens, head_dim] with strides or none; or three dims
 * [kv_heads, tokens, head_dim] for each layer, one after the other, of contiguous tensors that follow one another. */
KVP_EXPORT int32_t kvp_cache_append_all(uint32_t cache, const uint8_t* keys, size_t keys_len, const char* key_type,
                                        size_t key_type_len, const int64_t* key_dims, size_t key_dims_len,
                                        const int64_t* key_strides, size_t key_strides_len, const uint8_t* values,
                                        size_t values_len, const char* value_type, size_t value_type_len,
                                        const int64_t* value_dims, size_t value_dims_len, const int64_t* value_strides,
                                        size_t value_strides_len);

/* Encodes every page that is due, of a layer or (NaN) of all. Fourteen figures, of keys and then of values: pages, elements,
 * rmse, max error, saturated elements, bytes before, bytes after. */
KVP_EXPORT int32_t kvp_cache_freeze(uint32_t cache, double layer, double* figures, size_t figures_len);

/* Forgets tokens `tokens` and later in all layers. ERR_ARGUMENT beyond the end, or within a gap of dropped tokens. */
KVP_EXPORT int32_t kvp_cache_truncate(uint32_t cache, double tokens);

/* Forgets pages that end at or before `tokens`, of a layer or (NaN) of all; never kept ones. Positions stay. */
KVP_EXPORT int32_t kvp_cache_drop_before(uint32_t cache, double tokens, double layer);

/* A cache of tokens [begin, end) with shared pages and unchanged positions; begin is the start of a page in every layer. */
KVP_EXPORT int32_t kvp_cache_slice(uint32_t cache, double begin, double end, uint32_t* out, size_t out_len);

/* A cache of its own with the same pages: shared until one of the two writes. */
KVP_EXPORT int32_t kvp_cache_fork(uint32_t cache, uint32_t* out, size_t out_len);

/* The same cache on a device, "cpu" or "cuda", with the same codes and scales and a limit of its own as large; a fork where it is
 * there already. ERR_BACKEND when its instance has no such device. */
KVP_EXPORT int32_t kvp_cache_move(uint32_t cache, const char* device, size_t device_len, uint32_t* out, size_t out_len);

/* Tokens appended to a layer; NaN: the most of any layer. */
KVP_EXPORT int32_t kvp_cache_tokens(uint32_t cache, double layer, double* tokens, size_t tokens_len);

/* Thaws tokens [begin, end) of both sides to `type`, contiguous [kv_heads, end - begin, head_dim]. ERR_BUFFER when one of the two
 * has another size, ERR_ARGUMENT where tokens have been dropped. */
KVP_EXPORT int32_t kvp_cache_read(uint32_t cache, double layer, double begin, double end, const char* type, size_t type_len,
                                  uint8_t* keys, size_t keys_len, uint8_t* values, size_t values_len);

/* softmax(scale Q K^T) V. queries [heads, tokens, head_dim]; options: scale, query_start, window (0: none), sinks,
 * softcap (0: none), 1 where lse is wanted (else 0); NaN for the first three: 1 / sqrt(head_dim), tokens - queries, the layer's window.
 * sink_logits: one per head, or none. out: f32 [heads, tokens, head_dim of values]; lse: [heads, tokens], or empty. ERR_MISMATCH where an earlier layer has another
 * number of tokens. Rules and error bound: docs/attention.md. */
KVP_EXPORT int32_t kvp_cache_attend(uint32_t cache, double layer, const uint8_t* queries, size_t queries_len,
                                    const char* type, size_t type_len, const int64_t* dims, size_t dims_len,
                                    const int64_t* strides, size_t strides_len, const double* options, size_t options_len,
                                    const float* sink_logits, size_t sink_logits_len, float* out, size_t out_len, float* lse,
                                    size_t lse_len);

/* The same for several caches in one call: queries [caches, heads, tokens, head_dim], out and lse likewise. */
KVP_EXPORT int32_t kvp_cache_attend_batch(const uint32_t* caches, size_t caches_len, double layer, const uint8_t* queries,
                                          size_t queries_len, const char* type, size_t type_len, const int64_t* dims,
                                          size_t dims_len, const int64_t* strides, size_t strides_len,
                                          const double* options, size_t options_len, const float* sink_logits,
                                          size_t sink_logits_len, float* out, size_t out_len, float* lse, size_t lse_len);

/* Blob, JSON: bytes by kind, bits per element, pages, sharing, figures of encoded pages. */
KVP_EXPORT int32_t kvp_cache_stats(uint32_t cache, uint32_t* blob, size_t blob_len);

/* Blob, JSON: device, the configuration with specs spelt out, model tag and number of token ids of the file it was read from. */
KVP_EXPORT int32_t kvp_cache_info(uint32_t cache, uint32_t* blob, size_t blob_len);

/* Blob, JSON: a layer's tokens and its pages: start, length, capacity, kept, and of each side format, bytes, frozen, rmse,
 * maxError, saturated. */
KVP_EXPORT int32_t kvp_cache_layer(uint32_t cache, double layer, uint32_t* blob, size_t blob_len);

/* A layer as onnx-light's pages (a handle as of kvp_paged_create), payloads shared; starts count from 0. */
KVP_EXPORT int32_t kvp_cache_to_paged(uint32_t cache, double layer, uint32_t* paged, size_t paged_len);

/* A cache of one paged cache per layer, payloads shared where it is no device's. max_bytes, device: as kvp_cache_create. ERR_MISMATCH, ERR_SHAPE, ERR_UNSUPPORTED with layer and page. */
KVP_EXPORT int32_t kvp_cache_from_paged(uint32_t instance, uint32_t config, double max_bytes, const char* device,
                                        size_t device_len, const uint32_t* layers, size_t layers_len, uint32_t* cache,
                                        size_t cache_len);

/* Token ids of the file that the cache was read from; ERR_BUFFER unless out_len is their number (kvp_cache_info). */
KVP_EXPORT int32_t kvp_cache_token_ids(uint32_t cache, uint32_t* out, size_t out_len);

/* Begins to write a cache's envelope (docs/envelope.md), of the cache as it is now. model: a tag; token_ids: one per token,
 * or none. ERR_MISMATCH where layers have different numbers of tokens. */
KVP_EXPORT int32_t kvp_save_create(uint32_t cache, const char* model, size_t model_len, const uint32_t* token_ids,
                                   size_t token_ids_len, uint32_t* writer, size_t writer_len);

/* Two figures: pieces of the file, and how many of them have been given. */
KVP_EXPORT int32_t kvp_save_progress(uint32_t writer, double* figures, size_t figures_len);

/* Bytes of the whole file; takes as long as writing it. */
KVP_EXPORT int32_t kvp_save_size(uint32_t writer, double* bytes, size_t bytes_len);

/* Blob: the next pieces of the file, one and as many more as fit into `bytes`. ERR_ARGUMENT past the last one. */
KVP_EXPORT int32_t kvp_save_next(uint32_t writer, double bytes, uint32_t* blob, size_t blob_len);

/* Begins to read an envelope. config: layers, KV heads and head_dims that the file must have, 0 for any, and the specs of keys and
 * values where check_key and check_value are not 0; model: the tag that it must have, where check_model is not 0. max_bytes, device:
 * as kvp_cache_create. */
KVP_EXPORT int32_t kvp_restore_create(uint32_t instance, uint32_t config, int32_t check_key, int32_t check_value, int32_t check_model,
                                      const char* model, size_t model_len, double max_bytes, const char* device, size_t device_len,
                                      uint32_t* reader, size_t reader_len);

/* Takes the file's next bytes, any number of them. Two figures: pages of the file (0 before the header is whole), and pages
 * read. ERR_CORRUPT, ERR_UNSUPPORTED, ERR_MISMATCH with byteOffset, layer and page; the reader is of no use then. */
KVP_EXPORT int32_t kvp_restore_feed(uint32_t reader, const uint8_t* bytes, size_t bytes_len, double* figures,
                                    size_t figures_len);

/* The cache, where the file is whole; ERR_CORRUPT where it ends early. */
KVP_EXPORT int32_t kvp_restore_finish(uint32_t reader, uint32_t* cache, size_t cache_len);

#ifdef __cplusplus
} /* extern "C" */
#endif

/* The list: every function above, once. */
#define KVP_FUNCTIONS(F)         \
  F(kvp_describe)                \
  F(kvp_catalogue)               \
  F(kvp_last_error)              \
  F(kvp_blob_size)               \
  F(kvp_blob_read)               \
  F(kvp_release)                 \
  F(kvp_instance_create)         \
  F(kvp_instance_device)         \
  F(kvp_instance_info)           \
  F(kvp_device_probe)            \
  F(kvp_payload_dense)           \
  F(kvp_payload_affine)          \
  F(kvp_quantize)                \
  F(kvp_dequantize)              \
  F(kvp_payload_info)            \
  F(kvp_payload_array)           \
  F(kvp_measure)                 \
  F(kvp_paged_create)            \
  F(kvp_paged_add)               \
  F(kvp_paged_validate)          \
  F(kvp_paged_label)             \
  F(kvp_paged_clone)             \
  F(kvp_paged_info)              \
  F(kvp_paged_payload)           \
  F(kvp_paged_quantize)          \
  F(kvp_paged_parse)             \
  F(kvp_paged_serialized_size)   \
  F(kvp_paged_serialize)         \
  F(kvp_kv_quantize)             \
  F(kvp_kv_dequantize)           \
  F(kvp_kv_error_per_token)      \
  F(kvp_profile_fit)             \
  F(kvp_profile_info)            \
  F(kvp_profile_array)           \
  F(kvp_profile_reconstruct)     \
  F(kvp_profile_serialize)       \
  F(kvp_profile_parse)           \
  F(kvp_profile_anomaly)         \
  F(kvp_profile_ks)              \
  F(kvp_clusters_quantize)       \
  F(kvp_clusters_info)           \
  F(kvp_clusters_indices)        \
  F(kvp_clusters_outliers)       \
  F(kvp_clusters_tail)           \
  F(kvp_clusters_verify)         \
  F(kvp_bank_create)             \
  F(kvp_bank_ingest)             \
  F(kvp_bank_info)               \
  F(kvp_bank_array)              \
  F(kvp_bank_clone)              \
  F(kvp_metrics_rmse)            \
  F(kvp_metrics_error_per_token) \
  F(kvp_metrics_fidelity)        \
  F(kvp_metrics_ks_distance)     \
  F(kvp_metrics_memory_ratio)    \
  F(kvp_config_create)           \
  F(kvp_cache_create)            \
  F(kvp_cache_estimate)          \
  F(kvp_cache_append)            \
  F(kvp_cache_append_all)        \
  F(kvp_cache_freeze)            \
  F(kvp_cache_truncate)          \
  F(kvp_cache_drop_before)       \
  F(kvp_cache_slice)             \
  F(kvp_cache_fork)              \
  F(kvp_cache_move)              \
  F(kvp_cache_tokens)            \
  F(kvp_cache_read)              \
  F(kvp_cache_attend)            \
  F(kvp_cache_attend_batch)      \
  F(kvp_cache_stats)             \
  F(kvp_cache_info)              \
  F(kvp_cache_layer)             \
  F(kvp_cache_to_paged)          \
  F(kvp_cache_from_paged)        \
  F(kvp_cache_token_ids)         \
  F(kvp_save_create)             \
  F(kvp_save_progress)           \
  F(kvp_save_size)               \
  F(kvp_save_next)               \
  F(kvp_restore_create)          \
  F(kvp_restore_feed)            \
  F(kvp_restore_finish)

#endif /* KVPAGES_H_ */
