// SPDX-License-Identifier: Apache-2.0
// softmax(scale * Q K^T) V over a layer of a ModelCache: page by page from the codes, an online softmax over the pages,
// nothing thawed beyond one tile.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "core/model_cache.h"

namespace kvpages {

struct AttendOptions {
  std::optional<double> scale;         // 1 / sqrt(head_dim of keys)
  std::optional<int64_t> query_start;  // position of the first query; the layer's tokens minus the queries
  std::optional<int64_t> window;       // the layer's own; 0: none
  int64_t sinks = 0;                   // tokens at positions below this are visible through any window
  double softcap = 0;                  // score = softcap * tanh(score / softcap), before the mask; 0: none
  std::span<const float> sink_logits;  // a learned logit per query head in the softmax's denominator; or none
};

// queries [1, heads, tokens, head_dim of keys], heads a multiple of the layer's KV heads: query head h reads KV head
// h / (heads / kv_heads). A token at position p is visible to the query at position i iff p <= i and (no window, or
// i - p < window, or p < sinks). `out`: contiguous [heads, tokens, head_dim of values]; `lse`: [heads, tokens] log-sum-exp
// of the scores, sink logits included, or null. A query that sees nothing gives zeros and -infinity. ERR_MISMATCH where an
// earlier layer has another number of tokens.
Status Attend(const ModelCache& cache, int64_t layer, const TensorView& queries, const AttendOptions& options, float* out,
              float* lse);

// The same of several caches. Those that lie on a device and are made alike go there together. An error names the cache, "cache 2: "
// in front; outputs hold anything then.
struct AttendTask {
  const ModelCache* cache = nullptr;
  TensorView queries;
  float* out = nullptr;
  float* lse = nullptr;
};
Status AttendAll(std::span<const AttendTask> tasks, int64_t layer, const AttendOptions& options);

}  // namespace kvpages
