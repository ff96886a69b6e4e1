// SPDX-License-Identifier: Apache-2.0
#include "abi/handles.h"

namespace kvpages::abi {
namespace {
constexpr uint32_t kSlotBits = 20;
constexpr uint32_t kMostSlots = 1u << kSlotBits;
constexpr uint32_t kGenerations = 1u << 12;
// New slots are preferred to reused ones until this many exist, so that stale handles stay recognisable for long.
constexpr size_t kFreshSlots = 1024;
}  // namespace

Result<uint32_t> Handles::AddErased(std::shared_ptr<void> object, const void* tag) {
  uint32_t slot;
  if (!free_.empty() && slots_.size() >= kFreshSlots) {
    slot = free_.front();
    free_.pop_front();
  } else {
    if (slots_.size() >= kMostSlots) {
      return MakeError(Code::kLimit, "", "too many live objects: dispose some of the " + std::to_string(kMostSlots));
    }
    slot = static_cast<uint32_t>(slots_.size());
    slots_.emplace_back();
  }
  slots_[slot].object = std::move(object);
  slots_[slot].tag = tag;
  return slots_[slot].generation << kSlotBits | slot;
}

Result<const Handles::Slot*> Handles::Find(uint32_t handle, const char* argument) const {
  const uint32_t slot = handle & (kMostSlots - 1);
  if (slot >= slots_.size() || slots_[slot].object == nullptr || slots_[slot].generation != handle >> kSlotBits) {
    return MakeError(Code::kDisposed, argument, "has been disposed");
  }
  return &slots_[slot];
}

Result<std::shared_ptr<void>> Handles::GetErased(uint32_t handle, const void* tag, const char* argument) const {
  KVP_ASSIGN(const Slot* slot, Find(handle, argument));
  if (slot->tag != tag) return MakeError(Code::kArgument, argument, "is a handle of another kind of object");
  return slot->object;
}

Status Handles::Remove(uint32_t handle) {
  auto found = Find(handle, "handle");
  if (!found.ok()) return std::move(found.error());
  const uint32_t index = handle & (kMostSlots - 1);
  Slot& slot = slots_[index];
  // The object dies only after the table is consistent again.
  const std::shared_ptr<void> object = std::move(slot.object);
  slot.object = nullptr;
  slot.generation = slot.generation + 1 == kGenerations ? 1 : slot.generation + 1;
  free_.push_back(index);
  return Ok();
}

}  // namespace kvpages::abi
