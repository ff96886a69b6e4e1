// SPDX-License-Identifier: Apache-2.0
// Errors of level tables in fixed point, many elements to a vector: enough to tell which scales are worth an exact look.
#if defined(KVPAGES_BACKENDS_SIMD_LEVELS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVPAGES_BACKENDS_SIMD_LEVELS_INL_H_
#undef KVPAGES_BACKENDS_SIMD_LEVELS_INL_H_
#else
#define KVPAGES_BACKENDS_SIMD_LEVELS_INL_H_
#endif

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "backends/simd/codes-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace kvpages {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

constexpr int64_t kMostStepped = 64;                // elements of a block
constexpr int64_t kStepped = 4 * HWY_LANES(float);  // elements that are looked at together; they divide a block
constexpr float kStepsOfLimit = 32767.0f;           // of the largest magnitude of a block
constexpr float kLeastOfRms = 0.6f;                 // what a scale has to be of a block's rms

// Magnitudes of a block as multiples of limit / kStepsOfLimit, none of which is beyond the limit. In any order.
HWY_INLINE void StepsOf(const float* x, int64_t count, float limit, int16_t* steps) {
  const hn::ScalableTag<int16_t> d16;
  const int64_t lanes = HWY_LANES(float);
  const VF factor = Value(kStepsOfLimit / limit), magic = Value(12582912.0f);
  const VI bits = hn::BitCast(DI(), Bits(magic));
  for (int64_t i = 0; i < count; i += 2 * lanes) {
    const auto at = [&](int64_t k) HWY_ATTR {
      return hn::Sub(hn::BitCast(DI(), Bits(hn::Add(hn::Mul(hn::Abs(hn::LoadU(DF(), x + k)), factor), magic))), bits);
    };
    hn::StoreU(hn::ReorderDemote2To(d16, at(i), at(i + lanes)), d16, steps + i);
  }
}

// Errors of blocks with a scale. A cell of a quotient is 2^shift steps, the more the less the largest quotient is: it stays below
// 2^15 steps.
template <int kBits>
struct SteppedLevels {
  using Code = LevelCode<kBits>;
  static constexpr bool kByLevels = kBits <= 3;  // each in turn; more of them by cells
  const Code& code;

  // The finest shift for a quotient as large as this; 0: there is none.
  static int ShiftFor(float quotient) {
    for (int shift = Code::kFinest; shift >= Code::kCoarsest; --shift) {
      if (quotient * static_cast<float>(1 << shift) <= 32766.0f * Code::kCell) return shift;
    }
    return 0;
  }
  static float StepOf(int shift) { return Code::kCell / static_cast<float>(1 << shift); }

  // The sum of squared errors, in squares of a step of the scale. `factor`: 2^15 times the steps of a quotient in a step of StepsOf.
  // Its largest: a scale of kLeastOfRms lets the quotients' squares add up to 178 at most, so that for lm4 no more than 5.8 quotients
  // reach the most that the finest shift takes, 5.5, and miss the last level by 2.8 or 16500 steps; all else is below 2000 steps: less
  // than 2^31. Coarser steps and fewer levels come to less.
  template <int kShift>
  HWY_INLINE int32_t Error(const int16_t* steps, int64_t count, int32_t factor) const {
    const hn::ScalableTag<int16_t> d16;
    const hn::Repartition<uint8_t, decltype(d16)> d8;
    const hn::Repartition<int32_t, decltype(d16)> d32;
    using V = hn::Vec<decltype(d16)>;
    const typename Code::Steps& table = code.At(kShift);
    const V by = hn::Set(d16, static_cast<int16_t>(factor));
    auto sum = hn::Zero(d32), other = sum;
    const auto quotients = [&](int64_t i) HWY_ATTR { return hn::MulFixedPoint15(hn::LoadU(d16, steps + i), by); };
    const auto add = [&](V e, V f) HWY_ATTR {
      sum = hn::Add(sum, hn::WidenMulPairwiseAdd(d32, e, e));
      other = hn::Add(other, hn::WidenMulPairwiseAdd(d32, f, f));
    };
    if constexpr (kByLevels) {
      const auto nearest = [&](V v) HWY_ATTR {
        V e = hn::Abs(hn::Sub(v, hn::Set(d16, table.levels[0])));
        HWY_UNROLL(4)
        for (int k = 1; k < Code::kHalf; ++k) e = hn::Min(e, hn::Abs(hn::Sub(v, hn::Set(d16, table.levels[k]))));
        return e;
      };
      for (int64_t i = 0; i < count; i += kStepped) add(nearest(quotients(i)), nearest(quotients(i + kStepped / 2)));
    } else {
      const auto low = hn::LoadDup128(d8, table.border_low), high = hn::LoadDup128(d8, table.border_high);
      const auto low2 = hn::LoadDup128(d8, table.gap_low), high2 = hn::LoadDup128(d8, table.gap_high);
      const auto last = hn::Set(d8, static_cast<uint8_t>(Code::kHalf - 2));
      for (int64_t i = 0; i < count; i += kStepped) {
        const V a = quotients(i), b = quotients(i + kStepped / 2);
        const auto cell = hn::Min(hn::ReorderDemote2To(d8, hn::ShiftRight<kShift>(a), hn::ShiftRight<kShift>(b)), last);
        const auto border0 = hn::TableLookupBytes(low, cell), border1 = hn::TableLookupBytes(high, cell);
        const auto gap0 = hn::TableLookupBytes(low2, cell), gap1 = hn::TableLookupBytes(high2, cell);
        const auto error = [&](V v, auto border, auto gap) HWY_ATTR { return hn::Sub(hn::Abs(hn::Sub(v, hn::BitCast(d16, border))), hn::BitCast(d16, gap)); };
        add(error(a, hn::InterleaveLower(d8, border0, border1), hn::InterleaveLower(d8, gap0, gap1)),
            error(b, hn::InterleaveUpper(d8, border0, border1), hn::InterleaveUpper(d8, gap0, gap1)));
      }
    }
    return hn::ReduceSum(d32, hn::Add(sum, other));
  }

  // Error with the `count_listed` factors that are listed, each kMaxLanes after the other.
  HWY_INLINE void Errors(const int16_t* steps, int64_t count, int shift, const int* list, int count_listed, const int32_t* factors, int32_t* errors) const {
    const auto all = [&](auto constant) HWY_ATTR {
      for (int k = 0; k < count_listed; ++k) {
        const size_t at = static_cast<size_t>(list[k]) * kMaxLanes;
        errors[at] = Error<decltype(constant)::value>(steps, count, factors[at]);
      }
    };
    if (shift == Code::kFinest) all(std::integral_constant<int, Code::kFinest>());
    else if (shift == Code::kCoarsest) all(std::integral_constant<int, Code::kCoarsest>());
    else all(std::integral_constant<int, Code::kCoarsest + 1>());
  }

  // How far the root of Error may be from that of the exact sum. Both are distances of a block to its levels, so they differ by no
  // more than the quotients and levels do: by half a step of each element for the rounded product and by half a step for a rounded level
  // or a whole one for border and gap, by the factor's rounding, and by half a step of StepsOf and the roundings of f32, in all less than
  // 2^-15 of the limit.
  static HWY_INLINE VF Tolerance(int64_t count, VF limit, VF rms, VF step, VF factor) {
    const VF each = hn::Add(hn::Mul(step, Value(kByLevels ? 1.01f : 1.51f)), hn::Add(hn::Mul(hn::Div(rms, factor), Value(0.51f)), hn::Mul(limit, Value(3.1e-5f))));
    return hn::Mul(each, Value(std::sqrt(static_cast<float>(count))));
  }
};

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace kvpages
HWY_AFTER_NAMESPACE();
#endif
