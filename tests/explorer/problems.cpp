#include "explorer/problems.h"

#include "check/problems.h"
#include "check/random.h"

namespace tessera::explorer {
namespace {

/// The same problem with longer sequences, in the type that GPUs multiply.
Problem enlarged(Problem p, std::int64_t factor) {
  p.seqlen_k *= factor;
  p.total_k *= factor;
  if (!p.tree) {
    p.seqlen_q *= factor;
    p.total_q *= factor;
  }
  if (p.cache) p.cache->page_size *= factor;
  if (p.dtype == Dtype::f32) {
    p.dtype = Dtype::bf16;
    p.dtype_o.reset();
  }
  return p;
}

}  // namespace

std::vector<Problem> random_problems(std::uint64_t seed, std::int64_t count, std::int64_t largest) {
  tools::Random random(seed, 2);
  std::vector<Problem> problems;
  for (const tools::Case& item : tools::cases(seed, count, Arch::avx512_bf16)) {
    const Problem large = enlarged(item.problem, random.next_between(1, largest));
    const bool as_it_is = random.next_between(0, 1) == 0 || !validate(large).ok();
    problems.push_back(as_it_is ? item.problem : large);
  }
  return problems;
}

}  // namespace tessera::explorer
