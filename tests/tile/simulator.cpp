#include "tile/simulator.h"

#include "core/philox.h"
#include "core/softmax.h"

namespace tessera::tile {

namespace {

using core::Cover;
using core::Range;

/// Scalar access to the tensors of one (batch, key/value head).
class Head {
 public:
  Head(const PlanData& plan, const Tensors& tensors, int batch, int head_k)
      : plan_(plan),
        p_(plan.problem),
        t_(tensors),
        batch_(batch),
        kernel_head_(head_k),
        sequence_(sequence_of(plan.problem, tensors, batch)),
        band_(band_of(plan.problem, sequence_)),
        rows_{sequence_.seqlen_q, plan.packed_heads},
        dropout_(core::make_dropout(p_.dropout_p, t_.philox_seed, t_.philox_offset)) {}

  const core::Sequence& sequence() const { return sequence_; }
  const core::Band& band() const { return band_; }
  const core::Rows& rows() const { return rows_; }

  int head_of(std::int64_t row) const { return kernel_head_ * rows_.group + rows_.member_of(row); }
  int head_k() const { return kernel_head_ * rows_.group / static_cast<int>(p_.group()); }
  /// (row of q over all sequences) * num_heads + head.
  std::size_t flat(std::int64_t row) const {
    const std::int64_t first = p_.packed ? sequence_.first_q : batch_ * p_.seqlen_q;
    return static_cast<std::size_t>((first + rows_.query_of(row)) * p_.num_heads + head_of(row));
  }
  std::size_t flat_k(int key) const {
    const std::int64_t first = p_.packed ? sequence_.first_k : batch_ * p_.seqlen_k;
    return static_cast<std::size_t>((first + key) * p_.num_heads_k + head_k());
  }

  const float* q(std::int64_t row) const { return query_row(t_.q, row); }
  const float* o(std::int64_t row) const { return query_row(t_.o, row); }
  const float* dout(std::int64_t row) const { return query_row(t_.dout, row); }
  const float* k(int key) const { return at(t_.k, sequence_.first_k, key, head_k()); }
  const float* v(int key) const { return at(t_.v, sequence_.first_k, key, head_k()); }

  float lse(std::int64_t row) const { return t_.softmax_lse[lse_index(row)]; }
  float dlse(std::int64_t row) const {
    return t_.dsoftmax_lse == nullptr ? 0.0F : t_.dsoftmax_lse[lse_index(row)];
  }
  float sink2(std::int64_t row) const {
    return p_.sink ? t_.sink[head_of(row)] * core::kLog2e : -core::kInfinity;
  }

  /// The base-2 score of S1 before the mask; slope: d(score)/d(q.k) without softmax_scale.
  float score2(std::int64_t row, int key, float* slope = nullptr) const {
    float qk = 0.0F;
    for (std::int64_t c = 0; c < p_.head_dim; ++c) qk += q(row)[c] * k(key)[c];
    if (slope != nullptr) {
      *slope = plan_.score.capped ? core::score_slope(plan_.score, qk) : 1.0F;
    }
    float s = core::score2(plan_.score, qk);
    const int query = rows_.query_of(row), head = head_of(row);
    if (p_.bias) s += bias(query, head, key) * core::kLog2e;
    if (p_.alibi != PerHead::none) {
      const std::int64_t b = p_.alibi == PerHead::batch_heads ? batch_ : 0;
      const int distance = query + sequence_.seqlen_k - sequence_.seqlen_q - key;
      s += core::alibi2(t_.alibi_slopes[b * p_.num_heads + head],
                        static_cast<float>(distance < 0 ? -distance : distance));
    }
    return s;
  }

  /// What dropout multiplies a probability with.
  float keep(std::int64_t row, int key) const {
    if (!dropout_.active()) return 1.0F;
    return core::dropout_keeps(dropout_, batch_, head_of(row), rows_.query_of(row), key)
               ? dropout_.keep_scale
               : 0.0F;
  }

 private:
  const float* at(const ConstTensor& t, std::int64_t first, int position, int head) const {
    const std::int64_t start = p_.packed ? first * t.stride_seqlen : batch_ * t.stride_batch;
    return static_cast<const float*>(t.data) + start + position * t.stride_seqlen +
           head * t.stride_head;
  }
  const float* query_row(const ConstTensor& t, std::int64_t row) const {
    return at(t, sequence_.first_q, rows_.query_of(row), head_of(row));
  }
  std::int64_t lse_index(std::int64_t row) const {
    const int query = rows_.query_of(row), head = head_of(row);
    return p_.packed ? head * p_.total_q + sequence_.first_q + query
                     : (batch_ * p_.num_heads + head) * p_.seqlen_q + query;
  }
  float bias(int query, int head, int key) const {
    const BiasShape& shape = *p_.bias;
    const std::int64_t offset = (shape.batch ? batch_ * t_.bias.stride_batch : 0) +
                                (shape.heads ? head * t_.bias.stride_head : 0) +
                                (shape.queries ? query * t_.bias.stride_query : 0) +
                                (shape.keys ? key * t_.bias.stride_key : 0);
    return static_cast<const float*>(t_.bias.data)[offset];
  }

  const PlanData& plan_;
  const Problem& p_;
  const Tensors& t_;
  int batch_;
  int kernel_head_;  ///< of the grid: packed_heads query heads
  core::Sequence sequence_;
  core::Band band_;
  core::Rows rows_;
  core::Dropout dropout_;
};

/// Calls body(tile of keys, masked) for the tiles of `keys` that the queries see, in order.
template <class Body>
void for_each_key_tile(const core::Band& band, Range queries, Range keys, int block_n,
                       Simulated& out, const Body& body) {
  for (int begin = keys.begin; begin < keys.end; begin += block_n) {
    const Range tile{begin, core::min(begin + block_n, keys.end)};
    const Cover cover = band.cover(queries, tile);
    if (cover == Cover::none) continue;
    ++(cover == Cover::full ? out.full_tiles : out.masked_tiles);
    body(tile, cover == Cover::partial);
  }
}

/// The same for a GPU row: blocks counted from key 0, last one first.
template <class Body>
void for_each_key_block(const core::Band& band, Range queries, int block_n, Simulated& out,
                        const Body& body) {
  const core::KeyBlocks blocks = core::key_blocks(band, queries, block_n);
  for (int n = blocks.seen.end - 1; n >= blocks.seen.begin; --n) {
    const bool full = blocks.full.begin <= n && n < blocks.full.end;
    ++(full ? out.full_tiles : out.masked_tiles);
    body(Range{n * block_n, core::min((n + 1) * block_n, band.seqlen_k)}, !full);
  }
}

/// One row's running state: softmax and unnormalised output.
struct Accumulator {
  core::Softmax<float> softmax;
  std::vector<float> o;
};

void add_tile(const Head& head, std::int64_t row, Range tile, bool masked, Accumulator& acc) {
  const Range seen = head.band().keys_of(head.rows().query_of(row));
  core::Softmax<float> next = acc.softmax;
  std::vector<float> scores(static_cast<std::size_t>(tile.size()), -core::kInfinity);
  for (int key = tile.begin; key < tile.end; ++key) {
    if (masked && (key < seen.begin || key >= seen.end)) continue;
    float& s = scores[static_cast<std::size_t>(key - tile.begin)];
    s = head.score2(row, key);
    next.max = core::max(next.max, s);
  }
  const float shift = core::shift_of(next.max);
  const float rescale = core::exp2(acc.softmax.max - shift);
  next.sum *= rescale;
  for (float& x : acc.o) x *= rescale;
  for (int key = tile.begin; key < tile.end; ++key) {
    const float p = core::exp2(scores[static_cast<std::size_t>(key - tile.begin)] - shift);
    if (p == 0.0F) continue;
    next.sum += p;
    const float weight = p * head.keep(row, key);
    for (std::size_t c = 0; c < acc.o.size(); ++c) acc.o[c] += weight * head.v(key)[c];
  }
  acc.softmax = next;
}

}  // namespace

Simulated simulate_forward(const PlanData& plan, const Tensors& tensors) {
  const Problem& p = plan.problem;
  const core::Kernel& kernel = plan.kernel;
  const auto dv = static_cast<std::size_t>(p.head_dim_v);
  const auto rows_total = static_cast<std::size_t>(p.rows_q() * p.num_heads);
  Simulated out;
  out.o.assign(rows_total * dv, 0.0F);
  out.lse.assign(rows_total, 0.0F);
  std::vector<std::vector<Accumulator>> parts(rows_total);
  std::vector<float> sinks(rows_total, -core::kInfinity);

  for (std::int64_t index = 0; index < plan.grid.count(); ++index) {
    const core::WorkItem item = plan.grid.item(index);
    const Head head(plan, tensors, item.batch, item.head_k);
    const std::int64_t begin = std::int64_t{item.row_block} * kernel.block_m;
    const std::int64_t end = core::min(begin + kernel.block_m, head.rows().count());
    if (begin >= end) continue;
    const Range item_keys = core::split_keys(
        head.band().keys_of(head.rows().queries_of(begin, end)), item.split, plan.split_n);
    for (std::int64_t sub = begin; sub < end; sub += kernel.tile_m) {
      const std::int64_t sub_end = core::min(sub + kernel.tile_m, end);
      const Range queries = head.rows().queries_of(sub, sub_end);
      const Range keys = core::intersect(item_keys, head.band().keys_of(queries));
      std::vector<Accumulator> state(static_cast<std::size_t>(sub_end - sub),
                                     {{}, std::vector<float>(dv, 0.0F)});
      const auto add = [&](Range tile, bool masked) {
        for (std::int64_t row = sub; row < sub_end; ++row) {
          add_tile(head, row, tile, masked, state[static_cast<std::size_t>(row - sub)]);
        }
      };
      if (is_gpu(kernel.arch)) {
        for_each_key_block(head.band(), queries, kernel.block_n, out, add);
      } else {
        for_each_key_tile(head.band(), queries, keys, kernel.block_n, out, add);
      }
      for (std::int64_t row = sub; row < sub_end; ++row) {
        parts[head.flat(row)].push_back(state[static_cast<std::size_t>(row - sub)]);
        sinks[head.flat(row)] = head.sink2(row);
      }
    }
  }

  for (std::size_t row = 0; row < rows_total; ++row) {
    core::Softmax<float> merged;
    for (const Accumulator& part : parts[row]) {
      merged = core::combine(merged, core::from_lse(core::lse_of(part.softmax)));
    }
    if (p.sink) merged = core::combine(merged, {sinks[row], 1.0F});
    for (const Accumulator& part : parts[row]) {
      const float weight = core::weight_of(core::from_lse(core::lse_of(part.softmax)), merged) *
                           core::inverse_sum(part.softmax);
      for (std::size_t c = 0; c < dv; ++c) out.o[row * dv + c] += weight * part.o[c];
    }
    out.lse[row] = core::lse_of(merged);
  }
  return out;
}

namespace {

/// Everything one key adds to the gradients of one row.
void add_pair(const Head& head, const Problem& p, std::int64_t row, int key, float delta,
              Simulated& out) {
  float slope = 1.0F;
  const float s = head.score2(row, key, &slope);
  const float probability = core::exp2(s - core::backward_shift(head.lse(row)));
  const float keep = head.keep(row, key);
  const auto d = static_cast<std::size_t>(p.head_dim);
  const auto dv = static_cast<std::size_t>(p.head_dim_v);
  float dp = 0.0F;
  for (std::size_t c = 0; c < dv; ++c) {
    out.dv[head.flat_k(key) * dv + c] += probability * keep * head.dout(row)[c];
    dp += head.dout(row)[c] * head.v(key)[c];
  }
  const float ds = probability * (dp * keep - delta) * slope * p.scale();
  for (std::size_t c = 0; c < d; ++c) {
    out.dk[head.flat_k(key) * d + c] += ds * head.q(row)[c];
    out.dq[head.flat(row) * d + c] += ds * head.k(key)[c];
  }
}

/// rowsum(dout * o) - dlse: what every score gradient of the row is reduced by.
float delta_of(const Head& head, const Problem& p, std::int64_t row) {
  float delta = -head.dlse(row);
  for (std::int64_t c = 0; c < p.head_dim_v; ++c) delta += head.dout(row)[c] * head.o(row)[c];
  return delta;
}

}  // namespace

Simulated simulate_backward(const PlanData& plan, const Tensors& tensors) {
  const Problem& p = plan.problem;
  const core::Kernel& kernel = plan.kernel;
  Simulated out;
  out.dq.assign(static_cast<std::size_t>(p.rows_q() * p.num_heads * p.head_dim), 0.0F);
  out.dk.assign(static_cast<std::size_t>(p.rows_k() * p.num_heads_k * p.head_dim), 0.0F);
  out.dv.assign(static_cast<std::size_t>(p.rows_k() * p.num_heads_k * p.head_dim_v), 0.0F);
  for (std::int64_t index = 0; index < plan.grid.count(); ++index) {
    const core::WorkItem item = plan.grid.item(index);
    const Head head(plan, tensors, item.batch, item.head_k);
    const Range block{item.row_block * kernel.block_n,
                      core::min((item.row_block + 1) * kernel.block_n, head.sequence().seqlen_k)};
    const Range seen_by = head.band().queries_of(block);
    if (block.empty() || seen_by.empty()) continue;
    const std::int64_t group = head.rows().group;
    const std::int64_t first = seen_by.begin * group / kernel.block_m * kernel.block_m;
    for (std::int64_t begin = first; begin < seen_by.end * group; begin += kernel.block_m) {
      const std::int64_t end = core::min(begin + kernel.block_m, head.rows().count());
      const Range queries = head.rows().queries_of(begin, end);
      const Cover cover = head.band().cover(queries, block);
      if (cover == Cover::none) continue;
      ++(cover == Cover::full ? out.full_tiles : out.masked_tiles);
      for (std::int64_t row = begin; row < end; ++row) {
        const float delta = delta_of(head, p, row);
        const Range keys =
            cover == Cover::full
                ? block
                : core::intersect(head.band().keys_of(head.rows().query_of(row)), block);
        for (int key = keys.begin; key < keys.end; ++key) {
          add_pair(head, p, row, key, delta, out);
        }
      }
    }
  }
  return out;
}

}  // namespace tessera::tile
