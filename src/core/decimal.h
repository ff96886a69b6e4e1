// SPDX-License-Identifier: Apache-2.0
// Floats and their decimal texts, both ways exact. The libraries' own functions for this are many times as large, and not
// the same everywhere.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace kvpages {

// Digits that read back as the value, no trailing zeros; the first stands for 10^exponent.
struct Decimal {
  std::string digits;
  int exponent = 0;
  bool negative = false;
};
Decimal Shortest(double value);  // finite
Decimal Exact(double value);     // all digits; finite

// The nearest double or float, an infinity beyond them; "-12", "1.5e-3", ".5" and "2." are numbers, "+1", " 1" and "inf" are not.
std::optional<double> ParseDouble(std::string_view text);
std::optional<float> ParseFloat(std::string_view text);

}  // namespace kvpages
