// SPDX-License-Identifier: Apache-2.0
// Times of the codecs' kernels, relative to memcpy of the same 64 MiB of f32 (131072 tokens x 128), one thread. A copy is
// timed right before each run of a kernel, and the table shows the median of the ratios, so that what else the machine
// does counts as little as it can. Beside them the row functions of llama.cpp's own build, where it is installed.
//   codec_bench [backend | all] [part of a spec]   the best backend without arguments
#if !defined(__EMSCRIPTEN__)
#include <dlfcn.h>
#endif

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "backends/backend.h"

namespace kvpages {
namespace {

constexpr Shape kShape{1, 1, 131072, 128};
#if !defined(__EMSCRIPTEN__)
constexpr char kLlama[] = KVP_TESTS_DIR "/../node_modules/@node-llama-cpp/linux-x64/bins/linux-x64/";
#endif

struct Row {
  const char* spec;
  const char* note;
};
constexpr Row kRows[] = {
    {"int8/tensor/given", "scale given"},
    {"int4/tensor/given", "scale given"},
    {"int8/token", ""},
    {"int8/channel/16", ""},
    {"int4/token", ""},
    {"int4/channel/16", ""},
    {"int3/token", ""},
    {"int3/channel/16", ""},
    {"e4m3/token", ""},
    {"nvfp4", ""},
    {"int4/channel/16/mse/e4m3", "scale search"},
    {"uint4/channel/16/mse/e4m3", "scale search"},
    {"int4/token/16/mse/e4m3", "scale search"},
    {"lm4/token/64/mse/e4m3+hadamard", "scale search"},
    {"lm3/token/64/mse/e4m3+hadamard", "scale search"},
    {"uint3/channel/64/mse/e4m3+hadamard", "scale search"},
    {"int2/token", ""},
    {"e5m2/token", ""},
    {"nvfp4-4over6", "scale search"},
    {"mxfp4", ""},
    {"mxfp8", ""},
    {"uint4/channel/32/kivi/f16", ""},
    {"uint2/token/32/kivi/f16", ""},
    {"q8_0", ""},
    {"q4_0", ""},
    {"q4_1", ""},
    {"q5_0", ""},
    {"q5_1", ""},
    {"iq4_nl", ""},
};

// Of this thread, so that other work on the machine counts as little as it can.
double Now() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}
double Seconds(const std::function<void()>& body) {
  const double begin = Now();
  body();
  return Now() - begin;
}

// Memory at a line's begin, as payloads have it.
template <typename T>
class Lines {
 public:
  Lines(size_t count, T value) : store_(count + 64 / sizeof(T), value), count_(count) {}
  explicit Lines(size_t count) : Lines(count, T()) {}
  T* data() { return reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(store_.data()) + 63) / 64 * 64); }
  const T* data() const { return const_cast<Lines*>(this)->data(); }
  T& operator[](size_t i) { return data()[i]; }
  size_t size() const { return count_; }
  bool empty() const { return count_ == 0; }

 private:
  std::vector<T> store_;
  size_t count_;
};

class Bench {
 public:
  Bench() : x_(static_cast<size_t>(kShape.elements())), out_(x_.size(), 1.0f), copy_(x_.size(), 1.0f) {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    // A million values, repeated: drawing sixteen takes longer than the benchmark.
    for (size_t i = 0; i < x_.size(); ++i) x_[i] = i < 1 << 20 ? normal(random) : x_[i - (1 << 20)];
  }

  // Median of time / memcpy.
  double Ratio(const std::function<void()>& body) {
    std::vector<double> ratios;
    const double start = Now();
    for (int i = 0; i < 3 || (i < 15 && Now() - start < 1.2); ++i) {
      const double copy = Seconds([&] { std::memcpy(copy_.data(), x_.data(), x_.size() * 4); });
      ratios.push_back(Seconds(body) / copy);
    }
    std::sort(ratios.begin(), ratios.end());
    return ratios[ratios.size() / 2];
  }

  void Ours(const Backend& backend, const Row& row) {
    auto parsed = ParseSpec(row.spec, "spec");
    auto resolved = parsed.ok() ? ResolveSpec(parsed.value(), kShape.width, "spec") : parsed;
    if (!resolved.ok()) {
      std::fprintf(stderr, "%s\n", resolved.error().message.c_str());
      std::exit(1);
    }
    const Spec spec = resolved.value();
    const ArraySizes sizes = SizesOf(spec, kShape);
    Lines<uint8_t> codes(static_cast<size_t>(sizes.codes)), scales(static_cast<size_t>(sizes.scales)),
        zeros(static_cast<size_t>(sizes.zeros));
    std::vector<float> scratch(static_cast<size_t>(ScratchFloats(spec, kShape)) + 1);
    float global = 1.0f;
    const Grid grid = ScaleGrid(spec, kShape);
    const int64_t run = spec.hadamard ? HadamardLength(kShape.width, HadamardRun::kLargest) : 0;
    if (spec.calibration == Calibration::kGiven && grid.count > 0) {
      const std::vector<float> given(static_cast<size_t>(grid.count), 4.0f / (Info(spec.type).bits == 8 ? 127.0f : 7.0f));
      if (!StoreScales(spec, given.data(), grid.count, scales.data(), &global).ok()) std::exit(1);
    }

    QuantizeJob quantize;
    quantize.spec = spec;
    quantize.shape = kShape;
    quantize.valid = kShape.tokens;
    quantize.grid = grid;
    quantize.source = x_.data();
    quantize.batch_stride = quantize.head_stride = kShape.tokens * kShape.width;
    quantize.token_stride = kShape.width;
    quantize.hadamard = run;
    quantize.codes = codes.data();
    quantize.scales = scales.data();
    quantize.zeros = zeros.data();
    quantize.global = &global;
    quantize.scratch = scratch.data();
    const double encode = Ratio([&] { backend.quantize(quantize); });

    DequantizeJob dequantize;
    dequantize.spec = spec;
    dequantize.shape = kShape;
    dequantize.grid = grid;
    dequantize.codes = codes.data();
    dequantize.scales = scales.data();
    dequantize.zeros = zeros.empty() ? nullptr : zeros.data();
    dequantize.global = global;
    dequantize.hadamard = run;
    dequantize.end = kShape.tokens;
    dequantize.out = out_.data();
    dequantize.batch_stride = dequantize.head_stride = kShape.tokens * kShape.width;
    dequantize.token_stride = kShape.width;
    const double decode = Ratio([&] { backend.dequantize(dequantize); });
    Print(backend.name, row.spec, row.note, encode, decode);
  }

#if defined(__EMSCRIPTEN__)
  void Others() {}
#else
  void Others() {
    void* base = dlopen((std::string(kLlama) + "libggml-base.so").c_str(), RTLD_NOW | RTLD_GLOBAL);
    if (base == nullptr) {
      std::printf("llama.cpp's row functions are not here: %s\n", dlerror());
      return;
    }
    void* vectors = nullptr;
#if defined(__x86_64__)
    const char* best = __builtin_cpu_supports("avx512vl") ? "skylakex" : __builtin_cpu_supports("avx2") ? "haswell" : "sse42";
    vectors = dlopen((std::string(kLlama) + "libggml-cpu-" + best + ".so").c_str(), RTLD_NOW | RTLD_LOCAL);
#endif
    if (vectors == nullptr) std::printf("llama.cpp's vector functions do not load; its plain ones are timed\n");
    using Quantize = void (*)(const float*, void*, int64_t);
    using Dequantize = void (*)(const void*, float*, int64_t);
    // Bytes of 32 elements with their scales.
    const struct {
      std::string type;
      size_t bytes;
    } types[] = {{"q8_0", 34}, {"q4_0", 18}, {"q4_1", 20}, {"q5_0", 22}, {"q5_1", 24}, {"iq4_nl", 18}, {"nvfp4", 18}, {"mxfp4", 17}};
    for (const auto& [type, bytes] : types) {
      auto quantize = vectors == nullptr ? nullptr : reinterpret_cast<Quantize>(dlsym(vectors, ("quantize_row_" + type).c_str()));
      if (quantize == nullptr) quantize = reinterpret_cast<Quantize>(dlsym(base, ("quantize_row_" + type + "_ref").c_str()));
      const auto dequantize = reinterpret_cast<Dequantize>(dlsym(base, ("dequantize_row_" + type).c_str()));
      if (quantize == nullptr || dequantize == nullptr) continue;
      std::vector<uint8_t> blocks(x_.size() * 34 / 32 + 1024);
      // Row by row, as its callers do.
      const auto rows = [&](const auto& f) {
        for (int64_t t = 0; t < kShape.tokens; ++t) f(static_cast<size_t>(t * kShape.width));
      };
      const size_t per = bytes;
      const double encode = Ratio([&] { rows([&](size_t at) { quantize(x_.data() + at, blocks.data() + at * per / 32, kShape.width); }); });
      const double decode = Ratio([&] { rows([&](size_t at) { dequantize(blocks.data() + at * per / 32, out_.data() + at, kShape.width); }); });
      Print("llama.cpp", type.c_str(), "", encode, decode);
    }
  }
#endif

  void Print(const char* who, const char* spec, const char* note, double encode, double decode) {
    std::printf("| %-9s | %-34s | %-12s | %8.2f | %10.2f |\n", who, spec, note, encode, decode);
    std::fflush(stdout);
  }

 private:
  Lines<float> x_, out_, copy_;
};

int Main(int argc, char** argv) {
  const std::string which = argc > 1 ? argv[1] : "", part = argc > 2 ? argv[2] : "";
  Bench bench;
  std::printf("Time / memcpy of the same 64 MiB of f32 (median), one thread\n\n");
  std::printf("| %-9s | %-34s | %-12s | quantize | dequantize |\n|---|---|---|---:|---:|\n", "kernels", "spec", "");
  bool any = false;
  for (const Backend* backend : AllBackends()) {
    if (!backend->available() || (which.empty() && any) || (!which.empty() && which != "all" && which != backend->name)) continue;
    any = true;
    for (const Row& row : kRows) {
      if (std::strstr(row.spec, part.c_str()) != nullptr) bench.Ours(*backend, row);
    }
  }
  if (!any) {
    std::fprintf(stderr, "no backend '%s' here\n", which.c_str());
    return 1;
  }
  if (part.empty()) bench.Others();
  return 0;
}

}  // namespace
}  // namespace kvpages

int main(int argc, char** argv) { return kvpages::Main(argc, argv); }
