// SPDX-License-Identifier: Apache-2.0
// A model's cache: per layer the pages of one sequence, appended to token by token, each page encoded once when it is
// full. Copying a cache shares its pages; a page that two caches hold is copied before one of them writes to it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/convert.h"
#include "core/instance.h"
#include "core/page.h"
#include "core/page_store.h"

namespace kvpages {

// How one side (keys or values) of a layer is encoded.
struct SideConfig {
  Spec spec;
  SpecOptions options;
  int64_t width = 0;  // head_dim
};
struct LayerConfig {
  int64_t heads = 0;  // KV heads
  SideConfig key, value;
  int64_t window = 0;  // attend's default window in tokens; 0: none
};
struct ModelConfig {
  std::vector<LayerConfig> layers;
  int64_t page_tokens = 0;  // 0: 16, or the longest block along tokens where that is more
  int64_t keep_first = 4;   // tokens of the kept page, always dense
  int64_t keep_recent = 0;  // a page is encoded when its last token is at least this far behind the end
  int64_t residual = 0;     // KIVI's R, a multiple of page_tokens: keys R tokens at a time, values when older than R; 0: off
  Type hot = Type::bf16;    // of dense pages
};
// Checks a configuration and resolves its specs (`block` of kv4 and the like to head_dim). Errors name layer and side.
Result<ModelConfig> ResolveConfig(ModelConfig config);

// What encoding lost and saved; sums over pages add up.
struct FreezeFigures {
  int64_t pages = 0, elements = 0, saturated = 0;
  uint64_t bytes_before = 0, bytes_after = 0;
  double squared_error = 0, max_error = 0;
  double rmse() const;
  void Add(const FreezeFigures& other);
};
struct FreezeReport {
  FreezeFigures key, value;
};

struct CacheSide {
  PayloadRef payload;
  // The same payload while it is a hot or kept page, to be written only when nobody else holds it.
  Payload* writable = nullptr;
  bool frozen = false;
  FreezeFigures figures;  // of this page, when frozen
};
struct CachePage {
  int64_t start = 0;   // position of the first token
  int64_t length = 0;  // valid tokens; rows past them hold anything
  bool kept = false;   // holds the first keep_first tokens
  CacheSide key, value;
  int64_t capacity() const { return key.payload->shape.tokens; }
  int64_t end() const { return start + length; }
};
struct CacheLayer {
  std::vector<CachePage> pages;  // by position; dropped pages leave a gap
  int64_t end = 0;               // tokens appended, dropped ones included
  SharedBytes center;            // c of a +center key spec once its first page is encoded
  size_t settled = 0;            // pages before this one need no encoding any more
  uint64_t cuts = 0;             // how often pages or tokens have been taken away
};

struct CacheStats {
  int64_t tokens = 0;         // tokens appended: the most of any layer
  int64_t kept_pages = 0, hot_pages = 0, frozen_pages = 0;  // a page counts as frozen when both sides are
  uint64_t kept_bytes = 0, hot_bytes = 0;                   // dense sides of kept pages, of others
  uint64_t code_bytes = 0, scale_bytes = 0, zero_bytes = 0, global_bytes = 0, center_bytes = 0;
  int64_t shared_pages = 0;   // pages whose key or value is held by another cache too
  uint64_t shared_bytes = 0;  // their bytes, counted in the sums above as well
  double key_bits = 0, value_bits = 0;  // per valid element of encoded pages
  double bits = 0;                      // mean of both
  double overall_bits = 0;              // dense pages included
  FreezeReport frozen;                  // figures of the encoded pages that are held
  uint64_t bytes() const { return kept_bytes + hot_bytes + code_bytes + scale_bytes + zero_bytes + global_bytes + center_bytes; }
};

class ModelCache {
 public:
  // An empty cache on the instance's device, where it has one. `max_bytes` (0: none) limits what it and its forks hold together,
  // within the instance's limit.
  static Result<ModelCache> Create(const InstanceRef& instance, ModelConfig config, uint64_t max_bytes);
  // An instance whose memory is that of one cache and its forks, at most `max_bytes` (0: no limit) within the instance's.
  static InstanceRef OwnInstance(const InstanceRef& instance, uint64_t max_bytes);
  // A cache of given layers, as a file or other caches have them; checks shapes, order and kept pages. Payloads stay
  // shared; a last dense page with room becomes the hot page. `own`: made by OwnInstance.
  static Result<ModelCache> Assemble(InstanceRef own, ModelConfig config, std::vector<CacheLayer> layers);

  const ModelConfig& config() const { return *config_; }
  int64_t layer_count() const { return static_cast<int64_t>(layers_.size()); }
  const CacheLayer& layer(int64_t index) const { return layers_[static_cast<size_t>(index)]; }
  const InstanceRef& instance() const { return instance_; }  // its budget is the cache's

  // Position after the last token where all layers agree; ERR_MISMATCH names the first layer that differs.
  Result<int64_t> EvenTokens() const;
  int64_t tokens() const;  // the most of any layer

  // Freezes what is due, then stores tokens [1, heads, tokens, width] of one layer, rounded to the hot type. A failed
  // append leaves the tokens as they were; pages that were due may have been encoded before memory ran out.
  Status Append(int64_t layer, const TensorView& keys, const TensorView& values);
  // One tensor per layer; all or nothing.
  Status AppendAll(std::span<const TensorView> keys, std::span<const TensorView> values);
  // Encodes every page that is due, of one layer or (-1) of all.
  Result<FreezeReport> Freeze(int64_t layer);

  // Forgets tokens n and later in all layers. A page that was encoded keeps its codes and is not written again.
  Status Truncate(int64_t n);
  // Forgets pages that end at or before n, of one layer or (-1) of all; never kept ones. Positions stay.
  Status DropBefore(int64_t n, int64_t layer);
  // Tokens [begin, end) with shared pages and unchanged positions; `begin` must be the start of a page in every layer.
  Result<ModelCache> Slice(int64_t begin, int64_t end) const;
  ModelCache Fork() const { return *this; }
  // The same cache where `instance` has its caches, on its device or in the host's memory, page by page: nothing is encoded anew. Its
  // limit is as large as this one's, and its own; where the cache is there already, it is a fork.
  Result<ModelCache> MoveTo(const InstanceRef& instance) const;

  // Decodes tokens [begin, end) of a side to f32, strides in elements. ERR_ARGUMENT names tokens that are not there.
  Status Read(int64_t layer, bool value_side, int64_t begin, int64_t end, float* out, int64_t head_stride,
              int64_t token_stride) const;
  // The errors of Read, without reading.
  Status CheckRead(int64_t layer, int64_t begin, int64_t end) const;
  CacheStats Stats() const;
  // The layer as onnx-light's pages in the host's memory, payloads shared where they lie there; starts count from 0.
  Result<PagedCache> ToPaged(int64_t layer) const;

  PageStore& store() const { return StoreOf(*instance_); }
  // What a device keeps of a layer for Attend; never that of a fork.
  std::unique_ptr<PageTable>& table(int64_t layer) const;

 private:
  ModelCache() = default;
  Status CheckLayer(int64_t layer) const;
  Status CheckInput(int64_t layer, const TensorView& keys, const TensorView& values) const;
  Status CheckFits(int64_t layer, const TensorView& keys, const TensorView& values) const;
  // A side of a page that is due.
  struct Due {
    int64_t layer;
    size_t page;
    bool value_side;
  };
  Status FreezeLayers(int64_t first, int64_t end, FreezeReport* report);
  Status FindDue(int64_t layer, std::vector<Due>& due);
  Status EncodeAll(std::span<const Due> due, FreezeReport* report);
  Status FindCenter(CacheLayer& layer, const LayerConfig& config) const;
  Status Store(int64_t layer, const TensorView& keys, const TensorView& values);
  Status StoreAll(int64_t first, std::span<const TensorView> keys, std::span<const TensorView> values);
  Result<CachePage> NewPage(int64_t layer, int64_t start, bool kept) const;
  Status MakeWritable(CachePage& page) const;

  // Copied with a cache, they are empty.
  struct Tables {
    Tables() = default;
    Tables(const Tables&) {}
    Tables& operator=(const Tables&) {
      of_layers.clear();
      return *this;
    }
    Tables(Tables&&) = default;
    Tables& operator=(Tables&&) = default;
    std::vector<std::unique_ptr<PageTable>> of_layers;
  };

  InstanceRef instance_;
  std::shared_ptr<const ModelConfig> config_;
  std::vector<CacheLayer> layers_;
  mutable Tables tables_;
};

// Layers for ModelCache::Assemble of onnx-light's pages: encoded pages stay as they are, a first dense page of keep_first tokens is the kept one.
Result<std::vector<CacheLayer>> LayersFromPaged(const ModelConfig& config, std::span<const PagedCache* const> layers);

// Bytes of a cache of `tokens` tokens after freeze(), exactly as Stats would count them.
CacheStats EstimateBytes(const ModelConfig& resolved, int64_t tokens);

// Whether a page takes no more tokens: full, encoded in part, or followed by another.
bool IsClosed(const CacheLayer& layer, size_t index);

// The same payload, one in the host's memory, with only its first `tokens` rows.
Result<PayloadRef> CutPayload(const InstanceRef& instance, const Payload& payload, int64_t tokens);

}  // namespace kvpages
