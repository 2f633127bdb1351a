// What a CPU's row costs.
#include "plan/cost.h"
#include "plan/shape.h"

namespace tessera {

double cpu_piece_cost(const PlanData& plan, double rows, double keys) {
  const Problem& p = plan.problem;
  const core::Kernel& row = plan.kernel;
  const double lanes = row.lanes;
  const double dims = static_cast<double>(p.score_dim() + p.head_dim_v);
  const double rate = 2.0 * lanes * (row.operand == core::Operand::bf16 ? 2.0 : 1.0);
  const double products = row.pass == Pass::forward ? 1.0 : 2.5;
  // Bytes a core reads from memory in a cycle, when all cores read at once.
  constexpr double kBytesPerCycle = 8.0;
  const double kv_bytes = static_cast<double>(key_and_value_bytes(p));
  const auto padded_to = [rows](int multiple) {
    return static_cast<double>(
        core::round_up<std::int64_t>(static_cast<std::int64_t>(rows), multiple));
  };

  if (row.form == core::Form::decode) {
    // Four rows are multiplied at a time; each score costs a share of a transposing reduction.
    const double compute = padded_to(4) * keys * (dims / rate * 1.3 + 4.0);
    return core::max(compute, keys * kv_bytes / kBytesPerCycle);
  }
  const double padded = padded_to(row.tile_m);
  const double visits = padded / row.block_m < 1.0 ? 1.0 : padded / row.block_m;
  const bool widens = row.operand == core::Operand::f32 && p.stored_v() != Dtype::f32;
  const double softmax = 6.0 / lanes;
  const double compute = padded * keys * (dims / rate * products + softmax) +
                         (widens ? visits * keys * dims * 2.0 / lanes : 0.0);
  return core::max(compute, visits * keys * kv_bytes / kBytesPerCycle);
}

double cpu_cost(const PlanData& plan) {
  const Problem& p = plan.problem;
  const double pairs = static_cast<double>(visible_pairs(p)) * static_cast<double>(p.group());
  const double rows = static_cast<double>(rows_per_head_k(p));
  const double keys = rows > 0 ? pairs / rows : 0;  // seen by an average row
  return cpu_piece_cost(plan, rows, keys) + 1000.0;
}

}  // namespace tessera
