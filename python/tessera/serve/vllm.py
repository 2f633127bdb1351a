"""An attention backend for vLLM: `register`, then `vllm serve --attention-backend CUSTOM`.

vLLM asks the backend for three classes. The builder makes a step's metadata of what the engine keeps on the device: it
copies nothing, so what a CUDA graph captured stays where it is. The implementation is a layer's: it writes new keys and
values to the slots of `slot_mapping`, and attends to the pages of `block_table`. Nothing reads a device's tensor on the
host.

The classes derive from vLLM's own where vLLM is installed. Written for vLLM 0.14.1 and 0.33.0.
"""

import dataclasses
import os
from typing import Any, ClassVar

import torch
from torch import Tensor

from .. import append, cached_attention
from . import engine

_INTERFACE = "vllm.v1.attention.backend"
_VERSIONS = "versions like 0.14.1 and 0.33.0"
_vllm = engine.find(_INTERFACE)
# Variables: what they hold depends on what is installed.
_Backend: Any = engine.base(_vllm, "AttentionBackend")
_Builder: Any = engine.base(_vllm, "AttentionMetadataBuilder")
_Impl: Any = engine.base(_vllm, "AttentionImpl")

_DECODER = "decoder"
_CAUSES = {
    "encoder": "its queries and keys are no sequence in a cache",
    "encoder_only": "its queries and keys are no sequence in a cache",
    "encoder_decoder": "its keys are those of another sequence",
}
_FP8 = ("fp8", "fp8_e4m3")
_CACHE_DTYPES = ("auto", "float16", "bfloat16", *_FP8)


def register() -> None:
    """Makes `TesseraAttentionBackend` vLLM's backend CUSTOM, in this process.

    vLLM starts processes of its own, so each of them must call it: that is what an entry point of the group
    `vllm.general_plugins` is for, and this package has one, named `tessera`. The call may be repeated.

    Raises:
        ImportError: vLLM is not installed, or is a version without this interface.
    """
    engine.require(_INTERFACE, _VERSIONS)
    registry = engine.require("vllm.v1.attention.backends.registry", _VERSIONS)
    path = f"{TesseraAttentionBackend.__module__}.{TesseraAttentionBackend.__qualname__}"
    registry.register_backend(registry.AttentionBackendEnum.CUSTOM, path)


def split_cache(kv_cache: Tensor, head_size: int) -> tuple[Tensor, Tensor]:
    """Keys and values of a layer's cache, (num_blocks, block_size, num_kv_heads, head_size) each; views.

    Args:
        kv_cache: (num_blocks, 2, block_size, num_kv_heads, head_size), as `TesseraAttentionBackend` asks for it, or
            (num_blocks, num_kv_heads, block_size, 2 * head_size), as later versions of vLLM make it. Any order in
            memory, the last stride 1.
        head_size: columns of a key.

    Raises:
        ValueError: it has another shape.
    """
    shape = tuple(kv_cache.shape)
    if len(shape) == 4 and shape[3] == 2 * head_size:
        both = kv_cache.transpose(1, 2)
        return both[..., :head_size], both[..., head_size:]
    if len(shape) == 5 and shape[1] == 2 and shape[4] == head_size:
        return kv_cache[:, 0], kv_cache[:, 1]
    raise ValueError(
        f"kv_cache has shape {shape}: must be (num_blocks, 2, block_size, num_kv_heads, {head_size}) or "
        f"(num_blocks, num_kv_heads, block_size, {2 * head_size})"
    )


class TesseraAttentionBackend(_Backend):
    """What vLLM asks of a backend before it makes layers."""

    accept_output_buffer: bool = True
    forward_includes_kv_cache_update: bool = True
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = list(_CACHE_DTYPES)

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type["TesseraAttentionImpl"]:
        return TesseraAttentionImpl

    @staticmethod
    def get_builder_cls() -> type["TesseraMetadataBuilder"]:
        return TesseraMetadataBuilder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """Keys and values of a block lie side by side. Blocks may have any size. Later versions do not ask."""
        return (num_blocks, 2, block_size, num_kv_heads, head_size)

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """The order in memory: that of vLLM's own setting, NHD or HND. Later versions do not ask."""
        layout = engine.require("vllm.v1.attention.backends.utils", _VERSIONS).get_kv_cache_layout()
        orders = {
            ("NHD", False): (0, 1, 2, 3, 4),
            ("HND", False): (0, 1, 3, 2, 4),
            # Of a block those of all layers, so that it can be sent at once.
            ("NHD", True): (1, 0, 2, 3, 4, 5),
            ("HND", True): (1, 4, 0, 2, 3, 5),
        }
        if (layout, include_num_layers_dimension) not in orders:
            raise ValueError(f"kv_cache_layout = {layout!r}: must be 'NHD' or 'HND'")
        return orders[layout, include_num_layers_dimension]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % 8 == 0 and 0 < head_size <= 256

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return (capability.major, capability.minor) == (9, 0)

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, *others: Any, **more: Any
    ) -> str | None:
        """Why not, or None. Versions differ in what else they hand over; none of it matters here."""
        if kv_cache_dtype in _FP8 and head_size % 16 != 0:
            return f"head_size = {head_size}: must be a multiple of 16 beside kv_cache_dtype {kv_cache_dtype!r}"
        return None

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type == _DECODER

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True


@dataclasses.dataclass
class TesseraMetadata:
    """A step of all layers. Tensors are the engine's own, on the device.

    Attributes:
        num_actual_tokens: rows of q that are the step's; on a GPU those that pad it for a CUDA graph count, too.
        max_query_len: a bound of the requests' query lengths, also of padding rows among them.
        query_start_loc: int32 (num_reqs + 1,), where each request's rows begin. Requests without rows pad the batch.
        seq_lens: int32 (num_reqs,), keys of each request with the new ones; 0 for padding.
        block_table: int32 (num_reqs, blocks).
        slot_mapping: int64 (tokens,), the slot of each new key; -1 is nowhere.
        causal: False: queries see all keys of their request, or those of a window to both sides.
        prefix_levels: of `tessera.cached_attention`: requests may share their first blocks.
    """

    num_actual_tokens: int
    max_query_len: int
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    causal: bool = True
    prefix_levels: int = 0


class TesseraMetadataBuilder(_Builder):
    """Makes a step's metadata, once for the layers of a group."""

    _cudagraph_support: ClassVar[Any] = None if _vllm is None else _vllm.AttentionCGSupport.ALWAYS
    reorder_batch_threshold: int | None = None
    supports_update_block_table: bool = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device):
        self.kv_cache_spec, self.layer_names = kv_cache_spec, layer_names
        self.vllm_config, self.device = vllm_config, device
        self._prefix_levels = engine.prefix_levels()

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> TesseraMetadata:
        """
        Args:
            common_prefix_len: keys that all requests share; more than 0 has them read once, where that pays. vLLM says
                so outside CUDA graphs only, and of nothing but all requests: TESSERA_PREFIX_LEVELS in the environment
                has what any neighbours share looked for in every step.
            common_attn_metadata: vLLM's CommonAttentionMetadata.
            fast_build: changes nothing.

        Raises:
            NotImplementedError: whether attention is causal differs from request to request.
        """
        common = common_attn_metadata
        if isinstance(common.causal, Tensor):
            raise NotImplementedError("causal is a tensor, one for each request: must be True or False for all of them")
        starts = common.query_start_loc
        rows = common.num_actual_tokens
        if not starts.is_cuda:
            # Padding rows behind the last request: a GPU leaves them alone, a CPU takes them for an error.
            rows = int(starts[-1])
        num_reqs = starts.shape[0] - 1
        return TesseraMetadata(
            num_actual_tokens=rows,
            max_query_len=max(common.max_query_len, -(-rows // max(num_reqs, 1))),
            query_start_loc=starts,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            causal=common.causal,
            prefix_levels=max(self._prefix_levels, 1 if common_prefix_len > 0 else 0),
        )

    def update_block_table(self, metadata: TesseraMetadata, blk_table: Tensor, slot_mapping: Tensor) -> TesseraMetadata:
        """The same step for a group of layers whose keys lie in other blocks."""
        return dataclasses.replace(metadata, block_table=blk_table, slot_mapping=slot_mapping)


class TesseraAttentionImpl(_Impl):
    """The attention of one layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = _DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        """
        Args:
            num_heads, head_size, scale, num_kv_heads: of this rank. None: as many key/value heads as heads.
            alibi_slopes: one for each head.
            sliding_window: how many keys a query sees, its own among them; None: all.
            kv_cache_dtype: "auto", "float16", "bfloat16", or "fp8" and "fp8_e4m3" with the layer's _k_scale, _v_scale.
            logits_soft_cap: None or 0: no cap.
            attn_type: "decoder".
            kv_sharing_target_layer_name: a layer whose keys are read; this one then writes none.
            sinks: (num_heads,), one more logit of each head.

        Raises:
            NotImplementedError: attn_type or kv_cache_dtype is another.
            ValueError: numbers of heads do not fit.
        """
        kind = getattr(attn_type, "value", attn_type)
        if kind != _DECODER:
            reason = _CAUSES.get(kind, "it is not known")
            raise NotImplementedError(f"attn_type = {kind!r}: must be {_DECODER!r}; {reason}")
        if kv_cache_dtype not in _CACHE_DTYPES:
            raise NotImplementedError(f"kv_cache_dtype = {kv_cache_dtype!r}: must be one of {', '.join(_CACHE_DTYPES)}")
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_heads % num_kv_heads != 0:
            raise ValueError(f"num_heads = {num_heads}: must be a multiple of num_kv_heads = {num_kv_heads}")
        for name, given in (("alibi_slopes", alibi_slopes), ("sinks", sinks)):
            if given is not None and len(given) != num_heads:
                raise ValueError(f"{name} has {len(given)} numbers: must be one for each of the {num_heads} heads")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads
        self.alibi_slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self.sliding_window = sliding_window
        self.kv_cache_dtype = kv_cache_dtype
        self.logits_soft_cap = logits_soft_cap or 0.0
        self.attn_type = attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks
        self._sink: Tensor | None = None
        self._batch_invariant = os.environ.get("VLLM_BATCH_INVARIANT", "0") not in ("", "0")

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Sinks are weights, in the model's type: now they are there, they are widened once."""
        if self.sinks is not None:
            self._sink = self.sinks.detach().float()

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        attn_metadata: TesseraMetadata | None,
        output: Tensor | None = None,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Writes new keys and values into the cache, and attention into `output`.

        Args:
            layer: has `_k_scale` and `_v_scale`, float32, of one number or one for each key/value head; they are read
                if the cache has 8 bits.
            query: (tokens, num_heads, head_size), float16 or bfloat16, on a CPU float32, too. Rows from
                `num_actual_tokens` on pad it.
            key, value: (tokens, num_kv_heads, head_size); None: the cache has them already.
            kv_cache: as `split_cache` takes it; of 8 bits as float8_e4m3fn or its bits as uint8.
            attn_metadata: of the builder; None: a run that measures memory, for which output is 0.
            output: (tokens, num_heads, head_size) or (tokens, num_heads * head_size). Rows of no request stay as they
                are.
            output_scale, output_block_scale: must be None.

        Returns: output.

        Raises:
            ValueError: output is missing, or a shape does not fit.
            NotImplementedError: the output is to be quantised.
        """
        if output is None:
            raise ValueError("output is None: must be a tensor of query's shape")
        for name, given in (("output_scale", output_scale), ("output_block_scale", output_block_scale)):
            if given is not None:
                raise NotImplementedError(f"{name} is given: must be None, the output has query's type")
        if attn_metadata is None:
            return output.zero_()
        step = attn_metadata
        if key is not None and value is not None and self.kv_sharing_target_layer_name is None:
            self.do_kv_cache_update(layer, key, value, kv_cache, step.slot_mapping)
        k_cache, v_cache, k_scale, v_scale = self._cache(layer, kv_cache, step.seq_lens.shape[0])
        rows = step.num_actual_tokens
        left = -1 if self.sliding_window is None else self.sliding_window - 1
        sink = self._sink
        if sink is None and self.sinks is not None:
            sink = self.sinks.detach().float()
        if self.alibi_slopes is not None and self.alibi_slopes.device != query.device:
            self.alibi_slopes = self.alibi_slopes.to(query.device)
        cached_attention(
            query[:rows],
            k_cache,
            v_cache,
            seqlens=step.seq_lens,
            page_table=step.block_table,
            k_scale=k_scale,
            v_scale=v_scale,
            cu_seqlens_q=step.query_start_loc,
            max_seqlen_q=step.max_query_len,
            causal=step.causal,
            window=(left, 0 if step.causal else left),
            softmax_scale=self.scale,
            softcap=self.logits_soft_cap,
            alibi_slopes=self.alibi_slopes,
            sink=sink,
            batch_invariant=self._batch_invariant,
            prefix_levels=step.prefix_levels,
            out=output.view(-1, self.num_heads, self.head_size)[:rows],
        )
        return output

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Writes new keys and values, into a cache of 8 bits divided by the layer's scales and rounded.

        Args:
            layer, key, value, kv_cache: as `forward` takes them.
            slot_mapping: int64, block * block_size + slot of each of the first rows; -1 is nowhere. Further rows of
                key and value pad them.
        """
        k_cache, v_cache, k_scale, v_scale = self._cache(layer, kv_cache, 1)
        rows = slot_mapping.shape[0]
        append(key[:rows], value[:rows], k_cache, v_cache, slot_mapping=slot_mapping, k_scale=k_scale, v_scale=v_scale)

    def _cache(self, layer: Any, kv_cache: Tensor, batch: int) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Keys, values, and what their elements are multiplied by."""
        k_cache, v_cache = split_cache(kv_cache, self.head_size)
        if self.kv_cache_dtype not in _FP8:
            return k_cache, v_cache, None, None
        k_scale, v_scale = (
            engine.scale_of(f"layer.{name}", getattr(layer, name), batch, self.num_kv_heads)
            for name in ("_k_scale", "_v_scale")
        )
        e4m3 = torch.float8_e4m3fn
        return k_cache.view(e4m3), v_cache.view(e4m3), k_scale, v_scale
