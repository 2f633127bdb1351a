// Where the pieces of dQ that threads of the Hopper backward add lie, and from where they are read.
#include "tile/pieces.h"

#include <gtest/gtest.h>

#include <map>
#include <set>
#include <utility>

#include "plan/catalog.h"
#include "plan/names.h"

namespace tessera::tile {
namespace {

// Every element of a row block's dQ is one accumulator of one thread, and is read from where it was
// added.
TEST(Pieces, WhatIsAddedIsWhatIsFinished) {
  int rows = 0;
  for (const core::Kernel& row : kCatalog) {
    if (row.arch != Arch::sm90 || row.pass != Pass::backward || row.stages > 0) continue;
    const int pieces = row.block_m * row.head_dim / cuda::sm90::kPieceFloats;
    int of_consumer[2] = {};
    for (int piece = 0; piece < pieces; ++piece) ++of_consumer[consumer_of(row, piece)];
    ASSERT_EQ(of_consumer[0], pieces / 2) << name_of(row);
    ASSERT_EQ(of_consumer[1], pieces - pieces / 2) << name_of(row);
    if (!core::splits_roles(row)) {
      ASSERT_EQ(pieces, 2) << name_of(row);
    }
    std::set<std::pair<int, int>> elements;
    std::map<int, std::pair<int, int>> places;
    for (int piece = 0; piece < pieces; ++piece) {
      for (int thread = 0; thread < 128; ++thread) {
        for (int i = 0; i < 32; ++i) {
          const PieceElement x = added(row, piece, thread, i);
          ASSERT_TRUE(0 <= x.row && x.row < row.block_m) << name_of(row);
          ASSERT_TRUE(0 <= x.column && x.column < row.head_dim) << name_of(row);
          ASSERT_TRUE(0 <= x.at && x.at < row.block_m * row.head_dim) << name_of(row);
          ASSERT_TRUE(elements.insert({x.row, x.column}).second) << name_of(row);
          ASSERT_TRUE(places.insert({x.at, {x.row, x.column}}).second) << name_of(row);
        }
      }
    }
    for (int piece = 0; piece < pieces; ++piece) {
      for (int thread = 0; thread < 128; ++thread) {
        for (int i = 0; i < 32; ++i) {
          const PieceElement x = finished(row, pieces, piece, thread, i);
          ASSERT_EQ(places.at(x.at), std::pair(x.row, x.column)) << name_of(row);
        }
      }
    }
    ++rows;
    if (core::splits_roles(row)) continue;
    std::set<int> beside;
    for (int quarter = 0; quarter < 2 * cuda::sm90::kQuarters; ++quarter) {
      for (int thread = 0; thread < 128; ++thread) {
        for (int i = 0; i < 8; ++i) {
          const PieceElement x = finished_beside(row, quarter, thread, i);
          ASSERT_EQ(places.at(x.at), std::pair(x.row, x.column)) << name_of(row);
          ASSERT_TRUE(beside.insert(x.at).second) << name_of(row);
        }
      }
    }
    ASSERT_EQ(beside.size(), places.size()) << name_of(row);
  }
  EXPECT_GT(rows, 0);
}

}  // namespace
}  // namespace tessera::tile
