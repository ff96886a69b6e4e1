// SPDX-License-Identifier: Apache-2.0
#include "abi/context.h"

#include <cmath>
#include <cstring>

namespace kvpages::abi {

Thread& ThisThread() {
  static thread_local Thread thread;
  return thread;
}

int32_t Fail(Error error) {
  const auto number = static_cast<int32_t>(error.code);
  ThisThread().last_error = std::move(error);
  return number;
}

Status PublishErased(std::shared_ptr<void> object, const void* tag, uint32_t* out, size_t out_len) {
  if (out == nullptr || out_len != 1) return MakeError(Code::kBuffer, "out", "must hold one handle", Text(static_cast<int64_t>(out_len)));
  KVP_ASSIGN(*out, ThisThread().handles.AddErased(std::move(object), tag));
  return Ok();
}

Status CopyOut(const void* data, uint64_t size, uint8_t* out, size_t out_len, const char* argument) {
  if (out_len != size) {
    return MakeError(Code::kBuffer, argument, "must hold exactly " + std::to_string(size) + " bytes", std::to_string(out_len))
        .Expected(std::to_string(size));
  }
  if (size != 0) std::memcpy(out, data, static_cast<size_t>(size));
  return Ok();
}

Result<int64_t> Integer(double value, int64_t low, int64_t high, const char* argument) {
  if (!(value >= static_cast<double>(low) && value <= static_cast<double>(high)) || value != std::floor(value)) {
    return MakeError(Code::kArgument, argument, "must be an integer from " + Text(low) + " to " + Text(high), Text(value));
  }
  return static_cast<int64_t>(value);
}

Result<Shape> ShapeOf(const int64_t* dims, size_t dims_len, const char* argument) {
  if (dims_len < 1 || dims_len > 4) {
    return MakeError(Code::kShape, argument, "needs 1 to 4 dims, [batch, kv_heads, tokens, head_dim] at most",
                     Text(static_cast<int64_t>(dims_len)) + " dims");
  }
  int64_t padded[4] = {1, 1, 1, 1};
  for (size_t i = 0; i < dims_len; ++i) padded[4 - dims_len + i] = dims[i];
  const Shape shape{padded[0], padded[1], padded[2], padded[3]};
  KVP_ASSIGN(const int64_t elements, CheckedElements(shape, argument));
  if (elements == 0) return MakeError(Code::kShape, argument, "dims must be at least 1", Text(shape));
  return shape;
}

Result<Type> DenseType(std::string_view name, const char* argument) {
  const TypeInfo* info = FindType(name);
  if (info == nullptr || info->family != Family::kDense) {
    return MakeError(Code::kArgument, argument, "type must be f32, f16 or bf16", std::string(name));
  }
  return info->type;
}

Result<TensorView> ViewOf(const uint8_t* data, size_t data_len, std::string_view type_name, const int64_t* dims, size_t dims_len,
                          const int64_t* strides, size_t strides_len, const char* argument) {
  KVP_ASSIGN(const Type type, DenseType(type_name, argument));
  KVP_ASSIGN(const Shape shape, ShapeOf(dims, dims_len, argument));
  const int64_t size = Info(type).bits / 8;
  const auto available = static_cast<int64_t>(data_len) / size;
  TensorView view = ContiguousView(data, type, shape);
  int64_t needed = shape.elements();
  if (strides_len != 0) {
    if (strides_len != dims_len) {
      return MakeError(Code::kShape, argument, "needs one stride per dim, " + Text(static_cast<int64_t>(dims_len)),
                       Text(static_cast<int64_t>(strides_len)));
    }
    int64_t padded[4] = {0, 0, 0, 1};
    for (size_t i = 0; i < strides_len; ++i) padded[4 - strides_len + i] = strides[i];
    if (padded[3] != 1 && shape.width > 1) {
      return MakeError(Code::kShape, argument, "the last dim must be contiguous (stride 1)", Text(padded[3]));
    }
    view.batch_stride = padded[0];
    view.head_stride = padded[1];
    view.token_stride = padded[2];
    int64_t last = shape.width;
    for (int axis = 0; axis < 3 && needed != 0; ++axis) {
      if (padded[axis] < 0) return MakeError(Code::kShape, argument, "strides must not be negative", Text(padded[axis]));
      if (shape[axis] > 1 && padded[axis] > available / (shape[axis] - 1)) {
        return MakeError(Code::kShape, argument, "strides reach past the data's " + Text(available) + " elements", Text(padded[axis]));
      }
      last += (shape[axis] - 1) * padded[axis];
    }
    if (needed != 0 && last > available) {
      return MakeError(Code::kShape, argument, "dims and strides reach element " + Text(last) + " of " + Text(available));
    }
  } else if (static_cast<uint64_t>(needed) * static_cast<uint64_t>(size) != data_len) {
    return MakeError(Code::kShape, argument,
                     "dims " + Text(shape) + " need " + Text(needed) + " " + std::string(Info(type).name) + " elements (" +
                         Text(needed * size) + " bytes)",
                     Text(static_cast<int64_t>(data_len)) + " bytes");
  }
  return view;
}

Result<bool> IsValueSide(std::string_view side, const char* argument) {
  if (side == "key") return false;
  if (side == "value") return true;
  return MakeError(Code::kArgument, argument, "must be 'key' or 'value'", std::string(side));
}

void Describe(const Payload& payload, Json& json) {
  static constexpr const char* kKinds[] = {"dense", "encoded", "opaque"};
  json.Open('{').Field("kind", kKinds[static_cast<int>(payload.kind)]);
  json.Field("format", FormatName(payload));
  if (payload.kind == PayloadKind::kEncoded) {
    // An affine layout may have scales along an axis that no spec has.
    const bool named = !payload.affine || (AffineAxis(payload.spec) == payload.axis && payload.spec.block == payload.block);
    if (named) json.Field("spec", CanonicalSpec(payload.spec));
    json.Field("type", Info(payload.spec.type).name);
    if (payload.affine) {
      json.Field("axis", payload.axis).Field("block", payload.block);
      if (payload.axis < 0) json.Field("scale", static_cast<double>(payload.scales.as<float>()[0])).Field("zeroByte", int{payload.zero_byte});
    } else {
      if (payload.global_bytes() > 0) json.Field("global", static_cast<double>(payload.global));
      json.Field("hadamard", payload.hadamard);
    }
    json.Field("hasZeros", payload.has_zeros);
  } else if (payload.kind == PayloadKind::kDense) {
    json.Field("spec", Info(payload.dense_type).name).Field("type", Info(payload.dense_type).name);
  }
  json.Key("dims").Open('[');
  for (int axis = 0; axis < 4; ++axis) json.Value(payload.shape[axis]);
  json.Close(']').Key("bytes").Open('{');
  json.Field("data", payload.data.size()).Field("codes", payload.codes.size()).Field("scales", payload.scales.size());
  json.Field("zeros", payload.zeros.size()).Field("global", payload.global_bytes()).Field("center", payload.center.size());
  const uint64_t bytes = payload.bytes() + payload.global_bytes();
  json.Field("message", payload.message.size()).Close('}').Field("byteLength", bytes);
  const int64_t elements = payload.shape.elements();
  if (elements > 0 && payload.kind != PayloadKind::kOpaque) {
    json.Field("bitsPerElement", 8.0 * static_cast<double>(bytes) / static_cast<double>(elements));
  }
  json.Close('}');
}

}  // namespace kvpages::abi
