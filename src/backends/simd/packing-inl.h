// SPDX-License-Identifier: Apache-2.0
// Codes between one byte each and the packed stream of formats/packing.h. Counts are multiples of 8 codes, so that every
// width fills whole bytes; the last few codes of a payload go through PutCode and GetCode.
#if defined(KVPAGES_BACKENDS_SIMD_PACKING_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVPAGES_BACKENDS_SIMD_PACKING_INL_H_
#undef KVPAGES_BACKENDS_SIMD_PACKING_INL_H_
#else
#define KVPAGES_BACKENDS_SIMD_PACKING_INL_H_
#endif

#include <cstdint>
#include <cstring>

#include "formats/packing.h"
#include "formats/types.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace kvpages {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

// Eight codes at the bottoms of eight bytes -> eight codes side by side, for any width.
template <int kBits>
HWY_INLINE uint64_t Squeeze(uint64_t x) {
  constexpr uint64_t kCode = (1u << kBits) - 1, kPair = (1u << 2 * kBits) - 1, kQuad = (uint64_t{1} << 4 * kBits) - 1;
  x &= kCode * 0x0101010101010101u;
  x = (x & kCode * 0x0001000100010001u) | (x >> (8 - kBits) & (kPair - kCode) * 0x0001000100010001u);
  x = (x & kPair * 0x0000000100000001u) | (x >> 2 * (8 - kBits) & (kQuad - kPair) * 0x0000000100000001u);
  return (x & kQuad) | (x >> 4 * (8 - kBits) & kQuad << 4 * kBits);
}
template <int kBits>
HWY_INLINE uint64_t Spread(uint64_t x) {
  constexpr uint64_t kCode = (1u << kBits) - 1, kPair = (1u << 2 * kBits) - 1, kQuad = (uint64_t{1} << 4 * kBits) - 1;
  x = (x & kQuad) | (x & kQuad << 4 * kBits) << 4 * (8 - kBits);
  x = (x & kPair * 0x0000000100000001u) | (x & (kQuad - kPair) * 0x0000000100000001u) << 2 * (8 - kBits);
  return (x & kCode * 0x0001000100010001u) | (x & (kPair - kCode) * 0x0001000100010001u) << (8 - kBits);
}

template <int kBits>
void PackEights(const uint8_t* bytes, int64_t count, uint8_t* out) {
  int64_t i = 0;
  if constexpr (kBits == 4) {
    const hn::ScalableTag<uint8_t> d8;
    const hn::Repartition<uint16_t, decltype(d8)> d16;
    const auto lanes = static_cast<int64_t>(hn::Lanes(d8));
    for (; i + 2 * lanes <= count; i += 2 * lanes) {
      const auto squeeze = [&](const uint8_t* from) HWY_ATTR {
        const auto pair = hn::BitCast(d16, hn::LoadU(d8, from));
        return hn::Or(hn::And(pair, hn::Set(d16, 0x000f)), hn::And(hn::ShiftRight<4>(pair), hn::Set(d16, 0x00f0)));
      };
#if HWY_MAX_BYTES == 16
      // In order where there is one block, and cheaper.
      const hn::RebindToSigned<decltype(d16)> i16;
      const auto pairs = hn::ReorderDemote2To(d8, hn::BitCast(i16, squeeze(bytes + i)), hn::BitCast(i16, squeeze(bytes + i + lanes)));
#else
      const auto pairs = hn::OrderedTruncate2To(d8, squeeze(bytes + i), squeeze(bytes + i + lanes));
#endif
      hn::StoreU(pairs, d8, out + i / 2);
    }
  }
  if constexpr (kBits == 3) {
    // Two words of eight codes to a vector; the two bytes too many are overwritten by the next, so the last is left.
    const hn::Full128<uint8_t> d8;
    const hn::Full128<uint64_t> d64;
    alignas(16) constexpr uint8_t kPick[16] = {0, 1, 2, 8, 9, 10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0};
    const auto pick = hn::Load(d8, kPick);
    const auto set = [&](uint64_t word) HWY_ATTR { return hn::Set(d64, word); };
    for (; i + 24 <= count; i += 16) {
      auto x = hn::And(hn::BitCast(d64, hn::LoadU(d8, bytes + i)), set(0x0707070707070707u));
      x = hn::Or(hn::And(x, set(0x0007000700070007u)), hn::And(hn::ShiftRight<5>(x), set(0x0038003800380038u)));
      x = hn::Or(hn::And(x, set(0x0000003f0000003fu)), hn::And(hn::ShiftRight<10>(x), set(0x00000fc000000fc0u)));
      x = hn::Or(hn::And(x, set(0x0000000000000fffu)), hn::And(hn::ShiftRight<20>(x), set(0x0000000000fff000u)));
      const uint64_t six = hn::GetLane(hn::BitCast(d64, hn::TableLookupBytes(hn::BitCast(d8, x), pick)));
      std::memcpy(out + i * 3 / 8, &six, 8);
    }
  }
  for (; i < count; i += 8) {
    uint64_t word;
    std::memcpy(&word, bytes + i, 8);
    word = Squeeze<kBits>(word);
    std::memcpy(out + i * kBits / 8, &word, kBits);
  }
}

template <int kBits>
void UnpackEights(const uint8_t* packed, int64_t count, uint8_t* bytes) {
  int64_t i = 0;
  if constexpr (kBits == 4) {
    const hn::ScalableTag<uint8_t> d8;
    const hn::Repartition<uint16_t, decltype(d8)> d16;
    const hn::Rebind<uint8_t, decltype(d16)> half;
    const auto lanes = static_cast<int64_t>(hn::Lanes(d8));
#if HWY_MAX_BYTES == 16
    for (; i + 2 * lanes <= count; i += 2 * lanes) {
      const auto pairs = hn::LoadU(d8, packed + i / 2), nibble = hn::Set(d8, 15);
      const auto low = hn::And(pairs, nibble), high = hn::And(hn::BitCast(d8, hn::ShiftRight<4>(hn::BitCast(d16, pairs))), nibble);
      hn::StoreU(hn::InterleaveLower(d8, low, high), d8, bytes + i);
      hn::StoreU(hn::InterleaveUpper(d8, low, high), d8, bytes + i + lanes);
    }
#endif
    for (; i + lanes <= count; i += lanes) {
      const auto pair = hn::PromoteTo(d16, hn::LoadU(half, packed + i / 2));
      const auto spread = hn::Or(hn::And(pair, hn::Set(d16, 0x000f)), hn::And(hn::ShiftLeft<4>(pair), hn::Set(d16, 0x0f00)));
      hn::StoreU(hn::BitCast(d8, spread), d8, bytes + i);
    }
  }
  if constexpr (kBits == 3) {
    const hn::Full128<uint8_t> d8;
    const hn::Full128<uint64_t> d64;
    alignas(16) constexpr uint8_t kPlace[16] = {0, 1, 2, 128, 128, 128, 128, 128, 3, 4, 5, 128, 128, 128, 128, 128};
    const auto place = hn::Load(d8, kPlace);
    const auto set = [&](uint64_t word) HWY_ATTR { return hn::Set(d64, word); };
    for (; (i + 24) <= count; i += 16) {  // 8 bytes are read for 6
      uint64_t eight;
      std::memcpy(&eight, packed + i * 3 / 8, 8);
      auto x = hn::BitCast(d64, hn::TableLookupBytesOr0(hn::BitCast(d8, hn::Set(d64, eight)), place));
      x = hn::Or(hn::And(x, set(0x0000000000000fffu)), hn::ShiftLeft<20>(hn::And(x, set(0x0000000000fff000u))));
      x = hn::Or(hn::And(x, set(0x0000003f0000003fu)), hn::ShiftLeft<10>(hn::And(x, set(0x00000fc000000fc0u))));
      x = hn::Or(hn::And(x, set(0x0007000700070007u)), hn::ShiftLeft<5>(hn::And(x, set(0x0038003800380038u))));
      hn::StoreU(hn::BitCast(d8, x), d8, bytes + i);
    }
  }
  for (; i < count; i += 8) {
    uint64_t word = 0;
    std::memcpy(&word, packed + i * kBits / 8, kBits);
    word = Spread<kBits>(word);
    std::memcpy(bytes + i, &word, 8);
  }
}

// Calls f.operator()<bits>() for a width below 8. All are here: which of them have types is formats/types.h's to say.
template <typename F>
HWY_INLINE void WithBits(int bits, F&& f) {
  switch (bits) {
    case 1: return f.template operator()<1>();
    case 2: return f.template operator()<2>();
    case 3: return f.template operator()<3>();
    case 4: return f.template operator()<4>();
    case 5: return f.template operator()<5>();
    case 6: return f.template operator()<6>();
    default: return f.template operator()<7>();
  }
}

inline void PackCodes(int bits, const uint8_t* bytes, int64_t count, uint8_t* out) {
  if (bits == 8) {
    if (count > 0) std::memcpy(out, bytes, static_cast<size_t>(count));
    return;
  }
  const int64_t whole = count / 8 * 8;
  WithBits(bits, [&]<int kBits>() { PackEights<kBits>(bytes, whole, out); });
  if (whole == count) return;
  std::memset(out + whole * bits / 8, 0, static_cast<size_t>(PackedBytes(bits, count) - whole * bits / 8));
  for (int64_t i = whole; i < count; ++i) PutCode(out, bits, i, bytes[i]);
}

// Codes [first, first + count) to bytes; returns where they stand in `buffer`, which holds count + 8.
inline const uint8_t* UnpackCodes(int bits, const uint8_t* packed, int64_t first, int64_t count, uint8_t* buffer) {
  if (bits == 8) return packed + first;
  const int64_t skip = first % 8, whole = (skip + count) / 8 * 8;
  const uint8_t* from = packed + (first - skip) * bits / 8;
  WithBits(bits, [&]<int kBits>() { UnpackEights<kBits>(from, whole, buffer); });
  for (int64_t i = whole; i < skip + count; ++i) buffer[i] = static_cast<uint8_t>(GetCode(from, bits, i));
  return buffer + skip;
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace kvpages
HWY_AFTER_NAMESPACE();
#endif
