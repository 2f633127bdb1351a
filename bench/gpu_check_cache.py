"""Correctness of prefill over caches on a GPU: every case against a double-precision reference on the same GPU.

    gpu_check_cache.py --library build/release/libtessera.so [--seed N] [--cases N]

The rule is that of gpu_check.py. A cache is NaN wherever no sequence has a key; what tables and indices say beyond the
lengths is hostile; some lengths are 0 or negative. Every case but the random ones must be taken on Hopper by a row that
walks over tiles of query rows, so they have many heads. TESSERA_GPU_AS=a100, say, checks kernels of other GPUs: these may
decode some of them, half at most. Needs PyTorch.
"""

import itertools
import math
import random
import sys

import torch

from gpu_check import DTYPES, UNIT, Case, command_line, exact, guarded, libtessera, sweep

#: whether a row that walks over tiles took each of the cases that are for one
walked = []
HOSTILE = (-1, -2, -(2**31), 2**31 - 1)


class CacheCase(Case):
    """A problem of gpu_check.py whose keys lie in a cache of `sk` slots a sequence: in rows or in pages."""

    def __init__(self, page=0, lengths="after", new=0, rows=0, leftpad=False, ids="i32", missing=False, tiles=True, **features):
        super().__init__(**{"b": 3, "h": 64, "hk": 32, "sq": 190, "sk": 300} | features)
        self.page, self.lengths, self.new, self.rows, self.ids = page, lengths, new, rows, ids
        self.leftpad, self.missing, self.tiles = leftpad, missing, tiles
        self.pages = (rows or self.b) * -(-self.sk // page) + 3 if page else 0

    def problem(self, total_q=0, total_k=0, direction="fwd"):
        words = [super().problem(total_q, 0, direction).replace(f"packed={total_q},0", f"packed={total_q}")]
        words.append(f"cache={self.lengths}" + (f":{self.new}" if self.lengths == "before" else ""))
        if self.page:
            words.append(f"pages={self.pages}x{self.page}" + (":i64" if self.ids == "i64" else ""))
        if self.rows:
            words.append(f"rows={self.rows}")
        if self.leftpad:
            words.append("leftpad")
        return " ".join(words)


class Cache:
    """The memory of a case's cache, and where each sequence's keys lie in it."""

    def __init__(self, case, generator):
        self.case = case
        self.filled, lengths, self.pads, self.index = [], [], [], []
        free = list(range(case.rows or case.b))
        generator.shuffle(free)
        for b in range(case.b):
            room = case.sk - case.new
            length = generator.choice((room, room, 0, -1, 1, generator.randint(0, room), generator.randint(0, room)))
            if b == 0:
                length = max(length, room // 2)
            lengths.append(length)
            filled = case.sk if case.lengths == "full" else -1 if length < 0 else length + case.new
            self.filled.append(filled)
            self.pads.append(generator.choice((0, 3, 17, max(filled, 0) // 2)) if case.leftpad else 0)
            if case.rows:
                self.index.append(generator.choice(free) if filled > 0 else generator.choice(HOSTILE))
            else:
                self.index.append(b)
        if case.rows and not case.page:  # in rows every sequence has one of its own
            self.index = [free[b % len(free)] if f > 0 else i for b, (f, i) in enumerate(zip(self.filled, self.index))]
        self.arrays = {}
        ints = lambda x, dtype=torch.int32: torch.tensor(x, dtype=dtype, device="cuda")
        if case.lengths != "full":
            self.arrays["seqlens"] = ints(lengths)
        if case.rows:
            self.arrays["index"] = ints(self.index)
        if case.leftpad:
            self.arrays["leftpad"] = ints(self.pads)
        self.table = None
        if case.page:
            self.draw_table(generator)
            wide = torch.int64 if case.ids == "i64" else torch.int32
            self.arrays["page_table"] = ints(self.table, wide)
        entries = case.pages if case.page else case.rows or case.b
        shape = lambda dim: (entries, case.page or case.sk, case.hk, dim + 3 * case.unaligned)
        self.k, self.v = (torch.full(shape(dim), math.nan, device="cuda").to(DTYPES[case.dtype]) for dim in (case.d, case.dv))
        if case.unaligned:
            self.k, self.v = self.k[..., 1:case.d + 1], self.v[..., 1:case.dv + 1]
        for b in range(case.b):
            entries, slots, there = self.places(b)
            for x in (self.k, self.v):
                x[entries[there], slots[there]] = torch.randn(int(there.sum()), *x.shape[2:], device="cuda").to(x.dtype)

    def draw_table(self, generator):
        case, columns = self.case, -(-self.case.sk // self.case.page)
        free = list(range(case.pages))
        generator.shuffle(free)
        nowhere = (*HOSTILE, case.pages) + ((2**32, 2**40 + 1) if case.ids == "i64" else ())
        self.table = [[generator.choice(nowhere) for _ in range(columns)] for _ in range(case.rows or case.b)]
        for b, filled in enumerate(self.filled):
            row = self.table[self.index[b]] if filled > 0 else None
            for column in range(self.pads[b] // case.page, -(-max(filled, 0) // case.page)):
                # Two sequences of one row share its pages. A page that does not exist holds zeros.
                if not 0 <= row[column] < case.pages and not (case.missing and generator.random() < 0.3):
                    row[column] = free.pop()

    def places(self, b):
        """Where the keys of a sequence lie, one after another: entries of k and v, slots of them, and whether they exist."""
        slots = torch.arange(self.pads[b], max(self.filled[b], self.pads[b]), device="cuda")
        if not self.case.page or slots.numel() == 0:
            return torch.full_like(slots, self.index[b]), slots, torch.ones_like(slots, dtype=torch.bool)
        row = torch.tensor(self.table[self.index[b]], device="cuda")
        pages = row[slots // self.case.page]
        return pages, slots % self.case.page, (pages >= 0) & (pages < self.case.pages)

    def sequence(self, b):
        """(k, v) of one sequence, as (keys, heads, dim)."""
        entries, slots, there = self.places(b)
        return [torch.where(there[:, None, None], x[entries.where(there, 0), slots], 0) if slots.numel()
                else x.new_zeros(0, *x.shape[2:]) for x in (self.k, self.v)]


def check(library, case, seed):
    """(ok, line)."""
    generator = random.Random(seed)
    torch.manual_seed(seed)
    dtype = DTYPES[case.dtype]
    lq = [case.sq] * case.b
    if case.packed:
        lq = [generator.choice((0, 1, generator.randint(0, case.sq))) for _ in lq]
        lq[generator.randrange(case.b)] = case.sq
    first = [0, *itertools.accumulate(lq)]
    cache = Cache(case, generator)
    rows = (sum(lq),) if case.packed else (case.b, case.sq)
    q = torch.randn(*rows, case.h, case.d + 3 * case.unaligned, device="cuda").to(dtype)
    q = q[..., 1:case.d + 1] if case.unaligned else q
    o, o_intact = guarded((*rows, case.h, case.dv), dtype, shift=int(case.unaligned))
    lse, lse_intact = guarded((case.h, sum(lq)) if case.packed else (case.b, case.h, case.sq), torch.float32)
    extra = dict(cache.arrays)
    if case.packed:
        extra["cu_seqlens_q"] = torch.tensor(first, dtype=torch.int32, device="cuda")
        if case.lengths == "before":
            extra["cu_seqlens_new"] = torch.tensor([case.new * b for b in range(case.b + 1)], dtype=torch.int32,
                                                   device="cuda")
    if case.alibi:
        extra["alibi_slopes"] = torch.rand(case.h, device="cuda") * 0.2
    if case.sink:
        extra["sink"] = torch.randn(case.h, device="cuda")
    extra["philox_seed"] = seed
    name = f"{case.problem(sum(lq))}, seed {seed}"
    plan = library.plan(case.problem(sum(lq)), "gpu")
    tensors = plan.tensors(q=q, k=cache.k, v=cache.v, o=o, softmax_lse=lse, **extra)
    workspace = torch.empty(max(1, plan.workspace_bytes), dtype=torch.uint8, device="cuda")
    plan.enqueue(tensors, torch.cuda.current_stream().cuda_stream, workspace)
    torch.cuda.synchronize()
    if not (o_intact() and lse_intact()):
        return False, f"{name}: wrote outside its outputs"
    worst, bound, worst_lse, bound_lse = 0.0, 1e-5, 0.0, 1e-5
    for b, nq in enumerate(lq):
        if nq == 0:
            continue
        k, v = cache.sequence(b)
        rows = slice(first[b], first[b] + nq)
        part = (q[rows], o[rows], lse[:, rows]) if case.packed else (q[b], o[b], lse[b])
        e, l, naive, largest = exact(case, part[0], k, v, None, extra, b, nq, k.shape[0])
        difference = (part[1].double() - e).abs().max().item()
        worst = max(worst, difference if difference == difference else math.inf)
        bound = max(bound, 2 * (naive - e).abs().max().item() + 1e-5, 2 * UNIT[case.dtype] * e.abs().max().item())
        same = l.isinf() & (part[2].double() == l)
        dl = torch.where(same, torch.zeros_like(l), (part[2].double() - l).abs()).max().item()
        worst_lse = max(worst_lse, dl if dl == dl else math.inf)
        bound_lse = max(bound_lse, 1e-5 + (5e-7 + case.d / 16 * 2**-23) * largest)
    if case.tiles:
        walked.append(".decode." not in plan.kernel)
    ok = worst <= bound and worst_lse <= bound_lse and not (case.tiles and plan.kernel.startswith("sm90.forward.decode"))
    return ok, (f"{name}: {plan.kernel} o {worst:.2e} / {bound:.2e}, lse {worst_lse:.2e} / {bound_lse:.2e}"
                f"{'' if ok else '  WRONG'}")


MASKS = ({}, {"causal": True}, {"causal": True, "top_left": True}, {"left": 160, "right": 0}, {"left": 40, "right": 33})
FEATURES = ({"softcap": 20.0}, {"alibi": True}, {"sink": True}, {"dropout": 0.2}, {"scale": -0.1}, {"hk": 1}, {"hk": 64},
            {"h": 128, "hk": 32, "sq": 90}, {"dtype": "f16"}, {"dv": 64}, {"packed": True}, {"unaligned": True})
CACHES = ({"rows": 5}, {"leftpad": True}, {"lengths": "full"}, {"lengths": "before", "new": 7}, {"ids": "i64"},
          {"missing": True}, {"rows": 5, "leftpad": True, "ids": "i64", "lengths": "before", "new": 3})


def paged(features):
    return features.get("ids", "i32") != "i64" and not features.get("missing")


def edge_cases():
    for page, d in itertools.product((0, 1, 2, 3, 4, 7, 8, 16, 24, 48, 64, 100, 128, 256, 1024), (64, 96, 128, 192, 256)):
        yield CacheCase(page=page, d=d, causal=True, dtype=("bf16", "f16")[page % 3 == 0])
    for page, d, mask in itertools.product((0, 1, 16, 80), (64, 128), MASKS):
        for features in FEATURES:
            yield CacheCase(page=page, d=d, **mask | features)
        for cache in CACHES:
            if page or paged(cache):
                yield CacheCase(page=page, d=d, **mask | cache)
                yield CacheCase(page=page, d=d, packed=True, **mask | cache)
    # Several tiles for every multiprocessor, of rows with other blocks of keys.
    for page, d in itertools.product((0, 1, 16, 256), (64, 96, 128, 192, 256)):
        for mask in ({}, {"causal": True}):
            yield CacheCase(b=2, sq=2100, sk=4400, h=8, hk=8, d=d, page=page, lengths="full", **mask)
            yield CacheCase(b=6, sq=600, sk=1500, h=16, hk=4, d=d, page=page, packed=True, **mask)


def random_case(generator):
    pick = lambda *values: generator.choice(values)
    page = pick(0, 1, 2, 5, 8, 16, 32, 64, 96, 200)
    hk = generator.choice((1, 2, 3, 24))
    features = {}
    for name, values in (("softcap", (0.0, 5.0)), ("alibi", (False, True)), ("sink", (False, True)),
                         ("top_left", (False, True)), ("packed", (False, True)), ("dropout", (0.0, 0.0, 0.2)),
                         ("leftpad", (False, True)), ("rows", (0, 6)), ("lengths", ("after", "full"))):
        features[name] = pick(values[0], *values)
    return CacheCase(page=page, tiles=False, dtype=pick("bf16", "f16"), b=generator.randint(1, 4), h=hk * generator.randint(1, 4), hk=hk,
                     sq=generator.randint(100, 500), sk=generator.randint(20, 900), d=8 * generator.randint(1, 32),
                     dv=8 * generator.randint(1, 32), left=pick(-1, -1, generator.randint(0, 400)),
                     right=pick(-1, 0, generator.randint(0, 400)), ids=pick("i32", "i64") if page else "i32",
                     missing=page > 0 and pick(False, False, True), **features)


def main():
    arguments = command_line(__doc__, cases=200).parse_args()
    library = libtessera.Library(arguments.library)
    reduced = (CacheCase(page=page, d=d, causal=True) for page in (0, 1, 16, 100) for d in (64, 128, 256))
    failures = sweep(arguments, library, check, "fwd", reduced, edge_cases(), random_case)
    print(f"{sum(walked)} of {len(walked)} cases for tiles were walked over in tiles")
    sys.exit(failures > 0 or 2 * sum(walked) < len(walked))


if __name__ == "__main__":
    main()
