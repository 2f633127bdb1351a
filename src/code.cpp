// Code that is compiled when it is needed: the public side. Everything here delegates.
#include "tessera/code.hpp"

#include "cuda/backend.h"
#include "cuda/compiler/code_cache.h"
#include "cuda/compiler/find_nvrtc.h"
#include "plan/plan.h"
#include "tessera/tessera.hpp"

namespace tessera {

Status prepare(const Plan& plan) {
  return is_gpu(plan.data().kernel.arch) ? cuda::prepare(plan.data()) : Status();
}

Result<std::size_t> compile_ahead(const Plan& plan) {
  if (!is_gpu(plan.data().kernel.arch)) return std::size_t{0};
  return cuda::compile_ahead(plan.data());
}

Result<std::string> code_cache_folder() {
  const Result<cuda::CodeCache> cache = cuda::CodeCache::open(false);
  if (!cache) return cache.status();
  return cache->folder();
}

Result<std::vector<CachedKernel>> cached_kernels() {
  const Result<cuda::CodeCache> cache = cuda::CodeCache::open(false);
  if (!cache) return cache.status();
  return cache->list();
}

Result<std::size_t> clear_code_cache() {
  const Result<cuda::CodeCache> cache = cuda::CodeCache::open(false);
  if (!cache) return cache.status();
  return cache->clear();
}

void add_nvrtc_folder(const std::string& folder) { cuda::add_nvrtc_folder(folder); }

}  // namespace tessera
