// What becomes of a decoding block's results: its warps' outputs are merged; where the item has no
// other part they are the result. Otherwise parts are merged in a tree (decode_parts.h): a block
// takes in parts of others, and leaves the sum for the one that takes it in. A part lies in words
// of 16 bytes, of which each says by its ticket that it is there: no fence, no word of state that
// would have to be read before.
#pragma once

#include "core/softmax.h"
#include "cuda/mma/decode_parts.h"
#include "cuda/mma/decode_widened.h"
#include "cuda/ptx/barrier.h"
#include "cuda/ptx/math.h"
#include "cuda/ptx/memory.h"
#include "cuda/ptx/mma.h"
#include "cuda/tile/softmax.h"

namespace tessera::cuda::mma {

inline constexpr int kWarpRows = 16;  ///< that a warp multiplies
/// Whether the rows of a piece are more than a warp has: then every warp has rows of its own, and
/// all tiles; else all rows, and tiles of its own.
template <core::Kernel K>
__device__ __forceinline__ constexpr bool spreads_rows(const DecodePiece<K>& piece) {
  return together(K) && piece.rows > kWarpRows;
}

/// What a block's warps tell each other of a piece.
template <core::Kernel K>
struct DecodeExchange {
  /// [rows][swizzled columns], a warp's; its rows are cut into as many parts as they need stages.
  const float* outputs[decode_warps(K)][output_stages(K)];
  core::Softmax<float> state[decode_teams(K)][kWarpRows];
};

template <core::Kernel K>
class DecodeResults {
  static constexpr Dtype kType = core::dtype_of(K.operand);
  static constexpr int kTeams = decode_teams(K), kThreads = decode_threads(K);
  static constexpr int kParts = core::mma_parts(K);  ///< warps of a team
  static constexpr int kWarpColumns = decode_value_columns(K);
  static constexpr int kColumns = 4;  ///< of a row, a thread's at a time
  static constexpr int kWords = 2;    ///< of them
  static constexpr bool kWidens = core::widens(K);
  static constexpr int kPartRows = kWarpRows / output_stages(K);  ///< of a warp's output in a stage
  static constexpr int kAsked = core::PartTree::kOthers;  ///< parts that a thread asks for at once
  static_assert((kThreads & (kThreads - 1)) == 0);

 public:
  /// piece: of this warp; its numbers are all warps'.
  __device__ __forceinline__ DecodeResults(const DecodeParams& params, const DecodeWalk<K>& walk,
                                           const DecodePiece<K>& piece, DecodeExchange<K>& exchange)
      : p(params),
        piece_(piece),
        exchange_(exchange),
        walk_(walk),
        parts_(params, walk, piece),
        count_(piece.rows) {
    // As many threads a row as there are for a power of two of rows.
    const int shift = count_ > 1 ? 32 - __clz(count_ - 1) : 0;
    threads_ = kThreads >> shift;
    thread_ = static_cast<int>(threadIdx.x) & (threads_ - 1);
    row_ = static_cast<int>(threadIdx.x) >> (31 - __clz(threads_));
    const DecodeRow row = row_of<K>(piece, p.group, row_);
    query_ = row.query;
    head_ = piece.head * p.group.value() + row.member;
    spreads_ = spreads_rows<K>(piece);
  }

  /// The warp's output, times `scale`, and state. stage(i): its i-th free stage of the ring.
  template <class Stage>
  __device__ __forceinline__ void leave(const DecodeWeights<K>& w,
                                        const float (&o)[kWarpColumns / 2], float scale,
                                        const Stage& stage) const {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    int lane = static_cast<int>(threadIdx.x) % 32;
    // Before Hopper, and in teams, places of outputs would else be known before the first tile, and
    // take registers.
    if constexpr (K.arch == Arch::sm80 || kParts > 1)
      lane = static_cast<int>(ptx::opaque(static_cast<std::uint32_t>(lane)));
    const int count = count_ - (spreads_ ? warp * kWarpRows : 0);  // rows of the warp
    const int team = warp / kParts;
    const bool states = lane % 4 == 0 && warp % kParts == 0;
#pragma unroll
    for (int i = 0; i < output_stages(K); ++i) {
      if (lane == 0) exchange_.outputs[warp][i] = stage(i);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = w.sum[half];
      sum += __shfl_xor_sync(~0U, sum, 1);
      sum += __shfl_xor_sync(~0U, sum, 2);
      const int row = lane / 4 + 8 * half;
      if (row >= count) continue;
      float* const outputs = stage(half * output_stages(K) / 2);
      if constexpr (kWidens) {
        if (states) exchange_.state[team][row] = {w.reference[half] - kWidenedOffset, sum};
        // Of 16 columns the first 8 accumulators have the even ones, the others the odd ones.
#pragma unroll
        for (int i = 0; i < kWarpColumns / 16; ++i) {
          const float* const x = o + 8 * i + 2 * half;
          *reinterpret_cast<float4*>(outputs + place(row, 16 * i + lane % 4 * 4)) =
              float4{x[0] * scale, x[4] * scale, x[1] * scale, x[5] * scale};
        }
      } else {
        if (states) exchange_.state[team][row] = {w.reference[half], sum};
#pragma unroll
        for (int i = 0; i < kWarpColumns / 8; ++i) {
          *reinterpret_cast<float2*>(outputs + place(row, 8 * i + lane % 4 * 2)) =
              float2{o[4 * i + 2 * half], o[4 * i + 2 * half + 1]};
        }
      }
    }
  }

  /// Of a prefix's piece of which every warp has rows of its own: straight to where blocks that
  /// have its sequences' rows will take them in.
  __device__ __forceinline__ void leave_rows(const DecodeWeights<K>& w,
                                             const float (&o)[K.head_dim_v / 2]) const {
    const int lane = static_cast<int>(threadIdx.x) % 32, part = parts_.part();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      core::Softmax<float> state = {w.reference[half], w.sum[half]};
      state.sum += __shfl_xor_sync(~0U, state.sum, 1);
      state.sum += __shfl_xor_sync(~0U, state.sum, 2);
      const int row = static_cast<int>(threadIdx.x) / 32 * kWarpRows + lane / 4 + 8 * half;
      if (row >= count_) continue;
      const DecodeRow at = row_of<K>(piece_, p.group, row);
      uint4* const to =
          part > 0 ? words_at(parts_.slot(), row, 0)
                   : row_words(piece_.level, at.query, piece_.head * p.group.value() + at.member);
      const float factor = core::inverse_sum(state), lse = core::lse_of(state);
#pragma unroll
      for (int i = 0; i < K.head_dim_v / 8; ++i) {
        const int column = 8 * i + lane % 4 * 2;
        if (column >= p.head_dim_v) continue;
        const float* const x = o + 4 * i + 2 * half;
        store(x[0] * factor, x[1] * factor, lse, to + column / 2);
      }
    }
  }

  /// All warps have left theirs. The result, or what this block's part of it becomes. A thread
  /// meets no other.
  __device__ __forceinline__ void finish() const {
    if (row_ >= count_) return;
    float scale[kTeams];
    core::Softmax<float> merged;
    // One of the teams has the row, or each has some of its keys.
    const auto has = [this](int w) { return !together(K) || !spreads_ || w == row_ / kWarpRows; };
    const int row = row_ % kWarpRows;
#pragma unroll
    for (int w = 0; w < kTeams; ++w) {
      if (has(w)) merged.max = core::max(merged.max, exchange_.state[w][row].max);
    }
#pragma unroll
    for (int w = 0; w < kTeams; ++w) {
      if (!has(w)) continue;
      const core::Softmax<float> state = exchange_.state[w][row];
      scale[w] = ptx::ex2(state.max - core::shift_of(merged.max));
      merged.sum += state.sum * scale[w];
    }
    // A row's sink enters with its first part, and not with a prefix.
    const bool has_sink = p.sink != nullptr && piece_.units.begin == 0 && !is_prefix();
    const core::FinishedRow<float> end =
        core::finish(merged, has_sink, has_sink ? p.sink[head_] : 0.0F);
    const float lse = core::lse_of(end.state);
#pragma unroll
    for (int w = 0; w < kTeams; ++w) {
      if (has(w)) scale[w] *= end.factor;
    }
    const int part = parts_.part(), parts = parts_.count();
#pragma unroll 1
    for (int column = thread_ * kColumns; column < columns_left(); column += threads_ * kColumns) {
      Columns mine = {core::from_lse(lse), {}};
#pragma unroll
      for (int w = 0; w < kTeams; ++w) {
        if (!has(w)) continue;
        const int warp = w * kParts + (kParts > 1 ? column / kWarpColumns : 0);
        const float* const outputs = exchange_.outputs[warp][row / kPartRows];
        add(mine.x, *reinterpret_cast<const float4*>(outputs + place(row, column)), scale[w]);
      }
      if constexpr (K.prefixes) {
        if (is_prefix()) {  // blocks that have its sequences' rows will take it in
          store(mine, lse,
                part > 0 ? words_at(parts_.slot(), column) : row_words(piece_.level, column));
          continue;
        }
      }
      if (parts == 1) {
        give(column, mine, lse);
        continue;
      }
      if (p.parts.by_unit) {
        store(mine, column);
        if (!parts_.merges()) continue;
        mine = {};
      }
#pragma unroll 1
      for (int shift = 0;; shift += core::PartTree::kShift) {
        const OtherParts others = parts_.others(part, parts, shift);
        if (others.count == 0) break;
        take_in(mine, column, others);
      }
      const float factor = core::inverse_sum(mine.state);
#pragma unroll
      for (float& x : mine.x) x *= factor;
      if (part == 0) {
        give(column, mine, core::lse_of(mine.state));
      } else {
        store(mine, column);
      }
    }
  }

  /// Of an item of a sequence's own keys whose first part the block has: its rows with all that
  /// they see of prefixes, too. The block has left what it has of these, and so have, or will,
  /// others that began before it.
  __device__ __forceinline__ void join() const {
    if (row_ >= count_) return;
    const int step = threads_ * kColumns;
#pragma unroll 1
    for (int column = thread_ * kColumns; column < p.head_dim_v; column += 2 * step) {
      Columns mine[2];
      const bool second = column + step < p.head_dim_v;
      if (second) {
        take_in_all(column, [&](int all, const auto& words_from) {
          take_in(mine, all, words_from, step / 2);
        });
      } else {
        take_in_all(column,
                    [&](int all, const auto& words_from) { take_in(mine[0], all, words_from); });
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (i == 1 && !second) break;
        const float factor = core::inverse_sum(mine[i].state);
#pragma unroll
        for (float& x : mine[i].x) x *= factor;
        write(column + i * step, mine[i].x, core::lse_of(mine[i].state));
      }
    }
  }

 private:
  __device__ __forceinline__ bool is_prefix() const {
    if constexpr (K.prefixes) return piece_.prefix != 0;
    return false;
  }

  // ---- parts ----

  /// Some columns of a row, over the sum of its state.
  struct Columns {
    core::Softmax<float> state;
    float x[kColumns] = {};
  };

  /// core::PartWord's bits.
  __device__ __forceinline__ uint4* words_at(int slot, int row, int column) const {
    static_assert(sizeof(core::PartWord) == sizeof(uint4));
    return reinterpret_cast<uint4*>(p.parts.words) +
           (std::int64_t{slot} * K.block_m + row) * (K.head_dim_v / 2) + column / 2;
  }
  __device__ __forceinline__ uint4* words_at(int slot, int column) const {
    return words_at(slot, row_, column);
  }
  /// Of what the row sees of the first part of a prefix of that level, or of its own keys, which
  /// come after them.
  __device__ __forceinline__ uint4* row_words(int level, int query, int head) const {
    const DecodeQuery at = query_of<K>(p, piece_, query);
    const std::int64_t row = p.sequences.row_of(at.sequence, at.query) * p.num_heads + head;
    return reinterpret_cast<uint4*>(p.prefixes.rows) + level * p.prefixes.level_words +
           row * (K.head_dim_v / 2);
  }
  __device__ __forceinline__ uint4* row_words(int level, int column) const {
    return row_words(level, query_, head_) + column / 2;
  }
  /// take(count, words_from): all that was left of some columns of the row.
  template <class Take>
  __device__ __forceinline__ void take_in_all(int column, const Take& take) const {
    const core::Segment innermost = p.prefixes.segments[piece_.parent];
    const OtherWords inner = words_of(innermost);
    // First parts of all prefixes, own keys, and other parts of the innermost prefix.
    uint4* const firsts = row_words(0, column);
    const int levels = piece_.level + 1;
    take(levels + inner.count, [&](int first) {
      return [&, first](int i) {
        const int part = first + i;
        return part < levels ? firsts + part * p.prefixes.level_words
                             : inner.at + (part - levels) * inner.kStep + column / 2;
      };
    });
#pragma unroll 1
    for (int number = innermost.parent; number >= 0;) {
      const core::Segment prefix = p.prefixes.segments[number];
      const OtherWords outer = words_of(prefix);
      take(outer.count, [&](int first) {
        return [&, first](int i) { return outer.at + (first + i) * outer.kStep + column / 2; };
      });
      number = prefix.parent;
    }
  }
  /// What the row sees of a prefix, but of its first part.
  struct OtherWords {
    static constexpr int kStep = K.block_m * K.head_dim_v / 2;  ///< from one part to the next
    uint4* at;
    int count;
  };
  __device__ __forceinline__ OtherWords words_of(const core::Segment& prefix) const {
    const int query = core::query_in(prefix, p.sequences, piece_.sequence, query_);
    const int row = (query - piece_.head) * p.group.value() + head_;
    const core::Spans& spans = walk_.spans();
    const core::SpanItem item = walk_.item_of(prefix, piece_.head, row / K.block_m);
    const int first = spans.span_of(item, 0), last = spans.span_of(item, item.units - 1);
    return {words_at(first + 1, row % K.block_m, 0), last - first};
  }
  /// What the item's rows see of its keys is the result, unless there are prefixes.
  __device__ __forceinline__ void give(int column, const Columns& mine, float lse) const {
    if constexpr (K.prefixes) {
      if (piece_.level > 0) {
        store(mine, lse, row_words(piece_.level, column));
        return;
      }
    }
    write(column, mine.x, lse);
  }

  __device__ __forceinline__ void take_in(Columns& mine, int column, const OtherParts& from) const {
    const std::int64_t step = std::int64_t{K.block_m * K.head_dim_v / 2} << from.shift;
    take_in(mine, words_at(from.slot, column), step, from.count);
  }
  /// Merges parts in their order, as soon as they are there.
  __device__ __forceinline__ void take_in(Columns& mine, uint4* first_at, std::int64_t step,
                                          int all) const {
    take_in(mine, all, [&](int first) {
      uint4* const at = first_at + first * step;
      return [at, step](int i) { return at + i * step; };
    });
  }
  /// words_from(first)(i): where the part `first` + i is.
  template <class From>
  __device__ __forceinline__ void take_in(Columns& mine, int all, const From& words_from) const {
#pragma unroll 1
    for (int first = 0; first < all; first += kAsked) {
      const auto at = words_from(first);
      const int count = all - first;
      uint4 words[kAsked][kWords];
      while (!ask(words, count, at)) {
      }
      take(mine, words, count, at);
    }
  }
  /// The same of two at once, which wait together: the second's are `apart` words further.
  template <class From>
  __device__ __forceinline__ void take_in(Columns (&mine)[2], int all, const From& words_from,
                                          int apart) const {
    constexpr int kParts = 4;
#pragma unroll 1
    for (int first = 0; first < all; first += kParts) {
      const auto at = words_from(first);
      const auto at_second = [&](int i) { return at(i) + apart; };
      const int count = all - first;
      uint4 words[2][kParts][kWords];
      bool there;
      do {
        there = ask(words[0], count, at);
        there &= ask(words[1], count, at_second);
      } while (!there);
      take(mine[0], words[0], count, at);
      take(mine[1], words[1], count, at_second);
    }
  }
  /// Some parts' words, of which `count` exist. Are all of them there?
  template <int kParts, class At>
  __device__ __forceinline__ bool ask(uint4 (&words)[kParts][kWords], int count,
                                      const At& at) const {
    bool there = true;
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
#pragma unroll
      for (int n = 0; n < kWords; ++n) {
        // One that does not exist has seen no key.
        words[i][n] = {0, 0, __float_as_uint(-core::kInfinity), p.parts.ticket};
        if (i < count) words[i][n] = ptx::load_relaxed(at(i) + n);
      }
    }
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
#pragma unroll
      for (int n = 0; n < kWords; ++n) there &= words[i][n].w == p.parts.ticket;
    }
    return there;
  }
  /// Merges them, and clears where they were.
  template <int kParts, class At>
  __device__ __forceinline__ void take(Columns& mine, const uint4 (&words)[kParts][kWords],
                                       int count, const At& at) const {
    float top = mine.state.max;
#pragma unroll
    for (int i = 0; i < kParts; ++i) top = core::max(top, log2_of(words[i][0]));
    const float shift = core::shift_of(top), before = ptx::ex2(mine.state.max - shift);
    mine.state = {top, mine.state.sum * before};
#pragma unroll
    for (float& x : mine.x) x *= before;
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      const float weight = ptx::ex2(log2_of(words[i][0]) - shift);
      mine.state.sum += weight;
#pragma unroll
      for (int n = 0; n < kWords; ++n) {
        float* const x = mine.x + 2 * n;
        x[0] = fmaf(__uint_as_float(words[i][n].x), weight, x[0]);
        x[1] = fmaf(__uint_as_float(words[i][n].y), weight, x[1]);
        // A replay must not find it.
        if (i < count) at(i)[n] = uint4{};
      }
    }
  }
  /// The lse in base 2.
  __device__ __forceinline__ static float log2_of(const uint4& word) {
    return core::from_lse(__uint_as_float(word.z)).max;
  }
  /// For whoever takes it in.
  __device__ __forceinline__ void store(const Columns& mine, int column) const {
    store(mine, core::lse_of(mine.state), words_at(parts_.slot(), column));
  }
  __device__ __forceinline__ void store(const Columns& mine, float lse, uint4* to) const {
#pragma unroll
    for (int n = 0; n < kWords; ++n) {
      store(mine.x[2 * n], mine.x[2 * n + 1], lse, to + n);
    }
  }
  __device__ __forceinline__ void store(float x, float next, float lse, uint4* to) const {
    ptx::store_relaxed(
        to, uint4{__float_as_uint(x), __float_as_uint(next), __float_as_uint(lse), p.parts.ticket});
  }

  // ---- rows ----

  /// Of the piece's, those that exist.
  __device__ __forceinline__ int columns_left() const {
    if constexpr (core::value_passes(K) == 1) return p.head_dim_v;
    return core::min(p.head_dim_v - piece_.column(), K.head_dim_v);
  }
  /// Of a part of a warp's outputs: columns swizzled, so that neighbouring rows are in different
  /// banks.
  __device__ __forceinline__ static int place(int row, int column) {
    if constexpr (kParts > 1) column %= kWarpColumns;
    return row % kPartRows * kWarpColumns + (column ^ row % 8 * 4);
  }
  __device__ __forceinline__ static void add(float (&x)[kColumns], const float4& y, float weight) {
    x[0] = fmaf(y.x, weight, x[0]);
    x[1] = fmaf(y.y, weight, x[1]);
    x[2] = fmaf(y.z, weight, x[2]);
    x[3] = fmaf(y.w, weight, x[3]);
  }
  /// The result.
  __device__ __forceinline__ void write(int column, const float (&x)[kColumns], float lse) const {
    const DecodeQuery at = query_of<K>(p, piece_, query_);
    auto* const to = static_cast<std::uint16_t*>(p.o) +
                     at.sequence.query_offset(p.o_strides, at.query, head_) + piece_.column() +
                     column;
    const auto pack = [this](float a, float b) {
      if (kWidens && p.dtype == Dtype::bf16) return ptx::pack<Dtype::bf16>(a, b);
      return ptx::pack<kType>(a, b);
    };
    ptx::store_if(true, to, pack(x[0], x[1]), pack(x[2], x[3]));
    if (column > 0 || piece_.column() > 0 || p.softmax_lse == nullptr) return;
    p.softmax_lse[at.sequence.lse_index(p.lse_head, p.num_heads, head_, at.query)] = lse;
  }

  const DecodeParams& p;
  const DecodePiece<K>& piece_;
  DecodeExchange<K>& exchange_;
  const DecodeWalk<K>& walk_;
  const ItemParts<K> parts_;
  const int count_;   ///< rows that exist
  int threads_;       ///< of a row: neighbours
  int row_, thread_;  ///< the thread's row, and which of the row's it is
  int query_, head_;  ///< of the row
  bool spreads_;      ///< the piece's rows over the warps
};

}  // namespace tessera::cuda::mma
