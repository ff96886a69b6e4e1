// SPDX-License-Identifier: Apache-2.0
// Attention's loops in their shortest form, and the choice of a table.
#include <cmath>

#include "attention/kernels.h"

namespace kvpages {
namespace {

void Dots(const float* queries, int64_t query_count, const float* rows, int64_t row_count, int64_t width, float* scores,
          int64_t stride) {
  for (int64_t q = 0; q < query_count; ++q) {
    for (int64_t t = 0; t < row_count; ++t) {
      float sum = 0;
      for (int64_t d = 0; d < width; ++d) sum += queries[q * width + d] * rows[t * width + d];
      scores[q * stride + t] = sum;
    }
  }
}

void Mix(const float* weights, int64_t query_count, int64_t stride, const float* rows, int64_t row_count, int64_t width,
         float* sums) {
  for (int64_t q = 0; q < query_count; ++q) {
    for (int64_t t = 0; t < row_count; ++t) {
      for (int64_t d = 0; d < width; ++d) sums[q * width + d] += weights[q * stride + t] * rows[t * width + d];
    }
  }
}

float Largest(const float* scores, int64_t count) {
  float largest = -INFINITY;
  for (int64_t i = 0; i < count; ++i) {
    if (scores[i] != scores[i]) return scores[i];
    if (scores[i] > largest) largest = scores[i];
  }
  return largest;
}

float Exponentials(float* scores, int64_t count, float most) {
  float sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += scores[i] = std::exp(scores[i] - most);
  return sum;
}

void Multiply(float* values, int64_t count, float factor) {
  for (int64_t i = 0; i < count; ++i) values[i] *= factor;
}

}  // namespace

const AttentionKernels kReferenceAttention = {"reference", Dots, Mix, Largest, Exponentials, Multiply, nullptr, nullptr};

const AttentionKernels& AttentionKernelsFor(std::string_view backend) {
  for (const AttentionKernels* kernels : SimdAttention()) {
    if (backend == kernels->name) return *kernels;
  }
  return kReferenceAttention;
}

}  // namespace kvpages
