// The kernels that decode, and the one that finds the prefixes which some of them share.
#include "kernels.h"

// What stands for the device comes before its code.
#include "decode_host.h"
#include "rows.h"

#include "cuda/symbol.h"

namespace tessera::device {
namespace {

/// Of Hopper's that share prefixes all kinds; one that does not, and one that widens. Of the
/// others' those with fewer warps, and with more stages, and one that widens; of head dims beyond
/// 256, of which two warps are a team or, of 8 bits, take values four times, one team and two, of
/// all; of Turing's the one that takes values twice.
constexpr bool chosen(const core::Kernel& row) {
  if (row.form != core::Form::decode || row.qv) return false;
  if (row.arch == Arch::sm80 && row.head_dim > 256) {
    if (core::widens(row)) return (row.block_n == 16) == (row.cached == Dtype::i8);
    return (row.block_n == 16) == (row.operand == core::Operand::bf16);
  }
  if (row.arch == Arch::sm75) return core::value_passes(row) > 1 && !core::widens(row);
  if (row.arch == Arch::sm80 && row.head_dim > 64) {
    if (core::widens(row)) return row.head_dim == 256 && row.cached == Dtype::e4m3;
    return row.block_n < 64 && (row.operand == core::Operand::bf16) == (row.head_dim == 128);
  }
  if (row.arch != Arch::sm90) return false;
  if (core::widens(row)) return row.head_dim == 64 && row.cached == Dtype::e4m3;
  const bool f16 = row.operand == core::Operand::f16;
  return row.prefixes ? f16 == (row.head_dim == 64) : f16 && row.head_dim == 128;
}

constexpr auto kRows = rows_of<count_of(chosen)>(chosen);

template <std::size_t kRow>
bool launch_if(const std::string& symbol, unsigned blocks, const void* params, std::string& wrong) {
  static constexpr core::Kernel kKernel = kRows[kRow];
  if (symbol != cuda::symbol_of(kKernel)) return false;
  const auto& p = *static_cast<const cuda::mma::DecodeParams*>(params);
  wrong = run(blocks, static_cast<unsigned>(core::decode_threads(kKernel)),
              static_cast<unsigned>(core::decode_bytes(kKernel)),
              [&p](char* shared) { cuda::mma::decode<kKernel>(p, shared); });
  return true;
}

template <std::size_t... kIndices>
bool launch_any(const std::string& symbol, unsigned blocks, const void* params, std::string& wrong,
                std::index_sequence<kIndices...> /*indices*/) {
  return (launch_if<kIndices>(symbol, blocks, params, wrong) || ...);
}

}  // namespace

std::span<const core::Kernel> decode_rows() { return kRows; }

bool launch_decode(const std::string& symbol, unsigned blocks, const void* params,
                   std::string& wrong) {
  if (symbol == "find_prefixes") {
    const auto& p = *static_cast<const cuda::aux::FindPrefixesParams*>(params);
    wrong = run(blocks, cuda::aux::kFindThreads, 0,
                [&p](char* /*shared*/) { cuda::aux::find_prefixes(p); });
    return true;
  }
  return launch_any(symbol, blocks, params, wrong, std::make_index_sequence<kRows.size()>());
}

}  // namespace tessera::device
