// Quantising (S14): rows of 16 or 32 bits become rows of 8 bits and their scales, in pieces of
// columns that stay in the first-level cache. What shares a scale that is written is looked at
// twice: as fp32 numbers in a small buffer where they fit, else each number is made twice.
#pragma once

#include <bit>
#include <cstring>
#include <type_traits>

#include "cpu/call.h"
#include "cpu/numbers.h"
#include "plan/quantize.h"

namespace tessera::cpu::TESSERA_ISA {

inline constexpr std::int64_t kKeptNumbers = 1 << 14;  ///< of a buffer

// ---- the Hadamard transform ----

/// Stages inside of vectors, of strides below n and kLanes.
template <int kStride = 1>
TESSERA_INLINE F32 transform_lanes(F32 x, int n) {
  if constexpr (kStride < kLanes) {
    if (kStride < n) {
      const U32 second = (bits(iota()) & U32(kStride))
                         << (31 - std::countr_zero(unsigned{kStride}));
      // a + b and a - b: b + a, and -b + a.
      x = exchange<kStride>(x) + f32_from_bits(bits(x) ^ second);
      return transform_lanes<2 * kStride>(x, n);
    }
  }
  return x;
}

/// kVectors of them, which are a block of n columns, or have several.
template <int kVectors>
TESSERA_INLINE void transform_vectors(float* x, int n, float factor) {
  F32 v[kVectors];
#pragma GCC unroll 16
  for (int i = 0; i < kVectors; ++i) v[i] = transform_lanes(load(x + i * kLanes), n);
#pragma GCC unroll 8
  for (int stride = 1; stride < kVectors; stride *= 2) {
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; ++i) {
      if ((i & stride) != 0) continue;
      const F32 a = v[i], b = v[i + stride];
      v[i] = a + b;
      v[i + stride] = a - b;
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < kVectors; ++i) store(x + i * kLanes, v[i] * F32(factor));
}

/// Blocks of n columns of `columns`, a multiple of kLanes; n: 2 to kMostHadamard.
TESSERA_INLINE void transform(float* x, int columns, int n) {
  const float factor = core::hadamard_factor(n);
  const int step = core::max(n, kLanes);
  for (int c = 0; c < columns; c += step) {
    switch (step / kLanes) {
      case 1: transform_vectors<1>(x + c, n, factor); break;
      case 2: transform_vectors<2>(x + c, n, factor); break;
      case 4: transform_vectors<4>(x + c, n, factor); break;
      case 8: transform_vectors<8>(x + c, n, factor); break;
      default: {
        constexpr int kMost = 16 * kLanes;
        for (int i = 0; i < n; i += kMost) transform_vectors<16>(x + c + i, n, 1.0F);
        for (int stride = kMost; stride < n; stride *= 2) {
          for (int i = 0; i < n; i += kLanes) {
            if ((i & stride) != 0) continue;
            const F32 a = load(x + c + i), b = load(x + c + i + stride);
            store(x + c + i, a + b);
            store(x + c + i + stride, a - b);
          }
        }
        for (int i = 0; i < n; i += kLanes) store(x + c + i, load(x + c + i) * F32(factor));
      }
    }
  }
}

// ---- a row ----

/// What a tensor's numbers go through before they are scaled.
struct Steps {
  int rotary = 0;  ///< columns that are rotated
  bool interleaved = false;
  const float* signs = nullptr;  ///< of the columns
  int hadamard = 0;

  /// What comes after the rotation; off: what is subtracted, or null. Up to a multiple of kLanes
  /// come zeros.
  TESSERA_INLINE void finish(const float* off, const core::Range& columns, float* out) const {
    for_each_vector(columns, [&](int c, int n) {
      F32 x = load_part(out + c - columns.begin, n);
      if (off != nullptr) x = x - load_part(off + c, n);
      if (signs != nullptr) {
        x = f32_from_bits(bits(x) ^ (bits(load_part(signs + c, n)) & U32(0x80000000U)));
      }
      store(out + c - columns.begin, x);
    });
    if (hadamard > 1) transform(out, core::round_up(columns.size(), kLanes), hadamard);
  }
};

/// One tensor on its way.
struct Way {
  enum class Which : std::uint8_t { q, k, v };

  Which which;
  const ConstTensor& from;
  const Tensor& to;
  const tessera::Scales& numbers;  ///< where the scales lie
  core::Scales scales;             ///< and which
  int heads, dim;

  TESSERA_INLINE bool queries() const { return which == Which::q; }
};

/// Quantises it; T, R: types of rows and tables; Out: of the elements.
template <class T, class R, class Out>
class Quantizer {
 public:
  TESSERA_INLINE Quantizer(const QuantizeCall& call, const Way& way)
      : shape_(call.shape),
        p_(call.shape.problem),
        t_(call.tensors),
        results_(results_of(call.tensors)),
        way_(way),
        sequences_(sequences_of(p_, results_)),
        limit_(kLimit<Out>) {
    if (way.which == Way::Which::v) {
      off_ = v_shift_of(p_, results_);
      return;
    }
    const RotaryShape rotary = shape_.rotary.value_or(RotaryShape{});
    steps_ = {static_cast<int>(rotary.dim), rotary.interleaved, shape_.signs ? t_.signs : nullptr,
              shape_.hadamard};
    if (way.queries()) {
      score_shift_ = score_shift_of(p_, results_);
    } else {
      off_ = k_mean_of(shape_, t_);
    }
  }

  /// No two pieces have rows that share a written scale, or a tile.
  TESSERA_INLINE core::RowPieces pieces() const {
    const bool queries = way_.queries();
    const std::int64_t longest = queries ? p_.seqlen_q : p_.seqlen_k;
    const std::int64_t block = way_.scales.by == Scaling::block ? way_.scales.block : 1;
    std::int64_t rows =
        core::round_up(core::max<std::int64_t>(kKeptNumbers / row_numbers(), 1), block);
    if (in_tiles()) rows = least_common_multiple(block, core::ValueTiles::kKeys);
    rows = core::max<std::int64_t>(core::min(rows, longest), 1);
    return {queries ? sequences_.cu_seqlens_q : sequences_.cu_seqlens_k, static_cast<int>(longest),
            static_cast<int>(p_.batch), static_cast<int>(rows)};
  }

  TESSERA_INLINE void write(const core::RowRange& range, int head) {
    if (range.begin == range.end) return;
    begin(range.batch, head);
    if (in_tiles()) {
      write_tiles(range);
    } else if (is_written(way_.scales.by)) {
      write_scaled(range);
    } else {
      write_given(range);
    }
  }

 private:
  using Written = core::WrittenScale<float>;

  static constexpr std::int64_t least_common_multiple(std::int64_t a, std::int64_t b) {
    std::int64_t x = a, y = b;
    while (y != 0) {
      const std::int64_t rest = x % y;
      x = y;
      y = rest;
    }
    return a / x * b;
  }
  TESSERA_INLINE bool in_tiles() const { return way_.which == Way::Which::v && p_.v_tiles; }
  TESSERA_INLINE std::int64_t row_numbers() const { return core::round_up(way_.dim, kLanes); }

  /// Everything about a sequence's head.
  TESSERA_INLINE void begin(int batch, int head) {
    sequence_ = sequences_.at(batch);
    const bool queries = way_.queries();
    const int head_k = queries ? head / static_cast<int>(p_.group()) : head;
    const auto at = [&](const ConstTensor& tensor) {
      const core::Strides strides = strides_of(tensor);
      return queries ? sequence_.query_offset(strides, 0, head)
                     : sequence_.key_offset(strides, 0, head);
    };
    from_ = static_cast<const T*>(way_.from.data) + at(way_.from);
    to_ = static_cast<Out*>(way_.to.data) + (in_tiles() ? 0 : at(way_.to));
    head_ = head;
    const bool by_row = way_.scales.by == Scaling::token;
    scale_ = way_.scales.of(sequence_, by_row ? head : head_k);
    columns_off_ = off_ ? off_.of(sequence_, head_k) : nullptr;
    shift_ = score_shift_
                 ? t_.score_shift.data + (score_shift_.of(sequence_, head) - score_shift_.data)
                 : nullptr;
    mean_ = score_shift_ ? k_mean_of(shape_, t_).of(sequence_, head_k) : nullptr;
  }

  TESSERA_INLINE Turn<R> turn_of(int row) const {
    if (!shape_.rotary || way_.which == Way::Which::v) return {nullptr, nullptr};
    const core::RowPositions positions = positions_of(shape_, t_);
    const std::int64_t position =
        way_.queries() ? positions.of_query(sequence_, row) : positions.of_key(sequence_, row);
    return {static_cast<const R*>(t_.rotary.cos) + position * t_.rotary.stride_cos,
            static_cast<const R*>(t_.rotary.sin) + position * t_.rotary.stride_sin};
  }
  template <class Body>
  TESSERA_INLINE void for_each_piece(const Body& body) const {
    for (int c = 0; c < way_.dim; c += kPieceColumns) {
      body(core::Range{c, core::min(c + kPieceColumns, way_.dim)});
    }
  }

  /// The row's numbers before they are scaled, and its score_shift.
  [[gnu::noinline]] void make(int row, const core::Range& columns, float* out) const {
    const T* const from = from_ + row * way_.from.stride_seqlen;
    rotate_columns(from, turn_of(row), steps_.rotary, steps_.interleaved, columns, out);
    if (shift_ != nullptr) {
      F32 sum{};
      for_each_vector(columns, [&](int c, int n) {
        sum = fma(load_part(out + c - columns.begin, n), load_part(mean_ + c, n), sum);
      });
      shift_[row] = reduce_add(sum) + (columns.begin == 0 ? 0.0F : shift_[row]);
    }
    steps_.finish(columns_off_, columns, out);
  }
  /// The elements of columns; factor: of all of them.
  TESSERA_INLINE void write_row(int row, const core::Range& columns, const float* numbers,
                                F32 factor) const {
    Out* const to = to_ + row * way_.to.stride_seqlen;
    for_each_vector(columns, [&](int c, int n) {
      store_bytes(to + c, load(numbers + c - columns.begin) * factor, n);
    });
  }
  /// Rows that come later are asked for: those of other heads may lie between them.
  TESSERA_INLINE void ask(int row, const core::RowRange& range) const {
    constexpr int kAhead = 8;
    if (row + kAhead >= range.end) return;
    const T* const from = from_ + std::int64_t{row + kAhead} * way_.from.stride_seqlen;
    prefetch_row<Access::read>(reinterpret_cast<const std::byte*>(from),
                               way_.dim * static_cast<std::int64_t>(sizeof(T)));
  }

  // ---- scales that are written ----

  /// Numbers of the largest magnitude, a lane each.
  static TESSERA_INLINE F32 most(F32 amax, const float* numbers, int count) {
    for (int i = 0; i < count; i += kLanes) amax = larger_magnitudes(amax, load(numbers + i));
    return amax;
  }

  /// Rows [begin, end) are made, where they are `kept` in kept_; their largest magnitudes, a lane
  /// each.
  TESSERA_INLINE F32 make_rows(const core::RowRange& range, int begin, int end, bool kept) {
    F32 amax{0.0F};
    for (int row = begin; row < end; ++row) {
      ask(row, range);
      for_each_piece([&](const core::Range& columns) {
        float* const made = kept_at(row - begin, columns, kept);
        make(row, columns, made);
        amax = most(amax, made, columns.size());
      });
    }
    return amax;
  }
  TESSERA_INLINE float* kept_at(int row, const core::Range& columns, bool kept) {
    return kept ? kept_ + row * row_numbers() + columns.begin : kept_;
  }
  /// The elements of made rows.
  TESSERA_INLINE void write_made(int begin, int end, bool kept, float factor) {
    for (int row = begin; row < end; ++row) {
      for_each_piece([&](const core::Range& columns) {
        float* const made = kept_at(row - begin, columns, kept);
        if (!kept) make(row, columns, made);
        write_row(row, columns, made, F32(factor));
      });
    }
  }

  TESSERA_INLINE void write_scaled(const core::RowRange& range) {
    const bool each = way_.scales.by == Scaling::token;
    const int step = each ? 1 : way_.scales.block;
    for (int begin = range.begin; begin < range.end;) {
      if (each && kLanes * row_numbers() <= kKeptNumbers) {
        begin = write_tokens(range, begin);
        continue;
      }
      const int end = range.end - begin > step ? begin + step : range.end;
      const bool kept = (end - begin) * row_numbers() <= kKeptNumbers;
      const F32 amax = make_rows(range, begin, end, kept);
      write_made(begin, end, kept, write_scale(begin, amax).factor);
      begin = end;
    }
  }
  /// As many rows as there are lanes, each with a scale of its own: divided all at once. Returns
  /// where the next ones begin.
  TESSERA_INLINE int write_tokens(const core::RowRange& range, int begin) {
    const int rows = core::min(range.end - begin, kLanes);
    float amax[kLanes] = {}, factors[kLanes];
    for (int i = 0; i < rows; ++i) {
      ask(begin + i, range);
      F32 one{0.0F};
      for_each_piece([&](const core::Range& columns) {
        float* const made = kept_at(i, columns, true);
        make(begin + i, columns, made);
        one = most(one, made, columns.size());
      });
      amax[i] = reduce_max(one);
    }
    // Written::of of every lane.
    const F32 largest = load(amax), limit(limit_), one(1.0F);
    const F32 counted = min(max(largest, F32(Written::kLeastAmax)), F32(Written::kMostAmax));
    const Mask none = bits(largest) == U32(0U);
    store_n(way_.numbers.data + (scale_ - way_.numbers.data) + begin,
            select(none, one, counted / limit), rows);
    store(factors, select(none, one, limit / counted));
    for (int i = 0; i < rows; ++i) {
      for_each_piece([&](const core::Range& columns) {
        write_row(begin + i, columns, kept_at(i, columns, true), F32(factors[i]));
      });
    }
    return begin + rows;
  }
  TESSERA_INLINE Written write_scale(int row, F32 amax) const {
    const Written scale = Written::of(reduce_max(amax), limit_);
    way_.numbers.data[scale_ + way_.scales.index_of(row) - way_.numbers.data] = scale.scale;
    return scale;
  }

  // ---- scales that are given ----

  TESSERA_INLINE bool by_channel() const { return way_.scales.by == Scaling::channel; }
  /// What columns are multiplied by, as many as a piece has.
  TESSERA_INLINE void take_factors(const core::Range& columns) {
    for_each_vector(columns, [&](int c, int n) {
      const F32 scale = by_channel() ? load_part(scale_ + c, n) : F32(*scale_);
      store(factors_ + c - columns.begin, F32(1.0F) / scale);
    });
  }

  TESSERA_INLINE void write_given(const core::RowRange& range) {
    for_each_piece([&](const core::Range& columns) {
      take_factors(columns);
      for (int row = range.begin; row < range.end; ++row) {
        ask(row, range);
        make(row, columns, kept_);
        Out* const to = to_ + row * way_.to.stride_seqlen;
        for_each_vector(columns, [&](int c, int n) {
          const int at = c - columns.begin;
          store_bytes(to + c, load(kept_ + at) * load(factors_ + at), n);
        });
      }
    });
  }

  // ---- tiles of values ----

  /// Of head_dim_v up to kPieceColumns.
  TESSERA_INLINE void write_tiles(const core::RowRange& range) {
    using core::ValueTiles;
    const ValueTiles tiles = value_tiles_of(p_);
    std::uint8_t* const first = static_cast<std::uint8_t*>(way_.to.data) +
                                value_tiles_offset(tiles, way_.to, sequence_, head_);
    const bool written = is_written(way_.scales.by);
    if (!written) take_factors({0, way_.dim});
    float factor = 1.0F;  // of the block that the last key is in
    for (int begin = range.begin; begin < range.end; begin += ValueTiles::kKeys) {
      for (int key = begin; key < begin + ValueTiles::kKeys; key += kGroup) {
        float by_key[kGroup];
        for (int i = 0; i < kGroup; ++i) {
          if (written && key + i < range.end && (key + i) % way_.scales.block == 0) {
            factor = scale_block(key + i, range.end);
          }
          by_key[i] = factor;
        }
        write_group(tiles, first, key, range.end, written ? by_key : nullptr);
      }
      finish_tile(tiles, first + tiles.offset(begin, 0));
    }
  }
  TESSERA_INLINE float scale_block(int begin, int last) const {
    const int end = last - begin > way_.scales.block ? begin + way_.scales.block : last;
    F32 amax{0.0F};
    for (int key = begin; key < end; ++key) {
      for_each_vector(core::Range{0, way_.dim},
                      [&](int c, int n) { amax = larger_magnitudes(amax, value(key, c, n)); });
    }
    return write_scale(begin, amax).factor;
  }
  TESSERA_INLINE F32 value(int key, int column, int n) const {
    const F32 x = load_part(from_ + key * way_.from.stride_seqlen + column, n);
    if (columns_off_ == nullptr) return x;
    // Lanes that are no columns stay 0.
    return x - load_part(columns_off_ + column, n);
  }
  /// 16 keys from `key` on, of which those from `end` on are zeros. by_key: their factors; null:
  /// columns have them.
  TESSERA_INLINE void write_group(const core::ValueTiles& tiles, std::uint8_t* first, int key,
                                  int end, const float* by_key) const {
    constexpr int kWords = kGroup / 4;
    for_each_vector(core::Range{0, way_.dim}, [&](int c, int n) {
      std::uint32_t words[kWords][kLanes];
      U32 made[kWords];
      for (U32& word : made) word = U32(0U);
      for (int i = 0; i < kGroup && key + i < end; ++i) {
        const F32 factor = by_key != nullptr ? F32(by_key[i]) : load(factors_ + c);
        const int place = core::ValueTiles::place_of(i);
        made[place / 4] = made[place / 4] | narrow(Out{}, value(key + i, c, n) * factor)
                                                << place % 4 * 8;
      }
      for (int i = 0; i < kWords; ++i) store(words[i], made[i]);
      for (int lane = 0; lane < n; ++lane) {
        std::uint8_t* const to = first + tiles.offset(key, c + lane);
        for (int i = 0; i < kWords; ++i) __builtin_memcpy(to + 4 * i, &words[i][lane], 4);
      }
    });
  }
  /// The columns that v does not have, and the ones.
  TESSERA_INLINE void finish_tile(const core::ValueTiles& tiles, std::uint8_t* tile) const {
    using core::ValueTiles;
    for (int panel = 0; panel < ValueTiles::kKeys / ValueTiles::kPanelKeys; ++panel) {
      std::uint8_t* const rows = tile + panel * tiles.panel_bytes();
      const auto fill = [&](std::int64_t from, std::int64_t to, int byte) {
        std::memset(rows + from * ValueTiles::kPanelKeys, byte,
                    static_cast<std::size_t>((to - from) * ValueTiles::kPanelKeys));
      };
      fill(way_.dim, tiles.columns, 0);
      fill(tiles.columns, tiles.rows(), ValueTiles::kOne);
    }
  }

  static constexpr int kGroup = 16;  // keys whose bytes lie side by side

  const QuantizeShape& shape_;
  const Problem& p_;
  const QuantizeTensors& t_;
  const Tensors results_;
  const Way& way_;
  const core::Sequences sequences_;
  const float limit_;
  Steps steps_;
  core::Scales off_, score_shift_;

  // Of the head at hand.
  core::Sequence sequence_;
  const T* from_ = nullptr;
  Out* to_ = nullptr;
  int head_ = 0;
  const float* scale_ = nullptr;
  const float* columns_off_ = nullptr;  ///< what is subtracted
  const float* mean_ = nullptr;         ///< what score_shift is the product with
  float* shift_ = nullptr;

  alignas(64) float factors_[kPieceColumns + kLanes];
  alignas(64) float kept_[kKeptNumbers + kPieceColumns];
};

/// All rows of a tensor, by pieces and heads.
template <class T, class R, class Out>
void quantize_tensor(const QuantizeCall& call, const Way& way) {
  const Problem& p = call.shape.problem;
  const core::RowPieces pieces = Quantizer<T, R, Out>(call, way).pieces();
  const std::int64_t count = pieces.count(way.queries() ? p.total_q : p.total_k);
  for_each_task(call, count * way.heads, [&](std::int64_t index, int) {
    Quantizer<T, R, Out> quantizer(call, way);
    quantizer.write(pieces.of(index / way.heads), static_cast<int>(index % way.heads));
  });
}

template <class T, class R>
void quantize_tensors(const QuantizeCall& call) {
  const Problem& p = call.shape.problem;
  const QuantizeTensors& t = call.tensors;
  const Tensors results = results_of(t);
  const auto quantize = [&](const Way& way, Dtype dtype) {
    if (dtype == Dtype::i8) {
      quantize_tensor<T, R, I8>(call, way);
    } else {
      quantize_tensor<T, R, E4m3>(call, way);
    }
  };
  const int heads = static_cast<int>(p.num_heads), heads_k = static_cast<int>(p.num_heads_k);
  const int dim = static_cast<int>(p.head_dim);
  using enum Way::Which;
  if (has_q(call.shape, t)) {
    quantize({q, t.q, t.q_out, t.q_scale, q_scales_of(p, results), heads, dim}, p.dtype);
  }
  if (has_k(call.shape, t)) {
    quantize({k, t.k, t.k_out, t.k_scale, k_scales_of(p, results), heads_k, dim}, p.dtype);
  }
  if (has_v(call.shape, t)) {
    quantize({v, t.v, t.v_out, t.v_scale, v_scales_of(p, results), heads_k,
              static_cast<int>(p.head_dim_v)},
             p.stored_v());
  }
}

inline void quantize_rows(const QuantizeCall& call) {
  with_storage(call.shape.dtype, [&](auto storage) {
    using T = decltype(storage);
    if (call.shape.rotary && call.shape.rotary->dtype == call.shape.dtype) {
      quantize_tensors<T, T>(call);
    } else {
      quantize_tensors<T, float>(call);
    }
  });
}

}  // namespace tessera::cpu::TESSERA_ISA
