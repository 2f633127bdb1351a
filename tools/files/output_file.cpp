#include "files/output_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <filesystem>
#include <functional>
#include <limits>
#include <system_error>
#include <utility>

namespace tessera::tools {
namespace {

Status refused(const std::string& step, int error) {
  return Status::device("cannot be " + step + ": " + std::generic_category().message(error));
}

/// Calls `make` with names of hidden neighbours of `target` until one is free, which it returns.
Result<std::string> make_neighbour(const std::filesystem::path& target,
                                   const std::function<bool(const char*)>& make) {
  // One name a process and file: a crash leaves a hidden file that says whose it is.
  static std::atomic<unsigned> counter{0};
  int error = EEXIST;
  for (int attempt = 0; attempt < 100 && (error == EEXIST || error == EINTR); ++attempt) {
    std::string name = (target.parent_path() / (".tessera-" + std::to_string(getpid()) + "-" +
                                                std::to_string(counter++) + ".partial"))
                           .string();
    if (make(name.c_str())) return name;
    error = errno;
  }
  return refused("created", error);
}

/// What linkat() takes to name an unnamed file.
std::string link_of(int descriptor) { return "/proc/self/fd/" + std::to_string(descriptor); }

}  // namespace

bool same_file(const std::string& a, const std::string& b) {
  struct stat of_a{}, of_b{};
  const bool has_a = stat(a.c_str(), &of_a) == 0, has_b = stat(b.c_str(), &of_b) == 0;
  if (has_a && has_b) return of_a.st_dev == of_b.st_dev && of_a.st_ino == of_b.st_ino;
  if (has_a != has_b) return false;
  std::error_code error_a, error_b;
  const auto path_a =
      std::filesystem::weakly_canonical(std::filesystem::absolute(a, error_a), error_a);
  const auto path_b =
      std::filesystem::weakly_canonical(std::filesystem::absolute(b, error_b), error_b);
  return error_a || error_b ? a == b : path_a == path_b;
}

OutputFile::OutputFile(OutputFile&& other) noexcept
    : target_(std::move(other.target_)),
      temporary_(std::exchange(other.temporary_, {})),
      descriptor_(std::exchange(other.descriptor_, -1)),
      bytes_(std::exchange(other.bytes_, {})) {}

Result<OutputFile> OutputFile::create(const std::string& path, std::uint64_t size,
                                      bool may_be_unnamed) {
  std::filesystem::path target = path;
  struct stat existing{};
  const bool exists = stat(path.c_str(), &existing) == 0;
  if (exists) {
    if (!S_ISREG(existing.st_mode)) {
      return Status::invalid("exists and is not a regular file; it will not be replaced");
    }
    std::error_code error;
    target = std::filesystem::canonical(target, error);
    if (error) return refused("resolved", error.value());
  }
  OutputFile file(target.string());
  if (Status status = file.open(may_be_unnamed); !status) return status;
  // A replaced file keeps its permissions: what was private stays private.
  if (exists && fchmod(file.descriptor_, existing.st_mode & 0777) != 0) {
    return refused("created", errno);
  }
  if (Status status = file.map(size); !status) return status;
  return file;
}

Status OutputFile::open(bool may_be_unnamed) {
  constexpr int kFlags = O_RDWR | O_CLOEXEC;
  if (may_be_unnamed) {
    const std::filesystem::path folder = std::filesystem::path(target_).parent_path();
    descriptor_ = ::open(folder.empty() ? "." : folder.c_str(), kFlags | O_TMPFILE, 0666);
    if (descriptor_ >= 0 && access(link_of(descriptor_).c_str(), F_OK) == 0) return {};
    if (descriptor_ >= 0) close(std::exchange(descriptor_, -1));  // no /proc: could not be named
  }
  auto made = make_neighbour(target_, [&](const char* name) {
    descriptor_ = ::open(name, kFlags | O_CREAT | O_EXCL, 0666);
    return descriptor_ >= 0;
  });
  if (!made) return made.status();
  temporary_ = std::move(*made);
  return {};
}

Status OutputFile::map(std::uint64_t size) {
  const std::string step = "made " + std::to_string(size) + " bytes long";
  if (size > std::numeric_limits<off_t>::max()) return refused(step, EFBIG);
  // Taking the space now makes a full disk an error here, not a SIGBUS at some later store.
  int error = EINTR;
  while (error == EINTR) error = posix_fallocate(descriptor_, 0, static_cast<off_t>(size));
  if (error != 0) return refused(step, error);
  void* const address = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor_, 0);
  if (address == MAP_FAILED) return refused("mapped", errno);
  bytes_ = {static_cast<std::byte*>(address), size};
  return {};
}

OutputFile::~OutputFile() {
  if (!bytes_.empty()) munmap(bytes_.data(), bytes_.size());
  if (descriptor_ >= 0) close(descriptor_);
  if (!temporary_.empty()) unlink(temporary_.c_str());
}

Status OutputFile::commit() {
  // Some file systems report a full disk only here.
  if (msync(bytes_.data(), bytes_.size(), MS_SYNC) != 0 || fsync(descriptor_) != 0) {
    return refused("written", errno);
  }
  if (temporary_.empty()) {
    // A link cannot replace a file; a renaming can.
    auto linked = make_neighbour(target_, [&](const char* name) {
      return linkat(AT_FDCWD, link_of(descriptor_).c_str(), AT_FDCWD, name, AT_SYMLINK_FOLLOW) == 0;
    });
    if (!linked) return linked.status();
    temporary_ = std::move(*linked);
  }
  if (rename(temporary_.c_str(), target_.c_str()) != 0) return refused("put in place", errno);
  temporary_.clear();
  return {};
}

}  // namespace tessera::tools
