// SPDX-License-Identifier: Apache-2.0
// The codec where rows can be read 16 bytes at a time and payloads are counted in 32 bits (codec.cc decides): a thread
// holds eight neighbours of a row, threads beside it the rest of a block. The arithmetic is the formats'; bytes are those
// of generic.cuh.
#pragma once

#include "backends/cuda/kernels/generic.cuh"
#include "backends/cuda/kernels/jobs.h"
#include "backends/cuda/kernels/words.cuh"

namespace kvpages::cuda {

#if defined(__CUDA_ARCH__)
template <typename T>
KVP_DEVICE T LoadAs(const void* at) {
  return *static_cast<const T*>(at);
}
template <typename T>
KVP_DEVICE void StoreAs(void* at, T value) {
  *static_cast<T*>(at) = value;
}
#else
template <typename T>
KVP_DEVICE T LoadAs(const void* at) {
  T value;
  memcpy(&value, at, sizeof(T));
  return value;
}
template <typename T>
KVP_DEVICE void StoreAs(void* at, T value) {
  memcpy(at, &value, sizeof(T));
}
#endif

// What the compiler knows about the codes of a kernel made for one type.
struct AnyType {
  KVP_DEVICE static Codec Of(const Codec& codec) { return codec; }
  KVP_DEVICE static uint32_t Code(const Codec& codec, float x, const Scale& scale) { return EncodeAny(codec, x, scale); }
  KVP_DEVICE static float Value(const Codec& codec, uint32_t code, const Scale& scale) { return DecodeAny(codec, code, scale); }
  KVP_DEVICE static float Error(const Codec& codec, float x, const Scale& scale) { return SquaredErrorAny(codec, x, scale); }
};
template <Type kType, Family kFamily, bool kSigned>
struct OneType {
  KVP_DEVICE static Codec Of(Codec codec) {
    codec.type = kType;
    codec.family = kFamily;
    codec.bits = CodeBits(kType);
    codec.is_signed = kSigned;
    codec.kivi = false;
    return codec;
  }
  KVP_DEVICE static uint32_t Code(const Codec& codec, float x, const Scale& scale) { return Encode(codec, x, scale); }
  KVP_DEVICE static float Value(const Codec& codec, uint32_t code, const Scale& scale) { return Decode(codec, code, scale); }
  KVP_DEVICE static float Error(const Codec& codec, float x, const Scale& scale) { return SquaredError(codec, x, scale); }
};

KVP_DEVICE void WidenEight(Type type, const uint8_t* data, int64_t index, float* x) {
  if (type == Type::f32) {
    KVP_UNROLL
    for (int i = 0; i < 2; ++i) {
      const uint4 word = LoadAs<uint4>(data + index * 4 + 16 * i);
      x[4 * i] = FloatOf(word.x);
      x[4 * i + 1] = FloatOf(word.y);
      x[4 * i + 2] = FloatOf(word.z);
      x[4 * i + 3] = FloatOf(word.w);
    }
    return;
  }
  const uint4 word = LoadAs<uint4>(data + index * 2);
  const uint32_t pairs[4] = {word.x, word.y, word.z, word.w};
  KVP_UNROLL
  for (int i = 0; i < 8; ++i) {
    const auto half = static_cast<uint16_t>(pairs[i / 2] >> (16 * (i % 2)));
    x[i] = type == Type::f16 ? FromF16(half) : FromBF16(half);
  }
}

// Where eight neighbours stand: `chunk` counts them through the payload.
struct Chunk {
  uint32_t b, h, t, d;
};
KVP_DEVICE Chunk ChunkAt(const Shape& shape, uint32_t chunk) {
  const auto chunks = static_cast<uint32_t>(shape.width) / 8, tokens = static_cast<uint32_t>(shape.tokens),
             heads = static_cast<uint32_t>(shape.heads);
  const uint32_t row = chunk / chunks, head = row / tokens;
  return {head / heads, head % heads, row % tokens, chunk % chunks * 8};
}

// Before rotation; zeros in rows that are not valid.
KVP_DEVICE void LoadEight(const EncodeItem& item, const RowSource& source, const Chunk& at, float* x) {
  if (at.t >= item.valid) {
    KVP_UNROLL
    for (int i = 0; i < 8; ++i) x[i] = 0.0f;
    return;
  }
  WidenEight(source.type, static_cast<const uint8_t*>(source.data),
             at.b * source.batch_stride + at.h * source.head_stride + at.t * source.token_stride + at.d, x);
  if (!source.clean && source.center == nullptr) return;
  KVP_UNROLL
  for (int i = 0; i < 8; ++i) x[i] = PrepareElement(source, at.h, at.d + static_cast<uint32_t>(i), x[i]);
}

// formats/hadamard.h over the registers of n / 8 threads beside each other; n at most 256.
KVP_DEVICE void RotateEight(float* x, int n) {
  KVP_UNROLL
  for (int stride = 1; stride < 8; stride *= 2) {
    if (stride >= n) break;
    KVP_UNROLL
    for (int i = 0; i < 8; ++i) {
      if ((i & stride) != 0) continue;
      const float a = x[i], b = x[i + stride];
      x[i] = a + b;
      x[i + stride] = a - b;
    }
  }
  for (int lanes = 1; lanes * 8 < n; lanes *= 2) {
    const bool upper = (threadIdx.x & static_cast<uint32_t>(lanes)) != 0;
    KVP_UNROLL
    for (int i = 0; i < 8; ++i) {
      const float other = __shfl_xor_sync(0xffffffffu, x[i], lanes);
      x[i] = upper ? other - x[i] : x[i] + other;
    }
  }
  const float factor = HadamardFactor(n);
  KVP_UNROLL
  for (int i = 0; i < 8; ++i) x[i] = x[i] * factor;
}

// The halving tree over the eight numbers of each of `lanes` threads beside each other: the first halvings add threads.
KVP_DEVICE float SumTogether(float* values, int lanes) {
  for (int half = lanes / 2; half > 0; half /= 2) {
    KVP_UNROLL
    for (int i = 0; i < 8; ++i) values[i] = values[i] + __shfl_xor_sync(0xffffffffu, values[i], half);
  }
  KVP_UNROLL
  for (int half = 4; half > 0; half /= 2) {
    KVP_UNROLL
    for (int i = 0; i < half; ++i) values[i] = values[i] + values[i + half];
  }
  return values[0];
}

KVP_DEVICE void StoreCodes(uint8_t* codes, uint32_t chunk, int bits, uint64_t word) {
  uint8_t* at = codes + static_cast<int64_t>(chunk) * bits;
  switch (bits) {
    case 8: return StoreAs<uint2>(at, {static_cast<uint32_t>(word), static_cast<uint32_t>(word >> 32)});
    case 4: return StoreAs<uint32_t>(at, static_cast<uint32_t>(word));
    case 2: return StoreAs<uint16_t>(at, static_cast<uint16_t>(word));
    default:
      for (int i = 0; i < bits; ++i) at[i] = static_cast<uint8_t>(word >> (8 * i));
  }
}
KVP_DEVICE void StoreScaleWord(ScaleType type, uint64_t scales, int64_t index, uint32_t bits) {
  const int size = ScaleSize(type);
  uint8_t* at = At<uint8_t>(scales) + index * size;
  if (size == 4) return StoreAs<uint32_t>(at, bits);
  if (size == 2) return StoreAs<uint16_t>(at, static_cast<uint16_t>(bits));
  *at = static_cast<uint8_t>(bits);
}
template <typename T>
KVP_DEVICE uint64_t CodesOf(const Codec& codec, const float* x, const Scale& scale) {
  uint64_t word = 0;
  KVP_UNROLL
  for (int i = 0; i < 8; ++i) word |= static_cast<uint64_t>(T::Code(codec, x[i], scale) & ((1u << codec.bits) - 1)) << (i * codec.bits);
  return word;
}

// What the scale of a block along head_dim is found from; `lanes` threads hold it.
KVP_DEVICE Calibrator CalibratorOfLanes(const Codec& codec, Calibration calibration, float global, const float* x, int lanes) {
  Calibrator calibrator;
  calibrator.codec = codec;
  calibrator.calibration = calibration;
  calibrator.global = global;
  if (codec.family == Family::kLevels) {
    float squares[8];
    KVP_UNROLL
    for (int i = 0; i < 8; ++i) squares[i] = x[i] * x[i];
    calibrator.rms = RmsOf(SumTogether(squares, lanes), lanes * 8);
    return calibrator;
  }
  Range range;
  KVP_UNROLL
  for (int i = 0; i < 8; ++i) range.Add(x[i]);
  for (int half = lanes / 2; half > 0; half /= 2) {
    const float lo = __shfl_xor_sync(0xffffffffu, range.lo, half), hi = __shfl_xor_sync(0xffffffffu, range.hi, half);
    if (lo < range.lo) range.lo = lo;
    if (hi > range.hi) range.hi = hi;
  }
  calibrator.range = range;
  return calibrator;
}

// Blocks along head_dim: scale, search and codes in one reading. Grid: (chunks / kThreads, payloads).
template <typename T>
KVP_DEVICE void EncodeTokens(const CodecPlan& plan, const EncodeItem* items) {
  const EncodeItem item = items[blockIdx.y];
  const Codec codec = T::Of(plan.codec);
  const auto count = static_cast<uint32_t>(plan.shape.elements() / 8), thread = static_cast<uint32_t>(ThreadIndex());
  // Threads without work keep their warp complete.
  const uint32_t chunk = thread < count ? thread : count - 1;
  float x[8];
  LoadEight(item, SourceOf(plan, item), ChunkAt(plan.shape, chunk), x);
  if (plan.hadamard > 0) RotateEight(x, static_cast<int>(plan.hadamard));
  const int lanes = static_cast<int>(plan.spec.block) / 8;
  const float global = GlobalOf(plan, item);
  const Calibrator calibrator = CalibratorOfLanes(codec, plan.spec.calibration, global, x, lanes);
  if (thread == 0) *At<float>(item.global) = global;
  const bool stores = thread < count && chunk % static_cast<uint32_t>(lanes) == 0;
  const int64_t group = chunk / static_cast<uint32_t>(lanes);
  Scale scale;
  if (codec.kivi) {
    const Calibrator::Kivi kivi = calibrator.KiviScale();
    if (stores) {
      StoreScaleWord(codec.scale_type, item.scales, group, kivi.scale_bits);
      StoreScaleWord(codec.scale_type, item.zeros, group, kivi.minimum_bits);
    }
    scale = kivi.scale;
  } else {
    const Candidate best = calibrator.Best([&](const Scale& tried) {
      float errors[8];
      KVP_UNROLL
      for (int i = 0; i < 8; ++i) errors[i] = T::Error(codec, x[i], tried);
      return SumTogether(errors, lanes);
    });
    if (stores) {
      StoreScaleWord(codec.scale_type, item.scales, group, best.bits);
      if (plan.has_zeros) At<uint8_t>(item.zeros)[group] = static_cast<uint8_t>(best.scale.zero + codec.zero_offset);
    }
    scale = best.scale;
  }
  if (thread < count) StoreCodes(At<uint8_t>(item.codes), chunk, codec.bits, CodesOf<T>(codec, x, scale));
}

// kSlotTop of the same blocks, for e4m3 scales.
KVP_KERNEL(KvpTokensTop, kThreads)(CodecPlan plan, const EncodeItem* items) {
  const EncodeItem item = items[blockIdx.y];
  const auto count = static_cast<uint32_t>(plan.shape.elements() / 8), thread = static_cast<uint32_t>(ThreadIndex());
  float x[8];
  LoadEight(item, SourceOf(plan, item), ChunkAt(plan.shape, thread < count ? thread : count - 1), x);
  if (plan.hadamard > 0) RotateEight(x, static_cast<int>(plan.hadamard));
  const float top = CalibratorOfLanes(plan.codec, plan.spec.calibration, 1.0f, x, static_cast<int>(plan.spec.block) / 8).TopScale();
  // Threads without work hold one chunk in every lane, which is no row: its rotation is none either.
  MaxToSlot(thread < count && top > 0 ? BitsOf(top) : 0u, At<uint32_t>(item.slots) + kSlotTop);
}

// Stores the scale of a group with this range, and returns it. No search.
KVP_OUTLINE Scale StoreScaleOf(const CodecPlan& plan, const EncodeItem& item, Range range, float global, int64_t group) {
  Calibrator calibrator;
  calibrator.codec = plan.codec;
  calibrator.calibration = plan.spec.calibration;
  calibrator.global = global;
  calibrator.range = range;
  if (plan.codec.kivi) {
    const Calibrator::Kivi kivi = calibrator.KiviScale();
    StoreScaleWord(plan.codec.scale_type, item.scales, group, kivi.scale_bits);
    StoreScaleWord(plan.codec.scale_type, item.zeros, group, kivi.minimum_bits);
    return kivi.scale;
  }
  const Candidate best = calibrator.At(0);
  StoreScaleWord(plan.codec.scale_type, item.scales, group, best.bits);
  if (plan.has_zeros) At<uint8_t>(item.zeros)[group] = static_cast<uint8_t>(best.scale.zero + plan.codec.zero_offset);
  return best.scale;
}

// Blocks along tokens, eight channels a thread, read twice (the second time from the cache). No search.
// Grid: (heads * blocks * chunks of a row / kThreads, payloads).
template <typename T>
KVP_DEVICE void EncodeChannels(const CodecPlan& plan, const EncodeItem* items) {
  const EncodeItem item = items[blockIdx.y];
  const Codec codec = T::Of(plan.codec);
  const auto chunks = static_cast<uint32_t>(plan.shape.width) / 8, tokens = static_cast<uint32_t>(plan.shape.tokens),
             heads = static_cast<uint32_t>(plan.shape.heads);
  const uint32_t block = plan.spec.block < tokens ? static_cast<uint32_t>(plan.spec.block) : tokens, blocks = (tokens + block - 1) / block;
  const auto thread = static_cast<uint32_t>(ThreadIndex());
  if (thread >= static_cast<uint32_t>(plan.shape.batch) * heads * blocks * chunks) return;
  const uint32_t row_block = thread / chunks, head = row_block / blocks;
  Chunk at{head / heads, head % heads, row_block % blocks * block, thread % chunks * 8};
  const uint32_t first = at.t, end = first + block < tokens ? first + block : tokens;
  const RowSource source = SourceOf(plan, item);
  Range ranges[8];
  float x[8];
  for (at.t = first; at.t < end && at.t < item.valid; ++at.t) {
    LoadEight(item, source, at, x);
    KVP_UNROLL
    for (int i = 0; i < 8; ++i) ranges[i].Add(x[i]);
  }
  const float global = GlobalOf(plan, item);
  if (thread == 0) *At<float>(item.global) = global;
  Scale scales[8];
  KVP_UNROLL
  for (int i = 0; i < 8; ++i) {
    const int64_t group = static_cast<int64_t>(row_block) * plan.shape.width + at.d + i;
    scales[i] = StoreScaleOf(plan, item, ranges[i], global, group);
  }
  for (at.t = first; at.t < end; ++at.t) {
    LoadEight(item, source, at, x);
    uint64_t word = 0;
    KVP_UNROLL
    for (int i = 0; i < 8; ++i) word |= static_cast<uint64_t>(T::Code(codec, x[i], scales[i]) & ((1u << codec.bits) - 1)) << (i * codec.bits);
    StoreCodes(At<uint8_t>(item.codes), (head * tokens + at.t) * chunks + at.d / 8, codec.bits, word);
  }
}

// Codes from stored scales where eight neighbours share one. Grid: (chunks / kThreads, payloads).
template <typename T>
KVP_DEVICE void EncodeStored(const CodecPlan& plan, const EncodeItem* items) {
  const EncodeItem item = items[blockIdx.y];
  const Codec codec = T::Of(plan.codec);
  const auto chunk = static_cast<uint32_t>(ThreadIndex());
  if (chunk >= static_cast<uint32_t>(plan.shape.elements() / 8)) return;
  const Chunk at = ChunkAt(plan.shape, chunk);
  float x[8];
  if (plan.hadamard > 0 && at.t < item.valid) {
    WidenEight(Type::f32, At<const uint8_t>(item.rows), static_cast<int64_t>(chunk) * 8, x);
  } else {
    LoadEight(item, SourceOf(plan, item), at, x);
  }
  const int64_t group = plan.spec.axis == Axis::kTensor ? 0 : plan.spec.axis == Axis::kHead ? at.h : plan.grid.Index(at.b, at.h, at.t, at.d);
  const Scale scale = LoadScaleAt(codec, At<const uint8_t>(item.scales), plan.has_zeros ? At<const uint8_t>(item.zeros) : nullptr,
                                  *At<const float>(item.global), group);
  StoreCodes(At<uint8_t>(item.codes), chunk, codec.bits, CodesOf<T>(codec, x, scale));
}

// Ranges of groups that span rows. Grid: (groups * blocks, payloads).
KVP_KERNEL(KvpRangeEight, kThreads)(CodecPlan plan, const EncodeItem* items, int64_t blocks) {
  const EncodeItem item = items[blockIdx.y];
  const uint32_t group = blockIdx.x / static_cast<uint32_t>(blocks), part = blockIdx.x % static_cast<uint32_t>(blocks);
  const auto chunks = static_cast<uint32_t>(plan.shape.width) / 8, valid = static_cast<uint32_t>(item.valid),
             heads = plan.groups > 1 ? 1u : static_cast<uint32_t>(plan.shape.heads), first_head = plan.groups > 1 ? group : 0u;
  const uint32_t count = static_cast<uint32_t>(plan.shape.batch) * heads * valid * chunks;
  const RowSource source = SourceOf(plan, item);
  Range range;
  for (uint32_t i = part * kThreads + threadIdx.x; i < count; i += static_cast<uint32_t>(blocks) * kThreads) {
    const uint32_t row = i / chunks, head = row / valid;
    const Chunk at{head / heads, first_head + head % heads, row % valid, i % chunks * 8};
    float x[8];
    if (plan.hadamard > 0) {
      const int64_t flat = ((static_cast<int64_t>(at.b) * plan.shape.heads + at.h) * plan.shape.tokens + at.t) * plan.shape.width + at.d;
      WidenEight(Type::f32, At<const uint8_t>(item.rows), flat, x);
    } else {
      LoadEight(item, source, at, x);
    }
    KVP_UNROLL
    for (int k = 0; k < 8; ++k) range.Add(x[k]);
  }
  uint32_t* slots = At<uint32_t>(item.slots) + kSlotGroups + group * kSlotsPerGroup;
  const bool any = !(range.lo > range.hi);
  MaxToSlot(any ? ~OrderKey(range.lo) : 0u, slots + kSlotLow);
  MaxToSlot(any ? OrderKey(range.hi) : 0u, slots + kSlotHigh);
}

// NVFP4, a block of 16 a thread. Grid: (blocks / kThreads, payloads).
KVP_KERNEL(KvpNvfp4, kThreads)(CodecPlan plan, const EncodeItem* items) {
  const EncodeItem item = items[blockIdx.y];
  const auto index = static_cast<uint32_t>(ThreadIndex());
  if (index >= static_cast<uint32_t>(plan.shape.elements() / kNvfp4Block)) return;
  const float global = Nvfp4Global(plan.options, plan.options.global == GlobalScale::kGiven ? 0.0f : RangeFromSlots(item, 0).Amax());
  if (index == 0) *At<float>(item.global) = global;
  float x[kNvfp4Block];
  const Chunk at = ChunkAt(plan.shape, index * 2);
  if (plan.hadamard > 0 && at.t < item.valid) {
    WidenEight(Type::f32, At<const uint8_t>(item.rows), static_cast<int64_t>(index) * 16, x);
    WidenEight(Type::f32, At<const uint8_t>(item.rows), static_cast<int64_t>(index) * 16 + 8, x + 8);
  } else {
    const RowSource source = SourceOf(plan, item);
    LoadEight(item, source, at, x);
    LoadEight(item, source, {at.b, at.h, at.t, at.d + 8}, x + 8);
  }
  uint8_t codes[kNvfp4Block];
  At<uint8_t>(item.scales)[index] = EncodeNvfp4(x, global, plan.spec.type == Type::nvfp4_4over6, codes);
  uint32_t words[2] = {0, 0};
  KVP_UNROLL
  for (int i = 0; i < kNvfp4Block; ++i) words[i / 8] |= static_cast<uint32_t>(codes[i]) << (4 * (i % 8));
  StoreAs<uint2>(At<uint8_t>(item.codes) + static_cast<int64_t>(index) * 8, {words[0], words[1]});
}

// Eight elements a thread, as they are coded; the centre where nothing has to be rotated back.
template <typename T>
KVP_DEVICE void DecodeRows(const CodecPlan& plan, const DecodeItem* items) {
  const DecodeItem item = items[blockIdx.y];
  const auto chunks = static_cast<uint32_t>(plan.shape.width) / 8, rows = static_cast<uint32_t>(item.end - item.begin),
             heads = static_cast<uint32_t>(plan.shape.heads), thread = static_cast<uint32_t>(ThreadIndex());
  if (thread >= static_cast<uint32_t>(plan.shape.batch) * heads * rows * chunks) return;
  const uint32_t row = thread / chunks, head = row / rows;
  const Chunk at{head / heads, head % heads, static_cast<uint32_t>(item.begin) + row % rows, thread % chunks * 8};
  const uint32_t chunk = (head * static_cast<uint32_t>(plan.shape.tokens) + at.t) * chunks + at.d / 8;
  const Codec codec = T::Of(plan.codec);
  const float global = item.global != 0 ? *At<const float>(item.global) : 1.0f;
  const int bits = codec.bits;
  const uint8_t* codes = At<const uint8_t>(item.codes) + static_cast<int64_t>(chunk) * bits;
  uint64_t word = 0;
  if (bits == 8) {
    const uint2 both = LoadAs<uint2>(codes);
    word = static_cast<uint64_t>(both.y) << 32 | both.x;
  } else if (bits == 4) {
    word = LoadAs<uint32_t>(codes);
  } else {
    for (int i = 0; i < bits; ++i) word |= static_cast<uint64_t>(codes[i]) << (8 * i);
  }
  float x[8];
  const uint8_t* scales = At<const uint8_t>(item.scales);
  const uint8_t* zeros = At<const uint8_t>(item.zeros);
  if (plan.grid.stride[3] == 0 || plan.grid.div[3] % 8 == 0) {
    const int64_t group = plan.grid.count == 1 ? 0 : plan.grid.Index(at.b, at.h, at.t, at.d);
    const Scale scale = LoadScaleAt(codec, scales, zeros, global, group);
    KVP_UNROLL
    for (int i = 0; i < 8; ++i) x[i] = T::Value(codec, static_cast<uint32_t>(word >> (i * bits)) & ((1u << bits) - 1), scale);
  } else {
    KVP_UNROLL
    for (int i = 0; i < 8; ++i) {
      const Scale scale = LoadScaleAt(codec, scales, zeros, global, plan.grid.Index(at.b, at.h, at.t, at.d + static_cast<uint32_t>(i)));
      x[i] = T::Value(codec, static_cast<uint32_t>(word >> (i * bits)) & ((1u << bits) - 1), scale);
    }
  }
  if (plan.hadamard == 0 && item.center != 0) {
    KVP_UNROLL
    for (int i = 0; i < 8; ++i) x[i] = x[i] + FromBF16(At<const uint16_t>(item.center)[at.h * plan.shape.width + at.d + i]);
  }
  float* out = At<float>(item.out) + at.b * item.batch_stride + at.h * item.head_stride + (at.t - item.begin) * item.token_stride + at.d;
  StoreAs<uint4>(out, {BitsOf(x[0]), BitsOf(x[1]), BitsOf(x[2]), BitsOf(x[3])});
  StoreAs<uint4>(out + 4, {BitsOf(x[4]), BitsOf(x[5]), BitsOf(x[6]), BitsOf(x[7])});
}

// Types with kernels of their own; all others take the Any ones. FastName in codec.cc chooses.
#define KVP_FAST_TYPES(X)                                       \
  X(Any, AnyType)                                               \
  X(Int8, OneType<Type::int8, Family::kInteger, true>)          \
  X(Int4, OneType<Type::int4, Family::kInteger, true>)          \
  X(E4M3, OneType<Type::e4m3, Family::kFloatCode, true>)        \
  X(Lm4, OneType<Type::lm4, Family::kLevels, false>)
#define KVP_X(name, ...)                                                                                              \
  KVP_KERNEL(KvpTokens##name, kThreads)(CodecPlan plan, const EncodeItem* items) { EncodeTokens<__VA_ARGS__>(plan, items); } \
  KVP_KERNEL(KvpStored##name, kThreads)(CodecPlan plan, const EncodeItem* items) { EncodeStored<__VA_ARGS__>(plan, items); } \
  KVP_KERNEL(KvpChannels##name, kThreads)(CodecPlan plan, const EncodeItem* items) { EncodeChannels<__VA_ARGS__>(plan, items); } \
  KVP_KERNEL(KvpRows##name, kThreads)(CodecPlan plan, const DecodeItem* items) { DecodeRows<__VA_ARGS__>(plan, items); }
KVP_FAST_TYPES(KVP_X)
#undef KVP_X

}  // namespace kvpages::cuda
