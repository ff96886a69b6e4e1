// SPDX-License-Identifier: Apache-2.0
// One scale for a whole K or V tensor: mixle's quantize_kv_cache, int8 and fp8 (e4m3). Arithmetic is f32; see
// kvpages.h, kvp_kv_quantize, for the rules.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "core/status.h"
#include "profile/values.h"

namespace kvpages {

enum class KvMode : uint8_t { int8, fp8 };
Result<KvMode> FindKvMode(std::string_view name, const char* argument);
const char* KvModeName(KvMode mode);
// "" or "gen2" is the present generation, "gen1" mixle's first.
Result<bool> IsGen1(std::string_view compat, const char* argument);

// Writes a code per element and returns the scale: an f32 value for int8, a float64 for fp8.
Result<double> QuantizeKv(const Values& tensor, KvMode mode, bool gen1, std::span<uint8_t> codes, const char* argument);

// The scale must be finite and > 0 as f32 too; `out` takes one f32 per code.
Status DequantizeKv(std::span<const uint8_t> codes, double scale, KvMode mode, std::span<float> out);

// Mean |x - restored| over all but the leading dim, in float64. A tensor of rank 0 or 1: each element's.
Status KvErrorPerToken(const Values& tensor, KvMode mode, bool gen1, std::span<double> out,
                       const std::shared_ptr<Budget>& budget);

}  // namespace kvpages
