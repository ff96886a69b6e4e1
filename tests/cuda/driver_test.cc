// SPDX-License-Identifier: Apache-2.0
// The CUDA driver's side of the device interface, against a fake driver library that is opened as the real one is.
#include "backends/cuda/driver.h"

#if defined(KVP_CUDA)

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "backends/cuda/attend.h"
#include "backends/cuda/codec.h"
#include "backends/reference/reference.h"
#include "cuda/fake/fake.h"
#include "cuda/memory.h"
#include "support/payloads.h"

namespace kvpages::cuda {
namespace {

constexpr const char kImage[] = "the fake driver takes anything";

class CudaDriver : public ::testing::Test {
 protected:
  void SetUp() override {
    void* library = dlopen(KVP_FAKE_CUDA, RTLD_NOW | RTLD_LOCAL);
    ASSERT_NE(library, nullptr) << dlerror();
    set_ = reinterpret_cast<decltype(set_)>(dlsym(library, "KvpFakeSet"));
    get_ = reinterpret_cast<decltype(get_)>(dlsym(library, "KvpFakeGet"));
    ASSERT_TRUE(set_ != nullptr && get_ != nullptr);
    Set("reset");
  }
  // Whatever a test did: nothing stays in the driver, nothing was freed under work, nothing was asked of a lost context.
  void TearDown() override {
    for (const char* what : {"held", "locked", "contexts", "modules", "current", "rash", "after"}) EXPECT_EQ(Get(what), 0u) << what;
  }
  void Set(const std::string& words) { set_(words.c_str()); }
  uint64_t Get(const char* what) { return get_(what); }

  static DriverChoice Choice() { return {KVP_FAKE_CUDA, "0", kImage, 13000}; }
  static std::shared_ptr<Context> Open() {
    auto context = OpenContext(Choice());
    EXPECT_TRUE(context.ok()) << (context.ok() ? "" : context.error().message);
    return context.ok() ? context.value() : nullptr;
  }
  static std::shared_ptr<Device> Make(const std::shared_ptr<Context>& context) {
    auto device = OpenDevice(context);
    EXPECT_TRUE(device.ok()) << (device.ok() ? "" : device.error().message);
    return device.ok() ? device.value() : nullptr;
  }
  static void ExpectRefused(const DriverChoice& choice, Code code, const std::string& text) {
    const auto context = OpenContext(choice);
    ASSERT_FALSE(context.ok());
    EXPECT_EQ(context.error().code, code) << context.error().message;
    EXPECT_NE(context.error().message.find(text), std::string::npos) << context.error().message;
  }
  static void ExpectFails(const Status& status, Code code, const std::string& text) {
    ASSERT_FALSE(status.ok());
    EXPECT_EQ(status.error().code, code) << status.error().message;
    EXPECT_EQ(status.error().message, text);
  }

 private:
  void (*set_)(const char*) = nullptr;
  uint64_t (*get_)(const char*) = nullptr;
};

std::vector<uint8_t> Numbers(size_t count, uint32_t seed = 1) {
  std::mt19937 random(seed);
  std::vector<uint8_t> numbers(count);
  for (uint8_t& number : numbers) number = static_cast<uint8_t>(random());
  return numbers;
}

// ---- Opening

TEST_F(CudaDriver, SaysWhatItFound) {
  const auto context = Open();
  const Probe probe = ProbeOf(*context);
  EXPECT_TRUE(probe.usable);
  EXPECT_EQ(probe.device, "Fake device 0, compute capability 9.0, CUDA driver 13.0");
  const auto device = Make(context);
  EXPECT_EQ(device->Describe(), probe.device);
  EXPECT_EQ(device->Multiprocessors(), 4u);
  EXPECT_TRUE(device->Healthy().ok());
  const auto memory = MemoryOf(*context);
  ASSERT_TRUE(memory.ok());
  EXPECT_GT(memory.value().total_bytes, 0u);
}

TEST_F(CudaDriver, LibraryThatIsNotThere) {
  DriverChoice choice = Choice();
  choice.library = "/nowhere/libcuda.so.1";
  ExpectRefused(choice, Code::kBackend, "device: no CUDA driver (");
}

TEST_F(CudaDriver, LibraryThatIsBroken) {
  const auto path = std::filesystem::temp_directory_path() / ("kvpages-broken-" + std::to_string(getpid()) + ".so");
  std::ofstream(path) << "no library";
  DriverChoice choice = Choice();
  choice.library = path.string();
  ExpectRefused(choice, Code::kBackend, "no CUDA driver (");
  std::filesystem::remove(path);
}

TEST_F(CudaDriver, LibraryWithoutAnEntry) {
  DriverChoice choice = Choice();
  choice.library = KVP_FAKE_CUDA_OLD;
  ExpectRefused(choice, Code::kBackend, "the CUDA driver is too old: " KVP_FAKE_CUDA_OLD " has no cuMemsetD8Async");
}

TEST_F(CudaDriver, BuildWithoutKernels) {
  DriverChoice choice = Choice();
  choice.image = nullptr;
  ExpectRefused(choice, Code::kBackend, "without CUDA kernels");
  EXPECT_EQ(Get("calls"), 0u);
}

TEST_F(CudaDriver, NoDevice) {
  Set("devices=0");
  ExpectRefused(Choice(), Code::kBackend, "no CUDA device (cuInit: CUDA_ERROR_NO_DEVICE)");
}

TEST_F(CudaDriver, DeviceThatIsNotThere) {
  Set("devices=2");
  DriverChoice choice = Choice();
  for (const char* device : {"2", "-1", "1x", "", " 1", "99999999999999999999"}) {
    choice.device = device;
    ExpectRefused(choice, Code::kBackend, "KVPAGES_CUDA_DEVICE must be a number from 0 to 1");
  }
  choice.device = "1";
  const auto context = OpenContext(choice);
  ASSERT_TRUE(context.ok());
  EXPECT_EQ(ProbeOf(*context.value()).device.substr(0, 13), "Fake device 1");
}

TEST_F(CudaDriver, DriverThatIsTooOld) {
  Set("version=12040");
  ExpectRefused(Choice(), Code::kBackend, "the driver is too old: it has CUDA 12.4, the kernels need 13.0 or newer");
}

TEST_F(CudaDriver, DeviceThatIsTooOld) {
  Set("capability=7.0");
  ExpectRefused(Choice(), Code::kBackend, "Fake device 0 has compute capability 7.0, the kernels need 7.5 or newer");
  Set("capability=7.5");
  EXPECT_NE(Open(), nullptr);
  Set("capability=12.1");
  EXPECT_NE(Open(), nullptr);
}

TEST_F(CudaDriver, DeviceThatTakesNoWork) {
  Set("prohibited=1");
  ExpectRefused(Choice(), Code::kBackend, "Fake device 0 is set to take no work");
}

TEST_F(CudaDriver, EveryCallOfOpeningMayFail) {
  const char* calls[] = {"cuInit", "cuDriverGetVersion", "cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetName", "cuDeviceGetAttribute",
                         "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent", "cuModuleLoadDataEx"};
  for (const std::string call : calls) {
    const std::string entry = call == "cuCtxPushCurrent" ? call + "_v2" : call;
    Set("reset;" + entry + ":1:803");
    ExpectRefused(Choice(), Code::kDevice, call + " failed, got CUDA_ERROR_SYSTEM_DRIVER_MISMATCH");
    Set("reset;" + entry + ":1:2");
    ExpectRefused(Choice(), Code::kMemory, call + " failed, got CUDA_ERROR_OUT_OF_MEMORY");
    Set("reset;" + entry + ":1:719");
    ExpectRefused(Choice(), Code::kDevice, call + " failed, got CUDA_ERROR_LAUNCH_FAILED");
  }
  Set("reset;cuModuleLoadDataEx:1:209");
  ExpectRefused(Choice(), Code::kDevice, "cuModuleLoadDataEx failed, got CUDA_ERROR_NO_BINARY_FOR_GPU");
  for (const std::string call : {"cuStreamCreate", "cuMemHostAlloc", "cuEventCreate"}) {
    Set("reset;" + call + ":1:2");
    const auto device = OpenDevice(Open());
    ASSERT_FALSE(device.ok());
    EXPECT_EQ(device.error().code, Code::kMemory);
    EXPECT_EQ(device.error().message, "device: " + call + " failed, got CUDA_ERROR_OUT_OF_MEMORY");
  }
}

TEST_F(CudaDriver, DriverThatCannotNameItsErrors) {
  Set("nameless=1;cuInit:1:999");
  ExpectRefused(Choice(), Code::kDevice, "cuInit failed, got CUDA error 999");
}

// ---- Memory

TEST_F(CudaDriver, CopiesOfEverySize) {
  const auto device = Make(Open());
  Memory memory(*device);
  constexpr size_t kMost = (9 << 20) + 77;
  const auto source = Numbers(kMost);
  const DevicePointer one = memory.Take(kMost), two = memory.Take(kMost);
  for (const size_t bytes : {size_t{0}, size_t{1}, size_t{255}, size_t{1} << 20, (size_t{1} << 20) + 1, size_t{4} << 20, kMost}) {
    ASSERT_TRUE(device->Clear(one, kMost).ok());
    std::vector<uint8_t> given(source.begin(), source.begin() + static_cast<std::ptrdiff_t>(bytes));
    ASSERT_TRUE(device->Upload(one, given.data(), bytes).ok());
    // Host memory may be used again.
    std::fill(given.begin(), given.end(), uint8_t{0});
    ASSERT_TRUE(device->Copy(two, one, kMost).ok());
    std::vector<uint8_t> back(kMost, 1);
    ASSERT_TRUE(device->Download(back.data(), two, kMost).ok());
    ASSERT_TRUE(std::equal(source.begin(), source.begin() + static_cast<std::ptrdiff_t>(bytes), back.begin())) << bytes;
    ASSERT_EQ(std::count(back.begin() + static_cast<std::ptrdiff_t>(bytes), back.end(), 0), static_cast<std::ptrdiff_t>(kMost - bytes));
  }
}

// More small ones than page-locked memory holds: each is in its place though the device has done none of them yet.
TEST_F(CudaDriver, ManySmallUploadsBeforeTheDeviceWorks) {
  const auto device = Make(Open());
  Memory memory(*device);
  constexpr size_t kCount = 5000, kBytes = 1500;
  const DevicePointer at = memory.Take(kCount * kBytes);
  const auto source = Numbers(kCount * kBytes);
  std::vector<uint8_t> piece(kBytes);
  for (size_t i = 0; i < kCount; ++i) {
    std::copy_n(source.begin() + static_cast<std::ptrdiff_t>(i * kBytes), kBytes, piece.begin());
    ASSERT_TRUE(device->Upload(at + i * kBytes, piece.data(), kBytes).ok());
  }
  std::vector<uint8_t> back(source.size());
  ASSERT_TRUE(device->Download(back.data(), at, back.size()).ok());
  EXPECT_EQ(back, source);
}

// Rows with gaps on either side, wider and narrower than page-locked memory, and beyond what a 2D copy may jump.
TEST_F(CudaDriver, CopiesOfRows) {
  struct Case {
    uint64_t bytes, rows, host_pitch, device_pitch;
  };
  for (const uint64_t most_pitch : {uint64_t{0x7fffffff}, uint64_t{64}}) {
    Set("pitch=" + std::to_string(most_pitch));
    const auto device = Make(Open());
    for (const Case& c : {Case{16, 5, 48, 96}, {16, 5, 16, 16}, {16, 3, 16, 32}, {7, 200000, 7, 9}, {(1 << 20) + 5, 3, (1 << 20) + 8, (1 << 20) + 64},
                          {1 << 20, 3, 1 << 20, 1 << 20}, {300000, 7, 300000, 300032}, {0, 5, 16, 16}, {16, 0, 16, 16}}) {
      SCOPED_TRACE(std::to_string(c.bytes) + " x " + std::to_string(c.rows) + " pitch at most " + std::to_string(most_pitch));
      Memory memory(*device);
      const uint64_t host_bytes = c.host_pitch * (c.rows + 1), device_bytes = c.device_pitch * (c.rows + 1);
      const auto source = Numbers(host_bytes);
      const DevicePointer one = memory.Take(device_bytes), two = memory.Take(device_bytes);
      ASSERT_TRUE(device->Clear(one, device_bytes).ok());
      ASSERT_TRUE(device->Clear(two, device_bytes).ok());
      ASSERT_TRUE(device->Upload(one, source.data(), c.bytes, c.rows, c.device_pitch, c.host_pitch).ok());
      ASSERT_TRUE(device->Copy(two, one, c.bytes, c.rows, c.device_pitch, c.device_pitch).ok());
      std::vector<uint8_t> all(device_bytes);
      ASSERT_TRUE(device->Download(all.data(), two, device_bytes).ok());
      std::vector<uint8_t> want(device_bytes);
      for (uint64_t i = 0; i < c.rows; ++i) {
        std::copy_n(source.data() + i * c.host_pitch, c.bytes, want.data() + i * c.device_pitch);
      }
      ASSERT_EQ(all, want);
      std::vector<uint8_t> back(host_bytes, 7), right(host_bytes, 7);
      ASSERT_TRUE(device->Download(back.data(), two, c.bytes, c.rows, c.host_pitch, c.device_pitch).ok());
      for (uint64_t i = 0; i < c.rows; ++i) {
        std::copy_n(source.data() + i * c.host_pitch, c.bytes, right.data() + i * c.host_pitch);
      }
      ASSERT_EQ(back, right);
    }
  }
}

TEST_F(CudaDriver, FreedMemoryServesAgainBehindTheWorkOnIt) {
  const auto device = Make(Open());
  constexpr uint64_t kBytes = 10000;
  const auto first = Numbers(kBytes, 1), second = Numbers(kBytes, 2);
  const DevicePointer result = device->Allocate(kBytes).value(), one = device->Allocate(kBytes).value();
  ASSERT_TRUE(device->Upload(one, first.data(), kBytes).ok());
  ASSERT_TRUE(device->Copy(result, one, kBytes).ok());
  device->Free(one);
  const DevicePointer other = device->Allocate(kBytes - 1).value();
  EXPECT_EQ(other, one);
  ASSERT_TRUE(device->Upload(other, second.data(), kBytes - 1).ok());
  std::vector<uint8_t> back(kBytes);
  ASSERT_TRUE(device->Download(back.data(), result, kBytes).ok());
  EXPECT_EQ(back, first);
  device->Free(other);
  device->Free(result);
  device->Free(0);
  EXPECT_EQ(Get("cuMemAlloc_v2"), 2u);
}

TEST_F(CudaDriver, KeepsALimitedAmountOfFreedMemory) {
  const auto device = Make(Open());
  std::vector<DevicePointer> all;
  for (int i = 0; i < 6; ++i) {
    all.push_back(device->Allocate(uint64_t{40} << 20).value());
    ASSERT_TRUE(device->Clear(all.back(), 1000).ok());
  }
  const uint64_t held[] = {240, 240, 240, 120, 120, 120};  // MiB
  for (int i = 0; i < 6; ++i) {
    device->Free(all[static_cast<size_t>(i)]);
    EXPECT_EQ(Get("held"), held[i] << 20) << i;
  }
}

TEST_F(CudaDriver, OutOfMemoryIsAnErrorAndNoMore) {
  Set("memory=1000000");
  const auto device = Make(Open());
  const DevicePointer one = device->Allocate(600000).value();
  auto refused = device->Allocate(600000);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code, Code::kMemory);
  EXPECT_EQ(refused.error().message, "device: cuMemAlloc of 600000 bytes failed, got CUDA_ERROR_OUT_OF_MEMORY");
  EXPECT_FALSE(device->Allocate(0).ok());
  EXPECT_EQ(device->Allocate(UINT64_MAX).error().code, Code::kMemory);
  EXPECT_TRUE(device->Healthy().ok());
  // What is freed is kept; kept memory of another size makes room, behind the work on it.
  ASSERT_TRUE(device->Clear(one, 600000).ok());
  device->Free(one);
  const auto again = device->Allocate(800000);
  ASSERT_TRUE(again.ok());
  ASSERT_TRUE(device->Clear(again.value(), 800000).ok());
  EXPECT_TRUE(device->Synchronize().ok());
  device->Free(again.value());
}

// ---- Failures

// A failure that leaves the context whole ends one call.
TEST_F(CudaDriver, CallsThatFailOnce) {
  const auto device = Make(Open());
  Memory memory(*device);
  const DevicePointer one = memory.Take(4096), two = memory.Take(4096);
  std::vector<uint8_t> host(4096);
  const auto upload = [&] { return device->Upload(one, host.data(), 4096); };
  const auto download = [&] { return device->Download(host.data(), one, 4096); };
  const auto copy = [&] { return device->Copy(two, one, 4096); };
  const auto rows = [&] { return device->Copy(two, one, 16, 4, 32, 32); };
  const auto clear = [&] { return device->Clear(one, 4096); };
  const auto wait = [&] { return device->Synchronize(); };
  const struct {
    const char *entry, *call;
    std::function<Status()> work;
  } cases[] = {{"cuMemcpyHtoDAsync_v2", "cuMemcpyHtoDAsync", upload}, {"cuMemcpyDtoHAsync_v2", "cuMemcpyDtoHAsync", download},
               {"cuEventRecord", "cuEventRecord", download},          {"cuEventSynchronize", "cuEventSynchronize", download},
               {"cuMemcpyDtoDAsync_v2", "cuMemcpyDtoDAsync", copy},   {"cuMemcpy2DAsync_v2", "cuMemcpy2DAsync", rows},
               {"cuMemsetD8Async", "cuMemsetD8Async", clear},         {"cuStreamSynchronize", "cuStreamSynchronize", wait},
               {"cuCtxPushCurrent_v2", "cuCtxPushCurrent", clear}};
  for (const auto& c : cases) {
    Set(std::string(c.entry) + ":1:1");
    ExpectFails(c.work(), Code::kDevice, std::string("device: ") + c.call + " failed, got CUDA_ERROR_INVALID_VALUE");
    EXPECT_TRUE(device->Healthy().ok());
    EXPECT_TRUE(c.work().ok()) << c.call;
  }
}

TEST_F(CudaDriver, LaunchesThatFail) {
  const auto device = Make(Open());
  void* none[] = {nullptr};
  ExpectFails(device->Launch("KvpNothing", {}, {32, 1, 1}, 0, none), Code::kDevice,
              "device: cuModuleGetFunction(KvpNothing) failed, got CUDA_ERROR_NOT_FOUND");
  EXPECT_TRUE(device->Launch("KvpNothing", {0, 1, 1}, {32, 1, 1}, 0, none).ok());
  Memory memory(*device);
  CodecPlan plan;
  DevicePointer items = memory.Take(sizeof(EncodeItem));
  void* arguments[] = {&plan, &items};
  ExpectFails(device->Launch("KvpLimit", {1, 70000, 1}, {256, 1, 1}, 0, arguments), Code::kDevice,
              "device: cuLaunchKernel(KvpLimit) failed, got CUDA_ERROR_INVALID_VALUE");
  Set("cuLaunchKernel:1:701");
  ExpectFails(device->Launch("KvpLimit", {}, {256, 1, 1}, 0, arguments), Code::kDevice,
              "device: cuLaunchKernel(KvpLimit) failed, got CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES");
  EXPECT_TRUE(device->Healthy().ok());
  EXPECT_EQ(Get("cuModuleGetFunction"), 2u);
}

TEST_F(CudaDriver, LostContextIsRememberedByAllOfIt) {
  const auto context = Open();
  const auto device = Make(context), other = Make(context);
  Memory memory(*device);
  const DevicePointer at = memory.Take(5000);
  std::vector<uint8_t> host(5000);
  Set("cuStreamSynchronize:1:700");
  const std::string failure = "device: cuStreamSynchronize failed, got CUDA_ERROR_ILLEGAL_ADDRESS";
  ExpectFails(device->Synchronize(), Code::kDevice, failure);
  const uint64_t calls = Get("calls");
  for (const auto& each : {device, other}) {
    ExpectFails(each->Healthy(), Code::kDevice, failure);
    EXPECT_EQ(each->Allocate(10).error().message, failure);
    ExpectFails(each->Upload(at, host.data(), 10), Code::kDevice, failure);
    ExpectFails(each->Download(host.data(), at, 10), Code::kDevice, failure);
    ExpectFails(each->Copy(at, at, 10), Code::kDevice, failure);
    ExpectFails(each->Clear(at, 10), Code::kDevice, failure);
    void* none[] = {nullptr};
    ExpectFails(each->Launch("KvpLimit", {}, {}, 0, none), Code::kDevice, failure);
    ExpectFails(each->Synchronize(), Code::kDevice, failure);
  }
  EXPECT_EQ(OpenDevice(context).error().message, failure);
  EXPECT_EQ(Get("calls"), calls);
  const Probe probe = ProbeOf(*context);
  EXPECT_FALSE(probe.usable);
  EXPECT_EQ("device: " + probe.reason, failure);
  EXPECT_FALSE(probe.device.empty());
}

TEST_F(CudaDriver, EveryCallMayLoseTheContext) {
  for (const std::string entry : {"cuMemAlloc_v2", "cuMemcpyHtoDAsync_v2", "cuLaunchKernel", "cuModuleGetFunction", "cuMemsetD8Async",
                                  "cuEventSynchronize", "cuMemcpyDtoHAsync_v2", "cuMemFree_v2", "cuStreamDestroy_v2", "cuCtxPushCurrent_v2"}) {
    SCOPED_TRACE(entry);
    Set("reset");
    const auto device = Make(Open());
    Set(entry + ":1:719");
    DeviceCodec codec(device);
    std::vector<float> x(32 * 16, 1.0f);
    const auto work = [&]() -> Status {
      KVP_ASSIGN(const DeviceBlock block, DeviceBlock::Allocate(device, 65536));
      EncodeItem item;
      item.source = block.at();
      item.codes = block.at() + 4096;
      item.scales = block.at() + 8192;
      item.global = block.at() + 16384;
      item.valid = 32;
      item.token_stride = 16;
      KVP_TRY(device->Upload(block.at(), x.data(), x.size() * 4));
      KVP_TRY(codec.Encode(ParseSpec("int8/token/16/absmax/f32", "spec").value(), {}, {1, 1, 32, 16}, Type::f32, 0, {&item, 1}));
      std::vector<uint8_t> codes(512);
      return device->Download(codes.data(), item.codes, 512);
    };
    const Status status = work();
    const bool at_the_end = entry == "cuMemFree_v2" || entry == "cuStreamDestroy_v2";
    EXPECT_EQ(status.ok(), at_the_end);
    EXPECT_EQ(device->Healthy().ok(), at_the_end);
  }
}

// As when a process ends: the driver is gone before the last device is.
TEST_F(CudaDriver, EndsAfterTheDriver) {
  auto device = Make(Open());
  auto block = DeviceBlock::Allocate(device, 1000);
  ASSERT_TRUE(block.ok());
  Set("cuCtxPushCurrent_v2:*:4;cuMemFree_v2:*:4;cuStreamDestroy_v2:*:4;cuDevicePrimaryCtxRelease_v2:*:4");
  block = DeviceBlock();
  device.reset();
}

// ---- Several at once

TEST_F(CudaDriver, TwoDevicesOfOneContext) {
  const auto context = Open();
  const auto one = Make(context), two = Make(context);
  constexpr uint64_t kBytes = 100000;
  const auto first = Numbers(kBytes, 1), second = Numbers(kBytes, 2);
  Memory memory(*one), other(*two);
  const DevicePointer a = memory.Take(kBytes), b = other.Take(kBytes);
  ASSERT_TRUE(one->Upload(a, first.data(), kBytes).ok());
  ASSERT_TRUE(two->Upload(b, second.data(), kBytes).ok());
  std::vector<uint8_t> back(kBytes);
  ASSERT_TRUE(two->Download(back.data(), b, kBytes).ok());
  EXPECT_EQ(back, second);
  ASSERT_TRUE(one->Download(back.data(), a, kBytes).ok());
  EXPECT_EQ(back, first);
  EXPECT_EQ(Get("modules"), 1u);
}

TEST_F(CudaDriver, DevicesOnThreads) {
  const auto context = Open();
  // One device, one thread after the other.
  const auto device = Make(context);
  Memory memory(*device);
  const DevicePointer at = memory.Take(1000);
  const auto numbers = Numbers(1000);
  std::thread([&] { EXPECT_TRUE(device->Upload(at, numbers.data(), 1000).ok()); }).join();
  std::vector<uint8_t> back(1000);
  std::thread([&] { EXPECT_TRUE(device->Download(back.data(), at, 1000).ok()); }).join();
  EXPECT_EQ(back, numbers);
  // Devices of their own at the same time.
  std::vector<std::thread> threads;
  for (uint32_t i = 0; i < 4; ++i) {
    threads.emplace_back([&context, i] {
      const auto own = Make(context);
      Memory held(*own);
      for (uint32_t turn = 0; turn < 20; ++turn) {
        const auto source = Numbers(3000, i * 100 + turn);
        const DevicePointer place = held.Put(source.data(), source.size());
        std::vector<uint8_t> got(source.size());
        EXPECT_TRUE(own->Download(got.data(), place, got.size()).ok());
        EXPECT_EQ(got, source);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// ---- The process's device

TEST_F(CudaDriver, ProcessTakesItsDeviceFromTheEnvironment) {
  setenv("KVPAGES_CUDA_LIBRARY", "/nowhere/libcuda.so.1", 1);
  const DriverChoice choice = DefaultChoice();
  EXPECT_EQ(choice.library, "/nowhere/libcuda.so.1");
  EXPECT_EQ(choice.device, "0");
  const Probe probe = ProbeDevice();
  EXPECT_FALSE(probe.usable);
  EXPECT_EQ(probe.device, "");
  const auto device = OpenDevice();
  ASSERT_FALSE(device.ok());
  EXPECT_EQ(device.error().code, Code::kBackend);
  EXPECT_EQ(device.error().message, "device: " + probe.reason);
  unsetenv("KVPAGES_CUDA_LIBRARY");
  EXPECT_EQ(DefaultChoice().library, "libcuda.so.1");
}

}  // namespace
}  // namespace kvpages::cuda

#endif
