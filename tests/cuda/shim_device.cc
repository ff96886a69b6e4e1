// SPDX-License-Identifier: Apache-2.0
#include "cuda/devices.h"
#include "cuda/shim.h"

namespace kvpages::cuda {

std::shared_ptr<Device> NewDevice() { return std::make_shared<ShimDevice>(); }
std::string WhyNoDevice() { return "the shim is always there"; }

}  // namespace kvpages::cuda
