// SPDX-License-Identifier: Apache-2.0
// Caches in the memory of a device: pages from a pool, encoded, thawed and attended to there.
#pragma once

#include <memory>

#include "backends/cuda/device.h"
#include "core/page_store.h"

namespace kvpages::cuda {

std::shared_ptr<DeviceStore> MakeStore(std::shared_ptr<Device> device);

}  // namespace kvpages::cuda
