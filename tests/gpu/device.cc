// SPDX-License-Identifier: Apache-2.0
#include "cuda/devices.h"
#include "gpu/context.h"

namespace kvpages::cuda {
namespace {

const Result<std::shared_ptr<Context>>& Found() {
  static const auto& found = *new Result<std::shared_ptr<Context>>(OpenContextHere());
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
