"""FlashAttention-2's functions on Tessera, by upstream's criterion where it holds (at most twice the error of the three
textbook steps in the same type, three times for gradients), and by what rounding alone may do (reference.py)."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import reference
import tessera
import tessera.torch
from tessera.compat.flash_attn import flash_attn_interface as fa

INFINITY = float("inf")

FEATURES: dict[str, dict[str, Any]] = {
    "full": {},
    "scale": {"softmax_scale": 0.3},
    "causal": {"causal": True},
    "window": {"window_size": (5, 2)},
    "right": {"window_size": (-1, 1)},
    "causal_window": {"causal": True, "window_size": (4, 9)},
    "any_negative": {"window_size": (-7, -3)},
    "softcap": {"softcap": 1.5},
    "alibi": {"alibi_slopes": "h"},
    "causal_alibi": {"causal": True, "alibi_slopes": "bh"},
    "dropout": {"dropout_p": 0.25},
    "causal_dropout_alibi": {"causal": True, "dropout_p": 0.125, "alibi_slopes": "bh"},
}

# (seqlen_q, seqlen_k, heads, heads_k, head_dim): more keys, more queries, one query; groups; odd head dimensions.
SHAPES = [(13, 40, 4, 2, 32), (37, 11, 3, 3, 20), (1, 50, 4, 1, 59), (24, 24, 2, 2, 7)]


@pytest.fixture
def dtype(request: pytest.FixtureRequest, device: str, seed: int) -> torch.dtype:
    """One type a test, drawn by the run's seed and the test's name; float32 is for the CPU."""
    kinds = [torch.bfloat16, torch.float16, torch.float32]
    return random.Random(f"{seed} {request.node.nodeid}").choice(kinds if device == "cpu" else kinds[:2])


def options_of(feature: str, batch: int, heads: int, device: str) -> dict[str, Any]:
    options = dict(FEATURES[feature])
    if "alibi_slopes" in options:
        shape = (heads,) if options["alibi_slopes"] == "h" else (batch, heads)
        options["alibi_slopes"] = torch.rand(shape, device=device)
    return options


def as_reference(options: dict[str, Any], matrix: Tensor | None = None) -> dict[str, Any]:
    """The same in the reference's words. `matrix`: S_dmask without its padding."""
    names = {"window_size": "window"}
    words = {names.get(name, name): value for name, value in options.items() if name != "dropout_p"}
    if "window" in words:
        words["window"] = tuple(max(side, -1) for side in words["window"])
    if matrix is not None:
        words |= {"keep": matrix >= 0, "keep_scale": 1 / (1 - options["dropout_p"])}
    return words


def leaves(*tensors: Tensor, dtype: torch.dtype | None = None) -> list[Tensor]:
    return [x.detach().to(dtype or x.dtype).clone().requires_grad_() for x in tensors]


def check(
    run: Callable[..., tuple[Tensor, Tensor, Tensor]],
    exact: Callable[..., tuple[Tensor, Tensor]],
    operands: tuple[Tensor, ...],
) -> None:
    """o, lse and the gradients of `run` against those of `exact`, which also gets S_dmask."""
    ours, truth, plain = leaves(*operands), leaves(*operands, dtype=torch.double), leaves(*operands)
    out, lse, matrix = run(*ours)
    with reference.recording() as steps:
        exact_out, exact_lse = exact(*truth, matrix)
    empty = exact_lse == -INFINITY
    assert (lse[empty] == INFINITY).all(), "rows that see no key have lse = +inf"
    assert lse.dtype == torch.float32
    lse = lse.masked_fill(empty, -INFINITY)
    reference.check((out, lse), (exact_out, exact_lse), exact(*plain, matrix), steps, (ours, truth, plain))


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dense(feature: str, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    seqlen_q, seqlen_k, heads, heads_k, head_dim = shape
    q = torch.randn(2, seqlen_q, heads, head_dim, device=device, dtype=dtype)
    k, v = torch.randn(2, 2, seqlen_k, heads_k, head_dim, device=device, dtype=dtype)
    options = options_of(feature, 2, heads, device)

    def exact(q: Tensor, k: Tensor, v: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
        part = matrix[:, :, :seqlen_q, :seqlen_k] if "dropout_p" in options else None
        return reference.dense(q, k, v, **as_reference(options, part))

    check(lambda q, k, v: fa.flash_attn_func(q, k, v, **options, return_attn_probs=True), exact, (q, k, v))


def ragged(device: str) -> tuple[list[int], list[int], Tensor, Tensor]:
    """Lengths of queries and keys of five sequences, some of them 0, and their cu_seqlens."""
    lengths_q = [random.randint(1, 30), 0, random.randint(1, 5), random.randint(20, 40), 3]
    lengths_k = [random.randint(1, 30), 4, 0, random.randint(1, 19), random.randint(100, 150)]
    cumulative = (torch.tensor([0, *lengths]).cumsum(0).int().to(device) for lengths in (lengths_q, lengths_k))
    return lengths_q, lengths_k, *cumulative


@pytest.mark.parametrize("feature", FEATURES)
def test_packed(feature: str, dtype: torch.dtype, device: str) -> None:
    lengths_q, lengths_k, cu_q, cu_k = ragged(device)
    heads, heads_k, head_dim, head_dim_v = 4, 2, 24, 24
    q = torch.randn(sum(lengths_q), heads, head_dim, device=device, dtype=dtype)
    k = torch.randn(sum(lengths_k), heads_k, head_dim, device=device, dtype=dtype)
    v = torch.randn(sum(lengths_k), heads_k, head_dim_v, device=device, dtype=dtype)
    options = options_of(feature, len(lengths_q), heads, device)

    def exact(q: Tensor, k: Tensor, v: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
        results = []
        for b, (m, n) in enumerate(zip(lengths_q, lengths_k, strict=True)):
            words = as_reference(options, matrix[b : b + 1, :, :m, :n] if "dropout_p" in options else None)
            if words.get("alibi_slopes", torch.empty(0)).dim() == 2:
                words["alibi_slopes"] = words["alibi_slopes"][b]
            rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
            results.append(reference.dense(q[None, rows], k[None, keys], v[None, keys], **words))
        return torch.cat([o[0] for o, _ in results]), torch.cat([lse[0] for _, lse in results], dim=-1)

    longest = max(lengths_q), max(lengths_k)
    check(
        lambda q, k, v: fa.flash_attn_varlen_func(q, k, v, cu_q, cu_k, *longest, **options, return_attn_probs=True),
        exact,
        (q, k, v),
    )


def test_values_may_have_other_columns(device: str) -> None:
    q, k = torch.randn(2, 2, 9, 2, 16, device=device, dtype=torch.bfloat16)
    v = torch.randn(2, 9, 2, 40, device=device, dtype=torch.bfloat16)
    check(
        lambda q, k, v: fa.flash_attn_func(q, k, v, return_attn_probs=True),
        lambda q, k, v, _: reference.dense(q, k, v),
        (q, k, v),
    )


def test_lse_is_differentiable(device: str) -> None:
    q, k, v = torch.randn(3, 2, 50, 4, 16, device=device, dtype=torch.bfloat16)
    ours, truth, plain = leaves(q, k, v), leaves(q, k, v, dtype=torch.double), leaves(q, k, v)
    _, lse, _ = fa.flash_attn_func(*ours, return_attn_probs=True)
    with reference.recording() as steps:
        exact = reference.dense(*truth)[1]
    dlse = torch.randn_like(lse)
    results = [
        torch.autograd.grad(some, operands[:2], dlse.to(some.dtype), retain_graph=True)
        for some, operands in ((lse, ours), (exact, truth), (reference.dense(*plain)[1], plain))
    ]
    noise = reference.gradient_noise(steps, [exact], [dlse.double()], truth, q.dtype)
    for name, *three, bound in zip(("dq", "dk"), *results, noise[:2], strict=True):
        reference.assert_gradient_close(name, *three, bound)


# ---- S_dmask


@pytest.mark.parametrize("window", [(-1, 0), (40, 3), (-1, 5)], ids=str)
def test_dropout_matrix(window: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    """Its magnitude is the softmax after the division by its sum, its sign the mask, of the right frequency."""
    batch, heads, seqlen_q, seqlen_k, p = 2, 4, 150, 130, 0.17
    q, k, v = (torch.randn(batch, n, heads, 16, device=device, dtype=dtype) for n in (seqlen_q, seqlen_k, seqlen_k))
    left, right = window
    _, _, matrix = fa.flash_attn_func(
        q, k, v, p, causal=right == 0, window_size=(left, right or -1), return_attn_probs=True
    )
    assert matrix.shape == (batch, heads, 256, 256) and matrix.dtype == dtype
    assert not matrix[:, :, seqlen_q:].any() and not matrix[:, :, :, seqlen_k:].any()
    matrix = matrix[:, :, :seqlen_q, :seqlen_k].double()

    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) / 4
    visible = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device).tril(seqlen_k - seqlen_q + right)
    if left >= 0:
        visible = visible.triu(seqlen_k - seqlen_q - left)
    weights = torch.softmax(scores.masked_fill(~visible, -INFINITY), dim=-1).nan_to_num(0.0)
    mine = matrix.abs() / matrix.abs().sum(-1, keepdim=True).clamp(min=1e-30)
    assert (mine - weights).abs().max() < 8 * torch.finfo(dtype).eps
    assert not matrix[:, :, ~visible].any()
    largest = matrix.abs().amax(-1)
    assert ((largest == 1) | (largest == 0)).all()

    judged = matrix[:, :, visible]
    fraction = (judged < 0).double().mean().item()
    assert abs(fraction - p) < 5 * (p * (1 - p) / judged.numel()) ** 0.5


def test_upstreams_normalisation_of_the_matrix(device: str) -> None:
    """Upstream's tests scale every block of keys from its running maximum to lse; one block gives the softmax."""
    q, k, v = torch.randn(3, 1, 20, 2, 16, device=device, dtype=torch.bfloat16)
    _, lse, matrix = fa.flash_attn_func(q, k, v, 0.5, return_attn_probs=True)
    block = fa._get_block_size_n(q.device, 16, True, False)
    assert len(matrix.split(block, dim=-1)) == 1
    scores = torch.einsum("bqhd,bkhd->bhqk", q.float(), k.float()) / 4
    normalised = matrix[:, :, :20, :20].abs().float() * torch.exp(scores.amax(-1) - lse)[..., None]
    assert (normalised - scores.softmax(-1)).abs().max() < 0.01


def test_dropout_is_drawn_from_torch(device: str) -> None:
    q, k, v = torch.randn(3, 1, 16, 2, 16, device=device, dtype=torch.bfloat16)
    first, second = fa.flash_attn_func(q, k, v, 0.5), fa.flash_attn_func(q, k, v, 0.5)
    torch.manual_seed(5)
    third = fa.flash_attn_func(q, k, v, 0.5)
    torch.manual_seed(5)
    assert torch.equal(third, fa.flash_attn_func(q, k, v, 0.5))
    assert not torch.equal(first, second)


def test_the_state_of_dropout_is_on_the_cpu_whatever_the_default_device() -> None:
    q, k, v = torch.randn(3, 1, 16, 2, 16)
    with torch.device("meta"):
        out, _, matrix = fa.flash_attn_func(q, k, v, 0.5, return_attn_probs=True)
        without = fa.flash_attn_gpu.fwd(q, k, v, None, None, 0.0, None, False, -1, -1, 0.0, False)
        again = tessera.attention(q, k, v, dropout_p=0.5)
    assert {x.device.type for x in (out, matrix, *without, again)} == {"cpu"}


def test_what_is_returned(device: str) -> None:
    q = torch.randn(1, 4, 2, 16, device=device, dtype=torch.bfloat16)
    assert isinstance(fa.flash_attn_func(q, q, q), Tensor)
    _, _, matrix = fa.flash_attn_func(q, q, q, return_attn_probs=True)
    assert matrix.shape == (0,) and matrix.dtype == q.dtype


# ---- packed operands


def packed_call(
    form: str, device: str, options: dict[str, Any]
) -> tuple[list[Tensor], Callable[..., Any], Callable[..., Any]]:
    """Packed operands, a function of them, and the same of q, k and v apart."""
    heads, heads_k, head_dim = (4, 4, 24) if "qkv" in form else (4, 2, 24)
    cu_q = torch.tensor([0, 7, 7, 26], dtype=torch.int32, device=device)
    cu_k = cu_q if "qkv" in form else torch.tensor([0, 9, 12, 31], dtype=torch.int32, device=device)
    rows = ((26,), (26,)) if "qkv" in form else ((26,), (31,))
    if "varlen" not in form:
        rows = ((2, 13), (2, 13)) if "qkv" in form else ((2, 13), (2, 17))
    kind = torch.bfloat16
    q = torch.randn(*rows[0], heads, head_dim, device=device, dtype=kind)
    several = torch.randn(*rows[1], 3 if "qkv" in form else 2, heads_k, head_dim, device=device, dtype=kind)
    operands = [several] if "qkv" in form else [q, several]
    calls: dict[str, Callable[..., Any]] = {
        "qkv": lambda qkv: fa.flash_attn_qkvpacked_func(qkv, **options),
        "kv": lambda q, kv: fa.flash_attn_kvpacked_func(q, kv, **options),
        "varlen_qkv": lambda qkv: fa.flash_attn_varlen_qkvpacked_func(qkv, cu_q, 19, **options),
        "varlen_kv": lambda q, kv: fa.flash_attn_varlen_kvpacked_func(q, kv, cu_q, cu_k, 19, 19, **options),
    }

    def apart(q: Tensor, k: Tensor, v: Tensor) -> Any:
        if "varlen" in form:
            return fa.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 19, 19, **options)
        return fa.flash_attn_func(q, k, v, **options)

    return operands, calls[form], apart


def separate(operands: list[Tensor]) -> list[Tensor]:
    *q, several = operands
    return [*q, *several.unbind(-3)]


FORMS = ["qkv", "kv", "varlen_qkv", "varlen_kv"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("feature", ["full", "causal_alibi", "softcap", "dropout"])
def test_packed_operands(form: str, feature: str, device: str, seed: int) -> None:
    """Bit for bit what the function over separate tensors gives, gradients included."""
    options = options_of(feature, 3 if "varlen" in form else 2, 4, device)
    options |= {"deterministic": True, "return_attn_probs": True}
    operands, function, apart = packed_call(form, device, options)
    operands = leaves(*operands)
    torch.manual_seed(seed)
    out, lse, matrix = function(*operands)
    torch.manual_seed(seed)
    expected_out, expected_lse, expected_matrix = apart(*separate(operands))
    assert torch.equal(out, expected_out) and torch.equal(lse, expected_lse) and torch.equal(matrix, expected_matrix)

    gradients = [torch.randn_like(out), torch.randn_like(lse)]
    mine = torch.autograd.grad((out, lse), operands, gradients)
    expected = torch.autograd.grad((expected_out, expected_lse), operands, gradients)
    assert all(torch.equal(a, b) for a, b in zip(mine, expected, strict=True))
    with torch.no_grad():
        torch.manual_seed(seed)
        assert torch.equal(function(*operands)[0], out)


@pytest.mark.parametrize("form", FORMS)
def test_packed_operands_are_not_copied(form: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    operands, function, _ = packed_call(form, device, {})
    operands = leaves(*operands)
    seen: dict[str, Any] = {}
    forward, backward = tessera.torch.forward, tessera.torch.backward

    def spy_forward(*args: Any, **more: Any) -> Any:
        seen["operands"] = args[:3]
        return forward(*args, **more)

    def spy_backward(*args: Any, **more: Any) -> Any:
        seen["gradients"] = [more[name] for name in ("dq", "dk", "dv")]
        return backward(*args, **more)

    monkeypatch.setattr(tessera.torch, "forward", spy_forward)
    monkeypatch.setattr(tessera.torch, "backward", spy_backward)
    out = function(*operands)
    gradients = torch.autograd.grad(out.sum(), operands)
    for given, used in ((operands, seen["operands"]), (gradients, seen["gradients"])):
        memory = [x.untyped_storage().data_ptr() for x in (given if len(given) == 2 else [given[0], given[0]])]
        assert [x.untyped_storage().data_ptr() for x in used] == [memory[0], memory[1], memory[1]]


# ---- strange strides, autocast, compilers


def test_any_strides(device: str) -> None:
    q, k, v = torch.randn(3, 2, 11, 3, 16, device=device, dtype=torch.bfloat16)
    expected = fa.flash_attn_func(q, k, v)
    scattered = [x.transpose(1, 3).contiguous().transpose(1, 3) for x in (q, k, v)]
    assert scattered[0].stride(-1) != 1
    assert torch.equal(fa.flash_attn_func(*scattered), expected)
    heads_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    assert torch.equal(fa.flash_attn_func(*heads_first), expected)


def test_deterministic_is_passed_on(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU's results are repeatable anyway, so the argument itself is looked at."""
    seen = []

    def spy(q: Tensor, *_: Any, deterministic: bool, **__: Any) -> Tensor:
        seen.append(deterministic)
        return q

    monkeypatch.setattr(tessera, "attention", spy)
    q = torch.randn(1, 4, 2, 16, device=device, dtype=torch.bfloat16)
    fa.flash_attn_func(q, q, q)
    fa.flash_attn_func(q, q, q, deterministic=True)
    assert seen == [False, True]


def test_autocast_changes_nothing(device: str) -> None:
    """Upstream's functions compute in the type of their arguments."""
    qkv = torch.randn(2, 11, 3, 2, 16, device=device, dtype=torch.float16)
    expected = fa.flash_attn_qkvpacked_func(qkv)
    with torch.autocast(device, torch.bfloat16):
        assert torch.equal(fa.flash_attn_qkvpacked_func(qkv.requires_grad_()), expected)
        assert torch.equal(fa.flash_attn_func(*qkv.unbind(2)), expected)


@pytest.mark.parametrize("form", FORMS)
def test_compiled(form: str, device: str) -> None:
    """torch.compile makes one graph of it, forward and backward; aot_eager because a compiler may not be there."""
    torch.compiler.reset()
    operands, function, _ = packed_call(form, device, {"causal": True, "deterministic": True})
    operands = leaves(*operands)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)(*operands)
    expected = function(*operands)
    assert torch.equal(compiled, expected)
    dout = torch.randn_like(expected)
    mine, right = torch.autograd.grad(compiled, operands, dout), torch.autograd.grad(expected, operands, dout)
    assert all(torch.equal(a, b) for a, b in zip(mine, right, strict=True))


# ---- the private operators


def dense_arguments(device: str, dropout_p: float = 0.0, alibi: bool = False) -> Any:
    q = torch.randn(2, 9, 4, 16, device=device, dtype=torch.bfloat16)
    k, v = torch.randn(2, 2, 15, 2, 16, device=device, dtype=torch.bfloat16)
    slopes = torch.rand(4, device=device) if alibi else None
    return (q, k, v), (dropout_p, 0.25, True, 6, -1, 0.0, slopes)


def packed_arguments(device: str) -> Any:
    cu_q = torch.tensor([0, 5, 5, 12], dtype=torch.int32, device=device)
    cu_k = torch.tensor([0, 4, 8, 20], dtype=torch.int32, device=device)
    q = torch.randn(12, 4, 16, device=device, dtype=torch.bfloat16)
    k, v = torch.randn(2, 20, 2, 16, device=device, dtype=torch.bfloat16)
    return (q, k, v), (cu_q, cu_k, 7, 12)


@pytest.mark.parametrize("dropout_p", [0.0, 0.25])
def test_dense_operators_equal_autograd(dropout_p: float, device: str, seed: int) -> None:
    (q, k, v), options = dense_arguments(device, dropout_p, alibi=True)
    torch.manual_seed(seed)
    out, lse, matrix, rng_state = fa._flash_attn_forward(q, k, v, *options, dropout_p > 0)
    operands = leaves(q, k, v)
    _, scale, causal, left, right, softcap, slopes = options
    torch.manual_seed(seed)
    expected, expected_lse, expected_matrix = fa.flash_attn_func(
        *operands, dropout_p, scale, causal, (left, right), softcap, slopes, True, True
    )
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse) and torch.equal(matrix, expected_matrix)
    assert rng_state.shape == (2,) and rng_state.dtype == torch.int64 and rng_state.device.type == "cpu"

    dout = torch.randn_like(out)
    gradients = [torch.empty_like(x) for x in (q, k, v)]
    softmax_d = fa._flash_attn_backward(dout, q, k, v, out, lse, *gradients, *options, True, rng_state)
    right_ones = torch.autograd.grad(expected, operands, dout)
    assert all(torch.equal(a, b) for a, b in zip(gradients, right_ones, strict=True))
    assert softmax_d.shape == (2, 4, 128)
    products = (dout.double() * out.double()).sum(-1).transpose(1, 2) * (1 - dropout_p)
    assert (softmax_d[..., :9] - products).abs().max() < 1e-4 and not softmax_d[..., 9:].any()
    # Nowhere to write: still a result, as upstream.
    again = fa._flash_attn_backward(dout, q, k, v, out, lse, None, None, None, *options, True, rng_state)
    assert torch.equal(again, softmax_d)


@pytest.mark.parametrize("dropout_p", [0.0, 0.25])
def test_packed_operators_equal_autograd(dropout_p: float, device: str, seed: int) -> None:
    (q, k, v), lengths = packed_arguments(device)
    torch.manual_seed(seed)
    out, lse, matrix, rng_state = fa._flash_attn_varlen_forward(
        q, k, v, *lengths, dropout_p, 0.25, True, return_softmax=dropout_p > 0
    )
    operands = leaves(q, k, v)
    torch.manual_seed(seed)
    expected, expected_lse, expected_matrix = fa.flash_attn_varlen_func(
        *operands, *lengths, dropout_p, 0.25, True, deterministic=True, return_attn_probs=True
    )
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse) and torch.equal(matrix, expected_matrix)
    assert (lse == INFINITY).any(), "some query of this test sees no key"

    dout = torch.randn_like(out)
    gradients = [torch.empty_like(x) for x in (q, k, v)]
    softmax_d = fa._flash_attn_varlen_backward(
        dout, q, k, v, out, lse, *gradients, *lengths, dropout_p, 0.25, True, -1, -1, 0.0, None, True, rng_state
    )
    assert all(torch.equal(a, b) for a, b in zip(gradients, torch.autograd.grad(expected, operands, dout), strict=True))
    assert softmax_d.shape == (4, 12 + 128 * 3)
    # FlashAttention-3's convention for empty rows does as well.
    others = [torch.empty_like(x) for x in (q, k, v)]
    lse = lse.masked_fill(lse == INFINITY, -INFINITY)
    fa._flash_attn_varlen_backward(
        dout, q, k, v, out, lse, *others, *lengths, dropout_p, 0.25, True, -1, -1, 0.0, None, True, rng_state
    )
    assert all(torch.equal(a, b) for a, b in zip(gradients, others, strict=True))


def test_gradients_into_views(device: str) -> None:
    """dq, dk and dv may be parts of one buffer, as ring attention has them."""
    (q, _, _), options = dense_arguments(device)
    out, lse, _, _ = fa._flash_attn_forward(q, q, q, *options, False)
    apart = [torch.empty_like(q) for _ in range(3)]
    together = torch.full((2, 9, 3, 4, 16), torch.nan, device=device, dtype=q.dtype)
    for gradients in (apart, together.unbind(2)):
        fa._flash_attn_backward(out, q, q, q, out, lse, *gradients, *options, True)
    assert torch.equal(torch.stack(apart, 2), together)


def test_used_keys(device: str) -> None:
    (q, k, v), (cu_q, cu_k, *longest) = packed_arguments(device)
    used = torch.tensor([2, 4, 7], dtype=torch.int32, device=device)
    out, lse, _, _ = fa._flash_attn_varlen_forward(
        q, k, v, cu_q, cu_k, *longest, 0.0, 0.25, True, seqused_k=used, zero_tensors=True
    )
    chosen = torch.cat([torch.arange(int(cu_k[b]), int(cu_k[b] + used[b])) for b in range(3)]).to(device)
    shorter = torch.nn.functional.pad(used.cumsum(0), (1, 0)).int()
    expected, expected_lse, _ = fa.flash_attn_varlen_func(
        q, k[chosen], v[chosen], cu_q, shorter, *longest, 0.0, 0.25, True, return_attn_probs=True
    )
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)


def test_tokens_of_no_sequence(device: str) -> None:
    """A GPU does not look at the end of cu_seqlens: it leaves such tokens alone. The CPU does, and objects."""
    (q, k, v), _ = packed_arguments(device)
    two = torch.tensor([0, 5, 9], dtype=torch.int32, device=device)
    if device == "cpu":
        with pytest.raises(ValueError, match=r"cu_seqlens_q\[2\] = 9"):
            fa.flash_attn_varlen_func(q, k, v, two, two, 5, 5)
        return
    out, lse, _, _ = fa._flash_attn_varlen_forward(q, k, v, two, two, 5, 5, 0.0, 0.25, True, zero_tensors=True)
    assert not out[9:].any() and out[:9].any()
    gradients = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    fa._flash_attn_varlen_backward(
        out, q, k, v, out, lse, *gradients, two, two, 5, 5, 0.0, 0.25, True, -1, -1, 0.0, None, True, None, True
    )
    assert all(x.isfinite().all() and not x[9:].any() and x[:9].any() for x in gradients)


def test_operators_are_good_citizens(device: str) -> None:
    """Schemas, fake kernels and mutation are as torch wants them."""
    (q, k, v), options = dense_arguments(device, 0.25)
    torch.library.opcheck(
        fa._flash_attn_forward._opoverload, (q, k, v, *options, True), test_utils=DETERMINISTIC_CHECKS
    )
    (q, k, v), options = dense_arguments(device)
    torch.library.opcheck(fa._flash_attn_forward._opoverload, (q, k, v, *options, False))
    out, lse, _, state = fa._flash_attn_forward(q, k, v, *options, False)
    gradients = [torch.empty_like(x) for x in (q, k, v)]
    torch.library.opcheck(
        fa._flash_attn_backward._opoverload, (out, q, k, v, out, lse, *gradients, *options, True, state)
    )
    (q, k, v), lengths = packed_arguments(device)
    arguments = (q, k, v, *lengths, 0.0, 0.25, True)
    torch.library.opcheck(fa._flash_attn_varlen_forward._opoverload, arguments)
    out, lse, _, state = fa._flash_attn_varlen_forward(*arguments)
    gradients = [torch.empty_like(x) for x in (q, k, v)]
    more = (*lengths, 0.0, 0.25, True, -1, -1, 0.0, None, True, state)
    torch.library.opcheck(fa._flash_attn_varlen_backward._opoverload, (out, q, k, v, out, lse, *gradients, *more))


# What can be checked of an operator that draws random numbers: not that two calls agree.
DETERMINISTIC_CHECKS = ("test_autograd_registration", "test_faketensor")


def test_raw_functions(device: str) -> None:
    """The extension module's functions with upstream's positional arguments."""
    (q, k, v), options = dense_arguments(device)
    p, scale, causal, left, right, softcap, slopes = options
    raw = fa.flash_attn_gpu
    given = torch.empty_like(q)
    out, lse, _, state = raw.fwd(q, k, v, given, slopes, p, scale, causal, left, right, softcap, False, None)
    assert out is given
    expected = fa._flash_attn_forward(q, k, v, *options, False)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    dq, dk, dv, _ = raw.bwd(
        out, q, k, v, out, lse, None, None, None, slopes, p, scale, causal, left, right, softcap, True, None, state
    )
    gradients = [torch.empty_like(x) for x in (q, k, v)]
    fa._flash_attn_backward(out, q, k, v, out, lse, *gradients, *options, True, state)
    assert all(torch.equal(a, b) for a, b in zip((dq, dk, dv), gradients, strict=True))
    with pytest.raises(RuntimeError, match="`generator` argument is no longer supported"):
        raw.fwd(q, k, v, None, slopes, p, scale, causal, left, right, softcap, False, torch.Generator())
    with pytest.raises(RuntimeError, match="`generator` argument is no longer supported"):
        raw.bwd(
            out, q, k, v, out, lse, dq, dk, dv, slopes, p, scale, causal, left, right, softcap, True,
            torch.Generator(), state,
        )  # fmt: skip


# ---- what is refused


def test_float8_is_refused(device: str) -> None:
    """By every function, with the name of the tensor, its type, and what to do."""
    qkv = torch.randn(1, 4, 3, 2, 16, device=device, dtype=torch.bfloat16)
    low = qkv.to(torch.float8_e4m3fn)
    (q, k, v), cu = qkv.unbind(2), torch.tensor([0, 4], dtype=torch.int32, device=device)
    said = r"dtype = torch.float8_e4m3fn: float8 is for flash_attn_interface, .*; dequantise first"
    calls: dict[str, Callable[[], Any]] = {
        "q": lambda: fa.flash_attn_func(low[:, :, 0], k, v),
        "v": lambda: fa.flash_attn_varlen_func(q[0], k[0], low[0, :, 2], cu, cu, 4, 4),
        "kv": lambda: fa.flash_attn_kvpacked_func(q, low[:, :, 1:]),
        "qkv": lambda: fa.flash_attn_varlen_qkvpacked_func(low[0], cu, 4),
        "k": lambda: fa._flash_attn_forward(q, low[:, :, 1], v, 0.0, 0.25, False, -1, -1, 0.0, None, False),
    }
    for name, call in calls.items():
        with pytest.raises(NotImplementedError, match=rf"^{name}\.{said}"):
            call()
    lse = torch.zeros(1, 2, 4, device=device)
    with pytest.raises(NotImplementedError, match=rf"^v\.{said}"):
        fa._flash_attn_backward(
            q, q, k, low[:, :, 2], q, lse, None, None, None, 0.0, 0.25, False, -1, -1, 0.0, None, False
        )


def test_refusals(device: str) -> None:
    (q, k, v), lengths = packed_arguments(device)
    table = torch.zeros(3, 1, dtype=torch.int32, device=device)
    with pytest.raises(NotImplementedError, match="varlen_fwd without block_table: leftpad_k .*pack k and v without"):
        fa._flash_attn_varlen_forward(q, k, v, *lengths, 0.0, 0.25, False, leftpad_k=table)
    used = torch.ones(3, dtype=torch.int32, device=device)
    with pytest.raises(NotImplementedError, match="with seqused_k: dropout_p is given.*and leave seqused_k out"):
        fa._flash_attn_varlen_forward(q, k, v, *lengths, 0.1, 0.25, False, seqused_k=used)
    slopes = torch.ones(q.shape[1], device=device)
    with pytest.raises(NotImplementedError, match="with seqused_k: alibi_slopes is given.*and leave seqused_k out"):
        fa._flash_attn_varlen_forward(q, k, v, *lengths, 0.0, 0.25, False, alibi_slopes=slopes, seqused_k=used)
    dense = torch.randn(1, 4, 2, 16, device=device, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"softcap = 5\.0 with dropout_p = 0\.1"):
        fa.flash_attn_func(dense, dense, dense, 0.1, softcap=5.0)
    with pytest.raises(ValueError, match="return_softmax"):
        fa._flash_attn_forward(dense, dense, dense, 0.0, 0.25, False, -1, -1, 0.0, None, True)
    with pytest.raises(ValueError, match=r"k has shape \(1, 4, 2, 8\): must be \(1, 4, 2, 16\)"):
        fa.flash_attn_func(dense, dense[:, :, :, :8], dense)
    with pytest.raises(ValueError, match="window_size = 3: must be a pair"):
        fa.flash_attn_func(dense, dense, dense, window_size=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"qkv has shape \(1, 4, 2, 16\): must be \(..., 3, heads, head_dim\)"):
        fa.flash_attn_qkvpacked_func(dense)
    with pytest.raises(ValueError, match=r"kv has shape \(1, 4, 3, 2, 16\): must be \(..., 2, heads, head_dim\)"):
        fa.flash_attn_kvpacked_func(dense, torch.stack([dense] * 3, 2))
