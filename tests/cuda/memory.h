// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "backends/cuda/device.h"

namespace kvpages::cuda {

// Memory of a device that a test takes, freed at its end.
class Memory {
 public:
  explicit Memory(Device& device) : device_(device) {}
  ~Memory() {
    for (const DevicePointer at : held_) device_.Free(at);
  }
  DevicePointer Take(uint64_t bytes) {
    if (bytes == 0) return 0;
    auto at = device_.Allocate(bytes);
    EXPECT_TRUE(at.ok());
    held_.push_back(at.value());
    return at.value();
  }
  DevicePointer Put(const void* data, uint64_t bytes) {
    const DevicePointer at = Take(bytes);
    EXPECT_TRUE(device_.Upload(at, data, bytes).ok());
    return at;
  }

 private:
  Device& device_;
  std::vector<DevicePointer> held_;
};

}  // namespace kvpages::cuda
