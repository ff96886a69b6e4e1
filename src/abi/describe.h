// SPDX-License-Identifier: Apache-2.0
// C prototypes -> signature letters, at compile time. A parameter type outside this list does not compile.
//   scalars  i int32_t   u uint32_t   d double
//   inputs   T text   B bytes   F float   D double   I int32_t   U uint32_t   L int64_t     (const pointer, length)
//   outputs  b bytes   f float   e double   j int32_t   v uint32_t   l int64_t               (pointer, length)
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace kvpages::abi {

template <typename T>
constexpr char Letter() {
  if constexpr (std::is_same_v<T, int32_t>) return 'i';
  else if constexpr (std::is_same_v<T, uint32_t>) return 'u';
  else if constexpr (std::is_same_v<T, double>) return 'd';
  else if constexpr (std::is_same_v<T, const char*>) return 'T';
  else if constexpr (std::is_same_v<T, const uint8_t*>) return 'B';
  else if constexpr (std::is_same_v<T, const float*>) return 'F';
  else if constexpr (std::is_same_v<T, const double*>) return 'D';
  else if constexpr (std::is_same_v<T, const int32_t*>) return 'I';
  else if constexpr (std::is_same_v<T, const uint32_t*>) return 'U';
  else if constexpr (std::is_same_v<T, const int64_t*>) return 'L';
  else if constexpr (std::is_same_v<T, uint8_t*>) return 'b';
  else if constexpr (std::is_same_v<T, float*>) return 'f';
  else if constexpr (std::is_same_v<T, double*>) return 'e';
  else if constexpr (std::is_same_v<T, int32_t*>) return 'j';
  else if constexpr (std::is_same_v<T, uint32_t*>) return 'v';
  else if constexpr (std::is_same_v<T, int64_t*>) return 'l';
  else static_assert(!sizeof(T), "not a type of the C ABI");
}

// Letters of a prototype, with a 0 at the end; the size_t behind each pointer is its length and has no letter.
template <typename... Args>
constexpr std::array<char, sizeof...(Args) + 1> Letters(int32_t (*)(Args...)) {
  std::array<char, sizeof...(Args) + 1> letters{};
  [[maybe_unused]] size_t count = 0;
  [[maybe_unused]] bool after_pointer = false;
  [[maybe_unused]] const auto add = [&]<typename T>() {
    if (after_pointer) {
      after_pointer = false;
      return;
    }
    letters[count++] = Letter<T>();
    after_pointer = std::is_pointer_v<T>;
  };
  // On 32-bit targets size_t is uint32_t, so a length is known by its place, not by its type.
  (add.template operator()<std::conditional_t<std::is_same_v<Args, size_t>, uint32_t, Args>>(), ...);
  return letters;
}

}  // namespace kvpages::abi
