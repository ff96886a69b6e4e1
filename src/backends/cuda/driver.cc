// SPDX-License-Identifier: Apache-2.0
#include "backends/cuda/driver.h"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <span>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "backends/cuda/api.h"
#include "backends/cuda/image.h"

namespace kvpages::cuda {
namespace {

constexpr const char kLibrary[] = "libcuda.so.1";
constexpr int kLeastMajor = 7, kLeastMinor = 5;
constexpr uint64_t kSlotBytes = uint64_t{1} << 20;
constexpr size_t kUploadSlots = 4, kDownloadSlots = 2;
constexpr uint64_t kMostKeptBytes = uint64_t{128} << 20;  // freed memory that a device keeps for what comes next

Error Unusable(std::string reason) { return MakeError(Code::kBackend, "device", std::move(reason)); }

// ---- The library

using api::Driver;

// Never closed once it is good: other code of the process may use the driver, and it must outlive what ends last.
Result<Driver> LoadDriver(const std::string& path) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* why = dlerror();
    return Unusable("no CUDA driver (" + (why != nullptr ? std::string(why) : path + " cannot be loaded") + ")");
  }
  Driver driver;
  const char* missing = nullptr;
#define KVP_X(name, parameters)                                            \
  driver.name = reinterpret_cast<decltype(driver.name)>(dlsym(library, #name)); \
  if (driver.name == nullptr && missing == nullptr) missing = #name;
  KVP_CUDA_DRIVER(KVP_X)
#undef KVP_X
  if (missing == nullptr) return driver;
  dlclose(library);
  return Unusable("the CUDA driver is too old: " + path + " has no " + missing);
}

std::string NameOf(const Driver& driver, api::Result result) {
  const char* name = nullptr;
  if (driver.cuGetErrorName(result, &name) == api::kSuccess && name != nullptr) return name;
  return "CUDA error " + std::to_string(result);
}

// Errors after which a context does nothing any more.
bool IsFatal(api::Result result) {
  switch (result) {
    case api::kDeinitialized:
    case api::kEccUncorrectable:
    case api::kNvlinkUncorrectable:
    case api::kContained:
    case api::kIllegalAddress:
    case api::kLaunchTimeout:
    case api::kContextIsDestroyed:
    case api::kAssert:
    case api::kHardwareStackError:
    case api::kIllegalInstruction:
    case api::kMisalignedAddress:
    case api::kInvalidAddressSpace:
    case api::kInvalidPc:
    case api::kLaunchFailed:
    case api::kTensorMemoryLeak:
    case api::kMpsClientTerminated:
    case api::kExternalDevice:
    case api::kUnknown:
      return true;
    default:
      return false;
  }
}

Error ErrorOf(const Driver& driver, api::Result result, std::string_view call) {
  const Code code = result == api::kOutOfMemory ? Code::kMemory : Code::kDevice;
  return MakeError(code, "device", std::string(call) + " failed", NameOf(driver, result));
}

std::string VersionText(int version) { return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10); }

}  // namespace

// ---- The context

class Context {
 public:
  Context(const Driver& api, api::DeviceNumber number) : driver(api), number(number) {}
  Context(const Context&) = delete;
  ~Context() {
    if (!retained) return;
    if (module != nullptr && !lost()) {
      driver.cuCtxPushCurrent_v2(context);
      driver.cuModuleUnload(module);
      api::Context popped;
      driver.cuCtxPopCurrent_v2(&popped);
    }
    driver.cuDevicePrimaryCtxRelease_v2(number);
  }

  bool lost() const { return lost_.load(std::memory_order_acquire); }
  Status Healthy() const {
    if (!lost()) return Ok();
    return failure_;
  }
  // Turns a result into a Status; a fatal one ends the context for everybody.
  Status Check(api::Result result, std::string_view call) {
    if (result == api::kSuccess) return Ok();
    Error error = ErrorOf(driver, result, call);
    if (IsFatal(result)) {
      const std::lock_guard guard(mutex_);
      if (!lost()) {
        failure_ = error;
        lost_.store(true, std::memory_order_release);
      }
    }
    return error;
  }
  Result<api::Function> Find(const char* kernel) {
    const std::lock_guard guard(functions_mutex_);
    const auto found = functions_.find(std::string_view(kernel));
    if (found != functions_.end()) return found->second;
    api::Function function = nullptr;
    KVP_TRY(Check(driver.cuModuleGetFunction(&function, module, kernel), std::string("cuModuleGetFunction(") + kernel + ")"));
    functions_.emplace(kernel, function);
    return function;
  }

  const Driver driver;
  const api::DeviceNumber number;
  bool retained = false;
  api::Context context = nullptr;
  api::Module module = nullptr;
  std::string description;
  uint32_t multiprocessors = 0;
  uint64_t max_pitch = 0;

 private:
  std::mutex mutex_, functions_mutex_;
  std::atomic<bool> lost_{false};
  Error failure_;  // written once, before lost_
  std::map<std::string, api::Function, std::less<>> functions_;
};

namespace {

// Makes a context the calling thread's while it stands.
class Current {
 public:
  explicit Current(Context& context) : context_(context) {
    status_ = context.Healthy();
    if (!status_.ok()) return;
    status_ = context.Check(context.driver.cuCtxPushCurrent_v2(context.context), "cuCtxPushCurrent");
    pushed_ = status_.ok();
  }
  Current(const Current&) = delete;
  ~Current() {
    api::Context popped;
    if (pushed_) context_.driver.cuCtxPopCurrent_v2(&popped);
  }
  bool ok() const { return status_.ok(); }
  Status Take() { return std::move(status_); }

 private:
  Context& context_;
  Status status_;
  bool pushed_ = false;
};

#define KVP_CURRENT(context)                 \
  Current kvp_current(context);              \
  if (!kvp_current.ok()) return std::move(kvp_current.Take().error())

uint64_t SizeClass(uint64_t bytes) {
  const uint64_t step = std::clamp<uint64_t>(std::bit_floor(bytes) / 8, 512, uint64_t{2} << 20);
  return (bytes + step - 1) / step * step;
}

// ---- A stream

class StreamDevice : public Device {
 public:
  explicit StreamDevice(std::shared_ptr<Context> context) : context_(std::move(context)), driver_(context_->driver) {}
  ~StreamDevice() override {
    // Of a lost context the driver has freed everything; any of these calls may be the one that tells.
    Current current(*context_);
    const auto good = [&](api::Result result, const char* call) { return Check(result, call).ok() || !context_->lost(); };
    if (!current.ok() || (stream_ != nullptr && !good(driver_.cuStreamSynchronize(stream_), "cuStreamSynchronize"))) return;
    Trim(0);
    for (const auto& [at, size] : sizes_) {
      if (context_->lost() || !good(driver_.cuMemFree_v2(at), "cuMemFree")) return;
    }
    for (const std::span<Slot> slots : {std::span<Slot>(uploads_), std::span<Slot>(downloads_)}) {
      for (const Slot& slot : slots) {
        if (context_->lost() || (slot.event != nullptr && !good(driver_.cuEventDestroy_v2(slot.event), "cuEventDestroy")) ||
            (slot.memory != nullptr && !good(driver_.cuMemFreeHost(slot.memory), "cuMemFreeHost"))) {
          return;
        }
      }
    }
    if (stream_ != nullptr && !context_->lost()) good(driver_.cuStreamDestroy_v2(stream_), "cuStreamDestroy");
  }

  Status Start() {
    KVP_CURRENT(*context_);
    KVP_TRY(Check(driver_.cuStreamCreate(&stream_, api::kStreamNonBlocking), "cuStreamCreate"));
    for (const std::span<Slot> slots : {std::span<Slot>(uploads_), std::span<Slot>(downloads_)}) {
      for (Slot& slot : slots) {
        KVP_TRY(Check(driver_.cuMemHostAlloc(&slot.memory, kSlotBytes, api::kHostAllocPortable), "cuMemHostAlloc"));
        KVP_TRY(Check(driver_.cuEventCreate(&slot.event, api::kEventDisableTiming), "cuEventCreate"));
      }
    }
    return Ok();
  }

  std::string Describe() const override { return context_->description; }
  Status Healthy() const override { return context_->Healthy(); }
  uint32_t Multiprocessors() const override { return context_->multiprocessors; }

  Result<DevicePointer> Allocate(uint64_t bytes) override {
    KVP_CURRENT(*context_);
    if (bytes == 0 || bytes > uint64_t{1} << 62) return MakeError(Code::kMemory, "device", "no memory", std::to_string(bytes) + " bytes");
    const uint64_t size = SizeClass(bytes);
    // Work on a block that was freed stands before what the new owner asks for.
    std::vector<DevicePointer>& kept = kept_[size];
    if (!kept.empty()) {
      const DevicePointer at = kept.back();
      kept.pop_back();
      kept_bytes_ -= size;
      sizes_[at] = size;
      return at;
    }
    api::Address at = 0;
    api::Result result = driver_.cuMemAlloc_v2(&at, size);
    if (result == api::kOutOfMemory && kept_bytes_ > 0) {
      KVP_TRY(Check(driver_.cuStreamSynchronize(stream_), "cuStreamSynchronize"));
      Trim(0);
      result = driver_.cuMemAlloc_v2(&at, size);
    }
    if (result == api::kOutOfMemory) {
      return MakeError(Code::kMemory, "device", "cuMemAlloc of " + std::to_string(bytes) + " bytes failed", NameOf(driver_, result));
    }
    KVP_TRY(Check(result, "cuMemAlloc"));
    sizes_[at] = size;
    return at;
  }

  void Free(DevicePointer memory) override {
    const auto found = sizes_.find(memory);
    if (found == sizes_.end()) return;
    const uint64_t size = found->second;
    sizes_.erase(found);
    if (context_->lost()) return;
    kept_[size].push_back(memory);
    kept_bytes_ += size;
    if (kept_bytes_ <= kMostKeptBytes) return;
    // Half of it at once, so that many frees in a row wait for the stream now and then.
    Current current(*context_);
    if (current.ok() && Check(driver_.cuStreamSynchronize(stream_), "cuStreamSynchronize").ok()) Trim(kMostKeptBytes / 2);
  }

  Status Upload(DevicePointer to, const void* from, uint64_t bytes, uint64_t rows, uint64_t to_pitch, uint64_t from_pitch) override {
    KVP_CURRENT(*context_);
    const auto* source = static_cast<const uint8_t*>(from);
    for (Piece piece = First(bytes, rows); piece.rows > 0; piece = Next(piece, bytes, rows)) {
      KVP_ASSIGN(uint8_t* const staged, Stage(piece.rows * piece.bytes));
      for (uint64_t i = 0; i < piece.rows; ++i) {
        std::memcpy(staged + i * piece.bytes, source + (piece.row + i) * from_pitch + piece.offset, piece.bytes);
      }
      const DevicePointer at = to + piece.row * to_pitch + piece.offset;
      if (piece.rows == 1 || to_pitch == bytes) {
        KVP_TRY(Check(driver_.cuMemcpyHtoDAsync_v2(at, staged, piece.rows * piece.bytes, stream_), "cuMemcpyHtoDAsync"));
      } else if (Fits(bytes, to_pitch)) {
        api::Copy2D copy = Rows(bytes, piece.rows);
        copy.from_type = api::kHostMemory;
        copy.from_host = staged;
        copy.from_pitch = bytes;
        copy.to_type = api::kDeviceMemory;
        copy.to_device = at;
        copy.to_pitch = to_pitch;
        KVP_TRY(Check(driver_.cuMemcpy2DAsync_v2(&copy, stream_), "cuMemcpy2DAsync"));
      } else {
        for (uint64_t i = 0; i < piece.rows; ++i) {
          KVP_TRY(Check(driver_.cuMemcpyHtoDAsync_v2(at + i * to_pitch, staged + i * bytes, bytes, stream_), "cuMemcpyHtoDAsync"));
        }
      }
    }
    return Ok();
  }

  Status Download(void* to, DevicePointer from, uint64_t bytes, uint64_t rows, uint64_t to_pitch, uint64_t from_pitch) override {
    KVP_CURRENT(*context_);
    auto* target = static_cast<uint8_t*>(to);
    // A piece is copied out of its slot while the next one arrives in the other.
    const auto arrive = [&](const Piece& piece, const Slot& slot) -> Status {
      KVP_TRY(Check(driver_.cuEventSynchronize(slot.event), "cuEventSynchronize"));
      for (uint64_t i = 0; i < piece.rows; ++i) {
        std::memcpy(target + (piece.row + i) * to_pitch + piece.offset, static_cast<uint8_t*>(slot.memory) + i * piece.bytes, piece.bytes);
      }
      return Ok();
    };
    Piece before;
    size_t turn = 0;
    for (Piece piece = First(bytes, rows); piece.rows > 0; piece = Next(piece, bytes, rows)) {
      const Slot& slot = downloads_[turn];
      const DevicePointer at = from + piece.row * from_pitch + piece.offset;
      if (piece.rows == 1 || from_pitch == bytes) {
        KVP_TRY(Check(driver_.cuMemcpyDtoHAsync_v2(slot.memory, at, piece.rows * piece.bytes, stream_), "cuMemcpyDtoHAsync"));
      } else if (Fits(bytes, from_pitch)) {
        api::Copy2D copy = Rows(bytes, piece.rows);
        copy.from_type = api::kDeviceMemory;
        copy.from_device = at;
        copy.from_pitch = from_pitch;
        copy.to_type = api::kHostMemory;
        copy.to_host = slot.memory;
        copy.to_pitch = bytes;
        KVP_TRY(Check(driver_.cuMemcpy2DAsync_v2(&copy, stream_), "cuMemcpy2DAsync"));
      } else {
        for (uint64_t i = 0; i < piece.rows; ++i) {
          KVP_TRY(Check(driver_.cuMemcpyDtoHAsync_v2(static_cast<uint8_t*>(slot.memory) + i * bytes, at + i * from_pitch, bytes, stream_),
                        "cuMemcpyDtoHAsync"));
        }
      }
      KVP_TRY(Check(driver_.cuEventRecord(slot.event, stream_), "cuEventRecord"));
      turn = (turn + 1) % kDownloadSlots;
      if (before.rows > 0) KVP_TRY(arrive(before, downloads_[turn]));
      before = piece;
    }
    return before.rows > 0 ? arrive(before, downloads_[(turn + 1) % kDownloadSlots]) : Ok();
  }

  Status Copy(DevicePointer to, DevicePointer from, uint64_t bytes, uint64_t rows, uint64_t to_pitch, uint64_t from_pitch) override {
    KVP_CURRENT(*context_);
    if (bytes == 0 || rows == 0) return Ok();
    if (rows == 1 || (to_pitch == bytes && from_pitch == bytes)) {
      return Check(driver_.cuMemcpyDtoDAsync_v2(to, from, bytes * rows, stream_), "cuMemcpyDtoDAsync");
    }
    if (Fits(bytes, to_pitch) && Fits(bytes, from_pitch)) {
      api::Copy2D copy = Rows(bytes, rows);
      copy.from_type = copy.to_type = api::kDeviceMemory;
      copy.from_device = from;
      copy.from_pitch = from_pitch;
      copy.to_device = to;
      copy.to_pitch = to_pitch;
      return Check(driver_.cuMemcpy2DAsync_v2(&copy, stream_), "cuMemcpy2DAsync");
    }
    for (uint64_t i = 0; i < rows; ++i) {
      KVP_TRY(Check(driver_.cuMemcpyDtoDAsync_v2(to + i * to_pitch, from + i * from_pitch, bytes, stream_), "cuMemcpyDtoDAsync"));
    }
    return Ok();
  }

  Status Clear(DevicePointer to, uint64_t bytes) override {
    KVP_CURRENT(*context_);
    if (bytes == 0) return Ok();
    return Check(driver_.cuMemsetD8Async(to, 0, bytes, stream_), "cuMemsetD8Async");
  }

  Status Launch(const char* kernel, Extent grid, Extent block, uint32_t shared_bytes, void** arguments) override {
    KVP_CURRENT(*context_);
    if (grid.x == 0 || grid.y == 0 || grid.z == 0) return Ok();
    KVP_ASSIGN(const api::Function function, context_->Find(kernel));
    const api::Result result = driver_.cuLaunchKernel(function, grid.x, grid.y, grid.z, block.x, block.y, block.z, shared_bytes, stream_,
                                                      arguments, nullptr);
    return result == api::kSuccess ? Ok() : Check(result, std::string("cuLaunchKernel(") + kernel + ")");
  }

  Status Synchronize() override {
    KVP_CURRENT(*context_);
    return Check(driver_.cuStreamSynchronize(stream_), "cuStreamSynchronize");
  }

 private:
  // Page-locked memory; `event` stands behind the last copy that uses it.
  struct Slot {
    void* memory = nullptr;
    api::Event event = nullptr;
    bool waits = false;
  };
  // What one slot carries: whole rows, or a part of one.
  struct Piece {
    uint64_t row = 0, rows = 0, offset = 0, bytes = 0;
  };

  Status Check(api::Result result, std::string_view call) const { return context_->Check(result, call); }

  static Piece First(uint64_t bytes, uint64_t rows) { return bytes == 0 ? Piece{} : At(0, 0, bytes, rows); }
  static Piece Next(const Piece& piece, uint64_t bytes, uint64_t rows) {
    const uint64_t offset = piece.offset + piece.bytes;
    return offset < bytes ? At(piece.row, offset, bytes, rows) : At(piece.row + piece.rows, 0, bytes, rows);
  }
  static Piece At(uint64_t row, uint64_t offset, uint64_t bytes, uint64_t rows) {
    if (row >= rows) return {};
    if (bytes > kSlotBytes) return {row, 1, offset, std::min(kSlotBytes, bytes - offset)};
    return {row, std::min(kSlotBytes / bytes, rows - row), 0, bytes};
  }

  bool Fits(uint64_t bytes, uint64_t pitch) const { return pitch >= bytes && pitch <= context_->max_pitch; }
  static api::Copy2D Rows(uint64_t bytes, uint64_t rows) {
    api::Copy2D copy{};
    copy.width_bytes = bytes;
    copy.rows = rows;
    return copy;
  }

  // Page-locked memory for an upload, at most kSlotBytes; waits for the device only where a whole round of slots is on its way.
  Result<uint8_t*> Stage(uint64_t bytes) {
    if (staged_ + bytes > kSlotBytes) {
      KVP_TRY(Check(driver_.cuEventRecord(uploads_[slot_].event, stream_), "cuEventRecord"));
      uploads_[slot_].waits = true;
      slot_ = (slot_ + 1) % kUploadSlots;
      staged_ = 0;
    }
    Slot& slot = uploads_[slot_];
    if (slot.waits) {
      KVP_TRY(Check(driver_.cuEventSynchronize(slot.event), "cuEventSynchronize"));
      slot.waits = false;
    }
    uint8_t* const at = static_cast<uint8_t*>(slot.memory) + staged_;
    staged_ += (bytes + 63) / 64 * 64;
    return at;
  }

  // Gives memory back until at most `most_bytes` are kept. The stream is idle.
  void Trim(uint64_t most_bytes) {
    for (auto& [size, blocks] : kept_) {
      while (!blocks.empty() && kept_bytes_ > most_bytes && !context_->lost()) {
        (void)Check(driver_.cuMemFree_v2(blocks.back()), "cuMemFree").ok();
        blocks.pop_back();
        kept_bytes_ -= size;
      }
    }
  }

  const std::shared_ptr<Context> context_;
  const Driver& driver_;
  api::Stream stream_ = nullptr;
  std::array<Slot, kUploadSlots> uploads_;
  std::array<Slot, kDownloadSlots> downloads_;
  size_t slot_ = 0;
  uint64_t staged_ = 0;
  std::unordered_map<DevicePointer, uint64_t> sizes_;
  std::unordered_map<uint64_t, std::vector<DevicePointer>> kept_;
  uint64_t kept_bytes_ = 0;
};

std::string Variable(const char* name, const char* otherwise) {
  const char* value = std::getenv(name);
  return value != nullptr && *value != '\0' ? value : otherwise;
}

}  // namespace

// ---- Opening

DriverChoice DefaultChoice() {
  return {Variable("KVPAGES_CUDA_LIBRARY", kLibrary), Variable("KVPAGES_CUDA_DEVICE", "0"), KernelImage(), LeastDriverVersion()};
}

Result<std::shared_ptr<Context>> OpenContext(const DriverChoice& choice) {
  if (choice.image == nullptr) return Unusable(WhyNoKernels());
  KVP_ASSIGN(const Driver driver, LoadDriver(choice.library));
  const auto check = [&](api::Result result, const char* call) -> Status {
    if (result == api::kSuccess) return Ok();
    return ErrorOf(driver, result, call);
  };
  const api::Result started = driver.cuInit(0);
  if (started == api::kNoDevice) return Unusable("no CUDA device (cuInit: " + NameOf(driver, started) + ")");
  KVP_TRY(check(started, "cuInit"));
  int version = 0, count = 0;
  KVP_TRY(check(driver.cuDriverGetVersion(&version), "cuDriverGetVersion"));
  if (version < choice.least_version) {
    return Unusable("the driver is too old: it has CUDA " + VersionText(version) + ", the kernels need " + VersionText(choice.least_version) +
                    " or newer");
  }
  KVP_TRY(check(driver.cuDeviceGetCount(&count), "cuDeviceGetCount"));
  if (count == 0) return Unusable("no CUDA device");
  int ordinal = -1;
  const char* end = choice.device.data() + choice.device.size();
  const auto parsed = std::from_chars(choice.device.data(), end, ordinal);
  if (parsed.ec != std::errc() || parsed.ptr != end || ordinal < 0 || ordinal >= count) {
    return MakeError(Code::kBackend, "device", "KVPAGES_CUDA_DEVICE must be a number from 0 to " + std::to_string(count - 1), choice.device);
  }
  api::DeviceNumber number = 0;
  KVP_TRY(check(driver.cuDeviceGet(&number, ordinal), "cuDeviceGet"));
  auto context = std::make_shared<Context>(driver, number);
  char name[256] = {};
  KVP_TRY(check(driver.cuDeviceGetName(name, sizeof(name) - 1, number), "cuDeviceGetName"));
  int major = 0, minor = 0, multiprocessors = 0, pitch = 0, mode = 0;
  for (const auto& [value, attribute] : {std::pair{&major, api::kCapabilityMajor}, {&minor, api::kCapabilityMinor},
                                         {&multiprocessors, api::kMultiprocessors}, {&pitch, api::kMaxPitch}, {&mode, api::kComputeMode}}) {
    KVP_TRY(check(driver.cuDeviceGetAttribute(value, attribute, number), "cuDeviceGetAttribute"));
  }
  context->multiprocessors = static_cast<uint32_t>(std::max(multiprocessors, 0));
  context->max_pitch = static_cast<uint64_t>(std::max(pitch, 0));
  const std::string capability = std::to_string(major) + "." + std::to_string(minor);
  context->description = std::string(name) + ", compute capability " + capability + ", CUDA driver " + VersionText(version);
  if (major < kLeastMajor || (major == kLeastMajor && minor < kLeastMinor)) {
    return Unusable("the device is too old: " + std::string(name) + " has compute capability " + capability + ", the kernels need " +
                    std::to_string(kLeastMajor) + "." + std::to_string(kLeastMinor) + " or newer");
  }
  if (mode == api::kComputeModeProhibited) return Unusable(std::string(name) + " is set to take no work (compute mode)");
  KVP_TRY(check(driver.cuDevicePrimaryCtxRetain(&context->context, number), "cuDevicePrimaryCtxRetain"));
  context->retained = true;
  KVP_CURRENT(*context);
  KVP_TRY(context->Check(driver.cuModuleLoadDataEx(&context->module, choice.image, 0, nullptr, nullptr), "cuModuleLoadDataEx"));
  return context;
}

Result<std::shared_ptr<Device>> OpenDevice(const std::shared_ptr<Context>& context) {
  auto device = std::make_shared<StreamDevice>(context);
  KVP_TRY(device->Start());
  return std::shared_ptr<Device>(std::move(device));
}

// An error's text without the argument that it begins with.
static std::string ReasonOf(const Error& error) {
  const size_t skip = error.argument.empty() ? 0 : error.argument.size() + 2;
  return error.message.substr(std::min(skip, error.message.size()));
}

Probe ProbeOf(const Context& context) {
  const Status healthy = context.Healthy();
  if (!healthy.ok()) return {false, ReasonOf(healthy.error()), context.description};
  return {true, context.description, context.description};
}

Result<DeviceMemory> MemoryOf(Context& context) {
  KVP_CURRENT(context);
  size_t free_bytes = 0, total_bytes = 0;
  KVP_TRY(context.Check(context.driver.cuMemGetInfo_v2(&free_bytes, &total_bytes), "cuMemGetInfo"));
  return DeviceMemory{free_bytes, total_bytes};
}

namespace {

// The process's context, or why there is none, for each choice that the environment made.
Result<std::shared_ptr<Context>> ProcessContext() {
  using Found = Result<std::shared_ptr<Context>>;
  static auto& mutex = *new std::mutex;
  static auto& all = *new std::map<std::pair<std::string, std::string>, Found>;  // lives until the process ends, as the driver does
  const DriverChoice choice = DefaultChoice();
  const std::lock_guard guard(mutex);
  const auto key = std::make_pair(choice.library, choice.device);
  const auto found = all.find(key);
  if (found != all.end()) return found->second;
  Found made = OpenContext(choice);
  if (made.ok() || made.error().code != Code::kMemory) all.emplace(key, made);
  return made;
}

}  // namespace

Probe ProbeDevice() {
  const auto context = ProcessContext();
  return context.ok() ? ProbeOf(*context.value()) : Probe{false, ReasonOf(context.error()), ""};
}

Result<std::shared_ptr<Device>> OpenDevice() {
  KVP_ASSIGN(const auto context, ProcessContext());
  return OpenDevice(context);
}

}  // namespace kvpages::cuda
