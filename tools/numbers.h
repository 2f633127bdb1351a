// Numbers on the command line: what is wrong with one is said in a sentence, and nothing is
// guessed.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>

namespace tessera::tools {

/// For transform(): a whole decimal number in [low, high]. CLI11 alone reads 010 as 8, and -1 as
/// 2^64 - 1 where no sign is stored.
CLI::Validator whole_number(std::int64_t low, std::int64_t high);
/// The same of all 64 bits, without a sign.
CLI::Validator any_seed();
/// For check(): a finite number in [low, high], without its lower end if `above`.
CLI::Validator number(double low, double high, bool above = false);
/// For check(): any number that a float holds.
CLI::Validator finite_float();

}  // namespace tessera::tools
