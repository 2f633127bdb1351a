// What the fake driver (fake_driver.cpp) saw and how it shall behave.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace tessera::fake {

struct Launch {
  unsigned grid_x = 0, block_x = 0, shared_bytes = 0;
  void* stream = nullptr;
  std::string kernel;
  void* context = nullptr;  ///< that was current
  bool begins_early = false;
};

/// Memory that the driver knows; what it does not is the host's.
struct Range {
  const void* start = nullptr;
  std::size_t bytes = 0;
  unsigned type = 0;  ///< CUmemorytype
  bool managed = false;
  int ordinal = 0;
};

/// What a tensor map of this driver says; it fits one.
struct EncodedMap {
  const char* address = nullptr;
  std::array<std::uint64_t, 4> sizes = {};
  std::array<std::uint64_t, 3> strides = {};  ///< bytes
  std::array<unsigned, 4> box = {};
  unsigned element_bytes = 0;
};

struct State {
  std::map<std::string, int> calls;     ///< by the entry point's name
  std::map<std::string, int> failures;  ///< entry point: the CUresult that it returns
  std::map<int, int> attributes;        ///< CUdevice_attribute: what differs from an H200's
  std::vector<std::string> images;      ///< the first bytes of those that were loaded, in order
  Launch last;
  std::vector<Launch> launches;  ///< all, in order
  /// Launches, allocations and deallocations of a stream: entry point and stream, in order.
  std::vector<std::pair<std::string, void*>> enqueued;
  std::vector<Range> ranges;
  std::vector<std::array<unsigned, 4>> boxes;  ///< of the tensor maps, in order
  std::vector<int> promotions;                 ///< the same: CUtensorMapL2promotion
  /// Sees what a kernel is launched with, if set.
  std::function<void(const Launch&, const void* parameters)> on_launch;
  void* current = nullptr;   ///< context
  void* captured = nullptr;  ///< a stream that is being captured
  int driver_version = 13010;
  bool refuses_first_image_only = false;  ///< a failure of cuLibraryLoadData is not repeated
};

/// Context of a device.
void* context_of(int ordinal);

State& state();

}  // namespace tessera::fake
