// SPDX-License-Identifier: Apache-2.0
#include "profile/clusters.h"

#include <algorithm>
#include <cstring>

namespace kvpages {
namespace {

std::string Of(int64_t id, std::string_view what) { return "cluster " + Text(id) + " " + std::string(what); }

// Marks every index; refuses one outside the chunk or marked before.
Status MarkOnce(std::span<const int32_t> indices, std::span<uint8_t> marks, uint8_t bit, const std::string& argument) {
  for (const int32_t index : indices) {
    if (index < 0 || static_cast<size_t>(index) >= marks.size()) {
      return MakeError(Code::kArgument, argument, "must lie between 0 and " + Text(static_cast<int64_t>(marks.size()) - 1),
                       Text(int64_t{index}));
    }
    if ((marks[static_cast<size_t>(index)] & bit) != 0) {
      return MakeError(Code::kArgument, argument, "must name a token once", Text(int64_t{index}) + " twice");
    }
    marks[static_cast<size_t>(index)] |= bit;
  }
  return Ok();
}

constexpr uint8_t kMember = 1, kOutlier = 2, kTail = 4, kTaken = 8;

Status VerifyCluster(const ClusterTiers& cluster, std::span<uint8_t> marks) {
  KVP_TRY(MarkOnce(cluster.members, marks, kMember, Of(cluster.id, "members")));
  KVP_TRY(MarkOnce(cluster.outliers, marks, kOutlier, Of(cluster.id, "outliers")));
  KVP_TRY(MarkOnce(cluster.tail, marks, kTail, Of(cluster.id, "tail")));
  for (const auto& [indices, name] : {std::pair{cluster.outliers, "outliers"}, std::pair{cluster.tail, "tail"}}) {
    for (const int32_t index : indices) {
      if ((marks[static_cast<size_t>(index)] & kMember) == 0) {
        return MakeError(Code::kArgument, Of(cluster.id, name), "must be members of the cluster", Text(int64_t{index}));
      }
    }
  }
  for (const int32_t index : cluster.members) {
    uint8_t& mark = marks[static_cast<size_t>(index)];
    const int tiers = ((mark & kOutlier) != 0) + ((mark & kTail) != 0);
    if (tiers != 1) {
      return MakeError(Code::kMismatch, Of(cluster.id, "members"), "must each be stored once, as outlier or in the tail",
                       "token " + Text(int64_t{index}) + (tiers == 0 ? " in neither" : " in both"));
    }
    if ((mark & kTaken) != 0) {
      return MakeError(Code::kMismatch, "clusters", "must be an exact partition of the tokens",
                       "token " + Text(int64_t{index}) + " in two clusters");
    }
    mark = kTaken;
  }
  static constexpr const char* kNames[2][2] = {{"outlierK", "outlierV"}, {"tailK", "tailV"}};
  for (int side = 0; side < 2; ++side) {
    const int64_t stored[2] = {cluster.stored_outliers[side], cluster.stored_tail[side]};
    const int64_t expected[2] = {static_cast<int64_t>(cluster.outliers.size()), static_cast<int64_t>(cluster.tail.size())};
    for (int tier = 0; tier < 2; ++tier) {
      if (stored[tier] != expected[tier]) {
        return MakeError(Code::kMismatch, Of(cluster.id, kNames[tier][side]), "must store " + Text(expected[tier]) + " tokens", Text(stored[tier]));
      }
    }
  }
  return Ok();
}

// Rows of a tensor, copied one after the other.
Result<Bytes> Gather(const Values& tensor, std::span<const int32_t> rows, const std::shared_ptr<Budget>& budget) {
  const int64_t row_bytes = tensor.row_size() * ValueBytes(tensor.type);
  KVP_ASSIGN(Bytes out, Bytes::AllocateRaw(rows.size() * static_cast<uint64_t>(row_bytes), budget));
  for (size_t i = 0; i < rows.size(); ++i) {
    std::memcpy(out.data() + static_cast<int64_t>(i) * row_bytes, tensor.data + rows[i] * row_bytes, static_cast<size_t>(row_bytes));
  }
  return out;
}

Values RowsOf(const Values& tensor, const Bytes& data, int64_t rows) {
  Values values{data.data(), tensor.type, tensor.dims, rows * tensor.row_size()};
  values.dims[0] = rows;
  return values;
}

}  // namespace

Result<ClusterReceipt> VerifyConservation(std::span<const ClusterTiers> clusters, int64_t tokens) {
  if (tokens < 1 || tokens > INT32_MAX) return MakeError(Code::kArgument, "tokens", "must be a count from 1 to 2147483647", Text(tokens));
  if (clusters.empty()) return MakeError(Code::kArgument, "clusters", "must not be empty");
  KVP_ASSIGN(Bytes marks, Bytes::Allocate(static_cast<uint64_t>(tokens)));
  ClusterReceipt receipt;
  receipt.input = tokens;
  for (size_t i = 0; i < clusters.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      if (clusters[j].id == clusters[i].id) return MakeError(Code::kArgument, "clusters", "must have ids of their own", Text(clusters[i].id) + " twice");
    }
    KVP_TRY(VerifyCluster(clusters[i], SpanOf<uint8_t>(marks)));
    receipt.member += static_cast<int64_t>(clusters[i].members.size());
    receipt.outlier += static_cast<int64_t>(clusters[i].outliers.size());
    receipt.tail += static_cast<int64_t>(clusters[i].tail.size());
  }
  if (receipt.member != tokens) {
    const auto* missing = std::find(marks.data(), marks.data() + marks.size(), uint8_t{0});
    return MakeError(Code::kMismatch, "clusters", "must be an exact partition of the tokens",
                     "token " + Text(int64_t{missing - marks.data()}) + " in no cluster");
  }
  return receipt;
}

Result<QuantizedClusters> QuantizeClusters(const Values& k, const Values& v, std::span<const ClusterInput> clusters,
                                           const ClusterPayload& payload, const ClusterOptions& options,
                                           const std::shared_ptr<Budget>& budget) {
  if (k.dims.empty()) return MakeError(Code::kShape, "keys", "needs a leading token dim", "dims []");
  if (k.dims != v.dims) {
    return MakeError(Code::kShape, "values", "dims must be those of keys, " + DimsText(k.dims), DimsText(v.dims)).Expected(DimsText(k.dims));
  }
  KVP_TRY(CheckFinite(k, "keys"));
  KVP_TRY(CheckFinite(v, "values"));
  if (options.tail_top_k < 0) return MakeError(Code::kArgument, "tailTopK", "must not be negative", Text(options.tail_top_k));
  const int64_t tokens = k.rows();
  QuantizedClusters out;
  out.row_dims.assign(k.dims.begin() + 1, k.dims.end());
  out.row_size = k.row_size();
  out.mode = options.mode;

  // All index lists first: nothing is fitted for a chunk that is not conserved.
  std::vector<ClusterTiers> tiers;
  int64_t outliers = 0;
  KVP_ASSIGN(Bytes taken, Bytes::Allocate(static_cast<uint64_t>(tokens), budget));
  for (const ClusterInput& input : clusters) {
    QuantizedCluster& cluster = out.clusters.emplace_back();
    cluster.id = input.id;
    cluster.members.assign(input.members.begin(), input.members.end());
    cluster.outliers.assign(input.outliers.begin(), input.outliers.end());
    // Indices are judged below; here one that is out of range only has to do no harm.
    std::fill_n(taken.data(), taken.size(), uint8_t{0});
    const auto mark = [&](int32_t index) -> uint8_t* { return index < 0 || index >= tokens ? nullptr : taken.data() + index; };
    for (const int32_t outlier : cluster.outliers) {
      if (uint8_t* at = mark(outlier)) *at = 1;
    }
    for (const int32_t member : cluster.members) {
      const uint8_t* at = mark(member);
      if (at == nullptr || *at == 0) cluster.tail.push_back(member);
    }
    outliers += static_cast<int64_t>(cluster.outliers.size());
  }
  for (const QuantizedCluster& cluster : out.clusters) {
    const auto outlier_rows = static_cast<int64_t>(cluster.outliers.size()), tail_rows = static_cast<int64_t>(cluster.tail.size());
    tiers.push_back({cluster.id, cluster.members, cluster.outliers, cluster.tail, {outlier_rows, outlier_rows}, {tail_rows, tail_rows}});
  }
  KVP_ASSIGN(out.receipt, VerifyConservation(tiers, tokens));
  for (QuantizedCluster& cluster : out.clusters) SortByKey(nullptr, cluster.tail);

  const Values* sources[2] = {&k, &v};
  const Values* payloads[2] = {payload.k, payload.v};
  static constexpr const char* kNames[2] = {"outlierKeys", "outlierValues"};
  for (int side = 0; side < 2; ++side) {
    if (payloads[side] != nullptr && payloads[side]->count != outliers * out.row_size) {
      return MakeError(Code::kShape, kNames[side], "must hold the rows of all outliers, " + Text(outliers * out.row_size) + " elements",
                       Text(payloads[side]->count));
    }
    int64_t at = 0;
    for (QuantizedCluster& cluster : out.clusters) {
      const auto rows = static_cast<int64_t>(cluster.outliers.size());
      if (rows > 0) {
        KVP_ASSIGN(const Bytes picked, Gather(*sources[side], cluster.outliers, budget));
        const Values values = RowsOf(*sources[side], picked, rows);
        for (int64_t i = 0; payloads[side] != nullptr && i < values.count; ++i, ++at) {
          if (payloads[side]->At(at) != values.At(i)) {
            return MakeError(Code::kMismatch, kNames[side], "must be the rows that the outliers name",
                             Text(payloads[side]->At(at)) + " for " + Text(values.At(i)) + " in token " +
                                 Text(int64_t{cluster.outliers[static_cast<size_t>(i / out.row_size)]}));
          }
        }
        KVP_ASSIGN(cluster.outlier[side].codes, AllocateArray<uint8_t>(values.count, budget));
        KVP_ASSIGN(cluster.outlier[side].scale,
                   QuantizeKv(values, options.mode, options.gen1, SpanOf<uint8_t>(cluster.outlier[side].codes),
                              side == 0 ? "keys" : "values"));
      }
      const auto tail_rows = static_cast<int64_t>(cluster.tail.size());
      if (tail_rows > 0) {
        KVP_ASSIGN(const Bytes picked, Gather(*sources[side], cluster.tail, budget));
        ProfileOptions profile;
        profile.top_k = options.tail_top_k;
        profile.family = options.family;
        auto fitted = FitProfile(RowsOf(*sources[side], picked, tail_rows), profile, budget);
        if (!fitted.ok()) {
          Error error = std::move(fitted.error());
          error.message = Of(cluster.id, side == 0 ? "tail of keys, " : "tail of values, ") + error.message;
          return error;
        }
        cluster.tails[side] = std::make_shared<Profile>(std::move(fitted.value()));
      }
    }
  }
  return out;
}

}  // namespace kvpages
