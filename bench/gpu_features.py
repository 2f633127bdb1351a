"""GQA, packed sequences, windows, softcap, ALiBi, bias and dropout on a GPU beside the plain kernel and PyTorch.

    gpu_features.py --library build/release/libtessera.so --output FILE [--rounds N]

bf16, head_dim 128, causal but for the bias, random normal inputs; useful FLOPs a second: 4 head_dim for every visible
pair of query and key. The plain kernel's problem has the same heads, head_dim, number of tokens and useful FLOPs (3 %
more beside the window, which is one sequence of 16,384 tokens, the plain one eight of 2,048; the window is also shown
beside one plain sequence). Feature, plain kernel and peer take turns; medians of CUDA-event times. Peers: cuDNN (GQA),
FlashAttention-2 as PyTorch carries it (packed, window, dropout), PyTorch's memory-efficient kernel (bias),
FlexAttention compiled (softcap, with --flex). Needs PyTorch.
"""

import argparse
import datetime
import pathlib
import random
import statistics
import sys

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "demo"))
import libtessera  # noqa: E402
from gpu_forward import query, time_calls, write  # noqa: E402

D = 128
COLUMNS = ["date", "commit", "driver", "feature", "problem", "kernel", "tessera", "plain", "of_plain", "peer",
           "peer_tflops", "difference"]


def randn(*shape):
    return torch.randn(*shape, device="cuda").bfloat16()


class Run:
    """A problem with its tensors, ready to be enqueued."""

    def __init__(self, library, text, q, k, v, **extra):
        self.o = torch.empty_like(q)
        self.memory = (q, k, v, extra)
        self.plan = library.plan(text, "gpu")
        self.text = text
        self.workspace = torch.empty(self.plan.workspace_bytes, dtype=torch.uint8, device="cuda")
        self.tensors = self.plan.tensors(q=q, k=k, v=v, o=self.o, **extra)

    def __call__(self):
        self.plan.enqueue(self.tensors, torch.cuda.current_stream().cuda_stream, self.workspace)


def causal_pairs(s):
    return s * (s + 1) // 2


def gqa(library):
    b, s, h, hk = 2, 8192, 16, 2
    q, k, v = randn(b, s, h, D), randn(b, s, hk, D), randn(b, s, hk, D)
    run = Run(library, f"fwd bf16 b={b} h={h}/{hk} q={s} k={s} d={D} causal", q, k, v)

    def cudnn():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True,
                                                  enable_gqa=True).transpose(1, 2)
    return run, b * h * causal_pairs(s), (b, s, h), "cuDNN", cudnn


def flash2(q, k, v, cu, longest, dropout_p=0.0, **more):
    return torch.ops.aten._flash_attention_forward(q, k, v, cu, cu, longest, longest, dropout_p, True, False,
                                                   **more)[0]


def packed(library):
    h, total, generator = 16, 65536, random.Random(1)
    lengths = []
    while sum(lengths) < total:
        lengths.append(min(generator.randint(64, 8192), total - sum(lengths)))
    longest = max(lengths)
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device="cuda")
    q, k, v = (randn(total, h, D) for _ in range(3))
    run = Run(library, f"fwd bf16 b={len(lengths)} h={h} q={longest} k={longest} d={D} packed={total},{total} "
              "causal", q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu)
    peer = lambda: flash2(q, k, v, cu, longest)
    return run, h * sum(map(causal_pairs, lengths)), (16, 4096, h), "FlashAttention-2", peer


def window(library, plain=(8, 2048)):
    b, s, h, width = 1, 16384, 16, 1024
    q, k, v = (randn(b, s, h, D) for _ in range(3))
    run = Run(library, f"fwd bf16 b={b} h={h} q={s} k={s} d={D} window={width - 1},0", q, k, v)
    peer = lambda: flash2(q, k, v, None, s, window_size_left=width - 1, window_size_right=0)
    return run, b * h * (width * s - width * (width - 1) // 2), (*plain, h), "FlashAttention-2", peer


def window_beside_one_sequence(library):
    return window(library, (1, 16384))


def alibi(library):
    b, s, h = 2, 8192, 16
    q, k, v = (randn(b, s, h, D) for _ in range(3))
    slopes = torch.rand(h, device="cuda")
    run = Run(library, f"fwd bf16 b={b} h={h} q={s} k={s} d={D} causal alibi=h", q, k, v, alibi_slopes=slopes)
    return run, b * h * causal_pairs(s), (b, s, h), "none", None


def key_bias(library):
    """A value for every key of a batch, as a mask of padding is."""
    b, s, h = 8, 2048, 16
    q, k, v = (randn(b, s, h, D) for _ in range(3))
    bias = torch.randn(b, 1, 1, s, device="cuda")
    run = Run(library, f"fwd bf16 b={b} h={h} q={s} k={s} d={D} bias=bk:f32", q, k, v, bias=bias)
    mask = bias.bfloat16().expand(b, h, s, s)

    def efficient():
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)),
                                                  attn_mask=mask).transpose(1, 2)
    return run, b * h * s * s, (b, s, h, ""), "memory-efficient", efficient


def dropout(library):
    b, s, h = 2, 8192, 16
    q, k, v = (randn(b, s, h, D) for _ in range(3))
    run = Run(library, f"fwd bf16 b={b} h={h} q={s} k={s} d={D} causal dropout=0.1", q, k, v)
    peer = lambda: flash2(q, k, v, None, s, dropout_p=0.1)  # which draws another mask
    return run, b * h * causal_pairs(s), (b, s, h), "FlashAttention-2", peer


def softcap(library):
    b, s, h, cap = 2, 8192, 16, 30.0
    q, k, v = (randn(b, s, h, D) for _ in range(3))
    run = Run(library, f"fwd bf16 b={b} h={h} q={s} k={s} d={D} causal softcap={cap}", q, k, v)

    def flex():
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention
        mask = create_block_mask(lambda b_, h_, i, j: i >= j, None, None, s, s, device="cuda")
        compiled = torch.compile(flex_attention)
        score = lambda x, b_, h_, i, j: cap * torch.tanh(x / cap)
        heads_first = [x.transpose(1, 2) for x in (q, k, v)]
        return lambda: compiled(*heads_first, score_mod=score, block_mask=mask).transpose(1, 2)
    return run, b * h * causal_pairs(s), (b, s, h), "FlexAttention", flex


def measure(library, build, rounds, with_flex):
    run, pairs, (b, s, h, *mask), peer_name, peer = build(library)
    mask = mask[0] if mask else "causal"
    if peer_name == "FlexAttention":
        peer = peer() if with_flex else None
    plain = Run(library, f"fwd bf16 b={b} h={h} q={s} k={s} d={D} {mask}", *(randn(b, s, h, D) for _ in range(3)))
    flops, plain_flops = 4 * D * pairs, 4 * D * b * h * (causal_pairs(s) if mask else s * s)
    run()
    difference = float("nan")
    if peer is not None:
        expected = peer().float()
        difference = ((run.o.float() - expected).abs().max() / expected.abs().max()).item()
    functions = {run: flops, plain: plain_flops} | ({peer: flops} if peer else {})
    times = {f: [] for f in functions}
    for _ in range(rounds):
        for f, samples in times.items():
            samples.append(time_calls(f, 10))
    rates = [flops / statistics.median(times[f]) * 1e-12 for f, flops in functions.items()] + [float("nan")]
    return run, peer_name, rates[0], rates[1], rates[2], difference


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", required=True)
    parser.add_argument("--output", type=pathlib.Path, required=True)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--flex", action="store_true", help="with FlexAttention, which takes a minute to compile")
    arguments = parser.parse_args()
    library = libtessera.Library(arguments.library)
    rows = []
    for build in (gqa, packed, window, window_beside_one_sequence, softcap, alibi, key_bias, dropout):
        run, peer_name, ours, plain, peer, difference = measure(library, build, arguments.rounds,
                                                                arguments.flex)
        rows.append(dict(zip(COLUMNS, (
            datetime.date.today().isoformat(), arguments.commit, query("driver_version"), build.__name__,
            run.text, run.plan.kernel, f"{ours:.1f}", f"{plain:.1f}", f"{ours / plain:.3f}", peer_name,
            f"{peer:.1f}", f"{difference:.1e}"))))
        print(f"{build.__name__}: {ours:.0f} TFLOP/s, plain {plain:.0f} ({ours / plain:.3f}), {peer_name} "
              f"{peer:.0f}, difference {difference:.1e}, {run.plan.kernel}", flush=True)
    write(arguments.output, COLUMNS, rows)


if __name__ == "__main__":
    main()
