// SPDX-License-Identifier: Apache-2.0
// One block of a scheme inside a payload's arrays.
#pragma once

#include <cstdint>

#include "formats/llama.h"
#include "formats/mx.h"
#include "formats/nvfp4.h"
#include "formats/packing.h"

namespace kvpages {

constexpr int kLargestSchemeBlock = 32;

// `index`: number of the block in the flat tensor. x: Info(type).block elements.
inline void EncodeSchemeBlock(Type type, const SpecOptions& options, float global, const float* x, int64_t index, uint8_t* codes,
                              uint8_t* scales) {
  if (const int bytes = LlamaBlockBytes(type); bytes > 0) return EncodeLlama(type, x, codes + index * bytes);
  const TypeInfo& info = Info(type);
  uint8_t unpacked[kLargestSchemeBlock];
  scales[index] = info.block == kNvfp4Block ? EncodeNvfp4(x, global, type == Type::nvfp4_4over6, unpacked)
                                            : EncodeMx(type, options.rule, x, unpacked);
  for (int i = 0; i < info.block; ++i) PutCode(codes, info.bits, index * info.block + i, unpacked[i]);
}

inline void DecodeSchemeBlock(Type type, float global, int64_t index, const uint8_t* codes, const uint8_t* scales, float* out) {
  const TypeInfo& info = Info(type);
  const int bytes = LlamaBlockBytes(type);
  for (int i = 0; i < info.block; ++i) {
    if (bytes > 0) {
      out[i] = DecodeLlama(type, codes + index * bytes, i);
      continue;
    }
    const uint32_t code = GetCode(codes, info.bits, index * info.block + i);
    out[i] = info.block == kNvfp4Block ? DecodeNvfp4(code, scales[index], global) : DecodeMx(type, code, scales[index]);
  }
}

}  // namespace kvpages
