"""Two or more builds of the CPU library in turns: which is faster, on a machine whose speed drifts.

Every problem is measured by each build's `tessera bench` in turn, --rounds times, in an order drawn anew
each round; printed and written are medians of the share of the peak, and their ratio to the first build's.
Shares of one build at different hours differ by more than a change of the code is worth.
"""

import argparse
import csv
import datetime
import json
import pathlib
import random
import statistics
import subprocess

ROOT = pathlib.Path(__file__).resolve().parent.parent


def problems_of(path):
    lines = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
    return [line for line in lines if line]


def share(build, problem, arguments):
    command = [build / "tessera", "bench", problem, "--json", "--threads", str(arguments.threads),
               "--seconds", str(arguments.seconds), "--device", arguments.device]
    command += ["--cold"] if arguments.cold else []
    command += ["--heads-outside"] if arguments.heads_outside else []
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    measured = json.loads(result.stdout)[0]
    if arguments.cold:
        return measured["kv_bytes_per_second"] / measured["peak_read_bytes_per_second"]
    return measured["share_of_peak"]


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--builds", type=pathlib.Path, nargs="+", required=True, metavar="FOLDER",
                        help="folders with a `tessera` command each; the first is what is compared with")
    parser.add_argument("--names", nargs="+", help="of the builds, as written down; else their folders")
    parser.add_argument("--file", type=pathlib.Path, default=ROOT / "bench/problems/cpu.txt",
                        help="of problems, one a line (default: bench/problems/cpu.txt)")
    parser.add_argument("--device", default="cpu", help="cpu or an instruction set (default: cpu)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.3, help="of one measurement")
    parser.add_argument("--cold", action="store_true", help="decoding: share of a plain read")
    parser.add_argument("--heads-outside", action="store_true")
    parser.add_argument("--out", type=pathlib.Path, help="CSV to write")
    arguments = parser.parse_args()
    names = arguments.names or [str(build) for build in arguments.builds]
    if len(names) != len(arguments.builds):
        parser.error(f"--names: {len(names)} for {len(arguments.builds)} builds")

    date = datetime.date.today().isoformat()
    rows, ratios = [], []
    for problem in problems_of(arguments.file):
        shares = {name: [] for name in names}
        for _ in range(arguments.rounds):
            turns = list(zip(names, arguments.builds))
            random.shuffle(turns)
            for name, build in turns:
                shares[name].append(share(build, problem, arguments))
        medians = [statistics.median(shares[name]) for name in names]
        ratios.append([median / medians[0] for median in medians])
        print(f"{problem:44} " + " ".join(f"{100 * median:6.1f}" for median in medians) +
              "   of the first " + " ".join(f"{ratio:.3f}" for ratio in ratios[-1][1:]), flush=True)
        layout = "outside" if arguments.heads_outside else "inside"
        rows += [{"date": date, "build": name, "problem": problem, "layout": layout,
                  "threads": arguments.threads, "rounds": arguments.rounds, "share": f"{median:.3f}"}
                 for name, median in zip(names, medians)]
    means = [statistics.geometric_mean(column) for column in zip(*ratios)]
    print("geometric mean of the first: " + " ".join(f"{mean:.3f}" for mean in means[1:]))
    if arguments.out:
        with open(arguments.out, "w", newline="") as file:
            writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
