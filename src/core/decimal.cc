// SPDX-License-Identifier: Apache-2.0
#include "core/decimal.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

namespace kvpages {
namespace {

// More digits than this cannot decide how a number rounds, but for whether there is any.
constexpr int kMostDigits = 800;
// Exponents beyond these make 0 or infinity of any such digits.
constexpr int kLeastPower = -330, kMostPower = 310;

// An unsigned integer of up to 10^(kMostDigits - kLeastPower) * 2^64.
class Big {
 public:
  explicit Big(uint64_t value) {
    for (; value > 0; value >>= 32) words_[count_++] = static_cast<uint32_t>(value);
  }
  void MultiplyAdd(uint32_t factor, uint32_t add) {
    uint64_t carry = add;
    for (int i = 0; i < count_; ++i) {
      carry += uint64_t{words_[i]} * factor;
      words_[i] = static_cast<uint32_t>(carry);
      carry >>= 32;
    }
    if (carry > 0) words_[count_++] = static_cast<uint32_t>(carry);
  }
  void TimesTen(int power) {
    for (; power > 0; --power) MultiplyAdd(10, 0);
  }
  void TimesTwo(int power) {
    for (; power >= 31; power -= 31) MultiplyAdd(1u << 31, 0);
    if (power > 0) MultiplyAdd(1u << power, 0);
  }
  void Add(const Big& other) {
    uint64_t carry = 0;
    for (int i = 0; i < std::max(count_, other.count_) || carry > 0; ++i) {
      if (i == count_) words_[count_++] = 0;
      carry += uint64_t{words_[i]} + (i < other.count_ ? other.words_[i] : 0);
      words_[i] = static_cast<uint32_t>(carry);
      carry >>= 32;
    }
  }
  // `other` is not the larger one.
  void Subtract(const Big& other) {
    uint32_t borrow = 0;
    for (int i = 0; i < count_; ++i) {
      const uint64_t take = uint64_t{i < other.count_ ? other.words_[i] : 0} + borrow;
      borrow = words_[i] < take;
      words_[i] -= static_cast<uint32_t>(take);
    }
    while (count_ > 0 && words_[count_ - 1] == 0) --count_;
  }
  // Below, at or above 0 as this is below, at or above `other`.
  int Compare(const Big& other) const {
    if (count_ != other.count_) return count_ < other.count_ ? -1 : 1;
    for (int i = count_ - 1; i >= 0; --i) {
      if (words_[i] != other.words_[i]) return words_[i] < other.words_[i] ? -1 : 1;
    }
    return 0;
  }
  int bits() const { return count_ == 0 ? 0 : 32 * count_ - std::countl_zero(words_[count_ - 1]); }

 private:
  int count_ = 0;
  uint32_t words_[128];
};

// Steele and White's way, with Dragon4's names: the value is rest / scale, and what lies up to below / scale under it and
// above / scale over it reads back as the value.
Decimal Digits(double value, bool exact) {
  const auto bits = std::bit_cast<uint64_t>(value);
  const int field = static_cast<int>(bits >> 52 & 0x7ff);
  const uint64_t fraction = bits & ((uint64_t{1} << 52) - 1);
  const uint64_t whole = field == 0 ? fraction : fraction | uint64_t{1} << 52;
  Decimal decimal;
  decimal.negative = bits >> 63 != 0;
  if (whole == 0) {
    decimal.digits += '0';
    return decimal;
  }
  const int power = std::max(field, 1) - 1075;
  const bool even = whole % 2 == 0, uneven_gaps = fraction == 0 && field > 1;
  Big rest(whole * 4), scale(4), below(exact ? 0 : uneven_gaps ? 1 : 2), above(exact ? 0 : 2);
  for (Big* number : {&rest, &below, &above}) number->TimesTwo(power);
  scale.TimesTwo(-power);
  // log10 of the power of two below the value, never too large.
  const int two = static_cast<int>(std::bit_width(whole)) - 1 + power;
  decimal.exponent = static_cast<int>(std::floor(two * (two < 0 ? 0.30103 : 0.30102)));
  for (Big* number : {&rest, &below, &above}) number->TimesTen(-decimal.exponent);
  scale.TimesTen(decimal.exponent);
  const auto over = [&](const Big& limit) {
    Big most = rest;
    most.Add(above);
    const int order = most.Compare(limit);
    return order > 0 || (order == 0 && even && !exact);
  };
  for (;; ++decimal.exponent) {
    Big next = scale;
    next.TimesTen(1);
    if (!over(next) && rest.Compare(next) < 0) break;
    scale = next;
  }
  for (;;) {
    char digit = '0';
    for (; rest.Compare(scale) >= 0; ++digit) rest.Subtract(scale);
    const int order = rest.Compare(below);
    const bool low = order < 0 || (order == 0 && (even || exact)), high = !exact && over(scale);
    if (low || high) {
      Big twice = rest;
      twice.TimesTwo(1);
      const int half = twice.Compare(scale);
      if (high && (!low || half > 0 || (half == 0 && digit % 2 != 0))) ++digit;
      decimal.digits += digit;
      break;
    }
    decimal.digits += digit;
    for (Big* number : {&rest, &below, &above}) number->TimesTen(1);
  }
  const size_t last = decimal.digits.find_last_not_of('0');
  decimal.digits.resize(last + 1);
  return decimal;
}

// `precision` bits, the last of them never less than 2^least.
std::optional<double> Parse(std::string_view text, int precision, int least) {
  size_t at = 0;
  const bool negative = !text.empty() && text[0] == '-';
  if (negative) ++at;
  Big above(0);
  int digits = 0, power = 0;
  bool point = false, any = false, dropped = false;
  for (; at < text.size(); ++at) {
    if (text[at] == '.' && !point) {
      point = true;
      continue;
    }
    if (text[at] < '0' || text[at] > '9') break;
    const auto digit = static_cast<uint32_t>(text[at] - '0');
    any = true;
    power -= point;
    if (digits == 0 && digit == 0) continue;
    if (digits < kMostDigits) {
      above.MultiplyAdd(10, digit);
      ++digits;
    } else {
      dropped |= digit != 0;
      ++power;
    }
  }
  if (!any) return std::nullopt;
  if (at < text.size() && (text[at] == 'e' || text[at] == 'E')) {
    ++at;
    const bool minus = at < text.size() && text[at] == '-';
    if (at < text.size() && (minus || text[at] == '+')) ++at;
    if (at == text.size()) return std::nullopt;
    int exponent = 0;
    for (; at < text.size() && text[at] >= '0' && text[at] <= '9'; ++at) exponent = std::min(exponent * 10 + (text[at] - '0'), 100'000'000);
    if (text[at - 1] < '0' || text[at - 1] > '9') return std::nullopt;
    power += minus ? -exponent : exponent;
  }
  if (at != text.size()) return std::nullopt;
  const double sign = negative ? -1.0 : 1.0;
  if (digits == 0 || digits + power < kLeastPower) return sign * 0.0;
  if (digits + power > kMostPower) return sign * INFINITY;
  if (dropped) {
    above.MultiplyAdd(10, 1);
    --power;
  }
  // above / below times 2^shift gets `precision` bits before the point.
  Big below(1);
  above.TimesTen(power);
  below.TimesTen(-power);
  int shift = std::min(precision - 1 - (above.bits() - below.bits()), -least);
  above.TimesTwo(shift);
  below.TimesTwo(precision - std::min(shift, 0));
  Big twice = above;
  twice.TimesTwo(1);
  if (shift < -least && twice.Compare(below) < 0) {
    above = twice;
    ++shift;
  }
  uint64_t whole = 0;
  for (int i = 0; i < precision; ++i) {
    above.TimesTwo(1);
    whole <<= 1;
    if (above.Compare(below) < 0) continue;
    above.Subtract(below);
    whole |= 1;
  }
  above.TimesTwo(1);
  const int half = above.Compare(below);
  if (half > 0 || (half == 0 && whole % 2 != 0)) ++whole;
  return sign * std::ldexp(static_cast<double>(whole), -shift);
}

}  // namespace

Decimal Shortest(double value) { return Digits(value, false); }
Decimal Exact(double value) { return Digits(value, true); }

std::optional<double> ParseDouble(std::string_view text) { return Parse(text, 53, -1074); }
std::optional<float> ParseFloat(std::string_view text) {
  const auto value = Parse(text, 24, -149);
  if (!value) return std::nullopt;
  return static_cast<float>(*value);
}

}  // namespace kvpages
