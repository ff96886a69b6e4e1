// SPDX-License-Identifier: Apache-2.0
// The ordered list of backends, and the choice among them.
#include <algorithm>

#include "backends/backend.h"
#include "backends/reference/reference.h"
#include "backends/simd/simd.h"

namespace kvpages {

const std::vector<const Backend*>& AllBackends() {
  static const auto& all = *[] {
    auto* list = new std::vector<const Backend*>(SimdBackends());
    list->push_back(&kReferenceBackend);
    return list;
  }();
  return all;
}

Result<const Backend*> ChooseBackend(std::string_view name) {
  std::string names = "auto";
  for (const Backend* backend : AllBackends()) {
    if (name == backend->name) {
      if (backend->available()) return backend;
      return MakeError(Code::kBackend, "kernels", "this machine cannot run them", std::string(name));
    }
    if (backend->available()) {
      if (name.empty() || name == "auto") return backend;
      names += std::string(", ") + backend->name;
    }
  }
  return MakeError(Code::kBackend, "kernels", "must be one of " + names, std::string(name)).Expected(names);
}

int64_t ScratchFloats(const Spec& spec, const Shape& shape) {
  int64_t rows = 1;
  if (spec.calibration == Calibration::kMse && (spec.axis == Axis::kTensor || spec.axis == Axis::kHead)) {
    rows = shape.rows() / (spec.axis == Axis::kHead ? std::max<int64_t>(shape.heads, 1) : 1);
  } else if (spec.axis == Axis::kChannel) {
    rows = std::min(spec.block, shape.tokens);
  } else if (spec.axis == Axis::kToken) {
    constexpr int64_t kSearchRows = 16;
    rows = std::min(kSearchRows, shape.tokens);
  }
  return std::max<int64_t>(rows, 1) * shape.width;
}

}  // namespace kvpages
