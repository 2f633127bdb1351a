// Encoding a map takes the driver longer than everything else that this library does for a launch,
// and a program calls with the same tensors again and again: each thread remembers its last maps.
#include "cuda/maps.h"

#include <array>
#include <string>
#include <utility>

#include "core/storage.h"
#include "cuda/driver.h"

namespace tessera::cuda {
namespace {

/// The driver's name of a type.
int map_type(Dtype dtype) {
  switch (dtype) {
    case Dtype::f32: return kMapFloat32;
    case Dtype::bf16: return kMapBfloat16;
    case Dtype::f16: return kMapFloat16;
    case Dtype::e4m3:
    case Dtype::i8: return kMapUint8;
  }
  return -1;
}

/// All that a map depends on.
struct Key {
  const void* data = nullptr;
  std::array<std::uint64_t, 4> sizes = {};
  std::array<std::uint64_t, 3> strides = {};  ///< bytes
  int type = 0;
  std::array<unsigned, 4> box = {};

  friend bool operator==(const Key&, const Key&) = default;
};

/// Rows that begin inside a line share it with others, which are wanted at other times: what is
/// fetched of these besides is for nothing.
int promotion_of(const Key& key) {
  auto all = reinterpret_cast<std::uintptr_t>(key.data);
  for (std::size_t i = 0; i < key.strides.size(); ++i) {
    if (key.sizes[i + 1] > 1) all |= key.strides[i];
  }
  return all % 128 == 0 ? kMapPromoteL2To256 : kMapPromoteL2To128;
}

Status encode(ptx::TensorMap& map, const Key& key) {
  const unsigned ones[4] = {1, 1, 1, 1};
  const Driver& d = driver();
  return d.check(
      d.encode_tensor_map(&map, key.type, 4, const_cast<void*>(key.data), key.sizes.data(),
                          key.strides.data(), key.box.data(), ones, kMapInterleaveNone,
                          kMapSwizzle128, promotion_of(key), kMapFillZero),
      "cuTensorMapEncodeTiled");
}

Status encode_once(ptx::TensorMap& map, const Key& key) {
  struct Entry {
    Key key;
    ptx::TensorMap map;
  };
  constexpr std::size_t kEntries = 128;
  thread_local std::array<Entry, kEntries> remembered;
  // Addresses are multiples of 16, and allocators' of far more.
  const auto address = reinterpret_cast<std::uintptr_t>(key.data);
  Entry& entry = remembered[(address >> 4 ^ address >> 11 ^ address >> 18) % kEntries];
  if (entry.key != key) {
    entry.key = {};
    if (Status s = encode(entry.map, key); !s) return s;
    entry.key = key;
  }
  map = entry.map;
  return {};
}

}  // namespace

Status make_map(ptx::TensorMap& map, const char* name, const ConstTensor& tensor, const Problem& p,
                Dtype dtype, bool queries, std::int64_t dim, int rows, int row_heads) {
  if (Status s = check_copyable(name, tensor, p, dtype, queries); !s) return s;
  const RowSizes sizes = row_sizes(p, queries);
  if (sizes.empty()) {
    map = {};
    return {};
  }
  struct Axis {
    std::int64_t stride, size;
  } axes[] = {{tensor.stride_seqlen, sizes.seqlen},
              {tensor.stride_head, sizes.heads},
              {tensor.stride_batch, sizes.batch}};
  if (row_heads > 1) std::swap(axes[0], axes[1]);
  Key key;
  key.data = tensor.data;
  key.sizes[0] = static_cast<std::uint64_t>(dim);
  for (std::size_t i = 0; i < 3; ++i) {
    const std::int64_t bytes = axes[i].size > 1 ? axes[i].stride * size_of(dtype) : kRowAlignment;
    key.sizes[i + 1] = static_cast<std::uint64_t>(axes[i].size);
    key.strides[i] = static_cast<std::uint64_t>(bytes);
  }
  key.type = map_type(dtype);
  const auto columns = static_cast<unsigned>(core::swizzled_columns(dtype));
  const auto side = static_cast<unsigned>(row_heads), length = static_cast<unsigned>(rows);
  key.box = {columns, length, 1, 1};
  if (row_heads > 1) key.box = {columns, side, length / side, 1};
  return encode_once(map, key);
}

bool rows_aligned(const void* data, std::int64_t size, std::initializer_list<std::int64_t> strides,
                  std::uint64_t bytes) {
  auto all = reinterpret_cast<std::uintptr_t>(data);
  for (const std::int64_t stride : strides) all |= static_cast<std::uint64_t>(stride * size);
  return all % bytes == 0;
}

core::Strides strides_between(const ConstTensor& tensor, const RowSizes& sizes) {
  return {sizes.batch > 1 ? tensor.stride_batch : 0, sizes.seqlen > 1 ? tensor.stride_seqlen : 0,
          sizes.heads > 1 ? tensor.stride_head : 0};
}

Source source_of(const ConstTensor& tensor) { return {tensor.data, strides_of(tensor)}; }
Source source_between(const ConstTensor& tensor, const RowSizes& sizes) {
  return {tensor.data, strides_between(tensor, sizes)};
}

}  // namespace tessera::cuda
