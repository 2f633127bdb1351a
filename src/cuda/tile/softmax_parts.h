// Scores of 8-bit operands that become weights part by part (softmax_8bit.h, softmax_i8.h): those
// of a part that is done need no registers any more, so a block may have more keys.
#pragma once

#include "core/softmax.h"
#include "cuda/ptx/math.h"
#include "cuda/tile/fragment.h"

namespace tessera::cuda {

/// Scores kFrom to kTo of a thread become weights, by w.make<kFrom, kTo, kBits>(). Where `raises`,
/// references are raised before, by w.raise<kFrom, kBits>(); and where weights turn out too large,
/// which make() says, unless they have been already: then they are made anew. w.keep() when they
/// are as they must be. rescale(): O *= w.factor. Returns whether references were raised here.
template <int kFrom, int kTo, bool kBits, class Weights, class Rescale>
__device__ __forceinline__ bool weigh_part(Weights& w, bool raises, bool raised,
                                           const Rescale& rescale) {
  // Not known to the compiler: it would have two copies of what follows.
  std::uint32_t now = ptx::opaque(raises ? 1 : 0);
#pragma unroll 1
  for (;;) {
    if (agreed(now != 0)) {
      w.template raise<kFrom, kBits>();
      rescale();
    }
    const bool too_large = w.template make<kFrom, kTo, kBits>();
    if (!agreed(now == 0 && !raised && too_large)) {
      w.keep();
      return now != 0;
    }
    now = ptx::opaque(1);
  }
}

/// All of a thread's kCount scores, the first kFirst of them apart; kHolds: their weights are held,
/// and O may still be multiplied until they are made. arrive() waits for it. References are raised
/// by all scores of the block that are still there, so after the first part no other weight is too
/// large.
template <int kCount, int kFirst, bool kHolds, bool kBits, class Weights, class Arrive,
          class Rescale>
__device__ __forceinline__ void weigh_parts(Weights& w, bool first, const Arrive& arrive,
                                            const Rescale& rescale) {
  if constexpr (!kHolds) arrive();
  const bool raised = weigh_part<0, kFirst, kBits>(w, first, false, [&] {
    if constexpr (!kHolds) rescale();
  });
  if constexpr (kHolds) {
    arrive();
    if (raised) rescale();
  }
  if constexpr (kFirst < kCount) {
    weigh_part<kFirst, kCount, kBits>(w, false, raised, rescale);
  }
}

/// What a row's reference becomes that `top` lies above. kLater: weights of lower references have
/// been made, so it rises by a whole number, a power of 2 that they are multiplied by exactly; the
/// greatest weight is less than twice as large then. So far above that they vanish it is `top`.
template <bool kLater>
__device__ __forceinline__ float raised_reference(float reference, float top) {
  constexpr float kFar = 64.0F;
  return kLater && top - reference < kFar ? reference + floorf(top - reference) : top;
}

}  // namespace tessera::cuda
