// SPDX-License-Identifier: Apache-2.0
// Payload conversion and the operator QuantizePagedCache. Chooses nothing: calls the instance's backend.
#pragma once

#include <cstdint>
#include <span>

#include "core/instance.h"
#include "core/float.h"
#include "core/page.h"

namespace kvpages {

// Input tensor as a caller hands it: strided, dense, not owned.
struct TensorView {
  const void* data = nullptr;
  Type type = Type::f32;
  Shape shape;
  int64_t batch_stride = 0, head_stride = 0, token_stride = 0;  // elements; head_dim is contiguous
};
TensorView ContiguousView(const void* data, Type type, const Shape& shape);

// A dense page payload: copies `view` bit for bit (rows past `length` too).
Result<PayloadRef> MakeDense(const InstanceRef& instance, const TensorView& view);

// An affine payload in onnx-light's layout from its parts; copies them. axis -1: per tensor, block 0: one scale per index
// of the axis. Checks type, sizes, finite positive scales; zero points are read in their low bits.
struct AffineParts {
  std::span<const uint8_t> codes;
  std::span<const uint8_t> scales;  // f32 at any address
  std::span<const uint8_t> zeros;   // one byte per scale, or empty for zero points of 0
  Bytes own_zeros;                  // or these, one to a byte, high bits 0 where there are several; taken and not copied
};
Result<PayloadRef> MakeAffine(const InstanceRef& instance, const Shape& shape, Type type, int axis, int64_t block,
                              AffineParts parts);
// Zero points from callers: numbers of the type, or their low bits. Files may have anything in the other bits.
Status CheckZeroBytes(Type type, std::span<const uint8_t> zeros);
// The spec word of an affine layout: its axis where a spec has it, else `tensor` (such a layout is read by its grid).
Spec AffineSpec(Type type, int axis, int64_t block);

// Decodes rows [begin, end) to f32; strides in elements. ERR_UNSUPPORTED for an opaque payload.
Status Decode(const InstanceRef& instance, const Payload& payload, int64_t begin, int64_t end, float* out,
              int64_t batch_stride, int64_t head_stride, int64_t token_stride);

// Rounds tokens [begin, begin + count) of every head of a view of batch 1 to a dense type: rows of a head side by side from
// `to` on, heads `to_stride` bytes apart. ERR_NON_FINITE, where non_finite refuses it, for what is finite but does not fit the type.
Status RoundRows(const Backend& backend, const TensorView& view, int64_t begin, int64_t count, Type type, NonFinite non_finite,
                 const char* argument, uint8_t* to, int64_t to_stride);

struct EncodeOptions {
  SpecOptions spec;
  const float* scales = nullptr;  // calibration given: Grid::count values
  int64_t scale_count = 0;
  const int32_t* zeros = nullptr;
  int64_t zero_count = 0;
  SharedBytes center;  // c of a +center spec, bf16 [heads, width]; empty: the mean of the tensor's own first tokens
};
// ERR_NON_FINITE with the first index where one of the first `valid` rows holds NaN or an infinity.
Status CheckFinite(const Backend& backend, const TensorView& view, int64_t valid, const char* argument);
// Encodes rows [0, valid) of a tensor with a resolved spec (dense specs narrow). Non-finite input follows
// options.spec.non_finite; errors name the first index. Rows past `valid` decode to 0.
Result<PayloadRef> Encode(const InstanceRef& instance, const TensorView& view, int64_t valid, const Spec& spec,
                          const EncodeOptions& options, const char* argument);

// For who encodes elsewhere: a payload of a resolved spec that lacks its arrays, and what is said of it once they are known: whether
// all of an affine layout's scales are > 0, and the byte of its first zero point.
std::shared_ptr<Payload> EncodedWithoutArrays(const Spec& spec, const Shape& shape);
void FinishEncoded(Payload& payload, bool has_scales, uint8_t first_zero);

// What a payload lost, against the dense source. All in float64 over valid elements.
struct Fidelity {
  double rmse = 0, max_error = 0, sqnr_db = 0, signal_rms = 0;
  int64_t saturated = 0;  // elements whose code is at the end of its range while the source lies beyond it
  int64_t elements = 0;
};
Result<Fidelity> Measure(const InstanceRef& instance, const TensorView& source, const Payload& payload, int64_t valid);

// One side of the operator: scale, and a zero point whose type chooses the destination.
struct Destination {
  double scale = 0;     // as given; must be a finite f32 > 0 even for a dense destination
  Type type = Type::f32;
  uint8_t zero_byte = 0;  // the zero point's byte as given; unused for dense destinations
};
// Scales of the operator: finite and > 0 as f32.
Status CheckScale(double scale, const char* argument);
// ai.rt::QuantizePagedCache (onnx-light): pages named by `indices` get new payloads, all others are shared.
// Publishes nothing on failure.
Result<PagedCache> QuantizePagedCache(const InstanceRef& instance, const PagedCache& cache, std::span<const int64_t> indices,
                                      const Destination& key, const Destination& value);

}  // namespace kvpages
