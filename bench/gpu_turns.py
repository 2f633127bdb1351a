"""Two builds of the library in turns on one GPU: is one faster, and by how much?

    gpu_turns.py --libraries OLD/libtessera.so NEW/libtessera.so [--names OLD NEW] --output FILE
                 [--bindings OLD/libtessera.py NEW/libtessera.py]

Every problem is timed by each library in turn, --rounds times for each of --placements placements of the
tensors in memory, in an order drawn anew each round; printed and written are medians and their ratio to the
first library's. Random normal inputs; whether both give the same bits is a column. The grid is
gpu_forward.py's: 16,384 tokens, hidden size 2048. Needs PyTorch.
"""

import argparse
import datetime
import importlib.util
import pathlib
import random
import statistics

import torch

from gpu_forward import DTYPES, HIDDEN, TOKENS, Arena, libtessera, query, time_calls, workspace_of, write

COLUMNS = ["date", "old", "new", "driver", "sm_mhz", "pass", "words", "dtype", "d", "causal", "s", "b", "h", "old_tflops",
           "new_tflops", "ratio", "same_bits"]


def load(path, binding):
    """The library, through the file of its own C ABI."""
    if binding is None:
        return libtessera.Library(path)
    spec = importlib.util.spec_from_file_location(binding.parent.name, binding)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Library(path)


def prepare(library, words, backward, inputs, results):
    """A function that enqueues the pass; o and softmax_lse of a backward are the same library's."""
    q, k, v, dout = inputs
    o, lse, dq, dk, dv = results
    stream = torch.cuda.current_stream().cuda_stream
    plan = library.plan("fwd " + words, "gpu")
    tensors = plan.tensors(q=q, k=k, v=v, o=o, softmax_lse=lse)
    memory = workspace_of(plan)
    forward = lambda: plan.enqueue(tensors, stream, memory)
    if not backward:
        return forward
    forward()
    second = library.plan("bwd " + words, "gpu")
    workspace = torch.empty(second.workspace_bytes, dtype=torch.uint8, device="cuda")
    gradients = second.tensors(q=q, k=k, v=v, o=o, softmax_lse=lse, dout=dout, dq=dq, dk=dk, dv=dv)
    return lambda: second.enqueue(gradients, stream, workspace)


def measure(libraries, arena, dtype, backward, d, causal, s, extra, rounds, placements):
    b, h = TOKENS // s, HIDDEN // d
    words = f"{dtype} b={b} h={h} q={s} k={s} d={d}" + (" causal" if causal else "") + " " + extra
    flops = (10 if backward else 4) * b * h * s * s * d / (2 if causal else 1)
    calls = max(3, min(60, int(0.01 / (flops / 5e14))))
    times, same = [[] for _ in libraries], True
    for _ in range(placements):
        arena.clear()
        inputs = [arena.place((b, s, h, d), DTYPES[dtype]) for _ in range(4)]
        for x in inputs:
            x.copy_(torch.randn(b, s, h, d, device="cuda"))
        results = [arena.place((b, s, h, d), DTYPES[dtype]) for _ in range(4)]
        results.insert(1, torch.empty(b, h, s, device="cuda"))
        functions = [prepare(library, words, backward, inputs, results) for library in libraries]
        found = []
        for function in functions:
            for x in results[2 if backward else 0:]:
                x.fill_(float("nan"))
            function()
            # dQ is summed in any order: its bits differ from run to run.
            found.append([x.clone() for x in (results[3:] if backward else results[:2])])
        same &= all(torch.equal(x, y) for x, y in zip(found[0], found[-1]))
        for _ in range(rounds):
            for i in random.sample(range(len(functions)), len(functions)):
                times[i].append(time_calls(functions[i], calls))
    return b, h, [flops / statistics.median(t) * 1e-12 for t in times], same


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--libraries", nargs=2, required=True, metavar="FILE")
    parser.add_argument("--bindings", nargs=2, type=pathlib.Path, default=(None, None), metavar="FILE",
                        help="demo/libtessera.py of each, where their C ABIs differ")
    parser.add_argument("--names", nargs=2, default=("old", "new"), help="of the builds: commits")
    parser.add_argument("--output", type=pathlib.Path, required=True)
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bf16")
    parser.add_argument("--head-dim", nargs="+", type=int, default=(64, 128, 256))
    parser.add_argument("--seqlen", nargs="+", type=int, default=[512 << i for i in range(6)])
    parser.add_argument("--words", default="", help='more of the problem, as "softcap=30 dropout=0.1"')
    parser.add_argument("--passes", nargs="+", choices=("fwd", "bwd"), default=("fwd", "bwd"))
    parser.add_argument("--rounds", type=int, default=5, help="of each placement")
    parser.add_argument("--placements", type=int, default=2, help="of the tensors in memory")
    arguments = parser.parse_args()
    libraries = [load(path, binding) for path, binding in zip(arguments.libraries, arguments.bindings)]
    arena, rows = Arena(8 << 30), []
    for name in arguments.passes:
        for d in arguments.head_dim:
            for causal in (False, True):
                for s in arguments.seqlen:
                    b, h, rates, same = measure(libraries, arena, arguments.dtype, name == "bwd", d, causal, s,
                                                arguments.words, arguments.rounds, arguments.placements)
                    rows.append(dict(zip(COLUMNS, (
                        datetime.date.today().isoformat(), *arguments.names, query("driver_version"),
                        query("clocks.sm"), name, arguments.words, arguments.dtype, d, int(causal), s, b, h,
                        *(f"{rate:.1f}" for rate in rates), f"{rates[1] / rates[0]:.4f}", int(same)))))
                    print(f"{name} {arguments.dtype} {arguments.words} d={d} {'causal' if causal else 'full'} s={s}: "
                          f"{rates[0]:.0f} -> {rates[1]:.0f} TFLOP/s ({rates[1] / rates[0]:.4f})"
                          f"{'' if same else ', other bits'}", flush=True)
        ratios = [float(r["ratio"]) for r in rows if r["pass"] == name]
        print(f"{name}: {statistics.geometric_mean(ratios):.4f} in the geometric mean, {min(ratios):.4f} at least",
              flush=True)
    write(arguments.output, COLUMNS, rows)


if __name__ == "__main__":
    main()
