"""xformers' memory_efficient_attention on Tessera: every bias against loops that say what upstream means by it."""

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import reference
import tessera.torch
from tessera.compat.xformers import ops as xops
from tessera.compat.xformers.ops import fmha
from tessera.compat.xformers.ops.fmha import _functions
from tessera.compat.xformers.ops.fmha import attn_bias as biases
from tessera.torch.ops import draw_rng_state

INFINITY = float("inf")


# ---- what upstream means, key by key


class Case(NamedTuple):
    bias: Any
    seen: Tensor  # bool (queries, keys)


# Whether query i of m sees key j of n in a block.
Rule = Callable[[int, int, int, int], bool]


def everything(i: int, j: int, m: int, n: int) -> bool:
    return True


def top_left(i: int, j: int, m: int, n: int) -> bool:
    """A key is no farther from the first key than the query is from the first query."""
    return j <= i


def bottom_right(i: int, j: int, m: int, n: int) -> bool:
    """A key is no nearer to the last key than the query is to the last query."""
    return (n - 1 - j) >= (m - 1 - i)


def top_left_window(size: int) -> Rule:
    """Greater than i - size, and less than or equal to i."""
    return lambda i, j, m, n: i - size < j <= i


def bottom_right_window(size: int) -> Rule:
    """The distance to the last key is at least the query's to the last query, and less than size more."""
    return lambda i, j, m, n: (m - 1 - i) <= (n - 1 - j) < (m - 1 - i) + size


def both_sides(left: int, right: int) -> Rule:
    """i - left <= j + m - n <= i + right."""
    return lambda i, j, m, n: i - left <= j + m - n <= i + right


def one_block(bias: Any, rule: Rule, m: int, n: int) -> Case:
    return blocks(bias, rule, [m], [list(range(n))], n)


def blocks(bias: Any, rule: Rule, q_lengths: list[int], keys: list[list[int]], total: int) -> Case:
    """`keys`: which keys, of `total`, each block has."""
    seen = torch.zeros(sum(q_lengths), total, dtype=torch.bool)
    first = 0
    for m, own in zip(q_lengths, keys, strict=True):
        for i in range(m):
            for j, key in enumerate(own):
                seen[first + i, key] |= rule(i, j, m, len(own))
        first += m
    return Case(bias, seen)


def lengths(count: int, low: int = 0, high: int = 12) -> list[int]:
    return [random.randint(low, high) for _ in range(count)]


def packed(make: Callable[[Any], Any], rule: Rule, q: list[int], k: list[int], device: str) -> Case:
    bias = make(biases.BlockDiagonalMask.from_seqlens(q, k, device=device))
    starts = [sum(k[:i]) for i in range(len(k))]
    return blocks(bias, rule, q, [list(range(a, a + n)) for a, n in zip(starts, k, strict=True)], sum(k))


def padded(make: Callable[..., Any], rule: Rule) -> Case:
    q, k = lengths(5), [0, *lengths(4)]
    random.shuffle(k)
    return blocks(make(q, 12, k), rule, q, [list(range(12 * i, 12 * i + n)) for i, n in enumerate(k)], 60)


def gappy(kind: Any, rule: Rule, starts: list[int], k: list[int], device: str) -> Case:
    q = lengths(len(k))
    bias = kind.from_seqlens(q, starts, k, device=device)
    own = [list(range(a, a + n)) for a, n in zip(starts, k, strict=False)]
    return blocks(bias, rule, q, own, starts[-1])


class LocalGappy:
    """With the arguments of the other classes."""

    @staticmethod
    def from_seqlens(q: list[int], starts: list[int], k: list[int], device: str) -> Any:
        kind = biases.BlockDiagonalLocalAttentionFromBottomRightGappyKeysMask
        return kind.from_seqlens_local_gappy(q, starts, k, 3, 2, device)


def in_order(device: str, kind: Any, rule: Rule) -> Case:
    return gappy(kind, rule, [3, 3, 14, 15, 30], [0, 9, 1, 12], device)


def out_of_order(device: str, kind: Any, rule: Rule) -> Case:
    return gappy(kind, rule, [20, 0, 5, 12, 31], lengths(4, 1, 11), device)


def more_keys() -> tuple[list[int], list[int]]:
    q = lengths(4)
    return q, [m + random.randint(0, 9) for m in q]


CASES: dict[str, Callable[[str], Case]] = {
    "none": lambda device: one_block(None, everything, 13, 21),
    "LowerTriangularMask": lambda device: one_block(biases.LowerTriangularMask(), top_left, 19, 12),
    "LowerTriangularMask, more keys": lambda device: one_block(biases.LowerTriangularMask(), top_left, 9, 22),
    "LowerTriangularFromBottomRightMask": lambda device: one_block(
        biases.LowerTriangularFromBottomRightMask(), bottom_right, 9, 22
    ),
    "LowerTriangularFromBottomRightMask, more queries": lambda device: one_block(
        biases.LowerTriangularFromBottomRightMask(), bottom_right, 22, 9
    ),
    "LowerTriangularFromBottomRightLocalAttentionMask": lambda device: one_block(
        biases.LowerTriangularFromBottomRightMask().make_local_attention(4), bottom_right_window(4), 11, 20
    ),
    "LocalAttentionFromBottomRightMask": lambda device: one_block(
        biases.LocalAttentionFromBottomRightMask(window_left=3, window_right=2), both_sides(3, 2), 11, 15
    ),
    "LocalAttentionFromBottomRightMask, nothing beside": lambda device: one_block(
        biases.LocalAttentionFromBottomRightMask(0, 0), both_sides(0, 0), 11, 15
    ),
    "BlockDiagonalMask": lambda device: packed(lambda b: b, everything, lengths(5), lengths(5), device),
    "BlockDiagonalCausalMask": lambda device: packed(
        lambda b: b.make_causal(), top_left, lengths(5), lengths(5), device
    ),
    "BlockDiagonalCausalFromBottomRightMask": lambda device: packed(
        lambda b: b.make_causal_from_bottomright(), bottom_right, *more_keys(), device
    ),
    "BlockDiagonalCausalLocalAttentionMask": lambda device: packed(
        lambda b: b.make_local_attention(3), top_left_window(3), [8, 0, 5, 11], [6, 4, 9, 11], device
    ),
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask": lambda device: packed(
        lambda b: b.make_local_attention_from_bottomright(3), bottom_right_window(3), *more_keys(), device
    ),
    "BlockDiagonalPaddedKeysMask": lambda device: padded(
        lambda *n: biases.BlockDiagonalPaddedKeysMask.from_seqlens(*n, device=device), everything
    ),
    "BlockDiagonalCausalWithOffsetPaddedKeysMask": lambda device: padded(
        lambda *n: biases.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(*n, device=device), bottom_right
    ),
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask": lambda device: padded(
        lambda *n: biases.BlockDiagonalCausalLocalAttentionPaddedKeysMask.from_seqlens_local(
            *n, window_size=5, device=device
        ),
        bottom_right_window(5),
    ),
    "BlockDiagonalLocalAttentionPaddedKeysMask": lambda device: padded(
        lambda *n: biases.BlockDiagonalPaddedKeysMask.from_seqlens(*n, device=device).make_local_attention(2, 4),
        both_sides(2, 4),
    ),
    "BlockDiagonalGappyKeysMask": lambda device: in_order(device, biases.BlockDiagonalGappyKeysMask, everything),
    "BlockDiagonalGappyKeysMask, out of order": lambda device: out_of_order(
        device, biases.BlockDiagonalGappyKeysMask, everything
    ),
    "BlockDiagonalLocalAttentionFromBottomRightGappyKeysMask": lambda device: gappy(
        LocalGappy, both_sides(3, 2), [3, 3, 14, 15, 30], [0, 9, 1, 12], device
    ),
    "BlockDiagonalCausalWithOffsetGappyKeysMask": lambda device: in_order(
        device, biases.BlockDiagonalCausalWithOffsetGappyKeysMask, bottom_right
    ),
    "BlockDiagonalCausalWithOffsetGappyKeysMask, out of order": lambda device: out_of_order(
        device, biases.BlockDiagonalCausalWithOffsetGappyKeysMask, bottom_right
    ),
}
PACKED = [name for name in CASES if name.startswith("Block")]


@pytest.fixture
def dtype(request: pytest.FixtureRequest, device: str, seed: int) -> torch.dtype:
    kinds = [torch.bfloat16, torch.float16, torch.float32]
    return random.Random(f"{seed} {request.node.nodeid}").choice(kinds if device == "cpu" else kinds[:2])


def operands(case: Case, dtype: torch.dtype, device: str, batch: int = 1, heads: int = 3) -> tuple[Tensor, ...]:
    queries, keys = case.seen.shape
    return tuple(
        torch.randn(batch, n, heads, d, device=device, dtype=dtype) for n, d in ((queries, 24), (keys, 24), (keys, 40))
    )


def leaves(*tensors: Tensor, dtype: torch.dtype | None = None) -> list[Tensor]:
    return [x.detach().to(dtype or x.dtype).clone().requires_grad_() for x in tensors]


def additive(seen: Tensor) -> Tensor:
    """What the reference adds to the scores. Where gradients are compared it must have one, too."""
    return torch.zeros(seen.shape, dtype=torch.double).masked_fill(~seen, -INFINITY)


def check(
    run: Callable[..., tuple[Tensor, Tensor]], exact: Callable[..., tuple[Tensor, Tensor]], tensors: tuple[Tensor, ...]
) -> None:
    """o, lse and all gradients, by the rule of the other tests."""
    ours, truth, plain = leaves(*tensors), leaves(*tensors, dtype=torch.double), leaves(*tensors)
    with reference.recording() as steps:
        right = exact(*truth)
    reference.check(run(*ours), right, exact(*plain), steps, (ours, truth, plain))


def with_lse(bias: Any, **more: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        _, lse = fmha.memory_efficient_attention_forward_requires_grad(q, k, v, bias, **more)
        return fmha.memory_efficient_attention(q, k, v, bias, **more), lse

    return run


@pytest.mark.parametrize("name", CASES)
def test_bias(name: str, dtype: torch.dtype, device: str) -> None:
    """o, lse and gradients under each bias are those of the keys that the loops say a query sees."""
    case = CASES[name](device)
    batch = 1 if name in PACKED else 2
    seen = additive(case.seen).to(device).requires_grad_()
    check(
        with_lse(case.bias),
        lambda q, k, v: reference.dense(q, k, v, bias=seen[None, None]),
        operands(case, dtype, device, batch),
    )


@pytest.mark.parametrize("name", [name for name in CASES if name != "none"])
def test_materialize(name: str, device: str) -> None:
    """The matrix of each bias has 0 and -inf where the loops say so, in the shape and type that is asked for."""
    case = CASES[name](device)
    shape = (2, 3, *case.seen.shape)
    matrix = case.bias.materialize(shape, dtype=torch.bfloat16)
    assert matrix.dtype == torch.bfloat16
    assert torch.equal(matrix, additive(case.seen).bfloat16().expand(shape))


@pytest.mark.parametrize("name", [name for name in PACKED if "Padded" in name or "Gappy" in name])
def test_unused_keys_do_not_matter(name: str, device: str) -> None:
    """Not even NaN, nor keys after the last: they are never read, and their gradients are 0."""
    for _ in range(20):  # one case in a hundred uses every key
        case = CASES[name](device)
        q, k, v = operands(case, torch.bfloat16, device)
        used = torch.zeros(k.shape[1], dtype=torch.bool)
        for begin, end in case.bias.k_seqinfo.intervals():
            used[begin:end] = True
        if not used.all():
            break
    assert not used.all(), "something must be unused for this test to say anything"
    expected = fmha.memory_efficient_attention(q, k, v, case.bias)
    k[:, ~used], v[:, ~used] = torch.nan, torch.nan
    k, v = (torch.cat((x, torch.full_like(x[:, :5], torch.nan)), 1) for x in (k, v))
    ours = leaves(q, k, v)
    out = fmha.memory_efficient_attention(*ours, case.bias)
    assert torch.equal(out, expected)
    _, dk, dv = torch.autograd.grad(out, ours, torch.ones_like(out))
    unused = torch.cat((~used, torch.ones(5, dtype=torch.bool)))
    assert not dk[:, unused].any() and not dv[:, unused].any()


@pytest.mark.parametrize("name", [name for name in PACKED if "order" not in name])
def test_keys_stay_where_they_lie(name: str, device: str) -> None:
    """What the kernels are given of blocks is the caller's memory, gaps and padding included."""
    case = CASES[name](device)
    q, k, v = operands(case, torch.bfloat16, device)
    call = _functions._prepare(q, k, v, case.bias, 0.0, None, None)
    assert [x.data_ptr() for x in (call.q, call.k, call.v)] == [x.data_ptr() for x in (q, k, v)]


@pytest.mark.parametrize("name", [name for name in PACKED if "Padded" in name or "Gappy" in name])
def test_decoding(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without gradients and with few queries, padded keys and keys out of order are caches, and are not gathered."""
    case = CASES[name](device)
    q, k, v = operands(case, torch.bfloat16, device)
    exact = reference.dense(q.double(), k.double(), v.double(), bias=additive(case.seen).to(device)[None, None])
    plain = reference.dense(q, k, v, bias=additive(case.seen).to(device)[None, None])
    unseen = ~case.seen.any(dim=0)
    k[:, unseen], v[:, unseen] = torch.nan, torch.nan
    given: list[Tensor] = []
    whole = tessera.cached_attention

    def cached_attention(q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> Any:
        given.append(k)
        return whole(q, k, v, **keywords)

    monkeypatch.setattr(_functions.tessera, "cached_attention", cached_attention)
    out, lse = fmha.memory_efficient_attention_forward_requires_grad(q, k, v, case.bias)
    reference.assert_output_close(out, exact[0], plain[0])
    reference.assert_close("lse", lse, exact[1], exact[1], floor=2e-5)
    is_cache = "Padded" in name or "out of order" in name
    assert [x.data_ptr() for x in given] == [k.data_ptr()] * is_cache
    many = torch.cat([q, q], dim=2), torch.cat([k, k], dim=2)[:, :, :1], torch.cat([v, v], dim=2)[:, :, :1]
    if case.bias.q_seqinfo.max_seqlen > 2:
        fmha.memory_efficient_attention(many[0], *(x.expand(-1, -1, 6, -1) for x in many[1:]), case.bias)
        assert len(given) == is_cache, "six heads and three queries are too many rows"


@pytest.mark.parametrize("name", ["causal", "padded", "gappy"])
def test_blocks_have_no_matrix(name: str, device: str) -> None:
    """2^17 tokens, forth and back: a matrix of one byte a pair would take 16 GiB."""
    total, size = 2**17, 16
    count = total // size
    if name == "causal":
        bias: Any = biases.BlockDiagonalMask.from_seqlens([size] * count, device=device).make_causal()
    elif name == "padded":
        bias = biases.BlockDiagonalPaddedKeysMask.from_seqlens([size] * count, size, [size // 2] * count, device=device)
    else:
        starts = [*reversed(range(0, total, size)), total]
        bias = biases.BlockDiagonalGappyKeysMask.from_seqlens([size] * count, starts, [size] * count, device=device)
    q, k, v = leaves(*torch.randn(3, 1, total, 1, 8, device=device, dtype=torch.bfloat16))
    out = fmha.memory_efficient_attention(q, k, v, bias)
    out.backward(torch.ones_like(out))
    last = slice(0, size) if name == "gappy" else slice(total - size, total)
    seen = slice(last.start, last.start + (size // 2 if name == "padded" else size))
    expected, _ = reference.dense(
        q[:, -size:].double(), k[:, seen].double(), v[:, seen].double(), causal=name == "causal"
    )
    assert (out[:, -size:] - expected).abs().max() < 0.05


# ---- tensors as biases


@pytest.mark.parametrize("kind", ["query's", "float32"])
@pytest.mark.parametrize("causal", [False, True])
def test_tensor(kind: str, causal: bool, device: str) -> None:
    """A tensor is added to the scores, with LowerTriangularMask or alone, and gets its gradient."""
    q, k, v = (torch.randn(2, n, 3, 16, device=device, dtype=torch.bfloat16) for n in (12, 17, 17))
    bias = torch.randn(2, 3, 12, 17, device=device, dtype=torch.bfloat16 if kind == "query's" else torch.float32)
    bias[0, 0, 2, :9] = -INFINITY

    def run(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        given = biases.LowerTriangularMask().add_bias(bias) if causal else bias
        return with_lse(given)(q, k, v)

    def exact(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return reference.dense(q, k, v, bias=bias, causal=causal, alignment="top_left")

    ours, truth, plain = leaves(q, k, v, bias), leaves(q, k, v, bias, dtype=torch.double), leaves(q, k, v, bias)
    with reference.recording() as steps:
        right = exact(*truth)
    mine, rough = run(*ours), exact(*plain)
    reference.assert_output_close(mine[0], right[0], rough[0])
    dout = torch.randn_like(mine[0])
    gradients = [
        torch.autograd.grad(o[0], x, dout.to(o[0].dtype), retain_graph=True)
        for o, x in zip((mine, right, rough), (ours, truth, plain), strict=True)
    ]
    noise = reference.gradient_noise(steps, [right[0]], [dout.double()], truth, torch.bfloat16)
    for name, *three, bound in zip(("dq", "dk", "dv", "dbias"), *gradients, noise, strict=True):
        reference.assert_gradient_close(name, *three, bound)
    materialized = biases.LowerTriangularMaskWithTensorBias(bias.float()).materialize(bias.shape, device=device)
    hidden = torch.ones(12, 17, device=device).triu(1).bool()
    assert torch.equal(materialized, bias.float().masked_fill(hidden, -INFINITY))


@pytest.mark.parametrize("stored", [(0,), (1,), (2,), (0, 1), (0, 2), (0, 1, 2), (1, 3)], ids=str)
def test_expanded_tensor(stored: tuple[int, ...], device: str) -> None:
    """An expanded tensor means what its copy means, also where a gradient is needed."""
    shape = [2, 3, 12, 17]
    small = torch.randn([1 if dim in stored else n for dim, n in enumerate(shape)], device=device)
    q, k, v = (torch.randn(2, n, 3, 16, device=device) for n in (12, 17, 17))
    if device != "cpu":
        q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
    expected = fmha.memory_efficient_attention(q, k, v, small.expand(shape).contiguous())
    torch.testing.assert_close(fmha.memory_efficient_attention(q, k, v, small.expand(shape)), expected)
    own = small.clone().requires_grad_()
    expanded, full = own.expand(shape), small.expand(shape).contiguous().requires_grad_()
    weights = torch.randn_like(expected)
    gradients = [
        torch.autograd.grad((fmha.memory_efficient_attention(q, k, v, bias) * weights).sum(), of)
        for bias, of in ((expanded, (own, expanded)), (full, (full,)))
    ]
    (of_own, of_expanded), (of_full,) = gradients
    torch.testing.assert_close(of_own, of_full.sum_to_size(own.shape), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(of_expanded, of_full, rtol=1e-3, atol=1e-4)


# ---- forms


def test_one_head(device: str) -> None:
    """Three dimensions are one head: with nothing, causal, and a tensor that is broadcast or not."""
    q, k, v = (torch.randn(4, n, 16, device=device, dtype=torch.bfloat16) for n in (9, 14, 14))
    tensors = [torch.randn(*shape, device=device) for shape in ((4, 9, 14), (1, 9, 14), (4, 1, 14))]
    for bias in (None, biases.LowerTriangularMask(), *tensors):
        full = bias.expand(4, 9, 14)[:, None] if isinstance(bias, Tensor) else bias
        expected, expected_lse = with_lse(full)(q[:, :, None], k[:, :, None], v[:, :, None])
        out, lse = with_lse(bias)(q, k, v)
        assert torch.equal(out, expected[:, :, 0]) and torch.equal(lse, expected_lse) and lse.shape == (4, 1, 9)


@pytest.mark.parametrize("name", ["none", "LowerTriangularMask", "tensor", "BlockDiagonalCausalMask"])
@pytest.mark.parametrize("shared", [False, True])
def test_groups(name: str, shared: bool, device: str) -> None:
    """Five dimensions are groups of heads; a head that is expanded over its group gets the group's gradient."""
    case = CASES["none" if name == "tensor" else name](device)
    batch = 1 if name in PACKED else 2
    (queries, keys), groups, heads = case.seen.shape, 2, 3
    q = torch.randn(batch, queries, groups, heads, 16, device=device, dtype=torch.bfloat16)
    own = 1 if shared else heads
    k, v = (torch.randn(batch, keys, groups, own, d, device=device, dtype=torch.bfloat16) for d in (16, 24))
    bias = torch.randn(batch, groups, heads, queries, keys, device=device) if name == "tensor" else case.bias
    added = bias.double().flatten(1, 2) if name == "tensor" else additive(case.seen).to(device)[None, None]
    added.requires_grad_()

    def exact(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        k, v = (x.expand(-1, -1, -1, heads, -1).flatten(2, 3) for x in (k, v))
        out, lse = reference.dense(q.flatten(2, 3), k, v, bias=added)
        return out.unflatten(2, (groups, heads)), lse.unflatten(1, (groups, heads))

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return with_lse(bias)(q, *(x.expand(-1, -1, -1, heads, -1) for x in (k, v)))

    check(run, exact, (q, k, v))


def test_shared_head(device: str) -> None:
    """One head that is expanded over all, in four dimensions, is given to the kernels once."""
    q = torch.randn(2, 9, 4, 16, device=device, dtype=torch.bfloat16)
    k, v = torch.randn(2, 2, 9, 1, 16, device=device, dtype=torch.bfloat16)
    expanded = [x.expand(-1, -1, 4, -1) for x in (k, v)]
    out = fmha.memory_efficient_attention(q, *expanded)
    assert torch.equal(out, tessera.attention(q, k, v))
    mixed = fmha.memory_efficient_attention(q, expanded[0], expanded[1].contiguous())
    torch.testing.assert_close(mixed, out)


def test_scale_and_op(device: str) -> None:
    """scale is what scores are multiplied with; op is taken in every form and changes nothing."""
    q, k, v = torch.randn(3, 2, 9, 4, 16, device=device, dtype=torch.bfloat16)
    expected = fmha.memory_efficient_attention(q, k, v, scale=0.7)
    assert torch.equal(expected, tessera.attention(q, k, v, softmax_scale=0.7))
    for op in (
        xops.MemoryEfficientAttentionFlashAttentionOp,
        xops.MemoryEfficientAttentionCutlassOp,
        (fmha.flash.FwOp, None),
    ):
        assert torch.equal(fmha.memory_efficient_attention(q, k, v, scale=0.7, op=op), expected)
    assert torch.equal(
        fmha.memory_efficient_attention_forward(q, k, v, scale=0.7, op=fmha.triton_splitk.FwOp), expected
    )
    for operator in (*fmha.ALL_FW_OPS, *fmha.ALL_BW_OPS):
        assert operator.is_available() and operator.SUPPORTED_DTYPES and operator.NAME


# ---- without autograd


OF_BACKWARD = [
    "none",
    "LowerTriangularMask",
    "BlockDiagonalCausalLocalAttentionMask",
    "BlockDiagonalPaddedKeysMask",
    "BlockDiagonalGappyKeysMask",
    "BlockDiagonalGappyKeysMask, out of order",
]


@pytest.mark.parametrize(
    "name, form",
    [(name, form) for name in OF_BACKWARD for form in ("heads", "shared", "groups")]
    + [(name, "one") for name in OF_BACKWARD[:2]],
)
def test_backward(name: str, form: str, device: str) -> None:
    """The gradients outside autograd are autograd's, in the forms of the operands."""
    case = CASES[name](device)
    # A GPU takes 16 bits, and o that is rounded to them moves what two ways make of it.
    dtype, bound = (torch.float32, 1e-4) if device == "cpu" else (torch.bfloat16, 6e-2)
    q, k, v = operands(case, dtype, device, heads=4)
    if form == "one":
        q, k, v = q[:, :, 0], k[:, :, 0], v[:, :, 0]
    if form == "shared":
        k, v = (x[:, :, :1].expand(-1, -1, 4, -1) for x in (k, v))
    if form == "groups":
        q, k, v = (x.unflatten(2, (2, 2)) for x in (q, k, v))
        k, v = (x[:, :, :, :1].expand(-1, -1, -1, 2, -1) for x in (k, v))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out, lse = fmha.memory_efficient_attention_forward_requires_grad(q, k, v, case.bias)
    assert not out.requires_grad and torch.equal(out, fmha.memory_efficient_attention_forward(q, k, v, case.bias))
    dout = torch.randn_like(out)
    mine = fmha.memory_efficient_attention_backward(dout, out, lse, q, k, v, case.bias)
    plain = [x.detach().clone(memory_format=torch.contiguous_format).requires_grad_() for x in (q, k, v)]
    right = torch.autograd.grad(fmha.memory_efficient_attention(*plain, case.bias), plain, dout)
    for a, b in zip(mine, right, strict=True):
        assert a.shape == b.shape
        torch.testing.assert_close(a, b, rtol=bound, atol=bound)


# ---- dropout


@pytest.mark.parametrize("name", ["none", "LowerTriangularMask", "BlockDiagonalCausalMask"])
def test_dropout(name: str, seed: int, device: str) -> None:
    """Weights are dropped with probability p, by the mask that Tessera's state says, in both passes alike."""
    case = CASES[name](device)
    p, heads, queries = 0.375, 3, case.seen.shape[0]
    keep = torch.zeros(1, heads, *case.seen.shape, dtype=torch.bool, device=device)
    torch.manual_seed(seed)
    state = draw_rng_state()
    if name in PACKED:
        infos = case.bias.q_seqinfo, case.bias.k_seqinfo
        count, longest = len(infos[0].seqstart_py) - 1, [max(info.max_seqlen, 1) for info in infos]
        masks = tessera.torch.dropout_mask(state, p, count, heads, *longest, torch.device(device))
        for b, ((q, q_end), (k, k_end)) in enumerate(zip(*(info.intervals() for info in infos), strict=True)):
            keep[0, :, q:q_end, k:k_end] = masks[b, :, : q_end - q, : k_end - k]
    else:
        keep[:] = tessera.torch.dropout_mask(state, p, 1, heads, queries, case.seen.shape[1], torch.device(device))
    seen = additive(case.seen).to(device).requires_grad_()

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        torch.manual_seed(seed)
        _, lse = with_lse(case.bias)(q, k, v)
        return fmha.memory_efficient_attention(q, k, v, case.bias, p=p), lse

    check(
        run,
        lambda q, k, v: reference.dense(q, k, v, bias=seen[None, None], keep=keep, keep_scale=1 / (1 - p)),
        operands(case, torch.bfloat16, device),
    )


def test_dropout_of_padded_keys(seed: int, device: str) -> None:
    """The share of weights that are dropped is p, and the rest is scaled, with pieces of sequences too."""
    bias = biases.BlockDiagonalPaddedKeysMask.from_seqlens([64] * 4, 80, [64, 80, 30, 50], device=device)
    q = torch.zeros(1, 256, 8, 16, device=device, dtype=torch.bfloat16)
    k = v = torch.ones(1, 320, 8, 16, device=device, dtype=torch.bfloat16)
    out = fmha.memory_efficient_attention(q, k, v, bias, p=0.25).float()
    assert abs(float(out.mean()) - 1) < 0.02 and out.std() > 0.02
    torch.manual_seed(seed)
    first = fmha.memory_efficient_attention(q, k, v, bias, p=0.25)
    torch.manual_seed(seed)
    assert torch.equal(first, fmha.memory_efficient_attention(q, k, v, bias, p=0.25))


# ---- compilers


@pytest.mark.parametrize(
    "name", ["none", "LowerTriangularMask", "BlockDiagonalCausalMask", "BlockDiagonalPaddedKeysMask"]
)
def test_compiled(name: str, device: str) -> None:
    """One graph, and the same bits, forth and back."""
    case = CASES[name](device)
    ours = leaves(*operands(case, torch.bfloat16, device))

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return fmha.memory_efficient_attention(q, k, v, attn_bias=case.bias) * 2

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)(*ours)
    expected = function(*ours)
    assert torch.equal(compiled, expected)
    dout = torch.randn_like(expected)
    mine, right = torch.autograd.grad(compiled, ours, dout), torch.autograd.grad(expected, ours, dout)
    assert all(torch.equal(a, b) for a, b in zip(mine[1:], right[1:], strict=True))
