"""tessera.attention on NumPy and JAX arrays: the same bits as torch tensors with the same memory. Needs no torch but
for that comparison."""

import sys
from typing import Any

import numpy as np
import pytest

import tessera


def arrays(dtype: Any = np.float32, batch: int = 2, rows: int = 19, keys: int = 31) -> tuple[Any, Any, Any]:
    shapes = ((batch, rows, 4, 24), (batch, keys, 2, 24), (batch, keys, 2, 40))
    q, k, v = (np.random.standard_normal(shape).astype(dtype) for shape in shapes)
    return q, k, v


def three_steps(q: Any, k: Any, v: Any) -> Any:
    """Full attention in double."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    k, v = (x.repeat(q.shape[2] // k.shape[2], 2) for x in (k, v))
    s = np.einsum("bihd,bjhd->bhij", q, k) / q.shape[-1] ** 0.5
    p = np.exp(s - s.max(-1, keepdims=True))
    return np.einsum("bhij,bjhd->bihd", p / p.sum(-1, keepdims=True), v), np.log(np.exp(s).sum(-1))


def test_numpy() -> None:
    q, k, v = arrays()
    o, lse = tessera.attention(q, k, v, return_lse=True)
    exact, exact_lse = three_steps(q, k, v)
    assert isinstance(o, np.ndarray) and o.dtype == np.float32
    np.testing.assert_allclose(o, exact, atol=5e-6)
    np.testing.assert_allclose(lse, exact_lse, atol=5e-6)
    np.testing.assert_array_equal(tessera.attention(q, k, v), o)


def test_packed_numpy() -> None:
    q, k, v = (x[0] for x in arrays(rows=31))
    at = np.array([0, 7, 7, 31], np.int32)
    o = tessera.attention(q, k, v, cu_seqlens_q=at, causal=False)
    for begin, end in ((0, 7), (7, 31)):
        part = (x[None, begin:end] for x in (q, k, v))
        np.testing.assert_allclose(o[begin:end], three_steps(*part)[0][0], atol=5e-6)


def test_a_bound_of_the_queries_is_one_of_the_keys() -> None:
    """Without cu_seqlens_k, max_seqlen_k is max_seqlen_q, and so the bias may be as wide."""
    q, k, v = (x[0] for x in arrays(rows=31))
    at, bias = np.array([0, 7, 31], np.int32), np.random.standard_normal((1, 1, 1, 40)).astype(np.float32)
    o = tessera.attention(q, k, v, cu_seqlens_q=at, max_seqlen_q=40, bias=bias)
    narrow = tessera.attention(q, k, v, cu_seqlens_q=at, max_seqlen_q=40, max_seqlen_k=24, bias=bias[..., :24].copy())
    np.testing.assert_allclose(o, narrow, atol=1e-6)


def test_features_have_the_bits_of_torch() -> None:
    torch = pytest.importorskip("torch")
    bias, slopes, sink = (np.random.standard_normal(s).astype(np.float32) for s in ((1, 4, 19, 1), (2, 4), (4,)))
    for dtype in (np.float32, np.float16):
        q, k, v = arrays(dtype)
        options = {"causal": True, "softcap": 3.0, "dropout_p": 0.25}
        ours = tessera.attention(
            q, k, v, bias=bias, alibi_slopes=slopes, sink=sink, rng_state=(3, 4), return_lse=True, **options
        )
        theirs = tessera.attention(
            *map(torch.from_numpy, (q, k, v)), bias=torch.from_numpy(bias), alibi_slopes=torch.from_numpy(slopes),
            sink=torch.from_numpy(sink), rng_state=torch.tensor([3, 4]), return_lse=True, **options,
        )  # fmt: skip
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(a, b.numpy())


def test_bfloat16() -> None:
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    torch = pytest.importorskip("torch")
    q, k, v = (x.astype(bfloat16) for x in arrays())
    o = tessera.attention(q, k, v, bias=np.zeros((1, 1, 1, 31), bfloat16))
    assert o.dtype == bfloat16
    same = tessera.attention(*(torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) for x in (q, k, v)),
                             bias=torch.zeros(1, 1, 1, 31, dtype=torch.bfloat16))  # fmt: skip
    np.testing.assert_array_equal(o.view(np.int16), same.view(torch.int16).numpy())


def test_memory_is_read_where_it_lies() -> None:
    q, k, v = arrays()
    expected = tessera.attention(q, k, v)
    for x in (q, k, v):
        x.flags.writeable = False
    np.testing.assert_array_equal(tessera.attention(q, k, v), expected)
    wide = np.zeros((*k.shape[:-1], 100), np.float32)
    wide[..., 5:29] = k
    np.testing.assert_array_equal(tessera.attention(q, wide[..., 5:29], v), expected)
    backwards = np.ascontiguousarray(k[:, ::-1])[:, ::-1]
    np.testing.assert_array_equal(tessera.attention(q, backwards, v), expected)


def test_dropout_follows_numpy_s_generator() -> None:
    q, k, v = arrays()
    np.random.seed(1)
    first, second = (tessera.attention(q, k, v, dropout_p=0.5) for _ in range(2))
    np.random.seed(1)
    np.testing.assert_array_equal(tessera.attention(q, k, v, dropout_p=0.5), first)
    assert (first != second).any()


def test_wrong_arguments() -> None:
    q, k, v = arrays()
    with pytest.raises(ValueError, match=r"rng_state = \(1,\): must be a pair of integers"):
        tessera.attention(q, k, v, dropout_p=0.5, rng_state=(1,))
    with pytest.raises(ValueError, match="rng_state = 'ab': must be a pair of integers"):
        tessera.attention(q, k, v, dropout_p=0.5, rng_state="ab")
    with pytest.raises(TypeError, match="max_seqlen_q = 2.5: must be an integer"):
        tessera.attention(q[0], k[0], v[0], cu_seqlens_q=np.array([0, 19], np.int32), max_seqlen_q=2.5)  # type: ignore
    with pytest.raises(ValueError, match="q cannot be read: DLPack only supports native byte order"):
        tessera.attention(q.astype(">f4"), k, v)
    with pytest.raises(ValueError, match="np.ascontiguousarray for NumPy"):
        tessera.attention(q[..., ::2], k[..., :12], v)
    with pytest.raises(TypeError, match="k is of type 'list', but q is an array"):
        tessera.attention(q, k.tolist(), v)
    with pytest.raises(ValueError, match="q.dtype = float64: must be float32, bfloat16 or float16"):
        tessera.attention(q.astype(float), k, v)


def test_causal_beside_a_window() -> None:
    """A right end of 0 or -1 means 0; a positive one is refused, also where JAX traces."""
    q, k, v = arrays()
    expected = tessera.attention(q, k, v, window=(5, 0))
    for right in (0, -1):
        np.testing.assert_array_equal(tessera.attention(q, k, v, causal=True, window=(5, right)), expected)
    text = r"window = \(5, 3\) together with causal = True: its right end must be 0 or -1"
    with pytest.raises(ValueError, match=text):
        tessera.attention(q, k, v, causal=True, window=(5, 3))
    with pytest.raises(ValueError, match=text):
        tessera.explain(q, k, v, causal=True, window=(5, 3))
    jax = pytest.importorskip("jax")
    with pytest.raises(ValueError, match=text):
        jax.jit(lambda q: tessera.attention(q, k, v, causal=True, window=(5, 3)))(q)


def test_jax() -> None:
    jax = pytest.importorskip("jax")
    q, k, v = arrays()
    expected, expected_lse = tessera.attention(q, k, v, causal=True, return_lse=True)
    cpu = jax.devices("cpu")[0]
    o, lse = tessera.attention(*(jax.device_put(x, cpu) for x in (q, k, v)), causal=True, return_lse=True)
    assert isinstance(o, jax.Array) and isinstance(lse, jax.Array)
    np.testing.assert_array_equal(np.asarray(o), expected)
    np.testing.assert_array_equal(np.asarray(lse), expected_lse)
    low = tessera.attention(*(jax.device_put(x, cpu).astype(jax.numpy.bfloat16) for x in (q, k, v)))
    assert low.dtype == jax.numpy.bfloat16


def test_explain() -> None:
    q, k, v = arrays()
    text = tessera.explain(q, k, v, causal=True, backward=True)
    assert "bwd f32 b=2 h=4/2 q=19 k=31 d=24/40 causal" in text and "cpu." in text
    half = arrays(np.float16)
    assert "sm90.forward.f16" in tessera.explain(*half, device="h200")
    with pytest.raises(ValueError, match="device = 'abacus': unknown"):
        tessera.explain(q, k, v, device="abacus")


# ---- 8 bits


def scaled_arrays(dtype: Any) -> tuple[Any, ...]:
    """q, k, v and their scales: by row, by block of 7 keys, by column."""
    q, k, v = ((20 * x).clip(-128, 127).astype(dtype) for x in arrays())
    shapes = ((2, 4, 19), (2, 2, 5), (2, 2, 40))
    return q, k, v, *(np.random.uniform(0.02, 0.1, shape).astype(np.float32) for shape in shapes)


def scaled_values(q: Any, k: Any, v: Any, q_scale: Any, k_scale: Any, v_scale: Any) -> tuple[Any, Any, Any]:
    of_k = k_scale.repeat(7, 2)[:, :, :31].transpose(0, 2, 1)[..., None]
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    return q * q_scale.transpose(0, 2, 1)[..., None], k * of_k, v * v_scale[:, None]


def test_scaled() -> None:
    given = scaled_arrays(np.int8)
    exact, exact_lse = three_steps(*scaled_values(*given))
    o, lse = tessera.scaled_attention(*given, k_block=7, dtype=np.float32, return_lse=True)
    assert isinstance(o, np.ndarray) and o.dtype == np.float32
    largest = np.abs(scaled_values(*given)[2]).max()  # of v, some 10: errors of sums of weights times v grow with it
    np.testing.assert_allclose(o, exact, atol=2e-6 * largest)
    np.testing.assert_allclose(lse, exact_lse, atol=5e-6)
    half = tessera.scaled_attention(*given, k_block=7, dtype=np.float16)
    np.testing.assert_array_equal(half, o.astype(np.float16))
    q, k, v, *scales = given
    wide = tessera.scaled_attention(q, k, v.astype(np.float16), *scales[:2], k_block=7)
    assert wide.dtype == np.float16
    text = tessera.explain_scaled(*given, k_block=7, dtype=np.float32)
    assert "fwd i8 b=2 h=4/2 q=19 k=31 d=24/40" in text and "o=f32" in text


def test_scaled_types_of_ml_dtypes() -> None:
    """float8_e4m3fn, which NumPy does not export, and bfloat16, which o is unless somebody asks for another type."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    for dtype in (np.int8, ml_dtypes.float8_e4m3fn):
        given = scaled_arrays(dtype)
        wide = tessera.scaled_attention(*given, k_block=7, dtype=np.float32)
        np.testing.assert_allclose(wide, three_steps(*scaled_values(*given))[0], atol=5e-6)
        o = tessera.scaled_attention(*given, k_block=7)
        assert o.dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(o, wide.astype(ml_dtypes.bfloat16))
    q, k, v, *scales = given
    o = tessera.scaled_attention(q, k, v.astype(ml_dtypes.bfloat16), *scales[:2], k_block=7)
    assert o.dtype == ml_dtypes.bfloat16
    assert "fwd e4m3" in tessera.explain_scaled(*given, k_block=7)
    with pytest.raises(ValueError, match="k.dtype = int8, but q.dtype = float8_e4m3fn: they must be the same"):
        tessera.scaled_attention(q, k.view(np.int8), v, *scales, k_block=7)
    with pytest.raises(ValueError, match="v.dtype = float32: must be q's type, float8_e4m3fn, or bfloat16 or float16"):
        tessera.scaled_attention(q, k, v.astype(np.float32), *scales, k_block=7)


def test_scaled_jax() -> None:
    jax = pytest.importorskip("jax")
    for dtype in (np.int8, jax.numpy.float8_e4m3fn):
        given = scaled_arrays(dtype)
        expected = tessera.scaled_attention(*given, k_block=7)
        there = [jax.device_put(x, jax.devices("cpu")[0]) for x in given]
        o = tessera.scaled_attention(*there, k_block=7)
        assert isinstance(o, jax.Array) and o.dtype == jax.numpy.bfloat16
        np.testing.assert_array_equal(np.asarray(o), expected)
    with pytest.raises(NotImplementedError, match="scaled_attention under JAX's transformations"):
        jax.jit(lambda scale: tessera.scaled_attention(*given[:3], scale, *given[4:], k_block=7))(given[3])


def test_scaled_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, *scales = scaled_arrays(np.int8)
    with pytest.raises(ValueError, match="q_scale is None: must be .*; values of int8 are elements times a scale"):
        tessera.scaled_attention(q, k, v, None, *scales[1:], k_block=7, dtype=np.float32)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="v_scale is of type 'float', but q is an array"):
        tessera.scaled_attention(q, k, v, *scales[:2], 1.0, k_block=7, dtype=np.float32)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="q.dtype = uint8: must be float8_e4m3fn or int8"):
        tessera.scaled_attention(q.view(np.uint8), k, v, *scales, k_block=7, dtype=np.float32)
    with pytest.raises(ValueError, match="dtype = float64: must be float32, bfloat16 or float16"):
        tessera.scaled_attention(q, k, v, *scales, k_block=7, dtype=np.float64)
    with pytest.raises(ValueError, match="q.dtype = int8: must be .*; tessera.scaled_attention takes 8 bits"):
        tessera.attention(q, k, v)
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(ValueError, match="dtype is None, which means bfloat16, a type of ml_dtypes, which is not inst"):
        tessera.scaled_attention(q, k, v, *scales, k_block=7)


def quantized(x: Any, limit: float, axes: Any) -> tuple[Any, Any]:
    """(elements, scale) of int8, by the largest magnitude along the axes."""
    largest = np.abs(x.astype(np.float32)).max(axes, keepdims=True)
    factor = np.float32(limit) / largest
    return np.rint(x.astype(np.float32) * factor).astype(np.int8), largest / np.float32(limit)


def test_quantize() -> None:
    for dtype in (np.float32, np.float16):
        q, k, v = arrays(dtype, keys=14)
        made = tessera.quantize(q, k, v, dtype=np.int8, k_block=7, v_scale="channel")
        elements, scale = quantized(q, 127, -1)
        np.testing.assert_array_equal(made.q, elements)
        np.testing.assert_array_equal(made.q_scale, scale[..., 0].transpose(0, 2, 1))
        elements, scale = quantized(k.reshape(2, 2, 7, 2, 24), 127, (2, 4))
        np.testing.assert_array_equal(made.k, elements.reshape(k.shape))
        np.testing.assert_array_equal(made.k_scale, scale[:, :, 0, :, 0].transpose(0, 2, 1))
        np.testing.assert_allclose(made.v_scale, quantized(v, 127, 1)[1][:, 0], rtol=1e-6)
        assert (np.abs(made.v * made.v_scale[:, None] - v) <= 0.501 * made.v_scale[:, None]).all()
        o = made.attention(dtype=np.float32)
        exact, _ = three_steps(q, k, v)
        assert np.linalg.norm(o - exact) < 0.03 * np.linalg.norm(exact)
        assert "fwd i8" in made.explain(dtype=np.float32)


def test_quantize_has_the_bits_of_torch() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("ml_dtypes")
    q, k, v = arrays(keys=150)
    mean, shift, signs = (np.random.standard_normal(s).astype(np.float32) for s in ((2, 2, 24), (2, 2, 40), (24,)))
    table, at = np.random.rand(200, 6).astype(np.float32), np.array([0, 30], np.int32)
    at_q, at_k = np.array([0, 9, 19], np.int32), np.array([0, 3, 150], np.int32)
    tables = {"rotary_cos": table, "rotary_sin": table, "rotary_seqlens": at}
    for rows, options in (
        ((q, k, v), {"k_mean": mean, "v_shift": shift, "signs": np.sign(signs), "hadamard": 8, **tables}),
        ((q, k, v), {"q_scale": "head", "k_scale": "tensor", "v_scale": "head", "k_mean": mean}),
        ((q, k, v), {"v_scale": "channel", "v_tiles": True, "v_shift": shift}),
        ((q[0], k[0], v[0]), {"cu_seqlens_q": at_q, "cu_seqlens_k": at_k, "v_scale": "channel", "k_scale": "head"}),
        ((q[0], k[0], v[0]), {"cu_seqlens_q": at_q, "cu_seqlens_k": at_k, "k_mean": mean, "q_scale": "head"}),
    ):
        made = tessera.quantize(*rows, **options)
        there = {name: torch.from_numpy(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
        theirs = tessera.quantize(*map(torch.from_numpy, rows), **there)
        for name, x, y in zip(made._fields, made, theirs, strict=True):
            if not isinstance(x, np.ndarray):
                assert x == y, name
            elif x.dtype.name == "float8_e4m3fn":
                np.testing.assert_array_equal(x.view(np.uint8), y.view(torch.uint8).numpy())
            elif name == "score_shift":  # in any order
                np.testing.assert_allclose(x, y.numpy(), atol=1e-4)
            elif x.dtype == np.float32 and "cu_seqlens_q" in options and x.ndim == 2 and name == "k_scale":
                np.testing.assert_array_equal(x[:, :1], y.numpy()[:, :1])  # the others belong to no sequence
            elif name != "v_scale" or "cu_seqlens_q" not in options:
                np.testing.assert_array_equal(x, y.numpy())


def test_quantize_jax() -> None:
    jax = pytest.importorskip("jax")
    q, k, v = arrays(keys=150)
    there = [jax.device_put(x, jax.devices("cpu")[0]) for x in (q, k, v)]
    made, expected = tessera.quantize(*there, v_tiles=True), tessera.quantize(q, k, v, v_tiles=True)
    assert isinstance(made.q, jax.Array) and made.q.dtype == jax.numpy.float8_e4m3fn
    np.testing.assert_array_equal(np.asarray(made.attention()), expected.attention())
    low = tessera.attention(*there, causal=True, precision="e4m3")
    assert isinstance(low, jax.Array)
    np.testing.assert_array_equal(np.asarray(low), tessera.attention(q, k, v, causal=True, precision="e4m3"))
    with pytest.raises(NotImplementedError, match="quantize under JAX's transformations"):
        jax.jit(lambda q: tessera.quantize(q, k, v).q)(q)
    with pytest.raises(NotImplementedError, match="precision = 'e4m3' under JAX's transformations"):
        jax.jit(lambda q: tessera.attention(q, k, v, precision="e4m3"))(q)


def test_precision() -> None:
    """Needs no types of ml_dtypes. With torch: its bits."""
    q, k, v = arrays(np.float16, keys=150)
    at = np.array([0, 9, 19], np.int32), np.array([0, 3, 150], np.int32)
    for precision, most in (("e4m3", 0.08), ("int8", 0.025)):
        o, lse = tessera.attention(q, k, v, precision=precision, return_lse=True)
        exact, exact_lse = three_steps(q, k, v)
        assert o.dtype == np.float16 and np.linalg.norm(o - exact) < most * np.linalg.norm(exact)
        assert 0 < np.abs(lse - exact_lse).max() < 0.1
        packed = tessera.attention(q[0], k[0], v[0], cu_seqlens_q=at[0], cu_seqlens_k=at[1], precision=precision)
        for (a, b), (c, d) in (((0, 9), (0, 3)), ((9, 19), (3, 150))):
            part = tessera.attention(q[:1, a:b], k[:1, c:d], v[:1, c:d], precision=precision)
            np.testing.assert_array_equal(packed[a:b], part[0])
        if "torch" in sys.modules:
            import torch

            theirs = tessera.attention(*map(torch.from_numpy, (q, k, v)), precision=precision)
            np.testing.assert_array_equal(o, theirs.numpy())
    with pytest.raises(NotImplementedError, match="v.dtype = float32 together with precision = 'int8'"):
        tessera.attention(*arrays(), precision="int8")
    with pytest.raises(NotImplementedError, match="dropout_p = 0.5 together with precision = 'e4m3': must be 0"):
        tessera.attention(q, k, v, dropout_p=0.5, precision="e4m3")


def test_quantize_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = arrays()
    for given, error, text in (
        ({"q_scale": "row"}, ValueError, "q_scale = 'row': must be 'token', 'head', 'tensor', or float32 scales"),
        ({"dtype": np.float16}, ValueError, "dtype = float16: must be float8_e4m3fn or int8"),
        ({"k": k.tolist()}, TypeError, "k is of type 'list', but q is an array"),
        ({"v_scale": None}, ValueError, "v_scale is None, but v.dtype = float32: what stays as it is has 16 bits"),
        ({"k": k.astype(np.float16)}, ValueError, "k.dtype = float16, but q.dtype = float32: they must be the same"),
        ({"hadamard": 16}, ValueError, "hadamard = 16: must be 0, or a power of two up to 256 that divides head_dim"),
    ):
        with pytest.raises(error, match=text):
            tessera.quantize(**{"q": q, "k": k, "v": v, "dtype": np.int8} | given)
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(ValueError, match="float8_e4m3fn, a type of ml_dtypes, which is not installed: int8 needs"):
        tessera.quantize(q, k, v)


# ---- combine


def test_combine() -> None:
    q, k, v = arrays(np.float32, keys=30)
    parts = [tessera.attention(q, k[:, a:b], v[:, a:b], return_lse=True) for a, b in ((0, 4), (4, 29), (29, 30))]
    o_parts, lse_parts = (np.stack(x) for x in zip(*parts, strict=True))
    o, lse = tessera.combine(o_parts, lse_parts)
    exact, exact_lse = three_steps(q, k, v)
    assert isinstance(o, np.ndarray) and o.dtype == np.float32
    np.testing.assert_allclose(o, exact, atol=5e-6)
    np.testing.assert_allclose(lse, exact_lse, atol=5e-6)
    low, _ = tessera.combine(o_parts, lse_parts, dtype=np.float16)
    assert low.dtype == np.float16
    np.testing.assert_array_equal(low, o.astype(np.float16))
    packed, packed_lse = tessera.combine(o_parts[:, 0], lse_parts[:, 0])
    np.testing.assert_array_equal(packed, o[0])
    np.testing.assert_array_equal(packed_lse, lse[0])
    with pytest.raises(TypeError, match="lse_parts is of type 'list', but o_parts is an array"):
        tessera.combine(o_parts, [1.0])  # type: ignore[type-var]
    with pytest.raises(ValueError, match="o.dtype = int32"):
        tessera.combine(o_parts, lse_parts, dtype=np.int32)
