// SPDX-License-Identifier: Apache-2.0
#include "backends/cuda/attend.h"

#include <algorithm>

namespace kvpages::cuda {
namespace {

constexpr uint32_t kThreads = 128;
constexpr int64_t kMostRows = 8, kMostTile = 32;
constexpr int64_t kLeastPartPages = 8, kMostParts = 128;
constexpr int64_t kSharedFloats = (48 << 10) / 4;  // what every device has
constexpr size_t kMostSequences = 32768;

int64_t SharedFloats(const AttendPlan& plan) {
  const int64_t widest = std::max(plan.key_width, plan.value_width) + 1, sums = plan.value_run > 0 ? 2 : 1;
  return plan.tile * widest + plan.rows * (plan.tile + 3 + sums * plan.value_width);
}

template <typename... A>
Status Launch(Device& device, const char* kernel, Extent grid, int64_t shared_floats, A... arguments) {
  void* addresses[] = {static_cast<void*>(&arguments)...};
  return device.Launch(kernel, grid, {kThreads, 1, 1}, static_cast<uint32_t>(shared_floats * 4), addresses);
}

}  // namespace

Status DeviceAttention::Run(AttendPlan plan, std::span<const AttendSequence> sequences) {
  const int64_t group_rows = plan.heads / plan.kv_heads * plan.tokens;
  plan.rows = static_cast<int32_t>(std::min(kMostRows, group_rows));
  plan.tile = static_cast<int32_t>(kMostTile);
  while (SharedFloats(plan) > kSharedFloats && (plan.tile > 1 || plan.rows > 1)) {
    if (plan.tile >= 2 * plan.rows || plan.rows == 1) {
      plan.tile /= 2;
    } else {
      plan.rows /= 2;
    }
  }
  if (SharedFloats(plan) > kSharedFloats) {
    return MakeError(Code::kUnsupported, "headDim", "is beyond what attention on a device can hold", Text(plan.key_width));
  }
  for (size_t first = 0; first < sequences.size(); first += kMostSequences) {
    KVP_TRY(RunSome(plan, sequences.subspan(first, std::min(kMostSequences, sequences.size() - first))));
  }
  return Ok();
}

Status DeviceAttention::RunSome(AttendPlan plan, std::span<const AttendSequence> sequences) {
  Device& device = workspace_.device();
  const int64_t rows = plan.heads * plan.tokens, group_rows = rows / plan.kv_heads;
  const auto round = [](uint64_t bytes) { return (bytes + 255) / 256 * 256; };
  
  const uint64_t prepared_bytes = round(static_cast<uint64_t>(rows * (2 * plan.key_width + 1)) * 4);
  sequences_.assign(sequences.begin(), sequences.end());
  uint64_t bytes = round(sequences.size_bytes());
  int64_t most_parts = 0;
  for (AttendSequence& sequence : sequences_) {
    // From the pages alone: the order of the sums must not depend on the other sequences or the device.
    sequence.part_pages = kLeastPartPages;
    while (CeilDiv(sequence.page_count, sequence.part_pages) > kMostParts) sequence.part_pages *= 2;
    sequence.parts = CeilDiv(sequence.page_count, sequence.part_pages);
    most_parts = std::max(most_parts, sequence.parts);
    sequence.prepared = bytes;
    sequence.sums = bytes + prepared_bytes;
    bytes = sequence.sums + round(static_cast<uint64_t>(sequence.parts * rows * (2 * plan.value_width + 2)) * 4);
  }
  KVP_ASSIGN(const DevicePointer work, workspace_.Take(bytes));
  for (AttendSequence& sequence : sequences_) {
    sequence.prepared += work;
    sequence.sums += work;
  }
  KVP_TRY(device.Upload(work, sequences_.data(), sequences.size_bytes()));
  const auto count = static_cast<uint32_t>(sequences.size());
  const Extent each_row{static_cast<uint32_t>(rows), count, 1};
  KVP_TRY(Launch(device, "KvpAttendQueries", each_row, kThreads, plan, work));
  const Extent parts{static_cast<uint32_t>(plan.kv_heads * most_parts), count, static_cast<uint32_t>(CeilDiv(group_rows, plan.rows))};
  KVP_TRY(Launch(device, "KvpAttendPart", parts, SharedFloats(plan), plan, work, most_parts));
  return Launch(device, "KvpAttendMerge", each_row, plan.value_width, plan, work);
}

}  // namespace kvpages::cuda
