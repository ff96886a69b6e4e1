// SPDX-License-Identifier: Apache-2.0
#include "formats/spec.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <span>

#include "core/decimal.h"
#include "formats/llama.h"
#include "formats/scales.h"

namespace kvpages {
namespace {

constexpr std::string_view kAxes[] = {"tensor", "head", "token", "channel"};
constexpr std::string_view kCalibrations[] = {"given", "absmax", "minmax", "mse", "kivi"};
constexpr std::string_view kScaleTypes[] = {"f32", "f16", "bf16", "e4m3", "e8m0"};
constexpr int64_t kMaxBlock = int64_t{1} << 32;
constexpr int64_t kDefaultChannelBlock = 16;

bool HasBlock(Axis axis) { return axis == Axis::kToken || axis == Axis::kChannel; }
bool HasParts(const TypeInfo& info) { return info.family != Family::kDense && info.family != Family::kScheme; }
bool IsUnsigned(const TypeInfo& info) { return info.family == Family::kInteger && !info.is_signed; }

// The first calibration is the default one.
std::vector<Calibration> CalibrationsOf(const TypeInfo& info) {
  if (!HasParts(info)) return {};
  if (info.family == Family::kLevels) return {Calibration::kMse};
  if (IsUnsigned(info)) return {Calibration::kMinmax, Calibration::kGiven, Calibration::kMse, Calibration::kKivi};
  return {Calibration::kAbsmax, Calibration::kGiven, Calibration::kMse};
}

std::vector<ScaleType> ScaleTypesOf(Calibration calibration) {
  if (calibration == Calibration::kKivi) return {ScaleType::kF32, ScaleType::kF16, ScaleType::kBF16};
  return {ScaleType::kF32, ScaleType::kF16, ScaleType::kBF16, ScaleType::kE4M3, ScaleType::kE8M0};
}

template <typename E>
std::string_view WordOf(std::span<const std::string_view> words, E value) {
  return words[static_cast<size_t>(value)];
}
template <typename E>
bool Find(std::span<const std::string_view> words, std::string_view word, E* value) {
  const auto at = std::find(words.begin(), words.end(), word);
  if (at == words.end()) return false;
  *value = static_cast<E>(at - words.begin());
  return true;
}
template <typename T>
bool Contains(const std::vector<T>& values, T value) {
  return std::find(values.begin(), values.end(), value) != values.end();
}

std::string Join(const std::vector<std::string_view>& words) {
  std::string text;
  for (const std::string_view word : words) {
    if (!text.empty()) text += ", ";
    text += word;
  }
  return text;
}

std::string Quoted(std::string_view text) {
  constexpr size_t kShown = 40;
  return text.empty() ? "nothing" : "'" + std::string(text.substr(0, kShown)) + (text.size() > kShown ? "...'" : "'");
}

// `position`: where the word begins, after its '/' or '+'.
Error WordError(const char* argument, size_t position, std::string_view word, const std::vector<std::string_view>& allowed) {
  const std::string at = Text(static_cast<int64_t>(position)), list = Join(allowed);
  if (allowed.empty()) return MakeError(Code::kSpec, argument, "nothing may stand at position " + at, Quoted(word));
  return MakeError(Code::kSpec, argument, "at position " + at + " must stand one of " + list, Quoted(word)).Expected(list);
}

std::vector<std::string_view> TypeWords() {
  std::vector<std::string_view> words;
  for (int i = 0; i < TypeCount(); ++i) words.push_back(TypeAt(i).name);
  return words;
}

// Parts in their order; each may be left out.
enum Stage { kAxis, kBlock, kCalibration, kScaleType, kEnd };

class Parser {
 public:
  Parser(std::string_view text, const char* argument) : text_(text), argument_(argument) {}

  Result<Spec> Parse() {
    const std::string_view type = Next();
    const TypeInfo* info = FindType(type);
    if (info == nullptr) return WordError(argument_, 0, type, TypeWords());
    info_ = info;
    spec_.type = info->type;
    if (HasParts(*info)) spec_.calibration = CalibrationsOf(*info)[0];
    stage_ = HasParts(*info) ? kAxis : kEnd;
    while (at_ < text_.size()) {
      const bool modifier = text_[at_] == '+';
      ++at_;
      const size_t position = at_;
      const std::string_view word = Next();
      if (modifier ? Modifier(word) : Part(word)) continue;
      const auto allowed = Allowed(modifier);
      // Where nothing may stand, a separator with nothing behind it is what is wrong.
      if (allowed.empty() && word.empty()) return WordError(argument_, position - 1, text_.substr(position - 1, 1), allowed);
      return WordError(argument_, position, word, allowed);
    }
    if (spec_.axis == Axis::kChannel && spec_.block == 0) spec_.block = kDefaultChannelBlock;
    return spec_;
  }

 private:
  std::string_view Next() {
    const size_t end = std::min(text_.find_first_of("/+", at_), text_.size());
    const std::string_view word = text_.substr(at_, end - at_);
    at_ = end;
    return word;
  }

  bool Modifier(std::string_view word) {
    if (info_->family == Family::kDense) return false;
    stage_ = kEnd;
    if (word == "center" && !spec_.center && !spec_.hadamard) return spec_.center = true;
    if (word == "hadamard" && !spec_.hadamard) return spec_.hadamard = true;
    return false;
  }

  bool Part(std::string_view word) {
    if (spec_.center || spec_.hadamard) return false;
    if (stage_ <= kAxis && Find(kAxes, word, &spec_.axis)) {
      stage_ = HasBlock(spec_.axis) ? kBlock : kCalibration;
      return true;
    }
    if (stage_ == kBlock && Block(word)) {
      stage_ = kCalibration;
      return true;
    }
    if (Calibration found; stage_ <= kCalibration && Find(kCalibrations, word, &found) && Contains(CalibrationsOf(*info_), found)) {
      spec_.calibration = found;
      stage_ = kScaleType;
      return true;
    }
    if (ScaleType found;
        stage_ <= kScaleType && Find(kScaleTypes, word, &found) && Contains(ScaleTypesOf(spec_.calibration), found)) {
      spec_.scale_type = found;
      stage_ = kEnd;
      return true;
    }
    return false;
  }

  bool Block(std::string_view word) {
    if (word.empty() || word[0] < '1' || word[0] > '9') return false;
    const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), spec_.block);
    if (error == std::errc() && end == word.data() + word.size() && spec_.block <= kMaxBlock) return true;
    spec_.block = 0;
    return false;
  }

  // What may stand where parsing stopped.
  std::vector<std::string_view> Allowed(bool modifier) const {
    std::vector<std::string_view> words;
    if (info_->family == Family::kDense) return words;
    if (modifier) {
      if (!spec_.center && !spec_.hadamard) words.push_back("center");
      if (!spec_.hadamard) words.push_back("hadamard");
      return words;
    }
    if (spec_.center || spec_.hadamard) return words;
    if (stage_ <= kAxis) words.insert(words.end(), std::begin(kAxes), std::end(kAxes));
    if (stage_ == kBlock) words.push_back("a block size");
    if (stage_ <= kCalibration) {
      for (const Calibration value : CalibrationsOf(*info_)) words.push_back(WordOf(kCalibrations, value));
    }
    if (stage_ <= kScaleType) {
      for (const ScaleType value : ScaleTypesOf(spec_.calibration)) words.push_back(WordOf(kScaleTypes, value));
    }
    return words;
  }

  std::string_view text_;
  const char* argument_;
  size_t at_ = 0;
  int stage_ = kAxis;
  const TypeInfo* info_ = nullptr;
  Spec spec_;
};

}  // namespace

Result<Spec> ParseSpec(std::string_view text, const char* argument) { return Parser(text, argument).Parse(); }

std::string CanonicalSpec(const Spec& spec) {
  const TypeInfo& info = Info(spec.type);
  std::string text(info.name);
  const auto part = [&](std::string_view word) { (text += '/') += word; };
  if (HasParts(info)) {
    part(WordOf(kAxes, spec.axis));
    if (HasBlock(spec.axis) && spec.block > 0) part(std::to_string(spec.block));
    part(WordOf(kCalibrations, spec.calibration));
    part(WordOf(kScaleTypes, spec.scale_type));
  }
  if (spec.center) text += "+center";
  if (spec.hadamard) text += "+hadamard";
  return text;
}

Result<Spec> ResolveSpec(Spec spec, int64_t width, const char* argument) {
  const TypeInfo& info = Info(spec.type);
  if (info.block > 0 && width % info.block != 0) {
    return MakeError(Code::kSpec, argument, std::string(info.name) + " needs a head_dim that " + Text(int64_t{info.block}) + " divides",
                     Text(width));
  }
  if (!HasParts(info)) return spec;
  if (HasBlock(spec.axis)) {
    if (spec.block < 0 || spec.block > kMaxBlock) {
      return MakeError(Code::kSpec, argument, "block must be 1 to " + Text(kMaxBlock), Text(spec.block));
    }
    // A block longer than the axis is one short block.
    if (spec.axis == Axis::kToken && (spec.block == 0 || spec.block > width)) spec.block = width;
    if (spec.axis == Axis::kChannel && spec.block == 0) spec.block = kDefaultChannelBlock;
  } else if (spec.block != 0) {
    return MakeError(Code::kSpec, argument, std::string(WordOf(kAxes, spec.axis)) + " takes no block", Text(spec.block));
  }
  if (!Contains(CalibrationsOf(info), spec.calibration) || !Contains(ScaleTypesOf(spec.calibration), spec.scale_type)) {
    return MakeError(Code::kSpec, argument, "no such combination", CanonicalSpec(spec));
  }
  return spec;
}

const std::vector<Preset>& Presets() {
  static const auto& presets = *new std::vector<Preset>{
      {"kv4", "lm4/token/64/mse/e4m3+center+hadamard", "lm4/token/64/mse/e4m3+hadamard"},
      {"kv3", "uint3/channel/64/mse/e4m3+hadamard", "lm3/token/64/mse/e4m3+hadamard"},
      {"kv8", "uint8/token/64/minmax/f16+center+hadamard", "uint8/token/64/minmax/f16+hadamard"},
      {"int4-kivi", "int4/channel/16/mse/e4m3", "int4/token/16/mse/e4m3"},
      {"int3-kivi", "int3/channel/16/mse/e4m3", "int3/token/16/mse/e4m3"},
      {"kivi4", "uint4/channel/32/kivi/f16", "uint4/token/32/kivi/f16"},
      {"kivi2", "uint2/channel/32/kivi/f16", "uint2/token/32/kivi/f16"},
      {"nvfp4", "nvfp4", "nvfp4"},
      {"nvfp4-4over6", "nvfp4-4over6", "nvfp4-4over6"},
      {"mxfp4", "mxfp4", "mxfp4"},
      {"mxfp8", "mxfp8", "mxfp8"},
      {"q8_0", "q8_0", "q8_0"},
      {"q4_0", "q4_0", "q4_0"},
      {"q4_1", "q4_1", "q4_1"},
      {"q5_0", "q5_0", "q5_0"},
      {"q5_1", "q5_1", "q5_1"},
      {"iq4_nl", "iq4_nl", "iq4_nl"},
      {"int8", "int8/tensor/absmax/f32", "int8/tensor/absmax/f32"},
      {"fp8", "e4m3/tensor/absmax/f32", "e4m3/tensor/absmax/f32"},
      {"nvfp4-headdim-f32scale", "e2m1tz/token/16/absmax/f32", "e2m1tz/token/16/absmax/f32"},
  };
  return presets;
}

const Preset* FindPreset(std::string_view name) {
  for (const Preset& preset : Presets()) {
    if (preset.name == name) return &preset;
  }
  return nullptr;
}

Result<Spec> ParseSpecOrPreset(std::string_view text, bool value_side, const char* argument) {
  if (const Preset* preset = FindPreset(text)) return ParseSpec(value_side ? preset->value : preset->key, argument);
  const std::string_view type = text.substr(0, text.find_first_of("/+"));
  if (FindType(type) != nullptr) return ParseSpec(text, argument);
  if (FindPreset(type) != nullptr) return WordError(argument, type.size(), text.substr(type.size()), {});  // a preset takes no parts
  std::vector<std::string_view> words = TypeWords();
  for (const Preset& preset : Presets()) {
    if (FindType(preset.name) == nullptr) words.push_back(preset.name);
  }
  return WordError(argument, 0, type, words);
}

namespace {
constexpr std::string_view kNames[] = {"overflow", "global", "rule", "nonFinite", "hadamardRun"};
constexpr std::string_view kOverflow[] = {"saturate", "nan"};
constexpr std::string_view kGlobal[] = {"amax/2688", "amax/448", "amax/6"};
constexpr std::string_view kRule[] = {"floor", "ceil"};
constexpr std::string_view kNonFinite[] = {"error", "saturate", "pass"};
constexpr std::string_view kHadamardRun[] = {"largest", "llama-key", "llama-value"};
}  // namespace

std::string SpecOptionsText(const SpecOptions& options) {
  const SpecOptions usual;
  std::string text;
  const auto add = [&](std::string_view name, std::string_view value) {
    if (!text.empty()) text += ',';
    text.append(name).append("=").append(value);
  };
  if (options.overflow != usual.overflow) add(kNames[0], kOverflow[static_cast<int>(options.overflow)]);
  if (options.global == GlobalScale::kGiven) add(kNames[1], "given:" + Text(static_cast<double>(options.given_global)));
  else if (options.global != usual.global) add(kNames[1], kGlobal[static_cast<int>(options.global)]);
  if (options.rule != usual.rule) add(kNames[2], kRule[static_cast<int>(options.rule)]);
  if (options.non_finite != usual.non_finite) add(kNames[3], kNonFinite[static_cast<int>(options.non_finite)]);
  if (options.hadamard_run != usual.hadamard_run) add(kNames[4], kHadamardRun[static_cast<int>(options.hadamard_run)]);
  return text;
}

Result<SpecOptions> ParseSpecOptions(std::string_view text, const char* argument) {
  SpecOptions options;
  const auto list = [](std::span<const std::string_view> words) { return Join({words.begin(), words.end()}); };
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find(',', at), text.size());
    const std::string_view word = text.substr(at, end - at);
    at = end + 1;
    const size_t equals = std::min(word.find('='), word.size());
    const std::string_view name = word.substr(0, equals);
    std::string_view value = word.substr(std::min(equals + 1, word.size()));
    const auto wrong = [&](std::string allowed) {
      return MakeError(Code::kArgument, argument, std::string(name) + " must be one of " + allowed, Quoted(value)).Expected(allowed);
    };
    if (name == "overflow") {
      if (!Find(kOverflow, value, &options.overflow)) return wrong(list(kOverflow));
    } else if (name == "global") {
      if (Find(kGlobal, value, &options.global)) continue;
      if (value.starts_with("given:")) value.remove_prefix(6);
      const auto given = value.size() < 64 ? ParseFloat(value) : std::nullopt;
      if (!given || !(*given > 0) || !std::isfinite(*given)) return wrong(list(kGlobal) + ", a finite number > 0");
      options.global = GlobalScale::kGiven;
      options.given_global = *given;
    } else if (name == "rule") {
      if (!Find(kRule, value, &options.rule)) return wrong(list(kRule));
    } else if (name == "nonFinite") {
      if (!Find(kNonFinite, value, &options.non_finite)) return wrong(list(kNonFinite));
    } else if (name == "hadamardRun") {
      if (!Find(kHadamardRun, value, &options.hadamard_run)) return wrong(list(kHadamardRun));
    } else {
      return MakeError(Code::kArgument, argument, "option must be one of " + list(kNames), Quoted(word)).Expected(list(kNames));
    }
  }
  return options;
}

Status CheckOptions(const Spec& spec, const SpecOptions& options, const char* argument) {
  const SpecOptions usual;
  const struct {
    bool set, fits;
    std::string_view name;
    const char* where;
  } all[] = {
      {options.overflow != usual.overflow, spec.type == Type::e4m3 || spec.type == Type::e5m2, kNames[0], "e4m3 and e5m2"},
      {options.global != usual.global, spec.type == Type::nvfp4 || spec.type == Type::nvfp4_4over6, kNames[1], "nvfp4 and nvfp4-4over6"},
      {options.rule != usual.rule, spec.type == Type::mxfp4 || spec.type == Type::mxfp8, kNames[2], "mxfp4 and mxfp8"},
      {options.hadamard_run != usual.hadamard_run, spec.hadamard, kNames[4], "+hadamard"},
  };
  for (const auto& option : all) {
    if (option.set && !option.fits) {
      return MakeError(Code::kArgument, argument, std::string(option.name) + " goes with " + option.where + " only", CanonicalSpec(spec));
    }
  }
  return Ok();
}

std::vector<std::string> AllSpecs() {
  std::vector<std::string> specs;
  for (int i = 0; i < TypeCount(); ++i) {
    const TypeInfo& info = TypeAt(i);
    if (!HasParts(info)) specs.emplace_back(info.name);
    for (const Calibration calibration : CalibrationsOf(info)) {
      for (const Axis axis : {Axis::kTensor, Axis::kHead, Axis::kToken, Axis::kChannel}) {
        for (const ScaleType scale_type : ScaleTypesOf(calibration)) {
          const int64_t block = axis == Axis::kToken ? 32 : axis == Axis::kChannel ? kDefaultChannelBlock : 0;
          specs.push_back(CanonicalSpec({info.type, axis, block, calibration, scale_type}));
        }
      }
    }
  }
  return specs;
}

bool IsAffine(const Spec& spec) {
  const TypeInfo& info = Info(spec.type);
  if (info.family != Family::kInteger || info.onnx == 0 || spec.scale_type != ScaleType::kF32) return false;
  if (spec.center || spec.hadamard || spec.calibration == Calibration::kKivi) return false;
  return info.is_signed || spec.calibration != Calibration::kMse || info.bits == 8;  // else the zero point may lie outside
}

int AffineAxis(const Spec& spec) {
  constexpr int kAxisOf[] = {-1, 1, 3, 2};
  return kAxisOf[static_cast<size_t>(spec.axis)];
}

Grid ScaleGrid(const Spec& spec, const Shape& shape) {
  const TypeInfo& info = Info(spec.type);
  if (HasParts(info)) return AffineGrid(shape, AffineAxis(spec), spec.block);
  if (info.family == Family::kScheme && LlamaBlockBytes(spec.type) == 0) return AffineGrid(shape, 3, info.block);
  Grid none;
  none.count = 0;
  return none;
}

int ScaleBytes(ScaleType type) { return ScaleSize(type); }

ArraySizes SizesOf(const Spec& spec, const Shape& shape) {
  const TypeInfo& info = Info(spec.type);
  const int64_t elements = shape.elements(), count = ScaleGrid(spec, shape).count;
  ArraySizes sizes;
  if (const int64_t bytes = LlamaBlockBytes(spec.type); bytes > 0) {
    sizes.codes = elements / info.block * bytes;
    return sizes;
  }
  sizes.codes = PackedBytes(info.bits, elements);
  if (info.family == Family::kScheme) {
    sizes.scales = count;
    sizes.has_global = info.block == 16;
    return sizes;
  }
  if (!HasParts(info)) return sizes;
  sizes.scales = count * ScaleBytes(spec.scale_type);
  if (spec.calibration == Calibration::kKivi) {
    sizes.zeros = sizes.scales;
  } else if (info.family == Family::kInteger && (!info.is_signed || spec.calibration == Calibration::kGiven)) {
    sizes.zeros = count;
  }
  sizes.has_global = spec.scale_type == ScaleType::kE4M3;
  return sizes;
}

Status StoreScales(const Spec& spec, const float* scales, int64_t count, uint8_t* out, float* global) {
  float largest = 0;
  for (int64_t i = 0; i < count; ++i) largest = std::max(largest, scales[i]);
  const float g = spec.scale_type == ScaleType::kE4M3 ? E4M3Global(largest) : 1.0f;
  const bool e8m0_zero = Info(spec.type).family != Family::kInteger;
  for (int64_t i = 0; i < count; ++i) {
    PutScale(spec.scale_type, out, i, StoreScale(spec.scale_type, scales[i], g).bits);
    if (LoadScale(spec.scale_type, out, i, g, e8m0_zero) == 0) {
      return MakeError(Code::kArgument, "scale", "must not become 0 as " + std::string(WordOf(kScaleTypes, spec.scale_type)),
                       Text(static_cast<double>(scales[i])) + (count > 1 ? " at index " + Text(i) : ""));
    }
    const bool infinite = (spec.scale_type == ScaleType::kF16 && ToF16(scales[i]) == 0x7c00) ||
                          (spec.scale_type == ScaleType::kBF16 && ToBF16(scales[i]) == 0x7f80);
    if (infinite) {
      return MakeError(Code::kArgument, "scale", "lies beyond the range of " + std::string(WordOf(kScaleTypes, spec.scale_type)),
                       Text(static_cast<double>(scales[i])) + (count > 1 ? " at index " + Text(i) : ""));
    }
  }
  if (global != nullptr) *global = g;
  return Ok();
}

int64_t HadamardLength(int64_t width, HadamardRun run) {
  const int64_t largest = width & -width;
  if (run == HadamardRun::kLargest) return largest;
  if (largest < 64) return 1;  // llama.cpp does not rotate such heads; n = 1 is the identity
  return run == HadamardRun::kLlamaKey ? largest : 64;
}

}  // namespace kvpages
