// SPDX-License-Identifier: Apache-2.0
#include "core/convert.h"

#include <cmath>
#include <cstring>
#include <vector>

#include "core/page_store.h"
#include "formats/row.h"

namespace kvpages {
namespace {

int64_t ElementBytes(Type dense) { return Info(dense).bits / 8; }
bool IsDense(Type type) { return Info(type).family == Family::kDense; }

const uint8_t* RowAt(const TensorView& view, int64_t b, int64_t h, int64_t t) {
  return static_cast<const uint8_t*>(view.data) +
         (b * view.batch_stride + h * view.head_stride + t * view.token_stride) * ElementBytes(view.type);
}

// Calls f(first row's pointer, tokens in the run, b, h, t) for maximal contiguous runs of the first `valid` rows.
template <typename F>
void ForRuns(const TensorView& view, int64_t valid, F&& f) {
  const bool whole = view.token_stride == view.shape.width;
  for (int64_t b = 0; b < view.shape.batch; ++b) {
    for (int64_t h = 0; h < view.shape.heads; ++h) {
      for (int64_t t = 0; t < valid; t += whole ? valid : 1) f(RowAt(view, b, h, t), whole ? valid : int64_t{1}, b, h, t);
    }
  }
}

double ElementAt(Type type, const uint8_t* data, int64_t index) {
  if (type == Type::f32) {
    float value;
    std::memcpy(&value, data + index * 4, 4);
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, data + index * 2, 2);
  return type == Type::f16 ? FromF16(bits) : FromBF16(bits);
}

}  // namespace

Status CheckFinite(const Backend& backend, const TensorView& view, int64_t valid, const char* argument) {
  Status status;
  ForRuns(view, valid, [&](const uint8_t* data, int64_t tokens, int64_t b, int64_t h, int64_t t) {
    if (!status.ok()) return;
    const int64_t at = backend.first_non_finite(view.type, data, tokens * view.shape.width);
    if (at < 0) return;
    const int64_t token = t + at / view.shape.width, channel = at % view.shape.width;
    const int64_t flat = ((b * view.shape.heads + h) * view.shape.tokens + token) * view.shape.width + channel;
    const double value = ElementAt(view.type, data, at);
    status = MakeError(Code::kNonFinite, argument, "values must be finite",
                       Text(value) + " at index " + Text(flat) + " " + Text(Shape{b, h, token, channel}))
                 .Actual(Text(value));
  });
  return status;
}

namespace {

QuantizeJob JobFor(const TensorView& view, int64_t valid, Payload& payload) {
  QuantizeJob job;
  job.spec = payload.spec;
  job.shape = payload.shape;
  job.valid = valid;
  job.grid = payload.grid;
  job.source = view.data;
  job.source_type = view.type;
  job.batch_stride = view.batch_stride;
  job.head_stride = view.head_stride;
  job.token_stride = view.token_stride;
  job.center = payload.center.empty() ? nullptr : payload.center.as<uint16_t>();
  job.hadamard = payload.hadamard;
  job.codes = payload.codes.data();
  job.scales = payload.scales.data();
  job.zeros = payload.zeros.data();
  job.global = &payload.global;
  return job;
}

// Mean of tokens 0 .. min(valid, 64) - 1 per head and channel, over batch entry 0: f32 sum in token order, times 1/n,
// rounded to bf16 (formats.md's rule for one tensor).
Result<Bytes> CenterOf(const InstanceRef& instance, const TensorView& view, int64_t valid) {
  const int64_t tokens = valid < 64 ? valid : 64, width = view.shape.width;
  KVP_ASSIGN(Bytes center, Bytes::Allocate(static_cast<uint64_t>(view.shape.heads * width) * 2, instance->budget));
  KVP_ASSIGN(Bytes scratch, Bytes::AllocateRaw(static_cast<uint64_t>(width) * 8));
  float* row = scratch.as<float>();
  float* sum = row + width;
  for (int64_t h = 0; h < view.shape.heads; ++h) {
    std::memset(sum, 0, static_cast<size_t>(width) * 4);
    for (int64_t t = 0; t < tokens; ++t) {
      instance->backend->widen(view.type, RowAt(view, 0, h, t), row, width);
      for (int64_t d = 0; d < width; ++d) sum[d] += IsFinite(row[d]) ? row[d] : 0.0f;  // a centre must be finite
    }
    const float factor = tokens > 0 ? 1.0f / static_cast<float>(tokens) : 0.0f;
    for (int64_t d = 0; d < width; ++d) {
      const uint16_t mean = ToBF16(sum[d] * factor);
      center.as<uint16_t>()[h * width + d] = IsFinite(FromBF16(mean)) ? mean : uint16_t{0};
    }
  }
  return center;
}

Result<std::shared_ptr<Payload>> AllocateEncoded(const InstanceRef& instance, const Spec& spec, const Shape& shape) {
  auto payload = EncodedWithoutArrays(spec, shape);
  const ArraySizes sizes = SizesOf(spec, shape);
  KVP_ASSIGN(payload->codes, Bytes::Allocate(static_cast<uint64_t>(sizes.codes), instance->budget));
  KVP_ASSIGN(payload->scales, Bytes::Allocate(static_cast<uint64_t>(sizes.scales), instance->budget));
  KVP_ASSIGN(payload->zeros, Bytes::Allocate(static_cast<uint64_t>(sizes.zeros), instance->budget));
  return payload;
}

// Zero points' bytes as the kernels read them: their low bits, sign-extended for signed types.
void CanonicalZeros(const TypeInfo& info, uint8_t* zeros, int64_t count) {
  const auto mask = static_cast<uint8_t>((1u << info.bits) - 1);
  const auto sign = static_cast<uint8_t>(info.is_signed ? 1u << (info.bits - 1) : 0);
  for (int64_t i = 0; i < count; ++i) zeros[i] = static_cast<uint8_t>(((zeros[i] & mask) ^ sign) - sign);
}

uint8_t ZeroByte(const TypeInfo& info, int32_t zero) {
  return static_cast<uint8_t>(zero & (info.bits == 8 ? 0xff : (1 << info.bits) - 1));
}

}  // namespace

TensorView ContiguousView(const void* data, Type type, const Shape& shape) {
  return {data, type, shape, shape.heads * shape.tokens * shape.width, shape.tokens * shape.width, shape.width};
}

Result<PayloadRef> MakeDense(const InstanceRef& instance, const TensorView& view) {
  KVP_ASSIGN(const int64_t elements, CheckedElements(view.shape, "dims"));
  auto payload = std::make_shared<Payload>();
  payload->shape = view.shape;
  payload->dense_type = view.type;
  const int64_t size = ElementBytes(view.type);
  KVP_ASSIGN(payload->data, Bytes::AllocateRaw(static_cast<uint64_t>(elements * size), instance->budget));
  uint8_t* out = payload->data.data();
  ForRuns(view, view.shape.tokens, [&](const uint8_t* data, int64_t tokens, int64_t, int64_t, int64_t) {
    const auto bytes = static_cast<size_t>(tokens * view.shape.width * size);
    std::memcpy(out, data, bytes);
    out += bytes;
  });
  return PayloadRef(std::move(payload));
}

Status CheckZeroBytes(Type type, std::span<const uint8_t> zeros) {
  const TypeInfo& info = Info(type);
  for (size_t i = 0; i < zeros.size() && info.bits < 8; ++i) {
    const int32_t value = info.is_signed ? static_cast<int8_t>(zeros[i]) : zeros[i];
    const int32_t low = info.is_signed ? -(1 << (info.bits - 1)) : 0;
    if (value < low || value >= 1 << info.bits) {
      return MakeError(Code::kArgument, "zeroPoint", "must lie in the range of " + std::string(info.name),
                       Text(int64_t{value}) + (zeros.size() > 1 ? " at index " + Text(static_cast<int64_t>(i)) : ""));
    }
  }
  return Ok();
}

Spec AffineSpec(Type type, int axis, int64_t block) {
  Spec spec;
  spec.type = type;
  spec.calibration = Calibration::kGiven;
  if (axis == 1 && block == 0) spec.axis = Axis::kHead;
  if (axis == 3 && block > 0) spec.axis = Axis::kToken;
  if (axis == 2 && block > 0) spec.axis = Axis::kChannel;
  if (spec.axis == Axis::kToken || spec.axis == Axis::kChannel) spec.block = block;
  return spec;
}

Result<PayloadRef> MakeAffine(const InstanceRef& instance, const Shape& shape, Type type, int axis, int64_t block,
                              AffineParts parts) {
  const TypeInfo& info = Info(type);
  if (info.family != Family::kInteger || info.onnx == 0) {
    return MakeError(Code::kUnsupported, "type", "an affine layout holds int8, uint8, int4, uint4, int2 or uint2",
                     std::string(info.name));
  }
  if (axis < -1 || axis > 3) return MakeError(Code::kArgument, "axis", "must be -1 (per tensor) or 0 to 3", Text(int64_t{axis}));
  if (block < 0 || (block > 0 && axis < 0)) {
    return MakeError(Code::kArgument, "block", block < 0 ? "must not be negative" : "needs an axis", Text(block));
  }
  KVP_ASSIGN(const int64_t elements, CheckedElements(shape, "dims"));
  const bool unpacked = !parts.own_zeros.empty();
  if (unpacked) parts.zeros = {parts.own_zeros.data(), static_cast<size_t>(parts.own_zeros.size())};
  const Grid grid = AffineGrid(shape, axis, block);
  const int64_t code_bytes = PackedBytes(info.bits, elements);
  if (static_cast<int64_t>(parts.codes.size()) != code_bytes) {
    return MakeError(Code::kShape, "codes", "dims " + Text(shape) + " need " + Text(code_bytes) + " bytes of " + std::string(info.name),
                     Text(static_cast<int64_t>(parts.codes.size())));
  }
  if (const int64_t unused = code_bytes * 8 - elements * info.bits; unused > 0 && parts.codes.back() >> (8 - unused) != 0) {
    return MakeError(Code::kArgument, "codes", "unused bits of the last byte must be 0", Text(int64_t{parts.codes.back()}));
  }
  if (static_cast<int64_t>(parts.scales.size() / 4) != grid.count) {
    return MakeError(Code::kShape, "scale", "needs " + Text(grid.count) + " values", Text(static_cast<int64_t>(parts.scales.size() / 4)));
  }
  if (!parts.zeros.empty() && static_cast<int64_t>(parts.zeros.size()) != grid.count) {
    return MakeError(Code::kShape, "zeroPoint", "needs one per scale, " + Text(grid.count),
                     Text(static_cast<int64_t>(parts.zeros.size())));
  }
  if (const int64_t bad = FirstBadScale(parts.scales.data(), grid.count); bad < grid.count) {
    float scale;
    std::memcpy(&scale, parts.scales.data() + bad * 4, 4);
    return MakeError(Code::kArgument, "scale", "must be finite and > 0",
                     Text(static_cast<double>(scale)) + (grid.count > 1 ? " at index " + Text(bad) : ""));
  }
  auto payload = std::make_shared<Payload>();
  payload->kind = PayloadKind::kEncoded;
  payload->shape = shape;
  payload->spec = AffineSpec(type, axis, block);
  payload->affine = true;
  payload->axis = axis;
  payload->block = block;
  payload->grid = grid;
  KVP_ASSIGN(payload->codes, Bytes::Copy(parts.codes.data(), parts.codes.size(), instance->budget));
  KVP_ASSIGN(payload->scales, Bytes::Copy(parts.scales.data(), static_cast<uint64_t>(grid.count) * 4, instance->budget));
  payload->has_zeros = !parts.zeros.empty();
  if (payload->has_zeros) {
    payload->zero_byte = parts.zeros[0];
    if (!unpacked) {
      KVP_ASSIGN(payload->zeros, Bytes::Copy(parts.zeros.data(), parts.zeros.size(), instance->budget));
    } else {
      payload->zeros = std::move(parts.own_zeros);
    }
    // Unsigned ones of several that a reader unpacked are in this form already.
    if (info.is_signed || grid.count == 1 || !unpacked) CanonicalZeros(info, payload->zeros.data(), grid.count);
  }
  return PayloadRef(std::move(payload));
}

Status Decode(const InstanceRef& instance, const Payload& payload, int64_t begin, int64_t end, float* out,
              int64_t batch_stride, int64_t head_stride, int64_t token_stride) {
  const Shape& shape = payload.shape;
  if (payload.kind == PayloadKind::kOpaque) {
    return MakeError(Code::kUnsupported, "payload",
                     "a structured or shared encoding that this version does not know can be carried but not decoded",
                     payload.opaque_name);
  }
  if (payload.kind == PayloadKind::kDense) {
    const TensorView view = ContiguousView(payload.data.data(), payload.dense_type, shape);
    const bool whole = token_stride == shape.width;
    for (int64_t b = 0; b < shape.batch; ++b) {
      for (int64_t h = 0; h < shape.heads; ++h) {
        for (int64_t t = begin; t < end; t += whole ? end - begin : 1) {
          instance->backend->widen(payload.dense_type, RowAt(view, b, h, t),
                                   out + b * batch_stride + h * head_stride + (t - begin) * token_stride,
                                   (whole ? end - begin : 1) * shape.width);
        }
      }
    }
    return Ok();
  }
  DequantizeJob job;
  job.spec = payload.spec;
  job.shape = shape;
  job.grid = payload.grid;
  job.codes = payload.codes.data();
  job.scales = payload.scales.data();
  job.zeros = payload.has_zeros ? payload.zeros.data() : nullptr;
  job.global = payload.global;
  job.center = payload.center.empty() ? nullptr : payload.center.as<uint16_t>();
  job.hadamard = payload.hadamard;
  job.begin = begin;
  job.end = end;
  job.out = out;
  job.batch_stride = batch_stride;
  job.head_stride = head_stride;
  job.token_stride = token_stride;
  if (end <= begin) return Ok();
  if (instance->device) return instance->device->Dequantize(job);
  instance->backend->dequantize(job);
  return Ok();
}

Status RoundRows(const Backend& backend, const TensorView& view, int64_t begin, int64_t count, Type type, NonFinite non_finite,
                 const char* argument, uint8_t* rows, int64_t to_stride) {
  const int64_t width = view.shape.width, to_size = ElementBytes(type);
  const bool contiguous = view.token_stride == width || count == 1;
  const int64_t run = contiguous ? count : 1;  // tokens at once
  Bytes wide;
  if (view.type != type && view.type != Type::f32) {
    KVP_ASSIGN(wide, Bytes::AllocateRaw(static_cast<uint64_t>(run * width) * 4));
  }
  for (int64_t h = 0; h < view.shape.heads; ++h) {
    for (int64_t t = 0; t < count; t += run) {
      const uint8_t* from = RowAt(view, 0, h, begin + t);
      uint8_t* to = rows + h * to_stride + t * width * to_size;
      if (view.type == type) {
        std::memcpy(to, from, static_cast<size_t>(run * width * to_size));
        continue;
      }
      const float* values = reinterpret_cast<const float*>(from);
      if (view.type != Type::f32) {
        backend.widen(view.type, from, wide.as<float>(), run * width);
        values = wide.as<float>();
      }
      backend.narrow(type, values, to, run * width);
      // What is finite may be infinity in fewer bits, and could never be encoded.
      const int64_t at = non_finite == NonFinite::kError ? backend.first_non_finite(type, to, run * width) : -1;
      if (at >= 0) {
        return MakeError(Code::kNonFinite, argument, "must fit " + std::string(Info(type).name) + ", the type of dense pages",
                         Text(static_cast<double>(values[at])));
      }
    }
  }
  return Ok();
}

std::shared_ptr<Payload> EncodedWithoutArrays(const Spec& spec, const Shape& shape) {
  auto payload = std::make_shared<Payload>();
  payload->kind = PayloadKind::kEncoded;
  payload->shape = shape;
  payload->spec = spec;
  payload->grid = ScaleGrid(spec, shape);
  payload->affine = IsAffine(spec);
  payload->axis = payload->affine ? AffineAxis(spec) : -1;
  payload->block = payload->affine ? spec.block : 0;
  payload->has_zeros = SizesOf(spec, shape).zeros > 0;
  return payload;
}

void FinishEncoded(Payload& payload, bool has_scales, uint8_t first_zero) {
  // An affine layout's scales are > 0; a block of zeros has none, so such a payload is written as the library's own.
  if (payload.affine && !has_scales) {
    payload.affine = false;
    payload.axis = -1;
    payload.block = 0;
  }
  if (payload.affine && payload.grid.count == 1 && payload.has_zeros) payload.zero_byte = ZeroByte(Info(payload.spec.type), first_zero);
}

Result<PayloadRef> Encode(const InstanceRef& instance, const TensorView& view, int64_t valid, const Spec& unresolved,
                          const EncodeOptions& options, const char* argument) {
  const Backend& backend = *instance->backend;
  KVP_ASSIGN(const int64_t elements, CheckedElements(view.shape, argument));
  if (elements == 0) return MakeError(Code::kShape, argument, "must not be empty", Text(view.shape));
  if (valid < 1 || valid > view.shape.tokens) {
    return MakeError(Code::kArgument, "valid", "must be 1 to the " + Text(view.shape.tokens) + " tokens", Text(valid));
  }
  KVP_ASSIGN(const Spec spec, ResolveSpec(unresolved, view.shape.width, "spec"));
  const Family family = Info(spec.type).family;
  const bool given = spec.calibration == Calibration::kGiven && family != Family::kDense && family != Family::kScheme;
  if (!given && (options.scale_count != 0 || options.zero_count != 0)) {
    return MakeError(Code::kArgument, options.scale_count != 0 ? "scale" : "zeroPoint",
                     "only goes with calibration 'given'; " + CanonicalSpec(spec) + (IsDense(spec.type) ? " has none" : " finds its own"));
  }
  if (options.spec.non_finite == NonFinite::kError) KVP_TRY(CheckFinite(backend, view, valid, argument));

  if (IsDense(spec.type)) {
    auto payload = std::make_shared<Payload>();
    payload->shape = view.shape;
    payload->dense_type = spec.type;
    const int64_t size = ElementBytes(spec.type), width = view.shape.width;
    KVP_ASSIGN(payload->data, Bytes::Allocate(static_cast<uint64_t>(elements * size), instance->budget));
    KVP_ASSIGN(Bytes scratch, Bytes::AllocateRaw(static_cast<uint64_t>(width) * 4));
    float* row = scratch.as<float>();
    for (int64_t b = 0; b < view.shape.batch; ++b) {
      for (int64_t h = 0; h < view.shape.heads; ++h) {
        for (int64_t t = 0; t < valid; ++t) {
          backend.widen(view.type, RowAt(view, b, h, t), row, width);
          backend.narrow(spec.type, row,
                         payload->data.data() + ((b * view.shape.heads + h) * view.shape.tokens + t) * width * size, width);
        }
      }
    }
    return PayloadRef(std::move(payload));
  }

  KVP_ASSIGN(auto payload, AllocateEncoded(instance, spec, view.shape));
  if (given) {
    const int64_t count = payload->grid.count;
    if (options.scale_count != count) {
      return MakeError(Code::kArgument, "scale", "calibration 'given' needs " + Text(count) + " scales for " + CanonicalSpec(spec),
                       Text(options.scale_count));
    }
    if (const int64_t bad = FirstBadScale(options.scales, count); bad < count) {
      return MakeError(Code::kArgument, "scale", "must be finite and > 0",
                       Text(static_cast<double>(options.scales[bad])) + (count > 1 ? " at index " + Text(bad) : ""));
    }
    KVP_TRY(StoreScales(spec, options.scales, count, payload->scales.data(), &payload->global));
    const TypeInfo& info = Info(spec.type);
    const int32_t low = info.is_signed ? -(1 << (info.bits - 1)) : 0;
    const int32_t high = info.is_signed ? (1 << (info.bits - 1)) - 1 : (1 << info.bits) - 1;
    if (options.zero_count != 0 && (info.family != Family::kInteger || options.zero_count != count)) {
      return MakeError(Code::kArgument, "zeroPoint",
                       info.family != Family::kInteger ? "only integer types have one" : "needs one per scale, " + Text(count),
                       Text(options.zero_count));
    }
    for (int64_t i = 0; i < options.zero_count; ++i) {
      if (options.zeros[i] < low || options.zeros[i] > high) {
        return MakeError(Code::kArgument, "zeroPoint",
                         "must lie in the range of " + std::string(info.name) + ", " + Text(int64_t{low}) + " to " + Text(int64_t{high}),
                         Text(int64_t{options.zeros[i]}));
      }
      payload->zeros.data()[i] = static_cast<uint8_t>(options.zeros[i]);
    }
    if (options.zero_count > 0) payload->zero_byte = ZeroByte(info, options.zeros[0]);
  }
  if (spec.center) {
    payload->center = options.center;
    if (payload->center.empty()) { KVP_ASSIGN(payload->center, CenterOf(instance, view, valid)); }
  }
  if (spec.hadamard) payload->hadamard = HadamardLength(view.shape.width, options.spec.hadamard_run);
  QuantizeJob job = JobFor(view, valid, *payload);
  job.options = options.spec;
  if (instance->device) {
    KVP_TRY(instance->device->Quantize(job));
  } else {
    KVP_ASSIGN(Bytes scratch, Bytes::AllocateRaw(static_cast<uint64_t>(ScratchFloats(spec, view.shape)) * 4));
    job.scratch = scratch.as<float>();
    backend.quantize(job);
  }
  bool has_scales = true;
  for (int64_t i = 0; payload->affine && has_scales && i < payload->grid.count; ++i) has_scales = payload->scales.as<float>()[i] > 0;
  FinishEncoded(*payload, has_scales, payload->has_zeros ? payload->zeros.data()[0] : uint8_t{0});
  return PayloadRef(std::move(payload));
}

Result<Fidelity> Measure(const InstanceRef& instance, const TensorView& source, const Payload& payload, int64_t valid) {
  const Shape& shape = payload.shape;
  if (!(source.shape == shape)) {
    return MakeError(Code::kShape, "source", "must have the payload's shape " + Text(shape), Text(source.shape));
  }
  if (valid < 0 || valid > shape.tokens) {
    return MakeError(Code::kArgument, "valid", "must be 0 to the " + Text(shape.tokens) + " tokens", Text(valid));
  }
  KVP_ASSIGN(Bytes scratch, Bytes::AllocateRaw(static_cast<uint64_t>(shape.width) * 8));
  float* original = scratch.as<float>();
  KVP_ASSIGN(Bytes restored, Bytes::AllocateRaw(static_cast<uint64_t>(shape.batch * shape.heads * valid * shape.width) * 4));
  KVP_TRY(Decode(instance, payload, 0, valid, restored.as<float>(), shape.heads * valid * shape.width, valid * shape.width,
                 shape.width));
  Fidelity result;
  double squared_error = 0, squared = 0;
  const float* restored_row = restored.as<float>();
  for (int64_t b = 0; b < shape.batch; ++b) {
    for (int64_t h = 0; h < shape.heads; ++h) {
      for (int64_t t = 0; t < valid; ++t, restored_row += shape.width) {
        instance->backend->widen(source.type, RowAt(source, b, h, t), original, shape.width);
        for (int64_t d = 0; d < shape.width; ++d) {
          const double x = original[d], error = x - restored_row[d];
          squared += x * x;
          squared_error += error * error;
          if (std::fabs(error) > result.max_error) result.max_error = std::fabs(error);
        }
      }
    }
  }
  result.elements = shape.batch * shape.heads * valid * shape.width;
  if (result.elements > 0) {
    result.rmse = std::sqrt(squared_error / static_cast<double>(result.elements));
    result.signal_rms = std::sqrt(squared / static_cast<double>(result.elements));
  }
  result.sqnr_db = squared_error == 0 ? INFINITY : 10 * std::log10(squared / squared_error);
  if (payload.kind == PayloadKind::kEncoded) {
    const RowSource rows{source.data, source.type, source.batch_stride, source.head_stride, source.token_stride, shape.width,
                         payload.center.empty() ? nullptr : payload.center.as<uint16_t>(), payload.hadamard};
    result.saturated = CountSaturated(payload.spec, shape, payload.grid, payload.codes.data(), payload.scales.data(),
                                      payload.has_zeros ? payload.zeros.data() : nullptr, payload.global, valid, rows, original);
  }
  return result;
}

// Step 3 of the operator's checks.
Status CheckScale(double scale, const char* argument) {
  const auto stored = static_cast<float>(scale);
  if (!std::isfinite(stored) || !(stored > 0)) {
    return MakeError(Code::kArgument, argument, "must be finite and > 0", Text(scale));
  }
  return Ok();
}

namespace {

// Step 4.
Status CheckZeroPoint(Type type, const char* argument) {
  const TypeInfo& info = Info(type);
  const bool affine = info.family == Family::kInteger && info.onnx != 0;
  if (!affine && info.family != Family::kDense) {
    return MakeError(Code::kUnsupported, argument,
                     "type must be int8, uint8, int4, uint4, int2, uint2, f32, f16 or bf16", std::string(info.name));
  }
  return Ok();
}

Result<PayloadRef> ConvertPayload(const InstanceRef& instance, const Payload& source, int64_t length, const Destination& to,
                                  const char* side, int64_t page) {
  const auto context = [&](Error error) {
    if (error.argument.empty()) error.argument = "cache";
    error.side = side;
    error.page = page;
    error.message = "page " + Text(page) + " " + side + ": " + error.message;
    return error;
  };
  if (source.kind == PayloadKind::kOpaque) {
    return context(MakeError(Code::kUnsupported, "", "a structured or shared encoding cannot be converted", source.opaque_name));
  }
  const Backend& backend = *instance->backend;
  const Shape& shape = source.shape;
  TensorView view = ContiguousView(source.data.data(), source.dense_type, shape);
  Bytes decoded;  // scratch: the valid rows of one payload in f32
  if (source.kind == PayloadKind::kEncoded) {
    const Shape rows{shape.batch, shape.heads, length, shape.width};
    auto scratch = Bytes::AllocateRaw(static_cast<uint64_t>(rows.elements()) * 4);
    if (!scratch.ok()) return context(scratch.error());
    decoded = std::move(scratch.value());
    view = ContiguousView(decoded.data(), Type::f32, rows);
    KVP_TRY(Decode(instance, source, 0, length, decoded.as<float>(), view.batch_stride, view.head_stride, view.token_stride));
    view.shape = shape;
  }
  Status finite = CheckFinite(backend, view, length, "");
  if (!finite.ok()) return context(finite.error());

  EncodeOptions options;
  options.spec.non_finite = NonFinite::kPass;  // checked above, with the page named
  Spec spec;
  spec.type = to.type;
  const auto scale = static_cast<float>(to.scale);
  const TypeInfo& info = Info(to.type);
  int32_t zero = 0;
  if (info.family == Family::kInteger) {
    spec.calibration = Calibration::kGiven;
    uint8_t byte = to.zero_byte;
    CanonicalZeros(info, &byte, 1);
    zero = info.is_signed ? static_cast<int8_t>(byte) : byte;
    options.scales = &scale;
    options.scale_count = 1;
    options.zeros = &zero;
    options.zero_count = 1;
  }
  auto encoded = Encode(instance, view, length, spec, options, "values");
  if (!encoded.ok()) return context(encoded.error());
  if (info.family == Family::kInteger && ZeroByte(info, zero) != to.zero_byte) {
    // The byte goes into the message as it was given, high bits and all.
    std::const_pointer_cast<Payload>(encoded.value())->zero_byte = to.zero_byte;
  }
  return std::move(encoded.value());
}

}  // namespace

Result<PagedCache> QuantizePagedCache(const InstanceRef& instance, const PagedCache& cache, std::span<const int64_t> indices,
                                      const Destination& key, const Destination& value) {
  KVP_TRY(CheckScale(key.scale, "key.scale"));
  KVP_TRY(CheckScale(value.scale, "value.scale"));
  KVP_TRY(CheckZeroPoint(key.type, "key.type"));
  KVP_TRY(CheckZeroPoint(value.type, "value.type"));
  KVP_TRY(Validate(cache));
  std::vector<uint8_t> seen(cache.pages.size());
  for (size_t i = 0; i < indices.size(); ++i) {
    const int64_t index = indices[i];
    if (index < 0 || index >= static_cast<int64_t>(cache.pages.size())) {
      return MakeError(Code::kArgument, "pageIndices",
                       cache.pages.empty() ? std::string("must be empty, as the cache is")
                                           : "must name pages of the cache, 0 to " + Text(static_cast<int64_t>(cache.pages.size()) - 1),
                       Text(index) + " at index " + Text(static_cast<int64_t>(i)));
    }
    if (seen[static_cast<size_t>(index)]++ > 0) {
      return MakeError(Code::kArgument, "pageIndices", "must be unique", Text(index) + " twice");
    }
  }
  PagedCache result = cache;
  for (const int64_t index : indices) {
    Page& page = result.pages[static_cast<size_t>(index)];
    KVP_ASSIGN(page.key, ConvertPayload(instance, *page.key, page.length, key, "key", index));
    KVP_ASSIGN(page.value, ConvertPayload(instance, *page.value, page.length, value, "value", index));
  }
  return result;
}

}  // namespace kvpages
