// SPDX-License-Identifier: Apache-2.0
// Cluster storage and the cluster bank against vectors made by mixle 0.8.2.
#include "profile/clusters.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "profile/bank.h"
#include "support/numpy_random.h"
#include "support/tensors.h"

namespace kvpages {
namespace {

using test::Failure;
using test::JsonValue;
using test::ValuesOf;
using test::VectorFile;

const VectorFile& Vectors() { return VectorFile::Load("mixle"); }

std::string Field(int64_t cluster, const std::string& name) { return "c" + std::to_string(cluster) + "_" + name; }

TEST(ClustersTest, MatchTheVectors) {
  int cases = 0;
  for (const auto& [name, parameters] : Vectors().cases()) {
    if (parameters["kind"].text != "clusters") continue;
    SCOPED_TRACE(name);
    ++cases;
    const Values k = ValuesOf(Vectors().tensor(name, "k")), v = ValuesOf(Vectors().tensor(name, "v"));
    ClusterOptions options;
    options.mode = FindKvMode(parameters["mode"].text, "mode").value();
    options.tail_top_k = parameters["tail_top_k"].integer();
    std::vector<std::vector<int32_t>> members, outliers;
    const int64_t count = parameters["clusters"].integer();
    for (int64_t c = 0; c < count; ++c) {
      members.push_back(Vectors().get<int32_t>(name, Field(c, "members")));
      outliers.push_back(Vectors().get<int32_t>(name, Field(c, "outliers")));
    }
    std::vector<ClusterInput> inputs;
    for (int64_t c = 0; c < count; ++c) inputs.push_back({c, members[static_cast<size_t>(c)], outliers[static_cast<size_t>(c)]});
    auto made = QuantizeClusters(k, v, inputs, {}, options, nullptr);
    ASSERT_TRUE(made.ok()) << Failure(made);
    const JsonValue& receipt = parameters["receipt"];
    EXPECT_EQ(made.value().receipt.input, receipt["input"].integer());
    EXPECT_EQ(made.value().receipt.member, receipt["member"].integer());
    EXPECT_EQ(made.value().receipt.outlier, receipt["outlier"].integer());
    EXPECT_EQ(made.value().receipt.tail, receipt["tail"].integer());
    for (const QuantizedCluster& cluster : made.value().clusters) {
      EXPECT_EQ(cluster.tail, Vectors().get<int32_t>(name, Field(cluster.id, "tail")));
      for (int side = 0; side < 2; ++side) {
        const std::string letter = side == 0 ? "k" : "v";
        SCOPED_TRACE(Field(cluster.id, letter));
        const Bytes& codes = cluster.outlier[side].codes;
        if (Vectors().has(name, Field(cluster.id, "outlier_" + letter))) {
          EXPECT_EQ(std::vector<uint8_t>(codes.data(), codes.data() + codes.size()), Vectors().get<uint8_t>(name, Field(cluster.id, "outlier_" + letter + "_codes")));
          EXPECT_EQ(cluster.outlier[side].scale, Vectors().one<double>(name, Field(cluster.id, "outlier_" + letter + "_scale")));
          std::vector<float> y(codes.size());
          ASSERT_EQ(Failure(DequantizeKv({codes.data(), codes.size()}, cluster.outlier[side].scale, options.mode, y)), "no error");
          EXPECT_EQ(y, Vectors().get<float>(name, Field(cluster.id, "outlier_" + letter)));
        } else {
          EXPECT_TRUE(codes.empty());
        }
        if (!Vectors().has(name, Field(cluster.id, "tail_" + letter))) {
          EXPECT_EQ(cluster.tails[side], nullptr);
          continue;
        }
        ASSERT_NE(cluster.tails[side], nullptr);
        const Profile& tail = *cluster.tails[side];
        EXPECT_NEAR(tail.d, Vectors().one<double>(name, Field(cluster.id, "tail_" + letter + "_d")), 1e-14);
        EXPECT_EQ(tail.fallback, Vectors().one<uint8_t>(name, Field(cluster.id, "tail_" + letter + "_fallback")) != 0);
        const std::vector<float> want = Vectors().get<float>(name, Field(cluster.id, "tail_" + letter));
        std::vector<float> y(want.size());
        ASSERT_EQ(tail.count, static_cast<int64_t>(want.size()));
        ASSERT_EQ(Failure(Reconstruct(tail, reinterpret_cast<uint8_t*>(y.data()))), "no error");
        for (size_t i = 0; i < want.size(); ++i) ASSERT_NEAR(y[i], want[i], 2e-7f * std::fabs(want[i])) << i;
      }
    }
  }
  EXPECT_EQ(cases, 4);
}

// Six tokens of 1 x 2 values in two clusters, as mixle's own test has them.
class SixTokens : public ::testing::Test {
 protected:
  std::vector<float> k_ = std::vector<float>(12, 1.0f);
  std::string Try(std::vector<int32_t> members0, std::vector<int32_t> outliers0, std::vector<int32_t> members1,
                  std::vector<int32_t> outliers1, const std::vector<float>& payload = {}) {
    const Values k = ValuesOf(k_, {6, 1, 2}), given = ValuesOf(payload);
    const ClusterInput inputs[] = {{0, members0, outliers0}, {1, members1, outliers1}};
    return Failure(QuantizeClusters(k, k, inputs, {payload.empty() ? nullptr : &given, nullptr}, {}, nullptr));
  }
};

TEST_F(SixTokens, BadMembership) {
  EXPECT_EQ(Try({0, 2, 4}, {2}, {1, 3, 5}, {5}), "no error");
  EXPECT_EQ(Try({0, 1, 2}, {0}, {2, 3, 4, 5}, {3}), "ERR_MISMATCH clusters: must be an exact partition of the tokens, got token 2 in two clusters");
  EXPECT_EQ(Try({0, 1, 2}, {0}, {3, 4}, {3}), "ERR_MISMATCH clusters: must be an exact partition of the tokens, got token 5 in no cluster");
  EXPECT_EQ(Try({0, 1, 2}, {3}, {3, 4, 5}, {4}), "ERR_ARGUMENT cluster 0 outliers: must be members of the cluster, got 3");
  EXPECT_EQ(Try({0, 6}, {0}, {1}, {}), "ERR_ARGUMENT cluster 0 members: must lie between 0 and 5, got 6");
  EXPECT_EQ(Try({0, -1}, {0}, {1}, {}), "ERR_ARGUMENT cluster 0 members: must lie between 0 and 5, got -1");
  EXPECT_EQ(Try({0, 0, 1}, {0}, {2, 3, 4, 5}, {}), "ERR_ARGUMENT cluster 0 members: must name a token once, got 0 twice");
  EXPECT_EQ(Try({0, 1, 2}, {1, 1}, {3, 4, 5}, {}), "ERR_ARGUMENT cluster 0 outliers: must name a token once, got 1 twice");
}

TEST_F(SixTokens, PayloadMustBeTheRowsThatItNames) {
  for (size_t i = 0; i < k_.size(); ++i) k_[i] = static_cast<float>(i);
  EXPECT_EQ(Try({0, 2, 4}, {2}, {1, 3, 5}, {5}, {4, 5, 10, 11}), "no error");
  EXPECT_EQ(Try({0, 2, 4}, {2}, {1, 3, 5}, {5}, {4, 5, 10, 12}),
            "ERR_MISMATCH outlierKeys: must be the rows that the outliers name, got 12 for 11 in token 5");
  EXPECT_EQ(Try({0, 2, 4}, {2}, {1, 3, 5}, {5}, {4, 5}), "ERR_SHAPE outlierKeys: must hold the rows of all outliers, 4 elements, got 2");
}

TEST_F(SixTokens, BadTensors) {
  const std::vector<int32_t> all = {0, 1, 2, 3, 4, 5};
  const ClusterInput inputs[] = {{0, all, {}}};
  const Values k = ValuesOf(k_, {6, 1, 2});
  EXPECT_EQ(Failure(QuantizeClusters(k, ValuesOf(k_, {6, 2}), inputs, {}, {}, nullptr)), "ERR_SHAPE values: dims must be those of keys, [6, 1, 2], got [6, 2]");
  std::vector<float> bad = k_;
  bad[7] = std::numeric_limits<float>::infinity();
  EXPECT_EQ(Failure(QuantizeClusters(k, ValuesOf(bad, {6, 1, 2}), inputs, {}, {}, nullptr)), "ERR_NON_FINITE values: values must be finite, got Infinity at index 7");
  EXPECT_EQ(Failure(QuantizeClusters(k, k, {}, {}, {}, nullptr)), "ERR_ARGUMENT clusters: must not be empty");
  ClusterOptions options;
  options.tail_top_k = 13;
  EXPECT_EQ(Failure(QuantizeClusters(k, k, inputs, {}, options, nullptr)),
            "ERR_ARGUMENT cluster 0 tail of keys, topK: must lie between 0 and the 12 elements, got 13");
}

TEST_F(SixTokens, ASingleTailValueIsStoredDense) {
  std::vector<float> x = {1, 2, 3};
  const std::vector<int32_t> all = {0, 1, 2}, outliers = {0, 2};
  const ClusterInput inputs[] = {{5, all, outliers}};
  auto made = QuantizeClusters(ValuesOf(x, {3}), ValuesOf(x, {3}), inputs, {}, {}, nullptr);
  ASSERT_TRUE(made.ok()) << Failure(made);
  const QuantizedCluster& cluster = made.value().clusters[0];
  EXPECT_EQ(cluster.tail, (std::vector<int32_t>{1}));
  ASSERT_NE(cluster.tails[0], nullptr);
  EXPECT_TRUE(cluster.tails[0]->fallback);
  EXPECT_EQ(cluster.tails[0]->d, 1);
}

TEST(ConservationTest, ChecksStoredRowsAndIds) {
  const std::vector<int32_t> members = {0, 1, 2}, outliers = {1}, tail = {0, 2}, wrong = {0};
  const auto verify = [](ClusterTiers tiers, int64_t tokens = 3) { return Failure(VerifyConservation({&tiers, 1}, tokens)); };
  const ClusterTiers good{4, members, outliers, tail, {1, 1}, {2, 2}};
  EXPECT_EQ(verify(good), "no error");
  EXPECT_EQ(verify(good, 0), "ERR_ARGUMENT tokens: must be a count from 1 to 2147483647, got 0");
  ClusterTiers bad = good;
  bad.stored_outliers[1] = 2;
  EXPECT_EQ(verify(bad), "ERR_MISMATCH cluster 4 outlierV: must store 1 tokens, got 2");
  bad = good;
  bad.stored_tail[0] = 1;
  EXPECT_EQ(verify(bad), "ERR_MISMATCH cluster 4 tailK: must store 2 tokens, got 1");
  bad = good;
  bad.tail = wrong;
  EXPECT_EQ(verify(bad), "ERR_MISMATCH cluster 4 members: must each be stored once, as outlier or in the tail, got token 2 in neither");
  bad = good;
  bad.tail = members;
  EXPECT_EQ(verify(bad), "ERR_MISMATCH cluster 4 members: must each be stored once, as outlier or in the tail, got token 1 in both");
  const ClusterTiers twice[] = {good, good};
  EXPECT_EQ(Failure(VerifyConservation(twice, 3)), "ERR_ARGUMENT clusters: must have ids of their own, got 4 twice");
}

// ---- Bank ----

TEST(BankTest, MatchesTheVectors) {
  int cases = 0;
  for (const auto& [name, parameters] : Vectors().cases()) {
    if (parameters["kind"].text != "bank") continue;
    SCOPED_TRACE(name);
    ++cases;
    const std::vector<int64_t>& dims = Vectors().tensor(name, "k0").dims;
    auto created = ClusterBank::Create({dims[2], parameters["max_clusters"].integer(), dims[3]}, nullptr);
    ASSERT_TRUE(created.ok());
    ClusterBank& bank = created.value();
    BankOptions options;
    options.birth_threshold = parameters["birth_threshold"].number;
    if (!parameters["merge_threshold"].is_null()) options.merge_threshold = parameters["merge_threshold"].number;
    options.outlier_top_k = parameters["outlier_top_k"].integer();
    for (int64_t i = 0; i < parameters["chunks"].integer(); ++i) {
      SCOPED_TRACE(i);
      const std::string at = "s" + std::to_string(i) + "_";
      auto result = bank.Ingest(ValuesOf(Vectors().tensor(name, "k" + std::to_string(i))), ValuesOf(Vectors().tensor(name, "v" + std::to_string(i))), options);
      ASSERT_TRUE(result.ok()) << Failure(result);
      const BankReceipt& receipt = result.value();
      const JsonValue& want = parameters["receipts"][static_cast<size_t>(i)];
      EXPECT_EQ(receipt.birthed, want["birthed"].truth());
      EXPECT_EQ(receipt.updated, want["soft_update_applied"].truth());
      EXPECT_EQ(receipt.clusters, want["n_clusters_after_birth_and_merge"].integer());
      ASSERT_EQ(receipt.merged.size(), want["merged"].items.size());
      for (size_t m = 0; m < receipt.merged.size(); ++m) {
        EXPECT_EQ(receipt.merged[m].first, want["merged"][m][0].integer());
        EXPECT_EQ(receipt.merged[m].second, want["merged"][m][1].integer());
        EXPECT_NEAR(receipt.merge_distances[m], want["merge_distances"][m].number, 1e-5);
      }
      EXPECT_NEAR(receipt.misfit_scalar, want["misfit_scalar"].number, 1e-4 * want["misfit_scalar"].number);
      int64_t counted = 0;
      for (size_t c = 0; c < receipt.per_cluster.size(); ++c) {
        const BankReceipt::Cluster& cluster = receipt.per_cluster[c];
        const double misfit = want["misfit"][std::to_string(c)].number;
        EXPECT_NEAR(cluster.misfit, misfit, 1e-4 * misfit);
        counted += static_cast<int64_t>(cluster.members.size());
        const std::string field = at + Field(static_cast<int64_t>(c), "members");
        if (!Vectors().has(name, field)) {
          EXPECT_TRUE(cluster.members.empty());
          continue;
        }
        EXPECT_EQ(cluster.members, Vectors().get<int32_t>(name, field));
        EXPECT_EQ(cluster.outliers, Vectors().get<int32_t>(name, at + Field(static_cast<int64_t>(c), "outliers")));
      }
      EXPECT_EQ(counted, dims[0] * dims[1]);
      ASSERT_EQ(bank.clusters(), want["n_clusters"].integer());
      const int64_t n = bank.clusters(), d = dims[3];
      const std::vector<float> count = Vectors().get<float>(name, at + "count"), mu_k = Vectors().get<float>(name, at + "mu_k"),
                               mu_v = Vectors().get<float>(name, at + "mu_v"), sigma_kk = Vectors().get<float>(name, at + "sigma_kk"),
                               sigma_vk = Vectors().get<float>(name, at + "sigma_vk");
      const auto near = [](double got, float expected) { EXPECT_NEAR(got, static_cast<double>(expected), 1e-4 * (1 + std::fabs(static_cast<double>(expected)))); };
      for (int64_t h = 0; h < dims[2]; ++h) {
        for (int64_t c = 0; c < n; ++c) {
          const auto slot = static_cast<size_t>(h * n + c);
          near(bank.count(h, c), count[slot]);
          for (size_t j = 0; j < static_cast<size_t>(d); ++j) {
            near(bank.mu_k(h, c)[j], mu_k[slot * static_cast<size_t>(d) + j]);
            near(bank.mu_v(h, c)[j], mu_v[slot * static_cast<size_t>(d) + j]);
            near(bank.sigma_kk(h, c)[j], sigma_kk[slot * static_cast<size_t>(d) + j]);
          }
          for (size_t j = 0; j < static_cast<size_t>(d * d); ++j) near(bank.sigma_vk(h, c)[j], sigma_vk[slot * static_cast<size_t>(d * d) + j]);
        }
      }
    }
  }
  EXPECT_EQ(cases, 4);
}

TEST(BankTest, CountsEveryTokenOnceAndItsReceiptsAreAPartition) {
  test::NumpyRandom random(5);
  auto bank = ClusterBank::Create({2, 3, 4}, nullptr);
  ASSERT_TRUE(bank.ok());
  BankOptions options;
  options.birth_threshold = 30;
  for (int chunk = 0; chunk < 6; ++chunk) {
    const std::vector<double> k = random.Normals(40 * 2 * 4, chunk % 3 * 4.0), v = random.Normals(40 * 2 * 4);
    auto receipt = bank.value().Ingest(ValuesOf(k, {2, 20, 2, 4}), ValuesOf(v, {2, 20, 2, 4}), options);
    ASSERT_TRUE(receipt.ok()) << Failure(receipt);
    for (int64_t h = 0; h < 2; ++h) {
      double total = 0;
      for (int64_t c = 0; c < bank.value().clusters(); ++c) total += bank.value().count(h, c);
      EXPECT_NEAR(total, 40.0 * (chunk + 1), 1e-9);
    }
    // The receipt is what cluster storage takes.
    std::vector<ClusterInput> inputs;
    for (size_t c = 0; c < receipt.value().per_cluster.size(); ++c) {
      const BankReceipt::Cluster& cluster = receipt.value().per_cluster[c];
      if (!cluster.members.empty()) inputs.push_back({static_cast<int64_t>(c), cluster.members, cluster.outliers});
    }
    const Values flat_k = ValuesOf(k, {40, 2, 4}), flat_v = ValuesOf(v, {40, 2, 4});
    auto stored = QuantizeClusters(flat_k, flat_v, inputs, {}, {}, nullptr);
    ASSERT_TRUE(stored.ok()) << Failure(stored);
    EXPECT_EQ(stored.value().receipt.outlier + stored.value().receipt.tail, 40);
  }
}

TEST(BankTest, BadInputChangesNothing) {
  auto bank = ClusterBank::Create({1, 2, 2}, nullptr);
  ASSERT_TRUE(bank.ok());
  const std::vector<double> k = {1, 2, 3, 4}, bad = {1, NAN, 3, 4}, huge = {1e200, -1e200, 1e200, 1e200};
  ASSERT_TRUE(bank.value().Ingest(ValuesOf(k, {1, 2, 1, 2}), ValuesOf(k, {1, 2, 1, 2}), {}).ok());
  const auto ingest = [&](const Values& a, const Values& b, BankOptions options = {}) { return Failure(bank.value().Ingest(a, b, options)); };
  EXPECT_EQ(ingest(ValuesOf(k, {2, 2}), ValuesOf(k, {2, 2})), "ERR_SHAPE keys: must be [batch, tokens, kv_heads, head_dim], got [2, 2]");
  EXPECT_EQ(ingest(ValuesOf(k, {1, 1, 2, 2}), ValuesOf(k, {1, 1, 2, 2})), "ERR_SHAPE keys: kv_heads and head_dim must be the bank's 1 and 2, got [1, 1, 2, 2]");
  EXPECT_EQ(ingest(ValuesOf(k, {1, 2, 1, 2}), ValuesOf(k, {2, 1, 1, 2})), "ERR_SHAPE values: dims must be those of keys, [1, 2, 1, 2], got [2, 1, 1, 2]");
  EXPECT_EQ(ingest(ValuesOf(bad, {1, 2, 1, 2}), ValuesOf(k, {1, 2, 1, 2})), "ERR_NON_FINITE keys: values must be finite, got NaN at index 1");
  EXPECT_EQ(ingest(ValuesOf(huge, {1, 2, 1, 2}), ValuesOf(k, {1, 2, 1, 2})), "ERR_NON_FINITE keys: the bank's moments must stay finite");
  BankOptions options;
  options.outlier_top_k = -1;
  EXPECT_EQ(ingest(ValuesOf(k, {1, 2, 1, 2}), ValuesOf(k, {1, 2, 1, 2}), options), "ERR_ARGUMENT outlierTopK: must not be negative, got -1");
  EXPECT_EQ(bank.value().clusters(), 1);
  EXPECT_EQ(bank.value().count(0, 0), 2);
  EXPECT_EQ(Failure(ClusterBank::Create({0, 1, 1}, nullptr)), "ERR_ARGUMENT kvHeads: must be an integer from 1 to 1048576, got 0");
  EXPECT_EQ(Failure(ClusterBank::Create({1 << 20, 1 << 20, 8}, nullptr)).substr(0, 9), "ERR_SHAPE");
}

}  // namespace
}  // namespace kvpages
