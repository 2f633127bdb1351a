#include "cuda/architecture.h"

#include <algorithm>
#include <string_view>

#include "cuda/sm75/programs.h"
#include "cuda/sm80/programs.h"
#include "cuda/sm90/programs.h"

namespace tessera::cuda {

std::span<const Architecture* const> architectures() {
  static constexpr const Architecture* kAll[] = {&sm90::kArchitecture, &sm80::kArchitecture,
                                                 &sm75::kArchitecture};
  return kAll;
}

bool Image::is_ptx() const { return std::string_view(target).starts_with("compute_"); }

std::vector<std::string> all_targets() {
  std::vector<std::string> all;
  for (const Architecture* const one : architectures()) {
    for (const Image& image : one->images) {
      if (std::find(all.begin(), all.end(), image.target) == all.end()) {
        all.emplace_back(image.target);
      }
    }
  }
  return all;
}

std::string value_text(const core::Kernel& row) {
  // As many names as a row has members: a new one does not compile until it is written here.
  const auto& [arch, pass, form, operand, block_m, tile_m, block_n, split_n, lanes, head_dim,
               head_dim_v, q_rows, q_stages, extra, any_layout, cached, qv, prefixes, stages,
               blocks, cluster] = row;
  const auto value = [](auto enumerator) { return std::to_string(static_cast<int>(enumerator)); };
  std::string text = "tessera::core::Kernel{tessera::Arch{" + value(arch) + "}, tessera::Pass{" +
                     value(pass) + "}, tessera::core::Form{" + value(form) +
                     "}, tessera::core::Operand{" + value(operand) + "}";
  for (const int number :
       {block_m, tile_m, block_n, split_n, lanes, head_dim, head_dim_v, q_rows, q_stages}) {
    text += ", " + std::to_string(number);
  }
  return text + ", tessera::core::Extra{" + value(extra) + "}, " + (any_layout ? "true" : "false") +
         ", tessera::Dtype{" + value(cached) + "}, " + (qv ? "true" : "false") + ", " +
         (prefixes ? "true" : "false") + ", " + std::to_string(stages) + ", " +
         std::to_string(blocks) + ", " + std::to_string(cluster) + "}";
}

}  // namespace tessera::cuda
