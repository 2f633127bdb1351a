// What the WebAssembly module exports: a buffer for a request, and the answer to it. Both are
// UTF-8; the answer lies there until the next request.
#include <cstddef>
#include <cstdint>
#include <string>

#include "engine.h"

namespace {

std::string request, reply;  // NOLINT: the module's only state

}  // namespace

extern "C" {

/// Where to write a request of so many bytes.
[[clang::export_name("request")]] char* engine_request(std::size_t bytes) {
  request.resize(bytes);
  return request.data();
}

/// Answers what was written there.
[[clang::export_name("answer")]] const char* engine_answer() {
  reply = tessera::explorer::answer(request);
  return reply.data();
}

[[clang::export_name("answer_bytes")]] std::size_t engine_answer_bytes() { return reply.size(); }
}
