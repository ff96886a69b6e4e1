// SPDX-License-Identifier: Apache-2.0
// What encoding a payload lost: a block of threads for each. Errors are squared side by side and added in the order of the
// elements, in float64, as the CPU does: the figures are in files, and equal to its.
#pragma once

#include "backends/cuda/kernels/generic.cuh"
#include "formats/saturation.h"

namespace kvpages::cuda {

KVP_DEVICE bool IsSaturated(const CodecPlan& plan, const EncodeItem& item, const RowSource& source, float global, const Place& at) {
  const float x = ElementOf(plan, item, source, at);
  if (const int block = SchemeBlock(plan.spec.type); block > 0) {
    const int64_t flat = ((at.b * plan.shape.heads + at.h) * plan.shape.tokens + at.t) * plan.shape.width + at.d;
    return BeyondScheme(plan.spec.type, global, flat / block, At<const uint8_t>(item.codes), At<const uint8_t>(item.scales), x);
  }
  const uint8_t* zeros = plan.has_zeros ? At<const uint8_t>(item.zeros) : nullptr;
  return Beyond(plan.codec, x, LoadScaleAt(plan.codec, At<const uint8_t>(item.scales), zeros, global, plan.grid.Index(at.b, at.h, at.t, at.d)));
}

// Over the block's threads, largest or sum; thread 0 gets it.
KVP_DEVICE double Gather(double* shared, double value, bool largest) {
  __syncthreads();
  shared[threadIdx.x] = value;
  for (uint32_t half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x >= half) continue;
    const double a = shared[threadIdx.x], b = shared[threadIdx.x + half];
    shared[threadIdx.x] = largest ? (b > a ? b : a) : a + b;
  }
  __syncthreads();
  return shared[0];
}

// `restored`: of each item f32 [batch, heads, valid, width], shape.elements() apart. Grid: (items).
KVP_KERNEL(KvpLoss, kThreads)(CodecPlan plan, const EncodeItem* items, const float* restored, Loss* losses) {
  KVP_SHARED(double, shared);
  const EncodeItem item = items[blockIdx.x];
  const float* values = restored + static_cast<int64_t>(blockIdx.x) * plan.shape.elements();
  const int64_t width = plan.shape.width, count = plan.shape.batch * plan.shape.heads * item.valid * width;
  const bool coded = plan.codec.family != Family::kDense;
  const RowSource source = SourceOf(plan, item);
  const float global = coded ? *At<const float>(item.global) : 1.0f;
  double sum = 0, most = 0, saturated = 0, non_finite = 0, no_scale = 0;
  for (int64_t first = 0; first < count; first += kThreads) {
    const int64_t i = first + threadIdx.x;
    double square = 0;
    if (i < count) {
      const int64_t row = i / width, head = row / item.valid;
      const Place at{head / plan.shape.heads, head % plan.shape.heads, row % item.valid, i % width};
      const float x = WidenElement(source.type, source.data,
                                   at.b * item.batch_stride + at.h * item.head_stride + at.t * item.token_stride + at.d);
      const double error = static_cast<double>(x) - static_cast<double>(values[i]), size = error < 0 ? -error : error;
      square = error * error;
      if (size > most) most = size;
      if (!IsFinite(x)) non_finite = 1;
      if (coded && IsSaturated(plan, item, source, global, at)) saturated = saturated + 1;
    }
    __syncthreads();  // the sum of the squares before has been taken
    shared[threadIdx.x] = square;
    __syncthreads();
    if (threadIdx.x != 0) continue;
    const auto here = static_cast<int>(count - first < kThreads ? count - first : kThreads);
    for (int k = 0; k < here; ++k) sum = sum + shared[k];
  }
  if (coded && SchemeBlock(plan.spec.type) == 0 && plan.spec.scale_type == ScaleType::kF32) {
    for (int64_t i = threadIdx.x; i < plan.grid.count; i += kThreads) {
      if (!(At<const float>(item.scales)[i] > 0)) no_scale = 1;
    }
  }
  most = Gather(shared, most, true);
  saturated = Gather(shared, saturated, false);
  non_finite = Gather(shared, non_finite, true);
  no_scale = Gather(shared, no_scale, true);
  if (threadIdx.x != 0) return;
  Loss loss;
  loss.squared_error = sum;
  loss.max_error = most;
  loss.saturated = static_cast<int64_t>(saturated);
  loss.non_finite = non_finite > 0;
  loss.no_scale = no_scale > 0;
  loss.global = global;
  loss.zero = plan.has_zeros ? *At<const uint8_t>(item.zeros) : 0;
  losses[blockIdx.x] = loss;
}

}  // namespace kvpages::cuda
