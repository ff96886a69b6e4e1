// SPDX-License-Identifier: Apache-2.0
// The words of CUDA C++ that the kernels use, for a host compiler: each thread of a block is a fibre (fibres.h).
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "cuda/fibres.h"

#define KVP_KERNEL(name, threads) void name
#define KVP_DEVICE inline
#define KVP_OUTLINE inline
#define KVP_SHARED(type, name) type* const name = reinterpret_cast<type*>(kvpages::cuda::shim::t_shared)
#define KVP_UNROLL

#define threadIdx (kvpages::cuda::shim::t_thread)
#define blockIdx (kvpages::cuda::shim::t_block)
#define blockDim (kvpages::cuda::shim::t_block_dim)
#define gridDim (kvpages::cuda::shim::t_grid_dim)

namespace kvpages::cuda {

struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};

inline void __syncthreads() { shim::SyncBlock(); }
inline void __syncwarp() { shim::SyncWarp(); }
template <typename T>
T __shfl_xor_sync(uint32_t mask, T value, int lane) {
  static_assert(sizeof(T) <= 8);
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof(T));
  bits = shim::Exchange(mask, bits, static_cast<uint32_t>(lane));
  memcpy(&value, &bits, sizeof(T));
  return value;
}
// Threads of a block take turns, so nothing comes between the two accesses.
inline uint32_t atomicMax(uint32_t* at, uint32_t value) {
  const uint32_t before = *at;
  if (value > before) *at = value;
  return before;
}
inline uint32_t __brev(uint32_t value) {
  uint32_t reversed = 0;
  for (int i = 0; i < 32; ++i) reversed |= (value >> i & 1u) << (31 - i);
  return reversed;
}

}  // namespace kvpages::cuda
