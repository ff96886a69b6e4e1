// SPDX-License-Identifier: Apache-2.0
// What the scale searches share: the ratios, and the order in which errors are summed.
#pragma once

#include <cstdint>

#include "core/float.h"

namespace kvpages {

// 32 values from 0.5 to 1: start + step * i up to the middle, end - step * (31 - i) after it, in f32.
constexpr int kRatioCount = 32;
KVP_HD float Ratio(int i) {
  constexpr uint32_t kBits[kRatioCount] = {
      0x3f000000, 0x3f042108, 0x3f084210, 0x3f0c6319, 0x3f108421, 0x3f14a529, 0x3f18c632, 0x3f1ce73a,
      0x3f210842, 0x3f25294a, 0x3f294a52, 0x3f2d6b5b, 0x3f318c63, 0x3f35ad6b, 0x3f39ce74, 0x3f3def7c,
      0x3f421084, 0x3f46318c, 0x3f4a5295, 0x3f4e739d, 0x3f5294a5, 0x3f56b5ae, 0x3f5ad6b6, 0x3f5ef7be,
      0x3f6318c6, 0x3f6739ce, 0x3f6b5ad7, 0x3f6f7bdf, 0x3f739ce7, 0x3f77bdf0, 0x3f7bdef8, 0x3f800000};
  return FloatOf(kBits[i]);
}

// The halving tree over element(first), element(first + step) .. of an array of `padded` elements (both powers of two),
// those from `count` on zeros. Read in the order in which the partial sums that wait need no more room than the tree is deep.
template <typename F>
KVP_HD float TreePart(int64_t count, int64_t padded, int64_t first, int64_t step, const F& element) {
  float waiting[48];
  int depth = 0;
  int64_t i = first;  // counts with its bits reversed
  for (int64_t k = 0; k < padded / step; ++k) {
    float sum = i < count ? element(i) : 0.0f;
    for (int64_t carry = k; (carry & 1) != 0; carry /= 2) sum = waiting[--depth] + sum;
    waiting[depth++] = sum;
    int64_t bit = padded / 2;
    while (bit >= step && (i & bit) != 0) {
      i -= bit;
      bit /= 2;
    }
    i += bit;
  }
  return waiting[0];
}
// Sum of element(0) .. element(count - 1): padded with zeros to a power of two n, element i + n/2 is added to
// element i, n is halved, until one is left.
template <typename F>
KVP_HD float TreeSum(int64_t count, const F& element) {
  int64_t padded = 1;
  while (padded < count) padded *= 2;
  return count == 0 ? 0.0f : TreePart(count, padded, int64_t{0}, int64_t{1}, element);
}
// The same over an array, which it overwrites. n: a power of two.
template <int n>
KVP_HD float TreeSumOf(float (&values)[n]) {
  for (int half = n / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) values[i] = values[i] + values[i + half];
  }
  return values[0];
}

// A later candidate wins only if it is strictly better; a NaN never stays, so that among nothing but NaN the largest scale wins.
KVP_HD bool Better(float error, float best) { return error < best || best != best; }

}  // namespace kvpages
