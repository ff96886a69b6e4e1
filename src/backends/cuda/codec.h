// SPDX-License-Identifier: Apache-2.0
// Encoding and decoding in device memory: which kernels a spec and a shape take. Any number of payloads of one spec and
// shape (pages of all layers and heads) go in one launch of each kernel.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "backends/cuda/device.h"
#include "backends/cuda/kernels/jobs.h"

namespace kvpages::cuda {

// Working memory on a device that grows to what is asked for and is used by one call at a time.
class Workspace {
 public:
  explicit Workspace(std::shared_ptr<Device> device) : device_(std::move(device)) {}
  Device& device() const { return *device_; }
  Result<DevicePointer> Take(uint64_t bytes);
  uint64_t bytes() const { return block_.bytes(); }

 private:
  std::shared_ptr<Device> device_;
  DeviceBlock block_;
};

// What decodes payloads of a spec and shape, as DeviceCodec::Decode does.
CodecPlan DecodePlan(const Spec& spec, const Shape& shape, const Grid& grid, int64_t hadamard);

class DeviceCodec {
 public:
  explicit DeviceCodec(const std::shared_ptr<Device>& device) : workspace_(device), losses_(device) {}

  // What QuantizeJob asks for, of each item (backends/backend.h): `spec` resolved and of any type, dense ones included
  // (then `codes` are the elements). The items' source, strides, valid, center and outputs are device addresses; `codes`,
  // `scales`, `zeros` have the sizes of SizesOf, `global` is an f32. hadamard: run length, 0 for none. Work is ordered
  // with the device's other calls, not awaited.
  Status Encode(const Spec& spec, const SpecOptions& options, const Shape& shape, Type source_type, int64_t hadamard,
                std::span<const EncodeItem> items);
  // What DequantizeJob asks for. `grid`: ScaleGrid(spec, shape), or that of a file's affine layout.
  Status Decode(const Spec& spec, const Shape& shape, const Grid& grid, int64_t hadamard, std::span<const DecodeItem> items);
  // What Encode lost of each item, whose outputs are inputs here; awaited.
  Status Measure(const Spec& spec, const Shape& shape, Type source_type, int64_t hadamard, std::span<const EncodeItem> items,
                 std::span<Loss> losses);
  uint64_t bytes() const { return workspace_.bytes() + losses_.bytes(); }

 private:
  Status MeasureSome(const CodecPlan& plan, std::span<const EncodeItem> items, std::span<Loss> losses);
  Status EncodeSome(CodecPlan plan, std::span<const EncodeItem> items);
  Status DecodeSome(const CodecPlan& plan, std::span<const DecodeItem> items);
  Workspace workspace_, losses_;
  std::vector<EncodeItem> items_;
  std::vector<DecodeItem> decode_items_;
};

}  // namespace kvpages::cuda
