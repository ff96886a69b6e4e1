// SPDX-License-Identifier: Apache-2.0
// The device of a build without CUDA.
#include "backends/cuda/driver.h"

namespace kvpages::cuda {
namespace {

#if defined(__EMSCRIPTEN__)
constexpr const char kReason[] = "WebAssembly has no CUDA";
#else
constexpr const char kReason[] = "built without CUDA";
#endif

}  // namespace

Probe ProbeDevice() { return {false, kReason, ""}; }
Result<std::shared_ptr<Device>> OpenDevice() { return MakeError(Code::kBackend, "device", kReason); }

}  // namespace kvpages::cuda
