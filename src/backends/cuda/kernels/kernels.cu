// SPDX-License-Identifier: Apache-2.0
// Every kernel, compiled as one. -fmad=false -ftz=false -prec-div=true -prec-sqrt=true: the codec's bytes depend on it.
#include "backends/cuda/kernels/attend.cuh"
#include "backends/cuda/kernels/copy.cuh"
#include "backends/cuda/kernels/fast.cuh"
#include "backends/cuda/kernels/generic.cuh"
#include "backends/cuda/kernels/loss.cuh"

// Names for a launch.
#define KVP_CUDA_FAST_KERNELS(X, name) X(KvpTokens##name) X(KvpStored##name) X(KvpChannels##name) X(KvpRows##name)
#define KVP_CUDA_KERNELS(X)      \
  X(KvpLimit)                    \
  X(KvpRotate)                   \
  X(KvpRange)                    \
  X(KvpRangeEight)               \
  X(KvpPartials)                 \
  X(KvpRms)                      \
  X(KvpTop)                      \
  X(KvpTokensTop)                \
  X(KvpCalibrate)                \
  X(KvpChoose)                   \
  X(KvpCodes)                    \
  X(KvpScheme)                   \
  X(KvpNvfp4)                    \
  X(KvpNarrow)                   \
  X(KvpDecode)                   \
  X(KvpRotateBack)               \
  X(KvpCopyRows)                 \
  X(KvpLoss)                     \
  X(KvpAttendQueries)            \
  X(KvpAttendPart)               \
  X(KvpAttendMerge)              \
  KVP_CUDA_FAST_KERNELS(X, Any)  \
  KVP_CUDA_FAST_KERNELS(X, Int8) \
  KVP_CUDA_FAST_KERNELS(X, Int4) \
  KVP_CUDA_FAST_KERNELS(X, E4M3) \
  KVP_CUDA_FAST_KERNELS(X, Lm4)
