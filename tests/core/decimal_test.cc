// SPDX-License-Identifier: Apache-2.0
// Decimal texts of floats, beside the standard library's.
#include "core/decimal.h"

#include <gtest/gtest.h>

#include <bit>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "core/status.h"

namespace kvpages {
namespace {

// Powers of two and of ten with their neighbours, and any bits.
std::vector<double> SomeDoubles() {
  std::vector<double> values = {0.0, 5e-324, 2.2250738585072014e-308, 1.7976931348623157e308, 0.1, 1e23, 9007199254740993.0, 123456789012345680.0};
  for (int power = -1074; power < 1024; ++power) values.push_back(std::ldexp(1.0, power));
  for (int power = -323; power <= 308; ++power) values.push_back(std::strtod(("1e" + std::to_string(power)).c_str(), nullptr));
  for (size_t i = 0, count = values.size(); i < count; ++i) {
    values.push_back(std::nextafter(values[i], 0.0));
    values.push_back(-std::nextafter(values[i], 1e308));
  }
  std::mt19937_64 random(1);
  for (int i = 0; i < 20000; ++i) {
    const auto value = std::bit_cast<double>(random());
    if (std::isfinite(value)) values.push_back(value);
    values.push_back(std::ldexp(static_cast<double>(random() >> (random() % 64)), static_cast<int>(random() % 100) - 50));
  }
  return values;
}

TEST(Decimal, TextIsTheShortestThatReadsBack) {
  for (const double value : SomeDoubles()) {
    char buffer[400];
    const std::string want(buffer, std::to_chars(buffer, buffer + sizeof(buffer), value).ptr);
    ASSERT_EQ(Text(value), want);
    ASSERT_EQ(std::bit_cast<uint64_t>(ParseDouble(want).value()), std::bit_cast<uint64_t>(value)) << want;
  }
}

TEST(Decimal, ReadsTheNearestOfAnyText) {
  std::mt19937_64 random(2);
  const auto check = [](const std::string& text) {
    const double wide = std::strtod(text.c_str(), nullptr);
    ASSERT_EQ(std::bit_cast<uint64_t>(ParseDouble(text).value()), std::bit_cast<uint64_t>(wide)) << text;
    const float narrow = std::strtof(text.c_str(), nullptr);
    ASSERT_EQ(std::bit_cast<uint32_t>(ParseFloat(text).value()), std::bit_cast<uint32_t>(narrow)) << text;
  };
  for (int i = 0; i < 20000; ++i) {
    const int count = 1 + static_cast<int>(random() % 40), power = static_cast<int>(random() % 760) - 390;
    std::string text = random() % 2 ? "-" : "";
    for (int k = 0; k < count; ++k) text += static_cast<char>('0' + random() % 10);
    text.insert(random() % (text.size() + 1 - (text[0] == '-')) + (text[0] == '-'), 1, '.');
    if (random() % 2) text += "e" + std::to_string(power / static_cast<int>(1 + random() % 20));
    check(text);
  }
  // Halfway between two neighbours, written out, and a little beyond.
  for (const double value : SomeDoubles()) {
    if (random() % 16 != 0 || !std::isfinite(value) || std::fabs(value) > 1e300) continue;
    const double next = std::nextafter(value, INFINITY);
    std::vector<char> buffer(3000);
    const long double middle = (static_cast<long double>(value) + static_cast<long double>(next)) / 2;
    const int size = std::snprintf(buffer.data(), buffer.size(), "%.1200Le", middle);
    const std::string text(buffer.data(), static_cast<size_t>(size));
    check(text);
    check(std::string(text).insert(text.find('e'), "1"));
  }
  for (const char* text : {"1e400", "-1e400", "1e-400", "-1e-400", "0e999999999999", "1e-999999999999", "2.", ".5", "-0", "1E5", "3.4028236e38",
                           "1.17549430e-38", "0.0000000000000000000000000000000000000000000007", "16777217", "16777219"}) {
    check(text);
  }
}

TEST(Decimal, OtherTextsAreNoNumbers) {
  for (const char* text : {"", "-", "+1", ".", "-.", "e5", "1e", "1e+", "1e-", " 1", "1 ", "1x", "1.2.3", "0x10", "inf", "nan", "--1", "1e5.0"}) {
    EXPECT_FALSE(ParseDouble(text).has_value()) << text;
    EXPECT_FALSE(ParseFloat(text).has_value()) << text;
  }
}

}  // namespace
}  // namespace kvpages
