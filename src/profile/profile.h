// SPDX-License-Identifier: Apache-2.0
// Sorted-profile encoding of a tensor: its largest magnitudes exactly, a distribution fitted to all other values, and
// the rank of each; with the Kolmogorov-Smirnov distance D of the fit as receipt, and the dense values where D is too
// large. Behaviour and bytes (magic MSPQ) are those of mixle 0.8.2, numbers on request those of its first generation.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/bytes.h"
#include "core/status.h"
#include "profile/values.h"

namespace kvpages {

enum class TailFamily : uint8_t { gaussian, gamma };
Result<TailFamily> FindFamily(std::string_view name, const char* argument);
const char* FamilyName(TailFamily family);

// A fitted distribution. Gaussian: location is the mean, scale2 the variance. Gamma: shape and scale.
struct Tail {
  TailFamily family = TailFamily::gaussian;
  double first = 0;   // mu, or k
  double second = 1;  // sigma^2, or theta
  double Cdf(double x) const;
  double Quantile(double p) const;
};

struct ProfileOptions {
  int64_t top_k = 0;
  TailFamily family = TailFamily::gaussian;
  double threshold = 0.05;  // D above it: dense
  bool gen1 = false;        // raw moments, absolute variance floors, f32 storage, estimated size
};

struct Profile {
  std::vector<int64_t> dims;
  int64_t count = 0;
  ValueType source = ValueType::f32;  // f64, f32 or f16; bf16 input is stored as f32
  bool gen1 = false;
  bool fallback = false;
  double d = 0;
  int64_t n_tail = 0;     // 0 with fallback
  int index_bytes = 1;    // 1, 2 or 4: what an index into the tensor takes
  Tail tail;
  std::string tail_json;  // of a file, kept word for word; empty for a profile that was fitted here
  Bytes values;           // of type source: head values by descending magnitude, or all values
  Bytes head;             // index of each head value
  Bytes permutation;      // permutation[r]: where the r-th smallest tail value stands
  int64_t head_count() const { return fallback ? 0 : count - n_tail; }
};

// ERR_NON_FINITE, ERR_ARGUMENT (top_k, threshold, a value outside the family's support), ERR_LIMIT.
Result<Profile> FitProfile(const Values& tensor, const ProfileOptions& options, const std::shared_ptr<Budget>& budget);

// Writes count elements of profile.source: head values exact, every tail value replaced by the fitted quantile of its
// rank. ERR_NON_FINITE when a quantile is not finite; `out` is then untouched.
Status Reconstruct(const Profile& profile, uint8_t* out);

// Exact bytes of the serialized form; of generation 1, which has none, its estimate.
uint64_t ProfileBytes(const Profile& profile);

// Serialized form, generation 2. `out` must hold ProfileBytes (ERR_BUFFER). ERR_UNSUPPORTED for generation 1.
Status SerializeProfile(const Profile& profile, std::span<uint8_t> out);
// Checks everything before it allocates: ERR_CORRUPT, ERR_UNSUPPORTED with the position.
Result<Profile> ParseProfile(std::span<const uint8_t> bytes, const std::shared_ptr<Budget>& budget);

// D of a tensor's values, less its `drop` largest magnitudes, against a fitted tail.
Result<double> KsAgainst(const Values& tensor, int64_t drop, const Tail& tail, const std::shared_ptr<Budget>& budget,
                         const char* argument);

struct Anomaly {
  double d = 0, reference_d = 0, limit = 0;
  bool is_anomaly = false;  // d > limit = max(ratio * reference_d, reference_d + margin)
};
Result<Anomaly> DetectAnomaly(const Values& tensor, const Profile& reference, double ratio, double margin,
                              const std::shared_ptr<Budget>& budget);

// One element of an index array, low byte first.
int64_t IndexAt(const uint8_t* indices, int index_bytes, int64_t at);
// Bytes of the smallest unsigned integer that addresses `count` elements.
int IndexBytes(int64_t count);

}  // namespace kvpages
