// Workspace: one body of code both counts the bytes a kernel needs (at plan time) and hands out the
// pointers (at run time), so the two can never disagree. Called by layout_cpu.h and layout_gpu.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/hd.h"
#include "tessera/tessera.hpp"

namespace tessera {

class Workspace {
 public:
  /// Counts; records each region's name if `regions` is given.
  TESSERA_HD explicit Workspace(std::vector<WorkspaceRegion>* regions = nullptr)
      : regions_(regions) {}
  /// Hands out memory from `base`; allocates nothing.
  TESSERA_HD explicit Workspace(void* base) : base_(static_cast<std::byte*>(base)) {}

  /// The next `count` objects of T, aligned to a cache line; null while counting.
  template <class T>
  TESSERA_HD T* take(const char* name, std::int64_t count) {
    const std::uint64_t offset = bytes_;
    const std::uint64_t bytes = static_cast<std::uint64_t>(count) * sizeof(T);
    bytes_ = (offset + bytes + kAlignment - 1) / kAlignment * kAlignment;
    if (regions_ != nullptr && count > 0) record(name, offset, bytes);
    return base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + offset);
  }

  TESSERA_HD std::uint64_t bytes() const { return bytes_; }

 private:
  /// Not inline: kernels, compiled for other instruction sets, must not carry the vector's code.
  void record(const char* name, std::uint64_t offset, std::uint64_t bytes);

  static constexpr std::uint64_t kAlignment = Plan::workspace_alignment;

  std::byte* base_ = nullptr;
  std::uint64_t bytes_ = 0;
  std::vector<WorkspaceRegion>* regions_ = nullptr;
};

}  // namespace tessera
