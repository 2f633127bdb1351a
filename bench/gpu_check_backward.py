"""Correctness of the backward pass on a GPU: every case against double-precision gradients on the same GPU.

    gpu_check_backward.py --library build/release/libtessera.so [--seed N] [--cases N] [--flash2]

Cases, inputs and guard zones are gpu_check.py's; o and lse come from our own forward pass. The rule
(docs/correctness.md): max|g - exact| <= 3 max|three steps in the same dtype - exact| + 3e-5, or three unit
roundoffs of the largest gradient where that is more; the three steps round P, dS, o (from which delta is made)
and the results, nothing else. Then 1,000 runs: dK and dV the same bit for bit, dQ too where `deterministic` is
asked for. Needs PyTorch.
"""

import itertools
import math
import random
import sys

import torch

from gpu_check import (DTYPES, FEATURES, UNIT, Case, command_line, dropout_scale, failed, guarded, libtessera, run,
                       sweep)

NAMES = ("dq", "dk", "dv", "dbias", "dsink")


def stream():
    return torch.cuda.current_stream().cuda_stream


def backward(library, case, seed):
    """Everything of one forward and backward pass."""
    _, _, (q, k, v, o, lse, bias, extra, lq, lk), _ = run(library, case, seed)
    dout = torch.randn_like(o, dtype=torch.float32).to(o.dtype)
    dlse = torch.randn_like(lse) if seed % 2 else None
    if case.poisoned:
        for i in range(0, case.b, 2):
            dout[sum(lq[:i]):sum(lq[:i + 1])] = math.nan
    outputs = {name: guarded(x.shape, x.dtype, int(case.unaligned)) for name, x in (("dq", q), ("dk", k), ("dv", v))}
    if bias is not None:
        outputs["dbias"] = guarded(bias.shape, bias.dtype)
    if case.sink:
        outputs["dsink"] = guarded((case.h,), torch.float32)
    plan = library.plan(case.problem(sum(lq), sum(lk), "bwd"), "gpu")
    workspace, workspace_intact = guarded((plan.workspace_bytes // 4,), torch.float32)
    more = {} if dlse is None else {"dsoftmax_lse": dlse}
    tensors = plan.tensors(q=q, k=k, v=v, o=o, softmax_lse=lse, dout=dout, **more, **extra,
                           **{name: x for name, (x, _) in outputs.items()})
    plan.enqueue(tensors, stream(), workspace)
    torch.cuda.synchronize()
    faults = [name for name, (_, intact) in outputs.items() if not intact()]
    if not workspace_intact():
        faults.append("workspace")
    memory = (q, k, v, o, lse, bias, extra, dout, dlse, workspace)
    return plan, tensors, memory, {name: x for name, (x, _) in outputs.items()}, faults, lq, lk


def gradients(case, q, k, v, dout, dlse, bias, extra, b, rounding):
    """dq, dk, dv, dbias, dsink of one sequence in double, (heads, ...) inside; P, dS and results rounded as said."""
    nq, nk, group = q.shape[0], k.shape[0], case.h // case.hk
    Q, dO = q.double().transpose(0, 1), dout.double().transpose(0, 1)
    K, V = (x.double().transpose(0, 1).repeat_interleave(group, 0) for x in (k, v))
    scale = case.scale or case.d**-0.5
    s = Q @ K.transpose(-1, -2) * scale
    slope = torch.ones_like(s)
    if case.softcap:
        t = torch.tanh(s / case.softcap)
        s, slope = case.softcap * t, 1 - t * t
    i = torch.arange(nq, device="cuda")[:, None]
    j = torch.arange(nk, device="cuda")[None]
    if bias is not None:
        s = s + bias.double().expand(case.b, case.h, case.sq, case.sk)[b][:, :nq, :nk]
    if case.alibi:
        s = s - extra["alibi_slopes"].double()[:, None, None] * (i + nk - nq - j).abs()
    at = i + (0 if case.top_left else nk - nq)
    hidden = torch.zeros(nq, nk, dtype=torch.bool, device="cuda")
    if case.right >= 0:
        hidden |= j > at + case.right
    if case.left >= 0:
        hidden |= j < at - case.left
    s = s.masked_fill(hidden, -math.inf)
    top = s
    if case.sink:
        top = torch.cat([s, extra["sink"].double()[:, None, None].expand(case.h, nq, 1)], -1)
    if top.shape[-1]:
        lse = torch.logsumexp(top, -1)
    else:
        lse = torch.full((case.h, nq), -math.inf, dtype=torch.float64, device="cuda")
    lse = torch.where(lse == -math.inf, math.inf, lse)
    p = torch.exp(s - lse[..., None])
    keep = dropout_scale(case, extra["philox_seed"], b, nq, nk) if case.dropout else 1.0
    dp = dO @ V.transpose(-1, -2) * keep
    dv = rounding(p * keep).transpose(-1, -2) @ dO
    delta = (rounding((p * keep) @ V) * dO).sum(-1)
    if dlse is not None:
        delta = delta - torch.where(lse.isinf(), 0.0, dlse.double())
    ds = p * (dp - delta[..., None])
    dz = rounding(ds * slope)
    dq, dk = dz @ K * scale, dz.transpose(-1, -2) @ Q * scale
    shared = lambda x: x.unflatten(0, (case.hk, group)).sum(1).transpose(0, 1)
    dsink = None
    if case.sink:
        dsink = -(torch.exp(extra["sink"].double()[:, None] - lse) * delta).sum(-1)
    return rounding(dq.transpose(0, 1)), rounding(shared(dk)), rounding(shared(dv)), ds, dsink


def judge(out, exact, naive, unit):
    """(error, bound)"""
    if exact.numel() == 0:
        return 0.0, 1.0
    error = (out.double() - exact).abs().max().item()
    bound = max(3 * (naive - exact).abs().max().item() + 3e-5, 3 * unit * exact.abs().max().item())
    return (error if error == error else math.inf), bound


def check(library, case, seed):
    """(ok, line)."""
    plan, _, memory, out, faults, lq, lk = backward(library, case, seed)
    q, k, v, _, _, bias, extra, dout, dlse, _ = memory
    name = (f"{case.problem(sum(lq), sum(lk), 'bwd') if case.packed else case.problem(direction='bwd')}"
            f"{', poisoned neighbours' * case.poisoned}, {case.scores} scores, seed {seed}")
    if faults:
        return False, f"{name}: wrote outside {', '.join(faults)}"
    unit, dtype = UNIT[case.dtype], DTYPES[case.dtype]
    worst = {n: (0.0, 1e-5) for n in out}
    total_dbias = [None if bias is None else torch.zeros(case.b, case.h, case.sq, case.sk, dtype=torch.float64,
                                                         device="cuda") for _ in range(2)]  # exact, naive
    total_dsink = 0.0
    first_q = first_k = 0
    for b, (nq, nk) in enumerate(zip(lq, lk)):
        if case.packed:
            qs, ks = slice(first_q, first_q + nq), slice(first_k, first_k + nk)
            part = [q[qs], k[ks], v[ks], dout[qs], None if dlse is None else dlse[:, qs]]
            mine = {"dq": out["dq"][qs], "dk": out["dk"][ks], "dv": out["dv"][ks]}
        else:
            part = [q[b], k[b], v[b], dout[b], None if dlse is None else dlse[b]]
            mine = {n: out[n][b] for n in ("dq", "dk", "dv")}
        first_q, first_k = first_q + nq, first_k + nk
        if (case.poisoned and b % 2 == 0) or (case.last_only and b < case.b - 1):
            continue
        exact = gradients(case, *part, bias, extra, b, lambda x: x)
        naive = gradients(case, *part, bias, extra, b, lambda x: x.to(dtype).double())
        for i, n in enumerate(("dq", "dk", "dv")):
            error, bound = judge(mine[n], exact[i], naive[i], unit)
            if error / bound > worst[n][0] / worst[n][1]:
                worst[n] = (error, bound)
        if bias is not None:
            for total, part_of in zip(total_dbias, (exact, naive)):
                total[b, :, :nq, :nk] = part_of[3]
        if case.sink:
            total_dsink = total_dsink + exact[4]
    if bias is not None:
        dims = [i for i in range(4) if bias.shape[i] == 1]
        expected, rough = (total.sum(dims, keepdim=True) if dims else total for total in total_dbias)
        error, bound = judge(out["dbias"], expected, rough, unit)
        # A sum of many has errors like a random walk's.
        walk = total_dbias[0].square().sum(dims, keepdim=True).sqrt().max().item() if dims else 0.0
        worst["dbias"] = (error, max(bound, 3 * unit * walk))
    if case.sink and not case.poisoned:
        # delta comes from o in the storage type.
        bound = 1e-5 + 8 * unit * max(1.0, total_dsink.abs().max().item())
        error = (out["dsink"].double() - total_dsink).abs().max().item()
        worst["dsink"] = (error if error == error else math.inf, bound)
    elif case.sink:
        del worst["dsink"]
    ok = all(error <= bound for error, bound in worst.values()) and case.row in plan.kernel
    figures = ", ".join(f"{n} {error:.2e} / {bound:.2e}" for n, (error, bound) in worst.items())
    return ok, f"{name}: {plan.kernel} {figures}{'' if ok else '  WRONG'}"


def edge_cases(dims, features):
    for d in range(8, max(dims) + 1, 8):
        yield Case(d=d, sq=130, sk=200, h=2, hk=2, dtype=("bf16", "f16")[d // 8 % 2], causal=d % 16 == 0)
    for sq, sk in ((1, 1), (1, 500), (500, 1), (63, 64), (64, 65), (129, 127), (300, 1000), (1000, 300),
                   (128, 128), (257, 513), (5, 0), (0, 5)):
        for mask in ({}, {"causal": True}, {"causal": True, "top_left": True}, {"left": 50, "right": 20},
                     {"left": 0, "right": 0}, {"left": 200}):
            for d in (64, 128):
                yield Case(sq=sq, sk=sk, d=d, h=4, hk=2, **mask)
    for first, second in itertools.combinations_with_replacement(features, 2):
        both = FEATURES[first] | FEATURES[second]
        if both.get("bias") and both.get("packed"):
            continue
        for d in dims if first == second else dims[:2]:
            yield Case(**{"b": 2, "sq": 150, "sk": 270, "d": d, "h": 4, "hk": 2} | both)
    for d, causal, packed in itertools.product(dims, (False, True), (False, True)):
        for more in ({}, {"left": 70, "right": 40}):
            yield Case(b=5, sq=700, sk=900, h=4, hk=2, d=d, causal=causal and not more, packed=packed,
                       deterministic=True, **more)
    # In order: of more heads than fill a board some begin with late keys, others with early ones.
    for d, packed in itertools.product(dims, (False, True)):
        for more in ({"causal": True}, {"right": 20}, {"causal": True, "top_left": True, "sk": 200}, {}):
            yield Case(**{"b": 40, "sq": 300, "sk": 310, "h": 4, "hk": 4, "d": d, "packed": packed,
                          "deterministic": True, "poisoned": packed} | more)
    for scores, d, causal in itertools.product(("negative", "rising", "falling"), dims, (False, True)):
        yield Case(b=2, sq=300, sk=500, h=2, hk=2, d=d, causal=causal, scores=scores)
    for d, causal, b in itertools.product(dims, (False, True), (4, 9)):
        yield Case(b=b, sq=300, sk=400, h=2, hk=2, d=d, causal=causal, packed=True, poisoned=True)
    if "softcap" in features:
        for d in dims:
            yield Case(b=5, sq=150, sk=270, h=4, hk=2, d=d, causal=True, packed=True, poisoned=True, softcap=5.0)
    for d, s in itertools.product(dims, (512, 700)):
        for mask in ({}, {"causal": True}, {"left": 100, "right": 50}):
            yield Case(b=4, sq=s, sk=s, h=16, hk=4, d=d, **mask)


def reduced_cases():
    """Every row of the catalog once, all kinds of tiles."""
    for more in ({}, {"causal": True, "dtype": "f16"}, {"packed": True, "poisoned": True}):
        yield Case(**{"b": 16, "sq": 200, "sk": 380, "h": 8, "hk": 8, "d": 256, "row": ".pair"} | more)
    for d, dv in ((64, 64), (128, 128), (192, 128), (192, 192), (256, 256)):
        yield Case(b=2, sq=200, sk=300, d=d, dv=dv, causal=True)
        yield Case(b=3, sq=150, sk=200, d=d, dv=dv, packed=True, poisoned=True, left=60, right=10, deterministic=True)
    for d, unaligned in itertools.product((128, 256), (False, True)):
        yield Case(sq=140, sk=150, d=d, dropout=0.1, alibi=True, bias="hk", softcap=20.0, sink=True, unaligned=unaligned)


def random_case(generator, dims, extras):
    pick = lambda *values: generator.choice(values)
    hk = generator.randint(1, 3)
    features = {}
    for name, values in (("sink", (False, True)), ("top_left", (False, True)), ("packed", (False, True)),
                         ("heads_outside", (False, True)), ("scores", ("normal", "normal", "rising")),
                         *((("softcap", (0.0, 5.0)), ("alibi", (False, True)),
                            ("bias", (None, "bhqk", "qk", "h")), ("dropout", (0.0, 0.0, 0.2))) if extras else ())):
        features[name] = pick(values[0], *values)
    if features["packed"]:
        features["bias"] = None
    return Case(dtype=pick("bf16", "f16"), b=generator.randint(1, 3), h=hk * generator.randint(1, 4),
                deterministic=pick(False, False, True), hk=hk, sq=generator.randint(1, 600), sk=generator.randint(1, 900),
                d=8 * generator.randint(1, max(dims) // 8), dv=8 * generator.randint(1, max(dims) // 8),
                left=pick(-1, -1, generator.randint(0, 400)),
                right=pick(-1, 0, generator.randint(0, 400)), **features)


def pair_case(generator):
    """Head dims and numbers of tiles of which pairs of blocks exchange dS."""
    pick = lambda *values: generator.choice(values)
    hk, sk = generator.randint(8, 20), generator.randint(1, 900)
    packed = pick(False, True)
    return Case(dtype=pick("bf16", "f16"), b=-(-280 // (hk * -(-sk // 128))), h=hk * generator.randint(1, 3), hk=hk,
                sq=generator.randint(1, 600), sk=sk, d=8 * generator.randint(25, 32), dv=8 * generator.randint(1, 32),
                left=pick(-1, -1, generator.randint(200, 400)), right=pick(-1, 0, generator.randint(0, 400)),
                packed=packed, poisoned=packed and pick(False, True), sink=pick(False, True),
                top_left=pick(False, True), heads_outside=pick(False, True))


def repeats(library, count, deterministic, d):
    """Are dK and dV the same every time, bit for bit, and dQ where that is asked for? Other memory traffic beside."""
    case = Case(b=8 if d == 256 else 4, sq=1000, sk=1500, h=16, hk=4, d=d, causal=True, deterministic=deterministic)
    plan, tensors, memory, out, _, _, _ = backward(library, case, 1)
    names = ("dq", "dk", "dv") if deterministic else ("dk", "dv")
    first = {n: out[n].clone() for n in names}
    traffic, side = torch.empty(64 << 20, device="cuda"), torch.cuda.Stream()
    for i in range(count):
        for n in names:
            out[n].fill_(math.nan)
        if i % 4 == 0:
            with torch.cuda.stream(side):
                traffic.add_(1.0)
        plan.enqueue(tensors, stream(), memory[-1])
        if not all(torch.equal(out[n], first[n]) for n in names):
            return False
    return True


def beside_flash2(library):
    """Root mean square errors of dq, dk, dv over those of FlashAttention-2 as PyTorch carries it, a grid's mean."""
    ratios = []
    for d, causal, s in itertools.product((64, 128, 256), (False, True), (512, 2048)):
        case = Case(b=1, sq=s, sk=s, h=4, hk=4, d=d, causal=causal)
        _, _, memory, out, _, _, _ = backward(library, case, 2)  # an even seed: no dLSE
        q, k, v, dout = memory[0], memory[1], memory[2], memory[7]
        exact = gradients(case, q[0], k[0], v[0], dout[0], None, None, {}, 0, lambda x: x)[:3]
        inputs = [x.transpose(1, 2).detach().requires_grad_(True) for x in (q, k, v)]
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            o = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=causal)
        theirs = torch.autograd.grad(o, inputs, dout.transpose(1, 2))
        error = lambda x, e: (x.double() - e).square().mean().sqrt().item()
        ratio = [error(out[n][0], e) / error(t[0].transpose(0, 1), e) for n, e, t in zip(NAMES, exact, theirs)]
        print(f"d={d} {'causal' if causal else 'full'} s={s}: error of dq, dk, dv over FlashAttention-2's "
              f"{ratio[0]:.3f} {ratio[1]:.3f} {ratio[2]:.3f}", flush=True)
        ratios += ratio
    return sum(ratios) / len(ratios)


def main():
    parser = command_line(__doc__, cases=200)
    parser.add_argument("--dims", type=int, nargs="+", default=(64, 128))
    parser.add_argument("--without", nargs="*", default=(), help="features to leave out")
    parser.add_argument("--flash2", action="store_true", help="compare errors with FlashAttention-2's")
    arguments = parser.parse_args()
    library = libtessera.Library(arguments.library)
    features = [f for f in FEATURES if f not in arguments.without]
    failures = sweep(arguments, library, check, "bwd", reduced_cases(), edge_cases(arguments.dims, features),
                     lambda generator: pair_case(generator) if max(arguments.dims) == 256 and generator.random() < 0.4
                     else random_case(generator, arguments.dims, "softcap" in features))
    for d, deterministic in itertools.product([d for d in arguments.dims if d in (128, 256)], (False, True)):
        if arguments.repeats and not arguments.reduced and not (deterministic and "deterministic" in arguments.without):
            failures += failed(f"{arguments.repeats} runs, d = {d}{', deterministic' * deterministic}",
                               repeats(library, arguments.repeats, deterministic, d))
    if arguments.flash2:
        mean = beside_flash2(library)
        print(f"errors over FlashAttention-2's, mean: {mean:.3f}")
        failures += mean > 1.05
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
