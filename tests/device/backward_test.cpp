// The backward kernels of mma.sync themselves, and those around them, on fibers of the host.
#include "core/storage.h"
#include "on_fibers.h"

namespace tessera::device {
namespace {

class BackwardOnFibers : public OnFibers {};

std::string backward_problem(const core::Kernel& row, std::mt19937& random) {
  const auto up_to = [&random](int low, int high) {
    return low + static_cast<int>(random() % static_cast<unsigned>(high - low + 1));
  };
  const bool wide = row.head_dim > 256;  // blocks of 32 keys at most, and slow
  const int heads_k = up_to(1, 2), group = up_to(1, wide ? 2 : 3);
  const int q = up_to(1, wide ? 100 : 200), k = up_to(1, wide ? 120 : 300);
  const int batch = up_to(1, 2), step = row.any_layout ? 3 : 8;
  const int dim = row.head_dim - (random() % 2 == 0 ? 0 : step);
  const int dim_v = row.head_dim_v - step * static_cast<int>(random() % 3);
  std::string text = std::string("bwd ") + to_string(core::dtype_of(row.operand)) +
                     " b=" + std::to_string(batch) + " h=" + std::to_string(heads_k * group) + "/" +
                     std::to_string(heads_k) + " q=" + std::to_string(q) +
                     " k=" + std::to_string(k) + " d=" + std::to_string(dim) + "/" +
                     std::to_string(dim_v) + " ";
  text += one_of(random, {"", "causal ", "causal ", "window=70,30 ", "window=0,5 ",
                          "align=tl causal ", "causal window=40,0 "});
  if (batch == 2 && random() % 2 == 0) {
    text +=
        "packed=" + std::to_string(q + up_to(0, q)) + "," + std::to_string(k + up_to(0, k)) + " ";
  }
  if (row.extra == core::Extra::all) {
    text += one_of(random, {"", "softcap=5 "}) + one_of(random, {"", "alibi=h ", "alibi=bh "}) +
            one_of(random, {"", "bias=qk ", "bias=bhqk:f32 ", "bias=hk "}) +
            one_of(random, {"", "dropout=0.3 "});
  }
  return text + one_of(random, {"", "scale=0.3 ", "scale=0.02 ", "scale=-0.1 "}) +
         one_of(random, {"", "sink "}) +
         (exchanges(row) ? "" : one_of(random, {"", "", "deterministic "}));
}

TEST_P(BackwardOnFibers, IsRight) { check_some(backward_problem); }

/// A slope of softcap is made of every score of a tile, those of another sequence's rows too.
class ExtrasOnFibers : public OnFibers {};

TEST_P(ExtrasOnFibers, SlopesOfALostSequenceReachNobody) {
  const core::Kernel& row = GetParam();
  const std::string text = std::string("bwd ") + to_string(core::dtype_of(row.operand)) +
                           " b=3 h=2/1 q=40 k=50 d=" + std::to_string(row.head_dim) + "/" +
                           std::to_string(row.head_dim_v) + " packed=80,100 softcap=5";
  const Result<Problem> p = parse_problem(text);
  ASSERT_TRUE(p.ok()) << p.status().text;
  const unsigned seed = std::random_device()();
  std::mt19937 random(seed);
  int ran = 0;
  for (int trial = 0; trial < 60 && ran < 4; ++trial) ran += check(*p, random()) ? 1 : 0;
  EXPECT_EQ(ran, 4) << "seed " << seed;
}

std::vector<core::Kernel> rows_with_extras() {
  std::vector<core::Kernel> rows;
  for (const core::Kernel& row : backward_rows()) {
    if (row.extra == core::Extra::all && !row.any_layout) rows.push_back(row);
  }
  return rows;
}

INSTANTIATE_TEST_SUITE_P(Rows, ExtrasOnFibers, testing::ValuesIn(rows_with_extras()), row_name);

INSTANTIATE_TEST_SUITE_P(Rows, BackwardOnFibers,
                         testing::ValuesIn(backward_rows().begin(), backward_rows().end()),
                         row_name);

}  // namespace
}  // namespace tessera::device
