#!/usr/bin/env python3
"""Where a build's time went: seconds of its jobs by kind, read from ninja's log.

usage: build_times.py BUILD_FOLDER

Jobs run side by side, so their sum is more than the wall time; a machine that others use makes both longer.
"""

import re
import sys
from pathlib import Path

# The first that matches what a job makes names its kind.
KINDS = (
    (r"cubins", "GPU kernels"),
    (r"device_compiler", "compiler of the GPU kernels"),
    (r"tessera_cpu_(\w+)\.dir", r"CPU kernels, \1"),
    (r"tessera_(objects|device)|libtessera\.", "rest of the library"),
    (r"tessera_python|_native", "Python module"),
    (r"^tests/|_test|_fuzz", "tests"),
    (r"tools|tessera_(files|check|memory)|^tessera$", "tessera command"),
)


def kind_of(output: str) -> str:
    for pattern, name in KINDS:
        found = re.search(pattern, output)
        if found:
            return found.expand(name)
    return "other"


def jobs(log: Path) -> dict[str, tuple[int, int, str]]:
    """By command: begin and end in ms, and what it makes. The last run of each counts."""
    last: dict[str, tuple[int, int, str]] = {}
    for line in log.read_text().splitlines():
        if not line.startswith("#"):
            begin, end, _, output, command = line.split("\t")
            last[command] = (int(begin), int(end), output)
    return last


def table(folder: Path) -> str:
    sums: dict[str, float] = {}
    all_jobs = jobs(folder / ".ninja_log").values()
    for begin, end, output in all_jobs:
        kind = kind_of(output)
        sums[kind] = sums.get(kind, 0.0) + (end - begin) / 1000
    rows = [f"{seconds:7.1f} s  {kind}" for kind, seconds in sorted(sums.items(), key=lambda item: -item[1])]
    wall = max(end for _, end, _ in all_jobs) / 1000
    return "\n".join([*rows, f"{sum(sums.values()):7.1f} s  all jobs, in {wall:.1f} s"])


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        print(__doc__.strip())
        sys.exit(0 if sys.argv[1:] in (["-h"], ["--help"]) else 2)
    print(table(Path(sys.argv[1])))
