// The tiles of a head, and the elements of a tile.
#include "answers.h"
#include "core/philox.h"
#include "core/score.h"
#include "inputs.h"
#include "pieces.h"
#include "plan/layout.h"

namespace tessera::explorer {
namespace {

/// Which sequence and query head an answer is about.
struct Place {
  int batch = 0, head = 0;
};

Result<Place> place_of(const Request& request, const Problem& p) {
  if (p.batch == 0) return Status::invalid("batch = 0: there is no sequence to look at");
  const Result<std::int64_t> batch = request.number("batch", 0, 0, p.batch - 1);
  if (!batch) return batch.status();
  const Result<std::int64_t> head = request.number("head", 0, 0, p.num_heads - 1);
  if (!head) return head.status();
  return Place{static_cast<int>(*batch), static_cast<int>(*head)};
}

void write_sequence(const core::Sequence& sequence, Json& json) {
  json.field("batch", sequence.batch);
  json.field("seqlen_q", sequence.seqlen_q).field("seqlen_k", sequence.seqlen_k);
  json.field("first_q", sequence.first_q).field("first_k", sequence.first_k);
  json.field("entry_k", sequence.entry_k);
}

/// Where the keys of a sequence lie in pages: the number of each page, from the first one's.
void write_pages(const core::Pages& pages, const core::Sequence& sequence, Json& json) {
  if (pages.table == nullptr || sequence.seqlen_k <= 0) return;
  const int first = sequence.first_k / pages.size;
  const int end = core::ceil_div(sequence.first_k + sequence.seqlen_k, pages.size);
  json.field("page_size", pages.size).field("first_page", first).key("pages").begin_array();
  for (int column = first; column < end && column - first < kMostParts; ++column) {
    json.value(pages.at(sequence.entry_k, column));
  }
  json.end_array();
}

/// Writes tiles piece by piece: the kernel's, and between them what it skips. Those of one run of
/// rows (backward: of a block of keys) have all keys (rows), each once, all splits together.
class TileWriter {
 public:
  TileWriter(const Pieces& pieces, Json& json)
      : pieces_(pieces),
        json_(json),
        skipped_step_(pieces.forward() ? pieces.plan().kernel.block_n
                                       : pieces.plan().kernel.block_m) {}

  /// False: there is no room for all of them, so none is written.
  bool write(const Piece& piece) {
    list_.clear();
    if (pieces_.forward()) {
      list_forward(piece);
    } else {
      list_backward(piece);
    }
    const std::int64_t parts = core::max<std::int64_t>(1, static_cast<std::int64_t>(list_.size()));
    if (parts > kMostParts - written_) {
      if (written_ > 0) return false;
      list_.resize(kMostParts);
      cut_ = true;
    }
    written_ += parts;
    json_.begin_object().field("block", piece.work.block).field("split", piece.work.split);
    json_.key("tiles").begin_array();
    for (const Tile& tile : list_) {
      count(tile);
      json_.begin_array().value(tile.rows.begin).value(tile.rows.end);
      json_.value(tile.keys.begin).value(tile.keys.end).value(static_cast<int>(tile.cover));
      json_.end_array();
    }
    json_.end_array().end_object();
    return true;
  }

  void write_counts() {
    json_.key("counts").begin_object();
    json_.field("skipped", counts_[0]).field("masked", counts_[1]).field("full", counts_[2]);
    json_.end_object();
  }

  /// A piece has more tiles than an answer.
  bool cut() const { return cut_; }

 private:
  void count(const Tile& tile) {
    const std::int64_t size = pieces_.forward() ? tile.keys.size() : tile.rows.size();
    counts_[static_cast<int>(tile.cover)] +=
        tile.cover == core::Cover::none ? core::ceil_div(size, skipped_step_) : 1;
  }

  /// False: the list is longer than an answer.
  bool add(const Tile& tile) {
    list_.push_back(tile);
    return static_cast<std::int64_t>(list_.size()) <= kMostParts;
  }

  void list_forward(const Piece& piece) {
    const std::int64_t tile_m = pieces_.plan().kernel.tile_m;
    const core::Range own = pieces_.range_of(piece);
    RowRange rows = {piece.rows.begin, core::min(piece.rows.begin + tile_m, piece.rows.end)};
    int done = own.begin;
    // What is left of these rows; then come the next.
    const auto close = [&] {
      if (done < own.end) add({rows, {done, own.end}, core::Cover::none});
      rows = {rows.end, core::min(rows.end + tile_m, piece.rows.end)};
      done = own.begin;
    };
    pieces_.visit(piece, [&](const Tile& tile) {
      while (tile.rows.begin != rows.begin) close();  // rows that see nothing have no tile
      if (tile.keys.begin > done) add({rows, {done, tile.keys.begin}, core::Cover::none});
      done = tile.keys.end;
      return add(tile);
    });
    while (rows.size() > 0 && static_cast<std::int64_t>(list_.size()) <= kMostParts) close();
  }

  void list_backward(const Piece& piece) {
    std::int64_t done = 0;
    const auto skip_to = [&](std::int64_t row) {
      if (done < row) add({{done, row}, piece.keys.keys, core::Cover::none});
    };
    Piece part = piece;
    for (part.work.split = 0; part.work.split < pieces_.plan().work.splits; ++part.work.split) {
      pieces_.visit(part, [&](const Tile& tile) {
        skip_to(tile.rows.begin);
        done = tile.rows.end;
        return add(tile);
      });
    }
    skip_to(pieces_.rows(piece.head));
  }

  const Pieces& pieces_;
  Json& json_;
  const std::int64_t skipped_step_;
  std::vector<Tile> list_;
  std::int64_t written_ = 0;
  std::int64_t counts_[3] = {};
  bool cut_ = false;
};

/// A few queries and keys of a sequence.
struct ElementWindow {
  core::Range queries, keys;
};

Result<ElementWindow> window_of_elements(const Request& request, const core::Sequence& sequence) {
  const auto range_of = [&request](const char* first_name, const char* count_name,
                                   int length) -> Result<core::Range> {
    constexpr std::int64_t kUsual = 16;
    const Result<std::int64_t> first = request.number(first_name, 0, 0, core::max(length - 1, 0));
    if (!first) return first.status();
    const std::int64_t left = core::max<std::int64_t>(length - *first, 0);
    const Result<std::int64_t> count = request.number(count_name, core::min(kUsual, left), 0, left);
    if (!count) return count.status();
    return core::Range{static_cast<int>(*first), static_cast<int>(*first + *count)};
  };
  const Result<core::Range> queries = range_of("query", "queries", sequence.seqlen_q);
  if (!queries) return queries.status();
  const Result<core::Range> keys = range_of("key", "keys", sequence.seqlen_k);
  if (!keys) return keys.status();
  if (std::int64_t{queries->size()} * keys->size() > kMostParts) {
    return Status::invalid("queries = " + std::to_string(queries->size()) +
                           ", keys = " + std::to_string(keys->size()) + ": at most " +
                           std::to_string(kMostParts) + " elements are shown");
  }
  return ElementWindow{*queries, *keys};
}

/// A line a query, one character a key.
template <class Is>
void write_bits(std::string_view name, const ElementWindow& window, const Is& is, Json& json) {
  json.key(name).begin_array();
  for (int query = window.queries.begin; query < window.queries.end; ++query) {
    std::string line;
    for (int key = window.keys.begin; key < window.keys.end; ++key) {
      line += is(query, key) ? '1' : '0';
    }
    json.value(line);
  }
  json.end_array();
}

/// ALiBi's slope of a head: the request's, or the geometric series of the paper.
Result<float> slope_of(const Request& request, const Problem& p, int head) {
  const Result<std::vector<float>> slopes = request.floats("alibi");
  if (!slopes) return slopes.status();
  if (!request.has("alibi")) {
    return core::exp2(-8.0F * static_cast<float>(head + 1) / static_cast<float>(p.num_heads));
  }
  if (static_cast<std::int64_t>(slopes->size()) != p.num_heads) {
    return Status::invalid("alibi: has " + std::to_string(slopes->size()) +
                           " numbers; must have num_heads = " + std::to_string(p.num_heads));
  }
  return (*slopes)[static_cast<std::size_t>(head)];
}

/// What ALiBi adds to the base-2 scores.
void write_alibi(const ElementWindow& window, const core::Sequence& sequence, float slope,
                 Json& json) {
  json.field("alibi_slope", slope).key("alibi").begin_array();
  for (int query = window.queries.begin; query < window.queries.end; ++query) {
    json.begin_array();
    for (int key = window.keys.begin; key < window.keys.end; ++key) {
      const int distance = query + sequence.seqlen_k - sequence.seqlen_q - key;
      json.value(core::alibi2(slope, static_cast<float>(distance < 0 ? -distance : distance)));
    }
    json.end_array();
  }
  json.end_array();
}

}  // namespace

Status answer_tiles(const Request& request, Json& json) {
  if (Status s = request.only({"batch", "head", "first"}, Inputs::kFields); !s) return s;
  const Result<Problem> problem = request.problem();
  if (!problem) return problem.status();
  const Result<Device> device = request.device();
  if (!device) return device.status();
  const Result<Plan> planned = plan_of_sequences(*problem, *device);
  if (!planned) return planned.status();
  const Result<Place> place = place_of(request, *problem);
  if (!place) return place.status();
  const Result<Inputs> inputs = Inputs::make(*problem, request);
  if (!inputs) return inputs.status();

  const PlanData& data = planned->data();
  const Pieces pieces(data, inputs->tensors());
  const int head = place->head / data.row_heads;
  const Head of = pieces.head(place->batch);
  // The pieces of the head by number, in rising order of rows or keys. Those of a backward that
  // share keys are one here.
  const int splits = pieces.forward() ? data.work.splits : 1;
  const std::int64_t count = std::int64_t{data.work.blocks} * splits;
  const Result<std::int64_t> first =
      request.number("first", 0, 0, core::max<std::int64_t>(count - 1, 0));
  if (!first) return first.status();

  json.field("kernel", planned->kernel()).field("head", place->head);
  write_sequence(of.sequence, json);
  write_pages(cache_of(*problem, inputs->tensors()).pages, of.sequence, json);
  json.field("rows", pieces.rows(of)).field("row_heads", pieces.members());
  json.field("item_rows", data.work.block_m).field("tile_rows", data.kernel.tile_m);
  json.field("block_m", data.kernel.block_m).field("block_n", data.kernel.block_n);
  json.field("pieces", count).field("first", *first);
  json.key("list").begin_array();
  TileWriter writer(pieces, json);
  std::int64_t number = *first;
  for (; number < count; ++number) {
    const core::Work work = {place->batch, head, static_cast<int>(number / splits),
                             static_cast<int>(number % splits)};
    const Piece piece = pieces.piece(work);
    const bool surplus = pieces.forward() ? piece.rows.size() == 0 : piece.keys.empty();
    if (!surplus && !writer.write(piece)) break;
  }
  json.end_array();
  writer.write_counts();
  json.field("cut", writer.cut() || number < count);
  if (number < count) json.field("next", number);
  return {};
}

Status answer_elements(const Request& request, Json& json) {
  if (Status s = request.only(
          {"batch", "head", "query", "key", "queries", "keys", "alibi", "seed", "offset"},
          Inputs::kFields);
      !s) {
    return s;
  }
  const Result<Problem> problem = request.problem();
  if (!problem) return problem.status();
  const Result<Inputs> inputs = Inputs::make(*problem, request);
  if (!inputs) return inputs.status();
  const Result<Place> place = place_of(request, *problem);
  if (!place) return place.status();
  const Tensors& tensors = inputs->tensors();
  const core::Sequence sequence = sequence_of(*problem, tensors, place->batch);
  const core::SequenceMask mask =
      mask_rules_of(*problem, tensors).of(sequences_of(*problem, tensors), sequence);
  const Result<ElementWindow> window = window_of_elements(request, sequence);
  if (!window) return window.status();

  json.field("head", place->head);
  write_sequence(sequence, json);
  json.field("query", window->queries.begin).field("key", window->keys.begin);
  write_bits(
      "visible", *window, [&](int query, int key) { return mask.visible(query, key); }, json);
  if (problem->alibi != PerHead::none) {
    const Result<float> slope = slope_of(request, *problem, place->head);
    if (!slope) return slope.status();
    write_alibi(*window, sequence, *slope, json);
  }
  if (problem->dropout_p > 0.0F) {
    const Result<std::int64_t> seed = request.number("seed", 0, 0, INT64_MAX);
    if (!seed) return seed.status();
    const Result<std::int64_t> offset = request.number("offset", 0, 0, INT64_MAX);
    if (!offset) return offset.status();
    const core::Dropout dropout = core::make_dropout(
        problem->dropout_p, static_cast<std::uint64_t>(*seed), static_cast<std::uint64_t>(*offset));
    write_bits(
        "kept", *window,
        [&](int query, int key) {
          return core::dropout_keeps(dropout, place->batch, place->head, query, key);
        },
        json);
  }
  // The row of k that each key is: of a page, or of its sequence.
  const core::Pages pages = cache_of(*problem, tensors).pages;
  const core::Strides rows = {pages.table != nullptr ? pages.size : problem->seqlen_k, 1, 0};
  json.key("rows_of_k").begin_array();
  for (int key = window->keys.begin; key < window->keys.end; ++key) {
    json.value(core::slot_offset(pages, sequence, rows, key, 0));
  }
  json.end_array();
  return {};
}

}  // namespace tessera::explorer
