// SPDX-License-Identifier: Apache-2.0
// NVFP4, MX, llama.cpp blocks, packing and the Hadamard rotation against golden vectors.
#include <gtest/gtest.h>

#include <cmath>

#include "formats/hadamard.h"
#include "formats/packing.h"
#include "formats/schemes.h"
#include "support/payloads.h"

namespace kvpages::test {
namespace {

std::vector<uint8_t> Raw(const VectorTensor& tensor) { return {tensor.data, tensor.data + tensor.bytes}; }

class VectorsSchemes : public testing::TestWithParam<const Backend*> {};
INSTANTIATE_TEST_SUITE_P(Backends, VectorsSchemes, testing::ValuesIn(Backends()),
                         [](const auto& info) { return std::string(info.param->name); });

TEST_P(VectorsSchemes, Nvfp4AndMx) {
  const VectorFile& file = VectorFile::Load("nvfp4");
  int cases = 0;
  for (const auto& [name, about] : file.cases()) {
    if (!about.has("format")) continue;
    ++cases;
    const bool mx = about.has("rule");
    const std::string format = about["format"].text == "e2m1" ? "mxfp4" : about["format"].text == "e4m3" ? "mxfp8" : about["format"].text;
    const VectorTensor& input = file.tensor(about["x"].text, "x");
    Shape shape = ShapeOf(input);
    auto x = input.As<float>();
    const int64_t block = about["block"].integer(), width = shape.width, padded = CeilDiv(width, block) * block;
    // head_dim 40 is refused; a last block filled with zeros has the same scale, codes and values.
    if (padded != width) {
      std::vector<float> wide(static_cast<size_t>(shape.rows() * padded));
      for (int64_t r = 0; r < shape.rows(); ++r) std::copy_n(x.begin() + r * width, width, wide.begin() + r * padded);
      x = wide;
      shape.width = padded;
    }
    const std::string global = mx ? "" : about["global"].text;
    const auto options = ParseSpecOptions(mx ? "rule=" + about["rule"].text : "global=" + (global == "given-1" ? "given:1" : global), "options");
    ASSERT_TRUE(options.ok()) << options.error().message;
    const Encoded got = Quantize(*GetParam(), format, shape, x.data(), Type::f32, -1, options.value());
    const auto scale = Raw(file.tensor(name, "scale")), codes = Raw(file.tensor(name, "codes"));
    const auto y = file.get<float>(name, "y"), values = Dequantize(*GetParam(), got);
    const auto robust = mx ? std::vector<uint8_t>(scale.size(), 1) : Raw(file.tensor(name, "robust"));
    if (!mx) { EXPECT_EQ(got.global, file.one<float>(name, "global_scale")) << name; }
    ASSERT_EQ(got.scales.size(), scale.size()) << name;
    const auto got_codes = CodesOf(got);
    int64_t different = 0;
    for (int64_t r = 0; r < shape.rows(); ++r) {
      for (int64_t d = 0; d < width; ++d) {
        const auto at = static_cast<size_t>(r * padded + d), want = static_cast<size_t>(r * width + d), b = static_cast<size_t>((r * padded + d) / block);
        if (robust[b] == 0) continue;
        const bool same = got.scales.data()[b] == scale[b] && got_codes[at] == codes[want] && BitsOf(values[at]) == BitsOf(y[want]);
        if (!same && different++ < 3) {
          ADD_FAILURE() << name << " row " << r << " channel " << d << ": scale " << int{got.scales.data()[b]} << " instead of "
                        << int{scale[b]} << ", code " << got_codes[at] << " instead of " << int{codes[want]} << ", value "
                        << values[at] << " instead of " << y[want];
        }
      }
    }
    EXPECT_EQ(different, 0) << name;
    if (padded == width) { EXPECT_EQ(DifferenceOf(BytesOf(got.codes), Raw(file.tensor(name, "packed"))), "") << name; }
  }
  EXPECT_GE(cases, 130);
}

TEST_P(VectorsSchemes, LlamaBlocks) {
  const VectorFile& file = VectorFile::Load("ggml");
  int cases = 0;
  for (const auto& [name, about] : file.cases()) {
    if (!about.has("format")) continue;
    ++cases;
    const auto blocks = Raw(file.tensor(name, "blocks"));
    if (about.has("x")) {
      const VectorTensor& input = about["x"].text == "x" ? file.tensor(name, "x") : file.tensor(about["x"].text, "x");
      const auto x = input.As<float>();
      const Shape shape{1, 1, static_cast<int64_t>(x.size()) / input.dims.back(), input.dims.back()};
      const Encoded got = Quantize(*GetParam(), about["format"].text, shape, x.data());
      // Where gguf-py and the C code differ, the C code counts.
      const auto want = file.has(name, "blocks_c") ? Raw(file.tensor(name, "blocks_c")) : blocks;
      EXPECT_EQ(DifferenceOf(BytesOf(got.codes), want), "") << name;
    }
    Encoded stored;
    const auto bytes = Info(FindType(about["format"].text)->type).block;
    stored.spec.type = FindType(about["format"].text)->type;
    stored.shape = {1, 1, file.tensor(name, "blocks").dims[0], bytes};
    stored.codes = std::move(Bytes::Copy(blocks.data(), blocks.size()).value());
    EXPECT_EQ(Difference(Dequantize(*GetParam(), stored), file.get<float>(name, "y")), "") << name;
  }
  EXPECT_GE(cases, 50);
}

TEST(VectorsPacking, EveryWidth) {
  const VectorFile& file = VectorFile::Load("packing");
  int cases = 0;
  for (const auto& [name, about] : file.cases()) {
    ++cases;
    const TypeInfo& info = *FindType(about["dtype"].text);
    const auto codes = Raw(file.tensor(name, "codes")), packed = Raw(file.tensor(name, "packed"));
    ASSERT_EQ(PackedBytes(info.bits, static_cast<int64_t>(codes.size())), static_cast<int64_t>(packed.size())) << name;
    std::vector<uint8_t> got(packed.size());
    for (size_t i = 0; i < codes.size(); ++i) PutCode(got.data(), info.bits, static_cast<int64_t>(i), codes[i]);
    EXPECT_EQ(DifferenceOf(got, packed), "") << name;
    for (size_t i = 0; i < codes.size(); ++i) {
      const uint32_t code = GetCode(packed.data(), info.bits, static_cast<int64_t>(i));
      EXPECT_EQ(info.is_signed ? static_cast<uint8_t>(SignExtend(code, info.bits)) : static_cast<uint8_t>(code), codes[i]) << name;
    }
  }
  EXPECT_GE(cases, 140);
}

TEST(VectorsHadamard, RotatesBitForBit) {
  const VectorFile& file = VectorFile::Load("hadamard");
  int cases = 0;
  for (const auto& [name, about] : file.cases()) {
    const int64_t n = about["n"].integer();
    if (!file.has(name, "x")) {
      const auto signs = Raw(file.tensor(name, "signs"));
      for (int64_t i = 0; i < n; ++i) {
        std::vector<float> unit(static_cast<size_t>(n));
        unit[static_cast<size_t>(i)] = 1;
        RotateRow(unit.data(), n, n);
        for (int64_t j = 0; j < n; ++j) {
          EXPECT_EQ(std::signbit(unit[static_cast<size_t>(j)]), static_cast<int8_t>(signs[static_cast<size_t>(i * n + j)]) < 0);
        }
      }
      continue;
    }
    ++cases;
    const VectorTensor& input = file.tensor(name, "x");
    auto x = input.As<float>();
    const int64_t width = input.dims.back();
    EXPECT_EQ(HadamardLength(width, HadamardRun::kLargest), n);
    for (size_t r = 0; r < x.size(); r += static_cast<size_t>(width)) RotateRow(x.data() + r, width, n);
    EXPECT_EQ(Difference(x, file.get<float>(name, "y_f32")), "") << name;
  }
  EXPECT_GE(cases, 5);
}

}  // namespace
}  // namespace kvpages::test
