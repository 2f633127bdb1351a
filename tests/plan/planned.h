// What the planner's tests have in common: problems by their lines, devices by their instruction
// set.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "tessera/tessera.hpp"

namespace tessera {

inline Problem problem_of(const std::string& text) {
  const Result<Problem> parsed = parse_problem(text);
  EXPECT_TRUE(parsed.ok()) << parsed.status().text;
  return parsed.ok() ? *parsed : Problem{};
}

inline Device device_of(Arch arch, int threads = 2) {
  return {"test", arch, threads, 48 << 10, 1 << 20};
}

}  // namespace tessera
