#include "numbers.h"

#include <charconv>
#include <cstdio>
#include <limits>
#include <string>

#include "files/entry.h"

namespace tessera::tools {

namespace {

/// Reads all of the text.
template <class Number>
bool read(const std::string& text, Number& value) {
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  return error == std::errc() && stop == end;
}

std::string short_number(double value) {
  char buffer[32];
  std::snprintf(buffer, sizeof buffer, "%g", value);
  return buffer;
}

/// CLI11 puts the option's name in front.
std::string refused(const std::string& accepted, const std::string& text) {
  return "must be " + accepted + ", not " + printable(text);
}

template <class Integer>
CLI::Validator whole(Integer low, Integer high) {
  return {[low, high](std::string& text) -> std::string {
            Integer value{};
            if (!read(text, value) || value < low || value > high) {
              return refused(concat("a whole number from ", low, " to ", high), text);
            }
            text = std::to_string(value);
            return {};
          },
          ""};
}

CLI::Validator real(const std::string& accepted, double low, double high, bool above) {
  return {[=](std::string& text) -> std::string {
            double value = 0.0;
            // A comparison with NaN is false.
            const bool fits =
                read(text, value) && (above ? value > low : value >= low) && value <= high;
            return fits ? "" : refused(accepted, text);
          },
          ""};
}

}  // namespace

CLI::Validator whole_number(std::int64_t low, std::int64_t high) { return whole(low, high); }

CLI::Validator any_seed() {
  return whole<std::uint64_t>(0, std::numeric_limits<std::uint64_t>::max());
}

CLI::Validator number(double low, double high, bool above) {
  return real("a number " + std::string(above ? "above " : "from ") + short_number(low) +
                  (above ? ", up to " : " to ") + short_number(high),
              low, high, above);
}

CLI::Validator finite_float() {
  constexpr double kMost = std::numeric_limits<float>::max();
  return real("a finite number", -kMost, kMost, false);
}

}  // namespace tessera::tools
