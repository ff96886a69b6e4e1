// SPDX-License-Identifier: Apache-2.0
// The reader of envelopes on any bytes. Checksums are put right first, or nothing would come behind them. What is read must be
// written again and read once more to the same file.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "attention/attend.h"
#include "wire/crc32c.h"
#include "wire/envelope.h"

using namespace kvpages;  // NOLINT(google-build-using-namespace)

namespace {

uint32_t Get(const std::vector<uint8_t>& bytes, size_t at) {
  uint32_t value;
  std::memcpy(&value, bytes.data() + at, 4);
  return value;
}

void FixChecksums(std::vector<uint8_t>& bytes) {
  if (bytes.size() < 20) return;
  std::memcpy(bytes.data(), kEnvelopeMagic, sizeof(kEnvelopeMagic));
  std::memcpy(bytes.data() + 8, &kEnvelopeVersion, 4);
  const uint64_t header = Get(bytes, 12);
  if (header > bytes.size() - 20) return;
  uint32_t crc = Crc32c({bytes.data(), static_cast<size_t>(16 + header)});
  std::memcpy(bytes.data() + 16 + header, &crc, 4);
  for (uint64_t at = 20 + header; at + 12 <= bytes.size();) {
    const uint64_t size = uint64_t{Get(bytes, at)} + Get(bytes, at + 4);
    if (size > bytes.size() - at - 12) return;
    crc = Crc32c({bytes.data() + at + 12, static_cast<size_t>(size)}, Crc32c({bytes.data() + at, 8}));
    std::memcpy(bytes.data() + at + 8, &crc, 4);
    at += 12 + size;
  }
}

// Only memory may be lacking.
void RequireFull(const Error& error) {
  if (error.code != Code::kLimit) std::abort();
}

std::vector<uint8_t> Saved(const ModelCache& cache, const EnvelopeReader& reader) {
  auto bytes = SerializeEnvelope(cache, reader.model(), reader.token_ids());
  if (!bytes.ok()) {
    RequireFull(bytes.error());
    return {};
  }
  return {bytes.value().data(), bytes.value().data() + bytes.value().size()};
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  auto instance = std::make_shared<Instance>();
  instance->backend = AllBackends().back();
  instance->budget = std::make_shared<Budget>(64 << 20);
  std::vector<uint8_t> bytes(data, data + size);
  FixChecksums(bytes);
  EnvelopeReader reader(instance, 0, {});
  // In two portions, at a place that the input chooses.
  const size_t cut = size > 0 ? data[size - 1] * size / 256 : 0;
  if (!reader.Feed({bytes.data(), cut}).ok() || !reader.Feed({bytes.data() + cut, bytes.size() - cut}).ok()) return 0;
  auto cache = reader.Finish();
  if (!cache.ok()) return 0;
  ModelCache& held = cache.value();
  const std::vector<uint8_t> first = Saved(held, reader);
  if (first.empty()) return 0;
  EnvelopeReader again(instance, 0, {});
  Status fed = again.Feed({first.data(), first.size()});
  auto second = fed.ok() ? again.Finish() : Result<ModelCache>(std::move(fed));
  if (!second.ok()) {
    RequireFull(second.error());
    return 0;
  }
  const std::vector<uint8_t> same = Saved(second.value(), again);
  if (!same.empty() && same != first) std::abort();
  // And used.
  for (int64_t layer = 0; layer < held.layer_count() && layer < 4; ++layer) {
    const LayerConfig& config = held.config().layers[static_cast<size_t>(layer)];
    if (config.heads * (config.key.width + config.value.width) > 4096) continue;
    const std::vector<float> query(static_cast<size_t>(config.heads * config.key.width), 0.5f);
    std::vector<float> out(static_cast<size_t>(config.heads * config.value.width));
    AttendOptions options;
    options.query_start = held.tokens();
    (void)Attend(held, layer, ContiguousView(query.data(), Type::f32, {1, config.heads, 1, config.key.width}), options, out.data(), nullptr).ok();
  }
  if (!held.Truncate(0).ok()) std::abort();
  return 0;
}
