// The one-line form of a problem: what is printed reads back equal, and what cannot be read is
// named.
#include "tessera/problem.hpp"

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <unordered_set>

namespace tessera {
namespace {

/// A random problem, valid or not: the text form must carry any value.
Problem random_problem(std::mt19937& random) {
  const auto number = [&random](std::int64_t high) {
    return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(high));
  };
  const auto coin = [&random] { return random() % 2 == 0; };
  Problem p;
  p.pass = coin() ? Pass::forward : Pass::backward;
  p.dtype = static_cast<Dtype>(number(kDtypes));
  p.batch = number(100);
  p.num_heads_k = 1 + number(8);
  p.num_heads = p.num_heads_k * (1 + number(8));
  p.seqlen_q = number(100000);
  p.seqlen_k = coin() ? p.seqlen_q : number(100000);
  p.head_dim = 1 + number(512);
  p.head_dim_v = coin() ? p.head_dim : 1 + number(512);
  if (coin()) {
    p.packed = true;
    p.total_q = number(1000000);
    p.total_k = number(1000000);
  }
  if (coin()) {
    p.cache = CacheShape{static_cast<Lengths>(number(3)),
                         number(20),
                         coin() ? number(300) : 0,
                         number(1000),
                         coin() ? PageIds::i32 : PageIds::i64,
                         number(50),
                         coin()};
  }
  if (coin()) p.chunk = number(5000);
  if (coin()) p.sink_tokens = number(10);
  p.tree = coin();
  p.qv = coin();
  std::uniform_real_distribution<float> real(-3.0F, 3.0F);
  if (coin()) p.softmax_scale = real(random);
  if (coin()) p.softcap = real(random);
  if (coin()) p.window_left = number(1000);
  if (coin()) p.window_right = number(3);
  if (coin()) p.alignment = Alignment::top_left;
  p.alibi = static_cast<PerHead>(number(3));
  if (coin()) p.bias = BiasShape{coin(), coin(), coin(), coin(), static_cast<Dtype>(number(3))};
  p.sink = coin();
  if (coin()) p.dropout_p = real(random);
  p.deterministic = coin();
  p.batch_invariant = coin();
  p.unaligned = coin();
  if (coin()) p.dtype_o = static_cast<Dtype>(number(kDtypes));
  if (coin()) p.dtype_v = static_cast<Dtype>(number(kDtypes));
  if (coin()) p.dtype_kv = static_cast<Dtype>(number(kDtypes));
  if (coin()) {
    const auto scaling = [&] { return static_cast<Scaling>(number(7)); };
    p.scales = {scaling(), scaling(), scaling(), 0, 0, coin(), coin()};
    const auto sized = [&](Scaling by) { return by == Scaling::block || by == Scaling::group; };
    if (sized(p.scales.k) || coin()) p.scales.block_k = number(200);
    if (sized(p.scales.v) || coin()) p.scales.block_v = number(200);
  }
  return p;
}

TEST(ProblemText, PrintThenParseIsTheIdentity) {
  const unsigned seed = std::random_device()();
  std::mt19937 random(seed);
  for (int trial = 0; trial < 5000; ++trial) {
    const Problem problem = random_problem(random);
    const std::string text = to_string(problem);
    const Result<Problem> back = parse_problem(text);
    ASSERT_TRUE(back.ok()) << "seed " << seed << ": " << text << ": " << back.status().text;
    ASSERT_EQ(*back, problem) << "seed " << seed << ": " << text << " came back as "
                              << to_string(*back);
    ASSERT_EQ(std::hash<Problem>()(*back), std::hash<Problem>()(problem));
  }
}

TEST(ProblemText, DifferentProblemsPrintDifferently) {
  const unsigned seed = std::random_device()();
  std::mt19937 random(seed);
  std::unordered_set<std::string> texts;
  std::unordered_set<Problem> problems;
  std::unordered_set<std::size_t> hashes;
  for (int trial = 0; trial < 2000; ++trial) {
    const Problem problem = random_problem(random);
    texts.insert(to_string(problem));
    problems.insert(problem);
    hashes.insert(std::hash<Problem>()(problem));
  }
  EXPECT_EQ(texts.size(), problems.size()) << "seed " << seed;
  // Two of 2,000 random numbers of 64 bits are the same once in 10^13 runs.
  EXPECT_EQ(hashes.size(), problems.size()) << "seed " << seed;
}

TEST(ProblemText, TheDocumentedForms) {
  const auto text = "bwd bf16 b=2 h=8/2 q=1024 k=4096 d=192/128 causal softcap=30 alibi=bh sink";
  const Result<Problem> parsed = parse_problem(text);
  ASSERT_TRUE(parsed.ok()) << parsed.status().text;
  EXPECT_EQ(to_string(*parsed), text);
  EXPECT_EQ(parsed->num_heads, 8);
  EXPECT_EQ(parsed->num_heads_k, 2);
  EXPECT_EQ(parsed->head_dim_v, 128);
  EXPECT_TRUE(parsed->causal());

  const Result<Problem> window = parse_problem("  q=5\tk=7 d=8 window=128,0 bias=1 align=tl ");
  ASSERT_TRUE(window.ok()) << window.status().text;
  EXPECT_EQ(window->window_left, 128);
  EXPECT_FALSE(window->causal());
  ASSERT_TRUE(window->bias.has_value());
  EXPECT_FALSE(window->bias->batch || window->bias->heads || window->bias->queries ||
               window->bias->keys);
}

TEST(ProblemText, CachesAsDocumented_S13) {
  const auto text =
      "fwd bf16 b=8 h=32/8 q=4 k=4096 d=128 packed=20 cache=before:4 pages=900x16:i64 rows=64 "
      "prefixes=2 leftpad causal chunk=8192 sink_tokens=4 tree";
  const Result<Problem> parsed = parse_problem(text);
  ASSERT_TRUE(parsed.ok()) << parsed.status().text;
  EXPECT_EQ(to_string(*parsed), text);
  EXPECT_EQ(parsed->cache->seqlen_new, 4);
  EXPECT_EQ(parsed->cache->num_pages, 900);
  EXPECT_EQ(parsed->cache->page_size, 16);
  EXPECT_EQ(parsed->cache->prefix_levels, 2);
  Problem plain = *parsed;
  plain.cache->prefix_levels = 0;
  EXPECT_NE(std::hash<Problem>()(plain), std::hash<Problem>()(*parsed));
  const Result<Problem> slots = parse_problem("q=1 k=7 d=8 pages=9x1");
  ASSERT_TRUE(slots.ok()) << slots.status().text;
  EXPECT_EQ(slots->cache->lengths, Lengths::after);
}

TEST(ProblemText, ScalesAsDocumented_S14) {
  const auto text =
      "fwd e4m3 b=2 h=8/2 q=5 k=7 d=64 o=f16 scales=token/block:64/channel score_shift v_shift "
      "v_tiles";
  const Result<Problem> parsed = parse_problem(text);
  ASSERT_TRUE(parsed.ok()) << parsed.status().text;
  EXPECT_EQ(to_string(*parsed), text);
  EXPECT_EQ(parsed->dtype, Dtype::e4m3);
  EXPECT_EQ(parsed->scales.block_k, 64);
  EXPECT_EQ(parsed->scales.v, Scaling::channel);
  const Result<Problem> wide = parse_problem("i8 q=5 k=7 d=64 scales=head/tensor/none v=f16");
  ASSERT_TRUE(wide.ok()) << wide.status().text;
  EXPECT_EQ(wide->stored_v(), Dtype::f16);
  EXPECT_EQ(wide->stored_o(), Dtype::f16);
}

TEST(ProblemText, ASecondQueryAsDocumented_S12) {
  const auto text = "fwd bf16 b=8 h=16/1 q=1 k=4096 d=64/512 cache=after pages=900x64 causal qv";
  const Result<Problem> parsed = parse_problem(text);
  ASSERT_TRUE(parsed.ok()) << parsed.status().text;
  EXPECT_EQ(to_string(*parsed), text);
  EXPECT_TRUE(parsed->qv);
  EXPECT_EQ(parsed->score_dim(), 576);
  EXPECT_FLOAT_EQ(parsed->scale(), 1.0F / 24.0F);
  Problem without = *parsed;
  without.qv = false;
  EXPECT_FLOAT_EQ(without.scale(), 0.125F);
  EXPECT_NE(std::hash<Problem>()(without), std::hash<Problem>()(*parsed));
}

/// A window beside causal: the order of the words means nothing.
TEST(ProblemText, CausalWithAWindowToTheLeft) {
  for (const char* text : {"causal window=128,-1", "window=128,-1 causal", "causal window=128,0",
                           "window=128,0 causal", "window=128,0"}) {
    const Result<Problem> problem = parse_problem(text);
    ASSERT_TRUE(problem.ok()) << text << ": " << problem.status().text;
    EXPECT_EQ(problem->window_left, 128) << text;
    EXPECT_EQ(problem->window_right, 0) << text;
  }
}

TEST(ProblemText, WhatCannotBeReadIsNamed) {
  const struct {
    const char* text;
    const char* named;
  } cases[] = {
      {"fwd f33", "'f33'"},
      {"q=", "'q='"},
      {"q=12x", "'q=12x'"},
      {"q=99999999999999999999", "q=SEQLEN_Q"},
      {"h=8/", "h=NUM_HEADS"},
      {"h=8,2", "h=NUM_HEADS"},
      {"packed=5", "TOTAL_Q,TOTAL_K"},
      {"packed=x cache=full", "TOTAL_Q,TOTAL_K"},
      {"cache=", "cache=full"},
      {"cache=before", "before:SEQLEN_NEW"},
      {"cache=before:", "before:SEQLEN_NEW"},
      {"cache=later:2", "cache=full"},
      {"pages=5", "NUM_PAGESxPAGE_SIZE"},
      {"pages=5x", "NUM_PAGESxPAGE_SIZE"},
      {"pages=5x16:i16", "NUM_PAGESxPAGE_SIZE"},
      {"rows=", "rows=ROWS"},
      {"scale=nan", "SOFTMAX_SCALE"},
      {"softcap=inf", "softcap=CAP"},
      {"window=1", "LEFT,RIGHT"},
      {"align=center", "align=br"},
      {"alibi=q", "alibi=h"},
      {"bias=bx", "bhqk"},
      {"bias=bb", "bhqk"},
      {"bias=", "bhqk"},
      {"bias=b:f64", "bhqk"},
      {"q=1 q=2", "once"},
      {"fwd bwd", "one of fwd, bwd"},
      {"f32 causal bf16", "one of f32, bf16, f16"},
      {"e4m3 bf16", "one of f32, bf16, f16, e4m3, i8"},
      {"v=f64", "v=bf16 or v=f16"},
      {"scales=head", "scales=Q/K/V"},
      {"scales=head/head", "scales=Q/K/V"},
      {"scales=head/block/head", "scales=Q/K/V"},
      {"scales=head/block:x/head", "scales=Q/K/V"},
      {"scales=token:5/head/head", "scales=Q/K/V"},
      {"scales=head/head/rows", "scales=Q/K/V"},
      {"causal window=128,64", "beside causal"},
      {"window=128,64 causal", "beside causal"},
      {"causal window=4,-2", "beside causal"},
      {"sink=1", "'sink=1'"},
      {"o=f64", "o=f32, o=bf16 or o=f16"},
      {"o=f32 o=f16", "once"},
      {"=", "'='"},
  };
  for (const auto& c : cases) {
    const Result<Problem> parsed = parse_problem(c.text);
    ASSERT_FALSE(parsed.ok()) << c.text;
    EXPECT_EQ(parsed.status().code, Code::invalid);
    EXPECT_NE(parsed.status().text.find(c.named), std::string::npos)
        << c.text << ": " << parsed.status().text;
  }
}

}  // namespace
}  // namespace tessera
