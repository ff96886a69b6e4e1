// SPDX-License-Identifier: Apache-2.0
// Memory of the core: a budget that may have a limit, and blocks charged to it. Every allocation whose
// size depends on data goes through here, so that running out is an error value and never an abort.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "core/status.h"

namespace kvpages {

class DeviceBytes;

// Counts bytes held by blocks; `limit` 0 means none. A budget may have a parent (cache inside an
// instance): both must have room. Not thread-safe: a budget belongs to one instance on one thread.
class Budget {
 public:
  explicit Budget(uint64_t limit = 0, std::shared_ptr<Budget> parent = nullptr, const char* name = "maxBytes")
      : limit_(limit), parent_(std::move(parent)), name_(name) {}
  Status Take(uint64_t bytes);
  void Give(uint64_t bytes);
  uint64_t used() const { return used_; }
  uint64_t limit() const { return limit_; }

 private:
  uint64_t limit_, used_ = 0;
  std::shared_ptr<Budget> parent_;
  const char* name_;
};

inline constexpr size_t kAlignment = 64;  // a cache line, and the widest vector

// A block of `size` bytes, aligned to kAlignment and followed by at least kAlignment readable zero bytes,
// so that kernels may load a whole vector at any element. Move-only.
class Bytes {
 public:
  Bytes() = default;
  static Result<Bytes> Allocate(uint64_t size, std::shared_ptr<Budget> budget = nullptr);  // zero filled
  // Not cleared (but for the trailing zeros): for callers that write every byte.
  static Result<Bytes> AllocateRaw(uint64_t size, std::shared_ptr<Budget> budget = nullptr);
  static Result<Bytes> Copy(const void* data, uint64_t size, std::shared_ptr<Budget> budget = nullptr);
  Bytes(Bytes&& other) noexcept { *this = std::move(other); }
  Bytes& operator=(Bytes&& other) noexcept;
  Bytes(const Bytes&) = delete;
  Bytes& operator=(const Bytes&) = delete;
  ~Bytes() { Reset(); }

  uint8_t* data() { return data_; }
  const uint8_t* data() const { return data_; }
  uint64_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  template <typename T>
  T* as() { return reinterpret_cast<T*>(data_); }
  template <typename T>
  const T* as() const { return reinterpret_cast<const T*>(data_); }

 private:
  void Reset();
  uint8_t* data_ = nullptr;
  uint64_t size_ = 0;
  std::shared_ptr<Budget> budget_;
};

// A block that several payloads may hold: never written again. A device's copy of it is made once and goes with it.
class SharedBytes {
 public:
  SharedBytes() = default;
  SharedBytes(Bytes bytes)  // NOLINT(google-explicit-constructor): a block becomes shared where it is stored
      : block_(bytes.empty() ? nullptr : std::make_shared<const Block>(std::move(bytes))) {}
  operator const Bytes&() const { return block_ ? block_->bytes : Nothing(); }  // NOLINT(google-explicit-constructor)
  const uint8_t* data() const { return block_ ? block_->bytes.data() : nullptr; }
  uint64_t size() const { return block_ ? block_->bytes.size() : 0; }
  bool empty() const { return block_ == nullptr; }
  template <typename T>
  const T* as() const { return reinterpret_cast<const T*>(data()); }
  bool Same(const SharedBytes& other) const { return block_ == other.block_; }
  // Where a device keeps its copy; only of a block that is not empty.
  std::shared_ptr<const DeviceBytes>& copy() const { return block_->copy; }

 private:
  struct Block {
    explicit Block(Bytes b) : bytes(std::move(b)) {}
    Bytes bytes;
    mutable std::shared_ptr<const DeviceBytes> copy;
  };
  static const Bytes& Nothing() {
    static const Bytes nothing;
    return nothing;
  }
  std::shared_ptr<const Block> block_;
};

}  // namespace kvpages
