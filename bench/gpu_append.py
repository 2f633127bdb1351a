"""Appending to a cache on an H200, shape by shape: bench/results/h200_append.csv.

    gpu_append.py --library build/release/libtessera.so --output FILE

Times are of graph replays: copies of cache and new rows take turns, so that nothing lies in the second-level cache.
GB/s: new rows and queries, read once and written once. `of_copy` is that over what a plain copy of as many bytes
reaches in the same run, by graph replays too. Every result is compared with PyTorch's: new rows bit for bit where
nothing is rotated, and no other slot may change. What goes into a cache of 8 bits, with scales by token, is compared
bit for bit with the same append on the CPU. Random normal inputs, medians. Needs PyTorch.
"""

import datetime

import torch

from gpu_decode import CACHED, command_line, replay
from gpu_forward import DTYPES, libtessera, query, write

COLUMNS = ["date", "commit", "driver", "sm_mhz", "dtype", "kv", "b", "new", "h", "hk", "d", "page", "rotary", "places",
           "us", "gb_per_s", "copy_us", "of_copy", "difference"]
CACHE = {"full": 1, "after": 2, "before": 3}
CODES = {"f32": 0, "bf16": 1, "f16": 2, "e4m3": 3, "i8": 4}
TOKEN = 3
#: b, new rows a sequence, h (0: no queries), hk, d, page (0: rows), rotary dim, interleaved, places, and the cache's
#: type where it has 8 bits
SHAPES = (
    (1, 8192, 0, 8, 128, 0, 0, False, "before"), (1, 8192, 0, 8, 128, 16, 0, False, "before"),
    (1, 8192, 0, 8, 128, 16, 0, False, "slots"), (1, 8192, 32, 8, 128, 16, 128, False, "before"),
    (1, 8192, 32, 8, 128, 16, 128, True, "slots"), (16, 512, 32, 8, 128, 1, 64, False, "after"),
    (1, 8192, 0, 1, 64, 16, 0, False, "before"), (1, 8192, 0, 8, 100, 16, 0, False, "before"),
    (64, 1, 32, 8, 128, 16, 128, False, "after"), (1, 1, 32, 8, 128, 16, 128, False, "after"),
    (256, 4, 32, 8, 128, 16, 128, False, "before"),
    (1, 8192, 0, 8, 128, 0, 0, False, "before", "e4m3"), (1, 8192, 0, 8, 128, 16, 0, False, "before", "e4m3"),
    (1, 8192, 0, 8, 128, 16, 0, False, "before", "i8"), (1, 8192, 32, 8, 128, 16, 128, False, "before", "e4m3"),
    (1, 8192, 32, 8, 128, 16, 128, True, "slots", "e4m3"), (64, 1, 32, 8, 128, 16, 128, False, "after", "e4m3"),
    (1, 1, 32, 8, 128, 16, 128, False, "after", "e4m3"), (256, 4, 32, 8, 128, 16, 128, False, "before", "e4m3"))


def rotated(x, cos, sin, dim, interleaved):
    """x: (rows, heads, d); cos, sin: (rows, dim / 2) in fp32."""
    y, c, s = x.float().clone(), cos[:, None], sin[:, None]
    first, second = (slice(0, dim, 2), slice(1, dim, 2)) if interleaved else (slice(0, dim // 2), slice(dim // 2, dim))
    a, b = y[..., first].clone(), y[..., second].clone()
    y[..., first], y[..., second] = a * c - b * s, a * s + b * c
    return y.to(x.dtype)


class Case:
    """A cache, new rows for it, and what must come of them."""

    def __init__(self, library, dtype, b, new, h, hk, d, page, rotary, interleaved, places, kv=None):
        kind, before = DTYPES[dtype], 37
        capacity = -(-(before + new) // max(page, 1)) * max(page, 1)
        columns = capacity // page if page else 0

        def normal(*sizes):
            return torch.randn(*sizes, device="cuda").to(kind)

        self.k_new, self.v_new = normal(b, new, hk, d), normal(b, new, hk, d)
        entries = (b * columns, page) if page else (b, capacity)
        stored = torch.uint8 if kv else kind
        self.k = torch.full((*entries, hk, d), 7.0, device="cuda", dtype=stored)
        self.v = torch.full((*entries, hk, d), 7.0, device="cuda", dtype=stored)
        table = torch.randperm(b * columns, device="cuda").int().view(b, columns) if page else None
        position = torch.arange(before, before + new, device="cuda").repeat(b)
        sequence = torch.arange(b, device="cuda").repeat_interleave(new)
        entry = table[sequence, position // page] if page else sequence
        self.slots = entry.long() * entries[1] + position % entries[1]
        shape = dict(dtype=CODES[dtype], batch=b, num_heads=h, num_heads_k=hk, seqlen_q=new, seqlen_k=capacity,
                     head_dim=d, head_dim_v=d, seqlen_new=new, page_size=page, num_pages=b * columns,
                     rotary_dim=rotary)
        tensors = dict(k_new=self.k_new, v_new=self.v_new, k=self.k, v=self.v)
        self.scales = {}
        if kv:
            shape |= dict(dtype_kv=CODES[kv], scale_k=TOKEN, scale_v=TOKEN)
            self.scales = {f"{x}_scale": torch.full((*entries, hk), 7.0, device="cuda") for x in "kv"}
        self.q = self.q_before = None
        if h:
            self.q_before, self.q = normal(b, new, h, d), normal(b, new, h, d)
            tensors |= dict(q=self.q_before, q_out=self.q)
        if places == "slots":
            shape |= dict(slot_mapping=1, packed=1, packed_new=1, total_q=b * new if h else 0, total_new=b * new,
                          seqlen_new=0, cache=CACHE["full"])
            tensors |= dict(slot_mapping=self.slots, k_new=self.k_new.flatten(0, 1), v_new=self.v_new.flatten(0, 1))
            if h:
                tensors |= dict(q=self.q_before.flatten(0, 1), q_out=self.q.flatten(0, 1))
        else:
            shape |= dict(cache=CACHE[places])
            length = before if places == "before" else before + new
            tensors["seqlens"] = torch.full((b,), length, dtype=torch.int32, device="cuda")
            if page:
                tensors["page_table"] = table
        k, q = self.k_new, self.q_before
        if rotary:
            angles = torch.rand(capacity, rotary // 2, device="cuda") * 6.0
            cos, sin = angles.cos(), angles.sin()
            shape |= dict(rotary_positions=capacity, rotary_dtype=CODES["f32"], rotary_interleaved=int(interleaved))
            tensors |= dict(rotary_cos=cos, rotary_sin=sin, stride_rotary_cos=rotary // 2,
                            stride_rotary_sin=rotary // 2)
            if places == "slots":
                tensors["rotary_positions"] = position.int()
            tables = (cos[position], sin[position], rotary, interleaved)
            k = rotated(k.flatten(0, 1), *tables)
            q = rotated(q.flatten(0, 1), *tables) if h else None
        self.expected = (k.reshape(-1, hk, d), self.v_new.reshape(-1, hk, d), q)
        numbers = {name: libtessera.slot_scales(x) for name, x in self.scales.items()}
        self.append = libtessera.Append(library, shape, tensors | numbers)
        self.kept, self.library, self.shape = tensors, library, shape  # alive
        size, written = self.k_new.element_size(), self.k.element_size()
        self.bytes = 2 * b * new * (hk * (d * (size + written) + 4 * bool(kv)) + h * d * size)

    def enqueue(self):
        self.append.enqueue(torch.cuda.current_stream().cuda_stream)

    def difference(self):
        """The greatest of new rows and queries; infinite where values differ at all, or other slots have changed."""
        k, v, q = self.expected
        if self.scales:
            return self.difference_of_bits()
        new = torch.zeros(self.k.shape[0] * self.k.shape[1], dtype=torch.bool, device="cuda")
        new[self.slots] = True
        is_k, is_v = self.k.flatten(0, 1), self.v.flatten(0, 1)
        if not torch.equal(is_v[self.slots], v) or bool((is_k[~new] != 7.0).any() | (is_v[~new] != 7.0).any()):
            return float("inf")
        worst = (is_k[self.slots].float() - k.float()).abs().max().item()
        if q is not None:
            worst = max(worst, (self.q.reshape(q.shape).float() - q.float()).abs().max().item())
        return worst

    def difference_of_bits(self):
        """0, or infinite where a CPU's append leaves other bits in the cache or its scales; else the queries'."""
        host = {name: x.cpu() if torch.is_tensor(x) else x for name, x in self.kept.items()}
        for name in ("k", "v"):
            host[name] = torch.full_like(host[name], 7)
        scales = {name: torch.full_like(x, 7.0, device="cpu") for name, x in self.scales.items()}
        numbers = {name: libtessera.slot_scales(x) for name, x in scales.items()}
        libtessera.Append(self.library, self.shape, host | numbers).enqueue(None, "cpu")
        same = [torch.equal(host["k"], self.k.cpu()), torch.equal(host["v"], self.v.cpu()),
                *(torch.equal(x, self.scales[name].cpu()) for name, x in scales.items())]
        if not all(same):
            return float("inf")
        if self.q is None:
            return 0.0
        return (host["q_out"].float() - self.q.cpu().view_as(host["q_out"]).float()).abs().max().item()


def measure(library, dtype, shape, rounds):
    first = Case(library, dtype, *shape)
    cases = [first] + [Case(library, dtype, *shape) for _ in range(max(1, min(24, -(-3 * CACHED // first.bytes))))]
    ours = replay([case.enqueue for case in cases], rounds)
    pairs = [(torch.empty(case.bytes // 2, dtype=torch.uint8, device="cuda"),
              torch.empty(case.bytes // 2, dtype=torch.uint8, device="cuda")) for case in cases]
    copy = replay([lambda p=p: p[0].copy_(p[1]) for p in pairs], rounds)
    return ours, first.bytes / ours * 1e-3, copy, max(case.difference() for case in cases)


def main():
    parser = command_line(__doc__, 15)
    arguments = parser.parse_args()
    library = libtessera.Library(arguments.library)
    rows = []
    for shape in SHAPES:
        b, new, h, hk, d, page, rotary, interleaved, places, kv = (*shape, None)[:10]
        ours, rate, copy, difference = measure(library, arguments.dtype, shape, arguments.rounds)
        turned = f"{rotary}{' interleaved' if interleaved else ''}" if rotary else "none"
        rows.append(dict(zip(COLUMNS, (
            datetime.date.today().isoformat(), arguments.commit, query("driver_version"), query("clocks.sm"),
            arguments.dtype, kv or arguments.dtype, b, new, h, hk, d, page or "rows", turned, places, f"{ours:.2f}",
            f"{rate:.0f}", f"{copy:.2f}", f"{copy / ours:.3f}", f"{difference:.1e}"))))
        print(f"kv={kv} b={b} new={new} h={h}/{hk} d={d} page={page} rotary={turned} {places}: {ours:.2f} us, "
              f"{rate:.0f} GB/s, {copy / ours:.3f} of a copy ({copy:.2f} us); difference {difference:.1e}", flush=True)
        torch.cuda.empty_cache()
    write(arguments.output, COLUMNS, rows)


if __name__ == "__main__":
    main()
