// What the decode kernel asks of the memory system ahead of its use.
#pragma once

#include <cstddef>
#include <type_traits>

#include "core/pages.h"
#include "cpu/product.h"
#include "cpu/simd.h"

namespace tessera::cpu::TESSERA_ISA {

inline constexpr int kCacheLine = 64;
/// How far ahead of its use a cache line of K or V is asked for, in lines of both, and into which
/// cache.
struct Reach {
  int lines = 12288 / kCacheLine;
  bool second_level = false;
  std::int64_t chunk_bytes = 0;  ///< of keys and values of all heads that the cache has room for
};
/// side_by_side: whether keys of all heads are asked for in the order of addresses. Measured with
/// AVX-512: Zen 5, with 48 KiB of first-level cache, wants requests into it; Zen 4, with 32 KiB,
/// waits for them there, and reads up to twice as fast into the second level. With AVX2 on Zen 3,
/// with 32 KiB, arithmetic waits for the second level instead, but less than for scattered keys.
inline Reach reach_on(const Device& device, bool side_by_side) {
  if (device.l1_bytes <= 32 << 10 && (kRegisters == 32 || side_by_side)) {
    return {65536 / kCacheLine, true, device.l2_bytes / 4};
  }
  return {};
}

/// Where the keys of a sequence lie.
struct KeyPlaces {
  const core::Pages& pages;
  const core::Sequence& sequence;

  bool paged() const { return pages.table != nullptr; }
  /// Units from the start of a tensor with these strides to a key of head 0.
  std::int64_t offset(const core::Strides& strides, int key) const {
    return core::slot_offset(pages, sequence, strides, key, 0);
  }
  /// Of some keys side by side, how many of the first lie so in memory.
  int together(core::Range keys) const {
    if (!paged()) return keys.size();
    return core::min(keys.size(), pages.size - (sequence.first_k + keys.begin) % pages.size);
  }
  /// The offsets of some keys.
  void find(const core::Strides& strides, core::Range keys, std::int64_t* offsets) const {
    while (!keys.empty()) {
      std::int64_t at = offset(strides, keys.begin);
      const int end = keys.begin + together(keys);
      for (; keys.begin < end; ++keys.begin, at += strides.seqlen) *offsets++ = at;
    }
  }
};

/// Rows of K or V of one head, as they lie in memory.
template <class T>
struct KeyRows {
  const T* data;                        ///< of the head; without pages: of key 0
  core::Strides strides;                ///< elements
  std::int64_t n;                       ///< elements of a row
  const std::int64_t* slots = nullptr;  ///< pages: elements from data to keys from `first` on
  int first = 0;                        ///< key, that `data` or `slots` begins with

  TESSERA_INLINE const T* operator[](int key) const {
    return data + (slots == nullptr ? (key - first) * strides.seqlen : slots[key - first]);
  }
  TESSERA_INLINE KeyRows head(int h) const {
    return {data + h * strides.head, strides, n, slots, first};
  }
  /// Cache lines of a row.
  TESSERA_INLINE int lines() const {
    return static_cast<int>(
        core::ceil_div<std::int64_t>(n * static_cast<std::int64_t>(sizeof(T)), kCacheLine));
  }
};

/// Whether rows of T are bytes that meet pairs of bf16.
template <class T, class Operand>
inline constexpr bool kBytesOfPairs = sizeof(T) == 1 && std::is_same_v<Operand, U32>;
/// Keys multiplied together, at most (keys_of_tile).
inline constexpr int kMostTileKeys = kLanes;

/// Keys after which the next query rows take their turn: few enough that K and V come from the
/// first-level cache then, and that the requests for coming keys hardly pause. Of bytes that pairs
/// of bf16 meet more, as each begin costs as much as a few keys.
/// @{
template <class T, class Operand>
inline constexpr int kKeyBlock = kBytesOfPairs<T, Operand> ? 64 : 16;
inline constexpr int kMostBlockKeys = 64;
/// @}

/// Where the rows of a block of keys are. The last one stands for those that a tile lacks.
template <class T>
struct KeyBlock {
  const T* row[kMostBlockKeys];
  std::int64_t n;  ///< elements of a row

  TESSERA_INLINE KeyBlock(const KeyRows<T>& rows, core::Range keys) : n(rows.n) {
    const int end = core::round_up(keys.size(), kMostTileKeys);
    for (int i = 0; i < keys.size(); ++i) row[i] = rows[keys.begin + i];
    for (int i = keys.size(); i < end; ++i) row[i] = row[keys.size() - 1];
  }
};

/// Asks for the cache lines of K and V in the order of their use: a chunk of a head's keys, the
/// same chunk of its values, the same of the next head, the next chunk. Or, where they are given
/// as one head, of several that are neighbours in memory: a chunk of all heads' keys, then of their
/// values, in the order of addresses. On Zen 5 memory and arithmetic overlap only if requests come
/// evenly and in order, so every step of the arithmetic makes a few, about as many as it reads
/// itself, and never more than its reach ahead.
class Requests {
  /// Rows of one head's keys or values in a chunk that lie side by side.
  struct Cursor {
    const std::byte* line;  ///< to ask for next
    std::int64_t gap;       ///< bytes from behind a row's last line to the next row
    int row_lines;          ///< of a row
    int lines;              ///< left in this row
    int rows;               ///< left, with this one
    int allowed;            ///< lines that may be asked for
  };

 public:
  /// k, v: of the tensors' first keys.
  template <class T>
  Requests(const KeyRows<T>& k, const KeyRows<T>& v, const KeyPlaces& places,
           const core::KeyRuns& keys, int chunk, int heads, const Reach& reach)
      : streams_{stream(k), stream(v)},
        places_(places),
        keys_(keys),
        chunk_size_(chunk),
        heads_(heads),
        second_level_(reach.second_level),
        chunk_(keys.first(chunk)),
        at_(part(reach.lines)) {
    Here here(*this);
    for (int i = 0; i < reach.lines; ++i) here.advance<1>();
  }

  /// `lines` more have been used.
  TESSERA_INLINE void used(int lines) { at_.allowed += lines; }

  /// Makes requests. It has the cursor to itself, and nobody takes its address, so that it stays in
  /// registers: in memory every request waits for the stores of the one before.
  class Here {
   public:
    TESSERA_INLINE explicit Here(Requests& all)
        : all_(all), second_level_(all.second_level_), at_(all.at_) {}
    TESSERA_INLINE ~Here() { all_.at_ = at_; }
    Here(const Here&) = delete;
    Here& operator=(const Here&) = delete;

    template <int kLines>
    TESSERA_INLINE void advance() {
      if (at_.allowed < kLines) return;
      at_.allowed -= kLines;
      if (at_.lines >= kLines) {
#pragma GCC unroll 8
        for (int i = 0; i < kLines; ++i) ask(at_.line + i * kCacheLine);
        at_.line += kLines * kCacheLine;
        at_.lines -= kLines;
        if (at_.lines == 0) next_row();
        return;
      }
#pragma GCC unroll 1
      for (int i = 0; i < kLines; ++i) {
        ask(at_.line);
        at_.line += kCacheLine;
        if (--at_.lines == 0) next_row();
      }
    }

   private:
    TESSERA_INLINE void ask(const std::byte* line) const {
      if (second_level_) {
        prefetch<2>(line);
      } else {
        prefetch<1>(line);
      }
    }
    TESSERA_INLINE void next_row() {
      if (--at_.rows == 0) {
        at_ = all_.next_part(at_);
        return;
      }
      at_.line += at_.gap;
      at_.lines = at_.row_lines;
    }

    Requests& all_;
    const bool second_level_;
    Cursor at_;
  };

 private:
  struct Stream {
    const std::byte* data;  ///< of the tensor's first head
    core::Strides strides;  ///< bytes
    int row_lines;          ///< of a row
  };

  template <class T>
  static Stream stream(const KeyRows<T>& rows) {
    constexpr auto kSize = static_cast<std::int64_t>(sizeof(T));
    const core::Strides& s = rows.strides;
    return {reinterpret_cast<const std::byte*>(rows.data),
            {s.batch * kSize, s.seqlen * kSize, s.head * kSize},
            rows.lines()};
  }

  /// The part that the counters below name.
  Cursor part(int allowed) {
    const Stream& s = streams_[current_];
    const core::Range left = {chunk_.begin + asked_, chunk_.end};
    part_rows_ = places_.together(left);
    return {s.data + places_.offset(s.strides, left.begin) + head_ * s.strides.head,
            s.strides.seqlen - std::int64_t{s.row_lines} * kCacheLine,
            s.row_lines,
            s.row_lines,
            part_rows_,
            allowed};
  }

  [[gnu::noinline]] Cursor next_part(Cursor at) {
    asked_ += part_rows_;
    if (asked_ == chunk_.size()) {
      asked_ = 0;
      current_ = 1 - current_;
      if (current_ == 0 && ++head_ == heads_) {
        head_ = 0;
        chunk_ = keys_.after(chunk_, chunk_size_);
      }
    }
    if (!chunk_.empty()) return part(at.allowed);
    at.allowed = -(1 << 30);  // all has been asked for
    return at;
  }

  Stream streams_[2];  ///< keys, values
  KeyPlaces places_;
  core::KeyRuns keys_;  ///< of every head
  int chunk_size_;
  int heads_;
  bool second_level_;
  int current_ = 0;  ///< stream
  int head_ = 0;
  core::Range chunk_;  ///< of keys
  int asked_ = 0;      ///< of its keys, in this stream and head
  int part_rows_ = 0;
  Cursor at_;
};

/// Columns that a step of multiply-adds takes. A vector of bytes becomes two operands.
template <class T, class Operand>
inline constexpr int kStepColumns =
    kLanes * (std::is_same_v<Operand, U32> ? 2 : 1) * (kBytesOfPairs<T, Operand> ? 2 : 1);

/// Cache lines in `vectors` vectors of operands; and of how many times as many comes a whole one.
/// @{
template <class T, class Operand>
constexpr int bytes_of(int vectors) {
  return vectors * kLanes * (std::is_same_v<Operand, U32> ? 2 : 1) * static_cast<int>(sizeof(T));
}
template <class T, class Operand>
constexpr int lines_of(int vectors) {
  return core::max(1, bytes_of<T, Operand>(vectors) / kCacheLine);
}
template <class T, class Operand>
constexpr int steps_of_line(int vectors) {
  return sizeof(T) > 1 ? 1 : core::max(1, kCacheLine / bytes_of<T, Operand>(vectors));
}
/// @}

}  // namespace tessera::cpu::TESSERA_ISA
