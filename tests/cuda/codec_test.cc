// SPDX-License-Identifier: Apache-2.0
// The CUDA backend's codec on a device: the reference's bytes for every spec.
#include "backends/cuda/codec.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>

#include "backends/reference/reference.h"
#include "cuda/devices.h"
#include "cuda/memory.h"
#include "support/payloads.h"

namespace kvpages::cuda {
namespace {

using test::Encoded;

struct Case {
  std::string spec;
  Shape shape;
  int64_t valid = -1;
  Type source_type = Type::f32;
  SpecOptions options;
  int payloads = 1;
  float tail = 1;  // factor of the last eight elements
};

// Values of many magnitudes with rows of zeros and equal values.
std::vector<float> Values(std::mt19937& random, int64_t count, int64_t width) {
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = normal(random) * (random() % 31 == 0 ? 30.0f : 1.0f);
  for (int64_t row = 0; row < count / width; row += 7) {
    float* at = values.data() + row * width;
    for (int64_t d = 0; d < width; ++d) at[d] = row % 3 == 0 ? 0.0f : row % 3 == 1 ? at[d] * 1e-30f : -2.5f;
  }
  return values;
}

std::vector<uint8_t> Fetch(Device& device, DevicePointer from, uint64_t bytes) {
  std::vector<uint8_t> data(bytes);
  EXPECT_TRUE(device.Download(data.data(), from, bytes).ok());
  return data;
}

std::string FirstDifference(const std::vector<uint8_t>& got, const Bytes& want) { return test::DifferenceOf(got, test::BytesOf(want)); }

// Encodes and decodes on the device and compares with the reference; `poison` puts numbers that are not finite in.
void Check(const std::shared_ptr<Device>& device, const Case& c, bool poison = false) {
  SCOPED_TRACE(c.spec + " " + Text(c.shape) + " valid " + std::to_string(c.valid) + " from " + std::string(Info(c.source_type).name));
  std::mt19937 random(static_cast<uint32_t>(std::hash<std::string>()(c.spec)));
  const int64_t elements = c.shape.elements(), size = Info(c.source_type).bits / 8;
  const int64_t valid = c.valid < 0 ? c.shape.tokens : c.valid;
  const auto parsed = ParseSpec(c.spec, "spec");
  ASSERT_TRUE(parsed.ok());
  const auto resolved = ResolveSpec(parsed.value(), c.shape.width, "spec");
  ASSERT_TRUE(resolved.ok());
  const Spec& spec = resolved.value();
  const Grid grid = ScaleGrid(spec, c.shape);
  const ArraySizes sizes = SizesOf(spec, c.shape);
  const bool dense = Info(spec.type).family == Family::kDense;

  test::Given given;
  if (spec.calibration == Calibration::kGiven) {
    for (int64_t i = 0; i < grid.count; ++i) {
      given.scales.push_back(0.01f + 0.001f * static_cast<float>(random() % 100));
      if (sizes.zeros > 0) given.zeros.push_back(Info(spec.type).is_signed ? static_cast<uint8_t>(random() % 3 - 1) : static_cast<uint8_t>(random() % 3));
    }
  }
  std::vector<uint16_t> center;
  for (int64_t i = 0; i < c.shape.heads * c.shape.width; ++i) center.push_back(ToBF16(0.01f * static_cast<float>(i % 37)));

  Memory memory(*device);
  DeviceCodec codec(device);
  std::vector<Encoded> want;
  std::vector<EncodeItem> items;
  std::vector<DecodeItem> back;
  int64_t hadamard = 0;
  for (int i = 0; i < c.payloads; ++i) {
    std::vector<float> x = Values(random, elements, c.shape.width);
    for (size_t k = x.size() < 8 ? 0 : x.size() - 8; k < x.size(); ++k) x[k] *= c.tail;
    if (poison) {
      for (size_t k = 0; k < x.size(); k += 29) x[k] = k % 3 == 0 ? NAN : k % 3 == 1 ? INFINITY : -INFINITY;
    }
    std::vector<uint8_t> source(static_cast<size_t>(elements * size));
    kReferenceBackend.narrow(c.source_type, x.data(), source.data(), elements);
    EncodeItem item;
    if (dense) {
      // The reference's path to a dense payload: widen, narrow, zeros behind the valid rows.
      Encoded encoded;
      encoded.spec = spec;
      encoded.shape = c.shape;
      encoded.codes = std::move(Bytes::Allocate(static_cast<uint64_t>(elements * Info(spec.type).bits / 8)).value());
      std::vector<float> wide(static_cast<size_t>(elements));
      kReferenceBackend.widen(c.source_type, source.data(), wide.data(), elements);
      for (int64_t k = 0; k < elements; ++k) {
        if (k / c.shape.width % c.shape.tokens >= valid) wide[static_cast<size_t>(k)] = 0;
      }
      kReferenceBackend.narrow(spec.type, wide.data(), encoded.codes.data(), elements);
      want.push_back(std::move(encoded));
    } else {
      want.push_back(test::Quantize(kReferenceBackend, c.spec, c.shape, source.data(), c.source_type, valid, c.options, given, center));
    }
    const Encoded& right = want.back();
    hadamard = right.hadamard;
    item.source = memory.Put(source.data(), source.size());
    item.token_stride = c.shape.width;
    item.head_stride = c.shape.tokens * c.shape.width;
    item.batch_stride = c.shape.heads * item.head_stride;
    item.valid = valid;
    item.center = spec.center ? memory.Put(center.data(), center.size() * 2) : 0;
    item.codes = memory.Take(right.codes.size());
    item.scales = memory.Take(right.scales.size());
    item.zeros = memory.Take(right.zeros.size());
    item.global = memory.Take(4);
    if (!given.scales.empty()) {
      ASSERT_TRUE(device->Upload(item.scales, right.scales.data(), right.scales.size(), 1, 0, 0).ok());
      ASSERT_TRUE(device->Upload(item.zeros, right.zeros.data(), right.zeros.size(), 1, 0, 0).ok());
      ASSERT_TRUE(device->Upload(item.global, &right.global, 4, 1, 0, 0).ok());
    }
    items.push_back(item);
    DecodeItem decode;
    decode.codes = item.codes;
    decode.scales = item.scales;
    decode.zeros = item.zeros;
    decode.global = dense ? 0 : item.global;
    decode.center = item.center;
    decode.begin = i % 2;
    decode.end = c.shape.tokens;
    const int64_t rows = decode.end - decode.begin;
    decode.out = memory.Take(static_cast<uint64_t>(std::max<int64_t>(elements, 1)) * 4);
    decode.token_stride = c.shape.width;
    decode.head_stride = rows * c.shape.width;
    decode.batch_stride = c.shape.heads * decode.head_stride;
    back.push_back(decode);
  }
  const Status encoded = codec.Encode(spec, c.options, c.shape, c.source_type, hadamard, items);
  ASSERT_TRUE(encoded.ok()) << encoded.error().message;
  const Status decoded = codec.Decode(spec, c.shape, grid, hadamard, back);
  ASSERT_TRUE(decoded.ok()) << decoded.error().message;
  for (size_t i = 0; i < want.size(); ++i) {
    const Encoded& right = want[i];
    ASSERT_EQ(FirstDifference(Fetch(*device, items[i].scales, right.scales.size()), right.scales), "") << "scales of payload " << i;
    ASSERT_EQ(FirstDifference(Fetch(*device, items[i].zeros, right.zeros.size()), right.zeros), "") << "zeros of payload " << i;
    if (!dense) {
      const std::vector<uint8_t> global = Fetch(*device, items[i].global, 4);
      ASSERT_EQ(std::memcmp(global.data(), &right.global, 4), 0) << "global of payload " << i;
    }
    ASSERT_EQ(FirstDifference(Fetch(*device, items[i].codes, right.codes.size()), right.codes), "") << "codes of payload " << i;
    std::vector<float> values;
    if (dense) {
      values.resize(static_cast<size_t>(elements));
      kReferenceBackend.widen(spec.type, right.codes.data(), values.data(), elements);
      if (back[i].begin > 0) continue;
    } else {
      values = test::Dequantize(kReferenceBackend, right, back[i].begin);
    }
    const std::vector<uint8_t> bytes = Fetch(*device, back[i].out, values.size() * 4);
    std::vector<float> got(values.size());
    if (!got.empty()) std::memcpy(got.data(), bytes.data(), bytes.size());
    ASSERT_EQ(test::Difference(got, values), "") << "values of payload " << i;
  }
}

// Rows that cannot be read eight elements at a time, and rows that can.
TEST(CudaCodec, EverySpecGivesTheReferencesBytes) {
  KVP_DEVICE_OR_SKIP(device);
  const Type types[] = {Type::f32, Type::f16, Type::bf16};
  size_t turn = 0;
  for (const std::string& spec : AllSpecs()) {
    const Spec parsed = ParseSpec(spec, "spec").value();
    const bool scheme = SchemeBlock(parsed.type) > 0;
    if (!scheme) Check(device, {spec, {1, 2, 17, 5}, -1, types[turn % 3], {}, 1, 1});
    // Searches take longest.
    const int payloads = parsed.calibration == Calibration::kMse ? 1 : 2;
    Check(device, {spec, {2, 1, 5, scheme ? 32 : 16}, 3, types[(turn + 1) % 3], {}, payloads});
    if (HasFatalFailure()) return;
    ++turn;
  }
}

TEST(CudaCodec, EveryPresetGivesTheReferencesBytes) {
  KVP_DEVICE_OR_SKIP(device);
  for (const Preset& preset : Presets()) {
    for (const std::string_view spec : {preset.key, preset.value}) {
      Check(device, {std::string(spec), {1, 2, 16, 128}, -1, Type::bf16, {}, 2});
      Check(device, {std::string(spec), {1, 1, 32, 96}, 21, Type::f32, {}, 1});
      if (HasFatalFailure()) return;
    }
  }
}

TEST(CudaCodec, NumbersThatAreNotFinite) {
  KVP_DEVICE_OR_SKIP(device);
  size_t turn = 0;
  for (const NonFinite rule : {NonFinite::kSaturate, NonFinite::kPass}) {
    for (const std::string& spec : AllSpecs()) {
      const Spec parsed = ParseSpec(spec, "spec").value();
      if (Info(parsed.type).family != Family::kScheme && parsed.scale_type != ScaleType::kF32 && parsed.scale_type != ScaleType::kE4M3) continue;
      Case c{spec, {1, 1, 17, turn++ % 2 == 0 || SchemeBlock(parsed.type) > 0 ? int64_t{32} : int64_t{9}}, 15, Type::f32, {}, 1};
      c.options.non_finite = rule;
      c.options.overflow = rule == NonFinite::kPass ? Overflow::kNan : Overflow::kSaturate;
      Check(device, c, true);
      if (HasFatalFailure()) return;
    }
  }
}

// Groups larger than a block of threads, more partial sums than one holds, blocks of a warp, whole rows rotated.
TEST(CudaCodec, LargerPayloads) {
  KVP_DEVICE_OR_SKIP(device);
  for (const char* spec : {"int4/tensor/mse/f32", "lm3/head/mse/e4m3", "int8/tensor/absmax/f16+center+hadamard", "nvfp4+hadamard", "nvfp4-4over6",
                           "lm4/token/256/mse/e4m3+center+hadamard", "uint3/token/128/mse/bf16", "int8/channel/64/absmax/f32",
                           "uint4/channel/24/minmax/e4m3", "int3/head/absmax/f32"}) {
    Check(device, {spec, {1, 2, 40, 256}, 37, Type::bf16, {}, 1});
    if (HasFatalFailure()) return;
  }
}

// Threads beyond the last row must not add to what the payload's e4m3 scales are relative to.
TEST(CudaCodec, LastWarpIsPartlyIdle) {
  KVP_DEVICE_OR_SKIP(device);
  for (const char* spec : {"lm4/token/64/mse/e4m3+hadamard", "int4/token/32/absmax/e4m3+hadamard", "int8/token/16/mse/e4m3"}) {
    Check(device, {spec, {1, 1, 3, 64}, -1, Type::bf16, {}, 1, 100.0f});
  }
}

TEST(CudaCodec, OptionsOfSchemes) {
  KVP_DEVICE_OR_SKIP(device);
  Case c{"nvfp4", {1, 1, 5, 32}, -1, Type::f32, {}, 1};
  for (const GlobalScale global : {GlobalScale::kAmax448, GlobalScale::kAmax6, GlobalScale::kGiven}) {
    c.options.global = global;
    c.options.given_global = 0.125f;
    Check(device, c);
  }
  for (const char* spec : {"mxfp4", "mxfp8"}) {
    c = {spec, {1, 1, 5, 32}, -1, Type::f32, {}, 1};
    c.options.rule = MxRule::kCeil;
    Check(device, c);
  }
}

}  // namespace
}  // namespace kvpages::cuda
