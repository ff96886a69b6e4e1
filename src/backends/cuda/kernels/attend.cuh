// SPDX-License-Identifier: Apache-2.0
// Attention over pages of mixed formats, split over the pages: each part keeps its largest score, its sum of exponentials
// and its sums of values; the parts are merged in their order. A part's pages depend on the sequence's pages alone, so the
// order of all sums does.
#pragma once

#include "backends/cuda/kernels/attend.h"
#include "backends/cuda/kernels/generic.cuh"
#include "backends/cuda/kernels/words.cuh"

namespace kvpages::cuda {

constexpr int kAttendThreads = 128;

KVP_DEVICE float MinusInfinity() { return FloatOf(0xff800000u); }

// Rotates `count` rows of `width` in place; `stride` elements apart. All of the block's threads must call it.
KVP_DEVICE void RotateTogether(float* rows, int64_t count, int64_t stride, int64_t width, int64_t n) {
  const auto half = static_cast<int>(width / 2);
  for (int step = 1; step < n; step *= 2) {
    __syncthreads();
    for (int pair = threadIdx.x; pair < count * half; pair += kAttendThreads) {
      const int in_row = pair % half, j = in_row / step * 2 * step + in_row % step;
      float* row = rows + pair / half * stride;
      const float a = row[j], b = row[j + step];
      row[j] = a + b;
      row[j + step] = a - b;
    }
  }
  __syncthreads();
  const float factor = HadamardFactor(n);
  for (int i = threadIdx.x; i < count * width; i += kAttendThreads) {
    float* at = rows + i / static_cast<int>(width) * stride + i % static_cast<int>(width);
    *at = *at * factor;
  }
  __syncthreads();
}

// Queries scaled; scaled and rotated; their products with the centre. Grid: (heads * tokens, sequences).
KVP_KERNEL(KvpAttendQueries, kAttendThreads)(AttendPlan plan, const AttendSequence* sequences) {
  KVP_SHARED(float, shared);
  const AttendSequence sequence = sequences[blockIdx.y];
  const int64_t width = plan.key_width, row = blockIdx.x, head = row / plan.tokens;
  const int64_t first = head * sequence.head_stride + row % plan.tokens * sequence.token_stride;
  float* scaled = At<float>(sequence.prepared) + row * (2 * width + 1);
  float* rotated = scaled + width;
  float product = 0;
  for (int64_t d = threadIdx.x; d < width; d += kAttendThreads) {
    const float x = WidenElement(plan.query_type, At<const void>(sequence.queries), first + d) * plan.scale;
    scaled[d] = x;
    rotated[d] = x;
    if (sequence.center != 0) {
      product = product + x * FromBF16(At<const uint16_t>(sequence.center)[head / (plan.heads / plan.kv_heads) * width + d]);
    }
  }
  shared[threadIdx.x] = product;
  for (uint32_t half = kAttendThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) shared[threadIdx.x] = shared[threadIdx.x] + shared[threadIdx.x + half];
  }
  if (threadIdx.x == 0) scaled[2 * width] = shared[0];
  if (plan.key_run > 0) RotateTogether(rotated, 1, width, width, plan.key_run);
}

// Tokens [begin, begin + count) of one head of a page's side into `tile`, rows `stride` elements apart. As they are coded
// where `folded`, else rotated back and with their centre.
KVP_DEVICE void DecodeTile(const CodecPlan& format, const AttendSide& side, int64_t head, int64_t begin, int count, bool folded,
                           float* tile, int64_t stride) {
  const auto width = static_cast<int>(format.shape.width);
  DecodeItem item;
  item.codes = side.codes;
  item.scales = side.scales;
  item.zeros = side.zeros;
  const float global = side.global != 0 ? *At<const float>(side.global) : 1.0f;
  const int chunks = (width + 7) / 8;
  for (int i = threadIdx.x; i < count * chunks; i += kAttendThreads) {
    const int t = i / chunks, d = i % chunks * 8, here = width - d < 8 ? width - d : 8;
    float values[8];
    DecodeEight(format, item, global, {0, head, begin + t, d}, here, values);
    KVP_UNROLL
    for (int k = 0; k < 8; ++k) {
      if (k < here) tile[t * stride + d + k] = values[k];
    }
  }
  if (folded) return;
  if (format.hadamard > 0) RotateTogether(tile, count, stride, width, format.hadamard);
  if (side.center == 0) return;
  __syncthreads();
  for (int i = threadIdx.x; i < count * width; i += kAttendThreads) {
    float* at = tile + i / width * stride + i % width;
    *at = *at + FromBF16(At<const uint16_t>(side.center)[head * width + i % width]);
  }
}

// One part of the pages for one KV head and some of its query rows. Grid: (kv_heads * most parts, sequences, row blocks).
KVP_KERNEL(KvpAttendPart, kAttendThreads)(AttendPlan plan, const AttendSequence* sequences, int64_t most_parts) {
  KVP_SHARED(float, shared);
  const AttendSequence sequence = sequences[blockIdx.y];
  const int64_t head = blockIdx.x / most_parts, part = blockIdx.x % most_parts;
  if (part >= sequence.parts) return;
  const int64_t group_rows = plan.heads / plan.kv_heads * plan.tokens, first_row = static_cast<int64_t>(blockIdx.z) * plan.rows;
  const auto rows = static_cast<int>(group_rows - first_row < plan.rows ? group_rows - first_row : plan.rows);
  const auto width = static_cast<int>(plan.key_width), value_width = static_cast<int>(plan.value_width);
  // One more than the widest row, so that a column lies in as many banks as there are rows.
  const int64_t stride = (width > value_width ? width : value_width) + 1;
  float* const tile = shared;
  float* const weights = tile + plan.tile * stride;       // [rows][tile]
  float* const most = weights + plan.rows * plan.tile;    // largest score so far
  float* const sum = most + plan.rows;                    // of exp(score - most)
  float* const factors = sum + plan.rows;                 // by which sums so far shrink
  float* const plain = factors + plan.rows;               // [rows][value_width] sums of values
  float* const turned = plain + plan.rows * value_width;  // of rotated values; only with value_run
  const int64_t row_floats = 2 * plan.key_width + 1;
  const float* prepared = At<const float>(sequence.prepared) + (head * group_rows + first_row) * row_floats;

  for (int i = threadIdx.x; i < rows * value_width; i += kAttendThreads) {
    plain[i] = 0;
    if (plan.value_run > 0) turned[i] = 0;
  }
  for (int r = threadIdx.x; r < rows; r += kAttendThreads) {
    most[r] = MinusInfinity();
    sum[r] = 0;
  }
  const int64_t last_query = sequence.start + plan.tokens - 1;
  const int64_t end_page = (part + 1) * sequence.part_pages < sequence.page_count ? (part + 1) * sequence.part_pages : sequence.page_count;
  for (int64_t p = part * sequence.part_pages; p < end_page; ++p) {
    const AttendPage& page = At<const AttendPage>(sequence.pages)[p];
    const int64_t start = page.start, length = page.length;
    if (start > last_query) break;
    if (plan.window != 0 && sequence.start - (start + length - 1) >= plan.window && start >= plan.sinks) continue;
    const CodecPlan& key_format = At<const CodecPlan>(sequence.formats)[page.key.format];
    const CodecPlan& value_format = At<const CodecPlan>(sequence.formats)[page.value.format];
    const bool centered = page.key.center != 0 && page.key.center == sequence.center;
    const bool rotated = key_format.hadamard > 0 && key_format.hadamard == plan.key_run;
    const bool key_folded = (key_format.hadamard == 0 || rotated) && (page.key.center == 0 || centered);
    const bool value_turned = plan.value_run > 0 && value_format.hadamard == plan.value_run && page.value.center == 0;
    for (int64_t begin = 0; begin < length; begin += plan.tile) {
      const auto count = static_cast<int>(length - begin < plan.tile ? length - begin : plan.tile);
      __syncthreads();  // nobody reads the tile any more
      DecodeTile(key_format, page.key, head, begin, count, key_folded, tile, stride);
      __syncthreads();
      for (int i = threadIdx.x; i < rows * count; i += kAttendThreads) {
        const int r = i / count, t = i % count;
        const float* query = prepared + r * row_floats + (key_folded && rotated ? width : 0);
        const float* key = tile + t * stride;
        // Four sums, so that one addition need not wait for the last.
        float s0 = 0, s1 = 0, s2 = 0, s3 = 0;
        int d = 0;
        for (; d + 4 <= width; d += 4) {
          s0 = s0 + query[d] * key[d];
          s1 = s1 + query[d + 1] * key[d + 1];
          s2 = s2 + query[d + 2] * key[d + 2];
          s3 = s3 + query[d + 3] * key[d + 3];
        }
        for (; d < width; ++d) s0 = s0 + query[d] * key[d];
        float score = (s0 + s1) + (s2 + s3);
        if (key_folded && centered) score = score + prepared[r * row_floats + 2 * width];
        if (plan.softcap > 0) score = plan.softcap * tanhf(score / plan.softcap);
        const int64_t position = start + begin + t, query_at = sequence.start + (first_row + r) % plan.tokens;
        const bool visible = position <= query_at && (plan.window == 0 || query_at - position < plan.window || position < plan.sinks);
        weights[r * plan.tile + t] = visible ? score : MinusInfinity();
      }
      __syncthreads();
      for (int r = threadIdx.x; r < rows; r += kAttendThreads) {
        float largest = most[r];
        for (int t = 0; t < count; ++t) largest = weights[r * plan.tile + t] > largest ? weights[r * plan.tile + t] : largest;
        factors[r] = largest > most[r] ? expf(most[r] - largest) : 1.0f;
        most[r] = largest;
      }
      __syncthreads();
      for (int i = threadIdx.x; i < rows * count; i += kAttendThreads) {
        const int r = i / count, at = r * plan.tile + i % count;
        weights[at] = weights[at] > MinusInfinity() ? expf(weights[at] - most[r]) : 0.0f;
      }
      DecodeTile(value_format, page.value, head, begin, count, value_turned || (value_format.hadamard == 0 && page.value.center == 0),
                 tile, stride);
      __syncthreads();
      for (int r = threadIdx.x; r < rows; r += kAttendThreads) {
        float added = 0;
        for (int t = 0; t < count; ++t) added = added + weights[r * plan.tile + t];
        sum[r] = sum[r] * factors[r] + added;
      }
      for (int i = threadIdx.x; i < rows * value_width; i += kAttendThreads) {
        const int r = i / value_width, d = i % value_width;
        float added = 0;
        for (int t = 0; t < count; ++t) added = added + weights[r * plan.tile + t] * tile[t * stride + d];
        plain[i] = plain[i] * factors[r] + (value_turned ? 0.0f : added);
        if (plan.value_run > 0) turned[i] = turned[i] * factors[r] + (value_turned ? added : 0.0f);
      }
    }
  }
  __syncthreads();
  const int64_t sum_floats = 2 * plan.value_width + 2;
  float* out = At<float>(sequence.sums) + (part * plan.heads * plan.tokens + head * group_rows + first_row) * sum_floats;
  for (int i = threadIdx.x; i < rows * value_width; i += kAttendThreads) {
    float* row = out + i / value_width * sum_floats + i % value_width;
    row[0] = plain[i];
    row[value_width] = plan.value_run > 0 ? turned[i] : 0.0f;
  }
  for (int r = threadIdx.x; r < rows; r += kAttendThreads) {
    out[r * sum_floats + 2 * value_width] = most[r];
    out[r * sum_floats + 2 * value_width + 1] = sum[r];
  }
}

// The parts of one query row, in their order. Grid: (heads * tokens, sequences).
KVP_KERNEL(KvpAttendMerge, kAttendThreads)(AttendPlan plan, const AttendSequence* sequences) {
  KVP_SHARED(float, turned);
  const AttendSequence sequence = sequences[blockIdx.y];
  const int64_t row = blockIdx.x, width = plan.value_width, sum_floats = 2 * width + 2, step = plan.heads * plan.tokens * sum_floats;
  const float* parts = At<const float>(sequence.sums) + row * sum_floats;
  float most = MinusInfinity();
  for (int64_t p = 0; p < sequence.parts; ++p) {
    const float part_most = parts[p * step + 2 * width];
    most = part_most > most ? part_most : most;
  }
  const float sink = plan.sink_logits != 0 ? At<const float>(plan.sink_logits)[row / plan.tokens] : MinusInfinity();
  most = sink > most ? sink : most;
  float sum = 0;
  for (int64_t p = 0; p < sequence.parts; ++p) {
    const float part_most = parts[p * step + 2 * width];
    if (part_most > MinusInfinity()) sum = sum + parts[p * step + 2 * width + 1] * expf(part_most - most);
  }
  if (sink > MinusInfinity()) sum = sum + expf(sink - most);
  float* out = At<float>(sequence.out) + row * width;
  for (int64_t d = threadIdx.x; d < width; d += kAttendThreads) {
    float x = 0, y = 0;
    for (int64_t p = 0; p < sequence.parts; ++p) {
      const float part_most = parts[p * step + 2 * width];
      if (!(part_most > MinusInfinity())) continue;
      const float factor = expf(part_most - most);
      x = x + parts[p * step + d] * factor;
      y = y + parts[p * step + width + d] * factor;
    }
    out[d] = x;
    turned[d] = y;
  }
  __syncthreads();
  if (plan.value_run > 0) RotateTogether(turned, 1, width, width, plan.value_run);
  for (int64_t d = threadIdx.x; d < width; d += kAttendThreads) {
    const float x = plan.value_run > 0 ? out[d] + turned[d] : out[d];
    out[d] = sum > 0 ? x / sum : 0.0f;
  }
  if (threadIdx.x == 0 && sequence.lse != 0) At<float>(sequence.lse)[row] = sum > 0 ? most + logf(sum) : MinusInfinity();
}

}  // namespace kvpages::cuda
