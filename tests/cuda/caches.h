// SPDX-License-Identifier: Apache-2.0
// Caches on a device and in the host's memory, for the tests that compare them.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "backends/cuda/store.h"
#include "backends/reference/reference.h"
#include "support/caches.h"
#include "support/exact_attention.h"
#include "wire/envelope.h"

namespace kvpages::cuda {

using Random = std::mt19937;
using test::Between;
using test::ConfigOf;
using test::Noise;
using test::SpecOf;

inline std::string FileOf(const ModelCache& cache) {
  auto bytes = SerializeEnvelope(cache, "model", {});
  EXPECT_TRUE(bytes.ok()) << (bytes.ok() ? "" : bytes.error().message);
  return bytes.ok() ? std::string(reinterpret_cast<const char*>(bytes.value().data()), static_cast<size_t>(bytes.value().size())) : "";
}
inline Result<ModelCache> Restored(const InstanceRef& instance, const std::string& file, uint64_t max_bytes = 0) {
  EnvelopeReader reader(instance, max_bytes, {});
  KVP_TRY(reader.Feed({reinterpret_cast<const uint8_t*>(file.data()), file.size()}));
  return reader.Finish();
}

// New tokens for every layer, and the views of them.
struct Tokens {
  std::vector<std::vector<float>> data;
  std::vector<TensorView> keys, values;
};
inline Tokens NewTokens(const ModelConfig& config, int64_t count, Random& random) {
  Tokens made;
  for (const LayerConfig& layer : config.layers) {
    for (const SideConfig* side : {&layer.key, &layer.value}) {
      made.data.push_back(Noise(random, layer.heads * count * side->width));
      (side == &layer.key ? made.keys : made.values)
          .push_back(ContiguousView(made.data.back().data(), Type::f32, {1, layer.heads, count, side->width}));
    }
  }
  return made;
}

inline ModelCache NewCache(const InstanceRef& instance, const ModelConfig& config, uint64_t max_bytes = 0) {
  auto made = ModelCache::Create(instance, config, max_bytes);
  EXPECT_TRUE(made.ok()) << (made.ok() ? "" : made.error().message);
  return std::move(made.value());
}

}  // namespace kvpages::cuda
