// SPDX-License-Identifier: Apache-2.0
// Payloads and pages. A payload never changes once it is made, so caches share them freely.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/bytes.h"
#include "core/device_bytes.h"
#include "core/shape.h"
#include "core/status.h"
#include "formats/spec.h"

namespace kvpages {

enum class PayloadKind : uint8_t {
  kDense,    // f32, f16 or bf16 elements
  kEncoded,  // codes with scales: an affine layout or one of the library's specs
  kOpaque,   // a structured or shared encoding that this version does not know: carried through unchanged
};

// Metadata of a message that conversion does not keep and a round trip must: name, doc_string and unknown fields, as
// the serialized fields they were. Written by the wire room only.
struct MessageExtras {
  std::string tensor;   // of the TensorProto or EncodedValueProto
  std::string affine;   // of the AffineLayoutProto
};

// The arrays of a payload that lies in a device's memory, by address there.
struct DeviceArrays {
  DeviceBytes block;
  uint64_t codes = 0, scales = 0, zeros = 0;  // codes: elements of a dense payload; 0 for an array that there is not
  uint64_t global = 0;                        // f32; 0: 1
  uint64_t code_bytes = 0, scale_bytes = 0, zero_bytes = 0;
};

// Attention goes through very many of them: what it reads of each comes first.
struct Payload {
  PayloadKind kind = PayloadKind::kDense;
  Type dense_type = Type::f32;  // kDense
  bool has_zeros = false;       // affine: whether the message had a zero point
  uint8_t zero_byte = 0;        // affine per tensor: the byte as given, high bits and all
  float global = 1.0f;
  Shape shape;  // tokens is the capacity

  // kEncoded
  Spec spec;                 // for a file's affine layout: type, `given`, f32, and axis where a spec word has it
  Grid grid;
  Bytes codes, scales;
  Bytes zeros;                 // arrays as in formats/spec.h; affine: f32 scales, zero points one byte each
  int64_t hadamard = 0;        // run length, 0 without +hadamard
  SharedBytes center;          // bf16 [heads, width], empty without +center; one block for all pages of a layer
  bool affine = false;         // written as AffineLayoutProto with `axis` and `block`, else as kvpages.<spec>.v1
  int axis = -1;               // -1: per tensor
  int64_t block = 0;           // 0: one scale per index of the axis

  // kDense
  Bytes data;  // shape.elements() of dense_type, rows past the page's length included

  // kOpaque
  Bytes message;          // the serialized EncodedValueProto
  std::string opaque_name;  // struct type's name or "shared parameters", for messages

  std::shared_ptr<const MessageExtras> extras;  // null where there are none

  // Set for a payload of a cache on a device: data, codes, scales and zeros are empty, and what is asked of them goes through the
  // cache's PageStore (core/page_store.h). `global` holds from when it was encoded.
  std::unique_ptr<DeviceArrays> device;

  uint64_t data_bytes() const { return !device ? data.size() : kind == PayloadKind::kDense ? device->code_bytes : 0; }
  uint64_t code_bytes() const { return !device ? codes.size() : kind == PayloadKind::kDense ? 0 : device->code_bytes; }
  uint64_t scale_bytes() const { return device ? device->scale_bytes : scales.size(); }
  uint64_t zero_bytes() const { return device ? device->zero_bytes : zeros.size(); }
  uint64_t global_bytes() const { return kind == PayloadKind::kEncoded ? static_cast<uint64_t>(SizesOf(spec, shape).global()) : 0; }
  // What is taken from the budget: `global` is a field of this struct.
  uint64_t bytes() const { return data_bytes() + code_bytes() + scale_bytes() + zero_bytes() + center.size() + message.size(); }
};
using PayloadRef = std::shared_ptr<const Payload>;

// All but its arrays and the memory that they lie in.
std::shared_ptr<Payload> WithoutArrays(const Payload& payload);
std::string FormatName(const Payload& payload);  // "f16", "int4/tensor/given/f32", "opaque (Q4_K)"

struct Page {
  int64_t start = 0;   // position of the first token
  int64_t length = 0;  // valid tokens
  PayloadRef key, value;
  std::shared_ptr<const std::string> extras;  // unknown fields of the block message, null where there are none
  int64_t capacity() const { return key->shape.tokens; }
};

// Ordered pages of one layer's K and V. Copying shares the payloads.
struct PagedCache {
  std::vector<Page> pages;
  std::optional<std::string> name, doc_string;
  std::string extras;  // unknown fields
};

// The rules of a whole cache: first start 0, no gaps, 1 <= length <= capacity, equal capacities within a page, equal
// batch, heads and widths over pages, finite positive scales. Errors carry the page.
// `scales_known`: the scales were found good when the payloads were made.
Status Validate(const PagedCache& cache, bool scales_known = false);
// The index of the first of `count` f32 scales, at any address, that is not finite and > 0; else `count`.
int64_t FirstBadScale(const void* scales, int64_t count);

}  // namespace kvpages
