// The scales of 8-bit tensors (S14): which elements share one follows from their shapes.
#pragma once

#include <array>
#include <initializer_list>

#include "call.h"

namespace tessera::python {

/// What a call on tensors of 8 bits has beside Inputs. The names are those of
/// `tessera.scaled_attention`, which errors use.
struct ScaleInputs {
  View q_scale, k_scale, v_scale, score_shift, v_shift;
  std::int64_t k_block = 0, v_block = 0;   ///< keys that share a scale; 0: it is not by block
  std::optional<std::int64_t> head_dim_v;  ///< iff v lies in tiles, whose shape does not say it
};

/// The types of q, k, v and o. Throws Raise(ValueError) if they do not go together.
void read_types(const Inputs& inputs, Problem& problem);

/// v lies in tiles of so many columns. Throws Raise(ValueError).
void read_tiles(std::int64_t head_dim_v, Problem& problem);

/// A shape that a tensor of scales may have, and what it means then.
struct Meaning {
  Scaling by;
  const char* names;
  int ndim;
  std::array<std::int64_t, 4> sizes;
  bool any_strides = false;  ///< or the last dimension is contiguous

  bool fits(const View& view) const;
  /// "(batch, num_heads_k) = (2, 4)"
  std::string text() const;
};

Meaning by_tensor();
Meaning by_head(std::int64_t batch, std::int64_t num_heads_k);
inline Meaning by_head(const Problem& p) { return by_head(p.batch, p.num_heads_k); }
Meaning by_token(const Problem& problem);
/// A number for every slot and head of a cache.
Meaning by_slot(const View& cache);
/// One for each of so many equal groups of columns.
Meaning by_group(const View& cache, std::int64_t groups);
Meaning by_block(const Problem& problem, std::int64_t block);
Meaning by_channel(const Problem& problem);

/// The first meaning whose shape fits. q: whose device the scales must be on, `first` its name.
/// why: ends the text of an error.
Scaling meaning_of(const char* name, const View& view, const View& q,
                   std::initializer_list<Meaning> meanings, const std::string& why,
                   const char* first = "q");

/// Throws Raise(ValueError) if so many keys cannot share a scale.
void check_block(const char* name, std::int64_t block);

/// Where they lie.
Scales scales_of(const View& view, Scaling by);

/// Throws Raise(ValueError) if one is missing, or of no shape that the tensor may have.
ScaleShape scale_shape(const ScaleInputs& scales, const Inputs& inputs, const Problem& problem);

/// The type of v of a cache, which is of 8 bits, and how its k and v are scaled; k is of v's type,
/// or has no scales.
struct CachedScales {
  Dtype dtype;
  Scaling k = Scaling::none, v = Scaling::none;
  std::int64_t block_v = 0;  ///< columns, iff `group`
};
/// None: neither k nor v is of 8 bits. of_heads: what scales by head are. Throws as above, also
/// where scales are given and the cache has none.
std::optional<CachedScales> read_cached_scales(const View& k_cache, const View& v_cache,
                                               const View& k_scale, const View& v_scale,
                                               const Meaning& of_heads);
/// Where they lie.
Scales cached_scales_of(const View& view, Scaling by);

void add_scales(const ScaleInputs& scales, const Problem& problem, Tensors& tensors);

}  // namespace tessera::python
