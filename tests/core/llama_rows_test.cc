// SPDX-License-Identifier: Apache-2.0
// llama.cpp's block types against the row functions that its own build exports (npm package @node-llama-cpp/linux-x64, a
// development dependency): equal blocks and equal restored values.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "core/convert.h"

namespace kvpages {
namespace {

constexpr char kLibrary[] = KVP_TESTS_DIR "/../node_modules/@node-llama-cpp/linux-x64/bins/linux-x64/libggml-base.so";

class LlamaRows : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    library_ = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
    if (library_ == nullptr) GTEST_SKIP() << "skipped: no row functions of llama.cpp here: " << dlerror();
    const std::string type = GetParam();
    quantize_ = reinterpret_cast<Quantize>(dlsym(library_, ("quantize_row_" + type + "_ref").c_str()));
    dequantize_ = reinterpret_cast<Dequantize>(dlsym(library_, ("dequantize_row_" + type).c_str()));
    ASSERT_NE(quantize_, nullptr);
    ASSERT_NE(dequantize_, nullptr);
  }
  void Compare(const Backend* backend, const std::vector<float>& x) {
    auto instance = std::make_shared<Instance>();
    instance->backend = backend;
    const Shape shape{1, 1, static_cast<int64_t>(x.size()) / 32, 32};
    auto spec = ParseSpec(GetParam(), "spec");
    ASSERT_TRUE(spec.ok());
    auto ours = Encode(instance, ContiguousView(x.data(), Type::f32, shape), shape.tokens, spec.value(), {}, "tensor");
    ASSERT_TRUE(ours.ok()) << ours.error().message;
    const Payload& payload = *ours.value();
    std::vector<uint8_t> theirs(payload.codes.size() + 64);
    quantize_(x.data(), theirs.data(), static_cast<int64_t>(x.size()));
    const size_t block = payload.codes.size() / static_cast<size_t>(shape.tokens);
    for (int64_t t = 0; t < shape.tokens; ++t) {
      const size_t at = static_cast<size_t>(t) * block;
      float amax = 0;
      for (int i = 0; i < 32; ++i) amax = std::fmax(amax, std::fabs(x[static_cast<size_t>(t) * 32 + static_cast<size_t>(i)]));
      // Their iq4_nl leaves the codes of such a block as they were; ours are all 8.
      if (std::string(GetParam()) == "iq4_nl" && amax < 1e-15f) continue;
      ASSERT_EQ(std::memcmp(payload.codes.data() + at, theirs.data() + at, block), 0)
          << backend->name << ": block " << t << ", first value " << x[static_cast<size_t>(t) * 32];
    }
    std::vector<float> restored(x.size()), expected(x.size());
    ASSERT_TRUE(Decode(instance, payload, 0, shape.tokens, restored.data(), 0, 0, 32).ok());
    dequantize_(payload.codes.data(), expected.data(), static_cast<int64_t>(x.size()));
    for (size_t i = 0; i < x.size(); ++i) {
      ASSERT_TRUE(std::memcmp(&restored[i], &expected[i], 4) == 0 || (std::isnan(restored[i]) && std::isnan(expected[i])))
          << backend->name << ": element " << i << ": " << restored[i] << " against " << expected[i];
    }
  }
  void CompareAll(const std::vector<float>& x) {
    for (const Backend* backend : AllBackends()) {
      if (backend->available()) Compare(backend, x);
    }
  }

 private:
  using Quantize = void (*)(const float*, void*, int64_t);
  using Dequantize = void (*)(const void*, float*, int64_t);
  void* library_ = nullptr;
  Quantize quantize_ = nullptr;
  Dequantize dequantize_ = nullptr;
};

TEST_P(LlamaRows, OneMillionRandomValues) {
  std::mt19937 random(20261129);
  std::normal_distribution<float> normal;
  std::vector<float> x(1 << 20);
  for (size_t i = 0; i < x.size(); ++i) {
    // A scale per block from 2^-12 to 2^12, so that the f16 scales pass through many binades.
    x[i] = std::ldexp(normal(random), static_cast<int>(i / 32 % 25) - 12);
  }
  CompareAll(x);
}

TEST_P(LlamaRows, EdgeCases) {
  std::vector<float> x;
  auto block = [&](auto&& f) {
    for (int i = 0; i < 32; ++i) x.push_back(f(i));
  };
  block([](int) { return 0.0f; });
  block([](int) { return -0.0f; });
  block([](int) { return 1.0f; });
  block([](int i) { return i % 2 ? 1.0f : -1.0f; });
  block([](int i) { return static_cast<float>(i) - 15.5f; });
  block([](int i) { return static_cast<float>(i) * 0.5f; });
  block([](int i) { return i == 7 ? -127.0f : static_cast<float>(i) + 0.5f; });
  block([](int i) { return i == 31 ? 8.0f : -8.0f; });
  block([](int i) { return i == 0 ? -8.0f : 8.0f; });
  block([](int i) { return std::ldexp(1.0f, -i); });
  block([](int i) { return i == 3 ? 1e4f : 1e-4f * static_cast<float>(i); });
  block([](int i) { return 1e-7f * static_cast<float>(i - 16); });
  block([](int i) { return 5e4f * static_cast<float>(i - 16) / 16; });
  CompareAll(x);
}

INSTANTIATE_TEST_SUITE_P(Types, LlamaRows, ::testing::Values("q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace kvpages
