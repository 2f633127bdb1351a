// The producing warps of the latent kernel where values are of 8 bits beside keys of 16 (S14), as
// in FlashMLA's rows of 656 bytes: 512 values of e4m3, their scales, 64 columns of keys. Values
// times their scales are rounded to the operand once, in registers, on their way to shared memory.
// So what is under way from memory lies in registers, a block of 64 keys of each of two warpgroups.
// They take turns: while one stores its block, the other one's comes. A warpgroup stores all rows
// before it asks for the next: a warp has few scoreboards, and who waits for a row that came long
// ago may wait for one that was asked for just now.
#pragma once

#include "cuda/sm90/latent_loads.h"

namespace tessera::cuda::sm90 {

/// Where there is no key.
static __device__ const float4 kZeros[1] = {};

template <core::Kernel K>
class LatentWidening : LatentProducer<K> {
  using Base = LatentProducer<K>;
  using Base::kWarpKeys, Base::lane, Base::rings, Base::warp;
  using typename Base::PlaceOfKey;

  static constexpr Dtype kType = core::dtype_of(K.operand);
  static constexpr std::uint32_t kChunk = K.block_n * 128;  ///< bytes of 64 columns
  // A lane has 8 values of the first half of a row and of the second: what a warp asks for at once
  // are neighbours, and so are the 16 bytes that 8 lanes store.
  static constexpr int kHalf = K.head_dim_v / 2, kLaneValues = 8;
  static_assert(kWarpKeys == 16 && kHalf == 32 * kLaneValues && K.cached == Dtype::e4m3);
  static_assert(kHalf == 2 * core::kScaledColumns);

 public:
  __device__ __forceinline__ LatentWidening(const mma::DecodeParams& params,
                                            LatentShared<K>& shared)
      : Base(params, shared), turn_(static_cast<std::uint32_t>(threadIdx.x) / 128 % 2) {}

  __device__ __forceinline__ void run() {
    const mma::DecodePiece<K>& piece = this->piece_;
#pragma unroll 1
    for (bool more = this->shared_.exists; agreed(more);
         more = this->walk().advance(this->piece_)) {
#pragma unroll 1
      for (int tile = piece.tiles.begin; agreed(tile < piece.tiles.end); ++tile) {
        if (agreed(this->item_ % 2 == turn_)) {
          ask(this->look_up(tile, lane() % kWarpKeys));
          rings().keys.claim(this->item_);
          store(rings().keys.buffer(this->item_) + warp() * kWarpKeys * 128);
          __syncwarp();
          if (lane() == 0) rings().keys.arrive_full(this->item_);
        }
        // One warpgroup loads all queries, so that it never claims a buffer before it has got the
        // one before; and now, when registers hold no rows.
        if (agreed(turn_ == 0 && tile == piece.tiles.begin)) this->load_queries(piece);
        ++this->item_;
      }
    }
    ptx::copy_wait<0>();
  }

 private:
  // ---- a tile on its way ----

  /// place: of the warp's key lane % 16.
  __device__ __forceinline__ void ask(const PlaceOfKey& place) {
    const int lane = Base::lane();
    const ptx::CachePolicy policy = this->policy();
    const auto* const zeros = reinterpret_cast<const char*>(kZeros);
    const auto of = [&](std::uint64_t row, int bytes, int all_bytes) {
      return row != 0 && bytes < all_bytes ? reinterpret_cast<const char*>(row) + bytes : zeros;
    };
    ask_scales(place, lane);
    const std::uint64_t value = this->template row_of<1>(this->p.v, place);
#pragma unroll
    for (int row = 0; row < kWarpKeys; ++row) {
      const std::uint64_t from = __shfl_sync(~0U, value, row);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        ptx::load_in_order(of(from, half * kHalf + lane * kLaneValues, this->p.head_dim_v), policy,
                           values_[row][half]);
      }
    }
    const std::uint64_t key = this->template row_of<2>(this->p.k, place);
#pragma unroll
    for (int i = 0; i < kWarpKeys / 4; ++i) {
      const std::uint64_t from = __shfl_sync(~0U, key, i * 4 + lane / 8);
      ptx::load_in_order(of(from, lane % 8 * 16, this->p.head_dim * 2), policy, keys_[i]);
    }
  }
  /// Lane i has those of the warp's key i % 16, of groups i / 16 and 2 further on.
  __device__ __forceinline__ void ask_scales(const PlaceOfKey& place, int lane) {
    const core::Scales& scale = this->p.v_scale;
    const float* from = scale.data;
    if (scale.of_slots()) {
      from += place.entry * scale.stride_batch + place.slot * scale.stride_seqlen;
    }
    if (scale.by == Scaling::head) from += this->piece_.sequence.batch * scale.stride_batch;
    if (scale.by != Scaling::tensor) from += this->piece_.head * scale.stride_head;
    const bool exists = this->exists(place), grouped = scale.by == Scaling::group;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int group = half * 2 + lane / 16;
      const bool there = exists && group * core::kScaledColumns < this->p.head_dim_v;
      const float* const at = from + (grouped ? this->p.value_groups.quotient(group) : 0);
      scales_[half] = ptx::load_in_order(there ? at : &kZeros[0].x);
    }
  }

  /// to: the warp's rows of the first chunk, which is that of keys.
  __device__ __forceinline__ void store(std::uint32_t to) const {
    const int lane = Base::lane(), unit = lane % 8;
    // Not by shuffles, of which the compiler would make all at once.
    auto& scales = this->shared_.scales.of[threadIdx.x / 32 % (2 * Base::kWarps)];
    __syncwarp();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      scales[half * 2 + lane / 16][lane % kWarpKeys] = scales_[half];
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kWarpKeys / 4; ++i) {
      const int row = i * 4 + lane / 8;
      ptx::store_shared(to + row * 128 + static_cast<std::uint32_t>(unit ^ row % 8) * 16, keys_[i]);
    }
    to += (1 + lane / 8) * kChunk;
#pragma unroll
    for (int row = 0; row < kWarpKeys; ++row) {
      const std::uint32_t line = to + row * 128 + static_cast<std::uint32_t>(unit ^ row % 8) * 16;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float scale = scales[half * 2 + lane / 16][row];
        std::uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 2; ++i) scaled(values_[row][half][i], scale, words + 2 * i);
        ptx::store_shared(line + half * (kHalf / 64) * kChunk, words);
      }
    }
  }
  /// Four values times their scale: two pairs.
  __device__ __forceinline__ static void scaled(std::uint32_t four, float scale,
                                                std::uint32_t* words) {
    std::uint32_t pairs[2];
    ptx::widen_four<K.cached>(four, pairs[0], pairs[1]);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float low = ptx::widen<Dtype::f16>(static_cast<std::uint16_t>(pairs[i]));
      const float high = ptx::widen<Dtype::f16>(static_cast<std::uint16_t>(pairs[i] >> 16));
      words[i] = ptx::pack<kType>(low * scale, high * scale);
    }
  }

  const std::uint32_t turn_;  ///< items of the ring that are this warpgroup's: even ones, or odd
  std::uint32_t values_[kWarpKeys][2][2];
  std::uint32_t keys_[kWarpKeys / 4][4];
  float scales_[2];
};

}  // namespace tessera::cuda::sm90
