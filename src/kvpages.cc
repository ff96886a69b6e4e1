// SPDX-License-Identifier: Apache-2.0
// Bodies of kvpages.h: check, call, turn the Status into a number.
#include "kvpages.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "abi/context.h"
#include "abi/describe.h"
#include "backends/devices.h"
#include "core/json.h"
#include "wire/wire.h"

using namespace kvpages;       // NOLINT(google-build-using-namespace): this file is the namespace's face in C
using namespace kvpages::abi;  // NOLINT

#ifndef KVP_VERSION
#define KVP_VERSION "0.0.0"
#endif

// ---- The library ----

int32_t kvp_describe(uint32_t* blob, size_t blob_len) {
  return Guard([&]() -> Status {
#define KVP_X(name) static constexpr auto name##_letters = Letters(&name);
    KVP_FUNCTIONS(KVP_X)
#undef KVP_X
    struct Function {
      const char *name, *letters;
    };
#define KVP_X(name) {#name, name##_letters.data()},
    static constexpr Function kFunctions[] = {KVP_FUNCTIONS(KVP_X)};
#undef KVP_X
    std::string text;
    for (const auto& [name, letters] : kFunctions) text.append(name).append(" ").append(letters).append("\n");
    return PublishBlob(std::move(text), blob, blob_len);
  });
}

int32_t kvp_catalogue(uint32_t* blob, size_t blob_len) {
  return Guard([&]() -> Status {
    Json json;
    json.Open('{').Field("version", KVP_VERSION).Key("status").Open('{');
#define KVP_X(name, number, text) Code::name,
    for (const Code code : {KVP_STATUS_LIST(KVP_X)}) json.Field(CodeText(code), static_cast<int32_t>(code));
#undef KVP_X
    json.Close('}').Key("types").Open('[');
    for (int i = 0; i < TypeCount(); ++i) {
      static constexpr const char* kFamilies[] = {"dense", "integer", "float", "levels", "scheme"};
      const TypeInfo& info = TypeAt(i);
      json.Open('{').Field("name", info.name).Field("family", kFamilies[static_cast<int>(info.family)]).Field("bits", info.bits);
      json.Field("signed", info.is_signed).Field("onnx", info.onnx).Field("block", info.block).Close('}');
    }
    json.Close(']').Key("presets").Open('[');
    for (const Preset& preset : Presets()) {
      json.Open('{').Field("name", preset.name).Field("key", preset.key).Field("value", preset.value).Close('}');
    }
    json.Close(']').Key("specs").Open('[');
    for (const std::string& spec : AllSpecs()) json.Value(spec);
    json.Close(']').Key("kernels").Open('[');
    for (const Backend* backend : AllBackends()) {
      json.Open('{').Field("name", backend->name).Field("available", backend->available()).Close('}');
    }
    json.Close(']').Close('}');
    return PublishBlob(json.Take(), blob, blob_len);
  });
}

int32_t kvp_last_error(uint32_t* blob, size_t blob_len) {
  return Guard([&]() -> Status {
    const Error& error = ThisThread().last_error;
    Json json;
    json.Open('{').Field("code", CodeText(error.code)).Field("message", error.message);
    if (!error.argument.empty()) json.Field("argument", error.argument);
    if (!error.side.empty()) json.Field("side", error.side);
    if (error.layer) json.Field("layer", *error.layer);
    if (error.page) json.Field("page", *error.page);
    if (error.byte_offset) json.Field("byteOffset", *error.byte_offset);
    if (!error.expected.empty()) json.Field("expected", error.expected);
    if (!error.actual.empty()) json.Field("actual", error.actual);
    json.Close('}');
    return PublishBlob(json.Take(), blob, blob_len);
  });
}

int32_t kvp_blob_size(uint32_t blob, double* bytes, size_t bytes_len) {
  return Guard([&]() -> Status {
    KVP_ASSIGN(const auto object, Get<Blob>(blob, "blob"));
    return PutOne(bytes, bytes_len, object->text.size(), "bytes");
  });
}

int32_t kvp_blob_read(uint32_t blob, uint8_t* out, size_t out_len) {
  return Guard([&]() -> Status {
    KVP_ASSIGN(const auto object, Get<Blob>(blob, "blob"));
    return CopyOut(object->text.data(), object->text.size(), out, out_len, "out");
  });
}

int32_t kvp_release(uint32_t handle) {
  return Guard([&]() -> Status { return ThisThread().handles.Remove(handle); });
}

// ---- Instances ----

int32_t kvp_instance_create(const char* kernels, size_t kernels_len, double max_bytes, uint32_t* instance,
                            size_t instance_len) {
  return Guard([&]() -> Status {
    KVP_ASSIGN(const int64_t limit, Integer(max_bytes, 0, int64_t{1} << 53, "maxBytes"));
    auto object = std::make_shared<Instance>();
    KVP_ASSIGN(object->backend, ChooseBackend(View(kernels, kernels_len)));
    object->budget = std::make_shared<Budget>(static_cast<uint64_t>(limit));
    return Publish(std::move(object), instance, instance_len);
  });
}

int32_t kvp_instance_device(uint32_t instance, const char* device, size_t device_len) {
  return Guard([&]() -> Status {
    KVP_ASSIGN(const auto object, Get<Instance>(instance, "instance"));
    KVP_ASSIGN(object->device, OpenDeviceStore(View(device, device_len)));
    return Ok();
  });
}

int32_t kvp_instance_info(uint32_t instance, uint32_t* blob, size_t blob_len) {
  return Guard([&]() -> Status {
    KVP_ASSIGN(const auto object, Get<Instance>(instance, "instance"));
    Json json;
    json.Open('{').Field("kernels", object->backend->name).Field("usedBytes", object->budget->used());
    json.Field("maxBytes", object->budget->limit());
    if (object->device) {
      json.Key("device").Open('{').Field("name", object->device->name()).Field("description", object->device->Describe());
      json.Field("heldBytes", object->device->held_bytes());
      const Status healthy = object->device->Healthy();
      if (!healthy.ok()) json.Field("error", healthy.error().message);
      json.Close('}');
    }
    json.Close('}');
    return PublishBlob(json.Take(), blob, blob_len);
  });
}

// ---- Payloads ----

int32_t kvp_payload_dense(uint32_t instance, const uint8_t* data, size_t data_len, const char* type, size_t type_len,
                          const int64_t* dims, size_t dims_len, uint32_t* payload, size_t payload_len) {
  return Guard([&]() -> Status {
    KVP_ASSIGN(const auto owner, Get<Instance>(instance, "instance"));
    KVP_ASSIGN(const TensorView view, ViewOf(data, data_len, View(type, type_len), dims, dims_len, nullptr, 0, "tensor"));
    KVP_ASSIGN(PayloadRef made, MakeDense(owner, view));
    return Publish(std::make_shared<PayloadObject>(PayloadObject{owner, std::move(made)}), payload, payload_len);
  });
}

int32_t kvp_payload_affine(uint32_t instance, const uint8_t* codes, size_t codes_len, const char* type, size_t type_len,
                           const int64_t* dims, size_t dims_len, const float* scales, size_t scales_len, const uint8_t* zeros,
                           size_t zeros_len, int32_t axis, double block, uint32_t* payload, size_t payload_len) {
  return Guard([&]() -> Status {
    KVP_ASSIGN(const auto owner, Get<Instance>(instance, "instance"));
    KVP_ASSIGN(const Shape shape, ShapeOf(dims, dims_len, "dims"));
    KVP_ASSIGN(const int64_t block_size, Integer(block, 0, int64_t{1} << 53, "block"));
    AffineParts parts;
    parts.codes = {codes, codes_len};
    parts.scales = {reinterpret_cast<const uint8_t*>(scales), scales_len * sizeof(float)};
    parts.zeros = {zeros, zeros_len};
    const TypeInfo* info = FindType(View(type, type_len));
    if (info == nullptr) return MakeError(Code::kArgument, "type", "is not a type", std::string(View(type, type_len)));
    KVP_TRY(CheckZeroBytes(info->type, parts.zeros));
    KVP_ASSIGN(PayloadRef made, MakeAffine(owner, shape, info->type, axis, block_size, std::move(parts)));
    return Publish(std::make_shared<PayloadObject>(PayloadObject{owner, std::move(made)}), payload, payload_len);
  });
}

int32_t kvp_quantize(uint32_t instance, const uint8_t* data, size_t data_len, const char* type, size_t type_len,
                     const int64_t* dims, size_t dims_len, const int64_t* strides, size_t strides_len, double valid,
                     const char* spec, size_t spec_len, const char* side, size_t side_len, const char* options,
                     size_t options_len, const float* scales, size_t scales_len, const int32_t* zeros, size_t zeros_len,
                     uint32_t* payload, size_t payload_len) {
  return Guard([&]() -> Status {
    KVP_ASSIGN(const auto owner, Get<Instance>(instance, "instance"));
    KVP_ASSIGN(const TensorView view,
               ViewOf(data, data_len, View(type, type_len), dims, dims_len, strides, strides_len, "tensor"));
    const std::string_view side_text = View(side, side_len);
    bool value_side = false;
    if (!side_text.empty()) { KVP_ASSIGN(value_side, IsValueSide(side_text, "side")); }
    const std::string_view spec_text = View(spec, spec_len);
    KVP_ASSIGN(const Spec parsed, ParseSpecOrPreset(spec_text, value_side, "spec"));
    const Preset* preset = FindPreset(spec_text);
    if (side_text.empty() && preset != nullptr && preset->key != preset->value) {
      return MakeError(Code::kArgument, "side", "preset '" + std::string(spec_text) + "' has another spec for keys than for values; " +
                                                    "say 'key' or 'value'");
    }
    if (parsed.center && value_side) return MakeError(Code::kSpec, "spec", "+center is for keys only", std::string(spec_text));
    EncodeOptions encode;
    KVP_ASSIGN(encode.spec, ParseSpecOptions(View(options, options_len), "options"));
    KVP_TRY(CheckOptions(parsed, encode.spec, "options"));
    encode.scales = scales;
    encode.scale_count = static_cast<int64_t>(scales_len);
    encode.zeros = zeros;
    encode.zero_count = static_cast<int64_t>(zeros_len);
    int64_t tokens = view.shape.tokens;
    if (valid != -1) { KVP_ASSIGN(tokens, Integer(valid, 0, int64_t{1} << 53, "valid")); }
    KVP_ASSIGN(PayloadRef made, Encode(owner, view, tokens, parsed, encode, "tensor"));
    return Publish(std::make_shared<PayloadObject>(PayloadObject{owner, std::move(made)}), payload, payload_len);
  });
}

int32_t kvp_dequantize(uint32_t payload, double begin, double end, const char* type, size_t type_len, uint8_t* out,
                       size_t out_len) {
  return Guard([&]() -> Status {
    KVP_ASSIGN(const auto object, Get<PayloadObject>(payload, "payload"));
    const Payload& source = *object->payload;
    const Shape& shape = source.shape;
    KVP_ASSIGN(const int64_t first, Integer(begin, 0, shape.tokens, "start"));
    KVP_ASSIGN(const int64_t last, Integer(end, first, shape.tokens, "end"));
    KVP_ASSIGN(const Type to, DenseType(View(type, type_len), "type"));
    const Shape rows{shape.batch, shape.heads, last - first, shape.width};
    const auto bytes = static_cast<uint64_t>(rows.elements()) * (Info(to).bits / 8);
    if (out_len != bytes) {
      return MakeError(Code::kBuffer, "out", "must hold exactly " + std::to_string(bytes) + " bytes for " + Text(rows) + " " +
                                                 std::string(Info(to).name), std::to_string(out_len))
          .Expected(std::to_string(bytes));
    }
    const int64_t head_stride = rows.tokens * rows.width;
    if (to == Type::f32 && reinterpret_cast<uintptr_t>(out) % alignof(float) == 0) {
      return Decode(object->instance, source, first, last, reinterpret_cast<float*>(out), head_stride * rows.heads, head_stride,
                    rows.width);
    }
    // A narrower type goes through f32 a few rows at a time: scratch stays within a cache. Each time a device is sent all codes.
    const int64_t most = object->instance->device ? int64_t{1} << 26 : 16384;
    const int64_t step = std::max<int64_t>(1, most / std::max<int64_t>(1, rows.heads * rows.batch * rows.width));
    KVP_ASSIGN(Bytes scratch, Bytes::AllocateRaw(static_cast<uint64_t>(rows.batch * rows.heads * std::min(step, rows.tokens) * rows.width) * 4));
    const int64_t size = Info(to).bits / 8;
    for (int64_t t = first; t < last; t += step) {
      const int64_t count = std::min(step, last - t);
      KVP_TRY(Decode(object->instance, source, t, t + count, scratch.as<float>(), count * rows.width * rows.heads,
                     count * rows.width, rows.width));
      for (int64_t g = 0; g < rows.batch * rows.heads; ++g) {
        object->instance->backend->narrow(to, scratch.as<float>() + g * count * rows.width,
                                          out + (g * head_stride + (t - first) * rows.width) * size, count * rows.width);
      }
    }
    return Ok();
  });
}

int32_t kvp_payload_info(uint32_t payload, uint32_t* blob, size_t blob_len) {
  return Guard([&]() -> Status {
    KVP_ASSIGN(const auto object, Get<PayloadObject>(payload, "payload"));
    Json json;
    Describe(*object->payload, json);
    return PublishBlob(json.Take(), blob, blob_len);
  });
}

int32_t kvp_payload_array(uint32_t payload, const char* name, size_t name_len, uint8_t* out, size_t out_len) {
  return Guard([&]() -> Status {
    KVP_ASSIGN(const auto object, Get<PayloadObject>(payload, "payload"));
    const Payload& source = *object->payload;
    const struct {
      std::string_view name;
      const Bytes& bytes;
    } arrays[] = {{"data", source.data},   {"codes", source.codes},   {"scales", source.scales},
                  {"zeros", source.zeros}, {"center", source.center}, {"message", source.message}};
    for (const auto& array : arrays) {
      if (array.name == View(name, name_len)) return CopyOut(array.bytes.data(), array.bytes.size(), out, out_len, "out");
    }
    return MakeError(Code::kArgument, "name", "must be data, codes, scales, zeros, center or message",
                     std::string(View(name, name_len)));
  });
}

int32_t kvp_measure(uint32_t payload, const uint8_t* data, size_t data_len, const char* type, size_t type_len,
                    const int64_t* dims, size_t dims_len, double valid, double* figures, size_t figures_len) {
  return Guard([&]() -> Status {
    KVP_ASSIGN(const auto object, Get<PayloadObject>(payload, "payload"));
    KVP_ASSIGN(const TensorView view, ViewOf(data, data_len, View(type, type_len), dims, dims_len, nullptr, 0, "source"));
    if (figures_len != 6) return MakeError(Code::kBuffer, "figures", "must hold 6 figures", Text(static_cast<int64_t>(figures_len)));
    int64_t tokens = view.shape.tokens;
    if (valid != -1) { KVP_ASSIGN(tokens, Integer(valid, 0, view.shape.tokens, "valid")); }
    KVP_ASSIGN(const Fidelity result, Measure(object->instance, view, *object->payload, tokens));
    // No error is larger than one that is NaN.
    const double largest = std::isnan(result.rmse) ? result.rmse : result.max_error;
    const double all[6] = {result.rmse,       largest,          result.sqnr_db, result.signal_rms, static_cast<double>(result.saturated),
                           static_cast<double>(result.elements)};
    std::memcpy(figures, all, sizeof(all));
    return Ok();
  });
}

// ---- Paged caches ----

int32_t kvp_paged_create(uint32_t instance, uint32_t* cache, size_t cache_len) {
  return Guard([&]() -> Status {
    KVP_ASSIGN(const auto owner, Get<Instance>(instance, "instance"));
    return Publish(std::make_shared<PagedObject>(PagedObject{owner, {}}), cache, cache_len);
  });
}

int32_t kvp_paged_label(uint32_t cache, const char* field, size_t field_len, const char* text, size_t text_len) {
  return Guard([&]() -> Status {
    KVP_ASSIGN(const auto object, Get<PagedObject>(cache, "cache"));
    const std::string_view word = View(field, field_len);
    if (word != "name" && word != "docString") return MakeError(Code::kArgument, "field", "must be name or docString", std::string(word));
    (word == "name" ? object->cache.name : object->cache.doc_string) = std::string(View(text, text_len));
    return Ok();
  });
}

int32_t kvp_paged_add(uint32_t cache, double start, double length, uint32_t key, uint32_t value) {
  return Guard([&]() -> Status {
    KVP_ASSIGN(const auto object, Get<PagedObject>(cache, "cache"));
    KVP_ASSIGN(const auto key_payload, Get<PayloadObject>(key, "key"));
    KVP_ASSIGN(const auto value_payload, Get<PayloadObject>(value, "value"));
    Page page;
    KVP_ASSIGN(page.start, Integer(start, -(int64_t{1} << 53), int64_t{1} << 53, "start"));
    KVP_ASSIGN(page.length, Integer(length, -(int64_t{1} << 53), int64_t{1} << 53, "length"));
    page.key = key_payload->payload;
    page.value = value_payload->payload;
    object->cache.pages.push_back(std::move(page));
    return Ok();
  });
}

int32_t kvp_paged_validate(uint32_t cache) {
  return Guard([&]() -> Status {
    KVP_ASSIGN(const auto object, Get<PagedObject>(cache, "cache"));
    return Validate(object->cache);
  });
}

int32_t kvp_paged_clone(uint32_t cache, uint32_t* out, size_t out_len) {
  return Guard([&]() -> Status {
    KVP_ASSIGN(const auto object, Get<PagedObject>(cache, "cache"));
    return Publish(std::make_shared<PagedObject>(*object), out, out_len);
  });
}

int32_t kvp_paged_info(uint32_t cache, uint32_t* blob, size_t blob_len) {
  return Guard([&]() -> Status {
    KVP_ASSIGN(const auto object, Get<PagedObject>(cache, "cache"));
    Json json;
    json.Open('{');
    if (object->cache.name) json.Field("name", *object->cache.name);
    if (object->cache.doc_string) json.Field("docString", *object->cache.doc_string);
    json.Key("pages").Open('[');
    for (const Page& page : object->cache.pages) {
      json.Open('{').Field("start", page.start).Field("length", page.length).Field("capacity", page.capacity()).Key("key");
      Describe(*page.key, json);
      json.Key("value");
      Describe(*page.value, json);
      json.Close('}');
    }
    json.Close(']').Close('}');
    return PublishBlob(json.Take(), blob, blob_len);
  });
}

int32_t kvp_paged_payload(uint32_t cache, double page, const char* side, size_t side_len, uint32_t* payload,
                          size_t payload_len) {
  return Guard([&]() -> Status {
    KVP_ASSIGN(const auto object, Get<PagedObject>(cache, "cache"));
    const auto count = static_cast<int64_t>(object->cache.pages.size());
    KVP_ASSIGN(const int64_t index, Integer(page, 0, count - 1, "page"));
    KVP_ASSIGN(const bool is_value, IsValueSide(View(side, side_len), "side"));
    const Page& found = object->cache.pages[static_cast<size_t>(index)];
    return Publish(std::make_shared<PayloadObject>(PayloadObject{object->instance, is_value ? found.value : found.key}), payload,
                   payload_len);
  });
}

namespace {
Result<Destination> DestinationOf(double scale, std::string_view type, int32_t zero, const char* type_argument,
                                  const char* zero_argument) {
  Destination to;
  to.scale = scale;
  const TypeInfo* info = FindType(type);
  if (info == nullptr) {
    return MakeError(Code::kArgument, type_argument, "must be int8, uint8, int4, uint4, int2, uint2, f32, f16 or bf16",
                     std::string(type));
  }
  to.type = info->type;
  if (info->family == Family::kInteger) {
    const int32_t low = info->is_signed ? -(1 << (info->bits - 1)) : 0;
    const int32_t high = low + (1 << info->bits) - 1;
    if (zero < low || zero > high) {
      return MakeError(Code::kArgument, zero_argument,
                       "must lie in the range of " + std::string(info->name) + ", " + Text(int64_t{low}) + " to " + Text(int64_t{high}),
                       Text(int64_t{zero}));
    }
    to.zero_byte = static_cast<uint8_t>(zero & (info->bits == 8 ? 0xff : (1 << info->bits) - 1));
  }
  return to;
}
}  // namespace

int32_t kvp_paged_quantize(uint32_t cache, const int64_t* indices, size_t indices_len, double key_scale, const char* key_type,
                           size_t key_type_len, int32_t key_zero, double value_scale, const char* value_type,
                           size_t value_type_len, int32_t value_zero, uint32_t* out, size_t out_len) {
  return Guard([&]() -> Status {
    KVP_ASSIGN(const auto object, Get<PagedObject>(cache, "cache"));
    KVP_TRY(CheckScale(key_scale, "key.scale"));
    KVP_TRY(CheckScale(value_scale, "value.scale"));
    KVP_ASSIGN(const Destination key,
               DestinationOf(key_scale, View(key_type, key_type_len), key_zero, "key.type", "key.zeroPoint"));
    KVP_ASSIGN(const Destination value,
               DestinationOf(value_scale, View(value_type, value_type_len), value_zero, "value.type", "value.zeroPoint"));
    KVP_ASSIGN(PagedCache made, QuantizePagedCache(object->instance, object->cache, {indices, indices_len}, key, value));
    return Publish(std::make_shared<PagedObject>(PagedObject{object->instance, std::move(made)}), out, out_len);
  });
}

int32_t kvp_paged_parse(uint32_t instance, const uint8_t* bytes, size_t bytes_len, uint32_t* cache, size_t cache_len) {
  return Guard([&]() -> Status {
    KVP_ASSIGN(const auto owner, Get<Instance>(instance, "instance"));
    KVP_ASSIGN(PagedCache parsed, ParsePagedCache(owner, {bytes, bytes_len}));
    return Publish(std::make_shared<PagedObject>(PagedObject{owner, std::move(parsed)}), cache, cache_len);
  });
}

int32_t kvp_paged_serialized_size(uint32_t cache, double* bytes, size_t bytes_len) {
  return Guard([&]() -> Status {
    KVP_ASSIGN(const auto object, Get<PagedObject>(cache, "cache"));
    return PutOne(bytes, bytes_len, SerializedSize(object->cache), "bytes");
  });
}

int32_t kvp_paged_serialize(uint32_t cache, uint8_t* out, size_t out_len) {
  return Guard([&]() -> Status {
    KVP_ASSIGN(const auto object, Get<PagedObject>(cache, "cache"));
    const uint64_t size = SerializedSize(object->cache);
    if (out_len != size) {
      return MakeError(Code::kBuffer, "out", "must hold exactly " + std::to_string(size) + " bytes", std::to_string(out_len))
          .Expected(std::to_string(size));
    }
    return SerializePagedCache(object->cache, {out, out_len});
  });
}
