"""Serves a GPT of train_gpt.py to many at once: a paged cache, beside PyTorch's SDPA over a static one.

    serve.py --train-steps 30                             trains a tiny model first; a minute on a CPU
    train_gpt.py --save gpt.pt                            a model to keep
    serve.py --model gpt.pt --plot serve.svg
    serve.py --model gpt.pt --device cuda --dtype bfloat16 --batch 64 --chunk 2048 --rate 200 --requests 2000

Requests arrive at random times. Prompts are pieces of the standard library's source; their lengths and those of the
answers are log-normal. Every step takes one token of each request that is answering, and fills up to --chunk tokens
with pieces of prompts; all of them are one packed batch. A request is admitted when there are pages for its prompt.
When an answer finds no page, the request that was admitted last gives its own back and is computed again later. A
request that can never fit is refused. On a GPU a step without prompts is a captured CUDA graph, whose padded rows have
length -1.

The same requests are served twice, at the same times, by the same loop: with tessera.KVCache, and with a row of the
whole context for each request and scaled_dot_product_attention. Exit code 1: greedy answers differ by more than a tie.
"""

import argparse
import dataclasses
import functools
import importlib.util
import math
import pathlib
import random
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence

import torch

import tessera

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import train_gpt
from engines import Engine, Paged, Piece, Request, Running, Static

# Greedy answers may part where the logits of the two best bytes are as close as this; rounding decides there.
NEAR_TIE = {"float32": 1e-3, "bfloat16": 0.25}


# ---- requests -------------------------------------------------------------------------------------------------------
def draw_requests(options: argparse.Namespace, context: int) -> list[Request]:
    draw = random.Random(options.seed)
    text = train_gpt.standard_library()
    text = text[len(text) * 19 // 20 :]  # not trained on

    def length(median: int) -> int:
        return max(1, round(median * math.exp(draw.gauss(0, options.sigma))))

    requests, arrival = [], 0.0
    for _ in range(options.requests):
        arrival += draw.expovariate(options.rate)
        prompt_length = min(length(options.prompt), context - 1)
        new_tokens = min(length(options.answer), context - prompt_length)
        start = draw.randrange(len(text) - context)
        uniforms = [draw.random() for _ in range(new_tokens)]
        requests.append(Request(arrival, list(text[start : start + prompt_length]), new_tokens, uniforms))
    return requests


# ---- the loop -------------------------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Step:
    began: float  # seconds
    seconds: float
    requests: int  # that were computed
    tokens: int  # theirs


@dataclasses.dataclass
class Served:
    answers: list[Running]  # in the order of requests
    refused: list[str]
    steps: list[Step]
    seconds: float
    cpu_seconds: float  # of this process, which others on the machine do not add to
    cache_bytes: int


def schedule(engine: Engine, waiting: deque[Running], running: list[Running], chunk: int) -> list[Piece]:
    """The pieces of the next step. Those who are answering come first, then prompts in the order of admission."""
    preempted = False
    i = 0
    while i < len(running):
        if engine.reserve(running[i]):
            i += 1
            continue
        last = running.pop()  # possibly the one that found no room
        engine.release(last)
        last.cached, last.preemptions, preempted = 0, last.preemptions + 1, True
        waiting.appendleft(last)
    while waiting and not preempted and len(running) < engine.most and engine.reserve(waiting[0]):
        running.append(waiting.popleft())
    pieces = [Piece(x, 1) for x in running if len(x.tokens) - x.cached == 1]
    budget = chunk - len(pieces)
    for x in running:
        count = min(len(x.tokens) - x.cached, budget)
        if len(x.tokens) - x.cached > 1 and count > 0:
            pieces.append(Piece(x, count))
            budget -= count
    return pieces


def serve(
    engine: Engine, requests: Sequence[Request], chunk: int, report: Callable[[str], None] = lambda line: None
) -> Served:
    """Serves all requests at the times when they arrive; report takes a line of progress every other second."""
    everyone = [Running(request, list(request.prompt)) for request in requests]
    coming, waiting, running = deque(everyone), deque[Running](), list[Running]()
    refused, steps, done, tokens, reported = list[str](), list[Step](), 0, 0, 0.0
    started, cpu_started = time.perf_counter(), time.process_time()
    while coming or waiting or running:
        now = time.perf_counter() - started
        while coming and coming[0].request.arrival <= now:
            x = coming.popleft()
            reason = engine.refusal(x.request)
            if reason is None:
                waiting.append(x)
            else:
                refused.append(f"request {everyone.index(x)}: {reason}")
        if not waiting and not running:
            if coming:
                time.sleep(max(0.0, coming[0].request.arrival - now))
            continue
        pieces = schedule(engine, waiting, running, chunk)
        began = time.perf_counter() - started
        results = engine.step(pieces)
        now = time.perf_counter() - started
        for piece, (token, margin) in zip(pieces, results, strict=True):
            x = piece.running
            x.cached += piece.count
            if x.cached < len(x.tokens):
                continue  # within its prompt
            x.tokens.append(token)
            x.times.append(now)
            x.margins.append(margin)
            tokens += 1
            if len(x.times) == x.request.new_tokens:
                engine.release(x)
                running.remove(x)
                done += 1
        steps.append(Step(began, now - began, len(pieces), sum(piece.count for piece in pieces)))
        if now > reported + 2:
            reported = now
            report(
                f"{now:6.1f} s  {done} of {len(requests)} done, {len(running)} at work, {len(waiting)} waiting, "
                f"{tokens / now:,.0f} tokens/s"
            )
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
    return Served(everyone, refused, steps, seconds, cpu_seconds, engine.cache_bytes())


# ---- results --------------------------------------------------------------------------------------------------------
def middle_and_p95(values: Sequence[float]) -> str:
    ordered = sorted(values)
    if not ordered:
        return "-"
    return f"{1e3 * statistics.median(ordered):,.1f} / {1e3 * ordered[math.ceil(0.95 * len(ordered)) - 1]:,.1f}"


def table(runs: dict[str, Served]) -> str:
    rows: list[tuple[str, Callable[[Served], str]]] = [
        ("tokens/s of answers", lambda run: f"{sum(len(x.times) for x in run.answers) / run.seconds:,.0f}"),
        ("time to first token, ms", lambda run: middle_and_p95(
            [x.times[0] - x.request.arrival for x in run.answers if x.times])),
        ("time per output token, ms", lambda run: middle_and_p95(
            [(x.times[-1] - x.times[0]) / (len(x.times) - 1) for x in run.answers if len(x.times) > 1])),
        ("time per step, ms", lambda run: middle_and_p95([step.seconds for step in run.steps])),
        ("time of the CPU, s", lambda run: f"{run.cpu_seconds:,.1f}"),
        ("requests a step, mean", lambda run: f"{statistics.mean([s.requests for s in run.steps] or [0]):.1f}"),
        ("preemptions", lambda run: str(sum(x.preemptions for x in run.answers))),
        ("cache, MB", lambda run: f"{run.cache_bytes / 1e6:,.1f}"),
    ]  # fmt: skip
    lines = [f"{'median / p95':28}" + "".join(f"{name:>24}" for name in runs)]
    lines += [f"{name:28}" + "".join(f"{value(run):>24}" for run in runs.values()) for name, value in rows]
    return "\n".join(lines)


def compare(one: Served, other: Served, near: float) -> tuple[str, bool]:
    """What is to be said of the greedy answers of two runs, and whether they agree but for near ties."""
    pairs = [(a, b) for a, b in zip(one.answers, other.answers, strict=True) if a.times and b.times]
    ties, wrong = [], 0
    for a, b in pairs:
        at = next((i for i, (x, y) in enumerate(zip(a.answer, b.answer, strict=True)) if x != y), None)
        if at is not None:
            margin = min(a.margins[at], b.margins[at])
            ties += [margin] if margin <= near else []
            wrong += margin > near
    text = f"greedy answers: {len(pairs) - len(ties) - wrong} of {len(pairs)} are equal"
    if ties:
        text += f", {len(ties)} part at a tie of logits (within {max(ties):.1g})"
    return text + (f", {wrong} DIFFER" if wrong else ""), wrong == 0


def draw(runs: dict[str, Served], title: str, path: pathlib.Path) -> None:
    """Requests a step and time per step over time: means, and for the time the range within a bin."""
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "bench"))
    from plot import INK, STYLE, bare, plt
    from plot_gpu import save

    plt.rcParams.update(STYLE)
    figure, axes = plt.subplots(2, 1, figsize=(9.2, 5.4), sharex=True)
    width = max(run.seconds for run in runs.values()) / 160
    for (name, run), colour in zip(runs.items(), ("#0969da", "#57606a"), strict=False):
        bins: dict[int, list[Step]] = {}
        for step in run.steps:
            bins.setdefault(int(step.began / width), []).append(step)
        at = [(number + 0.5) * width for number in bins]
        axes[0].plot(at, [statistics.mean(s.requests for s in b) for b in bins.values()], color=colour, label=name)
        times = [[1e3 * s.seconds for s in b] for b in bins.values()]
        axes[1].plot(at, [statistics.median(b) for b in times], color=colour)
        axes[1].fill_between(at, [min(b) for b in times], [max(b) for b in times], color=colour, alpha=0.2, linewidth=0)
    for axis, text in zip(axes, ("requests a step", "time per step, ms: median and range"), strict=True):
        axis.set_title(text, fontsize=10.5, color=INK, loc="left")
        axis.set_ylim(0)
        bare(axis)
    axes[1].set_xlabel("seconds since the first request", fontsize=10, color=INK)
    figure.suptitle(title, fontsize=12.5, x=0.012, ha="left", y=0.985)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="upper left", ncols=2, frameon=False, fontsize=10,
                  bbox_to_anchor=(0.003, 0.945), borderaxespad=0.0)  # fmt: skip
    figure.tight_layout(rect=(0, 0, 1, 0.92))
    save(figure, path)


# ---- command line ---------------------------------------------------------------------------------------------------
def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = functools.partial(parser.add_argument, metavar="N", type=int)
    parser.add_argument("--model", metavar="FILE", type=pathlib.Path, help="what train_gpt.py --save wrote")
    add("--train-steps", help="train a tiny model first; kept in --model, if that is given")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    parser.add_argument("--dtype", choices=tuple(NEAR_TIE), help="default: float32 on a CPU, bfloat16 on a GPU")
    add("--requests", default=60, help="default: %(default)s")
    parser.add_argument("--rate", metavar="R", type=float, default=8.0, help="arrivals a second; default: %(default)s")
    add("--prompt", default=96, help="median bytes of a prompt; default: %(default)s")
    add("--answer", default=48, help="median bytes of an answer; default: %(default)s")
    parser.add_argument("--sigma", metavar="S", type=float, default=0.8, help="of log-normal lengths; default: 0.8")
    add("--batch", default=16, help="requests at once, at most; default: %(default)s")
    add("--chunk", default=256, help="tokens a step, at most; default: %(default)s")
    add("--page-size", default=16, help="tokens a page; default: %(default)s")
    add("--pages", help="default: half of what --batch requests of the whole context need")
    parser.add_argument(
        "--temperature", metavar="T", type=float, default=0.0, help="of sampling; 0 takes the best; default: 0"
    )
    add("--threads", help="of PyTorch and of Tessera on a CPU; default: all")
    add("--seed", help="of requests and training; default: drawn, and printed")
    parser.add_argument("--plot", metavar="FILE", type=pathlib.Path, help="draw both runs (needs matplotlib)")
    options = parser.parse_args(argv)
    for name in ("requests", "prompt", "answer", "batch", "page_size", "rate", "pages", "train_steps", "threads"):
        value = getattr(options, name)
        if value is not None and value <= 0:
            parser.error(f"--{name.replace('_', '-')} {value} is not positive")
    if options.chunk <= options.batch:
        parser.error(f"--chunk {options.chunk} must be more than --batch {options.batch}, or prompts may wait for ever")
    if min(options.temperature, options.sigma) < 0:
        parser.error("--temperature and --sigma must not be negative")
    options.dtype = options.dtype or ("float32" if options.device == "cpu" else "bfloat16")
    if options.device == "cuda":
        if options.dtype == "float32":
            parser.error("--dtype float32 needs --device cpu: Tessera computes in bfloat16 on a GPU")
        try:
            tessera.gpu(required=True)
        except RuntimeError as error:
            parser.error(f"--device cuda: {error}")
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install matplotlib")
    if options.train_steps is None and (options.model is None or not options.model.exists()):
        name = options.model or "gpt.pt"
        missing = f"--model {name} does not exist" if options.model else "--model is missing"
        parser.error(f"{missing}: make one by train_gpt.py --save {name}, or give --train-steps 30")
    if options.seed is None:
        options.seed = random.SystemRandom().randrange(2**31)
    return options


def model_of(options: argparse.Namespace) -> train_gpt.GPT:
    if options.train_steps is None:
        return train_gpt.load(options.model)
    with tempfile.TemporaryDirectory() as folder:
        path = options.model or pathlib.Path(folder) / "gpt.pt"
        arguments = {
            "steps": options.train_steps, "context": 384, "batch": 4, "kv-heads": 2, "seed": options.seed,
            "device": options.device,
        }  # fmt: skip
        train_gpt.main([*(f"--{name}={value}" for name, value in arguments.items()), f"--save={path}"])
        return train_gpt.load(path)


@torch.inference_mode()
def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    if options.threads:
        torch.set_num_threads(options.threads)
        tessera.set_num_threads(options.threads)
    with torch.inference_mode(False):
        model = model_of(options)
    context = len(model.cos)
    options.pages = options.pages or options.batch * math.ceil(context / options.page_size) // 2
    requests = draw_requests(options, context)
    shape = f"{len(model.blocks)} layers, {sum(p.numel() for p in model.parameters()):,} parameters, context {context}"
    where = "GPU" if options.device == "cuda" else f"CPU, threads: {tessera.get_num_threads()}"
    load = f"{len(requests)} requests, {options.rate:g} a second"
    print(f"serve: {shape}, {where}, {options.dtype}; {load}, seed {options.seed}", flush=True)
    runs = {}
    for kind in (Paged, Static):
        engine = kind(model, options)
        engine.capture()
        serve(engine, [dataclasses.replace(requests[0], arrival=0.0)], options.chunk)  # warms up
        print(f"{kind.label}:", flush=True)
        runs[kind.label] = serve(engine, requests, options.chunk, functools.partial(print, flush=True))
        for line in runs[kind.label].refused:
            print(f"refused: {line}")
    print(table(runs))
    agree = True
    if options.temperature == 0:
        text, agree = compare(*runs.values(), NEAR_TIE[options.dtype])
        print(text)
    if options.plot:
        draw(runs, f"{load}: {shape}, {where}", options.plot)
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
