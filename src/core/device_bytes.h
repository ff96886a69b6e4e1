// SPDX-License-Identifier: Apache-2.0
// Blocks of a device's memory, charged to a budget as host memory is.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "core/bytes.h"

namespace kvpages {

// Memory of one device. Addresses are the device's, aligned to 256 bytes; 0 is none.
class DeviceHeap {
 public:
  virtual ~DeviceHeap() = default;
  virtual Result<uint64_t> Allocate(uint64_t bytes) = 0;  // at least 1 byte; not cleared
  virtual void Free(uint64_t at, uint64_t bytes) = 0;     // after the work that was asked for before
};

// A block that is given back with its owner. Move-only. What it is charged with is what a host's copy of the arrays in it
// would be: without padding, so that a budget says the same wherever they lie.
class DeviceBytes {
 public:
  DeviceBytes() = default;
  static Result<DeviceBytes> Allocate(const std::shared_ptr<DeviceHeap>& heap, uint64_t bytes, uint64_t charged,
                                      std::shared_ptr<Budget> budget) {
    DeviceBytes block;
    if (bytes == 0) return block;
    if (budget) KVP_TRY(budget->Take(charged));
    auto at = heap->Allocate(bytes);
    if (!at.ok()) {
      if (budget) budget->Give(charged);
      return std::move(at.error());
    }
    block.heap_ = heap;
    block.at_ = at.value();
    block.bytes_ = bytes;
    block.charged_ = charged;
    block.budget_ = std::move(budget);
    return block;
  }
  DeviceBytes(DeviceBytes&& other) noexcept { *this = std::move(other); }
  DeviceBytes& operator=(DeviceBytes&& other) noexcept {
    if (this == &other) return *this;
    Reset();
    heap_ = std::move(other.heap_);
    budget_ = std::move(other.budget_);
    at_ = std::exchange(other.at_, 0);
    bytes_ = std::exchange(other.bytes_, 0);
    charged_ = std::exchange(other.charged_, 0);
    return *this;
  }
  DeviceBytes(const DeviceBytes&) = delete;
  DeviceBytes& operator=(const DeviceBytes&) = delete;
  ~DeviceBytes() { Reset(); }
  uint64_t at() const { return at_; }
  uint64_t bytes() const { return bytes_; }
  const DeviceHeap* heap() const { return heap_.get(); }

 private:
  void Reset() {
    if (heap_) heap_->Free(at_, bytes_);
    if (budget_) budget_->Give(charged_);
    heap_.reset();
    budget_.reset();
  }
  std::shared_ptr<DeviceHeap> heap_;
  std::shared_ptr<Budget> budget_;
  uint64_t at_ = 0, bytes_ = 0, charged_ = 0;
};

}  // namespace kvpages
