// SPDX-License-Identifier: Apache-2.0
// Shortest decimal digits of a double.
#pragma once

#include <string>

namespace kvpages {

// Digits that read back as the value, no trailing zeros; the first stands for 10^exponent.
struct Decimal {
  std::string digits;
  int exponent = 0;
  bool negative = false;
};
Decimal Shortest(double value);  // finite

}  // namespace kvpages
