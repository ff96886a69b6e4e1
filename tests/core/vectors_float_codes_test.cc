// SPDX-License-Identifier: Apache-2.0
// f32 to e4m3, e5m2, e2m1, e8m0, f16, bf16 and back: all 16-bit patterns, all ties and borders.
#include <gtest/gtest.h>

#include <functional>

#include "formats/float_codes.h"
#include "support/vectors.h"

namespace kvpages::test {
namespace {

struct Column {
  const char* name;
  std::function<uint32_t(float)> encode;
};
const Column kColumns[] = {
    {"e4m3_saturate", [](float x) { return ToE4M3(x); }},
    {"e4m3_nan", [](float x) { return ToE4M3(x, true); }},
    {"e5m2_saturate", [](float x) { return ToE5M2(x); }},
    {"e5m2_inf", [](float x) { return ToE5M2(x, true); }},
    {"e2m1_even", [](float x) { return ToE2M1(x); }},
    {"e2m1_toward_zero", [](float x) { return ToE2M1(x, true); }},
    {"e8m0_floor", [](float x) { return ToE8M0Floor(x); }},
    {"e8m0_ceil", [](float x) { return ToE8M0Ceil(x); }},
    {"bf16", [](float x) { return ToBF16(x); }},
    {"f16", [](float x) { return ToF16(x); }},
};

TEST(VectorsFloatCodes, EncodesEveryPattern) {
  const VectorFile& file = VectorFile::Load("float-codes");
  for (const std::string name : {"all-f16", "all-bf16", "chosen-f32"}) {
    std::vector<float> x;
    if (name == "chosen-f32") {
      for (const uint32_t bits : file.get<uint32_t>(name, "x_bits")) x.push_back(FloatOf(bits));
    } else {
      for (uint32_t i = 0; i < 65536; ++i) x.push_back(name == "all-f16" ? FromF16(static_cast<uint16_t>(i)) : FloatOf(i << 16));
    }
    ASSERT_GT(x.size(), 10000u);
    for (const Column& column : kColumns) {
      const VectorTensor& tensor = file.tensor(name, column.name);
      ASSERT_EQ(tensor.bytes, x.size() * (tensor.dtype == "U16" ? 2 : 1));
      int64_t wrong = 0;
      for (size_t i = 0; i < x.size(); ++i) {
        const uint32_t want = tensor.dtype == "U16" ? tensor.data[2 * i] | tensor.data[2 * i + 1] << 8 : tensor.data[i];
        if (column.encode(x[i]) != want && wrong++ < 3) {
          ADD_FAILURE() << name << " " << column.name << ": " << std::hex << BitsOf(x[i]) << " gives " << column.encode(x[i])
                        << " instead of " << want;
        }
      }
      EXPECT_EQ(wrong, 0) << name << " " << column.name;
    }
  }
}

TEST(VectorsFloatCodes, DecodesEveryCode) {
  const VectorFile& file = VectorFile::Load("float-codes");
  const struct {
    const char* name;
    std::function<float(uint8_t)> decode;
    size_t count;
  } tables[] = {{"decode-e4m3", FromE4M3, 256}, {"decode-e5m2", FromE5M2, 256}, {"decode-e8m0", FromE8M0, 256}, {"decode-e2m1", FromE2M1, 16}};
  for (const auto& table : tables) {
    const auto values = file.get<uint32_t>(table.name, "values");
    ASSERT_EQ(values.size(), table.count);
    for (size_t i = 0; i < values.size(); ++i) {
      const float got = table.decode(static_cast<uint8_t>(i)), want = FloatOf(values[i]);
      EXPECT_TRUE(BitsOf(got) == BitsOf(want) || (got != got && want != want)) << table.name << " " << i;
    }
  }
}

TEST(VectorsFloatCodes, CodesDecodeToThemselves) {
  for (int i = 0; i < 256; ++i) {
    const auto code = static_cast<uint8_t>(i);
    if ((code & 0x7f) != 0x7f) { EXPECT_EQ(ToE4M3(FromE4M3(code)), code); }
    if ((code & 0x7f) <= 0x7c) { EXPECT_EQ(ToE5M2(FromE5M2(code), true), code); }
    if (i < 16) { EXPECT_EQ(ToE2M1(FromE2M1(code)), code); }
    if (i < 255) {
      EXPECT_EQ(ToE8M0Ceil(FromE8M0(code)), code);
      EXPECT_EQ(ToE8M0Floor(FromE8M0(code)), code);
    }
  }
}

}  // namespace
}  // namespace kvpages::test
