// SPDX-License-Identifier: Apache-2.0
#include "backends/simd/simd.h"

namespace kvpages {

const std::vector<const Backend*>& SimdBackends() {
  static const auto& backends = *new std::vector<const Backend*>();
  return backends;
}

}  // namespace kvpages
