// o in a type of its own (S14): every form of the forward writes it, and rounds to it once.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "archs.h"
#include "reference/storage.h"
#include "tessera/tessera.hpp"

namespace tessera {
namespace {

/// Scores are equal, so that o is the mean of 1 and 1 + 2^-7, which all types hold: 1 + 2^-8, which
/// bf16 does not.
void expect_mean(const Problem& p, const Device& device) {
  constexpr double kMean = 1.0 + 0x1p-8;
  const auto bytes = [](std::int64_t elements, Dtype dtype) {
    return std::vector<std::byte>(static_cast<std::size_t>(elements * size_of(dtype)));
  };
  const std::int64_t d = p.head_dim;
  const std::vector<std::byte> q = bytes(p.seqlen_q * d, p.dtype),
                               k = bytes(p.seqlen_k * d, p.dtype);
  std::vector<std::byte> v = k, o = bytes(p.seqlen_q * d, p.stored_o());
  for (std::int64_t i = 0; i < p.seqlen_k * d; ++i) {
    reference::store(p.dtype, v.data(), i, i / d % 2 == 0 ? 1.0 : 1.0 + 0x1p-7);
  }
  Tensors t;
  t.q = {q.data(), 0, d, d};
  t.k = {k.data(), 0, d, d};
  t.v = {v.data(), 0, d, d};
  t.o = {o.data(), 0, d, d};
  const Status status = attend(p, t, device);
  ASSERT_TRUE(status.ok()) << status.text;
  const double error =
      p.stored_o() == Dtype::f32 ? 1e-5 : 1.01 * reference::unit_roundoff(p.stored_o());
  for (std::int64_t i = 0; i < p.seqlen_q * d; ++i) {
    ASSERT_NEAR(reference::load(p.stored_o(), o.data(), i), kMean, error) << "element " << i;
  }
}

TEST(OutputType, IsWhatTheProblemSays) {
  // Decode, decode in splits, tiles, tiles with splits; whole vectors and rests.
  for (const char* sizes :
       {"q=1 k=2 d=64", "q=2 k=8192 d=19", "q=40 k=2 d=19", "q=70 k=8192 d=64"}) {
    for (const char* types :
         {"bf16 o=f32", "f16 o=f32", "f32 o=bf16", "f32 o=f16", "bf16 o=bf16"}) {
      const std::string text = std::string("fwd ") + types + " " + sizes;
      const Result<Problem> problem = parse_problem(text);
      ASSERT_TRUE(problem.ok()) << problem.status().text;
      for (const Arch arch : archs()) {
        const Result<Device> device = named_device(to_string(arch));
        ASSERT_TRUE(device.ok()) << device.status().text;
        SCOPED_TRACE(text + " on " + to_string(arch));
        expect_mean(*problem, *device);
      }
    }
  }
}

}  // namespace
}  // namespace tessera
