// The SIMD vocabulary, the vector functions and the product kernel of every instruction set that
// this machine has, against plain arithmetic in double.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "core/philox.h"
#include "cpu/detect.h"
#include "cpu/simd_probe.h"

namespace tessera::cpu {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

float from_bits(std::uint32_t x) { return std::bit_cast<float>(x); }
std::uint32_t to_bits(float x) { return std::bit_cast<std::uint32_t>(x); }
float from_bf16(std::uint16_t x) { return from_bits(std::uint32_t{x} << 16); }

/// An array whose end is the end of accessible memory: reading or writing past it is a crash.
template <class T>
class GuardedArray {
 public:
  explicit GuardedArray(std::size_t n) : bytes_(n * sizeof(T)) {
    const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    span_ = (bytes_ + page - 1) / page * page + page;
    base_ = static_cast<char*>(
        mmap(nullptr, span_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    mprotect(base_ + span_ - page, page, PROT_NONE);
    data_ = reinterpret_cast<T*>(base_ + span_ - page - bytes_);
  }
  ~GuardedArray() { munmap(base_, span_); }
  GuardedArray(const GuardedArray&) = delete;
  GuardedArray& operator=(const GuardedArray&) = delete;
  T* data() { return data_; }
  T& operator[](std::size_t i) { return data_[i]; }

 private:
  std::size_t bytes_, span_;
  char* base_;
  T* data_;
};

class Simd : public testing::TestWithParam<SimdProbe> {
 protected:
  void SetUp() override {
    seed_ = std::random_device{}();
    random_.seed(seed_);
    RecordProperty("seed", std::to_string(seed_));
  }
  void TearDown() override {
    if (HasFailure()) std::printf("seed %u\n", seed_);
  }
  const SimdProbe& simd() const { return GetParam(); }
  std::size_t lanes() const { return static_cast<std::size_t>(simd().lanes); }

  float uniform(float low, float high) {
    return std::uniform_real_distribution<float>(low, high)(random_);
  }
  std::uint32_t word() { return static_cast<std::uint32_t>(random_()); }
  std::int64_t whole(std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(random_);
  }
  std::vector<float> uniform_array(std::size_t n, float low, float high) {
    std::vector<float> x(n);
    for (float& v : x) v = uniform(low, high);
    return x;
  }

  /// The largest relative error of f over x where `expected` is a normal number.
  double worst_error(void (*f)(const float*, float*, std::int64_t), const std::vector<float>& x,
                     double (*expected)(double)) {
    std::vector<float> y(x.size());
    f(x.data(), y.data(), static_cast<std::int64_t>(x.size()));
    double worst = 0;
    for (std::size_t i = 0; i < x.size(); ++i) {
      const double want = expected(x[i]);
      if (std::fabs(want) < 0x1p-126 || std::fabs(want) > 3.4e38) continue;
      const double error = std::fabs(y[i] - want) / std::fabs(want);
      if (!(error <= worst)) worst = std::isnan(error) ? 1e30 : error;
    }
    return worst;
  }
  float one(void (*f)(const float*, float*, std::int64_t), float x) {
    float y = 0;
    f(&x, &y, 1);
    return y;
  }

  unsigned seed_ = 0;
  std::mt19937 random_;
};

TEST_P(Simd, Exp2) {
  std::vector<float> x = uniform_array(1 << 20, -126.0F, 128.0F);
  for (int i = 0; i < 1 << 18; ++i) x.push_back(uniform(-1.0F, 1.0F));
  for (int i = 0; i < 1 << 16; ++i) x.push_back(std::ldexp(uniform(-1.0F, 1.0F), -(i % 100)));
  EXPECT_LT(worst_error(simd().exp2, x, std::exp2), 2.5e-7);
  EXPECT_LT(worst_error(simd().exp2_short, x, std::exp2), 3.1e-6);
}

TEST_P(Simd, Exp2Ends) {
  for (auto* f : {simd().exp2, simd().exp2_short}) {
    for (int n = -126; n < 128; ++n) EXPECT_EQ(one(f, static_cast<float>(n)), std::ldexp(1.0F, n));
    for (const float x : {-kInf, -std::numeric_limits<float>::max(), -1e6F, -1000.0F, -150.5F,
                          -149.0F, -128.0F, -127.0F, -126.5F, -126.00001F}) {
      EXPECT_EQ(to_bits(one(f, x)), 0U) << x;
    }
    for (const float x : {128.0F, 129.0F, 1000.0F, std::numeric_limits<float>::max()}) {
      EXPECT_EQ(one(f, x), kInf) << x;
    }
    EXPECT_EQ(one(f, 0.0F), 1.0F);
    EXPECT_EQ(one(f, -0.0F), 1.0F);
    for (const float nan : {kNan, -kNan, from_bits(0x7FC00001U), from_bits(0xFFFFFFFFU)}) {
      EXPECT_TRUE(std::isnan(one(f, nan)));
    }
  }
}

TEST_P(Simd, Log2) {
  std::vector<float> x = uniform_array(1 << 18, 0.5F, 2.0F);
  for (int i = 0; i < 1 << 20; ++i) x.push_back(from_bits(word() % 0x7F800000U));
  for (int i = 0; i < 1 << 16; ++i) x.push_back(1.0F + std::ldexp(uniform(-1.0F, 1.0F), -(i % 24)));
  EXPECT_LT(worst_error(simd().log2, x, std::log2), 2.5e-7);
  EXPECT_EQ(one(simd().log2, 1.0F), 0.0F);
  EXPECT_EQ(one(simd().log2, 0.0F), -kInf);
  EXPECT_EQ(one(simd().log2, -0.0F), -kInf);
  EXPECT_EQ(one(simd().log2, kInf), kInf);
  EXPECT_EQ(one(simd().log2, from_bits(1)), -149.0F);
  for (const float x0 : {-1.0F, -kInf, kNan, from_bits(0x80000001U), from_bits(0xFFFFFFFFU)}) {
    EXPECT_TRUE(std::isnan(one(simd().log2, x0))) << x0;
  }
}

TEST_P(Simd, Tanh) {
  std::vector<float> x = uniform_array(1 << 20, -12.0F, 12.0F);
  for (int i = 0; i < 1 << 18; ++i) x.push_back(std::ldexp(uniform(-1.0F, 1.0F), -(i % 120)));
  EXPECT_LT(worst_error(simd().tanh, x, std::tanh), 3e-7);
  for (const float x0 : {20.0F, 1e10F, std::numeric_limits<float>::max(), kInf}) {
    EXPECT_EQ(one(simd().tanh, x0), 1.0F);
    EXPECT_EQ(one(simd().tanh, -x0), -1.0F);
  }
  EXPECT_EQ(one(simd().tanh, 0.0F), 0.0F);
  EXPECT_TRUE(std::isnan(one(simd().tanh, kNan)));
  EXPECT_TRUE(std::isnan(one(simd().tanh, from_bits(0xFFFFFFFFU))));
}

/// Rounds to nearest even among the numbers whose significand has `digits` bits and whose smallest
/// exponent is `least`; from `limit` up, infinity.
double rounded(double x, int digits, int least, double limit) {
  if (x == 0 || !std::isfinite(x)) return x;
  const double unit = std::ldexp(1.0, std::max(std::ilogb(x), least) - digits + 1);
  const double y = std::nearbyint(x / unit) * unit;
  return std::fabs(y) >= limit ? std::copysign(HUGE_VAL, x) : y;
}

double widened_f16(std::uint16_t h) {
  const int exponent = (h >> 10) & 31, fraction = h & 1023;
  const double sign = (h & 0x8000) != 0 ? -1 : 1;
  if (exponent == 31) return fraction != 0 ? std::nan("") : sign * HUGE_VAL;
  return sign *
         (exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25));
}

TEST_P(Simd, WidensEvery16BitNumber) {
  std::vector<std::uint16_t> x(65536);
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<std::uint16_t>(i);
  std::vector<float> y(x.size());
  simd().widen_bf16(x.data(), y.data(), 65536);
  for (std::size_t i = 0; i < x.size(); ++i) ASSERT_EQ(to_bits(y[i]), i << 16);
  simd().widen_f16(x.data(), y.data(), 65536);
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double want = widened_f16(x[i]);
    if (std::isnan(want)) {
      ASSERT_TRUE(std::isnan(y[i])) << i;
    } else {
      ASSERT_EQ(to_bits(y[i]), to_bits(static_cast<float>(want))) << i;
    }
  }
}

/// Every number of 8 bits; e4m3 by its definition: sign, 4 bits of exponent, 3 of fraction.
TEST_P(Simd, WidensEightBits) {
  std::vector<std::uint8_t> x(256);
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<std::uint8_t>(i);
  std::vector<float> y(x.size());
  simd().widen_e4m3(x.data(), y.data(), 256);
  for (int i = 0; i < 256; ++i) {
    const int exponent = i >> 3 & 15, fraction = i & 7;
    const float size = exponent == 0 ? std::ldexp(static_cast<float>(fraction), -9)
                                     : std::ldexp(static_cast<float>(8 + fraction), exponent - 10);
    const float found = y[static_cast<std::size_t>(i)];
    if ((i & 0x7F) == 0x7F) {
      ASSERT_TRUE(std::isnan(found)) << i;
    } else {
      ASSERT_EQ(to_bits(found), to_bits(i < 128 ? size : -size)) << i;
    }
  }
  simd().widen_i8(reinterpret_cast<const std::int8_t*>(x.data()), y.data(), 256);
  for (int i = 0; i < 256; ++i) {
    ASSERT_EQ(y[static_cast<std::size_t>(i)], static_cast<float>(i < 128 ? i : i - 256));
  }
}

/// Every number of 8 bits as bf16, which holds all of them.
TEST_P(Simd, BytesBecomeBf16) {
  if (simd().bytes_to_bf16 == nullptr) GTEST_SKIP() << "no bf16 dot product";
  std::vector<std::uint8_t> x(256);
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<std::uint8_t>(i);
  std::vector<float> exact(x.size());
  for (const bool e4m3 : {true, false}) {
    if (e4m3) {
      simd().widen_e4m3(x.data(), exact.data(), 256);
    } else {
      simd().widen_i8(reinterpret_cast<const std::int8_t*>(x.data()), exact.data(), 256);
    }
    for (std::size_t part = 0; part < x.size(); part += 64) {
      std::uint16_t y[64];
      simd().bytes_to_bf16(e4m3, x.data() + part, y);
      for (std::size_t i = 0; i < 64; ++i) {
        // Of each 16 bytes the first 8 are in the first vector.
        const std::size_t at = i % 16 / 8 * 32 + i / 16 * 8 + i % 8;
        const float found = from_bits(std::uint32_t{y[at]} << 16);
        if (std::isnan(exact[part + i])) {
          EXPECT_TRUE(std::isnan(found)) << part + i;
        } else {
          EXPECT_EQ(to_bits(found), to_bits(exact[part + i])) << part + i;
        }
      }
    }
  }
}

/// e4m3 by way of fp16: every number exactly, NaN as 1.875, and found anywhere among others.
TEST_P(Simd, E4m3BecomesFp16) {
  if (simd().e4m3_to_f16 == nullptr) GTEST_SKIP() << "no instruction widens fp16";
  std::vector<std::uint8_t> x(256);
  std::vector<std::uint16_t> y(256);
  std::vector<float> exact(256);
  for (int i = 0; i < 256; ++i) x[static_cast<std::size_t>(i)] = static_cast<std::uint8_t>(i);
  for (int i = 0; i < 256; i += 2 * simd().lanes) {
    simd().e4m3_to_f16(x.data() + i, y.data() + i);
  }
  simd().widen_e4m3(x.data(), exact.data(), 256);
  for (std::size_t i = 0; i < 256; ++i) {
    const auto found = static_cast<float>(256.0 * widened_f16(y[i]));
    if (std::isnan(exact[i])) {
      EXPECT_EQ(found, i < 128 ? 480.0F : -480.0F);
    } else {
      EXPECT_EQ(to_bits(found), to_bits(exact[i])) << i;
    }
  }
  const std::size_t n = std::size_t{4} * static_cast<std::size_t>(simd().lanes);
  std::vector<std::uint8_t> bytes(2 * n);
  for (int round = 0; round < 20; ++round) {
    for (std::uint8_t& byte : bytes) {
      do {
        byte = static_cast<std::uint8_t>(word());
      } while ((byte & 0x7F) == 0x7F);
    }
    const auto size = static_cast<std::int64_t>(bytes.size());
    EXPECT_FALSE(simd().nan_of_e4m3(bytes.data(), size));
    for (std::uint8_t& byte : bytes) {
      const std::uint8_t before = byte;
      byte = static_cast<std::uint8_t>(0x7F | (word() & 0x80));
      EXPECT_TRUE(simd().nan_of_e4m3(bytes.data(), size)) << &byte - bytes.data();
      byte = before;
    }
  }
}

TEST_P(Simd, NarrowsToNearestEven) {
  std::vector<float> x;
  for (std::uint32_t i = 0; i < 65536; ++i) {  // every bf16, its neighbours, halfway and beside it
    for (const std::uint32_t low : {0x0000U, 0x0001U, 0x7FFFU, 0x8000U, 0x8001U, 0xFFFFU}) {
      x.push_back(from_bits((i << 16) | low));
    }
  }
  for (std::uint32_t h = 0; h < 0x7C00; ++h) {  // every fp16 and the point halfway to the next
    const double a = widened_f16(static_cast<std::uint16_t>(h));
    const double b = h + 1 < 0x7C00 ? widened_f16(static_cast<std::uint16_t>(h + 1)) : 65536.0;
    const auto middle = static_cast<float>((a + b) / 2);
    for (const float v : {static_cast<float>(a), middle, std::nextafter(middle, 0.0F),
                          std::nextafter(middle, kInf)}) {
      x.push_back(v);
      x.push_back(-v);
    }
  }
  for (int i = 0; i < 1 << 18; ++i) x.push_back(from_bits(word()));
  const auto n = static_cast<std::int64_t>(x.size());
  std::vector<std::uint16_t> bf16(x.size()), f16(x.size());
  simd().narrow_bf16(x.data(), bf16.data(), n);
  simd().narrow_f16(x.data(), f16.data(), n);
  std::vector<std::uint32_t> pairs(x.size());
  std::vector<float> reversed(x.rbegin(), x.rend());
  simd().pair_bf16(x.data(), reversed.data(), pairs.data(), n);
  for (std::size_t i = 0; i < x.size(); ++i) {
    ASSERT_EQ(pairs[i], bf16[i] | (std::uint32_t{bf16[x.size() - 1 - i]} << 16)) << x[i];
    if (std::isnan(x[i])) {
      ASSERT_TRUE(std::isnan(from_bf16(bf16[i]))) << i;
      ASSERT_TRUE(std::isnan(widened_f16(f16[i]))) << i;
      continue;
    }
    // The hardware's bf16 conversion takes f32 denormals for zeros.
    const bool flushed = simd().has_bf16_dot && std::fabs(x[i]) < 0x1p-126F;
    const double want = flushed ? std::copysign(0.0, x[i]) : rounded(x[i], 8, -126, 0x1p128);
    ASSERT_EQ(to_bits(from_bf16(bf16[i])), to_bits(static_cast<float>(want))) << x[i];
    const double want16 = rounded(x[i], 11, -14, 65536.0);
    ASSERT_EQ(widened_f16(f16[i]), want16) << x[i];
    ASSERT_EQ(std::signbit(widened_f16(f16[i])), std::signbit(x[i])) << x[i];
  }
}

TEST_P(Simd, PartsStayInsideTheirArrays) {
  for (std::size_t n = 0; n <= 2 * lanes() + 1; ++n) {
    GuardedArray<float> x(n), y(n);
    GuardedArray<std::uint16_t> h(n), h2(n);
    GuardedArray<std::uint32_t> u(n), u2(n);
    std::vector<std::uint32_t> hi(n), lo(n);
    const auto size = static_cast<std::int64_t>(n);
    for (std::size_t i = 0; i < n; ++i) x[i] = static_cast<float>(word() % 200);
    simd().narrow_bf16(x.data(), h.data(), size);
    simd().widen_bf16(h.data(), y.data(), size);
    for (std::size_t i = 0; i < n; ++i) EXPECT_EQ(x[i], y[i]) << n;
    simd().load_pairs(h.data(), h.data(), u.data(), size);
    for (std::size_t i = 0; i < n; ++i) EXPECT_EQ(u[i], h[i] * 0x10001U);
    simd().load_pairs(h.data(), nullptr, u.data(), size);
    for (std::size_t i = 0; i < n; ++i) EXPECT_EQ(u[i], h[i]);
    simd().narrow_f16(x.data(), h2.data(), size);
    simd().widen_f16(h2.data(), y.data(), size);
    for (std::size_t i = 0; i < n; ++i) EXPECT_EQ(x[i], y[i]) << n;
    GuardedArray<std::uint8_t> bytes(n);
    for (std::size_t i = 0; i < n; ++i) bytes[i] = static_cast<std::uint8_t>(i % 120);
    simd().widen_i8(reinterpret_cast<const std::int8_t*>(bytes.data()), y.data(), size);
    for (std::size_t i = 0; i < n; ++i) EXPECT_EQ(y[i], static_cast<float>(i % 120));
    simd().widen_e4m3(bytes.data(), y.data(), size);
    if (n > 1) {
      EXPECT_EQ(y[1], 0x1p-9F);
    }
    GuardedArray<std::int32_t> r(n);
    simd().round_to_int(x.data(), r.data(), size);
    for (std::size_t i = 0; i < n; ++i) EXPECT_EQ(r[i], static_cast<std::int32_t>(x[i]));
    for (std::size_t i = 0; i < n; ++i) u[i] = word(), u2[i] = word();
    simd().multiply(u.data(), u2.data(), hi.data(), lo.data(), size);
    for (std::size_t i = 0; i < n; ++i) {
      const std::uint64_t product = std::uint64_t{u[i]} * u2[i];
      EXPECT_EQ(hi[i], product >> 32);
      EXPECT_EQ(lo[i], static_cast<std::uint32_t>(product));
    }
  }
}

TEST_P(Simd, PhiloxIsTheScalarOne) {  // S8
  const std::uint32_t key0 = word(), key1 = word();
  std::vector<std::uint32_t> y(1000);
  simd().philox(key0, key1, y.data(), 1000);
  for (std::uint32_t i = 0; i < 1000; ++i) {
    const auto want = core::philox4x32_10<std::uint32_t>({{i, 1, 2, 3}}, key0, key1);
    ASSERT_EQ(y[i], want.word[0]) << i;
  }
}

TEST_P(Simd, Comparisons) {
  const std::vector<float> special = {0.0F, -0.0F, 1.0F, -1.0F, kInf, -kInf, kNan, from_bits(1)};
  for (int repeat = 0; repeat < 200; ++repeat) {
    std::vector<float> a(lanes()), b(lanes());
    for (std::size_t i = 0; i < lanes(); ++i) {
      a[i] = (word() & 1) != 0 ? special[word() % special.size()] : from_bits(word());
      b[i] = (word() & 1) != 0 ? special[word() % special.size()] : from_bits(word());
      if (word() % 4 == 0) b[i] = a[i];
    }
    if (repeat == 0) std::fill(a.begin(), a.end(), -kInf), std::fill(b.begin(), b.end(), 1.0F);
    std::uint32_t got[18], want[18] = {};
    simd().compare(a.data(), b.data(), got);
    std::uint32_t count = 0;
    for (std::size_t l = 0; l < lanes(); ++l) {
      const auto u = to_bits(a[l]), v = to_bits(b[l]);
      const auto i = static_cast<std::int32_t>(u), j = static_cast<std::int32_t>(v);
      const bool truth[16] = {a[l]<b[l], a[l] <= b[l], a[l]> b[l],
                              a[l] >= b[l],
                              a[l] == b[l],
                              a[l] != b[l],
                              i<j, i <= j, i>
                                  j,
                              i >= j,
                              i == j,
                              u<v, u <= v, u>
                                  v,
                              u >= v,
                              u == v};
      for (int c = 0; c < 16; ++c) want[c] |= std::uint32_t{truth[c]} << l;
      count += truth[0] ? 1 : 0;
    }
    want[16] = count > 0 ? 1 : 0;
    want[17] = count == lanes() ? 1 : 0;
    for (int c = 0; c < 18; ++c) ASSERT_EQ(got[c], want[c]) << "comparison " << c;
  }
}

TEST_P(Simd, Arithmetic) {
  for (int repeat = 0; repeat < 100; ++repeat) {
    const auto a = uniform_array(lanes(), -2, 2), c = uniform_array(lanes(), -2, 2);
    auto b = uniform_array(lanes(), -2, 2);
    b[word() % lanes()] = kNan;
    std::vector<float> y(lanes()), z(5 * lanes());
    simd().arithmetic(a.data(), b.data(), c.data(), y.data(), z.data());
    for (std::size_t i = 0; i < lanes(); ++i) {
      const double p = double{a[i]} * b[i], q = c[i];
      const float want[6] = {a[i] < b[i] ? a[i] : b[i], static_cast<float>(p + q),
                             static_cast<float>(p - q), static_cast<float>(q - p),
                             a[i] < b[i] ? a[i] : b[i], a[i] > b[i] ? a[i] : b[i]};
      for (std::size_t op = 0; op < 6; ++op) {
        const float got = op == 0 ? y[i] : z[(op - 1) * lanes() + i];
        if (std::isnan(b[i])) {
          ASSERT_TRUE(std::isnan(got)) << op;
        } else {
          ASSERT_NEAR(got, want[op], 1e-6) << op;
        }
      }
    }
  }
}

TEST_P(Simd, AcrossLanes) {
  const std::size_t n = lanes();
  const auto x = uniform_array(n * n, -1, 1);
  auto moved = x;
  simd().transpose(moved.data());
  std::vector<float> sums(n);
  simd().sum_rows(x.data(), sums.data());
  for (std::size_t i = 0; i < n; ++i) {
    double sum = 0;
    float maximum = -kInf;
    for (std::size_t j = 0; j < n; ++j) {
      ASSERT_EQ(moved[j * n + i], x[i * n + j]);
      sum += x[i * n + j];
      maximum = std::max(maximum, x[i * n + j]);
    }
    float got_sum = 0, got_maximum = 0;
    simd().reduce(x.data() + i * n, &got_sum, &got_maximum);
    EXPECT_NEAR(sums[i], sum, 2e-6);
    EXPECT_NEAR(got_sum, sum, 2e-6);
    EXPECT_EQ(got_maximum, maximum);
  }
}

/// A product's sizes: every number of rows up to a few blocks, then anything.
struct Shape {
  std::int64_t rows, k;
  std::int64_t nv;
  bool columns;
  std::int64_t last_only;  ///< of the k
};

class Product : public Simd {
 protected:
  template <class Check>
  void for_shapes(const Check& check) {
    const int block = simd().row_block;
    for (std::int64_t rows = 0; rows <= 3 * block + 1; ++rows) {
      for (const std::int64_t k : {0, 1, 2, 3, 4, 5, 7, 8, 64}) {
        for (int variant = 0; variant < 4; ++variant) {
          check(shape(rows, k, 1 + (variant & 1), (variant & 2) != 0));
        }
      }
    }
    for (int i = 0; i < 50; ++i) {
      check(shape(whole(0, 140), whole(0, 300), whole(1, 2), whole(0, 1) == 1));
    }
  }

  /// With a random last_only, one time in two, where it has a meaning.
  Shape shape(std::int64_t rows, std::int64_t k, std::int64_t nv, bool columns) {
    const bool some = nv == 2 && columns && whole(0, 1) == 1;
    return {rows, k, nv, columns, some ? k - 2 * whole(0, k / 2) : 0};
  }

  /// `got` was `before`; a and b: A(m, k) and B[k][column] in double.
  template <class A, class B>
  void expect_product(const Shape& s, const std::vector<float>& before,
                      const std::vector<float>& got, const A& a, const B& b) {
    const std::int64_t width = s.nv * simd().lanes;
    for (std::int64_t m = 0; m < s.rows; ++m) {
      for (std::int64_t n = 0; n < width; ++n) {
        const auto at = static_cast<std::size_t>(m * width + n);
        double sum = before[at], magnitude = std::fabs(sum);
        const std::int64_t end = n < width - simd().lanes ? s.k - s.last_only : s.k;
        for (std::int64_t k = 0; k < end; ++k) {
          sum += a(m, k) * b(k, n);
          magnitude += std::fabs(a(m, k) * b(k, n));
        }
        ASSERT_NEAR(got[at], sum, 1e-6 * magnitude)
            << "rows " << s.rows << " k " << s.k << " nv " << s.nv << " columns " << s.columns
            << " last_only " << s.last_only << " at " << m << "," << n;
      }
    }
  }
};

TEST_P(Product, F32) {
  for_shapes([&](const Shape& s) {
    const std::int64_t length = s.columns ? s.rows : s.k, count = s.columns ? s.k : s.rows;
    const std::int64_t stride = length + whole(0, 3), width = s.nv * simd().lanes;
    const std::int64_t used = count > 0 ? (count - 1) * stride + length : 0;
    GuardedArray<float> a(static_cast<std::size_t>(used));
    GuardedArray<float> b(static_cast<std::size_t>(s.k * width));
    for (std::int64_t i = 0; i < used; ++i) a.data()[i] = uniform(-1, 1);
    for (std::int64_t i = 0; i < s.k * width; ++i) b.data()[i] = uniform(-1, 1);
    const auto before = uniform_array(static_cast<std::size_t>(s.rows * width), -1, 1);
    auto c = before;
    simd().product_f32(s.rows, s.k, static_cast<int>(s.nv), s.columns, s.last_only, a.data(),
                       stride, b.data(), c.data());
    expect_product(
        s, before, c,
        [&](std::int64_t m, std::int64_t k) -> double {
          return a.data()[s.columns ? k * stride + m : m * stride + k];
        },
        [&](std::int64_t k, std::int64_t n) -> double { return b.data()[k * width + n]; });
  });
}

TEST_P(Product, Bf16) {
  if (!simd().has_bf16_dot) GTEST_SKIP() << "no bf16 dot product";
  const auto random_bf16 = [&] {
    return static_cast<std::uint16_t>(to_bits(uniform(-1, 1)) >> 16);
  };
  for_shapes([&](const Shape& s) {
    const std::int64_t width = s.nv * simd().lanes, steps = (s.k + 1) / 2;
    // Rows: bf16, at any even address, nothing readable after the last; columns: pairs.
    const std::int64_t length = s.columns ? 2 * s.rows : s.k, count = s.columns ? steps : s.rows;
    const std::int64_t stride = length + (s.columns ? 2 * whole(0, 3) : whole(0, 3));
    const std::int64_t used = count > 0 ? (count - 1) * stride + length : 0;
    GuardedArray<std::uint16_t> a(static_cast<std::size_t>(used));
    GuardedArray<std::uint16_t> b(static_cast<std::size_t>(2 * steps * width));
    for (std::int64_t i = 0; i < used; ++i) a.data()[i] = random_bf16();
    for (std::int64_t i = 0; i < 2 * steps * width; ++i) b.data()[i] = random_bf16();
    if (s.k % 2 == 1 && s.columns) {  // the caller's part: half a pair is completed by 0
      for (std::int64_t m = 0; m < s.rows; ++m) a.data()[(steps - 1) * stride + 2 * m + 1] = 0;
    }
    const auto before = uniform_array(static_cast<std::size_t>(s.rows * width), -1, 1);
    auto c = before;
    simd().product_bf16(s.rows, s.k, static_cast<int>(s.nv), s.columns, s.last_only, a.data(),
                        s.columns ? stride / 2 : stride,
                        reinterpret_cast<const std::uint32_t*>(b.data()), c.data());
    expect_product(
        s, before, c,
        [&](std::int64_t m, std::int64_t k) -> double {
          return from_bf16(a.data()[s.columns ? k / 2 * stride + 2 * m + k % 2 : m * stride + k]);
        },
        [&](std::int64_t k, std::int64_t n) -> double {
          return from_bf16(b.data()[(k / 2 * width + n) * 2 + k % 2]);
        });
  });
}

TEST_P(Simd, BurstsCountTheirWork) {
  EXPECT_GT(simd().f32_burst(10), 0.0);
  EXPECT_EQ(simd().f32_burst(20), 2 * simd().f32_burst(10));
  EXPECT_EQ(simd().bf16_burst(10) > 0.0, simd().has_bf16_dot);
}

std::vector<SimdProbe> probes() {
  std::vector<SimdProbe> found = {portable::simd_probe()};
#if defined(TESSERA_HAVE_AVX2)
  if (machine_arch() >= Arch::avx2) found.push_back(avx2::simd_probe());
#endif
#if defined(TESSERA_HAVE_AVX512)
  if (machine_arch() >= Arch::avx512) found.push_back(avx512::simd_probe());
#endif
#if defined(TESSERA_HAVE_AVX512_BF16)
  if (machine_arch() >= Arch::avx512_bf16) found.push_back(avx512_bf16::simd_probe());
#endif
  return found;
}

std::string name_of(const testing::TestParamInfo<SimdProbe>& info) { return info.param.name; }

/// Else tests of the richer sets would be missing without a word.
TEST(SimdProbes, ReachTheBestSetOfTheMachine) {
  EXPECT_EQ(probes().back().name, std::string(to_string(best_arch())));
}

INSTANTIATE_TEST_SUITE_P(Isa, Simd, testing::ValuesIn(probes()), name_of);
INSTANTIATE_TEST_SUITE_P(Isa, Product, testing::ValuesIn(probes()), name_of);

}  // namespace
}  // namespace tessera::cpu
