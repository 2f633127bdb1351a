// Rows that are quantised and stay rows, where little is to be done (QuantizeParams::plain()): they
// come in 16 bits and in whole pieces, have signs and are transformed, or are just multiplied.
// Those are kept as they came until their factor is known, and compared in pairs.
#pragma once

#include "cuda/aux/quantize_numbers.h"

namespace tessera::cuda::aux {

/// A thread's columns of the rows of one head, as quantize_numbers.h has them.
template <Dtype kType>
class PlainColumns {
 public:
  using Pieces = Raw<kType, kPiece>[2];

  __device__ __forceinline__ PlainColumns(const QuantizedRows& rows, const HeadAt& at, int lane)
      : first_(lane * kPiece),
        lanes_(rows.lanes),
        dim_(rows.dim),
        from_(static_cast<const char*>(rows.from.data) +
              (at.offset(rows.from.strides, rows.queries) + first_) * kSize),
        to_(static_cast<char*>(rows.to) + at.offset(rows.to_strides, rows.queries) + first_),
        from_row_(rows.from.strides.seqlen * kSize),
        to_row_(rows.to_strides.seqlen) {}

  __device__ __forceinline__ void load(int row, bool exists, Pieces& raw) const {
    const char* const from = from_ + row * from_row_;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int j = 0; j < Raw<kType, kPiece>::kUnits; ++j) {
        raw[i].units[j] = uint4{0, 0, 0, 0};
        if (exists && is_there(i)) {
          raw[i].units[j] = reinterpret_cast<const uint4*>(from + i * apart() * kSize)[j];
        }
      }
    }
  }
  /// element(i): what the i-th column becomes, as a number.
  template <class Element>
  __device__ __forceinline__ void store(int row, bool exists, const Element& element) const {
    char* const to = to_ + row * to_row_;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      std::uint32_t words[kPiece / 4];
#pragma unroll
      for (int j = 0; j < kPiece; j += 4) {
        const int c = i * kPiece + j;
        words[j / 4] =
            narrow_four(Dtype::e4m3, element(c), element(c + 1), element(c + 2), element(c + 3));
      }
      if (!exists || !is_there(i)) continue;
      *reinterpret_cast<uint4*>(to + i * apart()) = uint4{words[0], words[1], words[2], words[3]};
    }
  }

  /// Whether signs turn the columns 2 i and 2 i + 1: bits 15 - i and 31 - i.
  __device__ __forceinline__ std::uint32_t negated(const float* signs) const {
    std::uint32_t bits = 0;
    if (signs == nullptr) return bits;
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
      for (int j = 0; is_there(i) && j < kPiece; j += 2) {
        const int pair = (i * kPiece + j) / 2, column = first_ + i * apart() + j;
        bits |= __float_as_uint(signs[column]) >> 31 << (15 - pair) |
                __float_as_uint(signs[column + 1]) >> 31 << (31 - pair);
      }
    }
    return bits;
  }
  /// Signs and transform. All lanes of the warp come here together.
  __device__ __forceinline__ void turn(const Pieces& raw, std::uint32_t negated, int hadamard,
                                       Numbers& x) const {
#pragma unroll
    for (int i = 0; i < kThreadColumns / 2; ++i) {
      const std::uint32_t pair =
          raw[i / (kPiece / 2)].pair(i % (kPiece / 2)) ^ (negated << i & 0x80008000U);
      x[2 * i] = Exact(ptx::widen<kType>(static_cast<std::uint16_t>(pair)));
      x[2 * i + 1] = Exact(ptx::widen<kType>(static_cast<std::uint16_t>(pair >> 16)));
    }
    if (hadamard > 1) transform(x, hadamard, lanes_, first_);
  }

 private:
  static constexpr int kSize = static_cast<int>(size_of(kType));

  __device__ __forceinline__ int apart() const { return lanes_ * kPiece; }
  __device__ __forceinline__ bool is_there(int piece) const {
    return first_ + piece * apart() < dim_;
  }

  int first_, lanes_, dim_;
  const char* from_;
  char* to_;
  std::int64_t from_row_, to_row_;  ///< bytes from a row to the next
};

/// The largest magnitude, or `most`.
template <Dtype kType>
__device__ __forceinline__ Exact most_of(Exact most, const Raw<kType, kPiece> (&raw)[2]) {
  std::uint32_t pair = 0;
#pragma unroll
  for (int i = 0; i < kThreadColumns / 2; ++i) {
    pair = ptx::larger_magnitudes<kType>(pair, raw[i / (kPiece / 2)].pair(i % (kPiece / 2)));
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const auto bits = static_cast<std::uint16_t>(pair >> 16 * half);
    most = ptx::larger_magnitude(most, Exact(ptx::widen<kType>(bits)));
  }
  return most;
}

/// Steps of which a block of threads keeps what came, or numbers, until their scale is known; but
/// for the last.
union PlainKept {
  static constexpr int kPieces = kKeptSteps, kNumbers = 3;
  uint4 units[kPieces - 1][kThreadColumns / 8][kQuantizeThreads];
  float4 numbers[kNumbers - 1][kThreadColumns / 4][kQuantizeThreads];

  template <Dtype kType>
  __device__ __forceinline__ void keep(int step, const Raw<kType, kPiece> (&raw)[2]) {
#pragma unroll
    for (int i = 0; i < kThreadColumns / 8; ++i) {
      units[step][i][threadIdx.x] = raw[i / 2].units[i % 2];
    }
  }
  template <Dtype kType>
  __device__ __forceinline__ void take(int step, Raw<kType, kPiece> (&raw)[2]) const {
#pragma unroll
    for (int i = 0; i < kThreadColumns / 8; ++i) {
      raw[i / 2].units[i % 2] = units[step][i][threadIdx.x];
    }
  }
  __device__ __forceinline__ void keep(int step, const Numbers& x) {
#pragma unroll
    for (int i = 0; i < kThreadColumns; i += 4) {
      numbers[step][i / 4][threadIdx.x] = {x[i].x, x[i + 1].x, x[i + 2].x, x[i + 3].x};
    }
  }
  __device__ __forceinline__ void take(int step, Numbers& x) const {
#pragma unroll
    for (int i = 0; i < kThreadColumns; i += 4) {
      const float4 four = numbers[step][i / 4][threadIdx.x];
      x[i] = Exact(four.x);
      x[i + 1] = Exact(four.y);
      x[i + 2] = Exact(four.z);
      x[i + 3] = Exact(four.w);
    }
  }
};

union PlainShared {
  PlainKept kept;
  TileShared tile;
};

/// Rows of a block of threads that stay rows. kTurned: they have signs or are transformed.
template <Dtype kType, bool kTurned>
class PlainRows {
  using Columns = PlainColumns<kType>;
  using Pieces = typename Columns::Pieces;
  /// What is kept of a step.
  template <bool, class Same, class Turned>
  struct Either {
    using Type = Same;
  };
  template <class Same, class Turned>
  struct Either<true, Same, Turned> {
    using Type = Turned;
  };
  using Made = typename Either<kTurned, Pieces, Numbers>::Type;

 public:
  __device__ __forceinline__ PlainRows(const QuantizeParams& p, int which,
                                       const core::RowRange& range, int head, PlainShared& shared)
      : p_(p),
        rows_(p.rows[which]),
        range_(range),
        shared_(shared),
        lane_(static_cast<int>(threadIdx.x) & (rows_.lanes - 1)),
        group_(static_cast<int>(threadIdx.x) / rows_.lanes),
        at_{p.sequences.at(range.batch), head + (group_ & (rows_.side - 1))},
        columns_(rows_, at_, lane_),
        scale_(at_.scale(rows_)),
        step_(kQuantizeThreads / rows_.lanes / rows_.side),
        begin_(range.begin + group_ / rows_.side),
        steps_(core::ceil_div(range.end - range.begin, step_)),
        negated_(kTurned ? columns_.negated(p.signs) : 0) {}

  __device__ __forceinline__ void write() const {
    if (rows_.scales.by == Scaling::block) {
      write_together();
    } else if (rows_.scales.by == Scaling::token) {
      write_all([this](int row, const Made& x) { return factor_of(row, x); });
    } else {
      const Exact factor = Exact(1.0F) / Exact(*scale_);
      write_all([factor](int /*row*/, const Made& /*x*/) { return factor; });
    }
  }

 private:
  __device__ __forceinline__ int row_of(int i) const { return begin_ + i * step_; }
  __device__ __forceinline__ bool exists(int i) const {
    return i < steps_ && row_of(i) < range_.end;
  }
  __device__ __forceinline__ void load(int i, Pieces& raw) const {
    columns_.load(row_of(i), exists(i), raw);
  }
  __device__ __forceinline__ void make(const Pieces& raw, Made& x) const {
    if constexpr (kTurned) {
      columns_.turn(raw, negated_, p_.hadamard, x);
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) x[i] = raw[i];
    }
  }
  __device__ __forceinline__ void store(int i, const Made& x, Exact factor) const {
    columns_.store(row_of(i), exists(i), [&](int c) {
      if constexpr (kTurned) {
        return x[c] * factor;
      } else {
        return x[c / kPiece].at(c % kPiece) * factor;
      }
    });
  }

  /// Every row times its factor_of(row, x); the next one is on its way meanwhile.
  template <class FactorOf>
  __device__ __forceinline__ void write_all(const FactorOf& factor_of) const {
    Pieces raw;
    load(0, raw);
#pragma unroll 1
    for (int i = 0; i < steps_; ++i) {
      Made x;
      make(raw, x);
      load(i + 1, raw);
      store(i, x, factor_of(row_of(i), x));
    }
  }

  /// Writes a row's own scale.
  __device__ __forceinline__ Exact factor_of(int row, const Made& x) const {
    const Exact most = largest(most_of(Exact(0.0F), x), rows_.lanes);
    const Written scaled = Written::of(most, core::limit_of(Dtype::e4m3));
    if (lane_ == 0 && row < range_.end) {
      rows_.written[scale_ - rows_.scales.data + row] = scaled.scale.x;
    }
    return scaled.factor;
  }

  /// Rows that share a scale. They are kept, or made twice where they are too many.
  __device__ __forceinline__ void write_together() const {
    const bool kept = steps_ <= (kTurned ? PlainKept::kNumbers : PlainKept::kPieces);
    Exact most(0.0F);
    Pieces raw;
    Made x;
#pragma unroll 1
    for (int i = 0; i < steps_; ++i) {
      load(i, raw);
      make(raw, x);
      most = most_of(most, x);
      // The last step's stay where they are.
      if (kept && i + 1 < steps_) shared_.kept.keep(i, x);
    }
    __shared__ float of_warps[kQuantizeThreads / 32];
    most = largest_of_block(most, of_warps, 1);
    const Written scaled = Written::of(most, core::limit_of(Dtype::e4m3));
    if (threadIdx.x == 0) {
      rows_.written[scale_ - rows_.scales.data + rows_.scales.index_of(range_.begin)] =
          scaled.scale.x;
    }
#pragma unroll 1
    for (int i = steps_ - 1; i >= 0; --i) {
      if (kept && i + 1 < steps_) shared_.kept.take(i, x);
      if (!kept && i + 1 < steps_) {
        load(i, raw);
        make(raw, x);
      }
      store(i, x, scaled.factor);
    }
  }

  const QuantizeParams& p_;
  const QuantizedRows& rows_;
  const core::RowRange& range_;
  PlainShared& shared_;
  const int lane_, group_;  ///< group: of the lanes of a row
  const HeadAt at_;
  const Columns columns_;
  const float* const scale_;
  const int step_, begin_, steps_;
  const std::uint32_t negated_;
};

}  // namespace tessera::cuda::aux
