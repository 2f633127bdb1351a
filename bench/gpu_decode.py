"""Decoding on an H200: one query a sequence against a dense cache, cell by cell: bench/results/h200_decode.csv.

    gpu_decode.py --library build/release/libtessera.so --output FILE

Times are of graph replays: copies of the cache take turns, so that nothing lies in the second-level cache. In one
run with them, before and after: a plain read of memory (the library's yardstick), and PyTorch's SDPA with its
fastest backend. GB/s: keys and values, read once. Random normal inputs, medians. Needs PyTorch.
"""

import argparse
import datetime
import pathlib
import statistics

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpu_forward import DTYPES, libtessera, query, write

COLUMNS = ["date", "commit", "driver", "sm_mhz", "kv_dtype", "b", "seqlen_k", "h", "hk", "d", "dv", "page", "sq", "kernel",
           "us", "gb_per_s", "read_gb_per_s", "of_read", "sdpa_us", "difference"]
#: b, seqlen_k, h, hk, d, sq
SHAPES = (
    (1, 1024, 32, 8, 128, 1), (1, 8192, 32, 8, 128, 1), (1, 16384, 32, 8, 128, 1), (1, 131072, 32, 8, 128, 1),
    (16, 8192, 32, 8, 128, 1), (64, 8192, 32, 8, 128, 1), (64, 8192, 64, 8, 128, 1), (64, 2048, 32, 8, 128, 1),
    (128, 1024, 32, 8, 128, 1), (32, 8192, 32, 32, 128, 1), (32, 8192, 28, 4, 128, 1), (64, 8192, 32, 8, 128, 4),
    (64, 8192, 32, 8, 64, 1), (32, 8192, 16, 8, 256, 1))
CACHED = 60 << 20  # bytes: the second-level cache, and some more


def replay(functions, rounds):
    """Microseconds of one call: a graph of all functions, replayed."""
    for function in functions:
        function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    repeat = max(1, 20 // len(functions))
    with torch.cuda.graph(graph):
        for _ in range(repeat):
            for function in functions:
                function()
    times = []
    for _ in range(rounds + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / (repeat * len(functions)))
    return statistics.median(times[2:])


def sdpa(copies, grouped):
    """The fastest backend's microseconds, and its output for the first copy."""
    best, output = float("inf"), None
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        def call(q, k, v, backend=backend):
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, enable_gqa=grouped)

        turned = [[x.transpose(1, 2) for x in copy] for copy in copies]
        try:
            first = call(*turned[0]).transpose(1, 2)
            us = replay([lambda t=t: call(*t) for t in turned], 7)
        except RuntimeError:
            continue
        if us < best:
            best, output = us, first
    return best, output


def measure(library, dtype, b, sk, h, hk, d, sq, rounds):
    cache = 2 * b * sk * hk * d * 2
    count = max(2, -(-3 * CACHED // cache))
    copies = [[torch.randn(b, n, heads, d, device="cuda").to(DTYPES[dtype]) for n, heads in ((sq, h), (sk, hk), (sk, hk))]
              for _ in range(count)]
    plan = library.plan(f"fwd {dtype} b={b} h={h}/{hk} q={sq} k={sk} d={d}", "gpu")
    workspace = torch.empty(plan.workspace_bytes, dtype=torch.uint8, device="cuda")
    outputs = [torch.full((b, sq, h, d), float("nan"), device="cuda", dtype=DTYPES[dtype]) for _ in copies]
    tensors = [plan.tensors(q=q, k=k, v=v, o=o) for (q, k, v), o in zip(copies, outputs)]
    ours = replay([lambda t=t: plan.enqueue(t, torch.cuda.current_stream().cuda_stream, workspace) for t in tensors], rounds)
    peer, expected = sdpa(copies, h != hk)
    difference = ((outputs[0].float() - expected.float()).abs().max() / expected.float().abs().max()).item()
    return plan.kernel, ours, cache / ours * 1e-3, peer, difference


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", required=True)
    parser.add_argument("--output", type=pathlib.Path, required=True)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bf16")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    library = libtessera.Library(arguments.library)
    rows = []
    for shape in SHAPES:
        b, sk, h, hk, d, sq = shape
        read = library.peaks(0.1, "gpu").read_bytes * 1e-9
        kernel, us, rate, peer, difference = measure(library, arguments.dtype, *shape, arguments.rounds)
        read = statistics.mean((read, library.peaks(0.1, "gpu").read_bytes * 1e-9))
        rows.append(dict(zip(COLUMNS, (
            datetime.date.today().isoformat(), arguments.commit, query("driver_version"), query("clocks.sm"),
            arguments.dtype, b, sk, h, hk, d, d, "contiguous", sq, kernel, f"{us:.1f}", f"{rate:.0f}", f"{read:.0f}",
            f"{rate / read:.3f}", f"{peer:.1f}", f"{difference:.1e}"))))
        print(f"b={b} k={sk} h={h}/{hk} d={d} q={sq}: {us:.1f} us, {rate:.0f} GB/s, {rate / read:.3f} of the read "
              f"({read:.0f}); SDPA {peer:.1f} us; difference {difference:.1e}; {kernel}", flush=True)
        torch.cuda.empty_cache()
    write(arguments.output, COLUMNS, rows)


if __name__ == "__main__":
    main()
