// The decode kernel of every instruction set this machine has, against literal loops in double:
// every feature alone, in pairs and at random, every number of rows, odd sizes and strides, guard
// zones, split keys, and bits that depend on neither threads, nor order, nor the rest of the batch.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cpu/sample.h"

namespace tessera {
namespace {

using namespace forward_sample;  // NOLINT(google-build-using-namespace): their vocabulary

/// Types of q and of the cache.
struct Types {
  Dtype q, kv;
};

/// Few enough rows for decode, whatever feature comes on top.
Problem plain(Random& random, Types types) {
  Problem p;
  p.dtype = types.q;
  if (types.kv != types.q) {
    constexpr Scaling kBy[] = {Scaling::tensor, Scaling::head, Scaling::token};
    p.dtype_kv = types.kv;
    p.scales.k = kBy[pick(random, 0, 2)];
    p.scales.v = kBy[pick(random, 0, 2)];
  }
  p.batch = pick(random, 1, 2);
  p.num_heads = p.num_heads_k = pick(random, 1, 2);
  p.seqlen_q = pick(random, 1, 3);
  p.seqlen_k = pick(random, 1, 150);
  p.head_dim = p.head_dim_v = pick(random, 1, 40);
  return p;
}

class Decode : public testing::TestWithParam<Types> {
 protected:
  Decode() : random_(seed_) { RecordProperty("seed", std::to_string(seed_)); }
  void TearDown() override {
    if (HasFailure()) std::printf("seed %llu\n", static_cast<unsigned long long>(seed_));
  }

  void check(const Problem& p, double sigma = 1.0) {
    forward_sample::check(core::Form::decode, p, random_, sigma);
  }
  /// The rows of the catalog that do this problem.
  std::vector<core::Kernel> rows_for(const Problem& p) {
    std::vector<core::Kernel> rows;
    for (const core::Kernel& row : rows_of(core::Form::decode)) {
      if (refusal(row, p, this_cpu()).empty()) rows.push_back(row);
    }
    EXPECT_FALSE(rows.empty()) << to_string(p);
    return rows;
  }

  const std::uint64_t seed_ = std::random_device{}();
  Random random_;
};

TEST_P(Decode, EveryFeatureAlone) {
  for (const Feature feature : kFeatures) {
    for (int i = 0; i < 4; ++i) {
      Problem p = plain(random_, GetParam());
      feature(p, random_);
      check(p);
    }
  }
}

TEST_P(Decode, EveryPairOfFeatures) {
  for (const Feature first : kFeatures) {
    for (const Feature second : kFeatures) {
      Problem p = plain(random_, GetParam());
      first(p, random_);
      second(p, random_);
      check(p);
    }
  }
}

TEST_P(Decode, RandomSubsetsOfFeatures) {
  for (int i = 0; i < 60; ++i) {
    Problem p = plain(random_, GetParam());
    for (const Feature feature : kFeatures) {
      if (pick(random_, 0, 3) == 0) feature(p, random_);
    }
    check(p);
  }
}

// Rows are multiplied four, two or one at a time, and what is left over.
TEST_P(Decode, EveryNumberOfRows) {
  for (std::int64_t rows = 1; rows <= 16; ++rows) {
    for (std::int64_t queries = 1; queries <= rows; ++queries) {
      if (rows % queries != 0) continue;
      Problem p = plain(random_, GetParam());
      p.seqlen_q = queries;
      p.num_heads = p.num_heads_k * (rows / queries);
      p.seqlen_k = pick(random_, 60, 70);
      p.window_right = queries > 1 ? 0 : -1;
      check(p);
    }
  }
}

TEST_P(Decode, EveryHeadDimEdge) {
  for (const std::int64_t d :
       {1, 2, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 96, 127, 128, 160, 257, 512, 600}) {
    Problem p = plain(random_, GetParam());
    p.head_dim = p.head_dim_v = d;
    check(p);
    p.head_dim_v = pick(random_, 1, 2 * d);
    check(p);
  }
}

// Around the sizes of key tiles, blocks and chunks.
TEST_P(Decode, EveryKeyCountEdge) {
  for (const std::int64_t sk : {1, 2, 3, 4, 5, 15, 16, 17, 31, 33, 63, 64, 65, 67, 127, 128, 129}) {
    Problem p = plain(random_, GetParam());
    p.seqlen_k = sk;
    check(p);
  }
}

// The planner's own splits.
TEST_P(Decode, ManyKeys) {
  const Feature features[] = {[](Problem&, Random&) {},
                              causal,
                              sink,
                              dropout,
                              packed,
                              tree,
                              pages,
                              leftpad,
                              [](Problem& p, Random& random) {
                                p.chunk = pick(random, 500, 2000);
                                p.sink_tokens = pick(random, 1, 40);
                              },
                              [](Problem& p, Random& random) {
                                p.window_left = pick(random, 500, 2000);
                                p.window_right = 0;
                                p.sink_tokens = pick(random, 1, 2000);
                              }};
  for (const Feature feature : features) {
    Problem p = plain(random_, GetParam());
    p.seqlen_k = pick(random_, 1020, 3100);
    grouped(p, random_);
    feature(p, random_);
    for (const core::Kernel& row : rows_for(p)) {
      Sample sample = make_sample(p, random_, 1.0);
      execute(sample, row, row.split_n, 2);
      compare(sample, name_of(row));
    }
  }
}

// S4.
TEST_P(Decode, EmptySequencesAndRows) {
  for (const std::int64_t sq : {0, 1, 5}) {
    for (const std::int64_t sk : {0, 1, 3}) {
      for (const bool with_sink : {false, true}) {
        Problem p = plain(random_, GetParam());
        p.seqlen_q = sq;
        p.seqlen_k = sk;
        p.window_right = 0;
        p.sink = with_sink;
        check(p);
      }
    }
  }
}

TEST_P(Decode, LargeScores) {
  for (const double sigma : {3.0, 10.0, 20.0}) {
    for (const Feature feature : {Feature{[](Problem&, Random&) {}}, causal, sink, dropout}) {
      Problem p = plain(random_, GetParam());
      p.seqlen_k = pick(random_, 100, 400);
      p.head_dim = 8;
      p.softmax_scale = 1.0F;
      feature(p, random_);
      check(p, sigma);
    }
  }
}

// The last worker runs first, one after another on this thread.
void run_in_reverse(void* /*self*/, int num_workers, void (*work)(void* context, int worker),
                    void* context) {
  for (int w = num_workers - 1; w >= 0; --w) work(context, w);
}

// S9: the bits depend on neither the number of workers nor their order.
TEST_P(Decode, BitsDoNotDependOnThreads) {
  Problem p = plain(random_, GetParam());
  p.batch = 2;
  p.num_heads_k = 3;
  p.num_heads = 12;
  p.seqlen_k = 700;
  p.sink = true;
  ThreadPool pool(3);
  for (const core::Kernel& row : rows_for(p)) {
    for (const int split_n : {0, 64}) {
      Sample sample = make_sample(p, random_, 1.0);
      execute(sample, row, split_n, 1);
      const std::vector<std::byte> o = sample.o.array.bytes;
      const std::vector<float> lse = sample.lse;
      const auto expect_same = [&](int threads, const Executor& executor) {
        sample.o.array.poison();
        std::fill(sample.lse.begin(), sample.lse.end(), -777.0F);
        execute(sample, row, split_n, threads, &executor);
        EXPECT_TRUE(o == sample.o.array.bytes) << name_of(row) << " " << threads;
        EXPECT_EQ(lse, sample.lse) << name_of(row) << " " << threads;
      };
      for (const int threads : {1, 2, 3, 7}) {
        expect_same(threads, Executor{threads, nullptr, run_in_reverse});
        expect_same(threads, pool.executor());
      }
    }
  }
}

// S9: a sequence gives the same bits alone as in a batch.
TEST_P(Decode, BitsDoNotDependOnTheBatch) {
  Problem p = plain(random_, GetParam());
  p.batch = 3;
  grouped(p, random_);
  p.seqlen_k = 300;
  p.batch_invariant = true;
  for (const core::Kernel& row : rows_for(p)) {
    Sample sample = make_sample(p, random_, 1.0);
    execute(sample, row, 128, 2);
    const Array together = sample.o.array;
    sample.o.array.poison();
    const std::int64_t size = size_of(p.dtype);
    for (std::int64_t b = 0; b < p.batch; ++b) {
      Sample alone = sample;
      alone.problem.batch = 1;
      for (Placed* x : {&alone.q, &alone.k, &alone.v, &alone.o, &alone.k_scale, &alone.v_scale}) {
        x->start += b * x->batch;
      }
      execute(alone, row, 128, 1);
      for (std::int64_t i = 0; i < p.seqlen_q; ++i) {
        for (std::int64_t h = 0; h < p.num_heads; ++h) {
          const auto at = static_cast<std::size_t>(sample.o.at(b, i, h) * size);
          EXPECT_EQ(0, std::memcmp(together.bytes.data() + at, alone.o.array.bytes.data() + at,
                                   static_cast<std::size_t>(p.head_dim_v * size)))
              << name_of(row) << " batch " << b << " query " << i << " head " << h;
        }
      }
    }
  }
}

// A key that no query sees is not read: NaN and infinity there change nothing.
TEST_P(Decode, UnseenKeysDoNotLeak) {
  Problem p = plain(random_, GetParam());
  p.seqlen_q = 2;
  p.seqlen_k = 90;
  p.window_left = 7;
  p.window_right = 0;
  for (const core::Kernel& row : rows_for(p)) {
    Sample sample = make_sample(p, random_, 1.0);
    for (std::int64_t j = 0; j < p.seqlen_k - p.seqlen_q - p.window_left; ++j) {
      for (std::int64_t b = 0; b < p.batch; ++b) {
        for (std::int64_t h = 0; h < p.num_heads_k; ++h) {
          sample.k.array.set(sample.k.at(b, j, h), std::nanf(""));
          sample.v.array.set(sample.v.at(b, j, h), std::nanf(""));
          if (p.scales.k == Scaling::token) {
            sample.k_scale.array.set(sample.k_scale.at(b, j, h), std::nanf(""));
          }
          if (p.scales.v == Scaling::token) {
            sample.v_scale.array.set(sample.v_scale.at(b, j, h), std::nanf(""));
          }
        }
      }
    }
    execute(sample, row, 0, 1);
    compare(sample, name_of(row));
  }
}

// An infinite value stays one: no lane beyond the last key multiplies it with 0.
TEST_P(Decode, InfiniteValueOfTheLastKey) {
  if (is_scaled(GetParam().kv)) GTEST_SKIP() << "8 bits have no infinity";
  for (const std::int64_t sk : {1, 2, 3, 5, 64, 67}) {
    Problem p = plain(random_, GetParam());
    p.seqlen_q = 1;
    p.seqlen_k = sk;
    for (const core::Kernel& row : rows_for(p)) {
      Sample sample = make_sample(p, random_, 0.1);
      // 0x7F800000, 0x7F80, 0x7C00: infinity of each type, written as bits.
      const std::uint32_t bits = p.dtype == Dtype::f32    ? 0x7F800000U
                                 : p.dtype == Dtype::bf16 ? 0x7F80U
                                                          : 0x7C00U;
      std::memcpy(sample.v.array.bytes.data() + sample.v.at(0, sk - 1, 0) * size_of(p.dtype), &bits,
                  static_cast<std::size_t>(size_of(p.dtype)));
      execute(sample, row, 0, 1);
      EXPECT_EQ(sample.o.array.get(sample.o.at(0, 0, 0)), kInf) << name_of(row) << " " << sk;
    }
  }
}

// A NaN element of a key makes its head's rows NaN, one of a value its column, wherever it lies,
// and nothing else (S14).
TEST_P(Decode, NanElementsStayNan) {
  if (GetParam().kv == Dtype::i8) GTEST_SKIP() << "i8 has no NaN";
  for (int i = 0; i < 40; ++i) {
    Problem p = plain(random_, GetParam());
    p.num_heads = p.num_heads_k = 2;
    p.seqlen_q = 1;
    p.head_dim = p.head_dim_v = pick(random_, 1, 140);
    const std::int64_t b = pick(random_, 0, p.batch - 1), key = pick(random_, 0, p.seqlen_k - 1);
    const std::int64_t bad = pick(random_, 0, p.head_dim - 1), head = pick(random_, 0, 1);
    const bool of_value = pick(random_, 0, 1) != 0, negative = pick(random_, 0, 1) != 0;
    for (const core::Kernel& row : rows_for(p)) {
      Sample sample = make_sample(p, random_, 1.0);
      Placed& x = of_value ? sample.v : sample.k;
      const std::int64_t at = x.at(b, key, head) + bad;
      x.array.set(at, std::nanf(""));
      if (negative) {  // the sign is in the last byte
        x.array.bytes[static_cast<std::size_t>((at + 1) * size_of(x.array.dtype) - 1)] |=
            std::byte{0x80};
      }
      execute(sample, row, 0, 1);
      for (std::int64_t c = 0; c < p.batch * 2 * p.head_dim_v; ++c) {
        const std::int64_t column = c % p.head_dim_v, h = c / p.head_dim_v % 2,
                           batch = c / p.head_dim_v / 2;
        const bool wanted = batch == b && h == head && (!of_value || column == bad);
        EXPECT_EQ(std::isnan(sample.o.array.get(sample.o.at(batch, 0, h) + column)), wanted)
            << name_of(row) << " " << to_string(p) << " key " << key << " column " << bad;
      }
    }
  }
}

// Every element of 8 bits is widened exactly: a single key has its value as output, times a scale
// that is a power of two.
TEST_P(Decode, EveryElementIsExact) {
  if (GetParam().q != Dtype::f32 || !is_scaled(GetParam().kv)) GTEST_SKIP() << "rounds";
  for (const Scaling by : {Scaling::tensor, Scaling::head, Scaling::token}) {
    Problem p = plain(random_, GetParam());
    p.batch = p.num_heads = p.num_heads_k = p.seqlen_q = p.seqlen_k = 1;
    p.head_dim = 8;
    p.head_dim_v = 256;
    p.scales.v = by;
    for (const core::Kernel& row : rows_for(p)) {
      Sample sample = make_sample(p, random_, 1.0);
      for (std::int64_t i = 0; i < 256; ++i) {
        sample.v.array.bytes[static_cast<std::size_t>(sample.v.at(0, 0, 0) + i)] =
            static_cast<std::byte>(i);
      }
      sample.v_scale.array.set(sample.v_scale.at(0, 0, 0), 0.25F);
      execute(sample, row, 0, 1);
      for (std::int64_t i = 0; i < 256; ++i) {
        const double element = sample.v.array.get(sample.v.at(0, 0, 0) + i);
        const double found = sample.o.array.get(sample.o.at(0, 0, 0) + i);
        if (std::isnan(element)) {
          EXPECT_TRUE(std::isnan(found)) << name_of(row) << " " << i;
        } else {
          EXPECT_EQ(found, element * 0.25) << name_of(row) << " " << i;
        }
      }
    }
  }
}

// softmax_lse is optional.
TEST_P(Decode, NullLse) {
  const Problem p = plain(random_, GetParam());
  for (const core::Kernel& row : rows_for(p)) {
    Sample sample = make_sample(p, random_, 1.0);
    const PlanData plan = make_plan(row, p, 16, 1);
    std::vector<std::byte> memory(plan.workspace_bytes + 64);
    void* base = memory.data();
    std::size_t space = memory.size();
    std::align(64, plan.workspace_bytes, base, space);
    Tensors tensors = sample.tensors();
    tensors.softmax_lse = nullptr;
    ASSERT_TRUE(cpu::run(plan, tensors, base, {}).ok());
    for (const float x : sample.lse) ASSERT_EQ(x, -777.0F);
  }
}

// A plan for more than this machine has is refused by name.
TEST(Backend, RefusesAnInstructionSetThatIsNotHere) {
  Problem p;
  p.seqlen_q = p.seqlen_k = p.head_dim = p.head_dim_v = 1;
  PlanData plan = make_plan(rows_of(core::Form::decode).front(), p, 0, 1);
  plan.kernel.arch = static_cast<Arch>(static_cast<int>(Arch::avx512_bf16) + 1);
  const Status status = cpu::run(plan, {}, nullptr, {});
  EXPECT_EQ(status.code, Code::device);
  EXPECT_NE(status.text.find(to_string(best_arch())), std::string::npos) << status.text;
}

std::string name_of_types(const testing::TestParamInfo<Types>& types) {
  const std::string q = to_string(types.param.q), kv = to_string(types.param.kv);
  return q == kv ? q : q + "_" + kv;
}

constexpr Types kPlain[] = {
    {Dtype::f32, Dtype::f32}, {Dtype::bf16, Dtype::bf16}, {Dtype::f16, Dtype::f16}};
constexpr Types kEightBits[] = {{Dtype::f32, Dtype::e4m3},  {Dtype::f32, Dtype::i8},
                                {Dtype::bf16, Dtype::e4m3}, {Dtype::bf16, Dtype::i8},
                                {Dtype::f16, Dtype::e4m3},  {Dtype::f16, Dtype::i8}};
INSTANTIATE_TEST_SUITE_P(Dtypes, Decode, testing::ValuesIn(kPlain), name_of_types);
INSTANTIATE_TEST_SUITE_P(EightBits, Decode, testing::ValuesIn(kEightBits), name_of_types);

}  // namespace
}  // namespace tessera
