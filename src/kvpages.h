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

/* Blob, JSON: kernels in use, usedBytes, maxBytes. */
KVP_EXPORT int32_t kvp_instance_info(uint32_t instance, uint32_t* blob, size_t blob_len);

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

#ifdef __cplusplus
} /* extern "C" */
#endif

/* The list: every function above, once. */
#define KVP_FUNCTIONS(F)       \
  F(kvp_describe)              \
  F(kvp_catalogue)             \
  F(kvp_last_error)            \
  F(kvp_blob_size)             \
  F(kvp_blob_read)             \
  F(kvp_release)               \
  F(kvp_instance_create)       \
  F(kvp_instance_info)         \
  F(kvp_payload_dense)         \
  F(kvp_payload_affine)        \
  F(kvp_quantize)              \
  F(kvp_dequantize)            \
  F(kvp_payload_info)          \
  F(kvp_payload_array)         \
  F(kvp_measure)               \
  F(kvp_paged_create)          \
  F(kvp_paged_add)             \
  F(kvp_paged_validate)        \
  F(kvp_paged_clone)           \
  F(kvp_paged_info)            \
  F(kvp_paged_payload)         \
  F(kvp_paged_quantize)        \
  F(kvp_paged_parse)           \
  F(kvp_paged_serialized_size) \
  F(kvp_paged_serialize)

#endif /* KVPAGES_H_ */
