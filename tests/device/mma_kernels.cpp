// The forward kernels of mma.sync.
#include "kernels.h"

// What stands for the device comes before its code.
#include "mma_host.h"
#include "rows.h"

#include "cuda/symbol.h"

namespace tessera::device {
namespace {

/// Of every kind one: warps of 32 rows and of 16, eight of them and four, two buffers and one,
/// queries in registers and not, a last chunk that is half full, keys of other columns than values;
/// two and four warps that share rows; a softcap, other extras, any layout. Of Turing's those
/// with 48 and with 16 keys a block.
constexpr bool chosen(const core::Kernel& row) {
  using enum core::Operand;
  if (row.arch == Arch::sm75 && row.pass == Pass::forward && row.extra == core::Extra::none) {
    return row.block_n == 48 || row.block_n == 16;
  }
  if (row.arch != Arch::sm80 || row.pass != Pass::forward || row.form != core::Form::tile) {
    return false;
  }
  const auto is = [&row](core::Operand operand, int head_dim, int head_dim_v, int block_m,
                         int tile_m, int block_n) {
    return row.operand == operand && row.head_dim == head_dim && row.head_dim_v == head_dim_v &&
           row.block_m == block_m && row.tile_m == tile_m && row.block_n == block_n;
  };
  if (row.extra == core::Extra::softcap) return is(bf16, 64, 64, 128, 32, 64);
  if (row.any_layout) return is(f16, 128, 128, 128, 16, 64) || is(f16, 512, 512, 64, 16, 32);
  if (row.extra == core::Extra::all) {
    return is(bf16, 64, 64, 128, 16, 64) || is(bf16, 512, 512, 64, 16, 32);
  }
  return is(f16, 64, 64, 128, 32, 64) || is(bf16, 96, 96, 128, 32, 64) ||
         is(bf16, 128, 128, 128, 32, 32) || is(bf16, 128, 128, 128, 16, 64) ||
         is(bf16, 192, 128, 128, 16, 64) || is(bf16, 256, 256, 64, 16, 64) ||
         is(f16, 256, 256, 128, 32, 64) || is(bf16, 384, 384, 64, 16, 64) ||
         is(bf16, 512, 512, 64, 32, 64);
}

constexpr auto kRows = rows_of<count_of(chosen)>(chosen);

template <std::size_t kRow>
bool launch_if(const std::string& symbol, unsigned blocks, const void* params, std::string& wrong) {
  static constexpr core::Kernel kKernel = kRows[kRow];
  if (symbol != cuda::symbol_of(kKernel)) return false;
  const auto& p = *static_cast<const cuda::mma::ForwardParams*>(params);
  wrong = run(blocks, static_cast<unsigned>(core::mma_threads(kKernel)),
              static_cast<unsigned>(core::mma_forward_bytes(kKernel)),
              [&p](char* shared) { cuda::mma::forward<kKernel>(p, shared); });
  return true;
}

template <std::size_t... kIndices>
bool launch_any(const std::string& symbol, unsigned blocks, const void* params, std::string& wrong,
                std::index_sequence<kIndices...> /*indices*/) {
  return (launch_if<kIndices>(symbol, blocks, params, wrong) || ...);
}

}  // namespace

std::span<const core::Kernel> mma_rows() { return kRows; }

bool launch_mma(const std::string& symbol, unsigned blocks, const void* params,
                std::string& wrong) {
  return launch_any(symbol, blocks, params, wrong, std::make_index_sequence<kRows.size()>());
}

}  // namespace tessera::device
