// PlanData: what plan() decided and run() follows. Made once by select.cpp, then immutable.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "core/kernel.h"
#include "core/score.h"
#include "core/work.h"
#include "tessera/tessera.hpp"

namespace tessera {

struct PlanData {
  Problem problem;
  Device device;
  core::Kernel kernel;
  std::string kernel_name;
  core::Score score;      ///< softmax_scale and softcap, folded to base 2
  core::WorkGrid grid;    ///< forward: pieces of work; splits > 1: the parts are merged by combine
  int split_n = 0;        ///< keys per split, 0: not split
  core::TileOrder order;  ///< GPU: of the same pieces

  /// Query heads that lie side by side on the row axis (core::Rows): a whole group, or one, in
  /// which case the grid's heads_k count query heads.
  int packed_heads = 1;
  std::size_t workspace_bytes = 0;
  std::vector<WorkspaceRegion> regions;
};

/// Lengths and place of sequence `batch`; reads cu_seqlens for packed problems.
core::Sequence sequence_of(const Problem& problem, const Tensors& tensors, int batch);

/// The mask of one sequence.
TESSERA_HD core::Band band_of(const Problem& problem, const core::Sequence& sequence) {
  return core::make_band(sequence.seqlen_q, sequence.seqlen_k, problem.window_left,
                         problem.window_right, problem.alignment);
}

enum class Memory : std::uint8_t { host, device };

/// Whether the tensors fit the problem: null pointers, strides, and cu_seqlens where it can be
/// read.
Status validate(const Problem& problem, const Tensors& tensors, Memory memory);

}  // namespace tessera
