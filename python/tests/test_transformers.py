"""attn_implementation="tessera" against "eager": small models with random weights, large enough that attention matters.

The truth is the model in double, with a plain attention of its own below (transformers' eager one rounds to float32,
and has NaN where a row is empty). A result may be as far from it as the eager model of the same type, times 2, or 3 for
gradients, plus a little (docs/correctness.md). Only tokens that are no padding count. No model's activation has a kink
(ReLU, a clamp): there a rounding decides whether a gradient is passed on at all.
"""

import copy
import math
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

from transformers import masking_utils as masks  # noqa: E402

import tessera.transformers as hf  # noqa: E402
from tessera.transformers import Mask, QuadraticMaskWarning  # noqa: E402


def exact_forward(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float | None = None,
    softcap: float | None = None, s_aux: Tensor | None = None, position_bias: Tensor | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attention in double, of elements."""
    key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key, value))
    s = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    s = s if softcap is None else softcap * torch.tanh(s / softcap)
    s = s if position_bias is None else s + position_bias
    s = s if attention_mask is None else s.masked_fill(~attention_mask, -1e300)
    sink = s.new_full((1, s.shape[1], 1, 1), -1e300) if s_aux is None else s_aux.reshape(1, -1, 1, 1)
    p = torch.cat([s, sink.expand(*s.shape[:3], 1)], -1).softmax(-1)[..., :-1]
    return (p @ value).transpose(1, 2), None


def exact_mask(**arguments: Any) -> Tensor:
    skips = ("allow_is_causal_skip", "allow_is_bidirectional_skip")
    elements = masks.sdpa_mask(**{**arguments, **dict.fromkeys(skips, False)})
    assert elements is not None
    return elements


transformers.AttentionInterface.register("exact", exact_forward)
transformers.AttentionMaskInterface.register("exact", exact_mask)

BATCH, LENGTH, VOCABULARY = 3, 23, 97
WINDOW = 7

SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128,
    "initializer_range": 0.3, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


def gpt2() -> Any:
    return transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=128, n_embd=64, n_layer=2, n_head=4, initializer_range=0.3,
        bos_token_id=None, eos_token_id=None, pad_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip


def bert() -> Any:
    some = {k: v for k, v in SMALL.items() if k not in ("num_key_value_heads", "head_dim")}
    return transformers.BertConfig(**some, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)


def llama() -> Any:
    return transformers.LlamaConfig(**SMALL)


def mistral() -> Any:
    return transformers.MistralConfig(**SMALL, sliding_window=WINDOW)


def gemma2() -> Any:
    return transformers.Gemma2Config(
        **SMALL, sliding_window=WINDOW, attn_logit_softcapping=2.0, query_pre_attn_scalar=4
    )


def gpt_oss() -> Any:
    return transformers.GptOssConfig(**SMALL, sliding_window=WINDOW, num_local_experts=2, num_experts_per_tok=2)


def t5() -> Any:
    return transformers.T5Config(
        vocab_size=VOCABULARY, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, dropout_rate=0.0,
        pad_token_id=0, decoder_start_token_id=0, eos_token_id=None, relative_attention_num_buckets=8,
        relative_attention_max_distance=16, initializer_factor=1.0, feed_forward_proj="gated-gelu",
    )  # fmt: skip


DECODERS = [gpt2, llama, mistral, gemma2, gpt_oss]
CLASSES = {bert: "AutoModelForMaskedLM", t5: "AutoModelForSeq2SeqLM"}


def build(make: Callable[[], Any], device: str, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """The same model, eager and Tessera's."""
    auto = getattr(transformers, CLASSES.get(make, "AutoModelForCausalLM"))
    eager = auto.from_config(make(), attn_implementation="eager").to(device, dtype).eval()
    for name, parameter in eager.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
    if make is gpt_oss:
        eager.set_experts_implementation("eager")  # the default one has no double
        for module in eager.modules():
            if hasattr(module, "limit"):
                module.limit = math.inf
    return eager, like(eager, "tessera")


def like(model: Any, implementation: str) -> Any:
    """A copy with another attention; also inside of T5, whose halves have configurations of their own."""
    other = copy.deepcopy(model)
    for module in other.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation = implementation
    return other


def types(device: str) -> list[torch.dtype]:
    return [torch.bfloat16] if device == "cuda" else [torch.float32, torch.bfloat16]


def tokens(device: str, batch: int = BATCH, length: int = LENGTH) -> Tensor:
    return torch.randint(1, VOCABULARY, (batch, length), device=device)


def padding(side: str, device: str) -> Tensor | None:
    """(BATCH, LENGTH) of ones and zeros."""
    if side == "none":
        return None
    at = torch.arange(LENGTH, device=device)
    lengths = torch.tensor([LENGTH, LENGTH - 5, 2], device=device)[:, None]
    match side:
        case "ones":
            mask = at.expand(BATCH, -1) >= 0
        case "left":
            mask = at >= LENGTH - lengths
        case "right":
            mask = at < lengths
        case "both":
            mask = (at >= 3) & (at < 3 + lengths.clamp(max=LENGTH - 6))
        case "holes":
            mask = (at < lengths) & (at != 9) & (at != 4)
    return mask.long()


def results(model: Any, weights: Tensor | None, **inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits, and every parameter's gradient of their sum with these weights."""
    model.zero_grad()
    logits = model(**inputs, use_cache=False).logits
    if weights is None:
        return logits.detach(), {}
    (logits * weights.to(logits.dtype)).sum().backward()
    return logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def error(result: Tensor, exact: Tensor) -> float:
    """The largest of float32 results; the root mean square of bfloat16 ones, whose models round in so many places that
    the largest error of one run says little about that of another."""
    assert not result.isnan().any()
    off = (result.double() - exact).abs()
    return float(off.max() if result.dtype is torch.float32 else off.square().mean().sqrt())


def compare(eager: Any, ours: Any, real: Tensor | None = None, gradients: bool = True, **inputs: Any) -> None:
    """By the rule. real: (batch, length), where logits are compared."""
    exact = like(eager, "exact").double()
    shape = inputs["decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"].shape
    device = eager.device
    real = torch.ones(shape, device=device) if real is None else real
    weights = torch.randn(*shape, VOCABULARY, device=device) * real[..., None] if gradients else None
    (a, da), (b, db), (c, dc) = (results(m, weights, **inputs) for m in (ours, eager, exact))
    at = real.bool()
    # What one draw of a plain computation may be luckier by; mistakes are off by tenths.
    slack = 5e-5 if a.dtype is torch.float32 else 4e-3
    assert error(a[at], c[at]) <= 2 * error(b[at], c[at]) + slack * float(c[at].abs().max())
    if not gradients:
        return
    # The key's bias moves all scores of a row alike: its gradient is nothing but rounding.
    assert da.keys() == db.keys() == dc.keys()
    da, db, dc = ({n: d for n, d in grads.items() if not n.endswith("key.bias")} for grads in (da, db, dc))
    if a.dtype is torch.bfloat16:
        da, db, dc = ({"all": torch.cat([d.flatten() for d in grads.values()])} for grads in (da, db, dc))
    largest = max(float(d.abs().max()) for d in dc.values())
    for name in dc:
        floor = 2e-4 * float(dc[name].abs().max()) + 5e-6 * largest
        if a.dtype is torch.bfloat16:
            floor = 0.02 * float(dc[name].square().mean().sqrt())
        assert error(da[name], dc[name]) <= 3 * error(db[name], dc[name]) + floor, name


def near(ours: Tensor, eager: Tensor) -> None:
    """Without the truth: by tolerances."""
    largest = float(eager.detach().abs().max())
    assert error(ours.detach(), eager.detach().double()) <= (1e-4 if ours.dtype is torch.float32 else 0.05) * largest


def same_words(ours: Any, eager: Any, prompt: int = LENGTH) -> None:
    """What generate() returns with its logits, up to the first word on which rounding may have decided. Sequences begin
    with the prompt."""
    tolerance = 1e-4 if ours.logits[0].device.type == "cpu" else 0.2
    for i, (x, y) in enumerate(zip(ours.logits, eager.logits, strict=True)):
        off = error(x.float(), y.double())
        assert off <= tolerance * float(y.abs().max()), f"token {i}"
        a, b = ours.sequences[:, prompt + i], eager.sequences[:, prompt + i]
        for row in (a != b).nonzero().flatten().tolist():  # which word is greatest may be rounding's choice, no other's
            assert float(y[row, b[row]] - y[row, a[row]]) <= 2 * off, f"token {i} of sequence {row}"
        if not torch.equal(a, b):
            break


@pytest.fixture(autouse=True)
def no_quadratic_masks() -> Iterator[None]:
    """A test that lets a mask's elements be made says so."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", QuadraticMaskWarning)
        yield


# ---- whole models


@pytest.mark.parametrize("side", ["none", "ones", "left", "right", "both", "holes"])
@pytest.mark.parametrize("make", [*DECODERS, bert], ids=lambda make: make.__name__)
def test_forward_and_gradients(make: Callable[[], Any], side: str, device: str) -> None:
    for dtype in types(device):
        eager, ours = build(make, device, dtype)
        mask = padding(side, device)
        compare(eager, ours, mask, input_ids=tokens(device), attention_mask=mask)


@pytest.mark.parametrize("side", ["none", "right", "holes"])
def test_encoder_decoder(side: str, device: str) -> None:
    """Position biases, and cross attention whose queries are as many as the keys but are not padded like them."""
    eager, ours = build(t5, device, types(device)[0])
    mask = padding(side, device)
    compare(eager, ours, input_ids=tokens(device), attention_mask=mask, decoder_input_ids=tokens(device))


def test_sequences_packed_by_positions(device: str) -> None:
    """Positions that begin anew, and nothing else, tell where a sequence begins."""
    positions = torch.cat([torch.arange(n, device=device) for n in (9, 1, 13)])[None].expand(2, -1)
    for make in (llama, gemma2):
        eager, ours = build(make, device, types(device)[0])
        compare(eager, ours, input_ids=tokens(device, 2), position_ids=positions)


def test_sequences_packed_by_the_collator(device: str) -> None:
    """Against one sequence at a time: not every eager model reads what the collator gives."""
    collate = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_tensors="pt")
    rows = [{"input_ids": tokens("cpu", 1, n)[0].tolist()} for n in (9, 1, 13)]
    batch = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in collate(rows).items() if k != "labels"}
    for make in (llama, gemma2, gpt_oss):
        eager, ours = build(make, device, types(device)[0])
        alone = [eager(torch.tensor([row["input_ids"]], device=device), use_cache=False).logits for row in rows]
        near(ours(**batch, use_cache=False).logits, torch.cat(alone, 1))


@pytest.mark.parametrize("cache", ["dynamic", "static", "offloaded_static"])
@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("make", DECODERS, ids=lambda make: make.__name__)
def test_generation(make: Callable[[], Any], side: str, cache: str, device: str) -> None:
    if cache == "offloaded_static" and device == "cpu":
        pytest.skip("transformers offloads from a GPU only")
    eager, ours = build(make, device, torch.float32 if device == "cpu" else torch.bfloat16)
    arguments = {
        "input_ids": tokens(device), "attention_mask": padding(side, device), "max_new_tokens": 12, "do_sample": False,
        "output_logits": True, "return_dict_in_generate": True, "disable_compile": True,
    }  # fmt: skip
    if cache != "dynamic":
        arguments["cache_implementation"] = cache
    try:
        b = eager.generate(**arguments)
    except ValueError as error:
        # Where every layer has a window, transformers (5.17) finds no layer to offload.
        if cache == "offloaded_static" and make is mistral:
            pytest.skip(f"transformers' eager model cannot do it either: {error}")
        raise
    same_words(ours.generate(**arguments), b)


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("make", [llama, gemma2], ids=lambda make: make.__name__)
def test_chunks(make: Callable[[], Any], cache: str, side: str, device: str) -> None:
    """Several queries after a cache that is filled in part; how far a static one is, only the device knows.

    Padding on the right becomes a hole when tokens follow it.
    """
    eager, ours = build(make, device, types(device)[0])
    ids, mask = tokens(device), padding(side, device)
    mask = torch.ones_like(ids) if mask is None else mask
    ids, mask = (torch.cat([x, y[:, :9]], 1) for x, y in ((ids, tokens(device)), (mask, torch.ones_like(mask))))
    results = []
    for model in (ours, eager):
        past = transformers.StaticCache(config=model.config, max_cache_len=40) if cache == "static" else None
        past = transformers.DynamicCache(config=model.config) if past is None else past
        ends = [0, LENGTH - 9, LENGTH, LENGTH + 1, LENGTH + 2, LENGTH + 9]
        with torch.no_grad():
            chunks = [
                model(input_ids=ids[:, at:to], attention_mask=mask[:, :to], past_key_values=past).logits
                for at, to in zip(ends[:-1], ends[1:], strict=True)
            ]
        results.append(torch.cat(chunks, 1)[mask.bool()])
    near(*results)


# ---- under torch.compile


@pytest.mark.parametrize(
    ("make", "side"), [(llama, "none"), (llama, "left"), (gemma2, "holes"), (bert, "none"), (bert, "right")]
)
def test_compiled(make: Callable[[], Any], side: str, device: str) -> None:
    """One graph, and no look at the mask. Without a mask transformers assumes packed sequences, which are quadratic."""
    eager, ours = build(make, device, types(device)[0])
    ids, mask = tokens(device), padding(side, device)
    real = torch.ones_like(ids) if mask is None else mask
    torch._dynamo.reset()
    compiled = torch.compile(lambda ids, mask: ours(ids, attention_mask=mask, use_cache=False).logits, fullgraph=True,
                             backend="aot_eager")  # fmt: skip
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", QuadraticMaskWarning)
        a = compiled(ids, mask)
    quadratic = [w for w in caught if w.category is QuadraticMaskWarning]
    assert len(quadratic) == (1 if make is llama and mask is None else 0)
    a.square().mean().backward()
    b = eager(ids, attention_mask=mask, use_cache=False).logits
    at = real.bool()
    near(a[at], b[at])


def test_compiled_decoding_with_a_static_cache(device: str) -> None:
    eager, ours = build(llama, device, types(device)[0])
    arguments = {
        "max_new_tokens": 4, "do_sample": False, "cache_implementation": "static",
        "output_logits": True, "return_dict_in_generate": True,
    }  # fmt: skip
    ids, mask = tokens(device, 2), padding("left", device)[:2]
    torch._dynamo.reset()
    expected = eager.generate(ids, attention_mask=mask, **arguments, disable_compile=True)
    compiled = transformers.CompileConfig(backend="aot_eager", mode=None, fullgraph=True)
    compiled._compile_all_devices = True
    same_words(ours.generate(ids, attention_mask=mask, **arguments, compile_config=compiled), expected)


def test_chunks_compiled(device: str) -> None:
    """A mask function that holds a tensor, which torch.compile cannot be asked about."""
    config = SimpleNamespace(attention_chunk_size=5)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def elements(left: Tensor) -> Any:
        where = {"q_length": 12, "kv_length": 12, "device": device, "config": config}
        return hf.attention_mask(batch_size=2, mask_function=masks.chunked_causal_mask_function(5, left), **where)

    torch._dynamo.reset()
    with pytest.warns(QuadraticMaskWarning):
        bias = elements(torch.tensor([0, 3], device=device))
    at = torch.arange(12, device=device)
    left = torch.tensor([0, 3], device=device)[:, None, None]
    visible = ((at - left) // 5 == (at[:, None] - left) // 5) & (at <= at[:, None])
    assert torch.equal(bias[:, 0] == 0, visible)


def test_own_mask_function(device: str) -> None:
    eager, ours = build(llama, device, types(device)[0])
    ids = tokens(device)
    b, a = (
        model(
            ids, use_cache=False,
            attention_mask=masks.create_causal_mask(
                config=model.config, inputs_embeds=model.get_input_embeddings()(ids), attention_mask=None,
                past_key_values=None, or_mask_function=lambda batch, head, q, kv: (q < 6) & (kv < 6),
            ),
        ).logits
        for model in _warned(eager, ours)
    )  # fmt: skip
    near(a, b)


def _warned(*models: Any) -> Iterator[Any]:
    warnings.simplefilter("ignore", QuadraticMaskWarning)
    yield from models


def test_mask_of_elements_from_the_user(device: str) -> None:
    eager, ours = build(gemma2, device, types(device)[0])
    mask = torch.rand(BATCH, 1, LENGTH, LENGTH, device=device) < 0.5
    mask |= torch.eye(LENGTH, dtype=torch.bool, device=device)
    low = torch.zeros(mask.shape, dtype=eager.dtype, device=device).masked_fill(~mask, torch.finfo(eager.dtype).min)
    ids = tokens(device)
    b = eager(ids, attention_mask=low, use_cache=False).logits
    for given in (low, mask):
        a = ours(ids, attention_mask=given, use_cache=False).logits
        near(a, b)


# ---- training


def test_dropout(device: str) -> None:
    """Off in evaluation; in training it comes from torch's generator."""
    config = llama()
    config.attention_dropout = 0.3
    ours = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="tessera")
    ours, ids = ours.to(device, types(device)[0]), tokens(device)
    runs = []
    for training, number in ((True, 1), (True, 1), (True, 2), (False, 1), (False, 2)):
        torch.manual_seed(number)
        runs.append(ours.train(training)(ids).logits)
    assert torch.equal(runs[0], runs[1]) and torch.equal(runs[3], runs[4])
    assert not torch.equal(runs[0], runs[2]) and not torch.equal(runs[0], runs[3])


def test_gradient_checkpointing_and_autocast(device: str) -> None:
    _, ours = build(llama, device)
    ids, mask = tokens(device), padding("left", device)
    at = mask.bool()
    grads = []
    for checkpointing in (False, True):
        if checkpointing:
            ours.train().gradient_checkpointing_enable()
        ours.zero_grad()
        with torch.autocast(device, torch.bfloat16):
            logits = ours(ids, attention_mask=mask, use_cache=False).logits
        logits[at].float().square().mean().backward()
        grads.append(ours.model.layers[0].self_attn.q_proj.weight.grad.clone())
    torch.testing.assert_close(*grads, atol=0.0 if device == "cpu" else 0.01, rtol=0.0)
    assert grads[0].abs().max() > 0.01  # of the order of 0.1


# ---- what is refused


def test_refusals(device: str) -> None:
    q = torch.randn(1, 2, 4, 8, device=device, dtype=types(device)[0])
    refused = {"output_attentions": True} | dict.fromkeys(("head_mask", "block_indices", "indices", "sinks"), q)
    for name, argument in refused.items():
        with pytest.raises(NotImplementedError, match=f"{name} is given"):
            hf.attention_forward(torch.nn.Module(), q, q, q, None, **{name: argument})
    hf.attention_forward(torch.nn.Module(), q, q, q, None, position_ids=q, output_attentions=False, head_mask=None)
    cu_seqlens = torch.tensor([0, 4], device=device)
    with pytest.raises(ValueError, match="cu_seq_lens_q is given together with a 4-D attention_mask"):
        hf.attention_forward(
            torch.nn.Module(), q, q, q, torch.ones(1, 1, 4, 4, device=device), cu_seq_lens_q=cu_seqlens
        )
    mask = Mask((1, 1, 4, 4), 4, (-1, 0), "bottom_right")
    assert "window=(-1, 0)" in repr(mask) and mask.to(device).shape == (1, 1, 4, 4) and mask.ndim == mask.dim() == 4
    assert mask.size() == mask.shape and mask.size(-1) == 4 and mask.contiguous() is mask


# ---- models with attention of their own

OWN: dict[str, dict[str, Any]] = {
    "Bloom": {"hidden_size": 32, "n_layer": 1, "n_head": 2},
    "Falcon": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
    "GPTNeo": {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "attention_types": [[["global"], 1]]},
    "MPNet": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32},
    "Mpt": {"d_model": 32, "n_heads": 2, "n_layers": 1},
    "DebertaV2": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32},
}


@pytest.mark.parametrize("name", OWN)
def test_models_with_attention_of_their_own_are_refused(name: str) -> None:
    """By name, when they are made and when an implementation is chosen later; so are classes derived from them."""
    config = getattr(transformers, f"{name}Config")(**OWN[name], vocab_size=VOCABULARY)
    refusal = rf"attn_implementation = 'tessera': {name}Model .*AttentionInterface .*Attention.*'eager'"
    with pytest.raises(ValueError, match=refusal):
        transformers.AutoModel.from_config(config, attn_implementation="tessera")
    model = transformers.AutoModel.from_config(config, attn_implementation="eager")
    with pytest.raises(ValueError, match=refusal):
        model.set_attn_implementation("tessera")
    derived = type("Derived", (type(model),), {"__module__": __name__})
    config._attn_implementation = "tessera"
    with pytest.raises(ValueError, match="'tessera': Derived"):
        derived(config)


def test_models_chosen_later(device: str) -> None:
    """What is not refused is computed by Tessera from then on."""
    eager, _ = build(llama, device, types(device)[0])
    other = copy.deepcopy(eager)
    other.set_attn_implementation("tessera")
    assert other.config._attn_implementation == "tessera"
    ids = tokens(device)
    near(other(ids, use_cache=False).logits, eager(ids, use_cache=False).logits)


def test_layers_with_attention_of_their_own_are_named() -> None:
    """In a model most of whose attention is Tessera's."""
    config = transformers.LongT5Config(vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    with pytest.warns(hf.OwnAttentionWarning, match="LongT5Stack has layers .*: LongT5LocalAttention"):
        transformers.AutoModel.from_config(config, attn_implementation="tessera")
    with warnings.catch_warnings():
        warnings.simplefilter("error", hf.OwnAttentionWarning)
        for make in (llama, bert, t5):
            transformers.AutoModel.from_config(make(), attn_implementation="tessera")
