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
#include <span>
#include <string>
#include <string_view>
#include <utility>
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

constexpr int64_t kQueryHeads = 32, kPageTokens = 16;

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

// Seconds of one turn of work that the device does by itself: median of five rows of turns, each awaited at its end; of one in
// a trial.
double Time(Device& device, const std::function<Status()>& work) {
  Demand(work());
  Demand(device.Synchronize());
  const size_t rows = g_least_seconds > 0 ? 5 : 1;
  int turns = 1;
  std::vector<double> times;
  while (times.size() < rows) {
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
  const auto middle = times.begin() + static_cast<std::ptrdiff_t>(rows / 2);
  std::nth_element(times.begin(), middle, times.end());
  return *middle;
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

  // One token a sequence, against pages of a preset: their codes and scales are read once.
  void Attention(std::string_view preset_name, std::span<const int64_t> lengths, std::span<const int64_t> counts) {
    const Preset* preset = FindPreset(preset_name);
    std::printf("\nattention, %s: %lld query heads, %lld KV heads, head_dim %lld\n%10s %10s %10s %12s\n", std::string(preset_name).c_str(),
                static_cast<long long>(kQueryHeads), static_cast<long long>(kHeads), static_cast<long long>(kWidth), "tokens", "sequences", "ms",
                "GB/s of codes");
    const Shape shape{1, kHeads, kPageTokens, kWidth};
    struct Side {
      Spec spec;
      ArraySizes sizes;
      int64_t run = 0;
      uint64_t codes = 0, scales = 0, zeros = 0, global = 0;  // places in a record
    } sides[2];
    uint64_t record = 0, coded = 0;
    const auto place = [&](uint64_t bytes) { return std::exchange(record, record + (bytes + 255) / 256 * 256); };
    for (int i = 0; i < 2; ++i) {
      Side& side = sides[i];
      Spec parsed = Demand(ParseSpec(i == 0 ? preset->key : preset->value, "spec"));
      parsed.center = false;
      side.spec = Demand(ResolveSpec(parsed, kWidth, "spec"));
      side.sizes = SizesOf(side.spec, shape);
      side.run = side.spec.hadamard ? HadamardLength(kWidth, HadamardRun::kLargest) : 0;
      side.codes = place(side.sizes.codes);
      side.scales = place(side.sizes.scales);
      side.zeros = place(side.sizes.zeros);
      side.global = place(4);
      coded += side.sizes.codes + side.sizes.scales + side.sizes.zeros;
    }
    const auto page = Demand(DeviceBlock::Allocate(device_, record));
    const auto source = Demand(DeviceBlock::Allocate(device_, static_cast<uint64_t>(shape.elements()) * 2));
    Fill(source);
    DeviceCodec codec(device_);
    std::vector<CodecPlan> plans;
    for (const Side& side : sides) {
      EncodeItem item;
      item.source = source.at();
      item.token_stride = kWidth;
      item.head_stride = item.batch_stride = kPageTokens * kWidth;
      item.valid = kPageTokens;
      item.codes = page.at() + side.codes;
      item.scales = page.at() + side.scales;
      item.zeros = side.sizes.zeros > 0 ? page.at() + side.zeros : 0;
      item.global = page.at() + side.global;
      Demand(codec.Encode(side.spec, {}, shape, Type::bf16, side.run, {&item, 1}));
      plans.push_back(DecodePlan(side.spec, shape, ScaleGrid(side.spec, shape), side.run));
    }
    const auto formats = Demand(DeviceBlock::Allocate(device_, plans.size() * sizeof(CodecPlan)));
    Demand(device_->Upload(formats.at(), plans.data(), plans.size() * sizeof(CodecPlan)));
    for (const int64_t length : lengths) {
      for (const int64_t count : counts) {
        const auto pages = static_cast<uint64_t>(CeilDiv(length, kPageTokens)), all = pages * static_cast<uint64_t>(count);
        if (all * (record + sizeof(AttendPage)) > memory_ / 10 * 8) {
          std::printf("%10lld %10lld   not enough memory\n", static_cast<long long>(length), static_cast<long long>(count));
          continue;
        }
        const auto records = Demand(DeviceBlock::Allocate(device_, all * record));
        Demand(device_->Copy(records.at(), page.at(), record));
        for (uint64_t done = 1; done < all; done *= 2) {
          Demand(device_->Copy(records.at() + done * record, records.at(), std::min(done, all - done) * record));
        }
        std::vector<AttendPage> list;
        for (uint64_t i = 0; i < all; ++i) {
          AttendPage entry;
          entry.start = static_cast<int64_t>(i % pages) * kPageTokens;
          entry.length = std::min(kPageTokens, length - entry.start);
          for (int k = 0; k < 2; ++k) {
            AttendSide& to = k == 0 ? entry.key : entry.value;
            const DevicePointer at = records.at() + i * record;
            to.codes = at + sides[k].codes;
            to.scales = at + sides[k].scales;
            to.zeros = sides[k].sizes.zeros > 0 ? at + sides[k].zeros : 0;
            to.global = at + sides[k].global;
            to.format = k;
          }
          list.push_back(entry);
        }
        const auto table = Demand(DeviceBlock::Allocate(device_, list.size() * sizeof(AttendPage)));
        Demand(device_->Upload(table.at(), list.data(), list.size() * sizeof(AttendPage)));
        const auto out = Demand(DeviceBlock::Allocate(device_, static_cast<uint64_t>(count * kQueryHeads * kWidth) * 4));
        std::vector<AttendSequence> sequences;
        for (int64_t i = 0; i < count; ++i) {
          AttendSequence sequence;
          sequence.queries = source.at();
          sequence.head_stride = sequence.token_stride = kWidth;
          sequence.start = length - 1;
          sequence.pages = table.at() + static_cast<uint64_t>(i) * pages * sizeof(AttendPage);
          sequence.page_count = static_cast<int64_t>(pages);
          sequence.formats = formats.at();
          sequence.out = out.at() + static_cast<uint64_t>(i * kQueryHeads * kWidth) * 4;
          sequences.push_back(sequence);
        }
        AttendPlan plan;
        plan.heads = kQueryHeads;
        plan.kv_heads = kHeads;
        plan.key_width = plan.value_width = kWidth;
        plan.tokens = 1;
        plan.query_type = Type::bf16;
        plan.scale = 1 / std::sqrt(static_cast<float>(kWidth));
        plan.key_run = sides[0].run;
        plan.value_run = sides[1].run;
        DeviceAttention attention(device_);
        const double time = Time(*device_, [&] { return attention.Run(plan, sequences); });
        std::printf("%10lld %10lld %10.3f %12.1f\n", static_cast<long long>(length), static_cast<long long>(count), time * 1e3,
                    static_cast<double>(all * coded) / time * 1e-9);
      }
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
  const std::vector<int64_t> lengths = quick ? std::vector<int64_t>{200} : std::vector<int64_t>{1 << 10, 1 << 13, 1 << 15, 1 << 17};
  const std::vector<int64_t> counts = quick ? std::vector<int64_t>{1, 2} : std::vector<int64_t>{1, 8, 64};
  for (const char* preset : {"kv8", "kv4"}) bench.Attention(preset, lengths, counts);
  return 0;
}

#endif
