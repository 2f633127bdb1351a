// Append: new keys and values go into a cache (S13), and keys and queries are rotated by their
// positions on the way. A cache of 8 bits gets them quantised (S14).
#pragma once

#include <cstdint>
#include <optional>

#include "tessera/tensors.hpp"

namespace tessera {

/// Rotary embedding of new keys and of queries: columns x and y of a pair become x cos - y sin and
/// x sin + y cos, in fp32, rounded once; keys of 8 bits are scaled before that.
struct RotaryShape {
  std::int64_t dim = 0;        ///< columns that are rotated, the first ones; even
  std::int64_t positions = 0;  ///< rows of the tables
  Dtype dtype = Dtype::f32;    ///< of the tables: f32, or the rows' dtype
  bool interleaved = false;    ///< pairs are columns 2j and 2j + 1; else j and j + dim / 2
  bool constant_q = false;     ///< all queries of a sequence have the first one's position
  PositionType position_type = PositionType::i32;  ///< of RotaryTensors::positions

  friend bool operator==(const RotaryShape&, const RotaryShape&) = default;
};

/// One append, as a value without pointers. Sizes are in elements.
struct AppendShape {
  Dtype dtype = Dtype::f32;       ///< of queries and new rows, and of the cache without a dtype_kv
  std::optional<Dtype> dtype_kv;  ///< of the cache; none: dtype. e4m3 or i8: rows are quantised
  /// How a cache of 8 bits is scaled: by tensor, head or token; else none (S14).
  /// @{
  Scaling scale_k = Scaling::none;
  Scaling scale_v = Scaling::none;
  /// @}
  std::int64_t batch = 1;        ///< sequences
  std::int64_t num_heads = 0;    ///< of queries; 0: no queries are rotated
  std::int64_t num_heads_k = 1;  ///< of keys and values
  std::int64_t seqlen_q = 0;     ///< packed: the longest; slot_mapping: not looked at
  std::int64_t seqlen_k = 0;    ///< slots of a sequence; with pages and slot_mapping: not looked at
  std::int64_t head_dim = 0;    ///< of queries and keys
  std::int64_t head_dim_v = 0;  ///< of values

  /// As in Problem. seqlen_new new rows a sequence, of packed ones the longest's, go behind what
  /// lengths `before` count, or are the last of what lengths `after` count. leftpad changes nothing
  /// here: lengths count slots.
  CacheShape cache;
  bool packed = false;         ///< queries are (total_q, num_heads, head_dim)
  std::int64_t total_q = 0;    ///< packed only
  bool packed_new = false;     ///< new rows are (total_new, num_heads_k, ..)
  std::int64_t total_new = 0;  ///< packed_new only
  /// Every new row has a slot of its own (AppendTensors::slot_mapping), and every row a position of
  /// its own. There are no sequences then: no lengths (Lengths::full), no page table, no index; and
  /// all rows are packed, without boundaries.
  bool slot_mapping = false;
  std::optional<RotaryShape> rotary;  ///< none: nothing is rotated

  /// The cache's type in force.
  Dtype stored_kv() const { return dtype_kv.value_or(dtype); }
  /// Whether new rows become rows of 8 bits.
  bool quantizes() const { return is_scaled(stored_kv()); }
  /// Rows of queries.
  std::int64_t rows_q() const {
    if (num_heads == 0) return 0;
    return packed ? total_q : batch * seqlen_q;
  }
  /// New rows.
  std::int64_t rows_new() const { return packed_new ? total_new : batch * cache.seqlen_new; }
  /// Rows or pages of the cache, and slots of one.
  /// @{
  std::int64_t entries() const {
    if (cache.paged()) return cache.num_pages;
    return cache.rows > 0 ? cache.rows : batch;
  }
  std::int64_t entry_slots() const { return cache.paged() ? cache.page_size : seqlen_k; }
  /// @}

  friend bool operator==(const AppendShape&, const AppendShape&) = default;
};

/// Tables of the rotary embedding, and where rows begin in them.
struct RotaryTensors {
  const void* cos = nullptr;  ///< (positions, dim / 2)
  const void* sin = nullptr;  ///< the same
  /// Elements from one position to the next.
  /// @{
  std::int64_t stride_cos = 0;
  std::int64_t stride_sin = 0;
  /// @}
  /// (batch) positions of the sequences' first new rows and queries. Null: the slot to which the
  /// first new row goes.
  const std::int32_t* seqlens = nullptr;
  /// (most of total_q and total_new), iff slot_mapping: of query i and of new row i.
  const void* positions = nullptr;
};

/// What append() reads and writes. Outputs must not overlap each other or inputs, but q_out may be
/// q. No two new rows may go to the same slot.
struct AppendTensors {
  ConstTensor k_new;  ///< (batch, seqlen_new, num_heads_k, head_dim)
  ConstTensor v_new;  ///< the same with head_dim_v
  /// The cache: (rows, seqlen_k, num_heads_k, head_dim), or (num_pages, page_size, ..).
  Tensor k;
  Tensor v;  ///< the same with head_dim_v, strides of its own
  /// iff the cache has 8 bits. By token they lie as the cache does, (rows, seqlen_k, num_heads_k)
  /// or (num_pages, page_size, ..), and new rows' are written: each takes the row's largest number
  /// to the type's largest. By tensor and by head, (batch, num_heads_k), with slot_mapping
  /// (num_heads_k), they are given and read.
  /// @{
  Scales k_scale;
  Scales v_scale;
  /// @}
  ConstTensor q;       ///< (batch, seqlen_q, num_heads, head_dim), iff num_heads
  Tensor q_out;        ///< rotated, strides of its own
  CacheTensors cache;  ///< seqlens, page_table and index as in Tensors
  const std::int32_t* cu_seqlens_q = nullptr;  ///< (batch + 1), iff packed without slot_mapping
  /// (total_new), iff slot_mapping: page * page_size + slot, without pages row * seqlen_k + slot;
  /// -1: the row is not written.
  const std::int64_t* slot_mapping = nullptr;
  RotaryTensors rotary;  ///< iff AppendShape::rotary
};

}  // namespace tessera
