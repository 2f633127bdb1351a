// Where the sequences of a problem lie and how long they are (S11): the one place that tells dense
// batches from packed ones. Planner, kernels, launches and the tile simulator ask here, so lengths
// or rows that come from elsewhere are an addition to this file.
#pragma once

#include "core/mask.h"

namespace tessera::core {

/// Elements between neighbours of a (batch, seqlen, heads, head_dim) tensor.
struct Strides {
  std::int64_t batch = 0, seqlen = 0, head = 0;

  friend constexpr bool operator==(const Strides&, const Strides&) = default;
};

/// One sequence's queries and keys.
struct Sequence {
  int batch = 0;  ///< its number
  int seqlen_q = 0;
  int seqlen_k = 0;
  int first_q = 0;      ///< packed: first row of q, o and softmax_lse; dense: 0
  int first_k = 0;      ///< packed: first row of k and v; dense: 0; a cache: its first slot
  bool packed = false;  ///< q has no dimension of sequences
  int entry_k = 0;      ///< its place along the batch dimension of k and v: of a row

  /// Its place along q's batch dimension.
  TESSERA_HD constexpr int entry() const { return packed ? 0 : batch; }
  /// Elements from the start of a tensor with q's rows to a query's row.
  TESSERA_HD constexpr std::int64_t query_offset(const Strides& strides, int query,
                                                 int head) const {
    return entry() * strides.batch + (std::int64_t{first_q} + query) * strides.seqlen +
           head * strides.head;
  }
  /// The same for a key of k or v that do not lie in pages; head: of the key/value heads.
  TESSERA_HD constexpr std::int64_t key_offset(const Strides& strides, int key, int head) const {
    return entry_k * strides.batch + (std::int64_t{first_k} + key) * strides.seqlen +
           head * strides.head;
  }
  /// A query's index into softmax_lse (S5), where heads are lse_head elements apart.
  TESSERA_HD constexpr std::int64_t lse_index(std::int64_t lse_head, int num_heads, int head,
                                              int query) const {
    return (std::int64_t{entry()} * num_heads + head) * lse_head + first_q + query;
  }
};

/// All sequences of a problem.
struct Sequences {
  const std::int32_t* cu_seqlens_q = nullptr;  ///< null: dense
  const std::int32_t* cu_seqlens_k = nullptr;
  int seqlen_q = 0, seqlen_k = 0;  ///< packed: of the longest

  TESSERA_HD constexpr bool packed() const { return cu_seqlens_q != nullptr; }
  TESSERA_HD constexpr Sequence at(int batch) const {
    Sequence sequence = {batch, seqlen_q, seqlen_k, 0, 0, packed(), batch};
    if (sequence.packed) {
      sequence.entry_k = 0;
      sequence.first_q = cu_seqlens_q[batch];
      sequence.first_k = cu_seqlens_k[batch];
      sequence.seqlen_q = cu_seqlens_q[batch + 1] - sequence.first_q;
      sequence.seqlen_k = cu_seqlens_k[batch + 1] - sequence.first_k;
    }
    return sequence;
  }
  /// A query's number among those of all sequences, of which dense ones have seqlen_q each.
  TESSERA_HD constexpr std::int64_t row_of(const Sequence& sequence, int query) const {
    return std::int64_t{sequence.entry()} * seqlen_q + sequence.first_q + query;
  }
  friend constexpr bool operator==(const Sequences&, const Sequences&) = default;
};

/// Which keys queries see besides those that do not exist (S2, S3). -1 is unbounded.
struct Window {
  std::int64_t left = -1, right = -1;
  Alignment alignment = Alignment::bottom_right;

  TESSERA_HD constexpr Band band_of(const Sequence& sequence) const {
    return make_band(sequence.seqlen_q, sequence.seqlen_k, left, right, alignment);
  }
  friend constexpr bool operator==(const Window&, const Window&) = default;
};

/// Everything that says which keys queries see.
struct MaskRules {
  Window window;
  Divisor chunk = Divisor(0);  ///< 0: none
  int sink_tokens = 0;
  const std::uint64_t* tree = nullptr;  ///< a word for every query of all sequences; null: none

  TESSERA_HD constexpr SequenceMask of(const Sequences& sequences, const Sequence& sequence) const {
    return {window.band_of(sequence), chunk, sink_tokens,
            tree == nullptr ? nullptr : tree + sequences.row_of(sequence, 0)};
  }
  friend constexpr bool operator==(const MaskRules&, const MaskRules&) = default;
};

/// The rows of all query sequences in blocks of block_m, every sequence beginning a block of its
/// own: how the backward's accumulators lie.
struct RowBlocks {
  int block_m = 0;
  int per_sequence = 0;  ///< dense

  /// Of all sequences together; packed ones leave gaps. rows: of all queries.
  TESSERA_HD constexpr std::int64_t count(bool packed, std::int64_t rows,
                                          std::int64_t batch) const {
    return packed ? rows / block_m + batch : batch * per_sequence;
  }
  /// The first of a sequence.
  TESSERA_HD constexpr std::int64_t first_of(const Sequence& sequence) const {
    const std::int64_t batch = sequence.batch;
    return sequence.packed ? sequence.first_q / block_m + batch : batch * per_sequence;
  }
};

}  // namespace tessera::core
