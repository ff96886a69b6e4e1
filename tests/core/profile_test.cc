// SPDX-License-Identifier: Apache-2.0
// Sorted profiles against vectors made by mixle 0.8.2, its test inputs made anew, and hostile bytes.
#include "profile/profile.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "core/float.h"
#include "profile/special.h"
#include "support/numpy_random.h"
#include "support/tensors.h"

namespace kvpages {
namespace {

using test::Failure;
using test::JsonValue;
using test::NumpyRandom;
using test::ValuesOf;
using test::VectorFile;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

const VectorFile& Vectors() { return VectorFile::Load("mixle"); }

ProfileOptions OptionsOf(const JsonValue& parameters) {
  ProfileOptions options;
  options.top_k = parameters["top_k"].integer();
  options.threshold = parameters["threshold"].number;
  options.family = FindFamily(parameters["family"].text, "family").value();
  return options;
}

std::vector<int32_t> IndicesOf(const Bytes& indices, int width) {
  std::vector<int32_t> out;
  for (uint64_t i = 0; i < indices.size() / static_cast<uint64_t>(width); ++i) {
    out.push_back(static_cast<int32_t>(IndexAt(indices.data(), width, static_cast<int64_t>(i))));
  }
  return out;
}

std::vector<double> Restored(const Profile& profile) {
  std::vector<uint8_t> bytes(static_cast<size_t>(profile.count * ValueBytes(profile.source)));
  EXPECT_EQ(Failure(Reconstruct(profile, bytes.data())), "no error");
  const Values values{bytes.data(), profile.source, {profile.count}, profile.count};
  std::vector<double> out;
  for (int64_t i = 0; i < profile.count; ++i) out.push_back(values.At(i));
  return out;
}

std::vector<uint8_t> Serialized(const Profile& profile) {
  std::vector<uint8_t> bytes(ProfileBytes(profile));
  EXPECT_EQ(Failure(SerializeProfile(profile, bytes)), "no error");
  return bytes;
}

TEST(ProfileTest, MatchesTheVectors) {
  int cases = 0, payloads = 0;
  for (const auto& [name, parameters] : Vectors().cases()) {
    if (parameters["kind"].text != "profile" || !Vectors().has(name, "x")) continue;
    SCOPED_TRACE(name);
    ++cases;
    auto fitted = FitProfile(ValuesOf(Vectors().tensor(name, "x")), OptionsOf(parameters), nullptr);
    ASSERT_TRUE(fitted.ok()) << Failure(fitted);
    const Profile& profile = fitted.value();
    const bool gamma = parameters["family"].text == "gamma";
    EXPECT_EQ(profile.fallback, Vectors().one<uint8_t>(name, "fallback") != 0);
    EXPECT_EQ(profile.index_bytes, parameters["index_bytes"].integer());
    EXPECT_NEAR(profile.d, Vectors().one<double>(name, "d"), gamma ? 1e-8 : 1e-14);
    if (gamma) {
      EXPECT_NEAR(profile.tail.first / Vectors().one<double>(name, "k"), 1, 1e-7);
      EXPECT_NEAR(profile.tail.second / Vectors().one<double>(name, "theta"), 1, 1e-7);
    } else if (!std::isnan(Vectors().one<double>(name, "mu"))) {
      EXPECT_EQ(profile.tail.first, Vectors().one<double>(name, "mu"));
      EXPECT_EQ(profile.tail.second, Vectors().one<double>(name, "v"));
    }
    if (Vectors().has(name, "permutation")) {
      EXPECT_EQ(IndicesOf(profile.head, profile.index_bytes), Vectors().get<int32_t>(name, "head"));
      EXPECT_EQ(IndicesOf(profile.permutation, profile.index_bytes), Vectors().get<int32_t>(name, "permutation"));
    }
    const Values expected = ValuesOf(Vectors().tensor(name, "y"));
    const std::vector<double> restored = Restored(profile);
    for (int64_t i = 0; i < expected.count; ++i) {
      const double want = expected.At(i);
      ASSERT_NEAR(restored[static_cast<size_t>(i)], want, (gamma ? 1e-6 : 2e-7) * std::fabs(want)) << i;
    }
    if (Vectors().has(name, "payload")) {
      ++payloads;
      EXPECT_EQ(Serialized(profile), Vectors().get<uint8_t>(name, "payload"));
    }
    // The length depends on how many digits D and the parameters take.
    EXPECT_NEAR(static_cast<double>(ProfileBytes(profile)), static_cast<double>(Vectors().one<int64_t>(name, "nbytes")), gamma ? 8 : 2);
  }
  EXPECT_EQ(cases, 16);
  EXPECT_EQ(payloads, 7);
}

TEST(ProfileTest, FirstGenerationNumbers) {
  int cases = 0;
  for (const auto& [name, parameters] : Vectors().cases()) {
    if (!Vectors().has(name, "gen1_d") || !Vectors().has(name, "x")) continue;
    SCOPED_TRACE(name);
    ++cases;
    ProfileOptions options = OptionsOf(parameters);
    options.gen1 = true;
    auto fitted = FitProfile(ValuesOf(Vectors().tensor(name, "x")), options, nullptr);
    ASSERT_TRUE(fitted.ok()) << Failure(fitted);
    const Profile& profile = fitted.value();
    EXPECT_NEAR(profile.d, Vectors().one<double>(name, "gen1_d"), 1e-14);
    EXPECT_EQ(profile.fallback, Vectors().one<uint8_t>(name, "gen1_fallback") != 0);
    EXPECT_EQ(static_cast<int64_t>(ProfileBytes(profile)), Vectors().one<int64_t>(name, "gen1_nbytes"));
    if (!std::isnan(Vectors().one<double>(name, "gen1_mu"))) {
      EXPECT_EQ(profile.tail.first, Vectors().one<double>(name, "gen1_mu"));
      EXPECT_EQ(profile.tail.second, Vectors().one<double>(name, "gen1_v"));
    }
    std::vector<uint8_t> out(ProfileBytes(profile));
    EXPECT_EQ(Failure(SerializeProfile(profile, out)), "ERR_UNSUPPORTED profile: the first generation has no serialized form");
  }
  EXPECT_EQ(cases, 15);
}

// ---- The figures that mixle's own test inputs give ----

// 50 steps of Adam's second moments over normal gradients with heavy-tailed scales.
std::vector<double> AdamMoments(NumpyRandom& random, int64_t n) {
  std::vector<double> v(static_cast<size_t>(n), 0.0);
  for (int step = 0; step < 50; ++step) {
    std::vector<double> gradient = random.Normals(n);
    for (double& g : gradient) g *= 1 + 0.15 * std::fabs(random.StandardT(4));
    for (size_t i = 0; i < v.size(); ++i) v[i] = 0.98 * v[i] + (1 - 0.98) * (gradient[i] * gradient[i]);
  }
  return v;
}
std::vector<double> AdamMoments(uint32_t seed, int64_t n) {
  NumpyRandom random(seed);
  return AdamMoments(random, n);
}

Result<Profile> Fit(const std::vector<double>& data, int64_t top_k, TailFamily family = TailFamily::gaussian, bool gen1 = false) {
  ProfileOptions options;
  options.top_k = top_k;
  options.family = family;
  options.gen1 = gen1;
  return FitProfile(ValuesOf(data), options, nullptr);
}

TEST(ProfileTableTest, AdamSecondMoments) {
  const JsonValue& row = Vectors().about()["table"]["adam"];
  NumpyRandom random(0);
  const std::vector<double> v = AdamMoments(random, 16384);
  auto profile = Fit(v, 163, TailFamily::gamma);
  ASSERT_TRUE(profile.ok()) << Failure(profile);
  EXPECT_FALSE(profile.value().fallback);
  EXPECT_NEAR(profile.value().d, row["d"].number, 1e-8);
  EXPECT_NEAR(profile.value().d, 0.0057555, 5e-8);
  EXPECT_NEAR(profile.value().tail.first, row["k"].number, 1e-6);
  EXPECT_NEAR(profile.value().tail.second, row["theta"].number, 1e-9);
  EXPECT_NEAR(static_cast<double>(ProfileBytes(profile.value())), 34558, 6);
  EXPECT_EQ(ProfileBytes(Fit(v, 163, TailFamily::gamma, true).value()), 33488u);
  const std::vector<double> gradient = random.Normals(16384);
  const std::vector<double> y = Restored(profile.value());
  double gap = 0, norm = 0;
  for (size_t i = 0; i < v.size(); ++i) {
    const double g = gradient[i] * 0.1;
    const double a = g / (std::sqrt(v[i]) + 1e-8), b = g / (std::sqrt(std::max(y[i], 0.0)) + 1e-8);
    gap += (b - a) * (b - a);
    norm += a * a;
  }
  EXPECT_NEAR(std::sqrt(gap / norm), row["rel_l2"].number, 1e-8);
}

TEST(ProfileTableTest, Anomalies) {
  const JsonValue& row = Vectors().about()["table"]["anomaly"];
  auto reference = Fit(AdamMoments(1, 16384), 163, TailFamily::gamma);
  ASSERT_TRUE(reference.ok());
  EXPECT_NEAR(reference.value().d, row["d_ref"].number, 1e-8);
  std::vector<double> burst = AdamMoments(3, 16384), shifted = AdamMoments(5, 16384);
  for (const int64_t index : NumpyRandom(4).Choice(16384, 819)) burst[static_cast<size_t>(index)] += 50;
  for (double& x : shifted) x += 3;
  const std::vector<double> tensors[] = {AdamMoments(2, 16384), burst, shifted};
  for (size_t i = 0; i < 3; ++i) {
    SCOPED_TRACE(i);
    auto report = DetectAnomaly(ValuesOf(tensors[i]), reference.value(), 2.0, 0.02, nullptr);
    ASSERT_TRUE(report.ok());
    EXPECT_NEAR(report.value().d, row["d"][i].number, 1e-8);
    EXPECT_NEAR(report.value().limit, 0.028303, 5e-7);
    EXPECT_EQ(report.value().is_anomaly, row["flags"][i].truth());
  }
}

TEST(ProfileTableTest, TwoHumpsFallBack) {
  NumpyRandom random(6);
  std::vector<double> x = random.Normals(4096, -5, 0.3);
  const std::vector<double> second = random.Normals(4096, 5, 0.3);
  x.insert(x.end(), second.begin(), second.end());
  auto profile = Fit(x, 10);
  ASSERT_TRUE(profile.ok());
  EXPECT_TRUE(profile.value().fallback);
  EXPECT_NEAR(profile.value().d, Vectors().about()["table"]["bimodal"]["d"].number, 1e-14);
  EXPECT_EQ(Restored(profile.value()), x);
}

TEST(ProfileTableTest, Normals) {
  const struct {
    uint32_t seed;
    int64_t n, top_k;
    const char* row;
  } cases[] = {{7, 8192, 10, "normal-7"}, {8, 4096, 32, "normal-8"}, {9, 16384, 16, "normal-9"}};
  for (const auto& c : cases) {
    SCOPED_TRACE(c.row);
    const JsonValue& row = Vectors().about()["table"][c.row];
    const std::vector<double> x = NumpyRandom(c.seed).Normals(c.n);
    auto fitted = Fit(x, c.top_k);
    ASSERT_TRUE(fitted.ok());
    const Profile& profile = fitted.value();
    EXPECT_FALSE(profile.fallback);
    EXPECT_NEAR(profile.d, row["d"].number, 1e-14);
    EXPECT_EQ(profile.tail.first, row["mu"].number);
    EXPECT_EQ(profile.tail.second, row["v"].number);
    EXPECT_NEAR(static_cast<double>(ProfileBytes(profile)), row["nbytes"].number, 2);
    EXPECT_EQ(static_cast<double>(ProfileBytes(Fit(x, c.top_k, TailFamily::gaussian, true).value())), row["gen1_nbytes"].number);
    const std::vector<double> y = Restored(profile);
    // Ranks are kept, so sorted profiles differ as the elements do.
    double sum = 0, mean = 0, square = 0;
    for (const int32_t i : IndicesOf(profile.permutation, profile.index_bytes)) {
      const double gap = x[static_cast<size_t>(i)] - y[static_cast<size_t>(i)];
      sum += gap * gap;
    }
    for (const double value : x) mean += value / static_cast<double>(c.n);
    for (const double value : x) square += (value - mean) * (value - mean) / static_cast<double>(c.n);
    EXPECT_NEAR(std::sqrt(sum / static_cast<double>(profile.n_tail)) / std::sqrt(square), row["rmse_over_std"].number, 1e-12);
    for (const int32_t i : IndicesOf(profile.head, profile.index_bytes)) EXPECT_EQ(y[static_cast<size_t>(i)], x[static_cast<size_t>(i)]);
  }
}

// ---- Bytes ----

TEST(MspqTest, PayloadsReadAndWriteBack) {
  int payloads = 0;
  for (const auto& [name, parameters] : Vectors().cases()) {
    if (!Vectors().has(name, "payload")) continue;
    SCOPED_TRACE(name);
    ++payloads;
    const std::vector<uint8_t> bytes = Vectors().get<uint8_t>(name, "payload");
    auto parsed = ParseProfile(bytes, nullptr);
    ASSERT_TRUE(parsed.ok()) << Failure(parsed);
    EXPECT_EQ(Serialized(parsed.value()), bytes);
    auto fitted = FitProfile(ValuesOf(Vectors().tensor(name, "x")), OptionsOf(parameters), nullptr);
    EXPECT_EQ(Restored(parsed.value()), Restored(fitted.value()));
  }
  EXPECT_EQ(payloads, 7);
}

TEST(MspqTest, RoundTripsOfOwnProfiles) {
  for (const TailFamily family : {TailFamily::gaussian, TailFamily::gamma}) {
    for (const int64_t n : {2, 256, 257, 65536, 65537}) {
      SCOPED_TRACE(n);
      std::vector<double> x = NumpyRandom(11).Normals(n);
      for (double& value : x) value = std::exp(value);
      ProfileOptions options;
      options.threshold = 1;
      options.family = family;
      options.top_k = n > 2 ? 3 : 0;
      auto fitted = FitProfile(ValuesOf(x), options, nullptr);
      ASSERT_TRUE(fitted.ok()) << Failure(fitted);
      EXPECT_EQ(fitted.value().index_bytes, n <= 256 ? 1 : n <= 65536 ? 2 : 4);
      const std::vector<uint8_t> bytes = Serialized(fitted.value());
      auto parsed = ParseProfile(bytes, nullptr);
      ASSERT_TRUE(parsed.ok()) << Failure(parsed);
      EXPECT_EQ(Serialized(parsed.value()), bytes);
      EXPECT_EQ(Restored(parsed.value()), Restored(fitted.value()));
    }
  }
}

TEST(MspqTest, TruncationIsRefusedAtEveryByte) {
  const std::vector<uint8_t> bytes = Vectors().get<uint8_t>("tiny-float32", "payload");
  for (size_t length = 0; length < bytes.size(); ++length) {
    const std::vector<uint8_t> part(bytes.begin(), bytes.begin() + static_cast<int64_t>(length));
    EXPECT_FALSE(ParseProfile(part, nullptr).ok()) << length;
  }
  std::vector<uint8_t> longer = bytes;
  longer.push_back(0);
  EXPECT_FALSE(ParseProfile(longer, nullptr).ok());
}

TEST(MspqTest, DamagedBitsAreRefusedOrGiveAValidProfile) {
  for (const char* name : {"tiny-float32", "profile-constant"}) {
    const std::vector<uint8_t> bytes = Vectors().get<uint8_t>(name, "payload");
    for (size_t bit = 0; bit < bytes.size() * 8; ++bit) {
      std::vector<uint8_t> damaged = bytes;
      damaged[bit / 8] ^= static_cast<uint8_t>(1u << bit % 8);
      auto parsed = ParseProfile(damaged, nullptr);
      if (!parsed.ok()) {
        EXPECT_TRUE(parsed.error().byte_offset.has_value()) << bit;
        continue;
      }
      std::vector<uint8_t> out(static_cast<size_t>(parsed.value().count * ValueBytes(parsed.value().source)));
      const Status status = Reconstruct(parsed.value(), out.data());
      EXPECT_TRUE(status.ok() || status.error().code == Code::kNonFinite);
      EXPECT_TRUE(ParseProfile(Serialized(parsed.value()), nullptr).ok()) << bit;
    }
  }
}

std::vector<uint8_t> WithMetadata(std::string metadata, size_t array_bytes) {
  std::vector<uint8_t> bytes = {'M', 'S', 'P', 'Q', 1};
  for (int i = 0; i < 4; ++i) bytes.push_back(static_cast<uint8_t>(metadata.size() >> 8 * i));
  bytes.insert(bytes.end(), metadata.begin(), metadata.end());
  bytes.resize(bytes.size() + array_bytes);
  return bytes;
}

TEST(MspqTest, HostileMetadata) {
  const std::string good =
      R"({"goodness_of_fit":0.5,"index_dtype":"|u1","n_tail":0,"shape":[2,2],"source_dtype":"<f4","tail_distribution":null,"used_dense_fallback":true})";
  ASSERT_TRUE(ParseProfile(WithMetadata(good, 16), nullptr).ok());
  const auto replaced = [&](const std::string& from, const std::string& to) {
    std::string text = good;
    text.replace(text.find(from), from.size(), to);
    return Failure(ParseProfile(WithMetadata(text, 16), nullptr));
  };
  EXPECT_EQ(replaced("[2,2]", "[4294967296,4294967296]"),
            "ERR_CORRUPT bytes: the shape must have 1 to 4294967296 elements at byte 9, got [4294967296, 4294967296]");
  EXPECT_EQ(replaced("[2,2]", "[0,2]"), "ERR_CORRUPT bytes: the shape must have 1 to 4294967296 elements at byte 9, got [0, 2]");
  EXPECT_EQ(replaced("[2,2]", "[2,3]"), "ERR_CORRUPT bytes: the arrays must end with the bytes, at byte 174, and begin at byte 150, got 166 bytes");
  EXPECT_EQ(replaced("[2,2]", "[-4]").substr(0, 60), "ERR_CORRUPT bytes: the metadata must be valid JSON of a prof");
  EXPECT_EQ(replaced("0.5", "1.5"), "ERR_CORRUPT bytes: goodness_of_fit must lie between 0 and 1 at byte 9, got 1.5");
  EXPECT_EQ(replaced("0.5", "NaN").substr(0, 11), "ERR_CORRUPT");
  EXPECT_EQ(replaced("<f4", ">f4"), "ERR_UNSUPPORTED bytes: source_dtype must be <f8, <f4 or <f2, got >f4");
  EXPECT_EQ(replaced("|u1", "<u2"), "ERR_CORRUPT bytes: index_dtype must be |u1 at byte 9, got <u2");
  EXPECT_EQ(replaced("\"n_tail\":0", "\"n_tail\":2").substr(0, 11), "ERR_CORRUPT");
  EXPECT_EQ(replaced("\"n_tail\":0,", "").substr(0, 55), "ERR_CORRUPT bytes: the metadata lacks a field at byte 9");
  EXPECT_EQ(replaced("true}", "true,\"more\":1}").substr(0, 11), "ERR_CORRUPT");
  EXPECT_EQ(replaced("null", "[[[[").substr(0, 11), "ERR_CORRUPT");
  std::vector<uint8_t> bytes = WithMetadata(good, 16);
  bytes[4] = 2;
  EXPECT_EQ(Failure(ParseProfile(bytes, nullptr)), "ERR_UNSUPPORTED bytes: the version must be 1, got 2");
  bytes[4] = 1;
  bytes[0] = 'X';
  EXPECT_EQ(Failure(ParseProfile(bytes, nullptr)), "ERR_CORRUPT bytes: a profile begins with MSPQ at byte 0");
  bytes = WithMetadata(good, 16);
  bytes[bytes.size() - 1] = 0x7f;
  bytes[bytes.size() - 2] = 0x80;
  EXPECT_EQ(Failure(ParseProfile(bytes, nullptr)), "ERR_CORRUPT bytes: values must be finite at byte 162, got Infinity");
}

TEST(MspqTest, IndicesMustNameEveryElementOnce) {
  std::vector<uint8_t> bytes = Vectors().get<uint8_t>("tiny-float32", "payload");
  bytes[bytes.size() - 1] = bytes[bytes.size() - 2];
  EXPECT_EQ(Failure(ParseProfile(bytes, nullptr)).substr(0, 68), "ERR_CORRUPT bytes: head and tail indices must name every element onc");
  bytes[bytes.size() - 1] = 8;
  EXPECT_FALSE(ParseProfile(bytes, nullptr).ok());
}

// ---- Bad input and edges ----

TEST(ProfileTest, BadInput) {
  const std::vector<double> x = {1, 2, 3};
  const auto fit = [&](auto change) {
    ProfileOptions options;
    change(options);
    return Failure(FitProfile(ValuesOf(x), options, nullptr));
  };
  EXPECT_EQ(fit([](ProfileOptions& o) { o.top_k = 4; }), "ERR_ARGUMENT topK: must lie between 0 and the 3 elements, got 4");
  EXPECT_EQ(fit([](ProfileOptions& o) { o.top_k = -1; }), "ERR_ARGUMENT topK: must lie between 0 and the 3 elements, got -1");
  EXPECT_EQ(fit([](ProfileOptions& o) { o.threshold = 1.1; }), "ERR_ARGUMENT threshold: must lie between 0 and 1, got 1.1");
  EXPECT_EQ(fit([](ProfileOptions& o) { o.threshold = NAN; }), "ERR_ARGUMENT threshold: must lie between 0 and 1, got NaN");
  const std::vector<double> bad = {1, NAN, kInfinity};
  EXPECT_EQ(Failure(FitProfile(ValuesOf(bad), {}, nullptr)), "ERR_NON_FINITE tensor: values must be finite, got NaN at index 1");
  const std::vector<double> huge = {1e308, -1e308, 1e308};
  ProfileOptions open;
  open.threshold = 1;
  EXPECT_EQ(Failure(FitProfile(ValuesOf(huge), open, nullptr)).substr(0, 65), "ERR_NON_FINITE tensor: its moments must be finite float64 values,");
  ProfileOptions gamma;
  gamma.family = TailFamily::gamma;
  const std::vector<double> zero = {1, 2, 0};
  EXPECT_EQ(Failure(FitProfile(ValuesOf(zero), gamma, nullptr)), "ERR_ARGUMENT tensor: the gamma family needs tail values > 0, got 0 at index 2");
  EXPECT_EQ(Failure(MakeValues(nullptr, 0, "f32", std::vector<int64_t>{0, 3}, "tensor")), "ERR_SHAPE tensor: must not be empty, got dims [0, 3]");
  EXPECT_EQ(Failure(MakeValues(nullptr, 8, "f32", std::vector<int64_t>{3}, "tensor")), "ERR_SHAPE tensor: dims [3] need 12 bytes of f32, got 8 bytes");
  EXPECT_EQ(Failure(MakeValues(nullptr, 8, "int8", std::vector<int64_t>{8}, "tensor")), "ERR_ARGUMENT tensor: type must be f64, f32, f16 or bf16, got int8");
}

TEST(ProfileTest, TooFewTailValuesFallBack) {
  const std::vector<double> x = {1, -7, 3};
  for (const int64_t top_k : {2, 3}) {
    auto profile = Fit(x, top_k);
    ASSERT_TRUE(profile.ok());
    EXPECT_TRUE(profile.value().fallback);
    EXPECT_EQ(profile.value().d, 1);
    EXPECT_EQ(profile.value().n_tail, 0);
    EXPECT_EQ(Restored(profile.value()), x);
    EXPECT_EQ(Failure(DetectAnomaly(ValuesOf(x), profile.value(), 2, 0.02, nullptr)),
              "ERR_ARGUMENT reference: must have a fitted tail; this profile fell back to dense values");
  }
}

TEST(ProfileTest, HalfPrecisionSourcesKeepTheirType) {
  std::vector<uint16_t> half;
  for (const double x : NumpyRandom(3).Normals(512)) half.push_back(ToF16(static_cast<float>(x)));
  const Values f16{reinterpret_cast<const uint8_t*>(half.data()), ValueType::f16, {512}, 512};
  auto fitted = FitProfile(f16, {}, nullptr);
  ASSERT_TRUE(fitted.ok());
  EXPECT_EQ(fitted.value().source, ValueType::f16);
  EXPECT_FALSE(fitted.value().fallback);
  Values bf16 = f16;
  bf16.type = ValueType::bf16;
  EXPECT_EQ(FitProfile(bf16, {}, nullptr).value().source, ValueType::f32);
}

TEST(ProfileTest, ABudgetThatIsTooSmallIsAnError) {
  const std::vector<double> x = NumpyRandom(3).Normals(4096);
  auto budget = std::make_shared<Budget>(1000);
  auto fitted = FitProfile(ValuesOf(x), {}, budget);
  ASSERT_FALSE(fitted.ok());
  EXPECT_EQ(fitted.error().code, Code::kLimit);
  EXPECT_EQ(budget->used(), 0u);
}

// ---- Special functions, against values of mpmath at 40 digits ----

TEST(SpecialTest, AgreesWithHighPrecision) {
  const auto near = [](double got, double want, double tolerance) { EXPECT_NEAR(got, want, tolerance * std::fabs(want)); };
  near(NormalCdf(-8.5), 9.4795348222033183542e-18, 2e-14);
  near(NormalCdf(-3), 0.0013498980316300945267, 2e-14);
  near(NormalCdf(-1), 0.15865525393145705141, 2e-14);
  near(NormalCdf(-0.25), 0.40129367431707627576, 2e-14);
  near(NormalCdf(0), 0.5, 2e-14);
  near(NormalCdf(0.7), 0.75803634777692698525, 2e-14);
  near(NormalCdf(2), 0.9772498680518207928, 2e-14);
  near(NormalCdf(6), 0.99999999901341235496, 2e-14);
  near(NormalQuantile(1e-300), -37.047096299361199237, 2e-15);
  near(NormalQuantile(1e-12), -7.0344838253011319326, 2e-15);
  near(NormalQuantile(0.001), -3.0902323061678135354, 2e-15);
  near(NormalQuantile(0.075), -1.4395314709384559349, 2e-15);
  near(NormalQuantile(0.3), -0.52440051270804081597, 2e-15);
  near(NormalQuantile(0.6), 0.25334710313579974132, 2e-15);
  near(NormalQuantile(0.99), 2.3263478740408407676, 2e-15);
  near(Digamma(1e-12), -1000000000000.5772358, 2e-15);
  near(Digamma(0.1), -10.423754940411076232, 2e-15);
  near(Digamma(0.5), -1.9635100260214234794, 2e-15);
  near(Digamma(1), -0.57721566490153286061, 2e-15);
  near(Digamma(2.5), 0.70315664064524318723, 2e-15);
  near(Digamma(9.75), 2.225109535044576012, 2e-15);
  near(Digamma(10), 2.2517525890667211076, 2e-15);
  near(Digamma(1000), 6.9072551956488120521, 2e-15);
  near(Digamma(1e9), 20.723265836446411156, 2e-15);
  near(LogGamma(1e-12), 27.631021115927971013, 4e-15);
  near(LogGamma(0.1), 2.252712651734205902, 4e-15);
  near(LogGamma(0.5), 0.57236494292470008707, 4e-15);
  near(LogGamma(2.5), 0.28468287047291915963, 1e-14);
  near(LogGamma(9.75), 12.242204940050762559, 4e-15);
  near(LogGamma(10), 12.801827480081469611, 4e-15);
  near(LogGamma(1000), 5905.2204232091812118, 4e-15);
  near(LogGamma(1e9), 19723265827.503716771, 4e-15);
  near(GammaCdf(0.001, 0.5), 0.99943993334352925011, 1e-14);
  near(GammaCdf(0.5, 0.1), 0.34527915398142297956, 1e-14);
  near(GammaCdf(0.5, 4), 0.99532226501895273416, 1e-14);
  near(GammaCdf(1, 1), 0.6321205588285576784, 1e-14);
  near(GammaCdf(3.7, 2.5), 0.29854513070091980821, 1e-14);
  near(GammaCdf(9.9, 15), 0.93407308968804188444, 1e-14);
  near(GammaCdf(22.4, 13), 0.011067334802180903407, 1e-14);
  near(GammaCdf(22.4, 30), 0.93600476336454838367, 1e-14);
  near(GammaCdf(100, 120), 0.97213626010947933852, 1e-14);
  near(GammaCdf(2500, 2450), 0.15863888966777124785, 1e-14);
  near(GammaCdf(9999, 10100), 0.84375241970504167145, 1e-14);
  near(GammaCdf(10001, 9900), 0.1562396180848250501, 1e-14);
}

TEST(SpecialTest, LogGammaIsWhatReadersOfProfilesCompareWith) {
  // mixle refuses a Gamma tail whose stored constant is not its own to the last bit. k, theta and constant of a file that it wrote.
  EXPECT_EQ(-(LogGamma(1.6496151775830854) + 1.6496151775830854 * std::log(3.1711364373073025)), -1.798509054891411);
}

TEST(SpecialTest, QuantilesInvert) {
  for (int i = 1; i < 400; ++i) {
    const double p = i / 400.0;
    EXPECT_NEAR(NormalCdf(NormalQuantile(p)), p, 1e-15);
    for (const double a : {0.05, 0.7, 1.0, 3.3, 22.4, 9999.0, 10001.0, 1e8}) {
      EXPECT_NEAR(GammaCdf(a, GammaQuantile(a, p)), p, 1e-14 + 4e-16 * std::sqrt(a)) << a;  // an ulp of x
    }
  }
  EXPECT_EQ(NormalQuantile(0), -kInfinity);
  EXPECT_EQ(NormalQuantile(1), kInfinity);
  EXPECT_EQ(GammaQuantile(2, 0), 0);
  EXPECT_EQ(GammaQuantile(2, 1), kInfinity);
  EXPECT_EQ(GammaCdf(2, -1), 0);
}

}  // namespace
}  // namespace kvpages
