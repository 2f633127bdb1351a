// Prefixes that neighbouring sequences of a cache share (S13): keys that lie in the same pages of
// all of them, and that all their queries see. Found by comparing rows of the page table, chosen by
// what reading them once saves. Prefixes of prefixes are levels: the tree of neighbours' common
// beginnings is that of a suffix array (Kasai et al. 2001).
#pragma once

#include "core/pages.h"
#include "core/spans.h"

namespace tessera::core {

/// Keys [begin, end) of `count` neighbouring sequences, which are one piece of work: a prefix, or
/// what is left of one sequence.
struct Segment {
  int sequence = 0;  ///< the first
  int count = 1;
  int begin = 0, end = 0;
  int level = 0;        ///< how many prefixes lie before it
  int parent = -1;      ///< the last of these, a segment's number; -1: none
  bool prefix = false;  ///< no mask hides any of its keys
  // A prefix's items on the line of spans:
  int blocks = 0, units = 0;  ///< of rows, of a key/value head; of keys, of each
  int before = 0;             ///< what those of the prefixes before it cost
  friend constexpr bool operator==(const Segment&, const Segment&) = default;
};

/// Levels at most: each is a part of every row below it.
inline constexpr int kMostPrefixLevels = 4;

/// Of a sequence: columns of its page table whose keys every one of its queries sees.
TESSERA_HD constexpr int shareable_columns(const Pages& pages, const Sequence& sequence,
                                           const SequenceMask& mask) {
  const Range seen = mask.common_keys({0, sequence.seqlen_q});
  return sequence.first_k == 0 && seen.begin == 0 ? min(seen.end, sequence.seqlen_k) / pages.size
                                                  : 0;
}

/// A common beginning of sequences [first, end): so many keys.
struct CommonKeys {
  int first = 0, end = 0, keys = 0;
  friend constexpr bool operator==(const CommonKeys&, const CommonKeys&) = default;
};

/// Lists every run of neighbours that have more keys in common than with those around them, inner
/// ones before outer ones; returns how many there are, fewer than `batch`. shared(b): keys that
/// sequences b - 1 and b have in common; next(b): the first sequence behind b, at most `batch`,
/// with other keys in common than the one before it, or any on the way there; list: room for
/// `batch`.
template <class Shared, class Next>
TESSERA_HD constexpr int list_common_keys(int batch, const Shared& shared, const Next& next,
                                          CommonKeys* list) {
  // Runs that have ended are listed from the front; those that have not, innermost first, up to the
  // back. There are never as many as the list has room for.
  int ended = 0, open = batch;
  for (int b = 1; b <= batch; b = b < batch ? next(b) : b + 1) {
    const int keys = b < batch ? shared(b) : 0;
    int first = b - 1;
    while (open < batch && list[open].keys > keys) {
      const CommonKeys run = {list[open].first, b, list[open].keys};
      ++open;
      list[ended++] = run;
      first = run.first;
    }
    if (keys > 0 && (open == batch || list[open].keys < keys)) list[--open] = {first, 0, keys};
  }
  return ended;
}

/// Whether a prefix of so many keys is to be read once for all rows of `sequences`, in `together`
/// blocks of rows, not in `separate` ones. A part more of a sequence's rows costs about what
/// reading kMerge keys does.
TESSERA_HD constexpr bool pays(std::int64_t keys, std::int64_t separate, std::int64_t together,
                               std::int64_t sequences) {
  constexpr std::int64_t kMerge = 64;
  return keys * (separate - together) > kMerge * sequences;
}

/// Of a sequence, beside its prefixes.
struct OwnKeys {
  int begin = 0;    ///< its prefixes' keys
  int levels = 0;   ///< how many prefixes it has
  int prefix = -1;  ///< the last of them, a segment's number
};

/// Query rows of sequences, of a key/value head, in blocks of block_m.
struct PrefixRows {
  const std::int32_t* cu_seqlens_q = nullptr;  ///< null: dense
  int seqlen_q = 1;                            ///< of dense ones
  int group = 1;                               ///< query heads of a key/value head
  int block_m = 1;

  TESSERA_HD constexpr int queries(int first, int end) const {
    return cu_seqlens_q == nullptr ? (end - first) * seqlen_q
                                   : cu_seqlens_q[end] - cu_seqlens_q[first];
  }
  /// Blocks that all rows of sequences [first, end) fill together; or those of each its own, one
  /// where it has no rows.
  /// @{
  TESSERA_HD constexpr int together(int first, int end) const {
    return ceil_div(queries(first, end) * group, block_m);
  }
  TESSERA_HD constexpr int separate(int first, int end) const {
    if (cu_seqlens_q == nullptr) return (end - first) * max(together(first, first + 1), 1);
    int sum = 0;
    for (int b = first; b < end; ++b) sum += max(together(b, b + 1), 1);
    return sum;
  }
  /// @}
};

/// What prefixes are made of, and how their items lie on the line.
struct PrefixRules {
  int batch = 0;   ///< sequences
  int levels = 0;  ///< prefixes of prefixes at most
  int heads = 1;   ///< key/value heads
  int unit_n = 1;  ///< keys of a unit
  Spans spans;
  PrefixRows rows;
};

/// What has been chosen.
struct ChosenPrefixes {
  int count = 0;
  int cost = 0;  ///< of their items
};

/// Of all segments.
struct SegmentCount {
  std::int32_t count = 0;
  std::int32_t prefix_cost = 0;  ///< of prefixes' items
};

/// Chooses prefixes among the common keys, outer ones first. own: [batch], of zeros; list: as
/// list_common_keys() leaves it; take(i, prefix): the i-th, which is segment batch + i.
template <class Take>
TESSERA_HD constexpr ChosenPrefixes choose_prefixes(const CommonKeys* list, int count,
                                                    const PrefixRules& rules, OwnKeys* own,
                                                    const Take& take) {
  ChosenPrefixes chosen;
  for (int i = count - 1; i >= 0; --i) {
    const CommonKeys run = list[i];
    const OwnKeys outer = own[run.first];
    if (outer.levels == rules.levels) continue;
    const int together = rules.rows.together(run.first, run.end);
    const int keys = run.keys - outer.begin, sequences = run.end - run.first;
    if (!pays(keys, rules.rows.separate(run.first, run.end), together, sequences)) continue;
    const int number = rules.batch + chosen.count, units = ceil_div(keys, rules.unit_n);
    take(chosen.count, Segment{run.first, sequences, outer.begin, run.keys, outer.levels,
                               outer.prefix, true, together, units, chosen.cost});
    chosen = {chosen.count + 1, chosen.cost + rules.heads * together * rules.spans.cost(units)};
    for (int b = run.first; b < run.end; ++b) own[b] = {run.keys, outer.levels + 1, number};
  }
  return chosen;
}

/// What is left of a sequence.
TESSERA_HD constexpr Segment rest_of(int batch, int seqlen_k, const OwnKeys& own) {
  return {batch, 1, own.begin, max(seqlen_k, own.begin), own.levels, own.prefix};
}

/// A block's item of a prefix. line: what all items cost; prefixes are the last ones, and cost so
/// much together.
TESSERA_HD constexpr SpanItem item_of(const Segment& prefix, const Spans& spans, int head,
                                      int block, int line, int prefixes) {
  const int number = head * prefix.blocks + block;
  return {line - prefixes + prefix.before + number * spans.cost(prefix.units), prefix.units};
}

/// A sequence's query among all of a prefix's.
TESSERA_HD constexpr int query_in(const Segment& prefix, const Sequences& all,
                                  const Sequence& sequence, int query) {
  return static_cast<int>(all.row_of(sequence, query) - all.row_of(all.at(prefix.sequence), 0));
}

/// A sequence as a segment has it: its first, with all queries of the segment. Dense queries of
/// several sequences follow each other.
TESSERA_HD constexpr Sequence sequence_of(const Segment& segment, Sequence first,
                                          const Sequences& all) {
  if (segment.prefix) {
    first.seqlen_q = all.packed() ? all.cu_seqlens_q[segment.sequence + segment.count] -
                                        all.cu_seqlens_q[segment.sequence]
                                  : segment.count * all.seqlen_q;
  }
  first.first_k += segment.begin;
  first.seqlen_k = segment.end - segment.begin;
  return first;
}

}  // namespace tessera::core
