// The decode kernel: few query rows, any number of keys. The limit is memory, so every row of K and
// V is read once for all query rows of its key/value head (core::Rows). A work item owns one split
// of the keys, of several heads where these are neighbours in memory: it takes a chunk of block_n
// keys of one head after the other, so that what the memory system fetches around a head's rows is
// used while it is near. head_dim lies along the SIMD lanes; a chunk goes through three steps:
//   scores  a few keys x a few rows of partial sums in registers, reduced across lanes together;
//           with qv of values, too: a chunk is one block then, whose values are still near below
//   weights one row at a time, keys in lanes: score transform, mask, online softmax, dropout
//   values  rows of V added to a few columns of a few fp32 outputs in registers, a block at a time
// Scores and their softmax are fp32. Weights are rounded to bf16 where bf16 is multiplied (S7).
// Keys and values of 8 bits are widened exactly. A scale by tensor or head is a factor of queries,
// of scores where these are made of bf16, or of results; one by token of scores or weights (S14).
//
// What a row does not see has weight 0; a NaN or infinite value that another row of the item sees
// reaches it too (0 * NaN). Keys that no row sees are not read, nor is anything past a row's end.
#pragma once

#include <type_traits>

#include "core/philox.h"
#include "core/softmax.h"
#include "cpu/combine.h"
#include "cpu/copy.h"
#include "cpu/decode_eight_bits.h"
#include "cpu/decode_requests.h"
#include "cpu/decode_tile.h"
#include "cpu/extras.h"
#include "cpu/math.h"
#include "cpu/product.h"
#include "cpu/rows.h"

namespace tessera::cpu::TESSERA_ISA {

template <core::Kernel K>
class DecodeItem {
  static_assert(K.lanes == kLanes && K.block_m % kRowTile == 0 && K.block_n % kMostBlockKeys == 0 &&
                keys_of_tile(1) <= kMostTileKeys);

 public:
  /// Split `split` of `heads` key/value heads from `head_k` on.
  DecodeItem(const Call& call, int batch, int head_k, int heads, int split, int worker)
      : plan_(call.plan),
        problem_(call.plan.problem),
        tensors_(call.tensors),
        splits_(call.layout.splits),
        split_(split),
        num_heads_(heads),
        map_(call, batch, head_k),
        places_{map_.pages, map_.sequence},
        k_scales_(k_scales_of(problem_, tensors_)),
        v_scales_(v_scales_of(problem_, tensors_)),
        score_(call.plan.score),
        dropout_(
            core::make_dropout(problem_.dropout_p, tensors_.philox_seed, tensors_.philox_offset)),
        query_stride_(decode_query_stride(plan_)),
        output_stride_(decode_row_stride(plan_, problem_.head_dim_v)) {
    Workspace workspace(call.scratch(worker));
    scratch_ = layout_decode_scratch(workspace, plan_);
    // fp32 queries are scaled while they are copied, bf16 ones would be rounded again.
    if (!kPairs) score_.pre = 1.0F;
    with_cached_storage<K.operand>(
        problem_.stored_k(), [&](auto storage) { unit_ = kUnit<decltype(storage), K.operand>; });
  }

  void run() {
    head_rows_ = static_cast<int>(map_.rows.count());
    if (head_rows_ == 0) return;
    keys_ = core::split_runs(map_.mask.runs_of(map_.rows.queries_of(0, head_rows_)), split_,
                             plan_.split_n);
    if (split_ > 0 && keys_.empty()) return;
    for (int h = 0; h < num_heads_; ++h) {
      RowMap::Row row = map_.at(0);
      for (int r = h * head_rows_; r < (h + 1) * head_rows_; ++r, row = map_.next(row)) {
        rows_[r].query = row.query;
        rows_[r].head = map_.head_of(row) + h * map_.rows.group;
        rows_[r].keys = {map_.mask.begin_of(row.query), map_.mask.end_of(row.query)};
      }
    }
    with_tensor_storage<K>(problem_.dtype,
                           [&](auto storage) { load_queries<decltype(storage)>(); });
    with_cached_storage<K.operand>(problem_.stored_k(),
                                   [&](auto storage) { attend<decltype(storage)>(); });
    with_storage(problem_.stored_o(), [&](auto storage) { write<decltype(storage)>(); });
  }

 private:
  static constexpr bool kPairs = K.operand == core::Operand::bf16;
  using Operand = std::conditional_t<kPairs, U32, F32>;
  using Query = std::conditional_t<kPairs, Bf16, float>;
  using Weight = Query;  ///< rounded to V's type for the second product if that takes it

  /// Keys of a block, from a cache of T. Of pairs twice as many are faster with qv, and slower
  /// without it.
  template <class T>
  int block_keys() const {
    constexpr int kKeys = kKeyBlock<T, Operand>, kWithSecond = kPairs ? 2 * kKeys : kKeys;
    static_assert(kKeys % keys_of_tile(1) == 0 && kKeys <= kMostBlockKeys);
    return problem_.qv ? core::min(kWithSecond, kMostBlockKeys) : kKeys;
  }
  static_assert(!kThroughF16<E4m3, K.operand> || kKeyBlock<E4m3, Operand> <= kDecodeWidenedKeys);

  struct RowState {
    int query = 0;
    int head = 0;
    core::Range keys;  ///< that the row sees, sink tokens and a tree aside
    core::Softmax<float> softmax;
  };

  int num_rows() const { return num_heads_ * head_rows_; }

  /// What products with a row's elements of K or V are to be multiplied by, less scales by token.
  float factor_of(const core::Scales& scales, int r) const {
    if (!problem_.scaled()) return 1.0F;
    return scales.of_slots() ? unit_
                             : unit_ * *scales.of(map_.sequence, map_.head_k + r / head_rows_);
  }

  // ---- scratch; rows end with zeros up to a whole step ----

  Query* query(int r) const { return reinterpret_cast<Query*>(scratch_.q) + r * query_stride_; }
  /// A row of qv.
  Query* second_query(int r) const {
    return query(r) + decode_row_stride(plan_, problem_.head_dim);
  }
  float* output(int r) const { return scratch_.o + r * output_stride_; }
  float* scores(int r) const { return scratch_.scores + r * K.block_n; }
  /// The weights of a row replace its scores.
  Weight* weights(int r) const { return reinterpret_cast<Weight*>(scores(r)); }

  template <class T>
  void load_queries() {
    for (int r = 0; r < num_rows(); ++r) {
      load_columns<T>(tensors_.q, problem_.head_dim, r, query(r));
      if (problem_.qv) load_columns<T>(tensors_.qv, problem_.head_dim_v, r, second_query(r));
      for (std::int64_t i = 0; i < output_stride_; i += kLanes) store(output(r) + i, F32{});
    }
  }

  template <class T>
  void load_columns(const ConstTensor& tensor, std::int64_t n, int r, Query* out) const {
    const T* q =
        static_cast<const T*>(tensor.data) + map_.offset(tensor, rows_[r].query, rows_[r].head);
    const F32 factor(plan_.score.pre * factor_of(k_scales_, r));
    const std::int64_t stride = decode_row_stride(plan_, n);
    for (std::int64_t i = 0; i < stride; i += kLanes) {
      const F32 x = load_n(q + i, lanes_of(n - i));
      store(out + i, kPairs ? x : x * factor);
    }
    if constexpr (kPairs) {
      if (!problem_.scaled()) return;
      constexpr int kStep = kStepColumns<E4m3, Operand>;
      static_assert(kStep == kDecodeStepOfBytes && kStep == kStepColumns<I8, Operand>);
      for (std::int64_t i = 0; i < stride; i += kStep) order_query(out + i);
    }
  }

  template <class T>
  void attend() {
    if (keys_.empty()) return;
    const std::int64_t head = map_.head_k;
    KeyRows<T> k = {static_cast<const T*>(tensors_.k.data) + head * tensors_.k.stride_head,
                    strides_of(tensors_.k), problem_.head_dim};
    KeyRows<T> v = {static_cast<const T*>(tensors_.v.data) + head * tensors_.v.stride_head,
                    strides_of(tensors_.v), problem_.head_dim_v};
    const int side_by_side = chunk_side_by_side(k, v);
    Reach reach = reach_on(plan_.device, side_by_side > 0);
    // With qv values are used beside their keys, and are near when their weights follow.
    const int most = problem_.qv ? block_keys<T>() : K.block_n;
    const int chunk = side_by_side > 0 ? side_by_side : most;
    KeyRows<T> asked_k = k, asked_v = v;
    if (side_by_side > 0) {
      asked_k.n *= num_heads_;
      asked_v.n *= num_heads_;
      // The first head's values are used before the others' keys.
      reach.lines = core::max(reach.lines, chunk * (asked_k.lines() + asked_v.lines()));
    }
    Requests requests(asked_k, asked_v, places_, keys_, chunk, side_by_side > 0 ? 1 : num_heads_,
                      reach);
    if (!places_.paged()) {
      k.data += places_.offset(k.strides, 0);
      v.data += places_.offset(v.strides, 0);
    }
    for (chunk_ = keys_.first(chunk); !chunk_.empty(); chunk_ = keys_.after(chunk_, chunk)) {
      if (places_.paged()) find_slots(k, v);
      for (int h = 0; h < num_heads_; ++h) attend_chunk(k.head(h), v.head(h), h, requests);
    }
    if constexpr (kPairs) {
      for (int r = 0; r < num_rows(); ++r) {
        for (std::int64_t i = 0; i < output_stride_; i += kStepColumns<T, Operand>) {
          order_columns(T{}, output(r) + i);
        }
      }
    }
  }

  /// Keys of a chunk of which the cache holds all heads, where these lie side by side, so that they
  /// can be asked for in the order of addresses; 0: they do not, or it does not. Not of the item's
  /// heads: how many these are depends on the number of threads, on which no bits may.
  template <class T>
  int chunk_side_by_side(const KeyRows<T>& k, const KeyRows<T>& v) const {
    const std::int64_t heads = problem_.num_heads_k;
    if (heads == 1 || k.strides.head != k.n || v.strides.head != v.n) return 0;
    const std::int64_t key_bytes = heads * (k.n + v.n) * static_cast<std::int64_t>(sizeof(T));
    const std::int64_t fitting = reach_on(plan_.device, true).chunk_bytes / key_bytes;
    return static_cast<int>(core::min<std::int64_t>(fitting / kLanes * kLanes, K.block_n));
  }

  /// Where the chunk's keys and values lie.
  template <class T>
  void find_slots(KeyRows<T>& k, KeyRows<T>& v) const {
    std::int64_t* of_v = scratch_.slots + K.block_n;
    k.slots = scratch_.slots;
    v.slots = of_v;
    k.first = v.first = chunk_.begin;
    places_.find(k.strides, chunk_, scratch_.slots);
    places_.find(v.strides, chunk_, of_v);
  }

  template <class T>
  TESSERA_INLINE void attend_chunk(const KeyRows<T>& k, const KeyRows<T>& v, int h,
                                   Requests& requests) {
    const int first = h * head_rows_, last = first + head_rows_;
    if (k_scales_.of_slots()) {
      load_scales(k_scales_, places_, chunk_, map_.head_k + h, scratch_.k_scales);
    }
    if (v_scales_.of_slots()) {
      load_scales(v_scales_, places_, chunk_, map_.head_k + h, scratch_.v_scales);
    }
    for_each_block<T>([&](core::Range keys) {
      requests.used(keys.size() * (k.lines() + (problem_.qv ? v.lines() : 0)));
      const auto block = block_of(k, keys);
      const auto multiply = [&](const decltype(block)* second) {
        for_each_tile(first, last, [&](auto rows, int r) {
          multiply_keys<rows(), T>(block, second, keys, r, requests);
        });
      };
      if (problem_.qv) {
        const auto second = block_of(v, keys);
        multiply(&second);
      } else {
        multiply(nullptr);
      }
    });
    weigh(first, last, requests);
    for_each_block<T>([&](core::Range keys) {
      if (!problem_.qv) requests.used(keys.size() * v.lines());
      const auto block = block_of(v, keys);
      for_each_tile(first, last, [&](auto rows, int r) {
        multiply_values<rows(), T>(block, keys, r, requests);
      });
    });
  }

  /// The rows of a block as they are multiplied.
  template <class T>
  TESSERA_INLINE auto block_of(const KeyRows<T>& rows, core::Range keys) const {
    if constexpr (kThroughF16<T, K.operand>) {
      return copy_as_f16(rows, keys, reinterpret_cast<F16*>(scratch_.widened),
                         decode_widened_stride(problem_));
    } else {
      return KeyBlock<T>(rows, keys);
    }
  }

  /// Calls body(block of the chunk's keys).
  template <class T, class Body>
  TESSERA_INLINE void for_each_block(const Body& body) const {
    const int size = block_keys<T>();
    for (int key = chunk_.begin; key < chunk_.end; key += size) {
      body(core::Range{key, core::min(key + size, chunk_.end)});
    }
  }

  // ---- scores ----

  /// Scores of rows [first, first + NR) against a block of keys, which the cache has as Stored, and
  /// of qv against their values, unless these are null. Where a tile lacks keys, the last one is
  /// read again; its extra scores are masked.
  template <int NR, class Stored, class T>
  [[gnu::noinline]] void multiply_keys(const KeyBlock<T>& k, const KeyBlock<T>* v, core::Range keys,
                                       int first, Requests& all_requests) const {
    const std::int64_t stride = query_stride_;
    Requests::Here requests(all_requests);
    for (int key = keys.begin; key < keys.end; key += keys_of_tile(NR)) {
      const int at = key - keys.begin;
      F32 sums[kLanes];
#pragma GCC unroll 16
      for (F32& sum : sums) sum = F32{};
      add_products<NR, Stored, Operand>(sums, k.row + at, k.n, query(first), stride, requests);
      if (v != nullptr) {
        add_products<NR, Stored, Operand>(sums, v->row + at, v->n, second_query(first), stride,
                                          requests);
      }
      store_scores<NR, K.block_n>(sum_rows(sums), scores(first) + (key - chunk_.begin));
    }
  }

  // ---- weights ----

  /// Turns some rows' scores of a chunk into weights and rescales outputs of those whose maximum
  /// rose. A step of all rows comes before the next, so that none waits for its own last one.
  [[gnu::noinline]] void weigh(int first, int last, Requests& all_requests) {
    Requests::Here requests(all_requests);
    F32 tops[K.block_m];
    for (int r = first; r < last; ++r) tops[r - first] = finish_row(r, requests);
    float shifts[K.block_m];
    for (int r = first; r < last; ++r) {
      RowState& row = rows_[r];
      const float before = row.softmax.max;
      row.softmax.max = core::max(before, reduce_max(tops[r - first]));
      const float shift = shifts[r - first] = core::shift_of(row.softmax.max);
      if (row.softmax.max != before) rescale(r, exp2(F32(before) - F32(shift)));
    }
    for (int r = first; r < last; ++r) weigh_row(r, F32(shifts[r - first]), requests);
  }

  /// Makes a row's products its scores. Their maximum, lane by lane.
  TESSERA_INLINE F32 finish_row(int r, Requests::Here& requests) const {
    const RowState& row = rows_[r];
    F32 top(-core::kInfinity);
    const auto finish = [&](const auto& body) {
      for (int key = chunk_.begin; key < chunk_.end; key += kLanes) {
        requests.advance<kWeighLines>();
        top = max(body(key, scores(r) + (key - chunk_.begin)), top);
      }
    };
    const float* scales = k_scales_.of_slots() ? scratch_.k_scales : nullptr;
    core::Score score = score_;
    if (kPairs) score.pre *= factor_of(k_scales_, r);
    if (are_scores(row)) {
      const F32 factor(score.pre);
      if (scales != nullptr) {
        finish([&](int key, float* p) {
          F32 x = load(p) * load(scales + (key - chunk_.begin));
          if (kPairs) x *= factor;
          store(p, x);
          return x;
        });
      } else if (kPairs) {
        finish([&](int, float* p) {
          const F32 x = load(p) * factor;
          store(p, x);
          return x;
        });
      } else {
        finish([](int, const float* p) { return load(p); });
      }
    } else {
      finish([&](int key, float* p) {
        F32 x = load(p);
        if (scales != nullptr) x *= load(scales + (key - chunk_.begin));
        x = finish_scores(row, score, key, x);
        store(p, x);
        return x;
      });
    }
    return top;
  }

  TESSERA_INLINE void weigh_row(int r, F32 shift, Requests::Here& requests) {
    const float* scales = v_scales_.of_slots() ? scratch_.v_scales : nullptr;
    F32 sum{};
    for (int key = chunk_.begin; key < chunk_.end; key += kLanes) {
      const int at = key - chunk_.begin;
      requests.advance<kWeighLines>();
      F32 weight = exp2(load(scores(r) + at) - shift);
      sum += weight;
      if (dropout_.active()) weight = dropped(rows_[r], key, weight);
      if (scales != nullptr) weight *= load(scales + at);
      store(weights(r) + at, weight);
    }
    rows_[r].softmax.sum += reduce_add(sum);
  }

  void rescale(int r, F32 factor) {
    rows_[r].softmax.sum *= lane(factor, 0);
    float* o = output(r);
    for (std::int64_t i = 0; i < output_stride_; i += kLanes) store(o + i, load(o + i) * factor);
  }

  /// Whether products are the row's scores but for their factors, of a chunk of whole vectors all
  /// of which it sees.
  TESSERA_INLINE bool are_scores(const RowState& row) const {
    const core::SequenceMask& mask = map_.mask;
    return !score_.capped && !problem_.bias && problem_.alibi == PerHead::none &&
           row.keys.begin <= chunk_.begin && chunk_.end <= row.keys.end &&
           chunk_.size() % kLanes == 0 &&
           (mask.tree == nullptr || chunk_.end <= mask.first_of_tree());
  }

  /// S1 for kLanes keys: products become base-2 scores.
  TESSERA_INLINE F32 finish_scores(const RowState& row, const core::Score& score, int key,
                                   F32 x) const {
    if (kPairs || score.capped) x = core::score2(score, x);
    const bool alibi = problem_.alibi != PerHead::none;
    if (problem_.bias || alibi) {
      const F32 bias = problem_.bias ? bias_of(row, key) : F32{};
      const F32 slope = alibi ? F32(map_.alibi_slope(row.head)) : F32{};
      const F32 distance = to_f32(iota() + I32(key - map_.position_of(row.query)));
      x = core::add_to_score(x, problem_.bias.has_value(), bias, alibi, slope, abs(distance));
    }
    const core::SequenceMask& mask = map_.mask;
    const int end = core::min(row.keys.end, chunk_.end);
    const bool no_tree = mask.tree == nullptr || key + kLanes <= mask.first_of_tree();
    if (row.keys.begin <= key && key + kLanes <= end && no_tree) return x;
    Mask seen = first_lanes(end - key) & ~first_lanes(row.keys.begin - key);
    if (key < mask.sink_tokens) {
      seen = seen | (first_lanes(end - key) & first_lanes(mask.sink_tokens - key));
    }
    if (!no_tree) seen = seen & in_tree(mask.tree[row.query], key - mask.first_of_tree());
    return select(seen, x, F32(-core::kInfinity));
  }

  /// The bias of kLanes keys in base 2; zero beyond the chunk.
  [[gnu::noinline]] F32 bias_of(const RowState& row, int key) const {
    const core::BiasStrides strides = map_.bias_strides();
    const core::Range keys = {key, core::min(key + kLanes, chunk_.end)};
    F32 x{};
    with_storage(problem_.bias->dtype, [&](auto storage) {
      using T = decltype(storage);
      const T* data = static_cast<const T*>(tensors_.bias.data) +
                      strides.offset(map_.batch, row.head, row.query, 0);
      if (strides.key == 1 && keys.size() == kLanes) {
        x = load(data + key);
        return;
      }
      float lanes[kLanes] = {};
      for (int j = keys.begin; j < keys.end; ++j) {
        lanes[j - key] = lane(load_n(data + j * strides.key, 1), 0);
      }
      x = load(lanes);
    });
    return x * F32(core::kLog2e);
  }

  [[gnu::noinline]] F32 dropped(const RowState& row, int key, F32 weight) const {
    const U32 keys = bits(iota() + I32(key));
    const core::Philox4<U32> random =
        core::dropout_bits(dropout_, U32(static_cast<std::uint32_t>(map_.batch)),
                           U32(static_cast<std::uint32_t>(row.head)),
                           U32(static_cast<std::uint32_t>(row.query)), core::dropout_octet(keys));
    return select(keeps_lanes(dropout_, random, keys), weight * F32(dropout_.keep_scale), F32{});
  }

  // ---- values ----

  /// o[r] += sum over a block of keys of weight * V row, for rows [first, first + NR).
  template <int NR, class Stored, class T>
  [[gnu::noinline]] void multiply_values(const KeyBlock<T>& v, core::Range keys, int first,
                                         Requests& all_requests) const {
    constexpr int kColumns = columns_of_tile(NR), kStep = kStepColumns<T, Operand>;
    constexpr std::int64_t strip = kColumns * kLanes;
    Requests::Here requests(all_requests);
    std::int64_t i = 0;
    for (; i + strip <= v.n; i += strip) {
      add_values<NR, kColumns, Stored>(v, keys, first, i, requests,
                                       [](const T* p) { return load_operand(Operand{}, p); });
    }
    for (; i < v.n; i += kStep) {
      const std::int64_t n = core::min<std::int64_t>(v.n - i, kStep);
      add_values<NR, kStep / kLanes, Stored>(
          v, keys, first, i, requests, [=](const T* p) { return load_operand_n(Operand{}, p, n); });
    }
  }

  /// The same for head dims [i, i + NC * kLanes), which stay in registers over the whole block.
  template <int NR, int NC, class Stored, class T, class Load>
  TESSERA_INLINE void add_values(const KeyBlock<T>& v, core::Range keys, int first, std::int64_t i,
                                 Requests::Here& requests, const Load& load_value) const {
    constexpr int kKeys = kPairs ? 2 : 1;  // of a multiply-add
    const Weight* weight = weights(first) + (keys.begin - chunk_.begin);
    const std::int64_t stride = output_stride_;
    float* o = output(first) + i;
    F32 sums[NR][NC];
#pragma GCC unroll 4
    for (int r = 0; r < NR; ++r) {
#pragma GCC unroll 8
      for (int c = 0; c < NC; ++c) sums[r][c] = load(o + r * stride + c * kLanes);
    }
    const T* const* row = v.row;
    const auto add_key = [&](int left) {
      Operand value[NC];
      const bool has_next = kPairs && left > 1;
      load_values<Operand>(row[0] + i, has_next ? row[1] + i : nullptr, load_value, value);
#pragma GCC unroll 4
      for (int r = 0; r < NR; ++r) {
        const Operand factor = broadcast_weight(weight + r * weight_stride());
#pragma GCC unroll 8
        for (int c = 0; c < NC; ++c) sums[r][c] = multiply_add(value[c], factor, sums[r][c]);
      }
      weight += kKeys;
      row += kKeys;
    };
    constexpr int kLines = lines_of<Stored, Operand>(NC);
    constexpr int kSteps = steps_of_line<Stored, Operand>(NC);
    int left = keys.size();
#pragma GCC unroll 1
    for (; left > (kSteps - 1) * kKeys; left -= kSteps * kKeys) {
      requests.advance<kLines>();
#pragma GCC unroll 8
      for (int step = 0; step < kSteps; ++step) add_key(left);
    }
    if constexpr (kSteps > 1) {
#pragma GCC unroll 1
      for (; left > 0; left -= kKeys) add_key(left);
    }
#pragma GCC unroll 4
    for (int r = 0; r < NR; ++r) {
#pragma GCC unroll 8
      for (int c = 0; c < NC; ++c) store(o + r * stride + c * kLanes, sums[r][c]);
    }
  }

  /// Elements of type Weight between rows of weights.
  static constexpr int weight_stride() { return K.block_n * 4 / static_cast<int>(sizeof(Weight)); }

  TESSERA_INLINE static Operand broadcast_weight(const Weight* weight) {
    if constexpr (kPairs) {
      std::uint32_t pair = 0;
      __builtin_memcpy(&pair, weight, sizeof pair);
      return Operand(pair);
    } else {
      return Operand(*weight);
    }
  }

  // ---- results ----

  template <class T>
  void write() const {
    const bool whole = plan_.work.splits <= 1;
    const std::int64_t part = split_ * map_.split_rows();
    for (int r = 0; r < num_rows(); ++r) {
      const RowState& row = rows_[r];
      const bool with_sink = whole && problem_.sink;
      const core::FinishedRow<float> end =
          core::finish(row.softmax, with_sink, with_sink ? tensors_.sink[row.head] : 0.0F);
      const float* o = output(r);
      const float factor = end.factor * factor_of(v_scales_, r);
      if (!whole) {
        const std::int64_t at = part + map_.split_row(row.query, row.head);
        splits_.lse[at] = core::lse_of(end.state);
        write_row(o, factor, splits_.o + at * problem_.head_dim_v);
        continue;
      }
      if (tensors_.softmax_lse != nullptr) {
        tensors_.softmax_lse[map_.lse_index(row.query, row.head)] = core::lse_of(end.state);
      }
      write_row(o, factor,
                static_cast<T*>(tensors_.o.data) + map_.offset(tensors_.o, row.query, row.head));
    }
  }

  template <class T>
  TESSERA_INLINE void write_row(const float* o, float factor, T* out) const {
    const std::int64_t n = problem_.head_dim_v;
    for (std::int64_t i = 0; i < n; i += kLanes) {
      store_n(out + i, load(o + i) * F32(factor), lanes_of(n - i));
    }
  }

  const PlanData& plan_;
  const Problem& problem_;
  const Tensors& tensors_;
  const SplitLayout& splits_;
  const int split_;
  const int num_heads_;  ///< key/value heads of the item
  const RowMap map_;     ///< of the first of them
  const KeyPlaces places_;
  const core::Scales k_scales_, v_scales_;
  float unit_ = 1.0F;  ///< of the elements that are multiplied
  core::Score score_;  ///< for products; fp32 queries are already scaled
  const core::Dropout dropout_;
  DecodeScratch scratch_;
  const std::int64_t query_stride_, output_stride_;  ///< elements between rows of it

  core::KeyRuns keys_;  ///< of the item
  core::Range chunk_;   ///< of those, at work
  int head_rows_ = 0;   ///< query rows of each head
  RowState rows_[decode_rows(K)];
};

/// The whole pass.
template <core::Kernel K>
void decode(const Call& call) {
  const int workers = core::min(call.executor.num_threads, call.plan.device.threads);
  const core::DecodeOrder order = decode_order(call.plan, call.tensors, workers);
  for_each_task(call, order.count(), [&](std::int64_t index, int worker) {
    const core::DecodeOrder::Piece piece = order.at(index);
    DecodeItem<K>(call, piece.batch, piece.head, piece.heads, piece.split, worker).run();
  });
  if (order.splits > 1) combine_splits(call);
}

}  // namespace tessera::cpu::TESSERA_ISA
