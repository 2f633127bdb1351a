// Something that is made once, by whoever needs it first. A failure is not remembered: the next one
// who needs it tries again.
#pragma once

#include <atomic>
#include <mutex>

#include "tessera/status.hpp"

namespace tessera::cuda {

class Once {
 public:
  /// Calls make(), which returns a Status, unless it was made.
  template <class Make>
  Status operator()(const Make& make) {
    if (made_.load(std::memory_order_acquire)) return {};
    const std::scoped_lock lock(making_);
    if (made_.load(std::memory_order_relaxed)) return {};
    Status status = make();
    if (status) made_.store(true, std::memory_order_release);
    return status;
  }

 private:
  std::atomic<bool> made_ = false;
  std::mutex making_;
};

}  // namespace tessera::cuda
