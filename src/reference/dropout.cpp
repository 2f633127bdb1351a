// Philox4x32-10 and the way S8 reads it: the key is Philox of the offset under the seed, the
// counter is (key / 8, query, head, batch), and each of the eight 16-bit halves of the result
// serves one key.
#include "reference/dropout.h"

#include <algorithm>
#include <cmath>

namespace tessera::reference {
namespace {

std::uint32_t low(std::uint64_t x) { return static_cast<std::uint32_t>(x & 0xFFFFFFFFU); }
std::uint32_t high(std::uint64_t x) { return static_cast<std::uint32_t>(x >> 32); }

}  // namespace

std::array<std::uint32_t, 4> philox4x32_10(std::array<std::uint32_t, 4> counter,
                                           std::array<std::uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t left = std::uint64_t{0xD2511F53} * counter[0];
    const std::uint64_t right = std::uint64_t{0xCD9E8D57} * counter[2];
    counter = {high(right) ^ counter[1] ^ key[0], low(right), high(left) ^ counter[3] ^ key[1],
               low(left)};
    key = {low(std::uint64_t{key[0]} + 0x9E3779B9), low(std::uint64_t{key[1]} + 0xBB67AE85)};
  }
  return counter;
}

Dropout::Dropout(float probability, std::uint64_t seed, std::uint64_t offset) {
  if (!(probability > 0.0F)) return;
  const double nearest = std::floor(static_cast<double>(probability) * 65536.0 + 0.5);
  threshold_ = static_cast<std::uint32_t>(std::clamp(nearest, 1.0, 65535.0));
  const auto mixed = philox4x32_10({low(offset), high(offset), 0, 0}, {low(seed), high(seed)});
  key_ = {mixed[0], mixed[1]};
}

double Dropout::factor(std::int64_t batch, std::int64_t head, std::int64_t query,
                       std::int64_t key) const {
  if (threshold_ == 0) return 1.0;
  const auto word = [](std::int64_t x) { return static_cast<std::uint32_t>(x); };
  const auto random = philox4x32_10({word(key / 8), word(query), word(head), word(batch)}, key_);
  const std::uint32_t pair = random[static_cast<std::size_t>(key % 8 / 2)];
  const std::uint32_t bits = key % 2 == 0 ? pair % 65536 : pair / 65536;
  return bits < threshold_ ? 0.0 : 65536.0 / (65536.0 - threshold_);
}

}  // namespace tessera::reference
