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

/// What to do with a tensor that the copy engine cannot address; ends an error's text.
constexpr const char* kOrUnaligned = "; or plan the problem as unaligned";

/// A tensor's dimensions but the innermost; of a packed one the rows of all sequences.
struct Sizes {
  std::int64_t batch, seqlen, heads;

  bool empty() const { return batch * seqlen == 0; }
};

Sizes sizes_of(const Problem& p, bool queries) {
  const std::int64_t heads = queries ? p.num_heads : p.num_heads_k;
  if (p.packed) return {1, queries ? p.total_q : p.total_k, heads};
  return {p.batch, queries ? p.seqlen_q : p.seqlen_k, heads};
}

/// The driver's name of a type.
int map_type(Dtype dtype) {
  switch (dtype) {
    case Dtype::f32: return kMapFloat32;
    case Dtype::bf16: return kMapBfloat16;
    case Dtype::f16: return kMapFloat16;
  }
  return -1;
}

bool misaligned(const void* data) { return reinterpret_cast<std::uintptr_t>(data) % 16 != 0; }

/// All that a map depends on.
struct Key {
  const void* data = nullptr;
  std::array<std::uint64_t, 4> sizes = {};
  std::array<std::uint64_t, 3> strides = {};  ///< bytes
  int type = 0;
  std::array<unsigned, 4> box = {};

  friend bool operator==(const Key&, const Key&) = default;
};

Status encode(ptx::TensorMap& map, const Key& key) {
  const unsigned ones[4] = {1, 1, 1, 1};
  const Driver& d = driver();
  return d.check(
      d.encode_tensor_map(&map, key.type, 4, const_cast<void*>(key.data), key.sizes.data(),
                          key.strides.data(), key.box.data(), ones, kMapInterleaveNone,
                          kMapSwizzle128, kMapPromoteL2To256, kMapFillZero),
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
                bool queries, std::int64_t dim, int rows, int row_heads) {
  const std::int64_t size = size_of(p.dtype);
  const Sizes sizes = sizes_of(p, queries);
  if (sizes.empty()) {  // nothing will be fetched, and there may be no address
    map = {};
    return {};
  }
  constexpr std::int64_t kUnit = 16;
  struct Axis {
    const char* name;
    std::int64_t stride, size;
  } axes[] = {{".stride_seqlen", tensor.stride_seqlen, sizes.seqlen},
              {".stride_head", tensor.stride_head, sizes.heads},
              {".stride_batch", tensor.stride_batch, sizes.batch}};
  if (row_heads > 1) std::swap(axes[0], axes[1]);
  if (misaligned(tensor.data)) {
    return Status::invalid(std::string(name) + ".data: must be aligned to 16 bytes" + kOrUnaligned);
  }
  Key key;
  key.data = tensor.data;
  key.sizes[0] = static_cast<std::uint64_t>(dim);
  for (std::size_t i = 0; i < 3; ++i) {
    const std::int64_t bytes = axes[i].size > 1 ? axes[i].stride * size : kUnit;
    if (bytes % kUnit != 0 || bytes <= 0 || bytes >= std::int64_t{1} << 40) {
      return Status::invalid(
          std::string(name) + axes[i].name + " = " + std::to_string(axes[i].stride) +
          ": must be a positive multiple of 8 elements below 2^39" + kOrUnaligned);
    }
    key.sizes[i + 1] = static_cast<std::uint64_t>(axes[i].size);
    key.strides[i] = static_cast<std::uint64_t>(bytes);
  }
  key.type = map_type(p.dtype);
  const auto columns = static_cast<unsigned>(core::swizzled_columns(p.dtype));
  const auto side = static_cast<unsigned>(row_heads), length = static_cast<unsigned>(rows);
  key.box = {columns, length, 1, 1};
  if (row_heads > 1) key.box = {columns, side, length / side, 1};
  return encode_once(map, key);
}

Status check_aligned(const char* name, const ConstTensor& tensor, const Problem& p, bool queries) {
  const Sizes sizes = sizes_of(p, queries);
  if (sizes.empty()) return {};
  const auto unaligned = [](std::int64_t stride, std::int64_t size) {
    return size > 1 && stride % 8 != 0;
  };
  if (misaligned(tensor.data) || unaligned(tensor.stride_seqlen, sizes.seqlen) ||
      unaligned(tensor.stride_head, sizes.heads) || unaligned(tensor.stride_batch, sizes.batch)) {
    return Status::invalid(std::string(name) +
                           ": must be aligned to 16 bytes, its strides multiples of 8 elements" +
                           kOrUnaligned);
  }
  return {};
}

Source source_of(const ConstTensor& tensor) { return {tensor.data, strides_of(tensor)}; }

}  // namespace tessera::cuda
