// What both phases of the backward that need scores share: one block of block_n keys against one
// tile of block_m grouped rows, both of one (batch, key/value head). Keys are rows and queries are
// lanes:
//   scores():    S^T = K Q^T, P^T = exp2(S^T - lse)
//   gradients(): dP^T = V dO^T, dS^T = P^T o (dP^T - delta)
// Both are taken in sub-tiles of kRowBlock keys by kTile rows, straight from the product's
// registers; a sub-tile that nobody sees is not computed but zero. Scores with more to them than
// scale and mask (softcap, bias, ALiBi, dropout) make one more pass over the tile while it lies in
// the cache.
#pragma once

#include "core/philox.h"
#include "core/softmax.h"
#include "cpu/copy.h"
#include "cpu/extras.h"
#include "cpu/math.h"
#include "cpu/product.h"
#include "cpu/rows.h"

// A lambda that becomes part of a product's unrolled loops.
#define TESSERA_LAMBDA_INLINE __attribute__((always_inline))

namespace tessera::cpu::TESSERA_ISA {

template <core::Kernel K>
class BackwardTile {
  static_assert(K.tile_m == kTile && K.lanes == kLanes && K.block_m % K.tile_m == 0);
  static_assert(K.block_m % kRowBlock == 0 && K.block_n % kRowBlock == 0 && kRowBlock % 2 == 0);
  static_assert(K.block_n % core::kPhiloxKeys == 0);

 public:
  static constexpr bool kPairs = K.operand == core::Operand::bf16;
  static constexpr int kStep = kPairs ? 2 : 1;  ///< elements in a word
  static constexpr int kM = K.block_m;
  static constexpr int kN = K.block_n;
  using Element = std::conditional_t<kPairs, Bf16, float>;
  using Word = std::conditional_t<kPairs, std::uint32_t, float>;
  static constexpr std::int64_t kElementBytes = sizeof(Element);

  BackwardTile(const Call& call, int batch, int head_k, int worker, std::int64_t slot)
      : problem(call.plan.problem),
        tensors(call.tensors),
        shared(call.layout.backward),
        map(call, batch, head_k),
        band(window_of(problem).band_of(map.sequence)),
        d(core::round_up<std::int64_t>(problem.head_dim, kLanes)),
        dv(core::round_up<std::int64_t>(problem.head_dim_v, kLanes)),
        first_row(
            head_k * shared.rows +
            backward_row(call.plan, sequences_of(problem, tensors).row_of(map.sequence, 0), batch)),
        slot_row(slot * shared.slot_rows),
        score_(call.plan.score),
        extra_(extra_of(call.plan.problem) != core::Extra::none),
        dropout_(
            core::make_dropout(problem.dropout_p, tensors.philox_seed, tensors.philox_offset)) {
    Workspace workspace(call.scratch(worker));
    scratch = layout_backward_scratch(workspace, call.plan);
  }

  const Problem& problem;
  const Tensors& tensors;
  const BackwardLayout& shared;
  BackwardScratch scratch;
  const RowMap map;
  const core::Band band;
  const std::int64_t d, dv;      ///< head dims rounded up to whole vectors
  const std::int64_t first_row;  ///< of this sequence in shift and delta
  const std::int64_t slot_row;   ///< of this sequence in the other shared arrays
  core::Range block;             ///< of keys, clipped to the sequence

  // The tile in hand; place() sets it.
  std::int64_t row = 0;  ///< first row, counted in the sequence
  int valid = 0;         ///< rows that exist
  int rows = 0;          ///< the same, rounded up to whole kTile
  core::Range strips;    ///< keys to compute, relative to the block: whole kRowBlocks
  bool masked = false;   ///< some (row, key) of rows x strips is not visible
  bool last = false;     ///< no other tile of the block follows

  // ---- geometry ----

  /// Makes a tile of up to kM rows, starting at `first`, the one in hand. False: it sees none of
  /// the block's keys.
  bool place(std::int64_t first) {
    row = first;
    valid = static_cast<int>(core::min<std::int64_t>(kM, map.rows.count() - row));
    if (valid <= 0) return false;
    rows = core::round_up(valid, kTile);
    const core::Range queries = queries_of(0, valid);
    const core::Range keys = core::intersect(band.keys_of(queries), block);
    if (keys.empty()) return false;
    strips = {(keys.begin - block.begin) / kRowBlock * kRowBlock,
              core::round_up(keys.end - block.begin, kRowBlock)};
    masked = block.begin + strips.end > block.end ||
             band.cover(queries, {block.begin + strips.begin, block.begin + strips.end}) !=
                 core::Cover::full;
    if (extra_) place_lanes();
    return true;
  }

  /// Queries of rows [begin, end) of the tile; rows past the last repeat it.
  core::Range queries_of(int begin, int end) const {
    return map.rows.queries_of(row + core::min(begin, valid - 1), row + core::min(end, valid));
  }

  /// Rows of the tile that see at least one of the keys (relative to the block).
  core::Range rows_of(core::Range keys) const {
    const core::Range inside =
        core::intersect({block.begin + keys.begin, block.begin + keys.end}, block);
    const core::Range queries = band.queries_of(inside);
    const std::int64_t group = map.rows.group;
    return {static_cast<int>(core::max<std::int64_t>(queries.begin * group - row, 0)),
            static_cast<int>(core::max<std::int64_t>(
                core::min<std::int64_t>(queries.end * group - row, valid), 0))};
  }

  /// Keys (relative to the block) that at least one row of [begin, end) sees.
  core::Range keys_of(int begin, int end) const {
    const core::Range keys = core::intersect(band.keys_of(queries_of(begin, end)), block);
    return keys.empty() ? core::Range{0, 0}
                        : core::Range{keys.begin - block.begin, keys.end - block.begin};
  }

  /// Words before row r of the tile in an array of rows of `dim`; bf16: r is even.
  std::int64_t words_before(int r, std::int64_t dim) const {
    return (slot_row + row + r) / kStep * dim;
  }

  // ---- requests: each product block of a tile makes a few, for what comes next ----

  /// Number `index` of `count` equal pieces of work.
  struct Piece {
    int index, count;
  };
  /// Of a strip of keys and one of `parts` of it: all strips of a block.
  TESSERA_INLINE static Piece piece_of(int key, int part, int parts) {
    return {key / kRowBlock * parts + part, kN / kRowBlock * parts};
  }

  /// Asks for a piece of what the next tile will read of a shared array, whose rows have row_bytes.
  TESSERA_INLINE void prefetch_next(const void* array, std::int64_t row_bytes, Piece piece) const {
    constexpr int kLine = 64;
    const std::int64_t bytes = core::min<std::int64_t>(kM, map.rows.count() - row - kM) * row_bytes;
    const int lines = core::ceil_div(kM * static_cast<int>(row_bytes), kLine);
    const std::int64_t part = std::int64_t{core::ceil_div(lines, piece.count)} * kLine;
    const std::int64_t begin = part * piece.index, end = core::min(begin + part, bytes);
    const char* next = static_cast<const char*>(array) + (slot_row + row + kM) * row_bytes;
    for (std::int64_t i = begin; i < end; i += kLine) prefetch<2>(next + i);
  }

  /// Asks for a piece of the kN rows of K, V, dK or dV from key `first` of the sequence on.
  template <Access kAccess>
  TESSERA_INLINE void prefetch_keys(const ConstTensor& tensor, std::int64_t n, int first,
                                    Piece piece) const {
    const auto size = static_cast<std::int64_t>(size_of(problem.dtype));
    const int begin = first + kN * piece.index / piece.count;
    const int end = core::min(first + kN * (piece.index + 1) / piece.count, map.sequence.seqlen_k);
    const auto* data = static_cast<const std::byte*>(tensor.data) + map.key_offset(tensor) * size;
    for (int key = begin; key < end; ++key) {
      prefetch_row<kAccess>(data + key * tensor.stride_seqlen * size, n * size);
    }
  }

  // ---- copies in ----

  /// Copies keys [first, first + kN) of K and V; past the last one come zeros.
  [[gnu::noinline]] void load_block(int first) {
    block = {first, core::min(first + kN, map.sequence.seqlen_k)};
    with_tensor_storage<K>(problem.dtype, [&](auto storage) {
      using T = decltype(storage);
      load_rows<T>(tensors.k, problem.head_dim, d, scratch.k);
      load_rows<T>(tensors.v, problem.head_dim_v, dv, scratch.v);
    });
    if constexpr (kPairs)
      pair_rows(keys(), d, core::round_up(block.size(), kRowBlock), d, scratch.k_pairs, d);
  }

  const Element* keys() const { return reinterpret_cast<const Element*>(scratch.k); }
  const Element* values() const { return reinterpret_cast<const Element*>(scratch.v); }
  /// K as the vector operand.
  const Word* key_words() const {
    if constexpr (kPairs) {
      return scratch.k_pairs;
    } else {
      return keys();
    }
  }
  /// Does P as it multiplies dO lie elsewhere than P? (bf16 without extra terms: P lies nowhere
  /// else.)
  bool has_operand() const { return kPairs || dropout_.active(); }
  /// P as it multiplies dO, and dS as it multiplies Q: [kN][kM].
  Element* weights() const {
    return has_operand() ? reinterpret_cast<Element*>(scratch.operand)
                         : reinterpret_cast<Element*>(scratch.p);
  }
  const Element* dscores() const {
    return reinterpret_cast<const Element*>(kPairs ? scratch.operand
                                                   : reinterpret_cast<std::byte*>(scratch.p));
  }
  /// dS with keys as the summed dimension: [kN / kStep][kM].
  const Word* dscore_words() const {
    if constexpr (kPairs) {
      return scratch.pairs;
    } else {
      return scratch.p;
    }
  }

  // ---- P and dS ----

  [[gnu::noinline]] void scores() {
    const F32 pre(score_.pre);
    for (int key = strips.begin; key < strips.end; key += kRowBlock) {
      const Rows<Element> a{keys() + key * d, d};
      for (int r = 0; r < rows; r += kTile) {
        const Piece piece = piece_of(key, r / kTile, kM / kTile);
        if (last) {
          prefetch_keys<Access::read>(tensors.k, problem.head_dim, block.end, piece);
        } else {
          prefetch_next(shared.q_transposed, d * kElementBytes, piece);
        }
        if (masked && cover(queries_of(r, r + kTile), key) == core::Cover::none) {
          if (extra_) zero(scratch.p, key, r);
          continue;
        }
        const Word* q = reinterpret_cast<const Word*>(shared.q_transposed) + words_before(r, d);
        if (extra_) {
          float* p = scratch.p + key * kM + r;
          multiply(a, problem.head_dim, q, [&](std::int64_t i, F32(&c)[kNV]) TESSERA_LAMBDA_INLINE {
            for (int n = 0; n < kNV; ++n) store(p + i * kM + n * kLanes, c[n]);
          });
        } else {
          const float* shift = shared.shift + first_row + row + r;
          const std::int64_t at = place_of(key, r);
          multiply(a, problem.head_dim, q, [&](std::int64_t i, F32(&c)[kNV]) TESSERA_LAMBDA_INLINE {
            for (int n = 0; n < kNV; ++n) {
              store(weights() + at + i * kM + n * kLanes,
                    weight<kPairs>(fms(c[n], pre, load(shift + n * kLanes))));
            }
          });
        }
      }
    }
    for (int r = 0; r < rows; r += kTile) {
      if (extra_) transform_scores(r);
      if (masked) mask(r);
    }
  }

  /// Wants P of scores(), which it overwrites. `keep_dbias`: leaves the gradient of the bias in
  /// scratch.dp, zeros included.
  [[gnu::noinline]] void gradients(bool keep_dbias) {
    for (int key = strips.begin; key < strips.end; key += kRowBlock) {
      const Rows<Element> a{values() + key * dv, dv};
      for (int r = 0; r < rows; r += kTile) {
        const Piece piece = piece_of(key, r / kTile, kM / kTile);
        if (last) {
          prefetch_keys<Access::read>(tensors.v, problem.head_dim_v, block.end, piece);
        } else {
          prefetch_next(shared.dout_transposed, dv * kElementBytes, piece);
        }
        if (masked && cover(queries_of(r, r + kTile), key) == core::Cover::none) {
          zero_gradients(key, r);
          continue;
        }
        const Word* dout =
            reinterpret_cast<const Word*>(shared.dout_transposed) + words_before(r, dv);
        if (extra_) {
          float* dp = scratch.dp + key * kM + r;
          multiply(a, problem.head_dim_v, dout,
                   [&](std::int64_t i, F32(&c)[kNV]) TESSERA_LAMBDA_INLINE {
                     for (int n = 0; n < kNV; ++n) store(dp + i * kM + n * kLanes, c[n]);
                   });
        } else {
          const std::int64_t at = place_of(key, r);
          const Element* p = weights() + at;
          const float* delta = shared.delta + first_row + row + r;
          F32 even[kNV];
          multiply(a, problem.head_dim_v, dout,
                   [&](std::int64_t i, F32(&c)[kNV]) TESSERA_LAMBDA_INLINE {
                     for (int n = 0; n < kNV; ++n) {
                       c[n] = load(p + i * kM + n * kLanes) * (c[n] - load(delta + n * kLanes));
                       if (i % 2 == 0) {
                         even[n] = c[n];
                       } else {
                         put_dscores(at, i / 2, n * kLanes, even[n], c[n]);
                       }
                     }
                   });
        }
      }
    }
    if (extra_) {
      for (int r = 0; r < rows; r += kTile) transform_gradients(r, keep_dbias);
    }
  }

  bool extra() const { return extra_; }

 private:
  /// kRowBlock rows of A against kTile lanes.
  template <class Epilogue>
  TESSERA_INLINE static void multiply(const Rows<Element>& a, std::int64_t k, const Word* b,
                                      Epilogue&& epilogue) {
    product_block<kRowBlock, kNV>(0, k, a, b, kTile, epilogue);
  }

  core::Cover cover(core::Range queries, int key) const {
    const core::Range strip = {block.begin + key, block.begin + key + kRowBlock};
    if (strip.begin >= block.end) return core::Cover::none;
    if (strip.end > block.end) {
      const core::Range inside = {strip.begin, block.end};
      return band.cover(queries, inside) == core::Cover::none ? core::Cover::none
                                                              : core::Cover::partial;
    }
    return band.cover(queries, strip);
  }

  template <class T>
  void load_rows(const ConstTensor& tensor, std::int64_t n, std::int64_t stride,
                 std::byte* target) const {
    const T* source = static_cast<const T*>(tensor.data) + map.key_offset(tensor) +
                      block.begin * tensor.stride_seqlen;
    auto* out = reinterpret_cast<Element*>(target);
    for (int key = 0; key < block.size(); ++key, out += stride, source += tensor.stride_seqlen) {
      std::int64_t i = 0;
      if constexpr (std::is_same_v<T, Element>) {
        constexpr auto kPart = static_cast<std::int64_t>(kVectorBytes / sizeof(T));
        for (; i + kPart <= n; i += kPart) __builtin_memcpy(out + i, source + i, kVectorBytes);
        __builtin_memcpy(out + i, source + i, static_cast<std::size_t>(n - i) * sizeof(T));
      } else {
        widen_rows(source, 0, 1, n, out, 0);
      }
      for (i = n; i < stride; ++i) out[i] = Element{};
    }
    // Past the last key, as far as a strip may reach.
    const std::int64_t rest = (core::round_up(block.size(), kRowBlock) - block.size()) * stride;
    for (std::int64_t i = 0; i < rest; ++i) out[i] = Element{};
  }

  /// Queries and heads of the lanes, for scores that depend on them; lanes past the last repeat it.
  void place_lanes() {
    RowMap::Row lane = map.at(row);
    for (int r = 0; r < rows; ++r) {
      query_[r] = lane.query;
      head_[r] = map.head_of(lane);
      if (r + 1 < valid) lane = map.next(lane);
    }
    if (problem.bias) load_bias();
  }

  /// Index of a key and row in arrays [kN][kM].
  TESSERA_INLINE static std::int64_t place_of(int key, int r) { return std::int64_t{key} * kM + r; }

  /// Stores dS of the keys 2 * pair and 2 * pair + 1 after that of `at`, which is even, for dK and
  /// dQ.
  TESSERA_INLINE void put_dscores(std::int64_t at, std::int64_t pair, int r, F32 even,
                                  F32 odd) const {
    const std::int64_t low = 2 * pair * kM + r;
    if constexpr (kPairs) {
      store(weights() + at + low, even);
      store(weights() + at + low + kM, odd);
      // Half the keys: the row of `at` counts half, its column whole.
      const std::int64_t column = at % kM;
      store(scratch.pairs + (at - column) / 2 + column + pair * kM + r, pair_bf16(even, odd));
    } else {
      store(scratch.p + at + low, even);
      store(scratch.p + at + low + kM, odd);
    }
  }

  /// Zeros P where it is not visible.
  void mask(int r) const {
    const core::Range queries = queries_of(r, r + kTile);
    for (int strip = strips.begin; strip < strips.end; strip += kRowBlock) {
      const core::Cover covered = cover(queries, strip);
      if (covered == core::Cover::full) continue;
      for (int key = strip; key < strip + kRowBlock; ++key) {
        const core::Range seen =
            covered == core::Cover::none ? core::Range{0, 0} : rows_of({key, key + 1});
        for (int n = 0; n < kNV; ++n) {
          const int first = r + n * kLanes;
          const Mask visible = first_lanes(seen.end - first) & ~first_lanes(seen.begin - first);
          const std::int64_t at = place_of(key, first);
          if (extra_ || !kPairs) {
            store(scratch.p + at, select(visible, load(scratch.p + at), F32{}));
          }
          if (has_operand()) {
            store(weights() + at, select(visible, load(weights() + at), F32{}));
          }
        }
      }
    }
  }

  void zero_gradients(int strip, int r) const {
    if (extra_) return zero(scratch.dp, strip, r);
    for (int key = strip; key < strip + kRowBlock; key += 2) {
      for (int n = 0; n < kNV; ++n) put_dscores(place_of(key, r), 0, n * kLanes, F32{}, F32{});
    }
  }

  /// Zeros kRowBlock keys of kTile rows.
  void zero(float* array, int strip, int r) const {
    for (int key = strip; key < strip + kRowBlock; ++key) {
      for (int n = 0; n < kNV; ++n) store(array + std::int64_t{key} * kM + r + n * kLanes, F32{});
    }
  }

  // ---- scores with extra terms ----

  /// Raw products to P. A weight that dropout zeroes keeps its P with the sign bit set, because dS
  /// needs it; what multiplies dO is 0 there.
  [[gnu::noinline]] void transform_scores(int r) const {
    const float* shift = shared.shift + first_row + row + r;
    F32 slope[kNV], position[kNV];
    for (int n = 0; n < kNV; ++n) {
      lane_rows().load_alibi(r + n * kLanes, block.begin, slope[n], position[n]);
    }
    core::Philox4<U32> random[kNV] = {};
    for (int key = strips.begin; key < strips.end; ++key) {
      if (dropout_.active() && (key == strips.begin || key % core::kPhiloxKeys == 0)) {
        for (int n = 0; n < kNV; ++n) {
          random[n] = lane_rows().draw(dropout_, r + n * kLanes, block.begin + key);
        }
      }
      for (int n = 0; n < kNV; ++n) {
        const int first = r + n * kLanes;
        const std::int64_t at = place_of(key, first);
        F32 x = load(scratch.p + at);
        if (score_.capped) store(scratch.slope + at, core::score_slope(score_, x));
        x = score_of(problem, score_, x, scratch.bias + at, slope[n],
                     abs(position[n] - F32(static_cast<float>(key))));
        const F32 p = weight<kPairs>(x - load(shift + n * kLanes));
        if (dropout_.active()) {
          const Mask keep = core::dropout_keeps(dropout_, random[n], key);
          store(scratch.p + at, select(keep, p, -p));
          store(weights() + at, select(keep, p * F32(dropout_.keep_scale), F32{}));
        } else {
          store(scratch.p + at, p);
          if constexpr (kPairs) store(weights() + at, p);
        }
      }
    }
  }

  /// dP to dS.
  [[gnu::noinline]] void transform_gradients(int r, bool keep_dbias) const {
    const float* delta = shared.delta + first_row + row + r;
    for (int key = strips.begin; key < strips.end; key += 2) {
      for (int n = 0; n < kNV; ++n) {
        const int first = r + n * kLanes;
        F32 ds[2];
        for (int i = 0; i < 2; ++i) {
          const std::int64_t at = place_of(key + i, first);
          F32 p = load(scratch.p + at);
          F32 dp = load(scratch.dp + at);
          if (dropout_.active()) {
            // -0.0 is a dropped weight of 0: either way its dS is 0.
            dp = select(bits(p) >= U32(0x80000000U), F32{}, dp * F32(dropout_.keep_scale));
            p = abs(p);
          }
          const auto gradient =
              core::score_gradient(score_, p * (dp - load(delta + n * kLanes)),
                                   score_.capped ? load(scratch.slope + at) : F32{});
          if (keep_dbias) store(scratch.dp + at, gradient.bias);
          ds[i] = gradient.product;
        }
        put_dscores(place_of(key, r), 0, n * kLanes, ds[0], ds[1]);
      }
    }
  }

  LaneRows lane_rows() const { return {map, query_, head_}; }

  /// The bias of the tile in base 2, [key][row].
  void load_bias() const {
    const int end = core::min(strips.end, block.size());
    for (int r = 0; r < rows; r += kLanes) {
      lane_rows().load_bias(r, {block.begin + strips.begin, block.begin + end},
                            scratch.bias + strips.begin * kM + r, kM);
    }
  }

  const core::Score score_;
  const bool extra_;  ///< more than scale and mask between product and softmax
  const core::Dropout dropout_;
  std::int32_t query_[kM];
  std::int32_t head_[kM];
};

}  // namespace tessera::cpu::TESSERA_ISA
