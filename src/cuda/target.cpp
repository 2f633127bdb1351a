#include "cuda/target.h"

#include "cuda/sm75/target.h"
#include "cuda/sm80/target.h"
#include "cuda/sm90/target.h"

namespace tessera::cuda {

std::span<const Target> targets() {
  static constexpr Target kAll[] = {sm90::kTarget, sm80::kTarget, sm75::kTarget};
  return kAll;
}

const Target* own_target(int capability) {
  for (const Target& target : targets()) {
    if (target.runs_on(capability)) return &target;
  }
  return nullptr;
}

const Target* target_on(int capability, bool (*has_code)(const Architecture&, int capability)) {
  for (const Target& target : targets()) {
    if (target.runs_on(capability) && has_code(*target.architecture, capability)) return &target;
  }
  return own_target(capability);
}

const Target* target_of(Arch arch) {
  for (const Target& target : targets()) {
    if (target.architecture->arch == arch) return &target;
  }
  return nullptr;
}

}  // namespace tessera::cuda
