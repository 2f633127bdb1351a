"""Errors of attention in 8 bits against the number of keys: bench/results/h200_fp8_lengths.csv.

    gpu_fp8_lengths.py --library build/release/libtessera.so --output FILE [--longest KEYS] [--device cpu]

Relative rms error of o against double on the dequantised tensors, head_dim 128, random normal q and k, values of
which a column has a mean of 0 or half a deviation. `who`:

- e4m3, int8: this library; int8 has values of bf16;
- never, 512: what wgmma's accumulator makes of weights of e4m3 (docs/correctness.md), emulated term by term: never
  promoted to fp32, as in FlashAttention-3 and cuDNN, and every 512 keys, as here where sequences are short.

plot_gpu.py --pass fp8_lengths draws it. Needs PyTorch.
"""

import argparse
import csv
import datetime
import pathlib

import torch

from gpu_check_fp8 import relative_error
from quantized import E4M3, LARGEST
import libtessera

COLUMNS = ["date", "commit", "keys", "mean", "who", "error"]
FRACTION_BITS, STEP, LEAST_EXPONENT = 13, 32, -6  # of the accumulator; keys of one wgmma; of e4m3


def exponent(x):
    """Of the greatest power of 2 that is no larger; of 0 one that is smaller than all."""
    return torch.where(x == 0, -1e9, torch.frexp(x).exponent.double() - 1)


def cut(x, top):
    unit = torch.exp2(top.clamp_min(-500) - FRACTION_BITS)
    return torch.trunc(x / unit) * unit


def accumulate(total, weights, values):
    """total (rows, columns) and a step's products, as the tensor core adds them: reference/emulation.h."""
    of = lambda x: torch.where(x == 0, -1e9, exponent(x).clamp_min(LEAST_EXPONENT))
    top = torch.maximum((of(weights)[:, :, None] + of(values)[None]).amax(1), exponent(total))
    added = cut(total, top) + cut(weights[:, :, None] * values[None], top[:, None]).sum(1)
    return cut(added, exponent(added))


def emulated_error(keys, mean, promote, where, rows=32, columns=64, d=128):
    q, k = (torch.randn(n, d, device=where, dtype=torch.double) for n in (rows, keys))
    v = torch.randn(keys, columns, device=where, dtype=torch.double) + mean
    scale = v.abs().max() / LARGEST[E4M3]
    v = (v / scale).float().to(E4M3).double()
    scores = q @ k.T / d**0.5
    weights = torch.exp2((scores - scores.amax(1, keepdim=True)) / torch.log(torch.tensor(2.0)).item() + 8)
    weights = weights.float().to(E4M3).double()
    o = total = torch.zeros(rows, columns, device=where, dtype=torch.double)
    for first in range(0, keys, STEP):
        total = accumulate(total, weights[:, first:first + STEP], v[first:first + STEP])
        if promote and (first + STEP) % promote == 0:
            o, total = o + total, torch.zeros_like(total)
    o = (o + total) / weights.sum(1, keepdim=True)
    exact = torch.softmax(scores, 1) @ v
    return ((o - exact).square().mean() / exact.square().mean()).sqrt().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", required=True)
    parser.add_argument("--output", type=pathlib.Path, required=True)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--longest", type=int, default=131072)
    parser.add_argument("--device", default="gpu", choices=("gpu", "cpu"))
    arguments = parser.parse_args()
    where = "cuda" if arguments.device == "gpu" else "cpu"
    library = libtessera.Library(arguments.library)
    measures = {
        "e4m3": lambda keys, mean: relative_error(library, where, keys, mean, "token/block:128/channel")[0],
        "int8": lambda keys, mean: relative_error(library, where, keys, mean, "token/block:128/none")[0],
        "never": lambda keys, mean: emulated_error(keys, mean, 0, where),
        "512": lambda keys, mean: emulated_error(keys, mean, 512, where),
    }
    rows = []
    with torch.inference_mode():
        for mean in (0.0, 0.5):
            for keys in (n for n in (1 << i for i in range(10, 18)) if n <= arguments.longest):
                for who, measure in measures.items():
                    rows.append(dict(zip(COLUMNS, (datetime.date.today().isoformat(), arguments.commit, keys, mean, who,
                                                   f"{measure(keys, mean):.5f}"))))
                print(f"{keys} keys, mean {mean}: " +
                      ", ".join(f"{r['who']} {100 * float(r['error']):.2f} %" for r in rows[-len(measures):]),
                      flush=True)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    with arguments.output.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
