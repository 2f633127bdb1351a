// Quantising as kernels are told of it, and its validation. Called by the doors and backends.
#pragma once

#include "core/quantize.h"
#include "plan/plan.h"
#include "tessera/quantize.hpp"

namespace tessera {

/// The results as a problem's tensors, which know where scales and tiles lie.
TESSERA_HD Tensors results_of(const QuantizeTensors& from) {
  Tensors t;
  t.q = from.q_out;
  t.k = from.k_out;
  t.v = from.v_out;
  t.q_scale = from.q_scale;
  t.k_scale = from.k_scale;
  t.v_scale = from.v_scale;
  t.score_shift = from.score_shift;
  t.v_shift = from.v_shift;
  t.cu_seqlens_q = from.cu_seqlens_q;
  t.cu_seqlens_k = from.cu_seqlens_k;
  return t;
}

/// What is subtracted from keys, as of a channel.
TESSERA_HD core::Scales k_mean_of(const QuantizeShape& shape, const QuantizeTensors& t) {
  return scales_of(t.k_mean, shape.problem.scales.score_shift ? Scaling::channel : Scaling::none);
}

TESSERA_HD core::RowPositions positions_of(const QuantizeShape& shape, const QuantizeTensors& t) {
  return {t.rotary.seqlens, shape.rotary && shape.rotary->constant_q};
}

/// Whether scales are made here, not given.
TESSERA_HD constexpr bool is_written(Scaling scaling) {
  return scaling == Scaling::token || scaling == Scaling::block;
}

/// Which tensors there are, of at least one row each.
/// @{
TESSERA_HD bool has_q(const QuantizeShape& shape, const QuantizeTensors& t) {
  return t.q.data != nullptr && shape.problem.rows_q() > 0;
}
TESSERA_HD bool has_k(const QuantizeShape& shape, const QuantizeTensors& t) {
  return t.k.data != nullptr && shape.problem.rows_k() > 0;
}
TESSERA_HD bool has_v(const QuantizeShape& shape, const QuantizeTensors& t) {
  return t.v.data != nullptr && shape.problem.rows_k() > 0;
}
/// @}

/// Whether the numbers make sense and the tensors fit them: null pointers, strides, and arrays
/// where they can be read.
Status validate(const QuantizeShape& shape, const QuantizeTensors& tensors, Memory memory);

}  // namespace tessera
