// SPDX-License-Identifier: Apache-2.0
#include "metrics/metrics.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "support/numpy_random.h"
#include "support/tensors.h"

namespace kvpages {
namespace {

using test::Failure;
using test::NumpyRandom;
using test::ValuesOf;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

TEST(MetricsTest, RmseAndErrorPerToken) {
  const std::vector<double> a = {1, 2, 3, 4, 5, 6}, b = {1, 2, 3, 7, 5, 2};
  EXPECT_DOUBLE_EQ(Rmse(ValuesOf(a), ValuesOf(b)).value(), std::sqrt(25.0 / 6));
  std::vector<double> errors(3);
  ASSERT_EQ(Failure(ErrorPerToken(ValuesOf(a, {3, 2}), ValuesOf(b, {3, 2}), errors)), "no error");
  EXPECT_EQ(errors, (std::vector<double>{0, 1.5, 2}));
  EXPECT_DOUBLE_EQ(Rmse(ValuesOf(a, {3, 2}), ValuesOf(b, {1, 1, 3, 2})).value(), std::sqrt(25.0 / 6));
  // Different element types may be compared.
  const std::vector<float> c = {1, 2, 3, 4, 5, 6};
  EXPECT_EQ(Rmse(ValuesOf(a), ValuesOf(c)).value(), 0);
}

TEST(MetricsTest, Fidelity) {
  // Two positions over three words: p = (1/2, 1/4, 1/4) against q = (1/4, 1/2, 1/4), then equal rows.
  const double l2 = std::log(0.5), l4 = std::log(0.25);
  const std::vector<double> p = {l2 + 7, l4 + 7, l4 + 7, 1, 2, 3}, q = {l4, l2, l4, 1, 2, 3};
  auto result = Fidelity(ValuesOf(p, {2, 3}), ValuesOf(q, {2, 3}));
  ASSERT_TRUE(result.ok());
  EXPECT_EQ(result.value().positions, 2);
  EXPECT_EQ(result.value().top1, 0.5);
  const double kl = 0.5 * std::log(2.0) + 0.25 * std::log(0.5);
  EXPECT_NEAR(result.value().mean_kl, kl / 2, 1e-15);
  EXPECT_NEAR(result.value().max_kl, kl, 1e-15);
}

TEST(MetricsTest, FidelityOfLargeLogitsAndMasks) {
  const std::vector<double> p = {1000, 999, -kInfinity}, q = {-1000, -1001, -kInfinity};
  auto same = Fidelity(ValuesOf(p, {1, 3}), ValuesOf(q, {1, 3}));
  ASSERT_TRUE(same.ok());
  EXPECT_EQ(same.value().top1, 1);
  EXPECT_NEAR(same.value().mean_kl, 0, 1e-15);
  const std::vector<double> hidden = {-kInfinity, 0, 0};
  EXPECT_EQ(Fidelity(ValuesOf(p, {1, 3}), ValuesOf(hidden, {1, 3})).value().mean_kl, kInfinity);
  const std::vector<double> nothing = {-kInfinity, -kInfinity, -kInfinity}, bad = {0, NAN, 0};
  EXPECT_EQ(Failure(Fidelity(ValuesOf(p, {1, 3}), ValuesOf(nothing, {1, 3}))),
            "ERR_NON_FINITE logits: a position needs a logit that is not -Infinity, got position 0");
  EXPECT_EQ(Failure(Fidelity(ValuesOf(bad, {1, 3}), ValuesOf(p, {1, 3}))),
            "ERR_NON_FINITE reference: logits must be finite or -Infinity, got NaN at index 1");
}

TEST(MetricsTest, EqualLargestLogitsTakeTheFirst) {
  const std::vector<double> p = {2, 2, 1}, q = {2, 1, 2};
  EXPECT_EQ(Fidelity(ValuesOf(p, {1, 3}), ValuesOf(q, {1, 3})).value().top1, 1);
}

TEST(MetricsTest, KsDistance) {
  const std::vector<double> a = {1, 2, 3, 4}, b = {3.5, 4.5, 5.5, 6.5}, far = {10, 11};
  EXPECT_EQ(KsDistance(ValuesOf(a), ValuesOf(a), nullptr).value(), 0);
  EXPECT_EQ(KsDistance(ValuesOf(a), ValuesOf(b), nullptr).value(), 0.75);
  EXPECT_EQ(KsDistance(ValuesOf(b), ValuesOf(a), nullptr).value(), 0.75);
  EXPECT_EQ(KsDistance(ValuesOf(a), ValuesOf(far), nullptr).value(), 1);
  const std::vector<double> x = NumpyRandom(1).Normals(4000), y = NumpyRandom(2).Normals(3000);
  EXPECT_LT(KsDistance(ValuesOf(x), ValuesOf(y), nullptr).value(), 0.04);
}

TEST(MetricsTest, MemoryRatioOfTheStudy) {
  EXPECT_NEAR(MemoryRatio(4, 16, 8).value(), 3.556, 5e-4);
  EXPECT_NEAR(MemoryRatio(3, 16, 8).value(), 4.571, 5e-4);
  EXPECT_EQ(MemoryRatio(8, 1, 0).value(), 2);
}

TEST(MetricsTest, BadInput) {
  const std::vector<double> a = {1, 2, 3, 4}, bad = {1, 2, kInfinity, 4};
  EXPECT_EQ(Failure(Rmse(ValuesOf(a), ValuesOf(a, {2, 2}))), "ERR_SHAPE b: dims must be those of a, [4], got [2, 2]");
  EXPECT_EQ(Failure(Rmse(ValuesOf(a), ValuesOf(bad))), "ERR_NON_FINITE b: values must be finite, got Infinity at index 2");
  std::vector<double> errors(3, 7.0);
  EXPECT_EQ(Failure(ErrorPerToken(ValuesOf(a), ValuesOf(a), errors)), "ERR_BUFFER out: must hold one element per token, 4, got 3");
  EXPECT_EQ(errors, (std::vector<double>{7, 7, 7}));
  EXPECT_EQ(Failure(KsDistance(ValuesOf(bad), ValuesOf(a), nullptr)), "ERR_NON_FINITE a: values must be finite, got Infinity at index 2");
  EXPECT_EQ(Failure(MemoryRatio(0, 16, 8)), "ERR_ARGUMENT bits: must be finite and > 0, got 0");
  EXPECT_EQ(Failure(MemoryRatio(4, 0, 8)), "ERR_ARGUMENT block: must be finite and > 0, got 0");
  EXPECT_EQ(Failure(MemoryRatio(4, 16, -1)), "ERR_ARGUMENT scaleBits: must be finite and >= 0, got -1");
}

}  // namespace
}  // namespace kvpages
