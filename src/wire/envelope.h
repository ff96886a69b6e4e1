// SPDX-License-Identifier: Apache-2.0
// The file of a whole ModelCache (docs/envelope.md): a header, then one record per page, each with its CRC-32C. Written
// and read piece by piece, with one page in memory beside the cache.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/model_cache.h"

namespace kvpages {

inline constexpr uint8_t kEnvelopeMagic[8] = {0x89, 'K', 'V', 'P', '\r', '\n', 0x1a, '\n'};
inline constexpr uint32_t kEnvelopeVersion = 1;
bool IsEnvelope(std::span<const uint8_t> bytes);  // by its first bytes

class EnvelopeWriter {
 public:
  // Keeps a fork: later changes of the cache do not matter. ERR_MISMATCH where layers have different numbers of tokens;
  // token_ids: none, or one per token.
  static Result<EnvelopeWriter> Create(const ModelCache& cache, std::string model, std::vector<uint32_t> token_ids);
  int64_t parts() const { return 1 + pages_; }  // the header and the pages
  int64_t next() const { return next_; }        // the part that Next gives
  // The next part of the file; ERR_ARGUMENT past the last one.
  Result<Bytes> Next();
  // Bytes of the whole file.
  Result<uint64_t> Size() const;

 private:
  explicit EnvelopeWriter(ModelCache cache) : cache_(std::move(cache)) {}
  Result<Bytes> Header() const;
  Result<Bytes> Record(int64_t layer, int64_t index, int64_t start, SharedBytes centers[2]) const;

  ModelCache cache_;
  std::string model_;
  std::vector<uint32_t> token_ids_;
  int64_t pages_ = 0, next_ = 0;
  int64_t layer_ = 0, index_ = 0, start_ = 0;  // of the next record
  SharedBytes centers_[2];
};

// What a caller expects of a file; what is not set is not checked.
struct EnvelopeExpectation {
  std::optional<std::string> model;
  std::optional<ModelConfig> config;  // layers, KV heads, head_dims and specs, resolved
  bool key_spec = true, value_spec = true;  // whether the specs of `config` count
};

class EnvelopeReader {
 public:
  EnvelopeReader(const InstanceRef& instance, uint64_t max_bytes, EnvelopeExpectation expectation);
  // Takes the file's bytes as they come, in any portions. Errors carry the position in the file; after one the reader
  // gives nothing else.
  Status Feed(std::span<const uint8_t> bytes);
  // Where the file is whole, its cache; ERR_CORRUPT where it ends early.
  Result<ModelCache> Finish();
  int64_t pages() const { return total_pages_; }  // 0 before the header is read
  int64_t pages_read() const { return pages_read_; }
  const std::string& model() const { return model_; }
  const std::vector<uint32_t>& token_ids() const { return token_ids_; }

 private:
  enum class State { kPrefix, kHeader, kRecordPrefix, kRecord, kEnd, kFailed };
  uint64_t Needed() const;  // bytes of the piece that comes next
  Status Take(std::span<const uint8_t> piece);
  Status TakePrefix(std::span<const uint8_t> piece);
  Status TakeHeader(std::span<const uint8_t> piece);
  Status TakeRecord(std::span<const uint8_t> piece);
  Status Expect(const ModelConfig& config) const;

  InstanceRef own_;
  InstanceRef parse_;  // pages are made with; of a cache on a device they lie in the host's memory one at a time and are not charged
  EnvelopeExpectation expectation_;
  State state_ = State::kPrefix;
  Bytes pending_;  // the beginning of a piece whose rest has not come yet
  uint64_t pending_size_ = 0;
  uint64_t position_ = 0;  // of the next piece in the file
  uint8_t prefix_[16];
  uint64_t info_size_ = 0, page_size_ = 0;
  uint32_t record_crc_ = 0;
  ModelConfig config_;
  std::vector<CacheLayer> layers_;
  std::vector<uint32_t> layer_pages_;
  int64_t total_pages_ = 0, pages_read_ = 0;
  size_t layer_ = 0;       // of the next record
  int64_t held_start_ = 0;
  SharedBytes centers_[2];
  std::string model_;
  std::vector<uint32_t> token_ids_;
};

// The whole at once.
Result<Bytes> SerializeEnvelope(const ModelCache& cache, std::string model, std::vector<uint32_t> token_ids);

}  // namespace kvpages
