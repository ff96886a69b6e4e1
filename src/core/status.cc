// SPDX-License-Identifier: Apache-2.0
#include "core/status.h"

#include <cmath>

#include "core/decimal.h"

namespace kvpages {

const char* CodeText(Code code) {
  switch (code) {
#define KVP_X(name, number, text) \
  case Code::name:                \
    return text;
    KVP_STATUS_LIST(KVP_X)
#undef KVP_X
  }
  return "ERR_INTERNAL";
}

Error MakeError(Code code, std::string argument, std::string rule, std::string got) {
  Error error;
  error.code = code;
  error.message = argument.empty() ? rule : argument + ": " + rule;
  if (!got.empty()) error.message += ", got " + got;
  error.argument = std::move(argument);
  error.actual = std::move(got);
  return error;
}

Error MakeError(Code code, const char* argument, std::string rule, std::string got) {
  return MakeError(code, std::string(argument), std::move(rule), std::move(got));
}
Error MakeError(Code code, const char* argument, const char* rule, std::string got) {
  return MakeError(code, std::string(argument), std::string(rule), std::move(got));
}
Error MakeError(Code code, const char* argument, std::string rule) { return MakeError(code, std::string(argument), std::move(rule)); }
Error MakeError(Code code, const char* argument, const char* rule) { return MakeError(code, std::string(argument), std::string(rule)); }

Status::Status(Error error) : error_(std::make_unique<Error>(std::move(error))) {}
Status::Status(const Status& other) : error_(other.ok() ? nullptr : std::make_unique<Error>(other.error())) {}

std::string Text(int64_t value) { return std::to_string(value); }

// As std::to_chars: the shorter of plain and scientific notation, plain where both are as long.
std::string Text(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "Infinity" : "-Infinity";
  const Decimal decimal = Shortest(value);
  const std::string& digits = decimal.digits;
  const int exponent = decimal.exponent, count = static_cast<int>(digits.size());
  const int power = exponent < 0 ? -exponent : exponent;
  std::string text = digits;
  if (count > 1) text.insert(1, 1, '.');
  text += exponent < 0 ? "e-" : "e+";
  if (power < 10) text += '0';
  text += std::to_string(power);
  const size_t scientific = text.size();
  if (exponent < 0) {
    if (static_cast<size_t>(1 + power + count) <= scientific) text = "0." + std::string(static_cast<size_t>(power) - 1, '0') + digits;
  } else if (exponent + 1 < count) {
    text = digits;
    text.insert(static_cast<size_t>(exponent) + 1, 1, '.');
  } else if (static_cast<size_t>(exponent) + 1 <= scientific) {
    // An integer, whose last digits may be more exact than the shortest ones.
    text = Exact(value).digits;
    text.resize(static_cast<size_t>(exponent) + 1, '0');
  }
  return decimal.negative ? "-" + text : text;
}

}  // namespace kvpages
