// Of the yardstick's kernels (peak.h), for them and for who launches them.
#pragma once

namespace tessera::cuda::sm80 {

inline constexpr int kPeakThreads = 256;
inline constexpr int kPeakProducts = 16;  ///< of 16 x 8 x 16, of a warp's round

}  // namespace tessera::cuda::sm80
