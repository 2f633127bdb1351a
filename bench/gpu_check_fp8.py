"""Correctness of 8 bits on a GPU: kernels beside their emulation, sums at any length, quantising beside a CPU's.

    gpu_check_fp8.py --command build/release/tessera --library build/release/libtessera.so [--seed N] [--cases N]

1. Problems, some to a `tessera check`, several at a time: every head dim, every feature alone and in pairs, ragged
   sizes, many tiles, random problems. Every third has its values in rows, the others in tiles. The judge is
   docs/correctness.md's for 8 bits.
2. Sums of 1k to 128k keys: constant values come back to 1e-3; the relative rms error of random values, which
   must not grow, against double on the dequantised tensors.
3. What `quantize` makes, byte for byte beside a CPU's.
4. One problem 1000 times, bit for bit, and inside a CUDA graph; the same with values in rows.

With --device cpu the same of the CPU's kernels, to try the script without a GPU. Needs PyTorch.
"""

import argparse
import concurrent.futures
import contextlib
import itertools
import json
import os
import random
import re
import subprocess
import sys

import torch

from quantized import Quantized, values
import libtessera

MASKS = ("", "causal", "causal align=tl", "window=60,33", "window=200,-1")
SCALES = ("tensor/tensor/tensor", "head/head/head", "token/block:64/channel", "token/block:32/block:384",
          "tensor/block:128/head", "head/tensor/channel", "token/block:384/block:768", "head/block:96/tensor",
          "tensor/block:256/block:1536")
FEATURES = {
    "mask": MASKS[1:],
    "scales": tuple(f"scales={s}" for s in SCALES[1:]),
    "score_shift": ("score_shift",),
    "v_shift": ("v_shift",),
    "sink": ("sink",),
    "softcap": ("softcap=20",),
    "o": ("o=f16",),
    "scale": ("scale=0.3",),
    "batch_invariant": ("batch_invariant",),
}
WITH_SOFTCAP = (64, 128, 256)  # head dims up to these


def line(b=2, h=4, hk=2, q=150, k=270, d=128, dv=None, words=()):
    words = [w for w in words if w]
    if not any(w.startswith("scales=") for w in words):
        words.append("scales=tensor/tensor/tensor")
    return f"fwd e4m3 b={b} h={h}/{hk} q={q} k={k} d={d}/{dv or d} v_tiles " + " ".join(words)


def of_integers(text):
    """The same problem with scores of i8 and values of 16 bits, which are in rows."""
    if " v_tiles" not in text:
        text = re.sub(r" d=\S+", r"\g<0> v_tiles", text)
    text = text.replace("fwd e4m3", "fwd i8").replace(" v_shift", "")
    text = re.sub(r"(scales=[^/]+/[^/]+)/\S+", r"\1/none", text)
    text = re.sub(r"/block:\d+/none", "/block:128/none", text)
    return text.replace(" o=f16", "").replace("v_tiles", "v=f16" if " o=f16" in text else "v=bf16")


def edges():
    for d in range(16, 257, 16):
        yield line(d=d, q=130, k=200, h=2, hk=2, words=("causal",) if d % 32 else ())
    for d, dv in ((192, 128), (64, 48), (48, 64), (256, 208), (176, 112)):
        yield line(d=d, dv=dv, q=77, k=333)
    for q, k in ((1, 1), (1, 500), (500, 1), (63, 64), (64, 65), (129, 127), (300, 1000), (1000, 300), (128, 128),
                 (257, 513), (5, 0)):
        for mask in (*MASKS, "window=0,0"):
            yield line(b=1, q=q, k=k, words=(mask,))
    for first, second in itertools.combinations_with_replacement(FEATURES, 2):
        for d in (64, 96, 128, 192, 256) if first == second else (64, 128, 256):
            if "softcap" in (first, second) and d not in WITH_SOFTCAP:
                continue
            for one in FEATURES[first]:
                other = FEATURES[second][len(one) % len(FEATURES[second])]
                yield line(d=d, words=(one,) if first == second else (one, other))
    for d, mask in itertools.product((64, 96, 128, 192, 256), MASKS):
        yield line(b=5, d=d, words=("packed=410,700", mask, "scales=token/block:64/channel"))


def large():
    """Many tiles for every multiprocessor, and more keys than one promotion: most of the time is the reference's."""
    for d, mask in itertools.product((64, 128, 256), MASKS[:4]):
        yield line(b=2, h=16, hk=4, q=400, k=600, d=d, words=(mask,))
        yield line(b=1, h=2, hk=1, q=200, k=2300, d=d, words=(mask, "scales=token/block:64/block:384"))
        # Without regard to the batch it is taken to be long, which some rows are for.
        for scales in SCALES[-3:]:
            yield line(b=1, h=2, hk=1, q=400, k=2300, d=d, words=(mask, f"scales={scales}", "batch_invariant"))
    for d, words in itertools.product((112, 128, 208, 256), (*MASKS, "score_shift", "v_shift", "sink", "o=f16")):
        yield line(b=2, q=385, k=401, d=d, words=(words, "batch_invariant"))
        yield line(b=5, d=d, words=("packed=410,700", words, "batch_invariant", "scales=token/block:384/channel"))


def random_lines(generator, count):
    for _ in range(count):
        hk = generator.choice((1, 2, 3))
        d = generator.choice((64, 80, 96, 128, 160, 192, 256))
        words = [generator.choice(FEATURES[name]) for name in FEATURES if generator.random() < 0.25]
        words = [w for w in words if not w.startswith("softcap") or d in WITH_SOFTCAP]
        b = generator.choice((1, 2, 5))
        q, k = generator.randint(1, 400), generator.randint(1, 900)
        if generator.random() < 0.3:
            words.append(f"packed={generator.randint(q, b * q)},{generator.randint(k, b * k)}")
        yield line(b=b, h=hk * generator.choice((1, 2, 4)), hk=hk, q=q, k=k, d=d, words=words)


def with_rows(lines):
    """Every third of them with v in rows, which become tiles on the way; of rows head_dim_v may be any."""
    for n, text in enumerate(lines):
        yield text.replace(" v_tiles", "") if n % 3 == 2 else text
    for d, dv in ((64, 16), (128, 64), (128, 32), (192, 64), (256, 128), (96, 48)):
        yield line(d=d, dv=dv, q=200, k=333, words=("causal",)).replace(" v_tiles", "")
        yield line(b=4, d=d, dv=dv, q=120, k=200, words=("packed=301,409",)).replace(" v_tiles", "")


TOGETHER = 12  # problems of one process: starting CUDA takes longer than most of them


def check_lines(command, device, lines, seed):
    """(right, what to print) of each."""
    run = subprocess.run([command, "check", *lines, "--device", device, "--seed", str(seed), "--json"],
                         capture_output=True, text=True, check=False)
    if run.returncode not in (0, 1):
        return [(False, f"one of {'; '.join(lines)}: {run.stderr.strip()}")] * len(lines)
    checked = []
    for text, result in zip(lines, json.loads(run.stdout)["results"], strict=True):
        outputs = ", ".join(f"{o['output']} {o['error']:.2e} / {o['bound']:.2e}" for o in result["outputs"])
        checked.append((result["pass"], f"{text} seed {seed}: {result['kernel']} {outputs} {result['damage']}"))
    return checked


def check_problems(arguments):
    generator = random.Random(arguments.seed)
    lines = [*with_rows([*edges(), *random_lines(generator, arguments.cases), *large()])]
    both = {"e4m3": lines, "i8": [of_integers(text) for text in lines]}
    lines = list(dict.fromkeys(text for scores in arguments.scores for text in both[scores]))
    groups = [lines[n:n + TOGETHER] for n in range(0, len(lines), TOGETHER)]
    wrong = done = 0
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        results = pool.map(lambda group: check_lines(arguments.command, arguments.device, group,
                                                     arguments.seed), groups)
        for result in results:
            for right, text in result:
                wrong += not right
                if not right:
                    print(f"WRONG: {text}", flush=True)
            done += len(result)
            if done // 100 > (done - len(result)) // 100:
                print(f"{done} of {len(lines)}", flush=True)
    print(f"problems: {len(lines) - wrong} of {len(lines)} right, seed {arguments.seed}", flush=True)
    return wrong == 0


def relative_error(library, where, keys, mean, scalings, words=""):
    """(rms of o's error over rms of o, worst |o - 1| where the values are constant and all scores equal)."""
    b, h, sq, d = 1, 2, 128, 128
    draw = lambda *shape: torch.randn(*shape, device=where).bfloat16()
    eight_bit_values = not scalings.endswith("/none")
    problem = f"fwd {'e4m3' if eight_bit_values else 'i8'} b={b} h={h} q={sq} k={keys} d={d} scales={scalings} {words}"
    tiled, rows = (" v_tiles", "") if eight_bit_values else (" v=bf16", " v=bf16")
    kinds = scalings.split("/")

    def attend(q, k, v):
        in_tiles = Quantized(library, problem + tiled, q, k, v)
        in_rows = Quantized(library, problem + rows, q, k, v)
        for made in (in_tiles, in_rows):
            made.run("cpu" if where == "cpu" else "gpu", stream_of(where))
        o = torch.empty(b, sq, h, d, dtype=torch.bfloat16, device=where)
        in_tiles.attend(library, "cpu" if where == "cpu" else "gpu", o, stream=stream_of(where))[1]()
        synchronize(where)
        names = ("q_scale", "k_scale", "v_scale")
        exact = [values(x, in_rows.scales.get(name), kind, h)
                 for x, name, kind in zip((in_rows.q, in_rows.k, in_rows.v), names, kinds)]
        return o, exact

    o, (Q, K, V) = attend(draw(b, sq, h, d), draw(b, keys, h, d), draw(b, keys, h, d) + mean)
    weights = torch.softmax(torch.einsum("bqhd,bkhd->bhqk", Q, K) / d**0.5, -1)
    exact = torch.einsum("bhqk,bkhd->bqhd", weights, V)
    error = ((o.double() - exact).square().mean() / exact.square().mean()).sqrt().item()
    zeros = torch.zeros(b, sq, h, d, dtype=torch.bfloat16, device=where)
    ones = torch.ones(b, keys, h, d, dtype=torch.bfloat16, device=where)
    o, _ = attend(zeros, draw(b, keys, h, d), ones)
    return error, (o.double() - 1).abs().max().item()


def check_lengths(library, arguments):
    """Errors against length, as a table."""
    lengths = [1 << n for n in range(10, 18) if 1 << n <= arguments.longest]
    right = True
    for scalings in ("tensor/tensor/tensor", "token/block:64/channel", "token/block:128/none"):
        for mean in (0.0, 0.5):
            errors = [relative_error(library, arguments.where, n, mean, scalings) for n in lengths]
            flat = max(e for e, _ in errors) <= 1.5 * errors[0][0] + 1e-3
            constant = max(c for _, c in errors)
            right = right and flat and constant <= 1e-3
            print(f"{scalings}, values of mean {mean}: " +
                  ", ".join(f"{n}: {100 * e:.2f} %" for n, (e, _) in zip(lengths, errors)) +
                  f"; constant values off by {constant:.1e}{'' if flat and constant <= 1e-3 else '  WRONG'}",
                  flush=True)
    return right


def check_quantize(library, arguments):
    """The device's bytes and scales are the CPU's; score_shift, whose order of sums is free, nearly."""
    generator, right, count = random.Random(arguments.seed), True, 0
    for d, scalings, dtype in itertools.product((64, 96, 128, 192, 256), SCALES,
                                                (torch.bfloat16, torch.float16, torch.float32)):
        b, hk, sq, sk = 2, 2, generator.randint(1, 300), generator.randint(1, 500)
        text = f"fwd e4m3 b={b} h=4/{hk} q={sq} k={sk} d={d} scales={scalings} v_tiles score_shift"
        q, k, v = ((torch.randn(b, s, h, d) * 3).to(dtype) for s, h in ((sq, 4), (sk, hk), (sk, hk)))
        signs = torch.randint(0, 2, (d,)) * 2.0 - 1.0
        mean = k.float().mean(1)
        hadamard = max(n for n in (0, 32, 64, 128, 256) if n == 0 or d % n == 0)
        made = []
        for where in ("cpu", arguments.where):
            move = lambda x: x.to(where)
            one = Quantized(library, text, move(q), move(k), move(v), hadamard, move(signs), move(mean))
            if made:  # PyTorch's GPU divides by a constant with another rounding than its CPU
                for name, scale in made[0].scales.items():
                    one.scales[name].copy_(scale)
            one.run("cpu" if where == "cpu" else "gpu", stream_of(where))
            synchronize(where)
            made.append(one)
        same = all(torch.equal(getattr(made[0], name).view(torch.uint8), getattr(made[1], name).view(torch.uint8).cpu())
                   for name in "qkv")
        for name, scale in made[0].scales.items():
            other = made[1].scales[name].cpu()
            same &= torch.allclose(scale, other, 1e-5, 1e-4) if name == "score_shift" else torch.equal(scale, other)
        count += 1
        if not same:
            right = False
            print(f"WRONG: quantize of {dtype}, hadamard {hadamard}: {text}", flush=True)
    print(f"quantize: {count} shapes{' as on the CPU' if right else ''}", flush=True)
    return right


def check_bits(library, arguments):
    """1000 runs of one problem, and a CUDA graph of it, with values in tiles and in rows."""
    where = arguments.where
    q, k, v = (torch.randn(2, 1500, h, 128, device=where).bfloat16() for h in (8, 2, 2))
    name = "cpu" if where == "cpu" else "gpu"
    o = torch.empty(2, 1500, 8, 128, dtype=torch.bfloat16, device=where)
    lse = torch.empty(2, 8, 1500, device=where)
    different, results = 0, []
    for layout in (" v_tiles", ""):
        line = f"fwd e4m3 b=2 h=8/2 q=1500 k=1500 d=128 causal{layout} scales=token/block:64/channel"
        made = Quantized(library, line, q, k, v)
        made.run(name, stream_of(where))
        _, attend = made.attend(library, name, o, lse, stream_of(where))
        attend()
        synchronize(where)
        first = o.clone(), lse.clone()
        results.append(first)
        runs = 1000 if where == "cuda" else 3
        others = 0
        for _ in range(runs):
            o.fill_(float("nan"))
            attend()
            others += not (torch.equal(o, first[0]) and torch.equal(lse, first[1]))
        print(f"{'tiles' if layout else 'rows'}: {runs} runs: {others} with other bits", flush=True)
        different += others
        if where == "cuda":
            stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
            _, attend = made.attend(library, name, o, lse, stream.cuda_stream)
            with torch.cuda.graph(graph, stream=stream):
                attend()
            o.fill_(float("nan"))
            graph.replay()
            torch.cuda.synchronize()
            same = torch.equal(o, first[0])
            print(f"a CUDA graph: {'the same bits' if same else 'WRONG'}", flush=True)
            different += not same
    if not all(map(torch.equal, *results)):
        print("WRONG: rows and tiles of the same values have other bits", flush=True)
        different += 1
    return different == 0


def stream_of(where):
    return torch.cuda.current_stream().cuda_stream if where == "cuda" else None


def synchronize(where):
    if where == "cuda":
        torch.cuda.synchronize()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--command", required=True, help="the program `tessera`")
    parser.add_argument("--library", required=True)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 31))
    parser.add_argument("--cases", type=int, default=300, help="random problems")
    parser.add_argument("--jobs", type=int, default=min(8, os.cpu_count() or 1), help="checks at a time")
    parser.add_argument("--longest", type=int, default=131072, help="keys of the longest sum")
    parser.add_argument("--device", default="gpu", choices=("gpu", "cpu"))
    parser.add_argument("--only", nargs="+", choices=("problems", "lengths", "quantize", "bits"))
    parser.add_argument("--scores", nargs="+", choices=("e4m3", "i8"), default=("e4m3", "i8"),
                        help="types of q and k of the problems")
    arguments = parser.parse_args()
    arguments.where = "cuda" if arguments.device == "gpu" else "cpu"
    torch.manual_seed(arguments.seed)
    library = libtessera.Library(arguments.library)
    parts = {"problems": lambda: check_problems(arguments), "lengths": lambda: check_lengths(library, arguments),
             "quantize": lambda: check_quantize(library, arguments), "bits": lambda: check_bits(library, arguments)}
    with torch.inference_mode(), contextlib.suppress(BrokenPipeError):
        results = [part() for name, part in parts.items() if name in (arguments.only or parts)]
    print("all right" if all(results) else "WRONG")
    sys.exit(not all(results))


if __name__ == "__main__":
    main()
