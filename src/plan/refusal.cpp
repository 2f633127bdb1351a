// Why a row of the catalog does not take a problem on a device, in a sentence.
#include <limits>

#include "core/mma_shape.h"
#include "core/scales.h"
#include "core/storage.h"
#include "core/value_tiles.h"
#include "plan/gpu_facts.h"
#include "plan/names.h"
#include "plan/select.h"
#include "plan/shape.h"

namespace tessera {
namespace {

/// A row that decodes: few query rows.
std::string refused_rows(const Problem& problem, std::int64_t most) {
  const std::int64_t rows = rows_per_head_k(problem);
  if (rows > most) {
    return "takes at most " + std::to_string(most) +
           " query rows per key/value head; seqlen_q * num_heads / num_heads_k = " +
           std::to_string(rows);
  }
  if (problem.packed && problem.batch_invariant) {
    return "is chosen by the longest sequence of a packed batch, which batch_invariant forbids; "
           "use a dense problem";
  }
  return {};
}

/// What a cache's kernels know of masks, and others not.
std::string refused_mask(const Problem& problem) {
  const struct {
    bool given;
    const char* name;
  } extras[] = {{problem.chunk != 0, "chunk"},
                {problem.sink_tokens != 0, "sink_tokens"},
                {problem.tree, "tree"}};
  for (const auto& extra : extras) {
    if (extra.given) return std::string("takes no ") + extra.name;
  }
  return {};
}

/// A GPU's row whose tiles of query rows walk over the keys of a cache.
std::string refused_cache(const Problem& problem) {
  if (!problem.cache) return {};
  if (problem.packed && problem.batch_invariant) {
    return "is chosen by the longest sequence of a packed batch, which batch_invariant forbids; "
           "decoding rows take any number of queries";
  }
  const std::int64_t pages = problem.cache->num_pages;
  if (problem.cache->paged() && (pages == 0 || pages > std::numeric_limits<std::int32_t>::max())) {
    return "takes 1 to 2^31 - 1 pages; num_pages = " + std::to_string(pages);
  }
  return {};
}

std::string refused_second_query(const core::Kernel& row, const Problem& problem) {
  if (problem.qv == row.qv) return {};
  return row.qv ? "multiplies v by qv; the problem has none" : "takes no qv";
}

/// A row that knows of no scales.
std::string refused_scales(const Problem& problem) {
  if (!problem.scaled()) return {};
  return std::string("takes no tensors of 8 bits and their scales; k is ") +
         to_string(problem.stored_k());
}

/// What a GPU row asks of q and k of 8 bits and of their scales.
std::string refused_scores(const core::Kernel& row, const Problem& problem) {
  const Dtype dtype = core::score_dtype_of(row.operand), v = core::dtype_of(row.operand);
  if (problem.dtype != dtype || problem.stored_v() != v) {
    return std::string("takes q and k of ") + to_string(dtype) + " and v of " + to_string(v) +
           "; they are " + to_string(problem.dtype) + " and " + to_string(problem.stored_v());
  }
  if (problem.cache) return "takes no cache";
  const ScaleShape& scales = problem.scales;
  const std::int64_t keys = core::shares_scale(row) ? row.block_n
                            : dtype == Dtype::i8    ? core::kIntegerScaleKeys
                                                    : core::ValueTiles::kPanelKeys;
  if (scales.k == Scaling::block && scales.block_k % keys != 0) {
    return "takes blocks of " + std::to_string(keys) + " keys, or a multiple, for scales of k; " +
           "block_k = " + std::to_string(scales.block_k);
  }
  if (scales.k == Scaling::token || scales.v == Scaling::token) {
    return "takes no scales of k and v by token";
  }
  if (problem.stored_o() == Dtype::f32) return "writes o of 16 bits; the problem's o is f32";
  return {};
}

/// The same of v. Of rows the tiles are the kernel's own, with the columns that it wants.
std::string refused_values(const core::Kernel& row, const Problem& problem) {
  const int columns = core::ValueTiles::padded(static_cast<int>(problem.head_dim_v));
  if (problem.v_tiles && columns != row.head_dim_v) {
    return "takes tiles of " + std::to_string(row.head_dim_v) +
           " columns; head_dim_v = " + std::to_string(problem.head_dim_v) + " has " +
           std::to_string(columns);
  }
  const ScaleShape& scales = problem.scales;
  const int keys = core::keys_of_a_value_scale(row);
  if (scales.v == Scaling::block && scales.block_v % keys != 0) {
    return "takes blocks of " + std::to_string(keys) +
           " keys, or a multiple, for scales of v; block_v = " + std::to_string(scales.block_v);
  }
  return {};
}

/// A row whose o has the type of its inputs.
std::string refused_output_type(const core::Kernel& row, const Problem& problem) {
  if (problem.stored_o() == problem.dtype) return {};
  return std::string(row.pass == Pass::forward ? "writes" : "reads") + " o in the inputs' type, " +
         to_string(problem.dtype) + "; the problem's o is " + to_string(problem.stored_o());
}

std::string takes(const std::string& wanted, const std::string& given) {
  return "takes " + wanted + "; " + given;
}

/// Of a row that finds values as it finds keys.
constexpr const char* kNoTiles = "takes rows of v; they lie in tiles";

/// What a decoding row asks of a cache of 8 bits and of its scales.
std::string refused_cache_scales(const Problem& problem) {
  if (problem.v_tiles) return kNoTiles;
  const ScaleShape& s = problem.scales;
  for (const Scaling by : {s.k, s.v}) {
    if (by == Scaling::tensor || by == Scaling::head || by == Scaling::token) continue;
    return takes("scales of k and v by tensor, head or token",
                 std::string("some are by ") + to_string(by));
  }
  return s.score_shift || s.v_shift ? "takes no score_shift and no v_shift" : std::string();
}

/// What a GPU's decoding row that widens asks of a cache of 8 bits and of what is beside it.
std::string refused_cached(const core::Kernel& row, const Problem& problem) {
  if (problem.stored_k() != row.cached || problem.stored_v() != row.cached) {
    return takes(std::string("k and v of ") + to_string(row.cached),
                 std::string("they are ") + to_string(problem.stored_k()) + " and " +
                     to_string(problem.stored_v()));
  }
  if (problem.dtype != Dtype::bf16 && problem.dtype != Dtype::f16) {
    return takes("q of bf16 or f16", std::string("it is ") + to_string(problem.dtype));
  }
  return refused_cache_scales(problem);
}

/// The same of a row with qv, which widens v alone.
std::string refused_latent_values(const core::Kernel& row, const Problem& problem) {
  if (problem.v_tiles) return kNoTiles;
  if (is_scaled(problem.stored_k()) || problem.stored_v() != row.cached) {
    return takes(std::string("k of q's type and v of ") + to_string(row.cached),
                 std::string("they are ") + to_string(problem.stored_k()) + " and " +
                     to_string(problem.stored_v()));
  }
  const ScaleShape& s = problem.scales;
  if (s.v == Scaling::group && s.block_v % core::kScaledColumns != 0) {
    return takes("scales of v by groups of a multiple of " + std::to_string(core::kScaledColumns) +
                     " columns",
                 "block_v = " + std::to_string(s.block_v));
  }
  if (s.v == Scaling::block || s.v == Scaling::channel) {
    return takes("scales of v by tensor, head, token or group",
                 std::string("they are by ") + to_string(s.v));
  }
  return s.v_shift ? "takes no v_shift" : std::string();
}

/// The same of a CPU's, which widens what is 8 bits beside q of more.
std::string refused_cached(const Problem& problem) {
  if (!problem.scaled()) return {};
  if (is_scaled(problem.dtype)) {
    return takes("q of f32, bf16 or f16", std::string("it is ") + to_string(problem.dtype));
  }
  if (problem.stored_k() != problem.stored_v()) {
    return takes("k and v of one type", std::string("they are ") + to_string(problem.stored_k()) +
                                            " and " + to_string(problem.stored_v()));
  }
  return refused_cache_scales(problem);
}

/// A GPU's row that reads shared prefixes once. Where it is not taken, another reads them for every
/// sequence.
std::string refused_prefixes(const core::Kernel& row, const Problem& problem) {
  if (!row.prefixes) return {};
  if (!problem.cache || problem.cache->prefix_levels == 0) {
    return "looks for prefixes that sequences share; prefix_levels = 0";
  }
  const bool top_left = problem.alignment == Alignment::top_left &&
                        (problem.window_left >= 0 || problem.window_right >= 0);
  const struct {
    const char* name;
    bool there;
  } others[] = {
      {"cache.skips", problem.cache->skips},
      {"chunk", problem.chunk > 0},
      {"sink_tokens", problem.sink_tokens > 0},
      {"alibi", problem.alibi != PerHead::none},
      {"bias", problem.bias.has_value()},
      {"causal or window from the top left", top_left},
      {"batch_invariant", problem.batch_invariant},
  };
  for (const auto& [name, there] : others) {
    if (there) return std::string("takes no ") + name;
  }
  // A sequence with more rows reads its keys for so many that sharing them saves little.
  constexpr std::int64_t kMostRows = 64;
  return refused_rows(problem, kMostRows);
}

std::string refused_decoding(const core::Kernel& row, const Problem& problem) {
  if (problem.dropout_p > 0.0F) return "takes no dropout";
  if (std::string other = refused_prefixes(row, problem); !other.empty()) return other;
  // What no other row does it does for any number of rows, block by block.
  if (!problem.cache && !core::widens(row) && !row.qv && refused_mask(problem).empty()) {
    if (std::string other = refused_rows(problem, row.block_m); !other.empty()) return other;
  }
  const std::int64_t blocks = core::ceil_div<std::int64_t>(rows_per_head_k(problem), row.block_m);
  const std::int64_t keys =
      problem.batch * problem.num_heads_k *
      core::value_passes(row, static_cast<int>(problem.head_dim_v)) *
      core::max<std::int64_t>(blocks, 1) *
      (problem.seqlen_k + problem.sink_tokens + std::int64_t{2} * row.block_n);
  if (keys / row.block_n >= std::int64_t{1} << facts_of(row.arch).counted_bits) {
    return "counts up to 2^" + std::to_string(facts_of(row.arch).counted_bits) + " times " +
           std::to_string(row.block_n) +
           " keys of all sequences, heads and blocks of rows; there are up to " +
           std::to_string(keys);
  }
  return {};
}

/// A row by mma.sync runs on GPUs of several kinds, whose blocks may have more or less.
std::string refused_device(const core::Kernel& row, const Device& device) {
  if (row.stages == 0 || core::mma_blocks(row, device.l1_bytes) > 0) return {};
  return "takes " + std::to_string(core::mma_bytes(row)) +
         " bytes of shared memory a block; the device gives " + std::to_string(device.l1_bytes);
}

/// A row that is compiled when it is needed is for what no other row takes.
std::string refused_narrow(const core::Kernel& row, const Problem& problem) {
  constexpr std::int64_t kOthers = 256;
  if (!core::is_made_at_need(row)) return {};
  if (problem.head_dim > kOthers || problem.head_dim_v > kOthers) return {};
  return "is for head dims beyond " + std::to_string(kOthers) + ", as no build has its code; " +
         "head_dim = " + std::to_string(problem.head_dim) +
         ", head_dim_v = " + std::to_string(problem.head_dim_v);
}

/// A row whose blocks of threads exchange dS.
std::string refused_exchange(const core::Kernel& row, const Problem& problem) {
  constexpr int kNarrow = 192;  // other rows have less to multiply
  if (!exchanges(row)) return {};
  if (problem.head_dim <= kNarrow && problem.head_dim_v <= kNarrow) {
    return "is for head dims beyond " + std::to_string(kNarrow) +
           "; head_dim = " + std::to_string(problem.head_dim) +
           ", head_dim_v = " + std::to_string(problem.head_dim_v);
  }
  if (problem.deterministic || problem.batch_invariant) {
    return std::string("adds dQ in no order, which ") +
           (problem.deterministic ? "deterministic" : "batch_invariant") + " forbids";
  }
  return {};
}

/// What a GPU row asks for beyond its device.
std::string gpu_refusal(const core::Kernel& row, const Problem& problem) {
  const GpuFacts& facts = facts_of(row.arch);
  const bool scaled = is_scaled(core::score_dtype_of(row.operand));
  const bool widens = core::widens(row);
  if (!scaled) {
    const std::string other = !widens  ? refused_scales(problem)
                              : row.qv ? refused_latent_values(row, problem)
                                       : refused_cached(row, problem);
    if (!other.empty()) return other;
  }
  if (std::string other = refused_second_query(row, problem); !other.empty()) return other;
  if (row.form != core::Form::decode) {
    if (std::string other = refused_mask(problem); !other.empty()) return other;
    if (std::string other = refused_cache(problem); !other.empty()) return other;
  }
  if (std::string other = refused_narrow(row, problem); !other.empty()) return other;
  if (scaled ? !is_scaled(problem.dtype)
             : !(widens && !row.qv) && row.operand != core::operand_of(problem.dtype)) {
    const bool before_bf16 = row.arch == Arch::sm75 && problem.dtype == Dtype::bf16;
    return std::string("multiplies ") + to_string(row.operand) + "; the problem is " +
           to_string(problem.dtype) +
           (before_bf16 ? ", which GPUs before Ampere do not multiply: cast to fp16" : "");
  }
  std::string of_types = scaled ? refused_scores(row, problem) : refused_output_type(row, problem);
  if (of_types.empty() && row.operand == core::Operand::e4m3) {
    of_types = refused_values(row, problem);
  }
  if (!of_types.empty()) return of_types;
  if (row.form == core::Form::decode) {
    if (std::string other = refused_decoding(row, problem); !other.empty()) return other;
  }
  // A row without extras takes the maximum of raw products, so their factor must be positive.
  const bool turned = row.pass == Pass::forward && !(problem.scale() > 0.0F);
  const core::Extra extra = turned ? core::Extra::all : extra_of(problem);
  if (row.extra == core::Extra::none && extra != core::Extra::none) {
    return "takes no softcap, ALiBi, bias, dropout, and no softmax_scale <= 0";
  }
  if (row.extra == core::Extra::softcap && extra != core::Extra::softcap) {
    return "takes a softcap, but no ALiBi, bias, dropout, and no softmax_scale <= 0";
  }
  const struct {
    const char* name;
    std::int64_t value;
    int limit;
    Dtype dtype;
  } dims[] = {{"head_dim", problem.head_dim, row.head_dim, problem.stored_k()},
              {"head_dim_v", problem.head_dim_v, row.head_dim_v * core::value_passes(row),
               problem.stored_v()}};
  for (const auto& dim : dims) {
    const std::int64_t loaded = facts.load_bytes / size_of(dim.dtype);  // elements
    if (dim.value > dim.limit || (dim.value % loaded != 0 && !row.any_layout)) {
      return "takes " + (row.any_layout ? "head dims" : "multiples of " + std::to_string(loaded)) +
             " up to " + std::to_string(dim.limit) + "; " + dim.name + " = " +
             std::to_string(dim.value);
    }
  }
  if (std::string other = refused_exchange(row, problem); !other.empty()) return other;
  if (problem.unaligned && !row.any_layout) {
    return std::string("its ") + facts.loader + " takes addresses and strides that are multiples " +
           "of " + std::to_string(facts.load_bytes) + " bytes; the problem is unaligned";
  }
  const std::int64_t tiles = core::ceil_div<std::int64_t>(problem.seqlen_q, row.block_m) *
                             problem.num_heads * problem.batch;
  const std::int64_t key_tiles = row.pass == Pass::forward
                                     ? 0
                                     : core::ceil_div<std::int64_t>(problem.seqlen_k, row.block_n) *
                                           problem.num_heads_k * problem.batch;
  if (core::max(tiles, key_tiles) > std::int64_t{1} << facts.counted_bits) {
    return "counts up to 2^" + std::to_string(facts.counted_bits) + " tiles of " +
           std::to_string(tiles > key_tiles ? row.block_m : row.block_n) + " rows; there are " +
           std::to_string(core::max(tiles, key_tiles));
  }
  return {};
}

}  // namespace

std::string refusal(const core::Kernel& row, const Problem& problem, const Device& device) {
  if (is_gpu(row.arch) != is_gpu(device.arch)) {
    return is_gpu(row.arch) ? "runs on a GPU; the device is a CPU"
                            : "runs on a CPU; the device is a GPU";
  }
  if (!runs(device.arch, row.arch)) {
    return std::string("needs ") + to_string(row.arch) + "; the device has " +
           to_string(device.arch);
  }
  if (row.pass != problem.pass) {
    return row.pass == Pass::forward ? "computes the forward pass" : "computes the backward pass";
  }
  if (is_gpu(row.arch)) {
    std::string other = refused_device(row, device);
    return other.empty() ? gpu_refusal(row, problem) : other;
  }
  if (row.operand == core::Operand::bf16) {
    // Bytes of a cache are bf16 as exactly as they are fp32.
    const bool widens = row.form == core::Form::decode && problem.dtype == Dtype::bf16;
    for (const Dtype of : {problem.dtype, problem.stored_k(), problem.stored_v()}) {
      if (of == Dtype::bf16 || (widens && is_scaled(of))) continue;
      return std::string("multiplies bf16; q, k and v are ") + to_string(problem.dtype) + ", " +
             to_string(problem.stored_k()) + " and " + to_string(problem.stored_v());
    }
  }
  if (row.pass == Pass::backward) {
    if (std::string other = refused_scales(problem); !other.empty()) return other;
    std::string other = refused_mask(problem);
    return other.empty() ? refused_output_type(row, problem) : other;
  }
  if (row.form == core::Form::decode) {
    std::string other = refused_cached(problem);
    return other.empty() ? refused_rows(problem, row.block_m) : other;
  }
  return {};
}

}  // namespace tessera
