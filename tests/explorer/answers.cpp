// The engine as a program: a request a line in, an answer a line out. wasm_test.py compares it with
// the same sources compiled to WebAssembly.
//
//   explorer_answers                        requests from standard input
//   explorer_answers problems SEED COUNT    random problems, one a line
#include <cstdlib>
#include <iostream>
#include <string>

#include "engine/engine.h"
#include "explorer/problems.h"

int main(int argc, char** argv) {
  constexpr std::int64_t kLargest = 64;
  if (argc == 4 && std::string(argv[1]) == "problems") {
    const std::uint64_t seed = std::strtoull(argv[2], nullptr, 10);
    for (const tessera::Problem& problem :
         tessera::explorer::random_problems(seed, std::strtoll(argv[3], nullptr, 10), kLargest)) {
      std::cout << to_string(problem) << "\n";
    }
    return 0;
  }
  for (std::string line; std::getline(std::cin, line);) {
    std::cout << tessera::explorer::answer(line) << "\n";
  }
  return 0;
}
