// SPDX-License-Identifier: Apache-2.0
// NVFP4: e2m1 codes, an e4m3 scale per 16 elements, one f32 per payload; and its 4-over-6 variant. As published, codes
// are made with a rounded reciprocal.
#pragma once

#include <cmath>
#include <cstdint>

#include "formats/float_codes.h"
#include "formats/search.h"
#include "formats/spec.h"

namespace kvpages {

constexpr int kNvfp4Block = 16;

// g of a payload whose largest magnitude is amax.
KVP_HD float Nvfp4Global(const SpecOptions& options, float amax) {
  if (options.global == GlobalScale::kGiven) return options.given_global;
  if (amax == 0) return 1.0f;
  return amax / (options.global == GlobalScale::kAmax2688 ? 2688.0f : options.global == GlobalScale::kAmax448 ? 448.0f : 6.0f);
}

KVP_HD float DecodeNvfp4(uint32_t code, uint8_t scale, float g) {
  return FromE2M1(static_cast<uint8_t>(code)) * FromE4M3(scale) * g;
}

// Scale byte amax / (denominator * g), and the factor of the codes.
struct Nvfp4Scale {
  uint8_t bits;
  float inverse;
};
KVP_HD Nvfp4Scale MakeNvfp4Scale(float amax, float denominator, float g) {
  const uint8_t bits = amax == 0 ? static_cast<uint8_t>(0) : ToE4M3(amax / (denominator * g));
  const float full = FromE4M3(bits) * g;
  return {bits, amax == 0 || full == 0 ? 0.0f : 1.0f / full};
}

// Denominator 6, or with `four_over_six` 4 where that has the strictly smaller squared error.
KVP_HD uint8_t EncodeNvfp4(const float* x, float g, bool four_over_six, uint8_t* codes) {
  float amax = 0;
  for (int i = 0; i < kNvfp4Block; ++i) amax = fabsf(x[i]) > amax ? fabsf(x[i]) : amax;
  Nvfp4Scale scale = MakeNvfp4Scale(amax, 6.0f, g);
  if (four_over_six) {
    const Nvfp4Scale four = MakeNvfp4Scale(amax, 4.0f, g);
    const auto error = [&](const Nvfp4Scale& s) {
      float errors[kNvfp4Block];
      for (int i = 0; i < kNvfp4Block; ++i) {
        const float e = x[i] - DecodeNvfp4(ToE2M1(x[i] * s.inverse), s.bits, g);
        errors[i] = e * e;
      }
      return TreeSumOf(errors);
    };
    if (error(four) < error(scale)) scale = four;
  }
  for (int i = 0; i < kNvfp4Block; ++i) codes[i] = ToE2M1(x[i] * scale.inverse);
  return scale.bits;
}

}  // namespace kvpages
