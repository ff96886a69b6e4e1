// SPDX-License-Identifier: Apache-2.0
// The CUDA backend's codec on a device whose calls fail.
#include <gtest/gtest.h>

#include <memory>

#include "backends/cuda/codec.h"
#include "cuda/memory.h"
#include "cuda/shim.h"

namespace kvpages::cuda {
namespace {

// Whatever call fails, the error comes back and nothing is left on the device.
TEST(CudaCodec, EveryFailureOfTheDeviceIsReported) {
  const auto device = std::make_shared<ShimDevice>();
  Memory memory(*device);
  EncodeItem item;
  item.source = memory.Take(16 * 32 * 4);
  item.codes = memory.Take(16 * 32);
  item.scales = item.global = memory.Take(256);
  item.token_stride = 32;
  item.head_stride = item.batch_stride = 16 * 32;
  item.valid = 16;
  ASSERT_TRUE(device->Clear(item.source, 16 * 32 * 4).ok());
  const uint64_t held = device->held;
  const auto encode = [&] {
    DeviceCodec codec(device);
    return codec.Encode(ParseSpec("int8/tensor/mse/e4m3", "spec").value(), {}, {1, 1, 16, 32}, Type::f32, 0, {&item, 1});
  };
  const uint64_t before = device->calls;
  ASSERT_TRUE(encode().ok());
  const uint64_t calls = device->calls - before;
  ASSERT_GT(calls, 6u);
  for (uint64_t i = 0; i < calls; ++i) {
    device->fails_from = device->calls + 1 + i;
    const Status status = encode();
    ASSERT_FALSE(status.ok()) << i;
    EXPECT_EQ(status.error().code, Code::kDevice);
    EXPECT_EQ(device->held, held);
    device->fails_from = 0;
  }
  device->limit = held;
  EXPECT_EQ(encode().error().code, Code::kMemory);
}

}  // namespace
}  // namespace kvpages::cuda
