// SPDX-License-Identifier: Apache-2.0
// The structured layout of a spec that onnx-light's affine layout cannot express: a structure named
// kvpages.<canonical spec>.v1 whose fields are byte or float arrays, in this order and as far as the spec has them, with
// raw_data their concatenation; the Hadamard run length is a constant (which takes no bytes).
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "core/shape.h"
#include "formats/spec.h"

namespace kvpages::layout {

inline constexpr char kCodes[] = "codes";
inline constexpr char kScales[] = "scales";
inline constexpr char kZeros[] = "zeros";
inline constexpr char kGlobal[] = "global";
inline constexpr char kCenter[] = "center";
inline constexpr char kHadamard[] = "hadamard";

// ONNX's element types of the arrays (FLOAT, UINT8, FLOAT16, BFLOAT16) and their bytes; 0 for any other.
inline constexpr int kFloat = 1, kUint8 = 2, kFloat16 = 10, kBFloat16 = 16;
inline constexpr int ElementBytes(int onnx) {
  return onnx == kUint8 ? 1 : onnx == kFloat16 || onnx == kBFloat16 ? 2 : onnx == kFloat ? 4 : 0;
}
inline int ScaleElement(ScaleType type) {
  return type == ScaleType::kF32 ? kFloat : type == ScaleType::kF16 ? kFloat16 : type == ScaleType::kBF16 ? kBFloat16 : kUint8;
}

inline std::string NameOf(const Spec& spec) { return "kvpages." + CanonicalSpec(spec) + ".v1"; }

// The spec of such a name, if this version knows it and the shape can take it.
inline std::optional<Spec> SpecOfName(std::string_view name, const Shape& shape) {
  constexpr std::string_view kPrefix = "kvpages.", kSuffix = ".v1";
  if (name.size() < kPrefix.size() + kSuffix.size() || !name.starts_with(kPrefix) || !name.ends_with(kSuffix)) return std::nullopt;
  name.remove_prefix(kPrefix.size());
  name.remove_suffix(kSuffix.size());
  auto spec = ParseSpec(name, "spec");
  if (!spec.ok() || Info(spec.value().type).family == Family::kDense) return std::nullopt;
  auto resolved = ResolveSpec(spec.value(), shape.width, "spec");
  if (!resolved.ok()) return std::nullopt;
  return resolved.value();
}

}  // namespace kvpages::layout
