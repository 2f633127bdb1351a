#include "cuda/code.h"

#include <array>
#include <atomic>
#include <string_view>

#include "core/mma_shape.h"
#include "cuda/backend.h"
#include "cuda/compiler/at_need.h"
#include "cuda/compiler/code_cache.h"
#include "cuda/cubins.h"
#include "cuda/target.h"

namespace tessera::cuda {
namespace {

/// Of this build: what runs on such a device, or PTX of that. Null: there is none.
const Cubin* find(const Program& program, int capability, bool ptx) {
  for (const Image& image : program.architecture->images) {
    if (image.is_ptx() != ptx || !image.runs_on(capability)) continue;
    for (const Cubin& cubin : cubins()) {
      if (program.symbol == cubin.symbol && std::string_view(image.target) == cubin.target) {
        return &cubin;
      }
    }
  }
  return nullptr;
}

/// CUresult of code that is not for this device or this driver: invalid image, no binary for the
/// GPU, invalid PTX, unsupported PTX version.
bool is_other_code(CuResult result) {
  return result == 200 || result == 209 || result == 218 || result == 222;
}

/// 12020 for CUDA 12.2; 0: unknown.
int version_of_driver() {
  int version = 0;
  const Driver& d = driver();
  return d.available() && d.driver_version(&version) == 0 ? version : 0;
}

/// Nothing may be loaded into a stream that is captured before CUDA 12.3, and nothing compiled.
Status check_not_captured(const Program& program, CuStream stream, bool embedded) {
  constexpr int kLoadsInCaptures = 12030;
  if (embedded && version_of_driver() >= kLoadsInCaptures) return {};
  const Driver& d = driver();
  int captured = 0;  // CUstreamCaptureStatus
  Status status = d.check(d.stream_is_capturing(stream, &captured), "cuStreamIsCapturing");
  if (!status || captured == 0) return status;
  return Status::device(program.symbol + ": must be " + (embedded ? "loaded" : "compiled") +
                        " first, but the stream is being captured: call prepare(), or run once, " +
                        "before the capture");
}

/// False: the driver does not take the code, and `status` says why.
bool load_image(CuLibrary& library, const void* image, Status& status) {
  const Driver& d = driver();
  const CuResult result = d.library_load(&library, image, nullptr, nullptr, 0, nullptr, nullptr, 0);
  status = d.check(result, "cuLibraryLoadData");
  return !is_other_code(result);
}

std::string version_text(int capability) {
  return std::to_string(capability / 10) + "." + std::to_string(capability % 10);
}

/// What this build has of a program.
std::string images_text(const Program& program) {
  std::string text;
  for (const Cubin& cubin : cubins()) {
    if (program.symbol == cubin.symbol)
      text += (text.empty() ? "" : ", ") + std::string(cubin.target);
  }
  return text.empty() ? "none" : text;
}

}  // namespace

bool has_code(const Program& program, int capability) {
  return find(program, capability, false) != nullptr;
}

bool has_code(const Architecture& architecture, int capability) {
  for (const Image& image : architecture.images) {
    if (!image.runs_on(capability)) continue;
    for (const Cubin& cubin : cubins()) {
      if (std::string_view(image.target) == cubin.target) return true;
    }
  }
  // Who plans asks again and again, and NVRTC is looked for in many places.
  static std::array<std::atomic<int>, kArchs> made_for{};
  std::atomic<int>& known = made_for[static_cast<std::size_t>(architecture.arch)];
  if (known == capability) return true;
  if (!can_make(architecture, capability, version_of_driver())) return false;
  known = capability;
  return true;
}

bool has_code(const core::Kernel& row, const Device& device) {
  const Target* const target = target_of(row.arch);
  const bool fits = row.stages == 0 || core::mma_blocks(row, device.l1_bytes) > 0;
  return fits && target != nullptr && has_code(*target->architecture, device.capability);
}

Status load_library(CuLibrary& library, const Program& program, int capability, CuStream stream) {
  const Cubin* const code = find(program, capability, false);
  const Cubin* const ptx = find(program, capability, true);
  Status refused;  // by the driver
  if (code != nullptr) {
    if (Status s = check_not_captured(program, stream, true); !s) return s;
    if (load_image(library, code->begin, refused)) return refused;
  }
  if (Status s = check_not_captured(program, stream, false); !s) return s;
  const Result<std::string> made = machine_code(program, capability, version_of_driver());
  if (made && load_image(library, made->data(), refused)) return refused;
  if (ptx != nullptr && load_image(library, ptx->begin, refused)) return refused;
  if (made) {
    return Status::device(program.symbol +
                          ": this driver does not take what was compiled for it (" + refused.text +
                          ")");
  }
  if (code == nullptr && ptx == nullptr) {
    return Status::device(program.symbol + ": this build has no code for a GPU of " +
                          version_text(capability) + " (it has " + images_text(program) +
                          "), and nothing here compiles it: " + made.status().text);
  }
  return Status::device(program.symbol + ": this driver does not take the build's code (" +
                        refused.text + "), and there is no other: " + made.status().text);
}

Status load_function(CuFunction& function, CuLibrary library, const char* name, int shared_bytes) {
  const Driver& d = driver();
  CuKernel kernel = nullptr;
  Status status = d.check(d.library_kernel(&kernel, library, name), "cuLibraryGetKernel");
  if (status) status = d.check(d.kernel_function(&function, kernel), "cuKernelGetFunction");
  if (status) {
    status = d.check(d.function_set_attribute(function, kMaxDynamicSharedBytes, shared_bytes),
                     "cuFuncSetAttribute");
  }
  return status;
}

Status compile_ahead(const Program& program, int capability, std::size_t& compiled) {
  if (has_code(program, capability)) return {};
  // What cannot be kept is of no use to anybody.
  if (const Result<CodeCache> cache = CodeCache::open(true); !cache) return cache.status();
  return machine_code(program, capability, version_of_driver(), &compiled).status();
}

}  // namespace tessera::cuda
