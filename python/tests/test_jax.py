"""tessera.attention where JAX traces it: jit, gradients, vmap, scan, checkpoint, and what is refused there."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest

import tessera
from tessera import _native

jax = pytest.importorskip("jax")
jnp = jax.numpy

# Of every dense problem, so that the reference is compiled once; packed ones have as many rows and keys in all.
BATCH, ROWS, KEYS, HEADS, HEADS_K, DIM, DIM_V = 2, 7, 9, 4, 2, 16, 24
NAMES = ("q", "k", "v", "bias", "sink")


class Problem(NamedTuple):
    inputs: dict[str, Any]  # q, k, v, and bias and sink if given
    options: dict[str, Any]  # the rest of tessera.attention's arguments
    arrays: dict[str, Any]  # those of the rest that are arrays

    def call(self, inputs: dict[str, Any], arrays: dict[str, Any] | None = None) -> Any:
        """(o, lse) of other arrays."""
        arrays = self.arrays if arrays is None else arrays
        return tessera.attention(**inputs, **self.options, **arrays, return_lse=True)


def normal(*shape: int) -> np.ndarray:
    return np.random.standard_normal(shape).astype(np.float32)


def maybe() -> bool:
    return bool(np.random.randint(2))


def cuts(total: int, pieces: int) -> np.ndarray:
    inner = np.sort(np.random.randint(0, total + 1, pieces - 1))
    return np.concatenate([[0], inner, [total]]).astype(np.int32)


def random_problem(dtype: Any = np.float32, is_packed: bool | None = None) -> Problem:
    """Every feature is there or not."""
    packed = maybe() if is_packed is None else is_packed
    inputs: dict[str, Any] = {
        "q": normal(BATCH, ROWS, HEADS, DIM), "k": normal(BATCH, KEYS, HEADS_K, DIM),
        "v": normal(BATCH, KEYS, HEADS_K, DIM_V),
    }  # fmt: skip
    causal = maybe()
    options: dict[str, Any] = {
        "causal": causal, "window": tuple(np.random.randint(-1, (6, 1 if causal else 6)).tolist()),
        "alignment": ("bottom_right", "top_left")[np.random.randint(2)], "batch_invariant": maybe(),
        "deterministic": maybe(),
    }  # fmt: skip
    arrays: dict[str, Any] = {}
    batch, rows, keys = BATCH, ROWS, KEYS
    if packed:
        inputs = {name: x.reshape(-1, *x.shape[2:]) for name, x in inputs.items()}
        batch = 3
        at_q, at_k = cuts(BATCH * ROWS, batch), cuts(BATCH * KEYS, batch)
        rows, keys = int(np.diff(at_q).max()) + 1, int(np.diff(at_k).max())
        arrays |= {"cu_seqlens_q": at_q, "cu_seqlens_k": at_k}
        options |= {"max_seqlen_q": rows, "max_seqlen_k": keys}
    if maybe():
        options["softmax_scale"] = 0.3
    if maybe():
        options["softcap"] = 2.0
    if maybe():
        arrays["alibi_slopes"] = abs(normal(*((batch, HEADS) if maybe() else (HEADS,))))
    if maybe():
        options["dropout_p"] = 0.25
        arrays["rng_state"] = np.random.randint(0, 2**31, 2, np.int32)
    if maybe():
        shape = [n if maybe() else 1 for n in (batch, HEADS, rows, keys)]
        inputs["bias"] = normal(*shape).astype(dtype if maybe() else np.float32)
    if maybe():
        inputs["sink"] = normal(HEADS)
    return Problem({x: a if x in ("bias", "sink") else a.astype(dtype) for x, a in inputs.items()}, options, arrays)


# ---- the truth: three steps in double, on what a problem means element by element


def spans(p: Problem) -> list[tuple[int, slice, slice, int]]:
    """(place in the reference's batch, rows, keys, number of the sequence)"""
    if "cu_seqlens_q" not in p.arrays:
        return [(b, slice(0, ROWS), slice(0, KEYS), b) for b in range(BATCH)]
    at_q, at_k = p.arrays["cu_seqlens_q"], p.arrays["cu_seqlens_k"]
    return [(0, slice(at_q[b], at_q[b + 1]), slice(at_k[b], at_k[b + 1]), b) for b in range(len(at_q) - 1)]


def elementwise(p: Problem) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What is added to a score but for the bias (-inf: hidden), the index into the bias's elements, and the dropout
    factor; each (batch, heads, rows, keys). Packed: one batch of all rows, of whose scores most are hidden."""
    dense = "cu_seqlens_q" not in p.arrays
    size = (BATCH, HEADS, ROWS, KEYS) if dense else (1, HEADS, BATCH * ROWS, BATCH * KEYS)
    added, factor = np.full(size, -np.inf), np.ones(size)
    element = np.zeros(size, np.int64)
    options = p.options
    left, right = options["window"]
    right = 0 if options["causal"] else right
    longest = (ROWS, KEYS) if dense else (options["max_seqlen_q"], options["max_seqlen_k"])
    sequences = BATCH if dense else 3
    for place, rows, keys, b in spans(p):
        n, m = rows.stop - rows.start, keys.stop - keys.start
        i, j = np.arange(n)[:, None], np.arange(m)[None]
        slopes = np.broadcast_to(p.arrays.get("alibi_slopes", np.zeros(HEADS)), (sequences, HEADS))[b]
        values = -slopes[:, None, None].astype(float) * abs(i + m - n - j)
        at = i + (0 if options["alignment"] == "top_left" else m - n)
        hidden = ((right >= 0) & (j > at + right)) | ((left >= 0) & (j < at - left))
        added[place, :, rows, keys] = np.where(hidden, -np.inf, values)
        if "bias" in p.inputs:
            shape = p.inputs["bias"].shape
            numbers = np.broadcast_to(np.arange(math.prod(shape)).reshape(shape), (sequences, HEADS, *longest))
            element[place, :, rows, keys] = numbers[b, :, :n, :m]
        if "dropout_p" in options and n and m:
            keep = np.empty((sequences, HEADS, *longest), np.uint8)
            _native.dropout_mask(keep, options["dropout_p"], *map(int, p.arrays["rng_state"]))
            factor[place, :, rows, keys] = keep[b, :, :n, :m] / (1 - options["dropout_p"])
    return added, element, factor


def three_steps(inputs: Any, added: Any, element: Any, factor: Any, scale: Any, softcap: Any) -> Any:
    q, k, v, bias, sink = (inputs[name] for name in NAMES)
    k, v = (x.repeat(HEADS // HEADS_K, 2) for x in (k, v))
    s = jnp.einsum("bihd,bjhd->bhij", q, k) * scale
    s = jnp.where(softcap > 0, softcap * jnp.tanh(s / jnp.where(softcap > 0, softcap, 1.0)), s)
    logits = s + bias.reshape(-1)[element] + added
    logits = jnp.concatenate([logits, jnp.broadcast_to(sink[None, :, None, None], (*s.shape[:-1], 1))], -1)
    empty = (logits == -jnp.inf).all(-1, keepdims=True)
    lse = jax.nn.logsumexp(jnp.where(empty, 0.0, logits), -1, keepdims=True)
    w = jnp.where(empty, 0.0, jnp.exp(logits - lse))[..., :-1] * factor
    return jnp.einsum("bhij,bjhd->bihd", w, v), jnp.where(empty, -jnp.inf, lse)[..., 0]


@jax.jit
def exact_gradients(inputs: Any, douts: Any, *constants: Any) -> Any:
    out, pull = jax.vjp(lambda inputs: three_steps(inputs, *constants), inputs)
    return out, pull(douts)[0]


def exact(p: Problem, dout: np.ndarray, dlse: np.ndarray) -> tuple[Any, Any, dict[str, np.ndarray]]:
    """(o, lse, gradients of p.inputs) in double."""

    def wide(x: Any) -> Any:
        return jnp.asarray(np.asarray(x).astype(np.float64))

    packed = "cu_seqlens_q" in p.arrays
    with jax.enable_x64(True):
        inputs = {name: wide(p.inputs[name]) for name in p.inputs}
        inputs |= {name: inputs[name][None] for name in ("q", "k", "v") if packed}
        # One length for all biases.
        flat = np.zeros(3 * HEADS * BATCH * ROWS * BATCH * KEYS)
        flat[: p.inputs["bias"].size if "bias" in p.inputs else 0] = np.ravel(p.inputs.get("bias", ())).astype(float)
        inputs |= {"bias": wide(flat), "sink": inputs.get("sink", wide(np.full(HEADS, -np.inf)))}
        added, element, factor = elementwise(p)
        douts = tuple(wide(x[None] if packed else x) for x in (dout, dlse))
        scale = p.options.get("softmax_scale", DIM**-0.5)
        (o, lse), gradients = exact_gradients(
            inputs, douts, wide(added), jnp.asarray(element), wide(factor), wide(scale),
            wide(p.options.get("softcap", 0.0)),
        )  # fmt: skip
    found = {name: np.asarray(g[0] if packed and name in ("q", "k", "v") else g) for name, g in gradients.items()}
    if "bias" in p.inputs:
        found["bias"] = found["bias"][: p.inputs["bias"].size].reshape(p.inputs["bias"].shape)
    return *(np.asarray(x[0] if packed else x) for x in (o, lse)), {name: found[name] for name in p.inputs}


def cotangents(p: Problem) -> tuple[np.ndarray, np.ndarray]:
    """Of o and of lse."""
    q = p.inputs["q"]
    return normal(*q.shape[:-1], DIM_V).astype(q.dtype), normal(*q.shape[:-3], HEADS, q.shape[-3])


def with_gradients(f: Callable[..., Any], inputs: Any, douts: Any) -> Any:
    """(o, lse), and what f's inputs get of their gradients."""
    out, pull = jax.vjp(f, inputs)
    return out, pull(douts)[0]


def assert_close(name: str, result: Any, truth: np.ndarray, unit: float) -> None:
    """Within that many times the largest element."""
    result = np.asarray(result).astype(np.float64)
    assert result.shape == truth.shape
    if truth.size == 0:
        return
    np.testing.assert_array_equal(np.isinf(result), np.isinf(truth))
    finite = np.isfinite(truth)
    np.testing.assert_allclose(
        result[finite], truth[finite], rtol=0, atol=unit * max(1.0, abs(truth[finite]).max(initial=0)), err_msg=name
    )


def assert_equal(results: Any, others: Any) -> None:
    """Bit for bit."""
    for x, y in zip(jax.tree.leaves(results), jax.tree.leaves(others), strict=True):
        assert isinstance(x, jax.Array) and x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def ordinary(*more: int) -> tuple[Any, Any, Any]:
    """q, k, v with these dimensions in front."""
    shapes = ((BATCH, ROWS, HEADS, DIM), (BATCH, KEYS, HEADS_K, DIM), (BATCH, KEYS, HEADS_K, DIM_V))
    q, k, v = (jnp.asarray(normal(*more, *shape)) for shape in shapes)
    return q, k, v


# ---- values


@pytest.mark.parametrize("dtype", ("float32", "float16", "bfloat16"))
@pytest.mark.parametrize("is_packed", (False, True))
def test_values_and_gradients(dtype: str, is_packed: bool) -> None:
    """jit gives the bits of an eager call, gradients the same bits inside and outside jit, and both are those of three
    steps in double, whatever features a problem has."""
    for _ in range(2):
        p = random_problem(jnp.dtype(dtype), is_packed)
        inputs, douts = {name: jnp.asarray(x) for name, x in p.inputs.items()}, cotangents(p)

        @jax.jit
        def jitted(inputs: Any, arrays: Any, p: Problem = p, douts: Any = douts) -> Any:
            return with_gradients(lambda inputs: p.call(inputs, arrays), inputs, douts)

        out, found = jitted(inputs, p.arrays)
        assert_equal(out, p.call(inputs))
        assert_equal((out, found), with_gradients(p.call, inputs, douts))
        unit = 2e-5 if dtype == "float32" else 12 * float(jnp.finfo(dtype).eps)
        o, lse, truth = exact(p, *douts)
        assert_close("o", out[0], o, unit)
        assert_close("lse", out[1], lse, 2e-5)
        for name, x in inputs.items():
            assert found[name].dtype == x.dtype
            assert_close("d" + name, found[name], truth[name], unit)


def test_only_o_is_differentiated_or_only_lse() -> None:
    """Of two results, the one that is not used adds nothing; gradients of some arguments are those of all."""
    q, k, v = ordinary()
    bias = jnp.asarray(normal(1, HEADS, 1, KEYS))

    def o_alone(q: Any, k: Any, v: Any, bias: Any) -> Any:
        return tessera.attention(q, k, v, bias=bias).sum()

    def of_two(which: int) -> Callable[..., Any]:
        return lambda q, k, v, bias: tessera.attention(q, k, v, bias=bias, return_lse=True)[which].sum()

    every = jax.jit(jax.grad(o_alone, range(4)))(q, k, v, bias)
    assert_equal(jax.jit(jax.grad(of_two(0), range(4)))(q, k, v, bias), every)
    for some in ((0,), (1, 2), (3,)):
        assert_equal(jax.jit(jax.grad(o_alone, some))(q, k, v, bias), [every[i] for i in some])
    assert not np.any(jax.jit(jax.grad(of_two(1), 2))(q, k, v, bias))
    ones = jax.jit(jax.grad(of_two(1), 3))(q, k, v, bias)
    np.testing.assert_allclose(ones.sum((0, 3)), np.full((HEADS, 1), BATCH * ROWS), rtol=1e-5)


def test_no_rows_or_no_keys() -> None:
    """Tensors without elements; XLA may give them no memory."""
    q, k, v = ordinary()

    @jax.jit
    def f(inputs: Any) -> Any:
        out, pull = jax.vjp(lambda inputs: tessera.attention(*inputs, return_lse=True), inputs)
        return out, pull(jax.tree.map(jnp.ones_like, out))[0]

    for inputs in ((q[:, :0], k, v), (q, k[:, :0], v[:, :0]), (q[:0], k[:0], v[:0])):
        (o, lse), found = f(inputs)
        assert o.shape == (*inputs[0].shape[:-1], DIM_V) and [x.shape for x in found] == [x.shape for x in inputs]
        assert not np.any(o) and (np.asarray(lse) == -np.inf).all()
        assert not any(map(np.any, found))


def test_denormal_numbers() -> None:
    """XLA's threads flush them to zero; the library's results do not depend on where it is called."""
    q, k, v = ordinary()
    tiny = jnp.asarray(np.asarray(v) * np.float32(1e-39))
    o = tessera.attention(q, k, tiny)
    assert np.asarray(o).any() and (abs(np.asarray(o)) < np.finfo(np.float32).tiny).all()
    assert_equal(jax.jit(lambda *x: tessera.attention(*x))(q, k, tiny), o)


def test_rng_state() -> None:
    """Integers of 64 bits, known while tracing, and traced ones of 32 give the masks of an eager call."""
    q, k, v = ordinary()
    for state in ((2**63 + 5, -3), (7, 2**40)):
        f = jax.jit(lambda *x, state=state: tessera.attention(*x, dropout_p=0.5, rng_state=state))
        assert_equal(f(q, k, v), tessera.attention(q, k, v, dropout_p=0.5, rng_state=state))
    f = jax.jit(lambda *x: tessera.attention(*x[:3], dropout_p=0.5, rng_state=x[3]))
    seen = []
    for state in (jax.random.key_data(jax.random.key(np.random.randint(2**31))), np.array([-1, 5], np.int32),
                  np.array([2**32 - 1, 5], np.uint32)):  # fmt: skip
        seen.append(np.asarray(f(q, k, v, state)))
        np.testing.assert_array_equal(seen[-1], tessera.attention(q, k, v, dropout_p=0.5, rng_state=state))
    assert (seen[1] != seen[2]).any()


# ---- transformations


def test_scan_and_checkpoint() -> None:
    """Layers in lax.scan, recomputed by jax.checkpoint, have the value and the gradients of layers in a row."""
    q, k, v = ordinary()
    k, v = k[:, :ROWS], v[:, :ROWS, :, :DIM]
    weights = jnp.asarray(normal(3, DIM))

    def layer(x: Any, w: Any) -> Any:
        return x + tessera.attention(x * w, k, v, causal=True, dropout_p=0.25, rng_state=(1, 2))

    def in_a_row(weights: Any, x: Any) -> Any:
        for w in weights:
            x = layer(x, w)
        return (x**2).sum()

    def scanned(weights: Any, x: Any) -> Any:
        step = jax.checkpoint(lambda x, w: (layer(x, w), None))
        return (jax.lax.scan(step, x, weights)[0] ** 2).sum()

    truth = jax.jit(jax.value_and_grad(in_a_row, (0, 1)))(weights, q)
    found = jax.jit(jax.value_and_grad(scanned, (0, 1)))(weights, q)
    for result, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(truth), strict=True):
        np.testing.assert_allclose(result, wanted, rtol=1e-4, atol=1e-4)


def over_examples(f: Callable[..., Any], axes: Sequence[int | None], inputs: Sequence[Any], size: int) -> Any:
    """What jax.vmap means."""
    f = jax.jit(f)
    one_by_one = [
        f(*(x if axis is None else np.take(np.asarray(x), i, axis) for x, axis in zip(inputs, axes, strict=True)))
        for i in range(size)
    ]
    return jax.tree.map(lambda *x: np.stack(x), *one_by_one)


@pytest.mark.parametrize("shape_of_bias", ((1, HEADS, 1, KEYS), (BATCH, 1, ROWS, KEYS), (ROWS, KEYS)))
def test_vmap(shape_of_bias: tuple[int, ...]) -> None:
    """Values and gradients of every example, whichever arguments are mapped, over whichever dimension, and whichever
    are differentiated."""
    size = 3
    shapes = [x.shape for x in ordinary()] + [shape_of_bias, (HEADS,), (HEADS,)]

    def loss(q: Any, k: Any, v: Any, bias: Any, sink: Any, slopes: Any) -> Any:
        o, lse = tessera.attention(
            q, k, v, bias=bias, sink=sink, alibi_slopes=slopes, causal=True, softcap=3.0, return_lse=True
        )
        return (o**2).sum() + jnp.sin(lse).sum(), (o, lse)

    for _ in range(2):
        axes = [np.random.randint(len(shape) + 1) if maybe() else None for shape in shapes]
        axes[np.random.randint(len(axes))] = 0
        inputs = [
            normal(*shape) if axis is None else np.moveaxis(normal(size, *shape), 0, axis)
            for shape, axis in zip(shapes, axes, strict=True)
        ]
        some = tuple(i for i in range(5) if maybe()) or (1,)
        f = jax.value_and_grad(loss, some, has_aux=True)
        results = jax.tree.leaves(jax.jit(jax.vmap(f, axes))(*inputs))
        truth = jax.tree.leaves(over_examples(f, axes, inputs, size))
        for result, wanted in zip(results, truth, strict=True):
            np.testing.assert_allclose(result, wanted, rtol=1e-4, atol=1e-4)


def test_vmap_of_dropout_and_of_packed_sequences() -> None:
    """Every example has the mask of its own state, or the one that it would have alone; packed ones their own cuts."""
    q, k, v = ordinary(3)
    states = np.random.randint(0, 2**31, (3, 2), np.int32)

    def f(q: Any, k: Any, v: Any, state: Any) -> Any:
        return tessera.attention(q, k, v, dropout_p=0.5, rng_state=state)

    for axes, state in (((0, 0, 0, 0), states), ((0, 0, 0, None), states[0]), ((None, 0, 0, None), states[0])):
        inputs = (q if axes[0] == 0 else q[0], k, v, state)
        assert_equal(jax.jit(jax.vmap(f, axes))(*inputs), over_examples(f, axes, inputs, 3))

    q, k, v = (x[:, 0] for x in (q, k, v))
    at = np.stack([cuts(ROWS, 2) for _ in range(3)]), np.stack([cuts(KEYS, 2) for _ in range(3)])

    def packed(q: Any, k: Any, v: Any, at_q: Any, at_k: Any) -> Any:
        return tessera.attention(
            q, k, v, cu_seqlens_q=at_q, cu_seqlens_k=at_k, max_seqlen_q=ROWS, max_seqlen_k=KEYS, causal=True
        )

    axes = (0, None, 0, 0, 0)
    inputs = (q, k[0], v, *at)
    assert_equal(jax.jit(jax.vmap(packed, axes))(*inputs), over_examples(packed, axes, inputs, 3))


@pytest.mark.parametrize("name", ("bias", "sink"))
def test_gradient_of_a_vmap(name: str) -> None:
    """Of what examples share, the sum over them; vmap may be nested."""
    q, k, v = ordinary(2, 3)
    shared = jnp.asarray(normal(*((1, 1, ROWS, KEYS) if name == "bias" else (HEADS,))))

    def loss(k: Any, x: Any) -> Any:
        f = jax.vmap(jax.vmap(lambda q, v: tessera.attention(q, k, v, **{name: x})))
        return (f(q, v) ** 2).sum()

    def folded(k: Any, x: Any) -> Any:
        all_k = jnp.broadcast_to(k, (6, *k.shape)).reshape(-1, *k.shape[1:])
        o = tessera.attention(q.reshape(-1, *q.shape[3:]), all_k, v.reshape(-1, *v.shape[3:]), **{name: x})
        return (o**2).sum()

    found, truth = (jax.jit(jax.grad(f, (0, 1)))(k[0, 0], shared) for f in (loss, folded))
    for result, wanted in zip(found, truth, strict=True):
        np.testing.assert_allclose(result, wanted, rtol=1e-4, atol=1e-4)


def test_calls_side_by_side() -> None:
    """XLA runs what does not depend on each other at the same time."""
    many = ordinary(6)

    def f(q: Any, k: Any, v: Any) -> Any:
        return [tessera.attention(q[i], k[i], v[i]) for i in range(6)]

    assert_equal(jax.jit(f)(*many), f(*many))


def test_explain_while_tracing() -> None:
    q, k, v = ordinary()
    texts = []
    jax.jit(lambda q: texts.append(tessera.explain(q, k, v, causal=True)) or q)(q)
    assert texts == [tessera.explain(q, k, v, causal=True)]


# ---- refusals


X = np.zeros((BATCH, ROWS, HEADS, DIM), np.float32)
PACKED = X.reshape(-1, HEADS, DIM)
AT = np.array([0, 3, BATCH * ROWS], np.int32)
# Arguments instead of the usual ones, what all of them are traced as, and the error. None: of an eager call.
WRONG: list[tuple[dict[str, Any], type[Exception], str | None]] = [
    ({"q": X.astype(np.int32)}, ValueError, None),
    ({"q": X.astype(np.uint16)}, ValueError, None),
    ({"k": X.astype(np.float16)}, ValueError, None),
    ({"k": X[..., :3]}, ValueError, None),
    ({"v": X[0]}, ValueError, None),
    ({"bias": np.zeros((2, 3, 1, 1), np.float32)}, ValueError, None),
    ({"sink": np.zeros(3, np.float32)}, ValueError, None),
    ({"alibi_slopes": np.zeros(HEADS, np.int32)}, ValueError, None),
    ({"max_seqlen_q": 3}, ValueError, None),
    ({"cu_seqlens_k": AT}, ValueError, None),
    ({"window": (-2, 0)}, ValueError, None),
    ({"alignment": "left"}, ValueError, None),
    ({"softcap": "a"}, TypeError, None),
    ({"dropout_p": 1.5, "rng_state": (1, 2)}, ValueError, None),
    ({"dropout_p": 0.5, "rng_state": (1,)}, ValueError, None),
    ({"k": [1.0]}, TypeError, None),
    ({"k": None}, ValueError, None),
    ({"q": PACKED, "k": PACKED, "v": PACKED, "cu_seqlens_q": AT, "max_seqlen_q": 2}, ValueError, None),
    ({"q": PACKED, "k": PACKED, "v": PACKED, "cu_seqlens_q": AT}, ValueError,
     "max_seqlen_q is None, and cu_seqlens_q is traced by JAX: it must be given"),
    ({"dropout_p": 0.5}, ValueError, "rng_state is None, and JAX traces: one state would be drawn for all calls"),
    ({"dropout_p": 0.5, "rng_state": np.zeros(3, np.int32)}, ValueError, "rng_state is int32 of shape (3,): must be"),
    ({"dropout_p": 0.5, "rng_state": np.zeros(2, np.float32)}, ValueError, "rng_state is float32 of shape (2,): must"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "error", "text"), WRONG)
def test_wrong_arguments(arguments: dict[str, Any], error: type[Exception], text: str | None) -> None:
    """While tracing, with the words of an eager call."""
    given = {"q": X, "k": X, "v": X, **arguments}
    if text is None:
        with pytest.raises(error) as eager:
            tessera.attention(**{name: jnp.asarray(x) if isinstance(x, np.ndarray) else x for name, x in given.items()})
        text = str(eager.value)
    traced = {name: x for name, x in given.items() if isinstance(x, np.ndarray)}
    rest = {name: x for name, x in given.items() if name not in traced}
    with pytest.raises(error) as refusal:
        jax.eval_shape(lambda traced: tessera.attention(**traced, **rest), traced)
    assert text in str(refusal.value)


def test_wrong_types_of_jax() -> None:
    with jax.enable_x64(True), pytest.raises(ValueError, match="q.dtype = float64: must be float32, bfloat16"):
        jax.eval_shape(lambda q: tessera.attention(q, X, X), X.astype(np.float64))
    with pytest.raises(ValueError, match="sink.dtype = key<.*>: must be float32"):
        jax.eval_shape(lambda q: tessera.attention(q, X, X, sink=jax.random.key(1)), X)
    for name, value in (("softcap", 1.0), ("causal", True), ("dropout_p", 0.5), ("max_seqlen_q", 3)):
        with pytest.raises(TypeError, match=f"{name} is traced by JAX: must be known while tracing"):
            jax.eval_shape(lambda q, x, name=name: tessera.attention(q, X, X, **{name: x}), X, value)
    with pytest.raises(TypeError, match=r"window\[1\] is traced by JAX"):
        jax.eval_shape(lambda q, x: tessera.attention(q, X, X, window=(0, x)), X, 1)


def test_wrong_values_of_cu_seqlens() -> None:
    """Seen when it runs, and said in the same words."""

    @jax.jit
    def f(x: Any, at: Any) -> Any:
        return tessera.attention(x, x, x, cu_seqlens_q=at, max_seqlen_q=PACKED.shape[0])

    f(PACKED, AT)
    with pytest.raises((ValueError, RuntimeError), match=r"cu_seqlens_q\[2\] = 13: must equal total_q = 14"):
        jax.block_until_ready(f(PACKED, AT - np.array([0, 0, 1], np.int32)))
    assert f(PACKED, AT).shape == PACKED.shape


def test_what_cannot_be_differentiated() -> None:
    q, k, v = ordinary()
    slopes = jnp.ones(HEADS)

    def loss(q: Any, slopes: Any = slopes) -> Any:
        return (tessera.attention(q, k, v, alibi_slopes=slopes) ** 2).sum()

    for transform in (lambda f: f, jax.jit):
        with pytest.raises(NotImplementedError, match="tessera.attention has no second derivatives"):
            transform(jax.grad(lambda q: (jax.grad(loss)(q) ** 2).sum()))(q)
        with pytest.raises(NotImplementedError, match="alibi_slopes is differentiated"):
            transform(jax.grad(loss, 1))(q, slopes)
        with pytest.raises(TypeError, match="forward-mode"):
            transform(lambda q: jax.jvp(loss, (q,), (q,)))(q)
    # Only the gradient's value is used: no second derivative.
    ours = jax.grad(lambda q: (jax.lax.stop_gradient(jax.grad(loss)(q)) * q).sum())(q)
    assert_equal(ours, jax.grad(loss)(q))
    stopped = jax.grad(lambda s: loss(q, jax.lax.stop_gradient(s)) + s.sum())(slopes)
    np.testing.assert_array_equal(stopped, np.ones(HEADS))


def test_other_platforms() -> None:
    lowered = jax.jit(lambda *x: tessera.attention(*x)).trace(*ordinary())
    with pytest.raises(NotImplementedError, match="tessera.attention is compiled for 'cuda': JAX arrays must be on"):
        lowered.lower(lowering_platforms=("cuda",))


def test_qv() -> None:
    """Latent attention takes arrays whose values are there."""
    q, qv = (jnp.asarray(normal(2, 3, 4, d)) for d in (DIM, DIM_V))
    k, v = (jnp.asarray(normal(2, 9, 1, d)) for d in (DIM, DIM_V))
    o = tessera.attention(q, k, v, qv=qv, causal=True)
    wide = tessera.attention(jnp.concatenate((q, qv), -1), jnp.concatenate((k, v), -1), v, causal=True)
    assert isinstance(o, jax.Array) and np.allclose(o, wide, atol=1e-5)
    with pytest.raises(NotImplementedError, match="qv under JAX's transformations"):
        jax.jit(lambda qv: tessera.attention(q, k, v, qv=qv))(qv)
    with pytest.raises(ValueError, match="qv has shape"):
        tessera.attention(q, k, v, qv=q)
