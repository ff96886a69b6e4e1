// SPDX-License-Identifier: Apache-2.0
// Lloyd-Max levels of the standard normal distribution: lm2, lm3, lm4.
#pragma once

#include <cstdint>

#include "core/float.h"

namespace kvpages {

// Positive levels as f32 bits, ascending; the negative ones mirror them. index 0 .. 2^(bits - 1) - 1.
KVP_HD float PositiveLevel(int bits, int index) {
  constexpr uint32_t k2[] = {0x3ee7d2c9, 0x3fc1555d};
  constexpr uint32_t k3[] = {0x3e7af9f8, 0x3f418990, 0x3fac0538, 0x4009b97a};
  constexpr uint32_t k4[] = {0x3e0379fd, 0x3ec6ae44, 0x3f28215e, 0x3f713d39, 0x3fa0cc2f, 0x3fcf1c25, 0x40046ac7, 0x402ee2bf};
  return FloatOf(bits == 2 ? k2[index] : bits == 3 ? k3[index] : k4[index]);
}
KVP_HD float Level(int bits, int code) {
  const int half = 1 << (bits - 1);
  return code < half ? -PositiveLevel(bits, half - 1 - code) : PositiveLevel(bits, code - half);
}
// Border between code i and code i + 1.
KVP_HD float LevelMiddle(int bits, int i) { return (Level(bits, i) + Level(bits, i + 1)) * 0.5f; }

KVP_HD int32_t EncodeLevel(int bits, float x, float scale) {
  if (scale == 0) return 0;
  const float q = x / scale;
  int32_t code = 0;  // number of middles below q; they ascend, so by halves
  for (int step = 1 << (bits - 1); step > 0; step /= 2) code += LevelMiddle(bits, code + step - 1) < q ? step : 0;
  return code;
}
KVP_HD float DecodeLevel(int bits, int32_t code, float scale) { return scale == 0 ? 0.0f : Level(bits, code) * scale; }

// Candidate scales are rms times these.
constexpr int kRmsRatioCount = 10;
KVP_HD float RmsRatio(int i) {
  constexpr float kRatios[] = {.70f, .75f, .80f, .85f, .90f, .95f, 1.0f, 1.05f, 1.10f, 1.15f};
  return kRatios[i];
}

}  // namespace kvpages
