"""What tessera.attention does to a process with JAX: one core, several devices, the end of the interpreter."""

import os
import subprocess
import sys
import textwrap

import pytest

pytest.importorskip("jax")


ONE_CORE = "import os; os.sched_setaffinity(0, list(os.sched_getaffinity(0))[:1])\n"


def run(code: str, before: str = "", **environment: str) -> str:
    """What a process prints that ends well, and within two minutes."""
    process = subprocess.run(
        [sys.executable, "-c", before + textwrap.dedent(code)], capture_output=True, text=True, timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path), **environment},
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    return process.stdout


def test_no_deadlock_on_one_core() -> None:
    """XLA's one thread waits in the call, so the call must wait for nothing that XLA's thread would do: such as to copy
    operands, which jax.pure_callback does. The library's own threads start there, and keep to one core."""
    code = """
        import jax, numpy as np, tessera
        q = jax.numpy.ones((1, 1024, 4, 64))  # 1 MB

        @jax.jit
        def f(q):
            return jax.value_and_grad(lambda q: tessera.attention(q, q, q, window=(0, 0), return_lse=True)[0].sum())(q)

        small = jax.jit(lambda q: tessera.attention(q * 1, q, q))
        for _ in range(200):
            value, gradient = f(q * 1)
            small(gradient[:, :2])
        print(float(value))
    """
    assert float(run(code, ONE_CORE)) == 2**18


def test_exit_while_it_computes() -> None:
    """The interpreter waits for a call that is under way. On one core XLA computes it at once, and proves nothing."""
    code = """
        import jax, tessera
        q = jax.numpy.ones((1, 2048, 4, 64))
        attend = jax.jit(lambda q: tessera.attention(q, q, q))
        x = lambda q: q.reshape(-1, 64)
        f = jax.jit(lambda q: attend(q + 1).sum() + (x(q) @ x(q).T).sum())
        f(q).block_until_ready()
        result = f(q)
    """
    run(code)


def test_several_devices() -> None:
    """Arrays that are spread over devices are refused; under jax.shard_map every device computes its part, and what
    devices share has the sum of their gradients."""
    code = """
        import jax, numpy as np, tessera
        jnp, P = jax.numpy, jax.sharding.PartitionSpec
        mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
        q, k, v = (jax.random.normal(jax.random.key(i), (4, 8, 2, 16)) for i in range(3))
        bias = jax.random.normal(jax.random.key(3), (2, 8, 8))
        spread = jax.device_put(q, jax.sharding.NamedSharding(mesh, P("x")))
        for f in (lambda q: tessera.attention(q, k, v), jax.jit(lambda q: tessera.attention(q, k, v))):
            try:
                f(spread)
            except NotImplementedError as error:
                assert "2 devices: JAX arrays must be on one" in str(error), error
            else:
                raise AssertionError
        f = lambda *x: tessera.attention(*x[:3], bias=x[3])
        each = jax.shard_map(f, mesh=mesh, in_specs=(P("x"), P("x"), P("x"), P()), out_specs=P("x"))
        loss = lambda f: lambda bias: (f(q, k, v, bias) ** 2).sum()
        one, other = (jax.jit(jax.value_and_grad(loss(g)))(bias) for g in (f, each))
        for x, y in zip(one, other):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)
    """
    run(code, XLA_FLAGS="--xla_force_host_platform_device_count=2")


def test_numpy_does_without_jax() -> None:
    code = """
        import sys, numpy as np, tessera
        x = np.ones((1, 2, 1, 4), np.float32)
        tessera.attention(x, x, x)
        assert not any(name.split(".")[0] in ("jax", "jaxlib") or name == "tessera.jax" for name in sys.modules)
    """
    run(code)
