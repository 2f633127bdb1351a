"""tessera.attention inside PyTorch's machinery: custom ops, compilation, export, autocast, checkpointing, transforms,
CUDA graphs."""

import io
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import tessera
import tessera.torch as tt


@pytest.fixture
def qkv(device: str) -> tuple[Tensor, Tensor, Tensor]:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    shapes = ((2, 33, 4, 32), (2, 47, 2, 32), (2, 47, 2, 32))
    q, k, v = (torch.randn(shape, device=device).to(dtype).requires_grad_() for shape in shapes)
    return q, k, v


def gradients(o: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    outputs = o if isinstance(o, tuple) else (o,)
    return torch.autograd.grad(outputs, inputs, [torch.ones_like(x) for x in outputs])


def op_arguments(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> tuple[Any, ...]:
    """Of torch.ops.tessera.forward, causal."""
    names = ("bias", "alibi_slopes", "sink", "cu_seqlens_q", "cu_seqlens_k", "rng_state")
    dropout_p = 0.25 if "rng_state" in given else 0.0
    return (q, k, v, *(given.get(n) for n in names), given.get("longest", 0), given.get("longest", 0), None, 0.0, -1, 0,
            False, dropout_p, True, False)  # fmt: skip


def test_opcheck(qkv: tuple[Tensor, Tensor, Tensor], device: str) -> None:
    q, k, v = qkv
    bias = torch.randn(1, 4, 33, 47, device=device, requires_grad=True)
    sink = torch.randn(4, device=device, requires_grad=True)
    at = torch.tensor([0, 10, 33], dtype=torch.int32, device=device)
    state = torch.tensor([1, 2])
    for arguments in (
        op_arguments(q, k, v),
        op_arguments(q, k, v, bias=bias, sink=sink),
        op_arguments(q, k, v, rng_state=state),
        op_arguments(q[0].detach().requires_grad_(), k[0, :33].detach(), v[0, :33].detach(), cu_seqlens_q=at,
                     cu_seqlens_k=at, longest=23),
    ):  # fmt: skip
        torch.library.opcheck(torch.ops.tessera.forward, arguments)
    o, lse, _ = tt.forward(q, k, v, causal=True, bias=bias, sink=sink)
    forward = op_arguments(*(x.detach() for x in qkv), bias=bias.detach(), sink=sink.detach())
    arguments = (torch.randn_like(o), torch.randn_like(lse), *forward[:3], o, lse, *forward[3:], True, True)
    torch.library.opcheck(torch.ops.tessera.backward, arguments)


def test_op_has_the_bits_of_the_direct_call(qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    direct = tessera.attention(*qkv, causal=True, return_lse=True, deterministic=True)
    op = torch.ops.tessera.forward(*op_arguments(*qkv))
    assert all(map(torch.equal, direct, op))
    assert all(map(torch.equal, gradients(direct, qkv), gradients(op, qkv)))


def test_compiled_once_for_a_hundred_lengths(device: str) -> None:
    torch._dynamo.reset()
    compilations = 0

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        nonlocal compilations
        compilations += 1
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    @torch.compile(fullgraph=True, dynamic=True, backend=backend)
    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        result: Tensor = tessera.attention(q, k, v, causal=True, softcap=5.0, deterministic=True)
        return result * 2

    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    for length in range(3, 103):  # from 3: a length of 2 would be taken for the number of heads
        q, k, v = (torch.randn(1, length, 2, 16, device=device).to(dtype).requires_grad_() for _ in range(3))
        o = layer(q, k, v)
        expected = tessera.attention(q, k, v, causal=True, softcap=5.0, deterministic=True) * 2
        assert torch.equal(o, expected)
        if length == 3:
            first = compilations  # 2 where dynamo takes back that it made a symbol of a default argument
        if length % 25 == 0:
            assert all(map(torch.equal, gradients(o, (q, k, v)), gradients(expected, (q, k, v))))
    assert compilations == first


def test_compiled_by_inductor(qkv: tuple[Tensor, Tensor, Tensor], device: str) -> None:
    torch._dynamo.reset()
    bias = torch.randn(1, 4, 33, 47, device=device, requires_grad=True)

    def layer(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        o, lse = tessera.attention(q.sin(), k, v, causal=True, bias=bias, return_lse=True)
        return o.cos(), lse

    eager = layer(*qkv, bias)
    compiled = torch.compile(layer, fullgraph=True)(*qkv, bias)
    for a, b in zip((*eager, *gradients(eager, (*qkv, bias))), (*compiled, *gradients(compiled, (*qkv, bias))),
                    strict=True):  # fmt: skip
        torch.testing.assert_close(
            a, b, rtol=1e-2 if a.dtype != torch.float32 else 1e-5, atol=1e-2 if device == "cuda" else 1e-5
        )


def test_compiled_dropout_draws_anew(qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    torch._dynamo.reset()
    layer = torch.compile(
        lambda q, k, v: tessera.attention(q, k, v, dropout_p=0.5), fullgraph=True, backend="aot_eager"
    )
    first, second = layer(*qkv), layer(*qkv)
    assert not torch.equal(first, second)
    assert (gradients(first, qkv)[2] != 0).any()


def test_exported(qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    class Layer(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            result: Tensor = tessera.attention(q, k, v, causal=True)
            return result

    inputs = tuple(x.detach() for x in qkv)
    rows, keys = torch.export.Dim("rows", min=2, max=4096), torch.export.Dim("keys", min=2, max=4096)
    program = torch.export.export(Layer(), inputs, dynamic_shapes=({1: rows}, {1: keys}, {1: keys}))
    assert any("tessera.forward" in str(node.target) for node in program.graph.nodes)
    longer = tuple(torch.cat([x, x], 1) for x in inputs)
    for given in (inputs, longer):
        assert torch.equal(program.module()(*given), tessera.attention(*given, causal=True))


def test_fake_tensors(qkv: tuple[Tensor, Tensor, Tensor], device: str) -> None:
    plain = [x.detach() for x in qkv]
    with FakeTensorMode() as mode:
        q, k, v = map(mode.from_tensor, plain)
        o, lse = tessera.attention(q, k, v, return_lse=True)
        assert o.shape == q.shape and lse.shape == (2, 4, 33) and o.device.type == device


def test_meta_tensors(qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    o = tessera.attention(*(x.detach().to("meta") for x in qkv))
    assert o.is_meta and o.shape == qkv[0].shape


def test_flops_are_counted(qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    """As torch counts its own attention: 4 per pair of query and key and element of a head, masks disregarded."""
    with FlopCounterMode(display=False) as counter:
        o = tessera.attention(*qkv, causal=True)
    assert counter.get_total_flops() == 4 * 2 * 4 * 33 * 47 * 32
    with FlopCounterMode(display=False) as counter:
        o = tessera.attention(*qkv, causal=True)
        o.sum().backward()
    assert counter.get_total_flops() == (4 + 10) * 2 * 4 * 33 * 47 * 32


def test_autocast(qkv: tuple[Tensor, Tensor, Tensor], device: str) -> None:
    q, k, v = (x.detach().float().requires_grad_() for x in qkv)
    with torch.autocast(device, torch.bfloat16):
        o = tessera.attention(q, k, v)
    assert o.dtype == torch.bfloat16
    o.sum().backward()
    assert q.grad is not None and q.grad.dtype == torch.float32
    with torch.autocast(device, torch.bfloat16, enabled=False):
        assert tessera.attention(*(x.bfloat16() for x in (q, k, v))).dtype == torch.bfloat16


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed(qkv: tuple[Tensor, Tensor, Tensor], reentrant: bool) -> None:
    """Activation checkpointing computes the same again, dropout's mask included."""

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        result: Tensor = tessera.attention(q, k, v, causal=True, dropout_p=0.3, deterministic=True)
        return result

    torch.manual_seed(5)
    plain = layer(*qkv)
    torch.manual_seed(5)
    again = checkpoint(layer, *qkv, use_reentrant=reentrant)
    assert torch.equal(plain, again)
    grads = [torch.empty(0)] * 3
    if reentrant:  # torch.autograd.grad is not for reentrant checkpoints
        again.sum().backward()
        grads = [x.grad for x in qkv]  # type: ignore[misc]
    else:
        grads = list(gradients(again, qkv))
    assert all(map(torch.equal, gradients(plain, qkv), grads))


def test_functional_gradients(qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v = (x.detach() for x in qkv)
    functional = torch.func.grad(lambda q: tessera.attention(q, k, v, deterministic=True).float().sum())(q)
    direct = gradients(tessera.attention(*qkv, deterministic=True), qkv)[0]
    assert torch.equal(functional, direct)


# Of 3 mapped indices: where the dimension is, in q, k, v, bias and alibi_slopes; None: all indices share the tensor.
MAPPED = {
    "all": (0, 0, 0, 0, 0),
    "queries": (0, None, None, None, None),
    "elsewhere": (1, 2, 3, 2, 1),
    "keys": (None, 0, 0, None, 0),
    "bias": (0, None, 0, 0, None),
}


def draw_mapped(dims: tuple[int | None, ...], device: str, bias_batch: int) -> tuple[Tensor, ...]:
    """q, k, v, bias and slopes with a dimension of 3 where dims say."""
    shapes = ((2, 9, 4, 16), (2, 11, 2, 16), (2, 11, 2, 16), (bias_batch, 1, 9, 11), (2, 4))
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    types = (dtype, dtype, dtype, dtype, torch.float32)
    sizes = [s if d is None else (*s[:d], 3, *s[d:]) for s, d in zip(shapes, dims, strict=True)]
    return tuple(torch.randn(s, device=device).to(t) for s, t in zip(sizes, types, strict=True))


@pytest.mark.parametrize("bias_batch", [1, 2])
@pytest.mark.parametrize("mapped", MAPPED)
def test_vmap(mapped: str, bias_batch: int, device: str) -> None:
    """A mapped call, its gradients, and a compiled one give what a loop over the indices gives."""
    dims = MAPPED[mapped]
    tensors = draw_mapped(dims, device, bias_batch)

    def attend(*x: Tensor) -> tuple[Tensor, Tensor]:
        o, lse = tessera.attention(
            *x[:3], bias=x[3], alibi_slopes=x[4], causal=True, deterministic=True, return_lse=True
        )
        return o, lse

    def loss(*x: Tensor) -> Tensor:
        o, lse = attend(*x)
        return o.float().square().sum() + lse.cos().sum()

    def at(i: int, *x: Tensor) -> list[Tensor]:
        return [y if d is None else y.select(d, i).contiguous() for y, d in zip(x, dims, strict=True)]

    def loop(function: Any) -> list[Tensor]:
        each = [function(*at(i, *tensors)) for i in range(3)]
        return [torch.stack(x) for x in zip(*each, strict=True)]

    tolerance = {"rtol": 1e-4, "atol": 1e-5} if device == "cpu" else {"rtol": 0.03, "atol": 0.03}
    torch._dynamo.reset()
    mapping = torch.vmap(attend, dims)
    for call in (mapping, torch.compile(mapping, fullgraph=True, backend="aot_eager")):
        for x, y in zip(call(*tensors), loop(attend), strict=True):
            torch.testing.assert_close(x, y, **tolerance)
    gradient = torch.func.grad(loss, argnums=(0, 1, 2, 3))
    for x, y in zip(torch.vmap(gradient, dims)(*tensors), loop(gradient), strict=True):
        torch.testing.assert_close(x, y, **tolerance)
    # The other way around: the gradient of a mapped call is one of what the indices share.
    outer = torch.func.grad(lambda *x: sum(y.float().square().sum() for y in torch.vmap(attend, dims)(*x)), (1, 3))
    direct = torch.func.grad(
        lambda *x: sum(y.float().square().sum() for i in range(3) for y in attend(*at(i, *x))), (1, 3)
    )
    for x, y in zip(outer(*tensors), direct(*tensors), strict=True):
        torch.testing.assert_close(x, y, **tolerance)


def test_vmap_with_dropout(qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    """Every index draws a mask of its own, and nothing else is done in silence."""
    q, k, v = (x.detach()[None].expand(3, *x.shape) for x in qkv)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return tessera.attention(q, k, v, dropout_p=0.5)

    o = torch.vmap(attend, randomness="different")(q, k, v)
    assert not torch.equal(o[0], o[1]) and not torch.equal(o[0], o[2])
    with pytest.raises(NotImplementedError, match="randomness='same': must be 'different'"):
        torch.vmap(attend, randomness="same")(q, k, v)
    with pytest.raises(RuntimeError, match="randomness"):
        torch.vmap(attend)(q, k, v)


def test_vmap_refusals(qkv: tuple[Tensor, Tensor, Tensor], device: str) -> None:
    q, k, v = (x.detach()[None] for x in qkv)
    at = torch.tensor([0, 10, 33], dtype=torch.int32, device=device)
    sink = torch.randn(1, 4, device=device)
    with pytest.raises(NotImplementedError, match="cu_seqlens_q is given under torch.vmap"):
        torch.vmap(lambda q: tessera.attention(q, q, q, cu_seqlens_q=at, max_seqlen_q=23))(q[:, 0])
    with pytest.raises(NotImplementedError, match="sink under torch.vmap"):
        torch.vmap(lambda q, k, v, sink: tessera.attention(q, k, v, sink=sink))(q, k, v, sink)
    with pytest.raises(ValueError, match=r"q has shape \(33, 4, 32\) under torch.vmap"):
        torch.vmap(tessera.attention)(q[0], k[0], v[0])


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit:DeprecationWarning")
def test_traced_functions_compute(qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    """torch.jit.trace records the operator, for other inputs, shapes and their gradients, and saves it."""
    functions: list[Any] = [
        lambda q, k, v: tessera.attention(q, k, v, causal=True, deterministic=True),
        lambda q, k, v: tt.forward(q, k, v, causal=True)[0],
        lambda q, k, v: tt.forward(q, k, v, causal=True, out=torch.empty_like(q))[0],
        lambda q, k, v: tt.sdpa(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True),
    ]
    other = [torch.randn(3, n, h, 32, device=q.device).to(q.dtype) for q, n, h in zip(qkv, (21, 40, 40), (4, 2, 2),
                                                                                      strict=True)]  # fmt: skip
    for number, function in enumerate(functions):
        traced = torch.jit.trace(function, tuple(x.detach() for x in qkv), check_trace=False)
        file = io.BytesIO()
        torch.jit.save(traced, file)
        file.seek(0)
        for call in (traced, torch.jit.load(file)):
            assert torch.equal(call(*other), function(*other)), number
    traced = torch.jit.trace(functions[0], tuple(x.detach() for x in qkv), check_trace=False)
    for x, y in zip(gradients(traced(*qkv), qkv), gradients(functions[0](*qkv), qkv), strict=True):
        assert torch.equal(x, y)
    o, lse, _ = tt.forward(*(x.detach() for x in qkv), causal=True)
    given = (torch.randn_like(o), *(x.detach() for x in qkv), o, lse)
    traced = torch.jit.trace(lambda *x: tt.backward(*x, causal=True, deterministic=True), given, check_trace=False)
    for x, y in zip(traced(*given), tt.backward(*given, causal=True, deterministic=True), strict=True):
        assert torch.equal(x, y)
    with pytest.raises(NotImplementedError, match="dropout_mask under torch.jit.trace"):
        torch.jit.trace(lambda x: tt.dropout_mask(torch.tensor([1, 2]), 0.5, 1, 1, 4, 4), o)


def test_signs_that_torch_has_put_off(qkv: tuple[Tensor, Tensor, Tensor], device: str) -> None:
    """Tensors with the negative bit are read with their sign: inputs, the gradient of o, what is saved."""
    put_off = torch._neg_view
    bias, sink = torch.randn(2, 4, 33, 47, device=device), torch.randn(4, device=device)
    slopes = torch.rand(4, device=device)
    given = {"q": qkv[0], "k": qkv[1], "v": qkv[2], "bias": bias, "alibi_slopes": slopes, "sink": sink}
    given = {name: x.detach() for name, x in given.items()}
    for name in given:
        flipped, plain = ({**given, name: f(given[name])} for f in (put_off, torch.neg))
        assert flipped[name].is_neg()
        assert torch.equal(tessera.attention(**flipped), tessera.attention(**plain)), name
        flipped, plain = ({n: x.requires_grad_(n != "alibi_slopes") for n, x in y.items()} for y in (flipped, plain))
        a, b = (
            torch.autograd.grad(
                tessera.attention(**y, deterministic=True).sum(), [x for n, x in y.items() if n != "alibi_slopes"]
            )
            for y in (flipped, plain)
        )
        assert all(map(torch.equal, a, b)), name
    o, lse = tessera.attention(*qkv, return_lse=True, deterministic=True)
    weights = [torch.randn_like(o), torch.randn_like(lse)]
    a, b = (
        torch.autograd.grad((o, lse), qkv, [f(w) for w in weights], retain_graph=True) for f in (put_off, torch.neg)
    )
    assert all(map(torch.equal, a, b))


def test_inference_mode(qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    with torch.inference_mode():
        o = tessera.attention(*qkv)
    assert torch.equal(o, tessera.attention(*qkv))


def test_parameters_and_other_threads(qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    from concurrent.futures import ThreadPoolExecutor

    expected = tessera.attention(*qkv)
    q = torch.nn.Parameter(qkv[0].detach())
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: tessera.attention(q, *qkv[1:]), range(32)))
    assert all(torch.equal(o, expected) for o in results)


def test_threads() -> None:
    q, k, v = (torch.randn(1, 200, 4, 32) for _ in range(3))
    before = tessera.get_num_threads()
    expected = tessera.attention(q, k, v)
    try:
        for threads in (1, 3):
            tessera.set_num_threads(threads)
            assert tessera.get_num_threads() == threads
            assert torch.equal(tessera.attention(q, k, v), expected)
    finally:
        tessera.set_num_threads(before)
    with pytest.raises(ValueError, match="num_threads = 0"):
        tessera.set_num_threads(0)


@pytest.mark.skipif("not hasattr(__import__('os'), 'fork')")
def test_a_forked_child_computes() -> None:
    import os

    q, k, v = (torch.randn(1, 200, 4, 32) for _ in range(3))
    expected = tessera.attention(q, k, v)
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(tessera.attention(q, k, v), expected) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_cuda_graph(qkv: tuple[Tensor, Tensor, Tensor], device: str) -> None:
    if device != "cuda":
        pytest.skip("needs --device cuda")
    q, k, v = (x.detach().requires_grad_() for x in qkv)

    def step() -> tuple[Tensor, ...]:
        o = tessera.attention(q, k, v, causal=True, deterministic=True)
        return o, *torch.autograd.grad(o, (q, k, v), torch.ones_like(o))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(3):
        with torch.no_grad():
            for x in (q, k, v):
                x.copy_(torch.randn_like(x))
        graph.replay()
        assert all(map(torch.equal, captured, step()))
    with pytest.raises(RuntimeError, match="capture without dropout"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        tessera.attention(q, k, v, dropout_p=0.5)


def test_other_streams(qkv: tuple[Tensor, Tensor, Tensor], device: str) -> None:
    """Work is enqueued on the current stream: the result of one is read after what it waits for."""
    if device != "cuda":
        pytest.skip("needs --device cuda")
    q, k, v = (x.detach() for x in qkv)
    expected = tessera.attention(q, k, v)
    stream = torch.cuda.Stream()
    late = torch.zeros_like(q)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.copy_(q)
        o = tessera.attention(late, k, v)
    stream.synchronize()
    assert torch.equal(o, expected)
