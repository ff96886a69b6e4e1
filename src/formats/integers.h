// SPDX-License-Identifier: Apache-2.0
// Affine integer codes, and KIVI's codes with a float minimum.
#pragma once

#include <cmath>
#include <cstdint>

#include "formats/scales.h"

namespace kvpages {

// rint for the codes' range. Beyond 2^22, where the sum would lose bits, no code lies.
KVP_HD float RoundEven(float x) { return fabsf(x) < 4194304.0f ? x + 12582912.0f - 12582912.0f : x; }

// clamp(rint(x / s) + z, lo, hi). A scale of 0 and a NaN quotient give the code of 0.
KVP_HD int32_t EncodeInteger(float x, float scale, int32_t zero, int32_t lo, int32_t hi) {
  float q = scale == 0 ? 0.0f : RoundEven(x / scale);
  if (q != q) q = 0.0f;
  q = q + static_cast<float>(zero);  // exact wherever the sum lies within the range
  if (q < static_cast<float>(lo)) return lo;
  if (q > static_cast<float>(hi)) return hi;
  return static_cast<int32_t>(q);
}
// (code - z) is exact in f32, so one product rounds like the f64 product does.
KVP_HD float DecodeInteger(int32_t code, float scale, int32_t zero) { return static_cast<float>(code - zero) * scale; }

// Zero points of `uint` with `mse` may lie on both sides of the codes; the byte is z + this.
KVP_HD int32_t ZeroOffset(int bits) { return 128 - (1 << (bits - 1)); }

// One value rounded to a scale type (f32 f16 bf16), saturating; the arithmetic of KIVI goes through it step by step.
KVP_HD float RoundTo(ScaleType type, float x) {
  const float magnitude = StoreScale(type, fabsf(x), 1.0f).value;
  return x < 0 ? -magnitude : magnitude;
}
KVP_HD int32_t EncodeKivi(ScaleType type, float x, float scale, float minimum, int32_t top) {
  if (scale == 0) return 0;
  const float q = RoundTo(type, RoundTo(type, RoundTo(type, x) - minimum) / scale);
  if (!(q > 0)) return 0;  // NaN too
  return static_cast<int32_t>(RoundEven(q < static_cast<float>(top) ? q : static_cast<float>(top)));
}
KVP_HD float DecodeKivi(ScaleType type, int32_t code, float scale, float minimum) {
  return RoundTo(type, RoundTo(type, static_cast<float>(code) * scale) + minimum);
}

}  // namespace kvpages
