// SPDX-License-Identifier: Apache-2.0
// Bodies of kvpages.h: the device of this machine.
#include "abi/context.h"
#include "backends/cuda/driver.h"
#include "core/json.h"
#include "kvpages.h"

using namespace kvpages;       // NOLINT(google-build-using-namespace): as kvpages.cc
using namespace kvpages::abi;  // NOLINT

int32_t kvp_device_probe(uint32_t* blob, size_t blob_len) {
  return Guard([&]() -> Status {
    const cuda::Probe probe = cuda::ProbeDevice();
    Json json;
    json.Open('{').Field("usable", probe.usable).Field("reason", probe.reason).Field("device", probe.device).Close('}');
    return PublishBlob(json.Take(), blob, blob_len);
  });
}
