// SPDX-License-Identifier: Apache-2.0
// Vector forms of the element arithmetic in formats/: the same f32 operations in the same order, so the same bits.
#if defined(KVPAGES_BACKENDS_SIMD_CODES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVPAGES_BACKENDS_SIMD_CODES_INL_H_
#undef KVPAGES_BACKENDS_SIMD_CODES_INL_H_
#else
#define KVPAGES_BACKENDS_SIMD_CODES_INL_H_
#endif

#include <cstdint>
#include <cstring>

#include "formats/levels.h"
#include "formats/scales.h"
#include "formats/spec.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace kvpages {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

using DF = hn::ScalableTag<float>;
using DI = hn::RebindToSigned<DF>;
using DU = hn::RebindToUnsigned<DF>;
using DB = hn::Rebind<uint8_t, DF>;   // as many bytes as there are floats
using DH = hn::Rebind<uint16_t, DF>;  // as many halves
using VF = hn::Vec<DF>;
using VI = hn::Vec<DI>;
using VU = hn::Vec<DU>;

constexpr size_t kMaxLanes = HWY_MAX_BYTES / 4;

HWY_INLINE VU Bits(VF x) { return hn::BitCast(DU(), x); }
HWY_INLINE VF Float(VU bits) { return hn::BitCast(DF(), bits); }
HWY_INLINE VU Word(uint32_t value) { return hn::Set(DU(), value); }
HWY_INLINE VF Value(float value) { return hn::Set(DF(), value); }
HWY_INLINE VU Choose(hn::Mask<DU> mask, VU yes, VU no) { return hn::IfThenElse(mask, yes, no); }

// ---- Tables ----
#if HWY_MAX_BYTES == 16

// 16 floats that are looked up 16 at a time, by bytes: for vectors of four floats.
struct Table16 {
  using D8 = hn::Full128<uint8_t>;
  hn::Vec<D8> plane[4];  // byte k of every float
  HWY_INLINE explicit Table16(const float* values) {
    alignas(16) uint8_t bytes[64];
    for (int i = 0; i < 16; ++i) {
      uint32_t bits;
      std::memcpy(&bits, values + i, 4);
      for (int k = 0; k < 4; ++k) bytes[k * 16 + i] = static_cast<uint8_t>(bits >> (8 * k));
    }
    for (int k = 0; k < 4; ++k) plane[k] = hn::Load(D8(), bytes + k * 16);
  }
  // Of 16 codes below 16. kShort: floats that are bfloat16 numbers, whose lower bytes are 0.
  template <bool kShort>
  HWY_INLINE void LookUp(const uint8_t* codes, hn::Vec<hn::Full128<float>>* out) const {
    const D8 d8;
    const hn::Full128<uint16_t> d16;
    const hn::Full128<float> df;
    const auto index = hn::LoadU(d8, codes);
    const auto c = hn::TableLookupBytes(plane[2], index), e = hn::TableLookupBytes(plane[3], index);
    const auto low2 = hn::BitCast(d16, hn::InterleaveLower(d8, c, e)), high2 = hn::BitCast(d16, hn::InterleaveUpper(d8, c, e));
    auto low = hn::Zero(d16), high = low;
    if constexpr (!kShort) {
      const auto a = hn::TableLookupBytes(plane[0], index), b = hn::TableLookupBytes(plane[1], index);
      low = hn::BitCast(d16, hn::InterleaveLower(d8, a, b));
      high = hn::BitCast(d16, hn::InterleaveUpper(d8, a, b));
    }
    out[0] = hn::BitCast(df, hn::InterleaveLower(d16, low, low2));
    out[1] = hn::BitCast(df, hn::InterleaveUpper(d16, low, low2));
    out[2] = hn::BitCast(df, hn::InterleaveLower(d16, high, high2));
    out[3] = hn::BitCast(df, hn::InterleaveUpper(d16, high, high2));
  }
};
#endif

// ---- Ranges ----

// Largest magnitudes of `count` blocks of `block` floats each, that follow each other. `block`: a multiple of 8. Lanes are
// folded for as many blocks at once as there are lanes.
HWY_INLINE void BlockMagnitudes(const float* HWY_RESTRICT x, int64_t count, int64_t block, float* HWY_RESTRICT out) {
  const hn::CappedTag<float, 8> d;
  using V = hn::Vec<decltype(d)>;
  constexpr int64_t kLanes = HWY_LANES(float) > 8 ? 8 : HWY_LANES(float);
  // Magnitudes are in order as integers too, and a mask in a register is cheaper than what some machines do for hn::Abs.
  const hn::RebindToSigned<decltype(d)> di;
  using VInt = hn::Vec<decltype(di)>;
  const auto mask = hn::Set(di, 0x7fffffff);
  const auto at = [=](const float* from) HWY_ATTR { return hn::And(hn::BitCast(di, hn::LoadU(d, from)), mask); };
  const auto of_block = [&](int64_t b) HWY_ATTR {
    const float *from = x + b * block, *const end = from + block;
    VInt most = hn::Zero(di), other = most;
    for (; from + 4 * kLanes <= end; from += 4 * kLanes) {
      most = hn::Max(most, hn::Max(at(from), at(from + kLanes)));
      other = hn::Max(other, hn::Max(at(from + 2 * kLanes), at(from + 3 * kLanes)));
    }
    for (; from < end; from += kLanes) most = hn::Max(most, at(from));
    return hn::BitCast(d, hn::Max(most, other));
  };
  const auto fold = [&](V a, V b) HWY_ATTR { return hn::Max(hn::InterleaveLower(d, a, b), hn::InterleaveUpper(d, a, b)); };
  const hn::Repartition<uint64_t, decltype(d)> d64;
  // Of four blocks, in each 16 bytes.
  const auto fold_four = [&](const V* v) HWY_ATTR {
    const auto ab = hn::BitCast(d64, fold(v[0], v[1])), ce = hn::BitCast(d64, fold(v[2], v[3]));
    return hn::Max(hn::BitCast(d, hn::InterleaveLower(d64, ab, ce)), hn::BitCast(d, hn::InterleaveUpper(d64, ab, ce)));
  };
  int64_t b = 0;
  for (; b + kLanes <= count; b += kLanes) {
    V v[kLanes];
    for (int64_t k = 0; k < kLanes; ++k) v[k] = of_block(b + k);
    if constexpr (kLanes == 8) {
      const V low = fold_four(v), high = fold_four(v + 4);
      hn::StoreU(hn::Max(hn::ConcatLowerLower(d, high, low), hn::ConcatUpperUpper(d, high, low)), d, out + b);
    } else {
      hn::StoreU(fold_four(v), d, out + b);
    }
  }
  for (; b < count; ++b) out[b] = hn::ReduceMax(d, of_block(b));
}

// The largest sum of squares of `count` blocks of `block` floats that follow each other, each by the halving tree of
// formats/search.h. `block`: a power of two, 16 to 512.
HWY_INLINE float LargestSquareSum(const float* HWY_RESTRICT x, int64_t count, int64_t block) {
  const hn::CappedTag<float, 8> d;
  using V = hn::Vec<decltype(d)>;
  constexpr int64_t kLanes = HWY_LANES(float) > 8 ? 8 : HWY_LANES(float);
  const auto square = [&](const float* from) HWY_ATTR {
    const V v = hn::LoadU(d, from);
    return hn::Mul(v, v);
  };
  // The tree down to the last vector.
  const auto of_block = [&](int64_t b) HWY_ATTR {
    const float* from = x + b * block;
    V sums[512 / kLanes / 2];
    int64_t half = block / 2 / kLanes;
    for (int64_t i = 0; i < half; ++i) sums[i] = hn::Add(square(from + i * kLanes), square(from + (i + half) * kLanes));
    for (half /= 2; half >= 1; half /= 2) {
      for (int64_t i = 0; i < half; ++i) sums[i] = hn::Add(sums[i], sums[i + half]);
    }
    return sums[0];
  };
  const hn::Repartition<double, decltype(d)> d64;
  const auto pairs = [&](V a, V b) HWY_ATTR {
    const auto low = hn::BitCast(d64, a), high = hn::BitCast(d64, b);
    return hn::Add(hn::BitCast(d, hn::InterleaveLower(d64, low, high)), hn::BitCast(d, hn::InterleaveUpper(d64, low, high)));
  };
  // The sums of 16 bytes each, in any order.
  const auto fold = [&](V a, V b, V c, V e) HWY_ATTR {
    const V ab = pairs(a, b), ce = pairs(c, e);
    return hn::Add(hn::ConcatEven(d, ce, ab), hn::ConcatOdd(d, ce, ab));
  };
  V most = hn::Zero(d);
  int64_t b = 0;
  for (; b + kLanes <= count; b += kLanes) {
    V v[kLanes];
    for (int64_t i = 0; i < kLanes; ++i) v[i] = of_block(b + i);
    if constexpr (kLanes == 8) {
      const auto halves = [&](int i) HWY_ATTR { return hn::Add(hn::ConcatLowerLower(d, v[i + 1], v[i]), hn::ConcatUpperUpper(d, v[i + 1], v[i])); };
      most = hn::Max(most, fold(halves(0), halves(2), halves(4), halves(6)));
    } else {
      most = hn::Max(most, fold(v[0], v[1], v[2], v[3]));
    }
  }
  float largest = hn::ReduceMax(d, most);
  for (; b < count; ++b) {
    alignas(32) float rest[kLanes];
    hn::Store(of_block(b), d, rest);
    for (int64_t half = kLanes / 2; half >= 1; half /= 2) {
      for (int64_t i = 0; i < half; ++i) rest[i] = rest[i] + rest[i + half];
    }
    largest = rest[0] > largest ? rest[0] : largest;
  }
  return largest;
}

// ---- Dense types: core/float.h ----

HWY_INLINE VF WidenBF16(VU half) { return Float(hn::ShiftLeft<16>(half)); }
HWY_INLINE VF WidenF16(VU half) {
  const VU sign = hn::ShiftLeft<16>(hn::And(half, Word(0x8000))), magnitude = hn::And(half, Word(0x7fff));
  const VU shifted = hn::ShiftLeft<13>(magnitude);
  const VU normal = hn::Add(shifted, Word(112u << 23));
  const VU small = Bits(hn::Mul(hn::ConvertTo(DF(), hn::BitCast(DI(), magnitude)), Float(Word(0x33800000))));
  const VU payload = hn::And(shifted, Word(0x7fffff));
  const VU special = hn::Or(Word(0x7f800000), Choose(hn::Eq(payload, hn::Zero(DU())), payload, hn::Or(payload, Word(0x400000))));
  const VU value = Choose(hn::Lt(magnitude, Word(0x400)), small, Choose(hn::Lt(magnitude, Word(0x7c00)), normal, special));
  return Float(hn::Or(value, sign));
}
HWY_INLINE VU NarrowBF16(VF x) {
  const VU bits = Bits(x);
  const VU rounded = hn::ShiftRight<16>(hn::Add(bits, hn::Add(Word(0x7fff), hn::And(hn::ShiftRight<16>(bits), Word(1)))));
  const VU nan = hn::Or(hn::And(hn::ShiftRight<16>(bits), Word(0x8000)), Word(0x7fc0));
  return Choose(hn::Gt(hn::And(bits, Word(0x7fffffff)), Word(0x7f800000)), nan, rounded);
}
HWY_INLINE VU NarrowF16(VF x) {
  const VU bits = Bits(x), sign = hn::And(hn::ShiftRight<16>(bits), Word(0x8000)), magnitude = hn::And(bits, Word(0x7fffffff));
  const VU odd = hn::And(hn::ShiftRight<13>(magnitude), Word(1));
  const VU normal = hn::ShiftRight<13>(hn::Add(hn::Sub(magnitude, Word(112u << 23)), hn::Add(Word(0xfff), odd)));
  const VU small = hn::Sub(Bits(hn::Add(Float(magnitude), Value(0.5f))), Word(0x3f000000));
  VU value = Choose(hn::Lt(magnitude, Word(0x38800000)), small, normal);
  value = Choose(hn::Lt(magnitude, Word(0x477ff000)), value, Word(0x7c00));
  value = Choose(hn::Gt(magnitude, Word(0x7f800000)), Word(0x7e00), value);
  return hn::Or(value, sign);
}

// ---- Float codes: formats/float_codes.h ----

HWY_INLINE VU EncodeE4M3(VF x, bool overflow_nan) {
  const VU sign = hn::And(hn::ShiftRight<24>(Bits(x)), Word(0x80)), magnitude = hn::And(Bits(x), Word(0x7fffffff));
  const VU odd = hn::And(hn::ShiftRight<20>(magnitude), Word(1));
  const VU normal = hn::ShiftRight<20>(hn::Add(hn::Sub(magnitude, Word(120u << 23)), hn::Add(Word(0x7ffff), odd)));
  const VU small = hn::Sub(Bits(hn::Add(Float(magnitude), Value(16384.0f))), Word(0x46800000));
  VU value = Choose(hn::Lt(magnitude, Word(0x3c800000)), small, normal);
  value = Choose(hn::Gt(magnitude, Word(0x43e80000)), Word(overflow_nan ? 0x7f : 0x7e), value);
  value = Choose(hn::Gt(magnitude, Word(0x7f800000)), Word(0x7f), value);
  return hn::Or(value, sign);
}
HWY_INLINE VF DecodeE4M3(VU code) {
  const VU sign = hn::ShiftLeft<24>(hn::And(code, Word(0x80))), magnitude = hn::And(code, Word(0x7f));
  const VU normal = hn::Add(hn::ShiftLeft<20>(magnitude), Word(120u << 23));
  const VU small = Bits(hn::Mul(hn::ConvertTo(DF(), hn::BitCast(DI(), magnitude)), Float(Word(0x3b000000))));
  VU value = Choose(hn::Lt(magnitude, Word(8)), small, normal);
  value = Choose(hn::Eq(magnitude, Word(0x7f)), Word(0x7fc00000), value);
  return Float(hn::Or(value, sign));
}
HWY_INLINE VU EncodeE5M2(VF x, bool overflow_inf) {
  const VU sign = hn::And(hn::ShiftRight<24>(Bits(x)), Word(0x80)), magnitude = hn::And(Bits(x), Word(0x7fffffff));
  const VU odd = hn::And(hn::ShiftRight<21>(magnitude), Word(1));
  const VU normal = hn::ShiftRight<21>(hn::Add(hn::Sub(magnitude, Word(112u << 23)), hn::Add(Word(0xfffff), odd)));
  const VU small = hn::Sub(Bits(hn::Add(Float(magnitude), Value(128.0f))), Word(0x43000000));
  VU value = Choose(hn::Lt(magnitude, Word(0x38800000)), small, normal);
  value = Choose(hn::Lt(magnitude, Word(0x47700000)), value, Word(overflow_inf ? 0x7c : 0x7b));
  value = Choose(hn::Gt(magnitude, Word(0x7f800000)), Word(0x7f), value);
  return hn::Or(value, sign);
}
HWY_INLINE VF DecodeE5M2(VU code) { return WidenF16(hn::ShiftLeft<8>(code)); }

// EncodeE2M1<false> of what is not NaN. The values' steps grow from 1/2 over 1 to 2, and each of three sums rounds to nearest even
// in one of these; where a step is too fine or too coarse, its code is no lower than the right one.
HWY_INLINE VU EncodeFiniteE2M1(VF x) {
  const VF magnitude = hn::Abs(x);
  const auto steps = [&](float one_step, uint32_t offset) HWY_ATTR {
    return hn::BitCast(DI(), hn::Add(Bits(hn::Add(magnitude, Value(one_step))), Word(offset)));
  };
  const VI halves = steps(4194304.0f, 0u - 0x4a800000u), ones = steps(8388608.0f, 2u - 0x4b000000u), twos = steps(16777216.0f, 4u - 0x4b800000u);
  const VI code = hn::Min(hn::Min(halves, ones), hn::Min(twos, hn::Set(DI(), 7)));
  return hn::Or(hn::BitCast(DU(), code), hn::And(hn::ShiftRight<28>(Bits(x)), Word(8)));
}

template <bool kTowardZero>
HWY_INLINE VU EncodeE2M1(VF x) {
  const VU magnitude = hn::And(Bits(x), Word(0x7fffffff));
  VU code;
  if constexpr (kTowardZero) {
    code = hn::Zero(DU());
    for (const float border : {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f}) {
      code = hn::Sub(code, hn::VecFromMask(DU(), hn::RebindMask(DU(), hn::Gt(Float(magnitude), Value(border)))));
    }
  } else {
    // Nearest even, below 1 in steps of 1/2, above with one bit of mantissa.
    const VU odd = hn::And(hn::ShiftRight<22>(magnitude), Word(1));
    const VU normal = hn::ShiftRight<22>(hn::Add(hn::Add(magnitude, Word(0x1fffffu - (126u << 23))), odd));
    const VU small = hn::Sub(Bits(hn::Add(Float(magnitude), Value(4194304.0f))), Word(0x4a800000));
    code = hn::Min(Choose(hn::RebindMask(DU(), hn::Lt(Float(magnitude), Value(1.0f))), small, normal), Word(7));
  }
  code = hn::Or(code, hn::And(hn::ShiftRight<28>(Bits(x)), Word(8)));
  return Choose(hn::Gt(magnitude, Word(0x7f800000)), hn::Zero(DU()), code);
}
alignas(64) constexpr float kE2M1Values[16] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};
HWY_INLINE VF DecodeE2M1(VU code) {
  if constexpr (HWY_LANES(float) == 16) return hn::TableLookupLanes(hn::Load(DF(), kE2M1Values), hn::IndicesFromVec(DF(), code));
  if constexpr (HWY_LANES(float) == 8) {
    const VU sign = hn::ShiftLeft<28>(hn::And(code, Word(8)));
    const VF magnitude = hn::TableLookupLanes(hn::Load(DF(), kE2M1Values), hn::IndicesFromVec(DF(), hn::And(code, Word(7))));
    return Float(hn::Or(Bits(magnitude), sign));
  }
  const VU sign = hn::ShiftLeft<28>(hn::And(code, Word(8))), magnitude = hn::And(code, Word(7));
  const VU small = Choose(hn::Eq(magnitude, Word(1)), Word(0x3f000000), hn::Zero(DU()));
  const VU large = hn::Add(hn::ShiftLeft<22>(magnitude), Word(0x3f000000));
  return Float(hn::Or(sign, Choose(hn::Lt(magnitude, Word(2)), small, large)));
}

// ---- Scales: formats/scales.h ----

struct Stored {
  VU bits;
  VF value;
};
HWY_INLINE Stored StoreScales(ScaleType type, VF s, VF g) {
  s = hn::Min(s, Value(3.4028234663852886e38f));
  switch (type) {
    case ScaleType::kF32: return {Bits(s), s};
    case ScaleType::kF16: {
      const VU bits = NarrowF16(hn::Min(s, Value(65504.0f)));
      return {bits, WidenF16(bits)};
    }
    case ScaleType::kBF16: {
      const VU bits = NarrowBF16(hn::Min(s, Value(3.3895313892515355e38f)));
      return {bits, WidenBF16(bits)};
    }
    case ScaleType::kE4M3: {
      const VU bits = EncodeE4M3(hn::Div(s, g), false);
      return {bits, hn::Mul(DecodeE4M3(bits), g)};
    }
    case ScaleType::kE8M0: break;
  }
  const VU exponent = hn::ShiftRight<23>(Bits(s)), mantissa = hn::And(Bits(s), Word(0x7fffff));
  const auto up = hn::Gt(mantissa, Choose(hn::Eq(exponent, hn::Zero(DU())), Word(0x400000), hn::Zero(DU())));
  const VU bits = hn::Min(hn::Sub(exponent, hn::VecFromMask(DU(), up)), Word(254));
  const VU value = Choose(hn::Eq(bits, hn::Zero(DU())), Word(0x400000), hn::ShiftLeft<23>(bits));
  return {bits, hn::IfThenElseZero(hn::Ne(s, hn::Zero(DF())), Float(value))};
}

// ---- Codes ----
// Each: Encode gives the code in the low bits (integers: sign-extended) of a value for a scale and zero point; Decode the
// value of an unsigned code. kSigned: how 32-bit codes narrow to bytes.
// kQuick: there is a QuickEncode, which multiplies by a factor of the scale instead of dividing. The product is within
// 1.5 * 2^-23 of the rounded quotient, so wherever it is not that close to a border between two codes, its code is the
// quotient's; `doubt` gathers how close it came, and where that is not Certain, Encode decides. `Factor` tells for which scales
// that holds; x is finite. kClamp: whether quotients may lie beyond the codes. Its codes are those of Encode once they went
// through Halves, as 16-bit numbers.
// kRough: there is a Rough, the error of a round trip but for roundings: within 2^-20 of the largest magnitude.

using MF = hn::Mask<DF>;
HWY_INLINE MF Moderate(VF scale, float most) { return hn::And(hn::Ge(scale, Value(7.888609052210118e-31f)), hn::Le(scale, Value(most))); }

struct IntegerCode {
  static constexpr bool kSigned = true, kQuick = true, kByHalves = false, kRough = true, kLevels = false;
  HWY_INLINE bool quick() const { return true; }
  HWY_INLINE VF Factor(VF scale, MF* sound) const {
    const auto zero = hn::Eq(scale, hn::Zero(DF()));
    *sound = hn::Or(Moderate(scale, 1.2676506002282294e30f), zero);
    return hn::IfThenZeroElse(zero, hn::Div(Value(1.0f), scale));
  }
  // The sum with 1.5 * 2^9 is the product in steps of 2^-14, the lowest bits of a float. It is within 1.25 steps of the quotient
  // where that is 255 or less, and borders between codes are whole steps.
  using Doubt = VI;
  static constexpr int kFine = 14, kOff = 1;
  static HWY_INLINE Doubt NoDoubt() { return hn::Set(DI(), 1 << kFine); }
  static HWY_INLINE bool Certain(Doubt doubt) { return hn::AllTrue(DI(), hn::Gt(doubt, hn::Set(DI(), 2 * kOff))); }
  template <bool kZero, bool kClamp>
  HWY_INLINE VI QuickEncode(VF x, VF factor, VF zero, Doubt* doubt) const {
    const VF base = Value(768.0f);
    const VU half = Word((1u << (kFine - 1)) + kOff - 0x44400000u);
    VF q = hn::Mul(x, factor);
    if constexpr (kClamp) {
      q = kZero ? hn::Min(hn::Max(q, hn::Sub(Value(lo), zero)), hn::Sub(Value(hi), zero)) : hn::Min(hn::Max(q, Value(lo)), Value(hi));
    }
    const VU offset = kZero ? hn::Add(Bits(hn::Add(zero, base)), hn::Sub(half, Word(0x44400000u))) : half;
    const VI steps = hn::BitCast(DI(), hn::Add(Bits(hn::Add(q, base)), offset));
    *doubt = hn::Min(*doubt, hn::And(steps, hn::Set(DI(), (1 << kFine) - 1)));
    return hn::ShiftRight<kFine>(steps);
  }
  template <class V>
  static HWY_INLINE V Halves(V codes) { return codes; }
  HWY_INLINE VF Rough(VF x, VF factor, VF scale, VF zero) const {
    const VF magic = Value(12582912.0f);
    const VF q = hn::Min(hn::Max(hn::Mul(x, factor), hn::Sub(Value(lo), zero)), hn::Sub(Value(hi), zero));
    return hn::NegMulAdd(hn::Sub(hn::Add(q, magic), magic), scale, x);
  }
  float lo, hi;
  uint32_t sign;  // 2^(bits - 1) for signed types, else 0
  // The code less its zero point, as a float. Rounding is monotonic and keeps integers, so clamping before it gives what
  // clamping after it gives; within the range adding 1.5 * 2^23 rounds to nearest even.
  HWY_INLINE VF Shifted(VF x, VF scale, VF zero) const {
    VF q = hn::Div(x, scale);
    q = hn::IfThenElseZero(hn::And(hn::Eq(q, q), hn::Ne(scale, hn::Zero(DF()))), q);
    return hn::Add(hn::Min(hn::Max(q, hn::Sub(Value(lo), zero)), hn::Sub(Value(hi), zero)), Value(12582912.0f));
  }
  HWY_INLINE VI Encode(VF x, VF scale, VF zero) const {
    const VU offset = hn::Sub(Bits(hn::Add(zero, Value(12582912.0f))), Word(2 * 0x4b400000u));
    return hn::BitCast(DI(), hn::Add(Bits(Shifted(x, scale, zero)), offset));
  }
  HWY_INLINE VF RoundTrip(VF x, VF scale, VF zero) const { return hn::Mul(hn::Sub(Shifted(x, scale, zero), Value(12582912.0f)), scale); }
  HWY_INLINE VF Decode(VU code, VF scale, VF zero) const {
    // (code ^ sign) - sign is the signed code; small integers are exact in f32.
    const VF flipped = hn::ConvertTo(DF(), hn::BitCast(DI(), hn::Xor(code, Word(sign))));
    return hn::Mul(hn::Sub(flipped, hn::Add(zero, Value(static_cast<float>(sign)))), scale);
  }
};

template <int kKind>  // 0 e4m3, 1 e5m2, 2 e2m1, 3 e2m1tz
struct FloatCode {
  static constexpr bool kSigned = false, kQuick = kKind == 0, kByHalves = false, kRough = false, kLevels = false;
  bool overflow_nan = false;
  HWY_INLINE bool quick() const { return !overflow_nan; }
  // With 2^-120 in the factor the exponents of e4m3 are those of f32, subnormals included.
  HWY_INLINE VF Factor(VF scale, MF* sound) const {
    *sound = Moderate(scale, 32.0f);
    return hn::Mul(hn::Div(Value(1.0f), scale), Value(7.52316384526264e-37f));
  }
  using Doubt = VI;
  static HWY_INLINE Doubt NoDoubt() { return hn::Set(DI(), 0xfffff); }
  static HWY_INLINE bool Certain(Doubt doubt) { return hn::AllTrue(DI(), hn::Gt(doubt, hn::Set(DI(), 15))); }
  // The sign stays apart, in bit 11, until Halves.
  template <bool kZero, bool kClamp>
  HWY_INLINE VI QuickEncode(VF x, VF factor, VF, Doubt* doubt) const {
    const VU rounded = hn::Add(Bits(hn::Mul(x, factor)), Word(0x80008));
    *doubt = hn::Min(*doubt, hn::BitCast(DI(), hn::And(rounded, Word(0xfffff))));
    const VI code = hn::BitCast(DI(), hn::ShiftRight<20>(rounded));
    if constexpr (!kClamp) return code;
    const VI sign = hn::Set(DI(), 0x800);
    return hn::Or(hn::Min(hn::AndNot(sign, code), hn::Set(DI(), 0x7e)), hn::And(code, sign));
  }
  template <class V>
  static HWY_INLINE V Halves(V codes) {
    const hn::DFromV<V> d;
    return hn::Or(hn::And(codes, hn::Set(d, 0x7f)), hn::And(hn::ShiftRight<4>(codes), hn::Set(d, 0x80)));
  }
  HWY_INLINE VI Encode(VF x, VF scale, VF) const {
    const VF q = hn::Div(x, scale);
    VU code;
    if constexpr (kKind == 0) code = EncodeE4M3(q, overflow_nan);
    else if constexpr (kKind == 1) code = EncodeE5M2(q, overflow_nan);
    else if constexpr (kKind == 2) code = EncodeE2M1<false>(q);
    else code = hn::IfThenElseZero(hn::RebindMask(DU(), hn::Ne(q, hn::Zero(DF()))), EncodeE2M1<true>(q));
    return hn::BitCast(DI(), hn::IfThenElseZero(hn::RebindMask(DU(), hn::Not(hn::Eq(scale, hn::Zero(DF())))), code));
  }
  HWY_INLINE VF Decode(VU code, VF scale, VF) const {
    const VF value = kKind == 0 ? DecodeE4M3(code) : kKind == 1 ? DecodeE5M2(code) : DecodeE2M1(code);
    return hn::IfThenElseZero(hn::Not(hn::Eq(scale, hn::Zero(DF()))), hn::Mul(value, scale));
  }
};

template <int kBits>
struct LevelCode {
  static constexpr bool kSigned = false, kQuick = true, kByHalves = HWY_LANES(float) == 4, kRough = true, kLevels = true;
  static constexpr int kBitCount = kBits, kHalf = 1 << (kBits - 1);
  // Room for a whole vector: targets with one of 8 lanes look values up in it.
  static constexpr int kRoom = HWY_LANES(float) > 8 ? HWY_LANES(float) : 8;
  static constexpr bool kLookUp = HWY_LANES(float) >= 8;
  // Cell i of [0, kMost], each kCell wide, has the border between level i and i + 1 well inside it, and no other.
  static constexpr float kCell = kBits == 4 ? 0.345f : kBits == 3 ? 0.6f : 1.1f, kMost = kBits == 4 ? 2.41f : kBits == 3 ? 1.79f : 1.09f;
  float values[16] = {};  // of every code
  float positive[kRoom] = {}, middle[kRoom] = {};  // middle[i]: border between positive level i - 1 and i, middle[0] = 0
  float border[kRoom] = {}, half_gap[kRoom] = {};  // of cell i; half the way between the levels at the border
  // In fixed point, where a cell is 2^shift steps: the low and high bytes of a border and of half a gap, of every cell and those beyond,
  // and the levels.
  struct Steps {
    alignas(16) uint8_t border_low[16], border_high[16], gap_low[16], gap_high[16];
    int16_t levels[kHalf];  // the positive ones
  };
  static constexpr int kFinest = 11, kCoarsest = 9;
  Steps steps[kFinest - kCoarsest + 1];
  const Steps& At(int shift) const { return steps[shift - kCoarsest]; }
  LevelCode() {
    for (int code = 0; code < 2 * kHalf; ++code) values[code] = Level(kBits, code);
    for (int i = 0; i < kHalf; ++i) {
      positive[i] = PositiveLevel(kBits, i);
      middle[i] = LevelMiddle(kBits, kHalf - 1 + i);
      if (i == 0) continue;
      border[i - 1] = middle[i];
      half_gap[i - 1] = (positive[i] - positive[i - 1]) * 0.5f;
    }
    for (int shift = kCoarsest; shift <= kFinest; ++shift) {
      Steps& to = steps[shift - kCoarsest];
      const auto steps_of = [shift](float quotient) { return static_cast<uint32_t>(quotient / kCell * static_cast<float>(1 << shift) + 0.5f); };
      for (int i = 0; i < 16; ++i) {
        const int cell = i < kHalf - 1 ? i : kHalf - 2;
        to.border_low[i] = static_cast<uint8_t>(steps_of(border[cell]));
        to.border_high[i] = static_cast<uint8_t>(steps_of(border[cell]) >> 8);
        to.gap_low[i] = static_cast<uint8_t>(steps_of(half_gap[cell]));
        to.gap_high[i] = static_cast<uint8_t>(steps_of(half_gap[cell]) >> 8);
      }
      for (int i = 0; i < kHalf; ++i) to.levels[i] = static_cast<int16_t>(steps_of(positive[i]));
    }
  }
  HWY_INLINE bool quick() const { return true; }
  HWY_INLINE VF Factor(VF scale, MF* sound) const {
    *sound = Moderate(scale, 1.2676506002282294e30f);
    return hn::IfThenZeroElse(hn::Eq(scale, hn::Zero(DF())), hn::Div(Value(kByHalves ? (1 << kFinest) / kCell : 1.0f), scale));
  }
  // Rounded, not cut: a conversion that cuts has to look after numbers beyond int32. The lowest four bits are the cell's number,
  // and a look-up among 8 or 16 lanes reads no others.
  HWY_INLINE VI CellOf(VF limited) const {
    return hn::BitCast(DI(), hn::Add(hn::MulAdd(limited, Value(1.0f / kCell), Value(-0.5f)), Value(12582912.0f)));
  }
#if HWY_MAX_BYTES == 16
  // By 16-bit quotients, in steps of a cell's 2048th, and look-ups among 16 bytes. A quotient and a border are each within half a step
  // and a little of what they stand for; at 0 the sign is in doubt.
  using Doubt = hn::Vec<hn::Full128<int16_t>>;
  static HWY_INLINE Doubt NoDoubt() { return hn::Set(hn::Full128<int16_t>(), 0x7fff); }
  static HWY_INLINE bool Certain(Doubt doubt) { return hn::AllTrue(hn::Full128<int16_t>(), hn::Gt(doubt, hn::Set(hn::Full128<int16_t>(), 1))); }
  template <bool kZero, bool kClamp>
  HWY_INLINE VI QuickEncode(VF x, VF factor, VF, Doubt*) const {
    // Far above the largest step the sum's bits still rise; far below they would turn round.
    const VF magic = Value(12582912.0f), steps = hn::Max(hn::Mul(x, factor), Value(-32767.0f));
    return hn::BitCast(DI(), hn::Sub(Bits(hn::Add(steps, magic)), Bits(magic)));
  }
  HWY_INLINE hn::Vec<hn::Full128<uint8_t>> QuickBytes(const VI* v, Doubt* doubt) const {
    const hn::Full128<int16_t> d16;
    const hn::Full128<uint8_t> d8;
    const hn::Full128<int8_t> i8;
    const auto low = hn::ReorderDemote2To(d16, v[0], v[1]), high = hn::ReorderDemote2To(d16, v[2], v[3]);
    const auto a = hn::Abs(low), b = hn::Abs(high);
    const auto cell = hn::Min(hn::ReorderDemote2To(d8, hn::ShiftRight<kFinest>(a), hn::ShiftRight<kFinest>(b)), hn::Set(d8, kHalf - 2));
    const auto border_low = hn::TableLookupBytes(hn::Load(d8, At(kFinest).border_low), cell);
    const auto border_high = hn::TableLookupBytes(hn::Load(d8, At(kFinest).border_high), cell);
    const auto above_a = hn::Sub(a, hn::BitCast(d16, hn::InterleaveLower(d8, border_low, border_high)));
    const auto above_b = hn::Sub(b, hn::BitCast(d16, hn::InterleaveUpper(d8, border_low, border_high)));
    *doubt = hn::Min(hn::Min(*doubt, hn::Min(hn::Abs(above_a), a)), hn::Min(hn::Abs(above_b), b));
    // Positive: kHalf + index; negative: kHalf - 1 - index, the complement. An element that is not above its border: index less 1.
    const auto below = hn::BitCast(d8, hn::ReorderDemote2To(i8, hn::ShiftRight<15>(above_a), hn::ShiftRight<15>(above_b)));
    const auto side = hn::BitCast(d8, hn::ReorderDemote2To(i8, hn::ShiftRight<15>(low), hn::ShiftRight<15>(high)));
    return hn::Xor(hn::Add(hn::Add(cell, below), hn::Set(d8, kHalf + 1)), hn::And(side, hn::Set(d8, 2 * kHalf - 1)));
  }
#else
  using Doubt = MF;
  static HWY_INLINE Doubt NoDoubt() { return hn::Eq(hn::Zero(DF()), hn::Zero(DF())); }
  static HWY_INLINE bool Certain(Doubt doubt) { return hn::AllTrue(DF(), doubt); }
  template <class V>
  static HWY_INLINE V Halves(V codes) { return codes; }
  template <bool kZero, bool kClamp>
  HWY_INLINE VI QuickEncode(VF x, VF factor, VF, Doubt* doubt) const {
    const VF q = hn::Mul(hn::Abs(x), factor), limited = hn::Min(q, Value(kMost));
    const VI cell = CellOf(limited);
    const VF above = hn::Sub(limited, LookUp(border, hn::BitCast(DU(), cell)));
    // Next to nothing may be 0 as a quotient, and then belongs to the negative side.
    *doubt = hn::And(*doubt, hn::And(hn::Gt(hn::Abs(above), Value(2e-6f)), hn::Gt(q, Value(1e-30f))));
    // Positive: kHalf + index; negative: kHalf - 1 - index, the complement.
    const VI index = hn::Sub(hn::And(cell, hn::Set(DI(), kHalf - 1)), hn::VecFromMask(DI(), hn::RebindMask(DI(), hn::Gt(above, hn::Zero(DF())))));
    const VI side = hn::BroadcastSignBit(hn::BitCast(DI(), x));
    return hn::Xor(hn::Add(index, hn::Set(DI(), kHalf)), hn::And(side, hn::Set(DI(), 2 * kHalf - 1)));
  }
#endif
  HWY_INLINE VF Rough(VF x, VF factor, VF scale, VF) const {
    const VF a = hn::Abs(x), q = hn::Mul(a, factor);
    if constexpr (kLookUp) {
      // Both levels at a border are equally far from it.
      const VU cell = hn::BitCast(DU(), CellOf(hn::Min(q, Value(kMost))));
      return hn::Mul(hn::Sub(hn::Abs(hn::Sub(q, LookUp(border, cell))), LookUp(half_gap, cell)), scale);
    }
    VF level = Value(positive[0]);
    HWY_UNROLL(8)
    for (int i = 1; i < kHalf; ++i) level = hn::Max(level, hn::IfThenElseZero(hn::Gt(q, Value(middle[i])), Value(positive[i])));
    return hn::NegMulAdd(level, scale, a);
  }
  HWY_INLINE static VF LookUp(const float* table, VU index) {
    return hn::TableLookupLanes(hn::LoadU(DF(), table), hn::IndicesFromVec(DF(), index));
  }
  // The level nearest to q by the borders, and its code. Borders count as below q where q is positive and as above
  // where it is negative, so a negative q compares its magnitude with >=.
  HWY_INLINE VF Nearest(VF q, VU* code) const {
    const VU magnitude = hn::And(Bits(q), Word(0x7fffffff));
    // -0 is not above the middle 0: it belongs to the negative side.
    const auto positive_side = hn::RebindMask(DU(), hn::Gt(q, hn::Zero(DF())));
    const VU key = hn::Add(magnitude, Choose(positive_side, hn::Zero(DU()), Word(1)));
    VU index = hn::Zero(DU());
    VF level = Value(positive[0]);
    if constexpr (kLookUp) {
      const VI signed_key = hn::BitCast(DI(), key);
      for (int step = kHalf / 2; step >= 1; step /= 2) {
        const VF border = step == kHalf / 2 ? Value(middle[step]) : LookUp(middle, hn::Add(index, Word(static_cast<uint32_t>(step))));
        const VI above = hn::VecFromMask(DI(), hn::Gt(signed_key, hn::BitCast(DI(), Bits(border))));
        index = hn::Add(index, hn::And(hn::BitCast(DU(), above), Word(static_cast<uint32_t>(step))));
      }
      level = LookUp(positive, index);
    }
    HWY_UNROLL(8)
    for (int i = 1; i < kHalf && !kLookUp; ++i) {
      const auto above = hn::Gt(hn::BitCast(DI(), key), hn::BitCast(DI(), Bits(Value(middle[i]))));
      index = hn::Sub(index, hn::BitCast(DU(), hn::VecFromMask(DI(), above)));
      level = hn::IfThenElse(hn::RebindMask(DF(), above), Value(positive[i]), level);
    }
    *code = Choose(positive_side, hn::Add(index, Word(kHalf)), hn::Sub(Word(kHalf - 1), index));
    return Float(hn::Or(Bits(level), Choose(positive_side, hn::Zero(DU()), Word(0x80000000))));
  }
  HWY_INLINE VI Encode(VF x, VF scale, VF) const {
    VU code;
    Nearest(hn::Div(x, scale), &code);
    return hn::BitCast(DI(), hn::IfThenElseZero(hn::RebindMask(DU(), hn::Not(hn::Eq(scale, hn::Zero(DF())))), code));
  }
  HWY_INLINE VF Decode(VU code, VF scale, VF) const {
    const auto negative = hn::Lt(code, Word(kHalf));
    const VU index = Choose(negative, hn::Sub(Word(kHalf - 1), code), hn::Sub(code, Word(kHalf)));
    VF level = Value(positive[0]);
    if constexpr (kLookUp) level = LookUp(positive, index);
    HWY_UNROLL(8)
    for (int i = 1; i < kHalf && !kLookUp; ++i) level = hn::IfThenElse(hn::RebindMask(DF(), hn::Eq(index, Word(static_cast<uint32_t>(i)))), Value(positive[i]), level);
    const VF value = hn::Mul(Float(hn::Or(Bits(level), Choose(negative, Word(0x80000000), hn::Zero(DU())))), scale);
    return hn::IfThenElseZero(hn::Not(hn::Eq(scale, hn::Zero(DF()))), value);
  }
};

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace kvpages
HWY_AFTER_NAMESPACE();
#endif
