// What every call checks of its tensors: shapes, types, devices. Everything raises a ValueError
// that names the argument as Python knows it, its value, and what would be accepted.
#pragma once

#include "view.h"

#include <initializer_list>
#include <optional>

#include "tessera/tessera.hpp"

namespace tessera::python {

inline constexpr DLType kFloat32 = {kDLFloat, 32, 1}, kFloat16 = {kDLFloat, 16, 1},
                        kBfloat16 = {kDLBfloat, 16, 1};
inline constexpr DLType kInt32 = {kDLInt, 32, 1};
/// What tessera/arrays.py passes for bfloat16, which NumPy does not export. torch's uint16 never
/// gets here.
inline constexpr DLType kBfloat16Bits = {kDLUInt, 16, 1};
/// Types of 8 bits, whose elements are values only together with scales. The last is what
/// tessera/arrays.py passes for e4m3; torch's uint8 never gets there.
inline constexpr DLType kFloat8E4m3 = {kDLFloat8E4m3Fn, 8, 1}, kInt8 = {kDLInt, 8, 1},
                        kFloat8E4m3Bits = {kDLUInt, 8, 1};

/// Keys of a tile of v, and of one of its panels (S14).
inline constexpr std::int64_t kTileKeys = 128, kPanelKeys = 32;

/// Where the numbers of (batch, seqlen, heads, head_dim) stand in a shape; packed tensors have no
/// batch.
struct Axes {
  std::size_t rows, heads, dim;
  explicit Axes(bool packed) : rows(packed ? 0 : 1), heads(rows + 1), dim(rows + 2) {}
};

[[noreturn]] void invalid(std::string text);

/// "window[0] = -2": an argument, or a property of it, and its value.
std::string value(const char* name, const char* property, std::int64_t number);

bool same(const DLType& a, const DLType& b);

/// The library's name for a tensor's type, whose elements are the values. if_scaled: ends the error
/// of one of 8 bits.
Dtype storage_type(const View& q, const char* name = "q", const char* if_scaled = "");

/// The same of 8 bits, which need scales; none: another one.
std::optional<Dtype> scaled_type(const View& view);

/// `first`: the name of q, the tensor that tells where the others must be.
void check_device(const char* name, const View& view, const View& q, const char* first = "q");

/// Whether the last dimension is contiguous.
void check_last_stride(const char* name, const View& view);

void check_same_type(const char* name, const View& view, const View& q, const char* first = "q");

/// A tensor of rows: its dimensions, its device, and that head_dim is contiguous.
void check_rows(const char* name, const View& view, const View& q,
                std::array<std::int64_t, 4> shape, bool packed, const char* first = "q");

/// A contiguous array of one type. `shape`: what it must be, unless it `fits`.
void check_array(const char* name, const View& view, const View& q, DLType dtype, const char* shape,
                 bool fits, const char* first = "q");

/// A tensor that is there, of exactly these dimensions.
void check_sizes(const char* name, const View& view, std::initializer_list<std::int64_t> shape);

PerHead alibi_shape(const View& slopes, const View& q, const Problem& p);
void check_lse(const char* name, const View& lse, const View& q, const Problem& p);
void check_sink(const char* name, const View& sink, const View& q, const Problem& p);
void check_window(const char* name, std::int64_t keys);

/// A tensor of rows for the library; packed: without a batch.
Tensor rows_of(const View& view, bool packed);

/// v in tiles (S14), whose number and columns the problem says. first: as of check_device.
/// @{
void check_tiles(const char* name, const View& view, const View& q, const Problem& p,
                 const char* first = "q");
Tensor tiles_of(const View& view, bool packed);
/// @}

template <class T>
T* pointer(const View& view) {
  return reinterpret_cast<T*>(view.data);
}

}  // namespace tessera::python
