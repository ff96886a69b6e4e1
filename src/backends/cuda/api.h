// SPDX-License-Identifier: Apache-2.0
// The part of the CUDA driver's interface that is used here, so that neither a build nor a run needs anything of CUDA:
// the library is opened by name. Its interface is stable; names with _v2 are what cuda.h calls them without.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvpages::cuda::api {

using Result = int;
using DeviceNumber = int;
using Address = unsigned long long;
using Context = struct ContextOfTheDriver*;
using Module = struct ModuleOfTheDriver*;
using Function = struct FunctionOfTheDriver*;
using Stream = struct StreamOfTheDriver*;
using Event = struct EventOfTheDriver*;

enum : Result {
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kDeinitialized = 4,
  kNoDevice = 100,
  kNoBinaryForGpu = 209,
  kEccUncorrectable = 214,
  kNvlinkUncorrectable = 220,
  kContained = 226,
  kNotFound = 500,
  kIllegalAddress = 700,
  kLaunchOutOfResources = 701,
  kLaunchTimeout = 702,
  kContextIsDestroyed = 709,
  kAssert = 710,
  kHardwareStackError = 714,
  kIllegalInstruction = 715,
  kMisalignedAddress = 716,
  kInvalidAddressSpace = 717,
  kInvalidPc = 718,
  kLaunchFailed = 719,
  kTensorMemoryLeak = 721,
  kMpsClientTerminated = 810,
  kExternalDevice = 911,
  kUnknown = 999,
};

enum Attribute : int { kMaxPitch = 11, kMultiprocessors = 16, kComputeMode = 20, kCapabilityMajor = 75, kCapabilityMinor = 76 };
constexpr int kComputeModeProhibited = 2;
constexpr unsigned kStreamNonBlocking = 1, kEventDisableTiming = 2, kHostAllocPortable = 1;
enum MemoryType : int { kHostMemory = 1, kDeviceMemory = 2 };

struct Copy2D {
  size_t from_x, from_y;
  MemoryType from_type;
  const void* from_host;
  Address from_device;
  void* from_array;
  size_t from_pitch;
  size_t to_x, to_y;
  MemoryType to_type;
  void* to_host;
  Address to_device;
  void* to_array;
  size_t to_pitch;
  size_t width_bytes, rows;
};

// name, parameters
#define KVP_CUDA_DRIVER(X)                                                                                                     \
  X(cuInit, (unsigned flags))                                                                                                  \
  X(cuDriverGetVersion, (int* version))                                                                                        \
  X(cuGetErrorName, (Result error, const char** name))                                                                         \
  X(cuDeviceGetCount, (int* count))                                                                                            \
  X(cuDeviceGet, (DeviceNumber* device, int ordinal))                                                                          \
  X(cuDeviceGetName, (char* name, int length, DeviceNumber device))                                                            \
  X(cuDeviceGetAttribute, (int* value, Attribute attribute, DeviceNumber device))                                              \
  X(cuDevicePrimaryCtxRetain, (Context* context, DeviceNumber device))                                                         \
  X(cuDevicePrimaryCtxRelease_v2, (DeviceNumber device))                                                                       \
  X(cuCtxPushCurrent_v2, (Context context))                                                                                    \
  X(cuCtxPopCurrent_v2, (Context* context))                                                                                    \
  X(cuModuleLoadDataEx, (Module* module, const void* image, unsigned options, int* names, void** values))                      \
  X(cuModuleUnload, (Module module))                                                                                           \
  X(cuModuleGetFunction, (Function* function, Module module, const char* name))                                                \
  X(cuStreamCreate, (Stream* stream, unsigned flags))                                                                          \
  X(cuStreamDestroy_v2, (Stream stream))                                                                                       \
  X(cuStreamSynchronize, (Stream stream))                                                                                      \
  X(cuEventCreate, (Event* event, unsigned flags))                                                                             \
  X(cuEventDestroy_v2, (Event event))                                                                                          \
  X(cuEventRecord, (Event event, Stream stream))                                                                               \
  X(cuEventSynchronize, (Event event))                                                                                         \
  X(cuMemAlloc_v2, (Address* address, size_t bytes))                                                                           \
  X(cuMemFree_v2, (Address address))                                                                                           \
  X(cuMemGetInfo_v2, (size_t* free_bytes, size_t* total_bytes))                                                                \
  X(cuMemHostAlloc, (void** memory, size_t bytes, unsigned flags))                                                             \
  X(cuMemFreeHost, (void* memory))                                                                                             \
  X(cuMemcpyHtoDAsync_v2, (Address to, const void* from, size_t bytes, Stream stream))                                         \
  X(cuMemcpyDtoHAsync_v2, (void* to, Address from, size_t bytes, Stream stream))                                               \
  X(cuMemcpyDtoDAsync_v2, (Address to, Address from, size_t bytes, Stream stream))                                             \
  X(cuMemcpy2DAsync_v2, (const Copy2D* copy, Stream stream))                                                                   \
  X(cuMemsetD8Async, (Address to, unsigned char value, size_t bytes, Stream stream))                                           \
  X(cuLaunchKernel, (Function function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y, \
                     unsigned block_z, unsigned shared_bytes, Stream stream, void** arguments, void** extra))

struct Driver {
#define KVP_X(name, parameters) Result(*name) parameters = nullptr;
  KVP_CUDA_DRIVER(KVP_X)
#undef KVP_X
};

}  // namespace kvpages::cuda::api
