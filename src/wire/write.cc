// SPDX-License-Identifier: Apache-2.0
// PagedCache -> bytes of a PagedCacheProto, in onnx-light's field order. Small fields are built first, payload bytes are
// copied once, from page memory into the caller's buffer.
#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/wire_format_lite.h>

#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "wire/kvpages.pb.h"
#include "wire/layout.h"
#include "wire/wire.h"

namespace kvpages {
namespace {

namespace pb = kvpages_wire;
using google::protobuf::internal::WireFormatLite;
using google::protobuf::io::CodedOutputStream;

// A message as pieces: text that is built here, and blocks that stay where they are until they are copied out.
class Pieces {
 public:
  void Varint(uint64_t value) {
    uint8_t buffer[10];
    const uint8_t* end = CodedOutputStream::WriteVarint64ToArray(value, buffer);
    Text({reinterpret_cast<const char*>(buffer), static_cast<size_t>(end - buffer)});
  }
  void Tag(int field, WireFormatLite::WireType type) { Varint(WireFormatLite::MakeTag(field, type)); }
  void Int(int field, int64_t value) {
    Tag(field, WireFormatLite::WIRETYPE_VARINT);
    Varint(static_cast<uint64_t>(value));
  }
  void String(int field, std::string_view value) {
    Tag(field, WireFormatLite::WIRETYPE_LENGTH_DELIMITED);
    Varint(value.size());
    Text(value);
  }
  void Message(int field, const google::protobuf::MessageLite& message) { String(field, message.SerializeAsString()); }
  void Message(int field, Pieces&& message) {
    Tag(field, WireFormatLite::WIRETYPE_LENGTH_DELIMITED);
    Varint(message.size_);
    for (Piece& piece : message.pieces_) {
      if (piece.data == nullptr) Text(piece.text);
      else Block(piece.data, piece.size);
    }
  }
  void Text(std::string_view text) {
    if (pieces_.empty() || pieces_.back().data != nullptr) pieces_.emplace_back();
    pieces_.back().text.append(text);
    size_ += text.size();
  }
  void Block(const void* data, uint64_t size) {
    if (size == 0) return;
    pieces_.push_back({{}, static_cast<const uint8_t*>(data), size});
    size_ += size;
  }
  uint64_t size() const { return size_; }
  void CopyTo(uint8_t* out) const {
    for (const Piece& piece : pieces_) {
      const uint64_t bytes = piece.data == nullptr ? piece.text.size() : piece.size;
      std::memcpy(out, piece.data == nullptr ? reinterpret_cast<const uint8_t*>(piece.text.data()) : piece.data, static_cast<size_t>(bytes));
      out += bytes;
    }
  }

 private:
  struct Piece {
    std::string text;
    const uint8_t* data = nullptr;
    uint64_t size = 0;
  };
  std::vector<Piece> pieces_;
  uint64_t size_ = 0;
};

pb::TypeProto LogicalType(const Shape& shape) {
  pb::TypeProto type;
  type.mutable_tensor_type()->set_elem_type(pb::TensorProto::FLOAT);
  for (int axis = 0; axis < 4; ++axis) type.mutable_tensor_type()->mutable_shape()->add_dim()->set_dim_value(shape[axis]);
  return type;
}

void AddParameterDims(const Payload& payload, pb::TensorProto* tensor) {
  if (payload.axis < 0) return;
  for (int k = 0; k < 4; ++k) {
    if (payload.block == 0 && k != payload.axis) continue;
    tensor->add_dims(k == payload.axis && payload.block > 0 ? CeilDiv(payload.shape[k], payload.block) : payload.shape[k]);
  }
}

pb::AffineLayoutProto AffineOf(const Payload& payload) {
  const TypeInfo& info = Info(payload.spec.type);
  pb::AffineLayoutProto affine;
  affine.set_storage_type(info.onnx);
  pb::TensorProto* scale = affine.mutable_scale();
  scale->set_data_type(pb::TensorProto::FLOAT);
  AddParameterDims(payload, scale);
  scale->set_raw_data(payload.scales.data(), payload.scales.size());
  if (payload.has_zeros) {
    pb::TensorProto* zero = affine.mutable_zero_point();
    zero->set_data_type(info.onnx);
    AddParameterDims(payload, zero);
    const auto count = static_cast<size_t>(payload.grid.count);
    std::string raw(static_cast<size_t>(PackedBytes(info.bits, payload.grid.count)), '\0');
    if (count == 1) {
      raw[0] = static_cast<char>(payload.zero_byte);
    } else {
      const unsigned mask = info.bits == 8 ? 0xffu : (1u << info.bits) - 1;
      for (size_t i = 0; i < count; ++i) {
        const size_t bit = i * static_cast<size_t>(info.bits);
        raw[bit / 8] = static_cast<char>(static_cast<uint8_t>(raw[bit / 8]) | (payload.zeros.data()[i] & mask) << bit % 8);
      }
    }
    zero->set_raw_data(std::move(raw));
  }
  if (payload.axis >= 0) affine.set_axis(payload.axis);
  if (payload.block > 0) affine.set_block_size(static_cast<uint64_t>(payload.block));
  if (payload.extras) affine.mutable_unknown_fields()->append(payload.extras->affine);
  return affine;
}

// Arrays of the library's own layout, in their order.
struct Array {
  const char* name;
  int element;
  const void* data;
  uint64_t bytes;
};
std::vector<Array> ArraysOf(const Payload& payload, bool with_center) {
  const ArraySizes sizes = SizesOf(payload.spec, payload.shape);
  const bool kivi = payload.spec.calibration == Calibration::kKivi;
  const int scale_element = Info(payload.spec.type).family == Family::kScheme ? layout::kUint8 : layout::ScaleElement(payload.spec.scale_type);
  std::vector<Array> arrays;
  arrays.push_back({layout::kCodes, layout::kUint8, payload.codes.data(), payload.codes.size()});
  if (sizes.scales > 0) arrays.push_back({layout::kScales, scale_element, payload.scales.data(), payload.scales.size()});
  if (sizes.zeros > 0) arrays.push_back({layout::kZeros, kivi ? scale_element : layout::kUint8, payload.zeros.data(), payload.zeros.size()});
  if (sizes.has_global) arrays.push_back({layout::kGlobal, layout::kFloat, &payload.global, 4});
  if (with_center) arrays.push_back({layout::kCenter, layout::kBFloat16, payload.center.data(), payload.center.size()});
  return arrays;
}

pb::StructTypeProto StructureOf(const Payload& payload, const std::vector<Array>& arrays) {
  pb::StructTypeProto type;
  type.set_name(layout::NameOf(payload.spec));
  for (const Array& array : arrays) {
    auto* field = type.mutable_structure()->add_field();
    field->set_name(array.name);
    auto* inner = field->mutable_type()->mutable_struct_type()->mutable_array();
    inner->mutable_element_type()->mutable_tensor_type()->set_elem_type(array.element);
    inner->set_dimension(array.bytes / static_cast<uint64_t>(layout::ElementBytes(array.element)));
  }
  if (payload.hadamard > 0) {
    auto* field = type.mutable_structure()->add_field();
    field->set_name(layout::kHadamard);
    field->mutable_constant()->set_data_type(pb::TensorProto::INT64);
    field->mutable_constant()->add_int64_data(payload.hadamard);
  }
  return type;
}

bool SameBytes(const SharedBytes& a, const SharedBytes& b) {
  return a.Same(b) || (a.size() == b.size() && a.size() > 0 && std::memcmp(a.data(), b.data(), static_cast<size_t>(a.size())) == 0);
}

// `last_center`: the centre that a reader knows from the pages before.
void AddSide(Pieces* block, int dense_field, int encoded_field, const Payload& payload, SharedBytes* last_center) {
  Pieces message;
  if (payload.kind == PayloadKind::kOpaque) {
    message.Block(payload.message.data(), payload.message.size());
    block->Message(encoded_field, std::move(message));
    return;
  }
  if (payload.kind == PayloadKind::kDense) {
    using T = pb::TensorProto;
    for (int axis = 0; axis < 4; ++axis) message.Int(T::kDimsFieldNumber, payload.shape[axis]);
    message.Int(T::kDataTypeFieldNumber, Info(payload.dense_type).onnx);
    message.Tag(T::kRawDataFieldNumber, WireFormatLite::WIRETYPE_LENGTH_DELIMITED);
    message.Varint(payload.data.size());
    message.Block(payload.data.data(), payload.data.size());
    if (payload.extras) message.Text(payload.extras->tensor);
    block->Message(dense_field, std::move(message));
    return;
  }
  using E = pb::EncodedValueProto;
  std::vector<Array> arrays;
  if (payload.affine) {
    message.Message(E::kAffineFieldNumber, AffineOf(payload));
    arrays.push_back({layout::kCodes, layout::kUint8, payload.codes.data(), payload.codes.size()});
  } else {
    const bool with_center = !payload.center.empty() && !SameBytes(payload.center, *last_center);
    arrays = ArraysOf(payload, with_center);
    if (!payload.center.empty()) *last_center = payload.center;
    message.Message(E::kStructTypeFieldNumber, StructureOf(payload, arrays));
  }
  message.Message(E::kLogicalTypeFieldNumber, LogicalType(payload.shape));
  uint64_t raw_bytes = 0;
  for (const Array& array : arrays) raw_bytes += array.bytes;
  message.Tag(E::kRawDataFieldNumber, WireFormatLite::WIRETYPE_LENGTH_DELIMITED);
  message.Varint(raw_bytes);
  for (const Array& array : arrays) message.Block(array.data, array.bytes);
  if (payload.extras) message.Text(payload.extras->tensor);
  block->Message(encoded_field, std::move(message));
}

void AddPage(Pieces* all, const Page& page, SharedBytes centers[2]) {
  using B = pb::PagedCacheBlockProto;
  Pieces block;
  block.Int(B::kStartFieldNumber, page.start);
  block.Int(B::kLengthFieldNumber, page.length);
  AddSide(&block, B::kKeyFieldNumber, B::kEncodedKeyFieldNumber, *page.key, &centers[0]);
  AddSide(&block, B::kValueFieldNumber, B::kEncodedValueFieldNumber, *page.value, &centers[1]);
  if (page.extras) block.Text(*page.extras);
  all->Message(pb::PagedCacheProto::kBlocksFieldNumber, std::move(block));
}

Pieces Build(const PagedCache& cache) {
  using P = pb::PagedCacheProto;
  Pieces all;
  SharedBytes centers[2];
  for (const Page& page : cache.pages) AddPage(&all, page, centers);
  if (cache.name) all.String(P::kNameFieldNumber, *cache.name);
  if (cache.doc_string) all.String(P::kDocStringFieldNumber, *cache.doc_string);
  all.Text(cache.extras);
  return all;
}

}  // namespace

Result<Bytes> SerializePage(const Page& page, SharedBytes centers[2]) {
  Pieces pieces;
  AddPage(&pieces, page, centers);
  KVP_ASSIGN(Bytes bytes, Bytes::AllocateRaw(pieces.size()));
  pieces.CopyTo(bytes.data());
  return bytes;
}

uint64_t SerializedSize(const PagedCache& cache) { return Build(cache).size(); }

Status SerializePagedCache(const PagedCache& cache, std::span<uint8_t> out) {
  const Pieces pieces = Build(cache);
  if (out.size() != pieces.size()) {
    return MakeError(Code::kBuffer, "out", "must hold exactly " + std::to_string(pieces.size()) + " bytes", std::to_string(out.size()))
        .Expected(std::to_string(pieces.size()));
  }
  if (pieces.size() > INT32_MAX) {  // no protobuf reader takes more
    return MakeError(Code::kLimit, "cache", "a PagedCacheProto holds at most 2147483647 bytes", std::to_string(pieces.size()));
  }
  pieces.CopyTo(out.data());
  return Ok();
}

}  // namespace kvpages
