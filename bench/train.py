"""Training on an H200 with several attentions, everything else the same: bench/results/h200_train.csv.

    train.py --output bench/results --commit 1234567        on the GPU machine
    train.py --output bench/results --table                 the table of a file that is there
    train.py --output /tmp/try --device cpu --dtype float32 --layers 2 --heads 2 --width 64 --contexts 256 1024
             --tokens 1024 --steps 20 10 --attentions tessera sdpa math      in miniature
    train.py --output bench/results --name h200_train_e4m3.csv --attentions tessera tessera-e4m3 --contexts 8192
             --steps 300 --rounds 1 --limit 1200        8 bits beside 16: the curves of both, from one seed

Runs examples/train_gpt.py, each configuration in a process of its own. The first round trains the first context for
the longest, which is the curve of losses; every further round times all configurations again, in the opposite order.
Each step sees the same number of tokens, whatever the context. A row of the file is a step; tokens_per_s counts from
the end of the warm-up to that step, peak_bytes is the most that was allocated until then. A run that does not fit into
memory is one row, its loss "out of memory". bench/plot_train.py draws the file. Needs PyTorch.
"""

import argparse
import csv
import datetime
import functools
import multiprocessing
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parent.parent
NAME = "h200_train.csv"
COLUMNS = ("date", "commit", "driver", "torch", "attention", "dtype", "layers", "heads", "width", "context", "batch",
           "round", "step", "loss", "tokens_per_s", "peak_bytes")
OUT_OF_MEMORY = "out of memory"


class Cell(NamedTuple):
    """What one attention reaches at one context: medians over the rounds; None where it ran out of memory."""

    tokens_per_s: float | None
    peak_bytes: float | None


def read(path: pathlib.Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def cells(rows: list[dict[str, str]]) -> dict[tuple[str, int], Cell]:
    """By attention and context, from the last step of each run."""
    last: dict[tuple[str, int], dict[str, dict[str, str]]] = {}
    for row in rows:
        last.setdefault((row["attention"], int(row["context"])), {})[row["round"]] = row
    found = {}
    for key, runs in last.items():
        fitting = [run for run in runs.values() if run["loss"] != OUT_OF_MEMORY and run["tokens_per_s"]]
        found[key] = Cell(*(statistics.median(float(run[column]) for run in fitting)
                            for column in ("tokens_per_s", "peak_bytes"))) if fitting else Cell(None, None)
    return found


def curves(rows: list[dict[str, str]]) -> dict[str, list[float]]:
    """The losses of the first round at the first context, by attention; of the longest runs, since the learning rate
    follows from the number of steps."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if (row["round"], row["context"]) == ("1", rows[0]["context"]) and row["loss"] != OUT_OF_MEMORY:
            found.setdefault(row["attention"], []).append(float(row["loss"]))
    longest = max(map(len, found.values()), default=0)
    return {attention: losses for attention, losses in found.items() if len(losses) == longest}


def furthest(one: list[float], other: list[float]) -> float:
    """The largest difference of two curves, step by step."""
    return max((abs(a - b) for a, b in zip(one, other, strict=False)), default=0.0)


def table(rows: list[dict[str, str]]) -> str:
    """Tokens a second, how many times the peer's that is, and peak memory; then how far the curves are apart."""
    found = cells(rows)
    contexts = sorted({context for _, context in found})
    attentions = list(dict.fromkeys(attention for attention, _ in found))
    lines = ["| attention | " + " | ".join(f"context {context:,}" for context in contexts) + " |",
             "|---" * (len(contexts) + 1) + "|"]
    for attention in attentions:
        words = []
        for context in contexts:
            cell, ours = (found.get((name, context), Cell(None, None)) for name in (attention, "tessera"))
            if cell.tokens_per_s is None or cell.peak_bytes is None:
                words.append(OUT_OF_MEMORY if (attention, context) in found else "not run")
                continue
            ratio = f" (Tessera {ours.tokens_per_s / cell.tokens_per_s:.2f} times)" if ours.tokens_per_s else ""
            words.append(f"{cell.tokens_per_s:,.0f} tokens/s{ratio if attention != 'tessera' else ''}, "
                         f"{cell.peak_bytes / 1e9:.2f} GB")
        lines.append(f"| {attention} | " + " | ".join(words) + " |")
    losses = curves(rows)
    for attention, values in losses.items():
        difference = "" if attention == "tessera" or "tessera" not in losses else (
            f", at most {furthest(values, losses['tessera']):.4f} from tessera's in any of "
            f"{min(len(values), len(losses['tessera']))} steps")
        lines += ["", f"{attention}: loss {values[0]:.4f} at first, {statistics.mean(values[-10:]):.4f} over the last "
                      f"{min(10, len(values))} of {len(values)} steps{difference}"]
    return "\n".join(lines)


def driver() -> str:
    try:
        done = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
                              capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "none"
    return done.stdout.splitlines()[0].strip()


def schedule(options: argparse.Namespace) -> Iterator[tuple[int, str, int, int]]:
    """(round, attention, context, steps): shortest contexts first, then back and forth."""
    first = options.contexts[0]
    runs = [(attention, context, steps) for context, steps in zip(options.contexts, options.steps, strict=True)
            for attention in options.attentions]
    for turn in range(1, options.rounds + 1):
        for attention, context, steps in runs if turn % 2 else reversed(runs):
            # Only those of the first round are drawn over the steps, and cuDNN's is PyTorch's curve once more.
            brief = context == first and (turn > 1 or attention == "cudnn")
            yield turn, attention, context, min(options.steps) if brief else steps


def run(arguments: list[str]) -> None:
    import train_gpt

    sys.exit(train_gpt.main(arguments))


def measure(options: argparse.Namespace, attention: str, context: int, steps: int) -> list[dict[str, str]]:
    """The rows that train_gpt writes in a process of its own, or the one row of a run out of memory; none if it failed
    in any other way."""
    import train_gpt

    with tempfile.NamedTemporaryFile(suffix=".csv") as file:
        given = {"attention": attention, "context": context, "batch": options.tokens // context, "steps": steps,
                 "csv": file.name, "validation": 0,
                 **{name: getattr(options, name) for name in ("device", "dtype", "layers", "heads", "width", "lr",
                                                              "seed", "warmup")}}
        arguments = [f"--{name}={value}" for name, value in given.items()]
        # Forked: PyTorch is imported, which takes longer than many a run, but the GPU is untouched as yet.
        process = multiprocessing.get_context("fork").Process(target=run, args=(arguments,))
        process.start()
        process.join(options.limit)
        if process.is_alive():
            process.kill()
            process.join()
        if process.exitcode == train_gpt.OUT_OF_MEMORY:
            return [{"step": "0", "loss": OUT_OF_MEMORY, "tokens_per_s": "", "peak_bytes": ""}]
        if process.exitcode != 0:
            print(f"train: FAILED with {process.exitcode}: train_gpt.py {' '.join(arguments)}", flush=True)
            return []
        return read(pathlib.Path(file.name))


def everything(options: argparse.Namespace, path: pathlib.Path) -> int:
    """Writes each run's rows as it ends; returns how many runs failed."""
    sys.path.insert(0, str(ROOT / "examples"))
    import torch
    import train_gpt

    if any(name.startswith("tessera") for name in options.attentions):
        import tessera.torch  # noqa: F401

    train_gpt.standard_library()  # read once, as well
    began, runs, skipped, failed = time.monotonic(), list(schedule(options)), 0, 0
    hopeless: set[tuple[str, int]] = set()  # out of memory or failed: again if tried again
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        common = {"date": datetime.date.today().isoformat(), "commit": options.commit, "driver": driver(),
                  "torch": torch.__version__, "dtype": options.dtype, "layers": options.layers, "heads": options.heads,
                  "width": options.width}
        for number, (turn, attention, context, steps) in enumerate(runs, 1):
            if (attention, context) in hopeless:
                continue
            seconds = time.monotonic() - began
            if seconds > options.limit:
                skipped += 1
                continue
            print(f"\n[{number}/{len(runs)}, {seconds:.0f} s] {attention}, context {context:,}, {steps} steps, round "
                  f"{turn}", flush=True)
            rows = measure(options, attention, context, steps)
            failed += not rows
            if not rows or rows[0]["loss"] == OUT_OF_MEMORY:
                hopeless.add((attention, context))
            writer.writerows(common | {"attention": attention, "context": context, "batch": options.tokens // context,
                                       "round": turn} | row for row in rows)
            file.flush()
    print(f"\n{time.monotonic() - began:.0f} s; of {len(runs)} runs {failed} failed, {skipped} found no time\n")
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = functools.partial(parser.add_argument, metavar="N", type=int)
    parser.add_argument("--output", type=pathlib.Path, required=True, metavar="FOLDER", help="where the file goes")
    parser.add_argument("--name", default=NAME, metavar="FILE", help="default: %(default)s")
    parser.add_argument("--table", action="store_true", help="print the table of the file that is there; run nothing")
    parser.add_argument("--commit", default="unknown", help="of the sources, for the file")
    parser.add_argument("--attentions", nargs="+", default=["tessera", "cudnn", "sdpa", "math"], metavar="NAME",
                        help="default: %(default)s")
    add("--contexts", nargs="+", default=[2048, 8192, 32768], help="default: %(default)s")
    add("--steps", nargs="+", default=[240, 24, 16], help="of each context; default: %(default)s")
    add("--tokens", default=32768, help="a step; default: %(default)s")
    add("--rounds", default=2, help="default: %(default)s")
    add("--limit", default=240,
        help="seconds that one run may take, and after which no further one starts; default: %(default)s")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="default: %(default)s")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="default: %(default)s")
    add("--layers", default=8, help="default: %(default)s")
    add("--heads", default=8, help="default: %(default)s")
    add("--width", default=1024, help="default: %(default)s")
    parser.add_argument("--lr", metavar="RATE", type=float, default=2e-4, help="default: %(default)s")
    add("--seed", default=1, help="default: %(default)s")
    add("--warmup", default=5, help="steps that tokens/s leaves out; default: %(default)s")
    options = parser.parse_args()
    if len(options.steps) != len(options.contexts):
        parser.error(f"--steps has {len(options.steps)} numbers for {len(options.contexts)} contexts")
    if any(options.tokens % context for context in options.contexts):
        parser.error(f"--tokens {options.tokens} is not a multiple of every context")
    if min(options.steps) <= options.warmup:
        parser.error(f"--steps {min(options.steps)} leaves nothing to time after --warmup {options.warmup}")
    path = options.output / options.name
    failed = 0
    if not options.table:
        options.output.mkdir(parents=True, exist_ok=True)
        failed = everything(options, path)
    print(table(read(path)), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
