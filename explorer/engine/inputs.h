// What run() would be told of a problem's sequences: their lengths, rows and pages of a cache, the
// tree. Given by the request, or made up so that there is something to see: lengths that differ,
// pages in no order.
#pragma once

#include <cstdint>
#include <vector>

#include "request.h"

namespace tessera::explorer {

class Inputs {
 public:
  /// Fields of a request that say them:
  ///   seqlens_q, seqlens_k   (batch) lengths of packed sequences
  ///   seqlens                (batch) what CacheTensors::seqlens has; so do leftpad and index
  ///   seqlens_new            (batch) new keys, of packed queries before an append
  ///   page_table             (rows or batch, seqlen_k / page_size rounded up)
  ///   tree                   (seqlen_q) the parent of each query, -1 of a root; of all sequences
  static constexpr std::string_view kFields[] = {
      "seqlens_q", "seqlens_k", "seqlens", "leftpad", "index", "seqlens_new", "page_table", "tree"};

  /// Errors: invalid: the problem, or what validate() finds wrong with them.
  static Result<Inputs> make(const Problem& problem, const Request& request);

  /// As kernels walk over them: pages that are skipped are left out already. Sizes and strides are
  /// there, elements are not.
  const Tensors& tensors() const { return tensors_; }

 private:
  Status fill(const Problem& problem, const Request& request);
  Status fill_packed(const Problem& problem, const Request& request);
  Status fill_cache(const Problem& problem, const Request& request);
  Status fill_pages(const Problem& problem, const Request& request);
  Status fill_tree(const Problem& problem, const Request& request);
  Status keep_pages(const Problem& problem);

  std::vector<std::int32_t> cu_seqlens_q_, cu_seqlens_k_, seqlens_, cu_seqlens_new_, index_,
      leftpad_, pages_, kept_pages_, kept_seqlens_;
  std::vector<std::int64_t> wide_pages_, kept_wide_pages_;
  std::vector<std::uint64_t> tree_;
  Tensors tensors_;
};

}  // namespace tessera::explorer
