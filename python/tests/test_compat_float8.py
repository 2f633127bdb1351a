"""float8 in FlashAttention-3's functions: against three steps in double on elements times factors, by the rule of
docs/correctness.md. The parameters are those of upstream's own tests."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_compat_flash_attn_3 import PARTS, Ragged
from torch import Tensor

import reference
from tessera.compat import flash_attn_interface as fa3

E4M3 = torch.float8_e4m3fn
HEAD_DIMS = (64, 128, 192, 256)
HEADS = {"mha": (6, 6), "gqa": (6, 2), "mqa": (6, 1)}
MASKS = ("full", "causal", "local")
SEQLENS = [
    (1, 1), (64, 128), (128, 192), (256, 256), (239, 1), (799, 3), (113, 203), (113, 128), (128, 217), (113, 211),
    (108, 256), (256, 512), (384, 256), (640, 128), (512, 256), (1024, 1024), (1023, 1024), (1024, 1023), (4096, 4096),
    (4224, 4224),
]  # fmt: skip


@pytest.fixture(autouse=True)
def on_a_cpu(device: str) -> None:
    if device != "cpu":
        pytest.skip("a GPU rounds weights, too: test_eight_bits_gpu.py")


def mask_of(name: str, seqlen_k: int) -> dict[str, Any]:
    window = (random.randrange(seqlen_k), random.randrange(seqlen_k)) if name == "local" else (-1, -1)
    return {"causal": name == "causal", "window_size": window}


def factors(batch: int, heads_k: int) -> list[Tensor]:
    return [2 * torch.rand(batch, heads_k) for _ in range(3)]


def values(q: Tensor, k: Tensor, v: Tensor, descales: list[Tensor]) -> list[Tensor]:
    """In double, of dense tensors: the factor of a group is that of its queries, too."""
    group = q.shape[2] // k.shape[2]
    of_q, of_k, of_v = (x.double()[:, None, :, None] for x in descales)
    return [q.double() * of_q.repeat_interleave(group, 2), k.double() * of_k, v.double() * of_v]


def named(descales: list[Tensor]) -> dict[str, Tensor]:
    return dict(zip(("q_descale", "k_descale", "v_descale"), descales, strict=True))


def check(result: tuple[Tensor, Tensor], exact: Callable[..., tuple[Tensor, Tensor]], operands: list[Tensor]) -> None:
    """result: (o, lse), held against exact(*operands) in double and in float32, in which the CPU computes."""
    o, lse = result
    assert o.dtype is torch.bfloat16
    with reference.recording() as steps:
        exact_o, exact_lse = exact(*operands)
    plain_o, _ = exact(*(x.float() for x in operands))
    reference.assert_output_close(o, exact_o, plain_o)
    reference.assert_lse_close(lse, exact_lse, steps)


def check_dense(
    lengths: tuple[int, int], heads: tuple[int, int], dim: int, mask: str, softcap: float, batch: int = 2
) -> None:
    """Of many queries the last ones, whose positions are the same where they are alone."""
    dim_v = random.choice([dim, 128])
    q = torch.randn(batch, lengths[0], heads[0], dim) * (softcap / 4 if softcap else 1)
    k, v = (torch.randn(batch, lengths[1], heads[1], d) for d in (dim, dim_v))
    q, k, v = (x.to(E4M3) for x in (q, k, v))
    options, descales = mask_of(mask, lengths[1]), factors(batch, heads[1])
    o, lse = fa3.flash_attn_func(q, k, v, **options, **named(descales), softcap=softcap, return_attn_probs=True)
    assert o.shape == (batch, lengths[0], heads[0], dim_v) and lse.shape == (batch, heads[0], lengths[0])
    last = slice(None) if lengths[0] * lengths[1] < 2**21 else slice(-100, None)
    check(
        (o[:, last], lse[:, :, last]),
        lambda q, k, v: reference.dense(
            q, k, v, causal=options["causal"], window=options["window_size"], softcap=softcap
        ),
        values(q[:, last], k, v, descales),
    )


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("lengths", SEQLENS, ids=str)
def test_lengths(lengths: tuple[int, int], mask: str) -> None:
    heads = random.choice(list(HEADS.values()))
    if lengths[0] > 2000:
        heads = (3, 1)
    batch = 1 if lengths[0] > 1000 else 2
    check_dense(lengths, heads, random.choice(HEAD_DIMS), mask, random.choice([0.0, 15.0]), batch)


@pytest.mark.parametrize("softcap", [0.0, 15.0])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_heads(dim: int, heads: str, softcap: float) -> None:
    for mask in MASKS:
        check_dense(random.choice([x for x in SEQLENS if x[0] * x[1] < 2**16]), HEADS[heads], dim, mask, softcap)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("used, dense", [*PARTS, *(("", ""), ("k", ""), ("q", ""), ("qk", ""))])
def test_varlen(used: str, dense: str, mask: str) -> None:
    """A sequence has its factor however it lies in memory, and however it is cut where it is used in part."""
    case = Ragged(dense, used, "cpu")
    options, descales = mask_of(mask, 33), factors(5, 2)
    q, k, v = (x.to(E4M3) for x in case.operands)
    result = fa3.flash_attn_varlen_func(q, k, v, **case.lengths, **options, **named(descales), return_attn_probs=True)
    # The values of every sequence, used or not; of dense operands a sequence has 17 tokens.
    lengths = {side: [17] * 5 if side in dense else case.lengths[f"cu_seqlens_{side}"].diff().tolist() for side in "qk"}
    wide = []
    for side, x, descale in (("q", q, descales[0]), ("k", k, descales[1]), ("k", v, descales[2])):
        rows = descale.double().repeat_interleave(torch.tensor(lengths[side]), 0)
        flat = case.flat(side, x).double()
        wide.append(case.shaped(side, flat * rows.repeat_interleave(flat.shape[1] // 2, 1)[..., None]))
    check(
        result,
        lambda q, k, v: case.exact(q, k, v, causal=options["causal"], window=options["window_size"]),
        wide,
    )
    out, lse, *_ = fa3._flash_attn_forward(
        q, k, v, **case.lengths, **named(descales), causal=options["causal"],
        window_size_left=options["window_size"][0], window_size_right=options["window_size"][1],
    )  # fmt: skip
    assert torch.equal(out, result[0]) and torch.equal(lse, result[1])


@pytest.mark.parametrize("heads_k", [4, 2])
def test_qkv_packed(heads_k: int) -> None:
    shape = (2, 13, 3, 4, 64) if heads_k == 4 else (2, 13, 4 + 2 * heads_k, 64)
    qkv = torch.randn(shape).to(E4M3)
    more: dict[str, Any] = {"causal": True, "return_attn_probs": True, **named(factors(2, heads_k))}
    result = fa3.flash_attn_qkvpacked_func(qkv, num_heads_q=None if heads_k == 4 else 4, **more)
    parts = qkv.unbind(2) if heads_k == 4 else qkv.split((4, heads_k, heads_k), dim=2)
    assert all(map(torch.equal, result, fa3.flash_attn_func(*parts, **more)))


def operands() -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(2, n, h, 64).to(E4M3) for n, h in ((9, 4), (15, 2), (15, 2)))
    return q, k, v


def test_any_strides() -> None:
    """Serving code expands one number; a transposed factor is read where it lies."""
    q, k, v = operands()
    one = [x.new_tensor(1.5).expand(2, 2) for x in factors(2, 2)]
    same = [x.contiguous() for x in one]
    assert torch.equal(fa3.flash_attn_func(q, k, v, **named(one)), fa3.flash_attn_func(q, k, v, **named(same)))
    descales = factors(2, 2)
    turned = [x.T.contiguous().T for x in descales]
    assert torch.equal(fa3.flash_attn_func(q, k, v, **named(turned)), fa3.flash_attn_func(q, k, v, **named(descales)))
    spread = [torch.stack([x, x], 3)[..., 0, :] for x in (q, k, v)]
    assert torch.equal(fa3.flash_attn_func(*spread, **named(descales)), fa3.flash_attn_func(q, k, v, **named(descales)))


def test_compiled() -> None:
    q, k, v = operands()
    descales = named(factors(2, 2))
    cu_q, cu_k = (torch.tensor([0, n, 2 * n], dtype=torch.int32) for n in (9, 15))
    used = torch.tensor([4, 15], dtype=torch.int32)

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        packed = fa3.flash_attn_varlen_func(
            *(x.flatten(0, 1) for x in (q, k, v)), cu_q, cu_k, 9, 15, seqused_k=used, **descales
        )
        result: Tensor = fa3.flash_attn_func(q, k, v, causal=True, **descales) + packed.view(2, 9, 4, 64)
        return result

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(q, k, v), function(q, k, v))
    torch.library.opcheck(
        fa3._flash_attn_forward._opoverload, (q, k, v), descales,
        test_utils=("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"),
    )  # fmt: skip


# ---- what is refused


def everywhere(q: Tensor, k: Tensor, v: Tensor, **more: Any) -> list[Callable[[], Any]]:
    """Calls of the functions that take float8, with q, k and v of (2, 9, 2, 64)."""
    cu = torch.tensor([0, 9, 18], dtype=torch.int32)
    calls = [
        lambda: fa3.flash_attn_func(q, k, v, **more),
        lambda: fa3.flash_attn_varlen_func(*(x.flatten(0, 1) for x in (q, k, v)), cu, cu, 9, 9, **more),
        lambda: fa3._flash_attn_forward(q, k, v, **more),
    ]
    if q.dtype is k.dtype is v.dtype:
        calls.append(lambda: fa3.flash_attn_qkvpacked_func(torch.stack((q, k, v), 2), **more))
    return calls


QKV = torch.ones(3, 2, 9, 2, 64)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_factors_that_are_wrong(name: str) -> None:
    """A missing one is never 1, and one that nothing has is never ignored."""
    expected = r"float32 \(batch, num_heads_k\) = \(2, 2\)"
    low, right = QKV.to(E4M3), named([torch.ones(2, 2)] * 3)
    for wrong, said in (
        (None, rf"is None: must be {expected}, since .*; a missing one is not taken for 1, so where it is 1 pass ones"),
        (torch.ones(()), rf"is torch.float32 of shape \(\): must be {expected}"),
        (torch.ones(2, 1), rf"is torch.float32 of shape \(2, 1\): must be {expected}"),
        (torch.ones(2, 2).half(), rf"is torch.float16 of shape \(2, 2\): must be {expected}"),
    ):
        for call in everywhere(*low, **right | {f"{name}_descale": wrong}):
            with pytest.raises(ValueError, match=f"^{name}_descale {said}"):
                call()
    with pytest.raises(TypeError, match=rf"{name}_descale is of type 'float': must be a tensor, {expected}"):
        fa3.flash_attn_func(*low, **right | {f"{name}_descale": 2.0})
    for call in everywhere(*QKV.bfloat16(), **{f"{name}_descale": torch.ones(2, 2)}):
        with pytest.raises(ValueError, match=f"^{name}_descale is given, but q.dtype = torch.bfloat16: only "):
            call()


@pytest.mark.parametrize("dtype", [E4M3, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_mixed_types(name: str, dtype: torch.dtype) -> None:
    """One tensor of float8, or all of another one."""
    given = dict(zip("qkv", QKV.bfloat16(), strict=True))
    given[name] = given[name].to(dtype)
    for call in everywhere(**given):
        if name == "q" and dtype is E4M3:
            with pytest.raises(ValueError, match=r"^k.dtype = torch.bfloat16, but q.dtype = torch.float8_e4m3fn: they"):
                call()
        else:
            with pytest.raises(NotImplementedError, match=rf"^{name}\.dtype = {dtype}: float8 is for .*; dequantise"):
                call()
    given = dict(zip("qkv", QKV.to(E4M3), strict=True)) | {name: QKV[0].to(torch.float8_e5m2)}
    for call in everywhere(**given):
        with pytest.raises(
            NotImplementedError, match=rf"^{name}\.dtype = torch.float8_e5m2: .* must all be torch.float8"
        ):
            call()


def test_what_cannot_be_done_yet() -> None:
    low, right = QKV.to(E4M3), named([torch.ones(2, 2)] * 3)
    seqlens = torch.tensor([3, 9], dtype=torch.int32)
    for call in everywhere(*low, **right, attention_chunk=4)[:2]:
        with pytest.raises(NotImplementedError, match="attention_chunk is given, .* dense k and v that are not float8"):
            call()
    for name in right:  # a cache has its factors, as other tensors have
        for call in (
            lambda given: fa3.flash_attn_with_kvcache(*low, cache_seqlens=seqlens, **given),
            lambda given: fa3._flash_attn_forward(*low, attention_chunk=4, **given),
        ):
            with pytest.raises(ValueError, match=f"^{name} is None: must be float32"):
                call(right | {name: None})
    with pytest.raises(NotImplementedError, match="^v.dtype = torch.float8_e4m3fn: float8 is for"):
        x, lse = QKV[0], torch.zeros(2, 2, 9)
        # PyTorch 2.11 takes no operator's call that leaves out what it may write to.
        fa3._flash_attn_backward(x, x, x, low[2], x, lse, dq=x.clone(), dk=x.clone(), dv=x.clone())
    leaf = low[0].detach().requires_grad_()
    with pytest.raises(NotImplementedError, match="q requires a gradient: scaled_attention has none"):
        fa3.flash_attn_func(leaf, low[1], low[2], **right)
