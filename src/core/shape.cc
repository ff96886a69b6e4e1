// SPDX-License-Identifier: Apache-2.0
#include "core/shape.h"

namespace kvpages {

std::string Text(const Shape& shape) {
  return "[" + Text(shape.batch) + ", " + Text(shape.heads) + ", " + Text(shape.tokens) + ", " + Text(shape.width) + "]";
}

Result<int64_t> CheckedElements(const Shape& shape, const char* argument) {
  int64_t count = 1;
  bool zero = false;
  for (int axis = 0; axis < 4; ++axis) {
    if (shape[axis] < 0) return MakeError(Code::kShape, argument, "dims must not be negative", Text(shape));
  }
  constexpr int64_t kMost = int64_t{1} << 60;
  for (int axis = 0; axis < 4; ++axis) {
    // The other dims of an empty shape are bounded too, since grids and strides multiply them.
    if (shape[axis] > kMost / count) return MakeError(Code::kShape, argument, "element count overflows", Text(shape));
    zero |= shape[axis] == 0;
    if (shape[axis] != 0) count *= shape[axis];
  }
  return zero ? 0 : count;
}

Grid AffineGrid(const Shape& shape, int axis, int64_t block) {
  Grid grid;
  if (axis < 0) return grid;
  if (block == 0) {
    grid.stride[axis] = 1;
    grid.count = shape[axis];
    return grid;
  }
  grid.div[axis] = block;
  int64_t stride = 1;
  for (int k = 3; k >= 0; --k) {
    grid.stride[k] = stride;
    stride *= k == axis ? CeilDiv(shape[k], block) : shape[k];
  }
  grid.count = stride;
  return grid;
}

}  // namespace kvpages
