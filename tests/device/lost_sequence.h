// A sequence of a packed batch becomes NaN: nobody else's results may change, though tiles of
// others reach into it, and weights that are 0 meet its rows in sums.
#pragma once

#include <cmath>
#include <cstdint>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "check/inputs.h"

namespace tessera::device {

class LostSequence {
 public:
  /// After a run, whose results are kept. A sequence is lost if there are others, and numbers have
  /// 16 bits.
  LostSequence(tools::RunMemory& memory, std::mt19937& random)
      : memory_(memory), p_(memory.problem()) {
    const Tensors& t = memory.tensors();
    if (!p_.packed || p_.cache || p_.batch < 2 || size_of(p_.dtype) != 2) return;
    for (const char* const name : {"o", "dq", "dk", "dv"}) {
      if (memory.has_output(name)) before_[name] = memory.output(name);
    }
    sequence_ = static_cast<std::size_t>(random() % static_cast<unsigned>(p_.batch));
    const bool backward = p_.pass == Pass::backward;
    is_lost_ = lose(t.q, t.cu_seqlens_q, p_.num_heads, p_.head_dim) &&
               lose(t.k, t.cu_seqlens_k, p_.num_heads_k, p_.head_dim) &&
               lose(t.v, t.cu_seqlens_k, p_.num_heads_k, p_.head_dim_v) &&
               (!backward || (lose(t.dout, t.cu_seqlens_q, p_.num_heads, p_.head_dim_v) &&
                              lose(t.o, t.cu_seqlens_q, p_.num_heads, p_.head_dim_v)));
  }

  explicit operator bool() const { return is_lost_; }

  /// Which of the others' results are not the same: all but dQ bit by bit, which may have been
  /// summed in another order. Empty if none.
  std::string changed() const {
    for (const auto& [name, before] : before_) {
      const bool keys = name == "dk" || name == "dv";
      const std::int32_t* const cu =
          keys ? memory_.tensors().cu_seqlens_k : memory_.tensors().cu_seqlens_q;
      const std::int64_t row = (keys ? p_.num_heads_k : p_.num_heads) *
                               (name == "o" || name == "dv" ? p_.head_dim_v : p_.head_dim);
      const std::vector<double> now = memory_.output(name);
      for (std::size_t i = 0; i < now.size(); ++i) {
        const auto at = static_cast<std::int64_t>(i) / row;
        if (cu[sequence_] <= at && at < cu[sequence_ + 1]) continue;
        const double tolerance = name == "dq" ? 0.02 * (1.0 + std::abs(before[i])) : 0.0;
        if (!(std::abs(now[i] - before[i]) <= tolerance)) {
          const std::int64_t column = static_cast<std::int64_t>(i) - at * row;
          return name + " of row " + std::to_string(at) + ", element " + std::to_string(column) +
                 ": " + std::to_string(before[i]) + " became " + std::to_string(now[i]);
        }
      }
    }
    return "";
  }

 private:
  /// False: the rows of the sequence are not its own alone.
  template <class AnyTensor>
  bool lose(const AnyTensor& x, const std::int32_t* cu, std::int64_t heads, std::int64_t dim) {
    if (x.stride_seqlen == 0) return false;
    auto* const data =
        static_cast<std::uint16_t*>(const_cast<void*>(static_cast<const void*>(x.data)));
    for (std::int64_t row = cu[sequence_]; row < cu[sequence_ + 1]; ++row) {
      for (std::int64_t head = 0; head < heads; ++head) {
        std::uint16_t* const to = data + row * x.stride_seqlen + head * x.stride_head;
        for (std::int64_t i = 0; i < dim; ++i) to[i] = 0x7FFF;  // NaN of both types
      }
    }
    return true;
  }

  tools::RunMemory& memory_;
  const Problem& p_;
  std::size_t sequence_ = 0;
  bool is_lost_ = false;
  std::map<std::string, std::vector<double>> before_;
};

}  // namespace tessera::device
