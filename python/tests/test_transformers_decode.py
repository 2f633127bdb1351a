"""Generation with attn_implementation="tessera" and every cache of transformers that a CPU has: eager's tokens and
logits, no look at the device, and no key read that a step of decoding does not see."""

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

from test_transformers import (  # noqa: E402
    LENGTH,
    build,
    gemma2,
    gpt_oss,
    like,
    llama,
    mistral,
    near,
    padding,
    same_words,
    t5,
    tokens,
)  # fmt: skip
from transformers import masking_utils as masks  # noqa: E402

import tessera.transformers as hf  # noqa: E402
from tessera.transformers import decode  # noqa: E402

CAPACITY = 40


def generated(model: Any, **arguments: Any) -> Any:
    defaults = {
        "max_new_tokens": 7, "do_sample": False, "output_logits": True, "return_dict_in_generate": True,
        "disable_compile": True,
    }  # fmt: skip
    return model.generate(**(defaults | arguments))


def both(make: Callable[[], Any], device: str) -> tuple[Any, Any]:
    """Eager and ours, in a type in which no rounding decides on a CPU."""
    return build(make, device, torch.float32 if device == "cpu" else torch.bfloat16)


@pytest.fixture
def cached_calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The options of every call of cached_attention that a step of decoding makes."""
    calls: list[dict[str, Any]] = []
    inner = decode.cached_attention

    def cached_attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        calls.append(options | {"k": k})
        return inner(q, k, v, **options)

    monkeypatch.setattr(decode, "cached_attention", cached_attention)
    return calls


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU may look at a mask; here it does what it would for a GPU."""
    monkeypatch.setattr(decode, "_on_host", lambda _: False)


# ---- generate()


@pytest.mark.parametrize(
    ("make", "side", "cache"),
    [
        (llama, "right", "static"), (llama, "holes", "dynamic"), (gemma2, "right", "static"),
        (mistral, "right", "dynamic"), (mistral, "left", "static"), (gpt_oss, "right", "static"),
        (llama, "left", "offloaded"), (t5, "right", "static"),
    ],
)  # fmt: skip
def test_padded_prompts(make: Callable[[], Any], side: str, cache: str, device: str, as_on_a_gpu: None) -> None:
    """Padding on the right is a hole as soon as a token follows. Windows make their caches rings."""
    if cache == "offloaded" and device == "cpu" and not torch.cuda.is_available():
        pytest.skip("transformers offloads from a GPU only")
    eager, ours = both(make, device)
    mask = padding(side, device)
    if side == "right" and make is not llama:  # no window is full of padding: eager's queries see something
        mask = (torch.arange(LENGTH, device=device) < LENGTH - torch.tensor([[0], [2], [5]], device=device)).long()
    arguments: dict[str, Any] = {"input_ids": tokens(device), "attention_mask": mask}
    if cache != "dynamic":
        arguments["cache_implementation"] = cache
    if make is t5:  # the words begin with the decoder's own first one
        a, b = (generated(model, **arguments) for model in (ours, eager))
        same_words(a, b, prompt=1)
    else:
        same_words(generated(ours, **arguments), generated(eager, **arguments))


@pytest.mark.parametrize("make", [llama, gemma2])
def test_beams(make: Callable[[], Any], device: str) -> None:
    """Beams change places in the cache, and prompts are padded."""
    eager, ours = both(make, device)
    arguments = {"input_ids": tokens(device), "attention_mask": padding("left", device), "num_beams": 3}
    a, b = (generated(model, **arguments) for model in (ours, eager))
    if device == "cpu":
        assert torch.equal(a.sequences, b.sequences)


@pytest.mark.parametrize("make", [llama, mistral])
def test_assisted(make: Callable[[], Any], device: str) -> None:
    """A draft of several tokens is judged at once, after which the cache is cropped."""
    eager, ours = both(make, device)
    ids = tokens(device, 1)
    draft = like(ours, "tessera")
    with torch.no_grad():  # a draft that is right often, but not always
        for parameter in draft.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.01)
    try:
        generated(eager, input_ids=ids, assistant_model=like(draft, "eager"), max_new_tokens=16)
    except RuntimeError:
        pytest.skip("this version's own assisted generation fails with windows")
    a = generated(ours, input_ids=ids, assistant_model=draft, max_new_tokens=16)
    b = generated(eager, input_ids=ids, max_new_tokens=16)
    if device == "cpu":
        assert torch.equal(a.sequences, b.sequences)


def test_quantised_cache(device: str) -> None:
    """Its layers hand out what eight bits hold of keys: the same to both, as a rounding may fall to the other side."""
    if not hasattr(transformers.cache_utils, "Fp8QuantizedLayer"):
        pytest.skip("this version quantises with packages of its own only")
    eager, ours = both(llama, device)
    ids, mask, word = tokens(device), padding("left", device), tokens(device, length=1)
    past = transformers.DynamicCache(config=eager.config)
    past.layers = [transformers.cache_utils.Fp8QuantizedLayer() for _ in range(eager.config.num_hidden_layers)]
    with torch.no_grad():
        eager(input_ids=ids, attention_mask=mask, past_key_values=past)
    a, b = (step(model, copy.deepcopy(past), mask, word) for model in (ours, eager))
    most = 1e-4 if device == "cpu" else 0.05
    assert float((a - b).abs().max()) <= most * float(b.abs().max())


# ---- what a step reads


def filled(model: Any, ids: Tensor, mask: Tensor | None, cache: str = "static") -> Any:
    """A cache after a prompt."""
    if cache == "static":
        past = transformers.StaticCache(config=model.config, max_cache_len=CAPACITY)
    else:
        past = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=ids, attention_mask=mask, past_key_values=past)
    return past


def step(model: Any, past: Any, mask: Tensor | None, ids: Tensor) -> Tensor:
    mask = None if mask is None else torch.cat([mask, torch.ones_like(ids)], 1)
    with torch.no_grad():
        logits: Tensor = model(input_ids=ids, attention_mask=mask, past_key_values=past).logits
    return logits


@pytest.mark.parametrize("looks", [True, False])
@pytest.mark.parametrize("side", ["none", "ones", "left", "right", "holes"])
@pytest.mark.parametrize("make", [llama, gemma2], ids=lambda make: make.__name__)
def test_a_step_reads_what_it_sees(
    make: Callable[[], Any], side: str, looks: bool, device: str, cached_calls: list[dict[str, Any]],
    request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    """Keys and values behind the position, and those of padding, are NaN: read, they would be seen in the logits."""
    if not looks:
        request.getfixturevalue("as_on_a_gpu")
    eager, ours = both(make, device)
    ids, mask, word = tokens(device), padding(side, device), tokens(device, length=1)
    expected = step(eager, filled(eager, ids, mask), mask, word)
    past = filled(ours, ids, mask)
    for layer in past.layers:
        if layer.keys.shape[2] != CAPACITY:
            continue  # a ring, which is full
        hidden = torch.ones(ids.shape[0], CAPACITY, dtype=torch.bool, device=device)
        hidden[:, :LENGTH] = False if mask is None else mask == 0
        for x in (layer.keys, layer.values):
            x.masked_fill_(hidden[:, None, :, None], torch.nan)
    near(step(ours, past, mask, word), expected)
    assert len(cached_calls) >= 1
    for options in cached_calls:
        assert options["seqlens"].shape == (ids.shape[0],)
        listed = mask is not None and (side in ("right", "holes") or not looks or device == "cuda")
        assert ("page_table" in options) == listed or options["k"].shape[1] != CAPACITY


def refuse(name: str) -> Callable[..., Any]:
    def read(*_: Any, **__: Any) -> Any:
        raise AssertionError(f"Tensor.{name} reads on the host")

    return read


READS = ("item", "tolist", "nonzero", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__")


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("cache", ["static", "dynamic"])
def test_a_step_reads_nothing_on_the_host(
    cache: str, side: str, device: str, monkeypatch: pytest.MonkeyPatch, as_on_a_gpu: None
) -> None:
    """Whatever the mask holds. gemma2 has layers with a window and without."""
    _, ours = both(gemma2, device)
    ids, mask = tokens(device), padding(side, device)
    past, word = filled(ours, ids, mask, cache), tokens(device, length=1)
    with monkeypatch.context() as patch:
        for name in READS:
            patch.setattr(Tensor, name, refuse(name))
        assert step(ours, past, mask, word).shape[1] == 1


def test_gradients_through_a_step(device: str) -> None:
    """cached_attention has none: then it is the bias, whose gradients are eager's."""
    eager, ours = both(llama, device)
    ids, mask, word = tokens(device), padding("left", device), tokens(device, length=1)
    assert mask is not None
    grown = torch.cat([mask, torch.ones_like(word)], 1)
    gradients = []
    for model in (ours, eager):
        past = filled(model, ids, mask, "dynamic")
        model(input_ids=word, attention_mask=grown, past_key_values=past).logits.square().sum().backward()
        gradients.append(model.model.layers[0].self_attn.q_proj.weight.grad)
    near(*gradients)


# ---- under torch.compile


@pytest.fixture
def compilations() -> Iterator[list[int]]:
    """Backend "count" of torch.compile: the number of operators of every graph it gets."""
    from torch._dynamo.backends.registry import _COMPILER_FNS, register_backend

    graphs: list[int] = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(len(graph.graph.nodes))
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    torch._dynamo.reset()
    register_backend(count, name="count")
    yield graphs
    _COMPILER_FNS.pop("count", None)
    torch._dynamo.reset()


@pytest.mark.parametrize(("make", "side"), [(llama, "none"), (llama, "right"), (gemma2, "left")])
def test_compiled_steps(make: Callable[[], Any], side: str, device: str, compilations: list[int]) -> None:
    """As generate() compiles them: one graph without breaks, which all steps use. Rings that fill up need a second."""
    eager, ours = both(make, device)
    arguments: dict[str, Any] = {
        "input_ids": tokens(device), "attention_mask": padding(side, device), "cache_implementation": "static",
    }  # fmt: skip
    compiled = transformers.CompileConfig(fullgraph=True, backend="count", mode=None, options=None)
    compiled._compile_all_devices = True
    b = generated(eager, **arguments)
    same_words(generated(ours, **arguments, disable_compile=False, compile_config=compiled), b)
    assert 1 <= len(compilations) <= (1 if make is llama else 2)


def test_a_mask_made_while_compiling(device: str, compilations: list[int]) -> None:
    """A user's own torch.compile of the model, which makes the mask as well."""
    eager, ours = both(llama, device)
    ids, mask = tokens(device), padding("left", device)
    past, theirs = filled(ours, ids, mask), filled(eager, ids, mask)
    compiled = torch.compile(functools.partial(step, ours, past), fullgraph=True, backend="count")
    for _ in range(2):
        word = tokens(device, length=1)
        near(compiled(mask, word), step(eager, theirs, mask, word))
        assert mask is not None
        mask = torch.cat([mask, torch.ones_like(word)], 1)


# ---- the mask as an object


def test_a_mask_computed_with_is_a_bias(device: str) -> None:
    """Models that add to a mask, or cut it, get tensors."""
    seqlens = torch.tensor([3, 1], dtype=torch.int32, device=device)
    mask = hf.DecodeMask((2, 1, 1, 5), torch.float32, seqlens, (1, 0))
    bias = torch.full((2, 1, 1, 5), -torch.inf, device=device)
    bias[0, ..., 1:3] = 0
    bias[1, ..., :1] = 0
    assert torch.equal(mask[:, :, :, :5], bias) and torch.equal(mask + torch.zeros(1, device=device), bias)
    assert torch.equal(torch.cat([mask, mask], -1), torch.cat([bias, bias], -1))
    assert mask.size() == bias.shape and mask.size(3) == 5 and len(mask.shape) == mask.dim() == 4
    assert torch.equal(mask.expand(2, 4, 1, 5), bias.expand(2, 4, 1, 5))


def test_keys_that_are_no_rows_of_one_table(device: str) -> None:
    """Batch strides that are no multiple of a key's: the bias does it."""
    q, k, v = (torch.randn(2, n, 2, 8, device=device) for n in (1, 6, 6))
    visible = torch.rand(2, 1, 1, 6, device=device) < 0.7
    visible[..., 2] = True
    options = {"softmax_scale": None, "softcap": 0.0, "sink": None, "dropout_p": 0.0, "deterministic": False}
    mask = hf.DecodeMask((2, 1, 1, 6), torch.float32, visible=visible)
    odd = torch.empty(2 * 6 * 16 + 8, device=device).as_strided((2, 6, 2, 8), (6 * 16 + 8, 16, 8, 1)).copy_(k)
    if device == "cuda":
        q, k, v, odd = (x.bfloat16() for x in (q, k, v, odd))
    near(mask.attend(q, odd, v, None, **options), mask.attend(q, k, v, None, **options))


def test_a_ring_that_fills_up(device: str) -> None:
    """From step to step nothing changes but a tensor: a compiled model would be compiled anew for another number."""
    window = masks.sliding_window_causal_mask_function(7)
    made = [
        hf.attention_mask(2, 1, 7, q_offset=at, mask_function=window, allow_is_causal_skip=False, device=device)
        for at in (3, 4)
    ]
    for mask, seen in zip(made, (4, 5), strict=True):
        assert isinstance(mask, hf.DecodeMask) and mask.seqlens is not None
        assert mask.seqlens.tolist() == [seen] * 2 and mask.window == (-1, 0) and mask.shape == (2, 1, 1, 7)
