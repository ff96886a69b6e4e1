// SPDX-License-Identifier: Apache-2.0
#include "core/page.h"

namespace kvpages {

std::shared_ptr<Payload> WithoutArrays(const Payload& payload) {
  auto copy = std::make_shared<Payload>();
  copy->kind = payload.kind;
  copy->dense_type = payload.dense_type;
  copy->has_zeros = payload.has_zeros;
  copy->zero_byte = payload.zero_byte;
  copy->global = payload.global;
  copy->shape = payload.shape;
  copy->spec = payload.spec;
  copy->grid = payload.grid;
  copy->hadamard = payload.hadamard;
  copy->center = payload.center;
  copy->affine = payload.affine;
  copy->axis = payload.axis;
  copy->block = payload.block;
  copy->extras = payload.extras;
  return copy;
}

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
