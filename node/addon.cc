// SPDX-License-Identifier: Apache-2.0
// Binder for Node: every function of kvpages.h as a function of the addon, made by template from the list. Names no
// function. Holds no state, so each environment (worker) may load it; the core's state belongs to the thread.
#include <napi.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>

#include "abi/describe.h"
#include "kvpages.h"

namespace {

// One JavaScript argument: a number, a text or a typed array's memory.
struct Slot {
  napi_value value = nullptr;
  std::string text;
  void* data = nullptr;
  size_t length = 0;  // elements
};

struct ArrayKind {
  char input, output;
  napi_typedarray_type type;
  const char* name;
};
constexpr ArrayKind kArrayKinds[] = {
    {'B', 'b', napi_uint8_array, "Uint8Array"},     {'F', 'f', napi_float32_array, "Float32Array"},
    {'D', 'e', napi_float64_array, "Float64Array"}, {'I', 'j', napi_int32_array, "Int32Array"},
    {'U', 'v', napi_uint32_array, "Uint32Array"},   {'L', 'l', napi_bigint64_array, "BigInt64Array"},
};

// Reads an argument by its letter; says what was expected where it does not fit.
const char* Read(napi_env env, char letter, Slot& slot) {
  const Napi::Value value(env, slot.value);
  if (letter == 'i' || letter == 'u' || letter == 'd') return value.IsNumber() ? nullptr : "a number";
  if (letter == 'T') {
    if (!value.IsString()) return "a string";
    slot.text = value.As<Napi::String>().Utf8Value();
    slot.data = slot.text.data();
    slot.length = slot.text.size();
    return nullptr;
  }
  for (const ArrayKind& kind : kArrayKinds) {
    if (letter != kind.input && letter != kind.output) continue;
    napi_typedarray_type type;
    const bool fits = value.IsTypedArray() &&
                      napi_get_typedarray_info(env, slot.value, &type, &slot.length, &slot.data, nullptr, nullptr) == napi_ok &&
                      type == kind.type;
    return fits ? nullptr : kind.name;
  }
  return "of a known type";
}

template <typename... Args>
struct Binder {
  using Function = int32_t (*)(Args...);
  static constexpr size_t kCount = sizeof...(Args);
  static constexpr std::array<bool, kCount> kPointer = {std::is_pointer_v<Args>...};
  static constexpr bool IsLength(size_t i) { return i > 0 && kPointer[i - 1]; }
  // The JavaScript argument that parameter i comes from: a pointer and its length share one.
  static constexpr size_t Source(size_t i) {
    size_t source = 0;
    for (size_t k = 1; k <= i; ++k) source += !IsLength(k);
    return source;
  }
  static constexpr size_t kArguments = Source(kCount - 1) + 1;

  template <size_t I>
  static auto Parameter(napi_env env, const std::array<Slot, kArguments>& slots) {
    using T = std::tuple_element_t<I, std::tuple<Args...>>;
    const Slot& slot = slots[Source(I)];
    if constexpr (IsLength(I)) {
      return static_cast<T>(slot.length);
    } else if constexpr (std::is_pointer_v<T>) {
      return static_cast<T>(slot.data);
    } else {
      const Napi::Number number(env, slot.value);
      if constexpr (std::is_same_v<T, int32_t>) return number.Int32Value();
      else if constexpr (std::is_same_v<T, uint32_t>) return number.Uint32Value();
      else return number.DoubleValue();
    }
  }

  static Napi::Value Call(const Napi::CallbackInfo& info, Function function, const std::string& letters) {
    const Napi::Env env = info.Env();
    const auto* const name = static_cast<const char*>(info.Data());
    const auto refuse = [&](const std::string& text) {
      Napi::TypeError::New(env, std::string(name) + ": " + text).ThrowAsJavaScriptException();
      return env.Undefined();
    };
    if (info.Length() != kArguments) {
      return refuse("takes " + std::to_string(kArguments) + " arguments, got " + std::to_string(info.Length()));
    }
    std::array<Slot, kArguments> slots;
    for (size_t i = 0; i < kArguments; ++i) {
      slots[i].value = info[i];
      if (const char* const expected = Read(env, letters[i], slots[i])) {
        const bool article = std::string_view(expected).find(' ') == std::string_view::npos;
        return refuse("argument " + std::to_string(i) + " must be " + (article ? "a " : "") + expected);
      }
    }
    const int32_t status = [&]<size_t... I>(std::index_sequence<I...>) {
      return function(Parameter<I>(env, slots)...);
    }(std::make_index_sequence<kCount>());
    return Napi::Number::New(env, status);
  }
};

template <typename... Args>
Binder<Args...> BinderOf(int32_t (*)(Args...));

template <auto kFunction>
Napi::Value Call(const Napi::CallbackInfo& info) {
  static const std::string letters = kvpages::abi::Letters(kFunction).data();
  return decltype(BinderOf(kFunction))::Call(info, kFunction, letters);
}

Napi::Object Init(Napi::Env env, Napi::Object exports) {
#define KVP_X(name) exports.Set(#name, Napi::Function::New<Call<&name>>(env, #name, const_cast<char*>(#name)));
  KVP_FUNCTIONS(KVP_X)
#undef KVP_X
  return exports;
}

}  // namespace

NODE_API_MODULE(kvpages, Init)
