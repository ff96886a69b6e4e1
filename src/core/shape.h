// SPDX-License-Identifier: Apache-2.0
// Shapes of pages, overflow-checked sizes, and the map from an element to its scale. All index maths is here.
#pragma once

#include <cstdint>
#include <string>

#include "core/float.h"
#include "core/status.h"

namespace kvpages {

// Row-major [batch, kv_heads, tokens, head_dim]; `tokens` is a page's capacity or a tensor's length.
struct Shape {
  int64_t batch = 0, heads = 0, tokens = 0, width = 0;
  KVP_HD int64_t rows() const { return batch * heads * tokens; }
  KVP_HD int64_t elements() const { return rows() * width; }
  int64_t operator[](int axis) const { return axis == 0 ? batch : axis == 1 ? heads : axis == 2 ? tokens : width; }
  bool operator==(const Shape&) const = default;
};
std::string Text(const Shape& shape);  // "[1, 3, 16, 64]"

// Elements of a shape whose dims come from outside; ERR_SHAPE where a dim is negative or the byte count of
// f32 elements would not fit 2^62.
Result<int64_t> CheckedElements(const Shape& shape, const char* argument);

inline int64_t CeilDiv(int64_t a, int64_t b) { return a / b + (a % b != 0); }

// Which scale an element has: index = sum over dims of (coordinate / div) * stride; stride 0 for dims that
// do not matter. Dim order as in Shape.
struct Grid {
  int64_t div[4] = {1, 1, 1, 1};
  int64_t stride[4] = {0, 0, 0, 0};
  int64_t count = 1;  // number of scales
  KVP_HD int64_t Index(int64_t b, int64_t h, int64_t t, int64_t d) const {
    return b / div[0] * stride[0] + h / div[1] * stride[1] + t / div[2] * stride[2] + d / div[3] * stride[3];
  }
};
// onnx-light's affine layout: axis -1 is per tensor; block 0 is one scale per index of `axis` (1-D);
// block > 0: the logical rank with dim[axis] replaced by ceil(dim / block).
Grid AffineGrid(const Shape& shape, int axis, int64_t block);

}  // namespace kvpages
