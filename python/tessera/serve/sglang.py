"""An attention backend for SGLang: `register`, then `--attention-backend tessera`.

SGLang's pool writes new keys when the backend tells it to. Where a request's keys lie says a row of slot numbers in
`req_to_token`; a step's page table is made of every page's first slot. It is a copy, since the scheduler writes to
`req_to_token` while a step runs. Steps that CUDA graphs run have their tensors in memory that stays where it is.
Nothing reads a device's tensor on the host.

The class derives from SGLang's own where SGLang is installed. Written for SGLang 0.5.8 and 0.5.23, whose hooks for CUDA
graphs differ: it has both.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from .. import cached_attention
from . import engine

_INTERFACE = "sglang.srt.layers.attention.base_attn_backend"
_VERSIONS = "versions like 0.5.8 and 0.5.23"
_sglang = engine.find(_INTERFACE)

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)


def register(name: str = "tessera") -> None:
    """Makes `TesseraAttnBackend` known to SGLang as an attention backend, in this process.

    SGLang starts processes of its own, so each of them must call it: that is what an entry point of the group
    `sglang.srt.plugins` is for, and this package has one, named `tessera`. The call may be repeated.

    Args:
        name: what `--attention-backend` calls it.

    Raises:
        ImportError: SGLang is not installed, or is a version without this interface.
    """
    engine.require(_INTERFACE, _VERSIONS)
    registry = engine.require("sglang.srt.layers.attention.attention_registry", _VERSIONS)
    arguments = engine.require("sglang.srt.server_args", _VERSIONS)
    registry.register_attention_backend(name)(TesseraAttnBackend)
    if name not in arguments.ATTENTION_BACKEND_CHOICES:
        arguments.add_attention_backend_choices([name])


def paged(buffer: Tensor, page_size: int, num_heads_k: int, head_dim: int) -> Tensor:
    """A buffer of SGLang's pool as (num_pages, page_size, num_heads_k, head_dim); a view.

    Args:
        buffer: (slots, num_heads_k, head_dim), or with heads outside slots (num_pages, num_heads_k, page_size,
            head_dim). Any strides, the last one 1.

    Raises:
        ValueError: it has another shape.
    """
    shape = tuple(buffer.shape)
    if len(shape) == 3 and shape[1:] == (num_heads_k, head_dim) and shape[0] % page_size == 0:
        pages: Tensor = buffer.unflatten(0, (-1, page_size))
        return pages
    if len(shape) == 4 and shape[1:] == (num_heads_k, page_size, head_dim):
        return buffer.transpose(1, 2)
    raise ValueError(
        f"the pool's buffer has shape {shape}: must be (slots, {num_heads_k}, {head_dim}), slots a multiple of the "
        f"page_size {page_size}, or (num_pages, {num_heads_k}, {page_size}, {head_dim})"
    )


@dataclasses.dataclass
class TesseraForwardMetadata:
    """A step of all layers, on the device.

    Attributes:
        seqlens: int32 (batch,), keys of each request with the new ones.
        page_table: int32 (batch, pages of the longest request that there may be), filled as far as requests reach.
        cu_seqlens_q: int32 (batch + 1,), where each request's rows begin; None: one row each.
        max_seqlen_q: a bound of their numbers; None: the rows of q.
        num_tokens: rows of q that belong to requests; None: all.
    """

    seqlens: Tensor
    page_table: Tensor
    cu_seqlens_q: Tensor | None = None
    max_seqlen_q: int | None = None
    num_tokens: int | None = None


# A variable: what it holds depends on what is installed.
_Backend: Any = engine.base(_sglang, "AttentionBackend")


class TesseraAttnBackend(_Backend):
    """Attention over SGLang's pool of keys and values, for steps without speculation."""

    def __init__(self, model_runner: Any):
        """
        Args:
            model_runner: SGLang's, of which are read: model_config, page_size, kv_cache_dtype, req_to_token_pool,
                token_to_kv_pool, and kv_index_translator where there is one.

        Raises:
            NotImplementedError: the model or the pool is of a kind that is not served. The text says which are.
        """
        super().__init__()
        config = model_runner.model_config
        arch = getattr(config, "attention_arch", None)
        if getattr(arch, "name", None) == "MLA":
            raise NotImplementedError("model_config.attention_arch = MLA: must be MHA, keys and values of heads")
        if getattr(config, "is_encoder_decoder", False):
            raise NotImplementedError("model_config.is_encoder_decoder = True: must be False, for decoders alone")
        if model_runner.kv_cache_dtype not in _DTYPES:
            raise NotImplementedError(
                f"kv_cache_dtype = {model_runner.kv_cache_dtype}: must be one of {', '.join(map(str, _DTYPES))}"
            )
        if getattr(model_runner.token_to_kv_pool, "swa_kv_pool", None) is not None:
            raise NotImplementedError(
                "token_to_kv_pool has a pool of its own for layers with a window: must be one pool for all layers; "
                "start SGLang with --disable-hybrid-swa-memory"
            )
        if getattr(getattr(model_runner, "kv_index_translator", None), "is_translating", False):
            raise NotImplementedError("kv_index_translator.is_translating = True: slots must be those of the pool")
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.req_to_token: Tensor = model_runner.req_to_token_pool.req_to_token
        self.page_size: int = model_runner.page_size
        self.kv_cache_dtype: torch.dtype = model_runner.kv_cache_dtype
        self.forward_metadata: TesseraForwardMetadata | None = None
        device = self.req_to_token.device
        self._one = torch.ones((), dtype=torch.float32, device=device)
        self._first_slots = torch.arange(0, self.req_to_token.shape[1], self.page_size, device=device)
        self._prefix_levels = engine.prefix_levels()
        self._decode_buffers: TesseraForwardMetadata | None = None
        self._captured: dict[tuple[int, bool], TesseraForwardMetadata] = {}

    # ---- the metadata of a step

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Of a step without a CUDA graph.

        Raises:
            NotImplementedError: the step is one of speculation, or of a diffusion model.
        """
        _check_mode(forward_batch.forward_mode, forward_batch.spec_info)
        packed = not forward_batch.forward_mode.is_decode_or_idle()
        metadata = self._allocate(forward_batch.batch_size, packed)
        self._fill(
            metadata, forward_batch.req_pool_indices, forward_batch.seq_lens, forward_batch.seq_lens_cpu,
            forward_batch.extend_seq_lens,
        )  # fmt: skip
        lengths = forward_batch.extend_seq_lens_cpu
        if packed and lengths is not None:
            metadata.max_seqlen_q, metadata.num_tokens = max(lengths, default=0), sum(lengths)
        self.forward_metadata = metadata

    def _allocate(self, batch: int, packed: bool) -> TesseraForwardMetadata:
        like: dict[str, Any] = {"dtype": torch.int32, "device": self.req_to_token.device}
        # As wide as it can be: so the library plans once, not for every length.
        table = torch.empty(batch, self._first_slots.shape[0], **like)
        return TesseraForwardMetadata(
            torch.zeros(batch, **like), table, torch.zeros(batch + 1, **like) if packed else None
        )

    def _fill(
        self,
        metadata: TesseraForwardMetadata,
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        seq_lens_cpu: Tensor | None,
        extend_seq_lens: Any,
    ) -> None:
        """Writes where the tensors lie. seq_lens_cpu: on the host, how far the table is filled; None: to its end."""
        batch, pages = metadata.page_table.shape
        if seq_lens_cpu is not None:
            pages = min(pages, -(-max(seq_lens_cpu.tolist(), default=0) // self.page_size))
        metadata.seqlens.copy_(seq_lens[:batch])
        slots = self.req_to_token[req_pool_indices[:batch, None], self._first_slots[None, :pages]]
        torch.div(slots, self.page_size, rounding_mode="floor", out=metadata.page_table[:, :pages])
        if metadata.cu_seqlens_q is not None:
            torch.cumsum(extend_seq_lens[:batch], 0, dtype=torch.int32, out=metadata.cu_seqlens_q[1:])

    # ---- CUDA graphs

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Takes the memory of decoding steps that graphs run.

        Args:
            max_bs: requests of the largest graph.
            max_num_tokens: not looked at.
        """
        self._decode_buffers, self._captured = self._allocate(max_bs, packed=False), {}

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Keys of a request that pads a graph's batch: one, in the slot that SGLang keeps for padding."""
        return 1

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Of a step that a graph records (`in_capture`) or runs, outside the graph; SGLang 0.5.23.

        Raises:
            NotImplementedError: as `init_forward_metadata`.
            ValueError: a graph is run that was not captured, or one is captured before `init_cuda_graph_state`.
        """
        self._graph_step(
            forward_batch.batch_size, forward_batch.req_pool_indices, forward_batch.seq_lens,
            None if in_capture else forward_batch.seq_lens_cpu, forward_batch.forward_mode, forward_batch.spec_info,
            forward_batch.extend_seq_lens, in_capture,
        )  # fmt: skip

    def init_forward_metadata_capture_cuda_graph(
        self,
        bs: int,
        num_tokens: int,
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        encoder_lens: Tensor | None,
        forward_mode: Any,
        spec_info: Any,
    ) -> None:
        """Of a decoding step that a graph records; SGLang 0.5.8."""
        self._graph_step(bs, req_pool_indices, seq_lens, None, forward_mode, spec_info, None, True)

    def init_forward_metadata_replay_cuda_graph(
        self,
        bs: int,
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        seq_lens_sum: int,
        encoder_lens: Tensor | None,
        forward_mode: Any,
        spec_info: Any,
        seq_lens_cpu: Tensor | None,
    ) -> None:
        """Of a decoding step that a graph runs; SGLang 0.5.8."""
        self._graph_step(bs, req_pool_indices, seq_lens, seq_lens_cpu, forward_mode, spec_info, None, False)

    def _graph_step(
        self,
        batch: int,
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        seq_lens_cpu: Tensor | None,
        forward_mode: Any,
        spec_info: Any,
        extend_seq_lens: Tensor | None,
        in_capture: bool,
    ) -> None:
        _check_mode(forward_mode, spec_info)
        packed = not forward_mode.is_decode_or_idle()
        if in_capture:
            self._captured[batch, packed] = self._allocate(batch, True) if packed else self._decode_slice(batch)
        elif (batch, packed) not in self._captured:
            sizes = sorted(size for size, kind in self._captured if kind == packed)
            raise ValueError(f"batch_size = {batch}: no graph was captured for it, only for {sizes}")
        metadata = self._captured[batch, packed]
        self._fill(metadata, req_pool_indices, seq_lens, seq_lens_cpu, extend_seq_lens)
        self.forward_metadata = metadata

    def _decode_slice(self, batch: int) -> TesseraForwardMetadata:
        whole = self._decode_buffers
        most = 0 if whole is None else whole.seqlens.shape[0]
        if whole is None or batch > most:
            raise ValueError(f"batch_size = {batch}: must be at most {most}, the max_bs of init_cuda_graph_state")
        return TesseraForwardMetadata(whole.seqlens[:batch], whole.page_table[:batch])

    # ---- a layer

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: Tensor | None = None,
        **more: Any,
    ) -> Tensor:
        """The attention of a layer, each request having one new token.

        Args:
            q: (batch, num_heads * head_dim), or (batch, num_heads, head_dim). Of the cache's type; beside a cache of
                e4m3 bfloat16 or float16.
            k, v: (batch, num_heads_k, head_dim), v with head_dim_v, which are written first; None: they are there.
            layer: SGLang's RadixAttention: heads, scaling, sliding_window_size (keys besides the query's own),
                logit_cap, k_scale and v_scale.
            forward_batch: has `out_cache_loc`, the slots of k and v.
            save_kv_cache: False: k and v are not written.
            sinks: (num_heads,), one more logit of each head.
            more: must be None or False: what other models hand on is not done.

        Returns: (batch, num_heads * head_dim_v).

        Raises:
            NotImplementedError: the layer is no decoder's, or more is asked for.
        """
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache, sinks, more)

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: Tensor | None = None,
        **more: Any,
    ) -> Tensor:
        """The same with any number of new tokens of each request, one request's behind another's: prompts, pieces of
        prompts, and both mixed with requests that decode. Rows of q behind the last request's pad it: their results
        are not set."""
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache, sinks, more)

    def _forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool,
        sinks: Tensor | None,
        more: dict[str, Any],
    ) -> Tensor:
        _check_layer(layer, more)
        metadata = self.forward_metadata
        if metadata is None:
            raise ValueError("forward_metadata is None: init_forward_metadata must be called first, once a step")
        heads, heads_k, head_dim, head_dim_v = (
            layer.tp_q_head_num, layer.tp_k_head_num, layer.qk_head_dim, layer.v_head_dim,
        )  # fmt: skip
        pool = self.token_to_kv_pool
        if k is not None and v is not None and save_kv_cache:
            pool.set_kv_buffer(layer, forward_batch.out_cache_loc, k, v, layer.k_scale, layer.v_scale)
        k_buffer, v_buffer = pool.get_kv_buffer(layer.layer_id)
        k_scale = v_scale = None
        if self.kv_cache_dtype is torch.float8_e4m3fn:
            batch = metadata.seqlens.shape[0]
            k_scale, v_scale = (
                self._one if scale is None else engine.scale_of(f"layer.{name}", scale, batch, heads_k)
                for name, scale in (("k_scale", layer.k_scale), ("v_scale", layer.v_scale))
            )
        q = q.reshape(-1, heads, head_dim)
        given = getattr(forward_batch, "_attn_output", None)
        o = q.new_empty(q.shape[0], heads, head_dim_v) if given is None else given.view(-1, heads, head_dim_v)
        rows, out = q[: metadata.num_tokens], o[: metadata.num_tokens]
        bound = None
        if metadata.cu_seqlens_q is None:
            rows, out = rows[:, None], out[:, None]
        else:
            bound = rows.shape[0] if metadata.max_seqlen_q is None else metadata.max_seqlen_q
        window = layer.sliding_window_size
        cached_attention(
            rows,
            paged(k_buffer, self.page_size, heads_k, head_dim),
            paged(v_buffer, self.page_size, heads_k, head_dim_v),
            seqlens=metadata.seqlens,
            page_table=metadata.page_table,
            k_scale=k_scale,
            v_scale=v_scale,
            cu_seqlens_q=metadata.cu_seqlens_q,
            max_seqlen_q=bound,
            causal=True,
            window=(-1 if window is None else window, 0),
            softmax_scale=layer.scaling,
            softcap=layer.logit_cap,
            sink=None if sinks is None else sinks.detach().float(),
            prefix_levels=self._prefix_levels,
            out=out,
        )
        return o.view(-1, heads * head_dim_v)


def _check_mode(forward_mode: Any, spec_info: Any) -> None:
    if spec_info is not None or forward_mode.is_target_verify():
        raise NotImplementedError("spec_info is given: must be None, for there is no speculative decoding here")
    is_dllm_extend = getattr(forward_mode, "is_dllm_extend", None)
    if is_dllm_extend is not None and is_dllm_extend():
        raise NotImplementedError("forward_mode = DLLM_EXTEND: must be DECODE, EXTEND, MIXED, SPLIT_PREFILL or IDLE")


def _check_layer(layer: Any, more: dict[str, Any]) -> None:
    if layer.is_cross_attention:
        raise NotImplementedError("layer.is_cross_attention = True: must be False, keys are those of the request")
    kind = getattr(layer.attn_type, "value", layer.attn_type)
    if kind != "decoder":
        raise NotImplementedError(f"layer.attn_type = {kind!r}: must be 'decoder'")
    if layer.logit_cap and getattr(layer, "logit_capping_method", "tanh") != "tanh":
        raise NotImplementedError(f"layer.logit_capping_method = {layer.logit_capping_method!r}: must be 'tanh'")
    if getattr(layer, "xai_temperature_len", -1) > 0:
        raise NotImplementedError(f"layer.xai_temperature_len = {layer.xai_temperature_len}: must be -1")
    if getattr(layer, "use_irope", False):
        raise NotImplementedError("layer.use_irope = True: must be False, attention in chunks is not done")
    for name, value in more.items():
        if value is not None and value is not False:
            raise NotImplementedError(f"{name} is given: must be None, it is not done here")
