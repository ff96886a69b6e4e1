// SPDX-License-Identifier: Apache-2.0
// The device that tests and benchmarks for a GPU take: this machine's. With KVPAGES_CUDA_LIBRARY it may be the fake one, which
// needs no kernels.
#pragma once

#include <cstdlib>
#include <memory>

#include "backends/cuda/driver.h"

namespace kvpages::cuda {

#if defined(KVP_CUDA)
inline Result<std::shared_ptr<Context>> OpenContextHere() {
  DriverChoice choice = DefaultChoice();
  if (choice.image == nullptr && std::getenv("KVPAGES_CUDA_LIBRARY") != nullptr) {
    choice.image = "";
    choice.least_version = 0;
  }
  return OpenContext(choice);
}
#endif

}  // namespace kvpages::cuda
