#include "checks.h"

#include <algorithm>
#include <utility>

namespace tessera::python {

[[noreturn]] void invalid(std::string text) { throw Raise{PyExc_ValueError, std::move(text)}; }

std::string value(const char* name, const char* property, std::int64_t number) {
  return std::string(name) + property + " = " + std::to_string(number);
}

bool same(const DLType& a, const DLType& b) {
  return a.code == b.code && a.bits == b.bits && a.lanes == b.lanes;
}

Dtype storage_type(const View& q, const char* name, const char* if_scaled) {
  if (same(q.dtype, kFloat32)) return Dtype::f32;
  if (same(q.dtype, kBfloat16) || same(q.dtype, kBfloat16Bits)) return Dtype::bf16;
  if (same(q.dtype, kFloat16)) return Dtype::f16;
  invalid(std::string(name) + ".dtype = " + name_of(q.dtype) +
          ": must be float32, bfloat16 or float16" +
          (scaled_type(q) && !same(q.dtype, kFloat8E4m3Bits) ? if_scaled : ""));
}

std::optional<Dtype> scaled_type(const View& view) {
  if (same(view.dtype, kFloat8E4m3) || same(view.dtype, kFloat8E4m3Bits)) return Dtype::e4m3;
  if (same(view.dtype, kInt8)) return Dtype::i8;
  return std::nullopt;
}

void check_device(const char* name, const View& view, const View& q, const char* first) {
  const bool same_place =
      view.on_gpu() == q.on_gpu() && (!q.on_gpu() || view.device.id == q.device.id);
  if (!same_place) {
    invalid(std::string(name) + " is on " + name_of(view.device) + ", but " + first + " is on " +
            name_of(q.device) + ": all tensors must be on one device");
  }
}

void check_last_stride(const char* name, const View& view) {
  const auto last = static_cast<std::size_t>(view.ndim - 1);
  if (view.strides[last] != 1 && view.shape[last] > 1 && view.size() > 0) {
    invalid(value(name, ": stride of the last dimension", view.strides[last]) +
            ": must be 1; .contiguous() makes it so, np.ascontiguousarray for NumPy");
  }
}

void check_same_type(const char* name, const View& view, const View& q, const char* first) {
  if (same(view.dtype, q.dtype)) return;
  invalid(std::string(name) + ".dtype = " + name_of(view.dtype) + ", but " + first +
          ".dtype = " + name_of(q.dtype) + ": they must be the same");
}

void check_rows(const char* name, const View& view, const View& q,
                std::array<std::int64_t, 4> shape, bool packed, const char* first) {
  if (!view) invalid(std::string(name) + " is None: a tensor is required");
  const int ndim = packed ? 3 : 4;
  const char* layout =
      packed ? "(total, heads, head_dim), since cu_seqlens_q is given"
             : "(batch, seqlen, heads, head_dim); with cu_seqlens_q (total, heads, head_dim)";
  if (view.ndim != ndim) {
    invalid(std::string(name) + " has shape " + shape_text(view) + ": must be " + layout);
  }
  check_device(name, view, q, first);
  const std::size_t skipped = packed ? 1 : 0;
  for (std::size_t i = skipped; i < 4; ++i) {
    if (view.shape[i - skipped] == shape[i]) continue;
    std::string expected = "(";
    for (std::size_t j = skipped; j < 4; ++j)
      expected += (j > skipped ? ", " : "") + std::to_string(shape[j]);
    invalid(std::string(name) + " has shape " + shape_text(view) + ": must be " + expected + ")");
  }
  check_last_stride(name, view);
}

/// A contiguous array of one type.
void check_array(const char* name, const View& view, const View& q, DLType dtype, const char* shape,
                 bool fits, const char* first) {
  if (!same(view.dtype, dtype)) {
    invalid(std::string(name) + ".dtype = " + name_of(view.dtype) + ": must be " + name_of(dtype));
  }
  if (!fits) invalid(std::string(name) + " has shape " + shape_text(view) + ": must be " + shape);
  if (!view.contiguous()) invalid(std::string(name) + " must be contiguous");
  check_device(name, view, q, first);
}

void check_sizes(const char* name, const View& view, std::initializer_list<std::int64_t> shape) {
  if (!view) invalid(std::string(name) + " is None: a tensor is required");
  if (view.ndim == static_cast<int>(shape.size()) &&
      std::equal(shape.begin(), shape.end(), view.shape.begin())) {
    return;
  }
  std::string expected;  // NOLINT(cppcoreguidelines-init-variables): it is empty
  for (const std::int64_t size : shape) {
    expected += (expected.empty() ? "" : ", ") + std::to_string(size);
  }
  invalid(std::string(name) + " has shape " + shape_text(view) + ": must be (" + expected +
          (shape.size() == 1 ? ",)" : ")"));
}

PerHead alibi_shape(const View& slopes, const View& q, const Problem& p) {
  const bool per_head = slopes.ndim == 1 && slopes.shape[0] == p.num_heads;
  const bool per_batch =
      slopes.ndim == 2 && slopes.shape[0] == p.batch && slopes.shape[1] == p.num_heads;
  check_array("alibi_slopes", slopes, q, kFloat32, "(num_heads,) or (batch, num_heads)",
              per_head || per_batch);
  return per_head ? PerHead::heads : PerHead::batch_heads;
}

void check_lse(const char* name, const View& lse, const View& q, const Problem& p) {
  const bool fits = p.packed
                        ? lse.ndim == 2 && lse.shape[0] == p.num_heads && lse.shape[1] == p.total_q
                        : lse.ndim == 3 && lse.shape[0] == p.batch && lse.shape[1] == p.num_heads &&
                              lse.shape[2] == p.seqlen_q;
  check_array(name, lse, q, kFloat32,
              p.packed ? "(num_heads, total_q)" : "(batch, num_heads, seqlen_q)", fits);
}

void check_sink(const char* name, const View& sink, const View& q, const Problem& p) {
  check_array(name, sink, q, kFloat32, "(num_heads,)",
              sink.ndim == 1 && sink.shape[0] == p.num_heads);
}

void check_window(const char* name, std::int64_t keys) {
  if (keys < -1) invalid(value(name, "", keys) + ": must be 0 or more, or -1 for unbounded");
}

namespace {

/// Rows of a tile's panel: of columns, and of ones.
std::int64_t panel_rows(std::int64_t head_dim_v) {
  Problem one;
  one.seqlen_k = kTileKeys;
  one.head_dim_v = head_dim_v;
  return one.value_tile_bytes() / kTileKeys;
}

}  // namespace

void check_tiles(const char* name, const View& view, const View& q, const Problem& p,
                 const char* first) {
  if (!view) invalid(std::string(name) + " is None: a tensor is required");
  if (scaled_type(view) != Dtype::e4m3) {
    invalid(std::string(name) + ".dtype = " + name_of(view.dtype) +
            ": must be float8_e4m3fn where it lies in tiles, as head_dim_v says");
  }
  const std::int64_t tiles =
      p.packed ? p.total_k / kTileKeys + p.batch : (p.seqlen_k + kTileKeys - 1) / kTileKeys;
  constexpr std::int64_t kPanels = kTileKeys / kPanelKeys;
  const std::int64_t sizes[] = {p.batch,   p.num_heads_k, tiles, kPanels, panel_rows(p.head_dim_v),
                                kPanelKeys};
  const int skipped = p.packed ? 1 : 0, ndim = 6 - skipped;
  if (view.ndim != ndim || !std::equal(sizes + skipped, sizes + 6, view.shape.begin())) {
    std::string numbers;
    for (const std::int64_t* size = sizes + skipped; size != sizes + 6; ++size) {
      numbers += (numbers.empty() ? "" : ", ") + std::to_string(*size);
    }
    invalid(std::string(name) + " has shape " + shape_text(view) + ": must be (" +
            (p.packed ? "" : "batch, ") + "num_heads_k, tiles, 4, rows, 32) = (" + numbers +
            "), as head_dim_v = " + std::to_string(p.head_dim_v) + " says that it lies in tiles");
  }
  check_device(name, view, q, first);
  if (view.size() == 0) return;
  std::int64_t compact = 1;
  for (auto i = static_cast<std::size_t>(ndim); i-- > static_cast<std::size_t>(2 - skipped);) {
    if (view.shape[i] != 1 && view.strides[i] != compact) {
      invalid(std::string(name) + ": stride of dimension " + std::to_string(i) + " = " +
              std::to_string(view.strides[i]) + ": must be " + std::to_string(compact) +
              ", as the tiles of a head are contiguous");
    }
    compact *= view.shape[i];
  }
  for (std::size_t i = 0; i < static_cast<std::size_t>(2 - skipped); ++i) {
    if (view.shape[i] == 1 || view.strides[i] % 16 == 0) continue;
    invalid(std::string(name) + ": stride of dimension " + std::to_string(i) + " = " +
            std::to_string(view.strides[i]) + ": must be a multiple of 16");
  }
  if (reinterpret_cast<std::uintptr_t>(view.data) % 16 != 0) {
    invalid(std::string(name) + " begins at no multiple of 16 bytes: must, as it lies in tiles");
  }
}

Tensor tiles_of(const View& view, bool packed) {
  const std::size_t heads = packed ? 0 : 1;
  return {view.data, packed ? 0 : view.strides[0], 0, view.strides[heads]};
}

Tensor rows_of(const View& view, bool packed) {
  const Axes axes(packed);
  return {view.data, packed ? 0 : view.strides[0], view.strides[axes.rows],
          view.strides[axes.heads]};
}

}  // namespace tessera::python
