// SPDX-License-Identifier: Apache-2.0
// Every vector target of this processor against the reference, byte for byte.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "backends/reference/reference.h"
#include "backends/simd/simd.h"
#include "core/float.h"
#include "formats/levels.h"
#include "support/payloads.h"

namespace kvpages {
namespace {

using test::BytesOf;

class Simd : public ::testing::TestWithParam<const Backend*> {
 protected:
  void SetUp() override {
    if (!GetParam()->available()) GTEST_SKIP() << "skipped: this processor has no " << GetParam()->name;
    ASSERT_NE(GetParam()->quantize, kReferenceBackend.quantize) << "the vector backend must run its own code";
  }
};

// Values with everything that codes may meet: several magnitudes, ties, zeros of both signs, subnormals, outliers.
std::vector<float> Values(std::mt19937& random, int64_t count) {
  std::normal_distribution<float> normal;
  std::vector<float> x(static_cast<size_t>(count));
  const int kind = static_cast<int>(random() % 8);
  for (float& v : x) {
    v = normal(random);
    switch (kind) {
      case 0: v = std::nearbyint(v * 4) * 0.25f; break;                // ties
      case 1: v = random() % 16 == 0 ? v * 30 : v; break;              // outliers
      case 2: v = std::ldexp(v, -static_cast<int>(random() % 150)); break;  // down to subnormals
      case 3: v = random() % 3 == 0 ? (random() % 2 ? 0.0f : -0.0f) : v; break;
      case 4: v = v + 5; break;                                        // an offset
      case 5: v = std::ldexp(v, static_cast<int>(random() % 60)); break;
      case 6: v = random() % 64 ? 0.0f : v; break;                     // whole blocks of zeros
      default: break;
    }
  }
  return x;
}

void ExpectSame(const test::Encoded& got, const test::Encoded& want) {
  ASSERT_EQ(test::DifferenceOf(BytesOf(got.scales), BytesOf(want.scales)), "") << "scales";
  ASSERT_EQ(test::DifferenceOf(BytesOf(got.zeros), BytesOf(want.zeros)), "") << "zero points";
  ASSERT_EQ(BitsOf(got.global), BitsOf(want.global)) << "global scale";
  ASSERT_EQ(test::DifferenceOf(BytesOf(got.codes), BytesOf(want.codes)), "") << "codes";
}

Shape RandomShape(std::mt19937& random, int64_t multiple) {
  const int64_t widths[] = {1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 80, 96, 128, 129, 520};
  int64_t width = widths[random() % std::size(widths)];
  if (multiple > 1) width = (width + multiple - 1) / multiple * multiple;
  return {1 + static_cast<int64_t>(random() % 2), 1 + static_cast<int64_t>(random() % 3), 1 + static_cast<int64_t>(random() % 35), width};
}

// Under sanitizers everything is slow: fewer shapes there.
#if defined(__SANITIZE_ADDRESS__)
constexpr int kShapes = 6;
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
constexpr int kShapes = 6;
#else
constexpr int kShapes = 200;
#endif
#else
constexpr int kShapes = 200;
#endif

TEST(SimdTargets, EverySpecOverRandomShapes) {
  std::mt19937 random(7);
  const auto specs = AllSpecs();
  ASSERT_GT(specs.size(), 100u);
  std::vector<const Backend*> targets;
  for (const Backend* backend : SimdBackends()) {
    if (backend->available()) targets.push_back(backend);
  }
  ASSERT_FALSE(targets.empty());
  int64_t compared = 0;
  for (const std::string& text : specs) {
    const Spec parsed = ParseSpec(text, "spec").value();
    const TypeInfo& info = Info(parsed.type);
    if (info.family == Family::kDense) continue;  // DenseConversionsOfEveryPattern
    for (int round = 0; round < kShapes; ++round) {
      Shape shape = RandomShape(random, info.block);
      // Mostly small, so that many shapes fit; now and then large enough for every buffer to be flushed.
      const int64_t most = round % 50 == 0 && parsed.calibration != Calibration::kMse ? 20000 : 300;
      if (shape.elements() > most) shape = {1, shape.width < 100 ? shape.heads : 1, std::max<int64_t>(1, most / (shape.heads * shape.width)), shape.width};
      const bool rotate = round % 2 == 1;
      SCOPED_TRACE(text + (rotate ? "+hadamard " : " ") + Text(shape));
      const auto x = Values(random, shape.elements());
      const int64_t valid = round % 3 == 2 ? 1 + static_cast<int64_t>(random() % static_cast<uint64_t>(shape.tokens)) : shape.tokens;
      const std::string spec = text + (rotate ? "+hadamard" : "");
      test::Given given;
      if (parsed.calibration == Calibration::kGiven) {
        const auto count = static_cast<size_t>(ScaleGrid(ResolveSpec(parsed, shape.width, "").value(), shape).count);
        for (size_t i = 0; i < count; ++i) given.scales.push_back(std::ldexp(1.0f + 0.001f * static_cast<float>(random() % 999), static_cast<int>(random() % 5) - 3));
        for (size_t i = 0; i < count && info.family == Family::kInteger; ++i) {
          given.zeros.push_back(static_cast<uint8_t>(static_cast<int>(random() % (1u << info.bits)) - (info.is_signed ? 1 << (info.bits - 1) : 0)));
        }
      }
      const auto want = test::Quantize(kReferenceBackend, spec, shape, x.data(), Type::f32, valid, {}, given);
      const auto restored = test::Dequantize(kReferenceBackend, want);
      const int64_t begin = static_cast<int64_t>(random() % static_cast<uint64_t>(shape.tokens));
      const auto part = test::Dequantize(kReferenceBackend, want, begin, shape.tokens);
      for (const Backend* target : targets) {
        SCOPED_TRACE(target->name);
        ExpectSame(test::Quantize(*target, spec, shape, x.data(), Type::f32, valid, {}, given), want);
        if (::testing::Test::HasFatalFailure()) return;
        ASSERT_EQ(test::Difference(test::Dequantize(*target, want), restored), "") << "restored";
        ASSERT_EQ(test::Difference(test::Dequantize(*target, want, begin, shape.tokens), part), "") << "restored from " << begin;
      }
      ++compared;
    }
  }
  EXPECT_GT(compared, int64_t{500} * kShapes);
}

TEST_P(Simd, HalvesWithCentre) {
  std::mt19937 random(8);
  for (const char* text : {"lm4/token/64/mse/e4m3", "int4/channel/16/absmax/e4m3", "int8/token", "int3/channel/16/mse/f16", "e4m3/tensor", "nvfp4", "uint4/channel/16/mse/e4m3"}) {
    for (const Type type : {Type::f16, Type::bf16}) {
      const Shape shape{1, 3, 37, 64};
      SCOPED_TRACE(std::string(text) + " from " + std::string(Info(type).name));
      const auto x = Values(random, shape.elements());
      std::vector<uint16_t> halves(x.size()), center(3 * 64);
      for (size_t i = 0; i < x.size(); ++i) halves[i] = type == Type::f16 ? ToF16(std::clamp(x[i], -6e4f, 6e4f)) : ToBF16(x[i]);
      for (auto& c : center) c = ToBF16(static_cast<float>(random() % 100) * 0.03f - 1.5f);
      for (const bool centred : {false, true}) {
        const std::string spec = std::string(text) + (centred ? "+center+hadamard" : "");
        const auto used = centred ? center : std::vector<uint16_t>();
        const auto want = test::Quantize(kReferenceBackend, spec, shape, halves.data(), type, 33, {}, {}, used);
        const auto got = test::Quantize(*GetParam(), spec, shape, halves.data(), type, 33, {}, {}, used);
        ExpectSame(got, want);
        ASSERT_EQ(test::Difference(test::Dequantize(*GetParam(), want), test::Dequantize(kReferenceBackend, want)), "");
      }
    }
  }
}

// Every length from 1 to four vectors, so that each tail and each odd count of codes is met.
TEST_P(Simd, EveryLengthWithGivenScales) {
  std::mt19937 random(9);
  for (const char* text : {"int8/tensor/given", "uint8/tensor/given", "int4/tensor/given", "uint4/tensor/given", "int3/tensor/given", "uint3/tensor/given",
                           "int2/tensor/given", "uint2/tensor/given", "e4m3/tensor/given", "e5m2/tensor/given", "e2m1/tensor/given"}) {
    for (int64_t length = 1; length <= 4 * 64 + 3; ++length) {
      SCOPED_TRACE(std::string(text) + " x " + std::to_string(length));
      auto x = Values(random, length + 1);
      x[static_cast<size_t>(random()) % static_cast<size_t>(length)] = 1e30f;  // saturates
      const Shape shape{1, 1, 1, length};
      const bool integer = Info(ParseSpec(text, "").value().type).family == Family::kInteger;
      const bool is_signed = Info(ParseSpec(text, "").value().type).is_signed;
      test::Given given{{0.25f}, integer ? std::vector<uint8_t>{static_cast<uint8_t>(is_signed ? -1 : 1)} : std::vector<uint8_t>{}};
      for (const int64_t offset : {0, 1}) {  // misaligned sources too
        const auto want = test::Quantize(kReferenceBackend, text, shape, x.data() + offset, Type::f32, -1, {}, given);
        const auto got = test::Quantize(*GetParam(), text, shape, x.data() + offset, Type::f32, -1, {}, given);
        ExpectSame(got, want);
        ASSERT_EQ(test::Difference(test::Dequantize(*GetParam(), want), test::Dequantize(kReferenceBackend, want)), "");
        if (HasFatalFailure()) return;
      }
    }
  }
}

// Quotients at the border between two codes and at most three floats away from it, where shortcuts round wrongly.
TEST_P(Simd, NeighboursOfBorders) {
  std::mt19937 random(11);
  for (const char* text : {"int8/tensor/given", "uint8/tensor/given", "int4/tensor/given", "int3/token/given", "e4m3/tensor/given", "e2m1/tensor/given",
                           "lm4/token", "int8/token", "uint8/token/64/minmax/f32", "int4/channel/16", "e4m3/token", "nvfp4", "q8_0", "mxfp4"}) {
    const Spec spec = ParseSpec(text, "").value();
    const TypeInfo& info = Info(spec.type);
    for (int round = 0; round < 40; ++round) {
      SCOPED_TRACE(std::string(text) + " " + std::to_string(round));
      const Shape shape{1, 1, 16, 128};
      const float scale = std::ldexp(1.0f + static_cast<float>(random() % 4096) / 4096, static_cast<int>(random() % 9) - 6);
      test::Given given;
      if (spec.calibration == Calibration::kGiven && info.family != Family::kScheme) {
        given.scales.assign(static_cast<size_t>(ScaleGrid(ResolveSpec(spec, shape.width, "").value(), shape).count), scale);
      }
      std::vector<float> x(static_cast<size_t>(shape.elements()));
      for (size_t i = 0; i < x.size(); ++i) {
        // Borders of integers, of floats' codes, and of the levels.
        const int kind = static_cast<int>(random() % 3);
        float border = kind == 0   ? static_cast<float>(static_cast<int>(random() % 512) - 256) * 0.5f
                       : kind == 1 ? std::ldexp(static_cast<float>(random() % 32) / 16, static_cast<int>(random() % 10) - 2)
                                   : LevelMiddle(4, static_cast<int>(random() % 15));
        if (i % 128 == 0) border = info.bits == 8 ? 127.0f : 7.0f;  // the largest, so that the scale is about the given one
        float v = border * scale;
        for (int step = static_cast<int>(random() % 7) - 3; step != 0; step += step < 0 ? 1 : -1) v = std::nextafter(v, step < 0 ? -1e9f : 1e9f);
        x[i] = v;
      }
      const auto want = test::Quantize(kReferenceBackend, text, shape, x.data(), Type::f32, -1, {}, given);
      ExpectSame(test::Quantize(*GetParam(), text, shape, x.data(), Type::f32, -1, {}, given), want);
      if (HasFatalFailure()) return;
    }
  }
}

// Searches of level tables judge scales in fixed point first: blocks of every shape, from flat to a single value far out, where scales
// are nearly as good as each other or coarse, and quotients at borders.
TEST_P(Simd, LevelsOfManyDistributions) {
  std::mt19937 random(12);
  std::normal_distribution<float> normal;
  const int rounds = kShapes / 10 + 2;
  for (const char* type : {"lm4", "lm3", "lm2"}) {
    for (const char* rest : {"/token/16/mse/e4m3", "/token/32/mse/f16", "/token/64/mse/e4m3", "/token/64/mse/f32", "/token/64/mse/e8m0", "/token/128/mse/bf16", "/channel/32/mse/e4m3"}) {
      for (int round = 0; round < rounds; ++round) {
        const std::string spec = std::string(type) + rest;
        SCOPED_TRACE(spec + " " + std::to_string(round));
        const Shape shape{1, 1, 9, 128};
        std::vector<float> x(static_cast<size_t>(shape.elements()));
        for (size_t begin = 0; begin < x.size(); begin += 16) {
          const int kind = static_cast<int>(random() % 8);
          // Small beside others: coarse scales. So small that squares are subnormal: errors that are coarse themselves.
          const float size = std::ldexp(1.0f, round % 2 == 0 ? 0 : round % 4 == 1 ? -static_cast<int>(random() % 24) : -60 - static_cast<int>(random() % 14));
          for (size_t i = begin; i < begin + 16; ++i) {
            float v = normal(random);
            if (kind == 1) v = std::copysign(1.0f, v);
            if (kind == 2) v = std::copysign(static_cast<float>(random() % 1000) * 0.001f, v);
            if (kind == 3) v = v * v * v * v * v;
            if (kind == 4) v = i == begin ? 1.0f : 0.0f;
            if (kind == 5) v = std::copysign(LevelMiddle(4, 8 + static_cast<int>(random() % 7)), v);
            if (kind == 6) v = std::copysign(PositiveLevel(3, static_cast<int>(random() % 4)), v);
            if (kind == 7) v = i % 2 == 0 ? v : 1e-20f * v;
            x[i] = v * size;
          }
        }
        const auto want = test::Quantize(kReferenceBackend, spec, shape, x.data());
        ExpectSame(test::Quantize(*GetParam(), spec, shape, x.data()), want);
        if (HasFatalFailure()) return;
      }
    }
  }
}

// Blocks of two values, one of which stands where the choice of a scale changes: two scales are equally good, and the errors of fixed
// point add up, since they are the same in many elements.
TEST(SimdTargets, LevelsWhereTwoScalesAreEquallyGood) {
  std::mt19937 random(13);
  constexpr int64_t kBlocks = kShapes < 200 ? 32 : 256;
  for (const char* type : {"lm4", "lm3", "lm2"}) {
    for (const int64_t block : {16, 32, 64}) {
      const std::string spec = std::string(type) + "/token/" + std::to_string(block) + "/mse/e4m3";
      SCOPED_TRACE(spec);
      const Shape shape{1, 1, kBlocks, block};
      std::vector<float> first(kBlocks);
      std::vector<int64_t> firsts(kBlocks);
      std::vector<uint32_t> from(kBlocks), to(kBlocks);
      for (size_t b = 0; b < kBlocks; ++b) {
        first[b] = 1.0f + 0.001f * static_cast<float>(random() % 2000);
        firsts[b] = 1 + static_cast<int64_t>(random() % (b % 2 ? 3u : static_cast<uint32_t>(block) - 1));
        from[b] = BitsOf(0.001f * static_cast<float>(1 + random() % 1000));
        to[b] = BitsOf(1.0f + 0.001f * static_cast<float>(random() % 2000));
      }
      const auto blocks_of = [&](const std::vector<uint32_t>& second, int64_t offset) {
        std::vector<float> x;
        for (size_t b = 0; b < kBlocks; ++b) {
          const float value = FloatOf(second[b] + static_cast<uint32_t>(offset));
          for (int64_t i = 0; i < block; ++i) x.push_back((i % 3 == 0 ? -1.0f : 1.0f) * (i < firsts[b] ? first[b] : value));
        }
        std::fill_n(x.begin(), block, 16.0f);  // keeps the scale of scales
        return x;
      };
      const auto choices_of = [&](const std::vector<uint32_t>& second) {
        return BytesOf(test::Quantize(kReferenceBackend, spec, shape, blocks_of(second, 0).data()).scales);
      };
      const auto start = choices_of(from);
      for (int step = 0; step < 28; ++step) {
        std::vector<uint32_t> middle(kBlocks);
        for (size_t b = 0; b < kBlocks; ++b) middle[b] = from[b] + (to[b] - from[b]) / 2;
        const auto choices = choices_of(middle);
        for (size_t b = 0; b < kBlocks; ++b) (choices[b] == start[b] ? from : to)[b] = middle[b];
      }
      for (const int64_t offset : {-10000, -1000, -100, -10, -1, 0, 1, 2, 11, 101, 1001, 10001}) {
        const auto x = blocks_of(from, offset);
        const auto want = test::Quantize(kReferenceBackend, spec, shape, x.data());
        for (const Backend* target : SimdBackends()) {
          if (!target->available()) continue;
          SCOPED_TRACE(target->name);
          ExpectSame(test::Quantize(*target, spec, shape, x.data()), want);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

// Scales that are subnormal as e4m3 may be half of a block's rms; elements far beyond the last level then have errors whose squares
// add up to more than 31 bits hold.
TEST_P(Simd, LevelsFarBeyondACoarseScale) {
  constexpr int64_t kBlock = 64, kBlocks = 200;
  const Shape shape{1, 1, kBlocks, kBlock};
  for (const char* spec : {"lm4/token/64/mse/e4m3", "lm3/token/64/mse/e4m3", "lm2/token/64/mse/e4m3"}) {
    SCOPED_TRACE(spec);
    std::vector<float> x(kBlocks * kBlock, 300.0f);  // the first block: with it 2^-9 is the smallest scale
    for (int64_t b = 1; b < kBlocks; ++b) {
      for (int64_t i = 0; i < kBlock; ++i) {
        const float far = 4.0f + 0.1f * static_cast<float>(b % 20), near = 0.01f * static_cast<float>((b * i) % 30);
        x[static_cast<size_t>(b * kBlock + i)] = std::ldexp(i % 64 < 3 + b / 20 ? far : near, -9);
      }
    }
    ExpectSame(test::Quantize(*GetParam(), spec, shape, x.data()), test::Quantize(kReferenceBackend, spec, shape, x.data()));
  }
  // The largest scale that f16 has, and beside what suits it quotients far out on both sides.
  for (const char* spec : {"lm4/token/64/mse/f16", "lm3/token/64/mse/f16", "lm2/token/64/mse/f16"}) {
    SCOPED_TRACE(spec);
    std::vector<float> x;
    for (int64_t i = 0; i < kBlocks * kBlock; ++i) {
      const float quotient = i % 7 == 0 ? std::ldexp(1.1f, static_cast<int>(i / kBlock % 100)) : i % 2 == 0 ? 0.6f : 1.25f;
      x.push_back(65504 * (i % 3 == 0 ? -quotient : quotient));
    }
    ExpectSame(test::Quantize(*GetParam(), spec, shape, x.data()), test::Quantize(kReferenceBackend, spec, shape, x.data()));
  }
}

// Quotients at most three floats away from borders between levels: the scales are powers of two, so that they stay where they are.
TEST_P(Simd, NeighboursOfLevelBorders) {
  std::mt19937 random(14);
  for (const int bits : {2, 3, 4}) {
    const std::string spec = "lm" + std::to_string(bits) + "/token/64/mse/e8m0";
    SCOPED_TRACE(spec);
    const Shape shape{1, 1, 500, 64};
    const int half = 1 << (bits - 1);
    std::vector<float> x;
    for (int64_t token = 0; token < shape.tokens; ++token) {
      double squares = 0;
      for (int i = 1; i <= 64; ++i) {
        // Their rms stays near 0.8, whose candidates are all rounded up to 1.
        const auto border_at = [&](int index) { return LevelMiddle(bits, half - 1 + index); };
        const int any = static_cast<int>(random() % static_cast<uint32_t>(half));
        float border = border_at(squares < 0.6 * i ? std::max(any, 1) : any);
        if (squares + border * border > 0.64 * i + 1) border = border_at(any / 2);
        squares += border * border;
        float v = border;
        for (int step = static_cast<int>(random() % 7) - 3; step != 0; step += step < 0 ? 1 : -1) v = std::nextafter(v, step < 0 ? -1e9f : 1e9f);
        x.push_back(std::ldexp(random() % 2 ? v : -v, static_cast<int>(token % 60) - 30));
      }
    }
    const auto want = test::Quantize(kReferenceBackend, spec, shape, x.data());
    const auto scales = test::ScalesOf(want);
    int64_t ones = 0;
    for (int64_t token = 0; token < shape.tokens; ++token) ones += scales[static_cast<size_t>(token)] == std::ldexp(1.0f, static_cast<int>(token % 60) - 30);
    EXPECT_GT(ones, shape.tokens / 2);
    ExpectSame(test::Quantize(*GetParam(), spec, shape, x.data()), want);
  }
}

TEST_P(Simd, RotationsOfEveryLength) {
  std::mt19937 random(15);
  for (int64_t n = 1; n <= 2048; n *= 2) {
    for (const int64_t runs : {1, 3}) {
      const Shape shape{1, 1, 3, n * runs};
      SCOPED_TRACE(Text(shape));
      const auto x = Values(random, shape.elements());
      const auto want = test::Quantize(kReferenceBackend, "int8/token+hadamard", shape, x.data());
      ASSERT_EQ(want.hadamard, n);
      ExpectSame(test::Quantize(*GetParam(), "int8/token+hadamard", shape, x.data()), want);
      ASSERT_EQ(test::Difference(test::Dequantize(*GetParam(), want), test::Dequantize(kReferenceBackend, want)), "");
    }
  }
}

// Outputs that caches do not hold are written another way: the same rows as in pieces.
TEST_P(Simd, LargePayloads) {
  for (const char* text : {"int8/token", "int3/token"}) {
    const Spec spec = ParseSpec(text, "").value();
    constexpr int64_t kWidth = 136, kPieces = 4;  // codes of a row do not fill lines
    const int64_t tokens = (int64_t{9} << 20) * 8 / Info(spec.type).bits / kWidth / (8 * kPieces) * (8 * kPieces);
    std::vector<float> x(static_cast<size_t>(tokens * kWidth));
    for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i * 2654435761u % 65536) * 0.25f - 8192;
    const auto whole = test::Quantize(*GetParam(), text, {1, 1, tokens, kWidth}, x.data());
    const auto restored = test::Dequantize(*GetParam(), whole);
    for (int64_t piece = 0; piece < kPieces; ++piece) {
      const int64_t rows = tokens / kPieces, first = piece * rows;
      const auto part = test::Quantize(*GetParam(), text, {1, 1, rows, kWidth}, x.data() + first * kWidth);
      const auto bytes = static_cast<size_t>(first * kWidth * Info(spec.type).bits / 8);
      ASSERT_EQ(std::memcmp(part.codes.data(), whole.codes.data() + bytes, part.codes.size()), 0) << text << " " << piece;
      const auto values = test::Dequantize(*GetParam(), part);
      ASSERT_EQ(std::memcmp(values.data(), restored.data() + first * kWidth, values.size() * 4), 0) << text << " " << piece;
    }
  }
}

TEST_P(Simd, NonFiniteValuesWhereTheyAreAllowed) {
  std::mt19937 random(10);
  const float odd[] = {NAN, -NAN, INFINITY, -INFINITY, 3.4e38f, -3.4e38f, 1e-45f, -0.0f};
  for (const std::string& text : AllSpecs()) {
    const Spec spec = ParseSpec(text, "").value();
    const TypeInfo& info = Info(spec.type);
    if (info.family == Family::kDense || spec.calibration == Calibration::kGiven || spec.scale_type == ScaleType::kBF16) continue;
    const Shape shape{1, 2, 5, 32};
    auto x = Values(random, shape.elements());
    for (int i = 0; i < 6; ++i) x[random() % x.size()] = odd[random() % 8];
    for (const NonFinite mode : {NonFinite::kSaturate, NonFinite::kPass}) {
      SCOPED_TRACE(text + (mode == NonFinite::kPass ? " pass" : " saturate"));
      SpecOptions options;
      options.non_finite = mode;
      const auto want = test::Quantize(kReferenceBackend, text, shape, x.data(), Type::f32, -1, options);
      ExpectSame(test::Quantize(*GetParam(), text, shape, x.data(), Type::f32, -1, options), want);
      ASSERT_EQ(test::Difference(test::Dequantize(*GetParam(), want), test::Dequantize(kReferenceBackend, want)), "");
    }
  }
}

TEST_P(Simd, HugeFiniteValuesThatTransformsOverflow) {
  const Shape shape{1, 1, 4, 64};
  std::vector<float> x(256, 3e38f);
  for (const char* text : {"int4/token/64/absmax/f32+hadamard", "lm4/token/64/mse/e4m3+hadamard", "nvfp4+hadamard", "int8/channel/16/mse/f32+hadamard"}) {
    SCOPED_TRACE(text);
    ExpectSame(test::Quantize(*GetParam(), text, shape, x.data()), test::Quantize(kReferenceBackend, text, shape, x.data()));
  }
}

TEST_P(Simd, DenseConversionsOfEveryPattern) {
  std::vector<uint16_t> patterns(65536);
  for (size_t i = 0; i < patterns.size(); ++i) patterns[i] = static_cast<uint16_t>(i);
  for (const Type type : {Type::f16, Type::bf16}) {
    std::vector<float> want(patterns.size()), got(patterns.size());
    kReferenceBackend.widen(type, patterns.data(), want.data(), 65536);
    GetParam()->widen(type, patterns.data(), got.data(), 65536);
    ASSERT_EQ(std::memcmp(want.data(), got.data(), want.size() * 4), 0);
    for (int64_t count = 0; count < 70; ++count) {
      std::vector<float> out(static_cast<size_t>(count) + 1, 7.0f);
      GetParam()->widen(type, patterns.data() + 16000 + count, out.data(), count);
      ASSERT_EQ(std::memcmp(out.data(), want.data() + 16000 + count, static_cast<size_t>(count) * 4), 0);
      ASSERT_EQ(out.back(), 7.0f) << "wrote past the end";
      const int64_t at = GetParam()->first_non_finite(type, patterns.data() + (type == Type::f16 ? 0x7c00 : 0x7f80) - count, count + 1);
      ASSERT_EQ(at, count);
    }
    // Every f32 near every pattern: both neighbours, the ties and their neighbours.
    std::vector<float> x;
    for (size_t i = 0; i < patterns.size(); ++i) {
      const uint32_t bits = BitsOf(want[i]);
      for (const uint32_t step : {0u, 1u, 0xfffu, 0x1000u, 0x1001u, 0x7fffu, 0x8000u, 0x8001u, 0xffffffffu}) x.push_back(FloatOf(bits + step));
    }
    std::vector<uint16_t> a(x.size()), b(x.size());
    kReferenceBackend.narrow(type, x.data(), a.data(), static_cast<int64_t>(x.size()));
    GetParam()->narrow(type, x.data(), b.data(), static_cast<int64_t>(x.size()));
    ASSERT_EQ(test::DifferenceOf(b, a), "");
  }
  for (int64_t count = 1; count < 70; ++count) {
    std::vector<float> x(static_cast<size_t>(count), 1.0f);
    EXPECT_EQ(GetParam()->first_non_finite(Type::f32, x.data(), count), -1);
    for (int64_t i = count - 1; i >= 0; --i) {
      x[static_cast<size_t>(i)] = i % 2 ? NAN : -INFINITY;
      ASSERT_EQ(GetParam()->first_non_finite(Type::f32, x.data(), count), i);
    }
  }
}

TEST(SimdTargets, TheListIsWhatThisBuildShouldHave) {
  std::vector<std::string> names;
  for (const Backend* backend : SimdBackends()) names.push_back(backend->name);
#if defined(__x86_64__)
  EXPECT_EQ(names, (std::vector<std::string>{"avx512", "avx2", "sse4"}));
#elif defined(__aarch64__)
  EXPECT_EQ(names, (std::vector<std::string>{"neon"}));
#endif
  EXPECT_TRUE(std::any_of(SimdBackends().begin(), SimdBackends().end(), [](const Backend* b) { return b->available(); }));
}

INSTANTIATE_TEST_SUITE_P(Targets, Simd, ::testing::ValuesIn(SimdBackends()), [](const auto& info) { return std::string(info.param->name); });

}  // namespace
}  // namespace kvpages
