// SPDX-License-Identifier: Apache-2.0
// e4m3 (fn: no infinity), e5m2, e2m1 and e8m0 from and to f32, ties to even unless said otherwise.
#pragma once

#include <cstdint>

#include "core/float.h"

namespace kvpages {

// |x| > 464 is NaN with `overflow_nan`, else everything beyond 448 (infinity too) is 448. NaN keeps its sign.
KVP_HD uint8_t ToE4M3(float x, bool overflow_nan = false) {
  const uint32_t sign = BitsOf(x) >> 24 & 0x80u, magnitude = BitsOf(x) & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint8_t>(sign | 0x7fu);
  if (magnitude > 0x43e80000u) return static_cast<uint8_t>(sign | (overflow_nan ? 0x7fu : 0x7eu));  // 464
  if (magnitude >= 0x3c800000u) {                                                                   // 2^-6, normal
    return static_cast<uint8_t>(sign | (magnitude - (120u << 23) + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20);
  }
  // Adding 2^14 leaves the rounded count of 2^-9 steps in the low mantissa bits.
  return static_cast<uint8_t>(sign | (BitsOf(FloatOf(magnitude) + 16384.0f) - 0x46800000u));
}
KVP_HD float FromE4M3(uint8_t code) {
  const uint32_t sign = static_cast<uint32_t>(code & 0x80u) << 24, magnitude = code & 0x7fu;
  if (magnitude == 0x7fu) return FloatOf(sign | 0x7fc00000u);
  if (magnitude >= 8) return FloatOf(sign | ((magnitude << 20) + (120u << 23)));
  return FloatOf(sign | BitsOf(static_cast<float>(magnitude) * FloatOf(0x3b000000u)));  // 2^-9
}

// |x| >= 61440 is infinity with `overflow_inf`, else everything beyond 57344 (infinity too) is 57344.
KVP_HD uint8_t ToE5M2(float x, bool overflow_inf = false) {
  const uint32_t sign = BitsOf(x) >> 24 & 0x80u, magnitude = BitsOf(x) & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint8_t>(sign | 0x7fu);
  if (magnitude >= 0x47700000u) return static_cast<uint8_t>(sign | (overflow_inf ? 0x7cu : 0x7bu));  // 61440
  if (magnitude >= 0x38800000u) {                                                                    // 2^-14, normal
    return static_cast<uint8_t>(sign | (magnitude - (112u << 23) + 0xfffffu + (magnitude >> 21 & 1u)) >> 21);
  }
  return static_cast<uint8_t>(sign | (BitsOf(FloatOf(magnitude) + 128.0f) - 0x43000000u));  // steps of 2^-16
}
KVP_HD float FromE5M2(uint8_t code) { return FromF16(static_cast<uint16_t>(code << 8)); }

// Saturating, sign of zero kept; NaN is code 0. `toward_zero`: how ties are rounded, otherwise to the even code.
KVP_HD uint8_t ToE2M1(float x, bool toward_zero = false) {
  if (x != x) return 0;
  const uint32_t sign = BitsOf(x) >> 28 & 8u;
  const float a = FloatOf(BitsOf(x) & 0x7fffffffu);
  const int up = toward_zero ? (a > 0.75f) + (a > 1.75f) + (a > 3.5f) : (a >= 0.75f) + (a >= 1.75f) + (a >= 3.5f);
  return static_cast<uint8_t>(sign | static_cast<uint32_t>((a > 0.25f) + (a > 1.25f) + (a > 2.5f) + (a > 5.0f) + up));
}
KVP_HD float FromE2M1(uint8_t code) {
  const uint32_t magnitude = code & 7u, sign = static_cast<uint32_t>(code & 8u) << 28;
  const uint32_t bits = magnitude < 2 ? magnitude * 0x3f000000u : (magnitude << 22) + 0x3f000000u;  // 0 and 1/2, then bias 1
  return FloatOf(sign | bits);
}

// Powers of two 2^(code - 127) of |x|; 255 for infinity and NaN. floor: the largest not above, ceil: the smallest not
// below, 2^127 at most. Code 0 for everything under 2^-127, zero included.
KVP_HD uint8_t ToE8M0Floor(float x) { return static_cast<uint8_t>(BitsOf(x) >> 23); }
KVP_HD uint8_t ToE8M0Ceil(float x) {
  const uint32_t exponent = BitsOf(x) >> 23 & 0xffu, mantissa = BitsOf(x) & 0x7fffffu;
  if (exponent == 255) return 255;
  const uint32_t up = exponent > 0 ? mantissa > 0 : mantissa > 0x400000u;
  return static_cast<uint8_t>(exponent + up < 254 ? exponent + up : 254);
}
KVP_HD float FromE8M0(uint8_t code) {
  if (code == 255) return FloatOf(0x7fc00000u);
  return FloatOf(code == 0 ? 0x400000u : static_cast<uint32_t>(code) << 23);
}

}  // namespace kvpages
