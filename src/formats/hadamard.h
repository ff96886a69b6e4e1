// SPDX-License-Identifier: Apache-2.0
// The orthonormal Sylvester-Hadamard rotation of runs of n channels, its own inverse.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/float.h"

namespace kvpages {

KVP_HD float HadamardFactor(int64_t n) { return static_cast<float>(1.0 / sqrt(static_cast<double>(n))); }

// n: a power of two that divides width.
KVP_HD void RotateRow(float* row, int64_t width, int64_t n) {
  const float factor = HadamardFactor(n);
  for (int64_t run = 0; run < width; run += n) {
    for (int64_t stride = 1; stride < n; stride *= 2) {
      for (int64_t i = 0; i < n; i += 2 * stride) {
        for (int64_t j = run + i; j < run + i + stride; ++j) {
          const float a = row[j], b = row[j + stride];
          row[j] = a + b;
          row[j + stride] = a - b;
        }
      }
    }
    for (int64_t j = run; j < run + n; ++j) row[j] = row[j] * factor;
  }
}

}  // namespace kvpages
