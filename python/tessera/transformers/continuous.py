"""Continuous batching (`generate_batch`): attention over the pages of transformers' own cache.

transformers hands a layer the tokens of all requests in one row, and where the cache has their keys. There are three
ways, and none has a mask:

    a table of blocks   every request has one new token. New rows are appended, and pages are read where they lie.
    few queries         of each request. The numbers of the slots to be read, packed, are the one row of a page table of
                        pages of one key, in which each request begins behind the last one's: read where they lie, too.
    many queries        keys and values are gathered into packed rows, as transformers does it: a kernel that reads a
                        cache would read them once for every 16 rows. Prompts that are new need no gathering.

Layers with a window keep its keys in a ring. One new token takes the place of a key that nobody sees any more; more may
take that of one that is still needed, so then it is gathering, before they are written.

transformers knows its own implementations by name. `allow` has it take Tessera's, and treat it as it does those that
need no mask. Until 5.23 a layer is handed the cache; later its model has `cache.update` write and gather before the
layer is asked, so that has to leave both to the layer.
"""

import functools
import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.generation.continuous_batching import ContinuousBatchingManager, PagedAttentionCache
from transformers.generation.continuous_batching import cache as cb_cache
from transformers.generation.continuous_batching import initialization as cb_initialization
from transformers.utils import logging

from .. import append, attention, cached_attention
from ..torch.tensors import rows

logger = logging.get_logger(__name__)

# A kernel that reads a cache takes so many rows of queries a key/value head at a time. To gather keys costs to read
# them, to write them and to read them again.
_ROWS_OF_A_PASS, _PASSES_OF_A_COPY = 16, 3


class _Layer(NamedTuple):
    """Where a layer's keys and values lie.

    group: which of the lists of slots and of the tables of blocks are the layer's.
    kind: "full_attention" or "sliding_attention", which of the lengths are.
    window: how many keys a query sees, its own among them; None: all.
    keys, values: (slots, num_heads_k, head_dim), written and read by slot number.
    sentinel: the slot number that stands for a new token in what a layer with a window reads.
    """

    group: int
    kind: str
    window: int | None
    keys: Tensor
    values: Tensor
    sentinel: int


def _layer_of(cache: Any, index: int) -> _Layer:
    if hasattr(cache, "layer_to_allocator"):
        allocator = cache.layer_to_allocator[index]
        keys, values = allocator._kv_token_views[index]
        slots = min(keys.shape[0], values.shape[0])
        return _Layer(
            allocator.index, allocator.layer_type, getattr(allocator, "sliding_window", None), keys[:slots],
            values[:slots], allocator.sentinel_index,
        )  # fmt: skip
    group, place = cache.layer_index_to_group_indices[index]
    window = cache.sliding_windows[index]
    window = None if window == 1 else window
    return _Layer(
        group, "full_attention" if window is None else "sliding_attention", window, cache.key_cache[place],
        cache.value_cache[place], cache.sentinel_index,
    )  # fmt: skip


def _pages_of(cache: Any, index: int, layer: _Layer) -> tuple[Tensor, Tensor]:
    """(num_pages, page_size, num_heads_k, head_dim) each, as the table of blocks counts them."""
    if hasattr(cache, "layer_to_allocator"):
        pages: tuple[Tensor, Tensor] = cache.layer_to_allocator[index].get_cache_for_block_table(index)
        return pages
    shape = (-1, cache.block_size, *layer.keys.shape[1:])
    return layer.keys.view(shape), layer.values.view(shape)


def _of_kind(x: Any, kind: str) -> Any:
    """Of what there may be one for each kind of layer."""
    return x[kind] if isinstance(x, dict) else x


@torch.compiler.disable
def paged_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    cache: Any = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | dict[str, Tensor] | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | dict[str, int] | None = None,
    max_length_q: int | None = None,
    max_length_k: int | dict[str, int] | None = None,
    read_index: list[Tensor] | None = None,
    write_index: list[Tensor] | None = None,
    block_table: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention of one layer, for the tokens of a batch of requests.

    Args:
        module: the layer; its `layer_idx` says where it has its keys.
        query: (1, num_heads, tokens, head_dim). float32 (CPU only), bfloat16 or float16.
        key, value: (1, num_heads_k, tokens, head_dim or head_dim_v), of the same tokens.
        attention_mask: must be None: there is none.
        dropout: must be 0.
        scaling, softcap, s_aux: as `attention_forward` takes them.
        cache: transformers' PagedAttentionCache. New keys and values are written into it.
        cu_seq_lens_q, cu_seq_lens_k: integers (requests + 1,), where each request's tokens and keys begin; of keys one
            for each kind of layer, or one for all. Requests without tokens pad the batch.
        max_seqlen_q, max_seqlen_k: bounds of the lengths, max_length_q and max_length_k in later versions.
        read_index: for each group of layers int64 (keys,), the slots of all requests' keys with the new ones, packed;
            empty if all keys are new.
        write_index: for each group int64 (tokens,), the slots where new keys go.
        block_table: int32 (groups, requests, blocks) in place of both: every request has one token.
        kwargs: what else models hand on; not looked at.

    Returns: (1, tokens, num_heads, head_dim_v), and None in place of the weights.

    Raises:
        ValueError: there is no cache, or there is a mask.
        NotImplementedError: there is dropout; or no kernel does it.
    """
    if not isinstance(cache, PagedAttentionCache):
        raise ValueError(
            "cache is no PagedAttentionCache: must be one. Outside of continuous batching the implementation's name "
            "must be without 'paged'"
        )
    if attention_mask is not None:
        raise ValueError("attention_mask is given: must be None, for continuous batching needs no mask here")
    if dropout > 0.0:
        raise NotImplementedError(f"dropout = {dropout}: must be 0, continuous batching is for inference")
    assert cu_seq_lens_q is not None and cu_seq_lens_k is not None
    index: Any = module.layer_idx
    layer = _layer_of(cache, index)
    head_dim_v = value.shape[-1]
    if head_dim_v < layer.values.shape[-1]:
        value = torch.nn.functional.pad(value, (0, layer.values.shape[-1] - head_dim_v))
    q, k, v = (rows(x[0].transpose(0, 1)) for x in (query, key, value))
    cu_q, cu_k = (x.to(torch.int32) for x in (cu_seq_lens_q, _of_kind(cu_seq_lens_k, layer.kind)))
    longest_q = max_seqlen_q if max_length_q is None else max_length_q
    longest_k = _of_kind(max_seqlen_k if max_length_k is None else max_length_k, layer.kind)
    assert longest_q is not None
    options: dict[str, Any] = {
        "causal": True,
        "window": (-1 if layer.window is None else layer.window - 1, 0),
        "softmax_scale": scaling,
        "softcap": softcap or 0.0,
        "sink": None if s_aux is None else s_aux.reshape(-1).float(),
    }
    if block_table is not None:
        o = _by_blocks(q, k, v, _pages_of(cache, index, layer), block_table[layer.group], cu_k, options)
    else:
        assert read_index is not None and write_index is not None
        o = _by_slots(q, k, v, layer, read_index[layer.group], write_index[layer.group], cu_q, cu_k, longest_q,
                      longest_k, options)  # fmt: skip
    return o[None, ..., :head_dim_v], None


def _by_blocks(
    q: Tensor, k: Tensor, v: Tensor, pages: tuple[Tensor, Tensor], table: Tensor, cu_k: Tensor, options: dict[str, Any]
) -> Tensor:
    """One token a request, o (requests, num_heads, head_dim_v). A request that only pads the batch has -1 keys."""
    before = cu_k.diff() - 1
    o: Tensor = cached_attention(
        q[:, None], *pages, seqlens=before, lengths="before", page_table=table, k_new=k[:, None], v_new=v[:, None],
        **options,
    )  # fmt: skip
    return o[:, 0]


def _by_slots(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer: _Layer,
    read: Tensor,
    write: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    longest_q: int,
    longest_k: int,
    options: dict[str, Any],
) -> Tensor:
    """Any tokens, o (tokens, num_heads, head_dim_v)."""
    group = q.shape[1] // k.shape[1]
    in_place = longest_q * group <= _ROWS_OF_A_PASS * _PASSES_OF_A_COPY and (layer.window is None or longest_q == 1)
    new = None if layer.window is None or read.numel() == 0 else read == layer.sentinel
    gathered = None
    if new is not None and not in_place:
        gathered = [
            slots.index_select(0, read).masked_scatter(new[:, None, None], x.to(slots.dtype))
            for slots, x in ((layer.keys, k), (layer.values, v))
        ]
    append(k, v, layer.keys[None], layer.values[None], slot_mapping=write)
    padded = longest_q == q.shape[0]  # or there is one request
    if padded:
        cu_q = _with_rest(cu_q, q.shape[0])
    if read.numel() > 0 and in_place:
        table = read if new is None else read.masked_scatter(new, write)
        if padded:
            cu_k = torch.cat([cu_k, cu_k[-1:]])
        o: Tensor = cached_attention(
            q, layer.keys[:, None], layer.values[:, None], seqlens=cu_k[1:], leftpad=cu_k[:-1], page_table=table[None],
            cache_index=torch.zeros_like(cu_k[1:]), cu_seqlens_q=cu_q, max_seqlen_q=longest_q, **options,
        )  # fmt: skip
        return o
    if read.numel() > 0:
        k, v = gathered or (slots.index_select(0, read) for slots in (layer.keys, layer.values))
    if padded:
        cu_k, longest_k = _with_rest(cu_k, k.shape[0]), k.shape[0]
    o = attention(
        q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=longest_q, max_seqlen_k=longest_k, **options
    )
    return o


def _with_rest(cu_seqlens: Tensor, total: int) -> Tensor:
    """The same with one more sequence: what pads the batch behind the last request."""
    return torch.cat([cu_seqlens, cu_seqlens.new_full((1,), total)])


_names: set[str] = set()


def allow(name: str) -> None:
    """From now on, continuous batching takes models of attn_implementation=name, and of "paged|" + name."""
    if not _names:
        _watch()
    _names.add(name)
    for paged in (f"paged|{name}", _paged(name)):
        AttentionInterface.register(paged, paged_forward)


def _paged(name: str) -> str:
    """What the implementation is called meanwhile: it has no mask, and later versions drop the prefix "paged|"."""
    return f"{name}_paged"


def _is_ours(implementation: Any) -> bool:
    if not isinstance(implementation, str):
        return False
    return implementation.removeprefix("paged|") in _names or implementation in {_paged(name) for name in _names}


def _watch() -> None:
    """transformers has no place to register such an implementation. What is not there in a version is left alone."""
    switch = ContinuousBatchingManager.switch_to_cb_friendly_attn

    @functools.wraps(switch)
    def switch_to_cb_friendly_attn(self: Any, model: Any, *args: Any, **more: Any) -> None:
        name = model.config._attn_implementation
        if not _is_ours(name):
            switch(self, model, *args, **more)
        elif name.removeprefix("paged|") in _names:
            model.set_attn_implementation(_paged(name.removeprefix("paged|")))
            self._original_attn_impl = name

    setattr(ContinuousBatchingManager, switch.__name__, switch_to_cb_friendly_attn)

    # Whether there is no mask: that decides on CUDA graphs, and on how much memory is left for keys.
    for users in (cb_initialization, cb_cache):
        asked = getattr(users, "is_flash_attention_requested", None)
        if asked is not None:
            setattr(users, asked.__name__, _without_mask(asked))

    update = PagedAttentionCache.update
    if "kwargs" in inspect.signature(update).parameters:
        setattr(PagedAttentionCache, update.__name__, _handed_on(update))

    # Whether steps of one token a request may come with tables of blocks.
    ensure = getattr(cb_initialization, "ensure_decode_fast_path_is_available", None)
    if ensure is not None:
        setattr(cb_initialization, ensure.__name__, _with_tables(ensure))


def _without_mask(asked: Any) -> Any:
    @functools.wraps(asked)
    def is_flash_attention_requested(config: Any = None, *args: Any, **more: Any) -> bool:
        return _is_ours(getattr(config, "_attn_implementation", None)) or bool(asked(config, *args, **more))

    return is_flash_attention_requested


def _handed_on(update: Any) -> Any:
    """The cache goes to the layer, with the lists and tables of all layers; keys and values stay the new ones."""

    @functools.wraps(update)
    def handed_on(
        self: Any, key_states: Tensor, value_states: Tensor, layer_idx: int, kwargs: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        if not _is_ours(self.config._attn_implementation):
            updated: tuple[Tensor, Tensor] = update(self, key_states, value_states, layer_idx, kwargs=kwargs)
            return updated
        kwargs["cache"] = self
        return key_states, value_states

    return handed_on


def _with_tables(ensure: Any) -> Any:
    @functools.wraps(ensure)
    def ensure_decode_fast_path_is_available(config: Any, cb_config: Any, user_requested: bool) -> None:
        if not _is_ours(config._attn_implementation):
            ensure(config, cb_config, user_requested)
            return
        kinds = getattr(config, "layer_types", None)
        windows = getattr(config, "sliding_window", None) is not None if kinds is None else "sliding_attention" in kinds
        if windows and cb_config.max_blocks_per_request != 0:
            if user_requested:
                logger.warning(
                    f"max_blocks_per_request = {cb_config.max_blocks_per_request}: must be 0 or None for a model with "
                    "sliding windows, of which transformers makes no tables of blocks; it is taken for 0"
                )
            cb_config.max_blocks_per_request = 0

    return ensure_decode_fast_path_is_available
