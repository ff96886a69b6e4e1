// SPDX-License-Identifier: Apache-2.0
// Values (profile/values.h) over vectors and vector files.
#pragma once

#include <gtest/gtest.h>

#include <vector>

#include "profile/values.h"
#include "support/vectors.h"

namespace kvpages::test {

inline Values ValuesOf(const VectorTensor& tensor) {
  const char* type = tensor.dtype == "F64" ? "f64" : tensor.dtype == "F32" ? "f32" : tensor.dtype == "F16" ? "f16" : "bf16";
  auto values = MakeValues(tensor.data, tensor.bytes, type, tensor.dims, "tensor");
  if (!values.ok()) throw std::runtime_error(values.error().message);
  return values.value();
}

// The vector must outlive the result.
inline Values ValuesOf(const std::vector<double>& data, std::vector<int64_t> dims = {}) {
  if (dims.empty()) dims = {static_cast<int64_t>(data.size())};
  return {reinterpret_cast<const uint8_t*>(data.data()), ValueType::f64, dims, static_cast<int64_t>(data.size())};
}
inline Values ValuesOf(const std::vector<float>& data, std::vector<int64_t> dims = {}) {
  if (dims.empty()) dims = {static_cast<int64_t>(data.size())};
  return {reinterpret_cast<const uint8_t*>(data.data()), ValueType::f32, dims, static_cast<int64_t>(data.size())};
}

// A result or status that must have failed, as "CODE message".
template <typename T>
std::string Failure(const T& result) {
  return result.ok() ? "no error" : std::string(CodeText(result.error().code)) + " " + result.error().message;
}

}  // namespace kvpages::test
