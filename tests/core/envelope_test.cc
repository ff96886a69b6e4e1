// SPDX-License-Identifier: Apache-2.0
// The file of a ModelCache: round trips, every damage, expectations, streams, and the files of earlier versions.
#include "wire/envelope.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <random>

#include "support/caches.h"
#include "wire/crc32c.h"
#include "wire/wire.h"

namespace kvpages {
namespace {

using Raw = std::vector<uint8_t>;
using test::ConfigOf;
using test::SpecOf;

std::span<const uint8_t> Span(const Raw& raw) { return {raw.data(), raw.size()}; }
Raw Taken(Result<Bytes> bytes) {
  EXPECT_TRUE(bytes.ok()) << (bytes.ok() ? "" : bytes.error().message);
  return {bytes.value().data(), bytes.value().data() + bytes.value().size()};
}

class EnvelopeTest : public ::testing::TestWithParam<const Backend*> {
 protected:
  void SetUp() override {
    if (!GetParam()->available()) GTEST_SKIP() << "skipped: this processor has no " << GetParam()->name;
    instance_->backend = GetParam();
  }
  ModelCache Make(const ModelConfig& config) {
    auto made = ModelCache::Create(instance_, config, 0);
    EXPECT_TRUE(made.ok()) << (made.ok() ? "" : made.error().message);
    return std::move(made.value());
  }
  // Numbers that every platform computes alike.
  static void Append(ModelCache& cache, int64_t tokens, uint32_t seed) {
    const auto numbers = [&](int64_t count) {
      std::vector<float> values(static_cast<size_t>(count));
      for (float& value : values) {
        seed = seed * 1664525u + 1013904223u;
        value = static_cast<float>(static_cast<int32_t>(seed) >> 16) / 8192.0f;
      }
      return values;
    };
    for (int64_t i = 0; i < cache.layer_count(); ++i) {
      const LayerConfig& layer = cache.config().layers[static_cast<size_t>(i)];
      const auto key = numbers(layer.heads * tokens * layer.key.width), value = numbers(layer.heads * tokens * layer.value.width);
      ASSERT_TRUE(cache.Append(i, ContiguousView(key.data(), Type::f32, {1, layer.heads, tokens, layer.key.width}),
                               ContiguousView(value.data(), Type::f32, {1, layer.heads, tokens, layer.value.width}))
                      .ok());
    }
  }
  Result<ModelCache> Restore(const Raw& bytes, EnvelopeExpectation expectation = {}, uint64_t max_bytes = 0) {
    EnvelopeReader reader(instance_, max_bytes, std::move(expectation));
    KVP_TRY(reader.Feed(Span(bytes)));
    return reader.Finish();
  }
  std::string Refusal(const Raw& bytes, EnvelopeExpectation expectation = {}) {
    auto restored = Restore(bytes, std::move(expectation));
    return restored.ok() ? "fine" : std::string(CodeText(restored.error().code)) + " " + restored.error().message;
  }
  static Raw Saved(const ModelCache& cache, std::string model = "m", std::vector<uint32_t> ids = {}) {
    return Taken(SerializeEnvelope(cache, std::move(model), std::move(ids)));
  }
  // A cache with all that a file can hold: kept, frozen, cut, mixed and hot pages, a gap, both centres.
  ModelCache Rich() {
    ModelConfig config = ConfigOf(2, 2, 8, "int4/token/8/mse/e4m3+center+hadamard", "uint4/channel/8/minmax/f32");
    config.layers[1].key.spec = SpecOf("nvfp4");
    config.layers[1].key.width = 16;
    config.layers[1].value.spec = SpecOf("int3/token/8/absmax/f16");
    config.layers[1].value.options.non_finite = NonFinite::kPass;
    config.layers[1].window = 40;
    config.page_tokens = 8;
    config.residual = 16;
    ModelCache cache = Make(config);
    Append(cache, 90, 1);
    EXPECT_TRUE(cache.Freeze(-1).ok());
    EXPECT_TRUE(cache.Truncate(70).ok());
    Append(cache, 19, 2);
    EXPECT_TRUE(cache.DropBefore(20, 0).ok());
    return cache;
  }
  InstanceRef instance_ = std::make_shared<Instance>();
};

TEST(Crc32c, KnownValues) {
  const char* text = "123456789";
  EXPECT_EQ(Crc32c({reinterpret_cast<const uint8_t*>(text), 9}), 0xe3069283u);
  EXPECT_EQ(Crc32c(Raw(32, 0)), 0x8a9136aau);
  EXPECT_EQ(Crc32c(Raw(32, 0xff)), 0x62a8ab43u);
  EXPECT_EQ(Crc32c({}), 0u);
  Raw bytes(1000);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(i * i + 3 * i);
  uint32_t slow = ~0u;
  for (const uint8_t byte : bytes) {
    slow ^= byte;
    for (int bit = 0; bit < 8; ++bit) slow = slow >> 1 ^ (slow & 1 ? 0x82f63b78u : 0);
  }
  for (const size_t cut : {0, 1, 7, 8, 9, 500, 1000}) {
    const auto whole = Span(bytes);
    EXPECT_EQ(Crc32c(whole.subspan(cut), Crc32c(whole.first(cut))), ~slow);
  }
}

TEST_P(EnvelopeTest, RoundTripKeepsEverything) {
  ModelCache cache = Rich();
  std::vector<uint32_t> ids;
  for (uint32_t i = 0; i < 89; ++i) ids.push_back(i * 1000);
  const Raw bytes = Saved(cache, "a model", ids);
  EnvelopeReader reader(instance_, 0, {});
  ASSERT_TRUE(reader.Feed(Span(bytes)).ok());
  EXPECT_EQ(reader.model(), "a model");
  EXPECT_EQ(reader.token_ids(), ids);
  EXPECT_EQ(reader.pages_read(), reader.pages());
  auto restored = reader.Finish();
  ASSERT_TRUE(restored.ok()) << restored.error().message;
  EXPECT_EQ(Saved(restored.value(), "a model", ids), bytes);
  const CacheStats have = restored.value().Stats(), want = cache.Stats();
  EXPECT_EQ(have.frozen.key.squared_error, want.frozen.key.squared_error);
  EXPECT_EQ(have.frozen.value.saturated, want.frozen.value.saturated);
  EXPECT_EQ(have.frozen_pages, want.frozen_pages);
  EXPECT_EQ(restored.value().config().layers[1].window, 40);
  EXPECT_EQ(restored.value().config().layers[1].value.options.non_finite, NonFinite::kPass);
  EXPECT_EQ(restored.value().config().residual, 16);
  for (ModelCache* each : {&cache, &restored.value()}) {
    Append(*each, 30, 7);
    ASSERT_TRUE(each->Truncate(100).ok());
    Append(*each, 1, 8);
    ASSERT_TRUE(each->Freeze(-1).ok());
  }
  EXPECT_EQ(Saved(restored.value()), Saved(cache)) << "both go on alike";
}

TEST_P(EnvelopeTest, EveryPresetAndAnEmptyCache) {
  for (const Preset& preset : Presets()) {
    SCOPED_TRACE(std::string(preset.name));
    ModelCache cache = Make(ConfigOf(1, 1, 64, preset.key, preset.value));
    for (const int64_t tokens : {0, 72, 3}) {
      if (tokens > 0) Append(cache, tokens, 5);
      const Raw bytes = Saved(cache);
      auto restored = Restore(bytes);
      ASSERT_TRUE(restored.ok()) << restored.error().message;
      EXPECT_EQ(Saved(restored.value()), bytes);
      EXPECT_EQ(restored.value().tokens(), cache.tokens());
    }
  }
}

TEST_P(EnvelopeTest, APageOfZeros) {
  ModelCache cache = Make(ConfigOf(1, 1, 8, "int4/token/8/absmax/f32", "uint8/token/8/minmax/f32"));
  const std::vector<float> zeros(40 * 8, 0.0f);
  const TensorView view = ContiguousView(zeros.data(), Type::f32, {1, 1, 40, 8});
  ASSERT_TRUE(cache.Append(0, view, view).ok());
  ASSERT_TRUE(cache.Freeze(-1).ok());
  auto restored = Restore(Saved(cache));
  ASSERT_TRUE(restored.ok()) << restored.error().message;
  std::vector<float> out(40 * 8, 1.0f);
  ASSERT_TRUE(restored.value().Read(0, false, 0, 40, out.data(), 40 * 8, 8).ok());
  EXPECT_EQ(out, zeros);
}

TEST_P(EnvelopeTest, AnyPortions) {
  const Raw bytes = Saved(Rich());
  std::mt19937 random(3);
  for (int round = 0; round < 20; ++round) {
    EnvelopeReader reader(instance_, 0, {});
    for (size_t at = 0; at < bytes.size();) {
      const size_t count = std::min<size_t>(bytes.size() - at, round == 0 ? 1 : random() % (1u << round % 12) + 1);
      ASSERT_TRUE(reader.Feed(Span(bytes).subspan(at, count)).ok());
      at += count;
    }
    auto restored = reader.Finish();
    ASSERT_TRUE(restored.ok()) << restored.error().message;
    EXPECT_EQ(Saved(restored.value()), bytes);
  }
}

TEST_P(EnvelopeTest, PartsAreHeaderAndPages) {
  ModelCache cache = Rich();
  const Raw whole = Saved(cache);
  auto writer = EnvelopeWriter::Create(cache, "m", {});
  ASSERT_TRUE(writer.ok());
  EXPECT_EQ(writer.value().Size().value(), whole.size());
  Append(cache, 5, 9);  // the writer keeps what it was given
  Raw joined;
  std::vector<Raw> layers(2);
  for (int64_t i = 0; i < writer.value().parts(); ++i) {
    EXPECT_EQ(writer.value().next(), i);
    const Raw part = Taken(writer.value().Next());
    joined.insert(joined.end(), part.begin(), part.end());
    if (i == 0) continue;
    const size_t info = part[0];
    Raw& layer = layers[i > static_cast<int64_t>(cache.layer(0).pages.size())];
    layer.insert(layer.end(), part.begin() + 12 + static_cast<int64_t>(info), part.end());
  }
  EXPECT_EQ(joined, whole);
  EXPECT_FALSE(writer.value().Next().ok());
  // The pages of a layer without their frames are its PagedCacheProto.
  for (const Raw& layer : layers) {
    auto paged = ParsePagedCache(instance_, Span(layer));
    ASSERT_TRUE(paged.ok()) << paged.error().message;
    EXPECT_GT(paged.value().pages.size(), 3u);
  }
}

TEST_P(EnvelopeTest, EveryFlipAndEveryTruncationIsRefused) {
  ModelConfig config = ConfigOf(2, 1, 4, "int4/token/4/mse/e4m3+center", "int8/token/4/absmax/f32");
  config.page_tokens = 32;
  ModelCache cache = Make(config);
  Append(cache, 70, 1);
  Append(cache, 1, 2);
  const Raw bytes = Saved(cache, "model", std::vector<uint32_t>(71, 5));
  for (size_t i = 0; i < bytes.size(); ++i) {
    for (const int bit : {0, 3, 7}) {
      Raw damaged = bytes;
      damaged[i] = static_cast<uint8_t>(damaged[i] ^ 1 << bit);
      auto restored = Restore(damaged);
      ASSERT_FALSE(restored.ok()) << "byte " << i << " bit " << bit;
      ASSERT_TRUE(restored.error().byte_offset.has_value()) << restored.error().message;
    }
    auto cut = Restore(Raw(bytes.begin(), bytes.begin() + static_cast<int64_t>(i)));
    ASSERT_FALSE(cut.ok()) << "cut at " << i;
    ASSERT_EQ(cut.error().code, Code::kCorrupt);
    ASSERT_EQ(cut.error().byte_offset, static_cast<int64_t>(i));
  }
  Raw longer = bytes;
  longer.push_back(0);
  EXPECT_NE(Refusal(longer).find("goes on behind its last page"), std::string::npos);
  EXPECT_EQ(instance_->budget->used(), cache.instance()->budget->used()) << "nothing is left of what was refused";
}

TEST_P(EnvelopeTest, ExpectationsNameBothValues) {
  const ModelConfig config = ConfigOf(2, 1, 8, "int8/token", "int4/token");
  ModelCache cache = Make(config);
  Append(cache, 5, 1);
  const Raw bytes = Saved(cache, "smollm2");
  const auto expecting = [&](auto change) {
    EnvelopeExpectation expectation;
    ModelConfig want = config;
    change(want);
    expectation.config = ResolveConfig(want).value();
    return Refusal(bytes, std::move(expectation));
  };
  EXPECT_EQ(expecting([](ModelConfig&) {}), "fine");
  EXPECT_EQ(expecting([](ModelConfig& c) { c.layers.pop_back(); }), "ERR_MISMATCH layers: the file must have 1, got 2");
  EXPECT_EQ(expecting([](ModelConfig& c) { c.layers[1].heads = 3; }), "ERR_MISMATCH kvHeads: layer 1 of the file must have 3, got 1");
  EXPECT_EQ(expecting([](ModelConfig& c) { c.layers[0].value.width = 16; }), "ERR_MISMATCH headDim: layer 0 value of the file must have 16, got 8");
  EXPECT_EQ(expecting([](ModelConfig& c) { c.layers[1].key.spec.type = Type::int4; }),
            "ERR_MISMATCH key: layer 1 key of the file must have int4/token/8/absmax/f32, got int8/token/8/absmax/f32");
  EnvelopeExpectation expectation;
  expectation.model = "other";
  EXPECT_EQ(Refusal(bytes, expectation), "ERR_MISMATCH model: the file must be of model 'other', got 'smollm2'");
  expectation.model = "smollm2";
  EXPECT_EQ(Refusal(bytes, expectation), "fine");
  EXPECT_EQ(Restore(bytes, {}, 100).error().code, Code::kLimit);
}

TEST_P(EnvelopeTest, WrongKindsOfFile) {
  EXPECT_EQ(Refusal({}).substr(0, 45), "ERR_CORRUPT bytes: not a ModelCache envelope,");
  EXPECT_EQ(Refusal({0x0a, 3, 1, 2, 3, 4, 5, 6, 7, 8}).substr(0, 45), "ERR_CORRUPT bytes: not a ModelCache envelope,");
  ModelCache cache = Make(ConfigOf(2, 1, 4, "int8", "int8"));
  Raw bytes = Saved(cache);
  auto parsed = ParsePagedCache(instance_, Span(bytes));
  ASSERT_FALSE(parsed.ok());
  EXPECT_NE(parsed.error().message.find("ModelCache envelope, which restore reads"), std::string::npos);
  bytes[8] = 2;
  EXPECT_EQ(Refusal(bytes), "ERR_UNSUPPORTED bytes: envelope version must be 1, got 2, at byte 8");
  // What cannot be saved.
  Append(cache, 2, 1);
  EXPECT_EQ(EnvelopeWriter::Create(cache, "", {1}).error().message, "tokenIds: needs one per token, 2, got 1");
  const std::vector<float> one(4, 1.0f);
  const TensorView view = ContiguousView(one.data(), Type::f32, {1, 1, 1, 4});
  ASSERT_TRUE(cache.Append(0, view, view).ok());
  EXPECT_EQ(EnvelopeWriter::Create(cache, "", {}).error().message, "cache: layer 1 must have the 3 tokens of layer 0, got 2");
}

// tests/golden/envelope-vN.kvpages: Rich() as version N wrote it. KVP_WRITE_GOLDEN=1 writes the file of this version.
TEST_P(EnvelopeTest, GoldenFilesOfAllVersions) {
  for (uint32_t version = 1; version <= kEnvelopeVersion; ++version) {
    const std::string path = std::string(KVP_TESTS_DIR) + "/golden/envelope-v" + std::to_string(version) + ".kvpages";
    const ModelCache cache = Rich();
    if (std::getenv("KVP_WRITE_GOLDEN") != nullptr && version == kEnvelopeVersion) {
      const Raw bytes = Saved(cache, "golden");
      std::ofstream(path, std::ios::binary).write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
    }
    std::ifstream in(path, std::ios::binary);
    ASSERT_TRUE(in) << path;
    const Raw bytes(std::istreambuf_iterator<char>(in), {});
    auto restored = Restore(bytes);
    ASSERT_TRUE(restored.ok()) << restored.error().message;
    EXPECT_EQ(Saved(restored.value(), "golden"), Saved(cache, "golden"));
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, EnvelopeTest, ::testing::ValuesIn(AllBackends()),
                         [](const auto& info) { return std::string(info.param->name); });

}  // namespace
}  // namespace kvpages
