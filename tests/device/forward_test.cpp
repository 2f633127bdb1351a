// The forward kernels themselves, those of latent attention too, on fibers of the host.
#include <algorithm>
#include <cmath>

#include "core/storage.h"
#include "on_fibers.h"

namespace tessera::device {
namespace {

class ForwardOnFibers : public OnFibers {};

/// The same for a row with qv, over a cache that lies anywhere.
std::string latent_problem(const core::Kernel& row, std::mt19937& random) {
  const auto up_to = [&random](int low, int high) {
    return low + static_cast<int>(random() % static_cast<unsigned>(high - low + 1));
  };
  const int batch = up_to(1, 3), q = up_to(1, 3), k = up_to(q, 300), heads_k = up_to(1, 2);
  const int heads = heads_k * up_to(1, row.block_m);
  std::string text = std::string("fwd ") + to_string(core::dtype_of(row.operand)) +
                     " b=" + std::to_string(batch) + " h=" + std::to_string(heads) + "/" +
                     std::to_string(heads_k) + " q=" + std::to_string(q) +
                     " k=" + std::to_string(k) + " ";
  // As in FlashMLA's rows, which may be what they lie in.
  const bool grouped = core::widens(row) && random() % 2 == 0;
  text += one_of(random, {"d=64/512 ", grouped ? "d=64/512 " : "d=16/256 ", "d=56/496 "}) + "qv ";
  if (core::widens(row)) {
    text += std::string("v=") + to_string(row.cached) + " scales=none/none/" +
            (grouped ? "group:128 " : one_of(random, {"tensor ", "head ", "token ", "group:256 "}));
  }
  text += one_of(random,
                 {grouped ? "cache=after " : "", "cache=full ", "cache=after ", "cache=before:1 "});
  const bool cached = text.find("cache") != std::string::npos;
  if (cached && random() % 2 == 0) {
    const int size = up_to(1, 70), pages = (k + size - 1) / size * batch;
    text += "pages=" + std::to_string(pages + 1) + "x" + std::to_string(size) +
            one_of(random, {" ", ":i64 ", ":skip ", ":i64:skip "});
  }
  if (cached) text += one_of(random, {"", "", "rows=4 "});
  if (text.find("skip") == std::string::npos) {
    if (cached) text += one_of(random, {"", "", "leftpad "});
    text += one_of(random, {"", "causal ", "window=50,0 ", "causal chunk=30 ", "sink_tokens=3 "});
    if (cached && random() % 4 == 0) text += "tree ";
  }
  return text + one_of(random, {"", "sink "}) + one_of(random, {"", "", "batch_invariant "}) +
         // Of far scores shifts are raised in later blocks, too.
         one_of(random, {"", "scale=0.02 ", "scale=1 "});
}

/// The same for a row that decodes, over pages that neighbours share.
std::string decode_problem(const core::Kernel& row, std::mt19937& random) {
  const auto up_to = [&random](int low, int high) {
    return low + static_cast<int>(random() % static_cast<unsigned>(high - low + 1));
  };
  // Where bits must not depend on the batch, parts are of split_n keys, whoever has them.
  const bool invariant = random() % 3 == 0;
  const int batch = up_to(1, invariant ? 3 : 12), q = up_to(1, 4), heads_k = up_to(1, 2);
  const int k = up_to(q, invariant ? 3 * row.split_n : 400);
  const int group = up_to(1, row.prefixes ? 64 / q : 16);
  const int size = up_to(1, 40), pages = (k + size - 1) / size * batch;
  int dim = row.head_dim, dim_v = row.head_dim_v * core::value_passes(row);
  if (core::mma_parts(row) > 1) {  // of a team's columns many may not exist
    dim = dim / 2 + 16 * up_to(1, dim / 32);
    dim_v = 16 * up_to(1, dim_v / 16);
  } else if (random() % 4 == 0) {
    dim_v -= core::widens(row) ? 16 : 8;
  }
  std::string text = std::string("fwd ") + to_string(core::dtype_of(row.operand)) +
                     " b=" + std::to_string(batch) + " h=" + std::to_string(heads_k * group) + "/" +
                     std::to_string(heads_k) + " q=" + std::to_string(q) +
                     " k=" + std::to_string(k) + " d=" + std::to_string(dim) + "/" +
                     std::to_string(dim_v) + " ";
  if (core::widens(row)) {
    text += std::string("kv=") + to_string(row.cached) + " scales=none/" +
            one_of(random, {"tensor/tensor ", "head/token ", "token/head "});
  }
  if (random() % 3 == 0) text += "packed=" + std::to_string(up_to(0, batch * q)) + " ";
  text += one_of(random, {"cache=full ", "cache=after ", "cache=after ", "cache=before:1 "});
  if (row.prefixes || random() % 3 != 0) {
    text += "pages=" + std::to_string(pages + 1) + "x" + std::to_string(size) +
            one_of(random, {" ", ":i64 "});
  }
  text += one_of(random, {"", "", "rows=4 "});
  if (row.prefixes) text += one_of(random, {"prefixes=1 ", "prefixes=2 ", "prefixes=4 "});
  text += one_of(random, {"", "causal ", "causal ", "window=50,0 ", "window=-1,2 "});
  if (random() % 4 == 0) text += "tree ";
  return text + one_of(random, {"", "sink "}) + one_of(random, {"", "", "leftpad "}) +
         one_of(random, {"", "softcap=20 "}) + one_of(random, {"", "scale=0.02 ", "scale=1 "}) +
         (invariant ? "batch_invariant " : "");
}

/// A problem for the row, of any kind that it takes.
std::string random_problem(const core::Kernel& row, std::mt19937& random) {
  if (row.qv) return latent_problem(row, random);
  if (row.form == core::Form::decode) return decode_problem(row, random);
  const auto up_to = [&random](int low, int high) {
    return std::to_string(low + static_cast<int>(random() % static_cast<unsigned>(high - low + 1)));
  };
  const Dtype scores = core::score_dtype_of(row.operand), values = core::dtype_of(row.operand);
  std::string text = std::string("fwd ") + to_string(scores) + " ";
  text += one_of(random, {"h=1 ", "h=2/1 ", "h=4/2 ", "h=8/1 "});
  // Of 8 bits sometimes so many keys that sums are promoted.
  const bool is_long = is_scaled(values) && random() % 3 == 0;
  const std::string longest_q = up_to(1, 200),
                    longest_k =
                        is_long ? up_to(800, core::shares_scale(row) ? 1900 : 1300) : up_to(1, 400);
  if (random() % 3 == 0) {
    text +=
        "b=2 q=" + longest_q + " k=" + longest_k + " packed=" + longest_q + "," + longest_k + " ";
  } else {
    text += "q=" + longest_q + " k=" + longest_k + " ";
  }
  const int step = is_scaled(scores) ? 16 : 8;
  const int narrow = row.head_dim_v > 64 ? row.head_dim_v - 16 : step;
  // Half of the columns is too few for tiles that are given, not for those that are made of rows.
  const int columns[] = {row.head_dim_v, row.head_dim_v, narrow, row.head_dim_v / 2};
  text += "d=" + std::to_string(row.head_dim - (random() % 2 == 0 ? 0 : step)) + "/" +
          std::to_string(columns[random() % 4]) + " ";
  text += one_of(random, {"", "causal ", "causal ", "window=70,30 ", "align=tl causal "});
  if (random() % 4 == 0) text += "sink ";
  if (row.extra == core::Extra::softcap) text += one_of(random, {"softcap=2 ", "softcap=40 "});
  if (!is_scaled(scores)) return text;
  text += one_of(random, {"", "", "scale=1 "}) + one_of(random, {"", "score_shift "});
  // Keys that share a scale, and those of v.
  const std::string own = "block:" + std::to_string(row.block_n);
  const bool shares = core::shares_scale(row);
  const char* const narrow_block = shares              ? own.c_str()
                                   : is_scaled(values) ? "block:32"
                                                       : "block:128";
  const char* const block = shares ? own.c_str() : is_scaled(values) ? "block:64" : "block:256";
  std::string scales = "scales=" + one_of(random, {"tensor", "head", "token"}) + "/" +
                       one_of(random, {"tensor", "head", narrow_block, block});
  if (!is_scaled(values)) return text + "v=" + to_string(values) + " " + scales + "/none";
  text += one_of(random, {"v_tiles ", ""}) + one_of(random, {"", "v_shift "}) +
          one_of(random, {"", "o=f16 "});
  return text + scales + "/" +
         one_of(random, {"tensor", "head", "channel", shares ? "block:768" : "block:192",
                         shares ? "block:1536" : "block:384"});
}

TEST_P(ForwardOnFibers, IsRight) { check_some(random_problem); }

/// Of a head's four tiles the last two have keys, and come first; every head has scales of its
/// own.
std::string sparse_problem(const core::Kernel& row, std::mt19937& random) {
  return "fwd e4m3 h=4 q=" + std::to_string(3 * row.block_m + 20) +
         " k=60 d=" + std::to_string(row.head_dim) + "/" + std::to_string(row.head_dim_v) +
         " causal scales=head/head/head" +
         (row.extra == core::Extra::softcap ? " softcap=40" : "") +
         one_of(random, {"", " v_tiles"});
}

/// What is said of the last tile with keys outlives those without any that follow it.
TEST_P(ForwardOnFibers, TilesWithoutKeysFollowOthers_S14) {
  if (GetParam().operand == core::Operand::e4m3) check_some(sparse_problem);
}

/// There may be none then.
TEST_P(ForwardOnFibers, WithoutKeysNoScaleIsRead_S14) {
  const core::Kernel& row = GetParam();
  const Dtype scores = core::score_dtype_of(row.operand), values = core::dtype_of(row.operand);
  if (!is_scaled(scores)) return;
  const std::uint64_t seed = std::random_device()() * 64 + 16;  // rows lie apart, aligned
  const std::string kind =
      is_scaled(values) ? "tensor" : std::string("none v=") + to_string(values);
  const Result<Problem> p = parse_problem(
      std::string("fwd ") + to_string(scores) + " h=2 q=9 k=0 d=" + std::to_string(row.head_dim) +
      "/" + std::to_string(row.head_dim_v) + " scales=tensor/tensor/" + kind +
      (row.extra == core::Extra::softcap ? " softcap=40" : ""));
  ASSERT_TRUE(p.ok()) << p.status().text;
  tools::RunMemory memory(*p, seed);
  Tensors tensors = memory.tensors();
  tensors.q_scale = tensors.k_scale = tensors.v_scale = {};
  const PlanData plan = plan_row(row, *p, gpu_);
  const tools::GuardedBuffer workspace(plan.workspace_bytes, 0);
  const Status status = cuda::run(plan, tensors, workspace.data(), {});
  ASSERT_TRUE(status.ok()) << status.text;
  EXPECT_EQ(wrong_, "");
  for (const double x : memory.output("o")) ASSERT_EQ(x, 0.0) << "seed " << seed;
}

class MmaOnFibers : public ForwardOnFibers {};

/// Of any kind, with pages mostly; skips: may skip some.
std::string cache_of(int seqlen_k, int batch, bool skips, std::mt19937& random) {
  const int size = 1 + static_cast<int>(random() % 80);
  std::string text = one_of(random, {"cache=full ", "cache=after ", "cache=before:1 "});
  if (random() % 4 != 0) {
    const int pages = (seqlen_k + size - 1) / size * batch + 1;
    text += "pages=" + std::to_string(pages) + "x" + std::to_string(size) +
            one_of(random, {":i32", ":i64"});
    if (skips && random() % 3 == 0) return text + ":skip ";
    text += " ";
  }
  return text + one_of(random, {"", "rows=4 "}) + one_of(random, {"", "", "leftpad "});
}

std::string mma_problem(const core::Kernel& row, std::mt19937& random) {
  const auto up_to = [&random](int low, int high) {
    return low + static_cast<int>(random() % static_cast<unsigned>(high - low + 1));
  };
  const int longest = row.head_dim > 256 ? 150 : 300;  // of wide rows a product takes long here
  const int heads_k = up_to(1, 2), group = up_to(1, 4);
  const int q = up_to(1, longest), k = up_to(1, longest), batch = up_to(1, 2);
  const int step = row.any_layout ? 3 : 8;
  const int dim = row.head_dim - (random() % 2 == 0 ? 0 : step);
  const int dim_v = row.head_dim_v - step * static_cast<int>(random() % 3);
  std::string text = std::string("fwd ") + to_string(core::dtype_of(row.operand)) +
                     " b=" + std::to_string(batch) + " h=" + std::to_string(heads_k * group) + "/" +
                     std::to_string(heads_k) + " q=" + std::to_string(q) +
                     " k=" + std::to_string(k) + " d=" + std::to_string(dim) + "/" +
                     std::to_string(dim_v) + " ";
  const std::string mask = one_of(random, {"", "causal ", "causal ", "window=70,30 ", "window=0,5 ",
                                           "align=tl causal ", "causal window=40,0 "});
  text += mask;
  if (random() % 2 == 0) {
    const bool skips = mask.empty() && row.extra != core::Extra::all;
    text += cache_of(k, batch, skips, random);
    if (random() % 3 == 0) text += "packed=" + std::to_string(up_to(0, batch * q)) + " ";
  } else if (batch == 2 && random() % 2 == 0) {
    text +=
        "packed=" + std::to_string(q + up_to(0, q)) + "," + std::to_string(k + up_to(0, k)) + " ";
  }
  if (row.extra == core::Extra::softcap) text += one_of(random, {"softcap=2 ", "softcap=40 "});
  if (row.extra == core::Extra::all) {
    text += one_of(random, {"", "softcap=5 "}) + one_of(random, {"", "alibi=h ", "alibi=bh "}) +
            one_of(random, {"", "bias=qk ", "bias=bhqk:f32 ", "bias=hk "}) +
            one_of(random, {"", "dropout=0.3 "}) + one_of(random, {"", "", "scale=-0.2 "});
  }
  if (text.find("scale") == std::string::npos) {
    text += one_of(random, {"", "scale=1 ", "scale=0.02 "});
  }
  return text + one_of(random, {"", "sink "});
}

TEST_P(MmaOnFibers, IsRight) { check_some(mma_problem); }

class LatentOnFibers : public OnFibers {};

/// A sequence's bits do not depend on what a block of threads has done before (batch_invariant):
/// few blocks have many sequences, of numbers of tiles that are even and odd.
TEST_P(LatentOnFibers, BitsDependOnNoOtherSequence_S9) {
  const core::Kernel& row = GetParam();
  const std::uint64_t seed = std::random_device()() * 64 + 16;  // lse is asked for, rows lie apart
  const std::string types = core::widens(row) ? " v=e4m3 scales=none/none/group:128" : "";
  const Result<Problem> p =
      parse_problem(std::string("fwd ") + to_string(core::dtype_of(row.operand)) + types +
                    " b=6 h=" + std::to_string(row.block_m) +
                    "/1 q=1 k=260 d=64/512 qv cache=after scale=0.1 batch_invariant" +
                    (seed / 64 % 2 == 0 ? "" : " pages=30x64:skip"));
  ASSERT_TRUE(p.ok()) << p.status().text;
  std::vector<double> outputs[2];
  for (const int blocks : {1, 40}) {
    gpu_.threads = blocks;
    tools::RunMemory memory(*p, seed);
    const PlanData plan = plan_row(row, *p, gpu_);
    const tools::GuardedBuffer workspace(plan.workspace_bytes, 0);
    const Status status = cuda::run(plan, memory.tensors(), workspace.data(), {});
    ASSERT_TRUE(status.ok()) << status.text;
    EXPECT_EQ(wrong_, "");
    std::vector<double>& all = outputs[blocks == 1 ? 0 : 1];
    for (const char* name : {"o", "softmax_lse"}) {
      ASSERT_TRUE(memory.has_output(name));
      const std::vector<double> numbers = memory.output(name);
      all.insert(all.end(), numbers.begin(), numbers.end());
    }
  }
  ASSERT_EQ(outputs[0].size(), outputs[1].size());
  int differ = 0;
  for (std::size_t i = 0; i < outputs[0].size(); ++i)
    differ += outputs[0][i] != outputs[1][i] ? 1 : 0;
  EXPECT_EQ(differ, 0) << "of " << outputs[0].size() << ", seed " << seed;
}

/// Pages that are blocks of keys, a quarter of which are skipped: those take no products, and what
/// is handed over goes on as if they did.
std::string skipping_problem(const core::Kernel& row, std::mt19937& random) {
  const int k = 450 + static_cast<int>(random() % 250);
  return std::string("fwd ") + to_string(core::dtype_of(row.operand)) +
         (core::widens(row) ? " v=e4m3 scales=none/none/group:128" : "") +
         " h=" + std::to_string(row.block_m) + "/1 q=1 k=" + std::to_string(k) +
         " d=64/512 qv cache=full pages=" + std::to_string((k + 63) / 64) + "x64:skip" +
         one_of(random, {"", " batch_invariant", " scale=1"});
}

TEST_P(LatentOnFibers, PassesOverSkippedBlocks_S13) { check_some(skipping_problem); }

/// Numbers of e4m3 have no infinity: as parts of a query it must not pass for a large number, which
/// what is below the other end of e4m3 would outweigh.
TEST_P(LatentOnFibers, AnInfiniteQueryMakesItsRowNan) {
  const core::Kernel& row = GetParam();
  if (!core::widens(row) || row.operand != core::Operand::bf16) return;  // exact otherwise
  // Rows lie apart, at multiples of 16 bytes.
  const std::uint64_t seed = std::random_device()() * 64 + 16;
  const Result<Problem> p =
      parse_problem("fwd bf16 v=e4m3 scales=none/none/group:128 h=" + std::to_string(row.block_m) +
                    "/1 q=1 k=70 d=64/512 qv cache=full");
  ASSERT_TRUE(p.ok()) << p.status().text;
  tools::RunMemory memory(*p, seed);
  const Tensors tensors = memory.tensors();
  constexpr std::uint16_t kInfinity = 0x7F80, kLow = 0xC47A;  // -1000
  auto* const query = static_cast<std::uint16_t*>(const_cast<void*>(tensors.qv.data));
  std::fill_n(query, 512, kLow);
  query[0] = kInfinity;
  constexpr std::uint8_t kOne = 0x38;
  auto* const values = static_cast<std::uint8_t*>(const_cast<void*>(tensors.v.data));
  for (int key = 0; key < 70; ++key) std::fill_n(values + key * tensors.v.stride_seqlen, 512, kOne);
  const PlanData plan = plan_row(row, *p, gpu_);
  const tools::GuardedBuffer workspace(plan.workspace_bytes, 0);
  const Status status = cuda::run(plan, tensors, workspace.data(), {});
  ASSERT_TRUE(status.ok()) << status.text;
  const std::vector<double> o = memory.output("o");
  for (std::size_t i = 0; i < o.size(); ++i) {
    ASSERT_EQ(std::isnan(o[i]), i < 512) << "element " << i << ", seed " << seed;
  }
}

/// Rows with qv.
std::vector<core::Kernel> latent_rows() {
  std::vector<core::Kernel> found(rows().begin(), rows().end());
  std::erase_if(found, [](const core::Kernel& row) { return !row.qv; });
  return found;
}

INSTANTIATE_TEST_SUITE_P(Rows, ForwardOnFibers, testing::ValuesIn(rows().begin(), rows().end()),
                         row_name);
INSTANTIATE_TEST_SUITE_P(Rows, LatentOnFibers, testing::ValuesIn(latent_rows()), row_name);
INSTANTIATE_TEST_SUITE_P(MmaRows, MmaOnFibers,
                         testing::ValuesIn(mma_rows().begin(), mma_rows().end()), row_name);
INSTANTIATE_TEST_SUITE_P(DecodeRows, ForwardOnFibers,
                         testing::ValuesIn(decode_rows().begin(), decode_rows().end()), row_name);

}  // namespace
}  // namespace tessera::device
