// The planner's choice: rows refuse with a reason or cost something; it fits the device; splits
// depend on the shape of a sequence alone.
#include "plan/select.h"

#include <gtest/gtest.h>

#include <random>
#include <set>
#include <string>
#include <vector>

#include "plan/catalog.h"
#include "plan/names.h"
#include "plan/planned.h"

namespace tessera {
namespace {

std::string chosen(const char* problem, Arch arch) {
  const Result<Plan> planned = plan(problem_of(problem), device_of(arch));
  EXPECT_TRUE(planned.ok()) << planned.status().text;
  return planned.ok() ? std::string(planned->kernel()) : "";
}

TEST(Catalog, NamesAreUniqueAndTilesFit) {
  std::set<std::string> names;
  for (const core::Kernel& row : kCatalog) {
    EXPECT_TRUE(names.insert(name_of(row)).second) << name_of(row);
    EXPECT_GT(row.block_m, 0);
    EXPECT_GT(row.block_n, 0);
    EXPECT_GT(row.tile_m, 0);
    const bool of_keys = row.pass == Pass::backward && row.stages > 0;
    EXPECT_EQ((of_keys ? row.block_n : row.block_m) % row.tile_m, 0) << name_of(row);
    EXPECT_EQ(row.split_n % row.block_n, 0) << name_of(row);
  }
}

TEST(Select, TheRichestInstructionSetTheDeviceHas) {
  const char* prefill = "fwd f32 h=8 q=1024 k=1024 d=64";
  EXPECT_EQ(chosen(prefill, Arch::portable), "cpu.portable.forward.tile.f32");
  EXPECT_EQ(chosen(prefill, Arch::avx2), "cpu.avx2.forward.tile.f32");
  EXPECT_EQ(chosen(prefill, Arch::avx512_bf16), "cpu.avx512.forward.tile.f32");
  EXPECT_EQ(chosen("fwd bf16 h=8 q=1024 k=1024 d=64", Arch::avx512_bf16),
            "cpu.avx512_bf16.forward.tile.bf16");
  EXPECT_EQ(chosen("fwd f16 h=8 q=1024 k=1024 d=64", Arch::avx512_bf16),
            "cpu.avx512.forward.tile.f32");
  EXPECT_EQ(chosen("bwd bf16 h=8 q=1024 k=1024 d=64", Arch::avx512_bf16),
            "cpu.avx512_bf16.backward.tile.bf16");
}

/// Decoding reads rows of values. Before it said so it took tiles for rows.
TEST(Select, ValuesInTilesAreNotDecoded) {
  const char* const few = "fwd bf16 h=2 q=1 k=100 d=64 scales=none/head/head kv=e4m3 v_tiles";
  EXPECT_EQ(chosen(few, Arch::avx512_bf16), "cpu.avx512.forward.tile.f32");
  EXPECT_EQ(chosen(few, Arch::portable), "cpu.portable.forward.tile.f32");
  const Result<Plan> planned = plan(problem_of(few), device_of(Arch::sm90));
  EXPECT_EQ(planned.status().code, Code::unsupported);
  EXPECT_NE(planned.status().text.find("takes rows of v; they lie in tiles"), std::string::npos);
}

/// Bytes are bf16 as exactly as fp32; queries of fp16 are not (S14).
TEST(Select, BytesOfACacheMeetBf16) {
  const std::string tail = " h=32/8 q=1 k=8192 d=128 scales=none/head/token kv=";
  for (const char* const cached : {"e4m3", "i8"}) {
    EXPECT_EQ(chosen(("fwd bf16" + tail + cached).c_str(), Arch::avx512_bf16),
              "cpu.avx512_bf16.forward.decode.bf16");
    for (const char* const q : {"fwd f16", "fwd f32"}) {
      EXPECT_EQ(chosen((q + tail + cached).c_str(), Arch::avx512_bf16),
                "cpu.avx512.forward.decode.f32");
    }
  }
}

// The same type by its own name is none of its own.
TEST(Select, AnOutputTypeOfItsOwnIsForCpuForwards) {
  for (const core::Kernel& row : kCatalog) {
    const Dtype in = row.operand == core::Operand::f16 ? Dtype::f16 : Dtype::bf16;
    Problem p = problem_of("q=4 k=8 d=64");
    p.pass = row.pass;
    p.dtype = in;
    p.dtype_o = in;
    const std::string without = refusal(row, p, device_of(row.arch));
    p.dtype_o = Dtype::f32;
    const std::string with = refusal(row, p, device_of(row.arch));
    if (!is_gpu(row.arch) && row.pass == Pass::forward) {
      EXPECT_EQ(with, without) << name_of(row);
    } else if (without.empty()) {
      EXPECT_EQ(with, std::string(row.pass == Pass::forward ? "writes" : "reads") +
                          " o in the inputs' type, " + to_string(in) + "; the problem's o is f32")
          << name_of(row);
    }
  }
  const Result<Plan> planned =
      plan(problem_of("bwd bf16 q=4 k=8 d=64 o=f32"), device_of(Arch::avx2));
  EXPECT_EQ(planned.status().code, Code::unsupported);
  EXPECT_EQ(chosen("fwd bf16 h=8 q=1024 k=1024 d=64 o=f32", Arch::avx512_bf16),
            "cpu.avx512_bf16.forward.tile.bf16");
}

/// What a GPU multiplies as 8 bits, and why not what it does not.
TEST(Select, EightBitsOnAGpu_S14) {
  const std::string head = "fwd e4m3 h=16 q=4096 k=4096 d=128 scales=";
  const auto row_of = [&](const std::string& rest) {
    return chosen((head + rest).c_str(), Arch::sm90);
  };
  for (const char* rest : {"tensor/tensor/tensor v_tiles", "token/block:32/block:512 v_tiles",
                           "head/head/channel v_tiles score_shift v_shift causal o=f16 sink"}) {
    EXPECT_TRUE(row_of(rest).starts_with("sm90.forward.e4m3.d128.")) << rest << row_of(rest);
  }
  EXPECT_TRUE(row_of("tensor/tensor/tensor v_tiles softcap=30").ends_with(".softcap"));
  // Values in rows are laid out first, for the same kernel.
  for (const char* rest :
       {"tensor/tensor/tensor", "head/head/channel causal", "head/head/head softcap=2"}) {
    EXPECT_EQ(row_of(rest), row_of(std::string(rest) + " v_tiles")) << rest;
  }
  // Tiles of their own may have more columns than v.
  EXPECT_TRUE(chosen("fwd e4m3 h=16 q=4096 k=4096 d=128/64 scales=head/head/head", Arch::sm90)
                  .starts_with("sm90.forward.e4m3.d128."));
  const struct {
    const char* problem;
    const char* says;
  } refused[] = {
      {"fwd e4m3 q=9 k=9 d=64 scales=head/head/head unaligned", "the problem is unaligned"},
      {"fwd e4m3 q=9 k=9 d=64/72 scales=head/head/head", "takes multiples of 16"},
      {"fwd e4m3 q=9 k=9 d=64 scales=head/head/head cache=full", "takes no cache"},
      {"fwd i8 q=9 k=9 d=64 scales=head/head/none v=bf16",
       "takes q and k of e4m3 and v of e4m3; they are i8 and bf16"},
      {"fwd e4m3 q=9 k=9 d=64 scales=head/block:48/head v_tiles", "block_k = 48"},
      {"fwd e4m3 q=9 k=9 d=64 scales=head/head/block:100 v_tiles", "block_v = 100"},
      {"fwd e4m3 q=9 k=9 d=128/64 scales=head/head/head v_tiles", "head_dim_v = 64 has 64"},
      {"fwd e4m3 q=9 k=9 d=40 scales=head/head/head v_tiles", "multiples of 16"},
      {"fwd e4m3 q=9 k=9 d=64 scales=head/head/head v_tiles o=f32", "writes o of 16 bits"},
      {"fwd e4m3 q=9 k=9 d=64 scales=head/head/head v_tiles alibi=h", "takes no softcap, ALiBi"},
  };
  for (const auto& one : refused) {
    const Problem p = problem_of(one.problem);
    int said = 0;
    for (const core::Kernel& row : kCatalog) {
      if (row.operand != core::Operand::e4m3) continue;
      const std::string why = refusal(row, p, device_of(Arch::sm90));
      EXPECT_FALSE(why.empty()) << one.problem << name_of(row);
      said += why.find(one.says) != std::string::npos ? 1 : 0;
    }
    EXPECT_GT(said, 0) << one.problem;
  }
  EXPECT_EQ(
      chosen("fwd e4m3 h=2 q=300 k=300 d=64 scales=head/head/head v_tiles", Arch::avx512_bf16),
      "cpu.avx512.forward.tile.f32");
}

/// Rows of values become tiles in the workspace, which costs what is moved.
TEST(Select, TilesOfValuesAreInTheWorkspace_S14) {
  const auto planned = [](const std::string& text) {
    const Result<Plan> one =
        plan(problem_of("fwd e4m3 scales=head/head/head " + text), device_of(Arch::sm90, 132));
    EXPECT_TRUE(one.ok()) << one.status().text;
    return one->data();
  };
  constexpr std::uint64_t kTile = std::uint64_t{128} * 136;
  const struct {
    const char* text;
    std::uint64_t bytes;
  } cases[] = {
      {"b=2 h=8/4 q=300 k=300 d=128", kTile * 2 * 4 * 3},
      {"b=2 h=8/4 q=300 k=300 d=128 packed=500,401", kTile * 4 * (401 / 128 + 2)},
      {"h=2 q=300 k=128 d=128/48", 2 * kTile},
      {"h=2 q=300 k=0 d=128", 0},
  };
  for (const auto& [text, bytes] : cases) {
    const PlanData rows = planned(text);
    EXPECT_EQ(rows.workspace_bytes, bytes) << text;
    ASSERT_EQ(rows.regions.size(), bytes == 0 ? 0U : 1U) << text;
    if (bytes > 0) {
      EXPECT_EQ(std::string(rows.regions[0].name), "value_tiles");
    }
  }
  const PlanData rows = planned("h=8/4 q=2048 k=2048 d=128");
  const PlanData tiles = planned("h=8/4 q=2048 k=2048 d=128 v_tiles");
  EXPECT_EQ(tiles.workspace_bytes, 0U);
  EXPECT_EQ(rows.kernel, tiles.kernel);
  // 128 columns read and 136 written of each key, 16 bytes a cycle, for a group of two heads.
  EXPECT_EQ(cost(rows) - cost(tiles), 2048 * (128 + 136) / 16 / 2);
  const std::string text =
      explain(problem_of("fwd e4m3 scales=head/head/head b=2 h=8/4 q=300 k=300 d=128"),
              device_of(Arch::sm90, 132));
  EXPECT_NE(text.find("values     in rows: laid out first as tiles of 128 columns, up to 417,792 "
                      "bytes in the workspace\n"),
            std::string::npos)
      << text;
  EXPECT_NE(text.find("value_tiles          417,792 bytes\n"), std::string::npos) << text;
}

TEST(Select, DecodeForFewRowsTileForMany) {
  for (const char* dtype : {"f32", "bf16", "f16"}) {
    const std::string head = std::string("fwd ") + dtype + " h=32/8 k=8192 d=128 ";
    EXPECT_NE(chosen((head + "q=1").c_str(), Arch::avx512_bf16).find("decode"), std::string::npos);
    EXPECT_NE(chosen((head + "q=256").c_str(), Arch::avx512_bf16).find("tile"), std::string::npos);
  }
}

/// A CPU's forward items: long ones where queries and outputs stay near, shorter ones where workers
/// would go without, and the same for any number of workers where bits depend on it (S9).
TEST(Select, RowsOfAnItem) {
  const auto block_m = [](const char* problem, int threads) {
    const Result<Plan> planned = plan(problem_of(problem), device_of(Arch::avx512, threads));
    EXPECT_TRUE(planned.ok()) << planned.status().text;
    return planned.ok() ? planned->data().work.block_m : 0;
  };
  EXPECT_EQ(block_m("fwd f32 h=8 q=4096 k=4096 d=64", 1), 512);
  EXPECT_EQ(block_m("fwd f32 h=8 q=4096 k=4096 d=256", 1), 256);
  EXPECT_EQ(block_m("fwd f32 h=8 q=1024 k=1024 d=128", 2), 512);
  EXPECT_EQ(block_m("fwd f32 h=8 q=1024 k=1024 d=128", 16), 256);
  EXPECT_EQ(block_m("fwd f32 h=8 q=1024 k=1024 d=128 causal", 16), 128);
  EXPECT_EQ(block_m("fwd f32 h=1 q=1024 k=1024 d=128", 64), 64);
  for (const int threads : {1, 16, 64}) {
    EXPECT_EQ(block_m("fwd f32 h=1 q=1024 k=1024 d=64 window=100,100", threads), 256);
    EXPECT_EQ(block_m("fwd f32 h=1 q=300 k=9000 d=64", threads), 512) << "split";
  }
}

/// Which row an H100 or H200 takes: none has to be at hand.
TEST(Select, GoldenPlansOfHopper) {
  for (const char* gpu : {"h100", "h200"}) {
    const Result<Device> device = named_device(gpu);
    ASSERT_TRUE(device.ok()) << device.status().text;
    const auto row = [&](const std::string& problem) -> std::string {
      const Result<Plan> planned = plan(problem_of(problem), *device);
      return planned ? std::string(planned->kernel()) : planned.status().text;
    };
    EXPECT_EQ(row("fwd bf16 h=32 q=16384 k=16384 d=64"), "sm90.forward.bf16.d64.192x128");
    EXPECT_EQ(row("fwd bf16 b=32 h=32 q=512 k=512 d=64"), "sm90.forward.bf16.d64.192x128");
    EXPECT_EQ(row("fwd bf16 b=32 h=32 q=512 k=512 d=64 causal"), "sm90.forward.bf16.d64.128x128");
    EXPECT_EQ(row("fwd bf16 b=16 h=32 q=1024 k=1024 d=64 causal"), "sm90.forward.bf16.d64.128x128");
    EXPECT_EQ(row("fwd bf16 b=8 h=32 q=2048 k=2048 d=64 causal"), "sm90.forward.bf16.d64.192x128");
    EXPECT_EQ(row("fwd f16 h=16 q=4096 k=4096 d=128 causal"), "sm90.forward.f16.d128.128x128");
    EXPECT_EQ(row("fwd f16 h=16 q=8192 k=8192 d=128 causal"), "sm90.forward.f16.d128.192x80");
    EXPECT_EQ(row("fwd bf16 b=8 h=16 q=2048 k=2048 d=128"), "sm90.forward.bf16.d128.128x128");
    EXPECT_EQ(row("fwd bf16 b=4 h=16 q=4096 k=4096 d=128"), "sm90.forward.bf16.d128.192x80");
    EXPECT_EQ(row("fwd bf16 h=16 q=16384 k=16384 d=128 window=1023,0"),
              "sm90.forward.bf16.d128.128x128");
    EXPECT_EQ(row("fwd bf16 h=16 q=8192 k=8192 d=96"), "sm90.forward.bf16.d96.192x80");
    EXPECT_EQ(row("fwd bf16 b=8 h=32/8 q=48 k=8192 d=128 causal"),
              "sm90.forward.bf16.d128.128x128");
    EXPECT_EQ(row("fwd bf16 b=4 h=32/8 q=200 k=8192 d=128 causal"),
              "sm90.forward.bf16.d128.128x128");
    EXPECT_EQ(row("fwd bf16 b=4 h=32/8 q=4096 k=4096 d=128 causal"),
              "sm90.forward.bf16.d128.192x80");
    EXPECT_EQ(row("fwd bf16 h=16 q=4096 k=4096 d=192/128"), "sm90.forward.bf16.d192v128.128x128");
    EXPECT_EQ(row("fwd bf16 h=16 q=4096 k=4096 d=192"), "sm90.forward.bf16.d192.128x96");
    EXPECT_EQ(row("fwd bf16 h=16 q=4096 k=4096 d=72"), "sm90.forward.bf16.d96.192x80");
    EXPECT_EQ(row("fwd bf16 b=4 h=8 q=4096 k=4096 d=256"), "sm90.forward.bf16.d256.128x64");
    EXPECT_EQ(row("fwd bf16 b=4 h=8 q=4096 k=4096 d=256 causal"), "sm90.forward.bf16.d256.128x64");
    EXPECT_EQ(row("fwd bf16 b=2 h=8 q=8192 k=8192 d=256"), "sm90.forward.bf16.d256.128x64.q1");
    EXPECT_EQ(row("fwd f16 b=2 h=8 q=8192 k=8192 d=256 causal"), "sm90.forward.f16.d256.128x64.q1");
    EXPECT_EQ(row("fwd bf16 h=8 q=512 k=512 d=256 causal"), "sm90.forward.bf16.d256.128x64");
    EXPECT_EQ(row("fwd bf16 h=8 q=64 k=64 d=512"), "sm90.forward.bf16.d512.128x64.q1.pair");
    EXPECT_EQ(row("fwd f16 h=8 q=4096 k=4096 d=264/320 causal"),
              "sm90.forward.f16.d384.128x80.q1.pair");
    EXPECT_EQ(row("fwd bf16 h=8/2 q=4096 k=8192 d=512 softcap=30 cache=after causal"),
              "sm90.forward.bf16.d512.128x64.q1.pair.softcap");
    EXPECT_EQ(row("fwd bf16 h=8 q=4096 k=4096 d=384 alibi=h"),
              "sm90.forward.bf16.d512.128x32.pair.extra");
    EXPECT_EQ(row("fwd bf16 h=8 q=4096 k=4096 d=511"), "sm90.forward.bf16.d512.64x32.w4x2.any");
    EXPECT_EQ(row("fwd bf16 b=8 h=8/2 q=8 k=8192 d=512 cache=after causal"),
              "sm90.forward.decode.bf16.d512.16x32");
    EXPECT_NE(row("fwd f32 h=8 q=64 k=64 d=64").find("the problem is f32"), std::string::npos);
    EXPECT_EQ(row("fwd bf16 h=8 q=64 k=64 d=20"), "sm90.forward.bf16.d64.128x64.any");
    EXPECT_EQ(row("fwd f16 h=8 q=64 k=64 d=128 unaligned"), "sm90.forward.f16.d128.128x64.any");
    EXPECT_EQ(row("fwd bf16 h=8 q=8192 k=8192 d=128 causal softcap=30"),
              "sm90.forward.bf16.d128.128x128.softcap");
    EXPECT_EQ(row("fwd bf16 b=16 h=32 q=1024 k=1024 d=64 causal softcap=30"),
              "sm90.forward.bf16.d64.128x128.softcap");
    EXPECT_EQ(row("fwd bf16 b=8 h=32 q=2048 k=2048 d=64 causal softcap=30"),
              "sm90.forward.bf16.d64.192x96.softcap");
    EXPECT_EQ(row("fwd bf16 h=8 q=8192 k=8192 d=128 causal softcap=30 alibi=h"),
              "sm90.forward.bf16.d128.128x64.extra");
    EXPECT_NE(row("fwd bf16 h=8 q=64 k=64 d=520").find("up to 512"), std::string::npos);
    EXPECT_EQ(row("bwd bf16 h=16 q=4096 k=4096 d=64"), "sm90.backward.bf16.d64.128x128");
    for (const char* rows : {"q=4096 k=4096", "q=64 k=64", "q=4096 k=64", "q=64 k=4096 causal",
                             "q=4096 k=4096 window=16,0"}) {
      const std::string problem = std::string("bwd f16 h=16 ") + rows;
      EXPECT_EQ(row(problem + " d=128"), "sm90.backward.f16.d128.64x128") << rows;
      EXPECT_EQ(row(problem + " d=192/128"), "sm90.backward.f16.d192v128.64x64") << rows;
      EXPECT_EQ(row(problem + " d=160"), "sm90.backward.f16.d192.64x64") << rows;
      EXPECT_EQ(row(problem + " d=200/256 deterministic"), "sm90.backward.f16.d256.64x64") << rows;
    }
    // Where there are tiles for all pairs of blocks, and windows do not make them larger.
    EXPECT_EQ(row("bwd f16 h=16 q=4096 k=4096 d=200/256"), "sm90.backward.f16.d256.64x128.pair");
    EXPECT_EQ(row("bwd f16 h=16 q=64 k=64 d=256"), "sm90.backward.f16.d256.64x64");
    EXPECT_EQ(row("bwd f16 h=16 q=4096 k=64 d=256"), "sm90.backward.f16.d256.64x64");
    EXPECT_EQ(row("bwd f16 h=16 q=4096 k=4096 d=256 window=16,0"), "sm90.backward.f16.d256.64x64");
    EXPECT_EQ(row("bwd f16 h=16 q=4096 k=4096 d=256 batch_invariant"),
              "sm90.backward.f16.d256.64x64");
    for (const char* extra : {"softcap=30", "alibi=h", "bias=bhqk", "dropout=0.1"}) {
      const std::string problem = std::string("bwd bf16 h=8 q=512 k=512 ") + extra;
      EXPECT_EQ(row(problem + " d=192/128"), "sm90.backward.bf16.d256.64x64.extra") << extra;
      EXPECT_EQ(row(problem + " d=256 unaligned"), "sm90.backward.bf16.d256.64x64.any") << extra;
    }
    EXPECT_EQ(row("bwd f16 h=8 q=64 k=64 d=150"), "sm90.backward.f16.d256.64x64.any");
    EXPECT_EQ(row("bwd f16 h=8 q=64 k=64 d=256 unaligned"), "sm90.backward.f16.d256.64x64.any");
    EXPECT_EQ(row("bwd f16 h=8 q=4096 k=4096 d=512"), "sm90.backward.f16.d512.64x64.pair");
    EXPECT_EQ(row("bwd bf16 h=8 q=64 k=64 d=264/320"), "sm90.backward.bf16.d384.64x64.pair");
    EXPECT_EQ(row("bwd bf16 h=8 q=64 k=64 d=264 dropout=0.1"),
              "sm90.backward.bf16.d512.64x64.pair.extra");
    EXPECT_EQ(row("bwd bf16 h=8 q=64 k=64 d=257"), "sm90.backward.bf16.d512.32x32.w1x4.do2.any");
    EXPECT_NE(row("bwd bf16 h=8 q=64 k=64 d=520").find("up to 512"), std::string::npos);
    EXPECT_NE(row("fwd bf16 b=2000000 h=1000 q=1 k=1 d=64").find("2^30 tiles"), std::string::npos);
  }
}

/// The same of the backward: row, blocks of keys and the order in which they are taken, and the
/// workspace that follows from the row's tile.
TEST(Select, GoldenBackwardPlansOfHopper) {
  for (const char* gpu : {"h100", "h200"}) {
    const Result<Device> device = named_device(gpu);
    ASSERT_TRUE(device.ok()) << device.status().text;
    const auto planned = [&](const char* problem) {
      const Result<Plan> plan = tessera::plan(problem_of(problem), *device);
      if (!plan) return plan.status().text;
      const PlanData& data = plan->data();
      const core::WorkOrder& order = data.work;
      std::string text(plan->kernel());
      text += " " + std::to_string(order.blocks) + " x " +
              std::to_string(order.batch * order.heads) + "/" + std::to_string(order.section);
      for (const WorkspaceRegion& region : data.regions) {
        text += " " + std::string(region.name) + " " + std::to_string(region.bytes);
      }
      return text;
    };
    EXPECT_EQ(planned("bwd bf16 b=4 h=16 q=4096 k=4096 d=128 causal"),
              "sm90.backward.bf16.d128.64x128 32 x 64/2 statistics 2097152 dq 134217728 "
              "turns 32768 next_tile 4");
    EXPECT_EQ(planned("bwd f16 h=32 q=16384 k=16384 d=64"),
              "sm90.backward.f16.d64.128x128 128 x 32/1 statistics 4194304 dq 134217728 "
              "turns 32768 next_tile 4");
    EXPECT_EQ(planned("bwd bf16 b=8 h=32/8 q=1024 k=1024 d=128 causal"),
              "sm90.backward.bf16.d128.64x128 8 x 64/2 statistics 2097152 dq 134217728 "
              "turns 32768 next_tile 4");
    EXPECT_EQ(planned("bwd bf16 b=3 h=8 q=500 k=700 d=128 causal packed=900,1300"),
              "sm90.backward.bf16.d128.64x128 6 x 24/16 statistics 69632 dq 4456448 turns 1088 "
              "next_tile 4");
    EXPECT_EQ(planned("bwd bf16 h=8 q=100 k=200 d=72 sink"),
              "sm90.backward.bf16.d128.64x128 2 x 8/8 statistics 8192 dq 524288 turns 128 "
              "sink_parts 64 next_tile 4");
    EXPECT_EQ(planned("bwd bf16 b=32 h=16 q=512 k=512 d=64 causal"),
              "sm90.backward.bf16.d64.128x128 4 x 512/4 statistics 2097152 dq 67108864 "
              "turns 16384 next_tile 4");
    EXPECT_EQ(planned("bwd f16 b=2 h=4 q=500 k=700 d=200"),
              "sm90.backward.f16.d256.64x64 11 x 8/8 statistics 32768 dq 4194304 turns 512 "
              "next_tile 4");
    // An order of sums changes nothing.
    for (const std::string order : {"deterministic", "batch_invariant"}) {
      for (const std::string problem :
           {"bwd bf16 b=4 h=16 q=4096 k=4096 d=128 causal", "bwd f16 b=2 h=4 q=500 k=700 d=100"}) {
        EXPECT_EQ(planned((problem + " " + order).c_str()), planned(problem.c_str()));
      }
    }
    // Sums of a bias' gradient where scores share an element of it.
    EXPECT_EQ(planned("bwd bf16 b=2 h=4 q=500 k=700 d=64 bias=bhqk"),
              "sm90.backward.bf16.d128.64x64.extra 11 x 8/1 statistics 32768 dq 2097152 "
              "turns 512 next_tile 4");
    EXPECT_EQ(planned("bwd bf16 b=2 h=4 q=500 k=700 d=64 bias=hqk"),
              "sm90.backward.bf16.d128.64x64.extra 11 x 8/1 statistics 32768 dq 2097152 "
              "turns 512 dbias 5600000 next_tile 4");
    EXPECT_EQ(planned("bwd bf16 b=2 h=4 q=500 k=700 d=256 bias=bk deterministic unaligned"),
              "sm90.backward.bf16.d256.64x64.any 11 x 8/1 statistics 32768 dq 4194304 turns 512 "
              "dbias 5600 next_tile 4");
  }
}

// Where there is nothing to compute somebody writes zeros all the same: the row that would compute.
TEST(Select, NoQueriesOrKeysTakeTheRowOfTheirHeadDims) {
  const Result<Device> device = named_device("h200");
  ASSERT_TRUE(device.ok()) << device.status().text;
  for (const char* lengths : {"q=0 k=128", "q=128 k=0", "q=0 k=0"}) {
    const auto row = [&](const std::string& words) -> std::string {
      const Result<Plan> planned = plan(problem_of(words + " h=8 " + lengths), *device);
      return planned ? std::string(planned->kernel()) : planned.status().text;
    };
    EXPECT_EQ(row("fwd bf16 d=64"), "sm90.forward.bf16.d64.128x128") << lengths;
    EXPECT_EQ(row("fwd f16 d=128 softcap=30"), "sm90.forward.f16.d128.128x128.softcap") << lengths;
    EXPECT_EQ(row("bwd bf16 d=64"), "sm90.backward.bf16.d64.128x128") << lengths;
    EXPECT_EQ(row("bwd f16 d=128"), "sm90.backward.f16.d128.64x128") << lengths;
    EXPECT_EQ(row("bwd bf16 d=192/128"), "sm90.backward.bf16.d192v128.64x64") << lengths;
    EXPECT_EQ(row("bwd bf16 d=256"), "sm90.backward.bf16.d256.64x64") << lengths;
    EXPECT_EQ(row("bwd bf16 d=64 alibi=h"), "sm90.backward.bf16.d128.64x64.extra") << lengths;
    EXPECT_EQ(row("bwd bf16 d=20"), "sm90.backward.bf16.d128.64x64.any") << lengths;
  }
}

// Few queries: the heads of a group share tiles. Not where that makes no fewer, nor where a row's
// kernel or a sequence's bits would not stand it.
TEST(Select, GroupsShareTilesWhereThatMakesFewer_S10) {
  const Result<Device> device = named_device("h200");
  ASSERT_TRUE(device.ok()) << device.status().text;
  const auto packed = [&](const char* problem) {
    const Result<Plan> planned = plan(problem_of(problem), *device);
    EXPECT_TRUE(planned.ok()) << planned.status().text;
    return planned ? planned->data().row_heads : 0;
  };
  EXPECT_EQ(packed("fwd bf16 b=4 h=32/8 q=1 k=8192 d=128"), 4);
  EXPECT_EQ(packed("fwd bf16 b=4 h=32/1 q=16 k=8192 d=64"), 32);
  EXPECT_EQ(packed("fwd bf16 h=32/8 q=130 k=8192 d=128 causal"), 4);   // 5 tiles, not 8
  EXPECT_EQ(packed("fwd bf16 h=32/8 q=4096 k=4096 d=128 causal"), 4);  // 86 tiles, not 88
  EXPECT_EQ(packed("fwd bf16 h=32/8 q=8064 k=8064 d=128 causal"), 1);
  EXPECT_EQ(packed("fwd bf16 h=32 q=20 k=8192 d=128"), 1);
  EXPECT_EQ(packed("fwd bf16 h=6/2 q=10 k=8192 d=128"), 1);  // 3 is no power of two
  EXPECT_EQ(packed("fwd bf16 h=64/1 q=100 k=8192 d=128"), 64);
  EXPECT_EQ(packed("fwd bf16 h=64/1 q=17000001 k=8192 d=128"), 1);  // over 2^30 rows
  EXPECT_EQ(packed("fwd bf16 h=32/8 q=10 k=8192 d=128 sink"), 1);
  EXPECT_EQ(packed("fwd bf16 h=32/8 q=10 k=8192 d=128 alibi=h"), 1);
  EXPECT_EQ(packed("fwd bf16 b=3 h=8/2 q=9 k=90 d=128 packed=20,200 batch_invariant"), 1);
}

/// The row of a packed batch does not depend on its longest sequence if bits must not.
TEST(Select, BatchInvarianceFixesTheRow_S9) {
  const Result<Device> device = named_device("h200");
  ASSERT_TRUE(device.ok()) << device.status().text;
  std::set<std::string> rows, free_rows;
  for (const int longest : {1, 100, 512, 1024, 2048, 9000}) {
    Problem p = problem_of("fwd bf16 b=3 h=8 q=1 k=1 d=64 causal packed=3,3");
    p.seqlen_q = p.seqlen_k = longest;
    p.total_q = p.total_k = 3L * longest;
    for (const bool invariant : {false, true}) {
      p.batch_invariant = invariant;
      const Result<Plan> planned = plan(p, *device);
      ASSERT_TRUE(planned.ok()) << planned.status().text;
      (invariant ? rows : free_rows).emplace(planned->kernel());
    }
  }
  EXPECT_EQ(rows.size(), 1U);
  EXPECT_GT(free_rows.size(), 1U);
}

// Few blocks of keys are shared, by as many pieces as fill the multiprocessors, where these pieces
// sum up what they have; a sequence's bits depend on that, so not where these may not depend on the
// batch. By which number is the cost's business (shared_keys.cpp).
TEST(Select, FewKeysOfTheBackwardAreShared_S9) {
  const auto splits = [&](const std::string& gpu, const std::string& problem) {
    const Result<Device> device = named_device(gpu);
    EXPECT_TRUE(device.ok()) << device.status().text;
    const Result<Plan> planned = plan(problem_of("bwd bf16 " + problem), *device);
    EXPECT_TRUE(planned.ok()) << planned.status().text;
    if (!planned) return 0;
    const PlanData& data = planned->data();
    std::uint64_t bytes = 0;
    for (const WorkspaceRegion& region : data.regions) {
      if (std::string(region.name) == "key_sums") bytes = region.bytes;
    }
    const core::Kernel& row = data.kernel;
    const std::int64_t floats = data.work.count() * row.block_n * (row.head_dim + row.head_dim_v);
    EXPECT_EQ(bytes, data.work.splits > 1 ? static_cast<std::uint64_t>(floats) * 4 : 0) << problem;
    EXPECT_LE(bytes, 150'000'000) << problem;
    return data.work.splits;
  };
  const std::string few = "b=2 h=32/1 q=4096 k=4096 d=128";
  EXPECT_EQ(splits("h200", few), 2);  // 64 blocks of keys
  EXPECT_GE(splits("h200", few + " causal"), 8);
  EXPECT_EQ(splits("h200", few + " causal batch_invariant"), 1);
  EXPECT_GE(splits("h200", few + " causal deterministic"), 8);
  EXPECT_EQ(splits("a100", few), 1);
  EXPECT_EQ(splits("h200", "b=1 h=32/1 q=1024 k=1024 d=128"), 16);
  EXPECT_GE(splits("h200", "b=1 h=16/1 q=1024 k=1024 d=256 softcap=30"), 4);
  EXPECT_EQ(splits("h200", "b=1 h=32/8 q=2048 k=2048 d=128"), 1);  // 128 blocks
  EXPECT_EQ(splits("h200", "b=1 h=32/8 q=2048 k=2048 d=128 causal"), 2);
  EXPECT_EQ(splits("h200", "b=4 h=16 q=4096 k=4096 d=128 causal"), 1);
  EXPECT_EQ(splits("h200", "b=1 h=1 q=64 k=64 d=128"), 1);
  // The average of packed sequences counts, not their longest; but what that has room for, too.
  EXPECT_EQ(splits("h200", "b=64 h=16/1 q=4096 k=4096 d=128 causal packed=65536,65536"), 1);
  EXPECT_GT(splits("h200", "b=2 h=32/1 q=2048 k=2048 d=128 causal packed=3000,3000"), 1);
  EXPECT_EQ(splits("h200", "b=64 h=32/1 q=131072 k=131072 d=128 causal packed=8192,8192"), 1);
}

TEST(Select, EveryRefusalHasAReason) {
  const Problem p = problem_of("fwd f32 h=8 q=100 k=100 d=64");
  const Device weak = device_of(Arch::portable);
  int refused = 0;
  for (const core::Kernel& row : kCatalog) {
    if (row.arch == Arch::portable && row.form == core::Form::tile && row.pass == Pass::forward) {
      EXPECT_EQ(refusal(row, p, weak), "");
    } else {
      EXPECT_GT(refusal(row, p, weak).size(), 10U) << name_of(row);
      ++refused;
    }
  }
  EXPECT_GT(refused, 3);
}

TEST(Select, SplitsDependOnTheSequenceAlone_S9) {
  for (const Arch arch : {Arch::portable, Arch::avx512_bf16}) {
    int splits = 0, split_n = 0;
    for (const int threads : {1, 2, 64}) {
      for (const std::int64_t batch : {1, 7}) {
        Problem p = problem_of("fwd bf16 h=32/8 q=1 k=30000 d=128");
        p.batch = batch;
        const Result<Plan> planned = plan(p, device_of(arch, threads));
        ASSERT_TRUE(planned.ok()) << planned.status().text;
        const PlanData& data = planned->data();
        EXPECT_GT(data.work.splits, 1);
        EXPECT_GE(std::int64_t{data.work.splits} * data.split_n, 30000);
        if (splits == 0) splits = data.work.splits, split_n = data.split_n;
        EXPECT_EQ(data.work.splits, splits);
        EXPECT_EQ(data.split_n, split_n);
      }
    }
  }
}

TEST(Select, TheChoiceDependsOnNeitherThreadsNorBatch_S9) {
  const unsigned seed = std::random_device()();
  std::mt19937 random(seed);
  for (int trial = 0; trial < 500; ++trial) {
    Problem p = problem_of("fwd f32 d=32");
    p.dtype = static_cast<Dtype>(random() % 3);
    p.num_heads_k = 1 + random() % 4;
    p.num_heads = p.num_heads_k * static_cast<std::int64_t>(1 + random() % 8);
    p.seqlen_q = random() % 12;
    p.seqlen_k = random() % 20000;
    const auto choose = [&p](int threads, std::int64_t batch) {
      p.batch = batch;
      const Result<Plan> planned = plan(p, device_of(Arch::avx512_bf16, threads));
      EXPECT_TRUE(planned.ok()) << planned.status().text;
      return std::pair(std::string(planned->kernel()), planned->data().split_n);
    };
    const auto first = choose(1, 1);
    EXPECT_EQ(choose(64, 1), first) << "seed " << seed << " " << to_string(p);
    EXPECT_EQ(choose(3, 50), first) << "seed " << seed << " " << to_string(p);
  }
}

TEST(Select, BatchInvariantPackedNeverDependsOnTheLongestSequence_S9) {
  const Device device = device_of(Arch::avx512_bf16);
  std::string kernel;
  for (const int longest : {1, 16, 1000}) {
    Problem p = problem_of("fwd bf16 b=3 h=8/2 k=9000 d=64 packed=3,9000 batch_invariant");
    p.seqlen_q = longest;
    const Result<Plan> planned = plan(p, device);
    ASSERT_TRUE(planned.ok()) << planned.status().text;
    EXPECT_EQ(planned->data().work.splits, 1);
    if (kernel.empty()) kernel = planned->kernel();
    EXPECT_EQ(planned->kernel(), kernel);
  }
}

}  // namespace
}  // namespace tessera
