"""Draws time and peak memory against sequence length from bench/results/cpu.csv: the README's picture.

    plot.py [--input bench/results/cpu.csv] [--output docs/figures/cpu_speed_memory.svg]

Needs matplotlib. One column of the figure is the forward pass in float32, one forward and backward;
both with d = 64, no mask, all threads.
"""

import argparse
import csv
import pathlib

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.ticker import FuncFormatter, NullLocator  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parent.parent
INK, GRID = "#24292f", "#d0d7de"
# column prefix in the CSV, label, colour, marker
METHODS = (("three_step_", "three steps (BLAS)", "#9a6700", "s"),
           ("torch_", "PyTorch SDPA", "#57606a", "^"),
           ("", "Tessera", "#0969da", "o"))


def read_series(path, direction, dtype, head_dim):
    """Rows of one panel ordered by seqlen: full mask, the most threads that were measured."""
    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file)
                if (row["pass"], row["dtype"], row["d"], row["causal"])
                == (direction, dtype, str(head_dim), "0")]
    threads = max((int(row["threads"]) for row in rows), default=0)
    return sorted((row for row in rows if int(row["threads"]) == threads), key=lambda r: int(r["s"]))


def points(rows, column, scale):
    found = [(int(row["s"]), float(row[column]) * scale) for row in rows if row.get(column)]
    return [p for p in found if p[1] > 0]


def seqlen_label(value, _position=None):
    return f"{value / 1024:g}k" if value >= 1024 else f"{value:g}"


def time_label(value, _position=None):
    return f"{value:g} ms" if value < 1000 else f"{value / 1000:g} s"


def memory_label(value, _position=None):
    return f"{value:g} MB" if value < 1000 else f"{value / 1000:g} GB"


def bare(axis):
    """A grid and numbers, no frame."""
    axis.grid(True, color=GRID, linewidth=0.7)
    axis.tick_params(colors=INK, labelsize=9, length=0)
    for side in axis.spines.values():
        side.set_visible(False)


def draw(axis, rows, column, scale, formatter):
    ends = {}
    for prefix, label, colour, marker in METHODS:
        series = points(rows, prefix + column, scale)
        if not series:
            continue
        axis.plot(*zip(*series), color=colour, marker=marker, markersize=4.5, linewidth=1.8, label=label)
        ends[prefix] = series[-1]
    others = sorted((value, s) for prefix, (s, value) in ends.items() if prefix)
    close = len(others) == 2 and others[1][0] < 1.5 * others[0][0]
    for i, (value, s) in enumerate(others if "" in ends else ()):
        if s == ends[""][0]:
            axis.annotate(f"{value / ends[''][1]:.3g}×", (s, value),
                          xytext=(7, -3 + (6 * (2 * i - 1) if close else 0)),
                          textcoords="offset points", fontsize=9, color=INK)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.xaxis.set_major_formatter(FuncFormatter(seqlen_label))
    axis.yaxis.set_major_formatter(FuncFormatter(formatter))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_minor_locator(NullLocator())
    axis.set_xticks([int(row["s"]) for row in rows])
    axis.margins(x=0.09)
    bare(axis)


STYLE = {"font.family": "DejaVu Sans", "svg.fonttype": "path", "text.color": INK,
         "svg.hashsalt": "tessera"}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--input", type=pathlib.Path, default=ROOT / "bench/results/cpu.csv")
    parser.add_argument("--output", type=pathlib.Path,
                        default=ROOT / "docs/figures/cpu_speed_memory.svg")
    parser.add_argument("--dtype", default="f32", choices=("f32", "bf16"))
    parser.add_argument("--head-dim", type=int, default=64)
    arguments = parser.parse_args()
    plt.rcParams.update(STYLE)
    figure, axes = plt.subplots(2, 2, figsize=(9.2, 6.4), sharex=True)
    heads = threads = "?"
    for column, (direction, title) in enumerate((("fwd", "forward"), ("bwd", "backward"))):
        rows = read_series(arguments.input, direction, arguments.dtype, arguments.head_dim)
        if not rows:
            raise SystemExit(f"plot: {arguments.input} has no {direction} {arguments.dtype} "
                             f"d={arguments.head_dim} rows without a mask")
        heads, threads = rows[0]["h"], rows[0]["threads"]
        draw(axes[0][column], rows, "seconds", 1e3, time_label)
        draw(axes[1][column], rows, "peak_bytes", 1e-6, memory_label)
        axes[0][column].set_title(f"{title}: time", fontsize=11, color=INK, loc="left")
        memory_title = "peak memory" if direction == "fwd" else "peak memory, forward and backward"
        axes[1][column].set_title(f"{title if direction == 'fwd' else 'training'}: {memory_title}",
                                  fontsize=11, color=INK, loc="left")
        axes[1][column].set_xlabel("sequence length", fontsize=10, color=INK)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.suptitle(
        f"Exact attention on {threads} CPU threads, {arguments.dtype}, {heads} heads of "
        f"{arguments.head_dim}", fontsize=13, x=0.012, ha="left", y=0.985)
    figure.legend(handles[::-1], labels[::-1], loc="upper left", ncols=3, frameon=False, fontsize=10,
                  bbox_to_anchor=(0.003, 0.955), borderaxespad=0.0)
    figure.tight_layout(rect=(0, 0, 1, 0.92), h_pad=1.6, w_pad=1.6)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    # No date, so that the file changes only with the data.
    figure.savefig(arguments.output, metadata={"Date": None}, facecolor="white")
    print(f"{arguments.output}: {arguments.output.stat().st_size} bytes")


if __name__ == "__main__":
    main()
