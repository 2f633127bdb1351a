// Processors that can be planned for without having them. "cpu" and the names of instruction sets
// mean this machine and are resolved in tessera.cpp, because plan/ asks no hardware anything.
#include "plan/device_table.h"

namespace tessera {

const char* to_string(Arch arch) {
  switch (arch) {
    case Arch::portable: return "portable";
    case Arch::avx2: return "avx2";
    case Arch::avx512: return "avx512";
    case Arch::avx512_bf16: return "avx512_bf16";
    case Arch::sm75: return "sm75";
    case Arch::sm80: return "sm80";
    case Arch::sm90: return "sm90";
  }
  return "?";
}

const std::vector<Device>& device_table() {
  // Cores or multiprocessors, and caches per core (GPU: shared memory of a block, L2), from the
  // manufacturers' specifications.
  static const std::vector<Device> table = {
      {"haswell-4", Arch::avx2, 4, 32 << 10, 256 << 10},
      {"zen3-16", Arch::avx2, 16, 32 << 10, 512 << 10},
      {"skylake-sp-28", Arch::avx512, 28, 32 << 10, 1 << 20},
      {"zen4-16", Arch::avx512_bf16, 16, 32 << 10, 1 << 20},
      {"zen5-16", Arch::avx512_bf16, 16, 48 << 10, 1 << 20},
      {"sapphire-rapids-56", Arch::avx512_bf16, 56, 48 << 10, 2 << 20},
      {"graviton3-64", Arch::portable, 64, 64 << 10, 1 << 20},
      {"t4", Arch::sm75, 40, 65536, 4 << 20, 0, 75},
      {"rtx-2080-ti", Arch::sm75, 68, 65536, 5632 << 10, 0, 75},
      {"a100", Arch::sm80, 108, 166912, 40 << 20, 0, 80},
      {"a10", Arch::sm80, 72, 101376, 6 << 20, 0, 86},
      {"rtx-3090", Arch::sm80, 82, 101376, 6 << 20, 0, 86},
      {"orin", Arch::sm80, 16, 166912, 4 << 20, 0, 87},
      {"l4", Arch::sm80, 58, 101376, 48 << 20, 0, 89},
      {"l40s", Arch::sm80, 142, 101376, 96 << 20, 0, 89},
      {"rtx-4090", Arch::sm80, 128, 101376, 72 << 20, 0, 89},
      {"h100", Arch::sm90, 132, 232448, 50 << 20, 0, 90},
      {"h200", Arch::sm90, 132, 232448, 50 << 20, 0, 90},
      {"b200", Arch::sm80, 148, 232448, 126 << 20, 0, 100},
      {"rtx-5090", Arch::sm80, 170, 101376, 96 << 20, 0, 120},
      {"rtx-pro-6000", Arch::sm80, 188, 101376, 128 << 20, 0, 120},
  };
  return table;
}

}  // namespace tessera
