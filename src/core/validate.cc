// SPDX-License-Identifier: Apache-2.0
// The rules of a whole paged cache, in their written order: pages front to back, within a page positions, then
// payloads, then agreement between key and value, then agreement with the pages before.
#include <algorithm>
#include <cstring>

#include "core/page.h"

namespace kvpages {
namespace {

Error PageError(Code code, int64_t page, const char* side, std::string rule, std::string got) {
  const std::string where = "page " + Text(page) + (*side ? std::string(" ") + side : "");
  return MakeError(code, where, std::move(rule), std::move(got)).Argument("cache").Side(side).Page(page);
}

Status CheckPayload(const Payload& payload, bool scales_known, int64_t page, const char* side) {
  for (int axis = 0; axis < 4; ++axis) {
    if (payload.shape[axis] < 1) {
      return PageError(Code::kShape, page, side, "every dim must be at least 1", Text(payload.shape));
    }
  }
  auto elements = CheckedElements(payload.shape, side);
  if (!elements.ok()) return std::move(std::move(elements.error()).Page(page).Side(side));
  if (payload.kind == PayloadKind::kDense) {
    const uint64_t want = static_cast<uint64_t>(elements.value()) * (Info(payload.dense_type).bits / 8);
    if (payload.data.size() != want) {
      return PageError(Code::kShape, page, side, "needs " + std::to_string(want) + " data bytes",
                       std::to_string(payload.data.size()));
    }
  }
  if (payload.kind != PayloadKind::kEncoded) return Ok();
  const ArraySizes sizes = SizesOf(payload.spec, payload.shape);
  if (payload.codes.size() != static_cast<uint64_t>(sizes.codes)) {
    return PageError(Code::kShape, page, side, "needs " + std::to_string(sizes.codes) + " code bytes",
                     std::to_string(payload.codes.size()));
  }
  if (!payload.affine || scales_known) return Ok();
  if (const int64_t bad = FirstBadScale(payload.scales.data(), payload.grid.count); bad < payload.grid.count) {
    return PageError(Code::kArgument, page, side, "scales must be finite and > 0",
                     Text(static_cast<double>(payload.scales.as<float>()[bad])) + " at index " + Text(bad));
  }
  return Ok();
}

}  // namespace

int64_t FirstBadScale(const void* scales, int64_t count) {
  const auto* bytes = static_cast<const uint8_t*>(scales);
  const auto bad = [&](int64_t i) {
    uint32_t bits;
    std::memcpy(&bits, bytes + i * 4, 4);
    return bits - 1 >= 0x7f800000u - 1;  // 0, infinities, NaN, all that is negative
  };
  // Without a way out in the loop, so that it becomes vector code.
  constexpr int64_t kRun = 1024;
  for (int64_t begin = 0; begin < count; begin += kRun) {
    const int64_t end = std::min(count, begin + kRun);
    uint32_t any = 0;
    for (int64_t i = begin; i < end; ++i) any |= bad(i);
    for (int64_t i = begin; any != 0 && i < end; ++i) {
      if (bad(i)) return i;
    }
  }
  return count;
}

Status Validate(const PagedCache& cache, bool scales_known) {
  int64_t next_start = 0;
  for (size_t i = 0; i < cache.pages.size(); ++i) {
    const Page& page = cache.pages[i];
    const auto index = static_cast<int64_t>(i);
    if (page.start != next_start) {
      return PageError(Code::kShape, index, "",
                       i == 0 ? "the first page must start at 0" : "must start where the page before ends, at " + Text(next_start),
                       Text(page.start));
    }
    if (page.key == nullptr) return PageError(Code::kShape, index, "key", "payload is missing", "");
    if (page.value == nullptr) return PageError(Code::kShape, index, "value", "payload is missing", "");
    KVP_TRY(CheckPayload(*page.key, scales_known, index, "key"));
    KVP_TRY(CheckPayload(*page.value, scales_known, index, "value"));
    const Shape& key = page.key->shape;
    const Shape& value = page.value->shape;
    if (key.tokens != value.tokens) {
      return PageError(Code::kShape, index, "value", "capacity must equal the key's " + Text(key.tokens), Text(value.tokens));
    }
    if (key.batch != value.batch || key.heads != value.heads) {
      return PageError(Code::kShape, index, "value", "batch and heads must equal the key's " + Text(key), Text(value));
    }
    if (page.length < 1 || page.length > key.tokens) {
      return PageError(Code::kShape, index, "", "length must be 1 to the capacity " + Text(key.tokens), Text(page.length));
    }
    const Shape& first_key = cache.pages[0].key->shape;
    const Shape& first_value = cache.pages[0].value->shape;
    if (key.batch != first_key.batch || key.heads != first_key.heads || key.width != first_key.width) {
      return PageError(Code::kShape, index, "key", "batch, heads and head_dim must equal page 0's " + Text(first_key), Text(key));
    }
    if (value.width != first_value.width) {
      return PageError(Code::kShape, index, "value", "head_dim must equal page 0's " + Text(first_value.width), Text(value.width));
    }
    if (page.length > INT64_MAX - next_start) {
      return PageError(Code::kShape, index, "", "start + length overflows", Text(page.length));
    }
    next_start += page.length;
  }
  return Ok();
}

}  // namespace kvpages
