// SPDX-License-Identifier: Apache-2.0
#include "wire/envelope.h"

#include <algorithm>
#include <cstring>

#include "wire/crc32c.h"
#include "wire/envelope.pb.h"
#include "wire/wire.h"

#ifndef KVP_VERSION
#define KVP_VERSION "0.0.0"
#endif

namespace kvpages {
namespace {

namespace pb = kvpages_envelope;
using Span = std::span<const uint8_t>;

constexpr uint64_t kPrefixBytes = 16;        // magic, version, header's size
constexpr uint64_t kRecordPrefixBytes = 12;  // info's size, page's size, CRC

void PutU32(uint8_t* out, uint64_t value) {
  for (int i = 0; i < 4; ++i) out[i] = static_cast<uint8_t>(value >> (8 * i));
}
uint32_t GetU32(const uint8_t* in) {
  return static_cast<uint32_t>(in[0]) | static_cast<uint32_t>(in[1]) << 8 | static_cast<uint32_t>(in[2]) << 16 | static_cast<uint32_t>(in[3]) << 24;
}

void PutSide(const SideConfig& side, pb::Side* out) {
  out->set_head_dim(side.width);
  out->set_spec(CanonicalSpec(side.spec));
  const std::string options = SpecOptionsText(side.options);
  if (!options.empty()) out->set_options(options);
}
void PutFigures(const FreezeFigures& figures, pb::Figures* out) {
  out->set_elements(figures.elements);
  out->set_saturated(figures.saturated);
  out->set_bytes_before(figures.bytes_before);
  out->set_bytes_after(figures.bytes_after);
  out->set_squared_error(figures.squared_error);
  out->set_max_error(figures.max_error);
}
FreezeFigures GetFigures(const pb::Figures& in) {
  FreezeFigures figures;
  figures.pages = 1;
  figures.elements = in.elements();
  figures.saturated = in.saturated();
  figures.bytes_before = in.bytes_before();
  figures.bytes_after = in.bytes_after();
  figures.squared_error = in.squared_error();
  figures.max_error = in.max_error();
  return figures;
}

bool SameBytes(const SharedBytes& a, const SharedBytes& b) {
  return a.Same(b) || (a.size() == b.size() && !a.empty() && std::memcmp(a.data(), b.data(), static_cast<size_t>(a.size())) == 0);
}

// The centre of the first centred page, which its record brings.
const SharedBytes* FirstCenter(const CacheLayer& layer) {
  for (const CachePage& page : layer.pages) {
    if (!page.key.payload->center.empty()) return &page.key.payload->center;
  }
  return nullptr;
}

Error At(Code code, uint64_t position, std::string text) {
  Error error = MakeError(code, "bytes", std::move(text));
  error.message += ", at byte " + std::to_string(position);
  error.byte_offset = static_cast<int64_t>(position);
  return error;
}

// Whether an error is about the file, not about where it is read to.
bool IsOfTheFile(const Error& error) { return error.code != Code::kMemory && error.code != Code::kLimit && error.code != Code::kDevice; }

// Puts the envelope's words in front of what a room below said.
Error Within(Error error, int64_t layer, uint64_t position) {
  if (!IsOfTheFile(error)) return error;
  error.message = "bytes: layer " + Text(layer) + ": " + error.message;
  error.argument = "bytes";
  error.layer = layer;
  if (!error.byte_offset) {
    error.byte_offset = static_cast<int64_t>(position);
    error.message += ", at byte " + std::to_string(position);
  }
  return error;
}

}  // namespace

bool IsEnvelope(Span bytes) {
  return bytes.size() >= sizeof(kEnvelopeMagic) && std::memcmp(bytes.data(), kEnvelopeMagic, sizeof(kEnvelopeMagic)) == 0;
}

// ---- Writing ----

Result<EnvelopeWriter> EnvelopeWriter::Create(const ModelCache& cache, std::string model, std::vector<uint32_t> token_ids) {
  KVP_ASSIGN(const int64_t tokens, cache.EvenTokens());
  if (!token_ids.empty() && static_cast<int64_t>(token_ids.size()) != tokens) {
    return MakeError(Code::kShape, "tokenIds", "needs one per token, " + Text(tokens), Text(static_cast<int64_t>(token_ids.size())));
  }
  EnvelopeWriter writer(cache.Fork());
  writer.model_ = std::move(model);
  writer.token_ids_ = std::move(token_ids);
  for (int64_t i = 0; i < cache.layer_count(); ++i) writer.pages_ += static_cast<int64_t>(cache.layer(i).pages.size());
  return writer;
}

Result<Bytes> EnvelopeWriter::Header() const {
  const ModelConfig& config = cache_.config();
  pb::Header header;
  header.set_writer("kvpages " KVP_VERSION);
  header.set_model(model_);
  header.set_page_tokens(config.page_tokens);
  header.set_keep_first(config.keep_first);
  header.set_keep_recent(config.keep_recent);
  header.set_residual(config.residual);
  header.set_hot(std::string(Info(config.hot).name));
  for (int64_t i = 0; i < cache_.layer_count(); ++i) {
    const LayerConfig& layer = config.layers[static_cast<size_t>(i)];
    const CacheLayer& held = cache_.layer(i);
    pb::Layer* out = header.add_layers();
    out->set_kv_heads(layer.heads);
    PutSide(layer.key, out->mutable_key());
    PutSide(layer.value, out->mutable_value());
    if (layer.window > 0) out->set_window(layer.window);
    out->set_tokens(held.end);
    out->set_pages(static_cast<uint32_t>(held.pages.size()));
    const SharedBytes* first = FirstCenter(held);
    if (!held.center.empty() && (first == nullptr || !SameBytes(*first, held.center))) {
      out->set_center(held.center.data(), static_cast<size_t>(held.center.size()));
    }
  }
  header.mutable_token_ids()->Add(token_ids_.begin(), token_ids_.end());
  const uint64_t size = header.ByteSizeLong();
  if (size > INT32_MAX) return MakeError(Code::kLimit, "cache", "an envelope's header holds at most 2147483647 bytes", std::to_string(size));
  KVP_ASSIGN(Bytes bytes, Bytes::AllocateRaw(kPrefixBytes + size + 4));
  std::memcpy(bytes.data(), kEnvelopeMagic, sizeof(kEnvelopeMagic));
  PutU32(bytes.data() + 8, kEnvelopeVersion);
  PutU32(bytes.data() + 12, size);
  header.SerializeToArray(bytes.data() + kPrefixBytes, static_cast<int>(size));
  PutU32(bytes.data() + kPrefixBytes + size, Crc32c({bytes.data(), static_cast<size_t>(kPrefixBytes + size)}));
  return bytes;
}

Result<Bytes> EnvelopeWriter::Record(int64_t layer, int64_t index, int64_t start, SharedBytes centers[2]) const {
  const CachePage& held = cache_.layer(layer).pages[static_cast<size_t>(index)];
  Page page;
  page.start = start;
  page.length = held.length;
  KVP_ASSIGN(page.key, cache_.store().Download(held.key.payload, nullptr));
  KVP_ASSIGN(page.value, cache_.store().Download(held.value.payload, nullptr));
  if (held.length < held.capacity()) {  // only valid rows
    KVP_ASSIGN(page.key, CutPayload(cache_.instance(), *page.key, held.length));
    KVP_ASSIGN(page.value, CutPayload(cache_.instance(), *page.value, held.length));
  }
  KVP_ASSIGN(const Bytes body, SerializePage(page, centers));
  pb::PageInfo info;
  info.set_layer(static_cast<uint32_t>(layer));
  info.set_index(static_cast<uint32_t>(index));
  info.set_start(held.start);
  if (held.kept) info.set_kept(true);
  if (held.key.frozen) PutFigures(held.key.figures, info.mutable_key());
  if (held.value.frozen) PutFigures(held.value.figures, info.mutable_value());
  const uint64_t info_size = info.ByteSizeLong(), size = info_size + body.size();
  if (body.size() > INT32_MAX) return MakeError(Code::kLimit, "cache", "a page of an envelope holds at most 2147483647 bytes", std::to_string(body.size()));
  KVP_ASSIGN(Bytes bytes, Bytes::AllocateRaw(kRecordPrefixBytes + size));
  PutU32(bytes.data(), info_size);
  PutU32(bytes.data() + 4, body.size());
  info.SerializeToArray(bytes.data() + kRecordPrefixBytes, static_cast<int>(info_size));
  std::memcpy(bytes.data() + kRecordPrefixBytes + info_size, body.data(), static_cast<size_t>(body.size()));
  const uint32_t crc = Crc32c({bytes.data() + kRecordPrefixBytes, static_cast<size_t>(size)}, Crc32c({bytes.data(), 8}));
  PutU32(bytes.data() + 8, crc);
  return bytes;
}

Result<Bytes> EnvelopeWriter::Next() {
  if (next_ > pages_) return MakeError(Code::kArgument, "writer", "has given all its " + Text(parts()) + " parts");
  if (next_ == 0) {
    KVP_ASSIGN(Bytes header, Header());
    ++next_;
    return header;
  }
  while (index_ == static_cast<int64_t>(cache_.layer(layer_).pages.size())) {
    ++layer_;
    index_ = start_ = 0;
    centers_[0] = centers_[1] = {};
  }
  KVP_ASSIGN(Bytes record, Record(layer_, index_, start_, centers_));
  start_ += cache_.layer(layer_).pages[static_cast<size_t>(index_)].length;
  ++index_;
  ++next_;
  return record;
}

Result<uint64_t> EnvelopeWriter::Size() const {
  EnvelopeWriter again = *this;
  again.next_ = again.layer_ = again.index_ = again.start_ = 0;
  again.centers_[0] = again.centers_[1] = {};
  uint64_t size = 0;
  for (int64_t i = 0; i < parts(); ++i) {
    KVP_ASSIGN(const Bytes part, again.Next());
    size += part.size();
  }
  return size;
}

Result<Bytes> SerializeEnvelope(const ModelCache& cache, std::string model, std::vector<uint32_t> token_ids) {
  KVP_ASSIGN(EnvelopeWriter writer, EnvelopeWriter::Create(cache, std::move(model), std::move(token_ids)));
  KVP_ASSIGN(const uint64_t size, writer.Size());
  KVP_ASSIGN(Bytes all, Bytes::AllocateRaw(size));
  uint64_t at = 0;
  for (int64_t i = 0; i < writer.parts(); ++i) {
    KVP_ASSIGN(const Bytes part, writer.Next());
    std::memcpy(all.data() + at, part.data(), static_cast<size_t>(part.size()));
    at += part.size();
  }
  return all;
}

// ---- Reading ----

EnvelopeReader::EnvelopeReader(const InstanceRef& instance, uint64_t max_bytes, EnvelopeExpectation expectation)
    : own_(ModelCache::OwnInstance(instance, max_bytes)), parse_(own_), expectation_(std::move(expectation)) {
  if (!own_->device) return;
  parse_ = std::make_shared<Instance>();
  parse_->backend = own_->backend;
  parse_->budget = nullptr;
}

uint64_t EnvelopeReader::Needed() const {
  switch (state_) {
    case State::kPrefix: return kPrefixBytes;
    case State::kHeader: return uint64_t{GetU32(prefix_ + 12)} + 4;
    case State::kRecordPrefix: return kRecordPrefixBytes;
    case State::kRecord: return info_size_ + page_size_;
    default: return 0;
  }
}

Status EnvelopeReader::Feed(Span bytes) {
  if (state_ == State::kFailed) return MakeError(Code::kArgument, "reader", "has refused its file");
  while (!bytes.empty() && state_ != State::kEnd) {
    const uint64_t needed = Needed();
    Span piece = bytes;
    if (pending_size_ > 0 || bytes.size() < needed) {
      // The memory grows with what has come, not with what a length claims.
      const uint64_t take = std::min<uint64_t>(needed - pending_size_, bytes.size());
      if (pending_size_ + take > pending_.size()) {
        auto larger = Bytes::AllocateRaw(std::max<uint64_t>({2 * pending_.size(), pending_size_ + take, 4096}));
        if (!larger.ok()) {
          state_ = State::kFailed;
          return std::move(larger.error());
        }
        if (pending_size_ > 0) std::memcpy(larger.value().data(), pending_.data(), static_cast<size_t>(pending_size_));
        pending_ = std::move(larger.value());
      }
      std::memcpy(pending_.data() + pending_size_, bytes.data(), static_cast<size_t>(take));
      pending_size_ += take;
      bytes = bytes.subspan(static_cast<size_t>(take));
      // A file of another kind is told by its first bytes, however few there are.
      if (state_ == State::kPrefix && pending_size_ >= sizeof(kEnvelopeMagic) && !IsEnvelope({pending_.data(), static_cast<size_t>(pending_size_)})) {
        state_ = State::kFailed;
        return TakePrefix({pending_.data(), static_cast<size_t>(pending_size_)});
      }
      if (pending_size_ < needed) break;
      piece = {pending_.data(), static_cast<size_t>(needed)};
      pending_size_ = 0;
    } else {
      piece = bytes.first(static_cast<size_t>(needed));
      bytes = bytes.subspan(static_cast<size_t>(needed));
    }
    Status status = Take(piece);
    if (!status.ok()) {
      state_ = State::kFailed;
      return status;
    }
    position_ += needed;
  }
  if (!bytes.empty() && state_ == State::kEnd) {
    state_ = State::kFailed;
    return At(Code::kCorrupt, position_, "the file goes on behind its last page");
  }
  return Ok();
}

Status EnvelopeReader::Take(Span piece) {
  switch (state_) {
    case State::kPrefix:
      KVP_TRY(TakePrefix(piece));
      std::memcpy(prefix_, piece.data(), sizeof(prefix_));
      state_ = State::kHeader;
      return Ok();
    case State::kHeader:
      KVP_TRY(TakeHeader(piece));
      state_ = total_pages_ > 0 ? State::kRecordPrefix : State::kEnd;
      return Ok();
    case State::kRecordPrefix:
      info_size_ = GetU32(piece.data());
      page_size_ = GetU32(piece.data() + 4);
      record_crc_ = GetU32(piece.data() + 8);
      std::memcpy(prefix_, piece.data(), 8);
      if (info_size_ > INT32_MAX || page_size_ > INT32_MAX || info_size_ + page_size_ == 0) {
        return At(Code::kCorrupt, position_, "a record cannot have " + std::to_string(info_size_ + page_size_) + " bytes");
      }
      state_ = State::kRecord;
      return Ok();
    default:
      KVP_TRY(TakeRecord(piece));
      ++pages_read_;
      state_ = pages_read_ < total_pages_ ? State::kRecordPrefix : State::kEnd;
      return Ok();
  }
}

Status EnvelopeReader::TakePrefix(Span piece) {
  if (!IsEnvelope(piece)) {
    return At(Code::kCorrupt, 0, "not a ModelCache envelope, which begins with 89 4b 56 50 0d 0a 1a 0a; a bare PagedCacheProto is read by parse");
  }
  const uint32_t version = GetU32(piece.data() + 8);
  if (version != kEnvelopeVersion) {
    Error error = At(Code::kUnsupported, 8, "envelope version must be " + std::to_string(kEnvelopeVersion) + ", got " + std::to_string(version));
    error.expected = std::to_string(kEnvelopeVersion);
    error.actual = std::to_string(version);
    return error;
  }
  if (GetU32(piece.data() + 12) > INT32_MAX) {
    return At(Code::kCorrupt, 12, "a header cannot have " + std::to_string(GetU32(piece.data() + 12)) + " bytes");
  }
  return Ok();
}

Status EnvelopeReader::TakeHeader(Span piece) {
  const Span message = piece.first(piece.size() - 4);
  const uint32_t crc = Crc32c(message, Crc32c({prefix_, sizeof(prefix_)})), stored = GetU32(piece.data() + message.size());
  if (crc != stored) return At(Code::kCorrupt, position_, "the header does not have its checksum");
  pb::Header header;
  if (!header.ParseFromArray(message.data(), static_cast<int>(message.size()))) {
    return At(Code::kCorrupt, position_, "the header is not a valid message");
  }
  model_ = header.model();
  if (expectation_.model && *expectation_.model != model_) {
    return MakeError(Code::kMismatch, "model", "the file must be of model '" + *expectation_.model + "'", "'" + model_ + "'")
        .Expected(*expectation_.model)
        .Actual(model_);
  }
  config_.page_tokens = header.page_tokens();
  config_.keep_first = header.keep_first();
  config_.keep_recent = header.keep_recent();
  config_.residual = header.residual();
  const TypeInfo* hot = FindType(header.hot());
  if (hot == nullptr) return At(Code::kUnsupported, position_, "type of dense pages is not known: '" + header.hot() + "'");
  config_.hot = hot->type;
  for (int i = 0; i < header.layers_size(); ++i) {
    const pb::Layer& in = header.layers(i);
    LayerConfig layer;
    layer.heads = in.kv_heads();
    layer.window = in.window();
    for (const bool value_side : {false, true}) {
      const pb::Side& from = value_side ? in.value() : in.key();
      SideConfig& to = value_side ? layer.value : layer.key;
      to.width = from.head_dim();
      auto spec = ParseSpec(from.spec(), value_side ? "value" : "key");
      if (!spec.ok()) return Within(std::move(spec.error()), i, position_);
      to.spec = spec.value();
      auto options = ParseSpecOptions(from.options(), "options");
      if (!options.ok()) return Within(std::move(options.error()), i, position_);
      to.options = options.value();
    }
    config_.layers.push_back(layer);
    CacheLayer held;
    held.end = in.tokens();
    if (!in.center().empty()) {
      KVP_ASSIGN(Bytes center, Bytes::Copy(in.center().data(), in.center().size(), parse_->budget));
      held.center = std::move(center);
    }
    layers_.push_back(std::move(held));
    layer_pages_.push_back(in.pages());
    total_pages_ += in.pages();
  }
  token_ids_.assign(header.token_ids().begin(), header.token_ids().end());
  auto resolved = ResolveConfig(config_);
  if (!resolved.ok()) return Within(std::move(resolved.error()), resolved.error().layer.value_or(0), position_);
  config_ = std::move(resolved.value());
  for (const CacheLayer& layer : layers_) {
    if (layer.end != layers_[0].end) return At(Code::kCorrupt, position_, "layers must have the same number of tokens");
  }
  if (!token_ids_.empty() && static_cast<int64_t>(token_ids_.size()) != layers_[0].end) {
    return At(Code::kCorrupt, position_, "there must be one token id per token, " + Text(layers_[0].end));
  }
  return expectation_.config ? Expect(config_) : Ok();
}

// Both values of what differs first.
Status EnvelopeReader::Expect(const ModelConfig& have) const {
  const ModelConfig& want = *expectation_.config;
  const auto differ = [](const char* argument, const std::string& expected, const std::string& actual, int64_t layer, const char* side) {
    std::string rule = "the file must have " + expected;
    if (layer >= 0) rule = "layer " + Text(layer) + (*side ? std::string(" ") + side : "") + " of the file must have " + expected;
    Error error = MakeError(Code::kMismatch, argument, rule, actual).Expected(expected).Actual(actual).Side(side);
    if (layer >= 0) error.layer = layer;
    return error;
  };
  if (want.layers.size() != have.layers.size()) {
    return differ("layers", std::to_string(want.layers.size()), std::to_string(have.layers.size()), -1, "");
  }
  for (size_t i = 0; i < want.layers.size(); ++i) {
    const auto index = static_cast<int64_t>(i);
    const LayerConfig &a = want.layers[i], &b = have.layers[i];
    if (a.heads != b.heads) return differ("kvHeads", Text(a.heads), Text(b.heads), index, "");
    for (const bool value_side : {false, true}) {
      const SideConfig &x = value_side ? a.value : a.key, &y = value_side ? b.value : b.key;
      const char* side = value_side ? "value" : "key";
      if (x.width != y.width) return differ("headDim", Text(x.width), Text(y.width), index, side);
      const bool counts = value_side ? expectation_.value_spec : expectation_.key_spec;
      if (counts && CanonicalSpec(x.spec) != CanonicalSpec(y.spec)) return differ(side, CanonicalSpec(x.spec), CanonicalSpec(y.spec), index, side);
    }
  }
  return Ok();
}

Status EnvelopeReader::TakeRecord(Span piece) {
  const uint32_t crc = Crc32c(piece, Crc32c({prefix_, 8}));
  while (layers_[layer_].pages.size() == layer_pages_[layer_]) {
    ++layer_;
    held_start_ = 0;
    centers_[0] = centers_[1] = {};
  }
  CacheLayer& layer = layers_[layer_];
  const auto index = static_cast<int64_t>(layer_), page_index = static_cast<int64_t>(layer.pages.size());
  const uint64_t page_at = position_ + info_size_;
  const auto refuse = [&](std::string text, uint64_t position) {
    Error error = At(Code::kCorrupt, position, "layer " + Text(index) + " page " + Text(page_index) + ": " + std::move(text));
    error.layer = index;
    error.page = page_index;
    return error;
  };
  if (crc != record_crc_) return refuse("the record does not have its checksum", position_);
  pb::PageInfo info;
  if (!info.ParseFromArray(piece.data(), static_cast<int>(info_size_)) || info.layer() != layer_ || info.index() != layer.pages.size()) {
    return refuse("the record does not say what page it is", position_);
  }
  auto parsed = ParsePage(parse_, piece.subspan(static_cast<size_t>(info_size_)), static_cast<int64_t>(page_at), page_index, centers_);
  if (!parsed.ok()) return Within(std::move(parsed.error()), index, page_at);
  const Page& page = parsed.value();
  if (page.start != held_start_) return refuse("start must be " + Text(held_start_) + ", got " + Text(page.start), page_at);
  if (page.length < 1 || page.length > page.capacity()) return refuse("length must be 1 to " + Text(page.capacity()) + ", got " + Text(page.length), page_at);
  held_start_ += page.length;
  CachePage held;
  held.start = info.start();
  held.length = page.length;
  held.kept = info.kept();
  PageStore& store = StoreOf(*own_);
  KVP_ASSIGN(held.key.payload, store.Upload(page.key, own_->budget));
  KVP_ASSIGN(held.value.payload, store.Upload(page.value, own_->budget));
  held.key.frozen = info.has_key();
  held.value.frozen = info.has_value();
  if (info.has_key()) held.key.figures = GetFigures(info.key());
  if (info.has_value()) held.value.figures = GetFigures(info.value());
  if (layer.center.empty() && config_.layers[layer_].key.spec.center) layer.center = page.key->center;
  layer.pages.push_back(std::move(held));
  return Ok();
}

Result<ModelCache> EnvelopeReader::Finish() {
  if (state_ == State::kFailed) return MakeError(Code::kArgument, "reader", "has refused its file");
  if (state_ != State::kEnd) {
    const State at = state_;
    state_ = State::kFailed;
    if (at == State::kPrefix && position_ + pending_size_ < sizeof(kEnvelopeMagic)) {
      return At(Code::kCorrupt, pending_size_, "not a ModelCache envelope, which begins with 89 4b 56 50 0d 0a 1a 0a; a bare PagedCacheProto is read by parse");
    }
    return At(Code::kCorrupt, position_ + pending_size_, "the file ends early, after " + Text(pages_read_) + " of " +
                                                             (total_pages_ > 0 ? Text(total_pages_) : std::string("its")) + " pages");
  }
  state_ = State::kFailed;
  auto cache = ModelCache::Assemble(own_, std::move(config_), std::move(layers_));
  if (!cache.ok()) {
    Error error = std::move(cache.error());
    if (!IsOfTheFile(error)) return error;
    error.code = Code::kCorrupt;
    error.argument = "bytes";
    return error;
  }
  return cache;
}

}  // namespace kvpages
