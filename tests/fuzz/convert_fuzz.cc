// SPDX-License-Identifier: Apache-2.0
// QuantizePagedCache over bytes that choose types, scales, shape and values: every backend gives the reference's file,
// or the reference's error.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "wire/wire.h"

namespace {

using namespace kvpages;

// Bytes of the input one after the other, zeros once they are used up.
struct Reader {
  const uint8_t* data;
  size_t size;
  uint8_t Next() {
    if (size == 0) return 0;
    --size;
    return *data++;
  }
  float NextFloat() {
    uint32_t bits = 0;
    for (int i = 0; i < 4; ++i) bits |= static_cast<uint32_t>(Next()) << 8 * i;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
  }
};

constexpr Type kDestinations[] = {Type::int8, Type::uint8, Type::int4, Type::uint4, Type::int2, Type::uint2, Type::f32, Type::f16, Type::bf16};
constexpr Type kSources[] = {Type::f32, Type::f16, Type::bf16};

Destination NextDestination(Reader* reader) {
  const Type type = kDestinations[reader->Next() % std::size(kDestinations)];
  const uint8_t zero = reader->Next();
  return {static_cast<double>(reader->NextFloat()), type, zero};
}

std::string Run(const Backend* backend, Reader reader) {
  auto instance = std::make_shared<Instance>();
  instance->backend = backend;
  Shape shape;
  shape.batch = 1 + reader.Next() % 2;
  shape.heads = 1 + reader.Next() % 3;
  shape.tokens = 1 + reader.Next() % 5;
  shape.width = 1 + reader.Next() % 37;
  const int64_t length = 1 + reader.Next() % shape.tokens;
  const Type source = kSources[reader.Next() % std::size(kSources)];
  const Destination targets[] = {NextDestination(&reader), NextDestination(&reader), NextDestination(&reader), NextDestination(&reader)};
  std::vector<uint8_t> values(static_cast<size_t>(shape.elements() * Info(source).bits / 8));
  for (uint8_t& byte : values) byte = reader.Next();
  auto key = MakeDense(instance, ContiguousView(values.data(), source, shape));
  auto value = MakeDense(instance, ContiguousView(values.data(), source, shape));
  if (!key.ok() || !value.ok()) std::abort();
  PagedCache cache;
  Page page;
  page.length = length;
  page.key = key.value();
  page.value = value.value();
  cache.pages.push_back(page);
  // Twice: the second time the source is encoded.
  std::string all;
  for (int step = 0; step < 2; ++step) {
    const int64_t index = 0;
    auto made = QuantizePagedCache(instance, cache, {&index, 1}, targets[2 * step], targets[2 * step + 1]);
    if (!made.ok()) return all + CodeText(made.error().code) + made.error().message;
    cache = std::move(made.value());
    std::vector<uint8_t> bytes(static_cast<size_t>(SerializedSize(cache)));
    if (!SerializePagedCache(cache, bytes).ok()) std::abort();
    all.append(bytes.begin(), bytes.end());
  }
  return all;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::vector<const Backend*>& backends = AllBackends();
  const std::string want = Run(backends.back(), {data, size});
  for (const Backend* backend : backends) {
    if (backend->available() && Run(backend, {data, size}) != want) std::abort();
  }
  return 0;
}
