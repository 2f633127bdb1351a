"""What `pip install .` takes in a fresh environment, and where the time goes.

    install.py [--csv FILE] [--commit REV]

Makes an environment, installs the package of this checkout into it, and prints wall and CPU seconds of the whole and of
the build's jobs by kind (cmake/build_times.py). Where CPU seconds are far below cores times wall, the machine was busy
with something else or waited for downloads.
"""

import argparse
import csv
import datetime
import os
import resource
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "cmake"))

from build_times import jobs, table  # noqa: E402


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, help="append the result to this file")
    parser.add_argument("--commit", default="", help="what the file says of the commit")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        environment, build = Path(folder, "environment"), Path(folder, "build")
        venv.create(environment, with_pip=True)
        command = [environment / "bin/pip", "install", "--no-cache-dir", "-Cbuild-dir=" + str(build), str(ROOT)]
        print(f"pip install {ROOT.name}, {os.cpu_count()} cores ...", flush=True)
        start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(command, capture_output=True, text=True)
        wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
        if done.returncode != 0:
            sys.exit(done.stdout + done.stderr)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        compiling = max(end for _, end, _ in jobs(build / ".ninja_log").values()) / 1000
        print(table(build))
        print(f"{wall:7.1f} s  pip install .: {cpu:.1f} CPU seconds; {wall - compiling:.1f} s before and after the build")
    if arguments.csv:
        new = not arguments.csv.exists()
        with arguments.csv.open("a", newline="") as file:
            rows = csv.writer(file, lineterminator="\n")
            if new:
                rows.writerow(["date", "commit", "cores", "wall_s", "cpu_s", "build_s"])
            today = datetime.date.today().isoformat()
            rows.writerow([today, arguments.commit, os.cpu_count(), f"{wall:.1f}", f"{cpu:.1f}", f"{compiling:.1f}"])


if __name__ == "__main__":
    main()
