// SPDX-License-Identifier: Apache-2.0
// Scores of queries against the codes of a page, without decoding them: which formats can be had so, and their scales in
// the form that the kernels take.
#pragma once

#include <cstdint>
#include <vector>

#include "attention/kernels.h"
#include "core/page.h"

namespace kvpages {

// Pages lie scattered in memory: asks for a page's numbers while the pages before it are worked on. `soon` is the next
// payload, `later` the one after it; either may be null.
void FetchAhead(const Payload* soon, const Payload* later);

class CodedKeys {
 public:
  // The queries' memory holds new values.
  void Forget() { prepared_.clear(); }
  // Rows [begin, end) of one head, as AttentionKernels::dots. False, with nothing written, where the payload's codes or
  // scales have another form: the same answer for every head.
  bool Dots(const AttentionKernels& kernels, const Payload& payload, int64_t head, int64_t begin, int64_t end,
            const float* queries, int64_t query_count, float* scores, int64_t stride);

 private:
  struct Known {
    const float* queries;
    PreparedQueries prepared;
  };
  const PreparedQueries& Prepare(const AttentionKernels& kernels, const float* queries, int64_t count, int64_t width, int bits,
                                 int32_t most, bool keep);
  bool ByChannel(const AttentionKernels& kernels, const Payload& payload, int64_t head, int64_t begin, int64_t end,
                 const float* queries, int64_t query_count, CodedRows rows, float step, int32_t most, float* scores, int64_t stride);
  std::vector<Known> prepared_;
  PreparedQueries folded_;
  void LoadScales(const Payload& payload, int64_t first, int64_t count, float step, const uint8_t* zeros);
  std::vector<float> scales_, lane_scales_, query_;
  std::vector<int32_t> zeros_, lane_zeros_;
};

}  // namespace kvpages
