#include "request.h"

#include <algorithm>

#include "core/hd.h"
#include "plan/device_table.h"
#include "plan/text.h"

namespace tessera::explorer {
namespace {

/// Takes what stands before the separator, and the separator.
std::string_view cut(std::string_view& text, char separator) {
  const std::size_t end = text.find(separator);
  const std::string_view first = text.substr(0, end);
  text = end == std::string_view::npos ? std::string_view{} : text.substr(end + 1);
  return first;
}

Status refused_field(std::string_view name, std::string_view value,
                     const std::string& expectation) {
  return Status::invalid(std::string(name) + " = '" + std::string(value) + "': " + expectation);
}

/// Calls add(text) for every element of a list; false: one is not understood.
template <class Add>
Status read_list(std::string_view name, std::string_view list, const Add& add,
                 const std::string& expectation) {
  for (std::int64_t count = 0; !list.empty(); ++count) {
    const std::string_view element = cut(list, ',');
    if (count == kMostParts) {
      return refused_field(name, "...", "has at most " + std::to_string(kMostParts) + " numbers");
    }
    if (!add(element)) return refused_field(name, element, expectation);
  }
  return {};
}

std::string range_text(std::int64_t low, std::int64_t high) {
  return "[" + std::to_string(low) + ", " + std::to_string(high) + "]";
}

}  // namespace

Result<Request> Request::read(std::string_view line) {
  constexpr std::size_t kMostWords = 2;  // problem, device
  Request request;
  request.command_ = cut(line, '\t');
  while (!line.empty()) {
    std::string_view field = cut(line, '\t');
    if (request.words_.size() < kMostWords) {
      request.words_.push_back(field);
      continue;
    }
    const std::string_view whole = field, name = cut(field, '=');
    if (name.size() == whole.size()) return refused_field("field", whole, "must be NAME=VALUE");
    if (!request.fields_.emplace(name, field).second) {
      return refused_field("field", whole, std::string(name) + " is given twice");
    }
  }
  return request;
}

Result<Problem> Request::problem() const {
  return parse_problem(words_.empty() ? std::string_view{} : words_[0]);
}

Result<Device> Request::device() const {
  const std::string_view name = words_.size() < 2 ? std::string_view{} : words_[1];
  std::string known;
  for (const Device& device : device_table()) {
    if (device.name == name) return device;
    known += (known.empty() ? "" : ", ") + device.name;
  }
  return refused_field("device", name, "unknown; known: " + known);
}

Status Request::only(std::initializer_list<std::string_view> names,
                     std::span<const std::string_view> more) const {
  std::vector<std::string_view> all(names);
  all.insert(all.end(), more.begin(), more.end());
  std::string known;
  for (const std::string_view name : all) known += (known.empty() ? "" : ", ") + std::string(name);
  for (const auto& [name, value] : fields_) {
    if (std::find(all.begin(), all.end(), name) == all.end()) {
      return refused_field(
          "field", name,
          std::string(command_) + (known.empty() ? " takes none" : " takes " + known));
    }
  }
  return {};
}

Result<std::int64_t> Request::number(std::string_view name, std::int64_t otherwise,
                                     std::int64_t low, std::int64_t high) const {
  const auto found = fields_.find(name);
  std::int64_t value = otherwise;
  if ((found != fields_.end() && !read_int(found->second, value)) || value < low || value > high) {
    return refused_field(name, found == fields_.end() ? std::string_view("nothing") : found->second,
                         "must be a whole number in " + range_text(low, high));
  }
  return value;
}

Result<std::vector<std::int64_t>> Request::numbers(std::string_view name, std::int64_t low,
                                                   std::int64_t high) const {
  std::vector<std::int64_t> list;
  const auto found = fields_.find(name);
  if (found == fields_.end()) return list;
  const auto add = [&](std::string_view text) {
    std::int64_t value = 0;
    if (!read_int(text, value) || value < low || value > high) return false;
    list.push_back(value);
    return true;
  };
  const Status s =
      read_list(name, found->second, add, "must be a whole number in " + range_text(low, high));
  if (!s) return s;
  return list;
}

Result<std::vector<float>> Request::floats(std::string_view name) const {
  std::vector<float> list;
  const auto found = fields_.find(name);
  if (found == fields_.end()) return list;
  const auto add = [&](std::string_view text) {
    float value = -core::kInfinity;
    if (text != "-inf" && !read_float(text, value)) return false;
    list.push_back(value);
    return true;
  };
  const Status s = read_list(name, found->second, add, "must be a number, or -inf");
  if (!s) return s;
  return list;
}

}  // namespace tessera::explorer
