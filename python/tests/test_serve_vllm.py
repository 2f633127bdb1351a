"""tessera.serve.vllm: steps as vLLM's model runner plays them, against attention in double."""

import importlib
import importlib.metadata
import inspect
import random
import subprocess
import sys
import types
from typing import Any

import engine_interfaces
import engine_steps
import pytest
import torch
from torch import Tensor

from tessera.serve import engine, vllm

HEADS, HEADS_K, D = 6, 2, 32

# How (num_blocks, 2, block_size, num_kv_heads, head_size), or what later versions make, lies in memory.
LAYOUTS = ("NHD", "HND", "keys first", "keys first, HND", "of all layers", "later, NHD", "later, HND")


def make_cache(layout: str, blocks: int, size: int, dtype: torch.dtype, device: str) -> Tensor:
    """Full of NaN."""

    def empty(*shape: int) -> Tensor:
        bits = torch.full(shape, 0x7F, dtype=torch.uint8, device=device)
        return bits if dtype is torch.uint8 else torch.full(shape, torch.nan, dtype=dtype, device=device)

    if layout == "NHD":
        return empty(*vllm.TesseraAttentionBackend.get_kv_cache_shape(blocks, size, HEADS_K, D))
    if layout == "HND":
        return empty(blocks, 2, HEADS_K, size, D).transpose(2, 3)
    if layout == "keys first":
        return empty(2, blocks, size, HEADS_K, D).transpose(0, 1)
    if layout == "keys first, HND":
        return empty(2, blocks, HEADS_K, size, D).permute(1, 0, 3, 2, 4)
    if layout == "of all layers":
        return empty(blocks, 3, 2, size, HEADS_K, D)[:, 1]
    if layout == "later, NHD":
        return empty(blocks, size, HEADS_K, 2 * D).transpose(1, 2)
    return empty(blocks, HEADS_K, size, 2 * D)


class Engine:
    """A model runner's side of one layer: requests, blocks in random order, and the tensors it keeps on the device."""

    def __init__(
        self,
        device: str,
        dtype: torch.dtype,
        *,
        layout: str = "NHD",
        block_size: int = 16,
        fp8: bool = False,
        per_head: bool = False,
        reqs: int = 8,
        tokens: int = 96,
        **options: Any,
    ):
        self.device, self.dtype, self.size, self.fp8 = device, dtype, block_size, fp8
        self.blocks_of = -(-150 // block_size)
        blocks = reqs * self.blocks_of + 3
        self.cache = make_cache(layout, blocks, block_size, torch.uint8 if fp8 else dtype, device)
        self.table = torch.randperm(blocks)[: reqs * self.blocks_of].view(reqs, -1).to(device, torch.int32)
        self.starts = torch.zeros(reqs + 1, dtype=torch.int32, device=device)
        self.lens = torch.zeros(reqs, dtype=torch.int32, device=device)
        self.slots = torch.full((tokens,), -1, dtype=torch.int64, device=device)
        shape = (HEADS_K,) if per_head else ()
        self.layer = types.SimpleNamespace(
            _k_scale=torch.rand(shape, device=device) * 0.02 + 0.01, _v_scale=torch.rand(shape, device=device) + 0.5
        )
        self.options = options
        with torch.device(device):
            self.impl = vllm.TesseraAttentionImpl(
                HEADS, D, 0.2, HEADS_K, options.get("alibi_slopes"), options.get("sliding_window"),
                "fp8" if fp8 else "auto", options.get("logits_soft_cap"), sinks=options.get("sinks"),
            )  # fmt: skip
        if random.random() < 0.5:
            self.impl.process_weights_after_loading(dtype)  # vLLM does it behind the weights
        self.builder = vllm.TesseraMetadataBuilder(None, ["layer"], None, torch.device(device))
        # What a layer is handed: parts of one projection.
        qkv = torch.empty(tokens, (HEADS + 2 * HEADS_K) * D, device=device, dtype=dtype)
        parts = qkv.split([HEADS * D, HEADS_K * D, HEADS_K * D], -1)
        self.q, self.k, self.v = (x.view(tokens, -1, D) for x in parts)
        self.out = torch.empty(tokens, HEADS, D, device=device, dtype=dtype)

    def schedule(
        self, context: list[int], new: list[int], *, reqs: int | None = None, tokens: int | None = None, causal: Any = 1
    ) -> Any:
        """The step's tensors are refilled in place, as vLLM does it, and padded to so many requests and tokens.

        Returns: the fields of CommonAttentionMetadata.
        """
        self.context, self.new, self.causal = context, new, bool(causal)
        count, total = len(new), sum(new)
        reqs, tokens = reqs or count, tokens or total
        starts = torch.tensor([0, *new]).cumsum(0)
        self.starts[: count + 1] = starts
        self.starts[count + 1 :] = total
        self.lens[:count] = torch.tensor([a + b for a, b in zip(context, new, strict=True)])
        self.lens[count:] = 0
        self.slots.fill_(-1)
        table = self.table.cpu()
        at = [
            table[b, p // self.size] * self.size + p % self.size
            for b in range(count)
            for p in range(context[b], context[b] + new[b])
        ]
        self.slots[:total] = torch.tensor(at, dtype=torch.int64)
        scale = 2.0 if self.fp8 else 1.0
        for x in (self.q, self.k, self.v):
            x.copy_(torch.randn(x.shape) * scale)
        self.k[: total or 1, 0] *= 3
        self.out.fill_(7)
        return types.SimpleNamespace(
            query_start_loc=self.starts[: reqs + 1],
            query_start_loc_cpu=self.starts[: reqs + 1].cpu(),
            seq_lens=self.lens[:reqs],
            num_reqs=reqs,
            num_actual_tokens=tokens,
            max_query_len=max(new),
            max_seq_len=self.blocks_of * self.size,
            block_table_tensor=self.table[:reqs],
            slot_mapping=self.slots[:tokens],
            causal=self.causal if isinstance(causal, (int, bool)) else causal,
        )

    def remember(self) -> None:
        """Gives requests the keys that they have before the step, and notes what the cache should hold behind it."""
        k_cache, v_cache = self.views(self.cache)
        for b, length in enumerate(self.context):
            p = torch.arange(length, device=self.device)
            block, slot = self.table[b].long()[p // self.size], p % self.size
            for cache, scale in ((k_cache, self.layer._k_scale), (v_cache, self.layer._v_scale)):
                x = torch.randn(length, HEADS_K, D, device=self.device).to(self.dtype)
                self.put(cache, block, slot, x, scale)
        self.expected = self.cache.clone()
        k_cache, v_cache = self.views(self.expected)
        slots = self.slots[: sum(self.new)]
        for cache, x, scale in ((k_cache, self.k, self.layer._k_scale), (v_cache, self.v, self.layer._v_scale)):
            self.put(cache, slots // self.size, slots % self.size, x[: slots.shape[0]], scale)

    def put(self, cache: Tensor, block: Tensor, slot: Tensor, x: Tensor, scale: Tensor) -> None:
        if self.fp8:
            x = engine_steps.quantised(x, scale.view(-1, 1)).view(torch.uint8)
        cache[block, slot] = x

    @staticmethod
    def views(cache: Tensor) -> tuple[Tensor, Tensor]:
        if cache.dim() == 5:
            return cache[:, 0], cache[:, 1]
        return cache.transpose(1, 2)[..., :D], cache.transpose(1, 2)[..., D:]

    def forward(self, common: Any, metadata: Any = None) -> Any:
        """All rows go in, those that pad the step, too."""
        metadata = metadata or self.builder.build(0, common)
        with torch.inference_mode():
            result = self.impl.forward(
                self.layer, self.q, self.k, self.v, self.cache, metadata, output=self.out, output_scale=None,
                output_block_scale=None,
            )  # fmt: skip
        assert result is self.out
        return metadata

    def check(self) -> None:
        assert engine_steps.same_bits(self.cache, self.expected), "the cache holds something else"
        k_cache, v_cache = self.views(self.expected)
        if self.fp8:
            k_scale, v_scale = (x.view(-1, 1) for x in (self.layer._k_scale, self.layer._v_scale))
            k_cache = k_cache.view(engine_steps.FP8).double() * k_scale.double()
            v_cache = v_cache.view(engine_steps.FP8).double() * v_scale.double()
        options = self.options
        window = options.get("sliding_window")
        before = None if window is None else window - 1
        first = 0
        # The longest and the shortest requests first: a mean hides them.
        order = sorted(range(len(self.new)), key=lambda b: (-self.context[b], self.new[b]))
        firsts = torch.tensor([0, *self.new]).cumsum(0).tolist()
        for b in order:
            first, rows, length = firsts[b], self.new[b], self.context[b] + self.new[b]
            p = torch.arange(length, device=self.device)
            block, slot = self.table[b].long()[p // self.size], p % self.size
            exact = engine_steps.attend(
                self.q[first : first + rows], k_cache[block, slot], v_cache[block, slot], scale=0.2, before=before,
                after=0 if self.causal else before, softcap=options.get("logits_soft_cap") or 0.0,
                slopes=None if options.get("alibi_slopes") is None else torch.tensor(options["alibi_slopes"]),
                sink=options.get("sinks"),
            )  # fmt: skip
            engine_steps.assert_close(
                f"request {b}, {self.context[b]} keys before {rows} new", self.out[first : first + rows], exact
            )
        assert bool((self.out[sum(self.new) :] == 7).all()), "padding rows were written"


def dtypes(device: str) -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16] + ([torch.float32] if device == "cpu" else [])


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window of one": {"sliding_window": 1},
    "window": {"sliding_window": 17},
    "softcap": {"logits_soft_cap": 1.5},
    "alibi": {"alibi_slopes": [0.5, 0.25, 0.1, 0.05, 0.02, 0.01]},
    "sinks": {"sinks": torch.tensor([2.0, -1.0, 0.0, 3.0, -4.0, 1.0])},
    "sinks, window": {"sinks": torch.tensor([2.0, -1.0, 0.0, 3.0, -4.0, 1.0]), "sliding_window": 5},
    "e4m3": {"fp8": True},
    "e4m3, a scale a head, window": {"fp8": True, "per_head": True, "sliding_window": 40},
}


def make(device: str, name: str, **more: Any) -> list[Engine]:
    """One engine of every type."""
    made = []
    for dtype in dtypes(device):
        options = dict(OPTIONS[name])
        if "sinks" in options:
            # Weights, in the model's type.
            options["sinks"] = torch.nn.Parameter(options["sinks"].to(device, dtype))
        made.append(Engine(device, dtype, **options, **more))
    return made


@pytest.mark.parametrize("name", OPTIONS)
def test_decode(name: str, device: str) -> None:
    """One new token a request: at the first slot of all, at ends and beginnings of blocks, in a long request."""
    for x in make(device, name):
        context = [0, 15, 16, 17, 31, 149, random.randint(1, 148)]
        common = x.schedule(context, [1] * 7)
        x.remember()
        x.forward(common)
        x.check()


@pytest.mark.parametrize("name", OPTIONS)
def test_mixed(name: str, device: str) -> None:
    """Prompts, pieces of prompts and decoding requests in one step; fewer tokens than rows."""
    for x in make(device, name):
        context = [0, 16, 33, 100, 149, random.randint(0, 80)]
        common = x.schedule(context, [17, 16, 1, 40, 1, random.randint(2, 15)])
        x.remember()
        x.forward(common)
        x.check()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fp8", [False, True])
def test_layouts(layout: str, fp8: bool, device: str) -> None:
    for size in (16, 48, 1):
        x = Engine(device, torch.bfloat16, layout=layout, block_size=size, fp8=fp8)
        common = x.schedule([0, 48, 47, random.randint(0, 99)], [1, 30, 2, 1])
        x.remember()
        x.forward(common)
        x.check()


def test_padded_requests(device: str) -> None:
    """As for a graph of 8 requests: those that pad it have no rows and no keys, and their tokens no slots."""
    for x in make(device, "plain"):
        common = x.schedule([20, 0, 149], [1, 1, 1], reqs=8, tokens=8)
        x.remember()
        x.forward(common)
        x.check()


def test_not_causal(device: str) -> None:
    for name in ("plain", "window"):
        for x in make(device, name):
            common = x.schedule([0, 30, 5], [9, 1, 20], causal=0)
            x.remember()
            x.forward(common)
            x.check()


def test_shared_keys(device: str) -> None:
    """A layer that reads another's keys writes none; nor does one that gets none."""
    x = Engine(device, torch.bfloat16)
    common = x.schedule([12, 40], [3, 1])
    x.remember()
    x.forward(common)
    x.check()
    x.k.zero_()
    x.v.zero_()
    x.out.fill_(7)
    x.impl.kv_sharing_target_layer_name = "another"
    metadata = x.forward(common)
    x.check()
    x.impl.kv_sharing_target_layer_name = None
    x.out.fill_(7)
    x.impl.forward(x.layer, x.q, None, None, x.cache, metadata, output=x.out.view(x.out.shape[0], -1))
    x.check()


def test_other_blocks(device: str) -> None:
    """Metadata for a group of layers whose keys lie elsewhere; the first group's stays as it is."""
    x = Engine(device, torch.bfloat16)
    metadata = x.builder.build(0, x.schedule([12, 40], [3, 1]))
    before = engine_steps.addresses(metadata)
    x.table, x.slots = x.table.flip(0).contiguous(), x.slots.clone()
    common = x.schedule([12, 40], [3, 1])
    x.remember()
    x.forward(common, x.builder.update_block_table(metadata, x.table[:2], x.slots[:4]))
    x.check()
    assert engine_steps.addresses(metadata) == before


def test_common_prefix(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefix that requests share is said to be one: by vLLM, or in the environment."""
    given = engine_steps.watch(monkeypatch, vllm, "prefix_levels")
    x = Engine(device, torch.bfloat16)
    x.table[1:4, :2] = x.table[0, :2]
    common = x.schedule([33, 32, 40, 100], [1, 1, 1, 1])
    x.remember()
    x.forward(common, x.builder.build(32, common, fast_build=True))
    x.check()
    x.forward(common, x.builder.build(0, common))
    monkeypatch.setenv("TESSERA_PREFIX_LEVELS", "2")
    x.forward(common, Engine(device, torch.bfloat16).builder.build(0, common))
    assert given == [1, 0, 2]


def test_batch_invariant(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's setting reaches the library. Bits of a request are then those that it has alone."""
    given = engine_steps.watch(monkeypatch, vllm, "batch_invariant")
    x = Engine(device, torch.bfloat16)
    x.forward(x.schedule([3], [1]))
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    x = Engine(device, torch.bfloat16)
    common = x.schedule([149, 3, 77], [1, 1, 1])
    x.remember()
    x.forward(common)
    x.check()
    together = x.out[:1].clone()
    alone = types.SimpleNamespace(**vars(common))
    alone.query_start_loc, alone.seq_lens = x.starts[:2], x.lens[:1]
    alone.block_table_tensor, alone.slot_mapping = x.table[:1], x.slots[:1]
    alone.num_reqs = alone.num_actual_tokens = 1
    x.forward(alone)
    assert engine_steps.same_bits(x.out[:1], together)
    assert given == [False, True, True]


# ---- graphs

STEPS = [([0, 15, 149, 64], [1, 1, 1, 1]), ([1, 16, 60, 2], [1, 1, 1, 1]), ([148, 31], [1, 1])]


@pytest.mark.parametrize("name", OPTIONS)
def test_nothing_is_read(name: str, device: str) -> None:
    """Between steps lengths, pages and slots change in place: metadata stays where it is, and nobody looks at it."""
    x = make(device, name)[0]
    x.schedule([3], [1])
    x.remember()
    x.forward(x.schedule([3], [1]))  # as the engine warms up
    captured = None
    for context, new in STEPS:
        common = x.schedule(context, new, reqs=4, tokens=4)
        x.remember()
        metadata = x.builder.build(0, common)
        captured = captured or engine_steps.addresses(metadata)
        assert engine_steps.addresses(metadata) == captured
        with engine_steps.no_reads():
            x.forward(common, metadata)
        x.check()


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_graph(name: str, mixed: bool, device: str) -> None:
    """One captured step, replayed with other lengths, pages, slots, and fewer requests."""
    if device == "cpu":
        pytest.skip("CUDA graphs need a GPU; test_nothing_is_read is what a CPU can say")
    for x in make(device, name):
        rows = 48 if mixed else 4
        x.q, x.k, x.v, x.out = (y[:rows] for y in (x.q, x.k, x.v, x.out))
        common = x.schedule([0] * 4, [rows // 4] * 4, reqs=4, tokens=rows)
        common.max_query_len = rows if mixed else 1
        x.remember()
        metadata = x.builder.build_for_cudagraph_capture(common) if vllm._vllm else x.builder.build(0, common)
        x.forward(common, metadata)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            x.forward(common, metadata)
        steps = [([0, 50], [20, 13]), ([149, 16, 0, 7], [1, 16, 1, 5])] if mixed else STEPS
        for context, new in steps:
            x.schedule(context, new, reqs=4, tokens=rows)
            x.remember()
            graph.replay()
            x.check()


# ---- what vLLM asks before


def test_backend() -> None:
    backend = vllm.TesseraAttentionBackend
    assert backend.get_name() == "CUSTOM"
    assert backend.get_impl_cls() is vllm.TesseraAttentionImpl
    assert backend.get_builder_cls() is vllm.TesseraMetadataBuilder
    assert backend.get_kv_cache_shape(9, 16, 2, 64) == (9, 2, 16, 2, 64)
    assert [backend.supports_head_size(d) for d in (64, 72, 256, 60, 264, 0)] == [True] * 3 + [False] * 3
    assert backend.supports_attn_type("decoder") and not backend.supports_attn_type("encoder_only")
    for version in ((8, 0), (9, 0), (10, 0)):
        capability = types.SimpleNamespace(major=version[0], minor=version[1])
        assert backend.supports_compute_capability(capability) == (version == (9, 0))
    for flag in ("sink", "sliding_window", "non_causal", "per_head_quant_scales", "batch_invariance"):
        assert getattr(backend, f"supports_{flag}")()
    for signature in engine_interfaces.VLLM_SUPPORTS_COMBINATION.values():
        more = [None] * (len(engine_interfaces.parameters(signature)) - 3)
        assert backend.supports_combination(72, torch.bfloat16, "auto", *more) is None
        reason = backend.supports_combination(72, torch.bfloat16, "fp8", *more)
        assert reason is not None and reason.startswith("head_size = 72: must be a multiple of 16")


@pytest.mark.parametrize("with_layers", [False, True])
@pytest.mark.parametrize("layout", ["NHD", "HND", "DHN"])
def test_stride_order(layout: str, with_layers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache that vLLM allocates by it is one that is taken, and heads lie outside slots where it says so."""
    name = "vllm.v1.attention.backends.utils"
    utils = types.SimpleNamespace(get_kv_cache_layout=lambda: layout)
    monkeypatch.setattr(engine, "require", lambda path, versions: utils if path == name else None)
    backend = vllm.TesseraAttentionBackend
    if layout == "DHN":
        with pytest.raises(ValueError, match=r"kv_cache_layout = 'DHN': must be 'NHD' or 'HND'"):
            backend.get_kv_cache_stride_order(with_layers)
        return
    order = backend.get_kv_cache_stride_order(with_layers)
    shape = (*([3] if with_layers else []), *backend.get_kv_cache_shape(7, 4, HEADS_K, D))
    memory = torch.empty([shape[i] for i in order])
    cache = memory.permute([order.index(i) for i in range(len(order))])
    assert tuple(cache.shape) == shape
    k, v = vllm.split_cache(cache[0] if with_layers else cache, D)
    assert k.shape == v.shape == (7, 4, HEADS_K, D) and k.stride(-1) == v.stride(-1) == 1
    assert (k.stride(2) > k.stride(1)) == (layout == "HND")
    assert not with_layers or cache.stride(1) == max(cache.stride())


# ---- errors


def test_refusals(device: str) -> None:
    def impl(**more: Any) -> Any:
        return vllm.TesseraAttentionImpl(**{"num_heads": 6, "head_size": D, "scale": 0.2, "num_kv_heads": 2} | more)

    for kind in ("encoder", "encoder_only", "encoder_decoder"):
        with pytest.raises(NotImplementedError, match=f"attn_type = '{kind}': must be 'decoder'; its "):
            impl(attn_type=kind)
    with pytest.raises(NotImplementedError, match=r"kv_cache_dtype = 'fp8_e5m2': must be one of auto, float16, "):
        impl(kv_cache_dtype="fp8_e5m2")
    with pytest.raises(ValueError, match=r"num_heads = 6: must be a multiple of num_kv_heads = 4"):
        impl(num_kv_heads=4)
    with pytest.raises(ValueError, match=r"sinks has 5 numbers: must be one for each of the 6 heads"):
        impl(sinks=torch.zeros(5))
    with pytest.raises(ValueError, match=r"alibi_slopes has 1 numbers: must be one for each of the 6 heads"):
        impl(alibi_slopes=[0.5])

    x = Engine(device, torch.bfloat16)
    common = x.schedule([3], [1])
    metadata = x.builder.build(0, common)
    arguments = (x.layer, x.q, x.k, x.v)
    with pytest.raises(NotImplementedError, match=r"output_scale is given: must be None"):
        x.impl.forward(*arguments, x.cache, metadata, x.out, torch.ones(()))
    with pytest.raises(NotImplementedError, match=r"output_block_scale is given: must be None"):
        x.impl.forward(*arguments, x.cache, metadata, x.out, None, torch.ones(()))
    with pytest.raises(ValueError, match=r"output is None: must be a tensor"):
        x.impl.forward(*arguments, x.cache, metadata)
    with pytest.raises(ValueError, match=r"kv_cache has shape \(2, 9, 16, 2, 32\): must be \(num_blocks, 2, "):
        x.impl.forward(*arguments, x.cache.new_empty(2, 9, 16, 2, D), metadata, x.out)
    with pytest.raises(NotImplementedError, match=r"causal is a tensor, one for each request: must be True or False"):
        x.builder.build(0, x.schedule([3], [1], causal=torch.ones(1, dtype=torch.int32)))
    x = Engine(device, torch.bfloat16, fp8=True)
    x.layer._k_scale = torch.ones(3, device=device)
    with pytest.raises(ValueError, match=r"layer._k_scale has shape \(3,\): must be one number, or one for each of"):
        x.forward(x.schedule([3], [1]))
    assert bool((x.impl.forward(*arguments, x.cache, None, x.out) == 0).all())  # measuring memory


def test_register(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without vLLM one clear error; with it the path of the class, which vLLM imports."""
    seen = []
    registry = types.SimpleNamespace(
        register_backend=lambda *given: seen.append(given), AttentionBackendEnum=types.SimpleNamespace(CUSTOM="CUSTOM")
    )
    monkeypatch.setattr(engine, "find", lambda path: registry)
    vllm.register()
    vllm.register()
    assert seen == [("CUSTOM", "tessera.serve.vllm.TesseraAttentionBackend")] * 2
    module, name = seen[0][1].rsplit(".", 1)
    assert getattr(importlib.import_module(module), name) is vllm.TesseraAttentionBackend
    monkeypatch.setattr(engine, "find", lambda path: None)
    monkeypatch.setattr(engine.importlib.metadata, "version", lambda name: "0.1.0")
    with pytest.raises(ImportError, match=r"vllm 0.1.0 has no module vllm.v1.attention.backend: .* knows versions"):
        vllm.register()


def test_entry_point() -> None:
    """What vLLM loads by name is there, and `import tessera` loads none of it."""
    assert engine_steps.entry_point("vllm.general_plugins") is vllm.register
    check = "import sys, tessera, tessera.serve; assert not [x for x in sys.modules if 'vllm' in x or 'sglang' in x]"
    subprocess.run([sys.executable, "-c", check], check=True)


def test_find(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No engine is None; an engine that lacks something of its own says so."""
    monkeypatch.syspath_prepend(str(tmp_path))
    assert engine.find("an_engine.backend") is None
    with pytest.raises(ImportError, match=r"an_engine is not installed: tessera.serve.an_engine registers"):
        engine.require("an_engine.backend", "all versions")
    (tmp_path / "an_engine.py").write_text("import something_that_is_not_there\n")
    importlib.invalidate_caches()
    with pytest.raises(ModuleNotFoundError, match="something_that_is_not_there"):
        engine.find("an_engine")
    assert "an_engine" not in sys.modules


# ---- the interface


@pytest.mark.parametrize("version", engine_interfaces.VLLM)
def test_interface(version: str) -> None:
    ours = {
        "AttentionBackend": vllm.TesseraAttentionBackend,
        "AttentionMetadataBuilder": vllm.TesseraMetadataBuilder,
        "AttentionImpl": vllm.TesseraAttentionImpl,
    }
    for kind, methods in engine_interfaces.VLLM[version].items():
        for method, recorded in methods.items():
            found = [
                (x.name, None if x.default is x.empty else repr(x.default))
                for x in inspect.signature(getattr(ours[kind], method)).parameters.values()
                if x.name not in ("self", "cls")
            ]
            assert found == engine_interfaces.parameters(recorded), f"{kind}.{method}"


@pytest.mark.skipif(vllm._vllm is None, reason="vLLM is not installed")
def test_installed() -> None:
    """The classes are vLLM's, nothing of theirs is abstract any more, and the record is of this interface."""
    theirs: Any = vllm._vllm
    for ours, base in (
        (vllm.TesseraAttentionBackend, theirs.AttentionBackend),
        (vllm.TesseraMetadataBuilder, theirs.AttentionMetadataBuilder),
        (vllm.TesseraAttentionImpl, theirs.AttentionImpl),
    ):
        assert issubclass(ours, base) and not getattr(ours, "__abstractmethods__", None)
    assert vllm.TesseraMetadataBuilder._cudagraph_support is theirs.AttentionCGSupport.ALWAYS
    common = inspect.signature(theirs.CommonAttentionMetadata).parameters
    assert set(engine_interfaces.VLLM_COMMON) <= set(common)
    recorded = engine_interfaces.VLLM.get(importlib.metadata.version("vllm"), {})
    for kind, methods in recorded.items():
        for method, signature in methods.items():
            original = getattr(getattr(theirs, kind), method, None)
            if original is not None:
                names = [name for name in inspect.signature(original).parameters if name != "self"]
                # Models add sinks where they have them.
                assert names == [name for name, _ in engine_interfaces.parameters(signature) if name != "sinks"], method


@pytest.mark.skipif(vllm._vllm is None, reason="vLLM is not installed")
def test_chosen() -> None:
    """vLLM finds the backend by its name, and has nothing against it for what it says that it does."""
    vllm.register()
    registry = importlib.import_module("vllm.v1.attention.backends.registry")
    backend = registry.AttentionBackendEnum["CUSTOM"].get_class()
    assert backend is vllm.TesseraAttentionBackend
    hopper = importlib.import_module("vllm.platforms.interface").DeviceCapability(9, 0)
    asked = inspect.signature(backend.validate_configuration).parameters
    given = {
        "head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "fp8", "block_size": 16, "has_sink": True,
        "device_capability": hopper, "attn_type": "decoder", "has_sliding_window": True, "use_non_causal": True,
        "use_batch_invariant": True, "use_per_head_quant_scales": True,
    }  # fmt: skip
    given = {name: given.get(name, False) for name in asked}
    assert backend.validate_configuration(**given) == []
    assert len(backend.validate_configuration(**given | {"attn_type": "encoder_only", "head_size": 260})) >= 2


@pytest.mark.skipif(vllm._vllm is None, reason="vLLM is not installed")
def test_their_metadata(device: str) -> None:
    """A step with vLLM's own CommonAttentionMetadata."""
    x = Engine(device, torch.bfloat16)
    common = x.schedule([0, 50, 149], [20, 1, 1], reqs=5, tokens=30)
    x.remember()
    theirs: Any = vllm._vllm
    x.forward(theirs.CommonAttentionMetadata(**{name: getattr(common, name) for name in engine_interfaces.VLLM_COMMON}))
    x.check()
