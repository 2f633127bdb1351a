// Sizes of a problem that both the choice of its pieces and their cost follow.
#pragma once

#include "core/kernel.h"
#include "plan/plan.h"
#include "tessera/device.hpp"
#include "tessera/problem.hpp"

namespace tessera {

/// Blocks of threads of a GPU's row that the device has at once.
std::int64_t resident_blocks(const core::Kernel& row, const Device& device);

/// Whether tiles of a GPU's forward are handed out as multiprocessors get free, not beforehand:
/// where only the device knows how many keys each has, and so how long it takes; and under a mask
/// where that is worth clearing a counter.
bool hands_out_tiles(const PlanData& plan);

/// core::WorkOrder::section. A CPU's heads all take turns. On a GPU it is few where tiles are
/// handed out as multiprocessors get free. Where they are dealt it is heads whose keys fit two
/// thirds of the second-level cache, and whose tiles make whole pairs of rounds, the second of
/// which evens out the first. All heads if there is no such number: where rounds do not end with
/// sections, the imbalance costs more than the cache gives.
std::int64_t section_of(const PlanData& plan);

/// core::WorkOrder::early, of a plan whose work has all else: enough heads for the others' longest
/// tiles, which come last, to end while short ones of these are left.
int early_heads(const PlanData& plan);

/// How many pieces share a block of keys in a GPU's backward (core::RowSteps, shared_keys.cpp):
/// more than one where there are few blocks of keys, and most multiprocessors would have none, or
/// all would wait for the longest. Of a plan whose work has all else but its section.
int splits_of_rows(const PlanData& plan);

/// Query rows of one key/value head of the longest sequence, all heads of the group together.
std::int64_t rows_per_head_k(const Problem& problem);

/// Visible (query, key) pairs of the longest sequence, from at most 64 sampled queries.
std::int64_t visible_pairs(const Problem& problem);

/// Bytes of a key and its value, of one head.
inline std::int64_t key_and_value_bytes(const Problem& problem) {
  return problem.head_dim * size_of(problem.stored_k()) +
         problem.head_dim_v * size_of(problem.stored_v());
}

}  // namespace tessera
