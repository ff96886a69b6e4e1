// SPDX-License-Identifier: Apache-2.0
// Packed codes: code i stands at bits [i * bits, (i + 1) * bits) of a little-endian bit stream. For 3-bit codes that is
// the same as eight codes in a 24-bit little-endian word.
#pragma once

#include <cstdint>

#include "core/float.h"

namespace kvpages {

KVP_HD uint32_t GetCode(const uint8_t* codes, int bits, int64_t index) {
  if (bits == 8) return codes[index];
  const int64_t at = index * bits;
  const int shift = static_cast<int>(at & 7);
  uint32_t word = codes[at >> 3];
  if (shift + bits > 8) word |= static_cast<uint32_t>(codes[(at >> 3) + 1]) << 8;
  return word >> shift & ((1u << bits) - 1);
}

// Not for threads that share a byte.
KVP_HD void PutCode(uint8_t* codes, int bits, int64_t index, uint32_t code) {
  if (bits == 8) {
    codes[index] = static_cast<uint8_t>(code);
    return;
  }
  const int64_t at = index * bits;
  const int shift = static_cast<int>(at & 7);
  const uint32_t mask = (1u << bits) - 1;
  uint8_t* byte = codes + (at >> 3);
  byte[0] = static_cast<uint8_t>((byte[0] & ~(mask << shift)) | (code & mask) << shift);
  if (shift + bits > 8) byte[1] = static_cast<uint8_t>((byte[1] & ~(mask >> (8 - shift))) | (code & mask) >> (8 - shift));
}

KVP_HD int32_t SignExtend(uint32_t code, int bits) {
  const uint32_t sign = 1u << (bits - 1);
  return static_cast<int32_t>(((code & (2 * sign - 1)) ^ sign) - sign);
}

}  // namespace kvpages
