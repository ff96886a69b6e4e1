// SPDX-License-Identifier: Apache-2.0
// The device that a program's tests run on: the CPU shim (shim_device.cc), or this machine's (gpu/device.cc).
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "backends/cuda/device.h"

namespace kvpages::cuda {

std::shared_ptr<Device> NewDevice();  // null where there is none
std::string WhyNoDevice();

// Ends a test as skipped where there is no device.
#define KVP_DEVICE_OR_SKIP(name)           \
  const auto name = NewDevice();           \
  if (name == nullptr) GTEST_SKIP() << WhyNoDevice()

}  // namespace kvpages::cuda
