"""tessera.serve.sglang: steps as SGLang's model runner plays them, against attention in double."""

import enum
import importlib
import importlib.metadata
import inspect
import random
import types
from typing import Any

import engine_interfaces
import engine_steps
import pytest
import torch
from torch import Tensor

from tessera.serve import engine, sglang

HEADS, HEADS_K, D, DV = 6, 2, 32, 48
CONTEXT = 160  # of a request, at most


class Mode(enum.Enum):
    """SGLang's ForwardMode, as far as it is asked."""

    EXTEND = enum.auto()
    DECODE = enum.auto()
    MIXED = enum.auto()
    IDLE = enum.auto()
    TARGET_VERIFY = enum.auto()
    DLLM_EXTEND = enum.auto()

    def is_decode_or_idle(self) -> bool:
        return self in (Mode.DECODE, Mode.IDLE)

    def is_target_verify(self) -> bool:
        return self is Mode.TARGET_VERIFY

    def is_dllm_extend(self) -> bool:
        return self is Mode.DLLM_EXTEND


class Pool:
    """SGLang's pool: slots, the first page of which takes what padding rows write. Full of NaN behind that."""

    def __init__(self, slots: int, page_size: int, dtype: torch.dtype, device: str, heads_first: bool):
        self.dtype, self.page_size, self.heads_first = dtype, page_size, heads_first
        self.bits = torch.uint8 if dtype is engine_steps.FP8 else dtype
        self.k, self.v = (self.buffer(slots, d, device) for d in (D, DV))

    def buffer(self, slots: int, d: int, device: str) -> Tensor:
        shape = (slots, HEADS_K, d)
        if self.heads_first:
            shape = (slots // self.page_size, HEADS_K, self.page_size, d)
        fill: Any = 0x7F if self.bits is torch.uint8 else torch.nan
        x = torch.full(shape, fill, dtype=self.bits, device=device)
        x[: 1 if self.heads_first else self.page_size] = 0
        return x

    def by_slot(self, x: Tensor) -> Tensor:
        """(slots, heads, d); a view only without heads_first."""
        return x.transpose(1, 2).flatten(0, 1) if self.heads_first else x

    def write(self, x: Tensor, slots: Tensor, rows: Tensor) -> None:
        if self.heads_first:
            x[slots // self.page_size, :, slots % self.page_size] = rows
        else:
            x[slots] = rows

    def set_kv_buffer(
        self, layer: Any, loc: Tensor, cache_k: Tensor, cache_v: Tensor, k_scale: Any = None, v_scale: Any = None
    ) -> None:
        assert layer.layer_id == 5
        for x, rows, scale in ((self.k, cache_k, k_scale), (self.v, cache_v, v_scale)):
            if self.bits is torch.uint8:
                rows = engine_steps.quantised(rows, 1.0 if scale is None else scale.view(-1, 1)).view(torch.uint8)
            self.write(x, loc, rows)

    def get_kv_buffer(self, layer_id: int) -> tuple[Tensor, Tensor]:
        assert layer_id == 5
        return self.k.view(self.dtype), self.v.view(self.dtype)


class Engine:
    """A model runner's side of one layer: requests in rows of req_to_token, and a graph runner's static tensors."""

    def __init__(
        self,
        device: str,
        dtype: torch.dtype,
        *,
        page_size: int = 1,
        fp8: bool = False,
        scales: str = "one",
        heads_first: bool = False,
        window: int = -1,
        cap: float = 0.0,
        sinks: Tensor | None = None,
    ):
        self.device, self.dtype, self.size, self.fp8 = device, dtype, page_size, fp8
        self.window, self.cap, self.sinks = window, cap, sinks
        # Row 0 and page 0 are those of padding.
        reqs, pages = 9, -(-CONTEXT // page_size)
        order = 1 + torch.randperm((reqs - 1) * pages + 2)
        self.table = torch.zeros(reqs, CONTEXT, dtype=torch.int32, device=device)
        for row in range(1, reqs):
            of = order[(row - 1) * pages : row * pages, None] * page_size + torch.arange(page_size)
            self.table[row] = of.flatten()[:CONTEXT]
        self.pool = Pool(
            (len(order) + 1) * page_size, page_size, engine_steps.FP8 if fp8 else dtype, device, heads_first
        )
        self.runner = types.SimpleNamespace(
            model_config=types.SimpleNamespace(
                attention_arch=types.SimpleNamespace(name="MHA"), is_encoder_decoder=False
            ),
            page_size=page_size,
            kv_cache_dtype=self.pool.dtype,
            req_to_token_pool=types.SimpleNamespace(req_to_token=self.table),
            token_to_kv_pool=self.pool,
        )
        self.backend = sglang.TesseraAttnBackend(self.runner)
        shape = {"none": None, "one": (), "heads": (HEADS_K,)}[scales if fp8 else "none"]
        self.layer = types.SimpleNamespace(
            layer_id=5, tp_q_head_num=HEADS, tp_k_head_num=HEADS_K, tp_v_head_num=HEADS_K, qk_head_dim=D, head_dim=D,
            v_head_dim=DV, scaling=0.2, logit_cap=cap, sliding_window_size=window, is_cross_attention=False,
            attn_type=types.SimpleNamespace(value="decoder"), logit_capping_method="tanh", xai_temperature_len=-1,
            k_scale=None if shape is None else torch.rand(shape, device=device) * 0.02 + 0.01,
            v_scale=None if shape is None else torch.rand(shape, device=device) + 0.5,
        )  # fmt: skip
        # A graph runner's static tensors.
        self.rows = torch.zeros(8, dtype=torch.int64, device=device)
        self.lens = torch.ones(8, dtype=torch.int64, device=device)
        self.loc = torch.zeros(64, dtype=torch.int64, device=device)
        self.extend = torch.zeros(8, dtype=torch.int32, device=device)
        qkv = torch.empty(64, HEADS * D + HEADS_K * (D + DV), device=device, dtype=dtype)
        self.q, k, v = qkv.split([HEADS * D, HEADS_K * D, HEADS_K * DV], -1)
        self.k, self.v = k.view(64, HEADS_K, D), v.view(64, HEADS_K, DV)

    def schedule(
        self, context: list[int], new: list[int], mode: Mode, batch: int | None = None, mirrors: bool = True
    ) -> Any:
        """Refills the static tensors; batch: to which requests pad it. Returns a ForwardBatch."""
        count, total = len(new), sum(new)
        batch = batch or count
        at = random.sample(range(1, 9), count)
        lens = [a + b for a, b in zip(context, new, strict=True)]
        self.rows.zero_()
        self.rows[:count] = torch.tensor(at)
        self.lens.fill_(self.backend.get_cuda_graph_seq_len_fill_value())
        self.lens[:count] = torch.tensor(lens)
        self.loc.zero_()
        table = self.table.cpu()
        slots = [table[row, a:b] for row, a, b in zip(at, context, lens, strict=True)]
        self.loc[:total] = torch.cat(slots)
        self.extend.zero_()
        self.extend[:count] = torch.tensor(new, dtype=torch.int32)
        for x in (self.q, self.k, self.v):
            x.copy_(torch.randn(x.shape) * (2.0 if self.fp8 else 1.0))
        self.context, self.new, self.at = context, new, at
        # Keys from steps before, and what should be there behind this one.
        pool, layer = self.pool, self.layer
        for row, length in zip(at, context, strict=True):
            past = self.table[row, :length].long()
            k, v = (torch.randn(length, HEADS_K, d, device=self.device).to(self.dtype) for d in (D, DV))
            pool.set_kv_buffer(layer, past, k, v, layer.k_scale, layer.v_scale)
        before = pool.k.clone(), pool.v.clone()
        tokens = batch if mode is Mode.DECODE else total
        self.tokens = tokens
        pool.set_kv_buffer(layer, self.loc[:total], self.k[:total], self.v[:total], layer.k_scale, layer.v_scale)
        self.expected = pool.k.clone(), pool.v.clone()
        for x, y in zip((pool.k, pool.v), before, strict=True):
            x.copy_(y)
        cpu = self.lens[:batch].cpu() if mirrors else None
        decodes = mode is Mode.DECODE
        return types.SimpleNamespace(
            forward_mode=mode,
            spec_info=None,
            batch_size=batch,
            req_pool_indices=self.rows[:batch],
            seq_lens=self.lens[:batch],
            seq_lens_cpu=cpu,
            out_cache_loc=self.loc[:tokens],
            extend_seq_lens=None if decodes else self.extend[:batch],
            extend_seq_lens_cpu=None if decodes or not mirrors else [*new, *[0] * (batch - count)],
        )

    def forward(self, batch: Any, **more: Any) -> Tensor:
        call = self.backend.forward_decode if batch.forward_mode is Mode.DECODE else self.backend.forward_extend
        if self.sinks is not None:
            more["sinks"] = self.sinks
        with torch.inference_mode():
            o: Tensor = call(
                self.q[: self.tokens], self.k[: self.tokens], self.v[: self.tokens], self.layer, batch, **more
            )
        assert o.shape == (self.tokens, HEADS * DV) and o.dtype is self.dtype
        return o

    def check(self, o: Tensor) -> None:
        pool = self.pool
        caches = []
        for x, expected, scale in (
            (pool.k, self.expected[0], self.layer.k_scale),
            (pool.v, self.expected[1], self.layer.v_scale),
        ):
            # Padding rows write to the first page.
            a, b = pool.by_slot(x)[self.size :], pool.by_slot(expected)[self.size :]
            assert engine_steps.same_bits(a, b), "the pool holds something else"
            values = pool.by_slot(expected).view(pool.dtype).double()
            caches.append(values if scale is None else values * scale.double().view(-1, 1))
        starts = torch.tensor([0, *self.new]).cumsum(0).tolist()
        for b in sorted(range(len(self.new)), key=lambda b: (-self.context[b], self.new[b])):
            first, rows = starts[b], self.new[b]
            slots = self.table[self.at[b], : self.context[b] + rows].long()
            exact = engine_steps.attend(
                self.q[first : first + rows].view(rows, HEADS, D), caches[0][slots], caches[1][slots], scale=0.2,
                before=None if self.window < 0 else self.window, softcap=self.cap, sink=self.sinks,
            )  # fmt: skip
            engine_steps.assert_close(
                f"request {b}, {self.context[b]} keys before {rows} new",
                o[first : first + rows].view(rows, HEADS, DV),
                exact,
            )


def dtypes(device: str) -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16] + ([torch.float32] if device == "cpu" else [])


SINKS = torch.tensor([2.0, -1.0, 0.0, 3.0, -4.0, 1.0])
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "pages of 16": {"page_size": 16},
    "pages of 12, heads outside": {"page_size": 12, "heads_first": True},
    # SGLang's numbers do not count the query's own key.
    "window of none": {"window": 0},
    "window, pages of 16": {"window": 16, "page_size": 16},
    "cap": {"cap": 1.5},
    "sinks, window": {"sinks": SINKS, "window": 5},
    "e4m3": {"fp8": True},
    "e4m3 without scales, pages of 64": {"fp8": True, "scales": "none", "page_size": 64},
    "e4m3, a scale a head, pages of 16": {"fp8": True, "scales": "heads", "page_size": 16},
}


def make(device: str, name: str) -> list[Engine]:
    """One engine of every type."""
    made = []
    for dtype in dtypes(device):
        options = dict(OPTIONS[name])
        if "sinks" in options:
            options["sinks"] = torch.nn.Parameter(options["sinks"].to(device, dtype))
        made.append(Engine(device, dtype, **options))
    return made


@pytest.mark.parametrize("name", OPTIONS)
def test_decode(name: str, device: str) -> None:
    """One new token a request: the first of all, at ends and beginnings of pages, at the end of the context."""
    for x in make(device, name):
        batch = x.schedule([0, 15, 16, 17, 31, CONTEXT - 1, random.randint(1, 158)], [1] * 7, Mode.DECODE)
        x.backend.init_forward_metadata(batch)
        x.check(x.forward(batch))


@pytest.mark.parametrize("mirrors", [True, False])
@pytest.mark.parametrize("name", OPTIONS)
def test_mixed(name: str, mirrors: bool, device: str) -> None:
    """Prompts, pieces of prompts and decoding requests in one step; lengths on the host, or not."""
    for x in make(device, name):
        context = [0, 16, 33, CONTEXT - 20, 149, random.randint(0, 80)]
        batch = x.schedule(context, [12, 4, 1, 20, 1, random.randint(2, 15)], Mode.MIXED, mirrors=mirrors)
        x.backend.init_forward_metadata(batch)
        x.check(x.forward(batch))


def test_prompts(device: str) -> None:
    """All tokens are new; a request of one token; rows of q behind the last request's pad it."""
    for x in make(device, "pages of 16"):
        batch = x.schedule([0, 0, 0], [17, 1, 30], Mode.EXTEND)
        x.backend.init_forward_metadata(batch)
        total = x.tokens
        x.tokens = 56
        batch.out_cache_loc = x.loc[:56]
        o = x.forward(batch)
        x.tokens = total
        x.check(o[:total])


def test_layers(device: str) -> None:
    """What is written once is read by layers that write nothing, also into memory that is given."""
    x = Engine(device, torch.bfloat16, page_size=16)
    batch = x.schedule([12, 40], [1, 1], Mode.DECODE)
    x.backend.init_forward_metadata(batch)
    x.check(x.forward(batch))
    kept = x.k.clone(), x.v.clone()
    x.k.zero_()
    x.v.zero_()
    x.check(x.forward(batch, save_kv_cache=False))
    with torch.inference_mode():
        x.check(x.backend.forward_decode(x.q[:2], None, None, x.layer, batch))
    x.k.copy_(kept[0])
    x.v.copy_(kept[1])
    batch._attn_output = torch.empty(2, HEADS * DV, dtype=torch.bfloat16, device=device)
    o = x.forward(batch)
    x.check(o)
    assert o.data_ptr() == batch._attn_output.data_ptr()


def test_prefixes(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment has shared prefixes looked for."""
    given = engine_steps.watch(monkeypatch, sglang, "prefix_levels")
    for levels in ("0", "3"):
        monkeypatch.setenv("TESSERA_PREFIX_LEVELS", levels)
        x = Engine(device, torch.bfloat16, page_size=16)
        x.table[2:5, :32] = x.table[1, :32]
        batch = x.schedule([40, 50, 60, 33], [1] * 4, Mode.DECODE)
        x.backend.init_forward_metadata(batch)
        x.check(x.forward(batch))
    assert given == [0, 3]
    for wrong in ("5", "all"):
        monkeypatch.setenv("TESSERA_PREFIX_LEVELS", wrong)
        with pytest.raises(ValueError, match=f"TESSERA_PREFIX_LEVELS = '{wrong}': must be a number from 0 to 4"):
            Engine(device, torch.bfloat16)


def test_idle(device: str) -> None:
    """A rank without requests prepares a step all the same."""
    x = Engine(device, torch.bfloat16)
    batch = x.schedule([3], [1], Mode.DECODE)
    for name in ("req_pool_indices", "seq_lens", "seq_lens_cpu"):
        setattr(batch, name, getattr(batch, name)[:0])
    batch.batch_size, batch.forward_mode = 0, Mode.IDLE
    x.backend.init_forward_metadata(batch)
    assert x.backend.forward_metadata is not None and x.backend.forward_metadata.page_table.shape[0] == 0


# ---- graphs

STEPS = [([0, 15, 149, 64], 4), ([1, 16, 60, 2], 4), ([CONTEXT - 1, 31], 4), ([47], 2)]


def hooks(x: Engine, version: str, batch: Any, captures: bool) -> None:
    """What a graph runner calls before it records or runs a graph."""
    if version == "0.5.23":
        x.backend.init_forward_metadata_out_graph(batch, in_capture=captures)
        return
    size, mode = batch.batch_size, batch.forward_mode
    if captures:
        x.backend.init_forward_metadata_capture_cuda_graph(
            size, size, batch.req_pool_indices, batch.seq_lens, None, mode, None
        )
    else:
        x.backend.init_forward_metadata_replay_cuda_graph(
            size, batch.req_pool_indices, batch.seq_lens, 100, None, mode, None, batch.seq_lens_cpu
        )


@pytest.mark.parametrize("version", engine_interfaces.SGLANG)
@pytest.mark.parametrize("name", OPTIONS)
def test_nothing_is_read(name: str, version: str, device: str) -> None:
    """Between steps lengths, rows and slots change in place: metadata stays where it is, and nobody looks at it."""
    x = make(device, name)[0]
    x.backend.init_cuda_graph_state(8, 8)
    captured: dict[int, Any] = {}
    for size in (4, 2):
        hooks(x, version, x.schedule([0] * size, [1] * size, Mode.DECODE), True)
        captured[size] = engine_steps.addresses(x.backend.forward_metadata)
    assert all(captured[4][name][0] == captured[2][name][0] for name in captured[4]), "graphs share their memory"
    for context, size in STEPS:
        batch = x.schedule(context, [1] * len(context), Mode.DECODE, batch=size, mirrors=False)
        with engine_steps.no_reads():
            hooks(x, version, batch, False)
        assert engine_steps.addresses(x.backend.forward_metadata) == captured[size]
        with engine_steps.no_reads():
            o = x.forward(batch)
        x.check(o)
        batch.seq_lens_cpu = x.lens[:size].cpu()
        hooks(x, version, batch, False)
        x.check(x.forward(batch))


def test_extend_in_graphs(device: str) -> None:
    """A graph of prompts: the same memory, and nothing is read."""
    for name in ("plain", "pages of 16"):
        x = make(device, name)[0]
        hooks(x, "0.5.23", x.schedule([0, 0, 0], [10, 10, 10], Mode.EXTEND), True)
        captured = engine_steps.addresses(x.backend.forward_metadata)
        for context, new in (([0, 100, 16], [20, 1, 9]), ([149, 3], [1, 29])):
            batch = x.schedule(context, new, Mode.EXTEND, batch=3, mirrors=False)
            with engine_steps.no_reads():
                hooks(x, "0.5.23", batch, False)
                o = x.forward(batch)
            x.check(o)
            assert engine_steps.addresses(x.backend.forward_metadata) == captured


@pytest.mark.parametrize("version", engine_interfaces.SGLANG)
@pytest.mark.parametrize("name", OPTIONS)
def test_graph(name: str, version: str, device: str) -> None:
    """One captured step, replayed with other lengths, rows, slots, and fewer requests."""
    if device == "cpu":
        pytest.skip("CUDA graphs need a GPU; test_nothing_is_read is what a CPU can say")
    for x in make(device, name):
        x.backend.init_cuda_graph_state(8, 8)
        graphs = {}
        for size in (4, 2):
            batch = x.schedule([0] * size, [1] * size, Mode.DECODE)
            hooks(x, version, batch, True)
            x.forward(batch)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                o = x.forward(batch)
            graphs[size] = graph, o
        for context, size in STEPS:
            batch = x.schedule(context, [1] * len(context), Mode.DECODE, batch=size)
            hooks(x, version, batch, False)
            graph, o = graphs[size]
            graph.replay()
            x.check(o)


@pytest.mark.parametrize("name", OPTIONS)
def test_graph_of_prompts(name: str, device: str) -> None:
    """The same of a graph of prompts, also with fewer tokens than it has rows."""
    if device == "cpu":
        pytest.skip("CUDA graphs need a GPU; test_extend_in_graphs is what a CPU can say")
    for x in make(device, name):
        batch = x.schedule([0, 0, 0], [10, 10, 10], Mode.EXTEND)
        hooks(x, "0.5.23", batch, True)
        x.forward(batch)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            o = x.forward(batch)
        for context, new in (([0, 100, 16], [20, 1, 9]), ([149, 3], [1, 29]), ([0, 47], [17, 2])):
            batch = x.schedule(context, new, Mode.EXTEND, batch=3)
            hooks(x, "0.5.23", batch, False)
            graph.replay()
            x.check(o)


# ---- errors


def test_refused_models(device: str) -> None:
    x = Engine(device, torch.bfloat16)

    def backend(**more: Any) -> Any:
        return sglang.TesseraAttnBackend(types.SimpleNamespace(**vars(x.runner) | more))

    def config(name: str, encoder: bool) -> Any:
        return types.SimpleNamespace(attention_arch=types.SimpleNamespace(name=name), is_encoder_decoder=encoder)

    with pytest.raises(NotImplementedError, match=r"model_config.attention_arch = MLA: must be MHA"):
        backend(model_config=config("MLA", False))
    with pytest.raises(NotImplementedError, match=r"model_config.is_encoder_decoder = True: must be False"):
        backend(model_config=config("MHA", True))
    with pytest.raises(NotImplementedError, match=r"kv_cache_dtype = torch.float8_e5m2: must be one of torch.float32"):
        backend(kv_cache_dtype=torch.float8_e5m2)
    with pytest.raises(NotImplementedError, match=r"one pool for all layers; start SGLang with --disable-hybrid-swa"):
        backend(token_to_kv_pool=types.SimpleNamespace(swa_kv_pool=object()))
    with pytest.raises(NotImplementedError, match=r"kv_index_translator.is_translating = True: slots must be those"):
        backend(kv_index_translator=types.SimpleNamespace(is_translating=True))


def test_refused_steps(device: str) -> None:
    x = Engine(device, torch.bfloat16)
    batch = x.schedule([3, 4], [1, 1], Mode.DECODE)
    with pytest.raises(ValueError, match=r"forward_metadata is None: init_forward_metadata must be called first"):
        x.forward(batch)
    for mode, spec, text in (
        (Mode.DECODE, object(), "spec_info is given: must be None"),
        (Mode.TARGET_VERIFY, None, "spec_info is given: must be None"),
        (Mode.DLLM_EXTEND, None, "forward_mode = DLLM_EXTEND: must be DECODE, EXTEND"),
    ):
        refused = types.SimpleNamespace(**vars(batch) | {"forward_mode": mode, "spec_info": spec})
        for init in (x.backend.init_forward_metadata, x.backend.init_forward_metadata_out_graph):
            with pytest.raises(NotImplementedError, match=text):
                init(refused)
    with pytest.raises(ValueError, match=r"batch_size = 2: must be at most 0, the max_bs of init_cuda_graph_state"):
        hooks(x, "0.5.23", batch, True)
    x.backend.init_cuda_graph_state(1, 1)
    with pytest.raises(ValueError, match=r"batch_size = 2: must be at most 1, the max_bs of init_cuda_graph_state"):
        hooks(x, "0.5.8", batch, True)
    with pytest.raises(ValueError, match=r"batch_size = 2: no graph was captured for it, only for \[\]"):
        hooks(x, "0.5.23", batch, False)


def test_refused_layers(device: str) -> None:
    x = Engine(device, torch.bfloat16)
    batch = x.schedule([3], [1], Mode.DECODE)
    x.backend.init_forward_metadata(batch)
    right = vars(x.layer)
    for wrong, text in (
        ({"is_cross_attention": True}, "layer.is_cross_attention = True: must be False"),
        ({"attn_type": types.SimpleNamespace(value="encoder_only")}, "layer.attn_type = 'encoder_only': must be 'dec"),
        ({"logit_cap": 3.0, "logit_capping_method": "x"}, "layer.logit_capping_method = 'x': must be 'tanh'"),
        ({"xai_temperature_len": 9}, "layer.xai_temperature_len = 9: must be -1"),
        ({"use_irope": True}, "layer.use_irope = True: must be False"),
    ):
        x.layer = types.SimpleNamespace(**right | wrong)
        with pytest.raises(NotImplementedError, match=text):
            x.forward(batch)
    x.layer = types.SimpleNamespace(**right)
    with pytest.raises(NotImplementedError, match=r"q_rope is given: must be None"):
        x.forward(batch, q_rope=x.q)
    with pytest.raises(NotImplementedError, match=r"return_lse is given: must be None"):
        x.forward(batch, return_lse=True)
    x.check(x.forward(batch, k_rope=None, return_lse=False))
    x.pool.k = x.pool.k[:, :1]
    with pytest.raises(
        ValueError, match=r"the pool's buffer has shape \(\d+, 1, 32\): must be \(slots, 2, 32\), slots"
    ):
        x.forward(batch, save_kv_cache=False)
    x = Engine(device, torch.bfloat16, fp8=True)
    x.layer.v_scale = torch.ones(3, device=device)
    x.backend.init_forward_metadata(batch)
    with pytest.raises(ValueError, match=r"layer.v_scale has shape \(3,\): must be one number, or one for each of"):
        x.backend.forward_decode(x.q[:1], None, None, x.layer, batch)


def test_register(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without SGLang one clear error; with it the name is known to its registry and to its command line, once."""
    made: dict[str, Any] = {}
    choices = ["fa3"]
    modules = {
        "base_attn_backend": types.SimpleNamespace(),
        "attention_registry": types.SimpleNamespace(
            register_attention_backend=lambda name: lambda create: made.__setitem__(name, create)
        ),
        "server_args": types.SimpleNamespace(
            ATTENTION_BACKEND_CHOICES=choices, add_attention_backend_choices=choices.extend
        ),
    }
    monkeypatch.setattr(engine, "find", lambda path: modules[path.rsplit(".", 1)[1]])
    sglang.register()
    sglang.register()
    sglang.register("another")
    assert made == {"tessera": sglang.TesseraAttnBackend, "another": sglang.TesseraAttnBackend}
    assert choices == ["fa3", "tessera", "another"]
    monkeypatch.setattr(engine, "find", lambda path: None)
    monkeypatch.setattr(engine.importlib.metadata, "version", lambda name: "0.1.0")
    with pytest.raises(ImportError, match=r"sglang 0.1.0 has no module sglang.srt.layers.attention.base_attn_backend"):
        sglang.register()


def test_entry_point() -> None:
    assert engine_steps.entry_point("sglang.srt.plugins") is sglang.register


# ---- the interface


@pytest.mark.parametrize("version", engine_interfaces.SGLANG)
def test_interface(version: str) -> None:
    for method, recorded in engine_interfaces.SGLANG[version].items():
        expected = engine_interfaces.parameters(recorded)
        found = [
            (x.name, None if x.default is x.empty else repr(x.default))
            for x in inspect.signature(getattr(sglang.TesseraAttnBackend, method)).parameters.values()
            if x.name != "self"
        ]
        # Layers of models with sinks hand them on by name.
        assert found[: len(expected)] == expected, method
        assert [name for name, _ in found[len(expected) :]] in ([], ["sinks", "more"])


@pytest.mark.skipif(sglang._sglang is None, reason="SGLang is not installed")
def test_installed() -> None:
    """The class is SGLang's, nothing of theirs is abstract any more, and the record is of this interface."""
    theirs: Any = sglang._sglang
    assert issubclass(sglang.TesseraAttnBackend, theirs.AttentionBackend)
    assert not getattr(sglang.TesseraAttnBackend, "__abstractmethods__", None)
    recorded = engine_interfaces.SGLANG.get(importlib.metadata.version("sglang"), {})
    for method, signature in recorded.items():
        parameters = inspect.signature(getattr(theirs.AttentionBackend, method)).parameters
        names = [name for name in parameters if name not in ("self", "kwargs")]
        assert names == [name for name, _ in engine_interfaces.parameters(signature)], method


@pytest.mark.skipif(sglang._sglang is None, reason="SGLang is not installed")
def test_chosen() -> None:
    """SGLang's command line and its registry know the backend by its name."""
    arguments = pytest.importorskip("sglang.srt.server_args", exc_type=ImportError)
    registry = importlib.import_module("sglang.srt.layers.attention.attention_registry")
    sglang.register()
    assert registry.ATTENTION_BACKENDS["tessera"] is sglang.TesseraAttnBackend
    assert arguments.ATTENTION_BACKEND_CHOICES.count("tessera") == 1
