// SPDX-License-Identifier: Apache-2.0
// A writer of compact JSON for what the ABI returns as text.
#pragma once

#include <concepts>
#include <cstdint>
#include <string>
#include <string_view>

#include "core/status.h"

namespace kvpages {

class Json {
 public:
  Json& Open(char bracket) { Comma(); text_ += bracket; first_ = true; return *this; }
  Json& Close(char bracket) { text_ += bracket; first_ = false; return *this; }
  Json& Key(std::string_view key) { Comma(); Quote(key); text_ += ':'; first_ = true; return *this; }
  Json& Value(std::string_view text) { Comma(); Quote(text); return *this; }
  Json& Value(const char* text) { return Value(std::string_view(text)); }
  Json& Value(bool value) { return Raw(value ? "true" : "false"); }
  Json& Value(std::integral auto value) { return Raw(std::to_string(value)); }
  Json& Value(double value) { return Raw(value - value == 0 ? Text(value) : "null"); }
  template <typename T>
  Json& Field(std::string_view key, const T& value) { return Key(key).Value(value); }
  Json& Raw(std::string_view text) { Comma(); text_ += text; return *this; }
  std::string Take() { return std::move(text_); }

 private:
  void Comma() {
    if (!first_) text_ += ',';
    first_ = false;
  }
  void Quote(std::string_view text) {
    static const char kHex[] = "0123456789abcdef";
    text_ += '"';
    for (const char c : text) {
      if (c == '"' || c == '\\') (text_ += '\\') += c;
      else if (static_cast<unsigned char>(c) < 0x20) ((text_ += "\\u00") += kHex[c >> 4 & 1]) += kHex[c & 15];
      else text_ += c;
    }
    text_ += '"';
  }
  std::string text_;
  bool first_ = true;
};

}  // namespace kvpages
