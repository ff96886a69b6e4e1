// SPDX-License-Identifier: Apache-2.0
// Spec strings: type[/axis[/block]][/calibration][/scale-type][+center][+hadamard]. One parser for C++, JavaScript,
// the command line and files.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/shape.h"
#include "core/status.h"
#include "formats/types.h"

namespace kvpages {

struct RowSource;  // formats/row.h

enum class Axis : uint8_t { kTensor, kHead, kToken, kChannel };
enum class Calibration : uint8_t { kGiven, kAbsmax, kMinmax, kMse, kKivi };
enum class ScaleType : uint8_t { kF32, kF16, kBF16, kE4M3, kE8M0 };

// What decoding needs. Dense types and schemes leave every part but `type` at its default.
struct Spec {
  Type type = Type::f32;
  Axis axis = Axis::kTensor;
  int64_t block = 0;  // 0: the whole axis (tensor, head); head_dim when `token` is written without one
  Calibration calibration = Calibration::kAbsmax;
  ScaleType scale_type = ScaleType::kF32;
  bool center = false;
  bool hadamard = false;
  bool operator==(const Spec&) const = default;
};

// What does not change decoding, so is not in the string.
enum class Overflow : uint8_t { kSaturate, kNan };                            // e4m3, e5m2
enum class GlobalScale : uint8_t { kAmax2688, kAmax448, kAmax6, kGiven };     // nvfp4*
enum class MxRule : uint8_t { kFloor, kCeil };                                // mx*
enum class NonFinite : uint8_t { kError, kSaturate, kPass };
enum class HadamardRun : uint8_t { kLargest, kLlamaKey, kLlamaValue };        // run length n; changes bytes, so files record n
struct SpecOptions {
  Overflow overflow = Overflow::kSaturate;
  GlobalScale global = GlobalScale::kAmax2688;
  float given_global = 1.0f;
  MxRule rule = MxRule::kFloor;
  NonFinite non_finite = NonFinite::kError;
  HadamardRun hadamard_run = HadamardRun::kLargest;
};

// ERR_SPEC: says where parsing stopped and which words are allowed there. `argument` names the argument.
Result<Spec> ParseSpec(std::string_view text, const char* argument);
// Every part spelt out; token blocks resolved for `width` (pass 0 to leave an unresolved block out).
std::string CanonicalSpec(const Spec& spec);
// Block 0 of `token` becomes head_dim; refuses what the shape cannot take (ERR_SPEC).
Result<Spec> ResolveSpec(Spec spec, int64_t width, const char* argument);

struct Preset {
  std::string_view name, key, value;  // spec strings
};
const std::vector<Preset>& Presets();
const Preset* FindPreset(std::string_view name);
// A spec string or a preset's name; `value_side` picks the preset's V spec.
Result<Spec> ParseSpecOrPreset(std::string_view text, bool value_side, const char* argument);

// "name=value" words separated by commas: overflow, global, rule, nonFinite, hadamardRun. ERR_ARGUMENT names the word.
Result<SpecOptions> ParseSpecOptions(std::string_view text, const char* argument);
// ERR_ARGUMENT for an option, not at its default, that encoding to the spec has no use for.
Status CheckOptions(const Spec& spec, const SpecOptions& options, const char* argument);
// The words that ParseSpecOptions reads back; defaults are left out.
std::string SpecOptionsText(const SpecOptions& options);

// Every allowed type x axis x calibration x scale-type in canonical form, dense types and schemes included: what
// "every spec" means in a test. Modifiers are not multiplied in.
std::vector<std::string> AllSpecs();

// The affine layout a spec with integer codes has: axis -1 (tensor), 1 (head), 3 (token), 2 (channel).
bool IsAffine(const Spec& spec);  // integer codes, f32 scales, integer zero points in the code's range, no modifier
int AffineAxis(const Spec& spec);
// Scales of a spec over a shape (schemes included; llama.cpp types keep scales inside their blocks: count 0).
Grid ScaleGrid(const Spec& spec, const Shape& shape);

// Byte sizes of the arrays of an encoded payload.
struct ArraySizes {
  int64_t codes = 0;   // packed codes, or whole llama.cpp blocks
  int64_t scales = 0;  // Grid::count x size of the scale type
  int64_t zeros = 0;   // zero points: one byte each (uint minmax, mse, given), scale-type minima (kivi), 0: none
  bool has_global = false;  // one f32: g of e4m3 scales and of nvfp4
  int64_t global() const { return has_global ? 4 : 0; }
  int64_t total() const { return codes + scales + zeros + global(); }
};
ArraySizes SizesOf(const Spec& spec, const Shape& shape);
int ScaleBytes(ScaleType type);
// Stored form of given scales (rounded to the scale type; e4m3 finds its g). ERR_ARGUMENT when one rounds to 0 or
// to infinity.
Status StoreScales(const Spec& spec, const float* scales, int64_t count, uint8_t* out, float* global);
// Elements of the first `valid` rows that lie so far beyond the end of their code's range that a further code would be
// nearer. `row`: scratch of one row.
int64_t CountSaturated(const Spec& spec, const Shape& shape, const Grid& grid, const uint8_t* codes, const uint8_t* scales,
                       const uint8_t* zeros, float global, int64_t valid, const RowSource& source, float* row);
// Run length n of +hadamard for a head_dim: the largest power of two dividing it, or llama.cpp's choice.
int64_t HadamardLength(int64_t width, HadamardRun run);

}  // namespace kvpages
