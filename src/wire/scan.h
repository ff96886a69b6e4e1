// SPDX-License-Identifier: Apache-2.0
// Field-by-field reading of one protobuf message through CodedInputStream, with the position of everything. Allocates
// nothing; every length is held against what is left.
#pragma once

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/wire_format_lite.h>

#include <cstdint>
#include <span>
#include <string>

#include "core/status.h"

namespace kvpages::wire {

using Span = std::span<const uint8_t>;

struct Field {
  int number = 0;
  google::protobuf::internal::WireFormatLite::WireType type{};
  uint64_t varint = 0;  // value of a varint, fixed32 or fixed64 field
  Span bytes;           // content of a length-delimited field
  Span raw;             // the field with its tag, as it stands in the file
  int64_t at = 0;       // position of the tag in the file
  int64_t content_at = 0;
};

// Where a message stands, for errors.
struct Place {
  int64_t page = -1;
  const char* side = "";
};

// "page 3 key: text, at byte 120"
inline Error FileError(Code code, const Place& place, std::string text, int64_t at, std::string got = {}) {
  std::string where;
  if (place.page >= 0) where = "page " + Text(place.page) + (*place.side ? std::string(" ") + place.side : std::string()) + ": ";
  Error error = MakeError(code, "", where + text, std::move(got));
  error.message += ", at byte " + Text(at);
  error.argument = "bytes";
  error.side = place.side;
  if (place.page >= 0) error.page = place.page;
  error.byte_offset = at;
  return error;
}

class Scan {
 public:
  // `offset`: position of the message's first byte in the file.
  Scan(Span message, int64_t offset, const Place& place)
      : message_(message), offset_(offset), place_(place), stream_(message.data(), static_cast<int>(message.size())) {}

  // False at the end of the message.
  Result<bool> Next(Field* field) {
    using google::protobuf::internal::WireFormatLite;
    const int begin = stream_.CurrentPosition();
    if (begin == static_cast<int>(message_.size())) return false;
    *field = Field{};
    field->at = offset_ + begin;
    const uint32_t tag = stream_.ReadTagNoLastTag();
    if (tag == 0 || WireFormatLite::GetTagFieldNumber(tag) == 0) {
      return FileError(Code::kCorrupt, place_, "not a protobuf field", field->at);
    }
    field->number = WireFormatLite::GetTagFieldNumber(tag);
    field->type = WireFormatLite::GetTagWireType(tag);
    field->content_at = offset_ + stream_.CurrentPosition();
    const auto broken = [&](const std::string& how) {
      return FileError(Code::kCorrupt, place_, "field " + std::to_string(field->number) + how, field->at);
    };
    switch (field->type) {
      case WireFormatLite::WIRETYPE_VARINT:
        if (!stream_.ReadVarint64(&field->varint)) return broken(" ends early");
        break;
      case WireFormatLite::WIRETYPE_FIXED64:
        if (!stream_.ReadLittleEndian64(&field->varint)) return broken(" ends early");
        break;
      case WireFormatLite::WIRETYPE_FIXED32: {
        uint32_t value = 0;
        if (!stream_.ReadLittleEndian32(&value)) return broken(" ends early");
        field->varint = value;
        break;
      }
      case WireFormatLite::WIRETYPE_LENGTH_DELIMITED: {
        uint64_t length = 0;
        if (!stream_.ReadVarint64(&length)) return broken(" ends early");
        const auto left = static_cast<uint64_t>(static_cast<int>(message_.size()) - stream_.CurrentPosition());
        if (length > left) {
          return broken(" claims " + std::to_string(length) + " bytes of " + std::to_string(left) + " left");
        }
        field->content_at = offset_ + stream_.CurrentPosition();
        field->bytes = message_.subspan(static_cast<size_t>(stream_.CurrentPosition()), static_cast<size_t>(length));
        stream_.Skip(static_cast<int>(length));
        break;
      }
      default:  // groups: skipped whole, or refused where they do not nest
        if (!WireFormatLite::SkipField(&stream_, tag)) return broken(" is a broken group");
    }
    const int end = stream_.CurrentPosition();
    field->raw = message_.subspan(static_cast<size_t>(begin), static_cast<size_t>(end - begin));
    return true;
  }

 private:
  Span message_;
  int64_t offset_;
  Place place_;
  google::protobuf::io::CodedInputStream stream_;
};

}  // namespace kvpages::wire
