// SPDX-License-Identifier: Apache-2.0
// What a backend offers: a table of functions over whole payloads. Every check is done before; no function here
// fails, allocates for its result, or reads rows past `valid`. All backends give the reference's bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/shape.h"
#include "core/status.h"
#include "formats/spec.h"

namespace kvpages {

// Encodes rows [0, valid) of every batch and head; rows [valid, shape.tokens) are coded as zeros with the scales that
// the valid rows gave (a block without valid rows has scale 0) and take no part in any statistic. Strides are in elements; width is contiguous.
struct QuantizeJob {
  Spec spec;  // resolved
  SpecOptions options;
  Shape shape;
  int64_t valid = 0;
  Grid grid;  // ScaleGrid(spec, shape)
  const void* source = nullptr;
  Type source_type = Type::f32;  // dense
  int64_t batch_stride = 0, head_stride = 0, token_stride = 0;
  const uint16_t* center = nullptr;  // bf16 [heads, width], subtracted first; null without +center
  int64_t hadamard = 0;              // run length n; 0: no rotation
  // Outputs, sized by SizesOf. With calibration `given`, scales and zeros are inputs.
  uint8_t* codes = nullptr;
  uint8_t* scales = nullptr;
  uint8_t* zeros = nullptr;
  float* global = nullptr;
  float* scratch = nullptr;  // ScratchFloats(spec, shape) elements, not cleared
};
// Working memory of `quantize`: the payload for a search over a tensor or head, a block of rows for `channel`, 16 rows
// for `token`, else a row.
int64_t ScratchFloats(const Spec& spec, const Shape& shape);

// Decodes rows [begin, end) of every batch and head to f32 (back-rotated and un-centred).
struct DequantizeJob {
  Spec spec;
  Shape shape;
  Grid grid;  // also any affine layout of a file
  const uint8_t* codes = nullptr;
  const uint8_t* scales = nullptr;
  const uint8_t* zeros = nullptr;  // may be null: zero point 0
  float global = 1.0f;
  const uint16_t* center = nullptr;
  int64_t hadamard = 0;
  int64_t begin = 0, end = 0;
  float* out = nullptr;
  int64_t batch_stride = 0, head_stride = 0, token_stride = 0;
};

struct Backend {
  const char* name;  // reference sse4 avx2 avx512 neon wasm128
  bool (*available)();
  void (*quantize)(const QuantizeJob& job);
  void (*dequantize)(const DequantizeJob& job);
  // Dense conversions of `count` contiguous elements, ties to even.
  void (*widen)(Type type, const void* in, float* out, int64_t count);
  void (*narrow)(Type type, const float* in, void* out, int64_t count);
  // Index of the first NaN or infinity of a dense run, -1 where there is none.
  int64_t (*first_non_finite)(Type type, const void* data, int64_t count);
};

// Every backend of this build, best first, the reference last.
const std::vector<const Backend*>& AllBackends();
// "auto" (or empty): the first available one. ERR_BACKEND names what there is.
Result<const Backend*> ChooseBackend(std::string_view name);

}  // namespace kvpages
