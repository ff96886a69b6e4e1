// SPDX-License-Identifier: Apache-2.0
#include "profile/bank.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace kvpages {
namespace {

constexpr double kLeastCount = 1e-8;
constexpr double kLeastVariance = 1e-6;

double Dot(const double* a, const double* b, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

}  // namespace

// K and V of a chunk in float64, [token, head, width], with the means of every head.
struct ClusterBank::Chunk {
  int64_t tokens = 0, heads = 0, width = 0;
  Bytes data;
  const double* k(int64_t token, int64_t h) const { return data.as<double>() + (token * heads + h) * width; }
  const double* v(int64_t token, int64_t h) const { return k(token + tokens, h); }
  double* mean_k(int64_t h) { return data.as<double>() + (2 * tokens * heads + h) * width; }
  double* mean_v(int64_t h) { return mean_k(h + heads); }
  const double* mean_k(int64_t h) const { return data.as<double>() + (2 * tokens * heads + h) * width; }
  const double* mean_v(int64_t h) const { return mean_k(h + heads); }
};

Result<ClusterBank> ClusterBank::Create(const BankShape& shape, const std::shared_ptr<Budget>& budget) {
  static constexpr int64_t kMost = int64_t{1} << 20;
  for (const auto& [value, name] : {std::pair{shape.heads, "kvHeads"}, std::pair{shape.max_clusters, "maxClusters"}, std::pair{shape.width, "headDim"}}) {
    if (value < 1 || value > kMost) return MakeError(Code::kArgument, name, "must be an integer from 1 to " + Text(kMost), Text(value));
  }
  const int64_t dims[] = {shape.heads, shape.max_clusters, shape.width, shape.width + 4};
  KVP_ASSIGN([[maybe_unused]] const int64_t bound, CountOf(dims, "bank"));
  ClusterBank bank;
  bank.shape_ = shape;
  bank.budget_ = budget;
  const int64_t values = shape.heads * shape.max_clusters * (1 + 3 * shape.width + shape.width * shape.width);
  KVP_ASSIGN(bank.data_, Bytes::Allocate(static_cast<uint64_t>(values) * sizeof(double), budget));
  return bank;
}

Result<ClusterBank> ClusterBank::Clone() const {
  ClusterBank copy;
  copy.shape_ = shape_;
  copy.clusters_ = clusters_;
  copy.budget_ = budget_;
  KVP_ASSIGN(copy.data_, Bytes::Copy(data_.data(), data_.size(), budget_));
  return copy;
}

Result<BankReceipt> ClusterBank::Ingest(const Values& k, const Values& v, const BankOptions& options) {
  if (k.dims.size() != 4) return MakeError(Code::kShape, "keys", "must be [batch, tokens, kv_heads, head_dim]", DimsText(k.dims));
  if (k.dims[2] != shape_.heads || k.dims[3] != shape_.width) {
    return MakeError(Code::kShape, "keys", "kv_heads and head_dim must be the bank's " + Text(shape_.heads) + " and " + Text(shape_.width),
                     DimsText(k.dims));
  }
  if (k.dims != v.dims) {
    return MakeError(Code::kShape, "values", "dims must be those of keys, " + DimsText(k.dims), DimsText(v.dims)).Expected(DimsText(k.dims));
  }
  KVP_TRY(CheckFinite(k, "keys"));
  KVP_TRY(CheckFinite(v, "values"));
  if (std::isnan(options.birth_threshold)) return MakeError(Code::kArgument, "birthThreshold", "must be a number", Text(options.birth_threshold));
  if (options.outlier_top_k < 0) return MakeError(Code::kArgument, "outlierTopK", "must not be negative", Text(options.outlier_top_k));

  Chunk chunk;
  chunk.heads = shape_.heads;
  chunk.width = shape_.width;
  chunk.tokens = k.dims[0] * k.dims[1];
  KVP_ASSIGN(chunk.data, Bytes::Allocate(static_cast<uint64_t>(2 * (k.count + shape_.heads * shape_.width)) * sizeof(double), budget_));
  for (int64_t i = 0; i < k.count; ++i) chunk.data.as<double>()[i] = k.At(i);
  for (int64_t i = 0; i < k.count; ++i) chunk.data.as<double>()[k.count + i] = v.At(i);
  const auto tokens = static_cast<double>(chunk.tokens);
  for (int64_t h = 0; h < shape_.heads; ++h) {
    for (int64_t i = 0; i < shape_.width; ++i) {
      for (int64_t t = 0; t < chunk.tokens; ++t) {
        chunk.mean_k(h)[i] += chunk.k(t, h)[i];
        chunk.mean_v(h)[i] += chunk.v(t, h)[i];
      }
      chunk.mean_k(h)[i] /= tokens;
      chunk.mean_v(h)[i] /= tokens;
    }
  }

  KVP_ASSIGN(ClusterBank next, Clone());
  BankReceipt receipt;
  bool below = clusters_ < shape_.max_clusters;
  for (int64_t h = 0; h < shape_.heads && below; ++h) {
    for (int64_t c = 0; c < clusters_; ++c) below = below && Score(chunk.mean_k(h), h, c) < options.birth_threshold;
  }
  if (below) next.Born(chunk);
  receipt.birthed = below;
  next.Merge(options.merge_threshold, receipt);
  receipt.clusters = next.clusters_;
  KVP_TRY(next.Misfit(chunk, options.outlier_top_k, receipt));
  if (options.update && !receipt.birthed && next.clusters_ > 0) {
    KVP_TRY(next.Update(chunk));
    receipt.updated = true;
  }
  // Squares of large values may overflow; a bank that holds such a number could never be used again.
  for (uint64_t i = 0; i < next.data_.size() / sizeof(double); ++i) {
    if (!std::isfinite(next.data_.as<double>()[i])) return MakeError(Code::kNonFinite, "keys", "the bank's moments must stay finite");
  }
  *this = std::move(next);
  return receipt;
}

// The log-partition of the cluster's Gaussian at a query, mixle's MGF identity.
double ClusterBank::Score(const double* query, int64_t h, int64_t c) {
  const int64_t d = shape_.width;
  double squares = 0;
  for (int64_t i = 0; i < d; ++i) squares += query[i] * query[i] * sigma_kk(h, c)[i];
  return Dot(query, mu_k(h, c), d) / std::sqrt(static_cast<double>(d)) + squares / (2 * static_cast<double>(d)) +
         std::log(std::max(count(h, c), kLeastCount));
}

void ClusterBank::Born(const Chunk& chunk) {
  const int64_t c = clusters_++, d = shape_.width;
  const auto tokens = static_cast<double>(chunk.tokens);
  for (int64_t h = 0; h < shape_.heads; ++h) {
    count(h, c) = tokens;
    std::copy_n(chunk.mean_k(h), d, mu_k(h, c));
    std::copy_n(chunk.mean_v(h), d, mu_v(h, c));
    for (int64_t t = 0; t < chunk.tokens; ++t) {
      const double *k = chunk.k(t, h), *v = chunk.v(t, h);
      for (int64_t j = 0; j < d; ++j) {
        const double dk = k[j] - mu_k(h, c)[j];
        sigma_kk(h, c)[j] += dk * dk;
        for (int64_t i = 0; i < d; ++i) sigma_vk(h, c)[i * d + j] += (v[i] - mu_v(h, c)[i]) * dk;
      }
    }
    for (int64_t j = 0; j < d; ++j) sigma_kk(h, c)[j] = std::max(sigma_kk(h, c)[j] / tokens, kLeastVariance);
    for (int64_t i = 0; i < d * d; ++i) sigma_vk(h, c)[i] /= tokens;
  }
}

// Root mean square over heads and channels of the standardized gap between two key means.
double ClusterBank::Distance(int64_t a, int64_t b) {
  double sum = 0;
  for (int64_t h = 0; h < shape_.heads; ++h) {
    for (int64_t i = 0; i < shape_.width; ++i) {
      const double gap = mu_k(h, a)[i] - mu_k(h, b)[i];
      sum += gap * gap / std::max(0.5 * (sigma_kk(h, a)[i] + sigma_kk(h, b)[i]), kLeastVariance);
    }
  }
  return std::sqrt(sum / static_cast<double>(shape_.heads * shape_.width));
}

// Pools moments into a slot, T. Chan, G. Golub, R. LeVeque (1979).
void ClusterBank::Combine(int64_t h, int64_t into, double other, const double* other_k, const double* other_v,
                          const double* other_kk, const double* other_vk) {
  const int64_t d = shape_.width;
  const double own = count(h, into), total = own + other, safe = std::max(total, kLeastCount), cross = own * other / safe;
  double *k = mu_k(h, into), *v = mu_v(h, into), *kk = sigma_kk(h, into), *vk = sigma_vk(h, into);
  for (int64_t i = 0; i < d; ++i) {
    for (int64_t j = 0; j < d; ++j) {
      vk[i * d + j] = (vk[i * d + j] * own + other_vk[i * d + j] * other + (other_v[i] - v[i]) * (other_k[j] - k[j]) * cross) / safe;
    }
  }
  for (int64_t i = 0; i < d; ++i) {
    const double gap_k = other_k[i] - k[i], gap_v = other_v[i] - v[i];
    kk[i] = (kk[i] * own + other_kk[i] * other + gap_k * gap_k * cross) / safe;
    k[i] += gap_k * (other / safe);
    v[i] += gap_v * (other / safe);
  }
  count(h, into) = total;
}

void ClusterBank::CopySlot(int64_t h, int64_t to, int64_t from) {
  const int64_t d = shape_.width;
  count(h, to) = count(h, from);
  std::copy_n(mu_k(h, from), d, mu_k(h, to));
  std::copy_n(mu_v(h, from), d, mu_v(h, to));
  std::copy_n(sigma_kk(h, from), d, sigma_kk(h, to));
  std::copy_n(sigma_vk(h, from), d * d, sigma_vk(h, to));
}

// Pairs in order; a merge moves the last cluster into the gap and the scan goes on at the same first cluster.
void ClusterBank::Merge(double given, BankReceipt& receipt) {
  for (int64_t a = 0; a < clusters_;) {
    bool merged = false;
    for (int64_t b = a + 1; b < clusters_ && !merged; ++b) {
      double least = count(0, a);
      for (int64_t h = 0; h < shape_.heads; ++h) least = std::min({least, count(h, a), count(h, b)});
      const double threshold = std::isnan(given) ? 2.65 + 6 / std::sqrt(std::max(least, 1.0)) : given;
      const double distance = Distance(a, b);
      if (!(distance < threshold)) continue;
      const int64_t last = clusters_ - 1, d = shape_.width;
      for (int64_t h = 0; h < shape_.heads; ++h) {
        Combine(h, a, count(h, b), mu_k(h, b), mu_v(h, b), sigma_kk(h, b), sigma_vk(h, b));
        if (b != last) CopySlot(h, b, last);
        count(h, last) = 0;
        std::fill_n(mu_k(h, last), d, 0.0);
        std::fill_n(mu_v(h, last), d, 0.0);
        std::fill_n(sigma_kk(h, last), d, 0.0);
        std::fill_n(sigma_vk(h, last), d * d, 0.0);
      }
      --clusters_;
      receipt.merged.emplace_back(a, b);
      receipt.merge_distances.push_back(distance);
      merged = true;
    }
    if (!merged) ++a;
  }
}

// Softmax of the scores of a token's own key.
void ClusterBank::Responsibilities(const double* key, int64_t h, double* out) {
  double most = -INFINITY, sum = 0;
  for (int64_t c = 0; c < clusters_; ++c) most = std::max(most, out[c] = Score(key, h, c));
  for (int64_t c = 0; c < clusters_; ++c) sum += out[c] = std::exp(out[c] - most);
  for (int64_t c = 0; c < clusters_; ++c) out[c] /= sum;
}

Status ClusterBank::Misfit(const Chunk& chunk, int64_t outlier_top_k, BankReceipt& receipt) {
  const int64_t d = shape_.width;
  receipt.per_cluster.resize(static_cast<size_t>(clusters_));
  if (clusters_ == 0) return Ok();
  KVP_ASSIGN(Bytes scratch, AllocateArray<double>(2 * clusters_ + d + chunk.tokens, budget_));
  double* share = scratch.as<double>();
  double* total = share + clusters_;
  double* whitened = total + clusters_;
  double* residual = whitened + d;
  for (int64_t t = 0; t < chunk.tokens; ++t) {
    // Each token belongs to the one cluster that most heads see it in.
    std::fill_n(total, clusters_, 0.0);
    for (int64_t h = 0; h < shape_.heads; ++h) {
      Responsibilities(chunk.k(t, h), h, share);
      for (int64_t c = 0; c < clusters_; ++c) total[c] += share[c];
    }
    const int64_t c = std::max_element(total, total + clusters_) - total;
    receipt.per_cluster[static_cast<size_t>(c)].members.push_back(static_cast<int32_t>(t));
    // Head-mean length of what the cluster's regression of V on K does not explain.
    double sum = 0;
    for (int64_t h = 0; h < shape_.heads; ++h) {
      const double *k = chunk.k(t, h), *v = chunk.v(t, h);
      for (int64_t j = 0; j < d; ++j) whitened[j] = (k[j] - mu_k(h, c)[j]) / std::max(sigma_kk(h, c)[j], kLeastVariance);
      double squares = 0;
      for (int64_t i = 0; i < d; ++i) {
        const double rest = v[i] - mu_v(h, c)[i] - Dot(sigma_vk(h, c) + i * d, whitened, d);
        squares += rest * rest;
      }
      sum += std::sqrt(squares);
    }
    residual[t] = -sum / static_cast<double>(shape_.heads);  // negated: the largest sorts first
  }
  double weighted = 0, weights = 0;
  for (int64_t c = 0; c < clusters_; ++c) {
    BankReceipt::Cluster& cluster = receipt.per_cluster[static_cast<size_t>(c)];
    for (const int32_t t : cluster.members) cluster.misfit -= residual[t];
    if (!cluster.members.empty()) cluster.misfit /= static_cast<double>(cluster.members.size());
    cluster.outliers = cluster.members;
    SortByKey(residual, cluster.outliers);
    if (static_cast<int64_t>(cluster.outliers.size()) > outlier_top_k) cluster.outliers.resize(static_cast<size_t>(outlier_top_k));
    double seen = 0;
    for (int64_t h = 0; h < shape_.heads; ++h) seen += count(h, c);
    const double weight = std::max(seen / static_cast<double>(shape_.heads), kLeastCount);
    weighted += cluster.misfit * weight;
    weights += weight;
  }
  receipt.misfit_scalar = weighted / weights;
  return Ok();
}

// Counts every token in every cluster by its responsibility.
Status ClusterBank::Update(const Chunk& chunk) {
  const int64_t d = shape_.width, n = clusters_;
  KVP_ASSIGN(Bytes scratch, AllocateArray<double>(chunk.tokens * n + 3 * d + d * d, budget_));
  double* shares = scratch.as<double>();
  double* mean_k = shares + chunk.tokens * n;
  double* mean_v = mean_k + d;
  double* var_k = mean_v + d;
  double* cov = var_k + d;
  for (int64_t h = 0; h < shape_.heads; ++h) {
    for (int64_t t = 0; t < chunk.tokens; ++t) Responsibilities(chunk.k(t, h), h, shares + t * n);
    for (int64_t c = 0; c < n; ++c) {
      double weight = 0;
      std::fill_n(mean_k, 3 * d + d * d, 0.0);
      for (int64_t t = 0; t < chunk.tokens; ++t) {
        const double r = shares[t * n + c];
        weight += r;
        for (int64_t i = 0; i < d; ++i) mean_k[i] += r * chunk.k(t, h)[i];
        for (int64_t i = 0; i < d; ++i) mean_v[i] += r * chunk.v(t, h)[i];
      }
      const double safe = std::max(weight, kLeastCount);
      for (int64_t i = 0; i < 2 * d; ++i) mean_k[i] /= safe;
      for (int64_t t = 0; t < chunk.tokens; ++t) {
        const double r = shares[t * n + c];
        for (int64_t j = 0; j < d; ++j) {
          const double dk = chunk.k(t, h)[j] - mean_k[j];
          var_k[j] += r * dk * dk;
          for (int64_t i = 0; i < d; ++i) cov[i * d + j] += r * (chunk.v(t, h)[i] - mean_v[i]) * dk;
        }
      }
      for (int64_t i = 0; i < d + d * d; ++i) var_k[i] /= safe;
      Combine(h, c, weight, mean_k, mean_v, var_k, cov);
    }
  }
  return Ok();
}

}  // namespace kvpages
