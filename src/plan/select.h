// Choosing a kernel: every catalog row either refuses a problem with a reason or names its cost.
#pragma once

#include <string>

#include "plan/plan.h"

namespace tessera {

/// Why the row does not do this problem on this device: one sentence with the smallest change that
/// would help; empty: it does.
std::string refusal(const core::Kernel& row, const Problem& problem, const Device& device);

/// The plan that this row would follow. Precondition: the row does not refuse.
PlanData plan_row(const core::Kernel& row, const Problem& problem, const Device& device);

/// Whether plan() takes the device: device.threads.
Status validate(const Device& device);

/// Estimated core cycles for one key/value head of the longest sequence. A model, only good for
/// comparing rows: multiply-adds at full rate, the exponentials, reading K and V. It looks at
/// neither threads nor batch: which kernel runs must not depend on them (S9).
std::int64_t cost(const PlanData& plan);

}  // namespace tessera
