// Warps that share rows. Where one warp would not have registers for all outputs of its rows,
// several have some of the columns each. Each of them makes the scores of some keys of a block, and
// the weights, which all need, pass through shared memory: rows of 64 or 128 bytes, units of 16
// bytes at their number XOR the row's, so that nobody meets in a bank.
//
// References of the softmax are the same in all of them: whoever finds a weight too large says so,
// and then they agree on the greatest scores.
#pragma once

#include "core/mma_shape.h"
#include "cuda/ptx/barrier.h"
#include "cuda/ptx/memory.h"
#include "cuda/ptx/mma.h"
#include "cuda/tile/fragment.h"

namespace tessera::cuda::mma {

template <core::Kernel K>
class SharedRows {
  static constexpr int kParts = core::mma_parts(K), kKeys = K.block_n / kParts;
  static constexpr int kRows = K.tile_m, kGroups = kRows / 16, kTeams = K.block_m / kRows;
  static constexpr int kUnits = K.block_n / 8;  ///< of 16 bytes, of a row
  static_assert(kParts == 1 || ((kUnits == 4 || kUnits == 8) && kKeys % 16 == 0));

 public:
  /// Of all teams of warps, in shared memory.
  struct Told {
    float numbers[K.block_m][kParts];
    int flags[kTeams][kParts];
  };
  static_assert(kParts == 1 || sizeof(Told) == core::mma_told_bytes(K));

  /// weights: where a block's weights lie, mma_weight_bytes of them.
  __device__ __forceinline__ SharedRows(std::uint32_t weights, Told& told, int team, int part,
                                        int lane)
      : weights_(weights + team * kRows * kUnits * 16),
        told_(told),
        team_(team),
        part_(part),
        lane_(lane) {}

  /// A block's weights of the warp's own keys, for all. `rescale(g)`: O *= w[g].factor. Nobody
  /// reads weights of another block meanwhile.
  template <class Weights, class Rescale>
  __device__ __forceinline__ void weigh(Weights (&w)[kGroups], const Rescale& rescale) const {
    typename Weights::Pending pending[kGroups];
    bool large = false;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      pending[g] = weigh_all(w[g], w[g].begin());
      large |= pending[g].too_large();
    }
    store(w);
    if (any(large)) {
      raise(w, rescale, [](bool) { return true; });
#pragma unroll
      for (int g = 0; g < kGroups; ++g) pending[g] = weigh_all(w[g], w[g].begin_raised());
      store(w);
      meet();
    }
#pragma unroll
    for (int g = 0; g < kGroups; ++g) w[g].keep(pending[g]);
  }
  /// The same with a look for the greatest scores; change(g) alters w[g].s, weights by then whose
  /// sums have been taken.
  template <class Weights, class Rescale, class Change>
  __device__ __forceinline__ void weigh(Weights (&w)[kGroups], const Rescale& rescale,
                                        const Change& change) const {
    raise(w, rescale, [](bool exceeds) { return agreed(exceeds); });
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      w[g].weigh_in_place();
      change(g);
      w[g].make_operand();
    }
    store(w);
    meet();
  }
  /// Weights of the warp's g-th 16 rows and the j-th 16 keys of the block, as the A operand.
  __device__ __forceinline__ void load(std::uint32_t (&a)[4], int g, int j) const {
    const std::uint32_t at =
        weights_ + lane_ % 16 * kUnits * 16 + (lane_ / 16 ^ lane_ % 8 / (8 / kUnits)) * 16;
    ptx::load_matrices(a, (at ^ j * 32) + g * 16 * kUnits * 16);
  }

  /// The sum of what each says of the half-th of the thread's rows in the g-th 16.
  __device__ __forceinline__ float sum_of(int g, int half, float own) const {
    float(&of_row)[kParts] = numbers(g, half);
    if (lane_ % 4 == 0) of_row[part_] = own;
    meet();
    float sum = 0.0F;
#pragma unroll
    for (const float x : of_row) sum += x;
    return sum;
  }

 private:
  __device__ __forceinline__ void meet() const { ptx::barrier_sync(1 + team_, 32 * kParts); }
  __device__ __forceinline__ float (&numbers(int g, int half) const)[kParts] {
    return told_.numbers[team_ * kRows + g * 16 + lane_ / 4 + 8 * half];
  }
  /// Whether any of them says so; what they stored before is there for all then.
  __device__ __forceinline__ bool any(bool own) const {
    own = agreed(own);
    if (lane_ == 0) told_.flags[team_][part_] = own ? 1 : 0;
    meet();
    int flags = 0;
#pragma unroll
    for (const int flag : told_.flags[team_]) flags |= flag;
    return agreed(flags != 0);
  }

  template <class Weights>
  __device__ __forceinline__ static typename Weights::Pending weigh_all(
      Weights& w, typename Weights::Pending pending) {
#pragma unroll
    for (int i = 0; i < kKeys / 2; i += 2) w.weigh_pair(pending, i);
    return pending;
  }

  /// References follow the greatest scores of all, where wanted(they exceed them by much).
  template <class Weights, class Rescale, class Wanted>
  __device__ __forceinline__ void raise(Weights (&w)[kGroups], const Rescale& rescale,
                                        const Wanted& wanted) const {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      float top[2];
      w[g].greatest(top);
      if (lane_ % 4 == 0) {
        numbers(g, 0)[part_] = top[0];
        numbers(g, 1)[part_] = top[1];
      }
    }
    meet();
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      float top[2] = {-core::kInfinity, -core::kInfinity};
#pragma unroll
      for (int i = 0; i < kParts; ++i) {
        top[0] = fmaxf(top[0], numbers(g, 0)[i]);
        top[1] = fmaxf(top[1], numbers(g, 1)[i]);
      }
      if (wanted(w[g].exceeds(top))) {
        w[g].raise(top);
        rescale(g);
      }
    }
  }

  template <class Weights>
  __device__ __forceinline__ void store(const Weights (&w)[kGroups]) const {
    const std::uint32_t at = weights_ + lane_ / 4 * kUnits * 16 + lane_ % 4 * 4 +
                             (part_ * kKeys / 8 ^ lane_ / 4 / (8 / kUnits)) * 16;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
#pragma unroll
      for (int i = 0; i < kKeys / 4; ++i) {
        ptx::store_shared((at ^ i / 2 * 16) + (g * 16 + i % 2 * 8) * kUnits * 16, w[g].operand[i]);
      }
    }
  }

  const std::uint32_t weights_;  ///< of the team's rows
  Told& told_;
  const int team_, part_, lane_;
};

}  // namespace tessera::cuda::mma
