// What the planner makes of problems that a GPU decodes: spans, units, the slots of parts; and
// which problems these are.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>

#include "plan/catalog.h"
#include "plan/layout.h"
#include "plan/names.h"
#include "plan/planned.h"
#include "plan/select.h"

namespace tessera {
namespace {

Device gpu(const char* name = "h200") {
  const Result<Device> device = named_device(name);
  EXPECT_TRUE(device.ok()) << device.status().text;
  return device.ok() ? *device : Device{};
}

/// Few rows are decoded: any group shares them. There are as many spans as blocks are resident, or
/// units; where bits must not depend on the batch, units are large (S9).
TEST(Decoding, FewRowsAreSharedOutInSpans_S9) {
  const auto planned = [&](const char* problem) -> std::string {
    const Result<Plan> plan = tessera::plan(problem_of(problem), gpu());
    if (!plan) return plan.status().text;
    const PlanData& data = plan->data();
    EXPECT_EQ(data.work.splits, 1) << problem;
    const Result<Plan> on_h100 = tessera::plan(problem_of(problem), gpu("h100"));
    EXPECT_TRUE(on_h100.ok() && on_h100->kernel() == plan->kernel() &&
                on_h100->data().spans == data.spans)
        << problem;
    return std::string(plan->kernel()) + " " + std::to_string(data.row_heads) + " heads " +
           std::to_string(data.work.count()) + " in " + std::to_string(data.spans.count) + " of " +
           std::to_string(data.unit_n);
  };
  EXPECT_EQ(planned("fwd bf16 b=64 h=32/8 q=1 k=8192 d=128"),
            "sm90.forward.decode.bf16.d128.16x64 4 heads 512 in 256 of 64");
  EXPECT_EQ(planned("fwd bf16 h=32/8 q=1 k=131072 d=128"),
            "sm90.forward.decode.bf16.d128.16x64 4 heads 8 in 256 of 64");
  EXPECT_EQ(planned("fwd f16 h=28/4 q=2 k=8192 d=72 sink alibi=h"),
            "sm90.forward.decode.f16.d128.16x64 7 heads 4 in 256 of 64");
  EXPECT_EQ(planned("fwd bf16 b=64 h=32/8 q=1 k=8192 d=256"),
            "sm90.forward.decode.bf16.d256.16x64 4 heads 512 in 128 of 64");
  // No more spans than units. Sink tokens have one more.
  EXPECT_EQ(planned("fwd bf16 h=4 q=1 k=150 d=64"),
            "sm90.forward.decode.bf16.d64.16x64 1 heads 4 in 12 of 64");
  EXPECT_EQ(planned("fwd bf16 h=4 q=1 k=150 d=64 window=50,0 sink_tokens=4"),
            "sm90.forward.decode.bf16.d64.16x64 1 heads 4 in 16 of 64");
  EXPECT_EQ(planned("fwd bf16 h=32/8 q=1 k=8192 d=128 batch_invariant"),
            "sm90.forward.decode.bf16.d128.16x64 4 heads 8 in 128 of 512");
  EXPECT_EQ(planned("fwd bf16 b=64 h=32/8 q=1 k=8192 d=128 batch_invariant"),
            "sm90.forward.decode.bf16.d128.16x64 4 heads 512 in 256 of 512");
  // Latent attention: as many rows a block as there are, up to 64, and any number of blocks.
  EXPECT_EQ(planned("fwd bf16 b=64 h=16/1 q=1 k=4096 d=64/512 qv"),
            "sm90.forward.decode.bf16.d64v512.16x64.qv 16 heads 64 in 128 of 64");
  EXPECT_EQ(planned("fwd f16 h=16/1 q=2 k=4096 d=64/512 qv"),
            "sm90.forward.decode.f16.d64v512.32x64.qv 16 heads 1 in 64 of 64");
  EXPECT_EQ(planned("fwd bf16 b=2 h=128/1 q=1 k=4096 d=64/512 qv causal cache=after"),
            "sm90.forward.decode.bf16.d64v512.64x64.qv 128 heads 4 in 128 of 64");
  EXPECT_NE(planned("fwd bf16 h=16/1 q=1 k=4096 d=64/512 qv softcap=30").find("takes no softcap"),
            std::string::npos);
  for (const char* problem :
       {"fwd bf16 h=32/8 q=5 k=8192 d=128", "fwd bf16 q=1 k=100 d=64 dropout=0.1"}) {
    EXPECT_EQ(planned(problem).find("decode"), std::string::npos) << problem;
  }
}

/// What explain() says of how keys are divided, and of the bytes there are to read.
TEST(Decoding, ExplainSaysHowKeysAreDivided) {
  const auto said = [](const char* problem, const char* device) {
    const Result<Device> named = named_device(device);
    EXPECT_TRUE(named.ok()) << named.status().text;
    const std::string text = named ? explain(problem_of(problem), *named) : "";
    const std::size_t begin = text.find("\nkeys "), end = text.find("\nworkspace ");
    EXPECT_LT(begin, end) << text;
    return end == std::string::npos ? text : text.substr(begin + 1, end - begin);
  };
  const std::string pages = "cache=after pages=32768x16 ";
  const std::string bytes =
      "bytes      up to 2,147,483,648 of keys and values, 524,288 of queries, 524,288 of outputs\n";
  EXPECT_EQ(said(("fwd bf16 b=64 h=32/8 q=1 k=8192 d=128 " + pages).c_str(), "h200"),
            "keys       up to 8,192 a sequence, divided in units of 64: up to 128 an item, 65,536 "
            "in all, 256 a span\n"
            "parts      up to 256, where spans end within items: one a span\n" +
                bytes);
  EXPECT_EQ(
      said(("fwd bf16 b=64 h=32/8 q=1 k=8192 d=128 batch_invariant " + pages).c_str(), "h200"),
      "keys       up to 8,192 a sequence, divided in units of 512: up to 16 an item, 8,192 in "
      "all, 32 a span\n"
      "parts      up to 8,192, one a unit, so that a sequence's do not depend on the batch\n" +
          bytes);
  EXPECT_EQ(
      said("fwd bf16 h=4 q=1 k=50 d=64 cache=after", "h200"),
      "keys       up to 50 a sequence, divided in units of 64: up to 1 an item, 4 in all, 1 a "
      "span\n"
      "parts      none: an item is one unit\n"
      "bytes      up to 51,200 of keys and values, 512 of queries, 512 of outputs\n");
  // Packed queries of a window: 512 + 100 keys. A window may begin within a unit.
  EXPECT_EQ(said("fwd bf16 b=4 h=32/8 q=512 k=8192 d=128 cache=before:16 packed=600 "
                 "window=100,0 chunk=8192",
                 "h200"),
            "keys       up to 612 a sequence, divided in units of 64: up to 11 an item, 45,056 in "
            "all, 176 a span\n"
            "parts      up to 256, where spans end within items: one a span\n"
            "bytes      up to 10,027,008 of keys and values, 4,915,200 of queries, 4,915,200 of "
            "outputs\n");
  // A CPU's parts depend on the sequence alone.
  EXPECT_EQ(said(("fwd bf16 b=64 h=32/8 q=1 k=8192 d=128 " + pages).c_str(), "portable"),
            "keys       up to 8,192 a sequence, divided in parts of 1,024: up to 8 an item, merged "
            "in their order\n" +
                bytes);
  // Keys without a cache: of packed ones no more than there are.
  EXPECT_EQ(said("fwd f16 b=5 q=100 k=200 d=64/32 packed=500,700 o=f32", "portable"),
            "keys       up to 200 a sequence, not divided\n"
            "bytes      up to 134,400 of keys and values, 64,000 of queries, 64,000 of outputs\n");
}

/// A slot a span, or, batch_invariant, one a unit; none where an item is one unit.
TEST(Decoding, PartsHaveSlots) {
  const auto regions = [&](const char* problem) {
    const Result<Plan> plan = tessera::plan(problem_of(problem), gpu());
    EXPECT_TRUE(plan.ok()) << plan.status().text;
    std::string text;
    if (!plan) return text;
    for (const WorkspaceRegion& region : plan->data().regions) {
      text += region.name + " " + std::to_string(region.bytes) + " ";
    }
    return text;
  };
  const auto slots = [](int count, int row_head_dim_v) {
    return "part_words " + std::to_string(count * 16 * (row_head_dim_v / 2) * 16) + " ";
  };
  EXPECT_EQ(regions("fwd bf16 b=64 h=32/8 q=1 k=8192 d=128"), slots(256, 128));
  EXPECT_EQ(regions("fwd bf16 h=4 q=1 k=150 d=64"), slots(12, 64));
  EXPECT_EQ(regions("fwd bf16 h=4 q=1 k=1500 d=64/40 batch_invariant"), slots(4 * 3, 64));
  EXPECT_EQ(regions("fwd bf16 h=4 q=1 k=64 d=64"), "");
}

/// Sink tokens end a tile of their own, so there can be one unit more than keys make, and a slot.
TEST(Decoding, NoItemHasMoreUnitsThanSlots_S3) {
  int more = 0;
  for (int seqlen_k = 1008; seqlen_k <= 1040; ++seqlen_k) {
    for (int sink_tokens = 0; sink_tokens <= 18; ++sink_tokens) {
      for (const int hidden : {0, 1, 20}) {
        Problem p = problem_of("fwd bf16 h=4 q=1 d=64 batch_invariant window=0,0");
        p.seqlen_k = seqlen_k;
        p.sink_tokens = sink_tokens;
        p.window_left = seqlen_k - 1 - sink_tokens - hidden;
        const Result<Plan> plan = tessera::plan(p, gpu());
        ASSERT_TRUE(plan.ok()) << plan.status().text;
        const core::SequenceMask mask = {window_of(p).band_of({0, 1, seqlen_k}), core::Divisor(0),
                                         sink_tokens};
        const core::KeyTiles keys = {mask.runs_of({0, 1}), 16};
        const int units = keys.units(plan->data().unit_n / 16, true, mask);
        ASSERT_LE(units, units_of_item(plan->data())) << to_string(p);
        more += units > core::ceil_div(seqlen_k, plan->data().unit_n) ? 1 : 0;
      }
    }
  }
  EXPECT_GT(more, 0);
}

/// Chunks, sink tokens and trees: a GPU decodes them, block by block where there are many rows.
/// Every other row says what keeps it back.
TEST(Decoding, MasksWithHolesAreDecoded_S3) {
  const struct {
    const char* words;
    const char* refused;  ///< by rows that do not decode
  } cases[] = {{"cache=after pages=900x16 chunk=512", "takes no chunk"},
               {"cache=after packed=60 tree", "takes no tree"},
               {"chunk=512", "takes no chunk"},
               {"window=100,0 sink_tokens=4", "takes no sink_tokens"},
               {"tree", "takes no tree"}};
  for (const auto& [words, refused] : cases) {
    const auto planned = [&](const std::string& sizes) {
      return tessera::plan(problem_of("fwd bf16 b=3 " + sizes + " k=4096 d=128 " + words), gpu());
    };
    for (const char* sizes : {"h=8 q=60", "h=8/2 q=60"}) {
      const Result<Plan> fits = planned(sizes);
      ASSERT_TRUE(fits.ok()) << fits.status().text;
      EXPECT_EQ(fits->kernel(), "sm90.forward.decode.bf16.d128.16x64") << words;
      EXPECT_EQ(fits->data().work.blocks, sizes == std::string("h=8 q=60") ? 4 : 15);
    }
    const Problem p = problem_of("fwd bf16 b=3 h=8 q=60 k=4096 d=128 " + std::string(words));
    for (const core::Kernel& row : kCatalog) {
      if (!is_gpu(row.arch) || row.pass == Pass::backward || row.form == core::Form::decode) {
        continue;
      }
      if (row.operand == core::Operand::bf16) {
        Device device = gpu();
        device.arch = row.arch;
        EXPECT_EQ(refusal(row, p, device), refused) << name_of(row);
      }
    }
  }
}

/// Keys of a cache: up to 16 rows a key/value head are decoded, and more where the tiles of all
/// would leave most multiprocessors idle; otherwise tiles of query rows walk over them.
/// A hint: whom no row obeys, another one serves, and explain says why.
TEST(Decoding, PrefixesAreReadOnceWhereARowCan_S13) {
  const std::string of = "fwd bf16 b=64 h=32/8 q=1 k=8448 cache=after pages=9000x16 causal ";
  for (const auto& [words, name] :
       {std::pair{"d=128 prefixes=1", "sm90.forward.decode.bf16.d128.64x64.prefixes"},
        {"d=64 prefixes=4 softcap=30", "sm90.forward.decode.bf16.d64.64x64.prefixes"},
        {"d=256 prefixes=2 sink", "sm90.forward.decode.bf16.d256.16x64.prefixes"},
        {"d=128", "sm90.forward.decode.bf16.d128.16x64"},
        {"d=128 prefixes=1 alibi=h", "sm90.forward.decode.bf16.d128.16x64"},
        {"d=128 prefixes=1 sink_tokens=4", "sm90.forward.decode.bf16.d128.16x64"},
        {"d=128 prefixes=1 batch_invariant", "sm90.forward.decode.bf16.d128.16x64"}}) {
    const Problem problem = problem_of(of + words);
    const Result<Plan> plan = tessera::plan(problem, gpu());
    ASSERT_TRUE(plan.ok()) << plan.status().text;
    EXPECT_EQ(plan->kernel(), name) << words;
  }
  const std::string text = explain(problem_of(of + "d=128 prefixes=1 alibi=h"), gpu());
  EXPECT_NE(text.find("takes no alibi"), std::string::npos) << text;
  // More rows than such a row reads keys for are those of a prefill.
  const Result<Plan> prefill = tessera::plan(
      problem_of("fwd bf16 b=4 h=32/8 q=512 k=8448 d=128 pages=9000x16 causal prefixes=1"), gpu());
  ASSERT_TRUE(prefill.ok()) << prefill.status().text;
  EXPECT_EQ(prefill->kernel().find("decode"), std::string::npos) << prefill->kernel();
}

/// Before most kernels the pages that are not skipped are listed in the workspace, and they know
/// nothing of the others; rows with qv are given the table as it is.
TEST(Decoding, SkippedPagesAreNotThereOrHidden_S13) {
  const std::int32_t table = 0, kept = 0;
  for (const Device& device : {gpu(), device_of(Arch::portable)}) {
    for (const bool qv : {false, true}) {
      const Problem problem = problem_of(std::string("fwd bf16 h=16/1 k=900 cache=full ") +
                                         (qv ? "d=64/512 qv " : "d=64 ") + "pages=900x1:skip");
      const Result<Plan> planned = plan(problem, device);
      ASSERT_TRUE(planned.ok()) << planned.status().text;
      const PlanData& data = planned->data();
      const bool hides = qv && device.arch == Arch::sm90;
      EXPECT_EQ(std::any_of(data.regions.begin(), data.regions.end(),
                            [](const WorkspaceRegion& region) {
                              return std::string(region.name) == "kept_pages";
                            }),
                !hides)
          << planned->kernel();
      Tensors tensors;
      tensors.cache.page_table = &table;
      tensors.cache.seqlens = &kept;
      const core::Cache cache = cache_of(data, tensors);
      EXPECT_EQ(cache.pages.skips, hides);
      EXPECT_EQ(cache.seqlens, hides ? nullptr : &kept);  // those of the pages that are left
    }
  }
}

TEST(Decoding, ACacheIsDecodedOrTiled_S13) {
  const auto kernel = [](const std::string& problem) -> std::string {
    const Result<Plan> plan = tessera::plan(problem_of(problem), gpu());
    return plan ? std::string(plan->kernel()) : plan.status().text;
  };
  const std::string decode = "sm90.forward.decode.bf16.d128.16x64";
  const struct {
    const char* sizes;
    bool decoded;
  } cases[] = {{"b=64 h=32/8 q=1 k=8192", true},
               {"b=64 h=32/8 q=4 k=2048", true},
               {"b=64 h=32/8 q=5 k=2048", false},
               {"b=16 h=32/8 q=8 k=4096", false},
               {"h=32/8 q=8 k=16384", true},
               {"h=32/8 q=32 k=16384", true},
               {"h=32/8 q=128 k=16384", false},
               {"b=4 h=8 q=64 k=4096", false},
               {"b=64 h=32/8 q=512 k=2048 packed=575", false}};
  for (const auto& [sizes, decoded] : cases) {
    for (const char* cache : {"cache=after", "cache=full rows=90", "cache=before:1 leftpad",
                              "cache=after pages=9000x1", "cache=after pages=900x100:i64"}) {
      const std::string problem = std::string("fwd bf16 d=128 causal ") + sizes + " " + cache;
      EXPECT_EQ(kernel(problem) == decode, decoded) << problem << ": " << kernel(problem);
    }
  }
  // Every feature of a score has its row; so has what the copy engine cannot address.
  const std::string prefill = "fwd bf16 b=8 h=8/2 q=600 k=4096 cache=after pages=900x16 ";
  for (const auto& [words, name] :
       {std::pair{"d=64 softcap=30", "sm90.forward.bf16.d64.192x96.softcap"},
        {"d=128 alibi=h", "sm90.forward.bf16.d128.128x64.extra"},
        {"d=192/128 dropout=0.1", "sm90.forward.bf16.d192v128.128x64.extra"},
        {"d=256 sink window=100,0", "sm90.forward.bf16.d256.128x64"},
        {"d=128 unaligned", "sm90.forward.bf16.d128.128x64.any"},
        {"d=7", "sm90.forward.bf16.d64.128x64.any"}}) {
    EXPECT_EQ(kernel(prefill + words), name) << words;
  }
}

/// Which row it is must not depend on the batch where bits may not (S9).
TEST(Decoding, BatchesDoNotDecideOnTheRow_S9) {
  for (const char* batch : {"b=1", "b=64"}) {
    const std::string cache =
        std::string("fwd bf16 ") + batch + " h=32/8 k=4096 d=128 " + "cache=after batch_invariant ";
    for (const auto& [words, name] :
         {std::pair{"q=4", "sm90.forward.decode.bf16.d128.16x64"},
          {"q=5", "sm90.forward.bf16.d128.128x128"},
          {"q=500 packed=500", "sm90.forward.decode.bf16.d128.16x64"}}) {
      const std::string problem = cache + words;
      const Result<Plan> plan = tessera::plan(problem_of(problem), gpu());
      ASSERT_TRUE(plan.ok()) << plan.status().text;
      EXPECT_EQ(plan->kernel(), name) << problem;
    }
  }
  const Problem packed =
      problem_of("fwd bf16 b=3 q=500 k=900 d=64 cache=full packed=600 batch_invariant");
  const Problem empty = problem_of("fwd bf16 q=500 k=900 d=64 cache=full pages=0x16");
  for (const core::Kernel& row : kCatalog) {
    if (!is_gpu(row.arch) || row.pass == Pass::backward || row.form == core::Form::decode) continue;
    if (row.operand != core::Operand::bf16) continue;
    if (row.arch != gpu().arch) continue;
    EXPECT_EQ(refusal(row, packed, gpu()),
              "is chosen by the longest sequence of a packed batch, which batch_invariant forbids; "
              "decoding rows take any number of queries");
    EXPECT_EQ(refusal(row, empty, gpu()), "takes 1 to 2^31 - 1 pages; num_pages = 0");
  }
}

}  // namespace
}  // namespace tessera
