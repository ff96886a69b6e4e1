// SPDX-License-Identifier: Apache-2.0
#include "wire/crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__)
#include <nmmintrin.h>
#define KVP_CRC_INSTRUCTION 1
#endif

namespace kvpages {
namespace {

// tables[k][b]: the CRC of byte b followed by k zero bytes, so that eight bytes are taken at once.
using Tables = std::array<std::array<uint32_t, 256>, 8>;
Tables MakeTables() {
  Tables tables;
  for (uint32_t b = 0; b < 256; ++b) {
    uint32_t crc = b;
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? 0x82f63b78u : 0);
    tables[0][b] = crc;
  }
  for (size_t k = 1; k < 8; ++k) {
    for (size_t b = 0; b < 256; ++b) tables[k][b] = tables[k - 1][b] >> 8 ^ tables[0][tables[k - 1][b] & 0xff];
  }
  return tables;
}

uint32_t ByTable(const uint8_t* at, size_t size, uint32_t crc) {
  // Made when first asked for: as constants they would be 8 kB of every download, and no compressor makes those smaller.
  static const Tables tables = MakeTables();
  for (; size >= 8; at += 8, size -= 8) {
    uint64_t word;
    std::memcpy(&word, at, 8);  // little-endian, as all targets are
    word ^= crc;
    crc = 0;
    for (size_t k = 0; k < 8; ++k) crc ^= tables[7 - k][word >> (8 * k) & 0xff];
  }
  for (; size > 0; ++at, --size) crc = crc >> 8 ^ tables[0][(crc ^ *at) & 0xff];
  return crc;
}

#if defined(KVP_CRC_INSTRUCTION)
__attribute__((target("sse4.2"))) uint32_t ByInstruction(const uint8_t* at, size_t size, uint32_t crc) {
  uint64_t wide = crc;
  for (; size >= 8; at += 8, size -= 8) {
    uint64_t word;
    std::memcpy(&word, at, 8);
    wide = _mm_crc32_u64(wide, word);
  }
  crc = static_cast<uint32_t>(wide);
  for (; size > 0; ++at, --size) crc = _mm_crc32_u8(crc, *at);
  return crc;
}
#endif

}  // namespace

uint32_t Crc32c(std::span<const uint8_t> bytes, uint32_t crc) {
  crc = ~crc;
#if defined(KVP_CRC_INSTRUCTION)
  static const bool has_instruction = __builtin_cpu_supports("sse4.2");
  if (has_instruction) return ~ByInstruction(bytes.data(), bytes.size(), crc);
#endif
  return ~ByTable(bytes.data(), bytes.size(), crc);
}

}  // namespace kvpages
