// SPDX-License-Identifier: Apache-2.0
// ModelCache against a simple model of it: lists of pages of plain numbers, the rules written down a second time.
#include "core/model_cache.h"

#include <algorithm>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "support/caches.h"
#include "wire/envelope.h"

namespace kvpages {
namespace {

using Random = std::mt19937;
using test::Between;
using test::ConfigOf;
using test::SpecOf;

std::vector<float> Noise(Random& random, int64_t count) {
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = normal(random) * (random() % 23 == 0 ? 8.0f : 1.0f);
  return values;
}
float Rounded(float value, Type hot) { return hot == Type::f32 ? value : hot == Type::f16 ? FromF16(ToF16(value)) : FromBF16(ToBF16(value)); }
bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * 4) == 0);
}
bool SameBytes(const Bytes& a, const Bytes& b) { return std::equal(a.data(), a.data() + a.size(), b.data(), b.data() + b.size()); }

// ---- The model ----

struct PlainSide {
  bool frozen = false;
  bool centered = false;
  std::vector<float> values;  // [heads][capacity][width], of valid rows
};
struct PlainPage {
  int64_t start = 0, length = 0, capacity = 0;
  bool kept = false;
  PlainSide side[2];
  int64_t end() const { return start + length; }
};
struct PlainLayer {
  std::vector<PlainPage> pages;
  int64_t end = 0;
  std::vector<uint16_t> center;
};

class PlainCache {
 public:
  PlainCache(InstanceRef instance, ModelConfig config) : instance_(std::move(instance)), config_(std::move(config)) {
    layers.resize(config_.layers.size());
  }

  void Append(size_t index, int64_t tokens, const std::vector<float> (&sides)[2]) {
    Freeze(index);
    PlainLayer& layer = layers[index];
    for (int64_t t = 0; t < tokens; ++t) {
      if (layer.pages.empty() || Closed(layer, layer.pages.size() - 1)) {
        PlainPage page;
        page.start = layer.end;
        page.kept = layer.end == 0 && config_.keep_first > 0;
        page.capacity = page.kept ? config_.keep_first : config_.page_tokens;
        for (int s : {0, 1}) page.side[s].values.resize(static_cast<size_t>(Heads(index) * page.capacity * Width(index, s)));
        layer.pages.push_back(page);
      }
      PlainPage& page = layer.pages.back();
      for (int s : {0, 1}) {
        const int64_t width = Width(index, s);
        for (int64_t h = 0; h < Heads(index); ++h) {
          for (int64_t d = 0; d < width; ++d) {
            page.side[s].values[static_cast<size_t>((h * page.capacity + page.length) * width + d)] =
                Rounded(sides[s][static_cast<size_t>((h * tokens + t) * width + d)], config_.hot);
          }
        }
      }
      ++page.length;
      ++layer.end;
    }
  }

  void Freeze(size_t index) {
    PlainLayer& layer = layers[index];
    const bool centers = config_.layers[index].key.spec.center;
    if (centers && layer.center.empty()) {
      int64_t behind_kept = 0;
      for (const PlainPage& page : layer.pages) behind_kept += page.kept ? 0 : page.length;
      if (behind_kept < 64) return;
    }
    for (int s : {0, 1}) {
      std::vector<PlainPage*> due;
      for (size_t i = 0; i < layer.pages.size(); ++i) {
        PlainPage& page = layer.pages[i];
        const int64_t age = layer.end - page.end();
        if (page.kept || page.side[s].frozen || !Closed(layer, i) || age < config_.keep_recent) continue;
        if (s == 1 && age < config_.residual) continue;
        due.push_back(&page);
      }
      if (s == 0 && config_.residual > 0) {
        const size_t group = static_cast<size_t>(config_.residual / config_.page_tokens);
        due.resize(due.size() / group * group);
      }
      if (s == 0 && centers && layer.center.empty() && !due.empty()) FindCenter(index);
      for (PlainPage* page : due) Encode(index, *page, s);
    }
  }

  void Truncate(int64_t n) {
    for (PlainLayer& layer : layers) {
      while (!layer.pages.empty() && layer.pages.back().start >= n) layer.pages.pop_back();
      if (!layer.pages.empty() && layer.pages.back().end() > n) layer.pages.back().length = n - layer.pages.back().start;
      layer.end = n;
      bool any = false;
      for (const PlainPage& page : layer.pages) any |= page.side[0].centered;
      if (!any) layer.center.clear();
    }
  }
  bool CanTruncate(int64_t n) const {
    for (const PlainLayer& layer : layers) {
      int64_t held = 0;
      for (const PlainPage& page : layer.pages) {
        if (n > held && n < page.start) return false;
        held = page.end();
      }
      if (n > held && n < layer.end) return false;
    }
    return true;
  }
  void Drop(int64_t n) {
    for (PlainLayer& layer : layers) std::erase_if(layer.pages, [&](const PlainPage& page) { return !page.kept && page.end() <= n; });
  }
  void Slice(int64_t begin, int64_t end) {
    Truncate(end);
    for (PlainLayer& layer : layers) std::erase_if(layer.pages, [&](const PlainPage& page) { return page.end() <= begin; });
  }

  std::vector<PlainLayer> layers;

 private:
  int64_t Heads(size_t index) const { return config_.layers[index].heads; }
  int64_t Width(size_t index, int side) const { return side ? config_.layers[index].value.width : config_.layers[index].key.width; }
  static bool Closed(const PlainLayer& layer, size_t i) {
    const PlainPage& page = layer.pages[i];
    return i + 1 < layer.pages.size() || page.length == page.capacity || page.side[0].frozen || page.side[1].frozen;
  }
  void FindCenter(size_t index) {
    PlainLayer& layer = layers[index];
    const int64_t width = Width(index, 0);
    for (int64_t h = 0; h < Heads(index); ++h) {
      for (int64_t d = 0; d < width; ++d) {
        float sum = 0;
        int64_t seen = 0;
        for (const PlainPage& page : layer.pages) {
          for (int64_t t = 0; t < page.length && !page.kept && seen < 64; ++t, ++seen) {
            sum += page.side[0].values[static_cast<size_t>((h * page.capacity + t) * width + d)];
          }
        }
        layer.center.push_back(ToBF16(sum / 64));
      }
    }
  }
  void Encode(size_t index, PlainPage& page, int s) {
    const SideConfig& side = s ? config_.layers[index].value : config_.layers[index].key;
    const Shape shape{1, Heads(index), page.capacity, side.width};
    EncodeOptions options;
    if (side.spec.center) {
      auto center = Bytes::Copy(layers[index].center.data(), layers[index].center.size() * 2);
      options.center = std::move(center.value());
    }
    auto made = kvpages::Encode(instance_, ContiguousView(page.side[s].values.data(), Type::f32, shape), page.length, side.spec, options, "x");
    ASSERT_TRUE(made.ok()) << made.error().message;
    ASSERT_TRUE(Decode(instance_, *made.value(), 0, page.length, page.side[s].values.data(), 0, page.capacity * side.width, side.width).ok());
    page.side[s].frozen = true;
    page.side[s].centered = side.spec.center;
  }

  InstanceRef instance_;
  ModelConfig config_;
};

void ExpectEqual(const ModelCache& cache, const PlainCache& plain) {
  for (int64_t i = 0; i < cache.layer_count(); ++i) {
    const CacheLayer& layer = cache.layer(i);
    const PlainLayer& want = plain.layers[static_cast<size_t>(i)];
    ASSERT_EQ(layer.end, want.end) << "layer " << i;
    ASSERT_EQ(layer.pages.size(), want.pages.size()) << "layer " << i;
    ASSERT_EQ(layer.center.size(), want.center.size() * 2);
    if (!want.center.empty()) { ASSERT_EQ(std::memcmp(layer.center.data(), want.center.data(), layer.center.size()), 0); }
    for (size_t p = 0; p < want.pages.size(); ++p) {
      const CachePage& page = layer.pages[p];
      const PlainPage& model = want.pages[p];
      ASSERT_EQ(page.start, model.start) << "layer " << i << " page " << p;
      ASSERT_EQ(page.length, model.length) << "layer " << i << " page " << p;
      ASSERT_EQ(page.kept, model.kept);
      ASSERT_EQ(page.key.frozen, model.side[0].frozen) << "layer " << i << " page " << p;
      ASSERT_EQ(page.value.frozen, model.side[1].frozen) << "layer " << i << " page " << p;
      for (int s : {0, 1}) {
        const int64_t width = (s ? page.value : page.key).payload->shape.width;
        const int64_t heads = page.key.payload->shape.heads;
        std::vector<float> have(static_cast<size_t>(heads * page.length * width)), expected(have.size());
        ASSERT_TRUE(cache.Read(i, s, page.start, page.end(), have.data(), page.length * width, width).ok());
        for (int64_t h = 0; h < heads; ++h) {
          std::memcpy(expected.data() + h * page.length * width, model.side[s].values.data() + h * model.capacity * width,
                      static_cast<size_t>(page.length * width) * 4);
        }
        ASSERT_TRUE(SameBits(have, expected)) << "layer " << i << " page " << p << " side " << s;
      }
    }
  }
}

// ---- Fixture ----

class ModelCacheTest : public ::testing::TestWithParam<const Backend*> {
 protected:
  void SetUp() override {
    if (!GetParam()->available()) GTEST_SKIP() << "skipped: this processor has no " << GetParam()->name;
    instance_->backend = GetParam();
  }
  ModelCache Make(const ModelConfig& config, uint64_t max_bytes = 0) {
    auto made = ModelCache::Create(instance_, config, max_bytes);
    EXPECT_TRUE(made.ok()) << (made.ok() ? "" : made.error().message);
    return std::move(made.value());
  }
  static Status AppendNoise(ModelCache& cache, int64_t layer, int64_t tokens, Random& random) {
    const LayerConfig& config = cache.config().layers[static_cast<size_t>(layer)];
    const auto key = Noise(random, config.heads * tokens * config.key.width), value = Noise(random, config.heads * tokens * config.value.width);
    return cache.Append(layer, ContiguousView(key.data(), Type::f32, {1, config.heads, tokens, config.key.width}),
                        ContiguousView(value.data(), Type::f32, {1, config.heads, tokens, config.value.width}));
  }
  InstanceRef instance_ = std::make_shared<Instance>();
};

TEST_P(ModelCacheTest, RandomSequencesEqualTheModel) {
  for (uint32_t seed = 1; seed <= 40; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Random random(seed);
    const ModelConfig config = test::RandomConfig(random);
    auto resolved = ResolveConfig(config);
    ASSERT_TRUE(resolved.ok()) << resolved.error().message;
    struct Pair {
      ModelCache cache;
      PlainCache plain;
    };
    std::vector<Pair> pairs;
    pairs.push_back({Make(config), PlainCache(instance_, resolved.value())});
    for (int step = 0; step < 40; ++step) {
      Pair& pair = pairs[random() % pairs.size()];
      const int64_t tokens = pair.cache.tokens();
      switch (Between(random, 0, 9)) {
        case 0: case 1: case 2: case 3: case 4: {
          const int64_t count = Between(random, 0, 2) == 0 ? Between(random, 1, 50) : Between(random, 1, 3);
          std::vector<std::vector<float>> data;
          std::vector<TensorView> views[2];
          for (const LayerConfig& layer : config.layers) {
            for (int s : {0, 1}) {
              const int64_t width = s ? layer.value.width : layer.key.width;
              data.push_back(Noise(random, layer.heads * count * width));
              views[s].push_back(ContiguousView(data.back().data(), Type::f32, {1, layer.heads, count, width}));
            }
          }
          if (random() % 2) {
            ASSERT_TRUE(pair.cache.AppendAll(views[0], views[1]).ok());
          } else {
            for (size_t i = 0; i < config.layers.size(); ++i) {
              ASSERT_TRUE(pair.cache.Append(static_cast<int64_t>(i), views[0][i], views[1][i]).ok());
            }
          }
          for (size_t i = 0; i < config.layers.size(); ++i) {
            const std::vector<float> both[2] = {data[i * 2], data[i * 2 + 1]};
            pair.plain.Append(i, count, both);
          }
          break;
        }
        case 5: {
          ASSERT_TRUE(pair.cache.Freeze(-1).ok());
          for (size_t i = 0; i < config.layers.size(); ++i) pair.plain.Freeze(i);
          break;
        }
        case 6: {
          const int64_t n = random() % 4 ? std::max<int64_t>(0, tokens - Between(random, 0, 20)) : Between(random, 0, tokens);
          const bool can = pair.plain.CanTruncate(n);
          ASSERT_EQ(pair.cache.Truncate(n).ok(), can);
          if (can) pair.plain.Truncate(n);
          break;
        }
        case 7: {
          const int64_t n = Between(random, 0, tokens);
          ASSERT_TRUE(pair.cache.DropBefore(n, -1).ok());
          pair.plain.Drop(n);
          break;
        }
        case 8: {
          if (pairs.size() > 4) pairs.erase(pairs.begin() + static_cast<int64_t>(random() % pairs.size()));
          else pairs.push_back({pair.cache.Fork(), pair.plain});
          break;
        }
        default: {
          if (random() % 2 && pair.cache.EvenTokens().ok()) {
            // A restored cache goes on as if nothing had happened.
            auto bytes = SerializeEnvelope(pair.cache, "model", {});
            ASSERT_TRUE(bytes.ok()) << bytes.error().message;
            EnvelopeReader reader(instance_, 0, {});
            const auto fed = reader.Feed({bytes.value().data(), static_cast<size_t>(bytes.value().size())});
            ASSERT_TRUE(fed.ok()) << fed.error().message;
            auto restored = reader.Finish();
            ASSERT_TRUE(restored.ok()) << restored.error().message;
            auto again = SerializeEnvelope(restored.value(), "model", {});
            ASSERT_EQ(again.value().size(), bytes.value().size());
            ASSERT_EQ(std::memcmp(again.value().data(), bytes.value().data(), bytes.value().size()), 0);
            pair.cache = std::move(restored.value());
            break;
          }
          const auto& pages = pair.plain.layers[0].pages;
          if (pages.empty() || random() % 3) break;
          const int64_t begin = pages[random() % pages.size()].start, end = Between(random, begin, tokens);
          auto cut = pair.cache.Slice(begin, end);
          // Where layers differ in what was encoded at a truncation, their pages start differently.
          bool can = pair.plain.CanTruncate(end);
          for (const PlainLayer& layer : pair.plain.layers) {
            bool starts = begin == 0 || begin == layer.end;
            for (const PlainPage& page : layer.pages) starts |= page.start == begin;
            can &= starts;
          }
          ASSERT_EQ(cut.ok(), can) << begin << " " << end << (cut.ok() ? "" : cut.error().message);
          if (!cut.ok()) break;
          pairs.push_back({std::move(cut.value()), pair.plain});
          pairs.back().plain.Slice(begin, end);
        }
      }
      for (const Pair& each : pairs) {
        ExpectEqual(each.cache, each.plain);
        if (HasFatalFailure()) return;
      }
    }
    pairs.clear();
    ASSERT_EQ(instance_->budget->used(), 0u) << "everything is given back";
  }
}

TEST_P(ModelCacheTest, TheWayOfAppendingDoesNotMatter) {
  // Token by token, in two halves or with strides: the same bytes once all is frozen.
  const ModelConfig config = ConfigOf(1, 2, 16, "lm4/token/64/mse/e4m3+center+hadamard", "int4/token/16/mse/e4m3");
  Random random(7);
  const auto key = Noise(random, 2 * 200 * 16), value = Noise(random, 2 * 200 * 16);
  const auto rows = [&](const std::vector<float>& values, int64_t begin, int64_t count) {
    TensorView view = ContiguousView(values.data() + begin * 16, Type::f32, {1, 2, count, 16});
    view.head_stride = 200 * 16;
    return view;
  };
  ModelCache once = Make(config), steps = Make(config);
  ASSERT_TRUE(once.Append(0, rows(key, 0, 200), rows(value, 0, 200)).ok());
  for (int64_t t = 0; t < 200; ++t) ASSERT_TRUE(steps.Append(0, rows(key, t, 1), rows(value, t, 1)).ok());
  ASSERT_TRUE(once.Freeze(-1).ok());
  ASSERT_TRUE(steps.Freeze(0).ok());
  ASSERT_EQ(once.layer(0).pages.size(), 14u);
  for (size_t p = 0; p < 14; ++p) {
    const CachePage &a = once.layer(0).pages[p], &b = steps.layer(0).pages[p];
    ASSERT_EQ(a.key.frozen, p > 0 && p < 13);
    for (const CacheSide* side : {&a.key, &a.value}) {
      const CacheSide& other = side == &a.key ? b.key : b.value;
      ASSERT_TRUE(SameBytes(side->payload->codes, other.payload->codes));
      ASSERT_TRUE(SameBytes(side->payload->scales, other.payload->scales));
      ASSERT_TRUE(SameBytes(side->payload->data, other.payload->data));
    }
    if (a.key.frozen) { EXPECT_TRUE(a.key.payload->center.Same(once.layer(0).center)); }
  }
}

TEST_P(ModelCacheTest, NothingFreezesBeforeTheCenterIsKnown) {
  ModelCache cache = Make(ConfigOf(1, 1, 8, "int4/token+center", "int4/token"));
  Random random(3);
  ASSERT_TRUE(AppendNoise(cache, 0, 67, random).ok());
  EXPECT_EQ(cache.Freeze(-1).value().value.pages, 0);
  ASSERT_TRUE(AppendNoise(cache, 0, 1, random).ok());
  const FreezeReport report = cache.Freeze(-1).value();
  EXPECT_EQ(report.key.pages, 4);
  EXPECT_EQ(report.key.elements, 64 * 8);
  EXPECT_GT(report.key.rmse(), 0);
  EXPECT_GE(report.key.max_error, report.key.rmse());
  EXPECT_EQ(report.key.bytes_before, 4u * 16 * 8 * 2);
  EXPECT_EQ(report.value.bytes_after, 4u * (16 * 8 / 2 + 16 * 4));
  EXPECT_EQ(cache.Freeze(-1).value().key.pages, 0) << "a page is encoded once";
}

TEST_P(ModelCacheTest, WhatOneLayerRefusesEncodesNoPageOfAnother) {
  Random random(10);
  const Shape shape{1, 1, 80, 8};
  auto values = Noise(random, 80 * 8);
  ModelConfig config = ConfigOf(2, 1, 8, "int8/token", "int8/token");
  config.hot = Type::f16;
  ModelCache cache = Make(config);
  const TensorView good = ContiguousView(values.data(), Type::f32, shape);
  const TensorView both[] = {good, good};
  ASSERT_TRUE(cache.AppendAll(both, both).ok());
  // Layer 0 has no page to encode now, layer 1 has.
  ASSERT_TRUE(cache.Freeze(0).ok());
  const int64_t frozen = cache.Stats().frozen_pages;
  auto large = values;
  large[70 * 8 + 3] = -1e6f;
  const TensorView bad[] = {ContiguousView(large.data(), Type::f32, shape), good};
  Status status = cache.AppendAll(both, bad);
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().layer, 0);
  EXPECT_EQ(cache.Stats().frozen_pages, frozen) << "what is refused changes nothing";
  ASSERT_TRUE(cache.AppendAll(both, both).ok());
  EXPECT_GT(cache.Stats().frozen_pages, frozen);
}

TEST_P(ModelCacheTest, NonFiniteValuesAreRefusedOrStayWhereTheyAre) {
  Random random(9);
  const Shape shape{1, 1, 80, 8};
  auto values = Noise(random, 80 * 8);
  // Finite, but beyond f16: it could never be encoded, so it must not get in.
  ModelConfig config = ConfigOf(2, 1, 8, "int8/token", "int8/token");
  config.hot = Type::f16;
  ModelCache narrow = Make(config);
  auto large = values;
  large[70 * 8 + 3] = -1e6f;
  const TensorView good = ContiguousView(values.data(), Type::f32, shape), bad = ContiguousView(large.data(), Type::f32, shape);
  Status status = narrow.Append(0, good, bad);
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().code, Code::kNonFinite);
  EXPECT_EQ(status.error().message, "layer 0: values: must fit f16, the type of dense pages, got -1e+06");
  const TensorView keys[] = {good, bad}, others[] = {good, good};
  status = narrow.AppendAll(keys, others);
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().layer, 1);
  EXPECT_EQ(narrow.tokens(), 0);
  EXPECT_EQ(narrow.Stats().bytes(), 0u);
  ASSERT_TRUE(narrow.AppendAll(others, others).ok());
  ASSERT_TRUE(narrow.Freeze(-1).ok());

  // Let in, they must not spoil the centre, and with it the layer and its file.
  config = ConfigOf(1, 1, 8, "int8/token+center", "int8/token");
  config.layers[0].key.options.non_finite = NonFinite::kSaturate;
  ModelCache cache = Make(config);
  auto holes = values;
  holes[10 * 8 + 2] = std::numeric_limits<float>::quiet_NaN();
  holes[12 * 8 + 5] = std::numeric_limits<float>::infinity();
  ASSERT_TRUE(cache.Append(0, ContiguousView(holes.data(), Type::f32, shape), good).ok());
  ASSERT_TRUE(cache.Freeze(-1).ok());
  EXPECT_GT(cache.Stats().frozen_pages, 3);
  std::vector<float> thawed(80 * 8);
  ASSERT_TRUE(cache.Read(0, false, 4, 68, thawed.data(), 0, 8).ok());
  for (size_t i = 0; i < 64 * 8; ++i) {
    EXPECT_TRUE(IsFinite(thawed[i])) << i;
    const bool spoilt = i / 8 == 6 || i / 8 == 8;
    EXPECT_TRUE(spoilt || std::fabs(thawed[i] - values[32 + i]) < 0.2f) << i;
  }
}

TEST_P(ModelCacheTest, EstimateIsWhatStatsCounts) {
  Random random(11);
  for (const int64_t residual : {0, 32}) {
    for (const char* key : {"int4/channel/16/mse/e4m3", "lm4/token/64/mse/e4m3+center+hadamard", "nvfp4", "q8_0", "f16", "uint4/channel/32/kivi/f16"}) {
      ModelConfig config = ConfigOf(2, 2, 32, key, "int8/token");
      config.residual = residual;
      config.keep_recent = residual / 3;
      for (const int64_t tokens : {0, 1, 4, 5, 20, 67, 68, 69, 200}) {
        ModelCache cache = Make(config);
        for (int64_t i = 0; i < 2 && tokens > 0; ++i) ASSERT_TRUE(AppendNoise(cache, i, tokens, random).ok());
        ASSERT_TRUE(cache.Freeze(-1).ok());
        const CacheStats have = cache.Stats(), want = EstimateBytes(cache.config(), tokens);
        SCOPED_TRACE(std::string(key) + " " + std::to_string(tokens));
        EXPECT_EQ(have.bytes(), want.bytes());
        EXPECT_EQ(have.kept_bytes, want.kept_bytes);
        EXPECT_EQ(have.hot_bytes, want.hot_bytes);
        EXPECT_EQ(have.frozen_pages, want.frozen_pages);
        EXPECT_EQ(have.hot_pages, want.hot_pages);
        EXPECT_EQ(have.kept_pages, want.kept_pages);
        EXPECT_DOUBLE_EQ(have.bits, want.bits);
        EXPECT_DOUBLE_EQ(have.overall_bits, want.overall_bits);
        EXPECT_EQ(have.bytes() - have.global_bytes, instance_->budget->used()) << "stats are what is allocated";
      }
    }
  }
}

TEST_P(ModelCacheTest, ForksShareAndCopyOnWrite) {
  ModelCache cache = Make(ConfigOf(1, 1, 8, "int8/token", "int8/token"));
  Random random(5);
  ASSERT_TRUE(AppendNoise(cache, 0, 40, random).ok());
  ASSERT_TRUE(cache.Freeze(-1).ok());
  const uint64_t alone = instance_->budget->used();
  EXPECT_EQ(cache.Stats().shared_pages, 0);
  {
    ModelCache fork = cache.Fork();
    EXPECT_EQ(instance_->budget->used(), alone);
    EXPECT_EQ(fork.Stats().shared_pages, 4);
    EXPECT_EQ(fork.Stats().shared_bytes, fork.Stats().bytes());
    std::vector<float> before(8), after(8);
    ASSERT_TRUE(cache.Read(0, false, 39, 40, before.data(), 8, 8).ok());
    ASSERT_TRUE(fork.Truncate(38).ok());
    ASSERT_TRUE(AppendNoise(fork, 0, 2, random).ok());
    EXPECT_EQ(instance_->budget->used(), alone + 2 * 16 * 8 * 2) << "only the hot page was copied";
    ASSERT_TRUE(cache.Read(0, false, 39, 40, after.data(), 8, 8).ok());
    EXPECT_TRUE(SameBits(before, after));
    EXPECT_EQ(fork.layer(0).pages[1].key.payload, cache.layer(0).pages[1].key.payload);
  }
  EXPECT_EQ(instance_->budget->used(), alone);
  EXPECT_EQ(cache.Stats().shared_pages, 0);
}

TEST_P(ModelCacheTest, ALimitLeavesTheTokensAsTheyWere) {
  const ModelConfig config = ConfigOf(3, 1, 8, "int8/token", "int8/token");
  Random random(9);
  ModelCache cache = Make(config, 6000);
  std::vector<std::vector<float>> data;
  std::vector<TensorView> keys, values;
  for (int i = 0; i < 6; ++i) {
    data.push_back(Noise(random, 8 * 9));
    (i % 2 ? values : keys).push_back(ContiguousView(data.back().data(), Type::f32, {1, 1, 9, 8}));
  }
  int64_t good = 0;
  for (;; ++good) {
    Status status = cache.AppendAll(keys, values);
    if (status.ok()) continue;
    EXPECT_EQ(status.error().code, Code::kLimit);
    break;
  }
  EXPECT_GT(good, 0);
  EXPECT_EQ(cache.EvenTokens().value(), good * 9);
  EXPECT_LE(cache.Stats().bytes(), 6000u);
  ASSERT_TRUE(cache.Truncate(9).ok());
  EXPECT_TRUE(cache.AppendAll(keys, values).ok()) << "there is room again";
}

TEST_P(ModelCacheTest, RefusesAndNames) {
  ModelConfig config = ConfigOf(2, 2, 8, "int8/token", "int8/token");
  ModelCache cache = Make(config);
  Random random(2);
  const auto good = Noise(random, 2 * 3 * 8);
  auto bad = good;
  bad[13] = std::numeric_limits<float>::quiet_NaN();
  const Shape shape{1, 2, 3, 8};
  const auto view = [&](const std::vector<float>& values, Shape as) { return ContiguousView(values.data(), Type::f32, as); };
  const auto refusal = [](Status status) {
    Error none;
    none.code = Code::kOk;
    return status.ok() ? none : status.error();
  };

  Error error = refusal(cache.Append(2, view(good, shape), view(good, shape)));
  EXPECT_EQ(error.code, Code::kArgument);
  EXPECT_EQ(error.message, "layer: must be 0 to 1, got 2");
  error = refusal(cache.Append(1, view(good, shape), view(good, {1, 2, 6, 4})));
  EXPECT_EQ(error.code, Code::kShape);
  EXPECT_EQ(error.layer, 1);
  EXPECT_EQ(error.side, "value");
  EXPECT_EQ(error.message, "layer 1 value: values: must be [kv_heads, tokens, head_dim] with at least one token, [1, 2, 3, 8], got [1, 2, 6, 4]");
  error = refusal(cache.Append(0, view(bad, shape), view(good, shape)));
  EXPECT_EQ(error.code, Code::kNonFinite);
  EXPECT_EQ(error.side, "key");
  EXPECT_NE(error.message.find("NaN at index 13"), std::string::npos) << error.message;
  EXPECT_EQ(refusal(cache.Append(0, view(good, {1, 2, 0, 8}), view(good, {1, 2, 0, 8}))).code, Code::kShape);
  EXPECT_EQ(cache.tokens(), 0);

  ASSERT_TRUE(cache.Append(0, view(good, shape), view(good, shape)).ok());
  error = cache.EvenTokens().error();
  EXPECT_EQ(error.code, Code::kMismatch);
  EXPECT_EQ(error.layer, 1);
  EXPECT_EQ(error.message, "cache: layer 1 must have the 3 tokens of layer 0, got 0");
  EXPECT_EQ(refusal(cache.Truncate(1)).layer, 1);
  ASSERT_TRUE(cache.Append(1, view(good, shape), view(good, shape)).ok());
  EXPECT_EQ(cache.EvenTokens().value(), 3);
  EXPECT_EQ(refusal(cache.Truncate(4)).code, Code::kArgument);
  EXPECT_EQ(refusal(cache.DropBefore(4, -1)).code, Code::kArgument);
  EXPECT_TRUE(cache.Truncate(2).ok()) << "also within the kept page";
  EXPECT_EQ(cache.Slice(1, 2).error().message, "layer 0: start: must be the start of a page; the page there starts at 0, got 1");

  for (int64_t i = 0; i < 2; ++i) ASSERT_TRUE(AppendNoise(cache, i, 60, random).ok());
  ASSERT_TRUE(cache.DropBefore(40, -1).ok());
  std::vector<float> out(2 * 62 * 8);
  error = refusal(cache.Read(0, false, 0, 62, out.data(), 62 * 8, 8));
  EXPECT_EQ(error.message, "layer 0: start: tokens 4 to 35 have been dropped, got 0 to 62");
  error = refusal(cache.Truncate(20));
  EXPECT_EQ(error.message, "layer 0: tokens: tokens 4 to 35 have been dropped, got 20");
  EXPECT_TRUE(cache.Read(0, true, 36, 62, out.data(), 26 * 8, 8).ok());
  EXPECT_TRUE(cache.Read(0, true, 0, 4, out.data(), 4 * 8, 8).ok());

  config.layers[1].value.spec = SpecOf("int8/token+center");
  EXPECT_EQ(ModelCache::Create(instance_, config, 0).error().message,
            "layer 1 value: value: +center is for keys only, got int8/token/8/absmax/f32+center");
  config.layers[1].value.spec = SpecOf("int8/tensor/given");
  EXPECT_EQ(ModelCache::Create(instance_, config, 0).error().code, Code::kSpec);
  config = ConfigOf(1, 1, 8, "int8", "int8");
  config.page_tokens = 16;
  config.residual = 24;
  EXPECT_EQ(ModelCache::Create(instance_, config, 0).error().message, "residual: must be a multiple of pageTokens, 16, got 24");
}

TEST_P(ModelCacheTest, PagedViewAndBack) {
  Random random(21);
  ModelCache cache = Make(ConfigOf(1, 2, 16, "lm4/token/8/mse/e4m3+center+hadamard", "int4/token/16/mse/e4m3"));
  ASSERT_TRUE(AppendNoise(cache, 0, 110, random).ok());
  ASSERT_TRUE(cache.Freeze(-1).ok());
  ASSERT_TRUE(cache.Truncate(90).ok());
  ASSERT_TRUE(AppendNoise(cache, 0, 7, random).ok());
  auto paged = cache.ToPaged(0);
  ASSERT_TRUE(paged.ok());
  ASSERT_TRUE(Validate(paged.value()).ok());
  EXPECT_EQ(paged.value().pages[1].key, cache.layer(0).pages[1].key.payload) << "shared";
  const PagedCache* layers[] = {&paged.value()};
  auto taken = LayersFromPaged(cache.config(), layers);
  ASSERT_TRUE(taken.ok()) << taken.error().message;
  auto back = ModelCache::Assemble(instance_, cache.config(), std::move(taken.value()));
  ASSERT_TRUE(back.ok()) << back.error().message;
  std::vector<float> a(2 * 97 * 16), b(a.size());
  for (const bool side : {false, true}) {
    ASSERT_TRUE(cache.Read(0, side, 0, 97, a.data(), 97 * 16, 16).ok());
    ASSERT_TRUE(back.value().Read(0, side, 0, 97, b.data(), 97 * 16, 16).ok());
    EXPECT_TRUE(SameBits(a, b));
  }
  // Both go on alike.
  Random same(33), again(33);
  ASSERT_TRUE(AppendNoise(cache, 0, 40, same).ok());
  ASSERT_TRUE(AppendNoise(back.value(), 0, 40, again).ok());
  ASSERT_TRUE(cache.Freeze(-1).ok());
  ASSERT_TRUE(back.value().Freeze(-1).ok());
  a.resize(2 * 137 * 16);
  b.resize(a.size());
  ASSERT_TRUE(cache.Read(0, false, 0, 137, a.data(), 137 * 16, 16).ok());
  ASSERT_TRUE(back.value().Read(0, false, 0, 137, b.data(), 137 * 16, 16).ok());
  EXPECT_TRUE(SameBits(a, b));

  cache = Make(ConfigOf(1, 3, 16, "int8", "int8"));
  EXPECT_EQ(ModelCache::Assemble(instance_, cache.config(), LayersFromPaged(cache.config(), layers).value()).error().code, Code::kMismatch);
}

TEST_P(ModelCacheTest, CutPayloadKeepsTheRows) {
  Random random(4);
  for (const std::string& text : AllSpecs()) {
    Spec spec = SpecOf(text.c_str());
    if (spec.calibration == Calibration::kGiven) continue;
    const bool scheme = Info(spec.type).family == Family::kScheme;
    const Shape shape{1, 3, 7, scheme ? 64 : 13};
    const auto values = Noise(random, shape.elements());
    auto made = Encode(instance_, ContiguousView(values.data(), Type::f32, shape), 7, spec, {}, "x");
    ASSERT_TRUE(made.ok()) << text << ": " << made.error().message;
    auto cut = CutPayload(instance_, *made.value(), 4);
    ASSERT_TRUE(cut.ok());
    std::vector<float> a(static_cast<size_t>(3 * 4 * shape.width)), b(a.size());
    ASSERT_TRUE(Decode(instance_, *made.value(), 0, 4, a.data(), 0, 4 * shape.width, shape.width).ok());
    ASSERT_TRUE(Decode(instance_, *cut.value(), 0, 4, b.data(), 0, 4 * shape.width, shape.width).ok());
    EXPECT_TRUE(SameBits(a, b)) << text;
    EXPECT_LT(cut.value()->bytes(), made.value()->bytes()) << text;
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, ModelCacheTest, ::testing::ValuesIn(AllBackends()),
                         [](const auto& info) { return std::string(info.param->name); });

}  // namespace
}  // namespace kvpages
