// SPDX-License-Identifier: Apache-2.0
// Measures of what a quantization lost, in float64. Sums run in index order.
#pragma once

#include <cstdint>
#include <span>

#include "core/status.h"
#include "profile/values.h"

namespace kvpages {

// sqrt(mean (a - b)^2). Tensors must have equal dims but for leading ones (ERR_SHAPE) and finite values.
Result<double> Rmse(const Values& a, const Values& b);

// Mean |a - b| over all but the leading dim of a, one figure per row.
Status ErrorPerToken(const Values& a, const Values& b, std::span<double> out);

// Logits [positions..., vocabulary]. -Infinity is a masked entry (probability 0); NaN, +Infinity and a row with nothing
// but masked entries are refused.
struct LogitFidelity {
  double top1 = 0;      // share of positions with the same largest entry (the first of equals)
  double mean_kl = 0;   // mean over positions of sum p (log p - log q), nats, p from the reference
  double max_kl = 0;
  int64_t positions = 0;
};
Result<LogitFidelity> Fidelity(const Values& reference, const Values& logits);

// Two-sample Kolmogorov-Smirnov distance: the largest gap between the distribution functions of two tensors' values.
Result<double> KsDistance(const Values& a, const Values& b, const std::shared_ptr<Budget>& budget);

// 16-bit elements over codes of `bits` bits with one scale of `scale_bits` bits per `block` elements. The INT4/INT3
// study's figure is block 16, scale_bits 8: 2 / (bits / 8 + 1 / 16).
Result<double> MemoryRatio(double bits, double block, double scale_bits);

}  // namespace kvpages
