"""The version stands in include/tessera/version.h and nowhere else, and all that repeat it agree: the library, the
command, CMake's package and pkg-config's, and the Python package."""

import ctypes
import os
import pathlib
import re
import subprocess
import sys

SOURCE = pathlib.Path(os.environ["TESSERA_SOURCE"])
BUILD = pathlib.Path(os.environ["TESSERA_BUILD"])


def in_header():
    text = (SOURCE / "include/tessera/version.h").read_text()
    return ".".join(re.search(rf"^#define TESSERA_VERSION_{part} (\d+)$", text, re.MULTILINE)[1]
                    for part in ("MAJOR", "MINOR", "PATCH"))


def of_library():
    library = ctypes.CDLL(os.environ["TESSERA_LIBRARY"])
    library.tessera_version.restype = ctypes.c_char_p
    return library.tessera_version().decode()


def of_command():
    said = subprocess.run([os.environ["TESSERA_COMMAND"], "--version"], capture_output=True, text=True, check=True)
    return said.stdout.split()[1]


def of_python():
    """As scikit-build-core's provider of a version by regular expression reads pyproject.toml."""
    text = (SOURCE / "pyproject.toml").read_text()
    section = text[text.index("[[tool.dynamic-metadata]]"):]
    value = {key: next(x for x in re.search(rf"^{key} = (?:\'\'\'(.*?)\'\'\'|\"(.*?)\")$", section, re.MULTILINE).groups()
                       if x is not None) for key in ("input", "regex", "result")}
    match = re.search(value["regex"], (SOURCE / value["input"]).read_text(), re.MULTILINE)
    return value["result"].format(**match.groupdict())


def read(path, pattern):
    return re.search(pattern, (BUILD / path).read_text(), re.MULTILINE)[1]


def main():
    version = in_header()
    said = {
        "libtessera": of_library(),
        "CMake's package": read("tessera-config-version.cmake", r'^set\(PACKAGE_VERSION "(.*)"\)$'),
        "tessera.pc": read("tessera.pc", r"^Version: (.*)$"),
        "pyproject.toml": of_python(),
    }
    if "TESSERA_COMMAND" in os.environ:
        said["the command"] = of_command()
    wrong = [f"{who} says {what}, version.h {version}" for who, what in said.items() if what != version]
    # A second place would be forgotten.
    for name in "CMakeLists.txt", "pyproject.toml", "include/tessera/tessera.h", "include/tessera/tessera.hpp":
        lines = (SOURCE / name).read_text().splitlines()
        wrong += [f"{name}:{i} states the version: {line}" for i, line in enumerate(lines, 1) if version in line]
    if wrong:
        sys.exit("\n".join(wrong))
    print(f"{len(said)} say {version}")


if __name__ == "__main__":
    main()
