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

// Worth of every scale byte at g = 1.
const float* ByteScales(ScaleType type, bool e8m0_zero) {
  static const auto& all = *[] {
    auto* tables = new std::vector<float>();
    for (int kind = 0; kind < 3; ++kind) {
      for (int byte = 0; byte < 256; ++byte) {
        const auto code = static_cast<uint8_t>(byte);
        tables->push_back(LoadScale(kind == 0 ? ScaleType::kE4M3 : ScaleType::kE8M0, &code, 0, 1.0f, kind == 2));
      }
    }
    return tables;
  }();
  return all.data() + (type == ScaleType::kE4M3 ? 0 : e8m0_zero ? 512 : 256);
}

// Table values stay below 2^14: a lane adds 8 products with integers of 14 bits.
constexpr float kFineMost = 16383.0f;
// The largest integer that is 256 times a signed byte plus another.
constexpr int32_t kInBytes = 127 * 256 + 127;
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

// Repeats each block's value for every lane of the block; lanes past the row get 0.
template <int kLanes, typename T>
void SpreadOf(const T* values, int64_t rows, int64_t blocks, int64_t lanes_per_block, int64_t lanes, T* out) {
  const int64_t repeat = kLanes > 0 ? kLanes : lanes_per_block;
  for (int64_t t = 0; t < rows; ++t) {
    T* row = out + t * lanes;
    for (int64_t j = 0; j < blocks; ++j, ++values) {
      // The last block may be short: its lanes past the padding are left out.
      const int64_t count = kLanes > 0 ? kLanes : std::min(repeat, lanes - j * repeat);
      for (int64_t k = 0; k < count; ++k) row[j * repeat + k] = *values;
    }
    for (int64_t k = std::min(blocks * repeat, lanes); k < lanes; ++k) row[k] = 0;
  }
}
template <typename T>
void Spread(const T* values, int64_t rows, int64_t blocks, int64_t lanes_per_block, int64_t lanes, std::vector<T>& out) {
  out.resize(static_cast<size_t>(rows * lanes));
  const bool whole = blocks * lanes_per_block <= lanes;
  if (whole && lanes_per_block == 2) return SpreadOf<2>(values, rows, blocks, lanes_per_block, lanes, out.data());
  if (whole && lanes_per_block == 4) return SpreadOf<4>(values, rows, blocks, lanes_per_block, lanes, out.data());
  if (whole && lanes_per_block == 8) return SpreadOf<8>(values, rows, blocks, lanes_per_block, lanes, out.data());
  SpreadOf<0>(values, rows, blocks, lanes_per_block, lanes, out.data());
}

}  // namespace

void FetchAhead(const Payload* soon, const Payload* later) {
#if defined(__GNUC__) && !defined(__wasm__)
  constexpr uint64_t kLine = 64;
  if (later != nullptr) {
    // As far as it is read here.
    const auto used = static_cast<uint64_t>(reinterpret_cast<const uint8_t*>(&later->affine) - reinterpret_cast<const uint8_t*>(later));
    for (uint64_t at = 0; at < used; at += kLine) __builtin_prefetch(reinterpret_cast<const uint8_t*>(later) + at);
  }
  if (soon == nullptr) return;
  // More than a few kB would push out what is in use; the processor sees a longer run by itself.
  for (const Bytes* block : {&soon->codes, &soon->scales, &soon->zeros, &soon->data}) {
    for (uint64_t at = 0; at < std::min<uint64_t>(block->size(), 2048); at += kLine) __builtin_prefetch(block->data() + at);
  }
#else
  (void)soon;
  (void)later;
#endif
}

const PreparedQueries& CodedKeys::Prepare(const AttentionKernels& kernels, const float* queries, int64_t count) {
  for (const Known& known : prepared_) {
    if (known.queries == queries && known.prepared.bits == plan_.bits && known.prepared.most == plan_.most) return known.prepared;
  }
  prepared_.push_back({queries, {}});
  PreparedQueries& prepared = prepared_.back().prepared;
  prepared.bits = plan_.bits;
  prepared.most = plan_.most;
  kernels.prepare(queries, count, plan_.shape.width, prepared);
  return prepared;
}

bool CodedKeys::Plan::Fits(const Payload& payload) const {
  return shape == payload.shape && spec == payload.spec && has_zeros == payload.has_zeros && grid.count == payload.grid.count &&
         std::equal(grid.div, grid.div + 4, payload.grid.div) && std::equal(grid.stride, grid.stride + 4, payload.grid.stride);
}

// What all pages of a layer have in common is worked out once.
void CodedKeys::MakePlan(const Payload& payload) {
  plan_ = {};
  plan_.spec = payload.spec;
  plan_.shape = payload.shape;
  plan_.grid = payload.grid;
  plan_.has_zeros = payload.has_zeros;
  const TypeInfo& info = Info(payload.spec.type);
  const Coding& coding = CodingOf(info.type);
  const Grid& grid = payload.grid;
  const int64_t width = payload.shape.width, row_bits = width * info.bits;
  const bool integer = info.family == Family::kInteger && (info.bits == 4 || info.bits == 8);
  const bool kivi = payload.spec.calibration == Calibration::kKivi;  // rounds to f16 after every step
  if (payload.shape.batch != 1 || !(integer || coding.tabled) || row_bits % 8 != 0 || grid.count == 0 || kivi) return;

  plan_.one_scale = grid.stride[3] == 0 || grid.div[3] >= width;
  const int64_t block = plan_.one_scale ? width : grid.div[3], per_lane = CodesPerLane(info.bits);
  // A scale for every channel, or one for less than a lane: a decoded tile is faster.
  if (!plan_.one_scale && block % per_lane != 0) return;
  plan_.blocks = CeilDiv(width, block);
  // Scales of a head lie row after row, blocks side by side; or there is one for all rows.
  plan_.row_by_row = grid.div[2] == 1 && grid.stride[2] == plan_.blocks;
  if (!(plan_.row_by_row || (plan_.one_scale && grid.stride[2] == 0))) return;

  plan_.bits = info.bits;
  plan_.row_bytes = row_bits / 8;
  plan_.is_signed = integer && info.is_signed;
  plan_.table = coding.tabled ? coding.table : nullptr;
  plan_.step = coding.tabled ? coding.step : 1.0f;
  const int32_t largest = coding.tabled ? coding.most : 1 << info.bits;
  plan_.most = largest > 1000 ? static_cast<int32_t>(kLeastMost) : integer && info.bits == 4 ? kInBytes : 32767;
  plan_.by_row = plan_.one_scale && width * largest <= INT32_MAX / kLeastMost;  // a whole row in one 32-bit sum
  if (plan_.by_row) plan_.most = static_cast<int32_t>(std::min<int64_t>(plan_.most, INT32_MAX / (width * largest)));
  const bool stored_f32 = info.family != Family::kScheme && payload.spec.scale_type == ScaleType::kF32;
  plan_.in_place = plan_.by_row && plan_.row_by_row && stored_f32 && plan_.step == 1.0f && !payload.has_zeros;
  plan_.lanes = LanesOf(info.bits, width);
  plan_.lanes_per_block = CeilDiv(block, per_lane);
  plan_.usable = true;
}

bool CodedKeys::Dots(const AttentionKernels& kernels, const Payload& payload, int64_t head, int64_t begin, int64_t end,
                     const float* queries, int64_t query_count, float* scores, int64_t stride) {
  if (!plan_.Fits(payload)) MakePlan(payload);
  if (!plan_.usable) return false;
  CodedRows rows;
  rows.row_bytes = plan_.row_bytes;
  rows.codes = payload.codes.data() + (head * payload.shape.tokens + begin) * rows.row_bytes;
  rows.rows = end - begin;
  rows.is_signed = plan_.is_signed;
  rows.table = plan_.table;
  const uint8_t* zeros = payload.has_zeros ? payload.zeros.data() : nullptr;
  const int64_t first = payload.grid.Index(0, head, begin, 0), count = plan_.row_by_row ? rows.rows * plan_.blocks : 1;
  if (plan_.in_place) {
    rows.row_scales = payload.scales.as<float>() + first;
  } else {
    LoadScales(payload, first, count, plan_.step, zeros);
    if (!plan_.row_by_row) {
      scales_.resize(static_cast<size_t>(rows.rows + 8), scales_[0]);
      if (zeros != nullptr) zeros_.resize(scales_.size(), zeros_[0]);
    }
    if (plan_.by_row) {
      scales_.resize(static_cast<size_t>(rows.rows + 8));
      if (zeros != nullptr) zeros_.resize(scales_.size());
      rows.row_scales = scales_.data();
      rows.row_zeros = zeros != nullptr ? zeros_.data() : nullptr;
    } else {
      Spread(scales_.data(), rows.rows, plan_.blocks, plan_.lanes_per_block, plan_.lanes, lane_scales_);
      rows.lane_scales = lane_scales_.data();
      if (zeros != nullptr) {
        Spread(zeros_.data(), rows.rows, plan_.blocks, plan_.lanes_per_block, plan_.lanes, lane_zeros_);
        rows.lane_zeros = lane_zeros_.data();
      }
    }
  }
  kernels.coded_dots(Prepare(kernels, queries, query_count), rows, scores, stride);
  return true;
}

// Scales [first, first + count) times `step`, and their zero points.
void CodedKeys::LoadScales(const Payload& payload, int64_t first, int64_t count, float step, const uint8_t* zeros) {
  const TypeInfo& info = Info(payload.spec.type);
  const Codec codec = MakeCodec(payload.spec);
  const bool scheme = info.family == Family::kScheme;
  scales_.resize(static_cast<size_t>(count));
  if (scheme || ScaleBytes(payload.spec.scale_type) == 1) {
    const float* worth = scheme ? CodingOf(info.type).scheme_scales.data() : ByteScales(payload.spec.scale_type, codec.e8m0_zero);
    const float factor = (SizesOf(payload.spec, payload.shape).has_global ? payload.global : 1.0f) * step;
    const uint8_t* bytes = payload.scales.data() + first;
    for (int64_t i = 0; i < count; ++i) scales_[static_cast<size_t>(i)] = worth[bytes[i]] * factor;
  } else {
    for (int64_t i = 0; i < count; ++i) {
      scales_[static_cast<size_t>(i)] = LoadScale(codec.scale_type, payload.scales.data(), first + i, 1.0f, false) * step;
    }
  }
  if (zeros == nullptr) return;
  zeros_.resize(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    zeros_[static_cast<size_t>(i)] = LoadScaleAt(codec, payload.scales.data(), zeros, payload.global, first + i).zero;
  }
}

}  // namespace kvpages
