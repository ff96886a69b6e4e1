// SPDX-License-Identifier: Apache-2.0
// How many elements of a payload lie beyond the last value of their code's range.
#include <cmath>

#include "formats/codec.h"
#include "formats/row.h"
#include "formats/spec.h"

namespace kvpages {
namespace {

// Beyond: the next code after the last one, if there were one, would be nearer.
bool Beyond(const Codec& codec, float x, const Scale& scale) {
  if (scale.value == 0) return false;
  const float q = codec.kivi ? (x - scale.minimum) / scale.value : x / scale.value;
  switch (codec.family) {
    case Family::kInteger: {
      const float code = std::rint(q) + static_cast<float>(scale.zero);
      return code < static_cast<float>(codec.lo) || code > static_cast<float>(codec.hi);
    }
    case Family::kFloatCode:
      return codec.type == Type::e4m3 ? std::fabs(q) > 464.0f : codec.type == Type::e5m2 ? std::fabs(q) >= 61440.0f : std::fabs(q) > 7.0f;
    default: {
      const int last = (1 << codec.bits) - 1;
      return std::fabs(q) > Level(codec.bits, last) + (Level(codec.bits, last) - Level(codec.bits, last - 1)) * 0.5f;
    }
  }
}

}  // namespace

int64_t CountSaturated(const Spec& spec, const Shape& shape, const Grid& grid, const uint8_t* scales, const uint8_t* zeros,
                       float global, int64_t valid, const RowSource& source, float* row) {
  if (Info(spec.type).family == Family::kScheme) return 0;
  const Codec codec = MakeCodec(spec);
  int64_t count = 0;
  for (int64_t b = 0; b < shape.batch; ++b) {
    for (int64_t h = 0; h < shape.heads; ++h) {
      for (int64_t t = 0; t < valid; ++t) {
        LoadRow(source, b, h, t, row);
        for (int64_t d = 0; d < shape.width; ++d) {
          count += Beyond(codec, row[d], LoadScaleAt(codec, scales, zeros, global, grid.Index(b, h, t, d)));
        }
      }
    }
  }
  return count;
}

}  // namespace kvpages
