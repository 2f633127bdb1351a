// The block of keys and values that a forward item multiplies next. Its rows are asked for and, a
// few steps later, copied into scratch memory while the block before is multiplied, so that
// products never wait for memory: neither for a burst of requests nor for rows that crowd a few
// sets of the caches because they lie a power of two apart.
#pragma once

#include "cpu/copy.h"
#include "cpu/product.h"
#include "cpu/rows.h"

namespace tessera::cpu::TESSERA_ISA {

template <core::Kernel K>
class NextBlock {
  static constexpr bool kPairs = K.operand == core::Operand::bf16;

 public:
  using Key = std::conditional_t<kPairs, Bf16, float>;
  using Value = std::conditional_t<kPairs, std::uint32_t, float>;  ///< bf16: pairs of two keys

  /// l2_bytes: of the second-level cache.
  NextBlock(const Problem& problem, const Tensors& tensors, const RowMap& map,
            const ForwardScratch& scratch, std::int64_t l2_bytes)
      : map_(map),
        k_(tensors.k, map, problem.head_dim, problem.stored_k()),
        v_(tensors.v, map, problem.head_dim_v, problem.stored_v()),
        second_(problem.qv ? second_column(K, problem) : 0),
        k_stride_(forward_key_stride(K, multiplied_columns(K, problem))),
        v_stride_(forward_value_stride(problem.head_dim_v)),
        k_copies_(scratch.k),
        v_copies_(scratch.v) {
    const bool paged = map.pages.table != nullptr;
    copies_k_ = widens(k_) || paged || crowds_l2(k_, l2_bytes) || problem.qv;
    copies_v_ = widens(v_) || paged || crowds_l1(v_) || kPairs || problem.qv;  // and tiles
    if (problem.v_tiles) {
      tiles_ = value_tiles_of(problem);
      v_.data = static_cast<const std::byte*>(tensors.v.data) +
                value_tiles_offset(tiles_, tensors.v, map.sequence, map.head_k);
    }
    if (problem.scaled()) {
      const auto of = [&map](const core::Scales& scales) { return Adjustment(scales, map); };
      k_scale_ = of(k_scales_of(problem, tensors));
      v_scale_ = of(v_scales_of(problem, tensors));
      v_shift_ = of(v_shift_of(problem, tensors));
      shifts_scores_ = problem.scales.score_shift;
    }
    const std::int64_t bytes = core::max<std::int64_t>(1, core::max(k_.bytes, v_.bytes));
    rows_ = static_cast<int>(core::max<std::int64_t>(1, kStepBytes / 2 / bytes)) * 2;
  }

  /// Turns to a block, which may be empty; the copies of the block before stay.
  void begin(core::Range block) {
    block_ = block;
    copy_ ^= 1;
    asked_ = done_ = 0;
    steps_ = 2 * core::ceil_div(block.size(), rows_);
  }

  /// Asks for all of it at once: when there is nothing to multiply meanwhile.
  void ask_all() {
    while (asked_ < steps_) ask(asked_++);
  }

  /// Rows of K or V in a step.
  int rows() const { return rows_; }

  TESSERA_INLINE bool pending() const { return done_ < steps_; }

  /// Asks for some rows, and copies some that were asked for kAhead steps before.
  void step() {
    if (asked_ < steps_) {
      ask(asked_++);
      if (asked_ - done_ <= kAhead && asked_ < steps_) return;
    }
    copy(done_++);
  }

  /// Does what is left of it.
  void finish() {
    while (pending()) step();
  }

  /// Where the block's rows are once it is finished.
  Rows<Key> keys() const {
    if (copies_k_) return {k_copy(0), k_stride_};
    return {row_of<Key>(k_, 0), elements<Key>(k_.stride)};
  }
  Columns<Value> values() const {
    if constexpr (!kPairs) {
      if (second_ > 0) return {k_copy(0) + second_, k_stride_};
    }
    if (copies_v_) return {v_copy(0), v_stride_};
    return {row_of<Value>(v_, 0), elements<Value>(v_.stride)};
  }

 private:
  /// Bytes of a step, about: more at a time stall the products, fewer interrupt them too often.
  static constexpr std::int64_t kStepBytes = 1024;
  /// Steps from request to copy: longer than memory takes.
  static constexpr int kAhead = 4;

  /// Rows of K or V in the caller's tensor; sizes in bytes.
  struct Source {
    const std::byte* data;  ///< of key 0; with pages: of the tensor
    std::int64_t stride;    ///< between keys; with pages: of one
    std::int64_t n;         ///< elements of a row
    std::int64_t bytes;     ///< of a row
    core::Strides strides;  ///< elements
    Dtype dtype;

    Source(const ConstTensor& tensor, const RowMap& map, std::int64_t head_dim, Dtype type)
        : data(static_cast<const std::byte*>(tensor.data) +
               (map.pages.table == nullptr ? map.key_offset(tensor) * size_of(type) : 0)),
          stride(tensor.stride_seqlen * size_of(type)),
          n(head_dim),
          bytes(head_dim * size_of(type)),
          strides(strides_of(tensor)),
          dtype(type) {}
  };

  /// The scales, or the shift, of the map's sequence and head.
  struct Adjustment {
    core::Scales scales;
    const float* numbers = nullptr;  ///< null: none; of slots: of all

    Adjustment() = default;
    Adjustment(const core::Scales& of, const RowMap& map) : scales(of) {
      if (of) numbers = of.of_slots() ? of.data : of.of(map.sequence, map.head_k);
    }

    bool by_column() const { return scales.by == Scaling::channel; }
    /// Of a row of n, that share a number or have one each.
    std::int64_t columns(std::int64_t n) const {
      return scales.by == Scaling::group ? scales.block : n;
    }
    /// Of one key: a number, or one for every column or group of them.
    const float* of_key(int key, const RowMap& map) const {
      if (scales.of_slots()) return scales.of_key(map.pages, map.sequence, key, map.head_k);
      return by_column() ? numbers : numbers + scales.index_of(key);
    }
  };

  static bool widens(const Source& source) { return !kPairs && source.dtype != Dtype::f32; }

  // Do a block's rows fall into so few cache sets that they would push each other out? Rows of K
  // are walked along, and need to stay near from one sub-tile to the next; rows of V are walked
  // across.
  static bool crowds_l1(const Source& source) { return source.stride % 1024 == 0; }
  static bool crowds_l2(const Source& source, std::int64_t l2_bytes) {
    return crowds_l1(source) && source.stride * K.block_n >= l2_bytes / 2;
  }

  template <class T>
  static constexpr std::int64_t elements(std::int64_t bytes) {
    return bytes / static_cast<std::int64_t>(sizeof(T));
  }

  template <class T>
  const T* row_of(const Source& source, int row) const {
    const int key = block_.begin + row;
    if (map_.pages.table == nullptr) {
      return reinterpret_cast<const T*>(source.data + key * source.stride);
    }
    const std::int64_t offset =
        core::slot_offset(map_.pages, map_.sequence, source.strides, key, map_.head_k);
    return reinterpret_cast<const T*>(source.data + offset * size_of(source.dtype));
  }
  Key* k_copy(int row) const { return reinterpret_cast<Key*>(k_copies_[copy_]) + row * k_stride_; }
  /// Pairs: row must be even.
  Value* v_copy(int row) const {
    return reinterpret_cast<Value*>(v_copies_[copy_]) + row / (kPairs ? 2 : 1) * v_stride_;
  }

  // Even steps are keys, odd ones values.
  TESSERA_INLINE static bool is_keys(int step) { return step % 2 == 0; }
  TESSERA_INLINE core::Range rows_of(int step) const {
    const int first = step / 2 * rows_;
    return {first, core::min(first + rows_, block_.size())};
  }

  void ask(int step) const {
    if (!is_keys(step) && tiles_.columns > 0) return;
    const Source& source = is_keys(step) ? k_ : v_;
    const core::Range rows = rows_of(step);
    for (int r = rows.begin; r < rows.end; ++r) {
      prefetch_row<Access::read>(row_of<std::byte>(source, r), source.bytes);
    }
  }

  void copy(int step) const {
    core::Range rows = rows_of(step);
    if (!(is_keys(step) ? copies_k_ : copies_v_)) return;
    with_widened_storage<K>((is_keys(step) ? k_ : v_).dtype, [&](auto storage) {
      using T = decltype(storage);
      // Rows in pages lie two and two at some distance from each other.
      const int count = map_.pages.table == nullptr ? rows.size() : 2;
      for (; !rows.empty(); rows.begin += count) {
        const core::Range some = {rows.begin, core::min(rows.begin + count, rows.end)};
        if (is_keys(step)) {
          copy_keys<T>(some);
        } else {
          copy_values<T>(some);
        }
      }
    });
  }

  /// Elements from the first of some rows to the next.
  template <class T>
  std::int64_t distance(const Source& source, core::Range rows) const {
    if (map_.pages.table == nullptr || rows.size() < 2) return elements<T>(source.stride);
    return row_of<T>(source, rows.begin + 1) - row_of<T>(source, rows.begin);
  }

  template <class T>
  void copy_keys(core::Range rows) const {
    const T* k = row_of<T>(k_, rows.begin);
    if constexpr (kPairs) {
      copy_rows(k, distance<T>(k_, rows), rows.size(), k_.n, k_copy(rows.begin), k_stride_);
      for (int r = rows.begin; k_.n < second_ && r < rows.end; ++r) k_copy(r)[k_.n] = {};
    } else {
      widen_rows(k, distance<T>(k_, rows), rows.size(), k_.n, k_copy(rows.begin), k_stride_);
      if (k_scale_.numbers != nullptr) scale_keys(rows);
    }
  }

  template <class T>
  void copy_values(core::Range rows) const {
    const T* v = row_of<T>(v_, rows.begin);
    if (second_ > 0) {
      Key* const out = k_copy(rows.begin) + second_;
      if constexpr (kPairs) {
        copy_rows(v, distance<T>(v_, rows), rows.size(), v_.n, out, k_stride_);
      } else {
        widen_rows(v, distance<T>(v_, rows), rows.size(), v_.n, out, k_stride_);
        if (v_scale_.numbers != nullptr || v_shift_.numbers != nullptr) scale_values(rows);
        return;
      }
    }
    if constexpr (kPairs) {
      pair_rows(v, distance<T>(v_, rows), rows.size(), v_.n, v_copy(rows.begin), v_stride_);
    } else {
      if constexpr (std::is_same_v<T, E4m3>) {
        if (tiles_.columns > 0) return copy_tiled(rows);
      }
      widen_rows(v, distance<T>(v_, rows), rows.size(), v_.n, v_copy(rows.begin), v_stride_);
      if (v_scale_.numbers != nullptr || v_shift_.numbers != nullptr) scale_values(rows);
    }
  }

  /// Values that lie in tiles: a row at a time is put together.
  [[gnu::noinline]] void copy_tiled(core::Range rows) const {
    E4m3 row[256];
    for (int r = rows.begin; r < rows.end; ++r) {
      for (int c = 0; c < v_.n; ++c) {
        row[c] = reinterpret_cast<const E4m3*>(v_.data)[tiles_.offset(block_.begin + r, c)];
      }
      widen_rows(row, v_.n, 1, v_.n, v_copy(r), v_stride_);
    }
    if (v_scale_.numbers != nullptr || v_shift_.numbers != nullptr) scale_values(rows);
  }

  // Copies that are fp32 already become the values that 8 bits stand for (S14).
  [[gnu::noinline]] void scale_keys(core::Range rows) const {
    for (int r = rows.begin; r < rows.end; ++r) {
      scale_row(k_copy(r), k_.n, k_scale_.of_key(block_.begin + r, map_), false, nullptr);
      if (shifts_scores_) k_copy(r)[k_.n] = 1.0F;
    }
  }
  [[gnu::noinline]] void scale_values(core::Range rows) const {
    static constexpr float kOne = 1.0F;
    const bool scaled = v_scale_.numbers != nullptr;
    const std::int64_t group = v_scale_.columns(v_.n);
    for (int r = rows.begin; r < rows.end; ++r) {
      const float* factor = scaled ? v_scale_.of_key(block_.begin + r, map_) : &kOne;
      auto* const row = second_ > 0 ? k_copy(r) + second_ : v_copy(r);
      for (std::int64_t c = 0; c < v_.n; c += group, ++factor) {
        scale_row(row + c, core::min(group, v_.n - c), factor, v_scale_.by_column(),
                  v_shift_.numbers == nullptr ? nullptr : v_shift_.numbers + c);
      }
    }
  }

  const RowMap& map_;
  Source k_, v_;
  std::int64_t second_;  ///< with qv: the column of a key's copy where its value begins; else 0
  std::int64_t k_stride_, v_stride_;  ///< elements between rows of the copies
  std::byte* const* k_copies_;        ///< of this block and of the one before
  std::byte* const* v_copies_;
  bool copies_k_, copies_v_;  ///< or are they read where they lie?
  core::ValueTiles tiles_;    ///< of V; no columns: it lies in rows
  Adjustment k_scale_, v_scale_, v_shift_;
  bool shifts_scores_ = false;
  int rows_;  ///< of a step; even
  core::Range block_;
  int copy_ = 0;  ///< where this block's are
  int steps_ = 0, asked_ = 0, done_ = 0;
};

}  // namespace tessera::cpu::TESSERA_ISA
