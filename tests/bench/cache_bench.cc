// SPDX-License-Identifier: Apache-2.0
// Times of a ModelCache: append, freeze, scores from the codes, attend. Each line with what it is measured against.
//   cache_bench [append | scores | attend]   the table or a part of it
//   cache_bench soak [s]   an endless conversation for s seconds (600): memory must stay where it is; exit code 1 if not
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

#include "attention/attend.h"
#include "attention/coded.h"
#include "attention/kernels.h"
#if !defined(__EMSCRIPTEN__) && !defined(_WIN32)
#include <dlfcn.h>
#define KVP_DLOPEN 1
#endif

namespace kvpages {
namespace {

// Of this thread, so that other work on the machine counts as little as it can.
double Now() {
#if defined(CLOCK_THREAD_CPUTIME_ID)
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
#else
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
#endif
}

// Seconds of the fastest of several runs.
double Best(const std::function<void()>& body, double at_least = 0.4) {
  double best = 1e9;
  const double start = Now();
  for (int i = 0; i < 3 || Now() - start < at_least; ++i) {
    const double begin = Now();
    body();
    best = std::min(best, Now() - begin);
  }
  return best;
}

std::vector<float> Noise(int64_t count, uint32_t seed = 1) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = normal(random);
  return values;
}

template <typename T>
T Must(Result<T> result) {
  if (!result.ok()) {
    std::fprintf(stderr, "%s\n", result.error().message.c_str());
    std::exit(1);
  }
  return std::move(result.value());
}
void Must(Status status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.error().message.c_str());
  std::exit(1);
}

ModelCache MakeCache(const InstanceRef& instance, int64_t layers, int64_t heads, int64_t width, const char* key, const char* value) {
  ModelConfig config;
  LayerConfig layer;
  layer.heads = heads;
  layer.key.spec = Must(ParseSpecOrPreset(key, false, "key"));
  layer.value.spec = Must(ParseSpecOrPreset(value, true, "value"));
  layer.key.width = layer.value.width = width;
  config.layers.assign(static_cast<size_t>(layers), layer);
  return Must(ModelCache::Create(instance, std::move(config), 0));
}

struct Tokens {
  std::vector<TensorView> keys, values;
};
Tokens TokensOf(const std::vector<float>& data, int64_t layers, const Shape& shape) {
  Tokens tokens;
  const TensorView view = ContiguousView(data.data(), Type::f32, shape);
  tokens.keys.assign(static_cast<size_t>(layers), view);
  tokens.values = tokens.keys;
  return tokens;
}

void AppendRows(const InstanceRef& instance) {
  for (const char* preset : {"kv4", "kv8", "int4-kivi", "nvfp4", "int8", "bf16"}) {
    ModelCache cache = MakeCache(instance, 30, 3, 64, preset, preset);
    const auto data = Noise(3 * 64);
    const Tokens one = TokensOf(data, 30, {1, 3, 1, 64});
    for (int i = 0; i < 84; ++i) Must(cache.AppendAll(one.keys, one.values));
    double without = 0, with = 0;
    int freezes = 0, plain = 0;
    for (int i = 0; i < 512; ++i) {
      const int64_t before = cache.layer(0).pages.empty() ? 0 : static_cast<int64_t>(cache.layer(0).settled);
      const double begin = Now();
      Must(cache.AppendAll(one.keys, one.values));
      const double took = Now() - begin;
      if (static_cast<int64_t>(cache.layer(0).settled) != before || cache.layer(0).pages.back().length == 1) {
        with += took;
        ++freezes;
      } else {
        without += took;
        ++plain;
      }
    }
    std::printf("append 1 token to 30 x 3 x 64, %-10s %8.1f us; with a freeze of 30 pages %8.1f us; mean of all %8.1f us\n", preset,
                without / plain * 1e6, with / freezes * 1e6, (with + without) / 512 * 1e6);
  }
}

void ScoreRows(const InstanceRef& instance, double copy) {
  constexpr int64_t kKeys = 131072, kWidth = 128;
  const auto query = Noise(kWidth, 2);
  std::vector<float> scores(kKeys);
  const AttentionKernels& kernels = AttentionKernelsFor(instance->backend->name);
  const struct {
    const char* spec;
    int64_t page;  // keys
  } rows[] = {{"int4/token/128/absmax/f32", 16}, {"int4/token/128/absmax/f32", 1024}, {"int8/token/128/absmax/f32", 16},
              {"lm4/token/64/mse/e4m3", 16},     {"nvfp4", 16},                      {"f32", 16}};
  for (const auto& [spec, tokens] : rows) {
    const auto keys = Noise(64 * tokens * kWidth);
    std::vector<PayloadRef> pages;
    for (int64_t i = 0; i < kKeys / tokens; ++i) {
      // Memory of its own for every page, the same numbers again and again.
      if (i >= 64) {
        pages.push_back(Must(CutPayload(instance, *pages[static_cast<size_t>(i % 64)], tokens)));
        continue;
      }
      pages.push_back(Must(Encode(instance, ContiguousView(keys.data() + i * tokens * kWidth, Type::f32, {1, 1, tokens, kWidth}), tokens,
                                  Must(ParseSpec(spec, "spec")), {}, "keys")));
    }
    CodedKeys coded;
    std::vector<float> tile(static_cast<size_t>(tokens * kWidth));
    bool from_codes = true;
    const double took = Best([&] {
      coded.Forget();
      for (size_t i = 0; i < pages.size(); ++i) {
        const Payload& page = *pages[i];
        float* out = scores.data() + static_cast<int64_t>(i) * tokens;
        FetchAhead(i + 1 < pages.size() ? pages[i + 1].get() : nullptr, i + 2 < pages.size() ? pages[i + 2].get() : nullptr);
        if (page.kind == PayloadKind::kDense) {
          kernels.dots(query.data(), 1, page.data.as<float>(), tokens, kWidth, out, tokens);
          from_codes = false;
        } else if (kernels.coded_dots == nullptr || !coded.Dots(kernels, page, 0, 0, tokens, query.data(), 1, out, tokens)) {
          Must(Decode(instance, page, 0, tokens, tile.data(), 0, tokens * kWidth, kWidth));
          kernels.dots(query.data(), 1, tile.data(), tokens, kWidth, out, tokens);
          from_codes = false;
        }
      }
    });
    std::printf("scores of 1 query, 131072 keys of 128, pages of %4lld, %-26s %7.3f ms, %6.3f of memcpy of 64 MiB%s\n",
                static_cast<long long>(tokens), spec, took * 1e3, took / copy, from_codes ? "" : " (not from codes)");
  }
}

// The products of llama.cpp's own build over the same pages of 16 keys; its query has 8 bits, ours 14 to 16.
void LlamaScoreRows(const InstanceRef& instance, double copy) {
#if defined(KVP_DLOPEN) && defined(__x86_64__)
  constexpr int64_t kKeys = 131072, kWidth = 128;
  const std::string folder = KVP_TESTS_DIR "/../node_modules/@node-llama-cpp/linux-x64/bins/linux-x64/";
  const char* best = __builtin_cpu_supports("avx512vl") ? "skylakex" : __builtin_cpu_supports("avx2") ? "haswell" : "sse42";
  void* library = dlopen((folder + "libggml-base.so").c_str(), RTLD_NOW | RTLD_GLOBAL);
  if (library != nullptr) library = dlopen((folder + "libggml-cpu-" + best + ".so").c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    std::printf("llama.cpp's products are not here: %s\n", dlerror());
    return;
  }
  using Quantize = void (*)(const float*, void*, int64_t);
  using Dot = void (*)(int, float*, size_t, const void*, size_t, const void*, size_t, int);
  const auto quantize = reinterpret_cast<Quantize>(dlsym(library, "quantize_row_q8_0"));
  const auto query = Noise(kWidth, 2), keys = Noise(64 * 16 * kWidth);
  std::vector<uint8_t> blocks(kWidth / 32 * 34);
  std::vector<float> scores(kKeys);
  for (const std::string type : {"q8_0", "q4_0"}) {
    const auto dot = reinterpret_cast<Dot>(dlsym(library, ("ggml_vec_dot_" + type + "_q8_0").c_str()));
    if (quantize == nullptr || dot == nullptr) continue;
    quantize(query.data(), blocks.data(), kWidth);
    std::vector<PayloadRef> pages;
    for (size_t i = 0; i < kKeys / 16; ++i) {
      pages.push_back(i < 64 ? Must(Encode(instance, ContiguousView(keys.data() + i * 16 * kWidth, Type::f32, {1, 1, 16, kWidth}), 16,
                                           Must(ParseSpec(type, "spec")), {}, "keys"))
                             : Must(CutPayload(instance, *pages[i % 64], 16)));
    }
    const double took = Best([&] {
      for (size_t i = 0; i < pages.size(); ++i) {
        FetchAhead(i + 1 < pages.size() ? pages[i + 1].get() : nullptr, i + 2 < pages.size() ? pages[i + 2].get() : nullptr);
        const size_t row = pages[i]->codes.size() / 16;
        for (size_t t = 0; t < 16; ++t) {
          dot(kWidth, scores.data() + i * 16 + t, 0, pages[i]->codes.data() + t * row, 0, blocks.data(), 0, 1);
        }
      }
    });
    std::printf("scores of 1 query, 131072 keys of 128, pages of   16, llama.cpp %-16s %7.3f ms, %6.3f of memcpy of 64 MiB\n",
                type.c_str(), took * 1e3, took / copy);
  }
#else
  (void)instance;
  (void)copy;
#endif
}

void AttendRows(const InstanceRef& instance) {
  constexpr int64_t kTokens = 32768, kHeads = 8, kWidth = 128, kQueryHeads = 32;
  const auto query = Noise(kQueryHeads * kWidth, 3);
  std::vector<float> out(kQueryHeads * kWidth);
  double dense = 0;
  for (const char* spec : {"f32", "bf16", "int8/token/128/absmax/f32", "kv8", "int4/token/128/absmax/f32", "int4-kivi", "nvfp4", "kv4", "kv3"}) {
    ModelCache cache = MakeCache(instance, 1, kHeads, kWidth, spec, spec);
    for (int64_t i = 0; i < kTokens; i += 1024) {
      const auto data = Noise(kHeads * 1024 * kWidth, static_cast<uint32_t>(i));
      const Tokens part = TokensOf(data, 1, {1, kHeads, 1024, kWidth});
      Must(cache.Append(0, part.keys[0], part.values[0]));
    }
    Must(cache.Freeze(-1));
    const double took = Best([&] {
      Must(Attend(cache, 0, ContiguousView(query.data(), Type::f32, {1, kQueryHeads, 1, kWidth}), {}, out.data(), nullptr));
    });
    if (dense == 0) dense = took;
    std::printf("attend 1 token, 32 heads over 8 x 32768 x 128, %-26s %8.2f ms, %5.2f of f32, %5.2f bits\n", spec, took * 1e3, took / dense,
                cache.Stats().overall_bits);
  }
}

int Soak(const InstanceRef& instance, double seconds) {
  ModelCache cache = MakeCache(instance, 6, 3, 64, "kv4", "kv4");
  std::mt19937 random(1);
  const auto data = Noise(3 * 64 * 64), query = Noise(9 * 64);
  std::vector<float> out(9 * 64);
  uint64_t first = 0, most = 0;
  int64_t turns = 0;
  for (const double start = Now(); Now() - start < seconds; ++turns) {
    // A prompt, an answer with a look at every token, a second try, and the window moves on.
    const Tokens prompt = TokensOf(data, 6, {1, 3, 64, 64}), one = TokensOf(data, 6, {1, 3, 1, 64});
    Must(cache.AppendAll(prompt.keys, prompt.values));
    const int64_t at = cache.tokens();
    ModelCache branch = cache.Fork();
    for (ModelCache* each : {&branch, &cache}) {
      for (uint32_t i = random() % 40; i > 0; --i) {
        Must(each->AppendAll(one.keys, one.values));
        for (int64_t layer = 0; layer < 6; ++layer) {
          Must(Attend(*each, layer, ContiguousView(query.data(), Type::f32, {1, 9, 1, 64}), {}, out.data(), nullptr));
        }
      }
    }
    if (random() % 3 == 0) Must(cache.Truncate(at));
    if (cache.tokens() > 1024) Must(cache.DropBefore(cache.tokens() - 1024, -1));
    if (turns == 200) first = instance->budget->used();
    if (turns > 200) most = std::max(most, instance->budget->used());
  }
  std::printf("soak: %lld turns, %lld tokens, %.1f kB at turn 200, %.1f kB at most since\n", static_cast<long long>(turns),
              static_cast<long long>(cache.tokens()), static_cast<double>(first) / 1e3, static_cast<double>(most) / 1e3);
  const bool constant = turns > 200 && most < first + first / 2;
  if (!constant) std::printf("soak: %s\n", turns > 200 ? "memory grew" : "too short to tell");
  return constant ? 0 : 1;
}

int Main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  auto instance = std::make_shared<Instance>();
  const char* kernels = std::getenv("KVPAGES_KERNELS");
  instance->backend = Must(ChooseBackend(kernels == nullptr ? "" : kernels));
  std::printf("kernels: %s\n", instance->backend->name);
  if (argc > 1 && std::strcmp(argv[1], "soak") == 0) return Soak(instance, argc > 2 ? std::strtod(argv[2], nullptr) : 600);
  std::vector<uint8_t> from(64 << 20, 1), to(64 << 20);
  const double copy = Best([&] { std::memcpy(to.data(), from.data(), from.size()); });
  std::printf("memcpy of 64 MiB: %.2f ms\n", copy * 1e3);
  const std::string part = argc > 1 ? argv[1] : "";
  if (part.empty() || part == "append") AppendRows(instance);
  if (part.empty() || part == "scores") {
    ScoreRows(instance, copy);
    LlamaScoreRows(instance, copy);
  }
  if (part.empty() || part == "attend") AttendRows(instance);
  return 0;
}

}  // namespace
}  // namespace kvpages

int main(int argc, char** argv) { return kvpages::Main(argc, argv); }
