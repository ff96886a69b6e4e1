// SPDX-License-Identifier: Apache-2.0
// Vector forms of the block formats (NVFP4 4-over-6, MX, llama.cpp) and of KIVI's codes: formats/{nvfp4,mx,llama,integers}.h.
// Input is finite. `rows(b, h, t, out)` gives a row as the coders see it, in `out` or where it lies.
#if defined(KVPAGES_BACKENDS_SIMD_SCHEMES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVPAGES_BACKENDS_SIMD_SCHEMES_INL_H_
#undef KVPAGES_BACKENDS_SIMD_SCHEMES_INL_H_
#else
#define KVPAGES_BACKENDS_SIMD_SCHEMES_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "backends/backend.h"
#include "backends/simd/codes-inl.h"
#include "backends/simd/packing-inl.h"
#include "formats/codec.h"
#include "formats/schemes.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace kvpages {
namespace HWY_NAMESPACE {
namespace {

constexpr int64_t kSchemeLanes = HWY_LANES(float);
constexpr int64_t kRowCodes = 512;  // codes that wait to be packed; blocks divide it
alignas(64) const float kZeroBlock[kLargestSchemeBlock] = {};

HWY_INLINE void PutBytes(VI codes, uint8_t* out) { hn::StoreU(hn::DemoteTo(DB(), codes), DB(), out); }
HWY_INLINE VF FromBytes(const uint8_t* codes) { return hn::ConvertTo(DF(), hn::BitCast(DI(), hn::PromoteTo(DU(), hn::LoadU(DB(), codes)))); }

template <int kCount>
HWY_INLINE float LargestMagnitude(const float* x) {
  VF most = hn::Zero(DF());
  for (int64_t i = 0; i < kCount; i += kSchemeLanes) most = hn::Max(most, hn::Abs(hn::LoadU(DF(), x + i)));
  return hn::ReduceMax(DF(), most);
}

// ---- llama.cpp ----

struct NearestLevel {
  VI code;
  VF level;
};
HWY_INLINE NearestLevel NearestIq4Levels(VF v) {
  VI upper = hn::Set(DI(), 1);
  VF below = Value(Iq4Level(0)), above = Value(Iq4Level(1));
  for (int i = 1; i < 15; ++i) {
    const auto passed = hn::Le(Value(Iq4Level(i)), v);
    upper = hn::Sub(upper, hn::BitCast(DI(), hn::VecFromMask(DF(), passed)));
    below = hn::IfThenElse(passed, Value(Iq4Level(i)), below);
    above = hn::IfThenElse(passed, Value(Iq4Level(i + 1)), above);
  }
  const auto lower = hn::Lt(hn::Sub(v, below), hn::Sub(above, v));
  return {hn::Add(upper, hn::BitCast(DI(), hn::VecFromMask(DF(), lower))), hn::IfThenElse(lower, below, above)};
}

// The first of the largest magnitudes, with its sign.
HWY_INLINE float FirstExtreme(const float* x, float most) {
  bool positive = false, negative = false;
  for (int64_t i = 0; i < kLlamaBlock; i += kSchemeLanes) {
    const VF v = hn::LoadU(DF(), x + i);
    positive = positive || !hn::AllFalse(DF(), hn::Eq(v, Value(most)));
    negative = negative || !hn::AllFalse(DF(), hn::Eq(v, Value(-most)));
  }
  if (positive != negative) return positive ? most : -most;
  for (int i = 0; i < kLlamaBlock; ++i) {
    float value;
    std::memcpy(&value, x + i, sizeof value);
    if (std::fabs(value) == most && most > 0) return value;
  }
  return 0;
}

void EncodeLlamaBlock(Type type, const float* x, uint8_t* block) {
  const LlamaLayout layout = LayoutOf(type);
  uint8_t* const codes = block + layout.codes;
  const float amax = LargestMagnitude<kLlamaBlock>(x);
  if (type == Type::q8_0) {
    const float d = amax / 127.0f, inverse = d != 0 ? 1.0f / d : 0.0f;
    PutHalf(block, d);
    const hn::Rebind<int8_t, DF> to8;
    // Products that are no tie round to the same number in every way; those of a subnormal d may pass 127.
    const IntegerCode code{-127.0f, 127.0f, 128};
    IntegerCode::Doubt doubt = IntegerCode::NoDoubt();
    VI quick[kLlamaBlock / kSchemeLanes];
    for (int64_t i = 0; i < kLlamaBlock; i += kSchemeLanes) {
      quick[i / kSchemeLanes] = code.QuickEncode<false, false>(hn::LoadU(DF(), x + i), Value(inverse), hn::Zero(DF()), &doubt);
    }
    if (HWY_LIKELY(IntegerCode::Certain(doubt) && d >= 1e-37f)) {
      for (int64_t i = 0; i < kLlamaBlock; i += kSchemeLanes) hn::StoreU(hn::DemoteTo(to8, quick[i / kSchemeLanes]), to8, reinterpret_cast<int8_t*>(codes + i));
      return;
    }
    std::memset(codes, 0, kLlamaBlock);
    if (!IsFinite(inverse)) return;
    for (int64_t i = 0; i < kLlamaBlock; i += kSchemeLanes) {
      // Half away from zero.
      const VF v = hn::Mul(hn::LoadU(DF(), x + i), Value(inverse)), whole = hn::Trunc(v);
      const auto up = hn::Ge(hn::Abs(hn::Sub(v, whole)), Value(0.5f));
      const VF rounded = hn::Add(whole, hn::IfThenElseZero(up, hn::CopySign(Value(1.0f), v)));
      const VF limited = hn::Min(hn::Max(rounded, Value(-127.0f)), Value(127.0f));
      hn::StoreU(hn::DemoteTo(to8, hn::ConvertTo(DI(), limited)), to8, reinterpret_cast<int8_t*>(codes + i));
    }
    return;
  }
  std::memset(block, 0, static_cast<size_t>(LlamaBlockBytes(type)));
  alignas(64) uint8_t bytes[kLlamaBlock];
  if (type == Type::iq4_nl) {
    const float extreme = FirstExtreme(x, amax);
    const bool tiny = amax < 1e-15f;
    if (tiny) {
      std::memset(codes, 0x88, kLlamaBlock / 2);
      return;
    }
    alignas(64) float levels[kLlamaBlock];
    const VF inverse = Value(1.0f / (extreme / -127.0f));
    for (int64_t i = 0; i < kLlamaBlock; i += kSchemeLanes) {
      const NearestLevel nearest = NearestIq4Levels(hn::Mul(inverse, hn::LoadU(DF(), x + i)));
      PutBytes(nearest.code, bytes + i);
      hn::Store(nearest.level, DF(), levels + i);
    }
    float product = 0, square = 0;
    for (int i = 0; i < kLlamaBlock; ++i) {
      float value;
      std::memcpy(&value, x + i, sizeof value);
      const float weighted = value * value * levels[i];
      product = product + weighted * value;
      square = square + weighted * levels[i];
    }
    PutHalf(block, product / square);
  } else {
    const float most = layout.has_fifth ? 31.0f : 15.0f, half = layout.has_fifth ? 16.0f : 8.0f;
    float d, lo = 0;
    if (layout.has_minimum) {
      VF low = hn::LoadU(DF(), x), high = low;
      for (int64_t i = kSchemeLanes; i < kLlamaBlock; i += kSchemeLanes) {
        low = hn::Min(low, hn::LoadU(DF(), x + i));
        high = hn::Max(high, hn::LoadU(DF(), x + i));
      }
      lo = hn::ReduceMin(DF(), low);
      if (lo == 0) {  // which of two zeros is stored: the first
        for (int i = kLlamaBlock - 1; i >= 0; --i) {
          float value;
          std::memcpy(&value, x + i, sizeof value);
          if (value == 0) lo = value;
        }
      }
      d = (hn::ReduceMax(DF(), high) - lo + 0.0f) / most;  // never -0
    } else {
      d = FirstExtreme(x, amax) / -half;
    }
    const float inverse = d != 0 ? 1.0f / d : 0.0f;
    PutHalf(block, d);
    if (layout.has_minimum) PutHalf(block + 2, lo);
    if (!IsFinite(inverse)) return;
    const VF before = Value(lo), factor = Value(inverse), after = Value(layout.has_minimum ? 0.5f : half + 0.5f);
    for (int64_t i = 0; i < kLlamaBlock; i += kSchemeLanes) {
      const VF v = hn::LoadU(DF(), x + i);
      const VF q = hn::Add(hn::Mul(layout.has_minimum ? hn::Sub(v, before) : v, factor), after);
      // A conversion cuts toward zero; NaN (0 times an overflow) is 0.
      const VF limited = hn::Min(hn::IfThenElseZero(hn::Ge(q, Value(1.0f)), q), Value(most));
      PutBytes(hn::ConvertTo(DI(), limited), bytes + i);
    }
  }
  const hn::Full128<uint8_t> d8;
  const auto low = hn::Load(d8, bytes), high = hn::Load(d8, bytes + 16);
  const auto nibble = hn::Set(d8, 15);
  hn::StoreU(hn::Or(hn::And(low, nibble), hn::ShiftLeft<4>(hn::And(high, nibble))), d8, codes);
  if (layout.has_fifth) {
    uint8_t bits[8];
    hn::StoreMaskBits(d8, hn::Gt(low, nibble), bits);
    std::memcpy(codes - 4, bits, 2);
    hn::StoreMaskBits(d8, hn::Gt(high, nibble), bits);
    std::memcpy(codes - 2, bits, 2);
  }
}

// `levels`: of iq4_nl, as signed bytes.
void DecodeLlamaBlock(Type type, const uint8_t* levels, const uint8_t* block, float* out) {
  const LlamaLayout layout = LayoutOf(type);
  const uint8_t* const codes = block + layout.codes;
  const VF d = Value(GetHalf(block));
  if (type == Type::q8_0) {
    const hn::Rebind<int8_t, DF> d8;
    for (int64_t i = 0; i < kLlamaBlock; i += kSchemeLanes) {
      const VI code = hn::PromoteTo(DI(), hn::LoadU(d8, reinterpret_cast<const int8_t*>(codes + i)));
      hn::StoreU(hn::Mul(hn::ConvertTo(DF(), code), d), DF(), out + i);
    }
    return;
  }
  alignas(64) uint8_t bytes[kLlamaBlock];
  const hn::Full128<uint8_t> d8;
  const auto packed = hn::LoadU(d8, codes);
  auto low = hn::And(packed, hn::Set(d8, 15)), high = hn::ShiftRight<4>(packed);
  if (type == Type::iq4_nl) {
    low = hn::TableLookupBytes(hn::Load(d8, levels), low);
    high = hn::TableLookupBytes(hn::Load(d8, levels), high);
  }
  hn::Store(low, d8, bytes);
  hn::Store(high, d8, bytes + 16);
  if (layout.has_fifth) {
    uint32_t bits;
    std::memcpy(&bits, codes - 4, 4);
    for (int i = 0; i < kLlamaBlock; ++i) bytes[i] = static_cast<uint8_t>(bytes[i] | (bits >> i & 1u) << 4);
  }
  const VF minimum = Value(layout.has_minimum ? GetHalf(block + 2) : 0.0f), half = Value(layout.has_fifth ? 16.0f : 8.0f);
  for (int64_t i = 0; i < kLlamaBlock; i += kSchemeLanes) {
    VF value = FromBytes(bytes + i);
    if (type == Type::iq4_nl) {
      const hn::Rebind<int8_t, DF> signed8;
      value = hn::Mul(d, hn::ConvertTo(DF(), hn::PromoteTo(DI(), hn::LoadU(signed8, reinterpret_cast<const int8_t*>(bytes + i)))));
    } else if (layout.has_minimum) {
      value = hn::Add(hn::Mul(value, d), minimum);
    } else {
      value = hn::Mul(hn::Sub(value, half), d);
    }
    hn::StoreU(value, DF(), out + i);
  }
}

[[maybe_unused]] void DequantizeLlama(const DequantizeJob& job) {
  const Shape& shape = job.shape;
  const int64_t bytes = LlamaBlockBytes(job.spec.type);
  alignas(16) uint8_t levels[16];
  for (int i = 0; i < 16; ++i) levels[i] = static_cast<uint8_t>(static_cast<int8_t>(Iq4Level(i)));
  for (int64_t b = 0; b < shape.batch; ++b) {
    for (int64_t h = 0; h < shape.heads; ++h) {
      for (int64_t t = job.begin; t < job.end; ++t) {
        float* row = job.out + b * job.batch_stride + h * job.head_stride + (t - job.begin) * job.token_stride;
        const uint8_t* block = job.codes + ((b * shape.heads + h) * shape.tokens + t) * (shape.width / kLlamaBlock) * bytes;
        for (int64_t d = 0; d < shape.width; d += kLlamaBlock, block += bytes) DecodeLlamaBlock(job.spec.type, levels, block, row + d);
      }
    }
  }
}

// ---- MX, NVFP4 4-over-6 ----

uint8_t EncodeMxBlock(Type type, MxRule rule, const float* x, uint8_t* codes) {
  const uint8_t bits = MxScale(type, rule, LargestMagnitude<kMxBlock>(x));
  const VF scale = Value(FromE8M0(bits));
  for (int64_t i = 0; i < kMxBlock; i += kSchemeLanes) {
    const VF q = hn::Div(hn::LoadU(DF(), x + i), scale);
    PutBytes(hn::BitCast(DI(), type == Type::mxfp4 ? EncodeE2M1<false>(q) : EncodeE4M3(q, false)), codes + i);
  }
  return bits;
}

// Sum of the squared errors of a block with one of its two scales, in the order of the halving tree.
HWY_INLINE float Nvfp4Error(const float* x, const Nvfp4Scale& scale, float g) {
  alignas(64) float errors[kNvfp4Block];
  const VF inverse = Value(scale.inverse), value = Value(FromE4M3(scale.bits)), global = Value(g);
  for (int64_t i = 0; i < kNvfp4Block; i += kSchemeLanes) {
    const VF v = hn::LoadU(DF(), x + i);
    const VF e = hn::Sub(v, hn::Mul(hn::Mul(DecodeE2M1(EncodeE2M1<false>(hn::Mul(v, inverse))), value), global));
    hn::Store(hn::Mul(e, e), DF(), errors + i);
  }
  const hn::Full128<float> d4;
  const auto sum = hn::Add(hn::Add(hn::Load(d4, errors), hn::Load(d4, errors + 8)), hn::Add(hn::Load(d4, errors + 4), hn::Load(d4, errors + 12)));
  alignas(16) float four[4];
  hn::Store(sum, d4, four);
  return (four[0] + four[2]) + (four[1] + four[3]);
}

uint8_t EncodeNvfp4Block(const float* x, float g, uint8_t* codes) {
  const float amax = LargestMagnitude<kNvfp4Block>(x);
  Nvfp4Scale scale = MakeNvfp4Scale(amax, 6.0f, g);
  const Nvfp4Scale four = MakeNvfp4Scale(amax, 4.0f, g);
  if (Nvfp4Error(x, four, g) < Nvfp4Error(x, scale, g)) scale = four;
  for (int64_t i = 0; i < kNvfp4Block; i += kSchemeLanes) {
    PutBytes(hn::BitCast(DI(), EncodeE2M1<false>(hn::Mul(hn::LoadU(DF(), x + i), Value(scale.inverse)))), codes + i);
  }
  return scale.bits;
}

template <typename RowsF>
void QuantizeBlocks(const QuantizeJob& job, RowsF& rows) {
  const Shape& shape = job.shape;
  const TypeInfo& info = Info(job.spec.type);
  const int64_t bytes = LlamaBlockBytes(info.type), width = shape.width;
  const bool nv = info.block == kNvfp4Block;
  float g = 1.0f;
  if (nv) {
    float amax = 0;
    for (int64_t b = 0; b < shape.batch && job.options.global != GlobalScale::kGiven; ++b) {
      for (int64_t h = 0; h < shape.heads; ++h) {
        for (int64_t t = 0; t < job.valid; ++t) {
          const float* row = rows(b, h, t, job.scratch);
          for (int64_t d = 0; d < width; d += kNvfp4Block) amax = std::max(amax, LargestMagnitude<kNvfp4Block>(row + d));
        }
      }
    }
    g = Nvfp4Global(job.options, amax);
  }
  *job.global = g;
  alignas(64) uint8_t codes[kRowCodes];
  int64_t filled = 0, index = 0;
  uint8_t* out = job.codes;
  const auto flush = [&]() HWY_ATTR {
    PackCodes(info.bits, codes, filled, out);
    out += filled * info.bits / 8;
    filled = 0;
  };
  for (int64_t b = 0; b < shape.batch; ++b) {
    for (int64_t h = 0; h < shape.heads; ++h) {
      for (int64_t t = 0; t < shape.tokens; ++t) {
        const float* row = t < job.valid ? rows(b, h, t, job.scratch) : nullptr;
        for (int64_t d = 0; d < width; d += info.block, ++index) {
          const float* x = row != nullptr ? row + d : kZeroBlock;
          if (bytes > 0) {
            EncodeLlamaBlock(info.type, x, job.codes + index * bytes);
            continue;
          }
          job.scales[index] = nv ? EncodeNvfp4Block(x, g, codes + filled) : EncodeMxBlock(info.type, job.options.rule, x, codes + filled);
          filled += info.block;
          if (filled == kRowCodes) flush();
        }
      }
    }
  }
  if (filled > 0) flush();
}

// ---- KIVI ----

// Integers.h's RoundTo.
HWY_INLINE VF RoundLanes(ScaleType type, VF x) {
  VF a = hn::Abs(x);
  if (type == ScaleType::kF32) {
    const VF most = Value(3.4028234663852886e38f);
    a = hn::IfThenElse(hn::Gt(a, most), most, a);
  } else if (type == ScaleType::kBF16) {
    const VF most = Value(3.3895313892515355e38f);
    a = hn::IfThenElse(hn::Lt(a, most), a, most);
    const VU odd = hn::And(hn::ShiftRight<16>(Bits(a)), Word(1));
    a = Float(hn::And(hn::Add(Bits(a), hn::Add(odd, Word(0x7fff))), Word(0xffff0000)));
  } else {
    const VF most = Value(65504.0f);
    a = hn::IfThenElse(hn::Lt(a, most), a, most);
    const VU odd = hn::And(hn::ShiftRight<13>(Bits(a)), Word(1));
    const VF normal = Float(hn::And(hn::Add(Bits(a), hn::Add(odd, Word(0xfff))), Word(0xffffe000)));
    const VF small = hn::Sub(hn::Add(a, Value(0.5f)), Value(0.5f));  // steps of 2^-24
    a = hn::IfThenElse(hn::Lt(a, Float(Word(0x38800000))), small, normal);
  }
  return hn::IfThenElse(hn::Lt(x, hn::Zero(DF())), hn::Neg(a), a);
}

constexpr int64_t kKiviWidth = 1024, kKiviRows = 256;  // the largest head_dim and channel block that the vector code takes

// Scale and minimum of every element of a row.
struct KiviRow {
  alignas(64) float scales[kKiviWidth + kMaxLanes];
  alignas(64) float minima[kKiviWidth + kMaxLanes];
  int64_t loaded = -1;
};
inline void LoadKivi(const Codec& codec, const Grid& grid, const uint8_t* scales, const uint8_t* zeros, int64_t b, int64_t h, int64_t t, int64_t width,
                     KiviRow* row) {
  const int64_t first = grid.Index(b, h, t, 0);
  if (row->loaded == first) return;
  row->loaded = first;
  const int64_t run = grid.stride[3] == 0 ? width : grid.div[3];
  for (int64_t d = 0, index = first; d < width; d += run, index += grid.stride[3]) {
    const Scale scale = LoadScaleAt(codec, scales, zeros, 1.0f, index);
    const int64_t end = std::min(d + run, width);
    std::fill(row->scales + d, row->scales + end, scale.value);
    std::fill(row->minima + d, row->minima + end, scale.minimum);
  }
}

inline void StoreKivi(const QuantizeJob& job, float top, int64_t index, float low, float high) {
  const ScaleType type = job.spec.scale_type;
  const float lo = RoundTo(type, low), hi = RoundTo(type, high);
  const float scale = RoundTo(type, RoundTo(type, hi - lo) / top);
  PutScale(type, job.scales, index, StoreScale(type, scale, 1.0f).bits);
  const uint32_t sign = lo < 0 ? 0x80u << 8 * (ScaleSize(type) - 1) : 0u;
  PutScale(type, job.zeros, index, StoreScale(type, std::fabs(lo), 1.0f).bits | sign);
}

template <ScaleType kType>
HWY_INLINE VI EncodeKiviLanes(VF x, VF scale, VF minimum, VF top) {
  const VF none = hn::Zero(DF());
  VF q = RoundLanes(kType, hn::Div(RoundLanes(kType, hn::Sub(RoundLanes(kType, x), minimum)), scale));
  q = hn::IfThenElseZero(hn::And(hn::Gt(q, none), hn::Ne(scale, none)), q);
  const VF rounded = hn::Add(hn::Min(q, top), Value(12582912.0f));
  return hn::BitCast(DI(), hn::Sub(Bits(rounded), Word(0x4b400000)));
}

template <ScaleType kType, typename RowsF>
void QuantizeKivi(const QuantizeJob& job, const Codec& codec, RowsF& rows) {
  const Shape& shape = job.shape;
  const int64_t width = shape.width;
  const bool channel = job.spec.axis == Axis::kChannel;
  const int64_t together = channel ? job.spec.block : 1, run = channel ? 1 : job.spec.block;
  *job.global = 1.0f;
  const float* pointers[kKiviRows];
  alignas(64) uint8_t codes[kKiviWidth + kMaxLanes];
  alignas(64) float lo[kKiviWidth + kMaxLanes], hi[kKiviWidth + kMaxLanes];
  KiviRow scales;
  uint8_t* out = job.codes;
  const VF top = Value(codec.top);
  // Rows are multiples of 8 wide; a vector that reaches past the end is loaded in part.
  const auto load = [&](const float* x, int64_t d) HWY_ATTR {
    return d + kSchemeLanes <= width ? hn::LoadU(DF(), x + d) : hn::LoadN(DF(), x + d, static_cast<size_t>(width - d));
  };
  for (int64_t b = 0; b < shape.batch; ++b) {
    for (int64_t h = 0; h < shape.heads; ++h) {
      for (int64_t t = 0; t < shape.tokens; t += together) {
        const int64_t tokens = std::min(together, shape.tokens - t), valid = std::clamp<int64_t>(job.valid - t, 0, tokens);
        for (int64_t i = 0; i < valid; ++i) pointers[i] = rows(b, h, t + i, job.scratch + i * width);
        for (int64_t d = 0; d < width; d += kSchemeLanes) {
          VF low = hn::Zero(DF()), high = low;
          if (valid > 0) low = high = load(pointers[0], d);
          for (int64_t i = 1; i < valid; ++i) {
            const VF x = load(pointers[i], d);
            low = hn::Min(low, x);
            high = hn::Max(high, x);
          }
          hn::StoreU(low, DF(), lo + d);
          hn::StoreU(high, DF(), hi + d);
        }
        int64_t index = job.grid.Index(b, h, t, 0);
        for (int64_t d = 0; d < width; d += run, ++index) {
          const int64_t end = std::min(d + run, width);
          StoreKivi(job, codec.top, index, *std::min_element(lo + d, lo + end), *std::max_element(hi + d, hi + end));
        }
        LoadKivi(codec, job.grid, job.scales, job.zeros, b, h, t, width, &scales);
        for (int64_t i = 0; i < tokens; ++i) {
          for (int64_t d = 0; d < width; d += kSchemeLanes) {
            const VF x = i < valid ? load(pointers[i], d) : hn::Zero(DF());
            PutBytes(EncodeKiviLanes<kType>(x, hn::LoadU(DF(), scales.scales + d), hn::LoadU(DF(), scales.minima + d), top), codes + d);
          }
          PackCodes(codec.bits, codes, width, out);
          out += width * codec.bits / 8;
        }
      }
    }
  }
}

template <ScaleType kType>
void DequantizeKivi(const DequantizeJob& job, const Codec& codec) {
  const Shape& shape = job.shape;
  const int64_t width = shape.width;
  uint8_t buffer[kKiviWidth + 16 + kMaxLanes];
  alignas(64) uint8_t last[kMaxLanes];
  KiviRow scales;
  for (int64_t b = 0; b < shape.batch; ++b) {
    for (int64_t h = 0; h < shape.heads; ++h) {
      for (int64_t t = job.begin; t < job.end; ++t) {
        float* row = job.out + b * job.batch_stride + h * job.head_stride + (t - job.begin) * job.token_stride;
        const uint8_t* codes = UnpackCodes(codec.bits, job.codes, ((b * shape.heads + h) * shape.tokens + t) * width, width, buffer);
        LoadKivi(codec, job.grid, job.scales, job.zeros, b, h, t, width, &scales);
        for (int64_t d = 0; d < width; d += kSchemeLanes) {
          const int64_t n = std::min(kSchemeLanes, width - d);
          if (n < kSchemeLanes) std::memcpy(last, codes + d, static_cast<size_t>(n));
          const VF code = FromBytes(n < kSchemeLanes ? last : codes + d);
          const VF product = RoundLanes(kType, hn::Mul(code, hn::LoadU(DF(), scales.scales + d)));
          const VF value = RoundLanes(kType, hn::Add(product, hn::LoadU(DF(), scales.minima + d)));
          if (n < kSchemeLanes) hn::StoreN(value, DF(), row + d, static_cast<size_t>(n));
          else hn::StoreU(value, DF(), row + d);
        }
      }
    }
  }
}

template <typename F>
bool WithKiviType(ScaleType type, const F& f) {
  switch (type) {
    case ScaleType::kF32: f(std::integral_constant<ScaleType, ScaleType::kF32>()); return true;
    case ScaleType::kF16: f(std::integral_constant<ScaleType, ScaleType::kF16>()); return true;
    case ScaleType::kBF16: f(std::integral_constant<ScaleType, ScaleType::kBF16>()); return true;
    default: return false;
  }
}

// Whether the vector code takes such a KIVI payload, and for quantizing, such an axis.
inline bool TakesKivi(const Spec& spec, int64_t width, bool quantize) {
  if (width > kKiviWidth) return false;
  if (!quantize) return true;
  return width % 8 == 0 && (spec.axis == Axis::kToken || (spec.axis == Axis::kChannel && spec.block <= kKiviRows));
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace kvpages
HWY_AFTER_NAMESPACE();
#endif
