#include "cuda/compiler/code_cache.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <random>
#include <string_view>
#include <thread>

#include "cuda/compiler/environment.h"

namespace tessera::cuda {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kFormat = "tessera code 1\n";
constexpr std::string_view kCode = ".code", kLock = ".lock", kPart = ".part";
constexpr std::uint64_t kLargestFile = 256 << 20;
constexpr double kStaleSeconds = 3600.0;  // of a lock or part that nobody can still be at

Status refused(const std::string& what, int error) {
  return Status::device(what + ": " + std::strerror(error));
}

/// An open file, closed at the end.
struct File {
  int number = -1;

  explicit File(int opened) : number(opened) {}
  ~File() {
    if (number >= 0) close(number);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
};

/// This user's, and nobody else may write it.
bool is_own(const struct stat& of) {
  return of.st_uid == geteuid() && (of.st_mode & (S_IWGRP | S_IWOTH)) == 0;
}

bool write_all(int file, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t count = ::write(file, bytes.data(), bytes.size());
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return false;
    bytes.remove_prefix(static_cast<std::size_t>(count));
  }
  return true;
}

std::string read_all(int file, std::uint64_t size) {
  std::string bytes(size, '\0');
  std::size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t count = ::read(file, bytes.data() + done, bytes.size() - done);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return {};
    done += static_cast<std::size_t>(count);
  }
  return bytes;
}

std::string number_text(std::uint64_t x) { return {reinterpret_cast<const char*>(&x), sizeof x}; }

/// Takes a number, or so many bytes, off the front; false: there are not so many.
/// @{
bool take(std::string_view& from, std::uint64_t& x) {
  if (from.size() < sizeof x) return false;
  std::memcpy(&x, from.data(), sizeof x);
  from.remove_prefix(sizeof x);
  return true;
}
bool take(std::string_view& from, std::uint64_t size, std::string& x) {
  if (from.size() < size) return false;
  x = from.substr(0, size);
  from.remove_prefix(size);
  return true;
}
/// @}

std::string text_of(const KeptCode& code) {
  std::string body = number_text(code.made_from.size()) + number_text(code.made_by.size()) +
                     number_text(code.cubin.size()) + code.made_from + code.made_by + code.cubin;
  return std::string(kFormat) + number_text(hash_of(body)) + body;
}

/// False: damaged, or of another format.
bool parse(std::string_view text, KeptCode& code) {
  std::uint64_t hash = 0, sizes[3] = {};
  if (!text.starts_with(kFormat)) return false;
  text.remove_prefix(kFormat.size());
  if (!take(text, hash) || hash != hash_of(text)) return false;
  for (std::uint64_t& size : sizes) {
    if (!take(text, size)) return false;
  }
  return take(text, sizes[0], code.made_from) && take(text, sizes[1], code.made_by) &&
         take(text, sizes[2], code.cubin) && text.empty();
}

std::string hex(std::uint64_t x) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text(16, '0');
  for (std::size_t i = 16; i-- > 0; x >>= 4) text[i] = kDigits[x & 15];
  return text;
}

/// The folder that the environment names; empty: none.
std::string named_folder() {
  if (std::string own = environment("TESSERA_CACHE_DIR"); !own.empty()) return own;
  // A relative one is to be ignored, says the XDG base directory specification.
  const std::string cache = environment("XDG_CACHE_HOME"), home = environment("HOME");
  if (cache.starts_with('/')) return cache + "/tessera";
  return home.empty() ? "" : home + "/.cache/tessera";
}

/// Every regular file of the folder whose name ends so.
template <class Visit>
void for_each_file(const std::string& folder, std::string_view end, const Visit& visit) {
  std::error_code error;
  for (fs::directory_iterator at(folder, error), last; !error && at != last; at.increment(error)) {
    struct stat of{};
    const std::string path = at->path().string();
    if (path.ends_with(end) && lstat(path.c_str(), &of) == 0 && S_ISREG(of.st_mode))
      visit(path, of);
  }
}

/// What processes that were stopped have left.
void remove_stale(const std::string& folder) {
  const auto now = std::chrono::system_clock::to_time_t(std::chrono::system_clock::now());
  for (const std::string_view end : {kLock, kPart}) {
    for_each_file(folder, end, [&](const std::string& path, const struct stat& of) {
      if (std::difftime(now, of.st_mtime) > kStaleSeconds) unlink(path.c_str());
    });
  }
}

}  // namespace

std::uint64_t hash_of(std::string_view text, std::uint64_t start) {
  std::uint64_t hash = start;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001B3U;
  return hash;
}

Result<CodeCache> CodeCache::open(bool make) {
  const std::string folder = named_folder();
  if (folder.empty()) {
    return Status::device("no folder for compiled code: set TESSERA_CACHE_DIR, or HOME");
  }
  const std::string name = "folder of compiled code '" + folder + "'";
  if (make) {
    std::error_code error;
    fs::create_directories(fs::path(folder).parent_path(), error);
    if (mkdir(folder.c_str(), S_IRWXU) != 0 && errno != EEXIST) return refused(name, errno);
  }
  struct stat of{};
  if (lstat(folder.c_str(), &of) != 0) {
    if (errno == ENOENT && !make) return CodeCache(folder);  // an empty one
    return refused(name, errno);
  }
  if (!S_ISDIR(of.st_mode))
    return Status::device(name + ": is not a folder; set TESSERA_CACHE_DIR");
  if (!is_own(of)) {
    return Status::device(name + ": others can write there, and what it has is run; it must be " +
                          "yours alone (chmod 700), or set TESSERA_CACHE_DIR");
  }
  return CodeCache(folder);
}

std::string CodeCache::path_of(const std::string& symbol, const std::string& made_from) const {
  return folder_ + "/" + symbol + "." + hex(hash_of(made_from));
}

KeptCode CodeCache::read(const std::string& symbol, const std::string& made_from) const {
  const std::string path = path_of(symbol, made_from) + std::string(kCode);
  const File file(::open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK));
  struct stat of{};
  if (file.number < 0 || fstat(file.number, &of) != 0 || !S_ISREG(of.st_mode) || !is_own(of))
    return {};
  const auto size = static_cast<std::uint64_t>(of.st_size);
  if (size > kLargestFile) return {};
  KeptCode code;
  if (!parse(read_all(file.number, size), code) || code.made_from != made_from) return {};
  futimens(file.number, nullptr);  // it was used now; of a folder that is read only, never mind
  return code;
}

Status CodeCache::write(const std::string& symbol, const KeptCode& code) const {
  const std::string stem = path_of(symbol, code.made_from), path = stem + std::string(kCode);
  std::random_device random;
  std::string part = stem + "." + std::to_string(getpid()) + "." +
                     hex(std::uint64_t{random()} << 32 | random()) + std::string(kPart);
  const File file(::open(part.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC,
                         S_IRUSR | S_IWUSR));
  if (file.number < 0) return refused(part, errno);
  // Whole on the disk before it has its name: nobody finds half of it.
  if (!write_all(file.number, text_of(code)) || fsync(file.number) != 0 ||
      std::rename(part.c_str(), path.c_str()) != 0) {
    const int error = errno;
    unlink(part.c_str());
    return refused(path, error);
  }
  trim(kMostBytes, path);
  remove_stale(folder_);
  return {};
}

CodeCache::Turn::Turn(const CodeCache& cache, const std::string& symbol,
                      const std::string& made_from, double seconds)
    : path_(cache.path_of(symbol, made_from) + std::string(kLock)) {
  using Clock = std::chrono::steady_clock;
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  do {
    const int file =
        ::open(path_.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, S_IRUSR | S_IWUSR);
    if (file < 0) return;
    struct stat mine{}, there{};
    // Who had it before has removed it: then it is another file, and others ask for that one.
    if (flock(file, LOCK_EX | LOCK_NB) == 0 && fstat(file, &mine) == 0 &&
        lstat(path_.c_str(), &there) == 0 && mine.st_ino == there.st_ino) {
      file_ = file;
      return;
    }
    close(file);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  } while (Clock::now() < end);
}

CodeCache::Turn::~Turn() {
  if (file_ < 0) return;
  unlink(path_.c_str());
  close(file_);
}

std::vector<CachedKernel> CodeCache::list() const {
  std::vector<CachedKernel> kernels;
  for_each_file(folder_, kCode, [&](const std::string& path, const struct stat& of) {
    std::string name = path.substr(folder_.size() + 1);
    name = name.substr(0, name.find('.'));
    kernels.push_back({name, static_cast<std::uint64_t>(of.st_size), of.st_mtime});
  });
  std::sort(kernels.begin(), kernels.end(),
            [](const auto& a, const auto& b) { return a.name < b.name; });
  return kernels;
}

std::size_t CodeCache::clear() const {
  std::vector<std::string> paths;
  for (const std::string_view end : {kCode, kLock, kPart}) {
    for_each_file(folder_, end,
                  [&](const std::string& path, const struct stat&) { paths.push_back(path); });
  }
  std::size_t removed = 0;
  for (const std::string& path : paths) {
    if (unlink(path.c_str()) == 0 && path.ends_with(kCode)) ++removed;
  }
  return removed;
}

void CodeCache::trim(std::uint64_t most_bytes, const std::string& kept) const {
  struct Kept {
    std::time_t used;
    std::string path;
    std::uint64_t bytes;
  };
  std::vector<Kept> files;
  std::uint64_t bytes = 0;
  for_each_file(folder_, kCode, [&](const std::string& path, const struct stat& of) {
    bytes += static_cast<std::uint64_t>(of.st_size);
    if (path != kept) files.push_back({of.st_mtime, path, static_cast<std::uint64_t>(of.st_size)});
  });
  std::sort(files.begin(), files.end(),
            [](const Kept& a, const Kept& b) { return a.used < b.used; });
  for (const Kept& file : files) {
    if (bytes <= most_bytes) return;
    if (unlink(file.path.c_str()) == 0) bytes -= file.bytes;
  }
}

}  // namespace tessera::cuda
