// What the tests of the forward kernels share: random problems in poisoned memory with odd strides,
// one catalog row run on them with and without split keys, and literal loops in double to compare
// with.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "archs.h"
#include "core/philox.h"
#include "cpu/backend.h"
#include "cpu/sample_cache.h"
#include "cpu/sample_storage.h"
#include "plan/catalog.h"
#include "plan/layout.h"
#include "plan/names.h"
#include "plan/select.h"
#include "tessera/tessera.hpp"

namespace tessera::forward_sample {

/// A tensor inside poisoned memory, with gaps between heads and rows.
struct Placed {
  Array array;
  std::int64_t start = 0, batch = 0, seqlen = 0, head = 0;

  std::int64_t at(std::int64_t b, std::int64_t i, std::int64_t h) const {
    return start + b * batch + i * seqlen + h * head;
  }
  ConstTensor tensor() const {
    return {array.bytes.data() + start * size_of(array.dtype), batch, seqlen, head};
  }
  Tensor mutable_tensor() {
    return {array.bytes.data() + start * size_of(array.dtype), batch, seqlen, head};
  }
};

struct Sample {
  Problem problem;
  Placed q, k, v, qv, o;
  Array bias;
  ConstBias bias_strides;
  std::vector<float> slopes, sink, lse;
  std::vector<std::int32_t> cu_q, cu_k;
  SampleCache cache;
  std::vector<std::uint64_t> tree;
  Placed k_scale, v_scale;  ///< by token as k and v lie, of one column (S14)
  std::uint64_t seed = 1234567, offset = 89;

  Tensors tensors() {
    Tensors t;
    t.q = q.tensor();
    t.k = k.tensor();
    t.v = v.tensor();
    if (problem.qv) t.qv = qv.tensor();
    t.o = o.mutable_tensor();
    t.softmax_lse = lse.data() + kGuard;
    t.bias = bias_strides;
    t.bias.data = bias.bytes.data();
    t.alibi_slopes = slopes.data();
    t.sink = sink.data();
    t.cu_seqlens_q = problem.packed ? cu_q.data() : nullptr;
    t.cu_seqlens_k = problem.packed_k() ? cu_k.data() : nullptr;
    if (problem.cache) t.cache = cache.tensors(*problem.cache);
    t.tree_mask = tree.data();
    if (problem.scaled()) {
      t.k_scale = scales(k_scale);
      t.v_scale = scales(v_scale);
    }
    t.philox_seed = seed;
    t.philox_offset = offset;
    return t;
  }
  static ConstScales scales(const Placed& x) {
    ConstScales numbers;
    numbers.data = reinterpret_cast<const float*>(x.array.bytes.data()) + x.start;
    numbers.stride_batch = x.batch;
    numbers.stride_head = x.head;
    numbers.stride_seqlen = x.seqlen;
    return numbers;
  }
  /// Of a key: the number that it shares, or its own.
  double scale(const Placed& x, Scaling by, std::int64_t b, std::int64_t j, std::int64_t h) const {
    if (!problem.scaled()) return 1.0;
    return x.array.get(by == Scaling::token ? at_k(x, b, j, h) : x.at(b, 0, h));
  }
  std::int64_t len_q(std::int64_t b) const {
    const auto i = static_cast<std::size_t>(b);
    return problem.packed ? cu_q[i + 1] - cu_q[i] : problem.seqlen_q;
  }
  std::int64_t len_k(std::int64_t b) const {
    const auto i = static_cast<std::size_t>(b);
    if (problem.cache) return static_cast<std::int64_t>(cache.keys[i].size());
    return problem.packed ? cu_k[i + 1] - cu_k[i] : problem.seqlen_k;
  }
  std::int64_t at_q(const Placed& x, std::int64_t b, std::int64_t i, std::int64_t h) const {
    return problem.packed ? x.at(0, cu_q[static_cast<std::size_t>(b)] + i, h) : x.at(b, i, h);
  }
  std::int64_t at_k(const Placed& x, std::int64_t b, std::int64_t j, std::int64_t h) const {
    if (problem.cache) {
      const Slot& key = cache.keys[static_cast<std::size_t>(b)][static_cast<std::size_t>(j)];
      return x.at(key.entry, key.slot, h);
    }
    return problem.packed ? x.at(0, cu_k[static_cast<std::size_t>(b)] + j, h) : x.at(b, j, h);
  }
  std::int64_t lse_at(std::int64_t b, std::int64_t h, std::int64_t i) const {
    return kGuard + (problem.packed ? h * problem.total_q + cu_q[static_cast<std::size_t>(b)] + i
                                    : (b * problem.num_heads + h) * problem.seqlen_q + i);
  }
  static constexpr std::int64_t kGuard = 64;
};

inline Placed place(Random& random, Dtype dtype, std::int64_t b, std::int64_t s, std::int64_t h,
                    std::int64_t d, double sigma, bool fill) {
  Placed x;
  const bool heads_outside = pick(random, 0, 1) != 0;
  if (heads_outside) {
    x.seqlen = d + pick(random, 0, 3);
    x.head = s * x.seqlen + pick(random, 0, 3);
    x.batch = h * x.head + pick(random, 0, 3);
  } else {
    x.head = d + pick(random, 0, 3);
    x.seqlen = h * x.head + pick(random, 0, 3);
    x.batch = s * x.seqlen + pick(random, 0, 3);
  }
  x.start = 64 + pick(random, 0, 3);
  x.array.resize(dtype, x.start + b * x.batch + 64);
  x.array.poison();
  // i8 has steps of 1: its numbers are 20 times as large, and scales 20 times as small.
  std::normal_distribution<double> normal(0.0, dtype == Dtype::i8 ? 20.0 * sigma : sigma);
  for (std::int64_t i0 = 0; fill && i0 < b; ++i0) {
    for (std::int64_t i1 = 0; i1 < s; ++i1) {
      for (std::int64_t i2 = 0; i2 < h; ++i2) {
        for (std::int64_t i3 = 0; i3 < d; ++i3) {
          x.array.set(x.at(i0, i1, i2) + i3, static_cast<float>(normal(random)));
        }
      }
    }
  }
  return x;
}

inline std::vector<std::int32_t> boundaries(Random& random, std::int64_t batch,
                                            std::int64_t longest, std::int64_t total) {
  std::vector<std::int32_t> cu = {0};
  for (std::int64_t b = 0; b < batch; ++b) {
    const std::int64_t left = total - cu.back();
    const std::int64_t others = batch - 1 - b;
    const std::int64_t low = std::max<std::int64_t>(0, left - others * longest);
    const std::int64_t length = b + 1 == batch ? left : pick(random, low, std::min(left, longest));
    cu.push_back(cu.back() + static_cast<std::int32_t>(length));
  }
  return cu;
}

/// NaN in slots that hold no sequence's key.
inline void keep_keys(Placed& x, const SampleCache& cache, std::int64_t heads, std::int64_t dim) {
  Placed kept = x;
  kept.array.poison();
  for (const std::vector<Slot>& sequence : cache.keys) {
    for (const Slot& key : sequence) {
      for (std::int64_t h = 0; h < heads; ++h) {
        const std::int64_t at = x.at(key.entry, key.slot, h);
        for (std::int64_t c = at; c < at + dim; ++c) {
          kept.array.set(c, static_cast<float>(x.array.get(c)));
        }
      }
    }
  }
  x = std::move(kept);
}

/// Positive scales of k or v, of bk entries of sk slots.
inline Placed place_scales(Random& random, const Problem& p, Scaling by, std::int64_t bk,
                           std::int64_t sk) {
  const bool token = by == Scaling::token, one = by == Scaling::tensor;
  Placed x = place(random, Dtype::f32,
                   token ? bk
                   : one ? 1
                         : p.batch,
                   token ? sk : 1, one ? 1 : p.num_heads_k, 1, 1.0, true);
  const float unit = p.stored_k() == Dtype::i8 ? 0.05F : 1.0F;
  for (std::int64_t i = 0; i < x.array.size(); ++i) {
    x.array.set(i, unit * std::fabs(0.3F * static_cast<float>(x.array.get(i)) + 1.0F));
  }
  if (one) x.batch = x.head = 0;
  return x;
}

inline Sample make_sample(const Problem& p, Random& random, double sigma) {
  Sample sample;
  sample.problem = p;
  const std::int64_t b = p.packed ? 1 : p.batch;
  const std::int64_t sq = p.packed ? p.total_q : p.seqlen_q;
  std::int64_t bk = b, sk = p.packed ? p.total_k : p.seqlen_k;
  if (p.cache) {
    bk = p.cache->paged() ? p.cache->num_pages : p.cache->rows > 0 ? p.cache->rows : p.batch;
    sk = p.cache->paged() ? p.cache->page_size : p.seqlen_k;
  }
  sample.q = place(random, p.dtype, b, sq, p.num_heads, p.head_dim, sigma, true);
  sample.k = place(random, p.stored_k(), bk, sk, p.num_heads_k, p.head_dim, sigma, true);
  sample.v = place(random, p.stored_v(), bk, sk, p.num_heads_k, p.head_dim_v, 1.0, true);
  if (p.qv) sample.qv = place(random, p.dtype, b, sq, p.num_heads, p.head_dim_v, sigma, true);
  sample.o = place(random, p.dtype, b, sq, p.num_heads, p.head_dim_v, 1.0, false);
  if (p.scaled()) {
    sample.k_scale = place_scales(random, p, p.scales.k, bk, sk);
    sample.v_scale = place_scales(random, p, p.scales.v, bk, sk);
  }
  if (p.packed) sample.cu_q = boundaries(random, p.batch, p.seqlen_q, p.total_q);
  if (p.packed_k()) sample.cu_k = boundaries(random, p.batch, p.seqlen_k, p.total_k);
  if (p.cache) {
    sample.cache = make_cache(p, random);
    keep_keys(sample.k, sample.cache, p.num_heads_k, p.head_dim);
    keep_keys(sample.v, sample.cache, p.num_heads_k, p.head_dim_v);
    if (p.scales.k == Scaling::token) keep_keys(sample.k_scale, sample.cache, p.num_heads_k, 1);
    if (p.scales.v == Scaling::token) keep_keys(sample.v_scale, sample.cache, p.num_heads_k, 1);
  }
  for (std::int64_t i = 0; p.tree && i < p.rows_q(); ++i) sample.tree.push_back(random());
  std::normal_distribution<float> normal(0.0F, 1.0F);
  if (p.bias) {
    const BiasShape& s = *p.bias;
    const std::int64_t nk = s.keys ? p.seqlen_k : 1, nq = s.queries ? p.seqlen_q : 1;
    const std::int64_t nh = s.heads ? p.num_heads : 1, nb = s.batch ? p.batch : 1;
    ConstBias& stride = sample.bias_strides;
    stride.stride_key = pick(random, 1, 2);
    stride.stride_query = nk * stride.stride_key + pick(random, 0, 2);
    stride.stride_head = nq * stride.stride_query + pick(random, 0, 2);
    stride.stride_batch = nh * stride.stride_head + pick(random, 0, 2);
    sample.bias.resize(s.dtype, nb * stride.stride_batch + 1);
    for (std::int64_t i = 0; i < sample.bias.size(); ++i) sample.bias.set(i, normal(random));
  }
  for (std::int64_t i = 0; i < p.batch * p.num_heads; ++i) {
    sample.slopes.push_back(0.1F * std::fabs(normal(random)) + 0.01F);
  }
  for (std::int64_t i = 0; i < p.num_heads; ++i) sample.sink.push_back(normal(random));
  sample.lse.assign(static_cast<std::size_t>(2 * Sample::kGuard + p.rows_q() * p.num_heads),
                    -777.0F);
  return sample;
}

inline double bias_at(const Sample& sample, std::int64_t b, std::int64_t h, std::int64_t i,
                      std::int64_t j) {
  const BiasShape& s = *sample.problem.bias;
  const ConstBias& stride = sample.bias_strides;
  return sample.bias.get(
      (s.batch ? b * stride.stride_batch : 0) + (s.heads ? h * stride.stride_head : 0) +
      (s.queries ? i * stride.stride_query : 0) + (s.keys ? j * stride.stride_key : 0));
}

/// Does the query at a position see the key? S3.
inline bool sees(const Sample& sample, std::int64_t b, std::int64_t i, std::int64_t j,
                 std::int64_t position) {
  const Problem& p = sample.problem;
  if (p.window_right >= 0 && j > position + p.window_right) return false;
  bool left = p.window_left < 0 || j >= position - p.window_left;
  if (p.chunk > 0) {
    const auto begin = static_cast<std::int64_t>(
        std::floor(static_cast<double>(position) / static_cast<double>(p.chunk)) *
        static_cast<double>(p.chunk));
    if (j >= begin + p.chunk) return false;
    left = left && j >= begin;
  }
  if (!left && j >= p.sink_tokens) return false;
  const std::int64_t bit = j - (sample.len_k(b) - sample.len_q(b));
  if (!p.tree || bit < 0) return true;
  const std::int64_t row =
      i + (p.packed ? sample.cu_q[static_cast<std::size_t>(b)] : b * p.seqlen_q);
  return (sample.tree[static_cast<std::size_t>(row)] >> bit & 1) != 0;
}

/// One row, literally (S1 to S10), and the units of the tolerance: `spread` is the sum of weight *
/// |v|, `magnitude` the largest sum of |q * k|, which is what rounding errors of a score are
/// relative to.
struct Row {
  std::vector<double> o, spread;
  double magnitude = 1.0;
  double lse = -kInf;
};

/// The sample's q, k, v and qv, element by element where their arrays have them.
struct Numbers {
  std::vector<double> q, k, v, qv;
};

inline Row literal_row(const Sample& sample, const Numbers& numbers, const core::Dropout& dropout,
                       std::int64_t b, std::int64_t h, std::int64_t i) {
  const Problem& p = sample.problem;
  const std::int64_t sq = sample.len_q(b), sk = sample.len_k(b),
                     hk = h / (p.num_heads / p.num_heads_k);
  const std::int64_t shift = p.alignment == Alignment::bottom_right ? sk - sq : 0;
  std::vector<double> s(static_cast<std::size_t>(sk), -kInf);
  Row row;
  double top = p.sink ? static_cast<double>(sample.sink[static_cast<std::size_t>(h)]) : -kInf;
  const double* q = &numbers.q[static_cast<std::size_t>(sample.at_q(sample.q, b, i, h))];
  for (std::int64_t j = 0; j < sk; ++j) {
    if (!sees(sample, b, i, j, i + shift)) continue;
    double x = 0, magnitude = 0;
    const auto multiply = [&](const double* a, const double* c, std::int64_t n) {
      for (const double* end = a + n; a < end; ++a, ++c) {
        x += *a * *c;
        magnitude += std::fabs(*a * *c);
      }
    };
    multiply(q, &numbers.k[static_cast<std::size_t>(sample.at_k(sample.k, b, j, hk))], p.head_dim);
    if (p.qv) {
      multiply(&numbers.qv[static_cast<std::size_t>(sample.at_q(sample.qv, b, i, h))],
               &numbers.v[static_cast<std::size_t>(sample.at_k(sample.v, b, j, hk))], p.head_dim_v);
    }
    const double scale = sample.scale(sample.k_scale, p.scales.k, b, j, hk);
    x *= scale * static_cast<double>(p.scale());
    magnitude *= scale;
    row.magnitude = std::max(row.magnitude, magnitude * std::fabs(static_cast<double>(p.scale())));
    if (p.softcap > 0) x = p.softcap * std::tanh(x / p.softcap);
    if (p.alibi != PerHead::none) {
      const std::int64_t at = p.alibi == PerHead::heads ? h : b * p.num_heads + h;
      x -= static_cast<double>(sample.slopes[static_cast<std::size_t>(at)]) *
           static_cast<double>(std::abs(i + sk - sq - j));
    }
    if (p.bias) x += bias_at(sample, b, h, i, j);
    s[static_cast<std::size_t>(j)] = x;
    top = std::max(top, x);
  }
  row.o.assign(static_cast<std::size_t>(p.head_dim_v), 0.0);
  row.spread = row.o;
  if (top == -kInf) return row;
  double sum = p.sink ? std::exp(sample.sink[static_cast<std::size_t>(h)] - top) : 0.0;
  for (const double x : s) sum += std::exp(x - top);
  row.lse = top + std::log(sum);
  for (std::int64_t j = 0; j < sk; ++j) {
    double weight = std::exp(s[static_cast<std::size_t>(j)] - top) / sum;
    if (weight == 0) continue;
    if (dropout.active()) {
      weight *= core::dropout_keeps(dropout, static_cast<int>(b), static_cast<int>(h),
                                    static_cast<int>(i), static_cast<int>(j))
                    ? static_cast<double>(dropout.keep_scale)
                    : 0.0;
    }
    weight *= sample.scale(sample.v_scale, p.scales.v, b, j, hk);
    const double* v = &numbers.v[static_cast<std::size_t>(sample.at_k(sample.v, b, j, hk))];
    for (std::int64_t c = 0; c < p.head_dim_v; ++c) {
      row.o[static_cast<std::size_t>(c)] += weight * v[c];
      row.spread[static_cast<std::size_t>(c)] += weight * std::fabs(v[c]);
    }
  }
  return row;
}

/// Compares and, where the memory is not part of the result, expects it untouched.
inline void compare(Sample& sample, const std::string& name) {
  const Problem& p = sample.problem;
  const core::Dropout dropout = core::make_dropout(p.dropout_p, sample.seed, sample.offset);
  const double rounding = p.dtype == Dtype::f32 ? 0.0 : p.dtype == Dtype::bf16 ? 0x1p-7 : 0x1p-11;
  const Numbers numbers = {sample.q.array.numbers(), sample.k.array.numbers(),
                           sample.v.array.numbers(), sample.qv.array.numbers()};
  Placed rest = sample.o;
  std::vector<float> lse_rest = sample.lse;
  int bad = 0;
  for (std::int64_t b = 0; b < p.batch; ++b) {
    for (std::int64_t h = 0; h < p.num_heads; ++h) {
      for (std::int64_t i = 0; i < sample.len_q(b); ++i) {
        const Row row = literal_row(sample, numbers, dropout, b, h, i);
        const std::int64_t at = sample.at_q(sample.o, b, i, h);
        const double score_error = 1e-5 + row.magnitude * 0x1p-21;
        for (std::int64_t c = 0; c < p.head_dim_v; ++c) {
          const auto cc = static_cast<std::size_t>(c);
          const double got = sample.o.array.get(at + c);
          const double bound = row.spread[cc] * (score_error + 1.05 * rounding) + 1e-6;
          if (!(std::fabs(got - row.o[cc]) <= bound) && ++bad <= 3) {
            ADD_FAILURE() << name << ": " << to_string(p) << " o[" << b << "," << i << "," << h
                          << "," << c << "] = " << got << ", expected " << row.o[cc] << " +- "
                          << bound;
          }
          rest.array.set(at + c, 0.0F);
        }
        const auto l = static_cast<std::size_t>(sample.lse_at(b, h, i));
        const double got = static_cast<double>(sample.lse[l]);
        const bool same = row.lse == -kInf ? got == -kInf : std::fabs(got - row.lse) <= score_error;
        if (!same && ++bad <= 3) {
          ADD_FAILURE() << name << ": " << to_string(p) << " lse[" << b << "," << h << "," << i
                        << "] = " << got << ", expected " << row.lse;
        }
        lse_rest[l] = -777.0F;
      }
    }
  }
  Placed clean = rest;
  clean.array.poison();
  for (std::int64_t b = 0; b < p.batch; ++b) {
    for (std::int64_t h = 0; h < p.num_heads; ++h) {
      for (std::int64_t i = 0; i < sample.len_q(b); ++i) {
        for (std::int64_t c = 0; c < p.head_dim_v; ++c) {
          clean.array.set(sample.at_q(sample.o, b, i, h) + c, 0.0F);
        }
      }
    }
  }
  EXPECT_TRUE(rest.array.bytes == clean.array.bytes)
      << name << " wrote outside o: " << to_string(p);
  for (const float x : lse_rest) {
    ASSERT_EQ(x, -777.0F) << name << " wrote outside softmax_lse: " << to_string(p);
  }
  ASSERT_EQ(bad, 0);
}

/// The forward rows of this form that this machine can run.
inline std::vector<core::Kernel> rows_of(core::Form form) {
  std::vector<core::Kernel> rows;
  for (const core::Kernel& row : kCatalog) {
    for (const Arch arch : archs()) {
      if (row.pass == Pass::forward && row.form == form && row.arch == arch) rows.push_back(row);
    }
  }
  return rows;
}

/// The row's plan; split_n > 0 forces a split.
inline PlanData make_plan(const core::Kernel& row, const Problem& p, int split_n, int threads) {
  Device device = this_cpu();
  device.threads = threads;
  PlanData plan = plan_row(row, p, device);
  plan.split_n = split_n;
  plan.work.splits = split_n == 0 ? 1
                                  : static_cast<int>(core::max<std::int64_t>(
                                        1, core::ceil_div<std::int64_t>(p.seqlen_k, split_n)));
  plan.regions.clear();
  Workspace counter(&plan.regions);
  layout(counter, plan);
  plan.workspace_bytes = counter.bytes();
  return plan;
}

inline void execute(Sample& sample, const core::Kernel& row, int split_n, int threads,
                    const Executor* executor = nullptr) {
  const PlanData plan = make_plan(row, sample.problem, split_n, threads);
  // A workspace full of NaN: nothing may be read before it is written.
  std::vector<std::byte> memory(plan.workspace_bytes + 128, std::byte{0xFF});
  void* base = memory.data();
  std::size_t space = memory.size();
  std::align(64, plan.workspace_bytes, base, space);
  Execution execution;
  execution.executor = executor;
  const Executor inline_one = inline_executor();
  if (threads == 1 && executor == nullptr) execution.executor = &inline_one;
  const Status status = cpu::run(plan, sample.tensors(), base, execution);
  ASSERT_TRUE(status.ok()) << status.text;
}

/// Runs a random sample of the problem on every catalog row of this form that this machine has and
/// that takes it, with and without a forced split, and compares.
inline void check(core::Form form, const Problem& p, Random& random, double sigma = 1.0) {
  ASSERT_TRUE(validate(p).ok()) << validate(p).text << " " << to_string(p);
  for (const core::Kernel& row : rows_of(form)) {
    if (!refusal(row, p, this_cpu()).empty()) continue;
    Sample sample = make_sample(p, random, sigma);
    const int split_n = pick(random, 0, 2) == 0 ? static_cast<int>(pick(random, 8, 64)) : 0;
    execute(sample, row, split_n, static_cast<int>(pick(random, 1, 2)));
    compare(sample, name_of(row) + " split " + std::to_string(split_n));
    if (testing::Test::HasFatalFailure()) return;
  }
}

// ---- features, each a change to a plain problem ----

using Feature = void (*)(Problem&, Random&);

inline void causal(Problem& p, Random&) { p.window_right = 0; }
inline void window(Problem& p, Random& random) {
  p.window_left = pick(random, 0, p.seqlen_k / 2 + 1);
  p.window_right = pick(random, 0, p.seqlen_k / 2 + 1);
}
inline void left_window(Problem& p, Random& random) { p.window_left = pick(random, 0, 20); }
inline void top_left(Problem& p, Random&) {
  p.alignment = Alignment::top_left;
  p.window_right = 0;
}
inline void grouped(Problem& p, Random& random) {
  p.num_heads_k = pick(random, 1, 2);
  p.num_heads = p.num_heads_k * pick(random, 2, 5);
}
inline void softcap(Problem& p, Random&) { p.softcap = 2.5F; }
inline void alibi(Problem& p, Random& random) {
  p.alibi = pick(random, 0, 1) != 0 ? PerHead::heads : PerHead::batch_heads;
}
inline void bias(Problem& p, Random& random) {
  if (p.packed) return;
  const auto coin = [&] { return pick(random, 0, 1) != 0; };
  p.bias = BiasShape{coin(), coin(), coin(), coin(), coin() ? Dtype::f32 : p.dtype};
}
inline void sink(Problem& p, Random&) { p.sink = true; }
inline void dropout(Problem& p, Random&) { p.dropout_p = 0.3F; }
inline void packed(Problem& p, Random& random) {
  if (p.bias) return;
  p.packed = true;
  p.batch = 3;
  p.total_q = pick(random, 0, 3 * p.seqlen_q);
  if (!p.cache) p.total_k = pick(random, 0, 3 * p.seqlen_k);
}
inline void negative_scale(Problem& p, Random&) { p.softmax_scale = -0.3F; }
inline void zero_scale(Problem& p, Random&) { p.softmax_scale = 0.0F; }
inline void other_head_dim_v(Problem& p, Random& random) { p.head_dim_v = pick(random, 1, 40); }

inline void second_query(Problem& p, Random&) { p.qv = !p.scaled(); }
inline void chunk(Problem& p, Random& random) { p.chunk = pick(random, 1, 60); }
inline void sink_tokens(Problem& p, Random& random) { p.sink_tokens = pick(random, 1, 60); }
inline void tree(Problem& p, Random&) {
  p.tree = true;
  p.seqlen_q = std::min<std::int64_t>(p.seqlen_q, 64);
  p.total_q = std::min(p.total_q, p.batch * p.seqlen_q);
}
inline void cache(Problem& p, Random& random) {
  if (p.cache) return;
  p.total_k = 0;
  p.cache = CacheShape{.lengths = static_cast<Lengths>(pick(random, 0, 2))};
  if (p.cache->lengths == Lengths::before) {
    p.cache->seqlen_new = pick(random, 0, std::min<std::int64_t>(p.seqlen_k, 9));
  }
}
inline void pages(Problem& p, Random& random) {
  cache(p, random);
  constexpr std::int64_t kSizes[] = {1, 2, 3, 4, 7, 8, 16, 32, 33, 64, 100, 128, 256};
  p.cache->page_size = kSizes[pick(random, 0, std::size(kSizes) - 1)];
  p.cache->num_pages = pick(random, 1, 3 * p.seqlen_k / p.cache->page_size + 4);
  p.cache->page_ids = pick(random, 0, 1) != 0 ? PageIds::i64 : PageIds::i32;
}
inline void index(Problem& p, Random& random) {
  cache(p, random);
  p.cache->rows = pick(random, 1, 4);
}
inline void leftpad(Problem& p, Random& random) {
  cache(p, random);
  p.cache->leftpad = true;
}

constexpr Feature kFeatures[] = {
    causal, window,  left_window, top_left,       grouped,    softcap,          alibi, bias,
    sink,   dropout, packed,      negative_scale, zero_scale, other_head_dim_v, chunk, sink_tokens,
    tree,   cache,   pages,       index,          leftpad,    second_query};

}  // namespace tessera::forward_sample
