"""What padding costs: a padded causal batch as packed pieces (what tessera.transformers makes of it), as if nothing were
padding, unpadded by the host, with a bias of one row a sequence, and PyTorch's SDPA with a boolean mask. Medians of
single calls, microseconds. Needs PyTorch and a GPU.
"""

import statistics

import torch

import tessera
from tessera.torch import padding


def t(f, n=20):
    for _ in range(3):
        f()
    ts = []
    for _ in range(n):
        a, b = torch.cuda.Event(True), torch.cuda.Event(True)
        a.record()
        f()
        b.record()
        b.synchronize()
        ts.append(a.elapsed_time(b) * 1e3)
    return statistics.median(ts)


for b, s in ((8, 4096), (64, 512), (32, 128)):
    torch.manual_seed(0)
    q = torch.randn(b, s, 32, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(b, s, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    L = torch.randint(s // 4, s + 1, (b,), device="cuda")
    keep = torch.arange(s, device="cuda")[None] >= (s - L)[:, None]
    first, end = padding.runs(keep)
    pieces = padding.cut_both(first, end, s, first, end, s)
    bias = torch.zeros(b, 1, 1, s, device="cuda", dtype=torch.bfloat16).masked_fill(~keep[:, None, None], -torch.inf)
    at = torch.cat([L.new_zeros(1), L.cumsum(0)]).int()
    tot = int(at[-1])
    qp, kp, vp = (x.flatten(0, 1)[keep.flatten()] for x in (q, k, v))
    with torch.no_grad():
        print(b, s, "share of pairs", (L.double() ** 2).mean().item() / s**2)
        print("  dense causal %.0f us" % t(lambda: tessera.attention(q, k, v, causal=True)))
        print("  pieces       %.0f us" % t(lambda: padding.attend(q, k, v, pieces, causal=True)))
        print(
            "  unpadded     %.0f us"
            % t(lambda: tessera.attention(qp, kp, vp, causal=True, cu_seqlens_q=at, max_seqlen_q=s))
        )
        print("  key bias     %.0f us" % t(lambda: tessera.attention(q, k, v, causal=True, bias=bias)))
        m = torch.ones(s, s, dtype=torch.bool, device="cuda").tril()[None, None] & keep[:, None, None]
        print(
            "  sdpa, mask   %.0f us"
            % t(
                lambda: torch.nn.functional.scaled_dot_product_attention(
                    q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=m, enable_gqa=True
                )
            )
        )
