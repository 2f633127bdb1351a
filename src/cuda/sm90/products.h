// The products of the Hopper kernels, as loops over wgmma along the summed dimension.
#pragma once

#include "core/value_tiles.h"
#include "cuda/ptx/wgmma.h"

namespace tessera::cuda::sm90 {

/// D = A B^T over kDim columns: a and b are descriptors (descriptor_along) of operands in shared
/// memory whose chunks of columns have kRowsA and kRowsB rows.
template <class Wgmma, int kRowsA, int kRowsB, int kDim, int kCount>
__device__ __forceinline__ void multiply_along(float (&d)[kCount], std::uint32_t a,
                                               std::uint32_t b) {
  ptx::wgmma_fence();
#pragma unroll
  for (int i = 0; i < kDim / 16; ++i) {
    const int chunk = i / 4, column = i % 4 * 32;
    Wgmma::shared(d, ptx::descriptor(a + (chunk * kRowsA * 128 + column) / 16),
                  ptx::descriptor(b + (chunk * kRowsB * 128 + column) / 16), i != 0);
  }
  ptx::wgmma_commit();
}

/// D += A B over kRows rows of B: A in registers, b a descriptor (descriptor_across).
template <class Wgmma, int kRows, int kCount, int kOperand>
__device__ __forceinline__ void add_across(float (&d)[kCount], const std::uint32_t (&a)[kOperand],
                                           std::uint32_t b) {
  ptx::wgmma_fence();
#pragma unroll
  for (int i = 0; i < kRows / 16; ++i) {
    Wgmma::registers_across(d, a + 4 * i, ptx::descriptor(b + i * 16 * 128 / 16), 1);
  }
  ptx::wgmma_commit();
}

/// O and its sums of weights: += P V, or = P V if `begins`, over kPanels panels of value tiles of
/// kColumns columns (core/value_tiles.h). A, e4m3, in registers; b: descriptor_of_panel.
template <int kColumns, int kPanels, int kCount, int kOperand>
__device__ __forceinline__ void add_panels(float (&d)[kCount], const std::uint32_t (&a)[kOperand],
                                           std::uint32_t b, bool begins) {
  constexpr std::uint32_t kPanel = core::ValueTiles{kColumns}.panel_bytes() / 16;
  constexpr int kAll = kColumns + core::ValueTiles::kOnes;
  // More columns than one wgmma takes are two halves: eight alone would cost far more.
  constexpr int kFirst = kAll > 256 ? kColumns / 2 : kAll;
  ptx::wgmma_fence();
#pragma unroll
  for (int i = 0; i < kPanels; ++i) {
    const int add = i > 0 || !begins ? 1 : 0;
    ptx::Wgmma<Dtype::e4m3, kFirst>::registers(d, a + 4 * i, ptx::panel_descriptor(b + i * kPanel),
                                               add);
    if constexpr (kFirst < kAll) {
      constexpr std::uint32_t kBehind = kFirst * core::ValueTiles::kPanelKeys / 16;
      ptx::Wgmma<Dtype::e4m3, kAll - kFirst>::registers(
          d + kFirst / 2, a + 4 * i, ptx::panel_descriptor(b + i * kPanel + kBehind), add);
    }
  }
  ptx::wgmma_commit();
}

}  // namespace tessera::cuda::sm90
