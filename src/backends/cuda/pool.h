// SPDX-License-Identifier: Apache-2.0
// A device's memory in pieces as small as pages: pieces of one size share a slab, which the device gets back once the last of them
// is free.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "backends/cuda/device.h"
#include "core/device_bytes.h"

namespace kvpages::cuda {

class Pool final : public DeviceHeap {
 public:
  explicit Pool(std::shared_ptr<Device> device) : device_(std::move(device)) {}
  ~Pool() override;
  Result<uint64_t> Allocate(uint64_t bytes) override;
  void Free(uint64_t at, uint64_t bytes) override;
  uint64_t held() const { return held_; }  // of the device's memory

 private:
  struct Slab {
    uint64_t piece = 0, bytes = 0;
    std::vector<uint32_t> free;  // indices of pieces
    uint32_t used = 0;
  };
  std::shared_ptr<Device> device_;
  std::map<DevicePointer, Slab> slabs_;                          // by where they begin
  std::map<uint64_t, std::vector<DevicePointer>> with_room_;     // by size of piece
  uint64_t held_ = 0;
};

}  // namespace kvpages::cuda
