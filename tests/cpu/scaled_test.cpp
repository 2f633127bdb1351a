// Tensors of 8 bits (S14): a scaled problem is the fp32 problem of the values that its elements
// stand for. Where scales are powers of two both round alike, so the bits are the same.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "archs.h"
#include "reference/storage.h"
#include "tessera/tessera.hpp"

namespace tessera {
namespace {

std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

/// A contiguous tensor of one type, and what it stands for.
struct Pair {
  std::vector<std::byte> elements;
  std::vector<float> values;
};

class Scaled : public testing::Test {
 protected:
  void SetUp() override { random_.seed(seed_); }
  void TearDown() override {
    if (HasFailure()) std::printf("seed %u\n", seed_);
  }

  float power_of_two() { return std::ldexp(1.0F, static_cast<int>(random_() % 7) - 3); }

  std::vector<float> powers(std::int64_t count) {
    std::vector<float> numbers(size(count));
    for (float& x : numbers) x = power_of_two();
    return numbers;
  }

  /// scale(row, head, column) of a (rows, heads, dim) tensor.
  template <class Scale>
  Pair tensor(Dtype dtype, std::int64_t rows, std::int64_t heads, std::int64_t dim,
              const Scale& scale) {
    const std::int64_t count = rows * heads * dim;
    Pair pair{std::vector<std::byte>(size(count * size_of(dtype))),
              std::vector<float>(size(count))};
    std::normal_distribution<double> normal;
    for (std::int64_t i = 0; i < count; ++i) {
      reference::store(dtype, pair.elements.data(), i,
                       normal(random_) * (dtype == Dtype::i8 ? 20.0 : 1.0));
      const double x = reference::load(dtype, pair.elements.data(), i);
      pair.values[size(i)] = static_cast<float>(
          x * static_cast<double>(scale(i / (heads * dim), i / dim % heads, i % dim)));
    }
    return pair;
  }

  /// o and lse of one sequence, all tensors contiguous.
  static std::vector<float> attend_all(const Problem& p, Tensors t, const void* q, const void* k,
                                       const void* v, const Device& device) {
    const std::int64_t d = p.head_dim, dv = p.head_dim_v, h = p.num_heads, hk = p.num_heads_k;
    std::vector<float> out(size(p.seqlen_q * h * (dv + 1)));
    t.q = {q, 0, h * d, d};
    t.k = {k, 0, hk * d, d};
    t.v = {v, 0, hk * dv, dv};
    t.o = {out.data(), 0, h * dv, dv};
    t.softmax_lse = out.data() + p.seqlen_q * h * dv;
    const Status status = attend(p, t, device);
    EXPECT_TRUE(status.ok()) << status.text;
    return out;
  }

  const unsigned seed_ = std::random_device()();
  std::mt19937 random_;
};

TEST_F(Scaled, IsTheProblemOfTheValues_S14) {
  for (const char* type : {"e4m3", "i8"}) {
    for (const char* scales : {"tensor/tensor/tensor", "head/head/head", "token/block:32/channel",
                               "token/block:7/block:50", "head/tensor/none v=bf16"}) {
      const std::string text =
          std::string("fwd ") + type + " h=4/2 q=37 k=203 d=40/24 causal o=f32 scales=" + scales;
      const Result<Problem> problem = parse_problem(text);
      ASSERT_TRUE(problem.ok()) << problem.status().text;
      const Problem& p = *problem;
      const ScaleShape& s = p.scales;
      const std::int64_t blocks_k = std::max<std::int64_t>(1, p.scale_blocks(s.block_k));
      const std::int64_t blocks_v = std::max<std::int64_t>(1, p.scale_blocks(s.block_v));
      const std::vector<float> q_scale = powers(p.num_heads * p.seqlen_q);
      const std::vector<float> k_scale = powers(p.num_heads_k * blocks_k);
      const std::vector<float> v_scale = powers(p.num_heads_k * std::max(blocks_v, p.head_dim_v));
      Tensors t;
      t.q_scale = {q_scale.data(), 0, s.q == Scaling::token ? p.seqlen_q : 1};
      t.k_scale = {k_scale.data(), 0, blocks_k};
      t.v_scale = {v_scale.data(), 0, s.v == Scaling::channel ? p.head_dim_v : blocks_v};
      if (s.v == Scaling::none) t.v_scale = {};
      const auto number = [](const std::vector<float>& numbers, Scaling by, std::int64_t stride,
                             std::int64_t head, std::int64_t index) {
        if (by == Scaling::none) return 1.0F;
        return by == Scaling::tensor ? numbers[0] : numbers[size(head * stride + index)];
      };
      const Pair q = tensor(p.dtype, p.seqlen_q, p.num_heads, p.head_dim,
                            [&](std::int64_t row, std::int64_t head, std::int64_t) {
                              const bool token = s.q == Scaling::token;
                              return number(q_scale, s.q, t.q_scale.stride_head,
                                            token ? head : head / p.group(), token ? row : 0);
                            });
      const Pair k = tensor(p.dtype, p.seqlen_k, p.num_heads_k, p.head_dim,
                            [&](std::int64_t row, std::int64_t head, std::int64_t) {
                              return number(k_scale, s.k, t.k_scale.stride_head, head,
                                            s.k == Scaling::block ? row / s.block_k : 0);
                            });
      const Pair v =
          tensor(p.stored_v(), p.seqlen_k, p.num_heads_k, p.head_dim_v,
                 [&](std::int64_t row, std::int64_t head, std::int64_t column) {
                   return number(v_scale, s.v, t.v_scale.stride_head, head,
                                 s.v == Scaling::block ? row / s.block_v
                                                       : (s.v == Scaling::channel ? column : 0));
                 });
      Problem plain = p;
      plain.dtype = Dtype::f32;
      plain.dtype_v.reset();
      plain.dtype_o.reset();
      plain.scales = {};
      for (const Arch arch : archs()) {
        // Rows of bf16 refuse both; a decoding row takes neither of so many rows.
        const Result<Device> device = named_device(to_string(arch));
        ASSERT_TRUE(device.ok()) << device.status().text;
        EXPECT_EQ(
            attend_all(p, t, q.elements.data(), k.elements.data(), v.elements.data(), *device),
            attend_all(plain, {}, q.values.data(), k.values.data(), v.values.data(), *device))
            << text << " on " << to_string(arch);
      }
    }
  }
}

/// Keys without their mean, and the scores that it takes away given back: o and lse as before, with
/// a softcap and a sink, too. Values without their mean: o as before.
TEST_F(Scaled, ShiftsGiveBackWhatSmoothingTook_S14) {
  const Result<Problem> problem = parse_problem(
      "fwd e4m3 h=2/1 q=19 k=90 d=16 o=f32 softcap=20 sink scales=tensor/tensor/tensor score_shift "
      "v_shift");
  ASSERT_TRUE(problem.ok()) << problem.status().text;
  const Problem& p = *problem;
  constexpr std::size_t kRows = 38;
  const auto one = [](std::int64_t, std::int64_t, std::int64_t) { return 1.0F; };
  const Pair q = tensor(p.dtype, p.seqlen_q, 2, p.head_dim, one);
  const Pair k = tensor(p.dtype, p.seqlen_k, 1, p.head_dim, one);
  const Pair v = tensor(p.dtype, p.seqlen_k, 1, p.head_dim, one);
  const float scale = 1.0F, sink[2] = {0.5F, 2.0F};
  std::vector<float> c(16), v_shift(16), score_shift(kRows);
  for (float& x : c) x = power_of_two();
  for (float& x : v_shift) x = power_of_two();
  std::vector<float> k_whole = k.values, v_whole = v.values;
  for (std::size_t i = 0; i < k_whole.size(); ++i) {
    k_whole[i] += c[i % 16];
    v_whole[i] += v_shift[i % 16];
  }
  for (std::size_t row = 0; row < kRows; ++row) {
    double dot = 0.0;
    for (std::size_t x = 0; x < 16; ++x) {
      dot += static_cast<double>(q.values[row * 16 + x]) * static_cast<double>(c[x]);
    }
    score_shift[row % 2 * 19 + row / 2] = static_cast<float>(dot);
  }
  Tensors t;
  t.q_scale = t.k_scale = t.v_scale = {&scale};
  t.score_shift = {score_shift.data(), 0, 19};
  t.v_shift = {v_shift.data(), 0, 16};
  t.sink = sink;
  Problem plain = p;
  plain.dtype = Dtype::f32;
  plain.dtype_o.reset();
  plain.scales = {};
  Tensors t_plain;
  t_plain.sink = sink;
  for (const Arch arch : archs()) {
    const Result<Device> device = named_device(to_string(arch));
    ASSERT_TRUE(device.ok()) << device.status().text;
    const std::vector<float> shifted =
        attend_all(p, t, q.elements.data(), k.elements.data(), v.elements.data(), *device);
    const std::vector<float> whole =
        attend_all(plain, t_plain, q.values.data(), k_whole.data(), v_whole.data(), *device);
    for (std::size_t i = 0; i < whole.size(); ++i) {
      ASSERT_NEAR(shifted[i], whole[i], 2e-5) << i << " on " << to_string(arch);
    }
  }
}

}  // namespace
}  // namespace tessera
