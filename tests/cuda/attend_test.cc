// SPDX-License-Identifier: Apache-2.0
// Attention of the CUDA backend on a device, over the pages of caches, within the bound of docs/attention.md.
#include "backends/cuda/attend.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>

#include "backends/reference/reference.h"
#include "cuda/devices.h"
#include "support/exact_attention.h"

namespace kvpages::cuda {
namespace {

using test::Noise;
using Random = std::mt19937;

// A layer's pages in the memory of a device.
class DevicePages {
 public:
  explicit DevicePages(std::shared_ptr<Device> device) : device_(std::move(device)) {}
  ~DevicePages() {
    for (const DevicePointer at : held_) device_->Free(at);
  }
  DevicePointer Put(const void* data, uint64_t bytes) {
    if (bytes == 0) return 0;
    auto at = device_->Allocate(bytes);
    EXPECT_TRUE(at.ok());
    EXPECT_TRUE(device_->Upload(at.value(), data, bytes, 1, 0, 0).ok());
    held_.push_back(at.value());
    return at.value();
  }
  AttendSequence Add(const CacheLayer& layer) {
    const DevicePointer center = Put(layer.center.data(), layer.center.size());
    std::vector<AttendPage> pages;
    formats_.clear();
    for (const CachePage& page : layer.pages) {
      pages.push_back({page.start, page.length, Side(*page.key.payload, layer, center), Side(*page.value.payload, layer, center)});
    }
    AttendSequence sequence;
    sequence.pages = Put(pages.data(), pages.size() * sizeof(AttendPage));
    sequence.page_count = static_cast<int64_t>(pages.size());
    sequence.center = center;
    sequence.formats = Put(formats_.data(), formats_.size() * sizeof(CodecPlan));
    return sequence;
  }

 private:
  AttendSide Side(const Payload& payload, const CacheLayer& layer, DevicePointer center) {
    AttendSide side;
    side.format = static_cast<int32_t>(formats_.size());
    if (payload.kind == PayloadKind::kDense) {
      Spec spec;
      spec.type = payload.dense_type;
      formats_.push_back(DecodePlan(spec, payload.shape, {}, 0));
      side.codes = Put(payload.data.data(), payload.data.size());
      return side;
    }
    formats_.push_back(DecodePlan(payload.spec, payload.shape, payload.grid, payload.hadamard));
    side.codes = Put(payload.codes.data(), payload.codes.size());
    side.scales = Put(payload.scales.data(), payload.scales.size());
    side.zeros = payload.has_zeros ? Put(payload.zeros.data(), payload.zeros.size()) : 0;
    side.global = Put(&payload.global, 4);
    if (!payload.center.empty()) side.center = payload.center.Same(layer.center) ? center : Put(payload.center.data(), payload.center.size());
    return side;
  }
  std::shared_ptr<Device> device_;
  std::vector<DevicePointer> held_;
  std::vector<CodecPlan> formats_;
};

class CudaAttention : public ::testing::Test {
 protected:
  void SetUp() override {
    if (device_ == nullptr) GTEST_SKIP() << WhyNoDevice();
    instance_->backend = &kReferenceBackend;
  }

  ModelCache Make(const std::string& key, const std::string& value, int64_t heads, int64_t width, int64_t value_width) {
    ModelConfig config;
    LayerConfig layer;
    layer.heads = heads;
    layer.key.spec = ParseSpec(key, "key").value();
    layer.value.spec = ParseSpec(value, "value").value();
    layer.key.width = width;
    layer.value.width = value_width;
    config.layers.push_back(layer);
    auto made = ModelCache::Create(instance_, config, 0);
    EXPECT_TRUE(made.ok()) << (made.ok() ? "" : made.error().message);
    return std::move(made.value());
  }
  void Append(ModelCache& cache, int64_t tokens) {
    const LayerConfig& config = cache.config().layers[0];
    const auto key = Noise(random_, config.heads * tokens * config.key.width);
    const auto value = Noise(random_, config.heads * tokens * config.value.width);
    ASSERT_TRUE(cache.Append(0, ContiguousView(key.data(), Type::f32, {1, config.heads, tokens, config.key.width}),
                             ContiguousView(value.data(), Type::f32, {1, config.heads, tokens, config.value.width}))
                    .ok());
  }

  struct Answer {
    std::vector<float> out, lse;
  };
  // All caches have the configuration of the first.
  std::vector<Answer> Attend(const std::vector<const ModelCache*>& caches, const std::vector<float>& queries, int64_t heads, int64_t tokens,
                             const AttendOptions& options) {
    const LayerConfig& config = caches[0]->config().layers[0];
    const auto run = [](const SideConfig& side) { return side.spec.hadamard ? HadamardLength(side.width, side.options.hadamard_run) : 0; };
    DevicePages pages(device_);
    AttendPlan plan;
    plan.heads = heads;
    plan.kv_heads = config.heads;
    plan.key_width = config.key.width;
    plan.value_width = config.value.width;
    plan.tokens = tokens;
    plan.scale = static_cast<float>(options.scale.value_or(1 / std::sqrt(static_cast<double>(config.key.width))));
    plan.softcap = static_cast<float>(options.softcap);
    plan.window = options.window.value_or(config.window);
    plan.sinks = options.sinks;
    plan.key_run = run(config.key);
    plan.value_run = run(config.value);
    plan.sink_logits = pages.Put(options.sink_logits.data(), options.sink_logits.size_bytes());
    std::vector<AttendSequence> sequences;
    std::vector<Answer> answers;
    for (const ModelCache* cache : caches) {
      AttendSequence sequence = pages.Add(cache->layer(0));
      answers.push_back({std::vector<float>(static_cast<size_t>(heads * tokens * plan.value_width)),
                         std::vector<float>(static_cast<size_t>(heads * tokens))});
      sequence.queries = pages.Put(queries.data(), queries.size() * 4);
      sequence.head_stride = tokens * plan.key_width;
      sequence.token_stride = plan.key_width;
      sequence.start = options.query_start.value_or(cache->layer(0).end - tokens);
      sequence.out = pages.Put(answers.back().out.data(), answers.back().out.size() * 4);
      sequence.lse = pages.Put(answers.back().lse.data(), answers.back().lse.size() * 4);
      sequences.push_back(sequence);
    }
    DeviceAttention attention(device_);
    const Status status = attention.Run(plan, sequences);
    EXPECT_TRUE(status.ok()) << (status.ok() ? "" : status.error().message);
    for (size_t i = 0; i < answers.size(); ++i) {
      EXPECT_TRUE(device_->Download(answers[i].out.data(), sequences[i].out, answers[i].out.size() * 4, 1, 0, 0).ok());
      EXPECT_TRUE(device_->Download(answers[i].lse.data(), sequences[i].lse, answers[i].lse.size() * 4, 1, 0, 0).ok());
    }
    return answers;
  }
  void Check(const ModelCache& cache, int64_t heads, int64_t tokens, const AttendOptions& options) {
    const auto queries = Noise(random_, heads * tokens * cache.config().layers[0].key.width);
    const Answer got = Attend({&cache}, queries, heads, tokens, options)[0];
    const test::Exact exact = test::ExactAttention(cache, 0, queries, heads, tokens, options);
    const size_t width = got.out.size() / got.lse.size();
    for (size_t i = 0; i < got.out.size(); ++i) {
      ASSERT_LE(std::fabs(got.out[i] - exact.out[i]), exact.out_bound[i / width]) << "row " << i / width << " channel " << i % width;
    }
    for (size_t i = 0; i < got.lse.size(); ++i) {
      if (std::isinf(exact.lse[i])) {
        ASSERT_EQ(got.lse[i], -INFINITY);
      } else {
        ASSERT_LE(std::fabs(got.lse[i] - exact.lse[i]), exact.lse_bound[i]);
      }
    }
  }

  Random random_{7};
  InstanceRef instance_ = std::make_shared<Instance>();
  std::shared_ptr<Device> device_ = NewDevice();
};

TEST_F(CudaAttention, EveryPresetOverMixedPages) {
  for (const Preset& preset : Presets()) {
    SCOPED_TRACE(preset.name);
    ModelCache cache = Make(std::string(preset.key), std::string(preset.value), 2, 32, 32);
    Append(cache, 90);
    Append(cache, 7);
    Check(cache, 4, 1, {});
    if (HasFatalFailure()) return;
  }
}

// Types of every family, axes of every kind; the codec's own tests compare all specs element by element.
TEST_F(CudaAttention, SpecsOfEveryKind) {
  for (const char* spec : {"int8/head/absmax/f16", "int4/tensor/mse/e4m3", "int3/channel/16/absmax/f32", "uint2/token/24/minmax/bf16",
                           "e5m2/token/8/absmax/e8m0", "e2m1/channel/16/mse/f16", "lm2/head/mse/f32", "int8/token/20/absmax/f32+hadamard",
                           "uint3/channel/16/kivi/f32", "f16", "f32"}) {
    SCOPED_TRACE(spec);
    ModelCache cache = Make(spec, spec, 2, 20, 12);
    Append(cache, 40);
    Append(cache, 3);
    Check(cache, 2, 2, {});
    if (HasFatalFailure()) return;
  }
}

TEST_F(CudaAttention, WindowsSinksSoftcapAndManyQueries) {
  ModelCache cache = Make("int4/token/16/absmax/f16+center+hadamard", "int8/token/16/absmax/f32+hadamard", 2, 32, 48);
  Append(cache, 300);
  Append(cache, 9);
  AttendOptions options;
  Check(cache, 6, 9, options);
  options.window = 40;
  options.sinks = 6;
  options.softcap = 5;
  Check(cache, 6, 5, options);
  const float logits[] = {0.5f, -INFINITY, 3, 0, -1, 2};
  options.sink_logits = logits;
  options.query_start = 100;
  options.scale = -0.25;
  Check(cache, 6, 3, options);
}

TEST_F(CudaAttention, NothingToSeeIsZero) {
  ModelCache cache = Make("int8/token/16/absmax/f32", "int8/token/16/absmax/f32", 1, 16, 16);
  ModelCache empty = cache.Fork();
  Append(cache, 40);
  AttendOptions options;
  options.query_start = 200;
  options.window = 8;
  Check(cache, 2, 1, options);
  options.query_start = 0;
  const Answer answer = Attend({&empty}, Noise(random_, 32), 2, 1, options)[0];
  EXPECT_EQ(answer.out, std::vector<float>(32));
  EXPECT_EQ(answer.lse, std::vector<float>(2, -INFINITY));
}

// A sequence's result must not depend on those beside it.
TEST_F(CudaAttention, SequencesDoNotTouchEachOther) {
  ModelCache one = Make("int8/tensor/absmax/f32", "int4/token/16/absmax/f32", 2, 32, 32);
  ModelCache two = one.Fork();
  Append(one, 200);
  Append(two, 35);
  const auto queries = Noise(random_, 8 * 32);
  const auto both = Attend({&one, &two}, queries, 8, 1, {});
  EXPECT_EQ(both[0].out, Attend({&one}, queries, 8, 1, {})[0].out);
  EXPECT_EQ(both[1].out, Attend({&two}, queries, 8, 1, {})[0].out);
  EXPECT_EQ(both[1].lse, Attend({&two}, queries, 8, 1, {})[0].lse);
}

// Widths for which the shared memory has to be shared out otherwise, and one that is too much.
TEST_F(CudaAttention, WideHeads) {
  ModelCache cache = Make("int8/token/64/absmax/f32", "int8/token/64/absmax/f32+hadamard", 1, 576, 512);
  Append(cache, 40);
  Append(cache, 1);
  Check(cache, 8, 1, {});
  AttendPlan plan;
  plan.heads = plan.kv_heads = plan.tokens = 1;
  plan.key_width = plan.value_width = 20000;
  const Status status = DeviceAttention(device_).Run(plan, {});
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().code, Code::kUnsupported);
}

}  // namespace
}  // namespace kvpages::cuda
