// MappedFile: a regular file seen as read-only memory, so that files larger than memory can be
// read. The mapping stays valid when the file is renamed, replaced or deleted. A file that another
// process cuts short while it is mapped raises SIGBUS on access: explain_file_faults() turns that
// into one line.
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "tessera/status.hpp"

namespace tessera::tools {

class MappedFile {
 public:
  /// Refuses what is not a regular file, and empty files. Never blocks on a pipe. The error text
  /// does not repeat the path.
  static Result<MappedFile> open(const std::string& path);

  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  ~MappedFile();

  /// At least one byte; starts on a page boundary.
  std::span<const std::byte> bytes() const { return bytes_; }

 private:
  explicit MappedFile(std::span<const std::byte> bytes) : bytes_(bytes) {}

  std::span<const std::byte> bytes_;
};

/// For the whole process: a file that vanishes under its mapping (SIGBUS) prints one line and exits
/// with 2, and a limit on file sizes (SIGXFSZ) becomes an error of the call that meets it. For
/// main() only; a library must not touch signals.
void explain_file_faults();

}  // namespace tessera::tools
