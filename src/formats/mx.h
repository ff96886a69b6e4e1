// SPDX-License-Identifier: Apache-2.0
// MXFP4 and MXFP8: e2m1 or e4m3 codes (ties to even, saturating) with one power of two per 32 elements.
#pragma once

#include <cmath>
#include <cstdint>

#include "formats/float_codes.h"
#include "formats/spec.h"

namespace kvpages {

constexpr int kMxBlock = 32;

// floor: 2^(floor(log2 amax) - emax), which may clip. ceil: the smallest power of two >= amax / (largest value).
KVP_HD uint8_t MxScale(Type type, MxRule rule, float amax) {
  const bool fp4 = type == Type::mxfp4;
  if (amax == 0) return 0;
  if (rule == MxRule::kCeil) return ToE8M0Ceil(amax / (fp4 ? 6.0f : 448.0f));
  const int code = ToE8M0Floor(amax) - (fp4 ? 2 : 8);
  return static_cast<uint8_t>(code > 0 ? code : 0);
}

KVP_HD float DecodeMx(Type type, uint32_t code, uint8_t scale) {
  const auto byte = static_cast<uint8_t>(code);
  return (type == Type::mxfp4 ? FromE2M1(byte) : FromE4M3(byte)) * FromE8M0(scale);
}

KVP_HD uint8_t EncodeMx(Type type, MxRule rule, const float* x, uint8_t* codes) {
  float amax = 0;
  for (int i = 0; i < kMxBlock; ++i) amax = fabsf(x[i]) > amax ? fabsf(x[i]) : amax;
  const uint8_t bits = MxScale(type, rule, amax);
  const float scale = FromE8M0(bits);
  for (int i = 0; i < kMxBlock; ++i) codes[i] = type == Type::mxfp4 ? ToE2M1(x[i] / scale) : ToE4M3(x[i] / scale);
  return bits;
}

}  // namespace kvpages
