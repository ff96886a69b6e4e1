// SPDX-License-Identifier: Apache-2.0
// numpy.random.RandomState, as far as the published inputs of the sorted profiles need it. The stream of a RandomState
// is frozen by numpy's compatibility policy: MT19937, polar method for normals, Marsaglia and Tsang for gamma.
#pragma once

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

}  // namespace kvpages::test
