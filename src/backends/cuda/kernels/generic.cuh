// SPDX-License-Identifier: Apache-2.0
// The codec for every spec and every shape: one thread a group, eight codes or a block. Specs and shapes that matter for
// speed have kernels of their own in fast.cuh.
#pragma once

#include "backends/cuda/kernels/jobs.h"
#include "backends/cuda/kernels/words.cuh"
#include "formats/calibrate.h"
#include "formats/schemes.h"

namespace kvpages::cuda {

constexpr int kThreads = 256;
constexpr int kLanes = 32;

template <typename T>
KVP_DEVICE T* At(uint64_t address) {
  return reinterpret_cast<T*>(address);
}
// A row's Hadamard rotation in runs of `n` without its factor, by a whole block of threads; all of them see the result.
KVP_DEVICE void RotateRow(float* row, int64_t width, int64_t n) {
  for (int64_t stride = 1; stride < n; stride *= 2) {
    __syncthreads();
    for (int64_t pair = threadIdx.x; pair < width / 2; pair += kThreads) {
      const int64_t j = pair / stride * 2 * stride + pair % stride;
      const float a = row[j], b = row[j + stride];
      row[j] = a + b;
      row[j + stride] = a - b;
    }
  }
  __syncthreads();
}
KVP_DEVICE int64_t ThreadIndex() { return static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; }

// Every type's arithmetic in one place each: unrolled into kernels it would take minutes to compile.
KVP_OUTLINE uint32_t EncodeAny(const Codec& codec, float x, Scale scale) { return Encode(codec, x, scale); }
KVP_OUTLINE float DecodeAny(const Codec& codec, uint32_t code, Scale scale) { return Decode(codec, code, scale); }
KVP_OUTLINE float SquaredErrorAny(const Codec& codec, float x, Scale scale) { return SquaredError(codec, x, scale); }

// Unsigned numbers in the order of the floats, none of them 0; a slot of 0 holds nothing.
KVP_DEVICE uint32_t OrderKey(float x) {
  const uint32_t bits = BitsOf(x);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}
KVP_DEVICE float FromOrderKey(uint32_t key) { return FloatOf(key >> 31 ? key & 0x7fffffffu : ~key); }

// The largest over the block's threads, into *slot. All of the block's threads must call it.
KVP_DEVICE void MaxToSlot(uint32_t value, uint32_t* slot) {
  for (int lane = kLanes / 2; lane > 0; lane /= 2) {
    const uint32_t other = __shfl_xor_sync(0xffffffffu, value, lane);
    value = other > value ? other : value;
  }
  if (threadIdx.x % kLanes == 0 && value > 0) atomicMax(slot, value);
}

struct Place {
  int64_t b, h, t, d;
};
KVP_DEVICE Place PlaceOf(const Shape& shape, int64_t flat) {
  const int64_t row = flat / shape.width, head = row / shape.tokens;
  return {head / shape.heads, head % shape.heads, row % shape.tokens, flat % shape.width};
}

KVP_DEVICE RowSource SourceOf(const CodecPlan& plan, const EncodeItem& item) {
  RowSource source;
  source.data = At<const void>(item.source);
  source.type = plan.source_type;
  source.batch_stride = item.batch_stride;
  source.head_stride = item.head_stride;
  source.token_stride = item.token_stride;
  source.width = plan.shape.width;
  source.center = At<const uint16_t>(item.center);
  source.hadamard = plan.hadamard;
  source.clean = plan.clean;
  if (plan.clean) {
    source.limit = plan.spec.calibration == Calibration::kGiven ? 3.4028234663852886e38f
                                                                 : FloatOf(At<const uint32_t>(item.slots)[kSlotLimit]);
  }
  return source;
}

// An element as the coders see it; rows from `valid` on are not read.
KVP_DEVICE float ElementOf(const CodecPlan& plan, const EncodeItem& item, const RowSource& source, const Place& at) {
  if (plan.hadamard > 0) {
    return At<const float>(item.rows)[((at.b * plan.shape.heads + at.h) * plan.shape.tokens + at.t) * plan.shape.width + at.d];
  }
  const int64_t index = at.b * source.batch_stride + at.h * source.head_stride + at.t * source.token_stride + at.d;
  return PrepareElement(source, at.h, at.d, WidenElement(source.type, source.data, index));
}

// Elements that share a scale.
struct GroupView {
  const CodecPlan* plan;
  const EncodeItem* item;
  RowSource source;
  Place first;
  int64_t count = 0;

  KVP_DEVICE float at(int64_t i) const {
    const int64_t width = plan->shape.width, valid = item->valid;
    Place place = first;
    switch (plan->spec.axis) {
      case Axis::kToken: place.d += i; break;
      case Axis::kChannel: place.t += i; break;
      case Axis::kHead: place = {i / width / valid, first.h, i / width % valid, i % width}; break;
      case Axis::kTensor: {
        const int64_t head = i / width / valid;
        place = {head / plan->shape.heads, head % plan->shape.heads, i / width % valid, i % width};
        break;
      }
    }
    return ElementOf(*plan, *item, source, place);
  }
};

KVP_DEVICE GroupView GroupAt(const CodecPlan& plan, const EncodeItem& item, int64_t group) {
  const Shape& shape = plan.shape;
  const int64_t block = plan.spec.block;
  GroupView view{&plan, &item, SourceOf(plan, item), {0, 0, 0, 0}, 0};
  switch (plan.spec.axis) {
    case Axis::kTensor: view.count = shape.batch * shape.heads * item.valid * shape.width; break;
    case Axis::kHead:
      view.first.h = group;
      view.count = shape.batch * item.valid * shape.width;
      break;
    case Axis::kToken: {
      const int64_t blocks = (shape.width + block - 1) / block, row = group / blocks, head = row / shape.tokens;
      view.first = {head / shape.heads, head % shape.heads, row % shape.tokens, group % blocks * block};
      const int64_t left = shape.width - view.first.d;
      view.count = view.first.t >= item.valid ? 0 : left < block ? left : block;
      break;
    }
    case Axis::kChannel: {
      const int64_t blocks = (shape.tokens + block - 1) / block, row = group / shape.width, head = row / blocks;
      view.first = {head / shape.heads, head % shape.heads, row % blocks * block, group % shape.width};
      const int64_t left = item.valid - view.first.t;
      view.count = left < 0 ? 0 : left < block ? left : block;
      break;
    }
  }
  return view;
}

KVP_DEVICE int64_t PaddedCount(int64_t count) {
  int64_t padded = 1;
  while (padded < count) padded *= 2;
  return padded;
}
KVP_DEVICE float GlobalOf(const CodecPlan& plan, const EncodeItem& item) {
  return plan.spec.scale_type == ScaleType::kE4M3 ? E4M3Global(FloatOf(At<const uint32_t>(item.slots)[kSlotTop])) : 1.0f;
}
KVP_DEVICE Range RangeFromSlots(const EncodeItem& item, int64_t group) {
  const uint32_t* slots = At<const uint32_t>(item.slots) + kSlotGroups + group * kSlotsPerGroup;
  Range range;
  if (slots[kSlotHigh] != 0) {
    range.lo = FromOrderKey(~slots[kSlotLow]);
    range.hi = FromOrderKey(slots[kSlotHigh]);
  }
  return range;
}

KVP_DEVICE Calibrator CalibratorOf(const CodecPlan& plan, const EncodeItem& item, const GroupView& group, int64_t index, float global) {
  Calibrator calibrator;
  calibrator.codec = plan.codec;
  calibrator.calibration = plan.spec.calibration;
  calibrator.global = global;
  const bool levels = plan.codec.family == Family::kLevels;
  if (plan.groups > 0) {
    calibrator.range = RangeFromSlots(item, index);
    calibrator.rms = FloatOf(At<const uint32_t>(item.slots)[kSlotGroups + index * kSlotsPerGroup + kSlotRms]);
  } else if (levels) {
    calibrator.rms = RmsOf(TreeSum(group.count, [&](int64_t i) { return group.at(i) * group.at(i); }), group.count);
  } else {
    for (int64_t i = 0; i < group.count; ++i) calibrator.range.Add(group.at(i));
  }
  return calibrator;
}

// ---- Kernels. Grid: (work of one payload, payloads). ----

// kSlotLimit: the largest finite magnitude of the payload.
KVP_KERNEL(KvpLimit, kThreads)(CodecPlan plan, const EncodeItem* items) {
  const EncodeItem item = items[blockIdx.y];
  const int64_t count = plan.shape.elements(), stride = static_cast<int64_t>(gridDim.x) * kThreads;
  float most = 0;
  for (int64_t i = ThreadIndex(); i < count; i += stride) {
    const Place at = PlaceOf(plan.shape, i);
    if (at.t >= item.valid) continue;
    const int64_t index = at.b * item.batch_stride + at.h * item.head_stride + at.t * item.token_stride + at.d;
    const float x = fabsf(WidenElement(plan.source_type, At<const void>(item.source), index));
    if (IsFinite(x) && x > most) most = x;
  }
  MaxToSlot(BitsOf(most), At<uint32_t>(item.slots) + kSlotLimit);
}

// EncodeItem::rows, a block of threads for a row: all pairs of a step are independent.
KVP_KERNEL(KvpRotate, kThreads)(CodecPlan plan, const EncodeItem* items) {
  const EncodeItem item = items[blockIdx.y];
  const int64_t width = plan.shape.width, n = plan.hadamard;
  const Place at = PlaceOf(plan.shape, static_cast<int64_t>(blockIdx.x) * width);
  if (at.t >= item.valid) return;
  float* row = At<float>(item.rows) + static_cast<int64_t>(blockIdx.x) * width;
  const RowSource source = SourceOf(plan, item);
  const int64_t first = at.b * item.batch_stride + at.h * item.head_stride + at.t * item.token_stride;
  for (int64_t d = threadIdx.x; d < width; d += kThreads) {
    row[d] = PrepareElement(source, at.h, d, WidenElement(source.type, source.data, first + d));
  }
  RotateRow(row, width, n);
  const float factor = HadamardFactor(n);
  for (int64_t d = threadIdx.x; d < width; d += kThreads) row[d] = row[d] * factor;
}

// Ranges of groups that span rows. Grid: (groups * blocks, payloads).
KVP_KERNEL(KvpRange, kThreads)(CodecPlan plan, const EncodeItem* items, int64_t blocks) {
  const EncodeItem item = items[blockIdx.y];
  const int64_t group = blockIdx.x / blocks;
  const GroupView view = GroupAt(plan, item, group);
  Range range;
  for (int64_t i = blockIdx.x % blocks * kThreads + threadIdx.x; i < view.count; i += blocks * kThreads) range.Add(view.at(i));
  uint32_t* slots = At<uint32_t>(item.slots) + kSlotGroups + group * kSlotsPerGroup;
  const bool any = !(range.lo > range.hi);
  MaxToSlot(any ? ~OrderKey(range.lo) : 0u, slots + kSlotLow);
  MaxToSlot(any ? OrderKey(range.hi) : 0u, slots + kSlotHigh);
}

// Partial tree sums of groups that span rows: of squares, or of a candidate's errors. Grid: (groups * candidates *
// partials / kThreads, payloads).
KVP_KERNEL(KvpPartials, kThreads)(CodecPlan plan, const EncodeItem* items, int64_t candidates, bool squares) {
  const EncodeItem item = items[blockIdx.y];
  const int64_t at = ThreadIndex(), sum = at / plan.partials, group = sum / candidates, r = at % plan.partials;
  const GroupView view = GroupAt(plan, item, group);
  const int64_t count = PaddedCount(view.count), padded = count < plan.partials ? plan.partials : count;
  Calibrator calibrator;
  Scale scale;
  if (!squares) {
    calibrator = CalibratorOf(plan, item, view, group, GlobalOf(plan, item));
    scale = calibrator.At(static_cast<int>(sum % candidates)).scale;
  }
  At<float>(item.partials)[at] = TreePart(view.count, padded, r, plan.partials, [&](int64_t i) {
    const float x = view.at(i);
    return squares ? x * x : SquaredErrorAny(plan.codec, x, scale);
  });
}

// The sum over a group's partials; all threads of the block get it.
KVP_DEVICE float SumOfPartials(const float* partials, int64_t count, float* shared) {
  __syncthreads();
  shared[threadIdx.x] = TreePart(count, count < kThreads ? kThreads : count, threadIdx.x, kThreads, [&](int64_t i) { return partials[i]; });
  for (uint32_t half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) shared[threadIdx.x] = shared[threadIdx.x] + shared[threadIdx.x + half];
  }
  __syncthreads();
  return shared[0];
}

// kSlotRms, and with an e4m3 scale kSlotTop. Grid: (groups, payloads).
KVP_KERNEL(KvpRms, kThreads)(CodecPlan plan, const EncodeItem* items) {
  KVP_SHARED(float, shared);
  const EncodeItem item = items[blockIdx.y];
  const float sum = SumOfPartials(At<const float>(item.partials) + blockIdx.x * plan.partials, plan.partials, shared);
  if (threadIdx.x != 0) return;
  const float rms = RmsOf(sum, GroupAt(plan, item, blockIdx.x).count);
  At<uint32_t>(item.slots)[kSlotGroups + blockIdx.x * kSlotsPerGroup + kSlotRms] = BitsOf(rms);
}

// kSlotTop, for e4m3 scales: a thread a group.
KVP_KERNEL(KvpTop, kThreads)(CodecPlan plan, const EncodeItem* items) {
  const EncodeItem item = items[blockIdx.y];
  const int64_t group = ThreadIndex();
  float top = 0;
  if (group < plan.grid.count) top = CalibratorOf(plan, item, GroupAt(plan, item, group), group, 1.0f).TopScale();
  MaxToSlot(top > 0 ? BitsOf(top) : 0u, At<uint32_t>(item.slots) + kSlotTop);
}

KVP_DEVICE void StoreGroup(const CodecPlan& plan, const EncodeItem& item, int64_t group, const Candidate& best) {
  PutScale(plan.spec.scale_type, At<uint8_t>(item.scales), group, best.bits);
  if (plan.has_zeros) At<uint8_t>(item.zeros)[group] = static_cast<uint8_t>(best.scale.zero + plan.codec.zero_offset);
}

// Scales and zero points: a thread a group; searches over groups that span rows are KvpChoose's.
KVP_KERNEL(KvpCalibrate, kThreads)(CodecPlan plan, const EncodeItem* items) {
  const EncodeItem item = items[blockIdx.y];
  const int64_t group = ThreadIndex();
  if (group >= plan.grid.count) return;
  const GroupView view = GroupAt(plan, item, group);
  const float global = GlobalOf(plan, item);
  if (group == 0) *At<float>(item.global) = global;
  const Calibrator calibrator = CalibratorOf(plan, item, view, group, global);
  if (plan.codec.kivi) {
    const Calibrator::Kivi kivi = calibrator.KiviScale();
    PutScale(plan.spec.scale_type, At<uint8_t>(item.scales), group, kivi.scale_bits);
    PutScale(plan.spec.scale_type, At<uint8_t>(item.zeros), group, kivi.minimum_bits);
    return;
  }
  StoreGroup(plan, item, group, calibrator.Best([&](const Scale& scale) {
    return TreeSum(view.count, [&](int64_t i) { return SquaredErrorAny(plan.codec, view.at(i), scale); });
  }));
}

// The search's choice from the partial sums of all candidates. Grid: (groups, payloads).
KVP_KERNEL(KvpChoose, kThreads)(CodecPlan plan, const EncodeItem* items) {
  KVP_SHARED(float, shared);
  const EncodeItem item = items[blockIdx.y];
  const int64_t group = blockIdx.x;
  const float global = GlobalOf(plan, item);
  const Calibrator calibrator = CalibratorOf(plan, item, GroupAt(plan, item, group), group, global);
  const float* partials = At<const float>(item.partials) + group * calibrator.Count() * plan.partials;
  const Candidate best = calibrator.Best([&](const Scale&) {
    const float sum = SumOfPartials(partials, plan.partials, shared);
    partials += plan.partials;
    return sum;
  });
  if (threadIdx.x != 0) return;
  if (group == 0) *At<float>(item.global) = global;
  StoreGroup(plan, item, group, best);
}

// Codes from the stored scales: eight a thread, which are whole bytes of any width.
KVP_KERNEL(KvpCodes, kThreads)(CodecPlan plan, const EncodeItem* items) {
  const EncodeItem item = items[blockIdx.y];
  const Codec codec = plan.codec;
  const int64_t count = plan.shape.elements(), first = ThreadIndex() * 8;
  if (first >= count) return;
  const RowSource source = SourceOf(plan, item);
  const uint8_t* zeros = plan.has_zeros ? At<const uint8_t>(item.zeros) : nullptr;
  const float global = *At<const float>(item.global);
  Place at = PlaceOf(plan.shape, first);
  uint64_t codes = 0;
  for (int i = 0; i < 8 && first + i < count; ++i) {
    const Scale scale = LoadScaleAt(codec, At<const uint8_t>(item.scales), zeros, global, plan.grid.Index(at.b, at.h, at.t, at.d));
    const float x = at.t < item.valid ? ElementOf(plan, item, source, at) : 0.0f;
    const uint32_t code = EncodeAny(codec, x, scale) & ((1u << codec.bits) - 1);
    codes |= static_cast<uint64_t>(code) << (i * codec.bits);
    if (++at.d == plan.shape.width) at = PlaceOf(plan.shape, first + i + 1);
  }
  uint8_t* out = At<uint8_t>(item.codes);
  const int64_t begin = first / 8 * codec.bits;
  for (int i = 0; i < codec.bits && begin + i < plan.code_bytes; ++i) out[begin + i] = static_cast<uint8_t>(codes >> (8 * i));
}

// Schemes: a thread a block.
KVP_KERNEL(KvpScheme, kThreads)(CodecPlan plan, const EncodeItem* items) {
  const EncodeItem item = items[blockIdx.y];
  const int block = SchemeBlock(plan.spec.type);
  const int64_t index = ThreadIndex(), first = index * block;
  if (first >= plan.shape.elements()) return;
  float global = 1.0f;
  if (block == kNvfp4Block) {
    global = Nvfp4Global(plan.options, plan.options.global == GlobalScale::kGiven ? 0.0f : RangeFromSlots(item, 0).Amax());
  }
  if (index == 0) *At<float>(item.global) = global;
  const RowSource source = SourceOf(plan, item);
  Place at = PlaceOf(plan.shape, first);
  float x[kLargestSchemeBlock];
  for (int i = 0; i < block; ++i, ++at.d) x[i] = at.t < item.valid ? ElementOf(plan, item, source, at) : 0.0f;
  EncodeSchemeBlock(plan.spec.type, plan.options, global, x, index, At<uint8_t>(item.codes), At<uint8_t>(item.scales));
}

// From one dense type to another: `codes` are the elements, rows from `valid` on are zeros.
KVP_KERNEL(KvpNarrow, kThreads)(CodecPlan plan, const EncodeItem* items) {
  const EncodeItem item = items[blockIdx.y];
  const int64_t index = ThreadIndex();
  if (index >= plan.shape.elements()) return;
  const Place at = PlaceOf(plan.shape, index);
  const int64_t from = at.b * item.batch_stride + at.h * item.head_stride + at.t * item.token_stride + at.d;
  const float x = at.t < item.valid ? WidenElement(plan.source_type, At<const void>(item.source), from) : 0.0f;
  if (plan.spec.type == Type::f32) {
    At<float>(item.codes)[index] = x;
  } else {
    At<uint16_t>(item.codes)[index] = plan.spec.type == Type::f16 ? ToF16(x) : ToBF16(x);
  }
}

// ---- Decoding. Grid: (work, payloads). ----

KVP_DEVICE float DecodedElement(const CodecPlan& plan, const DecodeItem& item, float global, const Place& at) {
  const int64_t flat = ((at.b * plan.shape.heads + at.h) * plan.shape.tokens + at.t) * plan.shape.width + at.d;
  const uint8_t* codes = At<const uint8_t>(item.codes);
  const Type type = plan.spec.type;
  if (type == Type::f32 || type == Type::f16 || type == Type::bf16) return WidenElement(type, codes, flat);
  if (const int block = SchemeBlock(type); block > 0) {
    return DecodeSchemeElement(type, global, flat / block, static_cast<int>(flat % block), codes, At<const uint8_t>(item.scales));
  }
  const Scale scale = LoadScaleAt(plan.codec, At<const uint8_t>(item.scales), At<const uint8_t>(item.zeros), global,
                                  plan.grid.Index(at.b, at.h, at.t, at.d));
  return DecodeAny(plan.codec, GetCode(codes, plan.codec.bits, flat), scale);
}

// Elements at.d .. at.d + count - 1 of a row, at most eight; at.d is a multiple of 8.
KVP_DEVICE void DecodeEight(const CodecPlan& plan, const DecodeItem& item, float global, Place at, int count, float* values) {
  const Grid& grid = plan.grid;
  const Codec& codec = plan.codec;
  const int bits = codec.bits;
  const int64_t flat = ((at.b * plan.shape.heads + at.h) * plan.shape.tokens + at.t) * plan.shape.width + at.d;
  const bool one_scale = grid.stride[3] == 0 || grid.div[3] % 8 == 0;
  if (codec.family == Family::kDense || codec.family == Family::kScheme || count < 8 || !one_scale || flat % 8 != 0) {
    for (int i = 0; i < count; ++i, ++at.d) values[i] = DecodedElement(plan, item, global, at);
    return;
  }
  const uint8_t* codes = At<const uint8_t>(item.codes) + flat / 8 * bits;
  uint64_t word = 0;
  for (int i = 0; i < bits; ++i) word |= static_cast<uint64_t>(codes[i]) << (8 * i);
  const Scale scale = LoadScaleAt(codec, At<const uint8_t>(item.scales), At<const uint8_t>(item.zeros), global,
                                  grid.Index(at.b, at.h, at.t, at.d));
  KVP_UNROLL
  for (int i = 0; i < 8; ++i) values[i] = DecodeAny(codec, static_cast<uint32_t>(word >> (i * bits)) & ((1u << bits) - 1), scale);
}

// An element a thread, rotated values as they are coded.
KVP_KERNEL(KvpDecode, kThreads)(CodecPlan plan, const DecodeItem* items) {
  const DecodeItem item = items[blockIdx.y];
  const int64_t rows = item.end - item.begin, index = ThreadIndex(), width = plan.shape.width;
  if (index >= plan.shape.batch * plan.shape.heads * rows * width) return;
  const int64_t row = index / width, head = row / rows;
  const Place at{head / plan.shape.heads, head % plan.shape.heads, item.begin + row % rows, index % width};
  float x = DecodedElement(plan, item, item.global != 0 ? *At<const float>(item.global) : 1.0f, at);
  if (plan.hadamard == 0 && item.center != 0) x = x + FromBF16(At<const uint16_t>(item.center)[at.h * width + at.d]);
  At<float>(item.out)[at.b * item.batch_stride + at.h * item.head_stride + (at.t - item.begin) * item.token_stride + at.d] = x;
}

// Rotates decoded rows back and adds the centre: a block of threads for a row.
KVP_KERNEL(KvpRotateBack, kThreads)(CodecPlan plan, const DecodeItem* items) {
  const DecodeItem item = items[blockIdx.y];
  const int64_t rows = item.end - item.begin, width = plan.shape.width, n = plan.hadamard;
  if (blockIdx.x >= plan.shape.batch * plan.shape.heads * rows) return;
  const int64_t head = blockIdx.x / rows;
  const int64_t h = head % plan.shape.heads;
  float* row = At<float>(item.out) + head / plan.shape.heads * item.batch_stride + h * item.head_stride +
               static_cast<int64_t>(blockIdx.x) % rows * item.token_stride;
  RotateRow(row, width, n);
  const float factor = HadamardFactor(n);
  for (int64_t d = threadIdx.x; d < width; d += kThreads) {
    float x = row[d] * factor;
    if (item.center != 0) x = x + FromBF16(At<const uint16_t>(item.center)[h * width + d]);
    row[d] = x;
  }
}

}  // namespace kvpages::cuda
