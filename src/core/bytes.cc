// SPDX-License-Identifier: Apache-2.0
#include "core/bytes.h"

#include <cstdlib>
#include <cstring>

namespace kvpages {

Status Budget::Take(uint64_t bytes) {
  if (limit_ != 0 && bytes > limit_ - used_) {
    return MakeError(Code::kLimit, name_,
                     "holds " + std::to_string(used_) + " of " + std::to_string(limit_) + " bytes; no room for " +
                         std::to_string(bytes) + " more")
        .Expected(std::to_string(limit_))
        .Actual(std::to_string(used_ + bytes));
  }
  if (parent_) KVP_TRY(parent_->Take(bytes));
  used_ += bytes;
  return Ok();
}

void Budget::Give(uint64_t bytes) {
  used_ -= bytes;
  if (parent_) parent_->Give(bytes);
}

Result<Bytes> Bytes::AllocateRaw(uint64_t size, std::shared_ptr<Budget> budget) {
  Bytes block;
  if (size == 0) return block;
  if (size > SIZE_MAX - 2 * kAlignment) {
    return MakeError(Code::kMemory, "", "out of memory: " + std::to_string(size) + " bytes do not fit the address space");
  }
  if (budget) KVP_TRY(budget->Take(size));
  const size_t padded = (static_cast<size_t>(size) + kAlignment - 1) / kAlignment * kAlignment + kAlignment;
  void* memory = std::aligned_alloc(kAlignment, padded);
  if (memory == nullptr) {
    if (budget) budget->Give(size);
    return MakeError(Code::kMemory, "", "out of memory: could not allocate " + std::to_string(size) + " bytes");
  }
  block.data_ = static_cast<uint8_t*>(memory);
  block.size_ = size;
  block.budget_ = std::move(budget);
  std::memset(block.data_ + size, 0, padded - static_cast<size_t>(size));
  return block;
}

Result<Bytes> Bytes::Allocate(uint64_t size, std::shared_ptr<Budget> budget) {
  KVP_ASSIGN(Bytes block, AllocateRaw(size, std::move(budget)));
  if (size != 0) std::memset(block.data_, 0, static_cast<size_t>(size));
  return block;
}

Result<Bytes> Bytes::Copy(const void* data, uint64_t size, std::shared_ptr<Budget> budget) {
  KVP_ASSIGN(Bytes block, AllocateRaw(size, std::move(budget)));
  if (size != 0) std::memcpy(block.data_, data, static_cast<size_t>(size));
  return block;
}

Bytes& Bytes::operator=(Bytes&& other) noexcept {
  if (this != &other) {
    Reset();
    data_ = std::exchange(other.data_, nullptr);
    size_ = std::exchange(other.size_, 0);
    budget_ = std::move(other.budget_);
  }
  return *this;
}

void Bytes::Reset() {
  if (data_ == nullptr) return;
  std::free(data_);
  if (budget_) budget_->Give(size_);
  data_ = nullptr;
  size_ = 0;
  budget_.reset();
}

}  // namespace kvpages
