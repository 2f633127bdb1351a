"""What a call costs the host from Python, above the same enqueue from C++.

    python_overhead.py [--device cpu] [--command build/release/tessera] [--csv FILE] [--commit REV]

Times calls on problems whose kernels are far shorter than a call, in batches that the driver's queue holds, all
contenders in turns:

- a forward call: `tessera.attention` without and with autograd, the custom op, the native call alone, PyTorch's
  scaled_dot_product_attention, and an empty allocation;
- a layer of a decoding step, over rows and over pages: `tessera.append` and `tessera.cached_attention`, both in one
  call (new keys), also through `KVCache`, the native calls alone, and `flash_attn_with_kvcache` of the stand-ins,
  without and with new keys.
  The cache has no keys and the lengths are negative, so that kernels have nothing to do.

On a GPU the figures are medians of the clock. On a CPU, where neighbours disturb, they are the least of the thread's
own time, with one thread; kernels count there, at some tenths of a microsecond. The C++ figure is `tessera bench`'s, in
the same run. Needs PyTorch, and a GPU unless --device cpu.
"""

import argparse
import csv
import datetime
import json
import statistics
import subprocess
import time
from functools import partial

import torch

import tessera
import tessera.compat.flash_attn as flash_attn_2
import tessera.compat.flash_attn_interface as flash_attn_3
from tessera import _native
from tessera.torch.ops import FRAMEWORK

PROBLEM = "fwd bf16 b=1 h=2 q=64 k=64 d=64 causal"


def forward_calls(device):
    q, k, v = (torch.randn(1, 64, 2, 64, device=device).bfloat16() for _ in range(3))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    heads_first = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    grad_heads_first = [x.clone().requires_grad_() for x in heads_first]
    o = torch.empty_like(q)
    numbers = (0, 0, None, 0.0, -1, 0, False, 0.0, False, False)
    sdpa = torch.nn.functional.scaled_dot_product_attention

    return {
        "native call": lambda: _native.forward(q, k, v, o, *(None,) * 7, *numbers, 0, 0, FRAMEWORK),
        "tessera.attention": lambda: tessera.attention(q, k, v, causal=True),
        "tessera.attention, with autograd": lambda: tessera.attention(*leaves, causal=True),
        "torch.ops.tessera.forward": lambda: torch.ops.tessera.forward(
            q, k, v, *(None,) * 6, *numbers),
        "torch.ops.tessera.forward, with autograd": lambda: torch.ops.tessera.forward(
            *leaves, *(None,) * 6, *numbers),
        "SDPA of torch": lambda: sdpa(*heads_first, is_causal=True),
        "SDPA of torch, with autograd": lambda: sdpa(*grad_heads_first, is_causal=True),
        "torch.empty": lambda: torch.empty(q.shape, dtype=q.dtype, device=q.device),
    }


def decoding_calls(device):
    batch, heads, heads_k, dim, capacity, page_size = 1, 2, 1, 64, 64, 16
    rows = [torch.zeros(batch, capacity, heads_k, dim, device=device).bfloat16() for _ in range(2)]
    pages = [x.view(-1, page_size, heads_k, dim) for x in rows]
    # As a layer has them: parts of one projection.
    qkv = torch.randn(batch, 1, heads + 2 * heads_k, dim, device=device).bfloat16()
    q, k, v = qkv.split([heads, heads_k, heads_k], dim=2)
    o = torch.empty(batch, 1, heads, dim, dtype=q.dtype, device=device)
    seqlens = torch.full((batch,), -1, dtype=torch.int32, device=device)
    table = torch.arange(batch * capacity // page_size, dtype=torch.int32, device=device).view(batch, -1)
    cached_numbers = (0, "before", 1, None, 0.0, -1, 0, 0, 0, False)
    append_numbers = ("before", 0, 0, False, False)

    def native_step(cache, table):
        _native.append(k, v, *cache, None, None, seqlens, None, table, *(None,) * 9, *append_numbers, FRAMEWORK)
        _native.cached_forward(
            q, *cache, o, *(None,) * 4, seqlens, None, table, *(None,) * 6, *cached_numbers, FRAMEWORK,
        )

    def native_step_at_once(cache, table):
        _native.cached_step(
            k, v, None, None, None, None, 0, False, False,
            q, *cache, o, *(None,) * 4, seqlens, None, table, *(None,) * 6, *cached_numbers, FRAMEWORK,
        )

    def step(cache, table):
        tessera.append(k, v, *cache, seqlens=seqlens, page_table=table)
        return tessera.cached_attention(
            q, *cache, seqlens=seqlens, lengths="before", seqlen_new=1, page_table=table, causal=True
        )

    calls = {}
    for name, cache, places in (("rows", rows, None), ("pages", pages, table)):
        layer = tessera.KVCache(*cache)
        sequences = tessera.CachedSequences(seqlens, places, lengths="before")
        step_2 = partial(flash_attn_2.flash_attn_with_kvcache, block_table=places)
        step_3 = partial(flash_attn_3.flash_attn_with_kvcache, page_table=places)
        calls |= {
            f"{name}: both native calls": lambda c=cache, t=places: native_step(c, t),
            f"{name}: the native call of both": lambda c=cache, t=places: native_step_at_once(c, t),
            f"{name}: tessera.append": lambda c=cache, t=places: tessera.append(
                k, v, *c, seqlens=seqlens, page_table=t),
            f"{name}: tessera.cached_attention": lambda c=cache, t=places: tessera.cached_attention(
                q, *c, seqlens=seqlens, page_table=t, causal=True),
            f"{name}: append and cached_attention": lambda c=cache, t=places: step(c, t),
            f"{name}: cached_attention, new keys": lambda c=cache, t=places: tessera.cached_attention(
                q, *c, seqlens=seqlens, lengths="before", page_table=t, causal=True, k_new=k, v_new=v),
            f"{name}: KVCache.attend, new keys": lambda c=layer, s=sequences: c.attend(
                q, s, causal=True, k_new=k, v_new=v),
            f"{name}: kvcache of flash_attn 2": lambda c=cache, f=step_2: f(
                q, *c, cache_seqlens=seqlens, causal=True),
            f"{name}: kvcache of flash_attn 2, new keys": lambda c=cache, f=step_2: f(
                q, *c, k, v, cache_seqlens=seqlens, causal=True),
            f"{name}: kvcache of flash_attn 3, new keys": lambda c=cache, f=step_3: f(
                q, *c, k, v, cache_seqlens=seqlens, causal=True),
        }
    return calls


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--command", help="the tessera command, for the figure of C++")
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--rounds", type=int, help="batches of each contender; default: 60, on a CPU 200")
    parser.add_argument("--calls", type=int, help="calls of a batch; default: 200, on a CPU 30")
    parser.add_argument("--csv", help="append the figures to this file")
    parser.add_argument("--commit", default="")
    options = parser.parse_args()

    on_gpu = options.device == "cuda"
    if not on_gpu:
        torch.set_num_threads(1)
        tessera.set_num_threads(1)
    clock, figure = (time.perf_counter, statistics.median) if on_gpu else (time.thread_time, min)
    rounds = options.rounds or (60 if on_gpu else 200)
    batch = options.calls or (200 if on_gpu else 30)
    calls = forward_calls(options.device) | decoding_calls(options.device)
    for call in calls.values():
        for _ in range(50):
            call()
    times = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            if on_gpu:
                torch.cuda.synchronize()
            begin = clock()
            for _ in range(batch):
                call()
            times[name].append((clock() - begin) / batch * 1e6)
    summary = {name: figure(batch) for name, batch in times.items()}
    if options.command:
        text = subprocess.run([options.command, "bench", PROBLEM, "--json"], check=True, capture_output=True, text=True)
        figures = json.loads(text.stdout)
        found = figures[0] if isinstance(figures, list) else figures
        summary["C++ enqueue"] = found["enqueue_seconds"] * 1e6
    for name, microseconds in summary.items():
        print(f"{name:45} {microseconds:7.2f} us")
    if "C++ enqueue" in summary:
        print(f"above the C++ enqueue: {summary['tessera.attention'] - summary['C++ enqueue']:.2f} us")
    if options.csv:
        with open(options.csv, "a", newline="") as file:
            writer = csv.writer(file)
            if file.tell() == 0:
                writer.writerow(("date", "commit", "device", "torch", "what", "microseconds"))
            device = torch.cuda.get_device_name() if on_gpu else "cpu"
            for name, microseconds in summary.items():
                writer.writerow((datetime.date.today(), options.commit, device, torch.__version__, name,
                                 f"{microseconds:.2f}"))


if __name__ == "__main__":
    main()
