// Problem: one attention computation as a pointer-free value. The same value is planned, printed,
// parsed, tested and benchmarked; the pointers come separately (tensors.hpp).
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "tessera/export.h"
#include "tessera/status.hpp"
#include "tessera/types.hpp"

namespace tessera {

/// Which dimensions of the additive bias (batch, num_heads, seqlen_q, seqlen_k) are stored; one
/// that is not has size 1 and is broadcast. The gradient of the bias has the same shape, summed.
struct BiasShape {
  bool batch = true;         ///< one bias per sequence
  bool heads = true;         ///< one per query head
  bool queries = true;       ///< one per query
  bool keys = true;          ///< one per key
  Dtype dtype = Dtype::f32;  ///< f32, or the problem's dtype

  friend bool operator==(const BiasShape&, const BiasShape&) = default;
};

/// Keys and values that lie in a cache: with lengths that are read where the kernel runs, in rows
/// or in pages (S13). seqlen_k is the cache's capacity then, in slots of a sequence. A slot holds
/// one key and its value.
struct CacheShape {
  Lengths lengths = Lengths::after;  ///< what the lengths of CacheTensors count
  std::int64_t seqlen_new = 0;       ///< before: new keys a sequence; packed: of the longest
  std::int64_t page_size = 0;        ///< slots of a page; 0: rows, without pages
  std::int64_t num_pages = 0;        ///< paged only: pages of k and v
  PageIds page_ids = PageIds::i32;   ///< of the page table
  std::int64_t rows = 0;  ///< rows of k and v, or of the page table, that CacheTensors::index picks
                          ///< from; 0: sequence b has row b
  bool leftpad = false;   ///< a sequence's first slots hold none of its keys
  bool skips = false;     ///< paged only: no query sees keys of pages with numbers below 0
  /// Paged only: prefixes of prefixes, at most, that neighbouring sequences of the batch may have
  /// in the same pages, 0 to 4. Changes no result but its rounding: a GPU reads what they share
  /// once, where that pays; it finds that out from the page table where the kernel runs (S13).
  std::int64_t prefix_levels = 0;

  /// Whether keys and values lie in pages that a table names.
  bool paged() const { return page_size > 0; }
  friend bool operator==(const CacheShape&, const CacheShape&) = default;
};

/// The scales of 8-bit tensors, and what smoothing took off before they were rounded (S14).
struct ScaleShape {
  Scaling q = Scaling::none;  ///< tensor, head or token; none where q is not of 8 bits
  Scaling k = Scaling::none;  ///< tensor, head, token or block; none where k is not of 8 bits
  Scaling v = Scaling::none;  ///< tensor, head, token, block, channel or, beside q of more than 8
                              ///< bits, group; none where v is not of 8 bits
  std::int64_t block_k = 0;   ///< keys that share a scale of k, iff `block`
  std::int64_t block_v = 0;   ///< the same of v; iff `group`, columns that do
  bool score_shift = false;   ///< a number of each row of q is added to its q . k
  bool v_shift = false;       ///< a number of each column is added to v

  friend bool operator==(const ScaleShape&, const ScaleShape&) = default;
};

/// An attention problem: o = dropout(softmax(mask(softcap(softmax_scale * q k^T) + bias))) v, and
/// its gradients (docs/semantics.md, rules S1-S14). Sizes are in elements.
struct Problem {
  Pass pass = Pass::forward;  ///< o, or the gradients
  Dtype dtype = Dtype::f32;   ///< of q, k, v and their gradients, and of o without a dtype_o
  ScaleShape scales;          ///< of those of q, k and v that are of 8 bits

  std::int64_t batch = 1;        ///< sequences
  std::int64_t num_heads = 1;    ///< query heads
  std::int64_t num_heads_k = 1;  ///< key/value heads; divides num_heads (S10)
  std::int64_t seqlen_q = 0;     ///< packed: the longest query sequence, max_seqlen_q
  std::int64_t seqlen_k = 0;     ///< packed: the longest key sequence, max_seqlen_k
  std::int64_t head_dim = 0;     ///< of q and k
  std::int64_t head_dim_v = 0;   ///< of v and o

  /// Packed variable length: q is (total_q, num_heads, head_dim), k and v (total_k, num_heads_k,
  /// ..), sequence boundaries come in cu_seqlens_q / cu_seqlens_k (S11). With a cache: q alone.
  bool packed = false;
  std::int64_t total_q = 0;         ///< packed only
  std::int64_t total_k = 0;         ///< packed only, without a cache
  std::optional<CacheShape> cache;  ///< none: k and v are (batch, seqlen_k, ..), or packed

  /// A second query of each row meets v: scores are q . k + qv . v (S1). Of latent attention (MLA,
  /// DeepSeek-V2 section 2.1, weights absorbed) v is the latent row, and k its rotated part alone.
  bool qv = false;
  std::optional<float> softmax_scale;  ///< none: 1 / sqrt(head_dim), of qv head_dim + head_dim_v
  float softcap = 0.0F;                ///< > 0: scores become softcap * tanh(score / softcap)
  std::int64_t window_left = -1;       ///< keys visible to the left; -1: unbounded (S3)
  std::int64_t window_right = -1;      ///< keys visible to the right; -1: unbounded; causal: 0
  Alignment alignment = Alignment::bottom_right;  ///< of causal, window and chunk (S2)
  std::int64_t chunk = 0;  ///< queries see keys of their own chunk of so many; 0: all (S3)
  std::int64_t sink_tokens =
      0;              ///< so many first keys are seen whatever is left of the window (S3)
  bool tree = false;  ///< a mask of bits decides on the last seqlen_q keys, of at most 64 (S3)
  PerHead alibi = PerHead::none;  ///< shape of the ALiBi slopes (S6)
  std::optional<BiasShape> bias;  ///< none: no bias tensor
  bool sink = false;              ///< one extra logit a head in the denominator, (num_heads) fp32
  float dropout_p = 0.0F;         ///< probability that an attention weight is zeroed, [0, 1)
  bool deterministic = false;     ///< dQ bitwise repeatable too (S9); the CPU always is
  bool batch_invariant = false;   ///< a row's bits do not depend on the rest of the batch (S9)
  /// Addresses of q, k, v and o, or strides between their rows, heads and sequences, may be no
  /// multiples of 16 bytes (S11); needs_unaligned() in tensors.hpp says whether given ones are not.
  /// A GPU then reads them element by element, at a fraction of the speed; a CPU takes them all the
  /// same.
  bool unaligned = false;
  /// Of o and its gradient; none: dtype, or where q is of 8 bits v's type of 16 bits, or bf16
  /// (S14).
  std::optional<Dtype> dtype_o;
  /// Of v; none: k's. bf16 or f16 beside q and k of 8 bits, or 8 bits beside q and k of more (S14).
  std::optional<Dtype> dtype_v;
  std::optional<Dtype> dtype_kv;  ///< of k and v; none: dtype. 8 bits beside q of 16 or 32 (S14)
  /// v, of e4m3, lies in tiles as quantize() makes them for a GPU's tensor cores, not in rows
  /// (S14).
  bool v_tiles = false;

  /// Whether query i sees exactly the keys up to its own position.
  bool causal() const { return window_left < 0 && window_right == 0; }
  /// Query heads that share one key/value head.
  std::int64_t group() const { return num_heads_k > 0 ? num_heads / num_heads_k : 0; }
  /// Columns that a score multiplies.
  std::int64_t score_dim() const { return head_dim + (qv ? head_dim_v : 0); }
  /// The scale in force.
  TESSERA_API float scale() const;
  /// The types of o, k and v in force.
  /// @{
  Dtype stored_o() const {
    const Dtype widest = is_scaled(dtype) ? stored_v() : dtype;
    return dtype_o.value_or(is_scaled(widest) ? Dtype::bf16 : widest);
  }
  Dtype stored_k() const { return dtype_kv.value_or(dtype); }
  Dtype stored_v() const { return dtype_v.value_or(stored_k()); }
  /// @}
  /// Whether some of q, k and v are of 8 bits: then these have scales (S14).
  bool scaled() const { return is_scaled(stored_k()) || is_scaled(stored_v()); }
  /// Groups of columns of v that have scales of their own, iff `group`.
  std::int64_t value_groups() const {
    if (scales.v != Scaling::group || scales.block_v <= 0) return 0;
    return (head_dim_v + scales.block_v - 1) / scales.block_v;
  }
  /// Rows of q (of all sequences together), the first dimension of a packed tensor.
  std::int64_t rows_q() const { return packed ? total_q : batch * seqlen_q; }
  /// Rows of k and v: all slots of a cache.
  std::int64_t rows_k() const {
    if (cache && cache->paged()) return cache->num_pages * cache->page_size;
    if (cache) return (cache->rows > 0 ? cache->rows : batch) * seqlen_k;
    return packed ? total_k : batch * seqlen_k;
  }
  /// Scales of `block` keys that a key/value head has: dense of one sequence, packed of all.
  /// Sequence b's first is number cu_seqlens_k[b] / block + b then.
  std::int64_t scale_blocks(std::int64_t block) const {
    if (block <= 0) return 0;
    return packed_k() ? total_k / block + batch : (seqlen_k + block - 1) / block;
  }
  /// Bytes of one head's tiles of v where it lies in them: of a sequence, packed of all. They begin
  /// at multiples of 16.
  TESSERA_API std::int64_t value_tile_bytes() const;
  /// Whether k and v have no dimension of sequences.
  bool packed_k() const { return packed && !cache; }

  friend bool operator==(const Problem&, const Problem&) = default;
};

/// The problem in its one-line form, e.g. "fwd bf16 b=2 h=8/2 q=1024 k=4096 d=128 causal". Only
/// what differs from the default is printed; parse_problem reads it back to an equal value.
TESSERA_API std::string to_string(const Problem& problem);

/// Reads the one-line form (docs/semantics.md lists the words). Errors name the word and what would
/// be accepted. The result is syntactically whole; validate() says whether it makes sense.
TESSERA_API Result<Problem> parse_problem(std::string_view text);

/// Says whether the numbers make sense together; the text names the first field that does not.
TESSERA_API Status validate(const Problem& problem);

TESSERA_API const char* to_string(Dtype dtype);
TESSERA_API const char* to_string(Pass pass);
TESSERA_API const char* to_string(Scaling scaling);

/// Largest values a Problem may hold; positions stay far inside int32, offsets use int64.
inline constexpr std::int64_t kMaxSeqlen = std::int64_t{1} << 29;
inline constexpr std::int64_t kMaxHeads = std::int64_t{1} << 24;
inline constexpr std::int64_t kMaxBatch = std::int64_t{1} << 29;
inline constexpr std::int64_t kMaxHeadDim = 65536;

}  // namespace tessera

/// Equal problems have equal hashes.
template <>
struct std::hash<tessera::Problem> {
  /// Over every field.
  TESSERA_API std::size_t operator()(const tessera::Problem& problem) const noexcept;
};
