#include "cuda/target.h"

#include "cuda/sm80/target.h"
#include "cuda/sm90/target.h"

namespace tessera::cuda {

std::span<const Target> targets() {
  static constexpr Target kAll[] = {sm90::kTarget, sm80::kTarget};
  return kAll;
}

const Target* target_of(Arch arch) {
  for (const Target& target : targets()) {
    if (target.architecture->arch == arch) return &target;
  }
  return nullptr;
}

}  // namespace tessera::cuda
