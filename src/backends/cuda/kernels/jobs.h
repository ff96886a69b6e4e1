// SPDX-License-Identifier: Apache-2.0
// What a launch of the codec's kernels is told: a plan that all its payloads share, and an item for each of them. The
// same on host and device.
#pragma once

#include <cstdint>

#include "core/shape.h"
#include "formats/codec.h"
#include "formats/row.h"
#include "formats/spec.h"

namespace kvpages::cuda {

struct CodecPlan {
  Spec spec;  // resolved
  SpecOptions options;
  Shape shape;
  Grid grid;
  Codec codec;                   // of types with free axis and scale
  Type source_type = Type::f32;  // dense
  int64_t hadamard = 0;          // run length; 0: no rotation
  bool clean = false;            // NonFinite::kSaturate
  bool has_zeros = false;
  int64_t code_bytes = 0;
  int64_t groups = 0;            // that share a scale and span rows: 1 with axis tensor and in NVFP4, heads with head, else 0
  int64_t partials = 0;          // of a group's tree sums: a power of two
};

// A payload to encode, in device memory; addresses are the device's.
struct EncodeItem {
  uint64_t source = 0;  // CodecPlan::source_type
  int64_t batch_stride = 0, head_stride = 0, token_stride = 0;  // elements; width is contiguous
  int64_t valid = 0;    // rows of every batch and head; the others are coded as zeros
  uint64_t center = 0;  // bf16 [heads, width], or 0
  uint64_t codes = 0, scales = 0, zeros = 0, global = 0;  // outputs; with `given` all but codes are inputs
  // Working memory, set by DeviceCodec.
  uint64_t rows = 0;      // f32 [batch, heads, tokens, width], rotated; only with hadamard
  uint64_t slots = 0;     // uint32_t, cleared: see Slot
  uint64_t partials = 0;  // f32 [groups][candidates][CodecPlan::partials]
};

// uint32_t words of EncodeItem::slots.
enum Slot : int {
  kSlotLimit = 0,   // bits of the largest finite magnitude
  kSlotTop = 1,     // bits of the largest scale a group may get
  kSlotGroups = 2,  // from here three words a group:
  kSlotLow = 0,     // order key of the lowest element, inverted
  kSlotHigh = 1,    // order key of the highest
  kSlotRms = 2,     // bits of the rms
  kSlotsPerGroup = 3,
};

// A payload to decode to f32.
struct DecodeItem {
  uint64_t codes = 0, scales = 0, zeros = 0, global = 0;  // zeros 0: zero point 0; global 0: 1
  uint64_t center = 0;
  int64_t begin = 0, end = 0;  // rows of every batch and head
  uint64_t out = 0;            // f32
  int64_t batch_stride = 0, head_stride = 0, token_stride = 0;
};

// What encoding one payload lost, over its valid elements.
struct Loss {
  double squared_error = 0, max_error = 0;
  int64_t saturated = 0;    // as CountSaturated counts
  uint32_t non_finite = 0;  // whether the source holds NaN or an infinity
  uint32_t no_scale = 0;    // whether an f32 scale is not > 0
  float global = 1;
  uint32_t zero = 0;        // the first zero point's byte
};

// Rows to copy from one place to another; all even.
struct CopyItem {
  uint64_t to = 0, from = 0;
  uint64_t row_bytes = 0, to_pitch = 0, from_pitch = 0;
  int64_t rows = 0;
};

}  // namespace kvpages::cuda
