// SPDX-License-Identifier: Apache-2.0
// A bank of clusters of tokens, after mixle's birth_and_merge and ingest_cluster_batch: per head and cluster the count,
// means, diagonal key variance and value-key covariance of the tokens it has seen. Its receipts name the tokens that
// the clusters describe worst. Arithmetic is float64.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "profile/values.h"

namespace kvpages {

struct BankShape {
  int64_t heads = 0, max_clusters = 0, width = 0;
};

struct BankOptions {
  double birth_threshold = 0;
  double merge_threshold = NAN;  // NaN: 2.65 + 6 / sqrt(smaller count)
  int64_t outlier_top_k = 4;
  bool update = true;  // false: birth and merge only, as mixle's birth_and_merge
};

struct BankReceipt {
  bool birthed = false;       // a new cluster was made of this very chunk
  bool updated = false;       // the chunk was counted by a soft update instead
  std::vector<std::pair<int64_t, int64_t>> merged;
  std::vector<double> merge_distances;
  int64_t clusters = 0;       // alive after birth and merge
  double misfit_scalar = 0;   // mean of the misfits, weighted by count
  struct Cluster {
    double misfit = 0;        // mean over members of the head-mean residual, 0 without members
    std::vector<int32_t> members;   // tokens of the chunk (batch * time), ascending
    std::vector<int32_t> outliers;  // the members with the largest residuals, largest first
  };
  std::vector<Cluster> per_cluster;
};

class ClusterBank {
 public:
  static Result<ClusterBank> Create(const BankShape& shape, const std::shared_ptr<Budget>& budget);
  Result<ClusterBank> Clone() const;

  // k, v: [batch, time, heads, head_dim]. All or nothing.
  Result<BankReceipt> Ingest(const Values& k, const Values& v, const BankOptions& options);

  const BankShape& shape() const { return shape_; }
  int64_t clusters() const { return clusters_; }
  // Of alive clusters. Each heads * max_clusters blocks; sigma_kk, mu_k, mu_v hold width, sigma_vk width * width values.
  double& count(int64_t h, int64_t c) { return data_.as<double>()[Slot(h, c)]; }
  double* mu_k(int64_t h, int64_t c) { return data_.as<double>() + slots() + Slot(h, c) * shape_.width; }
  double* mu_v(int64_t h, int64_t c) { return mu_k(h, c) + slots() * shape_.width; }
  double* sigma_kk(int64_t h, int64_t c) { return mu_v(h, c) + slots() * shape_.width; }
  double* sigma_vk(int64_t h, int64_t c) {
    return data_.as<double>() + slots() * (1 + 3 * shape_.width) + Slot(h, c) * shape_.width * shape_.width;
  }

 private:
  struct Chunk;
  int64_t slots() const { return shape_.heads * shape_.max_clusters; }
  int64_t Slot(int64_t h, int64_t c) const { return h * shape_.max_clusters + c; }
  double Score(const double* query, int64_t h, int64_t c);
  void Born(const Chunk& chunk);
  void Merge(double threshold, BankReceipt& receipt);
  double Distance(int64_t a, int64_t b);
  void Combine(int64_t h, int64_t into, double count, const double* mu_k, const double* mu_v, const double* sigma_kk,
               const double* sigma_vk);
  void CopySlot(int64_t h, int64_t to, int64_t from);
  Status Misfit(const Chunk& chunk, int64_t outlier_top_k, BankReceipt& receipt);
  Status Update(const Chunk& chunk);
  void Responsibilities(const double* key, int64_t h, double* out);

  BankShape shape_;
  int64_t clusters_ = 0;
  std::shared_ptr<Budget> budget_;
  Bytes data_;  // count, mu_k, mu_v, sigma_kk, sigma_vk, one array after the other
};

}  // namespace kvpages
