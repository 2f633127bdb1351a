"""Continuous batching with attn_implementation="tessera": the tokens that eager attention generates from each prompt
alone, and which of the three ways a layer's attention goes; on a GPU with transformers' CUDA graphs and without."""

import collections
import random
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

from test_transformers import VOCABULARY, build, gemma2, gpt_oss, llama, mistral, near, tokens  # noqa: E402

from tessera.transformers import continuous  # noqa: E402

PAGE = 4
# Fewer tokens than the longest prompt has, so that it comes in chunks and beside steps of decoding.
BATCH_TOKENS = 16
NEW = 8

Calls = collections.Counter[str]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """How often each way is taken; also keys that are gathered for one new token."""
    counter: Calls = collections.Counter()
    lock = threading.Lock()  # generate_batch() computes on a thread of its own
    by_blocks, cached, dense = continuous._by_blocks, continuous.cached_attention, continuous.attention

    def count(name: str) -> None:
        with lock:
            counter[name] += 1

    def counted_by_blocks(*arguments: Any) -> Any:
        count("blocks")
        return by_blocks(*arguments)

    def counted_cached(*arguments: Any, **options: Any) -> Any:
        count("slots" if "cache_index" in options else "pages")
        return cached(*arguments, **options)

    def counted_dense(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        count("one token, gathered" if options["max_seqlen_q"] == 1 and k.shape[0] > q.shape[0] else "gathered")
        return dense(q, k, v, **options)

    monkeypatch.setattr(continuous, "_by_blocks", counted_by_blocks)
    monkeypatch.setattr(continuous, "cached_attention", counted_cached)
    monkeypatch.setattr(continuous, "attention", counted_dense)
    return counter


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers asks a package that need not be there for the memory of a CPU."""
    from transformers.generation.continuous_batching import cache, requests

    for module in (cache, requests):
        if hasattr(module, "get_device_and_memory_breakdown"):
            monkeypatch.setattr(
                module, "get_device_and_memory_breakdown", lambda *_: (torch.device("cpu"), 2**33, 0, 0)
            )


def generated(model: Any, prompts: list[list[int]], **more: Any) -> list[Any]:
    """What generate_batch() returns, in the order of the prompts."""
    fields = transformers.ContinuousBatchingConfig.__dataclass_fields__
    page = {"page_size" if "page_size" in fields else "block_size": PAGE}
    config = transformers.ContinuousBatchingConfig(
        num_blocks=64, max_batch_tokens=BATCH_TOKENS, max_requests_per_batch=8, **page, **more
    )
    results = model.generate_batch(
        prompts, continuous_batching_config=config, progress_bar=False,
        generation_config=transformers.GenerationConfig(
            max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0
        ),
    )  # fmt: skip
    return [results[name] for name in sorted(results, key=lambda name: int(name.rpartition("_")[2]))]


def alone(eager: Any, prompt: list[int]) -> tuple[list[int], Tensor]:
    """Eager's tokens, and the logarithms of their probabilities."""
    ids = torch.tensor([prompt], device=eager.device)
    result = eager.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, output_logits=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    words = result.sequences[0, len(prompt) :]
    logits = torch.cat(result.logits).float().log_softmax(-1)
    return words.tolist(), logits.gather(1, words[:, None])[:, 0]


def check(eager: Any, prompt: list[int], result: Any) -> None:
    """In bfloat16 a rounding may decide on a word; so there what is compared is how probable eager finds ours."""
    assert result.error is None and len(result.generated_tokens) == NEW == len(result.logprobs)
    ours = torch.tensor(result.logprobs)
    if eager.dtype is torch.float32:
        words, expected = alone(eager, prompt)
        assert result.generated_tokens == words
        torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)
        return
    words = torch.tensor(result.generated_tokens)
    with torch.no_grad():
        logits = eager(torch.tensor([prompt + result.generated_tokens], device=eager.device)).logits
    expected = logits[0, len(prompt) - 1 : -1].float().log_softmax(-1).cpu().gather(1, words[:, None])[:, 0]
    assert float((ours - expected).square().mean().sqrt()) <= 0.2  # mistakes are off by ones


def prompts() -> list[list[int]]:
    """Some begin alike, so that they share pages."""
    texts = [tokens("cpu", 1, n)[0].tolist() for n in (5, 23, 11, 1)]
    return [*texts, texts[1][:13] + [random.randrange(1, VOCABULARY)]]


def both(make: Callable[[], Any], device: str) -> tuple[Any, Any]:
    return build(make, device, torch.float32 if device == "cpu" else torch.bfloat16)


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize(
    ("make", "blocks", "name"),
    [
        (llama, None, "tessera"), (llama, 0, "tessera"), (llama, None, "paged|tessera"), (mistral, None, "tessera"),
        (gemma2, 16, "tessera"), (gpt_oss, None, "tessera"),
    ],
)  # fmt: skip
def test_tokens(
    make: Callable[[], Any], blocks: int | None, name: str, graphs: bool, device: str, calls: Calls
) -> None:
    """Of models with windows, softcaps and sinks, with tables of blocks and without."""
    if graphs and device == "cpu":
        pytest.skip("transformers captures on a GPU only")
    eager, ours = both(make, device)
    if graphs and make is gpt_oss:
        ours.set_experts_implementation("batched_mm")  # eager's ask the device which experts there are
    ours.set_attn_implementation(name)
    name = ours.config._attn_implementation  # later versions drop the prefix
    texts = prompts()
    results = generated(ours, texts, max_blocks_per_request=blocks, return_logprobs=True, use_cuda_graph=graphs)
    assert ours.config._attn_implementation == name
    for text, result in zip(texts, results, strict=True):
        check(eager, text, result)
    assert calls["one token, gathered"] == 0
    assert (calls["blocks"] > 0) == (make is llama and blocks is None)
    if graphs:  # batches are padded: there is always something to read, and no bound says that all have one token
        assert (calls["slots"] > 0) == (make is not mistral) and (calls["gathered"] > 0) == (make is not llama)
    else:
        assert calls["gathered"] > 0 and calls["slots"] + calls["blocks"] > 0


def test_tokens_while_padded(device: str, calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where transformers compiles a batch, or captures it, it pads it: with requests without tokens, and with tokens
    of no request. What it compiles is left as it is here."""
    eager, ours = both(llama, device)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    config = transformers.CompileConfig()
    texts = prompts()[:3]
    results = generated(ours, texts, varlen_compile_config=config, decode_compile_config=config, return_logprobs=True)
    for text, result in zip(texts, results, strict=True):
        check(eager, text, result)
    assert calls["slots"] > 0 and calls["blocks"] > 0


# ---- the ways, each against attention of one request at a time


class Requests:
    """Keys of some requests in a cache of slots, in any order, and new ones.

    Of a layer with a window the cache is a ring, and of what is read the new keys' slots are `SENTINEL`.
    """

    SENTINEL = 1

    def __init__(self, past: list[int], new: list[int], window: int | None, device: str) -> None:
        self.past, self.new, self.window = past, new, window
        heads_k, columns, slots = 2, 8, 2 + sum(past) + sum(new)
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        make = {"device": device, "dtype": dtype}
        self.q = torch.randn(sum(new), 2 * heads_k, columns, **make)
        self.k, self.v = (torch.randn(sum(new), heads_k, columns, **make) for _ in range(2))
        keys, values = (torch.full((slots, heads_k, columns), torch.nan, **make) for _ in range(2))
        self.layer = continuous._Layer(0, "", window, keys, values, self.SENTINEL)
        order = iter((torch.randperm(slots - 2) + 2).tolist())
        read, write, read_lengths, self.exact = [], [], [], []
        at = 0
        for p, n in zip(past, new, strict=True):
            ring = [next(order) for _ in range(p + n if window is None else min(p + n, window))]
            old = torch.randn(2, p, heads_k, columns, **make)
            k, v = (torch.cat([x, y[at : at + n]]) for x, y in zip(old, (self.k, self.v), strict=True))
            for i in range(p):
                keys[ring[i % len(ring)]], values[ring[i % len(ring)]] = old[0, i], old[1, i]
            places = [ring[i % len(ring)] for i in range(p + n)]
            seen = p if window is None else min(p, window - 1)
            read += places[p - seen : p] + (places[p:] if window is None else [self.SENTINEL] * n)
            write += places[p:]
            read_lengths.append(seen + n)
            self.exact.append(attention_of(self.q[at : at + n], k, v, window))
            at += n
        # Where more is written than a ring holds only the last of it is kept; the rest goes where nobody reads.
        self.write = torch.tensor([0 if x in write[i + 1 :] else x for i, x in enumerate(write)], device=device)
        self.read = torch.tensor(read, device=device)
        self.cu_q, self.cu_k = (
            torch.tensor([0, *x], device=device).cumsum(0).int() for x in (new, read_lengths)
        )  # fmt: skip
        self.longest_q, self.longest_k = max(new), max(read_lengths)


def attention_of(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """In double; the last query stands at the last key."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1).double() for x in (k, v))
    s = torch.einsum("qhd,khd->hqk", q.double(), k) / q.shape[-1] ** 0.5
    at = torch.arange(k.shape[0], device=q.device)
    behind = at[k.shape[0] - q.shape[0] :, None] - at
    s = s.masked_fill((behind < 0) | (behind >= (window or k.shape[0])), -torch.inf)
    return torch.einsum("hqk,khd->qhd", s.softmax(-1), v)


def options(window: int | None) -> dict[str, Any]:
    left = -1 if window is None else window - 1
    return {"causal": True, "window": (left, 0), "softmax_scale": None, "softcap": 0.0, "sink": None}


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("padded", [0, 3])
@pytest.mark.parametrize(
    "new", [[1, 1, 1, 1], [1, 4, 1, 2], [1, 30, 1, 1]], ids=["one token", "few", "many"]
)  # fmt: skip
def test_by_slots(new: list[int], padded: int, window: int | None, device: str, calls: Calls) -> None:
    """Unwritten slots are NaN. `padded`: tokens of no request, with whose number transformers bounds the lengths."""
    past = [random.randrange(1, 12), random.randrange(12), 0, random.randrange(5, 12)]
    these = Requests(past, new, window, device)
    q, k, v = (torch.cat([x, torch.randn_like(x[:padded])]) if padded else x for x in (these.q, these.k, these.v))
    read, write = (torch.cat([x, x.new_zeros(padded)]) for x in (these.read, these.write))
    these.layer.keys[0] = these.layer.values[0] = 0  # what padding reads and writes
    longest_q = q.shape[0] if padded else these.longest_q
    o = continuous._by_slots(
        q, k, v, these.layer, read, write, these.cu_q, these.cu_k, longest_q, these.longest_k, options(window)
    )
    assert o.shape == q.shape
    near(o[: these.q.shape[0]], torch.cat(these.exact).to(o.dtype))
    few = longest_q * 2 <= 48 and (window is None or longest_q == 1)
    assert calls == ({"slots": 1} if few else {"gathered": 1})


def test_by_blocks(device: str) -> None:
    """A request that pads the batch has as many keys before this token as -1, and no block."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    keys, values = (torch.randn(12, PAGE, 2, 8, device=device, dtype=dtype) for _ in range(2))
    q = torch.randn(4, 4, 8, device=device, dtype=dtype)
    k, v = (torch.randn(4, 2, 8, device=device, dtype=dtype) for _ in range(2))
    lengths = [random.randrange(1, 3 * PAGE + 1) for _ in range(3)]
    table = torch.full((4, 4), -1, dtype=torch.int32, device=device)
    order = torch.randperm(12, device=device).int()
    for b, length in enumerate(lengths):
        blocks = -(-length // PAGE)
        table[b, :blocks] = order[3 * b : 3 * b + blocks]
    cu_k = torch.tensor([0, *lengths, 0], device=device).cumsum(0).int()
    before = keys.clone(), values.clone()
    o = continuous._by_blocks(q, k, v, (keys, values), table, cu_k, options(None))
    written = 0
    for b, length in enumerate(lengths):
        whole = [x[table[b, : -(-length // PAGE)].long()].flatten(0, 1)[:length] for x in (keys, values)]
        assert torch.equal(whole[0][-1], k[b]) and torch.equal(whole[1][-1], v[b])
        near(o[b : b + 1], attention_of(q[b : b + 1], *whole, None).to(dtype))
        written += 1
    assert int((keys != before[0]).any(-1).any(-1).sum()) == written == int((values != before[1]).any(-1).any(-1).sum())
    assert not o[3].any()


# ---- what is refused


@pytest.fixture
def paged_llama() -> Iterator[Any]:
    model = transformers.AutoModelForCausalLM.from_config(llama(), attn_implementation="tessera").eval()
    model.set_attn_implementation("tessera_paged")
    yield model


def test_refusals(paged_llama: Any) -> None:
    """Outside of continuous batching the paged implementation would see everything."""
    with pytest.raises(ValueError, match="cache is no PagedAttentionCache"):
        paged_llama(tokens("cpu"))
    x = torch.zeros(1, 2, 3, 8)
    cache = object.__new__(transformers.generation.continuous_batching.PagedAttentionCache)
    for more, error in (
        ({"attention_mask": x}, "attention_mask"),
        ({"attention_mask": None, "dropout": 0.1}, "dropout"),
    ):
        with pytest.raises((ValueError, NotImplementedError), match=error):
            continuous.paged_forward(SimpleNamespace(), x, x, x, cache=cache, **more)


def test_other_implementations_are_left_alone(device: str) -> None:
    """Watching continuous batching changes nothing for transformers' own."""
    eager, _ = both(llama, device)
    text = prompts()[0]
    (result,) = generated(eager, [text])
    if device == "cpu":
        assert result.generated_tokens == alone(eager, text)[0]
