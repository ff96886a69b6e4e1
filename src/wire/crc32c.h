// SPDX-License-Identifier: Apache-2.0
// CRC-32C (Castagnoli, reflected polynomial 0x82f63b78), as RFC 3720 defines it.
#pragma once

#include <cstdint>
#include <span>

namespace kvpages {

// Of `bytes` behind what `crc` is of; 0 for a beginning.
uint32_t Crc32c(std::span<const uint8_t> bytes, uint32_t crc = 0);

}  // namespace kvpages
