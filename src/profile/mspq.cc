// SPDX-License-Identifier: Apache-2.0
// Bytes of a profile, as mixle 0.8.2 writes and reads them: "MSPQ", u8 version 1, u32 length of the metadata, compact
// JSON with sorted keys, then raw arrays (dense values; or head values, head indices, permutation). All little-endian.
#include <cmath>
#include <cstring>

#include "core/decimal.h"
#include "profile/profile.h"
#include "profile/special.h"

namespace kvpages {
namespace {

constexpr std::string_view kMagic = "MSPQ";
constexpr uint8_t kVersion = 1;
constexpr size_t kHeaderBytes = 9;
// mixle allows 16 MiB; what a profile needs is under 2 KiB.
constexpr size_t kMostMetadataBytes = 1 << 16;
constexpr std::string_view kGaussianType = "mixle.stats.univariate.continuous.gaussian.GaussianDistribution";
constexpr std::string_view kGammaType = "mixle.stats.univariate.continuous.gamma.GammaDistribution";
constexpr double kPi = 3.14159265358979323846;

struct DtypeName {
  std::string_view name;
  ValueType type;
};
constexpr DtypeName kDtypes[] = {{"<f8", ValueType::f64}, {"<f4", ValueType::f32}, {"<f2", ValueType::f16}};

std::string_view IndexDtype(int index_bytes) { return index_bytes == 1 ? "|u1" : index_bytes == 2 ? "<u2" : "<u4"; }

// A float as Python's repr writes it: shortest digits, an exponent of at least two digits below 1e-4 and from 1e16 up.
std::string PythonFloat(double value) {
  auto [digits, exponent, negative] = Shortest(value);
  if (exponent < -4 || exponent >= 16) {
    if (digits.size() > 1) digits.insert(1, 1, '.');
    const int power = exponent < 0 ? -exponent : exponent;
    digits += (exponent < 0 ? "e-" : "e+") + std::string(power < 10 ? "0" : "") + std::to_string(power);
  } else if (exponent < 0) {
    digits = "0." + std::string(static_cast<size_t>(-exponent - 1), '0') + digits;
  } else {
    const auto whole = static_cast<size_t>(exponent) + 1;
    if (digits.size() < whole) digits.append(whole - digits.size(), '0');
    digits = digits.substr(0, whole) + '.' + (digits.size() == whole ? "0" : digits.substr(whole));
  }
  return (negative ? "-" : "") + digits;
}

// The object that mixle makes of a distribution; the constants of the density stand beside its parameters.
std::string TailJson(const Tail& tail) {
  std::string items;
  const auto item = [&items](std::string_view name, std::string_view value) {
    items.append(items.empty() ? "[\"" : ",[\"").append(name).append("\",").append(value).append("]");
  };
  if (tail.family == TailFamily::gaussian) {
    item("const", PythonFloat(1 / std::sqrt(2 * kPi * tail.second)));
    item("expected_nparams", "null");
    item("has_conj_prior", "false");
    item("keys", "null");
    item("log_const", PythonFloat(-0.5 * std::log(2 * kPi * tail.second)));
    item("mu", PythonFloat(tail.first));
    item("name", "null");
    item("prior", "null");
    item("sigma2", PythonFloat(tail.second));
  } else {
    item("k", PythonFloat(tail.first));
    item("keys", "null");
    item("log_const", PythonFloat(-(LogGamma(tail.first) + tail.first * std::log(tail.second))));
    item("name", "null");
    item("theta", PythonFloat(tail.second));
  }
  return std::string(R"({"__pysp_type__":"object","id":"o0","schema_version":1,"state":{"__pysp_type__":"dict","items":[)") + items +
         R"(]},"type":")" + std::string(tail.family == TailFamily::gaussian ? kGaussianType : kGammaType) + "\"}";
}

std::string Metadata(const Profile& profile) {
  std::string text = "{\"goodness_of_fit\":" + PythonFloat(profile.d);
  text.append(",\"index_dtype\":\"").append(IndexDtype(profile.index_bytes));
  text += "\",\"n_tail\":" + Text(profile.n_tail) + ",\"shape\":[";
  for (size_t i = 0; i < profile.dims.size(); ++i) text += (i == 0 ? "" : ",") + Text(profile.dims[i]);
  text += "],\"source_dtype\":\"";
  for (const DtypeName& dtype : kDtypes) {
    if (dtype.type == profile.source) text += dtype.name;
  }
  text += "\",\"tail_distribution\":";
  if (profile.fallback) {
    text += "null";
  } else {
    text += '"';
    for (const char c : profile.tail_json.empty() ? TailJson(profile.tail) : profile.tail_json) {
      if (c == '"' || c == '\\') text += '\\';
      text += c;
    }
    text += '"';
  }
  return text + ",\"used_dense_fallback\":" + (profile.fallback ? "true}" : "false}");
}

Error Corrupt(std::string rule, int64_t offset, std::string got = {}) {
  return MakeError(Code::kCorrupt, "bytes", std::move(rule) + " at byte " + Text(offset), std::move(got)).At(offset);
}

// Reads JSON of bounded size front to back. Errors are kept until Finish, so that readers stay short.
class JsonReader {
 public:
  JsonReader(std::string_view text, int64_t offset) : text_(text), offset_(offset) {}
  bool failed() const { return failed_; }
  int64_t position() const { return offset_ + static_cast<int64_t>(at_); }
  Error error() const { return Corrupt("the metadata must be valid JSON of a profile", position()); }
  void Fail() { failed_ = true; }

  char Peek() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\n' || text_[at_] == '\t' || text_[at_] == '\r')) ++at_;
    return at_ < text_.size() && !failed_ ? text_[at_] : '\0';
  }
  bool Take(char c) {
    if (Peek() != c) return false;
    ++at_;
    return true;
  }
  void Expect(char c) {
    if (!Take(c)) failed_ = true;
  }
  bool TakeWord(std::string_view word) {
    Peek();
    if (failed_ || text_.substr(at_, word.size()) != word) return false;
    at_ += word.size();
    return true;
  }
  // Calls body once per element; body must consume it.
  template <typename F>
  void List(char open, char close, F&& body) {
    Expect(open);
    if (Take(close)) return;
    do {
      if (failed_) return;
      body();
    } while (!failed_ && Take(','));
    Expect(close);
  }
  template <typename F>
  void Object(F&& body) {
    List('{', '}', [&] {
      const std::string key = String();
      Expect(':');
      body(key);
    });
  }
  std::string String() {
    std::string out;
    Expect('"');
    while (!failed_) {
      if (at_ >= text_.size() || static_cast<uint8_t>(text_[at_]) < 0x20) return Fail(), out;
      const char c = text_[at_++];
      if (c == '"') return out;
      if (c != '\\') {
        out += c;
        continue;
      }
      static constexpr std::string_view kNames = "\"\\/";
      const size_t name = at_ < text_.size() ? kNames.find(text_[at_]) : std::string_view::npos;
      // Other escapes do not occur: every name and word of a profile is plain ASCII.
      if (name == std::string_view::npos) return Fail(), out;
      out += kNames[name];
      ++at_;
    }
    return out;
  }
  double Number() {
    Peek();
    const size_t begin = at_;
    while (at_ < text_.size() && std::string_view("+-.0123456789eE").find(text_[at_]) != std::string_view::npos) ++at_;
    const auto value = ParseDouble(text_.substr(begin, at_ - begin));
    if (value && std::isfinite(*value)) return *value;
    at_ = begin;
    failed_ = true;
    return 0;
  }
  int64_t Integer() {
    const double value = Number();
    if (value != std::floor(value) || value < 0 || value > 0x1p53) return Fail(), 0;
    return static_cast<int64_t>(value);
  }
  bool Bool() {
    if (TakeWord("true")) return true;
    if (!TakeWord("false")) failed_ = true;
    return false;
  }
  // Skips any value; nesting is bounded.
  void Skip(int depth = 0) {
    const char c = Peek();
    if (depth > 32) return Fail();
    if (c == '"') {
      String();
    } else if (c == '{') {
      Object([&](const std::string&) { Skip(depth + 1); });
    } else if (c == '[') {
      List('[', ']', [&] { Skip(depth + 1); });
    } else if (!TakeWord("null") && !TakeWord("true") && !TakeWord("false")) {
      Number();
    }
  }
  void Finish() {
    if (Peek() != '\0' || at_ != text_.size()) failed_ = true;
  }

 private:
  std::string_view text_;
  int64_t offset_;
  size_t at_ = 0;
  bool failed_ = false;
};

struct Fields {
  std::vector<int64_t> shape;
  std::string source_dtype, index_dtype, tail;
  double d = 0;
  bool fallback = false, has_tail = false;
  int64_t n_tail = 0;
};

Result<Fields> ReadMetadata(std::string_view text) {
  static constexpr std::string_view kKeys[] = {"goodness_of_fit", "index_dtype",       "n_tail", "shape", "source_dtype",
                                               "tail_distribution", "used_dense_fallback"};
  Fields fields;
  unsigned seen = 0;
  JsonReader json(text, kHeaderBytes);
  json.Object([&](const std::string& key) {
    unsigned which = 0;
    while (which < std::size(kKeys) && kKeys[which] != key) ++which;
    if (which == std::size(kKeys) || (seen >> which & 1u) != 0) return json.Fail();
    seen |= 1u << which;
    switch (which) {
      case 0: fields.d = json.Number(); break;
      case 1: fields.index_dtype = json.String(); break;
      case 2: fields.n_tail = json.Integer(); break;
      case 3:
        json.List('[', ']', [&] {
          fields.shape.push_back(json.Integer());
          if (fields.shape.size() > 32) json.Fail();
        });
        break;
      case 4: fields.source_dtype = json.String(); break;
      case 5:
        fields.has_tail = !json.TakeWord("null");
        if (fields.has_tail) fields.tail = json.String();
        break;
      default: fields.fallback = json.Bool(); break;
    }
  });
  json.Finish();
  if (json.failed()) return json.error();
  if (seen != (1u << std::size(kKeys)) - 1) return Corrupt("the metadata lacks a field", kHeaderBytes);
  return fields;
}

Result<Tail> ReadTail(std::string_view text) {
  std::string kind, type, state_kind;
  std::vector<std::pair<std::string, double>> numbers;
  JsonReader json(text, kHeaderBytes);
  json.Object([&](const std::string& key) {
    if (key == "__pysp_type__") {
      kind = json.String();
    } else if (key == "type") {
      type = json.String();
    } else if (key == "state") {
      json.Object([&](const std::string& inner) {
        if (inner == "__pysp_type__") {
          state_kind = json.String();
        } else if (inner == "items") {
          json.List('[', ']', [&] {
            json.Expect('[');
            std::string name = json.String();
            json.Expect(',');
            const char c = json.Peek();
            if (c == '-' || (c >= '0' && c <= '9')) numbers.emplace_back(std::move(name), json.Number());
            else json.Skip();
            json.Expect(']');
            if (numbers.size() > 16) json.Fail();
          });
        } else {
          json.Fail();
        }
      });
    } else {
      json.Skip();  // id, schema_version and notes on how the fit was made
    }
  });
  json.Finish();
  if (json.failed() || kind != "object" || state_kind != "dict") return Corrupt("tail_distribution must be a distribution", kHeaderBytes);
  Tail tail;
  if (type == kGammaType) {
    tail.family = TailFamily::gamma;
  } else if (type != kGaussianType) {
    return MakeError(Code::kUnsupported, "bytes", "tail_distribution must be mixle's Gaussian or Gamma", type).At(kHeaderBytes);
  }
  const bool gaussian = tail.family == TailFamily::gaussian;
  const auto number = [&](std::string_view name) {
    for (const auto& [key, value] : numbers) {
      if (key == name) return value;
    }
    return static_cast<double>(NAN);
  };
  tail.first = number(gaussian ? "mu" : "k");
  tail.second = number(gaussian ? "sigma2" : "theta");
  if (!std::isfinite(tail.first) || !(gaussian || tail.first > 0) || !(tail.second > 0)) {
    return Corrupt("tail_distribution needs finite parameters, positive but for a mean", kHeaderBytes);
  }
  return tail;
}

// Values of an array must be finite, wherever they stand.
Status CheckStoredValues(const uint8_t* data, int64_t offset, ValueType type, int64_t count) {
  const Values values{data, type, {}, count};
  for (int64_t i = 0; i < count; ++i) {
    if (!std::isfinite(values.At(i))) {
      return Corrupt("values must be finite", offset + i * ValueBytes(type), Text(values.At(i)));
    }
  }
  return Ok();
}

}  // namespace

uint64_t ProfileBytes(const Profile& profile) {
  if (profile.gen1) {
    // A flat 64 for the distribution and 4 for the receipt.
    const auto count = static_cast<uint64_t>(profile.count);
    return profile.fallback ? 4 * count : profile.values.size() + static_cast<uint64_t>(profile.index_bytes) * count + 68;
  }
  return kHeaderBytes + Metadata(profile).size() + profile.values.size() + profile.head.size() + profile.permutation.size();
}

Status SerializeProfile(const Profile& profile, std::span<uint8_t> out) {
  if (profile.gen1) return MakeError(Code::kUnsupported, "profile", "the first generation has no serialized form");
  const std::string metadata = Metadata(profile);
  const uint64_t size = ProfileBytes(profile);
  if (out.size() != size) {
    return MakeError(Code::kBuffer, "out", "must hold exactly " + std::to_string(size) + " bytes", std::to_string(out.size()))
        .Expected(std::to_string(size));
  }
  uint8_t* at = out.data();
  const auto put = [&at](const void* data, uint64_t bytes) {
    if (bytes != 0) std::memcpy(at, data, static_cast<size_t>(bytes));
    at += bytes;
  };
  put(kMagic.data(), kMagic.size());
  *at++ = kVersion;
  for (int i = 0; i < 4; ++i) *at++ = static_cast<uint8_t>(metadata.size() >> 8 * i);
  put(metadata.data(), metadata.size());
  put(profile.values.data(), profile.values.size());
  put(profile.head.data(), profile.head.size());
  put(profile.permutation.data(), profile.permutation.size());
  return Ok();
}

Result<Profile> ParseProfile(std::span<const uint8_t> bytes, const std::shared_ptr<Budget>& budget) {
  const auto total = static_cast<int64_t>(bytes.size());
  if (bytes.size() < kHeaderBytes) return Corrupt("a profile has at least " + Text(int64_t{kHeaderBytes}) + " bytes", total, Text(total) + " bytes");
  if (std::memcmp(bytes.data(), kMagic.data(), kMagic.size()) != 0) return Corrupt("a profile begins with MSPQ", 0);
  if (bytes[4] != kVersion) {
    return MakeError(Code::kUnsupported, "bytes", "the version must be 1", Text(int64_t{bytes[4]})).At(4);
  }
  const int64_t metadata_bytes = IndexAt(bytes.data() + 5, 4, 0);
  if (metadata_bytes > total - static_cast<int64_t>(kHeaderBytes)) return Corrupt("the metadata must end within the bytes", 5, Text(metadata_bytes));
  if (metadata_bytes > static_cast<int64_t>(kMostMetadataBytes)) {
    return MakeError(Code::kLimit, "bytes", "the metadata has at most " + Text(int64_t{kMostMetadataBytes}) + " bytes", Text(metadata_bytes)).At(5);
  }
  const auto* text = reinterpret_cast<const char*>(bytes.data()) + kHeaderBytes;
  KVP_ASSIGN(Fields fields, ReadMetadata({text, static_cast<size_t>(metadata_bytes)}));
  const int64_t begin = static_cast<int64_t>(kHeaderBytes) + metadata_bytes;

  Profile profile;
  auto count = CountOf(fields.shape, "bytes");
  if (!count.ok() || count.value() == 0) return Corrupt("the shape must have 1 to " + Text(kMostValues) + " elements", kHeaderBytes, DimsText(fields.shape));
  profile.count = count.value();
  profile.dims = std::move(fields.shape);
  const DtypeName* dtype = nullptr;
  for (const DtypeName& candidate : kDtypes) {
    if (candidate.name == fields.source_dtype) dtype = &candidate;
  }
  if (dtype == nullptr) {
    return MakeError(Code::kUnsupported, "bytes", "source_dtype must be <f8, <f4 or <f2", fields.source_dtype).At(kHeaderBytes);
  }
  profile.source = dtype->type;
  profile.index_bytes = IndexBytes(profile.count);
  if (fields.index_dtype != IndexDtype(profile.index_bytes)) {
    return Corrupt("index_dtype must be " + std::string(IndexDtype(profile.index_bytes)), kHeaderBytes, fields.index_dtype);
  }
  if (!(fields.d >= 0 && fields.d <= 1)) return Corrupt("goodness_of_fit must lie between 0 and 1", kHeaderBytes, Text(fields.d));
  profile.d = fields.d;
  profile.fallback = fields.fallback;
  profile.n_tail = fields.n_tail;
  if (fields.fallback ? fields.n_tail != 0 || fields.has_tail : fields.n_tail < 2 || fields.n_tail > profile.count || !fields.has_tail) {
    return Corrupt("n_tail and tail_distribution must fit used_dense_fallback and the shape", kHeaderBytes, Text(fields.n_tail));
  }
  const int64_t size = ValueBytes(profile.source), width = profile.index_bytes;
  const int64_t stored = fields.fallback ? profile.count : profile.count - profile.n_tail;
  const int64_t index_count = fields.fallback ? 0 : profile.count;
  const int64_t needed = begin + stored * size + index_count * width;
  if (needed != total) {
    return Corrupt("the arrays must end with the bytes, at byte " + Text(needed) + ", and begin", begin, Text(total) + " bytes");
  }
  const uint8_t* values = bytes.data() + begin;
  KVP_TRY(CheckStoredValues(values, begin, profile.source, stored));
  if (!fields.fallback) {
    KVP_ASSIGN(profile.tail, ReadTail(fields.tail));
    profile.tail_json = std::move(fields.tail);
    // Head and tail indices name every element once.
    const uint8_t* indices = values + stored * size;
    KVP_ASSIGN(Bytes marks, Bytes::Allocate(static_cast<uint64_t>(profile.count), budget));
    for (int64_t i = 0; i < index_count; ++i) {
      const int64_t index = IndexAt(indices, profile.index_bytes, i);
      if (index >= profile.count || marks.data()[index] != 0) {
        return Corrupt("head and tail indices must name every element once; index " + Text(index), begin + stored * size + i * width);
      }
      marks.data()[index] = 1;
    }
    KVP_ASSIGN(profile.head, Bytes::Copy(indices, static_cast<uint64_t>(stored * width), budget));
    KVP_ASSIGN(profile.permutation, Bytes::Copy(indices + stored * width, static_cast<uint64_t>(profile.n_tail * width), budget));
  }
  KVP_ASSIGN(profile.values, Bytes::Copy(values, static_cast<uint64_t>(stored * size), budget));
  return profile;
}

}  // namespace kvpages
