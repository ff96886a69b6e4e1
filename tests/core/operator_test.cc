// SPDX-License-Identifier: Apache-2.0
// QuantizePagedCache: the published examples of onnx-light, its order of checks, its invariants.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "core/convert.h"
#include "core/float.h"

namespace kvpages {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

class Operator : public ::testing::TestWithParam<const Backend*> {
 protected:
  void SetUp() override {
    if (!GetParam()->available()) GTEST_SKIP() << "skipped: this processor has no " << GetParam()->name;
    instance_->backend = GetParam();
  }
  PayloadRef Dense(const Shape& shape, const std::vector<float>& values) {
    auto made = MakeDense(instance_, ContiguousView(values.data(), Type::f32, shape));
    EXPECT_TRUE(made.ok());
    return made.value();
  }
  Page DensePage(int64_t start, int64_t length, const Shape& key_shape, const std::vector<float>& key,
                 const Shape& value_shape, const std::vector<float>& value) {
    Page page;
    page.start = start;
    page.length = length;
    page.key = Dense(key_shape, key);
    page.value = Dense(value_shape, value);
    return page;
  }
  PagedCache Run(const PagedCache& cache, std::vector<int64_t> indices, Destination key, Destination value) {
    auto made = QuantizePagedCache(instance_, cache, indices, key, value);
    EXPECT_TRUE(made.ok()) << (made.ok() ? "" : made.error().message);
    return made.ok() ? std::move(made.value()) : PagedCache{};
  }
  Error Refusal(const PagedCache& cache, std::vector<int64_t> indices, Destination key, Destination value) {
    auto made = QuantizePagedCache(instance_, cache, indices, key, value);
    EXPECT_FALSE(made.ok());
    return made.ok() ? Error{} : made.error();
  }
  std::vector<float> Restored(const Payload& payload) {
    std::vector<float> out(static_cast<size_t>(payload.shape.elements()));
    const Shape& s = payload.shape;
    EXPECT_TRUE(Decode(instance_, payload, 0, s.tokens, out.data(), s.heads * s.tokens * s.width, s.tokens * s.width, s.width).ok());
    return out;
  }
  static std::vector<uint8_t> Codes(const Payload& payload) {
    return {payload.codes.data(), payload.codes.data() + payload.codes.size()};
  }
  InstanceRef instance_ = std::make_shared<Instance>();
};

using Raw = std::vector<uint8_t>;


TEST_P(Operator, SeedPage) {
  const Shape shape{1, 1, 2, 4};
  PagedCache cache;
  cache.pages.push_back(DensePage(0, 2, shape, std::vector<float>(8, 1.5f), shape, std::vector<float>(8, -2.5f)));
  cache.pages.push_back(DensePage(2, 1, shape, {-1.3f, -0.4f, 0.3f, 1.2f, kNaN, kNaN, kNaN, kNaN}, shape,
                                  {-0.8f, -0.3f, 0.2f, 0.7f, kNaN, kNaN, kNaN, kNaN}));
  const PagedCache coded = Run(cache, {1}, {0.25, Type::int4, 0}, {0.125, Type::uint4, 8});
  EXPECT_EQ(coded.pages[0].key, cache.pages[0].key) << "untouched pages are shared";
  EXPECT_EQ(coded.pages[0].value, cache.pages[0].value);
  EXPECT_EQ(Codes(*coded.pages[1].key), (Raw{0xeb, 0x51, 0, 0}));
  EXPECT_EQ(Codes(*coded.pages[1].value), (Raw{0x62, 0xea, 0x88, 0x88}));
  EXPECT_EQ(coded.pages[1].start, 2);
  EXPECT_EQ(coded.pages[1].length, 1);

  const PagedCache dense = Run(coded, {1}, {1, Type::f16, 0}, {1, Type::bf16, 0});
  const uint16_t key[8] = {0xbd00, 0xb800, 0x3400, 0x3d00}, value[8] = {0xbf40, 0xbe80, 0x3e80, 0x3f40};
  EXPECT_EQ(dense.pages[1].key->dense_type, Type::f16);
  EXPECT_EQ(std::memcmp(dense.pages[1].key->data.data(), key, 16), 0);
  EXPECT_EQ(dense.pages[1].value->dense_type, Type::bf16);
  EXPECT_EQ(std::memcmp(dense.pages[1].value->data.data(), value, 16), 0);
}

TEST_P(Operator, RequantizesEncodedPages) {
  PagedCache cache;
  const Shape key{1, 1, 2, 2}, value{1, 1, 2, 3};
  auto ramp = [](float offset, int from, int count) {
    std::vector<float> out;
    for (int i = from; i < from + count; ++i) out.push_back(offset + 0.25f * static_cast<float>(i - 3));
    return out;
  };
  cache.pages.push_back(DensePage(0, 2, key, ramp(0, 0, 4), value, ramp(1, 0, 6)));
  cache.pages.push_back(DensePage(2, 2, key, ramp(0, 4, 4), value, ramp(1, 6, 6)));
  const PagedCache one = Run(cache, {1}, {0.25, Type::int2, 2}, {0.25, Type::uint8, 128});
  EXPECT_EQ(Codes(*one.pages[1].key), (Raw{0x53}));
  EXPECT_EQ(one.pages[1].key->zero_byte, 2);
  EXPECT_EQ(Restored(*one.pages[1].key), (std::vector<float>{0.25f, 0.5f, 0.75f, 0.75f}));
  EXPECT_EQ(Codes(*one.pages[1].value), (Raw{0x87, 0x88, 0x89, 0x8a, 0x8b, 0x8c}));
  const PagedCache two = Run(one, {1}, {0.5, Type::int8, 0}, {0.5, Type::uint4, 8});
  EXPECT_EQ(Codes(*two.pages[1].key), (Raw{0, 1, 2, 2}));
  EXPECT_EQ(Codes(*two.pages[1].value), (Raw{0xcc, 0xdc, 0xee}));
  const PagedCache three = Run(two, {1}, {1, Type::f32, 0}, {1, Type::f32, 0});
  EXPECT_EQ(Restored(*three.pages[1].key), Restored(*two.pages[1].key));
}

TEST_P(Operator, PartialPageOverAllDestinations) {
  const Shape key{2, 2, 3, 3}, value{2, 2, 3, 2};
  auto fill = [](const Shape& shape) {
    std::vector<float> out(static_cast<size_t>(shape.elements()), kNaN);
    for (int64_t o = 0; o < 4; ++o) {
      for (int64_t c = 0; c < shape.width; ++c) {
        out[static_cast<size_t>(o * shape.tokens * shape.width + c)] = 0.25f * static_cast<float>((o + c) % 4 - 2);
      }
    }
    return out;
  };
  PagedCache cache;
  cache.pages.push_back(DensePage(0, 1, key, fill(key), value, fill(value)));
  const struct {
    Type type;
    uint8_t zero;
    Raw key, value;
  } cases[] = {
      {Type::int2, 0, {0x0e, 0x00, 0x4c, 0x00, 0x40, 0x02, 0x40, 0x0e, 0x00}, {0x0e, 0x30, 0x00, 0x04, 0x90, 0x00}},
      {Type::uint2, 2, {0xa4, 0xaa, 0xe6, 0xaa, 0xea, 0xa8, 0xea, 0xa4, 0xaa}, {0xa4, 0x9a, 0xaa, 0xae, 0x3a, 0xaa}},
      {Type::int4, 0, {0xfe, 0, 0, 0, 0xf0, 0x10, 0, 0, 0, 0x10, 0x0e, 0, 0, 0x10, 0xfe, 0, 0, 0},
       {0xfe, 0, 0, 0x0f, 0, 0, 0x10, 0, 0, 0xe1, 0, 0}},
      {Type::uint4, 8, {0x76, 0x88, 0x88, 0x88, 0x78, 0x98, 0x88, 0x88, 0x88, 0x98, 0x86, 0x88, 0x88, 0x98, 0x76, 0x88, 0x88, 0x88},
       {0x76, 0x88, 0x88, 0x87, 0x88, 0x88, 0x98, 0x88, 0x88, 0x69, 0x88, 0x88}},
      {Type::int8, 0, {}, {}},
      {Type::uint8, 128, {}, {}},
      {Type::f32, 0, {}, {}},
      {Type::f16, 0, {}, {}},
      {Type::bf16, 0, {}, {}},
  };
  for (const auto& each : cases) {
    SCOPED_TRACE(Info(each.type).name);
    const PagedCache made = Run(cache, {0}, {0.25, each.type, each.zero}, {0.25, each.type, each.zero});
    if (!each.key.empty()) {
      EXPECT_EQ(Codes(*made.pages[0].key), each.key);
      EXPECT_EQ(Codes(*made.pages[0].value), each.value);
    }
    for (const PayloadRef& payload : {made.pages[0].key, made.pages[0].value}) {
      const auto restored = Restored(*payload);
      const Shape& shape = payload->shape;
      for (int64_t i = 0; i < shape.elements(); ++i) {
        const int64_t o = i / (shape.tokens * shape.width), t = i / shape.width % shape.tokens, c = i % shape.width;
        EXPECT_EQ(restored[static_cast<size_t>(i)], t == 0 ? 0.25f * static_cast<float>((o + c) % 4 - 2) : 0.0f) << i;
      }
    }
    EXPECT_EQ(made.pages[0].length, 1);
    const PagedCache again = Run(made, {0}, {0.25, Type::int8, 0}, {0.25, Type::int8, 0});
    EXPECT_EQ(again.pages[0].key->codes.size(), 36u);
  }
}

TEST_P(Operator, ChecksComeInTheirOrderAndPublishNothing) {
  const Shape shape{1, 1, 2, 2};
  PagedCache cache;
  cache.pages.push_back(DensePage(0, 2, shape, {1, 2, 3, 4}, shape, {1, 2, 3, 4}));
  PagedCache broken = cache;
  broken.pages[0].start = 1;
  const Destination good{0.5, Type::int8, 0};
  for (const double bad : {0.0, -1.0, static_cast<double>(NAN), static_cast<double>(INFINITY), 1e-60, 1e60}) {
    // A bad scale is reported before a broken page, for a dense destination too, key before value.
    const Error error = Refusal(broken, {7}, {bad, Type::f16, 0}, {bad, Type::int8, 0});
    EXPECT_EQ(error.code, Code::kArgument);
    EXPECT_EQ(error.argument, "key.scale");
  }
  EXPECT_EQ(Refusal(broken, {7}, good, {0, Type::int8, 0}).argument, "value.scale");
  EXPECT_EQ(Refusal(broken, {7}, {0.5, Type::int3, 0}, good).argument, "key.type");
  EXPECT_EQ(Refusal(broken, {7}, good, good).page, 0) << "the cache is checked before the indices";
  EXPECT_EQ(Refusal(broken, {}, good, good).page, 0) << "and for an empty selection too";
  EXPECT_EQ(Refusal(cache, {1}, good, good).argument, "pageIndices");
  EXPECT_EQ(Refusal(cache, {-1}, good, good).argument, "pageIndices") << "negative indices do not wrap";
  EXPECT_EQ(Refusal(cache, {0, 0}, good, good).argument, "pageIndices");
  EXPECT_EQ(Run(cache, {}, good, good).pages[0].key, cache.pages[0].key);
  EXPECT_TRUE(Run(PagedCache{}, {}, good, good).pages.empty());
}

TEST_P(Operator, OnlyValidRowsMustBeFinite) {
  const Shape shape{1, 2, 2, 2};
  PagedCache cache;
  cache.pages.push_back(DensePage(0, 1, shape, {1, 2, kNaN, kNaN, 3, 4, kNaN, kNaN}, shape, std::vector<float>(8, 1)));
  const Destination good{0.5, Type::int8, 0};
  EXPECT_EQ(Codes(*Run(cache, {0}, good, good).pages[0].key), (Raw{2, 4, 0, 0, 6, 8, 0, 0}));
  cache.pages.push_back(DensePage(1, 2, shape, std::vector<float>(8, 1), shape, {1, 2, 3, 4, 5, INFINITY, 7, 8}));
  const Error error = Refusal(cache, {0, 1}, good, good);
  EXPECT_EQ(error.code, Code::kNonFinite);
  EXPECT_EQ(error.page, 1);
  EXPECT_EQ(error.side, "value");
  EXPECT_NE(error.message.find("index 5"), std::string::npos) << error.message;
}

TEST_P(Operator, DecodedValuesMustStayInRange) {
  const Shape shape{1, 1, 1, 1};
  const uint8_t code = 0x7f;
  const float scale = 3e38f;
  AffineParts parts{{&code, 1}, {reinterpret_cast<const uint8_t*>(&scale), 4}, {}, {}};
  auto payload = MakeAffine(instance_, shape, Type::int8, -1, 0, std::move(parts));
  ASSERT_TRUE(payload.ok());
  PagedCache cache;
  cache.pages.push_back({0, 1, payload.value(), Dense(shape, {1}), nullptr});
  const Error error = Refusal(cache, {0}, {0.5, Type::int8, 0}, {0.5, Type::int8, 0});
  EXPECT_EQ(error.code, Code::kNonFinite);
  EXPECT_EQ(error.side, "key");
}

TEST_P(Operator, OpaquePayloadsAreCarriedAndRefusedForConversion) {
  const Shape shape{1, 1, 1, 1};
  auto opaque = std::make_shared<Payload>();
  opaque->kind = PayloadKind::kOpaque;
  opaque->shape = shape;
  opaque->opaque_name = "Q4_K";
  PagedCache cache;
  cache.pages.push_back({0, 1, opaque, Dense(shape, {1}), nullptr});
  cache.pages.push_back({1, 1, Dense(shape, {1}), Dense(shape, {1}), nullptr});
  const Destination good{0.5, Type::int8, 0};
  EXPECT_EQ(Run(cache, {1}, good, good).pages[0].key, cache.pages[0].key);
  const Error error = Refusal(cache, {0}, good, good);
  EXPECT_EQ(error.code, Code::kUnsupported);
  EXPECT_NE(error.message.find("Q4_K"), std::string::npos);
}

TEST_P(Operator, AffineInputOfEveryAxisAndBlockDecodesByItsGrid) {
  const Shape shape{2, 2, 3, 5};
  for (const Type type : {Type::int8, Type::uint8, Type::int4, Type::uint4, Type::int2, Type::uint2}) {
    const TypeInfo& info = Info(type);
    const int mask = (1 << info.bits) - 1;
    for (int axis = -1; axis <= 3; ++axis) {
      for (int64_t block = 0; block <= (axis < 0 ? 0 : 3); ++block) {
        SCOPED_TRACE(std::string(info.name) + " axis " + std::to_string(axis) + " block " + std::to_string(block));
        const Grid grid = AffineGrid(shape, axis, block);
        std::vector<float> scales(static_cast<size_t>(grid.count));
        Raw zeros(scales.size()), codes(static_cast<size_t>(PackedBytes(info.bits, shape.elements())));
        for (size_t i = 0; i < scales.size(); ++i) {
          scales[i] = 0.01f * static_cast<float>(i + 1);
          zeros[i] = static_cast<uint8_t>(i * 37 % 256);
        }
        for (size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<uint8_t>(i * 91 + 13);
        auto payload = MakeAffine(instance_, shape, type, axis, block, {codes, {reinterpret_cast<const uint8_t*>(scales.data()), scales.size() * 4}, zeros, {}});
        ASSERT_TRUE(payload.ok()) << payload.error().message;
        const auto restored = Restored(*payload.value());
        auto extend = [&](int v) { return info.is_signed && v >> (info.bits - 1) ? v - (1 << info.bits) : v; };
        int64_t flat = 0;
        for (int64_t b = 0; b < 2; ++b) for (int64_t h = 0; h < 2; ++h) for (int64_t t = 0; t < 3; ++t) for (int64_t d = 0; d < 5; ++d, ++flat) {
          const auto at = static_cast<size_t>(grid.Index(b, h, t, d));
          const auto bit = static_cast<size_t>(flat) * static_cast<size_t>(info.bits);
          const int code = extend(codes[bit / 8] >> bit % 8 & mask), zero = extend(zeros[at] & mask);
          EXPECT_EQ(restored[static_cast<size_t>(flat)], static_cast<float>((code - zero) * static_cast<double>(scales[at]))) << flat;
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, Operator, ::testing::ValuesIn(AllBackends()),
                         [](const auto& info) { return std::string(info.param->name); });

}  // namespace
}  // namespace kvpages
