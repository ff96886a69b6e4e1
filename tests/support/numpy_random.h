// SPDX-License-Identifier: Apache-2.0
// numpy's random numbers, as far as published inputs need them. RandomState for sorted profiles, a stream that numpy's
// compatibility policy has frozen: MT19937, polar method for normals, Marsaglia and Tsang for gamma. Generator for the study's
// table: PCG64, ziggurat for normals.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

namespace kvpages::test {

class NumpyRandom {
 public:
  explicit NumpyRandom(uint32_t seed) : engine_(seed) {}

  double Uniform() {
    const auto high = static_cast<uint32_t>(engine_()) >> 5, low = static_cast<uint32_t>(engine_()) >> 6;
    return (high * 67108864.0 + low) / 9007199254740992.0;
  }
  double Normal() {
    if (has_spare_) {
      has_spare_ = false;
      return spare_;
    }
    double x, y, square;
    do {
      x = 2 * Uniform() - 1;
      y = 2 * Uniform() - 1;
      square = x * x + y * y;
    } while (square >= 1 || square == 0);
    const double factor = std::sqrt(-2 * std::log(square) / square);
    spare_ = factor * x;
    has_spare_ = true;
    return factor * y;
  }
  std::vector<double> Normals(int64_t count, double mean = 0, double deviation = 1) {
    std::vector<double> out;
    for (int64_t i = 0; i < count; ++i) out.push_back(mean + deviation * Normal());
    return out;
  }
  double StandardT(double freedom) {
    const double normal = Normal();
    return std::sqrt(freedom / 2) * normal / std::sqrt(Gamma(freedom / 2));
  }
  // choice(count, size, replace=False)
  std::vector<int64_t> Choice(int64_t count, int64_t size) {
    std::vector<int64_t> all;
    for (int64_t i = 0; i < count; ++i) all.push_back(i);
    for (int64_t i = count - 1; i > 0; --i) std::swap(all[static_cast<size_t>(i)], all[Interval(static_cast<uint32_t>(i))]);
    all.resize(static_cast<size_t>(size));
    return all;
  }

 private:
  double Gamma(double shape) {  // shape > 1
    const double b = shape - 1.0 / 3, c = 1 / std::sqrt(9 * b);
    for (;;) {
      double x, v;
      do {
        x = Normal();
        v = 1 + c * x;
      } while (v <= 0);
      v = v * v * v;
      const double u = Uniform();
      if (u < 1 - 0.0331 * (x * x) * (x * x)) return b * v;
      if (std::log(u) < 0.5 * x * x + b * (1 - v + std::log(v))) return b * v;
    }
  }
  uint32_t Interval(uint32_t most) {
    uint32_t mask = most;
    for (int shift = 1; shift < 32; shift *= 2) mask |= mask >> shift;
    uint32_t value;
    do value = static_cast<uint32_t>(engine_()) & mask;
    while (value > most);
    return value;
  }
  std::mt19937 engine_;
  bool has_spare_ = false;
  double spare_ = 0;
};

// default_rng(seed) from the state that the seed gives.
class NumpyGenerator {
 public:
  struct Wide {
    uint64_t high, low;
  };
  NumpyGenerator(Wide state, Wide increment) : state_(Join(state)), increment_(Join(increment)) {
    // Marsaglia and Tsang, "The Ziggurat Method for Generating Random Variables" (2000), 256 strips, 52 bits of magnitude.
    const double area = kStart * Density(kStart) + std::sqrt(std::acos(-1.0) / 2) * std::erfc(kStart / std::sqrt(2.0));
    const double base = area / Density(kStart);
    limit_[0] = static_cast<uint64_t>(kStart / base * kScale);
    step_[0] = base / kScale;
    step_[255] = kStart / kScale;
    density_[0] = 1;
    density_[255] = Density(kStart);
    double edge = kStart;
    for (int i = 254; i > 0; --i) {
      const double next = std::sqrt(-2 * std::log(area / edge + Density(edge)));
      limit_[i + 1] = static_cast<uint64_t>(next / edge * kScale);
      edge = next;
      density_[i] = Density(edge);
      step_[i] = edge / kScale;
    }
    limit_[1] = 0;
  }

  double Normal() {
    for (;;) {
      const uint64_t bits = Next();
      const auto strip = static_cast<size_t>(bits & 255);
      const bool negative = ((bits >> 8) & 1) != 0;
      const uint64_t magnitude = (bits >> 9) & ((uint64_t{1} << 52) - 1);
      const double x = static_cast<double>(magnitude) * step_[strip];
      if (magnitude < limit_[strip]) return negative ? -x : x;
      if (strip == 0) {
        for (;;) {
          const double beyond = -std::log1p(-Uniform()) / kStart, y = -std::log1p(-Uniform());
          if (y + y > beyond * beyond) return ((magnitude >> 8) & 1) != 0 ? -(kStart + beyond) : kStart + beyond;
        }
      }
      if ((density_[strip - 1] - density_[strip]) * Uniform() + density_[strip] < Density(x)) return negative ? -x : x;
    }
  }

 private:
  __extension__ using uint128 = unsigned __int128;
  static constexpr double kStart = 3.6541528853610088, kScale = 4503599627370496.0;
  static uint128 Join(Wide wide) { return static_cast<uint128>(wide.high) << 64 | wide.low; }
  static double Density(double x) { return std::exp(-0.5 * x * x); }

  uint64_t Next() {
    state_ = state_ * Join({0x2360ed051fc65da4, 0x4385df649fccf645}) + increment_;
    const auto mixed = static_cast<uint64_t>(state_ >> 64) ^ static_cast<uint64_t>(state_);
    return std::rotr(mixed, static_cast<int>(state_ >> 122));
  }
  double Uniform() { return static_cast<double>(Next() >> 11) / 9007199254740992.0; }

  uint128 state_, increment_;
  uint64_t limit_[256];
  double step_[256], density_[256];
};

}  // namespace kvpages::test
