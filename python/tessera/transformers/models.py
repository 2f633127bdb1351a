"""Which models can be computed: those whose attention goes through transformers' AttentionInterface.

transformers makes a model with any attn_implementation that is registered, also where the model's code never asks for
one: then the model fails somewhere, keeps its own attention without a word, or takes a mask for what it is not. So the
check is made here, where transformers decides on an implementation and refuses its own "sdpa".
"""

import functools
import inspect
import re
import sys
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from torch import nn
from transformers import PreTrainedModel

# What a class or module that uses the interface has in its source.
_INTERFACE = ("ALL_ATTENTION_FUNCTIONS", "AttentionInterface")
# What a layer that computes attention has in its source: one of these, in any case.
_ATTENTION = ("softmax", "scaled_dot_product_attention")


class OwnAttentionWarning(UserWarning):
    """Some layers of a model compute an attention of their own, which Tessera does not replace."""


@functools.cache
def _source(thing: ModuleType | type) -> str:
    """Of a module or class; nothing where there is none to read, as in a notebook."""
    try:
        return inspect.getsource(thing)
    except (OSError, TypeError):
        return ""


def _has(source: str, words: tuple[str, ...]) -> bool:
    return any(word in source for word in words)


def _layers(cls: type) -> Iterator[type]:
    """A class of layers, and what it inherits from outside of torch."""
    return (base for base in cls.__mro__ if issubclass(base, nn.Module) and not base.__module__.startswith("torch."))


@functools.cache
def _obstacle(model: Any) -> str | None:
    """Why a model's attention is not all that the interface computes; None if it is."""
    for cls in _layers(model):
        module = sys.modules.get(cls.__module__)
        if cls is PreTrainedModel or module is None or not issubclass(cls, PreTrainedModel):
            continue
        if re.search(r"isinstance\([^()]*BlockMask", _source(module)):
            return "its code treats a mask without elements as one of flex_attention"
        found = [
            thing
            for thing in vars(module).values()
            if isinstance(thing, type)
            and issubclass(thing, nn.Module)
            and not issubclass(thing, PreTrainedModel)
            and not thing.__module__.startswith("torch.")
            and "Attention" in thing.__name__
        ]
        used = {sys.modules.get(base.__module__) for thing in found for base in _layers(thing)} | {module}
        sources = [_source(each) if each else "" for each in used]
        if found and all(source and not _has(source, _INTERFACE) for source in sources):
            return f"{found[0].__name__} is an attention of its own"
    return None


def refuse_own_attention(model: Any, name: str) -> None:
    """Raises ValueError if attention of the model does not go through transformers' AttentionInterface.

    Args:
        model: the class.
        name: the attn_implementation that is asked for.
    """
    obstacle = _obstacle(model)
    if obstacle is not None:
        others = "'eager' or 'sdpa'" if getattr(model, "_supports_sdpa", False) else "'eager'"
        raise ValueError(
            f"attn_implementation = {name!r}: {model.__name__} does not leave its attention to transformers' "
            f"AttentionInterface ({obstacle}), so Tessera cannot compute it: use attn_implementation={others}; where "
            f"this is one part of a model, name the others, e.g. attn_implementation={{'text_config': {name!r}}}"
        )


def _warn_of_own_layers(model: PreTrainedModel, name: str) -> None:
    """Says which layers of a model, beside those that use the interface, compute an attention of their own."""
    kinds: set[Any] = {type(layer) for layer in _layers_of(model)}
    own = sorted(kind.__name__ for kind in kinds if _computes_attention(kind))
    if own:
        warnings.warn(
            f"attn_implementation = {name!r}: {type(model).__name__} has layers that compute an attention of their "
            f"own, which Tessera does not replace: {', '.join(own)}",
            OwnAttentionWarning,
            stacklevel=4,
        )


def _layers_of(model: nn.Module) -> Iterator[nn.Module]:
    """Without those of the models inside, which have spoken for themselves."""
    for layer in model.children():
        if not isinstance(layer, PreTrainedModel):
            yield layer
            yield from _layers_of(layer)


@functools.cache
def _computes_attention(layer: Any) -> bool:
    if "Attention" not in layer.__name__:
        return False
    source = "".join(_source(base) for base in _layers(layer))
    return _has(source.lower(), _ATTENTION) and not _has(source, _INTERFACE)


_names: set[str] = set()


def guard(name: str) -> None:
    """From now on, refuse models for attn_implementation=name that it would not compute."""
    if not _names:
        _watch()
    _names.add(name)


def _watch() -> None:
    """transformers has no place to register such a check."""
    decide, made, change = (
        PreTrainedModel.get_correct_attn_implementation,
        PreTrainedModel.post_init,
        PreTrainedModel.set_attn_implementation,
    )

    @functools.wraps(decide)
    def get_correct_attn_implementation(self: Any, requested_attention: str | None, *args: Any, **more: Any) -> str:
        if requested_attention in _names:
            refuse_own_attention(type(self), requested_attention)
        return decide(self, requested_attention, *args, **more)

    @functools.wraps(made)
    def post_init(self: Any, *args: Any, **more: Any) -> Any:
        result = made(self, *args, **more)
        if self.config._attn_implementation in _names:
            _warn_of_own_layers(self, self.config._attn_implementation)
        return result

    @functools.wraps(change)
    def set_attn_implementation(self: Any, attn_implementation: Any, *args: Any, **more: Any) -> Any:
        if isinstance(attn_implementation, str) and attn_implementation in _names:
            for part in self.modules():
                if isinstance(part, PreTrainedModel):
                    refuse_own_attention(type(part), attn_implementation)
        return change(self, attn_implementation, *args, **more)

    for watched in (get_correct_attn_implementation, post_init, set_attn_implementation):
        setattr(PreTrainedModel, watched.__name__, watched)
