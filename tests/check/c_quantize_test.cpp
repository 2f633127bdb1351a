// Quantising of the C ABI: every field arrives, and wrong ones are named.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <string>

#include "tessera/tessera.h"
#include "tessera/tessera.hpp"

namespace tessera {
namespace {

/// Two packed sequences of one and two queries of two heads, and of two and one keys of one, of
/// four columns, with every step that there is.
class CQuantize : public testing::Test {
 protected:
  void SetUp() override {
    tessera_problem_init(&problem_, sizeof problem_);
    const char* const text =
        "fwd e4m3 b=2 h=2/1 q=2 k=2 d=4 packed=3,3 scales=token/block:2/channel score_shift "
        "v_shift";
    ASSERT_EQ(tessera_problem_parse(text, &problem_, error_, sizeof error_), TESSERA_OK) << error_;
    tessera_quantize_shape_init(&shape_, sizeof shape_);
    EXPECT_EQ(shape_.dtype, TESSERA_BF16);
    shape_.problem = &problem_;
    shape_.dtype = TESSERA_F32;
    shape_.hadamard = 4;
    shape_.signs = 1;
    shape_.rotary_dim = 2;
    shape_.rotary_positions = 6;
    shape_.rotary_interleaved = 1;
    shape_.rotary_constant_q = 1;
    tessera_quantize_tensors_init(&tensors_, sizeof tensors_);
    tensors_.q = {q_, 0, 8, 4};
    tensors_.k = {k_, 0, 4, 4};
    tensors_.v = {v_, 0, 4, 4};
    tensors_.q_out = {q_out_, 0, 8, 4};
    tensors_.k_out = {k_out_, 0, 4, 4};
    tensors_.v_out = {v_out_, 0, 4, 4};
    tensors_.q_scale = {q_scale_, 0, 3, 0};
    tensors_.k_scale = {k_scale_, 0, 3, 0};
    tensors_.v_scale = {v_scale_, 4, 0, 0};
    tensors_.k_mean = {k_mean_, 4, 0, 0};
    tensors_.score_shift = {score_shift_, 0, 3, 0};
    tensors_.v_shift = {v_shift_, 4, 0, 0};
    tensors_.signs = signs_;
    tensors_.cu_seqlens_q = cu_q_;
    tensors_.cu_seqlens_k = cu_k_;
    tensors_.rotary_cos = cos_;
    tensors_.rotary_sin = sin_;
    tensors_.stride_rotary_cos = 1;
    tensors_.stride_rotary_sin = 1;
    tensors_.rotary_seqlens = starts_;
    float x = 0.0F;
    for (float* numbers : {q_, k_, v_}) {
      for (std::size_t i = 0; i < (numbers == q_ ? 24U : 12U); ++i) numbers[i] = 0.3F * (x += 1.0F);
    }
  }

  tessera_code quantize(const char* device = nullptr) {
    return tessera_quantize(&shape_, &tensors_, device, nullptr, error_, sizeof error_);
  }

  /// The same in C++.
  void quantize_in_cpp(std::uint8_t (&q)[24], std::uint8_t (&k)[12], std::uint8_t (&v)[12],
                       float (&q_scale)[6], float (&k_scale)[3], float (&score_shift)[6]) const {
    QuantizeShape shape;
    shape.problem = *parse_problem(
        "fwd e4m3 b=2 h=2/1 q=2 k=2 d=4 packed=3,3 scales=token/block:2/channel score_shift "
        "v_shift");
    shape.dtype = Dtype::f32;
    shape.hadamard = 4;
    shape.signs = true;
    shape.rotary = RotaryShape{.dim = 2, .positions = 6, .interleaved = true, .constant_q = true};
    QuantizeTensors t;
    t.q = {q_, 0, 8, 4};
    t.k = {k_, 0, 4, 4};
    t.v = {v_, 0, 4, 4};
    t.q_out = {q, 0, 8, 4};
    t.k_out = {k, 0, 4, 4};
    t.v_out = {v, 0, 4, 4};
    t.q_scale = {q_scale, 0, 3};
    t.k_scale = {k_scale, 0, 3};
    t.v_scale = {const_cast<float*>(v_scale_), 4, 0};
    t.k_mean = {k_mean_, 4, 0};
    t.score_shift = {score_shift, 0, 3};
    t.v_shift = {v_shift_, 4, 0};
    t.signs = signs_;
    t.cu_seqlens_q = cu_q_;
    t.cu_seqlens_k = cu_k_;
    t.rotary = {cos_, sin_, 1, 1, starts_, nullptr};
    const Status status = tessera::quantize(shape, t);
    ASSERT_TRUE(status) << status.text;
  }

  tessera_problem problem_;
  tessera_quantize_shape shape_;
  tessera_quantize_tensors tensors_;
  float q_[24] = {}, k_[12] = {}, v_[12] = {};
  float v_scale_[8] = {0.1F, 0.2F, 0.3F, 0.4F, 0.5F, 0.6F, 0.7F, 0.8F};
  float k_mean_[8] = {1, 2, 3, 4, 5, 6, 7, 8}, v_shift_[8] = {8, 7, 6, 5, 4, 3, 2, 1};
  float signs_[4] = {1, -1, -1, 1};
  float cos_[6] = {1, 0.5F, 0.25F, 0, -1, -0.5F}, sin_[6] = {0, 0.5F, 0.75F, 1, 0, -0.5F};
  std::int32_t cu_q_[3] = {0, 1, 3}, cu_k_[3] = {0, 1, 3}, starts_[2] = {1, 3};
  std::uint8_t q_out_[24] = {}, k_out_[12] = {}, v_out_[12] = {};
  float q_scale_[6] = {}, k_scale_[3] = {}, score_shift_[6] = {};
  char error_[256] = "";
};

TEST_F(CQuantize, EveryFieldArrives) {
  std::uint8_t q[24], k[12], v[12];
  float q_scale[6], k_scale[3] = {}, score_shift[6];
  quantize_in_cpp(q, k, v, q_scale, k_scale, score_shift);
  for (const char* device : {static_cast<const char*>(nullptr), "cpu"}) {
    std::fill(std::begin(q_out_), std::end(q_out_), std::uint8_t{0});
    ASSERT_EQ(quantize(device), TESSERA_OK) << error_;
    EXPECT_EQ(std::memcmp(q, q_out_, sizeof q), 0);
    EXPECT_EQ(std::memcmp(k, k_out_, sizeof k), 0);
    EXPECT_EQ(std::memcmp(v, v_out_, sizeof v), 0);
    for (int i = 0; i < 6; ++i) {
      EXPECT_EQ(q_scale_[i], q_scale[i]) << i;
      EXPECT_EQ(score_shift_[i], score_shift[i]) << i;
    }
    // Sequence 1 has number cu_seqlens_k[1] / 2 + 1.
    EXPECT_EQ(k_scale_[0], k_scale[0]);
    EXPECT_EQ(k_scale_[1], k_scale[1]);
    EXPECT_NE(k_scale_[1], 0.0F);
    EXPECT_EQ(k_scale_[2], 0.0F);
  }
  // Each field counts: another value of it gives other results.
  const struct {
    const char* name;
    void (*change)(tessera_quantize_shape& s);
  } all[] = {
      {"hadamard", [](tessera_quantize_shape& s) { s.hadamard = 2; }},
      {"rotary_dim", [](tessera_quantize_shape& s) { s.rotary_dim = 4; }},
      {"rotary_interleaved",
       [](tessera_quantize_shape& s) {
         s.rotary_dim = 4;
         s.rotary_interleaved = 0;
       }},
      {"rotary_constant_q", [](tessera_quantize_shape& s) { s.rotary_constant_q = 0; }},
  };
  for (const auto& one : all) {
    SetUp();
    shape_.rotary_positions = 5;
    one.change(shape_);
    ASSERT_EQ(quantize(), TESSERA_OK) << one.name << ": " << error_;
    EXPECT_NE(std::memcmp(q, q_out_, sizeof q), 0) << one.name;
  }
}

TEST_F(CQuantize, WrongArgumentsAreNamed) {
  char* const e = error_;
  constexpr std::size_t n = sizeof error_;
  EXPECT_EQ(tessera_quantize(nullptr, &tensors_, nullptr, nullptr, e, n), TESSERA_INVALID);
  EXPECT_STREQ(e, "shape = null");
  EXPECT_EQ(tessera_quantize(&shape_, nullptr, nullptr, nullptr, e, n), TESSERA_INVALID);
  EXPECT_STREQ(e, "tensors = null");
  EXPECT_EQ(quantize("abacus"), TESSERA_INVALID);
  shape_.problem = nullptr;
  EXPECT_EQ(quantize(), TESSERA_INVALID);
  EXPECT_STREQ(e, "problem = null");
  const struct {
    const char* name;
    std::int32_t tessera_quantize_shape::* field;
  } all[] = {{"dtype", &tessera_quantize_shape::dtype},
             {"hadamard", &tessera_quantize_shape::hadamard},
             {"signs", &tessera_quantize_shape::signs},
             {"rotary_dtype", &tessera_quantize_shape::rotary_dtype},
             {"rotary_interleaved", &tessera_quantize_shape::rotary_interleaved},
             {"rotary_constant_q", &tessera_quantize_shape::rotary_constant_q}};
  for (const auto& one : all) {
    SetUp();
    shape_.*one.field = 3;
    EXPECT_EQ(quantize(), TESSERA_INVALID);
    EXPECT_EQ(std::string(error_).find(std::string(one.name) + " = 3"), 0U) << error_;
  }
  SetUp();
  tensors_.v_out.data = nullptr;
  EXPECT_EQ(quantize(), TESSERA_INVALID);
  EXPECT_EQ(std::string(error_).find("v_out = null"), 0U) << error_;
  SetUp();
  starts_[1] = 5;
  EXPECT_EQ(quantize(), TESSERA_INVALID);
  EXPECT_EQ(std::string(error_).find("rotary.seqlens[1] = 5"), 0U) << error_;
  shape_.size = 0;
  EXPECT_EQ(quantize(), TESSERA_INVALID);
  EXPECT_EQ(std::string(error_).find("shape.size = 0"), 0U) << error_;
  for (const std::uint8_t x : q_out_) EXPECT_EQ(x, 0);
}

TEST_F(CQuantize, AnOlderCallersStructuresAreShorter) {
  // Nothing was rotated then.
  shape_.size = offsetof(tessera_quantize_shape, rotary_dtype);
  tensors_.size = offsetof(tessera_quantize_tensors, rotary_cos);
  ASSERT_EQ(quantize(), TESSERA_OK) << error_;
  EXPECT_NE(q_scale_[5], 0.0F);
  tessera_quantize_shape_init(nullptr, sizeof shape_);
  tessera_quantize_tensors_init(nullptr, sizeof tensors_);
}

}  // namespace
}  // namespace tessera
