// The forward pass on Hopper: FlashAttention-3's warp specialisation (Shah et al. 2024, section 3),
// one tile of block_m query rows after another on a grid of one block per multiprocessor.
//
// Warpgroup 0 produces: one thread asks the copy engine for Q of a tile, then for its blocks of
// keys and values, from the right (the diagonal) to the left, into rings of two. The other
// warpgroups consume, 64 rows each: S = Q K^T of a block is issued beside O += P V of the block
// before it, and while the tensor cores are at O, P of the new block is made from S in registers.
// The stream of blocks does not end with a tile: the first S of the next tile is issued beside the
// last O of this one. The warpgroups take turns at issuing (a named barrier each), so that one
// multiplies while another is at its exponentials.
//
// The softmax shift of a row is a reference that is raised only when the maximum has grown by more
// than kSlack powers of two, so O is hardly ever rescaled (FlashAttention-4's lazy rescaling).
#pragma once

#include "core/kernel.h"
#include "core/softmax.h"
#include "core/work.h"
#include "cuda/ptx/barrier.h"
#include "cuda/ptx/math.h"
#include "cuda/ptx/memory.h"
#include "cuda/ptx/wgmma.h"
#include "cuda/sm90/params.h"
#include "cuda/sm90/shape.h"

namespace tessera::cuda::sm90 {

/// log2 of what a weight may reach before the reference is raised; 16-bit weights are as precise
/// there as below 1.
inline constexpr float kSlack = 8.0F;

/// A row of the catalog as the kernel needs it.
template <core::Kernel K>
struct Shape {
  static constexpr int kGroups = consumers(K);
  static constexpr int kThreads = threads(K);
  static constexpr int kChunks = core::ceil_div(K.head_dim, kColumns);
  static constexpr int kChunksV = core::ceil_div(K.head_dim_v, kColumns);
  static constexpr int kQBytes = buffer_bytes(K.head_dim, K.block_m);
  static constexpr int kKBytes = buffer_bytes(K.head_dim, K.block_n);
  static constexpr int kVBytes = buffer_bytes(K.head_dim_v, K.block_n);
  static constexpr int kProducerRegisters = kGroups == 2 ? 24 : 32;
  static constexpr int kConsumerRegisters = kGroups == 2 ? 240 : 160;
  static constexpr Dtype kType = K.operand == core::Operand::bf16 ? Dtype::bf16 : Dtype::f16;

  static_assert(K.block_m % kRows == 0 && (kGroups == 2 || kGroups == 3));
  static_assert(K.block_n % 16 == 0 && K.head_dim % 16 == 0 && K.head_dim_v % 32 == 0);
  static_assert(shared_bytes(K) <= kMaxSharedBytes);
};

/// A ring of buffers in shared memory, as producer and consumers count it: item i lies in buffer
/// i % kSize and is the (i / kSize)-th there.
template <int kSize>
struct Ring {
  std::uint32_t data;   ///< buffer 0
  std::uint32_t bytes;  ///< of a buffer
  std::uint32_t full;   ///< mbarriers, 8 bytes each
  std::uint32_t empty;

  __device__ __forceinline__ std::uint32_t buffer(std::uint32_t i) const {
    return data + i % kSize * bytes;
  }
  __device__ __forceinline__ void wait_full(std::uint32_t i) const {
    ptx::mbarrier_wait(full + i % kSize * 8, i / kSize & 1);
  }
  __device__ __forceinline__ void release(std::uint32_t i) const {
    ptx::mbarrier_arrive(empty + i % kSize * 8);
  }
  /// Producer: waits until the buffer is free, announces `bytes`, and returns the full barrier.
  __device__ __forceinline__ std::uint32_t claim(std::uint32_t i) const {
    ptx::mbarrier_wait(empty + i % kSize * 8, (i / kSize & 1) ^ 1);
    ptx::mbarrier_expect(full + i % kSize * 8, bytes);
    return full + i % kSize * 8;
  }
};

/// Shared memory of a block.
template <core::Kernel K>
struct Buffers {
  Ring<K.q_stages> q;
  Ring<kStages> k, v;

  __device__ __forceinline__ explicit Buffers(const void* shared) {
    using S = Shape<K>;
    const std::uint32_t base = (ptx::shared_address(shared) + 1023) / 1024 * 1024;
    q.data = base;
    k.data = q.data + K.q_stages * S::kQBytes;
    v.data = k.data + kStages * S::kKBytes;
    q.bytes = S::kQBytes;
    k.bytes = S::kKBytes;
    v.bytes = S::kVBytes;
    q.full = v.data + kStages * S::kVBytes;
    q.empty = q.full + 8 * K.q_stages;
    k.full = q.empty + 8 * K.q_stages;
    k.empty = k.full + 8 * kStages;
    v.full = k.empty + 8 * kStages;
    v.empty = v.full + 8 * kStages;
  }

  __device__ __forceinline__ void initialise() const {
    for (int i = 0; i < K.q_stages; ++i) initialise(q.full + 8 * i, q.empty + 8 * i);
    for (int i = 0; i < kStages; ++i) {
      initialise(k.full + 8 * i, k.empty + 8 * i);
      initialise(v.full + 8 * i, v.empty + 8 * i);
    }
    ptx::fence_mbarrier_init();
  }

 private:
  __device__ __forceinline__ static void initialise(std::uint32_t full, std::uint32_t empty) {
    ptx::mbarrier_init(full, 1);
    ptx::mbarrier_init(empty, Shape<K>::kGroups);
  }
};

/// A tile of query rows and the blocks of keys that it sees.
struct Tile {
  int block;  ///< of rows
  int head, batch;
  int first_q, first_k;  ///< of the sequence in packed tensors
  core::Band band;
  core::Range blocks;  ///< of keys that its rows see
};

template <core::Kernel K>
__device__ __forceinline__ Tile tile_at(const ForwardParams& p, int index) {
  const core::TileOrder::Tile place = p.order.at(index);
  Tile t;
  t.block = place.row_block;
  t.head = place.head % p.heads;
  t.batch = place.head / p.heads;
  int seqlen_q = p.seqlen_q, seqlen_k = p.seqlen_k;
  t.first_q = t.first_k = 0;
  if (p.cu_seqlens_q != nullptr) {
    t.first_q = p.cu_seqlens_q[t.batch];
    t.first_k = p.cu_seqlens_k[t.batch];
    seqlen_q = p.cu_seqlens_q[t.batch + 1] - t.first_q;
    seqlen_k = p.cu_seqlens_k[t.batch + 1] - t.first_k;
  }
  t.band = core::make_band(seqlen_q, seqlen_k, p.window_left, p.window_right, p.alignment);
  const core::Range rows = {t.block * K.block_m, core::min((t.block + 1) * K.block_m, seqlen_q)};
  t.blocks = core::key_blocks(t.band, rows, K.block_n).seen;
  return t;
}

/// Index of the i-th tile of this block.
__device__ __forceinline__ int tile_index(int i) {
  return core::TileOrder::index_of(i, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x));
}

// ---- the producer ----

template <core::Kernel K>
__device__ __forceinline__ void produce(const ForwardParams& p, const Buffers<K>& buffers) {
  using S = Shape<K>;
  const auto load = [](const ptx::TensorMap& map, std::uint32_t to, std::uint32_t barrier,
                       int chunks, int rows, int row, int head, int batch) {
    for (int c = 0; c < chunks; ++c) {
      ptx::tma_load(to + c * rows * 128, map, barrier, c * kColumns, row, head, batch);
    }
  };
  std::uint32_t q_item = 0, item = 0;
  // Values follow one block behind their keys.
  int waiting_row = -1, waiting_head = 0, waiting_batch = 0;
  const auto load_values = [&](std::uint32_t i) {
    const std::uint32_t barrier = buffers.v.claim(i);
    load(p.v, buffers.v.buffer(i), barrier, S::kChunksV, K.block_n, waiting_row, waiting_head,
         waiting_batch);
  };
  for (int i = 0, index; (index = tile_index(i)) < p.order.count(); ++i) {
    const Tile t = tile_at<K>(p, index);
    if (t.blocks.empty()) continue;
    const int batch = p.cu_seqlens_q != nullptr ? 0 : t.batch, head_k = t.head / p.group;
    const std::uint32_t q_full = buffers.q.claim(q_item);
    load(p.q, buffers.q.buffer(q_item), q_full, S::kChunks, K.block_m,
         t.first_q + t.block * K.block_m, t.head, batch);
    ++q_item;
    for (int n = t.blocks.end - 1; n >= t.blocks.begin; --n, ++item) {
      const int row = t.first_k + n * K.block_n;
      const std::uint32_t k_full = buffers.k.claim(item);
      load(p.k, buffers.k.buffer(item), k_full, S::kChunks, K.block_n, row, head_k, batch);
      if (waiting_row >= 0) load_values(item - 1);
      waiting_row = row;
      waiting_head = head_k;
      waiting_batch = batch;
    }
  }
  if (waiting_row >= 0) load_values(item - 1);
}

// ---- the consumers ----

template <core::Kernel K>
class Consumer {
  using S = Shape<K>;
  using ScoreWgmma = ptx::Wgmma<S::kType, K.block_n>;
  using OutputWgmma = ptx::Wgmma<S::kType, K.head_dim_v>;
  static constexpr int kN = K.block_n;

 public:
  __device__ __forceinline__ Consumer(const ForwardParams& params, const Buffers<K>& shared,
                                      int group)
      : p(params),
        buffers(shared),
        group_(group),
        warp_(__shfl_sync(~0U, static_cast<int>(threadIdx.x) % 128 / 32, 0)),
        lane_(static_cast<int>(threadIdx.x) % 32),
        leads_(threadIdx.x % 128 == 0),
        to_base2_(K.extra ? 1.0F : params.score.pre) {}

  __device__ __forceinline__ void run() {
    if (group_ == S::kGroups - 1) pass_turn();
    if (!next_tile(tile_)) return;
    core::KeyBlocks own = own_blocks(tile_);
    start(own);
    for (;;) {
      walk(own);
      Tile next;
      if (!next_tile(next)) break;
      own = own_blocks(next);
      cross(next, own);
    }
    buffers.v.wait_full(weighed_);
    issue_output();
    ptx::wgmma_wait<0>();
    ptx::wgmma_results(o_);
    write(tile_, reference_, sum_);
  }

 private:
  // ---- turns ----

  __device__ __forceinline__ void take_turn() const { ptx::barrier_sync(1 + group_, 256); }
  __device__ __forceinline__ void pass_turn() const {
    ptx::barrier_arrive(1 + (group_ + 1) % S::kGroups, 256);
  }

  // ---- products ----

  /// S = Q K^T of item_.
  __device__ __forceinline__ void issue_scores() {
    const std::uint32_t q =
        ptx::descriptor_along(buffers.q.buffer(q_item_) + group_ * kRows * 128);
    const std::uint32_t k = ptx::descriptor_along(buffers.k.buffer(item_));
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < K.head_dim / 16; ++i) {
      const int chunk = i / 4, column = i % 4 * 32;
      ScoreWgmma::shared(s_, ptx::descriptor(q + (chunk * K.block_m * 128 + column) / 16),
                         ptx::descriptor(k + (chunk * kN * 128 + column) / 16), i != 0);
    }
    ptx::wgmma_commit();
  }

  /// O += P V of the item whose weights are the operand.
  __device__ __forceinline__ void issue_output() {
    const std::uint32_t v = ptx::descriptor_across(buffers.v.buffer(weighed_), kN * 128);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kN / 16; ++i) {
      OutputWgmma::registers(o_, operand_ + 4 * i,
                             ptx::descriptor(v + i * 16 * 128 / 16), 1);
    }
    ptx::wgmma_commit();
  }

  __device__ __forceinline__ void release_keys(bool last_of_tile) const {
    if (leads_) {
      buffers.k.release(item_);
      if (last_of_tile) buffers.q.release(q_item_);
    }
  }

  // ---- blocks of the tile that lie beyond this warpgroup's diagonal ----

  /// Those that it walks over: all but the rightmost one if its rows do not see that. Not two: the
  /// second one's values lie where those still to be multiplied are.
  __device__ __forceinline__ core::KeyBlocks own_blocks(const Tile& t) const {
    // Rows past the sequence's end go with its last one.
    const int first = core::min(t.block * K.block_m + group_ * kRows, t.band.seqlen_q - 1);
    const core::Range rows = {first, core::min(first + kRows, t.band.seqlen_q)};
    const core::KeyBlocks own = core::key_blocks(t.band, rows, kN);
    const int least = core::max(t.blocks.end - kStages + 1, t.blocks.begin + 1);
    return {{t.blocks.begin, core::max(own.seen.end, least)}, own.full};
  }

  // A block passed by is waited for all the same, so that its buffer is not released before all are
  // done with what lay there; and released only when the whole warpgroup has looked: whoever looks
  // after it has been filled anew waits for ever.

  /// Lets keys pass by, and with them this warpgroup's turns.
  __device__ __forceinline__ void skip_keys(int count) {
#pragma unroll 1
    for (; count > 0; --count) {
      ++item_;
      buffers.k.wait_full(item_);
      take_turn();
      if (leads_) buffers.k.release(item_);
      pass_turn();
    }
  }
  /// Lets the values of the `count` blocks before item_ pass by.
  __device__ __forceinline__ void skip_values(int count) const {
#pragma unroll 1
    for (; count > 0; --count) {
      buffers.v.wait_full(item_ - count);
      ptx::barrier_sync(1 + S::kGroups + group_, 128);
      if (leads_) buffers.v.release(item_ - count);
    }
  }

  // ---- a tile ----

  /// S and P of its first block, with nothing beside them.
  __device__ __forceinline__ void start(const core::KeyBlocks& own) {
    clear_output();
    reset_softmax();
    buffers.q.wait_full(q_item_);
    const int skipped = tile_.blocks.end - own.seen.end;
    skip_keys(skipped);
    ++item_;
    buffers.k.wait_full(item_);
    take_turn();
    issue_scores();
    pass_turn();
    ptx::wgmma_wait<0>();
    ptx::wgmma_results(s_);
    release_keys(own.seen.size() == 1);
    weigh(tile_, own);
    make_operand();
    skip_values(skipped);
  }

  /// All blocks but the first.
  __device__ __forceinline__ void walk(const core::KeyBlocks& own) {
    int n = own.seen.end - 2;
    if constexpr (!K.extra) {
#pragma unroll 1
      for (; n >= core::max(own.seen.begin, own.full.end); --n) step<true>(n, n == own.seen.begin);
      const int full_begin = core::max(own.seen.begin, own.full.begin);
#pragma unroll 1
      for (; n >= full_begin; --n) step<false>(n, n == own.seen.begin);
    }
#pragma unroll 1
    for (; n >= own.seen.begin; --n) step<true>(n, n == own.seen.begin);
  }

  /// From the last block of tile_ to the first of the next one, which becomes tile_.
  __device__ __forceinline__ void cross(const Tile& next, const core::KeyBlocks& own) {
    ++q_item_;
    buffers.q.wait_full(q_item_);
    const int skipped = next.blocks.end - own.seen.end;
    skip_keys(skipped);
    begin_step();
    release_keys(own.seen.size() == 1);
    const float reference[2] = {reference_[0], reference_[1]};
    float sum[2] = {sum_[0], sum_[1]};
    reset_softmax();
    weigh(next, own);
    finish_step();
    skip_values(skipped);
    write(tile_, reference, sum);
    clear_output();
    tile_ = next;
  }

  // ---- a block of keys ----

  /// Issues S of the next item and O of the one before; returns when S is there.
  __device__ __forceinline__ void begin_step() {
    ++item_;
    buffers.k.wait_full(item_);
    take_turn();
    issue_scores();
    buffers.v.wait_full(weighed_);
    issue_output();
    pass_turn();
    ptx::wgmma_wait<1>();
    ptx::wgmma_results(s_);
  }

  /// Waits for O and makes P the next operand.
  __device__ __forceinline__ void finish_step() {
    ptx::wgmma_wait<0>();
    ptx::wgmma_results(o_);
    if (leads_) buffers.v.release(weighed_);
    make_operand();
  }

  template <bool kMasked>
  __device__ __forceinline__ void step(int n, bool last_of_tile) {
    begin_step();
    release_keys(last_of_tile);
    if constexpr (K.extra) transform(tile_, n);
    if constexpr (kMasked) mask(tile_, n);
    const bool rescales = soften();
    if constexpr (K.extra) drop(tile_, n);
    finish_step();
    if (rescales) {
#pragma unroll
      for (int i = 0; i < K.head_dim_v / 2; ++i) o_[i] *= factor_[i / 2 % 2];
    }
  }

  /// The first block of a tile: nothing to rescale yet.
  __device__ __forceinline__ void weigh(const Tile& t, const core::KeyBlocks& own) {
    const int n = own.seen.end - 1;
    if constexpr (K.extra) transform(t, n);
    if (n >= own.full.end || n < own.full.begin) mask(t, n);
    soften();
    if constexpr (K.extra) drop(t, n);
  }

  // ---- scores to weights; score i of a thread: query row_of(i), key key_of(n, i) ----

  __device__ __forceinline__ int row_of(const Tile& t, int half) const {
    return t.block * K.block_m + group_ * kRows + warp_ * 16 + lane_ / 4 + 8 * half;
  }

  __device__ __forceinline__ int key_of(int n, int i) const {
    return n * kN + i / 4 * 8 + lane_ % 4 * 2 + i % 2;
  }

  __device__ __forceinline__ void mask(const Tile& t, int n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const core::Range keys = t.band.keys_of(row_of(t, half));
      const int first = n * kN + lane_ % 4 * 2;
      const int begin = keys.begin - first, end = keys.end - first;
#pragma unroll
      for (int i = 0; i < kN / 4; ++i) {
        const int column = i / 2 * 8 + i % 2;
        float& x = s_[i / 2 * 4 + half * 2 + i % 2];
        if (column < begin || column >= end) x = -core::kInfinity;
      }
    }
  }

  /// Softcap, bias and ALiBi: raw products become base-2 scores (S1).
  __device__ __forceinline__ void transform(const Tile& t, int n) {
    const float slope = p.alibi_slopes == nullptr
                            ? 0.0F
                            : p.alibi_slopes[(p.alibi_per_batch ? t.batch * p.heads : 0) + t.head];
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) {
      const int query = row_of(t, i / 2 % 2), key = key_of(n, i);
      float x = s_[i] * p.score.pre;
      if (p.score.capped) {
        // tanh(x) = 1 - 2 / (e^2x + 1), right at both ends.
        x = (1.0F - 2.0F * ptx::rcp(ptx::ex2(2.0F * core::kLog2e * x) + 1.0F)) * p.score.post;
      }
      if (p.bias != nullptr) x += bias_of(t, query, key) * core::kLog2e;
      const int distance = query + t.band.seqlen_k - t.band.seqlen_q - key;
      s_[i] = x + core::alibi2(slope, fabsf(static_cast<float>(distance)));
    }
  }

  /// 0 outside the sequences, which nobody sees.
  __device__ __forceinline__ float bias_of(const Tile& t, int query, int key) const {
    if (query >= t.band.seqlen_q || key >= t.band.seqlen_k) return 0.0F;
    const std::int64_t at =
        t.batch * p.bias_batch + t.head * p.bias_head + query * p.bias_query + key * p.bias_key;
    if (p.bias_dtype == Dtype::f32) return static_cast<const float*>(p.bias)[at];
    const std::uint16_t bits = static_cast<const std::uint16_t*>(p.bias)[at];
    return p.bias_dtype == Dtype::bf16 ? __uint_as_float(std::uint32_t{bits} << 16)
                                       : ptx::widen_f16(bits);
  }

  /// Dropout of P (S8); the sum has been taken. A thread's two neighbouring keys share a word.
  __device__ __forceinline__ void drop(const Tile& t, int n) {
    if (!p.dropout.active()) return;
#pragma unroll
    for (int i = 0; i < kN / 2; i += 2) {
      const core::Philox4<std::uint32_t> random = core::dropout_bits<std::uint32_t>(
          p.dropout, t.batch, t.head, row_of(t, i / 2 % 2), key_of(n, i) / core::kPhiloxKeys);
      const int which = lane_ % 4;
      const std::uint32_t word = which < 2 ? (which == 0 ? random.word[0] : random.word[1])
                                           : (which == 2 ? random.word[2] : random.word[3]);
      s_[i] = (word & 0xFFFF) >= p.dropout.threshold ? s_[i] * p.dropout.keep_scale : 0.0F;
      s_[i + 1] = word >> 16 >= p.dropout.threshold ? s_[i + 1] * p.dropout.keep_scale : 0.0F;
    }
  }

  /// S becomes P, and the softmax state follows. True: what O holds must be multiplied by factor_.
  __device__ __forceinline__ bool soften() {
    float top[2] = {s_[0], s_[2]};
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) top[i / 2 % 2] = fmaxf(top[i / 2 % 2], s_[i]);
    bool raises = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      top[half] = fmaxf(top[half], __shfl_xor_sync(~0U, top[half], 1));
      top[half] = fmaxf(top[half], __shfl_xor_sync(~0U, top[half], 2));
      top[half] = fmaxf(top[half], reference_[half]);
      raises |= (top[half] - reference_[half]) * to_base2_ > kSlack;
    }
    raises = __any_sync(~0U, raises);
    if (raises) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        factor_[half] = top[half] == -core::kInfinity
                            ? 1.0F
                            : ptx::ex2((reference_[half] - top[half]) * to_base2_);
        reference_[half] = top[half];
        sum_[half] *= factor_[half];
      }
    }
    float shift[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) shift[half] = core::shift_of(reference_[half]) * to_base2_;
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) s_[i] = ptx::ex2(fmaf(s_[i], to_base2_, -shift[i / 2 % 2]));
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) sum_[i / 2 % 2] += s_[i];
    return raises;
  }

  /// P in the storage type is the A operand as it lies: neighbouring groups of columns in pairs.
  __device__ __forceinline__ void make_operand() {
    weighed_ = item_;
#pragma unroll
    for (int i = 0; i < kN / 4; ++i) operand_[i] = ptx::pack<S::kType>(s_[2 * i], s_[2 * i + 1]);
  }

  __device__ __forceinline__ void reset_softmax() {
    reference_[0] = reference_[1] = -core::kInfinity;
    sum_[0] = sum_[1] = 0.0F;
  }
  __device__ __forceinline__ void clear_output() {
#pragma unroll
    for (int i = 0; i < K.head_dim_v / 2; ++i) o_[i] = 0.0F;
  }

  // ---- tiles and results ----

  /// The next tile that sees a key; those on the way that see none get their zeros.
  __device__ __forceinline__ bool next_tile(Tile& t) {
    for (int index; (index = tile_index(next_)) < p.order.count();) {
      ++next_;
      t = tile_at<K>(p, index);
      if (!t.blocks.empty()) return true;
      write_zeros(t);
    }
    return false;
  }

  /// Rows that see no key (S4); with a sink its logit is all the denominator.
  __device__ __forceinline__ void write_zeros(const Tile& t) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float lse = p.sink == nullptr ? -core::kInfinity : p.sink[t.head];
      ptx::store_if(has_lse(t, half), lse_of(t, half), lse);
      for (int c = 0; c < K.head_dim_v; c += 32) {
        ptx::store_if(has_output(t, half, c), output_of(t, half, c), 0, 0, 0, 0);
      }
    }
  }

  // Where results go: of row_of(t, half). A quad of lanes writes 32 columns, 8 a lane.

  __device__ __forceinline__ bool has_lse(const Tile& t, int half) const {
    return p.softmax_lse != nullptr && lane_ % 4 == 0 && row_of(t, half) < t.band.seqlen_q;
  }
  __device__ __forceinline__ float* lse_of(const Tile& t, int half) const {
    const std::int64_t row = t.first_q + row_of(t, half);
    return p.softmax_lse + (p.cu_seqlens_q != nullptr
                                ? t.head * p.total_q + row
                                : (std::int64_t{t.batch} * p.heads + t.head) * p.seqlen_q + row);
  }
  __device__ __forceinline__ bool has_output(const Tile& t, int half, int column) const {
    return row_of(t, half) < t.band.seqlen_q && column + lane_ % 4 * 8 < p.head_dim_v;
  }
  __device__ __forceinline__ std::uint16_t* output_of(const Tile& t, int half, int column) const {
    const std::int64_t batch = p.cu_seqlens_q != nullptr ? 0 : t.batch * p.o_strides.batch;
    return static_cast<std::uint16_t*>(p.o) + batch + t.head * p.o_strides.head +
           (t.first_q + row_of(t, half)) * p.o_strides.seqlen + column + lane_ % 4 * 8;
  }

  __device__ __forceinline__ void write(const Tile& t, const float (&reference)[2],
                                        float (&sum)[2]) const {
    float scale[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sum[half] += __shfl_xor_sync(~0U, sum[half], 1);
      sum[half] += __shfl_xor_sync(~0U, sum[half], 2);
      const core::Softmax<float> row = {reference[half] * to_base2_, sum[half]};
      core::Softmax<float> merged = row;
      scale[half] = core::inverse_sum(row);
      if (p.sink != nullptr) {
        merged = core::combine(row, {p.sink[t.head] * core::kLog2e, 1.0F});
        scale[half] = core::weight_of({row.max, 1.0F}, merged);
      }
      ptx::store_if(has_lse(t, half), lse_of(t, half), core::lse_of(merged));
    }
#pragma unroll
    for (int c = 0; c < K.head_dim_v; c += 32) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        std::uint32_t a[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int at = (c / 8 + i) * 4 + 2 * half;
          a[i] = ptx::pack<S::kType>(o_[at] * scale[half], o_[at + 1] * scale[half]);
        }
        transpose_quad(a);
        ptx::store_if(has_output(t, half, c), output_of(t, half, c), a[0], a[1], a[2], a[3]);
      }
    }
  }

  /// Word i of lane j of a quad becomes word j of lane i.
  __device__ __forceinline__ void transpose_quad(std::uint32_t (&a)[4]) const {
#pragma unroll
    for (int distance = 1; distance <= 2; distance *= 2) {
      const bool upper = (lane_ & distance) != 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if ((i & distance) != 0) continue;
        std::uint32_t& low = a[i];
        std::uint32_t& high = a[i + distance];
        const std::uint32_t other = __shfl_xor_sync(~0U, upper ? low : high, distance);
        if (upper) {
          low = other;
        } else {
          high = other;
        }
      }
    }
  }

  const ForwardParams& p;
  const Buffers<K>& buffers;
  const int group_;  ///< of the consumers
  const int warp_;   ///< of the warpgroup
  const int lane_;
  const bool leads_;  ///< arrives at barriers for its warpgroup
  const float to_base2_;

  Tile tile_;
  int next_ = 0;      ///< tile of this block
  std::uint32_t q_item_ = 0;    ///< in the ring of Q
  std::uint32_t item_ = ~0U;    ///< in the ring of K: whose scores come next
  std::uint32_t weighed_ = ~0U;  ///< in the ring of V: whose weights are the operand, still to be multiplied
  float s_[kN / 2];
  float o_[K.head_dim_v / 2];
  std::uint32_t operand_[kN / 4];
  float reference_[2], sum_[2], factor_[2];
};

/// The kernel of a catalog row.
template <core::Kernel K>
__device__ __forceinline__ void forward(const ForwardParams& p, const void* shared) {
  using S = Shape<K>;
  const Buffers<K> buffers(shared);
  // Told to be the same for the whole warp.
  const int group = __shfl_sync(~0U, static_cast<int>(threadIdx.x) / 128, 0);
  if (threadIdx.x == 0) buffers.initialise();
  __syncthreads();
  if (group == 0) {
    ptx::lower_registers<S::kProducerRegisters>();
    if (threadIdx.x == 0) produce<K>(p, buffers);
  } else {
    ptx::raise_registers<S::kConsumerRegisters>();
    Consumer<K>(p, buffers, group - 1).run();
  }
}

}  // namespace tessera::cuda::sm90
