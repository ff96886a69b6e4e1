// SPDX-License-Identifier: Apache-2.0
// One-scale int8 and fp8 of a tensor against vectors made by mixle 0.8.2.
#include "profile/kv_quant.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "support/tensors.h"

namespace kvpages {
namespace {

using test::Failure;
using test::ValuesOf;
using test::VectorFile;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
const VectorFile& Vectors() { return VectorFile::Load("mixle"); }

TEST(MixleTest, MatchesTheVectors) {
  int cases = 0, with_values = 0;
  for (const auto& [name, parameters] : Vectors().cases()) {
    const std::string& kind = parameters["kind"].text;
    if (kind != "int8" && kind != "fp8") continue;
    SCOPED_TRACE(name);
    ++cases;
    const KvMode mode = FindKvMode(kind, "mode").value();
    const Values x = ValuesOf(Vectors().tensor(name, "x"));
    std::vector<uint8_t> codes(static_cast<size_t>(x.count));
    auto scale = QuantizeKv(x, mode, false, codes, "tensor");
    ASSERT_TRUE(scale.ok()) << Failure(scale);
    EXPECT_EQ(scale.value(), Vectors().one<double>(name, "scale"));
    EXPECT_EQ(codes, Vectors().get<uint8_t>(name, "codes"));
    if (mode == KvMode::fp8) {
      auto first = QuantizeKv(x, mode, true, codes, "tensor");
      ASSERT_TRUE(first.ok());
      EXPECT_EQ(first.value(), 1);
      EXPECT_EQ(codes, Vectors().get<uint8_t>(name, "gen1_codes"));
    }
    if (!Vectors().has(name, "y")) continue;
    ++with_values;
    std::vector<float> y(codes.size());
    ASSERT_EQ(Failure(DequantizeKv(Vectors().get<uint8_t>(name, "codes"), scale.value(), mode, y)), "no error");
    const std::vector<float> want = Vectors().get<float>(name, "y");
    EXPECT_EQ(std::memcmp(y.data(), want.data(), want.size() * sizeof(float)), 0);
    const std::vector<double> exact = Vectors().get<double>(name, "error_per_token_f64");
    std::vector<double> errors(exact.size());
    ASSERT_EQ(Failure(KvErrorPerToken(x, mode, false, errors, nullptr)), "no error");
    for (size_t i = 0; i < exact.size(); ++i) EXPECT_NEAR(errors[i], exact[i], 1e-5 * exact[i] + 1e-300) << i;
  }
  EXPECT_EQ(cases, 24);
  EXPECT_EQ(with_values, 24);
}

TEST(MixleTest, FirstGenerationInt8IsTheSame) {
  const Values x = ValuesOf(Vectors().tensor("int8-normal", "x"));
  std::vector<uint8_t> codes(static_cast<size_t>(x.count));
  EXPECT_EQ(QuantizeKv(x, KvMode::int8, true, codes, "tensor").value(), Vectors().one<double>("int8-normal", "scale"));
  EXPECT_EQ(codes, Vectors().get<uint8_t>("int8-normal", "codes"));
}

TEST(MixleTest, LargeValuesStayFiniteInFp8) {
  const std::vector<float> x = {100000, -100000, 30000, 1};
  std::vector<uint8_t> codes(4);
  auto scale = QuantizeKv(ValuesOf(x), KvMode::fp8, false, codes, "tensor");
  ASSERT_TRUE(scale.ok());
  EXPECT_GT(scale.value(), 1);
  std::vector<float> y(4);
  ASSERT_EQ(Failure(DequantizeKv(codes, scale.value(), KvMode::fp8, y)), "no error");
  for (size_t i = 0; i < 3; ++i) EXPECT_NEAR(y[i] / x[i], 1, 0.05f);
  auto first = QuantizeKv(ValuesOf(x), KvMode::fp8, true, codes, "tensor");
  ASSERT_EQ(Failure(DequantizeKv(codes, first.value(), KvMode::fp8, y)), "no error");
  EXPECT_TRUE(std::isnan(y[0]));
  EXPECT_EQ(y[3], 1);
}

TEST(MixleTest, AVanishingScaleIsThatOfZeros) {
  // 1e-45 / 127 is 0 in f32: mixle then makes codes that it refuses to decode.
  const std::vector<float> x = {1e-45f, 0, -1e-45f};
  std::vector<uint8_t> codes(3);
  auto scale = QuantizeKv(ValuesOf(x), KvMode::int8, false, codes, "tensor");
  EXPECT_EQ(scale.value(), 1);
  EXPECT_EQ(codes, (std::vector<uint8_t>{0, 0, 0}));
}

TEST(MixleTest, BadInput) {
  std::vector<uint8_t> codes = {1, 2, 3};
  const auto quantize = [&](std::vector<double> x) { return Failure(QuantizeKv(ValuesOf(x), KvMode::int8, false, codes, "tensor")); };
  EXPECT_EQ(quantize({1, NAN, kInfinity}), "ERR_NON_FINITE tensor: values must be finite, got NaN at index 1");
  EXPECT_EQ(quantize({1, 2, -kInfinity}), "ERR_NON_FINITE tensor: values must be finite, got -Infinity at index 2");
  EXPECT_EQ(quantize({1, 1e300, 2}), "ERR_NON_FINITE tensor: values must fit f32, got 1e+300 at index 1");
  EXPECT_EQ(quantize({1, 2}), "ERR_BUFFER codes: must hold 2 codes, got 3");
  EXPECT_EQ(codes, (std::vector<uint8_t>{1, 2, 3}));
  std::vector<float> out = {7, 7, 7};
  const auto dequantize = [&](double scale) { return Failure(DequantizeKv(codes, scale, KvMode::int8, out)); };
  for (const double scale : {0.0, -1.0, kInfinity, static_cast<double>(NAN), 1e-60, 1e60}) {
    EXPECT_EQ(dequantize(scale), "ERR_ARGUMENT scale: must be finite and > 0 as f32, got " + Text(scale));
  }
  EXPECT_EQ(out, (std::vector<float>{7, 7, 7}));
  EXPECT_EQ(Failure(DequantizeKv({}, 1, KvMode::int8, {})), "ERR_SHAPE codes: must not be empty");
  EXPECT_EQ(Failure(FindKvMode("int4", "mode")), "ERR_ARGUMENT mode: must be 'int8' or 'fp8', got int4");
  EXPECT_EQ(Failure(IsGen1("gen3", "compat")), "ERR_ARGUMENT compat: must be 'gen1' or 'gen2', got gen3");
}

}  // namespace
}  // namespace kvpages
