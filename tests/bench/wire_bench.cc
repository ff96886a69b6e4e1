// SPDX-License-Identifier: Apache-2.0
// Serialize and parse against memcpy of the same payload bytes, in the same run. Exit code 1 where a cache of large pages
// takes more than the bound with the word "check".
//   wire_bench [check]
#include <algorithm>
#include <chrono>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#if defined(__GLIBC__)
#include <malloc.h>
#endif

#include "wire/wire.h"

namespace kvpages {
namespace {

constexpr double kBound = 1.5;

// The second of two runs: each then finds in the caches what it left there itself, and not what another body did.
double Once(const std::function<void()>& body) {
  body();
  const auto begin = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

template <typename T>
T Must(Result<T> result) {
  if (!result.ok()) {
    std::fprintf(stderr, "%s\n", result.error().message.c_str());
    std::exit(2);
  }
  return std::move(result.value());
}

PagedCache Make(const InstanceRef& instance, int64_t pages, const Shape& shape, const char* text) {
  std::vector<float> values(static_cast<size_t>(shape.elements()));
  uint32_t seed = 1;
  for (float& value : values) {
    seed = seed * 1664525u + 1013904223u;
    value = static_cast<float>(static_cast<int32_t>(seed) >> 16) / 8192.0f;
  }
  const Spec spec = Must(ParseSpec(text, "spec"));
  PagedCache cache;
  for (int64_t i = 0; i < pages; ++i) {
    const TensorView view = ContiguousView(values.data(), Type::f32, shape);
    cache.pages.push_back({i * shape.tokens, shape.tokens, Must(Encode(instance, view, shape.tokens, spec, {}, "values")),
                           Must(Encode(instance, view, shape.tokens, spec, {}, "values")), nullptr});
  }
  return cache;
}

// Whether both ratios are within the bound.
bool Row(const InstanceRef& instance, int64_t pages, const Shape& shape, const char* spec) {
  const PagedCache cache = Make(instance, pages, shape, spec);
  uint64_t payload = 0;
  for (const Page& page : cache.pages) payload += page.key->bytes() + page.value->bytes();
  std::vector<uint8_t> file(static_cast<size_t>(SerializedSize(cache)));
  if (!SerializePagedCache(cache, file).ok()) std::exit(2);
  // One block per payload for memcpy too: what counts is fresh memory per page (parse), or none (serialize).
  std::vector<uint8_t> copy(static_cast<size_t>(payload));
  double copy_time = 1e9, fresh_time = 1e9, write_time = 1e9, read_time = 1e9;
  for (int run = 0; run < 15; ++run) {
    copy_time = std::min(copy_time, Once([&] {
      uint8_t* out = copy.data();
      for (const Page& page : cache.pages) {
        for (const PayloadRef& side : {page.key, page.value}) {
          for (const Bytes* part : {&side->data, &side->codes, &side->scales, &side->zeros}) {
            if (!part->empty()) std::memcpy(out, part->data(), static_cast<size_t>(part->size()));
            out += part->size();
          }
        }
      }
    }));
    write_time = std::min(write_time, Once([&] {
      if (SerializedSize(cache) != file.size() || !SerializePagedCache(cache, file).ok()) std::exit(2);
    }));
    fresh_time = std::min(fresh_time, Once([&] {
      // From the file's memory, as parse does.
      std::vector<Bytes> blocks;
      const uint8_t* from = file.data();
      for (const Page& page : cache.pages) {
        for (const PayloadRef& side : {page.key, page.value}) {
          for (const Bytes* part : {&side->data, &side->codes, &side->scales, &side->zeros}) {
            if (part->empty()) continue;
            blocks.push_back(Must(Bytes::Copy(from, part->size())));
            from += part->size();
          }
        }
      }
    }));
    read_time = std::min(read_time, Once([&] { Must(ParsePagedCache(instance, file)); }));
  }
  std::printf("%-32s %4lld pages of %8.1f kB  serialize %5.2f  parse %5.2f x memcpy (%.2f GB/s; into new memory %.2f GB/s)\n", spec,
              static_cast<long long>(pages), static_cast<double>(payload) / 1e3 / static_cast<double>(pages), write_time / copy_time,
              read_time / fresh_time, static_cast<double>(payload) / copy_time / 1e9, static_cast<double>(payload) / fresh_time / 1e9);
  return write_time <= kBound * copy_time && read_time <= kBound * fresh_time;
}

}  // namespace
}  // namespace kvpages

int main(int argc, char** argv) {
  using namespace kvpages;
#if defined(__GLIBC__)
  // Memory that is freed stays with the process: page faults, which cost several copies, would hit some rows and not others.
  mallopt(M_MMAP_THRESHOLD, 1 << 30);
  mallopt(M_TRIM_THRESHOLD, INT_MAX);
#endif
  auto instance = std::make_shared<Instance>();
  instance->backend = Must(ChooseBackend("auto"));
  const bool check = argc > 1 && std::string(argv[1]) == "check";
  bool good = true;
  for (const char* spec : {"f32", "bf16", "int8/tensor/absmax/f32", "int4/tensor/absmax/f32", "int8/token/32/absmax/f32", "uint4/token/32/minmax/f32",
                           "lm4/token/64/mse/e4m3+hadamard"}) {
    good &= Row(instance, 8, {1, 8, 2048, 128}, spec);
  }
  // Pages of 16 tokens, as a running model has them: the cost per page counts here, without a bound.
  for (const char* spec : {"bf16", "int4/tensor/absmax/f32", "lm4/token/64/mse/e4m3+hadamard"}) Row(instance, 1024, {1, 8, 16, 128}, spec);
  return check && !good ? 1 : 0;
}
