// A random append in memory with gaps, and what it must leave there by literal loops: for the tests
// of every backend's append.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "elements.h"
#include "rounded.h"
#include "tessera/tessera.hpp"

namespace tessera {

/// Rows of random numbers on their way into a poisoned cache.
class Appended {
 public:
  AppendShape shape;
  AppendTensors tensors;

  /// What is drawn; wild: with rows, pages, slots and positions that do not exist; wide: quantised
  /// by token, of many odd elements.
  enum class Kind : std::uint8_t { any, wild, wide };

  Appended(std::mt19937& random, Kind kind) : random_(random), kind_(kind) {
    draw_sizes();
    draw_places();
    draw_rotary();
    draw_rows();
    expect();
  }
  ~Appended() = default;
  Appended(const Appended&) = delete;
  Appended(Appended&&) = delete;
  Appended& operator=(Appended&&) = delete;
  Appended& operator=(const Appended&) = delete;

  /// The cache and q as they were before.
  void clear() {
    k_.fill();
    v_.fill();
    k_scale_ = k_scale_before_;
    v_scale_ = v_scale_before_;
    point_to_scales();
    if (in_place()) {
      q_ = q_before_;
      tensors.q.data = address(q_, q_start_);
      tensors.q_out.data = address(q_, q_start_);
    } else {
      q_out_.fill();
    }
  }

  /// Rows are where they belong, bit for bit unless rotated, and nothing else has been written.
  void check(const std::string& what) const {
    check("k", k_, k_expected_, what);
    check("v", v_, v_expected_, what);
    check("k_scale", k_scale_, k_scale_expected_, what);
    check("v_scale", v_scale_, v_scale_expected_, what);
    if (shape.num_heads > 0) check("q_out", in_place() ? q_ : q_out_, q_expected_, what);
  }

  /// Nothing has been written since clear().
  bool untouched() const {
    const auto all = [](const Elements& elements) {
      for (std::int64_t i = 0; i < elements.count(); ++i) {
        if (!elements.untouched(i)) return false;
      }
      return true;
    };
    return all(k_) && all(v_) && k_scale_ == k_scale_before_ && v_scale_ == v_scale_before_ &&
           (in_place() ? q_ == q_before_ : all(q_out_));
  }

  bool in_place() const { return tensors.q.data == tensors.q_out.data; }

  std::string text() const {
    const AppendShape& s = shape;
    std::string text =
        std::string(to_string(s.dtype)) + " b=" + std::to_string(s.batch) +
        " h=" + std::to_string(s.num_heads) + "/" + std::to_string(s.num_heads_k) +
        " q=" + std::to_string(s.seqlen_q) + " k=" + std::to_string(s.seqlen_k) +
        " new=" + std::to_string(s.cache.seqlen_new) + " d=" + std::to_string(s.head_dim) + "/" +
        std::to_string(s.head_dim_v) + " pages=" + std::to_string(s.cache.num_pages) + "x" +
        std::to_string(s.cache.page_size) + " rows=" + std::to_string(s.cache.rows) +
        (s.cache.lengths == Lengths::after    ? " after"
         : s.cache.lengths == Lengths::before ? " before"
                                              : " slots") +
        (s.packed ? " packed=" + std::to_string(s.total_q) : "") +
        (s.packed_new ? " packed_new=" + std::to_string(s.total_new) : "") +
        (in_place() ? " in place" : "") + " gap=" + std::to_string(gap_) +
        (s.quantizes() ? std::string(" kv=") + to_string(s.stored_kv()) +
                             " scales=" + to_string(s.scale_k) + "/" + to_string(s.scale_v)
                       : "");
    if (!s.rotary) return text;
    return text + " rotary=" + std::to_string(s.rotary->dim) + " of " + to_string(s.rotary->dtype) +
           (s.rotary->interleaved ? " interleaved" : "") +
           (s.rotary->constant_q ? " constant_q" : "") +
           (tensors.rotary.seqlens != nullptr ? " seqlens" : "");
  }

 private:
  /// Elements, and of each what may be between it and what is expected; 0: bit for bit.
  struct Expected {
    Elements elements;
    std::vector<double> allowed;
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

  void draw_sizes() {
    AppendShape& s = shape;
    s.dtype = one_of({Dtype::f32, Dtype::bf16, Dtype::f16});
    s.batch = 1 + below(5);
    s.num_heads_k = 1 + below(6);
    s.head_dim = one_of<std::int64_t>({1, 2, 6, 8, 10, 16, 24, 32, 64, 80, 96, 100, 128, 200});
    s.head_dim_v = one_of<std::int64_t>({s.head_dim, s.head_dim, 1, 5, 8, 64, 136});
    gap_ = one_of<std::int64_t>({0, 0, 8, 4, 3});
    if (coin()) {
      using enum Scaling;
      s.dtype_kv = coin() ? Dtype::e4m3 : Dtype::i8;
      s.scale_k = one_of({tensor, head, token, token});
      s.scale_v = one_of({tensor, head, token, token});
    } else if (coin()) {
      s.dtype_kv = s.dtype;
    }
    if (kind_ == Kind::wide) {
      s.dtype_kv = coin() ? Dtype::e4m3 : Dtype::i8;
      s.scale_k = s.scale_v = Scaling::token;
      s.num_heads_k = 5 + below(2);
      s.head_dim = one_of<std::int64_t>({200, 256});
      gap_ = 3;
    }
    if (s.head_dim > 1 && below(4) != 0) {
      RotaryShape rotary;
      rotary.dim = coin() ? s.head_dim / 2 * 2 : 2 * (1 + below(s.head_dim / 2));
      if (coin()) rotary.dim = std::max<std::int64_t>(rotary.dim / 16 * 16, 2);
      rotary.dtype = coin() ? s.dtype : Dtype::f32;
      rotary.interleaved = coin();
      s.rotary = rotary;
      s.num_heads = below(4) * s.num_heads_k;
    }
    s.seqlen_k = 1 + below(60);
    CacheShape& cache = s.cache;
    s.slot_mapping = below(3) == 0;
    cache.lengths = s.slot_mapping ? Lengths::full : coin() ? Lengths::before : Lengths::after;
    cache.page_size = coin() ? 0 : 1 + below(coin() ? 4 : 64);
    cache.page_ids = cache.paged() && coin() ? PageIds::i64 : PageIds::i32;
    if (s.slot_mapping) {
      s.packed = s.packed_new = true;
      s.total_new = below(30);
      s.total_q = below(20);
      return;
    }
    if (coin()) cache.rows = s.batch + below(3);
    cache.seqlen_new = below(std::min<std::int64_t>(s.seqlen_k, 12) + 1);
    s.seqlen_q = below(6);
    s.packed = coin();
    s.packed_new = coin();
    lengths_new_ = draw_lengths(s.packed_new, s.cache.seqlen_new, cu_new_);
    lengths_q_ = draw_lengths(s.packed, s.seqlen_q, cu_q_);
    if (s.packed) s.total_q = cu_q_.back();
    if (s.packed_new) s.total_new = cu_new_.back();
  }

  std::vector<std::int64_t> draw_lengths(bool packed, std::int64_t longest,
                                         std::vector<std::int32_t>& cu) {
    std::vector<std::int64_t> lengths;
    cu = {0};
    for (std::int64_t b = 0; b < shape.batch; ++b) {
      lengths.push_back(packed ? below(longest + 1) : longest);
      cu.push_back(cu.back() + static_cast<std::int32_t>(lengths.back()));
    }
    return lengths;
  }

  /// Lengths, rows, pages and slots.
  void draw_places() {
    AppendShape& s = shape;
    CacheShape& cache = s.cache;
    CacheTensors& t = tensors.cache;
    const std::int64_t rows = cache.rows > 0 ? cache.rows : s.batch;
    const std::int64_t columns =
        cache.paged() ? (s.seqlen_k + cache.page_size - 1) / cache.page_size : 0;
    if (cache.paged()) cache.num_pages = rows * columns + below(3);
    if (s.slot_mapping) {
      const std::int64_t slots = s.entries() * s.entry_slots();
      s.total_new = std::min(s.total_new, slots);
      for (const std::int64_t slot : some(slots, s.total_new)) {
        slot_mapping_.push_back(below(6) == 0 ? -1 : slot);
        if (wild_ && below(4) == 0) slot_mapping_.back() = one_of({slots, slots + 7, -5L});
      }
      tensors.slot_mapping = slot_mapping_.data();
      return;
    }
    const std::vector<std::int64_t> picked = some(rows, s.batch);
    const std::vector<std::int64_t> pages = some(cache.num_pages, rows * columns);
    // Columns that no new row needs hold what is no page.
    const std::int64_t stride = columns + below(3);
    table_.assign(static_cast<std::size_t>(rows * stride), -3);
    for (std::int64_t b = 0; b < s.batch; ++b) {
      const auto i = static_cast<std::size_t>(b);
      const std::int64_t row = cache.rows > 0 ? picked[i] : b, count = lengths_new_[i];
      std::int64_t first = below(s.seqlen_k - count + 1);
      if (wild_ && below(4) == 0) first += s.seqlen_k - count;
      const bool after = cache.lengths == Lengths::after;
      seqlens_.push_back(static_cast<std::int32_t>(after ? first + count : first));
      if (wild_ && after && below(4) == 0) seqlens_.back() = static_cast<std::int32_t>(count / 2);
      if (below(6) == 0)
        seqlens_.back() = static_cast<std::int32_t>(after ? -below(3) : -1 - below(3));
      index_.push_back(static_cast<std::int32_t>(row));
      if (wild_ && below(4) == 0) index_.back() = static_cast<std::int32_t>(one_of({-1L, rows}));
      if (!cache.paged() || count == 0 || seqlens_.back() < 0) continue;
      first = after ? seqlens_.back() - count : seqlens_.back();
      for (std::int64_t slot = first; slot < first + count; ++slot) {
        if (slot < 0 || slot >= s.seqlen_k) continue;
        const std::int64_t column = slot / cache.page_size;
        std::int64_t& page = table_[static_cast<std::size_t>(row * stride + column)];
        page = pages[static_cast<std::size_t>(row * columns + column)];
        if (wild_ && below(8) == 0) page = one_of({-1L, cache.num_pages});
      }
    }
    table_i32_.assign(table_.begin(), table_.end());
    t.seqlens = seqlens_.data();
    if (s.packed_new) t.cu_seqlens_new = cu_new_.data();
    if (s.packed && s.num_heads > 0) tensors.cu_seqlens_q = cu_q_.data();
    if (cache.rows > 0) t.index = index_.data();
    if (!cache.paged()) return;
    t.page_table = cache.page_ids == PageIds::i32 ? static_cast<const void*>(table_i32_.data())
                                                  : table_.data();
    t.stride_page_table = stride;
  }

  /// `count` different numbers below n, in any order.
  std::vector<std::int64_t> some(std::int64_t n, std::int64_t count) {
    std::vector<std::int64_t> all(static_cast<std::size_t>(n));
    std::iota(all.begin(), all.end(), 0);
    std::shuffle(all.begin(), all.end(), random_);
    all.resize(static_cast<std::size_t>(count));
    return all;
  }

  void draw_rotary() {
    if (!shape.rotary) return;
    RotaryShape& rotary = *shape.rotary;
    rotary.positions = shape.seqlen_k + 20;
    rotary.position_type = coin() ? PositionType::i32 : PositionType::i64;
    const std::int64_t half = rotary.dim / 2;
    const std::int64_t stride = half + one_of<std::int64_t>({0, 8, 3});
    RotaryTensors& t = tensors.rotary;
    for (Elements* table : {&cos_, &sin_}) {
      *table = Elements(rotary.dtype, rotary.positions * stride);
      for (std::int64_t row = 0; row < rotary.positions; ++row) {
        for (std::int64_t j = 0; j < half; ++j) table->set(row * stride + j, number() / 3.0);
      }
    }
    t.cos = cos_.data();
    t.sin = sin_.data();
    t.stride_cos = t.stride_sin = stride;
    const auto position = [&](std::int64_t rows) {
      const std::int64_t last = rotary.positions - rows;
      return wild_ && below(5) == 0 ? one_of({-2L, last + 1, last + 100}) : below(last + 1);
    };
    if (shape.slot_mapping) {
      for (std::int64_t i = 0; i < std::max(shape.rows_q(), shape.rows_new()); ++i) {
        positions_.push_back(position(1));
      }
      positions_i32_.assign(positions_.begin(), positions_.end());
      t.positions = rotary.position_type == PositionType::i32
                        ? static_cast<const void*>(positions_i32_.data())
                        : positions_.data();
      return;
    }
    rotary.constant_q = coin();
    if (coin()) return;
    for (std::int64_t b = 0; b < shape.batch; ++b) {
      starts_.push_back(static_cast<std::int32_t>(position(12)));
    }
    t.seqlens = starts_.data();
  }

  double number() { return std::normal_distribution<double>()(random_); }
  static void* address(Elements& elements, std::int64_t start) {
    return static_cast<char*>(elements.data()) + start * elements.element_bytes();
  }

  /// Memory for a (batch, seqlen, heads, dim) tensor, heads inside or outside, and its strides.
  Tensor lay(Elements& memory, Dtype dtype, std::int64_t batch, std::int64_t seqlen,
             std::int64_t heads, std::int64_t dim, std::int64_t& start) {
    const std::int64_t pitch = dim + gap_;
    start = gap_;
    memory = Elements(dtype, batch * seqlen * heads * pitch + 2 * gap_ + 16);
    const bool inside = coin();
    return {address(memory, start), seqlen * heads * pitch, inside ? heads * pitch : pitch,
            inside ? pitch : seqlen * pitch};
  }

  void draw_rows() {
    const AppendShape& s = shape;
    std::int64_t start = 0;
    const auto draw = [&](Elements& memory, std::int64_t rows, std::int64_t seqlen, bool packed,
                          std::int64_t heads, std::int64_t dim) {
      const Tensor t =
          lay(memory, s.dtype, packed ? 1 : s.batch, packed ? rows : seqlen, heads, dim, start);
      for (std::int64_t i = 0; i < memory.count(); ++i) memory.set(i, number());
      return t;
    };
    tensors.k_new =
        draw(k_new_, s.total_new, s.cache.seqlen_new, s.packed_new, s.num_heads_k, s.head_dim);
    new_start_ = start;
    tensors.v_new =
        draw(v_new_, s.total_new, s.cache.seqlen_new, s.packed_new, s.num_heads_k, s.head_dim_v);
    const auto cached = [&](Elements& memory, std::int64_t dim) {
      return lay(memory, s.stored_kv(), s.entries(), s.entry_slots(), s.num_heads_k, dim,
                 cache_start_);
    };
    tensors.k = cached(k_, s.head_dim);
    tensors.v = cached(v_, s.head_dim_v);
    if (s.quantizes()) {
      make_wild(k_new_, s.head_dim);
      make_wild(v_new_, s.head_dim_v);
      tensors.k_scale = draw_scales(k_scale_, s.scale_k);
      tensors.v_scale = draw_scales(v_scale_, s.scale_v);
      k_scale_before_ = k_scale_;
      v_scale_before_ = v_scale_;
      point_to_scales();
    }
    if (s.num_heads == 0) return;
    const Tensor q = draw(q_, s.total_q, s.seqlen_q, s.packed, s.num_heads, s.head_dim);
    q_start_ = start;
    tensors.q = q;
    q_before_ = q_;
    tensors.q_out = q;
    if (coin()) return;
    tensors.q_out = lay(q_out_, s.dtype, s.packed ? 1 : s.batch, s.packed ? s.total_q : s.seqlen_q,
                        s.num_heads, s.head_dim, q_start_);
  }

  /// In some rows zeros, NaN, infinities, what is subnormal or huge.
  void make_wild(Elements& memory, std::int64_t dim) {
    constexpr double kInf = std::numeric_limits<double>::infinity();
    if (below(3) != 0) return;
    double scale = 1.0;
    for (std::int64_t i = 0; i < memory.count(); ++i) {
      if (i % (dim + gap_) == 0) scale = one_of({1.0, 0.0, 1e-30, 3e-36, 1e-39, 1e30, 3e38, 1.0});
      memory.set(i, memory.at(i) * scale);
      if (below(40) == 0) memory.set(i, one_of({kInf, -kInf, std::nan(""), 0.0, -0.0}));
    }
  }
  /// By token poison that lies as a cache of one column does; else numbers.
  Scales draw_scales(Elements& memory, Scaling by) {
    const AppendShape& s = shape;
    const std::int64_t batch = s.slot_mapping ? 1 : s.batch;
    Tensor t;
    if (by == Scaling::token) {
      t = lay(memory, Dtype::f32, s.entries(), s.entry_slots(), s.num_heads_k, 1, scale_start_);
    } else {
      t = lay(memory, Dtype::f32, batch, 1, s.num_heads_k, 1, scale_start_);
      for (std::int64_t i = 0; i < memory.count(); ++i) memory.set(i, std::exp(number()));
    }
    return {nullptr, t.stride_batch, t.stride_head, t.stride_seqlen};
  }
  /// clear() may move them.
  void point_to_scales() {
    if (!shape.quantizes()) return;
    tensors.k_scale.data = static_cast<float*>(address(k_scale_, scale_start_));
    tensors.v_scale.data = static_cast<float*>(address(v_scale_, scale_start_));
  }

  // ---- what must come of it, by literal loops

  static std::int64_t offset(const ConstTensor& t, std::int64_t b, std::int64_t i, std::int64_t h) {
    return b * t.stride_batch + i * t.stride_seqlen + h * t.stride_head;
  }

  /// A row of a head: rotated at the position, if the tables have it.
  void expect_row(const Elements& from, std::int64_t at, Expected& to, std::int64_t to_at,
                  std::int64_t dim, std::int64_t position) {
    for (std::int64_t j = 0; j < dim; ++j) to.elements.copy(to_at + j, from, at + j);
    if (!shape.rotary || position < 0 || position >= shape.rotary->positions) return;
    const RotaryShape& r = *shape.rotary;
    const std::int64_t half = r.dim / 2;
    for (std::int64_t j = 0; j < half; ++j) {
      const std::int64_t x = r.interleaved ? 2 * j : j, y = r.interleaved ? 2 * j + 1 : j + half;
      const double a = from.at(at + x), b = from.at(at + y);
      const double c = cos_.at(position * tensors.rotary.stride_cos + j);
      const double s = sin_.at(position * tensors.rotary.stride_sin + j);
      const auto set = [&](std::int64_t column, double value) {
        to.elements.set(to_at + column, value);
        to.allowed[static_cast<std::size_t>(to_at + column)] =
            2.0 * reference::unit_roundoff(shape.dtype) * std::abs(value) +
            0x1p-22 * (std::abs(a) + std::abs(b)) * (std::abs(c) + std::abs(s)) +
            2.0 * reference::subnormal_roundoff(shape.dtype);
      };
      set(x, a * c - b * s);
      set(y, a * s + b * c);
    }
  }

  /// A row that is quantised. at: of its scale.
  void expect_rounded(const Elements& from, std::int64_t from_at, Expected& to, std::int64_t to_at,
                      std::int64_t dim, std::int64_t position, Scaling by, Expected& scales,
                      std::int64_t at) {
    std::vector<float> x;
    for (std::int64_t j = 0; j < dim; ++j) x.push_back(static_cast<float>(from.at(from_at + j)));
    if (shape.rotary) {
      rotate_fused(x, *shape.rotary, cos_, sin_, tensors.rotary.stride_cos, position);
    }
    const Dtype dtype = shape.stored_kv();
    float factor = 1.0F / static_cast<float>(scales.elements.at(at));
    if (by == Scaling::token) {
      const RoundedScale written = scale_of({x}, dtype);
      scales.elements.set(at, static_cast<double>(written.scale));
      factor = written.factor;
    }
    for (std::int64_t j = 0; j < dim; ++j) {
      to.elements.set(to_at + j, rounded(x[static_cast<std::size_t>(j)], factor, dtype));
    }
  }
  /// Where a head's scale is.
  std::int64_t scale_at(const Scales& s, Scaling by, std::int64_t sequence, std::int64_t entry,
                        std::int64_t slot, std::int64_t h) const {
    if (by == Scaling::tensor) return scale_start_;
    if (by == Scaling::head) return scale_start_ + sequence * s.stride_batch + h * s.stride_head;
    return scale_start_ + entry * s.stride_batch + slot * s.stride_seqlen + h * s.stride_head;
  }

  /// sequence: of which the row is; 0 if it is of none.
  void expect_new(std::int64_t sequence, std::int64_t from_b, std::int64_t from_i,
                  std::int64_t entry, std::int64_t slot, std::int64_t position) {
    const AppendShape& s = shape;
    for (std::int64_t h = 0; h < s.num_heads_k; ++h) {
      const std::int64_t k_from = new_start_ + offset(tensors.k_new, from_b, from_i, h);
      const std::int64_t v_from = new_start_ + offset(tensors.v_new, from_b, from_i, h);
      const std::int64_t k_to = cache_start_ + offset(tensors.k, entry, slot, h);
      const std::int64_t v_to = cache_start_ + offset(tensors.v, entry, slot, h);
      if (s.quantizes()) {
        expect_rounded(k_new_, k_from, k_expected_, k_to, s.head_dim, position, s.scale_k,
                       k_scale_expected_,
                       scale_at(tensors.k_scale, s.scale_k, sequence, entry, slot, h));
        expect_rounded(v_new_, v_from, v_expected_, v_to, s.head_dim_v, -1, s.scale_v,
                       v_scale_expected_,
                       scale_at(tensors.v_scale, s.scale_v, sequence, entry, slot, h));
        continue;
      }
      expect_row(k_new_, k_from, k_expected_, k_to, s.head_dim, position);
      expect_row(v_new_, v_from, v_expected_, v_to, s.head_dim_v, -1);
    }
  }
  void expect_q(std::int64_t b, std::int64_t i, std::int64_t position) {
    for (std::int64_t h = 0; h < shape.num_heads; ++h) {
      expect_row(q_before_, gap_ + offset(tensors.q, b, i, h), q_expected_,
                 q_start_ + offset(tensors.q_out, b, i, h), shape.head_dim, position);
    }
  }

  void expect() {
    const AppendShape& s = shape;
    const auto start = [](Expected& expected, const Elements& before) {
      expected = {before, std::vector<double>(static_cast<std::size_t>(before.count()), 0.0)};
    };
    start(k_expected_, k_);
    start(v_expected_, v_);
    start(k_scale_expected_, k_scale_);
    start(v_scale_expected_, v_scale_);
    if (s.num_heads > 0) start(q_expected_, in_place() ? q_before_ : q_out_);
    if (s.slot_mapping) {
      for (std::int64_t i = 0; i < s.total_new; ++i) {
        const std::int64_t number = slot_mapping_[static_cast<std::size_t>(i)];
        if (number < 0 || number >= s.entries() * s.entry_slots()) continue;
        expect_new(0, 0, i, number / s.entry_slots(), number % s.entry_slots(), own_position(i));
      }
      for (std::int64_t i = 0; s.num_heads > 0 && i < s.total_q; ++i)
        expect_q(0, i, own_position(i));
      return;
    }
    for (std::int64_t b = 0; b < s.batch; ++b) expect_sequence(b);
  }
  std::int64_t own_position(std::int64_t i) const {
    return shape.rotary ? positions_[static_cast<std::size_t>(i)] : -1;
  }

  void expect_sequence(std::int64_t b) {
    const AppendShape& s = shape;
    const CacheShape& cache = s.cache;
    const auto i = static_cast<std::size_t>(b);
    const bool after = cache.lengths == Lengths::after;
    const std::int64_t length = seqlens_[i], count = lengths_new_[i];
    const bool idle = length < 0 || (after && length == 0);
    const std::int64_t first = after ? length - count : length;
    const std::int64_t turned = starts_.empty() ? first : starts_[i];
    for (std::int64_t t = 0; t < lengths_q_[i] && s.num_heads > 0; ++t) {
      const bool constant = s.rotary && s.rotary->constant_q;
      expect_q(s.packed ? 0 : b, (s.packed ? cu_q_[i] : 0) + t,
               idle ? -1 : turned + (constant ? 0 : t));
    }
    const std::int64_t row = cache.rows > 0 ? index_[i] : b;
    for (std::int64_t t = 0; t < count && !idle; ++t) {
      const std::int64_t slot = first + t;
      if (slot < 0 || slot >= s.seqlen_k || row < 0 || row >= std::max(cache.rows, s.batch))
        continue;
      const std::int64_t from_b = s.packed_new ? 0 : b,
                         from_i = (s.packed_new ? cu_new_[i] : 0) + t;
      if (!cache.paged()) {
        expect_new(b, from_b, from_i, row, slot, turned + t);
        continue;
      }
      const std::int64_t page = table_[static_cast<std::size_t>(
          row * tensors.cache.stride_page_table + slot / cache.page_size)];
      if (page < 0 || page >= cache.num_pages) continue;
      expect_new(b, from_b, from_i, page, slot % cache.page_size, turned + t);
    }
  }

  static void check(const char* name, const Elements& is, const Expected& expected,
                    const std::string& what) {
    for (std::int64_t i = 0; i < is.count(); ++i) {
      const double allowed = expected.allowed[static_cast<std::size_t>(i)];
      if (allowed == 0.0) {
        ASSERT_TRUE(is.same(i, expected.elements))
            << name << " element " << i << ": " << is.at(i) << ", not " << expected.elements.at(i)
            << "; " << what;
      } else {
        ASSERT_NEAR(is.at(i), expected.elements.at(i), allowed)
            << name << " element " << i << "; " << what;
      }
    }
  }

  std::mt19937& random_;
  Kind kind_;
  bool wild_ = kind_ == Kind::wild;
  std::int64_t gap_ = 0;  ///< elements between rows and around tensors that belong to nobody
  std::vector<std::int64_t> lengths_new_, lengths_q_, table_, slot_mapping_, positions_;
  std::vector<std::int32_t> cu_new_, cu_q_, seqlens_, index_, table_i32_, positions_i32_, starts_;
  Elements k_new_, v_new_, q_, q_before_, cos_, sin_;
  Elements k_, v_, q_out_;
  Elements k_scale_, v_scale_, k_scale_before_, v_scale_before_;
  std::int64_t scale_start_ = 0;
  std::int64_t new_start_ = 0, cache_start_ = 0, q_start_ = 0;  ///< elements before the first row
  Expected k_expected_, v_expected_, q_expected_, k_scale_expected_, v_scale_expected_;
};

}  // namespace tessera
