// SPDX-License-Identifier: Apache-2.0
// A library with the CUDA driver's entries whose device is the CPU: its memory is the host's, its kernels are the real ones
// in fibres. Work on a stream waits until somebody waits for it, so that nothing works here that relies on more.
#include "cuda/fake/fake.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <iterator>
#include <map>
#include <mutex>
#include <new>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "backends/cuda/api.h"
#include "cuda/launch.h"

namespace kvpages::cuda::api {

struct ContextOfTheDriver {};
struct ModuleOfTheDriver {};
struct FunctionOfTheDriver {
  shim::Kernel kernel;
};
struct EventOfTheDriver {
  StreamOfTheDriver* stream = nullptr;
  uint64_t until = 0;
};
struct StreamOfTheDriver {
  std::deque<std::function<void()>> work;
  uint64_t asked = 0, done = 0;
  std::thread::id asker;
  void Run(uint64_t until) {
    while (done < until) {
      const auto next = std::move(work.front());
      work.pop_front();
      ++done;
      next();
    }
  }
};

namespace {

constexpr size_t kAlignment = 256;

struct Fault {
  std::string call;
  uint64_t turn = 0;  // counted down; 0: every call
  Result error = kSuccess;
};
struct Fake {
  std::recursive_mutex mutex;
  std::vector<Fault> faults;
  std::map<std::string, uint64_t> settings, counts;
  std::map<Address, size_t> device;
  std::map<uintptr_t, size_t> locked;
  std::set<Stream> streams;
  std::set<Event> events;
  uint64_t held = 0, locked_bytes = 0;
  std::map<std::string, FunctionOfTheDriver> functions;
  ContextOfTheDriver context;
  ModuleOfTheDriver module;
  uint64_t retained = 0, modules = 0;
  Result lost = kSuccess;

  Fake() {
    Reset();
    if (const char* words = std::getenv("KVPAGES_FAKE_CUDA")) Set(words);
  }
  void Reset() {
    faults.clear();
    counts.clear();
    settings = {{"devices", 1},        {"version", 13000}, {"capability", 90}, {"memory", UINT64_MAX},
                {"pitch", 0x7fffffff}, {"prohibited", 0},  {"nameless", 0}};
    lost = kSuccess;
  }
  // What the last release does: everything that the context still holds goes.
  void End() {
    for (const Stream stream : streams) delete stream;
    for (const Event event : events) delete event;
    for (const auto& [at, bytes] : device) ::operator delete(reinterpret_cast<void*>(at), std::align_val_t(kAlignment));
    for (const auto& [at, bytes] : locked) ::operator delete(reinterpret_cast<void*>(at), std::align_val_t(kAlignment));
    streams.clear();
    events.clear();
    device.clear();
    locked.clear();
    held = locked_bytes = modules = 0;
  }
  void Word(const std::string& word) {
    if (word.empty()) return;
    if (word == "reset") return Reset();
    const size_t equals = word.find('='), colon = word.find(':');
    if (equals != std::string::npos) {
      std::string value = word.substr(equals + 1);
      if (const size_t dot = value.find('.'); dot != std::string::npos) value.erase(dot, 1);
      settings.at(word.substr(0, equals)) = std::strtoull(value.c_str(), nullptr, 10);
      return;
    }
    const size_t second = word.find(':', colon + 1);
    if (colon == std::string::npos || second == std::string::npos) {
      std::fprintf(stderr, "fake CUDA driver: cannot read '%s'\n", word.c_str());
      std::abort();
    }
    faults.push_back({word.substr(0, colon), std::strtoull(word.c_str() + colon + 1, nullptr, 10), std::atoi(word.c_str() + second + 1)});
  }
  void Set(const std::string& words) {
    for (size_t at = 0; at <= words.size();) {
      const size_t end = std::min(words.find(';', at), words.size());
      Word(words.substr(at, end - at));
      at = end + 1;
    }
  }
};
Fake& All() {
  static auto& fake = *new Fake;
  return fake;
}
// Without a destructor: objects of a thread that ends are destroyed in any order, and call this library.
struct Stack {
  Context items[64];
  size_t count;
};
constinit thread_local Stack t_current{};

bool IsSticky(Result error) { return error == 214 || error == 700 || error == 710 || error == 716 || error == 719 || error == 999; }

// What every entry does first: counts, fails where it was told to, and always once the context is lost.
Result Enter(const char* call, bool needs_context) {
  Fake& fake = All();
  ++fake.counts[call];
  ++fake.counts["calls"];
  if (fake.lost != kSuccess) {
    if (std::strcmp(call, "cuDevicePrimaryCtxRelease_v2") != 0) ++fake.counts["after"];
    return fake.lost;
  }
  for (Fault& fault : fake.faults) {
    if (fault.call != call || fault.error == kSuccess) continue;
    if (fault.turn > 1) {
      --fault.turn;
      continue;
    }
    const Result error = fault.error;
    if (fault.turn == 1) fault.error = kSuccess;
    if (IsSticky(error)) fake.lost = error;
    return error;
  }
  return needs_context && (t_current.count == 0 || t_current.items[t_current.count - 1] != &fake.context) ? 201 : kSuccess;
}
#define KVP_ENTER(needs_context)                                        \
  const std::lock_guard<std::recursive_mutex> kvp_guard(All().mutex);   \
  if (const Result kvp_result = Enter(__func__, needs_context)) return kvp_result

template <typename M, typename A>
bool Holds(const M& blocks, A at, uint64_t bytes) {
  auto after = blocks.upper_bound(at);
  if (after == blocks.begin()) return false;
  --after;
  return at - after->first <= after->second && bytes <= after->second - (at - after->first);
}
bool OnDevice(Address at, uint64_t bytes) { return Holds(All().device, at, bytes); }
bool Locked(const void* at, uint64_t bytes) { return Holds(All().locked, reinterpret_cast<uintptr_t>(at), bytes); }
void* Host(Address at) { return reinterpret_cast<void*>(at); }

template <typename F>
Result Ask(Stream stream, F work) {
  if (All().streams.count(stream) == 0) return 400;
  stream->work.emplace_back(std::move(work));
  ++stream->asked;
  stream->asker = std::this_thread::get_id();
  return kSuccess;
}

}  // namespace

extern "C" {

#define KVP_FAKE __attribute__((visibility("default")))

KVP_FAKE Result cuInit(unsigned) {
  KVP_ENTER(false);
  return All().settings["devices"] == 0 ? kNoDevice : kSuccess;
}
KVP_FAKE Result cuDriverGetVersion(int* version) {
  KVP_ENTER(false);
  *version = static_cast<int>(All().settings["version"]);
  return kSuccess;
}
KVP_FAKE Result cuGetErrorName(Result error, const char** name) {
  static const std::map<Result, const char*> names = {
      {1, "CUDA_ERROR_INVALID_VALUE"},       {2, "CUDA_ERROR_OUT_OF_MEMORY"},   {100, "CUDA_ERROR_NO_DEVICE"},
      {201, "CUDA_ERROR_INVALID_CONTEXT"},   {209, "CUDA_ERROR_NO_BINARY_FOR_GPU"}, {214, "CUDA_ERROR_ECC_UNCORRECTABLE"},
      {400, "CUDA_ERROR_INVALID_HANDLE"},    {500, "CUDA_ERROR_NOT_FOUND"},     {700, "CUDA_ERROR_ILLEGAL_ADDRESS"},
      {701, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"}, {719, "CUDA_ERROR_LAUNCH_FAILED"}, {803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"}};
  const auto found = names.find(error);
  *name = nullptr;
  if (found == names.end() || All().settings["nameless"] != 0) return kInvalidValue;
  *name = found->second;
  return kSuccess;
}
KVP_FAKE Result cuDeviceGetCount(int* count) {
  KVP_ENTER(false);
  *count = static_cast<int>(All().settings["devices"]);
  return kSuccess;
}
KVP_FAKE Result cuDeviceGet(DeviceNumber* device, int ordinal) {
  KVP_ENTER(false);
  *device = ordinal;
  return kSuccess;
}
KVP_FAKE Result cuDeviceGetName(char* name, int length, DeviceNumber device) {
  KVP_ENTER(false);
  std::snprintf(name, static_cast<size_t>(length), "Fake device %d", device);
  return kSuccess;
}
KVP_FAKE Result cuDeviceGetAttribute(int* value, Attribute attribute, DeviceNumber) {
  KVP_ENTER(false);
  auto& settings = All().settings;
  const auto capability = static_cast<int>(settings["capability"]);
  switch (attribute) {
    case kMaxPitch: *value = static_cast<int>(settings["pitch"]); break;
    case kMultiprocessors: *value = 4; break;
    case kComputeMode: *value = settings["prohibited"] != 0 ? kComputeModeProhibited : 0; break;
    case kCapabilityMajor: *value = capability / 10; break;
    case kCapabilityMinor: *value = capability % 10; break;
  }
  return kSuccess;
}
KVP_FAKE Result cuDevicePrimaryCtxRetain(Context* context, DeviceNumber) {
  KVP_ENTER(false);
  ++All().retained;
  *context = &All().context;
  return kSuccess;
}
KVP_FAKE Result cuDevicePrimaryCtxRelease_v2(DeviceNumber) {
  const std::lock_guard<std::recursive_mutex> guard(All().mutex);
  const Result result = Enter(__func__, false);
  if (--All().retained == 0) All().End();
  return result;
}
KVP_FAKE Result cuCtxPushCurrent_v2(Context context) {
  KVP_ENTER(false);
  if (t_current.count == std::size(t_current.items)) return 2;
  t_current.items[t_current.count++] = context;
  return kSuccess;
}
KVP_FAKE Result cuCtxPopCurrent_v2(Context* context) {
  const std::lock_guard<std::recursive_mutex> guard(All().mutex);
  if (t_current.count == 0) return 201;
  *context = t_current.items[--t_current.count];
  return kSuccess;
}
KVP_FAKE Result cuModuleLoadDataEx(Module* module, const void* image, unsigned, int*, void**) {
  KVP_ENTER(true);
  if (image == nullptr) return kInvalidValue;
  ++All().modules;
  *module = &All().module;
  return kSuccess;
}
KVP_FAKE Result cuModuleUnload(Module) {
  KVP_ENTER(true);
  --All().modules;
  return kSuccess;
}
KVP_FAKE Result cuModuleGetFunction(Function* function, Module, const char* name) {
  KVP_ENTER(true);
  const shim::Kernel kernel = shim::FindKernel(name);
  if (kernel == nullptr) return kNotFound;
  *function = &(All().functions[name] = {kernel});
  return kSuccess;
}
KVP_FAKE Result cuStreamCreate(Stream* stream, unsigned) {
  KVP_ENTER(true);
  *stream = new StreamOfTheDriver;
  All().streams.insert(*stream);
  return kSuccess;
}
KVP_FAKE Result cuStreamDestroy_v2(Stream stream) {
  KVP_ENTER(true);
  if (All().streams.erase(stream) == 0) return 400;
  stream->Run(stream->asked);
  delete stream;
  return kSuccess;
}
KVP_FAKE Result cuStreamSynchronize(Stream stream) {
  KVP_ENTER(true);
  if (All().streams.count(stream) == 0) return 400;
  stream->Run(stream->asked);
  return kSuccess;
}
KVP_FAKE Result cuEventCreate(Event* event, unsigned) {
  KVP_ENTER(true);
  *event = new EventOfTheDriver;
  All().events.insert(*event);
  return kSuccess;
}
KVP_FAKE Result cuEventDestroy_v2(Event event) {
  KVP_ENTER(true);
  if (All().events.erase(event) == 0) return 400;
  delete event;
  return kSuccess;
}
KVP_FAKE Result cuEventRecord(Event event, Stream stream) {
  KVP_ENTER(true);
  *event = {stream, stream->asked};
  return kSuccess;
}
KVP_FAKE Result cuEventSynchronize(Event event) {
  KVP_ENTER(true);
  if (event->stream != nullptr) event->stream->Run(event->until);
  return kSuccess;
}
KVP_FAKE Result cuMemAlloc_v2(Address* address, size_t bytes) {
  KVP_ENTER(true);
  Fake& fake = All();
  if (bytes == 0) return kInvalidValue;
  if (bytes > fake.settings["memory"] - std::min(fake.settings["memory"], fake.held)) return kOutOfMemory;
  // Of exactly this size, so that a sanitizer sees what lies beyond.
  void* memory = ::operator new(bytes, std::align_val_t(kAlignment));
  std::memset(memory, 0xa5, bytes);
  *address = reinterpret_cast<Address>(memory);
  fake.device[*address] = bytes;
  fake.held += bytes;
  return kSuccess;
}
KVP_FAKE Result cuMemFree_v2(Address address) {
  KVP_ENTER(true);
  Fake& fake = All();
  const auto found = fake.device.find(address);
  if (found == fake.device.end()) return kInvalidValue;
  for (const Stream stream : fake.streams) {
    // Others' streams do not know this memory.
    if (stream->done < stream->asked && stream->asker == std::this_thread::get_id()) ++fake.counts["rash"];
  }
  fake.held -= found->second;
  fake.device.erase(found);
  ::operator delete(Host(address), std::align_val_t(kAlignment));
  return kSuccess;
}
KVP_FAKE Result cuMemGetInfo_v2(size_t* free_bytes, size_t* total_bytes) {
  KVP_ENTER(true);
  *total_bytes = std::min<uint64_t>(All().settings["memory"], uint64_t{1} << 30);
  *free_bytes = *total_bytes - std::min<uint64_t>(*total_bytes, All().held);
  return kSuccess;
}
KVP_FAKE Result cuMemHostAlloc(void** memory, size_t bytes, unsigned) {
  KVP_ENTER(true);
  *memory = ::operator new(bytes, std::align_val_t(kAlignment));
  All().locked[reinterpret_cast<uintptr_t>(*memory)] = bytes;
  All().locked_bytes += bytes;
  return kSuccess;
}
KVP_FAKE Result cuMemFreeHost(void* memory) {
  KVP_ENTER(true);
  Fake& fake = All();
  const auto found = fake.locked.find(reinterpret_cast<uintptr_t>(memory));
  if (found == fake.locked.end()) return kInvalidValue;
  fake.locked_bytes -= found->second;
  fake.locked.erase(found);
  ::operator delete(memory, std::align_val_t(kAlignment));
  return kSuccess;
}
KVP_FAKE Result cuMemcpyHtoDAsync_v2(Address to, const void* from, size_t bytes, Stream stream) {
  KVP_ENTER(true);
  if (!OnDevice(to, bytes) || !Locked(from, bytes)) return kInvalidValue;
  return Ask(stream, [=] { std::memcpy(Host(to), from, bytes); });
}
KVP_FAKE Result cuMemcpyDtoHAsync_v2(void* to, Address from, size_t bytes, Stream stream) {
  KVP_ENTER(true);
  if (!OnDevice(from, bytes) || !Locked(to, bytes)) return kInvalidValue;
  return Ask(stream, [=] { std::memcpy(to, Host(from), bytes); });
}
KVP_FAKE Result cuMemcpyDtoDAsync_v2(Address to, Address from, size_t bytes, Stream stream) {
  KVP_ENTER(true);
  if (!OnDevice(from, bytes) || !OnDevice(to, bytes)) return kInvalidValue;
  return Ask(stream, [=] { std::memmove(Host(to), Host(from), bytes); });
}
KVP_FAKE Result cuMemcpy2DAsync_v2(const Copy2D* copy, Stream stream) {
  KVP_ENTER(true);
  const Copy2D c = *copy;
  const size_t pitch = All().settings["pitch"];
  if (c.from_x != 0 || c.from_y != 0 || c.to_x != 0 || c.to_y != 0 || c.from_pitch < c.width_bytes || c.to_pitch < c.width_bytes ||
      c.from_pitch > pitch || c.to_pitch > pitch || c.rows == 0 || c.width_bytes == 0) {
    return kInvalidValue;
  }
  const size_t from_bytes = (c.rows - 1) * c.from_pitch + c.width_bytes, to_bytes = (c.rows - 1) * c.to_pitch + c.width_bytes;
  const bool from_device = c.from_type == kDeviceMemory, to_device = c.to_type == kDeviceMemory;
  if (!(from_device ? OnDevice(c.from_device, from_bytes) : Locked(c.from_host, from_bytes))) return kInvalidValue;
  if (!(to_device ? OnDevice(c.to_device, to_bytes) : Locked(c.to_host, to_bytes))) return kInvalidValue;
  const auto* from = static_cast<const char*>(from_device ? Host(c.from_device) : c.from_host);
  auto* to = static_cast<char*>(to_device ? Host(c.to_device) : c.to_host);
  return Ask(stream, [=] {
    for (size_t i = 0; i < c.rows; ++i) std::memmove(to + i * c.to_pitch, from + i * c.from_pitch, c.width_bytes);
  });
}
#if !defined(KVP_FAKE_OLD)
KVP_FAKE Result cuMemsetD8Async(Address to, unsigned char value, size_t bytes, Stream stream) {
  KVP_ENTER(true);
  if (!OnDevice(to, bytes)) return kInvalidValue;
  return Ask(stream, [=] { std::memset(Host(to), value, bytes); });
}
#endif
KVP_FAKE Result cuLaunchKernel(Function function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                               unsigned block_z, unsigned shared_bytes, Stream stream, void** arguments, void** extra) {
  KVP_ENTER(true);
  const Extent grid{grid_x, grid_y, grid_z}, block{block_x, block_y, block_z};
  if (grid_x == 0 || grid_y == 0 || grid_z == 0 || extra != nullptr || !shim::WithinLimits(grid, block, shared_bytes)) return kInvalidValue;
  return Ask(stream, function->kernel(grid, block, shared_bytes, arguments));
}

KVP_FAKE void KvpFakeSet(const char* words) {
  const std::lock_guard<std::recursive_mutex> guard(All().mutex);
  All().Set(words);
}
KVP_FAKE uint64_t KvpFakeGet(const char* what) {
  Fake& fake = All();
  const std::lock_guard<std::recursive_mutex> guard(fake.mutex);
  if (std::strcmp(what, "contexts") == 0) return fake.retained;
  if (std::strcmp(what, "modules") == 0) return fake.modules;
  if (std::strcmp(what, "held") == 0) return fake.held;
  if (std::strcmp(what, "current") == 0) return t_current.count;
  if (std::strcmp(what, "locked") == 0) return fake.locked_bytes;
  const auto found = fake.counts.find(what);
  return found == fake.counts.end() ? 0 : found->second;
}

}  // extern "C"

}  // namespace kvpages::cuda::api
