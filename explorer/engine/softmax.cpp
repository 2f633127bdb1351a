// The softmax of one row and its sum of values, block by block as kernels do it, and in three steps
// as it is defined. Scores and the sink are natural logarithms; inside they are base 2.
#include "core/softmax.h"

#include "answers.h"

namespace tessera::explorer {
namespace {

/// One row of numbers.
struct Row {
  std::vector<float> scores;  ///< base 2
  std::vector<float> values;
  bool has_sink = false;
  float sink = 0.0F;
};

Result<Row> row_of(const Request& request) {
  Row row;
  Result<std::vector<float>> scores = request.floats("scores");
  if (!scores) return scores.status();
  for (const float score : *scores) row.scores.push_back(score * core::kLog2e);
  Result<std::vector<float>> values = request.floats("values");
  if (!values) return values.status();
  row.values = *std::move(values);
  if (!request.has("values")) row.values.assign(row.scores.size(), 1.0F);
  if (row.values.size() != row.scores.size()) {
    return Status::invalid("values: has " + std::to_string(row.values.size()) +
                           " numbers; must have one for each of " +
                           std::to_string(row.scores.size()) + " scores");
  }
  const Result<std::vector<float>> sink = request.floats("sink");
  if (!sink) return sink.status();
  if (sink->size() > 1) return Status::invalid("sink: must be one number");
  row.has_sink = !sink->empty();
  if (row.has_sink) row.sink = sink->front();
  return row;
}

float greatest(const float* scores, std::size_t count) {
  float top = -core::kInfinity;
  for (std::size_t i = 0; i < count; ++i) top = core::max(top, scores[i]);
  return top;
}

/// What is left when all keys were seen.
void write_result(const Row& row, const core::Softmax<float>& state, float sum_of_values,
                  Json& json) {
  const core::FinishedRow<float> end = core::finish(state, row.has_sink, row.sink);
  json.field("output", sum_of_values * end.factor).field("lse", core::lse_of(end.state));
}

/// A row as kernels walk over it: state.max is the reference, which stays until scores exceed it by
/// `slack`.
class OnlineRow {
 public:
  explicit OnlineRow(float slack) : slack_(slack) {}

  void take(const Row& row, std::size_t begin, std::size_t end, Json& json) {
    const float top = greatest(row.scores.data() + begin, end - begin);
    const bool raises = top > state_.max + slack_;
    const float before = state_.max;
    float factor = 1.0F;
    if (raises) {
      factor = core::exp2(before - core::shift_of(top));
      state_ = {top, state_.sum * factor};
      output_ *= factor;
    }
    json.begin_object().field("begin", begin).field("end", end).field("greatest", top);
    json.field("reference", state_.max).field("raised", raises).field("factor", factor);
    // Before the first key there is nothing to rescale.
    json.field("rescaled", raises && before != -core::kInfinity);
    json.key("weights").begin_array();
    float sum = 0.0F;  // of this block: one long sum would err by more
    for (std::size_t i = begin; i < end; ++i) {
      const float weight = core::exp2(row.scores[i] - core::shift_of(state_.max));
      json.value(weight);
      sum += weight;
      output_ += weight * row.values[i];
    }
    state_.sum += sum;
    json.end_array().field("sum", state_.sum).field("output", output_).end_object();
  }

  const core::Softmax<float>& state() const { return state_; }
  float output() const { return output_; }

 private:
  const float slack_;
  core::Softmax<float> state_;
  float output_ = 0.0F;  ///< of weights times values, by the reference
};

/// The greatest score, the weights, their sum of values.
void write_three_steps(const Row& row, Json& json) {
  const float top = greatest(row.scores.data(), row.scores.size());
  core::Softmax<float> state = {top, 0.0F};
  float output = 0.0F;
  std::vector<float> weights;
  for (std::size_t i = 0; i < row.scores.size(); ++i) {
    weights.push_back(core::exp2(row.scores[i] - core::shift_of(top)));
    state.sum += weights.back();
    output += weights.back() * row.values[i];
  }
  const float factor = core::finish(state, row.has_sink, row.sink).factor;
  for (float& weight : weights) weight *= factor;
  json.key("three_steps").begin_object().field("greatest", top).field("sum", state.sum);
  json.list("weights", weights);
  write_result(row, state, output, json);
  json.end_object();
}

}  // namespace

Status answer_softmax(const Request& request, Json& json) {
  if (Status s = request.only({"scores", "values", "block", "slack", "sink"}); !s) return s;
  const Result<Row> row = row_of(request);
  if (!row) return row.status();
  const Result<std::int64_t> block = request.number("block", 4, 1, kMostParts);
  if (!block) return block.status();
  const Result<std::vector<float>> slack = request.floats("slack");
  if (!slack) return slack.status();
  if (slack->size() > 1 || (slack->size() == 1 && !(slack->front() >= 0.0F))) {
    return Status::invalid("slack: must be one number >= 0, of powers of 2");
  }
  const float power = slack->empty() ? core::kGpuSlack : slack->front();

  json.field("block", *block).field("slack", power);
  json.field("cpu_slack", core::kCpuSlack).field("gpu_slack", core::kGpuSlack);
  json.list("base2_scores", row->scores).key("blocks").begin_array();
  OnlineRow online(power);
  const auto step = static_cast<std::size_t>(*block);
  for (std::size_t begin = 0; begin < row->scores.size(); begin += step) {
    online.take(*row, begin, core::min(begin + step, row->scores.size()), json);
  }
  json.end_array().key("online").begin_object();
  write_result(*row, online.state(), online.output(), json);
  json.end_object();
  write_three_steps(*row, json);
  return {};
}

}  // namespace tessera::explorer
