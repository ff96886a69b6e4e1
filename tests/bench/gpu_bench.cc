// SPDX-License-Identifier: Apache-2.0
// What this machine's GPU does: the codec's kernels against a copy within the device that is timed in the same run, uploads and
// downloads, and attention.
//   gpu_bench [elements | quick]   256 Mi elements without arguments, fewer where memory is short; quick: a trial in seconds
#include <cstdio>

#include "gpu/context.h"

#if !defined(KVP_CUDA)

int main() {
  std::printf("built without CUDA: nothing is measured\n");
  return 0;
}

#else

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "backends/backend.h"
#include "backends/cuda/attend.h"
#include "backends/cuda/codec.h"

namespace kvpages::cuda {
namespace {

constexpr int64_t kHeads = 8, kWidth = 128;
constexpr const char* kSpecs[] = {
    "int8/token/64/absmax/f32",  "int4/token/32/absmax/f16",          "e4m3/token/64/absmax/f32", "int8/channel/64/absmax/f32",
    "int4/channel/32/absmax/f16", "int8/tensor/absmax/f32",           "nvfp4",                    "mxfp4",
    "int4/token/64/mse/f32",     "lm4/token/64/mse/e4m3+hadamard",
};

double g_least_seconds = 0.2;

double Now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

void Demand(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.error().message.c_str());
  std::exit(1);
}
template <typename T>
T Demand(Result<T> result) {
  if (result.ok()) return std::move(result.value());
  std::fprintf(stderr, "%s\n", result.error().message.c_str());
  std::exit(1);
}

// Seconds of one turn of work that the device does by itself: median of five rows of turns, each awaited at its end.
double Time(Device& device, const std::function<Status()>& work) {
  Demand(work());
  Demand(device.Synchronize());
  int turns = 1;
  std::vector<double> times;
  while (times.size() < 5) {
    const double began = Now();
    for (int i = 0; i < turns; ++i) Demand(work());
    Demand(device.Synchronize());
    const double spent = Now() - began;
    if (spent < g_least_seconds / 5 && turns < 1 << 20) {
      turns *= 2;
      continue;
    }
    times.push_back(spent / turns);
  }
  std::nth_element(times.begin(), times.begin() + 2, times.end());
  return times[2];
}

class Bench {
 public:
  Bench(std::shared_ptr<Device> device, uint64_t memory, int64_t elements) : device_(std::move(device)), memory_(memory), elements_(elements) {}

  void Codec() {
    // Source, codes of up to 8 bits, scales, values: 7.5 bytes an element, and working memory.
    while (elements_ > kHeads * kWidth * 64 && static_cast<uint64_t>(elements_) * 9 > memory_) elements_ /= 2;
    const Shape shape{1, kHeads, std::max<int64_t>(elements_ / (kHeads * kWidth), 64), kWidth};
    const int64_t count = shape.elements();
    std::printf("\n%lld elements of bf16, %s\n", static_cast<long long>(count), Text(shape).c_str());
    const auto source = Demand(DeviceBlock::Allocate(device_, static_cast<uint64_t>(count) * 2));
    Fill(source);
    DeviceBlock values = Demand(DeviceBlock::Allocate(device_, static_cast<uint64_t>(count) * 4));
    const uint64_t copied = static_cast<uint64_t>(count) * 2;
    const double copy = Time(*device_, [&] { return device_->Copy(values.at(), source.at(), copied); });
    const double rate = 2 * static_cast<double>(copied) / copy;
    std::printf("copy within the device: %.1f GB/s (read and written)\n\n", rate * 1e-9);
    std::printf("%-34s %10s %9s %8s   %10s %9s %8s\n", "spec", "encode ms", "GB/s", "of copy", "decode ms", "GB/s", "of copy");
    for (const char* text : kSpecs) {
      const Spec spec = Demand(ResolveSpec(Demand(ParseSpec(text, "spec")), kWidth, "spec"));
      const ArraySizes sizes = SizesOf(spec, shape);
      const int64_t run = spec.hadamard ? HadamardLength(kWidth, HadamardRun::kLargest) : 0;
      const auto codes = Demand(DeviceBlock::Allocate(device_, sizes.codes));
      const auto scales = Demand(DeviceBlock::Allocate(device_, std::max<uint64_t>(sizes.scales, 4)));
      const auto zeros = Demand(DeviceBlock::Allocate(device_, std::max<uint64_t>(sizes.zeros, 4)));
      const auto global = Demand(DeviceBlock::Allocate(device_, 4));
      EncodeItem item;
      item.source = source.at();
      item.token_stride = kWidth;
      item.head_stride = item.batch_stride = shape.tokens * kWidth;
      item.valid = shape.tokens;
      item.codes = codes.at();
      item.scales = scales.at();
      item.zeros = sizes.zeros > 0 ? zeros.at() : 0;
      item.global = global.at();
      DecodeItem back;
      back.codes = codes.at();
      back.scales = scales.at();
      back.zeros = item.zeros;
      back.global = global.at();
      back.end = shape.tokens;
      back.out = values.at();
      back.token_stride = kWidth;
      back.head_stride = back.batch_stride = item.head_stride;
      DeviceCodec codec(device_);
      SpecOptions options;
      options.non_finite = NonFinite::kPass;
      const double encode = Time(*device_, [&] { return codec.Encode(spec, options, shape, Type::bf16, run, {&item, 1}); });
      const double decode = Time(*device_, [&] { return codec.Decode(spec, shape, ScaleGrid(spec, shape), run, {&back, 1}); });
      // What must be read and written at least.
      const auto coded = static_cast<double>(sizes.codes + sizes.scales + sizes.zeros);
      const double encode_rate = (coded + 2 * static_cast<double>(count)) / encode, decode_rate = (coded + 4 * static_cast<double>(count)) / decode;
      std::printf("%-34s %10.3f %9.1f %7.0f%%   %10.3f %9.1f %7.0f%%\n", text, encode * 1e3, encode_rate * 1e-9, 100 * encode_rate / rate,
                  decode * 1e3, decode_rate * 1e-9, 100 * decode_rate / rate);
    }
  }

  void Transfers(uint64_t most_bytes) {
    std::printf("\n%-14s %10s %10s   host memory as it comes, through page-locked memory\n", "bytes", "up GB/s", "down GB/s");
    for (uint64_t bytes = 4096; bytes <= most_bytes; bytes *= 16) {
      const auto block = Demand(DeviceBlock::Allocate(device_, bytes));
      std::vector<uint8_t> host(bytes, 1);
      const double up = Time(*device_, [&] { return device_->Upload(block.at(), host.data(), bytes); });
      const double down = Time(*device_, [&] { return device_->Download(host.data(), block.at(), bytes); });
      std::printf("%-14llu %10.2f %10.2f\n", static_cast<unsigned long long>(bytes), static_cast<double>(bytes) / up * 1e-9,
                  static_cast<double>(bytes) / down * 1e-9);
    }
  }

 private:
  void Fill(const DeviceBlock& block) {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    std::vector<uint16_t> some(std::min<uint64_t>(block.bytes() / 2, 1 << 20));
    for (uint16_t& value : some) value = ToBF16(normal(random));
    for (uint64_t at = 0; at < block.bytes(); at += some.size() * 2) {
      Demand(device_->Upload(block.at() + at, some.data(), std::min<uint64_t>(some.size() * 2, block.bytes() - at)));
    }
  }

  std::shared_ptr<Device> device_;
  uint64_t memory_;
  int64_t elements_;
};

}  // namespace
}  // namespace kvpages::cuda

int main(int argc, char** argv) {
  using namespace kvpages::cuda;
  const auto context = OpenContextHere();
  if (!context.ok()) {
    std::printf("no GPU, nothing is measured: %s\n", context.error().message.c_str());
    return 0;
  }
  const bool quick = argc > 1 && std::strcmp(argv[1], "quick") == 0;
  if (quick) g_least_seconds = 0;
  const int64_t elements = quick ? 1 << 16 : argc > 1 ? std::max(std::atoll(argv[1]), 1ll) : int64_t{1} << 28;
  std::printf("%s\n", ProbeOf(*context.value()).device.c_str());
  const auto memory = Demand(MemoryOf(*context.value()));
  Bench bench(Demand(OpenDevice(context.value())), memory.free_bytes, elements);
  bench.Codec();
  bench.Transfers(quick ? 1 << 16 : uint64_t{256} << 20);
  return 0;
}

#endif
