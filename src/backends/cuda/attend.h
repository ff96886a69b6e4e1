// SPDX-License-Identifier: Apache-2.0
// softmax(scale * Q K^T) V over pages in device memory, each in its own format (docs/attention.md).
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "backends/cuda/codec.h"
#include "backends/cuda/kernels/attend.h"

namespace kvpages::cuda {

class DeviceAttention {
 public:
  explicit DeviceAttention(const std::shared_ptr<Device>& device) : workspace_(device) {}

  // One layer of any number of sequences. Of the plan, `tile` and `rows` are set here; of a sequence, what its comment says.
  // Arguments were checked (attention/attend.h says what they must be); ERR_UNSUPPORTED for a head_dim beyond what a device's
  // shared memory holds. Not awaited.
  Status Run(AttendPlan plan, std::span<const AttendSequence> sequences);
  uint64_t bytes() const { return workspace_.bytes(); }

 private:
  Status RunSome(AttendPlan plan, std::span<const AttendSequence> sequences);
  Workspace workspace_;
  std::vector<AttendSequence> sequences_;
};

}  // namespace kvpages::cuda
