// SPDX-License-Identifier: Apache-2.0
// Handles: 20 bits slot, 12 bits generation. A slot is used again only after all slots that became free before
// it, so a stale handle meets a new object only after 4095 reuses of its slot.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "core/status.h"

namespace kvpages::abi {

// An object kind is told by the address of its tag: no RTTI.
template <typename T>
inline const void* TagOf() {
  static const char tag = 0;
  return &tag;
}

class Handles {
 public:
  template <typename T>
  Result<uint32_t> Add(std::shared_ptr<T> object) {
    return AddErased(std::move(object), TagOf<T>());
  }
  Result<uint32_t> AddErased(std::shared_ptr<void> object, const void* tag);
  // ERR_DISPOSED for a handle that is not alive, ERR_ARGUMENT for one of another kind.
  template <typename T>
  Result<std::shared_ptr<T>> Get(uint32_t handle, const char* argument) const {
    KVP_ASSIGN(auto object, GetErased(handle, TagOf<T>(), argument));
    return std::static_pointer_cast<T>(std::move(object));
  }
  Status Remove(uint32_t handle);
  int64_t alive() const { return static_cast<int64_t>(slots_.size() - free_.size()); }

 private:
  struct Slot {
    std::shared_ptr<void> object;
    const void* tag = nullptr;
    uint32_t generation = 1;
  };
  Result<std::shared_ptr<void>> GetErased(uint32_t handle, const void* tag, const char* argument) const;
  Result<const Slot*> Find(uint32_t handle, const char* argument) const;
  std::vector<Slot> slots_;
  std::deque<uint32_t> free_;  // longest free first
};

}  // namespace kvpages::abi
