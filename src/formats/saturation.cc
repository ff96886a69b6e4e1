// SPDX-License-Identifier: Apache-2.0
// How many elements of a payload lie beyond the last value of their code's range.
#include <algorithm>
#include <cmath>

#include "formats/codec.h"
#include "formats/row.h"
#include "formats/schemes.h"
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

// The same for an element of block `index` of a scheme.
bool BeyondScheme(Type type, float global, int64_t index, const uint8_t* codes, const uint8_t* scales, float x) {
  if (const int bytes = LlamaBlockBytes(type); bytes > 0) {
    const uint8_t* block = codes + index * bytes;
    const LlamaLayout layout = LayoutOf(type);
    const float d = GetHalf(block), q = (layout.has_minimum ? x - GetHalf(block + 2) : x) / d;
    if (d == 0 || q != q) return false;
    if (type == Type::q8_0) return std::fabs(q) > 127.5f;
    if (type == Type::iq4_nl) return q < -127.0f - 11.5f || q > 113.0f + 12.0f;
    const float most = layout.has_fifth ? 31.0f : 15.0f, first = layout.has_minimum ? 0.0f : -(most + 1) / 2;
    return q < first - 0.5f || q > first + most + 0.5f;
  }
  const bool nvfp4 = Info(type).block == kNvfp4Block;
  const float scale = nvfp4 ? FromE4M3(scales[index]) * global : FromE8M0(scales[index]);
  return scale > 0 && std::fabs(x / scale) > (type == Type::mxfp8 ? 464.0f : 7.0f);
}

}  // namespace

int64_t CountSaturated(const Spec& spec, const Shape& shape, const Grid& grid, const uint8_t* codes, const uint8_t* scales,
                       const uint8_t* zeros, float global, int64_t valid, const RowSource& source, float* row) {
  const TypeInfo& info = Info(spec.type);
  const Codec codec = MakeCodec(spec);
  int64_t count = 0;
  for (int64_t b = 0; b < shape.batch; ++b) {
    for (int64_t h = 0; h < shape.heads; ++h) {
      for (int64_t t = 0; t < valid; ++t) {
        LoadRow(source, b, h, t, row);
        const int64_t first = ((b * shape.heads + h) * shape.tokens + t) * shape.width;
        if (info.family == Family::kScheme) {
          for (int64_t d = 0; d < shape.width; ++d) {
            count += BeyondScheme(spec.type, global, (first + d) / info.block, codes, scales, row[d]);
          }
          continue;
        }
        // One look for the scale of each block along the row: finding it takes four divisions.
        int64_t index = grid.Index(b, h, t, 0);
        for (int64_t from = 0; from < shape.width; from += grid.div[3], index += grid.stride[3]) {
          const Scale scale = LoadScaleAt(codec, scales, zeros, global, index);
          const int64_t to = grid.stride[3] == 0 ? shape.width : std::min(shape.width, from + grid.div[3]);
          for (int64_t d = from; d < to; ++d) count += Beyond(codec, row[d], scale);
          if (grid.stride[3] == 0) break;
        }
      }
    }
  }
  return count;
}

}  // namespace kvpages
