// validate, of an append: do its sizes make sense, and do the tensors fit them? Every refusal names
// the argument, its value and what would be accepted.
#include "plan/append.h"

#include <string>
#include <utility>

#include "plan/checks.h"
#include "plan/text.h"

namespace tessera {
namespace {

Status check_rotary_shape(const AppendShape& shape) {
  if (!shape.rotary) {
    if (shape.num_heads == 0) return {};
    return Status::invalid(refused("num_heads", shape.num_heads,
                                   "queries are only rotated; set rotary, or 0 for no queries"));
  }
  const RotaryShape& rotary = *shape.rotary;
  if (Status s = check_rotary(rotary, shape.dtype, shape.head_dim); !s) return s;
  if (shape.slot_mapping && rotary.constant_q) {
    return Status::invalid(
        "rotary.constant_q = true: with slot_mapping every query has a position of its own");
  }
  return {};
}

/// The cache has the rows' type, or 8 bits and scales (S14).
Status check_types(const AppendShape& s) {
  const struct {
    const char* name;
    std::int64_t value, last;
  } all[] = {{"dtype", static_cast<int>(s.dtype), kPlainDtypes - 1},
             {"dtype_kv", static_cast<int>(s.stored_kv()), kDtypes - 1},
             {"scale_k", static_cast<int>(s.scale_k), static_cast<int>(Scaling::channel)},
             {"scale_v", static_cast<int>(s.scale_v), static_cast<int>(Scaling::channel)}};
  for (const auto& one : all) {
    if (Status status = check_range(one.name, one.value, 0, one.last); !status) return status;
  }
  const Dtype kv = s.stored_kv();
  if (!is_scaled(kv) && kv != s.dtype) {
    return Status::invalid(std::string("dtype_kv = ") + to_string(kv) + ": must be dtype, " +
                           to_string(s.dtype) + ", or of 8 bits, e4m3 or i8");
  }
  for (const auto& [field, scaling] : {std::pair{"scale_k", s.scale_k}, {"scale_v", s.scale_v}}) {
    using enum Scaling;
    Status status;
    if (is_scaled(kv)) {
      status = check_among(field, kv, scaling, {tensor, head, token});
    } else if (scaling != none) {
      status = Status::invalid(std::string(field) + " = " + to_string(scaling) +
                               ": only caches of 8 bits have scales; set dtype_kv to e4m3 or i8");
    }
    if (!status) return status;
  }
  return {};
}

/// Where rows go: by lengths, or each to a slot of its own.
Status check_places(const AppendShape& shape) {
  if (shape.cache.skips) {
    return Status::invalid("cache.skips: an append needs a page for every row; set it to false");
  }
  const bool full = shape.cache.lengths == Lengths::full;
  if (shape.slot_mapping) {
    if (!full) return Status::invalid("cache.lengths: with slot_mapping must be full");
    if (!shape.packed_new) {
      return Status::invalid("packed_new = false: with slot_mapping new rows are packed");
    }
    if (shape.num_heads > 0 && !shape.packed) {
      return Status::invalid("packed = false: with slot_mapping queries are packed");
    }
    return {};
  }
  if (!full) return {};
  return Status::invalid(
      "cache.lengths = full: an append goes behind lengths, before or after, or by slot_mapping");
}

Status check_shape(const AppendShape& s) {
  // Without slot_mapping no more rows than the longest sequences could have.
  const auto most = [&s](bool packed, std::int64_t longest) -> std::int64_t {
    if (!packed) return 0;
    return s.slot_mapping ? INT32_MAX : core::min<std::int64_t>(s.batch * longest, INT32_MAX);
  };
  const struct {
    const char* name;
    std::int64_t value, low, high;
  } ranges[] = {
      {"batch", s.batch, 0, kMaxBatch},
      {"num_heads", s.num_heads, 0, kMaxHeads},
      {"num_heads_k", s.num_heads_k, 1, kMaxHeads},
      {"seqlen_q", s.seqlen_q, 0, kMaxSeqlen},
      {"seqlen_k", s.seqlen_k, 0, kMaxSeqlen},
      {"head_dim", s.head_dim, 1, kMaxHeadDim},
      {"head_dim_v", s.head_dim_v, 1, kMaxHeadDim},
  };
  Status status = check_types(s);
  for (const auto& range : ranges) {
    if (status) status = check_range(range.name, range.value, range.low, range.high);
  }
  if (status) status = check_cache_shape(s.cache, s.slot_mapping ? 0 : s.seqlen_k);
  if (status) status = check_places(s);
  if (status) status = check_range("total_q", s.total_q, 0, most(s.packed, s.seqlen_q));
  if (status) {
    status = check_range("total_new", s.total_new, 0, most(s.packed_new, s.cache.seqlen_new));
  }
  if (status) status = check_rotary_shape(s);
  if (!status) return status;
  const std::int64_t dim = core::max(s.head_dim, s.head_dim_v);
  if (!fits_offsets({s.rows_q(), s.num_heads, dim}) ||
      !fits_offsets({s.rows_new(), s.num_heads_k, dim}) ||
      !fits_offsets({s.entries(), s.entry_slots(), s.num_heads_k, dim})) {
    return Status::invalid("rows * num_heads * head_dim: elements do not fit 64-bit offsets");
  }
  return {};
}

/// Whether arrays and tables are there exactly where the shape has them.
Status check_arrays(const AppendShape& s, const AppendTensors& t) {
  const bool lengths = !s.slot_mapping, any = s.rows_q() + s.rows_new() > 0;
  const bool rotary = s.rotary.has_value();
  const struct {
    const char* name;
    const void* data;
    bool wanted;
    const char* why;
    const char* why_not;
  } arrays[] = {
      {"cache.seqlens", t.cache.seqlens, lengths, "rows go behind lengths",
       "slot_mapping says where rows go"},
      {"cache.page_table", t.cache.page_table,
       lengths && s.cache.paged() && s.seqlen_k > 0 && s.rows_new() > 0, "the cache has pages",
       "no row goes to a page of a sequence"},
      {"cache.index", t.cache.index, lengths && s.cache.rows > 0 && s.rows_new() > 0,
       "cache.rows says that it picks rows", "no row goes to a row that it picks"},
      {"cache.cu_seqlens_new", t.cache.cu_seqlens_new, lengths && s.packed_new, kNoOffsets,
       "new rows have no boundaries"},
      {"cu_seqlens_q", t.cu_seqlens_q, lengths && s.packed && s.num_heads > 0, kNoOffsets,
       "queries have no boundaries"},
      {"slot_mapping", t.slot_mapping, s.slot_mapping && s.rows_new() > 0,
       "AppendShape::slot_mapping says that it is there", "AppendShape::slot_mapping is false"},
      {"rotary.cos", t.rotary.cos, rotary && s.rotary->positions > 0,
       "AppendShape::rotary says that it is there", "AppendShape::rotary is none"},
      {"rotary.sin", t.rotary.sin, rotary && s.rotary->positions > 0,
       "AppendShape::rotary says that it is there", "AppendShape::rotary is none"},
      {"rotary.positions", t.rotary.positions, rotary && s.slot_mapping,
       "with slot_mapping every row has a position of its own",
       "only rotated rows with slot_mapping have positions of their own"},
  };
  for (const auto& array : arrays) {
    if (array.wanted && any && array.data == nullptr) return missing(array.name, array.why);
    // Of nothing there may be an array of anything.
    const bool of_none = array.data == t.cache.page_table || array.data == t.cache.index ||
                         array.data == t.slot_mapping;
    if (!array.wanted && array.data != nullptr && !(of_none && s.rows_new() == 0)) {
      return Status::invalid(std::string(array.name) + " is given, but " + array.why_not);
    }
  }
  if (t.rotary.seqlens != nullptr && (!rotary || s.slot_mapping)) {
    return Status::invalid("rotary.seqlens is given, but only rotated sequences begin at it");
  }
  if (rotary) {
    if (Status status = check_rotary_strides(*s.rotary, t.rotary); !status) return status;
  }
  if (!s.cache.paged()) return {};
  const Axis rows[] = {
      {".stride_page_table", t.cache.stride_page_table, s.cache.rows > 0 ? s.cache.rows : s.batch}};
  return check_strides("cache", rows);
}

/// Scales of k or v. cached: the cache's rows, of one column.
Status check_scales(const char* name, const Scales& numbers, Scaling by, const AppendShape& s,
                    const Shape& cached) {
  const std::string data = std::string(name) + ".data";
  if (by == Scaling::none && numbers.data != nullptr) {
    return Status::invalid(data + " is given, but only caches of 8 bits have scales");
  }
  if (by != Scaling::none && numbers.data == nullptr && s.rows_new() > 0) {
    return missing(data.c_str(), by == Scaling::token ? "scales by token are written"
                                                      : "new rows are divided by it");
  }
  if (by == Scaling::token) {
    const Tensor tensor = {numbers.data, numbers.stride_batch, numbers.stride_seqlen,
                           numbers.stride_head};
    return check_output(name, tensor, cached, false);
  }
  if (by != Scaling::head || numbers.data == nullptr) return {};
  const Axis axes[] = {{".stride_batch", numbers.stride_batch, s.slot_mapping ? 1 : s.batch},
                       {".stride_head", numbers.stride_head, s.num_heads_k}};
  return check_strides(name, axes);
}

/// q_out may be q, element by element.
Status check_in_place(const AppendTensors& t, const Shape& q, bool packed) {
  if (t.q_out.data != t.q.data) return {};
  const auto from = axes_of(t.q, q, packed), to = axes_of(t.q_out, q, packed);
  for (std::size_t i = 0; i < from.size(); ++i) {
    if (from[i].size <= 1 || from[i].stride == to[i].stride) continue;
    return Status::invalid(refused((std::string("q_out") + to[i].name).c_str(), to[i].stride,
                                   "q_out is q: must be " + std::to_string(from[i].stride)));
  }
  return {};
}

Status check_tensors(const AppendShape& s, const AppendTensors& t) {
  const auto rows_of = [&](bool packed, std::int64_t total, std::int64_t seqlen, std::int64_t heads,
                           std::int64_t dim) {
    return Shape{s.batch > 0 || !packed ? s.batch : 1, packed ? total : seqlen, heads, dim};
  };
  const auto added = [&](std::int64_t dim) {
    return rows_of(s.packed_new, s.total_new, s.cache.seqlen_new, s.num_heads_k, dim);
  };
  const auto cached = [&](std::int64_t dim) {
    return Shape{s.entries(), s.rows_new() > 0 ? s.entry_slots() : 0, s.num_heads_k, dim};
  };
  Status status = check_tensor("k_new", t.k_new, added(s.head_dim), s.packed_new);
  if (status) status = check_tensor("v_new", t.v_new, added(s.head_dim_v), s.packed_new);
  if (status) status = check_output("k", t.k, cached(s.head_dim), false);
  if (status) status = check_output("v", t.v, cached(s.head_dim_v), false);
  if (status) status = check_scales("k_scale", t.k_scale, s.scale_k, s, cached(1));
  if (status) status = check_scales("v_scale", t.v_scale, s.scale_v, s, cached(1));
  if (!status || s.rows_q() == 0) return status;
  const Shape q = rows_of(s.packed, s.total_q, s.seqlen_q, s.num_heads, s.head_dim);
  status = check_tensor("q", t.q, q, s.packed);
  if (status) status = check_output("q_out", t.q_out, q, s.packed);
  return status ? check_in_place(t, q, s.packed) : status;
}

/// A sequence's slots, pages and positions, where they can be read.
Status check_sequence(const AppendShape& s, const core::Append& append, int b) {
  if (append.idle(b)) return {};
  const std::int64_t length = append.cache.seqlens[b], count = append.added.count(b);
  const std::int64_t low = append.after ? count : 0;
  const std::int64_t high = append.after ? s.seqlen_k : s.seqlen_k - count;
  if (length < low || length > high) {
    return Status::invalid(refused(element("cache.seqlens", b).c_str(), length,
                                   (append.after ? "with " : "before ") + std::to_string(count) +
                                       " new rows must lie in [" + std::to_string(low) + ", " +
                                       std::to_string(high) +
                                       "], as seqlen_k = " + std::to_string(s.seqlen_k)));
  }
  const std::int64_t first = append.first_slot(b);
  if (count > 0) {
    if (Status status = check_row(append.cache, b); !status) return status;
    const core::Pages& pages = append.cache.pages;
    if (pages.table != nullptr) {
      const std::int64_t last = (first + count - 1) / pages.size;
      for (std::int64_t column = first / pages.size; column <= last; ++column) {
        Status status = check_page(pages, append.row_of(b), static_cast<int>(column));
        if (!status) return status;
      }
    }
  }
  if (!s.rotary) return {};
  const std::int32_t* const starts = append.rotary_seqlens;
  const std::int64_t start = starts != nullptr ? starts[b] : first;
  const std::int64_t queries = s.num_heads > 0 ? append.queries.count(b) : 0;
  const std::int64_t turned = append.constant_q ? core::min<std::int64_t>(queries, 1) : queries;
  const std::string name = element(starts != nullptr ? "rotary.seqlens" : "cache.seqlens", b);
  return check_positions(*s.rotary, name, starts != nullptr ? start : length, start,
                         core::max(count, turned));
}

/// Slots and positions that rows have of their own.
Status check_rows(const AppendShape& s, const core::Append& append) {
  const std::int64_t slots = append.entries * append.entry_slots.value();
  const auto check_position = [&](std::int64_t row, std::int64_t position) {
    return check_positions(*s.rotary, element("rotary.positions", row), position, position, 1);
  };
  for (std::int64_t row = 0; row < s.rows_new(); ++row) {
    const std::int64_t number = append.slot_mapping[row];
    if (number < -1 || number >= slots) {
      return Status::invalid(
          refused(element("slot_mapping", row).c_str(), number,
                  "must be -1, or lie in [0, slots) = [0, " + std::to_string(slots) + ")"));
    }
    if (!s.rotary || number < 0) continue;
    if (Status status = check_position(row, append.position_of_new(row)); !status) return status;
  }
  for (std::int64_t row = 0; row < s.rows_q(); ++row) {
    if (Status status = check_position(row, append.position_of_query(row)); !status) return status;
  }
  return {};
}

Status check_memory(const AppendShape& s, const AppendTensors& t) {
  const core::Append append = append_of(s, t);
  if (s.slot_mapping) return check_rows(s, append);
  Status status;
  if (s.packed && s.num_heads > 0) {
    status = check_cu_seqlens("cu_seqlens_q", t.cu_seqlens_q, s.batch, "total_q", s.total_q,
                              "seqlen_q", s.seqlen_q);
  }
  if (status && s.packed_new) {
    status = check_cu_seqlens("cache.cu_seqlens_new", t.cache.cu_seqlens_new, s.batch, "total_new",
                              s.total_new, "seqlen_new", s.cache.seqlen_new);
  }
  for (int b = 0; status && b < s.batch; ++b) status = check_sequence(s, append, b);
  return status;
}

}  // namespace

Status validate(const AppendShape& shape, const AppendTensors& tensors, Memory memory) {
  if (Status s = check_shape(shape); !s) return s;
  if (Status s = check_tensors(shape, tensors); !s) return s;
  if (Status s = check_arrays(shape, tensors); !s) return s;
  const bool any = shape.rows_q() + shape.rows_new() > 0;
  return any && memory == Memory::host ? check_memory(shape, tensors) : Status{};
}

}  // namespace tessera
