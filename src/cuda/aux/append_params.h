// What the kernel that appends to a cache is given: values filled in by cuda/append.cpp.
#pragma once

#include "core/append.h"
#include "cuda/source.h"

namespace tessera::cuda::aux {

/// Threads of a block, and units that a thread carries at a time.
inline constexpr int kAppendThreads = 128, kThreadUnits = 2;

/// Of which tensor rows are.
enum class Carried : std::uint8_t { keys, values, queries };

/// Rows of one tensor on their way: new keys, new values or queries. Columns come in pieces of 16
/// bytes or, where a row does not consist of those, of one element. A unit is two pieces, of
/// rotated columns those of the same pairs.
struct CarriedRows {
  Source from;
  void* to = nullptr;  ///< the cache, or where queries go
  core::Strides to_strides;
  std::int64_t rows = 0;  ///< of all sequences
  core::Divisor seqlen;   ///< of `from`, and of queries' `to`; packed: 0
  core::Divisor heads;
  core::Divisor head_units;  ///< units of a head
  int rotated = 0;           ///< pieces of a head's rotated columns
  int plain = 0;             ///< of the others
  bool wide = false;         ///< pieces of 16 bytes

  TESSERA_HD int rotated_units() const { return core::ceil_div(rotated, 2); }
  TESSERA_HD int plain_units() const { return core::ceil_div(plain, 2); }
  TESSERA_HD std::int64_t blocks() const {
    return core::ceil_div<std::int64_t>(rows * heads.value() * head_units.value(),
                                        std::int64_t{kAppendThreads} * kThreadUnits);
  }
};

struct AppendParams {
  core::Append places;
  CarriedRows k, v, q;
  const void* cos = nullptr;  ///< rows of the tables
  const void* sin = nullptr;
  std::int64_t stride_cos = 0, stride_sin = 0;
  std::int64_t positions = 0;  ///< that they have
  Dtype table_dtype = Dtype::f32;
  bool tables_aligned = false;  ///< their rows begin at multiples of 16 bytes
  bool interleaved = false;

  TESSERA_HD std::int64_t blocks() const { return k.blocks() + v.blocks() + q.blocks(); }
};

}  // namespace tessera::cuda::aux
