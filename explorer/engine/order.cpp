// The pieces of a plan's work in the order in which they are taken, and who takes them when. Times
// are the planner's costs: they tell pieces apart, and no cache, no memory and no wait is in them.
#include <algorithm>
#include <limits>
#include <queue>

#include "answers.h"
#include "core/spans.h"
#include "inputs.h"
#include "pieces.h"
#include "plan/layout.h"
#include "plan/shape.h"

namespace tessera::explorer {
namespace {

/// A piece, and who computes it from when to when.
struct Step {
  std::int64_t index = 0;  ///< in the order of the work
  Piece piece;
  bool prepares = false;  ///< a CPU's backward: rows, which the model takes for free
  std::int64_t worker = 0;
  double start = 0.0, end = 0.0;
};

/// How pieces come to workers.
enum class Dealing : std::uint8_t {
  rounds,   ///< each worker knows its own: core::WorkOrder::index_of
  counter,  ///< whoever is free takes the next
  spans,    ///< equal spans of the line of all items: core::Spans
};

const char* name_of(Dealing dealing) {
  switch (dealing) {
    case Dealing::rounds: return "rounds";
    case Dealing::counter: return "counter";
    case Dealing::spans: return "spans";
  }
  return "?";
}

class Schedule {
 public:
  explicit Schedule(const Pieces& pieces)
      : pieces_(pieces),
        plan_(pieces.plan()),
        workers_(core::max(1, plan_.device.threads / plan_.kernel.cluster)),
        ready_(static_cast<std::size_t>(workers_), 0.0) {
    if (!pieces.on_gpu()) {
      dealing_ = Dealing::counter;
      pieces.forward() ? deal_cpu_forward() : deal_cpu_backward();
    } else if (pieces.decodes()) {
      dealing_ = Dealing::spans;
      deal_spans();
    } else {
      dealing_ = pieces.forward() ? Dealing::rounds : Dealing::counter;
      pieces.forward() ? deal_rounds() : deal_gpu_backward();
    }
  }

  void write(Json& json) const {
    const bool on_gpu = pieces_.on_gpu();
    json.field("kernel", plan_.kernel_name).field("dealing", name_of(dealing_));
    const char* const worker = !on_gpu                     ? "core"
                               : plan_.kernel.cluster == 1 ? "multiprocessor"
                                                           : "multiprocessor pair";
    json.field("unit", "cycles").field("worker", worker);
    json.field("workers", ready_.size()).field("resident", resident_);
    json.field("pieces", count_);
    json.field("cut", cut_);
    write_times(json);
    json.key("columns").begin_array();
    for (const char* name :
         {"index", "batch", "head", "heads", "block", "split", "first_row", "end_row", "first_key",
          "end_key", "keys", "worker", "start", "end", "prepares"}) {
      json.value(name);
    }
    json.end_array().key("list").begin_array();
    for (const Step& step : steps_) write_step(step, json);
    json.end_array();
  }

 private:
  /// False: the answer is full.
  bool add(Step step, std::int64_t worker, double start, double cycles) {
    cut_ = static_cast<std::int64_t>(steps_.size()) == kMostParts;
    if (cut_) return false;
    step.worker = worker;
    step.start = start;
    step.end = start + cycles;
    double& ready = ready_[static_cast<std::size_t>(worker)];
    ready = core::max(ready, step.end);
    steps_.push_back(step);
    return true;
  }

  /// A GPU's forward: as many blocks of threads as multiprocessors have at once, which share each
  /// of them.
  void deal_rounds() {
    count_ = plan_.work.count();
    resident_ = resident();
    const int blocks = static_cast<int>(
        std::min<std::int64_t>(count_, resident_blocks(plan_.kernel, plan_.device)));
    std::vector<double> done(static_cast<std::size_t>(blocks), 0.0);
    for (int i = 0; std::int64_t{i} * blocks < count_; ++i) {
      for (int block = 0; block < blocks; ++block) {
        const std::int64_t index = core::WorkOrder::index_of(i, block, blocks);
        if (index >= count_) continue;
        const Piece piece = pieces_.piece(plan_.work.at(index));
        const double cycles = cycles_of(piece) * resident_;
        double& start = done[static_cast<std::size_t>(block)];
        if (!add({index, piece}, block % workers_, start, cycles)) return;
        start += cycles;
      }
    }
  }
  int resident() const {
    return static_cast<int>(resident_blocks(plan_.kernel, plan_.device) / workers_);
  }
  /// The planner's are of all multiprocessors that share the piece.
  double cycles_of(const Piece& piece) const {
    return pieces_.cycles(piece) / plan_.kernel.cluster;
  }

  /// The next of `count` pieces goes to whoever is free first. of(index): a Step; its cycles.
  template <class Of>
  void deal_by_counter(std::int64_t count, const Of& of) {
    count_ = count;
    using Free = std::pair<double, std::int64_t>;
    std::priority_queue<Free, std::vector<Free>, std::greater<>> free;
    const auto workers = std::min<std::int64_t>(count, workers_);
    for (std::int64_t worker = 0; worker < workers; ++worker) free.emplace(0.0, worker);
    for (std::int64_t index = 0; index < count; ++index) {
      const auto [time, worker] = free.top();
      free.pop();
      const auto [step, cycles] = of(index);
      if (!add(step, worker, time, cycles)) return;
      free.emplace(time + cycles, worker);
    }
  }

  std::pair<Step, double> step_of(std::int64_t index, const Piece& piece) const {
    return {{index, piece}, cycles_of(piece)};
  }

  void deal_gpu_backward() {
    const bool in_order = adds_in_order(plan_);
    deal_by_counter(plan_.work.count(), [&](std::int64_t index) {
      core::Work work = plan_.work.backward_at(index);
      work.block = plan_.work.key_block(work, in_order);
      return step_of(index, pieces_.piece(work));
    });
  }

  void deal_cpu_forward() {
    if (!pieces_.decodes()) {
      deal_by_counter(plan_.work.count(), [&](std::int64_t index) {
        return step_of(index, pieces_.piece(plan_.work.at(index)));
      });
      return;
    }
    const core::DecodeOrder order = decode_order(plan_, pieces_.tensors(), plan_.device.threads);
    deal_by_counter(order.count(), [&](std::int64_t index) {
      const core::DecodeOrder::Piece of = order.at(index);
      Piece piece = pieces_.piece({of.batch, of.head, 0, of.split});
      piece.heads = of.heads;
      return step_of(index, piece);
    });
  }

  void deal_cpu_backward() {
    const core::BackwardOrder order =
        backward_order(plan_.problem, plan_.kernel, plan_.device.threads);
    deal_by_counter(order.count(), [&](std::int64_t index) -> std::pair<Step, double> {
      const core::BackwardOrder::Piece of = order.at(index);
      const core::Work work = {static_cast<int>(of.head / plan_.work.heads),
                               static_cast<int>(of.head % plan_.work.heads),
                               static_cast<int>(of.number - order.tiles), 0};
      if (of.number >= order.tiles) return step_of(index, pieces_.piece(work));
      Piece piece;
      piece.work = work;
      piece.work.block = static_cast<int>(of.number);
      piece.head = pieces_.head(work.batch);
      const std::int64_t block_m = plan_.kernel.block_m, first = of.number * block_m;
      piece.rows = {first, core::min(first + block_m, piece.head.rows.count())};
      return {{index, piece, true}, 0.0};
    });
  }

  /// A sequence's items on the line of a GPU's decoding.
  struct Line {
    int batch;
    int start;
    int units;   ///< of each item
    int blocks;  ///< of rows, of a head
  };
  Line line_of(int batch, int start) const {
    const std::int64_t rows = pieces_.head(batch).rows.count();
    const std::int64_t blocks = core::ceil_div<std::int64_t>(rows, plan_.work.block_m);
    return {batch, start, pieces_.units(batch),
            static_cast<int>(core::max<std::int64_t>(blocks, 1))};
  }
  int end_of(const Line& line) const {
    return line.start + plan_.work.heads * line.blocks * plan_.spans.cost(line.units);
  }

  /// A GPU's decoding: every resident block of threads has a span. They begin together, and blocks
  /// are spread over the multiprocessors.
  void deal_spans() {
    resident_ = resident();
    const int batch = plan_.work.batch;
    core::Spans spans = plan_.spans;
    if (plan_.problem.packed || plan_.problem.cache) {
      int end = 0;
      for (int b = 0; b < batch; ++b) end = end_of(line_of(b, end));
      spans.cut(end);
    } else if (batch > 0) {  // sequences are alike
      spans.cut(batch * end_of(line_of(0, 0)));
    }
    for (int b = 0, start = 0; b < batch; ++b) {
      const Line line = line_of(b, start);
      if (!deal_line(line, spans)) return;
      start = end_of(line);
    }
  }

  bool deal_line(const Line& line, const core::Spans& spans) {
    for (int item = 0; item < plan_.work.heads * line.blocks; ++item) {
      const core::SpanItem place = {line.start + item * spans.cost(line.units), line.units};
      const Piece piece = pieces_.piece({line.batch, item / line.blocks, item % line.blocks, 0});
      for (int span = place.start / spans.length; span <= spans.span_of(place, place.units - 1);
           ++span) {
        if (!deal_part(piece, place, spans, span)) return false;
      }
    }
    return true;
  }

  /// What a span has of an item.
  bool deal_part(const Piece& item, const core::SpanItem& place, const core::Spans& spans,
                 int span) {
    const core::Range units = spans.units_of(place, span);
    if (units.empty()) return true;  // the end of its fixed part
    const int before = span * spans.length;
    const int begin = units.begin == 0 ? 0 : spans.fixed + units.begin;
    const int start = core::max(place.start + begin, before);
    const int end = place.start + spans.fixed + units.end;
    const int block = spans.count - 1 - span;  // of threads: they take spans in falling order
    const double unit = pieces_.cycles_of_unit();
    if (!add({count_, pieces_.part(item, units)}, block % workers_, unit * (start - before),
             unit * (end - start))) {
      return false;
    }
    ++count_;
    return true;
  }

  /// When all is done, when the first worker has no more to do, how long workers wait for the last.
  void write_times(Json& json) const {
    double end = 0.0, busy = 0.0;
    double first_idle = steps_.empty() ? 0.0 : std::numeric_limits<double>::max();
    for (const double ready : ready_) {
      end = core::max(end, ready);
      first_idle = core::min(first_idle, ready);
    }
    std::int64_t last_round = 0;
    for (const Step& step : steps_) {
      busy += step.end - step.start;
      last_round += step.end > first_idle ? 1 : 0;
    }
    const double all = end * static_cast<double>(ready_.size()) * resident_;
    json.field("end", rounded(end)).field("first_idle", rounded(first_idle));
    json.field("busy", rounded(busy)).field("idle", rounded(all - busy));
    json.field("last_round", last_round);
  }

  static std::int64_t rounded(double cycles) { return static_cast<std::int64_t>(cycles + 0.5); }

  static void write_step(const Step& step, Json& json) {
    const Piece& piece = step.piece;
    const core::Work& work = piece.work;
    const core::KeyRuns& keys = piece.keys;
    json.begin_array().value(step.index).value(work.batch).value(work.head).value(piece.heads);
    json.value(work.block).value(work.split);
    json.value(piece.rows.size() > 0 ? piece.rows.begin : 0);
    json.value(piece.rows.size() > 0 ? piece.rows.end : 0);
    json.value(hull_of(keys).begin).value(hull_of(keys).end).value(keys.size());
    json.value(step.worker).value(rounded(step.start)).value(rounded(step.end));
    json.value(step.prepares ? 1 : 0).end_array();
  }

  const Pieces& pieces_;
  const PlanData& plan_;
  Dealing dealing_ = Dealing::counter;
  const int workers_;          ///< cores; multiprocessors, or pairs of them that share pieces
  int resident_ = 1;           ///< blocks of threads that a worker has at once
  std::int64_t count_ = 0;     ///< of pieces; of spans: those in the list
  bool cut_ = false;           ///< there are more than the answer has
  std::vector<double> ready_;  ///< when each worker is done
  std::vector<Step> steps_;
};

}  // namespace

Status answer_order(const Request& request, Json& json) {
  if (Status s = request.only({}, Inputs::kFields); !s) return s;
  const Result<Problem> problem = request.problem();
  if (!problem) return problem.status();
  const Result<Device> device = request.device();
  if (!device) return device.status();
  const Result<Plan> planned = plan_of_sequences(*problem, *device);
  if (!planned) return planned.status();
  const Result<Inputs> inputs = Inputs::make(*problem, request);
  if (!inputs) return inputs.status();
  const Pieces pieces(planned->data(), inputs->tensors());
  Schedule(pieces).write(json);
  return {};
}

}  // namespace tessera::explorer
