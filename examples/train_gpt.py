"""Trains a byte-level GPT on the Python standard library, with the attention of your choice.

    train_gpt.py                                          a minute on a CPU
    train_gpt.py --attention math --csv math.csv          the same weights and batches, softmax(QK^T)V in three steps
    train_gpt.py --device cuda --dtype bfloat16 --layers 8 --heads 8 --width 1024 --context 8192 --batch 4
    train_gpt.py --attention tessera-e4m3                 the same in 8 bits
    train_gpt.py --save gpt.pt                            keeps the model, e.g. for serve.py

The text is the source of the interpreter that runs this, so nothing is downloaded. One seed gives the same weights
and batches for every attention; losses differ by rounding alone, in 8 bits by more of it. Exit code 3: out of memory.
"""

import argparse
import csv
import functools
import math
import os
import pathlib
import resource
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

VOCABULARY = 256
OUT_OF_MEMORY = 3
COLUMNS = ("step", "loss", "tokens_per_s", "peak_bytes")
SHAPE = ("layers", "width", "heads", "kv_heads", "context")  # what a GPT is made of, in its own order

# (batch, context, heads, head_dim) for q, fewer heads allowed in k and v -> like q; always causal.
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


# ---- attention ------------------------------------------------------------------------------------------------------
def tessera_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    import tessera  # here, so that the others train without it

    return tessera.attention(q, k, v, causal=True)


def e4m3_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same in 8 bits; the gradient is that of 16 at what q, k and v were rounded to."""
    import tessera

    return tessera.attention(q, k, v, causal=True, precision="e4m3")


def sdpa_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The kernel that PyTorch picks."""
    grouped = q.shape[2] != k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped).transpose(1, 2)


def cudnn_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The fastest that PyTorch has on Hopper GPUs, whether it would have picked it or not."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return sdpa_attention(q, k, v)


def math_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Three steps with the matrix in memory, in place where autograd allows it and in q's precision throughout: the
    least memory that this way can do with."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2) if group > 1 else x for x in (k, v))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with torch.autocast(q.device.type, enabled=False):  # it would keep the weights in float32, too
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
        scores += scores.new_full(scores.shape[-2:], -torch.inf).triu(1)
        return (scores.softmax(-1) @ v).transpose(1, 2)


ATTENTIONS: dict[str, Attention] = {
    "tessera": tessera_attention,
    "tessera-e4m3": e4m3_attention,
    "sdpa": sdpa_attention,
    "cudnn": cudnn_attention,
    "math": math_attention,
}


# ---- model ----------------------------------------------------------------------------------------------------------
def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions: each pair (x[i], x[i + head_dim / 2]) turned by its token's angle."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Block(nn.Module):
    """One pre-norm layer: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, width: int, heads: int, kv_heads: int, attention: Attention):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, width // heads
        self.attention = attention
        self.attention_norm = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, (heads + 2 * kv_heads) * self.head_dim, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.RMSNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (-1, self.head_dim))
        qk, v = qkv.split((self.heads + self.kv_heads, self.kv_heads), 2)
        qk = rotate(qk, cos.to(qk.dtype), sin.to(qk.dtype))
        q, k = qk.split((self.heads, self.kv_heads), 2)
        x = x + self.out(self.attention(q, k, v).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class GPT(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, kv_heads: int, context: int, attention: Attention):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, heads, kv_heads, attention) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        half = width // heads // 2
        angles = torch.outer(torch.arange(context), 10000.0 ** (-torch.arange(half) / half))[:, None]
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # What is added to the residual stream 2 * layers times starts smaller, so that their sum does not.
                residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5 if residual else 0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean cross entropy in nats a byte."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


def load(path: pathlib.Path, attention: str = "tessera") -> GPT:
    """The model that --save wrote, on the CPU, in float32."""
    saved = torch.load(path, map_location="cpu", weights_only=True)
    model = GPT(*(saved["shape"][name] for name in SHAPE), ATTENTIONS[attention])
    model.load_state_dict(saved["weights"])
    return model


# ---- text -----------------------------------------------------------------------------------------------------------
@functools.cache
def standard_library() -> bytes:
    """Every source file of the standard library in the order of its name; without the tests, which not every
    distribution installs."""
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    files = sorted(path for path in root.rglob("*.py") if left_out.isdisjoint(path.relative_to(root).parts))
    return b"\n".join(path.read_bytes() for path in files)


class Batches:
    """Random windows of the text; its last twentieth is kept for validation."""

    def __init__(self, context: int, batch: int, seed: int, device: str):
        text = torch.frombuffer(bytearray(standard_library()), dtype=torch.uint8)
        if len(text) < 40 * (context + 1):
            raise SystemExit(f"train_gpt: the text has {len(text):,} bytes, too few for a context of {context:,}")
        self.training, self.validation = (part.to(device) for part in text.tensor_split([len(text) * 19 // 20]))
        self.window = torch.arange(context + 1, device=device)
        self.batch, self.seed = batch, seed

    def draw(self, text: Tensor, steps: int) -> list[Tensor]:
        """Where the windows of each step start, all drawn on the CPU at once: the device is never waited for."""
        starts = torch.randint(
            len(text) - len(self.window), (steps, self.batch, 1), generator=torch.Generator().manual_seed(self.seed)
        )
        return list(starts.to(text.device))

    def windows(self, text: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens, and the token that follows each."""
        windows = text[starts + self.window].long()
        return windows[:, :-1], windows[:, 1:]


# ---- training -------------------------------------------------------------------------------------------------------
def peak_bytes(device: str) -> int:
    """The most memory that was in use at once: of the GPU, or of this process."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def rate_of(step: int, steps: int) -> float:
    """The share of the learning rate: linear for a tenth of the steps, then half a cosine down to a tenth."""
    rising = max(1, steps // 10)
    if step < rising:
        return (step + 1) / rising
    return 0.55 + 0.45 * math.cos(math.pi * (step - rising) / max(1, steps - rising))


def train(options: argparse.Namespace, report: Callable[[int, list[float], float | None, int], None]) -> float:
    """Calls report(step, losses since the last report, tokens/s since the warm-up, peak bytes); returns the loss on
    text that was not trained on."""
    device, steps = options.device, options.steps
    torch.manual_seed(options.seed)
    with torch.device(device):
        model: nn.Module = GPT(*(getattr(options, name) for name in SHAPE), ATTENTIONS[options.attention])
    print(
        f"train_gpt: {options.attention}, {device}, {options.dtype}: {sum(p.numel() for p in model.parameters()):,} "
        f"parameters, {options.batch} x {options.context:,} bytes a step of {len(standard_library()):,}",
        flush=True,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95), fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_of(step, steps))
    if options.compile:
        model.compile()
    batches = Batches(options.context, options.batch, options.seed, device)
    precision = torch.autocast(device, torch.bfloat16, enabled=options.dtype == "bfloat16")
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None

    losses: list[Tensor] = []
    began = time.perf_counter()
    for step, starts in enumerate(batches.draw(batches.training, steps), 1):
        with precision:
            loss = model(*batches.windows(batches.training, starts))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if step == options.warmup:
            synchronize()
            began = time.perf_counter()
        if step % options.report == 0 or step == steps:
            # The only place where the device is waited for: losses stay on it until here.
            values = torch.stack(losses).tolist()
            timed = step - options.warmup
            speed = timed * options.batch * options.context / (time.perf_counter() - began) if timed > 0 else None
            report(step, values, speed, peak_bytes(device))
            losses.clear()

    if options.save:
        shape = {name: getattr(options, name) for name in SHAPE}
        torch.save({"shape": shape, "weights": model.state_dict()}, options.save)
    with torch.no_grad(), precision:
        held_out = [
            model(*batches.windows(batches.validation, starts))
            for starts in batches.draw(batches.validation, options.validation)
        ]
    return torch.stack(held_out).mean().item() if held_out else math.nan


def is_out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = functools.partial(parser.add_argument, metavar="N", type=int)
    parser.add_argument("--attention", choices=tuple(ATTENTIONS), default="tessera", help="default: tessera")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        default="float32",
        help="bfloat16 is autocast over float32 weights; default: float32",
    )
    add("--layers", default=4, help="default: %(default)s")
    add("--heads", default=4, help="of queries; default: %(default)s")
    add("--kv-heads", help="of keys and values; default: as many")
    add("--width", default=128, help="heads times head_dim; default: %(default)s")
    add("--context", default=256, help="bytes the model sees at once; default: %(default)s")
    add("--batch", default=8, help="windows a step; default: %(default)s")
    add("--steps", default=200, help="default: %(default)s")
    parser.add_argument("--lr", metavar="RATE", type=float, default=1e-3, help="largest; default: %(default)s")
    add("--seed", default=1, help="of weights and batches; default: %(default)s")
    parser.add_argument("--compile", action="store_true", help="torch.compile the model")
    add("--warmup", default=5, help="steps that tokens/s leaves out; default: %(default)s")
    add("--report", default=10, help="steps from line to line; default: %(default)s")
    add("--validation", default=4, help="batches of it at the end; default: %(default)s")
    parser.add_argument("--csv", metavar="FILE", type=pathlib.Path, help=f"a row a step: {', '.join(COLUMNS)}")
    parser.add_argument("--save", metavar="FILE", type=pathlib.Path, help="where the trained model goes")
    options = parser.parse_args(argv)
    options.kv_heads = options.kv_heads or options.heads
    for name in ("layers", "heads", "width", "context", "batch", "steps", "kv_heads", "report"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name)} is not positive")
    if options.width % (2 * options.heads):
        parser.error(f"--width {options.width} is not an even head_dim times --heads {options.heads}")
    if options.heads % options.kv_heads:
        parser.error(f"--heads {options.heads} is not a multiple of --kv-heads {options.kv_heads}")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    with open(options.csv or os.devnull, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)

        def report(step: int, losses: list[float], speed: float | None, peak: int) -> None:
            first = step - len(losses) + 1
            writer.writerows(
                (first + i, f"{loss:.5f}", f"{speed:.0f}" if speed else "", peak) for i, loss in enumerate(losses)
            )
            file.flush()
            print(
                f"step {step:5}/{options.steps}  loss {losses[-1]:.4f}  "
                f"{f'{speed:,.0f} tokens/s' if speed else 'warming up'}  peak {peak / 1e6:,.0f} MB",
                flush=True,
            )

        try:
            loss = train(options, report)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            print(
                f"train_gpt: out of memory: {options.attention}, batch {options.batch}, context {options.context:,}: "
                f"{str(error).splitlines()[0]}",
                flush=True,
            )
            return OUT_OF_MEMORY
    if options.validation:
        print(f"loss on text not trained on: {loss:.4f} nats a byte", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
