// Every argument wrong in every way: the named code, and a text that names the argument. Nothing
// crashes, nothing is written.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "check/runs.h"
#include "tessera/tessera.h"

namespace tessera::tools {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();

/// Of 8 bits; `words`: its scales, and more.
Problem scaled(const std::string& words, const std::string& types = "fwd e4m3") {
  return parse(types + " b=2 h=4/2 q=4 k=5 d=8 scales=" + words);
}

struct WrongProblem {
  const char* names;  ///< what the text must contain
  void (*spoil)(Problem& p);
};

const WrongProblem kWrongProblems[] = {
    {"batch", [](Problem& p) { p.batch = -1; }},
    {"batch", [](Problem& p) { p.batch = kMaxBatch + 1; }},
    {"num_heads", [](Problem& p) { p.num_heads = 0; }},
    {"num_heads", [](Problem& p) { p.num_heads = -4; }},
    {"num_heads", [](Problem& p) { p.num_heads = p.num_heads_k = kMaxHeads + 1; }},
    {"num_heads_k", [](Problem& p) { p.num_heads_k = 0; }},
    {"num_heads_k", [](Problem& p) { p.num_heads_k = -1; }},
    {"num_heads_k", [](Problem& p) { p.num_heads_k = 3; }},
    {"num_heads_k", [](Problem& p) { p.num_heads_k = 8; }},
    {"seqlen_q", [](Problem& p) { p.seqlen_q = -1; }},
    {"seqlen_q", [](Problem& p) { p.seqlen_q = kMaxSeqlen + 1; }},
    {"seqlen_k", [](Problem& p) { p.seqlen_k = -7; }},
    {"seqlen_k", [](Problem& p) { p.seqlen_k = kMost; }},
    {"head_dim", [](Problem& p) { p.head_dim = 0; }},
    {"head_dim", [](Problem& p) { p.head_dim = kMaxHeadDim + 1; }},
    {"head_dim_v", [](Problem& p) { p.head_dim_v = 0; }},
    {"head_dim_v", [](Problem& p) { p.head_dim_v = -64; }},
    {"total_q", [](Problem& p) { p.total_q = 5; }},
    {"total_k", [](Problem& p) { p.total_k = -5; }},
    {"total_q",
     [](Problem& p) {
       p.packed = true;
       p.total_q = 9;
     }},
    {"total_q",
     [](Problem& p) {
       p.packed = true;
       p.total_q = -1;
     }},
    {"total_k",
     [](Problem& p) {
       p.packed = true;
       p.total_k = 11;
     }},
    {"softmax_scale", [](Problem& p) { p.softmax_scale = kNan; }},
    {"softmax_scale", [](Problem& p) { p.softmax_scale = kInfinity; }},
    {"softcap", [](Problem& p) { p.softcap = -1.0F; }},
    {"softcap", [](Problem& p) { p.softcap = kNan; }},
    {"softcap", [](Problem& p) { p.softcap = kInfinity; }},
    {"window_left", [](Problem& p) { p.window_left = -2; }},
    {"window_right", [](Problem& p) { p.window_right = -kMost; }},
    {"dropout_p", [](Problem& p) { p.dropout_p = -0.1F; }},
    {"dropout_p", [](Problem& p) { p.dropout_p = 1.0F; }},
    {"dropout_p", [](Problem& p) { p.dropout_p = kNan; }},
    {"dropout_p", [](Problem& p) { p.dropout_p = 1e-9F; }},
    {"bias", [](Problem& p) { p.bias = BiasShape{true, true, true, true, Dtype::f16}; }},
    {"dtype", [](Problem& p) { p.dtype = static_cast<Dtype>(7); }},
    {"dtype_o", [](Problem& p) { p.dtype_o = Dtype::f16; }},
    {"dtype_o", [](Problem& p) { p.dtype_o = static_cast<Dtype>(7); }},
    {"dtype_o", [](Problem& p) { p.dtype_o = Dtype::e4m3; }},
    {"dtype_v", [](Problem& p) { p.dtype_v = Dtype::f16; }},
    {"dtype_v", [](Problem& p) { p.dtype_v = static_cast<Dtype>(5); }},
    {"scales", [](Problem& p) { p.scales.q = Scaling::tensor; }},
    {"scales", [](Problem& p) { p.scales.score_shift = true; }},
    {"scales.q", [](Problem& p) { p.dtype = Dtype::e4m3; }},
    {"v_tiles", [](Problem& p) { p.v_tiles = true; }},
    {"v_tiles", [](Problem& p) { p = scaled("tensor/tensor/none v=bf16 v_tiles"); }},
    {"v_tiles", [](Problem& p) { p = scaled("tensor/tensor/tensor cache=full v_tiles"); }},
    {"head_dim_v",
     [](Problem& p) {
       p = scaled("tensor/tensor/tensor v_tiles");
       p.head_dim_v = 257;
     }},
    {"scales.q", [](Problem& p) { p = scaled("channel/head/head"); }},
    {"scales.q", [](Problem& p) { p.scales.q = static_cast<Scaling>(7); }},
    {"scales.k", [](Problem& p) { p = scaled("head/channel/head"); }},
    {"scales.k", [](Problem& p) { p = scaled("head/none/head"); }},
    {"scales.q", [](Problem& p) { p = scaled("head/head/head", "fwd bf16 kv=e4m3"); }},
    {"scales.k", [](Problem& p) { p = scaled("none/none/head", "fwd bf16 kv=e4m3"); }},
    {"scales.v", [](Problem& p) { p = scaled("none/head/none", "fwd bf16 kv=e4m3"); }},
    {"dtype_kv", [](Problem& p) { p.dtype_kv = Dtype::f32; }},
    {"dtype_kv", [](Problem& p) { p.dtype_kv = static_cast<Dtype>(5); }},
    {"dtype_kv", [](Problem& p) { p = scaled("none/head/head", "fwd bf16 kv=f16"); }},
    {"dtype_kv", [](Problem& p) { p = scaled("head/head/head", "fwd e4m3 kv=i8"); }},
    {"dtype_kv", [](Problem& p) { p = scaled("none/head/head", "bwd bf16 kv=i8"); }},
    {"dtype_v", [](Problem& p) { p = scaled("none/head/none v=bf16", "fwd bf16 kv=e4m3"); }},
    {"scales.k", [](Problem& p) { p = scaled("none/group:8/head", "fwd bf16 kv=e4m3"); }},
    {"scales.k", [](Problem& p) { p = scaled("none/head/head v=e4m3", "fwd bf16"); }},
    {"scales.v", [](Problem& p) { p = scaled("head/head/group:8"); }},
    {"scales.v", [](Problem& p) { p = scaled("none/none/none v=e4m3", "fwd bf16"); }},
    {"scales.block_v", [](Problem& p) { p = scaled("none/none/group:0 v=e4m3", "fwd bf16"); }},
    {"scales.block_v", [](Problem& p) { p = scaled("none/none/group:9 v=e4m3", "fwd bf16"); }},
    {"scales.score_shift",
     [](Problem& p) { p = scaled("none/none/head v=e4m3 score_shift", "fwd bf16"); }},
    {"dtype_v", [](Problem& p) { p = scaled("none/none/head v=i8", "bwd bf16"); }},
    {"v_tiles", [](Problem& p) { p = scaled("none/none/group:8 v=e4m3 v_tiles", "fwd bf16"); }},
    {"scales.v", [](Problem& p) { p = scaled("head/head/none"); }},
    {"scales.v", [](Problem& p) { p = scaled("head/head/head v=bf16"); }},
    {"scales.block_k", [](Problem& p) { p = scaled("head/block:0/head"); }},
    {"scales.block_k", [](Problem& p) { p = scaled("head/head:5/head"); }},
    {"scales.block_v", [](Problem& p) { p = scaled("head/head/block:-5"); }},
    {"scales.k", [](Problem& p) { p = scaled("head/block:5/head cache=full"); }},
    {"dtype_o", [](Problem& p) { p = scaled("head/head/none v=bf16 o=f16"); }},
    {"dtype_v", [](Problem& p) { p = scaled("head/head/head v=f32"); }},
    {"bias",
     [](Problem& p) {
       p = scaled("head/head/head");
       p.bias = BiasShape{true, true, true, true, Dtype::e4m3};
     }},
    {"qv", [](Problem& p) { p = parse("bwd bf16 b=2 h=4/2 q=4 k=5 d=8 qv"); }},
    {"qv", [](Problem& p) { p = scaled("head/head/head qv"); }},
    {"qv", [](Problem& p) { p = scaled("none/head/head qv", "fwd bf16 kv=e4m3"); }},
    {"pass", [](Problem& p) { p.pass = static_cast<Pass>(2); }},
    {"alignment", [](Problem& p) { p.alignment = static_cast<Alignment>(2); }},
    {"alibi", [](Problem& p) { p.alibi = static_cast<PerHead>(3); }},
    {"head_dim",
     [](Problem& p) {
       p.batch = kMaxBatch;
       p.seqlen_q = kMaxSeqlen;
       p.head_dim = kMaxHeadDim;
     }},
    {"chunk", [](Problem& p) { p.chunk = -1; }},
    {"sink_tokens", [](Problem& p) { p.sink_tokens = -1; }},
    {"seqlen_q",
     [](Problem& p) {
       p.tree = true;
       p.seqlen_q = 65;
     }},
    {"cache",
     [](Problem& p) {
       p.pass = Pass::backward;
       p.cache = CacheShape{};
     }},
    {"cache.lengths", [](Problem& p) { p.cache = CacheShape{.lengths = static_cast<Lengths>(3)}; }},
    {"cache.seqlen_new", [](Problem& p) { p.cache = CacheShape{.seqlen_new = 1}; }},
    {"cache.seqlen_new",
     [](Problem& p) { p.cache = CacheShape{.lengths = Lengths::before, .seqlen_new = 6}; }},
    {"cache.seqlen_new",
     [](Problem& p) { p.cache = CacheShape{.lengths = Lengths::before, .seqlen_new = -1}; }},
    {"cache.page_size", [](Problem& p) { p.cache = CacheShape{.page_size = -1}; }},
    {"cache.page_size", [](Problem& p) { p.cache = CacheShape{.page_size = kMaxSeqlen + 1}; }},
    {"cache.num_pages", [](Problem& p) { p.cache = CacheShape{.num_pages = 1}; }},
    {"cache.num_pages", [](Problem& p) { p.cache = CacheShape{.page_size = 16, .num_pages = -1}; }},
    {"cache.num_pages",
     [](Problem& p) { p.cache = CacheShape{.page_size = 16, .num_pages = kMost}; }},
    {"cache.page_ids", [](Problem& p) { p.cache = CacheShape{.page_ids = PageIds::i64}; }},
    {"cache.page_ids",
     [](Problem& p) {
       p.cache = CacheShape{.page_size = 16, .page_ids = static_cast<PageIds>(2)};
     }},
    {"cache.skips", [](Problem& p) { p.cache = CacheShape{.skips = true}; }},
    {"cache.skips",
     [](Problem& p) {
       p.cache = CacheShape{.page_size = 16, .num_pages = 4, .skips = true};
       p.window_right = 0;
     }},
    {"cache.skips",
     [](Problem& p) {
       p.cache = CacheShape{.page_size = 16, .num_pages = 4, .skips = true};
       p.alibi = PerHead::heads;
     }},
    {"cache.prefix_levels", [](Problem& p) { p.cache = CacheShape{.prefix_levels = 1}; }},
    {"cache.prefix_levels",
     [](Problem& p) { p.cache = CacheShape{.page_size = 16, .num_pages = 4, .prefix_levels = 5}; }},
    {"cache.rows", [](Problem& p) { p.cache = CacheShape{.rows = -1}; }},
    {"cache.rows", [](Problem& p) { p.cache = CacheShape{.rows = kMaxBatch + 1}; }},
    {"total_k",
     [](Problem& p) {
       p.packed = true;
       p.cache = CacheShape{};
       p.total_k = 5;
     }},
};

Problem small() { return parse("fwd bf16 b=2 h=4/2 q=4 k=5 d=8"); }

TEST(Misuse, Problems) {
  ASSERT_TRUE(validate(small()).ok());
  int number = 0;
  for (const WrongProblem& wrong : kWrongProblems) {
    Problem problem = small();
    wrong.spoil(problem);
    SCOPED_TRACE("case " + std::to_string(number++) + ", " + wrong.names + ": " +
                 to_string(problem));
    for (const Status& status :
         {validate(problem), plan(problem, this_cpu()).status(), attend(problem, {})}) {
      EXPECT_EQ(status.code, Code::invalid) << status.text;
      EXPECT_NE(status.text.find(wrong.names), std::string::npos) << status.text;
    }
    EXPECT_FALSE(explain(problem, this_cpu()).empty());
  }
}

TEST(Misuse, Devices) {
  Device device = this_cpu();
  device.threads = 0;
  EXPECT_EQ(plan(small(), device).status().code, Code::invalid);
  device.threads = -3;
  EXPECT_EQ(plan(small(), device).status().code, Code::invalid);
  EXPECT_NE(plan(small(), device).status().text.find("threads"), std::string::npos);
  for (const char* name : {"", "avx", "CPU", "h2000"}) {
    const Result<Device> named = named_device(name);
    ASSERT_FALSE(named.ok()) << name;
    EXPECT_NE(named.status().text.find("device"), std::string::npos) << named.status().text;
  }
}

struct WrongTensors {
  const char* problem;
  const char* names;
  void (*spoil)(Tensors& t);
};

std::int32_t* writable(const std::int32_t* offsets) { return const_cast<std::int32_t*>(offsets); }

/// Of the first sequence of a cache, whose other sequences are no-ops: so many filled slots.
CacheTensors& with_length(Tensors& t, std::int32_t length) {
  writable(t.cache.seqlens)[0] = length;
  writable(t.cache.seqlens)[1] = -1;
  return t.cache;
}
/// The same in row 2 of three, whose keys begin in slot 0.
CacheTensors& in_row_2(Tensors& t, std::int32_t length) {
  writable(t.cache.index)[0] = 2;
  writable(t.cache.leftpad)[0] = 0;
  return with_length(t, length);
}
std::int32_t* page_table(const CacheTensors& cache) {
  return writable(static_cast<const std::int32_t*>(cache.page_table));
}

constexpr const char* kForward = "fwd bf16 b=2 h=4/2 q=4 k=5 d=8";
constexpr const char* kBackward = "bwd bf16 b=2 h=4/2 q=4 k=5 d=8";
constexpr const char* kPacked = "fwd bf16 b=2 h=4/2 q=4 k=5 d=8 packed=7,9";
constexpr const char* kExtras = "fwd bf16 b=2 h=4/2 q=4 k=5 d=8 bias=hk alibi=h sink";
constexpr const char* kExtrasBackward = "bwd bf16 b=2 h=4/2 q=4 k=5 d=8 bias=hk sink";

constexpr const char* kSecondQuery = "fwd bf16 b=2 h=4/2 q=4 k=5 d=8/16 qv";
constexpr const char* kTree = "fwd bf16 b=2 h=4/2 q=4 k=5 d=8 tree";
constexpr const char* kCache = "fwd bf16 b=2 h=4/2 q=4 k=5 d=8 cache=after";
constexpr const char* kFull = "fwd bf16 b=2 h=4/2 q=4 k=5 d=8 cache=full";
constexpr const char* kPackedCache = "fwd bf16 b=2 h=4/2 q=4 k=5 d=8 packed=7 cache=before:2";
constexpr const char* kPages =
    "fwd bf16 b=2 h=4/2 q=4 k=5 d=8 cache=before:2 pages=9x2 rows=3 leftpad";
constexpr const char* kScaled =
    "fwd e4m3 b=2 h=4/2 q=4 k=5 d=8 scales=token/block:2/channel score_shift v_shift";
constexpr const char* kWideValues = "fwd i8 b=2 h=4/2 q=4 k=5 d=8 scales=tensor/head/none v=f16";
constexpr std::int32_t kNumbers[8] = {};

const WrongTensors kWrongTensors[] = {
    {kForward, "q", [](Tensors& t) { t.q.data = nullptr; }},
    {kForward, "k", [](Tensors& t) { t.k.data = nullptr; }},
    {kForward, "v", [](Tensors& t) { t.v.data = nullptr; }},
    {kForward, "o", [](Tensors& t) { t.o.data = nullptr; }},
    {kForward, "q.stride_batch", [](Tensors& t) { t.q.stride_batch = kMost / 2; }},
    {kForward, "k.stride_seqlen", [](Tensors& t) { t.k.stride_seqlen = kMost; }},
    {kForward, "v.stride_head", [](Tensors& t) { t.v.stride_head = -kMost; }},
    {kForward, "o.stride_batch", [](Tensors& t) { t.o.stride_batch = kMost; }},
    {kForward, "o.stride_head", [](Tensors& t) { t.o.stride_head = 0; }},
    {kForward, "o.stride_seqlen", [](Tensors& t) { t.o.stride_seqlen = 7; }},
    {kForward, "o.stride_batch", [](Tensors& t) { t.o.stride_batch = -7; }},
    {kForward, "bias", [](Tensors& t) { t.bias.data = t.q.data; }},
    {kForward, "alibi_slopes", [](Tensors& t) { t.alibi_slopes = t.softmax_lse; }},
    {kForward, "sink", [](Tensors& t) { t.sink = t.softmax_lse; }},
    {kForward, "cu_seqlens",
     [](Tensors& t) { t.cu_seqlens_q = reinterpret_cast<std::int32_t*>(t.softmax_lse); }},
    {kForward, "cu_seqlens",
     [](Tensors& t) { t.cu_seqlens_k = reinterpret_cast<std::int32_t*>(t.softmax_lse); }},
    {kForward, "q_scale", [](Tensors& t) { t.q_scale.data = t.softmax_lse; }},
    {kForward, "v_shift", [](Tensors& t) { t.v_shift.data = t.softmax_lse; }},
    {kForward, "qv.data", [](Tensors& t) { t.qv = t.q; }},
    {kSecondQuery, "qv", [](Tensors& t) { t.qv.data = nullptr; }},
    {kSecondQuery, "qv.stride_seqlen", [](Tensors& t) { t.qv.stride_seqlen = kMost; }},
    {kScaled, "q_scale.data", [](Tensors& t) { t.q_scale.data = nullptr; }},
    {kScaled, "k_scale.data", [](Tensors& t) { t.k_scale.data = nullptr; }},
    {kScaled, "v_scale.data", [](Tensors& t) { t.v_scale.data = nullptr; }},
    {kScaled, "score_shift.data", [](Tensors& t) { t.score_shift.data = nullptr; }},
    {kScaled, "v_shift.data", [](Tensors& t) { t.v_shift.data = nullptr; }},
    {kScaled, "k_scale.stride_batch", [](Tensors& t) { t.k_scale.stride_batch = kMost; }},
    {kScaled, "q_scale.stride_head", [](Tensors& t) { t.q_scale.stride_head = -kMost; }},
    {kWideValues, "v_scale", [](Tensors& t) { t.v_scale.data = t.q_scale.data; }},
    {kWideValues, "score_shift", [](Tensors& t) { t.score_shift.data = t.q_scale.data; }},
    {kExtras, "bias", [](Tensors& t) { t.bias.data = nullptr; }},
    {kExtras, "alibi_slopes", [](Tensors& t) { t.alibi_slopes = nullptr; }},
    {kExtras, "sink", [](Tensors& t) { t.sink = nullptr; }},
    {kExtras, "bias.stride", [](Tensors& t) { t.bias.stride_head = kMost; }},
    {kPacked, "cu_seqlens_q", [](Tensors& t) { t.cu_seqlens_q = nullptr; }},
    {kPacked, "cu_seqlens_k", [](Tensors& t) { t.cu_seqlens_k = nullptr; }},
    {kPacked, "cu_seqlens_q[0]", [](Tensors& t) { writable(t.cu_seqlens_q)[0] = 1; }},
    {kPacked, "cu_seqlens_q[1]", [](Tensors& t) { writable(t.cu_seqlens_q)[1] = -1; }},
    {kPacked, "cu_seqlens_q[1]", [](Tensors& t) { writable(t.cu_seqlens_q)[1] = 5; }},
    {kPacked, "cu_seqlens_q[2]", [](Tensors& t) { writable(t.cu_seqlens_q)[2] = 6; }},
    {kPacked, "cu_seqlens_k[2]", [](Tensors& t) { writable(t.cu_seqlens_k)[2] = 8; }},
    {kPacked, "cu_seqlens_k[1]", [](Tensors& t) { writable(t.cu_seqlens_k)[1] = 1 << 30; }},
    {kPacked, "cu_seqlens_k[2]",
     [](Tensors& t) { writable(t.cu_seqlens_k)[2] = std::numeric_limits<std::int32_t>::min(); }},
    {kBackward, "dout", [](Tensors& t) { t.dout.data = nullptr; }},
    {kBackward, "o", [](Tensors& t) { t.o.data = nullptr; }},
    {kBackward, "softmax_lse", [](Tensors& t) { t.softmax_lse = nullptr; }},
    {kBackward, "dq", [](Tensors& t) { t.dq.data = nullptr; }},
    {kBackward, "dk", [](Tensors& t) { t.dk.data = nullptr; }},
    {kBackward, "dv", [](Tensors& t) { t.dv.data = nullptr; }},
    {kBackward, "dq.stride_head", [](Tensors& t) { t.dq.stride_head = 4; }},
    {kBackward, "dk.stride_batch", [](Tensors& t) { t.dk.stride_batch = 0; }},
    {kBackward, "dv.stride_seqlen", [](Tensors& t) { t.dv.stride_seqlen = 1; }},
    {kBackward, "dout.stride_seqlen", [](Tensors& t) { t.dout.stride_seqlen = kMost; }},
    {kBackward, "dbias", [](Tensors& t) { t.dbias.data = t.dq.data; }},
    {kBackward, "dsink", [](Tensors& t) { t.dsink = t.softmax_lse; }},
    {kExtrasBackward, "dbias.stride", [](Tensors& t) { t.dbias.stride_key = 0; }},
    {kExtrasBackward, "dbias.stride", [](Tensors& t) { t.dbias.stride_head = kMost; }},
    {kForward, "tree_mask",
     [](Tensors& t) { t.tree_mask = static_cast<const std::uint64_t*>(t.q.data); }},
    {kTree, "tree_mask", [](Tensors& t) { t.tree_mask = nullptr; }},
    {kForward, "cache.seqlens", [](Tensors& t) { t.cache.seqlens = kNumbers; }},
    {kFull, "cache.seqlens", [](Tensors& t) { t.cache.seqlens = kNumbers; }},
    {kForward, "cache.cu_seqlens_new", [](Tensors& t) { t.cache.cu_seqlens_new = kNumbers; }},
    {kPages, "cache.cu_seqlens_new", [](Tensors& t) { t.cache.cu_seqlens_new = kNumbers; }},
    {kForward, "cache.page_table", [](Tensors& t) { t.cache.page_table = kNumbers; }},
    {kCache, "cache.page_table", [](Tensors& t) { t.cache.page_table = kNumbers; }},
    {kForward, "cache.index", [](Tensors& t) { t.cache.index = kNumbers; }},
    {kCache, "cache.index", [](Tensors& t) { t.cache.index = kNumbers; }},
    {kForward, "cache.leftpad", [](Tensors& t) { t.cache.leftpad = kNumbers; }},
    {kCache, "cache.leftpad", [](Tensors& t) { t.cache.leftpad = kNumbers; }},
    {kPackedCache, "cu_seqlens_k", [](Tensors& t) { t.cu_seqlens_k = kNumbers; }},
    {kPackedCache, "cu_seqlens_q", [](Tensors& t) { t.cu_seqlens_q = nullptr; }},
    {kPackedCache, "cu_seqlens_q[2]", [](Tensors& t) { writable(t.cu_seqlens_q)[2] = 6; }},
    {kPackedCache, "cache.cu_seqlens_new", [](Tensors& t) { t.cache.cu_seqlens_new = nullptr; }},
    {kCache, "cache.seqlens", [](Tensors& t) { t.cache.seqlens = nullptr; }},
    {kPages, "cache.page_table", [](Tensors& t) { t.cache.page_table = nullptr; }},
    {kPages, "cache.index", [](Tensors& t) { t.cache.index = nullptr; }},
    {kPages, "cache.leftpad", [](Tensors& t) { t.cache.leftpad = nullptr; }},
    {kPages, "cache.stride_page_table", [](Tensors& t) { t.cache.stride_page_table = kMost; }},
    {kPages, "k.stride_batch", [](Tensors& t) { t.k.stride_batch = kMost / 2; }},
    {kCache, "cache.seqlens[0]", [](Tensors& t) { with_length(t, 6); }},
    {kCache, "cache.seqlens[0]", [](Tensors& t) { with_length(t, 1 << 30); }},
    {kPages, "cache.seqlens[0]", [](Tensors& t) { in_row_2(t, 4); }},
    {kPackedCache, "cache.cu_seqlens_new[1]",
     [](Tensors& t) { writable(with_length(t, 0).cu_seqlens_new)[1] = 3; }},
    {kPackedCache, "cache.cu_seqlens_new[1]",
     [](Tensors& t) { writable(with_length(t, 0).cu_seqlens_new)[1] = -1; }},
    {kPackedCache, "cache.cu_seqlens_new[1]",
     [](Tensors& t) {
       std::int32_t* const offsets = writable(with_length(t, 0).cu_seqlens_new);
       offsets[0] = std::numeric_limits<std::int32_t>::max();
       offsets[1] = std::numeric_limits<std::int32_t>::min();
     }},
    {kPages, "cache.index[0]", [](Tensors& t) { writable(in_row_2(t, 1).index)[0] = 3; }},
    {kPages, "cache.index[0]", [](Tensors& t) { writable(in_row_2(t, 1).index)[0] = -1; }},
    {kPages, "cache.leftpad[0]", [](Tensors& t) { writable(in_row_2(t, 1).leftpad)[0] = -1; }},
    {kPages, "cache.page_table[2][1]",
     [](Tensors& t) {
       std::int32_t* const row = page_table(in_row_2(t, 1)) + 2 * t.cache.stride_page_table;
       row[0] = 8;
       row[1] = 9;
     }},
    {kPages, "cache.page_table[2][0]",
     [](Tensors& t) { page_table(in_row_2(t, 0))[2 * t.cache.stride_page_table] = -1; }},
};

TEST(Misuse, Tensors) {
  int number = 0;
  for (const WrongTensors& wrong : kWrongTensors) {
    SCOPED_TRACE("case " + std::to_string(number++) + ", " + wrong.names + ": " + wrong.problem);
    RunMemory memory(parse(wrong.problem), seed_with({}, 3));
    wrong.spoil(memory.tensors());
    for (const Status& status : {run_in(memory, this_cpu(), inline_executor()),
                                 attend(memory.problem(), memory.tensors())}) {
      EXPECT_EQ(status.code, Code::invalid) << status.text;
      EXPECT_EQ(status.text.rfind(wrong.names, 0), 0U) << status.text;
    }
    for (const auto& [name, values] : results_of(memory)) {
      const auto written =
          std::count_if(values.begin(), values.end(), [](double x) { return !std::isnan(x); });
      EXPECT_EQ(written, 0) << name << " was written";
    }
  }
}

TEST(Misuse, Workspaces) {
  RunMemory memory(parse("bwd f32 b=2 h=4/2 q=40 k=50 d=8"), seed_with({}, 3));
  const Result<Plan> planned = plan(memory.problem(), this_cpu());
  ASSERT_TRUE(planned.ok());
  const std::size_t bytes = planned->workspace_bytes();
  ASSERT_GT(bytes, 0U);
  const GuardedBuffer workspace(bytes, 0);
  const auto code = [&](void* start, std::size_t size) {
    const Status status = run(*planned, memory.tensors(), start, size);
    EXPECT_NE(status.text.find("workspace"), std::string::npos) << status.text;
    return status.code;
  };
  EXPECT_EQ(code(workspace.data(), bytes - 1), Code::workspace);
  EXPECT_EQ(code(workspace.data(), 0), Code::workspace);
  EXPECT_EQ(code(nullptr, bytes), Code::workspace);
  EXPECT_EQ(code(workspace.data() + 4, bytes), Code::workspace);
  EXPECT_TRUE(run(*planned, memory.tensors(), workspace.data(), bytes).ok());
}

/// Empty problems may come with null tensors, and must still write what they owe.
TEST(Misuse, EmptyProblemsNeedNoTensors) {
  EXPECT_TRUE(attend(parse("fwd f32 b=0 h=2 q=3 k=4 d=8"), {}).ok());
  EXPECT_TRUE(attend(parse("fwd f32 b=2 h=2 q=0 k=4 d=8"),
                     [] {
                       Tensors t;
                       static const float keys[2 * 4 * 2 * 8] = {};
                       t.k = t.v = {keys, 64, 16, 8};
                       return t;
                     }())
                  .ok());
  EXPECT_TRUE(attend(parse("bwd f32 b=0 h=2 q=3 k=4 d=8"), {}).ok());
  EXPECT_TRUE(
      attend(parse("fwd b=0 h=2 q=3 k=4 d=8 cache=after pages=0x16 leftpad tree"), {}).ok());
}

/// A cache without pages or slots, of sequences that are all no-ops.
TEST(Misuse, EmptyCachesNeedNoKeys) {
  for (const char* text : {"fwd b=2 h=2 q=3 k=20 d=8 cache=after pages=0x16",
                           "fwd b=2 h=2 q=3 k=0 d=8 cache=after pages=0x16",
                           "fwd b=2 h=2 q=3 k=0 d=8 cache=after rows=1"}) {
    RunMemory memory(parse(text), seed_with({}, 3));
    const std::int32_t lengths[2] = {-1, 0};
    Tensors& t = memory.tensors();
    t.k.data = t.v.data = nullptr;
    t.cache.seqlens = lengths;
    if (memory.problem().seqlen_k == 0) t.cache.page_table = nullptr;
    const Status status = run_in(memory, this_cpu(), inline_executor());
    EXPECT_TRUE(status.ok()) << text << ": " << status.text;
    for (const double x : memory.output("o")) EXPECT_EQ(x, 0.0);
    for (const double x : memory.output("softmax_lse")) EXPECT_EQ(x, -HUGE_VAL);
  }
}

TEST(Misuse, DropoutMask) {
  std::uint8_t keep[1];
  Problem problem = parse("fwd f32 q=1 k=1 d=1 dropout=0.5");
  EXPECT_NE(dropout_mask(problem, 1, 2, nullptr).text.find("keep = null"), std::string::npos);
  problem.dropout_p = 1.0F;
  EXPECT_NE(dropout_mask(problem, 1, 2, keep).text.find("dropout_p = 1"), std::string::npos);
  problem.dropout_p = 0.5F;
  problem.seqlen_q = 0;
  EXPECT_TRUE(dropout_mask(problem, 1, 2, nullptr).ok());

  char error[128];
  tessera_problem c;
  tessera_problem_init(&c, sizeof c);
  ASSERT_EQ(tessera_problem_parse("fwd f32 q=1 k=1 d=1", &c, error, sizeof error), TESSERA_OK);
  keep[0] = 77;
  EXPECT_EQ(tessera_dropout_mask(&c, 1, 2, keep, error, sizeof error), TESSERA_OK);
  EXPECT_EQ(keep[0], 1);
  EXPECT_EQ(tessera_dropout_mask(&c, 1, 2, nullptr, error, sizeof error), TESSERA_INVALID);
  EXPECT_STREQ(error, "keep = null: must point to the mask");
  EXPECT_EQ(tessera_dropout_mask(nullptr, 1, 2, keep, nullptr, 0), TESSERA_INVALID);
}

/// An executor may offer no threads or very many.
TEST(Misuse, Executors) {
  for (const int threads : {-1, 0, 1, 1000}) {
    RunMemory memory(parse("fwd f32 b=2 h=4/2 q=40 k=50 d=8"), seed_with({}, 3));
    EXPECT_TRUE(run_in(memory, device_with(best_arch(), 3), reverse_executor(threads)).ok());
    for (const double x : memory.output("o")) ASSERT_TRUE(std::isfinite(x));
  }
}

}  // namespace
}  // namespace tessera::tools
