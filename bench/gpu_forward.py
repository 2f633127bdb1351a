"""The forward pass on an H200 beside cuDNN, cell by cell, in one run: bench/results/h200_forward.csv.

    gpu_forward.py --library build/release/libtessera.so --output FILE [--dtype bf16 f16] [--seqlen ...]

16,384 tokens, hidden size 2048 (32, 16, 8 heads of 64, 128, 256), random normal inputs. Both take turns
within a cell; medians of CUDA-event times, the tensors put elsewhere in memory every few rounds. FLOPs:
4 b h s s d, halved when causal. `bar` is the best of FlashAttention-3, FlashAttention-4 and cuDNN: what cuDNN
reaches in this run times the ratio that bench/results/h200_peer_ratios.csv has, as clocks move from run to run.
The table is of bf16 and serves fp16, too. Needs PyTorch.
"""

import argparse
import csv
import datetime
import math
import pathlib
import random
import statistics
import subprocess
import sys
import time

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "demo"))
import libtessera  # noqa: E402

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
TOKENS, HIDDEN = 16384, 2048
COLUMNS = ["date", "commit", "driver", "sm_mhz", "dtype", "d", "causal", "s", "b", "h", "kernel",
           "tessera", "cudnn", "bar", "of_bar", "difference"]


def peer_factors(direction="fwd"):
    """(d, causal, s): the better peer over cuDNN; direction: fwd or bwd."""
    path = pathlib.Path(__file__).resolve().parent / "results/h200_peers.csv"
    with path.open(newline="") as file:
        return {(int(r["d"]), int(r["causal"]), int(r["s"])):
                max(1.0, float(r[f"fa3_{direction}"]) / float(r[f"cudnn_{direction}"]))
                for r in csv.DictReader(file)}


def best_peer_factors(direction="bwd"):
    """The same of three peers, cuDNN, FlashAttention-3 and FlashAttention-4, by a later run."""
    path = pathlib.Path(__file__).resolve().parent / "results/h200_peer_ratios.csv"
    with path.open(newline="") as file:
        return {(int(r["d"]), int(r["causal"]), int(r["s"])):
                max(1.0, *(float(r[f"{peer}_{direction}"] or 0) for peer in ("fa3", "fa4")))
                for r in csv.DictReader(file)}


def query(field):
    output = subprocess.run(["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits"],
                            capture_output=True, text=True, check=True).stdout
    return output.splitlines()[0].strip()


def write(path, columns, rows):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def time_calls(function, calls):
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    function()
    start.record()
    for _ in range(calls):
        function()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / calls * 1e-3


class Arena:
    """Memory in which tensors are put here and there: the speed of some shapes depends on where they lie."""

    PAGE = 2 << 20

    def __init__(self, size=4 << 30):
        self.memory = torch.empty(size, dtype=torch.uint8, device="cuda")
        self.start = 0

    def clear(self):
        self.start = 0

    def place(self, shape, dtype):
        count = math.prod(shape) * dtype.itemsize
        self.start += random.randrange(1, 100) * self.PAGE
        part = self.memory[self.start:self.start + count]
        self.start += -(-count // self.PAGE) * self.PAGE
        return part.view(dtype).view(shape)


def measure(library, arena, dtype, d, causal, s, rounds, placements):
    """Medians over all rounds of all placements."""
    times = {"ours": [], "cudnn": []}
    for _ in range(placements):
        result = measure_once(library, arena, dtype, d, causal, s, rounds, times)
    b, h, kernel, flops, difference = result
    rate = {name: flops / statistics.median(t) * 1e-12 for name, t in times.items()}
    return b, h, kernel, rate["ours"], rate["cudnn"], difference


def workspace_of(plan):
    return torch.empty(max(1, plan.workspace_bytes), dtype=torch.uint8, device="cuda")


def measure_once(library, arena, dtype, d, causal, s, rounds, times):
    b, h = TOKENS // s, HIDDEN // d
    arena.clear()
    q, k, v, o = (arena.place((b, s, h, d), DTYPES[dtype]) for _ in range(4))
    for x in (q, k, v):
        x.copy_(torch.randn(b, s, h, d, device="cuda"))
    lse = torch.empty(b, h, s, device="cuda")
    plan = library.plan(f"fwd {dtype} b={b} h={h} q={s} k={s} d={d}" + (" causal" if causal else ""),
                        "gpu")
    tensors = plan.tensors(q=q, k=k, v=v, o=o, softmax_lse=lse)
    stream = torch.cuda.current_stream().cuda_stream
    workspace = workspace_of(plan)
    ours = lambda: plan.enqueue(tensors, stream, workspace)
    peer_inputs = [x.transpose(1, 2) for x in (q, k, v)]

    def cudnn():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(*peer_inputs, is_causal=causal)

    peer = cudnn().transpose(1, 2).float()
    ours()
    difference = ((o.float() - peer).abs().max() / peer.abs().max()).item()
    flops = 4 * b * h * s * s * d / (2 if causal else 1)
    calls = max(3, min(60, int(0.012 / (flops / 5e14))))
    for _ in range(rounds):
        for name, function in (("ours", ours), ("cudnn", cudnn)):
            times[name].append(time_calls(function, calls))
    return b, h, plan.kernel, flops, difference


def host_cost(library):
    """Median microseconds of one enqueue, the plan made before."""
    q = torch.randn(1, 128, 1, 128, device="cuda").bfloat16()
    o = torch.empty_like(q)
    plan = library.plan("fwd bf16 b=1 h=1 q=128 k=128 d=128", "gpu")
    tensors = plan.tensors(q=q, k=q, v=q, o=o)
    stream = torch.cuda.current_stream().cuda_stream
    samples = []
    for _ in range(300):
        start = time.perf_counter()
        plan.enqueue(tensors, stream)
        samples.append(time.perf_counter() - start)
        if len(samples) % 20 == 0:
            torch.cuda.synchronize()
    return statistics.median(samples) * 1e6


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", required=True)
    parser.add_argument("--output", type=pathlib.Path, required=True)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--dtype", nargs="+", choices=tuple(DTYPES), default=("bf16",))
    parser.add_argument("--head-dim", nargs="+", type=int, default=(64, 128, 256))
    parser.add_argument("--seqlen", nargs="+", type=int, default=[512 << i for i in range(6)])
    parser.add_argument("--rounds", type=int, default=5, help="of each placement")
    parser.add_argument("--placements", type=int, default=3, help="of the tensors in memory")
    arguments = parser.parse_args()
    library = libtessera.Library(arguments.library)
    factors = best_peer_factors("fwd")
    arena = Arena()
    rows = []
    for dtype in arguments.dtype:
        for d in arguments.head_dim:
            for causal in (False, True):
                for s in arguments.seqlen:
                    b, h, kernel, ours, cudnn, difference = measure(
                        library, arena, dtype, d, causal, s, arguments.rounds, arguments.placements)
                    bar = cudnn * factors.get((d, int(causal), s), 1.0)
                    rows.append(dict(zip(COLUMNS, (
                        datetime.date.today().isoformat(), arguments.commit, query("driver_version"),
                        query("clocks.sm"), dtype, d, int(causal), s, b, h, kernel, f"{ours:.1f}",
                        f"{cudnn:.1f}", f"{bar:.1f}", f"{ours / bar:.3f}", f"{difference:.1e}"))))
                    print(f"{dtype} d={d} {'causal' if causal else 'full'} s={s}: {ours:.0f} TFLOP/s, "
                          f"cuDNN {cudnn:.0f}, bar {bar:.0f} ({ours / bar:.3f}), "
                          f"difference {difference:.1e}", flush=True)
        shares = [float(r["of_bar"]) for r in rows if r["dtype"] == dtype]
        print(f"{dtype}: {statistics.geometric_mean(shares):.3f} of the bar in the geometric mean, "
              f"{min(shares):.3f} at least", flush=True)
    write(arguments.output, COLUMNS, rows)
    print(f"one enqueue through ctypes: {host_cost(library):.1f} us")


if __name__ == "__main__":
    main()
