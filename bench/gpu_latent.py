"""Decoding of latent attention (DeepSeek) on a GPU: bench/results/h200_latent.csv.

    PYTHONPATH=build/release/python gpu_latent.py --library build/release/libtessera.so --output FILE

One layer of a step: rows of 576 columns of bf16, or of 656 bytes (values of e4m3), by pages of 64 and lengths or by
lists of the slots that a query sees (topk). Times are of graph replays, copies of the cache take turns, so that nothing
lies in the second-level cache before a step. Pages and lists are in random order. Random normal inputs, medians. GB/s:
rows, read once a sequence; of_read: of a plain read of memory (the library's yardstick). difference: to attention over
the same slots by PyTorch in fp32, as a share of the largest number, of the first sequence. Needs PyTorch.
"""

import datetime

import tessera
import torch

from gpu_decode import CACHED, command_line, far, replay
from gpu_forward import libtessera, query, write

COLUMNS = ["date", "commit", "driver", "sm_mhz", "rows", "b", "seqlen_k", "topk", "h", "sq", "page", "us", "tflops",
           "gb_per_s", "read_gb_per_s", "of_read", "difference"]
LATENT, ROTATED, GROUP, PAGE = 512, 64, 128, 64
#: b, seqlen_k, topk (0: dense), heads, sq
SHAPES = (
    (64, 4096, 0, 16, 1), (64, 4096, 0, 32, 1), (64, 4096, 0, 64, 1), (64, 4096, 0, 128, 1), (64, 4096, 0, 128, 2),
    (1, 8192, 0, 16, 1), (1, 131072, 0, 16, 1), (128, 1024, 0, 16, 1), (32, 16384, 0, 128, 1),
    (64, 16384, 2048, 16, 1), (64, 16384, 2048, 64, 1), (64, 16384, 2048, 128, 1), (128, 16384, 2048, 128, 1),
    (128, 16384, 2048, 128, 2))


def rows_of_bytes(slots):
    """Rows of 576 columns as 656 bytes: values of e4m3, a scale of each 128, rotated columns."""
    values, rotated = slots.split((LATENT, ROTATED), -1)
    groups = values.float().unflatten(-1, (-1, GROUP))
    scales = groups.abs().amax(-1) / 448
    elements = (groups / scales[..., None]).to(torch.float8_e4m3fn).flatten(-2)
    return torch.cat([x.contiguous().view(torch.uint8) for x in (elements, scales, rotated)], -1)


def stored(rows):
    """What rows stand for, in fp32."""
    if rows.dtype is not torch.uint8:
        return rows.float()
    values, scales, rotated = rows.split((LATENT, LATENT // GROUP * 4, ROTATED * 2), -1)
    values = values.contiguous().view(torch.float8_e4m3fn).float().unflatten(-1, (-1, GROUP))
    values = values * scales.contiguous().view(torch.float32)[..., None]
    return torch.cat((values.flatten(-2), rotated.contiguous().view(torch.bfloat16).float()), -1)


class Cell:
    """One shape: copies of its cache, their queries, and what each query sees."""

    def __init__(self, is_fp8, b, seqlen_k, topk, heads, sq):
        self.shape, self.is_fp8 = (b, seqlen_k, topk, heads, sq), is_fp8
        pages = -(-seqlen_k // PAGE)
        width = 656 if is_fp8 else (LATENT + ROTATED) * 2
        self.bytes = b * (sq * topk or seqlen_k) * width
        copies = max(2, -(-3 * CACHED // (b * seqlen_k * width)))
        self.table = torch.randperm(b * pages, device="cuda", dtype=torch.int32).view(b, pages)
        self.lengths = torch.full((b,), seqlen_k, dtype=torch.int32, device="cuda")
        self.indices = None
        if topk:
            at = torch.rand(b, sq, seqlen_k, device="cuda").topk(topk, -1).indices
            page = self.table.gather(1, at.flatten(1) // PAGE).view_as(at)
            self.indices = (page * PAGE + at % PAGE).to(torch.int32)
        self.caches = []
        for _ in range(copies):
            slots = torch.randn(b * pages, PAGE, 1, LATENT + ROTATED, device="cuda", dtype=torch.bfloat16)
            self.caches.append(rows_of_bytes(slots) if is_fp8 else slots)
        self.q = [torch.randn(b, sq, heads, LATENT + ROTATED, device="cuda", dtype=torch.bfloat16)
                  for _ in range(copies)]

    def call(self, i):
        q, cache, where = self.q[i], self.caches[i], {"seqlens": self.lengths, "page_table": self.table}
        if self.indices is not None:
            q, cache = q.flatten(0, 1)[:, None], cache.view(-1, 1, 1, cache.shape[-1])
            where = {"page_table": self.indices.flatten(0, 1), "skip_pages": True}
        if not self.is_fp8:
            k, v = cache[..., LATENT:], cache[..., :LATENT]
        else:
            values, scales, rotated = cache.split((LATENT, LATENT // GROUP * 4, ROTATED * 2), -1)
            k, v = rotated.view(torch.bfloat16), values.view(torch.float8_e4m3fn)
            where["v_scale"] = scales.view(torch.float32)
        return tessera.cached_attention(q[..., LATENT:], k, v, qv=q[..., :LATENT], **where)

    def difference(self):
        """Of the first sequence's first query."""
        slots = self.caches[0].flatten(0, 2)
        if self.indices is None:
            chosen = (self.table[0, :, None].long() * PAGE + torch.arange(PAGE, device="cuda")).flatten()
            chosen = chosen[: self.shape[1]]
        else:
            chosen = self.indices[0, 0].long()
        x = stored(slots[chosen])
        weights = (self.q[0][0, 0].float() @ x.T * (LATENT + ROTATED) ** -0.5).softmax(-1)
        return far(self.call(0)[0, 0], weights @ x[:, :LATENT])

    def flops(self):
        b, seqlen_k, topk, heads, sq = self.shape
        return 2 * b * sq * heads * (topk or seqlen_k) * (2 * LATENT + ROTATED)


def main():
    options = command_line(__doc__, 7).parse_args()
    library = libtessera.Library(options.library)
    rows = []
    for is_fp8 in (False, True):
        for shape in SHAPES:
            cell = Cell(is_fp8, *shape)
            us = replay([lambda i=i: cell.call(i) for i in range(len(cell.caches))], options.rounds)
            read = library.peaks(0.05, "gpu").read_bytes * 1e-9
            gb = cell.bytes / us / 1e3
            b, seqlen_k, topk, heads, sq = shape
            row = {"date": datetime.date.today().isoformat(), "commit": options.commit, "driver": query("driver_version"),
                   "sm_mhz": query("clocks.sm"), "rows": "656 bytes" if is_fp8 else "bf16", "b": b,
                   "seqlen_k": seqlen_k, "topk": topk, "h": heads, "sq": sq, "page": PAGE, "us": f"{us:.2f}",
                   "tflops": f"{cell.flops() / us / 1e6:.1f}", "gb_per_s": f"{gb:.0f}", "read_gb_per_s": f"{read:.0f}",
                   "of_read": f"{gb / read:.3f}", "difference": f"{cell.difference():.1e}"}
            rows.append(row)
            print(f"{row['rows']} b={b} k={seqlen_k} topk={topk} h={heads} q={sq}: {us:.1f} us, {row['tflops']} TFLOP/s, "
                  f"{gb / read:.3f} of the read; difference {row['difference']}", flush=True)
            del cell
    write(options.output, COLUMNS, rows)


if __name__ == "__main__":
    main()
