// SPDX-License-Identifier: Apache-2.0
// The oracle: the shortest code for every format, on every platform. Other backends must give its bytes.
#pragma once

#include "backends/backend.h"

namespace kvpages {

extern const Backend kReferenceBackend;

}  // namespace kvpages
