#include "kernels.h"

// What stands for the device comes before its code.
#include "forward_host.h"
#include "rows.h"

#include "cuda/symbol.h"

namespace tessera::device {
namespace {

constexpr bool is(const core::Kernel& row, core::Operand operand, int head_dim, int head_dim_v,
                  int block_m, core::Extra extra) {
  return row.arch == Arch::sm90 && row.pass == Pass::forward && row.form == core::Form::tile &&
         !row.any_layout && row.operand == operand && row.head_dim == head_dim &&
         row.head_dim_v == head_dim_v && row.block_m == block_m && row.extra == extra;
}

/// Of every kind one: two and three warpgroups, held queries, one buffer of queries, two wgmmas a
/// panel, a softcap, scores of integers, pairs of blocks; and rows of 16 bits, which show that what
/// is known to be right is found right; and rows with qv.
constexpr bool chosen(const core::Kernel& row) {
  using enum core::Operand;
  if (row.qv) return row.operand == bf16 || row.block_m == 16;
  constexpr core::Extra kNone = core::Extra::none, kSoftcap = core::Extra::softcap;
  return is(row, bf16, 64, 64, 128, kNone) || is(row, bf16, 64, 64, 192, kSoftcap) ||
         is(row, e4m3, 64, 64, 128, kNone) || is(row, e4m3, 64, 64, 192, kNone) ||
         is(row, e4m3, 128, 128, 128, kNone) || is(row, e4m3, 128, 128, 192, kNone) ||
         is(row, e4m3, 192, 128, 128, kNone) || is(row, e4m3, 256, 256, 128, kNone) ||
         is(row, e4m3, 64, 64, 128, kSoftcap) || is(row, i8_bf16, 64, 64, 192, kNone) ||
         is(row, i8_f16, 128, 128, 128, kNone) || is(row, i8_bf16, 192, 192, 128, kNone) ||
         (row.cluster > 1 && row.pass == Pass::forward && row.operand == bf16) ||
         is(row, i8_bf16, 128, 128, 128, kSoftcap);
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
        if constexpr (kKernel.qv) {
          const auto& p = *static_cast<const cuda::mma::DecodeParams*>(params);
          cuda::sm90::latent<kKernel>(p, shared);
        } else {
          const auto& p = *static_cast<const cuda::sm90::ForwardParams*>(params);
          cuda::sm90::forward<kKernel>(p, shared);
        }
      },
      kKernel.cluster);
  return true;
}

template <std::size_t... kIndices>
std::string launch_any(const std::string& symbol, unsigned blocks, const void* params,
                       std::index_sequence<kIndices...> /*indices*/) {
  std::string wrong;
  const bool found = (launch_if<kIndices>(symbol, blocks, params, wrong) || ...);
  return found ? wrong : symbol + " is not compiled for fibers";
}

}  // namespace

std::span<const core::Kernel> rows() { return kRows; }

std::string launch(const core::Kernel& row, const std::string& symbol, unsigned blocks,
                   const void* params) {
  if (symbol == "lay_values") {
    const auto& p = *static_cast<const cuda::aux::LayValuesParams*>(params);
    return run(blocks, cuda::aux::kLayThreads, 0,
               [&p](char* /*shared*/) { cuda::aux::lay_values(p); });
  }
  if (symbol == "keep_pages") {
    const auto& p = *static_cast<const cuda::aux::KeepPagesParams*>(params);
    return run(blocks, cuda::aux::kKeepThreads, 0,
               [&p](char* /*shared*/) { cuda::aux::keep_pages(p); });
  }
  std::string wrong;
  if (launch_decode(symbol, blocks, params, wrong)) return wrong;
  if (launch_mma(symbol, blocks, params, wrong)) return wrong;
  if (launch_backward(row, symbol, blocks, params, wrong)) return wrong;
  return launch_any(symbol, blocks, params, std::make_index_sequence<kRows.size()>());
}

}  // namespace tessera::device
