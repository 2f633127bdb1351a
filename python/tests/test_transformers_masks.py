"""The masks that tessera.transformers hands out, by themselves: what they hide, which have no elements, and that nobody
computes with those in silence."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

from test_transformers import BATCH, exact_forward, exact_mask, no_quadratic_masks, types  # noqa: E402, F401
from transformers import masking_utils as masks  # noqa: E402

import tessera.transformers as hf  # noqa: E402
from tessera.transformers import Mask, QuadraticMaskWarning  # noqa: E402


def visible(device: str, mask_function: Any, **arguments: Any) -> tuple[Any, Tensor, Tensor]:
    """What `attention_mask` gives; what `attention_forward` computes with it, and what a matrix gives."""
    b, rows, keys = (arguments[n] for n in ("batch_size", "q_length", "kv_length"))
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    q, k, v = (torch.randn(b, 2, n, 8, dtype=dtype, device=device) for n in (rows, keys, keys))
    mask = hf.attention_mask(mask_function=mask_function, device=device, dtype=dtype, **arguments)
    module = torch.nn.Module()
    module.is_causal = arguments.get("allow_is_causal_skip", True)  # type: ignore[assignment]
    ours, _ = hf.attention_forward(module, q, k, v, mask)
    elements = exact_mask(mask_function=mask_function, device=device, **arguments)
    exact, _ = exact_forward(module, q.double(), k.double(), v.double(), elements)
    seen = elements.any(-1)[:, 0, :, None, None]
    return mask, ours, exact.where(seen, 0.0)


def agree(ours: Tensor, exact: Tensor, rows: Tensor | None = None) -> None:
    at = ... if rows is None else rows
    torch.testing.assert_close(ours[at].double(), exact[at], **(
        {"rtol": 1e-4, "atol": 1e-5} if ours.dtype is torch.float32 else {"rtol": 0.03, "atol": 0.03}
    ))  # fmt: skip


FUNCTIONS: dict[str, Callable[[str], Any]] = {
    "causal": lambda device: masks.causal_mask_function,
    "window": lambda device: masks.sliding_window_causal_mask_function(random_size()),
    "full": lambda device: masks.bidirectional_mask_function,
    "full window": lambda device: masks.sliding_window_bidirectional_mask_function(random_size()),
    "chunks": lambda device: masks.chunked_causal_mask_function(
        5, torch.zeros(BATCH, dtype=torch.int64, device=device)
    ),
}


def random_size(low: int = 1, high: int = 12) -> int:
    return int(torch.randint(low, high, ()))


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_masks(kind: str, device: str, seed: int) -> None:
    """Any lengths, offsets and padding that caches and users come up with."""
    warnings.simplefilter("ignore", QuadraticMaskWarning)
    for trial in range(150):
        torch.manual_seed(seed + trial)
        rows, past = random_size(1, 20), random_size(0, 10) * random_size(0, 2)
        # Dynamic caches end at the last query, static ones after it; sliding ones do not begin at position 0.
        first = random_size(0, past + 1) * random_size(0, 2)
        keys = past - first + rows + random_size(0, 9) * random_size(0, 2)
        at = torch.arange(past + rows + random_size(0, 5), device=device)
        length = torch.randint(0, past + rows + 1, (BATCH, 1), device=device)
        holes = torch.rand(BATCH, len(at), device=device) < 0.8
        keep = [None, at >= length, at < length, holes][random_size(0, 4)]
        bidirectional = kind.startswith("full")
        function = FUNCTIONS[kind](device)
        q_offset = torch.tensor(past, device=device) if random_size(0, 3) == 0 else past
        mask, ours, exact = visible(
            device, function, batch_size=BATCH, q_length=rows, kv_length=keys,
            q_offset=q_offset, kv_offset=first,
            attention_mask=keep, allow_is_causal_skip=not bidirectional, allow_is_bidirectional_skip=bidirectional,
        )  # fmt: skip
        # Packed causal sequences have nothing at queries that are padding.
        cut = isinstance(mask, Mask) and mask.pieces is not None and keep is not None and kind != "full"
        agree(ours, exact, keep[:, past : past + rows] if cut else None)


def test_which_masks_have_elements(device: str) -> None:
    def ask(function: Any, rows: int = 10, keys: int = 10, **more: Any) -> Any:
        where = {"q_length": rows, "kv_length": keys, "q_offset": keys - rows, "device": device}
        return hf.attention_mask(batch_size=2, mask_function=function, **where, **more)

    right = torch.arange(10, device=device) < torch.tensor([[4], [10]], device=device)
    holes = right & (torch.arange(10, device=device) != 2)
    causal, window = masks.causal_mask_function, masks.sliding_window_causal_mask_function(3)
    full = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": True}
    wide = masks.sliding_window_causal_mask_function(10)
    for mask in (ask(causal), ask(causal, 1), ask(wide), ask(causal, attention_mask=torch.ones_like(right))):
        assert isinstance(mask, Mask) and mask.window == (-1, 0) and mask.keep is None and mask.pieces is None
    assert ask(masks.bidirectional_mask_function, **full).window == (-1, -1)
    for mask in (ask(window), ask(causal, 4), ask(window, 1)):
        assert isinstance(mask, Mask) and mask.keep is None and mask.pieces is None
    for mask in (ask(causal, attention_mask=right), ask(window, attention_mask=right)):
        assert isinstance(mask, Mask) and mask.pieces is not None
    for mask in (
        ask(causal, attention_mask=holes),
        ask(masks.bidirectional_mask_function, attention_mask=holes, **full),
    ):
        assert isinstance(mask, Mask) and mask.pieces is None and mask.keep is not None
    both = masks.and_masks(window, masks.sliding_window_causal_mask_function(5))
    assert ask(both).window == (2, 0) and ask(masks.and_masks(both, masks.sliding_window_overlay(2))).window == (1, 0)
    assert ask(causal, 1, attention_mask=right).shape == (2, 1, 1, 10)
    own = masks.or_masks(causal, lambda batch, head, q, kv: (q < 3) & (kv < 3))
    for function, more in ((own, {}), (causal, {"allow_is_causal_skip": False})):
        with pytest.warns(QuadraticMaskWarning, match="2 x 10 x 10"):
            elements = ask(function, **more)
        assert isinstance(elements, Tensor) and elements.shape == (2, 1, 10, 10)


@pytest.mark.skipif(not hasattr(masks, "remap_positions_for_packed_sequence"), reason="transformers has none")
@pytest.mark.parametrize("segments_first", [True, False])  # until transformers 5.23, and later
@pytest.mark.parametrize("counts", [True, False])
def test_positions_inside_packed_sequences(counts: bool, segments_first: bool, device: str) -> None:
    """A window over positions that count up inside each sequence is one over tokens; over others it is not."""
    positions = torch.cat([torch.arange(n, device=device) for n in (9, 1, 13)])[None].expand(2, -1).clone()
    if not counts:
        positions[1, -1] += 4
    parts = [
        masks.packed_sequence_mask_function((positions == 0).cumsum(1)),
        masks.remap_positions_for_packed_sequence(masks.sliding_window_causal_mask_function(4), positions),
    ]
    packed = masks.and_masks(*(parts if segments_first else parts[::-1]))
    where = {"batch_size": 2, "q_length": 23, "kv_length": 23, "allow_is_causal_skip": False}
    if counts:
        mask, ours, exact = visible(device, packed, **where)
        assert isinstance(mask, Mask) and mask.window == (3, 0)
    else:
        with pytest.warns(QuadraticMaskWarning):
            _, ours, exact = visible(device, packed, **where)
    agree(ours, exact)


# ---- what else may be done with a mask


def test_masks_of_other_keys_are_refused(device: str) -> None:
    """A mask of one key for many would be cut to that key, or broadcast. Only where it hides nothing is it clear."""
    q, k = (torch.randn(2, 2, n, 8, device=device, dtype=types(device)[0]) for n in (1, 5))
    module = torch.nn.Module()
    one, all_of_them = (hf.attention_mask(batch_size=2, q_length=1, kv_length=n, q_offset=n - 1) for n in (1, 5))
    assert torch.equal(*(hf.attention_forward(module, q, k, k, mask)[0] for mask in (one, all_of_them)))
    padded = torch.tensor([[False], [True]], device=device)
    element = hf.attention_mask(batch_size=2, q_length=1, kv_length=1, attention_mask=padded, device=device)
    longer = hf.attention_mask(batch_size=2, q_length=1, kv_length=6, q_offset=5)
    for mask in (element, longer, torch.zeros(2, 1, 1, 4, device=device)):
        with pytest.raises(ValueError, match="attention_mask has shape .*, but there are 5 keys"):
            hf.attention_forward(module, q, k, k, mask)


def test_masks_of_the_last_queries(device: str) -> None:
    """What models take that need the last outputs only; of other parts, and of packed sequences, there is none."""
    q, k = (torch.randn(2, 2, n, 8, device=device, dtype=types(device)[0]) for n in (6, 9))
    left = torch.arange(9, device=device) >= torch.tensor([[0], [4]], device=device)
    module = torch.nn.Module()
    for function in (masks.causal_mask_function, masks.sliding_window_causal_mask_function(4)):
        for keep in (None, left):
            mask = hf.attention_mask(
                batch_size=2, q_length=6, kv_length=9, q_offset=3, mask_function=function, attention_mask=keep,
                device=device,
            )  # fmt: skip
            whole, _ = hf.attention_forward(module, q, k, k, mask)
            every = slice(None)
            assert mask[:, :, slice(0, None), :] is mask and mask[every] is mask
            part, _ = hf.attention_forward(module, q[:, :, -2:], k, k, mask[:, :, slice(-2, None), :])
            agree(part, whole[:, -2:].double())
            for index in (
                (every, every, slice(0, 2)),
                (slice(0, 1),),
                (every, every, every, slice(3)),
                (every,) * 5,
                None,
                0,
            ):
                with pytest.raises(NotImplementedError, match="has no elements"):
                    mask[index]
    packed = masks.packed_sequence_mask_function(torch.arange(6, device=device).expand(2, -1) // 4)
    function = masks.and_masks(masks.causal_mask_function, packed)
    mask = hf.attention_mask(batch_size=2, q_length=6, kv_length=6, mask_function=function, device=device)
    with pytest.raises(NotImplementedError, match="has no elements"):
        mask[:, :, slice(-2, None)]


def test_a_window_of_no_keys(device: str) -> None:
    """Some configurations say 0 where no layer has a window. It hides everything, and costs nothing."""
    q = torch.randn(2, 2, 6, 8, device=device, dtype=types(device)[0])
    function = masks.sliding_window_causal_mask_function(0)
    mask = hf.attention_mask(batch_size=2, q_length=6, kv_length=6, mask_function=function, device=device)
    assert isinstance(mask, Mask) and not hf.attention_forward(torch.nn.Module(), q, q, q, mask)[0].any()


MISUSES: dict[str, Callable[[Tensor, Any], Any]] = {
    "index": lambda s, mask: mask[:, :, :2],
    "element": lambda s, mask: mask[0, 0],
    "sum": lambda s, mask: s + mask,
    "sum the other way": lambda s, mask: mask + s,
    "inverse": lambda s, mask: 1.0 - mask,
    "comparison": lambda s, mask: s.masked_fill(mask == 0, -1.0),
    "function": lambda s, mask: torch.where(mask, s, -1.0),
    "keyword": lambda s, mask: torch.nn.functional.scaled_dot_product_attention(s, s, s, attn_mask=mask),
    "method": lambda s, mask: s.masked_fill(~mask.bool(), -1.0),
}


@pytest.mark.parametrize("misuse", MISUSES)
def test_masks_are_not_computed_with(misuse: str, device: str) -> None:
    """What a model with an attention of its own may do with a mask never goes well in silence."""
    mask = hf.attention_mask(batch_size=1, q_length=4, kv_length=4, device=device)
    with pytest.raises((NotImplementedError, AttributeError), match="has no elements.*attn_implementation='eager'"):
        MISUSES[misuse](torch.randn(1, 2, 4, 4, device=device), mask)
