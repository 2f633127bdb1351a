// Where the scales of 8-bit tensors lie (S14), and the numbers that smoothing took off: the one
// place that knows their shapes.
#pragma once

#include "core/pages.h"

namespace tessera::core {

/// Keys that share a scale at least where a GPU multiplies i8; blocks of scales are multiples of
/// it.
inline constexpr int kIntegerScaleKeys = 128;
/// Columns of a value that share a scale at least where a GPU widens values beside keys of more
/// bits; groups are multiples of it.
inline constexpr int kScaledColumns = 128;

/// fp32 numbers of the shape of a Scaling. Elements from one to the next of a dimension.
struct Scales {
  const float* data = nullptr;  ///< null: none
  std::int64_t stride_batch = 0, stride_head = 0;
  Scaling by = Scaling::none;
  int block = 0;                   ///< keys, of Scaling::block; columns, of Scaling::group
  std::int64_t stride_seqlen = 0;  ///< by token or group, of k and v

  TESSERA_HD constexpr explicit operator bool() const { return data != nullptr; }

  /// Whether every slot of k or v has a number of its own, or several: of_key().
  TESSERA_HD constexpr bool of_slots() const {
    return by == Scaling::token || by == Scaling::group;
  }
  TESSERA_HD constexpr Strides strides() const {
    return {stride_batch, stride_seqlen, stride_head};
  }
  /// That of a key, of k or v by token; by group the first.
  TESSERA_HD constexpr const float* of_key(const Pages& pages, const Sequence& sequence, int key,
                                           int head_k) const {
    return data + slot_offset(pages, sequence, strides(), key, head_k);
  }
  /// The numbers of a sequence's head; head: of the query heads for `token`, which is q's here,
  /// else of the key/value heads.
  TESSERA_HD constexpr const float* of(const Sequence& sequence, int head) const {
    if (by == Scaling::tensor) return data;
    const bool packed = sequence.packed && (by == Scaling::token || by == Scaling::block);
    std::int64_t first = 0;
    if (packed) {
      first = by == Scaling::token ? sequence.first_q : sequence.first_k / block + sequence.batch;
    }
    return data + (packed ? 0 : sequence.batch * stride_batch) + head * stride_head + first;
  }
  /// Which of them row `row` of the sequence has: a query or a key; not of `channel`.
  TESSERA_HD constexpr int index_of(int row) const {
    return by == Scaling::token ? row : by == Scaling::block ? row / block : 0;
  }
};

}  // namespace tessera::core
