// SPDX-License-Identifier: Apache-2.0
// Attention's loops for every vector target from one source. Vectors hold 8 floats at most, so that results do not
// depend on how wide a machine's registers are beyond that.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "attention/kernels.h"

// The targets that are backends, and no others.
#ifndef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_AVX3_DL | HWY_AVX3_ZEN4 | HWY_AVX3_SPR)
#endif
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "attention/simd.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "hwy/contrib/math/math-inl.h"

// The baseline that x86-64 compilers start from is no backend, yet Highway compiles it in any case.
#if HWY_TARGET != HWY_SSE2
HWY_BEFORE_NAMESPACE();
namespace kvpages {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

using DF = hn::CappedTag<float, 8>;
using DI = hn::Rebind<int32_t, DF>;
using DS = hn::Repartition<int16_t, DF>;
using DB = hn::Repartition<uint8_t, DF>;
using VF = hn::Vec<DF>;
using VI = hn::Vec<DI>;
using VS = hn::Vec<DS>;

// ---- Floats ----

// Four rows at once, so that a query's vector is loaded once for them.
void Dots(const float* HWY_RESTRICT queries, int64_t query_count, const float* HWY_RESTRICT rows, int64_t row_count,
          int64_t width, float* HWY_RESTRICT scores, int64_t stride) {
  const DF d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const int64_t whole = width / lanes * lanes, rest = width - whole;
  for (int64_t t = 0; t < row_count; t += 4) {
    const float* row[4];
    for (int64_t r = 0; r < 4; ++r) row[r] = rows + std::min(t + r, row_count - 1) * width;
    for (int64_t q = 0; q < query_count; ++q) {
      const float* query = queries + q * width;
      VF sum0 = hn::Zero(d), sum1 = sum0, sum2 = sum0, sum3 = sum0;
      for (int64_t i = 0; i < whole; i += lanes) {
        const VF x = hn::LoadU(d, query + i);
        sum0 = hn::MulAdd(x, hn::LoadU(d, row[0] + i), sum0);
        sum1 = hn::MulAdd(x, hn::LoadU(d, row[1] + i), sum1);
        sum2 = hn::MulAdd(x, hn::LoadU(d, row[2] + i), sum2);
        sum3 = hn::MulAdd(x, hn::LoadU(d, row[3] + i), sum3);
      }
      if (rest > 0) {
        const auto count = static_cast<size_t>(rest);
        const VF x = hn::LoadN(d, query + whole, count);
        sum0 = hn::MulAdd(x, hn::LoadN(d, row[0] + whole, count), sum0);
        sum1 = hn::MulAdd(x, hn::LoadN(d, row[1] + whole, count), sum1);
        sum2 = hn::MulAdd(x, hn::LoadN(d, row[2] + whole, count), sum2);
        sum3 = hn::MulAdd(x, hn::LoadN(d, row[3] + whole, count), sum3);
      }
      float* out = scores + q * stride + t;
      out[0] = hn::ReduceSum(d, sum0);
      if (t + 1 < row_count) out[1] = hn::ReduceSum(d, sum1);
      if (t + 2 < row_count) out[2] = hn::ReduceSum(d, sum2);
      if (t + 3 < row_count) out[3] = hn::ReduceSum(d, sum3);
    }
  }
}

void Mix(const float* HWY_RESTRICT weights, int64_t query_count, int64_t stride, const float* HWY_RESTRICT rows, int64_t row_count,
         int64_t width, float* HWY_RESTRICT sums) {
  const DF d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const int64_t whole = width / lanes * lanes;
  for (int64_t q = 0; q < query_count; ++q) {
    const float* weight = weights + q * stride;
    float* sum = sums + q * width;
    int64_t i = 0;
    for (; i + 4 * lanes <= whole; i += 4 * lanes) {
      VF s0 = hn::LoadU(d, sum + i), s1 = hn::LoadU(d, sum + i + lanes), s2 = hn::LoadU(d, sum + i + 2 * lanes),
         s3 = hn::LoadU(d, sum + i + 3 * lanes);
      for (int64_t t = 0; t < row_count; ++t) {
        const VF w = hn::Set(d, weight[t]);
        const float* row = rows + t * width + i;
        s0 = hn::MulAdd(w, hn::LoadU(d, row), s0);
        s1 = hn::MulAdd(w, hn::LoadU(d, row + lanes), s1);
        s2 = hn::MulAdd(w, hn::LoadU(d, row + 2 * lanes), s2);
        s3 = hn::MulAdd(w, hn::LoadU(d, row + 3 * lanes), s3);
      }
      hn::StoreU(s0, d, sum + i);
      hn::StoreU(s1, d, sum + i + lanes);
      hn::StoreU(s2, d, sum + i + 2 * lanes);
      hn::StoreU(s3, d, sum + i + 3 * lanes);
    }
    for (; i < width; i += lanes) {
      const auto count = static_cast<size_t>(std::min(lanes, width - i));
      VF s = hn::LoadN(d, sum + i, count);
      for (int64_t t = 0; t < row_count; ++t) s = hn::MulAdd(hn::Set(d, weight[t]), hn::LoadN(d, rows + t * width + i, count), s);
      hn::StoreN(s, d, sum + i, count);
    }
  }
}

float Largest(const float* HWY_RESTRICT scores, int64_t count) {
  const DF d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  float largest = -std::numeric_limits<float>::infinity();
  VF most = hn::Set(d, largest), check = hn::Zero(d);
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    const VF x = hn::LoadU(d, scores + i);
    most = hn::Max(most, x);
    check = hn::Add(check, x);  // NaN once one was; also of infinities of both signs, which are looked at again
  }
  for (; i < count; ++i) {
    if (scores[i] != scores[i]) return scores[i];
    largest = std::max(largest, scores[i]);
  }
  if (!hn::AllFalse(d, hn::IsNaN(check))) {
    for (i = 0; i < count; ++i) {
      if (scores[i] != scores[i]) return scores[i];
    }
  }
  return std::max(largest, hn::ReduceMax(d, most));
}

float Exponentials(float* HWY_RESTRICT scores, int64_t count, float most) {
  const DF d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  // exp(-104) is below the least subnormal number; the polynomial does not take -infinity.
  const VF low = hn::Set(d, -104.0f), shift = hn::Set(d, most);
  VF sum = hn::Zero(d);
  for (int64_t i = 0; i < count; i += lanes) {
    const auto left = static_cast<size_t>(std::min(lanes, count - i));
    const VF x = hn::Sub(hn::LoadN(d, scores + i, left), shift);
    const VF e = hn::IfThenElse(hn::IsNaN(x), x, hn::IfThenElseZero(hn::Gt(x, low), hn::Exp(d, hn::Max(x, low))));
    hn::StoreN(e, d, scores + i, left);
    sum = hn::Add(sum, hn::IfThenElseZero(hn::FirstN(d, left), e));
  }
  return hn::ReduceSum(d, sum);
}

void Multiply(float* values, int64_t count, float factor) {
  const DF d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  for (int64_t i = 0; i < count; i += lanes) {
    const auto left = static_cast<size_t>(std::min(lanes, count - i));
    hn::StoreN(hn::Mul(hn::LoadN(d, values + i, left), hn::Set(d, factor)), d, values + i, left);
  }
}

// ---- Codes ----
// A vector of N 16-bit words holds 4 N codes of 4 bits, or 2 N of 8 bits: part p of word w is code (16 / bits) * w + p.
// A query is stored in that order, group by group: [group][part][word].

// Products of unsigned bytes with signed ones, which x86 has: 4-bit codes meet the high and the low bytes of a query's integers.
// Vectors as wide as there are: a sum of integers does not depend on its order.
constexpr bool kByteProducts = HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3;
using DWide = hn::ScalableTag<uint8_t>;
// Groups of such codes, a vector of bytes each, that a row of `width` fills.
int64_t ByteGroups(int64_t width) {
  const auto codes = 2 * static_cast<int64_t>(hn::Lanes(DWide()));
  return (width + codes - 1) / codes;
}

// [query][group][high even, low even, high odd, low odd][byte]: byte j of a group of codes holds codes 2 j and 2 j + 1.
void PrepareBytes(PreparedQueries& out, int64_t query, int64_t i, int32_t value) {
  const auto size = static_cast<int64_t>(hn::Lanes(DWide()));
  const int64_t groups = ByteGroups(out.width), group = i / (2 * size), byte = i % (2 * size) / 2;
  int8_t* at = out.bytes.data() + (query * groups + group) * 4 * size + i % 2 * 2 * size + byte;
  const int32_t high = (value + 128) >> 8;
  at[0] = static_cast<int8_t>(high);
  at[size] = static_cast<int8_t>(value - 256 * high);
}

void Prepare(const float* HWY_RESTRICT queries, int64_t query_count, int64_t width, PreparedQueries& out) {
  const DS ds;
  const auto words = static_cast<int64_t>(hn::Lanes(ds));
  const int64_t parts = 16 / out.bits, per_group = words * parts, per_lane = 2 * parts;
  const int64_t groups = (width + per_group - 1) / per_group, lanes = groups * words / 2;
  out.count = query_count;
  out.width = width;
  out.values.assign(static_cast<size_t>(query_count * groups * per_group), 0);
  out.lane_sums.assign(static_cast<size_t>(query_count * lanes), 0);
  const auto wide = static_cast<int64_t>(hn::Lanes(DWide()));
  const bool in_bytes = kByteProducts && out.bits == 4;
  out.bytes.assign(in_bytes ? static_cast<size_t>(query_count * ByteGroups(width) * 4 * wide) : 0, 0);
  out.sums.assign(static_cast<size_t>(query_count), 0);
  out.steps.assign(static_cast<size_t>(query_count), 0.0f);
  for (int64_t q = 0; q < query_count; ++q) {
    const float* query = queries + q * width;
    float largest = 0;
    for (int64_t i = 0; i < width; ++i) largest = std::max(largest, std::fabs(query[i]));
    if (largest == 0) continue;
    const float inverse = static_cast<float>(out.most) / largest;
    out.steps[static_cast<size_t>(q)] = largest / static_cast<float>(out.most);
    int16_t* values = out.values.data() + q * groups * per_group;
    int32_t* lane_sums = out.lane_sums.data() + q * lanes;
    int32_t sum = 0;
    for (int64_t i = 0; i < width; ++i) {
      const float scaled = query[i] * inverse;
      const int32_t value = std::clamp(static_cast<int32_t>(std::lrint(scaled)), -out.most, out.most);
      const int64_t group = i / per_group, word = i % per_group / parts, part = i % parts;
      values[(group * parts + part) * words + word] = static_cast<int16_t>(value);
      if (in_bytes) PrepareBytes(out, q, i, value);
      lane_sums[i / per_lane] += value;
      sum += value;
    }
    out.sums[static_cast<size_t>(q)] = sum;
  }
}

// The codes of one group of a row as 16-bit numbers, in kParts vectors.
template <int kBits, bool kTable, bool kSigned>
HWY_INLINE void Parts(const uint8_t* HWY_RESTRICT codes, hn::Vec<DB> low_table, hn::Vec<DB> high_table, VS* part) {
  const DS ds;
  const DB db;
  const hn::RebindToUnsigned<DS> du;
  if constexpr (kBits == 8) {
    if constexpr (kSigned) {
      const VS word = hn::BitCast(ds, hn::LoadU(db, codes));
      part[0] = hn::ShiftRight<8>(hn::ShiftLeft<8>(word));
      part[1] = hn::ShiftRight<8>(word);
    } else {
      const auto word = hn::BitCast(du, hn::LoadU(db, codes));
      part[0] = hn::BitCast(ds, hn::And(word, hn::Set(du, uint16_t{0xff})));
      part[1] = hn::BitCast(ds, hn::ShiftRight<8>(word));
    }
  } else {
    auto word = hn::BitCast(du, hn::LoadU(db, codes));
    if constexpr (kTable) {
      // Bytes of both halves of each value, then put together into 16 bits.
      const auto nibble = hn::Set(du, uint16_t{0x0f0f}), low_byte = hn::Set(du, uint16_t{0xff});
      const auto even = hn::BitCast(db, hn::And(word, nibble)), odd = hn::BitCast(db, hn::And(hn::ShiftRight<4>(word), nibble));
      const auto even_low = hn::BitCast(du, hn::TableLookupBytes(low_table, even)), even_high = hn::BitCast(du, hn::TableLookupBytes(high_table, even));
      const auto odd_low = hn::BitCast(du, hn::TableLookupBytes(low_table, odd)), odd_high = hn::BitCast(du, hn::TableLookupBytes(high_table, odd));
      part[0] = hn::BitCast(ds, hn::Or(hn::And(even_low, low_byte), hn::ShiftLeft<8>(even_high)));
      part[1] = hn::BitCast(ds, hn::Or(hn::And(odd_low, low_byte), hn::ShiftLeft<8>(odd_high)));
      part[2] = hn::BitCast(ds, hn::Or(hn::ShiftRight<8>(even_low), hn::AndNot(low_byte, even_high)));
      part[3] = hn::BitCast(ds, hn::Or(hn::ShiftRight<8>(odd_low), hn::AndNot(low_byte, odd_high)));
    } else {
      if constexpr (kSigned) word = hn::Xor(word, hn::Set(du, uint16_t{0x8888}));  // code + 8
      const auto nibble = hn::Set(du, uint16_t{15});
      part[0] = hn::BitCast(ds, hn::And(word, nibble));
      part[1] = hn::BitCast(ds, hn::And(hn::ShiftRight<4>(word), nibble));
      part[2] = hn::BitCast(ds, hn::And(hn::ShiftRight<8>(word), nibble));
      part[3] = hn::BitCast(ds, hn::ShiftRight<12>(word));
    }
  }
}

// Products of one group with the query, added up per lane.
template <int kParts>
HWY_INLINE VI PartProducts(const VS* part, const int16_t* HWY_RESTRICT query) {
  const DS ds;
  const DI di;
  const auto words = static_cast<int64_t>(hn::Lanes(ds));
  const auto product = [&](int p) HWY_ATTR { return hn::WidenMulPairwiseAdd(di, part[p], hn::LoadU(ds, query + p * words)); };
  if constexpr (kParts == 2) return hn::Add(product(0), product(1));
  else return hn::Add(hn::Add(product(0), product(1)), hn::Add(product(2), product(3)));
}

// Sums of the lanes of four vectors: [sum a, sum b, sum c, sum d] in the lowest four lanes.
template <class D, class V = hn::Vec<D>>
HWY_INLINE hn::Vec<hn::CappedTag<hn::TFromD<D>, 4>> SumsOfFour(D d, V a, V b, V c, V e) {
  const hn::CappedTag<hn::TFromD<D>, 4> d4;
  const hn::Repartition<uint64_t, D> d64;
  const V ab = hn::Add(hn::InterleaveLower(d, a, b), hn::InterleaveUpper(d, a, b));  // a b a b in each 16 bytes
  const V ce = hn::Add(hn::InterleaveLower(d, c, e), hn::InterleaveUpper(d, c, e));
  const V sum = hn::Add(hn::BitCast(d, hn::InterleaveLower(d64, hn::BitCast(d64, ab), hn::BitCast(d64, ce))),
                        hn::BitCast(d, hn::InterleaveUpper(d64, hn::BitCast(d64, ab), hn::BitCast(d64, ce))));
  if constexpr (HWY_MAX_LANES_D(D) > 4) {
    return hn::Add(hn::LowerHalf(d4, sum), hn::UpperHalf(d4, sum));
  } else {
    return sum;
  }
}

// Sums of 4-bit codes (signed ones as code + 8) times the query, of four rows that are `row_bytes` apart.
template <bool kSigned>
HWY_INLINE hn::Vec<hn::CappedTag<int32_t, 4>> ByteSums(const uint8_t* HWY_RESTRICT row, int64_t row_bytes, const int8_t* HWY_RESTRICT query, int64_t groups) {
  const DWide d8;
  const hn::RebindToSigned<DWide> s8;
  const hn::Repartition<int16_t, DWide> d16;
  const hn::Repartition<int32_t, DWide> d32;
  const auto size = static_cast<int64_t>(hn::Lanes(d8));
  const auto nibble = hn::Set(d8, uint8_t{15});
  hn::Vec<decltype(d32)> sum[4];
  for (int r = 0; r < 4; ++r) sum[r] = hn::Zero(d32);
  for (int64_t g = 0; g < groups; ++g) {
    const int8_t* at = query + g * 4 * size;
    const auto high_even = hn::LoadU(s8, at), low_even = hn::LoadU(s8, at + size), high_odd = hn::LoadU(s8, at + 2 * size), low_odd = hn::LoadU(s8, at + 3 * size);
    HWY_UNROLL(4)
    for (int r = 0; r < 4; ++r) {
      auto bytes = hn::LoadU(d8, row + r * row_bytes + g * size);
      if constexpr (kSigned) bytes = hn::Xor(bytes, hn::Set(d8, uint8_t{0x88}));
      const auto even = hn::And(bytes, nibble);
      const auto odd = hn::And(hn::BitCast(d8, hn::ShiftRight<4>(hn::BitCast(hn::RebindToUnsigned<decltype(d16)>(), bytes))), nibble);
      // Pairs stay below 2 * 15 * 128, so that two of them fit 16 bits.
      const auto high = hn::Add(hn::SatWidenMulPairwiseAdd(d16, even, high_even), hn::SatWidenMulPairwiseAdd(d16, odd, high_odd));
      const auto low = hn::Add(hn::SatWidenMulPairwiseAdd(d16, even, low_even), hn::SatWidenMulPairwiseAdd(d16, odd, low_odd));
      sum[r] = hn::Add(sum[r], hn::Add(hn::WidenMulPairwiseAdd(d32, high, hn::Set(d16, int16_t{256})),
                                       hn::WidenMulPairwiseAdd(d32, low, hn::Set(d16, int16_t{1}))));
    }
  }
  if constexpr (HWY_MAX_LANES_D(decltype(d32)) > 8) {
    const hn::Half<decltype(d32)> half;
    const auto folded = [&](int r) HWY_ATTR { return hn::Add(hn::LowerHalf(half, sum[r]), hn::UpperHalf(half, sum[r])); };
    return SumsOfFour(half, folded(0), folded(1), folded(2), folded(3));
  } else {
    return SumsOfFour(d32, sum[0], sum[1], sum[2], sum[3]);
  }
}

// CodedDots of 4-bit integers with a scale for each row.
template <bool kSigned>
void ByteDots(const PreparedQueries& queries, const CodedRows& rows, float* HWY_RESTRICT scores, int64_t stride) {
  const hn::CappedTag<float, 4> f4;
  const hn::CappedTag<int32_t, 4> i4;
  const auto wide = static_cast<int64_t>(hn::Lanes(DWide()));
  const int64_t groups = ByteGroups(queries.width), row_bytes = rows.row_bytes, whole = rows.rows / 4 * 4;
  const float* const scales = rows.row_scales;
  const int32_t* const zeros = rows.row_zeros;
  for (int64_t q = 0; q < queries.count; ++q) {
    const int8_t* query = queries.bytes.data() + q * groups * 4 * wide;
    const auto query_sum = hn::Set(i4, queries.sums[static_cast<size_t>(q)]);
    const auto offset = hn::Mul(query_sum, hn::Set(i4, kSigned ? 8 : 0));
    const auto step = hn::Set(f4, queries.steps[static_cast<size_t>(q)]);
    const auto four = [&](const uint8_t* row, int64_t apart, int64_t t) HWY_ATTR {
      auto total = hn::Sub(groups == 1 ? ByteSums<kSigned>(row, apart, query, 1) : ByteSums<kSigned>(row, apart, query, groups), offset);
      if (zeros != nullptr) total = hn::Sub(total, hn::Mul(hn::LoadU(i4, zeros + t), query_sum));
      return hn::Mul(hn::ConvertTo(f4, total), hn::Mul(hn::LoadU(f4, scales + t), step));
    };
    const uint8_t* row = rows.codes;
    float* out = scores + q * stride;
    for (int64_t t = 0; t < whole; t += 4, row += 4 * row_bytes) hn::StoreU(four(row, row_bytes, t), f4, out + t);
    // The rest, one row four times.
    for (int64_t t = whole; t < rows.rows; ++t, row += row_bytes) out[t] = hn::GetLane(four(row, 0, t));
  }
}

template <int kBits, bool kTable, bool kSigned>
void CodedDotsOf(const PreparedQueries& queries, const CodedRows& rows, float* HWY_RESTRICT scores, int64_t stride) {
  const DS ds;
  const DI di;
  const DF df;
  const DB db;
  const hn::CappedTag<float, 4> f4;
  const hn::CappedTag<int32_t, 4> i4;
  const auto words = static_cast<int64_t>(hn::Lanes(ds));
  constexpr int64_t kParts = 16 / kBits;
  const int64_t per_group = words * kParts, groups = (queries.width + per_group - 1) / per_group, lanes = words / 2;
  const int64_t row_lanes = LanesOf(kBits, queries.width);
  constexpr int32_t kOffset = kBits == 4 && kSigned && !kTable ? 8 : 0;
  // Values from a table are found once for all queries.
  constexpr int64_t kKept = 4 * 1024;
  alignas(64) int16_t kept[kTable ? kKept : 1];
  const bool keeps = kTable && queries.count > 1 && 4 * groups * per_group <= kKept;
  uint8_t low[16] = {}, high[16] = {};
  for (int i = 0; kTable && i < 16; ++i) {
    low[i] = static_cast<uint8_t>(rows.table[i] & 0xff);
    high[i] = static_cast<uint8_t>(rows.table[i] >> 8 & 0xff);
  }
  const auto low_table = hn::LoadDup128(db, low), high_table = hn::LoadDup128(db, high);
  const int64_t group_bytes = words * 2;
  for (int64_t t = 0; t < rows.rows; t += 4) {
    const int64_t count = std::min<int64_t>(4, rows.rows - t);
    const uint8_t* row[4];
    int64_t at[4];
    for (int64_t r = 0; r < 4; ++r) {
      at[r] = t + std::min(r, count - 1);
      row[r] = rows.codes + at[r] * rows.row_bytes;
    }
    for (int64_t r = 0; keeps && r < 4; ++r) {
      for (int64_t g = 0; g < groups; ++g) {
        VS part[kParts];
        Parts<kBits, kTable, kSigned>(row[r] + g * group_bytes, low_table, high_table, part);
        for (int64_t p = 0; p < kParts; ++p) hn::Store(part[p], ds, kept + ((r * groups + g) * kParts + p) * words);
      }
    }
    const auto products = [&](int64_t r, int64_t g, const int16_t* query) HWY_ATTR {
      VS part[kParts];
      if (keeps) {
        for (int64_t p = 0; p < kParts; ++p) part[p] = hn::Load(ds, kept + ((r * groups + g) * kParts + p) * words);
      } else {
        Parts<kBits, kTable, kSigned>(row[r] + g * group_bytes, low_table, high_table, part);
      }
      return PartProducts<static_cast<int>(kParts)>(part, query + g * per_group);
    };
    for (int64_t q = 0; q < queries.count; ++q) {
      const int16_t* query = queries.values.data() + q * groups * per_group;
      float* out = scores + q * stride + t;
      if (rows.row_scales != nullptr) {
        VI sum[4];
        for (int r = 0; r < 4; ++r) sum[r] = products(r, 0, query);
        for (int64_t g = 1; g < groups; ++g) {
          for (int r = 0; r < 4; ++r) sum[r] = hn::Add(sum[r], products(r, g, query));
        }
        auto total = SumsOfFour(di, sum[0], sum[1], sum[2], sum[3]);
        auto offset = hn::Set(i4, kOffset);
        if (rows.row_zeros != nullptr) offset = hn::Add(offset, hn::LoadU(i4, rows.row_zeros + t));
        if (kOffset != 0 || rows.row_zeros != nullptr) {
          total = hn::Sub(total, hn::Mul(offset, hn::Set(i4, queries.sums[static_cast<size_t>(q)])));
        }
        const auto scale = hn::Mul(hn::LoadU(f4, rows.row_scales + t), hn::Set(f4, queries.steps[static_cast<size_t>(q)]));
        hn::StoreN(hn::Mul(hn::ConvertTo(f4, total), scale), f4, out, static_cast<size_t>(count));
        continue;
      }
      const int32_t* lane_sums = queries.lane_sums.data() + q * groups * lanes;
      VF sum[4] = {hn::Zero(df), hn::Zero(df), hn::Zero(df), hn::Zero(df)};
      for (int64_t g = 0; g < groups; ++g) {
        const VI query_sum = hn::LoadU(di, lane_sums + g * lanes);
        for (int r = 0; r < 4; ++r) {
          VI lane = products(r, g, query);
          if (kOffset != 0) lane = hn::Sub(lane, hn::ShiftLeft<3>(query_sum));
          const int64_t first = at[r] * row_lanes + g * lanes;
          if (rows.lane_zeros != nullptr) lane = hn::Sub(lane, hn::Mul(hn::LoadU(di, rows.lane_zeros + first), query_sum));
          sum[r] = hn::MulAdd(hn::ConvertTo(df, lane), hn::LoadU(df, rows.lane_scales + first), sum[r]);
        }
      }
      const auto total = SumsOfFour(df, sum[0], sum[1], sum[2], sum[3]);
      hn::StoreN(hn::Mul(total, hn::Set(f4, queries.steps[static_cast<size_t>(q)])), f4, out, static_cast<size_t>(count));
    }
  }
}

void CodedDots(const PreparedQueries& queries, const CodedRows& rows, float* scores, int64_t stride) {
  if (queries.bits == 8) return (rows.is_signed ? CodedDotsOf<8, false, true> : CodedDotsOf<8, false, false>)(queries, rows, scores, stride);
  if (rows.table != nullptr) return CodedDotsOf<4, true, false>(queries, rows, scores, stride);
  if constexpr (kByteProducts) {
    if (rows.row_scales != nullptr) return (rows.is_signed ? ByteDots<true> : ByteDots<false>)(queries, rows, scores, stride);
  }
  return (rows.is_signed ? CodedDotsOf<4, false, true> : CodedDotsOf<4, false, false>)(queries, rows, scores, stride);
}

constexpr AttentionKernels TableOf(const char* name) {
  return {name, Dots, Mix, Largest, Exponentials, Multiply, Prepare, CodedDots};
}

}  // namespace

extern const AttentionKernels kTable;
const AttentionKernels kTable = TableOf(
    HWY_TARGET == HWY_SSE4   ? "sse4"
    : HWY_TARGET == HWY_AVX2 ? "avx2"
    : HWY_TARGET == HWY_AVX3 ? "avx512"
    : HWY_TARGET == HWY_WASM ? "wasm128"
                             : "neon");

}  // namespace HWY_NAMESPACE
}  // namespace kvpages
HWY_AFTER_NAMESPACE();
#endif

#if HWY_ONCE
namespace kvpages {

const std::vector<const AttentionKernels*>& SimdAttention() {
  static const auto& tables = *new std::vector<const AttentionKernels*>{
#define KVP_X(target) &target::kTable,
#if HWY_TARGETS & HWY_SSE4
      KVP_X(N_SSE4)
#endif
#if HWY_TARGETS & HWY_AVX2
      KVP_X(N_AVX2)
#endif
#if HWY_TARGETS & HWY_AVX3
      KVP_X(N_AVX3)
#endif
#if HWY_TARGETS & HWY_NEON
      KVP_X(N_NEON)
#endif
#if HWY_TARGETS & HWY_WASM
      KVP_X(N_WASM)
#endif
#undef KVP_X
  };
  return tables;
}

}  // namespace kvpages
#endif  // HWY_ONCE
