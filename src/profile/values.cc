// SPDX-License-Identifier: Apache-2.0
#include "profile/values.h"

#include <algorithm>
#include <cstring>

#include "core/float.h"

namespace kvpages {
namespace {

template <typename T>
T Load(const uint8_t* data, int64_t index) {
  T value;
  std::memcpy(&value, data + index * static_cast<int64_t>(sizeof(T)), sizeof(T));
  return value;
}

}  // namespace

int ValueBytes(ValueType type) { return type == ValueType::f64 ? 8 : type == ValueType::f32 ? 4 : 2; }

double Values::At(int64_t index) const {
  switch (type) {
    case ValueType::f64:
      return Load<double>(data, index);
    case ValueType::f32:
      return static_cast<double>(Load<float>(data, index));
    case ValueType::f16:
      return static_cast<double>(FromF16(Load<uint16_t>(data, index)));
    case ValueType::bf16:
      return static_cast<double>(FromBF16(Load<uint16_t>(data, index)));
  }
  return 0;
}

std::string DimsText(std::span<const int64_t> dims) {
  std::string text = "[";
  for (const int64_t dim : dims) text += (text.size() > 1 ? ", " : "") + Text(dim);
  return text + "]";
}

Result<int64_t> CountOf(std::span<const int64_t> dims, const char* argument) {
  if (dims.size() > 32) {
    return MakeError(Code::kShape, argument, "has at most 32 dims", Text(static_cast<int64_t>(dims.size())));
  }
  int64_t count = 1;
  bool empty = false, large = false;
  for (const int64_t dim : dims) {
    if (dim < 0) return MakeError(Code::kShape, argument, "dims must not be negative", DimsText(dims));
    if (dim == 0) empty = true;
    else if (dim > kMostValues / count) large = true;
    else count *= dim;
  }
  if (empty) return int64_t{0};
  if (large) return MakeError(Code::kShape, argument, "has at most " + Text(kMostValues) + " elements", "dims " + DimsText(dims));
  return count;
}

Result<Values> MakeValues(const uint8_t* data, size_t data_bytes, std::string_view type, std::span<const int64_t> dims,
                          const char* argument) {
  static constexpr struct {
    std::string_view name, alias;
    ValueType type;
  } kTypes[] = {{"f64", "float64", ValueType::f64},
                {"f32", "float32", ValueType::f32},
                {"f16", "float16", ValueType::f16},
                {"bf16", "bfloat16", ValueType::bf16}};
  Values values;
  const auto* found = std::find_if(std::begin(kTypes), std::end(kTypes), [&](const auto& t) { return t.name == type || t.alias == type; });
  if (found == std::end(kTypes)) {
    return MakeError(Code::kArgument, argument, "type must be f64, f32, f16 or bf16", std::string(type));
  }
  values.type = found->type;
  KVP_ASSIGN(values.count, CountOf(dims, argument));
  if (values.count == 0) return MakeError(Code::kShape, argument, "must not be empty", "dims " + DimsText(dims));
  const int64_t needed = values.count * ValueBytes(values.type);
  if (static_cast<uint64_t>(needed) != data_bytes) {
    return MakeError(Code::kShape, argument, "dims " + DimsText(dims) + " need " + Text(needed) + " bytes of " + std::string(found->name),
                     Text(static_cast<int64_t>(data_bytes)) + " bytes");
  }
  values.data = data;
  values.dims.assign(dims.begin(), dims.end());
  return values;
}

Status CheckFinite(const Values& values, const char* argument) {
  for (int64_t i = 0; i < values.count; ++i) {
    const double value = values.At(i);
    if (!std::isfinite(value)) {
      return MakeError(Code::kNonFinite, argument, "values must be finite", Text(value) + " at index " + Text(i)).Actual(Text(value));
    }
  }
  return Ok();
}

void SortByKey(const double* keys, std::span<uint32_t> indices) {
  std::sort(indices.begin(), indices.end(),
            [keys](uint32_t a, uint32_t b) {
              if (keys != nullptr && keys[a] != keys[b]) return keys[a] < keys[b];
              return a < b;
            });
}

}  // namespace kvpages
