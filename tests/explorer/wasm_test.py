"""The explorer's engine as WebAssembly, in Node, says what the same sources say natively, and `tessera plan`
prints the same text: 200 fresh random problems and lines that are wrong.

    wasm_test.py [SEED]

Builds the engine with the preset wasm, beside the build that it is a test of. Without clang-19 for WebAssembly,
or Node, it says what is missing and is skipped.
"""

import json
import math
import os
import pathlib
import random
import re
import resource
import shutil
import subprocess
import sys

SOURCE = pathlib.Path(os.environ["TESSERA_SOURCE"])
BUILD = pathlib.Path(os.environ["TESSERA_BUILD"]) / "wasm"
NATIVE = os.environ["TESSERA_EXPLORER"]
COMMAND = os.environ["TESSERA_COMMAND"]
CMAKE = os.environ["CMAKE"]
SKIPPED = 77
PROBLEMS = 200
MOST_SECONDS = 60  # of a core, for the build
MOST_BYTES = 1 << 20  # of the module, as servers send it
# Of a CPU, of GPUs with and without rows.
DEVICES = ["h200", "h200", "a100", "rtx-4090", "zen4-16", "zen4-16", "haswell-4", "graviton3-64"]
# C libraries round exp2 and log2 differently.
ROUNDED = {"softmax", "elements"}


def missing():
    """What this machine lacks: Debian's packages."""
    found = {
        "nodejs": shutil.which("node"),
        "clang-19": shutil.which("clang++-19"),
        "lld-19": pathlib.Path("/usr/lib/llvm-19/bin/wasm-ld").exists(),
        "wasi-libc": pathlib.Path("/usr/lib/wasm32-wasi/crt1-reactor.o").exists(),
        "libc++-19-dev-wasm32": pathlib.Path("/usr/lib/wasm32-wasi/libc++.a").exists(),
        "libc++abi-19-dev-wasm32": pathlib.Path("/usr/lib/wasm32-wasi/libc++abi.a").exists(),
        "libclang-rt-19-dev-wasm32": any(pathlib.Path("/usr/lib/llvm-19/lib/clang").glob("19*/lib/wasi/*builtins*")),
    }
    return [package for package, there in found.items() if not there]


def processor_seconds():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def build():
    begin = processor_seconds()
    for command in ([CMAKE, "--preset", "wasm", "-B", BUILD], [CMAKE, "--build", BUILD]):
        done = subprocess.run(command, cwd=SOURCE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode != 0:
            sys.exit(f"{done.stdout}\n{command} failed")
    return BUILD / "explorer" / "engine.wasm", processor_seconds() - begin


def compressed(module):
    return len(subprocess.run(["gzip", "-9", "-c", module], stdout=subprocess.PIPE, check=True).stdout)


def answers(command, requests):
    done = subprocess.run([str(word) for word in command], input="".join(line + "\n" for line in requests),
                          stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(f"{command}: exit status {done.returncode}")
    lines = done.stdout.splitlines()
    if len(lines) != len(requests):
        sys.exit(f"{command}: {len(lines)} answers to {len(requests)} requests")
    return lines


def spoiled(rng, line):
    """The line with a character more, less or another."""
    at = rng.randrange(len(line))
    return line[:at] + rng.choice(["", "x", "-", "9", "=", " ", "/", "1e99", "+"]) + line[at + rng.randrange(2):]


def number_list(rng, count):
    return ",".join("-inf" if rng.random() < 0.1 else f"{rng.gauss(0, 10):.4f}" for _ in range(count))


def below(rng, problem, letter):
    """A number of a sequence or a head; one in nine is one too many."""
    count = int(re.search(rf" {letter}=(\d+)", problem)[1])
    return count if count == 0 or rng.randrange(9) == 0 else rng.randrange(count)


def requests_of(rng, problem):
    device = rng.choice(DEVICES)
    place = f"batch={below(rng, problem, 'b')}\thead={below(rng, problem, 'h')}"
    count = rng.randrange(1, 40)
    yield f"parse\t{problem}"
    yield f"parse\t{spoiled(rng, problem)}"
    yield f"plan\t{problem}\t{device}"
    yield f"plan\t{spoiled(rng, problem)}\t{device}"
    yield f"tiles\t{problem}\t{device}\t{place}"
    yield f"order\t{problem}\t{device}"
    yield f"order\t{problem}\t{device}\tseqlens={rng.randrange(9)},{rng.randrange(9)}"
    yield f"elements\t{problem}\t\t{place}\tseed={rng.randrange(1 << 40)}"
    yield f"bytes\t{problem}\t{device}\tseqlens={rng.randrange(1, 1 << 20)},{rng.randrange(1, 1 << 10)}"
    yield (f"softmax\t\t\tscores={number_list(rng, count)}\tblock={rng.randrange(1, 9)}"
           f"\tslack={rng.randrange(20)}\tvalues=" + ",".join(f"{rng.gauss(0, 1):.3f}" for _ in range(count)))


def close(a, b):
    """Equal but for the last bits of numbers."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return math.isclose(a, b, rel_tol=2e-6, abs_tol=1e-6)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(close, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(close(a[key], b[key]) for key in a)
    return a == b


def equal(request, native, wasm):
    if native == wasm:
        return True
    return request.split("\t")[0] in ROUNDED and close(json.loads(native), json.loads(wasm))


def printed(request):
    """What the command prints to a request for a plan."""
    _, problem, device = request.split("\t")[:3]
    done = subprocess.run([COMMAND, "plan", "--device", device, "--", problem], stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True)
    return done.stdout or done.stderr


def check_plans(requests, replies):
    """Texts of plans, and sentences of the parser, are the command's. How many there were of each."""
    counts = {"text": 0, "error": 0}
    for request, reply in zip(requests, map(json.loads, replies)):
        if not request.startswith("plan\t"):
            continue
        kind = "error" if "error" in reply else "text"
        expected = f"tessera: {reply['error']['text']}\n" if kind == "error" else reply["text"]
        if printed(request) != expected:
            sys.exit(f"{request!r}:\n`tessera plan` prints\n{printed(request)}\nthe engine\n{expected}")
        counts[kind] += 1
    return counts


def main():
    if missing():
        print(f"skipped; these packages are missing: {' '.join(missing())}")
        sys.exit(SKIPPED)
    seed = int(sys.argv[1]) if len(sys.argv) > 1 else random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    module, seconds = build()
    size = compressed(module)
    print(f"{module.stat().st_size} bytes, {size} compressed, built in {seconds:.1f} CPU seconds")
    if size > MOST_BYTES or seconds > MOST_SECONDS:
        sys.exit(f"at most {MOST_BYTES} bytes and {MOST_SECONDS} CPU seconds were allowed")

    rng = random.Random(seed)
    problems = subprocess.run([NATIVE, "problems", str(seed), str(PROBLEMS)], stdout=subprocess.PIPE, text=True,
                              check=True).stdout.splitlines()
    # Where 32 bits of a WebAssembly address would not do.
    problems.append("bwd bf16 b=64 h=64 q=65536 k=65536 d=128")
    requests = ["devices"] + [request for problem in problems for request in requests_of(rng, problem)]
    natives = answers([NATIVE], requests)
    wasms = answers(["node", SOURCE / "tests/explorer/answers.mjs", SOURCE / "explorer/page/engine.js", module],
                    requests)
    wrong = [i for i, request in enumerate(requests) if not equal(request, natives[i], wasms[i])]
    for i in wrong[:3]:
        print(f"{requests[i]!r}:\nnative {natives[i][:2000]}\nwasm   {wasms[i][:2000]}")
    if wrong:
        sys.exit(f"{len(wrong)} of {len(requests)} answers differ")
    counts = check_plans(requests, wasms)
    answered = {}
    for request, reply in zip(requests, wasms):
        answered.setdefault(request.split("\t")[0], []).append("error" not in json.loads(reply))
    print({command: f"{sum(good)} of {len(good)}" for command, good in answered.items()}, counts)
    if min(sum(good) for good in answered.values()) == 0 or min(counts.values()) < 20:
        sys.exit("some command has answered nothing")


if __name__ == "__main__":
    main()
