// SPDX-License-Identifier: Apache-2.0
#include "cuda/shim.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>

#include "cuda/launch.h"

namespace kvpages::cuda {
namespace {

constexpr uint64_t kAlignment = 256;

uint8_t* At(DevicePointer pointer) { return reinterpret_cast<uint8_t*>(pointer); }

void CopyRows(uint8_t* to, const uint8_t* from, uint64_t bytes, uint64_t rows, uint64_t to_pitch, uint64_t from_pitch) {
  for (uint64_t i = 0; bytes > 0 && i < rows; ++i) std::memcpy(to + i * to_pitch, from + i * from_pitch, bytes);
}

}  // namespace

ShimDevice::~ShimDevice() {
  if (blocks_ == 0) return;
  std::fprintf(stderr, "CUDA shim: %llu blocks of memory were not freed\n", static_cast<unsigned long long>(blocks_));
  std::abort();
}

Status ShimDevice::Healthy() const {
  if (fails_from == 0 || calls < fails_from) return Ok();
  return MakeError(Code::kDevice, "device", "the shim was told to fail");
}

Status ShimDevice::Count(const char* call) {
  ++calls;
  const bool fails = calls_left > 0 && --calls_left == 0;
  if (Healthy().ok() && !fails) return Ok();
  return MakeError(Code::kDevice, "device", std::string(call) + " failed", "the failure that the test asked for");
}

Result<DevicePointer> ShimDevice::Allocate(uint64_t bytes) {
  KVP_TRY(Count("Allocate"));
  const bool fails = allocations_left == 1;
  if (allocations_left > 1) --allocations_left;
  if (fails || bytes == 0 || bytes > limit - held) return MakeError(Code::kMemory, "device", "no memory", std::to_string(bytes) + " bytes");
  // The size stands in front; behind it is nothing, so that a sanitizer sees accesses beyond the end.
  auto* base = static_cast<uint8_t*>(::operator new(bytes + kAlignment, std::align_val_t(kAlignment)));
  std::memcpy(base, &bytes, sizeof(bytes));
  std::memset(base + kAlignment, 0xa5, bytes);
  held += bytes;
  ++blocks_;
  return reinterpret_cast<DevicePointer>(base + kAlignment);
}

void ShimDevice::Free(DevicePointer memory) {
  if (memory == 0) return;
  uint8_t* base = At(memory) - kAlignment;
  uint64_t bytes;
  std::memcpy(&bytes, base, sizeof(bytes));
  held -= bytes;
  --blocks_;
  ::operator delete(base, std::align_val_t(kAlignment));
}

Status ShimDevice::Upload(DevicePointer to, const void* from, uint64_t bytes, uint64_t rows, uint64_t to_pitch, uint64_t from_pitch) {
  KVP_TRY(Count("Upload"));
  CopyRows(At(to), static_cast<const uint8_t*>(from), bytes, rows, to_pitch, from_pitch);
  uploaded += bytes * rows;
  return Ok();
}

Status ShimDevice::Download(void* to, DevicePointer from, uint64_t bytes, uint64_t rows, uint64_t to_pitch, uint64_t from_pitch) {
  KVP_TRY(Count("Download"));
  CopyRows(static_cast<uint8_t*>(to), At(from), bytes, rows, to_pitch, from_pitch);
  downloaded += bytes * rows;
  return Ok();
}

Status ShimDevice::Copy(DevicePointer to, DevicePointer from, uint64_t bytes, uint64_t rows, uint64_t to_pitch, uint64_t from_pitch) {
  KVP_TRY(Count("Copy"));
  CopyRows(At(to), At(from), bytes, rows, to_pitch, from_pitch);
  return Ok();
}

Status ShimDevice::Clear(DevicePointer to, uint64_t bytes) {
  KVP_TRY(Count("Clear"));
  if (bytes > 0) std::memset(At(to), 0, bytes);
  return Ok();
}

Status ShimDevice::Launch(const char* kernel, Extent grid, Extent block, uint32_t shared_bytes, void** arguments) {
  KVP_TRY(Count(kernel));
  if (!shim::WithinLimits(grid, block, shared_bytes)) {
    return MakeError(Code::kDevice, "device", std::string(kernel) + ": this launch is beyond a device's limits");
  }
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return Ok();
  if (const shim::Kernel known = shim::FindKernel(kernel)) {
    ++launches;
    known(grid, block, shared_bytes, arguments)();
    return Ok();
  }
  return MakeError(Code::kDevice, "device", "no such kernel", kernel);
}

}  // namespace kvpages::cuda
