// SPDX-License-Identifier: Apache-2.0
// PagedCacheProto <-> PagedCache. Payload bytes go through protobuf's coded streams straight from and into page
// memory; small messages use the generated classes. No field number outside kvpages.proto.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "core/convert.h"
#include "core/instance.h"
#include "core/page.h"

namespace kvpages {

// Fields in any order, both spellings of type and scale, unknown fields kept; every size is checked before memory is
// taken. ERR_CORRUPT / ERR_UNSUPPORTED / ERR_SHAPE ... with byte offset and page; all or nothing.
Result<PagedCache> ParsePagedCache(const InstanceRef& instance, std::span<const uint8_t> bytes);

uint64_t SerializedSize(const PagedCache& cache);
// `out` must hold SerializedSize bytes. Writes fields in onnx-light's order.
Status SerializePagedCache(const PagedCache& cache, std::span<uint8_t> out);

// One page for files that are written and read page by page: the `blocks` field of a PagedCacheProto, so that the pages of
// a layer one after the other are one. `centers`: those of keys and of values that a reader knows from the pages before,
// updated. `offset` and `index`: where the bytes stand and which page it is, for errors.
Result<Bytes> SerializePage(const Page& page, SharedBytes centers[2]);
Result<Page> ParsePage(const InstanceRef& instance, std::span<const uint8_t> bytes, int64_t offset, int64_t index,
                       SharedBytes centers[2]);

}  // namespace kvpages
