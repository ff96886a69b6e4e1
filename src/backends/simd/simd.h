// SPDX-License-Identifier: Apache-2.0
// The vector backends of this build.
#pragma once

#include <vector>

#include "backends/backend.h"

namespace kvpages {

// Best first; those that this machine cannot run included.
const std::vector<const Backend*>& SimdBackends();

}  // namespace kvpages
