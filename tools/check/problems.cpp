// One table of features; a case is a random choice of a value for each, made smaller where it would
// take too long to judge.
#include "check/problems.h"

#include <algorithm>
#include <array>
#include <set>

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

/// How q, k and v are scaled. The first: they are not of 8 bits.
const std::vector<std::string> kScales = {"none",
                                          "tensor/tensor/tensor",
                                          "head/head/head",
                                          "token/block:64/channel",
                                          "token/head/block:7",
                                          "tensor/block:1/none",
                                          "head/tensor/none"};

/// What only tensors of 8 bits have.
constexpr const char* kOfScales[] = {"v dtype", "scales", "score shift", "v shift", "v tiles"};

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

/// Lengths around every power of two that a tile may have, and around the splits.
const std::vector<std::int64_t> kSeqlensQ = {0,  1,  2,  3,   4,   5,   7,   8,   9,
                                             15, 16, 17, 24,  31,  32,  33,  48,  63,
                                             64, 65, 96, 127, 128, 129, 255, 256, 257};
const std::vector<std::int64_t> kSeqlensK = {
    0,   1,   2,   3,   5,   7,   8,   9,   15,  16,  17,   31,   32,   33,   63,   64,   65,
    100, 127, 128, 129, 255, 256, 257, 511, 512, 513, 1023, 1024, 1025, 2049, 4095, 4096, 4097};
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
      field<std::optional<Dtype>>("v dtype", &P::dtype_v, {std::nullopt, Dtype::bf16, Dtype::f16},
                                  {"q's", "bf16", "f16"}),
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
      cache(),
      cache_field("page size", &CacheShape::page_size, kPageSizes, texts(kPageSizes)),
      cache_field<PageIds>("page numbers", &CacheShape::page_ids, {PageIds::i32, PageIds::i64},
                           {"i32", "i64"}),
      cache_field<std::int64_t>("rows", &CacheShape::rows, {0, 1, 4}, {"b", "1", "4"}),
      cache_field<bool>("leftpad", &CacheShape::leftpad, {false, true}, {"off", "on"}),
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

constexpr std::int64_t kUsualWork = 250000;     ///< of a random case
constexpr std::int64_t kLongWork = 1000000;     ///< of a case with long sequences
constexpr std::int64_t kLargestWork = 5000000;  ///< of a case that a pair demands

/// A feature's number.
std::size_t index_of(const char* name) {
  const auto found = std::find_if(features().begin(), features().end(),
                                  [name](const Feature& f) { return f.name == name; });
  return static_cast<std::size_t>(found - features().begin());
}

/// Two values that cannot occur together.
struct Contradiction {
  std::size_t a = 0;
  int value_a = 0;
  std::size_t b = 0;
  int value_b = 0;
};

std::vector<Contradiction> make_contradictions() {
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
  const auto feature = index_of;
  const auto value = [](std::size_t f, const char* name) {
    const std::vector<std::string>& values = features()[f].values;
    return static_cast<int>(std::find(values.begin(), values.end(), name) - values.begin());
  };
  std::vector<Contradiction> found;
  for (const auto& c : kNamed) {
    const std::size_t a = feature(c.feature_a), b = feature(c.feature_b);
    found.push_back({a, value(a, c.value_a), b, value(b, c.value_b)});
  }
  // Any value of a feature but its first.
  const auto forbid = [&](const char* name, const char* beside, const char* its_value) {
    const std::size_t a = feature(name), b = feature(beside);
    for (std::size_t v = 1; v < features()[a].values.size(); ++v) {
      found.push_back({a, static_cast<int>(v), b, value(b, its_value)});
    }
  };
  for (const char* name :
       {"chunk", "sink_tokens", "tree", "cache", "page size", "page numbers", "rows", "leftpad"}) {
    forbid(name, "pass", "bwd");
    forbid(name, "dlse", "on");
  }
  for (const char* name : {"page size", "page numbers", "rows", "leftpad"}) {
    forbid(name, "cache", "none");
  }
  for (const char* type : {"f32", "bf16", "f16"}) {
    for (const char* name : kOfScales) forbid(name, "dtype", type);
  }
  for (const char* name : kOfScales) {
    forbid(name, "pass", "bwd");
    forbid(name, "dlse", "on");
    forbid(name, "bias dtype", "the problem's 16 bits");
    if (std::string_view(name) != "scales") forbid(name, "scales", "none");
  }
  forbid("v tiles", "dtype", "i8");
  for (const char* type : {"bf16", "f16"}) forbid("v tiles", "v dtype", type);
  for (const char* name : {"cache", "page size", "page numbers", "rows", "leftpad"}) {
    forbid(name, "v tiles", "on");
  }
  for (const char* type : {"e4m3", "i8"}) {
    found.push_back({feature("dtype"), value(feature("dtype"), type), feature("scales"), 0});
  }
  // v of 16 bits has no scales, of 8 it has some; blocks are counted from a sequence's first key.
  for (std::size_t v = 1; v < kScales.size(); ++v) {
    const std::size_t f = feature("scales"), i = feature("v dtype");
    const int number = static_cast<int>(v);
    const bool wide = kScales[v].ends_with("none");
    if (wide) {
      found.push_back({f, number, i, 0});
      forbid("v tiles", "scales", kScales[v].c_str());
    }
    for (int type = 1; type < 3 && !wide; ++type) found.push_back({f, number, i, type});
    if (kScales[v].find("block") == std::string::npos) continue;
    for (const char* name : {"cache", "page size", "page numbers", "rows", "leftpad"}) {
      forbid(name, "scales", kScales[v].c_str());
    }
  }
  for (const std::int64_t dim : kHeadDims) {
    if (dim > 256) forbid("v tiles", "head_dim_v", std::to_string(dim).c_str());
  }
  forbid("page numbers", "page size", "0");
  for (const std::int64_t seqlen_q : kSeqlensQ) {
    if (seqlen_q > 64) forbid("tree", "seqlen_q", std::to_string(seqlen_q).c_str());
  }
  return found;
}

/// Found once: they are asked for millions of times.
const std::vector<Contradiction>& contradictions() {
  static const std::vector<Contradiction> all = make_contradictions();
  return all;
}

/// A value of each feature, and the two that must stay.
struct Draft {
  std::vector<int> value;
  std::size_t keep_a = SIZE_MAX, keep_b = SIZE_MAX;

  bool kept(std::size_t f) const { return f == keep_a || f == keep_b; }
};

Case build(const Draft& draft) {
  Case item;
  for (std::size_t f = 0; f < draft.value.size(); ++f) features()[f].set(item, draft.value[f]);
  return item;
}

bool consistent(const Draft& draft) {
  const auto has = [&draft](std::size_t f, int value) { return draft.value[f] == value; };
  return std::none_of(contradictions().begin(), contradictions().end(),
                      [&](const auto& c) { return has(c.a, c.value_a) && has(c.b, c.value_b); });
}

void draw(Draft& draft, Random& random, std::size_t f, Arch best) {
  if (draft.kept(f)) return;
  auto last = static_cast<std::int64_t>(features()[f].values.size()) - 1;
  if (features()[f].name == "arch") last = static_cast<std::int64_t>(best);
  draft.value[f] = static_cast<int>(random.next_between(0, last));
}

/// Every other case has none of what takes a kernel off its plain path. Each is off in a quarter to
/// a seventeenth of all draws, so that hardly any case would be without all.
bool is_extra(const std::string& feature) {
  return feature == "softcap" || feature == "alibi" || feature == "bias" ||
         feature == "bias dtype" || feature == "dropout" || feature == "o dtype";
}

bool is_mask(const std::string& feature) {
  return feature == "chunk" || feature == "sink_tokens" || feature == "tree";
}

bool is_of_cache(const std::string& feature) {
  return feature == "cache" || feature == "page size" || feature == "page numbers" ||
         feature == "rows" || feature == "leftpad";
}

bool is_of_scales(const std::string& feature) {
  return std::find(std::begin(kOfScales), std::end(kOfScales), feature) != std::end(kOfScales);
}

/// What only a forward has. Of sixteen draws five have a cache, four a mask of more than a band and
/// two tensors of 8 bits; of the others half are a backward.
struct ForwardOnly {
  bool cache = false, mask = false, scales = false;

  explicit ForwardOnly(Random& random) {
    const std::int64_t kind = random.next_between(0, 15);
    cache = kind >= 11;
    mask = kind == 9 || kind == 10 || kind >= 14;
    scales = random.next_between(0, 7) == 0;
  }
  /// What goes together: the first three types have no scales, the other two have; v of 16 bits has
  /// none.
  int fitting(const std::string& feature, int drawn, const Draft& draft) const {
    if (feature == "dtype") return scales ? kPlainDtypes + drawn % 2 : drawn % kPlainDtypes;
    if (feature == "scales" && scales) return drawn > 0 ? drawn : 1;
    if (feature == "v dtype" && scales) {
      const int chosen = draft.value[index_of("scales")];
      return !kScales[static_cast<std::size_t>(chosen)].ends_with("none") ? 0
             : drawn > 0                                                  ? drawn
                                                                          : 1;
    }
    return drawn;
  }
  /// Whether a feature that need not stay keeps its first value.
  bool leaves_out(const std::string& feature) const {
    if (is_of_cache(feature)) return !cache;
    if (is_mask(feature)) return !mask;
    if (is_of_scales(feature)) return !scales;
    return (cache || mask || scales) && (feature == "pass" || feature == "dlse");
  }
};

/// Draws everything that need not stay; then draws single features again, keeping what makes the
/// case smaller, until it is cheap enough.
Case draw_case(Draft draft, Random& random, Arch best, std::int64_t most_work, bool plain) {
  const std::size_t count = features().size();
  draft.value.resize(count);
  do {
    const ForwardOnly forward(random);
    for (std::size_t f = 0; f < count; ++f) {
      const std::string& name = features()[f].name;
      if (draft.kept(f)) continue;
      draw(draft, random, f, best);
      draft.value[f] = forward.fitting(name, draft.value[f], draft);
      if ((plain && is_extra(name)) || forward.leaves_out(name)) draft.value[f] = 0;
    }
  } while (!consistent(draft));
  Case item = build(draft);
  while (work_of(item) > most_work) {
    Draft other = draft;
    draw(other, random,
         static_cast<std::size_t>(random.next_between(0, static_cast<std::int64_t>(count) - 1)),
         best);
    const Case smaller = build(other);
    const std::int64_t work = work_of(smaller);
    if (work == 0 || work >= work_of(item) || !consistent(other)) continue;
    draft = other;
    item = smaller;
  }
  Problem& p = item.problem;
  if (p.packed) {
    p.total_q = random.next_between(0, p.batch * p.seqlen_q);
    if (!p.cache) p.total_k = random.next_between(0, p.batch * p.seqlen_k);
  }
  if (p.cache && p.cache->lengths == Lengths::before) {
    p.cache->seqlen_new = random.next_between(0, std::min<std::int64_t>(p.seqlen_k, 20));
  }
  if (p.cache && p.cache->paged()) {
    const std::int64_t rows = p.cache->rows > 0 ? p.cache->rows : p.batch;
    const std::int64_t columns = (p.seqlen_k + p.cache->page_size - 1) / p.cache->page_size;
    p.cache->num_pages = random.next_between(1, rows * columns + 2);
  }
  item.random = random.next();
  return item;
}

/// Draws one seqlen of a draft from [low, high]; it stays.
void keep(std::size_t& kept, Draft& draft, Random& random, const std::string& seqlen,
          const std::vector<std::int64_t>& values, std::int64_t low, std::int64_t high) {
  const auto first = std::lower_bound(values.begin(), values.end(), low) - values.begin();
  const auto last = std::upper_bound(values.begin(), values.end(), high) - values.begin() - 1;
  for (kept = 0; features()[kept].name != seqlen;) ++kept;
  draft.value[kept] = static_cast<int>(random.next_between(first, last));
}

/// What hardly any case of the usual work has: in two of sixteen more keys than a decode kernel
/// takes in one piece, in two several tiles and several blocks of keys.
Case draw_any_case(Random& random, Arch best) {
  Draft draft{std::vector<int>(features().size())};
  const std::int64_t kind = random.next_between(0, 15);
  if (kind < 2) {
    keep(draft.keep_a, draft, random, "seqlen_k", kSeqlensK, 1025, 4097);
  } else if (kind < 4) {
    keep(draft.keep_a, draft, random, "seqlen_q", kSeqlensQ, 96, 257);
    keep(draft.keep_b, draft, random, "seqlen_k", kSeqlensK, 129, 513);
  }
  return draw_case(draft, random, best, kind < 4 ? kLongWork : kUsualWork,
                   random.next_between(0, 1) == 0);
}

}  // namespace

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

std::int64_t work_of(const Case& item) {
  const Problem& p = item.problem;
  const std::int64_t work =
      p.batch * p.num_heads * p.seqlen_q * p.seqlen_k * (p.head_dim + p.head_dim_v);
  return p.pass == Pass::backward ? 3 * work : work;
}

std::string Case::command() const {
  std::string text = "tessera check \"" + to_string(problem) + "\" --seed " +
                     std::to_string(seed()) + " --device " + to_string(arch) + " --threads " +
                     std::to_string(threads);
  return in_reverse ? text + "  # workers one after another, the last one first" : text;
}

void Pairs::add(const Case& item) {
  std::vector<int> values;
  for (const Feature& f : features()) values.push_back(f.get(item));
  for (std::size_t a = 0; a < values.size(); ++a) {
    for (std::size_t b = a + 1; b < values.size(); ++b) {
      seen_.insert({static_cast<int>(a), values[a], static_cast<int>(b), values[b]});
    }
  }
}

std::vector<Pairs::Pair> Pairs::missing(Arch best) const {
  std::vector<Pair> pairs;
  const auto count = [best](std::size_t f) {
    const bool arch = features()[f].name == "arch";
    return arch ? static_cast<int>(best) + 1 : static_cast<int>(features()[f].values.size());
  };
  for (std::size_t a = 0; a < features().size(); ++a) {
    for (std::size_t b = a + 1; b < features().size(); ++b) {
      for (int i = 0; i < count(a); ++i) {
        for (int j = 0; j < count(b); ++j) {
          const Pair pair = {static_cast<int>(a), i, static_cast<int>(b), j};
          if (possible(a, i, b, j) && !seen_.contains(pair)) pairs.push_back(pair);
        }
      }
    }
  }
  return pairs;
}

std::vector<Case> cases(std::uint64_t seed, std::int64_t count, Arch best) {
  Random random(seed, 1);
  std::vector<Case> list;
  Pairs pairs;
  for (std::int64_t i = 0; i < count; ++i) {
    list.push_back(draw_any_case(random, best));
    if (count >= kFullSweep) pairs.add(list.back());
  }
  if (count < kFullSweep) return list;
  for (const Pairs::Pair& pair : pairs.missing(best)) {
    Draft draft{std::vector<int>(features().size()), static_cast<std::size_t>(pair[0]),
                static_cast<std::size_t>(pair[2])};
    draft.value[draft.keep_a] = pair[1];
    draft.value[draft.keep_b] = pair[3];
    list.push_back(draw_case(draft, random, best, kLargestWork, false));
  }
  return list;
}

}  // namespace tessera::tools
