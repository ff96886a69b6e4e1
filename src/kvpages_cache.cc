// SPDX-License-Identifier: Apache-2.0
// Bodies of the model cache functions of kvpages.h.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>

#include "abi/context.h"
#include "attention/attend.h"
#include "core/json.h"
#include "core/model_cache.h"
#include "kvpages.h"
#include "wire/envelope.h"

using namespace kvpages;       // NOLINT(google-build-using-namespace): this file is the namespace's face in C
using namespace kvpages::abi;  // NOLINT

namespace {

constexpr int64_t kMost = int64_t{1} << 53;
constexpr int64_t kMostLayers = 1 << 16;

struct ConfigObject {
  ModelConfig config;
};
struct CacheObject {
  InstanceRef instance;  // of load(), not the cache's own
  ModelCache cache;
  std::string model;
  std::vector<uint32_t> token_ids;
};
struct WriterObject {
  EnvelopeWriter writer;
};
struct ReaderObject {
  InstanceRef instance;
  EnvelopeReader reader;
};

// One item for all layers, or one per layer.
template <typename T>
Result<std::vector<T>> PerLayer(std::vector<T> items, int64_t layers, const char* argument) {
  if (items.size() != 1 && static_cast<int64_t>(items.size()) != layers) {
    return MakeError(Code::kArgument, argument, "needs one for all layers or one for each of the " + Text(layers),
                     Text(static_cast<int64_t>(items.size())));
  }
  items.resize(static_cast<size_t>(layers), items[0]);
  return items;
}
std::vector<std::string> Lines(std::string_view text) {
  std::vector<std::string> lines;
  for (size_t at = 0;;) {
    const size_t end = std::min(text.find('\n', at), text.size());
    lines.emplace_back(text.substr(at, end - at));
    if (end == text.size()) return lines;
    at = end + 1;
  }
}

Error OfLayer(Error error, int64_t layer, const char* side) {
  error.message = "layer " + Text(layer) + " " + side + ": " + error.message;
  error.layer = layer;
  error.side = side;
  return error;
}

Result<double> MaxBytes(double bytes) {
  if (!(bytes >= 0 && bytes <= static_cast<double>(kMost)) || bytes != std::floor(bytes)) {
    return MakeError(Code::kArgument, "maxBytes", "must be 0 or a number of bytes", Text(bytes));
  }
  return bytes;
}

Result<int64_t> LayerOf(double layer) {
  // Which layers there are is the cache's business; what is no integer is refused here.
  return Integer(layer, -kMost, kMost, "layer");
}

// NaN, -1 here: all layers.
Result<int64_t> LayerOrAll(const ModelCache& cache, double layer) {
  if (std::isnan(layer)) return int64_t{-1};
  return Integer(layer, 0, cache.layer_count() - 1, "layer");
}

// [kv_heads, tokens, head_dim] of one layer; ViewOf pads in front, so a batch of 1 goes through.
Result<TensorView> OneTensor(const uint8_t* data, size_t data_len, std::string_view type, const int64_t* dims, size_t dims_len,
                             const int64_t* strides, size_t strides_len, const char* argument) {
  if (dims_len < 3) {
    return MakeError(Code::kShape, argument, "must be [kv_heads, tokens, head_dim]", Text(static_cast<int64_t>(dims_len)) + " dims");
  }
  return ViewOf(data, data_len, type, dims, dims_len, strides, strides_len, argument);
}

Result<std::vector<TensorView>> Tensors(int64_t layers, const uint8_t* data, size_t data_len, std::string_view type_name,
                                        const int64_t* dims, size_t dims_len, const int64_t* strides, size_t strides_len,
                                        const char* argument) {
  std::vector<TensorView> views;
  KVP_ASSIGN(const Type type, DenseType(type_name, argument));
  const int64_t size = Info(type).bits / 8;
  if (dims_len == 4 || (dims_len == 3 && layers == 1)) {
    KVP_ASSIGN(TensorView all, ViewOf(data, data_len, type_name, dims, dims_len, strides, strides_len, argument));
    if (all.shape.batch != layers) {
      return MakeError(Code::kShape, argument, "needs one tensor per layer, " + Text(layers), Text(all.shape.batch));
    }
    for (int64_t i = 0; i < layers; ++i) {
      TensorView one = all;
      one.data = data + i * all.batch_stride * size;
      one.shape.batch = 1;
      views.push_back(one);
    }
    return views;
  }
  if (static_cast<int64_t>(dims_len) != 3 * layers || strides_len != 0) {
    return MakeError(Code::kShape, argument,
                     "must be [layers, kv_heads, tokens, head_dim], or three dims for each of the " + Text(layers) + " layers",
                     Text(static_cast<int64_t>(dims_len)) + " dims");
  }
  int64_t at = 0;
  for (int64_t i = 0; i < layers; ++i) {
    KVP_ASSIGN(const Shape shape, ShapeOf(dims + 3 * i, 3, argument));
    const int64_t elements = shape.elements();
    if (elements > static_cast<int64_t>(data_len) / size - at) {
      return MakeError(Code::kShape, argument, "dims of layer " + Text(i) + " reach past the data", Text(shape));
    }
    views.push_back(ContiguousView(data + at * size, type, shape));
    at += elements;
  }
  if (at * size != static_cast<int64_t>(data_len)) {
    return MakeError(Code::kShape, argument, "dims need " + Text(at * size) + " bytes", Text(static_cast<int64_t>(data_len)));
  }
  return views;
}

void Describe(const FreezeFigures& figures, Json& json) {
  json.Field("pages", figures.pages).Field("elements", figures.elements).Field("rmse", figures.rmse());
  json.Field("maxError", figures.max_error).Field("saturated", figures.saturated);
  json.Field("bytesBefore", figures.bytes_before).Field("bytesAfter", figures.bytes_after);
}

// `device`: where the cache lives, null for one that there is not.
std::string StatsText(const CacheStats& stats, const char* device) {
  Json json;
  json.Open('{');
  if (device != nullptr) json.Field("device", device);
  json.Field("tokens", stats.tokens).Field("byteLength", stats.bytes());
  json.Key("bytes").Open('{').Field("kept", stats.kept_bytes).Field("hot", stats.hot_bytes).Field("codes", stats.code_bytes);
  json.Field("scales", stats.scale_bytes).Field("zeros", stats.zero_bytes).Field("globals", stats.global_bytes);
  json.Field("centers", stats.center_bytes).Close('}');
  json.Key("pages").Open('{').Field("kept", stats.kept_pages).Field("hot", stats.hot_pages).Field("frozen", stats.frozen_pages);
  json.Field("shared", stats.shared_pages).Close('}').Field("sharedBytes", stats.shared_bytes);
  json.Key("bits").Open('{').Field("key", stats.key_bits).Field("value", stats.value_bits).Field("frozen", stats.bits);
  json.Field("overall", stats.overall_bits).Close('}');
  json.Key("key").Open('{');
  Describe(stats.frozen.key, json);
  json.Close('}').Key("value").Open('{');
  Describe(stats.frozen.value, json);
  json.Close('}').Close('}');
  return json.Take();
}

Result<AttendOptions> OptionsOf(const double* options, size_t options_len, const float* sink_logits, size_t sink_logits_len) {
  if (options_len != 6) return MakeError(Code::kArgument, "options", "needs 6 numbers", Text(static_cast<int64_t>(options_len)));
  AttendOptions out;
  if (!std::isnan(options[0])) out.scale = options[0];
  if (!std::isnan(options[1])) { KVP_ASSIGN(out.query_start, Integer(options[1], 0, kMost, "queryStart")); }
  if (!std::isnan(options[2])) { KVP_ASSIGN(out.window, Integer(options[2], 0, kMost, "window")); }
  KVP_ASSIGN(out.sinks, Integer(options[3], 0, kMost, "sinks"));
  out.softcap = options[4];
  out.sink_logits = {sink_logits, sink_logits_len};
  return out;
}

Status CheckOutputs(const ModelCache& cache, int64_t layer, const Shape& queries, size_t out_len, bool wants_lse, size_t lse_len) {
  if (layer < 0 || layer >= cache.layer_count()) return Ok();  // Attend says so
  const int64_t rows = queries.batch * queries.heads * queries.tokens;
  const int64_t width = cache.config().layers[static_cast<size_t>(layer)].value.width;
  if (rows > kMost / width || static_cast<int64_t>(out_len) != rows * width) {
    return MakeError(Code::kBuffer, "out", "must hold exactly " + Text(rows * width) + " floats", Text(static_cast<int64_t>(out_len)))
        .Expected(Text(rows * width));
  }
  if ((wants_lse || lse_len != 0) && static_cast<int64_t>(lse_len) != rows) {
    return MakeError(Code::kBuffer, "lse", "must hold exactly " + Text(rows) + " floats", Text(static_cast<int64_t>(lse_len))).Expected(Text(rows));
  }
  return Ok();
}

// The instance itself, or one like it whose caches live in the host's memory.
Result<InstanceRef> OnDevice(const InstanceRef& instance, std::string_view device) {
  if (device.empty()) return instance;
  const std::string_view own = StoreOf(*instance).name();
  if (device == own) return instance;
  if (device == HostStore().name()) {
    auto host = std::make_shared<Instance>(*instance);
    host->device = nullptr;
    return host;
  }
  const std::string names = own == HostStore().name() ? std::string(own) : std::string(HostStore().name()) + " or " + std::string(own);
  return MakeError(Code::kBackend, "device", "this instance has only " + names, std::string(device)).Expected(names);
}

Status PublishCache(const CacheObject& like, ModelCache cache, uint32_t* out, size_t out_len) {
  return Publish(std::make_shared<CacheObject>(CacheObject{like.instance, std::move(cache), like.model, {}}), out, out_len);
}

}  // namespace

int32_t kvp_config_create(double layers, const int64_t* heads, size_t heads_len, const int64_t* key_dims, size_t key_dims_len,
                          const int64_t* value_dims, size_t value_dims_len, const int64_t* windows, size_t windows_len,
                          const char* key, size_t key_len, const char* value, size_t value_len, const char* key_options,
                          size_t key_options_len, const char* value_options, size_t value_options_len, double page_tokens,
                          double keep_first, double keep_recent, double residual, const char* hot, size_t hot_len,
                          uint32_t* config, size_t config_len) {
  return Guard([&]() -> Status {
    KVP_ASSIGN(const int64_t count, Integer(layers, 1, kMostLayers, "layers"));
    const auto numbers = [&](const int64_t* items, size_t length, const char* argument) {
      return PerLayer(std::vector<int64_t>(items, items + length), count, argument);
    };
    for (const auto& [length, name] : {std::pair{heads_len, "kvHeads"}, {key_dims_len, "headDim"}, {value_dims_len, "headDim"}, {windows_len, "window"}}) {
      if (length == 0) return MakeError(Code::kArgument, name, "needs one for all layers or one for each of the " + Text(count), "0");
    }
    KVP_ASSIGN(const auto all_heads, numbers(heads, heads_len, "kvHeads"));
    KVP_ASSIGN(const auto all_key_dims, numbers(key_dims, key_dims_len, "headDim"));
    KVP_ASSIGN(const auto all_value_dims, numbers(value_dims, value_dims_len, "headDim"));
    KVP_ASSIGN(const auto all_windows, numbers(windows, windows_len, "window"));
    KVP_ASSIGN(const auto keys, PerLayer(Lines(View(key, key_len)), count, "key"));
    KVP_ASSIGN(const auto values, PerLayer(Lines(View(value, value_len)), count, "value"));
    KVP_ASSIGN(const auto all_key_options, PerLayer(Lines(View(key_options, key_options_len)), count, "key.options"));
    KVP_ASSIGN(const auto all_value_options, PerLayer(Lines(View(value_options, value_options_len)), count, "value.options"));
    ModelConfig made;
    KVP_ASSIGN(made.page_tokens, Integer(page_tokens, 0, kMost, "pageTokens"));
    KVP_ASSIGN(made.keep_first, Integer(keep_first, 0, kMost, "keepFirst"));
    KVP_ASSIGN(made.keep_recent, Integer(keep_recent, 0, kMost, "keepRecent"));
    KVP_ASSIGN(made.residual, Integer(residual, 0, kMost, "residual"));
    KVP_ASSIGN(made.hot, DenseType(View(hot, hot_len), "hot"));
    for (size_t i = 0; i < static_cast<size_t>(count); ++i) {
      LayerConfig layer;
      layer.heads = all_heads[i];
      layer.window = all_windows[i];
      for (const bool value_side : {false, true}) {
        SideConfig& side = value_side ? layer.value : layer.key;
        const char* name = value_side ? "value" : "key";
        side.width = (value_side ? all_value_dims : all_key_dims)[i];
        auto spec = ParseSpecOrPreset((value_side ? values : keys)[i], value_side, name);
        if (!spec.ok()) return OfLayer(std::move(spec.error()), static_cast<int64_t>(i), name);
        side.spec = spec.value();
        auto options = ParseSpecOptions((value_side ? all_value_options : all_key_options)[i], name);
        if (!options.ok()) return OfLayer(std::move(options.error()), static_cast<int64_t>(i), name);
        if (Status fit = CheckOptions(side.spec, options.value(), name); !fit.ok()) {
          return OfLayer(std::move(fit.error()), static_cast<int64_t>(i), name);
        }
        side.options = options.value();
      }
      made.layers.push_back(layer);
    }
    KVP_ASSIGN(ModelConfig resolved, ResolveConfig(std::move(made)));
    return Publish(std::make_shared<ConfigObject>(ConfigObject{std::move(resolved)}), config, config_len);
  });
}

int32_t kvp_cache_create(uint32_t instance, uint32_t config, double max_bytes, const char* device, size_t device_len, uint32_t* cache,
                         size_t cache_len) {
  return Guard([&]() -> Status {
    KVP_ASSIGN(const auto owner, Get<Instance>(instance, "instance"));
    KVP_ASSIGN(const auto made_like, Get<ConfigObject>(config, "config"));
    KVP_ASSIGN(const double limit, MaxBytes(max_bytes));
    KVP_ASSIGN(const auto place, OnDevice(owner, View(device, device_len)));
    KVP_ASSIGN(ModelCache made, ModelCache::Create(place, made_like->config, static_cast<uint64_t>(limit)));
    return Publish(std::make_shared<CacheObject>(CacheObject{owner, std::move(made), {}, {}}), cache, cache_len);
  });
}

int32_t kvp_cache_estimate(uint32_t config, double tokens, uint32_t* blob, size_t blob_len) {
  return Guard([&]() -> Status {
    KVP_ASSIGN(const auto made_like, Get<ConfigObject>(config, "config"));
    KVP_ASSIGN(const int64_t count, Integer(tokens, 0, int64_t{1} << 32, "tokens"));
    return PublishBlob(StatsText(EstimateBytes(made_like->config, count), nullptr), blob, blob_len);
  });
}

int32_t kvp_cache_append(uint32_t cache, double layer, const uint8_t* keys, size_t keys_len, const char* key_type,
                         size_t key_type_len, const int64_t* key_dims, size_t key_dims_len, const int64_t* key_strides,
                         size_t key_strides_len, const uint8_t* values, size_t values_len, const char* value_type,
                         size_t value_type_len, const int64_t* value_dims, size_t value_dims_len,
                         const int64_t* value_strides, size_t value_strides_len) {
  return Guard([&]() -> Status {
    KVP_ASSIGN(const auto object, Get<CacheObject>(cache, "cache"));
    KVP_ASSIGN(const int64_t index, LayerOf(layer));
    KVP_ASSIGN(const TensorView key, OneTensor(keys, keys_len, View(key_type, key_type_len), key_dims, key_dims_len, key_strides,
                                               key_strides_len, "keys"));
    KVP_ASSIGN(const TensorView value, OneTensor(values, values_len, View(value_type, value_type_len), value_dims, value_dims_len,
                                                 value_strides, value_strides_len, "values"));
    return object->cache.Append(index, key, value);
  });
}

int32_t kvp_cache_append_all(uint32_t cache, const uint8_t* keys, size_t keys_len, const char* key_type, size_t key_type_len,
                             const int64_t* key_dims, size_t key_dims_len, const int64_t* key_strides, size_t key_strides_len,
                             const uint8_t* values, size_t values_len, const char* value_type, size_t value_type_len,
                             const int64_t* value_dims, size_t value_dims_len, const int64_t* value_strides,
                             size_t value_strides_len) {
  return Guard([&]() -> Status {
    KVP_ASSIGN(const auto object, Get<CacheObject>(cache, "cache"));
    const int64_t layers = object->cache.layer_count();
    KVP_ASSIGN(const auto key, Tensors(layers, keys, keys_len, View(key_type, key_type_len), key_dims, key_dims_len, key_strides,
                                       key_strides_len, "keys"));
    KVP_ASSIGN(const auto value, Tensors(layers, values, values_len, View(value_type, value_type_len), value_dims, value_dims_len,
                                         value_strides, value_strides_len, "values"));
    return object->cache.AppendAll(key, value);
  });
}

int32_t kvp_cache_freeze(uint32_t cache, double layer, double* figures, size_t figures_len) {
  return Guard([&]() -> Status {
    KVP_ASSIGN(const auto object, Get<CacheObject>(cache, "cache"));
    KVP_ASSIGN(const int64_t index, LayerOrAll(object->cache, layer));
    if (figures_len != 14) return MakeError(Code::kBuffer, "figures", "must hold 14 figures", Text(static_cast<int64_t>(figures_len)));
    KVP_ASSIGN(const FreezeReport report, object->cache.Freeze(index));
    double* out = figures;
    for (const FreezeFigures* side : {&report.key, &report.value}) {
      *out++ = static_cast<double>(side->pages);
      *out++ = static_cast<double>(side->elements);
      *out++ = side->rmse();
      *out++ = side->max_error;
      *out++ = static_cast<double>(side->saturated);
      *out++ = static_cast<double>(side->bytes_before);
      *out++ = static_cast<double>(side->bytes_after);
    }
    return Ok();
  });
}

int32_t kvp_cache_truncate(uint32_t cache, double tokens) {
  return Guard([&]() -> Status {
    KVP_ASSIGN(const auto object, Get<CacheObject>(cache, "cache"));
    KVP_ASSIGN(const int64_t n, Integer(tokens, -kMost, kMost, "tokens"));
    return object->cache.Truncate(n);
  });
}

int32_t kvp_cache_drop_before(uint32_t cache, double tokens, double layer) {
  return Guard([&]() -> Status {
    KVP_ASSIGN(const auto object, Get<CacheObject>(cache, "cache"));
    KVP_ASSIGN(const int64_t n, Integer(tokens, -kMost, kMost, "tokens"));
    KVP_ASSIGN(const int64_t index, LayerOrAll(object->cache, layer));
    return object->cache.DropBefore(n, index);
  });
}

int32_t kvp_cache_slice(uint32_t cache, double begin, double end, uint32_t* out, size_t out_len) {
  return Guard([&]() -> Status {
    KVP_ASSIGN(const auto object, Get<CacheObject>(cache, "cache"));
    KVP_ASSIGN(const int64_t from, Integer(begin, -kMost, kMost, "start"));
    KVP_ASSIGN(const int64_t to, Integer(end, -kMost, kMost, "end"));
    KVP_ASSIGN(ModelCache made, object->cache.Slice(from, to));
    return PublishCache(*object, std::move(made), out, out_len);
  });
}

int32_t kvp_cache_fork(uint32_t cache, uint32_t* out, size_t out_len) {
  return Guard([&]() -> Status {
    KVP_ASSIGN(const auto object, Get<CacheObject>(cache, "cache"));
    return PublishCache(*object, object->cache.Fork(), out, out_len);
  });
}

int32_t kvp_cache_move(uint32_t cache, const char* device, size_t device_len, uint32_t* out, size_t out_len) {
  return Guard([&]() -> Status {
    KVP_ASSIGN(const auto object, Get<CacheObject>(cache, "cache"));
    KVP_ASSIGN(const auto place, OnDevice(object->instance, View(device, device_len)));
    KVP_ASSIGN(ModelCache made, object->cache.MoveTo(place));
    return Publish(std::make_shared<CacheObject>(CacheObject{object->instance, std::move(made), object->model, object->token_ids}), out, out_len);
  });
}

int32_t kvp_cache_tokens(uint32_t cache, double layer, double* tokens, size_t tokens_len) {
  return Guard([&]() -> Status {
    KVP_ASSIGN(const auto object, Get<CacheObject>(cache, "cache"));
    KVP_ASSIGN(const int64_t index, LayerOrAll(object->cache, layer));
    return PutOne(tokens, tokens_len, index == -1 ? object->cache.tokens() : object->cache.layer(index).end, "tokens");
  });
}

int32_t kvp_cache_read(uint32_t cache, double layer, double begin, double end, const char* type, size_t type_len, uint8_t* keys,
                       size_t keys_len, uint8_t* values, size_t values_len) {
  return Guard([&]() -> Status {
    KVP_ASSIGN(const auto object, Get<CacheObject>(cache, "cache"));
    const ModelCache& from = object->cache;
    KVP_ASSIGN(const int64_t index, Integer(layer, 0, from.layer_count() - 1, "layer"));
    KVP_ASSIGN(const int64_t first, Integer(begin, 0, from.layer(index).end, "start"));
    KVP_ASSIGN(const int64_t last, Integer(end, first, from.layer(index).end, "end"));
    KVP_ASSIGN(const Type to, DenseType(View(type, type_len), "type"));
    KVP_TRY(from.CheckRead(index, first, last));
    const LayerConfig& config = from.config().layers[static_cast<size_t>(index)];
    const int64_t count = last - first, size = Info(to).bits / 8, heads = config.heads;
    const struct {
      bool value_side;
      const char* argument;
      int64_t width;
      uint8_t* data;
      size_t length;
    } sides[] = {{false, "out.key", config.key.width, keys, keys_len}, {true, "out.value", config.value.width, values, values_len}};
    for (const auto& side : sides) {
      const int64_t bytes = heads * count * side.width * size;
      if (static_cast<int64_t>(side.length) == bytes) continue;
      return MakeError(Code::kBuffer, side.argument, "must hold exactly " + Text(bytes) + " bytes for " + Text(Shape{1, heads, count, side.width}) +
                                                         " " + std::string(Info(to).name), std::to_string(side.length))
          .Expected(Text(bytes));
    }
    // A narrower type goes through f32, as many tokens at a time as stay within a cache, or are worth a transfer from a device.
    const int64_t most = from.instance()->device ? int64_t{1} << 22 : 16384, widest = std::max(config.key.width, config.value.width);
    const int64_t step = std::clamp<int64_t>(most / (heads * widest), 1, std::max<int64_t>(count, 1));
    const bool in_place = to == Type::f32 && (reinterpret_cast<uintptr_t>(keys) | reinterpret_cast<uintptr_t>(values)) % alignof(float) == 0;
    KVP_ASSIGN(Bytes scratch, Bytes::AllocateRaw(in_place ? 0 : static_cast<uint64_t>(heads * step * widest) * 4));
    for (const auto& side : sides) {
      if (in_place) {
        KVP_TRY(from.Read(index, side.value_side, first, last, reinterpret_cast<float*>(side.data), count * side.width, side.width));
        continue;
      }
      for (int64_t t = first; t < last; t += step) {
        const int64_t now = std::min(step, last - t);
        KVP_TRY(from.Read(index, side.value_side, t, t + now, scratch.as<float>(), now * side.width, side.width));
        for (int64_t h = 0; h < heads; ++h) {
          object->instance->backend->narrow(to, scratch.as<float>() + h * now * side.width, side.data + (h * count + t - first) * side.width * size,
                                            now * side.width);
        }
      }
    }
    return Ok();
  });
}

int32_t kvp_cache_attend(uint32_t cache, double layer, const uint8_t* queries, size_t queries_len, const char* type,
                         size_t type_len, const int64_t* dims, size_t dims_len, const int64_t* strides, size_t strides_len,
                         const double* options, size_t options_len, const float* sink_logits, size_t sink_logits_len, float* out,
                         size_t out_len, float* lse, size_t lse_len) {
  return Guard([&]() -> Status {
    KVP_ASSIGN(const auto object, Get<CacheObject>(cache, "cache"));
    KVP_ASSIGN(const int64_t index, LayerOf(layer));
    KVP_ASSIGN(const TensorView view,
               OneTensor(queries, queries_len, View(type, type_len), dims, dims_len, strides, strides_len, "queries"));
    KVP_ASSIGN(const AttendOptions chosen, OptionsOf(options, options_len, sink_logits, sink_logits_len));
    KVP_TRY(CheckOutputs(object->cache, index, view.shape, out_len, options[5] != 0, lse_len));
    return Attend(object->cache, index, view, chosen, out, lse_len == 0 ? nullptr : lse);
  });
}

int32_t kvp_cache_attend_batch(const uint32_t* caches, size_t caches_len, double layer, const uint8_t* queries,
                               size_t queries_len, const char* type, size_t type_len, const int64_t* dims, size_t dims_len,
                               const int64_t* strides, size_t strides_len, const double* options, size_t options_len,
                               const float* sink_logits, size_t sink_logits_len, float* out, size_t out_len, float* lse,
                               size_t lse_len) {
  return Guard([&]() -> Status {
    KVP_ASSIGN(const int64_t index, LayerOf(layer));
    KVP_ASSIGN(const TensorView view,
               OneTensor(queries, queries_len, View(type, type_len), dims, dims_len, strides, strides_len, "queries"));
    KVP_ASSIGN(const AttendOptions chosen, OptionsOf(options, options_len, sink_logits, sink_logits_len));
    const auto count = static_cast<int64_t>(caches_len);
    if (count < 1 || view.shape.batch != count) {
      return MakeError(Code::kShape, "queries", "must be [caches, heads, tokens, head_dim] with " + Text(count) + " caches", Text(view.shape));
    }
    std::vector<std::shared_ptr<CacheObject>> objects;
    int64_t width = 0;
    for (int64_t i = 0; i < count; ++i) {
      KVP_ASSIGN(auto object, Get<CacheObject>(caches[i], "caches"));
      KVP_ASSIGN([[maybe_unused]] const int64_t there, Integer(layer, 0, object->cache.layer_count() - 1, "layer"));
      const int64_t own = object->cache.config().layers[static_cast<size_t>(index)].value.width;
      if (i > 0 && own != width) {
        return MakeError(Code::kMismatch, "caches", "must have the head_dim of the first one's values, " + Text(width), Text(own)).Expected(Text(width));
      }
      width = own;
      objects.push_back(std::move(object));
    }
    KVP_TRY(CheckOutputs(objects[0]->cache, index, view.shape, out_len, options[5] != 0, lse_len));
    // Nothing reaches the caller before all caches have answered.
    KVP_ASSIGN(Bytes results, Bytes::AllocateRaw((uint64_t{out_len} + out_len / static_cast<uint64_t>(width)) * 4));
    float* sums = results.as<float>();
    float* logs = sums + out_len;
    const int64_t rows = view.shape.heads * view.shape.tokens;
    std::vector<AttendTask> tasks;
    for (int64_t i = 0; i < count; ++i) {
      TensorView one = view;
      one.shape.batch = 1;
      one.data = static_cast<const uint8_t*>(view.data) + i * view.batch_stride * (Info(view.type).bits / 8);
      tasks.push_back({&objects[static_cast<size_t>(i)]->cache, one, sums + i * rows * width, logs + i * rows});
    }
    KVP_TRY(AttendAll(tasks, index, chosen));
    std::memcpy(out, sums, out_len * 4);
    if (lse_len != 0) std::memcpy(lse, logs, lse_len * 4);
    return Ok();
  });
}

int32_t kvp_cache_stats(uint32_t cache, uint32_t* blob, size_t blob_len) {
  return Guard([&]() -> Status {
    KVP_ASSIGN(const auto object, Get<CacheObject>(cache, "cache"));
    return PublishBlob(StatsText(object->cache.Stats(), object->cache.store().name()), blob, blob_len);
  });
}

int32_t kvp_cache_info(uint32_t cache, uint32_t* blob, size_t blob_len) {
  return Guard([&]() -> Status {
    KVP_ASSIGN(const auto object, Get<CacheObject>(cache, "cache"));
    const ModelConfig& config = object->cache.config();
    Json json;
    json.Open('{').Field("device", object->cache.store().name()).Field("model", object->model).Field("tokenIds", object->token_ids.size());
    json.Field("pageTokens", config.page_tokens).Field("keepFirst", config.keep_first).Field("keepRecent", config.keep_recent);
    json.Field("residual", config.residual).Field("hot", Info(config.hot).name).Key("layers").Open('[');
    for (const LayerConfig& layer : config.layers) {
      json.Open('{').Field("kvHeads", layer.heads).Field("window", layer.window);
      for (const SideConfig* side : {&layer.key, &layer.value}) {
        json.Key(side == &layer.key ? "key" : "value").Open('{').Field("headDim", side->width).Field("spec", CanonicalSpec(side->spec));
        json.Field("options", SpecOptionsText(side->options)).Close('}');
      }
      json.Close('}');
    }
    json.Close(']').Close('}');
    return PublishBlob(json.Take(), blob, blob_len);
  });
}

int32_t kvp_cache_layer(uint32_t cache, double layer, uint32_t* blob, size_t blob_len) {
  return Guard([&]() -> Status {
    KVP_ASSIGN(const auto object, Get<CacheObject>(cache, "cache"));
    KVP_ASSIGN(const int64_t index, Integer(layer, 0, object->cache.layer_count() - 1, "layer"));
    const CacheLayer& held = object->cache.layer(index);
    Json json;
    json.Open('{').Field("tokens", held.end).Key("pages").Open('[');
    for (const CachePage& page : held.pages) {
      json.Open('{').Field("start", page.start).Field("length", page.length).Field("capacity", page.capacity()).Field("kept", page.kept);
      for (const CacheSide* side : {&page.key, &page.value}) {
        json.Key(side == &page.key ? "key" : "value").Open('{').Field("format", FormatName(*side->payload));
        json.Field("byteLength", side->payload->bytes() + side->payload->global_bytes() - side->payload->center.size()).Field("frozen", side->frozen);
        if (side->frozen) {
          json.Field("rmse", side->figures.rmse()).Field("maxError", side->figures.max_error).Field("saturated", side->figures.saturated);
        }
        json.Close('}');
      }
      json.Close('}');
    }
    json.Close(']').Close('}');
    return PublishBlob(json.Take(), blob, blob_len);
  });
}

int32_t kvp_cache_to_paged(uint32_t cache, double layer, uint32_t* paged, size_t paged_len) {
  return Guard([&]() -> Status {
    KVP_ASSIGN(const auto object, Get<CacheObject>(cache, "cache"));
    KVP_ASSIGN(const int64_t index, LayerOf(layer));
    KVP_ASSIGN(PagedCache made, object->cache.ToPaged(index));
    return Publish(std::make_shared<PagedObject>(PagedObject{object->instance, std::move(made)}), paged, paged_len);
  });
}

int32_t kvp_cache_from_paged(uint32_t instance, uint32_t config, double max_bytes, const char* device, size_t device_len,
                             const uint32_t* layers, size_t layers_len, uint32_t* cache, size_t cache_len) {
  return Guard([&]() -> Status {
    KVP_ASSIGN(const auto owner, Get<Instance>(instance, "instance"));
    KVP_ASSIGN(const auto made_like, Get<ConfigObject>(config, "config"));
    KVP_ASSIGN(const double limit, MaxBytes(max_bytes));
    std::vector<std::shared_ptr<PagedObject>> objects;
    std::vector<const PagedCache*> sources;
    for (size_t i = 0; i < layers_len; ++i) {
      KVP_ASSIGN(auto object, Get<PagedObject>(layers[i], "layers"));
      sources.push_back(&object->cache);
      objects.push_back(std::move(object));
    }
    KVP_ASSIGN(const auto place, OnDevice(owner, View(device, device_len)));
    KVP_ASSIGN(auto taken, LayersFromPaged(made_like->config, sources));
    KVP_ASSIGN(ModelCache made, ModelCache::Assemble(ModelCache::OwnInstance(place, static_cast<uint64_t>(limit)), made_like->config,
                                                     std::move(taken)));
    return Publish(std::make_shared<CacheObject>(CacheObject{owner, std::move(made), {}, {}}), cache, cache_len);
  });
}

int32_t kvp_cache_token_ids(uint32_t cache, uint32_t* out, size_t out_len) {
  return Guard([&]() -> Status {
    KVP_ASSIGN(const auto object, Get<CacheObject>(cache, "cache"));
    return CopyOut(object->token_ids.data(), object->token_ids.size() * 4, reinterpret_cast<uint8_t*>(out), out_len * 4, "out");
  });
}

// ---- Envelopes ----

int32_t kvp_save_create(uint32_t cache, const char* model, size_t model_len, const uint32_t* token_ids, size_t token_ids_len,
                        uint32_t* writer, size_t writer_len) {
  return Guard([&]() -> Status {
    KVP_ASSIGN(const auto object, Get<CacheObject>(cache, "cache"));
    KVP_ASSIGN(EnvelopeWriter made, EnvelopeWriter::Create(object->cache, std::string(View(model, model_len)),
                                                           std::vector<uint32_t>(token_ids, token_ids + token_ids_len)));
    return Publish(std::make_shared<WriterObject>(WriterObject{std::move(made)}), writer, writer_len);
  });
}

int32_t kvp_save_progress(uint32_t writer, double* figures, size_t figures_len) {
  return Guard([&]() -> Status {
    KVP_ASSIGN(const auto object, Get<WriterObject>(writer, "writer"));
    if (figures_len != 2) return MakeError(Code::kBuffer, "figures", "must hold 2 figures", Text(static_cast<int64_t>(figures_len)));
    figures[0] = static_cast<double>(object->writer.parts());
    figures[1] = static_cast<double>(object->writer.next());
    return Ok();
  });
}

int32_t kvp_save_size(uint32_t writer, double* bytes, size_t bytes_len) {
  return Guard([&]() -> Status {
    KVP_ASSIGN(const auto object, Get<WriterObject>(writer, "writer"));
    KVP_ASSIGN(const uint64_t size, object->writer.Size());
    return PutOne(bytes, bytes_len, size, "bytes");
  });
}

int32_t kvp_save_next(uint32_t writer, double bytes, uint32_t* blob, size_t blob_len) {
  return Guard([&]() -> Status {
    KVP_ASSIGN(const auto object, Get<WriterObject>(writer, "writer"));
    KVP_ASSIGN(const int64_t room, Integer(bytes, 0, kMost, "bytes"));
    std::string text;
    do {
      KVP_ASSIGN(const Bytes part, object->writer.Next());
      text.append(reinterpret_cast<const char*>(part.data()), static_cast<size_t>(part.size()));
    } while (object->writer.next() < object->writer.parts() && static_cast<int64_t>(text.size()) < room);
    return PublishBlob(std::move(text), blob, blob_len);
  });
}

int32_t kvp_restore_create(uint32_t instance, uint32_t config, int32_t check_key, int32_t check_value, int32_t check_model,
                           const char* model, size_t model_len, double max_bytes, const char* device, size_t device_len,
                           uint32_t* reader, size_t reader_len) {
  return Guard([&]() -> Status {
    KVP_ASSIGN(const auto owner, Get<Instance>(instance, "instance"));
    KVP_ASSIGN(const double limit, MaxBytes(max_bytes));
    KVP_ASSIGN(const auto place, OnDevice(owner, View(device, device_len)));
    EnvelopeExpectation expectation;
    if (config != 0) {
      KVP_ASSIGN(const auto made_like, Get<ConfigObject>(config, "config"));
      expectation.config = made_like->config;
    }
    expectation.key_spec = check_key != 0;
    expectation.value_spec = check_value != 0;
    if (check_model != 0) expectation.model = std::string(View(model, model_len));
    return Publish(std::make_shared<ReaderObject>(ReaderObject{owner, EnvelopeReader(place, static_cast<uint64_t>(limit), std::move(expectation))}),
                   reader, reader_len);
  });
}

int32_t kvp_restore_feed(uint32_t reader, const uint8_t* bytes, size_t bytes_len, double* figures, size_t figures_len) {
  return Guard([&]() -> Status {
    KVP_ASSIGN(const auto object, Get<ReaderObject>(reader, "reader"));
    if (figures_len != 2) return MakeError(Code::kBuffer, "figures", "must hold 2 figures", Text(static_cast<int64_t>(figures_len)));
    KVP_TRY(object->reader.Feed({bytes, bytes_len}));
    figures[0] = static_cast<double>(object->reader.pages());
    figures[1] = static_cast<double>(object->reader.pages_read());
    return Ok();
  });
}

int32_t kvp_restore_finish(uint32_t reader, uint32_t* cache, size_t cache_len) {
  return Guard([&]() -> Status {
    KVP_ASSIGN(const auto object, Get<ReaderObject>(reader, "reader"));
    KVP_ASSIGN(ModelCache made, object->reader.Finish());
    return Publish(std::make_shared<CacheObject>(CacheObject{object->instance, std::move(made), object->reader.model(), object->reader.token_ids()}),
                   cache, cache_len);
  });
}
