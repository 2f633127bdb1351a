"""Few heads of keys on a GPU, forward and backward: problems whose blocks of keys or rows do not fill a board.

    gpu_few_tiles.py --library build/release/libtessera.so --output FILE [--head-dim 64 128 256]

Query heads are those of a hidden size of 4096; 1, 2, 4 and 8 heads of keys and values, batches of 1, 2 and 4, 1k to
8k tokens, with and without a causal mask. Beside each: cuDNN through PyTorch (its better form, grouped or with keys
repeated, where it takes both), and our own time of the same problem with as many heads of keys as of queries, which
has the same FLOPs. Medians of rounds in turns; random normal inputs. Needs PyTorch.
"""

import argparse
import datetime
import pathlib
import random
import statistics

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpu_backward import Pass
from gpu_forward import libtessera, query, time_calls, write

COLUMNS = ["date", "commit", "driver", "sm_mhz", "pass", "d", "causal", "b", "s", "h", "hk", "kernel", "tessera",
           "cudnn", "of_cudnn", "multi_head", "of_multi_head", "difference"]
HIDDEN = 4096


def randn(*shape):
    return torch.randn(*shape, device="cuda").bfloat16()


def cudnn(q, k, v, dout, causal, repeat):
    """Functions of cuDNN's two passes; None where it does not take the form. repeat: the keys are, before."""
    group = q.shape[2] // k.shape[2]
    inputs = [x.transpose(1, 2).detach() for x in (q, k, v)]
    if repeat:
        inputs[1:] = [x.repeat_interleave(group, 1) for x in inputs[1:]]
    inputs = [x.requires_grad_(True) for x in inputs]
    grouped = not repeat and group > 1

    def forward():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(*inputs, is_causal=causal, enable_gqa=grouped)

    try:
        out = forward()
    except RuntimeError:
        return None
    gradient = dout.transpose(1, 2)

    def inference():
        with torch.no_grad():
            return forward()

    return inference, lambda: torch.autograd.grad(out, inputs, gradient, retain_graph=True)


def difference(ours, theirs, group):
    """The greatest of dq, dk and dv; theirs of repeated keys are summed."""
    worst = 0.0
    for i, (x, y) in enumerate(zip(ours, theirs)):
        y = y.transpose(1, 2).float()
        if i > 0 and y.shape != x.shape:
            y = y.unflatten(2, (-1, group)).sum(3)
        worst = max(worst, ((x.float() - y).abs().max() / y.abs().max()).item())
    return worst


def measure(library, d, causal, b, s, h, hk, rounds):
    words = f"bf16 b={b} h={h}/{{}} q={s} k={s} d={d}" + (" causal" if causal else "")
    flops = 4 * b * h * s * s * d / (2 if causal else 1)
    q, dout = randn(b, s, h, d), randn(b, s, h, d)
    k, v = randn(b, s, hk, d), randn(b, s, hk, d)
    ours = Pass(library, words.format(hk), q, k, v, dout)
    full = Pass(library, words.format(h), q, *(randn(b, s, h, d) for _ in range(2)), dout)
    peers = [x for x in (cudnn(q, k, v, dout, causal, False), cudnn(q, k, v, dout, causal, True)) if x]
    ours()
    worst = difference(ours.out, peers[0][1](), h // hk)
    for direction, factor in (("fwd", 1.0), ("bwd", 2.5)):
        backward = direction == "bwd"
        functions = {"ours": ours if backward else ours.forward, "full": full if backward else full.forward}
        functions |= {f"cudnn{i}": x[backward] for i, x in enumerate(peers)}
        calls = max(3, min(40, int(0.004 / (flops * factor / 5e14))))
        times = {name: [] for name in functions}
        for _ in range(rounds):
            for name in random.sample(list(functions), len(functions)):
                times[name].append(time_calls(functions[name], calls))
        rate = {name: flops * factor / statistics.median(t) * 1e-12 for name, t in times.items()}
        best = max(rate[name] for name in rate if name.startswith("cudnn"))
        yield direction, ours.plan.kernel, rate["ours"], best, rate["full"], worst if backward else 0.0


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", type=pathlib.Path, required=True)
    parser.add_argument("--output", type=pathlib.Path, required=True)
    parser.add_argument("--commit", default="", help="of the library")
    parser.add_argument("--head-dim", nargs="+", type=int, default=(64, 128, 256))
    parser.add_argument("--seqlen", nargs="+", type=int, default=(1024, 2048, 4096, 8192))
    parser.add_argument("--batch", nargs="+", type=int, default=(1, 2, 4))
    parser.add_argument("--heads-k", nargs="+", type=int, default=(1, 2, 4, 8))
    parser.add_argument("--masks", nargs="+", choices=("full", "causal"), default=("full", "causal"))
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    library, rows = libtessera.Library(arguments.library), []
    for d in arguments.head_dim:
        h = HIDDEN // d
        for causal in [mask == "causal" for mask in arguments.masks]:
            for b in arguments.batch:
                for hk in arguments.heads_k:
                    for s in arguments.seqlen:
                        for direction, kernel, ours, peer, full, worst in measure(
                                library, d, causal, b, s, h, hk, arguments.rounds):
                            rows.append(dict(zip(COLUMNS, (
                                datetime.date.today().isoformat(), arguments.commit, query("driver_version"),
                                query("clocks.sm"), direction, d, int(causal), b, s, h, hk, kernel, f"{ours:.1f}",
                                f"{peer:.1f}", f"{ours / peer:.3f}", f"{full:.1f}", f"{ours / full:.3f}",
                                f"{worst:.1e}"))))
                            print(f"{direction} d={d} {'causal' if causal else 'full'} {b} x {s}, {h}/{hk} heads: "
                                  f"{ours:.0f} TFLOP/s, cuDNN {peer:.0f} ({ours / peer:.2f}), multi-head {full:.0f} "
                                  f"({ours / full:.2f}), difference {worst:.0e}", flush=True)
    for direction in ("fwd", "bwd"):
        for column in ("of_cudnn", "of_multi_head"):
            shares = [float(r[column]) for r in rows if r["pass"] == direction]
            print(f"{direction} {column}: {statistics.geometric_mean(shares):.3f} in the geometric mean, "
                  f"{min(shares):.3f} at least", flush=True)
    write(arguments.output, COLUMNS, rows)


if __name__ == "__main__":
    main()
