// SPDX-License-Identifier: Apache-2.0
// Whether an element lies beyond the last value of its code's range: the next code after the last one, if there were one, would be
// nearer.
#pragma once

#include <cmath>
#include <cstdint>

#include "formats/codec.h"
#include "formats/schemes.h"

namespace kvpages {

KVP_HD bool Beyond(const Codec& codec, float x, const Scale& scale) {
  if (scale.value == 0) return false;
  const float q = codec.kivi ? (x - scale.minimum) / scale.value : x / scale.value;
  switch (codec.family) {
    case Family::kInteger: {
      const float code = rintf(q) + static_cast<float>(scale.zero);
      return code < static_cast<float>(codec.lo) || code > static_cast<float>(codec.hi);
    }
    case Family::kFloatCode:
      return codec.type == Type::e4m3 ? fabsf(q) > 464.0f : codec.type == Type::e5m2 ? fabsf(q) >= 61440.0f : fabsf(q) > 7.0f;
    default: {
      const int last = (1 << codec.bits) - 1;
      return fabsf(q) > Level(codec.bits, last) + (Level(codec.bits, last) - Level(codec.bits, last - 1)) * 0.5f;
    }
  }
}

// The same for an element of block `index` of a scheme.
KVP_HD bool BeyondScheme(Type type, float global, int64_t index, const uint8_t* codes, const uint8_t* scales, float x) {
  if (const int bytes = LlamaBlockBytes(type); bytes > 0) {
    const uint8_t* block = codes + index * bytes;
    const LlamaLayout layout = LayoutOf(type);
    const float d = GetHalf(block), q = (layout.has_minimum ? x - GetHalf(block + 2) : x) / d;
    if (d == 0 || q != q) return false;
    if (type == Type::q8_0) return fabsf(q) > 127.5f;
    if (type == Type::iq4_nl) return q < -127.0f - 11.5f || q > 113.0f + 12.0f;
    const float most = layout.has_fifth ? 31.0f : 15.0f, first = layout.has_minimum ? 0.0f : -(most + 1) / 2;
    return q < first - 0.5f || q > first + most + 0.5f;
  }
  const bool nvfp4 = SchemeBlock(type) == kNvfp4Block;
  const float scale = nvfp4 ? FromE4M3(scales[index]) * global : FromE8M0(scales[index]);
  return scale > 0 && fabsf(x / scale) > (type == Type::mxfp8 ? 464.0f : 7.0f);
}

}  // namespace kvpages
