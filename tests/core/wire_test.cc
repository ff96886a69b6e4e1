// SPDX-License-Identifier: Apache-2.0
// Reader and writer of PagedCacheProto: known bytes, round trips, every order and spelling, every damage, hostile sizes.
#include "wire/wire.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "core/float.h"
#include "wire/kvpages.pb.h"

namespace kvpages {
namespace {

namespace pb = kvpages_wire;
using Raw = std::string;  // bytes of a message

Raw Hex(std::string_view text) {
  Raw raw;
  std::string digits;
  for (const char c : text) {
    if (c == ' ') continue;
    digits += c;
    if (digits.size() == 2) {
      raw += static_cast<char>(std::stoi(digits, nullptr, 16));
      digits.clear();
    }
  }
  return raw;
}
std::string HexOf(const Raw& raw) {
  std::string text;
  for (const char c : raw) {
    static constexpr char kDigits[] = "0123456789abcdef";
    text += kDigits[static_cast<uint8_t>(c) >> 4];
    text += kDigits[static_cast<uint8_t>(c) & 15];
  }
  return text;
}
Raw Varint(uint64_t value) {
  Raw raw;
  for (; value >= 128; value >>= 7) raw += static_cast<char>(value | 128);
  return raw += static_cast<char>(value);
}
Raw Int(int field, uint64_t value) { return Varint(static_cast<uint64_t>(field) << 3) + Varint(value); }
Raw Bin(int field, const Raw& value) { return Varint(static_cast<uint64_t>(field) << 3 | 2) + Varint(value.size()) + value; }

// The fields of a message as they stand, with their numbers. Only for messages that are well formed.
std::vector<std::pair<int, Raw>> FieldsOf(const Raw& message) {
  std::vector<std::pair<int, Raw>> fields;
  size_t at = 0;
  const auto varint = [&] {
    uint64_t value = 0;
    for (int shift = 0;; shift += 7) {
      const auto byte = static_cast<uint8_t>(message.at(at++));
      value |= static_cast<uint64_t>(byte & 127) << shift;
      if (byte < 128) return value;
    }
  };
  while (at < message.size()) {
    const size_t begin = at;
    const uint64_t tag = varint();
    if ((tag & 7) == 0) varint();
    if ((tag & 7) == 1) at += 8;
    if ((tag & 7) == 5) at += 4;
    if ((tag & 7) == 2) {
      const uint64_t length = varint();
      at += length;
    }
    fields.emplace_back(static_cast<int>(tag >> 3), message.substr(begin, at - begin));
  }
  return fields;
}
Raw ContentOf(const Raw& field) {
  size_t at = 0;
  while (static_cast<uint8_t>(field[at]) >= 128) ++at;
  ++at;
  while (static_cast<uint8_t>(field[at]) >= 128) ++at;
  return field.substr(at + 1);
}

std::vector<float> Numbers(int64_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = static_cast<float>(static_cast<int32_t>(random()) >> 8) / 4194304.0f;
  return values;
}

std::string DifferenceOf(const Payload& a, const Payload& b) {
  const auto same = [](const Bytes& x, const Bytes& y) {
    return x.size() == y.size() && (x.empty() || std::memcmp(x.data(), y.data(), x.size()) == 0);
  };
  if (a.kind != b.kind) return "kind";
  if (!(a.shape == b.shape)) return "shape " + Text(a.shape) + " and " + Text(b.shape);
  if (a.dense_type != b.dense_type) return "dense type";
  if (!same(a.data, b.data)) return "data";
  if (!same(a.codes, b.codes)) return "codes";
  if (!same(a.scales, b.scales)) return "scales";
  if (!same(a.zeros, b.zeros) || a.has_zeros != b.has_zeros) return "zeros";
  if (a.affine != b.affine || a.axis != b.axis || a.block != b.block) return "affine layout";
  if (a.affine && a.axis < 0 && a.has_zeros && a.zero_byte != b.zero_byte) return "zero byte";
  if (a.affine ? a.spec.type != b.spec.type : !(a.spec == b.spec)) return "spec " + CanonicalSpec(a.spec) + " and " + CanonicalSpec(b.spec);
  if (BitsOf(a.global) != BitsOf(b.global)) return "global scale";
  if (!same(a.center, b.center)) return "centre";
  if (a.hadamard != b.hadamard) return "hadamard run";
  if (!same(a.message, b.message) || a.opaque_name != b.opaque_name) return "opaque message";
  return "";
}
std::string DifferenceOf(const PagedCache& a, const PagedCache& b) {
  if (a.pages.size() != b.pages.size()) return "number of pages";
  if (a.name != b.name || a.doc_string != b.doc_string) return "name or doc_string";
  for (size_t i = 0; i < a.pages.size(); ++i) {
    const std::string at = "page " + std::to_string(i) + " ";
    if (a.pages[i].start != b.pages[i].start || a.pages[i].length != b.pages[i].length) return at + "place";
    const std::string key = DifferenceOf(*a.pages[i].key, *b.pages[i].key), value = DifferenceOf(*a.pages[i].value, *b.pages[i].value);
    if (!key.empty()) return at + "key " + key;
    if (!value.empty()) return at + "value " + value;
  }
  return "";
}

class WireTest : public ::testing::Test {
 protected:
  void SetUp() override { instance_->backend = ChooseBackend("auto").value(); }

  PayloadRef Dense(const Shape& shape, Type type = Type::f32, uint32_t seed = 1) {
    const auto values = Numbers(shape.elements(), seed);
    return Encoded(shape, CanonicalSpec({type}), values);
  }
  PayloadRef Encoded(const Shape& shape, const std::string& text, const std::vector<float>& values, SharedBytes center = {},
                     int64_t valid = -1) {
    auto spec = ParseSpec(text, "spec");
    EXPECT_TRUE(spec.ok()) << text;
    EncodeOptions options;
    options.center = center;
    std::vector<float> scales;
    if (spec.value().calibration == Calibration::kGiven) {
      scales.assign(static_cast<size_t>(ScaleGrid(ResolveSpec(spec.value(), shape.width, "spec").value(), shape).count), 0.25f);
      options.scales = scales.data();
      options.scale_count = static_cast<int64_t>(scales.size());
    }
    auto made = Encode(instance_, ContiguousView(values.data(), Type::f32, shape), valid < 0 ? shape.tokens : valid, spec.value(), options,
                       "values");
    EXPECT_TRUE(made.ok()) << text << ": " << (made.ok() ? "" : made.error().message);
    return made.value();
  }
  static PagedCache CacheOf(std::vector<std::pair<PayloadRef, PayloadRef>> payloads) {
    PagedCache cache;
    int64_t start = 0;
    for (auto& [key, value] : payloads) {
      cache.pages.push_back({start, key->shape.tokens, key, value, nullptr});
      start += key->shape.tokens;
    }
    return cache;
  }
  static Raw Written(const PagedCache& cache) {
    Raw raw(SerializedSize(cache), '\x5a');
    const Status status = SerializePagedCache(cache, {reinterpret_cast<uint8_t*>(raw.data()), raw.size()});
    EXPECT_TRUE(status.ok()) << (status.ok() ? "" : status.error().message);
    return raw;
  }
  // From a block of exactly the right size, so that a sanitizer sees every byte too far.
  Result<PagedCache> Read(const Raw& raw) {
    const auto exact = std::make_unique<uint8_t[]>(raw.size());
    std::copy(raw.begin(), raw.end(), exact.get());
    return ParsePagedCache(instance_, {exact.get(), raw.size()});
  }
  PagedCache MustRead(const Raw& raw) {
    auto cache = Read(raw);
    EXPECT_TRUE(cache.ok()) << (cache.ok() ? "" : cache.error().message) << "\n" << HexOf(raw.substr(0, 200));
    return cache.ok() ? std::move(cache.value()) : PagedCache();
  }
  Error Refusal(const Raw& raw) {
    const uint64_t before = instance_->budget->used();
    auto cache = Read(raw);
    EXPECT_FALSE(cache.ok()) << HexOf(raw.substr(0, 200));
    EXPECT_EQ(instance_->budget->used(), cache.ok() ? instance_->budget->used() : before) << "memory is still held";
    return cache.ok() ? Error{} : cache.error();
  }
  void ExpectRefused(const Raw& raw, Code code, const std::string& part, int64_t page = 0) {
    SCOPED_TRACE(part);
    const Error error = Refusal(raw);
    EXPECT_EQ(CodeText(error.code), std::string(CodeText(code))) << error.message;
    EXPECT_NE(error.message.find(part), std::string::npos) << error.message;
    EXPECT_EQ(error.argument, "bytes");
    ASSERT_TRUE(error.byte_offset.has_value()) << error.message;
    EXPECT_GE(*error.byte_offset, 0);
    EXPECT_LE(*error.byte_offset, static_cast<int64_t>(raw.size()));
    if (page >= 0) {
      EXPECT_EQ(error.page, page) << error.message;
    }
  }
  // Everything that may be done with a cache that was accepted.
  void Use(const PagedCache& cache) {
    const Status valid = Validate(cache);
    EXPECT_TRUE(valid.ok()) << (valid.ok() ? "" : valid.error().message);
    for (const Page& page : cache.pages) {
      for (const PayloadRef& payload : {page.key, page.value}) {
        if (payload->kind == PayloadKind::kOpaque) continue;
        const Shape& shape = payload->shape;
        std::vector<float> out(static_cast<size_t>(shape.elements()));
        EXPECT_TRUE(Decode(instance_, *payload, 0, shape.tokens, out.data(), shape.heads * shape.tokens * shape.width,
                           shape.tokens * shape.width, shape.width)
                        .ok());
      }
    }
    EXPECT_EQ(DifferenceOf(cache, MustRead(Written(cache))), "");
  }

  InstanceRef instance_ = std::make_shared<Instance>();
};

// ---- Messages as other writers make them ----

void Dims(pb::TensorProto* tensor, std::initializer_list<int64_t> dims) {
  for (const int64_t dim : dims) tensor->add_dims(dim);
}
pb::TensorProto FloatPage(std::initializer_list<int64_t> dims, std::initializer_list<float> values) {
  pb::TensorProto tensor;
  Dims(&tensor, dims);
  tensor.set_data_type(pb::TensorProto::FLOAT);
  for (const float value : values) tensor.add_float_data(value);
  return tensor;
}
pb::EncodedValueProto AffinePage(std::initializer_list<int64_t> dims, int storage, const Raw& codes, float scale = 0.25f) {
  pb::EncodedValueProto encoded;
  encoded.mutable_affine()->set_storage_type(storage);
  auto* tensor = encoded.mutable_affine()->mutable_scale();
  tensor->set_data_type(pb::TensorProto::FLOAT);
  tensor->set_raw_data(&scale, 4);
  auto* type = encoded.mutable_logical_type()->mutable_tensor_type();
  type->set_elem_type(pb::TensorProto::FLOAT);
  for (const int64_t dim : dims) type->mutable_shape()->add_dim()->set_dim_value(dim);
  encoded.set_raw_data(codes);
  return encoded;
}
// The page of onnx-light's import tests.
pb::PagedCacheProto OnePage() {
  pb::PagedCacheProto proto;
  auto* block = proto.add_blocks();
  block->set_start(0);
  block->set_length(2);
  *block->mutable_key() = FloatPage({1, 1, 2, 2}, {1, 2, 3, 4});
  *block->mutable_value() = FloatPage({1, 1, 2, 2}, {1, 2, 3, 4});
  return proto;
}
pb::PagedCacheProto WithKey(pb::EncodedValueProto key) {
  pb::PagedCacheProto proto;
  auto* block = proto.add_blocks();
  block->set_start(0);
  const auto& dims = key.logical_type().tensor_type().shape();
  const int64_t tokens = dims.dim_size() == 4 ? dims.dim(2).dim_value() : 1;
  block->set_length(1);
  *block->mutable_value() = FloatPage({dims.dim_size() == 4 ? dims.dim(0).dim_value() : 1, dims.dim_size() == 4 ? dims.dim(1).dim_value() : 1, tokens, 1}, {});
  block->mutable_value()->mutable_dims()->Truncate(4);
  for (int64_t i = 0; i < block->value().dims(0) * block->value().dims(1) * tokens; ++i) block->mutable_value()->add_float_data(1);
  *block->mutable_encoded_key() = std::move(key);
  return proto;
}
Raw TextOf(const google::protobuf::MessageLite& message) { return message.SerializeAsString(); }
Raw RawOf(const Bytes& bytes) { return {reinterpret_cast<const char*>(bytes.data()), static_cast<size_t>(bytes.size())}; }

// ---- Known bytes ----

TEST_F(WireTest, SeedPageHasTheKnownBytes) {
  const Shape shape{1, 1, 2, 4};
  const float nan = NAN;
  const std::vector<float> key{-1.3f, -0.4f, 0.3f, 1.2f, nan, nan, nan, nan}, value{-0.8f, -0.3f, 0.2f, 0.7f, nan, nan, nan, nan};
  PagedCache cache = CacheOf({{Dense(shape), Dense(shape)}});
  cache.pages.push_back({2, 1, MakeDense(instance_, ContiguousView(key.data(), Type::f32, shape)).value(),
                         MakeDense(instance_, ContiguousView(value.data(), Type::f32, shape)).value(), nullptr});
  const int64_t page = 1;
  auto quantized = QuantizePagedCache(instance_, cache, {&page, 1}, {0.25, Type::int4, 0}, {0.125, Type::uint4, 8});
  ASSERT_TRUE(quantized.ok());
  const Raw raw = Written(quantized.value());
  const std::string k = "0a130816120810014a040000803e1a0510164a01001a160a14080112100a0208010a0208010a0208020a0208042204eb510000";
  const std::string v = "0a130815120810014a040000003e1a0510154a01081a160a14080112100a0208010a0208010a0208020a020804220462ea8888";
  const auto blocks = FieldsOf(raw);
  ASSERT_EQ(blocks.size(), 2u);
  EXPECT_EQ(HexOf(blocks[1].second), "0a6e" "08021001" "2233" + k + "3233" + v);
  EXPECT_EQ(HexOf(blocks[0].second).substr(0, 16), "0a60" "08001002" "1a2c");  // start 0 is written
  const PagedCache again = MustRead(raw);
  EXPECT_EQ(DifferenceOf(quantized.value(), again), "");
  EXPECT_EQ(Written(again), raw);
  auto restored = QuantizePagedCache(instance_, again, {&page, 1}, {1, Type::f16, 0}, {1, Type::bf16, 0});
  ASSERT_TRUE(restored.ok());
  EXPECT_EQ(HexOf(RawOf(restored.value().pages[1].key->data)), "00bd00b80034003d0000000000000000");
  EXPECT_EQ(HexOf(RawOf(restored.value().pages[1].value->data)), "40bf80be803e403f0000000000000000");
}

TEST_F(WireTest, DensePageHasDimsThenTypeThenData) {
  const uint16_t half[2] = {0x3c00, 0x4000};
  const Shape shape{1, 1, 1, 2};
  PayloadRef payload = MakeDense(instance_, ContiguousView(half, Type::f16, shape)).value();
  PagedCache cache = CacheOf({{payload, payload}});
  cache.name = "n";
  cache.doc_string = "";
  const std::string tensor = "10" "0801" "0801" "0801" "0802" "100a" "4a04" "003c0040";
  EXPECT_EQ(HexOf(Written(cache)), "0a28" "0800" "1001" "1a" + tensor + "2a" + tensor + "12016e" "1a00");
}

TEST_F(WireTest, EmptyCacheIsNoBytesAndPresenceIsKept) {
  EXPECT_EQ(Written(PagedCache()), "");
  const PagedCache none = MustRead("");
  EXPECT_TRUE(none.pages.empty());
  EXPECT_FALSE(none.name || none.doc_string);
  const PagedCache empty = MustRead(Hex("1200 1a00"));
  EXPECT_EQ(empty.name, "");
  EXPECT_EQ(empty.doc_string, "");
  EXPECT_EQ(HexOf(Written(empty)), "12001a00");
}

TEST_F(WireTest, BufferOfAnotherSizeIsRefusedAndNotTouched) {
  const PagedCache cache = CacheOf({{Dense({1, 1, 2, 2}), Dense({1, 1, 2, 2})}});
  for (const int difference : {-1, 1}) {
    std::vector<uint8_t> out(SerializedSize(cache) + difference, 0xa5);
    const Status status = SerializePagedCache(cache, out);
    ASSERT_FALSE(status.ok());
    EXPECT_EQ(status.error().code, Code::kBuffer);
    EXPECT_TRUE(std::all_of(out.begin(), out.end(), [](uint8_t byte) { return byte == 0xa5; }));
  }
}

// ---- Round trips ----

TEST_F(WireTest, EverySpecComesBack) {
  const Shape shape{2, 2, 5, 64};
  std::vector<std::string> specs = AllSpecs();
  for (const char* more : {"lm4/token/64/mse/e4m3+center+hadamard", "lm3/token/64/mse/e4m3+hadamard", "int8/tensor/absmax/f32+hadamard",
                           "nvfp4+hadamard", "q8_0+center", "uint3/channel/2/kivi/f16", "int4/token/48/mse/e8m0+center"}) {
    specs.push_back(more);
  }
  for (const std::string& spec : specs) {
    for (const bool zeros : {false, true}) {
      SCOPED_TRACE(spec + (zeros ? " of zeros" : ""));
      std::vector<float> values = Numbers(shape.elements(), 3);
      if (zeros) std::fill(values.begin(), values.end(), 0.0f);
      PagedCache cache = CacheOf({{Encoded(shape, spec, values), Encoded(shape, "f32", values)}});
      const Raw raw = Written(cache);
      const PagedCache again = MustRead(raw);
      ASSERT_EQ(DifferenceOf(cache, again), "");
      ASSERT_EQ(Written(again), raw);
    }
  }
}

TEST_F(WireTest, EveryAffineLayoutComesBack) {
  const Shape shape{2, 2, 3, 5};
  for (const Type type : {Type::int8, Type::uint8, Type::int4, Type::uint4, Type::int2, Type::uint2}) {
    const TypeInfo& info = Info(type);
    for (int axis = -1; axis <= 3; ++axis) {
      for (const int64_t block : {0, 1, 2, 7}) {
        for (const bool with_zeros : {false, true}) {
          if (axis < 0 && block > 0) continue;
          SCOPED_TRACE(std::string(info.name) + " axis " + std::to_string(axis) + " block " + std::to_string(block));
          const auto count = static_cast<size_t>(AffineGrid(shape, axis, block).count);
          std::vector<float> scales(count);
          std::vector<uint8_t> zeros(with_zeros ? count : 0), codes(static_cast<size_t>(PackedBytes(info.bits, shape.elements())));
          for (size_t i = 0; i < count; ++i) scales[i] = 0.01f * static_cast<float>(i + 1);
          for (size_t i = 0; i < zeros.size(); ++i) zeros[i] = static_cast<uint8_t>(i * 37 + 1);
          for (size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<uint8_t>(i * 91 + 13);
          auto payload = MakeAffine(instance_, shape, type, axis, block, {codes, {reinterpret_cast<const uint8_t*>(scales.data()), scales.size() * 4}, zeros, {}});
          ASSERT_TRUE(payload.ok());
          const PagedCache cache = CacheOf({{payload.value(), Dense(shape)}});
          const Raw raw = Written(cache);
          const PagedCache again = MustRead(raw);
          EXPECT_EQ(DifferenceOf(cache, again), "");
          EXPECT_EQ(Written(again), raw);
        }
      }
    }
  }
}

TEST_F(WireTest, CentreStandsOnceAndIsShared) {
  const Shape shape{1, 2, 4, 8};
  const auto values = Numbers(shape.elements(), 5);
  const std::string spec = "int4/token/8/mse/e4m3+center";
  PayloadRef first = Encoded(shape, spec, values);
  PayloadRef second = Encoded(shape, spec, values, first->center);
  const PagedCache cache = CacheOf({{Dense(shape), Dense(shape)}, {first, Dense(shape)}, {second, Dense(shape)}});
  const Raw raw = Written(cache);
  const PagedCache again = MustRead(raw);
  EXPECT_EQ(DifferenceOf(cache, again), "");
  EXPECT_TRUE(again.pages[1].key->center.Same(again.pages[2].key->center));
  const auto blocks = FieldsOf(raw);
  EXPECT_GE(blocks[1].second.size(), blocks[2].second.size() + first->center.size());
  // Without the page that has it there is nothing to share.
  Raw cut = ContentOf(blocks[2].second);
  cut[1] = 0;  // start
  ExpectRefused(Bin(1, cut), Code::kCorrupt, "centre");
  // Two layers' centres in one cache.
  std::vector<float> other = values;
  for (float& value : other) value += 3;
  PayloadRef third = Encoded(shape, spec, other);
  const PagedCache mixed = CacheOf({{first, Dense(shape)}, {third, Dense(shape)}, {second, Dense(shape)}});
  EXPECT_EQ(DifferenceOf(mixed, MustRead(Written(mixed))), "");
}

TEST_F(WireTest, PageByPageIsTheSameFile) {
  const Shape shape{1, 2, 4, 8};
  const auto values = Numbers(shape.elements(), 5);
  PayloadRef first = Encoded(shape, "int4/token/8/mse/e4m3+center", values);
  PayloadRef second = Encoded(shape, "int4/token/8/mse/e4m3+center", values, first->center);
  const PagedCache cache = CacheOf({{first, Dense(shape)}, {second, Dense(shape, Type::f16)}});
  Raw joined;
  SharedBytes writing[2], reading[2];
  for (size_t i = 0; i < cache.pages.size(); ++i) {
    auto bytes = SerializePage(cache.pages[i], writing);
    ASSERT_TRUE(bytes.ok());
    auto page = ParsePage(instance_, {bytes.value().data(), static_cast<size_t>(bytes.value().size())}, 1000, static_cast<int64_t>(i), reading);
    ASSERT_TRUE(page.ok()) << page.error().message;
    EXPECT_EQ(DifferenceOf(*page.value().key, *cache.pages[i].key), "");
    joined += RawOf(bytes.value());
    auto cut = ParsePage(instance_, {bytes.value().data(), static_cast<size_t>(bytes.value().size() - 1)}, 1000, 7, reading);
    ASSERT_FALSE(cut.ok());
    EXPECT_EQ(cut.error().page, 7);
    EXPECT_GE(cut.error().byte_offset.value_or(0), 1000);
  }
  EXPECT_EQ(joined, Written(cache));
}

// ---- Any order ----

// Fields in a random order; those of one number keep theirs, as protobuf demands. `path`: numbers of the submessages to go into.
Raw Shuffled(const Raw& message, std::mt19937& random, int depth) {
  auto fields = FieldsOf(message);
  std::map<int, uint32_t> rank;
  for (auto& [number, raw] : fields) {
    if (!rank.contains(number)) rank[number] = random();
    // Depth 0: cache, 1: block, 2: tensor or encoded value, 3: affine layout, 4: scale and zero point.
    const bool message_field = (depth == 0 && number == 1) || (depth == 1 && number >= 3) || (depth == 2 && number == 1 && (static_cast<uint8_t>(raw[0]) & 7) == 2) ||
                               (depth == 3 && (number == 2 || number == 3));
    if (message_field) raw = Bin(number, Shuffled(ContentOf(raw), random, depth + 1));
  }
  std::stable_sort(fields.begin(), fields.end(), [&](const auto& a, const auto& b) { return rank[a.first] < rank[b.first]; });
  Raw all;
  for (const auto& field : fields) all += field.second;
  return all;
}

TEST_F(WireTest, FieldsInAnyOrder) {
  const Shape shape{1, 2, 3, 4};
  const auto values = Numbers(shape.elements(), 9);
  PagedCache cache = CacheOf({{Encoded(shape, "uint4/token/4/minmax/f32", values), Dense(shape, Type::bf16)},
                              {Encoded(shape, "int8/tensor/given/f32", values), Encoded(shape, "uint2/head/given/f32", values)}});
  cache.name = "name";
  cache.doc_string = "text";
  const Raw raw = Written(cache);
  std::mt19937 random(11);
  int changed = 0;
  for (int round = 0; round < 200; ++round) {
    const Raw other = Shuffled(raw, random, 0);
    changed += other != raw;
    const PagedCache again = MustRead(other);
    ASSERT_EQ(DifferenceOf(cache, again), "") << HexOf(other);
    ASSERT_EQ(Written(again), raw);
  }
  EXPECT_GT(changed, 150);
}

TEST_F(WireTest, LastScalarWinsMessagesMergeAndOneofsClear) {
  const pb::PagedCacheProto proto = OnePage();
  const Raw block = TextOf(proto.blocks(0)), tensor = TextOf(proto.blocks(0).key());
  const PagedCache want = MustRead(TextOf(proto));
  // Other values first; then the true ones.
  EXPECT_EQ(DifferenceOf(want, MustRead(Bin(1, Int(1, 7) + Int(2, 9) + block))), "");
  // A tensor in parts, dims split over them.
  auto fields = FieldsOf(tensor);
  Raw a, b;
  for (size_t i = 0; i < fields.size(); ++i) (i < 2 ? a : b) += fields[i].second;
  const Raw value = Bin(5, tensor);
  EXPECT_EQ(DifferenceOf(want, MustRead(Bin(1, Int(1, 0) + Int(2, 2) + Bin(3, a) + value + Bin(3, b)))), "");
  // An encoded key is cleared by a dense one that follows, and the other way round.
  const Raw encoded = Bin(4, TextOf(AffinePage({1, 1, 2, 2}, pb::TensorProto::INT8, Hex("01020304"))));
  EXPECT_EQ(DifferenceOf(want, MustRead(Bin(1, Int(1, 0) + Int(2, 2) + encoded + Bin(3, tensor) + value))), "");
  const PagedCache other = MustRead(Bin(1, Int(1, 0) + Int(2, 2) + Bin(3, a) + encoded + value));
  EXPECT_EQ(other.pages[0].key->kind, PayloadKind::kEncoded);
  // The layout's oneof likewise.
  const Raw structure = Bin(2, Bin(7, "other") + Int(4, 5));
  const Raw affine = TextOf(AffinePage({1, 1, 2, 2}, pb::TensorProto::INT8, Hex("01020304")));
  EXPECT_EQ(MustRead(Bin(1, Int(1, 0) + Int(2, 2) + Bin(4, structure + affine) + value)).pages[0].key->kind, PayloadKind::kEncoded);
  EXPECT_EQ(MustRead(Bin(1, Int(1, 0) + Int(2, 2) + Bin(4, affine + structure) + value)).pages[0].key->kind, PayloadKind::kOpaque);
  // Many parts cost their square, so there is a limit.
  Raw many;
  for (int i = 0; i < 70; ++i) many += Bin(3, "");
  ExpectRefused(Bin(1, Int(1, 0) + Int(2, 2) + many + Bin(3, tensor) + value), Code::kUnsupported, "more than 64 parts");
}

// ---- Every spelling ----

TEST_F(WireTest, DenseDataInEverySpelling) {
  const float values[4] = {1, 2, 3, 4};
  PayloadRef want = MakeDense(instance_, ContiguousView(values, Type::f32, {1, 1, 2, 2})).value();
  EXPECT_EQ(DifferenceOf(*want, *MustRead(TextOf(OnePage())).pages[0].key), "");
  const auto page = [](const Raw& tensor) { return Bin(1, Int(1, 0) + Int(2, 2) + Bin(3, tensor) + Bin(5, tensor)); };
  const Raw raw(reinterpret_cast<const char*>(values), 16), dims = Int(1, 1) + Int(1, 1) + Int(1, 2) + Int(1, 2);
  EXPECT_EQ(DifferenceOf(*want, *MustRead(page(dims + Int(2, 1) + Bin(9, raw))).pages[0].key), "");
  Raw unpacked;
  for (int i = 0; i < 4; ++i) unpacked += '\x25' + raw.substr(static_cast<size_t>(i) * 4, 4);
  EXPECT_EQ(DifferenceOf(*want, *MustRead(page(dims + Int(2, 1) + unpacked)).pages[0].key), "");
  EXPECT_EQ(DifferenceOf(*want, *MustRead(page(Bin(4, raw.substr(0, 8)) + dims + Bin(4, raw.substr(8)) + Int(2, 1))).pages[0].key), "");
  EXPECT_EQ(DifferenceOf(*want, *MustRead(page(Bin(1, Hex("01010202")) + Int(2, 1) + Bin(9, raw))).pages[0].key), "");  // packed dims

  for (const Type type : {Type::f16, Type::bf16}) {
    const uint16_t patterns[4] = {0x3c00, 0xbc00, 0x7f, 0xffff};
    PayloadRef halves = MakeDense(instance_, ContiguousView(patterns, type, {1, 1, 2, 2})).value();
    Raw packed, single;
    for (const uint16_t pattern : patterns) {
      packed += Varint(pattern);
      single += Int(5, pattern);
    }
    const Raw head = dims + Int(2, static_cast<uint64_t>(Info(type).onnx));
    EXPECT_EQ(DifferenceOf(*halves, *MustRead(page(head + Bin(5, packed))).pages[0].key), "");
    EXPECT_EQ(DifferenceOf(*halves, *MustRead(page(head + single)).pages[0].key), "");
    EXPECT_EQ(HexOf(RawOf(MustRead(Written(MustRead(page(head + single)))).pages[0].key->data)), "003c00bc7f00ffff");
    ExpectRefused(page(head + Bin(5, packed + Varint(1))), Code::kShape, "int32_data needs 4 values");
    ExpectRefused(page(head + Int(5, 1) + Int(5, 1) + Int(5, 1)), Code::kShape, "int32_data needs 4 values");
    ExpectRefused(page(head + Int(5, 1) + Int(5, 1) + Int(5, 1) + Int(5, 0x10000)), Code::kCorrupt, "16-bit patterns");
    ExpectRefused(page(head + Int(5, 1) + Int(5, 1) + Int(5, 1) + Int(5, ~uint64_t{0})), Code::kCorrupt, "16-bit patterns");
    ExpectRefused(page(head + Bin(4, raw)), Code::kCorrupt, "no data");
  }
  ExpectRefused(page(dims + Int(2, 1) + Bin(4, raw + "abcd")), Code::kShape, "float_data needs 4 values");
  ExpectRefused(page(dims + Int(2, 1) + Bin(4, raw.substr(2))), Code::kShape, "float_data needs 4 values");
}

TEST_F(WireTest, StorageTypeOrSign) {
  const Raw codes8 = Hex("01f203f4 05f607f8"), codes4 = Hex("01f203f4"), codes2 = Hex("01f2");
  for (const bool is_signed : {false, true}) {
    for (const Raw& codes : {codes8, codes4, codes2}) {
      auto key = AffinePage({1, 1, 2, 4}, 0, codes);
      key.mutable_affine()->clear_storage_type();
      key.mutable_affine()->set_signed_storage(is_signed);
      const PagedCache cache = MustRead(TextOf(WithKey(key)));
      ASSERT_EQ(cache.pages.size(), 1u);
      const TypeInfo& info = Info(cache.pages[0].key->spec.type);
      EXPECT_EQ(info.is_signed, is_signed);
      EXPECT_EQ(static_cast<size_t>(info.bits), codes.size());
      EXPECT_EQ(RawOf(cache.pages[0].key->codes), codes);
      EXPECT_EQ(DifferenceOf(cache, MustRead(Written(cache))), "");
    }
  }
  auto key = AffinePage({1, 1, 1, 1}, 0, "\1");
  key.mutable_affine()->clear_storage_type();
  ExpectRefused(TextOf(WithKey(key)), Code::kCorrupt, "neither storage_type nor signed_storage");
  key.mutable_affine()->set_signed_storage(true);
  ExpectRefused(TextOf(WithKey(key)), Code::kCorrupt, "ambiguous");
  key.mutable_affine()->set_storage_type(pb::TensorProto::UINT8);
  ExpectRefused(TextOf(WithKey(key)), Code::kCorrupt, "contradicts");
  key.mutable_affine()->set_signed_storage(false);
  EXPECT_EQ(MustRead(TextOf(WithKey(key))).pages[0].key->spec.type, Type::uint8);
  key.mutable_affine()->clear_storage_type();
  key.set_raw_data("\1\1\1");
  ExpectRefused(TextOf(WithKey(key)), Code::kShape, "no storage type takes 3 bytes");
}

TEST_F(WireTest, ScaleAndZeroPointInEverySpelling) {
  auto key = AffinePage({1, 1, 2, 4}, pb::TensorProto::INT4, Hex("01f203f4"));
  const PagedCache want = MustRead(TextOf(WithKey(key)));
  key.mutable_affine()->mutable_scale()->clear_raw_data();
  key.mutable_affine()->mutable_scale()->add_float_data(0.25f);
  EXPECT_EQ(DifferenceOf(want, MustRead(TextOf(WithKey(key)))), "");
  // An unpacked float_data, as fixed32: tag 0x25.
  Raw scale = Int(2, 1) + '\x25' + Hex("0000803e");
  key.mutable_affine()->mutable_scale()->Clear();
  ASSERT_TRUE(key.mutable_affine()->mutable_scale()->ParseFromString(scale));
  EXPECT_EQ(DifferenceOf(want, MustRead(TextOf(WithKey(key)))), "");

  // Zero points along the last axis: nibbles, in raw_data and eight to a word in int32_data; pairs sixteen to a word.
  key = AffinePage({1, 1, 1, 9}, pb::TensorProto::UINT4, Hex("0000000000"));
  auto* affine = key.mutable_affine();
  affine->set_axis(-1);
  affine->mutable_scale()->clear_raw_data();
  for (int i = 0; i < 9; ++i) affine->mutable_scale()->add_float_data(1);
  affine->mutable_scale()->add_dims(9);
  auto* zero = affine->mutable_zero_point();
  zero->add_dims(9);
  zero->set_data_type(pb::TensorProto::UINT4);
  zero->set_raw_data(Hex("2143658709"));
  const PagedCache nibbles = MustRead(TextOf(WithKey(key)));
  EXPECT_EQ(HexOf(RawOf(nibbles.pages[0].key->zeros)), "010203040506070809");
  EXPECT_EQ(nibbles.pages[0].key->axis, 3);
  zero->clear_raw_data();
  zero->add_int32_data(static_cast<int32_t>(0x87654321));
  zero->add_int32_data(9);
  EXPECT_EQ(DifferenceOf(nibbles, MustRead(TextOf(WithKey(key)))), "");
  zero->add_int32_data(0);
  ExpectRefused(TextOf(WithKey(key)), Code::kShape, "zero_point int32_data needs 2 words");
  zero->clear_int32_data();
  affine->set_storage_type(pb::TensorProto::INT2);
  zero->set_data_type(pb::TensorProto::INT2);
  key.set_raw_data(Hex("000000"));
  zero->add_int32_data(0x1b1b1);
  EXPECT_EQ(HexOf(RawOf(MustRead(TextOf(WithKey(key))).pages[0].key->zeros)), "0100fffe0100fffe01");

  // A single zero point keeps its byte.
  key = AffinePage({1, 1, 2, 4}, pb::TensorProto::INT4, Hex("01f203f4"));
  zero = key.mutable_affine()->mutable_zero_point();
  zero->set_data_type(pb::TensorProto::INT4);
  zero->set_raw_data(Hex("a7"));
  const PagedCache verbatim = MustRead(TextOf(WithKey(key)));
  EXPECT_EQ(verbatim.pages[0].key->zero_byte, 0xa7);
  EXPECT_EQ(HexOf(RawOf(verbatim.pages[0].key->zeros)), "07");
  EXPECT_NE(Written(verbatim).find(Hex("1a0510164a01a7")), Raw::npos);
  zero->clear_raw_data();
  zero->add_int32_data(7);
  EXPECT_EQ(HexOf(RawOf(MustRead(TextOf(WithKey(key))).pages[0].key->zeros)), "07");
}

TEST_F(WireTest, AffineMistakesAreNamed) {
  const auto key = [] {
    auto page = AffinePage({1, 1, 2, 4}, pb::TensorProto::INT4, Hex("01f203f4"));
    page.mutable_affine()->mutable_zero_point()->set_data_type(pb::TensorProto::INT4);
    page.mutable_affine()->mutable_zero_point()->set_raw_data("\1");
    return page;
  };
  ASSERT_TRUE(Read(TextOf(WithKey(key()))).ok());
  const auto refused = [&](const std::function<void(pb::EncodedValueProto*)>& change, Code code, const char* text) {
    auto page = key();
    change(&page);
    auto proto = WithKey(key());
    *proto.mutable_blocks(0)->mutable_encoded_key() = page;
    ExpectRefused(TextOf(proto), code, text);
    EXPECT_EQ(Refusal(TextOf(proto)).side, "key");
  };
  using E = pb::EncodedValueProto;
  const auto set_scale = [](E* e, float scale) { e->mutable_affine()->mutable_scale()->set_raw_data(&scale, 4); };
  refused([&](E* e) { set_scale(e, 0); }, Code::kCorrupt, "must be finite and > 0");
  refused([&](E* e) { set_scale(e, -1); }, Code::kCorrupt, "must be finite and > 0");
  refused([&](E* e) { set_scale(e, NAN); }, Code::kCorrupt, "must be finite and > 0");
  refused([&](E* e) { set_scale(e, INFINITY); }, Code::kCorrupt, "must be finite and > 0");
  refused([](E* e) { e->mutable_affine()->clear_scale(); }, Code::kCorrupt, "no scale");
  refused([](E* e) { e->mutable_affine()->mutable_scale()->set_data_type(pb::TensorProto::DOUBLE); }, Code::kUnsupported, "scales must be FLOAT");
  refused([](E* e) { e->mutable_affine()->mutable_scale()->add_dims(1); }, Code::kShape, "scale must have dims []");
  refused([](E* e) { for (int i = 0; i < 99; ++i) e->mutable_affine()->mutable_scale()->add_dims(1); }, Code::kShape, "scale must have dims [], got more than 4");
  refused([](E* e) { e->mutable_affine()->mutable_scale()->set_raw_data("123"); }, Code::kShape, "whole floats");
  refused([](E* e) { e->mutable_affine()->mutable_scale()->set_raw_data("12345678"); }, Code::kShape, "scale needs 1 values, got 2");
  refused([](E* e) { e->mutable_affine()->mutable_scale()->set_data_location(pb::TensorProto::EXTERNAL); }, Code::kUnsupported, "external");
  refused([](E* e) { e->mutable_affine()->mutable_zero_point()->set_data_type(pb::TensorProto::UINT4); }, Code::kCorrupt, "zero_point must have the storage type");
  refused([](E* e) { e->mutable_affine()->mutable_zero_point()->add_dims(1); }, Code::kShape, "zero_point must have dims []");
  refused([](E* e) { e->mutable_affine()->mutable_zero_point()->set_raw_data("12"); }, Code::kShape, "zero_point raw_data needs 1 bytes");
  refused([](E* e) { e->mutable_affine()->set_axis(4); }, Code::kShape, "axis must be");
  refused([](E* e) { e->mutable_affine()->set_axis(INT64_MIN); }, Code::kShape, "axis must be");
  refused([](E* e) { e->mutable_affine()->set_axis(2); }, Code::kShape, "scale must have dims [2]");
  refused([](E* e) { e->mutable_affine()->set_block_size(2); }, Code::kCorrupt, "block_size needs an axis");
  refused([](E* e) { e->mutable_affine()->set_axis(2), e->mutable_affine()->set_block_size(0); }, Code::kShape, "block_size must be");
  refused([](E* e) { e->mutable_affine()->set_axis(2), e->mutable_affine()->set_block_size(~uint64_t{0}); }, Code::kShape, "block_size must be");
  refused([](E* e) { e->mutable_affine()->set_axis(3), e->mutable_affine()->set_block_size(INT64_MAX); }, Code::kShape, "scale must have dims [1, 1, 2, 1]");
  for (const int type : {0, 1, 4, 6, 17, 23, 24, 27, -1}) {
    refused([=](E* e) { e->mutable_affine()->set_storage_type(type); }, Code::kUnsupported, "storage_type must be");
  }
  refused([](E* e) { e->set_raw_data("123"); }, Code::kShape, "needs 4 bytes, got 3");
  refused([](E* e) { e->set_raw_data("12345"); }, Code::kShape, "needs 4 bytes, got 5");
  refused([](E* e) { e->clear_raw_data(); }, Code::kCorrupt, "raw_data is missing");
  refused([](E* e) { e->clear_affine(); }, Code::kCorrupt, "no layout");
  refused([](E* e) { e->clear_logical_type(); }, Code::kCorrupt, "logical_type is missing");
  refused([](E* e) { e->mutable_logical_type()->clear_tensor_type(); }, Code::kUnsupported, "must be a tensor");
  refused([](E* e) { e->mutable_logical_type()->mutable_tensor_type()->set_elem_type(10); }, Code::kUnsupported, "must be FLOAT");
  refused([](E* e) { e->mutable_logical_type()->mutable_tensor_type()->mutable_shape()->add_dim()->set_dim_value(1); }, Code::kShape, "4 dims");
  refused([](E* e) { e->mutable_logical_type()->mutable_tensor_type()->mutable_shape()->mutable_dim(2)->set_dim_param("n"); }, Code::kShape, "must be a number");
  refused([](E* e) { e->mutable_logical_type()->mutable_tensor_type()->mutable_shape()->mutable_dim(2)->set_dim_value(-2); }, Code::kShape, "at least 1");
  refused([](E* e) { e->mutable_logical_type()->set_denotation(std::string(70000, 'x')); }, Code::kUnsupported, "larger than 65536");
  refused([](E* e) { e->set_data_location(pb::TensorProto::EXTERNAL); }, Code::kUnsupported, "external");
  refused([](E* e) { e->add_external_data()->set_key("location"); }, Code::kUnsupported, "external");
  // Odd counts leave bits over, which must be 0.
  auto odd = AffinePage({1, 1, 1, 3}, pb::TensorProto::INT4, Hex("2103"));
  EXPECT_TRUE(Read(TextOf(WithKey(odd))).ok());
  odd.set_raw_data(Hex("2113"));
  ExpectRefused(TextOf(WithKey(odd)), Code::kCorrupt, "unused bits");
}

// ---- What onnx-light's own import refuses ----

TEST_F(WireTest, RejectionsOfImport) {
  ASSERT_TRUE(Read(TextOf(OnePage())).ok());
  const auto refused = [&](const std::function<void(pb::PagedCacheBlockProto*)>& change, Code code, const char* text) {
    auto proto = OnePage();
    change(proto.mutable_blocks(0));
    ExpectRefused(TextOf(proto), code, text);
  };
  using B = pb::PagedCacheBlockProto;
  refused([](B* b) { b->clear_start(); }, Code::kCorrupt, "start is missing");
  refused([](B* b) { b->clear_length(); }, Code::kCorrupt, "length is missing");
  refused([](B* b) { b->set_start(1); }, Code::kShape, "first page must start at 0");
  refused([](B* b) { b->set_start(-1); }, Code::kShape, "first page must start at 0");
  refused([](B* b) { b->set_length(0); }, Code::kShape, "length must be 1 to the capacity 2");
  refused([](B* b) { b->set_length(3); }, Code::kShape, "length must be 1 to the capacity 2");
  refused([](B* b) { b->set_length(INT64_MIN); }, Code::kShape, "length must be 1 to the capacity 2");
  refused([](B* b) { b->clear_key(); }, Code::kCorrupt, "payload is missing");
  refused([](B* b) { b->clear_value(); }, Code::kCorrupt, "payload is missing");
  refused([](B* b) { b->mutable_key()->set_data_type(pb::TensorProto::DOUBLE); }, Code::kUnsupported, "must be FLOAT");
  refused([](B* b) { b->mutable_key()->clear_data_type(); }, Code::kCorrupt, "data_type is missing");
  refused([](B* b) { b->mutable_key()->set_dims(2, INT64_MAX); }, Code::kShape, "overflows");
  refused([](B* b) { b->mutable_value()->set_dims(2, 1); }, Code::kShape, "needs 2 values");
  refused([](B* b) { *b->mutable_value() = FloatPage({1, 1, 1, 2}, {1, 2}); }, Code::kShape, "capacity must equal");
  refused([](B* b) { b->mutable_key()->clear_float_data(); }, Code::kCorrupt, "no data");
  refused([](B* b) { b->mutable_key()->set_data_location(pb::TensorProto::EXTERNAL); }, Code::kUnsupported, "external");
  refused([](B* b) { b->mutable_key()->add_external_data(); }, Code::kUnsupported, "external");
  refused([](B* b) { b->mutable_key()->mutable_dims()->Truncate(3); }, Code::kShape, "4 dims");
  refused([](B* b) { b->mutable_key()->add_dims(1); }, Code::kShape, "4 dims");
  refused([](B* b) { b->mutable_key()->set_dims(0, 0); }, Code::kShape, "at least 1");
  // A second page with a gap, another width, a broken value.
  const auto second = [&](const std::function<void(pb::PagedCacheBlockProto*)>& change, Code code, const char* text) {
    auto proto = OnePage();
    *proto.add_blocks() = proto.blocks(0);
    proto.mutable_blocks(1)->set_start(2);
    ASSERT_TRUE(Read(TextOf(proto)).ok());
    change(proto.mutable_blocks(1));
    ExpectRefused(TextOf(proto), code, text, 1);
    EXPECT_GE(*Refusal(TextOf(proto)).byte_offset, static_cast<int64_t>(TextOf(OnePage()).size()));
  };
  second([](B* b) { b->set_start(1); }, Code::kShape, "must start where the page before ends, at 2");
  second([](B* b) { b->set_start(INT64_MAX); }, Code::kShape, "must start where the page before ends, at 2");
  second([](B* b) { *b->mutable_key() = FloatPage({1, 1, 2, 3}, {1, 2, 3, 4, 5, 6}); }, Code::kShape, "head_dim must equal page 0's");
  second([](B* b) { b->mutable_value()->mutable_float_data()->RemoveLast(); }, Code::kShape, "needs 4 values");
}

// ---- Unknown things are kept ----

TEST_F(WireTest, UnknownFieldsAreWrittenBack) {
  const Raw unknown[] = {Int(100, 5), Bin(101, "text"), Raw("\x99\x06") + Raw(8, 'f') /* fixed64 99 */, Hex("ab06 0801 ac06") /* group 101 */};
  Raw extras;
  for (const Raw& field : unknown) extras += field;
  auto key = AffinePage({1, 1, 2, 2}, pb::TensorProto::INT8, Hex("01020304"));
  key.set_name("kname");
  key.set_doc_string("kdoc");
  key.mutable_affine()->mutable_unknown_fields()->append(extras);
  Raw tensor = TextOf(FloatPage({1, 1, 2, 2}, {1, 2, 3, 4})) + Bin(8, "vname") + Bin(12, "vdoc") + Bin(16, Bin(1, "k")) + extras;
  const Raw file = extras + Bin(1, extras + Int(1, 0) + Int(2, 2) + Bin(4, extras + TextOf(key)) + Bin(5, tensor)) + Bin(2, "name");
  const PagedCache cache = MustRead(file);
  const Raw written = Written(cache);
  pb::PagedCacheProto before, after;
  ASSERT_TRUE(before.ParseFromString(file));
  ASSERT_TRUE(after.ParseFromString(written));
  EXPECT_EQ(after.unknown_fields(), before.unknown_fields());
  EXPECT_EQ(after.blocks(0).unknown_fields(), before.blocks(0).unknown_fields());
  EXPECT_EQ(after.blocks(0).encoded_key().unknown_fields(), before.blocks(0).encoded_key().unknown_fields());
  EXPECT_EQ(after.blocks(0).encoded_key().affine().unknown_fields(), before.blocks(0).encoded_key().affine().unknown_fields());
  EXPECT_EQ(after.blocks(0).encoded_key().name(), "kname");
  EXPECT_EQ(after.blocks(0).encoded_key().doc_string(), "kdoc");
  EXPECT_EQ(after.blocks(0).value().unknown_fields(), before.blocks(0).value().unknown_fields());
  EXPECT_EQ(after.blocks(0).value().name(), "vname");
  EXPECT_EQ(after.blocks(0).value().doc_string(), "vdoc");
  EXPECT_EQ(after.blocks(0).value().metadata_props_size(), 1);
  EXPECT_EQ(after.name(), "name");
  EXPECT_EQ(Written(MustRead(written)), written);
}

TEST_F(WireTest, StructuredAndSharedEncodingsAreCarriedByteForByte) {
  const Raw type = Bin(3, TextOf(AffinePage({1, 1, 2, 32}, 1, "").logical_type()));
  const Raw inner = Bin(2, Bin(1, Bin(1, "q") + Bin(2, "")) + Bin(1, Bin(1, "s")));
  const std::map<std::string, Raw> messages = {
      {"Q4_K", Bin(4, "payload") + Bin(2, Bin(7, "Q4_K") + inner) + type + Int(500, 3)},
      {"type 77", Bin(2, Int(4, 77)) + type + Bin(4, "x")},
      {"unnamed structure", Bin(2, inner) + type},
      {"shared parameters", Bin(1, Int(1, 3)) + type + Bin(9, "set") + Bin(4, "x")},
      {"kvpages.int4/tensor/absmax/f32.v2", Bin(2, Bin(7, "kvpages.int4/tensor/absmax/f32.v2") + inner) + type},
      {"kvpages.int5/tensor/absmax/f32.v1", Bin(2, Bin(7, "kvpages.int5/tensor/absmax/f32.v1") + inner) + type},
      {"kvpages.f32.v1", Bin(2, Bin(7, "kvpages.f32.v1") + inner) + type},
      {std::string(80, 'n') + "...", Bin(2, Bin(7, std::string(100000, 'n')) + inner + Bin(5, std::string(100000, 'd'))) + type},
  };
  const Raw value = Bin(5, TextOf(FloatPage({1, 1, 2, 1}, {1, 2})));
  for (const auto& [name, message] : messages) {
    SCOPED_TRACE(name);
    const Raw file = Bin(1, Int(1, 0) + Int(2, 2) + Bin(4, message) + value);
    const PagedCache cache = MustRead(file);
    ASSERT_EQ(cache.pages.size(), 1u);
    const Payload& key = *cache.pages[0].key;
    EXPECT_EQ(key.kind, PayloadKind::kOpaque);
    EXPECT_EQ(key.opaque_name, name);
    EXPECT_EQ(RawOf(key.message), message);
    EXPECT_EQ(key.shape, (Shape{1, 1, 2, 32}));
    EXPECT_NE(Written(cache).find(Bin(4, message)), Raw::npos);
    const int64_t page = 0;
    auto refused = QuantizePagedCache(instance_, cache, {&page, 1}, {1, Type::int8, 0}, {1, Type::int8, 0});
    ASSERT_FALSE(refused.ok());
    EXPECT_EQ(refused.error().code, Code::kUnsupported);
    EXPECT_NE(refused.error().message.find(name), std::string::npos);
  }
  ExpectRefused(Bin(1, Int(1, 0) + Int(2, 2) + Bin(4, Bin(2, Bin(7, "Q4_K")) + type) + value), Code::kCorrupt, "no kind");
  ExpectRefused(Bin(1, Int(1, 0) + Int(2, 2) + Bin(4, Bin(2, Bin(7, "Q4_K") + inner)) + value), Code::kCorrupt, "logical_type is missing");
}

TEST_F(WireTest, OwnLayoutsAreCheckedArrayByArray) {
  const Shape shape{1, 2, 4, 32};
  const auto values = Numbers(shape.elements(), 5);
  const PagedCache cache = CacheOf({{Encoded(shape, "lm3/token/16/mse/e4m3+center+hadamard", values), Dense(shape)}});
  pb::PagedCacheProto proto;
  ASSERT_TRUE(proto.ParseFromString(Written(cache)));
  const auto refused = [&](const std::function<void(pb::EncodedValueProto*)>& change, const char* text) {
    auto changed = proto;
    change(changed.mutable_blocks(0)->mutable_encoded_key());
    const Error error = Refusal(TextOf(changed));
    EXPECT_TRUE(error.code == Code::kCorrupt || error.code == Code::kShape || error.code == Code::kUnsupported) << error.message;
    EXPECT_NE(error.message.find(text), std::string::npos) << error.message;
    EXPECT_EQ(error.side, "key");
    EXPECT_TRUE(error.byte_offset.has_value());
  };
  using E = pb::EncodedValueProto;
  const auto fields = [](E* e) { return e->mutable_struct_type()->mutable_structure()->mutable_field(); };
  ASSERT_EQ(proto.mutable_blocks(0)->mutable_encoded_key()->struct_type().structure().field_size(), 5);
  const auto array = [&](E* e, int i) { return fields(e)->Mutable(i)->mutable_type()->mutable_struct_type()->mutable_array(); };
  refused([&](E* e) { array(e, 0)->set_dimension(1); }, "needs");
  refused([&](E* e) { array(e, 0)->set_dimension(~uint64_t{0}); }, "not an array within raw_data");
  refused([&](E* e) { array(e, 0)->set_dimension(uint64_t{1} << 62); }, "not an array within raw_data");
  refused([&](E* e) { array(e, 2)->set_dimension(e->raw_data().size()); }, "does not fit raw_data");
  refused([&](E* e) { array(e, 1)->mutable_element_type()->mutable_tensor_type()->set_elem_type(7); }, "not an array within raw_data");
  refused([&](E* e) { fields(e)->Mutable(1)->set_name("other"); }, "does not belong");
  refused([&](E* e) { fields(e)->Mutable(1)->set_name("codes"); }, "needs");
  refused([&](E* e) { e->mutable_raw_data()->push_back('x'); }, "raw_data needs");
  refused([&](E* e) { e->mutable_raw_data()->pop_back(); }, "does not fit raw_data");
  refused([&](E* e) { e->clear_raw_data(); }, "raw_data");
  refused([&](E* e) { e->mutable_struct_type()->clear_structure(), e->mutable_struct_type()->set_type_ref(1); }, "lacks an array");
  refused([&](E* e) { fields(e)->Mutable(4)->mutable_constant()->set_int64_data(0, 3); }, "hadamard run");
  refused([&](E* e) { fields(e)->Mutable(4)->mutable_constant()->set_int64_data(0, 64); }, "hadamard run");
  refused([&](E* e) { fields(e)->Mutable(4)->mutable_constant()->set_int64_data(0, 0); }, "hadamard run");
  refused([&](E* e) { fields(e)->Mutable(4)->mutable_constant()->set_int64_data(0, INT64_MIN); }, "hadamard run");
  refused([&](E* e) { fields(e)->RemoveLast(); }, "hadamard run");
  refused([&](E* e) { e->mutable_struct_type()->set_name("kvpages.lm3/token/16/mse/e4m3+hadamard.v1"); }, "does not belong");
  refused([&](E* e) { e->mutable_struct_type()->set_name("kvpages.lm4/token/16/mse/e4m3+center+hadamard.v1"); }, "needs");
  refused([&](E* e) { e->mutable_struct_type()->set_doc_string(std::string(70000, 'x')); }, "larger than 65536");
  // The declared order counts, not ours.
  E* e = proto.mutable_blocks(0)->mutable_encoded_key();
  const Raw raw = e->raw_data();
  const size_t codes = array(e, 0)->dimension(), scales = array(e, 1)->dimension();
  fields(e)->SwapElements(0, 1);
  e->set_raw_data(raw.substr(codes, scales) + raw.substr(0, codes) + raw.substr(codes + scales));
  EXPECT_EQ(DifferenceOf(cache, MustRead(TextOf(proto))), "");
}

// ---- Damage ----

class WireDamageTest : public WireTest {
 protected:
  Raw File() {
    const Shape shape{1, 2, 2, 3};
    const auto values = Numbers(shape.elements(), 21);
    PagedCache cache = CacheOf({{Dense(shape, Type::f16), Dense(shape, Type::f32)},
                                {Encoded(shape, "int4/tensor/given/f32", values), Encoded(shape, "uint4/token/2/minmax/f32", values)},
                                {Encoded(shape, "lm3/token/3/mse/e4m3+center", values), Encoded(shape, "uint2/channel/2/kivi/f16", values)}});
    cache.name = "name";
    Raw raw = Written(cache);
    // A page with a structured encoding of somebody else.
    const Raw type = Bin(3, TextOf(AffinePage({1, 2, 2, 3}, 1, "").logical_type()));
    return raw + Bin(1, Int(1, 6) + Int(2, 1) + Bin(4, Bin(2, Bin(7, "Q4_K") + Bin(2, "")) + type) +
                            Bin(5, TextOf(FloatPage({1, 2, 2, 3}, {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}))));
  }
  void ExpectRefusedOrGood(const Raw& raw, const std::string& what) {
    const uint64_t before = instance_->budget->used();
    auto cache = Read(raw);
    if (cache.ok()) {
      Use(cache.value());
      return;
    }
    const Error& error = cache.error();
    ASSERT_TRUE(error.byte_offset.has_value()) << what << ": " << error.message;
    ASSERT_LE(*error.byte_offset, static_cast<int64_t>(raw.size())) << what << ": " << error.message;
    ASSERT_EQ(error.argument, "bytes") << what;
    ASSERT_TRUE(error.code == Code::kCorrupt || error.code == Code::kUnsupported || error.code == Code::kShape) << what << ": " << error.message;
    ASSERT_EQ(instance_->budget->used(), before) << what;
  }
};

TEST_F(WireDamageTest, TruncationAtEveryByte) {
  const Raw file = File();
  const auto fields = FieldsOf(file);
  std::vector<size_t> ends{0};
  for (const auto& field : fields) ends.push_back(ends.back() + field.second.size());
  for (size_t size = 0; size < file.size(); ++size) {
    const bool whole_fields = std::find(ends.begin(), ends.end(), size) != ends.end();
    EXPECT_EQ(Read(file.substr(0, size)).ok(), whole_fields) << size;
    ExpectRefusedOrGood(file.substr(0, size), std::to_string(size));
  }
}

TEST_F(WireDamageTest, EveryBitFlip) {
  const Raw file = File();
  ASSERT_TRUE(Read(file).ok());
  for (size_t bit = 0; bit < file.size() * 8; ++bit) {
    Raw flipped = file;
    flipped[bit / 8] = static_cast<char>(static_cast<uint8_t>(flipped[bit / 8]) ^ 1u << bit % 8);
    ExpectRefusedOrGood(flipped, "bit " + std::to_string(bit));
    if (HasFailure()) return;
  }
}

TEST_F(WireDamageTest, BytesRemovedDoubledAndReplaced) {
  const Raw file = File();
  std::mt19937 random(5);
  for (int round = 0; round < 3000; ++round) {
    Raw other = file;
    for (uint32_t n = random() % 3 + 1; n > 0; --n) {
      const size_t at = random() % other.size();
      switch (random() % 4) {
        case 0: other.erase(at, 1 + random() % 4); break;
        case 1: other.insert(at, other.substr(at, 1 + random() % 40)); break;
        case 2: other[at] = static_cast<char>(random()); break;
        default: other.insert(at, Varint(random() | uint64_t{random()} << (random() % 32))); break;
      }
    }
    ExpectRefusedOrGood(other, "round " + std::to_string(round));
    if (HasFailure()) return;
  }
}

// ---- Hostile sizes ----

TEST_F(WireTest, HostileSizesTakeNoMemory) {
  instance_->budget = std::make_shared<Budget>(4096);
  const auto page = [](const Raw& tensor) { return Bin(1, Int(1, 0) + Int(2, 1) + Bin(3, tensor) + Bin(5, tensor)); };
  for (const uint64_t dim : {uint64_t{1} << 62, uint64_t{1} << 31, uint64_t{1} << 60, (uint64_t{1} << 63) - 1, ~uint64_t{0}, uint64_t{1} << 63}) {
    for (int axis = 0; axis < 4; ++axis) {
      Raw dims;
      for (int i = 0; i < 4; ++i) dims += Int(1, i == axis ? dim : 1);
      ExpectRefused(page(dims + Int(2, 1) + Bin(9, "abcd")), Code::kShape, "");
      ExpectRefused(page(dims + Int(2, 1) + Bin(4, "abcd")), Code::kShape, "");
      ExpectRefused(page(dims + Int(2, 10) + Bin(5, "abcd")), Code::kShape, "");
      pb::EncodedValueProto encoded = AffinePage({1, 1, 1, 1}, pb::TensorProto::INT8, "x");
      encoded.mutable_logical_type()->mutable_tensor_type()->mutable_shape()->mutable_dim(axis)->set_dim_value(static_cast<int64_t>(dim));
      encoded.mutable_affine()->set_axis(axis);
      ExpectRefused(Bin(1, Int(1, 0) + Int(2, 1) + Bin(4, TextOf(encoded)) + Bin(5, "")), Code::kShape, "");
    }
  }
  for (const uint64_t length : {uint64_t{1} << 31, uint64_t{1} << 32, uint64_t{0x7fffffff}, uint64_t{1} << 63, ~uint64_t{0}, uint64_t{100}}) {
    for (const int field : {1, 2, 3, 99}) {
      ExpectRefused(Varint(static_cast<uint64_t>(field) << 3 | 2) + Varint(length) + "abc", Code::kCorrupt, "claims", -1);
    }
    for (const int field : {3, 4, 5, 6, 99}) ExpectRefused(Bin(1, Varint(static_cast<uint64_t>(field) << 3 | 2) + Varint(length) + "abc"), Code::kCorrupt, "claims");
    for (const int field : {1, 4, 5, 9, 99}) ExpectRefused(Bin(1, Int(1, 0) + Int(2, 1) + Bin(3, Varint(static_cast<uint64_t>(field) << 3 | 2) + Varint(length))), Code::kCorrupt, "claims");
  }
  // More than the limit, honestly meant.
  Raw big = Int(1, 1) + Int(1, 1) + Int(1, 64) + Int(1, 64) + Int(2, 1) + Bin(9, Raw(64 * 64 * 4, '\0'));
  const Error error = Refusal(page(big));
  EXPECT_EQ(error.code, Code::kLimit);
  EXPECT_EQ(instance_->budget->used(), 0u);
}

TEST_F(WireTest, DeepNestingIsRefused) {
  Raw groups;
  for (int i = 0; i < 100000; ++i) groups += '\x53';  // group 10 begins
  ExpectRefused(groups, Code::kCorrupt, "broken group", -1);
  for (int i = 0; i < 100000; ++i) groups += '\x54';
  ExpectRefused(groups, Code::kCorrupt, "broken group", -1);
  ExpectRefused(Hex("54"), Code::kCorrupt, "broken group", -1);
  ExpectRefused(Hex("5354 53"), Code::kCorrupt, "broken group", -1);
  // A type inside a type inside a type.
  Raw type = "";
  for (int i = 0; i < 10000 && type.size() < 60000; ++i) type = Bin(1000, Bin(1, Bin(1, type)));
  const Raw value = Bin(5, TextOf(FloatPage({1, 1, 1, 1}, {1})));
  ExpectRefused(Bin(1, Int(1, 0) + Int(2, 1) + Bin(4, Bin(1, Int(1, 3)) + Bin(3, type)) + value), Code::kCorrupt, "not a valid message");
  for (const char* tag : {"00", "07", "0e", "0f", "8080808080808080808080", "06", "ffffffffff7f00"}) ExpectRefused(Hex(tag), Code::kCorrupt, "at byte 0", -1);
}

TEST_F(WireTest, MistakenWireTypesAreRefusedOrKept) {
  ExpectRefused(Int(1, 5), Code::kCorrupt, "blocks has wire type 0", -1);
  ExpectRefused(Bin(1, Bin(1, "") + Int(2, 1)), Code::kCorrupt, "start has wire type 2");
  ExpectRefused(Bin(1, Int(1, 0) + Bin(2, "")), Code::kCorrupt, "length has wire type 2");
  ExpectRefused(Bin(1, Int(1, 0) + Int(2, 1) + Int(3, 1)), Code::kCorrupt, "key has wire type 0");
  ExpectRefused(Bin(1, Int(1, 0) + Int(2, 1) + Bin(3, Int(9, 1))), Code::kCorrupt, "raw_data has wire type 0");
  ExpectRefused(Bin(1, Int(1, 0) + Int(2, 1) + Bin(3, Int(4, 1))), Code::kCorrupt, "float_data has wire type 0");
}

}  // namespace
}  // namespace kvpages
