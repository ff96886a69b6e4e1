// SPDX-License-Identifier: Apache-2.0
// Runs the threads of a block on one thread of the CPU: each is a fibre with a stack of its own that runs until it
// waits at a barrier or for its warp.
#pragma once

#include <cstdint>
#include <functional>

#include "backends/cuda/device.h"

namespace kvpages::cuda::shim {

// Of the running fibre.
extern constinit thread_local Extent t_thread, t_block, t_block_dim, t_grid_dim;
extern constinit thread_local unsigned char* t_shared;

void SyncBlock();
void SyncWarp();
// The value of lane (own ^ lane); all 32 lanes of the warp must take part.
uint64_t Exchange(uint32_t mask, uint64_t value, uint32_t lane);

// Calls `thread` once for each thread of each block. Aborts where threads wait for each other forever.
void Run(Extent grid, Extent block, uint32_t shared_bytes, const std::function<void()>& thread);

}  // namespace kvpages::cuda::shim
