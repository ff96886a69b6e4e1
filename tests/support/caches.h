// SPDX-License-Identifier: Apache-2.0
// Configurations of caches for tests.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <iterator>
#include <random>
#include <string>

#include "core/model_cache.h"

namespace kvpages::test {

inline int64_t Between(std::mt19937& random, int64_t low, int64_t high) {
  return low + static_cast<int64_t>(random() % static_cast<uint64_t>(high - low + 1));
}

inline Spec SpecOf(std::string_view text) {
  auto spec = ParseSpec(text, "spec");
  EXPECT_TRUE(spec.ok()) << text;
  return spec.value();
}

// Layers that are all alike.
inline ModelConfig ConfigOf(int64_t layers, int64_t heads, int64_t width, std::string_view key, std::string_view value) {
  ModelConfig config;
  LayerConfig layer;
  layer.heads = heads;
  layer.key.spec = SpecOf(key);
  layer.value.spec = SpecOf(value);
  layer.key.width = layer.value.width = width;
  config.layers.assign(static_cast<size_t>(layers), layer);
  return config;
}

// One to three layers of specs, heads and widths of their own, and every rule of a page now and then.
inline ModelConfig RandomConfig(std::mt19937& random) {
  const char* const keys[] = {"int4/channel/8/mse/e4m3", "lm4/token/8/mse/e4m3+center+hadamard", "int8/token", "uint4/channel/4/kivi/f16",
                              "bf16",                    "f32",                                   "int3/head",  "int8/tensor+center"};
  const char* const values[] = {"int4/token/8/mse/e4m3", "lm4/token/8/mse/e4m3+hadamard", "uint2/token/8/kivi/f16",
                                "e4m3/tensor",           "f16",                           "int3/token/8"};
  ModelConfig config;
  config.page_tokens = Between(random, 0, 2) == 0 ? 16 : Between(random, 3, 9);
  config.keep_first = Between(random, 0, 5);
  config.keep_recent = Between(random, 0, 2) == 0 ? Between(random, 1, 20) : 0;
  config.residual = Between(random, 0, 2) == 0 ? config.page_tokens * Between(random, 1, 3) : 0;
  config.hot = Between(random, 0, 2) == 0 ? Type::f32 : Between(random, 0, 1) ? Type::f16 : Type::bf16;
  for (int64_t i = Between(random, 1, 3); i > 0; --i) {
    LayerConfig layer;
    layer.heads = Between(random, 1, 3);
    layer.key.spec = SpecOf(keys[random() % std::size(keys)]);
    layer.value.spec = SpecOf(values[random() % std::size(values)]);
    layer.key.width = Between(random, 1, 4) * 5;
    layer.value.width = Between(random, 1, 3) * 8;
    config.layers.push_back(layer);
  }
  return config;
}

}  // namespace kvpages::test
