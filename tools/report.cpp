#include "report.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>

namespace tessera::tools {

namespace {

std::string print(const char* format, double value) {
  char buffer[64];
  std::snprintf(buffer, sizeof buffer, format, value);
  return buffer;
}

/// The value in the largest unit that keeps it at 1 or more.
std::string with_unit(double value, double step, const std::vector<const char*>& units) {
  std::size_t unit = 0;
  while (value >= step && unit + 1 < units.size()) {
    value /= step;
    ++unit;
  }
  return print(unit == 0 ? "%.0f " : "%.2f ", value) + units[unit];
}

}  // namespace

double clock_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::string Table::text() const {
  std::vector<std::size_t> widths;
  for (const auto& row : rows_) {
    widths.resize(std::max(widths.size(), row.size()), 0);
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string text;
  for (const auto& row : rows_) {
    std::string line;
    for (std::size_t i = 0; i < row.size(); ++i) {
      const std::string padding(widths[i] - row[i].size(), ' ');
      line += i == 0 ? row[i] + padding : "  " + padding + row[i];
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + "\n";
  }
  return text;
}

std::string bytes_text(double bytes) {
  return with_unit(bytes, 1024.0, {"B", "KiB", "MiB", "GiB", "TiB", "PiB"});
}

std::string seconds_text(double seconds) {
  if (seconds < 1e-3) return print("%.2f us", seconds * 1e6);
  if (seconds < 1.0) return print("%.2f ms", seconds * 1e3);
  return print("%.2f s", seconds);
}

std::string rate_text(double per_second) {
  return with_unit(per_second, 1000.0, {"", "k", "M", "G", "T", "P"});
}

std::string fixed_text(double value, int digits) {
  char buffer[64];
  std::snprintf(buffer, sizeof buffer, "%.*f", digits, value);
  return buffer;
}

std::string short_text(double value) { return print("%.2g", value); }

Progress::Progress(std::string label)
    : label_(std::move(label)), start_(clock_seconds()), terminal_(isatty(STDERR_FILENO) == 1) {}

Progress::~Progress() {
  if (shown_) std::fprintf(stderr, terminal_ ? "\r\033[K" : "\n");
}

void Progress::update(std::int64_t done, std::int64_t total) {
  const double time = clock_seconds();
  const double interval = terminal_ ? 0.1 : 2.0;
  if (total <= 0 || time - std::max(last_, start_) < interval) return;
  last_ = time;
  shown_ = true;
  const double share = static_cast<double>(done) / static_cast<double>(total);
  const double left = share > 0.0 ? (time - start_) * (1.0 - share) / share : 0.0;
  std::fprintf(stderr, "%s%s %3.0f %%, %s left%s", terminal_ ? "\r\033[K" : "", label_.c_str(),
               100.0 * share, seconds_text(left).c_str(), terminal_ ? "" : "\n");
  std::fflush(stderr);
}

void Progress::callback(void* context, std::int64_t done, std::int64_t total) {
  static_cast<Progress*>(context)->update(done, total);
}

}  // namespace tessera::tools
