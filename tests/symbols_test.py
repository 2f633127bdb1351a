"""What the binaries show.

1. The shared library exports its API and nothing else: every symbol is named in include/tessera, and
   every function of the C ABI is there.
2. An object compiled for one instruction set defines no external symbol that another object may
   define too: each belongs to the set's own namespace, or is a template over a type of it. Otherwise the linker could pick, say, the AVX-512 copy of an inline function for
   everybody, and the library would crash on a machine without AVX-512.
3. The forward and the backward of every AVX set ask for memory ahead, to read and to write: GCC drops
   calls of functions that do nothing else, and no result would tell.
"""

import os
import pathlib
import re
import subprocess
import sys

SOURCE = pathlib.Path(os.environ["TESSERA_SOURCE"])
BUILD = pathlib.Path(os.environ["TESSERA_BUILD"])
LIBRARY = os.environ["TESSERA_LIBRARY"]


def symbols(*nm_arguments):
    """Mangled names of what a binary defines."""
    out = subprocess.run(["nm", "--defined-only", "--format=posix", *nm_arguments],
                         check=True, capture_output=True, text=True).stdout
    return [line.split()[0] for line in out.splitlines() if line]


def demangled(name):
    return subprocess.run(["c++filt", name], check=True, capture_output=True, text=True).stdout.strip()


def exported_wrongly():
    headers = "".join(h.read_text() for h in (SOURCE / "include/tessera").iterdir())
    exported = symbols("-D", LIBRARY)
    found = []
    for name in exported:
        text = demangled(name)
        entity = text.split("(")[0].split("[abi")[0]
        ours = re.fullmatch(r"tessera_\w+|(.* )?(tessera::|std::hash<tessera::).*", entity)
        words = re.findall(r"\w+", entity)
        if not ours or not re.search(rf"\b{words[-1]}\b", headers):
            found.append(f"exported, but not part of the API: {text}")
    functions = re.findall(r"TESSERA_API[^;(]*?\b(tessera_\w+)\(", headers)
    found += [f"declared in tessera.h, but not exported: {f}"
              for f in functions if f not in exported]
    print(f"{len(exported)} exported symbols, {len(functions)} functions of the C ABI")
    return found


def shared_between_instruction_sets():
    objects = sorted(BUILD.glob("CMakeFiles/tessera_cpu_*.dir/**/*.o"))
    found = []
    for path in objects:
        isa = re.search(r"tessera_cpu_(\w+)\.dir", path.as_posix())[1]
        own = f"tessera::cpu::{isa}::"
        found += [f"{isa}: {text} is external, and not of {own}"
                  for text in map(demangled, symbols("-g", str(path)))
                  if own not in text and not text.startswith("DW.ref.")]
    print(f"{len(objects)} objects compiled for an instruction set of their own")
    return found


def without_prefetches():
    found = []
    for path in sorted(BUILD.glob("CMakeFiles/tessera_cpu_avx*.dir/src/cpu/kernels.cpp.o")):
        listing = subprocess.run(["objdump", "-d", "--no-show-raw-insn", str(path)],
                                 check=True, capture_output=True, text=True).stdout
        asked = set()
        for function in listing.split("\n\n"):
            name, _, code = function.partition("\n")
            for kernel in ("Forward", "Backward"):
                if kernel in name:
                    asked |= {(kernel, i) for i in ("prefetcht1", "prefetchw") if i in code}
        found += [f"{path.parts[-4]}: no {instruction} in any function of {kernel}..."
                  for kernel in ("Forward", "Backward")
                  for instruction in ("prefetcht1", "prefetchw") if (kernel, instruction) not in asked]
    return found


def main():
    found = exported_wrongly() if LIBRARY.endswith(".so") or ".so." in LIBRARY else []
    found += shared_between_instruction_sets() + without_prefetches()
    print("\n".join(found))
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
