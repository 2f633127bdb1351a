// OutputFile: a file of known size, written as memory, that appears under its name complete, or not
// at all. Its disk space is taken when it is created, and written pages leave memory when others
// need it, so files larger than memory can be written. The bytes belong to a file without a name
// where the file system has those, so that not even a killed process leaves anything behind; else
// to a hidden neighbour, which the destructor removes. Until commit() whatever was there before
// stays as it was.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "tessera/status.hpp"

namespace tessera::tools {

/// Do both paths lead to one file, by whatever links? Of files that are not there yet: will they?
bool same_file(const std::string& a, const std::string& b);

class OutputFile {
 public:
  /// At least one byte, zero at first. Follows symbolic links; refuses to replace what is not a
  /// regular file (so never /dev/null). Error texts do not repeat the path. `may_be_unnamed` is for
  /// tests of what happens on other file systems.
  static Result<OutputFile> create(const std::string& path, std::uint64_t size,
                                   bool may_be_unnamed = true);

  OutputFile(OutputFile&& other) noexcept;
  OutputFile& operator=(OutputFile&&) = delete;
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;
  ~OutputFile();

  /// Starts on a page boundary; valid for the lifetime of this object.
  std::span<std::byte> bytes() const { return bytes_; }

  /// Flushes to the disk and puts the file in place; once. What is written to bytes() later may or
  /// may not reach the file.
  Status commit();

 private:
  explicit OutputFile(std::string target) : target_(std::move(target)) {}

  Status open(bool may_be_unnamed);
  Status map(std::uint64_t size);

  std::string target_;
  std::string temporary_;  ///< the hidden neighbour; empty while there is none
  int descriptor_ = -1;
  std::span<std::byte> bytes_;
};

}  // namespace tessera::tools
