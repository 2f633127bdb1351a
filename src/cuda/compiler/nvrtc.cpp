// Opening libnvrtc, and one program from source to cubin.
#include "cuda/compiler/nvrtc.h"

#include <dlfcn.h>

#include <type_traits>

namespace tessera::cuda {

Nvrtc::Nvrtc(const std::string& path) {
  void* library = nullptr;
  for (const char* name : {path.c_str(), "libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"}) {
    if (library == nullptr && *name != '\0') library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr && name == path.c_str() && !path.empty()) break;  // no silent other one
  }
  if (library == nullptr) {
    const char* error = dlerror();
    missing_ = error != nullptr ? error : "libnvrtc cannot be opened";
    return;
  }
  const auto find = [&](auto& function, const char* name) {
    void* symbol = dlsym(library, name);
    if (symbol == nullptr) missing_ = std::string("libnvrtc has no ") + name;
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(symbol);
  };
  find(nvrtc_.error_string, "nvrtcGetErrorString");
  find(nvrtc_.version, "nvrtcVersion");
  find(nvrtc_.create, "nvrtcCreateProgram");
  find(nvrtc_.destroy, "nvrtcDestroyProgram");
  find(nvrtc_.compile, "nvrtcCompileProgram");
  find(nvrtc_.log_size, "nvrtcGetProgramLogSize");
  find(nvrtc_.log, "nvrtcGetProgramLog");
  find(nvrtc_.cubin_size, "nvrtcGetCUBINSize");
  find(nvrtc_.cubin, "nvrtcGetCUBIN");
  find(nvrtc_.ptx_size, "nvrtcGetPTXSize");
  find(nvrtc_.ptx, "nvrtcGetPTX");
  nvrtc_.count_architectures = reinterpret_cast<decltype(nvrtc_.count_architectures)>(
      dlsym(library, "nvrtcGetNumSupportedArchs"));
  nvrtc_.architectures =
      reinterpret_cast<decltype(nvrtc_.architectures)>(dlsym(library, "nvrtcGetSupportedArchs"));
  // NVRTC opens its built-ins by name; beside a library that was given by path they are found only
  // if they are open already.
  const std::size_t slash = path.rfind('/');
  if (!missing_.empty() || slash == std::string::npos) return;
  const std::string builtins = path.substr(0, slash + 1) + "libnvrtc-builtins.so." + version();
  dlopen(builtins.c_str(), RTLD_NOW | RTLD_GLOBAL);
}

std::string Nvrtc::version() const {
  int major = 0, minor = 0;
  nvrtc_.version(&major, &minor);
  return std::to_string(major) + "." + std::to_string(minor);
}

int Nvrtc::major() const {
  int major = 0, minor = 0;
  nvrtc_.version(&major, &minor);
  return major;
}

std::vector<int> Nvrtc::architectures() const {
  int count = 0;
  if (nvrtc_.count_architectures == nullptr || nvrtc_.architectures == nullptr ||
      nvrtc_.count_architectures(&count) != 0) {
    return {};
  }
  std::vector<int> known(static_cast<std::size_t>(count));
  if (nvrtc_.architectures(known.data()) != 0) return {};
  return known;
}

Compilation Nvrtc::compile(const std::string& name, const std::string& source,
                           const std::vector<HeaderText>& headers,
                           const std::vector<std::string>& options) const {
  Compilation result;
  std::vector<const char*> names, texts;
  for (const HeaderText& header : headers) {
    names.push_back(header.name.c_str());
    texts.push_back(header.text.c_str());
  }
  Handle program = nullptr;
  if (const int error = nvrtc_.create(&program, source.c_str(), name.c_str(),
                                      static_cast<int>(names.size()), texts.data(), names.data());
      error != 0) {
    result.log = nvrtc_.error_string(error);
    return result;
  }
  std::vector<const char*> values;
  values.reserve(options.size());
  for (const std::string& option : options) values.push_back(option.c_str());
  result.ok = nvrtc_.compile(program, static_cast<int>(values.size()), values.data()) == 0;
  std::size_t size = 0;
  if (nvrtc_.log_size(program, &size) == 0 && size > 1) {
    result.log.resize(size);
    nvrtc_.log(program, result.log.data());
    result.log.resize(size - 1);
  }
  if (result.ok && nvrtc_.cubin_size(program, &size) == 0 && size > 0) {
    result.cubin.resize(size);
    nvrtc_.cubin(program, result.cubin.data());
  }
  if (result.ok && result.cubin.empty() && nvrtc_.ptx_size(program, &size) == 0 && size > 1) {
    result.ptx.resize(size);
    nvrtc_.ptx(program, result.ptx.data());
    result.ptx.resize(size - 1);
  }
  nvrtc_.destroy(&program);
  return result;
}

}  // namespace tessera::cuda
