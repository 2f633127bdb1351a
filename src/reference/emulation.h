// Attention in 8 bits as Hopper's tensor cores compute it, step by step: the casts of weights and
// the accumulator of wgmma. What a kernel may err beyond the formats of its inputs is judged by it,
// and what others' kernels return can be foretold, without a GPU.
#pragma once

#include <span>
#include <vector>

#include "reference/reference.h"

namespace tessera::reference {

/// What one wgmma of e4m3 operands makes of an accumulator and 32 products, which it adds at once:
/// all 33 terms are cut towards zero to 13 fraction bits of the greatest exponent among them (of a
/// product: the sum of its operands'), and so is the sum, of its own. No more than 32 pairs. The
/// model is MMA-Sim's (arXiv 2511.10909), which its authors compared with the hardware bit by bit.
double accumulate(double accumulator, std::span<const double> a, std::span<const double> b);

/// How far the sum of a's products with b may be off for that, where b are elements of e4m3 times
/// a scale, and a the sum of so many `parts` of e4m3, each less than the first: the variance of
/// what is likely, and the worst case.
struct CutTerms {
  double variance = 0.0, worst = 0.0;
};
CutTerms cut_terms(std::span<const double> a, std::span<const double> b, double scale, int parts);

/// How a kernel for operands of 8 bits goes about it.
struct EightBitKernel {
  std::int64_t block_n = 128;  ///< keys between two looks at a row's maximum
  std::int64_t promote_n = 0;  ///< keys after which sums go on in fp32; 0: never
  double offset = 8.0;         ///< log2 of the weight of what a row's reference was taken from
  double slack = 0.0;          ///< log2 of what weights may exceed that by before it is raised
  bool product_sum = false;    ///< the rounded weights of a row are added as products with ones
  bool last_first = false;     ///< blocks of keys from the last to the first
};

/// o and lse of a forward with q, k and v of e4m3, rounded to fp32 where a kernel's registers are.
/// Weights are e4m3, saturated. A scale of v by block needs promote_n that divides its block.
Outputs emulate(const Inputs& inputs, const EightBitKernel& kernel);

/// What casts of weights to e4m3 do to a head's part of o, wherever references lie.
struct WeightRounding {
  double energy = 0.0;  ///< the sum over elements of the error's expected square
  double count = 0.0;   ///< of independent roundings that make it, as if all were of one size
};

/// [num_heads]. Weights of a row that are nearly alike round alike, all others independently. One
/// emulation may be lucky: where all keys are alike, every weight may be a number of e4m3.
std::vector<WeightRounding> weight_rounding(const Inputs& inputs);

}  // namespace tessera::reference
