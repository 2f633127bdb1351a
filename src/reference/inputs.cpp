// Reading of tensors by their strides (S11), and the small rules that need no arithmetic.
#include "reference/inputs.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <utility>

#include "reference/storage.h"

namespace tessera::reference {

Inputs::Inputs(const Problem& problem, const Tensors& tensors)
    : problem_(problem),
      tensors_(tensors),
      dropout_(problem.dropout_p, tensors.philox_seed, tensors.philox_offset) {
  const Problem& p = problem_;
  std::int64_t keys = 0;  // of the sequences before
  for (std::int64_t b = 0; b < p.batch; ++b) {
    Sequence s{b * p.seqlen_q, keys, p.seqlen_q, p.seqlen_k};
    if (p.packed) {
      s.first_q = tensors.cu_seqlens_q[b];
      s.seqlen_q = tensors.cu_seqlens_q[b + 1] - s.first_q;
      if (!p.cache) s.seqlen_k = tensors.cu_seqlens_k[b + 1] - tensors.cu_seqlens_k[b];
    }
    if (p.cache) {
      const std::int64_t filled = filled_slots(b), first = first_slot(b);
      s.seqlen_k = filled > 0 && filled > first ? filled - first : 0;
    }
    keys += s.seqlen_k;
    sequences_.push_back(s);
  }
  const auto of_queries = [this](const ConstTensor& t, std::int64_t b, std::int64_t i) {
    return problem_.packed ? (sequence(b).first_q + i) * t.stride_seqlen
                           : b * t.stride_batch + i * t.stride_seqlen;
  };
  const auto of_keys = [this](const ConstTensor& t, std::int64_t b, std::int64_t j) {
    return key_offset(t, b, j);
  };
  q_ = read(tensors.q, p.dtype, &Sequence::seqlen_q, of_queries, p.num_heads, p.head_dim);
  k_ = read(tensors.k, p.stored_k(), &Sequence::seqlen_k, of_keys, p.num_heads_k, p.head_dim);
  v_ = p.v_tiles ? read_value_tiles()
                 : read(tensors.v, p.stored_v(), &Sequence::seqlen_k, of_keys, p.num_heads_k,
                        p.head_dim_v);
  if (p.scaled()) adjust_all();
  if (p.qv) {
    append(q_,
           read(tensors.qv, p.dtype, &Sequence::seqlen_q, of_queries, p.num_heads, p.head_dim_v));
    append(k_, v_);
  }
  if (p.pass == Pass::backward) {
    const auto read_o = [&](const ConstTensor& tensor) {
      return read(tensor, p.stored_o(), &Sequence::seqlen_q, of_queries, p.num_heads, p.head_dim_v);
    };
    o_ = read_o(tensors.saved_o);
    dout_ = read_o(tensors.dout);
  }
}

std::int64_t Inputs::filled_slots(std::int64_t b) const {
  const CacheShape& shape = *problem_.cache;
  const CacheTensors& cache = tensors_.cache;
  if (shape.lengths == Lengths::full) return problem_.seqlen_k;
  const std::int64_t length = cache.seqlens[b];
  if (length < 0 || shape.lengths == Lengths::after) return length;
  if (!problem_.packed) return length + shape.seqlen_new;
  return length + cache.cu_seqlens_new[b + 1] - cache.cu_seqlens_new[b];
}

std::int64_t Inputs::first_slot(std::int64_t b) const {
  return problem_.cache->leftpad ? tensors_.cache.leftpad[b] : 0;
}

std::int64_t Inputs::page_of(std::int64_t b, std::int64_t slot) const {
  const CacheShape& shape = *problem_.cache;
  const CacheTensors& cache = tensors_.cache;
  const std::int64_t row = shape.rows > 0 ? cache.index[b] : b;
  const std::int64_t entry = row * cache.stride_page_table + slot / shape.page_size;
  return shape.page_ids == PageIds::i64 ? static_cast<const std::int64_t*>(cache.page_table)[entry]
                                        : static_cast<const std::int32_t*>(cache.page_table)[entry];
}

bool Inputs::skipped(std::int64_t b, std::int64_t key) const {
  return problem_.cache && problem_.cache->skips && page_of(b, key) < 0;
}

std::int64_t Inputs::key_offset(const ConstTensor& tensor, std::int64_t b, std::int64_t key) const {
  if (!problem_.cache) {
    return problem_.packed ? (tensors_.cu_seqlens_k[b] + key) * tensor.stride_seqlen
                           : b * tensor.stride_batch + key * tensor.stride_seqlen;
  }
  const CacheShape& shape = *problem_.cache;
  const CacheTensors& cache = tensors_.cache;
  const std::int64_t row = shape.rows > 0 ? cache.index[b] : b, slot = first_slot(b) + key;
  if (shape.page_size == 0) return row * tensor.stride_batch + slot * tensor.stride_seqlen;
  return page_of(b, slot) * tensor.stride_batch + slot % shape.page_size * tensor.stride_seqlen;
}

template <class Offset>
Inputs::Rows Inputs::read(const ConstTensor& tensor, Dtype dtype, std::int64_t Sequence::* length,
                          const Offset& offset, std::int64_t heads, std::int64_t dim) const {
  Rows rows{{}, heads, dim};
  std::int64_t count = 0;
  for (const Sequence& s : sequences_) count += s.*length;
  rows.data.reserve(static_cast<std::size_t>(count * heads * dim));
  for (std::int64_t b = 0; b < problem_.batch; ++b) {
    for (std::int64_t i = 0; i < sequence(b).*length; ++i) {
      for (std::int64_t h = 0; h < heads; ++h) {
        if (length == &Sequence::seqlen_k && skipped(b, i)) {
          rows.data.resize(rows.data.size() + static_cast<std::size_t>(dim));
          continue;
        }
        const std::int64_t start = offset(tensor, b, i) + h * tensor.stride_head;
        for (std::int64_t x = 0; x < dim; ++x) {
          rows.data.push_back(load(dtype, tensor.data, start + x));
        }
      }
    }
  }
  return rows;
}

void Inputs::append(Rows& rows, const Rows& more) {
  std::vector<double> data;
  data.reserve(rows.data.size() + more.data.size());
  const auto add = [&data](const Rows& from, std::size_t row) {
    const double* const first = from.data.data() + row * static_cast<std::size_t>(from.dim);
    data.insert(data.end(), first, first + from.dim);
  };
  const std::size_t count = rows.data.size() / static_cast<std::size_t>(rows.dim);
  for (std::size_t row = 0; row < count; ++row) {
    add(rows, row);
    add(more, row);
  }
  rows.data = std::move(data);
  rows.dim += more.dim;
}

Inputs::Rows Inputs::read_value_tiles() const {
  const Problem& p = problem_;
  // The key that stands in each place of 16.
  constexpr std::int64_t kKeys[] = {0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15};
  std::int64_t rows_of_panel = 8;
  for (const std::int64_t columns : {64, 96, 128, 192, 256}) {
    if (p.head_dim_v > columns) continue;
    rows_of_panel += columns;
    break;
  }
  Rows rows{{}, p.num_heads_k, p.head_dim_v};
  for (std::int64_t b = 0; b < p.batch; ++b) {
    const std::int64_t n = sequence(b).seqlen_k;
    const std::int64_t first_tile = p.packed ? tensors_.cu_seqlens_k[b] / 128 + b : 0;
    const std::size_t first = rows.data.size();
    rows.data.resize(first + static_cast<std::size_t>(n * p.num_heads_k * p.head_dim_v));
    for (std::int64_t h = 0; h < p.num_heads_k; ++h) {
      const std::int64_t start = (p.packed ? 0 : b * tensors_.v.stride_batch) +
                                 h * tensors_.v.stride_head + first_tile * 128 * rows_of_panel;
      for (std::int64_t half = 0; half * 16 < n; ++half) {
        for (std::int64_t c = 0; c < p.head_dim_v; ++c) {
          const bool swapped = c / 4 % 2 != 0;
          const std::int64_t place = (half % 2 != 0) != swapped ? 16 : 0;
          const std::int64_t line = start + (half / 2 * rows_of_panel + c) * 32 + place;
          for (std::int64_t i = 0; i < 16; ++i) {
            const std::int64_t key = half * 16 + kKeys[i];
            if (key >= n) continue;
            const std::int64_t at = (key * p.num_heads_k + h) * p.head_dim_v + c;
            rows.data[first + static_cast<std::size_t>(at)] =
                load(Dtype::e4m3, tensors_.v.data, line + i);
          }
        }
      }
    }
  }
  return rows;
}

template <class Value>
void Inputs::adjust(Rows& rows, std::int64_t Sequence::* length, const Value& value) const {
  double* x = rows.data.data();
  for (std::int64_t b = 0; b < problem_.batch; ++b) {
    for (std::int64_t i = 0; i < sequence(b).*length; ++i) {
      for (std::int64_t h = 0; h < rows.heads; ++h) {
        for (std::int64_t c = 0; c < rows.dim; ++c, ++x) *x = value(*x, b, h, i, c);
      }
    }
  }
}

void Inputs::adjust_all() {
  q_elements_ = q_;
  k_elements_ = k_;
  v_elements_ = v_;
  adjust(q_, &Sequence::seqlen_q,
         [this](double x, std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t) {
           return x * q_scale(b, h, i);
         });
  adjust(k_, &Sequence::seqlen_k,
         [this](double x, std::int64_t b, std::int64_t h, std::int64_t j, std::int64_t) {
           return x * k_scale(b, h, j);
         });
  adjust(v_, &Sequence::seqlen_k,
         [this](double x, std::int64_t b, std::int64_t h, std::int64_t j, std::int64_t c) {
           return x * v_scale(b, h, j, c) + v_shift(b, h, c);
         });
}

double Inputs::q_scale(std::int64_t b, std::int64_t head, std::int64_t query) const {
  const Scaling by = problem_.scales.q;
  return scale(tensors_.q_scale, by, 0, b, by == Scaling::token ? head : head_k(head), query, 0);
}

double Inputs::k_scale(std::int64_t b, std::int64_t head_k, std::int64_t key) const {
  if (problem_.scales.k == Scaling::token) return slot_scale(tensors_.k_scale, b, head_k, key, 0);
  return scale(tensors_.k_scale, problem_.scales.k, problem_.scales.block_k, b, head_k, key, 0);
}

double Inputs::v_scale(std::int64_t b, std::int64_t head_k, std::int64_t key,
                       std::int64_t column) const {
  const ScaleShape& scales = problem_.scales;
  if (scales.v == Scaling::token) return slot_scale(tensors_.v_scale, b, head_k, key, 0);
  if (scales.v == Scaling::group) {
    return slot_scale(tensors_.v_scale, b, head_k, key, column / scales.block_v);
  }
  return scale(tensors_.v_scale, problem_.scales.v, problem_.scales.block_v, b, head_k, key,
               column);
}

double Inputs::slot_scale(const ConstScales& scales, std::int64_t b, std::int64_t head_k,
                          std::int64_t key, std::int64_t number) const {
  if (skipped(b, key)) return 0.0;
  const ConstTensor tensor = {scales.data, scales.stride_batch, scales.stride_seqlen,
                              scales.stride_head};
  return static_cast<double>(
      scales.data[key_offset(tensor, b, key) + head_k * scales.stride_head + number]);
}

double Inputs::scale(const ConstScales& scales, Scaling by, std::int64_t block, std::int64_t b,
                     std::int64_t head, std::int64_t row, std::int64_t column) const {
  std::int64_t at = head * scales.stride_head;
  switch (by) {
    case Scaling::none: return 1.0;
    case Scaling::tensor: at = 0; break;
    case Scaling::head: at += b * scales.stride_batch; break;
    case Scaling::token:
      at += problem_.packed ? sequence(b).first_q + row : b * scales.stride_batch + row;
      break;
    case Scaling::block:
      at += problem_.packed ? tensors_.cu_seqlens_k[b] / block + b + row / block
                            : b * scales.stride_batch + row / block;
      break;
    case Scaling::channel: at += b * scales.stride_batch + column; break;
    case Scaling::group: break;  // of slots alone
  }
  return static_cast<double>(scales.data[at]);
}

double Inputs::score_shift(std::int64_t b, std::int64_t head, std::int64_t query) const {
  if (!problem_.scales.score_shift) return 0.0;
  return scale(tensors_.score_shift, Scaling::token, 0, b, head, query, 0);
}

double Inputs::v_shift(std::int64_t b, std::int64_t head_k, std::int64_t column) const {
  if (!problem_.scales.v_shift) return 0.0;
  return scale(tensors_.v_shift, Scaling::channel, 0, b, head_k, 0, column);
}

double Inputs::softmax_scale() const {
  if (problem_.softmax_scale) return static_cast<double>(*problem_.softmax_scale);
  return 1.0 / std::sqrt(static_cast<double>(problem_.score_dim()));
}

bool Inputs::visible(const Sequence& s, std::int64_t query, std::int64_t key) const {
  if (skipped(&s - sequences_.data(), key)) return false;
  const bool bottom_right = problem_.alignment == Alignment::bottom_right;
  const std::int64_t position = bottom_right ? query + s.seqlen_k - s.seqlen_q : query;
  bool left = problem_.window_left < 0 || key >= position - problem_.window_left;
  bool right = problem_.window_right < 0 || key <= position + problem_.window_right;
  if (const std::int64_t chunk = problem_.chunk; chunk > 0) {
    std::int64_t number = position / chunk;
    if (position % chunk < 0) --number;  // rounded down, not towards 0
    left = left && key >= number * chunk;
    right = right && key / chunk <= number;
  }
  if (!right || !(left || key < problem_.sink_tokens)) return false;
  const std::int64_t bit = key - (s.seqlen_k - s.seqlen_q);
  if (!problem_.tree || bit < 0) return true;
  return (tensors_.tree_mask[s.first_q + query] >> bit) % 2 == 1;
}

double Inputs::bias(std::int64_t batch, std::int64_t head, std::int64_t query,
                    std::int64_t key) const {
  if (!problem_.bias) return 0.0;
  const BiasShape& shape = *problem_.bias;
  std::int64_t index = 0;
  if (shape.batch) index += batch * tensors_.bias.stride_batch;
  if (shape.heads) index += head * tensors_.bias.stride_head;
  if (shape.queries) index += query * tensors_.bias.stride_query;
  if (shape.keys) index += key * tensors_.bias.stride_key;
  return load(shape.dtype, tensors_.bias.data, index);
}

double Inputs::alibi(std::int64_t batch, std::int64_t head, std::int64_t query,
                     std::int64_t key) const {
  if (problem_.alibi == PerHead::none) return 0.0;
  const std::int64_t row = problem_.alibi == PerHead::batch_heads ? batch : 0;
  const auto slope = static_cast<double>(tensors_.alibi_slopes[row * problem_.num_heads + head]);
  const Sequence& s = sequence(batch);
  return -slope * static_cast<double>(std::llabs(query + s.seqlen_k - s.seqlen_q - key));
}

double Inputs::sink(std::int64_t head) const {
  return problem_.sink ? static_cast<double>(tensors_.sink[head])
                       : -std::numeric_limits<double>::infinity();
}

double Inputs::dlse(std::int64_t batch, std::int64_t head, std::int64_t query) const {
  if (tensors_.dsoftmax_lse == nullptr) return 0.0;
  return static_cast<double>(tensors_.dsoftmax_lse[lse_index(batch, head, query)]);
}

double Inputs::copies() const {
  const bool backward = problem_.pass == Pass::backward;
  const auto along = [backward](std::int64_t q, std::int64_t dout, std::int64_t count) {
    return q == 0 || (backward && dout == 0) ? static_cast<double>(std::max<std::int64_t>(count, 1))
                                             : 1.0;
  };
  const ConstTensor &q = tensors_.q, &dout = tensors_.dout;
  return (problem_.packed ? 1.0 : along(q.stride_batch, dout.stride_batch, problem_.batch)) *
         along(q.stride_seqlen, dout.stride_seqlen, problem_.seqlen_q) *
         along(q.stride_head, dout.stride_head, problem_.num_heads);
}

std::int64_t Inputs::lse_index(std::int64_t batch, std::int64_t head, std::int64_t query) const {
  if (problem_.packed) return head * problem_.total_q + sequence(batch).first_q + query;
  return (batch * problem_.num_heads + head) * problem_.seqlen_q + query;
}

std::int64_t Inputs::bias_index(std::int64_t batch, std::int64_t head, std::int64_t query,
                                std::int64_t key) const {
  const BiasShape& shape = *problem_.bias;
  std::int64_t index = shape.batch ? batch : 0;
  if (shape.heads) index = index * problem_.num_heads + head;
  if (shape.queries) index = index * problem_.seqlen_q + query;
  if (shape.keys) index = index * problem_.seqlen_k + key;
  return index;
}

std::int64_t Inputs::bias_size() const {
  if (!problem_.bias) return 0;
  const BiasShape& shape = *problem_.bias;
  return (shape.batch ? problem_.batch : 1) * (shape.heads ? problem_.num_heads : 1) *
         (shape.queries ? problem_.seqlen_q : 1) * (shape.keys ? problem_.seqlen_k : 1);
}

}  // namespace tessera::reference
