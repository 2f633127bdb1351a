"""Decoding over pages whose first ones many requests share, on a GPU: bench/results/h200_prefixes.csv.

    gpu_prefixes.py --library build/release/libtessera.so --output FILE

Three times of one step, in turns: with prefixes=LEVELS; the same page table without it; and every request with pages
of its own, which is what a cache without sharing reads. Times are of graph replays, copies of the cache take turns, so
that nothing lies in the second-level cache before a step. Pages are in random order. Random normal inputs, medians;
results are compared with those of the pages of their own. Needs PyTorch.
"""

import datetime
import statistics

import torch

from gpu_decode import CACHED, command_line, far, replay
from gpu_forward import DTYPES, libtessera, query, write

COLUMNS = ["date", "commit", "driver", "sm_mhz", "dtype", "b", "prefixes", "suffix", "h", "hk", "d", "page", "sq", "kernel",
           "us", "same_table_us", "own_pages_us", "of_same_table", "of_own_pages", "difference"]
#: b; prefixes, outer ones first: (keys, sequences that share them); suffix, h, hk, d, page, sq
SHAPES = (
    (64, ((8192, 64),), 256, 32, 8, 128, 16, 1), (64, ((8192, 64),), 256, 64, 8, 128, 16, 1),
    (64, ((8192, 64),), 256, 32, 8, 128, 1, 1), (64, ((8192, 64),), 256, 32, 8, 128, 256, 1),
    (16, ((8192, 16),), 256, 32, 8, 128, 16, 1), (256, ((2048, 256),), 128, 32, 8, 128, 16, 1),
    (64, ((1024, 64),), 1024, 32, 8, 128, 16, 1), (8, ((65536, 8),), 256, 32, 8, 128, 16, 1),
    (64, ((4096, 64), (4096, 8)), 256, 32, 8, 128, 16, 1), (64, ((8192, 64),), 256, 32, 8, 128, 16, 4),
    (64, ((8192, 64),), 256, 32, 8, 64, 16, 1), (64, ((8192, 64),), 256, 16, 8, 256, 16, 1),
    (64, (), 8192, 32, 8, 128, 16, 1), (8, (), 1024, 32, 8, 128, 16, 1))


class Cell:
    """One shape: page tables with and without sharing, over copies of one pool."""

    def __init__(self, dtype, b, prefixes, suffix, h, hk, d, page, sq):
        self.text = f"fwd {dtype} b={b} h={h}/{hk} q={sq} d={d}"
        self.page, self.seqlen = page, sum(keys for keys, _ in prefixes) + suffix
        columns, suffix_columns = -(-self.seqlen // page), -(-suffix // page)
        order = torch.randperm(b * columns, device="cuda", dtype=torch.int32)
        self.own = order.view(b, columns)
        self.table = self.own.clone()
        first = 0
        for keys, sequences in prefixes:
            end = first + keys // page
            for begin in range(0, b, sequences):
                self.table[begin:begin + sequences, first:end] = self.own[begin, first:end]
            first = end
        assert first + suffix_columns == columns
        self.pages = b * columns
        read = self.pages * page * hk * d * 2 * 2
        copies = max(2, -(-3 * CACHED // read))
        shape = (self.pages, page, hk, d)
        self.keys = [[torch.randn(shape, device="cuda", dtype=DTYPES[dtype]) for _ in "kv"] for _ in range(copies)]
        self.q = [torch.randn(b, sq, h, d, device="cuda").to(DTYPES[dtype]) for _ in range(copies)]
        self.seqlens = torch.full((b,), self.seqlen, dtype=torch.int32, device="cuda")

    def share(self):
        """Pages of one's own have what the shared ones hold."""
        for copy in self.keys:
            for x in copy:
                x[self.own.view(-1).long()] = x[self.table.view(-1).long()]

    def prepare(self, library, words, table):
        plan = library.plan(f"{self.text} k={self.seqlen} pages={self.pages}x{self.page} causal {words}", "gpu")
        workspace = torch.empty(max(1, plan.workspace_bytes), dtype=torch.uint8, device="cuda")
        outputs = [torch.full_like(q, float("nan")) for q in self.q]
        tensors = [plan.tensors(q=q, k=k, v=v, o=o, page_table=table, seqlens=self.seqlens)
                   for q, (k, v), o in zip(self.q, self.keys, outputs)]

        def call(t):
            plan.enqueue(t, torch.cuda.current_stream().cuda_stream, workspace)

        return plan.kernel, [lambda t=t: call(t) for t in tensors], outputs, (plan, workspace)


def measure(library, dtype, shape, rounds):
    cell = Cell(dtype, *shape)
    cell.share()
    levels = max(1, len(shape[1]))
    kinds = [cell.prepare(library, words, table) for words, table in
             ((f"prefixes={levels}", cell.table), ("", cell.table), ("", cell.own))]
    times = [[] for _ in kinds]
    for _ in range(3):
        for kind, mine in zip(kinds, times):
            mine.append(replay(kind[1], rounds))
    outputs = [kind[2][0] for kind in kinds]
    return kinds[0][0], [statistics.median(mine) for mine in times], far(outputs[0], outputs[2])


def main():
    parser = command_line(__doc__, 5)
    parser.add_argument("--shapes", type=int, nargs="*", help="numbers of shapes, from 0; all without")
    arguments = parser.parse_args()
    library = libtessera.Library(arguments.library)
    out = []
    for number, shape in enumerate(SHAPES):
        if arguments.shapes and number not in arguments.shapes:
            continue
        b, prefixes, suffix, h, hk, d, page, sq = shape
        kernel, (us, same, own), difference = measure(library, arguments.dtype, shape, arguments.rounds)
        text = "+".join(f"{keys}:{sequences}" for keys, sequences in prefixes) or "none"
        out.append(dict(zip(COLUMNS, (
            datetime.date.today().isoformat(), arguments.commit, query("driver_version"), query("clocks.sm"),
            arguments.dtype, b, text, suffix, h, hk, d, page, sq, kernel, f"{us:.1f}", f"{same:.1f}", f"{own:.1f}",
            f"{same / us:.2f}", f"{own / us:.2f}", f"{difference:.1e}"))))
        print(f"b={b} prefixes {text} suffix {suffix} h={h}/{hk} d={d} page {page} q={sq} {kernel}: {us:.1f} us; same "
              f"table {same:.1f}, pages of their own {own:.1f}: {own / us:.2f} x; difference {difference:.1e}", flush=True)
        write(arguments.output, COLUMNS, out)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
