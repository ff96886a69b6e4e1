// SPDX-License-Identifier: Apache-2.0
// Bytes of a PagedCacheProto -> PagedCache. Large payloads are copied once, from the file into page memory.
#include <cstring>
#include <optional>
#include <string_view>
#include <vector>

#include "core/float.h"
#include "wire/envelope.h"
#include "wire/kvpages.pb.h"
#include "wire/layout.h"
#include "wire/scan.h"
#include "wire/wire.h"

namespace kvpages {
namespace {

namespace pb = kvpages_wire;
using google::protobuf::internal::WireFormatLite;
using wire::Field;
using wire::FileError;
using wire::Place;
using wire::Scan;
using wire::Span;

constexpr auto kLengthDelimited = WireFormatLite::WIRETYPE_LENGTH_DELIMITED;
constexpr auto kVarint = WireFormatLite::WIRETYPE_VARINT;

Status Expect(const Field& field, WireFormatLite::WireType type, const char* name, const Place& place) {
  if (field.type == type) return Ok();
  return FileError(Code::kCorrupt, place, std::string(name) + " has wire type " + std::to_string(field.type), field.at);
}

std::string_view TextOf(Span bytes) { return {reinterpret_cast<const char*>(bytes.data()), bytes.size()}; }

// Names from files as messages may show them.
std::string Shown(std::string_view name) {
  constexpr size_t kShown = 80;
  return name.size() <= kShown ? std::string(name) : std::string(name.substr(0, kShown)) + "...";
}

// A submessage that may come in several parts, which protobuf merges: their concatenation is the merged message.
class Parts {
 public:
  void Clear() {
    whole_ = {};
    joined_ = Bytes();
    at_ = -1;
  }
  bool set() const { return at_ >= 0; }
  Span whole() const { return whole_; }
  int64_t at() const { return at_; }  // of the first part; positions in later parts count on from there
  Status Add(const Field& field, const Place& place) {
    // Joining costs the whole each time, and nobody writes more parts than a message has fields.
    constexpr int kMostParts = 64;
    if (++count_ > kMostParts) {
      return FileError(Code::kUnsupported, place, "field " + std::to_string(field.number) + " comes in more than " + Text(int64_t{kMostParts}) + " parts",
                       field.at);
    }
    if (!set()) {
      whole_ = field.bytes;
      at_ = field.content_at;
      return Ok();
    }
    KVP_ASSIGN(Bytes joined, Bytes::AllocateRaw(whole_.size() + field.bytes.size()));
    if (!whole_.empty()) std::memcpy(joined.data(), whole_.data(), whole_.size());
    if (!field.bytes.empty()) std::memcpy(joined.data() + whole_.size(), field.bytes.data(), field.bytes.size());
    joined_ = std::move(joined);
    whole_ = {joined_.data(), static_cast<size_t>(joined_.size())};
    return Ok();
  }

 private:
  Span whole_;
  Bytes joined_;
  int64_t at_ = -1;
  int count_ = 0;
};

// Parses a small message with its generated class, whose objects take many times the bytes of their fields.
template <typename Message>
Status ParseSmall(const Parts& parts, Message* message, const char* name, const Place& place) {
  constexpr size_t kMost = 65536;
  if (parts.whole().size() > kMost) {
    return FileError(Code::kUnsupported, place, std::string(name) + " is larger than " + std::to_string(kMost) + " bytes", parts.at(),
                     std::to_string(parts.whole().size()));
  }
  if (!message->ParseFromArray(parts.whole().data(), static_cast<int>(parts.whole().size()))) {
    return FileError(Code::kCorrupt, place, std::string(name) + " is not a valid message", parts.at());
  }
  return Ok();
}

// ---- Tensors that are pages ----

Result<Shape> PageShape(const std::vector<int64_t>& dims, const Place& place, int64_t at) {
  if (dims.size() != 4) {
    return FileError(Code::kShape, place, "a page needs 4 dims [batch, kv_heads, capacity, head_dim]", at,
                     dims.size() > 4 ? "more" : std::to_string(dims.size()));
  }
  const Shape shape{dims[0], dims[1], dims[2], dims[3]};
  for (const int64_t dim : dims) {
    if (dim < 1) return FileError(Code::kShape, place, "every dim must be at least 1", at, Text(shape));
  }
  auto elements = CheckedElements(shape, "dims");
  if (!elements.ok()) return FileError(Code::kShape, place, "element count overflows", at, Text(shape));
  return shape;
}

// Dims after the fifth are dropped: what has more than four is refused by everyone.
Status AppendDim(const Field& field, std::vector<int64_t>* dims, const Place& place) {
  constexpr size_t kKept = 5;
  if (field.type == kVarint) {
    if (dims->size() < kKept) dims->push_back(static_cast<int64_t>(field.varint));
    return Ok();
  }
  KVP_TRY(Expect(field, kLengthDelimited, "dims", place));  // packed, which proto2 readers must take as well
  google::protobuf::io::CodedInputStream stream(field.bytes.data(), static_cast<int>(field.bytes.size()));
  while (stream.CurrentPosition() < static_cast<int>(field.bytes.size())) {
    uint64_t value = 0;
    if (!stream.ReadVarint64(&value)) return FileError(Code::kCorrupt, place, "dims end early", field.at);
    if (dims->size() < kKept) dims->push_back(static_cast<int64_t>(value));
  }
  return Ok();
}

// A repeated scalar field, packed or not, of a message that is scanned again for it: it takes no memory of its own.
struct Scalars {
  Span message;
  int64_t offset = 0;
  int number = 0;
  int64_t at = -1;       // of its first field, -1 where there is none
  uint64_t present = 0;  // bytes of packed fields and values of others

  bool set() const { return at >= 0; }
  void Add(const Field& field, uint64_t unpacked_bytes) {
    if (at < 0) at = field.at;
    present += field.type == kLengthDelimited ? field.bytes.size() : unpacked_bytes;
  }
  // Calls f(field) for each of its fields.
  template <typename F>
  Status ForEach(const Place& place, F&& f) const {
    Scan scan(message, offset, place);
    for (Field field;;) {
      KVP_ASSIGN(const bool more, scan.Next(&field));
      if (!more) return Ok();
      if (field.number == number) KVP_TRY(f(field));
    }
  }
};

Result<Bytes> FloatsOf(const InstanceRef& instance, const Scalars& scalars, int64_t count, const Place& place) {
  if (scalars.present != static_cast<uint64_t>(count) * 4) {
    return FileError(Code::kShape, place, "float_data needs " + Text(count) + " values", scalars.at,
                     std::to_string(scalars.present) + " bytes");
  }
  KVP_ASSIGN(Bytes data, Bytes::AllocateRaw(scalars.present, instance->budget));
  uint8_t* out = data.data();
  KVP_TRY(scalars.ForEach(place, [&](const Field& field) -> Status {
    if (field.type == kLengthDelimited) {
      if (!field.bytes.empty()) std::memcpy(out, field.bytes.data(), field.bytes.size());
      out += field.bytes.size();
    } else {
      const auto bits = static_cast<uint32_t>(field.varint);
      std::memcpy(out, &bits, 4);
      out += 4;
    }
    return Ok();
  }));
  return data;
}

// Calls put(value) for each of `count` values of int32_data; nothing is taken before there can be so many.
template <typename F>
Status ForInts(const Scalars& scalars, int64_t count, const char* name, const char* unit, const Place& place, int64_t at, F&& put) {
  const auto wrong = [&](std::string got) {
    return FileError(Code::kShape, place, std::string(name) + " needs " + Text(count) + unit, scalars.set() ? scalars.at : at, std::move(got));
  };
  int64_t filled = 0;
  const auto next = [&](uint64_t value, const Field& field) -> Status {
    if (filled++ == count) return wrong("more");
    return put(value, field);
  };
  KVP_TRY(scalars.ForEach(place, [&](const Field& field) -> Status {
    if (field.type == kVarint) return next(field.varint, field);
    google::protobuf::io::CodedInputStream stream(field.bytes.data(), static_cast<int>(field.bytes.size()));
    while (stream.CurrentPosition() < static_cast<int>(field.bytes.size())) {
      uint64_t value = 0;
      if (!stream.ReadVarint64(&value)) return FileError(Code::kCorrupt, place, std::string(name) + " ends early", field.at);
      KVP_TRY(next(value, field));
    }
    return Ok();
  }));
  if (filled != count) return wrong(Text(filled));
  return Ok();
}

// int32_data of a page: one 16-bit pattern per entry.
Result<Bytes> PatternsOf(const InstanceRef& instance, const Scalars& scalars, int64_t count, const Place& place) {
  if (scalars.present < static_cast<uint64_t>(count)) {  // a varint takes at least one byte
    return FileError(Code::kShape, place, "int32_data needs " + Text(count) + " values", scalars.at,
                     "at most " + std::to_string(scalars.present));
  }
  KVP_ASSIGN(Bytes data, Bytes::AllocateRaw(static_cast<uint64_t>(count) * 2, instance->budget));
  uint16_t* out = data.as<uint16_t>();
  KVP_TRY(ForInts(scalars, count, "int32_data", " values", place, scalars.at, [&](uint64_t value, const Field& field) -> Status {
    if (value > 0xffff) return FileError(Code::kCorrupt, place, "int32_data must hold 16-bit patterns", field.at, std::to_string(value));
    *out++ = static_cast<uint16_t>(value);
    return Ok();
  }));
  return data;
}

std::shared_ptr<const MessageExtras> ExtrasOf(std::string tensor, std::string affine) {
  if (tensor.empty() && affine.empty()) return nullptr;
  return std::make_shared<const MessageExtras>(MessageExtras{std::move(tensor), std::move(affine)});
}

Error External(const Place& place, int64_t at) {
  return FileError(Code::kUnsupported, place, "data in an external file cannot be read", at);
}

// The fields of a TensorProto that hold data, where they stand.
struct TensorFields {
  std::vector<int64_t> dims;
  int64_t at = 0, dims_at = 0, type_at = 0;
  std::optional<uint64_t> data_type;
  std::optional<Field> raw;
  Scalars floats, ints;
  std::string extras;  // everything else, as it stands
};
Status ScanTensor(Span message, int64_t offset, const Place& place, TensorFields* tensor) {
  using T = pb::TensorProto;
  tensor->at = tensor->dims_at = tensor->type_at = offset;
  tensor->floats = {message, offset, T::kFloatDataFieldNumber};
  tensor->ints = {message, offset, T::kInt32DataFieldNumber};
  Scan scan(message, offset, place);
  for (Field field;;) {
    KVP_ASSIGN(const bool more, scan.Next(&field));
    if (!more) return Ok();
    switch (field.number) {
      case T::kDimsFieldNumber:
        tensor->dims_at = field.at;
        KVP_TRY(AppendDim(field, &tensor->dims, place));
        break;
      case T::kDataTypeFieldNumber:
        KVP_TRY(Expect(field, kVarint, "data_type", place));
        tensor->data_type = field.varint;
        tensor->type_at = field.at;
        break;
      case T::kRawDataFieldNumber:
        KVP_TRY(Expect(field, kLengthDelimited, "raw_data", place));
        tensor->raw = field;
        break;
      case T::kFloatDataFieldNumber:
        if (field.type != kLengthDelimited) KVP_TRY(Expect(field, WireFormatLite::WIRETYPE_FIXED32, "float_data", place));
        tensor->floats.Add(field, 4);
        break;
      case T::kInt32DataFieldNumber:
        if (field.type != kLengthDelimited) KVP_TRY(Expect(field, kVarint, "int32_data", place));
        tensor->ints.Add(field, 1);
        break;
      case T::kExternalDataFieldNumber:
        return External(place, field.at);
      case T::kDataLocationFieldNumber:
        KVP_TRY(Expect(field, kVarint, "data_location", place));
        if (field.varint == T::EXTERNAL) return External(place, field.at);
        break;
      default:
        tensor->extras.append(TextOf(field.raw));
    }
  }
}

Result<PayloadRef> ReadDense(const InstanceRef& instance, Span message, int64_t offset, const Place& place) {
  TensorFields tensor;
  KVP_TRY(ScanTensor(message, offset, place, &tensor));
  auto& [dims, at, dims_at, type_at, data_type, raw, floats, ints, extras] = tensor;
  if (!data_type) return FileError(Code::kCorrupt, place, "data_type is missing", offset);
  const TypeInfo* info = *data_type <= INT32_MAX ? FindOnnxType(static_cast<int>(*data_type)) : nullptr;
  if (info == nullptr || info->family != Family::kDense) {
    return FileError(Code::kUnsupported, place, "a dense page must be FLOAT (1), FLOAT16 (10) or BFLOAT16 (16)", type_at,
                     "data type " + std::to_string(*data_type));
  }
  KVP_ASSIGN(const Shape shape, PageShape(dims, place, dims_at));
  auto payload = std::make_shared<Payload>();
  payload->shape = shape;
  payload->dense_type = info->type;
  const int64_t elements = shape.elements();
  const auto bytes = static_cast<uint64_t>(elements) * static_cast<uint64_t>(info->bits / 8);
  if (raw) {
    if (raw->bytes.size() != bytes) {
      return FileError(Code::kShape, place, "raw_data of " + Text(shape) + " " + std::string(info->name) + " needs " + std::to_string(bytes) +
                                                " bytes", raw->at, std::to_string(raw->bytes.size()));
    }
    KVP_ASSIGN(payload->data, Bytes::Copy(raw->bytes.data(), bytes, instance->budget));
  } else if (info->type == Type::f32 && floats.set()) {
    KVP_ASSIGN(payload->data, FloatsOf(instance, floats, elements, place));
  } else if (info->type != Type::f32 && ints.set()) {
    KVP_ASSIGN(payload->data, PatternsOf(instance, ints, elements, place));
  } else {
    return FileError(Code::kCorrupt, place, "the tensor holds no data", offset);
  }
  payload->extras = ExtrasOf(std::move(extras), "");
  return PayloadRef(std::move(payload));
}

// ---- Encoded values ----

// Scales in either spelling: where they stand, or as `values`.
Result<Span> ReadScales(const TensorFields& tensor, const Place& place, Bytes* values) {
  if (tensor.data_type != pb::TensorProto::FLOAT) {
    return FileError(Code::kUnsupported, place, "scales must be FLOAT", tensor.type_at,
                     tensor.data_type ? "data type " + std::to_string(*tensor.data_type) : "none");
  }
  if (!tensor.raw) {
    if (tensor.floats.present % 4 != 0) return FileError(Code::kShape, place, "scale float_data must be whole floats", tensor.floats.at);
    const InstanceRef unlimited = std::make_shared<Instance>();
    KVP_ASSIGN(*values, FloatsOf(unlimited, tensor.floats, static_cast<int64_t>(tensor.floats.present / 4), place));
    return Span(values->data(), static_cast<size_t>(values->size()));
  }
  const Span raw = tensor.raw->bytes;
  if (raw.size() % 4 != 0) {
    return FileError(Code::kShape, place, "scale raw_data must be whole floats", tensor.raw->at, std::to_string(raw.size()) + " bytes");
  }
  return raw;
}

// Dims of scale or zero point for an axis and block; empty for per tensor.
std::vector<int64_t> ParameterDims(const Shape& shape, int axis, int64_t block) {
  if (axis < 0) return {};
  if (block == 0) return {shape[axis]};
  std::vector<int64_t> dims;
  for (int k = 0; k < 4; ++k) dims.push_back(k == axis ? CeilDiv(shape[k], block) : shape[k]);
  return dims;
}

Status CheckDims(const TensorFields& tensor, const std::vector<int64_t>& want, const char* name, const Place& place) {
  if (tensor.dims == want) return Ok();
  const auto text = [](const auto& dims) {
    if (dims.size() > 4) return std::string("more than 4");
    std::string all = "[";
    for (const int64_t dim : dims) all += (all.size() > 1 ? ", " : "") + Text(dim);
    return all + "]";
  };
  return FileError(Code::kShape, place, std::string(name) + " must have dims " + text(want), tensor.dims_at, text(tensor.dims));
}

template <int kBits>
void UnpackZeros(const uint8_t* packed, int64_t count, uint8_t* out) {
  constexpr unsigned kMask = (1u << kBits) - 1;
  int64_t i = 0;
  // Eight entries at a time: halves of a word move apart until each entry has a byte.
  for (; i + 8 <= count; i += 8) {
    uint64_t word = 0;
    for (int k = 0; k < kBits; ++k) word |= static_cast<uint64_t>(packed[i * kBits / 8 + k]) << (8 * k);
    word = (word | word << (4 * (8 - kBits))) & (((uint64_t{1} << (4 * kBits)) - 1) * 0x0000000100000001u);
    word = (word | word << (2 * (8 - kBits))) & (((uint64_t{1} << (2 * kBits)) - 1) * 0x0001000100010001u);
    word = (word | word << (8 - kBits)) & (kMask * 0x0101010101010101u);
    for (int k = 0; k < 8; ++k) out[i + k] = static_cast<uint8_t>(word >> (8 * k));
  }
  for (; i < count; ++i) out[i] = static_cast<uint8_t>(packed[i * kBits / 8] >> (i * kBits % 8) & kMask);
}

// One byte per zero point. Sub-byte entries are packed in raw_data and, in int32_data, 32 / width to a word.
Result<Bytes> ReadZeros(const InstanceRef& instance, const TensorFields& tensor, const TypeInfo& info, int64_t count, const Place& place) {
  if (tensor.data_type != static_cast<uint64_t>(info.onnx)) {
    return FileError(Code::kCorrupt, place, "zero_point must have the storage type " + std::to_string(info.onnx), tensor.type_at,
                     tensor.data_type ? "data type " + std::to_string(*tensor.data_type) : "none");
  }
  const unsigned mask = (1u << info.bits) - 1;
  if (tensor.raw) {
    const Span raw = tensor.raw->bytes;
    if (static_cast<int64_t>(raw.size()) != PackedBytes(info.bits, count)) {
      return FileError(Code::kShape, place, "zero_point raw_data needs " + Text(PackedBytes(info.bits, count)) + " bytes", tensor.raw->at,
                       std::to_string(raw.size()));
    }
    if (count == 1 || info.bits == 8) return Bytes::Copy(raw.data(), raw.size(), instance->budget);  // one alone verbatim, high bits and all
    KVP_ASSIGN(Bytes zeros, Bytes::AllocateRaw(static_cast<uint64_t>(count), instance->budget));
    (info.bits == 4 ? UnpackZeros<4> : UnpackZeros<2>)(raw.data(), count, zeros.data());
    return zeros;
  }
  const int per_word = info.bits == 8 ? 1 : 32 / info.bits;
  const int64_t words = CeilDiv(count, per_word);
  if (tensor.ints.present < static_cast<uint64_t>(words)) {
    return FileError(Code::kShape, place, "zero_point int32_data needs " + Text(words) + " words", tensor.at,
                     "at most " + std::to_string(tensor.ints.present));
  }
  KVP_ASSIGN(Bytes zeros, Bytes::AllocateRaw(static_cast<uint64_t>(count), instance->budget));
  int64_t filled = 0;
  KVP_TRY(ForInts(tensor.ints, words, "zero_point int32_data", " words", place, tensor.at, [&](uint64_t word, const Field&) -> Status {
    for (int i = 0; i < per_word && filled < count; ++i) zeros.data()[filled++] = static_cast<uint8_t>(word >> (i * info.bits) & mask);
    return Ok();
  }));
  return zeros;
}

// The width that `bytes` codes can have, when only their sign is known.
Result<const TypeInfo*> DeduceStorage(bool is_signed, int64_t elements, uint64_t bytes, const Place& place, int64_t at) {
  const TypeInfo* found = nullptr;
  for (int i = 0; i < TypeCount(); ++i) {
    const TypeInfo& info = TypeAt(i);
    if (info.family != Family::kInteger || info.onnx == 0 || info.is_signed != is_signed) continue;
    if (static_cast<uint64_t>(PackedBytes(info.bits, elements)) != bytes) continue;
    if (found != nullptr) {
      return FileError(Code::kCorrupt, place, "signed_storage is ambiguous: " + std::string(found->name) + " and " +
                                                  std::string(info.name) + " both take " + std::to_string(bytes) + " bytes", at);
    }
    found = &info;
  }
  if (found == nullptr) {
    return FileError(Code::kShape, place, "no storage type takes " + std::to_string(bytes) + " bytes for " + Text(elements) + " elements", at);
  }
  return found;
}

// Values aside, scale and zero point are small, and their generated classes take many times the bytes of other fields.
Status CheckParameters(const Parts& affine, const Place& place) {
  using A = pb::AffineLayoutProto;
  using T = pb::TensorProto;
  constexpr size_t kMost = 65536;
  if (affine.whole().size() <= kMost) return Ok();
  size_t others = 0;
  Scan scan(affine.whole(), affine.at(), place);
  for (Field field;;) {
    KVP_ASSIGN(const bool more, scan.Next(&field));
    if (!more) return Ok();
    if (field.number != A::kScaleFieldNumber && field.number != A::kZeroPointFieldNumber) continue;
    const char* name = field.number == A::kScaleFieldNumber ? "scale" : "zero_point";
    KVP_TRY(Expect(field, kLengthDelimited, name, place));
    Scan inner(field.bytes, field.content_at, place);
    for (Field part;;) {
      KVP_ASSIGN(const bool left, inner.Next(&part));
      if (!left) break;
      const bool values = part.number == T::kRawDataFieldNumber || part.number == T::kFloatDataFieldNumber || part.number == T::kInt32DataFieldNumber;
      if (!values && (others += part.raw.size()) > kMost) {
        return FileError(Code::kUnsupported, place, std::string(name) + " holds more than " + std::to_string(kMost) + " bytes besides its values", part.at);
      }
    }
  }
}

// An AffineLayoutProto; its tensors may be large, so they are scanned and not parsed.
struct AffineFields {
  std::optional<int32_t> storage_type;
  std::optional<bool> signed_storage;
  std::optional<int64_t> axis;
  std::optional<uint64_t> block_size;
  Parts scale, zero_point;
  std::string extras;
};
Status ScanAffine(Span message, int64_t offset, const Place& place, AffineFields* affine) {
  using A = pb::AffineLayoutProto;
  Scan scan(message, offset, place);
  for (Field field;;) {
    KVP_ASSIGN(const bool more, scan.Next(&field));
    if (!more) return Ok();
    switch (field.number) {
      case A::kStorageTypeFieldNumber:
        KVP_TRY(Expect(field, kVarint, "storage_type", place));
        affine->storage_type = static_cast<int32_t>(field.varint);
        break;
      case A::kSignedStorageFieldNumber:
        KVP_TRY(Expect(field, kVarint, "signed_storage", place));
        affine->signed_storage = field.varint != 0;
        break;
      case A::kAxisFieldNumber:
        KVP_TRY(Expect(field, kVarint, "axis", place));
        affine->axis = static_cast<int64_t>(field.varint);
        break;
      case A::kBlockSizeFieldNumber:
        KVP_TRY(Expect(field, kVarint, "block_size", place));
        affine->block_size = field.varint;
        break;
      case A::kScaleFieldNumber:
        KVP_TRY(Expect(field, kLengthDelimited, "scale", place));
        KVP_TRY(affine->scale.Add(field, place));
        break;
      case A::kZeroPointFieldNumber:
        KVP_TRY(Expect(field, kLengthDelimited, "zero_point", place));
        KVP_TRY(affine->zero_point.Add(field, place));
        break;
      default:
        affine->extras.append(TextOf(field.raw));
    }
  }
}

Result<PayloadRef> ReadAffine(const InstanceRef& instance, Span message, const Shape& shape, Span codes, std::string extras,
                              const Place& place, int64_t at, int64_t codes_at) {
  AffineFields affine;
  KVP_TRY(ScanAffine(message, at, place, &affine));
  const int64_t elements = shape.elements();
  const TypeInfo* info = nullptr;
  if (affine.storage_type) {
    info = FindOnnxType(*affine.storage_type);
    if (info == nullptr || info->family != Family::kInteger) {
      return FileError(Code::kUnsupported, place, "storage_type must be INT8, UINT8, INT4, UINT4, INT2 or UINT2", at,
                       "data type " + std::to_string(*affine.storage_type));
    }
    if (affine.signed_storage && *affine.signed_storage != info->is_signed) {
      return FileError(Code::kCorrupt, place, "signed_storage contradicts storage_type " + std::to_string(info->onnx), at);
    }
  } else if (affine.signed_storage) {
    KVP_ASSIGN(info, DeduceStorage(*affine.signed_storage, elements, codes.size(), place, at));
  } else {
    return FileError(Code::kCorrupt, place, "the affine layout has neither storage_type nor signed_storage", at);
  }
  if (!affine.scale.set()) return FileError(Code::kCorrupt, place, "the affine layout has no scale", at);
  int axis = -1;
  if (affine.axis) {
    if (*affine.axis < -4 || *affine.axis > 3) return FileError(Code::kShape, place, "axis must be -4 to 3", at, Text(*affine.axis));
    axis = static_cast<int>(*affine.axis < 0 ? *affine.axis + 4 : *affine.axis);
  }
  int64_t block = 0;
  if (affine.block_size) {
    if (axis < 0) return FileError(Code::kCorrupt, place, "block_size needs an axis", at);
    if (*affine.block_size < 1 || *affine.block_size > static_cast<uint64_t>(INT64_MAX)) {
      return FileError(Code::kShape, place, "block_size must be at least 1", at, std::to_string(*affine.block_size));
    }
    block = static_cast<int64_t>(*affine.block_size);
  }
  const auto code_bytes = static_cast<uint64_t>(PackedBytes(info->bits, elements));
  if (codes.size() != code_bytes) {
    return FileError(Code::kShape, place, "raw_data of " + Text(shape) + " " + std::string(info->name) + " needs " + std::to_string(code_bytes) +
                                              " bytes", codes_at, std::to_string(codes.size()));
  }
  const int unused = static_cast<int>(code_bytes * 8 - static_cast<uint64_t>(elements) * static_cast<uint64_t>(info->bits));
  if (unused > 0 && codes.back() >> (8 - unused) != 0) {
    return FileError(Code::kCorrupt, place, "unused bits of the last code byte must be 0", codes_at, std::to_string(codes.back()));
  }
  const std::vector<int64_t> dims = ParameterDims(shape, axis, block);
  TensorFields scale, zero_point;
  KVP_TRY(ScanTensor(affine.scale.whole(), affine.scale.at(), place, &scale));
  KVP_TRY(CheckDims(scale, dims, "scale", place));
  Bytes scale_values, zeros;
  KVP_ASSIGN(const Span scales, ReadScales(scale, place, &scale_values));
  const int64_t count = AffineGrid(shape, axis, block).count;
  if (static_cast<int64_t>(scales.size() / 4) != count) {
    return FileError(Code::kShape, place, "scale needs " + Text(count) + " values", scale.at, std::to_string(scales.size() / 4));
  }
  if (affine.zero_point.set()) {
    KVP_TRY(ScanTensor(affine.zero_point.whole(), affine.zero_point.at(), place, &zero_point));
    KVP_TRY(CheckDims(zero_point, dims, "zero_point", place));
    KVP_ASSIGN(zeros, ReadZeros(instance, zero_point, *info, count, place));
  }
  auto payload = MakeAffine(instance, shape, info->type, axis, block, {codes, scales, {}, std::move(zeros)});
  if (!payload.ok()) {
    if (payload.error().code == Code::kMemory || payload.error().code == Code::kLimit) return std::move(payload.error());
    return FileError(Code::kCorrupt, place, payload.error().message, at);
  }
  std::const_pointer_cast<Payload>(payload.value())->extras = ExtrasOf(std::move(extras), std::move(affine.extras));
  return payload;
}

// The library's own structured layout (layout.h), `centers`: the last centre seen, shared by the pages after it.
Result<PayloadRef> ReadOwn(const InstanceRef& instance, const pb::StructTypeProto& type, const Spec& spec, const Shape& shape,
                           Span raw, std::string extras, SharedBytes* last_center, const Place& place, int64_t at, int64_t raw_at) {
  KVP_ASSIGN(const Spec resolved, ResolveSpec(spec, shape.width, "spec"));
  auto payload = std::make_shared<Payload>();
  payload->kind = PayloadKind::kEncoded;
  payload->shape = shape;
  payload->spec = resolved;
  payload->grid = ScaleGrid(resolved, shape);
  const ArraySizes sizes = SizesOf(resolved, shape);
  payload->has_zeros = sizes.zeros > 0;
  const auto center_bytes = static_cast<uint64_t>(shape.heads * shape.width) * 2;
  bool seen_codes = false, seen_scales = sizes.scales == 0, seen_zeros = sizes.zeros == 0, seen_global = !sizes.has_global;
  uint64_t position = 0;
  for (const auto& field : type.structure().field()) {
    if (field.has_constant()) {
      if (field.name() == layout::kHadamard && field.constant().int64_data_size() == 1) payload->hadamard = field.constant().int64_data(0);
      continue;
    }
    const pb::StructTypeProto::Array& array = field.type().struct_type().array();
    const int element = layout::ElementBytes(array.element_type().tensor_type().elem_type());
    if (element == 0 || array.dimension() > raw.size()) {
      return FileError(Code::kCorrupt, place, "field '" + Shown(field.name()) + "' of the layout is not an array within raw_data", at);
    }
    const uint64_t bytes = array.dimension() * static_cast<uint64_t>(element);
    if (bytes > raw.size() - position) {
      return FileError(Code::kShape, place, "array '" + Shown(field.name()) + "' of " + std::to_string(bytes) + " bytes does not fit raw_data", raw_at,
                       std::to_string(raw.size() - position) + " left");
    }
    const Span data = raw.subspan(static_cast<size_t>(position), static_cast<size_t>(bytes));
    position += bytes;
    const auto take = [&](Bytes* to, bool* seen, int64_t want) -> Status {
      if (static_cast<int64_t>(bytes) != want || *seen) {
        return FileError(Code::kShape, place, "array '" + Shown(field.name()) + "' of " + CanonicalSpec(resolved) + " over " + Text(shape) + " needs " +
                                                  Text(want) + " bytes", raw_at, std::to_string(bytes));
      }
      *seen = true;
      KVP_ASSIGN(*to, Bytes::Copy(data.data(), data.size(), instance->budget));
      return Ok();
    };
    if (field.name() == layout::kCodes) {
      KVP_TRY(take(&payload->codes, &seen_codes, sizes.codes));
    } else if (field.name() == layout::kScales) {
      KVP_TRY(take(&payload->scales, &seen_scales, sizes.scales));
    } else if (field.name() == layout::kZeros) {
      KVP_TRY(take(&payload->zeros, &seen_zeros, sizes.zeros));
    } else if (field.name() == layout::kGlobal && sizes.has_global && bytes == 4 && !seen_global) {
      std::memcpy(&payload->global, data.data(), 4);
      if (!IsFinite(payload->global) || !(payload->global > 0)) {
        return FileError(Code::kCorrupt, place, "global scale must be finite and > 0", raw_at, Text(static_cast<double>(payload->global)));
      }
      seen_global = true;
    } else if (field.name() == layout::kCenter && resolved.center && bytes == center_bytes && payload->center.empty()) {
      KVP_ASSIGN(Bytes center, Bytes::Copy(data.data(), data.size(), instance->budget));
      payload->center = std::move(center);
    } else {
      return FileError(Code::kCorrupt, place, "array '" + Shown(field.name()) + "' does not belong to " + CanonicalSpec(resolved), at);
    }
  }
  if (!seen_codes || !seen_scales || !seen_zeros || !seen_global) {
    return FileError(Code::kCorrupt, place, "the layout of " + CanonicalSpec(resolved) + " lacks an array", at);
  }
  if (position != raw.size()) {
    return FileError(Code::kShape, place, "raw_data needs " + std::to_string(position) + " bytes", raw_at, std::to_string(raw.size()));
  }
  if (resolved.center) {
    if (payload->center.empty()) payload->center = *last_center;
    if (payload->center.size() != center_bytes) {
      return FileError(Code::kCorrupt, place, "no page up to this one has the layer's centre", at);
    }
    for (uint64_t i = 0; i < center_bytes / 2; ++i) {
      if (!IsFinite(FromBF16(payload->center.as<uint16_t>()[i]))) {
        return FileError(Code::kCorrupt, place, "the centre must be finite", raw_at);
      }
    }
    *last_center = payload->center;
  }
  const int64_t run = payload->hadamard;
  if (resolved.hadamard ? run < 1 || (run & (run - 1)) != 0 || shape.width % run != 0 : run != 0) {
    return FileError(Code::kCorrupt, place, "hadamard run must be a power of two that divides head_dim " + Text(shape.width), at, Text(run));
  }
  payload->extras = ExtrasOf(std::move(extras), "");
  return PayloadRef(std::move(payload));
}

Result<Shape> LogicalShape(const Parts& logical, const Place& place, int64_t message_at) {
  if (!logical.set()) return FileError(Code::kCorrupt, place, "logical_type is missing", message_at);
  const int64_t at = logical.at();
  pb::TypeProto type;
  KVP_TRY(ParseSmall(logical, &type, "logical_type", place));
  if (!type.has_tensor_type()) return FileError(Code::kUnsupported, place, "logical_type must be a tensor", at);
  const auto& tensor = type.tensor_type();
  if (tensor.elem_type() != pb::TensorProto::FLOAT) {
    return FileError(Code::kUnsupported, place, "logical_type must be FLOAT", at, "data type " + std::to_string(tensor.elem_type()));
  }
  std::vector<int64_t> dims;
  for (const auto& dim : tensor.shape().dim()) {
    if (!dim.has_dim_value()) return FileError(Code::kShape, place, "every dim of logical_type must be a number", at);
    if (dims.size() < 5) dims.push_back(dim.dim_value());
  }
  return PageShape(dims, place, at);
}

// What has to be known of a structure, whoever wrote it: it may be large (decoder functions) and is not parsed.
struct Structure {
  std::string_view name;
  bool has_kind = false;
  std::optional<uint64_t> type_ref;
};
Result<Structure> SummaryOf(Span message, int64_t offset, const Place& place) {
  using S = pb::StructTypeProto;
  Structure structure;
  Scan scan(message, offset, place);
  for (Field field;;) {
    KVP_ASSIGN(const bool more, scan.Next(&field));
    if (!more) return structure;
    switch (field.number) {
      case S::kArrayFieldNumber:
      case S::kStructureFieldNumber:
      case S::kBitPackingFieldNumber:
        KVP_TRY(Expect(field, kLengthDelimited, "kind", place));
        structure.has_kind = true;
        structure.type_ref.reset();
        break;
      case S::kTypeRefFieldNumber:
        KVP_TRY(Expect(field, kVarint, "type_ref", place));
        structure.has_kind = true;
        structure.type_ref = field.varint;
        break;
      case S::kNameFieldNumber:
        KVP_TRY(Expect(field, kLengthDelimited, "name", place));
        structure.name = TextOf(field.bytes);
        break;
      default:
        break;
    }
  }
}

// What the pages of a side have in common: the last centre, and the last structure and logical type, which are not parsed
// again where the next page's have the same bytes.
struct SideState {
  explicit SideState(SharedBytes* center) : last_center(center) {}
  SharedBytes* last_center;
  std::string structure;
  Shape shape;
  Spec spec;
  pb::StructTypeProto type;
  std::string logical;
  Shape logical_shape;
};

Result<PayloadRef> ReadEncoded(const InstanceRef& instance, Span message, int64_t offset, SideState* state, const Place& place) {
  using E = pb::EncodedValueProto;
  Parts affine, structure;
  Parts logical;
  std::optional<Field> raw;
  bool external = false, shared = false;
  int64_t external_at = offset;
  std::string extras;
  Scan scan(message, offset, place);
  for (Field field;;) {
    KVP_ASSIGN(const bool more, scan.Next(&field));
    if (!more) break;
    switch (field.number) {
      case E::kAffineFieldNumber:
        KVP_TRY(Expect(field, kLengthDelimited, "affine", place));
        structure.Clear();
        KVP_TRY(affine.Add(field, place));
        break;
      case E::kStructTypeFieldNumber:
        KVP_TRY(Expect(field, kLengthDelimited, "struct_type", place));
        affine.Clear();
        KVP_TRY(structure.Add(field, place));
        break;
      case E::kLogicalTypeFieldNumber:
        KVP_TRY(Expect(field, kLengthDelimited, "logical_type", place));
        KVP_TRY(logical.Add(field, place));
        break;
      case E::kRawDataFieldNumber:
        KVP_TRY(Expect(field, kLengthDelimited, "raw_data", place));
        raw = field;
        break;
      case E::kExternalDataFieldNumber:
        external = true;
        external_at = field.at;
        break;
      case E::kDataLocationFieldNumber:
        KVP_TRY(Expect(field, kVarint, "data_location", place));
        external |= field.varint == pb::TensorProto::EXTERNAL;
        external_at = field.at;
        break;
      case E::kParameterRefFieldNumber:
        shared = true;
        extras.append(TextOf(field.raw));
        break;
      default:
        extras.append(TextOf(field.raw));
    }
  }
  if (external) return External(place, external_at);
  if (const std::string_view text = TextOf(logical.whole()); text.empty() || state->logical != text) {
    state->logical.clear();
    KVP_ASSIGN(state->logical_shape, LogicalShape(logical, place, offset));
    state->logical = text;
  }
  const Shape shape = state->logical_shape;
  const Span codes = raw ? raw->bytes : Span();
  const int64_t codes_at = raw ? raw->at : offset;

  std::string opaque_name;
  if (affine.set() && !shared) {
    if (!raw) return FileError(Code::kCorrupt, place, "raw_data is missing", offset);
    KVP_TRY(CheckParameters(affine, place));
    return ReadAffine(instance, affine.whole(), shape, codes, std::move(extras), place, affine.at(), codes_at);
  }
  if (structure.set() && !shared) {
    const auto own = [&] {
      return ReadOwn(instance, state->type, state->spec, shape, codes, std::move(extras), state->last_center, place, structure.at(), codes_at);
    };
    const std::string_view text = TextOf(structure.whole());
    if (!state->structure.empty() && state->structure == text && state->shape == shape) return own();
    KVP_ASSIGN(const Structure summary, SummaryOf(structure.whole(), structure.at(), place));
    if (!summary.has_kind) return FileError(Code::kCorrupt, place, "struct_type says no kind", structure.at());
    const std::optional<Spec> spec = layout::SpecOfName(summary.name, shape);
    if (spec) {
      state->structure.clear();
      KVP_TRY(ParseSmall(structure, &state->type, "struct_type", place));
      state->structure = text;
      state->shape = shape;
      state->spec = *spec;
      return own();
    }
    opaque_name = !summary.name.empty() ? Shown(summary.name)
                  : summary.type_ref    ? "type " + std::to_string(*summary.type_ref)
                                        : "unnamed structure";
  } else if (shared) {
    opaque_name = "shared parameters";
  } else {
    return FileError(Code::kCorrupt, place, "the encoded value has no layout", offset);
  }
  auto payload = std::make_shared<Payload>();
  payload->kind = PayloadKind::kOpaque;
  payload->shape = shape;
  payload->opaque_name = std::move(opaque_name);
  KVP_ASSIGN(payload->message, Bytes::Copy(message.data(), message.size(), instance->budget));
  return PayloadRef(std::move(payload));
}

// ---- Pages and the cache ----

// One side's oneof: a second alternative clears the first.
struct Side {
  Parts dense, encoded;
  Status Add(const Field& field, bool is_encoded, const char* name, const Place& place) {
    KVP_TRY(Expect(field, kLengthDelimited, name, place));
    (is_encoded ? dense : encoded).Clear();
    return (is_encoded ? encoded : dense).Add(field, place);
  }
  Result<PayloadRef> Read(const InstanceRef& instance, SideState* state, const Place& place, int64_t page_at) const {
    if (dense.set()) return ReadDense(instance, dense.whole(), dense.at(), place);
    if (encoded.set()) return ReadEncoded(instance, encoded.whole(), encoded.at(), state, place);
    return FileError(Code::kCorrupt, place, "payload is missing", page_at);
  }
};

Result<Page> ReadPage(const InstanceRef& instance, const Field& block, int64_t index, SideState states[2]) {
  using B = pb::PagedCacheBlockProto;
  const Place place{index, ""};
  Page page;
  bool has_start = false, has_length = false;
  Side key, value;
  std::string extras;
  Scan scan(block.bytes, block.content_at, place);
  for (Field field;;) {
    KVP_ASSIGN(const bool more, scan.Next(&field));
    if (!more) break;
    switch (field.number) {
      case B::kStartFieldNumber:
        KVP_TRY(Expect(field, kVarint, "start", place));
        page.start = static_cast<int64_t>(field.varint);
        has_start = true;
        break;
      case B::kLengthFieldNumber:
        KVP_TRY(Expect(field, kVarint, "length", place));
        page.length = static_cast<int64_t>(field.varint);
        has_length = true;
        break;
      case B::kKeyFieldNumber:
        KVP_TRY(key.Add(field, false, "key", place));
        break;
      case B::kEncodedKeyFieldNumber:
        KVP_TRY(key.Add(field, true, "encoded_key", place));
        break;
      case B::kValueFieldNumber:
        KVP_TRY(value.Add(field, false, "value", place));
        break;
      case B::kEncodedValueFieldNumber:
        KVP_TRY(value.Add(field, true, "encoded_value", place));
        break;
      default:
        extras.append(TextOf(field.raw));
    }
  }
  if (!has_start) return FileError(Code::kCorrupt, place, "start is missing", block.at);
  if (!has_length) return FileError(Code::kCorrupt, place, "length is missing", block.at);
  KVP_ASSIGN(page.key, key.Read(instance, &states[0], {index, "key"}, block.at));
  KVP_ASSIGN(page.value, value.Read(instance, &states[1], {index, "value"}, block.at));
  if (!extras.empty()) page.extras = std::make_shared<const std::string>(std::move(extras));
  return page;
}

}  // namespace

Result<Page> ParsePage(const InstanceRef& instance, std::span<const uint8_t> bytes, int64_t offset, int64_t index,
                       SharedBytes centers[2]) {
  const Place place{index, ""};
  if (bytes.size() > INT32_MAX) return FileError(Code::kLimit, place, "a page holds at most 2147483647 bytes", offset, std::to_string(bytes.size()));
  Scan scan(bytes, offset, place);
  Field field;
  KVP_ASSIGN(const bool there, scan.Next(&field));
  if (!there || field.number != pb::PagedCacheProto::kBlocksFieldNumber || field.raw.size() != bytes.size()) {
    return FileError(Code::kCorrupt, place, "must be one page", offset);
  }
  KVP_TRY(Expect(field, kLengthDelimited, "blocks", place));
  SideState states[2] = {SideState(&centers[0]), SideState(&centers[1])};
  return ReadPage(instance, field, index, states);
}

Result<PagedCache> ParsePagedCache(const InstanceRef& instance, std::span<const uint8_t> bytes) {
  using P = pb::PagedCacheProto;
  const Place nowhere;
  if (bytes.size() > INT32_MAX) {
    return MakeError(Code::kLimit, "bytes", "a PagedCacheProto holds at most 2147483647 bytes", std::to_string(bytes.size()));
  }
  if (IsEnvelope(bytes)) {
    return FileError(Code::kCorrupt, nowhere, "not a PagedCacheProto but a ModelCache envelope, which restore reads", 0);
  }
  PagedCache cache;
  std::vector<int64_t> positions;
  SharedBytes centers[2];
  SideState states[2] = {SideState(&centers[0]), SideState(&centers[1])};
  Scan scan(bytes, 0, nowhere);
  for (Field field;;) {
    KVP_ASSIGN(const bool more, scan.Next(&field));
    if (!more) break;
    switch (field.number) {
      case P::kBlocksFieldNumber: {
        KVP_TRY(Expect(field, kLengthDelimited, "blocks", nowhere));
        KVP_ASSIGN(Page page, ReadPage(instance, field, static_cast<int64_t>(cache.pages.size()), states));
        cache.pages.push_back(std::move(page));
        positions.push_back(field.at);
        break;
      }
      case P::kNameFieldNumber:
        KVP_TRY(Expect(field, kLengthDelimited, "name", nowhere));
        cache.name = TextOf(field.bytes);
        break;
      case P::kDocStringFieldNumber:
        KVP_TRY(Expect(field, kLengthDelimited, "doc_string", nowhere));
        cache.doc_string = TextOf(field.bytes);
        break;
      default:
        cache.extras.append(TextOf(field.raw));
    }
  }
  Status valid = Validate(cache, true);
  if (!valid.ok()) {
    Error error = std::move(valid.error());
    error.argument = "bytes";
    if (error.page) {
      error.byte_offset = positions[static_cast<size_t>(*error.page)];
      error.message += ", at byte " + Text(*error.byte_offset);
    }
    return error;
  }
  return cache;
}

}  // namespace kvpages
