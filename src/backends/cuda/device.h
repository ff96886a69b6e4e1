// SPDX-License-Identifier: Apache-2.0
// What the CUDA backend asks of a device: memory, copies, launches by name. The driver (driver.h) is one implementation,
// the tests' shim, which runs the same kernels on the CPU, the other.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "core/status.h"

namespace kvpages::cuda {

using DevicePointer = uint64_t;  // an address on the device, aligned to 256 bytes where it is allocated; 0: none

struct Extent {
  uint32_t x = 1, y = 1, z = 1;
};

// One context and one stream: work runs in the order of the calls. Not thread-safe; any thread may use it, one at a time.
// Every failure is ERR_DEVICE (ERR_MEMORY where memory is out), naming the CUDA error and the call.
class Device {
 public:
  virtual ~Device() = default;
  // What to show: the device's name, compute capability, driver.
  virtual std::string Describe() const = 0;
  // Ok, or the failure after which no call works any more (the CUDA context is lost).
  virtual Status Healthy() const = 0;
  virtual uint32_t Multiprocessors() const = 0;

  virtual Result<DevicePointer> Allocate(uint64_t bytes) = 0;  // at least 1 byte; not cleared
  virtual void Free(DevicePointer memory) = 0;                 // after the work that was asked for before; 0 is nothing
  // `rows` pieces of `bytes` contiguous bytes, `*_pitch` bytes apart. When they return, host memory may be used again and
  // downloaded bytes are there. Copy runs in order with the launches.
  virtual Status Upload(DevicePointer to, const void* from, uint64_t bytes, uint64_t rows = 1, uint64_t to_pitch = 0,
                        uint64_t from_pitch = 0) = 0;
  virtual Status Download(void* to, DevicePointer from, uint64_t bytes, uint64_t rows = 1, uint64_t to_pitch = 0,
                          uint64_t from_pitch = 0) = 0;
  virtual Status Copy(DevicePointer to, DevicePointer from, uint64_t bytes, uint64_t rows = 1, uint64_t to_pitch = 0,
                      uint64_t from_pitch = 0) = 0;
  virtual Status Clear(DevicePointer to, uint64_t bytes) = 0;  // to zeros
  // `arguments`: the address of each of the kernel's parameters, read before it returns. An empty grid is nothing to do.
  virtual Status Launch(const char* kernel, Extent grid, Extent block, uint32_t shared_bytes, void** arguments) = 0;
  virtual Status Synchronize() = 0;
};

// Memory of a device, freed with its owner.
class DeviceBlock {
 public:
  DeviceBlock() = default;
  static Result<DeviceBlock> Allocate(const std::shared_ptr<Device>& device, uint64_t bytes) {
    DeviceBlock block;
    if (bytes == 0) return block;
    KVP_ASSIGN(block.at_, device->Allocate(bytes));
    block.device_ = device;
    block.bytes_ = bytes;
    return block;
  }
  DeviceBlock(DeviceBlock&& other) noexcept { *this = std::move(other); }
  DeviceBlock& operator=(DeviceBlock&& other) noexcept {
    if (this == &other) return *this;
    if (device_) device_->Free(at_);
    device_ = std::move(other.device_);
    at_ = std::exchange(other.at_, 0);
    bytes_ = std::exchange(other.bytes_, 0);
    return *this;
  }
  ~DeviceBlock() {
    if (device_) device_->Free(at_);
  }
  DevicePointer at() const { return at_; }
  uint64_t bytes() const { return bytes_; }

 private:
  std::shared_ptr<Device> device_;
  DevicePointer at_ = 0;
  uint64_t bytes_ = 0;
};

}  // namespace kvpages::cuda
