// SPDX-License-Identifier: Apache-2.0
// The vector backends: one source, compiled once per target. A job that gains nothing from vectors, or whose arithmetic
// is delicate (non-finite input to a calibration), goes to the reference, which this backend must equal in any case.
#include "backends/simd/simd.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "backends/reference/reference.h"
#include "formats/codec.h"
#include "formats/row.h"
#include "formats/schemes.h"
#include "formats/search.h"

// The targets that are backends, and no others.
#ifndef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_AVX3_DL | HWY_AVX3_ZEN4 | HWY_AVX3_SPR)
#endif
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backends/simd/simd.cc"
#include "hwy/foreach_target.h"
#include "hwy/cache_control.h"
#include "hwy/highway.h"
// The baseline that x86-64 compilers start from is no backend, yet Highway compiles it in any case.
#if HWY_TARGET != HWY_SSE2
#include "backends/simd/codes-inl.h"
#include "backends/simd/levels-inl.h"
#include "backends/simd/packing-inl.h"
#include "backends/simd/schemes-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvpages {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

// Elements that are worked on at once; codes wait in a buffer of this size to be packed.
constexpr int64_t kChunk = 512;

HWY_INLINE int64_t LaneCount() { return static_cast<int64_t>(hn::Lanes(DF())); }

// Calls f(i, count) for whole vectors and then once for the rest.
template <typename F>
HWY_INLINE void ForVectors(int64_t count, F&& f) {
  const int64_t lanes = LaneCount();
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) f(i, lanes);
  if (i < count) f(i, count - i);
}
HWY_INLINE VF LoadFloats(const float* x, int64_t count) {
  return count == LaneCount() ? hn::LoadU(DF(), x) : hn::LoadN(DF(), x, static_cast<size_t>(count));
}
HWY_INLINE void StoreFloats(VF v, float* x, int64_t count) {
  if (count == LaneCount()) hn::StoreU(v, DF(), x);
  else hn::StoreN(v, DF(), x, static_cast<size_t>(count));
}

// Grid::Index without the divisions that most grids do not need.
HWY_INLINE int64_t Quotient(int64_t a, int64_t b) {
  if (b == 1 || a < b) return b == 1 ? a : 0;
  return static_cast<int64_t>(((a | b) >> 32) == 0 ? static_cast<uint32_t>(a) / static_cast<uint32_t>(b) : a / b);
}
HWY_INLINE int64_t IndexOf(const Grid& grid, int64_t b, int64_t h, int64_t t, int64_t d) {
  return Quotient(b, grid.div[0]) * grid.stride[0] + Quotient(h, grid.div[1]) * grid.stride[1] + Quotient(t, grid.div[2]) * grid.stride[2] +
         Quotient(d, grid.div[3]) * grid.stride[3];
}

// ---- Dense conversions ----

HWY_INLINE VU LoadHalves(const uint8_t* in, int64_t count) {
  const DH d;
  const auto* halves = reinterpret_cast<const uint16_t*>(in);
  if (count == LaneCount()) return hn::PromoteTo(DU(), hn::LoadU(d, halves));
  alignas(64) uint16_t rest[kMaxLanes] = {};
  std::memcpy(rest, in, static_cast<size_t>(count) * 2);
  return hn::PromoteTo(DU(), hn::LoadU(d, rest));
}
HWY_INLINE void StoreHalves(VU bits, uint8_t* out, int64_t count) {
  const DH d;
  const auto halves = hn::TruncateTo(d, bits);
  if (count == LaneCount()) return hn::StoreU(halves, d, reinterpret_cast<uint16_t*>(out));
  alignas(64) uint16_t rest[kMaxLanes];
  hn::StoreU(halves, d, rest);
  std::memcpy(out, rest, static_cast<size_t>(count) * 2);
}

void Widen(Type type, const void* in, float* out, int64_t count) {
  if (type == Type::f32) {
    if (count > 0) std::memmove(out, in, static_cast<size_t>(count) * 4);
    return;
  }
  const auto* from = static_cast<const uint8_t*>(in);
  if (type == Type::bf16) {
    ForVectors(count, [&](int64_t i, int64_t n) HWY_ATTR { StoreFloats(WidenBF16(LoadHalves(from + i * 2, n)), out + i, n); });
  } else {
    ForVectors(count, [&](int64_t i, int64_t n) HWY_ATTR { StoreFloats(WidenF16(LoadHalves(from + i * 2, n)), out + i, n); });
  }
}

void Narrow(Type type, const float* in, void* out, int64_t count) {
  if (type == Type::f32) {
    if (count > 0) std::memmove(out, in, static_cast<size_t>(count) * 4);
    return;
  }
  auto* to = static_cast<uint8_t*>(out);
  if (type == Type::bf16) {
    ForVectors(count, [&](int64_t i, int64_t n) HWY_ATTR { StoreHalves(NarrowBF16(LoadFloats(in + i, n)), to + i * 2, n); });
  } else {
    ForVectors(count, [&](int64_t i, int64_t n) HWY_ATTR { StoreHalves(NarrowF16(LoadFloats(in + i, n)), to + i * 2, n); });
  }
}

// Whether the bits of a number, less its sign, are `limit` or more anywhere in whole vectors of x[0, count); `checked` of them are in these.
template <typename T>
HWY_INLINE bool Reaches(const uint8_t* x, int64_t count, T magnitude, T limit, int64_t* checked) {
  const hn::ScalableTag<T> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto mask = hn::Set(d, magnitude);
  const auto at = [&](int64_t i) HWY_ATTR { return hn::And(hn::LoadU(d, reinterpret_cast<const T*>(x) + i), mask); };
  auto most = hn::Zero(d), other = most;
  int64_t i = 0;
  for (; i + 4 * lanes <= count; i += 4 * lanes) {
    most = hn::Max(most, hn::Max(at(i), at(i + lanes)));
    other = hn::Max(other, hn::Max(at(i + 2 * lanes), at(i + 3 * lanes)));
  }
  for (; i + lanes <= count; i += lanes) most = hn::Max(most, at(i));
  *checked = i;
  return !hn::AllFalse(d, hn::Ge(hn::Max(most, other), hn::Set(d, limit)));
}

int64_t FirstNonFinite(Type type, const void* data, int64_t count) {
  constexpr int64_t kStep = 1024;
  const int64_t size = type == Type::f32 ? 4 : 2;
  const auto* bytes = static_cast<const uint8_t*>(data);
  for (int64_t i = 0; i < count; i += kStep) {
    const int64_t n = std::min(kStep, count - i);
    int64_t checked;
    const bool found = type == Type::f32 ? Reaches<int32_t>(bytes + i * size, n, 0x7fffffff, 0x7f800000, &checked)
                                         : Reaches<int16_t>(bytes + i * size, n, 0x7fff, type == Type::f16 ? 0x7c00 : 0x7f80, &checked);
    for (int64_t k = found ? 0 : checked; k < n; ++k) {
      if (!IsFinite(WidenElement(type, data, i + k))) return i + k;
    }
  }
  return -1;
}

// ---- Runs of codes ----

// Whether an output is so large that it is written past the caches, which saves reading what will be overwritten.
constexpr int64_t kLine = 64, kStreamed = 8 << 20;
bool StreamsTo(const void* out, int64_t bytes) {
  return HWY_ARCH_X86 && bytes >= kStreamed && reinterpret_cast<uintptr_t>(out) % kLine == 0;
}

// Asks for `bytes` bytes that lie `ahead` bytes after `x`; they need not exist.
HWY_INLINE void Fetch(const void* x, int64_t ahead, int64_t bytes) {
  const uintptr_t next = reinterpret_cast<uintptr_t>(x) + static_cast<uintptr_t>(ahead);
  for (int64_t i = 0; i < bytes; i += kLine) hwy::Prefetch(reinterpret_cast<const uint8_t*>(next + static_cast<uintptr_t>(i)));
}

// Four vectors of codes to bytes. Narrowing works on blocks of 16 bytes, which are put in order once at the end.
// A copy in the caller's hands: what a loop of stores to bytes reads through a reference is read again for each of them.
template <typename C>
struct CodeBytes {
  const hn::Repartition<int16_t, DF> d16;
  const hn::Repartition<int8_t, DF> d8;
  const hn::Repartition<uint8_t, DF> u8;
  hn::Vec<hn::Repartition<uint8_t, DF>> mask;
  hn::Vec<hn::Repartition<int16_t, DF>> wide_mask;
  // Signed codes, and unsigned ones below 128, fit int8; uint8 codes do not, so those take the other way.
  bool fits_signed;
  HWY_INLINE explicit CodeBytes(const C& code, uint8_t bits)
      : mask(hn::Set(hn::Repartition<uint8_t, DF>(), bits)), wide_mask(hn::Set(hn::Repartition<int16_t, DF>(), bits)), fits_signed(false) {
    if constexpr (C::kSigned) fits_signed = bits != 0xff || code.sign != 0;
  }
  // kQuick: codes of QuickEncode.
  template <bool kQuick>
  HWY_INLINE void Store(const VI* v, uint8_t* HWY_RESTRICT out) const {
    auto low = hn::ReorderDemote2To(d16, v[0], v[1]), high = hn::ReorderDemote2To(d16, v[2], v[3]);
    if constexpr (kQuick) {
      low = C::Halves(low);
      high = C::Halves(high);
    }
#if HWY_MAX_BYTES == 16
    if constexpr (C::kSigned) {
      // Without a choice to make.
      return hn::StoreU(hn::ReorderDemote2To(u8, hn::And(low, wide_mask), hn::And(high, wide_mask)), u8, out);
    }
#endif
    if (C::kSigned && fits_signed) return InOrder(hn::And(hn::BitCast(u8, hn::ReorderDemote2To(d8, low, high)), mask), out);
    InOrder(hn::ReorderDemote2To(u8, low, high), out);
  }
  template <typename V>
  HWY_INLINE void InOrder(V bytes, uint8_t* HWY_RESTRICT out) const {
    if constexpr (HWY_LANES(float) > 4) {
      constexpr int kBlocks = HWY_LANES(float) / 4;
      alignas(64) int32_t order[HWY_LANES(float)];
      for (int i = 0; i < 4 * kBlocks; ++i) order[i] = i % kBlocks * 4 + i / kBlocks;
      bytes = hn::BitCast(u8, hn::TableLookupLanes(hn::BitCast(DI(), bytes), hn::SetTableIndices(DI(), order)));
    }
    hn::StoreU(bytes, u8, out);
  }
};

// Codes of x[0, count), a byte each. `each`: every element has a scale and zero point of its own, else all have the first.
template <typename C>
HWY_NOINLINE void EncodeRun(const C& code, const float* HWY_RESTRICT x, int64_t count, uint8_t* HWY_RESTRICT out, uint8_t mask,
                            const float* HWY_RESTRICT scales, const float* HWY_RESTRICT zeros, bool each) {
  const int64_t lanes = LaneCount();
  const CodeBytes<C> bytes(code, mask);
  VF scale = Value(*scales), zero = Value(*zeros);
  const auto encode = [&](int64_t i, int64_t n) HWY_ATTR {
    if (each) {
      scale = LoadFloats(scales + i, n);
      zero = LoadFloats(zeros + i, n);
    }
    return code.Encode(LoadFloats(x + i, n), scale, zero);
  };
  int64_t i = 0;
  for (; i + 4 * lanes <= count; i += 4 * lanes) {
    VI v[4];
    for (int k = 0; k < 4; ++k) v[k] = encode(i + k * lanes, lanes);
    bytes.template Store<false>(v, out + i);
  }
  for (; i < count; i += lanes) {
    const int64_t n = std::min(lanes, count - i);
    alignas(64) int32_t rest[kMaxLanes];
    hn::StoreU(encode(i, n), DI(), rest);
    for (int64_t k = 0; k < n; ++k) out[i + k] = static_cast<uint8_t>(rest[k] & mask);
  }
}

// Times four vectors that EncodeQuick looks at together: vectors of four floats are few instructions each, so more of them share it.
constexpr int kQuickGroups = HWY_MAX_BYTES == 16 ? 2 : 1;

// EncodeRun of elements [begin, begin + count), no more than EncodeQuick looks at together: where that is in doubt.
template <typename C, typename At>
HWY_NOINLINE void EncodeExactly(const C& code, const float* x, int64_t begin, int64_t count, uint8_t* out, uint8_t mask, const At& at) {
  alignas(64) float scales[4 * kQuickGroups * kMaxLanes], zeros[4 * kQuickGroups * kMaxLanes];
  ForVectors(count, [&](int64_t i, int64_t n) HWY_ATTR {
    VF scale, zero;
    at(begin + i, n, &scale, &zero);
    StoreFloats(scale, scales + i, n);
    StoreFloats(zero, zeros + i, n);
  });
  EncodeRun(code, x + begin, count, out + begin, mask, scales, zeros, true);
}

// Four times `kGroups` vectors from i on for EncodeQuick.
template <bool kClamp, int kGroups, typename C, typename At>
HWY_INLINE auto QuickGroups(const C& code, const float* HWY_RESTRICT x, int64_t i, uint8_t* HWY_RESTRICT out, const CodeBytes<C>& bytes, const At& at) {
  const int64_t lanes = LaneCount();
  auto doubt = C::NoDoubt();
  HWY_UNROLL(4)
  for (int g = 0; g < kGroups; ++g) {
    VI v[4];
    HWY_UNROLL(4)
    for (int k = 0; k < 4; ++k) {
      const int64_t first = i + (4 * g + k) * lanes;
      v[k] = code.template QuickEncode<At::kZero, kClamp>(hn::LoadU(DF(), x + first), at.Factor(first), at.Zero(first), &doubt);
    }
    if constexpr (C::kByHalves) hn::StoreU(code.QuickBytes(v, &doubt), hn::Repartition<uint8_t, DF>(), out + i + 4 * g * lanes);
    else bytes.template Store<true>(v, out + i + 4 * g * lanes);
  }
  return doubt;
}

// EncodeRun with factors in place of divisions: at.Factor(i), at.Zero(i). Codes in doubt are written too, and then again.
template <bool kClamp, typename C, typename At>
HWY_INLINE void EncodeQuick(const C& the_code, const float* HWY_RESTRICT x, int64_t count, uint8_t* HWY_RESTRICT out, uint8_t mask, const At& the_at) {
  const int64_t lanes = LaneCount();
  const std::conditional_t<sizeof(C) <= 16, C, const C&> code = the_code;
  const At at = the_at;
  const CodeBytes<C> bytes(code, mask);
  int64_t i = 0;
  for (; i + 4 * kQuickGroups * lanes <= count; i += 4 * kQuickGroups * lanes) {
    if (HWY_LIKELY(C::Certain(QuickGroups<kClamp, kQuickGroups>(code, x, i, out, bytes, at)))) continue;
    EncodeExactly(the_code, x, i, 4 * kQuickGroups * lanes, out, mask, the_at);
  }
  for (; kQuickGroups > 1 && i + 4 * lanes <= count; i += 4 * lanes) {
    if (HWY_LIKELY(C::Certain(QuickGroups<kClamp, 1>(code, x, i, out, bytes, at)))) continue;
    EncodeExactly(the_code, x, i, 4 * lanes, out, mask, the_at);
  }
  if (i < count) EncodeExactly(the_code, x, i, count - i, out, mask, the_at);
}

// `streams`: past the caches; then `out` is aligned to a line.
template <typename C, typename At>
HWY_INLINE void DecodeRun(const C& code, const uint8_t* HWY_RESTRICT codes, int64_t count, float* HWY_RESTRICT out, const At& at, bool streams = false) {
  const int64_t lanes = LaneCount();
  const DB d8;
  const auto decode = [&](int64_t i) HWY_ATTR {
    VF scale, zero;
    at(i, lanes, &scale, &zero);
    return code.Decode(hn::PromoteTo(DU(), hn::LoadU(d8, codes + i)), scale, zero);
  };
  int64_t i = 0;
#if HWY_MAX_BYTES == 16
  if constexpr (C::kLevels) {
    const Table16 table(code.values);
    for (; i + 16 <= count; i += 16) {
      VF level[4];
      table.template LookUp<false>(codes + i, level);
      for (int k = 0; k < 4; ++k) {
        VF scale, zero;
        at(i + 4 * k, 4, &scale, &zero);
        hn::StoreU(hn::IfThenElseZero(hn::Ne(scale, hn::Zero(DF())), hn::Mul(level[k], scale)), DF(), out + i + 4 * k);
      }
    }
  }
  if constexpr (C::kSigned) {
    // Sixteen widened together.
    const hn::Full128<uint8_t> all8;
    const hn::Full128<int16_t> all16;
    const auto sign = hn::Set(all16, static_cast<int16_t>(code.sign));
    for (; i + 16 <= count; i += 16) {
      const auto flipped = hn::Xor(hn::LoadU(all8, codes + i), hn::Set(all8, static_cast<uint8_t>(code.sign)));
      // Less the sign already here: compilers turn what can't be negative into conversions of unsigned numbers, which are slow.
      const auto low = hn::Sub(hn::PromoteLowerTo(all16, flipped), sign), high = hn::Sub(hn::PromoteUpperTo(all16, flipped), sign);
      const VI words[4] = {hn::PromoteLowerTo(DI(), low), hn::PromoteUpperTo(DI(), low), hn::PromoteLowerTo(DI(), high), hn::PromoteUpperTo(DI(), high)};
      HWY_UNROLL(4)
      for (int k = 0; k < 4; ++k) {
        VF scale, zero;
        at(i + 4 * k, 4, &scale, &zero);
        hn::StoreU(hn::Mul(hn::Sub(hn::ConvertTo(DF(), words[k]), zero), scale), DF(), out + i + 4 * k);
      }
    }
  }
#endif
  if (HWY_ARCH_X86 && streams) {
    for (; i + lanes <= count; i += lanes) hn::Stream(decode(i), DF(), out + i);
  }
  for (; i + lanes <= count; i += lanes) hn::StoreU(decode(i), DF(), out + i);
  if (i < count) {
    alignas(64) uint8_t rest[kMaxLanes] = {};
    std::memcpy(rest, codes + i, static_cast<size_t>(count - i));
    VF scale, zero;
    at(i, count - i, &scale, &zero);
    StoreFloats(code.Decode(hn::PromoteTo(DU(), hn::LoadU(d8, rest)), scale, zero), out + i, count - i);
  }
}

template <bool kZeros>
struct OneScale {
  static constexpr bool kZero = kZeros;
  VF scale, zero, factor;
  HWY_INLINE void operator()(int64_t, int64_t, VF* s, VF* z) const {
    *s = scale;
    *z = zero;
  }
  HWY_INLINE VF Factor(int64_t) const { return factor; }
  HWY_INLINE VF Zero(int64_t) const { return zero; }
};

template <bool kZeros>
struct ScaleEach {
  static constexpr bool kZero = kZeros;
  const float* scales;
  const float* zeros;
  const float* factors;
  HWY_INLINE void operator()(int64_t i, int64_t n, VF* s, VF* z) const {
    *s = LoadFloats(scales + i, n);
    *z = kZeros ? LoadFloats(zeros + i, n) : hn::Zero(DF());
  }
  HWY_INLINE VF Factor(int64_t i) const { return hn::LoadU(DF(), factors + i); }
  HWY_INLINE VF Zero(int64_t i) const { return kZeros ? hn::LoadU(DF(), zeros + i) : hn::Zero(DF()); }
  // What the elements of a row have whose groups start at `first`; here all rows have the same.
  HWY_INLINE const ScaleEach& Row(int64_t) const { return *this; }
};
// Groups are whole vectors: group[i / lanes] is that of element i.
template <bool kZeros>
struct ScaleByVector : ScaleEach<kZeros> {
  const uint16_t* group;
  HWY_INLINE int64_t At(int64_t i) const { return group[i / LaneCount()]; }
  HWY_INLINE void operator()(int64_t i, int64_t, VF* s, VF* z) const {
    *s = Value(this->scales[At(i)]);
    *z = kZeros ? Value(this->zeros[At(i)]) : hn::Zero(DF());
  }
  HWY_INLINE VF Factor(int64_t i) const { return Value(this->factors[At(i)]); }
  HWY_INLINE VF Zero(int64_t i) const { return kZeros ? Value(this->zeros[At(i)]) : hn::Zero(DF()); }
  HWY_INLINE ScaleByVector Row(int64_t first) const { return {{this->scales + first, this->zeros + first, this->factors + first}, group}; }
};
// A row is one group.
template <bool kZeros>
struct ScaleByRow : ScaleEach<kZeros> {
  HWY_INLINE OneScale<kZeros> Row(int64_t first) const {
    return {Value(this->scales[first]), kZeros ? Value(this->zeros[first]) : hn::Zero(DF()), Value(this->factors[first])};
  }
};

// Calls f with the vector arithmetic of a codec; false where there is none.
template <typename F>
bool WithCode(const Codec& codec, F&& f) {
  if (codec.kivi) return false;
  switch (codec.family) {
    case Family::kInteger:
      f(IntegerCode{static_cast<float>(codec.lo), static_cast<float>(codec.hi), codec.is_signed ? 1u << (codec.bits - 1) : 0u});
      return true;
    case Family::kFloatCode:
      if (codec.type == Type::e4m3) f(FloatCode<0>{codec.overflow_nan});
      else if (codec.type == Type::e5m2) f(FloatCode<1>{codec.overflow_nan});
      else if (codec.type == Type::e2m1) f(FloatCode<2>{});
      else f(FloatCode<3>{});
      return true;
    case Family::kLevels:
      if (codec.bits == 4) f(LevelCode<4>());
      else if (codec.bits == 3) f(LevelCode<3>());
      else f(LevelCode<2>());
      return true;
    default: return false;
  }
}

// Scales and zero points [index, index + count * stride) of a grid as floats.
void LoadScales(const Codec& codec, const uint8_t* scales, const uint8_t* zeros, float global, int64_t index, int64_t stride, int64_t count,
                float* HWY_RESTRICT values, float* HWY_RESTRICT zero_values) {
  if (stride == 1 && (zeros == nullptr || codec.family == Family::kInteger) &&
      (codec.scale_type == ScaleType::kF32 || codec.scale_type == ScaleType::kE4M3)) {
    if (codec.scale_type == ScaleType::kF32) {
      std::memcpy(values, scales + index * 4, static_cast<size_t>(count) * 4);
    } else {
      const int64_t lanes = LaneCount();
      int64_t i = 0;
      for (; i + lanes <= count; i += lanes) {
        hn::StoreU(hn::Mul(DecodeE4M3(hn::PromoteTo(DU(), hn::LoadU(DB(), scales + index + i))), Value(global)), DF(), values + i);
      }
      for (; i < count; ++i) values[i] = LoadScale(codec.scale_type, scales, index + i, global, codec.e8m0_zero);
    }
    for (int64_t i = 0; i < count; ++i) {
      const int32_t zero = zeros == nullptr ? 0 : codec.is_signed ? static_cast<int8_t>(zeros[index + i]) : zeros[index + i] - codec.zero_offset;
      zero_values[i] = static_cast<float>(zero);
    }
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    const Scale scale = LoadScaleAt(codec, scales, zeros, global, index + i * stride);
    values[i] = scale.value;
    zero_values[i] = static_cast<float>(scale.zero);
  }
}

uint8_t MaskOf(int bits) { return static_cast<uint8_t>((1 << bits) - 1); }

// Butterflies of formats/hadamard.h with strides below a vector: a + b, and where the lane's bit is set a - b, as a + (-b).
HWY_INLINE VF RotateLanes(VF v) {
  const DF d;
  const auto lane = hn::Iota(DU(), 0u);
  const auto upper = [&](uint32_t bit) HWY_ATTR { return Float(hn::IfThenElseZero(hn::Ne(hn::And(lane, Word(bit)), hn::Zero(DU())), Word(0x80000000u))); };
  v = hn::Add(hn::Shuffle2301(v), hn::Xor(v, upper(1)));
  v = hn::Add(hn::Shuffle1032(v), hn::Xor(v, upper(2)));
#if HWY_MAX_BYTES >= 32
  v = hn::Add(hn::SwapAdjacentBlocks(v), hn::Xor(v, upper(4)));
#endif
#if HWY_MAX_BYTES >= 64
  v = hn::Add(hn::TableLookupLanes(v, hn::IndicesFromVec(d, hn::Xor(lane, Word(8)))), hn::Xor(v, upper(8)));
#endif
  static_cast<void>(d);
  return v;
}

// Rotation of formats/hadamard.h, of `from` (which may be `row`) into `row`. The first eight vectors' strides stay in registers.
void Rotate(const float* from, float* row, int64_t width, int64_t n) {
  const int64_t lanes = LaneCount();
  const DF d;
  if (n < 2 * lanes) {
    if (from != row) std::memcpy(row, from, static_cast<size_t>(width) * 4);
    return RotateRow(row, width, n);
  }
  const VF factor = Value(static_cast<float>(1.0 / std::sqrt(static_cast<double>(n))));
  for (int64_t run = 0; run < width; run += n) {
    int64_t stride = lanes;
    if (n >= 8 * lanes) {
      const bool last = n == 8 * lanes;
      for (int64_t i = run; i < run + n; i += 8 * lanes) {
        VF v[8];
        HWY_UNROLL(8)
        for (int k = 0; k < 8; ++k) v[k] = RotateLanes(hn::LoadU(d, from + i + k * lanes));
        const auto pair = [&](int k, int step) HWY_ATTR {
          const VF a = v[k], b = v[k + step];
          v[k] = hn::Add(a, b);
          v[k + step] = hn::Sub(a, b);
        };
        HWY_UNROLL(4)
        for (int k = 0; k < 8; k += 2) pair(k, 1);
        HWY_UNROLL(4)
        for (int k = 0; k < 4; ++k) pair(k + k / 2 * 2, 2);
        HWY_UNROLL(4)
        for (int k = 0; k < 4; ++k) pair(k, 4);
        HWY_UNROLL(8)
        for (int k = 0; k < 8; ++k) hn::StoreU(last ? hn::Mul(v[k], factor) : v[k], d, row + i + k * lanes);
      }
      if (last) continue;
      stride = 8 * lanes;
    } else {
      for (int64_t i = run; i < run + n; i += lanes) hn::StoreU(RotateLanes(hn::LoadU(d, from + i)), d, row + i);
    }
    // Two strides at once, and the one that may be left.
    for (; stride * 4 <= n; stride *= 4) {
      const bool last = stride * 4 == n;
      for (int64_t i = run; i < run + n; i += 4 * stride) {
        for (int64_t j = i; j < i + stride; j += lanes) {
          float* const at[4] = {row + j, row + j + stride, row + j + 2 * stride, row + j + 3 * stride};
          const VF a = hn::LoadU(d, at[0]), b = hn::LoadU(d, at[1]), c = hn::LoadU(d, at[2]), e = hn::LoadU(d, at[3]);
          const VF ab = hn::Add(a, b), a_b = hn::Sub(a, b), ce = hn::Add(c, e), c_e = hn::Sub(c, e);
          const VF to[4] = {hn::Add(ab, ce), hn::Add(a_b, c_e), hn::Sub(ab, ce), hn::Sub(a_b, c_e)};
          HWY_UNROLL(4)
          for (int k = 0; k < 4; ++k) hn::StoreU(last ? hn::Mul(to[k], factor) : to[k], d, at[k]);
        }
      }
    }
    for (int64_t i = run; stride < n && i < run + n; i += 2 * stride) {
      for (int64_t j = i; j < i + stride; j += lanes) {
        const VF a = hn::LoadU(d, row + j), b = hn::LoadU(d, row + j + stride);
        hn::StoreU(hn::Mul(hn::Add(a, b), factor), d, row + j);
        hn::StoreU(hn::Mul(hn::Sub(a, b), factor), d, row + j + stride);
      }
    }
  }
}

// rows[i][0, lanes) -> column i at out + i * lanes. Squares of up to 8 x 8.
HWY_INLINE void Transpose(const float* const* rows, float* out) {
  const hn::CappedTag<float, 8> d;
  using V = hn::Vec<decltype(d)>;
  const hn::Repartition<double, decltype(d)> d64;
  constexpr int kLanes = HWY_LANES(float), kSide = kLanes > 8 ? 8 : kLanes;
  for (int row = 0; row < kLanes; row += kSide) {
    for (int column = 0; column < kLanes; column += kSide) {
      const auto four = [&](int first, V* to) HWY_ATTR {
        const auto load = [&](int i) HWY_ATTR { return hn::LoadU(d, rows[row + first + i] + column); };
        const V a = load(0), b = load(1), c = load(2), e = load(3);
        const auto low = hn::BitCast(d64, hn::InterleaveLower(d, a, b)), low2 = hn::BitCast(d64, hn::InterleaveLower(d, c, e));
        const auto high = hn::BitCast(d64, hn::InterleaveUpper(d, a, b)), high2 = hn::BitCast(d64, hn::InterleaveUpper(d, c, e));
        to[0] = hn::BitCast(d, hn::InterleaveLower(d64, low, low2));
        to[1] = hn::BitCast(d, hn::InterleaveUpper(d64, low, low2));
        to[2] = hn::BitCast(d, hn::InterleaveLower(d64, high, high2));
        to[3] = hn::BitCast(d, hn::InterleaveUpper(d64, high, high2));
      };
      float* const to = out + column * kLanes + row;
      V first[4];
      four(0, first);
      if constexpr (kSide == 4) {
        for (int k = 0; k < 4; ++k) hn::StoreU(first[k], d, to + k * kLanes);
      } else {
        V second[4];
        four(4, second);
        for (int k = 0; k < 4; ++k) {
          hn::StoreU(hn::ConcatLowerLower(d, second[k], first[k]), d, to + k * kLanes);
          hn::StoreU(hn::ConcatUpperUpper(d, second[k], first[k]), d, to + (k + 4) * kLanes);
        }
      }
    }
  }
}

// ---- Dequantize ----

// Codes of rows, a byte each, and their scales and zero points.
struct CodeRows {
  const uint8_t* codes;
  float* out;
  const float *scales, *zeros;
  int64_t rows, count;              // so many rows of so many elements
  int64_t code_stride, out_stride;  // from row to row
  int64_t groups;                   // scales of a row; 0: one for each element, the same in all rows
  int64_t first, run;               // elements of a row's first group, of the others
  bool streams;
};

struct Decoder {
  virtual void Decode(CodeRows rows) const = 0;
};
template <typename C>
struct DecoderOf final : Decoder {
  explicit DecoderOf(const C& code) : the_code(code) {}
  // Copies where they are small: what is read through a reference is read again after each store.
  void Decode(CodeRows rows) const override {
    const std::conditional_t<sizeof(C) <= 16, C, const C&> code = the_code;
    for (int64_t k = 0; k < rows.rows; ++k) {
      const uint8_t* const codes = rows.codes + k * rows.code_stride;
      float* const out = rows.out + k * rows.out_stride;
      if (rows.groups == 0) {
        DecodeRun(code, codes, rows.count, out, ScaleEach<true>{rows.scales, rows.zeros, nullptr}, rows.streams);
        continue;
      }
      int64_t n = std::min(rows.count, rows.first);
      for (int64_t i = 0, group = k * rows.groups; i < rows.count; i += n, n = std::min(rows.count - i, rows.run), ++group) {
        const OneScale<true> one{Value(rows.scales[group]), Value(rows.zeros[group]), hn::Zero(DF())};
        DecodeRun(code, codes + i, n, out + i, one, rows.streams);
      }
    }
  }
  const C& the_code;
};

void DequantizeRows(const DequantizeJob& job, const Codec& codec, const Decoder& decoder) {
  constexpr int64_t kUnpacked = 4 * kChunk;  // codes that are unpacked at once
  const Shape& shape = job.shape;
  const int64_t width = shape.width;
  uint8_t buffer[kUnpacked + 16];
  alignas(64) float scales[kUnpacked], zeros[kUnpacked];
  const bool each = job.grid.stride[3] != 0 && job.grid.div[3] == 1;
  const bool flat = job.grid.stride[3] == 0 && job.grid.stride[2] == 0 && job.token_stride == width;
  constexpr int64_t kFloats = kLine / 4;
  const bool streams = job.hadamard == 0 && job.center == nullptr && width % kFloats == 0 && job.token_stride % kFloats == 0 &&
                       job.head_stride % kFloats == 0 && job.batch_stride % kFloats == 0 &&
                       (job.grid.stride[3] == 0 || job.grid.div[3] == 1 || job.grid.div[3] % kFloats == 0) &&
                       StreamsTo(job.out, shape.batch * shape.heads * (job.end - job.begin) * width);
  const int64_t run = job.grid.stride[3] == 0 ? width : job.grid.div[3];
  const auto load = [&](int64_t index, int64_t stride, int64_t count, int64_t to) {
    LoadScales(codec, job.scales, job.zeros, job.global, index, stride, count, scales + to, zeros + to);
  };
  // Of narrow rows several are unpacked at once.
  const int64_t together = width <= kChunk ? kUnpacked / width : 1;
  for (int64_t b = 0; b < shape.batch; ++b) {
    for (int64_t h = 0; h < shape.heads; ++h) {
      float* const head = job.out + b * job.batch_stride + h * job.head_stride;
      const int64_t head_first = (b * shape.heads + h) * shape.tokens * width;
      if (flat) {
        load(IndexOf(job.grid, b, h, 0, 0), 1, 1, 0);
        const int64_t all = (job.end - job.begin) * width;
        for (int64_t i = 0; i < all; i += kUnpacked) {
          const int64_t count = std::min(kUnpacked, all - i);
          const uint8_t* codes = UnpackCodes(codec.bits, job.codes, head_first + job.begin * width + i, count, buffer);
          decoder.Decode({codes, head + i, scales, zeros, 1, count, 0, 0, 1, count, count, streams});
        }
        continue;
      }
      for (int64_t begin = 0; begin < width; begin += kChunk) {
        const int64_t count = std::min(kChunk, width - begin), first = run - begin % run;
        const int64_t groups = each ? 0 : 1 + CeilDiv(std::max<int64_t>(count - first, 0), run);
        int64_t loaded = -1;                         // index of the first of the scales in `scales`
        int64_t scaled = job.begin, known = scaled;  // the rows that they are of: from, to
        for (int64_t t = job.begin; t < job.end;) {
          const int64_t unpacked = std::min(together, job.end - t), end = t + unpacked;
          const uint8_t* codes = UnpackCodes(codec.bits, job.codes, head_first + t * width + begin, unpacked == 1 ? count : unpacked * width, buffer);
          while (t < end) {
            const auto index_of = [&](int64_t token) HWY_ATTR { return IndexOf(job.grid, b, h, token, begin); };
            int64_t rows = end - t;
            if (each) {
              const int64_t index = index_of(t);
              for (rows = 1; t + rows < end && index_of(t + rows) == index;) ++rows;
              if (loaded != index) load(index, job.grid.stride[3], count, 0);
              loaded = index;
            } else if (t == known) {
              scaled = t;
              known = std::min(job.end, t + std::max(together, kChunk / groups / together * together));
              if (groups == job.grid.stride[2] && job.grid.div[2] == 1 && (groups == 1 || job.grid.stride[3] == 1)) {
                load(index_of(t), 1, (known - t) * groups, 0);
              } else {
                for (int64_t k = t; k < known; ++k) load(index_of(k), job.grid.stride[3], groups, (k - t) * groups);
              }
            }
            float* const out = head + (t - job.begin) * job.token_stride + begin;
            const int64_t at = (t - scaled) * groups;
            decoder.Decode({codes, out, scales + at, zeros + at, rows, count, width, job.token_stride, groups, first, run, streams});
            codes += rows * width;
            t += rows;
          }
        }
      }
    }
  }
  if (streams) hwy::FlushStream();
}

void FinishRows(const DequantizeJob& job) {
  const Shape& shape = job.shape;
  if (job.hadamard == 0 && job.center == nullptr) return;
  for (int64_t b = 0; b < shape.batch; ++b) {
    for (int64_t h = 0; h < shape.heads; ++h) {
      for (int64_t t = job.begin; t < job.end; ++t) {
        float* row = job.out + b * job.batch_stride + h * job.head_stride + (t - job.begin) * job.token_stride;
        if (job.hadamard > 0) Rotate(row, row, shape.width, job.hadamard);
        if (job.center == nullptr) continue;
        const auto* center = reinterpret_cast<const uint8_t*>(job.center + h * shape.width);
        ForVectors(shape.width, [&](int64_t i, int64_t n) HWY_ATTR {
          StoreFloats(hn::Add(LoadFloats(row + i, n), WidenBF16(LoadHalves(center + i * 2, n))), row + i, n);
        });
      }
    }
  }
}

// nvfp4, mxfp4, mxfp8: codes with a factor per block, in one or two products.
void DequantizeBlocks(const DequantizeJob& job) {
  const Shape& shape = job.shape;
  const TypeInfo& info = Info(job.spec.type);
  const bool nv = info.block == kNvfp4Block, wide = info.bits == 8, run = job.token_stride == shape.width;
  const int64_t rows = run ? 1 : job.end - job.begin, length = run ? (job.end - job.begin) * shape.width : shape.width, lanes = LaneCount();
  static_assert(kChunk % kLargestSchemeBlock == 0);
  uint8_t buffer[kChunk + 16];
  const VF global = Value(job.global);
#if HWY_MAX_BYTES == 16
  const Table16 table(kE2M1Values);
#endif
  for (int64_t b = 0; b < shape.batch; ++b) {
    for (int64_t h = 0; h < shape.heads; ++h) {
      for (int64_t t = 0; t < rows; ++t) {
        float* row = job.out + b * job.batch_stride + h * job.head_stride + t * job.token_stride;
        const int64_t first = ((b * shape.heads + h) * shape.tokens + job.begin + t) * shape.width;
        for (int64_t begin = 0; begin < length; begin += kChunk) {
          const int64_t count = std::min(kChunk, length - begin), blocks = count / info.block;
          const uint8_t* codes = UnpackCodes(info.bits, job.codes, first + begin, count, buffer);
          const uint8_t* stored = job.scales + (first + begin) / info.block;
          alignas(64) float scales[kChunk / kNvfp4Block];
          int64_t known = 0;
          for (; nv && known + lanes <= blocks; known += lanes) {
            hn::StoreU(DecodeE4M3(hn::PromoteTo(DU(), hn::LoadU(DB(), stored + known))), DF(), scales + known);
          }
          for (int64_t i = known; i < blocks; ++i) scales[i] = nv ? FromE4M3(stored[i]) : FromE8M0(stored[i]);
          for (int64_t i = 0; i < blocks; ++i) {
            const VF scale = Value(scales[i]);
            const auto put = [&](int64_t d, VF value) HWY_ATTR {
              value = hn::Mul(value, scale);
              hn::StoreU(nv ? hn::Mul(value, global) : value, DF(), row + begin + d);
            };
            const int64_t end = (i + 1) * info.block;
            int64_t d = i * info.block;
#if HWY_MAX_BYTES == 16
            for (; !wide && d < end; d += 16) {
              VF values[4];
              table.LookUp<true>(codes + d, values);
              for (int k = 0; k < 4; ++k) put(d + 4 * k, values[k]);
            }
#endif
            for (; d < end; d += lanes) {
              const VU code = hn::PromoteTo(DU(), hn::LoadU(DB(), codes + d));
              put(d, wide ? DecodeE4M3(code) : DecodeE2M1(code));
            }
          }
        }
      }
    }
  }
}

void DequantizeTogether(const DequantizeJob& job) {
  const TypeInfo& info = Info(job.spec.type);
  if (info.family == Family::kScheme) {
    if (LlamaBlockBytes(info.type) > 0) DequantizeLlama(job);
    else DequantizeBlocks(job);
    return FinishRows(job);
  }
  const Codec codec = MakeCodec(job.spec);
  if (codec.kivi && TakesKivi(job.spec, job.shape.width, false) &&
      WithKiviType(codec.scale_type, [&](auto type) { DequantizeKivi<decltype(type)::value>(job, codec); })) {
    return FinishRows(job);
  }
  if (!WithCode(codec, [&](const auto& code) { DequantizeRows(job, codec, DecoderOf(code)); })) return kReferenceBackend.dequantize(job);
  FinishRows(job);
}

void Dequantize(const DequantizeJob& job) {
  if (job.hadamard == 0 && job.center == nullptr) return DequantizeTogether(job);
  // What is still to be done to rows is done while they are in the cache. Channels' blocks stay whole.
  constexpr int64_t kRows = 64;
  DequantizeJob part = job;
  for (int64_t t = job.begin; t < job.end; t = part.end) {
    part.begin = t;
    part.end = std::min(job.end, (t / kRows + 1) * kRows);
    part.out = job.out + (t - job.begin) * job.token_stride;
    DequantizeTogether(part);
  }
}

// ---- Quantize ----

const float kZeroRow[kChunk] = {};

// Codes in the order of the stream. Reserve, write bytes, Commit. Codes beyond what caches hold go past them.
class Packer {
 public:
  Packer(int bits, uint8_t* out, int64_t bytes) : bits_(bits), out_(out), streams_(StreamsTo(out, bytes)) {}
  uint8_t* Reserve(int64_t count) {
    if (bits_ == 8) return streams_ ? Staging(count) : out_;
    if (filled_ + count > 2 * kChunk) Flush();
    return buffer_ + filled_;
  }
  void Commit(int64_t count) {
    if (bits_ != 8) filled_ += count;
    else if (streams_) staged_ += count;
    else out_ += count;
  }
  void Finish() {
    if (streams_) Drain(true);
    if (bits_ != 8 && filled_ > 0) PackCodes(bits_, buffer_, filled_, out_);
    if (streams_) hwy::FlushStream();
  }

 private:
  static constexpr int64_t kStaged = 4096;

  void Flush() {
    const int64_t whole = filled_ / 8 * 8, bytes = whole * bits_ / 8;
    PackCodes(bits_, buffer_, whole, streams_ ? Staging(bytes) : out_);
    if (streams_) staged_ += bytes;
    else out_ += bytes;
    std::memmove(buffer_, buffer_ + whole, static_cast<size_t>(filled_ - whole));
    filled_ -= whole;
  }
  uint8_t* Staging(int64_t bytes) {
    if (staged_ + bytes > kStaged) Drain(false);
    return stage_ + staged_;
  }
  // Writes what is staged, an incomplete line only at the end.
  void Drain(bool last) {
    const hn::ScalableTag<uint8_t> d8;
    const auto lanes = static_cast<int64_t>(hn::Lanes(d8));
    const int64_t whole = staged_ / kLine * kLine;
    for (int64_t i = 0; i < whole; i += lanes) hn::Stream(hn::Load(d8, stage_ + i), d8, out_ + i);
    out_ += whole;
    staged_ -= whole;
    std::memmove(stage_, stage_ + whole, static_cast<size_t>(staged_));
    if (!last) return;
    std::memcpy(out_, stage_, static_cast<size_t>(staged_));
    out_ += staged_;
    staged_ = 0;
  }
  int bits_;
  uint8_t* out_;
  const bool streams_;
  int64_t filled_ = 0, staged_ = 0;
  uint8_t buffer_[2 * kChunk + 64];
  alignas(64) uint8_t stage_[kStaged + 64];
};

struct Range {
  VF lo, hi;
  HWY_INLINE void Add(VF x) {
    lo = hn::Min(lo, x);
    hi = hn::Max(hi, x);
  }
};
// No default member initializers: a compiler-made constructor would not be compiled for the target.
HWY_INLINE Range EmptyRange() { return {Value(INFINITY), Value(-INFINITY)}; }

// The largest magnitudes of x[0, count) in two partial results, so that one needn't wait for the other.
HWY_INLINE void AddMagnitudes(const float* x, int64_t count, VF* most, VF* other) {
  const int64_t lanes = LaneCount();
  int64_t i = 0;
  for (; i + 4 * lanes <= count; i += 4 * lanes) {
    const auto at = [&](int64_t k) HWY_ATTR { return hn::Abs(hn::LoadU(DF(), x + i + k * lanes)); };
    *most = hn::Max(*most, hn::Max(at(0), at(1)));
    *other = hn::Max(*other, hn::Max(at(2), at(3)));
  }
  for (; i < count; i += lanes) *most = hn::Max(*most, hn::Abs(LoadFloats(x + i, std::min(lanes, count - i))));
}

HWY_INLINE float MagnitudeOf(const float* x, int64_t count) {
  VF most = hn::Zero(DF()), other = most;
  AddMagnitudes(x, count, &most, &other);
  return hn::ReduceMax(DF(), hn::Max(most, other));
}

// Sum of formats/search.h's halving tree over values[0, count); `values` is overwritten and has room up to the next
// power of two, at least one vector.
float SumTree(float* values, int64_t count) {
  const int64_t lanes = LaneCount();
  int64_t padded = 1;
  while (padded < count) padded *= 2;
  std::fill(values + count, values + padded, 0.0f);
  const DF d;
  for (int64_t half = padded / 2; half >= 1; half /= 2) {
    if (half >= lanes) {
      for (int64_t i = 0; i < half; i += lanes) hn::StoreU(hn::Add(hn::LoadU(d, values + i), hn::LoadU(d, values + i + half)), d, values + i);
    } else {
      for (int64_t i = 0; i < half; ++i) values[i] = values[i] + values[i + half];
    }
  }
  return values[0];
}

constexpr int64_t kMostSearched = 512;       // elements of a token block that the vector search takes
constexpr int64_t kMostSearchedTokens = 64;  // tokens of a channel block, elements of a token block that is turned over
constexpr int64_t kSearchRows = HWY_MAX_BYTES == 16 ? 4 : 16;  // rows of `token` that are worked on at once

// A vector's worth of groups, one to a lane: their elements t stand at rows[t] + d.
struct Lanes {
  const float* const* rows;
  int64_t d, n, valid;
  HWY_INLINE VF At(int64_t t) const { return LoadFloats(rows[t] + d, n); }
};

// What candidates for their scales are made of. `top`: the largest scale.
struct Extent {
  VF lo, hi, amax, rms, top;
};

// Rows that can be encoded: their scales, zero points and factors stand in a Quantizer's arrays.
enum class ScaledBy { kRow, kVector, kEach };  // what shares a scale
struct ReadyRows {
  const float* const* rows;
  int64_t tokens, valid, width;
  int64_t groups;  // from a row's scales to those of the next
  int64_t ahead;   // bytes from a row to what should be fetched meanwhile, or 0
  ScaledBy by;
};

// All of a job that does not depend on the code; what does is below in QuantizerOf. A call between them does much: the
// smaller part has a copy for every code.
class Quantizer {
 public:
  // `quick`: the code has a QuickEncode.
  Quantizer(const QuantizeJob& job, const Codec& codec, bool quick)
      : job_(job), codec_(codec), width_(job.shape.width), has_zeros_(SizesOf(job.spec, job.shape).zeros > 0) {
    const int64_t lanes = LaneCount(), block = job.spec.block;
    // Values that were not looked at may be NaN, which no shortcut sees.
    // The largest magnitude has the last code, and a stored scale that is less by a rounding does not change that.
    within_ = job.spec.calibration == Calibration::kAbsmax && (job.spec.scale_type == ScaleType::kF32 || job.spec.scale_type == ScaleType::kBF16) &&
              Symmetric();
    plain_ = within_ && job.spec.scale_type == ScaleType::kF32;
    may_be_quick_ = quick && !(job.spec.calibration == Calibration::kGiven && job.options.non_finite == NonFinite::kPass);
    together_ = job.spec.axis == Axis::kToken && block % lanes == 0 && width_ % lanes == 0 && width_ <= kChunk &&
                CeilDiv(width_, block) * kSearchRows <= kChunk && job.grid.stride[2] == CeilDiv(width_, block) && job.grid.div[2] == 1 &&
                ((job.grid.stride[3] == 1 && job.grid.div[3] == block) || block >= width_);
    if (!together_) return;
    for (int64_t v = 0; v * lanes < width_; ++v) group_[v] = static_cast<uint16_t>(v * lanes / block);
  }

  // False where a transformed row is not finite: the reference then does the job.
  bool Run() {
    const Calibration calibration = job_.spec.calibration;
    Packer packer(codec_.bits, job_.codes, SizesOf(job_.spec, job_.shape).codes);
    if (calibration == Calibration::kGiven) return EncodeAll(&packer);
    *job_.global = 1.0f;
    if (job_.spec.scale_type == ScaleType::kE4M3) {
      largest_ = 0;
      ForBlocks([&](int64_t b, int64_t h, int64_t t, int64_t tokens, int64_t valid, const float* const* rows) {
        if (!FindLargest(valid, rows)) Calibrate(b, h, t, tokens, valid, rows, true);
      });
      if (job_.spec.axis == Axis::kTensor || job_.spec.axis == Axis::kHead) FinishWhole(true);
      looked_ = true;
      *job_.global = E4M3Global(largest_);
    }
    global_ = *job_.global;
    if (job_.spec.axis == Axis::kTensor || job_.spec.axis == Axis::kHead) {
      ForBlocks([&](int64_t b, int64_t h, int64_t t, int64_t tokens, int64_t valid, const float* const* rows) {
        Calibrate(b, h, t, tokens, valid, rows, false);
      });
      FinishWhole(false);
      return ok_ && EncodeAll(&packer);
    }
    ForBlocks([&](int64_t b, int64_t h, int64_t t, int64_t tokens, int64_t valid, const float* const* rows) {
      Calibrate(b, h, t, tokens, valid, rows, false);
      EncodeRows(b, h, t, tokens, valid, rows, &packer);
    });
    packer.Finish();
    return ok_;
  }

 protected:
  // ---- What depends on the code ----

  // factors_ of scales_[0, count); whether they hold for all of them.
  virtual bool Factors(int64_t count) = 0;
  // Squares of the errors that round trips make.
  virtual void Squares(Lanes x, VF scale, VF zero, float* out) const = 0;
  // SearchRun with a group in every lane: gives the bits of the best scales.
  virtual VU SearchLanes(const Lanes& x, const Extent& extent, VF* best_zero, VF* best_value) const = 0;
  // SearchRun of n blocks of level tables, at most as many as a vector has lanes.
  virtual void SearchBlocks(int64_t index, const float* const* blocks, int64_t n) = 0;
  // Rows whose factors hold for all of them.
  virtual void EncodeQuickly(const ReadyRows& ready, Packer* packer) const = 0;
  // EncodeRun.
  virtual void EncodeSlowly(const float* x, int64_t count, uint8_t* codes, const float* scales, const float* zeros, bool each) const = 0;

  bool Transformed() const { return job_.source_type != Type::f32 || job_.center != nullptr || job_.hadamard > 0; }

  // A row as the coders see it: the caller's memory where nothing is done to it, else `out`.
  const float* Row(int64_t b, int64_t h, int64_t t, float* out) {
    const int64_t first = b * job_.batch_stride + h * job_.head_stride + t * job_.token_stride;
    if (!Transformed()) return static_cast<const float*>(job_.source) + first;
    const int64_t size = job_.source_type == Type::f32 ? 4 : 2;
    Fetch(static_cast<const uint8_t*>(job_.source) + first * size, kSearchRows * job_.token_stride * size, width_ * size);
    const bool as_it_is = job_.source_type == Type::f32 && job_.center == nullptr;
    const float* row = static_cast<const float*>(job_.source) + first;
    if (!as_it_is) {
      Widen(job_.source_type, static_cast<const uint8_t*>(job_.source) + first * size, out, width_);
      row = out;
    }
    if (job_.center != nullptr) {
      const auto* center = reinterpret_cast<const uint8_t*>(job_.center + h * width_);
      ForVectors(width_, [&](int64_t i, int64_t n) HWY_ATTR {
        StoreFloats(hn::Sub(LoadFloats(out + i, n), WidenBF16(LoadHalves(center + i * 2, n))), out + i, n);
      });
    }
    if (job_.hadamard > 0) Rotate(row, out, width_, job_.hadamard);
    if (!looked_ && (job_.center != nullptr || job_.hadamard > 0)) ok_ = ok_ && FirstNonFinite(Type::f32, out, width_) < 0;
    return out;
  }

  // Calls f(b, h, first token, tokens, valid tokens, rows) for each block of tokens that is worked on at once: a channel
  // block, kSearchRows rows, or one row.
  template <typename F>
  void ForBlocks(const F& f) {
    const Shape& shape = job_.shape;
    const bool channel = job_.spec.axis == Axis::kChannel;
    const int64_t block = channel ? job_.spec.block : job_.spec.axis == Axis::kToken ? kSearchRows : 1;
    const float* rows[kMostRows];
    for (int64_t b = 0; b < shape.batch; ++b) {
      for (int64_t h = 0; h < shape.heads; ++h) {
        for (int64_t t = 0; t < shape.tokens; t += block) {
          const int64_t tokens = std::min(block, shape.tokens - t), valid = std::clamp<int64_t>(job_.valid - t, 0, tokens);
          for (int64_t i = 0; i < valid; ++i) rows[i] = Row(b, h, t + i, job_.scratch + i * width_);
          f(b, h, t, tokens, valid, rows);
        }
      }
    }
  }

  // ---- Calibration ----

  void Calibrate(int64_t b, int64_t h, int64_t t, int64_t tokens, int64_t valid, const float* const* rows, bool only_largest) {
    switch (job_.spec.axis) {
      case Axis::kToken:
        CalibrateTokens(IndexOf(job_.grid, b, h, t, 0), tokens, valid, rows, only_largest);
        return;
      case Axis::kChannel:
        CalibrateBlock(IndexOf(job_.grid, b, h, t, 0), valid, rows, only_largest);
        return;
      default: {
        // Tensor and head: only the range is kept; FinishWhole makes the scale.
        if (job_.spec.axis == Axis::kHead && h != whole_head_) {
          if (whole_head_ >= 0) FinishWhole(only_largest);
          whole_head_ = h;
        }
        if (valid == 0) return;
        Range range = EmptyRange();
        const int64_t lanes = LaneCount();
        int64_t d = 0;
        for (; d + lanes <= width_; d += lanes) range.Add(hn::LoadU(DF(), rows[0] + d));
        whole_lo_ = std::min(whole_lo_, hn::ReduceMin(DF(), range.lo));
        whole_hi_ = std::max(whole_hi_, hn::ReduceMax(DF(), range.hi));
        for (; d < width_; ++d) {
          whole_lo_ = std::min(whole_lo_, rows[0][d]);
          whole_hi_ = std::max(whole_hi_, rows[0][d]);
        }
      }
    }
  }

  void FinishWhole(bool only_largest) {
    const int64_t index = job_.spec.axis == Axis::kHead ? std::max<int64_t>(whole_head_, 0) : 0;
    const float lo = whole_lo_ > whole_hi_ ? 0.0f : whole_lo_, hi = whole_lo_ > whole_hi_ ? 0.0f : whole_hi_;
    whole_lo_ = INFINITY;
    whole_hi_ = -INFINITY;
    whole_head_ = -1;
    if (only_largest) largest_ = std::max(largest_, TopScale(lo, hi, 0));
    else StoreOne(index, lo, hi);
  }

  // The largest scale of any group of these rows, where that needs no scale of a group: rounded operations keep the order.
  bool FindLargest(int64_t valid, const float* const* rows) {
    if (valid == 0 || job_.spec.axis == Axis::kTensor || job_.spec.axis == Axis::kHead) return false;
    const int64_t block = job_.spec.block;
    if (codec_.family == Family::kLevels) {
      const bool whole = block >= 16 && block <= kMostSearched && (block & (block - 1)) == 0 && width_ % block == 0;
      if (!whole || job_.spec.axis != Axis::kToken) return false;
      const bool run = Transformed() || job_.token_stride == width_;
      const int64_t together = run ? valid : 1;
      float most = 0;
      for (int64_t k = 0; k < valid; k += together) most = std::max(most, LargestSquareSum(rows[k], together * width_ / block, block));
      largest_ = std::max(largest_, TopScale(0, 0, std::sqrt(most / static_cast<float>(block))));
      return true;
    }
    if (!Symmetric()) return false;
    VF most = hn::Zero(DF()), other = most;
    for (int64_t k = 0; k < valid; ++k) AddMagnitudes(rows[k], width_, &most, &other);
    const float amax = hn::ReduceMax(DF(), hn::Max(most, other));
    largest_ = std::max(largest_, TopScale(-amax, amax, 0));
    return true;
  }

  bool Symmetric() const { return codec_.family == Family::kFloatCode || codec_.is_signed; }

  // The largest scale that a group may get, before it is stored.
  float TopScale(float lo, float hi, float rms) const {
    if (codec_.family == Family::kLevels) return rms * RmsRatio(kRmsRatioCount - 1);
    if (Symmetric()) return std::max(std::fabs(lo), std::fabs(hi)) / codec_.top;
    if (job_.spec.calibration == Calibration::kMinmax || codec_.zero_offset == 0) return (std::max(hi, 0.0f) - std::min(lo, 0.0f)) / codec_.top;
    return std::max((hi - lo) / codec_.top, std::max({lo, -hi, 0.0f}) / static_cast<float>(codec_.zero_offset));
  }

  StoredScale Store(float scale) const {
    StoredScale stored = StoreScale(job_.spec.scale_type, scale, global_);
    if (codec_.e8m0_zero && job_.spec.scale_type == ScaleType::kE8M0 && stored.bits == 0) stored.value = 0;
    return stored;
  }
  int32_t ZeroPoint(float low, float scale) const {
    return EncodeInteger(-low, scale, 0, -codec_.zero_offset, static_cast<int32_t>(codec_.top) + codec_.zero_offset);
  }
  void Put(int64_t index, const StoredScale& stored, int32_t zero) {
    PutScale(job_.spec.scale_type, job_.scales, index, stored.bits);
    if (has_zeros_) job_.zeros[index] = static_cast<uint8_t>(zero + codec_.zero_offset);
  }

  // absmax and minmax.
  void StoreOne(int64_t index, float lo, float hi) {
    const StoredScale stored = Store(TopScale(lo, hi, 0));
    Put(index, stored, Symmetric() ? 0 : ZeroPoint(std::min(lo, 0.0f), stored.value));
  }

  void CalibrateRun(int64_t index, const float* x, int64_t count, bool only_largest) {
    float lo = INFINITY, hi = -INFINITY;
    if (OnlyMagnitudes()) {
      hi = MagnitudeOf(x, count);
      lo = -hi;
    } else {
      const int64_t lanes = LaneCount();
      Range range = EmptyRange();
      int64_t i = 0;
      for (; i + lanes <= count; i += lanes) range.Add(hn::LoadU(DF(), x + i));
      if (i > 0) {
        lo = hn::ReduceMin(DF(), range.lo);
        hi = hn::ReduceMax(DF(), range.hi);
      }
      for (; i < count; ++i) {
        lo = std::min(lo, x[i]);
        hi = std::max(hi, x[i]);
      }
    }
    if (count == 0) lo = hi = 0;
    float rms = 0;
    if (codec_.family == Family::kLevels && count > 0) {
      ForVectors(count, [&](int64_t k, int64_t n) HWY_ATTR {
        const VF v = LoadFloats(x + k, n);
        StoreFloats(hn::Mul(v, v), errors_ + k, n);
      });
      rms = std::sqrt(SumTree(errors_, count) / static_cast<float>(count));
    }
    if (only_largest) {
      largest_ = std::max(largest_, TopScale(lo, hi, rms));
    } else if (job_.spec.calibration == Calibration::kMse) {
      SearchRun(index, x, count, lo, hi, rms);
    } else {
      StoreOne(index, lo, hi);
    }
  }

  // Scale and zero point of candidate i for scalars.
  StoredScale Candidate(int i, float lo, float hi, float rms, int32_t* zero) const {
    *zero = 0;
    if (codec_.family == Family::kLevels) return Store(rms * RmsRatio(i));
    if (Symmetric()) return Store((Ratio(i) * std::max(std::fabs(lo), std::fabs(hi))) / codec_.top);
    const StoredScale stored = Store(Ratio(i) * TopScale(lo, hi, rms));
    const bool with_zero = codec_.zero_offset == 0;
    const float from = with_zero ? std::min(lo, 0.0f) : lo, to = with_zero ? std::max(hi, 0.0f) : hi;
    *zero = ZeroPoint((from + to) * 0.5f - (Ratio(i) * (to - from)) * 0.5f, stored.value);
    return stored;
  }

  // Candidates from the largest scale down, an equal error winning, so that the first of the smallest errors is kept as
  // in the other order. A signed code cannot pass the end of its range: once the largest element alone costs more than
  // the best sum, every smaller scale does too (rounding is monotonic, and a sum is never below one of its terms).
  void SearchRun(int64_t index, const float* x, int64_t count, float lo, float hi, float rms) {
    const bool levels = codec_.family == Family::kLevels;
    const float amax = std::max(std::fabs(lo), std::fabs(hi));
    const bool prune = codec_.family == Family::kInteger && codec_.is_signed;
    const int64_t lanes = LaneCount(), whole = count / lanes;
    const float *vectors[kMostSearched / 4], *const tail = x + whole * lanes;
    for (int64_t k = 0; k < whole; ++k) vectors[k] = x + k * lanes;
    StoredScale best{}, last{};
    int32_t best_zero = 0, last_zero = 0;
    float best_error = 0;
    bool any = false;
    for (int i = (levels ? kRmsRatioCount : kRatioCount) - 1; i >= 0; --i) {
      int32_t zero;
      const StoredScale stored = Candidate(i, lo, hi, rms, &zero);
      if (prune && any) {
        const float end = amax - codec_.top * stored.value;
        if (end > 0 && end * end > best_error) break;
      }
      // The same scale: the same error.
      if (any && ((stored.bits == best.bits && zero == best_zero) || (stored.bits == last.bits && zero == last_zero))) continue;
      last = stored;
      last_zero = zero;
      const VF scale = Value(stored.value), zero_point = Value(static_cast<float>(zero));
      Squares({vectors, 0, lanes, whole}, scale, zero_point, errors_);
      if (whole * lanes < count) Squares({&tail, 0, count - whole * lanes, 1}, scale, zero_point, errors_ + whole * lanes);
      const float error = count == 0 ? 0.0f : SumTree(errors_, count);
      if (any && !(error <= best_error)) continue;
      best = stored;
      best_zero = zero;
      best_error = error;
      any = true;
    }
    Put(index, best, best_zero);
  }

  // Whether SearchBlocks takes a block.
  bool SteppedBlocks() const {
    const int64_t block = job_.spec.block;
    return codec_.family == Family::kLevels && block % kStepped == 0 && block <= kMostStepped && (block & (block - 1)) == 0 && width_ % block == 0;
  }

  // Sums of squares and largest magnitudes of n blocks for SearchBlocks, whose copies share this.
  HWY_NOINLINE void MeasureBlocks(const float* const* blocks, int64_t n, float* sums, float* limits) const {
    for (int64_t g = 0; g < n; ++g) {
      sums[g] = LargestSquareSum(blocks[g], 1, job_.spec.block);
      BlockMagnitudes(blocks[g], 1, job_.spec.block, limits + g);
    }
  }

  bool OnlyMagnitudes() const { return Symmetric() || codec_.family == Family::kLevels; }

  // Ranges of all channels. With small vectors one row after the other, as memory is read ahead best for a single stream.
  void RangeOfRows(int64_t valid, const float* const* rows) {
    constexpr int kTogether = HWY_MAX_BYTES == 16 ? 1 : 4;
    const bool magnitudes = OnlyMagnitudes();
    std::fill(lo_, lo_ + width_, magnitudes || valid == 0 ? 0.0f : INFINITY);
    std::fill(hi_, hi_ + width_, magnitudes || valid == 0 ? 0.0f : -INFINITY);
    for (int64_t t = 0; t < valid; t += kTogether) {
      const float* x[kTogether];
      for (int k = 0; k < kTogether; ++k) x[k] = rows[std::min(t + k, valid - 1)];
      if (magnitudes) AddMagnitudesOf(x);
      else AddRangesOf(x);
    }
  }
  template <int kRows>
  void AddMagnitudesOf(const float* const (&rows)[kRows]) {
    const int64_t lanes = LaneCount();
    // In order as integers too.
    const VI mask = hn::Set(DI(), 0x7fffffff);
    int64_t left = width_;
    const float* x[kRows];
    float* to = hi_;
    for (int r = 0; r < kRows; ++r) x[r] = rows[r];
    const auto next = [&](int64_t offset, int64_t n) HWY_ATTR {
      VI most = hn::BitCast(DI(), LoadFloats(to + offset, n));
      HWY_UNROLL(4)
      for (int r = 0; r < kRows; ++r) most = hn::Max(most, hn::And(hn::BitCast(DI(), LoadFloats(x[r] + offset, n)), mask));
      StoreFloats(hn::BitCast(DF(), most), to + offset, n);
    };
    const auto step = [&](int64_t n) HWY_ATTR {
      left -= n;
      to += n;
      HWY_UNROLL(4)
      for (int r = 0; r < kRows; ++r) x[r] += n;
    };
    for (; left >= 4 * lanes; step(4 * lanes)) {
      HWY_UNROLL(4)
      for (int k = 0; k < 4; ++k) next(k * lanes, lanes);
    }
    for (; left > 0; step(std::min(left, lanes))) next(0, std::min(left, lanes));
  }
  template <int kRows>
  void AddRangesOf(const float* const (&rows)[kRows]) {
    ForVectors(width_, [&](int64_t i, int64_t n) HWY_ATTR {
      Range range{LoadFloats(lo_ + i, n), LoadFloats(hi_ + i, n)};
      for (int r = 0; r < kRows; ++r) range.Add(LoadFloats(rows[r] + i, n));
      StoreFloats(range.lo, lo_ + i, n);
      StoreFloats(range.hi, hi_ + i, n);
    });
  }

  void CalibrateBlock(int64_t index, int64_t valid, const float* const* rows, bool only_largest) {
    const bool whole = width_ <= kChunk;
    if (whole) RangeOfRows(valid, rows);
    if (whole && plain_ && !only_largest) PlainScales(index, width_);
    else ForVectors(width_, [&](int64_t d, int64_t n) HWY_ATTR { CalibrateChannels(index + d, whole ? d : -1, {rows, d, n, valid}, whole, only_largest); });
    if (only_largest || !whole) return;
    PutFactors(width_);
    loaded_ = index;
  }

  // absmax and minmax of rows whose groups are whole vectors: all ranges, then all scales.
  void CalibrateRanges(int64_t index, int64_t tokens, int64_t valid, const float* const* rows, bool only_largest) {
    const int64_t block = job_.spec.block, lanes = LaneCount(), groups = CeilDiv(width_, block);
    const bool magnitudes = OnlyMagnitudes(), even = magnitudes && width_ % block == 0 && block % 8 == 0;
    // Rows that follow each other in memory are one run of blocks.
    const bool run = even && valid == tokens && (Transformed() || job_.token_stride == width_);
    if (run) BlockMagnitudes(rows[0], tokens * groups, block, hi_);
    for (int64_t t = 0; t < tokens && !run; ++t) {
      if (even) {
        if (t < valid) BlockMagnitudes(rows[t], groups, block, hi_ + t * groups);
        else std::fill(hi_ + t * groups, hi_ + (t + 1) * groups, 0.0f);
        continue;
      }
      for (int64_t d = 0; d < width_; d += block) {
        const float* x = t < valid ? rows[t] + d : kZeroRow;
        const int64_t count = std::min(block, width_ - d), group = t * groups + d / block;
        if (magnitudes) {
          hi_[group] = MagnitudeOf(x, count);
        } else {
          Range range = EmptyRange();
          for (int64_t i = 0; i < count; i += lanes) range.Add(hn::LoadU(DF(), x + i));
          lo_[group] = hn::ReduceMin(DF(), range.lo);
          hi_[group] = hn::ReduceMax(DF(), range.hi);
        }
      }
    }
    const int64_t count = tokens * groups;
    if (plain_ && !only_largest) PlainScales(index, count);
    else ForVectors(count, [&](int64_t g, int64_t n) HWY_ATTR { CalibrateChannels(index + g, g, {nullptr, g, n, 1}, true, only_largest); });
    if (!only_largest) PutFactors(count);
  }

  // Groups of some rows. A search works on a group per lane: the groups stand in `tile_` as the channels of a block do.
  void CalibrateTokens(int64_t index, int64_t tokens, int64_t valid, const float* const* rows, bool only_largest) {
    const int64_t block = job_.spec.block, lanes = LaneCount(), groups = CeilDiv(width_, block);
    const bool search = job_.spec.calibration == Calibration::kMse;
    if (together_ && !search) return CalibrateRanges(index, tokens, valid, rows, only_largest);
    const bool stepped = search && !only_largest && SteppedBlocks();
    const bool turned = !stepped && search && block <= kMostSearchedTokens && width_ % block == 0 && 2 * valid * groups >= lanes;
    const float* tile[kMostSearchedTokens];
    for (int64_t i = 0; turned && i < block; ++i) tile[i] = tile_ + i * lanes;
    for (int64_t group = 0; (stepped || turned) && group < valid * groups; group += lanes) {
      const int64_t n = std::min(lanes, valid * groups - group);
      const float* from[kMaxLanes];
      for (int64_t g = 0; g < n; ++g) from[g] = rows[(group + g) / groups] + (group + g) % groups * block;
      if (stepped) {
        SearchBlocks(index + group, from, n);
        continue;
      }
      int64_t i = 0;
      for (; n == lanes && i + lanes <= block; i += lanes) {
        Transpose(from, tile_ + i * lanes);
        for (int64_t g = 0; g < n; ++g) from[g] += lanes;
      }
      for (int64_t k = 0; i + k < block; ++k) {
        for (int64_t g = 0; g < n; ++g) std::memcpy(tile_ + (i + k) * lanes + g, from[g] + k, 4);
      }
      CalibrateChannels(index + group, together_ ? group : -1, {tile, 0, n, block}, false, only_largest);
    }
    int64_t token = stepped || turned ? valid : 0;
    const bool rest = stepped || token < tokens;
    for (; token < tokens; ++token) {
      for (int64_t d = 0, group = token * groups; d < width_; d += block, ++group) {
        const float* x = token < valid ? rows[token] + d : kZeroRow;
        CalibrateRun(index + group, x, token < valid ? std::min(block, width_ - d) : 0, only_largest);
      }
    }
    if (!together_ || only_largest) return;
    if (rest) LoadTogether(index, tokens * groups);
    else PutFactors(tokens * groups);
  }

  // Stored scales of whole rows for EncodeRows.
  void LoadTogether(int64_t index, int64_t count) {
    LoadScales(codec_, job_.scales, has_zeros_ ? job_.zeros : nullptr, *job_.global, index, 1, count, scales_, zeros_);
    PutFactors(count);
  }

  void PutFactors(int64_t count) { quick_ = may_be_quick_ && Factors(count); }

  // absmax with f32 scales of the `count` groups whose largest magnitudes stand in hi_: what CalibrateChannels does, without its
  // choices.
  void PlainScales(int64_t index, int64_t count) {
    auto* stored = reinterpret_cast<float*>(job_.scales) + index;
    const VF top = Value(codec_.top), most = Value(3.4028234663852886e38f);
    ForVectors(count, [&](int64_t i, int64_t n) HWY_ATTR {
      const VF scale = hn::Min(hn::Div(LoadFloats(hi_ + i, n), top), most);
      StoreFloats(scale, scales_ + i, n);
      StoreFloats(scale, stored + i, n);
    });
  }

  // The halving tree over `count` vectors of nothing below 0; its first two levels without memory.
  template <typename F>
  HWY_INLINE VF TreeOf(int64_t count, const F& element) const {
    VF sums[kMostSearchedTokens / 4];
    int64_t padded = 4;
    while (padded < count) padded *= 2;
    const int64_t quarter = padded / 4;
    const auto leaf = [&](int64_t i) HWY_ATTR { return i < count ? element(i) : hn::Zero(DF()); };
    for (int64_t i = 0; i < quarter; ++i) {
      sums[i] = hn::Add(hn::Add(leaf(i), leaf(i + 2 * quarter)), hn::Add(leaf(i + quarter), leaf(i + 3 * quarter)));
    }
    for (int64_t m = quarter / 2; m >= 1; m /= 2) {
      for (int64_t i = 0; i < m; ++i) sums[i] = hn::Add(sums[i], sums[i + m]);
    }
    return sums[0];
  }

  Stored StoreLanes(VF scale) const {
    Stored stored = StoreScales(job_.spec.scale_type, scale, Value(global_));
    if (codec_.e8m0_zero && job_.spec.scale_type == ScaleType::kE8M0) {
      stored.value = hn::IfThenElseZero(hn::RebindMask(DF(), hn::Ne(stored.bits, hn::Zero(DU()))), stored.value);
    }
    return stored;
  }
  VF ZeroPoints(VF low, VF scale) const {
    VF q = hn::Round(hn::Div(hn::Neg(low), scale));
    q = hn::IfThenElseZero(hn::And(hn::Eq(q, q), hn::Not(hn::Eq(scale, hn::Zero(DF())))), q);
    const auto offset = static_cast<float>(codec_.zero_offset);
    return hn::Min(hn::Max(q, Value(-offset)), Value(codec_.top + offset));
  }

  // `ready`: the ranges of x stand in lo_ and hi_. The scales go to scales_[slot] too.
  void CalibrateChannels(int64_t index, int64_t slot, const Lanes& x, bool ready, bool only_largest) {
    const int64_t d = x.d, n = x.n, valid = x.valid;
    const VF none = hn::Zero(DF());
    VF lo = none, hi = none, amax;
    if (ready) {
      hi = LoadFloats(hi_ + d, n);
      if (!OnlyMagnitudes()) lo = LoadFloats(lo_ + d, n);
    } else if (valid > 0 && codec_.family != Family::kLevels) {
      Range range = EmptyRange();
      for (int64_t t = 0; t < valid; ++t) range.Add(x.At(t));
      lo = range.lo;
      hi = range.hi;
    }
    amax = hn::Max(hn::Abs(lo), hn::Abs(hi));
    VF rms = none;
    if (codec_.family == Family::kLevels && valid > 0) {
      rms = hn::Sqrt(hn::Div(TreeOf(valid, [&](int64_t t) HWY_ATTR {
                               const VF v = x.At(t);
                               return hn::Mul(v, v);
                             }),
                             Value(static_cast<float>(valid))));
      // No element is beyond it: what the search asks of the largest magnitude.
      amax = hn::Mul(rms, Value(1.001f * std::sqrt(static_cast<float>(valid))));
    }
    VF top;
    const VF range_top = Value(codec_.top);
    if (codec_.family == Family::kLevels) top = hn::Mul(rms, Value(RmsRatio(kRmsRatioCount - 1)));
    else if (Symmetric()) top = hn::Div(amax, range_top);
    else if (job_.spec.calibration == Calibration::kMinmax || codec_.zero_offset == 0) top = hn::Div(hn::Sub(hn::Max(hi, none), hn::Min(lo, none)), range_top);
    else top = hn::Max(hn::Div(hn::Sub(hi, lo), range_top),
                       hn::Div(hn::Max(hn::Max(lo, hn::Neg(hi)), none), Value(static_cast<float>(codec_.zero_offset))));
    if (only_largest) {
      alignas(64) float tops[kMaxLanes];
      hn::StoreU(top, DF(), tops);
      for (int64_t i = 0; i < n; ++i) largest_ = std::max(largest_, tops[i]);
      return;
    }
    VU bits;
    VF zero = none, value;
    if (job_.spec.calibration != Calibration::kMse) {
      const Stored stored = StoreLanes(top);
      bits = stored.bits;
      value = stored.value;
      if (!Symmetric()) zero = ZeroPoints(hn::Min(lo, none), stored.value);
    } else {
      bits = SearchLanes(x, {lo, hi, amax, rms, top}, &zero, &value);
    }
    if (slot >= 0) {
      // For EncodeRows, as LoadScales would give them.
      StoreFloats(value, scales_ + slot, n);
      StoreFloats(zero, zeros_ + slot, n);
    }
    if (n == LaneCount() && job_.spec.scale_type == ScaleType::kF32 && !has_zeros_) {
      return hn::StoreU(bits, DU(), reinterpret_cast<uint32_t*>(job_.scales) + index);
    }
    alignas(64) uint32_t stored_bits[kMaxLanes];
    alignas(64) float zeros[kMaxLanes];
    hn::StoreU(bits, DU(), stored_bits);
    hn::StoreU(zero, DF(), zeros);
    for (int64_t i = 0; i < n; ++i) {
      Put(index + i, {stored_bits[i], 0}, static_cast<int32_t>(zeros[i]));
    }
  }

  // ---- Encoding ----

  bool EncodeAll(Packer* packer) {
    const Shape& shape = job_.shape;
    if (!Transformed() && job_.token_stride == width_ && job_.valid == shape.tokens && job_.grid.stride[3] == 0 && job_.grid.stride[2] == 0) {
      // One scale for all tokens of a head, and they lie side by side: rows may be of any width.
      const int64_t all = shape.tokens * width_;
      for (int64_t b = 0; b < shape.batch; ++b) {
        for (int64_t h = 0; h < shape.heads; ++h) {
          const float* x = static_cast<const float*>(job_.source) + b * job_.batch_stride + h * job_.head_stride;
          const float* rows[kSearchRows];
          LoadTogether(IndexOf(job_.grid, b, h, 0, 0), 1);
          for (int64_t i = 0; i < all;) {
            const int64_t width = std::min(kChunk, all - i), count = std::min(kSearchRows, (all - i) / width);
            for (int64_t k = 0; k < count; ++k, i += width) rows[k] = x + i;
            // The processor's own prefetching ends at each page of memory.
            EncodeReady({rows, count, count, width, 0, 2 * kChunk * 4, ScaledBy::kRow}, packer);
          }
        }
      }
      packer->Finish();
      return ok_;
    }
    ForBlocks([&](int64_t b, int64_t h, int64_t t, int64_t tokens, int64_t valid, const float* const* rows) {
      EncodeRows(b, h, t, tokens, valid, rows, packer);
    });
    packer->Finish();
    return ok_;
  }

  void EncodeReady(const ReadyRows& ready, Packer* packer) {
    if (quick_) return EncodeQuickly(ready, packer);
    const float *scales = scales_, *zeros = zeros_;
    for (int64_t k = 0; k < ready.tokens; ++k, scales += ready.groups, zeros += ready.groups) {
      const bool some = k < ready.valid;
      if (ready.ahead != 0 && some) Fetch(ready.rows[k], ready.ahead, ready.width * 4);
      const float* x = some ? ready.rows[k] : kZeroRow;
      uint8_t* codes = packer->Reserve(ready.width);
      if (ready.by != ScaledBy::kVector) {
        EncodeSlowly(x, ready.width, codes, scales, zeros, ready.by == ScaledBy::kEach);
      } else {
        // The ranges are not needed any more.
        const ScaleByVector<true> at{{scales, zeros, nullptr}, group_};
        ForVectors(ready.width, [&](int64_t i, int64_t n) HWY_ATTR {
          VF scale, zero;
          at(i, n, &scale, &zero);
          StoreFloats(scale, hi_ + i, n);
          StoreFloats(zero, lo_ + i, n);
        });
        EncodeSlowly(x, ready.width, codes, hi_, lo_, true);
      }
      packer->Commit(ready.width);
    }
  }

  void EncodeRows(int64_t b, int64_t h, int64_t t, int64_t tokens, int64_t valid, const float* const* rows, Packer* packer) {
    const bool given = job_.spec.calibration == Calibration::kGiven;
    // Scales come from a pass of their own over the rows: without this the memory would idle here and the core there.
    const int64_t ahead = Transformed() ? 0 : 2 * tokens * job_.token_stride * 4;
    if (together_) {
      const int64_t groups = CeilDiv(width_, job_.spec.block);
      if (given) LoadTogether(IndexOf(job_.grid, b, h, t, 0), tokens * groups);
      return EncodeReady({rows, tokens, valid, width_, groups, ahead, groups == 1 ? ScaledBy::kRow : ScaledBy::kVector}, packer);
    }
    if (job_.spec.axis == Axis::kChannel && !given && width_ <= kChunk) {
      return EncodeReady({rows, tokens, valid, width_, 0, ahead, ScaledBy::kEach}, packer);
    }
    const bool each = job_.grid.stride[3] != 0 && job_.grid.div[3] == 1;
    const int64_t run = job_.grid.stride[3] == 0 ? width_ : job_.grid.div[3];
    const uint8_t* zeros = has_zeros_ ? job_.zeros : nullptr;
    const float global = *job_.global;
    for (int64_t k = 0; k < tokens; ++k) {
      for (int64_t begin = 0; begin < width_; begin += kChunk) {
        const int64_t count = std::min(kChunk, width_ - begin);
        const float* x = k < valid ? rows[k] + begin : kZeroRow;
        uint8_t* codes = packer->Reserve(count);
        int64_t index = IndexOf(job_.grid, b, h, t + k, begin);
        if (each) {
          if (loaded_ != index) {
            LoadScales(codec_, job_.scales, zeros, global, index, job_.grid.stride[3], count, scales_, zeros_);
            loaded_ = index;
          }
          EncodeSlowly(x, count, codes, scales_, zeros_, true);
        } else {
          for (int64_t i = 0; i < count; index += job_.grid.stride[3]) {
            const int64_t n = i == 0 && begin > 0 ? std::min(count, run - begin % run) : std::min(count - i, run);
            const Scale scale = LoadScaleAt(codec_, job_.scales, zeros, global, index);
            const auto zero = static_cast<float>(scale.zero);
            EncodeSlowly(x + i, n, codes + i, &scale.value, &zero, false);
            i += n;
          }
        }
        packer->Commit(count);
      }
    }
  }

 public:
  static constexpr int64_t kMostRows = 1024;  // of a channel block

 protected:
  const QuantizeJob& job_;
  const Codec& codec_;
  const int64_t width_;
  const bool has_zeros_;
  bool ok_ = true, looked_ = false;  // looked_: ok_ is about all rows
  float global_ = 1.0f, largest_ = 0.0f;
  float whole_lo_ = INFINITY, whole_hi_ = -INFINITY;
  int64_t whole_head_ = -1;
  int64_t loaded_ = -1;  // index of the first scale in scales_
  alignas(64) float tile_[kMostSearchedTokens * kMaxLanes];
  alignas(64) float errors_[kMostSearched + kMaxLanes];
  bool may_be_quick_ = false, together_ = false, within_ = false, plain_ = false;
  bool quick_ = false;  // whether factors_ holds for all of scales_
  uint16_t group_[kChunk / 4] = {};
  // Of the groups or channels that are worked on.
  alignas(64) float lo_[kChunk], hi_[kChunk], scales_[kChunk], zeros_[kChunk] = {}, factors_[kChunk];
};

template <typename C>
class QuantizerOf final : public Quantizer {
 public:
  QuantizerOf(const QuantizeJob& job, const Codec& codec, const C& code) : Quantizer(job, codec, C::kQuick && code.quick()), code_(code) {}

 private:
  bool Factors(int64_t count) override {
    MF all = hn::Eq(hn::Zero(DF()), hn::Zero(DF()));
    if constexpr (C::kQuick) {
      ForVectors(count, [&](int64_t i, int64_t n) HWY_ATTR {
        MF sound;
        const VF factor = code_.Factor(LoadFloats(scales_ + i, n), &sound);
        if (n < LaneCount()) sound = hn::Or(sound, hn::Not(hn::FirstN(DF(), static_cast<size_t>(n))));
        all = hn::And(all, sound);
        StoreFloats(factor, factors_ + i, n);
      });
    }
    return hn::AllTrue(DF(), all);
  }

  HWY_INLINE VF RoundTrip(VF x, VF scale, VF zero) const {
    if constexpr (C::kLevels) {
      VU code;
      const VF level = code_.Nearest(hn::Div(x, scale), &code);
      return hn::IfThenElseZero(hn::Not(hn::Eq(scale, hn::Zero(DF()))), hn::Mul(level, scale));
    } else if constexpr (C::kSigned) {
      return code_.RoundTrip(x, scale, zero);
    } else {
      return code_.Decode(hn::BitCast(DU(), code_.Encode(x, scale, zero)), scale, zero);
    }
  }

  void Squares(Lanes x, VF scale, VF zero, float* out) const override {
    for (int64_t t = 0; t < x.valid; ++t) {
      const VF v = x.At(t), e = hn::Sub(v, RoundTrip(v, scale, zero));
      StoreFloats(hn::Mul(e, e), out + t * x.n, x.n);
    }
  }

  HWY_INLINE VF RoughSum(const Lanes& x, VF factor, VF scale, VF zero) const {
    VF error = hn::Zero(DF());
    const auto* const* rows = x.rows;
    const int64_t d = x.d, n = x.n, valid = x.valid;
    const auto sum = [&](const auto& load) HWY_ATTR {
      VF other = hn::Zero(DF());
      int64_t t = 0;
      for (; t + 2 <= valid; t += 2) {
        const VF e = code_.Rough(load(t), factor, scale, zero), f = code_.Rough(load(t + 1), factor, scale, zero);
        error = hn::MulAdd(e, e, error);
        other = hn::MulAdd(f, f, other);
      }
      if (t < valid) {
        const VF e = code_.Rough(load(t), factor, scale, zero);
        error = hn::MulAdd(e, e, error);
      }
      error = hn::Add(error, other);
    };
    // A tile's rows follow each other, and have whole vectors.
    if (rows[0] == tile_) sum([&](int64_t t) HWY_ATTR { return hn::Load(DF(), tile_ + t * LaneCount()); });
    else if (n == LaneCount()) sum([&](int64_t t) HWY_ATTR { return hn::LoadU(DF(), rows[t] + d); });
    else sum([&](int64_t t) HWY_ATTR { return LoadFloats(rows[t] + d, n); });
    return error;
  }

  // Where the code allows it, the errors of all candidates are first found roughly, and exactly only of those that the rough
  // ones leave in doubt.
  VU SearchLanes(const Lanes& x, const Extent& extent, VF* best_zero, VF* best_value) const override {
    const VF lo = extent.lo, hi = extent.hi, amax = extent.amax, rms = extent.rms, top = extent.top;
    const int64_t valid = x.valid;
    const bool levels = codec_.family == Family::kLevels, symmetric = Symmetric();
    const bool prune = codec_.family == Family::kInteger && codec_.is_signed;
    const VF none = hn::Zero(DF()), never = Value(INFINITY);
    const bool with_zero = codec_.zero_offset == 0;
    const VF from = with_zero ? hn::Min(lo, none) : lo, to = with_zero ? hn::Max(hi, none) : hi;
    const VF elements = Value(static_cast<float>(valid));
    // A rough error of an element is within d = 2^-20 amax of the exact one. A sum E of n squares is then within
    // 2 sqrt(n E) d + n d^2 of its exact value, which is less than E / 2^14 + n amax^2 / 2^26, and two sums are compared.
    const VF slack = hn::Mul(hn::Mul(amax, amax), hn::Mul(elements, Value(5.9604645e-8f)));
    const auto beyond = [&](VF error) HWY_ATTR { return hn::Add(hn::MulAdd(error, Value(1.0f / 8192), error), slack); };
    // Where no square of a rounding error is lost.
    const bool rough = C::kRough && valid > 0 &&
                       hn::AllTrue(DF(), hn::Or(hn::Eq(amax, none), hn::And(hn::Ge(amax, Value(1e-12f)), hn::Le(amax, Value(1e12f)))));
    // e4m3 is so coarse that the ratios from 1/2 to 1 pass through each of its values between, but for subnormal scales:
    // those values are counted down.
    // The few ratios of level tables may pass one by: bit k of `hits` says whether the value k below the largest is one.
    const bool count_down = (symmetric || levels) && job_.spec.scale_type == ScaleType::kE4M3 &&
                            (levels || hn::AllTrue(DF(), hn::Or(hn::Eq(amax, none), hn::Gt(amax, Value(1e-30f)))));
    VU lowest = hn::Zero(DU()), current = lowest, hits = Word(0xffffffff);
    if (count_down) {
      current = StoreLanes(top).bits;
      if (levels) {
        hits = lowest;
        for (int i = 0; i < kRmsRatioCount; ++i) hits = hn::Or(hits, hn::Shl(Word(1), hn::Sub(current, StoreLanes(hn::Mul(rms, Value(RmsRatio(i)))).bits)));
        lowest = StoreLanes(hn::Mul(rms, Value(RmsRatio(0)))).bits;
      } else {
        lowest = StoreLanes(hn::Div(hn::Mul(Value(Ratio(0)), amax), Value(codec_.top))).bits;
      }
    }
    alignas(64) uint32_t bits[kRatioCount * kMaxLanes];
    alignas(64) float values[kRatioCount * kMaxLanes], zeros[kRatioCount * kMaxLanes], errors[kRatioCount * kMaxLanes];
    MF candidate[kRatioCount];
    const auto exact = [&](VF value, VF zero) HWY_ATTR {
      if (valid == 0) return none;
      if constexpr (C::kRough) {
        return TreeOf(valid, [&](int64_t t) HWY_ATTR {
          const VF v = x.At(t), e = hn::Sub(v, RoundTrip(v, value, zero));
          return hn::Mul(e, e);
        });
      }
      alignas(64) float squares[kMostSearchedTokens * kMaxLanes];
      Squares(x, value, zero, squares);
      return TreeOf(valid, [&](int64_t t) HWY_ATTR { return LoadFloats(squares + t * x.n, x.n); });
    };
    // The candidates from the largest scale down, with their errors. A lane may repeat the one before, or have none.
    int count = 0;
    VF least = never;
    VU last_bits = hn::Zero(DU());
    VF last_zero = none;
    for (int i = (levels ? kRmsRatioCount : kRatioCount) - 1; i >= 0; --i) {
      const VF ratio = Value(levels ? RmsRatio(i) : Ratio(i));
      Stored stored;
      const uint32_t step = static_cast<uint32_t>((levels ? kRmsRatioCount : kRatioCount) - 1 - i);
      if (count_down) {
        if (step > 0 && hn::AllTrue(DU(), hn::Eq(current, lowest))) break;
        if (step > 0) current = hn::Add(current, hn::VecFromMask(DU(), hn::Gt(current, lowest)));
        stored = {current, hn::Mul(DecodeE4M3(current), Value(global_))};
      } else {
        stored = StoreLanes(levels ? hn::Mul(rms, ratio) : symmetric ? hn::Div(hn::Mul(ratio, amax), Value(codec_.top)) : hn::Mul(ratio, top));
      }
      VF zero = none;
      if (!levels && !symmetric) {
        zero = ZeroPoints(hn::Sub(hn::Mul(hn::Add(from, to), Value(0.5f)), hn::Mul(hn::Mul(ratio, hn::Sub(to, from)), Value(0.5f))), stored.value);
      }
      const VF enough = beyond(least);
      if (prune && count > 0) {
        const VF end = hn::Max(hn::Sub(amax, hn::Mul(Value(codec_.top), stored.value)), none);
        if (hn::AllTrue(DF(), hn::Or(hn::Gt(hn::Mul(end, end), enough), hn::Eq(amax, none)))) break;
      }
      const auto repeated = hn::And(hn::RebindMask(DF(), hn::Eq(stored.bits, last_bits)), hn::Eq(zero, last_zero));
      if (count > 0 && hn::AllTrue(DF(), repeated)) continue;
      last_bits = stored.bits;
      last_zero = zero;
      VF error = none;
      // With a scale of 0 nothing is left of an element.
      const bool roughly = rough && (!levels || hn::AllFalse(DF(), hn::And(hn::Eq(stored.value, none), hn::Ne(amax, none))));
      if constexpr (C::kRough) {
        if (roughly) {
          const VF factor = hn::IfThenZeroElse(hn::Eq(stored.value, none), hn::Div(Value(1.0f), stored.value));
          if (!symmetric && !levels) {
            // Both ends of the range alone may cost too much.
            const VF first = code_.Rough(lo, factor, stored.value, zero), second = code_.Rough(hi, factor, stored.value, zero);
            const VF ends = hn::Max(hn::Mul(first, first), hn::Mul(second, second));
            if (count > 0 && hn::AllTrue(DF(), hn::Or(hn::Gt(ends, hn::Add(enough, slack)), hn::Eq(amax, none)))) continue;
          }
          error = RoughSum(x, factor, stored.value, zero);
        }
      }
      if (!roughly) error = exact(stored.value, zero);
      const auto real = hn::RebindMask(DF(), hn::Ne(hn::And(hits, Word(1u << step)), hn::Zero(DU())));
      candidate[count] = count > 0 ? hn::And(real, hn::Not(repeated)) : hn::Eq(none, none);
      least = hn::IfThenElse(candidate[count], hn::Min(least, error), least);
      hn::StoreU(stored.bits, DU(), bits + count * kMaxLanes);
      hn::StoreU(stored.value, DF(), values + count * kMaxLanes);
      hn::StoreU(zero, DF(), zeros + count * kMaxLanes);
      hn::StoreU(error, DF(), errors + count * kMaxLanes);
      ++count;
    }
    // Lanes of zeros have the same scale in every candidate.
    const VF limit = rough ? beyond(least) : never;
    MF seen = hn::Eq(none, never), many = seen;
    const auto in_doubt = [&](int i) HWY_ATTR {
      return hn::And(hn::And(hn::Le(hn::LoadU(DF(), errors + i * kMaxLanes), limit), candidate[i]), hn::Ne(amax, none));
    };
    for (int i = 0; i < count; ++i) {
      const MF doubt = in_doubt(i);
      many = hn::Or(many, hn::And(seen, doubt));
      seen = hn::Or(seen, doubt);
    }
    VU best_bits = hn::LoadU(DU(), bits);
    *best_value = hn::LoadU(DF(), values);
    *best_zero = hn::LoadU(DF(), zeros);
    VF best_error = never;
    const bool certain = hn::AllFalse(DF(), many);
    for (int i = 0; i < count; ++i) {
      MF better = in_doubt(i);
      if (hn::AllFalse(DF(), better)) continue;
      const VF value = hn::LoadU(DF(), values + i * kMaxLanes), zero = hn::LoadU(DF(), zeros + i * kMaxLanes);
      if (!certain) {
        const VF error = rough ? exact(value, zero) : hn::LoadU(DF(), errors + i * kMaxLanes);
        better = hn::And(better, hn::Le(error, best_error));
        best_error = hn::IfThenElse(better, error, best_error);
      }
      best_bits = hn::IfThenElse(hn::RebindMask(DU(), better), hn::LoadU(DU(), bits + i * kMaxLanes), best_bits);
      *best_value = hn::IfThenElse(better, value, *best_value);
      *best_zero = hn::IfThenElse(better, zero, *best_zero);
    }
    return best_bits;
  }

  void SearchBlocks(int64_t index, const float* const* blocks, int64_t n) override {
    if constexpr (C::kLevels) {
      constexpr int kLast = kRmsRatioCount - 1;
      const int64_t count = job_.spec.block;
      const SteppedLevels<C::kBitCount> levels{code_};
      alignas(64) float sums[kMaxLanes] = {}, limits[kMaxLanes] = {}, quotients[kMaxLanes], step_of[kMaxLanes] = {};
      MeasureBlocks(blocks, n, sums, limits);
      const VF rms = hn::Sqrt(hn::Div(hn::Load(DF(), sums), Value(static_cast<float>(count)))), limit = hn::Load(DF(), limits);
      // Of every candidate for every block, the last of them the largest scale; `bits` has one more, which no scale has.
      alignas(64) uint32_t bits[kRmsRatioCount + 1][kMaxLanes];
      alignas(64) float values[kRmsRatioCount][kMaxLanes], squares[kRmsRatioCount][kMaxLanes];
      alignas(64) int32_t factors[kRmsRatioCount][kMaxLanes], found[kRmsRatioCount][kMaxLanes] = {};
      hn::Store(Word(0xffffffff), DU(), bits[kRmsRatioCount]);
      for (int i = 0; i < kRmsRatioCount; ++i) {
        const Stored stored = StoreLanes(hn::Mul(rms, Value(RmsRatio(i))));
        hn::Store(stored.bits, DU(), bits[i]);
        hn::Store(stored.value, DF(), values[i]);
      }
      // Else squares might be lost, or sums of them too large.
      const VF least_scale = hn::Load(DF(), values[0]);
      const auto sound = hn::And(hn::And(hn::Ge(rms, Value(1e-12f)), hn::Le(rms, Value(1e12f))), hn::Ge(least_scale, hn::Mul(rms, Value(kLeastOfRms))));
      hn::Store(hn::IfThenElse(sound, hn::Div(limit, least_scale), Value(INFINITY)), DF(), quotients);
      int shifts[kMaxLanes];
      for (int64_t g = 0; g < n; ++g) {
        shifts[g] = levels.ShiftFor(quotients[g]);
        step_of[g] = levels.StepOf(shifts[g]);
      }
      const VF magic = Value(12582912.0f), step = hn::Load(DF(), step_of);
      VF tolerance = step;
      for (int i = 0; i < kRmsRatioCount; ++i) {
        const VF scaled = hn::Mul(hn::Load(DF(), values[i]), step), factor = hn::Div(hn::Mul(limit, Value(32768.0f / kStepsOfLimit)), scaled);
        hn::Store(hn::Mul(scaled, scaled), DF(), squares[i]);
        hn::Store(hn::Sub(hn::BitCast(DI(), Bits(hn::Add(factor, magic))), hn::BitCast(DI(), Bits(magic))), DI(), factors[i]);
        tolerance = levels.Tolerance(count, limit, rms, scaled, factor);  // the last is the largest
      }
      for (int64_t g = 0; g < n; ++g) {
        if (shifts[g] == 0) continue;
        alignas(64) int16_t steps[kMostStepped];
        StepsOf(blocks[g], count, limits[g], steps);
        // The same scale once.
        int list[kRmsRatioCount], listed = 0;
        for (int i = kLast; i >= 0; --i) {
          list[listed] = i;
          listed += bits[i][g] != bits[i + 1][g] ? 1 : 0;
        }
        levels.Errors(steps, count, shifts[g], list, listed, &factors[0][g], &found[0][g]);
      }
      const VF never = Value(INFINITY);
      VF least = never;
      for (int i = 0; i < kRmsRatioCount; ++i) {
        const auto repeated = hn::RebindMask(DF(), hn::Eq(hn::Load(DU(), bits[i]), hn::Load(DU(), bits[i + 1])));
        const VF error = hn::IfThenElse(repeated, never, hn::Mul(hn::ConvertTo(DF(), hn::Load(DI(), found[i])), hn::Load(DF(), squares[i])));
        hn::Store(error, DF(), squares[i]);
        least = hn::Min(least, error);
      }
      const VF off = hn::MulAdd(tolerance, Value(2.0f), hn::Sqrt(least)), most = hn::Mul(hn::Mul(off, off), Value(1.0001f));
      VU best_bits = hn::Zero(DU()), doubts = best_bits;
      for (int i = kLast; i >= 0; --i) {
        const auto doubt = hn::RebindMask(DU(), hn::Le(hn::Load(DF(), squares[i]), most));
        best_bits = hn::IfThenElse(doubt, hn::Load(DU(), bits[i]), best_bits);
        doubts = hn::Sub(doubts, hn::VecFromMask(DU(), doubt));
      }
      alignas(64) uint32_t best[kMaxLanes], many[kMaxLanes];
      alignas(64) float mosts[kMaxLanes];
      hn::Store(best_bits, DU(), best);
      hn::Store(doubts, DU(), many);
      hn::Store(most, DF(), mosts);
      for (int64_t g = 0; g < n; ++g) {
        if (shifts[g] == 0) {
          CalibrateRun(index + g, blocks[g], count, false);
          continue;
        }
        float best_error = INFINITY;
        for (int i = kLast; i >= 0 && many[g] > 1; --i) {
          if (squares[i][g] > mosts[g]) continue;
          const float error = ErrorOf(blocks[g], count, values[i][g]);
          if (error > best_error) continue;
          best[g] = bits[i][g];
          best_error = error;
        }
        Put(index + g, {best[g], 0}, 0);
      }
    }
  }

  // The exact sum of a block's squared errors.
  float ErrorOf(const float* x, int64_t count, float scale) {
    const VF all = Value(scale);
    for (int64_t i = 0; i < count; i += LaneCount()) {
      const VF v = hn::LoadU(DF(), x + i), e = hn::Sub(v, RoundTrip(v, all, hn::Zero(DF())));
      hn::StoreU(hn::Mul(e, e), DF(), errors_ + i);
    }
    return SumTree(errors_, count);
  }

  // ---- Encoding ----

  void EncodeSlowly(const float* x, int64_t count, uint8_t* codes, const float* scales, const float* zeros, bool each) const override {
    EncodeRun(code_, x, count, codes, MaskOf(codec_.bits), scales, zeros, each);
  }

  void EncodeQuickly(const ReadyRows& ready, Packer* packer) const override {
    if constexpr (C::kQuick) {
      if constexpr (C::kSigned) {
        if (has_zeros_) return EncodeBy<true, true>(ready, packer);
      }
      if constexpr (!C::kLevels) {
        if (within_) return EncodeBy<false, false>(ready, packer);
      }
      EncodeBy<false, true>(ready, packer);
    }
  }
  template <bool kZeros, bool kClamp>
  void EncodeBy(const ReadyRows& ready, Packer* packer) const {
    const ScaleEach<kZeros> each{scales_, zeros_, factors_};
    if (ready.by == ScaledBy::kRow) EncodeTokens<kClamp>(ready, packer, ScaleByRow<kZeros>{each});
    else if (ready.by == ScaledBy::kVector) EncodeTokens<kClamp>(ready, packer, ScaleByVector<kZeros>{each, group_});
    else EncodeTokens<kClamp>(ready, packer, each);
  }
  // `ready` is a copy: what is read through a reference is read again after each store.
  template <bool kClamp, typename At>
  void EncodeTokens(ReadyRows ready, Packer* packer, const At& at) const {
    const uint8_t mask = MaskOf(codec_.bits);
    for (int64_t k = 0; k < ready.tokens; ++k) {
      const bool some = k < ready.valid;
      if (ready.ahead != 0 && some) Fetch(ready.rows[k], ready.ahead, ready.width * 4);
      EncodeQuick<kClamp>(code_, some ? ready.rows[k] : kZeroRow, ready.width, packer->Reserve(ready.width), mask, at.Row(k * ready.groups));
      packer->Commit(ready.width);
    }
  }

  const C& code_;
};

bool AllFinite(const QuantizeJob& job) {
  const int64_t size = job.source_type == Type::f32 ? 4 : 2;
  for (int64_t b = 0; b < job.shape.batch; ++b) {
    for (int64_t h = 0; h < job.shape.heads; ++h) {
      for (int64_t t = 0; t < job.valid; ++t) {
        const int64_t first = b * job.batch_stride + h * job.head_stride + t * job.token_stride;
        if (FirstNonFinite(job.source_type, static_cast<const uint8_t*>(job.source) + first * size, job.shape.width) >= 0) return false;
      }
    }
  }
  return true;
}

// Jobs that the vector code takes.
bool Takes(const QuantizeJob& job, const Codec& codec) {
  const Spec& spec = job.spec;
  const bool mse = spec.calibration == Calibration::kMse;
  if (codec.kivi || job.shape.elements() == 0) return false;
  if (spec.axis == Axis::kHead && job.shape.batch > 1 && spec.calibration != Calibration::kGiven) return false;
  if (mse && (spec.axis == Axis::kTensor || spec.axis == Axis::kHead)) return false;
  if (mse && spec.axis == Axis::kToken && spec.block > kMostSearched) return false;
  if (spec.axis == Axis::kToken && codec.family == Family::kLevels && spec.block > kMostSearched) return false;
  if (spec.axis == Axis::kChannel && spec.block > (mse ? kMostSearchedTokens : Quantizer::kMostRows)) return false;
  const bool plain_given = spec.calibration == Calibration::kGiven && codec.family == Family::kInteger && job.hadamard == 0 && job.center == nullptr;
  if (job.options.non_finite == NonFinite::kError || (plain_given && job.options.non_finite == NonFinite::kPass)) return true;
  return AllFinite(job);
}

// nvfp4: the largest magnitude of the payload, then each block with its scale's reciprocal.
bool QuantizeNvfp4(const QuantizeJob& job) {
  const Shape& shape = job.shape;
  const int64_t width = shape.width, lanes = LaneCount();
  const bool transformed = job.source_type != Type::f32 || job.center != nullptr || job.hadamard > 0;
  // Rows that follow each other in memory are one long row.
  const bool run = !transformed && job.token_stride == width && job.valid == shape.tokens;
  const int64_t length = run ? shape.tokens * width : width;
  bool ok = true;
  const auto row_of = [&](int64_t b, int64_t h, int64_t t) -> const float* {
    const int64_t first = b * job.batch_stride + h * job.head_stride + t * job.token_stride;
    if (!transformed) return static_cast<const float*>(job.source) + first;
    Widen(job.source_type, static_cast<const uint8_t*>(job.source) + first * (job.source_type == Type::f32 ? 4 : 2), job.scratch, width);
    if (job.center != nullptr) {
      for (int64_t d = 0; d < width; ++d) job.scratch[d] = job.scratch[d] - FromBF16(job.center[h * width + d]);
    }
    if (job.hadamard > 0) Rotate(job.scratch, job.scratch, width, job.hadamard);
    ok = ok && FirstNonFinite(Type::f32, job.scratch, width) < 0;
    return job.scratch;
  };
  float amax = 0;
  if (job.options.global != GlobalScale::kGiven) {
    VF most = hn::Zero(DF()), other = most;
    for (int64_t b = 0; b < shape.batch; ++b) {
      for (int64_t h = 0; h < shape.heads; ++h) {
        for (int64_t t = 0; t < (run ? 1 : job.valid); ++t) {
          AddMagnitudes(row_of(b, h, t), length, &most, &other);
        }
      }
    }
    amax = hn::ReduceMax(DF(), hn::Max(most, other));
  }
  const float g = *job.global = Nvfp4Global(job.options, amax);
  if (g < 0x1p-118f) return false;  // a reciprocal may be infinite, and 0 times it a NaN
  Packer packer(4, job.codes, SizesOf(job.spec, job.shape).codes);
  const CodeBytes<FloatCode<2>> bytes(FloatCode<2>(), 0xff);
  int64_t index = 0;
  for (int64_t b = 0; b < shape.batch; ++b) {
    for (int64_t h = 0; h < shape.heads; ++h) {
      for (int64_t t = 0; t < (run ? 1 : shape.tokens); ++t) {
        const float* row = t < job.valid ? row_of(b, h, t) : nullptr;
        for (int64_t begin = 0; begin < length; begin += kChunk) {
          const int64_t count = std::min(kChunk, length - begin);
          const float* x = row != nullptr ? row + begin : kZeroRow;
          if (run) Fetch(x, 2 * kChunk * 4, count * 4);
          alignas(64) float inverses[kChunk / kNvfp4Block + kMaxLanes];
          BlockMagnitudes(x, count / kNvfp4Block, kNvfp4Block, inverses);
          // MakeNvfp4Scale, a block to a lane.
          ForVectors(count / kNvfp4Block, [&](int64_t i, int64_t n) HWY_ATTR {
            const VF none = hn::Zero(DF()), largest = LoadFloats(inverses + i, n);
            const auto some = hn::Ne(largest, none);
            const VU bits = hn::IfThenElseZero(hn::RebindMask(DU(), some), EncodeE4M3(hn::Div(largest, Value(6.0f * g)), false));
            const VF full = hn::Mul(DecodeE4M3(bits), Value(g));
            StoreFloats(hn::IfThenElseZero(hn::And(some, hn::Ne(full, none)), hn::Div(Value(1.0f), full)), inverses + i, n);
            alignas(64) uint8_t stored[kMaxLanes];
            hn::StoreU(hn::DemoteTo(DB(), hn::BitCast(DI(), bits)), DB(), stored);
            std::memcpy(job.scales + index + i, stored, static_cast<size_t>(n));
          });
          index += count / kNvfp4Block;
          uint8_t* codes = packer.Reserve(count);
          const auto code = [&](int64_t i) HWY_ATTR {
            return hn::BitCast(DI(), EncodeFiniteE2M1(hn::Mul(hn::LoadU(DF(), x + i), Value(inverses[i / kNvfp4Block]))));
          };
          int64_t i = 0;
          for (; i + 4 * lanes <= count; i += 4 * lanes) {
            const VI v[4] = {code(i), code(i + lanes), code(i + 2 * lanes), code(i + 3 * lanes)};
            bytes.Store<false>(v, codes + i);
          }
          for (; i < count; i += lanes) hn::StoreU(hn::DemoteTo(DB(), code(i)), DB(), codes + i);
          packer.Commit(count);
        }
      }
    }
  }
  packer.Finish();
  return ok;
}

// Rows for schemes-inl.h. `ok`: all of them were finite.
struct Rows {
  const QuantizeJob& job;
  bool ok;
  const float* operator()(int64_t b, int64_t h, int64_t t, float* out) {
    const int64_t first = b * job.batch_stride + h * job.head_stride + t * job.token_stride, width = job.shape.width;
    if (job.source_type == Type::f32 && job.center == nullptr && job.hadamard == 0) return static_cast<const float*>(job.source) + first;
    Widen(job.source_type, static_cast<const uint8_t*>(job.source) + first * (job.source_type == Type::f32 ? 4 : 2), out, width);
    if (job.center != nullptr) {
      for (int64_t d = 0; d < width; ++d) out[d] = out[d] - FromBF16(job.center[h * width + d]);
    }
    if (job.hadamard > 0) Rotate(out, out, width, job.hadamard);
    if (job.center != nullptr || job.hadamard > 0) ok = ok && FirstNonFinite(Type::f32, out, width) < 0;
    return out;
  }
};

// Schemes and KIVI; false where the reference has to do it.
bool QuantizeOthers(const QuantizeJob& job, const Codec& codec) {
  if (job.shape.elements() == 0 || (job.options.non_finite != NonFinite::kError && !AllFinite(job))) return false;
  Rows rows{job, true};
  if (codec.family == Family::kScheme) {
    QuantizeBlocks(job, rows);
    return rows.ok;
  }
  if (!TakesKivi(job.spec, job.shape.width, true)) return false;
  return WithKiviType(codec.scale_type, [&](auto type) { QuantizeKivi<decltype(type)::value>(job, codec, rows); }) && rows.ok;
}

void Quantize(const QuantizeJob& job) {
  const Codec codec = MakeCodec(job.spec, job.options);
  if (job.spec.type == Type::nvfp4 && job.shape.elements() > 0 && (job.options.non_finite == NonFinite::kError || AllFinite(job)) &&
      QuantizeNvfp4(job)) {
    return;
  }
  if (codec.family == Family::kScheme || codec.kivi) {
    if (!QuantizeOthers(job, codec)) kReferenceBackend.quantize(job);
    return;
  }
  if (Takes(job, codec)) {
    bool done = false;
    WithCode(codec, [&](const auto& code) { done = QuantizerOf(job, codec, code).Run(); });
    if (done) return;
  }
  kReferenceBackend.quantize(job);
}

}  // namespace

constexpr Backend TableOf(const char* name, bool (*available)()) {
  return {name, available, Quantize, Dequantize, Widen, Narrow, FirstNonFinite};
}

}  // namespace HWY_NAMESPACE
}  // namespace kvpages
HWY_AFTER_NAMESPACE();
#endif

#if HWY_ONCE
namespace kvpages {
namespace {

#if HWY_ARCH_X86
bool HasAvx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512cd");
}
bool HasAvx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("f16c");
}
bool HasSse4() { return __builtin_cpu_supports("sse4.2"); }
#else
bool Always() { return true; }
#endif

}  // namespace

const std::vector<const Backend*>& SimdBackends() {
  static const auto& backends = *new std::vector<const Backend*>{
#define KVP_X(target, name, available) new Backend(target::TableOf(name, available)),
#if HWY_TARGETS & HWY_AVX3
      KVP_X(N_AVX3, "avx512", HasAvx512)
#endif
#if HWY_TARGETS & HWY_AVX2
      KVP_X(N_AVX2, "avx2", HasAvx2)
#endif
#if HWY_TARGETS & HWY_SSE4
      KVP_X(N_SSE4, "sse4", HasSse4)
#endif
#if HWY_TARGETS & HWY_NEON
      KVP_X(N_NEON, "neon", Always)
#endif
#if HWY_TARGETS & HWY_WASM
      KVP_X(N_WASM, "wasm128", Always)
#endif
#undef KVP_X
  };
  return backends;
}

}  // namespace kvpages
#endif  // HWY_ONCE
