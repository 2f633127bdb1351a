// S9: bits do not depend on the number of workers, on their order, on what the memory held before,
// and (where asked for) on the rest of the batch; nor on strides, however large.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstring>
#include <memory>
#include <random>
#include <thread>

#include "check/runs.h"

namespace tessera::tools {
namespace {

/// Large enough to be cut into several pieces, and split along the keys.
const char* const kProblems[] = {
    "fwd f32 b=2 h=4/2 q=300 k=700 d=40 causal",
    "fwd bf16 b=1 h=2 q=520 k=300 d=64 window=100,50 softcap=5",
    "fwd bf16 b=1 h=1 q=600 k=601 d=24 causal",
    "fwd f16 b=3 h=2/1 q=33 k=100 d=17/31 sink dropout=0.2",
    "fwd bf16 b=2 h=8/2 q=1 k=5000 d=64",
    "fwd f32 b=1 h=4/1 q=3 k=9000 d=32 causal sink",
    "fwd f32 b=1 h=1 q=17 k=9000 d=16 alibi=h",
    "fwd bf16 b=5 h=4/2 q=200 k=300 d=48 packed=411,803 causal",
    "fwd f32 b=2 h=2 q=700 k=900 d=32 chunk=300",
    "fwd bf16 b=1 h=2 q=600 k=600 d=32 window=70,0 sink_tokens=40",
    "fwd bf16 b=3 h=4/2 q=300 k=700 d=40 cache=after pages=150x16 leftpad causal",
    "fwd f32 b=4 h=8/2 q=2 k=2500 d=32 cache=before:2 pages=1500x3:i64 rows=5 causal sink",
    "fwd f16 b=5 h=4/2 q=60 k=300 d=48 packed=150 cache=after chunk=100 tree",
    "bwd f32 b=1 h=4/2 q=300 k=500 d=32 causal sink",
    "bwd bf16 b=2 h=2/1 q=257 k=400 d=64/48 dropout=0.1 bias=hk:f32",
    "bwd f16 b=1 h=2 q=200 k=520 d=24 window=64,0 alibi=h bias=qk:f32",
    "bwd bf16 b=4 h=2/1 q=150 k=300 d=40 packed=300,700 causal",
};

/// Seeds whose variation is plain, contiguous and asks for all outputs, dlse given.
std::uint64_t fresh_seed() {
  return seed_with({Values::normal, true, false, true}, std::random_device{}());
}

Results run_fresh(const Problem& problem, std::uint64_t seed, const Device& device,
                  const Executor& executor) {
  RunMemory memory(problem, seed);
  if (problem.pass == Pass::backward) run_forward(memory);
  const Status status = run_in(memory, device, executor);
  EXPECT_TRUE(status.ok()) << status.text;
  EXPECT_EQ(memory.damage(), "");
  return results_of(memory);
}

/// Bit by bit: a NaN equals nothing.
void expect_same(const Results& a, const Results& b) {
  for (const auto& [name, values] : a) {
    const auto other = b.find(name);
    ASSERT_NE(other, b.end());
    std::size_t differ = 0;
    for (std::size_t i = 0; i < values.size(); ++i) {
      differ += values[i] == other->second[i] ? 0U : 1U;
    }
    EXPECT_EQ(differ, 0U) << name << " of " << values.size() << " elements";
  }
}

class Invariance : public ::testing::TestWithParam<const char*> {};

TEST_P(Invariance, NumberAndOrderOfWorkers) {
  const Problem problem = parse(GetParam());
  const std::uint64_t seed = fresh_seed();
  for (const Arch arch : archs()) {
    const Results one = run_fresh(problem, seed, device_with(arch, 1), inline_executor());
    for (const int threads : {2, 3, 5}) {
      SCOPED_TRACE(std::string(GetParam()) + " on " + to_string(arch) + ", seed " +
                   std::to_string(seed) + ", threads " + std::to_string(threads));
      ThreadPool pool(threads);
      expect_same(one, run_fresh(problem, seed, device_with(arch, threads), pool.executor()));
      expect_same(one,
                  run_fresh(problem, seed, device_with(arch, threads), reverse_executor(threads)));
      // An executor with fewer or more threads than was planned for.
      expect_same(one, run_fresh(problem, seed, device_with(arch, threads), inline_executor()));
      expect_same(one, run_fresh(problem, seed, device_with(arch, 2), pool.executor()));
    }
    // More workers than work: the last that can have some begins, and does it all.
    SCOPED_TRACE(std::string(GetParam()) + " on " + to_string(arch) + ", seed " +
                 std::to_string(seed) + ", threads 1000");
    expect_same(one, run_fresh(problem, seed, device_with(arch, 1000), reverse_executor(1000)));
  }
}

TEST_P(Invariance, Repeats) {
  const Problem problem = parse(GetParam());
  const std::uint64_t seed = fresh_seed();
  for (const Arch arch : archs()) {
    SCOPED_TRACE(std::string(GetParam()) + " on " + to_string(arch) + ", seed " +
                 std::to_string(seed));
    ThreadPool pool(3);
    const Results first = run_fresh(problem, seed, device_with(arch, 3), pool.executor());
    for (int i = 0; i < 3; ++i) {
      expect_same(first, run_fresh(problem, seed, device_with(arch, 3), pool.executor()));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Problems, Invariance, ::testing::ValuesIn(kProblems));

/// One plan, two runs at the same time, each with its own tensors, workspace and pool.
TEST(Runs, OnePlanServesSeveralThreads) {
  const Problem problem = parse("fwd f32 b=2 h=4/2 q=100 k=300 d=32 causal");
  const std::uint64_t seed = fresh_seed();
  const Device device = device_with(best_arch(), 2);
  const Results expected = run_fresh(problem, seed, device, inline_executor());
  const Result<Plan> shared = plan(problem, device);
  ASSERT_TRUE(shared.ok());
  std::vector<Results> results(3);
  std::vector<std::thread> threads;
  for (Results& result : results) {
    threads.emplace_back([&problem, &shared, &result, seed] {
      RunMemory memory(problem, seed);
      const GuardedBuffer workspace(shared->workspace_bytes(), 0);
      ThreadPool pool(2);
      const Executor executor = pool.executor();
      const Execution execution{&executor, nullptr, nullptr};
      EXPECT_TRUE(
          run(*shared, memory.tensors(), workspace.data(), workspace.bytes(), execution).ok());
      result = results_of(memory);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const Results& result : results) expect_same(expected, result);
}

/// Of results of a dense batch: those of sequence 1.
Results of_sequence_1(Results all, std::int64_t batch) {
  for (auto& [name, values] : all) {
    const auto count = static_cast<std::ptrdiff_t>(values.size()) / batch;
    values = std::vector<double>(values.begin() + count, values.begin() + 2 * count);
  }
  return all;
}

/// Sequence 1 of a batch of three, alone: the same bits (batch_invariant).
TEST(Runs, BatchInvariant) {
  for (const char* text : {"fwd f32 h=4/2 q=70 k=300 d=32 causal", "fwd bf16 h=4/2 q=1 k=5000 d=64",
                           "fwd f32 h=8/1 q=2 k=1100 d=16", "fwd bf16 h=2 q=300 k=200 d=64",
                           "bwd f32 h=2/1 q=100 k=200 d=32 causal"}) {
    Problem many = parse(text);
    many.batch = 3;
    many.batch_invariant = true;
    Problem one = many;
    one.batch = 1;
    const std::uint64_t seed = fresh_seed();
    for (const Arch arch : archs()) {
      SCOPED_TRACE(std::string(text) + " on " + to_string(arch) + ", seed " + std::to_string(seed));
      RunMemory batch(many, seed), alone(one, seed);
      if (many.pass == Pass::backward) run_forward(batch);
      // Sequence 1, `count` bytes of each.
      const auto copy = [](const void* from, void* to, std::int64_t count) {
        std::memcpy(to, static_cast<const char*>(from) + count, static_cast<std::size_t>(count));
      };
      const Tensors& b = batch.tensors();
      const Tensors& a = alone.tensors();
      const std::int64_t width = size_of(many.dtype);
      const std::int64_t q_bytes = many.seqlen_q * many.num_heads * many.head_dim * width;
      const std::int64_t k_bytes = many.seqlen_k * many.num_heads_k * many.head_dim * width;
      copy(b.q.data, const_cast<void*>(a.q.data), q_bytes);
      copy(b.k.data, const_cast<void*>(a.k.data), k_bytes);
      copy(b.v.data, const_cast<void*>(a.v.data), k_bytes);
      if (many.pass == Pass::backward) {
        const std::int64_t lse_bytes = many.seqlen_q * many.num_heads * 4;
        copy(b.dout.data, const_cast<void*>(a.dout.data), q_bytes);
        copy(b.o.data, a.o.data, q_bytes);
        copy(b.softmax_lse, a.softmax_lse, lse_bytes);
        copy(b.dsoftmax_lse, const_cast<float*>(a.dsoftmax_lse), lse_bytes);
      }
      ASSERT_TRUE(run_in(batch, device_with(arch, 2), reverse_executor(2)).ok());
      ASSERT_TRUE(run_in(alone, device_with(arch, 2), reverse_executor(2)).ok());
      expect_same(of_sequence_1(results_of(batch), 3), results_of(alone));
    }
  }
}

/// Tensors of sequence 1 of a dense batch with a cache; o and softmax_lse are the caller's.
Tensors sequence_1(const Problem& p, Tensors t, const Tensors& outputs) {
  const auto advance = [](const void*& data, std::int64_t bytes) {
    data = static_cast<const char*>(data) + bytes;
  };
  advance(t.q.data, t.q.stride_batch * size_of(p.dtype));
  if (!p.cache->paged() && p.cache->rows == 0) {
    advance(t.k.data, t.k.stride_batch * size_of(p.dtype));
    advance(t.v.data, t.v.stride_batch * size_of(p.dtype));
  }
  CacheTensors& cache = t.cache;
  if (p.cache->paged() && p.cache->rows == 0)
    advance(cache.page_table, 4 * cache.stride_page_table);
  for (const std::int32_t** array : {&cache.seqlens, &cache.index, &cache.leftpad}) {
    if (*array != nullptr) ++*array;
  }
  if (t.tree_mask != nullptr) t.tree_mask += p.seqlen_q;
  t.o = outputs.o;
  t.softmax_lse = outputs.softmax_lse;
  return t;
}

/// Sequence 1 of three that share a cache: the same bits when the others are shorter or no-ops, and
/// alone (batch_invariant).
TEST(Runs, BatchInvariantWithACache) {
  for (const char* text :
       {"fwd f32 h=4/2 q=70 k=300 d=32 causal cache=after leftpad",
        "fwd bf16 h=4/2 q=1 k=3000 d=32 cache=after pages=70x48",
        "fwd f32 h=8/1 q=2 k=1500 d=16 causal cache=before:2 rows=2 sink",
        "fwd bf16 h=2 q=300 k=500 d=32 chunk=100 sink_tokens=5 cache=after pages=99x16 rows=3",
        "fwd f16 h=4/2 q=40 k=1300 d=24 window=300,0 cache=after pages=500x3 leftpad tree"}) {
    Problem many = parse(text);
    many.batch = 3;
    many.batch_invariant = true;
    Problem one = many;
    one.batch = 1;
    std::uint64_t seed = 0;
    for (std::int64_t keys = 0; keys <= many.seqlen_k / 2;) {
      seed = fresh_seed();
      const RunMemory memory(many, seed);
      const CacheTensors& cache = memory.tensors().cache;
      keys = std::int64_t{cache.seqlens[1]} - (cache.leftpad != nullptr ? cache.leftpad[1] : 0);
    }
    for (const Arch arch : archs()) {
      SCOPED_TRACE(std::string(text) + " on " + to_string(arch) + ", seed " + std::to_string(seed));
      RunMemory batch(many, seed), alone(one, seed);
      const Device device = device_with(arch, 2);
      ASSERT_TRUE(run_in(batch, device, reverse_executor(2)).ok());
      const Results whole = of_sequence_1(results_of(batch), 3);

      const Result<Plan> planned = plan(one, device);
      ASSERT_TRUE(planned.ok());
      const GuardedBuffer workspace(planned->workspace_bytes(), 0);
      const Tensors tensors = sequence_1(many, batch.tensors(), alone.tensors());
      ASSERT_TRUE(run(*planned, tensors, workspace.data(), workspace.bytes()).ok());
      expect_same(whole, results_of(alone));

      auto* const seqlens = const_cast<std::int32_t*>(batch.tensors().cache.seqlens);
      seqlens[0] = seqlens[0] > 0 ? seqlens[0] / 2 : -3;
      seqlens[2] = -1;
      ASSERT_TRUE(run_in(batch, device, inline_executor()).ok());
      expect_same(whole, of_sequence_1(results_of(batch), 3));
    }
  }
}

/// Address space without memory behind it, so that strides can be as large as they like.
class Desert {
 public:
  explicit Desert(std::size_t bytes)
      : bytes_(bytes),
        start_(::mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {}
  ~Desert() {
    if (start_ != MAP_FAILED) ::munmap(start_, bytes_);
  }
  Desert(const Desert&) = delete;
  Desert& operator=(const Desert&) = delete;

  std::byte* data() const {
    return start_ == MAP_FAILED ? nullptr : static_cast<std::byte*>(start_);
  }

 private:
  std::size_t bytes_;
  void* start_;
};

/// A copy of a dense two-sequence, two-head bf16 tensor of head_dim 16 with sequences, and where
/// there are only two also rows, more than 2^31 elements apart.
class FarCopy {
 public:
  FarCopy(const ConstTensor& near, std::int64_t seqlen) : seqlen_(seqlen) {
    constexpr std::int64_t kFar = (std::int64_t{1} << 31) + 64;
    const std::int64_t step = seqlen == 2 ? kFar : 64;
    const std::int64_t batch = seqlen == 2 ? 2 * kFar + 8 : kFar;
    desert_ = std::make_unique<Desert>(static_cast<std::size_t>(2 * (batch + 2 * kFar + 4096)));
    tensor_ = {desert_->data(), batch, step, 16};
    for_each_row([&](std::int64_t b, std::int64_t i, std::int64_t h) {
      std::memcpy(at(tensor_, b, i, h), at(near, b, i, h), 32);
    });
  }

  const Tensor& tensor() const { return tensor_; }

  bool equals(const ConstTensor& near) const {
    bool equal = true;
    for_each_row([&](std::int64_t b, std::int64_t i, std::int64_t h) {
      equal = equal && std::memcmp(at(tensor_, b, i, h), at(near, b, i, h), 32) == 0;
    });
    return equal;
  }

 private:
  template <class Visit>
  void for_each_row(const Visit& visit) const {
    for (std::int64_t n = 0; n < 4 * seqlen_; ++n) visit(n / (2 * seqlen_), n / 2 % seqlen_, n % 2);
  }
  static std::byte* at(const ConstTensor& t, std::int64_t b, std::int64_t i, std::int64_t h) {
    return static_cast<std::byte*>(const_cast<void*>(t.data)) +
           2 * (b * t.stride_batch + i * t.stride_seqlen + h * t.stride_head);
  }

  std::int64_t seqlen_;
  std::unique_ptr<Desert> desert_;
  Tensor tensor_;
};

/// S11: rows further apart than 2^31 elements give the bits of contiguous ones.
TEST(Runs, OffsetsBeyondThirtyTwoBits) {
  for (const char* text :
       {"fwd bf16 b=2 h=2 q=2 k=2 d=16", "fwd bf16 b=2 h=2 q=40 k=2 d=16",
        "bwd bf16 b=2 h=2 q=2 k=2 d=16", "bwd bf16 b=2 h=2 q=40 k=2 d=16 causal"}) {
    const Problem problem = parse(text);
    const std::uint64_t seed = fresh_seed();
    for (const Arch arch : archs()) {
      SCOPED_TRACE(std::string(text) + " on " + to_string(arch) + ", seed " + std::to_string(seed));
      const Device device = device_with(arch, 1);
      RunMemory memory(problem, seed);
      if (problem.pass == Pass::backward) run_forward(memory);
      const Tensors& near = memory.tensors();
      const FarCopy q(near.q, problem.seqlen_q), k(near.k, problem.seqlen_k),
          v(near.v, problem.seqlen_k), o(near.o, problem.seqlen_q);
      Tensors far = near;
      far.q = q.tensor();
      far.k = k.tensor();
      far.v = v.tensor();
      far.o = o.tensor();
      std::vector<FarCopy> gradients;
      if (problem.pass == Pass::backward) {
        gradients.emplace_back(near.dout, problem.seqlen_q);
        gradients.emplace_back(near.dq, problem.seqlen_q);
        gradients.emplace_back(near.dk, problem.seqlen_k);
        gradients.emplace_back(near.dv, problem.seqlen_k);
        far.dout = gradients[0].tensor();
        far.dq = gradients[1].tensor();
        far.dk = gradients[2].tensor();
        far.dv = gradients[3].tensor();
      }
      const Result<Plan> planned = plan(problem, device);
      ASSERT_TRUE(planned.ok());
      const GuardedBuffer workspace(planned->workspace_bytes(), 0);
      ASSERT_TRUE(run(*planned, far, workspace.data(), workspace.bytes()).ok());
      ASSERT_TRUE(run_in(memory, device, inline_executor()).ok());
      EXPECT_TRUE(o.equals(near.o));
      if (problem.pass == Pass::forward) continue;
      EXPECT_TRUE(gradients[1].equals(near.dq));
      EXPECT_TRUE(gradients[2].equals(near.dk));
      EXPECT_TRUE(gradients[3].equals(near.dv));
    }
  }
}

}  // namespace
}  // namespace tessera::tools
