// SPDX-License-Identifier: Apache-2.0
#include "backends/reference/reference.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "formats/calibrate.h"
#include "formats/codec.h"
#include "formats/row.h"
#include "formats/schemes.h"
#include "formats/search.h"

namespace kvpages {
namespace {

// Elements that share a scale, as the calibrations see them. `x` is null where only the range was asked for.
struct Group {
  const float* x = nullptr;
  int64_t count = 0, stride = 1;
  Range range;

  float at(int64_t i) const { return x[i * stride]; }
  float Rms() const {
    return RmsOf(TreeSum(count, [&](int64_t i) { return at(i) * at(i); }), count);
  }
};

Group GroupOf(const float* x, int64_t count, int64_t stride) {
  Group group{x, count, stride, {}};
  for (int64_t i = 0; i < count; ++i) group.range.Add(group.at(i));
  return group;
}

class Quantizer {
 public:
  explicit Quantizer(const QuantizeJob& job) : job_(job), codec_(MakeCodec(job.spec, job.options)) {
    source_ = {job.source, job.source_type, job.batch_stride, job.head_stride, job.token_stride, job.shape.width,
               job.center, job.hadamard};
    if (job.options.non_finite == NonFinite::kSaturate) Clean();
  }

  void Run() {
    if (codec_.family == Family::kScheme) return RunScheme();
    if (job_.spec.calibration != Calibration::kGiven) Calibrate();
    if (job_.shape.elements() == 0) return;
    std::memset(job_.codes, 0, static_cast<size_t>(SizesOf(job_.spec, job_.shape).codes));
    const int64_t width = job_.shape.width;
    float* row = job_.scratch;
    int64_t index = 0;
    ForRows([&](int64_t b, int64_t h, int64_t t) {
      Load(b, h, t, row);
      for (int64_t d = 0; d < width; ++d, ++index) {
        const Scale scale = LoadScaleAt(codec_, job_.scales, job_.zeros, *job_.global, job_.grid.Index(b, h, t, d));
        PutCode(job_.codes, codec_.bits, index, Encode(codec_, row[d], scale));
      }
    });
  }

 private:
  void RunScheme() {
    const TypeInfo& info = Info(job_.spec.type);
    const int64_t width = job_.shape.width;
    *job_.global = 1.0f;
    if (info.block == kNvfp4Block) *job_.global = Nvfp4Global(job_.options, WholeGroup(0, job_.shape.heads).range.Amax());
    float* row = job_.scratch;
    int64_t index = 0;
    ForRows([&](int64_t b, int64_t h, int64_t t) {
      Load(b, h, t, row);
      for (int64_t d = 0; d < width; d += info.block, ++index) {
        EncodeSchemeBlock(info.type, job_.options, *job_.global, row + d, index, job_.codes, job_.scales);
      }
    });
  }

  template <typename F>
  void ForRows(const F& f) const {
    for (int64_t b = 0; b < job_.shape.batch; ++b) {
      for (int64_t h = 0; h < job_.shape.heads; ++h) {
        for (int64_t t = 0; t < job_.shape.tokens; ++t) f(b, h, t);
      }
    }
  }

  void Load(int64_t b, int64_t h, int64_t t, float* out) const {
    if (t < job_.valid) {
      LoadRow(source_, b, h, t, out);
    } else {
      std::fill(out, out + job_.shape.width, 0.0f);
    }
  }

  // What an infinity becomes: the largest finite magnitude of the payload, so that it takes the largest code and leaves
  // the scales alone; with given scales, which do not depend on it, the largest f32.
  void Clean() {
    source_.clean = true;
    source_.limit = 3.4028234663852886e38f;
    if (job_.spec.calibration == Calibration::kGiven) return;
    source_.limit = 0;
    ForRows([&](int64_t b, int64_t h, int64_t t) {
      if (t >= job_.valid) return;
      const int64_t first = b * job_.batch_stride + h * job_.head_stride + t * job_.token_stride;
      for (int64_t d = 0; d < job_.shape.width; ++d) {
        const float x = std::fabs(WidenElement(job_.source_type, job_.source, first + d));
        if (IsFinite(x) && x > source_.limit) source_.limit = x;
      }
    });
  }

  // Calls f(index, group) for every scale of the payload.
  template <typename F>
  void ForGroups(const F& f) const {
    const Shape& shape = job_.shape;
    const int64_t width = shape.width, block = job_.spec.block;
    float* const rows = job_.scratch;
    switch (job_.spec.axis) {
      case Axis::kTensor: return f(0, WholeGroup(0, shape.heads));
      case Axis::kHead:
        for (int64_t h = 0; h < shape.heads; ++h) f(h, WholeGroup(h, h + 1));
        return;
      case Axis::kToken:
        return ForRows([&](int64_t b, int64_t h, int64_t t) {
          if (t < job_.valid) Load(b, h, t, rows);
          for (int64_t d = 0; d < width; d += block) {
            f(job_.grid.Index(b, h, t, d), GroupOf(rows + d, t < job_.valid ? std::min(block, width - d) : 0, 1));
          }
        });
      case Axis::kChannel:
        return ForRows([&](int64_t b, int64_t h, int64_t t) {
          if (t % block != 0) return;
          const int64_t count = std::clamp<int64_t>(job_.valid - t, 0, block);
          for (int64_t i = 0; i < count; ++i) Load(b, h, t + i, rows + i * width);
          for (int64_t d = 0; d < width; ++d) f(job_.grid.Index(b, h, t, d), GroupOf(rows + d, count, width));
        });
    }
  }

  // All valid rows of heads [first, last), kept only for a search.
  Group WholeGroup(int64_t first, int64_t last) const {
    const bool keep = job_.spec.calibration == Calibration::kMse;
    Group group;
    float* row = job_.scratch;
    for (int64_t b = 0; b < job_.shape.batch; ++b) {
      for (int64_t h = first; h < last; ++h) {
        for (int64_t t = 0; t < job_.valid; ++t) {
          Load(b, h, t, row);
          for (int64_t d = 0; d < job_.shape.width; ++d) group.range.Add(row[d]);
          group.count += job_.shape.width;
          if (keep) row += job_.shape.width;
        }
      }
    }
    if (keep) group.x = job_.scratch;
    return group;
  }

  Calibrator CalibratorOf(const Group& group) const {
    return {codec_, job_.spec.calibration, *job_.global, group.range, codec_.family == Family::kLevels ? group.Rms() : 0.0f};
  }

  Candidate Best(const Group& group) const {
    return CalibratorOf(group).Best([&](const Scale& scale) {
      return TreeSum(group.count, [&](int64_t k) { return SquaredError(codec_, group.at(k), scale); });
    });
  }

  void StoreKivi(int64_t index, const Group& group) const {
    const Calibrator::Kivi kivi = CalibratorOf(group).KiviScale();
    PutScale(codec_.scale_type, job_.scales, index, kivi.scale_bits);
    PutScale(codec_.scale_type, job_.zeros, index, kivi.minimum_bits);
  }

  void Calibrate() const {
    *job_.global = 1.0f;
    if (job_.spec.scale_type == ScaleType::kE4M3) {
      float largest = 0;
      ForGroups([&](int64_t, const Group& group) { largest = std::max(largest, CalibratorOf(group).TopScale()); });
      *job_.global = E4M3Global(largest);
    }
    ForGroups([&](int64_t index, const Group& group) {
      if (codec_.kivi) return StoreKivi(index, group);
      const Candidate best = Best(group);
      PutScale(job_.spec.scale_type, job_.scales, index, best.bits);
      if (SizesOf(job_.spec, job_.shape).zeros > 0) job_.zeros[index] = static_cast<uint8_t>(best.scale.zero + codec_.zero_offset);
    });
  }

  const QuantizeJob& job_;
  const Codec codec_;
  RowSource source_;
};

void Quantize(const QuantizeJob& job) { Quantizer(job).Run(); }

void Dequantize(const DequantizeJob& job) {
  const Shape& shape = job.shape;
  const TypeInfo& info = Info(job.spec.type);
  const bool scheme = info.family == Family::kScheme;
  const Codec codec = MakeCodec(job.spec);
  for (int64_t b = 0; b < shape.batch; ++b) {
    for (int64_t h = 0; h < shape.heads; ++h) {
      for (int64_t t = job.begin; t < job.end; ++t) {
        float* row = job.out + b * job.batch_stride + h * job.head_stride + (t - job.begin) * job.token_stride;
        const int64_t first = ((b * shape.heads + h) * shape.tokens + t) * shape.width;
        for (int64_t d = 0; scheme && d < shape.width; d += info.block) {
          DecodeSchemeBlock(info.type, job.global, (first + d) / info.block, job.codes, job.scales, row + d);
        }
        for (int64_t d = 0; !scheme && d < shape.width; ++d) {
          const Scale scale = LoadScaleAt(codec, job.scales, job.zeros, job.global, job.grid.Index(b, h, t, d));
          row[d] = Decode(codec, GetCode(job.codes, codec.bits, first + d), scale);
        }
        if (job.hadamard > 0) RotateRow(row, shape.width, job.hadamard);
        if (job.center == nullptr) continue;
        for (int64_t d = 0; d < shape.width; ++d) row[d] = row[d] + FromBF16(job.center[h * shape.width + d]);
      }
    }
  }
}

void Widen(Type type, const void* in, float* out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) out[i] = WidenElement(type, in, i);
}

void Narrow(Type type, const float* in, void* out, int64_t count) {
  if (type == Type::f32) {
    if (count > 0) std::memmove(out, in, static_cast<size_t>(count) * 4);
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    const uint16_t bits = type == Type::f16 ? ToF16(in[i]) : ToBF16(in[i]);
    std::memcpy(static_cast<uint8_t*>(out) + i * 2, &bits, 2);
  }
}

int64_t FirstNonFinite(Type type, const void* data, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    if (!IsFinite(WidenElement(type, data, i))) return i;
  }
  return -1;
}

}  // namespace

const Backend kReferenceBackend = {"reference", [] { return true; }, Quantize, Dequantize, Widen, Narrow, FirstNonFinite};

}  // namespace kvpages
