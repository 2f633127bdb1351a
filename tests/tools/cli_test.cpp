// The tessera command as a user types it: exit codes, one-line errors, JSON that parses, and `run`
// on real files against the double reference.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "cli.h"
#include "files/tensor_file.h"
#include "reference/reference.h"
#include "tessera/device.hpp"
#include "tools/command.h"
#include "tools/temporary_folder.h"

namespace tessera::tools {
namespace {

using Json = nlohmann::json;

std::vector<float> normal(std::mt19937& random, std::int64_t count) {
  std::normal_distribution<float> distribution;
  std::vector<float> values(static_cast<std::size_t>(count));
  for (float& x : values) x = distribution(random);
  return values;
}

void write(const std::string& path, const std::vector<std::int64_t>& shape,
           const std::vector<float>& values) {
  const std::vector<NamedTensor> tensors = {{"x", Element::f32, shape, values.data()}};
  const Status status = write_tensors(path, tensors);
  ASSERT_TRUE(status.ok()) << status.text;
}

/// q, k, v on disk, and what attention of them is.
class RunFiles : public testing::Test {
 protected:
  static constexpr std::int64_t kBatch = 2, kHeads = 4, kHeadsK = 2, kSq = 37, kSk = 53, kD = 16;

  void SetUp() override {
    seed_ = std::random_device()();
    std::mt19937 random(seed_);
    q_ = normal(random, kBatch * kSq * kHeads * kD);
    k_ = normal(random, kBatch * kSk * kHeadsK * kD);
    v_ = normal(random, kBatch * kSk * kHeadsK * kD);
    write(folder_ / "q.npy", {kBatch, kSq, kHeads, kD}, q_);
    write(folder_ / "k.npy", {kBatch, kSk, kHeadsK, kD}, k_);
    write(folder_ / "v.npy", {kBatch, kSk, kHeadsK, kD}, v_);
  }

  std::vector<std::string> command(const std::vector<std::string>& more) const {
    std::vector<std::string> words = {
        "run", "-q", folder_ / "q.npy", "-k", folder_ / "k.npy", "-v", folder_ / "v.npy"};
    words.insert(words.end(), more.begin(), more.end());
    return words;
  }

  reference::Outputs expected(const std::string& options, const std::vector<float>* qv = nullptr) {
    const auto problem = parse_problem("b=2 h=4/2 q=37 k=53 d=16 " + options);
    EXPECT_TRUE(problem.ok()) << problem.status().text;
    Tensors t;
    t.q = {q_.data(), kSq * kHeads * kD, kHeads * kD, kD};
    t.k = {k_.data(), kSk * kHeadsK * kD, kHeadsK * kD, kD};
    t.v = {v_.data(), kSk * kHeadsK * kD, kHeadsK * kD, kD};
    if (qv != nullptr) t.qv = {qv->data(), kSq * kHeads * kD, kHeads * kD, kD};
    return reference::attend(reference::Inputs(*problem, t));
  }

  void expect_file(const std::string& address, const std::vector<std::int64_t>& shape,
                   const std::vector<double>& values) const {
    const Result<FileTensor> tensor = read_tensor(address);
    ASSERT_TRUE(tensor.ok()) << tensor.status().text;
    ASSERT_EQ(tensor->shape, shape);
    ASSERT_EQ(tensor->element, Element::f32);
    const auto* data = static_cast<const float*>(tensor->data);
    for (std::size_t i = 0; i < values.size(); ++i) {
      ASSERT_NEAR(data[i], values[i], 1e-5) << "element " << i << " seed " << seed_;
    }
  }

  TemporaryFolder folder_;
  unsigned seed_ = 0;
  std::vector<float> q_, k_, v_;
};

TEST_F(RunFiles, WritesOutputAndLse) {
  const Ran ran = tessera(command({"-o", folder_ / "o.npy", "--lse", folder_ / "lse.npy",
                                   "--causal", "--softcap", "3", "--json"}));
  ASSERT_EQ(ran.code, kSuccess) << ran.err;
  const reference::Outputs want = expected("causal softcap=3");
  expect_file(folder_ / "o.npy", {kBatch, kSq, kHeads, kD}, want.o);
  expect_file(folder_ / "lse.npy", {kBatch, kHeads, kSq}, want.lse);
  EXPECT_EQ(Json::parse(ran.out)["problem"], "fwd f32 b=2 h=4/2 q=37 k=53 d=16 causal softcap=3");
}

TEST_F(RunFiles, OneSafetensorsFileTakesBoth) {
  const std::string out = folder_ / "out.safetensors";
  const Ran ran = tessera(command({"-o", out, "--window", "5,2", "--align", "tl"}));
  ASSERT_EQ(ran.code, kSuccess) << ran.err;
  const reference::Outputs want = expected("window=5,2 align=tl");
  expect_file(out + ":o", {kBatch, kSq, kHeads, kD}, want.o);
}

TEST_F(RunFiles, HeadsFirstIsTheSameAttention) {
  // One batch entry and one head: (1, 1, s, d) means the same in both layouts, up to the order
  // given.
  std::mt19937 random(seed_);
  const std::vector<float> x = normal(random, std::int64_t{3} * 20 * 8);
  write(folder_ / "bhsd.npy", {1, 3, 20, 8}, x);
  std::vector<float> y(x.size());
  for (std::size_t h = 0; h < 3; ++h) {
    for (std::size_t s = 0; s < 20; ++s) {
      for (std::size_t c = 0; c < 8; ++c) y[(s * 3 + h) * 8 + c] = x[(h * 20 + s) * 8 + c];
    }
  }
  write(folder_ / "bshd.npy", {1, 20, 3, 8}, y);
  for (const std::string layout : {"bhsd", "bshd"}) {
    const std::string in = folder_ / layout + ".npy";
    const Ran ran = tessera({"run", "-q", in, "-k", in, "-v", in, "-o", folder_ / layout + "_o.npy",
                             "--layout", layout, "--quiet"});
    ASSERT_EQ(ran.code, kSuccess) << ran.err;
    EXPECT_EQ(ran.out, "");
  }
  const auto heads_first = read_tensor(folder_ / "bhsd_o.npy");
  const auto seq_first = read_tensor(folder_ / "bshd_o.npy");
  ASSERT_TRUE(heads_first.ok() && seq_first.ok());
  ASSERT_EQ(heads_first->shape, (std::vector<std::int64_t>{1, 3, 20, 8}));
  const auto* a = static_cast<const float*>(heads_first->data);
  const auto* b = static_cast<const float*>(seq_first->data);
  for (std::size_t h = 0; h < 3; ++h) {
    for (std::size_t s = 0; s < 20; ++s) {
      for (std::size_t c = 0; c < 8; ++c) {
        ASSERT_EQ(a[(h * 20 + s) * 8 + c], b[(s * 3 + h) * 8 + c]);
      }
    }
  }
}

TEST_F(RunFiles, ASecondQueryMeetsValues) {
  std::mt19937 random(seed_);
  const std::vector<float> qv = normal(random, kBatch * kSq * kHeads * kD);
  write(folder_ / "qv.npy", {kBatch, kSq, kHeads, kD}, qv);
  const Ran ran =
      tessera(command({"--qv", folder_ / "qv.npy", "-o", folder_ / "o.npy", "--causal", "--json"}));
  ASSERT_EQ(ran.code, kSuccess) << ran.err;
  EXPECT_EQ(Json::parse(ran.out)["problem"], "fwd f32 b=2 h=4/2 q=37 k=53 d=16 causal qv");
  expect_file(folder_ / "o.npy", {kBatch, kSq, kHeads, kD}, expected("causal qv", &qv).o);
}

/// A result never lands on an input unasked, whatever leads there; asked, it is right, though the
/// input is read while it is written.
TEST_F(RunFiles, AnInputIsReplacedByForceOnly) {
  namespace fs = std::filesystem;
  fs::create_symlink(folder_ / "v.npy", folder_ / "symbolic.npy");
  fs::create_hard_link(folder_ / "k.npy", folder_ / "hard.npy");
  fs::create_directory(folder_ / "sub");
  const Result<FileTensor> x = read_tensor(folder_ / "q.npy");
  ASSERT_TRUE(x.ok());
  const std::vector<NamedTensor> tensors = {{"x", x->element, x->shape, x->data},
                                            {"y", x->element, x->shape, x->data}};
  ASSERT_TRUE(write_tensors(folder_ / "x.safetensors", tensors).ok());
  write(folder_ / "sink.npy", {kHeads}, std::vector<float>(kHeads, 0.5F));
  const std::string other = folder_ / "o.npy";
  const struct {
    std::vector<std::string> words;
    const char* named;
  } cases[] = {
      {command({"-o", folder_ / "q.npy"}), "that --q reads"},
      {command({"-o", folder_ / "sub/../k.npy"}), "that --k reads"},
      {command({"-o", fs::relative(folder_ / "k.npy").string()}), "that --k reads"},
      {command({"-o", folder_ / "hard.npy"}), "that --k reads"},
      {command({"-o", folder_ / "symbolic.npy"}), "that --v reads"},
      {command({"-o", other, "--lse", folder_ / "v.npy"}), "--lse = "},
      {command({"-o", folder_ / "sink.npy", "--sink", folder_ / "sink.npy"}), "that --sink reads"},
      {command({"-o", other, "--lse", folder_ / "sink.npy", "--bias", folder_ / "sink.npy"}),
       "that --bias reads"},
      {command({"-o", folder_ / "x.safetensors", "--alibi-slopes", folder_ / "x.safetensors:y"}),
       "that --alibi-slopes reads"},
      {command({"-o", folder_ / "k.npy", "--cu-seqlens-q", folder_ / "q.npy", "--cu-seqlens-k",
                folder_ / "q.npy"}),
       "that --k reads"},
  };
  std::vector<std::string> before;
  const char* const files[] = {"q.npy", "k.npy", "v.npy", "sink.npy", "x.safetensors"};
  for (const char* file : files) before.push_back(bytes_of(folder_ / file));
  for (const auto& c : cases) {
    const Ran ran = tessera(c.words);
    EXPECT_EQ(ran.code, kBadInput) << c.named << ": " << ran.err;
    EXPECT_NE(ran.err.find(c.named), std::string::npos) << c.named << ": " << ran.err;
    EXPECT_NE(ran.err.find("--force"), std::string::npos) << ran.err;
  }
  for (std::size_t i = 0; i < before.size(); ++i) {
    EXPECT_EQ(bytes_of(folder_ / files[i]), before[i]) << files[i];
  }
  EXPECT_FALSE(fs::exists(other));

  const reference::Outputs want = expected("");
  for (const char* file : {"q.npy", "hard.npy", "symbolic.npy"}) {
    const Ran ran = tessera(
        command({"-o", folder_ / file, "--lse", folder_ / "lse.npy", "--force", "--quiet"}));
    ASSERT_EQ(ran.code, kSuccess) << ran.err;
    expect_file(folder_ / file, {kBatch, kSq, kHeads, kD}, want.o);
    expect_file(folder_ / "lse.npy", {kBatch, kHeads, kSq}, want.lse);
    for (std::size_t i = 0; i < 3; ++i) bytes_to(folder_ / files[i], before[i]);
  }
  EXPECT_TRUE(fs::is_symlink(folder_ / "symbolic.npy"));
}

/// Two results in one file would lose one; an older file that is nobody's input is replaced.
TEST_F(RunFiles, ResultsDoNotShareAFile) {
  namespace fs = std::filesystem;
  const std::string out = folder_ / "o.npy";
  fs::create_directory(folder_ / "sub");
  for (const bool exists : {false, true}) {
    if (exists) bytes_to(out, "an older file");
    for (const std::string& lse : {out, folder_ / "sub/../o.npy", folder_ / "./o.npy"}) {
      const Ran ran = tessera(command({"-o", out, "--lse", lse, "--force"}));
      EXPECT_EQ(ran.code, kBadInput) << lse;
      EXPECT_NE(ran.err.find("--out and --lse both name"), std::string::npos) << ran.err;
    }
  }
  EXPECT_EQ(bytes_of(out), "an older file");
  const Ran ran = tessera(command({"-o", out, "--quiet"}));
  ASSERT_EQ(ran.code, kSuccess) << ran.err;
  expect_file(out, {kBatch, kSq, kHeads, kD}, expected("").o);
}

/// Causal beside a window to the left means both.
TEST_F(RunFiles, CausalWithAWindowToTheLeft) {
  const reference::Outputs want = expected("window=9,0");
  for (const char* window : {"9,0", "9,-1"}) {
    const Ran ran = tessera(command({"-o", folder_ / "o.npy", "--causal", "--window", window}));
    ASSERT_EQ(ran.code, kSuccess) << ran.err;
    expect_file(folder_ / "o.npy", {kBatch, kSq, kHeads, kD}, want.o);
  }
}

/// Offsets that divide another number of rows, or fall, name their file.
TEST_F(RunFiles, OffsetsDivideTheirFile) {
  std::mt19937 random(seed_);
  write(folder_ / "x.npy", {10, 2, 8}, normal(random, 160));
  const std::string x = folder_ / "x.npy";
  const auto run = [&](const std::vector<std::int32_t>& offsets) {
    const std::vector<NamedTensor> tensors = {
        {"n", Element::i32, {static_cast<std::int64_t>(offsets.size())}, offsets.data()}};
    EXPECT_TRUE(write_tensors(folder_ / "n.npy", tensors).ok());
    return tessera({"run", "-q", x, "-k", x, "-v", x, "-o", folder_ / "o.npy", "--cu-seqlens-q",
                    folder_ / "n.npy", "--cu-seqlens-k", folder_ / "n.npy"});
  };
  for (const auto& offsets : std::vector<std::vector<std::int32_t>>{
           {0, 4, 9}, {0, 4, 11}, {1, 4, 10}, {0, 7, 4, 10}, {0, -3, 10}}) {
    const Ran ran = run(offsets);
    EXPECT_EQ(ran.code, kBadInput);
    EXPECT_NE(ran.err.find("n.npy: offsets must begin with 0"), std::string::npos) << ran.err;
  }
  const Ran ran = run({0, 4, 4, 10});
  EXPECT_EQ(ran.code, kSuccess) << ran.err;
}

/// bf16 from NumPy: words without a name are refused with the flag that names them, which then
/// counts for every file of numbers.
TEST_F(RunFiles, NamelessWordsAreReadAsAsked) {
  const std::vector<std::uint16_t> ones(kBatch * kSk * kHeads * kD, 0x3F80);
  const auto nameless = [&](const std::string& path, const std::vector<std::int64_t>& shape) {
    const std::vector<NamedTensor> tensors = {{"x", Element::bf16, shape, ones.data()}};
    EXPECT_TRUE(write_tensors(path, tensors).ok());
    return path;
  };
  const std::string k = nameless(folder_ / "k16.npy", {kBatch, kSk, kHeadsK, kD});
  const std::string sink = nameless(folder_ / "s16.npy", {kHeads});
  const std::string bias = nameless(folder_ / "b16.npy", {kSq, 1});
  const std::string out = folder_ / "o.npy";
  for (const auto& more : std::vector<std::vector<std::string>>{
           {"-k", k}, {"--sink", sink}, {"--bias", bias}, {"--alibi-slopes", sink}}) {
    std::vector<std::string> words = command({"-o", out});
    if (more[0] == "-k") {
      words[4] = k;
    } else {
      words.insert(words.end(), more.begin(), more.end());
    }
    const Ran refused = tessera(words);
    EXPECT_EQ(refused.code, kCannot) << more[0];
    EXPECT_NE(refused.err.find("say so with --u2-is-bf16"), std::string::npos) << refused.err;
    words.emplace_back("--u2-is-bf16");
    const Ran ran = tessera(words);
    EXPECT_EQ(ran.code, kSuccess) << more[0] << ": " << ran.err;
  }
  const Ran offsets = tessera(command({"-o", out, "--cu-seqlens-q", sink, "--cu-seqlens-k", sink}));
  EXPECT_NE(offsets.code, kSuccess);
  EXPECT_EQ(offsets.err.find("--u2-is-bf16"), std::string::npos) << offsets.err;
}

TEST_F(RunFiles, WrongInputIsOneLineAndExitCode2) {
  const std::string out = folder_ / "o.npy";
  std::filesystem::create_directory(folder_ / "folder.npy");
  const struct {
    std::vector<std::string> words;
    const char* named;
  } cases[] = {
      {{"run", "-q", folder_ / "none.npy", "-k", folder_ / "k.npy", "-v", folder_ / "v.npy", "-o",
        out},
       "none.npy"},
      {{"run", "-q", folder_ / "k.npy", "-k", folder_ / "q.npy", "-v", folder_ / "v.npy", "-o",
        out},
       "must be equal"},
      {command({"-o", out, "--softcap", "-1"}), "softcap = -1"},
      {command({"-o", out, "--dropout-p", "1"}), "dropout_p = 1"},
      {command({"-o", out, "--window", "-7,0"}), "--window: must be a whole number from -1"},
      {command({"-o", out, "--window", "5,2", "--causal"}), "--window = 5,2"},
      {command({"-o", out, "--bias", folder_ / "q.npy"}), "must broadcast"},
      {command({"-o", out, "--sink", folder_ / "q.npy"}), "must be (4,)"},
      {command({"-o", out, "--qv", folder_ / "k.npy"}), "must be (2, 37, 4, 16)"},
      {command({"-o", out, "--cu-seqlens-q", folder_ / "q.npy"}), "give both or neither"},
      {command({"-o", out, "--device", "abacus"}), "abacus"},
      {command({"-o", folder_ / "o.txt"}), "o.txt"},
      {command({"-o", folder_ / "folder.npy"}), "is not a regular file; it will not be replaced"},
      {command({}), "--out"},
      {{"fly"}, "fly"},
      {{"check", "q=4 k=4"}, "head_dim = 0"},
      {{"bench"}, "no problem given"},
      {{"bench", "--model", "gpt-5"}, "model = 'gpt-5': unknown; known: llama-2-7b"},
      {{"bench", "--model", "minilm-l6"}, "an encoder"},
      {{"bench", "--model", "gpt-2", "--cache", "fp8"}, "cache = 'fp8': must be"},
      {{"bench", "--model", "gpt-2", "q=4 k=4 d=8"}, "excludes"},
      {{"bench", "q=4 k=4 d=8", "--batch", "2"}, "requires --model"},
      {{"check"}, "no problem given"},
      {{"check", "--file", folder_ / "none"}, "none: cannot be read"},
      {{"plan", "d=64 q=5 k=5 h=3/2"}, "num_heads_k = 2"},
  };
  for (const auto& c : cases) {
    const Ran ran = tessera(c.words);
    EXPECT_EQ(ran.code, kBadInput) << c.named << ": " << ran.err;
    const std::string said = ran.err + ran.out;
    EXPECT_NE(said.find(c.named), std::string::npos) << c.named << ": " << said;
  }
  EXPECT_FALSE(std::filesystem::exists(out));
}

TEST(Cli, CheckPassesAndPrintsItsSeed) {
  const Ran ran =
      tessera({"check", "bwd f32 b=1 h=4/2 q=33 k=40 d=24 causal sink", "--count", "3", "--json"});
  ASSERT_EQ(ran.code, kSuccess) << ran.err << ran.out;
  const Json json = Json::parse(ran.out);
  ASSERT_EQ(json["results"].size(), 3U);
  EXPECT_EQ(json["results"][1]["seed"].get<std::uint64_t>(),
            json["results"][0]["seed"].get<std::uint64_t>() + 1);
  EXPECT_TRUE(json["results"][0]["pass"].get<bool>());
  const Json output = json["results"][0]["outputs"][2];
  EXPECT_EQ(output["output"], "dv");
  EXPECT_GT(output["largest"].get<double>(), output["error"].get<double>());
  EXPECT_LE(output["error"].get<double>(), output["bound"].get<double>());
  const Ran several = tessera({"check", "fwd f32 q=3 k=4 d=8", "fwd f16 q=5 k=4 d=8", "--json"});
  ASSERT_EQ(several.code, kSuccess) << several.err << several.out;
  const Json both = Json::parse(several.out)["results"];
  ASSERT_EQ(both.size(), 2U);
  EXPECT_NE(both[0]["problem"].get<std::string>().find("q=3"), std::string::npos);
  EXPECT_NE(both[1]["problem"].get<std::string>().find("fwd f16"), std::string::npos);
  const Ran table = tessera({"check", "fwd f32 q=33 k=40 d=24", "--seed", "64"});
  EXPECT_NE(table.out.find("bound  largest |value|"), std::string::npos) << table.out;
}

TEST(Cli, BenchCountsOperationsAndSeconds) {
  const Ran ran = tessera({"bench", "fwd f32 h=2 q=256 k=256 d=64", "--seconds", "0.05", "--json"});
  ASSERT_EQ(ran.code, kSuccess) << ran.err;
  const Json row = Json::parse(ran.out)[0];
  // Rates are checked against each other and not against a bound: another process may take the
  // cores during either measurement.
  const double rate = row["flops_per_second"].get<double>();
  const double peak = row["peak_flops_per_second"].get<double>();
  EXPECT_DOUBLE_EQ(rate * row["seconds"].get<double>(), 4.0 * 2 * 256 * 256 * 64);
  EXPECT_DOUBLE_EQ(row["share_of_peak"].get<double>() * peak, rate);
  EXPECT_GT(peak, 1e8);
  EXPECT_LT(peak, 1e14);
  EXPECT_EQ(row["three_step_bytes"].get<double>(), 2.0 * 2 * 256 * 256 * 4);
}

TEST(Cli, BenchMeasuresAStepOfAModel) {
  const Ran ran = tessera({"bench", "--model", "gpt-oss-20b", "--seqlen", "200", "--cache", "e4m3",
                           "--device", "cpu", "--seconds", "0.01", "--json"});
  ASSERT_EQ(ran.code, kSuccess) << ran.err;
  const Json kinds = Json::parse(ran.out);
  ASSERT_EQ(kinds.size(), 2U);
  // 12 layers, 8 heads, 64 columns of keys and of values: of 200 keys, and of a window of 128.
  EXPECT_EQ(kinds[0]["bytes"].get<double>(), 12.0 * 200 * 8 * 128);
  EXPECT_EQ(kinds[1]["bytes"].get<double>(), 12.0 * 128 * 8 * 128);
  for (const Json& kind : kinds) {
    EXPECT_EQ(kind["layers"], 12);
    EXPECT_DOUBLE_EQ(kind["seconds"].get<double>(), 12 * kind["one"]["seconds"].get<double>());
    EXPECT_DOUBLE_EQ(kind["predicted_seconds"].get<double>() *
                         kind["one"]["peak_read_bytes_per_second"].get<double>(),
                     kind["bytes"].get<double>());
  }
}

TEST(Cli, PlanAndInfoSpeakJson) {
  const Ran planned =
      tessera({"plan", "fwd bf16 h=8 q=64 k=64 d=64", "--device", "zen4-16", "--json"});
  ASSERT_EQ(planned.code, kSuccess) << planned.err;
  EXPECT_EQ(Json::parse(planned.out)["kernel"], "cpu.avx512_bf16.forward.tile.bf16");
  const Ran decoded = tessera(
      {"plan", "fwd bf16 b=64 h=32/8 q=1 k=8192 d=128 cache=after", "--device", "h200", "--json"});
  ASSERT_EQ(decoded.code, kSuccess) << decoded.err;
  const Json plan = Json::parse(decoded.out);
  EXPECT_EQ(plan["spans"], 256);
  EXPECT_EQ(plan["unit_keys"], 64);
  EXPECT_EQ(plan["split_keys"], 0);
  EXPECT_EQ(plan["longest_keys"], 8192);
  EXPECT_EQ(plan["key_bytes"], 2147483648);
  const Ran info = tessera({"info", "--json"});
  ASSERT_EQ(info.code, kSuccess) << info.err;
  EXPECT_GT(Json::parse(info.out)["catalog"].size(), 5U);
}

/// What a user sends of a machine: every kind of kernel, judged; one that it has not got is no
/// fault.
TEST(Cli, ReportSaysWhatIsRight) {
  const Ran report = tessera({"report", "--device", "cpu", "--judge-only", "--json"});
  ASSERT_EQ(report.code, kSuccess) << report.out << report.err;
  const Json said = Json::parse(report.out);
  EXPECT_EQ(said["device"], this_cpu().name);
  ASSERT_GT(said["lines"].size(), 10U);
  for (const Json& line : said["lines"]) {
    EXPECT_EQ(line["result"], "right") << line;
    EXPECT_EQ(line["kernel"].get<std::string>().substr(0, 4), "cpu.") << line;
  }
  const Ran elsewhere = tessera({"report", "--device", "no-such-device"});
  EXPECT_NE(elsewhere.code, kSuccess);
  EXPECT_NE(elsewhere.err.find("no-such-device"), std::string::npos) << elsewhere.err;
}

/// With a GPU its facts are printed, without one the reason; asked for by name it is an error then.
TEST(Cli, TheGpuIsNamedOrItsAbsenceExplained) {
  const Ran info = tessera({"info", "--json"});
  const Json gpu = Json::parse(info.out)["gpu"];
  EXPECT_GT(gpu["rest"].get<std::string>().size(), 10U);
  const Ran planned = tessera({"plan", "fwd bf16 h=8 q=64 k=64 d=64", "--device", "gpu", "--json"});
  if (this_gpu()) {
    EXPECT_GE(gpu["usable"].size(), 1U);
    EXPECT_EQ(planned.code, kSuccess);
    EXPECT_TRUE(Json::parse(planned.out)["kernel"].get<std::string>().starts_with("sm90."));
  } else {
    EXPECT_EQ(gpu["usable"].size(), 0U);
    EXPECT_EQ(planned.code, kCannot);
    EXPECT_NE(planned.err.find(gpu["rest"].get<std::string>()), std::string::npos);
  }
}

/// Beside this program there is no site; `./dev docs --check` sees the command find one.
TEST(Cli, DocsThatAreNotThereAreSaidToBeBuilt) {
  const Ran ran = tessera({"docs", "--path"});
  EXPECT_EQ(ran.code, kCannot);
  EXPECT_NE(ran.err.find("share/doc/tessera/html/index.html"), std::string::npos) << ran.err;
  EXPECT_NE(ran.err.find("`./dev docs` builds it"), std::string::npos) << ran.err;
}

TEST(Cli, HelpIsComplete) {
  for (const char* command :
       {"run", "check", "bench", "plan", "memory", "cache", "info", "report", "docs"}) {
    const Ran ran = tessera({command, "--help"});
    EXPECT_EQ(ran.code, kSuccess);
    EXPECT_NE(ran.out.find("Options:"), std::string::npos) << command;
  }
  const Ran ran = tessera({"--help"});
  EXPECT_NE(ran.out.find("Exit codes"), std::string::npos);
}

}  // namespace
}  // namespace tessera::tools
