// SPDX-License-Identifier: Apache-2.0
// Attention in float64 over what a cache thaws to, and how far an f32 result may be from it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "attention/attend.h"
#include "core/float.h"

namespace kvpages::test {

struct Exact {
  std::vector<double> out, lse;              // [heads][tokens][width], [heads][tokens]
  std::vector<double> out_bound, lse_bound;  // per query row
};

// Normal values, some of them four times as large.
inline std::vector<float> Noise(std::mt19937& random, int64_t count) {
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = normal(random) * (random() % 23 == 0 ? 4.0f : 1.0f);
  return values;
}

inline double Norm(const float* x, int64_t count) {
  double sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += double{x[i]} * x[i];
  return std::sqrt(sum);
}

// Attention in float64 over what the cache thaws to, and the bound of docs/attention.md.
inline Exact ExactAttention(const ModelCache& cache, int64_t index, const std::vector<float>& queries, int64_t heads, int64_t tokens,
                     const AttendOptions& options) {
  const LayerConfig& config = cache.config().layers[static_cast<size_t>(index)];
  const CacheLayer& layer = cache.layer(index);
  const int64_t width = config.key.width, value_width = config.value.width, kv_heads = config.heads;
  std::vector<int64_t> positions;
  for (const CachePage& page : layer.pages) {
    for (int64_t t = 0; t < page.length; ++t) positions.push_back(page.start + t);
  }
  const auto held = static_cast<int64_t>(positions.size());
  std::vector<float> keys(static_cast<size_t>(kv_heads * held * width)), values(static_cast<size_t>(kv_heads * held * value_width));
  int64_t at = 0;
  bool levels = false, integers = false, rotated = false;
  int64_t key_run = 1, value_run = 1;
  for (const CachePage& page : layer.pages) {
    EXPECT_TRUE(cache.Read(index, false, page.start, page.end(), keys.data() + at * width, held * width, width).ok());
    EXPECT_TRUE(cache.Read(index, true, page.start, page.end(), values.data() + at * value_width, held * value_width, value_width).ok());
    at += page.length;
    if (page.key.frozen) {
      const Spec& spec = page.key.payload->spec;
      levels |= spec.type == Type::lm4;
      integers |= Info(spec.type).bits == 4 || Info(spec.type).bits == 8;
    }
    key_run = std::max(key_run, page.key.payload->hadamard);
    value_run = std::max(value_run, page.value.payload->hadamard);
    rotated |= page.value.payload->hadamard > 1;
  }
  const double scale = options.scale.value_or(1 / std::sqrt(static_cast<double>(width)));
  const int64_t window = options.window.value_or(config.window), start = options.query_start.value_or(layer.end - tokens);
  Exact exact;
  for (int64_t h = 0; h < heads; ++h) {
    const int64_t g = h * kv_heads / heads;
    std::vector<float> center(static_cast<size_t>(width));
    for (int64_t d = 0; d < width && !layer.center.empty(); ++d) center[static_cast<size_t>(d)] = FromBF16(layer.center.as<uint16_t>()[g * width + d]);
    const double center_norm = Norm(center.data(), width);
    for (int64_t i = 0; i < tokens; ++i) {
      const float* query = queries.data() + (h * tokens + i) * width;
      const int64_t position = start + i;
      std::vector<double> scores(static_cast<size_t>(held), -INFINITY);
      double most = -INFINITY, key_norm = 0, value_norm = 0, value_most = 0;
      int64_t seen = 0;
      for (int64_t t = 0; t < held; ++t) {
        const int64_t p = positions[static_cast<size_t>(t)];
        const float* key = keys.data() + (g * held + t) * width;
        double score = 0, norm = 0;
        for (int64_t d = 0; d < width; ++d) {
          score += double{query[d]} * key[d];
          const double x = key[d] - double{center[static_cast<size_t>(d)]};
          norm += x * x;
        }
        key_norm = std::max(key_norm, std::sqrt(norm) + center_norm);
        if (p > position || (window != 0 && position - p >= window && p >= options.sinks)) continue;
        ++seen;
        score *= scale;
        if (options.softcap > 0) score = options.softcap * std::tanh(score / options.softcap);
        scores[static_cast<size_t>(t)] = score;
        most = std::max(most, score);
        const float* value = values.data() + (g * held + t) * value_width;
        value_norm = std::max(value_norm, Norm(value, value_width));
        for (int64_t d = 0; d < value_width; ++d) value_most = std::max(value_most, std::fabs(double{value[d]}));
      }
      if (!options.sink_logits.empty()) most = std::max(most, double{options.sink_logits[static_cast<size_t>(h)]});
      double sum = options.sink_logits.empty() ? 0 : std::exp(options.sink_logits[static_cast<size_t>(h)] - most);
      std::vector<double> out(static_cast<size_t>(value_width));
      for (int64_t t = 0; t < held; ++t) {
        if (scores[static_cast<size_t>(t)] == -INFINITY) continue;
        const double weight = std::exp(scores[static_cast<size_t>(t)] - most);
        sum += weight;
        for (int64_t d = 0; d < value_width; ++d) out[static_cast<size_t>(d)] += weight * values[static_cast<size_t>((g * held + t) * value_width + d)];
      }
      for (double& x : out) exact.out.push_back(sum > 0 ? x / sum : 0);
      const double lse = sum > 0 ? most + std::log(sum) : -INFINITY;
      exact.lse.push_back(lse);

      // docs/attention.md, "Error".
      const double unit = std::ldexp(1, -24);
      const double key_turns = std::log2(static_cast<double>(key_run)), value_turns = std::log2(static_cast<double>(value_run));
      double largest = 0;
      for (int64_t d = 0; d < width; ++d) largest = std::max(largest, std::fabs(double{query[d]}));
      // A rotated query's largest value is at most its norm.
      const double norm = Norm(query, width), query_most = config.key.spec.hadamard ? norm : largest;
      double error = (static_cast<double>(width) + 2 * key_turns + 8) * unit * norm;
      if (cache.instance()->backend->name != std::string("reference")) {
        if (integers) error += std::ldexp(1, -15) * std::sqrt(static_cast<double>(width)) * query_most;
        if (levels) error += std::pow(2, -10.5) * norm;
      }
      error = std::fabs(scale) * error * key_norm + 4 * unit * options.softcap;
      const double rounding = (2 * static_cast<double>(seen) + 4 * static_cast<double>(seen / 256 + 2) + 2 * value_turns + 128) * unit;
      exact.out_bound.push_back(std::expm1(2 * error) * value_most + rounding * (rotated ? value_norm : value_most));
      exact.lse_bound.push_back(error + rounding + 2 * unit * (std::isfinite(lse) ? std::fabs(lse) : 0));
    }
  }
  return exact;
}

}  // namespace kvpages::test
