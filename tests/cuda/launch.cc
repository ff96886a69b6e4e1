// SPDX-License-Identifier: Apache-2.0
#include "cuda/launch.h"

#include <cstring>
#include <tuple>
#include <type_traits>
#include <utility>

#include "cuda/words.h"
// After the words that they need.
#include "backends/cuda/kernels/kernels.cu"

namespace kvpages::cuda {
namespace {

constexpr uint32_t kMostShared = 48 << 10, kMostThreads = 1024, kMostBlocksAcross = 65535;

// As on a device, each thread gets the values that the arguments had at the launch.
template <typename... A>
std::function<void()> Bind(void (*kernel)(A...), Extent grid, Extent block, uint32_t shared_bytes, void** arguments) {
  const auto copy = [&]<size_t... I>(std::index_sequence<I...>) {
    return std::tuple<std::remove_const_t<A>...>(*static_cast<std::remove_const_t<A>*>(arguments[I])...);
  }(std::index_sequence_for<A...>());
  return [=] { shim::Run(grid, block, shared_bytes, [&] { std::apply(kernel, copy); }); };
}

const struct {
  const char* name;
  shim::Kernel kernel;
} kKernels[] = {
#define KVP_X(name) \
  {#name, [](Extent grid, Extent block, uint32_t shared_bytes, void** arguments) { return Bind(name, grid, block, shared_bytes, arguments); }},
    KVP_CUDA_KERNELS(KVP_X)
#undef KVP_X
};

}  // namespace

bool shim::WithinLimits(Extent grid, Extent block, uint32_t shared_bytes) {
  const uint64_t threads = uint64_t{block.x} * block.y * block.z;
  return threads > 0 && threads <= kMostThreads && shared_bytes <= kMostShared && grid.y <= kMostBlocksAcross && grid.z <= kMostBlocksAcross;
}

shim::Kernel shim::FindKernel(const char* name) {
  for (const auto& known : kKernels) {
    if (std::strcmp(known.name, name) == 0) return known.kernel;
  }
  return nullptr;
}

}  // namespace kvpages::cuda
