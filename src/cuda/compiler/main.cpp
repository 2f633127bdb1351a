// The build-time device compiler: every catalog row of a GPU to a cubin, what its architecture has
// beside them to a few more, and one C++ file that embeds them.
//
//   compiler --nvrtc LIBRARY --source ROOT --output FOLDER --part I --parts N
//   compiler --nvrtc LIBRARY --output FOLDER
//
// The first compiles the I-th of N parts of the kernels: FOLDER receives a cubin and a log for
// each. NVRTC compiles one program at a time in a process, and only the build knows how many cores
// are free. The second, when all parts are there, writes cubins.cpp, and kernels.txt for the tests.
//
// Fails on anything that would make a kernel silently slow: spilled registers, local memory, or one
// of ptxas's C75xx remarks (serialised wgmma, a fence it had to add, an ignored setmaxnreg).
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "cuda/architecture.h"
#include "cuda/compiler/nvrtc.h"
#include "cuda/symbol.h"
#include "plan/catalog.h"

namespace tessera::cuda {
namespace {

struct Options {
  std::string nvrtc, source, output;
  std::size_t part = 0, parts = 0;  ///< parts == 0: write what embeds the cubins
};

/// One cubin on its way: its name and its program.
struct Job {
  const Architecture* architecture = nullptr;
  std::string symbol;
  std::string program;
  const core::Kernel* row = nullptr;  ///< null: not a row of the catalog
};

/// Why a compilation is not good enough; empty: it is.
std::string complaint(const Compilation& result) {
  if (!result.ok) return "does not compile";
  if (result.log.find("C75") != std::string::npos) return "has a C75xx remark of ptxas";
  for (const char* bad : {"spilled", "Local memory used", "bytes stack frame"}) {
    std::size_t at = result.log.find(bad);
    if (at == std::string::npos) continue;
    if (std::strcmp(bad, "bytes stack frame") != 0) return std::string("ptxas says: ") + bad;
    // "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"
    const std::size_t line = result.log.rfind('\n', at);
    const std::size_t begin = line == std::string::npos ? 0 : line + 1;
    const std::string text = result.log.substr(begin, result.log.find('\n', at) - begin);
    if (text.find("    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads") ==
        std::string::npos) {
      return "ptxas says:" + text;
    }
  }
  return {};
}

std::vector<Job> jobs() {
  std::vector<Job> list;
  for (const Architecture* const one : architectures()) {
    for (const core::Kernel& row : kCatalog) {
      if (row.arch != one->arch) continue;
      const std::string symbol = symbol_of(row);
      list.push_back({one, symbol, one->row_program(row, symbol), &row});
    }
    list.push_back({one, one->auxiliary_symbol, one->auxiliary_program()});
    for (const OtherProgram& other : one->others) list.push_back({one, other.symbol, other.text});
  }
  return list;
}

bool write_file(const std::string& path, const std::string& content) {
  std::ofstream file(path, std::ios::binary);
  file.write(content.data(), static_cast<std::streamsize>(content.size()));
  return file.good();
}

/// Compiles a row and writes its cubin and log; false: not good enough, and the reason is printed.
bool compile(const Nvrtc& nvrtc, const Options& options, const Job& job) {
  const std::vector<std::string> arguments = {
      job.architecture->compiler_option,
      "-std=c++20",
      "-default-device",
      "--use_fast_math",
      "-I" + options.source + "/src",
      "-I" + options.source + "/include",
      "-I" + options.source + "/src/cuda/compiler/include",
      "--ptxas-options=-v",
      "--ptxas-options=--warn-on-spills",
      "--ptxas-options=--warn-on-local-memory-usage",
  };
  const Compilation result = nvrtc.compile(job.symbol + ".cu", job.program, arguments);
  const std::string problem = complaint(result);
  if (!problem.empty()) {
    std::fprintf(stderr, "%s: %s\n%s\n", job.symbol.c_str(), problem.c_str(), result.log.c_str());
  }
  const std::string stem = options.output + "/" + job.symbol;
  if (!write_file(stem + ".cubin", result.cubin) || !write_file(stem + ".log", result.log)) {
    std::fprintf(stderr, "device compiler: %s cannot be written\n", stem.c_str());
    return false;
  }
  return problem.empty();
}

bool compile_part(const Nvrtc& nvrtc, const Options& options, const std::vector<Job>& list) {
  bool good = true;
  for (std::size_t i = options.part; i < list.size(); i += options.parts) {
    good &= compile(nvrtc, options, list[i]);
  }
  return good;
}

/// The C++ file: cubins by .incbin, and the table that cuda/cubins.h declares.
std::string embedding_of(const Options& options, const std::vector<Job>& list) {
  std::string code = "// Made by the device compiler.\n#include \"cuda/cubins.h\"\n\n";
  std::string table;
  for (const Job& job : list) {
    const std::string begin = "tessera_cubin_" + job.symbol, end = begin + "_end";
    code += "asm(\".pushsection .rodata\\n.balign 64\\n" + begin + ":\\n.incbin \\\"" +
            options.output + "/" + job.symbol + ".cubin\\\"\\n" + end + ":\\n.popsection\\n\");\n";
    code += "extern \"C\" const unsigned char " + begin + "[], " + end + "[];\n";
    table += "    {\"" + job.symbol + "\", " + begin + ", " + end + "},\n";
  }
  return code + "\nnamespace tessera::cuda {\n\nstd::span<const Cubin> cubins() {\n" +
         "  static const Cubin table[] = {\n" + table +
         "  };\n  return table;\n}\n\n}  // namespace tessera::cuda\n";
}

/// What the catalog decides about every kernel, for tests/cuda/kernels_test.py; of those that are
/// not its rows just the symbol.
std::string facts_of(const Nvrtc& nvrtc, const std::vector<Job>& list) {
  std::string text =
      "NVRTC " + nvrtc.version() +
      " backward splits_roles threads shared_bytes head_dim head_dim_v block_m block_n"
      " extra\n";
  for (const Job& job : list) {
    text += job.symbol;
    if (job.row != nullptr) {
      const core::Kernel& row = *job.row;
      for (const int value :
           {static_cast<int>(row.pass == Pass::backward), static_cast<int>(splits_roles(row)),
            job.architecture->threads(row), job.architecture->shared_bytes(row), row.head_dim,
            row.head_dim_v, row.block_m, row.block_n, static_cast<int>(row.extra)}) {
        text += " " + std::to_string(value);
      }
    }
    text += "\n";
  }
  return text;
}

int run(const Options& options) {
  const Nvrtc nvrtc(options.nvrtc);
  if (!nvrtc.missing().empty()) {
    std::fprintf(stderr, "device compiler: %s\n", nvrtc.missing().c_str());
    return 1;
  }
  const std::vector<Job> list = jobs();
  if (options.parts > 0) return compile_part(nvrtc, options, list) ? 0 : 1;
  std::printf("device compiler: %zu kernels, NVRTC %s\n", list.size(), nvrtc.version().c_str());
  const bool written = write_file(options.output + "/kernels.txt", facts_of(nvrtc, list)) &&
                       write_file(options.output + "/cubins.cpp", embedding_of(options, list));
  return written ? 0 : 1;
}

}  // namespace
}  // namespace tessera::cuda

int main(int argc, char** argv) {
  tessera::cuda::Options options;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i];
    if (name == "--nvrtc") options.nvrtc = argv[i + 1];
    if (name == "--source") options.source = argv[i + 1];
    if (name == "--output") options.output = argv[i + 1];
    if (name == "--part") options.part = std::strtoul(argv[i + 1], nullptr, 10);
    if (name == "--parts") options.parts = std::strtoul(argv[i + 1], nullptr, 10);
  }
  if (options.output.empty() || (options.parts > 0 && options.source.empty())) {
    std::fprintf(stderr,
                 "usage: %s [--nvrtc LIBRARY] --source ROOT --output FOLDER --part I --parts N\n"
                 "       %s [--nvrtc LIBRARY] --output FOLDER\n",
                 argv[0], argv[0]);
    return 2;
  }
  return tessera::cuda::run(options);
}
