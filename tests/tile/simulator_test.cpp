// Every catalog row's tiling against the double reference: random problems with ragged tails, both
// alignments, windows, GQA, packed sequences (empty ones too), splits, and all score features; of a
// GPU's forward rows caches, too; where it decodes, chunks, sink tokens and trees.
#include "tile/simulator.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "archs.h"
#include "core/storage.h"
#include "plan/catalog.h"
#include "plan/layout.h"
#include "plan/names.h"
#include "plan/select.h"
#include "reference/reference.h"

namespace tessera::tile {
namespace {

/// fp32 tensors of a problem, contiguous.
struct Data {
  std::vector<float> q, k, v, qv, o, dout, lse, dlse, bias, slopes, sink;
  std::vector<std::int32_t> cu_q, cu_k;
  std::vector<std::int32_t> seqlens, index, leftpad, pages;
  std::vector<std::uint64_t> tree;
  Tensors tensors;
};

std::vector<float> normal(std::mt19937& random, std::int64_t count, float scale = 1.0F) {
  std::normal_distribution<float> distribution(0.0F, scale);
  std::vector<float> values(static_cast<std::size_t>(count));
  for (float& x : values) x = distribution(random);
  return values;
}

Tensor contiguous(std::vector<float>& values, std::int64_t seqlen, std::int64_t heads,
                  std::int64_t dim) {
  return {values.data(), seqlen * heads * dim, heads * dim, dim};
}

/// Random lengths, some 0, the first the longest; returns the offsets.
std::vector<std::int32_t> random_offsets(std::mt19937& random, std::int64_t batch,
                                         std::int64_t longest) {
  std::vector<std::int32_t> offsets = {0};
  for (std::int64_t b = 0; b < batch; ++b) {
    const auto length = b == 0 ? longest : static_cast<std::int64_t>(random() % 3) * longest / 2;
    offsets.push_back(offsets.back() + static_cast<std::int32_t>(length));
  }
  return offsets;
}

/// Lengths, rows, left padding and pages of a cache; the first sequence fills it.
void place_in_cache(const Problem& p, Data& data, std::mt19937& random) {
  const auto below = [&random](std::int64_t high) {
    return static_cast<std::int32_t>(random() % static_cast<std::uint64_t>(high));
  };
  const CacheShape& shape = *p.cache;
  CacheTensors& cache = data.tensors.cache;
  const std::int64_t most = p.seqlen_k - (shape.lengths == Lengths::before ? shape.seqlen_new : 0);
  for (std::int64_t b = 0; b < p.batch; ++b) {
    data.seqlens.push_back(b == 0 ? static_cast<std::int32_t>(most) : below(most + 2) - 1);
    data.index.push_back(below(std::max<std::int64_t>(shape.rows, 1)));
    data.leftpad.push_back(below(40));
  }
  cache.seqlens = shape.lengths == Lengths::full ? nullptr : data.seqlens.data();
  if (shape.rows > 0) cache.index = data.index.data();
  if (shape.leftpad) cache.leftpad = data.leftpad.data();
  if (!shape.paged()) return;
  cache.stride_page_table = core::ceil_div(p.seqlen_k, shape.page_size) + 1;
  data.pages.resize(
      static_cast<std::size_t>(std::max(p.batch, shape.rows) * cache.stride_page_table));
  for (std::int32_t& page : data.pages) page = below(shape.num_pages);
  cache.page_table = data.pages.data();
  data.tensors.k.stride_batch = shape.page_size * data.tensors.k.stride_seqlen;
  data.tensors.v.stride_batch = shape.page_size * data.tensors.v.stride_seqlen;
}

Data make_data(Problem& p, std::mt19937& random) {
  Data data;
  if (p.packed) {
    data.cu_q = random_offsets(random, p.batch, p.seqlen_q);
    data.cu_k = random_offsets(random, p.batch, p.seqlen_k);
    p.total_q = data.cu_q.back();
    p.total_k = data.cu_k.back();
    data.tensors.cu_seqlens_q = data.cu_q.data();
    data.tensors.cu_seqlens_k = data.cu_k.data();
  }
  data.q = normal(random, p.rows_q() * p.num_heads * p.head_dim);
  data.k = normal(random, p.rows_k() * p.num_heads_k * p.head_dim);
  data.v = normal(random, p.rows_k() * p.num_heads_k * p.head_dim_v);
  data.qv = normal(random, p.rows_q() * p.num_heads * p.head_dim_v);
  data.dout = normal(random, p.rows_q() * p.num_heads * p.head_dim_v);
  data.dlse = normal(random, p.rows_q() * p.num_heads);
  data.o.resize(data.dout.size());
  data.lse.resize(data.dlse.size());
  data.slopes = normal(random, p.batch * p.num_heads, 0.003F);
  data.sink = normal(random, p.num_heads);
  Tensors& t = data.tensors;
  t.q = contiguous(data.q, p.seqlen_q, p.num_heads, p.head_dim);
  t.k = contiguous(data.k, p.seqlen_k, p.num_heads_k, p.head_dim);
  t.v = contiguous(data.v, p.seqlen_k, p.num_heads_k, p.head_dim_v);
  if (p.qv) t.qv = contiguous(data.qv, p.seqlen_q, p.num_heads, p.head_dim_v);
  if (p.cache) place_in_cache(p, data, random);
  t.saved_o = contiguous(data.o, p.seqlen_q, p.num_heads, p.head_dim_v);
  t.dout = contiguous(data.dout, p.seqlen_q, p.num_heads, p.head_dim_v);
  t.saved_softmax_lse = data.lse.data();
  t.dsoftmax_lse = data.dlse.data();
  if (p.alibi != PerHead::none) t.alibi_slopes = data.slopes.data();
  if (p.sink) t.sink = data.sink.data();
  if (p.bias) {
    const std::int64_t keys = p.bias->keys ? p.seqlen_k : 1;
    const std::int64_t queries = p.bias->queries ? p.seqlen_q : 1;
    const std::int64_t heads = p.bias->heads ? p.num_heads : 1;
    const std::int64_t batch = p.bias->batch ? p.batch : 1;
    data.bias = normal(random, std::max<std::int64_t>(batch * heads * queries * keys, 1));
    t.bias = {data.bias.data(), heads * queries * keys, queries * keys, keys, 1};
  }
  if (p.tree) {
    data.tree.resize(static_cast<std::size_t>(std::max<std::int64_t>(p.rows_q(), 1)));
    for (std::uint64_t& word : data.tree) word = random();
    t.tree_mask = data.tree.data();
  }
  t.philox_seed = random();
  t.philox_offset = random() % 3;
  return data;
}

Problem random_problem(std::mt19937& random, Pass pass, int most_queries, int most_keys) {
  const auto up_to = [&random](int high) {
    return static_cast<std::int64_t>(random() % (static_cast<unsigned>(high) + 1));
  };
  const auto one_in = [&random](unsigned n) { return random() % n == 0; };
  Problem p;
  p.pass = pass;
  p.batch = 1 + up_to(1);
  p.num_heads_k = 1 + up_to(1);
  p.num_heads = p.num_heads_k * (1 + up_to(2));
  p.seqlen_q = up_to(most_queries);
  p.seqlen_k = one_in(3) ? p.seqlen_q : up_to(most_keys);
  p.head_dim = 1 + up_to(5);
  p.head_dim_v = 1 + up_to(5);
  p.packed = one_in(3);
  if (one_in(2)) p.window_right = up_to(2) == 0 ? up_to(200) : 0;
  if (one_in(3)) p.window_left = up_to(300);
  if (one_in(2)) p.alignment = Alignment::top_left;
  if (one_in(3)) p.softcap = 2.0F;
  if (one_in(3)) p.alibi = one_in(2) ? PerHead::heads : PerHead::batch_heads;
  if (one_in(3)) p.bias = BiasShape{one_in(2), one_in(2), one_in(2), one_in(2), Dtype::f32};
  p.sink = one_in(3);
  if (one_in(3)) p.dropout_p = 0.3F;
  return p;
}

/// Largest difference; infinities must agree, NaN never does.
double worst(const std::vector<float>& got, const std::vector<double>& expected) {
  if (got.size() != expected.size()) return 1e30;
  double largest = 0.0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    if (std::isinf(expected[i]) && got[i] == static_cast<float>(expected[i])) continue;
    const double difference = std::abs(got[i] - expected[i]);
    if (!(difference <= largest)) largest = std::isnan(difference) ? 1e30 : difference;
  }
  return largest;
}

/// The simulator's lse is [row][head]; the reference's as S5.
std::vector<double> by_row(const Problem& p, const std::vector<double>& lse) {
  std::vector<double> result(lse.size());
  const auto heads = static_cast<std::size_t>(p.num_heads);
  const auto rows = static_cast<std::size_t>(p.rows_q());
  const auto seqlen = static_cast<std::size_t>(p.packed ? p.total_q : p.seqlen_q);
  for (std::size_t row = 0; row < rows; ++row) {
    for (std::size_t head = 0; head < heads; ++head) {
      result[row * heads + head] = lse[(row / seqlen * heads + head) * seqlen + row % seqlen];
    }
  }
  return result;
}

/// What narrows and widens the window.
void add_masks(Problem& p, std::mt19937& random) {
  if (random() % 3 == 0) p.chunk = static_cast<std::int64_t>(1 + random() % 500);
  if (random() % 3 == 0) p.sink_tokens = static_cast<std::int64_t>(1 + random() % 50);
  p.tree = random() % 3 == 0;
}

/// The types of a row that widens: of keys and values, with qv of values alone.
void set_cached(Problem& p, const core::Kernel& row) {
  if (row.qv) {
    p.dtype_v = row.cached;
    p.scales = {Scaling::none, Scaling::none, Scaling::token};
    return;
  }
  p.dtype = Dtype::bf16;
  p.dtype_kv = row.cached;
  p.scales = {Scaling::none, Scaling::tensor, Scaling::tensor};
}

void add_cache(Problem& p, std::mt19937& random) {
  const auto one_in = [&random](unsigned n) { return random() % n == 0; };
  CacheShape cache;
  cache.lengths = one_in(3) ? Lengths::full : Lengths::after;
  if (!p.packed && one_in(3)) {
    cache.lengths = Lengths::before;
    cache.seqlen_new = std::min(p.seqlen_q, p.seqlen_k);
  }
  if (one_in(2)) cache.rows = p.batch + 2;
  cache.leftpad = one_in(2);
  if (one_in(2)) {
    constexpr int kPageSizes[] = {1, 24, 64, 200};
    cache.page_size = kPageSizes[random() % 4];
    cache.num_pages = 50;
  }
  p.cache = cache;
}

const Device kCpu{"any", Arch::avx512_bf16, 1, 48 << 10, 1 << 20};
const Device kGpu{"any", Arch::sm90, 132, 232448, 50 << 20};

Device device_of(const core::Kernel& row) {
  Device device = is_gpu(row.arch) ? kGpu : kCpu;
  if (is_gpu(row.arch)) device.arch = row.arch;
  return device;
}

class EveryRow : public testing::TestWithParam<core::Kernel> {};

TEST_P(EveryRow, TilesComputeAttention) {
  const core::Kernel& row = GetParam();
  Device device = device_of(row);
  const unsigned seed = std::random_device()();
  std::mt19937 random(seed);
  const bool decode = row.form == core::Form::decode;
  // An f16 row has the tiling of its bf16 twin, and the numbers here are fp32 for all.
  const bool eight_bits = row.operand == core::Operand::e4m3;
  const bool integers = core::score_dtype_of(row.operand) == Dtype::i8;
  const bool widened = core::widens(row);
  const bool few = kSanitized || core::dtype_of(row.operand) == Dtype::f16 ||
                   is_scaled(core::score_dtype_of(row.operand));
  const int trials = few ? 20 : 60, enough = kSanitized ? 5 : trials;
  int ran = 0, masked = 0, full = 0, split = 0, ordered = 0, shared_bias = 0, own_bias = 0;
  int merged = 0, merged_units = 0, cached = 0, several_blocks = 0, high_boxes = 0;
  for (int trial = 0; trial < trials && ran < enough; ++trial) {
    Problem p = random_problem(random, row.pass, decode ? 5 : 400, decode ? 3000 : 500);
    if (trial % 8 == 0 && row.split_n > 0) {
      p.seqlen_q = std::min<std::int64_t>(p.seqlen_q, 7);
      p.seqlen_k += 2L * row.split_n;
      p.window_left = -1;
    }
    p.qv = row.qv || (!is_gpu(row.arch) && row.pass == Pass::forward && trial % 2 == 0);
    if (is_gpu(row.arch)) {
      p.head_dim = p.head_dim_v = eight_bits || integers || widened ? 16 : 8;
      // A row takes the columns that its tiles of values have.
      if (eight_bits && row.head_dim_v > 64) p.head_dim_v = row.head_dim_v - 16;
      if (exchanges(row)) p.head_dim_v = 200;  // of narrow ones there are others
      p.deterministic = row.pass == Pass::backward && random() % 2 == 0;
      if (p.bias && trial % 2 == 0) p.bias = BiasShape{true, true, true, true, Dtype::f32};
      device.threads = 1 + static_cast<int>(random() % 8);
    }
    if (is_gpu(row.arch) && row.extra != core::Extra::all) {
      p.softcap = row.extra == core::Extra::softcap ? 3.0F : 0.0F;
      p.dropout_p = 0.0F;
      p.alibi = PerHead::none;
      p.bias.reset();
    }
    const bool spans = is_gpu(row.arch) && decode;
    if (spans) {
      add_masks(p, random);
      p.dropout_p = 0.0F;
      p.batch_invariant = !p.packed && random() % 2 == 0;
      if (trial % 8 == 0) {
        // Several units, each a part or not.
        p.batch_invariant = trial % 16 == 0;
        p.packed = false;
        p.seqlen_q = std::max<std::int64_t>(p.seqlen_q, 1);
        p.seqlen_k += 1200;
        p.window_right = -1;
        p.chunk = 0;
      }
      const bool blocks = trial % 4 == 1;  // more rows than a block has
      if (blocks) {
        p.packed = false;
        p.seqlen_q = row.block_m + 1 + static_cast<std::int64_t>(random() % 24);
        p.tree = p.tree && p.seqlen_q <= 64;  // its words' bits
      }
      if (blocks || random() % 2 == 0) add_cache(p, random);
    }
    const bool tiles = is_gpu(row.arch) && row.pass == Pass::forward && !decode;
    if (tiles && random() % 2 == 0) add_cache(p, random);
    if (tiles && trial % 4 == 0) {  // boxes of several keys
      p.cache = {.lengths = Lengths::full, .page_size = 48, .num_pages = 30};
    }
    Data data = make_data(p, random);
    if (row.operand == core::Operand::bf16) p.dtype = Dtype::bf16;
    if (row.operand == core::Operand::f16) p.dtype = Dtype::f16;
    if (eight_bits) {
      p.dtype = Dtype::e4m3;
      p.v_tiles = true;
      p.scales = {Scaling::tensor, Scaling::tensor, Scaling::tensor};
    }
    if (integers) {
      p.dtype = Dtype::i8;
      p.dtype_v = core::dtype_of(row.operand);
      p.scales = {Scaling::tensor, Scaling::tensor, Scaling::none};
    }
    if (widened) set_cached(p, row);
    if (!refusal(row, p, device).empty()) continue;
    const PlanData plan = plan_row(row, p, device);
    Problem as_f32 = p;
    as_f32.dtype = Dtype::f32;
    as_f32.dtype_v.reset();
    as_f32.dtype_kv.reset();
    as_f32.v_tiles = false;
    as_f32.scales = {};
    const reference::Inputs inputs(as_f32, data.tensors);
    const std::string what = to_string(p) + " seed " + std::to_string(seed);
    Simulated got;
    if (row.pass == Pass::forward) {
      const reference::Outputs expected = reference::attend(inputs);
      got = spans ? simulate_decode(plan, data.tensors) : simulate_forward(plan, data.tensors);
      ASSERT_EQ(got.lost_parts, 0) << what;
      ASSERT_EQ(got.torn_boxes, 0) << what;
      // The simulator adds up weights one after another in fp32: of thousands that are alike each
      // addition may round the same way.
      const double bound = std::max(2e-5, 1e-8 * static_cast<double>(p.seqlen_k));
      ASSERT_LE(worst(got.o, expected.o), bound) << what;
      ASSERT_LE(worst(got.lse, by_row(p, expected.lse)), bound) << what;
    } else {
      const reference::Outputs expected = reference::attend(inputs);
      std::copy(expected.o.begin(), expected.o.end(), data.o.begin());
      std::copy(expected.lse.begin(), expected.lse.end(), data.lse.begin());
      got = simulate_backward(plan, data.tensors);
      ASSERT_LE(worst(got.dq, expected.dq), 1e-3) << what;
      ASSERT_LE(worst(got.dk, expected.dk), 1e-3) << what;
      ASSERT_LE(worst(got.dv, expected.dv), 1e-3) << what;
      if (is_gpu(row.arch) && p.sink) {
        ASSERT_LE(worst(got.dsink, expected.dsink), 1e-3) << what;
      }
      if (is_gpu(row.arch) && p.bias) {
        // An fp32 sum of up to a million scores, one after another.
        const double sum = static_cast<double>(p.batch * p.num_heads * p.seqlen_q * p.seqlen_k) /
                           static_cast<double>(expected.dbias.size());
        ASSERT_LE(worst(got.dbias, expected.dbias), std::max(1e-3, 1e-8 * sum)) << what;
        ++(shares_bias(p) ? shared_bias : own_bias);
      }
    }
    ++ran;
    ordered += p.deterministic ? 1 : 0;
    masked += got.masked_tiles;
    full += got.full_tiles;
    split += plan.work.splits > 1 ? 1 : 0;
    (p.batch_invariant ? merged_units : merged) += got.merged_items;
    cached += p.cache ? 1 : 0;
    several_blocks += p.cache && p.seqlen_q > row.block_m ? 1 : 0;
    high_boxes += got.high_boxes;
  }
  // The list must have exercised what it claims to prove.
  EXPECT_GT(ran, 0) << "seed " << seed;
  if (few) return;  // too few for every kind
  EXPECT_GT(ran, 20) << "seed " << seed;
  EXPECT_GT(masked, 0);
  EXPECT_GT(full, 0);
  const bool caches = is_gpu(row.arch) && row.pass == Pass::forward;
  if (caches) {
    EXPECT_GT(cached, 0);
  }
  if (caches && !decode && !row.any_layout && row.stages == 0) {
    EXPECT_GT(high_boxes, 0);
  }
  if (is_gpu(row.arch) && decode) {
    EXPECT_GT(merged, 0);
    EXPECT_GT(merged_units, 0);
    EXPECT_GT(several_blocks, 0);
  } else if (row.split_n > 0) {
    EXPECT_GT(split, 0);
  }
  if (is_gpu(row.arch) && row.pass == Pass::backward) {
    EXPECT_EQ(ordered > 0, !exchanges(row));
    EXPECT_LT(ordered, ran);
    if (row.extra == core::Extra::all) {
      EXPECT_GT(shared_bias, 0);
      EXPECT_GT(own_bias, 0);
    }
  }
}

// A GPU's decoding with batch_invariant: the same bits alone and in a batch, and on any number of
// multiprocessors, although spans are others. Without it they are not.
TEST(Decoding, BatchInvariantBitsAreTheSequencesOwn_S9) {
  const unsigned seed = std::random_device()();
  std::mt19937 random(seed);
  int same = 0, trials = 0, cut_otherwise = 0;
  for (const core::Kernel& row : kCatalog) {
    if (!is_gpu(row.arch) || row.form != core::Form::decode || row.prefixes) continue;
    if (core::is_made_at_need(row)) continue;
    for (const bool invariant : {true, false}) {
      Problem p;
      p.batch = 3;
      p.num_heads = 4;
      p.num_heads_k = 2;
      p.seqlen_q = 1 + static_cast<std::int64_t>(random() % 4);
      p.seqlen_k = 1500 + static_cast<std::int64_t>(random() % 1500);
      p.head_dim = p.head_dim_v = 16;
      p.window_right = 0;
      p.batch_invariant = invariant;
      p.qv = row.qv;
      const Data data = make_data(p, random);
      p.dtype = row.operand == core::Operand::bf16 ? Dtype::bf16 : Dtype::f16;
      if (core::widens(row)) set_cached(p, row);
      Problem one = p;
      one.batch = 1;
      Device board = device_of(row), small = board;
      small.threads = 5;
      ASSERT_EQ(refusal(row, p, board), "");
      const PlanData of_all = plan_row(row, p, board), alone = plan_row(row, one, small);
      cut_otherwise += of_all.spans != alone.spans ? 1 : 0;
      const Simulated all = simulate_decode(of_all, data.tensors);
      bool equal = true;
      for (std::int64_t b = 0; b < p.batch; ++b) {
        Tensors t = data.tensors;
        for (ConstTensor* tensor : {&t.q, &t.k, &t.v, &t.qv}) {
          if (tensor->data == nullptr) continue;
          tensor->data = static_cast<const float*>(tensor->data) + b * tensor->stride_batch;
        }
        const Simulated some = simulate_decode(alone, t);
        const auto agrees = [b](const std::vector<float>& few, const std::vector<float>& many) {
          return std::equal(few.begin(), few.end(),
                            many.begin() + b * static_cast<std::ptrdiff_t>(few.size()));
        };
        equal = equal && agrees(some.o, all.o) && agrees(some.lse, all.lse);
      }
      EXPECT_TRUE(equal || !invariant) << name_of(row) << " " << to_string(p) << " seed " << seed;
      same += equal && !invariant ? 1 : 0;
      trials += invariant ? 1 : 0;
    }
  }
  EXPECT_EQ(cut_otherwise, 2 * trials);
  EXPECT_LT(same, trials) << "seed " << seed;
}

// Where dQ is summed in order: the key blocks that meet a block of rows count from 0 in the order
// in which their tiles are handed out, so that a tile waits only for earlier ones, and for all that
// come before it.
TEST(Turns, KeyBlocksCountInTheOrderOfTheirTiles) {
  const unsigned seed = std::random_device()();
  std::mt19937 random(seed);
  int problems = 0, most = 0, early = 0;
  for (const core::Kernel& row : kCatalog) {
    if (!is_gpu(row.arch) || row.pass != Pass::backward) continue;
    const int trials = (kSanitized ? 8 : 60) * (core::begins_early(row) ? 3 : 1);
    for (int trial = 0; trial < trials; ++trial) {
      Problem p = random_problem(random, Pass::backward, 1000, 1000);
      p.deterministic = true;
      p.dtype = row.operand == core::Operand::bf16 ? Dtype::bf16 : Dtype::f16;
      p.head_dim = p.head_dim_v = 8;
      p.softcap = p.dropout_p = 0.0F;
      p.alibi = PerHead::none;
      p.bias.reset();
      if (trial % 2 == 0) {  // some heads begin with early keys
        p.window_left = -1;
        p.window_right = 0;
        p.batch_invariant = false;
      }
      const Data data = make_data(p, random);
      if (!refusal(row, p, kGpu).empty()) continue;
      const PlanData plan = plan_row(row, p, kGpu);
      const core::WorkOrder& order = plan.work;
      const int blocks = static_cast<int>(core::ceil_div<std::int64_t>(p.seqlen_q, row.block_m));
      const int heads = static_cast<int>(p.num_heads_k);
      const int all_heads = order.batch * order.heads;
      const int group = static_cast<int>(p.group());
      std::vector<int> turns(static_cast<std::size_t>(all_heads * group * blocks));
      const auto band_at = [&](int head) {
        return window_of(p).band_of(sequences_of(p, data.tensors).at(head / heads));
      };
      const auto keys_of = [&](const core::Band& band, int m) {
        const core::Range rows = {m * row.block_m, core::min((m + 1) * row.block_m, band.seqlen_q)};
        return core::key_blocks(band, rows, row.block_n).seen;
      };
      const auto place_of = [&](int head, int member, int m) {
        return static_cast<std::size_t>(head * group + member) * static_cast<std::size_t>(blocks) +
               static_cast<std::size_t>(m);
      };
      const std::string what = name_of(row) + " " + to_string(p) + " seed " + std::to_string(seed);
      for (int i = 0; i < order.count(); ++i) {
        const core::Work tile = order.backward_at(i);
        const int head = tile.batch * heads + tile.head;
        const core::Band band = band_at(head);
        const int key_block = order.key_block(tile, true), first_key = key_block * row.block_n;
        if (first_key >= band.seqlen_k) continue;
        early += tile.early ? 1 : 0;
        const core::Range seen =
            core::query_blocks(band, {first_key, first_key + row.block_n}, row.block_m).seen;
        const core::RowSteps steps = core::row_steps(seen, group, tile.split, order.splits);
        const core::RowWalk walk = core::row_walk(seen, tile.early);
        for (int step = 0; step < steps.count; ++step) {
          const auto [member, place] = steps.at(step);
          const int m = walk.block_at(place);
          int& turn = turns[place_of(head, member, m)];
          ASSERT_EQ(walk.rank_of(keys_of(band, m), key_block), turn) << what;
          most = std::max(most, ++turn);
        }
      }
      for (int head = 0; head < all_heads; ++head) {
        const core::Band band = band_at(head);
        for (int m = 0; m * row.block_m < band.seqlen_q; ++m) {
          for (int member = 0; member < group; ++member) {
            ASSERT_EQ(turns[place_of(head, member, m)], keys_of(band, m).size()) << what;
          }
        }
      }
      ++problems;
    }
  }
  EXPECT_GT(problems, kSanitized ? 40 : 300) << "seed " << seed;
  EXPECT_GT(most, 5);
  EXPECT_GT(early, kSanitized ? 0 : 100) << "seed " << seed;
}

// The same where pieces share keys, of problems large enough for several sections. Of two blocks of
// keys the later one has a row block in the same split or an earlier one, whatever the band: where
// its range of rows begins and ends later, the row comes sooner.
TEST(Turns, SharedKeysCountInTheOrderOfTheirTiles) {
  int shared = 0;
  for (const int group : {1, 3, 7, 8, 32}) {
    for (const int heads : {1, 2}) {
      for (const int seqlen : {700, 2048, 4096}) {
        for (const char* mask :
             {"", " causal", " window=600,0", " window=0,900", " window=50,70"}) {
          const std::string text = "bwd bf16 b=2 h=" + std::to_string(group * heads) + "/" +
                                   std::to_string(heads) + " q=" + std::to_string(seqlen) +
                                   " k=" + std::to_string(seqlen + 100) + " d=128 deterministic" +
                                   mask;
          const Result<Problem> p = parse_problem(text);
          ASSERT_TRUE(p.ok()) << text;
          const Result<Plan> planned = plan(*p, kGpu);
          ASSERT_TRUE(planned.ok()) << text;
          const core::Kernel& row = planned->data().kernel;
          const core::WorkOrder& order = planned->data().work;
          shared += order.splits > 1 ? 1 : 0;
          const core::Band band =
              window_of(*p).band_of(core::Sequences{nullptr, nullptr, seqlen, seqlen + 100}.at(0));
          std::map<std::tuple<int, int, int, int>, int> turns;
          for (int i = 0; i < order.count(); ++i) {
            const core::Work tile = order.backward_at(i);
            const int key_block = order.key_block(tile, true), first = key_block * row.block_n;
            const core::Range seen =
                core::query_blocks(band, {first, first + row.block_n}, row.block_m).seen;
            const core::RowSteps steps = core::row_steps(seen, group, tile.split, order.splits);
            const core::RowWalk walk = core::row_walk(seen, tile.early);
            for (int step = 0; step < steps.count; ++step) {
              const auto [member, place] = steps.at(step);
              const int m = walk.block_at(place);
              const core::Range rows = {m * row.block_m,
                                        core::min((m + 1) * row.block_m, band.seqlen_q)};
              const int rank =
                  walk.rank_of(core::key_blocks(band, rows, row.block_n).seen, key_block);
              const int turn = turns[std::tuple(tile.batch, tile.head, member, m)]++;
              ASSERT_EQ(rank, turn) << text;
            }
          }
        }
      }
    }
  }
  EXPECT_GT(shared, 50);
}

std::string row_name(const testing::TestParamInfo<core::Kernel>& info) {
  std::string name = name_of(info.param);
  std::replace(name.begin(), name.end(), '.', '_');
  return name;
}

/// Rows that read shared prefixes once take others' items, and a backward by mma.sync has sums in
/// an order of its own: tests/device runs them themselves.
std::vector<core::Kernel> simulated_rows() {
  std::vector<core::Kernel> rows;
  for (const core::Kernel& row : kCatalog) {
    const bool mma_backward = row.pass == Pass::backward && row.stages > 0;
    if (core::is_made_at_need(row)) continue;  // wide heads take long here; tests/device has them
    if (!row.prefixes && !mma_backward) rows.push_back(row);
  }
  return rows;
}

INSTANTIATE_TEST_SUITE_P(Catalog, EveryRow, testing::ValuesIn(simulated_rows()), row_name);

}  // namespace
}  // namespace tessera::tile
