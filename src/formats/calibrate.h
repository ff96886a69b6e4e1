// SPDX-License-Identifier: Apache-2.0
// From the elements of a group to its scale: range, candidates, the search among them.
#pragma once

#include <cmath>
#include <cstdint>

#include "formats/codec.h"
#include "formats/search.h"

namespace kvpages {

// Lowest and highest element; NaN takes no part. Nothing added: 0 and 0.
struct Range {
  float lo = FloatOf(0x7f800000u), hi = FloatOf(0xff800000u);

  KVP_HD void Add(float value) {
    if (value < lo) lo = value;
    if (value > hi) hi = value;
  }
  // + 0: a zero's sign must not depend on the order in which elements were added.
  KVP_HD float Lo() const { return lo > hi ? 0.0f : lo + 0.0f; }
  KVP_HD float Hi() const { return lo > hi ? 0.0f : hi + 0.0f; }
  KVP_HD float Amax() const {
    const float a = fabsf(Lo()), b = fabsf(Hi());
    return a < b ? b : a;
  }
};

KVP_HD float RmsOf(float sum_of_squares, int64_t count) {
  return count == 0 ? 0.0f : sqrtf(sum_of_squares / static_cast<float>(count));
}

struct Candidate {
  uint32_t bits = 0;
  Scale scale;
};

// A group's candidate scales. `rms` counts for level tables only, the range for all others.
struct Calibrator {
  Codec codec;
  Calibration calibration = Calibration::kAbsmax;
  float global = 1.0f;
  Range range;
  float rms = 0;

  KVP_HD static float Larger(float a, float b) { return a < b ? b : a; }
  KVP_HD static float Smaller(float a, float b) { return b < a ? b : a; }
  KVP_HD bool Symmetric() const { return codec.family == Family::kFloatCode || codec.is_signed; }

  // The largest scale that the group may get, before it is stored.
  KVP_HD float TopScale() const {
    const float lo = range.Lo(), hi = range.Hi();
    if (codec.family == Family::kLevels) return rms * RmsRatio(kRmsRatioCount - 1);
    if (Symmetric()) return range.Amax() / codec.top;
    if (calibration == Calibration::kMinmax || codec.zero_offset == 0) {
      return (Larger(hi, 0.0f) - Smaller(lo, 0.0f)) / codec.top;
    }
    // The zero point must be able to reach the range.
    return Larger((hi - lo) / codec.top, Larger(Larger(lo, -hi), 0.0f) / static_cast<float>(codec.zero_offset));
  }

  KVP_HD int Count() const {
    if (calibration != Calibration::kMse) return 1;
    return codec.family == Family::kLevels ? kRmsRatioCount : kRatioCount;
  }

  // Candidate i of the search (the only one without a search).
  KVP_HD Candidate At(int i) const {
    const bool search = calibration == Calibration::kMse;
    if (codec.family == Family::kLevels) return Store(rms * RmsRatio(i));
    if (Symmetric()) return Store((search ? Ratio(i) * range.Amax() : range.Amax()) / codec.top);
    if (!search) {
      Candidate candidate = Store(TopScale());
      candidate.scale.zero = ZeroPoint(Smaller(range.Lo(), 0.0f), candidate.scale.value);
      return candidate;
    }
    const bool with_zero = codec.zero_offset == 0;
    const float lo = with_zero ? Smaller(range.Lo(), 0.0f) : range.Lo(), hi = with_zero ? Larger(range.Hi(), 0.0f) : range.Hi();
    Candidate candidate = Store(Ratio(i) * TopScale());
    const float low = (lo + hi) * 0.5f - (Ratio(i) * (hi - lo)) * 0.5f;
    candidate.scale.zero = ZeroPoint(low, candidate.scale.value);
    return candidate;
  }

  KVP_HD int32_t ZeroPoint(float low, float scale) const {
    return EncodeInteger(-low, scale, 0, -codec.zero_offset, static_cast<int32_t>(codec.top) + codec.zero_offset);
  }
  KVP_HD Candidate Store(float scale) const {
    const StoredScale stored = StoreScale(codec.scale_type, scale, global);
    const bool zero = codec.e8m0_zero && codec.scale_type == ScaleType::kE8M0 && stored.bits == 0;
    Candidate candidate;
    candidate.bits = stored.bits;
    candidate.scale.value = zero ? 0.0f : stored.value;
    return candidate;
  }

  // The first candidate with the smallest error; error(scale) is the group's sum of squares.
  template <typename F>
  KVP_HD Candidate Best(const F& error) const {
    Candidate best = At(0);
    if (calibration != Calibration::kMse) return best;
    float best_error = error(best.scale);
    for (int i = 1; i < Count(); ++i) {
      const Candidate candidate = At(i);
      const float candidate_error = error(candidate.scale);
      if (!Better(candidate_error, best_error)) continue;
      best = candidate;
      best_error = candidate_error;
    }
    return best;
  }

  // KIVI's scale and minimum, as they are stored and as codes are made with them.
  struct Kivi {
    uint32_t scale_bits, minimum_bits;
    Scale scale;
  };
  KVP_HD Kivi KiviScale() const {
    const ScaleType type = codec.scale_type;
    const float lo = RoundTo(type, range.Lo()), hi = RoundTo(type, range.Hi());
    const StoredScale scale = StoreScale(type, RoundTo(type, RoundTo(type, hi - lo) / codec.top), 1.0f);
    const uint32_t sign = lo < 0 ? 0x80u << 8 * (ScaleSize(type) - 1) : 0u;
    Kivi kivi{scale.bits, StoreScale(type, fabsf(lo), 1.0f).bits | sign, {}};
    kivi.scale.value = scale.value;
    kivi.scale.minimum = lo;
    return kivi;
  }
};

// What an element adds to a search's error.
KVP_HD float SquaredError(const Codec& codec, float x, const Scale& scale) {
  const float e = x - Decode(codec, Encode(codec, x, scale), scale);
  return e * e;
}

}  // namespace kvpages
