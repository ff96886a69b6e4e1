// SPDX-License-Identifier: Apache-2.0
#include "backends/cuda/codec.h"

#include <algorithm>

#include <string>

#include "formats/search.h"

namespace kvpages::cuda {
namespace {

constexpr uint32_t kThreads = 256;
constexpr size_t kMostItems = 32768;  // a grid's second dimension ends at 65535
constexpr uint32_t kRangeBlocks = 256;
constexpr int64_t kMostPartials = 16384;
constexpr uint64_t kMostWorkBytes = uint64_t{64} << 20;  // of the payloads of one launch, if more than one

uint32_t BlocksFor(int64_t threads) { return static_cast<uint32_t>(CeilDiv(threads, kThreads)); }

int64_t Padded(int64_t count) {
  int64_t padded = 1;
  while (padded < count) padded *= 2;
  return padded;
}

// The kernel of a family of fast ones (kernels/fast.cuh) that is made for the type.
std::string FastName(const char* family, Type type) {
  const char* of = type == Type::int8 ? "Int8" : type == Type::int4 ? "Int4" : type == Type::e4m3 ? "E4M3" : type == Type::lm4 ? "Lm4" : "Any";
  return std::string(family) + of;
}

constexpr int64_t kMostFastElements = int64_t{1} << 34;  // groups of eight are counted in 32 bits

// Whether rows can be read and codes be written eight elements at a time.
bool ReadsEight(const Shape& shape, std::span<const EncodeItem> items) {
  if (shape.width % 8 != 0 || shape.elements() >= kMostFastElements) return false;
  for (const EncodeItem& item : items) {
    if (item.source % 16 != 0 || item.codes % 8 != 0 || item.scales % 4 != 0 || item.zeros % 4 != 0 || item.batch_stride % 8 != 0 ||
        item.head_stride % 8 != 0 || item.token_stride % 8 != 0) {
      return false;
    }
  }
  return true;
}
bool WritesEight(const Shape& shape, std::span<const DecodeItem> items) {
  if (shape.width % 8 != 0 || shape.elements() >= kMostFastElements) return false;
  for (const DecodeItem& item : items) {
    if (item.out % 16 != 0 || item.codes % 8 != 0 || item.batch_stride % 4 != 0 || item.head_stride % 4 != 0 || item.token_stride % 4 != 0) {
      return false;
    }
  }
  return true;
}

uint64_t Round(uint64_t bytes) { return (bytes + 255) / 256 * 256; }

// Working memory of one payload.
struct Work {
  uint64_t slots = 0, rows = 0, partials = 0;
  uint64_t total() const { return slots + rows + partials; }
};
Work WorkOf(const CodecPlan& plan) {
  const int64_t candidates = Info(plan.spec.type).family == Family::kLevels ? kRmsRatioCount : kRatioCount;
  return {Round(static_cast<uint64_t>(kSlotGroups + plan.groups * kSlotsPerGroup) * 4),
          plan.hadamard > 0 ? Round(static_cast<uint64_t>(plan.shape.elements()) * 4) : 0,
          Round(static_cast<uint64_t>(plan.groups * candidates * plan.partials) * 4)};
}

template <typename... A>
Status Launch(Device& device, const std::string& kernel, Extent grid, uint32_t shared_bytes, A... arguments) {
  void* addresses[] = {static_cast<void*>(&arguments)...};
  return device.Launch(kernel.c_str(), grid, {kThreads, 1, 1}, shared_bytes, addresses);
}

}  // namespace

Result<DevicePointer> Workspace::Take(uint64_t bytes) {
  if (block_.bytes() < bytes) {
    block_ = DeviceBlock();
    KVP_ASSIGN(block_, DeviceBlock::Allocate(device_, bytes));
  }
  return block_.at();
}

Status DeviceCodec::Encode(const Spec& spec, const SpecOptions& options, const Shape& shape, Type source_type, int64_t hadamard,
                     std::span<const EncodeItem> items) {
  if (shape.elements() == 0) return Ok();
  CodecPlan plan;
  plan.spec = spec;
  plan.options = options;
  plan.shape = shape;
  plan.grid = ScaleGrid(spec, shape);
  plan.codec = MakeCodec(spec, options);
  plan.source_type = source_type;
  plan.hadamard = hadamard;
  plan.clean = options.non_finite == NonFinite::kSaturate;
  const ArraySizes sizes = SizesOf(spec, shape);
  plan.has_zeros = sizes.zeros > 0;
  plan.code_bytes = sizes.codes;
  const TypeInfo& info = Info(spec.type);
  if (info.family == Family::kScheme) {
    plan.groups = info.block == 16 ? 1 : 0;
  } else if (info.family != Family::kDense) {
    plan.groups = spec.axis == Axis::kTensor ? 1 : spec.axis == Axis::kHead ? shape.heads : 0;
  }
  if (plan.groups > 0 && spec.calibration == Calibration::kMse) {
    plan.partials = std::clamp<int64_t>(Padded(shape.elements() / plan.groups) / 16, kThreads, kMostPartials);
  }
  const uint64_t each = WorkOf(plan).total();
  const size_t most = std::clamp<size_t>(kMostWorkBytes / each, 1, kMostItems);
  for (size_t first = 0; first < items.size(); first += most) {
    KVP_TRY(EncodeSome(plan, items.subspan(first, std::min(most, items.size() - first))));
  }
  return Ok();
}

Status DeviceCodec::EncodeSome(CodecPlan plan, std::span<const EncodeItem> items) {
  Device& device = workspace_.device();
  const Spec& spec = plan.spec;
  const int64_t elements = plan.shape.elements(), groups = plan.groups;
  const auto count = static_cast<uint32_t>(items.size());
  const Family family = Info(spec.type).family;
  const bool search = spec.calibration == Calibration::kMse, levels = family == Family::kLevels;
  const int64_t candidates = levels ? kRmsRatioCount : kRatioCount;

  const bool given = family != Family::kScheme && spec.calibration == Calibration::kGiven;
  const bool eight = ReadsEight(plan.shape, items);
  // Blocks along head_dim that the registers of a warp's threads hold, with rotation or without.
  const bool tokens = eight && !given && spec.axis == Axis::kToken && spec.block % 8 == 0 && spec.block <= 256 &&
                      Padded(spec.block) == spec.block && plan.shape.width % spec.block == 0 &&
                      (plan.hadamard == 0 || (plan.hadamard >= 8 && plan.hadamard <= 256));

  Work each = WorkOf(plan);
  if (tokens) each.rows = 0;
  const uint64_t item_bytes = Round(items.size_bytes());
  KVP_ASSIGN(const DevicePointer work, workspace_.Take(item_bytes + each.total() * count));
  const DevicePointer slots = work + item_bytes, rows = slots + each.slots * count, partials = rows + each.rows * count;
  items_.assign(items.begin(), items.end());
  for (size_t i = 0; i < items_.size(); ++i) {
    items_[i].slots = slots + i * each.slots;
    items_[i].rows = rows + i * each.rows;
    items_[i].partials = partials + i * each.partials;
  }
  KVP_TRY(device.Upload(work, items_.data(), items.size_bytes()));

  const auto launch = [&](const std::string& kernel, int64_t threads) {
    return Launch(device, kernel, {BlocksFor(threads), count, 1}, 0, plan, work);
  };
  if (family == Family::kDense) return launch("KvpNarrow", elements);
  KVP_TRY(device.Clear(slots, each.slots * count));
  const uint32_t spread = static_cast<uint32_t>(std::clamp<int64_t>(elements / (kThreads * 8), 1, kRangeBlocks));
  if (plan.clean && !given) KVP_TRY(Launch(device, "KvpLimit", {spread, count, 1}, 0, plan, work));
  const int64_t chunks = elements / 8;
  if (tokens) {
    if (spec.scale_type == ScaleType::kE4M3) KVP_TRY(launch("KvpTokensTop", chunks));
    return launch(FastName("KvpTokens", spec.type), chunks);
  }
  if (plan.hadamard > 0) {
    KVP_TRY(Launch(device, "KvpRotate", {static_cast<uint32_t>(plan.shape.rows()), count, 1}, 0, plan, work));
  }
  const auto ranges = [&] {
    const int64_t blocks = CeilDiv(spread, groups);
    return Launch(device, eight ? "KvpRangeEight" : "KvpRange", {static_cast<uint32_t>(groups * blocks), count, 1}, 0, plan, work, blocks);
  };
  if (family == Family::kScheme) {
    if (groups > 0 && plan.options.global != GlobalScale::kGiven) KVP_TRY(ranges());
    const int64_t blocks = elements / Info(spec.type).block;
    return launch(eight && groups > 0 ? "KvpNvfp4" : "KvpScheme", blocks);
  }
  if (!given) {
    const auto sums = [&](int64_t of, bool squares) {
      return Launch(device, "KvpPartials", {BlocksFor(groups * of * plan.partials), count, 1}, 0, plan, work, of, squares);
    };
    const Extent whole{static_cast<uint32_t>(groups), count, 1};
    if (groups > 0 && !levels) KVP_TRY(ranges());
    if (groups > 0 && levels) {
      KVP_TRY(sums(1, true));
      KVP_TRY(Launch(device, "KvpRms", whole, kThreads * 4, plan, work));
    }
    if (spec.scale_type == ScaleType::kE4M3) KVP_TRY(launch("KvpTop", plan.grid.count));
    if (eight && spec.axis == Axis::kChannel && !search && plan.hadamard == 0) {
      return launch(FastName("KvpChannels", spec.type), plan.grid.count / 8);
    }
    if (groups > 0 && search) {
      KVP_TRY(sums(candidates, false));
      KVP_TRY(Launch(device, "KvpChoose", whole, kThreads * 4, plan, work));
    } else {
      KVP_TRY(launch("KvpCalibrate", plan.grid.count));
    }
  }
  const bool one_scale = groups > 0 || (spec.axis == Axis::kToken && spec.block % 8 == 0);
  return launch(eight && one_scale ? FastName("KvpStored", spec.type) : "KvpCodes", CeilDiv(elements, 8));
}

CodecPlan DecodePlan(const Spec& spec, const Shape& shape, const Grid& grid, int64_t hadamard) {
  CodecPlan plan;
  plan.spec = spec;
  plan.shape = shape;
  plan.grid = grid;
  plan.codec = MakeCodec(spec);
  plan.hadamard = hadamard;
  return plan;
}

Status DeviceCodec::Decode(const Spec& spec, const Shape& shape, const Grid& grid, int64_t hadamard, std::span<const DecodeItem> items) {
  if (shape.elements() == 0) return Ok();
  const CodecPlan plan = DecodePlan(spec, shape, grid, hadamard);
  for (size_t first = 0; first < items.size(); first += kMostItems) {
    KVP_TRY(DecodeSome(plan, items.subspan(first, std::min(kMostItems, items.size() - first))));
  }
  return Ok();
}

Status DeviceCodec::DecodeSome(const CodecPlan& plan, std::span<const DecodeItem> items) {
  Device& device = workspace_.device();
  int64_t rows = 0;  // of the longest item
  for (const DecodeItem& item : items) rows = std::max(rows, (item.end - item.begin) * plan.shape.batch * plan.shape.heads);
  if (rows == 0) return Ok();
  const auto count = static_cast<uint32_t>(items.size());
  KVP_ASSIGN(const DevicePointer work, workspace_.Take(items.size_bytes()));
  KVP_TRY(device.Upload(work, items.data(), items.size_bytes()));
  const Family family = Info(plan.spec.type).family;
  const bool eight = family != Family::kDense && family != Family::kScheme && WritesEight(plan.shape, items);
  const uint32_t blocks = BlocksFor(rows * plan.shape.width / (eight ? 8 : 1));
  KVP_TRY(Launch(device, eight ? FastName("KvpRows", plan.spec.type) : "KvpDecode", {blocks, count, 1}, 0, plan, work));
  if (plan.hadamard == 0) return Ok();
  return Launch(device, "KvpRotateBack", {static_cast<uint32_t>(rows), count, 1}, 0, plan, work);
}

Status DeviceCodec::Measure(const Spec& spec, const Shape& shape, Type source_type, int64_t hadamard, std::span<const EncodeItem> items,
                            std::span<Loss> losses) {
  const bool dense = Info(spec.type).family == Family::kDense;
  CodecPlan plan = DecodePlan(spec, shape, dense ? Grid() : ScaleGrid(spec, shape), hadamard);
  plan.source_type = source_type;
  plan.has_zeros = !dense && SizesOf(spec, shape).zeros > 0;
  const uint64_t each = Round(static_cast<uint64_t>(shape.elements()) * 4) * (hadamard > 0 ? 2 : 1);
  const size_t most = std::clamp<size_t>(kMostWorkBytes / each, 1, kMostItems);
  for (size_t first = 0; first < items.size(); first += most) {
    const size_t count = std::min(most, items.size() - first);
    KVP_TRY(MeasureSome(plan, items.subspan(first, count), losses.subspan(first, count)));
  }
  return Ok();
}

Status DeviceCodec::MeasureSome(const CodecPlan& plan, std::span<const EncodeItem> items, std::span<Loss> losses) {
  Device& device = losses_.device();
  const Shape& shape = plan.shape;
  const auto elements = static_cast<uint64_t>(shape.elements());
  const auto count = static_cast<uint32_t>(items.size());
  const uint64_t item_bytes = Round(items.size_bytes()), loss_bytes = Round(losses.size_bytes()), value_bytes = Round(elements * count * 4);
  KVP_ASSIGN(DevicePointer list, losses_.Take(item_bytes + loss_bytes + value_bytes + (plan.hadamard > 0 ? value_bytes : 0)));
  DevicePointer results = list + item_bytes, values = results + loss_bytes;
  const DevicePointer rows = values + value_bytes;
  items_.assign(items.begin(), items.end());
  decode_items_.clear();
  for (size_t i = 0; i < items.size(); ++i) {
    if (plan.hadamard > 0) items_[i].rows = rows + i * elements * 4;
    DecodeItem item;
    item.codes = items[i].codes;
    item.scales = items[i].scales;
    item.zeros = plan.has_zeros ? items[i].zeros : 0;
    item.global = items[i].global;
    item.center = items[i].center;
    item.end = items[i].valid;
    item.out = values + i * elements * 4;
    item.token_stride = shape.width;
    item.head_stride = items[i].valid * shape.width;
    item.batch_stride = shape.heads * item.head_stride;
    decode_items_.push_back(item);
  }
  KVP_TRY(device.Upload(list, items_.data(), items.size_bytes()));
  KVP_TRY(DecodeSome(plan, decode_items_));
  if (plan.hadamard > 0) {
    KVP_TRY(Launch(device, "KvpRotate", {static_cast<uint32_t>(shape.rows()), count, 1}, 0, plan, list));
  }
  KVP_TRY(Launch(device, "KvpLoss", {count, 1, 1}, kThreads * 8, plan, list, values, results));
  return device.Download(losses.data(), results, losses.size_bytes());
}

}  // namespace kvpages::cuda
