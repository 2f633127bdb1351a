"""Draws bench/results/h200_{forward,backward,layer,fp8_lengths}.csv, and prints the tables of docs/performance.md (--table).

    plot_gpu.py [--pass forward|backward|layer|fp8_lengths] [--table]

One panel a head dim and mask: TFLOP/s against sequence length. FlashAttention-3 is drawn as it stood to cuDNN
in bench/results/h200_peers.csv, from cuDNN in the same run. Where the file has several runs of a cell, their median
stands for it. Needs matplotlib.
"""

import argparse
import csv
import pathlib
import statistics

from plot import INK, ROOT, STYLE, bare, plt, seqlen_label


def read(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def medians(rows):
    """One row a cell: the median over its runs of what was measured."""
    cells = {}
    for r in rows:
        cells.setdefault((r["dtype"], r["d"], r["causal"], r["s"]), []).append(r)
    return [runs[0] | {c: statistics.median(float(r[c]) for r in runs)
                       for c in ("tessera", "cudnn", "bar", "of_bar")} for runs in cells.values()]


def fa3_over_cudnn(direction):
    return {(r["d"], r["causal"], r["s"]): float(r[f"fa3_{direction}"]) / float(r[f"cudnn_{direction}"])
            for r in read(ROOT / "bench/results/h200_peers.csv")}


def panels(rows):
    """((d, causal), rows by seqlen), in the order of the file."""
    keys = dict.fromkeys((r["d"], r["causal"]) for r in rows)
    return [(key, sorted((r for r in rows if (r["d"], r["causal"]) == key), key=lambda r: int(r["s"])))
            for key in keys]


def table(rows):
    for dtype in dict.fromkeys(r["dtype"] for r in rows):
        chosen = [r for r in rows if r["dtype"] == dtype]
        lengths = sorted({int(r["s"]) for r in chosen})
        print(f"| {dtype} | " + " | ".join(seqlen_label(s) for s in lengths) + " |")
        print("|---" * (len(lengths) + 1) + "|")
        for (d, causal), cells in panels(chosen):
            by_length = {int(r["s"]): r for r in cells}
            words = [f"{float(r['tessera']):.0f} / {float(r['cudnn']):.0f} ({float(r['of_bar']):.2f})"
                     if (r := by_length.get(s)) else "" for s in lengths]
            print(f"| d = {d} {'causal' if causal == '1' else 'full'} | " + " | ".join(words) + " |")
        shares = [float(r["of_bar"]) for r in chosen]
        print(f"\n{dtype}: geometric mean {statistics.geometric_mean(shares):.3f} of the bar, least "
              f"{min(shares):.3f}\n")


def draw(rows, output, direction, title):
    plt.rcParams.update(STYLE)
    factors = fa3_over_cudnn(direction)
    every = panels([r for r in rows if r["dtype"] == "bf16"])
    dims = list(dict.fromkeys(d for (d, _), _ in every))
    figure, axes = plt.subplots(2, len(dims), figsize=(3.4 * len(dims), 5.8), sharex=True, sharey="col")
    for (d, causal), cells in every:
        axis = axes[int(causal)][dims.index(d)]
        x = [int(r["s"]) for r in cells]
        cudnn = [float(r["cudnn"]) for r in cells]
        fa3 = [c * factors[d, causal, r["s"]] for c, r in zip(cudnn, cells)]
        for values, label, colour, marker in ((cudnn, "cuDNN", "#57606a", "^"),
                                              (fa3, "FlashAttention-3", "#9a6700", "s"),
                                              ([float(r["tessera"]) for r in cells], "Tessera", "#0969da",
                                               "o")):
            axis.plot(x, values, color=colour, marker=marker, markersize=4.5, linewidth=1.8, label=label)
        axis.set_xscale("log", base=2)
        axis.set_xticks(x, [seqlen_label(s) for s in x])
        axis.minorticks_off()
        axis.set_ylim(0, 1.05 * max(float(r["tessera"]) for r in rows if r["d"] == d))
        axis.set_title(f"d = {d}, {'causal' if causal == '1' else 'full'}", fontsize=10.5, color=INK,
                       loc="left")
        bare(axis)
    for axis in axes[1]:
        axis.set_xlabel("sequence length", fontsize=10, color=INK)
    for row in axes:
        row[0].set_ylabel("TFLOP/s", fontsize=10, color=INK)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.suptitle(f"{title} on one H200, bf16, 16,384 tokens, hidden size 2048", fontsize=13, x=0.012,
                    ha="left", y=0.985)
    figure.legend(handles[::-1], labels[::-1], loc="upper left", ncols=3, frameon=False, fontsize=10,
                  bbox_to_anchor=(0.003, 0.955), borderaxespad=0.0)
    figure.tight_layout(rect=(0, 0, 1, 0.92))
    save(figure, output)


def draw_layer(rows, output):
    """Time and peak memory of forward and backward against the sequence length."""
    plt.rcParams.update(STYLE)
    figure, axes = plt.subplots(1, 2, figsize=(8.6, 3.8))
    styles = {"three steps": ("three steps of PyTorch", "#9a6700", "s"), "cudnn": ("cuDNN", "#57606a", "^"),
              "tessera": ("Tessera", "#0969da", "o")}
    for axis, column, label in ((axes[0], "ms", "milliseconds"), (axes[1], "mb", "peak memory, MB")):
        for who, (name, colour, marker) in styles.items():
            mine = [r for r in rows if r["who"] == who]
            axis.plot([int(r["s"]) for r in mine], [float(r[column]) for r in mine], color=colour, marker=marker,
                      markersize=4.5, linewidth=1.8, label=name)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        lengths = sorted({int(r["s"]) for r in rows})
        axis.set_xticks(lengths, [seqlen_label(s) for s in lengths])
        axis.minorticks_off()
        axis.set_xlabel("sequence length", fontsize=10, color=INK)
        axis.set_ylabel(label, fontsize=10, color=INK)
        bare(axis)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.suptitle("Forward and backward, 16 causal heads of 128, bf16, one H200", fontsize=12.5, x=0.012, ha="left",
                    y=0.985)
    figure.legend(handles[::-1], labels[::-1], loc="upper left", ncols=3, frameon=False, fontsize=10,
                  bbox_to_anchor=(0.003, 0.93), borderaxespad=0.0)
    figure.tight_layout(rect=(0, 0, 1, 0.88))
    save(figure, output)


def draw_lengths(rows, output):
    """Errors of 8 bits against the number of keys, beside those of an accumulator that is never promoted."""
    plt.rcParams.update(STYLE)
    figure, axes = plt.subplots(1, 2, figsize=(8.6, 3.8), sharey=True)
    styles = {"never": ("e4m3, emulated, never promoted", "#9a6700", "s"),
              "512": ("e4m3, emulated, promoted every 512 keys", "#57606a", "^"),
              "e4m3": ("Tessera, e4m3", "#0969da", "o"), "int8": ("Tessera, int8 scores", "#1a7f37", "D")}
    for axis, mean in zip(axes, ("0.0", "0.5")):
        for who, (name, colour, marker) in styles.items():
            mine = [r for r in rows if r["who"] == who and r["mean"] == mean]
            axis.plot([int(r["keys"]) for r in mine], [100 * float(r["error"]) for r in mine], color=colour,
                      marker=marker, markersize=4.5, linewidth=1.8, label=name)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        lengths = sorted({int(r["keys"]) for r in rows})
        axis.set_xticks(lengths, [seqlen_label(s) for s in lengths])
        axis.minorticks_off()
        axis.set_xlabel("keys", fontsize=10, color=INK)
        axis.set_title(f"values of mean {mean}, deviation 1", fontsize=10.5, color=INK, loc="left")
        bare(axis)
    axes[0].set_ylabel("relative rms error of o, %", fontsize=10, color=INK)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.suptitle("Error against length, head_dim 128, one H200", fontsize=12.5, x=0.012, ha="left", y=0.985)
    figure.legend(handles[::-1], labels[::-1], loc="upper left", ncols=2, frameon=False, fontsize=10,
                  bbox_to_anchor=(0.003, 0.93), borderaxespad=0.0)
    figure.tight_layout(rect=(0, 0, 1, 0.82))
    save(figure, output)


def save(figure, output):
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, metadata={"Date": None}, facecolor="white")
    print(f"{output}: {output.stat().st_size} bytes")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pass", dest="what", choices=("forward", "backward", "layer", "fp8_lengths"),
                        default="forward")
    parser.add_argument("--table", action="store_true", help="print the table instead")
    arguments = parser.parse_args()
    rows = read(ROOT / f"bench/results/h200_{arguments.what}.csv")
    output = ROOT / f"docs/figures/h200_{arguments.what}.svg"
    if arguments.what in ("layer", "fp8_lengths"):
        (draw_layer if arguments.what == "layer" else draw_lengths)(rows, output)
        return
    for ordered in ("0", "1"):
        chosen = medians([r for r in rows if r.get("deterministic", "0") == ordered])
        if arguments.table and chosen:
            print("deterministic:\n" if ordered == "1" else "")
            table(chosen)
        elif chosen and ordered == "0":
            draw(chosen, output, "fwd" if arguments.what == "forward" else "bwd",
                 f"{arguments.what.capitalize()} pass")


if __name__ == "__main__":
    main()
