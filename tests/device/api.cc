// SPDX-License-Identifier: Apache-2.0
// What src/backends/cuda/api.h writes out is what cuda.h says. Compiled where a CUDA toolkit is at hand, never run.
#include <cuda.h>

#include <cstddef>
#include <type_traits>

#include "backends/cuda/api.h"

namespace api = kvpages::cuda::api;

#define KVP_SAME(ours, theirs) static_assert(static_cast<int>(api::ours) == static_cast<int>(theirs))
KVP_SAME(kSuccess, CUDA_SUCCESS);
KVP_SAME(kInvalidValue, CUDA_ERROR_INVALID_VALUE);
KVP_SAME(kOutOfMemory, CUDA_ERROR_OUT_OF_MEMORY);
KVP_SAME(kDeinitialized, CUDA_ERROR_DEINITIALIZED);
KVP_SAME(kNoDevice, CUDA_ERROR_NO_DEVICE);
KVP_SAME(kNoBinaryForGpu, CUDA_ERROR_NO_BINARY_FOR_GPU);
KVP_SAME(kEccUncorrectable, CUDA_ERROR_ECC_UNCORRECTABLE);
KVP_SAME(kNvlinkUncorrectable, CUDA_ERROR_NVLINK_UNCORRECTABLE);
KVP_SAME(kNotFound, CUDA_ERROR_NOT_FOUND);
KVP_SAME(kIllegalAddress, CUDA_ERROR_ILLEGAL_ADDRESS);
KVP_SAME(kLaunchOutOfResources, CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES);
KVP_SAME(kLaunchTimeout, CUDA_ERROR_LAUNCH_TIMEOUT);
KVP_SAME(kContextIsDestroyed, CUDA_ERROR_CONTEXT_IS_DESTROYED);
KVP_SAME(kAssert, CUDA_ERROR_ASSERT);
KVP_SAME(kHardwareStackError, CUDA_ERROR_HARDWARE_STACK_ERROR);
KVP_SAME(kIllegalInstruction, CUDA_ERROR_ILLEGAL_INSTRUCTION);
KVP_SAME(kMisalignedAddress, CUDA_ERROR_MISALIGNED_ADDRESS);
KVP_SAME(kInvalidAddressSpace, CUDA_ERROR_INVALID_ADDRESS_SPACE);
KVP_SAME(kInvalidPc, CUDA_ERROR_INVALID_PC);
KVP_SAME(kLaunchFailed, CUDA_ERROR_LAUNCH_FAILED);
KVP_SAME(kUnknown, CUDA_ERROR_UNKNOWN);
KVP_SAME(kMaxPitch, CU_DEVICE_ATTRIBUTE_MAX_PITCH);
KVP_SAME(kMultiprocessors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
KVP_SAME(kComputeMode, CU_DEVICE_ATTRIBUTE_COMPUTE_MODE);
KVP_SAME(kCapabilityMajor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
KVP_SAME(kCapabilityMinor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
KVP_SAME(kComputeModeProhibited, CU_COMPUTEMODE_PROHIBITED);
KVP_SAME(kStreamNonBlocking, CU_STREAM_NON_BLOCKING);
KVP_SAME(kEventDisableTiming, CU_EVENT_DISABLE_TIMING);
KVP_SAME(kHostAllocPortable, CU_MEMHOSTALLOC_PORTABLE);
KVP_SAME(kHostMemory, CU_MEMORYTYPE_HOST);
KVP_SAME(kDeviceMemory, CU_MEMORYTYPE_DEVICE);
#if CUDA_VERSION >= 13000
KVP_SAME(kContained, CUDA_ERROR_CONTAINED);
KVP_SAME(kTensorMemoryLeak, CUDA_ERROR_TENSOR_MEMORY_LEAK);
KVP_SAME(kMpsClientTerminated, CUDA_ERROR_MPS_CLIENT_TERMINATED);
KVP_SAME(kExternalDevice, CUDA_ERROR_EXTERNAL_DEVICE);
#endif

#define KVP_OFFSET(ours, theirs) static_assert(offsetof(api::Copy2D, ours) == offsetof(CUDA_MEMCPY2D, theirs))
KVP_OFFSET(from_x, srcXInBytes);
KVP_OFFSET(from_y, srcY);
KVP_OFFSET(from_type, srcMemoryType);
KVP_OFFSET(from_host, srcHost);
KVP_OFFSET(from_device, srcDevice);
KVP_OFFSET(from_array, srcArray);
KVP_OFFSET(from_pitch, srcPitch);
KVP_OFFSET(to_x, dstXInBytes);
KVP_OFFSET(to_y, dstY);
KVP_OFFSET(to_type, dstMemoryType);
KVP_OFFSET(to_host, dstHost);
KVP_OFFSET(to_device, dstDevice);
KVP_OFFSET(to_array, dstArray);
KVP_OFFSET(to_pitch, dstPitch);
KVP_OFFSET(width_bytes, WidthInBytes);
KVP_OFFSET(rows, Height);
static_assert(sizeof(api::Copy2D) == sizeof(CUDA_MEMCPY2D));

// Numbers of one size, pointers, pointers to pointers.
template <typename T>
constexpr size_t kKind = std::is_pointer_v<T> ? 100 + std::is_pointer_v<std::remove_pointer_t<T>> : sizeof(T);
template <typename... A, typename... B>
constexpr bool Alike(api::Result (*)(A...), CUresult (*)(B...)) {
  if constexpr (sizeof...(A) != sizeof...(B)) return false;
  else return ((kKind<A> == kKind<B>) && ...);
}
#define KVP_X(name, parameters) \
  static_assert(Alike(static_cast<decltype(api::Driver::name)>(nullptr), static_cast<decltype(&name)>(nullptr)), #name);
KVP_CUDA_DRIVER(KVP_X)
