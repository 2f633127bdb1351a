"""What a cache of 8 bits costs in accuracy: bench/results/*_cache_errors.csv.

    cache_errors.py [--device cuda] [--seqlens 1024,8192] [--output FILE]

Keys and values of q's type are appended to a cache of 8 bits, and a step of decoding reads it. `of_cache` is the error
that the stored values alone make, with all else in double, and `of_step` that of the step's output: both against
attention of the keys and values as they were, root mean square over all outputs, as a share of theirs. `ratio` is what
the kernel adds. Scales by group: latent rows (`qv`), values of e4m3, rotated columns as they are, 16 heads. Random
normal inputs; `outliers`: one column in 16 of keys and values is 8 times as large. Needs PyTorch and the installed
package.
"""

import argparse
import csv
import datetime
import pathlib
import subprocess

import torch

import tessera

COLUMNS = ["date", "commit", "device", "dtype", "kv_dtype", "scales", "inputs", "b", "seqlen_k", "h", "hk", "d",
           "of_cache", "of_step", "ratio"]
KINDS = ((torch.float8_e4m3fn, "tensor"), (torch.float8_e4m3fn, "token"), (torch.int8, "token"))
HEADS, HEADS_K, DIM = 32, 8, 128
LATENT_HEADS, LATENT, ROTATED, GROUP = 16, 512, 64, 128


def attention(q, k, v):
    """In double; q (batch, 1, h, d), k and v (batch, keys, hk, d)."""
    rows = q[:, 0].double().unflatten(1, (HEADS_K, -1))
    weights = torch.einsum("bkgd,bnkd->bkgn", rows, k.double()).mul(DIM ** -0.5).softmax(-1)
    return torch.einsum("bkgn,bnkd->bkgd", weights, v.double()).flatten(1, 2)


def quantised(rows, kind, scales):
    """An empty cache for such rows, and its scales: of a tensor by its greatest element."""
    cache = torch.zeros(rows.shape, dtype=kind, device=rows.device)
    if scales == "token":
        return cache, torch.zeros(rows.shape[:3], device=rows.device)
    return cache, (rows.abs().max().float() / torch.finfo(kind).max).reshape(())


def values(cache, scale):
    return cache.double() * (scale[..., None] if scale.dim() else scale).double()


def measure(device, dtype, kind, scales, inputs, batch, seqlen):
    q, k, v = (torch.randn(batch, n, heads, DIM, device=device)
               for n, heads in ((1, HEADS), (seqlen, HEADS_K), (seqlen, HEADS_K)))
    if inputs == "outliers":
        k[..., ::16] *= 8
        v[..., ::16] *= 8
    q, k, v = (x.to(dtype) for x in (q, k, v))
    (k_cache, k_scale), (v_cache, v_scale) = (quantised(x, kind, scales) for x in (k, v))
    tessera.append(k, v, k_cache, v_cache, seqlens=torch.zeros(batch, dtype=torch.int32, device=device),
                   lengths="before", k_scale=k_scale, v_scale=v_scale)
    o = tessera.cached_attention(q, k_cache, v_cache, k_scale=k_scale, v_scale=v_scale)[:, 0].double()
    exact = attention(q, k, v)
    stored = attention(q, values(k_cache, k_scale), values(v_cache, v_scale))
    size = exact.square().mean().sqrt()
    return [float((x - exact).square().mean().sqrt() / size) for x in (stored, o)]


def latent_attention(q, rows):
    """In double; q (batch, 1, h, 576), rows (batch, keys, 576), values their first columns."""
    weights = torch.einsum("bhd,bnd->bhn", q[:, 0].double(), rows.double()).mul((LATENT + ROTATED) ** -0.5).softmax(-1)
    return torch.einsum("bhn,bnd->bhd", weights, rows[..., :LATENT].double())


def measure_latent(device, dtype, inputs, batch, seqlen):
    q, rows = (torch.randn(batch, n, LATENT + ROTATED, device=device) for n in (LATENT_HEADS, seqlen))
    if inputs == "outliers":
        rows[..., ::16] *= 8
    q, rows = q.to(dtype)[:, None], rows.to(dtype)
    values, rotated = rows.split((LATENT, ROTATED), -1)
    groups = values.float().unflatten(-1, (-1, GROUP))
    scale = groups.abs().amax(-1) / 448
    cache = (groups / scale[..., None]).to(torch.float8_e4m3fn)
    o = tessera.cached_attention(
        q[..., LATENT:].contiguous(), rotated.contiguous()[:, :, None], cache.flatten(-2)[:, :, None],
        qv=q[..., :LATENT].contiguous(), v_scale=scale[:, :, None])[:, 0].double()
    kept = (cache.double() * scale[..., None].double()).flatten(-2)
    exact = latent_attention(q, rows)
    stored = latent_attention(q, torch.cat((kept, rotated.double()), -1))
    size = exact.square().mean().sqrt()
    return [float((x - exact).square().mean().sqrt() / size) for x in (stored, o)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--seqlens", default="1024,8192", help="keys, several by commas")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--commit", help="of the library; default: of the checkout")
    parser.add_argument("--output", type=pathlib.Path, help="a CSV file; default: the table alone")
    args = parser.parse_args()
    commit = args.commit or subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], text=True).strip()
    name = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    rows = []
    print(f"{'cache':20s} {'inputs':10s} {'keys':>7s} {'of cache':>10s} {'of step':>10s} {'ratio':>7s}")
    for seqlen in map(int, args.seqlens.split(",")):
        for dtype in (torch.bfloat16, torch.float16):
            for kind, scales in (*KINDS, (torch.float8_e4m3fn, "group")):
                latent = scales == "group"
                shape = (LATENT_HEADS, 1, f"{ROTATED}/{LATENT}") if latent else (HEADS, HEADS_K, DIM)
                for inputs in ("normal", "outliers"):
                    sizes = inputs, args.batch, seqlen
                    cache, step = (measure_latent(args.device, dtype, *sizes) if latent else
                                   measure(args.device, dtype, kind, scales, *sizes))
                    names = [str(x).removeprefix("torch.") for x in (dtype, kind)]
                    print(f"{names[0]:9s}{names[1][:6]:7s}{scales:7s} {inputs:8s} {seqlen:7d} "
                          f"{cache:10.5f} {step:10.5f} {step / cache:7.4f}", flush=True)
                    rows.append([datetime.date.today().isoformat(), commit, name, *names, scales, inputs, args.batch,
                                 seqlen, *shape, f"{cache:.6f}", f"{step:.6f}", f"{step / cache:.4f}"])
    if args.output:
        with args.output.open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([COLUMNS, *rows])


if __name__ == "__main__":
    main()
