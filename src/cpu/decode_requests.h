// What the decode kernel asks of the memory system ahead of its use.
#pragma once

#include <cstddef>
#include <type_traits>

#include "core/mask.h"
#include "cpu/simd.h"

namespace tessera::cpu::TESSERA_ISA {

/// How far ahead of its use a cache line of K or V is asked for, in bytes of both.
inline constexpr int kPrefetchBytes = 12288;
inline constexpr int kCacheLine = 64;
/// Rows of K or V of one head, as they lie in memory.
template <class T>
struct KeyRows {
  const T* data;             ///< of key 0
  std::int64_t stride;       ///< elements between keys
  std::int64_t n;            ///< elements of a row
  std::int64_t stride_head;  ///< elements to the next head

  TESSERA_INLINE const T* operator[](int key) const { return data + key * stride; }
  TESSERA_INLINE KeyRows head(int h) const {
    return {data + h * stride_head, stride, n, stride_head};
  }
  /// Cache lines of a row.
  TESSERA_INLINE int lines() const {
    return static_cast<int>(
        core::ceil_div<std::int64_t>(n * static_cast<std::int64_t>(sizeof(T)), kCacheLine));
  }
};

/// Asks for the cache lines of K and V in the order of their use: a chunk of a head's keys, the
/// same chunk of its values, the same of the next head, the next chunk. On Zen 5 memory and
/// arithmetic overlap only if requests come evenly and in order, so every step of the arithmetic
/// makes a few, about as many as it reads itself, and never more than kPrefetchBytes ahead.
class Requests {
  static constexpr int kAhead = kPrefetchBytes / kCacheLine;

  /// The rows of one head's keys or values in a chunk.
  struct Cursor {
    const std::byte* line;  ///< to ask for next
    std::int64_t gap;       ///< bytes from behind a row's last line to the next row
    int row_lines;          ///< of a row
    int lines;              ///< left in this row
    int rows;               ///< left, with this one
    int allowed;            ///< lines that may be asked for
  };

 public:
  template <class T>
  Requests(const KeyRows<T>& k, const KeyRows<T>& v, core::Range keys, int chunk, int heads)
      : streams_{stream(k, keys), stream(v, keys)},
        chunk_(chunk),
        keys_(keys.size()),
        heads_(heads),
        at_(part(kAhead)) {
    Here here(*this);
    for (int i = 0; i < kAhead; ++i) here.advance<1>();
  }

  /// `lines` more have been used.
  TESSERA_INLINE void used(int lines) { at_.allowed += lines; }

  /// Makes requests. It has the cursor to itself, and nobody takes its address, so that it stays in
  /// registers: in memory every request waits for the stores of the one before.
  class Here {
   public:
    TESSERA_INLINE explicit Here(Requests& all) : all_(all), at_(all.at_) {}
    TESSERA_INLINE ~Here() { all_.at_ = at_; }
    Here(const Here&) = delete;
    Here& operator=(const Here&) = delete;

    template <int kLines>
    TESSERA_INLINE void advance() {
      if (at_.allowed < kLines) return;
      at_.allowed -= kLines;
      if (at_.lines >= kLines) {
#pragma GCC unroll 8
        for (int i = 0; i < kLines; ++i) prefetch(at_.line + i * kCacheLine);
        at_.line += kLines * kCacheLine;
        at_.lines -= kLines;
        if (at_.lines == 0) next_row();
        return;
      }
#pragma GCC unroll 1
      for (int i = 0; i < kLines; ++i) {
        prefetch(at_.line);
        at_.line += kCacheLine;
        if (--at_.lines == 0) next_row();
      }
    }

   private:
    TESSERA_INLINE void next_row() {
      if (--at_.rows == 0) {
        at_ = all_.next_part(at_);
        return;
      }
      at_.line += at_.gap;
      at_.lines = at_.row_lines;
    }

    Requests& all_;
    Cursor at_;
  };

 private:
  struct Stream {
    const std::byte* data;     ///< first key of the first head
    std::int64_t stride;       ///< bytes between keys
    std::int64_t stride_head;  ///< bytes between heads
    int row_lines;             ///< of a row
  };

  template <class T>
  static Stream stream(const KeyRows<T>& rows, core::Range keys) {
    constexpr auto kSize = static_cast<std::int64_t>(sizeof(T));
    return {reinterpret_cast<const std::byte*>(rows[keys.begin]), rows.stride * kSize,
            rows.stride_head * kSize, rows.lines()};
  }

  /// The part that the counters below name.
  Cursor part(int allowed) const {
    const Stream& s = streams_[current_];
    return {s.data + first_ * s.stride + head_ * s.stride_head,
            s.stride - std::int64_t{s.row_lines} * kCacheLine,
            s.row_lines,
            s.row_lines,
            core::min(chunk_, keys_ - first_),
            allowed};
  }

  [[gnu::noinline]] Cursor next_part(Cursor at) {
    current_ = 1 - current_;
    if (current_ == 0 && ++head_ == heads_) {
      head_ = 0;
      first_ += chunk_;
    }
    if (first_ < keys_) return part(at.allowed);
    at.allowed = -(1 << 30);  // all has been asked for
    return at;
  }

  Stream streams_[2];  ///< keys, values
  int chunk_;
  int keys_;  ///< of every head
  int heads_;
  int current_ = 0;  ///< stream
  int head_ = 0;
  int first_ = 0;  ///< key of the chunk
  Cursor at_;
};

/// Cache lines in `vectors` vectors of operands.
template <class T, class Operand>
constexpr int lines_of(int vectors) {
  const int elements = vectors * kLanes * (std::is_same_v<Operand, U32> ? 2 : 1);
  return core::max(1, elements * static_cast<int>(sizeof(T)) / static_cast<int>(kCacheLine));
}

}  // namespace tessera::cpu::TESSERA_ISA
