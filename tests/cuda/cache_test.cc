// SPDX-License-Identifier: Apache-2.0
// Caches on a device beside caches in the host's memory: after the same calls the same bytes.
#include "backends/cuda/store.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "cuda/caches.h"
#include "cuda/devices.h"

namespace kvpages::cuda {
namespace {

class DeviceCache : public ::testing::Test {
 protected:
  void SetUp() override {
    KVP_DEVICE_OR_SKIP(device);
    host_->backend = &kReferenceBackend;
    there_->backend = &kReferenceBackend;
    there_->device = MakeStore(device);
  }
  InstanceRef host_ = std::make_shared<Instance>(), there_ = std::make_shared<Instance>();
};

// One cache twice.
struct Pair {
  ModelCache here, there;
};

void ExpectAlike(const Pair& pair) {
  ASSERT_EQ(pair.here.tokens(), pair.there.tokens());
  const CacheStats a = pair.here.Stats(), b = pair.there.Stats();
  EXPECT_EQ(a.kept_bytes, b.kept_bytes);
  EXPECT_EQ(a.hot_bytes, b.hot_bytes);
  EXPECT_EQ(a.code_bytes, b.code_bytes);
  EXPECT_EQ(a.scale_bytes, b.scale_bytes);
  EXPECT_EQ(a.zero_bytes, b.zero_bytes);
  EXPECT_EQ(a.global_bytes, b.global_bytes);
  EXPECT_EQ(a.center_bytes, b.center_bytes);
  EXPECT_EQ(a.shared_pages, b.shared_pages);
  EXPECT_EQ(a.frozen_pages, b.frozen_pages);
  EXPECT_EQ(a.hot_pages, b.hot_pages);
  EXPECT_EQ(a.frozen.key.squared_error, b.frozen.key.squared_error);
  EXPECT_EQ(a.frozen.value.saturated, b.frozen.value.saturated);
  if (pair.here.EvenTokens().ok()) { ASSERT_TRUE(FileOf(pair.here) == FileOf(pair.there)); }
}

void ExpectAttentionWithin(const ModelCache& cache, int64_t layer, Random& random) {
  const LayerConfig& config = cache.config().layers[static_cast<size_t>(layer)];
  const int64_t heads = config.heads * 2, tokens = std::min<int64_t>(cache.layer(layer).end, 2);
  if (tokens == 0) return;
  const auto queries = Noise(random, heads * tokens * config.key.width);
  std::vector<float> out(static_cast<size_t>(heads * tokens * config.value.width)), lse(static_cast<size_t>(heads * tokens));
  AttendOptions options;
  options.sinks = 2;
  options.window = Between(random, 0, 1) ? 20 : 0;
  const TensorView view = ContiguousView(queries.data(), Type::f32, {1, heads, tokens, config.key.width});
  const Status status = Attend(cache, layer, view, options, out.data(), lse.data());
  ASSERT_TRUE(status.ok()) << status.error().message;
  const test::Exact exact = test::ExactAttention(cache, layer, queries, heads, tokens, options);
  for (size_t i = 0; i < out.size(); ++i) {
    ASSERT_LE(std::fabs(out[i] - exact.out[i]), exact.out_bound[i / static_cast<size_t>(config.value.width)]) << i;
  }
  for (size_t i = 0; i < lse.size(); ++i) {
    if (std::isinf(exact.lse[i])) { ASSERT_EQ(lse[i], exact.lse[i]); } else { ASSERT_LE(std::fabs(lse[i] - exact.lse[i]), exact.lse_bound[i]); }
  }
}

TEST_F(DeviceCache, EveryPresetGivesTheHostsFile) {
  for (const Preset& preset : Presets()) {
    SCOPED_TRACE(preset.name);
    Random random(5);
    const ModelConfig config = ConfigOf(2, 2, 64, preset.key, preset.value);
    Pair pair{NewCache(host_, config), NewCache(there_, config)};
    for (const int64_t count : {70, 1, 1, 40}) {
      const Tokens tokens = NewTokens(config, count, random);
      ASSERT_TRUE(pair.here.AppendAll(tokens.keys, tokens.values).ok());
      const Status status = pair.there.AppendAll(tokens.keys, tokens.values);
      ASSERT_TRUE(status.ok()) << status.error().message;
    }
    const auto report = pair.there.Freeze(-1);
    ASSERT_TRUE(report.ok()) << report.error().message;
    EXPECT_EQ(pair.here.Freeze(-1).value().key.squared_error, report.value().key.squared_error);
    ExpectAlike(pair);
    ExpectAttentionWithin(pair.there, 1, random);
    if (HasFatalFailure()) return;
  }
  EXPECT_EQ(there_->budget->used(), 0u);
}

TEST_F(DeviceCache, AnySequenceOfCallsGivesTheHostsFile) {
  for (uint32_t seed = 1; seed <= 12; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Random random(seed);
    const ModelConfig config = test::RandomConfig(random);
    std::vector<Pair> pairs;
    pairs.push_back({NewCache(host_, config), NewCache(there_, config)});
    for (int step = 0; step < 30; ++step) {
      Pair& pair = pairs[random() % pairs.size()];
      const int64_t tokens = pair.here.tokens();
      switch (Between(random, 0, 9)) {
        case 0: case 1: case 2: case 3: {
          const Tokens more = NewTokens(config, Between(random, 0, 2) == 0 ? Between(random, 1, 50) : Between(random, 1, 3), random);
          if (random() % 2) {
            ASSERT_TRUE(pair.here.AppendAll(more.keys, more.values).ok());
            ASSERT_TRUE(pair.there.AppendAll(more.keys, more.values).ok());
            break;
          }
          for (size_t i = 0; i < config.layers.size(); ++i) {
            ASSERT_TRUE(pair.here.Append(static_cast<int64_t>(i), more.keys[i], more.values[i]).ok());
            ASSERT_TRUE(pair.there.Append(static_cast<int64_t>(i), more.keys[i], more.values[i]).ok());
          }
          break;
        }
        case 4: {
          const auto layer = random() % 2 ? int64_t{-1} : Between(random, 0, pair.here.layer_count() - 1);
          const FreezeReport a = pair.here.Freeze(layer).value(), b = pair.there.Freeze(layer).value();
          ASSERT_EQ(a.key.pages, b.key.pages);
          ASSERT_EQ(a.value.rmse(), b.value.rmse());
          ASSERT_EQ(a.key.max_error, b.key.max_error);
          break;
        }
        case 5: {
          const int64_t n = random() % 4 ? std::max<int64_t>(0, tokens - Between(random, 0, 20)) : Between(random, 0, tokens);
          ASSERT_EQ(pair.here.Truncate(n).ok(), pair.there.Truncate(n).ok());
          break;
        }
        case 6: {
          const int64_t n = Between(random, 0, tokens);
          ASSERT_EQ(pair.here.DropBefore(n, -1).ok(), pair.there.DropBefore(n, -1).ok());
          break;
        }
        case 7: {
          if (pairs.size() > 3) pairs.erase(pairs.begin() + static_cast<int64_t>(random() % pairs.size()));
          else pairs.push_back({pair.here.Fork(), pair.there.Fork()});
          break;
        }
        case 8: {
          // There and back, and on.
          auto up = pair.here.MoveTo(there_), down = pair.there.MoveTo(host_);
          ASSERT_TRUE(up.ok() && down.ok());
          pair = {std::move(down.value()), std::move(up.value())};
          break;
        }
        default: {
          if (random() % 2 && pair.here.EvenTokens().ok()) {
            const std::string file = FileOf(pair.here);
            auto restored = Restored(there_, file), at_home = Restored(host_, file);
            ASSERT_TRUE(restored.ok()) << restored.error().message;
            pair = {std::move(at_home.value()), std::move(restored.value())};
            break;
          }
          const auto& pages = pair.here.layer(0).pages;
          if (pages.empty()) break;
          const int64_t begin = pages[random() % pages.size()].start, end = Between(random, begin, tokens);
          auto a = pair.here.Slice(begin, end), b = pair.there.Slice(begin, end);
          ASSERT_EQ(a.ok(), b.ok());
          if (a.ok() && pairs.size() < 4) pairs.push_back({std::move(a.value()), std::move(b.value())});
        }
      }
      if (step % 5 == 4) {
        for (const Pair& each : pairs) {
          ExpectAlike(each);
          // Attention goes over what its table of pages says, whatever was cut since.
          const bool even = each.there.EvenTokens().ok();
          if (even) ExpectAttentionWithin(each.there, Between(random, 0, each.there.layer_count() - 1), random);
          if (HasFatalFailure()) return;
        }
      }
    }
    pairs.clear();
    ASSERT_EQ(host_->budget->used(), 0u);
    ASSERT_EQ(there_->budget->used(), 0u) << "everything is given back";
  }
}

TEST_F(DeviceCache, ALimitIsTheHosts) {
  const ModelConfig config = ConfigOf(3, 1, 8, "int8/token", "int8/token");
  Random random(9);
  Pair pair{NewCache(host_, config, 6000), NewCache(there_, config, 6000)};
  const Tokens tokens = NewTokens(config, 9, random);
  for (;;) {
    const Status a = pair.here.AppendAll(tokens.keys, tokens.values), b = pair.there.AppendAll(tokens.keys, tokens.values);
    ASSERT_EQ(a.ok(), b.ok());
    ExpectAlike(pair);
    if (a.ok()) continue;
    EXPECT_EQ(b.error().code, Code::kLimit);
    EXPECT_EQ(a.error().message, b.error().message);
    break;
  }
}

// A page of a file may hold what an append refuses: the pages before it are encoded, and the error is the host's.
TEST_F(DeviceCache, PagesThatCannotBeEncodedAreRefusedAlike) {
  for (const NonFinite non_finite : {NonFinite::kError, NonFinite::kSaturate}) {
    ModelConfig config = ConfigOf(1, 2, 16, "lm4/token/16/mse/e4m3+hadamard", "int8/token");
    config.keep_first = 0;
    config.layers[0].key.options.non_finite = non_finite;
    Random random(37);
    auto values = Noise(random, 2 * 64 * 16);
    values[(64 + 37) * 16 + 5] = std::numeric_limits<float>::infinity();
    values[(64 + 50) * 16 + 1] = std::numeric_limits<float>::quiet_NaN();
    PagedCache paged;
    for (int64_t at = 0; at < 64; at += 16) {
      Page page;
      page.start = at;
      page.length = 16;
      std::vector<uint16_t> rows;
      for (int64_t i = 0; i < 2 * 16 * 16; ++i) rows.push_back(ToBF16(values[static_cast<size_t>(i / 256 * 64 * 16 + at * 16 + i % 256)]));
      page.key = MakeDense(host_, ContiguousView(rows.data(), Type::bf16, {1, 2, 16, 16})).value();
      for (uint16_t& bits : rows) bits = 0x3f80;
      page.value = MakeDense(host_, ContiguousView(rows.data(), Type::bf16, {1, 2, 16, 16})).value();
      paged.pages.push_back(page);
    }
    const PagedCache* layers[] = {&paged};
    const auto make = [&](const InstanceRef& instance) {
      const ModelConfig resolved = ResolveConfig(config).value();
      return ModelCache::Assemble(ModelCache::OwnInstance(instance, 0), resolved, LayersFromPaged(resolved, layers).value()).value();
    };
    Pair pair{make(host_), make(there_)};
    const auto a = pair.here.Freeze(-1), b = pair.there.Freeze(-1);
    ASSERT_EQ(a.ok(), b.ok());
    EXPECT_EQ(a.ok(), non_finite == NonFinite::kSaturate);
    if (!a.ok()) { EXPECT_EQ(a.error().message, b.error().message); }
    for (size_t i = 0; i < 4; ++i) {
      const CacheSide &x = pair.here.layer(0).pages[i].key, &y = pair.there.layer(0).pages[i].key;
      EXPECT_EQ(x.frozen, y.frozen) << i;
      EXPECT_EQ(x.figures.saturated, y.figures.saturated);
      EXPECT_TRUE(x.figures.squared_error == y.figures.squared_error || (std::isnan(x.figures.squared_error) && std::isnan(y.figures.squared_error)));
      EXPECT_EQ(x.figures.max_error, y.figures.max_error);
    }
  }
}

TEST_F(DeviceCache, ManySequencesAttendInOneCall) {
  ModelConfig config = ConfigOf(1, 2, 32, "lm4/token/64/mse/e4m3+center+hadamard", "lm3/token/16/mse/f16+hadamard");
  config.layers[0].key.spec.block = 32;
  Random random(17);
  std::vector<ModelCache> caches;
  for (const int64_t count : {200, 1, 37, 90}) {
    caches.push_back(NewCache(there_, config));
    const Tokens tokens = NewTokens(config, count, random);
    ASSERT_TRUE(caches.back().AppendAll(tokens.keys, tokens.values).ok());
    ASSERT_TRUE(caches.back().Freeze(-1).ok());
  }
  caches.push_back(caches[0].Fork());
  const ModelConfig other = ConfigOf(1, 2, 32, "int8/token", "int8/token");
  caches.push_back(NewCache(there_, other));
  caches.push_back(caches[0].MoveTo(host_).value());
  const Tokens tokens = NewTokens(other, 30, random);
  ASSERT_TRUE(caches[5].AppendAll(tokens.keys, tokens.values).ok());
  const auto queries = Noise(random, 7 * 4 * 32);
  const auto query = [&](size_t i) { return ContiguousView(queries.data() + i * 4 * 32, Type::f32, {1, 4, 1, 32}); };
  std::vector<float> together(7 * 4 * 32), lse(7 * 4), alone(4 * 32);
  std::vector<AttendTask> tasks;
  for (size_t i = 0; i < caches.size(); ++i) tasks.push_back({&caches[i], query(i), together.data() + i * 4 * 32, lse.data() + i * 4});
  ASSERT_TRUE(AttendAll(tasks, 0, {}).ok());
  for (size_t i = 0; i < caches.size(); ++i) {
    ASSERT_TRUE(Attend(caches[i], 0, query(i), {}, alone.data(), nullptr).ok());
    EXPECT_TRUE(std::equal(alone.begin(), alone.end(), together.begin() + static_cast<int64_t>(i * 4 * 32))) << i;
  }
  auto bad = queries;
  bad[2 * 4 * 32 + 1] = std::numeric_limits<float>::quiet_NaN();
  tasks[2].queries.data = bad.data() + 2 * 4 * 32;
  const Status status = AttendAll(tasks, 0, {});
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().message.rfind("cache 2: ", 0), 0u) << status.error().message;
}

// Long prompts are cut where the working memory of attention would be too much; which way does not show.
TEST_F(DeviceCache, ManyQueriesAreTheQueriesOneByOne) {
  const ModelConfig config = ConfigOf(1, 1, 16, "int8/token", "int8/token");
  Random random(23);
  ModelCache cache = NewCache(there_, config);
  const Tokens tokens = NewTokens(config, 40, random);
  ASSERT_TRUE(cache.AppendAll(tokens.keys, tokens.values).ok());
  const auto queries = Noise(random, 2 * 40 * 16);
  std::vector<float> all(2 * 40 * 16), one(2 * 16);
  TensorView view = ContiguousView(queries.data(), Type::f32, {1, 2, 40, 16});
  ASSERT_TRUE(Attend(cache, 0, view, {}, all.data(), nullptr).ok());
  for (int64_t t = 0; t < 40; ++t) {
    view.data = queries.data() + t * 16;
    view.shape.tokens = 1;
    AttendOptions options;
    options.query_start = t;
    ASSERT_TRUE(Attend(cache, 0, view, options, one.data(), nullptr).ok());
    for (int64_t h = 0; h < 2; ++h) {
      EXPECT_TRUE(std::equal(one.begin() + h * 16, one.begin() + (h + 1) * 16, all.begin() + (h * 40 + t) * 16)) << t;
    }
  }
}

TEST_F(DeviceCache, TensorsAreEncodedAndDecodedThere) {
  Random random(29);
  for (const Preset& preset : Presets()) {
    for (const bool value_side : {false, true}) {
      const Spec spec = SpecOf(value_side ? preset.value : preset.key);
      SCOPED_TRACE(CanonicalSpec(spec));
      const Shape shape{2, 3, 21, 64};
      const auto values = Noise(random, 2 * 3 * 30 * 70);
      TensorView view = ContiguousView(values.data(), Type::f32, shape);
      view.token_stride = 70;
      view.head_stride = 30 * 70;
      view.batch_stride = 3 * 30 * 70;
      auto a = Encode(host_, view, 19, spec, {}, "x"), b = Encode(there_, view, 19, spec, {}, "x");
      ASSERT_TRUE(a.ok() && b.ok()) << (b.ok() ? "" : b.error().message);
      const auto same = [](const Bytes& x, const Bytes& y) { return std::equal(x.data(), x.data() + x.size(), y.data(), y.data() + y.size()); };
      EXPECT_TRUE(same(a.value()->codes, b.value()->codes));
      EXPECT_TRUE(same(a.value()->scales, b.value()->scales));
      EXPECT_TRUE(same(a.value()->zeros, b.value()->zeros));
      EXPECT_TRUE(same(a.value()->data, b.value()->data));
      EXPECT_EQ(a.value()->global, b.value()->global);
      EXPECT_EQ(a.value()->affine, b.value()->affine);
      for (const int64_t stride : {64, 67}) {
        std::vector<float> x(2 * 3 * 20 * 67), y(x.size());
        ASSERT_TRUE(Decode(host_, *a.value(), 2, 19, x.data(), 3 * 20 * 67, 20 * 67, stride).ok());
        ASSERT_TRUE(Decode(there_, *b.value(), 2, 19, y.data(), 3 * 20 * 67, 20 * 67, stride).ok());
        EXPECT_EQ(std::memcmp(x.data(), y.data(), x.size() * 4), 0);
      }
    }
  }
  auto bad = Noise(random, 64);
  bad[9] = std::numeric_limits<float>::infinity();
  const TensorView view = ContiguousView(bad.data(), Type::f32, {1, 1, 1, 64});
  const auto refusal = [&](const InstanceRef& instance) { return Encode(instance, view, 1, SpecOf("int8/token"), {}, "x").error().message; };
  EXPECT_EQ(refusal(host_), refusal(there_));
}

// Scales that are given, and layouts of files.
TEST_F(DeviceCache, AffineLayoutsOfFiles) {
  Random random(31);
  const Shape shape{1, 4, 6, 10};
  for (int axis = -1; axis < 4; ++axis) {
    for (const int64_t block : {0, 3}) {
      if (axis < 0 && block > 0) continue;
      SCOPED_TRACE(std::to_string(axis) + " " + std::to_string(block));
      const int64_t count = AffineGrid(shape, axis, block).count;
      std::vector<uint8_t> codes(static_cast<size_t>(shape.elements() / 2)), zeros(static_cast<size_t>(count));
      std::vector<float> scales(static_cast<size_t>(count));
      for (uint8_t& code : codes) code = static_cast<uint8_t>(random());
      for (uint8_t& zero : zeros) zero = static_cast<uint8_t>(random() % 16);
      for (float& scale : scales) scale = static_cast<float>(1 + random() % 9) / 8;
      for (const bool with_zeros : {false, true}) {
        AffineParts parts;
        parts.codes = codes;
        parts.scales = {reinterpret_cast<const uint8_t*>(scales.data()), scales.size() * 4};
        if (with_zeros) parts.zeros = zeros;
        const PayloadRef payload = MakeAffine(host_, shape, Type::uint4, axis, block, std::move(parts)).value();
        std::vector<float> x(static_cast<size_t>(shape.elements())), y(x.size()), z(x.size());
        ASSERT_TRUE(Decode(host_, *payload, 0, 6, x.data(), 0, 60, 10).ok());
        ASSERT_TRUE(Decode(there_, *payload, 0, 6, y.data(), 0, 60, 10).ok());
        EXPECT_EQ(x, y);
        const PayloadRef up = there_->device->Upload(payload, nullptr).value();
        const ReadTask task{up.get(), 0, 6, z.data()};
        ASSERT_TRUE(there_->device->Read(there_, {&task, 1}, 60, 10).ok());
        EXPECT_EQ(x, z);
        const PayloadRef down = there_->device->Download(up, nullptr).value();
        EXPECT_TRUE(std::equal(codes.begin(), codes.end(), down->codes.data()));
        EXPECT_EQ(down->axis, axis);
      }
    }
  }
}

}  // namespace
}  // namespace kvpages::cuda
