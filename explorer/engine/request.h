// What the engine is asked: one line of fields between tabs,
//
//   COMMAND PROBLEM DEVICE NAME=VALUE...
//
// where PROBLEM is the one-line form of docs/semantics.md and DEVICE a name of the planner's table;
// either is empty where the command has none. Lists of numbers are separated by commas.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/tessera.hpp"

namespace tessera::explorer {

/// Most tiles, items, elements or numbers of one answer or request.
inline constexpr std::int64_t kMostParts = 65536;

class Request {
 public:
  /// Takes the line apart; the line must live as long. Errors: invalid (a field).
  static Result<Request> read(std::string_view line);

  std::string_view command() const { return command_; }
  /// As the parser reads it; errors: its own. The rest's errors: invalid, the device or the field.
  Result<Problem> problem() const;
  Result<Device> device() const;
  /// Refuses fields that are not among these.
  Status only(std::initializer_list<std::string_view> names,
              std::span<const std::string_view> more = {}) const;

  bool has(std::string_view name) const { return fields_.contains(name); }
  Result<std::int64_t> number(std::string_view name, std::int64_t otherwise, std::int64_t low,
                              std::int64_t high) const;
  /// At most kMostParts.
  Result<std::vector<std::int64_t>> numbers(std::string_view name, std::int64_t low,
                                            std::int64_t high) const;
  /// "-inf" is one, too.
  Result<std::vector<float>> floats(std::string_view name) const;

 private:
  std::string_view command_;
  std::vector<std::string_view> words_;  ///< problem, device
  std::map<std::string_view, std::string_view> fields_;
};

}  // namespace tessera::explorer
