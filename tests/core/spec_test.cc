// SPDX-License-Identifier: Apache-2.0
// Spec strings, options, presets, sizes and scale grids.
#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "backends/backend.h"
#include "formats/scales.h"
#include "formats/spec.h"

namespace kvpages::test {
namespace {

std::string Canonical(std::string_view text) {
  const auto spec = ParseSpec(text, "spec");
  return spec.ok() ? CanonicalSpec(spec.value()) : std::string(CodeText(spec.error().code)) + " " + spec.error().message;
}

TEST(Spec, DefaultsAreFilledIn) {
  EXPECT_EQ(Canonical("int8"), "int8/tensor/absmax/f32");
  EXPECT_EQ(Canonical("uint4"), "uint4/tensor/minmax/f32");
  EXPECT_EQ(Canonical("lm4"), "lm4/tensor/mse/f32");
  EXPECT_EQ(Canonical("e4m3"), "e4m3/tensor/absmax/f32");
  EXPECT_EQ(Canonical("int4/channel"), "int4/channel/16/absmax/f32");
  EXPECT_EQ(Canonical("int4/token"), "int4/token/absmax/f32");  // until the head_dim is known
  EXPECT_EQ(Canonical("int4/mse/e4m3"), "int4/tensor/mse/e4m3");
  EXPECT_EQ(Canonical("int4/e4m3"), "int4/tensor/absmax/e4m3");
  EXPECT_EQ(Canonical("uint2/channel/32/kivi/f16"), "uint2/channel/32/kivi/f16");
  EXPECT_EQ(Canonical("lm4/token/64/mse/e4m3+center+hadamard"), "lm4/token/64/mse/e4m3+center+hadamard");
  EXPECT_EQ(Canonical("e4m3/head/given/bf16"), "e4m3/head/given/bf16");
  for (const char* whole : {"f32", "f16", "bf16", "nvfp4", "nvfp4-4over6", "q4_0+hadamard", "mxfp8+center+hadamard"}) {
    EXPECT_EQ(Canonical(whole), whole);
  }
  EXPECT_EQ(Canonical("float16"), "f16");
}

TEST(Spec, CanonicalFormIsAFixedPoint) {
  const auto all = AllSpecs();
  EXPECT_EQ(all.size(), 841u);
  EXPECT_EQ(std::set<std::string>(all.begin(), all.end()).size(), all.size());
  for (const std::string& spec : all) EXPECT_EQ(Canonical(spec), spec);
}

TEST(Spec, ErrorsSayWhereAndWhatIsAllowed) {
  EXPECT_EQ(Canonical("int4/tokn/16"),
            "ERR_SPEC spec: at position 5 must stand one of tensor, head, token, channel, absmax, given, mse, f32, f16, bf16, e4m3, e8m0, "
            "got 'tokn'");
  EXPECT_EQ(Canonical("int4/token/0"), "ERR_SPEC spec: at position 11 must stand one of a block size, absmax, given, mse, f32, f16, bf16, e4m3, e8m0, got '0'");
  EXPECT_EQ(Canonical("uint4/token/16/kivi/e4m3"), "ERR_SPEC spec: at position 20 must stand one of f32, f16, bf16, got 'e4m3'");
  EXPECT_EQ(Canonical("int4/kivi"),
            "ERR_SPEC spec: at position 5 must stand one of tensor, head, token, channel, absmax, given, mse, f32, f16, bf16, e4m3, e8m0, "
            "got 'kivi'");
  EXPECT_EQ(Canonical("int4/token/16/absmax/f32/f32"), "ERR_SPEC spec: nothing may stand at position 25, got 'f32'");
  EXPECT_EQ(Canonical("nvfp4/token"), "ERR_SPEC spec: nothing may stand at position 6, got 'token'");
  EXPECT_EQ(Canonical("f32+center"), "ERR_SPEC spec: nothing may stand at position 4, got 'center'");
  EXPECT_EQ(Canonical("q4_0/"), "ERR_SPEC spec: nothing may stand at position 4, got '/'");
  EXPECT_EQ(Canonical("int8+hadamard+"), "ERR_SPEC spec: nothing may stand at position 13, got '+'");
  EXPECT_EQ(Canonical("int8+hadamard+center"), "ERR_SPEC spec: nothing may stand at position 14, got 'center'");
  EXPECT_EQ(Canonical("int8+centre"), "ERR_SPEC spec: at position 5 must stand one of center, hadamard, got 'centre'");
  EXPECT_EQ(Canonical("int8+center/f32"), "ERR_SPEC spec: nothing may stand at position 12, got 'f32'");
  const auto empty = ParseSpec("", "key");
  ASSERT_FALSE(empty.ok());
  EXPECT_EQ(empty.error().message.substr(0, 46), "key: at position 0 must stand one of f32, f16,");
  EXPECT_EQ(empty.error().message.substr(empty.error().message.size() - 11), "got nothing");
  EXPECT_EQ(empty.error().argument, "key");
}

TEST(Spec, WrongTextsAreRefused) {
  for (const char* text : {"INT8", "int5", " int8", "int8 ", "int8/", "int8//f32", "/int8", "int8/tensor/16", "int8/head/16", "int8/16",
                           "int8/token/-1", "int8/token/016", "int8/token/1e3", "int8/token/99999999999999999999", "int8/token/16x",
                           "int8/f32/absmax", "int8/absmax/token", "int8/minmax", "uint8/absmax", "lm4/absmax", "lm4/given", "e4m3/minmax",
                           "int8+", "int8++center", "int8+center+center", "int8+hadamard+hadamard", "bf16/f32", "q4_0/mse", "int8,f32"}) {
    const auto spec = ParseSpec(text, "spec");
    ASSERT_FALSE(spec.ok()) << text;
    EXPECT_EQ(spec.error().code, Code::kSpec) << text;
  }
}

TEST(Spec, LongWordsAreCutInMessages) {
  const auto spec = ParseSpec(std::string(100000, 'x'), "spec");
  ASSERT_FALSE(spec.ok());
  EXPECT_LT(spec.error().message.size(), 400u);
}

TEST(Spec, ResolveFitsTheHeadDim) {
  const auto resolve = [](const char* text, int64_t width) {
    const auto spec = ResolveSpec(ParseSpec(text, "spec").value(), width, "key");
    return spec.ok() ? CanonicalSpec(spec.value()) : spec.error().message;
  };
  EXPECT_EQ(resolve("int4/token", 80), "int4/token/80/absmax/f32");
  EXPECT_EQ(resolve("int4/token/64", 48), "int4/token/48/absmax/f32");
  EXPECT_EQ(resolve("int4/token/64", 80), "int4/token/64/absmax/f32");
  EXPECT_EQ(resolve("int4/channel/64", 8), "int4/channel/64/absmax/f32");
  EXPECT_EQ(resolve("nvfp4", 64), "nvfp4");
  EXPECT_EQ(resolve("nvfp4", 40), "key: nvfp4 needs a head_dim that 16 divides, got 40");
  EXPECT_EQ(resolve("q8_0", 48), "key: q8_0 needs a head_dim that 32 divides, got 48");
  Spec wrong;
  wrong.type = Type::int8;
  wrong.calibration = Calibration::kKivi;
  EXPECT_FALSE(ResolveSpec(wrong, 64, "key").ok());
  wrong.calibration = Calibration::kAbsmax;
  wrong.block = 16;
  EXPECT_FALSE(ResolveSpec(wrong, 64, "key").ok());
}

TEST(Spec, PresetsAreSpecsInCanonicalForm) {
  for (const Preset& preset : Presets()) {
    EXPECT_EQ(Canonical(preset.key), preset.key) << preset.name;
    EXPECT_EQ(Canonical(preset.value), preset.value) << preset.name;
    EXPECT_EQ(ParseSpec(preset.value, "spec").value().center, false) << preset.name;
    EXPECT_EQ(FindPreset(preset.name), &preset);
    // A preset that is also a type's name must mean the same either way.
    if (FindType(preset.name) != nullptr) { EXPECT_EQ(Canonical(preset.name), preset.key); }
  }
  EXPECT_EQ(CanonicalSpec(ParseSpecOrPreset("kv4", false, "spec").value()), "lm4/token/64/mse/e4m3+center+hadamard");
  EXPECT_EQ(CanonicalSpec(ParseSpecOrPreset("kv4", true, "spec").value()), "lm4/token/64/mse/e4m3+hadamard");
  EXPECT_EQ(CanonicalSpec(ParseSpecOrPreset("int4/head", true, "spec").value()), "int4/head/absmax/f32");
  const auto unknown = ParseSpecOrPreset("kv5/token", true, "spec");
  ASSERT_FALSE(unknown.ok());
  EXPECT_TRUE(unknown.error().expected.starts_with("f32, f16, bf16, int8, ")) << unknown.error().expected;
  EXPECT_TRUE(unknown.error().expected.ends_with(", iq4_nl, kv4, kv3, kv8, int4-kivi, int3-kivi, kivi4, kivi2, fp8, nvfp4-headdim-f32scale"));
  EXPECT_TRUE(unknown.error().message.ends_with(", got 'kv5'")) << unknown.error().message;
  EXPECT_EQ(ParseSpecOrPreset("kv4+hadamard", true, "spec").error().message, "spec: nothing may stand at position 3, got '+hadamard'");
  EXPECT_EQ(FindPreset("kv5"), nullptr);
}

TEST(Spec, OptionsThatDoNothingAreRefused) {
  const auto refusal = [](const char* spec, const char* options) {
    const Status status = CheckOptions(ParseSpec(spec, "spec").value(), ParseSpecOptions(options, "options").value(), "options");
    return status.ok() ? std::string() : status.error().message;
  };
  const struct {
    const char *option, *fits, *other, *message;
  } cases[] = {
      {"overflow=nan", "e5m2", "mxfp8", "options: overflow goes with e4m3 and e5m2 only, got mxfp8"},
      {"global=amax/6", "nvfp4-4over6", "mxfp4", "options: global goes with nvfp4 and nvfp4-4over6 only, got mxfp4"},
      {"global=2", "nvfp4+hadamard", "int4", "options: global goes with nvfp4 and nvfp4-4over6 only, got int4/tensor/absmax/f32"},
      {"rule=ceil", "mxfp8", "nvfp4", "options: rule goes with mxfp4 and mxfp8 only, got nvfp4"},
      {"hadamardRun=llama-key", "q4_0+hadamard", "q4_0", "options: hadamardRun goes with +hadamard only, got q4_0"},
  };
  for (const auto& c : cases) {
    EXPECT_EQ(refusal(c.fits, c.option), "") << c.option;
    EXPECT_EQ(refusal(c.other, c.option), c.message);
  }
  EXPECT_EQ(refusal("int4", "nonFinite=pass,overflow=saturate,global=amax/2688,rule=floor,hadamardRun=largest"), "");
}

TEST(Spec, OptionsAreParsed) {
  const auto parsed = ParseSpecOptions("overflow=nan,global=amax/448,rule=ceil,nonFinite=pass,hadamardRun=llama-key", "options");
  ASSERT_TRUE(parsed.ok());
  EXPECT_EQ(parsed.value().overflow, Overflow::kNan);
  EXPECT_EQ(parsed.value().global, GlobalScale::kAmax448);
  EXPECT_EQ(parsed.value().rule, MxRule::kCeil);
  EXPECT_EQ(parsed.value().non_finite, NonFinite::kPass);
  EXPECT_EQ(parsed.value().hadamard_run, HadamardRun::kLlamaKey);
  const auto defaults = ParseSpecOptions("", "options");
  ASSERT_TRUE(defaults.ok());
  EXPECT_EQ(defaults.value().global, GlobalScale::kAmax2688);
  EXPECT_EQ(defaults.value().non_finite, NonFinite::kError);
  for (const char* text : {"global=1.5", "global=given:1.5"}) {
    const auto given = ParseSpecOptions(text, "options");
    ASSERT_TRUE(given.ok()) << text;
    EXPECT_EQ(given.value().global, GlobalScale::kGiven);
    EXPECT_EQ(given.value().given_global, 1.5f);
  }
}

TEST(Spec, WrongOptionsAreNamed) {
  const auto message = [](const char* text) {
    const auto options = ParseSpecOptions(text, "options");
    return options.ok() ? "accepted" : std::string(CodeText(options.error().code)) + " " + options.error().message;
  };
  EXPECT_EQ(message("overflow=wrap"), "ERR_ARGUMENT options: overflow must be one of saturate, nan, got 'wrap'");
  EXPECT_EQ(message("Overflow=nan"),
            "ERR_ARGUMENT options: option must be one of overflow, global, rule, nonFinite, hadamardRun, got 'Overflow=nan'");
  EXPECT_EQ(message("rule"), "ERR_ARGUMENT options: rule must be one of floor, ceil, got nothing");
  for (const char* text : {"global=0", "global=-1", "global=nan", "global=inf", "global=1e999", "global=given:", "global=given:x", "global=amax/5",
                           "global=1.5x", "global= 1", "overflow=nan,,rule=ceil", "nonFinite=ignore", "hadamardRun=64", ","}) {
    EXPECT_EQ(message(text).substr(0, 12), "ERR_ARGUMENT") << text;
  }
}

TEST(Spec, SizesAndGrids) {
  const Shape shape{2, 3, 18, 48};
  const auto sizes = [&](const char* text) { return SizesOf(ResolveSpec(ParseSpec(text, "spec").value(), shape.width, "spec").value(), shape); };
  const int64_t elements = shape.elements();
  EXPECT_EQ(sizes("int8").codes, elements);
  EXPECT_EQ(sizes("int8").scales, 4);
  EXPECT_EQ(sizes("int8").zeros, 0);
  EXPECT_EQ(sizes("int8/given").zeros, 1);
  EXPECT_EQ(sizes("uint4/head/minmax/f16").scales, 3 * 2);
  EXPECT_EQ(sizes("uint4/head/minmax/f16").zeros, 3);
  EXPECT_EQ(sizes("int3/token/32").codes, elements / 8 * 3);
  EXPECT_EQ(sizes("int3/token/32").scales, 2 * 3 * 18 * 2 * 4);
  EXPECT_EQ(sizes("uint2/channel/16/kivi/f16").scales, 2 * 3 * 2 * 48 * 2);
  EXPECT_EQ(sizes("uint2/channel/16/kivi/f16").zeros, 2 * 3 * 2 * 48 * 2);
  EXPECT_EQ(sizes("lm4/token/64/mse/e4m3").total(), elements / 2 + 2 * 3 * 18 + 4);
  EXPECT_EQ(sizes("nvfp4").total(), elements / 2 + elements / 16 + 4);
  EXPECT_EQ(sizes("bf16").total(), elements * 2);
  const Shape wide{1, 2, 5, 64};
  const struct {
    Type type;
    double bits;
  } schemes[] = {{Type::mxfp4, 4.25}, {Type::mxfp8, 8.25}, {Type::q8_0, 8.5}, {Type::q4_0, 4.5}, {Type::q4_1, 5}, {Type::q5_0, 5.5}, {Type::q5_1, 6}, {Type::iq4_nl, 4.5}};
  for (const auto& scheme : schemes) {
    Spec spec;
    spec.type = scheme.type;
    EXPECT_EQ(static_cast<double>(SizesOf(spec, wide).total()) * 8, scheme.bits * static_cast<double>(wide.elements())) << Info(scheme.type).name;
  }
}

TEST(Spec, AffineLayouts) {
  const auto affine = [](const char* text) { return IsAffine(ParseSpec(text, "spec").value()); };
  EXPECT_TRUE(affine("int8"));
  EXPECT_TRUE(affine("uint4/channel/16/minmax/f32"));
  EXPECT_TRUE(affine("uint8/mse"));
  EXPECT_FALSE(affine("uint4/mse"));  // its zero point may lie outside the range
  EXPECT_FALSE(affine("int3"));       // ONNX has no such type
  EXPECT_FALSE(affine("int8/f16"));
  EXPECT_FALSE(affine("int8+hadamard"));
  EXPECT_FALSE(affine("int8+center"));
  EXPECT_FALSE(affine("uint4/kivi"));
  EXPECT_FALSE(affine("e4m3"));
  EXPECT_FALSE(affine("q8_0"));
}

TEST(Spec, HadamardRuns) {
  EXPECT_EQ(HadamardLength(80, HadamardRun::kLargest), 16);
  EXPECT_EQ(HadamardLength(128, HadamardRun::kLargest), 128);
  EXPECT_EQ(HadamardLength(7, HadamardRun::kLargest), 1);
  EXPECT_EQ(HadamardLength(128, HadamardRun::kLlamaKey), 128);
  EXPECT_EQ(HadamardLength(192, HadamardRun::kLlamaKey), 64);
  EXPECT_EQ(HadamardLength(128, HadamardRun::kLlamaValue), 64);
  EXPECT_EQ(HadamardLength(80, HadamardRun::kLlamaKey), 1);
}

TEST(Spec, TypeList) {
  EXPECT_EQ(FindType("nvfp4-4over6")->type, Type::nvfp4_4over6);
  EXPECT_EQ(FindType("nvfp4_4over6"), nullptr);
  EXPECT_EQ(FindType("float32")->type, Type::f32);
  EXPECT_EQ(FindOnnxType(22)->type, Type::int4);
  EXPECT_EQ(FindOnnxType(0), nullptr);
  for (int i = 0; i < TypeCount(); ++i) {
    EXPECT_EQ(FindType(TypeAt(i).name), &TypeAt(i));
    EXPECT_EQ(&Info(TypeAt(i).type), &TypeAt(i));
  }
}

TEST(Scales, GlobalOfE4M3IsTheSmallestPowerOfTwo) {
  EXPECT_EQ(E4M3Global(448.0f), 1.0f);
  EXPECT_EQ(E4M3Global(std::nextafter(448.0f, 500.0f)), 2.0f);
  EXPECT_EQ(E4M3Global(224.0f), 0.5f);
  EXPECT_EQ(E4M3Global(0.0f), 1.0f);
  EXPECT_EQ(E4M3Global(INFINITY), 1.0f);
  EXPECT_EQ(E4M3Global(1e-45f), std::ldexp(1.0f, -149));
  EXPECT_EQ(E4M3Global(3.4028235e38f), std::ldexp(1.0f, 120));
  for (float s = 1e-40f; s < 1e38f; s *= 1.37f) {
    const double g = E4M3Global(s);
    EXPECT_GE(g, static_cast<double>(s) / 448);
    if (g > std::ldexp(1.0, -149)) { EXPECT_LT(g / 2, static_cast<double>(s) / 448); }
  }
}

TEST(Scales, StoredFormsRoundAndSaturate) {
  EXPECT_EQ(StoreScale(ScaleType::kF16, 1e6f, 1).value, 65504.0f);
  EXPECT_EQ(StoreScale(ScaleType::kF16, 65519.0f, 1).value, 65504.0f);
  EXPECT_EQ(StoreScale(ScaleType::kBF16, 3.4028235e38f, 1).value, 3.3895314e38f);
  EXPECT_EQ(StoreScale(ScaleType::kF32, INFINITY, 1).value, 3.4028235e38f);
  EXPECT_EQ(StoreScale(ScaleType::kE8M0, 1.5f, 1).value, 2.0f);
  EXPECT_EQ(StoreScale(ScaleType::kE8M0, 2.0f, 1).value, 2.0f);
  EXPECT_EQ(StoreScale(ScaleType::kE8M0, 0.0f, 1).value, 0.0f);
  EXPECT_EQ(StoreScale(ScaleType::kE8M0, 0.0f, 1).bits, 0u);
  EXPECT_EQ(StoreScale(ScaleType::kE4M3, 3.3f, 2).value, 3.25f);
}

TEST(Scales, GivenScalesThatVanishAreRefused) {
  const auto store = [](const char* text, std::vector<float> scales) {
    uint8_t out[16];
    float g = 0;
    const Status status = StoreScales(ParseSpec(text, "spec").value(), scales.data(), static_cast<int64_t>(scales.size()), out, &g);
    return status.ok() ? "stored with " + Text(static_cast<double>(g)) : status.error().message;
  };
  EXPECT_EQ(store("int8/given/f32", {1e-40f}), "stored with 1");
  EXPECT_EQ(store("int8/given/f16", {1e-9f}).substr(0, 37), "scale: must not become 0 as f16, got ");
  EXPECT_EQ(store("int8/given/f16", {1.0f, 65520.0f}), "scale: lies beyond the range of f16, got 65520 at index 1");
  EXPECT_EQ(store("int8/given/e4m3", {1.0f, 896.0f}), "stored with 2");
  EXPECT_EQ(store("int8/given/e4m3", {1e-5f, 896.0f}).substr(0, 33), "scale: must not become 0 as e4m3,");
  EXPECT_EQ(store("int8/given/e8m0", {1e-40f}), "stored with 1");
}

TEST(Backends, ChoiceIsNamed) {
  ASSERT_FALSE(AllBackends().empty());
  EXPECT_STREQ(AllBackends().back()->name, "reference");
  EXPECT_STREQ(ChooseBackend("reference").value()->name, "reference");
  EXPECT_TRUE(ChooseBackend("").value()->available());
  EXPECT_EQ(ChooseBackend("auto").value(), ChooseBackend("").value());
  const auto wrong = ChooseBackend("avx1024");
  ASSERT_FALSE(wrong.ok());
  EXPECT_EQ(wrong.error().code, Code::kBackend);
  EXPECT_NE(wrong.error().message.find("auto"), std::string::npos);
  EXPECT_NE(wrong.error().message.find("reference"), std::string::npos);
}

}  // namespace
}  // namespace kvpages::test
