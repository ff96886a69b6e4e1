// SPDX-License-Identifier: Apache-2.0
// Any bytes as a PagedCacheProto: refused with a place, or read, valid, and written and read again without change.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "wire/wire.h"

namespace {

void Require(bool holds) {
  if (!holds) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace kvpages;
  // A block of exactly this size, so that the sanitizer sees every read beyond it.
  const std::unique_ptr<uint8_t[]> copy(new uint8_t[size]);
  if (size > 0) std::memcpy(copy.get(), data, size);
  auto instance = std::make_shared<Instance>();
  instance->backend = AllBackends().back();
  // Pages take what the file holds: typed data at most twice of it (a varint of one byte to two, or to a zero point's one).
  instance->budget = std::make_shared<Budget>(4 * size + 4096);
  auto cache = ParsePagedCache(instance, {copy.get(), size});
  if (!cache.ok()) {
    Require(cache.error().code != Code::kLimit && cache.error().code != Code::kInternal);
    Require(cache.error().byte_offset.has_value());
    Require(*cache.error().byte_offset >= 0 && static_cast<uint64_t>(*cache.error().byte_offset) <= size);
    return 0;
  }
  Require(Validate(cache.value()).ok());
  const uint64_t bytes = SerializedSize(cache.value());
  const std::unique_ptr<uint8_t[]> first(new uint8_t[bytes]), second(new uint8_t[bytes]);
  Require(SerializePagedCache(cache.value(), {first.get(), bytes}).ok());
  auto again = ParsePagedCache(instance, {first.get(), bytes});
  Require(again.ok() || again.error().code == Code::kLimit);  // both caches share the budget
  if (!again.ok()) return 0;
  Require(SerializedSize(again.value()) == bytes);
  Require(SerializePagedCache(again.value(), {second.get(), bytes}).ok());
  Require(bytes == 0 || std::memcmp(first.get(), second.get(), bytes) == 0);
  return 0;
}
