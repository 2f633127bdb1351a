// The forward kernel of mma.sync, launched as a Hopper row's would be.
#include "kernels.h"

// What stands for the device comes before its code.
#include "mma_host.h"

namespace tessera::device {
namespace {

constexpr core::Kernel row_of(core::Operand operand, int head_dim, int tile_m) {
  core::Kernel row;
  row.arch = Arch::sm80;
  row.operand = operand;
  row.block_m = row.q_rows = 128;
  row.tile_m = tile_m;
  row.block_n = 64;
  row.head_dim = row.head_dim_v = head_dim;
  return row;
}

cuda::mma::ForwardParams params_of(const cuda::sm90::ForwardParams& p) {
  cuda::mma::ForwardParams params;
  params.q = p.q_source;
  params.k = p.k_source;
  params.v = p.v_source;
  params.o = p.o;
  params.o_strides = p.o_strides;
  params.softmax_lse = p.softmax_lse;
  params.lse_head = p.lse_head;
  params.sequences = p.sequences;
  params.window = p.window;
  params.sink = p.sink;
  params.score = p.score;
  params.work = p.work;
  params.rows = p.rows;
  params.group = p.group;
  params.head_dim = p.head_dim;
  params.head_dim_v = p.head_dim_v;
  return params;
}

template <core::Operand kOperand, int kHeadDim, int kTileM>
std::string run_row(unsigned blocks, const cuda::mma::ForwardParams& params) {
  static constexpr core::Kernel kRow = row_of(kOperand, kHeadDim, kTileM);
  return run(blocks, static_cast<unsigned>(cuda::mma::forward_threads(kRow)),
             static_cast<unsigned>(cuda::mma::forward_bytes(kRow)),
             [&params](char* shared) { cuda::mma::forward<kRow>(params, shared); });
}

}  // namespace

std::string launch_mma(const core::Kernel& row, unsigned blocks, const void* params) {
  using enum core::Operand;
  const auto p = params_of(*static_cast<const cuda::sm90::ForwardParams*>(params));
  const bool is_bf16 = row.operand == bf16;
  switch (row.head_dim) {
    case 64: return is_bf16 ? run_row<bf16, 64, 32>(blocks, p) : run_row<f16, 64, 32>(blocks, p);
    case 128: return run_row<bf16, 128, 32>(blocks, p);
    case 256: return run_row<bf16, 256, 16>(blocks, p);
    default: return "no such row";
  }
}

}  // namespace tessera::device
