// SPDX-License-Identifier: Apache-2.0
// attend against attention in float64 over the thawed cache, within the bound of docs/attention.md.
#include "attention/attend.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <iterator>
#include <limits>
#include <random>

#include "attention/coded.h"
#include "attention/kernels.h"
#include "support/caches.h"
#include "support/exact_attention.h"
#include "support/vectors.h"

namespace kvpages {
namespace {

using test::Exact;
using test::ExactAttention;
using test::JsonValue;
using test::VectorFile;
using test::Noise;
using test::SpecOf;
using Random = std::mt19937;

class AttentionTest : public ::testing::TestWithParam<const Backend*> {
 protected:
  void SetUp() override {
    if (!GetParam()->available()) GTEST_SKIP() << "skipped: this processor has no " << GetParam()->name;
    instance_->backend = GetParam();
    EXPECT_EQ(AttentionKernelsFor(GetParam()->name).name, std::string(GetParam()->name));
  }
  // The largest share of the bound that was used.
  double Check(const ModelCache& cache, int64_t layer, const std::vector<float>& queries, int64_t heads, int64_t tokens,
               const AttendOptions& options) {
    const LayerConfig& config = cache.config().layers[static_cast<size_t>(layer)];
    std::vector<float> out(static_cast<size_t>(heads * tokens * config.value.width)), lse(static_cast<size_t>(heads * tokens));
    Status status = Attend(cache, layer, ContiguousView(queries.data(), Type::f32, {1, heads, tokens, config.key.width}), options,
                           out.data(), lse.data());
    EXPECT_TRUE(status.ok()) << (status.ok() ? "" : status.error().message);
    return Compare(out, lse, ExactAttention(cache, layer, queries, heads, tokens, options));
  }
  static double Compare(const std::vector<float>& out, const std::vector<float>& lse, const Exact& exact) {
    double share = 0;
    EXPECT_EQ(out.size(), exact.out.size());
    const size_t width = out.size() / lse.size();
    for (size_t i = 0; i < out.size(); ++i) {
      const double error = std::fabs(out[i] - exact.out[i]), bound = exact.out_bound[i / width];
      EXPECT_LE(error, bound) << "row " << i / width << " channel " << i % width << " " << out[i] << " " << exact.out[i];
      if (bound > 0) share = std::max(share, error / bound);
      if (::testing::Test::HasFailure()) return share;
    }
    for (size_t i = 0; i < lse.size(); ++i) {
      if (std::isinf(exact.lse[i])) {
        EXPECT_EQ(lse[i], -INFINITY);
      } else {
        EXPECT_LE(std::fabs(lse[i] - exact.lse[i]), exact.lse_bound[i]);
      }
    }
    return share;
  }
  ModelCache Make(const ModelConfig& config) {
    auto made = ModelCache::Create(instance_, config, 0);
    EXPECT_TRUE(made.ok()) << (made.ok() ? "" : made.error().message);
    return std::move(made.value());
  }
  static ModelConfig Config(int64_t heads, int64_t width, const Spec& key, const Spec& value) {
    ModelConfig config;
    LayerConfig layer;
    layer.heads = heads;
    layer.key.spec = key;
    layer.value.spec = value;
    layer.key.width = layer.value.width = width;
    config.layers.push_back(layer);
    return config;
  }
  static void AppendNoise(ModelCache& cache, int64_t tokens, Random& random) {
    const LayerConfig& config = cache.config().layers[0];
    const auto key = Noise(random, config.heads * tokens * config.key.width), value = Noise(random, config.heads * tokens * config.value.width);
    ASSERT_TRUE(cache.Append(0, ContiguousView(key.data(), Type::f32, {1, config.heads, tokens, config.key.width}),
                             ContiguousView(value.data(), Type::f32, {1, config.heads, tokens, config.value.width}))
                    .ok());
  }
  InstanceRef instance_ = std::make_shared<Instance>();
};

TEST_P(AttentionTest, Vectors) {
  const VectorFile& file = VectorFile::Load("attention");
  int compared = 0;
  for (const auto& [name, params] : file.cases()) {
    if (!params.has("cache")) continue;
    SCOPED_TRACE(name);
    const std::string source = params["cache"].text;
    const JsonValue& about = file.cases().at(source);
    const int64_t heads = about["heads"].integer(), kv_heads = about["kv_heads"].integer(), width = about["dim"].integer(),
                  held = about["tokens"].integer(), queries = about["queries"].integer();
    const auto positions = file.get<int32_t>(name, "pos"), query_positions = file.get<int32_t>(name, "qpos");
    const auto q = file.get<float>(source, "q");
    ModelConfig config = Config(kv_heads, width, SpecOf(about["key"].text), SpecOf(about["value"].text));
    const int64_t sinks = params.has("sinks") ? params["sinks"].integer() : 0;
    // Where positions have a gap the kept tokens stand in a page of their own, of the thawed values; else one page is coded.
    std::vector<CacheLayer> layers(1);
    int64_t gap = 0;
    while (gap < held && positions[static_cast<size_t>(gap)] == gap) ++gap;
    config.keep_first = gap < held ? gap : 0;
    for (int64_t begin = 0; begin < held;) {
      const int64_t end = begin < gap ? gap : held;
      CachePage page;
      page.start = positions[static_cast<size_t>(begin)];
      page.length = end - begin;
      page.kept = gap < held && begin == 0;
      for (const bool value_side : {false, true}) {
        CacheSide& side = value_side ? page.value : page.key;
        const std::string field = value_side ? "v" : "k";
        const auto values = file.get<float>(source, gap < held ? field : field + "_source");
        TensorView view = ContiguousView(values.data() + begin * width, Type::f32, {1, kv_heads, end - begin, width});
        view.head_stride = held * width;
        const Spec spec = value_side ? config.layers[0].value.spec : config.layers[0].key.spec;
        auto made = gap < held ? MakeDense(instance_, view) : Encode(instance_, view, end - begin, spec, {}, "x");
        ASSERT_TRUE(made.ok()) << made.error().message;
        side.payload = made.value();
        side.frozen = gap == held;
      }
      layers[0].pages.push_back(page);
      layers[0].end = page.end();
      begin = end;
    }
    auto cache = ModelCache::Assemble(instance_, config, std::move(layers));
    ASSERT_TRUE(cache.ok()) << cache.error().message;
    std::vector<float> thawed(static_cast<size_t>(kv_heads * held * width));
    if (gap == held) {
      ASSERT_TRUE(cache.value().Read(0, false, 0, held, thawed.data(), held * width, width).ok());
      EXPECT_EQ(thawed, file.get<float>(source, "k")) << "thaws to what the vectors say";
    }
    AttendOptions options;
    options.scale = about["scale"].number;
    options.sinks = sinks;
    if (params.has("window")) options.window = params["window"].integer();
    if (params.has("softcap")) options.softcap = params["softcap"].number;
    const auto want_out = file.get<double>(name, "out"), want_lse = file.get<double>(name, "lse");
    // Query by query: their positions need not follow one another.
    for (int64_t i = 0; i < queries; ++i) {
      options.query_start = query_positions[static_cast<size_t>(i)];
      std::vector<float> rows, out(static_cast<size_t>(heads * width)), lse(static_cast<size_t>(heads));
      Exact exact;
      for (int64_t h = 0; h < heads; ++h) {
        const int64_t row = h * queries + i;
        rows.insert(rows.end(), q.begin() + row * width, q.begin() + (row + 1) * width);
        exact.out.insert(exact.out.end(), want_out.begin() + row * width, want_out.begin() + (row + 1) * width);
        exact.lse.push_back(want_lse[static_cast<size_t>(row)]);
      }
      const Exact own = ExactAttention(cache.value(), 0, rows, heads, 1, options);
      for (size_t k = 0; k < own.out.size(); ++k) ASSERT_NEAR(own.out[k], exact.out[k], 1e-9) << "this test's float64 agrees";
      exact.out_bound = own.out_bound;
      exact.lse_bound = own.lse_bound;
      ASSERT_TRUE(Attend(cache.value(), 0, ContiguousView(rows.data(), Type::f32, {1, heads, 1, width}), options, out.data(), lse.data()).ok());
      Compare(out, lse, exact);
      if (HasFailure()) return;
      ++compared;
    }
    // And all at once where they do.
    bool follow = true;
    for (int64_t i = 1; i < queries; ++i) follow &= query_positions[static_cast<size_t>(i)] == query_positions[0] + i;
    if (!follow) continue;
    options.query_start = query_positions[0];
    Check(cache.value(), 0, q, heads, queries, options);
  }
  EXPECT_EQ(compared, 7 * (4 + 1 + 3));
}

TEST_P(AttentionTest, EverySpecWithinTheBound) {
  Random random(1);
  for (const std::string& text : AllSpecs()) {
    const Spec spec = SpecOf(text);
    if (spec.calibration == Calibration::kGiven) continue;
    SCOPED_TRACE(text);
    // Searches for scales take the reference long: small pages.
    const int64_t width = text.size() % 2 ? 32 : 96;
    ModelConfig config = Config(1, width, spec, spec);
    config.page_tokens = 8;
    ModelCache cache = Make(config);
    AppendNoise(cache, 22, random);
    ASSERT_TRUE(cache.Freeze(-1).ok());
    AppendNoise(cache, 3, random);
    ASSERT_EQ(cache.Stats().frozen_pages, 2);
    Check(cache, 0, Noise(random, 2 * 2 * width), 2, 2, {});
    if (HasFailure()) return;
  }
}

TEST_P(AttentionTest, EveryOption) {
  const char* const keys[] = {"lm4/token/64/mse/e4m3+center+hadamard", "int4/channel/16/mse/e4m3", "nvfp4", "int8/token/32/absmax/f16", "uint4/token/8/minmax", "bf16"};
  const char* const values[] = {"lm4/token/64/mse/e4m3+hadamard", "int4/token/16/mse/e4m3", "nvfp4", "e4m3/tensor", "f16"};
  for (uint32_t seed = 1; seed <= 40; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Random random(seed);
    const auto pick = [&](int64_t low, int64_t high) { return low + static_cast<int64_t>(random() % static_cast<uint64_t>(high - low + 1)); };
    ModelConfig config = Config(pick(1, 3), 32 * pick(1, 4), SpecOf(keys[random() % std::size(keys)]), SpecOf(values[random() % std::size(values)]));
    config.layers[0].value.width = 32 * pick(1, 3);
    config.layers[0].window = pick(0, 3) == 0 ? pick(1, 60) : 0;
    config.page_tokens = pick(0, 1) ? 16 : pick(3, 80);
    config.hot = pick(0, 2) == 0 ? Type::f32 : Type::bf16;
    ModelCache cache = Make(config);
    for (int64_t left = pick(1, 6); left > 0; --left) AppendNoise(cache, pick(1, 160), random);
    if (pick(0, 2) == 0) { ASSERT_TRUE(cache.DropBefore(pick(0, cache.tokens()), -1).ok()); }
    if (pick(0, 3) == 0) {
      const int64_t n = cache.tokens() - pick(0, 5);
      if (n > 0) (void)cache.Truncate(n).ok();
    }
    const int64_t heads = config.layers[0].heads * pick(1, 3), tokens = std::min(cache.tokens(), pick(0, 3) == 0 ? pick(30, 90) : pick(1, 4));
    if (tokens == 0) continue;
    AttendOptions options;
    if (pick(0, 1)) options.window = pick(0, 80);
    if (pick(0, 1)) options.sinks = pick(0, 6);
    if (pick(0, 1)) options.softcap = static_cast<double>(pick(1, 50));
    if (pick(0, 3) == 0) options.query_start = pick(0, cache.tokens() + 40);
    if (pick(0, 3) == 0) options.scale = 0.03 * static_cast<double>(pick(-2, 5));
    const auto logits = Noise(random, heads);
    if (pick(0, 2) == 0) options.sink_logits = logits;
    Check(cache, 0, Noise(random, heads * tokens * config.layers[0].key.width), heads, tokens, options);
    if (HasFailure()) return;
  }
}

// K, V and queries of tests/data/smollm2-small.safetensors.
struct RealLayer {
  std::vector<uint16_t> key, value, query;
};
RealLayer ReadReal(int layer) {
  std::ifstream in(std::string(KVP_TEST_DATA) + "/smollm2-small.safetensors", std::ios::binary);
  const std::vector<uint8_t> file(std::istreambuf_iterator<char>(in), {});
  uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, file.data(), 8);
  const JsonValue header = JsonValue::Parse({reinterpret_cast<const char*>(file.data()) + 8, header_bytes});
  const auto read = [&](const std::string& name) {
    const JsonValue& offsets = header[name]["data_offsets"];
    std::vector<uint16_t> values(static_cast<size_t>(offsets[1].integer() - offsets[0].integer()) / 2);
    std::memcpy(values.data(), file.data() + 8 + header_bytes + static_cast<size_t>(offsets[0].integer()), values.size() * 2);
    return values;
  };
  const std::string number = std::to_string(layer);
  return {read("past_key_values." + number + ".key"), read("past_key_values." + number + ".value"), read("query." + number)};
}

TEST_P(AttentionTest, EveryPresetOnARealModel) {
  for (const Preset& preset : Presets()) {
    for (const int number : {0, 15, 29}) {
      SCOPED_TRACE(std::string(preset.name) + " layer " + std::to_string(number));
      const RealLayer real = ReadReal(number);
      ModelCache cache = Make(Config(3, 64, SpecOf(preset.key), SpecOf(preset.value)));
      const Shape shape{1, 3, 83, 64};
      ASSERT_TRUE(cache.Append(0, ContiguousView(real.key.data(), Type::bf16, shape), ContiguousView(real.value.data(), Type::bf16, shape)).ok());
      ASSERT_TRUE(cache.Freeze(-1).ok());
      ASSERT_EQ(cache.Stats().frozen_pages, (83 - 4) / cache.config().page_tokens);
      std::vector<float> queries;
      for (const uint16_t bits : real.query) queries.push_back(FromBF16(bits));
      if (number == 15) Check(cache, 0, queries, 9, 83, {});
      // The bf16 queries themselves, and one query as decoding has it: head by head with the stride of the whole.
      std::vector<float> out(9 * 64), lse(9);
      TensorView last = ContiguousView(real.query.data() + 82 * 64, Type::bf16, {1, 9, 1, 64});
      last.head_stride = 83 * 64;
      ASSERT_TRUE(Attend(cache, 0, last, {}, out.data(), lse.data()).ok());
      std::vector<float> rows;
      for (int64_t h = 0; h < 9; ++h) rows.insert(rows.end(), queries.begin() + (h * 83 + 82) * 64, queries.begin() + (h * 83 + 83) * 64);
      Compare(out, lse, ExactAttention(cache, 0, rows, 9, 1, {}));
      if (HasFailure()) return;
    }
  }
}

// Queries that are integers lose nothing in integers: products from codes are then those of the thawed keys.
TEST_P(AttentionTest, ProductsFromCodes) {
  const AttentionKernels& kernels = AttentionKernelsFor(GetParam()->name);
  if (kernels.coded_dots == nullptr) GTEST_SKIP() << "skipped: " << kernels.name << " has no products from codes";
  Random random(6);
  int from_codes = 0;
  for (const std::string& text : AllSpecs()) {
    const Spec spec = SpecOf(text);
    if (spec.calibration == Calibration::kGiven || spec.calibration == Calibration::kMse) {
      if (Info(spec.type).family != Family::kLevels) continue;
    }
    SCOPED_TRACE(text);
    for (const int64_t width : {32, 64, 160, 200, 6}) {
      const Shape shape{1, 2, 11, width};
      if (!ResolveSpec(spec, width, "spec").ok()) continue;
      const auto values = Noise(random, shape.elements());
      auto made = Encode(instance_, ContiguousView(values.data(), Type::f32, shape), 11, spec, {}, "x");
      if (!made.ok()) continue;
      std::vector<float> thawed(static_cast<size_t>(shape.elements())), query(static_cast<size_t>(2 * width)), scores(2 * 16, 7.0f);
      ASSERT_TRUE(Decode(instance_, *made.value(), 0, 11, thawed.data(), 0, 11 * width, width).ok());
      const bool levels = Info(spec.type).family == Family::kLevels;
      // The largest integer of a query: of two bytes for 4-bit integers.
      const bool bytes = Info(spec.type).family == Family::kInteger && Info(spec.type).bits == 4;
      const float most = levels ? 16383.0f : bytes ? 127.0f * 256 + 127 : 32767.0f;
      for (size_t i = 0; i < query.size(); ++i) query[i] = i % static_cast<size_t>(width) == 1 ? most : static_cast<float>(static_cast<int>(random() % 2000) - 1000);
      CodedKeys coded;
      for (int64_t h = 0; h < 2; ++h) {
        if (!coded.Dots(kernels, *made.value(), h, 2, 11, query.data(), 2, scores.data(), 16)) continue;
        ++from_codes;
        for (int64_t q = 0; q < 2; ++q) {
          for (int64_t t = 2; t < 11; ++t) {
            double exact = 0, sum = 0, largest = 0;
            for (int64_t d = 0; d < width; ++d) {
              const double k = thawed[static_cast<size_t>((h * 11 + t) * width + d)], x = query[static_cast<size_t>(q * width + d)];
              exact += x * k;
              sum += std::fabs(x * k);
              largest = std::max(largest, std::fabs(k));
            }
            // Levels are rounded themselves, by 2^-15 of the largest.
            double bound = 4e-7 * sum + 1e-30;
            if (levels) bound += std::pow(2, -10.5) * sum;
            ASSERT_NEAR(scores[static_cast<size_t>(q * 16 + t - 2)], exact, bound) << "width " << width << " row " << t;
          }
        }
      }
    }
  }
  EXPECT_GT(from_codes, 300);
}

TEST_P(AttentionTest, PartsMergeByTheirLogSums) {
  Random random(8);
  ModelCache cache = Make(Config(1, 32, SpecOf("int8/token"), SpecOf("int8/token")));
  AppendNoise(cache, 100, random);
  ASSERT_TRUE(cache.Freeze(-1).ok());
  const auto query = Noise(random, 2 * 32);
  const TensorView view = ContiguousView(query.data(), Type::f32, {1, 2, 1, 32});
  AttendOptions options;
  options.query_start = 99;
  std::vector<float> whole(64), whole_lse(2), part(64), lse(2);
  std::vector<double> sum(64), weight(2);
  ASSERT_TRUE(Attend(cache, 0, view, options, whole.data(), whole_lse.data()).ok());
  for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{0, 36}, {36, 84}, {84, 100}}) {
    auto slice = cache.Slice(begin, end);
    ASSERT_TRUE(slice.ok());
    ASSERT_TRUE(Attend(slice.value(), 0, view, options, part.data(), lse.data()).ok());
    for (size_t i = 0; i < 64; ++i) sum[i] += std::exp(lse[i / 32] - whole_lse[i / 32]) * part[i];
    for (size_t h = 0; h < 2; ++h) weight[h] += std::exp(lse[h] - whole_lse[h]);
  }
  for (size_t i = 0; i < 64; ++i) EXPECT_NEAR(sum[i], whole[i], 1e-5);
  for (const double w : weight) EXPECT_NEAR(w, 1, 1e-5);
}

TEST_P(AttentionTest, LetInNaNIsSeen) {
  ModelConfig config = Config(1, 16, SpecOf("int8/token"), SpecOf("int8/token"));
  config.layers[0].key.options.non_finite = NonFinite::kPass;
  config.hot = Type::f32;
  Random random(2);
  const auto values = Noise(random, 40 * 16), query = Noise(random, 16);
  const Shape shape{1, 1, 40, 16};
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    ModelCache cache = Make(config);
    auto keys = values;
    keys[30 * 16] = bad;
    ASSERT_TRUE(cache.Append(0, ContiguousView(keys.data(), Type::f32, shape), ContiguousView(values.data(), Type::f32, shape)).ok());
    std::vector<float> out(16), lse(1);
    const TensorView view = ContiguousView(query.data(), Type::f32, {1, 1, 1, 16});
    AttendOptions options;
    options.scale = query[0] < 0 ? -1.0 : 1.0;
    ASSERT_TRUE(Attend(cache, 0, view, options, out.data(), lse.data()).ok());
    for (const float x : out) EXPECT_TRUE(std::isnan(x)) << x;
    EXPECT_TRUE(std::isnan(lse[0])) << lse[0];
    options.query_start = 29;
    ASSERT_TRUE(Attend(cache, 0, view, options, out.data(), lse.data()).ok());
    for (const float x : out) EXPECT_FALSE(std::isnan(x)) << "a query that does not see it";
  }
}

TEST_P(AttentionTest, LargestAndExponentials) {
  const AttentionKernels& kernels = AttentionKernelsFor(GetParam()->name);
  Random random(4);
  const float infinity = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  for (int64_t count = 1; count < 40; ++count) {
    auto scores = Noise(random, count);
    EXPECT_EQ(kernels.largest(scores.data(), count), *std::max_element(scores.begin(), scores.end()));
    scores[static_cast<size_t>(count / 3)] = -infinity;
    scores[static_cast<size_t>(count / 2)] = infinity;
    EXPECT_EQ(kernels.largest(scores.data(), count), infinity);
    scores[static_cast<size_t>(random() % static_cast<uint64_t>(count))] = nan;
    EXPECT_TRUE(std::isnan(kernels.largest(scores.data(), count)));
    std::vector<float> weights = {0.5f, -infinity, nan};
    EXPECT_TRUE(std::isnan(kernels.exponentials(weights.data(), 3, 0.5f)));
    EXPECT_EQ(weights[0], 1.0f);
    EXPECT_EQ(weights[1], 0.0f);
    EXPECT_TRUE(std::isnan(weights[2]));
  }
  const std::vector<float> nothing(5, -infinity);
  EXPECT_EQ(kernels.largest(nothing.data(), 5), -infinity);
}

TEST_P(AttentionTest, RefusesAndNames) {
  Random random(3);
  ModelConfig config = Config(2, 8, SpecOf("int8/token"), SpecOf("int8/token"));
  config.layers.push_back(config.layers[0]);
  ModelCache cache = Make(config);
  AppendNoise(cache, 5, random);
  auto query = Noise(random, 4 * 8);
  std::vector<float> out(32, 7.0f);
  const auto message = [&](int64_t layer, Shape shape, const AttendOptions& options) {
    Status status = Attend(cache, layer, ContiguousView(query.data(), Type::f32, shape), options, out.data(), nullptr);
    return status.ok() ? std::string("fine") : status.error().message;
  };
  EXPECT_EQ(message(0, {1, 4, 1, 8}, {}), "fine");
  out.assign(32, 7.0f);
  EXPECT_EQ(message(2, {1, 4, 1, 8}, {}), "layer: must be 0 to 1, got 2");
  EXPECT_EQ(message(1, {1, 4, 1, 8}, {}), "layer 1: cache: must have the 5 tokens of layer 0, got 0");
  EXPECT_EQ(message(0, {1, 3, 1, 8}, {}), "layer 0: queries: must be [heads, tokens, head_dim] with heads a multiple of 2 and head_dim 8, got [1, 3, 1, 8]");
  EXPECT_EQ(message(0, {1, 2, 2, 4}, {}), "layer 0: queries: must be [heads, tokens, head_dim] with heads a multiple of 2 and head_dim 8, got [1, 2, 2, 4]");
  AttendOptions options;
  options.softcap = -1;
  EXPECT_EQ(message(0, {1, 4, 1, 8}, options), "layer 0: softcap: must be finite and >= 0, got -1");
  options = {};
  options.sink_logits = {query.data(), 3};
  EXPECT_EQ(message(0, {1, 4, 1, 8}, options), "layer 0: sinkLogits: must be one per query head, 4, got 3");
  options = {};
  const float logits[] = {0, -INFINITY, std::numeric_limits<float>::quiet_NaN(), 1};
  options.sink_logits = logits;
  EXPECT_EQ(message(0, {1, 4, 1, 8}, options), "layer 0: sinkLogits: must be below infinity, got NaN");
  options = {};
  options.window = -2;
  EXPECT_EQ(message(0, {1, 4, 1, 8}, options), "layer 0: window: must not be negative, got -2");
  query[9] = INFINITY;
  EXPECT_EQ(message(0, {1, 4, 1, 8}, {}), "queries: values must be finite, got Infinity at index 9 [0, 1, 0, 1]");
  for (const float value : out) EXPECT_EQ(value, 7.0f) << "nothing was written";
}

INSTANTIATE_TEST_SUITE_P(Backends, AttentionTest, ::testing::ValuesIn(AllBackends()),
                         [](const auto& info) { return std::string(info.param->name); });

}  // namespace
}  // namespace kvpages
