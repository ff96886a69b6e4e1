// SPDX-License-Identifier: Apache-2.0
// Where the payloads of a cache live, and who writes, encodes and thaws them there: the host's memory and the instance's
// kernels, or a device. What is due, kept or hot is the cache's business (core/model_cache.h).
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "core/convert.h"
#include "core/instance.h"
#include "core/page.h"

namespace kvpages {

struct CacheLayer;
struct LayerConfig;

// A dense page to encode, and what became of it.
struct EncodeTask {
  const PayloadRef* page = nullptr;
  int64_t valid = 0;
  const Spec* spec = nullptr;  // resolved, never `given`; the page's own type leaves the page as it is
  const SpecOptions* options = nullptr;
  SharedBytes center;          // of a +center spec
  const char* argument = "";
  PayloadRef made;             // the page itself where its type is the spec's
  Fidelity loss;
};

// Tokens [begin, end) of a payload, to be decoded to f32.
struct ReadTask {
  const Payload* payload = nullptr;
  int64_t begin = 0, end = 0;
  float* out = nullptr;
};

class PageStore {
 public:
  virtual ~PageStore() = default;
  virtual const char* name() const = 0;  // "cpu", "cuda"

  // A dense payload of which nothing is written yet.
  virtual Result<std::shared_ptr<Payload>> NewDense(const Instance& instance, Type type, const Shape& shape) = 0;
  // Rows [0, tokens) of every head of one dense payload into another.
  virtual Status CopyRows(const Payload& from, int64_t tokens, Payload& to) = 0;
  // Rounds tokens [begin, begin + count) of the view into rows from `row` on. They are there after Finish, or never after Forget.
  virtual Status Write(const Instance& instance, Payload& page, int64_t row, const TensorView& view, int64_t begin, int64_t count,
                       NonFinite non_finite, const char* argument) = 0;
  virtual Status Finish() = 0;
  virtual void Forget() = 0;
  // Does the first few tasks, at least one, and says how many; or nothing, with the first one's error.
  virtual Result<size_t> Encode(const InstanceRef& instance, std::span<EncodeTask> tasks) = 0;
  virtual Status Read(const InstanceRef& instance, std::span<const ReadTask> tasks, int64_t head_stride, int64_t token_stride) = 0;
  // The payload in the host's memory, charged to `budget` (null: to none), and one of the host's in here. A payload that is there
  // already is shared.
  virtual Result<PayloadRef> Download(const PayloadRef& payload, const std::shared_ptr<Budget>& budget) = 0;
  virtual Result<PayloadRef> Upload(const PayloadRef& payload, const std::shared_ptr<Budget>& budget) = 0;
};

// What a device remembers of a layer's pages between two calls of Attend.
class PageTable {
 public:
  virtual ~PageTable() = default;
};

// One layer of sequences that are made alike.
struct DeviceAttend {
  const LayerConfig* config = nullptr;
  int64_t heads = 0, tokens = 0;  // of the queries
  Type query_type = Type::f32;
  float scale = 1, softcap = 0;
  int64_t window = 0, sinks = 0;
  int64_t key_run = 0, value_run = 0;  // with which pages of such a layer are rotated
  std::span<const float> sink_logits;
};
struct DeviceSequence {
  const CacheLayer* layer = nullptr;
  std::unique_ptr<PageTable>* table = nullptr;
  const std::shared_ptr<Budget>* budget = nullptr;  // of the cache
  const void* queries = nullptr;
  int64_t head_stride = 0, token_stride = 0;  // elements
  int64_t start = 0;                          // position of the first query
  float* out = nullptr;                       // [heads, tokens, head_dim of values]
  float* lse = nullptr;                       // [heads, tokens], or null
};

// A device, used by one thread at a time: the instances and caches of one environment. A failure is ERR_DEVICE, or ERR_MEMORY where
// its memory is out, and leaves everything as it was.
class DeviceStore : public PageStore {
 public:
  virtual std::string Describe() const = 0;
  virtual Status Healthy() const = 0;              // the failure after which nothing works any more
  virtual uint64_t held_bytes() const = 0;         // of the device's memory, with padding and working memory
  // What the functions of a Backend do, of host memory.
  virtual Status Quantize(const QuantizeJob& job) = 0;
  virtual Status Dequantize(const DequantizeJob& job) = 0;
  virtual Status Attend(const DeviceAttend& call, std::span<const DeviceSequence> sequences) = 0;
};

PageStore& HostStore();
PageStore& StoreOf(const Instance& instance);

}  // namespace kvpages
