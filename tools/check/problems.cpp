// A case is a random choice of a value for each feature, made smaller where it would take too long
// to judge.
#include "check/problems.h"

#include <algorithm>
#include <set>

namespace tessera::tools {
namespace {

constexpr std::int64_t kUsualWork = 250000;     ///< of a random case
constexpr std::int64_t kLongWork = 1000000;     ///< of a case with long sequences
constexpr std::int64_t kLargestWork = 5000000;  ///< of a case that a pair demands

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
         feature == "rows" || feature == "leftpad" || feature == "skips" || feature == "prefixes";
}

bool asks_for_positions(const std::string& feature) {
  return std::find(std::begin(kPositional), std::end(kPositional), feature) !=
         std::end(kPositional);
}

/// Pages are skipped now and then, and then nothing that need not stay asks for positions.
void fit_skipping(Draft& draft, Random& random) {
  const std::size_t skips = index_of("skips");
  if (!draft.kept(skips) && random.next_between(0, 3) > 0) draft.value[skips] = 0;
  if (draft.value[skips] == 0) return;
  for (std::size_t f = 0; f < draft.value.size(); ++f) {
    if (asks_for_positions(features()[f].name) && !draft.kept(f)) draft.value[f] = 0;
  }
}

/// Prefixes are shared now and then, and then by what a GPU's row for them mostly takes.
void fit_prefixes(Draft& draft, Random& random) {
  const std::size_t prefixes = index_of("prefixes");
  if (!draft.kept(prefixes) && random.next_between(0, 1) > 0) draft.value[prefixes] = 0;
  if (draft.value[prefixes] == 0 || random.next_between(0, 3) == 0) return;
  for (std::size_t f = 0; f < draft.value.size(); ++f) {
    const std::string& name = features()[f].name;
    const bool hidden = asks_for_positions(name) && name != "window" && name != "tree";
    if ((hidden || name == "skips") && !draft.kept(f)) draft.value[f] = 0;
  }
}

bool is_of_scales(const std::string& feature) {
  return std::find(std::begin(kOfScales), std::end(kOfScales), feature) != std::end(kOfScales);
}

/// What only a forward has. Of sixteen draws five have a cache, four a mask of more than a band and
/// four tensors of 8 bits, two of them all, one keys and values alone, one values alone; of the
/// others half are a backward.
struct ForwardOnly {
  enum class Scaled : std::uint8_t { none, all, keys, values };
  bool cache = false, mask = false;
  Scaled scales = Scaled::none;  ///< the tensors that have some

  explicit ForwardOnly(Random& random) {
    const std::int64_t kind = random.next_between(0, 15);
    cache = kind >= 11;
    mask = kind == 9 || kind == 10 || kind >= 14;
    const std::int64_t bits = random.next_between(0, 15);
    scales = bits < 2    ? Scaled::all
             : bits == 2 ? Scaled::keys
             : bits == 3 ? Scaled::values
                         : Scaled::none;
  }
  static Scaled scaled_by(const std::string& scales) {
    if (scales == "none") return Scaled::none;
    if (scales.starts_with("none/none/")) return Scaled::values;
    return scales.starts_with("none/") ? Scaled::keys : Scaled::all;
  }
  /// What goes together: q of the first three types has no scales, of the other two it has; v of 16
  /// bits beside keys of 8 has none; of 8 bits alone it has some.
  int fitting(const std::string& feature, int drawn, const Draft& draft) const {
    const bool all = scales == Scaled::all;
    if (feature == "dtype") return all ? kPlainDtypes + drawn % 2 : drawn % kPlainDtypes;
    if (feature == "scales") {
      std::size_t chosen = static_cast<std::size_t>(drawn);
      while (scaled_by(kScales[chosen]) != scales) chosen = (chosen + 1) % kScales.size();
      return static_cast<int>(chosen);
    }
    if (feature == "kv dtype") return scales == Scaled::keys ? 1 + drawn % 2 : 0;
    if (feature == "v tiles" && !all) return 0;
    if (feature == "v dtype") {
      if (scales == Scaled::values) return 3 + drawn % 2;
      const int chosen = draft.value[index_of("scales")];
      return kScales[static_cast<std::size_t>(chosen)].ends_with("/none") ? 1 + drawn % 2 : 0;
    }
    return drawn;
  }
  /// Whether a feature that need not stay keeps its first value.
  bool leaves_out(const std::string& feature) const {
    if (is_of_cache(feature)) return !cache;
    if (is_mask(feature)) return !mask;
    if (is_of_scales(feature)) return scales == Scaled::none;
    return (cache || mask || scales != Scaled::none) && (feature == "pass" || feature == "dlse");
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
    fit_skipping(draft, random);
    fit_prefixes(draft, random);
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
