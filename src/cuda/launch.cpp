// From a plan and tensors to a launch: parameters, tensor maps, the row's kernel. Allocates nothing
// and waits for nothing; a kernel's code is loaded by its first launch.
#include <algorithm>
#include <array>
#include <bit>
#include <iterator>
#include <mutex>
#include <string>

#include "core/kernel.h"
#include "cuda/backend.h"
#include "cuda/code.h"
#include "cuda/context.h"
#include "cuda/driver.h"
#include "cuda/maps.h"
#include "cuda/sm90/params.h"
#include "cuda/sm90/shape.h"
#include "cuda/symbol.h"
#include "plan/catalog.h"

namespace tessera::cuda {
namespace {

/// A row's kernel on a device, once it is loaded there.
struct Loaded {
  std::once_flag once;
  Status status;
  CuFunction function = nullptr;
};

const Loaded& load(const core::Kernel& row, CuDevice device) {
  static std::array<std::array<Loaded, std::size(kCatalog)>, kMostDevices> all;
  const auto at = static_cast<std::size_t>(
      std::find(std::begin(kCatalog), std::end(kCatalog), row) - std::begin(kCatalog));
  Loaded& loaded = all[static_cast<std::size_t>(device) % kMostDevices][at];
  std::call_once(loaded.once, [&] {
    const std::string symbol = symbol_of(row);
    loaded.status = load_function(loaded.function, symbol, symbol.c_str(), sm90::shared_bytes(row));
  });
  return loaded;
}

Status make_maps(sm90::ForwardParams& params, const PlanData& plan, const Tensors& t) {
  const Problem& p = plan.problem;
  const core::Kernel& row = plan.kernel;
  const std::int64_t d = p.head_dim, dv = p.head_dim_v;
  Status status = make_map(params.q, "q", t.q, p, true, d, row.block_m, plan.packed_heads);
  if (status) status = make_map(params.k, "k", t.k, p, false, d, row.block_n, 1);
  if (status) status = make_map(params.v, "v", t.v, p, false, dv, row.block_n, 1);
  if (!status) return status;
  const auto unaligned = [](std::int64_t stride, std::int64_t size) {
    return size > 1 && stride % 8 != 0;
  };
  if (reinterpret_cast<std::uintptr_t>(t.o.data) % 16 != 0 ||
      unaligned(t.o.stride_seqlen, p.seqlen_q) || unaligned(t.o.stride_head, p.num_heads) ||
      unaligned(t.o.stride_batch, p.packed ? 1 : p.batch)) {
    return Status::invalid(std::string("o: must be aligned to 16 bytes, its strides multiples of 8 "
                                       "elements") +
                           kOrUnaligned);
  }
  return {};
}

sm90::ForwardParams::Source source_of(const ConstTensor& tensor, const Problem& p) {
  return {tensor.data,
          {p.packed ? 0 : tensor.stride_batch, tensor.stride_seqlen, tensor.stride_head}};
}

Status make_params(sm90::ForwardParams& params, const PlanData& plan, const Tensors& t) {
  const Problem& p = plan.problem;
  const core::Kernel& row = plan.kernel;
  if (row.any_layout) {
    params.q_source = source_of(t.q, p);
    params.k_source = source_of(t.k, p);
    params.v_source = source_of(t.v, p);
  } else if (Status s = make_maps(params, plan, t); !s) {
    return s;
  }
  params.o = t.o.data;
  params.o_strides = {p.packed ? 0 : t.o.stride_batch, t.o.stride_seqlen, t.o.stride_head};
  params.softmax_lse = t.softmax_lse;
  params.cu_seqlens_q = p.packed ? t.cu_seqlens_q : nullptr;
  params.cu_seqlens_k = p.packed ? t.cu_seqlens_k : nullptr;
  params.alibi_slopes = p.alibi == PerHead::none ? nullptr : t.alibi_slopes;
  params.alibi_per_batch = p.alibi == PerHead::batch_heads;
  params.sink = p.sink ? t.sink : nullptr;
  if (p.bias) {
    params.bias = t.bias.data;
    params.bias_dtype = p.bias->dtype;
    params.bias_batch = p.bias->batch ? t.bias.stride_batch : 0;
    params.bias_head = p.bias->heads ? t.bias.stride_head : 0;
    params.bias_query = p.bias->queries ? t.bias.stride_query : 0;
    params.bias_key = p.bias->keys ? t.bias.stride_key : 0;
  }
  params.score = plan.score;
  if (plan.score.capped) params.series = core::make_softcap_series(plan.score);
  params.dropout = core::make_dropout(p.dropout_p, t.philox_seed, t.philox_offset);
  params.window_left = p.window_left;
  params.window_right = p.window_right;
  params.alignment = p.alignment;
  params.lse_head = p.packed ? p.total_q : p.seqlen_q;
  params.rows.shift = std::countr_zero(static_cast<unsigned>(plan.packed_heads));
  params.heads = static_cast<int>(p.num_heads / plan.packed_heads);
  params.group = static_cast<int>(p.group() / plan.packed_heads);
  params.seqlen_q = static_cast<int>(p.seqlen_q);
  params.seqlen_k = static_cast<int>(p.seqlen_k);
  params.head_dim = static_cast<int>(p.head_dim);
  params.head_dim_v = static_cast<int>(p.head_dim_v);
  params.order = plan.order;
  return {};
}

}  // namespace

Status run(const PlanData& plan, const Tensors& tensors, void* /*workspace*/,
           const Execution& execution) {
  const Driver& d = driver();
  if (!d.available()) return Status::device(d.missing);
  if (plan.grid.count() == 0) return {};
  const CurrentContext context(plan.device.ordinal);
  if (!context.status()) return context.status();
  const Loaded& loaded = load(plan.kernel, context.device());
  if (!loaded.status) return loaded.status;
  sm90::ForwardParams params;
  if (Status s = make_params(params, plan, tensors); !s) return s;
  const auto blocks =
      static_cast<unsigned>(std::min<std::int64_t>(plan.grid.count(), plan.device.threads));
  const CuLaunchConfig config = {blocks,
                                 1,
                                 1,
                                 static_cast<unsigned>(sm90::threads(plan.kernel)),
                                 1,
                                 1,
                                 static_cast<unsigned>(sm90::shared_bytes(plan.kernel)),
                                 static_cast<CuStream>(execution.stream),
                                 nullptr,
                                 0};
  void* arguments[] = {&params};
  return d.check(d.launch_kernel(&config, loaded.function, arguments, nullptr), "cuLaunchKernelEx");
}

}  // namespace tessera::cuda
