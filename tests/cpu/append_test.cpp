// Appending to a cache on the CPU: every instruction set against literal loops, and wrong
// arguments.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "appended.h"
#include "archs.h"
#include "tessera/tessera.hpp"

namespace tessera {
namespace {

class Append : public testing::Test {
 protected:
  const unsigned seed_ = std::random_device()();
  std::mt19937 random_{seed_};
  testing::ScopedTrace trace_{__FILE__, __LINE__, "seed " + std::to_string(seed_)};
};

// Types, layouts, pages of 1 to 64 slots, lengths before and after, slots, rotary embedding: any of
// it with any of it. What lies between new rows stays as it was.
TEST_F(Append, EveryRowGoesWhereItBelongs_S13) {
  Device device = this_cpu();
  for (int trial = 0; trial < (kSanitized ? 150 : 1500); ++trial) {
    Appended appended(random_, Appended::Kind::any);
    for (const Arch arch : archs()) {
      device.arch = arch;
      appended.clear();
      const std::string what = appended.text() + " " + to_string(arch);
      const Status status = append(appended.shape, appended.tensors, device);
      ASSERT_TRUE(status) << status.text << "; " << what;
      appended.check(what);
      if (HasFatalFailure()) return;
    }
  }
}

// What a GPU passes over is an error here, and then nothing is written.
TEST_F(Append, WhatDoesNotExistIsAnError_S13) {
  int refused = 0;
  for (int trial = 0; trial < 300; ++trial) {
    Appended appended(random_, Appended::Kind::wild);
    appended.clear();
    const Status status = append(appended.shape, appended.tensors, this_cpu());
    if (status) {
      appended.check(appended.text());
      if (HasFatalFailure()) return;
      continue;
    }
    ++refused;
    EXPECT_EQ(status.code, Code::invalid);
    const bool named =
        status.text.starts_with("cache.seqlens[") || status.text.starts_with("cache.index[") ||
        status.text.starts_with("cache.page_table[") || status.text.starts_with("slot_mapping[") ||
        status.text.starts_with("rotary.seqlens[") || status.text.starts_with("rotary.positions[");
    EXPECT_TRUE(named) << status.text;
    EXPECT_TRUE(appended.untouched()) << status.text;
  }
  EXPECT_GT(refused, 50);
}

/// One sequence of lengths `before`, 8 slots, and two new rows of two heads behind three; queries
/// of two heads, rotated.
struct Small {
  AppendShape shape;
  AppendTensors tensors;
  float k[64] = {}, v[64] = {}, k_new[16] = {}, v_new[16] = {}, q[16] = {}, q_out[16] = {};
  float cos[16] = {}, sin[16] = {}, scales[2][16] = {};
  std::int32_t seqlens[1] = {3}, cu[2] = {0, 2}, index[1] = {0}, pages[2] = {1, 0};
  std::int64_t slots[2] = {3, 4};

  Small() {
    shape.num_heads = shape.num_heads_k = 2;
    shape.seqlen_q = 2;
    shape.seqlen_k = 8;
    shape.head_dim = shape.head_dim_v = 4;
    shape.cache.lengths = Lengths::before;
    shape.cache.seqlen_new = 2;
    shape.rotary = RotaryShape{.dim = 4, .positions = 8};
    tensors.k = {k, 64, 8, 4};
    tensors.v = {v, 64, 8, 4};
    tensors.k_new = {k_new, 16, 8, 4};
    tensors.v_new = {v_new, 16, 8, 4};
    tensors.q = {q, 16, 8, 4};
    tensors.q_out = {q_out, 16, 8, 4};
    tensors.cache.seqlens = seqlens;
    tensors.rotary.cos = cos;
    tensors.rotary.sin = sin;
    tensors.rotary.stride_cos = tensors.rotary.stride_sin = 2;
    for (float& x : k_new) x = 1.0F;
    for (float& x : v_new) x = 2.0F;
    for (float& x : q) x = 3.0F;
    for (float& x : cos) x = 1.0F;
  }
  ~Small() = default;
  Small(const Small&) = delete;
  Small(Small&&) = delete;
  Small& operator=(Small&&) = delete;
  Small& operator=(const Small&) = delete;

  void use_slots() {
    shape.slot_mapping = shape.packed = shape.packed_new = true;
    shape.cache.lengths = Lengths::full;
    shape.cache.seqlen_new = 0;
    shape.total_q = shape.total_new = 2;
    tensors.cache.seqlens = nullptr;
    tensors.slot_mapping = slots;
    tensors.rotary.positions = cu;
  }
  void use_8_bits() {
    shape.dtype_kv = Dtype::e4m3;
    shape.scale_k = shape.scale_v = Scaling::token;
    tensors.k_scale = {scales[0], 16, 1, 2};
    tensors.v_scale = {scales[1], 16, 1, 2};
  }
  void use_pages() {
    shape.cache.page_size = 4;
    shape.cache.num_pages = 2;
    tensors.cache.page_table = pages;
    tensors.cache.stride_page_table = 2;
  }
};

// The least there is: rows 3 and 4 of the cache, nothing else.
TEST(AppendSmall, RowsGoBehindTheLength) {
  Small small;
  ASSERT_TRUE(append(small.shape, small.tensors));
  for (int i = 0; i < 64; ++i) {
    const bool added = i / 8 == 3 || i / 8 == 4;
    EXPECT_EQ(small.k[i], added ? 1.0F : 0.0F) << i;
    EXPECT_EQ(small.v[i], added ? 2.0F : 0.0F) << i;
  }
  for (const float x : small.q_out) EXPECT_EQ(x, 3.0F);
}

// A quarter turn, by both meanings of a pair, at each row's own position.
TEST(AppendSmall, PairsAreTurned) {
  for (const bool interleaved : {false, true}) {
    for (const bool constant : {false, true}) {
      Small small;
      small.shape.rotary->interleaved = interleaved;
      small.shape.rotary->constant_q = constant;
      for (int j : {0, 1}) {  // position 4, of the second row
        small.cos[8 + j] = 0.0F;
        small.sin[8 + j] = 1.0F;
      }
      ASSERT_TRUE(append(small.shape, small.tensors));
      for (int i = 0; i < 16; ++i) {
        const bool turned = i / 8 == 1, first = interleaved ? i % 2 == 0 : i % 4 < 2;
        const float sign = turned && first ? -1.0F : 1.0F;
        EXPECT_EQ(small.k[24 + i], sign) << i;
        EXPECT_EQ(small.q_out[i], constant ? 3.0F : 3.0F * sign) << i;
      }
    }
  }
}

// By hand: largest numbers 4 and 2 of e4m3, whose largest is 448; and given scales.
TEST(AppendSmall, RowsOf8BitsHaveScales_S14) {
  Small small;
  small.use_8_bits();
  Elements k(Dtype::e4m3, 64), v(Dtype::e4m3, 64);
  small.tensors.k.data = k.data();
  small.tensors.v.data = v.data();
  for (int i = 0; i < 16; ++i) small.k_new[i] = static_cast<float>(i % 4 + 1);
  std::fill_n(small.v_new + 12, 4, 0.0F);
  ASSERT_TRUE(append(small.shape, small.tensors));
  for (int slot = 0; slot < 8; ++slot) {
    for (int h = 0; h < 2; ++h) {
      const bool added = slot == 3 || slot == 4, zeros = slot == 4 && h == 1;
      EXPECT_EQ(small.scales[0][slot * 2 + h], added ? 4.0F / 448.0F : 0.0F);
      EXPECT_EQ(small.scales[1][slot * 2 + h], !added ? 0.0F : zeros ? 1.0F : 2.0F / 448.0F);
      for (int c = 0; c < 4; ++c) {
        const std::int64_t at = slot * 8 + h * 4 + c;
        EXPECT_EQ(k.untouched(at), !added);
        EXPECT_EQ(v.untouched(at), !added);
        if (!added) continue;
        // 336 lies in the middle of 320 and 352.
        const double elements[] = {112, 224, 320, 448};
        EXPECT_EQ(k.at(at), elements[c]);
        EXPECT_EQ(v.at(at), zeros ? 0.0 : 448.0);
      }
    }
  }
  small.shape.scale_k = Scaling::tensor;
  small.shape.scale_v = Scaling::head;
  float half[] = {0.5F}, by_head[] = {2.0F, 0.001F};
  small.tensors.k_scale = {half};
  small.tensors.v_scale = {by_head, 0, 1};
  ASSERT_TRUE(append(small.shape, small.tensors));
  EXPECT_EQ(k.at(26), 6.0);
  EXPECT_EQ(v.at(24), 1.0);
  EXPECT_EQ(v.at(28), 448.0);  // not 2000
  small.tensors.k_scale.data = small.tensors.v_scale.data = nullptr;
  EXPECT_EQ(append(small.shape, small.tensors).text,
            "k_scale.data = null: new rows are divided by it");
}

TEST(AppendSmall, AnyNumberOfThreadsGivesTheSameBits) {
  std::mt19937 random(3);
  AppendShape shape;
  shape.dtype = Dtype::bf16;
  shape.batch = 3;
  shape.num_heads_k = 4;
  shape.seqlen_k = 200;
  shape.head_dim = shape.head_dim_v = 64;
  shape.cache.seqlen_new = 150;
  shape.rotary = RotaryShape{.dim = 32, .positions = 200};
  const std::int64_t row = 256;
  Elements fresh(Dtype::bf16, 450 * row), tables(Dtype::f32, 3200);
  for (std::int64_t i = 0; i < fresh.count(); ++i) {
    fresh.set(i, static_cast<double>(random() % 100) - 50.0);
  }
  for (std::int64_t i = 0; i < tables.count(); ++i) tables.set(i, static_cast<double>(i % 7) / 8.0);
  const std::int32_t seqlens[] = {200, 150, 177};
  Elements expected;
  std::vector<float> expected_scales;
  const struct {
    Dtype dtype;
    Scaling scaling;
  } caches[] = {{Dtype::bf16, Scaling::none}, {Dtype::i8, Scaling::token}};
  for (const int number : {1, 2, 5, 101, 102, 105}) {
    const int threads = number % 100;
    const auto& [dtype, scaling] = caches[number / 100];
    shape.dtype_kv = dtype;
    shape.scale_k = shape.scale_v = scaling;
    std::vector<float> scales(4800);
    Elements k(dtype, 600 * row), v(dtype, 600 * row);
    AppendTensors t;
    t.k_new = t.v_new = {fresh.data(), 150 * row, row, 64};
    t.k = {k.data(), 200 * row, row, 64};
    t.v = {v.data(), 200 * row, row, 64};
    if (scaling == Scaling::token) {
      t.k_scale = {scales.data(), 800, 1, 4};
      t.v_scale = {scales.data() + 2400, 800, 1, 4};
    }
    t.cache.seqlens = seqlens;
    t.rotary = {tables.data(), tables.data(), 16, 16, nullptr, nullptr};
    Device device = this_cpu();
    device.threads = threads;
    ThreadPool pool(threads);
    const Executor executor = pool.executor();
    Execution execution;
    execution.executor = &executor;
    const Status status = append(shape, t, device, execution);
    ASSERT_TRUE(status) << status.text;
    EXPECT_FALSE(k.untouched(50 * row));
    EXPECT_TRUE(k.untouched(50 * row - 1));
    if (threads == 1) {
      expected = k;
      expected_scales = scales;
    }
    EXPECT_TRUE(k == expected) << number;
    EXPECT_EQ(scales, expected_scales) << number;
  }
}

TEST(AppendSmall, WithoutRowsNothingIsNeeded) {
  AppendShape shape;
  shape.head_dim = shape.head_dim_v = 8;
  EXPECT_TRUE(append(shape, {}));
  shape.batch = 0;
  shape.cache.seqlen_new = 1;
  shape.seqlen_k = 1;
  EXPECT_TRUE(append(shape, {}));
  shape.slot_mapping = shape.packed_new = true;
  shape.cache = {.lengths = Lengths::full};
  EXPECT_TRUE(append(shape, {}));
}

// HF's padding rows, and lengths of 0 that count no new row: left alone, and not an error.
TEST(AppendSmall, ALengthBelowZeroIsANoOp_S13) {
  for (const auto& [lengths, length] :
       {std::pair{Lengths::before, -1}, {Lengths::before, -7}, {Lengths::after, 0}}) {
    Small small;
    small.shape.cache.lengths = lengths;
    small.seqlens[0] = length;
    small.use_pages();
    small.pages[0] = -1;
    const Status status = append(small.shape, small.tensors);
    ASSERT_TRUE(status) << status.text;
    for (const float x : small.k) EXPECT_EQ(x, 0.0F);
    for (const float x : small.q_out) EXPECT_EQ(x, 3.0F);
  }
}

// Each names its argument, and nothing is written.
TEST(AppendSmall, WrongArgumentsAreNamed) {
  const struct {
    const char* text;
    void (*spoil)(Small& s);
  } all[] = {
      {"dtype_kv = 7", [](Small& s) { s.shape.dtype_kv = static_cast<Dtype>(7); }},
      {"dtype_kv = f16: must be dtype, f32, or of 8 bits, e4m3 or i8",
       [](Small& s) { s.shape.dtype_kv = Dtype::f16; }},
      {"scale_k = 9", [](Small& s) { s.shape.scale_k = static_cast<Scaling>(9); }},
      {"scale_k = tensor: only caches of 8 bits have scales",
       [](Small& s) { s.shape.scale_k = Scaling::tensor; }},
      {"scale_v = token: only caches of 8 bits have scales",
       [](Small& s) {
         s.shape.dtype_kv = Dtype::f32;
         s.shape.scale_v = Scaling::token;
       }},
      {"k_scale.data is given, but only caches of 8 bits have scales",
       [](Small& s) { s.tensors.k_scale.data = s.cos; }},
      {"v_scale.data is given, but only caches of 8 bits have scales",
       [](Small& s) { s.tensors.v_scale.data = s.cos; }},
      {"scale_k = none: accepted for e4m3: tensor, head, token",
       [](Small& s) {
         s.use_8_bits();
         s.shape.scale_k = Scaling::none;
       }},
      {"scale_v = channel: accepted for e4m3: tensor, head, token",
       [](Small& s) {
         s.use_8_bits();
         s.shape.scale_v = Scaling::channel;
       }},
      {"scale_k = block: accepted for i8: tensor, head, token",
       [](Small& s) {
         s.use_8_bits();
         s.shape.dtype_kv = Dtype::i8;
         s.shape.scale_k = Scaling::block;
       }},
      {"k_scale.data = null: scales by token are written",
       [](Small& s) {
         s.use_8_bits();
         s.tensors.k_scale.data = nullptr;
       }},
      {"v_scale.stride_seqlen = 0: outputs must not overlap",
       [](Small& s) {
         s.use_8_bits();
         s.tensors.v_scale.stride_seqlen = 0;
       }},
      {"k_scale.stride_head = 0: outputs must not overlap",
       [](Small& s) {
         s.use_8_bits();
         s.tensors.k_scale.stride_head = 0;
       }},
      {"v_scale.stride_head",
       [](Small& s) {
         s.use_8_bits();
         s.shape.scale_v = Scaling::head;
         s.tensors.v_scale.stride_head = INT64_MAX;
       }},
      {"dtype = 3", [](Small& s) { s.shape.dtype = static_cast<Dtype>(3); }},
      {"batch = -1", [](Small& s) { s.shape.batch = -1; }},
      {"num_heads = -1", [](Small& s) { s.shape.num_heads = -1; }},
      {"num_heads_k = 0", [](Small& s) { s.shape.num_heads_k = 0; }},
      {"seqlen_q = -1", [](Small& s) { s.shape.seqlen_q = -1; }},
      {"seqlen_k = -1", [](Small& s) { s.shape.seqlen_k = -1; }},
      {"head_dim = 0", [](Small& s) { s.shape.head_dim = 0; }},
      {"head_dim_v = 0", [](Small& s) { s.shape.head_dim_v = 0; }},
      {"total_q = 1", [](Small& s) { s.shape.total_q = 1; }},
      {"total_new = 1", [](Small& s) { s.shape.total_new = 1; }},
      {"total_new = 3",
       [](Small& s) {
         s.shape.packed_new = true;
         s.shape.total_new = 3;
       }},
      {"cache.seqlen_new = 9", [](Small& s) { s.shape.cache.seqlen_new = 9; }},
      {"cache.lengths = 3", [](Small& s) { s.shape.cache.lengths = static_cast<Lengths>(3); }},
      {"cache.lengths = full", [](Small& s) { s.shape.cache.lengths = Lengths::full; }},
      {"cache.page_size = -1", [](Small& s) { s.shape.cache.page_size = -1; }},
      {"cache.num_pages = 2", [](Small& s) { s.shape.cache.num_pages = 2; }},
      {"cache.rows = -1", [](Small& s) { s.shape.cache.rows = -1; }},
      {"cache.page_ids = i64", [](Small& s) { s.shape.cache.page_ids = PageIds::i64; }},
      {"num_heads = 2", [](Small& s) { s.shape.rotary.reset(); }},
      {"rotary.dim = 0", [](Small& s) { s.shape.rotary->dim = 0; }},
      {"rotary.dim = 3", [](Small& s) { s.shape.rotary->dim = 3; }},
      {"rotary.dim = 6", [](Small& s) { s.shape.rotary->dim = 6; }},
      {"rotary.positions = -1", [](Small& s) { s.shape.rotary->positions = -1; }},
      {"rotary.dtype = bf16", [](Small& s) { s.shape.rotary->dtype = Dtype::bf16; }},
      {"rotary.position_type = 2",
       [](Small& s) { s.shape.rotary->position_type = static_cast<PositionType>(2); }},
      {"rows * num_heads * head_dim",
       [](Small& s) {
         s.shape.batch = kMaxBatch;
         s.shape.seqlen_k = kMaxSeqlen;
       }},
      {"k_new = null", [](Small& s) { s.tensors.k_new.data = nullptr; }},
      {"v_new = null", [](Small& s) { s.tensors.v_new.data = nullptr; }},
      {"k = null", [](Small& s) { s.tensors.k.data = nullptr; }},
      {"v = null", [](Small& s) { s.tensors.v.data = nullptr; }},
      {"q = null", [](Small& s) { s.tensors.q.data = nullptr; }},
      {"q_out = null", [](Small& s) { s.tensors.q_out.data = nullptr; }},
      {"k_new.stride_head", [](Small& s) { s.tensors.k_new.stride_head = INT64_MAX; }},
      {"k.stride_seqlen = 3", [](Small& s) { s.tensors.k.stride_seqlen = 3; }},
      {"v.stride_head = 0", [](Small& s) { s.tensors.v.stride_head = 0; }},
      {"q_out.stride_head = 3", [](Small& s) { s.tensors.q_out.stride_head = 3; }},
      {"q_out.stride_seqlen = 4", [](Small& s) { s.tensors.q_out = {s.q, 16, 4, 8}; }},
      {"cache.seqlens = null", [](Small& s) { s.tensors.cache.seqlens = nullptr; }},
      {"cache.seqlens[0] = 7", [](Small& s) { s.seqlens[0] = 7; }},
      {"cache.seqlens[0] = 1",
       [](Small& s) {
         s.shape.cache.lengths = Lengths::after;
         s.seqlens[0] = 1;
       }},
      {"cache.seqlens[0] = 9",
       [](Small& s) {
         s.shape.cache.lengths = Lengths::after;
         s.seqlens[0] = 9;
       }},
      {"cache.seqlens[0] = 3: positions 3 to 4", [](Small& s) { s.shape.rotary->positions = 4; }},
      {"rotary.seqlens[0] = 7",
       [](Small& s) {
         s.index[0] = 7;
         s.tensors.rotary.seqlens = s.index;
       }},
      {"cache.index = null", [](Small& s) { s.shape.cache.rows = 1; }},
      {"cache.index is given", [](Small& s) { s.tensors.cache.index = s.index; }},
      {"cache.index[0] = 1",
       [](Small& s) {
         s.shape.cache.rows = 1;
         s.index[0] = 1;
         s.tensors.cache.index = s.index;
       }},
      {"cache.page_table = null",
       [](Small& s) {
         s.use_pages();
         s.tensors.cache.page_table = nullptr;
       }},
      {"cache.page_table is given", [](Small& s) { s.tensors.cache.page_table = s.pages; }},
      {"cache.page_table[0][1] = 2",
       [](Small& s) {
         s.use_pages();
         s.pages[1] = 2;
       }},
      {"cache.cu_seqlens_new = null",
       [](Small& s) {
         s.shape.packed_new = true;
         s.shape.total_new = 2;
       }},
      {"cache.cu_seqlens_new is given", [](Small& s) { s.tensors.cache.cu_seqlens_new = s.cu; }},
      {"cache.cu_seqlens_new[1] = 1",
       [](Small& s) {
         s.shape.packed_new = true;
         s.shape.total_new = 2;
         s.cu[1] = 1;
         s.tensors.cache.cu_seqlens_new = s.cu;
       }},
      {"cu_seqlens_q = null",
       [](Small& s) {
         s.shape.packed = true;
         s.shape.total_q = 2;
       }},
      {"cu_seqlens_q[0] = 1",
       [](Small& s) {
         s.shape.packed = true;
         s.shape.total_q = 2;
         s.cu[0] = 1;
         s.tensors.cu_seqlens_q = s.cu;
       }},
      {"cu_seqlens_q is given", [](Small& s) { s.tensors.cu_seqlens_q = s.cu; }},
      {"rotary.cos = null", [](Small& s) { s.tensors.rotary.cos = nullptr; }},
      {"rotary.sin = null", [](Small& s) { s.tensors.rotary.sin = nullptr; }},
      {"rotary.cos is given",
       [](Small& s) {
         s.shape.rotary.reset();
         s.shape.num_heads = 0;
       }},
      {"rotary.stride_cos", [](Small& s) { s.tensors.rotary.stride_cos = INT64_MAX; }},
      {"rotary.positions is given", [](Small& s) { s.tensors.rotary.positions = s.cu; }},
      {"slot_mapping is given", [](Small& s) { s.tensors.slot_mapping = s.slots; }},
      {"slot_mapping = null",
       [](Small& s) {
         s.use_slots();
         s.tensors.slot_mapping = nullptr;
       }},
      {"slot_mapping[1] = 8",
       [](Small& s) {
         s.use_slots();
         s.slots[1] = 8;
       }},
      {"slot_mapping[0] = -2",
       [](Small& s) {
         s.use_slots();
         s.slots[0] = -2;
       }},
      {"rotary.positions = null",
       [](Small& s) {
         s.use_slots();
         s.tensors.rotary.positions = nullptr;
       }},
      {"rotary.positions[1] = 8",
       [](Small& s) {
         s.use_slots();
         s.cu[1] = 8;
       }},
      {"rotary.seqlens is given",
       [](Small& s) {
         s.use_slots();
         s.tensors.rotary.seqlens = s.seqlens;
       }},
      {"rotary.constant_q = true",
       [](Small& s) {
         s.use_slots();
         s.shape.rotary->constant_q = true;
       }},
      {"cache.seqlens is given",
       [](Small& s) {
         s.use_slots();
         s.tensors.cache.seqlens = s.seqlens;
       }},
      {"cache.lengths: with slot_mapping",
       [](Small& s) {
         s.use_slots();
         s.shape.cache.lengths = Lengths::after;
       }},
      {"packed_new = false",
       [](Small& s) {
         s.use_slots();
         s.shape.packed_new = false;
       }},
      {"packed = false",
       [](Small& s) {
         s.use_slots();
         s.shape.packed = false;
       }},
  };
  for (const auto& one : all) {
    Small small;
    one.spoil(small);
    const Status status = append(small.shape, small.tensors);
    EXPECT_EQ(status.code, Code::invalid) << one.text;
    EXPECT_TRUE(status.text.starts_with(one.text)) << one.text << ": " << status.text;
    for (const float x : small.k) ASSERT_EQ(x, 0.0F) << one.text;
    for (const float x : small.v) ASSERT_EQ(x, 0.0F) << one.text;
    for (const float x : small.q_out) ASSERT_EQ(x, 0.0F) << one.text;
  }
  Small small;
  Execution execution;
  Executor executor;
  executor.run = nullptr;
  execution.executor = &executor;
  EXPECT_EQ(append(small.shape, small.tensors, this_cpu(), execution).text, "executor.run = null");
}

}  // namespace
}  // namespace tessera
