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
KVP_HD void EncodeSchemeBlock(Type type, const SpecOptions& options, float global, const float* x, int64_t index, uint8_t* codes,
                              uint8_t* scales) {
  if (const int bytes = LlamaBlockBytes(type); bytes > 0) return EncodeLlama(type, x, codes + index * bytes);
  const int block = SchemeBlock(type), bits = CodeBits(type);
  uint8_t unpacked[kLargestSchemeBlock];
  scales[index] = block == kNvfp4Block ? EncodeNvfp4(x, global, type == Type::nvfp4_4over6, unpacked)
                                       : EncodeMx(type, options.rule, x, unpacked);
  for (int i = 0; i < block; ++i) PutCode(codes, bits, index * block + i, unpacked[i]);
}

// Element i of block `index`.
KVP_HD float DecodeSchemeElement(Type type, float global, int64_t index, int i, const uint8_t* codes, const uint8_t* scales) {
  if (const int bytes = LlamaBlockBytes(type); bytes > 0) return DecodeLlama(type, codes + index * bytes, i);
  const int block = SchemeBlock(type);
  const uint32_t code = GetCode(codes, CodeBits(type), index * block + i);
  return block == kNvfp4Block ? DecodeNvfp4(code, scales[index], global) : DecodeMx(type, code, scales[index]);
}
KVP_HD void DecodeSchemeBlock(Type type, float global, int64_t index, const uint8_t* codes, const uint8_t* scales, float* out) {
  for (int i = 0; i < SchemeBlock(type); ++i) out[i] = DecodeSchemeElement(type, global, index, i, codes, scales);
}

}  // namespace kvpages
