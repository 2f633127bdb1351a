#include "check/device_copy.h"

namespace tessera::tools {

namespace {

constexpr std::size_t kAlignment = 64;  // of host blocks before their shift

}  // namespace

Result<DeviceCopy> DeviceCopy::of(const RunMemory& memory, const Device& device) {
  DeviceCopy copy;
  for (const Block& block : memory.blocks()) {
    const Status status =
        block.buffer.with_guards([&](std::byte* start, std::size_t bytes) -> Status {
          const std::size_t phase = reinterpret_cast<std::uintptr_t>(start) % kAlignment;
          Result<Buffer> buffer = Buffer::allocate(device, bytes + phase);
          if (!buffer) return buffer.status();
          if (Status s = buffer->write(start, bytes, phase); !s) return s;
          copy.places_.push_back({start, bytes, phase, std::move(*buffer)});
          return {};
        });
    if (!status) return status;
  }
  copy.tensors_ = memory.tensors();
  copy.move_all();
  return copy;
}

Result<DeviceCopy> DeviceCopy::of(const Tensors& tensors, std::span<const HostRange> ranges,
                                  const Device& device) {
  DeviceCopy copy;
  for (const HostRange& range : ranges) {
    Result<Buffer> buffer = Buffer::allocate(device, range.bytes);
    if (!buffer) return buffer.status();
    if (range.result == nullptr) {
      if (Status s = buffer->write(range.start, range.bytes); !s) return s;
    }
    copy.places_.push_back(
        {static_cast<const std::byte*>(range.start), range.bytes, 0, std::move(*buffer)});
  }
  copy.tensors_ = tensors;
  copy.move_all();
  return copy;
}

Status DeviceCopy::bring_back(std::span<const HostRange> ranges) const {
  for (std::size_t i = 0; i < ranges.size(); ++i) {
    if (ranges[i].result == nullptr) continue;
    if (Status s = places_[i].buffer.read(ranges[i].result, ranges[i].bytes); !s) return s;
  }
  return {};
}

Status DeviceCopy::bring_back(const RunMemory& memory) const {
  std::size_t i = 0;
  for (const Block& block : memory.blocks()) {
    const Place& place = places_[i++];
    const Status status = block.buffer.with_guards([&](std::byte* start, std::size_t bytes) {
      return place.buffer.read(start, bytes, place.phase);
    });
    if (!status) return status;
  }
  return {};
}

template <class T>
void DeviceCopy::move(T*& pointer) const {
  if (pointer == nullptr) return;
  const auto address = reinterpret_cast<std::uintptr_t>(pointer);
  for (const Place& place : places_) {
    const auto start = reinterpret_cast<std::uintptr_t>(place.start);
    if (address < start || address >= start + place.bytes) continue;
    const auto device = reinterpret_cast<std::uintptr_t>(place.buffer.data()) + place.phase;
    pointer =
        reinterpret_cast<T*>(device + (address - start));  // NOLINT(performance-no-int-to-ptr)
    return;
  }
}

void DeviceCopy::move_all() {
  Tensors& t = tensors_;
  for (ConstTensor* tensor : {&t.q, &t.k, &t.v, &t.qv, &t.dout}) move(tensor->data);
  for (Tensor* tensor : {&t.o, &t.dq, &t.dk, &t.dv}) move(tensor->data);
  for (ConstScales* numbers : {&t.q_scale, &t.k_scale, &t.v_scale, &t.score_shift, &t.v_shift}) {
    move(numbers->data);
  }
  move(t.softmax_lse);
  move(t.bias.data);
  move(t.alibi_slopes);
  move(t.sink);
  move(t.cu_seqlens_q);
  move(t.cu_seqlens_k);
  move(t.cache.seqlens);
  move(t.cache.cu_seqlens_new);
  move(t.cache.page_table);
  move(t.cache.index);
  move(t.cache.leftpad);
  move(t.tree_mask);
  move(t.dsoftmax_lse);
  move(t.dbias.data);
  move(t.dsink);
}

}  // namespace tessera::tools
