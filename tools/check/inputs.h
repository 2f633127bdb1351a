// Random inputs of a problem, and poisoned memory for its outputs, in any layout. What the seed
// decides beyond the numbers is its Variation, so that a problem string and a seed reproduce a
// check in full.
#pragma once

#include <deque>
#include <string>
#include <vector>

#include "check/cache.h"
#include "check/memory.h"
#include "check/random.h"
#include "tessera/tensors.hpp"

namespace tessera::tools {

/// What the numbers are like.
enum class Values : std::uint8_t {
  normal,
  outliers,      ///< one in 32 twelve times as large; one in 8 bias elements -inf
  equal_scores,  ///< all keys of a head alike
  large,         ///< q and the later half of k 16 times, v 20 times as large: softmax is nearly a
                 ///< maximum, which rises late
};

/// What the lowest eight bits of a seed decide.
struct Variation {
  Values values = Values::normal;
  bool dlse = false;     ///< backward: a gradient of softmax_lse is given
  bool strided = false;  ///< dimensions in random order with random padding; inputs may broadcast
  bool all_outputs = true;  ///< softmax_lse (forward), dbias and dsink are asked for

  friend bool operator==(const Variation&, const Variation&) = default;
};

/// Bits 0-1: values; bit 2: dlse; bit 3: strided; bits 4-5: all 0 for not all_outputs.
Variation variation_of(std::uint64_t seed);
/// A seed with this variation; `random` gives the rest.
std::uint64_t seed_with(const Variation& variation, std::uint64_t random);

/// Where heads lie when the variation is not strided.
enum class Heads : std::uint8_t {
  inside,   ///< (batch, seqlen, heads, head_dim)
  outside,  ///< (batch, heads, seqlen, head_dim)
};

/// One tensor in guarded memory.
struct Block {
  std::string name;
  Dtype dtype = Dtype::f32;                 ///< whole numbers: f32, of 64 bits two of them
  std::vector<std::int64_t> shape, stride;  ///< in elements
  GuardedBuffer buffer;
  bool input = false;
  std::vector<std::byte> before;  ///< inputs: the bytes as they were given

  std::byte* at(std::int64_t offset) const { return buffer.data() + offset * size_of(dtype); }
  /// What it holds is an input now.
  void keep() { before.assign(buffer.data(), buffer.data() + buffer.bytes()); }
  /// Calls visit(number in row-major order, offset in elements) for every element.
  template <class Visit>
  void for_each(const Visit& visit) const;
};

/// The memory of one run. Not copyable: Tensors point into it. Slots of a cache that hold no
/// sequence's key are NaN.
class RunMemory {
 public:
  RunMemory(const Problem& problem, std::uint64_t seed, Heads heads = Heads::inside);
  ~RunMemory() = default;
  RunMemory(const RunMemory&) = delete;
  RunMemory& operator=(const RunMemory&) = delete;

  const Tensors& tensors() const { return tensors_; }
  Tensors& tensors() { return tensors_; }
  const Problem& problem() const { return problem_; }
  const std::deque<Block>& blocks() const { return blocks_; }

  /// Backward: writes o (rounded to storage) and softmax_lse, which are its inputs. Row-major
  /// values.
  void give_forward(const std::vector<double>& o, const std::vector<double>& lse);

  bool has_output(const std::string& name) const;
  /// Its elements in row-major order.
  std::vector<double> output(const std::string& name) const;

  /// What a run may not have done: an input changed, a guard zone or the padding between rows of an
  /// output written. Empty if all is well.
  std::string damage() const;

 private:
  using Sizes = std::vector<std::int64_t>;
  enum class Role : std::uint8_t { input, output };

  Block& add(const std::string& name, Role role, Dtype dtype, const Sizes& shape, bool free_layout);
  Block& place(Block block, std::int64_t alignment);
  /// Whole numbers side by side.
  template <class T>
  const T* add_integers(const std::string& name, const std::vector<T>& numbers);
  void add_keys();
  Tensor add_value_tiles();
  void add_cache();
  void gather_rows();
  Tensor add_rows(const std::string& name, Role role, bool queries, std::int64_t dim);
  float* add_numbers(const std::string& name, Role role, const Sizes& shape);
  void add_scales();
  ConstScales add_scale(const std::string& name, Scaling by, std::int64_t block = 0);
  const std::int32_t* add_cu_seqlens(const std::string& name, std::int64_t total,
                                     std::int64_t longest);
  const std::uint64_t* add_tree();
  Bias add_bias(const std::string& name, Role role);
  Sizes lse_shape() const;
  Sizes shape_of_keys(std::int64_t dim) const;
  /// Whether a tensor is part of the cache, so that a slot is poisoned if it is no sequence's.
  bool has_slots(const std::string& name) const;
  void add_backward();
  Sizes strides_for(const Sizes& shape, bool may_broadcast, bool last_is_one);
  void fill(Block& block) const;
  const Block* find(const std::string& name) const;

  Problem problem_;
  Variation variation_;
  Heads heads_;
  std::uint64_t seed_;
  Random random_;             ///< choices; the numbers have streams of their own
  std::deque<Block> blocks_;  ///< addresses stay
  Tensors tensors_;
};

}  // namespace tessera::tools
