#include "cuda/compiler/find_nvrtc.h"

#include <link.h>

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "cuda/compiler/environment.h"

namespace tessera::cuda {
namespace {

constexpr const char* kAdvice = "pip install nvidia-cuda-nvrtc, or set TESSERA_NVRTC to the file";

struct Folders {
  std::mutex mutex;
  std::vector<std::string> list;
};

Folders& added() {
  static Folders all;
  return all;
}

/// Whether a file's name is that of libnvrtc, of any version or renamed; not of its built-ins.
bool is_nvrtc(const std::string& path) {
  const std::string name = path.substr(path.rfind('/') + 1);
  return name.starts_with("libnvrtc") && !name.starts_with("libnvrtc-builtins") &&
         name.find(".so") != std::string::npos;
}

std::vector<std::string> open_already() {
  std::vector<std::string> found;
  dl_iterate_phdr(
      [](dl_phdr_info* info, std::size_t, void* to) {
        const std::string path = info->dlpi_name == nullptr ? "" : info->dlpi_name;
        if (is_nvrtc(path)) static_cast<std::vector<std::string>*>(to)->push_back(path);
        return 0;
      },
      &found);
  return found;
}

/// Files to try, best first; "" is what the system knows.
std::vector<std::string> candidates() {
  if (std::string only = environment("TESSERA_NVRTC"); !only.empty()) return {only};
  std::vector<std::string> files = open_already(), folders;
  {
    const std::scoped_lock lock(added().mutex);
    for (const std::string& folder : added().list) {
      for (const char* inside : {"/nvidia/cu13/lib", "/nvidia/cuda_nvrtc/lib", ""}) {
        folders.push_back(folder + inside);
      }
    }
  }
  if (const std::string conda = environment("CONDA_PREFIX"); !conda.empty()) {
    folders.push_back(conda + "/lib");
  }
  for (const char* name : {"CUDA_HOME", "CUDA_PATH"}) {
    if (const std::string toolkit = environment(name); !toolkit.empty()) {
      folders.push_back(toolkit + "/lib64");
    }
  }
  folders.emplace_back("/usr/local/cuda/lib64");
  for (const std::string& folder : folders) {
    for (const char* name : {"/libnvrtc.so.13", "/libnvrtc.so.12"}) {
      std::error_code error;
      if (std::filesystem::exists(folder + name, error)) files.push_back(folder + name);
    }
  }
  files.emplace_back();
  return files;
}

/// The number in "sm_90a".
int capability_of(const std::string& option) {
  const auto digit = std::find_if(option.begin(), option.end(),
                                  [](unsigned char c) { return std::isdigit(c) != 0; });
  return digit == option.end() ? 0 : std::stoi(std::string(digit, option.end()));
}

/// Why this one will not do; empty: it will.
std::string objection(const Nvrtc& nvrtc, const std::string& file, const NvrtcNeed& need) {
  if (!nvrtc.missing().empty()) return nvrtc.missing();
  const std::string name = "libnvrtc " + nvrtc.version() + (file.empty() ? "" : " (" + file + ")");
  const std::vector<int> known = nvrtc.architectures();
  if (!known.empty() &&
      std::find(known.begin(), known.end(), capability_of(need.target)) == known.end())
    return name + " does not know " + need.target;
  if (need.driver > 0 && nvrtc.major() > need.driver / 1000) {
    return name + " makes code for drivers of CUDA " + std::to_string(nvrtc.major()) +
           ", and this one is of " + std::to_string(need.driver / 1000) + "." +
           std::to_string(need.driver % 1000 / 10);
  }
  return {};
}

}  // namespace

void add_nvrtc_folder(const std::string& folder) {
  const std::scoped_lock lock(added().mutex);
  auto& list = added().list;
  if (std::find(list.begin(), list.end(), folder) == list.end()) list.push_back(folder);
}

FoundNvrtc find_nvrtc(const NvrtcNeed& need) {
  static std::mutex mutex;
  static std::map<std::string, std::unique_ptr<Nvrtc>> opened;  // by file; those that could be
  const std::scoped_lock lock(mutex);
  std::string why;
  for (const std::string& file : candidates()) {
    std::unique_ptr<Nvrtc>& nvrtc = opened[file];
    if (nvrtc == nullptr) nvrtc = std::make_unique<Nvrtc>(file);
    const std::string found = objection(*nvrtc, file, need);
    if (found.empty()) return {nvrtc.get(), {}};
    // One that is there says more than that another one is not.
    if (why.empty() || nvrtc->missing().empty()) why = found;
    if (!nvrtc->missing().empty()) nvrtc.reset();
  }
  return {nullptr, why + "; " + kAdvice};
}

}  // namespace tessera::cuda
