// SPDX-License-Identifier: Apache-2.0
#include "backends/cuda/pool.h"

#include <algorithm>

namespace kvpages::cuda {
namespace {

constexpr uint64_t kPieceStep = 256;  // as the device aligns
constexpr uint64_t kSlabBytes = uint64_t{2} << 20;
constexpr uint64_t kMostPieces = 256;

}  // namespace

Pool::~Pool() {
  for (const auto& [at, slab] : slabs_) device_->Free(at);
}

Result<uint64_t> Pool::Allocate(uint64_t bytes) {
  const uint64_t piece = (bytes + kPieceStep - 1) / kPieceStep * kPieceStep;
  std::vector<DevicePointer>& room = with_room_[piece];
  if (room.empty()) {
    uint64_t pieces = std::clamp<uint64_t>(kSlabBytes / piece, 1, kMostPieces);
    auto at = device_->Allocate(piece * pieces);
    if (!at.ok() && at.error().code == Code::kMemory && pieces > 1) {
      pieces = 1;
      at = device_->Allocate(piece);
    }
    if (!at.ok()) {
      with_room_.erase(piece);
      return std::move(at.error());
    }
    Slab slab;
    slab.piece = piece;
    slab.bytes = piece * pieces;
    for (auto i = static_cast<uint32_t>(pieces); i > 0; --i) slab.free.push_back(i - 1);
    held_ += slab.bytes;
    slabs_.emplace(at.value(), std::move(slab));
    room.push_back(at.value());
  }
  const DevicePointer begin = room.back();
  Slab& slab = slabs_.at(begin);
  const uint32_t index = slab.free.back();
  slab.free.pop_back();
  ++slab.used;
  if (slab.free.empty()) room.pop_back();
  return begin + index * piece;
}

void Pool::Free(uint64_t at, uint64_t) {
  auto found = slabs_.upper_bound(at);
  --found;
  Slab& slab = found->second;
  std::vector<DevicePointer>& room = with_room_[slab.piece];
  if (--slab.used == 0) {
    std::erase(room, found->first);
    if (room.empty()) with_room_.erase(slab.piece);
    held_ -= slab.bytes;
    device_->Free(found->first);
    slabs_.erase(found);
    return;
  }
  if (slab.free.empty()) room.push_back(found->first);
  slab.free.push_back(static_cast<uint32_t>((at - found->first) / slab.piece));
}

}  // namespace kvpages::cuda
