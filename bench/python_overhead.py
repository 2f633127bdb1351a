"""What a forward call costs the host from Python, above the same enqueue from C++.

    python_overhead.py [--command build/release/tessera] [--csv FILE] [--commit REV]

Times calls on a problem whose kernel is far shorter than a call, in batches that the driver's queue holds, medians of
batches, all contenders in turns: `tessera.attention` without and with autograd, the custom op, the native call alone,
PyTorch's scaled_dot_product_attention, and an empty allocation. The C++ figure is `tessera bench`'s, in the same run.
Needs PyTorch, and a GPU unless --device cpu.
"""

import argparse
import csv
import datetime
import json
import statistics
import subprocess
import time

import torch

import tessera
from tessera import _native

PROBLEM = "fwd bf16 b=1 h=2 q=64 k=64 d=64 causal"


def contenders(device):
    q, k, v = (torch.randn(1, 64, 2, 64, device=device).bfloat16() for _ in range(3))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    heads_first = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    grad_heads_first = [x.clone().requires_grad_() for x in heads_first]
    o = torch.empty_like(q)
    stream = torch._C._cuda_getCurrentRawStream(0) if device == "cuda" else 0
    numbers = (0, 0, None, 0.0, -1, 0, False, 0.0, False, False)
    sdpa = torch.nn.functional.scaled_dot_product_attention

    return {
        "native call": lambda: _native.forward(q, k, v, o, *(None,) * 6, *numbers, 0, 0, stream, None),
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


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--command", help="the tessera command, for the figure of C++")
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--calls", type=int, default=200, help="calls of a batch")
    parser.add_argument("--csv", help="append the figures to this file")
    parser.add_argument("--commit", default="")
    options = parser.parse_args()

    calls = contenders(options.device)
    for call in calls.values():
        for _ in range(50):
            call()
    times = {name: [] for name in calls}
    for _ in range(options.rounds):
        for name, call in calls.items():
            if options.device == "cuda":
                torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(options.calls):
                call()
            times[name].append((time.perf_counter() - begin) / options.calls * 1e6)
    medians = {name: statistics.median(batch) for name, batch in times.items()}
    if options.command:
        text = subprocess.run([options.command, "bench", PROBLEM, "--json"], check=True, capture_output=True, text=True)
        figures = json.loads(text.stdout)
        found = figures[0] if isinstance(figures, list) else figures
        medians["C++ enqueue"] = found["enqueue_seconds"] * 1e6
    for name, microseconds in medians.items():
        print(f"{name:45} {microseconds:7.2f} us")
    if "C++ enqueue" in medians:
        print(f"above the C++ enqueue: {medians['tessera.attention'] - medians['C++ enqueue']:.2f} us")
    if options.csv:
        with open(options.csv, "a", newline="") as file:
            writer = csv.writer(file)
            if file.tell() == 0:
                writer.writerow(("date", "commit", "device", "torch", "what", "microseconds"))
            device = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
            for name, microseconds in medians.items():
                writer.writerow((datetime.date.today(), options.commit, device, torch.__version__, name,
                                 f"{microseconds:.2f}"))


if __name__ == "__main__":
    main()
