// SPDX-License-Identifier: Apache-2.0
// The wire room against full protobuf over the same schema. Sees the library through its C ABI only.
#include <google/protobuf/util/message_differencer.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "full/kvpages.pb.h"
#include "kvpages.h"

namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;
using google::protobuf::util::MessageDifferencer;
namespace full = kvpages_full;

std::string LastError() {
  uint32_t blob = 0;
  double size = 0;
  if (kvp_last_error(&blob, 1) != 0 || kvp_blob_size(blob, &size, 1) != 0) return "";
  std::string text(static_cast<size_t>(size), '\0');
  EXPECT_EQ(kvp_blob_read(blob, reinterpret_cast<uint8_t*>(text.data()), text.size()), 0);
  kvp_release(blob);
  return text;
}

class WireDifferential : public ::testing::Test {
 protected:
  void SetUp() override { ASSERT_EQ(kvp_instance_create("auto", 4, 0, &instance_, 1), 0) << LastError(); }
  void TearDown() override { kvp_release(instance_); }

  // 0 where the file is refused.
  uint32_t Parse(const std::string& bytes) {
    uint32_t cache = 0;
    const std::vector<uint8_t> copy(bytes.begin(), bytes.end());
    return kvp_paged_parse(instance_, copy.data(), copy.size(), &cache, 1) == 0 ? cache : 0;
  }
  static std::string Write(uint32_t cache) {
    double size = 0;
    EXPECT_EQ(kvp_paged_serialized_size(cache, &size, 1), 0) << LastError();
    std::vector<uint8_t> out(static_cast<size_t>(size));
    EXPECT_EQ(kvp_paged_serialize(cache, out.data(), out.size()), 0) << LastError();
    return {out.begin(), out.end()};
  }
  uint32_t Quantized(const std::string& spec, const std::vector<int64_t>& dims, const std::vector<float>& x) {
    std::vector<uint8_t> data(x.size() * 4);
    std::memcpy(data.data(), x.data(), data.size());
    uint32_t payload = 0;
    EXPECT_EQ(kvp_quantize(instance_, data.data(), data.size(), "f32", 3, dims.data(), dims.size(), nullptr, 0, -1, spec.data(), spec.size(),
                           "key", 3, "", 0, nullptr, 0, nullptr, 0, &payload, 1), 0) << LastError();
    return payload;
  }
  uint32_t instance_ = 0;
};

constexpr const char* kSpecs[] = {"f32", "f16", "bf16", "int8", "int4/head", "uint4/channel/16", "uint2/token/16", "int3/token/16",
                                  "lm4/token/64/mse/e4m3+center+hadamard", "nvfp4", "mxfp8", "q4_0", "uint4/channel/32/kivi/f16", "e4m3"};

TEST_F(WireDifferential, OurBytesAreTheBytesOfFullProtobuf) {
  const std::vector<int64_t> dims{1, 2, 16, 64};
  std::vector<float> x(2 * 16 * 64);
  std::mt19937 random(5);
  std::normal_distribution<float> normal;
  for (float& value : x) value = normal(random);
  uint32_t cache = 0;
  ASSERT_EQ(kvp_paged_create(instance_, &cache, 1), 0);
  double start = 0;
  for (const char* spec : kSpecs) {
    const uint32_t payload = Quantized(spec, dims, x);
    ASSERT_NE(payload, 0u) << spec;
    ASSERT_EQ(kvp_paged_add(cache, start, 16, payload, payload), 0) << LastError();
    start += 16;
    kvp_release(payload);
  }
  const std::string bytes = Write(cache);
  full::PagedCacheProto message;
  ASSERT_TRUE(message.ParseFromString(bytes));
  EXPECT_EQ(message.blocks_size(), static_cast<int>(std::size(kSpecs)));
  EXPECT_EQ(message.SerializeAsString(), bytes);
  ASSERT_TRUE(message.GetReflection()->GetUnknownFields(message).empty());
  EXPECT_EQ(message.blocks(0).key().raw_data(), std::string(reinterpret_cast<const char*>(x.data()), x.size() * 4));
  EXPECT_EQ(message.blocks(3).encoded_key().affine().storage_type(), full::TensorProto::INT8);
  EXPECT_TRUE(message.blocks(0).has_start());
  const uint32_t back = Parse(message.SerializeAsString());
  ASSERT_NE(back, 0u) << LastError();
  EXPECT_EQ(Write(back), bytes);
  kvp_release(back);
  kvp_release(cache);
}

// Fills fields at random, values from those that matter to a reader; `depth` bounds the messages below.
class Filler {
 public:
  explicit Filler(uint32_t seed) : random_(seed) {}
  uint32_t Below(uint32_t n) { return static_cast<uint32_t>(random_() % n); }
  void Fill(Message* message, int depth, uint32_t one_in) {
    const Descriptor* type = message->GetDescriptor();
    const Reflection* reflection = message->GetReflection();
    for (int i = 0; i < type->field_count(); ++i) {
      const FieldDescriptor* field = type->field(i);
      if (Below(one_in) != 0) continue;
      const uint32_t count = field->is_repeated() ? 1 + Below(4) : 1;
      for (uint32_t k = 0; k < count; ++k) Set(message, reflection, field, depth, one_in);
    }
    if (Below(20) == 0) reflection->MutableUnknownFields(message)->AddVarint(static_cast<int>(2000 + Below(9)), random_());
  }
  // A page that can be read, before damage.
  void Valid(full::PagedCacheBlockProto* block, int64_t start) {
    block->set_start(start);
    block->set_length(2);
    Dense(block->mutable_key());
    if (Below(2) == 0) Affine(block->mutable_encoded_value());
    else Dense(block->mutable_value());
  }

 private:
  void Dense(full::TensorProto* tensor) {
    for (const int dim : {1, 1, 2, 4}) tensor->add_dims(dim);
    const uint32_t kind = Below(4);
    tensor->set_data_type(kind < 2 ? full::TensorProto::FLOAT : full::TensorProto::BFLOAT16);
    if (kind == 0) tensor->set_raw_data(std::string(32, 'a'));
    if (kind == 1) for (int i = 0; i < 8; ++i) tensor->add_float_data(static_cast<float>(i));
    if (kind == 2) tensor->set_raw_data(std::string(16, 'b'));
    if (kind == 3) for (int i = 0; i < 8; ++i) tensor->add_int32_data(i * 1000);
  }
  void Affine(full::EncodedValueProto* value) {
    value->mutable_affine()->set_storage_type(full::TensorProto::INT4);
    full::TensorProto* scale = value->mutable_affine()->mutable_scale();
    scale->set_data_type(full::TensorProto::FLOAT);
    if (Below(2) == 0) {
      scale->add_float_data(0.5f);
    } else {
      value->mutable_affine()->set_axis(-1);
      scale->add_dims(4);
      scale->set_raw_data(std::string("\0\0\x80\x3f\0\0\x80\x3f\0\0\x80\x3f\0\0\x80\x3f", 16));
    }
    auto* tensor = value->mutable_logical_type()->mutable_tensor_type();
    tensor->set_elem_type(full::TensorProto::FLOAT);
    for (const int dim : {1, 1, 2, 4}) tensor->mutable_shape()->add_dim()->set_dim_value(dim);
    value->set_raw_data("abcd");
  }
  int64_t Number() {
    constexpr int64_t kNumbers[] = {0, 1, 1, 2, 2, 3, 4, 16, -1, INT64_MAX, INT64_MIN};
    return kNumbers[Below(std::size(kNumbers))];
  }
  void Set(Message* message, const Reflection* reflection, const FieldDescriptor* field, int depth, uint32_t one_in) {
    const bool many = field->is_repeated();
    switch (field->cpp_type()) {
      case FieldDescriptor::CPPTYPE_INT32: {
        const auto value = static_cast<int32_t>(Below(3) == 0 ? Number() : Below(28));
        many ? reflection->AddInt32(message, field, value) : reflection->SetInt32(message, field, value);
        break;
      }
      case FieldDescriptor::CPPTYPE_INT64:
        many ? reflection->AddInt64(message, field, Number()) : reflection->SetInt64(message, field, Number());
        break;
      case FieldDescriptor::CPPTYPE_UINT32:
        reflection->SetUInt32(message, field, Below(9));
        break;
      case FieldDescriptor::CPPTYPE_UINT64: {
        const auto value = static_cast<uint64_t>(Number());
        many ? reflection->AddUInt64(message, field, value) : reflection->SetUInt64(message, field, value);
        break;
      }
      case FieldDescriptor::CPPTYPE_FLOAT:
        reflection->AddFloat(message, field, static_cast<float>(Below(9)) / 4);
        break;
      case FieldDescriptor::CPPTYPE_DOUBLE:
        reflection->AddDouble(message, field, 0.5);
        break;
      case FieldDescriptor::CPPTYPE_BOOL:
        reflection->SetBool(message, field, Below(2) == 0);
        break;
      case FieldDescriptor::CPPTYPE_ENUM:
        reflection->SetEnumValue(message, field, static_cast<int>(Below(2)));
        break;
      case FieldDescriptor::CPPTYPE_STRING: {
        const std::string value(Below(6) == 0 ? 32 : Below(9), 'x');
        many ? reflection->AddString(message, field, value) : reflection->SetString(message, field, value);
        break;
      }
      case FieldDescriptor::CPPTYPE_MESSAGE:
        if (depth == 0) break;
        Fill(many ? reflection->AddMessage(message, field) : reflection->MutableMessage(message, field), depth - 1, one_in);
        break;
    }
  }
  std::mt19937_64 random_;
};

// Values of a tensor in one spelling, whichever it came in.
full::TensorProto RawSpelling(const full::TensorProto& tensor) {
  full::TensorProto raw = tensor;
  if (!raw.has_raw_data()) {
    std::string data;
    if (tensor.data_type() == full::TensorProto::FLOAT) {
      for (const float value : tensor.float_data()) data.append(reinterpret_cast<const char*>(&value), 4);
    } else {
      for (const int32_t value : tensor.int32_data()) data.append(reinterpret_cast<const char*>(&value), 2);
    }
    raw.set_raw_data(data);
  }
  raw.clear_float_data();
  raw.clear_int32_data();
  raw.clear_data_location();  // DEFAULT, which is what its absence means
  return raw;
}
void ExpectEqual(const full::TensorProto& theirs, const full::TensorProto& ours) {
  if (theirs.dims_size() == 0) return;  // the side is in its other alternative
  EXPECT_TRUE(MessageDifferencer::Equals(RawSpelling(theirs), RawSpelling(ours))) << theirs.ShortDebugString() << "\n" << ours.ShortDebugString();
}
void ExpectEqual(const full::EncodedValueProto& theirs, const full::EncodedValueProto& ours) {
  if (!theirs.has_affine() || theirs.has_parameter_ref()) {  // carried
    EXPECT_TRUE(MessageDifferencer::Equals(theirs, ours)) << theirs.ShortDebugString();
    return;
  }
  EXPECT_EQ(theirs.raw_data(), ours.raw_data());
  EXPECT_EQ(theirs.name(), ours.name());
  EXPECT_EQ(theirs.has_doc_string(), ours.has_doc_string());
  EXPECT_EQ(RawSpelling(theirs.affine().scale()).raw_data(), ours.affine().scale().raw_data());
  EXPECT_EQ(theirs.affine().has_zero_point(), ours.affine().has_zero_point());
  EXPECT_EQ(theirs.affine().has_axis(), ours.affine().has_axis());
  EXPECT_EQ(theirs.affine().block_size(), ours.affine().block_size());
}

// Read, or refused with a position. What is read keeps its content: a second writer and reader change nothing.
TEST_F(WireDifferential, RandomMessages) {
  int read = 0, refused = 0;
  for (uint32_t seed = 0; seed < 4000; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Filler filler(seed);
    full::PagedCacheProto message;
    const bool any = filler.Below(4) == 0;
    if (any) {
      filler.Fill(&message, 6, 2);
    } else {
      for (int64_t page = 0; page < 1 + filler.Below(3); ++page) {
        filler.Valid(message.add_blocks(), page * 2);
        if (filler.Below(3) != 0) continue;
        // Fields on top of a good page: some of them break it.
        filler.Fill(message.mutable_blocks(static_cast<int>(page)), 3, 12);
      }
    }
    const std::string bytes = message.SerializeAsString();
    const uint32_t cache = Parse(bytes);
    if (cache == 0) {
      ++refused;
      const std::string error = LastError();
      EXPECT_NE(error.find("\"byteOffset\""), std::string::npos) << error << message.ShortDebugString();
      continue;
    }
    ++read;
    const std::string written = Write(cache);
    kvp_release(cache);
    full::PagedCacheProto ours;
    ASSERT_TRUE(ours.ParseFromString(written));
    ASSERT_EQ(ours.blocks_size(), message.blocks_size());
    EXPECT_EQ(ours.name(), message.name());
    EXPECT_EQ(ours.has_doc_string(), message.has_doc_string());
    for (int i = 0; i < ours.blocks_size(); ++i) {
      const auto& a = message.blocks(i);
      const auto& b = ours.blocks(i);
      EXPECT_EQ(a.start(), b.start());
      EXPECT_EQ(a.length(), b.length());
      ASSERT_EQ(a.key_payload_case(), b.key_payload_case());
      ASSERT_EQ(a.value_payload_case(), b.value_payload_case());
      ExpectEqual(a.key(), b.key());
      ExpectEqual(a.value(), b.value());
      if (a.has_encoded_value()) ExpectEqual(a.encoded_value(), b.encoded_value());
      if (a.has_encoded_key()) ExpectEqual(a.encoded_key(), b.encoded_key());
    }
    const uint32_t again = Parse(written);
    ASSERT_NE(again, 0u) << LastError();
    EXPECT_EQ(Write(again), written);
    kvp_release(again);
  }
  EXPECT_GT(read, 1000);
  EXPECT_GT(refused, 500);
}

}  // namespace
