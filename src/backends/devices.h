// SPDX-License-Identifier: Apache-2.0
// The devices that an instance can have, by name.
#pragma once

#include <memory>
#include <string_view>

#include "core/page_store.h"

namespace kvpages {

// "cuda". ERR_BACKEND where this build or this machine has none (then why), ERR_DEVICE, ERR_MEMORY.
Result<std::shared_ptr<DeviceStore>> OpenDeviceStore(std::string_view name);

}  // namespace kvpages
