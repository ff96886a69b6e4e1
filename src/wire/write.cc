// SPDX-License-Identifier: Apache-2.0
// PagedCache -> bytes of a PagedCacheProto, in onnx-light's field order. Small fields are built first, payload bytes are
// copied once, from page memory into the caller's buffer.
#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/wire_format_lite.h>

#include <cstring>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "wire/kvpages.pb.h"
#include "wire/layout.h"
#include "wire/wire.h"

namespace kvpages {
namespace {

namespace pb = kvpages_wire;
using google::protobuf::internal::WireFormatLite;
using google::protobuf::io::CodedOutputStream;

// Zero points as a tensor holds them, packed like codes: `bytes` bytes of them.
template <int kBits>
void PackZeros(const uint8_t* zeros, uint64_t bytes, uint8_t* out) {
  constexpr int kPerByte = 8 / kBits;
  constexpr unsigned kMask = (1u << kBits) - 1;
  for (uint64_t i = 0; i < bytes; ++i) {
    unsigned all = 0;
    for (int k = 0; k < kPerByte; ++k) all |= (zeros[i * kPerByte + k] & kMask) << (k * kBits);  // a block of memory ends with zeros
    out[i] = static_cast<uint8_t>(all);
  }
}

// A block of page memory in a message; where `packed` is set, one byte per entry there and so many bits in the file.
struct Block {
  const void* data = nullptr;
  uint64_t size = 0;  // in the file
  int packed = 0;
};

// A message as pieces: text that is built here, and blocks that stay where they are until they are copied out.
class Pieces {
 public:
  void Clear() {
    text_.clear();
    pieces_.clear();
    size_ = 0;
  }
  void Reserve(size_t text, size_t pieces) {
    text_.reserve(text);
    pieces_.reserve(pieces);
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
  // What comes before the content of a length-delimited field.
  void Head(int field, uint64_t size) {
    Tag(field, WireFormatLite::WIRETYPE_LENGTH_DELIMITED);
    Varint(size);
  }
  void String(int field, std::string_view value) {
    Head(field, value.size());
    Text(value);
  }
  void Data(int field, const Block& block) {
    Head(field, block.size);
    Add(block);
  }
  void Message(int field, const Pieces& message) {
    Head(field, message.size_);
    Append(message, nullptr);
  }
  // `blocks`: those to take in place of the message's own, in their order.
  void Append(const Pieces& message, const Block* blocks) {
    size_t text = 0;
    for (const Block& piece : message.pieces_) {
      if (piece.data == nullptr) {
        Text(std::string_view(message.text_).substr(text, static_cast<size_t>(piece.size)));
        text += static_cast<size_t>(piece.size);
      } else {
        Add(blocks == nullptr ? piece : *blocks++);
      }
    }
  }
  void Text(std::string_view text) {
    if (text.empty()) return;
    if (pieces_.empty() || pieces_.back().data != nullptr) pieces_.push_back({});
    pieces_.back().size += text.size();
    text_.append(text);
    size_ += text.size();
  }
  void Add(const Block& block) {
    if (block.size == 0) return;
    pieces_.push_back(block);
    size_ += block.size;
  }
  uint64_t size() const { return size_; }
  void CopyTo(uint8_t* out) const {
    const char* text = text_.data();
    for (const Block& piece : pieces_) {
      if (piece.data == nullptr) {
        std::memcpy(out, text, static_cast<size_t>(piece.size));
        text += piece.size;
      } else if (piece.packed == 0) {
        std::memcpy(out, piece.data, static_cast<size_t>(piece.size));
      } else {
        (piece.packed == 4 ? PackZeros<4> : PackZeros<2>)(static_cast<const uint8_t*>(piece.data), piece.size, out);
      }
      out += piece.size;
    }
  }

 private:
  std::string text_;
  std::vector<Block> pieces_;  // without data: the next `size` bytes of text_
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

Block BlockOf(const Bytes& bytes) { return {bytes.data(), bytes.size()}; }

Block ZerosOf(const Payload& payload) {
  const int bits = Info(payload.spec.type).bits;
  if (payload.grid.count == 1) return {&payload.zero_byte, 1};
  if (bits == 8) return BlockOf(payload.zeros);
  return {payload.zeros.data(), static_cast<uint64_t>(PackedBytes(bits, payload.grid.count)), bits};
}

Pieces AffineOf(const Payload& payload) {
  using A = pb::AffineLayoutProto;
  using T = pb::TensorProto;
  const TypeInfo& info = Info(payload.spec.type);
  Pieces affine;
  affine.Int(A::kStorageTypeFieldNumber, info.onnx);
  Pieces scale = ParameterHead(payload, T::FLOAT);
  scale.Data(T::kRawDataFieldNumber, BlockOf(payload.scales));
  affine.Message(A::kScaleFieldNumber, scale);
  if (payload.has_zeros) {
    Pieces zero = ParameterHead(payload, info.onnx);
    zero.Data(T::kRawDataFieldNumber, ZerosOf(payload));
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
  Block block;
};
std::vector<Array> ArraysOf(const Payload& payload, bool with_center) {
  const ArraySizes sizes = SizesOf(payload.spec, payload.shape);
  const bool kivi = payload.spec.calibration == Calibration::kKivi;
  const int scale_element = Info(payload.spec.type).family == Family::kScheme ? layout::kUint8 : layout::ScaleElement(payload.spec.scale_type);
  std::vector<Array> arrays;
  arrays.push_back({layout::kCodes, layout::kUint8, BlockOf(payload.codes)});
  if (sizes.scales > 0) arrays.push_back({layout::kScales, scale_element, BlockOf(payload.scales)});
  if (sizes.zeros > 0) arrays.push_back({layout::kZeros, kivi ? scale_element : layout::kUint8, BlockOf(payload.zeros)});
  if (sizes.has_global) arrays.push_back({layout::kGlobal, layout::kFloat, {&payload.global, 4}});
  if (with_center) arrays.push_back({layout::kCenter, layout::kBFloat16, BlockOf(payload.center)});
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
    inner->set_dimension(array.block.size / static_cast<uint64_t>(layout::ElementBytes(array.element)));
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

// The blocks of a payload in the order in which its message has them.
struct Blocks {
  Block at[5];
  Blocks(const Payload& payload, bool with_center) {
    Block* out = at;
    const auto add = [&](const Block& block) {
      if (block.size > 0) *out++ = block;
    };
    if (payload.kind == PayloadKind::kDense) {
      add(BlockOf(payload.data));
    } else if (payload.affine) {
      add(BlockOf(payload.scales));
      if (payload.has_zeros) add(ZerosOf(payload));
      add(BlockOf(payload.codes));
    } else {
      for (const Array& array : ArraysOf(payload, with_center)) add(array.block);
    }
  }
};

Pieces MessageOf(const Payload& payload, bool with_center) {
  Pieces message;
  if (payload.kind == PayloadKind::kDense) {
    using T = pb::TensorProto;
    for (int axis = 0; axis < 4; ++axis) message.Int(T::kDimsFieldNumber, payload.shape[axis]);
    message.Int(T::kDataTypeFieldNumber, Info(payload.dense_type).onnx);
    message.Data(T::kRawDataFieldNumber, BlockOf(payload.data));
    if (payload.extras) message.Text(payload.extras->tensor);
    return message;
  }
  using E = pb::EncodedValueProto;
  const std::string logical = LogicalType(payload.shape).SerializeAsString();
  if (payload.affine) {
    message.Message(E::kAffineFieldNumber, AffineOf(payload));
    message.String(E::kLogicalTypeFieldNumber, logical);
    message.Data(E::kRawDataFieldNumber, BlockOf(payload.codes));
  } else {
    const std::vector<Array> arrays = ArraysOf(payload, with_center);
    message.String(E::kStructTypeFieldNumber, StructureOf(payload, arrays).SerializeAsString());
    message.String(E::kLogicalTypeFieldNumber, logical);
    uint64_t raw_bytes = 0;
    for (const Array& array : arrays) raw_bytes += array.block.size;
    message.Head(E::kRawDataFieldNumber, raw_bytes);
    for (const Array& array : arrays) message.Add(array.block);
  }
  if (payload.extras) message.Text(payload.extras->tensor);
  return message;
}

// Whether two payloads have the same message but for the content of its blocks.
bool SameForm(const Payload& a, const Payload& b) {
  return a.kind == b.kind && a.shape == b.shape && !a.extras && !b.extras &&
         (a.kind == PayloadKind::kDense ? a.dense_type == b.dense_type
                                        : a.spec == b.spec && a.affine == b.affine && a.axis == b.axis && a.block == b.block &&
                                              a.has_zeros == b.has_zeros && a.hadamard == b.hadamard);
}

// Writes one side of the pages, one after another. A page's message differs from the last one's in its blocks only, as a
// rule, and is then not built again; the centre is written where it is not the last one.
class SideWriter {
 public:
  SideWriter(SharedBytes* last_center, int dense_field, int encoded_field)
      : last_center_(last_center), dense_field_(dense_field), encoded_field_(encoded_field) {}

  // Takes the next payload, which stays where it is until the next but one; returns the size of its field.
  uint64_t Next(const Payload& payload) {
    const Payload* last = payload_;
    payload_ = &payload;
    field_ = payload.kind == PayloadKind::kDense ? dense_field_ : encoded_field_;
    if (payload.kind == PayloadKind::kOpaque) {
      size_ = payload.message.size();
    } else {
      const bool with_center = !payload.center.empty() && !SameBytes(payload.center, *last_center_);
      if (!payload.center.empty()) *last_center_ = payload.center;
      if (last == nullptr || !SameForm(*last, payload) || with_center != with_center_) {
        with_center_ = with_center;
        message_ = MessageOf(payload, with_center);
      }
      size_ = message_.size();
    }
    return HeadSize(field_, size_) + size_;
  }
  void AddTo(Pieces* page) const {
    page->Head(field_, size_);
    if (payload_->kind == PayloadKind::kOpaque) {
      page->Add(BlockOf(payload_->message));
    } else {
      page->Append(message_, Blocks(*payload_, with_center_).at);
    }
  }
  static uint64_t HeadSize(int field, uint64_t size) { return TagSize(field) + CodedOutputStream::VarintSize64(size); }
  static uint64_t TagSize(int field) { return CodedOutputStream::VarintSize32(static_cast<uint32_t>(field) << 3); }

 private:
  SharedBytes* last_center_;
  int dense_field_, encoded_field_, field_ = 0;
  const Payload* payload_ = nullptr;
  bool with_center_ = false;
  Pieces message_;
  uint64_t size_ = 0;
};

class PageWriter {
 public:
  explicit PageWriter(SharedBytes centers[2])
      : key_(&centers[0], B::kKeyFieldNumber, B::kEncodedKeyFieldNumber), value_(&centers[1], B::kValueFieldNumber, B::kEncodedValueFieldNumber) {}
  // The size of the page's field; adds it to `all`, where that is not null.
  uint64_t Write(const Page& page, Pieces* all) {
    uint64_t content = key_.Next(*page.key) + value_.Next(*page.value) + (page.extras ? page.extras->size() : 0);
    for (const auto& [field, number] : {std::pair(B::kStartFieldNumber, page.start), std::pair(B::kLengthFieldNumber, page.length)}) {
      content += SideWriter::HeadSize(field, static_cast<uint64_t>(number));
    }
    constexpr int kField = pb::PagedCacheProto::kBlocksFieldNumber;
    if (all != nullptr) {
      all->Head(kField, content);
      all->Int(B::kStartFieldNumber, page.start);
      all->Int(B::kLengthFieldNumber, page.length);
      key_.AddTo(all);
      value_.AddTo(all);
      if (page.extras) all->Text(*page.extras);
    }
    return SideWriter::HeadSize(kField, content) + content;
  }

 private:
  using B = pb::PagedCacheBlockProto;
  SideWriter key_, value_;
};

// What follows the pages.
Pieces EndOf(const PagedCache& cache) {
  using P = pb::PagedCacheProto;
  Pieces end;
  if (cache.name) end.String(P::kNameFieldNumber, *cache.name);
  if (cache.doc_string) end.String(P::kDocStringFieldNumber, *cache.doc_string);
  end.Text(cache.extras);
  return end;
}

}  // namespace

Result<Bytes> SerializePage(const Page& page, SharedBytes centers[2]) {
  Pieces pieces;
  PageWriter(centers).Write(page, &pieces);
  KVP_ASSIGN(Bytes bytes, Bytes::AllocateRaw(pieces.size()));
  pieces.CopyTo(bytes.data());
  return bytes;
}

uint64_t SerializedSize(const PagedCache& cache) {
  SharedBytes centers[2];
  PageWriter writer(centers);
  uint64_t size = EndOf(cache).size();
  for (const Page& page : cache.pages) size += writer.Write(page, nullptr);
  return size;
}

Status SerializePagedCache(const PagedCache& cache, std::span<uint8_t> out) {
  SharedBytes centers[2];
  PageWriter writer(centers);
  Pieces pieces;
  pieces.Reserve(cache.pages.size() * 256, cache.pages.size() * 14 + 1);
  for (const Page& page : cache.pages) writer.Write(page, &pieces);
  pieces.Append(EndOf(cache), nullptr);
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
