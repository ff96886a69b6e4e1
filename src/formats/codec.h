// SPDX-License-Identifier: Apache-2.0
// One element of the formats with free axis and scale (integers, float codes, level tables): code from value, value from
// code. Schemes have their own files.
#pragma once

#include <cmath>
#include <cstdint>

#include "formats/integers.h"
#include "formats/levels.h"
#include "formats/packing.h"
#include "formats/spec.h"

namespace kvpages {

struct Codec {
  Type type = Type::int8;
  Family family = Family::kInteger;
  int bits = 8;
  bool is_signed = true;
  bool kivi = false;
  bool overflow_nan = false;
  bool e8m0_zero = false;    // see LoadScale
  int32_t lo = 0, hi = 0;    // range of integer codes
  int32_t zero_offset = 0;   // zero point's byte minus zero point
  float top = 0;             // what amax is divided by for a computed scale
  ScaleType scale_type = ScaleType::kF32;
};

// What one code is made with: a scale, and an integer zero point or KIVI's minimum.
struct Scale {
  float value = 0;
  int32_t zero = 0;
  float minimum = 0;
};

inline Codec MakeCodec(const Spec& spec, const SpecOptions& options = {}) {
  const TypeInfo& info = Info(spec.type);
  Codec codec;
  codec.type = spec.type;
  codec.family = info.family;
  codec.bits = info.bits;
  codec.is_signed = info.is_signed;
  codec.kivi = spec.calibration == Calibration::kKivi;
  codec.overflow_nan = options.overflow == Overflow::kNan;
  codec.e8m0_zero = info.family != Family::kInteger;
  codec.scale_type = spec.scale_type;
  if (info.family == Family::kInteger) {
    const int32_t half = 1 << (info.bits - 1);
    codec.lo = !info.is_signed ? 0 : spec.calibration == Calibration::kGiven ? -half : 1 - half;
    codec.hi = info.is_signed ? half - 1 : 2 * half - 1;
    codec.top = static_cast<float>(codec.hi);
    if (!info.is_signed && spec.calibration == Calibration::kMse) codec.zero_offset = ZeroOffset(info.bits);
  } else if (info.family == Family::kFloatCode) {
    codec.top = spec.type == Type::e4m3 ? 448.0f : spec.type == Type::e5m2 ? 57344.0f : 6.0f;
  }
  return codec;
}

// `zeros` may be null: zero point 0.
KVP_HD Scale LoadScaleAt(const Codec& codec, const uint8_t* scales, const uint8_t* zeros, float global, int64_t index) {
  Scale scale;
  scale.value = LoadScale(codec.scale_type, scales, index, global, codec.e8m0_zero);
  if (zeros == nullptr) return scale;
  if (codec.kivi) {
    scale.minimum = LoadScale(codec.scale_type, zeros, index, global, false);
  } else if (codec.family == Family::kInteger) {
    scale.zero = codec.is_signed ? static_cast<int8_t>(zeros[index]) : zeros[index] - codec.zero_offset;
  }
  return scale;
}

KVP_HD uint8_t EncodeFloatCode(Type type, float x, float scale, bool overflow_nan) {
  if (scale == 0) return 0;
  const float q = x / scale;
  switch (type) {
    case Type::e4m3: return ToE4M3(q, overflow_nan);
    case Type::e5m2: return ToE5M2(q, overflow_nan);
    case Type::e2m1tz: return q == 0 ? 0 : ToE2M1(q, true);
    default: return ToE2M1(q);
  }
}
KVP_HD float FloatCodeValue(Type type, uint32_t code) {
  const auto byte = static_cast<uint8_t>(code);
  return type == Type::e4m3 ? FromE4M3(byte) : type == Type::e5m2 ? FromE5M2(byte) : FromE2M1(byte);
}

// The code in its low `bits`.
KVP_HD uint32_t Encode(const Codec& codec, float x, const Scale& scale) {
  if (codec.kivi) return static_cast<uint32_t>(EncodeKivi(codec.scale_type, x, scale.value, scale.minimum, codec.hi));
  switch (codec.family) {
    case Family::kInteger: return static_cast<uint32_t>(EncodeInteger(x, scale.value, scale.zero, codec.lo, codec.hi));
    case Family::kFloatCode: return EncodeFloatCode(codec.type, x, scale.value, codec.overflow_nan);
    default: return static_cast<uint32_t>(EncodeLevel(codec.bits, x, scale.value));
  }
}
KVP_HD float Decode(const Codec& codec, uint32_t code, const Scale& scale) {
  if (codec.kivi) return DecodeKivi(codec.scale_type, static_cast<int32_t>(code), scale.value, scale.minimum);
  switch (codec.family) {
    case Family::kInteger:
      return DecodeInteger(codec.is_signed ? SignExtend(code, codec.bits) : static_cast<int32_t>(code), scale.value, scale.zero);
    case Family::kFloatCode: return scale.value == 0 ? 0.0f : FloatCodeValue(codec.type, code) * scale.value;
    default: return DecodeLevel(codec.bits, static_cast<int32_t>(code), scale.value);
  }
}

}  // namespace kvpages
