#include "cache.h"

#include <algorithm>
#include <utility>

#include "checks.h"
#include "scaled.h"

namespace tessera::python {

namespace {

/// Where the sequences of a call lie: what attention over a cache and an append have in common.
struct Place {
  const View &k_cache, &v_cache, &page_table, &cache_index;
};

/// An int32 (size) array.
void check_numbers(const char* name, const View& view, const View& q, std::int64_t size,
                   const char* shape, const char* first) {
  check_array(name, view, q, kInt32, shape, view.ndim == 1 && view.shape[0] == size, first);
}

/// A tensor of rows of any type: four dimensions, or packed three, on q's device, with a contiguous
/// head_dim.
void check_any_tensor(const char* name, const View& view, const View& q, const char* first,
                      std::initializer_list<std::int64_t> shape) {
  check_sizes(name, view, shape);
  check_device(name, view, q, first);
  check_last_stride(name, view);
}
/// The same of q's type.
void check_tensor(const char* name, const View& view, const View& q, const char* first,
                  std::initializer_list<std::int64_t> shape) {
  check_sizes(name, view, shape);
  check_same_type(name, view, q, first);
  check_any_tensor(name, view, q, first, shape);
}

void check_dims(const char* name, const View& view, int ndim, const char* layout) {
  if (!view) invalid(std::string(name) + " is None: a tensor is required");
  if (view.ndim == ndim) return;
  invalid(std::string(name) + " has shape " + shape_text(view) + ": must be " + layout);
}

void check_cache_dims(const Place& place) {
  const char* const layout =
      place.page_table ? "(num_pages, page_size, heads, head_dim), since page_table is given"
                       : "(batch, seqlen, heads, head_dim)";
  check_dims("k_cache", place.k_cache, 4, layout);
  check_dims("v_cache", place.v_cache, 4, layout);
}

/// A bound of packed sequences.
void check_bound(const char* name, std::int64_t longest) {
  if (longest >= 0 && longest <= kMaxSeqlen) return;
  invalid(value(name, "", longest) + ": must lie in [0, " + std::to_string(kMaxSeqlen) + "]");
}

void check_page_table(const View& table, const View& q, const char* first) {
  constexpr DLType kInt64 = {kDLInt, 64, 1};
  if (!same(table.dtype, kInt32) && !same(table.dtype, kInt64)) {
    invalid("page_table.dtype = " + name_of(table.dtype) + ": must be int32 or int64");
  }
  check_dims("page_table", table, 2, "(batch, pages of a sequence)");
  check_last_stride("page_table", table);
  check_device("page_table", table, q, first);
}

/// The cache of `batch` sequences, and how many slots each of them has.
std::int64_t read_cache(const Place& place, std::int64_t batch, const View& q, const char* first,
                        CacheShape& cache) {
  const View &k = place.k_cache, &table = place.page_table;
  std::int64_t slots = k.shape[1];
  if (table) {
    check_page_table(table, q, first);
    cache.page_size = k.shape[1];
    cache.num_pages = k.shape[0];
    cache.page_ids = table.dtype.bits == 64 ? PageIds::i64 : PageIds::i32;
    if (cache.page_size == 0) {
      invalid("k_cache has shape " + shape_text(k) + ": a page must have slots");
    }
    if (table.shape[1] > kMaxSeqlen / cache.page_size) {
      invalid("page_table has shape " + shape_text(table) + ": pages of " +
              std::to_string(cache.page_size) + " slots must not be more than " +
              std::to_string(kMaxSeqlen) + " slots a sequence");
    }
    slots = table.shape[1] * cache.page_size;
  }
  const View& entries = table ? table : k;
  if (place.cache_index) {
    check_numbers("cache_index", place.cache_index, q, batch, "(batch,)", first);
    cache.rows = entries.shape[0];
    if (cache.rows == 0 && batch > 0) {
      invalid(std::string(table ? "page_table" : "k_cache") + " has shape " + shape_text(entries) +
              ": cache_index is given, so there must be rows to pick from");
    }
  } else if (entries.shape[0] != batch) {
    invalid(std::string(table ? "page_table" : "k_cache") + " has shape " + shape_text(entries) +
            ": must have a row for each of the " + std::to_string(batch) +
            " sequences, or cache_index");
  }
  return slots;
}

/// The number of sequences of an array of boundaries.
std::int64_t check_boundaries(const char* name, const View& view, const View& q,
                              const char* first) {
  check_array(name, view, q, kInt32, "(batch + 1,)", view.ndim == 1 && view.shape[0] >= 1, first);
  return view.shape[0] - 1;
}

/// What is shared is found in a page table.
void check_prefixes(const CacheInputs& in, const CacheOptions& options) {
  if (options.prefix_levels == 0 || in.page_table) return;
  invalid("prefix_levels = " + std::to_string(options.prefix_levels) +
          ", but page_table is None: it must have the pages, or prefix_levels must be 0");
}

/// Chosen keys have no positions: what asks for these does not go with them.
void check_skipping(const CacheInputs& in, const CacheOptions& options) {
  if (!options.skip_pages) return;
  if (!in.page_table) invalid("skip_pages = True, but page_table is None: it must have the pages");
  const struct {
    const char* name;
    bool given;
  } positional[] = {
      {"causal or window", options.window_left >= 0 || options.window_right >= 0},
      {"chunk", options.chunk != 0},
      {"sink_tokens", options.sink_tokens != 0},
      {"tree_mask", static_cast<bool>(in.tree_mask)},
      {"leftpad", static_cast<bool>(in.leftpad)},
      {"alibi_slopes", static_cast<bool>(in.alibi_slopes)},
  };
  for (const auto& [name, given] : positional) {
    if (!given) continue;
    invalid(std::string("skip_pages = True: the keys that are left have no positions, which ") +
            name + " asks for");
  }
}

void read_cache_arrays(const CacheInputs& in, const CacheOptions& options, const Problem& p) {
  const bool full = options.lengths == Lengths::full;
  if (!full && !in.seqlens) invalid("seqlens is None: the lengths of the sequences are required");
  if (full && in.seqlens) invalid("seqlens is given, but lengths = 'full'");
  if (in.seqlens) check_numbers("seqlens", in.seqlens, in.q, p.batch, "(batch,)", "q");
  if (in.leftpad) check_numbers("leftpad", in.leftpad, in.q, p.batch, "(batch,)", "q");
  const bool boundaries = options.lengths == Lengths::before && p.packed;
  if (boundaries && !in.cu_seqlens_new) {
    invalid(
        "cu_seqlens_new is None: with cu_seqlens_q and lengths = 'before' it must say how many new "
        "keys each sequence has");
  }
  if (!boundaries && in.cu_seqlens_new) {
    invalid("cu_seqlens_new is given: only cu_seqlens_q with lengths = 'before' takes it");
  }
  if (in.cu_seqlens_new) {
    check_numbers("cu_seqlens_new", in.cu_seqlens_new, in.q, p.batch + 1, "(batch + 1,)", "q");
  }
  if (options.lengths != Lengths::before && options.seqlen_new != 0) {
    invalid(value("seqlen_new", "", options.seqlen_new) +
            ": must be 0, as only lengths = 'before' do not count new keys");
  }
}

void check_tree_mask(const CacheInputs& in, const Problem& p) {
  const View& mask = in.tree_mask;
  constexpr DLType kInt64 = {kDLInt, 64, 1}, kUint64 = {kDLUInt, 64, 1};
  const bool fits = p.packed
                        ? mask.ndim == 1 && mask.shape[0] == p.total_q
                        : mask.ndim == 2 && mask.shape[0] == p.batch && mask.shape[1] == p.seqlen_q;
  check_array("tree_mask", mask, in.q, same(mask.dtype, kUint64) ? kUint64 : kInt64,
              p.packed ? "(total_q,)" : "(batch, seqlen_q)", fits);
}

/// Sequences of an append: with slot_mapping there are none, and scales by head are of one.
std::int64_t sequences_of(const AppendInputs& in) {
  return in.seqlens && in.seqlens.ndim == 1 ? in.seqlens.shape[0] : 1;
}

/// What says where each row goes, where rows have slots of their own.
void read_slots(const AppendInputs& in, AppendShape& s) {
  constexpr DLType kInt64 = {kDLInt, 64, 1};
  const View& k = in.k_cache;
  for (const auto& [name, view] : {std::pair{"seqlens", &in.seqlens},
                                   {"cu_seqlens_new", &in.cu_seqlens_new},
                                   {"page_table", &in.page_table},
                                   {"cache_index", &in.cache_index},
                                   {"cu_seqlens_q", &in.cu_seqlens_q},
                                   {"rotary_seqlens", &in.rotary_seqlens}}) {
    if (*view) {
      invalid(std::string(name) +
              " is given, but slot_mapping is, too: every row has a slot and a position of its "
              "own then, and there are no sequences");
    }
  }
  s.slot_mapping = s.packed_new = true;
  check_dims("k_new", in.k_new, 3, "(total, heads, head_dim), since slot_mapping is given");
  s.total_new = in.k_new.shape[0];
  check_array("slot_mapping", in.slot_mapping, k, kInt64, "(total,), one for each row of k_new",
              in.slot_mapping.ndim == 1 && in.slot_mapping.shape[0] == s.total_new, "k_cache");
  // Slots are numbered alike in rows and in pages.
  s.cache.lengths = Lengths::full;
  s.cache.page_size = std::max<std::int64_t>(k.shape[1], 1);
  s.cache.num_pages = k.shape[1] > 0 ? k.shape[0] : 0;
  if (in.q) {
    check_dims("q", in.q, 3, "(total, heads, head_dim), since slot_mapping is given");
    s.packed = true;
    s.total_q = in.q.shape[0];
  }
}

/// The same by lengths.
void read_sequences(const AppendInputs& in, const AppendOptions& options, AppendShape& s) {
  const View& k = in.k_cache;
  if (!in.seqlens) {
    invalid("seqlens is None: new rows go behind lengths, or have slots by slot_mapping");
  }
  if (options.lengths == Lengths::full) {
    invalid("lengths = 'full': must be 'before' or 'after', as new rows go behind lengths");
  }
  check_array("seqlens", in.seqlens, k, kInt32, "(batch,)", in.seqlens.ndim == 1, "k_cache");
  s.batch = in.seqlens.shape[0];
  s.cache.lengths = options.lengths;
  s.seqlen_k =
      read_cache({k, in.v_cache, in.page_table, in.cache_index}, s.batch, k, "k_cache", s.cache);
  s.packed_new = static_cast<bool>(in.cu_seqlens_new);
  if (s.packed_new) {
    check_numbers("cu_seqlens_new", in.cu_seqlens_new, k, s.batch + 1, "(batch + 1,)", "k_cache");
    check_bound("max_seqlen_new", options.max_seqlen_new);
    check_dims("k_new", in.k_new, 3, "(total, heads, head_dim), since cu_seqlens_new is given");
    s.total_new = in.k_new.shape[0];
    s.cache.seqlen_new = std::min(options.max_seqlen_new, s.seqlen_k);
    if (s.total_new > s.batch * s.cache.seqlen_new) {
      invalid("k_new has " + std::to_string(s.total_new) + " rows: the " + std::to_string(s.batch) +
              " sequences hold " + std::to_string(s.batch * s.cache.seqlen_new) +
              " at most, with max_seqlen_new = " + std::to_string(options.max_seqlen_new) +
              " and " + std::to_string(s.seqlen_k) + " slots each");
    }
  } else {
    check_dims("k_new", in.k_new, 4,
               "(batch, seqlen_new, heads, head_dim); with cu_seqlens_new (total, heads, "
               "head_dim)");
    s.cache.seqlen_new = in.k_new.shape[1];
    if (s.cache.seqlen_new > s.seqlen_k) {
      invalid("k_new has shape " + shape_text(in.k_new) + ": a sequence has only " +
              std::to_string(s.seqlen_k) + " slots");
    }
  }
  if (!in.q) {
    if (in.cu_seqlens_q) invalid("cu_seqlens_q is given, but q is None");
    return;
  }
  s.packed = static_cast<bool>(in.cu_seqlens_q);
  if (s.packed) {
    check_dims("q", in.q, 3, "(total, heads, head_dim), since cu_seqlens_q is given");
    check_numbers("cu_seqlens_q", in.cu_seqlens_q, k, s.batch + 1, "(batch + 1,)", "k_cache");
    check_bound("max_seqlen_q", options.max_seqlen_q);
    s.total_q = in.q.shape[0];
    s.seqlen_q = options.max_seqlen_q;
  } else {
    check_dims("q", in.q, 4,
               "(batch, seqlen_q, heads, head_dim); with cu_seqlens_q (total, heads, head_dim)");
    s.seqlen_q = in.q.shape[1];
  }
  if (in.rotary_seqlens) {
    check_numbers("rotary_seqlens", in.rotary_seqlens, k, s.batch, "(batch,)", "k_cache");
  }
}

void check_positions(const AppendInputs& in, const AppendShape& s, RotaryShape& rotary) {
  const View& positions = in.rotary_positions;
  if (!s.slot_mapping) {
    if (positions) invalid("rotary_positions is given, but slot_mapping is None: both or neither");
    return;
  }
  if (!positions) {
    invalid("rotary_positions is None: with slot_mapping every row has a position of its own");
  }
  constexpr DLType kInt64 = {kDLInt, 64, 1};
  const bool wide = same(positions.dtype, kInt64);
  rotary.position_type = wide ? PositionType::i64 : PositionType::i32;
  check_array("rotary_positions", positions, in.k_cache, wide ? kInt64 : kInt32,
              "(total,), one for each row of q and of k_new",
              positions.ndim == 1 && positions.shape[0] >= std::max(s.total_q, s.total_new),
              "k_cache");
}

CacheTensors cache_tensors(const Place& place) {
  CacheTensors t;
  t.page_table = place.page_table.data;
  t.stride_page_table = place.page_table ? place.page_table.strides[0] : 0;
  t.index = pointer<const std::int32_t>(place.cache_index);
  return t;
}

/// The types of keys and values, and how those of 8 bits are scaled.
void read_cached_types(const CacheInputs& in, Problem& p) {
  const std::int64_t entries = in.k_cache.shape[0], slots = in.k_cache.shape[1];
  if (const auto scaled =
          read_cached_scales(in.k_cache, in.v_cache, in.k_scale, in.v_scale, by_head(p))) {
    p.scales.k = scaled->k;
    p.scales.v = scaled->v;
    p.scales.block_v = scaled->block_v;
    const std::initializer_list<std::int64_t> keys = {entries, slots, p.num_heads_k, p.head_dim};
    if (scaled->k == Scaling::none) {
      p.dtype_v = scaled->dtype;
      check_tensor("k_cache", in.k_cache, in.q, "q", keys);
    } else {
      p.dtype_kv = scaled->dtype;
      check_any_tensor("k_cache", in.k_cache, in.q, "q", keys);
    }
    check_any_tensor("v_cache", in.v_cache, in.q, "q",
                     {entries, slots, p.num_heads_k, p.head_dim_v});
  } else {
    check_tensor("k_cache", in.k_cache, in.q, "q", {entries, slots, p.num_heads_k, p.head_dim});
    check_tensor("v_cache", in.v_cache, in.q, "q", {entries, slots, p.num_heads_k, p.head_dim_v});
  }
}

}  // namespace

Problem problem_of(const CacheInputs& in, const CacheOptions& options) {
  const Place place = {in.k_cache, in.v_cache, in.page_table, in.cache_index};
  Problem p;
  p.packed = static_cast<bool>(in.cu_seqlens_q);
  check_dims("q", in.q, p.packed ? 3 : 4,
             p.packed ? "(total, heads, head_dim), since cu_seqlens_q is given"
                      : "(batch, seqlen, heads, head_dim); with cu_seqlens_q (total, heads, "
                        "head_dim)");
  check_cache_dims(place);
  check_skipping(in, options);
  check_prefixes(in, options);
  const Axes axes(p.packed);
  p.dtype = storage_type(in.q);
  p.num_heads = in.q.shape[axes.heads];
  p.head_dim = in.q.shape[axes.dim];
  p.num_heads_k = in.k_cache.shape[2];
  p.head_dim_v = in.v_cache.shape[3];
  if (p.packed) {
    p.batch = check_boundaries("cu_seqlens_q", in.cu_seqlens_q, in.q, "q");
    check_bound("max_seqlen_q", options.max_seqlen_q);
    p.total_q = in.q.shape[0];
    p.seqlen_q = options.max_seqlen_q;
  } else {
    p.batch = in.q.shape[0];
    p.seqlen_q = in.q.shape[1];
  }
  CacheShape cache;
  cache.lengths = options.lengths;
  cache.leftpad = static_cast<bool>(in.leftpad);
  cache.skips = options.skip_pages;
  cache.prefix_levels = options.prefix_levels;
  p.seqlen_k = read_cache(place, p.batch, in.q, "q", cache);
  cache.seqlen_new = in.cu_seqlens_new && options.seqlen_new >= 0
                         ? std::min(options.seqlen_new, p.seqlen_k)  // a bound
                         : options.seqlen_new;
  p.cache = cache;
  read_cache_arrays(in, options, p);

  check_last_stride("q", in.q);
  read_cached_types(in, p);
  p.qv = static_cast<bool>(in.qv);
  for (const auto& [name, view] : {std::pair{"out", &in.o}, {"qv", &in.qv}}) {
    if (!*view) continue;
    check_same_type(name, *view, in.q);
    check_rows(name, *view, in.q,
               {p.batch, p.packed ? p.total_q : p.seqlen_q, p.num_heads, p.head_dim_v}, p.packed);
  }
  if (in.lse) check_lse("lse", in.lse, in.q, p);

  check_window("window[0]", options.window_left);
  check_window("window[1]", options.window_right);
  p.softmax_scale = options.softmax_scale;
  p.softcap = options.softcap;
  p.window_left = options.window_left;
  p.window_right = options.window_right;
  p.chunk = options.chunk;
  p.sink_tokens = options.sink_tokens;
  p.batch_invariant = options.batch_invariant;
  if (in.alibi_slopes) p.alibi = alibi_shape(in.alibi_slopes, in.q, p);
  p.sink = static_cast<bool>(in.sink);
  if (in.sink) check_sink("sink", in.sink, in.q, p);
  p.tree = static_cast<bool>(in.tree_mask);
  if (in.tree_mask) check_tree_mask(in, p);
  if (in.q.on_gpu()) p.unaligned = needs_unaligned(p, tensors_of(in, p));
  return p;
}

Tensors tensors_of(const CacheInputs& in, const Problem& p) {
  Tensors t;
  t.q = rows_of(in.q, p.packed);
  t.k = rows_of(in.k_cache, false);
  t.v = rows_of(in.v_cache, false);
  t.o = rows_of(in.o, p.packed);
  t.softmax_lse = pointer<float>(in.lse);
  t.alibi_slopes = pointer<const float>(in.alibi_slopes);
  t.sink = pointer<const float>(in.sink);
  t.cu_seqlens_q = pointer<const std::int32_t>(in.cu_seqlens_q);
  t.cache = cache_tensors({in.k_cache, in.v_cache, in.page_table, in.cache_index});
  t.cache.seqlens = pointer<const std::int32_t>(in.seqlens);
  t.cache.cu_seqlens_new = pointer<const std::int32_t>(in.cu_seqlens_new);
  t.cache.leftpad = pointer<const std::int32_t>(in.leftpad);
  t.tree_mask = pointer<const std::uint64_t>(in.tree_mask);
  if (in.qv) t.qv = rows_of(in.qv, p.packed);
  t.k_scale = cached_scales_of(in.k_scale, p.scales.k);
  t.v_scale = cached_scales_of(in.v_scale, p.scales.v);
  return t;
}

void before_attention(AppendInputs& rows, AppendOptions& row_options, CacheInputs& in,
                      CacheOptions& options) {
  rows.k_cache = in.k_cache;
  rows.v_cache = in.v_cache;
  rows.seqlens = in.seqlens;
  rows.cu_seqlens_new = in.cu_seqlens_new;
  rows.page_table = in.page_table;
  rows.cache_index = in.cache_index;
  rows.k_scale = in.k_scale;
  rows.v_scale = in.v_scale;
  row_options.lengths = options.lengths;
  if (rows.q_out) {
    rows.q = in.q;
    rows.cu_seqlens_q = in.cu_seqlens_q;
    row_options.max_seqlen_q = options.max_seqlen_q;
    in.q = rows.q_out;
  }
  if (options.lengths != Lengths::before) {
    in.cu_seqlens_new = {};  // lengths count the new keys
    options.seqlen_new = 0;
  } else if (rows.k_new.ndim == 4) {
    options.seqlen_new = rows.k_new.shape[1];
  }
}

RotaryShape rotary_of(const View& cos, const View& sin, const View& rows, const char* name,
                      Dtype dtype, std::int64_t head_dim) {
  check_dims("rotary_cos", cos, 2, "(positions, rotary_dim / 2)");
  check_sizes("rotary_sin", sin, {cos.shape[0], cos.shape[1]});
  RotaryShape rotary;
  rotary.dim = 2 * cos.shape[1];
  if (rotary.dim < 2 || rotary.dim > head_dim) {
    invalid("rotary_cos has shape " + shape_text(cos) + ": twice its columns must lie in [2, " +
            std::to_string(head_dim) + "], as columns of keys are rotated in pairs");
  }
  for (const auto& [table_name, table] : {std::pair{"rotary_cos", &cos}, {"rotary_sin", &sin}}) {
    if (!same(table->dtype, kFloat32) && !same(table->dtype, rows.dtype)) {
      invalid(std::string(table_name) + ".dtype = " + name_of(table->dtype) +
              ": must be float32 or " + name + "'s type, " + name_of(rows.dtype));
    }
    if (!same(table->dtype, cos.dtype)) {
      invalid("rotary_sin.dtype = " + name_of(sin.dtype) +
              ", but rotary_cos.dtype = " + name_of(cos.dtype) + ": they must be the same");
    }
    check_device(table_name, *table, rows, name);
    check_last_stride(table_name, *table);
  }
  rotary.positions = cos.shape[0];
  rotary.dtype = same(cos.dtype, kFloat32) ? Dtype::f32 : dtype;
  return rotary;
}

RotaryTensors rotary_tensors(const View& cos, const View& sin, const View& seqlens) {
  return {.cos = cos.data,
          .sin = sin.data,
          .stride_cos = cos.strides[0],
          .stride_sin = sin.strides[0],
          .seqlens = pointer<const std::int32_t>(seqlens)};
}

AppendShape shape_of(const AppendInputs& in, const AppendOptions& options) {
  const View &k = in.k_cache, &v = in.v_cache;
  check_cache_dims({k, v, in.page_table, in.cache_index});
  AppendShape s;
  const auto scaled =
      read_cached_scales(k, v, in.k_scale, in.v_scale, by_head(sequences_of(in), k.shape[2]));
  if (scaled && (scaled->k == Scaling::none || scaled->v == Scaling::group)) {
    invalid(scaled->k == Scaling::none
                ? "v_cache is of 8 bits, but k_cache is not: new rows go to caches of one type"
                : "v_scale is by groups of columns: new rows take scales by tensor, head or slot");
  }
  // What is not the cache has the type of the new rows.
  const View& typed = scaled ? in.k_new : k;
  const char* const typed_name = scaled ? "k_new" : "k_cache";
  if (!typed) invalid("k_new is None: a tensor is required");
  s.dtype = storage_type(typed, typed_name);
  if (scaled) {
    s.dtype_kv = scaled->dtype;
    s.scale_k = scaled->k;
    s.scale_v = scaled->v;
  }
  s.num_heads_k = k.shape[2];
  s.head_dim = k.shape[3];
  s.head_dim_v = v.shape[3];
  s.num_heads = 0;
  if (in.slot_mapping) {
    read_slots(in, s);
  } else {
    read_sequences(in, options, s);
  }
  const bool rotates = in.rotary_cos || in.rotary_sin;
  if (in.q && !rotates) invalid("q is given, but rotary_cos is None: queries are only rotated");
  if (rotates) {
    s.rotary = rotary_of(in.rotary_cos, in.rotary_sin, typed, typed_name, s.dtype, s.head_dim);
    s.rotary->interleaved = options.rotary_interleaved;
    s.rotary->constant_q = options.rotary_constant_q;
    check_positions(in, s, *s.rotary);
  } else if (in.rotary_seqlens || in.rotary_positions) {
    invalid(std::string(in.rotary_seqlens ? "rotary_seqlens" : "rotary_positions") +
            " is given, but rotary_cos is None");
  }

  check_tensor("k_cache", k, k, "k_cache", {k.shape[0], k.shape[1], s.num_heads_k, s.head_dim});
  check_tensor("v_cache", v, k, "k_cache", {k.shape[0], k.shape[1], s.num_heads_k, s.head_dim_v});
  check_device(typed_name, typed, k, "k_cache");
  const auto check_some = [&](const char* name, const View& view, bool packed, std::int64_t total,
                              std::int64_t seqlen, std::int64_t heads, std::int64_t dim) {
    if (packed) return check_tensor(name, view, typed, typed_name, {total, heads, dim});
    check_tensor(name, view, typed, typed_name, {s.batch, seqlen, heads, dim});
  };
  check_some("k_new", in.k_new, s.packed_new, s.total_new, s.cache.seqlen_new, s.num_heads_k,
             s.head_dim);
  check_some("v_new", in.v_new, s.packed_new, s.total_new, s.cache.seqlen_new, s.num_heads_k,
             s.head_dim_v);
  if (in.q) {
    s.num_heads = in.q.shape[Axes(s.packed).heads];
    check_some("q", in.q, s.packed, s.total_q, s.seqlen_q, s.num_heads, s.head_dim);
    check_some("q_out", in.q_out, s.packed, s.total_q, s.seqlen_q, s.num_heads, s.head_dim);
  }
  return s;
}

AppendTensors tensors_of(const AppendInputs& in, const AppendShape& s) {
  AppendTensors t;
  t.k_new = rows_of(in.k_new, s.packed_new);
  t.v_new = rows_of(in.v_new, s.packed_new);
  t.k = rows_of(in.k_cache, false);
  t.v = rows_of(in.v_cache, false);
  if (in.q) {
    t.q = rows_of(in.q, s.packed);
    t.q_out = rows_of(in.q_out, s.packed);
  }
  t.cache = cache_tensors({in.k_cache, in.v_cache, in.page_table, in.cache_index});
  t.cache.seqlens = pointer<const std::int32_t>(in.seqlens);
  t.cache.cu_seqlens_new = pointer<const std::int32_t>(in.cu_seqlens_new);
  t.cu_seqlens_q = pointer<const std::int32_t>(in.cu_seqlens_q);
  t.slot_mapping = pointer<const std::int64_t>(in.slot_mapping);
  t.k_scale = cached_scales_of(in.k_scale, s.scale_k);
  t.v_scale = cached_scales_of(in.v_scale, s.scale_v);
  if (s.rotary) {
    t.rotary = rotary_tensors(in.rotary_cos, in.rotary_sin, in.rotary_seqlens);
    t.rotary.positions = in.rotary_positions.data;
  }
  return t;
}

}  // namespace tessera::python
