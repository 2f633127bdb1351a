// Tables of the rotary embedding, of any type, as kernels read them.
#pragma once

#include "cuda/ptx/math.h"

namespace tessera::cuda::aux {

/// Neighbours of a table, loaded at once.
template <typename Element, int kCount>
struct alignas(sizeof(Element) * kCount) Neighbours {
  Element at[kCount];
};

/// kCount of a table; at: elements from its first one.
template <int kCount>
__device__ __forceinline__ void load_table(const void* table, Dtype dtype, std::int64_t at,
                                           float* x) {
  static_assert(kPlainDtypes == 3);
  if (dtype == Dtype::f32) {
    const auto loaded =
        *reinterpret_cast<const Neighbours<float, kCount>*>(static_cast<const float*>(table) + at);
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = loaded.at[i];
    return;
  }
  const auto loaded = *reinterpret_cast<const Neighbours<std::uint16_t, kCount>*>(
      static_cast<const std::uint16_t*>(table) + at);
  const bool bf16 = dtype == Dtype::bf16;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    x[i] = bf16 ? ptx::widen<Dtype::bf16>(loaded.at[i]) : ptx::widen<Dtype::f16>(loaded.at[i]);
  }
}

}  // namespace tessera::cuda::aux
