// SPDX-License-Identifier: Apache-2.0
// Errors as values: one list of codes, one error with its fields, Result<T>. Texts are made in the core
// and nowhere else; bindings carry them unchanged.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

namespace kvpages {

// number, code as JavaScript sees it. Numbers are part of the C ABI and never reused.
#define KVP_STATUS_LIST(X)          \
  X(kOk, 0, "OK")                   \
  X(kArgument, -1, "ERR_ARGUMENT")  \
  X(kShape, -2, "ERR_SHAPE")        \
  X(kSpec, -3, "ERR_SPEC")          \
  X(kNonFinite, -4, "ERR_NON_FINITE") \
  X(kUnsupported, -5, "ERR_UNSUPPORTED") \
  X(kCorrupt, -6, "ERR_CORRUPT")    \
  X(kMismatch, -7, "ERR_MISMATCH")  \
  X(kLimit, -8, "ERR_LIMIT")        \
  X(kMemory, -9, "ERR_MEMORY")      \
  X(kBuffer, -10, "ERR_BUFFER")     \
  X(kDisposed, -11, "ERR_DISPOSED") \
  X(kAborted, -12, "ERR_ABORTED")   \
  X(kBackend, -13, "ERR_BACKEND")   \
  X(kDevice, -14, "ERR_DEVICE")     \
  X(kInternal, -15, "ERR_INTERNAL")

enum class Code : int32_t {
#define KVP_X(name, number, text) name = number,
  KVP_STATUS_LIST(KVP_X)
#undef KVP_X
};

const char* CodeText(Code code);

// What failed, as data. `message` reads "argument: rule, got value".
struct Error {
  Code code = Code::kInternal;
  std::string message;
  std::string argument;                 // public name of the argument, empty where there is none
  std::string side;                     // "key", "value" or empty
  std::optional<int64_t> layer;
  std::optional<int64_t> page;          // index of the page in its cache
  std::optional<int64_t> byte_offset;   // position in a file
  std::string expected;
  std::string actual;

  Error&& Argument(std::string v) && { argument = std::move(v); return std::move(*this); }
  Error&& Side(std::string v) && { side = std::move(v); return std::move(*this); }
  Error&& Layer(int64_t v) && { layer = v; return std::move(*this); }
  Error&& Page(int64_t v) && { page = v; return std::move(*this); }
  Error&& At(int64_t v) && { byte_offset = v; return std::move(*this); }
  Error&& Expected(std::string v) && { expected = std::move(v); return std::move(*this); }
  Error&& Actual(std::string v) && { actual = std::move(v); return std::move(*this); }
};

// "argument: rule, got value", the one way argument errors are worded. Those with plain texts spare each caller the
// making of strings, which is much code in all.
Error MakeError(Code code, std::string argument, std::string rule, std::string got = {});
Error MakeError(Code code, const char* argument, std::string rule, std::string got);
Error MakeError(Code code, const char* argument, const char* rule, std::string got);
Error MakeError(Code code, const char* argument, std::string rule);
Error MakeError(Code code, const char* argument, const char* rule);

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Error error);  // NOLINT(google-explicit-constructor)
  Status(const Status& other);
  Status(Status&&) = default;
  Status& operator=(Status&&) = default;
  bool ok() const { return error_ == nullptr; }
  const Error& error() const { return *error_; }
  Error& error() { return *error_; }
  // What is left has no error.
  Status Failure() && { return std::move(*this); }

 private:
  std::unique_ptr<Error> error_;
};

inline Status Ok() { return {}; }

template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}             // NOLINT(google-explicit-constructor)
  Result(Error error) : status_(std::move(error)) {}        // NOLINT
  Result(Status status) : status_(std::move(status)) {}     // NOLINT: one that is not ok
  bool ok() const { return status_.ok(); }
  T& value() { return *value_; }
  const T& value() const { return *value_; }
  const Error& error() const { return status_.error(); }
  Error& error() { return status_.error(); }
  Status Failure() && { return std::move(status_); }

 private:
  Status status_;
  std::optional<T> value_;
};

// Decimal text of numbers in messages; floats in the shortest form that reads back.
std::string Text(int64_t value);
std::string Text(double value);

}  // namespace kvpages

#define KVP_CONCAT_(a, b) a##b
#define KVP_CONCAT(a, b) KVP_CONCAT_(a, b)
// Returns the error of a Status expression.
#define KVP_TRY(expression)                                               \
  do {                                                                    \
    auto kvp_status = (expression);                                       \
    if (!kvp_status.ok()) return std::move(kvp_status).Failure();         \
  } while (0)
// KVP_ASSIGN(auto x, Maybe()); returns the error, else x is the value.
#define KVP_ASSIGN(target, expression)                                    \
  auto KVP_CONCAT(kvp_result_, __LINE__) = (expression);                  \
  if (!KVP_CONCAT(kvp_result_, __LINE__).ok())                            \
    return std::move(KVP_CONCAT(kvp_result_, __LINE__)).Failure();        \
  target = std::move(KVP_CONCAT(kvp_result_, __LINE__).value())
