// SPDX-License-Identifier: Apache-2.0
// How many elements of a payload lie beyond the last value of their code's range.
#include <algorithm>

#include "formats/row.h"
#include "formats/saturation.h"
#include "formats/spec.h"

namespace kvpages {
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
