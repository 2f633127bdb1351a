"""Draws bench/results/h200_train.csv: losses over steps, tokens a second and peak memory against the context.

    plot_train.py [--input bench/results/h200_train.csv] [--output docs/figures/h200_train.svg]
    plot_train.py --input bench/results/h200_train_e4m3.csv --output docs/figures/h200_train_e4m3.svg

train.py --table prints the numbers. Needs matplotlib.
"""

import argparse
import pathlib
from collections.abc import Callable

from plot import INK, ROOT, STYLE, bare, plt, seqlen_label
from plot_gpu import save
from train import Cell, cells, curves, read

# Attention in the file: label, colour, marker, width of its curve. Drawn in this order, thinner and thinner, so that
# curves which lie on each other all show.
STYLES = {"math": ("three steps of PyTorch", "#9a6700", "s", 5.0), "sdpa": ("PyTorch SDPA", "#57606a", "^", 2.8),
          "cudnn": ("PyTorch SDPA, cuDNN", "#1a7f37", "D", 2.0),
          "tessera-e4m3": ("Tessera, e4m3", "#cf222e", "v", 1.8), "tessera": ("Tessera", "#0969da", "o", 1.0)}


def draw_curves(axis, losses: dict[str, list[float]]) -> None:
    for name in STYLES:
        if values := losses.get(name):
            _, colour, _, width = STYLES[name]
            axis.plot(range(1, len(values) + 1), values, color=colour, linewidth=width)
    axis.set_xlabel("step", fontsize=10, color=INK)
    bare(axis)


def draw_cells(axis, found: dict[tuple[str, int], Cell], value: Callable[[Cell], float]) -> None:
    """One line an attention; words beside its last point say if the next context ran out of memory."""
    contexts = sorted({context for _, context in found})
    for name, (label, colour, marker, _) in STYLES.items():
        fits = [(context, value(found[name, context])) for context in contexts
                if (name, context) in found and found[name, context].tokens_per_s]
        if fits:
            axis.plot(*zip(*fits, strict=True), color=colour, marker=marker, markersize=4.5, linewidth=1.8, label=label)
        full = [c for c in contexts if (name, c) in found and not found[name, c].tokens_per_s]
        if fits and full:
            axis.annotate(f"{seqlen_label(full[0])}: out\nof memory", fits[-1], xytext=(6, 0), va="center",
                          textcoords="offset points", fontsize=8.5, color=colour)
    axis.set_xscale("log", base=2)
    axis.set_xticks(contexts, [seqlen_label(context) for context in contexts])
    axis.minorticks_off()
    axis.set_ylim(0)
    axis.margins(x=0.09)
    axis.set_xlabel("context", fontsize=10, color=INK)
    bare(axis)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", type=pathlib.Path, metavar="FILE", default=ROOT / "bench/results/h200_train.csv")
    parser.add_argument("--output", type=pathlib.Path, metavar="FILE", default=ROOT / "docs/figures/h200_train.svg")
    arguments = parser.parse_args()
    rows = read(arguments.input)
    found, first = cells(rows), rows[0]
    plt.rcParams.update(STYLE)
    figure, axes = plt.subplots(1, 3, figsize=(11.4, 4.0))
    draw_curves(axes[0], curves(rows))
    draw_cells(axes[1], found, lambda cell: cell.tokens_per_s / 1e3)
    draw_cells(axes[2], found, lambda cell: cell.peak_bytes / 1e9)
    for axis, title in zip(axes, (f"loss, nats a byte, context {seqlen_label(int(first['context']))}",
                                  "thousand tokens a second", "peak memory, GB"), strict=True):
        axis.set_title(title, fontsize=10.5, color=INK, loc="left")
    head_dim = int(first["width"]) // int(first["heads"])
    tokens = int(first["batch"]) * int(first["context"])
    title = (f"Training a GPT on one H200: {first['layers']} layers of {first['heads']} heads of {head_dim}, "
             f"{first['dtype']}, {tokens:,} tokens a step")
    figure.suptitle(title, fontsize=12.5, x=0.012, ha="left", y=0.985)
    handles, labels = axes[1].get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="upper left", ncols=4, frameon=False, fontsize=10,
                  bbox_to_anchor=(0.003, 0.935), borderaxespad=0.0)
    figure.tight_layout(rect=(0, 0, 1, 0.89))
    save(figure, arguments.output)


if __name__ == "__main__":
    main()
