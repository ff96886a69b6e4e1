// SPDX-License-Identifier: Apache-2.0
// The device of this machine, through the CUDA driver's library (docs/cuda.md). In builds without CUDA, WebAssembly among
// them, the functions that name no context are there and say so; KVP_CUDA is defined in the others.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "backends/cuda/device.h"
#include "core/status.h"

namespace kvpages::cuda {

struct Probe {
  bool usable = false;
  std::string reason;  // why, or why not
  std::string device;  // name, compute capability, driver; empty where none was found
};

// Opens the device as OpenDevice does, the first time; what was found is remembered until the context is lost. A device
// without memory is tried again.
Probe ProbeDevice();
// A stream of its own in the process's context. ERR_BACKEND (no driver, no device, too old, built without), ERR_DEVICE,
// ERR_MEMORY.
Result<std::shared_ptr<Device>> OpenDevice();

#if defined(KVP_CUDA)

// What the two functions above take from the environment and the build.
struct DriverChoice {
  std::string library;          // KVPAGES_CUDA_LIBRARY
  std::string device;           // KVPAGES_CUDA_DEVICE, a number in decimal
  const void* image = nullptr;  // the kernels; null where the build has none
  int least_version = 0;        // of the driver that can load them, as cuDriverGetVersion counts
};
DriverChoice DefaultChoice();

// A device's primary context with the kernels, shared by the Devices made from it on any threads.
class Context;
Result<std::shared_ptr<Context>> OpenContext(const DriverChoice& choice);
Result<std::shared_ptr<Device>> OpenDevice(const std::shared_ptr<Context>& context);
Probe ProbeOf(const Context& context);

// Memory of the device now, for benchmarks.
struct DeviceMemory {
  uint64_t free_bytes = 0, total_bytes = 0;
};
Result<DeviceMemory> MemoryOf(Context& context);

#endif

}  // namespace kvpages::cuda
