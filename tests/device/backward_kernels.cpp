// The backward kernels of mma.sync, those of wgmma that split roles, and those around them.
#include "kernels.h"

// What stands for the device comes before its code.
#include "backward_host.h"
#include "rows.h"

#include "cuda/symbol.h"

namespace tessera::device {
namespace {

/// Of every kind one: both roles in a warp and one, warps of 16 keys and of 32, and that share
/// them; 64 rows at a time, 32 and 16, values in registers, all of them, half and none; other
/// extras, any layout; and of wgmma, alone and in pairs of blocks.
constexpr bool chosen(const core::Kernel& row) {
  using enum core::Operand;
  if (row.pass != Pass::backward) return false;
  if (row.arch == Arch::sm75) return row.block_n == 16 && !row.any_layout;
  // Where other rows' sums are others.
  if (row.arch == Arch::sm90) {
    if (row.stages > 0) return row.operand == f16 && row.head_dim == 512;
    return row.operand == bf16 && !row.any_layout && core::splits_roles(row) &&
           (row.cluster > 1 || row.head_dim == 256);
  }
  if (row.arch != Arch::sm80) return false;
  const auto is = [&row](core::Operand operand, int head_dim, int head_dim_v, int block_m,
                         int tile_m, int block_n) {
    return row.operand == operand && row.head_dim == head_dim && row.head_dim_v == head_dim_v &&
           row.block_m == block_m && row.tile_m == tile_m && row.block_n == block_n;
  };
  if (row.any_layout) {
    return is(f16, 128, 128, 64, 16, 64) || is(bf16, 256, 256, 32, 16, 64) ||
           is(f16, 512, 512, 32, 32, 32);
  }
  if (row.extra == core::Extra::all) {
    return is(bf16, 128, 128, 64, 16, 64) || is(bf16, 512, 512, 16, 32, 32);
  }
  return is(f16, 64, 64, 64, 16, 128) || is(bf16, 128, 128, 64, 32, 128) ||
         is(bf16, 128, 128, 32, 16, 128) || is(f16, 192, 128, 64, 16, 64) ||
         is(bf16, 192, 192, 32, 16, 64) || is(bf16, 256, 256, 64, 16, 64) ||
         is(bf16, 384, 384, 32, 32, 32) || is(f16, 512, 512, 16, 32, 32);
}

constexpr auto kRows = rows_of<count_of(chosen)>(chosen);

template <std::size_t kRow>
bool launch_if(const std::string& symbol, unsigned blocks, const void* params, std::string& wrong) {
  static constexpr core::Kernel kKernel = kRows[kRow];
  if (symbol != cuda::symbol_of(kKernel)) return false;
  wrong = run(
      blocks, static_cast<unsigned>(cuda::sm90::threads(kKernel)),
      static_cast<unsigned>(cuda::sm90::shared_bytes(kKernel)),
      [params](char* shared) {
        if constexpr (kKernel.stages > 0) {
          cuda::mma::backward<kKernel>(*static_cast<const cuda::mma::BackwardParams*>(params),
                                       shared);
        } else {
          cuda::sm90::backward_wide<kKernel>(
              *static_cast<const cuda::sm90::BackwardParams*>(params), shared);
        }
      },
      kKernel.cluster);
  return true;
}

template <std::size_t... kIndices>
bool launch_any(const std::string& symbol, unsigned blocks, const void* params, std::string& wrong,
                std::index_sequence<kIndices...> /*indices*/) {
  return (launch_if<kIndices>(symbol, blocks, params, wrong) || ...);
}

template <class Params, class Call>
bool launch_as(bool named, unsigned blocks, const void* params, std::string& wrong,
               const Call& call) {
  if (!named) return false;
  const auto& p = *static_cast<const Params*>(params);
  wrong = run(blocks, cuda::aux::kRowThreads, 0, [&](char* /*shared*/) { call(p); });
  return true;
}

}  // namespace

std::span<const core::Kernel> backward_rows() { return kRows; }

bool launch_backward(const core::Kernel& row, const std::string& symbol, unsigned blocks,
                     const void* params, std::string& wrong) {
  using Rows = cuda::aux::BackwardRowParams;
  using Bias = cuda::aux::BackwardBiasParams;
  const auto rows = [&](const char* name, void (*call)(const Rows&)) {
    return launch_as<Rows>(symbol == name, blocks, params, wrong, call);
  };
  const auto keys = [&](const char* name, void (*call)(const cuda::sm90::FinishKeysParams&)) {
    return launch_as<cuda::sm90::FinishKeysParams>(symbol == name, blocks, params, wrong, call);
  };
  const bool by_wgmma = row.stages == 0;
  const auto bias = [&](const char* name, void (*call)(const Bias&)) {
    return launch_as<Bias>(symbol == name, blocks, params, wrong, call);
  };
  return rows("prepare_rows_bf16", cuda::aux::prepare_rows<Dtype::bf16>) ||
         rows("prepare_rows_f16", cuda::aux::prepare_rows<Dtype::f16>) ||
         rows("finish_rows_bf16", by_wgmma ? cuda::sm90::finish_rows<Dtype::bf16>
                                           : cuda::mma::finish_rows<Dtype::bf16>) ||
         rows("finish_rows_f16", by_wgmma ? cuda::sm90::finish_rows<Dtype::f16>
                                          : cuda::mma::finish_rows<Dtype::f16>) ||
         rows("finish_mma_rows_bf16", cuda::mma::finish_rows<Dtype::bf16>) ||
         rows("finish_mma_rows_f16", cuda::mma::finish_rows<Dtype::f16>) ||
         keys("finish_keys_bf16", cuda::sm90::finish_keys<Dtype::bf16>) ||
         keys("finish_keys_f16", cuda::sm90::finish_keys<Dtype::f16>) ||
         rows("sum_sinks", cuda::aux::sum_sinks) || bias("begin_bias", cuda::aux::begin_bias) ||
         bias("finish_bias", cuda::aux::finish_bias) ||
         launch_any(symbol, blocks, params, wrong, std::make_index_sequence<kRows.size()>());
}

}  // namespace tessera::device
