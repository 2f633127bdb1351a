// Partial results in memory with gaps, and what their merge must be, in double: for the tests of
// every backend's combine.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <string>

#include "elements.h"
#include "tessera/tessera.hpp"

namespace tessera {

/// Parts of random rows. One in five has seen no key, and its output is NaN; every seventh row has
/// only such parts.
struct Partial {
  PartialResults sizes;
  PartialTensors tensors;
  Elements o_parts, o, lse_parts, lse;

  /// gap: elements between rows that belong to nobody. 0 or 8 leave them aligned.
  Partial(std::mt19937& random, const PartialResults& results, std::int64_t gap) : sizes(results) {
    const std::int64_t row = sizes.head_dim_v + gap, heads = sizes.num_heads;
    const std::int64_t rows = sizes.rows();
    o_parts = Elements(sizes.dtype, rows * sizes.num_splits * row + gap);
    o = Elements(sizes.dtype_o, rows * row + gap);
    lse_parts = Elements(Dtype::f32, rows * sizes.num_splits * 2);
    lse = Elements(Dtype::f32, rows * 2);
    // Splits innermost but one, heads outside of queries in the one, inside in the other.
    tensors.o_parts = {o_parts.data(), row, sizes.num_splits * row * heads * sizes.seqlen_q,
                       sizes.num_splits * row * heads, sizes.num_splits * row};
    tensors.o = {o.data(), row * heads * sizes.seqlen_q, row, row * sizes.seqlen_q};
    tensors.lse_parts = {static_cast<const float*>(lse_parts.data()), rows * 2,
                         heads * sizes.seqlen_q * 2, 2, sizes.seqlen_q * 2};
    tensors.softmax_lse = {static_cast<float*>(lse.data()), heads * sizes.seqlen_q * 2, heads * 2,
                           2};
    std::normal_distribution<double> normal, wide(0.0, 4.0);
    std::int64_t number = 0;
    for_each_row([&](std::int64_t b, std::int64_t q, std::int64_t h) {
      const bool empty = ++number % 7 == 0;
      for (std::int64_t s = 0; s < sizes.num_splits; ++s) {
        const bool nothing = empty || random() % 5 == 0;
        lse_parts.set(lse_part(s, b, q, h), nothing ? -INFINITY : wide(random));
        for (std::int64_t c = 0; c < sizes.head_dim_v; ++c) {
          o_parts.set(part(s, b, q, h) + c, nothing ? NAN : normal(random));
        }
      }
    });
  }

  std::int64_t part(std::int64_t s, std::int64_t b, std::int64_t q, std::int64_t h) const {
    const ConstPartialRows& t = tensors.o_parts;
    return s * t.stride_split + b * t.stride_batch + q * t.stride_seqlen + h * t.stride_head;
  }
  std::int64_t lse_part(std::int64_t s, std::int64_t b, std::int64_t q, std::int64_t h) const {
    const ConstPartialLse& t = tensors.lse_parts;
    return s * t.stride_split + b * t.stride_batch + q * t.stride_seqlen + h * t.stride_head;
  }
  template <class T>
  static std::int64_t row(const T& t, std::int64_t b, std::int64_t q, std::int64_t h) {
    return b * t.stride_batch + q * t.stride_seqlen + h * t.stride_head;
  }
  template <class Body>
  void for_each_row(const Body& body) const {
    for (std::int64_t b = 0; b < sizes.batch; ++b) {
      for (std::int64_t q = 0; q < sizes.seqlen_q; ++q) {
        for (std::int64_t h = 0; h < sizes.num_heads; ++h) body(b, q, h);
      }
    }
  }
  void clear() {
    o = Elements(sizes.dtype_o, o.count());
    lse = Elements(Dtype::f32, lse.count());
    tensors.o.data = o.data();
    tensors.softmax_lse.data = static_cast<float*>(lse.data());
  }

  /// Rows are the merge of their parts, and nothing else has been written.
  void check(const std::string& what) const {
    const double rounding = reference::unit_roundoff(sizes.dtype_o);
    std::int64_t written = 0, numbers = 0;
    for (std::int64_t i = 0; i < o.count(); ++i) written += o.untouched(i) ? 0 : 1;
    for (std::int64_t i = 0; i < lse.count(); ++i) numbers += lse.untouched(i) ? 0 : 1;
    ASSERT_EQ(written, sizes.rows() * sizes.head_dim_v) << what;
    ASSERT_EQ(numbers, tensors.softmax_lse.data == nullptr ? 0 : sizes.rows()) << what;
    for_each_row([&](std::int64_t b, std::int64_t q, std::int64_t h) {
      double sum = 0.0;
      for (std::int64_t s = 0; s < sizes.num_splits; ++s) {
        sum += std::exp(lse_parts.at(lse_part(s, b, q, h)));
      }
      if (numbers > 0) {
        const double x = lse.at(row(tensors.softmax_lse, b, q, h));
        ASSERT_TRUE(sum == 0.0 ? x == -INFINITY : std::abs(x - std::log(sum)) < 1e-5)
            << what << ", lse " << x << " of " << sum;
      }
      for (std::int64_t c = 0; c < sizes.head_dim_v; ++c) {
        double expected = 0.0, scale = 0.0;
        for (std::int64_t s = 0; s < sizes.num_splits; ++s) {
          const double weight = std::exp(lse_parts.at(lse_part(s, b, q, h))) / sum;
          if (!(weight > 0.0)) continue;
          expected += weight * o_parts.at(part(s, b, q, h) + c);
          scale += weight * std::abs(o_parts.at(part(s, b, q, h) + c));
        }
        const double x = o.at(row(tensors.o, b, q, h) + c);
        const double allowed = rounding * std::abs(expected) + 1e-5 * scale +
                               reference::subnormal_roundoff(sizes.dtype_o);
        ASSERT_NEAR(x, expected, allowed)
            << what << ", row " << b << " " << q << " " << h << ", column " << c;
      }
    });
  }
};

inline std::string text_of(const PartialResults& r) {
  const char* const names[] = {"f32", "bf16", "f16"};
  return std::string(names[static_cast<int>(r.dtype)]) + " to " +
         names[static_cast<int>(r.dtype_o)] + " splits " + std::to_string(r.num_splits) +
         " batch " + std::to_string(r.batch) + " seqlen " + std::to_string(r.seqlen_q) + " heads " +
         std::to_string(r.num_heads) + " dim " + std::to_string(r.head_dim_v);
}

}  // namespace tessera
