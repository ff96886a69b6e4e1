// SPDX-License-Identifier: Apache-2.0
// Reader of tests/vectors/NAME.safetensors: tensors "case/CASE/FIELD" and one JSON text of parameters per case.
#pragma once

#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "support/json.h"

namespace kvpages::test {

struct VectorTensor {
  std::string dtype;  // safetensors' word: F32, F64, I32, U8, ...
  std::vector<int64_t> dims;
  const uint8_t* data = nullptr;
  size_t bytes = 0;
  template <typename T>
  std::vector<T> As() const {
    if (bytes % sizeof(T) != 0) throw std::runtime_error("wrong element size for " + dtype);
    std::vector<T> out(bytes / sizeof(T));
    if (bytes != 0) std::memcpy(out.data(), data, bytes);
    return out;
  }
};

class VectorFile {
 public:
  // Read once per family and kept. Throws where the file is missing or damaged.
  static const VectorFile& Load(const std::string& family);

  const JsonValue& about() const { return about_; }
  const std::map<std::string, JsonValue>& cases() const { return cases_; }
  bool has(const std::string& name, const std::string& field) const { return tensors_.count("case/" + name + "/" + field) != 0; }
  const VectorTensor& tensor(const std::string& name, const std::string& field) const;
  template <typename T>
  std::vector<T> get(const std::string& name, const std::string& field) const {
    return tensor(name, field).As<T>();
  }
  template <typename T>
  T one(const std::string& name, const std::string& field) const {
    return get<T>(name, field).at(0);
  }

 private:
  std::vector<uint8_t> file_;
  JsonValue about_;
  std::map<std::string, JsonValue> cases_;
  std::map<std::string, VectorTensor> tensors_;
};

}  // namespace kvpages::test
