// SPDX-License-Identifier: Apache-2.0
#include "formats/types.h"

#include <iterator>

namespace kvpages {
namespace {

// A C++ name cannot hold the "-" of a spec word.
constexpr std::string_view Word(std::string_view name) { return name == "nvfp4_4over6" ? "nvfp4-4over6" : name; }

constexpr TypeInfo kTypes[] = {
#define KVP_X(name, family, bits, is_signed, onnx, block) \
  {Word(#name), Type::name, Family::family, bits, is_signed, onnx, block},
    KVP_TYPES(KVP_X)
#undef KVP_X
};

struct Alias {
  std::string_view name;
  Type type;
};
constexpr Alias kAliases[] = {{"float32", Type::f32}, {"float16", Type::f16}, {"bfloat16", Type::bf16}};

}  // namespace

const TypeInfo& Info(Type type) { return kTypes[static_cast<size_t>(type)]; }
int TypeCount() { return static_cast<int>(std::size(kTypes)); }
const TypeInfo& TypeAt(int index) { return kTypes[index]; }

const TypeInfo* FindType(std::string_view name) {
  for (const TypeInfo& info : kTypes) {
    if (info.name == name) return &info;
  }
  for (const Alias& alias : kAliases) {
    if (alias.name == name) return &Info(alias.type);
  }
  return nullptr;
}

const TypeInfo* FindOnnxType(int onnx_number) {
  for (const TypeInfo& info : kTypes) {
    if (info.onnx != 0 && info.onnx == onnx_number) return &info;
  }
  return nullptr;
}

}  // namespace kvpages
