#include "inputs.h"

#include <numeric>

#include "plan/checks.h"
#include "plan/layout_pages.h"
#include "plan/plan.h"

namespace tessera::explorer {
namespace {

constexpr std::int64_t kMostPages = std::int64_t{1} << 20;  // of a table

/// Of 1024, scattered evenly: the golden section's multiples; 0 of the first.
std::int64_t spread(std::int64_t i) { return i * 633 % 1024; }

Status check_count(const char* name, std::size_t count, std::int64_t wanted, const char* why) {
  if (static_cast<std::int64_t>(count) == wanted) return {};
  return Status::invalid(std::string(name) + ": has " + std::to_string(count) +
                         " numbers; must have " + why + " = " + std::to_string(wanted));
}

Status check_pages(std::int64_t rows, std::int64_t columns) {
  if (columns == 0 || rows <= kMostPages / columns) return {};
  return Status::invalid("cache.page_table: has " + std::to_string(rows) + " rows of " +
                         std::to_string(columns) + "; pages are laid out for at most " +
                         std::to_string(kMostPages));
}

/// The field's numbers, one a sequence; make(b) where it is not there.
template <class Make>
Result<std::vector<std::int64_t>> of_batch(const Problem& p, const Request& request,
                                           const char* name, const Make& make) {
  Result<std::vector<std::int64_t>> numbers = request.numbers(name, INT32_MIN, INT32_MAX);
  if (!numbers) return numbers;
  if (request.has(name)) {
    if (Status s = check_count(name, numbers->size(), p.batch, "batch"); !s) return s;
    return numbers;
  }
  for (std::int64_t b = 0; b < p.batch; ++b) numbers->push_back(make(b));
  return numbers;
}

/// Lengths of which none is longer than `longest`, with that sum: around what is left on average.
std::vector<std::int64_t> share(std::int64_t total, std::int64_t longest, std::int64_t batch) {
  std::vector<std::int64_t> lengths;
  for (std::int64_t b = 0; b < batch; ++b) {
    const std::int64_t after = batch - b - 1, average = total / (after + 1);
    const std::int64_t wanted = average + average / 2 - average * spread(b) / 1024;
    const std::int64_t least = core::max<std::int64_t>(total - after * longest, 0);
    lengths.push_back(core::max(core::min(wanted, core::min(longest, total)), least));
    total -= lengths.back();
  }
  return lengths;
}

std::vector<std::int32_t> narrow(const std::vector<std::int64_t>& numbers) {
  std::vector<std::int32_t> list;
  for (const std::int64_t number : numbers) list.push_back(static_cast<std::int32_t>(number));
  return list;
}

/// Where sequences of these lengths begin and the last one ends. Sums beyond int32 stay there: no
/// problem has them, and validate() says so.
std::vector<std::int32_t> boundaries(const std::vector<std::int64_t>& lengths) {
  std::vector<std::int32_t> list = {0};
  std::int64_t sum = 0;
  for (const std::int64_t length : lengths) {
    sum = core::min<std::int64_t>(core::max<std::int64_t>(sum + length, INT32_MIN), INT32_MAX);
    list.push_back(static_cast<std::int32_t>(sum));
  }
  return list;
}

/// A pointer to nothing that is ever read.
template <class AnyTensor>
void place(AnyTensor& tensor, std::int64_t rows, std::int64_t heads, std::int64_t dim) {
  static float nothing = 0.0F;
  tensor.data = &nothing;
  tensor.stride_batch = rows * heads * dim;
  tensor.stride_seqlen = heads * dim;
  tensor.stride_head = dim;
}

}  // namespace

Result<Inputs> Inputs::make(const Problem& problem, const Request& request) {
  if (Status s = tessera::validate(problem); !s) return s;
  Inputs inputs;
  if (Status s = inputs.fill(problem, request); !s) return s;
  return inputs;
}

Status Inputs::fill(const Problem& problem, const Request& request) {
  if ((problem.packed || problem.cache || problem.tree) && problem.batch > kMostParts) {
    return Status::invalid("batch = " + std::to_string(problem.batch) + ": lengths are laid out " +
                           "for at most " + std::to_string(kMostParts) + " sequences");
  }
  // The forward of the same problem: validate() asks less of its tensors.
  Problem p = problem;
  p.pass = Pass::forward;
  const std::int64_t rows_k = p.cache && p.cache->paged() ? p.cache->page_size : p.seqlen_k;
  place(tensors_.q, p.seqlen_q, p.num_heads, p.head_dim);
  if (p.qv) place(tensors_.qv, p.seqlen_q, p.num_heads, p.head_dim_v);
  place(tensors_.k, rows_k, p.num_heads_k, p.head_dim);
  place(tensors_.v, rows_k, p.num_heads_k, p.head_dim_v);
  place(tensors_.o, p.seqlen_q, p.num_heads, p.head_dim_v);
  p.bias.reset();
  p.sink = false;
  p.alibi = PerHead::none;
  p.scales = {};
  p.v_tiles = false;
  if (Status s = fill_packed(p, request); !s) return s;
  if (p.cache) {
    if (Status s = fill_cache(p, request); !s) return s;
  }
  if (Status s = fill_tree(p, request); !s) return s;
  if (Status s = tessera::validate(p, tensors_, Memory::host); !s) return s;
  return skips_pages(p) ? keep_pages(p) : Status();
}

/// Kernels are told of the pages that are not skipped.
Status Inputs::keep_pages(const Problem& p) {
  const std::int64_t columns = kept_page_columns(p);
  if (Status s = check_pages(p.batch, columns); !s) return s;
  const auto size = static_cast<std::size_t>(p.batch * columns);
  kept_seqlens_.resize(static_cast<std::size_t>(p.batch));
  KeptPagesLayout kept = {nullptr, columns, kept_seqlens_.data()};
  if (p.cache->page_ids == PageIds::i32) {
    kept_pages_.resize(size);
    kept.table = kept_pages_.data();
  } else {
    kept_wide_pages_.resize(size);
    kept.table = kept_wide_pages_.data();
  }
  tensors_.cache = tessera::keep_pages(p, tensors_, kept);
  return {};
}

Status Inputs::fill_packed(const Problem& p, const Request& request) {
  const auto fill_one = [&](const char* name, std::int64_t total, std::int64_t longest,
                            std::vector<std::int32_t>& cu_seqlens) -> Status {
    const std::vector<std::int64_t> shares = share(total, longest, p.packed ? p.batch : 0);
    const Result<std::vector<std::int64_t>> lengths = of_batch(
        p, request, name, [&](std::int64_t b) { return shares[static_cast<std::size_t>(b)]; });
    if (!lengths) return lengths.status();
    cu_seqlens = boundaries(*lengths);
    return {};
  };
  if (!p.packed) return {};
  if (Status s = fill_one("seqlens_q", p.total_q, p.seqlen_q, cu_seqlens_q_); !s) return s;
  tensors_.cu_seqlens_q = cu_seqlens_q_.data();
  if (p.cache) return {};
  if (Status s = fill_one("seqlens_k", p.total_k, p.seqlen_k, cu_seqlens_k_); !s) return s;
  tensors_.cu_seqlens_k = cu_seqlens_k_.data();
  return {};
}

Status Inputs::fill_cache(const Problem& p, const Request& request) {
  const CacheShape& shape = *p.cache;
  CacheTensors& cache = tensors_.cache;
  const bool before = shape.lengths == Lengths::before;
  const std::int64_t added = before ? shape.seqlen_new : 0, room = p.seqlen_k - added;
  const auto length_of = [&](std::int64_t b) {
    if (shape.paged() && shape.num_pages == 0) return std::int64_t{-1};
    return room - room / 2 * spread(b) / 1024;
  };
  if (before && p.packed) {
    const Result<std::vector<std::int64_t>> lengths =
        of_batch(p, request, "seqlens_new", [added](std::int64_t) { return added; });
    if (!lengths) return lengths.status();
    cu_seqlens_new_ = boundaries(*lengths);
    cache.cu_seqlens_new = cu_seqlens_new_.data();
  }
  const auto fill_one = [&](const char* name, bool wanted, std::vector<std::int32_t>& numbers,
                            const std::int32_t*& pointer, const auto& make) -> Status {
    if (!wanted) return {};
    const Result<std::vector<std::int64_t>> list = of_batch(p, request, name, make);
    if (!list) return list.status();
    numbers = narrow(*list);
    pointer = numbers.data();
    return {};
  };
  Status status =
      fill_one("seqlens", shape.lengths != Lengths::full, seqlens_, cache.seqlens, length_of);
  if (status) {
    status = fill_one("index", shape.rows > 0, index_, cache.index,
                      [&](std::int64_t b) { return shape.rows - 1 - b % shape.rows; });
  }
  if (status) {
    status = fill_one("leftpad", shape.leftpad, leftpad_, cache.leftpad, [&](std::int64_t b) {
      return core::max<std::int64_t>(length_of(b), 0) / 8 * spread(b) / 1024;
    });
  }
  return status && shape.paged() ? fill_pages(p, request) : status;
}

Status Inputs::fill_pages(const Problem& p, const Request& request) {
  const CacheShape& shape = *p.cache;
  const std::int64_t rows = shape.rows > 0 ? shape.rows : p.batch;
  const std::int64_t columns = kept_page_columns(p);
  if (Status s = check_pages(rows, columns); !s) return s;
  Result<std::vector<std::int64_t>> given = request.numbers("page_table", INT32_MIN, INT32_MAX);
  if (!given) return given.status();
  if (request.has("page_table")) {
    const char* const why = shape.rows > 0 ? "rows * columns" : "batch * columns";
    if (Status s = check_count("page_table", given->size(), rows * columns, why); !s) return s;
    wide_pages_ = *std::move(given);
  } else {
    // In steps that meet each page once; a table that may skip skips one of four.
    const std::int64_t count = core::min<std::int64_t>(shape.num_pages, INT32_MAX);
    std::int64_t step = core::max<std::int64_t>(1, count * 633 / 1024);
    while (std::gcd(step, count) > 1) ++step;
    for (std::int64_t i = 0; i < rows * columns; ++i) {
      const bool skipped = count == 0 || (shape.skips && i % 4 == 3);
      wide_pages_.push_back(skipped ? -1 : i % count * step % count);
    }
  }
  tensors_.cache.stride_page_table = columns;
  if (shape.page_ids == PageIds::i32) {
    pages_ = narrow(wide_pages_);
    tensors_.cache.page_table = pages_.data();
  } else {
    tensors_.cache.page_table = wide_pages_.data();
  }
  return {};
}

Status Inputs::fill_tree(const Problem& p, const Request& request) {
  if (!p.tree) return {};
  Result<std::vector<std::int64_t>> parents = request.numbers("tree", -1, 63);
  if (!parents) return parents.status();
  if (!request.has("tree")) {
    for (std::int64_t i = 0; i < p.seqlen_q; ++i) parents->push_back(i == 0 ? -1 : (i - 1) / 2);
  }
  if (Status s = check_count("tree", parents->size(), p.seqlen_q, "seqlen_q"); !s) return s;
  std::vector<std::uint64_t> words;
  for (const std::int64_t parent : *parents) {
    const std::size_t i = words.size();
    if (parent >= static_cast<std::int64_t>(i)) {
      return Status::invalid("tree[" + std::to_string(i) + "] = " + std::to_string(parent) +
                             ": must be an earlier query, or -1");
    }
    const std::uint64_t path = parent < 0 ? 0 : words[static_cast<std::size_t>(parent)];
    words.push_back(path | std::uint64_t{1} << i);
  }
  for (int b = 0; b < p.batch; ++b) {
    const int queries = core::max(sequences_of(p, tensors_).at(b).seqlen_q, 0);
    const auto count = core::min(static_cast<std::size_t>(queries), words.size());
    tree_.insert(tree_.end(), words.begin(), words.begin() + static_cast<std::ptrdiff_t>(count));
  }
  tensors_.tree_mask = tree_.data();
  return {};
}

}  // namespace tessera::explorer
