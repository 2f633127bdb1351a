// What a forward simulator adds tiles of keys to.
#pragma once

#include <vector>

#include "core/softmax.h"
#include "tile/head.h"

namespace tessera::tile {

/// One row's running state: softmax and unnormalised output.
struct Accumulator {
  core::Softmax<float> softmax;
  std::vector<float> o;
};

/// masked: whether the row may not see some of the keys.
inline void add_tile(const Head& head, std::int64_t row, core::Range tile, bool masked,
                     Accumulator& acc) {
  const int query = head.rows().query_of(row);
  core::Softmax<float> next = acc.softmax;
  std::vector<float> scores(static_cast<std::size_t>(tile.size()), -core::kInfinity);
  for (int key = tile.begin; key < tile.end; ++key) {
    if (masked && !head.mask().visible(query, key)) continue;
    float& s = scores[static_cast<std::size_t>(key - tile.begin)];
    s = head.score2(row, key);
    next.max = core::max(next.max, s);
  }
  const float shift = core::shift_of(next.max);
  const float rescale = core::exp2(acc.softmax.max - shift);
  next.sum *= rescale;
  for (float& x : acc.o) x *= rescale;
  for (int key = tile.begin; key < tile.end; ++key) {
    const float p = core::exp2(scores[static_cast<std::size_t>(key - tile.begin)] - shift);
    if (p == 0.0F) continue;
    next.sum += p;
    const float weight = p * head.keep(row, key);
    for (std::size_t c = 0; c < acc.o.size(); ++c) acc.o[c] += weight * head.v(key)[c];
  }
  acc.softmax = next;
}

}  // namespace tessera::tile
