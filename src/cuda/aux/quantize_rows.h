// Rows that are quantised and stay rows, on any GPU. Some lanes share a row, each with two pieces
// of 16 neighbouring columns, half of the lanes' columns apart. Pairs of a rotation by halves, and
// the first four and the last stage of a Hadamard transform, then lie in one thread; the stages
// between are exchanges of lanes. Rows that share a scale are one block's alone, which keeps their
// numbers until it is known. Rows that are not direct (quantize_params.h) take another way in.
#pragma once

#include "cuda/aux/quantize_numbers.h"
#include "cuda/aux/tables.h"

namespace tessera::cuda::aux {

/// A thread's columns of the rows of one head. kUsual: as QuantizeParams::usual() has it.
template <Dtype kType, bool kUsual>
class QuantizedColumns {
 public:
  static constexpr int kSize = static_cast<int>(size_of(kType));
  using Pieces = Raw<kType, kPiece>[2];

  __device__ __forceinline__ QuantizedColumns(const QuantizeParams& p, int which, const HeadAt& at,
                                              int lane, QuantizeShared& shared)
      : p_(p), which_(which), at_(at), shared_(shared) {
    const QuantizedRows& rows = rows_();
    first_ = lane * kPiece;
    from_ = static_cast<const char*>(rows.from.data) +
            at.offset(rows.from.strides, rows.queries) * kSize;
    off_ = at.columns(rows.queries ? rows.dot : rows.off, rows);
    const float* const by_column = by_channel() ? at.scale(rows) : rows.turns ? p.signs : nullptr;
    if (by_column == nullptr) return;
#pragma unroll 1
    for (int four = 0; four < kThreadColumns / 4; ++four) {
      float y[4];
      load_numbers(by_column, column_of(four), rows.dim, whole(), 1.0F, y);
      if (by_channel()) {
        const Exact one(1.0F);
        shared_.kept[kFactors][four][threadIdx.x] = {(one / Exact(y[0])).x, (one / Exact(y[1])).x,
                                                     (one / Exact(y[2])).x, (one / Exact(y[3])).x};
        continue;
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) negated_ |= __float_as_uint(y[i]) >> 31 << (4 * four + i);
    }
  }

  /// Where rows are direct. All of a row that is there.
  __device__ __forceinline__ void load(int row, bool exists, Pieces& raw) const {
    const char* const from = row_at(row);
#pragma unroll
    for (int i = 0; i < 2; ++i) raw[i].load(from, column(i), exists ? rows_().dim : 0, true);
  }
  static __device__ __forceinline__ void widen(const Pieces& raw, Numbers& x) {
#pragma unroll
    for (int i = 0; i < kThreadColumns; ++i) x[i] = raw[i / kPiece].at(i % kPiece);
  }

  /// Of a row that is direct: its numbers are rotated, and what is subtracted is; score_shift is
  /// written. All lanes of the warp come here together.
  __device__ __forceinline__ void make(int row, bool exists, Numbers& x) const {
    const Turns turns = turns_of(row, exists);
    if (turns.there && p_.interleaved) rotate_neighbours(turns, x);
    if (turns.there && !p_.interleaved) rotate_own(turns, x);
    if (off_ == nullptr || !exists) {
      write_shift(row, exists, 0.0F);
      return;
    }
    float sum = 0.0F;
#pragma unroll
    for (int i = 0; i < kThreadColumns; i += 4) {
      float off[4];
      load_numbers(off_, column_of(i / 4), rows_().dim, true, 0.0F, off);
#pragma unroll
      for (int j = 0; j < 4; ++j) take_off(off[j], x[i + j], sum);
    }
    write_shift(row, exists, sum);
  }

  /// The same of any row, four columns at a time: slow, but little code.
  __device__ __forceinline__ void make_by_four(int row, bool exists, Numbers& x) const {
    const Turns turns = turns_of(row, exists);
    float sum = 0.0F;
#pragma unroll 1
    for (int four = 0; four < kThreadColumns / 4; ++four) {
      const int column = column_of(four);
      Raw<kType, 4> raw;
      raw.load_four(row_at(row), column, exists ? rows_().dim : 0, whole());
      Exact y[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) y[i] = raw.at(i);
      if (turns.there && column < p_.rotary) rotate_four(turns, row_at(row), column, y);
      if (off_ != nullptr && exists) {
        float off[4];
        load_numbers(off_, column, rows_().dim, whole(), 0.0F, off);
#pragma unroll
        for (int i = 0; i < 4; ++i) take_off(off[i], y[i], sum);
      }
      shared_.kept[kMade][four][threadIdx.x] = {y[0].x, y[1].x, y[2].x, y[3].x};
    }
    take(kMade, x);
    write_shift(row, exists, sum);
  }

  /// Signs and transform, the last steps of q and k. All lanes of the warp come here together.
  __device__ __forceinline__ void finish(Numbers& x) const {
    if (!rows_().turns) return;
    if (p_.signs != nullptr) {
#pragma unroll
      for (int i = 0; i < kThreadColumns; ++i) x[i] = ptx::with_sign(x[i], negated_ << (31 - i));
    }
    if (p_.hadamard > 1) transform(x, p_.hadamard, rows_().lanes, first_);
  }

  /// The thread's own numbers of a step, into shared memory and back.
  /// @{
  __device__ __forceinline__ void keep(int step, const Numbers& x) const {
#pragma unroll
    for (int i = 0; i < kThreadColumns; i += 4) {
      shared_.kept[step][i / 4][threadIdx.x] = {x[i].x, x[i + 1].x, x[i + 2].x, x[i + 3].x};
    }
  }
  __device__ __forceinline__ void take(int step, Numbers& x) const {
#pragma unroll
    for (int i = 0; i < kThreadColumns; i += 4) {
      const float4 four = shared_.kept[step][i / 4][threadIdx.x];
      x[i] = Exact(four.x);
      x[i + 1] = Exact(four.y);
      x[i + 2] = Exact(four.z);
      x[i + 3] = Exact(four.w);
    }
  }
  /// @}

  __device__ __forceinline__ void store(int row, bool exists, const Numbers& x,
                                        Exact factor) const {
    if (!exists) return;
    char* const to = static_cast<char*>(rows_().to) +
                     at_.offset(rows_().to_strides, rows_().queries) +
                     row * rows_().to_strides.seqlen;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      Exact y[kPiece];
#pragma unroll
      for (int j = 0; j < kPiece; j += 4) {
        const int c = i * kPiece + j;
        float4 factors = {factor.x, factor.x, factor.x, factor.x};
        if (by_channel()) factors = shared_.kept[kFactors][c / 4][threadIdx.x];
        y[j] = x[c] * Exact(factors.x);
        y[j + 1] = x[c + 1] * Exact(factors.y);
        y[j + 2] = x[c + 2] * Exact(factors.z);
        y[j + 3] = x[c + 3] * Exact(factors.w);
      }
      std::uint32_t words[kPiece / 4];
#pragma unroll
      for (int j = 0; j < kPiece; j += 4) {
        words[j / 4] = narrow_four(dtype(), y[j], y[j + 1], y[j + 2], y[j + 3]);
      }
      store_piece(to + column(i), rows_().dim - column(i), words);
    }
  }

  /// What is known of the tensor is looked up anew: all of it in registers would be too much.
  __device__ __forceinline__ void forget() {
    which_ = static_cast<int>(ptx::opaque(static_cast<std::uint32_t>(which_)));
  }

 private:
  __device__ __forceinline__ const QuantizedRows& rows_() const { return p_.rows[which_]; }
  /// What is known where all is as usual.
  /// @{
  __device__ __forceinline__ bool whole() const { return kUsual || rows_().whole; }
  __device__ __forceinline__ bool whole_pieces() const { return kUsual || rows_().whole_pieces; }
  __device__ __forceinline__ Dtype dtype() const { return kUsual ? Dtype::e4m3 : rows_().dtype; }
  /// @}

  /// Of QuantizeShared::kept, where no numbers are kept.
  static constexpr int kFactors = 0, kMade = 1;

  /// The elements of a piece, of which `exist` are there.
  __device__ __forceinline__ void store_piece(char* to, int exist,
                                              const std::uint32_t (&words)[kPiece / 4]) const {
    if (exist <= 0) return;
    if (whole_pieces()) {
      *reinterpret_cast<uint4*>(to) = uint4{words[0], words[1], words[2], words[3]};
      return;
    }
    if (whole()) {
      *reinterpret_cast<Eight*>(to) = Eight{words[0], words[1]};
      if (exist > kUnit) *reinterpret_cast<Eight*>(to + kUnit) = Eight{words[2], words[3]};
      return;
    }
#pragma unroll 1
    for (int i = 0; i < core::min(exist, kPiece); ++i) {
      const std::uint32_t word =
          i < 8 ? (i < 4 ? words[0] : words[1]) : (i < 12 ? words[2] : words[3]);
      to[i] = static_cast<char>(word >> i % 4 * 8);
    }
  }
  __device__ __forceinline__ bool by_channel() const {
    return !kUsual && rows_().scales.by == Scaling::channel;
  }
  __device__ __forceinline__ const char* row_at(int row) const {
    return from_ + row * rows_().from.strides.seqlen * kSize;
  }
  __device__ __forceinline__ int column(int piece) const {
    return first_ + piece * rows_().lanes * kPiece;
  }

  /// Of the thread's columns 4 four and the next three.
  __device__ __forceinline__ int column_of(int four) const {
    return column(four / (kPiece / 4)) + four % (kPiece / 4) * 4;
  }

  /// A position's place in the tables.
  struct Turns {
    bool there;
    std::int64_t cos, sin;
  };
  __device__ __forceinline__ Turns turns_of(int row, bool exists) const {
    if (!rows_().turns || p_.rotary == 0 || !exists) return {};
    const std::int64_t position = rows_().queries ? p_.places.of_query(at_.sequence, row)
                                                  : p_.places.of_key(at_.sequence, row);
    return {position >= 0 && position < p_.positions, position * p_.stride_cos,
            position * p_.stride_sin};
  }
  __device__ __forceinline__ void load_turns(const Turns& turns, int pair, float (&cos)[4],
                                             float (&sin)[4]) const {
    load_table<4>(p_.cos, p_.table_dtype, turns.cos + pair, cos);
    load_table<4>(p_.sin, p_.table_dtype, turns.sin + pair, sin);
  }
  static __device__ __forceinline__ void turn(float cos, float sin, Exact& a, Exact& b) {
    const Exact turned = core::rotated_x(a, b, Exact(cos), Exact(sin));
    b = core::rotated_y(a, b, Exact(cos), Exact(sin));
    a = turned;
  }

  __device__ __forceinline__ void rotate_neighbours(const Turns& turns, Numbers& x) const {
#pragma unroll
    for (int i = 0; i < kThreadColumns; i += kUnit) {
      const int first = column_of(i / 4);
      if (first >= p_.rotary) continue;
      float cos[4], sin[4];
      load_turns(turns, first / 2, cos, sin);
#pragma unroll
      for (int j = 0; j < 4; ++j) turn(cos[j], sin[j], x[i + 2 * j], x[i + 2 * j + 1]);
    }
  }
  /// Where the second columns of pairs are the thread's second piece.
  __device__ __forceinline__ void rotate_own(const Turns& turns, Numbers& x) const {
#pragma unroll
    for (int j = 0; j < kPiece; j += 4) {
      float cos[4], sin[4];
      load_turns(turns, first_ + j, cos, sin);
#pragma unroll
      for (int i = 0; i < 4; ++i) turn(cos[i], sin[i], x[j + i], x[kPiece + j + i]);
    }
  }
  /// Any columns: what they are pairs with is loaded, too.
  __device__ __forceinline__ void rotate_four(const Turns& turns, const char* from, int column,
                                              Exact (&x)[4]) const {
    const int half = p_.rotary / 2;
    Raw<kType, 4> before = {}, behind = {};
    if (!p_.interleaved) {
      before.load_four(from, column - half, half, whole());
      behind.load_four(from, column + half, p_.rotary, whole());
    }
    Exact y[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      y[i] = x[i];
      const int c = column + i;
      if (c >= p_.rotary) continue;
      const bool second = p_.interleaved ? i % 2 != 0 : c >= half;
      const int pair = p_.interleaved ? c / 2 : second ? c - half : c;
      float cos, sin;
      load_table<1>(p_.cos, p_.table_dtype, turns.cos + pair, &cos);
      load_table<1>(p_.sin, p_.table_dtype, turns.sin + pair, &sin);
      const Exact other = p_.interleaved ? x[i ^ 1] : second ? before.at(i) : behind.at(i);
      y[i] = second ? core::rotated_y(other, x[i], Exact(cos), Exact(sin))
                    : core::rotated_x(x[i], other, Exact(cos), Exact(sin));
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = y[i];
  }

  /// A column's number of k_mean or v_shift is subtracted, or enters a query's score_shift.
  __device__ __forceinline__ void take_off(float off, Exact& x, float& sum) const {
    if (rows_().queries) {
      sum += x.x * off;
    } else {
      x = x - Exact(off);
    }
  }
  __device__ __forceinline__ void write_shift(int row, bool exists, float mine) const {
    if (rows_().score_shift == nullptr) return;
    float sum[1] = {mine};
    for (int lanes = 1; lanes < rows_().lanes; lanes *= 2) {
      float other[1];
      ptx::exchange(sum, lanes, other);
      sum[0] += other[0];
    }
    if (first_ != 0 || !exists) return;
    const float* const first = rows_().shift.of(at_.sequence, at_.head);
    rows_().score_shift[first - rows_().shift.data + row] = sum[0];
  }

  const QuantizeParams& p_;
  int which_;
  const HeadAt& at_;
  int first_;
  const char* from_;
  QuantizeShared& shared_;
  const float* off_;           ///< of columns: subtracted, or what score_shift is the product with
  std::uint32_t negated_ = 0;  ///< a bit for each of the columns
};

/// Rows of a block of threads that stay rows.
template <Dtype kType, bool kUsual>
__device__ __forceinline__ void quantize_rows(const QuantizeParams& p, int which,
                                              const core::RowRange& range, int head,
                                              QuantizeShared& shared) {
  const QuantizedRows& rows = p.rows[which];
  const int thread = static_cast<int>(threadIdx.x), lane = thread & (rows.lanes - 1);
  const int group = thread / rows.lanes, member = group & (rows.side - 1);
  const int step = kQuantizeThreads / rows.lanes / rows.side,
            begin = range.begin + group / rows.side;
  const int steps = core::ceil_div(range.end - range.begin, step);
  const HeadAt at = {p.sequences.at(range.batch), head + member};
  QuantizedColumns<kType, kUsual> columns(p, which, at, lane, shared);
  const float* const scale = at.scale(rows);
  const float limit = core::limit_of(rows.dtype);
  const bool together = rows.scales.by == Scaling::block, each = rows.scales.by == Scaling::token;
  const bool direct = kUsual || rows.direct;
  const bool kept = steps <= kKeptSteps && direct;

  Exact factor(1.0F), most(0.0F);
  if (!together && !each && (kUsual || rows.scales.by != Scaling::channel)) {
    factor = Exact(1.0F) / Exact(*scale);
  }
  Exact x[kThreadColumns] = {};
  typename QuantizedColumns<kType, kUsual>::Pieces raw = {};
  const auto row_of = [&](int i) { return begin + i * step; };
  // Twice where a scale is shared: the second time with the scale.
#pragma unroll 1
  for (int pass = together ? 0 : 1; pass < 2; ++pass) {
    const bool writes = pass == 1, reads = !(writes && together && kept);
    if (reads && direct) columns.load(row_of(0), row_of(0) < range.end, raw);
#pragma unroll 1
    for (int i = 0; i < steps; ++i) {
      columns.forget();
      const int row = row_of(i);
      const bool exists = row < range.end;
      if (reads) {
        if (direct) {
          columns.widen(raw, x);
          // On its way while this one is made.
          columns.load(row + step, i + 1 < steps && row + step < range.end, raw);
          columns.make(row, exists, x);
        } else {
          columns.make_by_four(row, exists, x);
        }
        columns.finish(x);
      }
      if (!writes) {
        most = most_of(most, x);
        // The last step's numbers stay in x.
        if (kept && i + 1 < steps) columns.keep(i, x);
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
      if (i > 0) columns.take(last, x);
      columns.store(row_of(last), row_of(last) < range.end, x, factor);
    }
    if (writes) return;
    // A word of a warp's first thread has its largest number meanwhile.
    float* const word = &shared.kept[kKeptSteps - 2][kThreadColumns / 4 - 1][0].x;
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
