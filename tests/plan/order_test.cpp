// The order in which a GPU's tiles are taken, and whether beforehand.
#include <gtest/gtest.h>

#include <string>

#include "plan/plan.h"
#include "tessera/tessera.hpp"

namespace tessera {
namespace {

Problem problem_of(const std::string& text) {
  const Result<Problem> parsed = parse_problem(text);
  EXPECT_TRUE(parsed.ok()) << parsed.status().text;
  return *parsed;
}

/// Of its plan for an H200.
std::int64_t section(const std::string& problem) {
  const Result<Device> device = named_device("h200");
  EXPECT_TRUE(device.ok()) << device.status().text;
  const Result<Plan> planned = plan(problem_of(problem), *device);
  EXPECT_TRUE(planned.ok()) << planned.status().text;
  return planned ? planned->data().work.section : 0;
}

// Where row blocks see unequal numbers of keys: two thirds of 50 MiB of second-level cache, and
// whole pairs of rounds of 132 tiles.
TEST(Select, SectionsFitTheCacheAndEndWithARound) {
  EXPECT_EQ(section("fwd bf16 b=32 h=16 q=512 k=512 d=128"), 1);
  EXPECT_EQ(section("fwd bf16 b=32 h=16 q=512 k=512 d=128 causal"), 66);    // 4 row blocks
  EXPECT_EQ(section("fwd bf16 b=16 h=16 q=1024 k=1024 d=128 causal"), 33);  // 8
  EXPECT_EQ(section("fwd bf16 b=8 h=16 q=2048 k=2048 d=128 causal"), 33);   // 16
  EXPECT_EQ(section("fwd bf16 h=16 q=1024 k=1024 d=128 causal"), 16);       // no more there
  EXPECT_EQ(section("fwd bf16 h=16 q=16384 k=16384 d=64 causal"), 16);      // as many do not fit
}

// Few queries at the end of many keys see nearly all of them, as without a mask.
TEST(Select, TilesThatAreAlikeGoHeadAfterHead) {
  EXPECT_EQ(section("fwd bf16 b=4 h=16 q=512 k=16384 d=128 causal"), 1);
  EXPECT_EQ(section("bwd bf16 b=4 h=16 q=512 k=16384 d=128 causal"), 1);
  EXPECT_NE(section("fwd bf16 b=4 h=16 q=512 k=16384 d=128 causal align=tl"), 1);
  EXPECT_NE(section("fwd bf16 b=4 h=16 q=4096 k=16384 d=128 causal"), 1);
  EXPECT_NE(section("fwd bf16 b=4 h=16 q=512 k=16384 d=128 window=2000,0"), 1);
}

// Tiles that are handed out as multiprocessors get free, as the backward's are: as many heads as
// fit the cache, rows and sums of dQ, or as fill the multiprocessors, but few of them.
TEST(Select, SectionsOfTilesThatAreHandedOutAreFewHeads) {
  const auto backward = [&](const std::string& problem) { return section("bwd bf16 " + problem); };
  EXPECT_EQ(backward("b=4 h=16 q=4096 k=4096 d=128"), 1);
  // 4 MiB a head: eight fit. 33, 8, 2 key blocks and then one.
  EXPECT_EQ(backward("b=4 h=16 q=4160 k=4160 d=128 causal"), 8);
  EXPECT_EQ(backward("b=4 h=16 q=4096 k=1024 d=128 causal"), 16);
  EXPECT_EQ(backward("b=8 h=16 q=4096 k=256 d=128 causal"), 16);
  EXPECT_EQ(backward("b=12 h=16 q=4096 k=1 d=128 causal"), 16);
  EXPECT_EQ(backward("h=16 q=65536 k=65536 d=128 causal"), 1);      // one does not fit
  EXPECT_EQ(backward("b=2 h=16 q=16384 k=4096 d=128 causal"), 4);   // two fit
  EXPECT_EQ(backward("b=4 h=16/4 q=4096 k=4096 d=128 causal"), 4);  // of four heads' rows two fit
  EXPECT_EQ(backward("b=3 h=8 q=4096 k=4096 d=128 packed=5000,5000"), 8);
  // Where dQ is much, tiles of a head do not all begin with the same rows.
  EXPECT_EQ(backward("b=4 h=8 q=4096 k=4096 d=256"), 8);
  EXPECT_EQ(backward("b=4 h=8 q=4096 k=4096 d=256 deterministic"), 4);
  // A forward's that are masked, or of unknown length.
  EXPECT_EQ(section("fwd bf16 b=4 h=16 q=4096 k=4096 d=128 causal"), 24);
  EXPECT_EQ(section("fwd bf16 b=16 h=16 q=1024 k=1024 d=128 causal packed=9000,9000"), 24);
  EXPECT_EQ(section("fwd bf16 b=16 h=16 q=1024 k=1024 d=128 packed=9000,9000"), 16);
}

// In order: few heads whose late keys begin, and enough others to even out the end; where tiles are
// alike, as many as fill the multiprocessors, so that each follows one that began before.
TEST(Select, SectionsInOrder) {
  const Result<Device> device = named_device("h200");
  ASSERT_TRUE(device.ok()) << device.status().text;
  const auto order = [&](const std::string& problem) {
    const Result<Plan> planned = plan(problem_of("bwd bf16 " + problem), *device);
    EXPECT_TRUE(planned.ok()) << planned.status().text;
    return std::pair(planned->data().work.section, planned->data().work.early);
  };
  using Heads = std::pair<std::int64_t, int>;
  EXPECT_EQ(order("b=32 h=16 q=512 k=512 d=128 causal"), Heads(2, 33));
  EXPECT_EQ(order("b=16 h=32 q=1024 k=1024 d=64 causal"), Heads(4, 16));
  EXPECT_EQ(order("b=2 h=16 q=8192 k=8192 d=128 causal deterministic"), Heads(2, 4));
  EXPECT_EQ(order("b=3 h=1 q=8192 k=8192 d=128 causal deterministic").second, 3);  // no more there
  EXPECT_EQ(order("b=2 h=16 q=8192 k=8192 d=128 causal").second, 0);               // in any order
  // How many these are depends on the batch, which may not decide then in what order a sum is made.
  EXPECT_EQ(order("b=32 h=16 q=512 k=512 d=128 causal batch_invariant"), Heads(2, 0));
  EXPECT_EQ(order("b=16 h=16 q=1024 k=1024 d=128"), Heads(16, 0));
  EXPECT_EQ(order("b=1 h=16 q=16384 k=16384 d=128 deterministic"), Heads(2, 0));
  EXPECT_EQ(order("b=16 h=16 q=1024 k=1024 d=128 window=100,0 deterministic").second, 0);
  EXPECT_EQ(order("b=16 h=8 q=1024 k=1024 d=256 causal deterministic"), Heads(4, 0));
}

// Where only the device knows how long tiles take, they are handed out by a counter: of packed
// batches and caches, if there are more than multiprocessors.
TEST(Select, TilesOfUnknownLengthAreHandedOut) {
  const Result<Device> device = named_device("h200");
  ASSERT_TRUE(device.ok()) << device.status().text;
  const auto regions = [&](const std::string& problem) {
    const Result<Plan> planned = plan(problem_of(problem), *device);
    EXPECT_TRUE(planned.ok()) << planned.status().text;
    std::string text;
    for (const WorkspaceRegion& region : planned->data().regions) {
      if (region.bytes > 0) text += std::string(region.name) + " " + std::to_string(region.bytes);
    }
    return text;
  };
  EXPECT_EQ(regions("fwd bf16 b=9 h=16 q=1000 k=1000 d=128 packed=5000,5000"), "next_tile 4");
  EXPECT_EQ(regions("fwd bf16 b=9 h=16 q=1000 k=2000 d=128 cache=after causal"), "next_tile 4");
  EXPECT_EQ(regions("fwd bf16 b=9 h=16 q=1000 k=1000 d=128"), "");
  // Under a mask, where that is worth it: at large head dims, or where all heads took turns.
  EXPECT_EQ(regions("fwd bf16 b=8 h=8 q=1000 k=1000 d=256 causal"), "next_tile 4");
  EXPECT_EQ(regions("fwd bf16 b=8 h=8 q=1000 k=1000 d=256"), "");
  EXPECT_EQ(regions("fwd bf16 b=4 h=16 q=4096 k=4096 d=128 causal"), "next_tile 4");
  EXPECT_EQ(regions("fwd bf16 b=8 h=16 q=2048 k=2048 d=128 causal"), "");
  EXPECT_EQ(regions("fwd bf16 b=4 h=16 q=4096 k=4096 d=64 causal"), "");
  EXPECT_EQ(regions("fwd bf16 b=9 h=8 q=1000 k=2000 d=256 cache=after pages=900x64 causal"), "");
  EXPECT_EQ(regions("fwd bf16 b=2 h=16 q=300 k=300 d=128 packed=500,500"), "");  // 96 tiles
  EXPECT_EQ(regions("fwd bf16 b=9 h=16 q=1000 k=2000 d=128 cache=after pages=900x64 causal"), "");
  EXPECT_EQ(regions("fwd bf16 b=9 h=16 q=1000 k=1000 d=128 packed=5000,5000 unaligned"), "");
  EXPECT_EQ(regions("fwd bf16 b=9 h=16 q=1000 k=1000 d=300 packed=5000,5000"), "");
}

}  // namespace
}  // namespace tessera
