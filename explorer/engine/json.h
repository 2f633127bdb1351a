// Writes JSON: what an answer consists of, and no more. Commas are its own business.
#pragma once

#include <charconv>
#include <cmath>
#include <concepts>
#include <cstdint>
#include <string>
#include <string_view>

namespace tessera::explorer {

class Json {
 public:
  Json& begin_object() { return open('{'); }
  Json& end_object() { return close('}'); }
  Json& begin_array() { return open('['); }
  Json& end_array() { return close(']'); }
  /// Of the value that follows.
  Json& key(std::string_view name) {
    value(name);
    text_ += ':';
    return *this;
  }

  Json& value(std::string_view string);
  Json& value(const char* string) { return value(std::string_view(string)); }
  Json& value(bool truth) { return raw(truth ? "true" : "false"); }
  /// The shortest text that reads back as the same number; null where JSON has none: infinity, NaN.
  template <class Number>
    requires(std::integral<Number> || std::floating_point<Number>)
  Json& value(Number number) {
    if constexpr (std::floating_point<Number>) {
      if (!std::isfinite(number)) return raw("null");
    }
    char buffer[32];
    const auto [end, error] = std::to_chars(buffer, buffer + sizeof buffer, number);
    return raw({buffer, end});
  }
  Json& null() { return raw("null"); }

  template <class Value>
  Json& field(std::string_view name, const Value& of) {
    return key(name).value(of);
  }
  /// An array of numbers.
  template <class Numbers>
  Json& list(std::string_view name, const Numbers& numbers) {
    key(name).begin_array();
    for (const auto number : numbers) value(number);
    return end_array();
  }

  std::string take() { return std::move(text_); }

 private:
  Json& raw(std::string_view token) {
    separate();
    text_ += token;
    return *this;
  }
  Json& open(char bracket) {
    separate();
    text_ += bracket;
    return *this;
  }
  Json& close(char bracket) {
    text_ += bracket;
    return *this;
  }
  /// No comma after what opens, nor before a value that has a key.
  void separate() {
    if (text_.empty()) return;
    const char last = text_.back();
    if (last != '{' && last != '[' && last != ':') text_ += ',';
  }

  std::string text_;
};

}  // namespace tessera::explorer
