// What a backward does before and after its main kernel (aux/backward_rows.h), run on the
// host: the kernels themselves, thread by thread, on dense and packed rows with gaps.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
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
  cuda::aux::BackwardRowParams p;
  std::vector<std::int32_t> offsets = {0}, key_offsets = {0};
  std::vector<std::uint16_t> o, dout, dq;
  std::vector<float> lse, dlse, sink, statistics, accumulators, parts, dsink;
  std::vector<std::int32_t> turns;
  std::int32_t next_tile = 7;
  std::int64_t blocks = 0;  ///< of rows, of all sequences
  unsigned grid = 0;

  Rows(std::mt19937& random, core::Kernel row, bool packed, int dim, bool aligned) {
    p.batch = 3;
    p.heads = 2;
    p.sequences.seqlen_q = 150;
    p.head_dim = p.head_dim_v = dim;
    p.softmax_scale = 0.5F;
    p.aligned = aligned;
    for (int b = 0; b < p.batch; ++b) {
      const int lengths[] = {150, 0, 70};
      offsets.push_back(offsets.back() + (packed ? lengths[b] : p.sequences.seqlen_q));
      key_offsets.push_back(key_offsets.back() + (b == 0 ? 20 : 70));
    }
    const std::int64_t rows = offsets.back(), stride = aligned ? dim + 8 : dim + 3;
    p.rows.blocks = {row.block_m, core::ceil_div(p.sequences.seqlen_q, row.block_m)};
    p.rows.heads = p.heads;
    p.rows.sums = row.block_m * row.head_dim;
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
    fill(turns, blocks * p.heads * 2, [] { return 7; });
    const core::Strides strides = {packed ? 0 : p.sequences.seqlen_q * (p.heads * stride),
                                   p.heads * stride, stride};
    p.o = {o.data(), strides};
    p.dout = {dout.data(), strides};
    p.dq = dq.data();
    p.dq_strides = strides;
    p.softmax_lse = lse.data();
    p.lse_head = packed ? rows : p.sequences.seqlen_q;
    p.sequences.cu_seqlens_q = packed ? offsets.data() : nullptr;
    p.sequences.cu_seqlens_k = packed ? key_offsets.data() : nullptr;
    p.sequences.seqlen_k = packed ? 70 : 20;
    p.window.right = 0;
    p.rows.statistics = statistics.data();
    p.rows.dq = accumulators.data();
    p.turns = turns.data();
    p.next_tile = &next_tile;
  }

  bool packed() const { return p.sequences.packed(); }
  int seqlen(int b) const { return offsets[at(b) + 1] - offsets[at(b)]; }
  std::size_t row_of(int b, int head, int query) const {
    return at((packed() ? offsets[at(b)] : b * p.sequences.seqlen_q) + query) * at(p.heads) +
           at(head);
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
    return p.rows.blocks.first_of(p.sequences.at(b)) + query / p.rows.blocks.block_m;
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

// Shifts, deltas and the sink's gradient are those of their definitions; every turn of a block that
// has rows is 0, and every accumulator, unless rows see keys, the first of which store; and no
// other block is touched.
TEST(BackwardRows, StatisticsFollowTheirDefinitions) {
  for_all_rows([](Rows& rows, const core::Kernel& row, const std::string& what) {
    const bool all = rows.packed();  // the options, too
    if (all) rows.p.dsoftmax_lse = rows.dlse.data();
    if (all) rows.p.sink = rows.sink.data();
    if (all) rows.p.sink_parts = rows.parts.data();
    if (all) rows.p.dsink = rows.dsink.data();
    rows.p.first_stores = rows.p.aligned;
    host::launch(rows.grid, [&] { cuda::aux::prepare_rows<Dtype::bf16>(rows.p); });
    const auto m = static_cast<std::size_t>(row.block_m);
    std::vector<float> shifts(rows.statistics.size() / 2, core::kInfinity);
    std::vector<double> deltas(shifts.size(), 0.0), dsink(2, 0.0);
    std::vector<bool> used(shifts.size() / m), stored(used.size());
    rows.for_each_query([&](int b, int head, int query) {
      const std::size_t block = Rows::at(rows.block_of(b, query) * rows.p.heads + head);
      const std::size_t at = block * m + Rows::at(query % row.block_m);
      const float lse = rows.lse[rows.lse_of(b, head, query)];
      used[block] = true;
      const int keys = all ? rows.key_offsets[Rows::at(b) + 1] - rows.key_offsets[Rows::at(b)] : 20;
      if (rows.p.first_stores && query + keys >= rows.seqlen(b)) stored[block] = true;
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
      const std::size_t block = i / (m * Rows::at(row.head_dim));
      ASSERT_TRUE(used[block] && !stored[block] ? x == 0.0F : std::isnan(x)) << what;
    }
    const auto stores = std::count(stored.begin(), stored.end(), true);
    ASSERT_EQ(stores > 0, rows.p.first_stores) << what;
    ASSERT_LT(stores, std::count(used.begin(), used.end(), true)) << what;
    EXPECT_EQ(rows.next_tile, 0) << what;
    for (std::size_t i = 0; i < rows.turns.size(); ++i) {
      ASSERT_EQ(rows.turns[i], used[i / 2] ? 0 : 7) << what;
    }
    if (!all) return;
    host::launch(2, [&] { cuda::aux::sum_sinks(rows.p); });
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
      for (int group = 0; group < rows.p.rows.sums / cuda::sm90::kPieceFloats; ++group) {
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

// Sums of keys that several pieces share reach their rows and columns, added up in all and scaled,
// and nothing else is written.
TEST(BackwardRows, SharedKeysBecomeTheirRowsAndColumns) {
  constexpr int kHeads = 2, kSplits = 3, kPiece = cuda::sm90::kPieceFloats;
  std::array<std::int32_t, 4> cu_seqlens = {0, 70, 70, 200};
  const auto value = [](int tensor, int batch, int head, int key, int column) {
    return static_cast<float>((tensor * 11 + batch * 5 + head * 3 + key * 7 + column * 13) % 31);
  };
  for (const int block_n : {64, 128}) {
    for (const bool packed : {false, true}) {
      for (const bool aligned : {true, false}) {
        cuda::sm90::FinishKeysParams p;
        const int longest = 130, blocks = core::ceil_div(longest, block_n), rows = block_n / 64;
        // Two chunks of columns in dK, one in dV.
        p.sums = {nullptr, kHeads, blocks, kSplits, rows * 3, rows};
        const std::int32_t* const cu = packed ? cu_seqlens.data() : nullptr;
        p.sequences = {cu, cu, longest, longest};
        p.block_n = block_n;
        p.head_dim = aligned ? 104 : 101;
        p.head_dim_v = aligned ? 56 : 61;
        p.softmax_scale = 0.5F;
        p.aligned = aligned;
        const std::string what = "blocks of " + std::to_string(block_n) + ", packed " +
                                 std::to_string(packed) + ", aligned " + std::to_string(aligned);
        const int keys = packed ? 200 : 3 * longest;
        std::vector<std::uint16_t> dk(Rows::at(std::int64_t{keys} * kHeads * p.head_dim), 0xFFFF);
        std::vector<std::uint16_t> dv(Rows::at(std::int64_t{keys} * kHeads * p.head_dim_v), 0xFFFF);
        std::vector<std::uint16_t> expected_dk = dk, expected_dv = dv;
        const auto strides = [&](int dim) {
          return core::Strides{packed ? 0 : std::int64_t{longest} * kHeads * dim,
                               std::int64_t{kHeads} * dim, dim};
        };
        p.dk_strides = strides(p.head_dim);
        p.dv_strides = strides(p.head_dim_v);
        p.dk = dk.data();
        p.dv = dv.data();
        std::vector<float> sums(
            Rows::at(std::int64_t{3} * kHeads * blocks * kSplits * p.sums.pieces * kPiece),
            std::numeric_limits<float>::quiet_NaN());
        p.sums.data = sums.data();
        for (int batch = 0; batch < 3; ++batch) {
          const core::Sequence sequence = p.sequences.at(batch);
          for (int head = 0; head < kHeads; ++head) {
            for (int block = 0; block * block_n < sequence.seqlen_k; ++block) {
              for (int split = 0; split < kSplits; ++split) {
                float* const part = p.sums.at(batch, head, block, split);
                for (int piece = 0; piece < p.sums.pieces; ++piece) {
                  const bool values = piece < rows;
                  const int of = values ? piece : piece - rows, chunks = values ? 1 : 2;
                  for (int thread = 0; thread < 128; ++thread) {
                    for (int i = 0; i < 32; ++i) {
                      const int key = block * block_n + of / chunks * 64 + thread / 32 * 16 +
                                      thread % 32 / 4 + i / 2 % 2 * 8;
                      const int column = of % chunks * 64 + i / 4 * 8 + thread % 4 * 2 + i % 2;
                      part[piece * kPiece + cuda::sm90::piece_place(thread, i / 4) + i % 4] =
                          static_cast<float>(split + 1) * value(values, batch, head, key, column);
                    }
                  }
                }
              }
            }
            for (int key = 0; key < sequence.seqlen_k; ++key) {
              for (int c = 0; c < p.head_dim; ++c) {
                expected_dk[Rows::at(sequence.key_offset(p.dk_strides, key, head) + c)] =
                    tools::to_bf16(3.0F * value(0, batch, head, key, c));
              }
              for (int c = 0; c < p.head_dim_v; ++c) {
                expected_dv[Rows::at(sequence.key_offset(p.dv_strides, key, head) + c)] =
                    tools::to_bf16(6.0F * value(1, batch, head, key, c));
              }
            }
          }
        }
        host::launch(static_cast<unsigned>(3 * kHeads * blocks * p.sums.pieces),
                     [&] { cuda::sm90::finish_keys<Dtype::bf16>(p); });
        EXPECT_EQ(dk, expected_dk) << what;
        EXPECT_EQ(dv, expected_dv) << what;
      }
    }
  }
}

// The same of sums by mma.sync: [columns / 8][4][rows / 16][32], a lane's accumulators of 16 rows
// and 8 columns one after another.
TEST(BackwardRows, SumsByMmaBecomeTheirRowsAndColumns) {
  constexpr auto kFlat =
      core::Kernel{.block_m = 32, .block_n = 64, .head_dim = 256, .head_dim_v = 256};
  const unsigned seed = std::random_device()();
  std::mt19937 random(seed);
  for (const core::Kernel& row : {kSmall, kFlat}) {
    for (const bool packed : {false, true}) {
      for (const bool aligned : {true, false}) {
        Rows rows(random, row, packed, aligned ? row.head_dim - 8 : row.head_dim - 27, aligned);
        std::size_t at = 0;
        std::vector<float> values(rows.accumulators.size());  // by block, row and column
        for (std::int64_t block = 0; block < rows.blocks * rows.p.heads; ++block) {
          for (int column = 0; column < row.head_dim; column += 8) {
            for (int i = 0; i < 4; ++i) {
              for (int first = 0; first < row.block_m; first += 16) {
                for (int lane = 0; lane < 32; ++lane) {
                  const int r = first + lane / 4 + i / 2 * 8, c = column + lane % 4 * 2 + i % 2;
                  const std::int64_t number = block * 5 + std::int64_t{r} * 7 + std::int64_t{c} * 3;
                  const auto x = static_cast<float>(number % 251);
                  values[Rows::at((block * row.block_m + r) * row.head_dim + c)] = x;
                  rows.accumulators[at++] = 2.0F * x;  // exact in bf16; the scale is a half
                }
              }
            }
          }
        }
        host::launch(rows.grid, [&] { cuda::mma::finish_rows<Dtype::bf16>(rows.p); });
        std::vector<std::uint16_t> expected(rows.dq.size(), 0xFFFF);
        rows.for_each_query([&](int b, int head, int query) {
          const std::int64_t block = rows.block_of(b, query) * rows.p.heads + head;
          for (int c = 0; c < rows.p.head_dim; ++c) {
            const std::int64_t r = block * row.block_m + query % row.block_m;
            expected[rows.element(b, head, query, c)] =
                tools::to_bf16(values[Rows::at(r * row.head_dim + c)]);
          }
        });
        ASSERT_EQ(rows.dq, expected) << row.block_m << " rows, packed " << packed << ", aligned "
                                     << aligned << ", seed " << seed;
      }
    }
  }
}

// Without rows one block runs, and tiles are handed out from the first one on. There is no other
// memory.
TEST(BackwardRows, WithoutRowsOnlyTheNextTileIsWritten) {
  for (const bool packed : {false, true}) {
    const std::int32_t offsets[] = {0, 0};
    std::int32_t next_tile = 7;
    cuda::aux::BackwardRowParams p;
    p.rows.blocks = {64, 0};
    p.sequences.cu_seqlens_q = p.sequences.cu_seqlens_k = packed ? offsets : nullptr;
    p.next_tile = &next_tile;
    host::launch(1, [&] { cuda::aux::prepare_rows<Dtype::f16>(p); });
    EXPECT_EQ(next_tile, 0);
  }
}

/// The gradient of a bias in memory with gaps, of which each element says what was written there.
struct BiasGradient {
  cuda::aux::BackwardBiasParams p;
  std::vector<std::uint16_t> halves;
  std::vector<float> floats, sums;

  static constexpr std::uint16_t kUntouched = 0xFFFF;

  BiasGradient(Dtype dtype, const std::array<std::int64_t, 4>& sizes, bool shared) {
    std::int64_t stride = 1;
    for (std::size_t axis : {1U, 3U, 0U, 2U}) {  // not in the order of the sizes
      p.sizes[axis] = sizes[axis];
      p.strides[axis] = sizes[axis] > 1 ? stride : 0;
      stride *= sizes[axis] + 1;
    }
    halves.assign(static_cast<std::size_t>(dtype == Dtype::f32 ? 0 : stride), kUntouched);
    floats.assign(static_cast<std::size_t>(dtype == Dtype::f32 ? stride : 0), kNan);
    p.dtype = dtype;
    p.dbias = dtype == Dtype::f32 ? static_cast<void*>(floats.data()) : halves.data();
    sums.assign(static_cast<std::size_t>(p.count()), kNan);
    p.sums = shared ? sums.data() : nullptr;
  }

  /// Elements from the first one to that of a sum.
  std::size_t place_of(std::int64_t index) const {
    std::int64_t place = 0;
    for (std::size_t axis = 4; axis-- > 0;) {
      place += index % p.sizes[axis] * p.strides[axis];
      index /= p.sizes[axis];
    }
    return static_cast<std::size_t>(place);
  }
  /// NaN: was not written.
  float at(std::size_t place) const {
    if (p.dtype == Dtype::f32) return floats[place];
    if (halves[place] == kUntouched) return kNan;
    return p.dtype == Dtype::bf16 ? tools::from_bf16(halves[place])
                                  : tools::from_f16(halves[place]);
  }
  /// Elements of dbias that were written.
  std::int64_t written() const {
    std::int64_t count = 0;
    for (std::size_t i = 0; i < std::max(floats.size(), halves.size()); ++i) {
      count += std::isnan(at(i)) ? 0 : 1;
    }
    return count;
  }
};

/// body(gradient, blocks, description) for every type, full and broadcast shapes, fewer threads
/// than elements and more.
template <class Body>
void for_all_gradients(bool shared, const Body& body) {
  constexpr std::array<std::int64_t, 4> kShapes[] = {{2, 3, 5, 37}, {1, 3, 5, 37}, {2, 1, 5, 37},
                                                     {2, 3, 1, 37}, {2, 3, 5, 1},  {1, 1, 1, 1}};
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16, Dtype::f16}) {
    for (const auto& sizes : kShapes) {
      for (const unsigned blocks : {1U, 3U, 12U}) {
        BiasGradient gradient(dtype, sizes, shared);
        std::string what = "dtype " + std::to_string(static_cast<int>(dtype)) + ", blocks " +
                           std::to_string(blocks) + ", sizes";
        for (const std::int64_t size : sizes) what += " " + std::to_string(size);
        body(gradient, blocks, what);
      }
    }
  }
}

// Where the main kernel stores, every element of the gradient begins as 0; where it adds, every
// sum, and the gradient is left alone.
TEST(BackwardRows, ABiasGradientBeginsAsZero) {
  for (const bool shared : {false, true}) {
    for_all_gradients(shared, [&](BiasGradient& g, unsigned blocks, const std::string& what) {
      host::launch(blocks, [&] { cuda::aux::begin_bias(g.p); });
      for (std::int64_t i = 0; i < g.p.count(); ++i) {
        const float x = shared ? g.sums[static_cast<std::size_t>(i)] : g.at(g.place_of(i));
        ASSERT_EQ(x, 0.0F) << what;
      }
      ASSERT_EQ(g.written(), shared ? 0 : g.p.count()) << what;
    });
  }
}

// A sum reaches its element, in the gradient's type, and nothing else is written.
TEST(BackwardRows, SumsBecomeTheBiasGradient) {
  for_all_gradients(true, [](BiasGradient& g, unsigned blocks, const std::string& what) {
    const auto value = [](std::int64_t i) { return static_cast<float>(i % 251 - 99) / 4.0F; };
    for (std::int64_t i = 0; i < g.p.count(); ++i) g.sums[static_cast<std::size_t>(i)] = value(i);
    host::launch(blocks, [&] { cuda::aux::finish_bias(g.p); });
    for (std::int64_t i = 0; i < g.p.count(); ++i) ASSERT_EQ(g.at(g.place_of(i)), value(i)) << what;
    ASSERT_EQ(g.written(), g.p.count()) << what;
  });
}

}  // namespace
}  // namespace tessera
