#include "layout_pages.h"

namespace tessera {

CacheTensors keep_pages(const Problem& problem, const Tensors& tensors,
                        const KeptPagesLayout& kept) {
  const core::Cache cache = given_cache(problem, tensors);
  for (int b = 0; b < problem.batch; ++b) {
    if (cache.filled(b) < 0) {
      kept.seqlens[b] = -1;  // a no-op
      continue;
    }
    const core::Sequence sequence = given_sequence(problem, tensors, b);
    kept.seqlens[b] = core::keep_pages(cache.pages, sequence, [&](int i, std::int64_t page) {
      const std::int64_t at = b * kept.stride + i;
      if (cache.pages.ids == PageIds::i64) {
        static_cast<std::int64_t*>(kept.table)[at] = page;
      } else {
        static_cast<std::int32_t*>(kept.table)[at] = static_cast<std::int32_t>(page);
      }
    });
  }
  return cache_of_kept(kept);
}

}  // namespace tessera
