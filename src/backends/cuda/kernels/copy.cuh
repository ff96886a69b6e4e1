// SPDX-License-Identifier: Apache-2.0
// Rows to their places: new tokens into the pages of all layers in one launch.
#pragma once

#include "backends/cuda/kernels/fast.cuh"

namespace kvpages::cuda {

KVP_KERNEL(KvpCopyRows, kThreads)(const CopyItem* items) {
  const CopyItem item = items[blockIdx.y];
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  const uint64_t all = item.to | item.from | item.row_bytes | item.to_pitch | item.from_pitch;
  const int64_t word = all % 16 == 0 ? 16 : 2, words = static_cast<int64_t>(item.row_bytes) / word;
  for (int64_t i = ThreadIndex(); i < words * item.rows; i += step) {
    const uint64_t from = item.from + i / words * item.from_pitch + i % words * word;
    const uint64_t to = item.to + i / words * item.to_pitch + i % words * word;
    if (word == 16) {
      StoreAs<uint4>(At<void>(to), LoadAs<uint4>(At<const void>(from)));
    } else {
      *At<uint16_t>(to) = *At<const uint16_t>(from);
    }
  }
}

}  // namespace kvpages::cuda
