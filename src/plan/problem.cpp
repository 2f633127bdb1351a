// Problem as text and as a hash key. One table of words serves printing and parsing.
#include "tessera/problem.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <vector>

#include "plan/plan.h"
#include "plan/text.h"

namespace tessera {

float Problem::scale() const {
  return softmax_scale ? *softmax_scale : 1.0F / std::sqrt(static_cast<float>(score_dim()));
}

std::int64_t Problem::value_tile_bytes() const {
  return value_tiles_of(*this).tile_bytes() * tiles_of_head(*this);
}

const char* to_string(Dtype dtype) {
  switch (dtype) {
    case Dtype::f32: return "f32";
    case Dtype::bf16: return "bf16";
    case Dtype::f16: return "f16";
    case Dtype::e4m3: return "e4m3";
    case Dtype::i8: return "i8";
  }
  return "?";
}

const char* to_string(Scaling scaling) {
  switch (scaling) {
    case Scaling::none: return "none";
    case Scaling::tensor: return "tensor";
    case Scaling::head: return "head";
    case Scaling::token: return "token";
    case Scaling::block: return "block";
    case Scaling::channel: return "channel";
    case Scaling::group: return "group";
  }
  return "?";
}

const char* to_string(Pass pass) { return pass == Pass::forward ? "fwd" : "bwd"; }

namespace {

/// "a/b", or "a" alone where both are equal.
std::string pair_text(std::int64_t a, std::int64_t b) {
  return a == b ? std::to_string(a) : std::to_string(a) + "/" + std::to_string(b);
}

std::string bias_text(const BiasShape& bias) {
  std::string text;
  if (bias.batch) text += 'b';
  if (bias.heads) text += 'h';
  if (bias.queries) text += 'q';
  if (bias.keys) text += 'k';
  if (text.empty()) text = "1";
  return text + ":" + to_string(bias.dtype);
}

/// Cuts the text at the first separator; the rest stays in `text`.
std::string_view cut(std::string_view& text, char separator) {
  const std::size_t end = text.find(separator);
  const std::string_view head = text.substr(0, end);
  text = end == std::string_view::npos ? std::string_view() : text.substr(end + 1);
  return head;
}

Status parse_error(std::string_view word, std::string_view accepted) {
  return Status::invalid("problem: '" + std::string(word) +
                         "' is not understood; accepted: " + std::string(accepted));
}

/// "a,b" or "a/b"; with one number only if `single` is allowed, then both get it.
bool read_pair(std::string_view text, char separator, bool single, std::int64_t& a,
               std::int64_t& b) {
  const bool has_two = text.find(separator) != std::string_view::npos;
  const std::string_view first = cut(text, separator);
  if (!read_int(first, a)) return false;
  if (has_two) return read_int(text, b);
  b = a;
  return single;
}

bool read_dtype(std::string_view text, Dtype& dtype) {
  for (const Dtype candidate : {Dtype::f32, Dtype::bf16, Dtype::f16, Dtype::e4m3, Dtype::i8}) {
    if (text == to_string(candidate)) {
      dtype = candidate;
      return true;
    }
  }
  return false;
}

/// Whether a scaling says how many share a scale.
bool has_size(Scaling scaling) { return scaling == Scaling::block || scaling == Scaling::group; }

std::string scaling_text(Scaling scaling, std::int64_t block) {
  const std::string text = to_string(scaling);
  return has_size(scaling) || block != 0 ? text + ":" + std::to_string(block) : text;
}

bool read_scaling(std::string_view text, Scaling& scaling, std::int64_t& block) {
  const std::string_view name = cut(text, ':');
  for (const Scaling candidate : {Scaling::none, Scaling::tensor, Scaling::head, Scaling::token,
                                  Scaling::block, Scaling::channel, Scaling::group}) {
    if (name != to_string(candidate)) continue;
    scaling = candidate;
    return text.empty() ? !has_size(candidate) : read_int(text, block);
  }
  return false;
}

bool read_scales(std::string_view text, ScaleShape& scales) {
  std::int64_t block_q = 0;
  return read_scaling(cut(text, '/'), scales.q, block_q) && block_q == 0 &&
         read_scaling(cut(text, '/'), scales.k, scales.block_k) &&
         read_scaling(text, scales.v, scales.block_v);
}

bool read_bias(std::string_view text, std::optional<BiasShape>& bias) {
  BiasShape shape{false, false, false, false, Dtype::f32};
  const std::string_view dims = cut(text, ':');
  if (!text.empty() && !read_dtype(text, shape.dtype)) return false;
  if (dims.empty()) return false;
  bool* const flags[] = {&shape.batch, &shape.heads, &shape.queries, &shape.keys};
  constexpr std::string_view letters = "bhqk";
  if (dims != "1") {
    for (const char letter : dims) {
      const std::size_t index = letters.find(letter);
      if (index == std::string_view::npos || *flags[index]) return false;
      *flags[index] = true;
    }
  }
  bias = shape;
  return true;
}

std::string cache_text(const CacheShape& cache) {
  const bool before = cache.lengths == Lengths::before;
  const std::string text = before ? "before" : cache.lengths == Lengths::after ? "after" : "full";
  return before || cache.seqlen_new != 0 ? text + ":" + std::to_string(cache.seqlen_new) : text;
}

std::string pages_text(const CacheShape& cache) {
  return std::to_string(cache.num_pages) + "x" + std::to_string(cache.page_size) +
         (cache.page_ids == PageIds::i64 ? ":i64" : "") + (cache.skips ? ":skip" : "");
}

/// The cache, which every word about it makes.
CacheShape& cache_of(Problem& p) {
  if (!p.cache) p.cache = CacheShape();
  return *p.cache;
}

bool read_cache(std::string_view text, CacheShape& cache) {
  const std::string_view lengths = cut(text, ':');
  cache.lengths = lengths == "before"  ? Lengths::before
                  : lengths == "after" ? Lengths::after
                                       : Lengths::full;
  if (cache.lengths == Lengths::full && lengths != "full") return false;
  if (text.empty()) return cache.lengths != Lengths::before;
  return read_int(text, cache.seqlen_new);
}

bool read_pages(std::string_view text, CacheShape& cache) {
  std::string_view numbers = cut(text, ':');
  cache.page_ids = PageIds::i32;
  cache.skips = false;
  if (!text.empty() && text != "skip") {
    const std::string_view ids = cut(text, ':');
    if (ids != "i32" && ids != "i64") return false;
    if (ids == "i64") cache.page_ids = PageIds::i64;
  }
  if (!text.empty()) {
    if (text != "skip") return false;
    cache.skips = true;
  }
  return read_pair(numbers, 'x', false, cache.num_pages, cache.page_size);
}

bool read_per_head(std::string_view text, PerHead& value) {
  value = text == "bh" ? PerHead::batch_heads : PerHead::heads;
  return text == "bh" || text == "h";
}

/// One word of the grammar.
struct Word {
  std::string_view name;      ///< "causal", or "b" for "b=2"
  std::string_view accepted;  ///< shown in errors and in the docs
  bool (*read)(Problem& problem, std::string_view value);
};

template <bool Problem::* flag>
bool set_flag(Problem& problem, std::string_view) {
  return problem.*flag = true;
}

template <std::int64_t Problem::* field>
bool set_int(Problem& problem, std::string_view value) {
  return read_int(value, problem.*field);
}

template <float Problem::* field>
bool set_float(Problem& problem, std::string_view value) {
  return read_float(value, problem.*field);
}

constexpr Word kFlags[] = {
    {"fwd", "fwd",
     [](Problem& p, std::string_view) {
       p.pass = Pass::forward;
       return true;
     }},
    {"bwd", "bwd",
     [](Problem& p, std::string_view) {
       p.pass = Pass::backward;
       return true;
     }},
    {"f32", "f32",
     [](Problem& p, std::string_view) {
       p.dtype = Dtype::f32;
       return true;
     }},
    {"bf16", "bf16",
     [](Problem& p, std::string_view) {
       p.dtype = Dtype::bf16;
       return true;
     }},
    {"f16", "f16",
     [](Problem& p, std::string_view) {
       p.dtype = Dtype::f16;
       return true;
     }},
    {"e4m3", "e4m3",
     [](Problem& p, std::string_view) {
       p.dtype = Dtype::e4m3;
       return true;
     }},
    {"i8", "i8",
     [](Problem& p, std::string_view) {
       p.dtype = Dtype::i8;
       return true;
     }},
    {"score_shift", "score_shift",
     [](Problem& p, std::string_view) { return p.scales.score_shift = true; }},
    {"v_shift", "v_shift", [](Problem& p, std::string_view) { return p.scales.v_shift = true; }},
    {"v_tiles", "v_tiles", set_flag<&Problem::v_tiles>},
    {"qv", "qv", set_flag<&Problem::qv>},
    {"causal", "causal",
     [](Problem& p, std::string_view) {
       p.window_right = 0;
       return true;
     }},
    {"sink", "sink", set_flag<&Problem::sink>},
    {"tree", "tree", set_flag<&Problem::tree>},
    {"leftpad", "leftpad", [](Problem& p, std::string_view) { return cache_of(p).leftpad = true; }},
    {"deterministic", "deterministic", set_flag<&Problem::deterministic>},
    {"batch_invariant", "batch_invariant", set_flag<&Problem::batch_invariant>},
    {"unaligned", "unaligned", set_flag<&Problem::unaligned>},
};

constexpr Word kValues[] = {
    {"b", "b=BATCH", set_int<&Problem::batch>},
    {"h", "h=NUM_HEADS or h=NUM_HEADS/NUM_HEADS_K",
     [](Problem& p, std::string_view v) {
       return read_pair(v, '/', true, p.num_heads, p.num_heads_k);
     }},
    {"q", "q=SEQLEN_Q", set_int<&Problem::seqlen_q>},
    {"k", "k=SEQLEN_K", set_int<&Problem::seqlen_k>},
    {"d", "d=HEAD_DIM or d=HEAD_DIM/HEAD_DIM_V",
     [](Problem& p, std::string_view v) {
       return read_pair(v, '/', true, p.head_dim, p.head_dim_v);
     }},
    {"packed", "packed=TOTAL_Q,TOTAL_K, or with a cache packed=TOTAL_Q",
     [](Problem& p, std::string_view v) {
       p.packed = true;
       return v.find(',') == std::string_view::npos
                  ? read_int(v, p.total_q)
                  : read_pair(v, ',', false, p.total_q, p.total_k);
     }},
    {"cache", "cache=full, cache=after or cache=before:SEQLEN_NEW",
     [](Problem& p, std::string_view v) { return read_cache(v, cache_of(p)); }},
    {"pages", "pages=NUM_PAGESxPAGE_SIZE or pages=NUM_PAGESxPAGE_SIZE:i64",
     [](Problem& p, std::string_view v) { return read_pages(v, cache_of(p)); }},
    {"rows", "rows=ROWS",
     [](Problem& p, std::string_view v) { return read_int(v, cache_of(p).rows); }},
    {"prefixes", "prefixes=LEVELS",
     [](Problem& p, std::string_view v) { return read_int(v, cache_of(p).prefix_levels); }},
    {"chunk", "chunk=KEYS", set_int<&Problem::chunk>},
    {"sink_tokens", "sink_tokens=KEYS", set_int<&Problem::sink_tokens>},
    {"scale", "scale=SOFTMAX_SCALE",
     [](Problem& p, std::string_view v) {
       float scale = 0.0F;
       const bool good = read_float(v, scale);
       p.softmax_scale = scale;
       return good;
     }},
    {"softcap", "softcap=CAP", set_float<&Problem::softcap>},
    {"window", "window=LEFT,RIGHT (-1: unbounded)",
     [](Problem& p, std::string_view v) {
       return read_pair(v, ',', false, p.window_left, p.window_right);
     }},
    {"align", "align=br or align=tl",
     [](Problem& p, std::string_view v) {
       p.alignment = v == "tl" ? Alignment::top_left : Alignment::bottom_right;
       return v == "tl" || v == "br";
     }},
    {"alibi", "alibi=h or alibi=bh",
     [](Problem& p, std::string_view v) { return read_per_head(v, p.alibi); }},
    {"bias", "bias=DIMS or bias=DIMS:DTYPE, DIMS the stored ones of bhqk, 1 for none of them",
     [](Problem& p, std::string_view v) { return read_bias(v, p.bias); }},
    {"dropout", "dropout=PROBABILITY", set_float<&Problem::dropout_p>},
    {"o", "o=f32, o=bf16 or o=f16",
     [](Problem& p, std::string_view v) {
       p.dtype_o = Dtype::f32;
       return read_dtype(v, *p.dtype_o);
     }},
    {"v", "v=bf16 or v=f16",
     [](Problem& p, std::string_view v) {
       p.dtype_v = Dtype::f32;
       return read_dtype(v, *p.dtype_v);
     }},
    {"kv", "kv=e4m3 or kv=i8",
     [](Problem& p, std::string_view v) {
       p.dtype_kv = Dtype::f32;
       return read_dtype(v, *p.dtype_kv);
     }},
    {"scales",
     "scales=Q/K/V, Q one of tensor, head, token, none; K of tensor, head, token, block:KEYS; V of "
     "tensor, head, token, block:KEYS, channel, group:COLUMNS, none",
     [](Problem& p, std::string_view v) { return read_scales(v, p.scales); }},
};

std::string all_words() {
  std::string text;
  for (const Word& word : kFlags) text += (text.empty() ? "" : ", ") + std::string(word.accepted);
  for (const Word& word : kValues) text += ", " + std::string(word.accepted);
  return text;
}

/// What a word decides; two that decide the same contradict each other.
std::string_view subject_of(std::string_view name) {
  if (name == "fwd" || name == "bwd") return "fwd, bwd";
  constexpr std::string_view kTypes = "f32, bf16, f16, e4m3, i8";
  Dtype dtype = Dtype::f32;
  if (read_dtype(name, dtype)) return kTypes;
  return name;
}

}  // namespace

std::string to_string(const Problem& p) {
  std::string text = std::string(to_string(p.pass)) + " " + to_string(p.dtype);
  const auto add = [&text](const std::string& word) { text += " " + word; };
  add("b=" + std::to_string(p.batch));
  add("h=" + pair_text(p.num_heads, p.num_heads_k));
  add("q=" + std::to_string(p.seqlen_q));
  add("k=" + std::to_string(p.seqlen_k));
  add("d=" + pair_text(p.head_dim, p.head_dim_v));
  if (p.packed) {
    const bool both = !p.cache || p.total_k != 0;
    add("packed=" + std::to_string(p.total_q) + (both ? "," + std::to_string(p.total_k) : ""));
  }
  if (p.cache) {
    add("cache=" + cache_text(*p.cache));
    if (p.cache->page_size != 0 || p.cache->num_pages != 0 || p.cache->page_ids != PageIds::i32 ||
        p.cache->skips) {
      add("pages=" + pages_text(*p.cache));
    }
    if (p.cache->rows != 0) add("rows=" + std::to_string(p.cache->rows));
    if (p.cache->prefix_levels != 0) add("prefixes=" + std::to_string(p.cache->prefix_levels));
    if (p.cache->leftpad) add("leftpad");
  }
  if (p.window_left == -1 && p.window_right == 0) {
    add("causal");
  } else if (p.window_left != -1 || p.window_right != -1) {
    add("window=" + std::to_string(p.window_left) + "," + std::to_string(p.window_right));
  }
  if (p.alignment == Alignment::top_left) add("align=tl");
  if (p.chunk != 0) add("chunk=" + std::to_string(p.chunk));
  if (p.sink_tokens != 0) add("sink_tokens=" + std::to_string(p.sink_tokens));
  if (p.tree) add("tree");
  if (p.qv) add("qv");
  if (p.softmax_scale) add("scale=" + float_text(*p.softmax_scale));
  if (p.softcap != 0.0F) add("softcap=" + float_text(p.softcap));
  if (p.alibi != PerHead::none) add(p.alibi == PerHead::heads ? "alibi=h" : "alibi=bh");
  if (p.bias) add("bias=" + bias_text(*p.bias));
  if (p.sink) add("sink");
  if (p.dropout_p != 0.0F) add("dropout=" + float_text(p.dropout_p));
  if (p.deterministic) add("deterministic");
  if (p.batch_invariant) add("batch_invariant");
  if (p.unaligned) add("unaligned");
  if (p.dtype_o) add(std::string("o=") + to_string(*p.dtype_o));
  if (p.dtype_v) add(std::string("v=") + to_string(*p.dtype_v));
  if (p.dtype_kv) add(std::string("kv=") + to_string(*p.dtype_kv));
  const ScaleShape& s = p.scales;
  if (s != ScaleShape{.score_shift = s.score_shift, .v_shift = s.v_shift}) {
    add("scales=" + scaling_text(s.q, 0) + "/" + scaling_text(s.k, s.block_k) + "/" +
        scaling_text(s.v, s.block_v));
  }
  if (s.score_shift) add("score_shift");
  if (s.v_shift) add("v_shift");
  if (p.v_tiles) add("v_tiles");
  return text;
}

Result<Problem> parse_problem(std::string_view text) {
  Problem problem;
  std::vector<std::string_view> seen;
  bool causal = false, queries_alone = false;
  std::string_view window;
  while (!text.empty()) {
    const std::size_t start = text.find_first_not_of(" \t\r\n");
    if (start == std::string_view::npos) break;
    text.remove_prefix(start);
    const std::size_t length = text.find_first_of(" \t\r\n");
    const std::string_view word = text.substr(0, length);
    text.remove_prefix(word.size());

    std::string_view value = word;
    const bool has_value = word.find('=') != std::string_view::npos;
    const std::string_view name = cut(value, '=');
    const Word* match = nullptr;
    if (has_value) {
      for (const Word& candidate : kValues) match = candidate.name == name ? &candidate : match;
    } else {
      for (const Word& candidate : kFlags) match = candidate.name == name ? &candidate : match;
    }
    if (match == nullptr) return parse_error(word, all_words());
    const std::string_view subject = subject_of(name);
    for (const std::string_view other : seen) {
      if (other != subject) continue;
      return parse_error(
          word, subject == name ? "each word once" : "one of " + std::string(subject) + ", once");
    }
    seen.push_back(subject);
    const std::int64_t right = problem.window_right;
    if (!match->read(problem, value)) return parse_error(word, match->accepted);
    queries_alone =
        queries_alone || (name == "packed" && value.find(',') == std::string_view::npos);
    // Both name the right end: in either order they mean 0, or contradict each other.
    causal = causal || name == "causal";
    if (name == "window") window = word;
    if (causal && !window.empty()) {
      const auto [low, high] = std::minmax({right, problem.window_right});
      if (low < -1 || high > 0) {
        return parse_error(window, "beside causal: window=LEFT,0 or window=LEFT,-1");
      }
      problem.window_right = 0;
    }
  }
  if (queries_alone && !problem.cache) {
    return parse_error("packed=" + std::to_string(problem.total_q),
                       "packed=TOTAL_Q,TOTAL_K; TOTAL_Q alone beside cache=");
  }
  return problem;
}

}  // namespace tessera

std::size_t std::hash<tessera::Problem>::operator()(
    const tessera::Problem& problem) const noexcept {
  // Plans are remembered by it, so every call from Python pays: numbers, one multiplication each.
  std::uint64_t state = 0;
  const auto mix = [&state](std::uint64_t number) {
    state = (state ^ number) * 0x9E3779B97F4A7C15U;
    state ^= state >> 32;
  };
  const auto add = [&mix](auto... values) { (mix(static_cast<std::uint64_t>(values)), ...); };
  // -0 equals 0.
  const auto add_real = [&mix](float value) { mix(std::bit_cast<std::uint32_t>(value + 0.0F)); };
  const tessera::Problem& p = problem;
  add(p.pass, p.dtype, p.batch, p.num_heads, p.num_heads_k, p.seqlen_q, p.seqlen_k, p.head_dim,
      p.head_dim_v, p.packed, p.total_q, p.total_k, p.window_left, p.window_right, p.alignment,
      p.chunk, p.sink_tokens, p.tree, p.alibi, p.sink, p.deterministic, p.batch_invariant,
      p.unaligned, p.cache.has_value(), p.softmax_scale.has_value(), p.bias.has_value(),
      p.dtype_o.has_value(), p.dtype_v.has_value(), p.dtype_kv.has_value(), p.v_tiles, p.qv);
  add_real(p.softcap);
  add_real(p.dropout_p);
  if (p.softmax_scale) add_real(*p.softmax_scale);
  if (p.dtype_o) add(*p.dtype_o);
  if (p.dtype_v) add(*p.dtype_v);
  if (p.dtype_kv) add(*p.dtype_kv);
  if (const auto& s = p.scales; s != tessera::ScaleShape{}) {
    add(s.q, s.k, s.v, s.block_k, s.block_v, s.score_shift, s.v_shift);
  }
  if (p.bias) add(p.bias->batch, p.bias->heads, p.bias->queries, p.bias->keys, p.bias->dtype);
  if (const auto& c = p.cache) {
    add(c->lengths, c->seqlen_new, c->page_size, c->num_pages, c->page_ids, c->rows, c->leftpad,
        c->skips, c->prefix_levels);
  }
  return static_cast<std::size_t>(state);
}
