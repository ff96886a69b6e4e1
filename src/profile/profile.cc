// SPDX-License-Identifier: Apache-2.0
#include "profile/profile.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "core/float.h"
#include "profile/special.h"

namespace kvpages {
namespace {

constexpr double kEpsilon = 0x1p-52;

// Flat float64 values, the head's indices by descending magnitude, and the tail's in ascending order. In one block of
// memory each.
struct Split {
  Bytes flat, order;
  int64_t count = 0, head = 0;
  double* values() { return flat.as<double>(); }
  std::span<uint32_t> head_indices() { return {order.as<uint32_t>(), static_cast<size_t>(head)}; }
  std::span<uint32_t> tail_indices() { return {order.as<uint32_t>() + head, static_cast<size_t>(count - head)}; }
};

Result<Split> SplitHead(const Values& tensor, int64_t head, const std::shared_ptr<Budget>& budget) {
  Split split;
  split.count = tensor.count;
  split.head = head;
  KVP_ASSIGN(split.flat, AllocateArray<double>(tensor.count, budget));
  KVP_ASSIGN(split.order, AllocateArray<uint32_t>(tensor.count, budget));
  double* flat = split.values();
  auto* order = split.order.as<uint32_t>();
  std::iota(order, order + tensor.count, 0u);
  if (head > 0) {
    for (int64_t i = 0; i < tensor.count; ++i) flat[i] = -std::fabs(tensor.At(i));
    SortByKey(flat, {order, static_cast<size_t>(tensor.count)});
    // Ascending again, without a second sort: the head is marked by NaN keys.
    for (const uint32_t index : split.head_indices()) flat[index] = NAN;
    uint32_t* tail = order + head;
    for (int64_t i = 0; i < tensor.count; ++i) {
      if (!std::isnan(flat[i])) *tail++ = static_cast<uint32_t>(i);
    }
  }
  for (int64_t i = 0; i < tensor.count; ++i) flat[i] = tensor.At(i);
  return split;
}

// mixle 0.8.2: moments about the first value; a scatter or a shift that is rounding residue counts as none; the floor
// of the variance is relative.
Tail FitGaussian(const double* flat, std::span<const uint32_t> tail) {
  const double anchor = flat[tail[0]];
  const auto n = static_cast<double>(tail.size());
  double s1 = 0, s2 = 0;
  for (const uint32_t index : tail) {
    const double difference = flat[index] - anchor;
    s1 += difference;
    s2 += difference * difference;
  }
  const double mean = s1 / n;
  const double mu = anchor + mean;
  double core = s2 - s1 * mean;
  if (core < 1e-12 * std::max({std::fabs(s2), std::fabs(s1 * mean), 1e-300})) core = 0;
  double shift = (mu - anchor) - mean;
  if (std::fabs(shift) <= 4 * kEpsilon * std::max(std::fabs(mu), std::fabs(anchor))) shift = 0;
  const double variance = (core + n * shift * shift) / n;
  const double floor = 1e-8 * (variance > 0 ? variance : mu * mu);
  return {TailFamily::gaussian, mu, std::max(variance, floor > 0 && std::isfinite(floor) ? floor : 1e-8)};
}

// The first generation: raw moments, in which a large offset loses digits, and absolute floors.
Tail FitGaussianGen1(const double* flat, std::span<const uint32_t> tail) {
  double s1 = 0, s2 = 0;
  for (const uint32_t index : tail) {
    s1 += flat[index];
    s2 += flat[index] * flat[index];
  }
  const auto n = static_cast<double>(tail.size());
  const double mu = s1 / n, variance = s2 / n - mu * mu;
  return {TailFamily::gaussian, mu, !std::isfinite(variance) || variance <= 0 ? 1e-8 : std::max({variance, 1e-8, 1e-6 * variance})};
}

// The shape solves log k - digamma(k) = log(mean) - mean(log x), by bisection as in mixle.
double GammaShape(double s) {
  constexpr double kLeast = 1e-12, kMost = 1e12, kWidth = 1e-8;
  if (!std::isfinite(s)) return 1;
  if (s <= 0) return kMost;
  const auto equation = [s](double k) { return std::log(k) - Digamma(k) - s; };
  double low = kLeast, high = std::min(kMost, std::max(1.0, 1 / (2 * s)));
  if (!(equation(low) > 0)) return low;
  double at_high = equation(high);
  while (at_high > 0 && high < kMost) {
    high = std::min(kMost, high * 2);
    at_high = equation(high);
  }
  if (at_high > 0) return kMost;
  for (int i = 0; i < 200; ++i) {
    const double middle = 0.5 * (low + high);
    (equation(middle) > 0 ? low : high) = middle;
    if (high - low <= kWidth * std::max(1.0, high)) break;
  }
  return std::min(kMost, std::max(kLeast, 0.5 * (low + high)));
}

Result<Tail> FitGamma(const double* flat, std::span<const uint32_t> tail) {
  double sum = 0, logs = 0;
  for (const uint32_t index : tail) {
    const double x = flat[index];
    if (!(x > 0)) {
      return MakeError(Code::kArgument, "tensor", "the gamma family needs tail values > 0", Text(x) + " at index " + Text(int64_t{index}));
    }
    sum += x;
    logs += std::log(x);
  }
  const auto n = static_cast<double>(tail.size());
  const double mean = sum / n;
  const double k = GammaShape(std::log(mean) - logs / n);
  return Tail{TailFamily::gamma, k, std::max(0x1p-1022, mean / k)};
}

// Kolmogorov-Smirnov distance of values in ascending order to a fitted distribution.
double KsSorted(const double* flat, std::span<const uint32_t> sorted, const Tail& tail) {
  const auto n = static_cast<double>(sorted.size());
  double above = -1, below = -1;
  for (size_t i = 0; i < sorted.size(); ++i) {
    const double f = tail.Cdf(flat[sorted[i]]);
    const auto at = static_cast<double>(i);
    above = std::max(above, (at + 1) / n - f);
    below = std::max(below, f - at / n);
  }
  return std::max(above, below);
}

void PutIndex(uint8_t* indices, int index_bytes, int64_t at, uint32_t value) {
  for (int i = 0; i < index_bytes; ++i) indices[at * index_bytes + i] = static_cast<uint8_t>(value >> 8 * i);
}

// Stores a float64 value as `type`.
void PutValue(uint8_t* out, ValueType type, int64_t at, double value) {
  if (type == ValueType::f64) {
    std::memcpy(out + at * 8, &value, 8);
  } else if (type == ValueType::f32) {
    const auto narrow = static_cast<float>(value);
    std::memcpy(out + at * 4, &narrow, 4);
  } else {
    // float64 -> f16 in one rounding: f32 with a sticky last bit (rounding to odd) keeps what f16's ties need.
    auto narrow = static_cast<float>(value);
    if (std::isfinite(narrow) && static_cast<double>(narrow) != value) {
      uint32_t bits = BitsOf(narrow);
      if (std::fabs(static_cast<double>(narrow)) > std::fabs(value)) bits -= 1;
      narrow = FloatOf(bits | 1u);
    }
    const uint16_t half = ToF16(narrow);
    std::memcpy(out + at * 2, &half, 2);
  }
}

}  // namespace

Result<TailFamily> FindFamily(std::string_view name, const char* argument) {
  if (name == "gaussian") return TailFamily::gaussian;
  if (name == "gamma") return TailFamily::gamma;
  return MakeError(Code::kArgument, argument, "must be 'gaussian' or 'gamma'", std::string(name));
}
const char* FamilyName(TailFamily family) { return family == TailFamily::gaussian ? "gaussian" : "gamma"; }

double Tail::Cdf(double x) const {
  return family == TailFamily::gaussian ? NormalCdf((x - first) / std::sqrt(second)) : GammaCdf(first, x / second);
}
double Tail::Quantile(double p) const {
  return family == TailFamily::gaussian ? NormalQuantile(p) * std::sqrt(second) + first : GammaQuantile(first, p) * second;
}

int IndexBytes(int64_t count) { return count <= 256 ? 1 : count <= 65536 ? 2 : 4; }

int64_t IndexAt(const uint8_t* indices, int index_bytes, int64_t at) {
  int64_t value = 0;
  for (int i = index_bytes; i-- > 0;) value = value << 8 | indices[at * index_bytes + i];
  return value;
}

Result<Profile> FitProfile(const Values& tensor, const ProfileOptions& options, const std::shared_ptr<Budget>& budget) {
  KVP_TRY(CheckFinite(tensor, "tensor"));
  int64_t top_k = options.top_k;
  if (options.gen1) top_k = std::clamp<int64_t>(top_k, 0, tensor.count);
  if (top_k < 0 || top_k > tensor.count) {
    return MakeError(Code::kArgument, "topK", "must lie between 0 and the " + Text(tensor.count) + " elements", Text(top_k));
  }
  if (!(options.threshold >= 0 && options.threshold <= 1)) {
    return MakeError(Code::kArgument, "threshold", "must lie between 0 and 1", Text(options.threshold));
  }
  Profile profile;
  profile.dims = tensor.dims;
  profile.count = tensor.count;
  profile.gen1 = options.gen1;
  profile.source = options.gen1 || tensor.type == ValueType::bf16 ? ValueType::f32 : tensor.type;
  profile.index_bytes = IndexBytes(tensor.count);
  const int size = ValueBytes(profile.source);

  KVP_ASSIGN(Split split, SplitHead(tensor, top_k, budget));
  const double* flat = split.values();
  const std::span<uint32_t> tail = split.tail_indices();
  profile.d = 1;
  profile.fallback = true;
  if (tail.size() >= 2) {
    if (options.family == TailFamily::gamma) {
      KVP_ASSIGN(profile.tail, FitGamma(flat, tail));
    } else {
      profile.tail = options.gen1 ? FitGaussianGen1(flat, tail) : FitGaussian(flat, tail);
    }
    if (!std::isfinite(profile.tail.first) || !std::isfinite(profile.tail.second)) {
      return MakeError(Code::kNonFinite, "tensor", "its moments must be finite float64 values",
                       Text(profile.tail.first) + " and " + Text(profile.tail.second));
    }
    SortByKey(flat, tail);
    profile.d = KsSorted(flat, tail, profile.tail);
    profile.fallback = profile.d > options.threshold;
  }
  if (profile.fallback) {
    KVP_ASSIGN(profile.values, Bytes::AllocateRaw(static_cast<uint64_t>(tensor.count) * static_cast<uint64_t>(size), budget));
    for (int64_t i = 0; i < tensor.count; ++i) PutValue(profile.values.data(), profile.source, i, flat[i]);
    return profile;
  }
  profile.n_tail = static_cast<int64_t>(tail.size());
  const auto width = static_cast<uint64_t>(profile.index_bytes);
  KVP_ASSIGN(profile.values, Bytes::AllocateRaw(static_cast<uint64_t>(top_k) * static_cast<uint64_t>(size), budget));
  KVP_ASSIGN(profile.head, Bytes::AllocateRaw(static_cast<uint64_t>(top_k) * width, budget));
  KVP_ASSIGN(profile.permutation, Bytes::AllocateRaw(static_cast<uint64_t>(profile.n_tail) * width, budget));
  const std::span<uint32_t> head = split.head_indices();
  for (int64_t i = 0; i < top_k; ++i) {
    PutValue(profile.values.data(), profile.source, i, flat[head[static_cast<size_t>(i)]]);
    PutIndex(profile.head.data(), profile.index_bytes, i, head[static_cast<size_t>(i)]);
  }
  for (int64_t r = 0; r < profile.n_tail; ++r) {
    PutIndex(profile.permutation.data(), profile.index_bytes, r, tail[static_cast<size_t>(r)]);
  }
  return profile;
}

Status Reconstruct(const Profile& profile, uint8_t* out) {
  const auto size = static_cast<int64_t>(ValueBytes(profile.source));
  if (profile.fallback) {
    std::memcpy(out, profile.values.data(), profile.values.size());
    return Ok();
  }
  const auto n = static_cast<double>(profile.n_tail);
  // Quantiles rise with the rank, so the two ends stand for all.
  for (const double p : {0.5 / n, (n - 0.5) / n}) {
    const double value = profile.tail.Quantile(p);
    if (!std::isfinite(value)) return MakeError(Code::kNonFinite, "profile", "its quantiles must be finite", Text(value) + " at " + Text(p));
  }
  for (int64_t r = 0; r < profile.n_tail; ++r) {
    const int64_t at = IndexAt(profile.permutation.data(), profile.index_bytes, r);
    PutValue(out, profile.source, at, profile.tail.Quantile((static_cast<double>(r) + 0.5) / n));
  }
  for (int64_t i = 0; i < profile.head_count(); ++i) {
    std::memcpy(out + IndexAt(profile.head.data(), profile.index_bytes, i) * size, profile.values.data() + i * size, static_cast<size_t>(size));
  }
  return Ok();
}

Result<double> KsAgainst(const Values& tensor, int64_t drop, const Tail& tail, const std::shared_ptr<Budget>& budget,
                         const char* argument) {
  KVP_TRY(CheckFinite(tensor, argument));
  KVP_ASSIGN(Split split, SplitHead(tensor, drop, budget));
  SortByKey(split.values(), split.tail_indices());
  return KsSorted(split.values(), split.tail_indices(), tail);
}

Result<Anomaly> DetectAnomaly(const Values& tensor, const Profile& reference, double ratio, double margin,
                              const std::shared_ptr<Budget>& budget) {
  if (!(ratio > 0) || !std::isfinite(ratio)) return MakeError(Code::kArgument, "ratio", "must be finite and > 0", Text(ratio));
  if (!(margin >= 0) || !std::isfinite(margin)) return MakeError(Code::kArgument, "margin", "must be finite and >= 0", Text(margin));
  if (reference.fallback) {
    return MakeError(Code::kArgument, "reference", "must have a fitted tail; this profile fell back to dense values");
  }
  Anomaly report;
  const int64_t drop = std::max<int64_t>(0, std::min(reference.head_count(), tensor.count - 2));
  KVP_ASSIGN(report.d, KsAgainst(tensor, drop, reference.tail, budget, "tensor"));
  report.reference_d = reference.d;
  report.limit = std::max(ratio * reference.d, reference.d + margin);
  report.is_anomaly = report.d > report.limit;
  return report;
}

}  // namespace kvpages
