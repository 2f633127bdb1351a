// Tessera: exact attention, one tile at a time. The whole C++ API.
//
//   Problem --validate--> plan(Problem, Device) --> Plan --> run(Plan, Tensors, workspace,
//   Execution)
//
// plan() chooses a kernel and says what memory it needs; run() allocates nothing and touches no
// global state. attend() does both, with a workspace of its own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/append.hpp"
#include "tessera/buffer.hpp"
#include "tessera/code.hpp"
#include "tessera/device.hpp"
#include "tessera/executor.hpp"
#include "tessera/export.h"
#include "tessera/partial.hpp"
#include "tessera/problem.hpp"
#include "tessera/quantize.hpp"
#include "tessera/status.hpp"
#include "tessera/tensors.hpp"
#include "tessera/version.h"

namespace tessera {

struct PlanData;  // src/plan/plan.h

/// One named piece of the workspace. Counted in 64 bits wherever the plan is made: it may be for
/// another machine.
struct WorkspaceRegion {
  std::string name;          ///< what lies there
  std::uint64_t offset = 0;  ///< bytes from the start of the workspace
  std::uint64_t bytes = 0;   ///< its size
};

/// What plan() decided: an immutable value, cheap to copy, usable from several threads at once.
/// Never empty: only plan() makes one, and who moves from one copies it.
class TESSERA_API Plan {  // NOLINT(cppcoreguidelines-special-member-functions): see above
 public:
  /// Shares what was decided.
  /// @{
  Plan(const Plan&) = default;
  Plan& operator=(const Plan&) = default;
  /// @}

  /// What was asked for.
  const Problem& problem() const;
  /// What it was planned for.
  const Device& device() const;
  /// Name of the catalog row that will run, e.g. "cpu.avx512_bf16.forward.tile.bf16".
  std::string_view kernel() const;
  /// Bytes run() needs, to be aligned to workspace_alignment; 0 is possible. What no address of
  /// this machine reaches is the largest size_t.
  std::size_t workspace_bytes() const;
  /// What the workspace consists of.
  std::vector<WorkspaceRegion> workspace_regions() const;
  /// Every row of the catalog for devices of this kind (CPU, GPU) with its cost or the reason why
  /// it was refused, and the workspace.
  std::string explain() const;

  /// Bytes; the start of a workspace must be a multiple.
  static constexpr std::size_t workspace_alignment = 64;

  /// Internal.
  const PlanData& data() const { return *data_; }

 private:
  friend TESSERA_API Result<Plan> plan(const Problem& problem, const Device& device);
  explicit Plan(std::shared_ptr<const PlanData> data) : data_(std::move(data)) {}

  std::shared_ptr<const PlanData> data_;
};

/// How a run is executed; nothing here changes its result.
struct Execution {
  /// Null: default_executor(). Offers at most Device::threads workers' worth of parallelism.
  const Executor* executor = nullptr;
  /// Called now and then by one worker with done <= total (work items); must be quick.
  void (*progress)(void* context, std::int64_t done, std::int64_t total) = nullptr;
  void* progress_context = nullptr;  ///< passed to progress
  void* stream = nullptr;            ///< GPU: the CUstream to enqueue on; null: the default stream
  /// attend, combine, append and quantize, of a device: tensors lie where it reaches them, for
  /// sure. Else the driver is asked about each of them.
  bool places_known = false;
};

/// Chooses the cheapest kernel of the device that accepts the problem.
/// Errors: invalid (the problem, device.threads), unsupported (no row accepts it; the text gives
/// the reason of each row for devices of this kind).
TESSERA_API Result<Plan> plan(const Problem& problem, const Device& device);

/// The table of every catalog row for devices of this kind (CPU, GPU) with cost or refusal, even
/// when none accepts.
TESSERA_API std::string explain(const Problem& problem, const Device& device);

/// Computes. `workspace`: workspace_bytes() bytes, aligned to 64, uninitialised, used by one run at
/// a time. On a GPU all pointers are device memory, the work is enqueued and not waited for, and
/// cu_seqlens are not looked at. Errors: invalid (a tensor), workspace (too small, misaligned),
/// device (this machine cannot execute the plan's instruction set, or the driver's own error).
TESSERA_API Status run(const Plan& plan, const Tensors& tensors, void* workspace,
                       std::size_t workspace_bytes, const Execution& execution = {});

/// Plans for the device and runs with a workspace of its own. Without a device it is the one that q
/// lies on (k, and so on, where q has no elements): the GPU of device or managed memory, else this
/// CPU. A GPU takes its own and managed memory, a CPU the host's, pinned or not, and managed
/// memory. On a GPU the workspace comes from the driver in the order of execution.stream: as in
/// run() nothing is waited for. Where tensors need it the problem is planned as unaligned. Errors:
/// as plan() and run(); invalid (a tensor that lies elsewhere).
/// @{
TESSERA_API Status attend(const Problem& problem, const Tensors& tensors, const Device& device,
                          const Execution& execution = {});
TESSERA_API Status attend(const Problem& problem, const Tensors& tensors,
                          const Execution& execution = {});
/// @}

/// Merges partial results (S7): o = sum over the splits of exp(lse_part - lse) * o_part, with lse
/// the logarithm of the sum of exp(lse_part); o = 0 and lse = -inf where every part has -inf (S4).
/// NaN in a part's lse makes its row NaN. A row's parts are added in the order of the splits: the
/// same call gives the same bits, on a CPU with any number of threads. Without a device it is the
/// one that o_parts lies on; as in attend() tensors must lie where the device can reach them.
/// Allocates nothing; on a GPU the work is enqueued and not waited for. Errors: invalid (a size, a
/// tensor), device.
/// @{
TESSERA_API Status combine(const PartialResults& results, const PartialTensors& tensors,
                           const Device& device, const Execution& execution = {});
TESSERA_API Status combine(const PartialResults& results, const PartialTensors& tensors,
                           const Execution& execution = {});
/// @}

/// Writes new keys and values into a cache and rotates keys and queries by their positions (S13).
/// Into a cache of 8 bits it writes what quantize() makes of the rows, bit for bit, on every
/// device, and scales by token (S14); a GPU takes head dims up to 256 there. Every new row is
/// written once. A sequence of a negative length is left alone, and so is one of length 0 where
/// lengths are `after`: its rows go nowhere, and its queries are copied. On a CPU what has no slot,
/// page, row or position is an error; on a GPU, where nothing of it is looked at before, a new row
/// without a slot is not written, and a row without a position is copied. Without a device it is
/// the one that the cache lies on; as in attend() tensors must lie where the device can reach them.
/// Allocates nothing; on a GPU it is one kernel, enqueued and not waited for. Errors: invalid (a
/// size, a tensor), unsupported (what no GPU kernel does), device.
/// @{
TESSERA_API Status append(const AppendShape& shape, const AppendTensors& tensors,
                          const Device& device, const Execution& execution = {});
TESSERA_API Status append(const AppendShape& shape, const AppendTensors& tensors,
                          const Execution& execution = {});
/// @}

/// Makes 8-bit tensors of a problem, and their scales, of tensors of 16 or 32 bits (S14). q:
/// (batch, seqlen_q, num_heads, head_dim), k and v: (batch, seqlen_k, num_heads_k, ..), any
/// strides, or packed; each may be left out. Every device gives the same elements and scales, bit
/// for bit, but for score_shift, a sum in any order. What a row or block is rounded to depends on
/// that row or block only. A NaN becomes one in e4m3 and 0 in i8, and does not count in a scale;
/// infinity becomes the largest element. Without a device it is the one that q lies on (k, v); as
/// in attend() tensors must lie where the device can reach them. Allocates nothing; on a GPU it is
/// one kernel, enqueued and not waited for, that takes head dims up to 256. Not run on a GPU yet.
/// On a CPU a row without a position in the rotary tables is an error; a GPU does not rotate it.
/// Errors: invalid (a size, a tensor), unsupported (what no GPU kernel does), device.
/// @{
TESSERA_API Status quantize(const QuantizeShape& shape, const QuantizeTensors& tensors,
                            const Device& device, const Execution& execution = {});
TESSERA_API Status quantize(const QuantizeShape& shape, const QuantizeTensors& tensors,
                            const Execution& execution = {});
/// @}

/// Which weights dropout keeps in every run of the problem with this philox_seed and philox_offset,
/// on any device (S8). `keep`: (batch, num_heads, seqlen_q, seqlen_k) bytes of host memory,
/// contiguous, 1 where a weight is kept; packed: seqlen_q and seqlen_k are the longest sequences',
/// and each sequence counts from 0. For tests and displays: the mask is as large as the matrix that
/// kernels never hold. Errors: invalid (the problem, keep).
TESSERA_API Status dropout_mask(const Problem& problem, std::uint64_t seed, std::uint64_t offset,
                                std::uint8_t* keep);

/// What a machine reaches in simple loops; per second, all workers together.
struct Peaks {
  double f32_flops = 0.0;   ///< fp32 multiply-adds in registers, two operations each; GPU: 0
  double bf16_flops = 0.0;  ///< bf16 products (GPU: tensor cores); 0: no such instruction
  double read_bytes = 0.0;  ///< plain reads of memory
};

/// Measures them on this machine for about `seconds` each, with the device's instruction set and at
/// most device.threads workers; on a GPU with a buffer of 1 GiB. Clocks drift: measure beside
/// whatever is compared with the result. Errors: device (this machine cannot execute the device's
/// instruction set).
TESSERA_API Result<Peaks> measure_peaks(const Device& device, double seconds,
                                        const Executor* executor = nullptr);

/// Whether this machine, with this build, can run the kernel of that name (Plan::kernel()): the
/// instruction set or a GPU of its architecture is there, and so is its machine code.
TESSERA_API bool runs_here(std::string_view kernel);

/// Of the library: "MAJOR.MINOR.PATCH", as version.h has them of the headers.
TESSERA_API const char* version();

}  // namespace tessera
