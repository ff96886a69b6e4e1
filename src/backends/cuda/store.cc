// SPDX-License-Identifier: Apache-2.0
#include "backends/cuda/store.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "backends/cuda/attend.h"
#include "backends/cuda/codec.h"
#include "backends/cuda/pool.h"
#include "core/model_cache.h"

namespace kvpages::cuda {
namespace {

constexpr uint64_t kMostStagedBytes = uint64_t{16} << 20;  // new tokens before they go to the device
constexpr uint64_t kMostRowBytes = uint64_t{64} << 20;     // decoded at once
constexpr uint64_t kMostAttendBytes = uint64_t{512} << 20;  // working memory of one launch
constexpr size_t kMostTasks = 1024;                        // pages encoded at once: their dense forms are given up afterwards

uint64_t Round(uint64_t bytes, uint64_t to) { return (bytes + to - 1) / to * to; }
int64_t ElementBytes(Type dense) { return Info(dense).bits / 8; }
bool IsDense(const Spec& spec) { return Info(spec.type).family == Family::kDense; }

bool Same(const SpecOptions& a, const SpecOptions& b) {
  return a.overflow == b.overflow && a.global == b.global && a.given_global == b.given_global && a.rule == b.rule &&
         a.non_finite == b.non_finite && a.hadamard_run == b.hadamard_run;
}
bool Same(const Grid& a, const Grid& b) {
  return std::equal(a.div, a.div + 4, b.div) && std::equal(a.stride, a.stride + 4, b.stride) && a.count == b.count;
}

// How a payload is decoded: dense ones as such a type's spec.
CodecPlan PlanOf(const Payload& payload) {
  Spec spec = payload.spec;
  if (payload.kind == PayloadKind::kDense) {
    spec = Spec();
    spec.type = payload.dense_type;
  }
  return DecodePlan(spec, payload.shape, payload.grid, payload.hadamard);
}
bool DecodesWith(const Payload& payload, const CodecPlan& plan) {
  if (!(payload.shape == plan.shape)) return false;
  if (payload.kind == PayloadKind::kDense) return plan.spec.type == payload.dense_type;
  return payload.spec == plan.spec && payload.hadamard == plan.hadamard && Same(payload.grid, plan.grid);
}

// Where the arrays of a payload lie within its block.
struct Layout {
  uint64_t codes = 0, scales = 0, zeros = 0, global = 0, total = 0;
};
// Kernels write and read a global scale in any case.
Layout LayoutOf(uint64_t codes, uint64_t scales, uint64_t zeros) {
  constexpr uint64_t kStep = 16;
  Layout at;
  at.scales = Round(codes, kStep);
  at.zeros = at.scales + Round(scales, kStep);
  at.global = at.zeros + Round(zeros, kStep);
  at.total = at.global + kStep;
  return at;
}

class LayerTable final : public PageTable {
 public:
  // After a failure: nothing is known to be there.
  void Distrust() {
    stable = formats_there = 0;
    format_list.clear();
  }
  DeviceBytes pages, formats;
  std::vector<AttendPage> page_list;
  std::vector<CodecPlan> format_list;
  size_t formats_there = 0, stable = 0;  // formats uploaded; pages that will not change before the next cut
  uint64_t cuts = 0;
};

class Store final : public DeviceStore {
 public:
  explicit Store(std::shared_ptr<Device> device)
      : device_(std::move(device)), pool_(std::make_shared<Pool>(device_)), codec_(device_), attention_(device_), work_(device_) {}

  const char* name() const override { return "cuda"; }
  std::string Describe() const override { return device_->Describe(); }
  Status Healthy() const override { return device_->Healthy(); }
  uint64_t held_bytes() const override { return pool_->held() + codec_.bytes() + attention_.bytes() + work_.bytes(); }

  // ---- Pages ----

  Result<std::shared_ptr<Payload>> NewDense(const Instance& instance, Type type, const Shape& shape) override {
    auto payload = std::make_shared<Payload>();
    payload->shape = shape;
    payload->dense_type = type;
    KVP_TRY(GiveArrays(*payload, static_cast<uint64_t>(shape.elements() * ElementBytes(type)), 0, 0, instance.budget));
    return payload;
  }

  Status CopyRows(const Payload& from, int64_t tokens, Payload& to) override {
    const auto row = static_cast<uint64_t>(from.shape.width * ElementBytes(from.dense_type));
    return device_->Copy(to.device->codes, from.device->codes, static_cast<uint64_t>(tokens) * row, static_cast<uint64_t>(from.shape.heads),
                         static_cast<uint64_t>(to.shape.tokens) * row, static_cast<uint64_t>(from.shape.tokens) * row);
  }

  // The host rounds, so that half as much crosses the bus; all pages of an append get their rows in one launch.
  Status Write(const Instance& instance, Payload& page, int64_t row, const TensorView& view, int64_t begin, int64_t count,
               NonFinite non_finite, const char* argument) override {
    const auto row_bytes = static_cast<uint64_t>(page.shape.width * ElementBytes(page.dense_type));
    const auto heads = static_cast<uint64_t>(page.shape.heads);
    const auto most = static_cast<int64_t>(std::max<uint64_t>(kMostStagedBytes / (heads * row_bytes), 1));
    for (int64_t done = 0; done < count;) {
      const int64_t now = std::min(most, count - done);
      const uint64_t head_bytes = static_cast<uint64_t>(now) * row_bytes;
      if (staged_ + heads * head_bytes > kMostStagedBytes) KVP_TRY(Finish());
      KVP_TRY(Stage(heads * head_bytes));
      KVP_TRY(RoundRows(*instance.backend, view, begin + done, now, page.dense_type, non_finite, argument, staging_.data() + staged_,
                        static_cast<int64_t>(head_bytes)));
      CopyItem item;
      item.to = page.device->codes + static_cast<uint64_t>(row + done) * row_bytes;
      item.from = staged_;
      item.row_bytes = item.from_pitch = head_bytes;
      item.to_pitch = static_cast<uint64_t>(page.shape.tokens) * row_bytes;
      item.rows = page.shape.heads;
      copies_.push_back(item);
      staged_ = Round(staged_ + heads * head_bytes, 16);
      done += now;
    }
    return Ok();
  }

  Status Finish() override {
    if (copies_.empty()) return Ok();
    Status status = CopyStaged();
    Forget();
    return status;
  }
  void Forget() override {
    staged_ = 0;
    copies_.clear();
  }

  // ---- Encoding ----

  Result<size_t> Encode(const InstanceRef& instance, std::span<EncodeTask> tasks) override {
    // Where memory ends before the last task, what the first ones give up makes room for the others.
    size_t count = 0;
    std::vector<std::shared_ptr<Payload>> made;
    for (; count < std::min(tasks.size(), kMostTasks); ++count) {
      std::shared_ptr<Payload> payload;
      Status status = Prepare(instance, tasks[count], &payload);
      if (!status.ok()) {
        const bool full = status.error().code == Code::kMemory || status.error().code == Code::kLimit;
        if (count == 0 || !full) return std::move(status.error());
        break;
      }
      made.push_back(std::move(payload));
    }
    std::vector<Loss> losses(count);
    KVP_TRY(EncodeGroups(instance, tasks.first(count), made, losses));
    for (size_t i = 0; i < count; ++i) {
      if (losses[i].non_finite == 0 || !made[i] || tasks[i].options->non_finite != NonFinite::kError) continue;
      if (i == 0) KVP_TRY(NameNonFinite(instance, tasks[0]));
      count = i;
    }
    for (size_t i = 0; i < count; ++i) {
      EncodeTask& task = tasks[i];
      const Shape& shape = (*task.page)->shape;
      const bool encoded = made[i] && made[i]->kind == PayloadKind::kEncoded;
      if (encoded) {
        FinishEncoded(*made[i], losses[i].no_scale == 0, static_cast<uint8_t>(losses[i].zero));
        made[i]->global = losses[i].global;
      }
      task.loss.elements = shape.heads * task.valid * shape.width;
      task.loss.rmse = std::sqrt(losses[i].squared_error / static_cast<double>(task.loss.elements));
      task.loss.max_error = losses[i].max_error;
      task.loss.saturated = encoded ? losses[i].saturated : 0;
      task.made = made[i] ? PayloadRef(std::move(made[i])) : *task.page;
    }
    return count;
  }

  // ---- Decoding ----

  Status Read(const InstanceRef& instance, std::span<const ReadTask> tasks, int64_t head_stride, int64_t token_stride) override {
    while (!tasks.empty()) {
      const Shape& shape = tasks[0].payload->shape;
      const int64_t most = std::max<int64_t>(static_cast<int64_t>(kMostRowBytes) / (4 * shape.heads * shape.width), 1);
      size_t count = 0;
      int64_t tokens = 0;
      while (count < tasks.size() && (count == 0 || tokens + tasks[count].end - tasks[count].begin <= most)) {
        tokens += tasks[count].end - tasks[count].begin;
        ++count;
      }
      KVP_TRY(ReadSome(instance, tasks.first(count), tokens, head_stride, token_stride));
      tasks = tasks.subspan(count);
    }
    return Ok();
  }

  Result<PayloadRef> Download(const PayloadRef& payload, const std::shared_ptr<Budget>& budget) override {
    if (!payload->device) return payload;
    const DeviceArrays& there = *payload->device;
    auto copy = WithoutArrays(*payload);
    if (payload->kind == PayloadKind::kDense) {
      KVP_ASSIGN(copy->data, Bytes::AllocateRaw(there.code_bytes, budget));
      KVP_TRY(device_->Download(copy->data.data(), there.codes, there.code_bytes));
      return PayloadRef(std::move(copy));
    }
    KVP_ASSIGN(copy->codes, Bytes::AllocateRaw(there.code_bytes, budget));
    KVP_ASSIGN(copy->scales, Bytes::AllocateRaw(there.scale_bytes, budget));
    KVP_ASSIGN(copy->zeros, Bytes::AllocateRaw(there.zero_bytes, budget));
    // One transfer: arrays lie side by side.
    KVP_ASSIGN(Bytes block, Bytes::AllocateRaw(there.block.bytes()));
    KVP_TRY(device_->Download(block.data(), there.block.at(), there.block.bytes()));
    const auto take = [&](Bytes& to, uint64_t at) {
      if (!to.empty()) std::memcpy(to.data(), block.data() + (at - there.block.at()), static_cast<size_t>(to.size()));
    };
    take(copy->codes, there.codes);
    take(copy->scales, there.scales);
    take(copy->zeros, there.zeros);
    std::memcpy(&copy->global, block.data() + (there.global - there.block.at()), 4);
    return PayloadRef(std::move(copy));
  }

  Result<PayloadRef> Upload(const PayloadRef& payload, const std::shared_ptr<Budget>& budget) override {
    if (payload->device || payload->kind == PayloadKind::kOpaque) return payload;
    auto copy = WithoutArrays(*payload);
    if (payload->kind == PayloadKind::kDense) {
      KVP_TRY(GiveArrays(*copy, payload->data.size(), 0, 0, budget));
      KVP_TRY(device_->Upload(copy->device->codes, payload->data.data(), payload->data.size()));
      return PayloadRef(std::move(copy));
    }
    KVP_TRY(GiveArrays(*copy, payload->codes.size(), payload->scales.size(), payload->zeros.size(), budget));
    const DeviceArrays& there = *copy->device;
    KVP_ASSIGN(Bytes block, Bytes::Allocate(there.block.bytes()));
    const auto put = [&](const void* from, uint64_t size, uint64_t at) {
      if (size > 0) std::memcpy(block.data() + (at - there.block.at()), from, static_cast<size_t>(size));
    };
    put(payload->codes.data(), payload->codes.size(), there.codes);
    put(payload->scales.data(), payload->scales.size(), there.scales);
    put(payload->zeros.data(), payload->zeros.size(), there.zeros);
    put(&payload->global, 4, there.global);
    KVP_TRY(device_->Upload(there.block.at(), block.data(), there.block.bytes()));
    return PayloadRef(std::move(copy));
  }

  // ---- Host memory ----

  Status Quantize(const QuantizeJob& job) override {
    const Shape& shape = job.shape;
    const ArraySizes sizes = SizesOf(job.spec, shape);
    const auto element = static_cast<uint64_t>(ElementBytes(job.source_type)), row = static_cast<uint64_t>(shape.width) * element;
    const auto valid = static_cast<uint64_t>(job.valid), center_bytes = job.center ? static_cast<uint64_t>(shape.heads * shape.width) * 2 : 0;
    const Layout at = LayoutOf(static_cast<uint64_t>(sizes.codes), static_cast<uint64_t>(sizes.scales), static_cast<uint64_t>(sizes.zeros));
    const uint64_t center_at = Round(at.total, 256), source_at = Round(center_at + center_bytes, 256);
    KVP_ASSIGN(const DeviceBlock block,
               DeviceBlock::Allocate(device_, source_at + static_cast<uint64_t>(shape.batch * shape.heads) * valid * row));
    EncodeItem item;
    item.source = block.at() + source_at;
    item.token_stride = shape.width;
    item.head_stride = job.valid * shape.width;
    item.batch_stride = shape.heads * item.head_stride;
    item.valid = job.valid;
    for (int64_t b = 0; b < shape.batch; ++b) {
      const uint8_t* from = static_cast<const uint8_t*>(job.source) + static_cast<uint64_t>(b * job.batch_stride) * element;
      const uint64_t to = item.source + static_cast<uint64_t>(b * item.batch_stride) * element;
      if (job.token_stride == shape.width || job.valid == 1) {
        KVP_TRY(device_->Upload(to, from, valid * row, static_cast<uint64_t>(shape.heads), valid * row,
                                static_cast<uint64_t>(job.head_stride) * element));
        continue;
      }
      for (int64_t h = 0; h < shape.heads; ++h) {
        KVP_TRY(device_->Upload(to + static_cast<uint64_t>(h) * valid * row, from + static_cast<uint64_t>(h * job.head_stride) * element, row, valid,
                                row, static_cast<uint64_t>(job.token_stride) * element));
      }
    }
    if (job.center != nullptr) {
      item.center = block.at() + center_at;
      KVP_TRY(device_->Upload(item.center, job.center, center_bytes));
    }
    item.codes = block.at() + at.codes;
    item.scales = sizes.scales > 0 ? block.at() + at.scales : 0;
    item.zeros = sizes.zeros > 0 ? block.at() + at.zeros : 0;
    item.global = block.at() + at.global;
    const bool given = job.spec.calibration == Calibration::kGiven && Info(job.spec.type).family != Family::kScheme;
    if (given) {
      if (item.scales != 0) KVP_TRY(device_->Upload(item.scales, job.scales, static_cast<uint64_t>(sizes.scales)));
      if (item.zeros != 0) KVP_TRY(device_->Upload(item.zeros, job.zeros, static_cast<uint64_t>(sizes.zeros)));
      KVP_TRY(device_->Upload(item.global, job.global, 4));
    }
    KVP_TRY(codec_.Encode(job.spec, job.options, shape, job.source_type, job.hadamard, {&item, 1}));
    if (!given) {
      if (item.scales != 0) KVP_TRY(device_->Download(job.scales, item.scales, static_cast<uint64_t>(sizes.scales)));
      if (item.zeros != 0) KVP_TRY(device_->Download(job.zeros, item.zeros, static_cast<uint64_t>(sizes.zeros)));
      KVP_TRY(device_->Download(job.global, item.global, 4));
    }
    return device_->Download(job.codes, item.codes, static_cast<uint64_t>(sizes.codes));
  }

  Status Dequantize(const DequantizeJob& job) override {
    const Shape& shape = job.shape;
    const ArraySizes sizes = SizesOf(job.spec, shape);
    // A file's affine layout has scales of its own, always f32 with a byte for each zero point.
    const int64_t usual = ScaleGrid(job.spec, shape).count;
    const auto groups = [&](int64_t bytes) { return static_cast<uint64_t>(usual == job.grid.count ? bytes : bytes / usual * job.grid.count); };
    const uint64_t codes = static_cast<uint64_t>(sizes.codes), scales = groups(sizes.scales);
    const uint64_t zeros = job.zeros == nullptr ? 0 : groups(std::max<int64_t>(sizes.zeros, usual));
    const uint64_t center_bytes = job.center ? static_cast<uint64_t>(shape.heads * shape.width) * 2 : 0;
    const Layout at = LayoutOf(codes, scales, zeros);
    const uint64_t center_at = Round(at.total, 256), out_at = Round(center_at + center_bytes, 256);
    const int64_t rows = job.end - job.begin;
    KVP_ASSIGN(const DeviceBlock block,
               DeviceBlock::Allocate(device_, out_at + static_cast<uint64_t>(shape.batch * shape.heads * rows * shape.width) * 4));
    DecodeItem item;
    const auto put = [&](uint64_t& to, const void* from, uint64_t size, uint64_t offset) -> Status {
      if (size == 0) return Ok();
      to = block.at() + offset;
      return device_->Upload(to, from, size);
    };
    KVP_TRY(put(item.codes, job.codes, codes, at.codes));
    KVP_TRY(put(item.scales, job.scales, scales, at.scales));
    KVP_TRY(put(item.zeros, job.zeros, zeros, at.zeros));
    KVP_TRY(put(item.global, &job.global, 4, at.global));
    KVP_TRY(put(item.center, job.center, center_bytes, center_at));
    item.begin = job.begin;
    item.end = job.end;
    item.out = block.at() + out_at;
    item.token_stride = shape.width;
    item.head_stride = rows * shape.width;
    item.batch_stride = shape.heads * item.head_stride;
    KVP_TRY(codec_.Decode(job.spec, shape, job.grid, job.hadamard, {&item, 1}));
    for (int64_t b = 0; b < shape.batch; ++b) {
      KVP_TRY(DownloadRows(job.out + b * job.batch_stride, item.out + static_cast<uint64_t>(b * item.batch_stride) * 4, shape.heads, rows,
                           shape.width, job.head_stride, job.token_stride));
    }
    return Ok();
  }

  // ---- Attention ----

  Status Attend(const DeviceAttend& call, std::span<const DeviceSequence> sequences) override {
    const LayerConfig& config = *call.config;
    int64_t most_pages = 1;
    for (const DeviceSequence& sequence : sequences) most_pages = std::max(most_pages, static_cast<int64_t>(sequence.layer->pages.size()));
    // An upper bound of what a query row takes; the number of parts is attend.cc's business.
    const uint64_t row_bytes = static_cast<uint64_t>(std::min<int64_t>(most_pages, 256) * (2 * config.value.width + 2) +
                                                     3 * config.key.width + config.value.width + 2) * 4;
    const uint64_t token_bytes = row_bytes * static_cast<uint64_t>(call.heads);
    const auto tokens = static_cast<int64_t>(std::clamp<uint64_t>(kMostAttendBytes / token_bytes, 1, static_cast<uint64_t>(call.tokens)));
    const auto together = static_cast<size_t>(std::max<uint64_t>(kMostAttendBytes / (token_bytes * static_cast<uint64_t>(tokens)), 1));
    KVP_TRY(UpdateTables(sequences));
    for (size_t first = 0; first < sequences.size(); first += together) {
      const auto some = sequences.subspan(first, std::min(together, sequences.size() - first));
      for (int64_t t = 0; t < call.tokens; t += tokens) KVP_TRY(AttendSome(call, some, t, std::min(tokens, call.tokens - t)));
    }
    return Ok();
  }

 private:
  // Memory for a payload's arrays, charged as the host's would be: without padding and global.
  Status GiveArrays(Payload& payload, uint64_t codes, uint64_t scales, uint64_t zeros, const std::shared_ptr<Budget>& budget) {
    const Layout at = LayoutOf(codes, scales, zeros);
    auto arrays = std::make_unique<DeviceArrays>();
    KVP_ASSIGN(arrays->block, DeviceBytes::Allocate(pool_, at.total, codes + scales + zeros, budget));
    const uint64_t base = arrays->block.at();
    arrays->codes = base + at.codes;
    arrays->scales = scales > 0 ? base + at.scales : 0;
    arrays->zeros = zeros > 0 ? base + at.zeros : 0;
    arrays->global = base + at.global;
    arrays->code_bytes = codes;
    arrays->scale_bytes = scales;
    arrays->zero_bytes = zeros;
    payload.device = std::move(arrays);
    return Ok();
  }

  Result<uint64_t> CenterAt(const SharedBytes& center, const std::shared_ptr<Budget>& budget) {
    if (center.empty()) return uint64_t{0};
    auto& copy = center.copy();
    if (copy == nullptr || copy->heap() != pool_.get()) {
      KVP_ASSIGN(DeviceBytes block, DeviceBytes::Allocate(pool_, center.size(), center.size(), budget));
      KVP_TRY(device_->Upload(block.at(), center.data(), center.size()));
      copy = std::make_shared<const DeviceBytes>(std::move(block));
    }
    return copy->at();
  }

  // Room for `bytes` behind what is staged.
  Status Stage(uint64_t bytes) {
    if (staged_ + bytes <= staging_.size()) return Ok();
    KVP_ASSIGN(Bytes larger, Bytes::AllocateRaw(std::max<uint64_t>({2 * staging_.size(), staged_ + bytes, 4096})));
    if (staged_ > 0) std::memcpy(larger.data(), staging_.data(), static_cast<size_t>(staged_));
    staging_ = std::move(larger);
    return Ok();
  }

  Status CopyStaged() {
    const uint64_t list_bytes = copies_.size() * sizeof(CopyItem);
    KVP_TRY(Stage(list_bytes));
    KVP_ASSIGN(const DevicePointer work, work_.Take(staged_ + list_bytes));
    uint64_t most = 0;  // bytes of an item
    for (CopyItem& item : copies_) {
      item.from += work;
      most = std::max(most, item.row_bytes * static_cast<uint64_t>(item.rows));
    }
    std::memcpy(staging_.data() + staged_, copies_.data(), static_cast<size_t>(list_bytes));
    KVP_TRY(device_->Upload(work, staging_.data(), staged_ + list_bytes));
    constexpr uint64_t kThreads = 256, kMostItems = 32768;
    const auto blocks = static_cast<uint32_t>(std::clamp<uint64_t>(most / (16 * kThreads), 1, 256));
    for (uint64_t first = 0; first < copies_.size(); first += kMostItems) {
      DevicePointer list = work + staged_ + first * sizeof(CopyItem);
      void* arguments[] = {&list};
      const auto count = static_cast<uint32_t>(std::min<uint64_t>(kMostItems, copies_.size() - first));
      KVP_TRY(device_->Launch("KvpCopyRows", {blocks, count, 1}, {kThreads, 1, 1}, 0, arguments));
    }
    return Ok();
  }

  // Memory for what a page becomes; null where it stays.
  Status Prepare(const InstanceRef& instance, const EncodeTask& task, std::shared_ptr<Payload>* made) {
    const Payload& page = **task.page;
    if (task.spec->type == page.dense_type) return Ok();
    if (IsDense(*task.spec)) {
      KVP_ASSIGN(*made, NewDense(*instance, task.spec->type, page.shape));
      return Ok();
    }
    KVP_ASSIGN([[maybe_unused]] const uint64_t center, CenterAt(task.center, instance->budget));
    const ArraySizes sizes = SizesOf(*task.spec, page.shape);
    *made = EncodedWithoutArrays(*task.spec, page.shape);
    KVP_TRY(GiveArrays(**made, static_cast<uint64_t>(sizes.codes), static_cast<uint64_t>(sizes.scales), static_cast<uint64_t>(sizes.zeros),
                       instance->budget));
    (*made)->center = task.center;
    if (task.spec->hadamard) (*made)->hadamard = HadamardLength(page.shape.width, task.options->hadamard_run);
    return Ok();
  }

  // The error of a page that holds NaN or an infinity, with the first index.
  Status NameNonFinite(const InstanceRef& instance, const EncodeTask& task) {
    KVP_ASSIGN(const PayloadRef page, Download(*task.page, nullptr));
    KVP_TRY(CheckFinite(*instance->backend, ContiguousView(page->data.data(), page->dense_type, page->shape), task.valid, task.argument));
    return MakeError(Code::kNonFinite, task.argument, "values must be finite");
  }

  // All tasks of one spec and shape in one go: encoded, and what that lost.
  Status EncodeGroups(const InstanceRef& instance, std::span<const EncodeTask> tasks, std::span<const std::shared_ptr<Payload>> made,
                      std::span<Loss> losses) {
    std::vector<bool> done(tasks.size());
    std::vector<EncodeItem> items;
    std::vector<size_t> members;
    std::vector<Loss> group;
    for (size_t i = 0; i < tasks.size(); ++i) {
      if (done[i]) continue;
      const EncodeTask& first = tasks[i];
      const Payload& like = **first.page;
      items.clear();
      members.clear();
      for (size_t j = i; j < tasks.size(); ++j) {
        const EncodeTask& task = tasks[j];
        const Payload& page = **task.page;
        if (done[j] || !(*task.spec == *first.spec) || !Same(*task.options, *first.options) || !(page.shape == like.shape) ||
            page.dense_type != like.dense_type) {
          continue;
        }
        done[j] = true;
        members.push_back(j);
        EncodeItem item;
        item.source = page.device->codes;
        item.token_stride = page.shape.width;
        item.head_stride = page.shape.tokens * page.shape.width;
        item.batch_stride = page.shape.elements();
        item.valid = task.valid;
        if (made[j]) { KVP_ASSIGN(item.center, CenterAt(made[j]->center, instance->budget)); }
        const DeviceArrays& to = made[j] ? *made[j]->device : *page.device;
        item.codes = to.codes;
        item.scales = to.scales;
        item.zeros = to.zeros;
        item.global = to.global;
        items.push_back(item);
      }
      const int64_t hadamard = made[i] ? made[i]->hadamard : 0;
      if (made[i]) KVP_TRY(codec_.Encode(*first.spec, *first.options, like.shape, like.dense_type, hadamard, items));
      group.assign(items.size(), {});
      KVP_TRY(codec_.Measure(*first.spec, like.shape, like.dense_type, hadamard, items, group));
      for (size_t j = 0; j < members.size(); ++j) losses[members[j]] = group[j];
    }
    return Ok();
  }

  Status ReadSome(const InstanceRef& instance, std::span<const ReadTask> tasks, int64_t tokens, int64_t head_stride, int64_t token_stride) {
    const int64_t heads = tasks[0].payload->shape.heads, width = tasks[0].payload->shape.width;
    KVP_ASSIGN(const DevicePointer out, work_.Take(static_cast<uint64_t>(heads * tokens * width) * 4));
    std::vector<int64_t> offsets;
    int64_t offset = 0;
    for (const ReadTask& task : tasks) {
      offsets.push_back(offset);
      offset += task.end - task.begin;
    }
    std::vector<bool> done(tasks.size());
    std::vector<DecodeItem> items;
    for (size_t i = 0; i < tasks.size(); ++i) {
      if (done[i]) continue;
      const CodecPlan plan = PlanOf(*tasks[i].payload);
      items.clear();
      for (size_t j = i; j < tasks.size(); ++j) {
        const Payload& payload = *tasks[j].payload;
        if (done[j] || payload.kind != tasks[i].payload->kind || !DecodesWith(payload, plan)) continue;
        done[j] = true;
        DecodeItem item;
        item.codes = payload.device->codes;
        item.scales = payload.device->scales;
        item.zeros = payload.has_zeros ? payload.device->zeros : 0;
        item.global = payload.device->global;
        KVP_ASSIGN(item.center, CenterAt(payload.center, instance->budget));
        item.begin = tasks[j].begin;
        item.end = tasks[j].end;
        item.out = out + static_cast<uint64_t>(offsets[j] * width) * 4;
        item.token_stride = width;
        item.head_stride = tokens * width;
        item.batch_stride = heads * tokens * width;
        items.push_back(item);
      }
      KVP_TRY(codec_.Decode(plan.spec, plan.shape, plan.grid, plan.hadamard, items));
    }
    return DownloadRows(tasks[0].out, out, heads, tokens, width, head_stride, token_stride);
  }

  // f32 [heads][tokens][width] into the caller's strides.
  Status DownloadRows(float* to, DevicePointer from, int64_t heads, int64_t tokens, int64_t width, int64_t head_stride, int64_t token_stride) {
    const uint64_t row = static_cast<uint64_t>(width) * 4, all = static_cast<uint64_t>(tokens) * row;
    if (token_stride == width || tokens == 1) {
      return device_->Download(to, from, all, static_cast<uint64_t>(heads), static_cast<uint64_t>(head_stride) * 4, all);
    }
    for (int64_t h = 0; h < heads; ++h) {
      KVP_TRY(device_->Download(to + h * head_stride, from + static_cast<uint64_t>(h) * all, row, static_cast<uint64_t>(tokens),
                                static_cast<uint64_t>(token_stride) * 4, row));
    }
    return Ok();
  }

  // Room for a list that grows; of few sizes, so that the lists of many caches share the pool's slabs.
  Result<DeviceBytes> TableBytes(uint64_t bytes) { return DeviceBytes::Allocate(pool_, std::max<uint64_t>(std::bit_ceil(bytes), 4096), 0, nullptr); }

  Status UpdateTables(std::span<const DeviceSequence> sequences) {
    Status status;
    for (size_t i = 0; status.ok() && i < sequences.size(); ++i) status = UpdateTable(sequences[i], sequences.size() > 1);
    if (status.ok()) status = Finish();
    if (status.ok()) return status;
    Forget();
    for (const DeviceSequence& sequence : sequences) {
      if (*sequence.table != nullptr) static_cast<LayerTable&>(**sequence.table).Distrust();
    }
    return status;
  }

  // Bytes to the device; those for `together` go with others in one transfer, by Finish.
  Status Send(DevicePointer to, const void* from, uint64_t bytes, bool together) {
    if (!together || bytes > kMostStagedBytes / 2) return device_->Upload(to, from, bytes);
    if (staged_ + bytes > kMostStagedBytes) KVP_TRY(Finish());
    KVP_TRY(Stage(bytes));
    std::memcpy(staging_.data() + staged_, from, static_cast<size_t>(bytes));
    CopyItem item;
    item.to = to;
    item.from = staged_;
    item.row_bytes = item.to_pitch = item.from_pitch = bytes;
    item.rows = 1;
    copies_.push_back(item);
    staged_ = Round(staged_ + bytes, 16);
    return Ok();
  }

  // Brings the device's list of a layer's pages up to date; what an earlier call knew is not sent again.
  Status UpdateTable(const DeviceSequence& sequence, bool together) {
    const CacheLayer& layer = *sequence.layer;
    if (*sequence.table == nullptr) *sequence.table = std::make_unique<LayerTable>();
    auto& table = static_cast<LayerTable&>(**sequence.table);
    size_t known = std::min(table.stable, layer.pages.size());
    if (table.cuts != layer.cuts) {
      known = 0;
      table.format_list.clear();
    }
    table.stable = 0;  // also where something fails below
    table.cuts = layer.cuts;
    table.page_list.resize(known);
    if (table.format_list.empty()) table.formats_there = 0;
    for (size_t i = known; i < layer.pages.size(); ++i) {
      const CachePage& page = layer.pages[i];
      AttendPage entry;
      entry.start = page.start;
      entry.length = page.length;
      KVP_ASSIGN(entry.key, SideOf(*page.key.payload, table, sequence));
      KVP_ASSIGN(entry.value, SideOf(*page.value.payload, table, sequence));
      table.page_list.push_back(entry);
    }
    const uint64_t bytes = table.page_list.size() * sizeof(AttendPage);
    if (bytes > table.pages.bytes()) {
      table.pages = DeviceBytes();
      KVP_ASSIGN(table.pages, TableBytes(bytes));
      known = 0;
    }
    const uint64_t from = known * sizeof(AttendPage);
    if (bytes > from) KVP_TRY(Send(table.pages.at() + from, table.page_list.data() + known, bytes - from, together));
    const uint64_t format_bytes = table.format_list.size() * sizeof(CodecPlan);
    if (table.formats_there < table.format_list.size()) {
      if (format_bytes > table.formats.bytes()) {
        table.formats = DeviceBytes();
        KVP_ASSIGN(table.formats, TableBytes(format_bytes));
      }
      KVP_TRY(Send(table.formats.at(), table.format_list.data(), format_bytes, together));
      table.formats_there = table.format_list.size();
    }
    // Settled pages do not change, but for the last one, which may be a kept page that grows.
    if (!layer.pages.empty()) table.stable = std::min(layer.settled, layer.pages.size() - 1);
    return Ok();
  }

  Result<AttendSide> SideOf(const Payload& payload, LayerTable& table, const DeviceSequence& sequence) {
    size_t format = 0;
    while (format < table.format_list.size() && !DecodesWith(payload, table.format_list[format])) ++format;
    if (format == table.format_list.size()) table.format_list.push_back(PlanOf(payload));
    AttendSide side;
    side.format = static_cast<int32_t>(format);
    side.codes = payload.device->codes;
    side.scales = payload.device->scales;
    side.zeros = payload.has_zeros ? payload.device->zeros : 0;
    side.global = payload.device->global;
    KVP_ASSIGN(side.center, CenterAt(payload.center, *sequence.budget));
    return side;
  }

  // Query tokens [first, first + count) of all sequences.
  Status AttendSome(const DeviceAttend& call, std::span<const DeviceSequence> sequences, int64_t first, int64_t count) {
    const LayerConfig& config = *call.config;
    const int64_t element = ElementBytes(call.query_type), width = config.key.width, value_width = config.value.width;
    const int64_t rows = call.heads * count;
    const auto n = static_cast<uint64_t>(sequences.size());
    const uint64_t query_bytes = Round(static_cast<uint64_t>(rows * width * element), 16);
    const uint64_t sink_at = n * query_bytes, out_at = Round(sink_at + call.sink_logits.size_bytes(), 256);
    const uint64_t out_bytes = static_cast<uint64_t>(rows * value_width) * 4, lse_bytes = static_cast<uint64_t>(rows) * 4;
    KVP_ASSIGN(const DevicePointer work, work_.Take(out_at + n * (out_bytes + lse_bytes)));
    KVP_ASSIGN(Bytes staging, Bytes::AllocateRaw(std::max(out_at, n * (out_bytes + lse_bytes))));

    AttendPlan plan;
    plan.heads = call.heads;
    plan.kv_heads = config.heads;
    plan.key_width = width;
    plan.value_width = value_width;
    plan.tokens = count;
    plan.query_type = call.query_type;
    plan.scale = call.scale;
    plan.softcap = call.softcap;
    plan.window = call.window;
    plan.sinks = call.sinks;
    plan.key_run = call.key_run;
    plan.value_run = call.value_run;
    if (!call.sink_logits.empty()) {
      plan.sink_logits = work + sink_at;
      std::memcpy(staging.data() + sink_at, call.sink_logits.data(), call.sink_logits.size_bytes());
    }
    std::vector<AttendSequence> list;
    for (uint64_t i = 0; i < n; ++i) {
      const DeviceSequence& sequence = sequences[i];
      const auto& table = static_cast<const LayerTable&>(**sequence.table);
      for (int64_t row = 0; row < rows; ++row) {
        std::memcpy(staging.data() + i * query_bytes + static_cast<uint64_t>(row * width * element),
                    static_cast<const uint8_t*>(sequence.queries) +
                        (row / count * sequence.head_stride + (first + row % count) * sequence.token_stride) * element,
                    static_cast<size_t>(width * element));
      }
      AttendSequence entry;
      entry.queries = work + i * query_bytes;
      entry.head_stride = count * width;
      entry.token_stride = width;
      entry.start = sequence.start + first;
      entry.pages = table.pages.at();
      entry.page_count = static_cast<int64_t>(table.page_list.size());
      entry.formats = table.formats.at();
      KVP_ASSIGN(entry.center, CenterAt(sequence.layer->center, *sequence.budget));
      entry.out = work + out_at + i * out_bytes;
      entry.lse = work + out_at + n * out_bytes + i * lse_bytes;
      list.push_back(entry);
    }
    KVP_TRY(device_->Upload(work, staging.data(), sink_at + call.sink_logits.size_bytes()));
    KVP_TRY(attention_.Run(plan, list));
    KVP_TRY(device_->Download(staging.data(), work + out_at, n * (out_bytes + lse_bytes)));
    for (uint64_t i = 0; i < n; ++i) {
      const float* out = reinterpret_cast<const float*>(staging.data() + i * out_bytes);
      const float* lse = reinterpret_cast<const float*>(staging.data() + n * out_bytes + i * lse_bytes);
      for (int64_t h = 0; h < call.heads; ++h) {
        const int64_t to = h * call.tokens + first;
        std::memcpy(sequences[i].out + to * value_width, out + h * count * value_width, static_cast<size_t>(count * value_width) * 4);
        if (sequences[i].lse != nullptr) std::memcpy(sequences[i].lse + to, lse + h * count, static_cast<size_t>(count) * 4);
      }
    }
    return Ok();
  }

  std::shared_ptr<Device> device_;
  std::shared_ptr<Pool> pool_;
  DeviceCodec codec_;
  DeviceAttention attention_;
  Workspace work_;
  Bytes staging_;  // new tokens, rounded
  uint64_t staged_ = 0;
  std::vector<CopyItem> copies_;
};

}  // namespace

std::shared_ptr<DeviceStore> MakeStore(std::shared_ptr<Device> device) { return std::make_shared<Store>(std::move(device)); }

}  // namespace kvpages::cuda
