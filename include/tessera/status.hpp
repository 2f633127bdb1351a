// Status and Result: how Tessera reports errors. The library throws nothing and never exits; only
// who takes the value of a Result without one is stopped, and told why.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>
#include <utility>

namespace tessera {

/// What kind of failure a Status describes.
enum class Code : std::uint8_t {
  ok,           ///< success
  invalid,      ///< an argument makes no sense (wrong size, null pointer, bad ratio)
  unsupported,  ///< the argument makes sense, but no kernel of this device does it
  workspace,    ///< the caller's workspace is missing, too small or misaligned
  device,       ///< the machine or the operating system refused
};

/// The name of a code, e.g. "invalid".
constexpr const char* to_string(Code code) {
  switch (code) {
    case Code::ok: return "ok";
    case Code::invalid: return "invalid";
    case Code::unsupported: return "unsupported";
    case Code::workspace: return "workspace";
    case Code::device: return "device";
  }
  return "unknown";
}

/// Success, or a code with one sentence that names the argument, its value and what would be
/// accepted.
struct [[nodiscard]] Status {
  Code code = Code::ok;  ///< what kind
  std::string text;      ///< empty on success

  /// Whether this is success.
  bool ok() const { return code == Code::ok; }
  /// The same as ok().
  explicit operator bool() const { return ok(); }

  /// The failures, each with its text.
  /// @{
  static Status invalid(std::string text) { return {Code::invalid, std::move(text)}; }
  static Status unsupported(std::string text) { return {Code::unsupported, std::move(text)}; }
  static Status workspace(std::string text) { return {Code::workspace, std::move(text)}; }
  static Status device(std::string text) { return {Code::device, std::move(text)}; }
  /// @}
};

namespace detail {

/// Stops the process with the reason. A function of its own: to look before an access costs a test
/// and a jump.
[[noreturn, gnu::noinline, gnu::cold]] inline void stop_without_value(const Status& status) {
  std::fprintf(stderr, "tessera: a Result without a value was used (look at ok() first): %s\n",
               status.text.c_str());
  std::abort();
}

/// A Result without a value must not look like a success to who passes its status on.
[[gnu::noinline, gnu::cold]] inline void refuse_success(Status& status) {
  status = Status::invalid("a Result was made of a Status that is ok: it has no value");
}

}  // namespace detail

/// A value, or the Status that says why there is none.
template <class T>
class [[nodiscard]] Result {
 public:
  /// Success.
  Result(T value) : value_(std::move(value)) {}  // NOLINT(google-explicit-constructor)
  /// Failure. A `status` that is ok() has nothing to say: it becomes one that says so, `invalid`.
  Result(Status status) : status_(std::move(status)) {  // NOLINT(google-explicit-constructor)
    if (status_.ok()) [[unlikely]] {
      detail::refuse_success(status_);
    }
  }

  /// Whether there is a value.
  bool ok() const { return value_.has_value(); }
  /// The same as ok().
  explicit operator bool() const { return ok(); }
  /// What went wrong.
  const Status& status() const { return status_; }

  /// The value. Without one the process prints status() and is aborted.
  /// @{
  T& value() & { return need(), *value_; }
  const T& value() const& { return need(), *value_; }
  T&& value() && { return need(), *std::move(value_); }
  T* operator->() { return need(), &*value_; }
  const T* operator->() const { return need(), &*value_; }
  T& operator*() & { return need(), *value_; }
  const T& operator*() const& { return need(), *value_; }
  T&& operator*() && { return need(), *std::move(value_); }
  /// @}

 private:
  void need() const {
    if (!value_) [[unlikely]] {
      detail::stop_without_value(status_);
    }
  }

  Status status_;
  std::optional<T> value_;
};

}  // namespace tessera
