// SPDX-License-Identifier: Apache-2.0
// binary16 and bfloat16 conversions, bit for bit the same on every backend, host and device. NaN keeps its
// sign and becomes the canonical quiet pattern (0x7e00, 0x7fc0).
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define KVP_HD __host__ __device__ __forceinline__
#else
#define KVP_HD inline
#endif

namespace kvpages {

KVP_HD uint32_t BitsOf(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}
KVP_HD float FloatOf(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

KVP_HD bool IsFinite(float value) { return (BitsOf(value) & 0x7f800000u) != 0x7f800000u; }

KVP_HD float FromBF16(uint16_t bits) { return FloatOf(static_cast<uint32_t>(bits) << 16); }
// Ties to even; overflow is infinity.
KVP_HD uint16_t ToBF16(float value) {
  const uint32_t bits = BitsOf(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16 & 0x8000u) | 0x7fc0u);
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

KVP_HD float FromF16(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t magnitude = half & 0x7fffu;
  if (magnitude >= 0x7c00u) return FloatOf(sign | 0x7f800000u | (magnitude & 0x3ffu ? 0x400000u | (magnitude & 0x3ffu) << 13 : 0u));
  if (magnitude >= 0x400u) return FloatOf(sign | ((magnitude << 13) + (112u << 23)));
  // Subnormal: magnitude * 2^-24 is exact in f32.
  return FloatOf(BitsOf(static_cast<float>(magnitude) * FloatOf(0x33800000u)) | sign);
}
// Ties to even; overflow is infinity.
KVP_HD uint16_t ToF16(float value) {
  const uint32_t bits = BitsOf(value);
  const uint32_t sign = bits >> 16 & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // 65520 and up
  if (magnitude >= 0x38800000u) {                                              // normal: 2^-14 and up
    return static_cast<uint16_t>(sign | ((magnitude - (112u << 23) + 0xfffu + (magnitude >> 13 & 1u)) >> 13));
  }
  // Subnormal: adding 0.5 leaves the rounded count of 2^-24 steps in the low mantissa bits.
  return static_cast<uint16_t>(sign | (BitsOf(FloatOf(magnitude) + 0.5f) - 0x3f000000u));
}

}  // namespace kvpages
