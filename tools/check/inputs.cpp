// Which blocks a problem needs, their random layout, and their numbers.
#include "check/inputs.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "core/value_tiles.h"
#include "reference/storage.h"

namespace tessera::tools {
namespace {

std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

std::uint64_t hash(const std::string& text) {
  std::uint64_t h = 0xCBF29CE484222325U;
  for (const char c : text) h = (h ^ static_cast<unsigned char>(c)) * 0x100000001B3U;
  return h;
}

/// Elements from the first to the last, both included.
std::int64_t extent(const std::vector<std::int64_t>& shape,
                    const std::vector<std::int64_t>& stride) {
  std::int64_t last = 0;
  for (std::size_t i = 0; i < shape.size(); ++i) {
    if (shape[i] == 0) return 0;
    last += (shape[i] - 1) * stride[i];
  }
  return last + 1;
}

}  // namespace

Variation variation_of(std::uint64_t seed) {
  return {static_cast<Values>(seed & 3U), (seed & 4U) != 0, (seed & 8U) != 0, (seed & 48U) != 0};
}

std::uint64_t seed_with(const Variation& v, std::uint64_t random) {
  return (random << 6) | (v.all_outputs ? 16U : 0U) | (v.strided ? 8U : 0U) | (v.dlse ? 4U : 0U) |
         static_cast<std::uint64_t>(v.values);
}

template <class Visit>
void Block::for_each(const Visit& visit) const {
  const std::int64_t count =
      std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>());
  std::vector<std::int64_t> at(shape.size());
  std::int64_t offset = 0;
  for (std::int64_t index = 0; index < count; ++index) {
    visit(index, offset);
    for (std::size_t axis = shape.size(); axis-- > 0;) {
      offset += stride[axis];
      if (++at[axis] < shape[axis]) break;
      offset -= shape[axis] * stride[axis];
      at[axis] = 0;
    }
  }
}

RunMemory::RunMemory(const Problem& problem, std::uint64_t seed, Heads heads)
    : problem_(problem),
      variation_(variation_of(seed)),
      heads_(heads),
      seed_(seed),
      random_(seed, 0) {
  const Problem& p = problem_;
  Tensors& t = tensors_;
  if (p.packed) {
    t.cu_seqlens_q = add_cu_seqlens("cu_seqlens_q", p.total_q, p.seqlen_q);
    if (!p.cache) t.cu_seqlens_k = add_cu_seqlens("cu_seqlens_k", p.total_k, p.seqlen_k);
  }
  t.q = add_rows("q", Role::input, true, p.head_dim);
  if (p.qv) t.qv = add_rows("qv", Role::input, true, p.head_dim_v);
  add_keys();
  if (p.scaled()) add_scales();
  if (p.cache) add_cache();
  const bool may_gather = p.cache && p.qv && p.scales.v == Scaling::group && variation_.strided;
  if (may_gather && random_.next_between(0, 3) > 0) gather_rows();
  if (p.tree) t.tree_mask = add_tree();
  if (p.bias) {
    const Bias bias = add_bias("bias", Role::input);
    t.bias = {bias.data, bias.stride_batch, bias.stride_head, bias.stride_query, bias.stride_key};
  }
  if (p.alibi == PerHead::heads) {
    t.alibi_slopes = add_numbers("alibi_slopes", Role::input, {p.num_heads});
  } else if (p.alibi == PerHead::batch_heads) {
    t.alibi_slopes = add_numbers("alibi_slopes", Role::input, {p.batch, p.num_heads});
  }
  if (p.sink) t.sink = add_numbers("sink", Role::input, {p.num_heads});
  if (p.dropout_p > 0.0F) {
    t.philox_seed = random_.next();
    t.philox_offset = random_.next();
  }
  if (p.pass == Pass::backward) {
    add_backward();
  } else {
    t.o = add_rows("o", Role::output, true, p.head_dim_v);
    if (variation_.all_outputs) {
      t.softmax_lse = add_numbers("softmax_lse", Role::output, lse_shape());
    }
  }
}

void RunMemory::add_backward() {
  const Problem& p = problem_;
  Tensors& t = tensors_;
  t.dout = add_rows("dout", Role::input, true, p.head_dim_v);
  t.saved_o = add_rows("o", Role::input, true, p.head_dim_v);
  t.saved_softmax_lse = add_numbers("softmax_lse", Role::input, lse_shape());
  if (variation_.dlse) t.dsoftmax_lse = add_numbers("dsoftmax_lse", Role::input, lse_shape());
  t.dq = add_rows("dq", Role::output, true, p.head_dim);
  t.dk = add_rows("dk", Role::output, false, p.head_dim);
  t.dv = add_rows("dv", Role::output, false, p.head_dim_v);
  if (!variation_.all_outputs) return;
  if (p.bias) t.dbias = add_bias("dbias", Role::output);
  if (p.sink) t.dsink = add_numbers("dsink", Role::output, {p.num_heads});
}

RunMemory::Sizes RunMemory::lse_shape() const {
  const Problem& p = problem_;
  if (p.packed) return {p.num_heads, p.total_q};
  return {p.batch, p.num_heads, p.seqlen_q};
}

RunMemory::Sizes RunMemory::strides_for(const Sizes& shape, bool may_broadcast, bool last_is_one) {
  Sizes order(shape.size());  // innermost first
  for (std::size_t i = 0; i < order.size(); ++i) {
    order[i] = static_cast<std::int64_t>(order.size() - 1 - i);
  }
  if (heads_ == Heads::outside && last_is_one) std::swap(order[1], order[2]);
  if (variation_.strided) {
    for (std::size_t i = last_is_one ? 1 : 0; i < order.size(); ++i) {
      const std::int64_t other = random_.next_between(static_cast<std::int64_t>(i),
                                                      static_cast<std::int64_t>(order.size()) - 1);
      std::swap(order[i], order[size(other)]);
    }
  }
  Sizes stride(shape.size());
  std::int64_t next = 1;
  for (std::size_t i = 0; i < order.size(); ++i) {
    const std::size_t axis = size(order[i]);
    stride[axis] = next;
    next *= std::max<std::int64_t>(shape[axis], 1);
    if (!variation_.strided) continue;
    next += random_.next_between(0, 5);
    const bool keeps = last_is_one && i == 0;
    if (may_broadcast && !keeps && random_.next_between(0, 15) == 0) stride[axis] = 0;
  }
  return stride;
}

bool RunMemory::has_slots(const std::string& name) const {
  if (!problem_.cache) return false;
  const ScaleShape& scales = problem_.scales;
  return name == "k" || name == "v" || name == "kv" ||
         (name == "k_scale" && scales.k == Scaling::token) ||
         (name == "v_scale" && (scales.v == Scaling::token || scales.v == Scaling::group));
}

Block& RunMemory::add(const std::string& name, Role role, Dtype dtype, const Sizes& shape,
                      bool free_layout) {
  Block block;
  block.name = name;
  block.dtype = dtype;
  block.shape = shape;
  if (free_layout) {
    // o is written by give_forward, a cache's slots are poisoned: no element may lie on another.
    const bool may_broadcast = role == Role::input && name != "o" && !has_slots(name);
    const bool bias = name == "bias" || name == "dbias";
    block.stride = strides_for(shape, may_broadcast, !bias);
  } else {
    block.stride.assign(shape.size(), 1);
    for (std::size_t i = shape.size(); i-- > 1;) {
      block.stride[i - 1] = block.stride[i] * shape[i];
    }
  }
  block.input = role == Role::input;
  Block& placed = place(std::move(block), size_of(dtype));
  if (!placed.input) return placed;
  fill(placed);
  placed.keep();
  return placed;
}

/// Gives it memory, `alignment` bytes or a multiple behind an address aligned to 64.
Block& RunMemory::place(Block block, std::int64_t alignment) {
  const std::int64_t shift = variation_.strided ? alignment * random_.next_between(0, 15) : 0;
  const std::int64_t bytes = extent(block.shape, block.stride) * size_of(block.dtype);
  block.buffer = GuardedBuffer(size(bytes), size(shift));
  blocks_.push_back(std::move(block));
  return blocks_.back();
}

template <class T>
const T* RunMemory::add_integers(const std::string& name, const std::vector<T>& numbers) {
  Block block;
  block.name = name;
  constexpr auto kWidth = static_cast<std::int64_t>(sizeof(T));
  block.shape = {static_cast<std::int64_t>(numbers.size()) * kWidth / size_of(block.dtype)};
  block.stride = {1};
  block.input = true;
  Block& placed = place(std::move(block), kWidth);
  if (!numbers.empty()) {
    std::memcpy(placed.buffer.data(), numbers.data(), numbers.size() * sizeof(T));
  }
  placed.keep();
  return reinterpret_cast<const T*>(placed.buffer.data());
}

/// k and v; those of a cache in one block now and then.
void RunMemory::add_keys() {
  const Problem& p = problem_;
  Tensors& t = tensors_;
  const bool one_type = p.stored_v() == p.stored_k();
  if (!p.cache || !one_type || !variation_.strided || random_.next_between(0, 1) == 0) {
    t.k = add_rows("k", Role::input, false, p.head_dim);
    t.v = p.v_tiles ? add_value_tiles() : add_rows("v", Role::input, false, p.head_dim_v);
    return;
  }
  const Sizes rows = shape_of_keys(p.head_dim);
  const Block& block =
      add("kv", Role::input, p.stored_k(),
          {rows[0], 2, rows[1], rows[2], std::max(p.head_dim, p.head_dim_v)}, true);
  t.k = {block.buffer.data(), block.stride[0], block.stride[2], block.stride[3]};
  t.v = t.k;
  t.v.data = block.at(extent(block.shape, block.stride) == 0 ? 0 : block.stride[1]);
}

/// v in tiles (S14): the values that it would have in rows, zeros where there is no key or column,
/// and ones behind.
Tensor RunMemory::add_value_tiles() {
  const Problem& p = problem_;
  Block rows;
  rows.name = "v";
  rows.dtype = Dtype::e4m3;
  rows.shape = shape_of_keys(p.head_dim_v);
  rows.stride = {rows.shape[1] * rows.shape[2] * rows.shape[3], rows.shape[2] * rows.shape[3],
                 rows.shape[3], 1};
  rows.buffer = GuardedBuffer(size(extent(rows.shape, rows.stride)), 0);
  fill(rows);

  constexpr std::int64_t kAligned = 16;
  const auto gap = [this] { return variation_.strided ? 16 * random_.next_between(0, 5) : 0; };
  Block block;
  block.name = rows.name;
  block.dtype = rows.dtype;
  block.shape = {rows.shape[0], p.num_heads_k, p.value_tile_bytes()};
  const std::int64_t head = block.shape[2] + gap();
  block.stride = {p.num_heads_k * head + gap(), head, 1};
  block.input = true;
  Block& placed = place(std::move(block), kAligned);
  const core::ValueTiles tiles = {core::ValueTiles::padded(static_cast<int>(p.head_dim_v))};
  placed.for_each([&](std::int64_t index, std::int64_t offset) {
    const std::int64_t in_head = index % p.value_tile_bytes();
    const bool one = in_head % tiles.panel_bytes() / core::ValueTiles::kPanelKeys >= tiles.columns;
    reference::store(Dtype::e4m3, placed.buffer.data(), offset, one ? 1.0 : 0.0);
  });
  rows.for_each([&](std::int64_t index, std::int64_t offset) {
    const std::int64_t column = index % rows.shape[3],
                       head_k = index / rows.shape[3] % rows.shape[2];
    const std::int64_t row = index / (rows.shape[3] * rows.shape[2]);
    std::int64_t key = row % rows.shape[1], first = 0;
    if (p.packed) {
      const std::int32_t* const cu = tensors_.cu_seqlens_k;
      int b = 0;
      while (cu[b + 1] <= row) ++b;
      key = row - cu[b];
      first = std::int64_t{cu[b] / core::ValueTiles::kKeys + b} * tiles.tile_bytes();
    }
    const std::int64_t at = row / rows.shape[1] * placed.stride[0] + head_k * placed.stride[1] +
                            first + tiles.offset(static_cast<int>(key), static_cast<int>(column));
    *placed.at(at) = *rows.at(offset);
  });
  placed.keep();
  return {placed.buffer.data(), placed.stride[0], 0, placed.stride[1]};
}

/// The rest of a cache. Slots that hold no sequence's key are poisoned, their scales, too.
void RunMemory::add_cache() {
  CacheTensors& t = tensors_.cache;
  const CacheLayout layout(problem_, variation_.strided ? 3 : 0, random_);
  const auto add_some = [this](const char* name, const std::vector<std::int32_t>& numbers) {
    return numbers.empty() ? nullptr : add_integers(name, numbers);
  };
  t.seqlens = add_some("cache.seqlens", layout.seqlens);
  t.cu_seqlens_new = add_some("cache.cu_seqlens_new", layout.cu_seqlens_new);
  t.index = add_some("cache.index", layout.index);
  t.leftpad = add_some("cache.leftpad", layout.leftpad);
  t.stride_page_table = layout.stride_page_table;
  if (problem_.cache->page_ids == PageIds::i64) {
    t.page_table = add_integers("cache.page_table", layout.page_table);
  } else if (problem_.cache->paged()) {
    t.page_table = add_integers<std::int32_t>("cache.page_table",
                                              {layout.page_table.begin(), layout.page_table.end()});
  }
  for (Block& block : blocks_) {
    if (!has_slots(block.name)) continue;
    const std::int64_t tensors = block.name == "kv" ? 2 : 1;
    const Sizes& shape = block.shape;
    const std::int64_t slots = shape[shape.size() - 3],
                       row = shape[shape.size() - 2] * shape.back();
    block.for_each([&](std::int64_t index, std::int64_t offset) {
      const std::int64_t first = index / (tensors * slots * row), slot = index / row % slots;
      if (layout.used[size(first * slots + slot)]) return;
      poison(block.at(offset), size(size_of(block.dtype)));
    });
    block.keep();
  }
}

/// A cache's values of 8 bits, their scales and its keys again, as columns of rows of one tensor,
/// as FlashMLA has them.
void RunMemory::gather_rows() {
  constexpr std::int64_t kAligned = 16;
  const std::array<const Block*, 3> parts = {find("v"), find("v_scale"), find("k")};
  Block rows;
  rows.name = "rows";
  rows.dtype = Dtype::e4m3;
  rows.shape = shape_of_keys(0);
  std::array<std::int64_t, 3> first = {};  // byte of a part's columns
  for (std::size_t i = 0; i < parts.size(); ++i) {
    if (parts[i] == nullptr) return;
    first[i] = rows.shape[3];
    rows.shape[3] += parts[i]->shape[3] * size_of(parts[i]->dtype);
  }
  if (first[2] % kAligned != 0 || extent(rows.shape, {1, 1, 1, 1}) == 0) return;
  // Slots that are neighbours, or not.
  const auto gap = [this] { return kAligned * random_.next_between(0, 1); };
  const std::int64_t bytes = (rows.shape[3] + kAligned - 1) / kAligned * kAligned;
  const std::int64_t slot = bytes * rows.shape[2] + gap();
  rows.stride = {slot * rows.shape[1] + gap(), slot, bytes, 1};
  rows.input = true;
  Block& placed = place(std::move(rows), kAligned);
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const Block& part = *parts[i];
    const std::int64_t columns = part.shape[3], width = size_of(part.dtype);
    part.for_each([&](std::int64_t index, std::int64_t offset) {
      const std::int64_t row = index / columns, head = row % placed.shape[2];
      const std::int64_t of_slot = row / placed.shape[2] % placed.shape[1];
      const std::int64_t of_page = row / placed.shape[2] / placed.shape[1];
      const std::int64_t at = of_page * placed.stride[0] + of_slot * placed.stride[1] +
                              head * placed.stride[2] + first[i] + index % columns * width;
      std::memcpy(placed.at(at), part.at(offset), size(width));
    });
  }
  placed.keep();
  const auto columns_of = [&](std::size_t i, std::int64_t width) -> ConstTensor {
    return {placed.at(first[i]), placed.stride[0] / width, placed.stride[1] / width,
            placed.stride[2] / width};
  };
  Tensors& t = tensors_;
  t.v = columns_of(0, 1);
  t.k = columns_of(2, size_of(parts[2]->dtype));
  const ConstTensor scales = columns_of(1, size_of(Dtype::f32));
  t.v_scale = {static_cast<const float*>(scales.data), scales.stride_batch, scales.stride_head,
               scales.stride_seqlen};
}

/// Random words, some of which hide most keys.
const std::uint64_t* RunMemory::add_tree() {
  std::vector<std::uint64_t> words(size(problem_.rows_q()));
  for (std::uint64_t& word : words) {
    word = random_.next();
    if (random_.next_between(0, 3) == 0) word &= random_.next() & random_.next();
  }
  return add_integers("tree_mask", words);
}

RunMemory::Sizes RunMemory::shape_of_keys(std::int64_t dim) const {
  const Problem& p = problem_;
  if (p.cache && p.cache->paged()) {
    return {p.cache->num_pages, p.cache->page_size, p.num_heads_k, dim};
  }
  if (p.cache && p.cache->rows > 0) return {p.cache->rows, p.seqlen_k, p.num_heads_k, dim};
  if (p.packed_k()) return {1, p.total_k, p.num_heads_k, dim};
  return {p.batch, p.seqlen_k, p.num_heads_k, dim};
}

Tensor RunMemory::add_rows(const std::string& name, Role role, bool queries, std::int64_t dim) {
  const Problem& p = problem_;
  const Sizes of_queries = p.packed ? Sizes{1, p.total_q, p.num_heads, dim}
                                    : Sizes{p.batch, p.seqlen_q, p.num_heads, dim};
  const Sizes shape = queries ? of_queries : shape_of_keys(dim);
  const bool of_o = name == "o" || name == "dout", of_v = name == "v" || name == "dv";
  const Dtype dtype = of_o ? p.stored_o() : of_v ? p.stored_v() : queries ? p.dtype : p.stored_k();
  Block& block = add(name, role, dtype, shape, true);
  return {block.buffer.data(), block.stride[0], block.stride[1], block.stride[2]};
}

float* RunMemory::add_numbers(const std::string& name, Role role, const Sizes& shape) {
  return reinterpret_cast<float*>(add(name, role, Dtype::f32, shape, false).buffer.data());
}

/// Scales and shifts of the problem's 8-bit tensors (S14).
void RunMemory::add_scales() {
  const ScaleShape& s = problem_.scales;
  Tensors& t = tensors_;
  t.q_scale = add_scale("q_scale", s.q);
  t.k_scale = add_scale("k_scale", s.k, s.block_k);
  t.v_scale = add_scale("v_scale", s.v, s.block_v);
  if (s.score_shift) t.score_shift = add_scale("score_shift", Scaling::token);
  if (s.v_shift) t.v_shift = add_scale("v_shift", Scaling::channel);
}

ConstScales RunMemory::add_scale(const std::string& name, Scaling by, std::int64_t block) {
  const Problem& p = problem_;
  const bool of_keys = name == "k_scale" || name == "v_scale";
  if (by == Scaling::group || (by == Scaling::token && of_keys)) {
    const Sizes rows = shape_of_keys(by == Scaling::group ? p.value_groups() : 1);
    const Block& numbers = add(name, Role::input, Dtype::f32, rows, true);
    return {reinterpret_cast<const float*>(numbers.buffer.data()), numbers.stride[0],
            numbers.stride[2], numbers.stride[1]};
  }
  Sizes shape = {1, 1, 1};  // sequences, heads, numbers
  switch (by) {
    case Scaling::none:
    case Scaling::group: return {};
    case Scaling::tensor: break;
    case Scaling::head: shape = {p.batch, p.num_heads_k, 1}; break;
    case Scaling::token: shape = {p.batch, p.num_heads, p.seqlen_q}; break;
    case Scaling::block: shape = {p.batch, p.num_heads_k, p.scale_blocks(block)}; break;
    case Scaling::channel: shape = {p.batch, p.num_heads_k, p.head_dim_v}; break;
  }
  if (by == Scaling::token && p.packed) shape = {1, p.num_heads, p.total_q};
  if (by == Scaling::block && p.packed_k()) shape[0] = 1;
  const Block& numbers = add(name, Role::input, Dtype::f32, shape, true);
  return {reinterpret_cast<const float*>(numbers.buffer.data()), numbers.stride[0],
          numbers.stride[1]};
}

Bias RunMemory::add_bias(const std::string& name, Role role) {
  const Problem& p = problem_;
  const BiasShape& stored = *p.bias;
  const Block& block = add(name, role, stored.dtype,
                           {stored.batch ? p.batch : 1, stored.heads ? p.num_heads : 1,
                            stored.queries ? p.seqlen_q : 1, stored.keys ? p.seqlen_k : 1},
                           true);
  return {block.buffer.data(), block.stride[0], block.stride[1], block.stride[2], block.stride[3]};
}

/// Random lengths, 0 among them, of which one is `longest` if the total allows.
const std::int32_t* RunMemory::add_cu_seqlens(const std::string& name, std::int64_t total,
                                              std::int64_t longest) {
  const std::int64_t batch = problem_.batch;
  const std::int64_t first = batch > 0 ? random_.next_between(0, batch - 1) : 0;
  std::vector<std::int32_t> offsets(size(batch + 1));
  std::int64_t rest = total - std::min(longest, total), others = batch - 1;
  for (std::int64_t b = 0; b < batch; ++b) {
    std::int64_t length = std::min(longest, total);
    if (b != first) {
      --others;
      length = random_.next_between(std::max<std::int64_t>(0, rest - others * longest),
                                    std::min(longest, rest));
      if (others > 0 && rest <= others * longest && random_.next_between(0, 3) == 0) length = 0;
      rest -= length;
    }
    offsets[size(b + 1)] = offsets[size(b)] + static_cast<std::int32_t>(length);
  }
  return add_integers(name, offsets);
}

void RunMemory::fill(Block& block) const {
  const Random numbers(seed_, hash(block.name));
  const auto store = [&block](std::int64_t offset, double value) {
    reference::store(block.dtype, block.buffer.data(), offset, value);
  };
  const std::string& name = block.name;
  if (name == "alibi_slopes") {
    block.for_each([&](std::int64_t index, std::int64_t offset) {
      store(offset, std::exp2(-8.0 * numbers.uniform(static_cast<std::uint64_t>(index))));
    });
    return;
  }
  // Scales are far from 1, and of i8 such that values are about as large as of other types. Those
  // of blocks of values are far from each other, where o has the numbers: sums have several blocks.
  const bool is_scale = name.ends_with("_scale");
  const Dtype scaled = name == "v_scale" ? problem_.stored_v() : problem_.stored_k();
  const double step = (is_scale ? scaled : block.dtype) == Dtype::i8 ? 24.0 : 1.0;
  if (is_scale) {
    const bool far = name == "v_scale" && problem_.scales.v == Scaling::block &&
                     problem_.stored_o() != Dtype::f16;
    const double octaves = far ? 12.0 : 4.0;
    block.for_each([&](std::int64_t index, std::int64_t offset) {
      store(offset,
            std::exp2(octaves * numbers.uniform(static_cast<std::uint64_t>(index)) - 2.0) / step);
    });
    return;
  }
  const double unit = block.dtype == Dtype::i8 ? step : 1.0;
  const bool both = name == "kv", has_k = name == "k" || both;
  const bool large = variation_.values == Values::large;
  const bool equal_scores = variation_.values == Values::equal_scores;
  const bool outliers = variation_.values == Values::outliers, is_bias = name == "bias";
  const std::size_t axis = both ? 2 : 1;  // of keys
  const auto row =
      has_k ? static_cast<std::uint64_t>(block.shape[axis + 1] * block.shape[axis + 2]) : 1U;
  const auto keys = has_k ? static_cast<std::uint64_t>(block.shape[axis]) : 1U;
  block.for_each([&](std::int64_t at, std::int64_t offset) {
    const auto index = static_cast<std::uint64_t>(at);
    const bool is_k = has_k && !(both && index / (row * keys) % 2 == 1);
    const bool equal_keys = is_k && equal_scores;
    double factor = unit;
    if (large && name == "q") factor *= 16.0;
    if (large && (name == "v" || (both && !is_k))) factor *= 20.0;
    // Small keys first: the softmax's maximum rises late, by any amount.
    if (large && is_k && index / row % keys >= keys / 2) factor *= 16.0;
    if (outliers) {
      const double chance = numbers.uniform(~index);
      if (is_bias && chance < 1.0 / 8) {
        store(offset, -std::numeric_limits<double>::infinity());
        return;
      }
      if (chance < 1.0 / 32) factor = 12.0 * unit;
    }
    store(offset, factor * numbers.normal(equal_keys ? index % row : index));
  });
}

const Block* RunMemory::find(const std::string& name) const {
  for (const Block& block : blocks_) {
    if (block.name == name) return &block;
  }
  return nullptr;
}

void RunMemory::give_forward(const std::vector<double>& o, const std::vector<double>& lse) {
  for (Block& block : blocks_) {
    if (block.name != "o" && block.name != "softmax_lse") continue;
    const std::vector<double>& values = block.name == "o" ? o : lse;
    block.for_each([&](std::int64_t index, std::int64_t offset) {
      reference::store(block.dtype, block.buffer.data(), offset, values[size(index)]);
    });
    block.keep();
  }
}

bool RunMemory::has_output(const std::string& name) const {
  const Block* block = find(name);
  return block != nullptr && !block->input;
}

std::vector<double> RunMemory::output(const std::string& name) const {
  std::vector<double> values;
  const Block* block = find(name);
  block->for_each([&](std::int64_t, std::int64_t offset) {
    values.push_back(reference::load(block->dtype, block->buffer.data(), offset));
  });
  return values;
}

std::string RunMemory::damage() const {
  for (const Block& block : blocks_) {
    if (!block.buffer.guards_intact()) return "memory next to " + block.name + " was written";
    if (block.input) {
      if (!std::equal(block.before.begin(), block.before.end(), block.buffer.data())) {
        return "the input " + block.name + " was changed";
      }
      continue;
    }
    std::vector<std::byte> rest(block.buffer.data(), block.buffer.data() + block.buffer.bytes());
    block.for_each([&](std::int64_t, std::int64_t offset) {
      const std::int64_t width = size_of(block.dtype);
      poison(rest.data() + offset * width, size(width));
    });
    if (!all_poison(rest.data(), rest.size())) {
      return "the padding between rows of " + block.name + " was written";
    }
  }
  return {};
}

}  // namespace tessera::tools
