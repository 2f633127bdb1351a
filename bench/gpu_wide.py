"""Head dims beyond 256 on an H200, beside 256 and beside what PyTorch's SDPA chooses, cell by cell, in one run:
bench/results/h200_wide.csv.

    gpu_wide.py --library build/release/libtessera.so --output FILE [--as "" b200 a100 a10] [--passes decode]

"" stands for the GPU as it is, the others for what other GPUs run (TESSERA_GPU_AS), by the shared memory that they
have. Both passes: 16,384 tokens, hidden size 2048, TFLOP/s. PyTorch takes cuDNN at 256, and
its memory-efficient kernel beyond. Decoding: 32 and 64 sequences of 8,192 keys, 1,024 columns of keys, one query a
key head, TB/s of the cache. All take turns within a cell; medians of CUDA-event times; random normal inputs.
of_d256 divides by what the same device has at 256. NVRTC compiles these kernels for this very GPU. Needs PyTorch.
"""

import argparse
import datetime
import os
import pathlib
import statistics

import torch
import torch.nn.functional as F

from gpu_forward import HIDDEN, TOKENS, Arena, libtessera, query, time_calls, write
from gpu_mma import backward_of, difference_of

COLUMNS = ["date", "commit", "driver", "card", "sm_mhz", "planned_as", "dtype", "pass", "d", "causal", "s", "b", "h",
           "kernel", "tessera", "pytorch", "of_pytorch", "of_d256", "difference"]
PASSES = ("forward", "backward", "decode")
DECODED = 8192  # keys
COLUMNS_OF_KEYS = 1024


def pytorch(q, k, v, causal):
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def forward_of(arena, words, shapes, causal):
    """As gpu_mma.backward_of: PyTorch's function, one that returns the plan and ours for what is planned now, what
    they write, a function that returns what it ought to be."""
    q, k, v, o = (arena.place(shape, torch.bfloat16) for shape in shapes)
    for x in (q, k, v):
        x.copy_(torch.randn(x.shape, device="cuda"))
    inputs = [x.transpose(1, 2) for x in (q, k, v)]
    stream = torch.cuda.current_stream().cuda_stream

    def ours(library):
        plan = library.plan(words, "gpu")
        tensors = plan.tensors(q=q, k=k, v=v, o=o)
        workspace = torch.empty(max(1, plan.workspace_bytes), dtype=torch.uint8, device="cuda")
        return plan, lambda: plan.enqueue(tensors, stream, workspace)

    return lambda: pytorch(*inputs, causal), ours, [o], lambda: [pytorch(*inputs, causal).transpose(1, 2)]


def measure(library, arena, names, kind, words, shapes, causal, amount):
    """({name: (kernel, rate, difference)}, PyTorch's rate); amount: what a second is asked for."""
    arena.clear()
    if kind == "backward":
        peer, ours, outputs, expected = backward_of(arena, words, torch.bfloat16, shapes[0], causal, pytorch)
    else:
        peer, ours, outputs, expected = forward_of(arena, words, shapes, causal)
    reference = expected()
    functions, found = {"peer": peer}, {}
    for name in names:
        os.environ["TESSERA_GPU_AS"] = name
        if not name:
            del os.environ["TESSERA_GPU_AS"]
        plan, functions[name] = ours(library)
        for x in outputs:
            x.data.fill_(float("nan"))  # not a change that autograd would see
        functions[name]()
        found[name] = plan.kernel, difference_of(outputs, reference)
    del reference
    times = {name: [] for name in functions}
    for _ in range(4):
        for name, function in functions.items():
            times[name].append(time_calls(function, 5))
    rates = {name: amount / statistics.median(t) * 1e-12 for name, t in times.items()}
    return {name: (kernel, rates[name], difference) for name, (kernel, difference) in found.items()}, rates["peer"]


def cells():
    """(pass, head dim, causal, tokens or keys, sequences, heads, problem, shapes of q, k, v, o, amount)."""
    for causal in (False, True):
        for s in (512, 2048, 8192, 16384):
            for d in (256, 384, 512):
                b, h = TOKENS // s, HIDDEN // d
                words = f"fwd bf16 b={b} h={h} q={s} k={s} d={d}" + (" causal" if causal else "")
                yield "forward", d, causal, s, b, h, words, [(b, s, h, d)] * 4, 4 * b * h * s * s * d / (1 + causal)
                yield ("backward", d, causal, s, b, h, words.removeprefix("fwd "), [(b, s, h, d)],
                       10 * b * h * s * s * d / (1 + causal))
    for b in (32, 64):
        for d in (256, 512):
            h_k = COLUMNS_OF_KEYS // d
            words = f"fwd bf16 b={b} h={h_k} q=1 k={DECODED} d={d}"
            q, k = (b, 1, h_k, d), (b, DECODED, h_k, d)
            yield "decode", d, False, DECODED, b, h_k, words, [q, k, k, q], 2 * 2 * b * DECODED * COLUMNS_OF_KEYS


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", required=True)
    parser.add_argument("--output", type=pathlib.Path, required=True)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--as", dest="names", nargs="+", default=("", "b200", "a100", "a10"), metavar="DEVICE")
    parser.add_argument("--passes", nargs="+", default=PASSES, choices=PASSES)
    arguments = parser.parse_args()
    library = libtessera.Library(arguments.library)
    arena, rows, narrow, shares = Arena(6 << 30), [], {}, {}
    for kind, d, causal, s, b, h, words, shapes, amount in cells():
        if kind not in arguments.passes:
            continue
        found, peer = measure(library, arena, arguments.names, kind, words, shapes, causal, amount)
        for name, (kernel, rate, difference) in found.items():
            if d == 256:
                narrow[name, kind, causal, s, b] = rate
            share = rate / narrow[name, kind, causal, s, b]
            shares.setdefault((kind, name or "as it is", d), []).append(share)
            rows.append(dict(zip(COLUMNS, (
                datetime.date.today().isoformat(), arguments.commit, query("driver_version"), query("name"),
                query("clocks.sm"), name or "itself", "bf16", kind, d, int(causal), s, b, h, kernel, f"{rate:.2f}",
                f"{peer:.2f}", f"{rate / peer:.2f}", f"{share:.3f}", f"{difference:.1e}"))))
        print(f"{kind} d={d} {'causal' if causal else 'full'} s={s} b={b}: PyTorch {peer:.3g}, " + ", ".join(
            f"{name or 'as it is'} {rate:.3g}{'' if difference < 0.02 else ' WRONG'}"
            for name, (_, rate, difference) in found.items()), flush=True)
    for (kind, name, d), some in shares.items():
        print(f"{kind}, {name}, d={d}: {statistics.geometric_mean(some):.3f} of 256, {min(some):.3f} at least",
              flush=True)
    write(arguments.output, COLUMNS, rows)


if __name__ == "__main__":
    main()
