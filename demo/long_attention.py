"""One long attention, computed by libtessera or by the plain three steps, with its time and memory.

Run as a program it does one computation in this process and prints one line of JSON; the demo starts
one process per computation, so that each one's peak memory is its own:

    long_attention.py {tessera,three_step} SEQLEN HEADS HEAD_DIM [OUTPUT.npy]
"""

import json
import sys
import time

import numpy as np

import libtessera

SEED = 2205


def inputs(seqlen, heads, head_dim):
    """q, k, v: (heads, seqlen, head_dim) float32, standard normal; the same in every process."""
    rng = np.random.default_rng(SEED)
    return [rng.standard_normal((heads, seqlen, head_dim), dtype=np.float32) for _ in range(3)]


def three_step(q, k, v):
    """The score matrix (heads, seqlen, seqlen) is written once and reused in place: the least memory
    this way of computing can do with."""
    scores = np.matmul(q * np.float32(q.shape[-1] ** -0.5),
                       np.ascontiguousarray(k.transpose(0, 2, 1)))
    scores -= scores.max(-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(-1, keepdims=True)
    return scores @ v


def tiled(library, q, k, v):
    heads, seqlen, head_dim = q.shape
    plan = library.plan(f"fwd f32 b=1 h={heads} q={seqlen} k={seqlen} d={head_dim}")
    out = np.empty_like(v)
    plan.run(**{name: array.transpose(1, 0, 2)[None]
                for name, array in zip("qkvo", (q, k, v, out))})
    return out


def exact_rows(q, k, v, rows):
    """The same attention in double precision for a few query rows: (heads, len(rows), head_dim)."""
    q, k, v = q[:, rows].astype(np.float64), k.astype(np.float64), v.astype(np.float64)
    scores = q @ k.transpose(0, 2, 1) * q.shape[-1] ** -0.5
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights @ v / weights.sum(-1, keepdims=True)


def memory_kib(field):
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(field))


def reset_peak():
    """Makes VmHWM start again from the present size; False where the kernel does not allow it."""
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")
    except OSError:
        return False
    return True


def main(method, seqlen, heads, head_dim, output=None):
    if method == "tessera":
        library = libtessera.Library()
        compute = lambda *tensors: tiled(library, *tensors)
    else:
        compute = three_step
    compute(*inputs(64, heads, head_dim))  # threads and code are in memory before the measurement
    q, k, v = inputs(seqlen, heads, head_dim)
    reset_peak()
    before = memory_kib("VmRSS")
    start = time.perf_counter()
    out = compute(q, k, v)
    seconds = time.perf_counter() - start
    peak = memory_kib("VmHWM") - before
    if output:
        np.save(output, out)
    print(json.dumps({"seconds": seconds, "peak_bytes": peak * 1024}))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:5]), *sys.argv[5:6])
