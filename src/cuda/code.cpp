#include "cuda/code.h"

#include <algorithm>

#include "cuda/cubins.h"

#include "cuda/backend.h"
#include "cuda/symbol.h"

namespace tessera::cuda {
namespace {

/// Null: not part of this build.
const Cubin* find(const std::string& symbol) {
  const auto found = std::find_if(cubins().begin(), cubins().end(),
                                  [&](const Cubin& c) { return symbol == c.symbol; });
  return found == cubins().end() ? nullptr : &*found;
}

}  // namespace

bool has_code(const core::Kernel& row) { return find(symbol_of(row)) != nullptr; }

Status load_function(CuFunction& function, const std::string& cubin, const char* name,
                     int shared_bytes) {
  const Driver& d = driver();
  const Cubin* const found = find(cubin);
  if (found == nullptr) {
    return Status::device(cubin +
                          " is not part of this build: libnvrtc was missing when it was made");
  }
  CuLibrary library = nullptr;
  CuKernel kernel = nullptr;
  Status status =
      d.check(d.library_load(&library, found->begin, nullptr, nullptr, 0, nullptr, nullptr, 0),
              "cuLibraryLoadData");
  if (status) status = d.check(d.library_kernel(&kernel, library, name), "cuLibraryGetKernel");
  if (status) status = d.check(d.kernel_function(&function, kernel), "cuKernelGetFunction");
  if (status) {
    status = d.check(d.function_set_attribute(function, kMaxDynamicSharedBytes, shared_bytes),
                     "cuFuncSetAttribute");
  }
  return status;
}

}  // namespace tessera::cuda
