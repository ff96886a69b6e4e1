// SPDX-License-Identifier: Apache-2.0
// Every kernel, compiled as one. -fmad=false -ftz=false -prec-div=true -prec-sqrt=true: the codec's bytes depend on it.
#include "backends/cuda/kernels/attend.cuh"
#include "backends/cuda/kernels/generic.cuh"

// Names for a launch.
#define KVP_CUDA_KERNELS(X) \
  X(KvpLimit)               \
  X(KvpRotate)              \
  X(KvpRange)               \
  X(KvpPartials)            \
  X(KvpRms)                 \
  X(KvpTop)                 \
  X(KvpCalibrate)           \
  X(KvpChoose)              \
  X(KvpCodes)               \
  X(KvpScheme)              \
  X(KvpNarrow)              \
  X(KvpDecode)              \
  X(KvpRotateBack)          \
  X(KvpAttendQueries)       \
  X(KvpAttendPart)          \
  X(KvpAttendMerge)
