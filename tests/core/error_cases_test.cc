// SPDX-License-Identifier: Apache-2.0
// The table of bad inputs (tests/errors/README.md) against the C ABI, on every kernel set of this processor.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <tuple>
#include <vector>

#include "backends/backend.h"
#include "kvpages.h"


namespace kvpages {
namespace {

using nlohmann::json;
constexpr uint8_t kCanary = 0xa5;

double Number(const json& value) {
  if (value.is_number()) return value.get<double>();
  const auto word = value.get<std::string>();
  return word == "NaN" ? NAN : word == "Infinity" ? INFINITY : word == "-Infinity" ? -INFINITY : std::stod(word);
}
int64_t Whole(const json& value) { return value.is_string() ? std::stoll(value.get<std::string>()) : value.get<int64_t>(); }

template <typename T>
void AppendRaw(std::vector<uint8_t>& bytes, T value) {
  const size_t at = bytes.size();
  bytes.resize(at + sizeof(T));
  std::memcpy(bytes.data() + at, &value, sizeof(T));
}

std::vector<uint8_t> BytesOf(const json& value) {
  std::vector<uint8_t> bytes;
  if (value.contains("hex")) {
    const auto hex = value["hex"].get<std::string>();
    for (size_t i = 0; i + 1 < hex.size(); i += 2) bytes.push_back(static_cast<uint8_t>(std::stoi(hex.substr(i, 2), nullptr, 16)));
  } else if (value.contains("f32")) {
    for (const json& v : value["f32"]) AppendRaw(bytes, static_cast<float>(Number(v)));
  } else if (value.contains("u16")) {
    for (const json& v : value["u16"]) AppendRaw(bytes, v.get<uint16_t>());
  } else {
    bytes.assign(value["count"].get<size_t>(), value["repeat"].get<uint8_t>());
  }
  return bytes;
}

// One call: arguments from the table by parameter type, buffers kept for the checks afterwards.
class Call {
 public:
  Call(const json& arguments, const std::map<std::string, uint32_t>& names) : arguments_(arguments), names_(names) {}

  template <typename... Args>
  int32_t Run(int32_t (*function)(Args...)) {
    buffers_.reserve(sizeof...(Args));
    std::tuple<Args...> values{Next<Args>()...};
    EXPECT_EQ(next_, arguments_.size()) << "arguments left over";
    return std::apply(function, values);
  }

  bool OutputsUntouched() const {
    return std::all_of(buffers_.begin(), buffers_.end(), [](const Buffer& b) {
      return !b.output || std::all_of(b.bytes.begin(), b.bytes.end(), [](uint8_t v) { return v == kCanary; });
    });
  }
  bool InputsUntouched() const {
    return std::all_of(buffers_.begin(), buffers_.end(), [](const Buffer& b) { return b.output || b.bytes == b.before; });
  }
  void KeepHandles(std::map<std::string, uint32_t>& names) const {
    for (const Buffer& b : buffers_) {
      if (b.name.empty()) continue;
      uint32_t handle;
      std::memcpy(&handle, b.bytes.data(), 4);
      names[b.name] = handle;
    }
  }

 private:
  struct Buffer {
    std::vector<uint8_t> bytes, before;
    bool output = false;
    std::string name;
  };

  template <typename T>
  T Next() {
    if (length_pending_) {
      length_pending_ = false;
      if constexpr (std::is_integral_v<T>) return static_cast<T>(length_);
    }
    const json& argument = arguments_.at(next_++);
    if constexpr (std::is_pointer_v<T>) {
      using Element = std::remove_pointer_t<T>;
      Buffer buffer;
      if constexpr (std::is_const_v<Element>) {
        using Plain = std::remove_const_t<Element>;
        if constexpr (std::is_same_v<Plain, char>) {
          for (const char c : argument.get<std::string>()) buffer.bytes.push_back(static_cast<uint8_t>(c));
        } else if constexpr (std::is_same_v<Plain, uint8_t>) {
          buffer.bytes = BytesOf(argument);
        } else {
          for (const json& v : argument) {
            if constexpr (std::is_floating_point_v<Plain>) AppendRaw(buffer.bytes, static_cast<Plain>(Number(v)));
            else AppendRaw(buffer.bytes, static_cast<Plain>(Whole(v)));
          }
        }
      } else {
        buffer.output = true;
        if (argument.is_string()) buffer.name = argument.get<std::string>().substr(1);
        buffer.bytes.assign((argument.is_string() ? 1 : argument.get<size_t>()) * sizeof(Element), kCanary);
      }
      buffer.before = buffer.bytes;
      length_ = buffer.bytes.size() / sizeof(Element);
      length_pending_ = true;
      buffers_.push_back(std::move(buffer));
      return reinterpret_cast<T>(buffers_.back().bytes.data());
    } else {
      if (argument.is_string() && argument.get<std::string>().starts_with("$")) {
        return static_cast<T>(names_.at(argument.get<std::string>().substr(1)));
      }
      return static_cast<T>(Number(argument));
    }
  }

  const json& arguments_;
  const std::map<std::string, uint32_t>& names_;
  size_t next_ = 1, length_ = 0;
  bool length_pending_ = false;
  std::vector<Buffer> buffers_;
};

int32_t Invoke(const json& step, std::map<std::string, uint32_t>& names, bool* outputs_untouched, bool* inputs_untouched) {
  const auto name = step.at(0).get<std::string>();
  Call call(step, names);
  int32_t status = -1000;
#define KVP_X(function) \
  if (name == #function) status = call.Run(&function);
  KVP_FUNCTIONS(KVP_X)
#undef KVP_X
  EXPECT_NE(status, -1000) << "no function " << name;
  if (status == 0) call.KeepHandles(names);
  *outputs_untouched = call.OutputsUntouched();
  *inputs_untouched = call.InputsUntouched();
  return status;
}

std::string TakeText(uint32_t blob) {
  double size = 0;
  EXPECT_EQ(kvp_blob_size(blob, &size, 1), 0);
  std::string text(static_cast<size_t>(size), '?');
  EXPECT_EQ(kvp_blob_read(blob, reinterpret_cast<uint8_t*>(text.data()), text.size()), 0);
  EXPECT_EQ(kvp_release(blob), 0);
  return text;
}
// What the objects made so far say of themselves.
std::string Snapshot(const std::map<std::string, uint32_t>& names) {
  std::string all;
  for (const auto& [name, handle] : names) {
    uint32_t blob = 0;
    if (kvp_paged_info(handle, &blob, 1) == 0 || kvp_payload_info(handle, &blob, 1) == 0) all += name + TakeText(blob) + "\n";
  }
  return all;
}

class ErrorCases : public ::testing::TestWithParam<const Backend*> {};

TEST_P(ErrorCases, SameCodeTextAndFieldsAndNothingChanged) {
  if (!GetParam()->available()) GTEST_SKIP() << "skipped: this processor has no " << GetParam()->name;
  std::ifstream file(KVP_TESTS_DIR "/errors/cases.json");
  ASSERT_TRUE(file) << "tests/errors/cases.json is missing";
  const json table = json::parse(file);
  const json& cases = table.is_array() ? table : table.at("cases");
  ASSERT_GT(cases.size(), 20u);
  for (const json& each : cases) {
    SCOPED_TRACE(each.at("name").get<std::string>());
    std::map<std::string, uint32_t> names;
    const std::string kernels = GetParam()->name;
    ASSERT_EQ(kvp_instance_create(kernels.data(), kernels.size(), 0, &names["instance"], 1), 0);
    bool outputs = false, inputs = false;
    for (const json& step : each.value("steps", json::array())) {
      ASSERT_EQ(Invoke(step, names, &outputs, &inputs), 0) << step;
    }
    const std::string before = Snapshot(names);
    const int32_t status = Invoke(each.at("call"), names, &outputs, &inputs);
    EXPECT_TRUE(inputs) << "an input buffer was changed";
    if (each.at("code") == "OK") {
      EXPECT_EQ(status, 0);
    } else {
      EXPECT_LT(status, 0);
      uint32_t blob = 0;
      ASSERT_EQ(kvp_last_error(&blob, 1), 0);
      json error = json::parse(TakeText(blob));
      EXPECT_EQ(error["code"], each["code"]);
      EXPECT_EQ(error["message"], each["message"]);
      error.erase("code");
      error.erase("message");
      EXPECT_EQ(error, each.value("fields", json::object()));
      EXPECT_TRUE(outputs) << "an output buffer was written";
      EXPECT_EQ(Snapshot(names), before);
    }
    for (const auto& [name, handle] : names) kvp_release(handle);
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, ErrorCases, ::testing::ValuesIn(AllBackends()),
                         [](const auto& info) { return std::string(info.param->name); });

}  // namespace
}  // namespace kvpages
