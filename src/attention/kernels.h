// SPDX-License-Identifier: Apache-2.0
// The loops of attention, one table per backend. Each sums in a fixed order of its own; results of two tables differ by
// rounding, within the bound of docs/attention.md.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace kvpages {

// Queries in 16-bit integers for products with codes: query value = integer * step. Order and padding of the integers
// are the table's own.
struct PreparedQueries {
  int64_t count = 0, width = 0;
  int bits = 0;      // of the codes that they meet: 4 or 8
  int32_t most = 0;  // largest magnitude of an integer
  std::vector<int16_t> values;
  std::vector<int8_t> bytes;       // the same in bytes, 256 * high + low, where the table works on those
  std::vector<int32_t> lane_sums;  // sums over the codes of a lane
  std::vector<int32_t> sums;       // of a whole query
  std::vector<float> steps;
};
constexpr int64_t CodesPerLane(int bits) { return 32 / bits; }  // codes whose products one 32-bit lane adds up
// Floats or integers that a row of `lane_scales` or `lane_zeros` has, the padding of the widest vector included.
constexpr int64_t LanesOf(int bits, int64_t width) { return (width + 32 * 8 / bits - 1) / (32 * 8 / bits) * 8; }

// Rows of codes of one head of a page. A code c stands for table[c] (4 bits, with a table) or c - offset - zero, times
// its scale.
struct CodedRows {
  const uint8_t* codes = nullptr;  // first row
  int64_t row_bytes = 0, rows = 0;
  bool is_signed = true;                // two's complement; 4-bit ones are read as code + 8
  const int16_t* table = nullptr;       // 16 values
  const float* row_scales = nullptr;    // [rows], or
  const float* lane_scales = nullptr;   // [rows][LanesOf]
  const int32_t* row_zeros = nullptr;   // [rows] with row_scales, or none
  const int32_t* lane_zeros = nullptr;  // [rows][LanesOf] with lane_scales, or none
};

struct AttentionKernels {
  const char* name;  // the backend's
  // scores[q * stride + t] = sum over d of queries[q * width + d] * rows[t * width + d]
  void (*dots)(const float* queries, int64_t query_count, const float* rows, int64_t row_count, int64_t width, float* scores,
               int64_t stride);
  // sums[q * width + d] += sum over t, in their order, of weights[q * stride + t] * rows[t * width + d]
  void (*mix)(const float* weights, int64_t query_count, int64_t stride, const float* rows, int64_t row_count, int64_t width,
              float* sums);
  // The largest score; NaN where one is NaN.
  float (*largest)(const float* scores, int64_t count);
  // Replaces scores by exp(score - most), 0 for -infinity, NaN for NaN, and gives their sum.
  float (*exponentials)(float* scores, int64_t count, float most);
  // values[i] *= factor
  void (*multiply)(float* values, int64_t count, float factor);
  // As `dots`, from codes; null where the table has none. The sum of |integer * code| over a row must fit 31 bits with
  // row_scales, over a lane with lane_scales. Reads up to 64 bytes past the last row.
  void (*prepare)(const float* queries, int64_t query_count, int64_t width, PreparedQueries& prepared);
  void (*coded_dots)(const PreparedQueries& queries, const CodedRows& rows, float* scores, int64_t stride);
};

extern const AttentionKernels kReferenceAttention;
// Tables of this build's vector targets.
const std::vector<const AttentionKernels*>& SimdAttention();
// The table that goes with a backend's name; the reference's where it has none.
const AttentionKernels& AttentionKernelsFor(std::string_view backend);

}  // namespace kvpages
