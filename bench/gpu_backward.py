"""The backward pass on an H200 beside cuDNN, cell by cell, in one run: bench/results/h200_backward.csv.

    gpu_backward.py --library build/release/libtessera.so --output FILE [--deterministic] [--features FILE]
                    [--layer FILE]

The grid and the placing of tensors are gpu_forward.py's; the bar is the best of three peers, bar_of_two that of cuDNN
and FlashAttention-3 alone, as it was before; FLOPs: 10 b h s s d, halved when causal.
--deterministic: dQ summed in a fixed order, rows of their own. --features: GQA, packed sequences, a window,
softcap, ALiBi, a bias with its gradient and dropout beside the plain kernel at the same useful FLOPs, and, with
--before, beside another library's. --layer: forward and backward of one layer beside cuDNN
and three steps of PyTorch, time and peak memory against the sequence length. Needs PyTorch.
"""

import argparse
import datetime
import pathlib
import random
import statistics

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpu_forward import (DTYPES, HIDDEN, TOKENS, Arena, best_peer_factors, libtessera, peer_factors, query, time_calls,
                         write)

COLUMNS = ["date", "commit", "driver", "sm_mhz", "dtype", "d", "causal", "s", "b", "h", "deterministic", "kernel",
           "tessera", "cudnn", "bar", "of_bar", "bar_of_two", "of_bar_of_two", "difference"]
FEATURE_COLUMNS = ["date", "commit", "driver", "feature", "problem", "kernel", "tessera", "plain", "of_plain", "before"]
LAYER_COLUMNS = ["date", "commit", "driver", "s", "h", "d", "causal", "who", "ms", "mb"]


def stream():
    return torch.cuda.current_stream().cuda_stream


class Pass:
    """A problem's forward pass done, its backward pass ready to be enqueued."""

    def __init__(self, library, words, q, k, v, dout, out=None, deterministic=False, dbias=None, **extra):
        o = torch.empty(*q.shape[:-1], v.shape[-1], dtype=q.dtype, device="cuda")
        packed = q.dim() == 3
        lse = torch.empty((q.shape[1], q.shape[0]) if packed else (q.shape[0], q.shape[2], q.shape[1]),
                          device="cuda")
        forward = library.plan("fwd " + words, "gpu")
        forward_workspace = torch.empty(forward.workspace_bytes, dtype=torch.uint8, device="cuda")
        self.forward = lambda: forward.enqueue(forward_tensors, stream(), forward_workspace)
        forward_tensors = forward.tensors(q=q, k=k, v=v, o=o, softmax_lse=lse, **extra)
        self.forward()
        self.out = out or [torch.empty_like(x) for x in (q, k, v)]
        self.plan = library.plan("bwd " + words + (" deterministic" if deterministic else ""), "gpu")
        self.workspace = torch.empty(self.plan.workspace_bytes, dtype=torch.uint8, device="cuda")
        dq, dk, dv = self.out
        more = {} if dbias is None else {"dbias": dbias}
        self.tensors = self.plan.tensors(q=q, k=k, v=v, o=o, softmax_lse=lse, dout=dout, dq=dq, dk=dk, dv=dv,
                                         **extra, **more)
        self.memory = (q, k, v, dout, o, lse, extra, dbias)

    def __call__(self):
        self.plan.enqueue(self.tensors, stream(), self.workspace)


def cudnn_backward(q, k, v, dout, causal):
    """A function that runs cuDNN's backward pass and returns dq, dk, dv in our layout."""
    inputs = [x.transpose(1, 2).detach().requires_grad_(True) for x in (q, k, v)]
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = F.scaled_dot_product_attention(*inputs, is_causal=causal)
    gradient = dout.transpose(1, 2)
    return lambda: torch.autograd.grad(out, inputs, gradient, retain_graph=True)


def measure(library, arena, dtype, d, causal, s, deterministic, rounds, placements):
    times = {"ours": [], "cudnn": []}
    b, h = TOKENS // s, HIDDEN // d
    flops = 10 * b * h * s * s * d / (2 if causal else 1)
    calls = max(3, min(30, int(0.012 / (flops / 5e14))))
    for _ in range(placements):
        arena.clear()
        q, k, v, dout, *out = (arena.place((b, s, h, d), DTYPES[dtype]) for _ in range(7))
        for x in (q, k, v, dout):
            x.copy_(torch.randn(b, s, h, d, device="cuda"))
        ours = Pass(library, f"{dtype} b={b} h={h} q={s} k={s} d={d}" + (" causal" if causal else ""), q, k, v, dout,
                    out, deterministic)
        cudnn = cudnn_backward(q, k, v, dout, causal)
        expected = [x.transpose(1, 2).float() for x in cudnn()]
        ours()
        difference = max(((x.float() - e).abs().max() / e.abs().max()).item() for x, e in zip(out, expected))
        del expected
        for _ in range(rounds):
            for name, function in (("ours", ours), ("cudnn", cudnn)):
                times[name].append(time_calls(function, calls))
    rate = {name: flops / statistics.median(t) * 1e-12 for name, t in times.items()}
    return b, h, ours.plan.kernel, rate["ours"], rate["cudnn"], difference


def grid(library, arguments, deterministic):
    factors, of_two, arena, rows = best_peer_factors("bwd"), peer_factors("bwd"), Arena(8 << 30), []
    for d in arguments.head_dim:
        for causal in (False, True):
            for s in arguments.seqlen:
                b, h, kernel, ours, cudnn, difference = measure(library, arena, arguments.dtype, d, causal, s,
                                                                deterministic, arguments.rounds, arguments.placements)
                bar = cudnn * factors.get((d, int(causal), s), 1.0)
                before = cudnn * of_two.get((d, int(causal), s), 1.0)
                rows.append(dict(zip(COLUMNS, (
                    datetime.date.today().isoformat(), arguments.commit, query("driver_version"), query("clocks.sm"),
                    arguments.dtype, d, int(causal), s, b, h, int(deterministic), kernel, f"{ours:.1f}",
                    f"{cudnn:.1f}", f"{bar:.1f}", f"{ours / bar:.3f}", f"{before:.1f}", f"{ours / before:.3f}",
                    f"{difference:.1e}"))))
                print(f"{arguments.dtype} d={d} {'causal' if causal else 'full'} s={s}{' deterministic' * deterministic}"
                      f": {ours:.0f} TFLOP/s, cuDNN {cudnn:.0f}, bar {bar:.0f} ({ours / bar:.3f}), difference "
                      f"{difference:.1e}", flush=True)
    shares = [float(r["of_bar"]) for r in rows]
    print(f"{'deterministic: ' * deterministic}{statistics.geometric_mean(shares):.3f} of the bar in the geometric "
          f"mean, {min(shares):.3f} at least", flush=True)
    return rows


def randn(*shape):
    return torch.randn(*shape, device="cuda").bfloat16()


def causal_pairs(s):
    return s * (s + 1) // 2


def features(library, arguments):
    """GQA 8:1, packed, a window of 1024 keys, softcap, ALiBi, a bias and its gradient, dropout; all d = 128."""
    before = libtessera.Library(arguments.before) if arguments.before else None
    d, rows = 128, []
    generator, lengths = random.Random(1), []
    while sum(lengths) < 65536:
        lengths.append(min(generator.randint(64, 8192), 65536 - sum(lengths)))
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device="cuda")
    longest = max(lengths)
    dense, half = (2, 8192, 16, d), (8, 2048, 16, d)
    causal = f"bf16 b=2 h=16 q=8192 k=8192 d={d} causal"
    bias = torch.randn(1, 16, 2048, 2048, device="cuda").bfloat16()
    pairs = 2 * 16 * causal_pairs(8192)
    cases = (
        ("gqa", f"bf16 b=2 h=16/2 q=8192 k=8192 d={d} causal", dense, (2, 8192, 2, d), {}, pairs, (2, 8192, 16)),
        ("packed", f"bf16 b={len(lengths)} h=16 q={longest} k={longest} d={d} packed=65536,65536 causal",
         (65536, 16, d), (65536, 16, d), {"cu_seqlens_q": cu, "cu_seqlens_k": cu},
         16 * sum(map(causal_pairs, lengths)), (16, 4096, 16)),
        ("window", f"bf16 b=1 h=16 q=16384 k=16384 d={d} window=1023,0", (1, 16384, 16, d), (1, 16384, 16, d), {},
         16 * (1024 * 16384 - 1024 * 1023 // 2), (1, 16384, 16)),
        ("softcap", f"{causal} softcap=30", dense, dense, {}, pairs, (2, 8192, 16)),
        ("alibi", f"{causal} alibi=h", dense, dense, {"alibi_slopes": torch.rand(16, device="cuda")}, pairs,
         (2, 8192, 16)),
        ("bias with its gradient", f"bf16 b=8 h=16 q=2048 k=2048 d={d} bias=hqk:bf16", half, half,
         {"bias": bias, "dbias": torch.empty_like(bias)}, 8 * 16 * 2048**2, (8, 2048, 16, "")),
        ("dropout", f"{causal} dropout=0.1", dense, dense, {}, pairs, (2, 8192, 16)))
    for name, words, q_shape, k_shape, extra, pairs, (b, s, h, *mask) in cases:
        inputs = randn(*q_shape), randn(*k_shape), randn(*k_shape), randn(*q_shape)
        run = Pass(library, words, *inputs, **extra)
        mask, all_pairs = (mask[0], s * s) if mask else ("causal", causal_pairs(s))
        plain = Pass(library, f"bf16 b={b} h={h} q={s} k={s} d={d} {mask}", *(randn(b, s, h, d) for _ in range(4)))
        flops = {run: 10 * d * pairs, plain: 10 * d * b * h * all_pairs}
        if before:
            flops[Pass(before, words, *inputs, **extra)] = 10 * d * pairs
        times = {f: [] for f in flops}
        for _ in range(9):
            for function, samples in times.items():
                samples.append(time_calls(function, 5))
        ours, base, *old = (flops[x] / statistics.median(times[x]) * 1e-12 for x in flops)
        rows.append(dict(zip(FEATURE_COLUMNS, (
            datetime.date.today().isoformat(), arguments.commit, query("driver_version"), name, "bwd " + words,
            run.plan.kernel, f"{ours:.1f}", f"{base:.1f}", f"{ours / base:.3f}", *(f"{x:.1f}" for x in old)))))
        print(f"{name}: {ours:.0f} TFLOP/s, plain {base:.0f} ({ours / base:.3f}){', before' * bool(old)}"
              f"{''.join(f' {x:.0f}' for x in old)}", flush=True)
    return rows


def three_steps(q, k, v):
    s = q @ k.transpose(-1, -2) * q.shape[-1]**-0.5
    hidden = torch.ones(s.shape[-2:], dtype=torch.bool, device="cuda").triu_(1)
    return s.masked_fill_(hidden, float("-inf")).softmax(-1) @ v


def layer(library, arguments):
    """Forward and backward of 16 causal heads of 128."""
    h, d, rows = 16, 128, []
    for s in (512 << i for i in range(8)):
        q, k, v, dout = (randn(1, s, h, d) for _ in range(4))
        heads_first = [x.transpose(1, 2).detach().requires_grad_(True) for x in (q, k, v)]
        gradient = dout.transpose(1, 2)

        def tessera():
            run = Pass(library, f"bf16 b=1 h={h} q={s} k={s} d={d} causal", q, k, v, dout)
            run()
            return run

        def of_torch(backend):
            def run():
                with sdpa_kernel(backend) if backend else torch.enable_grad():
                    out = (F.scaled_dot_product_attention(*heads_first, is_causal=True) if backend
                           else three_steps(*heads_first))
                return torch.autograd.grad(out, heads_first, gradient)
            return run

        prepared = tessera()

        def again():
            prepared.forward()
            prepared()

        for who, once, repeated in (("tessera", tessera, again),
                                    ("cudnn", of_torch(SDPBackend.CUDNN_ATTENTION), None),
                                    ("three steps", of_torch(None), None)):
            if who == "three steps" and s > 16384:  # 32k would need 140 GB
                continue
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            once()
            torch.cuda.synchronize()
            peak = (torch.cuda.max_memory_allocated() - before) / 1e6
            seconds = statistics.median(time_calls(repeated or once, 3) for _ in range(5))
            rows.append(dict(zip(LAYER_COLUMNS, (
                datetime.date.today().isoformat(), arguments.commit, query("driver_version"), s, h, d, 1, who,
                f"{seconds * 1e3:.3f}", f"{peak:.1f}"))))
            print(f"layer s={s} {who}: {seconds * 1e3:.2f} ms, {peak:.0f} MB", flush=True)
        del prepared
        torch.cuda.empty_cache()
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", required=True)
    parser.add_argument("--output", type=pathlib.Path)
    parser.add_argument("--features", type=pathlib.Path)
    parser.add_argument("--before", type=pathlib.Path, help="a library whose features are measured beside")
    parser.add_argument("--layer", type=pathlib.Path)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bf16")
    parser.add_argument("--head-dim", nargs="+", type=int, default=(64, 128, 256))
    parser.add_argument("--seqlen", nargs="+", type=int, default=[512 << i for i in range(6)])
    parser.add_argument("--deterministic", action="store_true", help="a second grid with ordered sums")
    parser.add_argument("--rounds", type=int, default=4, help="of each placement")
    parser.add_argument("--placements", type=int, default=2, help="of the tensors in memory")
    arguments = parser.parse_args()
    library = libtessera.Library(arguments.library)
    if arguments.output:
        rows = grid(library, arguments, False)
        if arguments.deterministic:
            rows += grid(library, arguments, True)
        write(arguments.output, COLUMNS, rows)
    if arguments.features:
        write(arguments.features, FEATURE_COLUMNS, features(library, arguments))
    if arguments.layer:
        write(arguments.layer, LAYER_COLUMNS, layer(library, arguments))


if __name__ == "__main__":
    main()
