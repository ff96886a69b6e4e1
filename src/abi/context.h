// SPDX-License-Identifier: Apache-2.0
// What every body behind kvpages.h shares: the thread's handles and last error, blobs, and the guard that turns a
// Status into an ABI status.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#if defined(__cpp_exceptions)
#include <new>
#endif

#include "abi/handles.h"
#include "core/convert.h"
#include "core/instance.h"
#include "core/json.h"
#include "core/page.h"
#include "core/status.h"

namespace kvpages::abi {

// State of one thread: Node runs each worker on a thread of its own, so objects never cross threads.
struct Thread {
  Handles handles;
  Error last_error;
};
Thread& ThisThread();
int32_t Fail(Error error);  // remembers it, returns its number

// Runs a body that returns Status. Native builds have exceptions only so that a failed small allocation (strings,
// vectors) becomes ERR_MEMORY here.
template <typename F>
int32_t Guard(F&& body) {
#if defined(__cpp_exceptions)
  try {
    Status status = body();
    return status.ok() ? 0 : Fail(std::move(status.error()));
  } catch (const std::bad_alloc&) {
    return Fail(MakeError(Code::kMemory, "", "out of memory"));
  }
#else
  Status status = body();
  return status.ok() ? 0 : Fail(std::move(status.error()));
#endif
}

struct Blob {
  std::string text;
};

// A payload or a cache with the instance that it belongs to.
struct PayloadObject {
  InstanceRef instance;
  PayloadRef payload;
};
struct PagedObject {
  InstanceRef instance;
  PagedCache cache;
};

Status PublishErased(std::shared_ptr<void> object, const void* tag, uint32_t* out, size_t out_len);
// Puts an object into the table and its handle into `out`, which must hold one.
template <typename T>
Status Publish(std::shared_ptr<T> object, uint32_t* out, size_t out_len) {
  return PublishErased(std::move(object), TagOf<T>(), out, out_len);
}
inline Status PublishBlob(std::string text, uint32_t* out, size_t out_len) {
  return Publish(std::make_shared<Blob>(Blob{std::move(text)}), out, out_len);
}
template <typename T>
Result<std::shared_ptr<T>> Get(uint32_t handle, const char* argument) {
  return ThisThread().handles.Get<T>(handle, argument);
}

// Writes one value into a caller's output of one element.
template <typename T, typename V>
Status PutOne(T* out, size_t out_len, V value, const char* argument) {
  if (out == nullptr || out_len != 1) return MakeError(Code::kBuffer, argument, "must hold one element", Text(static_cast<int64_t>(out_len)));
  *out = static_cast<T>(value);
  return Ok();
}
Status CopyOut(const void* data, uint64_t size, uint8_t* out, size_t out_len, const char* argument);

inline std::string_view View(const char* text, size_t length) { return {text == nullptr ? "" : text, length}; }

// A count or position that came as a double: integral and within [low, high].
Result<int64_t> Integer(double value, int64_t low, int64_t high, const char* argument);
// One to four dims, padded in front with 1.
Result<Shape> ShapeOf(const int64_t* dims, size_t dims_len, const char* argument);
Result<Type> DenseType(std::string_view name, const char* argument);
// A caller's tensor; checks that every element lies within `data`.
Result<TensorView> ViewOf(const uint8_t* data, size_t data_len, std::string_view type, const int64_t* dims, size_t dims_len,
                          const int64_t* strides, size_t strides_len, const char* argument);
// "key" is false, "value" is true.
Result<bool> IsValueSide(std::string_view side, const char* argument);

// The JSON of one payload, as kvp_payload_info and kvp_paged_info give it.
void Describe(const Payload& payload, Json& json);

}  // namespace kvpages::abi
