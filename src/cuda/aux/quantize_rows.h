// Rows that are quantised and stay rows, on any GPU. Some lanes share a row, each with two pieces
// of 8 neighbouring columns, half of the lanes' columns apart. Pairs of a rotation by halves, and
// the first three and the last stage of a Hadamard transform, then lie in one thread; the stages
// between are exchanges of lanes. Rows that share a scale are one block's alone, which keeps their
// numbers until it is known.
#pragma once

#include "cuda/aux/quantize_pieces.h"
#include "cuda/aux/tables.h"

namespace tessera::cuda::aux {

/// A thread's columns of the rows of one head.
template <Dtype kType>
class QuantizedColumns {
 public:
  using Raw = RawPiece<kType>[2];
  using Numbers = Exact[kRowColumns];

  __device__ __forceinline__ QuantizedColumns(const QuantizeParams& p, const QuantizedRows& rows,
                                              const HeadAt& at, int lane, QuantizeShared& shared)
      : p_(p), rows_(rows), at_(at), shared_(shared) {
    first_ = lane * kPiece;
    from_ = static_cast<const char*>(rows.from.data) +
            at.offset(rows.from.strides, rows.queries) * RawPiece<kType>::kSize;
    off_ = at.columns(rows.queries ? rows.dot : rows.off, rows);
    const float* const by_column = by_channel() ? at.scale(rows) : rows.turns ? p.signs : nullptr;
    if (by_column == nullptr) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float y[kPiece];
      load_numbers(by_column, column(i), rows.dim, rows.whole, 1.0F, y);
      if (by_channel()) {
        save(i * kPiece, y);
      } else {
#pragma unroll
        for (int j = 0; j < kPiece; ++j) {
          negated_ |= __float_as_uint(y[j]) >> 31 << (i * kPiece + j);
        }
      }
    }
  }

  __device__ __forceinline__ void load(int row, bool exists, Raw& raw) const {
    const char* const from = row_at(row);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      raw[i].load(from, column(i), exists ? rows_.dim : 0, rows_.whole);
    }
  }

  static __device__ __forceinline__ void widen(const Raw& raw, Numbers& x) {
#pragma unroll
    for (int i = 0; i < kRowColumns; ++i) x[i] = raw[i / kPiece].at(i % kPiece);
  }

  /// The row's numbers become what is scaled, and its score_shift. All lanes of the warp come here
  /// together.
  __device__ __forceinline__ void make(int row, bool exists, Numbers& x) const {
    if (rows_.turns && p_.rotary > 0 && exists) rotate(row, x);
    if (rows_.score_shift != nullptr) write_shift(row, exists, x);
    if (rows_.off && exists) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float off[kPiece];
        load_numbers(off_, column(i), rows_.dim, rows_.whole, 0.0F, off);
#pragma unroll
        for (int j = 0; j < kPiece; ++j) {
          x[i * kPiece + j] = x[i * kPiece + j] - Exact(off[j]);
        }
      }
    }
    if (!rows_.turns) return;
    if (p_.signs != nullptr) {
#pragma unroll
      for (int i = 0; i < kRowColumns; ++i) x[i] = ptx::with_sign(x[i], negated_ << (31 - i));
    }
    if (p_.hadamard > 1) transform(x);
  }

  __device__ __forceinline__ void store(int row, bool exists, const Numbers& x,
                                        Exact factor) const {
    if (!exists) return;
    char* const to = static_cast<char*>(rows_.to) + at_.offset(rows_.to_strides, rows_.queries) +
                     row * rows_.to_strides.seqlen;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      Exact y[kPiece];
#pragma unroll
      for (int j = 0; j < kPiece; j += 4) {
        const int c = i * kPiece + j;
        float4 factors = {factor.x, factor.x, factor.x, factor.x};
        if (by_channel()) factors = shared_.kept[0][c / 4][threadIdx.x];
        y[j] = x[c] * Exact(factors.x);
        y[j + 1] = x[c + 1] * Exact(factors.y);
        y[j + 2] = x[c + 2] * Exact(factors.z);
        y[j + 3] = x[c + 3] * Exact(factors.w);
      }
      const std::uint32_t low = narrow_four(rows_.dtype, y[0], y[1], y[2], y[3]);
      const std::uint32_t high = narrow_four(rows_.dtype, y[4], y[5], y[6], y[7]);
      if (rows_.whole) {
        if (column(i) < rows_.dim) *reinterpret_cast<Eight*>(to + column(i)) = Eight{low, high};
        continue;
      }
#pragma unroll
      for (int j = 0; j < kPiece; ++j) {
        const std::uint32_t word = j < 4 ? low : high;
        if (column(i) + j < rows_.dim) to[column(i) + j] = static_cast<char>(word >> j % 4 * 8);
      }
    }
  }

 private:
  __device__ __forceinline__ bool by_channel() const { return rows_.scales.by == Scaling::channel; }
  /// What columns from `first` on are multiplied by, where nothing is kept.
  __device__ __forceinline__ void save(int first, const float (&scales)[kPiece]) const {
    const Exact one(1.0F);
#pragma unroll
    for (int i = 0; i < kPiece; i += 4) {
      shared_.kept[0][(first + i) / 4][threadIdx.x] = {
          (one / Exact(scales[i])).x, (one / Exact(scales[i + 1])).x,
          (one / Exact(scales[i + 2])).x, (one / Exact(scales[i + 3])).x};
    }
  }
  __device__ __forceinline__ const char* row_at(int row) const {
    return from_ + row * rows_.from.strides.seqlen * RawPiece<kType>::kSize;
  }
  __device__ __forceinline__ int column(int piece) const {
    return first_ + piece * rows_.lanes * kPiece;
  }

  __device__ __forceinline__ void rotate(int row, Numbers& x) const {
    const std::int64_t position =
        rows_.queries ? p_.places.of_query(at_.sequence, row) : p_.places.of_key(at_.sequence, row);
    if (position < 0 || position >= p_.positions) return;
    const Turns turns = {position * p_.stride_cos, position * p_.stride_sin};
    if (p_.interleaved) {
      rotate_neighbours(turns, x);
    } else if (rows_.whole && p_.rotary == 2 * rows_.lanes * kPiece) {
      rotate_own(turns, x);
    } else {
      rotate_halves(turns, row_at(row), x);
    }
  }
  /// A position's place in the tables.
  struct Turns {
    std::int64_t cos, sin;
  };
  /// Four neighbours of both tables, of which `exist` are there; whole: all of them.
  __device__ __forceinline__ void load_turns(const Turns& turns, int pair, int exist,
                                             float (&cos)[4], float (&sin)[4]) const {
    if (rows_.whole) {
      load_table<4>(p_.cos, p_.table_dtype, turns.cos + pair, cos);
      load_table<4>(p_.sin, p_.table_dtype, turns.sin + pair, sin);
      return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      cos[i] = sin[i] = 0.0F;
      if (i >= exist) continue;
      load_table<1>(p_.cos, p_.table_dtype, turns.cos + pair + i, cos + i);
      load_table<1>(p_.sin, p_.table_dtype, turns.sin + pair + i, sin + i);
    }
  }
  static __device__ __forceinline__ void turn(float cos, float sin, Exact& a, Exact& b) {
    const Exact turned = core::rotated_x(a, b, Exact(cos), Exact(sin));
    b = core::rotated_y(a, b, Exact(cos), Exact(sin));
    a = turned;
  }

  __device__ __forceinline__ void rotate_neighbours(const Turns& turns, Numbers& x) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int pairs = (p_.rotary - column(i)) / 2;
      if (pairs <= 0) continue;
      float cos[4], sin[4];
      load_turns(turns, column(i) / 2, pairs, cos, sin);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (j < pairs) turn(cos[j], sin[j], x[i * kPiece + 2 * j], x[i * kPiece + 2 * j + 1]);
      }
    }
  }
  /// Where the second columns of pairs are the thread's second piece.
  __device__ __forceinline__ void rotate_own(const Turns& turns, Numbers& x) const {
#pragma unroll
    for (int j = 0; j < kPiece; j += 4) {
      float cos[4], sin[4];
      load_turns(turns, first_ + j, 4, cos, sin);
#pragma unroll
      for (int i = 0; i < 4; ++i) turn(cos[i], sin[i], x[j + i], x[kPiece + j + i]);
    }
  }
  /// Where they are anywhere: they are loaded, too.
  __device__ __forceinline__ void rotate_halves(const Turns& turns, const char* from,
                                                Numbers& x) const {
    const int half = p_.rotary / 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int j = 0; j < kPiece; j += 4) {
        const int c = column(i) + j;
        if (c >= p_.rotary) continue;
        // Columns of both halves may be neighbours, unless rows are whole.
        const int pair = c >= half ? c - half : c;
        RawPiece<kType> firsts, seconds;
        firsts.load_four(from, c - half, half, rows_.whole);
        seconds.load_four(from, c + half, p_.rotary, rows_.whole);
        float cos[4], sin[4];
        if (rows_.whole) load_turns(turns, pair, 4, cos, sin);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          if (c + k >= p_.rotary) continue;
          const bool second = c + k >= half;
          if (!rows_.whole) {
            const int mine = second ? c + k - half : c + k;
            load_table<1>(p_.cos, p_.table_dtype, turns.cos + mine, cos + k);
            load_table<1>(p_.sin, p_.table_dtype, turns.sin + mine, sin + k);
          }
          Exact& mine = x[i * kPiece + j + k];
          mine = second ? core::rotated_y(firsts.at(k), mine, Exact(cos[k]), Exact(sin[k]))
                        : core::rotated_x(mine, seconds.at(k), Exact(cos[k]), Exact(sin[k]));
        }
      }
    }
  }

  __device__ __forceinline__ void write_shift(int row, bool exists, const Numbers& x) const {
    float sum[1] = {0.0F};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float mean[kPiece];
      load_numbers(off_, column(i), rows_.dim, rows_.whole, 0.0F, mean);
#pragma unroll
      for (int j = 0; j < kPiece; ++j) sum[0] += x[i * kPiece + j].x * mean[j];
    }
    for (int lanes = 1; lanes < rows_.lanes; lanes *= 2) {
      float other[1];
      ptx::exchange(sum, lanes, other);
      sum[0] += other[0];
    }
    if (first_ != 0 || !exists) return;
    const float* const first = rows_.shift.of(at_.sequence, at_.head);
    rows_.score_shift[first - rows_.shift.data + row] = sum[0];
  }

  /// Stages of stride 1, 2, 4 and so on.
  __device__ __forceinline__ void transform(Numbers& x) const {
    const int n = p_.hadamard, apart = rows_.lanes * kPiece;
#pragma unroll
    for (int stride = 1; stride < kPiece; stride *= 2) {
      if (stride < n) butterflies(x, stride);
    }
    for (int stride = kPiece; stride < n && stride < apart; stride *= 2) {
      Numbers other;
      ptx::exchange(x, stride / kPiece, other);
      // a + b and a - b: the second lane's own number is b.
      const Exact sign((first_ & stride) != 0 ? -1.0F : 1.0F);
#pragma unroll
      for (int i = 0; i < kRowColumns; ++i) x[i] = fused(x[i], sign, other[i]);
    }
    if (n > apart) butterflies(x, kPiece);
    const Exact factor(core::hadamard_factor(n));
#pragma unroll
    for (int i = 0; i < kRowColumns; ++i) x[i] = x[i] * factor;
  }
  static __device__ __forceinline__ void butterflies(Numbers& x, int stride) {
#pragma unroll
    for (int i = 0; i < kRowColumns; ++i) {
      if ((i & stride) != 0) continue;
      const Exact a = x[i], b = x[i + stride];
      x[i] = a + b;
      x[i + stride] = a - b;
    }
  }

  const QuantizeParams& p_;
  const QuantizedRows& rows_;
  const HeadAt& at_;
  int first_;
  const char* from_;
  QuantizeShared& shared_;
  const float* off_;           ///< of columns: subtracted, or what score_shift is the product with
  std::uint32_t negated_ = 0;  ///< a bit for each of the columns
};

__device__ __forceinline__ Exact most_of(Exact most, const Exact (&x)[kRowColumns]) {
#pragma unroll
  for (int i = 0; i < kRowColumns; ++i) most = ptx::larger_magnitude(most, x[i]);
  return most;
}

/// Rows of a block of threads that stay rows.
template <Dtype kType>
__device__ __forceinline__ void quantize_rows(const QuantizeParams& p, const QuantizedRows& rows,
                                              const core::RowRange& range, int head,
                                              QuantizeShared& shared) {
  const int thread = static_cast<int>(threadIdx.x), lane = thread & (rows.lanes - 1);
  const int group = thread / rows.lanes, member = group & (rows.side - 1);
  const int step = kQuantizeThreads / rows.lanes / rows.side,
            begin = range.begin + group / rows.side;
  const int steps = core::ceil_div(range.end - range.begin, step);
  const HeadAt at = {p.sequences.at(range.batch), head + member};
  const QuantizedColumns<kType> columns(p, rows, at, lane, shared);
  const float* const scale = at.scale(rows);
  const float limit = core::limit_of(rows.dtype);
  const bool together = rows.scales.by == Scaling::block, each = rows.scales.by == Scaling::token;
  const bool kept = steps <= kKeptSteps;

  Exact factor(1.0F), most(0.0F);
  if (!together && !each && rows.scales.by != Scaling::channel) {
    factor = Exact(1.0F) / Exact(*scale);
  }
  Exact x[kRowColumns] = {}, before[kRowColumns] = {};
  typename QuantizedColumns<kType>::Raw raw = {};
  const auto row_of = [&](int i) { return begin + i * step; };
  // Twice where a scale is shared: the second time with the scale.
#pragma unroll 1
  for (int pass = together ? 0 : 1; pass < 2; ++pass) {
    const bool writes = pass == 1, reads = !(writes && together && kept);
    if (reads) columns.load(row_of(0), row_of(0) < range.end, raw);
#pragma unroll 1
    for (int i = 0; i < steps; ++i) {
      const int row = row_of(i);
      const bool exists = row < range.end;
      if (reads) {
        columns.widen(raw, x);
        // On its way while this one is made.
        columns.load(row + step, i + 1 < steps && row + step < range.end, raw);
        columns.make(row, exists, x);
      }
      if (!writes) {
        most = most_of(most, x);
        if (!kept) continue;
        // The last step's numbers stay in x, those of the one before it in `before`.
        if (i + 2 < steps) {
#pragma unroll
          for (int j = 0; j < kRowColumns / 4; ++j) {
            shared.kept[i][j][thread] =
                float4{x[4 * j].x, x[4 * j + 1].x, x[4 * j + 2].x, x[4 * j + 3].x};
          }
        } else if (i + 1 < steps) {
#pragma unroll
          for (int j = 0; j < kRowColumns; ++j) before[j] = x[j];
        }
        continue;
      }
      if (each) {
        const Written scaled = Written::of(largest(most_of(Exact(0.0F), x), rows.lanes), limit);
        factor = scaled.factor;
        if (lane == 0 && exists) rows.written[scale - rows.scales.data + row] = scaled.scale.x;
      }
      if (reads) {
        columns.store(row, exists, x, factor);
        continue;
      }
      // Kept: from the last one on.
      const int last = steps - 1 - i;
      if (i == 1) {
#pragma unroll
        for (int j = 0; j < kRowColumns; ++j) x[j] = before[j];
      } else if (i > 1) {
#pragma unroll
        for (int j = 0; j < kRowColumns / 4; ++j) {
          const float4 four = shared.kept[last][j][thread];
          x[4 * j] = Exact(four.x);
          x[4 * j + 1] = Exact(four.y);
          x[4 * j + 2] = Exact(four.z);
          x[4 * j + 3] = Exact(four.w);
        }
      }
      columns.store(row_of(last), row_of(last) < range.end, x, factor);
    }
    if (writes) return;
    // A word of a warp's first thread has its largest number meanwhile.
    float* const word = &shared.kept[kKeptSteps - 3][kRowColumns / 4 - 1][0].x;
    const float mine = word[thread * 4];
    most = largest_of_block(most, word, 32 * 4);
    word[thread * 4] = mine;
    const Written scaled = Written::of(most, limit);
    factor = scaled.factor;
    if (thread == 0) {
      rows.written[scale - rows.scales.data + rows.scales.index_of(range.begin)] = scaled.scale.x;
    }
  }
}

}  // namespace tessera::cuda::aux
