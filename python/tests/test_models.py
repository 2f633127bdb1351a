"""attn_implementation="tessera" against "eager", for every model type of models.py that this transformers has.

Eager's float32 on the CPU is the baseline: at tokens that are no padding, results may differ by 1e-4 of the largest
value, gradients by 1e-3. The checks are functions of their own, which bench/huggingface_models.py calls for its table.
"""

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

from models import BATCH, LENGTH, LENGTHS, MODELS, PACKED, Model, text_and_image, tokens  # noqa: E402

import tessera.transformers as hf  # noqa: E402

NEW = 5  # words to generate


class Wrong(AssertionError):
    """Tessera's result is not eager's."""


class EagerFails(Exception):
    """There is nothing to compare with."""


class Pair:
    """The same model, eager and Tessera's.

    Attributes:
        model: its type.
        nets: "eager" and "tessera", made by transformers, and of the same weights.
        warned: classes of the warnings of Tessera that were raised.
    """

    def __init__(self, model: Model) -> None:
        self.model, self.warned = model, set[type]()
        with self._watched():
            self.nets = {name: self._made(name) for name in ("eager", "tessera")}
        self.config = self.nets["eager"].config
        for parameter in self.nets["eager"].parameters():
            if not parameter.any():  # biases, sinks and whatever else begins as nothing
                torch.nn.init.normal_(parameter, std=0.2)
        self.nets["tessera"].load_state_dict(self.nets["eager"].state_dict())

    def _made(self, name: str) -> Any:
        made = getattr(transformers, self.model.auto).from_config(self.model.make(), attn_implementation=name)
        return made.float().eval()

    @contextmanager
    def _watched(self) -> Iterator[None]:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            yield
        self.warned |= {warning.category for warning in seen} & {hf.QuadraticMaskWarning, hf.OwnAttentionWarning}

    def call(self, name: str, function: Callable[[Any], Any]) -> Any:
        try:
            with self._watched():
                return function(self.nets[name])
        except Exception as error:
            if name == "eager":
                raise EagerFails(f"{type(error).__name__}: {error}") from error
            raise

    def run(self, name: str, **inputs: Any) -> Tensor:
        """Logits, or what a model without them has."""
        if self.model.kind == "decoder" or "decoder_input_ids" in inputs:
            inputs["use_cache"] = False
        made = self.call(name, lambda net: net(**inputs))
        outputs = ("logits", "logits_per_image", "last_hidden_state")
        return next(made[output] for output in outputs if made.get(output) is not None)

    def inputs(self) -> dict[str, Tensor]:
        return self.model.inputs(self.config)

    def padded(self, side: str) -> tuple[dict[str, Tensor], Any] | None:
        """Inputs that say what is padding, and where outputs are none. None: this model has no padding on that side."""
        kind, inputs = self.model.kind, self.inputs()

        def ends(length: int, scale: int = 1) -> Tensor:
            at, lengths = torch.arange(length), scale * torch.tensor(LENGTHS)[:, None].clamp(max=length // scale)
            return (at >= length - lengths if side == "left" else at < lengths).long()

        if kind == "vision" or (side == "right" and kind == "multimodal") or (side == "left" and kind == "speech"):
            return None
        if "decoder_input_ids" in inputs:
            real = inputs["decoder_attention_mask"] = ends(LENGTH - 4)
            if "input_ids" in inputs:
                inputs["attention_mask"] = ends(LENGTH)
            elif self.config.model_type != "whisper":
                inputs["attention_mask"] = ends(4 * LENGTH, 4)
        elif "input_values" in inputs:
            mask = inputs["attention_mask"] = ends(300, 12)
            length = int(self.nets["eager"]._get_feat_extract_output_lengths(300))
            real = self.nets["eager"]._get_feature_vector_attention_mask(length, mask)
        else:
            real = inputs["attention_mask"] = ends(LENGTH)
        return inputs, ... if self.model.inputs is text_and_image else real.bool()


@contextmanager
def instead(function: Callable[..., Any]) -> Iterator[None]:
    """With that function in the place of Tessera's attention of a layer."""
    transformers.AttentionInterface.register("tessera", function)
    try:
        yield
    finally:
        transformers.AttentionInterface.register("tessera", hf.attention_forward)


def off(ours: Tensor, eager: Tensor, at: Any = ...) -> float:
    """The largest difference as a share of the largest value."""
    ours, eager = ours.detach()[at], eager.detach()[at]
    return float((ours - eager).abs().max() / eager.abs().max()) if bool(ours.isfinite().all()) else float("inf")


def agree(ours: Tensor, eager: Tensor, at: Any = ...) -> None:
    difference = off(ours, eager, at)
    if not difference <= 1e-4:
        raise Wrong(f"differs by {difference:.1e} of the largest value")


# ---- the checks: they raise, or return what a table says


def check_outputs(pair: Pair) -> str:
    """Without padding; and Tessera computes every attention, whose scores decide the outputs."""
    inputs, calls = pair.inputs(), 0

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return hf.attention_forward(*args, **kwargs)

    def uniform(module: Any, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        return hf.attention_forward(module, torch.zeros_like(query), *args, **kwargs)

    eager = pair.run("eager", **inputs)
    with instead(counting):
        agree(pair.run("tessera", **inputs), eager)
    if calls != pair.model.layers:
        raise Wrong(f"Tessera computed {calls} attentions, not {pair.model.layers}")
    with instead(uniform):
        if off(pair.run("tessera", **inputs), eager) < 0.01:
            raise Wrong("scores hardly matter to this model: this check says nothing")
    return "yes"


def check_padding(pair: Pair) -> str:
    """Left and right; and masks decide the outputs."""

    def unmasked(module: Any, query: Tensor, key: Tensor, value: Tensor, *mask: Any, **kwargs: Any) -> Any:
        kwargs |= {"attention_mask": None, "is_causal": False}
        return hf.attention_forward(module, query, key, value, **kwargs)

    sides = {}
    for side in ("left", "right"):
        inputs, real = pair.padded(side) or (None, None)
        if inputs is None:
            continue
        eager = pair.run("eager", **inputs)
        agree(pair.run("tessera", **inputs), eager, real)
        with instead(unmasked):
            sides[side] = off(pair.run("tessera", **inputs), eager, real)
    if sides and max(sides.values()) < 0.01:
        raise Wrong("masks hardly matter to this model: this check says nothing")
    return ", ".join(sides) or "-"


def check_gradients(pair: Pair) -> str:
    """Every parameter's, with padding on the right where there can be some."""
    inputs, real = pair.padded("right") or (pair.inputs(), ...)
    grads, weights = [], None
    for name, net in pair.nets.items():
        net.zero_grad()
        made = pair.run(name, **inputs)
        weights = torch.randn_like(made) if weights is None else weights
        (made * weights)[real].sum().backward()
        grads.append({n: p.grad for n, p in net.named_parameters() if p.grad is not None and p.numel()})
    eager, ours = grads
    if ours.keys() != eager.keys():
        raise Wrong(f"only one has a gradient of {min(ours.keys() ^ eager.keys())}")
    largest = max(float(grad.abs().max()) for grad in eager.values())
    for name, grad in eager.items():
        # Some are nothing but rounding: what moves all scores of a row alike changes no weight.
        difference = float((ours[name] - grad).abs().max() / (grad.abs().max() + 0.01 * largest))
        if not difference <= 1e-3:
            raise Wrong(f"gradient of {name} differs by {difference:.1e} of its largest value")
    return "yes"


def check_generate(pair: Pair, **more: Any) -> str:
    """Greedy words after a prompt with padding, and the logits they are chosen by, up to one that rounding chose."""
    if pair.model.kind == "encoder" or not pair.nets["eager"].can_generate():
        return "-"
    decoder = pair.model.kind in ("decoder", "multimodal")
    padded, _ = pair.padded("left" if decoder else "right") or (pair.inputs(), ...)
    inputs = {name: x for name, x in padded.items() if not name.startswith("decoder_")}
    more |= {"max_new_tokens": NEW, "do_sample": False, "disable_compile": True, "pad_token_id": 0}
    more |= {"output_logits": True, "return_dict_in_generate": True}
    more |= {} if decoder else {"decoder_start_token_id": 0}
    # Whisper's own generate() wants to know languages.
    generate = transformers.GenerationMixin.generate
    eager, ours = (pair.call(name, lambda net: generate(net, **inputs, **more)) for name in pair.nets)
    begin = eager.sequences.shape[1] - len(eager.logits)
    same = torch.ones(BATCH, dtype=torch.bool)
    for i, (x, y) in enumerate(zip(ours.logits, eager.logits, strict=True)):
        agree(x, y, same)
        ours_word, word = ours.sequences[:, begin + i], eager.sequences[:, begin + i]
        best, second = y.topk(2).values.T
        if bool(((ours_word != word) & same & (best - second > 2e-4 * y.abs().max())).any()):
            raise Wrong(f"word {i} is another")
        same &= ours_word == word
        if not bool(same.any()):
            break
    return "yes"


def check_static_cache(pair: Pair) -> str:
    """The same with a static cache, where transformers says that the model has one."""
    if not pair.nets["eager"]._can_compile_fullgraph:
        return "-"
    return check_generate(pair, cache_implementation="static")


def check_packed(pair: Pair) -> str:
    """Sequences one after another, told apart by positions that begin anew."""
    if pair.model.kind != "decoder" or "position_ids" not in inspect.signature(pair.nets["eager"].forward).parameters:
        return "-"
    ids, positions = tokens(2, sum(PACKED)), torch.cat([torch.arange(n) for n in PACKED])[None].expand(2, -1)
    eager, ours = (pair.run(name, input_ids=ids, position_ids=positions) for name in pair.nets)
    agree(ours, eager)
    alone = torch.cat([pair.run("eager", input_ids=x) for x in ids.split(PACKED, 1)], 1)
    return "yes" if off(eager, alone) <= 1e-4 else "mixed, as eager"


CHECKS: dict[str, Callable[[Pair], str]] = {
    "outputs": check_outputs, "padding": check_padding, "gradients": check_gradients, "generate": check_generate,
    "static cache": check_static_cache, "packed": check_packed,
}  # fmt: skip


def refusal(model: Model) -> str | None:
    """What Tessera says when it refuses the model: when it is made, or else when it is called. None if it does not."""
    try:
        pair = Pair(model)
    except ValueError as error:
        return str(error)
    try:
        pair.run("tessera", **pair.inputs())
    except NotImplementedError as error:
        return str(error)
    return None


# ---- the tests

# Faults of transformers, in some versions: eager fails; a mask for one word has one element, not one for each key.
# Eager spreads it over all keys, padding included; Tessera may refuse it.
EAGER_FAILS = {("llama4_text", "static cache")}
if transformers.__version__ in ("5.20.1", "5.20.2"):
    EAGER_FAILS |= {("smolvlm", name) for name in CHECKS}
SHORT_MASK = {("minimax", "generate"), ("recurrent_gemma", "generate")}
# Refused when they are called, since they tell attention what Tessera does not do; all others when they are made.
REFUSED_WHEN_CALLED = {
    "deepseek_v32": "indices is given", "glm_moe_dsa": "indices is given", "hy_v4": "indices is given",
    "inkling2_text": "sinks is given",
}  # fmt: skip


def ids(model: Model) -> str:
    return model.name.replace(", ", "-").replace(" ", "-")


@pytest.mark.parametrize("model", [model for model in MODELS if not model.refused], ids=ids)
def test_like_eager(model: Model) -> None:
    """Every check; no mask of elements, and no layer with an attention of its own, that the list does not know of."""
    if not model.there:
        pytest.skip(f"transformers {transformers.__version__} has no {model.config}")
    pair = Pair(model)
    for name, check in CHECKS.items():
        try:
            check(pair)
        except EagerFails:
            assert (model.name, name) in EAGER_FAILS
        except (ValueError, NotImplementedError):
            if (model.name, name) not in SHORT_MASK:
                raise
        except Wrong as wrong:
            pytest.fail(f"{name}: {wrong}")
    assert (hf.QuadraticMaskWarning in pair.warned) == model.quadratic
    assert (hf.OwnAttentionWarning in pair.warned) == model.own_layers


@pytest.mark.parametrize("model", [model for model in MODELS if model.refused], ids=ids)
def test_refused(model: Model) -> None:
    """With a sentence that names the class or the argument: never a result of another attention."""
    if not model.there:
        pytest.skip(f"transformers {transformers.__version__} has no {model.config}")
    said = refusal(model)
    assert said is not None, "made and run"
    reason = "does not leave its attention to transformers' AttentionInterface"
    assert REFUSED_WHEN_CALLED.get(model.name, reason) in said
