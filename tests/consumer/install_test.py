"""Installs the build into a fresh prefix, then builds and runs programs against it as users do: through
find_package and through pkg-config, in C++ and in C; the C++ of README.md among them, as it stands there."""

import os
import pathlib
import re
import subprocess
import sys
import tempfile

BUILD = os.environ["TESSERA_BUILD"]
CMAKE = os.environ["CMAKE"]
CXX = os.environ["CXX"]
HERE = pathlib.Path(__file__).parent
README = pathlib.Path(os.environ["TESSERA_SOURCE"]) / "README.md"

# README's lines for a GPU begin where these end: memory of the GPU, if there is one, and a stream.
AROUND_LINES = """
#include <tessera/tessera.hpp>
#include <cstdio>

static int lines(const tessera::Result<tessera::Problem>& problem, const tessera::Tensors& t, void* workspace,
                 void* stream) {
%s
  return 0;
}

int main() {
  const auto problem = tessera::parse_problem("fwd bf16 b=1 h=2 q=64 k=64 d=64");
  const auto memory = tessera::this_gpu() ? tessera::Buffer::allocate(*tessera::this_gpu(), 4 * 64 * 2 * 64 * 2)
                                          : tessera::Buffer();
  if (!problem || !memory) return 2;
  char* const start = static_cast<char*>(memory->data());
  const auto part = [start](int i) { return start == nullptr ? nullptr : start + i * 64 * 2 * 64 * 2; };
  tessera::Tensors t;
  t.q = {part(0), 0, 2 * 64, 64};
  t.k = {part(1), 0, 2 * 64, 64};
  t.v = {part(2), 0, 2 * 64, 64};
  t.o = {part(3), 0, 2 * 64, 64};
  return lines(problem, t, nullptr, nullptr);
}
"""


def run(*command, accepted=(0,), **environment):
    command = [str(c) for c in command]
    print("+", " ".join(command), flush=True)
    done = subprocess.run(command, env=os.environ | environment, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True)
    if done.returncode not in accepted:
        sys.exit(f"{done.stdout}\nexit status {done.returncode}")
    return done.stdout.strip()


def pkg_config(prefix):
    pc = next(prefix.rglob("tessera.pc"))
    path = {"PKG_CONFIG_PATH": str(pc.parent)}
    cflags = run("pkg-config", "--cflags", "tessera", **path).split()
    libs = run("pkg-config", "--libs", "tessera", **path).split()
    return cflags, libs, str(pc.parents[1])


def check_find_package(prefix, work):
    run(CMAKE, "-S", HERE, "-B", work, f"-DCMAKE_PREFIX_PATH={prefix}",
        f"-DCMAKE_CXX_COMPILER={CXX}")
    run(CMAKE, "--build", work)
    for program in ("consumer_cpp", "consumer_c"):
        print(run(work / program))


def check_pkg_config(prefix, work):
    cflags, libs, folder = pkg_config(prefix)
    run(CXX, "-std=c++20", *cflags, HERE / "consumer.cpp", *libs, "-o", work / "cpp")
    run("cc", "-std=c11", *cflags, HERE / "consumer.c", *libs, "-lm", "-o", work / "c")
    for program in ("cpp", "c"):
        print(run(work / program, LD_LIBRARY_PATH=folder))


def check_readme(prefix, work):
    """Every C++ block of README.md: a program does what it says; lines for a GPU do without one no worse than
    to say so. Without exceptions and with all warnings, as some who copy them compile."""
    cflags, libs, folder = pkg_config(prefix)
    blocks = re.findall(r"^```cpp\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)
    programs = [block for block in blocks if "int main()" in block]
    lines = [block for block in blocks if "int main()" not in block]
    if len(programs) != 1 or len(lines) != 1:
        sys.exit(f"README.md has {len(programs)} C++ programs and {len(lines)} blocks of lines; "
                 "this test knows one of each")

    def outcome(name, text, accepted):
        (work / f"{name}.cpp").write_text(text)
        run(CXX, "-std=c++20", "-fno-exceptions", "-Wall", "-Wextra", "-Werror", *cflags, work / f"{name}.cpp",
            *libs, "-o", work / name)
        return run(work / name, accepted=accepted, LD_LIBRARY_PATH=folder)

    # Weights sum to 1 and all values are alike, so that every output is that value.
    said = outcome("program", programs[0], (0,))
    if said != "0.3":
        sys.exit(f"README.md's program printed {said!r}, not the value 0.3")
    said = outcome("lines", AROUND_LINES % lines[0], (0, 1))
    print(said)
    if said and not re.search(r"driver|GPU|libnvrtc", said):
        sys.exit(f"README.md's lines for a GPU end with {said!r}: no reason for a machine without one")


def main():
    with tempfile.TemporaryDirectory() as scratch:
        scratch = pathlib.Path(scratch)
        run(CMAKE, "--install", BUILD, "--prefix", scratch / "installed")
        # Both ways of finding the package must survive moving it.
        prefix = (scratch / "installed").rename(scratch / "moved")
        for name, check in ("cmake", check_find_package), ("pkg-config", check_pkg_config), \
                ("readme", check_readme):
            (scratch / name).mkdir()
            check(prefix, scratch / name)
        command = prefix / "bin" / "tessera"
        if command.exists():
            print(run(command, "info"))


if __name__ == "__main__":
    main()
