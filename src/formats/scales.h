// SPDX-License-Identifier: Apache-2.0
// How a scale is stored, and what it is worth when read back. Codes are made with the worth, never with the scale that
// was computed.
#pragma once

#include <cstdint>
#include <cstring>

#include "formats/float_codes.h"
#include "formats/spec.h"

namespace kvpages {

struct StoredScale {
  uint32_t bits;  // as many low bytes as the type has
  float value;
};

// s >= 0. Rounds to nearest even (e8m0: up), saturating at the type's largest finite value; `g` counts for e4m3 only.
KVP_HD StoredScale StoreScale(ScaleType type, float s, float g) {
  constexpr float kMost = 3.4028234663852886e38f, kMostF16 = 65504.0f, kMostBF16 = 3.3895313892515355e38f;
  if (s > kMost) s = kMost;
  switch (type) {
    case ScaleType::kF32: return {BitsOf(s), s};
    case ScaleType::kF16: {
      const uint16_t bits = ToF16(s < kMostF16 ? s : kMostF16);
      return {bits, FromF16(bits)};
    }
    case ScaleType::kBF16: {
      const uint16_t bits = ToBF16(s < kMostBF16 ? s : kMostBF16);
      return {bits, FromBF16(bits)};
    }
    case ScaleType::kE4M3: {
      const uint8_t bits = ToE4M3(s / g);
      return {bits, FromE4M3(bits) * g};
    }
    case ScaleType::kE8M0: {
      const uint8_t bits = ToE8M0Ceil(s);
      return {bits, s == 0 ? 0.0f : FromE8M0(bits)};
    }
  }
  return {0, 0.0f};
}

// `e8m0_zero`: whether byte 0 stands for a scale of 0. It does where a code 0 would not decode to 0 by itself (level
// tables) or may be one of two zeros (float codes); with integers it is 2^-127, which gives code 0 the value 0 as well.
KVP_HD float LoadScale(ScaleType type, const uint8_t* scales, int64_t index, float g, bool e8m0_zero) {
  switch (type) {
    case ScaleType::kF32: {
      float value;
      memcpy(&value, scales + index * 4, 4);
      return value;
    }
    case ScaleType::kF16:
    case ScaleType::kBF16: {
      uint16_t bits;
      memcpy(&bits, scales + index * 2, 2);
      return type == ScaleType::kF16 ? FromF16(bits) : FromBF16(bits);
    }
    case ScaleType::kE4M3: return FromE4M3(scales[index]) * g;
    case ScaleType::kE8M0: return e8m0_zero && scales[index] == 0 ? 0.0f : FromE8M0(scales[index]);
  }
  return 0.0f;
}

KVP_HD constexpr int ScaleSize(ScaleType type) {
  return type == ScaleType::kF32 ? 4 : type == ScaleType::kF16 || type == ScaleType::kBF16 ? 2 : 1;
}
KVP_HD void PutScale(ScaleType type, uint8_t* scales, int64_t index, uint32_t bits) {
  const int size = ScaleSize(type);
  for (int i = 0; i < size; ++i) scales[index * size + i] = static_cast<uint8_t>(bits >> (8 * i));
}

// g of a payload's e4m3 scales: the smallest power of two >= largest / 448 (2^-149 at least), 1 for 0 or infinity.
KVP_HD float E4M3Global(float largest) {
  if (!(largest > 0) || !IsFinite(largest)) return 1.0f;
  // 448 = 1.75 * 2^8; in f64 every f32 is a normal number.
  const double wide = largest;
  uint64_t bits;
  memcpy(&bits, &wide, 8);
  int exponent = static_cast<int>(bits >> 52) - 8;
  if ((bits & 0xfffffffffffffu) > 0xc000000000000u) ++exponent;
  if (exponent < 1023 - 149) exponent = 1023 - 149;
  bits = static_cast<uint64_t>(exponent) << 52;
  double g;
  memcpy(&g, &bits, 8);
  return static_cast<float>(g);
}

}  // namespace kvpages
