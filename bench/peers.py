"""libtessera beside PyTorch's CPU attention and the three-step computation, in one process.

For every cell (pass, dtype, head_dim, mask, seqlen) the three take turns on the same random normal
inputs, the machine's multiply-add peak is measured just before and just after, and the medians go to
a CSV file; rows of the same cell are replaced. Peak memory is measured first, each computation in a
process of its own. Needs NumPy and PyTorch (CPU): pip install numpy torch==2.13.0

    peers.py --library build/release/libtessera.so [--dtype f32 bf16] [--seqlen 512 1024] ...

FLOPs: forward 4 b h s s d, backward 2.5 times that, halved when causal.
"""

import argparse
import csv
import ctypes
import datetime
import functools
import itertools
import math
import os
import pathlib
import statistics
import subprocess
import sys
import time
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "demo"))

# Three thread pools live in this process (OpenMP's, OpenBLAS's, ours): idle threads must sleep, not
# spin on the cores that another one is being measured on. Read when the libraries are loaded.
os.environ.update(OMP_WAIT_POLICY="passive", OPENBLAS_THREAD_TIMEOUT="10")

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

import libtessera  # noqa: E402
from long_attention import memory_kib, reset_peak  # noqa: E402

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
TOLERANCE = {"f32": 1e-4, "bf16": 5e-2}  # of the largest component; torch sums bf16 gradients in bf16
BATCH, HEADS = 1, 4
METHODS = ("tessera", "torch", "three_step")
KEY = ("pass", "dtype", "b", "h", "d", "causal", "s", "threads")
COLUMNS = ["date", "commit", *KEY, "gflops", "peak_gflops", "torch_gflops", "three_step_gflops",
           "seconds", "torch_seconds", "three_step_seconds",
           "peak_bytes", "torch_peak_bytes", "three_step_peak_bytes", "difference", "torch"]


class Cell(NamedTuple):
    direction: str  # fwd or bwd
    dtype: str
    d: int
    causal: bool
    s: int

    def flops(self):
        full = 4 * BATCH * HEADS * self.s**2 * self.d * (2.5 if self.direction == "bwd" else 1)
        return full / 2 if self.causal else full

    def problem(self, direction):
        return (f"{direction} {self.dtype} b={BATCH} h={HEADS} q={self.s} k={self.s} d={self.d}"
                + (" causal" if self.causal else ""))

    def __str__(self):
        return self.problem(self.direction)


def inputs(cell):
    """q, k, v and the gradient of the output, (batch, heads, seqlen, head_dim)."""
    generator = torch.Generator().manual_seed(cell.s + cell.d)
    shape = (BATCH, HEADS, cell.s, cell.d)
    return [torch.randn(shape, generator=generator).to(DTYPES[cell.dtype]) for _ in range(4)]


# Each maker returns (forward, backward): forward() -> output, backward() -> (dq, dk, dv); backward()
# may be called many times after one forward().


def make_tessera(cell, library, q, k, v, dout):
    """The strides say where things lie: nothing is transposed or copied."""
    seqlen_major = lambda t: t.transpose(1, 2)
    plans = {"fwd": library.plan(cell.problem("fwd"))}
    if cell.direction == "bwd":
        plans["bwd"] = library.plan(cell.problem("bwd"))
    qkv = {name: seqlen_major(t) for name, t in zip("qkv", (q, k, v))}
    saved = {}

    def forward():
        saved["o"] = torch.empty_like(v)
        saved["lse"] = torch.empty((BATCH, HEADS, cell.s))
        plans["fwd"].run(**qkv, o=seqlen_major(saved["o"]), softmax_lse=saved["lse"])
        return saved["o"]

    def backward():
        grads = [torch.empty_like(t) for t in (q, k, v)]
        dq, dk, dv = map(seqlen_major, grads)
        plans["bwd"].run(**qkv, o=seqlen_major(saved["o"]), softmax_lse=saved["lse"],
                         dout=seqlen_major(dout), dq=dq, dk=dk, dv=dv)
        return grads

    return forward, backward


def make_torch(cell, _library, q, k, v, dout):
    training = cell.direction == "bwd"
    leaves = [t.detach().requires_grad_(training) for t in (q, k, v)]
    saved = {}

    def forward():
        with torch.set_grad_enabled(training):
            saved["o"] = F.scaled_dot_product_attention(*leaves, is_causal=cell.causal)
        return saved["o"].detach()

    def backward():
        return torch.autograd.grad(saved["o"], leaves, dout, retain_graph=True)

    return forward, backward


def numpy_matmul(a, b, out):
    np.matmul(a.numpy(), b.numpy(), out=out.numpy())
    return out


def torch_matmul(a, b, out):
    return torch.matmul(a, b, out=out)


@functools.cache
def best_matmul(dtype):
    """OpenBLAS (in NumPy) or MKL / oneDNN (in torch), whichever multiplies faster here."""
    if dtype != "f32":
        return torch_matmul
    a = torch.randn(4, 1024, 1024)
    out, seconds = torch.empty_like(a), {}
    for function in (numpy_matmul, torch_matmul):
        function(a, a, out)
        seconds[function] = min(time_calls(lambda: function(a, a, out), 1) for _ in range(5))
    return min(seconds, key=seconds.get)


def make_three_step(cell, _library, q, k, v, dout):
    """S = q k^T, P = softmax(S), o = P v with the fastest matrix product at hand. S is made once and
    overwritten by P, so this is the least memory and the fewest page faults three steps can have."""
    matmul = best_matmul(cell.dtype)
    scale = cell.d**-0.5
    p = torch.empty((BATCH, HEADS, cell.s, cell.s), dtype=q.dtype)
    dp = torch.empty_like(p) if cell.direction == "bwd" else None
    hidden = torch.ones((cell.s, cell.s), dtype=torch.bool).triu_(1) if cell.causal else None
    saved = {}

    def forward():
        matmul(q * scale, k.transpose(-1, -2), p)
        if hidden is not None:
            p.masked_fill_(hidden, -math.inf)
        torch.softmax(p, -1, out=p)
        saved["o"] = matmul(p, v, torch.empty_like(v))
        return saved["o"]

    def backward():
        dv = matmul(p.transpose(-1, -2), dout, torch.empty_like(v))
        delta = (dout * saved["o"]).sum(-1, keepdim=True)
        ds = matmul(dout, v.transpose(-1, -2), dp).sub_(delta).mul_(p).mul_(scale)
        dq = matmul(ds, k, torch.empty_like(q))
        dk = matmul(ds.transpose(-1, -2), q, torch.empty_like(k))
        return dq, dk, dv

    return forward, backward


MAKERS = {"tessera": make_tessera, "torch": make_torch, "three_step": make_three_step}


# ---- memory ------------------------------------------------------------------------------------------


def memory_of(method, cell, arguments):
    """Peak growth in bytes of one computation (backward: forward and backward together), in a fork:
    this process must not have computed anything yet, or the fork would inherit its threads' memory."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            growth = measure_growth(method, cell, arguments)
            os.write(write_end, str(growth).encode())
            status = 0
        except BaseException as error:  # noqa: BLE001: reported, and the fork must not return
            print(f"{method}: {error}", file=sys.stderr)
        finally:
            os._exit(status)
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return int(text) if text else None


def return_free_memory():
    """Gives what malloc keeps back to the system, and makes it keep no large block from now on, so that
    a computation's memory is not hidden in what was freed before it."""
    libc = ctypes.CDLL(None)
    m_mmap_threshold = -3
    libc.mallopt(m_mmap_threshold, 64 << 10)
    libc.malloc_trim(0)


def measure_growth(method, cell, arguments):
    torch.set_num_threads(arguments.threads)
    library = libtessera.Library(arguments.library)

    def compute(some_cell, tensors):
        forward, backward = MAKERS[method](some_cell, library, *tensors)
        forward()
        if some_cell.direction == "bwd":
            backward()

    small = cell._replace(s=64)
    compute(small, inputs(small))  # threads, code and BLAS buffers are not counted
    tensors = inputs(cell)
    return_free_memory()
    reset_peak()
    before = memory_kib("VmRSS")
    compute(cell, tensors)
    return (memory_kib("VmHWM") - before) * 1024


# ---- time --------------------------------------------------------------------------------------------


def time_calls(function, calls):
    start = time.perf_counter()
    for _ in range(calls):
        function()
    return (time.perf_counter() - start) / calls


def time_cell(cell, library, budget):
    """Median seconds of each method, taking turns; and the largest relative difference to torch."""
    tensors = inputs(cell)
    runs, results, calls = {}, {}, {}
    for method in METHODS:
        forward, backward = MAKERS[method](cell, library, *tensors)
        results[method] = [forward()] if cell.direction == "fwd" else [forward(), *backward()]
        runs[method] = forward if cell.direction == "fwd" else backward
        calls[method] = max(1, round(0.03 / time_calls(runs[method], 1)))
    difference = max(
        float((a.float() - b.float()).abs().max() / b.float().abs().max())
        for a, b in zip(results["tessera"], results["torch"])
    )
    results.clear()
    samples = {method: [] for method in METHODS}
    start, rounds = time.perf_counter(), 0
    while rounds < 2 or (rounds < 9 and time.perf_counter() - start < budget):
        rounds += 1
        for method in METHODS:
            time.sleep(0.02)  # the others' threads stop spinning
            if calls[method] > 1:
                runs[method]()
            samples[method].append(time_calls(runs[method], calls[method]))
    return {method: statistics.median(values) for method, values in samples.items()}, difference


def peak_of(library, dtype):
    peaks = library.peaks(0.04)
    return (peaks.bf16_flops or peaks.f32_flops) if dtype == "bf16" else peaks.f32_flops


def cpu_seconds():
    """Processor seconds spent so far by everybody else on this machine (theft by a host included)."""
    with open("/proc/stat", encoding="ascii") as file:
        user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, file.readline().split()[1:9])
    everybody = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    return everybody - time.process_time()


best_peaks = {}  # by dtype: a lower one later on means that something else had a core


def time_undisturbed(cell, arguments, library, attempts=4):
    """(seconds by method, difference, peaks before and after); None if all attempts were disturbed:
    others used more than 4 % of a core meanwhile, or the peak was 6 % below the best one."""
    for _ in range(attempts):
        others, start = cpu_seconds(), time.perf_counter()
        before = peak_of(library, cell.dtype)
        seconds, difference = time_cell(cell, library, arguments.seconds)
        peaks = (before, peak_of(library, cell.dtype))
        share = (cpu_seconds() - others) / (time.perf_counter() - start)
        best_peaks[cell.dtype] = max(best_peaks.get(cell.dtype, 0.0), *peaks)
        if share < 0.04 and min(peaks) > 0.94 * best_peaks[cell.dtype]:
            return seconds, difference, peaks
        print(f"{cell}: disturbed (others used {100 * share:.0f} % of a core, peak "
              f"{peaks[0] / 1e9:.0f} then {peaks[1] / 1e9:.0f})", flush=True)
    return None


# ---- results -----------------------------------------------------------------------------------------


def read_rows(path):
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        return {tuple(row[name] for name in KEY): row for row in csv.DictReader(file)}


def write_rows(path, rows):
    numeric = lambda row: tuple(int(row[n]) for n in ("b", "h", "d", "causal", "threads", "s"))
    ordered = sorted(rows.values(), key=lambda r: (r["pass"] != "fwd", r["dtype"] != "f32", numeric(r)))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    with temporary.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n", restval="")
        writer.writeheader()
        writer.writerows(ordered)
    temporary.replace(path)


def commit_name():
    git = lambda *words: subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True,
                                        text=True, check=False).stdout.strip()
    return (git("rev-parse", "--short", "HEAD") or "unknown") + (
        "+" if git("status", "--porcelain", "--", "src", "include") else "")


def memory_columns(peak_bytes):
    return {("" if method == "tessera" else f"{method}_") + "peak_bytes": number
            for method, number in peak_bytes.items()}


def time_columns(cell, arguments, seconds, difference, peaks):
    columns = {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "commit": arguments.commit or commit_name(), "torch": torch.__version__,
        "peak_gflops": f"{statistics.mean(peaks) / 1e9:.1f}", "difference": f"{difference:.1e}",
    }
    for method in METHODS:
        prefix = "" if method == "tessera" else f"{method}_"
        columns[f"{prefix}seconds"] = f"{seconds[method]:.6g}"
        columns[f"{prefix}gflops"] = f"{cell.flops() / seconds[method] / 1e9:.1f}"
    return columns


def report(cell, row):
    share = float(row["gflops"]) / float(row["peak_gflops"])
    good = float(row["difference"]) <= TOLERANCE[cell.dtype]
    print(f"{cell}: {row['gflops']} GFLOP/s = {share:.0%} of peak, torch {row['torch_gflops']}, "
          f"three-step {row['three_step_gflops']}; difference {row['difference']}"
          f"{'' if good else ' WRONG'}", flush=True)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", help="path of libtessera.so")
    parser.add_argument("--output", type=pathlib.Path, default=ROOT / "bench/results/cpu.csv")
    parser.add_argument("--direction", nargs="+", choices=("fwd", "bwd"), default=("fwd", "bwd"))
    parser.add_argument("--dtype", nargs="+", choices=tuple(DTYPES), default=tuple(DTYPES))
    parser.add_argument("--head-dim", nargs="+", type=int, default=(64, 128))
    parser.add_argument("--mask", nargs="+", choices=("full", "causal"), default=("full", "causal"))
    parser.add_argument("--seqlen", nargs="+", type=int, default=[512 << i for i in range(6)])
    parser.add_argument("--commit", help="of the library, if it is not built from this checkout")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seconds", type=float, default=2.0, help="of timing per cell, about")
    parser.add_argument("--no-memory", action="store_true", help="keep the memory columns as they are")
    parser.add_argument("--missing", action="store_true", help="only cells that have no time yet")
    parser.add_argument("--no-time", action="store_true", help="keep the time columns as they are")
    return parser.parse_args()


def main():
    arguments = parse_arguments()
    # The library's own pool takes one thread for each processor this process may use.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.threads])
    cells = [Cell(*parts) for parts in itertools.product(
        arguments.direction, arguments.dtype, arguments.head_dim,
        [mask == "causal" for mask in arguments.mask], arguments.seqlen)]
    memory = {}
    if not arguments.no_memory:
        for cell in cells:
            memory[cell] = {method: memory_of(method, cell, arguments) for method in METHODS}
            print(f"{cell}: peak MiB " + ", ".join(
                f"{m} {b / 2**20:.1f}" if b is not None else f"{m} failed"
                for m, b in memory[cell].items()), flush=True)
    torch.set_num_threads(arguments.threads)
    library = libtessera.Library(arguments.library)
    failures = 0
    for cell in cells:
        rows = read_rows(arguments.output)
        key = tuple(str(x) for x in (cell.direction, cell.dtype, BATCH, HEADS, cell.d,
                                     int(cell.causal), cell.s, arguments.threads))
        row = {**rows.get(key, {}), **dict(zip(KEY, key)), **memory_columns(memory.get(cell, {}))}
        if arguments.missing and row.get("seconds"):
            continue
        if not arguments.no_time:
            measured = time_undisturbed(cell, arguments, library)
            failures += measured is None or not measured[1] <= TOLERANCE[cell.dtype]
            if measured is None:
                print(f"{cell}: no time recorded", flush=True)
            else:
                row |= time_columns(cell, arguments, *measured)
                report(cell, row)
        rows[key] = row
        write_rows(arguments.output, rows)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
