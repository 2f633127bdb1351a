// The folder of compiled code: one file a kernel, which holds what it was made from beside what was
// made. Code from it is run, so it must be this user's alone; whatever is wrong with a file, it
// counts as not there. Safe with many processes. Called by at_need.cpp and code.cpp.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/code.hpp"

namespace tessera::cuda {

/// What a file holds.
struct KeptCode {
  std::string
      made_from;  ///< all that decides about the code but NVRTC; the file's name tells its hash
  std::string made_by;  ///< which NVRTC
  std::string cubin;
};

class CodeCache {
 public:
  /// Files together have so many bytes at most, but for the one that was written last.
  static constexpr std::uint64_t kMostBytes = 256 << 20;

  /// That of the environment, as tessera::code_cache_folder says; makes it, if asked to. Errors:
  /// device (none, or not this user's alone, or it cannot be made).
  static Result<CodeCache> open(bool make);

  const std::string& folder() const { return folder_; }

  /// The code of a symbol; cubin: empty if there is none, or none that is whole.
  KeptCode read(const std::string& symbol, const std::string& made_from) const;
  /// Errors: device (the system's).
  Status write(const std::string& symbol, const KeptCode& code) const;

  /// Held while one process of several compiles what they all need; who waits longer than `seconds`
  /// goes on without.
  class Turn {
   public:
    Turn(const CodeCache& cache, const std::string& symbol, const std::string& made_from,
         double seconds);
    ~Turn();
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

   private:
    std::string path_;
    int file_ = -1;  ///< -1: it is another's
  };

  /// As tessera::cached_kernels and clear_code_cache.
  /// @{
  std::vector<CachedKernel> list() const;
  std::size_t clear() const;
  /// @}

  /// Removes what was used longest ago until the rest has most_bytes at most, but for `kept`.
  void trim(std::uint64_t most_bytes, const std::string& kept) const;

 private:
  explicit CodeCache(std::string folder) : folder_(std::move(folder)) {}

  std::string path_of(const std::string& symbol, const std::string& made_from) const;

  std::string folder_;
};

/// 64 bits of a text (FNV-1a): finds files, and damage; who may write the folder needs no
/// collision.
std::uint64_t hash_of(std::string_view text, std::uint64_t start = 0xCBF29CE484222325U);

}  // namespace tessera::cuda
