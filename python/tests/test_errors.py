"""Wrong use raises, and the text names the argument, its value, and what would be accepted."""

import dataclasses
import inspect
import re
from collections.abc import Callable
from typing import Any, get_type_hints

import pytest
import torch

import tessera
import tessera.torch as tt
from tessera.arguments import Arguments, Keywords
from tessera.torch import ops


def x(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


Q, K = x(2, 5, 4, 16), x(2, 7, 2, 16)
AT = torch.tensor([0, 2, 5], dtype=torch.int32)

WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"q": 3}, TypeError, "q is of type 'int': must be a torch tensor, a NumPy array"),
    ({"k": [[1.0]]}, TypeError, "k is of type 'list', but q is a torch tensor"),
    ({"k": None}, TypeError, "k is of type 'NoneType'"),
    ({"q": Q.double()}, ValueError, "q.dtype = float64: must be float32, bfloat16 or float16"),
    ({"q": Q.to(torch.complex64)}, ValueError, "q.dtype = complex64: must be float32, bfloat16 or float16"),
    ({"q": Q.to(torch.float8_e4m3fn)}, ValueError,
     "q.dtype = float8_e4m3fn: must be float32, bfloat16 or float16; tessera.scaled_attention takes 8 bits"),
    ({"v": K.to(torch.float8_e5m2)}, ValueError, "v.dtype = float8_e5m2, but q.dtype = float32: they must be the same"),
    ({"q": Q.to_sparse()}, ValueError, "q.layout = torch.sparse_coo: must be torch.strided"),
    ({"q": Q.to(torch.uint16)}, ValueError, "q.dtype = uint16: must be float32, bfloat16 or float16"),
    ({"v": K.bfloat16()}, ValueError, "v.dtype = bfloat16, but q.dtype = float32: they must be the same"),
    ({"q": Q[0, 0]}, ValueError, "q has shape (4, 16): must be (batch, seqlen, heads, head_dim)"),
    ({"v": K[..., 0]}, ValueError, "v has shape (2, 7, 2): must be (batch, seqlen, heads, head_dim)"),
    ({"k": x(2, 7, 2, 17)}, ValueError, "k has shape (2, 7, 2, 17): must be (2, 7, 2, 16)"),
    ({"v": x(2, 8, 2, 16)}, ValueError, "v has shape (2, 8, 2, 16): must be (2, 7, 2, 16)"),
    ({"k": x(1, 7, 2, 16), "v": x(1, 7, 2, 16)}, ValueError, "k has shape (1, 7, 2, 16): must be (2, 7, 2, 16)"),
    ({"k": x(2, 7, 3, 16), "v": x(2, 7, 3, 16)}, ValueError, "num_heads"),
    ({"q": Q.transpose(2, 3).contiguous().transpose(2, 3)}, ValueError,
     "q: stride of the last dimension = 4: must be 1; .contiguous() makes it so"),
    ({"k": torch.empty(2, 7, 2, 16, device="meta")}, ValueError, "k cannot be read: Cannot pack tensors on meta"),
    ({"window": 3}, ValueError, "window = 3: must be a pair (left, right), -1 for unbounded"),
    ({"window": (-2, 0)}, ValueError, "window[0] = -2: must be 0 or more, or -1 for unbounded"),
    ({"window": (0, -3)}, ValueError, "window[1] = -3: must be 0 or more, or -1 for unbounded"),
    ({"window": ("a", 0)}, TypeError, "window[0] = 'a': must be an integer"),
    ({"window": (2**70, 0)}, TypeError, "window[0] = 1180591620717411303424: must be an integer of 64 bits"),
    ({"causal": True, "window": (5, 3)}, ValueError,
     "window = (5, 3) together with causal = True: its right end must be 0 or -1"),
    ({"causal": True, "window": (5, -3)}, ValueError, "window[1] = -3: must be 0 or more, or -1 for unbounded"),
    ({"causal": True, "window": (5, None)}, TypeError, "window[1] = None: must be an integer"),
    ({"alignment": "left"}, ValueError, "alignment = 'left': must be 'bottom_right' or 'top_left'"),
    ({"softcap": -1.0}, ValueError, "softcap = -1"),
    ({"softcap": None}, TypeError, "softcap = None: must be a number"),
    ({"softmax_scale": float("nan")}, ValueError, "softmax_scale = nan"),
    ({"softmax_scale": torch.ones(20)}, TypeError,
     "softmax_scale = tensor([1., 1., 1., 1., 1., 1., 1., 1., 1., 1., 1., 1., 1.,  ...: must be a number"),
    ({"dropout_p": 1.0}, ValueError, "dropout_p = 1"),
    ({"dropout_p": 0.5, "rng_state": (1, 2)}, ValueError, "rng_state is (1, 2): must be (seed, offset), a torch.int64"),
    ({"dropout_p": 0.5, "rng_state": x(2)}, ValueError, "rng_state is torch.float32 of shape (2,): must be"),
    ({"dropout_p": 0.5, "rng_state": AT.long()}, ValueError, "rng_state is torch.int64 of shape (3,): must be"),
    ({"alibi_slopes": [1.0]}, TypeError, "alibi_slopes is of type 'list', but q is a torch tensor"),
    ({"alibi_slopes": x(3)}, ValueError, "alibi_slopes has shape (3,): must be (num_heads,) or (batch, num_heads)"),
    ({"alibi_slopes": x(4).double()}, ValueError, "alibi_slopes.dtype = float64: must be float32"),
    ({"sink": x(4, 1)}, ValueError, "sink has shape (4, 1): must be (num_heads,)"),
    ({"sink": x(8)[::2]}, ValueError, "sink must be contiguous"),
    ({"bias": x(2, 4, 5, 6)}, ValueError, "bias has shape (2, 4, 5, 6): must be (2 or 1, 4 or 1, 5 or 1, 7 or 1)"),
    ({"bias": x(2, 4, 5, 7).half()}, ValueError, "bias.dtype = float16: must be float32 or q's type, float32"),
    ({"bias": 1.0}, TypeError, "bias is of type 'float', but q is a torch tensor"),
    ({"q": torch.nested.nested_tensor([Q[0]], layout=torch.jagged)}, NotImplementedError, "q is a nested tensor"),
    ({"cu_seqlens_q": [0, 5]}, TypeError, "cu_seqlens_q is of type 'list', but q is a torch tensor"),
    ({"cu_seqlens_k": AT}, ValueError, "cu_seqlens_k is given, but cu_seqlens_q is None"),
    ({"max_seqlen_q": 3}, ValueError, "max_seqlen_q is given, but cu_seqlens_q is None"),
    ({"cu_seqlens_q": AT}, ValueError, "q has shape (2, 5, 4, 16): must be (total, heads, head_dim), since"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "error", "text"), WRONG, ids=[w[2][:40] for w in WRONG])
def test_wrong_arguments(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        tessera.attention(**{"q": Q, "k": K, "v": K, **arguments})


PACKED_WRONG: list[tuple[dict[str, Any], str]] = [
    ({"cu_seqlens_q": AT.long()}, "cu_seqlens_q.dtype = int64: must be int32"),
    ({"cu_seqlens_k": AT[:2].contiguous()}, "cu_seqlens_k has shape (2,): must be (batch + 1,), like cu_seqlens_q"),
    ({"cu_seqlens_q": torch.tensor([0, 4, 2, 5], dtype=torch.int32)}, "cu_seqlens_q[2] = 2: the sequence's length"),
    ({"cu_seqlens_q": torch.tensor([1, 2, 5], dtype=torch.int32)}, "cu_seqlens_q[0] = 1: must be 0"),
    ({"cu_seqlens_q": torch.tensor([0, 2, 4], dtype=torch.int32), "max_seqlen_q": 3}, "cu_seqlens_q[2] = 4"),
    ({"max_seqlen_q": -1}, "max_seqlen_q = -1: must lie in [0, "),
    ({"max_seqlen_k": 2}, "k has 5 rows: the 2 sequences of cu_seqlens_k hold 4 at most, with max_seqlen_k = 2"),
    ({"max_seqlen_q": 2, "max_seqlen_k": 3}, "q has 5 rows: the 2 sequences of cu_seqlens_q hold 4 at most"),
    ({"max_seqlen_q": 1 << 40}, "max_seqlen_q = 1099511627776: must lie in [0, "),
]


@pytest.mark.parametrize(("arguments", "text"), PACKED_WRONG, ids=[w[1][:40] for w in PACKED_WRONG])
def test_wrong_packed_arguments(arguments: dict[str, Any], text: str) -> None:
    p = x(5, 2, 16)
    with pytest.raises(ValueError, match=re.escape(text)):
        tessera.attention(p, p, p, **{"cu_seqlens_q": AT, **arguments})


PUBLIC = (tessera.attention, tessera.explain, tt.forward, tt.backward)
NAMES = [field.name for field in dataclasses.fields(Arguments)]


@pytest.mark.parametrize("function", PUBLIC, ids=lambda f: f"{f.__module__}.{f.__name__}")
def test_signatures_agree_with_one_description(function: Callable[..., Any]) -> None:
    """Names, order and defaults are the same everywhere; so are types, but for arrays where they must be tensors."""
    parameters = inspect.signature(function).parameters
    shared = [name for name in parameters if name in NAMES]
    assert shared == NAMES == list(Keywords.__annotations__)
    assert all(parameters[name].kind is inspect.Parameter.KEYWORD_ONLY for name in NAMES)
    expected = inspect.signature(tessera.attention).parameters
    assert [parameters[name].default for name in NAMES] == [expected[name].default for name in NAMES]
    types, keywords, fields = get_type_hints(function), get_type_hints(Keywords), get_type_hints(Arguments)
    for name in NAMES:
        is_array = fields[name] is Any
        if is_array and function in (tt.forward, tt.backward):
            assert types[name] == torch.Tensor | None
        else:
            assert types[name] == keywords[name] and (is_array or types[name] == fields[name])


@pytest.mark.parametrize("function", PUBLIC, ids=lambda f: f"{f.__module__}.{f.__name__}")
def test_every_argument_arrives(function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each public function hands on what it is given under the name under which it is given."""

    class Arrived(Exception):
        pass

    def prepare(q: Any, k: Any, v: Any, arguments: Arguments) -> Any:
        assert q is Q and k is K and v is V
        raise Arrived(arguments)

    monkeypatch.setattr(ops, "prepare", prepare)
    values: dict[str, Any] = {name: object() for name in NAMES} | {"dropout_p": 0.25}
    V = x(2, 7, 2, 16)
    before, after = ((Q,), (Q, Q)) if function is tt.backward else ((), ())
    with pytest.raises(Arrived) as arrived:
        function(*before, Q, K, V, *after, **values)
    (arguments,) = arrived.value.args
    assert {name: getattr(arguments, name) for name in NAMES} == values


def test_backward_needs_what_forward_returned() -> None:
    o, lse, _ = tt.forward(Q, K, K)
    with pytest.raises(ValueError, match="lse has shape"):
        tt.backward(o, Q, K, K, o, lse[:, :2])
    with pytest.raises(ValueError, match="rng_state is None"):
        tt.backward(o, Q, K, K, o, lse, dropout_p=0.5)
    with pytest.raises(ValueError, match="dbias is given, but bias is None"):
        tt.backward(o, Q, K, K, o, lse, dbias=x(1, 1, 1, 1))
    with pytest.raises(ValueError, match="dbias has shape"):
        tt.backward(o, Q, K, K, o, lse, bias=x(1, 4, 1, 7), dbias=x(1, 1, 1, 7))


def test_numbers_that_are_none() -> None:
    with pytest.raises(TypeError, match="num_threads = 'two': must be an integer"):
        tessera.set_num_threads("two")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="ordinal = None: must be an integer"):
        tessera.gpu(None)  # type: ignore[arg-type]
    for ordinal in (-1, 2**32):
        with pytest.raises(ValueError, match=f"ordinal = {ordinal}: must be"):
            tessera.gpu(ordinal)
    with pytest.raises(TypeError, match="device = 3: must be the name of a device"):
        tessera.explain(Q, K, K, device=3)  # type: ignore[arg-type]


def test_no_gpu_here() -> None:
    """Where there is none, everyone who asks for a GPU is told why; the CPU goes on working."""
    if tessera.gpu() is not None:
        pytest.skip("there is a GPU")
    with pytest.raises(RuntimeError, match="libcuda|driver|GPU") as reason:
        tessera.gpu(required=True)
    with pytest.raises(RuntimeError, match=re.escape(str(reason.value))):
        tessera.explain(Q.bfloat16(), K.bfloat16(), K.bfloat16(), device="gpu")
    assert tessera.attention(Q, K, K).shape == Q.shape


def test_no_such_gpu() -> None:
    assert tessera.gpu(1000) is None
    with pytest.raises(RuntimeError, match="no NVIDIA driver|'gpu:1000': this machine has|cuDeviceGetCount"):
        tessera.gpu(1000, required=True)


def test_gpu_tensors(device: str) -> None:
    if device != "cuda":
        pytest.skip("needs --device cuda")
    q, k = Q.cuda(), K.cuda()
    with pytest.raises(NotImplementedError, match="q.dtype = float32: on a GPU it must be bfloat16 or float16"):
        tessera.attention(q, k, k)
    q, k = q.bfloat16(), k.bfloat16()
    with pytest.raises(ValueError, match="k is on cpu, but q is on cuda:0: all tensors must be on one device"):
        tessera.attention(q, k.cpu(), k)
    with pytest.raises(ValueError, match="sink is on cpu, but q is on cuda:0"):
        tessera.attention(q, k, k, sink=x(4))
    low, one = q.to(torch.float8_e4m3fn), torch.ones((), device="cuda")
    with pytest.raises(ValueError, match="k_scale is on cpu, but q is on cuda:0"):
        tessera.scaled_attention(low, low, low, one, one.cpu(), one)
    big = torch.zeros(1, 4, 1, 512, dtype=torch.bfloat16, device="cuda")
    with pytest.raises(NotImplementedError, match="head_dim"):
        tessera.attention(big, big, big)
