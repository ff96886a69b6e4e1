// SPDX-License-Identifier: Apache-2.0
// What the kernels of attention are told. The same on host and device.
#pragma once

#include <cstdint>

#include "formats/types.h"

namespace kvpages::cuda {

// Keys or values of a page, all heads; addresses as in DecodeItem.
struct AttendSide {
  uint64_t codes = 0, scales = 0, zeros = 0, global = 0, center = 0;
  int32_t format = 0;  // index of the CodecPlan of AttendSequence::formats that decodes it
  int32_t unused = 0;
};
struct AttendPage {
  int64_t start = 0, length = 0;  // position of the first token, valid tokens
  AttendSide key, value;
};

struct AttendSequence {
  uint64_t queries = 0;  // AttendPlan::query_type [heads, tokens, key_width]
  int64_t head_stride = 0, token_stride = 0;
  int64_t start = 0;     // position of the first query
  uint64_t pages = 0;    // AttendPage, by position
  int64_t page_count = 0;
  uint64_t formats = 0;  // CodecPlan, as DecodePlan makes them
  uint64_t center = 0;   // the layer's, bf16 [kv_heads, key_width], or 0
  uint64_t out = 0;      // f32 [heads, tokens, value_width]
  uint64_t lse = 0;      // f32 [heads, tokens], or 0
  // Set by DeviceAttention.
  int64_t part_pages = 0, parts = 0;
  uint64_t prepared = 0;  // f32 [heads * tokens][2 * key_width + 1]: scaled, scaled and rotated, product with the centre
  uint64_t sums = 0;      // f32 [parts][heads * tokens][2 * value_width + 2]: values, rotated values, largest score, sum
};

struct AttendPlan {
  int64_t heads = 0, kv_heads = 0, key_width = 0, value_width = 0, tokens = 0;
  Type query_type = Type::f32;
  float scale = 1, softcap = 0;
  int64_t window = 0, sinks = 0;  // 0: none
  int64_t key_run = 0, value_run = 0;  // with which this layer's pages are rotated; others are rotated back page by page
  uint64_t sink_logits = 0;       // f32 [heads], or 0
  int32_t tile = 0, rows = 0;     // tokens decoded at once, query rows of a block of threads
};

}  // namespace kvpages::cuda
