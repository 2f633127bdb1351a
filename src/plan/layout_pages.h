// Where the pages lie that a table does not skip (S13), with the lengths of sequences that have
// these alone: made before a kernel runs that knows nothing of skipping. On a CPU
// (cpu/backend.cpp) and on a GPU (cuda/keep_pages.h).
#pragma once

#include "core/kept_pages.h"
#include "plan/plan.h"
#include "plan/workspace.h"

namespace tessera {

struct KeptPagesLayout {
  void* table = nullptr;            ///< [batch][stride] page numbers, of the table's type
  std::int64_t stride = 0;          ///< columns
  std::int32_t* seqlens = nullptr;  ///< [batch]
};

/// Columns of the table.
TESSERA_HD std::int64_t kept_page_columns(const Problem& p) {
  return core::ceil_div(p.seqlen_k, p.cache->page_size);
}

TESSERA_HD KeptPagesLayout layout_kept_pages(Workspace& workspace, const PlanData& plan) {
  KeptPagesLayout layout;
  const Problem& p = plan.problem;
  if (!lists_pages(plan)) return layout;
  layout.stride = kept_page_columns(p);
  const std::int64_t bytes = p.cache->page_ids == PageIds::i64 ? 8 : 4;
  layout.table = workspace.take<std::byte>("kept_pages", p.batch * layout.stride * bytes);
  layout.seqlens = workspace.take<std::int32_t>("kept_seqlens", p.batch);
  return layout;
}

/// A cache whose pages and lengths are these.
TESSERA_HD CacheTensors cache_of_kept(const KeptPagesLayout& layout) {
  CacheTensors cache;
  cache.seqlens = layout.seqlens;
  cache.page_table = layout.table;
  cache.stride_page_table = layout.stride;
  return cache;
}

/// Lists them, on the host; returns the cache that has these alone.
CacheTensors keep_pages(const Problem& problem, const Tensors& tensors,
                        const KeptPagesLayout& kept);

}  // namespace tessera
