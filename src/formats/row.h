// SPDX-License-Identifier: Apache-2.0
// One row (batch, head, token) of a source as the coders see it: widened to f32, cleaned, centred, rotated.
#pragma once

#include <cstdint>
#include <cstring>

#include "formats/hadamard.h"
#include "formats/types.h"

namespace kvpages {

KVP_HD float WidenElement(Type type, const void* data, int64_t index) {
  if (type == Type::f32) {
    float value;
    memcpy(&value, static_cast<const uint8_t*>(data) + index * 4, 4);
    return value;
  }
  uint16_t bits;
  memcpy(&bits, static_cast<const uint8_t*>(data) + index * 2, 2);
  return type == Type::f16 ? FromF16(bits) : FromBF16(bits);
}

// NonFinite::kSaturate: NaN becomes 0, infinity `limit` with its sign.
KVP_HD float CleanElement(float x, float limit) {
  if (IsFinite(x)) return x;
  if (x != x) return 0.0f;
  return x < 0 ? -limit : limit;
}

struct RowSource {
  const void* data = nullptr;
  Type type = Type::f32;
  int64_t batch_stride = 0, head_stride = 0, token_stride = 0, width = 0;
  const uint16_t* center = nullptr;  // bf16 [heads, width]
  int64_t hadamard = 0;
  bool clean = false;
  float limit = 0;
};

// An element of the row before it is rotated; `x`: as it was widened.
KVP_HD float PrepareElement(const RowSource& source, int64_t h, int64_t d, float x) {
  if (source.clean) x = CleanElement(x, source.limit);
  if (source.center != nullptr) x = x - FromBF16(source.center[h * source.width + d]);
  return x;
}

KVP_HD void LoadRow(const RowSource& source, int64_t b, int64_t h, int64_t t, float* out) {
  const int64_t first = b * source.batch_stride + h * source.head_stride + t * source.token_stride;
  for (int64_t d = 0; d < source.width; ++d) out[d] = PrepareElement(source, h, d, WidenElement(source.type, source.data, first + d));
  if (source.hadamard > 0) RotateRow(out, source.width, source.hadamard);
}

}  // namespace kvpages
