// SPDX-License-Identifier: Apache-2.0
// One `load()`: the kernels chosen for it and the memory it may use. Objects hold it by shared_ptr.
#pragma once

#include <memory>

#include "backends/backend.h"
#include "core/bytes.h"

namespace kvpages {

class DeviceStore;

struct Instance {
  const Backend* backend = nullptr;
  std::shared_ptr<Budget> budget = std::make_shared<Budget>();
  std::shared_ptr<DeviceStore> device;  // encodes, decodes and holds caches (core/page_store.h); null: all is done here
};
using InstanceRef = std::shared_ptr<Instance>;

}  // namespace kvpages
