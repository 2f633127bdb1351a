// An append as kernels are told of it, and its validation. Called by the doors and backends.
#pragma once

#include "core/append.h"
#include "plan/plan.h"

namespace tessera {

/// Places and positions of the rows; what lies in memory is read where they are asked.
TESSERA_HD core::Append append_of(const AppendShape& shape, const AppendTensors& t) {
  core::Append append;
  append.slot_mapping = shape.slot_mapping ? t.slot_mapping : nullptr;
  append.entry_slots = core::Divisor(static_cast<int>(shape.entry_slots()));
  append.entries = shape.entry_slots() > 0 ? shape.entries() : 0;
  if (shape.rotary) {
    append.rotary_seqlens = t.rotary.seqlens;
    append.positions = shape.slot_mapping ? t.rotary.positions : nullptr;
    append.position_type = shape.rotary->position_type;
    append.constant_q = shape.rotary->constant_q;
  }
  if (shape.slot_mapping) return append;
  const int batch = static_cast<int>(shape.batch);
  append.after = shape.cache.lengths == Lengths::after;
  append.queries = {shape.packed ? t.cu_seqlens_q : nullptr,
                    core::Divisor(static_cast<int>(shape.seqlen_q)), batch};
  append.added = {shape.packed_new ? t.cache.cu_seqlens_new : nullptr,
                  core::Divisor(static_cast<int>(shape.cache.seqlen_new)), batch};
  append.cache.used = true;
  append.cache.seqlens = t.cache.seqlens;
  append.cache.index = shape.cache.rows > 0 ? t.cache.index : nullptr;
  append.cache.rows = shape.cache.rows;
  append.cache.capacity = static_cast<int>(shape.seqlen_k);
  if (shape.cache.paged()) {
    append.page_size = core::Divisor(static_cast<int>(shape.cache.page_size));
    append.cache.pages = {t.cache.page_table, t.cache.stride_page_table, shape.cache.num_pages,
                          static_cast<int>(shape.cache.page_size), shape.cache.page_ids};
  }
  return append;
}

/// Scales of a cache of 8 bits. All heads have that of the tensor.
/// @{
TESSERA_HD core::Scales cache_scales_of(const ConstScales& numbers, Scaling by) {
  return by == Scaling::tensor ? core::Scales{numbers.data, 0, 0, by} : scales_of(numbers, by);
}
TESSERA_HD core::Scales k_scales_of(const AppendShape& shape, const AppendTensors& t) {
  return cache_scales_of(t.k_scale, shape.scale_k);
}
TESSERA_HD core::Scales v_scales_of(const AppendShape& shape, const AppendTensors& t) {
  return cache_scales_of(t.v_scale, shape.scale_v);
}
/// @}

/// Whether the numbers make sense and the tensors fit them: null pointers, strides, and arrays
/// where they can be read.
Status validate(const AppendShape& shape, const AppendTensors& tensors, Memory memory);

}  // namespace tessera
