// SPDX-License-Identifier: Apache-2.0
// llama.cpp's cache types: blocks of 32 elements that hold their own scale.
#pragma once

#include <cstdint>

#include "formats/types.h"

namespace kvpages {

// Bytes of one block, 0 for a type that is not llama.cpp's.
constexpr int LlamaBlockBytes(Type type) {
  switch (type) {
    case Type::q8_0: return 34;
    case Type::q4_0: return 18;
    case Type::q4_1: return 20;
    case Type::q5_0: return 22;
    case Type::q5_1: return 24;
    case Type::iq4_nl: return 18;
    default: return 0;
  }
}

}  // namespace kvpages
