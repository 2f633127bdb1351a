// NVRTC, opened at run time by path or by name; declared here from its documentation, so that no
// CUDA header is needed to build. Called by compiler.cpp and main.cpp.
#pragma once

#include <string>
#include <vector>

namespace tessera::cuda {

/// What one compilation gave.
struct Compilation {
  bool ok = false;
  std::string log;    ///< ptxas's resource lines included
  std::string cubin;  ///< empty where PTX was asked for
  std::string ptx;
};

/// A file that a program includes without there being one.
struct HeaderText {
  std::string name;  ///< as #include names it
  std::string text;
};

class Nvrtc {
 public:
  /// Opens `path`, or the first libnvrtc the system knows if it is empty.
  explicit Nvrtc(const std::string& path);

  /// Why NVRTC cannot be used; empty: it can.
  const std::string& missing() const { return missing_; }
  std::string version() const;
  int major() const;
  /// Numbers of the architectures that it makes code for, e.g. 90; empty if it does not say.
  std::vector<int> architectures() const;
  /// Thread-safe.
  Compilation compile(const std::string& name, const std::string& source,
                      const std::vector<HeaderText>& headers,
                      const std::vector<std::string>& options) const;

 private:
  using Handle = struct NvrtcProgram*;
  struct Functions {
    const char* (*error_string)(int);
    int (*version)(int*, int*);
    int (*count_architectures)(int*);  // null: before CUDA 11.2
    int (*architectures)(int*);        // the same
    int (*create)(Handle*, const char* source, const char* name, int headers,
                  const char* const* header_sources, const char* const* header_names);
    int (*destroy)(Handle*);
    int (*compile)(Handle, int options, const char* const* values);
    int (*log_size)(Handle, std::size_t*);
    int (*log)(Handle, char*);
    int (*cubin_size)(Handle, std::size_t*);
    int (*cubin)(Handle, char*);
    int (*ptx_size)(Handle, std::size_t*);
    int (*ptx)(Handle, char*);
  };

  Functions nvrtc_{};
  std::string missing_;
};

}  // namespace tessera::cuda
