// SPDX-License-Identifier: Apache-2.0
// Error of the presets on the keys and values of a real model, page by page as a cache freezes them.
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <iterator>
#include <numeric>

#include "core/float.h"
#include "support/payloads.h"

namespace kvpages::test {
namespace {

constexpr int64_t kHeads = 3, kWidth = 64, kKeepFirst = 4;

// Keys or values of some layers, bf16 [heads, tokens, width].
std::vector<std::vector<uint16_t>> LoadTensors(const std::string& name, const std::vector<int>& layers, const std::string& side) {
  std::ifstream in(std::string(KVP_TEST_DATA) + "/" + name, std::ios::binary);
  const std::string file((std::istreambuf_iterator<char>(in)), {});
  uint64_t header_bytes = 0;
  if (file.size() < 8) throw std::runtime_error(name + " is missing");
  std::memcpy(&header_bytes, file.data(), 8);
  const JsonValue header = JsonValue::Parse(std::string_view(file).substr(8, header_bytes));
  std::vector<std::vector<uint16_t>> tensors;
  for (const int layer : layers) {
    const JsonValue& offsets = header["past_key_values." + std::to_string(layer) + "." + side]["data_offsets"];
    const auto begin = offsets[size_t{0}].integer(), end = offsets[size_t{1}].integer();
    std::vector<uint16_t> data(static_cast<size_t>(end - begin) / 2);
    std::memcpy(data.data(), file.data() + 8 + header_bytes + begin, data.size() * 2);
    tensors.push_back(std::move(data));
  }
  return tensors;
}
int64_t TokensOf(const std::vector<uint16_t>& x) { return static_cast<int64_t>(x.size()) / kHeads / kWidth; }

// c: mean of tokens 4 .. 67 per head and channel, f32 sum in token order, times 1/64, as bf16.
std::vector<uint16_t> CenterOf(const std::vector<uint16_t>& x) {
  const int64_t tokens = TokensOf(x);
  std::vector<uint16_t> center;
  for (int64_t h = 0; h < kHeads; ++h) {
    for (int64_t d = 0; d < kWidth; ++d) {
      float sum = 0;
      for (int64_t t = kKeepFirst; t < kKeepFirst + 64; ++t) sum += FromBF16(x[static_cast<size_t>((h * tokens + t) * kWidth + d)]);
      center.push_back(ToBF16(sum * (1.0f / 64)));
    }
  }
  return center;
}

double RootMeanSquareError(const Backend& backend, const std::string& spec, const std::vector<uint16_t>& x, int64_t page_tokens = 16) {
  const Shape page{1, kHeads, page_tokens, kWidth};
  const std::vector<uint16_t> center = CenterOf(x);
  const int64_t tokens = TokensOf(x);
  double sum = 0;
  int64_t count = 0;
  for (int64_t start = kKeepFirst; start + page_tokens <= tokens; start += page_tokens) {
    std::vector<uint16_t> rows;
    for (int64_t h = 0; h < kHeads; ++h) {
      const auto first = x.begin() + (h * tokens + start) * kWidth;
      rows.insert(rows.end(), first, first + page_tokens * kWidth);
    }
    const auto y = Dequantize(backend, Quantize(backend, spec, page, rows.data(), Type::bf16, -1, {}, {}, center));
    for (size_t i = 0; i < y.size(); ++i, ++count) {
      const double error = static_cast<double>(FromBF16(rows[i])) - y[i];
      sum += error * error;
    }
  }
  return std::sqrt(sum / static_cast<double>(count));
}

TEST(Quality, RealKeysAndValues) {
  const Backend& backend = *ChooseBackend("auto").value();
  std::vector<int> layers(30);
  std::iota(layers.begin(), layers.end(), 0);
  const auto keys = LoadTensors("smollm2-chat.safetensors", layers, "key"), values = LoadTensors("smollm2-chat.safetensors", layers, "value");
  const Preset &kv3 = *FindPreset("kv3"), &kv4 = *FindPreset("kv4"), &kv8 = *FindPreset("kv8"), &int4_kivi = *FindPreset("int4-kivi");
  double kv3_keys = 0;  // mean of the layers, relative to nvfp4
  for (size_t layer = 0; layer < 30; ++layer) {
    const auto &key = keys[layer], &value = values[layer];
    ASSERT_EQ(TokensOf(key), 277);
    const double nvfp4_key = RootMeanSquareError(backend, "nvfp4", key), nvfp4_value = RootMeanSquareError(backend, "nvfp4", value);
    EXPECT_LE(RootMeanSquareError(backend, std::string(kv4.key), key), 0.70 * nvfp4_key) << "kv4 keys of layer " << layer;
    const double kv3_key = RootMeanSquareError(backend, std::string(kv3.key), key, 64);
    kv3_keys += kv3_key / nvfp4_key / 30;
    EXPECT_LE(kv3_key, 1.32 * nvfp4_key) << "kv3 keys of layer " << layer;
    EXPECT_LE(RootMeanSquareError(backend, std::string(kv3.value), value, 64), 1.90 * nvfp4_value) << "kv3 values of layer " << layer;
    EXPECT_LE(RootMeanSquareError(backend, std::string(kv4.value), value), 0.95 * nvfp4_value) << "kv4 values of layer " << layer;
    if (layer < 10 || layer > 19) continue;
    const double q8_key = RootMeanSquareError(backend, "q8_0", key), q8_value = RootMeanSquareError(backend, "q8_0", value);
    EXPECT_LE(RootMeanSquareError(backend, std::string(kv8.key), key), 0.50 * q8_key) << "kv8 keys of layer " << layer;
    EXPECT_LE(RootMeanSquareError(backend, std::string(kv8.value), value), q8_value) << "kv8 values of layer " << layer;
    EXPECT_LE(RootMeanSquareError(backend, std::string(int4_kivi.key), key), 0.72 * nvfp4_key) << "int4-kivi keys of layer " << layer;
  }
  EXPECT_LE(kv3_keys, 1.01);
}

// Prose moves the keys' means along, so one centre fits it less well than a chat.
TEST(Quality, RealKeysOfProse) {
  const Backend& backend = *ChooseBackend("auto").value();
  const std::vector<int> layers{0, 7, 15, 22, 29};
  const auto keys = LoadTensors("smollm2-prose-keys.safetensors", layers, "key");
  for (size_t i = 0; i < layers.size(); ++i) {
    ASSERT_EQ(TokensOf(keys[i]), 1037);
    EXPECT_LE(RootMeanSquareError(backend, std::string(FindPreset("kv4")->key), keys[i]), 0.80 * RootMeanSquareError(backend, "nvfp4", keys[i]))
        << "kv4 keys of layer " << layers[i];
  }
}

}  // namespace
}  // namespace kvpages::test
