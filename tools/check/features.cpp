// The table of features that vary from case to case, and which of their values exclude each other.
#include "check/features.h"

#include <algorithm>
#include <array>
#include <string_view>

namespace tessera::tools {
namespace {

/// A feature that is a list of values of one type, with the way to read and to write it.
template <class T, class Read, class Write>
Feature feature(const std::string& name, const std::vector<T>& values,
                const std::vector<std::string>& names, Read read, Write write) {
  return {
      name, names,
      [values, write](Case& c, int value) { write(c, values[static_cast<std::size_t>(value)]); },
      [values, read](const Case& c) {
        const auto found = std::find(values.begin(), values.end(), read(c));
        return found == values.end() ? -1 : static_cast<int>(found - values.begin());
      }};
}

template <class T>
std::vector<std::string> texts(const std::vector<T>& values) {
  std::vector<std::string> names;
  for (const T& value : values) names.push_back(std::to_string(value));
  return names;
}

/// A field of Problem.
template <class T>
Feature field(const std::string& name, T Problem::* member, const std::vector<T>& values,
              const std::vector<std::string>& names) {
  return feature<T>(
      name, values, names, [member](const Case& c) { return c.problem.*member; },
      [member](Case& c, const T& value) { c.problem.*member = value; });
}

Feature number(const std::string& name, std::int64_t Problem::* member,
               const std::vector<std::int64_t>& values) {
  return field(name, member, values, texts(values));
}

Feature flag(const std::string& name, bool Problem::* member) {
  return field<bool>(name, member, {false, true}, {"off", "on"});
}

Feature variation(const std::string& name, bool Variation::* member) {
  return feature<bool>(
      name, {false, true}, {"off", "on"}, [member](const Case& c) { return c.variation.*member; },
      [member](Case& c, bool value) { c.variation.*member = value; });
}

using Pair = std::array<std::int64_t, 2>;

Feature window() {
  const std::vector<Pair> values = {{-1, -1}, {-1, 0}, {7, -1},   {-1, 3},      {7, 2},
                                    {0, 0},   {16, 0}, {64, 64},  {1000000, 0}, {0, 1000000},
                                    {33, 5},  {0, -1}, {-1, 1000}};
  std::vector<std::string> names;
  for (const Pair& v : values) names.push_back(std::to_string(v[0]) + "," + std::to_string(v[1]));
  return feature<Pair>(
      "window", values, names,
      [](const Case& c) { return Pair{c.problem.window_left, c.problem.window_right}; },
      [](Case& c, const Pair& v) {
        c.problem.window_left = v[0];
        c.problem.window_right = v[1];
      });
}

Feature heads() {
  const std::vector<Pair> values = {{1, 1}, {2, 2}, {3, 3}, {2, 1}, {4, 2},
                                    {3, 1}, {6, 2}, {8, 1}, {17, 1}};
  std::vector<std::string> names;
  for (const Pair& v : values) names.push_back(std::to_string(v[0]) + "/" + std::to_string(v[1]));
  return feature<Pair>(
      "heads", values, names,
      [](const Case& c) { return Pair{c.problem.num_heads, c.problem.num_heads_k}; },
      [](Case& c, const Pair& v) {
        c.problem.num_heads = v[0];
        c.problem.num_heads_k = v[1];
      });
}

/// 0: no bias; else 1 + four bits, the stored dimensions. The dtype is a feature of its own.
Feature bias() {
  std::vector<int> values;
  for (int v = 0; v <= 16; ++v) values.push_back(v);
  return feature<int>(
      "bias", values, texts(values),
      [](const Case& c) {
        if (!c.problem.bias) return 0;
        const BiasShape& b = *c.problem.bias;
        return 1 + (b.batch ? 1 : 0) + (b.heads ? 2 : 0) + (b.queries ? 4 : 0) + (b.keys ? 8 : 0);
      },
      [](Case& c, int v) {
        const int bits = v - 1;
        if (v == 0) {
          c.problem.bias.reset();
        } else {
          c.problem.bias = BiasShape{(bits & 1) != 0, (bits & 2) != 0, (bits & 4) != 0,
                                     (bits & 8) != 0, Dtype::f32};
        }
      });
}

Feature bias_dtype() {
  return feature<bool>(
      "bias dtype", {false, true}, {"f32", "the problem's 16 bits"},
      [](const Case& c) { return c.problem.bias && c.problem.bias->dtype != Dtype::f32; },
      [](Case& c, bool narrow) {
        if (c.problem.bias) c.problem.bias->dtype = narrow ? c.problem.dtype : Dtype::f32;
      });
}

/// How the lengths of a cache are given; 0: there is no cache.
Feature cache() {
  return feature<int>(
      "cache", {0, 1, 2, 3}, {"none", "full", "after", "before"},
      [](const Case& c) {
        return c.problem.cache ? 1 + static_cast<int>(c.problem.cache->lengths) : 0;
      },
      [](Case& c, int v) {
        c.problem.cache.reset();
        if (v > 0) c.problem.cache = CacheShape{.lengths = static_cast<Lengths>(v - 1)};
      });
}

/// A field of CacheShape: the first value where there is no cache.
template <class T>
Feature cache_field(const std::string& name, T CacheShape::* member, const std::vector<T>& values,
                    const std::vector<std::string>& names) {
  return feature<T>(
      name, values, names,
      [member](const Case& c) { return c.problem.cache.value_or(CacheShape{}).*member; },
      [member](Case& c, const T& value) {
        if (c.problem.cache) (*c.problem.cache).*member = value;
      });
}

Feature scales() {
  std::vector<ScaleShape> values(1);
  for (std::size_t i = 1; i < kScales.size(); ++i) {
    values.push_back(parse_problem("scales=" + kScales[i])->scales);
  }
  return feature<ScaleShape>(
      "scales", values, kScales,
      [](const Case& c) {
        ScaleShape shape = c.problem.scales;
        shape.score_shift = shape.v_shift = false;
        return shape;
      },
      [](Case& c, const ScaleShape& v) { c.problem.scales = v; });
}

/// After the scales.
Feature shift(const std::string& name, bool ScaleShape::* member) {
  return feature<bool>(
      name, {false, true}, {"off", "on"},
      [member](const Case& c) { return c.problem.scales.*member; },
      [member](Case& c, bool value) { c.problem.scales.*member = value; });
}

const std::vector<std::int64_t> kHeadDims = {
    1,  2,  3,  4,  5,  7,   8,   9,   15,  16,  17,  24,  31,  32,  33,  40,  48,  63,
    64, 65, 72, 80, 96, 112, 127, 128, 129, 160, 192, 255, 256, 257, 320, 384, 511, 512};
/// 0: rows.
const std::vector<std::int64_t> kPageSizes = {0, 1, 2, 3, 16, 64, 100, 256};

std::vector<Feature> make_features() {
  using P = Problem;
  return {
      field<Pass>("pass", &P::pass, {Pass::forward, Pass::backward}, {"fwd", "bwd"}),
      field<Dtype>("dtype", &P::dtype,
                   {Dtype::f32, Dtype::bf16, Dtype::f16, Dtype::e4m3, Dtype::i8},
                   {"f32", "bf16", "f16", "e4m3", "i8"}),
      scales(),
      field<std::optional<Dtype>>("v dtype", &P::dtype_v,
                                  {std::nullopt, Dtype::bf16, Dtype::f16, Dtype::e4m3, Dtype::i8},
                                  {"q's", "bf16", "f16", "e4m3", "i8"}),
      field<std::optional<Dtype>>("kv dtype", &P::dtype_kv, {std::nullopt, Dtype::e4m3, Dtype::i8},
                                  {"q's", "e4m3", "i8"}),
      shift("score shift", &ScaleShape::score_shift),
      shift("v shift", &ScaleShape::v_shift),
      field<bool>("v tiles", &P::v_tiles, {false, true}, {"off", "on"}),
      field<std::optional<Dtype>>("o dtype", &P::dtype_o,
                                  {std::nullopt, Dtype::f32, Dtype::bf16, Dtype::f16},
                                  {"the inputs'", "f32", "bf16", "f16"}),
      flag("packed", &P::packed),
      number("batch", &P::batch, {0, 1, 2, 3, 5}),
      heads(),
      number("seqlen_q", &P::seqlen_q, kSeqlensQ),
      number("seqlen_k", &P::seqlen_k, kSeqlensK),
      number("head_dim", &P::head_dim, kHeadDims),
      number("head_dim_v", &P::head_dim_v, kHeadDims),
      window(),
      field<Alignment>("alignment", &P::alignment, {Alignment::bottom_right, Alignment::top_left},
                       {"br", "tl"}),
      field<std::optional<float>>("scale", &P::softmax_scale, {std::nullopt, 0.3F, 0.0F, -0.2F},
                                  {"default", "0.3", "0", "-0.2"}),
      field<float>("softcap", &P::softcap, {0.0F, 1.5F, 30.0F}, {"0", "1.5", "30"}),
      field<PerHead>("alibi", &P::alibi, {PerHead::none, PerHead::heads, PerHead::batch_heads},
                     {"none", "h", "bh"}),
      bias(),
      bias_dtype(),  // after dtype and bias
      flag("sink", &P::sink),
      field<float>("dropout", &P::dropout_p, {0.0F, 0.1F, 0.5F, 0.9F}, {"0", "0.1", "0.5", "0.9"}),
      number("chunk", &P::chunk, {0, 1, 7, 16, 100, 1000000}),
      number("sink_tokens", &P::sink_tokens, {0, 1, 4, 40, 1000000}),
      flag("tree", &P::tree),
      flag("qv", &P::qv),
      cache(),
      cache_field("page size", &CacheShape::page_size, kPageSizes, texts(kPageSizes)),
      cache_field<PageIds>("page numbers", &CacheShape::page_ids, {PageIds::i32, PageIds::i64},
                           {"i32", "i64"}),
      cache_field<std::int64_t>("rows", &CacheShape::rows, {0, 1, 4}, {"b", "1", "4"}),
      cache_field<bool>("leftpad", &CacheShape::leftpad, {false, true}, {"off", "on"}),
      cache_field<bool>("skips", &CacheShape::skips, {false, true}, {"off", "on"}),
      cache_field<std::int64_t>("prefixes", &CacheShape::prefix_levels, {0, 1, 4}, {"0", "1", "4"}),
      flag("deterministic", &P::deterministic),
      flag("batch_invariant", &P::batch_invariant),
      feature<Values>(
          "values", {Values::normal, Values::outliers, Values::equal_scores, Values::large},
          {"normal", "outliers", "equal scores", "large"},
          [](const Case& c) { return c.variation.values; },
          [](Case& c, Values value) { c.variation.values = value; }),
      variation("dlse", &Variation::dlse),
      variation("strided", &Variation::strided),
      variation("all outputs", &Variation::all_outputs),
      feature<Arch>(
          "arch", {Arch::portable, Arch::avx2, Arch::avx512, Arch::avx512_bf16},
          {"portable", "avx2", "avx512", "avx512_bf16"}, [](const Case& c) { return c.arch; },
          [](Case& c, Arch arch) { c.arch = arch; }),
      feature<int>(
          "threads", {1, 2, 3, -3}, {"1", "2", "3", "3 in reverse"},
          [](const Case& c) { return c.in_reverse ? -c.threads : c.threads; },
          [](Case& c, int threads) {
            c.threads = std::abs(threads);
            c.in_reverse = threads < 0;
          }),
  };
}

/// All of them, found group by group.
class Contradictions {
 public:
  void add_types() {
    constexpr struct {
      const char *feature_a, *value_a, *feature_b, *value_b;
    } kNamed[] = {
        {"pass", "fwd", "dlse", "on"},
        {"dtype", "f32", "bias dtype", "the problem's 16 bits"},
        {"bias", "0", "bias dtype", "the problem's 16 bits"},
        {"dtype", "bf16", "o dtype", "f16"},
        {"dtype", "f16", "o dtype", "bf16"},
        {"pass", "bwd", "o dtype", "f32"},  // of bf16 and f16 no kernel takes it
        {"pass", "bwd", "o dtype", "bf16"},
        {"pass", "bwd", "o dtype", "f16"},
        {"dlse", "on", "o dtype", "f32"},
        {"dlse", "on", "o dtype", "bf16"},
        {"dlse", "on", "o dtype", "f16"},
        {"pass", "bwd", "dtype", "e4m3"},
        {"pass", "bwd", "dtype", "i8"},
        {"dtype", "e4m3", "dlse", "on"},
        {"dtype", "i8", "dlse", "on"},
        {"dtype", "e4m3", "bias dtype", "the problem's 16 bits"},
        {"dtype", "i8", "bias dtype", "the problem's 16 bits"},
        {"v dtype", "bf16", "o dtype", "f16"},
        {"v dtype", "f16", "o dtype", "bf16"},
    };
    for (const auto& c : kNamed) {
      const std::size_t a = index_of(c.feature_a), b = index_of(c.feature_b);
      found_.push_back({a, value_of(a, c.value_a), b, value_of(b, c.value_b)});
    }
  }

  void add_caches() {
    for (const char* name : {"chunk", "sink_tokens", "tree", "cache", "page size", "page numbers",
                             "rows", "leftpad", "skips", "prefixes"}) {
      forbid(name, "pass", "bwd");
      forbid(name, "dlse", "on");
    }
    for (const char* name : kOfCaches) forbid(name, "cache", "none");
    for (const char* name : {"page numbers", "skips", "prefixes"}) forbid(name, "page size", "0");
    for (const char* name : kPositional) forbid(name, "skips", "on");
    for (const std::int64_t seqlen_q : kSeqlensQ) {
      if (seqlen_q > 64) forbid("tree", "seqlen_q", std::to_string(seqlen_q).c_str());
    }
  }

  void add_second_queries() {
    forbid("qv", "pass", "bwd");
    forbid("qv", "dlse", "on");
    for (const char* type : {"e4m3", "i8"}) forbid("qv", "dtype", type);
    for (const char* name : {"kv dtype", "score shift", "v tiles"}) forbid(name, "qv", "on");
    for (const char* type : {"bf16", "f16"}) forbid("qv", "v dtype", type);
    for (std::size_t i = 1; i < kScales.size(); ++i) {
      if (!kScales[i].starts_with("none/none/")) forbid("qv", "scales", kScales[i].c_str());
    }
  }

  void add_scales() {
    for (const char* name : kOfScales) {
      forbid(name, "pass", "bwd");
      forbid(name, "dlse", "on");
      if (std::string_view(name) != "scales") forbid(name, "scales", "none");
    }
    for (const char* type : {"f32", "bf16", "f16"}) forbid("v tiles", "dtype", type);
    forbid("v tiles", "bias dtype", "the problem's 16 bits");
    for (const char* name : {"v dtype", "v tiles"}) {
      forbid(name, "kv dtype", "e4m3");
      forbid(name, "kv dtype", "i8");
    }
    const std::size_t scales = index_of("scales"), v = index_of("v dtype"),
                      dtype = index_of("dtype"), kv = index_of("kv dtype"),
                      bias = index_of("bias dtype");
    for (const char* type : {"e4m3", "i8"}) {
      found_.push_back({dtype, value_of(dtype, type), scales, 0});
      forbid("kv dtype", "dtype", type);
      for (int of_v = 3; of_v < 5; ++of_v)
        found_.push_back({v, of_v, dtype, value_of(dtype, type)});
    }
    for (int of_v = 1; of_v < 3; ++of_v) {
      for (int type = 0; type < 3; ++type) found_.push_back({v, of_v, dtype, type});
      found_.push_back({v, of_v, bias, 1});
    }
    for (int of_v = 3; of_v < 5; ++of_v) {
      found_.push_back({v, of_v, scales, 0});
      found_.push_back({v, of_v, index_of("score shift"), 1});
    }
    // v of 16 bits has no scales, of 8 it has some; blocks are counted from a sequence's first key.
    for (std::size_t i = 1; i < kScales.size(); ++i) {
      const int number = static_cast<int>(i);
      if (kScales[i].starts_with("none/none/")) {
        add_value_scales(number);
        continue;
      }
      for (int of_v = 3; of_v < 5; ++of_v) found_.push_back({scales, number, v, of_v});
      const bool of_keys_alone = kScales[i].starts_with("none/");
      for (const char* type : {"e4m3", "i8"}) {
        if (of_keys_alone) {
          found_.push_back({scales, number, dtype, value_of(dtype, type)});
        } else {
          found_.push_back({scales, number, kv, value_of(kv, type)});
        }
      }
      if (of_keys_alone) {
        found_.push_back({scales, number, kv, 0});
        found_.push_back({scales, number, index_of("v tiles"), 1});
      } else {
        for (const char* type : {"f32", "bf16", "f16"}) {
          found_.push_back({scales, number, dtype, value_of(dtype, type)});
        }
        found_.push_back({scales, number, bias, 1});
      }
      if (kScales[i].ends_with("none")) {
        found_.push_back({scales, number, v, 0});
      } else {
        for (int type = 1; type < 3; ++type) found_.push_back({scales, number, v, type});
      }
      if (kScales[i].find("block") == std::string::npos) continue;
      forbid("cache", "scales", kScales[i].c_str());
      for (const char* name : kOfCaches) forbid(name, "scales", kScales[i].c_str());
    }
  }

  /// Of scales that v alone has.
  void add_value_scales(int number) {
    const std::size_t scales = index_of("scales");
    for (const char* type : {"e4m3", "i8"}) {
      for (const char* name : {"dtype", "kv dtype"}) {
        found_.push_back({scales, number, index_of(name), value_of(index_of(name), type)});
      }
    }
    for (int type = 0; type < 3; ++type)
      found_.push_back({scales, number, index_of("v dtype"), type});
    for (const char* name : {"v tiles", "score shift"}) {
      found_.push_back({scales, number, index_of(name), 1});
    }
    const ScaleShape shape =
        parse_problem("scales=" + kScales[static_cast<std::size_t>(number)])->scales;
    for (std::size_t i = 0; i < kHeadDims.size(); ++i) {
      if (kHeadDims[i] >= shape.block_v) continue;
      found_.push_back({scales, number, index_of("head_dim_v"), static_cast<int>(i)});
    }
  }

  void add_value_tiles() {
    forbid("v tiles", "dtype", "i8");
    for (const char* type : {"bf16", "f16", "e4m3", "i8"}) forbid("v tiles", "v dtype", type);
    forbid("cache", "v tiles", "on");
    for (const char* name : kOfCaches) forbid(name, "v tiles", "on");
    for (const std::string& scales : kScales) {
      if (scales.ends_with("none")) forbid("v tiles", "scales", scales.c_str());
    }
    for (const std::int64_t dim : kHeadDims) {
      if (dim > 256) forbid("v tiles", "head_dim_v", std::to_string(dim).c_str());
    }
  }

  const std::vector<Contradiction>& found() const { return found_; }

 private:
  static constexpr std::array kOfCaches = {"page size", "page numbers", "rows",
                                           "leftpad",   "skips",        "prefixes"};

  static int value_of(std::size_t f, const char* name) {
    const std::vector<std::string>& values = features()[f].values;
    return static_cast<int>(std::find(values.begin(), values.end(), name) - values.begin());
  }
  /// Any value of a feature but its first.
  void forbid(const char* name, const char* beside, const char* its_value) {
    const std::size_t a = index_of(name), b = index_of(beside);
    for (std::size_t v = 1; v < features()[a].values.size(); ++v) {
      found_.push_back({a, static_cast<int>(v), b, value_of(b, its_value)});
    }
  }

  std::vector<Contradiction> found_;
};

}  // namespace

const std::vector<std::string> kScales = {"none",
                                          "tensor/tensor/tensor",
                                          "head/head/head",
                                          "token/block:64/channel",
                                          "token/head/block:7",
                                          "tensor/block:1/none",
                                          "head/tensor/none",
                                          "tensor/token/token",
                                          "none/tensor/head",
                                          "none/head/tensor",
                                          "none/token/token",
                                          "none/block:9/channel",
                                          "none/none/token",
                                          "none/none/channel",
                                          "none/none/group:2"};

const std::vector<std::int64_t> kSeqlensQ = {0,  1,  2,  3,   4,   5,   7,   8,   9,
                                             15, 16, 17, 24,  31,  32,  33,  48,  63,
                                             64, 65, 96, 127, 128, 129, 255, 256, 257};
const std::vector<std::int64_t> kSeqlensK = {
    0,   1,   2,   3,   5,   7,   8,   9,   15,  16,  17,   31,   32,   33,   63,   64,   65,
    100, 127, 128, 129, 255, 256, 257, 511, 512, 513, 1023, 1024, 1025, 2049, 4095, 4096, 4097};

std::size_t index_of(const char* name) {
  const auto found = std::find_if(features().begin(), features().end(),
                                  [name](const Feature& f) { return f.name == name; });
  return static_cast<std::size_t>(found - features().begin());
}

const std::vector<Contradiction>& contradictions() {
  static const std::vector<Contradiction> all = [] {
    Contradictions every;
    every.add_types();
    every.add_caches();
    every.add_second_queries();
    every.add_scales();
    every.add_value_tiles();
    return every.found();
  }();
  return all;
}

const std::vector<Feature>& features() {
  static const std::vector<Feature> all = make_features();
  return all;
}

bool possible(std::size_t a, int value_a, std::size_t b, int value_b) {
  const std::vector<Contradiction>& all = contradictions();
  return std::none_of(all.begin(), all.end(), [&](const Contradiction& c) {
    return (c.a == a && c.value_a == value_a && c.b == b && c.value_b == value_b) ||
           (c.a == b && c.value_a == value_b && c.b == a && c.value_b == value_a);
  });
}

}  // namespace tessera::tools
