// Small helpers that turn values into text for problems, plans and error messages.
#pragma once

#include <charconv>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>
#include <type_traits>

namespace tessera {

/// The shortest text that reads back as the same float.
inline std::string float_text(float value) {
  char buffer[32];
  const auto result = std::to_chars(buffer, buffer + sizeof buffer, value);
  return {buffer, result.ptr};
}

/// Reads a whole number; false if anything else is there or it does not fit.
inline bool read_int(std::string_view text, std::int64_t& value) {
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  return error == std::errc() && stop == end;
}

/// Reads a finite number; false if anything else is there, or what no float comes near.
inline bool read_float(std::string_view text, float& value) {
#if defined(__cpp_lib_to_chars)
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  return error == std::errc() && stop == end && std::isfinite(value);
#else  // libc++ has no from_chars of floats before 20; strtof takes more, and rounds down to 0
  if (text.empty() || text.front() == '+') return false;
  if (text.find_first_not_of("0123456789.eE+-") != std::string_view::npos) return false;
  const std::string copy(text);
  char* stop = nullptr;
  value = std::strtof(copy.c_str(), &stop);
  const std::string_view digits = text.substr(0, text.find_first_of("eE"));
  const bool zero = digits.find_first_of("123456789") == std::string_view::npos;
  return stop == copy.c_str() + copy.size() && std::isfinite(value) && (value == 0.0F) == zero;
#endif
}

/// "NAME = VALUE: EXPECTATION", the form of every refusal of a number.
template <class Number>
std::string refused(const char* name, Number value, const std::string& expectation) {
  if constexpr (std::is_floating_point_v<Number>) {
    return std::string(name) + " = " + float_text(static_cast<float>(value)) + ": " + expectation;
  } else {
    return std::string(name) + " = " + std::to_string(value) + ": " + expectation;
  }
}

}  // namespace tessera
