// The pieces of a plan's work and the tiles that each consists of, as the chosen kernel walks over
// them. Everything is asked of core and plan; what is said here is which of their functions which
// form of kernel calls.
#pragma once

#include <cstdint>
#include <functional>

#include "plan/plan.h"

namespace tessera::explorer {

/// A run along the row axis of a key/value head (core::Rows).
struct RowRange {
  std::int64_t begin = 0, end = 0;

  std::int64_t size() const { return core::max<std::int64_t>(end - begin, 0); }
};

/// Rows that meet a run of keys together.
struct Tile {
  RowRange rows;
  core::Range keys;
  core::Cover cover = core::Cover::none;
};

/// One head of the plan's work (PlanData::row_heads query heads) of a sequence.
struct Head {
  core::Sequence sequence;
  core::SequenceMask mask;
  core::Rows rows;
};

/// What one worker takes at a time.
struct Piece {
  core::Work work;     ///< block: of rows; backward: of keys
  int heads = 1;       ///< of the plan's work, side by side
  Head head;           ///< the first of them
  RowRange rows;       ///< its own; backward: those that see its keys
  core::KeyRuns keys;  ///< forward: those that its rows see; backward: its own
};

/// The plan whose pieces are shown: of sequences, although a GPU may find what they share.
Result<Plan> plan_of_sequences(Problem problem, const Device& device);

/// From the first to the last, and what lies between.
core::Range hull_of(const core::KeyRuns& keys);

class Pieces {
 public:
  Pieces(const PlanData& plan, const Tensors& tensors) : plan_(plan), tensors_(tensors) {}

  /// Of a sequence; all its heads are alike.
  Head head(int batch) const;
  /// Query heads whose rows are one axis: row r is query r / members of member r % members. A GPU's
  /// backward takes those of a group in turn, each with tiles of its own.
  int members() const { return !forward() && on_gpu() ? 1 : plan_.row_heads; }
  std::int64_t rows(const Head& head) const {
    return std::int64_t{head.sequence.seqlen_q} * members();
  }
  /// Neither rows nor keys: the sequence is shorter than the longest.
  Piece piece(const core::Work& work) const;
  /// Forward: the keys that it takes or skips, not another split of the same rows.
  core::Range range_of(const Piece& piece) const;
  /// Units [begin, end) of a GPU's decoding item, which is a piece.
  Piece part(const Piece& item, core::Range units) const;
  /// Units of every item of a sequence in a GPU's decoding.
  int units(int batch) const;

  /// False: no more are wanted.
  using Visit = std::function<bool(const Tile&)>;
  /// Every tile that the kernel does not skip: forward, rows by rows, keys in rising order;
  /// backward, of a block of keys, rows in rising order. Those of one head where several lie side
  /// by side, and of one query head where a GPU's backward takes those of a group in turn.
  void visit(const Piece& piece, const Visit& visit) const;

  /// By the planner's model, in cycles.
  double cycles(const Piece& piece) const;
  /// Of a unit of a GPU's decoding.
  double cycles_of_unit() const;

  const PlanData& plan() const { return plan_; }
  const Tensors& tensors() const { return tensors_; }
  bool on_gpu() const { return is_gpu(plan_.kernel.arch); }
  bool forward() const { return plan_.kernel.pass == Pass::forward; }
  bool decodes() const { return plan_.kernel.form == core::Form::decode; }

 private:
  core::KeyTiles key_tiles(const Piece& piece) const;
  void visit_key_tiles(const Piece& piece, const Visit& visit) const;
  void visit_key_blocks(const Piece& piece, const Visit& visit) const;
  void visit_blocks(const Piece& piece, const Visit& visit) const;
  void visit_rows(const Piece& piece, const Visit& visit) const;
  void visit_query_blocks(const Piece& piece, const Visit& visit) const;
  double keys_of_row(const Piece& piece) const;

  const PlanData& plan_;
  const Tensors& tensors_;
};

}  // namespace tessera::explorer
