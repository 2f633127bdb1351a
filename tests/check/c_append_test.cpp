// The append of the C ABI: every field arrives, and wrong ones are named.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string>

#include "tessera/tessera.h"

namespace tessera {
namespace {

/// Two sequences of packed queries and new rows of two columns, one row of the first and two of the
/// second, in pages of 4 slots; rotated by a quarter of a turn from position 5 on.
class CAppend : public testing::Test {
 protected:
  void SetUp() override {
    tessera_append_shape_init(&shape_, sizeof shape_);
    shape_.cache = TESSERA_CACHE_BEFORE;
    shape_.batch = 2;
    shape_.num_heads = 1;
    shape_.seqlen_q = shape_.seqlen_new = 2;
    shape_.seqlen_k = 8;
    shape_.head_dim = shape_.head_dim_v = 2;
    shape_.page_size = 4;
    shape_.num_pages = 4;
    shape_.page_ids = TESSERA_PAGE_I64;
    shape_.cache_rows = 2;
    shape_.packed = shape_.packed_new = 1;
    shape_.total_q = shape_.total_new = 3;
    shape_.rotary_dim = 2;
    shape_.rotary_positions = 8;
    tessera_append_tensors_init(&tensors_, sizeof tensors_);
    tensors_.k_new = {k_new_, 0, 2, 2};
    tensors_.v_new = {v_new_, 0, 2, 2};
    tensors_.k = {k_, 8, 2, 2};
    tensors_.v = {v_, 8, 2, 2};
    tensors_.q = {q_, 0, 2, 2};
    tensors_.q_out = {q_out_, 0, 2, 2};
    tensors_.cache.seqlens = seqlens_;
    tensors_.cache.cu_seqlens_new = tensors_.cu_seqlens_q = cu_seqlens_;
    tensors_.cache.page_table = page_table_;
    tensors_.cache.stride_page_table = 2;
    tensors_.cache.index = index_;
    tensors_.rotary_cos = cos_;
    tensors_.rotary_sin = sin_;
    tensors_.stride_rotary_cos = 1;
    tensors_.stride_rotary_sin = 1;
  }

  tessera_code append(const char* device = nullptr) {
    return tessera_append(&shape_, &tensors_, device, nullptr, error_, sizeof error_);
  }

  tessera_append_shape shape_;
  tessera_append_tensors tensors_;
  float k_new_[6] = {1, 2, 3, 4, 5, 6}, v_new_[6] = {10, 20, 30, 40, 50, 60};
  float q_[6] = {1, 2, 3, 4, 5, 6}, q_out_[6] = {};
  float k_[32] = {}, v_[32] = {};
  float cos_[8] = {1, 1, 1, 1, 1, 0, 0, 0}, sin_[8] = {0, 0, 0, 0, 0, 1, 1, 1};
  std::int32_t seqlens_[2] = {2, 3}, cu_seqlens_[3] = {0, 1, 3}, index_[2] = {1, 0};
  std::int64_t page_table_[4] = {3, 2, 1, -1};  // of row 0: sequence 1
  std::int32_t starts_[2] = {0, 4};
  char error_[256] = "";
};

TEST_F(CAppend, EveryFieldArrives) {
  tensors_.rotary_seqlens = starts_;
  for (const char* device : {static_cast<const char*>(nullptr), "cpu"}) {
    std::fill(std::begin(k_), std::end(k_), 0.0F);
    ASSERT_EQ(append(device), TESSERA_OK) << error_;
    // Slot 2 of page 1; slots 3 of page 3 and 0 of page 2, positions 4 and 5.
    float k[32] = {}, v[32] = {};
    k[12] = 1;
    k[13] = 2;
    k[30] = 3;
    k[31] = 4;
    k[16] = -6;
    k[17] = 5;
    v[12] = 10;
    v[13] = 20;
    v[30] = 30;
    v[31] = 40;
    v[16] = 50;
    v[17] = 60;
    const float q[6] = {1, 2, 3, 4, -6, 5};
    for (int i = 0; i < 32; ++i) {
      EXPECT_EQ(k_[i], k[i]) << i;
      EXPECT_EQ(v_[i], v[i]) << i;
    }
    for (int i = 0; i < 6; ++i) EXPECT_EQ(q_out_[i], q[i]) << i;
  }
}

TEST_F(CAppend, SlotsArriveToo) {
  const std::int64_t slots[3] = {15, -1, 0};
  const std::int64_t positions[3] = {5, 100, 0};
  shape_.slot_mapping = 1;
  shape_.cache = TESSERA_CACHE_FULL;
  shape_.seqlen_new = 0;
  shape_.num_heads = 0;
  shape_.rotary_position_type = TESSERA_POSITION_I64;
  tensors_.cache = {};
  tensors_.cu_seqlens_q = nullptr;
  tensors_.slot_mapping = slots;
  tensors_.rotary_positions = positions;
  ASSERT_EQ(append(), TESSERA_OK) << error_;
  EXPECT_EQ(k_[30], -2.0F);
  EXPECT_EQ(k_[31], 1.0F);
  EXPECT_EQ(k_[0], 5.0F);
  EXPECT_EQ(v_[1], 60.0F);
  for (int i = 2; i < 30; ++i) EXPECT_EQ(v_[i], 0.0F) << i;
}

// Scales of k by token, of v by head: each of its own bytes and numbers.
TEST_F(CAppend, CachesOf8BitsArriveToo) {
  signed char k[32] = {}, v[32] = {};
  float k_scale[16] = {}, v_scale[] = {10, 20};
  shape_.dtype_kv = TESSERA_I8;
  shape_.scale_k = TESSERA_SCALE_TOKEN;
  shape_.scale_v = TESSERA_SCALE_HEAD;
  tensors_.rotary_seqlens = starts_;
  tensors_.k.data = k;
  tensors_.v.data = v;
  tensors_.k_scale = {k_scale, 4, 1, 1};
  tensors_.v_scale = {v_scale, 1, 0, 0};
  ASSERT_EQ(append(), TESSERA_OK) << error_;
  // The slots of EveryFieldArrives, and the largest of 1 2, of 3 4 and of -6 5.
  signed char k_wanted[32] = {}, v_wanted[32] = {};
  const struct {
    int slot;
    signed char k[2], v[2];
    float most;
  } rows[] = {{6, {64, 127}, {1, 2}, 2}, {15, {95, 127}, {2, 2}, 4}, {8, {-127, 106}, {2, 3}, 6}};
  for (const auto& row : rows) {
    for (int c = 0; c < 2; ++c) {
      k_wanted[2 * row.slot + c] = row.k[c];
      v_wanted[2 * row.slot + c] = row.v[c];
    }
  }
  for (int i = 0; i < 32; ++i) {
    EXPECT_EQ(k[i], k_wanted[i]) << i;
    EXPECT_EQ(v[i], v_wanted[i]) << i;
  }
  for (int slot = 0; slot < 16; ++slot) {
    float wanted = 0;
    for (const auto& row : rows) wanted = row.slot == slot ? row.most / 127 : wanted;
    EXPECT_EQ(k_scale[slot], wanted) << slot;
  }
  tensors_.k_scale.data = nullptr;
  EXPECT_EQ(append(), TESSERA_INVALID);
  EXPECT_STREQ(error_, "k_scale.data = null: scales by token are written");
  shape_.scale_k = TESSERA_SCALE_TENSOR;
  EXPECT_EQ(append(), TESSERA_INVALID);
  EXPECT_STREQ(error_, "k_scale.data = null: new rows are divided by it");
  shape_.scale_k = TESSERA_SCALE_TOKEN;
  tensors_.k_scale.data = k_scale;
  tensors_.k_scale.stride_seqlen = 0;
  EXPECT_EQ(append(), TESSERA_INVALID);
  EXPECT_EQ(std::string(error_).find("k_scale.stride_seqlen = 0"), 0U) << error_;
}

TEST_F(CAppend, WrongArgumentsAreNamed) {
  char* const e = error_;
  constexpr std::size_t n = sizeof error_;
  EXPECT_EQ(tessera_append(nullptr, &tensors_, nullptr, nullptr, e, n), TESSERA_INVALID);
  EXPECT_STREQ(e, "shape = null");
  EXPECT_EQ(tessera_append(&shape_, nullptr, nullptr, nullptr, e, n), TESSERA_INVALID);
  EXPECT_STREQ(e, "tensors = null");
  EXPECT_EQ(append("abacus"), TESSERA_INVALID);
  const struct {
    const char* name;
    std::int32_t tessera_append_shape::* field;
  } all[] = {{"dtype", &tessera_append_shape::dtype},
             {"page_ids", &tessera_append_shape::page_ids},
             {"packed", &tessera_append_shape::packed},
             {"packed_new", &tessera_append_shape::packed_new},
             {"slot_mapping", &tessera_append_shape::slot_mapping},
             {"rotary_dtype", &tessera_append_shape::rotary_dtype},
             {"rotary_interleaved", &tessera_append_shape::rotary_interleaved},
             {"rotary_constant_q", &tessera_append_shape::rotary_constant_q},
             {"rotary_position_type", &tessera_append_shape::rotary_position_type},
             {"reserved", &tessera_append_shape::reserved}};
  for (const auto& one : all) {
    SetUp();
    shape_.*one.field = 3;
    EXPECT_EQ(append(), TESSERA_INVALID);
    EXPECT_EQ(std::string(error_).find(std::string(one.name) + " = 3"), 0U) << error_;
  }
  for (const auto& one : {all[0],
                          {"dtype_kv", &tessera_append_shape::dtype_kv},
                          {"scale_k", &tessera_append_shape::scale_k},
                          {"scale_v", &tessera_append_shape::scale_v}}) {
    SetUp();
    shape_.*one.field = 9;
    EXPECT_EQ(append(), TESSERA_INVALID);
    EXPECT_EQ(std::string(error_).find(std::string(one.name) + " = 9"), 0U) << error_;
  }
  for (const std::int32_t lengths : {0, 4}) {
    SetUp();
    shape_.cache = lengths;
    EXPECT_EQ(append(), TESSERA_INVALID);
    EXPECT_EQ(std::string(error_).find("cache = " + std::to_string(lengths)), 0U) << error_;
  }
  SetUp();
  tensors_.v_new.data = nullptr;
  EXPECT_EQ(append(), TESSERA_INVALID);
  EXPECT_EQ(std::string(error_).find("v_new = null"), 0U) << error_;
  SetUp();
  page_table_[1] = 4;
  EXPECT_EQ(append(), TESSERA_INVALID);
  EXPECT_EQ(std::string(error_).find("cache.page_table[0][1] = 4"), 0U) << error_;
  shape_.size = 0;
  EXPECT_EQ(append(), TESSERA_INVALID);
  EXPECT_EQ(std::string(error_).find("shape.size = 0"), 0U) << error_;
  for (const float x : k_) EXPECT_EQ(x, 0.0F);
}

TEST_F(CAppend, AnOlderCallersStructuresAreShorter) {
  // Nothing was rotated then.
  shape_.num_heads = 0;
  shape_.size = offsetof(tessera_append_shape, rotary_dim);
  tensors_.size = offsetof(tessera_append_tensors, rotary_cos);
  tensors_.cu_seqlens_q = nullptr;
  ASSERT_EQ(append(), TESSERA_OK) << error_;
  EXPECT_EQ(k_[16], 5.0F);
  tessera_append_shape_init(nullptr, sizeof shape_);
  tessera_append_tensors_init(nullptr, sizeof tensors_);
}

}  // namespace
}  // namespace tessera
