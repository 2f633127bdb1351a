// S2, S3: the band's closed forms against the definition, for every band and every tile up to a
// small size. Proves no wrong skip, no wrong "full", no needlessly masked tile, and exact key/query
// ranges.
#include "core/mask.h"

#include <gtest/gtest.h>

namespace tessera::core {
namespace {

constexpr int kMaxSize = 7;
constexpr int kMaxWindow = 4;

/// The definition, word by word from S2 and S3.
bool sees(int i, int j, int seqlen_q, int seqlen_k, int left, int right, Alignment alignment) {
  const int position = alignment == Alignment::bottom_right ? i + seqlen_k - seqlen_q : i;
  return (left < 0 || j >= position - left) && (right < 0 || j <= position + right);
}

/// Calls body(band, seqlen_q, seqlen_k, left, right, alignment) for every small band.
template <class Body>
void for_each_band(const Body& body) {
  for (int sq = 0; sq <= kMaxSize; ++sq) {
    for (int sk = 0; sk <= kMaxSize; ++sk) {
      for (int left = -1; left <= kMaxWindow; ++left) {
        for (int right = -1; right <= kMaxWindow; ++right) {
          for (const Alignment a : {Alignment::bottom_right, Alignment::top_left}) {
            body(make_band(sq, sk, left, right, a), sq, sk, left, right, a);
          }
        }
      }
    }
  }
}

TEST(Mask, VisibleIsTheDefinition_S2_S3) {
  for_each_band([](const Band& band, int sq, int sk, int left, int right, Alignment a) {
    for (int i = 0; i < sq; ++i) {
      for (int j = 0; j < sk; ++j) {
        ASSERT_EQ(band.visible(i, j), sees(i, j, sq, sk, left, right, a))
            << "sq " << sq << " sk " << sk << " window " << left << "," << right << " i " << i
            << " j " << j;
      }
    }
  });
}

/// What brute force says about a tile.
struct Truth {
  int visible = 0;
  int first_key = kMaxSize, last_key = -1;
  int first_query = kMaxSize, last_query = -1;
};

Truth look(const Band& band, Range queries, Range keys) {
  Truth truth;
  for (int i = queries.begin; i < queries.end; ++i) {
    for (int j = keys.begin; j < keys.end; ++j) {
      if (!band.visible(i, j)) continue;
      ++truth.visible;
      truth.first_key = min(truth.first_key, j);
      truth.last_key = max(truth.last_key, j);
      truth.first_query = min(truth.first_query, i);
      truth.last_query = max(truth.last_query, i);
    }
  }
  return truth;
}

TEST(Mask, CoverIsExactForEveryTile) {
  std::int64_t tiles = 0;
  for_each_band([&tiles](const Band& band, int sq, int sk, int, int, Alignment) {
    for (int q0 = 0; q0 < sq; ++q0) {
      for (int q1 = q0 + 1; q1 <= sq; ++q1) {
        for (int k0 = 0; k0 < sk; ++k0) {
          for (int k1 = k0 + 1; k1 <= sk; ++k1) {
            const Truth truth = look(band, {q0, q1}, {k0, k1});
            const Cover expected = truth.visible == 0                       ? Cover::none
                                   : truth.visible == (q1 - q0) * (k1 - k0) ? Cover::full
                                                                            : Cover::partial;
            ++tiles;
            ASSERT_EQ(band.cover({q0, q1}, {k0, k1}), expected)
                << "band left " << band.left << " right " << band.right << " offset " << band.offset
                << " queries " << q0 << ".." << q1 << " keys " << k0 << ".." << k1;
          }
        }
      }
    }
  });
  EXPECT_GT(tiles, 500'000);
}

TEST(Mask, KeyAndQueryRangesAreTight) {
  for_each_band([](const Band& band, int sq, int sk, int, int, Alignment) {
    for (int begin = 0; begin < sq; ++begin) {
      for (int end = begin + 1; end <= sq; ++end) {
        const Truth truth = look(band, {begin, end}, {0, sk});
        const Range expected =
            truth.visible == 0 ? Range{0, 0} : Range{truth.first_key, truth.last_key + 1};
        ASSERT_EQ(band.keys_of(Range{begin, end}), expected);
      }
    }
    for (int begin = 0; begin < sk; ++begin) {
      for (int end = begin + 1; end <= sk; ++end) {
        const Truth truth = look(band, {0, sq}, {begin, end});
        const Range expected =
            truth.visible == 0 ? Range{0, 0} : Range{truth.first_query, truth.last_query + 1};
        ASSERT_EQ(band.queries_of(Range{begin, end}), expected);
      }
    }
  });
}

TEST(Mask, EmptyRangesSeeNothing) {
  const Band band = make_band(5, 5, -1, -1, Alignment::bottom_right);
  EXPECT_TRUE(band.keys_of(Range{3, 3}).empty());
  EXPECT_TRUE(band.queries_of(Range{2, 2}).empty());
}

TEST(Mask, HugeLengthsAndWindowsDoNotOverflow) {
  constexpr int kLong = 1 << 29;
  constexpr std::int64_t kHuge = INT64_MAX;
  for (const Alignment a : {Alignment::bottom_right, Alignment::top_left}) {
    const Band open = make_band(kLong, kLong, kHuge, kHuge, a);
    EXPECT_EQ(open.keys_of(0), (Range{0, kLong}));
    EXPECT_EQ(open.keys_of(kLong - 1), (Range{0, kLong}));
    const Band causal = make_band(1, kLong, -1, 0, a);
    EXPECT_EQ(causal.keys_of(0).end, a == Alignment::bottom_right ? kLong : 1);
    const Band wide = make_band(kLong, 1, -1, 0, a);
    EXPECT_EQ(wide.keys_of(kLong - 1), (Range{0, 1}));
    EXPECT_EQ(wide.keys_of(0).empty(), a == Alignment::bottom_right);
  }
}

}  // namespace
}  // namespace tessera::core
