// The memory calculator, against numbers worked out by hand.
#include "memory/memory.h"

#include "memory/decode_step.h"

#include <gtest/gtest.h>

#include <cmath>
#include <set>
#include <string>

namespace tessera::tools {
namespace {

constexpr double kKiB = 1024.0;
constexpr double kMiB = 1024.0 * kKiB;
constexpr double kGiB = 1024.0 * kMiB;

const ModelShape& model(std::string_view name) {
  const ModelShape* found = find_model(name);
  EXPECT_NE(found, nullptr) << name;
  static const ModelShape empty;
  return found == nullptr ? empty : *found;
}

TEST(KvCache, GroupedHeads) {
  // 32 layers * 8 heads * (128 + 128) * 2 bytes = 128 KiB a token; 8192 tokens: 1 GiB.
  const KvCache cache = kv_cache(model("llama-3-8b"), {.seqlen = 8192, .batch = 3});
  EXPECT_EQ(cache.per_token, 128 * kKiB);
  EXPECT_EQ(cache.per_sequence, kGiB);
  EXPECT_EQ(cache.total, 3 * kGiB);
  // 80 layers: 320 KiB; without grouping, as Llama-2 7B: 32 * 32 * 256 * 2 = 512 KiB.
  EXPECT_EQ(kv_cache(model("llama-3-70b"), {.seqlen = 1}).per_token, 320 * kKiB);
  EXPECT_EQ(kv_cache(model("llama-2-7b"), {.seqlen = 1}).per_token, 512 * kKiB);
  // 28 * 4 * 256 * 2 = 56 KiB; as fp32 twice that.
  EXPECT_EQ(kv_cache(model("qwen2.5-7b"), {.seqlen = 1}).per_token, 56 * kKiB);
  EXPECT_EQ(kv_cache(model("qwen2.5-7b"), {.seqlen = 1, .element_bytes = 4}).per_token, 112 * kKiB);
}

TEST(KvCache, TypesOfItsOwn) {
  // 32 layers * 8 heads * 256 bytes; and a scale of 4 bytes for each key and value.
  const ModelShape& llama = model("llama-3-8b");
  EXPECT_EQ(kv_cache(llama, {.seqlen = 1, .cache_bytes = 1}).per_token, 64 * kKiB);
  EXPECT_EQ(kv_cache(llama, {.seqlen = 1, .cache_bytes = 1, .token_scales = true}).per_token,
            64 * kKiB + 32 * 8 * 8);
  EXPECT_EQ(kv_cache(llama, {.seqlen = 1, .element_bytes = 4, .cache_bytes = 2}).per_token,
            128 * kKiB);
  // A latent row is one, for all heads; 64 columns keep 16 bits. By group: 656 bytes, FlashMLA's.
  const ModelShape& latent = model("deepseek-v3");
  EXPECT_EQ(kv_cache(latent, {.seqlen = 1, .cache_bytes = 1, .token_scales = true}).per_token,
            61 * (512 + 128 + 4));
  EXPECT_EQ(kv_cache(latent, {.seqlen = 1, .cache_bytes = 1, .group = 128}).per_token, 61 * 656);
  EXPECT_FALSE(validate(Usage{.group = -1}).ok());
  EXPECT_FALSE(validate(Usage{.cache_bytes = 3}).ok());
}

TEST(CacheType, IsATypeAndSaysWhetherKeysHaveScales) {
  const auto e4m3 = parse_cache_type("e4m3/token"), bf16 = parse_cache_type("bf16");
  ASSERT_TRUE(e4m3 && bf16);
  EXPECT_TRUE(e4m3->dtype == Dtype::e4m3 && e4m3->token_scales);
  EXPECT_TRUE(bf16->dtype == Dtype::bf16 && !bf16->token_scales);
  const auto group = parse_cache_type("e4m3/group:128");
  ASSERT_TRUE(group) << group.status().text;
  EXPECT_TRUE(group->dtype == Dtype::e4m3 && !group->token_scales && group->group == 128);
  for (const char* wrong : {"", "bf16/token", "/token", "int8", "e4m3/head", "e4m3/",
                            "e4m3/group:", "e4m3/group:0", "e4m3/group:12x", "bf16/group:128"}) {
    const auto type = parse_cache_type(wrong);
    ASSERT_FALSE(type) << wrong;
    EXPECT_EQ(type.status().text.find("cache = '" + std::string(wrong) + "': must be f32"), 0U)
        << type.status().text;
  }
}

TEST(DecodeStep, HasTheLayersOfAModelAndTheirBytes) {
  const auto llama = layers_of(model("llama-3-8b"), {.batch = 3, .seqlen = 1000});
  ASSERT_TRUE(llama) << llama.status().text;
  ASSERT_EQ(llama->size(), 1U);
  EXPECT_EQ(to_string((*llama)[0].problem), "fwd bf16 b=3 h=32/8 q=1 k=1000 d=128 cache=full");
  EXPECT_EQ((*llama)[0].layers, 32);
  EXPECT_EQ((*llama)[0].bytes, 3.0 * 1000 * 128 * kKiB);
  // 12 of 24 layers see 128 keys; pages are whole: 63 of 16. Scales are 8 bytes a head.
  const auto oss = layers_of(
      model("gpt-oss-20b"), {.seqlen = 1000, .page_size = 16, .cache = CacheType{Dtype::i8, true}});
  ASSERT_TRUE(oss) << oss.status().text;
  ASSERT_EQ(oss->size(), 2U);
  EXPECT_EQ(to_string((*oss)[0].problem),
            "fwd bf16 b=1 h=64/8 q=1 k=1008 d=64 cache=full pages=63x16 sink kv=i8 "
            "scales=none/token/token");
  EXPECT_EQ((*oss)[0].bytes, 12.0 * 1008 * 8 * (128 + 8));
  EXPECT_EQ((*oss)[1].layers, 12);
  EXPECT_EQ((*oss)[1].problem.window_left, 127);
  EXPECT_EQ((*oss)[1].bytes, 12.0 * 128 * 8 * (128 + 8));
  // Latent rows are those of all heads.
  const auto deepseek = layers_of(model("deepseek-v3"), {.batch = 2, .seqlen = 100});
  ASSERT_TRUE(deepseek) << deepseek.status().text;
  EXPECT_EQ(to_string((*deepseek)[0].problem),
            "fwd bf16 b=2 h=128/1 q=1 k=100 d=64/512 cache=full qv");
  EXPECT_EQ((*deepseek)[0].bytes, 61.0 * 2 * 100 * 576 * 2);
  const auto rows = layers_of(
      model("deepseek-v3"),
      {.batch = 2, .seqlen = 100, .cache = CacheType{.dtype = Dtype::e4m3, .group = 128}});
  ASSERT_TRUE(rows) << rows.status().text;
  EXPECT_EQ(to_string((*rows)[0].problem),
            "fwd bf16 b=2 h=128/1 q=1 k=100 d=64/512 cache=full qv v=e4m3 "
            "scales=none/none/group:128");
  EXPECT_EQ((*rows)[0].bytes, 61.0 * 2 * 100 * 656);
  // A window that reaches all keys hides none.
  const auto gemma = layers_of(model("gemma-2-9b"), {.seqlen = 4096, .dtype = Dtype::f16});
  ASSERT_TRUE(gemma) << gemma.status().text;
  EXPECT_EQ(to_string((*gemma)[1].problem),
            "fwd f16 b=1 h=16/8 q=1 k=4096 d=256 cache=full softcap=50");
}

TEST(DecodeStep, SaysWhatHasNone) {
  const auto said = [](const char* name, const DecodeStep& step) {
    const auto layers = layers_of(model(name), step);
    EXPECT_FALSE(layers) << name;
    return layers ? std::string() : layers.status().text;
  };
  EXPECT_EQ(said("bert-base", {}),
            "model = 'bert-base': an encoder, which has no steps of decoding");
  EXPECT_EQ(said("gpt-2", {.cache = CacheType{.dtype = Dtype::e4m3, .group = 128}})
                .find("model = 'gpt-2': no latent rows, which scales by group = 128 columns"),
            0U);
  EXPECT_EQ(said("gpt-2", {.batch = 0}).find("batch = 0: must lie in [1, "), 0U);
  EXPECT_EQ(said("gpt-2", {.seqlen = 0}).find("seqlen = 0: must lie in [1, "), 0U);
  EXPECT_EQ(said("gpt-2", {.cache = CacheType{Dtype::f32, false}}),
            "cache = 'f32': must be that of the queries, bf16, or e4m3 or i8");
}

TEST(KvCache, WindowedLayersStopGrowing) {
  // Mistral: every layer keeps 4096 tokens of 128 KiB: 512 MiB, whatever the length.
  const ModelShape& mistral = model("mistral-7b");
  EXPECT_EQ(kv_cache(mistral, {.seqlen = 4096}).per_sequence, 512 * kMiB);
  EXPECT_EQ(kv_cache(mistral, {.seqlen = 4097}).per_sequence, 512 * kMiB);
  EXPECT_EQ(kv_cache(mistral, {.seqlen = 4095}).per_sequence, 4095 * 128 * kKiB);
  // Gemma-2 9B: 8 * 512 * 2 = 8 KiB a token and layer; 21 layers of 8192 and 21 of 4096 tokens.
  const KvCache gemma = kv_cache(model("gemma-2-9b"), {.seqlen = 8192});
  EXPECT_EQ(gemma.per_token, 336 * kKiB);
  EXPECT_EQ(gemma.per_sequence, 21 * 12288 * 8 * kKiB);
}

TEST(KvCache, LatentAndEncoders) {
  // DeepSeek-V3: 61 layers * 576 * 2 bytes, not 61 * 128 * 320 * 2.
  EXPECT_EQ(kv_cache(model("deepseek-v3"), {.seqlen = 1}).per_token, 61 * 576 * 2);
  EXPECT_EQ(kv_cache(model("bert-base"), {.seqlen = 512}).total, 0.0);
  EXPECT_EQ(kv_cache(model("llama-3-8b"), {.seqlen = 0}).total, 0.0);
}

TEST(AttentionMemory, ScoresAgainstLogSumExp) {
  // GPT-2, 1024 tokens, bf16: a matrix of 12 * 1024 * 1024 * 2 bytes = 24 MiB; scores and weights.
  const AttentionMemory gpt2 = attention_memory(model("gpt-2"), {.seqlen = 1024});
  EXPECT_EQ(gpt2.standard_layer, 48 * kMiB);
  EXPECT_EQ(gpt2.tiled_layer, 48 * kKiB);
  EXPECT_EQ(gpt2.standard_saved, 12 * 24 * kMiB);
  EXPECT_EQ(gpt2.tiled_saved, 12 * 48 * kKiB);
  // Query heads count, not key/value heads; the batch multiplies.
  const AttentionMemory llama = attention_memory(model("llama-3-8b"), {.seqlen = 8192, .batch = 2});
  EXPECT_EQ(llama.standard_layer, 16 * kGiB);
  EXPECT_EQ(llama.tiled_layer, 2 * 32 * 8192 * 4);
}

TEST(Traffic, CountedByHand) {
  // N = 8, d = 2, 2 bytes, 32 bytes of SRAM: 4 tiles of 2 rows of 4 bytes fit; 4 passes.
  const auto forward = head_traffic(TrafficPass::forward, 8, 2, 2, 32);
  ASSERT_TRUE(forward) << forward.status().text;
  EXPECT_EQ(forward->block, 2);
  EXPECT_EQ(forward->standard, 4 * 32 + 4 * 128);         // tensors of 32 bytes, matrices of 128
  EXPECT_EQ(forward->tiled, 2 * 32 + 4 * (2 * 32) + 32);  // log-sum-exp: 8 floats
  // 7 tiles of 4 bytes a row: one row in 32 bytes; 8 passes.
  const auto backward = head_traffic(TrafficPass::backward, 8, 2, 2, 32);
  ASSERT_TRUE(backward) << backward.status().text;
  EXPECT_EQ(backward->block, 1);
  EXPECT_EQ(backward->standard, 8 * 32 + 7 * 128);
  EXPECT_EQ(backward->tiled, (2 * 32 + 32) + 4 * 32 + 8 * (4 * 32 + 2 * 32));
  // Everything fits: each tensor moves once.
  const auto once = head_traffic(TrafficPass::forward, 8, 2, 2, 1 << 20);
  ASSERT_TRUE(once) << once.status().text;
  EXPECT_EQ(once->block, 8);
  EXPECT_EQ(once->tiled, 4 * 32 + 32);
}

TEST(Traffic, GrowsAsTheComplexitySays) {
  const GpuFacts* gpu = find_gpu("h100");
  ASSERT_NE(gpu, nullptr);
  for (const auto pass : {TrafficPass::forward, TrafficPass::backward}) {
    const auto tiled = [&](std::int64_t n, std::int64_t d, std::int64_t sram) {
      return head_traffic(pass, n, d, 2, sram).value().tiled;
    };
    const std::int64_t n = 1 << 20, sram = gpu->sram_bytes;
    EXPECT_NEAR(tiled(2 * n, 128, sram) / tiled(n, 128, sram), 4.0, 0.05);  // N^2
    EXPECT_NEAR(tiled(n, 256, sram) / tiled(n, 128, sram), 4.0, 0.1);       // d^2
    EXPECT_NEAR(tiled(n, 128, sram / 2) / tiled(n, 128, sram), 2.0, 0.05);  // 1 / M
    EXPECT_GT(head_traffic(pass, n, 128, 2, sram)->standard, 1.5 * tiled(n, 128, sram));
  }
}

TEST(Traffic, RefusesWhatCannotBe) {
  const auto small = head_traffic(TrafficPass::forward, 8, 128, 2, 1023);
  ASSERT_FALSE(small);
  EXPECT_EQ(small.status().code, Code::invalid);
  EXPECT_NE(small.status().text.find("sram_bytes = 1023"), std::string::npos);
  EXPECT_NE(small.status().text.find("1024"), std::string::npos);
  EXPECT_TRUE(head_traffic(TrafficPass::forward, 8, 128, 2, 1024));
  EXPECT_NE(head_traffic(TrafficPass::forward, 0, 1, 2, 64).status().text.find("seqlen = 0"),
            std::string::npos);
  EXPECT_FALSE(head_traffic(TrafficPass::forward, INT64_MAX, 1, 2, 64));
  EXPECT_FALSE(head_traffic(TrafficPass::forward, 8, INT64_MAX, 2, 64));
}

TEST(Memory, KnownNamesAreUniqueAndValid) {
  std::set<std::string_view> names;
  for (const ModelShape& shape : known_models()) {
    EXPECT_TRUE(names.insert(shape.name).second) << shape.name;
    const Status status = validate(shape);
    EXPECT_TRUE(status) << shape.name << ": " << status.text;
    EXPECT_EQ(find_model(shape.name), &shape);
  }
  for (const GpuFacts& gpu : known_gpus()) {
    EXPECT_TRUE(names.insert(gpu.name).second) << gpu.name;
    EXPECT_EQ(find_gpu(gpu.name), &gpu);
    EXPECT_GT(gpu.bytes_per_second, gpu.memory_bytes) << gpu.name;
  }
  EXPECT_EQ(find_model("nobody"), nullptr);
  EXPECT_EQ(find_gpu(""), nullptr);
}

TEST(Memory, ErrorsNameTheField) {
  const auto says = [](const Status& status, std::string_view text) {
    return !status && status.code == Code::invalid && status.text.find(text) != std::string::npos;
  };
  ModelShape shape = model("gemma-2-9b");
  const auto with = [&shape](auto change) {
    ModelShape changed = shape;
    change(changed);
    return validate(changed);
  };
  EXPECT_TRUE(says(with([](ModelShape& m) { m.layers = 0; }), "layers = 0"));
  EXPECT_TRUE(says(with([](ModelShape& m) { m.num_heads = -1; }), "num_heads = -1"));
  EXPECT_TRUE(says(with([](ModelShape& m) { m.num_heads_k = 0; }), "num_heads_k = 0"));
  EXPECT_TRUE(says(with([](ModelShape& m) { m.num_heads_k = 3; }), "num_heads = 16"));
  EXPECT_TRUE(says(with([](ModelShape& m) { m.head_dim = 0; }), "head_dim = 0"));
  EXPECT_TRUE(says(with([](ModelShape& m) { m.head_dim_v = 0; }), "head_dim_v = 0"));
  EXPECT_TRUE(says(with([](ModelShape& m) { m.window = 0; }), "window = 0"));
  EXPECT_TRUE(says(with([](ModelShape& m) { m.window_layers = 43; }), "window_layers = 43"));
  EXPECT_TRUE(says(with([](ModelShape& m) { m.latent = -1; }), "latent = -1"));
  EXPECT_TRUE(says(validate(Usage{.seqlen = -1}), "seqlen = -1"));
  EXPECT_TRUE(says(validate(Usage{.batch = -2}), "batch = -2"));
  EXPECT_TRUE(says(validate(Usage{.element_bytes = 3}), "element_bytes = 3"));
  // The largest shape that is accepted stays finite.
  ModelShape huge{"", 1, 1, 1, 1, 1, 0, 0, 0, true, ""};
  const std::int64_t most = std::int64_t{1} << 40;
  huge.layers = huge.num_heads = huge.num_heads_k = huge.head_dim = huge.head_dim_v = most;
  const Usage usage{.seqlen = most, .batch = most, .element_bytes = 4};
  ASSERT_TRUE(validate(huge));
  ASSERT_TRUE(validate(usage));
  EXPECT_TRUE(std::isfinite(kv_cache(huge, usage).total));
  EXPECT_TRUE(std::isfinite(attention_memory(huge, usage).standard_saved));
}

}  // namespace
}  // namespace tessera::tools
