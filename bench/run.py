"""./dev bench: measures the CPU library and refreshes bench/results/ and the figures.

  1. every problem of bench/problems/cpu.txt on one thread and on all, as a share of the multiply-add
     peak measured around it, and decoding as a share of a plain read  -> results/cpu_peak.csv
  2. beside PyTorch's CPU attention and three steps over BLAS: time and peak memory against seqlen
     -> results/cpu.csv (bench/peers.py), docs/figures/ (bench/plot.py)

Step 2 needs NumPy, PyTorch and matplotlib, which ./dev bench installs into .venv; --no-peers leaves it out.
"""

import argparse
import csv
import datetime
import json
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
COLUMNS = ["date", "commit", "problem", "heads", "kernel", "threads", "seconds", "gflops",
           "peak_gflops", "share_of_peak", "best_seconds", "best_share_of_peak", "kv_gbytes",
           "read_gbytes", "share_of_read", "workspace_bytes"]


def commit_name():
    output = subprocess.run(["git", "describe", "--always", "--dirty", "--abbrev=10"], cwd=ROOT,
                            capture_output=True, text=True, check=True)
    return output.stdout.strip()


# file of problems, where the heads lie in memory, flags of `tessera bench`
RUNS = (("cpu.txt", "inside", []),
        ("cpu_avx2.txt", "inside", ["--device", "avx2"]),
        ("cpu_decode.txt", "inside", ["--cold"]),
        ("cpu_decode.txt", "outside", ["--cold", "--heads-outside"]),
        ("cpu_decode_8bit.txt", "inside", ["--cold"]),
        ("cpu_decode_8bit.txt", "outside", ["--cold", "--heads-outside"]))


def bench(command, problems, threads, seconds, flags):
    """One call of `tessera bench` on a file of problems; a list of rows."""
    arguments = [command, "bench", "--file", problems, "--threads", str(threads), "--seconds",
                 str(seconds), "--json", *flags]
    return json.loads(subprocess.run(arguments, capture_output=True, text=True, check=True).stdout)


def row_of(measured, heads, date, commit):
    share_of_read = measured["kv_bytes_per_second"] / measured["peak_read_bytes_per_second"]
    return {
        "date": date,
        "commit": commit,
        "problem": measured["problem"],
        "heads": heads,
        "kernel": measured["kernel"],
        "threads": measured["threads"],
        "seconds": f"{measured['seconds']:.6g}",
        "gflops": f"{measured['flops_per_second'] / 1e9:.1f}",
        "peak_gflops": f"{measured['peak_flops_per_second'] / 1e9:.1f}",
        "share_of_peak": f"{measured['share_of_peak']:.3f}",
        "best_seconds": f"{measured['best_seconds']:.6g}",
        "best_share_of_peak": f"{measured['best_share_of_peak']:.3f}",
        "kv_gbytes": f"{measured['kv_bytes_per_second'] / 1e9:.2f}",
        "read_gbytes": f"{measured['peak_read_bytes_per_second'] / 1e9:.2f}",
        "share_of_read": f"{share_of_read:.3f}",
        "workspace_bytes": measured["workspace_bytes"],
    }


def measure_shares(build, seconds, commit, output, runs=RUNS):
    date = datetime.date.today().isoformat()
    command = build / "tessera"
    rows = []
    for threads in sorted({1, len(os.sched_getaffinity(0))}):
        for name, heads, flags in runs:
            print(f"{name}, heads {heads}, {threads} thread(s)", flush=True)
            for measured in bench(command, ROOT / "bench/problems" / name, threads, seconds, flags):
                rows.append(row_of(measured, heads, date, commit))
                what, share = (("read", "share_of_read") if "--cold" in flags
                               else ("peak", "share_of_peak"))
                print(f"  {measured['problem']:58} {100 * float(rows[-1][share]):5.1f} % of {what}",
                      flush=True)
    output.parent.mkdir(parents=True, exist_ok=True)
    with open(output, "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print(f"wrote {output}")


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=pathlib.Path, required=True, help="folder of the release build")
    parser.add_argument("--seconds", type=float, default=1.0, help="of timing per problem")
    parser.add_argument("--commit", default=commit_name(), help="of the build, if not this checkout")
    parser.add_argument("--no-peers", action="store_true", help="only shares of the peak")
    parser.add_argument("--decoding", type=pathlib.Path, metavar="FILE", help="only decoding, of step 1, to this file")
    arguments = parser.parse_args()
    if arguments.decoding:
        measure_shares(arguments.build.resolve(), arguments.seconds, arguments.commit, arguments.decoding.resolve(),
                       [run for run in RUNS if "--cold" in run[2]])
        return
    measure_shares(arguments.build.resolve(), arguments.seconds, arguments.commit,
                   ROOT / "bench/results/cpu_peak.csv")
    if not arguments.no_peers:
        library = arguments.build.resolve() / "libtessera.so"
        subprocess.run([sys.executable, ROOT / "bench/peers.py", "--library", library,
                        "--commit", arguments.commit], check=True)
        subprocess.run([sys.executable, ROOT / "bench/plot.py"], check=True)


if __name__ == "__main__":
    main()
