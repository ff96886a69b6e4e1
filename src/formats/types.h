// SPDX-License-Identifier: Apache-2.0
// The list of element types. A new integer type is one line here; a type with other arithmetic is one line and
// one file (see CONTRIBUTING.md). Everything else (spec words, sizes, tables of every backend, the list that
// JavaScript sees, the parameterised tests) is computed from this list.
#pragma once

#include <cstdint>
#include <string_view>

#include "core/float.h"

namespace kvpages {

enum class Family : uint8_t {
  kDense,      // f32 f16 bf16
  kInteger,    // affine codes of any width from 1 to 8 bits
  kFloatCode,  // e4m3, e5m2, e2m1
  kLevels,     // index into a table of levels
  kScheme,     // fixes block, scales and layout itself: nvfp4, mx, llama.cpp types
};

// name (also the C++ constant), family, bits of a code, signed, number in ONNX's TensorProto.DataType (0: none),
// block of a scheme (0: free)
#define KVP_TYPES(X)                                  \
  X(f32, kDense, 32, true, 1, 0)                      \
  X(f16, kDense, 16, true, 10, 0)                     \
  X(bf16, kDense, 16, true, 16, 0)                    \
  X(int8, kInteger, 8, true, 3, 0)                    \
  X(uint8, kInteger, 8, false, 2, 0)                  \
  X(int4, kInteger, 4, true, 22, 0)                   \
  X(uint4, kInteger, 4, false, 21, 0)                 \
  X(int3, kInteger, 3, true, 0, 0)                    \
  X(uint3, kInteger, 3, false, 0, 0)                  \
  X(int2, kInteger, 2, true, 26, 0)                   \
  X(uint2, kInteger, 2, false, 25, 0)                 \
  X(e4m3, kFloatCode, 8, true, 0, 0)                  \
  X(e5m2, kFloatCode, 8, true, 0, 0)                  \
  X(e2m1, kFloatCode, 4, true, 0, 0)                  \
  X(e2m1tz, kFloatCode, 4, true, 0, 0)                \
  X(lm4, kLevels, 4, false, 0, 0)                     \
  X(lm3, kLevels, 3, false, 0, 0)                     \
  X(lm2, kLevels, 2, false, 0, 0)                     \
  X(nvfp4, kScheme, 4, true, 0, 16)                   \
  X(nvfp4_4over6, kScheme, 4, true, 0, 16)            \
  X(mxfp4, kScheme, 4, true, 0, 32)                   \
  X(mxfp8, kScheme, 8, true, 0, 32)                   \
  X(q8_0, kScheme, 8, true, 0, 32)                    \
  X(q4_0, kScheme, 4, true, 0, 32)                    \
  X(q4_1, kScheme, 4, false, 0, 32)                   \
  X(q5_0, kScheme, 5, true, 0, 32)                    \
  X(q5_1, kScheme, 5, false, 0, 32)                   \
  X(iq4_nl, kScheme, 4, true, 0, 32)

enum class Type : uint8_t {
#define KVP_X(name, ...) name,
  KVP_TYPES(KVP_X)
#undef KVP_X
};

struct TypeInfo {
  std::string_view name;  // the word in a spec string ('_4over6' is spelt '-4over6')
  Type type;
  Family family;
  int bits;
  bool is_signed;
  int onnx;   // TensorProto.DataType, 0 where ONNX has none that an affine layout may store
  int block;  // elements of a scheme's block, 0 where the spec chooses
};

const TypeInfo& Info(Type type);
// Two of its fields, also on a device.
KVP_HD constexpr int CodeBits(Type type) {
  switch (type) {
#define KVP_X(name, family, bits, ...) \
  case Type::name: return bits;
    KVP_TYPES(KVP_X)
#undef KVP_X
  }
  return 0;
}
KVP_HD constexpr int SchemeBlock(Type type) {
  switch (type) {
#define KVP_X(name, family, bits, is_signed, onnx, block) \
  case Type::name: return block;
    KVP_TYPES(KVP_X)
#undef KVP_X
  }
  return 0;
}
int TypeCount();
const TypeInfo& TypeAt(int index);
const TypeInfo* FindType(std::string_view name);       // spec word, or onnxruntime's alias of a dense type
const TypeInfo* FindOnnxType(int onnx_number);

// Codes are a little-endian bit stream, first code in the lowest bits, in groups that fill whole bytes: 1 byte
// for 8-, 4- and 2-bit codes, 3 bytes (8 codes) for 3-bit ones; a partial last group is filled with zero bits.
constexpr int GroupCodes(int bits) { return bits % 8 == 0 ? 1 : bits % 4 == 0 ? 2 : bits % 2 == 0 ? 4 : 8; }
constexpr int GroupBytes(int bits) { return bits * GroupCodes(bits) / 8; }
constexpr int64_t PackedBytes(int bits, int64_t codes) {
  return (codes + GroupCodes(bits) - 1) / GroupCodes(bits) * GroupBytes(bits);
}

}  // namespace kvpages
