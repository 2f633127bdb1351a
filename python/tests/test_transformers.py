"""attn_implementation="tessera" against "eager": small models with random weights, large enough that attention matters.

The truth is the model in double, with a plain attention of its own below (transformers' eager one rounds to float32,
and has NaN where a row is empty). A result may be as far from it as the eager model of the same type, times 2 (gradients
3), plus a little (docs/correctness.md). Only tokens that are no padding count.
"""

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

import tessera.transformers as hf  # noqa: E402
from tessera.transformers import Mask, QuadraticMaskWarning  # noqa: E402
from transformers import masking_utils as masks  # noqa: E402



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
    return transformers.Gemma2Config(**SMALL, sliding_window=WINDOW, attn_logit_softcapping=2.0, query_pre_attn_scalar=4)


def gpt_oss() -> Any:
    return transformers.GptOssConfig(**SMALL, sliding_window=WINDOW, num_local_experts=2, num_experts_per_tok=2)


def t5() -> Any:
    return transformers.T5Config(
        vocab_size=VOCABULARY, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, dropout_rate=0.0,
        pad_token_id=0, decoder_start_token_id=0, eos_token_id=None, relative_attention_num_buckets=8,
        relative_attention_max_distance=16, initializer_factor=3.0,
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
    ours = copy.deepcopy(eager)
    ours.set_attn_implementation("tessera")
    return eager, ours


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
            mask = (at >= 3) & (at < 3 + lengths.minimum(torch.tensor(LENGTH - 6)))
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


def check(name: str, ours: Tensor, eager: Tensor, exact: Tensor, factor: float, floor: float) -> None:
    ours, eager = ours.double(), eager.double()
    assert not ours.isnan().any(), name
    error, allowed = (ours - exact).abs().max().item(), (eager - exact).abs().max().item() * factor + floor
    assert error <= allowed, f"{name}: error {error:.2e}, allowed {allowed:.2e}"


def compare(eager: Any, ours: Any, real: Tensor | None = None, gradients: bool = True, **inputs: Any) -> None:
    """By the rule. real: (batch, length), where logits are compared."""
    exact = copy.deepcopy(eager).double()
    exact.set_attn_implementation("exact")
    shape = inputs["decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"].shape
    device = eager.device
    real = torch.ones(shape, device=device) if real is None else real
    weights = torch.randn(*shape, VOCABULARY, device=device) * real[..., None] if gradients else None
    (a, da), (b, db), (c, dc) = (results(m, weights, **inputs) for m in (ours, eager, exact))
    at = real.bool()
    scale = c[at].abs().max().item()
    check("logits", a[at], b[at], c[at], 2, 2e-6 * scale)
    assert da.keys() == db.keys()
    for name in da:
        if name.endswith("key.bias"):  # moves all scores of a row alike: what is there is rounding
            continue
        check(name, da[name], db[name], dc[name], 3, 1e-5 * dc[name].abs().max().item() + 1e-6)


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
