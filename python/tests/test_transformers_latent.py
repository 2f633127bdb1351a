"""tessera.transformers.absorb: steps of decoding over the latent rows that transformers caches (MLA), with the logits
and words of eager attention."""

import copy
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

import models  # noqa: E402
from test_transformers import LENGTH, like, padding, same_words, tokens  # noqa: E402
from test_transformers_decode import generated  # noqa: E402

import tessera  # noqa: E402
import tessera.transformers as hf  # noqa: E402
from tessera.transformers import decode, latent  # noqa: E402

NAMES = ("deepseek_v2", "deepseek_v3", "kimi_linear", "longcat_flash", "youtu")
LATENT = [model for model in models.MODELS if model.name in NAMES]


def eager_model(model: models.Model, device: str) -> Any:
    """In a type in which no rounding decides on a CPU."""
    if not model.there:
        pytest.skip(f"this transformers has no {model.config}")
    made = transformers.AutoModelForCausalLM.from_config(model.make(), attn_implementation="eager")
    return made.to(device, torch.float32 if device == "cpu" else torch.bfloat16).eval()


def absorbed(eager: Any) -> Any:
    ours = like(eager, "tessera")
    assert hf.absorb(ours) > 0
    return ours


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of what the steps of decoding attend to, of every layer."""
    shapes: list[tuple[int, ...]] = []
    inner = tessera.cached_attention

    def cached_attention(q: Any, k: Any, v: Any, **options: Any) -> Any:
        if "qv" in options:
            shapes.append((q.shape[-1], options["qv"].shape[-1], k.shape[2], k.shape[3], v.shape[3]))
        return inner(q, k, v, **options)

    for module in (decode, latent):
        monkeypatch.setattr(module, "cached_attention", cached_attention)
    return shapes


CASES = [("none", "dynamic"), ("left", "static"), ("none", "static"), ("left", "dynamic"), ("holes", "dynamic")]


@pytest.mark.parametrize(
    ("model", "side", "cache"),
    [(model, *case) for model in LATENT for case in CASES[: 5 if model.name == "deepseek_v3" else 2]],
    ids=lambda x: getattr(x, "name", x),
)
def test_generate(model: models.Model, side: str, cache: str, device: str, steps: list[tuple[int, ...]]) -> None:
    if model.name == "kimi_linear" and cache == "static":
        pytest.skip("its linear layers have no such cache, and see padding")
    eager = eager_model(model, device)
    ours = absorbed(eager)
    inputs = {"input_ids": tokens(device), "attention_mask": padding(side, device)}
    arguments = {name: x for name, x in inputs.items() if x is not None} | {"cache_implementation": cache}
    same_words(generated(ours, **arguments), generated(eager, **arguments))
    rows = (eager.config.qk_rope_head_dim, eager.config.kv_lora_rank)
    assert steps and set(steps) == {(*rows, 1, *rows)}, "one key head, and no expanded key"


def test_sizes_of_deepseek(device: str, steps: list[tuple[int, ...]]) -> None:
    """512 latent columns, 64 rotated ones, heads of 128 + 64 and 128."""
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
    model = next(model for model in LATENT if model.name == "deepseek_v3")
    eager = eager_model(model._replace(more=model.more | sizes), device)
    prompt = {"input_ids": tokens(device)}
    same_words(generated(absorbed(eager), **prompt), generated(eager, **prompt))
    assert set(steps) == {(64, 512, 1, 64, 512)}


def deepseek(device: str) -> tuple[Any, Any]:
    eager = eager_model(next(model for model in LATENT if model.name == "deepseek_v3"), device)
    return eager, absorbed(eager)


def test_what_is_no_step(device: str, steps: list[tuple[int, ...]]) -> None:
    """Prompts, gradients and other implementations are as before."""
    eager, ours = deepseek(device)
    plain = like(eager, "tessera")
    words = tokens(device)
    loss, expected = (model(words, labels=words).loss for model in (ours, plain))
    assert torch.equal(loss, expected)
    loss.backward()
    expected.backward()
    for x, y in zip(ours.parameters(), plain.parameters(), strict=True):
        assert (x.grad is y.grad is None) or torch.equal(x.grad, y.grad)
    assert not steps
    back = like(ours, "eager")
    assert torch.equal(back(words).logits, eager(words).logits)
    # With gradients a step expands, too.
    for model in (ours, plain):
        model.zero_grad()
        first = model(words[:, :-1], use_cache=True)
        model(words[:, -1:], past_key_values=first.past_key_values).logits.sum().backward()
    assert not steps
    for x, y in zip(ours.parameters(), plain.parameters(), strict=True):
        assert (x.grad is y.grad is None) or torch.equal(x.grad, y.grad)


def test_copies_and_changed_weights(device: str, steps: list[tuple[int, ...]]) -> None:
    """Nothing is kept that could be out of date."""
    eager, ours = deepseek(device)
    twin = copy.deepcopy(ours)
    with torch.no_grad():
        for model in (eager, twin):
            for name, parameter in model.named_parameters():
                if "kv_b_proj" in name:
                    parameter.mul_(0.5)
    prompt = {"input_ids": tokens(device)}
    same_words(generated(twin, **prompt), generated(eager, **prompt))
    assert steps


def test_compiled_steps(device: str) -> None:
    """Without a break in the graph."""
    eager, ours = deepseek(device)
    prompt = {"input_ids": tokens(device), "cache_implementation": "static"}
    compiled = torch.compile(ours.forward, backend="aot_eager", fullgraph=True)
    cache = transformers.StaticCache(config=ours.config, max_cache_len=LENGTH + 8)
    with torch.no_grad():
        word = ours(prompt["input_ids"], past_key_values=cache).logits[:, -1:].argmax(-1)
        words = [word]
        for _ in range(4):
            words.append(compiled(words[-1], past_key_values=cache).logits[:, -1:].argmax(-1))
    expected = generated(eager, **prompt).sequences[:, LENGTH : LENGTH + 5]
    if device == "cpu":
        assert torch.equal(torch.cat(words, 1), expected)


def test_other_layers_of_weights(device: str) -> None:
    """What stands in for the expanding layer may compute something else: then keys are expanded by it."""
    _, ours = deepseek(device)
    layer = next(layer for layer in ours.modules() if latent.is_absorbed(layer))
    layer.kv_b_proj = torch.nn.Sequential(layer.kv_b_proj)
    prompt = {"input_ids": tokens(device)}
    plain = like(ours, "tessera")
    for each in plain.modules():
        if latent.is_absorbed(each):
            del each.expand_kv
    same_words(generated(ours, **prompt), generated(plain, **prompt))
    with pytest.raises(ValueError, match=r"kv_b_proj must be a plain torch.nn.Linear"):
        hf.absorb(ours)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="model is of Linear, which has no layer of latent attention"):
        hf.absorb(torch.nn.Linear(3, 3))
