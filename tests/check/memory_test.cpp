// Memory is O(N): the workspace of every catalog row grows linearly with the sequence, and a long
// run's memory is far below that of one score matrix.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <set>
#include <vector>

#include "check/runs.h"
#include "plan/catalog.h"
#include "plan/names.h"

namespace tessera::tools {
namespace {

/// Workspace at seqlen 2n less that at n, for n, 2n, 4n, ...: linear if it only doubles.
TEST(Memory, WorkspaceGrowsLinearlyForEveryCatalogRow) {
  std::set<std::string> seen;
  for (const Arch arch : {Arch::portable, Arch::avx2, Arch::avx512, Arch::avx512_bf16}) {
    for (const char* text :
         {"fwd f32 h=8/2 d=64", "fwd bf16 h=8 d=128 causal", "fwd f16 b=4 h=2 d=40/80 bias=qk",
          "fwd bf16 h=8/2 d=128 q=1", "fwd f32 h=4 d=64 q=4", "fwd f32 h=32/2 d=64 q=2",
          "bwd f32 h=8/2 d=64", "bwd bf16 b=2 h=2 d=128 causal",
          "bwd f16 h=2 d=64 bias=qk dropout=0.1"}) {
      Problem problem = parse(text);
      const bool decode = problem.seqlen_q != 0;
      std::vector<double> bytes;
      for (std::int64_t n = 16384; n <= 1 << 20; n *= 2) {
        problem.seqlen_k = n;
        if (!decode) problem.seqlen_q = n;
        const Result<Plan> planned = plan(problem, device_with(arch, 4));
        ASSERT_TRUE(planned.ok()) << planned.status().text;
        seen.emplace(planned->kernel());
        bytes.push_back(static_cast<double>(planned->workspace_bytes()));
        const double per_row =
            bytes.back() / static_cast<double>(problem.rows_q() + problem.rows_k());
        const auto dims =
            static_cast<double>(problem.num_heads * (problem.head_dim + problem.head_dim_v));
        EXPECT_LT(per_row, 64 * dims) << to_string(problem) << " on " << planned->kernel();
      }
      for (std::size_t i = 2; i < bytes.size(); ++i) {
        EXPECT_LE(bytes[i] - bytes[i - 1], 2.1 * (bytes[i - 1] - bytes[i - 2]) + 65536.0)
            << to_string(problem) << " on " << to_string(arch);
      }
    }
  }
  for (const core::Kernel& row : kCatalog) {
    if (is_gpu(row.arch)) continue;
    EXPECT_TRUE(seen.contains(name_of(row))) << name_of(row) << " was never chosen here";
  }
}

std::int64_t peak_resident_bytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return std::int64_t{usage.ru_maxrss} * 1024;
}

/// One fp32 score matrix of 16k x 16k takes 1 GiB; the run must stay below a sixteenth of it.
TEST(Memory, SixteenThousandTokens) {
  if (kSanitized) GTEST_SKIP() << "sanitizers are slow and keep memory of their own";
  constexpr std::int64_t kTokens = 16384, kDim = 64;
  const std::vector<float> in(kTokens * kDim, 0.01F);
  std::vector<float> lse(kTokens), o(in.size()), dq(in.size()), dk(in.size()), dv(in.size());
  const std::int64_t before = peak_resident_bytes();
  Tensors t;
  const ConstTensor rows{in.data(), kTokens * kDim, kDim, kDim};
  const auto out = [](std::vector<float>& values) {
    return Tensor{values.data(), kTokens * kDim, kDim, kDim};
  };
  t.q = t.k = t.v = rows;
  t.o = out(o);
  t.softmax_lse = lse.data();
  Status status = attend(parse("fwd f32 q=16384 k=16384 d=64 causal"), t);
  ASSERT_TRUE(status.ok()) << status.text;
  EXPECT_LT(peak_resident_bytes() - before, std::int64_t{64} << 20);
  EXPECT_NEAR(static_cast<double>(o[o.size() - 1]), 0.01, 1e-6);
  t.dout = rows;
  t.dq = out(dq);
  t.dk = out(dk);
  t.dv = out(dv);
  status = attend(parse("bwd f32 q=16384 k=16384 d=64 causal"), t);
  ASSERT_TRUE(status.ok()) << status.text;
  EXPECT_LT(peak_resident_bytes() - before, std::int64_t{64} << 20);
}

}  // namespace
}  // namespace tessera::tools
