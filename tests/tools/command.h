// The tessera command, called and listened to.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "cli.h"

namespace tessera::tools {

struct Ran {
  int code = 0;
  std::string out, err;
};

inline Ran tessera(const std::vector<std::string>& words) {
  std::vector<const char*> argv = {"tessera"};
  for (const std::string& word : words) argv.push_back(word.c_str());
  testing::internal::CaptureStdout();
  testing::internal::CaptureStderr();
  Ran ran;
  ran.code = run_cli(static_cast<int>(argv.size()), argv.data());
  ran.out = testing::internal::GetCapturedStdout();
  ran.err = testing::internal::GetCapturedStderr();
  return ran;
}

}  // namespace tessera::tools
