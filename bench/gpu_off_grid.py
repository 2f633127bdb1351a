"""Shapes that models have and grids do not, forward and backward beside cuDNN: bench/results/h200_off_grid.csv.

    gpu_off_grid.py --library build/release/libtessera.so --output FILE [--groups odd models dims cross windows packed]

Odd lengths; BERT, GPT-2 and vision transformers; head dims of 72, 80 and 96; cross attention to 77 keys, 512 queries
on 16k keys; windows; packed documents. cuDNN by PyTorch; by its own graphs for windows, packed sequences and causal
masks of few queries, which PyTorch does not pass on to it (the package nvidia-cudnn-frontend). FLOPs are useful ones:
4 head_dim a visible pair, 2.5 times that in the backward. Each function is a CUDA graph of several calls, so no host's
time is in it; medians of rounds in turns; random normal inputs. Needs PyTorch.
"""

import argparse
import dataclasses
import datetime
import pathlib
import random
import statistics

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpu_backward import Pass
from gpu_forward import libtessera, query, write

COLUMNS = ["date", "commit", "driver", "sm_mhz", "group", "pass", "name", "d", "b", "h", "q", "k", "mask", "kernel",
           "us", "tessera", "cudnn", "of_cudnn", "difference"]
TOKENS, HIDDEN = 16384, 2048


@dataclasses.dataclass
class Case:
    group: str
    name: str
    d: int
    b: int
    h: int
    q: int
    k: int
    causal: bool = False
    window: int = 0  # keys, the query's own among them
    lengths: tuple = ()  # of packed documents

    @property
    def mask(self):
        return f"window {self.window}" if self.window else "causal" if self.causal else "full"

    def words(self):
        text = f"bf16 b={self.b} h={self.h} q={self.q} k={self.k} d={self.d}"
        if self.lengths:
            text += f" packed={sum(self.lengths)},{sum(self.lengths)}"
        return text + (f" window={self.window - 1},0" if self.window else " causal" if self.causal else "")

    def pairs(self):
        if self.lengths:
            return self.h * sum(n * (n + 1) // 2 if self.causal else n * n for n in self.lengths)
        if not (self.causal or self.window):
            return self.b * self.h * self.q * self.k
        width = self.window or self.k
        return self.b * self.h * sum(min(i + 1 + self.k - self.q, width) for i in range(self.q))


def documents(total, longest, seed):
    generator, lengths = random.Random(seed), []
    while sum(lengths) < total:
        lengths.append(min(generator.randint(64, longest), total - sum(lengths)))
    return tuple(lengths)


def cases():
    for d in (64, 128, 256):
        for causal in (False, True):
            for s in (1000, 1500, 3333, 9999):
                yield Case("odd", f"{s} tokens", d, max(1, TOKENS // s), HIDDEN // d, s, s, causal)
    yield Case("models", "BERT base", 64, 32, 12, 512, 512)
    yield Case("models", "BERT large", 64, 32, 16, 512, 512)
    yield Case("models", "GPT-2", 64, 8, 12, 1024, 1024, True)
    yield Case("models", "GPT-2 XL", 64, 8, 25, 1024, 1024, True)
    yield Case("models", "ViT-B/16, 224", 64, 64, 12, 197, 197)
    yield Case("models", "ViT-L/14, 336", 64, 32, 16, 577, 577)
    yield Case("models", "ViT-H/14, 336", 80, 32, 16, 577, 577)
    yield Case("models", "ViT-H/14, 224", 80, 64, 16, 257, 257)
    yield Case("models", "SigLIP so400m, 384", 72, 32, 16, 729, 729)
    for d in (72, 80, 96):
        for causal in (False, True):
            for s in (1024, 4096):
                yield Case("dims", f"{s} tokens", d, TOKENS // s, 16, s, s, causal)
    for d, h in ((64, 10), (128, 24)):
        yield Case("cross", "77 keys", d, 8, h, 4096, 77)
        yield Case("cross", "77 keys", d, 16, h, 1024, 77)
    for d in (64, 128, 256):
        for b in (1, 4):
            for causal in (False, True):
                yield Case("cross", "512 queries", d, b, HIDDEN // d, 512, 16384, causal)
    for d in (64, 128):
        for window in (128, 256, 512, 1024, 2048, 4096):
            yield Case("windows", "16k tokens", d, 1, HIDDEN // d, 16384, 16384, window=window)
    for d in (64, 128):
        for causal in (False, True):
            for longest in (1024, 8192):
                lengths = documents(65536, longest, 1)
                yield Case("packed", f"documents to {longest}", d, len(lengths), HIDDEN // d, max(lengths),
                           max(lengths), causal, lengths=lengths)


def randn(*shape):
    return torch.randn(*shape, device="cuda").bfloat16()


def by_pytorch(q, k, v, dout, causal):
    inputs = [x.transpose(1, 2).detach().requires_grad_(True) for x in (q, k, v)]

    def forward():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(*inputs, is_causal=causal)

    out, gradient = forward(), dout.transpose(1, 2)

    def backward():
        return [x.transpose(1, 2) for x in torch.autograd.grad(out, inputs, gradient, retain_graph=True)]

    return forward, backward


class Repeated:
    """A function as a CUDA graph of several calls."""

    def __init__(self, function, calls):
        self.calls, self.graph = calls, torch.cuda.CUDAGraph()
        function()
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph, stream=torch.cuda.current_stream()):
            for _ in range(calls):
                function()

    def seconds(self):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / self.calls * 1e-3


def measure(library, case, rounds):
    """Of each pass: its name, the kernel, our seconds, cuDNN's, the greatest difference of a gradient."""
    if case.lengths:
        q, k, v, dout = (randn(sum(case.lengths), case.h, case.d) for _ in range(4))
        cu_seqlens = torch.tensor((0, *torch.tensor(case.lengths).cumsum(0).tolist()), dtype=torch.int32,
                                  device="cuda")
        packed = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}
    else:
        q, dout = (randn(case.b, case.q, case.h, case.d) for _ in range(2))
        k, v = (randn(case.b, case.k, case.h, case.d) for _ in range(2))
        packed = {}
    ours = Pass(library, case.words(), q, k, v, dout, **packed)
    if case.lengths or case.window or (case.causal and case.q != case.k):
        import cudnn_graph
        peer = cudnn_graph.both_passes(q, k, v, dout, causal=case.causal, window=case.window, lengths=case.lengths,
                                       cu_seqlens=packed.get("cu_seqlens_q"))
    else:
        peer = by_pytorch(q, k, v, dout, case.causal)
    ours()
    worst = max(((x.float() - y.float()).abs().max() / y.float().abs().max()).item()
                for x, y in zip(ours.out, peer[1]()))
    forward_kernel = library.plan("fwd " + case.words(), "gpu").kernel
    for direction, kernel, function, other in (("fwd", forward_kernel, ours.forward, peer[0]),
                                               ("bwd", ours.plan.kernel, ours, peer[1])):
        flops = 4 * case.d * case.pairs() * (2.5 if direction == "bwd" else 1)
        calls = max(2, min(30, int(0.004 / (flops / 4e14))))
        functions = {"ours": Repeated(function, calls), "cudnn": Repeated(other, calls)}
        times = {name: [] for name in functions}
        for f in functions.values():
            f.seconds()
        for _ in range(rounds):
            for name in random.sample(list(functions), len(functions)):
                times[name].append(functions[name].seconds())
        seconds = {name: statistics.median(t) for name, t in times.items()}
        yield direction, kernel, flops, seconds["ours"], seconds["cudnn"], worst


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", type=pathlib.Path, required=True)
    parser.add_argument("--output", type=pathlib.Path, required=True)
    parser.add_argument("--commit", default="", help="of the library")
    groups = tuple(dict.fromkeys(case.group for case in cases()))
    parser.add_argument("--groups", nargs="+", choices=groups, default=groups)
    parser.add_argument("--head-dim", nargs="+", type=int, help="these alone")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    library, rows = libtessera.Library(arguments.library), []
    torch.cuda.set_stream(torch.cuda.Stream())  # the default one cannot be captured
    for case in cases():
        if case.group not in arguments.groups or (arguments.head_dim and case.d not in arguments.head_dim):
            continue
        for direction, kernel, flops, ours, cudnn, worst in measure(library, case, arguments.rounds):
            rows.append(dict(zip(COLUMNS, (
                datetime.date.today().isoformat(), arguments.commit, query("driver_version"), query("clocks.sm"),
                case.group, direction, case.name, case.d, case.b, case.h, case.q, case.k, case.mask, kernel,
                f"{ours * 1e6:.1f}", f"{flops / ours * 1e-12:.1f}", f"{flops / cudnn * 1e-12:.1f}",
                f"{cudnn / ours:.3f}", f"{worst:.1e}"))))
            print(f"{direction} {case.group} {case.name} d={case.d} {case.mask} {case.b} x {case.h}: {ours * 1e6:.0f} "
                  f"us, {flops / ours * 1e-12:.0f} TFLOP/s, cuDNN {flops / cudnn * 1e-12:.0f} ({cudnn / ours:.2f}), "
                  f"difference {worst:.0e}, {kernel}", flush=True)
        torch.cuda.empty_cache()
    for direction in ("fwd", "bwd"):
        shares = [float(r["of_cudnn"]) for r in rows if r["pass"] == direction]
        print(f"{direction}: {statistics.geometric_mean(shares):.3f} of cuDNN in the geometric mean, {min(shares):.3f} "
              "at least", flush=True)
    write(arguments.output, COLUMNS, rows)


if __name__ == "__main__":
    main()
