// SPDX-License-Identifier: Apache-2.0
#include "attention/attend.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "attention/coded.h"
#include "attention/kernels.h"
#include "formats/hadamard.h"

namespace kvpages {
namespace {

constexpr int64_t kTileTokens = 64;     // decoded at once
constexpr int64_t kChunkTokens = 256;   // one step of the online softmax
constexpr int64_t kScoreFloats = 1 << 16;  // scores of a chunk held at once, which bounds the queries of a block

// Tokens [begin, end) of a page, counted within the page.
struct Span {
  const CachePage* page;
  int64_t begin, end;
  int64_t offset;  // of its scores within the chunk
  int64_t count() const { return end - begin; }
  int64_t position() const { return page->start + begin; }
};

int64_t RunOf(const SideConfig& side) { return side.spec.hadamard ? HadamardLength(side.width, side.options.hadamard_run) : 0; }

class Attention {
 public:
  Attention(const ModelCache& cache, int64_t layer, const AttendOptions& options)
      : cache_(cache),
        layer_(cache.layer(layer)),
        config_(cache.config().layers[static_cast<size_t>(layer)]),
        options_(options),
        kernels_(AttentionKernelsFor(cache.instance()->backend->name)),
        window_(options.window.value_or(config_.window)) {}

  Status Run(const TensorView& queries, float* out, float* lse) {
    heads_ = queries.shape.heads;
    group_ = heads_ / config_.heads;
    const int64_t tokens = queries.shape.tokens;
    start_ = options_.query_start.value_or(layer_.end - tokens);
    // The run length with which this layer's pages are rotated; pages rotated otherwise are thawed whole.
    key_run_ = RunOf(config_.key);
    value_run_ = RunOf(config_.value);
    block_ = std::clamp<int64_t>(kScoreFloats / (heads_ * kChunkTokens), 1, tokens);
    KVP_TRY(Allocate());
    for (int64_t first = 0; first < tokens; first += block_) {
      const int64_t count = std::min(block_, tokens - first);
      LoadQueries(queries, first, count);
      KVP_TRY(RunBlock(first, count));
      Finish(first, count, tokens, out, lse);
    }
    return Ok();
  }

 private:
  Status Allocate() {
    const int64_t rows = heads_ * block_, widest = std::max(config_.key.width, config_.value.width);
    const int64_t sizes[] = {rows * config_.key.width,   rows * config_.key.width,   rows,
                             rows,                       rows,                       rows * config_.value.width,
                             rows * config_.value.width, rows * kChunkTokens,        config_.heads * kTileTokens * widest};
    float** const parts[] = {&query_, &rotated_, &centered_, &most_, &sum_, &plain_, &turned_, &scores_, &tile_};
    int64_t total = 0;
    for (const int64_t size : sizes) total += (size + 15) / 16 * 16;
    KVP_ASSIGN(memory_, Bytes::Allocate(static_cast<uint64_t>(total) * 4));
    float* next = memory_.as<float>();
    for (size_t i = 0; i < std::size(sizes); ++i) {
      *parts[i] = next;
      next += (sizes[i] + 15) / 16 * 16;
    }
    return Ok();
  }

  // Row of query i of head h within a block: h * count + i, so that the heads of a KV head lie together.
  void LoadQueries(const TensorView& queries, int64_t first, int64_t count) {
    const int64_t width = config_.key.width, size = Info(queries.type).bits / 8;
    const auto scale = static_cast<float>(options_.scale.value_or(1.0 / std::sqrt(static_cast<double>(width))));
    coded_.Forget();
    for (int64_t h = 0; h < heads_; ++h) {
      for (int64_t i = 0; i < count; ++i) {
        float* row = query_ + (h * count + i) * width;
        const uint8_t* from = static_cast<const uint8_t*>(queries.data) +
                              (h * queries.head_stride + (first + i) * queries.token_stride) * size;
        cache_.instance()->backend->widen(queries.type, from, row, width);
        kernels_.multiply(row, width, scale);
        if (key_run_ > 0) {
          float* turned = rotated_ + (h * count + i) * width;
          std::memcpy(turned, row, static_cast<size_t>(width) * 4);
          RotateRow(turned, width, key_run_);
        }
        if (!layer_.center.empty()) {
          const uint16_t* center = layer_.center.as<uint16_t>() + h / group_ * width;
          float dot = 0;
          for (int64_t d = 0; d < width; ++d) dot += row[d] * FromBF16(center[d]);
          centered_[h * count + i] = dot;
        }
        most_[h * count + i] = -INFINITY;
        sum_[h * count + i] = 0;
      }
    }
    std::memset(plain_, 0, static_cast<size_t>(heads_ * count * config_.value.width) * 4);
    std::memset(turned_, 0, static_cast<size_t>(heads_ * count * config_.value.width) * 4);
  }

  bool Visible(int64_t position, int64_t query) const {
    return position <= query && (window_ == 0 || query - position < window_ || position < options_.sinks);
  }

  Status RunBlock(int64_t first, int64_t count) {
    const int64_t first_query = start_ + first, last_query = first_query + count - 1;
    chunk_.clear();
    int64_t filled = 0;
    for (const CachePage& page : layer_.pages) {
      if (page.start > last_query) break;
      const bool behind = window_ != 0 && first_query - (page.end() - 1) >= window_;
      if (behind && page.start >= options_.sinks) continue;
      const int64_t end = std::min(page.length, last_query + 1 - page.start);
      for (int64_t begin = 0; begin < end;) {
        const int64_t take = std::min({end - begin, kTileTokens, kChunkTokens - filled});
        chunk_.push_back({&page, begin, begin + take, filled});
        filled += take;
        begin += take;
        if (filled < kChunkTokens) continue;
        KVP_TRY(RunChunk(first_query, count, filled));
        chunk_.clear();
        filled = 0;
      }
    }
    return filled > 0 ? RunChunk(first_query, count, filled) : Ok();
  }

  Status RunChunk(int64_t first_query, int64_t count, int64_t filled) {
    const int64_t group_rows = group_ * count;
    for (size_t i = 0; i < chunk_.size(); ++i) {
      const Span& span = chunk_[i];
      FetchAhead(PayloadAfter(i, 1, false), PayloadAfter(i, 2, false));
      KVP_TRY(Scores(span, count));
      if (options_.softcap > 0) {
        const auto cap = static_cast<float>(options_.softcap);
        for (int64_t row = 0; row < heads_ * count; ++row) {
          float* scores = scores_ + row * kChunkTokens + span.offset;
          for (int64_t t = 0; t < span.count(); ++t) scores[t] = cap * std::tanh(scores[t] / cap);
        }
      }
      const bool all = span.position() + span.count() - 1 <= first_query &&
                       (window_ == 0 || first_query + count - 1 - span.position() < window_);
      for (int64_t row = 0; !all && row < heads_ * count; ++row) {
        float* scores = scores_ + row * kChunkTokens + span.offset;
        for (int64_t t = 0; t < span.count(); ++t) {
          if (!Visible(span.position() + t, first_query + row % count)) scores[t] = -INFINITY;
        }
      }
    }
    for (int64_t row = 0; row < heads_ * count; ++row) {
      float* scores = scores_ + row * kChunkTokens;
      const float largest = kernels_.largest(scores, filled);
      const float most = largest > most_[row] || largest != largest ? largest : most_[row];
      if (most == -INFINITY) {
        std::memset(scores, 0, static_cast<size_t>(filled) * 4);
        continue;
      }
      if (!(most <= most_[row])) {
        const float factor = std::exp(most_[row] - most);
        sum_[row] *= factor;
        kernels_.multiply(plain_ + row * config_.value.width, config_.value.width, factor);
        if (value_run_ > 0) kernels_.multiply(turned_ + row * config_.value.width, config_.value.width, factor);
        most_[row] = most;
      }
      sum_[row] += kernels_.exponentials(scores, filled, most);
    }
    for (size_t i = 0; i < chunk_.size(); ++i) {
      const Span& span = chunk_[i];
      FetchAhead(PayloadAfter(i, 1, true), PayloadAfter(i, 2, true));
      const Payload& payload = *span.page->value.payload;
      const bool turned = value_run_ > 0 && payload.hadamard == value_run_ && payload.center.empty();
      int64_t stride;
      KVP_ASSIGN(const float* rows, Rows(payload, span, turned, &stride));
      float* sums = turned ? turned_ : plain_;
      for (int64_t h = 0; h < config_.heads; ++h) {
        kernels_.mix(scores_ + h * group_rows * kChunkTokens + span.offset, group_rows, kChunkTokens, rows + h * stride, span.count(),
                     config_.value.width, sums + h * group_rows * config_.value.width);
      }
    }
    return Ok();
  }

  const Payload* PayloadAfter(size_t span, size_t ahead, bool value_side) const {
    if (span + ahead >= chunk_.size()) return nullptr;
    const CachePage& page = *chunk_[span + ahead].page;
    return (value_side ? page.value : page.key).payload.get();
  }

  // Rows of all heads in f32, head by head `*stride` elements apart: of a dense f32 page in place, else decoded.
  Result<const float*> Rows(const Payload& payload, const Span& span, bool folded, int64_t* stride) {
    const int64_t width = payload.shape.width;
    if (payload.kind == PayloadKind::kDense && payload.dense_type == Type::f32) {
      *stride = payload.shape.tokens * width;
      return payload.data.as<float>() + span.begin * width;
    }
    *stride = span.count() * width;
    if (payload.kind == PayloadKind::kDense || !folded) {
      KVP_TRY(Decode(cache_.instance(), payload, span.begin, span.end, tile_, 0, *stride, width));
      return tile_;
    }
    // Without back-rotation and centre: those are folded into the query or into the sums.
    DequantizeJob job;
    job.spec = payload.spec;
    job.spec.hadamard = false;
    job.spec.center = false;
    job.shape = payload.shape;
    job.grid = payload.grid;
    job.codes = payload.codes.data();
    job.scales = payload.scales.data();
    job.zeros = payload.has_zeros ? payload.zeros.data() : nullptr;
    job.global = payload.global;
    job.begin = span.begin;
    job.end = span.end;
    job.out = tile_;
    job.head_stride = *stride;
    job.token_stride = width;
    cache_.instance()->backend->dequantize(job);
    return tile_;
  }

  Status Scores(const Span& span, int64_t count) {
    const Payload& payload = *span.page->key.payload;
    const int64_t width = config_.key.width, group_rows = group_ * count;
    const bool turned = payload.hadamard > 0 && payload.hadamard == key_run_;
    const bool center = !payload.center.empty() && payload.center.Same(layer_.center);
    // A page that is rotated or centred unlike its layer is thawed, and meets the plain query.
    const bool folded = (payload.hadamard == 0 || turned) && (payload.center.empty() || center);
    const float* queries = folded && turned ? rotated_ : query_;
    const auto at = [&](int64_t h) { return scores_ + h * group_rows * kChunkTokens + span.offset; };
    bool done = false;
    if (folded && kernels_.coded_dots != nullptr && payload.kind == PayloadKind::kEncoded) {
      for (int64_t h = 0; h < config_.heads; ++h) {
        done = coded_.Dots(kernels_, payload, h, span.begin, span.end, queries + h * group_rows * width, group_rows, at(h), kChunkTokens);
        if (!done) break;  // the first head says it for all
      }
    }
    if (!done) {
      int64_t stride;
      KVP_ASSIGN(const float* rows, Rows(payload, span, folded, &stride));
      for (int64_t h = 0; h < config_.heads; ++h) {
        kernels_.dots(queries + h * group_rows * width, group_rows, rows + h * stride, span.count(), width, at(h), kChunkTokens);
      }
    }
    if (folded && center) {
      for (int64_t row = 0; row < heads_ * count; ++row) {
        float* scores = scores_ + row * kChunkTokens + span.offset;
        for (int64_t t = 0; t < span.count(); ++t) scores[t] += centered_[row];
      }
    }
    return Ok();
  }

  void Finish(int64_t first, int64_t count, int64_t tokens, float* out, float* lse) {
    const int64_t width = config_.value.width;
    for (int64_t row = 0; row < heads_ * count; ++row) {
      const int64_t h = row / count, to = h * tokens + first + row % count;
      float factor = 1;
      if (!options_.sink_logits.empty()) {
        const float sink = options_.sink_logits[static_cast<size_t>(h)], most = std::max(most_[row], sink);
        if (most > -INFINITY) {
          factor = std::exp(most_[row] - most);
          sum_[row] = sum_[row] * factor + std::exp(sink - most);
          most_[row] = most;
        }
      }
      float* sums = plain_ + row * width;
      if (value_run_ > 0) {
        float* turned = turned_ + row * width;
        RotateRow(turned, width, value_run_);
        for (int64_t d = 0; d < width; ++d) sums[d] += turned[d];
      }
      for (int64_t d = 0; d < width; ++d) out[to * width + d] = sum_[row] == 0 ? 0.0f : sums[d] * factor / sum_[row];
      if (lse != nullptr) lse[to] = sum_[row] == 0 ? -INFINITY : most_[row] + std::log(sum_[row]);
    }
  }

  const ModelCache& cache_;
  const CacheLayer& layer_;
  const LayerConfig& config_;
  const AttendOptions& options_;
  const AttentionKernels& kernels_;
  CodedKeys coded_;
  int64_t window_, heads_ = 0, group_ = 0, start_ = 0, key_run_ = 0, value_run_ = 0, block_ = 0;
  std::vector<Span> chunk_;
  Bytes memory_;
  float* query_ = nullptr;     // scaled
  float* rotated_ = nullptr;   // scaled and rotated
  float* centered_ = nullptr;  // product with the layer's centre
  float* most_ = nullptr;      // largest score so far
  float* sum_ = nullptr;       // of exp(score - most)
  float* plain_ = nullptr;     // sums of values
  float* turned_ = nullptr;    // sums of rotated values
  float* scores_ = nullptr;    // [rows][kChunkTokens]
  float* tile_ = nullptr;
};

Status Check(const ModelCache& cache, int64_t layer, const TensorView& queries, const AttendOptions& options) {
  if (layer < 0 || layer >= cache.layer_count()) {
    return MakeError(Code::kArgument, "layer", "must be 0 to " + Text(cache.layer_count() - 1), Text(layer));
  }
  const LayerConfig& config = cache.config().layers[static_cast<size_t>(layer)];
  const auto refuse = [&](Code code, const char* argument, std::string rule, std::string got) {
    Error error = MakeError(code, argument, std::move(rule), std::move(got));
    error.message = "layer " + Text(layer) + ": " + error.message;
    error.layer = layer;
    return error;
  };
  for (int64_t i = 0; i < layer; ++i) {
    if (cache.layer(i).end == cache.layer(layer).end) continue;
    return refuse(Code::kMismatch, "cache", "must have the " + Text(cache.layer(i).end) + " tokens of layer " + Text(i),
                  Text(cache.layer(layer).end));
  }
  const Shape& shape = queries.shape;
  if (shape.batch != 1 || shape.heads < 1 || shape.heads % config.heads != 0 || shape.tokens < 1 || shape.width != config.key.width) {
    return refuse(Code::kShape, "queries",
                  "must be [heads, tokens, head_dim] with heads a multiple of " + Text(config.heads) + " and head_dim " +
                      Text(config.key.width),
                  Text(shape));
  }
  // Both are f32 where they are used.
  if (options.scale && !std::isfinite(static_cast<float>(*options.scale))) {
    return refuse(Code::kArgument, "scale", "must be finite in f32", Text(*options.scale));
  }
  if (!std::isfinite(options.softcap) || options.softcap < 0) {
    return refuse(Code::kArgument, "softcap", "must be finite and >= 0", Text(options.softcap));
  }
  const auto cap = static_cast<float>(options.softcap);
  if (options.softcap > 0 && !std::isnormal(cap)) {
    return refuse(Code::kArgument, "softcap", "must be 0 or a normal number of f32", Text(options.softcap));
  }
  if (options.window.value_or(0) < 0) return refuse(Code::kArgument, "window", "must not be negative", Text(*options.window));
  if (options.sinks < 0) return refuse(Code::kArgument, "sinks", "must not be negative", Text(options.sinks));
  if (!options.sink_logits.empty() && static_cast<int64_t>(options.sink_logits.size()) != shape.heads) {
    return refuse(Code::kShape, "sinkLogits", "must be one per query head, " + Text(shape.heads),
                  Text(static_cast<int64_t>(options.sink_logits.size())));
  }
  for (const float logit : options.sink_logits) {
    if (!(logit < INFINITY)) return refuse(Code::kNonFinite, "sinkLogits", "must be below infinity", Text(static_cast<double>(logit)));
  }
  const int64_t start = options.query_start.value_or(cache.layer(layer).end - shape.tokens);
  if (start < 0 || start > (int64_t{1} << 53)) {
    return refuse(Code::kArgument, "queryStart", options.query_start ? "must not be negative" : "there are fewer tokens than queries", Text(start));
  }
  return CheckFinite(*cache.instance()->backend, queries, shape.tokens, "queries");
}

// Whether a layer of two caches can go in one call of a device.
bool Alike(const AttendTask& a, const AttendTask& b, int64_t layer) {
  const LayerConfig& x = a.cache->config().layers[static_cast<size_t>(layer)];
  const LayerConfig& y = b.cache->config().layers[static_cast<size_t>(layer)];
  return a.cache->instance()->device == b.cache->instance()->device && a.queries.shape == b.queries.shape &&
         a.queries.type == b.queries.type && x.heads == y.heads && x.window == y.window && x.key.width == y.key.width &&
         x.value.width == y.value.width && RunOf(x.key) == RunOf(y.key) && RunOf(x.value) == RunOf(y.value);
}

Status AttendOnDevice(std::span<const AttendTask* const> tasks, int64_t layer, const AttendOptions& options) {
  const AttendTask& first = *tasks[0];
  const LayerConfig& config = first.cache->config().layers[static_cast<size_t>(layer)];
  DeviceAttend call;
  call.config = &config;
  call.heads = first.queries.shape.heads;
  call.tokens = first.queries.shape.tokens;
  call.query_type = first.queries.type;
  call.scale = static_cast<float>(options.scale.value_or(1.0 / std::sqrt(static_cast<double>(config.key.width))));
  call.softcap = static_cast<float>(options.softcap);
  call.window = options.window.value_or(config.window);
  call.sinks = options.sinks;
  call.key_run = RunOf(config.key);
  call.value_run = RunOf(config.value);
  call.sink_logits = options.sink_logits;
  std::vector<DeviceSequence> sequences;
  for (const AttendTask* task : tasks) {
    const CacheLayer& held = task->cache->layer(layer);
    DeviceSequence sequence;
    sequence.layer = &held;
    sequence.table = &task->cache->table(layer);
    sequence.budget = &task->cache->instance()->budget;
    sequence.queries = task->queries.data;
    sequence.head_stride = task->queries.head_stride;
    sequence.token_stride = task->queries.token_stride;
    sequence.start = options.query_start.value_or(held.end - call.tokens);
    sequence.out = task->out;
    sequence.lse = task->lse;
    sequences.push_back(sequence);
  }
  return first.cache->instance()->device->Attend(call, sequences);
}

}  // namespace

Status Attend(const ModelCache& cache, int64_t layer, const TensorView& queries, const AttendOptions& options, float* out,
              float* lse) {
  KVP_TRY(Check(cache, layer, queries, options));
  if (!cache.instance()->device) return Attention(cache, layer, options).Run(queries, out, lse);
  const AttendTask task{&cache, queries, out, lse};
  const AttendTask* tasks[] = {&task};
  return AttendOnDevice(tasks, layer, options);
}

Status AttendAll(std::span<const AttendTask> tasks, int64_t layer, const AttendOptions& options) {
  const auto of = [](size_t index, Error error) {
    error.message = "cache " + Text(static_cast<int64_t>(index)) + ": " + error.message;
    return error;
  };
  for (size_t i = 0; i < tasks.size(); ++i) {
    Status status = Check(*tasks[i].cache, layer, tasks[i].queries, options);
    if (!status.ok()) return of(i, std::move(status.error()));
  }
  std::vector<bool> done(tasks.size());
  std::vector<const AttendTask*> together;
  for (size_t i = 0; i < tasks.size(); ++i) {
    if (done[i]) continue;
    Status status;
    if (!tasks[i].cache->instance()->device) {
      status = Attention(*tasks[i].cache, layer, options).Run(tasks[i].queries, tasks[i].out, tasks[i].lse);
    } else {
      together.clear();
      for (size_t j = i; j < tasks.size(); ++j) {
        if (done[j] || !Alike(tasks[i], tasks[j], layer)) continue;
        together.push_back(&tasks[j]);
        done[j] = true;
      }
      status = AttendOnDevice(together, layer, options);
    }
    if (!status.ok()) return of(i, std::move(status.error()));
  }
  return Ok();
}

}  // namespace kvpages
