"""Prefill over a KV cache on an H200: keys in pages beside the same keys dense: bench/results/h200_prefill.csv.

    gpu_prefill.py --library build/release/libtessera.so --output FILE [--as b200 a100 a10]

Many queries against more cached keys, causal from the bottom right: a chunk of a prompt. Every way in which keys may
lie takes its turn in each round: dense tensors without a cache, a cache of rows, pages in random order; beside them
PyTorch's SDPA over the dense tensors, with its fastest backend that takes this mask (FlashAttention-2 in PyTorch 2.9).
Medians of CUDA-event times. of_dense: the time over dense tensors by that over pages. Random normal inputs; every
output is compared with that over dense tensors. FLOPs: 4 d for every visible pair. Needs PyTorch.
--as: kernels of other GPUs, as in gpu_mma.py: h200_mma_prefill.csv, which says in a column more what was planned for.
"""

import datetime
import itertools
import os
import random
import statistics

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from gpu_decode import command_line
from gpu_forward import DTYPES, libtessera, query, time_calls, write

COLUMNS = ["date", "commit", "driver", "sm_mhz", "dtype", "b", "seqlen_q", "seqlen_k", "h", "hk", "d", "page", "kernel", "us",
           "tflops", "of_dense", "sdpa_us", "difference"]
#: b, seqlen_q, seqlen_k, h, hk, d
SHAPES = (
    (1, 2048, 16384, 32, 8, 128), (1, 2048, 16384, 32, 8, 64), (1, 2048, 16384, 16, 8, 256), (1, 512, 16384, 32, 8, 128),
    (8, 512, 4096, 32, 8, 128), (1, 8192, 8192, 32, 8, 128), (1, 2048, 16384, 32, 32, 128), (4, 128, 8192, 32, 8, 128))
PAGES = ("dense", "rows", 1, 16, 64, 256)


def paged(rows, size):
    """(keys or values in pages in random order) of each of `rows`, and the page table."""
    b, seqlen = rows[0].shape[:2]
    count = -(-seqlen // size)
    order = torch.randperm(b * count, device="cuda").view(b, count)
    pools = []
    for x in rows:
        padded = F.pad(x, (0, 0, 0, 0, 0, count * size - seqlen)).view(b * count, size, *x.shape[2:])
        pool = torch.empty_like(padded)
        pool[order.flatten()] = padded
        pools.append(pool)
    return pools, order.int()


class Way:
    """One way in which keys lie: a plan and what it runs on."""

    def __init__(self, library, dtype, shape, q, k, v, page):
        b, sq, sk, h, hk, d = shape
        words = f"fwd {dtype} b={b} h={h}/{hk} q={sq} k={sk} d={d} causal"
        arrays = {}
        if page == "rows":
            words += " cache=after"
        elif page != "dense":
            (k, v), table = paged((k, v), page)
            words += f" cache=after pages={k.shape[0]}x{page}"
            arrays["page_table"] = table
        if page != "dense":
            arrays["seqlens"] = torch.full((b,), sk, dtype=torch.int32, device="cuda")
        self.o = torch.full_like(q, float("nan"))
        self.plan = library.plan(words, "gpu")
        self.kernel = self.plan.kernel
        self.workspace = torch.empty(max(1, self.plan.workspace_bytes), dtype=torch.uint8, device="cuda")
        self.tensors = self.plan.tensors(q=q, k=k, v=v, o=self.o, **arrays)
        self.kept = (q, k, v, arrays)

    def __call__(self):
        self.plan.enqueue(self.tensors, torch.cuda.current_stream().cuda_stream, self.workspace)


def sdpa(shape, q, k, v):
    b, sq, sk, h, hk, d = shape
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    mask = causal_lower_right(sq, sk)
    if sq == sk:
        return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=h != hk)
    k, v = (x.repeat_interleave(h // hk, 1) for x in (k, v))
    return lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def measure(library, dtype, shape, pages, rounds):
    """(page, kernel, microseconds, SDPA's, difference from dense) of every way."""
    b, sq, sk, h, hk, d = shape
    make = lambda seqlen, heads: torch.randn(b, seqlen, heads, d, device="cuda").to(DTYPES[dtype])
    q, k, v = make(sq, h), make(sk, hk), make(sk, hk)
    ways = [Way(library, dtype, shape, q, k, v, page) for page in pages]
    functions = [*ways, sdpa(shape, q, k, v)]
    times = [[] for _ in functions]
    flops = 4 * h * d * b * (sq * (sk - sq) + sq * (sq + 1) / 2)
    calls = max(3, min(40, int(0.01 / (flops / 4e14))))
    for _ in range(rounds):
        for i in random.sample(range(len(functions)), len(functions)):
            times[i].append(time_calls(functions[i], calls) * 1e6)
    medians = [statistics.median(t) for t in times]
    expected = ways[0].o.float()
    for page, way, us in zip(pages, ways, medians):
        yield page, way.kernel, us, flops / us * 1e-6, medians[0] / us, medians[-1], (
            (way.o.float() - expected).abs().max() / expected.abs().max()).item()


def main():
    parser = command_line(__doc__, 9)
    parser.add_argument("--pages", type=int, nargs="*", help="page sizes instead of 1, 16, 64, 256")
    parser.add_argument("--shapes", type=int, nargs="*", help="numbers of shapes, from 0; all without")
    parser.add_argument("--as", dest="names", nargs="+", default=(), metavar="DEVICE")
    arguments = parser.parse_args()
    library = libtessera.Library(arguments.library)
    pages = PAGES if arguments.pages is None else ("dense", "rows", *arguments.pages)
    out = []
    columns = [*COLUMNS, "planned_as"] if arguments.names else COLUMNS
    chosen = [shape for number, shape in enumerate(SHAPES) if not arguments.shapes or number in arguments.shapes]
    for name, shape in itertools.product(arguments.names or ("",), chosen):
        if name:
            os.environ["TESSERA_GPU_AS"] = name
        b, sq, sk, h, hk, d = shape
        for page, kernel, us, rate, share, peer, difference in measure(library, arguments.dtype, shape, pages,
                                                                       arguments.rounds):
            out.append(dict(zip(columns, (
                datetime.date.today().isoformat(), arguments.commit, query("driver_version"), query("clocks.sm"),
                arguments.dtype, b, sq, sk, h, hk, d, page, kernel, f"{us:.1f}", f"{rate:.0f}", f"{share:.3f}",
                f"{peer:.1f}", f"{difference:.1e}", name))))
            print(f"{name + ': ' * bool(name)}b={b} q={sq} k={sk} h={h}/{hk} d={d} page {page}: {kernel} {us:.1f} us, "
                  f"{rate:.0f} TFLOP/s, {share:.3f} of dense; SDPA {peer:.1f} us; difference {difference:.1e}", flush=True)
        write(arguments.output, columns, out)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
