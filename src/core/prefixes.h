// Prefixes that neighbouring sequences of a cache share (S13): keys that lie in the same pages of
// all of them, and that all their queries see. Found by comparing rows of the page table, chosen by
// what reading them once saves. Prefixes of prefixes are levels: the tree of neighbours' common
// beginnings is that of a suffix array (Kasai et al. 2001, section 5).
#pragma once

#include "core/pages.h"

namespace tessera::core {

/// Keys [begin, end) of `count` neighbouring sequences, which are one piece of work: a prefix, or
/// what is left of one sequence.
struct Segment {
  int sequence = 0;  ///< the first
  int count = 1;
  int begin = 0, end = 0;
  int level = 0;        ///< a prefix: how many lie before it; else how many the sequence has
  bool prefix = false;  ///< no mask hides any of its keys
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
/// sequences b - 1 and b have in common; list: room for `batch`.
template <class Shared>
TESSERA_HD constexpr int list_common_keys(int batch, const Shared& shared, CommonKeys* list) {
  // Runs that have ended are listed from the front; those that have not, innermost first, up to the
  // back. There are never as many as the list has room for.
  int ended = 0, open = batch;
  for (int b = 1; b <= batch; ++b) {
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
  int begin = 0;   ///< its prefixes' keys
  int levels = 0;  ///< how many prefixes it has
};

/// Chooses prefixes among the common keys, outer ones first. own: [batch], of zeros; list: as
/// list_common_keys() leaves it, of which the chosen ones replace the last; rows(first, end): query
/// rows of those sequences, of a key/value head. Returns how many.
template <class Rows, class Take>
TESSERA_HD constexpr int choose_prefixes(const CommonKeys* list, int count, int most_levels,
                                         int block_m, const Rows& rows, OwnKeys* own,
                                         const Take& take) {
  int chosen = 0;
  for (int i = count - 1; i >= 0; --i) {
    const CommonKeys run = list[i];
    const OwnKeys before = own[run.first];
    if (before.levels == most_levels) continue;
    std::int64_t separate = 0;
    for (int b = run.first; b < run.end; ++b) {
      separate += max<std::int64_t>(ceil_div<std::int64_t>(rows(b, b + 1), block_m), 1);
    }
    const std::int64_t together = ceil_div<std::int64_t>(rows(run.first, run.end), block_m);
    const int sequences = run.end - run.first;
    if (!pays(run.keys - before.begin, separate, together, sequences)) continue;
    take(chosen++, Segment{run.first, sequences, before.begin, run.keys, before.levels, true});
    for (int b = run.first; b < run.end; ++b) own[b] = {run.keys, before.levels + 1};
  }
  return chosen;
}

/// What is left of a sequence.
TESSERA_HD constexpr Segment rest_of(int batch, int seqlen_k, const OwnKeys& own) {
  return {batch, 1, own.begin, max(seqlen_k, own.begin), own.levels, false};
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
