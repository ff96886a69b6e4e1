// SPDX-License-Identifier: Apache-2.0
#include "attention/coded.h"

#include <algorithm>
#include <cmath>

#include "formats/codec.h"
#include "formats/schemes.h"

namespace kvpages {
namespace {

// What the codes of a 4-bit type are worth at scale 1, as integers times a step; and what a scheme's scale bytes are
// worth at g = 1.
struct Coding {
  bool tabled = false;
  int16_t table[16] = {};
  float step = 1.0f;
  int32_t most = 0;  // largest magnitude in the table
  std::vector<float> scheme_scales;
};

// Table values stay below 2^14: a lane adds 8 products with integers of 14 bits.
constexpr float kFineMost = 16383.0f;
// Queries get 14 bits at least: what the bound of docs/attention.md counts on.
constexpr int64_t kLeastMost = 16383;

Coding MakeCoding(const TypeInfo& info) {
  Coding coding;
  if (info.bits != 4 || info.family == Family::kInteger) return coding;
  Spec spec;
  spec.type = info.type;
  float values[16], largest = 0;
  const Codec codec = MakeCodec(spec);
  for (uint32_t code = 0; code < 16; ++code) {
    if (info.family == Family::kScheme) {
      uint8_t codes[kLargestSchemeBlock / 2] = {static_cast<uint8_t>(code)};
      float block[kLargestSchemeBlock];
      // The scale that is worth 1 in e4m3 (nvfp4) or e8m0 (MX).
      const uint8_t one = info.block == kNvfp4Block ? 0x38 : 0x7f;
      DecodeSchemeBlock(info.type, 1.0f, 0, codes, &one, block);
      values[code] = block[0];
    } else {
      values[code] = Decode(codec, code, {1.0f, 0, 0.0f});
    }
    largest = std::max(largest, std::fabs(values[code]));
  }
  // Multiples of 1/2 are exact; levels are not.
  coding.step = 0.5f;
  for (const float value : values) {
    if (value * 2 != std::rint(value * 2)) coding.step = largest / kFineMost;
  }
  for (int code = 0; code < 16; ++code) {
    coding.table[code] = static_cast<int16_t>(std::rint(values[code] / coding.step));
    coding.most = std::max<int32_t>(coding.most, std::abs(coding.table[code]));
  }
  coding.tabled = true;
  if (info.family == Family::kScheme) {
    uint32_t one = 0;
    while (values[one] != 1.0f) ++one;
    for (int byte = 0; byte < 256; ++byte) {
      const auto scale = static_cast<uint8_t>(byte);
      uint8_t codes[kLargestSchemeBlock / 2] = {static_cast<uint8_t>(one)};
      float block[kLargestSchemeBlock];
      DecodeSchemeBlock(info.type, 1.0f, 0, codes, &scale, block);
      coding.scheme_scales.push_back(block[0]);
    }
  }
  return coding;
}

// llama.cpp's types keep their scales inside the blocks; their codings are never asked for.
const Coding& CodingOf(Type type) {
  static const auto& all = *[] {
    auto* list = new std::vector<Coding>(static_cast<size_t>(TypeCount()));
    for (int i = 0; i < TypeCount(); ++i) {
      const TypeInfo& info = TypeAt(i);
      if (info.family != Family::kScheme || LlamaBlockBytes(info.type) == 0) (*list)[static_cast<size_t>(info.type)] = MakeCoding(info);
    }
    return list;
  }();
  return all[static_cast<size_t>(type)];
}

}  // namespace

const PreparedQueries& CodedKeys::Prepare(const AttentionKernels& kernels, const float* queries, int64_t count, int64_t width,
                                          int bits, int32_t most, bool keep) {
  PreparedQueries* prepared = &folded_;
  if (keep) {
    for (const Known& known : prepared_) {
      if (known.queries == queries && known.prepared.bits == bits && known.prepared.most == most) return known.prepared;
    }
    prepared_.push_back({queries, {}});
    prepared = &prepared_.back().prepared;
  }
  prepared->bits = bits;
  prepared->most = most;
  kernels.prepare(queries, count, width, *prepared);
  return *prepared;
}

bool CodedKeys::Dots(const AttentionKernels& kernels, const Payload& payload, int64_t head, int64_t begin, int64_t end,
                     const float* queries, int64_t query_count, float* scores, int64_t stride) {
  const TypeInfo& info = Info(payload.spec.type);
  const Coding& coding = CodingOf(info.type);
  const Grid& grid = payload.grid;
  const int64_t width = payload.shape.width, row_bits = width * info.bits;
  const bool integer = info.family == Family::kInteger && (info.bits == 4 || info.bits == 8);
  const bool kivi = payload.spec.calibration == Calibration::kKivi;  // rounds to f16 after every step
  if (payload.shape.batch != 1 || !(integer || coding.tabled) || row_bits % 8 != 0 || grid.count == 0 || kivi) return false;

  CodedRows rows;
  rows.row_bytes = row_bits / 8;
  rows.codes = payload.codes.data() + (head * payload.shape.tokens + begin) * rows.row_bytes;
  rows.rows = end - begin;
  rows.is_signed = integer && info.is_signed;
  rows.table = coding.tabled ? coding.table : nullptr;
  const float step = coding.tabled ? coding.step : 1.0f;
  const int32_t largest = coding.tabled ? coding.most : 1 << info.bits;
  int32_t most = largest > 1000 ? static_cast<int32_t>(kLeastMost) : 32767;

  const Codec codec = MakeCodec(payload.spec);
  const uint8_t* zeros = payload.has_zeros ? payload.zeros.data() : nullptr;
  const auto scale_at = [&](int64_t t, int64_t d) {
    const int64_t index = grid.Index(0, head, t, d);
    if (info.family != Family::kScheme) return LoadScaleAt(codec, payload.scales.data(), zeros, payload.global, index);
    return Scale{coding.scheme_scales[payload.scales.data()[index]] * (info.block == kNvfp4Block ? payload.global : 1.0f), 0, 0.0f};
  };

  const bool one_scale = grid.stride[3] == 0 || grid.div[3] >= width;
  if (one_scale && width * largest <= INT32_MAX / kLeastMost) {
    // A whole row in one 32-bit sum.
    most = static_cast<int32_t>(std::min<int64_t>(most, INT32_MAX / (width * largest)));
    scales_.resize(static_cast<size_t>(rows.rows + 8));
    zeros_.resize(scales_.size());
    for (int64_t t = 0; t < rows.rows; ++t) {
      const auto at = static_cast<size_t>(t);
      if (t > 0 && grid.stride[2] == 0) {
        scales_[at] = scales_[0];
        zeros_[at] = zeros_[0];
        continue;
      }
      const Scale scale = scale_at(begin + t, 0);
      scales_[at] = scale.value * step;
      zeros_[at] = scale.zero;
    }
    rows.row_scales = scales_.data();
    rows.row_zeros = zeros != nullptr ? zeros_.data() : nullptr;
    kernels.coded_dots(Prepare(kernels, queries, query_count, width, info.bits, most, true), rows, scores, stride);
    return true;
  }
  const int64_t block = one_scale ? width : grid.div[3], per_lane = CodesPerLane(info.bits);
  if (block % per_lane != 0 && !one_scale) {
    return ByChannel(kernels, payload, head, begin, end, queries, query_count, rows, step, most, scores, stride);
  }
  const int64_t lanes = LanesOf(info.bits, width);
  scales_.assign(static_cast<size_t>(rows.rows * lanes), 0.0f);
  if (zeros != nullptr) zeros_.assign(scales_.size(), 0);
  for (int64_t t = 0; t < rows.rows; ++t) {
    for (int64_t d = 0; d < width; d += block) {
      const Scale scale = scale_at(begin + t, d);
      const auto first = static_cast<size_t>(t * lanes + d / per_lane);
      const auto last = static_cast<size_t>(t * lanes + (std::min(d + block, width) + per_lane - 1) / per_lane);
      std::fill(scales_.begin() + static_cast<int64_t>(first), scales_.begin() + static_cast<int64_t>(last), scale.value * step);
      if (zeros != nullptr) std::fill(zeros_.begin() + static_cast<int64_t>(first), zeros_.begin() + static_cast<int64_t>(last), scale.zero);
    }
  }
  rows.lane_scales = scales_.data();
  rows.lane_zeros = zeros != nullptr ? zeros_.data() : nullptr;
  kernels.coded_dots(Prepare(kernels, queries, query_count, width, info.bits, most, true), rows, scores, stride);
  return true;
}

// One scale per channel over a block of tokens: the scales go into the query.
bool CodedKeys::ByChannel(const AttentionKernels& kernels, const Payload& payload, int64_t head, int64_t begin, int64_t end,
                          const float* queries, int64_t query_count, CodedRows rows, float step, int32_t most, float* scores,
                          int64_t stride) {
  const Grid& grid = payload.grid;
  const TypeInfo& info = Info(payload.spec.type);
  const int64_t width = payload.shape.width, tokens = grid.stride[2] == 0 ? payload.shape.tokens : grid.div[2];
  const int64_t largest = rows.table != nullptr ? CodingOf(info.type).most : int64_t{1} << info.bits;
  if (payload.has_zeros || tokens < 8 || grid.div[3] != 1 || width * largest > INT32_MAX / kLeastMost) return false;
  most = static_cast<int32_t>(std::min<int64_t>(most, INT32_MAX / (width * largest)));
  const Codec codec = MakeCodec(payload.spec);
  query_.resize(static_cast<size_t>(query_count * width));
  for (int64_t from = begin; from < end;) {
    const int64_t to = std::min(end, (from / tokens + 1) * tokens);
    scales_.resize(static_cast<size_t>(width));
    for (int64_t d = 0; d < width; ++d) {
      scales_[static_cast<size_t>(d)] =
          LoadScaleAt(codec, payload.scales.data(), nullptr, payload.global, grid.Index(0, head, from, d)).value;
    }
    for (int64_t q = 0; q < query_count; ++q) {
      for (int64_t d = 0; d < width; ++d) {
        query_[static_cast<size_t>(q * width + d)] = queries[q * width + d] * scales_[static_cast<size_t>(d)];
      }
    }
    CodedRows part = rows;
    part.codes += (from - begin) * rows.row_bytes;
    part.rows = to - from;
    zeros_.clear();
    scales_.assign(static_cast<size_t>(part.rows + 8), step);
    part.row_scales = scales_.data();
    kernels.coded_dots(Prepare(kernels, query_.data(), query_count, width, info.bits, most, false), part, scores + (from - begin), stride);
    from = to;
  }
  return true;
}

}  // namespace kvpages
