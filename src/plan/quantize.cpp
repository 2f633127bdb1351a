// validate, of quantising: do its sizes make sense, and do the tensors fit them? Every refusal
// names the argument, its value and what would be accepted.
#include "plan/quantize.h"

#include <string>

#include "plan/checks.h"
#include "plan/text.h"

namespace tessera {
namespace {

Status check_hadamard(int hadamard, std::int64_t head_dim) {
  if (hadamard == 0) return {};
  const bool power = hadamard > 0 && (hadamard & (hadamard - 1)) == 0;
  if (power && hadamard <= core::kMostHadamard && head_dim % hadamard == 0) return {};
  return Status::invalid(refused("hadamard", hadamard,
                                 "must be 0, or a power of two up to " +
                                     std::to_string(core::kMostHadamard) +
                                     " that divides head_dim = " + std::to_string(head_dim)));
}

Status check_shape(const QuantizeShape& s) {
  const Problem& p = s.problem;
  if (Status status = validate(p); !status) return status;
  if (!is_scaled(p.dtype)) {
    return Status::invalid(std::string("problem.dtype = ") + to_string(p.dtype) +
                           ": must be e4m3 or i8, what is made has 8 bits");
  }
  if (p.cache) return Status::invalid("problem.cache: what is quantised lies in no cache");
  if (p.scales.k == Scaling::token || p.scales.v == Scaling::token) {
    return Status::invalid(
        "scales: quantize writes those of k and v by block; one for every key is block:1");
  }
  Status status = check_range("dtype", static_cast<int>(s.dtype), 0, kPlainDtypes - 1);
  if (status) status = check_hadamard(s.hadamard, p.head_dim);
  if (status && s.rotary) status = check_rotary(*s.rotary, s.dtype, p.head_dim);
  return status;
}

/// Whether a tensor is there; its input and its output come together.
Status check_pair(const std::string& name, const void* from, const void* to) {
  if ((from == nullptr) == (to == nullptr)) return {};
  const std::string out = name + "_out";
  const bool lacks_from = from == nullptr;
  return missing((lacks_from ? name : out).c_str(),
                 ((lacks_from ? out : name) + " is given; both are, or neither").c_str());
}

/// Scales and shifts that are written: a head's do not overlap another's.
Status check_written(const char* name, const Scales& numbers, Scaling scaling, const Problem& p) {
  if (Status status = check_numbers(name, numbers, scaling, p, true); !status) return status;
  const bool token = scaling == Scaling::token;
  const std::int64_t rows = p.packed ? p.total_q : p.seqlen_q;
  const std::int64_t block = name[0] == 'k' ? p.scales.block_k : p.scales.block_v;
  const Axis axes[] = {{".stride_batch", numbers.stride_batch, p.packed ? 1 : p.batch},
                       {".stride_head", numbers.stride_head, token ? p.num_heads : p.num_heads_k}};
  return check_apart(name, axes, token ? rows : p.scale_blocks(block));
}

Status check_scales(const char* name, const Scales& numbers, Scaling scaling, const Problem& p) {
  return is_written(scaling) ? check_written(name, numbers, scaling, p)
                             : check_numbers(name, numbers, scaling, p, true);
}

Status check_tiles(const QuantizeTensors& t, const Problem& p) {
  const auto of_16 = [](const char* name, std::int64_t value) {
    return Status::invalid(refused(name, value, "tiles begin at multiples of 16 bytes"));
  };
  const Tensor& v = t.v_out;
  if (const auto rest = reinterpret_cast<std::uintptr_t>(v.data) % 16; rest != 0) {
    return Status::invalid("v_out: tiles begin at multiples of 16 bytes, not " +
                           std::to_string(rest) + " bytes behind one");
  }
  const bool several = p.batch > 1 && !p.packed;
  if (several && v.stride_batch % 16 != 0) return of_16("v_out.stride_batch", v.stride_batch);
  if (p.num_heads_k > 1 && v.stride_head % 16 != 0) {
    return of_16("v_out.stride_head", v.stride_head);
  }
  const Axis axes[] = {{".stride_batch", v.stride_batch, p.packed ? 1 : p.batch},
                       {".stride_head", v.stride_head, p.num_heads_k}};
  if (Status status = check_strides("v_out", axes); !status) return status;
  return check_apart("v_out", axes, p.value_tile_bytes());
}

Status check_values(const QuantizeTensors& t, const Problem& p, const Shape& v) {
  if (!is_scaled(p.stored_v())) {
    if (t.v.data == nullptr && t.v_out.data == nullptr) return {};
    return Status::invalid(std::string("v is given, but the problem's v is ") +
                           to_string(p.stored_v()) + " and stays as it is; leave it out");
  }
  if (Status status = check_pair("v", t.v.data, t.v_out.data); !status) return status;
  if (t.v.data == nullptr) return {};
  Status status = check_tensor("v", t.v, v, p.packed);
  if (status) status = p.v_tiles ? check_tiles(t, p) : check_output("v_out", t.v_out, v, p.packed);
  if (status) status = check_scales("v_scale", t.v_scale, p.scales.v, p);
  if (!status) return status;
  const Scaling shift = p.scales.v_shift ? Scaling::channel : Scaling::none;
  return check_numbers("v_shift", t.v_shift, shift, p, true);
}

Status check_tensors(const QuantizeShape& s, const QuantizeTensors& t) {
  const Problem& p = s.problem;
  const Shape q{p.batch, p.packed ? p.total_q : p.seqlen_q, p.num_heads, p.head_dim};
  const Shape k{p.batch, p.packed ? p.total_k : p.seqlen_k, p.num_heads_k, p.head_dim};
  const Shape v{k.batch, k.seqlen, k.heads, p.head_dim_v};
  if (p.rows_q() > 0) {
    Status status = check_pair("q", t.q.data, t.q_out.data);
    if (status && t.q.data != nullptr) {
      status = check_tensor("q", t.q, q, p.packed);
      if (status) status = check_output("q_out", t.q_out, q, p.packed);
      if (status) status = check_scales("q_scale", t.q_scale, p.scales.q, p);
      if (status) {
        status = p.scales.score_shift
                     ? check_written("score_shift", t.score_shift, Scaling::token, p)
                     : check_numbers("score_shift", t.score_shift, Scaling::none, p, true);
      }
    }
    if (!status) return status;
  }
  if (p.rows_k() > 0) {
    Status status = check_pair("k", t.k.data, t.k_out.data);
    if (status && t.k.data != nullptr) {
      status = check_tensor("k", t.k, k, p.packed);
      if (status) status = check_output("k_out", t.k_out, k, p.packed);
      if (status) status = check_scales("k_scale", t.k_scale, p.scales.k, p);
    }
    if (status) status = check_values(t, p, v);
    if (!status) return status;
  }
  if (!has_q(s, t) && !has_k(s, t)) return {};
  const Scaling mean = p.scales.score_shift ? Scaling::channel : Scaling::none;
  return check_numbers("k_mean", t.k_mean, mean, p, true);
}

/// Whether arrays and tables are there exactly where the shape has them.
Status check_arrays(const QuantizeShape& s, const QuantizeTensors& t) {
  const Problem& p = s.problem;
  const bool any = has_q(s, t) || has_k(s, t), rotary = s.rotary.has_value();
  const bool tables = any && rotary && s.rotary->positions > 0;
  const char* const rotates = "QuantizeShape::rotary says that it is there";
  const char* const rotates_not = "QuantizeShape::rotary is none";
  const struct {
    const char* name;
    const void* data;
    bool must, may;  // be there
    const char* why;
    const char* why_not;
  } arrays[] = {
      {"cu_seqlens_q", t.cu_seqlens_q, p.packed, p.packed, kNoOffsets, "the problem is not packed"},
      {"cu_seqlens_k", t.cu_seqlens_k, p.packed, p.packed, kNoOffsets, "the problem is not packed"},
      {"signs", t.signs, any && s.signs, s.signs, "QuantizeShape::signs says that it is there",
       "QuantizeShape::signs is false"},
      {"rotary.cos", t.rotary.cos, tables, rotary, rotates, rotates_not},
      {"rotary.sin", t.rotary.sin, tables, rotary, rotates, rotates_not},
      {"rotary.seqlens", t.rotary.seqlens, false, rotary, rotates, rotates_not},
      {"rotary.positions", t.rotary.positions, false, false, rotates,
       "rows have the positions that follow from their sequence"},
  };
  for (const auto& array : arrays) {
    if (array.must && array.data == nullptr) return missing(array.name, array.why);
    if (array.may || array.data == nullptr) continue;
    return Status::invalid(std::string(array.name) + " is given, but " + array.why_not);
  }
  return rotary ? check_rotary_strides(*s.rotary, t.rotary) : Status{};
}

/// A sequence's positions, where they can be read.
Status check_sequence(const QuantizeShape& s, const QuantizeTensors& t,
                      const core::Sequence& sequence) {
  const core::RowPositions positions = positions_of(s, t);
  const int b = sequence.batch, queries = has_q(s, t) ? sequence.seqlen_q : 0;
  const bool starts = positions.starts != nullptr;
  const std::string name = starts ? element("rotary.seqlens", b) : "rotary.positions";
  const std::int64_t value = starts ? positions.starts[b] : s.rotary->positions;
  const std::int64_t turned = positions.constant_q ? core::min(queries, 1) : queries;
  Status status = check_positions(*s.rotary, name, value, positions.of_query(sequence, 0), turned);
  if (status && has_k(s, t)) {
    status =
        check_positions(*s.rotary, name, value, positions.of_key(sequence, 0), sequence.seqlen_k);
  }
  return status;
}

Status check_memory(const QuantizeShape& s, const QuantizeTensors& t) {
  const Problem& p = s.problem;
  Status status;
  if (p.packed) {
    status = check_cu_seqlens("cu_seqlens_q", t.cu_seqlens_q, p.batch, "total_q", p.total_q,
                              "seqlen_q", p.seqlen_q);
    if (status) {
      status = check_cu_seqlens("cu_seqlens_k", t.cu_seqlens_k, p.batch, "total_k", p.total_k,
                                "seqlen_k", p.seqlen_k);
    }
  }
  if (!s.rotary) return status;
  const core::Sequences sequences = sequences_of(p, results_of(t));
  for (int b = 0; status && b < p.batch; ++b) status = check_sequence(s, t, sequences.at(b));
  return status;
}

}  // namespace

Status validate(const QuantizeShape& shape, const QuantizeTensors& tensors, Memory memory) {
  if (Status s = check_shape(shape); !s) return s;
  if (Status s = check_tensors(shape, tensors); !s) return s;
  if (Status s = check_arrays(shape, tensors); !s) return s;
  if (has_q(shape, tensors) || has_k(shape, tensors) || has_v(shape, tensors)) {
    return memory == Memory::host ? check_memory(shape, tensors) : Status{};
  }
  const bool given =
      tensors.q.data != nullptr || tensors.k.data != nullptr || tensors.v.data != nullptr;
  if (given || shape.problem.rows_q() + shape.problem.rows_k() == 0) return {};
  return Status::invalid("q, k and v = null: at least one of them is quantised");
}

}  // namespace tessera
