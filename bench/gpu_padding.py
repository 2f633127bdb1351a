"""What padding costs on a GPU: a padded causal batch, bf16, 32/8 heads of 128, in five ways.

    gpu_padding.py [--shapes 8x4096 64x512 32x128]

As if nothing were padding; as packed pieces, which tessera.transformers makes of it; unpadded by the host; with a bias
of one row a sequence; and PyTorch's SDPA with a boolean mask. Medians of single calls, microseconds. Lengths are random,
from a quarter of the longest on. Needs PyTorch.
"""

import argparse
import statistics
from collections.abc import Callable

import torch

import tessera
from tessera.torch import padding


def median_us(function: Callable[[], object], calls: int = 20) -> float:
    for _ in range(3):
        function()
    times = []
    for _ in range(calls):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        function()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


def measure(batch: int, seqlen: int, device: str = "cuda") -> None:
    torch.manual_seed(0)
    q = torch.randn(batch, seqlen, 32, 128, device=device, dtype=torch.bfloat16)
    k, v = (torch.randn(batch, seqlen, 8, 128, device=device, dtype=torch.bfloat16) for _ in range(2))
    lengths = torch.randint(seqlen // 4, seqlen + 1, (batch,), device=device)
    keep = torch.arange(seqlen, device=device)[None] >= (seqlen - lengths)[:, None]
    first, end = padding.runs(keep)
    pieces = padding.cut_both(first, end, seqlen, first, end, seqlen)
    bias = torch.zeros(batch, 1, 1, seqlen, device=device, dtype=torch.bfloat16)
    bias.masked_fill_(~keep[:, None, None], -torch.inf)
    cu_seqlens = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int()
    unpadded = [x.flatten(0, 1)[keep.flatten()] for x in (q, k, v)]
    mask = torch.ones(seqlen, seqlen, dtype=torch.bool, device=device).tril()[None, None] & keep[:, None, None]
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    sdpa = torch.nn.functional.scaled_dot_product_attention
    ways: dict[str, Callable[[], object]] = {
        "dense causal": lambda: tessera.attention(q, k, v, causal=True),
        "pieces": lambda: padding.attend(q, k, v, pieces, causal=True),
        "unpadded": lambda: tessera.attention(*unpadded, causal=True, cu_seqlens_q=cu_seqlens, max_seqlen_q=seqlen),
        "key bias": lambda: tessera.attention(q, k, v, causal=True, bias=bias),
        "sdpa, mask": lambda: sdpa(*heads_first, attn_mask=mask, enable_gqa=True),
    }
    share = (lengths.double() ** 2).mean().item() / seqlen**2
    print(f"{batch} x {seqlen}, {share:.2f} of the pairs are not padding", flush=True)
    with torch.no_grad():
        for name, way in ways.items():
            print(f"  {name:12} {median_us(way):8.0f} us", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["8x4096", "64x512", "32x128"], help="batch x seqlen")
    for shape in parser.parse_args().shapes:
        batch, seqlen = map(int, shape.split("x"))
        measure(batch, seqlen)


if __name__ == "__main__":
    main()
