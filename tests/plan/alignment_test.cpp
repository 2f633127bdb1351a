// Which tensors make a problem unaligned: the one check that callers, attend() and launches share.
#include "plan/alignment.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <string>

#include "plan/planned.h"
#include "tessera/tessera.h"

namespace tessera {
namespace {

alignas(64) std::byte memory[64];

/// Contiguous tensors of `problem`, all at one aligned address.
Tensors tensors_of(const Problem& p) {
  Tensors t;
  const auto rows = [](std::int64_t seqlen, std::int64_t heads, std::int64_t dim) -> Tensor {
    return {memory, seqlen * heads * dim, heads * dim, dim};
  };
  t.q = t.dq = rows(p.seqlen_q, p.num_heads, p.head_dim);
  t.k = t.dk = rows(p.seqlen_k, p.num_heads_k, p.head_dim);
  t.v = t.dv = rows(p.seqlen_k, p.num_heads_k, p.head_dim_v);
  t.o = rows(p.seqlen_q, p.num_heads, p.head_dim_v);
  t.dout = t.o;
  return t;
}

constexpr const char* kSizes = " b=2 h=4/2 q=3 k=5 d=64";

/// Breaks one tensor after another in one way, and expects that this and nothing else is seen.
template <class Break>
void expect_needed(const std::string& pass, const Break& broken, bool read, bool written) {
  const Problem p = problem_of(pass + kSizes);
  const bool backward = p.pass == Pass::backward;
  EXPECT_FALSE(needs_unaligned(p, tensors_of(p))) << pass;
  const auto expect = [&](const char* name, bool expected, const auto& member) {
    Tensors t = tensors_of(p);
    broken(t.*member);
    EXPECT_EQ(needs_unaligned(p, t), expected) << pass << " " << name;
  };
  expect("q", read, &Tensors::q);
  expect("k", read, &Tensors::k);
  expect("v", read, &Tensors::v);
  expect("o", written, &Tensors::saved_o);
  expect("dout", backward && read, &Tensors::dout);
  expect("dq", backward && written, &Tensors::dq);
  expect("dk", backward && written, &Tensors::dk);
  expect("dv", backward && written, &Tensors::dv);
}

TEST(Unaligned, AnAddressOrAStrideThatIsNoMultipleOf16Bytes) {
  for (const char* pass : {"fwd bf16", "bwd f16"}) {
    expect_needed(pass, [](auto& t) { t.data = memory + 8; }, true, true);
    expect_needed(pass, [](auto& t) { t.stride_batch += 4; }, true, true);
    expect_needed(pass, [](auto& t) { t.stride_seqlen += 1; }, true, true);
    expect_needed(pass, [](auto& t) { t.stride_head += 2; }, true, true);
    expect_needed(pass, [](auto& t) { t.stride_head += 8; }, false, false);
  }
  expect_needed("fwd f32", [](auto& t) { t.stride_head += 4; }, false, false);
  expect_needed("fwd f32", [](auto& t) { t.stride_head += 2; }, true, true);
}

// What the copy engine reads must lie forward and near; what kernels store need not.
TEST(Unaligned, AStrideThatTheCopyEngineDoesNotTake) {
  for (const char* pass : {"fwd bf16", "bwd f16"}) {
    expect_needed(pass, [](auto& t) { t.stride_seqlen = -256; }, true, false);
    expect_needed(pass, [](auto& t) { t.stride_head = 0; }, true, false);
    expect_needed(pass, [](auto& t) { t.stride_batch = std::int64_t{1} << 39; }, true, false);
    expect_needed(
        pass, [](auto& t) { t.stride_batch = (std::int64_t{1} << 39) - 8; }, false, false);
  }
}

TEST(Unaligned, WhatIsNotReadDoesNotCount) {
  Problem p = problem_of("fwd bf16 b=1 h=1 q=1 k=1 d=64");
  Tensors t = tensors_of(p);
  t.q.stride_batch = t.q.stride_seqlen = t.q.stride_head = 3;  // of one element each
  t.dq.data = memory + 1;                                      // of another pass
  EXPECT_FALSE(needs_unaligned(p, t));
  p.num_heads = 2;
  EXPECT_TRUE(needs_unaligned(p, t));
  p = problem_of("fwd bf16 b=2 h=1 q=3 k=0 d=64 packed=3,0");
  t = tensors_of(p);
  t.q.stride_batch = 1;   // packed: there is none
  t.k.data = memory + 1;  // without rows
  EXPECT_FALSE(needs_unaligned(p, t));
  EXPECT_FALSE(needs_unaligned(p, {}));
}

TEST(Unaligned, TheCAbiSaysTheSame) {
  char error[128] = "";
  tessera_problem p;
  tessera_problem_init(&p, sizeof p);
  ASSERT_EQ(tessera_problem_parse("fwd bf16 h=2 q=2 k=2 d=64", &p, error, sizeof error), 0);
  tessera_tensors t;
  tessera_tensors_init(&t, sizeof t);
  t.q = {memory, 0, 128, 64};
  std::int32_t unaligned = -1;
  EXPECT_EQ(tessera_needs_unaligned(&p, &t, &unaligned, error, sizeof error), TESSERA_OK) << error;
  EXPECT_EQ(unaligned, 0);
  t.q.stride_head = 65;
  EXPECT_EQ(tessera_needs_unaligned(&p, &t, &unaligned, error, sizeof error), TESSERA_OK) << error;
  EXPECT_EQ(unaligned, 1);
  EXPECT_EQ(tessera_needs_unaligned(&p, &t, nullptr, error, sizeof error), TESSERA_INVALID);
  EXPECT_STREQ(error, "unaligned = null");
}

}  // namespace
}  // namespace tessera
