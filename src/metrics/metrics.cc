// SPDX-License-Identifier: Apache-2.0
#include "metrics/metrics.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace kvpages {
namespace {

// Leading dims of 1 do not count: a library's tensor has four dims, its source may have fewer.
bool SameDims(const Values& a, const Values& b) {
  const auto significant = [](std::span<const int64_t> dims) {
    while (!dims.empty() && dims.front() == 1) dims = dims.subspan(1);
    return dims;
  };
  return std::ranges::equal(significant(a.dims), significant(b.dims));
}

Status CheckPair(const Values& a, const Values& b, const char* first, const char* second) {
  if (!SameDims(a, b)) {
    return MakeError(Code::kShape, second, std::string("dims must be those of ") + first + ", " + DimsText(a.dims), DimsText(b.dims))
        .Expected(DimsText(a.dims));
  }
  return Ok();
}

struct Row {
  double most = 0;      // largest logit
  double log_sum = 0;   // log of the sum of exp(logit - most)
  int64_t argmax = 0;
};

Result<Row> ReadRow(const Values& logits, int64_t begin, int64_t width, const char* argument) {
  Row row;
  row.most = -INFINITY;
  for (int64_t i = 0; i < width; ++i) {
    const double value = logits.At(begin + i);
    if (std::isnan(value) || value == INFINITY) {
      return MakeError(Code::kNonFinite, argument, "logits must be finite or -Infinity", Text(value) + " at index " + Text(begin + i))
          .Actual(Text(value));
    }
    if (value > row.most) {
      row.most = value;
      row.argmax = i;
    }
  }
  if (row.most == -INFINITY) {
    return MakeError(Code::kNonFinite, argument, "a position needs a logit that is not -Infinity", "position " + Text(begin / width));
  }
  double sum = 0;
  for (int64_t i = 0; i < width; ++i) sum += std::exp(logits.At(begin + i) - row.most);
  row.log_sum = std::log(sum);
  return row;
}

Result<Bytes> Sorted(const Values& tensor, const std::shared_ptr<Budget>& budget) {
  KVP_ASSIGN(Bytes flat, AllocateArray<double>(tensor.count, budget));
  KVP_ASSIGN(Bytes order, AllocateArray<uint32_t>(tensor.count, budget));
  KVP_ASSIGN(Bytes sorted, AllocateArray<double>(tensor.count, budget));
  const std::span<uint32_t> indices{order.as<uint32_t>(), static_cast<size_t>(tensor.count)};
  for (int64_t i = 0; i < tensor.count; ++i) flat.as<double>()[i] = tensor.At(i);
  std::iota(indices.begin(), indices.end(), 0u);
  SortByKey(flat.as<double>(), indices);
  for (size_t i = 0; i < indices.size(); ++i) sorted.as<double>()[i] = flat.as<double>()[indices[i]];
  return sorted;
}

}  // namespace

Result<double> Rmse(const Values& a, const Values& b) {
  KVP_TRY(CheckPair(a, b, "a", "b"));
  KVP_TRY(CheckFinite(a, "a"));
  KVP_TRY(CheckFinite(b, "b"));
  double sum = 0;
  for (int64_t i = 0; i < a.count; ++i) {
    const double difference = a.At(i) - b.At(i);
    sum += difference * difference;
  }
  return std::sqrt(sum / static_cast<double>(a.count));
}

Status ErrorPerToken(const Values& a, const Values& b, std::span<double> out) {
  KVP_TRY(CheckPair(a, b, "tensor", "restored"));
  KVP_TRY(CheckFinite(a, "tensor"));
  KVP_TRY(CheckFinite(b, "restored"));
  const int64_t rows = a.rows(), width = a.row_size();
  if (out.size() != static_cast<uint64_t>(rows)) {
    return MakeError(Code::kBuffer, "out", "must hold one element per token, " + Text(rows), Text(static_cast<int64_t>(out.size())));
  }
  for (int64_t row = 0; row < rows; ++row) {
    double sum = 0;
    for (int64_t i = row * width; i < (row + 1) * width; ++i) sum += std::fabs(a.At(i) - b.At(i));
    out[static_cast<size_t>(row)] = sum / static_cast<double>(width);
  }
  return Ok();
}

Result<LogitFidelity> Fidelity(const Values& reference, const Values& logits) {
  KVP_TRY(CheckPair(reference, logits, "reference", "logits"));
  const int64_t width = reference.dims.empty() ? 1 : reference.dims.back();
  LogitFidelity result;
  result.positions = reference.count / width;
  double same = 0, total = 0;
  for (int64_t begin = 0; begin < reference.count; begin += width) {
    KVP_ASSIGN(const Row p, ReadRow(reference, begin, width, "reference"));
    KVP_ASSIGN(const Row q, ReadRow(logits, begin, width, "logits"));
    same += p.argmax == q.argmax;
    double kl = 0;
    for (int64_t i = begin; i < begin + width; ++i) {
      const double log_p = reference.At(i) - p.most - p.log_sum;
      const double probability = std::exp(log_p);
      if (probability > 0) kl += probability * (log_p - (logits.At(i) - q.most - q.log_sum));
    }
    kl = std::max(kl, 0.0);  // rounding may leave -1e-17 for equal rows
    total += kl;
    result.max_kl = std::max(result.max_kl, kl);
  }
  result.top1 = same / static_cast<double>(result.positions);
  result.mean_kl = total / static_cast<double>(result.positions);
  return result;
}

Result<double> KsDistance(const Values& a, const Values& b, const std::shared_ptr<Budget>& budget) {
  KVP_TRY(CheckFinite(a, "a"));
  KVP_TRY(CheckFinite(b, "b"));
  KVP_ASSIGN(const Bytes first, Sorted(a, budget));
  KVP_ASSIGN(const Bytes second, Sorted(b, budget));
  const auto* x = first.as<double>();
  const auto* y = second.as<double>();
  double most = 0;
  for (int64_t i = 0, j = 0; i < a.count && j < b.count;) {
    const double value = std::min(x[i], y[j]);
    while (i < a.count && x[i] <= value) ++i;
    while (j < b.count && y[j] <= value) ++j;
    most = std::max(most, std::fabs(static_cast<double>(i) / static_cast<double>(a.count) - static_cast<double>(j) / static_cast<double>(b.count)));
  }
  return most;
}

Result<double> MemoryRatio(double bits, double block, double scale_bits) {
  if (!(bits > 0) || !std::isfinite(bits)) return MakeError(Code::kArgument, "bits", "must be finite and > 0", Text(bits));
  if (!(block > 0) || !std::isfinite(block)) return MakeError(Code::kArgument, "block", "must be finite and > 0", Text(block));
  if (!(scale_bits >= 0) || !std::isfinite(scale_bits)) {
    return MakeError(Code::kArgument, "scaleBits", "must be finite and >= 0", Text(scale_bits));
  }
  return 2 / (bits / 8 + scale_bits / 8 / block);
}

}  // namespace kvpages
