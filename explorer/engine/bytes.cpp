// How many bytes attention moves, as `tessera memory` counts them: one head, no mask, seqlen_q =
// seqlen_k.
#include "answers.h"
#include "memory/memory.h"

namespace tessera::explorer {

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
  const bool on_gpu = is_gpu(device->arch);
  const std::int64_t fast_bytes = on_gpu ? device->l1_bytes : device->l2_bytes;
  const auto pass =
      problem->pass == Pass::forward ? tools::TrafficPass::forward : tools::TrafficPass::backward;
  const std::int64_t element_bytes = size_of(problem->dtype);
  json.field("memory", on_gpu ? "shared memory of a block" : "second-level cache of a core");
  json.field("bytes", fast_bytes).field("head_dim", problem->head_dim);
  json.field("element_bytes", element_bytes).key("list").begin_array();
  for (const std::int64_t seqlen : *seqlens) {
    const Result<tools::Traffic> traffic =
        tools::head_traffic(pass, seqlen, problem->head_dim, element_bytes, fast_bytes);
    if (!traffic) return traffic.status();
    json.begin_object().field("seqlen", seqlen).field("standard", traffic->standard);
    json.field("tiled", traffic->tiled).field("block", traffic->block).end_object();
  }
  json.end_array();
  return {};
}

}  // namespace tessera::explorer
