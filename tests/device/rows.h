// Rows of the catalog that are compiled for fibers.
#pragma once

#include <array>
#include <utility>

#include "plan/catalog.h"

namespace tessera::device {

template <class Chosen>
constexpr std::size_t count_of(const Chosen& chosen) {
  std::size_t count = 0;
  for (const core::Kernel& row : kCatalog) count += chosen(row) ? 1 : 0;
  return count;
}

template <std::size_t kCount, class Chosen>
constexpr std::array<core::Kernel, kCount> rows_of(const Chosen& chosen) {
  std::array<core::Kernel, kCount> rows = {};
  std::size_t i = 0;
  for (const core::Kernel& row : kCatalog) {
    if (chosen(row)) rows[i++] = row;
  }
  return rows;
}

}  // namespace tessera::device
