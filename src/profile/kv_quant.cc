// SPDX-License-Identifier: Apache-2.0
#include "profile/kv_quant.h"

#include <algorithm>
#include <cmath>

#include "core/float.h"
#include "formats/float_codes.h"

namespace kvpages {

Result<KvMode> FindKvMode(std::string_view name, const char* argument) {
  if (name == "int8") return KvMode::int8;
  if (name == "fp8") return KvMode::fp8;
  return MakeError(Code::kArgument, argument, "must be 'int8' or 'fp8'", std::string(name));
}
const char* KvModeName(KvMode mode) { return mode == KvMode::int8 ? "int8" : "fp8"; }

Result<bool> IsGen1(std::string_view compat, const char* argument) {
  if (compat.empty() || compat == "gen2") return false;
  if (compat == "gen1") return true;
  return MakeError(Code::kArgument, argument, "must be 'gen1' or 'gen2'", std::string(compat));
}

Result<double> QuantizeKv(const Values& tensor, KvMode mode, bool gen1, std::span<uint8_t> codes, const char* argument) {
  if (codes.size() != static_cast<uint64_t>(tensor.count)) {
    return MakeError(Code::kBuffer, "codes", "must hold " + Text(tensor.count) + " codes", Text(static_cast<int64_t>(codes.size())));
  }
  KVP_TRY(CheckFinite(tensor, argument));
  float most = 0;
  for (int64_t i = 0; i < tensor.count; ++i) {
    const float value = tensor.AtF32(i);
    if (!IsFinite(value)) {
      return MakeError(Code::kNonFinite, argument, "values must fit f32", Text(tensor.At(i)) + " at index " + Text(i));
    }
    most = std::max(most, std::fabs(value));
  }
  if (mode == KvMode::int8) {
    // A maximum so small that the scale is 0 is taken for a tensor of zeros.
    float scale = most / 127.0f;
    const bool zero = scale == 0;
    if (zero) scale = 1;
    for (int64_t i = 0; i < tensor.count; ++i) {
      const float code = zero ? 0 : std::clamp(std::nearbyint(tensor.AtF32(i) / scale), -127.0f, 127.0f);
      codes[static_cast<size_t>(i)] = static_cast<uint8_t>(static_cast<int8_t>(code));
    }
    return static_cast<double>(scale);
  }
  // fp8 never scales up. The scale stays a float64; the division takes it as f32.
  const double scale = gen1 ? 1.0 : std::max(static_cast<double>(most) / 448.0, 1.0);
  const auto divisor = static_cast<float>(scale);
  for (int64_t i = 0; i < tensor.count; ++i) {
    const float value = tensor.AtF32(i) / divisor;
    codes[static_cast<size_t>(i)] = ToE4M3(value, gen1);
  }
  return scale;
}

Status DequantizeKv(std::span<const uint8_t> codes, double scale, KvMode mode, std::span<float> out) {
  if (codes.empty()) return MakeError(Code::kShape, "codes", "must not be empty");
  if (out.size() != codes.size()) {
    return MakeError(Code::kBuffer, "out", "must hold " + Text(static_cast<int64_t>(codes.size())) + " elements",
                     Text(static_cast<int64_t>(out.size())));
  }
  const auto factor = static_cast<float>(scale);
  if (!(scale > 0) || !IsFinite(factor) || factor == 0) {
    return MakeError(Code::kArgument, "scale", "must be finite and > 0 as f32", Text(scale));
  }
  for (size_t i = 0; i < codes.size(); ++i) {
    out[i] = (mode == KvMode::int8 ? static_cast<float>(static_cast<int8_t>(codes[i])) : FromE4M3(codes[i])) * factor;
  }
  return Ok();
}

Status KvErrorPerToken(const Values& tensor, KvMode mode, bool gen1, std::span<double> out,
                       const std::shared_ptr<Budget>& budget) {
  const int64_t rows = tensor.rows(), width = tensor.row_size();
  if (out.size() != static_cast<uint64_t>(rows)) {
    return MakeError(Code::kBuffer, "out", "must hold one element per token, " + Text(rows), Text(static_cast<int64_t>(out.size())));
  }
  KVP_ASSIGN(Bytes codes, AllocateArray<uint8_t>(tensor.count, budget));
  KVP_ASSIGN(Bytes restored, AllocateArray<float>(tensor.count, budget));
  KVP_ASSIGN(const double scale, QuantizeKv(tensor, mode, gen1, SpanOf<uint8_t>(codes), "tensor"));
  KVP_TRY(DequantizeKv(SpanOf<uint8_t>(codes), scale, mode, SpanOf<float>(restored)));
  for (int64_t row = 0; row < rows; ++row) {
    double sum = 0;
    for (int64_t i = row * width; i < (row + 1) * width; ++i) {
      sum += std::fabs(static_cast<double>(tensor.AtF32(i)) - static_cast<double>(restored.as<float>()[i]));
    }
    out[static_cast<size_t>(row)] = sum / static_cast<double>(width);
  }
  return Ok();
}

}  // namespace kvpages
