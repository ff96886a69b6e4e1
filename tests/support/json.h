// SPDX-License-Identifier: Apache-2.0
// A JSON value for tests: enough to read the metadata of test vectors and what the C ABI returns.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace kvpages::test {

class JsonValue {
 public:
  enum class Kind { kNull, kBool, kNumber, kString, kArray, kObject };
  Kind kind = Kind::kNull;
  double number = 0;
  std::string text;
  std::vector<JsonValue> items;
  std::map<std::string, JsonValue> fields;

  // Throws where the text is not JSON or the value lacks what is asked for: a test then fails with the reason.
  static JsonValue Parse(std::string_view text) {
    size_t at = 0;
    JsonValue value = ParseAt(text, at);
    SkipSpace(text, at);
    if (at != text.size()) throw std::runtime_error("text after JSON");
    return value;
  }
  bool is_null() const { return kind == Kind::kNull; }
  bool has(const std::string& key) const { return fields.count(key) != 0; }
  const JsonValue& operator[](const std::string& key) const {
    const auto found = fields.find(key);
    if (found == fields.end()) throw std::runtime_error("JSON has no field " + key);
    return found->second;
  }
  const JsonValue& operator[](size_t index) const { return items.at(index); }
  int64_t integer() const { return static_cast<int64_t>(number); }
  bool truth() const { return number != 0; }

 private:
  static void SkipSpace(std::string_view text, size_t& at) {
    while (at < text.size() && std::string_view(" \n\r\t").find(text[at]) != std::string_view::npos) ++at;
  }
  static std::string ParseString(std::string_view text, size_t& at) {
    std::string out;
    for (++at; text.at(at) != '"'; ++at) {
      if (text[at] != '\\') {
        out += text[at];
        continue;
      }
      const char c = text.at(++at);
      if (c == 'u') {  // test data is ASCII
        out += static_cast<char>(std::stoi(std::string(text.substr(at + 1, 4)), nullptr, 16));
        at += 4;
      } else {
        out += c == 'n' ? '\n' : c == 't' ? '\t' : c == 'r' ? '\r' : c == 'b' ? '\b' : c == 'f' ? '\f' : c;
      }
    }
    ++at;
    return out;
  }
  static JsonValue ParseAt(std::string_view text, size_t& at) {
    SkipSpace(text, at);
    JsonValue value;
    const char c = text.at(at);
    if (c == '{' || c == '[') {
      value.kind = c == '{' ? Kind::kObject : Kind::kArray;
      for (++at;;) {
        SkipSpace(text, at);
        if (text.at(at) == ']' || text[at] == '}') break;
        if (text[at] == ',') {
          ++at;
          SkipSpace(text, at);
        }
        if (c == '{') {
          const std::string key = ParseString(text, at);
          SkipSpace(text, at);
          ++at;
          value.fields[key] = ParseAt(text, at);
        } else {
          value.items.push_back(ParseAt(text, at));
        }
      }
      ++at;
    } else if (c == '"') {
      value.kind = Kind::kString;
      value.text = ParseString(text, at);
    } else if (text.substr(at, 4) == "true" || text.substr(at, 5) == "false" || text.substr(at, 4) == "null") {
      value.kind = c == 'n' ? Kind::kNull : Kind::kBool;
      value.number = c == 't';
      at += c == 'f' ? 5 : 4;
    } else {
      value.kind = Kind::kNumber;
      const std::string rest(text.substr(at, 40));
      char* end = nullptr;
      value.number = std::strtod(rest.c_str(), &end);
      if (end == rest.c_str()) throw std::runtime_error("not JSON at " + std::to_string(at));
      at += static_cast<size_t>(end - rest.c_str());
    }
    return value;
  }
};

}  // namespace kvpages::test
