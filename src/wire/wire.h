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

}  // namespace kvpages
