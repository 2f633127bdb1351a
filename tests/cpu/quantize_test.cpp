// Quantising on the CPU: every instruction set against literal loops, what attention makes of the
// results, and wrong arguments.
#include <gtest/gtest.h>

#include <random>
#include <string>

#include "archs.h"
#include "quantized.h"
#include "tessera/tessera.hpp"

namespace tessera {
namespace {

class Quantize : public testing::Test {
 protected:
  const unsigned seed_ = std::random_device()();
  std::mt19937 random_{seed_};
  testing::ScopedTrace trace_{__FILE__, __LINE__, "seed " + std::to_string(seed_)};
};

// Types, layouts, scalings, rotary embedding, transforms, tiles: any of it with any of it, and
// numbers that are none. What lies between rows stays as it was.
TEST_F(Quantize, EveryBitIsThatOfTheLiteralLoops_S14) {
  Device device = this_cpu();
  for (int trial = 0; trial < (kSanitized ? 60 : 600); ++trial) {
    Quantized quantized(random_, false);
    for (const Arch arch : archs()) {
      device.arch = arch;
      quantized.clear();
      const std::string what = quantized.text() + " " + to_string(arch);
      const Status status = quantize(quantized.shape, quantized.tensors, device);
      ASSERT_TRUE(status) << status.text << "; " << what;
      quantized.check(what);
      if (HasFatalFailure()) return;
    }
  }
}

// A quarter of q's rows by hand: 448 and 127 are where amax goes, zeros have a scale of 1.
TEST(QuantizeSmall, RowsAreScaledToTheLargestElement) {
  for (const Dtype dtype : {Dtype::e4m3, Dtype::i8}) {
    QuantizeShape shape;
    shape.dtype = Dtype::f32;
    Problem& p = shape.problem;
    p.dtype = dtype;
    p.seqlen_q = 3;
    p.head_dim = p.head_dim_v = 2;
    p.scales = {Scaling::token, Scaling::tensor, Scaling::tensor, 0, 0, false, false};
    const float q[] = {3.0F, -6.0F, 0.0F, 0.0F, 1e-42F, -0.0F};
    std::uint8_t out[6];
    float scale[3];
    QuantizeTensors t;
    t.q = {q, 6, 2, 2};
    t.q_out = {out, 6, 2, 2};
    t.q_scale = {scale, 3, 3};
    const Status status = quantize(shape, t);
    ASSERT_TRUE(status) << status.text;
    const bool i8 = dtype == Dtype::i8;
    const std::uint8_t wanted_i8[] = {64, 0x81, 0, 0, 0, 0};  // 63.5 to even
    const std::uint8_t wanted_e4m3[] = {0x76, 0xFE, 0, 0, 0, 0x80};
    for (int i = 0; i < 6; ++i) EXPECT_EQ(out[i], (i8 ? wanted_i8 : wanted_e4m3)[i]) << i;
    const float limit = i8 ? 127.0F : 448.0F;
    EXPECT_EQ(scale[0], 6.0F / limit);
    EXPECT_EQ(scale[1], 1.0F);
    EXPECT_EQ(scale[2], 0x1p-100F / limit);
  }
}

TEST(QuantizeSmall, AnyNumberOfThreadsGivesTheSameBits) {
  std::mt19937 random(5);
  const Result<Problem> p =
      parse_problem("fwd e4m3 b=2 h=6/3 q=300 k=500 d=64 scales=token/block:48/block:192 v_tiles");
  ASSERT_TRUE(p.ok()) << p.status().text;
  QuantizeShape shape;
  shape.problem = *p;
  shape.dtype = Dtype::f32;
  shape.hadamard = 64;
  std::vector<float> x(2UL * 500 * 6 * 64);
  for (float& y : x) y = std::normal_distribution<float>()(random);
  std::vector<std::vector<std::uint8_t>> results;
  for (const int threads : {1, 2, 5}) {
    std::vector<std::uint8_t> out(3 * x.size());
    std::vector<float> scales(20000);
    QuantizeTensors t;
    const auto tensor = [&](int number, std::int64_t rows, std::int64_t heads) {
      return Tensor{out.data() + static_cast<std::size_t>(number) * x.size(), rows * heads * 64,
                    heads * 64, 64};
    };
    t.q_out = tensor(0, 300, 6);
    t.k_out = tensor(1, 500, 3);
    t.v_out = tensor(2, 500, 3);
    t.q = t.q_out;
    t.k = t.k_out;
    t.v = t.v_out;
    t.q.data = t.k.data = t.v.data = x.data();
    const std::int64_t head = p->value_tile_bytes();
    t.v_out = {t.v_out.data, 3 * head, 0, head};
    t.q_scale = {scales.data(), 1800, 300};
    t.k_scale = {scales.data() + 4000, 33, 11};
    t.v_scale = {scales.data() + 5000, 9, 3};
    Device device = this_cpu();
    device.threads = threads;
    const Status status = quantize(shape, t, device);
    ASSERT_TRUE(status) << status.text;
    const auto* const bytes = reinterpret_cast<const std::uint8_t*>(scales.data());
    out.insert(out.end(), bytes, bytes + scales.size() * sizeof(float));
    results.push_back(out);
  }
  EXPECT_EQ(results[0], results[1]);
  EXPECT_EQ(results[0], results[2]);
}

/// Two queries of two heads and four keys of one, eight columns, with everything that there is.
struct Small {
  QuantizeShape shape;
  QuantizeTensors tensors;
  float q[32] = {}, k[32] = {}, v[32] = {}, cos[16] = {}, sin[16] = {}, signs[8] = {};
  float q_scale[4] = {}, k_scale[2] = {}, v_scale[8] = {}, score_shift[4] = {};
  float k_mean[8] = {}, v_shift[8] = {};
  std::uint8_t q_out[32] = {}, k_out[32] = {};
  alignas(16) std::uint8_t v_out[2][9216] = {};
  std::int32_t cu_q[2] = {0, 2}, cu_k[2] = {0, 4}, starts[1] = {3};

  Small() {
    Problem& p = shape.problem;
    p = *parse_problem(
        "fwd e4m3 h=2/1 q=2 k=4 d=8 scales=token/block:2/channel score_shift v_shift");
    shape.dtype = Dtype::f32;
    shape.hadamard = 8;
    shape.signs = true;
    shape.rotary = RotaryShape{.dim = 4, .positions = 8};
    tensors.q = {q, 32, 16, 8};
    tensors.k = {k, 32, 8, 8};
    tensors.v = {v, 32, 8, 8};
    tensors.q_out = {q_out, 32, 16, 8};
    tensors.k_out = {k_out, 32, 8, 8};
    tensors.v_out = {v_out[0], 32, 8, 8};
    tensors.q_scale = {q_scale, 4, 2};
    tensors.k_scale = {k_scale, 2, 2};
    tensors.v_scale = {v_scale, 8, 8};
    tensors.score_shift = {score_shift, 4, 2};
    tensors.k_mean = {k_mean, 8, 8};
    tensors.v_shift = {v_shift, 8, 8};
    tensors.signs = signs;
    tensors.rotary = {cos, sin, 2, 2, starts, nullptr};
    for (float& x : q) x = 1.0F;
    for (float& x : k) x = 1.0F;
    for (float& x : v) x = 1.0F;
    for (float& x : v_scale) x = 1.0F;
    for (float& x : cos) x = 1.0F;
  }
  ~Small() = default;
  Small(const Small&) = delete;
  Small(Small&&) = delete;
  Small& operator=(Small&&) = delete;
  Small& operator=(const Small&) = delete;

  Problem& problem() { return shape.problem; }
  void pack() {
    problem().packed = true;
    problem().total_q = 2;
    problem().total_k = 4;
    tensors.cu_seqlens_q = cu_q;
    tensors.cu_seqlens_k = cu_k;
  }
  void use_tiles() {
    problem().v_tiles = true;
    tensors.v_out = {v_out[0], 9216, 0, 9216};
  }
  /// Two heads of keys.
  void use_heads() {
    problem().num_heads_k = 2;
    tensors.k.stride_seqlen = tensors.v.stride_seqlen = 0;
    tensors.k_out.stride_seqlen = tensors.v_out.stride_seqlen = 16;
    use_tiles();
  }
};

TEST(QuantizeSmall, EveryTensorMayBeLeftOut) {
  for (int left = 1; left < 8; ++left) {
    Small small;
    QuantizeTensors& t = small.tensors;
    if ((left & 1) == 0) t.q.data = t.q_out.data = t.q_scale.data = t.score_shift.data = nullptr;
    if ((left & 2) == 0) t.k.data = t.k_out.data = t.k_scale.data = nullptr;
    if ((left & 4) == 0) t.v.data = t.v_out.data = t.v_scale.data = nullptr;
    const Status status = quantize(small.shape, t);
    ASSERT_TRUE(status) << status.text;
    EXPECT_EQ(small.q_scale[3] != 0.0F, (left & 1) != 0);
    EXPECT_EQ(small.k_scale[1] != 0.0F, (left & 2) != 0);
    EXPECT_EQ(small.v_out[0][31] != 0, (left & 4) != 0);
  }
  Small small;
  small.tensors = {};
  EXPECT_EQ(quantize(small.shape, small.tensors).text,
            "q, k and v = null: at least one of them is quantised");
  small.problem().seqlen_q = small.problem().seqlen_k = 0;
  EXPECT_TRUE(quantize(small.shape, small.tensors));
}

// Every argument, one by one.
TEST(QuantizeSmall, WrongArgumentsAreNamed) {
  const struct {
    const char* text;  // how the refusal begins
    void (*spoil)(Small& s);
  } all[] = {
      {"batch = -1", [](Small& s) { s.problem().batch = -1; }},
      {"problem.dtype = bf16",
       [](Small& s) {
         s.problem().dtype = Dtype::bf16;
         s.problem().scales = {};
       }},
      {"problem.cache",
       [](Small& s) {
         s.problem().scales.k = Scaling::tensor;
         s.problem().scales.block_k = 0;
         s.problem().cache = CacheShape{};
       }},
      {"scales.q = none", [](Small& s) { s.problem().scales.q = Scaling::none; }},
      {"dtype = 3", [](Small& s) { s.shape.dtype = Dtype::e4m3; }},
      {"hadamard = -8", [](Small& s) { s.shape.hadamard = -8; }},
      {"hadamard = 6", [](Small& s) { s.shape.hadamard = 6; }},
      {"hadamard = 16", [](Small& s) { s.shape.hadamard = 16; }},
      {"hadamard = 512",
       [](Small& s) {
         s.shape.hadamard = 512;
         s.problem().head_dim = 512;
       }},
      {"rotary.dim = 0", [](Small& s) { s.shape.rotary->dim = 0; }},
      {"rotary.dim = 3", [](Small& s) { s.shape.rotary->dim = 3; }},
      {"rotary.dim = 10", [](Small& s) { s.shape.rotary->dim = 10; }},
      {"rotary.positions = -1", [](Small& s) { s.shape.rotary->positions = -1; }},
      {"rotary.dtype = bf16", [](Small& s) { s.shape.rotary->dtype = Dtype::bf16; }},
      {"q = null: q_out is given", [](Small& s) { s.tensors.q.data = nullptr; }},
      {"q_out = null: q is given", [](Small& s) { s.tensors.q_out.data = nullptr; }},
      {"k = null: k_out is given", [](Small& s) { s.tensors.k.data = nullptr; }},
      {"k_out = null: k is given", [](Small& s) { s.tensors.k_out.data = nullptr; }},
      {"v = null: v_out is given", [](Small& s) { s.tensors.v.data = nullptr; }},
      {"v_out = null: v is given", [](Small& s) { s.tensors.v_out.data = nullptr; }},
      {"v is given, but the problem's v is bf16",
       [](Small& s) {
         s.problem().dtype_v = Dtype::bf16;
         s.problem().scales.v = Scaling::none;
       }},
      {"q.stride_head", [](Small& s) { s.tensors.q.stride_head = INT64_MAX; }},
      {"k.stride_seqlen", [](Small& s) { s.tensors.k.stride_seqlen = INT64_MAX; }},
      {"q_out.stride_head = 7", [](Small& s) { s.tensors.q_out.stride_head = 7; }},
      {"k_out.stride_seqlen = 0", [](Small& s) { s.tensors.k_out.stride_seqlen = 0; }},
      {"v_out.stride_seqlen = -4", [](Small& s) { s.tensors.v_out.stride_seqlen = -4; }},
      {"v_out: tiles begin at multiples of 16 bytes, not 4",
       [](Small& s) {
         s.use_tiles();
         s.tensors.v_out.data = s.v_out[0] + 4;
       }},
      {"v_out.stride_head = 9217",
       [](Small& s) {
         s.use_heads();
         s.tensors.v_out.stride_head = 9217;
       }},
      {"v_out.stride_head = 9200",
       [](Small& s) {
         s.use_heads();
         s.tensors.v_out.stride_head = 9200;
       }},
      {"v_out.stride_batch = 9217",
       [](Small& s) {
         s.use_tiles();
         s.problem().batch = 2;
         s.tensors.v_out.stride_batch = 9217;
       }},
      {"q_scale.data = null", [](Small& s) { s.tensors.q_scale.data = nullptr; }},
      {"k_scale.data = null", [](Small& s) { s.tensors.k_scale.data = nullptr; }},
      {"v_scale.data = null", [](Small& s) { s.tensors.v_scale.data = nullptr; }},
      {"q_scale.stride_head = 1", [](Small& s) { s.tensors.q_scale.stride_head = 1; }},
      {"k_scale.stride_batch = 1",
       [](Small& s) {
         s.problem().batch = 2;
         s.tensors.k_scale.stride_batch = 1;
       }},
      {"v_scale.stride_head",
       [](Small& s) {
         s.use_heads();
         s.tensors.k_scale.stride_head = 2;
         s.tensors.v_scale.stride_head = INT64_MAX;
       }},
      {"k_mean.data = null", [](Small& s) { s.tensors.k_mean.data = nullptr; }},
      {"score_shift.data = null", [](Small& s) { s.tensors.score_shift.data = nullptr; }},
      {"score_shift.stride_head = 1", [](Small& s) { s.tensors.score_shift.stride_head = 1; }},
      {"score_shift.data is given", [](Small& s) { s.problem().scales.score_shift = false; }},
      {"k_mean.data is given",
       [](Small& s) {
         s.problem().scales.score_shift = false;
         s.tensors.score_shift = {};
       }},
      {"v_shift.data = null", [](Small& s) { s.tensors.v_shift.data = nullptr; }},
      {"v_shift.data is given", [](Small& s) { s.problem().scales.v_shift = false; }},
      {"signs = null", [](Small& s) { s.tensors.signs = nullptr; }},
      {"signs is given", [](Small& s) { s.shape.signs = false; }},
      {"cu_seqlens_q is given", [](Small& s) { s.tensors.cu_seqlens_q = s.cu_q; }},
      {"cu_seqlens_k is given", [](Small& s) { s.tensors.cu_seqlens_k = s.cu_k; }},
      {"cu_seqlens_q = null",
       [](Small& s) {
         s.pack();
         s.tensors.cu_seqlens_q = nullptr;
       }},
      {"cu_seqlens_k = null",
       [](Small& s) {
         s.pack();
         s.tensors.cu_seqlens_k = nullptr;
       }},
      {"cu_seqlens_q[1] = 3",
       [](Small& s) {
         s.pack();
         s.cu_q[1] = 3;
       }},
      {"cu_seqlens_k[1] = 2",
       [](Small& s) {
         s.pack();
         s.cu_k[1] = 2;
       }},
      {"rotary.cos = null", [](Small& s) { s.tensors.rotary.cos = nullptr; }},
      {"rotary.sin = null", [](Small& s) { s.tensors.rotary.sin = nullptr; }},
      {"rotary.cos is given", [](Small& s) { s.shape.rotary.reset(); }},
      {"rotary.seqlens is given",
       [](Small& s) {
         s.shape.rotary.reset();
         s.tensors.rotary.cos = s.tensors.rotary.sin = nullptr;
       }},
      {"rotary.positions is given", [](Small& s) { s.tensors.rotary.positions = s.cu_q; }},
      {"rotary.stride_sin", [](Small& s) { s.tensors.rotary.stride_sin = INT64_MAX; }},
      {"rotary.seqlens[0] = 5: positions 7 to 8", [](Small& s) { s.starts[0] = 5; }},
      {"rotary.seqlens[0] = -1: positions -1 to 2", [](Small& s) { s.starts[0] = -1; }},
      {"rotary.positions = 3: positions 2 to 3 must lie",
       [](Small& s) {
         s.tensors.rotary.seqlens = nullptr;
         s.shape.rotary->positions = 3;
       }},
  };
  for (const auto& one : all) {
    Small small;
    one.spoil(small);
    const Status status = quantize(small.shape, small.tensors);
    EXPECT_EQ(status.code, Code::invalid) << one.text;
    EXPECT_TRUE(status.text.starts_with(one.text)) << one.text << ": " << status.text;
    for (const std::uint8_t x : small.q_out) ASSERT_EQ(x, 0) << one.text;
    for (const std::uint8_t x : small.k_out) ASSERT_EQ(x, 0) << one.text;
    for (const float x : small.q_scale) ASSERT_EQ(x, 0.0F) << one.text;
  }
  Small small;
  Execution execution;
  Executor executor;
  executor.run = nullptr;
  execution.executor = &executor;
  EXPECT_EQ(quantize(small.shape, small.tensors, this_cpu(), execution).text,
            "executor.run = null");
}

}  // namespace
}  // namespace tessera
