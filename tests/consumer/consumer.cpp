// Uses the installed C++ API: two queries, causal, so that the first returns the first value
// exactly.
#include <cmath>
#include <cstdio>
#include <tessera/tessera.hpp>
#include <vector>

int main() {
  const tessera::Result<tessera::Problem> problem =
      tessera::parse_problem("fwd f32 b=1 h=1 q=2 k=2 d=4 causal");
  if (!problem) return std::fprintf(stderr, "%s\n", problem.status().text.c_str()), 1;

  const std::vector<float> q(8, 0.0F), k(8, 1.0F);  // equal scores: the second query averages
  const std::vector<float> v = {1, 2, 3, 4, 5, 6, 7, 8};
  std::vector<float> o(8);
  tessera::Tensors tensors;
  tensors.q = {q.data(), 8, 4, 4};
  tensors.k = {k.data(), 8, 4, 4};
  tensors.v = {v.data(), 8, 4, 4};
  tensors.o = {o.data(), 8, 4, 4};
  const tessera::Status status = tessera::attend(*problem, tensors);
  if (!status.ok()) return std::fprintf(stderr, "%s\n", status.text.c_str()), 1;

  for (std::size_t i = 0; i < 4; ++i) {
    if (o[i] != v[i] || std::abs(o[4 + i] - (v[i] + v[4 + i]) / 2) > 1e-6F) {
      return std::fprintf(stderr, "o[%zu] = %g, o[%zu] = %g\n", i, o[i], 4 + i, o[4 + i]), 1;
    }
  }
  std::printf("tessera %s: %s\n", tessera::version(), tessera::to_string(*problem).c_str());
}
