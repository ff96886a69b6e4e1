// SPDX-License-Identifier: Apache-2.0
#include "support/payloads.h"

#include <stdexcept>

#include "core/float.h"
#include "formats/codec.h"

namespace kvpages::test {
namespace {

template <typename T>
T Must(Result<T> result) {
  if (!result.ok()) throw std::runtime_error(result.error().message);
  return std::move(result.value());
}

}  // namespace

std::vector<const Backend*> Backends() {
  std::vector<const Backend*> backends;
  for (const Backend* backend : AllBackends()) {
    if (backend->available()) backends.push_back(backend);
  }
  return backends;
}

Encoded Quantize(const Backend& backend, const std::string& spec, const Shape& shape, const void* x, Type source_type, int64_t valid,
                 const SpecOptions& options, const Given& given, const std::vector<uint16_t>& center) {
  Encoded out;
  out.spec = Must(ResolveSpec(Must(ParseSpec(spec, "spec")), shape.width, "spec"));
  out.shape = shape;
  out.grid = given.grid != nullptr ? *given.grid : ScaleGrid(out.spec, shape);
  ArraySizes sizes = SizesOf(out.spec, shape);
  if (given.grid != nullptr) {
    sizes.scales = out.grid.count * ScaleBytes(out.spec.scale_type);
    sizes.zeros = out.grid.count;
  }
  out.codes = Must(Bytes::Allocate(static_cast<uint64_t>(sizes.codes)));
  out.scales = Must(Bytes::Allocate(static_cast<uint64_t>(sizes.scales)));
  out.zeros = Must(Bytes::Allocate(static_cast<uint64_t>(sizes.zeros)));
  out.center = center;
  if (out.spec.hadamard) out.hadamard = HadamardLength(shape.width, options.hadamard_run);
  if (!given.scales.empty()) {
    const Status stored = StoreScales(out.spec, given.scales.data(), out.grid.count, out.scales.data(), &out.global);
    if (!stored.ok()) throw std::runtime_error(stored.error().message);
    std::copy(given.zeros.begin(), given.zeros.end(), out.zeros.data());
  }
  QuantizeJob job;
  job.spec = out.spec;
  job.options = options;
  job.shape = shape;
  job.valid = valid < 0 ? shape.tokens : valid;
  job.grid = out.grid;
  job.source = x;
  job.source_type = source_type;
  job.token_stride = shape.width;
  job.head_stride = shape.tokens * shape.width;
  job.batch_stride = shape.heads * job.head_stride;
  job.center = out.spec.center ? out.center.data() : nullptr;
  job.hadamard = out.hadamard;
  job.codes = out.codes.data();
  job.scales = out.scales.data();
  job.zeros = out.zeros.data();
  job.global = &out.global;
  const Bytes scratch = Must(Bytes::Allocate(static_cast<uint64_t>(ScratchFloats(out.spec, shape)) * 4));
  job.scratch = const_cast<float*>(scratch.as<float>());
  backend.quantize(job);
  return out;
}

std::vector<float> Dequantize(const Backend& backend, const Encoded& encoded, int64_t begin, int64_t end) {
  const Shape& shape = encoded.shape;
  if (end < 0) end = shape.tokens;
  std::vector<float> out(static_cast<size_t>(shape.batch * shape.heads * (end - begin) * shape.width));
  DequantizeJob job;
  job.spec = encoded.spec;
  job.shape = shape;
  job.grid = encoded.grid;
  job.codes = encoded.codes.data();
  job.scales = encoded.scales.data();
  job.zeros = encoded.zeros.empty() ? nullptr : encoded.zeros.data();
  job.global = encoded.global;
  job.center = encoded.spec.center ? encoded.center.data() : nullptr;
  job.hadamard = encoded.hadamard;
  job.begin = begin;
  job.end = end;
  job.out = out.data();
  job.token_stride = shape.width;
  job.head_stride = (end - begin) * shape.width;
  job.batch_stride = shape.heads * job.head_stride;
  backend.dequantize(job);
  return out;
}

std::vector<int32_t> CodesOf(const Encoded& encoded) {
  const TypeInfo& info = Info(encoded.spec.type);
  std::vector<int32_t> codes;
  for (int64_t i = 0; i < encoded.shape.elements(); ++i) {
    const uint32_t code = GetCode(encoded.codes.data(), info.bits, i);
    codes.push_back(info.family == Family::kInteger && info.is_signed ? SignExtend(code, info.bits) : static_cast<int32_t>(code));
  }
  return codes;
}

std::vector<uint8_t> BytesOf(const Bytes& bytes) { return {bytes.data(), bytes.data() + bytes.size()}; }

std::vector<float> ScalesOf(const Encoded& encoded) {
  std::vector<float> scales;
  for (int64_t i = 0; i < encoded.grid.count; ++i) {
    scales.push_back(LoadScale(encoded.spec.scale_type, encoded.scales.data(), i, encoded.global, true));
  }
  return scales;
}

Shape ShapeOf(const VectorTensor& tensor) {
  const auto& dims = tensor.dims;
  if (dims.size() == 3) return {1, dims[0], dims[1], dims[2]};
  if (dims.size() == 4) return {dims[0], dims[1], dims[2], dims[3]};
  throw std::runtime_error("three or four dims expected");
}

std::string Difference(const std::vector<float>& got, const std::vector<float>& want) {
  if (got.size() != want.size()) return std::to_string(got.size()) + " elements instead of " + std::to_string(want.size());
  for (size_t i = 0; i < got.size(); ++i) {
    if (BitsOf(got[i]) == BitsOf(want[i]) || (got[i] != got[i] && want[i] != want[i])) continue;
    return "at " + std::to_string(i) + " " + Text(static_cast<double>(got[i])) + " instead of " + Text(static_cast<double>(want[i]));
  }
  return "";
}

}  // namespace kvpages::test
