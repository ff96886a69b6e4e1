// SPDX-License-Identifier: Apache-2.0
// A device on the CPU: host memory, and the CUDA backend's own kernels compiled by the host compiler.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "backends/cuda/device.h"

namespace kvpages::cuda {

class ShimDevice : public Device {
 public:
  ~ShimDevice() override;
  std::string Describe() const override { return "CPU shim"; }
  Status Healthy() const override;
  uint32_t Multiprocessors() const override { return 4; }
  Result<DevicePointer> Allocate(uint64_t bytes) override;
  void Free(DevicePointer memory) override;
  Status Upload(DevicePointer to, const void* from, uint64_t bytes, uint64_t rows, uint64_t to_pitch, uint64_t from_pitch) override;
  Status Download(void* to, DevicePointer from, uint64_t bytes, uint64_t rows, uint64_t to_pitch, uint64_t from_pitch) override;
  Status Copy(DevicePointer to, DevicePointer from, uint64_t bytes, uint64_t rows, uint64_t to_pitch, uint64_t from_pitch) override;
  Status Clear(DevicePointer to, uint64_t bytes) override;
  Status Launch(const char* kernel, Extent grid, Extent block, uint32_t shared_bytes, void** arguments) override;
  Status Synchronize() override { return Healthy(); }

  // For tests: memory held and its limit, work so far, and a call number from which on every call fails (0: none).
  // calls_left: the call that many from now on fails, and only that one; allocations_left: so does that allocation, with all after it
  // (0: none).
  uint64_t calls_left = 0, allocations_left = 0;
  uint64_t held = 0, limit = UINT64_MAX, launches = 0, uploaded = 0, downloaded = 0, calls = 0, fails_from = 0;

 private:
  Status Count(const char* call);
  uint64_t blocks_ = 0;
};

}  // namespace kvpages::cuda
