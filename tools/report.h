// Tables for people, and numbers as people read them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tessera::tools {

/// Rows of cells under a header, columns aligned: the first to the left, the rest to the right.
class Table {
 public:
  explicit Table(std::vector<std::string> header) { rows_.push_back(std::move(header)); }
  void add(std::vector<std::string> row) { rows_.push_back(std::move(row)); }
  /// The whole table, one line a row, each ended by a newline.
  std::string text() const;

 private:
  std::vector<std::vector<std::string>> rows_;
};

/// "12.3 GiB"
std::string bytes_text(double bytes);
/// "1.23 ms"
std::string seconds_text(double seconds);
/// "233.4 G" (of something a second)
std::string rate_text(double per_second);
/// A number with that many digits behind the point.
std::string fixed_text(double value, int digits);
/// "3.1e-07"
std::string short_text(double value);

/// Seconds of a steady clock.
double clock_seconds();

/// A progress line on stderr, rewritten at most ten times a second; silent unless stderr is a
/// terminal or the work has taken more than two seconds.
class Progress {
 public:
  explicit Progress(std::string label);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void update(std::int64_t done, std::int64_t total);
  /// For Execution::progress; the context is a Progress.
  static void callback(void* context, std::int64_t done, std::int64_t total);

 private:
  std::string label_;
  double start_;
  double last_ = 0.0;
  bool terminal_;
  bool shown_ = false;
};

}  // namespace tessera::tools
