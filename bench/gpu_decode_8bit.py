"""Decoding on a GPU over caches of 8 bits: bench/results/h200_decode_8bit.csv; of an H100, h100_....

    gpu_decode_8bit.py --library build/release/libtessera.so --output FILE

As gpu_decode.py: times are of graph replays, copies of the cache take turns, pages are in random order, medians. Caches
of one shape take turns, too: bf16, e4m3 with one scale a tensor, and i8 with one for every key and head, of all heads of
a slot side by side, or of a head those of all slots (token_apart). GB/s: elements and scales, read once. error:
greatest difference from attention of the stored values in double, over two sequences, as a share of the greatest
output. Needs PyTorch.
"""

import argparse
import csv
import datetime
import pathlib

import torch

from gpu_decode import CACHED, lengths_of, replay
from gpu_forward import libtessera, query, write

COLUMNS = ["date", "commit", "driver", "sm_mhz", "kv_dtype", "scales", "b", "seqlen_k", "h", "hk", "d", "page", "sq",
           "kernel", "us", "gb_per_s", "read_gb_per_s", "of_read", "bf16_us", "of_bf16", "fa3_us", "of_fa3", "error"]
#: b, seqlen_k, h, hk, d, sq
SHAPES = (
    (1, 8192, 32, 8, 128, 1), (16, 8192, 32, 8, 128, 1), (64, 8192, 32, 8, 128, 1), (64, 8192, 64, 8, 128, 1),
    (64, 2048, 32, 8, 128, 1), (128, 1024, 32, 8, 128, 1), (32, 8192, 32, 32, 128, 1), (1, 131072, 32, 8, 128, 1),
    (64, 8192, 32, 8, 128, 4), (64, 8192, 32, 8, 64, 1), (32, 8192, 16, 8, 256, 1), (64, "mixed", 32, 8, 128, 1))
KINDS = (("bf16", "none"), ("e4m3", "tensor"), ("i8", "token"), ("i8", "token_apart"))
TYPES = {"bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn, "i8": torch.int8}


class Cache:
    """Copies of keys and values of one type, in rows (page 0) or pages, their scales, and a page table."""

    def __init__(self, kind, scales, shape, page, lengths, copies):
        b, _, _, hk, d, _ = shape
        self.kind, self.scales, self.page = kind, scales, page
        longest = max(lengths)
        self.table = None
        if page:
            counts = [-(-n // page) for n in lengths]
            order = torch.randperm(sum(counts), device="cuda", dtype=torch.int32)
            self.table = torch.full((b, max(counts)), -1, dtype=torch.int32, device="cuda")
            first = 0
            for i, count in enumerate(counts):
                self.table[i, :count] = order[first:first + count]
                first += count
            self.slots = (sum(counts), page)
        else:
            self.slots = (b, longest)
        self.tensors = [[self._fill(hk, d) for _ in "kv"] for _ in range(copies)]
        self.factors = [[self._draw(hk) for _ in "kv"] for _ in range(copies)]
        of_key = 2 * d * (2 if kind == "bf16" else 1) + (8 if scales.startswith("token") else 0)
        self.bytes = sum(lengths) * hk * of_key

    def _draw(self, hk):
        """Scales of keys or values: (rows or pages, slots, hk) where each slot and head has one."""
        entries, slots = self.slots
        shape = {"none": None, "tensor": (), "token": (entries, slots, hk), "token_apart": (entries, hk, slots)}[self.scales]
        if shape is None:
            return None
        numbers = 0.02 * torch.rand(shape, device="cuda") + 0.01
        return numbers.transpose(1, 2) if self.scales == "token_apart" else numbers

    def _fill(self, hk, d):
        x = torch.empty(*self.slots, hk, d, dtype=TYPES[self.kind], device="cuda")
        for part in x.split(max(1, (1 << 26) // (self.slots[1] * hk * d))):
            numbers = torch.randn(part.shape, device="cuda") * (1 if self.kind == "bf16" else 40)
            part.copy_(numbers.round().clamp(-127, 127) if self.kind == "i8" else numbers)
        return x

    def words(self):
        scales = self.scales.removesuffix("_apart")
        text = "" if self.kind == "bf16" else f" kv={self.kind} scales=none/{scales}/{scales}"
        return text + (f" pages={self.slots[0]}x{self.page}" if self.page else " cache=after")

    def arrays(self, i):
        result = dict(zip("kv", self.tensors[i]))
        for name, factor in zip("kv", self.factors[i]):
            if factor is not None:
                result[f"{name}_scale"] = libtessera.slot_scales(factor) if factor.dim() else factor
        return result | ({} if self.table is None else {"page_table": self.table})

    def values(self, which, sequence, length):
        """(length, hk, d) in double, of the first copy."""
        x, factor = self.tensors[0][which], self.factors[0][which]
        rows = x[sequence] if self.table is None else x[self.table[sequence, :-(-length // self.page)].long()].flatten(0, 1)
        rows = rows[:length].double()
        if factor is None:
            return rows
        if factor.dim() == 0:
            return rows * factor.double()
        each = factor[sequence] if self.table is None else factor[
            self.table[sequence, :-(-length // self.page)].long()].flatten(0, 1)
        return rows * each[:length].double()[..., None]


def error_of(o, q, cache, lengths):
    worst, largest = 0.0, 0.0
    group = q.shape[2] // cache.tensors[0][0].shape[2]
    for b in {0, len(lengths) - 1}:
        k, v = (cache.values(i, b, lengths[b]).repeat_interleave(group, 1) for i in range(2))
        s = torch.einsum("qhd,khd->hqk", q[b].double(), k) * q.shape[-1] ** -0.5
        sq = q.shape[1]
        seen = torch.arange(lengths[b], device="cuda") <= torch.arange(sq, device="cuda")[:, None] + lengths[b] - sq
        exact = torch.einsum("hqk,khd->qhd", s.masked_fill(~seen, float("-inf")).softmax(-1), v)
        worst = max(worst, (o[b].double() - exact).abs().max().item())
        largest = max(largest, exact.abs().max().item())
    return worst / largest


def measure(library, shape, page, rounds):
    b, sk, h, hk, d, sq = shape
    lengths = lengths_of(b, sk)
    seqlens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    bf16 = None
    for kind, scales in KINDS:
        one = 2 * sum(lengths) * hk * d * (2 if kind == "bf16" else 1)
        cache = Cache(kind, scales, shape, page, lengths, max(2, -(-3 * CACHED // one)))
        q = [torch.randn(b, sq, h, d, device="cuda").bfloat16() * (1 if kind == "bf16" else 1.5) for _ in cache.tensors]
        plan = library.plan(f"fwd bf16 b={b} h={h}/{hk} q={sq} d={d} k={max(lengths)} causal{cache.words()}", "gpu")
        workspace = torch.empty(max(1, plan.workspace_bytes), dtype=torch.uint8, device="cuda")
        outputs = [torch.full_like(x, float("nan")) for x in q]
        tensors = [plan.tensors(q=x, o=o, seqlens=seqlens, **cache.arrays(i)) for i, (x, o) in enumerate(zip(q, outputs))]
        us = replay([lambda t=t: plan.enqueue(t, torch.cuda.current_stream().cuda_stream, workspace) for t in tensors],
                    rounds)
        bf16 = us if kind == "bf16" else bf16
        yield kind, scales, plan.kernel, us, cache.bytes / us * 1e-3, bf16, error_of(outputs[0], q[0], cache, lengths)
        del cache, q, outputs, tensors, workspace
        torch.cuda.empty_cache()


def anchors(path):
    """FlashAttention-3's microseconds with q, k and v of e4m3, by (b, seqlen_k, h, hk, d, page), if the file is there."""
    if path is None:
        return {}
    with path.open() as file:
        return {(r["b"], r["seqlen_k"], r["h"], r["hk"], r["d"], r["page"]): float(r["us"])
                for r in csv.DictReader(file) if r["dtype"] == "e4m3"}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", required=True)
    parser.add_argument("--output", type=pathlib.Path, required=True)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--pages", type=int, nargs="*", default=(0, 16, 64))
    parser.add_argument("--shapes", type=int, nargs="*", help="numbers of shapes, from 0; all without")
    parser.add_argument("--anchors", type=pathlib.Path, help="FlashAttention-3's times: dtype, b, ..., page, us")
    arguments = parser.parse_args()
    library = libtessera.Library(arguments.library)
    fa3 = anchors(arguments.anchors)
    out = []
    for number, shape in enumerate(SHAPES):
        if arguments.shapes and number not in arguments.shapes:
            continue
        b, sk, h, hk, d, sq = shape
        for page in arguments.pages:
            read = library.peaks(0.05, "gpu").read_bytes * 1e-9
            for kind, scales, kernel, us, rate, bf16, error in measure(library, shape, page, arguments.rounds):
                name = str(page or "contiguous")
                anchor = fa3.get((*map(str, (b, sk, h, hk, d)), name)) if sq == 1 and kind != "bf16" else None
                out.append(dict(zip(COLUMNS, (
                    datetime.date.today().isoformat(), arguments.commit, query("driver_version"), query("clocks.sm"),
                    kind, scales, b, sk, h, hk, d, name, sq, kernel, f"{us:.1f}", f"{rate:.0f}", f"{read:.0f}",
                    f"{rate / read:.3f}", f"{bf16:.1f}", f"{bf16 / us:.2f}", anchor or "",
                    f"{anchor / us:.2f}" if anchor else "", f"{error:.1e}"))))
                print(f"b={b} k={sk} h={h}/{hk} d={d} q={sq} page {name} {kind} {scales}: {us:.1f} us, {rate:.0f} GB/s, "
                      f"{rate / read:.3f} of the read; {bf16 / us:.2f} of bf16; FA3 {anchor or 0:.1f}; error {error:.1e}",
                      flush=True)
                write(arguments.output, COLUMNS, out)


if __name__ == "__main__":
    main()
