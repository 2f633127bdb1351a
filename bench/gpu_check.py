"""Correctness of libtessera on a GPU: every case against a double-precision reference on the same GPU.

    gpu_check.py --library build/release/libtessera.so [--seed N] [--cases N]

Outputs start as NaN between guard zones; inputs are random, the seed is printed. The rule is the
judge's (docs/correctness.md): max|o - exact| <= 2 max|three steps in the same dtype - exact| + 1e-5, or
two unit roundoffs of the largest output where that is more; |lse - exact| <= 1e-5 + (5e-7 + head_dim / 16
2^-23) of the largest score. Every head dim, every feature alone and in pairs, ragged sizes, many tiles, hostile scores, random
problems; then one case 1000 times, bit for bit, and inside a CUDA graph. Needs PyTorch.
"""

import argparse
import itertools
import math
import pathlib
import random
import sys

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "demo"))
import libtessera  # noqa: E402

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
UNIT = {"bf16": 2**-8, "f16": 2**-11}
GUARD = 4096


def guarded(shape, dtype, shift=0):
    """A NaN tensor, `shift` elements from an aligned address, and a function that says whether its guard
    zones are untouched."""
    count, start = math.prod(shape), GUARD + shift
    whole = torch.full((count + 2 * GUARD + shift,), float("nan"), dtype=dtype, device="cuda")
    intact = lambda: bool(whole[:start].isnan().all() and whole[start + count:].isnan().all())
    return whole[start:start + count].view(shape), intact


class Case:
    """One problem: what its string says, drawn by a seed."""

    def __init__(self, dtype="bf16", b=1, h=2, hk=1, sq=64, sk=64, d=64, dv=None, causal=False,
                 left=-1, right=-1, top_left=False, packed=False, softcap=0.0, alibi=False,
                 bias=None, sink=False, dropout=0.0, scale=None, heads_outside=False, scores="normal",
                 unaligned=False, poisoned=False, last_only=False, deterministic=False, batch_invariant=False,
                 row=""):
        self.__dict__.update(locals())
        self.dv = dv or d
        if causal:
            self.right = 0

    def problem(self, total_q=0, total_k=0, direction="fwd"):
        words = [f"{direction} {self.dtype} b={self.b} h={self.h}/{self.hk} q={self.sq} k={self.sk}",
                 f"d={self.d}/{self.dv}"]
        if self.packed:
            words.append(f"packed={total_q},{total_k}")
        if self.left >= 0 or self.right >= 0:
            words.append(f"window={self.left},{self.right}")
        if self.top_left:
            words.append("align=tl")
        if self.softcap:
            words.append(f"softcap={self.softcap}")
        if self.alibi:
            words.append("alibi=h")
        if self.bias:
            words.append(f"bias={self.bias}")
        if self.sink:
            words.append("sink")
        if self.dropout:
            words.append(f"dropout={self.dropout}")
        if self.unaligned:
            words.append("unaligned")
        if self.scale:
            words.append(f"scale={self.scale}")
        for order in ("deterministic", "batch_invariant"):
            if getattr(self, order):
                words.append(order)
        return " ".join(words)


def lengths(generator, count, longest):
    values = [generator.randint(0, longest) for _ in range(count)]
    values[generator.randrange(count)] = longest
    return values


def hostile(scores, q, k):
    """q and k whose scores are not simply normal: far below 0, or growing or falling along the keys."""
    if scores == "negative":  # beyond exp's range below 0
        return q.abs() * 8, -k.abs() * 8
    if scores in ("rising", "falling"):
        along = torch.linspace(0, 1, k.shape[-3], device=k.device)
        along = (along if scores == "rising" else 1 - along)[:, None, None]
        return q.abs(), (k * 0.1 + 12 * along).to(k.dtype)
    if scores == "large":
        return q * 30, k * 30
    return q, k


def run(library, case, seed):
    """A case's forward pass: (plan, its tensors, the memory behind them, whether both guards are intact)."""
    generator = random.Random(seed)
    torch.manual_seed(seed)
    dtype = DTYPES[case.dtype]
    if case.packed:
        lq = lengths(generator, case.b, case.sq)
        lk = lengths(generator, case.b, case.sk)
    else:
        lq, lk = [case.sq] * case.b, [case.sk] * case.b
    if case.packed:
        shape = lambda total, heads, dim: (sum(total), heads, dim)
    else:
        shape = lambda total, heads, dim: (case.b, total[0], heads, dim)

    def tensor(total, heads, dim):
        x = torch.randn(shape(total, heads, dim + 3 * case.unaligned), device="cuda").to(dtype)
        x = x[..., 1:dim + 1] if case.unaligned else x
        if case.heads_outside and not case.packed:
            x = x.transpose(1, 2).contiguous().transpose(1, 2)
        return x

    q, k, v = tensor(lq, case.h, case.d), tensor(lk, case.hk, case.d), tensor(lk, case.hk, case.dv)
    q, k = hostile(case.scores, q, k)
    if case.poisoned:  # what lies in one sequence must not reach another
        for i in range(0, case.b, 2):
            rows = slice(sum(lk[:i]), sum(lk[:i + 1]))
            k[rows], v[rows] = math.nan, math.inf
    o, o_intact = guarded(shape(lq, case.h, case.dv), dtype, shift=int(case.unaligned))
    lse_shape = (case.h, sum(lq)) if case.packed else (case.b, case.h, case.sq)
    lse, lse_intact = guarded(lse_shape, torch.float32)
    extra = {}
    bias = None
    if case.packed:
        cu = lambda values: torch.tensor([0, *itertools.accumulate(values)], dtype=torch.int32,
                                         device="cuda")
        extra |= {"cu_seqlens_q": cu(lq), "cu_seqlens_k": cu(lk)}
    if case.alibi:
        extra["alibi_slopes"] = torch.rand(case.h, device="cuda") * 0.2
    if case.sink:
        extra["sink"] = torch.randn(case.h, device="cuda")
    if case.bias:
        sizes = [n if letter in case.bias else 1
                 for letter, n in zip("bhqk", (case.b, case.h, case.sq, case.sk))]
        bias = torch.randn(sizes, device="cuda")
        extra["bias"] = bias
    extra["philox_seed"] = seed
    plan = library.plan(case.problem(sum(lq), sum(lk)), "gpu")
    tensors = plan.tensors(q=q, k=k, v=v, o=o, softmax_lse=lse, **extra)
    plan.memory = torch.empty(plan.workspace_bytes, dtype=torch.uint8, device="cuda")
    plan.enqueue(tensors, torch.cuda.current_stream().cuda_stream, plan.memory)
    torch.cuda.synchronize()
    return plan, tensors, (q, k, v, o, lse, bias, extra, lq, lk), (o_intact(), lse_intact())


def philox(counter, key):
    """Philox4x32-10 on int64 tensors of 32-bit words (S8; Salmon et al., SC 2011).

    Written once more, on the device, so that the kernels' own is judged and not repeated; the library's
    dropout_mask would have to make the mask of the whole batch on the host.
    """
    mask = 0xFFFFFFFF

    def multiply(a, b):  # high and low word
        low, high = a * (b & 0xFFFF), a * (b >> 16)
        high = high + (low >> 16)
        return high >> 16, (high & 0xFFFF) << 16 | low & 0xFFFF

    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        (h0, l0), (h1, l1) = multiply(c0, 0xD2511F53), multiply(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = h1 ^ c1 ^ k0, l1, h0 ^ c3 ^ k1, l0
        k0, k1 = k0 + 0x9E3779B9 & mask, k1 + 0xBB67AE85 & mask
    return c0, c1, c2, c3


def dropout_scale(case, seed, b, nq, nk):
    """(heads, nq, nk): 0 where a weight is dropped, else 1 over the probability to keep."""
    words = lambda x: torch.tensor(x, dtype=torch.int64, device="cuda")
    mixed = philox([words(0)] * 4, (seed & 0xFFFFFFFF, seed >> 32))
    key = (mixed[0].item(), mixed[1].item())
    threshold = min(max(int(case.dropout * 65536 + 0.5), 1), 65535)
    octets = torch.arange((nk + 7) // 8, device="cuda")[None, None]
    queries = torch.arange(nq, device="cuda")[None, :, None]
    heads = torch.arange(case.h, device="cuda")[:, None, None]
    bits = philox((octets, queries, heads, torch.full_like(octets, b)), key)
    halves = [half for word in torch.broadcast_tensors(*bits) for half in (word & 0xFFFF, word >> 16)]
    kept = torch.stack(halves, -1).flatten(-2)[..., :nk] >= threshold
    return kept.double() * (65536 / (65536 - threshold))


def exact(case, q, k, v, bias, extra, b, nq, nk):
    """(o, lse, o by three steps, largest score) of one sequence in double: o as stored, lse (heads, seqlen_q)."""
    group = case.h // case.hk
    Q = q.double().transpose(0, 1)
    K, V = (x.double().transpose(0, 1).repeat_interleave(group, 0) for x in (k, v))
    scale = case.scale or case.d**-0.5
    s = Q @ K.transpose(-1, -2) * scale
    if case.softcap:
        s = case.softcap * torch.tanh(s / case.softcap)
    i = torch.arange(nq, device="cuda")[:, None]
    j = torch.arange(nk, device="cuda")[None]
    if bias is not None:
        full = bias.double().expand(case.b, case.h, case.sq, case.sk)[b][:, :nq, :nk]
        s = s + full
    if case.alibi:
        s = s - extra["alibi_slopes"].double()[:, None, None] * (i + nk - nq - j).abs()
    at = i + (0 if case.top_left else nk - nq)
    if case.right >= 0:
        s = s.masked_fill(j > at + case.right, -math.inf)
    if case.left >= 0:
        s = s.masked_fill(j < at - case.left, -math.inf)
    top = s
    if case.sink:
        top = torch.cat([s, extra["sink"].double()[:, None, None].expand(case.h, nq, 1)], -1)
    lse = torch.logsumexp(top, -1) if top.shape[-1] else torch.full((case.h, nq), -math.inf,
                                                                    dtype=torch.float64, device="cuda")
    p = torch.exp(s - torch.where(lse.isinf(), torch.zeros_like(lse), lse)[..., None])
    if case.dropout:
        p = p * dropout_scale(case, extra["philox_seed"], b, nq, nk)
    dtype = DTYPES[case.dtype]
    o = (p @ V).transpose(0, 1)
    naive = (p.to(dtype).double() @ V).transpose(0, 1).to(dtype).double()
    largest = s.masked_fill(s.isinf(), 0).abs().max().item() if s.numel() else 0.0
    return o, lse, naive, largest


def check(library, case, seed):
    """(ok, line)."""
    plan, _, (q, k, v, o, lse, bias, extra, lq, lk), intact = run(library, case, seed)
    name = (f"{case.problem(sum(lq), sum(lk)) if case.packed else case.problem()}, {case.scores} scores"
            f"{', poisoned neighbours' * case.poisoned}, seed {seed}")
    if not all(intact):
        return False, f"{name}: wrote outside its outputs"
    worst, bound, worst_lse, bound_lse = 0.0, 1e-5, 0.0, 1e-5
    first_q = first_k = 0
    for b, (nq, nk) in enumerate(zip(lq, lk)):
        if case.packed:
            qs, os_, ls = (slice(first_q, first_q + nq),) * 3
            part = (q[qs], k[first_k:first_k + nk], v[first_k:first_k + nk], o[os_], lse[:, ls])
        else:
            part = (q[b], k[b], v[b], o[b], lse[b])
        first_q, first_k = first_q + nq, first_k + nk
        if nq == 0 or (case.poisoned and b % 2 == 0) or (case.last_only and b < case.b - 1):
            continue
        e, l, naive, largest = exact(case, *part[:3], bias, extra, b, nq, nk)
        difference = (part[3].double() - e).abs().max().item()
        worst = max(worst, difference if difference == difference else math.inf)
        # Where the three steps were lucky: two unit roundoffs of the largest output.
        lucky = 2 * UNIT[case.dtype] * e.abs().max().item()
        bound = max(bound, 2 * (naive - e).abs().max().item() + 1e-5, lucky)
        same = (l.isinf() & (part[4].double() == l))
        dl = torch.where(same, torch.zeros_like(l), (part[4].double() - l).abs()).max().item()
        worst_lse = max(worst_lse, dl if dl == dl else math.inf)
        # A tensor core adds 16 products at a time to the sum and cuts off what is below its last bit.
        bound_lse = max(bound_lse, 1e-5 + (5e-7 + case.d / 16 * 2**-23) * largest)
    ok = worst <= bound and worst_lse <= bound_lse and case.row in plan.kernel
    return ok, (f"{name}: {plan.kernel} o {worst:.2e} / {bound:.2e}, lse {worst_lse:.2e} / "
                f"{bound_lse:.2e}{'' if ok else '  WRONG'}")


FEATURES = {
    "causal": {"causal": True},
    "causal, top left": {"causal": True, "top_left": True},
    "window": {"left": 60, "right": 33},
    "mha": {"hk": 4},
    "mqa": {"hk": 1},
    "packed": {"packed": True, "b": 5},
    "heads outside": {"heads_outside": True},
    "fp16": {"dtype": "f16"},
    "softcap": {"softcap": 30.0},
    "alibi": {"alibi": True},
    "bias": {"bias": "bhqk"},
    "bias of heads and keys": {"bias": "hk"},
    "sink": {"sink": True},
    "dropout": {"dropout": 0.3},
    "scale": {"scale": 0.3},
    "scale below 0": {"scale": -0.1},
    "head_dim_v": {"dv": 32},
    "unaligned": {"unaligned": True},
}


def edge_cases():
    for d in range(8, 257, 8):
        yield Case(d=d, sq=130, sk=200, h=2, hk=2, dtype=("bf16", "f16")[d // 8 % 2], causal=d % 16 == 0)
    for d, dv in ((192, 128), (64, 128), (128, 64), (40, 256), (256, 8)):
        yield Case(d=d, dv=dv, sq=77, sk=133)
    for sq, sk in ((1, 1), (1, 500), (500, 1), (63, 64), (64, 65), (129, 127), (300, 1000), (1000, 300),
                   (128, 128), (257, 513), (5, 0)):
        for mask in ({}, {"causal": True}, {"causal": True, "top_left": True}, {"left": 50, "right": 20},
                     {"left": 0, "right": 0}, {"left": 200}):
            yield Case(sq=sq, sk=sk, d=128, h=4, hk=2, **mask)
    for first, second in itertools.combinations_with_replacement(FEATURES, 2):
        features = FEATURES[first] | FEATURES[second]
        if features.get("bias") and features.get("packed"):
            continue
        for d in (64, 96, 128, 192, 256) if first == second else (64, 128):
            yield Case(**{"b": 2, "sq": 150, "sk": 270, "d": d, "h": 4, "hk": 2} | features)
    for scores, d, causal in itertools.product(("negative", "rising", "falling", "large"), (64, 128, 256),
                                               (False, True)):
        for cap in (0.0, 20.0):
            yield Case(b=2, sq=300, sk=500, h=2, hk=2, d=d, causal=causal, scores=scores, softcap=cap)
    for d, dv in ((1, 1), (7, 9), (20, 20), (64, 64), (65, 63), (100, 128), (129, 100), (250, 255)):
        for features in ({}, {"causal": True, "packed": True}, {"dropout": 0.2, "alibi": True, "sink": True}):
            yield Case(b=2, sq=150, sk=270, h=4, hk=2, d=d, dv=dv, unaligned=True, **features)
    for d, causal, b in itertools.product((64, 96, 128, 192, 256), (False, True), (4, 9)):
        yield Case(b=b, sq=300, sk=400, h=2, hk=2, d=d, causal=causal, packed=True, poisoned=True)
    # Many tiles for every multiprocessor, of equal and of unequal length.
    for d, s in itertools.product((64, 128, 192, 256), (512, 700)):
        for mask in ({}, {"causal": True}, {"left": 100, "right": 50}):
            yield Case(b=8, sq=s, sk=s, h=32, hk=8, d=d, **mask)
    yield from long_cases()
    yield from decode_cases()
    # More than 2^31 elements in each tensor; the last sequence is looked at.
    yield Case(b=70, sq=1024, sk=1024, h=256, hk=256, d=128, causal=True, last_only=True)
    yield Case(b=70000, sq=3, sk=5, h=1, hk=1, d=64)
    yield Case(b=1, sq=20, sk=30, h=70000, hk=70000, d=64)


def long_cases():
    """What rows for long sequences take; a tile of theirs sees all kinds of blocks."""
    for d, dtype in ((128, "bf16"), (96, "f16"), (104, "f16"), (72, "bf16")):
        for features in ({}, {"dv": 64}, {"sink": True}, {"packed": True, "b": 4}, {"heads_outside": True},
                         {"scores": "rising"}, {"left": 3900, "right": 4000}, {"top_left": True}):
            # So few tiles have these rows only where the batch may not decide.
            few = {"h": 4, "hk": 4} if "packed" in features else {"h": 2, "hk": 2, "batch_invariant": True}
            yield Case(**{"sq": 2100, "sk": 4500, "d": d, "dtype": dtype, "row": ".192x80"} | few | features)
        row = {"d": d, "dtype": dtype, "batch_invariant": True, "row": ".192x80"}
        yield Case(sq=2100, sk=8300, h=2, hk=2, causal=True, **row)
        yield Case(sq=4500, sk=4300, h=1, hk=1, left=4000, **row)
        yield Case(sq=300, sk=4100, h=8, hk=1, **row)  # eight heads' rows in a tile
        yield Case(b=2, sq=700, sk=8200, h=8, hk=2, causal=True, **row)
    # Those with one buffer of queries, several tiles one after another.
    for d, dtype in ((256, "bf16"), (256, "f16"), (208, "f16"), (232, "bf16")):
        for features in ({}, {"dv": 64}, {"sink": True}, {"packed": True, "poisoned": True}, {"heads_outside": True},
                         {"scores": "rising"}, {"left": 8000, "right": 7000}, {"hk": 2}, {"top_left": True},
                         {"causal": True}, {"packed": True, "causal": True}):
            yield Case(**{"b": 2, "sq": 1200, "sk": 9200, "h": 8, "hk": 8, "d": d, "dtype": dtype, "row": ".q1"}
                       | features)
        yield Case(b=40, sq=20, sk=8300, h=8, hk=8, d=d, dtype=dtype, row=".q1")
    for d, dtype, scores in itertools.product((64, 40), ("bf16", "f16"), ("normal", "rising", "falling", "large")):
        for features in ({}, {"causal": True}, {"packed": True, "b": 4, "poisoned": True}, {"left": 2300, "right": 50},
                         {"softcap": 4.0}, {"sink": True, "hk": 1}):
            yield Case(**{"sq": 4200, "sk": 4500, "h": 8, "hk": 8, "d": d, "dtype": dtype, "scores": scores,
                          "softcap": 30.0, "row": ".192x96.softcap"} | features)


def decode_cases():
    """Few rows against many keys: one split and several, every group, queries and heads in any mixture."""
    for d, dtype in ((64, "bf16"), (128, "bf16"), (256, "f16"), (40, "f16"), (104, "bf16"), (72, "f16")):
        for features in ({}, {"causal": True}, {"dv": 64}, {"sink": True}, {"alibi": True}, {"bias": "hk"}, {"bias": "bhqk"},
                         {"softcap": 5.0}, {"left": 700, "right": 0}, {"left": 3, "right": 2}, {"heads_outside": True},
                         {"scores": "rising"}, {"scores": "falling"}, {"scores": "large"}, {"top_left": True, "causal": True},
                         {"packed": True, "b": 5, "poisoned": True}, {"packed": True, "b": 4, "causal": True, "sink": True},
                         {"batch_invariant": True}):
            for sq, h, hk, sk in ((1, 7, 1, 3000), (3, 10, 2, 700), (1, 32, 2, 20000), (16, 2, 2, 1), (4, 4, 1, 270)):
                yield Case(**{"b": 2, "sq": sq, "sk": sk, "h": h, "hk": hk, "d": d, "dtype": dtype, "row": ".decode."}
                           | features)
        # A last part of one tile of keys, in blocks that go on with another item.
        for sk in (513, 1030, 1537):
            yield Case(b=40, sq=8, sk=sk, h=16, hk=8, d=d, dtype=dtype, batch_invariant=True, row=".decode.")


def reduced_cases():
    """Every row of the catalog once, all kinds of tiles."""
    for d in (96, 128):
        yield Case(sq=300, sk=4100, h=8, hk=1, d=d, causal=True, batch_invariant=True, row=".192x80")
        yield Case(b=2, sq=2100, sk=4500, h=8, hk=8, d=d, packed=True, poisoned=True, row=".192x80")
    yield Case(b=4, sq=700, sk=8300, h=8, hk=8, d=256, packed=True, poisoned=True, row=".q1")
    yield Case(sq=2100, sk=2500, h=4, hk=4, d=64, softcap=30.0, causal=True, row=".192x96.softcap")
    for d, dv in ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)):
        yield Case(b=2, sq=300, sk=400, d=d, dv=dv, causal=True)
        yield Case(b=3, sq=200, sk=150, d=d, dv=dv, packed=True, poisoned=True, left=60, right=10)
        yield Case(sq=140, sk=150, d=d, dv=dv, softcap=30.0)
    for d, unaligned in itertools.product((64, 128, 256), (False, True)):
        yield Case(sq=140, sk=150, d=d, dropout=0.1, alibi=True, bias="hk", unaligned=unaligned)
    for d in (64, 128, 256):
        yield Case(b=2, sq=3, sk=3000, h=10, hk=2, d=d, causal=True, alibi=True, bias="hk", sink=True, row=".decode.")
        yield Case(b=3, sq=1, sk=1500, h=4, hk=1, d=d, packed=True, poisoned=True, row=".decode.")
        yield Case(b=40, sq=8, sk=1030, h=16, hk=8, d=d, batch_invariant=True, row=".decode.")


def random_case(generator):
    pick = lambda *values: generator.choice(values)
    hk = generator.randint(1, 3)
    features = {}
    for name, values in (("softcap", (0.0, 5.0)), ("alibi", (False, True)), ("sink", (False, True)),
                         ("top_left", (False, True)), ("packed", (False, True)),
                         ("bias", (None, "bhqk", "qk", "h")), ("heads_outside", (False, True)),
                         ("dropout", (0.0, 0.0, 0.2)), ("scores", ("normal", "normal", "rising"))):
        features[name] = pick(values[0], *values)
    if features["packed"]:
        features["bias"] = None
    return Case(dtype=pick("bf16", "f16"), b=generator.randint(1, 3), h=hk * generator.randint(1, 4),
                hk=hk, sq=generator.randint(1, 600), sk=generator.randint(1, 900),
                d=8 * generator.randint(1, 32), dv=8 * generator.randint(1, 32),
                left=pick(-1, -1, generator.randint(0, 400)),
                right=pick(-1, 0, generator.randint(0, 400)), **features)


# Tiles that are handed out as multiprocessors get free.
HANDED_OUT = {"b": 4, "sq": 2100, "sk": 2500, "h": 8, "hk": 8, "d": 128, "packed": True, "causal": True}
HANDED_OUT_DENSE = {"b": 8, "sq": 1000, "sk": 1000, "h": 8, "hk": 4, "d": 256, "causal": True}


def repeats(library, count, case):
    """Is a run the same every time, bit for bit?"""
    plan, tensors, memory, _ = run(library, case, 1)  # memory: kept alive for the launches below
    o, lse = memory[3], memory[4]
    first = (o.clone(), lse.clone())
    for _ in range(count):
        o.fill_(float("nan"))
        plan.enqueue(tensors, torch.cuda.current_stream().cuda_stream, plan.memory)
        if not (torch.equal(o, first[0]) and torch.equal(lse, first[1])):
            return False
    return True


def in_graph(library, count, case):
    """Does a CUDA graph of three launches on a stream of its own give what the launch gave?"""
    plan, tensors, memory, _ = run(library, case, 2)
    o, lse = memory[3], memory[4]
    first = (o.clone(), lse.clone())
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(3):
            plan.enqueue(tensors, torch.cuda.current_stream().cuda_stream, plan.memory)
    for _ in range(count):
        o.fill_(float("nan"))
        lse.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        if not (torch.equal(o, first[0]) and torch.equal(lse, first[1])):
            return False
    return True


def on_another_gpu(library):
    """A run on the second GPU while the first is current: the same bits as there, and the first stays current."""
    torch.manual_seed(3)
    q, k, v = (torch.randn(2, 500, 4, 128).bfloat16() for _ in range(3))
    results = []
    for device in (0, 1):
        inputs = [x.to(f"cuda:{device}") for x in (q, k, v)]
        o = torch.full_like(inputs[0], math.nan)
        plan = library.plan("fwd bf16 b=2 h=4 q=500 k=500 d=128 causal", f"gpu:{device}")
        tensors = plan.tensors(q=inputs[0], k=inputs[1], v=inputs[2], o=o)
        torch.cuda.synchronize(device)
        plan.enqueue(tensors, torch.cuda.default_stream(device).cuda_stream)
        torch.cuda.synchronize(device)
        results.append(o.cpu())
    return torch.equal(*results) and torch.cuda.current_device() == 0 and not results[0].isnan().any()


def command_line(description, cases):
    """The arguments that the checks of both passes take."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--library", required=True)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    parser.add_argument("--cases", type=int, default=cases, help="random ones, besides the edges")
    parser.add_argument("--repeats", type=int, default=1000)
    parser.add_argument("--reduced", action="store_true", help="a few small problems, for sanitizers")
    parser.add_argument("--verbose", action="store_true")
    return parser


def sweep(arguments, library, check, direction, reduced, edges, draw):
    """How many cases fail: the reduced ones, or the edges and random ones that `draw` makes of a generator."""
    print(f"seed {arguments.seed}, {torch.cuda.get_device_name()}", flush=True)
    generator = random.Random(arguments.seed)
    cases = reduced if arguments.reduced else itertools.chain(edges, (draw(generator) for _ in range(arguments.cases)))
    failures = total = 0
    for total, case in enumerate(cases, 1):
        try:
            ok, line = check(library, case, arguments.seed + total)
        except libtessera.TesseraError as error:
            ok, line = False, f"{case.problem(direction=direction)}: {str(error)[:300]}"
        failures += not ok
        if arguments.verbose or not ok:
            print(line, flush=True)
    print(f"{total - failures} passed, {failures} failed", flush=True)
    return failures


def failed(name, same):
    """Says whether bits were the same; True if not."""
    print(f"{name}: {'the same bits' if same else 'WRONG'}", flush=True)
    return not same


def main():
    arguments = command_line(__doc__, cases=300).parse_args()
    library = libtessera.Library(arguments.library)
    failures = sweep(arguments, library, check, "fwd", reduced_cases(), edge_cases(), random_case)
    if arguments.repeats and not arguments.reduced:
        dense = Case(b=4, sq=1000, sk=1500, h=16, hk=4, d=128, causal=True)
        failures += failed(f"{arguments.repeats} runs", repeats(library, arguments.repeats, dense))
        failures += failed(f"{arguments.repeats} runs, packed", repeats(library, arguments.repeats, Case(**HANDED_OUT)))
        few = Case(b=3, sq=700, sk=900, h=8, hk=2, d=64, causal=True)
        failures += failed("in a CUDA graph", in_graph(library, 20, few))
        failures += failed("in a CUDA graph, packed", in_graph(library, 20, Case(**HANDED_OUT)))
        failures += failed("in a CUDA graph, d = 256", in_graph(library, 20, Case(**HANDED_OUT_DENSE)))
    if torch.cuda.device_count() > 1:
        failures += failed("on a GPU that is not current", on_another_gpu(library))
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
