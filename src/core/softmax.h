// The online softmax (FlashAttention, Dao et al. 2022, section 3.1; Milakov & Gimelshein 2018) as a
// mergeable state. Scores are base 2 inside; only lse() speaks natural logarithms (S5). One combine
// serves the running softmax, split keys, the sink, and partial results of several processors (S7).
// T is float or a vector of floats; exp2, log2, max and select are found by argument-dependent
// lookup.
#pragma once

#include "core/hd.h"

namespace tessera::core {

/// max of the base-2 scores seen, and sum of exp2(score - max). {-inf, 0} has seen nothing and is
/// the identity of combine.
template <class T>
struct Softmax {
  T max = T(-kInfinity);
  T sum = T(0.0F);
};

/// log2 of what a row's weights may reach before the reference, which stands for the maximum, is
/// raised to it: any shift gives the same quotient, so outputs are hardly ever rescaled.
inline constexpr float kCpuSlack = 30.0F, kGpuSlack = 8.0F;

/// What to subtract from scores before exp2: the maximum, or 0 while no key was visible, so that
/// -inf - (-inf) never happens and exp2 gives an exact 0 (S4).
template <class T>
TESSERA_HD T shift_of(T max) {
  return select(max == T(-kInfinity), T(0.0F), max);
}

template <class T>
TESSERA_HD Softmax<T> combine(const Softmax<T>& a, const Softmax<T>& b) {
  const T top = max(a.max, b.max);
  const T shift = shift_of(top);
  return {top, a.sum * exp2(a.max - shift) + b.sum * exp2(b.max - shift)};
}

/// The state of a finished part of the keys that reported only its natural-log lse. Of the same lse
/// the same bits wherever it is asked: a single part's weight is 1.
template <class T>
TESSERA_HD Softmax<T> from_lse(T lse) {
  return {multiply(lse, T(kLog2e)), select(lse == T(-kInfinity), T(0.0F), T(1.0F))};
}

/// 1 / sum, or 0 for a row that saw no key: its output is 0 (S4).
template <class T>
TESSERA_HD T inverse_sum(const Softmax<T>& row) {
  return select(row.sum == T(0.0F), T(0.0F), T(1.0F) / row.sum);
}

/// Factor by which a part's normalised output enters the merged one. 0: the part's output must not
/// be looked at, as it may be anything where no key was seen.
template <class T>
TESSERA_HD T weight_of(const Softmax<T>& part, const Softmax<T>& merged) {
  return part.sum * exp2(part.max - shift_of(merged.max)) * inverse_sum(merged);
}

/// Natural logarithm of the sum of exponentials; -inf for a row that saw no key (S4, S5).
template <class T>
TESSERA_HD T lse_of(const Softmax<T>& row) {
  return select(row.sum == T(0.0F), T(-kInfinity), (row.max + log2(row.sum)) * T(kLn2));
}

/// A row all of whose keys were seen: the factor that makes its sum of weight * value its output,
/// and the state of which lse is told.
template <class T>
struct FinishedRow {
  T factor;
  Softmax<T> state;
};

/// The end of a row: its sink, a natural-log logit, enters the denominator once, if it has one.
template <class T>
TESSERA_HD FinishedRow<T> finish(const Softmax<T>& row, bool has_sink, T sink) {
  FinishedRow<T> end = {inverse_sum(row), row};
  if (has_sink) {
    end.state = combine(row, Softmax<T>{sink * T(kLog2e), T(1.0F)});
    end.factor = weight_of(Softmax<T>{row.max, T(1.0F)}, end.state);
  }
  return end;
}

/// What the backward subtracts from base-2 scores: lse in base 2, or +inf for an empty row, so that
/// its probabilities are exactly 0 (S4).
template <class T>
TESSERA_HD T backward_shift(T lse) {
  return select(lse == T(-kInfinity), T(kInfinity), lse * T(kLog2e));
}

}  // namespace tessera::core
