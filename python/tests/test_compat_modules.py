"""tessera.compat.install, and the parts of flash_attn beside attention: bert_padding and rotary embeddings."""

import importlib
import importlib.metadata
import importlib.util
import pathlib
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

import tessera.compat
from tessera.compat.flash_attn import bert_padding
from tessera.compat.flash_attn.layers import rotary

# ---- install

NAMES = [
    "flash_attn",
    "flash_attn.bert_padding",
    "flash_attn.flash_attn_interface",
    "flash_attn.layers.rotary",
    "flash_attn.ops.triton.rotary",
    "flash_attn_2_cuda",
    "flash_attn_3",
    "flash_attn_3.flash_attn_interface",
    "flash_attn_interface",
    "flash_mla",
    "flash_mla.flash_mla_interface",
    "xformers",
    "xformers.ops",
    "xformers.ops.fmha",
    "xformers.ops.fmha.attn_bias",
    "xformers.ops.fmha.common",
    "xformers.ops.fmha.cutlass",
    "xformers.ops.fmha.flash",
    "xformers.version",
]


@pytest.fixture(autouse=True)
def not_installed() -> None:
    """Whatever is in the environment, these tests start from nothing."""
    if any(importlib.util.find_spec(name) for name in ("flash_attn", "flash_attn_interface", "flash_mla", "xformers")):
        pytest.skip("what is stood in for is installed here")


def test_modules_are_ours_under_another_name() -> None:
    with tessera.compat.install():
        for name in NAMES:
            assert importlib.util.find_spec(name) is not None
            module = importlib.import_module(name)
            assert module.__name__.startswith("tessera.compat."), name
            assert module is sys.modules[module.__name__], "a second copy would define operators twice"
            assert module.__spec__ is not None and module.__spec__.name == module.__name__
        from flash_attn import flash_attn_func  # type: ignore[import-not-found]

        assert flash_attn_func is tessera.compat.flash_attn.flash_attn_func
        from xformers.ops import (  # type: ignore[import-not-found]
            AttentionBias,
            LowerTriangularMask,
            fmha,
            memory_efficient_attention,
            memory_efficient_attention_backward,
            memory_efficient_attention_forward,
            memory_efficient_attention_forward_requires_grad,
        )

        ours = tessera.compat.xformers.ops
        assert memory_efficient_attention is ours.memory_efficient_attention is fmha.memory_efficient_attention
        assert (
            issubclass(LowerTriangularMask, AttentionBias) and fmha.attn_bias.LowerTriangularMask is LowerTriangularMask
        )
        assert memory_efficient_attention_forward is fmha.memory_efficient_attention_forward
        assert memory_efficient_attention_backward is fmha.memory_efficient_attention_backward
        assert memory_efficient_attention_forward_requires_grad is ours.memory_efficient_attention_forward_requires_grad
        fa3 = importlib.import_module("flash_attn_interface")
        assert importlib.import_module("flash_attn_3.flash_attn_interface") is fa3
    for name in NAMES:
        assert name not in sys.modules
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("flash_attn")
    q = torch.zeros(1, 1, 1, 8)
    assert flash_attn_func(q, q, q).shape == q.shape, "what was imported goes on working"


def test_versions() -> None:
    """What transformers and others look at."""
    with tessera.compat.install():
        import flash_attn

        for name in ("flash_attn", "flash-attn", "Flash.Attn"):
            assert importlib.metadata.version(name) == flash_attn.__version__ == "2.8.3"
        assert importlib.metadata.version("flash-attn-3") == "3.0.0"
        assert importlib.metadata.version("flash_mla") == importlib.import_module("flash_mla").__version__ == "1.0.0"
        import xformers

        assert importlib.metadata.version("xformers") == xformers.__version__ == "0.0.35"
        assert importlib.import_module("xformers.version").__version__ == "0.0.35"
        packages = importlib.metadata.packages_distributions()
        assert packages["xformers"] == ["xformers"]
        assert packages["flash_attn"] == ["flash-attn"] and packages["flash_attn_interface"] == ["flash-attn-3"]
        assert importlib.metadata.version("torch"), "other distributions are still found"
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("flash_attn")


def test_inner_installation_leaves_the_outer_one() -> None:
    with tessera.compat.install():
        with tessera.compat.install():
            pass
        assert importlib.util.find_spec("flash_attn") is not None
    assert importlib.util.find_spec("flash_attn") is None
    tessera.compat.uninstall()
    tessera.compat.install()
    tessera.compat.install()
    tessera.compat.uninstall()
    assert importlib.util.find_spec("flash_attn") is None


def test_real_package(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused unless forced, whether it is only installed or imported already; there again afterwards."""
    package = tmp_path / "flash_attn"
    package.mkdir()
    (package / "__init__.py").write_text("__version__ = 'real'\n")
    (package / "bert_padding.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        with pytest.raises(RuntimeError, match="the real flash_attn is installed"):
            tessera.compat.install()
        real = importlib.import_module("flash_attn")
        importlib.import_module("flash_attn.bert_padding")
        with pytest.raises(RuntimeError, match="the real flash_attn is imported"):
            tessera.compat.install()
        with tessera.compat.install(force=True):
            assert importlib.import_module("flash_attn").__version__ == "2.8.3"
            assert importlib.import_module("flash_attn.bert_padding") is bert_padding
        assert importlib.import_module("flash_attn") is real
        assert importlib.import_module("flash_attn.bert_padding") is not bert_padding
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "flash_attn"]:
            del sys.modules[name]


def write_real(folder: pathlib.Path, name: str) -> None:
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text("__version__ = 'real'\n")


def forget(name: str) -> None:
    for module in [module for module in sys.modules if module.split(".")[0] == name]:
        del sys.modules[module]


def test_one_package_at_a_time() -> None:
    """Each package is installed and uninstalled on its own, whatever the other is."""
    with tessera.compat.install(["flash_attn"]) as first:
        assert first.packages == ("flash_attn",)
        assert importlib.util.find_spec("xformers") is None
        with pytest.raises(importlib.metadata.PackageNotFoundError):
            importlib.metadata.version("xformers")
        with tessera.compat.install() as second:
            assert second.packages == ("flash_mla", "xformers")
            assert importlib.metadata.version("xformers") == "0.0.35"
            importlib.import_module("xformers.ops")
        assert "xformers" not in sys.modules and importlib.util.find_spec("xformers") is None
        importlib.import_module("flash_attn")
    assert importlib.util.find_spec("flash_attn") is None
    tessera.compat.install("xformers")
    tessera.compat.install(("flash_attn",))
    tessera.compat.uninstall(["flash_attn"])
    assert importlib.util.find_spec("flash_attn") is None and importlib.util.find_spec("xformers") is not None
    tessera.compat.uninstall()
    assert importlib.util.find_spec("xformers") is None
    with pytest.raises(ValueError, match="packages holds 'torch': must be of 'flash_attn', 'flash_mla', 'xformers'"):
        tessera.compat.install(["xformers", "torch"])
    assert importlib.util.find_spec("xformers") is None


@pytest.mark.parametrize(("name", "version"), (("flash_mla", "1.0.0"), ("xformers", "0.0.35")))
def test_what_is_left_alone(name: str, version: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With or without force, unless it is named; the others are installed all the same."""
    write_real(tmp_path, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        for force in (False, True):
            with tessera.compat.install(force=force) as installation:
                assert "flash_attn" in installation.packages and name not in installation.packages
                assert importlib.import_module(name).__version__ == "real"
                assert importlib.metadata.version("flash_attn") == "2.8.3"
        real = importlib.import_module(name)
        with pytest.raises(RuntimeError, match=f"the real {name} is imported"):
            tessera.compat.install(["flash_attn", name])
        assert importlib.util.find_spec("flash_attn") is None, "all or nothing"
        with tessera.compat.install([name], force=True):
            assert importlib.import_module(name).__version__ == version
        assert importlib.import_module(name) is real
    finally:
        forget(name)


# A module that upstream has and Tessera has not -> what its refusal says there is instead.
MISSING = {
    "flash_attn.modules.mha": "flash_attn_varlen_func",
    "flash_attn.modules": "flash_attn_func",
    "flash_attn.modules.mlp": "torch has what it does",
    "flash_attn.losses": "torch.nn.functional.cross_entropy",
    "flash_attn.losses.cross_entropy": "torch.nn.functional.cross_entropy",
    "flash_attn.models.gpt": 'attn_implementation="tessera"',
    "flash_attn.ops.rms_norm": "rms_norm",
    "flash_attn.ops.fused_dense": "torch.nn.Linear",
    "flash_attn.ops.triton.cross_entropy": "torch.nn.functional.cross_entropy",
    "flash_attn.layers.patch_embed": "torch.nn.Conv2d",
    "flash_attn.utils.benchmark": "torch has what it does",
    "flash_attn.cute": "stand-ins for FlashAttention-2 and -3",
    "flash_attn.nobody_knows": "has no flash_attn.nobody_knows$",
    "xformers.components.attention": "xformers.ops.memory_efficient_attention",
    "xformers.ops.swiglu_op": "has no xformers.ops.swiglu_op$",
}


@pytest.mark.parametrize("name", MISSING)
def test_missing_modules_say_what_there_is(name: str) -> None:
    """In the text of an error that is caught as any missing module's."""
    with tessera.compat.install():
        with pytest.raises(
            tessera.compat.MissingModuleError, match=f"^Tessera stands in for .*{MISSING[name]}"
        ) as error:
            importlib.import_module(name)
        assert isinstance(error.value, ModuleNotFoundError)
        assert (
            error.value.name is not None and name.startswith(error.value.name) and error.value.name in str(error.value)
        )
        with pytest.raises(ImportError, match="^Tessera stands in for"):
            exec(f"import {name}")


@pytest.mark.parametrize("statement", ["from flash_attn import losses", "from flash_attn.ops import rms_norm"])
def test_missing_modules_of_a_package(statement: str) -> None:
    """The same of the other form of import, which asks for them under the package's own name."""
    with tessera.compat.install(), pytest.raises(tessera.compat.MissingModuleError, match="^Tessera stands in for"):
        exec(statement)


def test_missing_modules_are_missing() -> None:
    """find_spec has no answer for them. Names that are no modules, and other people's modules, fail as ever."""
    with tessera.compat.install():
        for name in ("flash_attn.modules", "flash_attn.cute", "flash_attn.nobody_knows", "xformers.components"):
            assert importlib.util.find_spec(name) is None
        try:
            import flash_attn.losses  # type: ignore[import-not-found]  # noqa: F401

            found = True
        except ImportError:
            found = False
        assert not found
        with pytest.raises(ImportError, match="cannot import name 'flash_attn_unpadded_func'"):
            from flash_attn import flash_attn_unpadded_func  # noqa: F401
        with pytest.raises(ModuleNotFoundError, match="is not a package"):
            importlib.import_module("flash_attn_interface.nothing")
        with pytest.raises(ModuleNotFoundError, match="No module named 'nowhere_at_all'"):
            importlib.import_module("nowhere_at_all")
    with pytest.raises(ModuleNotFoundError, match="^No module named 'flash_attn'"):
        importlib.import_module("flash_attn.losses")


def test_install_imports_little() -> None:
    code = "import sys, tessera.compat; tessera.compat.install(); import importlib.util as u; "
    code += "assert u.find_spec('flash_attn') and u.find_spec('xformers.ops'); "
    code += "assert 'torch' not in sys.modules and 'tessera.torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- bert_padding


@pytest.mark.parametrize("kind", [torch.bool, torch.int64])
def test_unpad_and_pad(kind: torch.dtype, device: str) -> None:
    batch, seqlen = 5, 12
    mask = (torch.rand(batch, seqlen, device=device) < 0.5).to(kind)
    mask[2] = 0
    mask[0, 3] = 1
    hidden = torch.randn(batch, seqlen, 3, 4, device=device, requires_grad=True)
    tokens, indices, cu_seqlens, longest, used = bert_padding.unpad_input(hidden, mask)
    chosen = mask.bool()
    assert torch.equal(tokens, hidden[chosen])
    assert torch.equal(used, chosen.sum(1)) and used.dtype == torch.int32
    assert torch.equal(cu_seqlens.diff(), used) and cu_seqlens.dtype == torch.int32 and cu_seqlens[0] == 0
    assert longest == used.max() and isinstance(longest, int)
    padded = bert_padding.pad_input(tokens, indices, batch, seqlen)
    assert torch.equal(padded, hidden * chosen[..., None, None])
    (gradient,) = torch.autograd.grad(padded, hidden, torch.ones_like(padded))
    assert torch.equal(gradient, chosen[..., None, None].expand_as(hidden).to(hidden.dtype))


def test_unpad_with_unused_tokens(device: str) -> None:
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0]], device=device)
    unused = torch.tensor([[0, 0, 1, 1], [0, 0, 0, 0]], device=device)
    hidden = torch.arange(8, device=device).view(2, 4, 1)
    tokens, indices, cu_seqlens, longest, used = bert_padding.unpad_input(hidden, mask, unused)
    assert tokens.flatten().tolist() == indices.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert cu_seqlens.tolist() == [0, 4, 7] and longest == 4 and used.tolist() == [2, 3]


def test_unpad_concatenated(device: str) -> None:
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [3, 2, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]], device=device)
    hidden = torch.arange(18, device=device).view(3, 6, 1)
    tokens, indices, cu_seqlens, longest = bert_padding.unpad_input_for_concatenated_sequences(hidden, lengths)
    expected = [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, *range(12, 18)]
    assert tokens.flatten().tolist() == indices.tolist() == expected
    assert cu_seqlens.tolist() == [0, 2, 5, 8, 10, 16] and cu_seqlens.dtype == torch.int32 and longest == 6


def test_index_functions(device: str) -> None:
    x = torch.randn(6, 2, 3, device=device, dtype=torch.double, requires_grad=True)
    indices = torch.tensor([4, 0, 5], device=device)
    assert torch.autograd.gradcheck(lambda x: bert_padding.index_first_axis(x, indices), x)
    assert torch.autograd.gradcheck(lambda x: bert_padding.index_put_first_axis(x[:3], indices, 9), x)
    picked, residual = bert_padding.index_first_axis_residual(x, indices)
    (gradient,) = torch.autograd.grad(picked.sum() + residual.sum(), x)
    assert gradient[:, 0, 0].tolist() == [2, 1, 1, 1, 2, 2]


# ---- rotary embeddings


def rotated(x: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """x (tokens, heads, head_dim) times exp(i angle), in double; angles (tokens, rotary_dim / 2)."""
    pairs = angles.shape[-1]
    x = x.double()
    rotary, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
    shape = (*x.shape[:-1], pairs, 2) if interleaved else (*x.shape[:-1], 2, pairs)
    real, imaginary = rotary.view(shape).unbind(-1 if interleaved else -2)
    turned = torch.complex(real, imaginary) * torch.polar(torch.ones_like(angles), angles)[:, None]
    together = torch.stack((turned.real, turned.imag), -1 if interleaved else -2)
    return torch.cat((together.reshape(rotary.shape), rest), -1)


BATCH, SEQLEN, HEADS, HEAD_DIM, POSITIONS = 3, 7, 2, 12, 20


def table(pairs: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    angles = 7 * torch.rand(POSITIONS, pairs, device=device, dtype=torch.double)
    return angles, angles.cos().float(), angles.sin().float()


def tolerance(dtype: torch.dtype) -> float:
    return 8 * torch.finfo(dtype).eps


def check_gradient(out: Tensor, x: Tensor, expected: Tensor, source: Tensor) -> None:
    dout = torch.randn_like(out)
    (mine,) = torch.autograd.grad(out, x, dout)
    (right,) = torch.autograd.grad(expected, source, dout.double())
    assert (mine - right).abs().max() < tolerance(x.dtype)


@pytest.mark.parametrize("offset", ["none", "int", "tensor"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("pairs", [6, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotary(offset: str, interleaved: bool, inplace: bool, pairs: int, dtype: torch.dtype, device: str) -> None:
    angles, cos, sin = table(pairs, device)
    first = {"none": [0] * BATCH, "int": [5] * BATCH, "tensor": [2, 13, 0]}[offset]
    offsets: Any = {"none": 0, "int": 5, "tensor": torch.tensor(first, dtype=torch.int32, device=device)}[offset]
    x = torch.randn(BATCH, SEQLEN, HEADS, HEAD_DIM, device=device, dtype=dtype, requires_grad=True)
    source = x.detach().double().requires_grad_()
    expected = torch.stack(
        [rotated(source[b], angles[first[b] : first[b] + SEQLEN], interleaved) for b in range(BATCH)]
    )
    out = rotary.apply_rotary_emb(x, cos, sin, interleaved, inplace, offsets)
    assert out.dtype == dtype and (out - expected).abs().max() < tolerance(dtype)
    assert (out.data_ptr() == x.data_ptr()) == inplace
    check_gradient(out, x, expected, source)


@pytest.mark.parametrize("with_offsets", [False, True])
@pytest.mark.parametrize("inplace", [False, True])
def test_rotary_packed(with_offsets: bool, inplace: bool, device: str) -> None:
    angles, cos, sin = table(5, device)
    lengths = [4, 0, 9, 1]
    first = [3, 1, 8, 19] if with_offsets else [0] * 4
    cu_seqlens = torch.tensor([0, 4, 4, 13, 14], dtype=torch.int32, device=device)
    x = torch.randn(14, HEADS, HEAD_DIM, device=device, requires_grad=True)
    source = x.detach().double().requires_grad_()
    positions = torch.cat([torch.arange(a, a + n) for a, n in zip(first, lengths, strict=True)]).to(device)
    expected = rotated(source, angles[positions], False)
    offsets = torch.tensor(first, device=device) if with_offsets else 0
    out = rotary.apply_rotary_emb(x, cos, sin, False, inplace, offsets, cu_seqlens, max(lengths))
    assert (out - expected).abs().max() < tolerance(x.dtype)
    check_gradient(out, x, expected, source)


def test_rotary_beyond_the_table(device: str) -> None:
    """As upstream: a token at a position that the table does not have is not rotated."""
    _, cos, sin = table(6, device)
    x = torch.randn(1, SEQLEN, HEADS, HEAD_DIM, device=device)
    out = rotary.apply_rotary_emb(x, cos, sin, seqlen_offsets=torch.tensor([POSITIONS - 2], device=device))
    assert torch.equal(out[:, 2:], x[:, 2:]) and not torch.equal(out[:, :2], x[:, :2])
    with pytest.raises(ValueError, match="cos has 20 rows"):
        rotary.apply_rotary_emb(x, cos, sin, seqlen_offsets=POSITIONS - 2)
    with pytest.raises(ValueError, match="cos has 6 columns"):
        rotary.apply_rotary_emb(x[..., :10], cos, sin)
    with pytest.raises(ValueError, match="sin has the shape"):
        rotary.apply_rotary_emb(x, cos, sin[:-1])


@pytest.mark.parametrize("form", ["qkv", "heads", "kv"])
@pytest.mark.parametrize("own_keys", [False, True])
def test_rotary_of_packed_operands(form: str, own_keys: bool, device: str) -> None:
    """Queries and keys turn in place, values stay, and so do the gradients."""
    (angles, cos, sin), (angles_k, cos_k, sin_k) = table(4, device), table(4, device)
    if not own_keys:
        angles_k, cos_k, sin_k = angles, cos, sin
    shape = {"qkv": (3, HEADS), "heads": (4 + 2 * HEADS,), "kv": (2, HEADS)}[form]
    x = torch.randn(BATCH, SEQLEN, *shape, HEAD_DIM, device=device)
    source = x.double().requires_grad_()
    parts = list(source.split((4, HEADS, HEADS), dim=2) if form == "heads" else source.unbind(2))
    turns = [angles_k] if form == "kv" else [angles, angles_k]
    for i, turn in enumerate(turns):
        parts[i] = torch.stack([rotated(row, turn[3 : 3 + SEQLEN], True) for row in parts[i]])
    expected = torch.cat(parts, 2) if form == "heads" else torch.stack(parts, 2)

    x.requires_grad_()
    if form == "kv":
        out = rotary.apply_rotary_emb_kv_(x, cos_k, sin_k, True, 3)
    else:
        own = (cos_k, sin_k) if own_keys else (None, None)
        offsets = torch.full((BATCH,), 3, device=device)
        out = rotary.apply_rotary_emb_qkv_(x, cos, sin, *own, True, offsets, 4 if form == "heads" else None)
    assert out.data_ptr() == x.data_ptr()
    assert (out - expected).abs().max() < tolerance(x.dtype)
    check_gradient(out, x, expected, source)


def test_rotary_head_counts(device: str) -> None:
    _, cos, sin = table(4, device)
    x = torch.randn(1, SEQLEN, 7, HEAD_DIM, device=device)
    for num_heads_q in (None, 2, 9):
        with pytest.raises(ValueError, match=f"num_heads_q is {num_heads_q}"):
            rotary.apply_rotary_emb_qkv_(x, cos, sin, num_heads_q=num_heads_q)


@pytest.mark.parametrize("interleaved", [False, True])
def test_textbook_rotary(interleaved: bool, device: str) -> None:
    angles, cos, sin = table(4, device)
    x = torch.randn(BATCH, SEQLEN, HEADS, HEAD_DIM, device=device)
    out = rotary.apply_rotary_emb_torch(x, cos[:SEQLEN], sin[:SEQLEN], interleaved)
    expected = torch.stack([rotated(row, angles[:SEQLEN], interleaved) for row in x])
    assert (out - expected).abs().max() < tolerance(x.dtype)
    batched = rotary.apply_rotary_emb_torch(x, *(t[:SEQLEN].expand(BATCH, -1, -1) for t in (cos, sin)), interleaved)
    assert torch.equal(batched, out)


def test_rotary_embedding(device: str) -> None:
    """Scores depend on the distance only; the table grows; half precision keeps its angles."""
    embedding = rotary.RotaryEmbedding(8, device=device)
    q, k = torch.randn(2, 1, 1, 1, 8, device=device)

    def score(at_q: int, at_k: int) -> float:
        turned, kv = embedding(q.clone(), torch.stack((k, k), 2), at_q)
        assert torch.equal(kv[:, :, 1], k)
        kv = embedding(q.clone(), torch.stack((k, k), 2), at_k)[1]
        return float((turned * kv[:, :, 0]).sum())

    assert abs(score(3, 1) - score(702, 700)) < 1e-3
    assert abs(score(3, 1) - score(7, 1)) > 1e-3

    qkv = torch.randn(2, 300, 3, 2, 8, device=device)
    expected = embedding(qkv.clone())
    half = rotary.RotaryEmbedding(8, device=device).bfloat16()
    assert (half(qkv.bfloat16()) - expected).abs().max() < 0.05
    offsets = torch.tensor([0, 0], device=device)
    assert torch.equal(embedding(qkv.clone(), seqlen_offset=offsets, max_seqlen=300), expected)
    with pytest.raises(ValueError, match="max_seqlen is None"):
        rotary.RotaryEmbedding(8, device=device)(qkv, seqlen_offset=offsets)


def test_rotary_embedding_with_xpos(device: str) -> None:
    """From position to position queries change by the factor that keys change by the other way round."""
    embedding = rotary.RotaryEmbedding(8, scale_base=16, device=device)
    qkv = torch.ones(1, 20, 3, 1, 8, device=device)
    out = embedding(qkv.clone())
    q, k, v = out[0, :, :, 0].unflatten(-1, (2, 4)).norm(dim=-2).unbind(1)  # lengths of the pairs
    factors = ((torch.arange(0, 8, 2, device=device) + 3.2) / 11.2) ** (1 / 16)
    torch.testing.assert_close(q[1:] / q[:-1], factors.expand(19, 4))
    torch.testing.assert_close(q * k, v * v)
    assert torch.equal(out[:, :, 2], qkv[:, :, 2])
