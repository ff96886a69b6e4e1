// SPDX-License-Identifier: Apache-2.0
// A backend's two functions over whole tensors, with the arrays that they need.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "backends/backend.h"
#include "core/bytes.h"
#include "support/vectors.h"

namespace kvpages::test {

struct Encoded {
  Spec spec;
  Shape shape;
  Grid grid;
  Bytes codes, scales, zeros;
  float global = 1.0f;
  int64_t hadamard = 0;
  std::vector<uint16_t> center;
};

struct Given {
  std::vector<float> scales;
  std::vector<uint8_t> zeros;
  const Grid* grid = nullptr;  // another than the spec's
};

// Every available backend, the reference included.
std::vector<const Backend*> Backends();

// Throws where the spec is refused. `valid` -1: all rows; `x` in the source type, contiguous.
Encoded Quantize(const Backend& backend, const std::string& spec, const Shape& shape, const void* x, Type source_type = Type::f32,
                 int64_t valid = -1, const SpecOptions& options = {}, const Given& given = {},
                 const std::vector<uint16_t>& center = {});
std::vector<float> Dequantize(const Backend& backend, const Encoded& encoded, int64_t begin = 0, int64_t end = -1);

// Codes one by one, sign-extended for signed integer types.
std::vector<int32_t> CodesOf(const Encoded& encoded);
std::vector<uint8_t> BytesOf(const Bytes& bytes);
std::vector<float> ScalesOf(const Encoded& encoded);  // their values

// [heads, tokens, width] or four dims.
Shape ShapeOf(const VectorTensor& tensor);

// f32 values with the first difference in words, empty where all bits agree (any NaN equals any NaN).
std::string Difference(const std::vector<float>& got, const std::vector<float>& want);
template <typename T>
std::string DifferenceOf(const std::vector<T>& got, const std::vector<T>& want) {
  if (got.size() != want.size()) return std::to_string(got.size()) + " elements instead of " + std::to_string(want.size());
  for (size_t i = 0; i < got.size(); ++i) {
    if (got[i] != want[i]) return "at " + std::to_string(i) + " " + std::to_string(got[i]) + " instead of " + std::to_string(want[i]);
  }
  return "";
}

}  // namespace kvpages::test
