// SPDX-License-Identifier: Apache-2.0
// The CUDA backend's kernels, compiled by the host compiler, by name.
#pragma once

#include <cstdint>
#include <functional>

#include "backends/cuda/device.h"

namespace kvpages::cuda::shim {

// Blocks of one launch, threads of one block, bytes of shared memory: whether a device takes them.
bool WithinLimits(Extent grid, Extent block, uint32_t shared_bytes);

using Kernel = std::function<void()> (*)(Extent grid, Extent block, uint32_t shared_bytes, void** arguments);
// Null for a name that no kernel has. The kernel, called, reads the arguments; what it returns does the work.
Kernel FindKernel(const char* name);

}  // namespace kvpages::cuda::shim
