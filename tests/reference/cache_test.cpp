// S13 and what S3 has besides windows, in the reference: small caches and masks written out by
// hand.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "reference/reference.h"
#include "tessera/tessera.hpp"

namespace tessera {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

Problem parse(const std::string& text) {
  const Result<Problem> problem = parse_problem(text);
  EXPECT_TRUE(problem.ok()) << problem.status().text;
  EXPECT_TRUE(validate(*problem).ok()) << validate(*problem).text;
  return *problem;
}

/// A cache of head_dim 1 and two heads. Slot s of row or page r holds 100 r + s of head 0, and its
/// negative of head 1; values are half of that.
struct Slots {
  std::vector<float> k, v;
  Tensors tensors;

  Slots(std::int64_t rows, std::int64_t size) {
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t s = 0; s < size; ++s) {
        for (const int sign : {1, -1}) {
          k.push_back(static_cast<float>(sign * (100 * r + s)));
          v.push_back(k.back() / 2);
        }
      }
    }
    static const std::array<float, 64> queries{};
    tensors.q = {queries.data(), 0, 0, 0};
    tensors.k = {k.data(), 2 * size, 2, 1};
    tensors.v = {v.data(), 2 * size, 2, 1};
  }
};

/// The keys of every sequence, of head 0; checks those of head 1 and the values against them.
std::vector<std::vector<double>> keys_of(const Problem& p, const Tensors& tensors) {
  const reference::Inputs inputs(p, tensors);
  std::vector<std::vector<double>> all;
  for (std::int64_t b = 0; b < p.batch; ++b) {
    const reference::Sequence& s = inputs.sequence(b);
    std::vector<double>& keys = all.emplace_back();
    for (std::int64_t j = 0; j < s.seqlen_k; ++j) {
      keys.push_back(*inputs.k(s.first_k + j, 0));
      EXPECT_EQ(*inputs.k(s.first_k + j, 1), -keys.back());
      EXPECT_EQ(*inputs.v(s.first_k + j, 0), keys.back() / 2);
      EXPECT_EQ(*inputs.v(s.first_k + j, 1), -keys.back() / 2);
    }
  }
  return all;
}

using Keys = std::vector<std::vector<double>>;

TEST(Cache, RowsAndLengthsS13) {
  Slots slots(3, 4);
  const std::array<std::int32_t, 3> lengths = {2, -5, 4}, index = {2, 77, 0}, pads = {1, 9, 0};
  CacheTensors& cache = slots.tensors.cache;
  EXPECT_EQ(keys_of(parse("fwd b=3 h=2 q=1 k=4 d=1 cache=full"), slots.tensors),
            (Keys{{0, 1, 2, 3}, {100, 101, 102, 103}, {200, 201, 202, 203}}));
  cache.seqlens = lengths.data();
  EXPECT_EQ(keys_of(parse("fwd b=3 h=2 q=1 k=4 d=1 cache=after"), slots.tensors),
            (Keys{{0, 1}, {}, {200, 201, 202, 203}}));
  cache.index = index.data();
  EXPECT_EQ(keys_of(parse("fwd b=3 h=2 q=1 k=4 d=1 cache=after rows=3"), slots.tensors),
            (Keys{{200, 201}, {}, {0, 1, 2, 3}}));
  cache.leftpad = pads.data();
  EXPECT_EQ(keys_of(parse("fwd b=3 h=2 q=1 k=4 d=1 cache=after rows=3 leftpad"), slots.tensors),
            (Keys{{201}, {}, {0, 1, 2, 3}}));
  // A sequence that begins behind its length has no keys.
  const std::array<std::int32_t, 3> far = {2, 0, 6};
  cache.leftpad = far.data();
  EXPECT_EQ(keys_of(parse("fwd b=3 h=2 q=1 k=4 d=1 cache=after rows=3 leftpad"), slots.tensors),
            (Keys{{}, {}, {}}));
}

TEST(Cache, NewKeysS13) {
  Slots slots(3, 4);
  const std::array<std::int32_t, 3> lengths = {0, -1, 2};
  slots.tensors.cache.seqlens = lengths.data();
  EXPECT_EQ(keys_of(parse("fwd b=3 h=2 q=1 k=4 d=1 cache=before:2"), slots.tensors),
            (Keys{{0, 1}, {}, {200, 201, 202, 203}}));
  // Packed: 3, 2 and 1 new keys of 1, 0 and 2 queries.
  const std::array<std::int32_t, 4> queries = {0, 1, 1, 3}, keys = {0, 3, 5, 6};
  slots.tensors.cu_seqlens_q = queries.data();
  slots.tensors.cache.cu_seqlens_new = keys.data();
  const Problem p = parse("fwd b=3 h=2 q=2 k=4 d=1 packed=3 cache=before:3");
  EXPECT_EQ(keys_of(p, slots.tensors), (Keys{{0, 1, 2}, {}, {200, 201, 202}}));
  const reference::Inputs inputs(p, slots.tensors);
  EXPECT_EQ(inputs.sequence(2).first_q, 1);
  EXPECT_EQ(inputs.sequence(2).seqlen_q, 2);
}

/// Pages out of order, one of them in two sequences; numbers of both types; what lies beyond the
/// length is no page. Heads outside the slots, and K and V side by side in one block.
TEST(Cache, PagesS13) {
  Slots slots(5, 2);
  const std::array<std::int32_t, 2> lengths = {5, 3}, pads = {3, 0};
  const std::array<std::int32_t, 8> pages = {4, 0, 2, 1 << 30, 1, 4, -1, -7};
  const std::vector<std::int64_t> wide(pages.begin(), pages.end());
  CacheTensors& cache = slots.tensors.cache;
  cache.seqlens = lengths.data();
  cache.page_table = pages.data();
  cache.stride_page_table = 4;
  const Keys all = {{400, 401, 0, 1, 200}, {100, 101, 400}};
  EXPECT_EQ(keys_of(parse("fwd b=2 h=2 q=1 k=6 d=1 cache=after pages=5x2"), slots.tensors), all);
  cache.page_table = wide.data();
  EXPECT_EQ(keys_of(parse("fwd b=2 h=2 q=1 k=6 d=1 cache=after pages=5x2:i64"), slots.tensors),
            all);
  cache.leftpad = pads.data();
  EXPECT_EQ(
      keys_of(parse("fwd b=2 h=2 q=1 k=6 d=1 cache=after pages=5x2:i64 leftpad"), slots.tensors),
      (Keys{{1, 200}, {100, 101, 400}}));

  // [page][K or V][head][slot]
  std::vector<float> block;
  for (std::size_t page = 0; page < 5; ++page) {
    for (const std::vector<float>* x : {&slots.k, &slots.v}) {
      for (const std::size_t at : {0U, 2U, 1U, 3U}) block.push_back((*x)[page * 4 + at]);
    }
  }
  slots.tensors.k = {block.data(), 8, 1, 2};
  slots.tensors.v = {block.data() + 4, 8, 1, 2};
  cache.leftpad = nullptr;
  EXPECT_EQ(keys_of(parse("fwd b=2 h=2 q=1 k=6 d=1 cache=after pages=5x2:i64"), slots.tensors),
            all);
}

/// What the sequences do not have is not read: NaN there changes nothing. Positions count keys:
/// the last query sees the last key, whatever the padding.
TEST(Cache, ResultsS13) {
  std::vector<float> k(8, kNan), v(8, kNan);
  k[3] = k[4] = 0.0F;
  v[3] = 5.0F;
  v[4] = 7.0F;
  const std::array<float, 2> q = {1.0F, 1.0F};
  const std::array<std::int32_t, 1> length = {5}, pad = {3};
  Tensors t;
  t.q = {q.data(), 2, 1, 1};
  t.k = {k.data(), 8, 1, 1};
  t.v = {v.data(), 8, 1, 1};
  t.cache.seqlens = length.data();
  t.cache.leftpad = pad.data();
  const reference::Outputs out =
      reference::attend({parse("fwd q=2 k=8 d=1 cache=after leftpad causal"), t});
  EXPECT_EQ(out.o, (std::vector<double>{5.0, 6.0}));
  EXPECT_EQ(out.lse, (std::vector<double>{0.0, std::log(2.0)}));
}

/// Which keys a query sees, listed by hand.
TEST(Mask, ChunkSinkTokensAndTreeS3) {
  const struct {
    const char* text;
    std::vector<std::string> rows;     // x: visible
    std::vector<std::uint64_t> words;  // of a tree
  } pictures[] = {
      {"q=6 k=6 chunk=2", {"xx....", "xx....", "..xx..", "..xx..", "....xx", "....xx"}, {}},
      {"q=4 k=6 chunk=4 causal", {"xxx...", "xxxx..", "....x.", "....xx"}, {}},
      {"q=4 k=6 chunk=4 window=1,0", {".xx...", "..xx..", "....x.", "....xx"}, {}},
      {"q=4 k=3 chunk=2", {"...", "xx.", "xx.", "..x"}, {}},  // position -1 is in another chunk
      {"q=4 k=3 chunk=2 align=tl", {"xx.", "xx.", "..x", "..x"}, {}},
      {"q=2 k=6 window=1,0 sink_tokens=2", {"xx.xx.", "xx..xx"}, {}},
      {"q=3 k=3 window=0,0 sink_tokens=2", {"x..", "xx.", "xxx"}, {}},  // right ends stay
      {"q=4 k=2 window=0,0 sink_tokens=9", {"..", "..", "x.", "xx"}, {}},
      {"q=4 k=4 chunk=2 causal sink_tokens=1", {"x...", "xx..", "x.x.", "x.xx"}, {}},
      {"q=3 k=5 causal tree", {"xxx..", "xxx..", "xxx.x"}, {1, 1, 5}},
      {"q=3 k=5 tree", {"xx..x", "xx.x.", "xx..."}, {4, 2, ~std::uint64_t{7}}},
      {"q=3 k=1 tree", {"x", ".", "x"}, {4, 3, 7}},  // bits 0 and 1 are before the first key
      {"q=2 k=4 window=1,0 sink_tokens=1 tree", {"xx..", "x..x"}, {2, 2}},
  };
  for (const auto& picture : pictures) {
    const Problem p = parse(std::string("fwd f32 d=1 ") + picture.text);
    static const std::array<float, 8> numbers{};
    Tensors t;
    t.q = t.k = t.v = {numbers.data(), 0, 0, 0};
    t.tree_mask = picture.words.data();
    const reference::Inputs inputs(p, t);
    for (std::size_t i = 0; i < picture.rows.size(); ++i) {
      std::string row;
      for (std::size_t j = 0; j < picture.rows[i].size(); ++j) {
        const auto query = static_cast<std::int64_t>(i), key = static_cast<std::int64_t>(j);
        row += inputs.visible(inputs.sequence(0), query, key) ? 'x' : '.';
      }
      EXPECT_EQ(row, picture.rows[i]) << picture.text << ", query " << i;
    }
  }
}

}  // namespace
}  // namespace tessera
