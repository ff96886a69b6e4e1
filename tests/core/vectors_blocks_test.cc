// SPDX-License-Identifier: Apache-2.0
// The library's own block formats, KIVI, the study's cells and the affine rule against golden vectors, on every backend.
#include <gtest/gtest.h>

#include <cmath>

#include "core/float.h"
#include "support/payloads.h"

namespace kvpages::test {
namespace {

std::vector<int32_t> Integers(const VectorTensor& tensor) {
  std::vector<int32_t> out;
  for (size_t i = 0; i < tensor.bytes; ++i) {
    out.push_back(tensor.dtype == "I8" ? static_cast<int8_t>(tensor.data[i]) : static_cast<int32_t>(tensor.data[i]));
  }
  return out;
}
std::vector<uint8_t> Raw(const VectorTensor& tensor) { return {tensor.data, tensor.data + tensor.bytes}; }

class VectorsBlocks : public testing::TestWithParam<const Backend*> {};
INSTANTIATE_TEST_SUITE_P(Backends, VectorsBlocks, testing::ValuesIn(Backends()),
                         [](const auto& info) { return std::string(info.param->name); });

TEST_P(VectorsBlocks, OwnFormats) {
  const VectorFile& file = VectorFile::Load("blocks");
  int cases = 0;
  for (const auto& [name, about] : file.cases()) {
    if (!about.has("spec")) continue;
    ++cases;
    const VectorTensor& input = file.tensor(about["x"].text, "x");
    const auto x = input.As<float>();
    const Encoded got = Quantize(*GetParam(), about["spec"].text, ShapeOf(input), x.data());
    EXPECT_EQ(DifferenceOf(BytesOf(got.scales), Raw(file.tensor(name, "scale"))), "") << name;
    EXPECT_EQ(DifferenceOf(CodesOf(got), Integers(file.tensor(name, "codes"))), "") << name;
    EXPECT_EQ(DifferenceOf(BytesOf(got.codes), Raw(file.tensor(name, "packed"))), "") << name;
    EXPECT_EQ(got.zeros.empty(), !file.has(name, "zero_point")) << name;
    if (!got.zeros.empty()) { EXPECT_EQ(DifferenceOf(BytesOf(got.zeros), Raw(file.tensor(name, "zero_point"))), "") << name; }
    if (file.has(name, "g")) { EXPECT_EQ(got.global, file.one<float>(name, "g")) << name; }
    auto y = file.get<float>(name, "y");
    for (float& value : y) value = value + 0.0f;  // numpy's code -0.0 is no code; 0 decodes to +0
    EXPECT_EQ(Difference(Dequantize(*GetParam(), got), y), "") << name;
  }
  EXPECT_GE(cases, 230);
}

TEST_P(VectorsBlocks, Study) {
  const VectorFile& file = VectorFile::Load("study");
  int cases = 0;
  for (const auto& [name, about] : file.cases()) {
    if (!about.has("format")) continue;
    ++cases;
    const VectorTensor& input = file.tensor(about["x"].text, "x");
    const bool half = input.dtype == "BF16", channel = about["axis"].text == "channel", nvfp4 = about["format"].text == "nvfp4";
    const Shape whole = ShapeOf(input);
    Shape shape = whole;
    shape.tokens -= about["untouched_tokens"].integer();
    std::vector<float> x;
    for (int64_t i = 0; i < shape.heads * shape.tokens * shape.width; ++i) {
      const int64_t at = i / (shape.tokens * shape.width) * whole.tokens * whole.width + i % (shape.tokens * shape.width);
      x.push_back(half ? FromBF16(input.As<uint16_t>()[static_cast<size_t>(at)]) : input.As<float>()[static_cast<size_t>(at)]);
    }
    const std::string spec = std::string(nvfp4 ? "e2m1tz" : about["format"].text) + (channel ? "/channel/16/" : "/token/16/") +
                             about["calibration"].text + "/f32";
    const Encoded got = Quantize(*GetParam(), spec, shape, x.data());
    const auto want = Integers(file.tensor(name, "codes"));
    const auto y = Dequantize(*GetParam(), got);
    const auto scale = file.get<float>(name, "scale");
    const auto robust = Raw(file.tensor(name, "robust"));
    const auto codes = CodesOf(got);
    const auto scales = ScalesOf(got);
    const VectorTensor& values = file.tensor(name, "y");
    ASSERT_EQ(codes.size(), want.size()) << name;
    int64_t different = 0, compared = 0;
    for (int64_t i = 0; i < shape.elements(); ++i) {
      const int64_t h = i / (shape.tokens * shape.width), t = i / shape.width % shape.tokens, d = i % shape.width;
      // The study orders the blocks of a channel as [heads, width, blocks].
      const auto block = static_cast<size_t>(channel ? (h * shape.width + d) * (shape.tokens / 16) + t / 16
                                                     : (h * shape.tokens + t) * (shape.width / 16) + d / 16);
      if (robust[block] == 0) continue;
      ++compared;
      const auto at = static_cast<size_t>(i);
      const auto out = static_cast<size_t>((h * whole.tokens + t) * whole.width + d);
      const float w = half ? FromBF16(values.As<uint16_t>()[out]) : values.As<float>()[out];
      const float g = half ? FromBF16(ToBF16(y[at])) : y[at];
      // The study holds amax at 1e-9 or more, so its scale of a block of (nearly) zeros is another; all its codes are 0.
      const bool floored = scale[block] <= 1e-9f / 3;
      const bool same = floored ? std::fabs(w) <= 1e-9f && std::fabs(g) <= 1e-9f
                                : codes[at] == want[at] && BitsOf(w) == BitsOf(g) &&
                                      scales[static_cast<size_t>(got.grid.Index(0, h, t, d))] == scale[block];
      if (!same && different++ < 3) {
        ADD_FAILURE() << name << " element " << i << ": code " << codes[at] << " instead of " << want[at] << ", value " << g
                      << " instead of " << w << ", scale " << scales[static_cast<size_t>(got.grid.Index(0, h, t, d))] << " instead of "
                      << scale[block];
      }
    }
    EXPECT_EQ(different, 0) << name;
    EXPECT_GT(compared, 0) << name;
  }
  EXPECT_GE(cases, 80);
}

TEST_P(VectorsBlocks, AffineWithGivenScales) {
  const VectorFile& file = VectorFile::Load("affine");
  int cases = 0;
  for (const auto& [name, about] : file.cases()) {
    if (!about.has("dtype")) continue;
    ++cases;
    const bool page = about.has("page"), given_bits = file.has(name, "x_bits");
    const VectorTensor& input = file.tensor(name, given_bits ? "x_bits" : "x");
    const auto x = input.As<float>();
    Shape shape{1, 1, 1, static_cast<int64_t>(x.size())};
    if (input.dims.size() == 4) shape = ShapeOf(input);
    int axis = about.has("axis") && !about["axis"].is_null() ? static_cast<int>(about["axis"].integer()) : -5;
    if (axis < 0 && axis > -5) axis += 4;
    const Grid grid = AffineGrid(shape, axis < 0 ? -1 : axis, about.has("block") ? about["block"].integer() : 0);
    const Given given{file.get<float>(name, "scale"), Raw(file.tensor(name, "zero_point")), &grid};
    const Encoded got = Quantize(*GetParam(), about["dtype"].text + "/tensor/given/f32", shape, x.data(), Type::f32,
                                 page ? about["length"].integer() : -1, {}, given);
    EXPECT_EQ(DifferenceOf(CodesOf(got), Integers(file.tensor(name, "codes"))), "") << name;
    EXPECT_EQ(DifferenceOf(BytesOf(got.codes), Raw(file.tensor(name, "packed"))), "") << name;
    const auto y = Dequantize(*GetParam(), got);
    EXPECT_EQ(Difference(y, file.get<float>(name, "y_f32")), "") << name;
    for (const Type type : {Type::f16, Type::bf16}) {
      const std::string field = type == Type::f16 ? "y_f16" : "y_bf16";
      if (!file.has(name, field)) continue;
      std::vector<uint16_t> narrow(y.size());
      GetParam()->narrow(type, y.data(), narrow.data(), static_cast<int64_t>(y.size()));
      EXPECT_EQ(DifferenceOf(narrow, file.get<uint16_t>(name, field)), "") << name;
    }
  }
  EXPECT_GE(cases, 120);
}

TEST_P(VectorsBlocks, Kivi) {
  const VectorFile& file = VectorFile::Load("kivi");
  int cases = 0;
  for (const auto& [name, about] : file.cases()) {
    if (!about.has("side")) continue;
    ++cases;
    const VectorTensor& input = file.tensor(about["x"].text, "x");
    const auto all = input.As<float>();
    const Shape whole = ShapeOf(input);
    const bool key = about["side"].text == "k";
    // Only whole groups are in the vectors.
    Shape shape = whole;
    (key ? shape.tokens : shape.width) = about["quantized"].integer();
    std::vector<float> x;
    for (int64_t h = 0; h < shape.heads; ++h) {
      for (int64_t t = 0; t < shape.tokens; ++t) {
        for (int64_t d = 0; d < shape.width; ++d) x.push_back(all[static_cast<size_t>((h * whole.tokens + t) * whole.width + d)]);
      }
    }
    const bool half = about["arithmetic"].text == "float16";
    const std::string spec = "uint" + Text(about["bits"].integer()) + (key ? "/channel/" : "/token/") + Text(about["group"].integer()) +
                             "/kivi/" + (half ? "f16" : "f32");
    const Encoded got = Quantize(*GetParam(), spec, shape, x.data());
    EXPECT_EQ(DifferenceOf(CodesOf(got), Integers(file.tensor(name, "codes"))), "") << name;
    // Vectors order the groups of a key as [heads, width, groups], payloads as [heads, groups, width].
    const auto ordered = [&](const char* field) {
      const auto raw = Raw(file.tensor(name, field));
      const size_t size = half ? 2 : 4, groups = key ? static_cast<size_t>(shape.tokens / about["group"].integer()) : 1;
      const auto width = static_cast<size_t>(shape.width);
      if (!key) return raw;
      std::vector<uint8_t> out(raw.size());
      for (size_t i = 0; i < raw.size() / size; ++i) {
        const size_t h = i / (groups * width), g = i / width % groups, d = i % width;
        std::copy_n(raw.begin() + static_cast<int64_t>(((h * width + d) * groups + g) * size), size, out.begin() + static_cast<int64_t>(i * size));
      }
      return out;
    };
    EXPECT_EQ(DifferenceOf(BytesOf(got.scales), ordered("scale")), "") << name;
    EXPECT_EQ(DifferenceOf(BytesOf(got.zeros), ordered("mn")), "") << name;
    std::vector<float> y;
    const VectorTensor& want = file.tensor(name, "y");
    for (size_t i = 0; i < x.size(); ++i) y.push_back(half ? FromF16(want.As<uint16_t>()[i]) : want.As<float>()[i]);
    EXPECT_EQ(Difference(Dequantize(*GetParam(), got), y), "") << name;
  }
  EXPECT_GE(cases, 48);
}

}  // namespace
}  // namespace kvpages::test
