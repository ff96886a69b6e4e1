// SPDX-License-Identifier: Apache-2.0
#include "backends/devices.h"

#include "backends/cuda/driver.h"
#if defined(KVP_CUDA)
#include "backends/cuda/store.h"
#endif

namespace kvpages {

Result<std::shared_ptr<DeviceStore>> OpenDeviceStore(std::string_view name) {
  if (name != "cuda") return MakeError(Code::kBackend, "device", "must be cuda", std::string(name)).Expected("cuda");
  auto device = cuda::OpenDevice();
  if (!device.ok()) return std::move(device.error());
#if defined(KVP_CUDA)
  return cuda::MakeStore(std::move(device.value()));
#else
  return MakeError(Code::kBackend, "device", "built without", std::string(name));
#endif
}

}  // namespace kvpages
