"""Installs the build into a fresh prefix, then builds and runs programs against it as users do: through
find_package and through pkg-config, in C++ and in C."""

import os
import pathlib
import subprocess
import sys
import tempfile

BUILD = os.environ["TESSERA_BUILD"]
CMAKE = os.environ["CMAKE"]
CXX = os.environ["CXX"]
HERE = pathlib.Path(__file__).parent


def run(*command, **environment):
    command = [str(c) for c in command]
    print("+", " ".join(command), flush=True)
    done = subprocess.run(command, env=os.environ | environment, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        sys.exit(f"{done.stdout}\nexit status {done.returncode}")
    return done.stdout.strip()


def check_find_package(prefix, work):
    run(CMAKE, "-S", HERE, "-B", work, f"-DCMAKE_PREFIX_PATH={prefix}",
        f"-DCMAKE_CXX_COMPILER={CXX}")
    run(CMAKE, "--build", work)
    for program in ("consumer_cpp", "consumer_c"):
        print(run(work / program))


def check_pkg_config(prefix, work):
    pc = next(prefix.rglob("tessera.pc"))
    path = {"PKG_CONFIG_PATH": str(pc.parent)}
    cflags = run("pkg-config", "--cflags", "tessera", **path).split()
    libs = run("pkg-config", "--libs", "tessera", **path).split()
    run(CXX, "-std=c++20", *cflags, HERE / "consumer.cpp", *libs, "-o", work / "cpp")
    run("cc", "-std=c11", *cflags, HERE / "consumer.c", *libs, "-lm", "-o", work / "c")
    for program in ("cpp", "c"):
        print(run(work / program, LD_LIBRARY_PATH=str(pc.parents[1])))


def main():
    with tempfile.TemporaryDirectory() as scratch:
        scratch = pathlib.Path(scratch)
        run(CMAKE, "--install", BUILD, "--prefix", scratch / "installed")
        # Both ways of finding the package must survive moving it.
        prefix = (scratch / "installed").rename(scratch / "moved")
        for name, check in ("cmake", check_find_package), ("pkg-config", check_pkg_config):
            (scratch / name).mkdir()
            check(prefix, scratch / name)
        command = prefix / "bin" / "tessera"
        if command.exists():
            print(run(command, "info"))


if __name__ == "__main__":
    main()
