// What the files of the C ABI share: a caller's structures, of any version, as the C++ types, and
// errors on their way back.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <new>
#include <string>

#include "tessera/tessera.h"
#include "tessera/tessera.hpp"

namespace tessera::c {

/// Copies text like snprintf and returns its whole length.
inline std::size_t copy_text(const std::string& text, char* out, std::size_t out_size) {
  if (out != nullptr && out_size > 0) {
    const std::size_t length = std::min(text.size(), out_size - 1);
    std::memcpy(out, text.data(), length);
    out[length] = '\0';
  }
  return text.size();
}

inline tessera_code report(const Status& status, char* error, std::size_t error_size) {
  copy_text(status.text, error, error_size);
  return static_cast<tessera_code>(status.code);
}

/// Reads a caller's structure that may be older (shorter) or newer (longer) than ours. What an
/// older caller does not know keeps its default; a newer caller's extra fields must be zero.
template <class Struct>
Status read_struct(const char* name, const Struct* from, Struct& to) {
  if (from == nullptr) return Status::invalid(std::string(name) + " = null");
  const std::size_t size = from->size;
  if (size < sizeof(std::size_t) || size > 65536) {
    return Status::invalid(std::string(name) + ".size = " + std::to_string(size) +
                           ": initialise the structure with its _init function");
  }
  const auto* bytes = reinterpret_cast<const unsigned char*>(from);
  for (std::size_t i = sizeof(Struct); i < size; ++i) {
    if (bytes[i] != 0) {
      return Status::unsupported(std::string(name) + ".size = " + std::to_string(size) +
                                 ": uses fields that this version of the library does not know");
    }
  }
  std::memcpy(&to, from, std::min(size, sizeof(Struct)));
  return {};
}

/// A caller's structure, of any version: its defaults, zeros in what we do not know, and `size`.
template <class Struct>
void initialise(Struct* structure, std::size_t size, const Struct& defaults = {}) {
  if (structure == nullptr || size < sizeof structure->size) return;
  std::memset(structure, 0, size);
  std::memcpy(structure, &defaults, std::min(size, sizeof defaults));
  structure->size = size;
}

/// An enumerator or flag in [0, last].
template <class Enum>
Status read_enum(const char* name, std::int64_t value, Enum last, Enum& out) {
  const auto high = static_cast<std::int32_t>(last);
  if (value < 0 || value > high) {
    return Status::invalid(std::string(name) + " = " + std::to_string(value) +
                           ": must lie in [0, " + std::to_string(high) + "]");
  }
  out = static_cast<Enum>(value);
  return {};
}

inline ConstTensor to_cpp(const tessera_const_tensor& t) {
  return {t.data, t.stride_batch, t.stride_seqlen, t.stride_head};
}

inline Tensor to_cpp(const tessera_tensor& t) {
  return {t.data, t.stride_batch, t.stride_seqlen, t.stride_head};
}

inline ConstScales to_cpp(const tessera_const_scales& s) {
  return {s.data, s.stride_batch, s.stride_head, s.stride_seqlen};
}

inline Scales to_cpp(const tessera_scales& s) {
  return {s.data, s.stride_batch, s.stride_head, s.stride_seqlen};
}

/// A caller's problem, of any version; c_api.cpp.
Result<Problem> problem_of(const tessera_problem* from);

inline CacheTensors to_cpp(const tessera_cache& c) {
  return {c.seqlens, c.cu_seqlens_new, c.page_table, c.stride_page_table, c.index, c.leftpad};
}

inline Result<Executor> to_cpp(const tessera_executor* from) {
  tessera_executor c{};
  if (Status s = read_struct("executor", from, c); !s) return s;
  if (c.num_threads < 1) {
    return Status::invalid("executor.num_threads = " + std::to_string(c.num_threads) +
                           ": must be at least 1");
  }
  if (c.run == nullptr) return Status::invalid("executor.run = null");
  return Executor{c.num_threads, c.self, c.run};
}

/// What a caller's execution says. Stays where it is: the execution points to the executor.
class Executed {
 public:
  Executed() = default;
  ~Executed() = default;
  Executed(const Executed&) = delete;
  Executed(Executed&&) = delete;
  Executed& operator=(const Executed&) = delete;
  Executed& operator=(Executed&&) = delete;

  Status read(const tessera_execution* from) {
    if (from == nullptr) return {};
    tessera_execution c{};
    if (Status s = read_struct("execution", from, c); !s) return s;
    execution_.progress = c.progress;
    execution_.progress_context = c.progress_context;
    execution_.stream = c.stream;
    if (c.executor == nullptr) return {};
    const auto executor = to_cpp(c.executor);
    if (!executor) return executor.status();
    executor_ = *executor;
    execution_.executor = &executor_;
    return {};
  }
  const Execution& operator*() const { return execution_; }

 private:
  Executor executor_;
  Execution execution_;
};

inline Result<Device> to_device(const char* name) {
  return named_device(name == nullptr ? "cpu" : name);
}

/// The C++ side throws nothing itself, but making text and plans allocates: a failed allocation
/// must not cross the ABI.
template <class Body>
tessera_code guarded(char* error, std::size_t error_size, const Body& body) {
  try {
    return report(body(), error, error_size);
  } catch (const std::bad_alloc&) {
    if (error != nullptr && error_size > 0) error[0] = '\0';
    return TESSERA_DEVICE;
  }
}

}  // namespace tessera::c
