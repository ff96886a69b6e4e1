// SPDX-License-Identifier: Apache-2.0
// The C ABI: signatures, handles, blobs, errors, and that a failed call writes nothing.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "abi/describe.h"
#include "abi/handles.h"
#include "kvpages.h"

namespace kvpages {
namespace {

std::string BlobText(uint32_t blob) {
  double size = 0;
  EXPECT_EQ(kvp_blob_size(blob, &size, 1), 0);
  std::string text(static_cast<size_t>(size), '?');
  EXPECT_EQ(kvp_blob_read(blob, reinterpret_cast<uint8_t*>(text.data()), text.size()), 0);
  EXPECT_EQ(kvp_release(blob), 0);
  return text;
}
nlohmann::json LastError() {
  uint32_t blob = 0;
  EXPECT_EQ(kvp_last_error(&blob, 1), 0);
  return nlohmann::json::parse(BlobText(blob));
}
uint32_t MakeInstance(const char* kernels = "auto", double max_bytes = 0) {
  uint32_t instance = 0;
  EXPECT_EQ(kvp_instance_create(kernels, std::strlen(kernels), max_bytes, &instance, 1), 0) << LastError();
  return instance;
}
uint32_t Dense(uint32_t instance, const std::vector<float>& values, const std::vector<int64_t>& dims) {
  uint32_t payload = 0;
  EXPECT_EQ(kvp_payload_dense(instance, reinterpret_cast<const uint8_t*>(values.data()), values.size() * 4, "f32", 3, dims.data(),
                              dims.size(), &payload, 1), 0) << LastError();
  return payload;
}

TEST(Abi, DescribesEveryFunctionOnce) {
  uint32_t blob = 0;
  ASSERT_EQ(kvp_describe(&blob, 1), 0);
  const std::string text = BlobText(blob);
  size_t lines = 0;
#define KVP_X(name)                                                        \
  ++lines;                                                                 \
  EXPECT_NE(text.find(#name " "), std::string::npos) << #name;
  KVP_FUNCTIONS(KVP_X)
#undef KVP_X
  EXPECT_EQ(static_cast<size_t>(std::count(text.begin(), text.end(), '\n')), lines);
  EXPECT_NE(text.find("kvp_blob_read ub\n"), std::string::npos) << text;
  EXPECT_NE(text.find("kvp_payload_affine uBTLFBidv\n"), std::string::npos) << text;
}

TEST(Abi, StaleHandlesAreRecognised) {
  const uint32_t instance = MakeInstance();
  const uint32_t payload = Dense(instance, {1, 2}, {2});
  uint32_t blob = 0;
  EXPECT_EQ(kvp_payload_info(instance, &blob, 1), -1) << "a handle of another kind";
  EXPECT_EQ(kvp_release(payload), 0);
  EXPECT_EQ(kvp_release(payload), -11);
  EXPECT_EQ(kvp_payload_info(payload, &blob, 1), -11);
  EXPECT_EQ(LastError()["code"], "ERR_DISPOSED");
  EXPECT_EQ(kvp_payload_info(0, &blob, 1), -11);
  EXPECT_EQ(kvp_release(instance), 0);
}

TEST(Abi, HandlesAreNotReusedSoon) {
  abi::Handles handles;
  std::vector<uint32_t> seen;
  for (int i = 0; i < 5000; ++i) {
    auto handle = handles.Add(std::make_shared<int>(i));
    ASSERT_TRUE(handle.ok());
    seen.push_back(handle.value());
    ASSERT_TRUE(handles.Remove(handle.value()).ok());
  }
  std::sort(seen.begin(), seen.end());
  EXPECT_EQ(std::unique(seen.begin(), seen.end()), seen.end());
  EXPECT_EQ(handles.alive(), 0);
}

TEST(Abi, FailedCallsWriteNothing) {
  const uint32_t instance = MakeInstance();
  const uint32_t payload = Dense(instance, {1, 2, 3, 4}, {2, 2});
  std::vector<uint8_t> out(15, 0xaa);
  EXPECT_EQ(kvp_dequantize(payload, 0, 2, "f32", 3, out.data(), out.size()), -10);
  EXPECT_EQ(out, std::vector<uint8_t>(15, 0xaa));
  EXPECT_EQ(LastError()["expected"], "16");
  uint32_t handle = 77;
  const float bad[2] = {1, 1};
  const int64_t dims[1] = {3};
  EXPECT_EQ(kvp_payload_dense(instance, reinterpret_cast<const uint8_t*>(bad), 8, "f32", 3, dims, 1, &handle, 1), -2);
  EXPECT_EQ(handle, 77u);
  EXPECT_EQ(kvp_release(payload), 0);
  EXPECT_EQ(kvp_release(instance), 0);
}

TEST(Abi, LimitIsReportedAndNothingIsHeld) {
  const uint32_t instance = MakeInstance("auto", 100);
  const uint32_t first = Dense(instance, std::vector<float>(20, 1), {20});
  uint32_t second = 0;
  const std::vector<float> values(10, 1);
  const int64_t dims[1] = {10};
  EXPECT_EQ(kvp_payload_dense(instance, reinterpret_cast<const uint8_t*>(values.data()), 40, "f32", 3, dims, 1, &second, 1), -8);
  EXPECT_EQ(kvp_release(first), 0);
  EXPECT_EQ(kvp_payload_dense(instance, reinterpret_cast<const uint8_t*>(values.data()), 40, "f32", 3, dims, 1, &second, 1), 0);
  uint32_t blob = 0;
  ASSERT_EQ(kvp_instance_info(instance, &blob, 1), 0);
  EXPECT_EQ(nlohmann::json::parse(BlobText(blob))["usedBytes"], 40);
  EXPECT_EQ(kvp_release(second), 0);
  EXPECT_EQ(kvp_release(instance), 0);
}

TEST(Abi, UnknownKernelsAreRefusedByName) {
  uint32_t instance = 0;
  EXPECT_EQ(kvp_instance_create("mmx", 3, 0, &instance, 1), -13);
  const auto error = LastError();
  EXPECT_EQ(error["code"], "ERR_BACKEND");
  EXPECT_NE(error["message"].get<std::string>().find("reference"), std::string::npos);
}

TEST(Abi, HostileDimsAreRefusedBeforeAnyAllocation) {
  const uint32_t instance = MakeInstance();
  uint32_t payload = 0;
  const std::vector<std::vector<int64_t>> bad = {
      {INT64_MAX}, {INT64_MAX, INT64_MAX}, {int64_t{1} << 31, int64_t{1} << 31}, {-1}, {}, {1, 1, 1, 1, 1}, {int64_t{1} << 62, 4}};
  for (const auto& dims : bad) {
    EXPECT_EQ(kvp_payload_dense(instance, nullptr, 0, "f32", 3, dims.data(), dims.size(), &payload, 1), -2);
    EXPECT_EQ(kvp_quantize(instance, nullptr, 0, "f32", 3, dims.data(), dims.size(), nullptr, 0, -1, "int8", 4, "", 0, "", 0, nullptr,
                           0, nullptr, 0, &payload, 1), -2);
  }
  const std::vector<float> data(16, 1);
  const int64_t dims[2] = {4, 4};
  for (const auto& strides : std::vector<std::vector<int64_t>>{{5, 1}, {INT64_MAX, 1}, {-4, 1}, {4, 2}, {4}}) {
    EXPECT_EQ(kvp_quantize(instance, reinterpret_cast<const uint8_t*>(data.data()), 64, "f32", 3, dims, 2, strides.data(),
                           strides.size(), -1, "int8", 4, "", 0, "", 0, nullptr, 0, nullptr, 0, &payload, 1), -2);
  }
  EXPECT_EQ(kvp_release(instance), 0);
}

}  // namespace
}  // namespace kvpages
