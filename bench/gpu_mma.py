"""Kernels of mma.sync on an H200 beside PyTorch's FlashAttention-2, cell by cell, in one run:
bench/results/h200_mma_forward.csv, h200_mma_backward.csv.

    gpu_mma.py --library build/release/libtessera.so --output FILE [--backward] [--as b200 a100 a10] [--seqlen ...]

What other GPUs run is planned for them (TESSERA_GPU_AS), by the shared memory that they have, and run on this
one: b200 stands for what has 227 KB a block, as this GPU has, a100 for 163 KB, a10 for 99 KB. Where NVRTC is
found, its code for this very GPU is measured; with TESSERA_NVRTC=/none TESSERA_CACHE_DIR=/none, so that nothing is
found that was compiled before, what the driver makes of the build's PTX.
16,384 tokens, hidden size 2048 (32, 16, 8 heads of 64, 128, 256), random normal inputs. All take turns within a
cell; medians of CUDA-event times. FLOPs: 4 b h s s d, backward 10, halved when causal. Needs PyTorch.
"""

import argparse
import datetime
import os
import pathlib
import statistics

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpu_backward import Pass
from gpu_forward import DTYPES, HIDDEN, TOKENS, Arena, libtessera, query, time_calls, workspace_of, write

COLUMNS = ["date", "commit", "driver", "card", "sm_mhz", "planned_as", "dtype", "d", "causal", "s", "b", "h", "kernel",
           "tessera", "fa2", "of_fa2", "difference"]


def fa2(q, k, v, causal):
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def difference_of(ours, peers):
    return max(((x.float() - y.float()).abs().max() / y.float().abs().max()).item() for x, y in zip(ours, peers))


def forward_of(arena, words, dtype, shape, causal):
    """(FlashAttention-2's function, one that returns ours for what is planned now, of both what they compute)."""
    q, k, v, o = (arena.place(shape, dtype) for _ in range(4))
    for x in (q, k, v):
        x.copy_(torch.randn(shape, device="cuda"))
    inputs = [x.transpose(1, 2) for x in (q, k, v)]
    stream = torch.cuda.current_stream().cuda_stream

    def ours(library):
        plan = library.plan("fwd " + words, "gpu")
        tensors = plan.tensors(q=q, k=k, v=v, o=o)
        workspace = workspace_of(plan)
        return plan, lambda: plan.enqueue(tensors, stream, workspace)

    return lambda: fa2(*inputs, causal), ours, [o], lambda: [fa2(*inputs, causal).transpose(1, 2)]


def backward_of(arena, words, dtype, shape, causal, attention=fa2):
    """The same of the backward pass; attention: the peer's."""
    q, k, v, dout, *out = (arena.place(shape, dtype) for _ in range(7))
    for x in (q, k, v, dout):
        x.copy_(torch.randn(shape, device="cuda"))
    inputs = [x.transpose(1, 2).detach().requires_grad_(True) for x in (q, k, v)]
    attended, gradient = attention(*inputs, causal), dout.transpose(1, 2)

    def peer():
        return torch.autograd.grad(attended, inputs, gradient, retain_graph=True)

    def ours(library):
        run = Pass(library, words, q, k, v, dout, out)
        return run.plan, run

    return peer, ours, out, lambda: [x.transpose(1, 2) for x in peer()]


def measure(library, arena, backward, names, dtype, d, causal, s, rounds, placements):
    """(b, h, {name: (kernel, TFLOP/s, difference)}, TFLOP/s of FlashAttention-2)."""
    b, h = TOKENS // s, HIDDEN // d
    flops = (10 if backward else 4) * b * h * s * s * d / (2 if causal else 1)
    calls = max(3, min(40, int(0.006 / (flops / 4e14))))
    words = f"{dtype} b={b} h={h} q={s} k={s} d={d}" + (" causal" if causal else "")
    times = {name: [] for name in (*names, "fa2")}
    found = {}
    for _ in range(placements):
        arena.clear()
        peer, ours, outputs, expected = (backward_of if backward else forward_of)(
            arena, words, DTYPES[dtype], (b, s, h, d), causal)
        reference = expected()
        functions = {"fa2": peer}
        for name in names:
            os.environ["TESSERA_GPU_AS"] = name
            plan, functions[name] = ours(library)
            for x in outputs:
                x.data.fill_(float("nan"))  # not a change that autograd would see
            functions[name]()
            difference = difference_of(outputs, reference)
            found[name] = (plan.kernel, max(difference, found[name][1] if name in found else 0.0))
        del reference
        for _ in range(rounds):
            for name, function in functions.items():
                times[name].append(time_calls(function, calls))
    rate = {name: flops / statistics.median(t) * 1e-12 for name, t in times.items()}
    return b, h, {name: (kernel, rate[name], difference) for name, (kernel, difference) in found.items()}, rate["fa2"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", required=True)
    parser.add_argument("--output", type=pathlib.Path, required=True)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--backward", action="store_true")
    parser.add_argument("--as", dest="names", nargs="+", default=("b200", "a100", "a10"), metavar="DEVICE")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bf16")
    parser.add_argument("--head-dim", nargs="+", type=int, default=(64, 128, 256))
    parser.add_argument("--seqlen", nargs="+", type=int, default=[512 << i for i in range(6)])
    parser.add_argument("--rounds", type=int, default=4, help="of each placement")
    parser.add_argument("--placements", type=int, default=2, help="of the tensors in memory")
    arguments = parser.parse_args()
    library = libtessera.Library(arguments.library)
    arena, rows = Arena(8 << 30 if arguments.backward else 4 << 30), []
    for d in arguments.head_dim:
        for causal in (False, True):
            for s in arguments.seqlen:
                b, h, found, peer = measure(library, arena, arguments.backward, arguments.names, arguments.dtype, d,
                                            causal, s, arguments.rounds, arguments.placements)
                for name, (kernel, rate, difference) in found.items():
                    rows.append(dict(zip(COLUMNS, (
                        datetime.date.today().isoformat(), arguments.commit, query("driver_version"), query("name"),
                        query("clocks.sm"), name, arguments.dtype, d, int(causal), s, b, h, kernel, f"{rate:.1f}",
                        f"{peer:.1f}", f"{rate / peer:.3f}", f"{difference:.1e}"))))
                print(f"d={d} {'causal' if causal else 'full'} s={s}: FlashAttention-2 {peer:.0f} TFLOP/s, " + ", ".join(
                    f"{name} {rate:.0f} ({rate / peer:.3f}{'' if difference < 0.02 else ' WRONG'})"
                    for name, (_, rate, difference) in found.items()), flush=True)
    for name in arguments.names:
        shares = [float(r["of_fa2"]) for r in rows if r["planned_as"] == name]
        print(f"{name}: {statistics.geometric_mean(shares):.3f} of FlashAttention-2 in the geometric mean, "
              f"{min(shares):.3f} at least", flush=True)
        for d in arguments.head_dim:
            of_d = [float(r["of_fa2"]) for r in rows if r["planned_as"] == name and r["d"] == d]
            print(f"  d={d}: {statistics.geometric_mean(of_d):.3f}", flush=True)
    write(arguments.output, COLUMNS, rows)


if __name__ == "__main__":
    main()
