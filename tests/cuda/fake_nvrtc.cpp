// An NVRTC that takes every program at once, and makes code of it that says nothing: for tests that
// look at launches, which the fake driver does not run. It knows the GPUs that NVRTC 13 knows.
#include <cstddef>
#include <cstring>
#include <string_view>

namespace {

constexpr int kArchitectures[] = {75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121};
// As long as the beginning that the fake driver keeps.
constexpr std::string_view kCode =
    "\177ELF, or so it says: code that nothing runs, of a program that nobody has read";
int the_program;

}  // namespace

// NOLINTBEGIN(readability-identifier-naming): NVRTC's names
extern "C" {

const char* nvrtcGetErrorString(int /*error*/) { return "no error"; }
int nvrtcVersion(int* major, int* minor) {
  *major = 13;
  *minor = 0;
  return 0;
}
int nvrtcGetNumSupportedArchs(int* count) {
  *count = sizeof(kArchitectures) / sizeof(int);
  return 0;
}
int nvrtcGetSupportedArchs(int* numbers) {
  std::memcpy(numbers, kArchitectures, sizeof(kArchitectures));
  return 0;
}
int nvrtcCreateProgram(void** program, const char* /*source*/, const char* /*name*/,
                       int /*num_headers*/, const char* const* /*headers*/,
                       const char* const* /*names*/) {
  *program = &the_program;
  return 0;
}
int nvrtcDestroyProgram(void** program) {
  *program = nullptr;
  return 0;
}
int nvrtcCompileProgram(void* /*program*/, int /*num_options*/, const char* const* /*options*/) {
  return 0;
}
int nvrtcGetProgramLogSize(void* /*program*/, std::size_t* size) {
  *size = 1;
  return 0;
}
int nvrtcGetProgramLog(void* /*program*/, char* log) {
  *log = 0;
  return 0;
}
int nvrtcGetCUBINSize(void* /*program*/, std::size_t* size) {
  *size = kCode.size();
  return 0;
}
int nvrtcGetCUBIN(void* /*program*/, char* code) {
  std::memcpy(code, kCode.data(), kCode.size());
  return 0;
}
int nvrtcGetPTXSize(void* /*program*/, std::size_t* size) {
  *size = 1;
  return 0;
}
int nvrtcGetPTX(void* /*program*/, char* text) {
  *text = 0;
  return 0;
}
}
// NOLINTEND(readability-identifier-naming)
