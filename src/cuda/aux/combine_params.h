// What the kernel that merges partial results is given: values filled in by cuda/combine.cpp.
#pragma once

#include "core/sequences.h"
#include "cuda/source.h"

namespace tessera::cuda::aux {

/// Threads of a block, and columns of a row that a lane holds at a time.
inline constexpr int kCombineThreads = 128, kLaneColumns = 8;

struct CombineParams {
  Source o_parts;  ///< of the first split
  Source lse_parts;
  std::int64_t o_split = 0, lse_split = 0;  ///< elements from one split to the next
  void* o = nullptr;
  core::Strides o_strides;
  float* softmax_lse = nullptr;  ///< null: not asked for
  core::Strides lse_strides;
  std::int64_t rows = 0;  ///< of all sequences and heads
  std::int64_t seqlen = 0;
  int heads = 0;
  int splits = 0;
  int head_dim = 0;  ///< of o
  int lanes = 0;     ///< that share a row: a power of two, 4 to 32
  Dtype dtype_o = Dtype::f32;
  bool parts_aligned = false;  ///< rows of o_parts begin and end at multiples of 16 bytes
  bool o_aligned = false;      ///< rows of o do so at multiples of four elements

  TESSERA_HD int rows_of_block() const { return kCombineThreads / lanes; }
  TESSERA_HD std::int64_t blocks() const {
    return core::ceil_div<std::int64_t>(rows, rows_of_block());
  }
};

}  // namespace tessera::cuda::aux
