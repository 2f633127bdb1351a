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

Status load_kernel(CuKernel& kernel, const std::string& cubin, const char* function,
                   int shared_bytes, CuDevice device) {
  const Driver& d = driver();
  const Cubin* const found = find(cubin);
  if (found == nullptr) {
    return Status::device(cubin +
                          " is not part of this build: libnvrtc was missing when it was made");
  }
  CuLibrary library = nullptr;
  if (Status s =
          d.check(d.library_load(&library, found->begin, nullptr, nullptr, 0, nullptr, nullptr, 0),
                  "cuLibraryLoadData");
      !s) {
    return s;
  }
  if (Status s = d.check(d.library_kernel(&kernel, library, function), "cuLibraryGetKernel"); !s) {
    return s;
  }
  return d.check(d.kernel_set_attribute(kMaxDynamicSharedBytes, shared_bytes, kernel, device),
                 "cuKernelSetAttribute");
}

}  // namespace tessera::cuda
