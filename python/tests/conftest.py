"""What all tests share: the device they run on, and random numbers that differ from run to run."""

import importlib.metadata
import os
import random
from typing import Any

import pytest

# Before torch is imported anywhere: the tests are many and small.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# JAX computes on the CPU here; where it finds a GPU, it would take three quarters of its memory.
os.environ.setdefault("JAX_PLATFORMS", "cpu")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", choices=("cpu", "cuda"), help="where tensors live")
    parser.addoption("--seed", type=int, default=None, help="repeat a run with the seed it printed")
    parser.addoption("--share", type=int, default=1, help="of the tests of one name one in so many, by chance")


def pytest_configure(config: pytest.Config) -> None:
    """A run's processes have one seed: a worker of pytest-xdist is told."""
    if config.option.seed is None:
        told = getattr(config, "workerinput", {})
        config.option.seed = told.get("seed", random.SystemRandom().randrange(2**31))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["seed"] = node.config.option.seed


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps a share of the tests of one name, whatever their parameters and files, and at least one of each."""
    by_name: dict[str, list[pytest.Item]] = {}
    for item in items:
        by_name.setdefault(item.name.split("[")[0], []).append(item)
    chance = random.Random(config.option.seed)  # the same for all processes of a run
    kept: set[pytest.Item] = set()
    for group in by_name.values():
        kept.update(chance.sample(group, -(-len(group) // config.option.share)))
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def versions() -> str:
    """Of the frameworks that are there."""
    found = []
    for name in ("torch", "transformers", "numpy", "jax"):
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """At the end, where also pytest -q says it."""
    option = config.option
    share = f" --share={option.share}" if option.share > 1 else ""
    repeat = f"seed {option.seed} (repeat with --seed{share})"
    terminalreporter.write_line(f"{repeat}, device {option.device}, {versions()}")


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    return str(request.config.getoption("--device"))


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> int:
    """Every test starts from the run's seed, whatever ran before it."""
    number = int(request.config.getoption("--seed"))
    random.seed(number)
    try:
        import numpy

        numpy.random.seed(number)
        import torch

        torch.manual_seed(number)
    except ImportError:
        pass
    return number
