// SPDX-License-Identifier: Apache-2.0
#include "support/vectors.h"

#include <fstream>
#include <iterator>
#include <memory>

namespace kvpages::test {

const VectorFile& VectorFile::Load(const std::string& family) {
  static std::map<std::string, std::unique_ptr<VectorFile>> loaded;
  std::unique_ptr<VectorFile>& file = loaded[family];
  if (file != nullptr) return *file;
  const std::string path = std::string(KVP_TEST_VECTORS) + "/" + family + ".safetensors";
  std::ifstream in(path, std::ios::binary);
  if (!in) throw std::runtime_error("cannot read " + path);
  file = std::make_unique<VectorFile>();
  file->file_.assign(std::istreambuf_iterator<char>(in), {});
  uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, file->file_.data(), 8);
  const JsonValue header = JsonValue::Parse({reinterpret_cast<const char*>(file->file_.data()) + 8, header_bytes});
  for (const auto& [key, entry] : header.fields) {
    if (key == "__metadata__") {
      for (const auto& [name, text] : entry.fields) {
        if (name == "family") file->about_ = JsonValue::Parse(text.text);
        else file->cases_[name.substr(5)] = JsonValue::Parse(text.text);
      }
      continue;
    }
    VectorTensor tensor;
    tensor.dtype = entry["dtype"].text;
    for (const JsonValue& dim : entry["shape"].items) tensor.dims.push_back(dim.integer());
    const auto begin = static_cast<size_t>(entry["data_offsets"][0].integer()), end = static_cast<size_t>(entry["data_offsets"][1].integer());
    if (begin > end || 8 + header_bytes + end > file->file_.size()) throw std::runtime_error(path + ": " + key + " reaches past the file");
    tensor.data = file->file_.data() + 8 + header_bytes + begin;
    tensor.bytes = end - begin;
    file->tensors_[key] = std::move(tensor);
  }
  return *file;
}

const VectorTensor& VectorFile::tensor(const std::string& name, const std::string& field) const {
  const auto found = tensors_.find("case/" + name + "/" + field);
  if (found == tensors_.end()) throw std::runtime_error("no tensor " + field + " in case " + name);
  return found->second;
}

}  // namespace kvpages::test
