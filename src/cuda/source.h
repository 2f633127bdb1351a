// Where a tensor lies.
#pragma once

#include "core/sequences.h"

namespace tessera::cuda {

/// A tensor by its address: for rows that take any layout, and those who read single rows.
struct Source {
  const void* data = nullptr;
  core::Strides strides;
};

}  // namespace tessera::cuda
