// SPDX-License-Identifier: Apache-2.0
#include "core/model_cache.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace kvpages {
namespace {

constexpr int64_t kMostTokens = int64_t{1} << 53;  // what a double of the C ABI counts exactly
// A file's numbers must not make a reader ask for a hot page beyond reason: 256 MB of f32.
constexpr int64_t kMostPageTokens = int64_t{1} << 24, kMostPageElements = int64_t{1} << 26;
constexpr int64_t kCenterTokens = 64;              // c is the mean of this many tokens behind the kept ones

const SideConfig& SideOf(const LayerConfig& layer, bool value_side) { return value_side ? layer.value : layer.key; }
CacheSide& SideOf(CachePage& page, bool value_side) { return value_side ? page.value : page.key; }
const CacheSide& SideOf(const CachePage& page, bool value_side) { return value_side ? page.value : page.key; }
const char* SideName(bool value_side) { return value_side ? "value" : "key"; }
int64_t ElementBytes(Type dense) { return Info(dense).bits / 8; }

// Tokens that a page of a side must lie behind the end before it is due.
int64_t Behind(const ModelConfig& config, bool value_side) {
  return value_side ? std::max(config.keep_recent, config.residual) : config.keep_recent;
}

// Keys are encoded `residual` tokens at a time.
int64_t WholeGroups(const ModelConfig& config, bool value_side, int64_t due) {
  const int64_t group = !value_side && config.residual > 0 ? config.residual / config.page_tokens : 1;
  return due / group * group;
}

// How many of a side's closed dense pages are due, oldest first. `ends`: where these pages end, ascending; `end`: tokens
// of the layer.
int64_t DueCount(const ModelConfig& config, bool value_side, int64_t end, std::span<const int64_t> ends) {
  int64_t due = 0;
  while (due < static_cast<int64_t>(ends.size()) && end - ends[static_cast<size_t>(due)] >= Behind(config, value_side)) ++due;
  return WholeGroups(config, value_side, due);
}

Error LayerError(Error error, int64_t layer, const char* side) {
  error.message = "layer " + Text(layer) + (*side ? std::string(" ") + side : "") + ": " + error.message;
  error.layer = layer;
  if (*side) error.side = side;
  return error;
}

// The first page that ends behind `position`.
size_t PageAt(const CacheLayer& layer, int64_t position) {
  const auto found = std::upper_bound(layer.pages.begin(), layer.pages.end(), position,
                                      [](int64_t at, const CachePage& page) { return at < page.end(); });
  return static_cast<size_t>(found - layer.pages.begin());
}

// The first page that may still be encoded.
size_t FirstUnsettled(const CacheLayer& layer) {
  size_t at = layer.settled;
  while (at < layer.pages.size() && (layer.pages[at].kept || (layer.pages[at].key.frozen && layer.pages[at].value.frozen))) ++at;
  return at;
}

// Whether a page might be encoded now; groups of a residual and a centre that is not known yet may still be waited for.
bool AnyDue(const ModelConfig& config, const CacheLayer& layer) {
  const size_t first = FirstUnsettled(layer);
  for (const bool value_side : {false, true}) {
    size_t at = first;
    while (at < layer.pages.size() && (layer.pages[at].kept || SideOf(layer.pages[at], value_side).frozen)) ++at;
    if (at == layer.pages.size() || !IsClosed(layer, at)) continue;
    if (layer.end - layer.pages[at].end() >= Behind(config, value_side)) return true;
  }
  return false;
}

const CachePage* FirstBehindKept(const CacheLayer& layer) {
  for (const CachePage& page : layer.pages) {
    if (!page.kept) return &page;
  }
  return nullptr;
}

}  // namespace

double FreezeFigures::rmse() const { return elements > 0 ? std::sqrt(squared_error / static_cast<double>(elements)) : 0; }

void FreezeFigures::Add(const FreezeFigures& other) {
  pages += other.pages;
  elements += other.elements;
  saturated += other.saturated;
  bytes_before += other.bytes_before;
  bytes_after += other.bytes_after;
  squared_error += other.squared_error;
  max_error = std::max(max_error, other.max_error);
}

bool IsClosed(const CacheLayer& layer, size_t index) {
  const CachePage& page = layer.pages[index];
  return index + 1 < layer.pages.size() || page.length == page.capacity() || page.key.writable == nullptr ||
         page.value.writable == nullptr;
}

Result<ModelConfig> ResolveConfig(ModelConfig config) {
  if (config.layers.empty()) return MakeError(Code::kArgument, "layers", "must be at least 1", "0");
  if (Info(config.hot).family != Family::kDense) {
    return MakeError(Code::kArgument, "hot", "must be f32, f16 or bf16", std::string(Info(config.hot).name));
  }
  const struct {
    int64_t value;
    const char* name;
  } counts[] = {{config.page_tokens, "pageTokens"}, {config.keep_first, "keepFirst"}, {config.keep_recent, "keepRecent"},
                {config.residual, "residual"}};
  for (const auto& count : counts) {
    if (count.value < 0 || count.value > kMostPageTokens) {
      return MakeError(Code::kArgument, count.name, "must be 0 to " + Text(kMostPageTokens), Text(count.value));
    }
  }
  int64_t page_tokens = 16;
  for (size_t i = 0; i < config.layers.size(); ++i) {
    LayerConfig& layer = config.layers[i];
    const auto index = static_cast<int64_t>(i);
    if (layer.heads < 1) return LayerError(MakeError(Code::kArgument, "kvHeads", "must be at least 1", Text(layer.heads)), index, "");
    if (layer.window < 0) return LayerError(MakeError(Code::kArgument, "window", "must not be negative", Text(layer.window)), index, "");
    for (const bool value_side : {false, true}) {
      SideConfig& side = value_side ? layer.value : layer.key;
      const char* name = SideName(value_side);
      if (side.width < 1) return LayerError(MakeError(Code::kArgument, "headDim", "must be at least 1", Text(side.width)), index, name);
      auto spec = ResolveSpec(side.spec, side.width, name);
      if (!spec.ok()) return LayerError(spec.error(), index, name);
      side.spec = spec.value();
      if (side.spec.center && value_side) {
        return LayerError(MakeError(Code::kSpec, name, "+center is for keys only", CanonicalSpec(side.spec)), index, name);
      }
      if (side.spec.calibration == Calibration::kGiven && Info(side.spec.type).family != Family::kScheme &&
          Info(side.spec.type).family != Family::kDense) {
        return LayerError(MakeError(Code::kSpec, name, "a cache finds its scales; calibration 'given' has none", CanonicalSpec(side.spec)),
                          index, name);
      }
      if (side.spec.axis == Axis::kChannel) page_tokens = std::max(page_tokens, side.spec.block);
      const Shape page{1, layer.heads, std::max({page_tokens, config.page_tokens, config.keep_first}), side.width};
      auto elements = CheckedElements(page, name);
      if (!elements.ok()) return LayerError(elements.error(), index, name);
      if (elements.value() > kMostPageElements) {
        return LayerError(MakeError(Code::kArgument, name, "a page must have at most " + Text(kMostPageElements) + " elements", Text(page)), index, name);
      }
    }
  }
  if (config.page_tokens == 0) config.page_tokens = page_tokens;
  if (config.residual % config.page_tokens != 0) {
    return MakeError(Code::kArgument, "residual", "must be a multiple of pageTokens, " + Text(config.page_tokens), Text(config.residual));
  }
  return config;
}

InstanceRef ModelCache::OwnInstance(const InstanceRef& instance, uint64_t max_bytes) {
  auto own = std::make_shared<Instance>(*instance);
  own->budget = std::make_shared<Budget>(max_bytes, instance->budget);
  return own;
}

Result<ModelCache> ModelCache::Create(const InstanceRef& instance, ModelConfig config, uint64_t max_bytes) {
  KVP_ASSIGN(ModelConfig resolved, ResolveConfig(std::move(config)));
  ModelCache cache;
  cache.instance_ = OwnInstance(instance, max_bytes);
  cache.layers_.resize(resolved.layers.size());
  cache.config_ = std::make_shared<const ModelConfig>(std::move(resolved));
  return cache;
}

// ---- Appending ----

int64_t ModelCache::tokens() const {
  int64_t most = 0;
  for (const CacheLayer& layer : layers_) most = std::max(most, layer.end);
  return most;
}

Result<int64_t> ModelCache::EvenTokens() const {
  for (size_t i = 1; i < layers_.size(); ++i) {
    if (layers_[i].end == layers_[0].end) continue;
    return MakeError(Code::kMismatch, "cache", "layer " + Text(static_cast<int64_t>(i)) + " must have the " + Text(layers_[0].end) +
                                                   " tokens of layer 0", Text(layers_[i].end))
        .Layer(static_cast<int64_t>(i))
        .Expected(Text(layers_[0].end));
  }
  return layers_[0].end;
}

Status ModelCache::CheckLayer(int64_t layer) const {
  if (layer >= 0 && layer < layer_count()) return Ok();
  return MakeError(Code::kArgument, "layer", "must be 0 to " + Text(layer_count() - 1), Text(layer));
}

Status ModelCache::CheckInput(int64_t layer, const TensorView& keys, const TensorView& values) const {
  const LayerConfig& config = config_->layers[static_cast<size_t>(layer)];
  for (const bool value_side : {false, true}) {
    const TensorView& view = value_side ? values : keys;
    const char* argument = value_side ? "values" : "keys";
    const Shape want{1, config.heads, keys.shape.tokens, SideOf(config, value_side).width};
    if (!(view.shape == want) || want.tokens < 1) {
      return LayerError(MakeError(Code::kShape, argument, "must be [kv_heads, tokens, head_dim] with at least one token, " +
                                                              (want.tokens < 1 ? "[" + Text(want.heads) + ", tokens, " + Text(want.width) + "]"
                                                                               : Text(want)),
                                  Text(view.shape))
                            .Expected(Text(want)),
                        layer, SideName(value_side));
    }
    if (want.tokens > kMostTokens - layers_[static_cast<size_t>(layer)].end) {
      return LayerError(MakeError(Code::kLimit, argument, "token positions end at 2^53"), layer, SideName(value_side));
    }
    if (SideOf(config, value_side).options.non_finite != NonFinite::kError) continue;
    Status finite = CheckFinite(*instance_->backend, view, want.tokens, argument);
    if (!finite.ok()) return LayerError(std::move(finite.error()), layer, SideName(value_side));
  }
  return Ok();
}

// Whether the tokens fit the type of dense pages. Asked where pages of these or other layers might be encoded before any are stored:
// what is refused changes nothing.
Status ModelCache::CheckFits(int64_t index, const TensorView& keys, const TensorView& values) const {
  if (config_->hot == Type::f32) return Ok();  // holds what is finite
  const LayerConfig& config = config_->layers[static_cast<size_t>(index)];
  const int64_t size = ElementBytes(config_->hot);
  for (const bool value_side : {false, true}) {
    const TensorView& view = value_side ? values : keys;
    if (view.type == config_->hot || SideOf(config, value_side).options.non_finite != NonFinite::kError) continue;
    const int64_t width = view.shape.width, step = std::clamp<int64_t>(16384 / (config.heads * width), 1, view.shape.tokens);
    KVP_ASSIGN(Bytes scratch, Bytes::AllocateRaw(static_cast<uint64_t>(config.heads * step * width * size)));
    for (int64_t t = 0; t < view.shape.tokens; t += step) {
      Status fits = RoundRows(*instance_->backend, view, t, std::min(step, view.shape.tokens - t), config_->hot, NonFinite::kError,
                              value_side ? "values" : "keys", scratch.data(), step * width * size);
      if (!fits.ok()) return LayerError(std::move(fits.error()), index, "");
    }
  }
  return Ok();
}

Result<CachePage> ModelCache::NewPage(int64_t layer, int64_t start, bool kept) const {
  const LayerConfig& config = config_->layers[static_cast<size_t>(layer)];
  CachePage page;
  page.start = start;
  page.kept = kept;
  for (const bool value_side : {false, true}) {
    CacheSide& side = SideOf(page, value_side);
    const Shape shape{1, config.heads, kept ? config_->keep_first : config_->page_tokens, SideOf(config, value_side).width};
    KVP_ASSIGN(auto payload, store().NewDense(*instance_, config_->hot, shape));
    side.writable = payload.get();
    side.payload = std::move(payload);
  }
  return page;
}

Status ModelCache::MakeWritable(CachePage& page) const {
  for (const bool value_side : {false, true}) {
    CacheSide& side = SideOf(page, value_side);
    if (side.payload.use_count() == 1) continue;
    const Payload& old = *side.payload;
    KVP_ASSIGN(auto copy, store().NewDense(*instance_, old.dense_type, old.shape));
    KVP_TRY(store().CopyRows(old, page.length, *copy));
    side.writable = copy.get();
    side.payload = std::move(copy);
  }
  return Ok();
}

// Writes what Finish publishes; on failure the layer may have new pages, lengths and an end, which StoreAll takes back.
Status ModelCache::Store(int64_t index, const TensorView& keys, const TensorView& values) {
  CacheLayer& layer = layers_[static_cast<size_t>(index)];
  const LayerConfig& config = config_->layers[static_cast<size_t>(index)];
  PageStore& pages = store();
  for (int64_t done = 0; done < keys.shape.tokens;) {
    if (layer.pages.empty() || IsClosed(layer, layer.pages.size() - 1)) {
      KVP_ASSIGN(CachePage page, NewPage(index, layer.end, layer.end == 0 && config_->keep_first > 0));
      layer.pages.push_back(std::move(page));
    }
    CachePage& page = layer.pages.back();
    KVP_TRY(MakeWritable(page));
    const int64_t count = std::min(page.capacity() - page.length, keys.shape.tokens - done);
    KVP_TRY(pages.Write(*instance_, *page.key.writable, page.length, keys, done, count, config.key.options.non_finite, "keys"));
    KVP_TRY(pages.Write(*instance_, *page.value.writable, page.length, values, done, count, config.value.options.non_finite, "values"));
    page.length += count;
    layer.end += count;
    done += count;
  }
  return Ok();
}

// Tokens of layers from `first` on; all or nothing.
Status ModelCache::StoreAll(int64_t first, std::span<const TensorView> keys, std::span<const TensorView> values) {
  struct Before {
    size_t pages;
    int64_t length, end;
  };
  const auto layer_at = [&](size_t i) -> CacheLayer& { return layers_[static_cast<size_t>(first) + i]; };
  Before one;
  std::vector<Before> several;
  if (keys.size() > 1) several.resize(keys.size());
  Before* before = keys.size() > 1 ? several.data() : &one;
  Status status;
  size_t tried = 0;
  while (status.ok() && tried < keys.size()) {
    const CacheLayer& layer = layer_at(tried);
    before[tried] = {layer.pages.size(), layer.pages.empty() ? 0 : layer.pages.back().length, layer.end};
    const int64_t index = first + static_cast<int64_t>(tried);
    status = Store(index, keys[tried], values[tried]);
    if (!status.ok()) status.error() = LayerError(std::move(status.error()), index, "");
    ++tried;
  }
  if (status.ok()) status = store().Finish();
  if (status.ok()) return status;
  store().Forget();
  for (size_t i = 0; i < tried; ++i) {
    CacheLayer& layer = layer_at(i);
    layer.pages.resize(before[i].pages);
    if (!layer.pages.empty()) layer.pages.back().length = before[i].length;
    layer.end = before[i].end;
  }
  return status;
}

Status ModelCache::Append(int64_t layer, const TensorView& keys, const TensorView& values) {
  KVP_TRY(CheckLayer(layer));
  KVP_TRY(CheckInput(layer, keys, values));
  if (AnyDue(*config_, layers_[static_cast<size_t>(layer)])) KVP_TRY(CheckFits(layer, keys, values));
  KVP_TRY(FreezeLayers(layer, layer + 1, nullptr));
  return StoreAll(layer, {&keys, 1}, {&values, 1});
}

Status ModelCache::AppendAll(std::span<const TensorView> keys, std::span<const TensorView> values) {
  for (const auto* side : {&keys, &values}) {
    if (static_cast<int64_t>(side->size()) == layer_count()) continue;
    return MakeError(Code::kShape, side == &keys ? "keys" : "values", "needs one tensor per layer, " + Text(layer_count()),
                     Text(static_cast<int64_t>(side->size())));
  }
  for (int64_t i = 0; i < layer_count(); ++i) {
    const auto at = static_cast<size_t>(i);
    KVP_TRY(CheckInput(i, keys[at], values[at]));
    if (keys[at].shape.tokens != keys[0].shape.tokens) {
      return LayerError(MakeError(Code::kShape, "keys", "must have the " + Text(keys[0].shape.tokens) + " tokens of layer 0",
                                  Text(keys[at].shape.tokens)),
                        i, "key");
    }
  }
  const bool due = std::any_of(layers_.begin(), layers_.end(), [&](const CacheLayer& layer) { return AnyDue(*config_, layer); });
  for (int64_t i = 0; due && i < layer_count(); ++i) KVP_TRY(CheckFits(i, keys[static_cast<size_t>(i)], values[static_cast<size_t>(i)]));
  KVP_TRY(FreezeLayers(0, layer_count(), nullptr));
  return StoreAll(0, keys, values);
}

// ---- Freezing ----

Result<FreezeReport> ModelCache::Freeze(int64_t layer) {
  FreezeReport report;
  if (layer != -1) {
    KVP_TRY(CheckLayer(layer));
    KVP_TRY(FreezeLayers(layer, layer + 1, &report));
    return report;
  }
  KVP_TRY(FreezeLayers(0, layer_count(), &report));
  return report;
}

// f32 sum in token order of the first 64 tokens behind the kept ones, times 1/64, rounded to bf16. What is not finite
// counts as 0: a centre must be finite.
Status ModelCache::FindCenter(CacheLayer& layer, const LayerConfig& config) const {
  const int64_t width = config.key.width, row = config.heads * width;
  // Of a cache on a device, the device's copy is what the budget is charged with.
  const auto budget = instance_->device ? nullptr : instance_->budget;
  KVP_ASSIGN(Bytes center, Bytes::AllocateRaw(static_cast<uint64_t>(row) * 2, budget));
  KVP_ASSIGN(Bytes scratch, Bytes::Allocate(static_cast<uint64_t>(row) * (1 + kCenterTokens) * 4));
  float* sum = scratch.as<float>();
  float* rows = sum + row;
  int64_t left = kCenterTokens;
  for (const CachePage& page : layer.pages) {
    if (page.kept || left == 0) continue;
    const int64_t count = std::min(page.length, left);
    const ReadTask task{page.key.payload.get(), 0, count, rows};
    KVP_TRY(store().Read(instance_, {&task, 1}, width, row));
    for (int64_t i = 0; i < count * row; ++i) sum[i % row] += IsFinite(rows[i]) ? rows[i] : 0.0f;
    left -= count;
  }
  for (int64_t i = 0; i < row; ++i) {
    const uint16_t mean = ToBF16(sum[i] * (1.0f / kCenterTokens));
    center.as<uint16_t>()[i] = IsFinite(FromBF16(mean)) ? mean : uint16_t{0};
  }
  layer.center = std::move(center);
  return Ok();
}

// The sides of a layer's pages that are due, in the order in which they are encoded. Finds the layer's centre where they need it.
Status ModelCache::FindDue(int64_t index, std::vector<Due>& due) {
  CacheLayer& layer = layers_[static_cast<size_t>(index)];
  layer.settled = FirstUnsettled(layer);
  if (layer.settled == layer.pages.size() || !IsClosed(layer, layer.settled)) return Ok();
  const LayerConfig& config = config_->layers[static_cast<size_t>(index)];
  const bool needs_center = config.key.spec.center && layer.center.empty();
  if (needs_center && layer.end - FirstBehindKept(layer)->start < kCenterTokens) return Ok();

  std::vector<size_t> pages;
  std::vector<int64_t> ends;
  for (const bool value_side : {false, true}) {
    pages.clear();
    ends.clear();
    for (size_t i = layer.settled; i < layer.pages.size() && IsClosed(layer, i); ++i) {
      if (layer.pages[i].kept || SideOf(layer.pages[i], value_side).frozen) continue;
      pages.push_back(i);
      ends.push_back(layer.pages[i].end());
    }
    const int64_t count = DueCount(*config_, value_side, layer.end, ends);
    for (int64_t i = 0; i < count; ++i) due.push_back({index, pages[static_cast<size_t>(i)], value_side});
    if (!value_side && count > 0 && needs_center) KVP_TRY(FindCenter(layer, config));
  }
  return Ok();
}

Status ModelCache::FreezeLayers(int64_t first, int64_t end, FreezeReport* report) {
  std::vector<Due> due;
  for (int64_t i = first; i < end; ++i) KVP_TRY(FindDue(i, due));
  return due.empty() ? Ok() : EncodeAll(due, report);
}

Status ModelCache::EncodeAll(std::span<const Due> due, FreezeReport* report) {
  std::vector<EncodeTask> tasks(due.size());
  for (size_t i = 0; i < due.size(); ++i) {
    const CachePage& page = layers_[static_cast<size_t>(due[i].layer)].pages[due[i].page];
    const SideConfig& config = SideOf(config_->layers[static_cast<size_t>(due[i].layer)], due[i].value_side);
    tasks[i].page = &SideOf(page, due[i].value_side).payload;
    tasks[i].valid = page.length;
    tasks[i].spec = &config.spec;
    tasks[i].options = &config.options;
    if (config.spec.center) tasks[i].center = layers_[static_cast<size_t>(due[i].layer)].center;
    tasks[i].argument = due[i].value_side ? "values" : "keys";
  }
  for (size_t first = 0; first < due.size();) {
    auto count = store().Encode(instance_, std::span(tasks).subspan(first));
    if (!count.ok()) return LayerError(std::move(count.error()), due[first].layer, SideName(due[first].value_side));
    for (const size_t end = first + count.value(); first < end; ++first) {
      const Due& at = due[first];
      EncodeTask& task = tasks[first];
      CachePage& page = layers_[static_cast<size_t>(at.layer)].pages[at.page];
      CacheSide& side = SideOf(page, at.value_side);
      const Payload& dense = *side.payload;
      FreezeFigures figures;
      figures.pages = 1;
      // Of the valid rows, so that a page that was cut counts the same before and after a file.
      const Shape valid{1, dense.shape.heads, page.length, dense.shape.width};
      figures.bytes_before = static_cast<uint64_t>(valid.elements() * ElementBytes(dense.dense_type));
      figures.bytes_after = static_cast<uint64_t>(task.made->kind == PayloadKind::kDense
                                                      ? valid.elements() * ElementBytes(task.made->dense_type)
                                                      : SizesOf(task.made->spec, valid).total());
      figures.elements = task.loss.elements;
      figures.saturated = task.loss.saturated;
      figures.squared_error = task.loss.rmse * task.loss.rmse * static_cast<double>(task.loss.elements);
      figures.max_error = task.loss.max_error;
      if (report != nullptr) (at.value_side ? report->value : report->key).Add(figures);
      side.payload = std::move(task.made);
      side.writable = nullptr;
      side.frozen = true;
      side.figures = figures;
    }
  }
  return Ok();
}

// ---- Cutting ----

Status ModelCache::Truncate(int64_t n) {
  for (size_t i = 0; i < layers_.size(); ++i) {
    const CacheLayer& layer = layers_[i];
    const auto index = static_cast<int64_t>(i);
    if (n < 0 || n > layer.end) {
      return LayerError(MakeError(Code::kArgument, "tokens", "must be 0 to the " + Text(layer.end) + " tokens of the layer", Text(n)), index, "");
    }
    // A position within a gap of dropped tokens: what would follow it has no place.
    const size_t at = PageAt(layer, n);
    const int64_t held = at == 0 ? 0 : layer.pages[at - 1].end();
    const int64_t next = at == layer.pages.size() ? layer.end : layer.pages[at].start;
    if (n > held && n < next) {
      return LayerError(MakeError(Code::kArgument, "tokens", "tokens " + Text(held) + " to " + Text(next - 1) + " have been dropped", Text(n)),
                        index, "");
    }
  }
  for (CacheLayer& layer : layers_) {
    while (!layer.pages.empty() && layer.pages.back().start >= n) layer.pages.pop_back();
    if (!layer.pages.empty()) layer.pages.back().length = std::min(layer.pages.back().length, n - layer.pages.back().start);
    layer.end = n;
    layer.settled = 0;
    ++layer.cuts;
    bool centered = false;
    for (const CachePage& page : layer.pages) centered = centered || !page.key.payload->center.empty();
    if (!centered) layer.center = {};
  }
  return Ok();
}

Status ModelCache::DropBefore(int64_t n, int64_t layer) {
  if (layer != -1) KVP_TRY(CheckLayer(layer));
  const int64_t first = layer == -1 ? 0 : layer, last = layer == -1 ? layer_count() - 1 : layer;
  for (int64_t i = first; i <= last; ++i) {
    const int64_t end = layers_[static_cast<size_t>(i)].end;
    if (n < 0 || n > end) {
      return LayerError(MakeError(Code::kArgument, "tokens", "must be 0 to the " + Text(end) + " tokens of the layer", Text(n)), i, "");
    }
  }
  for (int64_t i = first; i <= last; ++i) {
    CacheLayer& at = layers_[static_cast<size_t>(i)];
    std::erase_if(at.pages, [&](const CachePage& page) { return !page.kept && page.end() <= n; });
    at.settled = 0;
    ++at.cuts;
  }
  return Ok();
}

Result<ModelCache> ModelCache::Slice(int64_t begin, int64_t end) const {
  if (begin < 0 || begin > end) {
    return MakeError(Code::kArgument, "start", "must be 0 to the end, " + Text(end), Text(begin));
  }
  for (size_t i = 0; i < layers_.size(); ++i) {
    const CacheLayer& layer = layers_[i];
    const size_t at = PageAt(layer, begin);
    if (begin == 0 || begin == layer.end || (at < layer.pages.size() && layer.pages[at].start == begin)) continue;
    const std::string nearest = at < layer.pages.size() ? "; the page there starts at " + Text(layer.pages[at].start) : "";
    return LayerError(MakeError(Code::kArgument, "start", "must be the start of a page" + nearest, Text(begin)), static_cast<int64_t>(i), "");
  }
  ModelCache cut = *this;
  KVP_TRY(cut.Truncate(end));
  for (CacheLayer& layer : cut.layers_) std::erase_if(layer.pages, [&](const CachePage& page) { return page.end() <= begin; });
  return cut;
}

// ---- Reading ----

Status ModelCache::CheckRead(int64_t index, int64_t begin, int64_t end) const {
  KVP_TRY(CheckLayer(index));
  const CacheLayer& layer = layers_[static_cast<size_t>(index)];
  if (begin < 0 || end < begin || end > layer.end) {
    return LayerError(MakeError(Code::kArgument, "start", "start and end must lie within 0 to " + Text(layer.end),
                                Text(begin) + " to " + Text(end)),
                      index, "");
  }
  const size_t first = PageAt(layer, begin);
  for (int64_t position = begin, at = static_cast<int64_t>(first); position < end; ++at) {
    const bool there = static_cast<size_t>(at) < layer.pages.size() && layer.pages[static_cast<size_t>(at)].start <= position;
    if (!there) {
      const int64_t next = static_cast<size_t>(at) < layer.pages.size() ? layer.pages[static_cast<size_t>(at)].start : layer.end;
      return LayerError(MakeError(Code::kArgument, "start", "tokens " + Text(position) + " to " + Text(next - 1) + " have been dropped",
                                  Text(begin) + " to " + Text(end)),
                        index, "");
    }
    position = layer.pages[static_cast<size_t>(at)].end();
  }
  return Ok();
}

Status ModelCache::Read(int64_t index, bool value_side, int64_t begin, int64_t end, float* out, int64_t head_stride,
                        int64_t token_stride) const {
  KVP_TRY(CheckRead(index, begin, end));
  const CacheLayer& layer = layers_[static_cast<size_t>(index)];
  std::vector<ReadTask> tasks;
  for (size_t at = PageAt(layer, begin); at < layer.pages.size() && layer.pages[at].start < end; ++at) {
    const CachePage& page = layer.pages[at];
    const int64_t from = std::max(begin, page.start), to = std::min(end, page.end());
    if (to <= from) continue;
    tasks.push_back({SideOf(page, value_side).payload.get(), from - page.start, to - page.start, out + (from - begin) * token_stride});
  }
  if (tasks.empty()) return Ok();
  Status status = store().Read(instance_, tasks, head_stride, token_stride);
  if (!status.ok()) status.error() = LayerError(std::move(status.error()), index, SideName(value_side));
  return status;
}

std::unique_ptr<PageTable>& ModelCache::table(int64_t layer) const {
  tables_.of_layers.resize(layers_.size());
  return tables_.of_layers[static_cast<size_t>(layer)];
}

Result<ModelCache> ModelCache::MoveTo(const InstanceRef& instance) const {
  if (instance->device == instance_->device) return Fork();
  ModelCache moved;
  moved.instance_ = OwnInstance(instance, instance_->budget->limit());
  moved.config_ = config_;
  moved.layers_ = layers_;
  for (CacheLayer& layer : moved.layers_) {
    // A centre goes along with its pages, so that what it is charged to does too.
    SharedBytes before, after;
    const auto move = [&](SharedBytes& center) -> Status {
      if (center.empty()) return Ok();
      if (!center.Same(before)) {
        const auto budget = moved.instance_->device ? nullptr : moved.instance_->budget;
        KVP_ASSIGN(Bytes copy, Bytes::Copy(center.data(), center.size(), budget));
        after = std::move(copy);
        before = center;
      }
      center = after;
      return Ok();
    };
    KVP_TRY(move(layer.center));
    for (CachePage& page : layer.pages) {
      for (const bool value_side : {false, true}) {
        CacheSide& side = SideOf(page, value_side);
        KVP_ASSIGN(const PayloadRef here, store().Download(side.payload, moved.instance_->budget));
        KVP_ASSIGN(side.payload, moved.store().Upload(here, moved.instance_->budget));
        auto* own = const_cast<Payload*>(side.payload.get());  // made just now, and nobody else holds it
        if (side.writable != nullptr) side.writable = own;
        KVP_TRY(move(own->center));
      }
    }
  }
  return moved;
}

Result<PagedCache> ModelCache::ToPaged(int64_t index) const {
  KVP_TRY(CheckLayer(index));
  PagedCache paged;
  int64_t start = 0;
  for (const CachePage& page : layers_[static_cast<size_t>(index)].pages) {
    Page view;
    view.start = start;
    view.length = page.length;
    start += page.length;
    for (const bool value_side : {false, true}) {
      KVP_ASSIGN(PayloadRef payload, store().Download(SideOf(page, value_side).payload, instance_->budget));
      if (payload->kind == PayloadKind::kDense && page.length < page.capacity()) {
        // Rows past the length hold anything here and zeros there.
        KVP_ASSIGN(auto clean, HostStore().NewDense(*instance_, payload->dense_type, payload->shape));
        KVP_TRY(HostStore().CopyRows(*payload, page.length, *clean));
        payload = std::move(clean);
      }
      (value_side ? view.value : view.key) = std::move(payload);
    }
    paged.pages.push_back(std::move(view));
  }
  return paged;
}

// ---- Taking over pages ----

Result<std::vector<CacheLayer>> LayersFromPaged(const ModelConfig& config, std::span<const PagedCache* const> sources) {
  if (sources.size() != config.layers.size()) {
    return MakeError(Code::kShape, "layers", "needs one paged cache per layer, " + Text(static_cast<int64_t>(config.layers.size())),
                     Text(static_cast<int64_t>(sources.size())));
  }
  std::vector<CacheLayer> layers(sources.size());
  for (size_t i = 0; i < sources.size(); ++i) {
    Status valid = Validate(*sources[i]);
    if (!valid.ok()) return LayerError(std::move(valid.error()), static_cast<int64_t>(i), "");
    CacheLayer& layer = layers[i];
    for (const Page& source : sources[i]->pages) {
      CachePage page;
      page.start = source.start;
      page.length = source.length;
      const bool dense = source.key->kind == PayloadKind::kDense && source.value->kind == PayloadKind::kDense;
      const bool alone = sources[i]->pages.size() == 1 && source.length < config.keep_first;
      page.kept = dense && page.start == 0 && config.keep_first > 0 && (page.length == config.keep_first || alone);
      page.key.payload = source.key;
      page.value.payload = source.value;
      page.key.frozen = source.key->kind != PayloadKind::kDense;
      page.value.frozen = source.value->kind != PayloadKind::kDense;
      if (layer.center.empty() && config.layers[i].key.spec.center) layer.center = source.key->center;
      layer.end = page.end();
      layer.pages.push_back(std::move(page));
    }
  }
  return layers;
}

namespace {

Status CheckPages(const ModelConfig& config, int64_t index, const CacheLayer& layer) {
  const LayerConfig& shape = config.layers[static_cast<size_t>(index)];
  int64_t position = 0;
  for (size_t i = 0; i < layer.pages.size(); ++i) {
    const CachePage& page = layer.pages[i];
    const auto refuse = [&](Code code, const char* side, std::string rule, std::string got) {
      Error error = LayerError(MakeError(code, "page " + Text(static_cast<int64_t>(i)), std::move(rule), std::move(got)), index, side);
      error.argument = "layers";
      error.page = static_cast<int64_t>(i);
      return error;
    };
    if (page.key.payload == nullptr || page.value.payload == nullptr) return refuse(Code::kShape, "", "payload is missing", "");
    const bool gap_allowed = i == 0 ? !page.kept : layer.pages[i - 1].kept;
    if (page.start < position || (page.start > position && !gap_allowed)) {
      return refuse(Code::kShape, "", "must start at " + Text(position), Text(page.start));
    }
    if (page.kept && (page.start != 0 || page.length > config.keep_first || page.key.frozen || page.value.frozen)) {
      return refuse(Code::kShape, "", "a kept page is dense and holds the first " + Text(config.keep_first) + " tokens at most", Text(page.length));
    }
    for (const bool value_side : {false, true}) {
      const CacheSide& side = SideOf(page, value_side);
      const Shape& have = side.payload->shape;
      const Shape want{1, shape.heads, page.capacity(), SideOf(shape, value_side).width};
      if (side.payload->kind == PayloadKind::kOpaque) {
        return refuse(Code::kUnsupported, SideName(value_side), "an encoding that this version does not know cannot be attended to",
                      side.payload->opaque_name);
      }
      if (!(have == want)) {
        Error error = refuse(Code::kMismatch, SideName(value_side), "must be " + Text(want), Text(have));
        error.expected = Text(want);
        return error;
      }
      if (side.payload->kind == PayloadKind::kEncoded && !side.frozen) {
        return refuse(Code::kCorrupt, SideName(value_side), "is encoded but not marked so", "");
      }
      if (side.payload->kind == PayloadKind::kEncoded && !side.payload->affine && side.payload->spec.center &&
          side.payload->center.size() != static_cast<uint64_t>(have.heads * have.width) * 2) {
        return refuse(Code::kCorrupt, SideName(value_side), "has no centre", "");
      }
    }
    if (page.length < 1 || page.length > page.capacity() || page.length > kMostTokens - page.start) {
      return refuse(Code::kShape, "", "length must be 1 to the capacity " + Text(page.capacity()), Text(page.length));
    }
    position = page.end();
  }
  const bool tail_dropped = layer.pages.empty() || layer.pages.back().kept;
  if (layer.end < position || layer.end > kMostTokens || (layer.end > position && !tail_dropped)) {
    return LayerError(MakeError(Code::kShape, "layers", "pages must end at token " + Text(layer.end), Text(position)), index, "");
  }
  if (!layer.center.empty() && layer.center.size() != static_cast<uint64_t>(shape.heads * shape.key.width) * 2) {
    return LayerError(MakeError(Code::kShape, "layers", "centre must hold " + Text(shape.heads * shape.key.width * 2) + " bytes",
                                Text(static_cast<int64_t>(layer.center.size()))),
                      index, "key");
  }
  for (uint64_t i = 0; i < layer.center.size() / 2; ++i) {
    if (!IsFinite(FromBF16(layer.center.as<uint16_t>()[i]))) {
      return LayerError(MakeError(Code::kNonFinite, "layers", "centre must be finite"), index, "key");
    }
  }
  return Ok();
}

}  // namespace

Result<ModelCache> ModelCache::Assemble(InstanceRef own, ModelConfig config, std::vector<CacheLayer> layers) {
  KVP_ASSIGN(ModelCache cache, Create(own, std::move(config), 0));
  cache.instance_ = std::move(own);
  const ModelConfig& resolved = *cache.config_;
  if (layers.size() != resolved.layers.size()) {
    return MakeError(Code::kShape, "layers", "must be " + Text(cache.layer_count()), Text(static_cast<int64_t>(layers.size())));
  }
  for (size_t i = 0; i < layers.size(); ++i) KVP_TRY(CheckPages(resolved, static_cast<int64_t>(i), layers[i]));
  for (size_t i = 0; i < layers.size(); ++i) {
    const auto index = static_cast<int64_t>(i);
    for (CachePage& page : layers[i].pages) {
      KVP_ASSIGN(page.key.payload, cache.store().Upload(page.key.payload, cache.instance_->budget));
      KVP_ASSIGN(page.value.payload, cache.store().Upload(page.value.payload, cache.instance_->budget));
    }
    for (size_t at = 0; at < layers[i].pages.size(); ++at) {
      CachePage& page = layers[i].pages[at];
      const int64_t room = page.kept ? resolved.keep_first : resolved.page_tokens;
      const bool last = at + 1 == layers[i].pages.size() && page.end() == layers[i].end;
      bool hot = (page.length == room && page.capacity() == room) || (last && page.length < room);
      for (const CacheSide* side : {&page.key, &page.value}) {
        hot = hot && !side->frozen && side->payload->kind == PayloadKind::kDense && side->payload->dense_type == resolved.hot;
      }
      if (!hot) continue;
      if (page.capacity() != room) {
        KVP_ASSIGN(CachePage wide, cache.NewPage(index, page.start, page.kept));
        wide.length = page.length;
        KVP_TRY(cache.store().CopyRows(*page.key.payload, page.length, *wide.key.writable));
        KVP_TRY(cache.store().CopyRows(*page.value.payload, page.length, *wide.value.writable));
        page = std::move(wide);
        continue;
      }
      // Written only while nobody else holds them, as every hot page.
      page.key.writable = const_cast<Payload*>(page.key.payload.get());
      page.value.writable = const_cast<Payload*>(page.value.payload.get());
    }
  }
  cache.layers_ = std::move(layers);
  return cache;
}

// ---- Sizes ----

namespace {

// Bytes of an encoded side, by kind. Dense specs count as codes.
void CountSide(CacheStats& stats, const Payload& payload, uint64_t* own) {
  *own = 0;
  if (payload.kind == PayloadKind::kDense) {
    stats.code_bytes += payload.data_bytes();
    *own = payload.data_bytes();
    return;
  }
  const uint64_t global = payload.global_bytes();
  stats.code_bytes += payload.code_bytes();
  stats.scale_bytes += payload.scale_bytes();
  stats.zero_bytes += payload.zero_bytes();
  stats.global_bytes += global;
  *own = payload.code_bytes() + payload.scale_bytes() + payload.zero_bytes() + global;
}

struct BitCount {
  uint64_t bytes[2] = {0, 0};
  int64_t elements[2] = {0, 0};
  int64_t dense_elements = 0;
};

void FinishBits(CacheStats& stats, const BitCount& count) {
  double bits[2];
  for (int side = 0; side < 2; ++side) {
    const uint64_t bytes = count.bytes[side] + (side == 0 ? stats.center_bytes : 0);
    bits[side] = count.elements[side] > 0 ? 8.0 * static_cast<double>(bytes) / static_cast<double>(count.elements[side]) : 0;
  }
  stats.key_bits = bits[0];
  stats.value_bits = bits[1];
  const int sides = (count.elements[0] > 0) + (count.elements[1] > 0);
  stats.bits = sides > 0 ? (bits[0] + bits[1]) / sides : 0;
  const int64_t all = count.elements[0] + count.elements[1] + count.dense_elements;
  stats.overall_bits = all > 0 ? 8.0 * static_cast<double>(stats.bytes()) / static_cast<double>(all) : 0;
}

}  // namespace

CacheStats ModelCache::Stats() const {
  CacheStats stats;
  BitCount count;
  stats.tokens = tokens();
  for (const CacheLayer& layer : layers_) {
    stats.center_bytes += layer.center.size();
    for (const CachePage& page : layer.pages) {
      ++(page.kept ? stats.kept_pages : page.key.frozen && page.value.frozen ? stats.frozen_pages : stats.hot_pages);
      bool shared = false;
      for (const bool value_side : {false, true}) {
        const CacheSide& side = SideOf(page, value_side);
        const int64_t elements = side.payload->shape.heads * page.length * side.payload->shape.width;
        uint64_t own = side.payload->data_bytes();
        if (side.frozen) {
          CountSide(stats, *side.payload, &own);
          count.bytes[value_side] += own;
          count.elements[value_side] += elements;
          (value_side ? stats.frozen.value : stats.frozen.key).Add(side.figures);
        } else {
          (page.kept ? stats.kept_bytes : stats.hot_bytes) += own;
          count.dense_elements += elements;
        }
        if (side.payload.use_count() > 1) {
          shared = true;
          stats.shared_bytes += own;
        }
      }
      stats.shared_pages += shared;
    }
  }
  FinishBits(stats, count);
  return stats;
}

CacheStats EstimateBytes(const ModelConfig& config, int64_t tokens) {
  CacheStats stats;
  BitCount count;
  stats.tokens = tokens;
  const int64_t kept = std::min(tokens, config.keep_first), behind = tokens - kept;
  const int64_t full = behind / config.page_tokens, rest = behind % config.page_tokens;
  for (const LayerConfig& layer : config.layers) {
    const bool wait = layer.key.spec.center && behind < kCenterTokens;
    int64_t frozen[2];
    for (const bool value_side : {false, true}) {
      const SideConfig& side = SideOf(layer, value_side);
      const Shape shape{1, layer.heads, config.page_tokens, side.width};
      const int64_t old = std::max<int64_t>(0, behind - Behind(config, value_side)) / config.page_tokens;
      frozen[value_side] = wait ? 0 : WholeGroups(config, value_side, old);
      const int64_t row = layer.heads * side.width * ElementBytes(config.hot), pages = frozen[value_side];
      const int64_t dense_pages = full - pages + (rest > 0);
      stats.kept_bytes += static_cast<uint64_t>((kept > 0 ? config.keep_first : 0) * row);
      stats.hot_bytes += static_cast<uint64_t>(dense_pages * config.page_tokens * row);
      count.dense_elements += (tokens - pages * config.page_tokens) * layer.heads * side.width;
      count.elements[value_side] += pages * shape.elements();
      uint64_t own;
      if (Info(side.spec.type).family == Family::kDense) {
        own = static_cast<uint64_t>(pages * shape.elements() * ElementBytes(side.spec.type));
        stats.code_bytes += own;
      } else {
        const ArraySizes sizes = SizesOf(side.spec, shape);
        own = static_cast<uint64_t>(pages * sizes.total());
        stats.code_bytes += static_cast<uint64_t>(pages * sizes.codes);
        stats.scale_bytes += static_cast<uint64_t>(pages * sizes.scales);
        stats.zero_bytes += static_cast<uint64_t>(pages * sizes.zeros);
        stats.global_bytes += static_cast<uint64_t>(pages * sizes.global());
      }
      count.bytes[value_side] += own;
    }
    stats.kept_pages += kept > 0;
    stats.frozen_pages += std::min(frozen[0], frozen[1]);
    stats.hot_pages += full + (rest > 0) - std::min(frozen[0], frozen[1]);
    if (layer.key.spec.center && frozen[0] > 0) stats.center_bytes += static_cast<uint64_t>(layer.heads * layer.key.width) * 2;
  }
  FinishBits(stats, count);
  return stats;
}

Result<PayloadRef> CutPayload(const InstanceRef& instance, const Payload& payload, int64_t tokens) {
  const Shape& old = payload.shape;
  const Shape shape{old.batch, old.heads, tokens, old.width};
  if (payload.kind == PayloadKind::kDense) {
    KVP_ASSIGN(auto made, HostStore().NewDense(*instance, payload.dense_type, shape));
    KVP_TRY(HostStore().CopyRows(payload, tokens, *made));
    return PayloadRef(std::move(made));
  }
  auto made = WithoutArrays(payload);
  made->shape = shape;
  made->grid = payload.affine ? AffineGrid(shape, payload.axis, payload.block) : ScaleGrid(payload.spec, shape);
  const int64_t code_bytes = SizesOf(payload.spec, shape).codes;
  KVP_ASSIGN(made->codes, Bytes::Allocate(static_cast<uint64_t>(code_bytes), instance->budget));
  if (payload.grid.count == 0) {
    // Whole blocks with their scales inside: rows are bytes.
    const int64_t row = code_bytes / shape.rows();
    for (int64_t h = 0; h < shape.heads; ++h) {
      std::memcpy(made->codes.data() + h * tokens * row, payload.codes.data() + h * old.tokens * row, static_cast<size_t>(tokens * row));
    }
    return PayloadRef(std::move(made));
  }
  const int64_t bits = Info(payload.spec.type).bits, run = tokens * old.width * bits;  // a head's rows, in bits
  const uint8_t* from = payload.codes.data();
  uint8_t* to = made->codes.data();
  for (int64_t h = 0; h < shape.heads; ++h) {
    const int64_t source = h * old.tokens * old.width * bits, target = h * run;
    if (source % 8 == 0 && target % 8 == 0 && run % 8 == 0) {
      std::memcpy(to + target / 8, from + source / 8, static_cast<size_t>(run / 8));
      continue;
    }
    for (int64_t i = 0; i < run; ++i) {
      const int bit = from[(source + i) / 8] >> ((source + i) % 8) & 1;
      to[(target + i) / 8] = static_cast<uint8_t>(to[(target + i) / 8] | bit << ((target + i) % 8));
    }
  }
  const struct {
    const Bytes& from;
    Bytes& to;
  } arrays[] = {{payload.scales, made->scales}, {payload.zeros, made->zeros}};
  for (const auto& array : arrays) {
    const auto size = static_cast<int64_t>(array.from.size()) / payload.grid.count;
    if (size == 0) continue;
    KVP_ASSIGN(array.to, Bytes::Allocate(static_cast<uint64_t>(made->grid.count * size), instance->budget));
    for (int64_t h = 0; h < shape.heads; ++h) {
      for (int64_t t = 0; t < tokens; ++t) {
        for (int64_t d = 0; d < shape.width; ++d) {
          std::memcpy(array.to.data() + made->grid.Index(0, h, t, d) * size, array.from.data() + payload.grid.Index(0, h, t, d) * size,
                      static_cast<size_t>(size));
        }
      }
    }
  }
  if (made->affine && made->has_zeros && made->grid.count == 1 && payload.grid.count != 1) {
    made->zero_byte = static_cast<uint8_t>(made->zeros.data()[0] & ((1u << bits) - 1));
  }
  return PayloadRef(std::move(made));
}

}  // namespace kvpages
