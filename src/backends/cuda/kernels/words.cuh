// SPDX-License-Identifier: Apache-2.0
// What the kernels say instead of CUDA's own words, so that a host compiler can be given others (tests/cuda/words.h).
#pragma once

#if defined(__CUDACC__)
#define KVP_KERNEL(name, threads) extern "C" __global__ void __launch_bounds__(threads, 1) name
#define KVP_DEVICE __device__ __forceinline__
#define KVP_OUTLINE __device__ __noinline__
#define KVP_SHARED(type, name)           \
  extern __shared__ uint4 kvp_shared[]; \
  type* const name = reinterpret_cast<type*>(kvp_shared)
#define KVP_UNROLL _Pragma("unroll")
#elif !defined(KVP_KERNEL)
#error "Compiled by nvcc, or by a host compiler after the words of tests/cuda/words.h"
#endif
