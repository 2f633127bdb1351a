// Of the yardstick's kernels (peak.h), for them and for who launches them.
#pragma once

namespace tessera::cuda::mma {

inline constexpr int kPeakThreads = 256;
inline constexpr int kPeakProducts = 16;  ///< of 16 x 8 x 16, of a warp's round
/// Of a block's round; a multiply-add is two.
inline constexpr double kPeakOperations = 2.0 * 16 * 8 * 16 * kPeakProducts * kPeakThreads / 32;

}  // namespace tessera::cuda::mma
