// SPDX-License-Identifier: Apache-2.0
// What caches ask of a device, and what is left of them when it fails: on the CPU shim, which counts and can be told to fail.
#include <gtest/gtest.h>

#include <functional>

#include "cuda/caches.h"
#include "cuda/shim.h"

namespace kvpages::cuda {
namespace {

class ShimCache : public ::testing::Test {
 protected:
  void SetUp() override {
    host_->backend = &kReferenceBackend;
    there_->backend = &kReferenceBackend;
    there_->device = MakeStore(device_);
  }
  void TearDown() override {
    EXPECT_EQ(there_->budget->used(), 0u);
    there_->device.reset();
    EXPECT_EQ(device_->held, 0u) << "all memory is given back";
  }
  std::shared_ptr<ShimDevice> device_ = std::make_shared<ShimDevice>();
  InstanceRef host_ = std::make_shared<Instance>(), there_ = std::make_shared<Instance>();
};

TEST_F(ShimCache, AppendAndFreezeTakeTheSameLaunchesForAnyNumberOfLayers) {
  uint64_t appended[2], frozen[2];
  for (const int i : {0, 1}) {
    const ModelConfig config = ConfigOf(i == 0 ? 1 : 7, 2, 32, "int8/token", "int8/token");
    Random random(3);
    ModelCache cache = NewCache(there_, config);
    const Tokens tokens = NewTokens(config, 4 + 16 * 3, random);
    uint64_t before = device_->launches;
    ASSERT_TRUE(cache.AppendAll(tokens.keys, tokens.values).ok());
    appended[i] = device_->launches - before;
    before = device_->launches;
    ASSERT_EQ(cache.Freeze(-1).value().key.pages, 3 * (i == 0 ? 1 : 7));
    frozen[i] = device_->launches - before;
  }
  EXPECT_EQ(appended[0], 1u);
  EXPECT_EQ(appended[1], 1u);
  EXPECT_EQ(frozen[0], frozen[1]);
}

// Whatever call of the device fails, once or for good: the tokens and pages are as they were, and so is all memory.
TEST_F(ShimCache, AFailureOfAnyCallLeavesEverythingAsItWas) {
  const ModelConfig config = ConfigOf(2, 1, 16, "lm4/token/8/mse/e4m3+center+hadamard", "int8/token");
  Random random(11);
  const Tokens many = NewTokens(config, 90, random), few = NewTokens(config, 3, random);
  for (const bool memory : {false, true}) {
    for (uint64_t nth = 1;; ++nth) {
      ModelCache cache = NewCache(there_, config);
      ASSERT_TRUE(cache.AppendAll(many.keys, many.values).ok());
      const std::string before = FileOf(cache);
      const ModelCache fork = cache.Fork();
      const uint64_t used = there_->budget->used();
      (memory ? device_->allocations_left : device_->calls_left) = nth;
      const Status status = cache.AppendAll(few.keys, few.values);
      device_->allocations_left = device_->calls_left = 0;
      if (status.ok()) {
        EXPECT_GT(nth, memory ? 1u : 5u);
        break;
      }
      EXPECT_EQ(status.error().code, memory ? Code::kMemory : Code::kDevice);
      EXPECT_EQ(cache.tokens(), 90);
      EXPECT_TRUE(FileOf(fork) == before);
      ASSERT_TRUE(cache.AppendAll(few.keys, few.values).ok()) << "the device works again";
      ModelCache at_home = NewCache(host_, config);
      ASSERT_TRUE(at_home.AppendAll(many.keys, many.values).ok());
      ASSERT_TRUE(at_home.AppendAll(few.keys, few.values).ok());
      EXPECT_TRUE(FileOf(cache) == FileOf(at_home));
      EXPECT_GE(there_->budget->used(), used);
    }
    EXPECT_EQ(there_->budget->used(), 0u);
  }
}

TEST_F(ShimCache, AfterTheContextIsLostTheHostsCopiesWork) {
  const ModelConfig config = ConfigOf(2, 1, 16, "int8/token", "int4/token");
  Random random(13);
  ModelCache cache = NewCache(there_, config);
  const Tokens tokens = NewTokens(config, 50, random);
  ASSERT_TRUE(cache.AppendAll(tokens.keys, tokens.values).ok());
  const std::string file = FileOf(cache);
  ModelCache copy = cache.MoveTo(host_).value();
  device_->fails_from = device_->calls + 1;
  std::vector<float> out(16 * 50);
  const Status failures[] = {cache.AppendAll(tokens.keys, tokens.values), cache.Read(0, false, 0, 50, out.data(), 0, 16),
                             Attend(cache, 0, ContiguousView(out.data(), Type::f32, {1, 1, 1, 16}), {}, out.data(), nullptr),
                             Status(SerializeEnvelope(cache, "", {}).error()), Status(cache.Freeze(-1).error()),
                             Status(cache.MoveTo(host_).error()), Status(cache.ToPaged(0).error())};
  for (const Status& failure : failures) {
    ASSERT_FALSE(failure.ok());
    EXPECT_EQ(failure.error().code, Code::kDevice) << failure.error().message;
  }
  EXPECT_EQ(cache.tokens(), 50);
  EXPECT_EQ(cache.Stats().tokens, 50);
  EXPECT_TRUE(cache.Fork().Truncate(20).ok());
  EXPECT_TRUE(FileOf(copy) == file);
  EXPECT_TRUE(FileOf(Restored(host_, file).value()) == file);
  ASSERT_TRUE(copy.AppendAll(tokens.keys, tokens.values).ok());
}

// What a device is told of the pages is not sent again; only what is new.
TEST_F(ShimCache, AttendSendsOnlyNewPages) {
  const ModelConfig config = ConfigOf(1, 1, 16, "int8/token", "int8/token");
  Random random(19);
  ModelCache cache = NewCache(there_, config);
  const Tokens many = NewTokens(config, 16 * 200, random), one = NewTokens(config, 1, random);
  ASSERT_TRUE(cache.AppendAll(many.keys, many.values).ok());
  ASSERT_TRUE(cache.Freeze(-1).ok());
  std::vector<float> out(16);
  const TensorView query = ContiguousView(many.data[0].data(), Type::f32, {1, 1, 1, 16});
  uint64_t sent[3];
  for (uint64_t& bytes : sent) {
    ASSERT_TRUE(cache.AppendAll(one.keys, one.values).ok());
    const uint64_t before = device_->uploaded;
    ASSERT_TRUE(Attend(cache, 0, query, {}, out.data(), nullptr).ok());
    bytes = device_->uploaded - before;
  }
  EXPECT_GT(sent[0], 200 * 100u);
  EXPECT_LT(sent[1], 2000u);
  EXPECT_LT(sent[2], 2000u);
}

template <typename T>
Status StatusOf(Result<T> result) {
  return result.ok() ? Ok() : Status(std::move(result.error()));
}

// What any other call of the device that fails leaves: the cache and its memory as they were, and an error.
TEST_F(ShimCache, AFailureLeavesNoMemoryBehind) {
  const ModelConfig config = ConfigOf(2, 2, 16, "lm4/token/8/mse/e4m3+center+hadamard", "int8/token");
  Random random(41);
  ModelCache cache = NewCache(there_, config);
  const Tokens many = NewTokens(config, 90, random), few = NewTokens(config, 3, random);
  ASSERT_TRUE(cache.AppendAll(many.keys, many.values).ok());
  ASSERT_TRUE(cache.Freeze(-1).ok());
  const std::string file = FileOf(cache);
  const ModelCache home = cache.MoveTo(host_).value();
  const PagedCache paged[] = {cache.ToPaged(0).value(), cache.ToPaged(1).value()};
  std::vector<float> out(2 * 90 * 16);
  const std::function<Status()> calls[] = {
      [&] { return StatusOf(cache.MoveTo(host_)); },
      [&] { return StatusOf(home.MoveTo(there_)); },
      [&] { return StatusOf(Restored(there_, file)); },
      [&]() -> Status {
        const PagedCache* layers[] = {&paged[0], &paged[1]};
        KVP_ASSIGN(auto taken, LayersFromPaged(cache.config(), layers));
        return StatusOf(ModelCache::Assemble(ModelCache::OwnInstance(there_, 0), cache.config(), std::move(taken)));
      },
      [&] { return StatusOf(cache.ToPaged(1)); },
      [&] { return StatusOf(SerializeEnvelope(cache, "model", {})); },
      [&] { return cache.Read(1, true, 3, 90, out.data(), 87 * 16, 16); },
      [&] { return Attend(cache.Fork(), 0, ContiguousView(many.data[0].data(), Type::f32, {1, 4, 1, 16}), {}, out.data(), nullptr); },
      [&] { return cache.Fork().AppendAll(few.keys, few.values); },
      [&]() -> Status {
        ModelCache other = NewCache(there_, config);
        KVP_TRY(other.AppendAll(many.keys, many.values));
        return StatusOf(other.Freeze(-1));
      },
  };
  for (size_t i = 0; i < std::size(calls); ++i) {
    SCOPED_TRACE(i);
    for (uint64_t nth = 1;; ++nth) {
      const uint64_t used = there_->budget->used(), at_home = host_->budget->used();
      device_->calls_left = nth;
      const Status status = calls[i]();
      const bool reached = device_->calls_left == 0;
      device_->calls_left = 0;
      ASSERT_EQ(status.ok(), !reached) << "a failure of call " << nth << " must be told";
      EXPECT_EQ(there_->budget->used(), used);
      EXPECT_EQ(host_->budget->used(), at_home);
      if (status.ok()) {
        EXPECT_GT(nth, 2u);
        break;
      }
      EXPECT_EQ(status.error().code, Code::kDevice);
    }
    EXPECT_TRUE(FileOf(cache) == file);
  }
}

TEST_F(ShimCache, SequencesMadeAlikeAttendTogether) {
  const ModelConfig config = ConfigOf(1, 2, 32, "int8/token", "int4/token"), other = ConfigOf(1, 1, 32, "int8/token", "int4/token");
  Random random(17);
  std::vector<ModelCache> caches;
  for (const int64_t count : {200, 1, 37, 90}) {
    caches.push_back(NewCache(there_, config));
    const Tokens tokens = NewTokens(config, count, random);
    ASSERT_TRUE(caches.back().AppendAll(tokens.keys, tokens.values).ok());
  }
  caches.push_back(NewCache(there_, other));
  const Tokens tokens = NewTokens(other, 30, random);
  ASSERT_TRUE(caches[4].AppendAll(tokens.keys, tokens.values).ok());
  const auto queries = Noise(random, 4 * 32);
  std::vector<float> out(5 * 4 * 32);
  std::vector<AttendTask> tasks;
  for (size_t i = 0; i < caches.size(); ++i) {
    tasks.push_back({&caches[i], ContiguousView(queries.data(), Type::f32, {1, 4, 1, 32}), out.data() + i * 4 * 32, nullptr});
  }
  for (const size_t count : {size_t{1}, size_t{4}, size_t{5}}) {
    const uint64_t before = device_->launches;
    ASSERT_TRUE(AttendAll(std::span(tasks).first(count), 0, {}).ok());
    // Three, and one that brings the lists of pages of several to their places.
    EXPECT_EQ(device_->launches - before, count == 1 ? 3u : count == 4 ? 4u : 7u) << count;
  }
}

// Tensors that are encoded for the caller go through the device too.
TEST_F(ShimCache, TensorsGoThroughTheDevice) {
  Random random(1);
  const auto values = Noise(random, 4 * 64);
  const auto payload = Encode(there_, ContiguousView(values.data(), Type::f32, {1, 1, 4, 64}), 4, SpecOf("int8/token/64"), {}, "x");
  ASSERT_TRUE(payload.ok());
  const uint64_t launches = device_->launches;
  EXPECT_GT(launches, 0u);
  std::vector<float> out(4 * 64);
  ASSERT_TRUE(Decode(there_, *payload.value(), 0, 4, out.data(), 256, 256, 64).ok());
  EXPECT_GT(device_->launches, launches);
  for (const uint64_t nth : {1u, 2u, 3u, 4u, 5u}) {
    const std::vector<float> before = out;
    device_->calls_left = nth;
    EXPECT_FALSE(Encode(there_, ContiguousView(values.data(), Type::f32, {1, 1, 4, 64}), 4, SpecOf("int8/token/64"), {}, "x").ok());
    device_->calls_left = nth;
    EXPECT_FALSE(Decode(there_, *payload.value(), 0, 4, out.data(), 256, 256, 64).ok());
    EXPECT_EQ(out, before);
  }
  device_->calls_left = 0;
}

}  // namespace
}  // namespace kvpages::cuda
