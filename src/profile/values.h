// SPDX-License-Identifier: Apache-2.0
// Tensors of any rank as the statistics of this room read them: flat, in row-major order, widened to float64.
#pragma once

#include <cmath>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/bytes.h"
#include "core/status.h"

namespace kvpages {

enum class ValueType : uint8_t { f64, f32, f16, bf16 };
int ValueBytes(ValueType type);

// Not owned; `data` may stand at any address.
struct Values {
  const uint8_t* data = nullptr;
  ValueType type = ValueType::f32;
  std::vector<int64_t> dims;
  int64_t count = 0;
  double At(int64_t index) const;
  float AtF32(int64_t index) const { return static_cast<float>(At(index)); }  // f64 is rounded once
  int64_t rows() const { return dims.empty() ? 1 : dims[0]; }
  int64_t row_size() const { return count / rows(); }  // rows() > 0
};

inline constexpr int64_t kMostValues = int64_t{1} << 32;  // indices are at most 32 bits wide

// Elements of dims; ERR_SHAPE for a negative dim, rank over 32 or more than kMostValues elements.
Result<int64_t> CountOf(std::span<const int64_t> dims, const char* argument);
// type: "f64", "f32", "f16", "bf16" or onnxruntime's names of them. The data must fill the dims exactly (ERR_SHAPE),
// and there must be some.
Result<Values> MakeValues(const uint8_t* data, size_t data_bytes, std::string_view type, std::span<const int64_t> dims,
                          const char* argument);
std::string DimsText(std::span<const int64_t> dims);  // "[16, 64]"
// ERR_NON_FINITE that names the first index.
Status CheckFinite(const Values& values, const char* argument);

// `count` elements of T from a budget, not cleared.
template <typename T>
Result<Bytes> AllocateArray(int64_t count, const std::shared_ptr<Budget>& budget) {
  return Bytes::AllocateRaw(static_cast<uint64_t>(count) * sizeof(T), budget);
}

template <typename T>
std::span<T> SpanOf(Bytes& bytes) {
  return {bytes.as<T>(), static_cast<size_t>(bytes.size() / sizeof(T))};
}

// Sorts indices by key, equal keys by index; by index alone where keys is null. A total order: the result does not
// depend on the library's sort. The room's only sort, since each more costs 3 kB of WebAssembly.
void SortByKey(const double* keys, std::span<uint32_t> indices);
inline void SortByKey(const double* keys, std::vector<int32_t>& indices) {  // none negative
  SortByKey(keys, {reinterpret_cast<uint32_t*>(indices.data()), indices.size()});
}

}  // namespace kvpages
