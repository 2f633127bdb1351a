// The build-time device compiler: every catalog row of a GPU to a cubin, what its architecture has
// beside them to a few more, and one C++ file that embeds them.
//
//   compiler --nvrtc LIBRARY --targets T --source ROOT --output FOLDER --part I --parts N
//   compiler --nvrtc LIBRARY --targets T --output FOLDER
//
// T is a list of targets, "sm_80,sm_90a,compute_80"; of programs those of architectures that have
// such an image. The first compiles the I-th of N parts of the kernels: FOLDER receives a cubin
// and a log for each. NVRTC compiles one program at a time in a process, and only the build knows
// how many cores are free. The second, when all parts are there, writes cubins.cpp, and kernels.txt
// for the tests.
//
// Fails on anything that complaint() has against a kernel.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "core/storage.h"
#include "cuda/compiler/compiler.h"

namespace tessera::cuda {
namespace {

struct Options {
  std::string nvrtc, source, output;
  std::vector<std::string> targets;
  std::size_t part = 0, parts = 0;  ///< parts == 0: write what embeds the cubins
};

bool write_file(const std::string& path, const std::string& content) {
  std::ofstream file(path, std::ios::binary);
  file.write(content.data(), static_cast<std::streamsize>(content.size()));
  return file.good();
}

/// A program for one target.
struct Kernel {
  Program program;
  std::string target;

  std::string name() const { return program.symbol + "." + target; }
};

/// Those of the same program one after another, so that parts are alike.
std::vector<Kernel> kernels_of(const Options& options) {
  std::vector<Kernel> all;
  for (const Program& program : programs()) {
    if (program.row != nullptr && core::is_made_at_need(*program.row)) continue;
    const int shared_bytes =
        program.row == nullptr ? 0 : program.architecture->shared_bytes(*program.row);
    for (const Image& image : program.architecture->images) {
      if (image.holds(shared_bytes) && std::find(options.targets.begin(), options.targets.end(),
                                                 image.target) != options.targets.end()) {
        all.push_back({program, image.target});
      }
    }
  }
  return all;
}

/// Compiles a program and writes its cubin and log; false: not good enough, and the reason is
/// printed.
bool write_code(const Nvrtc& nvrtc, const Options& options, const Kernel& kernel) {
  const MachineCode code =
      compile(nvrtc, kernel.program, kernel.target, Headers{options.source, {}});
  if (!code.complaint.empty()) {
    std::fprintf(stderr, "%s: %s\n%s\n", kernel.name().c_str(), code.complaint.c_str(),
                 code.log.c_str());
  }
  const std::string stem = options.output + "/" + kernel.name();
  if (!write_file(stem + ".cubin", code.cubin) || !write_file(stem + ".log", code.log)) {
    std::fprintf(stderr, "device compiler: %s cannot be written\n", stem.c_str());
    return false;
  }
  return code.complaint.empty();
}

bool compile_part(const Nvrtc& nvrtc, const Options& options, const std::vector<Kernel>& list) {
  bool good = true;
  for (std::size_t i = options.part; i < list.size(); i += options.parts) {
    good &= write_code(nvrtc, options, list[i]);
  }
  return good;
}

/// The C++ file: cubins by .incbin, and the table that cuda/cubins.h declares.
std::string embedding_of(const Options& options, const std::vector<Kernel>& list) {
  std::string code = "// Made by the device compiler.\n#include \"cuda/cubins.h\"\n\n";
  std::string table;
  for (const Kernel& kernel : list) {
    const std::string begin = "tessera_" + kernel.target + "_" + kernel.program.symbol,
                      end = begin + "_end";
    code += "asm(\".pushsection .rodata\\n.balign 64\\n" + begin + ":\\n.incbin \\\"" +
            options.output + "/" + kernel.name() + ".cubin\\\"\\n" + end +
            ":\\n.byte 0\\n.popsection\\n\");\n";
    code += "extern \"C\" const unsigned char " + begin + "[], " + end + "[];\n";
    table += "    {\"" + kernel.program.symbol + "\", \"" + kernel.target + "\", " + begin + ", " +
             end + "},\n";
  }
  return code + "\nnamespace tessera::cuda {\n\nstd::span<const Cubin> cubins() {\n" +
         "  static const Cubin table[] = {\n" + table +
         "  };\n  return table;\n}\n\n}  // namespace tessera::cuda\n";
}

/// What the catalog decides about every kernel, for tests/cuda/kernels_test.py; of those that are
/// not its rows just the symbol.
std::string facts_of(const Nvrtc& nvrtc, const std::vector<Kernel>& list) {
  std::string text =
      "NVRTC " + nvrtc.version() +
      " backward splits_roles threads shared_bytes head_dim head_dim_v block_m block_n"
      " extra scores values qv blocks tile_m stages\n";
  for (const auto& [program, target] : list) {
    text += program.symbol + " " + target;
    if (program.row != nullptr) {
      const core::Kernel& row = *program.row;
      for (const int value :
           {static_cast<int>(row.pass == Pass::backward), static_cast<int>(splits_roles(row)),
            program.architecture->threads(row), program.architecture->shared_bytes(row),
            row.head_dim, row.head_dim_v, row.block_m, row.block_n, static_cast<int>(row.extra),
            core::multiplied_columns(core::score_dtype_of(row.operand)),
            core::multiplied_columns(core::dtype_of(row.operand)), static_cast<int>(row.qv),
            row.blocks, row.tile_m, row.stages}) {
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
  const std::vector<std::string> known = all_targets();
  for (const std::string& target : options.targets) {
    if (std::find(known.begin(), known.end(), target) != known.end()) continue;
    std::fprintf(stderr, "device compiler: --targets: no image is for %s\n", target.c_str());
    return 1;
  }
  const std::vector<Kernel> list = kernels_of(options);
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
    if (name == "--targets") {
      std::istringstream list(argv[i + 1]);
      for (std::string target; std::getline(list, target, ',');) options.targets.push_back(target);
    }
    if (name == "--part") options.part = std::strtoul(argv[i + 1], nullptr, 10);
    if (name == "--parts") options.parts = std::strtoul(argv[i + 1], nullptr, 10);
  }
  if (options.output.empty() || (options.parts > 0 && options.source.empty())) {
    std::fprintf(stderr,
                 "usage: %s [--nvrtc LIBRARY] --targets T --source ROOT --output FOLDER --part I "
                 "--parts N\n       %s [--nvrtc LIBRARY] --targets T --output FOLDER\n",
                 argv[0], argv[0]);
    return 2;
  }
  return tessera::cuda::run(options);
}
