// SPDX-License-Identifier: Apache-2.0
#include "core/page.h"

namespace kvpages {

std::string FormatName(const Payload& payload) {
  switch (payload.kind) {
    case PayloadKind::kDense:
      return std::string(Info(payload.dense_type).name);
    case PayloadKind::kOpaque:
      return "opaque (" + payload.opaque_name + ")";
    case PayloadKind::kEncoded:
      break;
  }
  if (!payload.affine) return CanonicalSpec(payload.spec);
  std::string name(Info(payload.spec.type).name);
  if (payload.axis >= 0) name += "/axis " + std::to_string(payload.axis);
  if (payload.block > 0) name += "/block " + std::to_string(payload.block);
  return name;
}

}  // namespace kvpages
