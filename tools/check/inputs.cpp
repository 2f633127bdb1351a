// Which blocks a problem needs, their random layout, and their numbers.
#include "check/inputs.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

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
    t.cu_seqlens_k = add_cu_seqlens("cu_seqlens_k", p.total_k, p.seqlen_k);
  }
  t.q = add_rows("q", Role::input, true, p.head_dim);
  t.k = add_rows("k", Role::input, false, p.head_dim);
  t.v = add_rows("v", Role::input, false, p.head_dim_v);
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

Block& RunMemory::add(const std::string& name, Role role, Dtype dtype, const Sizes& shape,
                      bool free_layout) {
  Block block;
  block.name = name;
  block.dtype = dtype;
  block.shape = shape;
  if (free_layout) {
    // o is written by give_forward, so no element may lie on another.
    const bool may_broadcast = role == Role::input && name != "o";
    const bool bias = name == "bias" || name == "dbias";
    block.stride = strides_for(shape, may_broadcast, !bias);
  } else {
    block.stride.assign(shape.size(), 1);
    for (std::size_t i = shape.size(); i-- > 1;) {
      block.stride[i - 1] = block.stride[i] * shape[i];
    }
  }
  const auto width = size(size_of(dtype));
  const std::size_t shift =
      variation_.strided ? width * size(random_.next_between(0, 15)) : std::size_t{0};
  block.buffer = GuardedBuffer(size(extent(shape, block.stride)) * width, shift);
  block.input = role == Role::input;
  blocks_.push_back(std::move(block));
  Block& kept = blocks_.back();
  if (!kept.input) return kept;
  fill(kept);
  kept.before.assign(kept.buffer.data(), kept.buffer.data() + kept.buffer.bytes());
  return kept;
}

Tensor RunMemory::add_rows(const std::string& name, Role role, bool queries, std::int64_t dim) {
  const Problem& p = problem_;
  const std::int64_t heads = queries ? p.num_heads : p.num_heads_k;
  const Sizes shape = p.packed ? Sizes{1, queries ? p.total_q : p.total_k, heads, dim}
                               : Sizes{p.batch, queries ? p.seqlen_q : p.seqlen_k, heads, dim};
  const bool of_o = name == "o" || name == "dout";
  Block& block = add(name, role, of_o ? p.stored_o() : p.dtype, shape, true);
  return {block.buffer.data(), block.stride[0], block.stride[1], block.stride[2]};
}

float* RunMemory::add_numbers(const std::string& name, Role role, const Sizes& shape) {
  return reinterpret_cast<float*>(add(name, role, Dtype::f32, shape, false).buffer.data());
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
  Block& block = add(name, Role::input, Dtype::f32, {batch + 1}, false);
  auto* offsets = reinterpret_cast<std::int32_t*>(block.buffer.data());
  offsets[0] = 0;
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
    offsets[b + 1] = offsets[b] + static_cast<std::int32_t>(length);
  }
  block.before.assign(block.buffer.data(), block.buffer.data() + block.buffer.bytes());
  return offsets;
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
  const bool large = variation_.values == Values::large, is_k = name == "k";
  const bool equal_keys = is_k && variation_.values == Values::equal_scores;
  const bool outliers = variation_.values == Values::outliers, is_bias = name == "bias";
  const auto row = is_k ? static_cast<std::uint64_t>(block.shape[2] * block.shape[3]) : 1U;
  const auto keys = is_k ? static_cast<std::uint64_t>(block.shape[1]) : 1U;
  double usual = 1.0;
  if (large && name == "q") usual = 16.0;
  if (large && name == "v") usual = 20.0;
  block.for_each([&](std::int64_t at, std::int64_t offset) {
    const auto index = static_cast<std::uint64_t>(at);
    double factor = usual;
    // Small keys first: the softmax's maximum rises late, by any amount.
    if (large && is_k && index / row % keys >= keys / 2) factor = 16.0;
    if (outliers) {
      const double chance = numbers.uniform(~index);
      if (is_bias && chance < 1.0 / 8) {
        store(offset, -std::numeric_limits<double>::infinity());
        return;
      }
      if (chance < 1.0 / 32) factor = 12.0;
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
    block.before.assign(block.buffer.data(), block.buffer.data() + block.buffer.bytes());
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
