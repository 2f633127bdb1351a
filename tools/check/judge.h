// The judge: the one rule by which a result is right or wrong.
#pragma once

#include <string>
#include <vector>

#include "core/kernel.h"
#include "reference/reference.h"

namespace tessera::tools {

/// One output's verdict: its worst element.
struct Verdict {
  std::string output;  ///< "o", "softmax_lse", "dq", ...
  double error = 0.0;  ///< |result - reference|; NaN if a NaN or a wrong infinity was given
  double bound = 0.0;
  double largest = 0.0;  ///< of the output's finite |reference|: what error and bound are large to

  bool pass() const { return error <= bound; }  // false for NaN
};

/// What an output is held against.
struct Standard {
  std::string output;
  const std::vector<double>* exact = nullptr;  ///< the double reference
  const std::vector<double>* naive = nullptr;  ///< the same-dtype computation
  const std::vector<double>* noise = nullptr;  ///< reference::noise
  Dtype dtype = Dtype::f32;                    ///< storage of the output
};

/// max |a - b|; equal infinities differ by 0; NaN where either is NaN or only one is infinite.
double max_difference(const std::vector<double>& a, const std::vector<double>& b);

/// The rule, for every element x:
///   o, dq, dk, dv, dbias,  |x - exact| <= max(f * max|naive - exact|, its noise) + atol, f = 2 for
///   dsink                  o, 3 for gradients: no worse than a small multiple of the three plain
///                          steps in the same dtype; where those were lucky, than rounding allows
///                          (reference/noise.h). atol: three subnormal roundings of the storage
///                          type, and 1e-30, because exponentials below fp32's normal range become
///                          0.
///   softmax_lse            |lse - exact| <= its noise, in which scores and sums are fp32 whatever
///                          the dtype (S7). The plain steps round scores to the dtype.
Verdict judge(const Standard& standard, const std::vector<double>& result);

/// A row that multiplies 8 bits rounds weights to e4m3 and adds up in its accumulator. The
/// yardstick is its emulation, or what casts of weights are expected to do where the emulation is
/// luckier (reference/emulation.h). Of every head, with rms over its elements, and n the number of
/// independent roundings, or of elements where those are fewer:
///   o            rms(o - exact) <= (1.1 + 4 / sqrt(n)) max(rms(emulation - exact), expected rms)
///                                  + 1e-3 rms(exact)
///   softmax_lse  |lse - exact| <= 1.5 max|emulation - exact| + noise, and what it does to round
///                all weights alike, or to lose those below e4m3's range
std::vector<Verdict> judge_eight_bits(const core::Kernel& row, const reference::Inputs& inputs,
                                      const reference::Outputs& exact,
                                      const reference::Outputs& noise, const std::vector<double>& o,
                                      const std::vector<double>& lse);

}  // namespace tessera::tools
