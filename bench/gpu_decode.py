"""Decoding on an H200 against caches of rows and of pages, cell by cell: bench/results/h200_decode.csv.

    gpu_decode.py --library build/release/libtessera.so --output FILE [--as b200 a100 a10]

Times are of graph replays: copies of the cache take turns, so that nothing lies in the second-level cache. Pages are
in random order. In one run with them, before and after: a plain read of memory (the library's yardstick), and, where
the cache is rows of equal lengths, PyTorch's SDPA with its fastest backend. GB/s: keys and values, read once. Random
normal inputs, medians; every cell is compared with SDPA or with the same lengths in rows. Needs PyTorch.
--as: kernels of other GPUs, as in gpu_mma.py: h200_mma_decode.csv, which says in a column more what was planned for.
"""

import argparse
import csv
import datetime
import itertools
import math
import os
import pathlib
import statistics

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpu_forward import DTYPES, libtessera, query, write

COLUMNS = ["date", "commit", "driver", "sm_mhz", "kv_dtype", "b", "seqlen_k", "h", "hk", "d", "dv", "page", "sq", "kernel",
           "us", "gb_per_s", "read_gb_per_s", "of_read", "of_contiguous", "sdpa_us", "of_fa3", "difference"]
#: b, seqlen_k, h, hk, d, sq; a seqlen_k of "mixed": log-normal lengths
SHAPES = (
    (1, 1024, 32, 8, 128, 1), (1, 8192, 32, 8, 128, 1), (1, 16384, 32, 8, 128, 1), (1, 131072, 32, 8, 128, 1),
    (16, 8192, 32, 8, 128, 1), (64, 8192, 32, 8, 128, 1), (64, 8192, 64, 8, 128, 1), (64, 2048, 32, 8, 128, 1),
    (128, 1024, 32, 8, 128, 1), (32, 8192, 32, 32, 128, 1), (32, 8192, 28, 4, 128, 1), (64, 8192, 32, 8, 128, 4),
    (64, 8192, 32, 8, 128, 8), (64, 8192, 32, 8, 64, 1), (32, 8192, 16, 8, 256, 1), (64, "mixed", 32, 8, 128, 1))
PAGES = (0, 1, 16, 64, 256)
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


def sdpa(copies, grouped, rounds):
    """The fastest backend's microseconds, and its output for the first copy."""
    best, output = float("inf"), None
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        def call(q, k, v, backend=backend):
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, enable_gqa=grouped)

        turned = [[x.transpose(1, 2) for x in copy] for copy in copies]
        try:
            first = call(*turned[0]).transpose(1, 2)
            us = replay([lambda t=t: call(*t) for t in turned], rounds)
        except RuntimeError:
            continue
        if us < best:
            best, output = us, first
    return best, output


def lengths_of(b, sk):
    """Keys of every sequence."""
    if sk != "mixed":
        return [sk] * b
    generator = torch.Generator().manual_seed(20)
    drawn = torch.empty(b).log_normal_(math.log(4000.0), 1.5, generator=generator)
    return drawn.clamp(100, 100000).long().tolist()


class Cell:
    """One shape: some copies of its keys and values, laid out in rows or in pages, and their queries."""

    def __init__(self, dtype, b, sk, h, hk, d, sq):
        self.text = f"fwd {dtype} b={b} h={h}/{hk} q={sq} d={d}"
        self.sizes = b, h, hk, d, sq
        self.dtype = DTYPES[dtype]
        self.lengths = lengths_of(b, sk)
        self.bytes = 2 * sum(self.lengths) * hk * d * 2
        self.copies = max(2, -(-3 * CACHED // self.bytes))
        self.q = [torch.randn(b, sq, h, d, device="cuda").to(self.dtype) for _ in range(self.copies)]

    def rows(self):
        """(k, v) of shape (b, seqlen, hk, d); short sequences leave the rest unused."""
        b, _, hk, d, _ = self.sizes
        return [[torch.randn(b, max(self.lengths), hk, d, device="cuda").to(self.dtype) for _ in "kv"] for _ in self.q]

    def pages(self, rows, size):
        """Their keys in pages in random order, and the page table."""
        b, _, hk, d, _ = self.sizes
        counts = [-(-n // size) for n in self.lengths]
        order = torch.randperm(sum(counts), device="cuda", dtype=torch.int32)
        table = torch.full((b, max(counts)), -1, dtype=torch.int32, device="cuda")
        first = 0
        for i, count in enumerate(counts):
            table[i, :count] = order[first:first + count]
            first += count
        result = []
        for copy in rows:
            paged = []
            for x in copy:
                pool = torch.empty(sum(counts), size, hk, d, device="cuda", dtype=self.dtype)
                for i, (n, count) in enumerate(zip(self.lengths, counts)):
                    padded = F.pad(x[i, :n], (0, 0, 0, 0, 0, count * size - n))
                    pool[table[i, :count].long()] = padded.view(count, size, hk, d)
                paged.append(pool)
            result.append(paged)
        return result, table

    def run(self, library, keys, words, rounds, **arrays):
        plan = library.plan(f"{self.text} {words}", "gpu")
        workspace = torch.empty(max(1, plan.workspace_bytes), dtype=torch.uint8, device="cuda")
        outputs = [torch.full_like(q, float("nan")) for q in self.q]
        tensors = [plan.tensors(q=q, k=k, v=v, o=o, **arrays) for q, (k, v), o in zip(self.q, keys, outputs)]
        us = replay([lambda t=t: plan.enqueue(t, torch.cuda.current_stream().cuda_stream, workspace) for t in tensors],
                    rounds)
        return plan.kernel, us, outputs


def far(a, b):
    return ((a.float() - b.float()).abs().max() / b.float().abs().max()).item()


def anchors(path):
    """FlashAttention-3's microseconds by (b, seqlen_k, h, hk, d, page), if the file is there."""
    if path is None:
        return {}
    with path.open() as file:
        return {(int(r["b"]), int(r["seqlen_k"]), int(r["h"]), int(r["hk"]), int(r["d"]), r["page"]): float(r["us"])
                for r in csv.DictReader(file) if r["dtype"] == "bf16"}


def measure(library, dtype, shape, pages, rounds, fa3):
    b, sk, h, hk, d, sq = shape
    cell = Cell(dtype, *shape)
    rows = cell.rows()
    lengths = torch.tensor(cell.lengths, dtype=torch.int32, device="cuda")
    equal = sk != "mixed"
    peer, expected = sdpa([[q, *r] for q, r in zip(cell.q, rows)], h != hk, max(3, rounds // 2)) if equal else (None, None)
    contiguous = None
    for page in pages:
        if page == 0:
            words, keys, arrays = f"k={max(cell.lengths)} cache=after", rows, {}
        else:
            keys, table = cell.pages(rows, page)
            words = f"k={max(cell.lengths)} pages={keys[0][0].shape[0]}x{page}"
            arrays = {"page_table": table}
        kernel, us, outputs = cell.run(library, keys, words, rounds, seqlens=lengths, **arrays)
        expected = outputs[0] if expected is None else expected
        contiguous = us if page == 0 else contiguous
        name = "contiguous" if page == 0 else str(page)
        anchor = fa3.get((b, sk, h, hk, d, name)) if sq == 1 else None
        yield name, kernel, us, cell.bytes / us * 1e-3, peer, contiguous, anchor, far(outputs[0], expected)
        if page:
            del keys, table, arrays


def command_line(description, rounds):
    """What every benchmark of caches of 16 bits takes."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--library", required=True)
    parser.add_argument("--output", type=pathlib.Path, required=True)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bf16")
    parser.add_argument("--rounds", type=int, default=rounds)
    return parser


def main():
    parser = command_line(__doc__, 9)
    parser.add_argument("--pages", type=int, nargs="*", default=PAGES)
    parser.add_argument("--shapes", type=int, nargs="*", help="numbers of shapes, from 0; all without")
    parser.add_argument("--as", dest="names", nargs="+", default=(), metavar="DEVICE")
    parser.add_argument("--anchors", type=pathlib.Path, help="FlashAttention-3's times: dtype, b, ..., page, us")
    arguments = parser.parse_args()
    library = libtessera.Library(arguments.library)
    fa3 = anchors(arguments.anchors)
    out = []
    columns = [*COLUMNS, "planned_as"] if arguments.names else COLUMNS
    chosen = [shape for number, shape in enumerate(SHAPES) if not arguments.shapes or number in arguments.shapes]
    for name, shape in itertools.product(arguments.names or ("",), chosen):
        if name:
            os.environ["TESSERA_GPU_AS"] = name
        b, sk, h, hk, d, sq = shape
        read = library.peaks(0.05, "gpu").read_bytes * 1e-9
        for page, kernel, us, rate, peer, contiguous, anchor, difference in measure(
                library, arguments.dtype, shape, arguments.pages, arguments.rounds, fa3):
            of_contiguous = f"{contiguous / us:.3f}" if contiguous else ""
            out.append(dict(zip(columns, (
                datetime.date.today().isoformat(), arguments.commit, query("driver_version"), query("clocks.sm"),
                arguments.dtype, b, sk, h, hk, d, d, page, sq, kernel, f"{us:.1f}", f"{rate:.0f}", f"{read:.0f}",
                f"{rate / read:.3f}", of_contiguous, f"{peer:.1f}" if peer else "",
                f"{anchor / us:.2f}" if anchor else "", f"{difference:.1e}", name))))
            print(f"{name + ': ' * bool(name)}b={b} k={sk} h={h}/{hk} d={d} q={sq} page {page}: {us:.1f} us, {rate:.0f} GB/s, {rate / read:.3f} of "
                  f"the read, {of_contiguous} of contiguous; SDPA {peer or 0:.1f} us; FA3 {anchor or 0:.1f}; "
                  f"difference {difference:.1e}", flush=True)
            write(arguments.output, columns, out)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
