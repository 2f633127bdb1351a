// The dropout mask for who wants to see it.
#include <algorithm>
#include <cstdint>

#include "core/philox.h"
#include "tessera/tessera.hpp"

namespace tessera {

Status dropout_mask(const Problem& problem, std::uint64_t seed, std::uint64_t offset,
                    std::uint8_t* keep) {
  const Problem& p = problem;
  if (Status s = validate(p); !s) return s;
  if (p.batch == 0 || p.seqlen_q == 0 || p.seqlen_k == 0) return {};
  if (keep == nullptr) return Status::invalid("keep = null: must point to the mask");
  const core::Dropout dropout = core::make_dropout(p.dropout_p, seed, offset);
  const auto word = [](std::int64_t x) { return static_cast<std::uint32_t>(x); };
  for (std::int64_t batch = 0; batch < p.batch; ++batch) {
    for (std::int64_t head = 0; head < p.num_heads; ++head) {
      for (std::int64_t query = 0; query < p.seqlen_q; ++query, keep += p.seqlen_k) {
        for (std::int64_t first = 0; first < p.seqlen_k; first += core::kPhiloxKeys) {
          const auto bits = core::dropout_bits(dropout, word(batch), word(head), word(query),
                                               word(first / core::kPhiloxKeys));
          const std::int64_t end = std::min(first + core::kPhiloxKeys, p.seqlen_k);
          for (std::int64_t key = first; key < end; ++key)
            keep[key] = core::dropout_keeps(dropout, bits, static_cast<int>(key)) ? 1 : 0;
        }
      }
    }
  }
  return {};
}

}  // namespace tessera
