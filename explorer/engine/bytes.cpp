// How many bytes attention moves into each fast memory, as `tessera memory` counts them: one head,
// no mask, seqlen_q = seqlen_k; and what the problem's own cache holds.
#include <array>

#include "answers.h"
#include "inputs.h"
#include "memory/memory.h"
#include "plan/plan.h"
#include "plan/shape.h"

namespace tessera::explorer {
namespace {

/// A fast memory, and where its bytes come from.
struct Level {
  const char* name;
  const char* source;
  std::int64_t bytes;
};

std::array<Level, 2> levels_of(const Device& device) {
  if (is_gpu(device.arch)) {
    return {Level{"shared memory of a block", "second-level cache", device.l1_bytes},
            Level{"second-level cache", "HBM", device.l2_bytes}};
  }
  return {Level{"first-level cache of a core", "second-level cache", device.l1_bytes},
          Level{"second-level cache of a core", "memory", device.l2_bytes}};
}

/// A fast memory that does not hold a row of each tile has a refusal instead.
void write_level(const Problem& p, const Level& level, const std::vector<std::int64_t>& seqlens,
                 Json& json) {
  const auto pass =
      p.pass == Pass::forward ? tools::TrafficPass::forward : tools::TrafficPass::backward;
  std::string refusal;
  json.begin_object().field("name", level.name).field("source", level.source);
  json.field("bytes", level.bytes).key("list").begin_array();
  for (const std::int64_t seqlen : seqlens) {
    const Result<tools::Traffic> traffic =
        tools::head_traffic(pass, seqlen, p.head_dim, size_of(p.dtype), level.bytes);
    if (!traffic) {
      refusal = traffic.status().text;
      break;
    }
    json.begin_object().field("seqlen", seqlen).field("standard", traffic->standard);
    json.field("tiled", traffic->tiled).field("block", traffic->block).end_object();
  }
  json.end_array();
  if (!refusal.empty()) json.field("refusal", refusal);
  json.end_object();
}

/// Of all heads of one layer, with made-up lengths (inputs.h).
Status write_cache(const Problem& p, Json& json) {
  const Result<Inputs> inputs = Inputs::make(p, Request());
  if (!inputs) return inputs.status();
  const Tensors& tensors = inputs->tensors();
  const std::int64_t page_size = p.cache->page_size;
  std::int64_t keys = 0, seen = 0, pages = 0;
  for (int b = 0; b < p.batch; ++b) {
    const core::Sequence sequence = sequence_of(p, tensors, b);
    const core::SequenceMask mask =
        mask_rules_of(p, tensors).of(sequences_of(p, tensors), sequence);
    keys += sequence.seqlen_k;
    seen += mask.runs_of({0, sequence.seqlen_q}).size();
    if (p.cache->paged() && sequence.seqlen_k > 0) {
      pages += core::ceil_div(sequence.first_k + sequence.seqlen_k, static_cast<int>(page_size)) -
               sequence.first_k / page_size;
    }
  }
  const double key_bytes =
      static_cast<double>(p.num_heads_k) * static_cast<double>(key_and_value_bytes(p));
  json.begin_object().field("keys", keys);
  json.field("used", static_cast<double>(keys) * key_bytes);
  json.field("bytes", static_cast<double>(p.rows_k()) * key_bytes);
  json.field("read", static_cast<double>(seen) * key_bytes);
  json.field("page_size", page_size).field("pages", pages).field("num_pages", p.cache->num_pages);
  json.end_object();
  return {};
}

}  // namespace

Status answer_bytes(const Request& request, Json& json) {
  if (Status s = request.only({"seqlens"}); !s) return s;
  const Result<Problem> problem = request.problem();
  if (!problem) return problem.status();
  if (Status s = validate(*problem); !s) return s;
  const Result<Device> device = request.device();
  if (!device) return device.status();
  Result<std::vector<std::int64_t>> seqlens = request.numbers("seqlens", 1, tools::kLargestSize);
  if (!seqlens) return seqlens.status();
  if (!request.has("seqlens")) seqlens->push_back(problem->seqlen_k);
  json.field("head_dim", problem->head_dim).field("element_bytes", size_of(problem->dtype));
  json.key("levels").begin_array();
  for (const Level& level : levels_of(*device)) {
    write_level(*problem, level, *seqlens, json);
  }
  json.end_array().key("cache");
  if (problem->cache) return write_cache(*problem, json);
  json.null();
  return {};
}

}  // namespace tessera::explorer
