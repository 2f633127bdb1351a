// What kernels that rotate are told of the tables (append.cpp, quantize.cpp).
#pragma once

#include "tessera/append.hpp"

namespace tessera::cuda {

/// Params: aux::AppendParams or aux::QuantizeParams.
template <class Params>
void set_tables(Params& p, const RotaryShape& shape, const RotaryTensors& tables) {
  p.cos = tables.cos;
  p.sin = tables.sin;
  const bool several = shape.positions > 1;
  p.stride_cos = several ? tables.stride_cos : 0;
  p.stride_sin = several ? tables.stride_sin : 0;
  p.positions = shape.positions;
  p.table_dtype = shape.dtype;
  p.interleaved = shape.interleaved;
}

}  // namespace tessera::cuda
