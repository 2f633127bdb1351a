#include "plan/checks.h"

#include "core/hd.h"
#include "core/prefixes.h"
#include "plan/text.h"

namespace tessera {

Status out_of_range(const char* name, std::int64_t value, std::int64_t low, std::int64_t high) {
  return Status::invalid(refused(
      name, value, "must lie in [" + std::to_string(low) + ", " + std::to_string(high) + "]"));
}

bool fits_offsets(std::initializer_list<std::int64_t> sizes) {
  std::int64_t product = 8;  // the widest element, and the sign bit's distance
  for (const std::int64_t size : sizes) {
    if (__builtin_mul_overflow(product, core::max<std::int64_t>(size, 1), &product)) return false;
  }
  return true;
}

Status missing(const char* name, const char* why) {
  return Status::invalid(std::string(name) + " = null: " + why);
}

std::string element(const char* name, std::int64_t index) {
  return std::string(name) + "[" + std::to_string(index) + "]";
}

Status check_strides(const char* tensor, std::span<const Axis> axes) {
  constexpr std::int64_t kReach = std::int64_t{1} << 60;
  for (const Axis& axis : axes) {
    std::int64_t reach = 0;
    if (axis.size > 1 && (__builtin_mul_overflow(axis.stride, axis.size, &reach) ||
                          reach > kReach || reach < -kReach)) {
      return Status::invalid(
          refused((std::string(tensor) + axis.name).c_str(), axis.stride,
                  "times " + std::to_string(axis.size) + " does not fit 64-bit offsets"));
    }
  }
  return {};
}

Status check_apart(const char* tensor, std::span<const Axis> axes, std::int64_t least) {
  for (const Axis& axis : axes) {
    const std::int64_t distance = axis.stride < 0 ? -axis.stride : axis.stride;
    if (axis.size > 1 && distance < least) {
      return Status::invalid(refused((std::string(tensor) + axis.name).c_str(), axis.stride,
                                     "outputs must not overlap themselves: at least " +
                                         std::to_string(least) + " elements apart"));
    }
  }
  return {};
}

std::array<Axis, 3> axes_of(const ConstTensor& t, const Shape& shape, bool packed) {
  return {{{".stride_batch", t.stride_batch, packed ? 1 : shape.batch},
           {".stride_seqlen", t.stride_seqlen, shape.seqlen},
           {".stride_head", t.stride_head, shape.heads}}};
}

Status check_tensor(const char* name, const ConstTensor& tensor, const Shape& shape, bool packed) {
  if (shape.seqlen == 0 || shape.batch == 0) return {};
  if (tensor.data == nullptr) return missing(name, "must point to the tensor");
  return check_strides(name, axes_of(tensor, shape, packed));
}

Status check_output(const char* name, const Tensor& tensor, const Shape& shape, bool packed) {
  if (Status s = check_tensor(name, tensor, shape, packed); !s) return s;
  if (shape.seqlen == 0 || shape.batch == 0) return {};
  return check_apart(name, axes_of(tensor, shape, packed), shape.dim);
}

Status check_cu_seqlens(const char* name, const std::int32_t* cu_seqlens, std::int64_t batch,
                        const char* total_name, std::int64_t total, const char* longest_name,
                        std::int64_t longest) {
  if (cu_seqlens == nullptr) return missing(name, kNoOffsets);
  if (cu_seqlens[0] != 0) {
    return Status::invalid(refused(element(name, 0).c_str(), cu_seqlens[0], "must be 0"));
  }
  for (std::int64_t i = 0; i < batch; ++i) {
    const std::int64_t length = std::int64_t{cu_seqlens[i + 1]} - cu_seqlens[i];
    if (length < 0 || length > longest) {
      return Status::invalid(refused(element(name, i + 1).c_str(), cu_seqlens[i + 1],
                                     "the sequence's length would be " + std::to_string(length) +
                                         "; it must lie in [0, " + longest_name + "] = [0, " +
                                         std::to_string(longest) + "]"));
    }
  }
  if (cu_seqlens[batch] != total) {
    return Status::invalid(
        refused(element(name, batch).c_str(), cu_seqlens[batch],
                std::string("must equal ") + total_name + " = " + std::to_string(total)));
  }
  return {};
}

Status check_among(const std::string& field, Dtype dtype, Scaling scaling,
                   std::initializer_list<Scaling> accepted) {
  std::string list;
  for (const Scaling one : accepted) {
    if (one == scaling) return {};
    list += (list.empty() ? "" : ", ") + std::string(to_string(one));
  }
  return Status::invalid(field + " = " + to_string(scaling) + ": accepted for " + to_string(dtype) +
                         ": " + list);
}

Status check_numbers(const char* name, const ConstScales& numbers, Scaling scaling,
                     const Problem& p, bool used) {
  if (scaling == Scaling::none) {
    if (numbers.data == nullptr) return {};
    return Status::invalid(std::string(name) +
                           ".data is given, but the problem has none; set Problem::scales");
  }
  if (numbers.data == nullptr) {
    if (!used) return {};
    return missing((std::string(name) + ".data").c_str(),
                   "the problem has it; a scale that is missing is not 1");
  }
  if (scaling == Scaling::tensor) return {};
  const bool packed =
      (scaling == Scaling::token && p.packed) || (scaling == Scaling::block && p.packed_k());
  const Axis axes[] = {{".stride_batch", numbers.stride_batch, packed ? 1 : p.batch},
                       {".stride_head", numbers.stride_head,
                        scaling == Scaling::token ? p.num_heads : p.num_heads_k}};
  return check_strides(name, axes);
}

Status check_rotary(const RotaryShape& rotary, Dtype dtype, std::int64_t head_dim) {
  const struct {
    const char* name;
    std::int64_t value, low, high;
  } ranges[] = {
      {"rotary.dtype", static_cast<int>(rotary.dtype), 0, kPlainDtypes - 1},
      {"rotary.position_type", static_cast<int>(rotary.position_type), 0,
       static_cast<int>(PositionType::i64)},
      {"rotary.dim", rotary.dim, 2, head_dim},
      {"rotary.positions", rotary.positions, 0, INT32_MAX},
  };
  for (const auto& range : ranges) {
    if (Status s = check_range(range.name, range.value, range.low, range.high); !s) return s;
  }
  if (rotary.dim % 2 != 0) {
    return Status::invalid(refused("rotary.dim", rotary.dim, "columns are rotated in pairs: even"));
  }
  if (rotary.dtype != Dtype::f32 && rotary.dtype != dtype) {
    return Status::invalid(std::string("rotary.dtype = ") + to_string(rotary.dtype) +
                           ": must be f32 or the rows' dtype, " + to_string(dtype));
  }
  return {};
}

Status check_rotary_strides(const RotaryShape& shape, const RotaryTensors& tables) {
  const Axis rows[] = {{".stride_cos", tables.stride_cos, shape.positions},
                       {".stride_sin", tables.stride_sin, shape.positions}};
  return check_strides("rotary", rows);
}

Status check_positions(const RotaryShape& rotary, const std::string& name, std::int64_t value,
                       std::int64_t first, std::int64_t count) {
  const std::int64_t positions = rotary.positions;
  if (count == 0 || (first >= 0 && first + count <= positions)) return {};
  return Status::invalid(
      refused(name.c_str(), value,
              "positions " + std::to_string(first) + " to " + std::to_string(first + count - 1) +
                  " must lie in [0, rotary.positions) = [0, " + std::to_string(positions) + ")"));
}

Status check_cache_shape(const CacheShape& cache, std::int64_t most_new) {
  const struct {
    const char* name;
    std::int64_t value, low, high;
  } ranges[] = {
      {"cache.lengths", static_cast<int>(cache.lengths), 0, static_cast<int>(Lengths::before)},
      {"cache.page_ids", static_cast<int>(cache.page_ids), 0, static_cast<int>(PageIds::i64)},
      {"cache.seqlen_new", cache.seqlen_new, 0, most_new},
      {"cache.page_size", cache.page_size, 0, kMaxSeqlen},
      {"cache.num_pages", cache.num_pages, 0,
       cache.paged() ? (std::int64_t{1} << 48) / cache.page_size : 0},
      {"cache.rows", cache.rows, 0, kMaxBatch},
      {"cache.prefix_levels", cache.prefix_levels, 0, cache.paged() ? core::kMostPrefixLevels : 0},
  };
  for (const auto& range : ranges) {
    if (Status s = check_range(range.name, range.value, range.low, range.high); !s) return s;
  }
  if (!cache.paged() && cache.page_ids != PageIds::i32) {
    return Status::invalid("cache.page_ids = i64: there are no pages; set cache.page_size");
  }
  if (cache.skips && !cache.paged()) {
    return Status::invalid("cache.skips: there are no pages; set cache.page_size");
  }
  return {};
}

Status check_row(const core::Cache& cache, int batch) {
  if (cache.index == nullptr || (cache.index[batch] >= 0 && cache.index[batch] < cache.rows)) {
    return {};
  }
  return Status::invalid(
      refused(element("cache.index", batch).c_str(), cache.index[batch],
              "must lie in [0, rows) = [0, " + std::to_string(cache.rows) + ")"));
}

Status check_page(const core::Pages& pages, int row, int column) {
  const std::int64_t page = pages.at(row, column);
  if (pages.exists(page)) return {};
  const std::string name = "cache.page_table[" + std::to_string(row) + "]";
  return Status::invalid(
      refused(element(name.c_str(), column).c_str(), page,
              "must lie in [0, num_pages) = [0, " + std::to_string(pages.count) + ")"));
}

}  // namespace tessera
