// Appending to caches of 8 bits on the CPU: the cache, and attention over it, are those of
// quantize() of the same rows. What random appends leave in memory is tested with the others
// (append_test.cpp).
#include <gtest/gtest.h>

#include <cmath>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "archs.h"
#include "elements.h"
#include "tessera/tessera.hpp"

namespace tessera {
namespace {

constexpr std::int64_t kBatch = 3, kHeads = 4, kHeadsK = 2, kSlots = 24;

/// A cache in rows or in pages of four slots, and its scales.
struct Cache {
  std::int64_t dim, page_size;
  Elements k, v;
  std::vector<float> k_scale, v_scale;

  Cache(Dtype dtype, std::int64_t columns, bool paged)
      : dim(columns),
        page_size(paged ? 4 : kSlots),
        k(dtype, kBatch * kSlots * kHeadsK * columns),
        v(dtype, kBatch * kSlots * kHeadsK * columns),
        k_scale(kBatch * kSlots * kHeadsK),
        v_scale(kBatch * kSlots * kHeadsK) {}

  /// Slots and heads before it. Sequences have their pages side by side, in the opposite order.
  std::int64_t row(std::int64_t b, std::int64_t slot, std::int64_t h) const {
    const std::int64_t pages = kSlots / page_size;
    const std::int64_t page = b * pages + pages - 1 - slot / page_size;
    return (page * page_size + slot % page_size) * kHeadsK + h;
  }
  Tensor tensor(Elements& elements) const {
    return {elements.data(), page_size * kHeadsK * dim, kHeadsK * dim, dim};
  }
  Scales scales(std::vector<float>& numbers) const {
    return {numbers.data(), page_size * kHeadsK, 1, kHeadsK};
  }
  bool operator==(const Cache& other) const {
    return k == other.k && v == other.v && k_scale == other.k_scale && v_scale == other.v_scale;
  }
};

class AppendQuantized : public testing::Test {
 protected:
  std::int64_t below(std::int64_t n) {
    return std::uniform_int_distribution<std::int64_t>(0, n - 1)(random_);
  }
  template <class T>
  T one_of(std::initializer_list<T> all) {
    return all.begin()[below(static_cast<std::int64_t>(all.size()))];
  }

  void draw() {
    dtype_ = one_of({Dtype::f32, Dtype::bf16, Dtype::f16});
    kv_ = one_of({Dtype::e4m3, Dtype::i8});
    using enum Scaling;
    scale_k_ = one_of({tensor, head, token});
    scale_v_ = one_of({tensor, head, token});
    // The last one's rows are longer than numbers are kept of them.
    dim_ = one_of<std::int64_t>({2, 40, 64, 100, 128, 2304});
    paged_ = below(2) == 0;
    lengths_ = one_of({Lengths::before, Lengths::after, Lengths::full});
    rotary_.reset();
    if (below(4) != 0) {
      rotary_ = RotaryShape{.dim = one_of({dim_, dim_ / 4 * 2 + 2 - dim_ / 64 * 2}),
                            .positions = kSlots,
                            .interleaved = below(2) == 0};
    }
    text_ = std::string(to_string(dtype_)) + " kv=" + to_string(kv_) + " " + to_string(scale_k_) +
            "/" + to_string(scale_v_) + " d=" + std::to_string(dim_) + (paged_ ? " paged" : "") +
            " lengths=" + std::to_string(static_cast<int>(lengths_));
    page_table_.clear();
    for (std::int64_t b = 0; b < kBatch; ++b) {
      for (int i = 5; i >= 0; --i) page_table_.push_back(static_cast<std::int32_t>(b * 6 + i));
    }
    for (Elements* table : {&cos_, &sin_}) {
      *table = Elements(Dtype::f32, kSlots * dim_ / 2);
      for (std::int64_t i = 0; i < table->count(); ++i) table->set(i, normal_(random_));
    }
    given_k_.clear();
    given_v_.clear();
    // With slots of their own rows are of no sequence: each has the same.
    for (std::int64_t i = 0; i < kBatch * kHeadsK; ++i) {
      const auto b = static_cast<std::size_t>(lengths_ == Lengths::full ? i % kHeadsK : 0);
      const bool again = lengths_ == Lengths::full && i >= kHeadsK;
      given_k_.push_back(again ? given_k_[b] : 0.02F + 0.01F * static_cast<float>(below(9)));
      given_v_.push_back(again ? given_v_[b] : 0.02F + 0.01F * static_cast<float>(below(9)));
    }
  }

  /// New rows of a step as models have them: q, k and v of a token side by side.
  void draw_rows(const std::vector<std::int32_t>& counts) {
    cu_ = {0};
    for (const std::int32_t count : counts) cu_.push_back(cu_.back() + count);
    qkv_ = Elements(dtype_, cu_.back() * (kHeads + 2 * kHeadsK) * dim_);
    for (std::int64_t i = 0; i < qkv_.count(); ++i) qkv_.set(i, normal_(random_));
    q_ = Elements(dtype_, cu_.back() * kHeads * dim_);
  }
  /// Heads of the new rows from `head` on.
  ConstTensor rows(std::int64_t head) {
    return {static_cast<char*>(qkv_.data()) + head * dim_ * size_of(dtype_), 0,
            (kHeads + 2 * kHeadsK) * dim_, dim_};
  }
  Scales given(Scaling by, std::vector<float>& numbers, const Scales& in_cache) const {
    if (by == Scaling::token) return in_cache;
    return {numbers.data(), kHeadsK, 1};
  }

  /// The new rows behind `filled` slots of each sequence.
  void append_to(Cache& cache, const std::vector<std::int32_t>& filled) {
    AppendShape s;
    s.dtype = dtype_;
    s.dtype_kv = kv_;
    s.scale_k = scale_k_;
    s.scale_v = scale_v_;
    s.batch = kBatch;
    s.num_heads = rotary_ ? kHeads : 0;
    s.num_heads_k = kHeadsK;
    s.seqlen_q = s.seqlen_k = kSlots;
    s.head_dim = s.head_dim_v = dim_;
    s.cache.lengths = lengths_;
    s.cache.seqlen_new = lengths_ == Lengths::full ? 0 : kSlots;
    if (paged_) {
      s.cache.page_size = 4;
      s.cache.num_pages = kBatch * 6;
    }
    s.packed = s.packed_new = true;
    s.total_q = s.total_new = cu_.back();
    s.slot_mapping = lengths_ == Lengths::full;
    s.rotary = rotary_;
    AppendTensors t;
    t.k_new = rows(kHeads);
    t.v_new = rows(kHeads + kHeadsK);
    t.k = cache.tensor(cache.k);
    t.v = cache.tensor(cache.v);
    t.k_scale = given(scale_k_, given_k_, cache.scales(cache.k_scale));
    t.v_scale = given(scale_v_, given_v_, cache.scales(cache.v_scale));
    if (rotary_) {
      t.q = rows(0);
      t.q_out = {q_.data(), 0, kHeads * dim_, dim_};
      t.rotary = {cos_.data(), sin_.data(), dim_ / 2, dim_ / 2, nullptr, nullptr};
    }
    std::vector<std::int32_t> lengths = filled, positions;
    std::vector<std::int64_t> slots;
    for (std::size_t b = 0; b < kBatch; ++b) {
      const std::int32_t count = cu_[b + 1] - cu_[b];
      if (lengths_ == Lengths::after) lengths[b] += count;
      for (std::int32_t i = 0; i < count; ++i) {
        positions.push_back(filled[b] + i);
        slots.push_back(cache.row(static_cast<std::int64_t>(b), filled[b] + i, 0) / kHeadsK);
      }
    }
    if (s.slot_mapping) {
      t.slot_mapping = slots.data();
      if (rotary_) t.rotary.positions = positions.data();
    } else {
      t.cache.seqlens = lengths.data();
      t.cache.cu_seqlens_new = cu_.data();
      if (rotary_) t.cu_seqlens_q = cu_.data();
      if (paged_) t.cache.page_table = page_table_.data();
      t.cache.stride_page_table = 6;
    }
    const Status status = append(s, t);
    ASSERT_TRUE(status) << status.text;
  }

  /// The same by quantize(), and by literal loops into the cache.
  void put_into(Cache& cache, const std::vector<std::int32_t>& filled) {
    const auto words = [](Scaling by) {
      return by == Scaling::token ? std::string("block:1") : std::string(to_string(by));
    };
    const std::int64_t total = cu_.back();
    QuantizeShape s;
    s.problem = *parse_problem("fwd " + std::string(to_string(kv_)) +
                               " b=3 h=4/2 q=24 k=24 d=" + std::to_string(dim_) +
                               " packed=" + std::to_string(total) + "," + std::to_string(total) +
                               " scales=token/" + words(scale_k_) + "/" + words(scale_v_));
    s.dtype = dtype_;
    s.rotary = rotary_;
    QuantizeTensors t;
    t.k = rows(kHeads);
    t.v = rows(kHeads + kHeadsK);
    Elements k(kv_, total * kHeadsK * dim_), v(kv_, total * kHeadsK * dim_);
    t.k_out = {k.data(), 0, kHeadsK * dim_, dim_};
    t.v_out = {v.data(), 0, kHeadsK * dim_, dim_};
    // By block of one key: a head's lie side by side, with a gap behind every sequence.
    const auto blocks = static_cast<std::size_t>(total + kBatch);
    std::vector<float> k_scale(2 * blocks), v_scale(2 * blocks);
    const auto stride = static_cast<std::int64_t>(blocks);
    t.k_scale = given(scale_k_, given_k_, {k_scale.data(), 0, stride});
    t.v_scale = given(scale_v_, given_v_, {v_scale.data(), 0, stride});
    t.cu_seqlens_q = t.cu_seqlens_k = cu_.data();
    if (rotary_) {
      t.rotary = {cos_.data(), sin_.data(), dim_ / 2, dim_ / 2, filled.data(), nullptr};
    }
    const Status status = quantize(s, t);
    ASSERT_TRUE(status) << status.text;
    for (std::int64_t b = 0; b < kBatch; ++b) {
      const std::int32_t first = cu_[static_cast<std::size_t>(b)];
      const std::int32_t count = cu_[static_cast<std::size_t>(b + 1)] - first;
      for (std::int64_t i = 0; i < count; ++i) {
        for (std::int64_t h = 0; h < kHeadsK; ++h) {
          const std::int64_t row = cache.row(b, filled[static_cast<std::size_t>(b)] + i, h);
          const std::int64_t from = (first + i) * kHeadsK + h;
          for (std::int64_t c = 0; c < dim_; ++c) {
            cache.k.copy(row * dim_ + c, k, from * dim_ + c);
            cache.v.copy(row * dim_ + c, v, from * dim_ + c);
          }
          const auto at = static_cast<std::size_t>(row);
          const auto block = static_cast<std::size_t>(h * stride + first + b + i);
          if (scale_k_ == Scaling::token) cache.k_scale[at] = k_scale[block];
          if (scale_v_ == Scaling::token) cache.v_scale[at] = v_scale[block];
        }
      }
    }
  }

  /// Of the step's queries over the cache.
  Elements attention(Cache& cache, const std::vector<std::int32_t>& lengths) {
    const std::string pages = paged_ ? " pages=18x4" : "";
    const Problem p = *parse_problem("fwd " + std::string(to_string(dtype_)) +
                                     " b=3 h=4/2 q=24 k=24 d=" + std::to_string(dim_) +
                                     " packed=" + std::to_string(cu_.back()) + " cache=after" +
                                     pages + " causal kv=" + to_string(kv_) + " scales=none/" +
                                     to_string(scale_k_) + "/" + to_string(scale_v_));
    Tensors t;
    t.q = rotary_ ? ConstTensor{q_.data(), 0, kHeads * dim_, dim_} : rows(0);
    t.k = cache.tensor(cache.k);
    t.v = cache.tensor(cache.v);
    t.k_scale = given(scale_k_, given_k_, cache.scales(cache.k_scale));
    t.v_scale = given(scale_v_, given_v_, cache.scales(cache.v_scale));
    t.cache.seqlens = lengths.data();
    if (paged_) t.cache.page_table = page_table_.data();
    t.cache.stride_page_table = 6;
    t.cu_seqlens_q = cu_.data();
    Elements o(dtype_, cu_.back() * kHeads * dim_);
    t.o = {o.data(), 0, kHeads * dim_, dim_};
    const Status status = attend(p, t);
    EXPECT_TRUE(status) << status.text;
    return o;
  }

  const unsigned seed_ = std::random_device()();
  std::mt19937 random_{seed_};
  std::normal_distribution<double> normal_;
  testing::ScopedTrace trace_{__FILE__, __LINE__, "seed " + std::to_string(seed_)};

  Dtype dtype_{}, kv_{};
  Scaling scale_k_{}, scale_v_{};
  std::int64_t dim_ = 0;
  bool paged_ = false;
  Lengths lengths_{};
  std::optional<RotaryShape> rotary_;
  std::string text_;
  std::vector<std::int32_t> cu_, page_table_;
  Elements qkv_, q_, cos_, sin_;
  std::vector<float> given_k_, given_v_;
};

// A prompt, then two steps of decoding: bit for bit, scales included; and so is attention over it.
TEST_F(AppendQuantized, TheCacheIsThatOfQuantizedRows_S14) {
  for (int trial = 0; trial < (kSanitized ? 20 : 150); ++trial) {
    draw();
    SCOPED_TRACE(text_);
    Cache appended(kv_, dim_, paged_), put(kv_, dim_, paged_);
    std::vector<std::int32_t> filled = {0, 0, 0};
    for (int step = 0; step < 3; ++step) {
      std::vector<std::int32_t> counts = {1, 1, 1};
      if (step == 0) counts = {static_cast<std::int32_t>(below(12)), 1, 11};
      draw_rows(counts);
      append_to(appended, filled);
      put_into(put, filled);
      if (HasFatalFailure()) return;
      ASSERT_TRUE(appended == put) << "step " << step;
      for (std::size_t b = 0; b < kBatch; ++b) filled[b] += counts[b];
      const Elements o = attention(appended, filled);
      ASSERT_TRUE(o == attention(put, filled)) << "step " << step;
      // Numbers, not what nobody has written.
      for (std::int64_t i = 0; i < o.count(); ++i) ASSERT_TRUE(std::isfinite(o.at(i))) << i;
    }
  }
}

}  // namespace
}  // namespace tessera
