#include "cuda/code.h"

#include <algorithm>

#include "cuda/backend.h"
#include "cuda/compiler/at_need.h"
#include "cuda/compiler/code_cache.h"
#include "cuda/cubins.h"
#include "cuda/target.h"

namespace tessera::cuda {
namespace {

/// Null: not part of this build.
const Cubin* find(const std::string& symbol) {
  const auto found = std::find_if(cubins().begin(), cubins().end(),
                                  [&](const Cubin& c) { return symbol == c.symbol; });
  return found == cubins().end() ? nullptr : &*found;
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

CuResult load_image(CuLibrary& library, const void* image) {
  return driver().library_load(&library, image, nullptr, nullptr, 0, nullptr, nullptr, 0);
}

}  // namespace

bool has_code(const Program& program) { return find(program.symbol) != nullptr; }

bool has_code(const core::Kernel& row) {
  const Target* const target = target_of(row.arch);
  if (target == nullptr) return false;
  const Program program = program_of(*target->architecture, row);
  return has_code(program) || can_compile(program, version_of_driver());
}

Status load_library(CuLibrary& library, const Program& program, CuStream stream) {
  const Driver& d = driver();
  const Cubin* const found = find(program.symbol);
  Status embedded;
  if (found != nullptr) {
    if (Status s = check_not_captured(program, stream, true); !s) return s;
    const CuResult result = load_image(library, found->begin);
    embedded = d.check(result, "cuLibraryLoadData");
    if (!is_other_code(result)) return embedded;
  }
  if (Status s = check_not_captured(program, stream, false); !s) return s;
  const Result<std::string> code = machine_code(program, version_of_driver());
  if (!code && found != nullptr) {
    return Status::device(program.symbol + ": this driver does not take the build's code (" +
                          embedded.text + "), and there is no other: " + code.status().text);
  }
  if (!code) return code.status();
  return d.check(load_image(library, code->data()), "cuLibraryLoadData");
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

Status compile_ahead(const Program& program, std::size_t& compiled) {
  if (has_code(program)) return {};
  // What cannot be kept is of no use to anybody.
  if (const Result<CodeCache> cache = CodeCache::open(true); !cache) return cache.status();
  return machine_code(program, version_of_driver(), &compiled).status();
}

}  // namespace tessera::cuda
