// SPDX-License-Identifier: Apache-2.0
// Payloads and pages. A payload never changes once it is made, so caches share them freely.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/bytes.h"
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
  uint64_t bytes() const { return data.size() + codes.size() + scales.size() + zeros.size() + center.size() + message.size(); }
};
using PayloadRef = std::shared_ptr<const Payload>;

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
Status Validate(const PagedCache& cache);
// The index of the first of `count` f32 scales, at any address, that is not finite and > 0; else `count`.
int64_t FirstBadScale(const void* scales, int64_t count);

}  // namespace kvpages
