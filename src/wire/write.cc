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
  Pieces() {
    text_.reserve(160);
    pieces_.reserve(12);
  }
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
  void Data(int field, const void* data, uint64_t size) {
    Tag(field, WireFormatLite::WIRETYPE_LENGTH_DELIMITED);
    Varint(size);
    Block(data, size);
  }
  void Message(int field, const Pieces& message) {
    Tag(field, WireFormatLite::WIRETYPE_LENGTH_DELIMITED);
    Varint(message.size_);
    size_t text = 0;
    for (const Piece& piece : message.pieces_) {
      if (piece.data != nullptr) {
        Block(piece.data, piece.size);
      } else {
        Text(std::string_view(message.text_).substr(text, static_cast<size_t>(piece.size)));
        text += static_cast<size_t>(piece.size);
      }
    }
  }
  void Text(std::string_view text) {
    if (text.empty()) return;
    if (pieces_.empty() || pieces_.back().data != nullptr) pieces_.push_back({nullptr, 0});
    pieces_.back().size += text.size();
    text_.append(text);
    size_ += text.size();
  }
  void Block(const void* data, uint64_t size) {
    if (size == 0) return;
    pieces_.push_back({static_cast<const uint8_t*>(data), size});
    size_ += size;
  }
  uint64_t size() const { return size_; }
  void CopyTo(uint8_t* out) const {
    const char* text = text_.data();
    for (const Piece& piece : pieces_) {
      const void* from = piece.data;
      if (from == nullptr) {
        from = text;
        text += piece.size;
      }
      std::memcpy(out, from, static_cast<size_t>(piece.size));
      out += piece.size;
    }
  }

 private:
  struct Piece {
    const uint8_t* data;  // null: the next `size` bytes of text_
    uint64_t size;
  };
  std::string text_;
  std::vector<Piece> pieces_;
  uint64_t size_ = 0;
};

pb::TypeProto LogicalType(const Shape& shape) {
  pb::TypeProto type;
  type.mutable_tensor_type()->set_elem_type(pb::TensorProto::FLOAT);
  for (int axis = 0; axis < 4; ++axis) type.mutable_tensor_type()->mutable_shape()->add_dim()->set_dim_value(shape[axis]);
  return type;
}

// Scale or zero point up to its data: dims, data_type.
Pieces ParameterHead(const Payload& payload, int onnx_type) {
  using T = pb::TensorProto;
  Pieces tensor;
  for (int k = 0; k < 4 && payload.axis >= 0; ++k) {
    if (payload.block == 0 && k != payload.axis) continue;
    tensor.Int(T::kDimsFieldNumber,
               k == payload.axis && payload.block > 0 ? CeilDiv(payload.shape[k], payload.block) : payload.shape[k]);
  }
  tensor.Int(T::kDataTypeFieldNumber, onnx_type);
  return tensor;
}

// Zero points as a tensor holds them, packed like codes.
template <int kBits>
void PackZeros(const uint8_t* zeros, int64_t count, char* out) {
  constexpr int kPerByte = 8 / kBits;
  constexpr unsigned kMask = (1u << kBits) - 1;
  for (; count > 0; count -= kPerByte, zeros += kPerByte) {
    unsigned all = 0;
    for (int i = 0; i < kPerByte; ++i) all |= (zeros[i] & kMask) << (i * kBits);  // a block of memory ends with zeros
    *out++ = static_cast<char>(all);
  }
}
std::string PackedZeros(const Payload& payload) {
  const int bits = Info(payload.spec.type).bits;
  std::string raw(static_cast<size_t>(PackedBytes(bits, payload.grid.count)), '\0');
  (bits == 4 ? PackZeros<4> : PackZeros<2>)(payload.zeros.data(), payload.grid.count, raw.data());
  return raw;
}

Pieces AffineOf(const Payload& payload, bool measure) {
  using A = pb::AffineLayoutProto;
  using T = pb::TensorProto;
  const TypeInfo& info = Info(payload.spec.type);
  Pieces affine;
  affine.Int(A::kStorageTypeFieldNumber, info.onnx);
  Pieces scale = ParameterHead(payload, T::FLOAT);
  scale.Data(T::kRawDataFieldNumber, payload.scales.data(), payload.scales.size());
  affine.Message(A::kScaleFieldNumber, scale);
  if (payload.has_zeros) {
    Pieces zero = ParameterHead(payload, info.onnx);
    if (payload.grid.count == 1) {
      zero.String(T::kRawDataFieldNumber, {reinterpret_cast<const char*>(&payload.zero_byte), 1});
    } else if (measure) {  // only the size counts
      zero.Data(T::kRawDataFieldNumber, payload.zeros.data(), static_cast<uint64_t>(PackedBytes(info.bits, payload.grid.count)));
    } else if (info.bits == 8) {
      zero.Data(T::kRawDataFieldNumber, payload.zeros.data(), payload.zeros.size());
    } else {
      zero.String(T::kRawDataFieldNumber, PackedZeros(payload));
    }
    affine.Message(A::kZeroPointFieldNumber, zero);
  }
  if (payload.axis >= 0) affine.Int(A::kAxisFieldNumber, payload.axis);
  if (payload.block > 0) affine.Int(A::kBlockSizeFieldNumber, payload.block);
  if (payload.extras) affine.Text(payload.extras->affine);
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

// What the pages of a side have in common, so that it is built once: their types as text, and the centre that a reader
// knows from the pages before.
struct SideState {
  SideState(SharedBytes* center, bool only_measure) : last_center(center), measure(only_measure) {}
  SharedBytes* last_center;
  bool measure;  // what is built is only for its size
  Shape shape;   // of `logical`
  std::string logical;
  Shape structure_shape;
  Spec structure_spec;
  int64_t structure_hadamard = 0;
  bool structure_center = false;
  std::string structure;

  std::string_view Logical(const Shape& of) {
    if (logical.empty() || !(shape == of)) {
      shape = of;
      logical = LogicalType(of).SerializeAsString();
    }
    return logical;
  }
  std::string_view Structure(const Payload& payload, const std::vector<Array>& arrays, bool with_center) {
    if (structure.empty() || !(structure_shape == payload.shape) || !(structure_spec == payload.spec) ||
        structure_hadamard != payload.hadamard || structure_center != with_center) {
      structure_shape = payload.shape;
      structure_spec = payload.spec;
      structure_hadamard = payload.hadamard;
      structure_center = with_center;
      structure = StructureOf(payload, arrays).SerializeAsString();
    }
    return structure;
  }
};

void AddSide(Pieces* block, int dense_field, int encoded_field, const Payload& payload, SideState* state) {
  Pieces message;
  if (payload.kind == PayloadKind::kOpaque) {
    block->Data(encoded_field, payload.message.data(), payload.message.size());
    return;
  }
  if (payload.kind == PayloadKind::kDense) {
    using T = pb::TensorProto;
    for (int axis = 0; axis < 4; ++axis) message.Int(T::kDimsFieldNumber, payload.shape[axis]);
    message.Int(T::kDataTypeFieldNumber, Info(payload.dense_type).onnx);
    message.Data(T::kRawDataFieldNumber, payload.data.data(), payload.data.size());
    if (payload.extras) message.Text(payload.extras->tensor);
    block->Message(dense_field, message);
    return;
  }
  using E = pb::EncodedValueProto;
  if (payload.affine) {
    message.Message(E::kAffineFieldNumber, AffineOf(payload, state->measure));
    message.String(E::kLogicalTypeFieldNumber, state->Logical(payload.shape));
    message.Data(E::kRawDataFieldNumber, payload.codes.data(), payload.codes.size());
  } else {
    const bool with_center = !payload.center.empty() && !SameBytes(payload.center, *state->last_center);
    const std::vector<Array> arrays = ArraysOf(payload, with_center);
    if (!payload.center.empty()) *state->last_center = payload.center;
    message.String(E::kStructTypeFieldNumber, state->Structure(payload, arrays, with_center));
    message.String(E::kLogicalTypeFieldNumber, state->Logical(payload.shape));
    uint64_t raw_bytes = 0;
    for (const Array& array : arrays) raw_bytes += array.bytes;
    message.Tag(E::kRawDataFieldNumber, WireFormatLite::WIRETYPE_LENGTH_DELIMITED);
    message.Varint(raw_bytes);
    for (const Array& array : arrays) message.Block(array.data, array.bytes);
  }
  if (payload.extras) message.Text(payload.extras->tensor);
  block->Message(encoded_field, message);
}

void AddPage(Pieces* all, const Page& page, SideState states[2]) {
  using B = pb::PagedCacheBlockProto;
  Pieces block;
  block.Int(B::kStartFieldNumber, page.start);
  block.Int(B::kLengthFieldNumber, page.length);
  AddSide(&block, B::kKeyFieldNumber, B::kEncodedKeyFieldNumber, *page.key, &states[0]);
  AddSide(&block, B::kValueFieldNumber, B::kEncodedValueFieldNumber, *page.value, &states[1]);
  if (page.extras) block.Text(*page.extras);
  all->Message(pb::PagedCacheProto::kBlocksFieldNumber, block);
}

Pieces Build(const PagedCache& cache, bool measure) {
  using P = pb::PagedCacheProto;
  Pieces all;
  SharedBytes centers[2];
  SideState states[2] = {{&centers[0], measure}, {&centers[1], measure}};
  for (const Page& page : cache.pages) AddPage(&all, page, states);
  if (cache.name) all.String(P::kNameFieldNumber, *cache.name);
  if (cache.doc_string) all.String(P::kDocStringFieldNumber, *cache.doc_string);
  all.Text(cache.extras);
  return all;
}

}  // namespace

Result<Bytes> SerializePage(const Page& page, SharedBytes centers[2]) {
  Pieces pieces;
  SideState states[2] = {{&centers[0], false}, {&centers[1], false}};
  AddPage(&pieces, page, states);
  KVP_ASSIGN(Bytes bytes, Bytes::AllocateRaw(pieces.size()));
  pieces.CopyTo(bytes.data());
  return bytes;
}

uint64_t SerializedSize(const PagedCache& cache) { return Build(cache, true).size(); }

Status SerializePagedCache(const PagedCache& cache, std::span<uint8_t> out) {
  const Pieces pieces = Build(cache, false);
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
