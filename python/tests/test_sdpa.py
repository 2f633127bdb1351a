"""tessera.torch.sdpa against torch.nn.functional.scaled_dot_product_attention: its math backend in double is the truth,
from which a result may be twice as far (a gradient three times) as the naive computation in the inputs' own type.

And a little more, some roundings of the largest element: with a key or two the naive computation is exact by luck, and
bfloat16 has few bits to be lucky with (docs/correctness.md).
"""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import tessera
from tessera.torch import flash_impl, padding, sdpa, sdpa_mode

COMMON = settings(
    deadline=None, max_examples=60, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def types(device: str) -> list[torch.dtype]:
    return [torch.bfloat16] if device == "cuda" else [torch.float32, torch.bfloat16]


def truth(*args: Any, **kwargs: Any) -> Tensor:
    """Torch's math backend."""
    with sdpa_kernel(SDPBackend.MATH):
        return scaled_dot_product_attention(*args, **kwargs)


def naive(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """The documented equivalent of torch's function, every step in the inputs' type. Empty rows are 0."""
    if enable_gqa:
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    s = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        mask = torch.ones(s.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        s = s.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else s + mask
    s = s.to(q.dtype)
    empty = (s == -torch.inf).all(-1, keepdim=True)
    return s.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0) @ v


def check(name: str, ours: Tensor, exact: Tensor, plain: Tensor, factor: float, size: float) -> None:
    """size: of the largest element, were nothing to cancel."""
    assert ours.shape == exact.shape and not ours.isnan().any(), name
    if ours.numel() == 0:
        return
    error, allowed = ((x.double() - exact).abs().max().item() for x in (ours, plain))
    floor = (5e-5 if ours.dtype is torch.float32 else 6 * torch.finfo(ours.dtype).eps) * max(1.0, size)
    assert error <= factor * allowed + floor, f"{name}: error {error:.2e}, naive {allowed:.2e}"


def mask_gradient_size(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, dout: Tensor, **options: Any) -> float:
    """A mask's gradient sums over what the mask is broadcast along: over the keys to 0, but for roundings. So a sum is
    given the size that it would have of independent elements."""
    every = mask.detach().double().expand(*q.shape[:-1], k.shape[-2]).clone().requires_grad_()
    o = truth(*(x.detach().double() for x in (q, k, v)), every, **options)
    (elements,) = torch.autograd.grad(o, every, dout, allow_unused=True, materialize_grads=True)
    return float(elements.square().sum_to_size(mask.shape).sqrt().max())


def compare(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, extra: Any = None, **options: Any) -> Tensor:
    """Output and gradients by the rule. extra: options of sdpa only; the last two: of the mask that they replace."""
    runs = []
    given = [x for x in (q, k, v, mask) if x is not None]
    for function in (sdpa, truth, naive):
        inputs = [x.detach() for x in given]
        if function is truth:
            inputs = [x.double() if x.is_floating_point() else x for x in inputs]
        for x, source in zip(inputs, given, strict=True):
            x.requires_grad_(source.requires_grad)
        o = function(*inputs, **options, **(extra or {} if function is sdpa else {}))
        wanted = [x for x in inputs if x.requires_grad]
        torch.manual_seed(o.numel())
        dout = torch.randn(o.shape, device=o.device).to(q.dtype).to(o.dtype)
        # Without queries torch does not get as far as to use the mask.
        runs.append((o.detach(), *torch.autograd.grad(o, wanted, dout, allow_unused=True, materialize_grads=True)))
    assert runs[0][0].dtype == q.dtype
    names = ["o", *(f"d{name}" for name, x in zip(("q", "k", "v", "mask"), given, strict=False) if x.requires_grad)]
    for name, a, c, b in zip(names, *runs, strict=True):
        size = float(c.abs().max()) if c.numel() else 0.0
        if name == "dmask" and dout.numel():
            assert mask is not None
            size = mask_gradient_size(q, k, v, mask, dout.double(), **options)
        check(name, a, c, b, 2 if name == "o" else 3, size)
    return runs[0][0]


@st.composite
def problems(draw: Any) -> dict[str, Any]:
    """Sizes of a call."""
    heads_k, group = draw(st.sampled_from([(1, 1), (2, 1), (3, 1), (2, 2), (1, 4), (2, 3)]))
    return {
        "batch": draw(st.lists(st.integers(1, 3), min_size=0, max_size=2)),
        "heads": heads_k * group,
        "heads_k": heads_k,
        "seqlen_q": draw(st.one_of(st.integers(0, 5), st.integers(1, 70))),
        "seqlen_k": draw(st.one_of(st.integers(1, 5), st.integers(1, 70))),
        "head_dim": draw(st.sampled_from([1, 3, 8, 16, 33, 64])),
        "head_dim_v": draw(st.sampled_from([1, 5, 8, 16, 32])),
        "scale": draw(st.sampled_from([None, 0.3, 1.0])),
    }


def make(sizes: dict[str, Any], device: str, dtype: torch.dtype, layout: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v as (*batch, heads, seqlen, head_dim), whose memory may be laid out in other orders."""

    def one(heads: int, seqlen: int, width: int) -> Tensor:
        batch = sizes["batch"]
        match layout % 4:
            case 0:
                x = torch.randn(*batch, heads, seqlen, width, device=device)
            case 1:
                x = torch.randn(*batch, seqlen, heads, width, device=device).transpose(-2, -3)
            case 2:
                x = torch.randn(*batch, heads, width, seqlen, device=device).transpose(-1, -2)
            case _:
                x = torch.randn(*batch, heads, seqlen, 2 * width + 3, device=device)[..., 1 : width + 1]
        return x.to(dtype).requires_grad_()

    rows, keys = sizes["seqlen_q"], sizes["seqlen_k"]
    q = one(sizes["heads"], rows, sizes["head_dim"])
    return q, one(sizes["heads_k"], keys, sizes["head_dim"]), one(sizes["heads_k"], keys, sizes["head_dim_v"])


def gqa(sizes: dict[str, Any]) -> bool:
    return bool(sizes["heads"] != sizes["heads_k"])


# ---- the same numbers as torch


@COMMON
@given(sizes=problems(), is_causal=st.booleans(), layout=st.integers(0, 3), seed=st.integers(0, 2**20))
def test_without_mask(sizes: dict[str, Any], is_causal: bool, layout: int, seed: int, device: str) -> None:
    for dtype in types(device):
        torch.manual_seed(seed)
        q, k, v = make(sizes, device, dtype, layout)
        compare(q, k, v, is_causal=is_causal, scale=sizes["scale"], enable_gqa=gqa(sizes))


@COMMON
@given(
    sizes=problems(), kept=st.integers(0, 31), kind=st.sampled_from(["bool", "float", "float32", "gradient", "-inf"]),
    expanded=st.booleans(), seed=st.integers(0, 2**20),
)  # fmt: skip
def test_masks(sizes: dict[str, Any], kept: int, kind: str, expanded: bool, seed: int, device: str) -> None:
    """Masks of every shape that broadcasts: bit i of kept says whether dimension i has its size or 1."""
    for dtype in types(device):
        torch.manual_seed(seed)
        q, k, v = make(sizes, device, dtype)
        full = (*q.shape[:-1], k.shape[-2])
        shape = [n if kept >> i & 1 else 1 for i, n in enumerate(full)]
        if not expanded and kept & 1 == 0:
            shape = shape[1:]
        mask = torch.randn(shape, device=device)
        if kind == "bool":
            mask = mask > 0
        elif kind == "-inf":
            mask = mask.masked_fill(torch.rand(shape, device=device) < 0.5, -torch.inf).to(dtype)
        else:
            mask = mask if kind == "float32" else mask.to(dtype)
            mask.requires_grad_(kind == "gradient")
        if expanded:
            mask = mask.expand(full)
        compare(q, k, v, mask, scale=sizes["scale"], enable_gqa=gqa(sizes))


def test_every_shape_of_mask_in_five_dimensions(device: str) -> None:
    shape = (2, 3, 2, 6, 7)
    q, k, v = (torch.randn(2, 3, 2, n, 8, device=device).to(types(device)[0]).requires_grad_() for n in (6, 7, 7))
    for sizes in itertools.product(*((1, n) for n in shape)):
        compare(q, k, v, torch.randn(sizes, device=device).to(q.dtype).requires_grad_())


@pytest.mark.parametrize(
    "shapes",
    [
        ((5, 8), (6, 8), (6, 4)),
        ((2, 5, 8), (2, 6, 8), (2, 6, 4)),
        ((1, 3, 5, 8), (2, 3, 6, 8), (2, 3, 6, 8)),
        ((2, 3, 5, 8), (1, 3, 6, 8), (1, 3, 6, 8)),
        ((2, 3, 5, 8), (2, 1, 6, 8), (2, 3, 6, 8)),
        ((2, 1, 5, 8), (2, 3, 6, 8), (2, 3, 6, 8)),
        ((2, 1, 5, 8), (2, 3, 6, 8), (2, 1, 6, 8)),
        ((2, 3, 5, 8), (3, 6, 8), (1, 6, 8)),
        ((2, 1, 3, 5, 8), (4, 3, 6, 8), (2, 4, 3, 6, 8)),
        ((0, 3, 5, 8), (0, 3, 6, 8), (0, 3, 6, 8)),
        ((2, 3, 5, 8), (2, 3, 0, 8), (2, 3, 0, 8)),
        ((2, 3, 0, 8), (2, 3, 6, 8), (2, 3, 6, 8)),
    ],
)
def test_broadcasting(shapes: tuple[tuple[int, ...], ...], device: str) -> None:
    compare(*(torch.randn(shape, device=device).to(types(device)[0]).requires_grad_() for shape in shapes))


def test_empty_rows_are_zero(device: str) -> None:
    q, k, v = make({**SIZES, "seqlen_q": 5, "seqlen_k": 6}, device, types(device)[0])
    mask = torch.rand(5, 6, device=device) < 0.5
    mask[2] = False
    for given_mask in (mask, torch.zeros(5, 6, device=device).masked_fill(~mask, -torch.inf)):
        assert (compare(q, k, v, given_mask)[..., 2, :] == 0).all()


SIZES: dict[str, Any] = {
    "batch": [3], "heads": 2, "heads_k": 2, "seqlen_q": 19, "seqlen_k": 23, "head_dim": 16, "head_dim_v": 24,
    "scale": None,
}  # fmt: skip


# ---- what the caller knows of the mask


def test_mask_is_causal_or_a_window(device: str) -> None:
    q, k, v = make(SIZES, device, types(device)[0])
    at = torch.arange(23, device=device) - torch.arange(19, device=device)[:, None]
    compare(q, k, v, at <= 0, extra={"mask_is": "causal"})
    for left, right in ((3, 0), (-1, 2), (0, 0), (4, -1), (5, 7), (-1, -1)):
        mask = (at >= -left if left >= 0 else at > -99) & (at <= right if right >= 0 else at < 99)
        compare(q, k, v, mask, extra={"mask_is": ("window", left, right)})
    # Its values are not read.
    assert torch.equal(sdpa(q, k, v, at < 99, mask_is="causal"), sdpa(q, k, v, is_causal=True))


@pytest.mark.parametrize("layout", [0, 1])
def test_mask_is_padding(layout: int, device: str) -> None:
    q, k, v = make(SIZES, device, types(device)[0], layout)
    at = torch.arange(23, device=device)
    first, end = torch.tensor([[0, 4, 9], [23, 20, 9]], device=device)[:, :, None, None, None]
    compare(q, k, v, (at >= first) & (at < end), extra={"mask_is": "padding"})
    compare(q, k, v, ((at >= first) & (at < end))[:1], extra={"mask_is": "padding"})
    five = [x.unflatten(0, (3, 1)) for x in (q, k, v)]
    compare(*five, ((at >= first) & (at < end))[:, None], extra={"mask_is": "padding"})


def test_pieces() -> None:
    first, end = padding.runs(torch.tensor([[0, 1, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]], dtype=torch.bool))
    assert first.tolist() == [1, 0, 0] and end.tolist() == [3, 0, 4]
    keys = padding.cut_keys(first, end, 2, 4)
    assert keys.cu_seqlens_q.tolist() == [0, 0, 2, 2, 2, 4, 4, 4, 6, 6]
    assert keys.cu_seqlens_k.tolist() == [0, 1, 3, 4, 4, 4, 8, 8, 12, 12]
    both = padding.cut_both(first[:1], end[:1], 4, first[:1], end[:1], 4)
    assert both.cu_seqlens_q.tolist() == [0, 1, 1, 3, 4, 4]
    assert both.cu_seqlens_k.tolist() == [0, 0, 1, 3, 3, 4]
    assert padding.runs(torch.zeros(2, 0, dtype=torch.bool))[1].tolist() == [0, 0]


# ---- the rest of the signature


def test_dropout(device: str) -> None:
    q, k, v = make(SIZES, device, types(device)[0])
    results = []
    for number in (1, 1, 2):
        torch.manual_seed(number)
        results.append(sdpa(q, k, v, None, 0.5))
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])
    mean = sum(sdpa(q, k, v, None, 0.5).detach().double() for _ in range(400)) / 400
    assert (mean - sdpa(q, k, v).double()).abs().max() < 0.5


def test_autocast(device: str) -> None:
    q, k, v = (torch.randn(2, 3, 9, 16, device=device, requires_grad=True) for _ in range(3))
    for mask in (None, torch.randn(9, 9, device=device), torch.rand(9, 9, device=device) < 0.6):
        with torch.autocast(device, torch.bfloat16):
            a, b = (function(q, k, v, mask) for function in (sdpa, scaled_dot_product_attention))
        assert a.dtype is b.dtype is torch.bfloat16
        torch.testing.assert_close(a, b, atol=0.05, rtol=0.05)
        a.sum().backward()
        assert q.grad is not None and q.grad.dtype is torch.float32


def test_no_copies(device: str) -> None:
    """Kernels read the tensors where they lie; a boolean mask becomes a bias of what it holds."""
    seen: list[Any] = []
    q, k, v = make(SIZES, device, types(device)[0], layout=3)
    keep = torch.rand(3, 1, 1, 23, device=device).expand(3, 2, 19, 23) < 0.5
    keep = keep[:, :1, :1].expand(3, 2, 19, 23)
    spy = lambda *args, **kwargs: seen.append((args, kwargs)) or args[0]  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tessera.torch.scaled_dot_product.attention", spy)
        sdpa(q, k, v, keep)
    (tensors, options), *more = seen
    assert not more and options["bias"].shape == (3, 1, 1, 23)
    assert [x.data_ptr() for x in tensors] == [x.data_ptr() for x in (q, k, v)]


def test_errors(device: str) -> None:
    q, k, v = make(SIZES, device, types(device)[0])
    mask = torch.ones(19, 23, dtype=torch.bool, device=device)
    half = torch.float16
    cases: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: sdpa(q, k, v, mask, is_causal=True), ValueError, "is_causal = True together with attn_mask"),
        (lambda: sdpa(q[0, 0, 0], k, v), ValueError, r"query has shape \(16,\)"),
        (
            lambda: sdpa(q, k[:, :, :, :8], v),
            ValueError,
            r"key has shape \(3, 2, 23, 8\): head_dim must be query's, 16",
        ),
        (lambda: sdpa(q, k, v[:, :, :5]), ValueError, r"value has shape \(3, 2, 5, .*: seqlen_k must be key's, 23"),
        (lambda: sdpa(q, k.to(half), v), ValueError, r"k\.dtype = float16, but q\.dtype = "),
        (lambda: sdpa(q, k.tolist(), v), TypeError, "key is of type 'list': must be a torch tensor"),
        (lambda: sdpa(q, k, v, [True]), TypeError, "attn_mask is of type 'list': must be"),  # type: ignore[arg-type]
        (lambda: sdpa(q[:2], k, v), ValueError, "leading dimensions .* must broadcast"),
        (lambda: sdpa(q.repeat(1, 2, 1, 1), k, v), ValueError, "num_heads .* are 4, 2 and 2: .* enable_gqa"),
        (lambda: sdpa(q, k.repeat(1, 2, 1, 1), v, enable_gqa=True), ValueError, "num_heads .* are 2, 4 and 2"),
        (lambda: sdpa(q, k, v, mask[:5]), ValueError, r"attn_mask has shape \(5, 23\): must broadcast to \(3, 2, 19"),
        (lambda: sdpa(q, k, v, mask[None, None, None]), ValueError, "must broadcast"),
        (lambda: sdpa(q, k, v, mask.long()), ValueError, "attn_mask.dtype = torch.int64"),
        (lambda: sdpa(q, k, v, mask.to(half)), ValueError, "attn_mask.dtype = torch.float16"),
        (lambda: sdpa(q, k, v, mask_is="causal"), ValueError, "mask_is = 'causal', but attn_mask is None"),
        (lambda: sdpa(q, k, v, mask, mask_is="padding"), ValueError, r"must be torch.bool, \(batch, 1, 1, seqlen_k\)"),
        (lambda: sdpa(q, k, v, mask, mask_is="full"), ValueError, "mask_is = 'full': must be"),  # type: ignore[arg-type]
        (
            lambda: sdpa(q, k, v, mask.float().requires_grad_(), mask_is="causal"),
            ValueError,
            "attn_mask requires a gradient",
        ),
        (lambda: sdpa(q, k, v, dropout_p=1.5), ValueError, "dropout_p = 1.5: must be 0, or lie in"),
    ]
    for call, error, text in cases:
        with pytest.raises(error, match=text):
            call()
    nested = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)], layout=torch.jagged)
    with pytest.raises(NotImplementedError, match="query is a nested tensor"):
        sdpa(nested, nested, nested)
    if device == "cuda":
        with pytest.raises((ValueError, NotImplementedError), match="float64"):
            sdpa(q.double(), k.double(), v.double())


def test_float64_is_left_to_torch() -> None:
    """On a CPU, with a word; whatever the caller knows of the mask."""
    q, k, v = (torch.randn(2, 4, n, 8, dtype=torch.float64) for n in (5, 7, 7))
    window = torch.ones(5, 7, dtype=torch.bool).tril(2).triu(-1)
    for arguments, told in (
        ({}, {}),
        ({"is_causal": True}, {}),
        ({"attn_mask": window}, {"mask_is": ("window", 1, 2)}),
        ({"attn_mask": window.tril()}, {"mask_is": "causal"}),
        ({"scale": 0.2, "enable_gqa": True}, {}),
    ):
        heads = 2 if "enable_gqa" in arguments else 4
        with pytest.warns(UserWarning, match="query.dtype = float64: computed by torch's own"):
            ours = sdpa(q, k[:, :heads], v[:, :heads], **arguments, **told)
        theirs = {"is_causal": True} if told.get("mask_is") == "causal" else arguments
        assert torch.equal(ours, scaled_dot_product_attention(q, k[:, :heads], v[:, :heads], **theirs))


def draw_layout(*shape: int) -> Tensor:
    """Random numbers in one of the layouts that tensors have in practice."""
    dims = torch.randperm(len(shape) - 1).tolist()
    x = torch.randn([shape[i] for i in dims] + [shape[-1]]).permute(*(dims.index(i) for i in range(len(dims))), -1)
    match int(torch.randint(8, ())):
        case 0:
            return torch.randn(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2)
        case 1:
            return torch.randn(*shape[:-2], shape[-2], 3, shape[-1])[..., 1, :]
        case 2:
            return torch.randn(shape[1:]).expand(*shape) if len(shape) > 2 else x
        case 3 | 4:
            return x.contiguous()
    return x


@pytest.mark.skipif(torch.__version__ < "2.9", reason="what torch's kernels do differs from version to version")
def test_results_lie_in_memory_as_those_of_torch(device: str) -> None:
    """So that .view() and .stride() give what they give in torch, inside and outside of sdpa_mode."""
    if device == "cuda":
        pytest.skip("torch has several kernels there, whose results lie differently")

    def one_of(*values: Any) -> Any:
        return values[int(torch.randint(len(values), ()))]

    for _ in range(400):
        lead = [one_of(1, 2, 3) for _ in range(one_of(2, 2, 2, 0, 1, 3))]
        d, dv, rows, keys = one_of(1, 8, 16), one_of(None, None, 12), one_of(1, 5, 17), one_of(1, 6, 19)
        q, k, v = draw_layout(*lead, rows, d), draw_layout(*lead, keys, d), draw_layout(*lead, keys, dv or d)
        mask = one_of(None, torch.rand(rows, keys) < 2.0, torch.randn(rows, keys), torch.randn(rows, keys))
        if mask is not None and mask.is_floating_point() and one_of(True, False):
            mask.requires_grad_()
        q.requires_grad_(one_of(True, False))
        arguments = (q, k, v, mask, one_of(0.0, 0.0, 0.0, 0.2))
        theirs = scaled_dot_product_attention(*arguments)
        with sdpa_mode():
            ours = scaled_dot_product_attention(*arguments)
        at = [i for i, n in enumerate(theirs.shape) if n > 1]
        strides = [(q.shape, x.stride()) for x in (q, k, v)]
        assert [ours.stride(i) for i in at] == [theirs.stride(i) for i in at], (strides, arguments[3:])


# ---- in place of torch's


def layers(device: str) -> list[tuple[nn.Module, tuple[Tensor, ...], dict[str, Any]]]:
    dtype = types(device)[0]
    x, y = (torch.randn(2, n, 32, device=device, dtype=dtype) for n in (9, 7))
    pad = torch.arange(9, device=device) >= torch.tensor([[9], [4]], device=device)
    causal = nn.Transformer.generate_square_subsequent_mask(9, device=torch.device(device), dtype=dtype)
    modules = (
        nn.MultiheadAttention(32, 4, batch_first=True),
        nn.MultiheadAttention(32, 4, batch_first=True),
        nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True),
        nn.TransformerDecoderLayer(32, 4, 64, dropout=0.0, batch_first=True),
    )
    inputs: list[tuple[tuple[Tensor, ...], dict[str, Any]]] = [
        ((x, y, y), {"need_weights": False}),
        ((x, x, x), {"need_weights": False, "is_causal": True, "attn_mask": causal}),
        ((x,), {"src_key_padding_mask": pad}),
        ((x, y), {"tgt_mask": causal, "tgt_is_causal": True}),
    ]
    return [(m.to(device, dtype), *arguments) for m, arguments in zip(modules, inputs, strict=True)]


@pytest.mark.parametrize("training", [True, False])
def test_mode_in_modules(training: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import tessera.torch.scaled_dot_product as module

    calls = []
    original = module.attention
    monkeypatch.setattr(module, "attention", lambda *a, **k: calls.append(1) or original(*a, **k))
    for layer, args, kwargs in layers(device):
        layer.train(training)
        with torch.set_grad_enabled(training):
            expected = layer(*args, **kwargs)
            assert not calls
            with sdpa_mode():
                result = layer(*args, **kwargs)
        assert calls
        calls.clear()
        expected, result = (x[0] if isinstance(x, tuple) else x for x in (expected, result))
        tolerance = 1e-5 if result.dtype is torch.float32 else 0.05
        torch.testing.assert_close(result, expected, atol=tolerance, rtol=tolerance)


def test_mode_by_name(device: str) -> None:
    """Names that were imported before are rerouted, too; outside nothing is."""
    q, k, v = make(SIZES, device, types(device)[0])
    with sdpa_mode():
        assert torch.equal(scaled_dot_product_attention(q, k, v, is_causal=True), sdpa(q, k, v, is_causal=True))
        with pytest.raises(ValueError, match="key has shape"):
            torch.nn.functional.scaled_dot_product_attention(q, k[..., :8], v)
    with pytest.raises(RuntimeError) as torchs_own:
        scaled_dot_product_attention(q, k[..., :8], v)
    assert "key has shape" not in str(torchs_own.value)


def test_mode_compiled(device: str) -> None:
    """One graph that holds the custom op."""
    for layer, args, kwargs in layers(device):
        torch._dynamo.reset()
        graphs: list[torch.fx.GraphModule] = []

        def backend(graph: torch.fx.GraphModule, inputs: Any, graphs: Any = graphs) -> Any:
            graphs.append(graph)
            return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

        expected = layer(*args, **kwargs)
        with sdpa_mode():
            result = torch.compile(lambda *a, f=layer, **k: f(*a, **k), backend=backend, fullgraph=True)(
                *args, **kwargs
            )
        (graph,) = graphs
        assert any("tessera" in str(node.target) for node in graph.graph.nodes)
        expected, result = (x[0] if isinstance(x, tuple) else x for x in (expected, result))
        tolerance = 1e-5 if result.dtype is torch.float32 else 0.05
        torch.testing.assert_close(result, expected, atol=tolerance, rtol=tolerance)
        result.sum().backward()


# ---- behind PyTorch's flash attention operators


@pytest.mark.parametrize("is_causal", [False, True])
def test_flash_operators(is_causal: bool, device: str) -> None:
    """Called directly: results and shapes as the operators' fake implementations have them."""
    q, k, v = (torch.randn(2, 9, 3, 16, device=device, dtype=torch.bfloat16).transpose(1, 2) for _ in range(3))
    dout = torch.randn_like(q)
    leaves = [x.float().requires_grad_() for x in (q, k, v)]
    exact = truth(*leaves, is_causal=is_causal)
    exact_grads = torch.autograd.grad(exact, leaves, dout.float())

    out, lse, cu_q, cu_k, max_q, max_k, state, unused, debug = flash_impl.sdpa_flash_attention(q, k, v, 0.0, is_causal)
    meta = torch.ops.aten._scaled_dot_product_flash_attention(*(x.to("meta") for x in (q, k, v)), 0.0, is_causal)
    assert (cu_q, cu_k, max_q, max_k) == (None, None, 9, 9)
    for ours, theirs in ((out, meta[0]), (lse, meta[1]), (state, meta[6]), (unused, meta[7]), (debug, meta[8])):
        assert (ours.shape, ours.dtype, ours.stride()) == (theirs.shape, theirs.dtype, theirs.stride())
    torch.testing.assert_close(out.float(), exact, atol=0.02, rtol=0.02)
    grads = flash_impl.sdpa_flash_attention_backward(
        dout, q, k, v, out, lse, torch.empty(0), torch.empty(0), 9, 9, 0.0, is_causal, state, unused
    )
    for ours, theirs, like in zip(grads, exact_grads, (q, k, v), strict=True):
        assert ours.stride() == like.stride()
        torch.testing.assert_close(ours.float(), theirs, atol=0.05, rtol=0.05)


def test_packed_flash_operators(device: str) -> None:
    q, k, v = (torch.randn(20, 3, 16, device=device, dtype=torch.bfloat16) for _ in range(3))
    at = torch.tensor([0, 7, 8, 20], dtype=torch.int32, device=device)
    arguments = (q, k, v, at, at, 12, 12, 0.0, True, False)
    out, lse, state, unused, debug = flash_impl.flash_attention_forward(*arguments, window_size_left=4)
    meta = torch.ops.aten._flash_attention_forward(*(x.to("meta") for x in (q, k, v, at, at)), *arguments[5:])
    for ours, theirs in ((out, meta[0]), (lse, meta[1]), (state, meta[2]), (unused, meta[3]), (debug, meta[4])):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
    other = torch.empty_like(q)
    assert torch.equal(flash_impl.flash_attention_forward_inplace(other, *arguments, window_size_left=4), lse)
    assert torch.equal(other, out)
    grads = flash_impl.flash_attention_backward(
        out, q, k, v, out, lse, at, at, 12, 12, 0.0, True, state, unused, window_size_left=4
    )
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    result = tessera.attention(
        *leaves, cu_seqlens_q=at, max_seqlen_q=12, causal=True, window=(4, -1), deterministic=True
    )
    assert torch.equal(result, out)
    for ours, theirs in zip(grads, torch.autograd.grad(result, leaves, out), strict=True):
        torch.testing.assert_close(ours, theirs)
    for name, argument in (("seqused_k", at), ("block_table", at), ("alibi_slopes", lse)):
        with pytest.raises(NotImplementedError, match=f"{name} is given"):
            flash_impl.flash_attention_forward(*arguments, **{name: argument})


def test_flash_operators_draw_one_dropout_mask(device: str) -> None:
    q, k, v = (torch.randn(1, 2, 33, 16, device=device, dtype=torch.bfloat16) for _ in range(3))
    out, lse, _, _, _, _, state, unused, _ = flash_impl.sdpa_flash_attention(q, k, v, 0.5)
    assert state.shape == (2,) and state.dtype is torch.uint64
    dv = [
        flash_impl.sdpa_flash_attention_backward(
            torch.ones_like(out), q, k, v, out, lse, torch.empty(0), torch.empty(0), 33, 33, 0.5, False, s, unused
        )[2]
        for s in (state, state.clone())
    ]
    assert torch.equal(*dv)
    # What values of one give is what their gradients get back: both are sums of the same weights.
    ones = torch.ones_like(v)
    out, lse, _, _, _, _, state, unused, _ = flash_impl.sdpa_flash_attention(q, k, ones, 0.5)
    _, _, dv_ones = flash_impl.sdpa_flash_attention_backward(
        torch.ones_like(out), q, k, ones, out, lse, torch.empty(0), torch.empty(0), 33, 33, 0.5, False, state, unused
    )
    torch.testing.assert_close(dv_ones.float().sum(2), out.float().sum(2), atol=0.5, rtol=0.02)


def test_activation(device: str) -> None:
    registry = pytest.importorskip("torch.nn.attention._registry")
    assert "TESSERA" in registry.list_flash_attention_impls()
    if device != "cuda":
        pytest.skip("replaces operators for CUDA")
    q, k, v = (torch.randn(2, 3, 130, 64, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    dout = torch.randn_like(q)
    results = []
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        for active in (False, True, False):
            if active:
                torch.nn.attention.activate_flash_attention_impl("TESSERA")
            out = scaled_dot_product_attention(q, k, v, is_causal=True)
            results.append((out, *torch.autograd.grad(out, (q, k, v), dout)))
            if active:
                compiled = torch.compile(scaled_dot_product_attention)(q, k, v, is_causal=True)
                assert torch.equal(compiled, out)
                torch.testing.assert_close(out, sdpa(q, k, v, is_causal=True))
                torch.nn.attention.restore_flash_attention_impl()
    for theirs, ours, again in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=0.03, rtol=0.03)
        assert torch.equal(theirs, again)
