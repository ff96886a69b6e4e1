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
  // What follows from a payload's spec, shape and grid.
  struct Plan {
    Spec spec;
    Shape shape;
    Grid grid;
    bool has_zeros = false;
    bool usable = false, is_signed = false;
    bool one_scale = false;   // for a row
    bool row_by_row = false;  // scales of their own for every row
    bool by_row = false;      // a row's products fit one 32-bit sum
    bool in_place = false;    // scales are used as they lie in the payload
    int bits = 0;
    int32_t most = 0;
    float step = 1.0f;
    const int16_t* table = nullptr;
    int64_t row_bytes = 0, blocks = 0, lanes = 0, lanes_per_block = 0;
    bool Fits(const Payload& payload) const;
  };
  void MakePlan(const Payload& payload);
  const PreparedQueries& Prepare(const AttentionKernels& kernels, const float* queries, int64_t count);
  void LoadScales(const Payload& payload, int64_t first, int64_t count, float step, const uint8_t* zeros);
  Plan plan_;
  std::vector<Known> prepared_;
  std::vector<float> scales_, lane_scales_;
  std::vector<int32_t> zeros_, lane_zeros_;
};

}  // namespace kvpages
