// SPDX-License-Identifier: Apache-2.0
// PagedCacheProto: golden bytes, round trips of every payload, other writers' spellings, refusals with their place, and
// files that lie about their sizes. Messages are built here byte by byte, not with the generated classes.
#include "wire/wire.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "core/convert.h"
#include "core/float.h"

namespace kvpages {
namespace {

using Dims = std::vector<int64_t>;

// ---- Messages by hand ----

std::string Varint(uint64_t value) {
  std::string out;
  for (; value >= 0x80; value >>= 7) out += static_cast<char>(value | 0x80);
  return out + static_cast<char>(value);
}
std::string Int(int field, int64_t value) { return Varint(static_cast<uint64_t>(field) << 3) + Varint(static_cast<uint64_t>(value)); }
std::string Len(int field, const std::string& bytes) { return Varint(static_cast<uint64_t>(field) << 3 | 2) + Varint(bytes.size()) + bytes; }
template <typename T>
std::string RawOf(const std::vector<T>& values) {
  std::string out(values.size() * sizeof(T), '\0');
  if (!values.empty()) std::memcpy(out.data(), values.data(), out.size());
  return out;
}
std::string Fixed32(int field, float value) { return Varint(static_cast<uint64_t>(field) << 3 | 5) + RawOf<float>({value}); }

constexpr int kFloat = 1, kUint8 = 2, kInt8 = 3, kFloat16 = 10, kDouble = 11, kBFloat16 = 16, kUint4 = 21, kInt4 = 22, kInt2 = 26;

std::string Unpacked(const Dims& dims) {
  std::string out;
  for (const int64_t dim : dims) out += Int(1, dim);
  return out;
}
std::string Packed(const Dims& values) {
  std::string out;
  for (const int64_t value : values) out += Varint(static_cast<uint64_t>(value));
  return out;
}
std::string Tensor(const Dims& dims, int type, const std::string& raw) { return Unpacked(dims) + Int(2, type) + Len(9, raw); }
std::string Logical(const Dims& dims, int type = kFloat) {
  std::string shape;
  for (const int64_t dim : dims) shape += Len(1, Int(1, dim));
  return Len(1, Int(1, type) + Len(2, shape));
}
std::string Block(int64_t start, int64_t length, const std::string& sides) { return Len(1, Int(1, start) + Int(2, length) + sides); }

const std::string kOnes = RawOf<float>({1, 2, 3, 4});
const std::string kDense = Tensor({1, 1, 2, 2}, kFloat, kOnes);
// int8, one scale of 0.5, codes 1 2 3 4.
const std::string kScale = Int(2, kFloat) + Len(9, RawOf<float>({0.5f}));
std::string Encoded(const std::string& affine, const std::string& codes = "\1\2\3\4", const Dims& dims = {1, 1, 2, 2}) {
  return Len(1, affine) + Len(3, Logical(dims)) + Len(4, codes);
}
const std::string kAffine = Int(1, kInt8) + Len(2, kScale);
// A page of two values: `key` under test, a plain value.
std::string PageOf(const std::string& encoded_key) { return Block(0, 2, Len(4, encoded_key) + Len(5, kDense)); }

std::string Hex(const std::string& bytes) {
  static const char* kDigits = "0123456789abcdef";
  std::string out;
  for (const char c : bytes) {
    out += kDigits[static_cast<uint8_t>(c) >> 4];
    out += kDigits[static_cast<uint8_t>(c) & 15];
  }
  return out;
}
std::string BytesIn(const Bytes& bytes) { return {reinterpret_cast<const char*>(bytes.data()), static_cast<size_t>(bytes.size())}; }

class WireFiles : public ::testing::Test {
 protected:
  void SetUp() override { instance_->backend = AllBackends().back(); }

  // The copy has exactly the file's size, so that a sanitizer sees any read beyond it.
  Result<PagedCache> Parse(const std::string& bytes) {
    const std::vector<uint8_t> copy(bytes.begin(), bytes.end());
    return ParsePagedCache(instance_, copy);
  }
  PagedCache Read(const std::string& bytes) {
    auto cache = Parse(bytes);
    EXPECT_TRUE(cache.ok()) << cache.error().message;
    return cache.ok() ? std::move(cache.value()) : PagedCache{};
  }
  Error Refusal(const std::string& bytes) {
    auto cache = Parse(bytes);
    EXPECT_FALSE(cache.ok());
    if (cache.ok()) return {};
    const Error& error = cache.error();
    EXPECT_TRUE(error.byte_offset && *error.byte_offset >= 0 && *error.byte_offset <= static_cast<int64_t>(bytes.size())) << error.message;
    if (error.byte_offset) {
      EXPECT_TRUE(error.message.ends_with(", at byte " + Text(*error.byte_offset))) << error.message;
    }
    return error;
  }
  void ExpectRefused(const std::string& bytes, Code code, const std::string& part, int64_t page = 0) {
    const Error error = Refusal(bytes);
    EXPECT_EQ(CodeText(error.code), std::string(CodeText(code))) << error.message;
    EXPECT_NE(error.message.find(part), std::string::npos) << error.message;
    if (page >= 0) {
      EXPECT_EQ(error.page.value_or(-1), page) << error.message;
      EXPECT_NE(error.message.find("page " + Text(page)), std::string::npos) << error.message;
    }
  }
  static std::string Write(const PagedCache& cache) {
    std::vector<uint8_t> out(static_cast<size_t>(SerializedSize(cache)));
    const Status status = SerializePagedCache(cache, out);
    EXPECT_TRUE(status.ok()) << status.error().message;
    return {out.begin(), out.end()};
  }
  // Reads `other`, expects it to be written as `canonical`.
  void ExpectReadAs(const std::string& other, const std::string& canonical) {
    const std::string got = Write(Read(other));
    EXPECT_EQ(Hex(got), Hex(canonical));
  }
  void ExpectKept(const std::string& bytes) { ExpectReadAs(bytes, bytes); }

  PayloadRef Dense(const Shape& shape, Type type, const std::string& data) {
    auto made = MakeDense(instance_, ContiguousView(data.data(), type, shape));
    EXPECT_TRUE(made.ok());
    return made.value();
  }
  static PagedCache One(PayloadRef key, PayloadRef value, int64_t length) {
    PagedCache cache;
    Page page;
    page.length = length;
    page.key = std::move(key);
    page.value = std::move(value);
    cache.pages.push_back(std::move(page));
    return cache;
  }
  static void ExpectSame(const Payload& a, const Payload& b) {
    EXPECT_EQ(a.kind, b.kind);
    EXPECT_EQ(a.shape, b.shape);
    EXPECT_EQ(a.dense_type, b.dense_type);
    // An affine layout does not say how its scales were found.
    EXPECT_EQ(a.spec.type, b.spec.type);
    if (!a.affine) {
      EXPECT_EQ(CanonicalSpec(a.spec), CanonicalSpec(b.spec));
    }
    EXPECT_EQ(a.affine, b.affine);
    EXPECT_EQ(a.axis, b.axis);
    EXPECT_EQ(a.block, b.block);
    EXPECT_EQ(a.has_zeros, b.has_zeros);
    EXPECT_TRUE(a.axis >= 0 || a.zero_byte == b.zero_byte);
    EXPECT_EQ(a.hadamard, b.hadamard);
    EXPECT_EQ(std::memcmp(&a.global, &b.global, 4), 0);
    EXPECT_EQ(BytesIn(a.data), BytesIn(b.data));
    EXPECT_EQ(BytesIn(a.codes), BytesIn(b.codes));
    EXPECT_EQ(BytesIn(a.scales), BytesIn(b.scales));
    EXPECT_EQ(BytesIn(a.zeros), BytesIn(b.zeros));
    EXPECT_EQ(BytesIn(a.center), BytesIn(b.center));
    EXPECT_EQ(BytesIn(a.message), BytesIn(b.message));
  }
  void ExpectRoundTrip(const PagedCache& cache) {
    const std::string bytes = Write(cache);
    const PagedCache back = Read(bytes);
    ASSERT_EQ(back.pages.size(), cache.pages.size());
    for (size_t i = 0; i < cache.pages.size(); ++i) {
      EXPECT_EQ(back.pages[i].start, cache.pages[i].start);
      EXPECT_EQ(back.pages[i].length, cache.pages[i].length);
      ExpectSame(*back.pages[i].key, *cache.pages[i].key);
      ExpectSame(*back.pages[i].value, *cache.pages[i].value);
    }
    EXPECT_EQ(Hex(Write(back)), Hex(bytes));
  }
  InstanceRef instance_ = std::make_shared<Instance>();
};

// ---- Golden bytes ----

TEST_F(WireFiles, GoldenEncodedValuesOfThePublishedExample) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const Shape shape{1, 1, 2, 4};
  PagedCache cache = One(Dense(shape, Type::f32, RawOf<float>({0, 1, 2, 3, 4, 5, 6, 7})),
                         Dense(shape, Type::f32, RawOf<float>({0, 1, 2, 3, 4, 5, 6, 7})), 2);
  Page page;
  page.start = 2;
  page.length = 1;
  page.key = Dense(shape, Type::f32, RawOf<float>({-1.3f, -0.4f, 0.3f, 1.2f, nan, nan, nan, nan}));
  page.value = Dense(shape, Type::f32, RawOf<float>({-0.8f, -0.3f, 0.2f, 0.7f, nan, nan, nan, nan}));
  cache.pages.push_back(page);
  const int64_t second = 1;
  auto made = QuantizePagedCache(instance_, cache, {&second, 1}, {0.25, Type::int4, 0}, {0.125, Type::uint4, 8});
  ASSERT_TRUE(made.ok()) << made.error().message;
  const std::string key = "0a130816120810014a040000803e1a0510164a01001a160a14080112100a0208010a0208010a0208020a0208042204eb510000";
  const std::string value = "0a130815120810014a040000003e1a0510154a01081a160a14080112100a0208010a0208010a0208020a020804220462ea8888";
  const std::string bytes = Write(made.value());
  EXPECT_NE(Hex(bytes).find("0a6e08021001" "2233" + key + "3233" + value), std::string::npos) << Hex(bytes);
  ExpectKept(bytes);
}

TEST_F(WireFiles, AStartOfZeroIsWritten) {
  const PagedCache cache = Read(Block(0, 2, Len(3, kDense) + Len(5, kDense)));
  EXPECT_EQ(Hex(Write(cache)).substr(4, 8), "08001002");
  EXPECT_EQ(Hex(Write(PagedCache{})), "");
  EXPECT_TRUE(Read("").pages.empty());
}

TEST_F(WireFiles, NamesHavePresence) {
  ExpectKept(Len(2, "") + Len(3, ""));
  ExpectKept(Len(2, "layer 0") + Len(3, "text"));
  EXPECT_FALSE(Read("").name.has_value());
  EXPECT_EQ(Read(Len(2, "")).name.value_or("none"), "");
}

TEST_F(WireFiles, TheBufferMustBeExact) {
  const PagedCache cache = Read(PageOf(Encoded(kAffine)));
  for (const int difference : {-1, 1}) {
    std::vector<uint8_t> out(static_cast<size_t>(static_cast<int64_t>(SerializedSize(cache)) + difference), 0xaa);
    const Status status = SerializePagedCache(cache, out);
    ASSERT_FALSE(status.ok());
    EXPECT_EQ(status.error().code, Code::kBuffer);
    for (const uint8_t byte : out) ASSERT_EQ(byte, 0xaa);
  }
}

// ---- Round trips ----

TEST_F(WireFiles, DensePagesOfEveryType) {
  const Shape shape{2, 3, 2, 5};
  for (const auto& [type, size] : {std::pair{Type::f32, 4}, {Type::f16, 2}, {Type::bf16, 2}}) {
    std::string data(static_cast<size_t>(shape.elements() * size), '\0');
    for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<char>(i * 37);  // NaNs with payloads among them
    ExpectRoundTrip(One(Dense(shape, type, data), Dense(shape, type, data), 1));
  }
}

TEST_F(WireFiles, AffinePagesOfEveryTypeAxisAndBlock) {
  const Shape shape{2, 3, 5, 7};
  for (int t = 0; t < TypeCount(); ++t) {
    const TypeInfo& info = TypeAt(t);
    if (info.family != Family::kInteger || info.onnx == 0) continue;
    std::vector<uint8_t> codes(static_cast<size_t>(PackedBytes(info.bits, shape.elements())), 0x5b);
    const int unused = static_cast<int>(static_cast<int64_t>(codes.size()) * 8 - shape.elements() * info.bits);
    codes.back() = static_cast<uint8_t>(codes.back() & 0xff >> unused);
    for (int axis = -1; axis < 4; ++axis) {
      for (const int64_t block : {0, 1, 2, 3, 100}) {
        if (axis < 0 && block > 0) continue;
        for (const bool with_zeros : {false, true}) {
          SCOPED_TRACE(std::string(info.name) + " axis " + std::to_string(axis) + " block " + std::to_string(block));
          const auto count = static_cast<size_t>(AffineGrid(shape, axis, block).count);
          std::vector<float> scales(count);
          std::vector<uint8_t> zeros(with_zeros ? count : 0);
          for (size_t i = 0; i < count; ++i) scales[i] = 0.25f + static_cast<float>(i);
          for (size_t i = 0; i < zeros.size(); ++i) zeros[i] = static_cast<uint8_t>(i * 3 % (1u << info.bits));
          auto made = MakeAffine(instance_, shape, info.type, axis, block, {codes, {reinterpret_cast<const uint8_t*>(scales.data()), scales.size() * 4}, zeros, {}});
          ASSERT_TRUE(made.ok()) << made.error().message;
          ExpectRoundTrip(One(made.value(), made.value(), 4));
        }
      }
    }
  }
}

TEST_F(WireFiles, EverySpecWithAndWithoutModifiers) {
  const Shape shape{1, 2, 20, 64};
  constexpr int64_t kValid = 17;
  std::vector<float> x(static_cast<size_t>(shape.elements()));
  for (size_t i = 0; i < x.size(); ++i) x[i] = std::sin(static_cast<float>(i) * 0.37f) * (1 + static_cast<float>(i % 5));
  int structured = 0, affine = 0, modified = 0;
  for (const std::string& text : AllSpecs()) {
    for (const char* modifiers : {"", "+center+hadamard"}) {
      SCOPED_TRACE(text + modifiers);
      auto parsed = ParseSpec(text + modifiers, "spec");
      if (!parsed.ok() && *modifiers) continue;
      ASSERT_TRUE(parsed.ok()) << parsed.error().message;
      auto spec = ResolveSpec(parsed.value(), shape.width, "spec");
      ASSERT_TRUE(spec.ok()) << spec.error().message;
      EncodeOptions options;
      const std::vector<float> scales(static_cast<size_t>(ScaleGrid(spec.value(), shape).count), 0.5f);
      if (spec.value().calibration == Calibration::kGiven) {
        options.scales = scales.data();
        options.scale_count = static_cast<int64_t>(scales.size());
      }
      auto payload = Encode(instance_, ContiguousView(x.data(), Type::f32, shape), kValid, spec.value(), options, "x");
      ASSERT_TRUE(payload.ok()) << payload.error().message;
      const PagedCache cache = One(payload.value(), payload.value(), kValid);
      ExpectRoundTrip(cache);
      if (payload.value()->kind != PayloadKind::kEncoded) continue;
      const bool named = Write(cache).find("kvpages." + CanonicalSpec(spec.value()) + ".v1") != std::string::npos;
      EXPECT_EQ(named, !payload.value()->affine);
      EXPECT_TRUE(!payload.value()->affine || IsAffine(spec.value()));
      (named ? structured : affine) += 1;
      modified += *modifiers != 0;
      std::vector<float> a(x.size()), b(x.size());
      const auto decode = [&](const Payload& p, std::vector<float>* out) {
        return Decode(instance_, p, 0, shape.tokens, out->data(), shape.heads * shape.tokens * shape.width, shape.tokens * shape.width, shape.width);
      };
      ASSERT_TRUE(decode(*payload.value(), &a).ok());
      ASSERT_TRUE(decode(*Read(Write(cache)).pages[0].key, &b).ok());
      EXPECT_EQ(std::memcmp(a.data(), b.data(), a.size() * 4), 0);
    }
  }
  EXPECT_GT(structured, 50);
  EXPECT_GT(affine, 5);
  EXPECT_GT(modified, 50);
}

TEST_F(WireFiles, OneCentreForAllPagesOfALayer) {
  const Shape shape{1, 2, 4, 64};
  std::vector<float> x(static_cast<size_t>(shape.elements()));
  for (size_t i = 0; i < x.size(); ++i) x[i] = 3 + std::cos(static_cast<float>(i));
  auto spec = ResolveSpec(ParseSpec("int4/token/32+center", "spec").value(), shape.width, "spec");
  ASSERT_TRUE(spec.ok());
  EncodeOptions options;
  auto first = Encode(instance_, ContiguousView(x.data(), Type::f32, shape), 4, spec.value(), options, "x");
  ASSERT_TRUE(first.ok());
  options.center = first.value()->center;
  for (float& value : x) value += 1;
  auto second = Encode(instance_, ContiguousView(x.data(), Type::f32, shape), 4, spec.value(), options, "x");
  ASSERT_TRUE(second.ok());
  PagedCache cache = One(first.value(), Dense(shape, Type::f32, RawOf(x)), 4);
  const uint64_t one = SerializedSize(cache);
  cache.pages.push_back(cache.pages[0]);
  cache.pages[1].start = 4;
  cache.pages[1].key = second.value();
  EXPECT_LT(SerializedSize(cache), 2 * one - first.value()->center.size());
  const PagedCache back = Read(Write(cache));
  ASSERT_EQ(back.pages.size(), 2u);
  EXPECT_TRUE(back.pages[0].key->center.Same(back.pages[1].key->center));
  ExpectRoundTrip(cache);
  // The second page alone does not have it; a page written for itself does.
  PagedCache alone;
  alone.pages = {cache.pages[1]};
  alone.pages[0].start = 0;
  ExpectRoundTrip(alone);
  SharedBytes known[2] = {first.value()->center, {}};
  auto page = SerializePage(alone.pages[0], known);
  ASSERT_TRUE(page.ok());
  ExpectRefused(BytesIn(page.value()), Code::kCorrupt, "centre");
  SharedBytes centers[2] = {first.value()->center, {}};
  auto read = ParsePage(instance_, {page.value().data(), static_cast<size_t>(page.value().size())}, 100, 7, centers);
  ASSERT_TRUE(read.ok()) << read.error().message;
  EXPECT_TRUE(read.value().key->center.Same(first.value()->center));
}

std::string Field(const std::string& name, int type, int64_t count) {
  return Len(1, Len(1, name) + Len(2, Len(1000 , Len(1, Len(1, Len(1, Int(1, type))) + Int(2, count)))));
}

TEST_F(WireFiles, UnknownStructuresAreCarriedByteForByte) {
  const std::string type = Len(2, Field("quants", kUint8, 4)) + Len(7, "Q4_K") + Len(5, "decoder \x01\xff") + Int(99, 5);
  const std::string opaque = Len(4, "\1\2\3\4") + Len(3, Logical({1, 1, 2, 2})) + Len(7, "name") + Len(2, type) + Int(77, 1);
  const PagedCache cache = Read(PageOf(opaque));
  EXPECT_EQ(cache.pages[0].key->kind, PayloadKind::kOpaque);
  EXPECT_EQ(FormatName(*cache.pages[0].key), "opaque (Q4_K)");
  ExpectKept(PageOf(opaque));
  const std::string shared = Encoded(kAffine) + Len(9, "blk.0");
  EXPECT_EQ(Read(PageOf(shared)).pages[0].key->kind, PayloadKind::kOpaque);
  ExpectKept(PageOf(shared));
  ExpectKept(PageOf(Len(2, Int(4, 7)) + Len(3, Logical({1, 1, 2, 2})) + Len(4, "x")));  // type_ref
  float out[4];
  EXPECT_EQ(Decode(instance_, *cache.pages[0].key, 0, 2, out, 4, 4, 2).error().code, Code::kUnsupported);
}

// ---- Other writers ----

TEST_F(WireFiles, FieldsInAnyOrder) {
  const std::string canonical = PageOf(Encoded(kAffine)) + Len(2, "n");
  const std::string scale = Len(9, RawOf<float>({0.5f})) + Int(2, kFloat);
  const std::string affine = Len(2, scale) + Int(1, kInt8);
  const std::string encoded = Len(4, "\1\2\3\4") + Len(3, Len(1, Len(2, Len(1, Int(1, 1)) + Len(1, Int(1, 1)) + Len(1, Int(1, 2)) +
                                                                          Len(1, Int(1, 2))) + Int(1, kFloat))) + Len(1, affine);
  const std::string dense = Len(9, kOnes) + Int(2, kFloat) + Unpacked({1, 1, 2, 2});
  ExpectReadAs(Len(2, "n") + Len(1, Len(5, dense) + Len(4, encoded) + Int(2, 2) + Int(1, 0)), canonical);
  const std::string packed_dims = Len(9, kOnes) + Len(1, Packed({1, 1})) + Int(2, kFloat) + Int(1, 2) + Len(1, Packed({2}));
  ExpectReadAs(Block(0, 2, Len(4, Encoded(kAffine)) + Len(5, packed_dims)) + Len(2, "n"), canonical);
}

TEST_F(WireFiles, SignedStorageInPlaceOfTheType) {
  for (const auto& [type, codes, is_signed] : {std::tuple{kInt8, std::string("\1\2\3\4"), 1}, {kUint8, std::string("\1\2\3\4"), 0},
                                               {kInt4, std::string("\x12\x34"), 1}, {kUint4, std::string("\x12\x34"), 0},
                                               {kInt2, std::string("\x1b"), 1}}) {
    ExpectReadAs(PageOf(Encoded(Len(2, kScale) + Int(6, is_signed), codes)), PageOf(Encoded(Int(1, type) + Len(2, kScale), codes)));
  }
  ExpectRefused(Block(0, 1, Len(4, Encoded(Len(2, kScale) + Int(6, 1), "\1", {1, 1, 1, 1})) +
                                Len(5, Tensor({1, 1, 1, 1}, kFloat, RawOf<float>({1})))), Code::kCorrupt, "signed_storage is ambiguous");
  ExpectRefused(PageOf(Encoded(Len(2, kScale) + Int(6, 1), "\1\2\3")), Code::kShape, "no storage type takes 3 bytes");
  ExpectRefused(PageOf(Encoded(kAffine + Int(6, 0))), Code::kCorrupt, "signed_storage contradicts");
  ExpectRefused(PageOf(Encoded(Len(2, kScale))), Code::kCorrupt, "neither storage_type nor signed_storage");
}

TEST_F(WireFiles, ScalesAndZeroPointsInTypedFields) {
  const std::string canonical = PageOf(Encoded(kAffine));
  ExpectReadAs(PageOf(Encoded(Int(1, kInt8) + Len(2, Int(2, kFloat) + Len(4, RawOf<float>({0.5f}))))), canonical);
  ExpectReadAs(PageOf(Encoded(Int(1, kInt8) + Len(2, Int(2, kFloat) + Fixed32(4, 0.5f)))), canonical);
  // Ten int4 zero points: 32 / 4 to a word.
  const Dims dims{1, 1, 2, 10};
  const std::string scale = Unpacked({10}) + Int(2, kFloat) + Len(9, RawOf(std::vector<float>(10, 0.5f)));
  const auto encoded = [&](const std::string& zeros) {
    return Block(0, 2, Len(4, Encoded(Int(1, kInt4) + Len(2, scale) + Len(3, Unpacked({10}) + Int(2, kInt4) + zeros) + Int(4, 3),
                                      "abcdefghij", dims)) +
                           Len(5, Tensor(dims, kFloat, std::string(80, '\0'))));
  };
  ExpectReadAs(encoded(Len(5, Packed({0x76543210, 0x00000098}))), encoded(Len(9, "\x10\x32\x54\x76\x98")));
  ExpectReadAs(encoded(Int(5, 0x76543210) + Int(5, 0x98)), encoded(Len(9, "\x10\x32\x54\x76\x98")));
  ExpectRefused(encoded(Len(5, Packed({1}))), Code::kShape, "int32_data needs 2 words");
  ExpectRefused(encoded(Len(9, "\x10\x32")), Code::kShape, "zero_point raw_data needs 5 bytes");
  // A single zero point keeps the byte that it had, high bits and all.
  ExpectKept(Block(0, 2, Len(4, Encoded(Int(1, kInt4) + Len(2, kScale) + Len(3, Int(2, kInt4) + Len(9, "\xf3")), "\x12\x34")) + Len(5, kDense)));
}

TEST_F(WireFiles, DenseDataInTypedFields) {
  const std::string canonical = Block(0, 2, Len(3, kDense) + Len(5, kDense));
  const std::string head = Unpacked({1, 1, 2, 2}) + Int(2, kFloat);
  ExpectReadAs(Block(0, 2, Len(3, head + Len(4, kOnes)) + Len(5, head + Fixed32(4, 1) + Fixed32(4, 2) + Len(4, RawOf<float>({3, 4})))), canonical);
  for (const int type : {kFloat16, kBFloat16}) {
    const std::string half = Unpacked({1, 1, 2, 2}) + Int(2, type);
    const std::string want = half + Len(9, RawOf<uint16_t>({0x3c00, 0xffff, 0, 1}));
    ExpectReadAs(Block(0, 2, Len(3, half + Len(5, Packed({0x3c00, 0xffff, 0, 1}))) + Len(5, half + Int(5, 0x3c00) + Len(5, Packed({0xffff, 0})) + Int(5, 1))),
                 Block(0, 2, Len(3, want) + Len(5, want)));
    ExpectRefused(Block(0, 2, Len(3, half + Len(5, Packed({1, 2, 3, 0x10000}))) + Len(5, kDense)), Code::kCorrupt, "16-bit patterns");
    ExpectRefused(Block(0, 2, Len(3, half + Len(5, Packed({1, 2, 3}))) + Len(5, kDense)), Code::kShape, "int32_data needs 4 values");
    ExpectRefused(Block(0, 2, Len(3, half + Len(5, Packed({1, 2, 3, 4, 5}))) + Len(5, kDense)), Code::kShape, "int32_data needs 4 values");
  }
  ExpectRefused(Block(0, 2, Len(3, head + Len(4, RawOf<float>({1, 2, 3}))) + Len(5, kDense)), Code::kShape, "float_data needs 4 values");
}

TEST_F(WireFiles, NegativeAxis) {
  const std::string scale = Len(2, Unpacked({2}) + Int(2, kFloat) + Len(9, RawOf<float>({1, 2})));
  ExpectReadAs(PageOf(Encoded(Int(1, kInt8) + scale + Int(4, -1))), PageOf(Encoded(Int(1, kInt8) + scale + Int(4, 3))));
  for (const int64_t axis : {-5, 4}) ExpectRefused(PageOf(Encoded(Int(1, kInt8) + scale + Int(4, axis))), Code::kShape, "axis must be -4 to 3");
  ExpectRefused(PageOf(Encoded(kAffine + Int(5, 2))), Code::kCorrupt, "block_size needs an axis");
  for (const uint64_t size : {uint64_t{0}, uint64_t{1} << 63}) {
    ExpectRefused(PageOf(Encoded(Int(1, kInt8) + scale + Int(4, 3) + Int(5, static_cast<int64_t>(size)))), Code::kShape, "block_size must be");
  }
}

TEST_F(WireFiles, UnknownFieldsAreKept) {
  const std::string unknown = Int(500, 1) + Len(501, "text") + Fixed32(502, 1);
  ExpectKept(Block(0, 2, Len(3, kDense) + Len(5, kDense)) + unknown);
  ExpectKept(Block(0, 2, Len(3, kDense) + Len(5, kDense) + unknown));
  ExpectKept(Block(0, 2, Len(3, kDense + Len(8, "name") + Len(12, "doc") + unknown) + Len(5, kDense)));
  ExpectKept(PageOf(Encoded(kAffine) + Len(7, "name") + Len(8, "") + unknown));
  ExpectKept(PageOf(Encoded(kAffine + unknown)));
  const std::string group = Varint(90 << 3 | 3) + Int(1, 2) + Varint(90 << 3 | 4);
  ExpectKept(Block(0, 2, Len(3, kDense + group) + Len(5, kDense) + group) + group);
}

TEST_F(WireFiles, PartsOfAMessageMerge) {
  const std::string canonical = PageOf(Encoded(kAffine));
  ExpectReadAs(PageOf(Len(1, Int(1, kUint8)) + Encoded(kAffine)), canonical);  // the last value counts
  ExpectReadAs(PageOf(Len(1, Int(1, kInt8)) + Len(3, Logical({1, 1, 2, 2})) + Len(4, "old.") + Len(4, "\1\2\3\4") + Len(1, Len(2, kScale))), canonical);
  const std::string dense = Len(3, kDense);
  ExpectReadAs(Len(1, Int(1, 5) + Len(3, Unpacked({1, 1})) + Int(2, 2) + Int(1, 0) + Len(3, Int(2, kFloat) + Unpacked({2, 2}) + Len(9, kOnes)) + Len(5, kDense)),
               Block(0, 2, dense + Len(5, kDense)));
  // Another alternative of a oneof clears what was there.
  ExpectReadAs(Block(0, 2, dense + Len(4, Encoded(kAffine)) + Len(5, kDense)), canonical);
  ExpectReadAs(Block(0, 2, Len(4, "broken") + dense + Len(5, kDense)), Block(0, 2, dense + Len(5, kDense)));
  ExpectReadAs(PageOf(Len(2, Int(4, 7)) + Encoded(kAffine)), canonical);
}

// ---- Refusals ----

TEST_F(WireFiles, MissingThings) {
  const std::string both = Len(3, kDense) + Len(5, kDense);
  ExpectRefused(Len(1, Int(2, 2) + both), Code::kCorrupt, "start is missing");
  ExpectRefused(Len(1, Int(1, 0) + both), Code::kCorrupt, "length is missing");
  ExpectRefused(Len(1, ""), Code::kCorrupt, "start is missing");
  ExpectRefused(Block(0, 2, Len(5, kDense)), Code::kCorrupt, "page 0 key: payload is missing");
  ExpectRefused(Block(0, 2, Len(3, kDense)), Code::kCorrupt, "page 0 value: payload is missing");
  ExpectRefused(Block(0, 2, Len(3, Unpacked({1, 1, 2, 2}) + Len(9, kOnes)) + Len(5, kDense)), Code::kCorrupt, "data_type is missing");
  ExpectRefused(Block(0, 2, Len(3, Unpacked({1, 1, 2, 2}) + Int(2, kFloat)) + Len(5, kDense)), Code::kCorrupt, "holds no data");
  ExpectRefused(Block(0, 2, Len(3, Int(2, kFloat) + Len(9, kOnes)) + Len(5, kDense)), Code::kShape, "4 dims");
  ExpectRefused(Block(0, 2, Len(3, Unpacked({1, 1, 1, 2, 2}) + Int(2, kFloat) + Len(9, kOnes)) + Len(5, kDense)), Code::kShape, "4 dims");
  ExpectRefused(PageOf(Len(3, Logical({1, 1, 2, 2})) + Len(4, "\1\2\3\4")), Code::kCorrupt, "no layout");
  ExpectRefused(PageOf(Len(1, kAffine) + Len(4, "\1\2\3\4")), Code::kCorrupt, "logical_type is missing");
  ExpectRefused(PageOf(Len(1, kAffine) + Len(3, Logical({1, 1, 2, 2}))), Code::kCorrupt, "raw_data is missing");
  ExpectRefused(PageOf(Encoded(Int(1, kInt8))), Code::kCorrupt, "no scale");
  ExpectRefused(PageOf(Len(2, "") + Len(3, Logical({1, 1, 2, 2}))), Code::kCorrupt, "no kind");
}

TEST_F(WireFiles, ImportRejections) {
  const auto page = [](int64_t start, int64_t length, const std::string& key, const std::string& value) {
    return Block(start, length, Len(3, key) + Len(5, value));
  };
  const std::string head = Unpacked({1, 1, 2, 2}) + Int(2, kFloat);
  const std::string good = head + Len(4, kOnes);
  EXPECT_EQ(Read(page(0, 2, good, good)).pages.size(), 1u);
  ExpectRefused(page(1, 2, good, good), Code::kShape, "start");
  ExpectRefused(page(0, 0, good, good), Code::kShape, "length");
  ExpectRefused(page(0, 3, good, good), Code::kShape, "length");
  ExpectRefused(page(0, -1, good, good), Code::kShape, "length");
  ExpectRefused(page(0, 2, Unpacked({1, 1, 2, 2}) + Int(2, kDouble) + Len(4, kOnes), good), Code::kUnsupported, "page 0 key");
  ExpectRefused(page(0, 2, Unpacked({1, 1, INT64_MAX, 2}) + Int(2, kFloat) + Len(4, kOnes), good), Code::kShape, "page 0 key");
  ExpectRefused(page(0, 2, good, Unpacked({1, 1, 1, 2}) + Int(2, kFloat) + Len(4, RawOf<float>({1, 2}))), Code::kShape, "capacit");
  ExpectRefused(page(0, 2, head, good), Code::kCorrupt, "page 0 key: the tensor holds no data");
  ExpectRefused(page(0, 2, good, good + Int(14, 1)), Code::kUnsupported, "page 0 value: data in an external file");
  ExpectRefused(page(0, 2, good, good + Len(13, "")), Code::kUnsupported, "page 0 value: data in an external file");
  ExpectRefused(PageOf(Encoded(kAffine) + Int(6, 1)), Code::kUnsupported, "external");
  ExpectRefused(PageOf(Encoded(kAffine) + Len(5, "")), Code::kUnsupported, "external");
  ExpectRefused(PageOf(Encoded(Int(1, kInt8) + Len(2, kScale + Int(14, 1)))), Code::kUnsupported, "external");
  // The second page of two.
  const std::string one = Unpacked({1, 1, 1, 2}) + Int(2, kFloat) + Len(9, RawOf<float>({1, 2}));
  const std::string first = page(0, 1, one, one);
  EXPECT_EQ(Read(first + page(1, 1, one, one)).pages.size(), 2u);
  ExpectRefused(first + page(2, 1, one, one), Code::kShape, "start", 1);
  ExpectRefused(first + page(INT64_MAX, 1, one, one), Code::kShape, "start", 1);
  ExpectRefused(first + page(1, 0, one, one), Code::kShape, "length", 1);
  ExpectRefused(first + page(1, 2, one, one), Code::kShape, "length", 1);
  ExpectRefused(first + page(1, 1, one, good), Code::kShape, "capacit", 1);
  ExpectRefused(first + page(1, 1, Unpacked({1, 1, 1, 3}) + Int(2, kFloat) + Len(9, RawOf<float>({1, 2, 3})), one), Code::kShape, "", 1);
  ExpectRefused(first + page(1, 1, Unpacked({1, 1, 1, 2}) + Int(2, kFloat) + Len(9, RawOf<float>({1})), one), Code::kShape, "page 1 key: raw_data", 1);
  ExpectRefused(first + Block(1, 1, Len(3, one)), Code::kCorrupt, "page 1 value: payload is missing", 1);
}

TEST_F(WireFiles, AffineRejections) {
  const auto refused = [&](const std::string& affine, Code code, const char* part) { ExpectRefused(PageOf(Encoded(affine)), code, part); };
  for (const int type : {0, 1, 5, 10, 17, 23, 24, 27, -1}) {
    refused(Int(1, type) + Len(2, kScale), Code::kUnsupported, "storage_type must be INT8, UINT8, INT4, UINT4, INT2 or UINT2");
  }
  const auto scale = [](float value) { return Int(1, kInt8) + Len(2, Int(2, kFloat) + Len(9, RawOf<float>({value}))); };
  for (const float value : {0.0f, -1.0f, std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    refused(scale(value), Code::kCorrupt, "scale");
  }
  refused(Int(1, kInt8) + Len(2, Int(2, kFloat16) + Len(9, "\0\x3c")), Code::kUnsupported, "scales must be FLOAT");
  refused(Int(1, kInt8) + Len(2, Unpacked({1}) + kScale), Code::kShape, "scale must have dims []");
  refused(Int(1, kInt8) + Len(2, Int(2, kFloat) + Len(9, "abc")), Code::kShape, "whole floats");
  refused(kAffine + Len(3, Int(2, kUint8) + Len(9, "a")), Code::kCorrupt, "zero_point must have the storage type 3");
  refused(kAffine + Len(3, Unpacked({1}) + Int(2, kInt8) + Len(9, "a")), Code::kShape, "zero_point must have dims []");
  ExpectRefused(PageOf(Encoded(kAffine, "\1\2\3")), Code::kShape, "needs 4 bytes");
  ExpectRefused(PageOf(Len(1, kAffine) + Len(3, Logical({1, 1, 2, 2}, kFloat16)) + Len(4, "\1\2\3\4")), Code::kUnsupported, "must be FLOAT");
  // Three int4 codes: the last byte's high half must be 0.
  const std::string odd = Tensor({1, 1, 1, 3}, kFloat, RawOf<float>({1, 2, 3}));
  ExpectRefused(Block(0, 1, Len(4, Encoded(Int(1, kInt4) + Len(2, kScale), "\x12\x13", {1, 1, 1, 3})) + Len(5, odd)), Code::kCorrupt, "unused bits");
}

TEST_F(WireFiles, ErrorsSayPageSideAndByte) {
  const std::string first = Block(0, 2, Len(3, kDense) + Len(5, kDense));
  const std::string bytes = first + Block(2, 2, Len(3, kDense) + Len(6, Encoded(kAffine, "\1\2\3")));
  const Error error = Refusal(bytes);
  EXPECT_EQ(error.page.value_or(-1), 1);
  EXPECT_EQ(error.side, "value");
  // Where raw_data's tag stands.
  EXPECT_EQ(error.byte_offset.value_or(-1), static_cast<int64_t>(bytes.size()) - 5);
  EXPECT_TRUE(error.message.starts_with("page 1 value: raw_data of [1, 1, 2, 2] int8 needs 4 bytes, got 3")) << error.message;
}

// ---- Damaged and hostile files ----

class WireFileDamage : public WireFiles {
 protected:
  std::string Mixed() {
    const Shape shape{1, 1, 2, 2};
    const float x[] = {1, -2, 3, 0.5f};
    auto spec = ResolveSpec(ParseSpec("lm3/token+center+hadamard", "spec").value(), 2, "spec");
    auto coded = Encode(instance_, ContiguousView(x, Type::f32, shape), 2, spec.value(), {}, "x");
    EXPECT_TRUE(coded.ok()) << coded.error().message;
    PagedCache cache = One(coded.value(), Dense(shape, Type::bf16, std::string(8, '\x3f')), 2);
    const std::string scale = Unpacked({2}) + Int(2, kFloat) + Len(9, RawOf<float>({1, 2}));
    const std::string zeros = Unpacked({2}) + Int(2, kInt4) + Len(9, "\x21");
    const std::string affine = Int(1, kInt4) + Len(2, scale) + Len(3, zeros) + Int(4, 3);
    const std::string opaque = Len(2, Len(1, "") + Len(7, "Q")) + Len(3, Logical({1, 1, 2, 2})) + Len(4, "ab");
    return Write(cache) + Block(2, 2, Len(4, Encoded(affine, "\x12\x34")) + Len(6, opaque)) +
           Block(4, 1, Len(3, kDense + Int(99, 1)) + Len(5, kDense)) + Len(2, "n");
  }
  // Refused with a place, or a valid cache that is written and read again without change.
  void ExpectSound(const std::string& bytes) {
    auto cache = Parse(bytes);
    if (cache.ok()) {
      EXPECT_TRUE(Validate(cache.value()).ok());
      const std::string again = Write(cache.value());
      EXPECT_EQ(Write(Read(again)), again);
      return;
    }
    const Error& error = cache.error();
    EXPECT_TRUE(error.code == Code::kCorrupt || error.code == Code::kShape || error.code == Code::kUnsupported) << error.message;
    EXPECT_TRUE(error.byte_offset && *error.byte_offset >= 0 && *error.byte_offset <= static_cast<int64_t>(bytes.size())) << error.message;
    EXPECT_EQ(instance_->budget->used(), 0u);
  }
};

TEST_F(WireFileDamage, TruncatedAtEveryByte) {
  const std::string bytes = Mixed();
  ExpectKept(bytes);
  int refused = 0;
  for (size_t size = 0; size < bytes.size(); ++size) {
    SCOPED_TRACE(size);
    ExpectSound(bytes.substr(0, size));
    refused += !Parse(bytes.substr(0, size)).ok();
  }
  EXPECT_GT(refused, static_cast<int>(bytes.size()) - 10);  // only whole fields of the cache itself are files
}

TEST_F(WireFileDamage, EverySingleBit) {
  const std::string bytes = Mixed();
  for (size_t bit = 0; bit < bytes.size() * 8; ++bit) {
    SCOPED_TRACE("bit " + std::to_string(bit));
    std::string damaged = bytes;
    damaged[bit / 8] = static_cast<char>(static_cast<uint8_t>(damaged[bit / 8]) ^ 1u << bit % 8);
    ExpectSound(damaged);
  }
}

TEST_F(WireFileDamage, SizesThatAFileDoesNotHold) {
  // Twice the file would do; what it claims would not.
  const auto refused = [&](const std::string& bytes, Code code) {
    instance_->budget = std::make_shared<Budget>(2 * bytes.size() + 1024);
    const Error error = Refusal(bytes);
    EXPECT_EQ(CodeText(error.code), std::string(CodeText(code))) << error.message;
    EXPECT_EQ(instance_->budget->used(), 0u);
  };
  constexpr int64_t kHuge = int64_t{1} << 62;
  for (const Dims& dims : {Dims{kHuge, 1, 2, 2}, {1, 1, kHuge, 1}, {1, 1, 1, kHuge}, {1 << 30, 1 << 30, 1, 1}, {1 << 16, 1 << 16, 1 << 16, 1 << 16},
                           {1, 1, 1 << 20, 1 << 20}, {-1, 1, 2, 2}, {0, 1, 2, 2}, {-1, -1, 2, 2}}) {
    refused(Block(0, 2, Len(3, Tensor(dims, kFloat, kOnes)) + Len(5, kDense)), Code::kShape);
    refused(Block(0, 2, Len(3, Unpacked(dims) + Int(2, kFloat16) + Len(5, "\1\2\3\4")) + Len(5, kDense)), Code::kShape);
    refused(PageOf(Encoded(kAffine, "\1\2\3\4", dims)), Code::kShape);
  }
  const std::string tag_of_blocks = "\x0a";
  for (const uint64_t length : {uint64_t{1} << 31, uint64_t{1} << 32, (uint64_t{1} << 63) + 1, UINT64_MAX, uint64_t{INT32_MAX}}) {
    refused(tag_of_blocks + Varint(length), Code::kCorrupt);
    refused(Block(0, 2, std::string("\x1a") + Varint(length) + kDense), Code::kCorrupt);
    refused(Block(0, 2, Len(3, Unpacked({1, 1, 2, 2}) + std::string("\x4a") + Varint(length)) + Len(5, kDense)), Code::kCorrupt);
  }
  // A structured page of the library's own whose arrays claim too much.
  for (const int64_t count : {kHuge, int64_t{-1}, int64_t{5}, (int64_t{1} << 62) + 1}) {
    const std::string type = Len(2, Field("codes", kFloat, count) + Field("scales", kFloat, 1)) + Len(7, "kvpages.lm2/tensor/mse/f32.v1");
    const std::string bytes = PageOf(Len(2, type) + Len(3, Logical({1, 1, 2, 2})) + Len(4, "12345"));
    instance_->budget = std::make_shared<Budget>(2 * bytes.size() + 1024);
    const Error error = Refusal(bytes);
    EXPECT_TRUE(error.code == Code::kCorrupt || error.code == Code::kShape) << error.message;
  }
}

TEST_F(WireFileDamage, DeepNesting) {
  std::string type = Int(1, kFloat);
  for (int depth = 0; depth < 200; ++depth) type = Len(1000, Len(1, Len(1, type) + Int(2, 1)));
  ExpectRefused(PageOf(Len(1, kAffine) + Len(3, type) + Len(4, "\1\2\3\4")), Code::kCorrupt, "logical_type");
  // In a structure that is carried it is never entered.
  ExpectKept(PageOf(Len(2, Len(1, type)) + Len(3, Logical({1, 1, 2, 2})) + Len(4, "1")));
  std::string groups;
  for (int depth = 0; depth < 100000; ++depth) groups += "\x9b\x01";
  ExpectRefused(groups, Code::kCorrupt, "group", -1);
}

TEST_F(WireFileDamage, ManyParts) {
  std::string bytes;
  for (int i = 0; i < 100000; ++i) bytes += Len(1, "");
  ExpectRefused(bytes, Code::kCorrupt, "start is missing");
  std::string sides;
  for (int i = 0; i < 100000; ++i) sides += Len(3, "");
  ExpectRefused(Block(0, 2, sides + Len(5, kDense)), Code::kUnsupported, "parts");
  std::string entries;
  for (int i = 0; i < 100000; ++i) entries += Len(16, "");
  ExpectRefused(PageOf(Encoded(Int(1, kInt8) + Len(2, kScale + entries))), Code::kUnsupported, "scale");
  ExpectRefused(PageOf(Len(1, kAffine) + Len(3, Logical({1, 1, 2, 2}) + entries) + Len(4, "\1\2\3\4")), Code::kUnsupported, "logical_type");
}

TEST_F(WireFileDamage, TheLimitIsAnError) {
  const std::string bytes = Block(0, 1, Len(3, Tensor({1, 1, 16, 64}, kFloat, std::string(4096, '\0'))) +
                                            Len(5, Tensor({1, 1, 16, 64}, kFloat, std::string(4096, '\0'))));
  instance_->budget = std::make_shared<Budget>(6000);
  auto cache = Parse(bytes);
  ASSERT_FALSE(cache.ok());
  EXPECT_EQ(cache.error().code, Code::kLimit) << cache.error().message;
  EXPECT_EQ(instance_->budget->used(), 0u);
}

}  // namespace
}  // namespace kvpages
