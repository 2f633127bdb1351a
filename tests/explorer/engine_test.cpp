// What the explorer's engine says of tiles, order and softmax, against the mask and against its own
// rules, for fresh random problems on every kind of device.
#include "engine/engine.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "archs.h"
#include "check/random.h"
#include "core/softmax.h"
#include "core/work.h"
#include "engine/inputs.h"
#include "explorer/problems.h"
#include "plan/plan.h"

namespace tessera::explorer {
namespace {

using nlohmann::json;

constexpr const char* kDevices[] = {"h200", "a100", "zen4-16", "haswell-4", "skylake-sp-28"};

json ask(const std::string& request) { return json::parse(answer(request)); }

json ask(const char* command, const Problem& problem, const std::string& device,
         const std::string& fields = "") {
  return ask(std::string(command) + "\t" + to_string(problem) + "\t" + device + fields);
}

/// Visits fresh random problems on the devices that take them; with a sanitizer a sixth of them.
/// `always` are problems that are visited whatever the seed is.
template <class Visit>
void for_each_planned(std::int64_t many, std::int64_t largest, const Visit& visit,
                      std::initializer_list<const char*> always = {}) {
  const std::int64_t count = kSanitized ? many / 6 : many;
  const std::uint64_t seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  tools::Random random(seed, 3);
  int planned = 0;
  std::vector<Problem> problems = random_problems(seed, count, largest);
  for (const char* text : always) problems.push_back(*parse_problem(text));
  for (const Problem& problem : problems) {
    for (const char* device : kDevices) {
      if (problem.batch == 0 || ask("plan", problem, device)["kernel"].is_null()) continue;
      SCOPED_TRACE(to_string(problem) + " on " + device);
      ++planned;
      visit(problem, std::string(device), random);
      if (::testing::Test::HasFailure()) return;
    }
  }
  EXPECT_GT(planned, count);
}

core::SequenceMask mask_of(const Problem& problem, const Inputs& inputs, int batch) {
  return mask_rules_of(problem, inputs.tensors())
      .of(sequences_of(problem, inputs.tensors()), sequence_of(problem, inputs.tensors(), batch));
}

Inputs inputs_of(const Problem& problem) {
  Result<Inputs> inputs = Inputs::make(problem, *Request::read("tiles"));
  EXPECT_TRUE(inputs.ok()) << inputs.status().text;
  return *std::move(inputs);
}

/// Counts how often each pair of row and key is there.
class PairCounts {
 public:
  PairCounts(std::int64_t rows, int keys)
      : rows_(rows), keys_(keys), counts_(static_cast<std::size_t>(rows * keys)) {}

  void add(std::int64_t row, std::int64_t end_row, std::int64_t key, std::int64_t end_key) {
    ASSERT_TRUE(0 <= row && row <= end_row && end_row <= rows_) << row << " " << end_row;
    ASSERT_TRUE(0 <= key && key <= end_key && end_key <= keys_) << key << " " << end_key;
    for (std::int64_t i = row; i < end_row; ++i) {
      for (std::int64_t j = key; j < end_key; ++j)
        ++counts_[static_cast<std::size_t>(i * keys_ + j)];
    }
  }
  int of(std::int64_t row, int key) const {
    return counts_[static_cast<std::size_t>(row * keys_ + key)];
  }

 private:
  std::int64_t rows_;
  int keys_;
  std::vector<int> counts_;
};

/// How many of the pairs in a run of rows and keys the mask shows.
struct Seen {
  std::int64_t some = 0, all = 0;
};
Seen seen_in(const core::SequenceMask& mask, const json& tile, std::int64_t row_heads) {
  Seen seen;
  for (auto row = tile[0].get<std::int64_t>(); row < tile[1].get<std::int64_t>(); ++row) {
    for (int key = tile[2]; key < tile[3].get<int>(); ++key, ++seen.all) {
      seen.some += mask.visible(static_cast<int>(row / row_heads), key) ? 1 : 0;
    }
  }
  return seen;
}

// Every row meets every key in one tile: what is skipped nobody sees, what is taken whole
// everybody.
TEST(Tiles, AgreeWithTheMaskAndLeaveNothingOut) {
  std::map<int, int> kinds;
  for_each_planned(150, 6, [&](const Problem& problem, const std::string& device, auto& random) {
    const std::int64_t batch = random.next_between(0, problem.batch - 1);
    const std::int64_t head = random.next_between(0, problem.num_heads - 1);
    const json tiles = ask("tiles", problem, device,
                           "\tbatch=" + std::to_string(batch) + "\thead=" + std::to_string(head));
    ASSERT_FALSE(tiles.contains("error")) << tiles.dump();
    ASSERT_FALSE(tiles["cut"].get<bool>());
    const Inputs inputs = inputs_of(problem);
    const core::SequenceMask mask = mask_of(problem, inputs, static_cast<int>(batch));
    const auto rows = tiles["rows"].get<std::int64_t>();
    const auto row_heads = tiles["row_heads"].get<std::int64_t>();
    const int keys = tiles["seqlen_k"];
    ASSERT_EQ(rows, mask.band.seqlen_q * row_heads);
    ASSERT_EQ(keys, mask.band.seqlen_k);
    PairCounts taken(rows, keys), met(rows, keys);
    for (const json& piece : tiles["list"]) {
      for (const json& tile : piece["tiles"]) {
        const int cover = tile[4];
        ++kinds[cover];
        met.add(tile[0], tile[1], tile[2], tile[3]);
        if (cover != 0) taken.add(tile[0], tile[1], tile[2], tile[3]);
        const Seen seen = seen_in(mask, tile, row_heads);
        if (cover == 2) {
          ASSERT_EQ(seen.some, seen.all) << tile.dump();
        }
      }
    }
    for (std::int64_t row = 0; row < rows; ++row) {
      for (int key = 0; key < keys; ++key) {
        const bool visible = mask.visible(static_cast<int>(row / row_heads), key);
        ASSERT_LE(taken.of(row, key), 1) << "row " << row << " key " << key;
        ASSERT_GE(taken.of(row, key), visible ? 1 : 0) << "row " << row << " key " << key;
        ASSERT_EQ(met.of(row, key), 1) << "row " << row << " key " << key;
      }
    }
  });
  for (int cover = 0; cover < 3; ++cover) EXPECT_GT(kinds[cover], 0) << cover;
}

// Of pages 5, none, 3 the middle one is skipped; all sequences have row 0 of the table.
TEST(Tiles, KnowOnlyThePagesThatAreNotSkipped) {
  const std::string of = "\tfwd bf16 b=3 h=2 q=1 k=40 d=64 cache=full pages=8x16:skip rows=1";
  const std::string given = "\tpage_table=5,-1,3\tindex=0,0,0\tbatch=2";
  const json tiles = ask("tiles" + of + "\th200" + given);
  ASSERT_FALSE(tiles.contains("error")) << tiles.dump();
  EXPECT_EQ(tiles["seqlen_k"], 16 + 8);
  EXPECT_EQ(tiles["pages"], (std::vector<int>{5, 3}));
  const json elements = ask("elements" + of + "\t" + given + "\tkey=15\tkeys=2");
  ASSERT_FALSE(elements.contains("error")) << elements.dump();
  EXPECT_EQ(elements["rows_of_k"], (std::vector<int>{5 * 16 + 15, 3 * 16}));
}

/// What a GPU finds in a page table is not shown: pieces are those of sequences.
TEST(Order, IsThatOfSequencesWithPrefixes) {
  const std::string of = "fwd bf16 b=3 h=2 q=1 k=400 d=64 cache=full pages=80x16";
  const json plain = ask("order\t" + of + "\th200");
  ASSERT_FALSE(plain.contains("error")) << plain.dump();
  EXPECT_EQ(ask("order\t" + of + " prefixes=1\th200")["pieces"], plain["pieces"]);
  EXPECT_EQ(ask("tiles\t" + of + " prefixes=1\th200"), ask("tiles\t" + of + "\th200"));
}

/// One piece of an order's list by the names of its columns.
class Piece {
 public:
  Piece(const json& columns, const json& values) : columns_(columns), values_(values) {}
  std::int64_t operator[](const char* name) const {
    const auto at = std::find(columns_.begin(), columns_.end(), name) - columns_.begin();
    return values_.at(static_cast<std::size_t>(at));
  }

 private:
  const json& columns_;
  const json& values_;
};

// Each visible pair of each head is in one piece of work.
TEST(Order, ComputesEveryVisiblePairOnce) {
  std::map<std::string, int> dealings;
  const auto visit = [&](const Problem& problem, const std::string& device, auto&) {
    const json order = ask("order", problem, device);
    ASSERT_FALSE(order.contains("error")) << order.dump();
    ++dealings[order["dealing"].get<std::string>() +
               (is_gpu(named_device(device)->arch) ? " GPU" : " CPU")];
    const Inputs inputs = inputs_of(problem);
    const json tiles = ask("tiles", problem, device);
    const auto row_heads = tiles["row_heads"].get<std::int64_t>();
    const json work = ask("plan", problem, device)["work"];
    const int heads = work["heads"];
    // Pieces that share keys say all rows that see them.
    const int shared = problem.pass == Pass::backward ? work["splits"].get<int>() : 1;
    for (int batch = 0; batch < static_cast<int>(problem.batch); ++batch) {
      const core::SequenceMask mask = mask_of(problem, inputs, batch);
      const std::int64_t rows = mask.band.seqlen_q * row_heads;
      for (int head = 0; head < heads; ++head) {
        PairCounts counts(rows, mask.band.seqlen_k);
        for (const json& values : order["list"]) {
          const Piece piece(order["columns"], values);
          const std::int64_t first = piece["head"];
          if (piece["batch"] != batch || piece["prepares"] != 0 || head < first ||
              head >= first + piece["heads"]) {
            continue;
          }
          ASSERT_LE(piece["keys"], piece["end_key"] - piece["first_key"]);
          // Between sink tokens and other keys there may be some that it does not have.
          if (piece["keys"] < piece["end_key"] - piece["first_key"]) return;
          counts.add(piece["first_row"], piece["end_row"], piece["first_key"], piece["end_key"]);
        }
        for (std::int64_t row = 0; row < rows; ++row) {
          for (int key = 0; key < mask.band.seqlen_k; ++key) {
            const int count = counts.of(row, key);
            ASSERT_TRUE(count == 0 || count == shared) << "row " << row << " key " << key;
            if (!mask.visible(static_cast<int>(row / row_heads), key)) continue;
            ASSERT_EQ(count, shared) << "row " << row << " key " << key;
          }
        }
      }
    }
  };
  for_each_planned(
      600, 3, visit,
      {"fwd bf16 b=2 h=4/2 q=70 k=90 d=64 causal", "bwd bf16 b=2 h=4/2 q=70 k=90 d=64 causal",
       "fwd bf16 b=3 h=4/2 q=2 k=40 d=64 causal cache=full"});
  for (const char* dealing : {"rounds GPU", "counter GPU", "spans GPU", "counter CPU"}) {
    EXPECT_GT(dealings[dealing], 0) << dealing;
  }
}

// Who works has no gaps; who is free first takes the next piece, or each has the round's share.
TEST(Order, GivesPiecesToWorkersByItsRule) {
  for_each_planned(200, 20, [&](const Problem& problem, const std::string& device, auto&) {
    const json order = ask("order", problem, device);
    ASSERT_FALSE(order.contains("error")) << order.dump();
    const bool rounds = order["dealing"] == "rounds", spans = order["dealing"] == "spans";
    const auto count = order["pieces"].get<std::int64_t>();
    const auto workers = static_cast<int>(std::min<std::int64_t>(count, order["workers"]));
    ASSERT_EQ(order["list"].size(), count);
    std::vector<bool> there(static_cast<std::size_t>(count));
    const std::size_t resident = order["resident"];
    std::map<std::int64_t, std::int64_t> ready;
    std::map<std::int64_t, std::vector<std::int64_t>> slots_ready;  // of blocks that share a worker
    std::map<std::int64_t, int> pieces;
    std::int64_t end = 0, busy = 0;
    for (const json& values : order["list"]) {
      const Piece piece(order["columns"], values);
      ASSERT_FALSE(there[static_cast<std::size_t>(piece["index"])]);
      there[static_cast<std::size_t>(piece["index"])] = true;
      const std::int64_t worker = piece["worker"];
      ASSERT_TRUE(0 <= worker && worker < order["workers"].get<std::int64_t>());
      ASSERT_LE(piece["start"], piece["end"]);
      if (!spans) {
        auto& slots = slots_ready[worker];
        slots.resize(resident);
        const auto slot = std::find(slots.begin(), slots.end(), piece["start"]);
        ASSERT_NE(slot, slots.end());
        *slot = piece["end"];
      }
      if (rounds && resident > 1) {
        ASSERT_LT(pieces[worker]++, static_cast<int>(resident) * (count / workers + 1));
      } else if (rounds) {
        ASSERT_EQ(piece["index"],
                  core::WorkOrder::index_of(pieces[worker]++, static_cast<int>(worker), workers));
      } else if (!spans) {
        for (int other = 0; other < workers; ++other) {
          ASSERT_LE(piece["start"], ready[other]);  // nobody was free before
        }
      }
      ready[worker] = std::max(ready[worker], piece["end"]);
      end = std::max(end, piece["end"]);
      busy += piece["end"] - piece["start"];
    }
    if (device == "h200" && problem.pass == Pass::backward && count > 0) {
      // The first block of keys, or, where blocks add in order, the last one.
      const bool ordered = problem.deterministic || problem.batch_invariant;
      const int blocks = ask("plan", problem, device)["work"]["blocks"];
      ASSERT_EQ(Piece(order["columns"], order["list"][0])["block"], ordered ? blocks - 1 : 0);
    }
    ASSERT_EQ(order["end"], end);
    const std::int64_t slots =
        order["workers"].get<std::int64_t>() * order["resident"].get<std::int64_t>();
    ASSERT_NEAR(order["busy"].get<double>(), static_cast<double>(busy),
                static_cast<double>(count + 1));
    ASSERT_NEAR(order["busy"].get<double>() + order["idle"].get<double>(),
                static_cast<double>(slots * end), static_cast<double>(slots + 2));
    ASSERT_GE(order["idle"].get<std::int64_t>(), -1);
  });
}

// The weights are the definition's in double, whatever the blocks are and whenever it rescales.
TEST(Softmax, BlocksGiveTheDefinition) {
  const std::uint64_t seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  tools::Random random(seed, 4);
  int rescaled = 0, kept = 0;
  for (int round = 0; round < 200; ++round) {
    const std::int64_t count = random.next_between(1, 40);
    const double spread = round % 2 == 0 ? 1.0 : 20.0;
    std::string scores, values;
    std::vector<double> score, value;
    for (std::int64_t i = 0; i < count; ++i) {
      const bool hidden = random.next_between(0, 9) == 0;
      const float x = static_cast<float>(spread * random.normal(random.next()));
      const float y = static_cast<float>(random.normal(random.next()));
      score.push_back(hidden ? -INFINITY : static_cast<double>(x));
      value.push_back(static_cast<double>(y));
      scores += (i > 0 ? "," : "") + (hidden ? "-inf" : std::to_string(x));
      values += (i > 0 ? "," : "") + std::to_string(y);
    }
    const std::string slack = std::to_string(random.next_between(0, 30));
    const json row =
        ask("softmax\t\t\tscores=" + scores + "\tvalues=" + values + "\tslack=" + slack +
            "\tblock=" + std::to_string(random.next_between(1, 9)));
    ASSERT_FALSE(row.contains("error")) << row.dump();
    const double top = *std::max_element(score.begin(), score.end());
    double sum = 0.0, output = 0.0;
    for (std::size_t i = 0; i < score.size(); ++i) {
      const double weight = std::isinf(top) ? 0.0 : std::exp(score[i] - top);
      sum += weight;
      output += weight * value[i];
    }
    for (const char* way : {"online", "three_steps"}) {
      const json& result = row[way];
      if (sum == 0.0) {
        EXPECT_EQ(result["output"], 0.0);
        EXPECT_TRUE(result["lse"].is_null());
        continue;
      }
      EXPECT_NEAR(result["output"].get<double>(), output / sum, 2e-4) << way << row.dump();
      EXPECT_NEAR(result["lse"].get<double>(), top + std::log(sum), 2e-4) << way;
    }
    const double most = std::stod(slack) + 1e-3;
    for (const json& block : row["blocks"]) {
      (block["rescaled"].get<bool>() ? rescaled : kept) += 1;
      if (block["greatest"].is_null()) continue;
      EXPECT_LE(block["greatest"].get<double>() - block["reference"].get<double>(), most);
    }
  }
  EXPECT_GT(rescaled, 0);
  EXPECT_GT(kept, 0);
}

TEST(Bytes, AreThoseOfTheMemoryCommand) {
  const json bytes = ask("bytes\tfwd bf16 q=8 k=8 d=128\th200\tseqlens=1024");
  // 4 tensors of 1024 x 128 and 4 matrices of 1024 x 1024, 2 bytes each. Tiles: 227 rows, 5 passes.
  EXPECT_EQ(bytes["levels"][0]["list"][0]["standard"], 4 * 1024 * 128 * 2 + 4 * 1024 * 1024 * 2);
  EXPECT_EQ(bytes["levels"][0]["list"][0]["block"], 227);
  EXPECT_EQ(bytes["levels"][0]["list"][0]["tiled"], (2 + 2 * 5) * 1024 * 128 * 2 + 4 * 1024);
  // The second-level cache holds all of it: one pass.
  EXPECT_EQ(bytes["levels"][1]["list"][0]["tiled"], (2 + 2) * 1024 * 128 * 2 + 4 * 1024);
  const json wide = ask("bytes\tfwd f32 q=8 k=8 d=4096\tzen4-16\tseqlens=64");
  EXPECT_NE(wide["levels"][0]["refusal"].get<std::string>().find("sram_bytes"), std::string::npos);
  EXPECT_EQ(wide["levels"][1]["list"].size(), 1);
}

// Two sequences in pages of 16 slots: 100 slots, and as many as are made up; 4 heads of 64 + 64
// bf16.
TEST(Bytes, OfACacheAreThoseOfItsKeys) {
  const std::string problem = "fwd bf16 b=2 h=8/4 q=1 k=100 d=64 cache=after pages=20x16";
  const json tiles = ask("tiles\t" + problem + "\th200\tbatch=1");
  const std::int64_t second = tiles["seqlen_k"];
  const json cache = ask("bytes\t" + problem + "\th200")["cache"];
  constexpr int kKeyBytes = 4 * (64 + 64) * 2;
  EXPECT_EQ(cache["keys"], 100 + second);
  EXPECT_EQ(cache["used"], (100 + second) * kKeyBytes);
  EXPECT_EQ(cache["read"], cache["used"]);
  EXPECT_EQ(cache["bytes"], 20 * 16 * kKeyBytes);
  EXPECT_EQ(cache["pages"], 7 + (second + 15) / 16);
  const json narrow = ask("bytes\t" + problem + " window=9,0\th200")["cache"];
  EXPECT_EQ(narrow["read"], 2 * 10 * kKeyBytes);
  EXPECT_TRUE(ask("bytes\tfwd bf16 q=8 k=8 d=128\th200")["cache"].is_null());
}

TEST(Requests, AreRefusedInTheLibrarysWords) {
  const std::string good = "fwd bf16 b=2 h=4 q=64 k=64 d=64";
  const struct {
    std::string request, text;
  } cases[] = {
      {"parse\tfwd d=banana", parse_problem("fwd d=banana").status().text},
      {"order\tfwd bf16 h=4/3 q=64 k=64 d=64\th200", "num_heads"},
      {"tiles\t" + good + "\tcray-1", "device = 'cray-1': unknown; known: haswell-4"},
      {"tiles\tbwd f32 b=2 h=4 q=64 k=64 d=64\ta100", "computes the forward pass"},
      {"tiles\t" + good + "\th200\tbatch=2", "batch = '2': must be a whole number in [0, 1]"},
      {"tiles\t" + good + "\th200\tsize=2", "field = 'size': tiles takes batch, head, first"},
      {"tiles\t" + good + "\th200\thead", "field = 'head': must be NAME=VALUE"},
      {"order\t" + good + " packed=100,100\th200\tseqlens_q=50,51",
       "cu_seqlens_q[2] = 101: must equal total_q = 100"},
      {"order\t" + good + " packed=100,100\th200\tseqlens_q=50", "must have batch = 2"},
      {"elements\t" + good + "\t\tqueries=65", "queries = '65'"},
      {"softmax\t\t\tscores=1,x", "scores = 'x': must be a number, or -inf"},
      {"sum", "command = 'sum': unknown; known: devices, parse"},
  };
  for (const auto& one : cases) {
    const json refused = ask(one.request);
    ASSERT_TRUE(refused.contains("error")) << one.request;
    EXPECT_NE(refused["error"]["text"].get<std::string>().find(one.text), std::string::npos)
        << one.request << ": " << refused.dump();
  }
}

// What is cut says so, and goes on where it stopped.
TEST(Limits, LargeAnswersComeInParts) {
  const std::string problem = "fwd bf16 h=8 q=65536 k=65536 d=128 causal";
  std::int64_t next = 0, pieces = 0, parts = 0;
  for (bool cut = true; cut; ++parts) {
    const json tiles = ask("tiles\t" + problem + "\th200\tfirst=" + std::to_string(next));
    std::int64_t listed = 0;
    for (const json& piece : tiles["list"]) {
      listed += static_cast<std::int64_t>(piece["tiles"].size());
      EXPECT_EQ(piece["block"].get<std::int64_t>(), pieces++);
    }
    EXPECT_LE(listed, kMostParts);
    cut = tiles["cut"];
    next = cut ? tiles["next"].get<std::int64_t>() : pieces;
    EXPECT_EQ(pieces, next);
    EXPECT_EQ(cut, pieces < tiles["pieces"].get<std::int64_t>());
  }
  EXPECT_GT(parts, 2);
  const json order = ask("order\tfwd bf16 b=16 h=64 q=65536 k=65536 d=128 causal\th200");
  EXPECT_TRUE(order["cut"].get<bool>());
  EXPECT_EQ(static_cast<std::int64_t>(order["list"].size()), kMostParts);
  EXPECT_GT(order["pieces"].get<std::int64_t>(), kMostParts);
}

}  // namespace
}  // namespace tessera::explorer
