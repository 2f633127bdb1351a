// A random quantising in memory with gaps, and what it must leave there by literal loops: for the
// tests of every backend.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "elements.h"
#include "rounded.h"
#include "tessera/tessera.hpp"

namespace tessera {

/// Rows of random numbers, some of them none that anybody would expect, and poisoned results.
class Quantized {
 public:
  QuantizeShape shape;
  QuantizeTensors tensors;

  /// gpu: what a GPU takes only.
  Quantized(std::mt19937& random, bool gpu) : random_(random), gpu_(gpu) {
    plain_ = gpu && below(3) == 0;
    draw_sizes();
    draw_scales();
    draw_steps();
    draw_tensors();
    expect();
  }
  ~Quantized() = default;
  Quantized(const Quantized&) = delete;
  Quantized(Quantized&&) = delete;
  Quantized& operator=(Quantized&&) = delete;
  Quantized& operator=(const Quantized&) = delete;

  /// The results as they were before.
  void clear() {
    for (Result* r : {&q_, &k_, &v_}) {
      r->out.fill();
      r->scale = r->scale_before;
    }
    shift_ = shift_before_;
  }

  /// Elements and scales have every bit as they must, and nothing else has been written.
  void check(const std::string& what) const {
    check("q", q_, what);
    check("k", k_, what);
    check("v", v_, what);
    for (std::size_t i = 0; i < shift_.size(); ++i) {
      const bool written = std::bit_cast<std::uint32_t>(shift_[i]) != kPoison;
      ASSERT_EQ(written, shift_allowed_[i] > 0.0) << "score_shift " << i << "; " << what;
      // Sums beyond fp32 may end as anything that is not finite.
      if (!written || std::isinf(shift_allowed_[i])) continue;
      ASSERT_NEAR(static_cast<double>(shift_[i]), shift_expected_[i], shift_allowed_[i])
          << "score_shift " << i << "; " << what;
    }
  }

  std::string text() const {
    const QuantizeShape& s = shape;
    std::string text = to_string(s.problem) + " of " + to_string(s.dtype) +
                       " gap=" + std::to_string(gap_) +
                       (s.hadamard > 0 ? " hadamard=" + std::to_string(s.hadamard) : "") +
                       (s.signs ? " signs" : "");
    for (const auto& [r, name] : {std::pair{&q_, " q"}, {&k_, " k"}, {&v_, " v"}}) {
      if (r->there) text += name;
    }
    if (!s.rotary) return text;
    return text + " rotary=" + std::to_string(s.rotary->dim) + " of " + to_string(s.rotary->dtype) +
           (s.rotary->interleaved ? " interleaved" : "") +
           (s.rotary->constant_q ? " constant_q" : "") +
           (tensors.rotary.seqlens != nullptr ? " seqlens" : "");
  }

 private:
  static constexpr std::uint32_t kPoison = 0x7FC0ABCD;  ///< a NaN that nobody makes

  /// A tensor, what becomes of it, and what must.
  struct Result {
    bool there = false;
    Elements in, out, expected;
    std::int64_t in_start = 0, out_start = 0;  ///< elements before the first row
    std::vector<float> scale, scale_before, scale_expected;
  };

  std::int64_t below(std::int64_t n) {
    return static_cast<std::int64_t>(random_() %
                                     static_cast<std::uint64_t>(std::max<std::int64_t>(n, 1)));
  }
  bool coin() { return below(2) == 0; }
  template <class T>
  T one_of(std::initializer_list<T> all) {
    return all.begin()[below(static_cast<std::int64_t>(all.size()))];
  }
  double number() { return std::normal_distribution<double>()(random_); }
  static std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

  void draw_sizes() {
    Problem& p = shape.problem;
    p.dtype = coin() ? Dtype::e4m3 : Dtype::i8;
    shape.dtype = one_of({Dtype::f32, Dtype::bf16, Dtype::bf16, Dtype::f16});
    p.batch = 1 + below(gpu_ ? 2 : 3);
    p.num_heads_k = 1 + below(3);
    p.num_heads = p.num_heads_k * (1 + below(3));
    // A GPU's threads are slow where they are the host's.
    p.seqlen_q = below(5) == 0 ? below(3) : below(gpu_ ? 24 : 60);
    p.seqlen_k = p.seqlen_q + below(coin() ? 20 : gpu_ ? 160 : 300);
    p.head_dim =
        one_of<std::int64_t>({1, 2, 5, 8, 16, 24, 32, 40, 64, 96, 100, 128, 128, 192, 256});
    if (!gpu_ && below(6) == 0) p.head_dim = one_of<std::int64_t>({257, 260, 512, 700});
    p.head_dim_v = one_of<std::int64_t>({p.head_dim, 1, 5, 8, 20, 64, 72, 128, 200, 256});
    gap_ = one_of<std::int64_t>({0, 0, 16, 8, 3});
    if (plain_) {
      p.dtype = Dtype::e4m3;
      shape.dtype = one_of({Dtype::bf16, Dtype::f16});
      p.head_dim = 16 * (1 + below(16));
      p.head_dim_v = 16 * (1 + below(16));
      gap_ = 16 * below(2);
    }
    p.packed = coin();
    lengths_q_.assign(size(p.batch), p.seqlen_q);
    lengths_k_.assign(size(p.batch), p.seqlen_k);
    if (!p.packed) return;
    cu_q_ = cu_k_ = {0};
    for (std::size_t b = 0; b < size(p.batch); ++b) {
      lengths_q_[b] = below(p.seqlen_q + 1);
      lengths_k_[b] = lengths_q_[b] + below(p.seqlen_k - lengths_q_[b] + 1);
      cu_q_.push_back(cu_q_.back() + static_cast<std::int32_t>(lengths_q_[b]));
      cu_k_.push_back(cu_k_.back() + static_cast<std::int32_t>(lengths_k_[b]));
    }
    p.total_q = cu_q_.back();
    p.total_k = cu_k_.back();
    tensors.cu_seqlens_q = cu_q_.data();
    tensors.cu_seqlens_k = cu_k_.data();
  }

  void draw_scales() {
    Problem& p = shape.problem;
    ScaleShape& s = p.scales;
    using enum Scaling;
    s.q = one_of({tensor, head, token, token});
    s.k = one_of({tensor, head, block, block});
    if (s.k == block) s.block_k = one_of<std::int64_t>({1, 3, 16, 50, 64, 128, 128, 200});
    if (below(4) == 0) {
      p.dtype_v = coin() ? Dtype::bf16 : Dtype::f16;
    } else {
      s.v = one_of({tensor, head, block, block, channel});
      if (s.v == block) s.block_v = one_of<std::int64_t>({1, 4, 32, 64, 128, 128, 256, 512});
      p.v_tiles = p.dtype == Dtype::e4m3 && p.head_dim_v <= 256 && below(3) != 0;
      const bool odd = s.v == block && !(gpu_ && p.v_tiles) && below(3) == 0;
      if (odd) s.block_v = one_of<std::int64_t>({3, 100, 127, 192});
      s.v_shift = coin();
    }
    s.score_shift = coin() && !plain_;
  }

  void draw_steps() {
    const Problem& p = shape.problem;
    if (coin()) {
      std::vector<int> sizes;
      for (int n = 1; n <= 256 && p.head_dim % n == 0; n *= 2) sizes.push_back(n);
      shape.hadamard = coin() ? sizes.back() : sizes[size(below(std::ssize(sizes)))];
    }
    shape.signs = coin();
    for (std::int64_t j = 0; j < p.head_dim; ++j) signs_.push_back(coin() ? 1.0F : -1.0F);
    if (shape.signs) tensors.signs = signs_.data();
    if (plain_ || p.head_dim == 1 || coin()) return;
    RotaryShape rotary;
    rotary.dim = coin() ? p.head_dim / 2 * 2 : 2 * (1 + below(p.head_dim / 2));
    if (coin()) rotary.dim = std::max<std::int64_t>(rotary.dim / 16 * 16, 2);
    rotary.dtype = coin() ? shape.dtype : Dtype::f32;
    rotary.interleaved = coin();
    rotary.constant_q = below(4) == 0;
    rotary.positions = p.seqlen_k + 20;
    const std::int64_t half = rotary.dim / 2, stride = half + one_of<std::int64_t>({0, 8, 3});
    for (Elements* table : {&cos_, &sin_}) {
      *table = Elements(rotary.dtype, rotary.positions * stride);
      for (std::int64_t i = 0; i < table->count(); ++i) table->set(i, number() / 3.0);
    }
    shape.rotary = rotary;
    tensors.rotary = {cos_.data(), sin_.data(), stride, stride, nullptr, nullptr};
    if (coin()) return;
    for (std::int64_t b = 0; b < p.batch; ++b) {
      starts_.push_back(static_cast<std::int32_t>(below(20)));
    }
    tensors.rotary.seqlens = starts_.data();
  }

  /// Memory for a (batch, seqlen, heads, dim) tensor, heads inside or outside, and its strides.
  Tensor lay(Elements& memory, Dtype dtype, std::int64_t rows, std::int64_t total,
             std::int64_t heads, std::int64_t dim, std::int64_t& start) {
    const Problem& p = shape.problem;
    const std::int64_t pitch = dim + gap_, batch = p.packed ? 1 : p.batch;
    const std::int64_t seqlen = p.packed ? total : rows;
    start = gap_;
    memory = Elements(dtype, batch * seqlen * heads * pitch + 2 * gap_ + 16);
    const bool inside = coin();
    return {address(memory, start), seqlen * heads * pitch, inside ? heads * pitch : pitch,
            inside ? pitch : seqlen * pitch};
  }
  static void* address(Elements& elements, std::int64_t start) {
    return static_cast<char*>(elements.data()) + start * elements.element_bytes();
  }

  /// Normals, and in some rows zeros, NaN, infinities, what is subnormal or huge.
  void fill(Elements& memory, std::int64_t dim) {
    constexpr double kInf = std::numeric_limits<double>::infinity();
    const bool wild = below(3) == 0;
    double scale = 1.0;
    for (std::int64_t i = 0; i < memory.count(); ++i) {
      if (i % (dim + gap_) == 0) {
        scale = wild ? one_of({1.0, 0.0, 1e-30, 3e-36, 1e-39, 1e30, 3e38, 1.0}) : 1.0;
      }
      memory.set(i, number() * scale);
      if (wild && below(40) == 0) memory.set(i, one_of({kInf, -kInf, std::nan(""), 0.0, -0.0}));
    }
  }

  /// Numbers of a Scaling, with gaps; written ones are poisoned.
  Scales numbers(std::vector<float>& memory, Scaling by, std::int64_t block, std::int64_t columns) {
    const Problem& p = shape.problem;
    const std::int64_t heads = by == Scaling::token ? p.num_heads : p.num_heads_k;
    std::int64_t count = 1;
    if (by == Scaling::token) count = p.packed ? p.total_q : p.seqlen_q;
    if (by == Scaling::block) count = p.scale_blocks(block);
    if (by == Scaling::channel) count = columns;
    const bool written = by == Scaling::token || by == Scaling::block;
    const bool batches = !(written && p.packed);
    const std::int64_t pitch = count + below(3), gap = one_of<std::int64_t>({0, 4, 1});
    memory.resize(size((batches ? p.batch : 1) * heads * pitch + gap));
    for (float& x : memory) {
      x = written ? std::bit_cast<float>(kPoison)
                  : static_cast<float>(std::exp(number()) * (below(30) == 0 ? 1e-3 : 1.0));
    }
    return {memory.data() + gap, heads * pitch, pitch};
  }

  void draw_tensors() {
    const Problem& p = shape.problem;
    const ScaleShape& s = p.scales;
    const bool all = coin();
    q_.there = all || coin();
    k_.there = all || coin();
    v_.there = s.v != Scaling::none && (all || coin());
    if (!q_.there && !v_.there) k_.there = true;
    const auto draw = [&](Result& r, ConstTensor& in, Tensor& out, Dtype to, bool queries,
                          std::int64_t heads, std::int64_t dim) {
      const std::int64_t rows = queries ? p.seqlen_q : p.seqlen_k;
      const std::int64_t total = queries ? p.total_q : p.total_k;
      in = lay(r.in, shape.dtype, rows, total, heads, dim, r.in_start);
      fill(r.in, dim);
      out = lay(r.out, to, rows, total, heads, dim, r.out_start);
    };
    if (q_.there) draw(q_, tensors.q, tensors.q_out, p.dtype, true, p.num_heads, p.head_dim);
    if (k_.there) draw(k_, tensors.k, tensors.k_out, p.dtype, false, p.num_heads_k, p.head_dim);
    if (v_.there) {
      draw(v_, tensors.v, tensors.v_out, p.stored_v(), false, p.num_heads_k, p.head_dim_v);
    }
    if (v_.there && p.v_tiles) {
      const std::int64_t head = p.value_tile_bytes() + 16 * below(2);
      const std::int64_t heads = p.num_heads_k * (p.packed ? 1 : p.batch);
      v_.out = Elements(Dtype::e4m3, heads * head + 64);
      // Vectors of bytes begin at multiples of 16.
      v_.out_start =
          32 - static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(v_.out.data()) % 16);
      tensors.v_out = {address(v_.out, v_.out_start), p.num_heads_k * head, 0, head};
    }
    tensors.q_scale = numbers(q_.scale, s.q, 0, 0);
    tensors.k_scale = numbers(k_.scale, s.k, s.block_k, 0);
    if (s.v != Scaling::none) tensors.v_scale = numbers(v_.scale, s.v, s.block_v, p.head_dim_v);
    if (s.v_shift) tensors.v_shift = numbers(v_shift_, Scaling::channel, 0, p.head_dim_v);
    if (!s.score_shift) return;
    tensors.k_mean = numbers(k_mean_, Scaling::channel, 0, p.head_dim);
    if (q_.there) tensors.score_shift = numbers(shift_, Scaling::token, 0, 0);
  }

  // ---- what must come of it, by literal loops

  std::int64_t first(bool queries, std::int64_t b) const {
    if (!shape.problem.packed) return 0;
    return (queries ? cu_q_ : cu_k_)[size(b)];
  }
  std::int64_t offset(const ConstTensor& t, bool queries, std::int64_t b, std::int64_t i,
                      std::int64_t h) const {
    return (shape.problem.packed ? 0 : b * t.stride_batch) +
           (first(queries, b) + i) * t.stride_seqlen + h * t.stride_head;
  }
  static float channel(const ConstScales& s, std::int64_t b, std::int64_t h, std::int64_t c) {
    return s.data[b * s.stride_batch + h * s.stride_head + c];
  }

  void rotate(std::vector<float>& x, std::int64_t position) const {
    rotate_fused(x, *shape.rotary, cos_, sin_, tensors.rotary.stride_cos, position);
  }
  void transform(std::vector<float>& x) const {
    const std::int64_t n = shape.hadamard;
    if (n == 0) return;
    for (std::int64_t stride = 1; stride < n; stride *= 2) {
      for (std::size_t i = 0; i < x.size(); ++i) {
        if ((i & size(stride)) != 0) continue;
        const float a = x[i], b = x[i + size(stride)];
        x[i] = a + b;
        x[i + size(stride)] = a - b;
      }
    }
    for (float& y : x) y *= static_cast<float>(1.0 / std::sqrt(static_cast<double>(n)));
  }

  /// A row of q or k on its way to the cast.
  std::vector<float> row(const Result& r, const ConstTensor& t, bool queries, std::int64_t b,
                         std::int64_t i, std::int64_t h) {
    const Problem& p = shape.problem;
    std::vector<float> x(size(p.head_dim));
    for (std::int64_t c = 0; c < p.head_dim; ++c) {
      x[size(c)] = static_cast<float>(r.in.at(r.in_start + offset(t, queries, b, i, h) + c));
    }
    if (shape.rotary) {
      const std::int64_t start = starts_.empty() ? 0 : starts_[size(b)];
      const std::int64_t behind = lengths_k_[size(b)] - lengths_q_[size(b)];
      const bool constant = shape.rotary->constant_q;
      rotate(x, queries ? start + behind + (constant ? 0 : i) : start + i);
    }
    const std::int64_t head_k = queries ? h / p.group() : h;
    if (p.scales.score_shift && queries) expect_shift(x, b, i, h);
    for (std::int64_t c = 0; c < p.head_dim; ++c) {
      if (p.scales.score_shift && !queries) x[size(c)] -= channel(tensors.k_mean, b, head_k, c);
      if (shape.signs) x[size(c)] *= signs_[size(c)];
    }
    transform(x);
    return x;
  }
  void expect_shift(const std::vector<float>& x, std::int64_t b, std::int64_t i, std::int64_t h) {
    const Problem& p = shape.problem;
    double sum = 0.0, sizes = 0.0;
    for (std::int64_t c = 0; c < p.head_dim; ++c) {
      const double m = channel(tensors.k_mean, b, h / p.group(), c);
      sum += static_cast<double>(x[size(c)]) * m;
      sizes += std::abs(static_cast<double>(x[size(c)]) * m);
    }
    const Scales& s = tensors.score_shift;
    const std::int64_t at = s.data - shift_.data() +
                            (p.packed ? first(true, b) : b * s.stride_batch) + h * s.stride_head +
                            i;
    shift_expected_[size(at)] = sum;
    shift_allowed_[size(at)] =
        sizes < 1e38 ? 1e-5 * sizes + 1e-37 : std::numeric_limits<double>::infinity();
  }
  std::vector<float> value(std::int64_t b, std::int64_t i, std::int64_t h) const {
    const Problem& p = shape.problem;
    std::vector<float> x(size(p.head_dim_v));
    for (std::int64_t c = 0; c < p.head_dim_v; ++c) {
      x[size(c)] =
          static_cast<float>(v_.in.at(v_.in_start + offset(tensors.v, false, b, i, h) + c));
      if (p.scales.v_shift) x[size(c)] -= channel(tensors.v_shift, b, h, c);
    }
    return x;
  }

  /// Rows that share a scale, made by make(row), become elements at place(row, column).
  template <class Make, class Place>
  void expect_rows(Result& r, Dtype dtype, Scaling by, const ConstScales& s, std::int64_t scale_at,
                   std::int64_t begin, std::int64_t end, const Make& make, const Place& place) {
    std::vector<std::vector<float>> rows;
    for (std::int64_t i = begin; i < end; ++i) rows.push_back(make(i));
    float factor = 1.0F;
    if (by == Scaling::token || by == Scaling::block) {
      const RoundedScale written = scale_of(rows, dtype);
      r.scale_expected[size(s.data - r.scale.data() + scale_at)] = written.scale;
      factor = written.factor;
    } else {
      factor = 1.0F / s.data[scale_at];
    }
    for (std::int64_t i = begin; i < end; ++i) {
      const std::vector<float>& x = rows[size(i - begin)];
      for (std::int64_t c = 0; c < std::ssize(x); ++c) {
        if (by == Scaling::channel) factor = 1.0F / s.data[scale_at + c];
        r.expected.set(place(i, c), rounded(x[size(c)], factor, dtype));
      }
    }
  }

  /// Everything of one sequence and head.
  template <class Make, class Place>
  void expect_head(Result& r, Dtype dtype, bool queries, Scaling by, std::int64_t block,
                   const ConstScales& s, std::int64_t b, std::int64_t h, const Make& make,
                   const Place& place) {
    const Problem& p = shape.problem;
    const std::int64_t rows = (queries ? lengths_q_ : lengths_k_)[size(b)];
    const bool written = by == Scaling::token || by == Scaling::block;
    std::int64_t group = by == Scaling::token ? 1 : by == Scaling::block ? block : rows;
    for (std::int64_t begin = 0; begin < rows; begin += group) {
      const std::int64_t head = queries && by == Scaling::head ? h / p.group() : h;
      std::int64_t at = written && p.packed ? 0 : b * s.stride_batch;
      at = by == Scaling::tensor ? 0 : at + head * s.stride_head;
      if (written) at += begin / group;
      if (written && p.packed) {
        at += by == Scaling::token ? first(true, b) : first(false, b) / block + b;
      }
      expect_rows(r, dtype, by, s, at, begin, std::min(begin + group, rows), make, place);
    }
  }

  void expect() {
    const Problem& p = shape.problem;
    const ScaleShape& s = p.scales;
    for (Result* r : {&q_, &k_, &v_}) {
      r->expected = r->out;
      r->scale_before = r->scale_expected = r->scale;
    }
    shift_before_ = shift_;
    shift_expected_.assign(shift_.size(), std::nan(""));
    shift_allowed_.assign(shift_.size(), 0.0);
    for (std::int64_t b = 0; b < p.batch; ++b) {
      for (std::int64_t h = 0; q_.there && h < p.num_heads; ++h) {
        expect_head(
            q_, p.dtype, true, s.q, 0, tensors.q_scale, b, h,
            [&](std::int64_t i) { return row(q_, tensors.q, true, b, i, h); },
            [&](std::int64_t i, std::int64_t c) {
              return q_.out_start + offset(tensors.q_out, true, b, i, h) + c;
            });
      }
      for (std::int64_t h = 0; h < p.num_heads_k; ++h) expect_keys(b, h);
    }
  }
  void expect_keys(std::int64_t b, std::int64_t h) {
    const Problem& p = shape.problem;
    const ScaleShape& s = p.scales;
    if (k_.there) {
      expect_head(
          k_, p.dtype, false, s.k, s.block_k, tensors.k_scale, b, h,
          [&](std::int64_t i) { return row(k_, tensors.k, false, b, i, h); },
          [&](std::int64_t i, std::int64_t c) {
            return k_.out_start + offset(tensors.k_out, false, b, i, h) + c;
          });
    }
    if (!v_.there) return;
    if (p.v_tiles) expect_tiles(b, h);
    expect_head(
        v_, p.stored_v(), false, s.v, s.block_v, tensors.v_scale, b, h,
        [&](std::int64_t i) { return value(b, i, h); },
        [&](std::int64_t i, std::int64_t c) {
          return p.v_tiles ? tile_place(b, h, i, c)
                           : v_.out_start + offset(tensors.v_out, false, b, i, h) + c;
        });
  }

  std::int64_t tile_rows() const {
    for (const std::int64_t columns : {64, 96, 128, 192}) {
      if (shape.problem.head_dim_v <= columns) return columns + 8;
    }
    return 256 + 8;
  }
  std::int64_t tile_place(std::int64_t b, std::int64_t h, std::int64_t key,
                          std::int64_t column) const {
    constexpr std::int64_t kOrder[] = {0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15};
    const Problem& p = shape.problem;
    const std::int64_t first_tile = p.packed ? first(false, b) / 128 + b : 0;
    const std::int64_t place = std::find(kOrder, kOrder + 16, key % 16) - kOrder;
    const std::int64_t half = (key / 16 + column / 4) % 2;
    return v_.out_start + (p.packed ? 0 : b * tensors.v_out.stride_batch) +
           h * tensors.v_out.stride_head + (first_tile * 4 + key / 32) * tile_rows() * 32 +
           column * 32 + half * 16 + place;
  }
  /// Zeros, and ones behind them.
  void expect_tiles(std::int64_t b, std::int64_t h) {
    const std::int64_t keys = (lengths_k_[size(b)] + 127) / 128 * 128;
    for (std::int64_t key = 0; key < keys; ++key) {
      for (std::int64_t c = 0; c < tile_rows(); ++c) {
        v_.expected.set(tile_place(b, h, key, c), c < tile_rows() - 8 ? 0.0 : 1.0);
      }
    }
  }

  static void check(const char* name, const Result& r, const std::string& what) {
    for (std::int64_t i = 0; i < r.out.count(); ++i) {
      ASSERT_TRUE(r.out.same(i, r.expected)) << name << " element " << i << ": " << r.out.at(i)
                                             << ", not " << r.expected.at(i) << "; " << what;
    }
    for (std::size_t i = 0; i < r.scale.size(); ++i) {
      ASSERT_EQ(std::bit_cast<std::uint32_t>(r.scale[i]),
                std::bit_cast<std::uint32_t>(r.scale_expected[i]))
          << name << "_scale " << i << ": " << r.scale[i] << ", not " << r.scale_expected[i] << "; "
          << what;
    }
  }

  std::mt19937& random_;
  bool gpu_;
  bool plain_ = false;    ///< of 16 bits, neither rotated nor shifted, in whole pieces
  std::int64_t gap_ = 0;  ///< elements between rows and around tensors that belong to nobody
  std::vector<std::int64_t> lengths_q_, lengths_k_;
  std::vector<std::int32_t> cu_q_, cu_k_, starts_;
  std::vector<float> signs_, k_mean_, v_shift_, shift_, shift_before_;
  std::vector<double> shift_expected_, shift_allowed_;
  Elements cos_, sin_;
  Result q_, k_, v_;
};

}  // namespace tessera
