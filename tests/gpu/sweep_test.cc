// SPDX-License-Identifier: Apache-2.0
// All 2^16 bf16 numbers, NaN and infinities among them, through every element type: the reference's codes, scales and values.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "backends/cuda/codec.h"
#include "backends/reference/reference.h"
#include "cuda/devices.h"
#include "cuda/memory.h"
#include "support/payloads.h"

namespace kvpages::cuda {
namespace {

constexpr int64_t kWidth = 256, kTokens = 256;

// A spec of each type and axis that it has; each scale type once.
std::vector<std::string> Specs() {
  std::vector<std::string> specs;
  for (int i = 0; i < TypeCount(); ++i) {
    const TypeInfo& info = TypeAt(i);
    const std::string name(info.name);
    if (info.family == Family::kDense || info.family == Family::kScheme) {
      specs.push_back(name);
      continue;
    }
    for (const char* rest : {"/token/64/absmax/f32", "/token/16/absmax/e8m0", "/token/32/absmax/e4m3", "/channel/32/absmax/f16", "/head/absmax/bf16",
                             "/tensor/absmax/f32"}) {
      if (ParseSpec(name + rest, "spec").ok()) specs.push_back(name + rest);
    }
  }
  return specs;
}

class Sweep : public ::testing::TestWithParam<NonFinite> {};

TEST_P(Sweep, AllNumbersOfBF16) {
  KVP_DEVICE_OR_SKIP(device);
  const Shape shape{1, 1, kTokens, kWidth};
  std::vector<uint16_t> source(kWidth * kTokens);
  std::iota(source.begin(), source.end(), uint16_t{0});
  // Neighbours in a block have magnitudes that are near (in order), and that are not (a step that is odd).
  for (const uint32_t step : {1u, 4097u}) {
    for (size_t i = 0; i < source.size(); ++i) source[i] = static_cast<uint16_t>(i * step);
    for (const std::string& text : Specs()) {
      SCOPED_TRACE(text + " step " + std::to_string(step));
      const Spec spec = ResolveSpec(ParseSpec(text, "spec").value(), kWidth, "spec").value();
      if (Info(spec.type).family == Family::kDense) continue;  // codec_test.cc
      SpecOptions options;
      options.non_finite = GetParam();
      options.overflow = GetParam() == NonFinite::kPass ? Overflow::kNan : Overflow::kSaturate;
      const test::Encoded want = test::Quantize(kReferenceBackend, text, shape, source.data(), Type::bf16, kTokens, options, {}, {});
      Memory memory(*device);
      EncodeItem item;
      item.source = memory.Put(source.data(), source.size() * 2);
      item.token_stride = kWidth;
      item.head_stride = item.batch_stride = kWidth * kTokens;
      item.valid = kTokens;
      item.codes = memory.Take(want.codes.size());
      item.scales = memory.Take(want.scales.size());
      item.zeros = memory.Take(want.zeros.size());
      item.global = memory.Take(4);
      DecodeItem back;
      back.codes = item.codes;
      back.scales = item.scales;
      back.zeros = item.zeros;
      back.global = item.global;
      back.end = kTokens;
      back.out = memory.Take(source.size() * 4);
      back.token_stride = kWidth;
      back.head_stride = back.batch_stride = kWidth * kTokens;
      DeviceCodec codec(device);
      ASSERT_TRUE(codec.Encode(spec, options, shape, Type::bf16, 0, {&item, 1}).ok());
      ASSERT_TRUE(codec.Decode(spec, shape, ScaleGrid(spec, shape), 0, {&back, 1}).ok());
      const auto fetch = [&](DevicePointer from, uint64_t bytes) {
        std::vector<uint8_t> data(bytes);
        EXPECT_TRUE(device->Download(data.data(), from, bytes).ok());
        return data;
      };
      ASSERT_EQ(test::DifferenceOf(fetch(item.scales, want.scales.size()), test::BytesOf(want.scales)), "");
      ASSERT_EQ(test::DifferenceOf(fetch(item.codes, want.codes.size()), test::BytesOf(want.codes)), "");
      const std::vector<float> values = test::Dequantize(kReferenceBackend, want, 0);
      const std::vector<uint8_t> bytes = fetch(back.out, values.size() * 4);
      std::vector<float> got(values.size());
      std::memcpy(got.data(), bytes.data(), bytes.size());
      ASSERT_EQ(test::Difference(got, values), "");
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Rules, Sweep, ::testing::Values(NonFinite::kSaturate, NonFinite::kPass),
                         [](const auto& info) { return info.param == NonFinite::kPass ? "Pass" : "Saturate"; });

}  // namespace
}  // namespace kvpages::cuda
