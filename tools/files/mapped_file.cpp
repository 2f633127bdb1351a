#include "files/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdint>
#include <string_view>
#include <system_error>
#include <utility>

namespace tessera::tools {
namespace {

std::string reason(int error) { return std::generic_category().message(error); }

const char* kind_of(mode_t mode) {
  if (S_ISDIR(mode)) return "a directory";
  if (S_ISFIFO(mode)) return "a pipe";
  if (S_ISSOCK(mode)) return "a socket";
  if (S_ISCHR(mode) || S_ISBLK(mode)) return "a device";
  return "not a regular file";
}

Result<std::span<const std::byte>> map(int descriptor) {
  struct stat info{};
  if (fstat(descriptor, &info) != 0) return Status::device("cannot be examined: " + reason(errno));
  if (!S_ISREG(info.st_mode)) {
    return Status::invalid(std::string("is ") + kind_of(info.st_mode) +
                           "; a regular file is accepted");
  }
  if (info.st_size <= 0) return Status::invalid("is empty (0 bytes)");
  if (static_cast<std::uintmax_t>(info.st_size) > PTRDIFF_MAX) {
    return Status::device("is larger than the address space");
  }
  const auto size = static_cast<std::size_t>(info.st_size);
  void* address = mmap(nullptr, size, PROT_READ, MAP_PRIVATE, descriptor, 0);
  if (address == MAP_FAILED) return Status::device("cannot be mapped: " + reason(errno));
  return std::span(static_cast<const std::byte*>(address), size);
}

extern "C" void on_bus_error(int signal, siginfo_t* info, void* /*context*/) {
  if (info->si_code == BUS_ADRERR) {
    static constexpr std::string_view kLine =
        "tessera: a mapped file became shorter, or its disk failed, while it was in use\n";
    // A failing write to stderr leaves nothing better to do.
    [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, kLine.data(), kLine.size());
    _exit(2);
  }
  struct sigaction fallback{};
  fallback.sa_handler = SIG_DFL;
  sigaction(signal, &fallback,
            nullptr);  // the faulting instruction runs again, and ends the process
}

}  // namespace

Result<MappedFile> MappedFile::open(const std::string& path) {
  // O_NONBLOCK: opening a pipe that nobody writes to must not wait.
  int descriptor = -1;
  do {
    descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  } while (descriptor < 0 && errno == EINTR);
  if (descriptor < 0) return Status::invalid("cannot be opened: " + reason(errno));
  const auto mapped = map(descriptor);
  close(descriptor);
  if (!mapped.ok()) return mapped.status();
  return MappedFile(mapped.value());
}

MappedFile::MappedFile(MappedFile&& other) noexcept : bytes_(std::exchange(other.bytes_, {})) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(bytes_, other.bytes_);
  return *this;
}

MappedFile::~MappedFile() {
  if (!bytes_.empty()) munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
}

void explain_file_faults() {
  struct sigaction action{};
  action.sa_sigaction = on_bus_error;
  action.sa_flags = SA_SIGINFO;
  sigaction(SIGBUS, &action, nullptr);
  std::signal(SIGXFSZ, SIG_IGN);
}

}  // namespace tessera::tools
