// SPDX-License-Identifier: Apache-2.0
// The device that tests/gpu run on: this machine's. With KVPAGES_CUDA_LIBRARY it may be the fake one, which needs no kernels.
#include <cstdlib>

#include "backends/cuda/driver.h"
#include "cuda/devices.h"

namespace kvpages::cuda {
namespace {

Result<std::shared_ptr<Context>> Choose() {
  DriverChoice choice = DefaultChoice();
  if (choice.image == nullptr && std::getenv("KVPAGES_CUDA_LIBRARY") != nullptr) {
    choice.image = "";
    choice.least_version = 0;
  }
  return OpenContext(choice);
}
const Result<std::shared_ptr<Context>>& Found() {
  static const auto& found = *new Result<std::shared_ptr<Context>>(Choose());
  return found;
}

}  // namespace

std::shared_ptr<Device> NewDevice() {
  if (!Found().ok()) return nullptr;
  auto device = OpenDevice(Found().value());
  EXPECT_TRUE(device.ok()) << (device.ok() ? "" : device.error().message);
  return device.ok() ? device.value() : nullptr;
}

std::string WhyNoDevice() { return Found().ok() ? "the device does not open" : Found().error().message; }

}  // namespace kvpages::cuda
