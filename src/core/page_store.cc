// SPDX-License-Identifier: Apache-2.0
#include "core/page_store.h"

#include <cstring>

namespace kvpages {
namespace {

class Host final : public PageStore {
 public:
  const char* name() const override { return "cpu"; }

  Result<std::shared_ptr<Payload>> NewDense(const Instance& instance, Type type, const Shape& shape) override {
    auto payload = std::make_shared<Payload>();
    payload->shape = shape;
    payload->dense_type = type;
    KVP_ASSIGN(payload->data, Bytes::Allocate(static_cast<uint64_t>(shape.elements() * (Info(type).bits / 8)), instance.budget));
    return payload;
  }

  Status CopyRows(const Payload& from, int64_t tokens, Payload& to) override {
    const int64_t row = from.shape.width * (Info(from.dense_type).bits / 8);
    for (int64_t h = 0; h < from.shape.heads; ++h) {
      std::memcpy(to.data.data() + h * to.shape.tokens * row, from.data.data() + h * from.shape.tokens * row,
                  static_cast<size_t>(tokens * row));
    }
    return Ok();
  }

  Status Write(const Instance& instance, Payload& page, int64_t row, const TensorView& view, int64_t begin, int64_t count,
               NonFinite non_finite, const char* argument) override {
    const int64_t row_bytes = page.shape.width * (Info(page.dense_type).bits / 8);
    return RoundRows(*instance.backend, view, begin, count, page.dense_type, non_finite, argument, page.data.data() + row * row_bytes,
                     page.shape.tokens * row_bytes);
  }
  Status Finish() override { return Ok(); }
  void Forget() override {}

  // One at a time: each page's dense form is given up before the next one is encoded.
  Result<size_t> Encode(const InstanceRef& instance, std::span<EncodeTask> tasks) override {
    EncodeTask& task = tasks[0];
    const Payload& dense = **task.page;
    const TensorView view = ContiguousView(dense.data.data(), dense.dense_type, dense.shape);
    task.made = *task.page;
    if (task.spec->type != dense.dense_type) {
      EncodeOptions options;
      options.spec = *task.options;
      options.center = task.center;
      KVP_ASSIGN(task.made, kvpages::Encode(instance, view, task.valid, *task.spec, options, task.argument));
    }
    KVP_ASSIGN(task.loss, Measure(instance, view, *task.made, task.valid));
    return size_t{1};
  }

  Status Read(const InstanceRef& instance, std::span<const ReadTask> tasks, int64_t head_stride, int64_t token_stride) override {
    for (const ReadTask& task : tasks) {
      KVP_TRY(Decode(instance, *task.payload, task.begin, task.end, task.out, 0, head_stride, token_stride));
    }
    return Ok();
  }
  Result<PayloadRef> Download(const PayloadRef& payload, const std::shared_ptr<Budget>&) override { return payload; }
  Result<PayloadRef> Upload(const PayloadRef& payload, const std::shared_ptr<Budget>&) override { return payload; }
};

}  // namespace

PageStore& HostStore() {
  static auto& host = *new Host;
  return host;
}

PageStore& StoreOf(const Instance& instance) {
  if (instance.device) return *instance.device;
  return HostStore();
}

}  // namespace kvpages
