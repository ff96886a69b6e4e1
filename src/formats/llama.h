// SPDX-License-Identifier: Apache-2.0
// llama.cpp's cache types: blocks of 32 elements that hold their own f16 scale (and minimum). Codes are made with the
// f32 reciprocal of the unrounded scale, values with the f16 scale, as its reference code does.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/float.h"
#include "formats/types.h"

namespace kvpages {

constexpr int kLlamaBlock = 32;

// Bytes of one block, 0 for a type that is not llama.cpp's.
KVP_HD constexpr int LlamaBlockBytes(Type type) {
  switch (type) {
    case Type::q8_0: return 34;
    case Type::q4_0: return 18;
    case Type::q4_1: return 20;
    case Type::q5_0: return 22;
    case Type::q5_1: return 24;
    case Type::iq4_nl: return 18;
    default: return 0;
  }
}

KVP_HD void PutHalf(uint8_t* out, float value) {
  const uint16_t bits = ToF16(value);
  out[0] = static_cast<uint8_t>(bits);
  out[1] = static_cast<uint8_t>(bits >> 8);
}
KVP_HD float GetHalf(const uint8_t* in) { return FromF16(static_cast<uint16_t>(in[0] | in[1] << 8)); }

// Toward zero, limited to 0 .. most; NaN is 0.
KVP_HD uint32_t TruncatedCode(float value, uint32_t most) {
  if (!(value >= 1.0f)) return 0;
  return value >= static_cast<float>(most) ? most : static_cast<uint32_t>(value);
}

// Codes of 4 or 5 bits: low nibbles of elements j and j + 16 in byte j, fifth bits of all elements in a 32-bit word
// (`fifth` null: none).
KVP_HD void PutNibble(uint8_t* nibbles, uint8_t* fifth, int i, uint32_t code) {
  nibbles[i % 16] = static_cast<uint8_t>(nibbles[i % 16] | (code & 15u) << (i < 16 ? 0 : 4));
  if (fifth != nullptr) fifth[i / 8] = static_cast<uint8_t>(fifth[i / 8] | (code >> 4) << i % 8);
}
KVP_HD int GetNibble(const uint8_t* nibbles, const uint8_t* fifth, int i) {
  const int low = nibbles[i % 16] >> (i < 16 ? 0 : 4) & 15;
  return fifth == nullptr ? low : low | (fifth[i / 8] >> i % 8 & 1) << 4;
}

KVP_HD float Iq4Level(int code) {
  constexpr int8_t kLevels[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
  return static_cast<float>(kLevels[code]);
}
// Nearest level, the upper one at a tie.
KVP_HD int NearestIq4(float v) {
  int upper = 1;
  while (upper < 15 && Iq4Level(upper) <= v) ++upper;
  return v - Iq4Level(upper - 1) < Iq4Level(upper) - v ? upper - 1 : upper;
}

struct LlamaLayout {
  bool has_minimum, has_fifth;
  int codes;  // first byte of the codes
};
KVP_HD LlamaLayout LayoutOf(Type type) {
  const bool minimum = type == Type::q4_1 || type == Type::q5_1, fifth = type == Type::q5_0 || type == Type::q5_1;
  return {minimum, fifth, 2 + (minimum ? 2 : 0) + (fifth ? 4 : 0)};
}

KVP_HD void EncodeLlama(Type type, const float* x, uint8_t* block) {
  const LlamaLayout layout = LayoutOf(type);
  for (int i = 0; i < LlamaBlockBytes(type); ++i) block[i] = 0;
  uint8_t* const codes = block + layout.codes;
  uint8_t* const fifth = layout.has_fifth ? codes - 4 : nullptr;
  float extreme = 0, lo = x[0], hi = x[0];  // extreme: the first of the largest magnitudes, with its sign
  for (int i = 0; i < kLlamaBlock; ++i) {
    if (fabsf(x[i]) > fabsf(extreme)) extreme = x[i];
    if (x[i] < lo) lo = x[i];
    if (x[i] > hi) hi = x[i];
  }
  if (type == Type::iq4_nl) {
    const bool tiny = fabsf(extreme) < 1e-15f;
    const float inverse = tiny ? 0.0f : 1.0f / (extreme / -127.0f);
    float product = 0, square = 0;
    for (int i = 0; i < kLlamaBlock; ++i) {
      const int code = tiny ? 8 : NearestIq4(inverse * x[i]);
      const float level = Iq4Level(code), weighted = x[i] * x[i] * level;
      product = product + weighted * x[i];
      square = square + weighted * level;
      PutNibble(codes, nullptr, i, static_cast<uint32_t>(code));
    }
    PutHalf(block, tiny ? 0.0f : product / square);
    return;
  }
  const uint32_t most = layout.has_fifth ? 31 : 15;
  const float half = layout.has_fifth ? 16.0f : 8.0f;
  const float d = type == Type::q8_0       ? fabsf(extreme) / 127.0f
                  : layout.has_minimum ? (hi - lo) / static_cast<float>(most)
                                       : extreme / -half;
  const float inverse = d != 0 ? 1.0f / d : 0.0f;
  PutHalf(block, d);
  if (layout.has_minimum) PutHalf(block + 2, lo);
  // The scale is 0 as f16 then; the reference code converts infinities to integers, which gives 0 on x86.
  if (!IsFinite(inverse)) return;
  for (int i = 0; i < kLlamaBlock; ++i) {
    if (type == Type::q8_0) {
      const float q = roundf(x[i] * inverse);
      codes[i] = static_cast<uint8_t>(static_cast<int8_t>(q >= 127.0f ? 127 : q <= -127.0f ? -127 : q == q ? static_cast<int>(q) : 0));
    } else {
      PutNibble(codes, fifth, i, TruncatedCode(layout.has_minimum ? (x[i] - lo) * inverse + 0.5f : x[i] * inverse + (half + 0.5f), most));
    }
  }
}

KVP_HD float DecodeLlama(Type type, const uint8_t* block, int i) {
  const LlamaLayout layout = LayoutOf(type);
  const uint8_t* const codes = block + layout.codes;
  const float d = GetHalf(block);
  if (type == Type::q8_0) return static_cast<float>(static_cast<int8_t>(codes[i])) * d;
  const int code = GetNibble(codes, layout.has_fifth ? codes - 4 : nullptr, i);
  if (type == Type::iq4_nl) return d * Iq4Level(code);
  if (layout.has_minimum) return static_cast<float>(code) * d + GetHalf(block + 2);
  return static_cast<float>(code - (layout.has_fifth ? 16 : 8)) * d;
}

}  // namespace kvpages
