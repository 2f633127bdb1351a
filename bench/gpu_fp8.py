"""The forward pass in FP8 on an H200 beside cuDNN's, cell by cell, in one run: bench/results/h200_fp8.csv.

    gpu_fp8.py --library build/release/libtessera.so --output FILE [--mode inputs rows quantize scores]
               [--seqlen ...]

The grid of gpu_forward.py; inputs random normal. Modes:

- inputs: q, k and v are of 8 bits already, v in tiles; `tessera` beside cuDNN's FP8 (scales of 1, output of 8 bits;
  ours is bf16). `bar` is the better of FlashAttention-3 and cuDNN as h200_fp8_peers.csv has them, times what cuDNN
  reaches in this run over what it reached there.
- rows: the same with v in rows, as FlashAttention-3 and cuDNN take it: laying it out as tiles is part of the time.
- scores: q and k are i8 already, v is bf16; `bar` is our own bf16 kernel.
- quantize: from bf16, quantising included (rows of q, blocks of 96 or 128 keys, columns of v); `bar` is our own bf16
  kernel.

All take turns within a cell; medians of CUDA-event times. FLOPs: 4 b h s s d, halved when causal. The last line is the
quantiser's share of a copy's rate. Needs PyTorch, and for cuDNN the wheel nvidia-cudnn-frontend on PYTHONPATH.
"""

import argparse
import csv
import datetime
import pathlib
import statistics

import torch

from gpu_forward import HIDDEN, TOKENS, query, time_calls, workspace_of, write
from quantized import E4M3, Quantized, cudnn_forward
import libtessera

COLUMNS = ["date", "commit", "driver", "sm_mhz", "mode", "layout", "d", "causal", "s", "b", "h", "kernel", "tessera",
           "cudnn", "bar", "of_bar", "difference"]
OF_INPUTS = ("inputs", "rows")  # beside cuDNN


def peer_factors():
    """(d, causal, s): the better peer over cuDNN."""
    path = pathlib.Path(__file__).resolve().parent / "results/h200_fp8_peers.csv"
    with path.open(newline="") as file:
        return {(int(r["d"]), int(r["causal"]), int(r["s"])): max(1.0, float(r["best_over_cudnn"]))
                for r in csv.DictReader(file)}


def scales_of(d):
    """The smallest blocks of keys that all rows take are quantised fastest."""
    return f"token/block:{96 if d <= 128 else 128}/channel"


def medians(functions, flops, rounds):
    """TFLOP/s of each, which take turns."""
    times = {name: [] for name in functions}
    calls = max(3, min(60, int(0.012 / (flops / 8e14))))
    for _ in range(rounds):
        for name, function in functions.items():
            times[name].append(time_calls(function, calls))
    return {name: flops / statistics.median(t) * 1e-12 for name, t in times.items()}


def measure(library, mode, d, causal, s, rounds):
    """(b, h, kernel, rates, difference): rates of `ours` and its peer."""
    b, h = TOKENS // s, HIDDEN // d
    mask = " causal" if causal else ""
    stream = torch.cuda.current_stream().cuda_stream
    q, k, v = (torch.randn(b, s, h, d, device="cuda").bfloat16() for _ in range(3))
    o = torch.empty_like(q)
    lse = torch.empty(b, h, s, device="cuda")
    flops = 4 * b * h * s * s * d / (2 if causal else 1)
    tiles = "" if mode == "rows" else " v_tiles"
    line = f"fwd e4m3 b={b} h={h} q={s} k={s} d={d}{mask}{tiles} scales="
    if mode == "scores":
        line = f"fwd i8 b={b} h={h} q={s} k={s} d={d}{mask} v=bf16 scales="
    if mode not in OF_INPUTS:
        made = Quantized(library, line + ("token/block:128/none" if mode == "scores" else scales_of(d)), q, k, v)
        plan, attend = made.attend(library, "gpu", o, lse, stream)
        ours = lambda: (made.run("gpu", stream), attend())
        wide = library.plan(f"fwd bf16 b={b} h={h} q={s} k={s} d={d}{mask}", "gpu")
        other = torch.empty_like(o)
        tensors = wide.tensors(q=q, k=k, v=v, o=other, softmax_lse=lse)
        workspace = workspace_of(wide)
        peer = lambda: wide.enqueue(tensors, stream, workspace)
        if mode == "scores":
            made.run("gpu", stream)
            ours = attend
    else:
        made = Quantized(library, line + "tensor/tensor/tensor", q, k, v)
        for scale in made.scales.values():
            scale.fill_(1.0)  # as cuDNN's here: numbers as they come
        made.run("gpu", stream)
        plan, ours = made.attend(library, "gpu", o, lse, stream)
        peer, other = cudnn_forward(made.q, made.k, v.to(E4M3), causal)
    ours()
    peer()
    difference = ((o.float() - other.float()).square().mean() / other.float().square().mean()).sqrt().item()
    return b, h, plan.kernel, medians({"ours": ours, "peer": peer}, flops, rounds), difference


def quantizer_rate(library, rounds):
    """Bytes a second of quantising 16,384 rows of 2048 columns, and of a copy that reads and writes as many."""
    q, k, v = (torch.randn(1, TOKENS, 16, 128, device="cuda").bfloat16() for _ in range(3))
    line = f"fwd e4m3 b=1 h=16 q={TOKENS} k={TOKENS} d=128 v_tiles scales={scales_of(128)}"
    stream = torch.cuda.current_stream().cuda_stream
    signs = torch.randint(0, 2, (128,), device="cuda") * 2.0 - 1.0
    made = Quantized(library, line, q, k, v, hadamard=128, signs=signs)
    moved = 3 * q.numel() * 3  # two bytes read and one written
    source = torch.empty(moved // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    rates = medians({"ours": lambda: made.run("gpu", stream), "copy": lambda: target.copy_(source)}, moved, rounds)
    return rates["ours"], rates["copy"]  # TB/s


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", required=True)
    parser.add_argument("--output", type=pathlib.Path, required=True)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--mode", nargs="+", choices=("inputs", "rows", "quantize", "scores"),
                        default=("inputs", "rows", "quantize", "scores"))
    parser.add_argument("--head-dim", nargs="+", type=int, default=(64, 128, 256))
    parser.add_argument("--seqlen", nargs="+", type=int, default=[512 << i for i in range(6)])
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    library = libtessera.Library(arguments.library)
    factors = peer_factors()
    rows = []
    for mode in arguments.mode:
        for d in arguments.head_dim:
            for causal in (False, True):
                for s in arguments.seqlen:
                    b, h, kernel, rate, difference = measure(library, mode, d, causal, s, arguments.rounds)
                    bar = rate["peer"] * (factors.get((d, int(causal), s), 1.0) if mode in OF_INPUTS else 1.0)
                    rows.append(dict(zip(COLUMNS, (
                        datetime.date.today().isoformat(), arguments.commit, query("driver_version"),
                        query("clocks.sm"), mode, "rows" if mode in ("rows", "scores") else "tiles", d, int(causal), s,
                        b, h, kernel, f"{rate['ours']:.1f}", f"{rate['peer']:.1f}" if mode in OF_INPUTS else "",
                        f"{bar:.1f}", f"{rate['ours'] / bar:.3f}", f"{difference:.1e}"))))
                    print(f"{mode} d={d} {'causal' if causal else 'full'} s={s}: {rate['ours']:.0f} TFLOP/s, bar "
                          f"{bar:.0f} ({rate['ours'] / bar:.3f}), difference {difference:.1e}, {kernel}", flush=True)
        shares = [float(r["of_bar"]) for r in rows if r["mode"] == mode]
        print(f"{mode}: {statistics.geometric_mean(shares):.3f} of the bar in the geometric mean, "
              f"{min(shares):.3f} at least", flush=True)
    write(arguments.output, COLUMNS, rows)
    ours, copy = quantizer_rate(library, arguments.rounds)
    print(f"quantise, signs and Hadamard transform included: {ours:.2f} TB/s, a copy {copy:.2f} ({ours / copy:.2f})")


if __name__ == "__main__":
    main()
