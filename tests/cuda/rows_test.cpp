// What the Hopper backward does before and after its main kernel (sm90/backward_rows.h), run on the
// host: the kernels themselves, thread by thread, on dense and packed rows with gaps.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "cuda/backward_rows_host.h"
#include "files/convert.h"
#include "tile/pieces.h"

namespace tessera {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

/// Rows of queries with what the kernels read and write; whatever they do not, says so.
struct Rows {
  cuda::sm90::BackwardRowParams p;
  std::vector<std::int32_t> offsets = {0};
  std::vector<std::uint16_t> o, dout, dq;
  std::vector<float> lse, dlse, sink, statistics, accumulators, parts, dsink;
  std::int64_t blocks = 0;  ///< of rows, of all sequences
  unsigned grid = 0;

  Rows(std::mt19937& random, core::Kernel row, bool packed, int dim, bool aligned) {
    p.batch = 3;
    p.heads = 2;
    p.seqlen_q = 150;
    p.head_dim = p.head_dim_v = dim;
    p.softmax_scale = 0.5F;
    p.aligned = aligned;
    for (int b = 0; b < p.batch; ++b) {
      const int lengths[] = {150, 0, 70};
      offsets.push_back(offsets.back() + (packed ? lengths[b] : p.seqlen_q));
    }
    const std::int64_t rows = offsets.back(), stride = aligned ? dim + 8 : dim + 3;
    p.rows.blocks = {row.block_m, core::ceil_div(p.seqlen_q, row.block_m)};
    p.rows.heads = p.heads;
    p.rows.pieces = row.block_m * row.head_dim / cuda::sm90::kPieceFloats;
    blocks = p.rows.blocks.count(packed, rows, p.batch);
    grid = static_cast<unsigned>(p.batch * p.rows.blocks.per_sequence * p.heads);

    std::normal_distribution<double> normal;
    const auto fill = [&](auto& values, std::int64_t count, const auto& make) {
      values.resize(static_cast<std::size_t>(count));
      for (auto& x : values) x = make();
    };
    const auto bf16 = [&] { return tools::to_bf16(normal(random)); };
    const auto f32 = [&] { return static_cast<float>(normal(random)); };
    const auto nan = [] { return kNan; };
    fill(o, rows * p.heads * stride, bf16);
    fill(dout, rows * p.heads * stride, bf16);
    fill(dq, rows * p.heads * stride, [] { return std::uint16_t{0xFFFF}; });
    fill(lse, rows * p.heads, [&] { return random() % 9 == 0 ? -core::kInfinity : f32(); });
    fill(dlse, rows * p.heads, f32);
    fill(sink, p.heads, f32);
    fill(statistics, blocks * p.heads * 2 * row.block_m, nan);
    fill(accumulators, blocks * p.heads * row.block_m * row.head_dim, nan);
    fill(parts, std::int64_t{p.heads} * p.batch * p.rows.blocks.per_sequence, nan);
    fill(dsink, p.heads, nan);
    const cuda::sm90::Strides strides = {packed ? 0 : p.seqlen_q * (p.heads * stride),
                                         p.heads * stride, stride};
    p.o = {o.data(), strides};
    p.dout = {dout.data(), strides};
    p.dq = dq.data();
    p.dq_strides = strides;
    p.softmax_lse = lse.data();
    p.lse_head = packed ? rows : p.seqlen_q;
    p.cu_seqlens_q = packed ? offsets.data() : nullptr;
    p.rows.statistics = statistics.data();
    p.rows.dq = accumulators.data();
  }

  bool packed() const { return p.cu_seqlens_q != nullptr; }
  int seqlen(int b) const { return offsets[at(b) + 1] - offsets[at(b)]; }
  std::size_t row_of(int b, int head, int query) const {
    return at((packed() ? offsets[at(b)] : b * p.seqlen_q) + query) * at(p.heads) + at(head);
  }
  std::size_t element(int b, int head, int query, int column) const {
    return row_of(b, head, query) * at(p.dq_strides.head) + at(column);
  }
  std::size_t lse_of(int b, int head, int query) const {
    return at(packed() ? head * p.lse_head + offsets[at(b)] + query
                       : (b * p.heads + head) * p.lse_head + query);
  }
  /// The row block that holds a query of the sequence.
  std::int64_t block_of(int b, int query) const {
    return p.rows.blocks.first_of(packed(), offsets[at(b)], b) + query / p.rows.blocks.block_m;
  }

  template <class Body>
  void for_each_query(const Body& body) const {
    for (int b = 0; b < p.batch; ++b) {
      for (int head = 0; head < p.heads; ++head) {
        for (int query = 0; query < seqlen(b); ++query) body(b, head, query);
      }
    }
  }

  static std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }
};

constexpr auto kSmall =
    core::Kernel{.block_m = 64, .block_n = 128, .head_dim = 128, .head_dim_v = 128};
constexpr auto kLong =
    core::Kernel{.block_m = 128, .block_n = 128, .head_dim = 64, .head_dim_v = 64};

/// body(rows, description) for both tiles, dense and packed, aligned and not.
template <class Body>
void for_all_rows(const Body& body) {
  const unsigned seed = std::random_device()();
  std::mt19937 random(seed);
  for (const core::Kernel& row : {kSmall, kLong}) {
    for (const bool packed : {false, true}) {
      for (const bool aligned : {true, false}) {
        const int dim = aligned ? row.head_dim - 8 : row.head_dim - 27;
        Rows rows(random, row, packed, dim, aligned);
        body(rows, row,
             "block_m " + std::to_string(row.block_m) + (packed ? " packed" : "") +
                 (aligned ? "" : " unaligned") + " seed " + std::to_string(seed));
      }
    }
  }
}

// Shifts, deltas and the sink's gradient are those of their definitions; every accumulator of a
// block that has rows is 0, and no other block is touched.
TEST(BackwardRows, StatisticsFollowTheirDefinitions) {
  for_all_rows([](Rows& rows, const core::Kernel& row, const std::string& what) {
    const bool all = rows.packed();  // the options, too
    if (all) rows.p.dsoftmax_lse = rows.dlse.data();
    if (all) rows.p.sink = rows.sink.data();
    if (all) rows.p.sink_parts = rows.parts.data();
    if (all) rows.p.dsink = rows.dsink.data();
    host::launch(rows.grid, [&] { cuda::sm90::prepare_rows<Dtype::bf16>(rows.p); });
    const auto m = static_cast<std::size_t>(row.block_m);
    std::vector<float> shifts(rows.statistics.size() / 2, core::kInfinity);
    std::vector<double> deltas(shifts.size(), 0.0), dsink(2, 0.0);
    std::vector<bool> used(shifts.size() / m);
    rows.for_each_query([&](int b, int head, int query) {
      const std::size_t block = Rows::at(rows.block_of(b, query) * rows.p.heads + head);
      const std::size_t at = block * m + Rows::at(query % row.block_m);
      const float lse = rows.lse[rows.lse_of(b, head, query)];
      used[block] = true;
      shifts[at] = core::backward_shift(lse);
      if (all) deltas[at] -= rows.dlse[rows.lse_of(b, head, query)];
      for (int c = 0; c < rows.p.head_dim_v; ++c) {
        const std::size_t i = rows.element(b, head, query, c);
        deltas[at] += double{tools::from_bf16(rows.o[i])} * tools::from_bf16(rows.dout[i]);
      }
      if (lse == -core::kInfinity) return;
      dsink[Rows::at(head)] -= std::exp(double{rows.sink[Rows::at(head)]} - lse) * deltas[at];
    });
    for (std::size_t i = 0; i < shifts.size(); ++i) {
      const float* const of_block = rows.statistics.data() + i / m * 2 * m;
      if (!used[i / m]) {
        ASSERT_TRUE(std::isnan(of_block[i % m]) && std::isnan(of_block[m + i % m])) << what;
        continue;
      }
      ASSERT_EQ(of_block[i % m], shifts[i]) << what;
      ASSERT_NEAR(of_block[m + i % m], deltas[i], 1e-4) << what;
    }
    for (std::size_t i = 0; i < rows.accumulators.size(); ++i) {
      const float x = rows.accumulators[i];
      ASSERT_TRUE(used[i / (m * Rows::at(row.head_dim))] ? x == 0.0F : std::isnan(x)) << what;
    }
    if (!all) return;
    host::launch(2, [&] { cuda::sm90::sum_sinks(rows.p); });
    for (std::size_t head = 0; head < 2; ++head) {
      EXPECT_NEAR(rows.dsink[head], dsink[head], 1e-2) << what;
    }
  });
}

// An accumulator reaches its row and column, scaled, and nothing else is written.
TEST(BackwardRows, AccumulatorsBecomeTheirRowsAndColumns) {
  for_all_rows([](Rows& rows, const core::Kernel& row, const std::string& what) {
    const auto value = [](std::int64_t block, std::int64_t r, std::int64_t column) {
      return static_cast<float>((block * 5 + r * 7 + column * 3) % 251);  // exact in bf16
    };
    for (std::int64_t block = 0; block < rows.blocks * rows.p.heads; ++block) {
      float* const dq = rows.accumulators.data() + block * row.block_m * row.head_dim;
      for (int group = 0; group < rows.p.rows.pieces; ++group) {
        for (int thread = 0; thread < 128; ++thread) {
          for (int i = 0; i < 32; ++i) {
            const tile::PieceElement x = tile::added(row, group, thread, i);
            dq[x.at] = 2.0F * value(block, x.row, x.column);
          }
        }
      }
    }
    host::launch(rows.grid, [&] { cuda::sm90::finish_rows<Dtype::bf16>(rows.p); });
    std::vector<std::uint16_t> expected(rows.dq.size(), 0xFFFF);
    rows.for_each_query([&](int b, int head, int query) {
      const std::int64_t block = rows.block_of(b, query) * rows.p.heads + head;
      for (int c = 0; c < rows.p.head_dim; ++c) {
        expected[rows.element(b, head, query, c)] =
            tools::to_bf16(value(block, query % row.block_m, c));
      }
    });
    ASSERT_EQ(rows.dq, expected) << what;
  });
}

}  // namespace
}  // namespace tessera
