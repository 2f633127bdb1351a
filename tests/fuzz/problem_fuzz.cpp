// Any text given to the problem parser: it must not crash, and what it accepts must print to a text
// that reads back to an equal value and plans or refuses without trouble.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "tessera/tessera.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const tessera::Result<tessera::Problem> problem = tessera::parse_problem(text);
  if (!problem) return 0;
  const auto back = tessera::parse_problem(tessera::to_string(*problem));
  if (!back || *back != *problem) std::abort();
  const tessera::Device device{"fuzz", tessera::Arch::avx512_bf16, 4, 32 << 10, 1 << 20};
  const auto planned = tessera::plan(*problem, device);
  const bool valid = validate(*problem).ok();
  const bool other_o = problem->stored_o() != problem->dtype;
  const bool more_than_band = problem->chunk > 0 || problem->sink_tokens > 0 || problem->tree;
  const bool refused = problem->pass == tessera::Pass::backward && (other_o || more_than_band);
  if (planned.ok() != (valid && !refused)) std::abort();
  if (tessera::explain(*problem, device).empty()) std::abort();
  return 0;
}
