// SPDX-License-Identifier: Apache-2.0
// Vector packing of codes of every width, those that no type has yet too: a new integer type is one line elsewhere.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "backends/simd/packing-inl.h"

namespace kvpages {
namespace {

TEST(Packing, EveryWidthIsTheReferences) {
  constexpr uint8_t kGuard = 0xa5;
  for (int bits = 1; bits <= 8; ++bits) {
    for (int64_t count = 0; count <= 200; ++count) {
      SCOPED_TRACE(std::to_string(bits) + " bits, " + std::to_string(count) + " codes");
      std::vector<uint8_t> codes(static_cast<size_t>(count) + 1);
      for (int64_t i = 0; i < count; ++i) codes[static_cast<size_t>(i)] = static_cast<uint8_t>((i * i * 37 + i) & ((1 << bits) - 1));
      const auto size = static_cast<size_t>(PackedBytes(bits, count));
      std::vector<uint8_t> want(size + 16, kGuard), got(want);
      std::fill_n(want.begin(), size, uint8_t{0});
      for (int64_t i = 0; i < count; ++i) PutCode(want.data(), bits, i, codes[static_cast<size_t>(i)]);
      HWY_NAMESPACE::PackCodes(bits, codes.data(), count, got.data());
      ASSERT_EQ(got, want);
      for (const int64_t first : {int64_t{0}, count / 3, count / 2}) {
        std::vector<uint8_t> buffer(static_cast<size_t>(count) + 16);
        const uint8_t* bytes = HWY_NAMESPACE::UnpackCodes(bits, got.data(), first, count - first, buffer.data());
        for (int64_t i = first; i < count; ++i) ASSERT_EQ(bytes[i - first], codes[static_cast<size_t>(i)]) << i;
      }
    }
  }
}

}  // namespace
}  // namespace kvpages
