// PlanData: what plan() decided and run() follows. Made once by select.cpp, then immutable.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "core/kernel.h"
#include "core/score.h"
#include "core/sequences.h"
#include "core/work.h"
#include "tessera/tessera.hpp"

namespace tessera {

struct PlanData {
  Problem problem;
  Device device;
  core::Kernel kernel;
  std::string kernel_name;
  core::Score score;     ///< softmax_scale and softcap, folded to base 2
  core::WorkOrder work;  ///< its pieces; splits > 1: the parts are merged by combine
  int split_n = 0;       ///< keys per split, 0: not split

  /// Query heads that lie side by side on the row axis (core::Rows): a whole group, or one. A head
  /// of `work` is so many query heads.
  int row_heads = 1;
  std::size_t workspace_bytes = 0;
  std::vector<WorkspaceRegion> regions;
};

/// Lengths and places of a problem's sequences, and their masks; cu_seqlens are read where they are
/// asked.
TESSERA_HD core::Sequences sequences_of(const Problem& problem, const Tensors& tensors) {
  return {problem.packed ? tensors.cu_seqlens_q : nullptr,
          problem.packed ? tensors.cu_seqlens_k : nullptr, static_cast<int>(problem.seqlen_q),
          static_cast<int>(problem.seqlen_k)};
}
TESSERA_HD core::Window window_of(const Problem& problem) {
  return {problem.window_left, problem.window_right, problem.alignment};
}
TESSERA_HD core::Strides strides_of(const ConstTensor& tensor) {
  return {tensor.stride_batch, tensor.stride_seqlen, tensor.stride_head};
}
/// AnyBias: ConstBias or Bias.
template <class AnyBias>
TESSERA_HD core::BiasStrides strides_of(const BiasShape& shape, const AnyBias& bias) {
  return {shape.batch ? bias.stride_batch : 0, shape.heads ? bias.stride_head : 0,
          shape.queries ? bias.stride_query : 0, shape.keys ? bias.stride_key : 0};
}
/// What a problem's scores need besides scale and mask; the least of the catalog's words for it.
TESSERA_HD core::Extra extra_of(const Problem& problem) {
  if (problem.bias || problem.alibi != PerHead::none || problem.dropout_p > 0.0F) {
    return core::Extra::all;
  }
  return problem.softcap > 0.0F ? core::Extra::softcap : core::Extra::none;
}
/// Elements of softmax_lse from one head to the next (S5).
inline std::int64_t lse_head_of(const Problem& problem) {
  return problem.packed ? problem.total_q : problem.seqlen_q;
}

enum class Memory : std::uint8_t { host, device };

/// Whether the tensors fit the problem: null pointers, strides, and cu_seqlens where it can be
/// read.
Status validate(const Problem& problem, const Tensors& tensors, Memory memory);

/// Whether the sizes make sense and the tensors fit them.
Status validate(const PartialResults& results, const PartialTensors& tensors);

}  // namespace tessera
