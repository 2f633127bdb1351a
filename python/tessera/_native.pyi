"""The compiled half (python/native/module.cpp): every argument is given by position.

A tensor is anything with DLPack; None where it is optional. `stream` is a CUDA stream's handle and `allocate(bytes)`
returns a tensor of that many bytes on the GPU of q; both are ignored on a CPU. `rng_seed` and `rng_offset` are taken
modulo 2^64. Failures raise ValueError (an argument makes no sense), NotImplementedError (no kernel does it) or
RuntimeError (the machine refused), and name the argument.
"""

from collections.abc import Callable
from typing import Any

def forward(
    q: Any, k: Any, v: Any, o: Any, lse: Any, bias: Any, alibi_slopes: Any, sink: Any,
    cu_seqlens_q: Any, cu_seqlens_k: Any,
    max_seqlen_q: int, max_seqlen_k: int, softmax_scale: float | None, softcap: float,
    window_left: int, window_right: int, top_left: bool, dropout_p: float, rng_seed: int, rng_offset: int,
    deterministic: bool, batch_invariant: bool,
    stream: int, allocate: Callable[[int], Any] | None, /,
) -> None: ...
def backward(
    q: Any, k: Any, v: Any, o: Any, lse: Any, bias: Any, alibi_slopes: Any, sink: Any,
    cu_seqlens_q: Any, cu_seqlens_k: Any,
    max_seqlen_q: int, max_seqlen_k: int, softmax_scale: float | None, softcap: float,
    window_left: int, window_right: int, top_left: bool, dropout_p: float, rng_seed: int, rng_offset: int,
    deterministic: bool, batch_invariant: bool,
    dout: Any, dlse: Any, dq: Any, dk: Any, dv: Any, dbias: Any, dsink: Any,
    stream: int, allocate: Callable[[int], Any] | None, /,
) -> None: ...
def explain(
    q: Any, k: Any, v: Any, o: Any, lse: Any, bias: Any, alibi_slopes: Any, sink: Any,
    cu_seqlens_q: Any, cu_seqlens_k: Any,
    max_seqlen_q: int, max_seqlen_k: int, softmax_scale: float | None, softcap: float,
    window_left: int, window_right: int, top_left: bool, dropout_p: float, rng_seed: int, rng_offset: int,
    deterministic: bool, batch_invariant: bool,
    backward: bool, device: str | None, /,
) -> str: ...
def set_num_threads(num_threads: int, /) -> None: ...
def get_num_threads() -> int: ...
def after_fork() -> None: ...
def version() -> str: ...
def gpu(ordinal: int, /) -> tuple[str | None, str]: ...
