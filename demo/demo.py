"""The demonstration: a real sentence encoder and one long attention, by libtessera and by the plain
three steps, side by side. Exits with 1 if the two do not agree.

    demo.py [--library libtessera.so] [--text FILE] [--seqlen 16384]
"""

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

import numpy as np

import libtessera
import long_attention
import minilm

ROOT = pathlib.Path(__file__).resolve().parent.parent
TOLERANCE = 1e-5
HEADS, HEAD_DIM = 4, 64
MAX_TOKENS = 6000

PAIRS = [
    ("A man is playing the guitar.", "Someone plays music on a guitar."),
    ("How do I install this library?", "What are the steps to set up the package?"),
    ("The soup needs more salt.", "Add some seasoning to the broth."),
    ("The score matrix never leaves the cache.", "Attention weights are not written to memory."),
    ("How do I install this library?", "It rained in the mountains all week."),
    ("The soup needs more salt.", "A man is playing the guitar."),
]


def say(text=""):
    print(text, flush=True)


def bar(value, largest, width=40):
    """A horizontal bar, exact to an eighth of a character and never empty."""
    eighths = max(1, round(8 * width * max(value, 0) / largest))
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


def sentences_of(path):
    """Sentences and paragraphs of a text or Markdown file, code and tables left out."""
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8", errors="replace"), flags=re.S)
    paragraphs = [" ".join(block.split()) for block in re.split(r"\n\s*\n", text)
                  if not block.lstrip().startswith("|")]
    found = []
    for paragraph in paragraphs:
        parts = [s for s in re.split(r"(?<=[.!?:;])\s+", paragraph) if len(s) > 20]
        found += parts + ([paragraph] if len(parts) > 1 else [])
    return found


def gather_text(argument):
    """The sentences to embed: the pairs, then the given file, or this project's own pages."""
    if argument:
        files = [pathlib.Path(argument)]
    else:
        files = [ROOT / "LICENSE", ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    texts = [sentence for pair in PAIRS for sentence in pair]
    for file in files:
        if file.is_file():
            texts += sentences_of(file)
    return texts, [file.name for file in files if file.is_file()]


def limit_tokens(model, texts):
    """The longest prefix of the list that stays under MAX_TOKENS, tokenized."""
    ids, cu_seqlens = model.tokenize(texts)
    batch = max(1, int(np.searchsorted(cu_seqlens, MAX_TOKENS, side="right")) - 1)
    return ids[: cu_seqlens[batch]], np.ascontiguousarray(cu_seqlens[: batch + 1])


class Stopwatch:
    """An attention function that counts its own time."""

    def __init__(self, attention):
        self.attention, self.seconds = attention, 0.0

    def __call__(self, *arguments):
        start = time.perf_counter()
        out = self.attention(*arguments)
        self.seconds += time.perf_counter() - start
        return out


def show_encoder(library, text_argument):
    """Returns whether the embeddings agree."""
    model = minilm.MiniLM(minilm.model_directory())
    texts, names = gather_text(text_argument)
    ids, cu_seqlens = limit_tokens(model, texts)
    lengths = np.diff(cu_seqlens)
    say(f"      text: {', '.join(names)}: {len(lengths)} sentences and paragraphs, {len(ids)} tokens, "
        f"lengths {lengths.min()} to {lengths.max()}")
    say(f"      model: all-MiniLM-L6-v2, {model.config['num_hidden_layers']} layers, {model.heads} "
        f"heads of {model.config['hidden_size'] // model.heads}; one packed batch, no padding")
    model.embed(ids[: cu_seqlens[1]], cu_seqlens[:2], library.attention)  # pages the weights in
    embeddings = {}
    for name, function in (("tessera", library.attention),
                           ("three-step", minilm.three_step_attention)):
        attention = Stopwatch(function)
        start = time.perf_counter()
        embeddings[name] = model.embed(ids, cu_seqlens, attention)
        say(f"      {name:10} encoder {time.perf_counter() - start:6.2f} s, of it attention "
            f"{attention.seconds * 1e3:7.1f} ms")
    error = float(np.abs(embeddings["tessera"] - embeddings["three-step"]).max())
    good = error <= TOLERANCE  # false for NaN too
    say(f"      largest difference of any embedding component: {error:.1e} "
        f"(accepted: {TOLERANCE:.0e}) {'ok' if good else 'WRONG'}")
    say("      cosine similarity, from Tessera's embeddings:")
    for i, (a, b) in enumerate(PAIRS[: len(lengths) // 2]):
        cosine = float(embeddings["tessera"][2 * i] @ embeddings["tessera"][2 * i + 1])
        say(f"      {cosine:5.2f} {bar(cosine, 1, 20):20} {a} | {b}")
    return good


def measure(method, seqlen, library_path, output):
    environment = {**os.environ, "TESSERA_LIBRARY": str(library_path)}
    command = [sys.executable, str(pathlib.Path(__file__).with_name("long_attention.py")), method,
               str(seqlen), str(HEADS), str(HEAD_DIM), output]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"demo: {method} at {seqlen} tokens failed ({done.returncode}): "
                         f"{done.stderr.strip()[-500:]}")
    return json.loads(done.stdout)


def fitting_seqlen(wanted):
    """Halves the length until the three-step score matrix fits into the memory that is free."""
    with open("/proc/meminfo", encoding="ascii") as file:
        free = next(int(line.split()[1]) for line in file if line.startswith("MemAvailable")) * 1024
    seqlen = wanted
    while seqlen > 1024 and HEADS * seqlen**2 * 4 * 1.2 + (256 << 20) > free:
        seqlen //= 2
    if seqlen < wanted:
        say(f"      only {free / 2**30:.1f} GiB free: {seqlen} tokens instead of {wanted}, so that the "
            "three-step way has room")
    return seqlen


def errors_of(outputs, seqlen):
    """Largest error against double precision of each output, over a sample of rows."""
    q, k, v = long_attention.inputs(seqlen, HEADS, HEAD_DIM)
    rows = np.unique(np.linspace(0, seqlen - 1, 64).astype(int))
    exact = long_attention.exact_rows(q, k, v, rows)
    return {name: float(np.abs(out[:, rows] - exact).max()) for name, out in outputs.items()}


def show_long(library_path, wanted):
    """Returns whether both ways agree with double precision and with each other."""
    seqlen = fitting_seqlen(wanted)
    lengths = [seqlen >> shift for shift in (3, 2, 1, 0) if seqlen >> shift >= 256]
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        outputs = {name: os.path.join(folder, f"{name}.npy") for name in ("tessera", "three_step")}
        for length in lengths:
            for name in outputs:
                results[name, length] = measure(name, length, library_path, outputs[name])
                say(f"      {length:6} tokens, {name:10} "
                    f"{results[name, length]['seconds']:8.3f} s "
                    f"{results[name, length]['peak_bytes'] / 2**20:9.1f} MiB")
        arrays = {name: np.load(path) for name, path in outputs.items()}
    errors = errors_of(arrays, seqlen)
    between = float(np.abs(arrays["tessera"] - arrays["three_step"]).max())
    chart(results, lengths)
    say()
    say(f"      at {seqlen} tokens   {'time':>10} {'peak memory':>14} {'max error vs double':>22}")
    for name in outputs:
        row = results[name, seqlen]
        say(f"      {name:16} {row['seconds']:8.3f} s {row['peak_bytes'] / 2**20:10.1f} MiB "
            f"{errors[name]:22.1e}")
    ours, plain = results["tessera", seqlen], results["three_step", seqlen]
    say(f"      Tessera: {plain['seconds'] / ours['seconds']:.1f} times faster, "
        f"{plain['peak_bytes'] / max(ours['peak_bytes'], 1):.0f} times less memory; "
        f"largest difference of the two outputs {between:.1e}")
    good = (errors["tessera"] <= 2 * errors["three_step"] + TOLERANCE and between <= TOLERANCE)
    say(f"      {'ok' if good else 'WRONG: the two do not agree'}")
    return good


def chart(results, lengths):
    for key, title, unit, scale, digits in (
            ("seconds", "time", "s", 1, 3), ("peak_bytes", "peak memory growth", "MiB", 2**20, 1)):
        largest = max(results[name, n][key] for name in ("tessera", "three_step") for n in lengths)
        say()
        say(f"      {title}, {HEADS} heads of {HEAD_DIM}, float32")
        for n in lengths:
            for name in ("tessera", "three_step"):
                value = results[name, n][key]
                label = f"{n:6}" if name == "tessera" else " " * 6
                say(f"      {label} {name:10} {bar(value, largest):40} {value / scale:8.{digits}f} {unit}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", help="path of libtessera.so")
    parser.add_argument("--text", help="a text file of your own to embed")
    parser.add_argument("--seqlen", type=int, default=16384, help="length of the long attention")
    arguments = parser.parse_args()
    library = libtessera.Library(arguments.library)
    library_path = arguments.library or os.environ.get("TESSERA_LIBRARY", "")
    start = time.perf_counter()
    say(f"[1/2] MiniLM sentence embeddings through libtessera {library.version}")
    good = show_encoder(library, arguments.text)
    say(f"[2/2] one long attention, {HEADS} heads of {HEAD_DIM}, both ways, each in a process of its own")
    good = show_long(library_path, arguments.seqlen) and good
    say(f"{'All numbers agree' if good else 'THE NUMBERS DO NOT AGREE'} "
        f"({time.perf_counter() - start:.0f} s).")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
