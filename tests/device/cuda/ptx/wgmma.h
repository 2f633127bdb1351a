// In place of src/cuda/ptx/wgmma.h where a kernel runs on fibers (fibers.h): what a product gives
// is there when it is issued. Operands are found by their descriptors, bit by bit.
#pragma once

#include <bit>
#include <vector>

#include "cuda/ptx/math.h"
#include "cuda/ptx/memory.h"
#include "reference/emulation.h"

namespace tessera::cuda::ptx {

inline void wgmma_fence() {}
inline void wgmma_commit() {}
/// Nobody goes on before the warpgroup's others have multiplied: one product is of all of them.
template <int kGroups>
void wgmma_wait() {
  device::Block& block = device::block();
  static_cast<void>(
      device::meet(block.warpgroups[threadIdx.x / device::kWarpgroup], device::kWarpgroup, false));
}
template <int kCount>
void wgmma_results(float (&)[kCount]) {}

inline std::uint32_t descriptor_along(std::uint32_t address) { return address >> 4 | 1U << 16; }
inline std::uint32_t descriptor_across(std::uint32_t address, std::uint32_t chunk_bytes) {
  return address >> 4 | chunk_bytes >> 4 << 16;
}
inline std::uint64_t descriptor(std::uint32_t low) {
  return low | std::uint64_t{1024 >> 4} << 32 | std::uint64_t{1} << 62;
}
inline std::uint32_t descriptor_of_panel(std::uint32_t address) {
  return descriptor_along(address);
}
inline std::uint64_t panel_descriptor(std::uint32_t low) {
  return low | std::uint64_t{256 >> 4} << 32 | std::uint64_t{3} << 62;
}

/// A shared operand: its rows' elements along the summed dimension, or those rows themselves.
class SharedOperand {
 public:
  explicit SharedOperand(std::uint64_t descriptor)
      : start_(static_cast<std::uint32_t>(descriptor & 0x3fff) << 4),
        leading_(static_cast<std::uint32_t>(descriptor >> 16 & 0x3fff) << 4),
        stride_(static_cast<std::uint32_t>(descriptor >> 32 & 0x3fff) << 4),
        swizzle_(static_cast<unsigned>(descriptor >> 62)) {}

  template <Dtype kType>
  double along(unsigned row, unsigned k) const {
    const std::uint32_t width = swizzle_ == 1 ? 128 : 32;
    return at<kType>(start_ + row / 8 * stride_ + row % 8 * width + k * bytes<kType>());
  }
  template <Dtype kType>
  double across(unsigned k, unsigned column) const {
    return at<kType>(start_ + column / 64 * leading_ + k / 8 * stride_ + k % 8 * 128 +
                     column % 64 * bytes<kType>());
  }

 private:
  template <Dtype kType>
  static constexpr std::uint32_t bytes() {
    return static_cast<std::uint32_t>(size_of(kType));
  }
  template <Dtype kType>
  double at(std::uint32_t address) const {
    const std::uint32_t place =
        swizzle_ == 1 ? swizzled128(address) : address ^ (address >> 7 & 1) << 4;
    return reference::load(kType, device::block().shared + place, 0);
  }
  std::uint32_t start_, leading_, stride_;
  unsigned swizzle_;
};

/// The operands of the warpgroup's threads, of which each has its part.
inline std::vector<std::array<std::uint32_t, 4>> show_operands(const std::uint32_t* a) {
  const device::Unseen unseen;
  const unsigned group = threadIdx.x / device::kWarpgroup;
  device::Meeting& meeting = device::block().warpgroups[group];
  auto& row = device::block().of_warpgroups[meeting.generation % 2];
  for (unsigned i = 0; i < 4; ++i) row[threadIdx.x][i] = a[i];
  static_cast<void>(device::meet(meeting, device::kWarpgroup, false));
  // Of the quad only: its lanes have the thread's rows.
  std::vector<std::array<std::uint32_t, 4>> quad(4);
  for (unsigned lane = 0; lane < 4; ++lane) {
    for (unsigned i = 0; i < 4; ++i) {
      quad[lane][i] = static_cast<std::uint32_t>(row[threadIdx.x / 4 * 4 + lane][i]);
    }
  }
  return quad;
}

template <Dtype kType, int kN>
struct Wgmma {
  static constexpr unsigned kDepth = 32 / static_cast<unsigned>(size_of(kType));

  static void shared(float* d, std::uint64_t a, std::uint64_t b, int add) {
    const SharedOperand x(a), y(b);
    multiply(
        d, add, [&](unsigned row, unsigned k) { return x.along<kType>(row, k); },
        [&](unsigned k, unsigned column) { return y.along<kType>(column, k); });
  }
  static void shared_across(float* d, std::uint64_t a, std::uint64_t b, int add) {
    const SharedOperand x(a), y(b);
    multiply(
        d, add, [&](unsigned row, unsigned k) { return x.across<kType>(k, row); },
        [&](unsigned k, unsigned column) { return y.across<kType>(k, column); });
  }
  static void registers(float* d, const std::uint32_t* a, std::uint64_t b, int add) {
    const SharedOperand y(b);
    const auto quad = show_operands(a);
    multiply(
        d, add, [&](unsigned row, unsigned k) { return element(quad, row, k); },
        [&](unsigned k, unsigned column) { return y.along<kType>(column, k); });
  }
  static void registers_across(float* d, const std::uint32_t* a, std::uint64_t b, int add) {
    const SharedOperand y(b);
    const auto quad = show_operands(a);
    multiply(
        d, add, [&](unsigned row, unsigned k) { return element(quad, row, k); },
        [&](unsigned k, unsigned column) { return y.across<kType>(k, column); });
  }

 private:
  /// Of A in registers: words 0 and 1 have the first half of columns of rows lane / 4 and that + 8,
  /// words 2 and 3 the second; a lane has 4 bytes of each.
  static double element(const std::vector<std::array<std::uint32_t, 4>>& quad, unsigned row,
                        unsigned k) {
    constexpr auto kSize = static_cast<unsigned>(size_of(kType));
    const unsigned byte = k * kSize, half = byte / 16, lane = byte % 16 / 4;
    const std::uint32_t word = quad[lane][2 * half + row % 16 / 8];
    return reference::load(kType, &word, byte % 4 / kSize);
  }

  template <class A, class B>
  static void multiply(float* d, int add, const A& a, const B& b) {
    const unsigned thread = threadIdx.x % device::kWarpgroup;
    for (unsigned half = 0; half < 2; ++half) {
      const unsigned row = thread / 32 * 16 + thread % 32 / 4 + 8 * half;
      double x[kDepth], y[kDepth];
      for (unsigned k = 0; k < kDepth; ++k) x[k] = a(row, k);
      for (unsigned c = 0; c < kN / 8; ++c) {
        for (unsigned j = 0; j < 2; ++j) {
          for (unsigned k = 0; k < kDepth; ++k) y[k] = b(k, 8 * c + thread % 4 * 2 + j);
          float& sum = d[4 * c + 2 * half + j];
          sum = accumulate(add != 0 ? sum : 0.0F, x, y);
        }
      }
    }
  }
  static float accumulate(float sum, const double (&x)[kDepth], const double (&y)[kDepth]) {
    if constexpr (kType == Dtype::e4m3) {
      bool finite = std::isfinite(sum);
      for (unsigned k = 0; k < kDepth; ++k) finite = finite && std::isfinite(x[k] * y[k]);
      if (finite) return static_cast<float>(reference::accumulate(sum, x, y));
    }
    if constexpr (kType == Dtype::i8) {
      auto bits = std::bit_cast<std::int32_t>(sum);
      for (unsigned k = 0; k < kDepth; ++k) bits += static_cast<std::int32_t>(x[k] * y[k]);
      return std::bit_cast<float>(bits);
    }
    double total = static_cast<double>(sum);
    for (unsigned k = 0; k < kDepth; ++k) total += x[k] * y[k];
    return static_cast<float>(total);
  }
};

}  // namespace tessera::cuda::ptx
