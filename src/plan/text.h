// Small helpers that turn values into text for problems, plans and error messages.
#pragma once

#include <charconv>
#include <cstdint>
#include <string>
#include <type_traits>

namespace tessera {

/// The shortest text that reads back as the same float.
inline std::string float_text(float value) {
  char buffer[32];
  const auto result = std::to_chars(buffer, buffer + sizeof buffer, value);
  return {buffer, result.ptr};
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
