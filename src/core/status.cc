// SPDX-License-Identifier: Apache-2.0
#include "core/status.h"

#include <charconv>
#include <cmath>

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

std::string Text(int64_t value) { return std::to_string(value); }

std::string Text(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "Infinity" : "-Infinity";
  char buffer[40];
  const auto end = std::to_chars(buffer, buffer + sizeof(buffer), value).ptr;
  return std::string(buffer, end);
}

}  // namespace kvpages
