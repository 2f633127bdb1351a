#include "plan/alignment.h"

#include <string>

#include "core/hd.h"

namespace tessera {
namespace {

/// What to do with a tensor that cannot be addressed; ends an error's text.
constexpr const char* kOrUnaligned = "; or plan the problem as unaligned";

Status check(const char* name, const ConstTensor& tensor, const Problem& p, Dtype dtype,
             bool queries, bool copied) {
  const RowSizes sizes = row_sizes(p, queries);
  if (sizes.empty()) return {};  // nothing will be fetched, and there may be no address
  if (reinterpret_cast<std::uintptr_t>(tensor.data) % kRowAlignment != 0) {
    return Status::invalid(std::string(name) + ".data: must be aligned to 16 bytes" + kOrUnaligned);
  }
  const struct {
    const char* name;
    std::int64_t stride, size;
  } axes[] = {{".stride_seqlen", tensor.stride_seqlen, sizes.seqlen},
              {".stride_head", tensor.stride_head, sizes.heads},
              {".stride_batch", tensor.stride_batch, sizes.batch}};
  const std::int64_t bytes = core::max<std::int64_t>(size_of(dtype), 1);  // of any enumerator
  const std::int64_t unit = kRowAlignment / bytes, end = (std::int64_t{1} << 40) / bytes;
  for (const auto& axis : axes) {
    if (axis.size <= 1) continue;
    if (axis.stride % unit == 0 && (!copied || (axis.stride > 0 && axis.stride < end))) continue;
    return Status::invalid(std::string(name) + axis.name + " = " + std::to_string(axis.stride) +
                           ": must be a " + (copied ? "positive " : "") + "multiple of " +
                           std::to_string(unit) + " elements" +
                           (copied ? " below " + std::to_string(end) : "") + kOrUnaligned);
  }
  return {};
}

}  // namespace

RowSizes row_sizes(const Problem& p, bool queries) {
  const std::int64_t heads = queries ? p.num_heads : p.num_heads_k;
  if (queries)
    return p.packed ? RowSizes{1, p.total_q, heads} : RowSizes{p.batch, p.seqlen_q, heads};
  if (p.packed_k()) return {1, p.total_k, heads};
  if (p.cache && p.cache->paged()) return {p.cache->num_pages, p.cache->page_size, heads};
  return {p.cache && p.cache->rows > 0 ? p.cache->rows : p.batch, p.seqlen_k, heads};
}

Status check_aligned(const char* name, const ConstTensor& tensor, const Problem& p, Dtype dtype,
                     bool queries) {
  return check(name, tensor, p, dtype, queries, false);
}

Status check_copyable(const char* name, const ConstTensor& tensor, const Problem& p, Dtype dtype,
                      bool queries) {
  return check(name, tensor, p, dtype, queries, true);
}

Status check_tiles(const ConstTensor& v, const Problem& p) {
  const RowSizes sizes = row_sizes(p, false);
  if (sizes.empty()) return {};
  if (reinterpret_cast<std::uintptr_t>(v.data) % kRowAlignment != 0) {
    return Status::invalid("v.data: tiles must be aligned to 16 bytes");
  }
  const struct {
    const char* name;
    std::int64_t stride, size;
  } axes[] = {{".stride_head", v.stride_head, sizes.heads},
              {".stride_batch", v.stride_batch, sizes.batch}};
  for (const auto& axis : axes) {
    if (axis.size <= 1 || axis.stride % kRowAlignment == 0) continue;
    return Status::invalid(std::string("v") + axis.name + " = " + std::to_string(axis.stride) +
                           ": tiles must begin at multiples of 16 bytes");
  }
  return {};
}

bool needs_unaligned(const Problem& problem, const Tensors& tensors) {
  const Problem& p = problem;
  const Tensors& t = tensors;
  const auto fits = [&p](const ConstTensor& tensor, Dtype dtype, bool queries, bool copied) {
    return tensor.data == nullptr || check("", tensor, p, dtype, queries, copied).ok();
  };
  const Dtype in = p.dtype, out = p.stored_o();
  // Rows of 8 bits are not copied: they become tiles.
  const bool copied = !is_scaled(p.stored_v());
  const bool values = p.v_tiles ? t.v.data == nullptr || check_tiles(t.v, p).ok()
                                : fits(t.v, p.stored_v(), false, copied);
  const bool forward = fits(t.q, in, true, true) && fits(t.qv, in, true, false) &&
                       fits(t.k, p.stored_k(), false, true) && values &&
                       fits(t.saved_o, out, true, false);
  if (!forward || p.pass == Pass::forward) return !forward;
  return !(fits(t.dout, out, true, true) && fits(t.dq, in, true, false) &&
           fits(t.dk, in, false, false) && fits(t.dv, in, false, false));
}

}  // namespace tessera
