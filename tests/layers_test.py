"""The arrow of docs/architecture.md, checked on every #include:

    core <- plan <- {reference, cpu, cuda} <- api <- {tools, python, tests}
    core <- plan <- explorer

Backends never see each other, the reference shares nothing with core, and only cuda sees CUDA.
"""

import os
import pathlib
import re
import sys

SOURCE = pathlib.Path(os.environ.get("TESSERA_SOURCE", pathlib.Path(__file__).parents[1]))

# layer: the layers it may include from
ALLOWED = {
    "types": set(),
    "api.c": {"api.c"},
    "api": {"types", "api.c", "api"},
    "core": {"core", "types"},
    "plan": {"plan", "core", "api", "types", "api.c"},
    "reference": {"reference", "api", "types", "api.c"},
    "cpu": {"cpu", "plan", "core", "api", "types", "api.c"},
    "cuda": {"cuda", "plan", "core", "api", "types", "api.c"},
    "library": {"library", "cpu", "cuda", "plan", "core", "api", "types", "api.c"},
    # One meaning, one table: the command reads both, but computes through the API only.
    "tools": {"tools", "reference", "plan", "core", "api", "types", "api.c"},
    "python": {"python", "api", "types"},
    "explorer": {"explorer", "tools", "plan", "core", "api", "types", "api.c"},
}

# Of tools the explorer sees what counts bytes: it asks no machine anything, and writes JSON by itself.
SEEN_BY_EXPLORER = "tools/memory/"

# An architecture's folder below src/cuda, which only the lists of architectures see: everything else there serves all
# of them. mma/ has kernels for several architectures, whose folders may see it.
ARCHITECTURE = re.compile(r"src/cuda/(sm\d+|mma)/")
SEES_ARCHITECTURES = {"src/cuda/architecture.cpp", "src/cuda/target.cpp"}

# layer: the system headers it may use, where that is limited
FREESTANDING = {"cstdint", "cstddef"}
SYSTEM_ONLY = {"types": FREESTANDING, "core": FREESTANDING, "api.c": {"stdint.h", "stddef.h"}}

# system headers that only some layers may use
SYSTEM_OF = [
    (re.compile(r"cuda|nvrtc|cublas"), {"cuda"}),
    (re.compile(r"\w*intrin\.h|arm_neon\.h|hwy/"), {"cpu"}),
    (re.compile(r"nlohmann/|CLI/"), {"tools"}),
    (re.compile(r"Python\.h"), {"python"}),
]


def layer_of(path):
    """The layer of a file, given by its path from the root; None for what is not checked."""
    parts = path.split("/")
    if parts[:2] == ["include", "tessera"]:
        return {"types.hpp": "types", "tessera.h": "api.c", "export.h": "api.c",
                "version.h": "api.c"}.get(
            parts[2], "api")
    if parts[0] == "src":
        return parts[1] if len(parts) > 2 else "library"
    return parts[0] if parts[0] in ("tools", "python", "explorer") else None


def resolve(path, name):
    """The file that a quoted include names, as a path from the root."""
    for folder in (os.path.dirname(path), "include", "src", "tools"):
        candidate = os.path.normpath(os.path.join(folder, name))
        if (SOURCE / candidate).is_file():
            return candidate
    return None


def violations(path, text):
    """One line for every include of `path` that goes against the arrow."""
    layer = layer_of(path)
    if layer not in ALLOWED:
        return [f"{path}: no layer is called {layer!r}"]
    found = []
    for line, (mark, name) in include_lines(text):
        where = f"{path}:{line}: {layer} must not include"
        target = resolve(path, name)
        if mark == '"' and target is None:
            found.append(f"{path}:{line}: \"{name}\" is not a file of this project")
        elif target is not None:
            theirs = layer_of(target)
            if theirs not in ALLOWED[layer] or (
                    (layer, theirs) == ("explorer", "tools") and not target.startswith(SEEN_BY_EXPLORER)):
                found.append(f"{where} \"{name}\" ({theirs})")
            theirs, ours = ARCHITECTURE.match(target), ARCHITECTURE.match(path)
            if theirs and path not in SEES_ARCHITECTURES and (not ours or theirs[1] not in (ours[1], "mma")):
                found.append(f"{path}:{line}: \"{name}\" is one architecture's, this file serves all")
        elif layer in SYSTEM_ONLY and name not in SYSTEM_ONLY[layer]:
            found.append(f"{where} <{name}>; it has {sorted(SYSTEM_ONLY[layer])}")
        else:
            found += [f"{where} <{name}>; only {sorted(owners)} may"
                      for pattern, owners in SYSTEM_OF
                      if pattern.match(name) and layer not in owners]
    return found


def include_lines(text):
    for number, line in enumerate(text.splitlines(), 1):
        match = re.match(r'\s*#\s*include\s*(["<])([^">]+)[">]', line)
        if match:
            yield number, match.groups()


def check_the_check():
    """Each of these breaks the arrow, and must be seen to."""
    for path, name in [
        ("src/core/mask.h", "<vector>"),
        ("src/core/mask.h", '"plan/plan.h"'),
        ("src/core/mask.h", '"tessera/problem.hpp"'),
        ("src/plan/select.cpp", '"cpu/backend.h"'),
        ("src/plan/select.cpp", "<cuda.h>"),
        ("src/cuda/driver.cpp", '"cpu/backend.h"'),
        ("src/cuda/launch.cpp", '"cuda/sm90/shape.h"'),
        ("src/cuda/peaks.cpp", '"cuda/sm90/shape.h"'),
        ("src/cuda/sm80/launch.cpp", '"cuda/sm90/shape.h"'),
        ("src/reference/attention.cpp", '"core/mask.h"'),
        ("src/cpu/kernels.cpp", "<cuda_runtime.h>"),
        ("src/plan/select.cpp", "<nlohmann/json.hpp>"),
        ("src/plan/select.cpp", "<immintrin.h>"),
        ("include/tessera/problem.hpp", '"core/mask.h"'),
        ("include/tessera/tessera.h", "<vector>"),
        ("tools/main.cpp", '"cpu/backend.h"'),
        ("tools/main.cpp", '"no/such/file.h"'),
        ("python/native/call.cpp", '"plan/plan.h"'),
        ("tools/main.cpp", "<Python.h>"),
        ("explorer/engine/plans.cpp", '"cpu/backend.h"'),
        ("explorer/engine/plans.cpp", '"check/random.h"'),
        ("explorer/engine/plans.cpp", "<nlohmann/json.hpp>"),
    ]:
        if not violations(path, f"#include {name}\n"):
            sys.exit(f"this test does not see that {path} must not include {name}")


def main():
    check_the_check()
    files = sorted(f.relative_to(SOURCE).as_posix()
                   for folder in ("include", "src", "tools", "python", "explorer")
                   for f in (SOURCE / folder).rglob("*")
                   if f.suffix in {".h", ".hpp", ".cpp", ".c", ".cuh", ".cu", ".inl", ".inc"})
    found = [v for f in files for v in violations(f, (SOURCE / f).read_text())]
    print("\n".join(found) or f"{len(files)} files follow the arrow")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
