// SPDX-License-Identifier: Apache-2.0
#include "core/decimal.h"

#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstdlib>

namespace kvpages {

Decimal Shortest(double value) {
  char buffer[40];
#if defined(__wasm__)
  // to_chars comes with 100 kB of tables there.
  for (int digits = 0; digits < 17; ++digits) {
    std::snprintf(buffer, sizeof(buffer), "%.*e", digits, value);
    if (std::strtod(buffer, nullptr) == value) break;
  }
#else
  *std::to_chars(buffer, buffer + sizeof(buffer) - 1, value, std::chars_format::scientific).ptr = '\0';
#endif
  Decimal decimal;
  const char* at = buffer;
  for (; *at != 'e'; ++at) {
    if (*at >= '0' && *at <= '9') decimal.digits += *at;
  }
  while (decimal.digits.size() > 1 && decimal.digits.back() == '0') decimal.digits.pop_back();
  decimal.negative = std::signbit(value);
  decimal.exponent = std::atoi(at + 1);
  return decimal;
}

}  // namespace kvpages
