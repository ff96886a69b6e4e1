// SPDX-License-Identifier: Apache-2.0
// Storage of one clustered chunk of tokens, after mixle's quantize_cluster_outliers: per cluster the outliers' K and V
// as int8 or fp8, its other members' as sorted profiles. Every token of the chunk is stored exactly once.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "profile/kv_quant.h"
#include "profile/profile.h"

namespace kvpages {

struct ClusterInput {
  int64_t id = 0;
  std::span<const int32_t> members;   // tokens of the chunk, any order
  std::span<const int32_t> outliers;  // members that are stored one by one
};

struct ClusterOptions {
  KvMode mode = KvMode::int8;
  bool gen1 = false;  // codes as generation 1's quantize
  TailFamily family = TailFamily::gaussian;
  int64_t tail_top_k = 0;
};

struct QuantizedKv {
  Bytes codes;
  double scale = 1;
};

// K in [0], V in [1].
struct QuantizedCluster {
  int64_t id = 0;
  std::vector<int32_t> members, outliers, tail;  // tail is in ascending order
  QuantizedKv outlier[2];                        // no codes where there are no outliers
  std::shared_ptr<const Profile> tails[2];       // null where there is no tail
};

struct ClusterReceipt {
  int64_t input = 0, member = 0, outlier = 0, tail = 0;
};

// What conservation is checked on: index lists, and the rows that each stored part holds.
struct ClusterTiers {
  int64_t id = 0;
  std::span<const int32_t> members, outliers, tail;
  int64_t stored_outliers[2] = {0, 0}, stored_tail[2] = {0, 0};
};

// Per cluster: indices unique and within the chunk, outliers and tail disjoint and together the members, stored rows
// as many as indices; over all clusters: members name every token of the chunk once.
Result<ClusterReceipt> VerifyConservation(std::span<const ClusterTiers> clusters, int64_t tokens);

struct QuantizedClusters {
  std::vector<int64_t> row_dims;  // dims of a token
  int64_t row_size = 1;
  KvMode mode = KvMode::int8;
  std::vector<QuantizedCluster> clusters;
  ClusterReceipt receipt;
};

// k and v: [tokens, ...], equal dims. `payload`, where given, holds what the caller took for the outliers' K and V rows,
// cluster after cluster; values that differ from the rows that they name are refused (ERR_MISMATCH).
struct ClusterPayload {
  const Values* k = nullptr;
  const Values* v = nullptr;
};
Result<QuantizedClusters> QuantizeClusters(const Values& k, const Values& v, std::span<const ClusterInput> clusters,
                                           const ClusterPayload& payload, const ClusterOptions& options,
                                           const std::shared_ptr<Budget>& budget);

}  // namespace kvpages
