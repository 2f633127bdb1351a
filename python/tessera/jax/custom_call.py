"""The function that XLA calls: it finds its arguments in XLA's memory and runs the library on them.

XLA's foreign function interface is a C interface with a version, which XLA asks for when a function is registered
(xla/ffi/api/c_api.h; jaxlib carries it). Read here through ctypes, so that the compiled module needs nothing of XLA.
`jax.pure_callback` would hand over JAX arrays, made on the very thread pool that the callback holds up: on one core,
reading one of 4 MB waits for ever.
"""

import ctypes
import functools
import json
from collections.abc import Callable, Mapping
from ctypes import c_char, c_char_p, c_int, c_int64, c_size_t, c_uint32, c_void_p
from typing import Any, NamedTuple

import numpy as np

from .. import _native
from ..arguments import Options

TARGET = "tessera_attention"

Arrays = Mapping[str, "np.ndarray | None"]


class Call(NamedTuple):
    """What a call is but for its tensors. Hashable; as text it is all that a compiled program keeps."""

    run: str  # "forward" or "backward"
    operands: tuple[str, ...]
    results: tuple[str, ...]
    options: Options

    def text(self) -> str:
        return json.dumps(self)

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def of(text: bytes) -> "Call":
        run, operands, results, options = json.loads(text)
        return Call(run, tuple(operands), tuple(results), tuple(options))


# ---- the library, called with arrays by name


def seed_and_offset(rng_state: np.ndarray | None) -> tuple[int, int]:
    """Of two integers of any type, or of four words of 32 bits, the lower first."""
    if rng_state is None:
        return 0, 0
    numbers = rng_state.tolist()
    if len(numbers) == 4:
        return numbers[0] | numbers[1] << 32, numbers[2] | numbers[3] << 32
    seed, offset = numbers
    return seed, offset


def _inputs(x: Arrays) -> tuple[Any, ...]:
    """The ten of `_native`."""
    names = ("q", "k", "v", "o", "lse", "bias", "alibi_slopes", "sink", "cu_seqlens_q", "cu_seqlens_k")
    return tuple(_without_last(x, name) if name == "lse" else x.get(name) for name in names)


def _without_last(x: Arrays, name: str) -> np.ndarray | None:
    """lse and its gradient have one dimension of size 1 more here (`tessera.jax.ops`)."""
    array = x.get(name)
    return None if array is None else array.reshape(array.shape[:-1])


def _forward(x: Arrays, options: Options) -> None:
    _native.forward(*_inputs(x), None, *options, *seed_and_offset(x.get("rng_state")), None)


def _backward(x: Arrays, options: Options) -> None:
    _native.backward(
        *_inputs(x), *options, *seed_and_offset(x.get("rng_state")), x["dout"], _without_last(x, "dlse"),
        x["dq"], x["dk"], x["dv"], x.get("dbias"), x.get("dsink"), None,
    )  # fmt: skip


def run(call: Call, x: Arrays) -> None:
    """Writes into the results among x. bfloat16 is uint16, as everywhere on the way to `_native`."""
    (_forward if call.run == "forward" else _backward)(x, call.options)


# ---- XLA's structures, up to the last member that is read

# All of these structures are the same in versions 0.1 to 0.3. XLA says which it takes by refusing others.
_MAJOR, _MINORS = 0, (3, 2, 1)
_METADATA = 1  # type of an extension
_EXECUTE = 3  # stage
_DTYPES = {4: np.int32, 5: np.int64, 8: np.uint32, 9: np.uint64, 10: np.float16, 11: np.float32, 16: np.uint16}
_INVALID_ARGUMENT, _RESOURCE_EXHAUSTED, _UNIMPLEMENTED, _INTERNAL = 3, 8, 12, 13


class _Extension(ctypes.Structure):
    pass


_Extension._fields_ = [("size", c_size_t), ("type", c_int), ("next", ctypes.POINTER(_Extension))]


class _Version(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("extension", c_void_p), ("major", c_int), ("minor", c_int)]


class _Metadata(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("version", _Version), ("traits", c_uint32)]


class _MetadataExtension(ctypes.Structure):
    _fields_ = [("base", _Extension), ("metadata", ctypes.POINTER(_Metadata))]


class _Api(ctypes.Structure):
    _fields_ = [
        ("size", c_size_t), ("extension", c_void_p), ("version", _Version), ("internal", c_void_p),
        ("create_error", c_void_p),
    ]  # fmt: skip


class _Error(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("extension", c_void_p), ("message", c_char_p), ("code", c_int)]


class _Buffer(ctypes.Structure):
    _fields_ = [
        ("size", c_size_t), ("extension", c_void_p), ("dtype", c_int), ("data", c_void_p), ("rank", c_int64),
        ("dims", ctypes.POINTER(c_int64)),
    ]  # fmt: skip


class _Buffers(ctypes.Structure):
    """Arguments or results."""

    _fields_ = [
        ("size", c_size_t), ("extension", c_void_p), ("count", c_int64), ("types", c_void_p),
        ("buffers", ctypes.POINTER(ctypes.POINTER(_Buffer))),
    ]  # fmt: skip


class _Span(ctypes.Structure):
    _fields_ = [("data", c_void_p), ("length", c_size_t)]


class _Attributes(ctypes.Structure):
    """Of this function: one, which is text."""

    _fields_ = [
        ("size", c_size_t), ("extension", c_void_p), ("count", c_int64), ("types", c_void_p), ("names", c_void_p),
        ("spans", ctypes.POINTER(ctypes.POINTER(_Span))),
    ]  # fmt: skip


class _Frame(ctypes.Structure):
    _fields_ = [
        ("size", c_size_t), ("extension", ctypes.POINTER(_Extension)), ("api", ctypes.POINTER(_Api)),
        ("context", c_void_p), ("stage", c_int), ("operands", _Buffers), ("results", _Buffers),
        ("attributes", _Attributes),
    ]  # fmt: skip


# ---- the function

# Names live in the process: libm is part of it. As PyDLL: a call takes less than letting go of the interpreter's lock.
_process = ctypes.PyDLL(None)
_ENVIRONMENT_BYTES = 256  # more than any fenv_t has


def _environment() -> "ctypes.Array[c_char]":
    """How this thread rounds and treats denormal numbers."""
    environment = ctypes.create_string_buffer(_ENVIRONMENT_BYTES)
    _process.fegetenv(environment)
    return environment


# Of the thread that traces. XLA's threads flush denormal numbers to zero, and threads made there would inherit that.
_plain = _environment()


_minor = _MINORS[0]  # what the function says that it is written for


def _array(buffer: _Buffer) -> np.ndarray:
    shape = tuple(buffer.dims[: buffer.rank])
    dtype = np.dtype(_DTYPES[buffer.dtype])
    count = dtype.itemsize
    for n in shape:
        count *= n
    memory: Any = (c_char * count).from_address(buffer.data or 0)
    return np.ndarray(shape, dtype, memory)


def _execute(frame: _Frame) -> None:
    span = frame.attributes.spans[0].contents
    call = Call.of(ctypes.string_at(span.data, span.length))
    operands, results = frame.operands.buffers, frame.results.buffers
    x = {name: _array(operands[i].contents) for i, name in enumerate(call.operands)}
    for i, name in enumerate(call.results):
        x[name] = _array(results[i].contents)
    before = _environment()
    _process.fesetenv(_plain)
    try:
        run(call, x)
    finally:
        _process.fesetenv(before)


def _tell_version(extension: Any) -> bool:
    while extension:
        if extension.contents.type == _METADATA:
            metadata = ctypes.cast(extension, ctypes.POINTER(_MetadataExtension)).contents.metadata.contents
            metadata.version = _Version(ctypes.sizeof(_Version), None, _MAJOR, _minor)
            metadata.traits = 0
            return True
        extension = extension.contents.next
    return False


def _error(api: _Api, error: BaseException) -> Any:
    code = (
        _INVALID_ARGUMENT if isinstance(error, (ValueError, TypeError))
        else _UNIMPLEMENTED if isinstance(error, NotImplementedError)
        else _RESOURCE_EXHAUSTED if isinstance(error, MemoryError)
        else _INTERNAL
    )  # fmt: skip
    message = str(error) or type(error).__name__
    arguments = _Error(ctypes.sizeof(_Error), None, message.encode(), code)
    return _CREATE_ERROR(api.create_error)(ctypes.byref(arguments))


def _handle(address: Any) -> Any:
    """NULL, or XLA's error. On whatever thread XLA likes, with the interpreter's lock."""
    try:
        frame = address.contents
        if not _tell_version(frame.extension) and frame.stage == _EXECUTE:
            _execute(frame)
    except BaseException as error:  # an interrupt, too: nothing may leave through XLA's frames
        return _error(address.contents.api.contents, error)
    return None


_CREATE_ERROR = ctypes.CFUNCTYPE(c_void_p, c_void_p)
_handler = ctypes.CFUNCTYPE(c_void_p, ctypes.POINTER(_Frame))(_handle)
# XLA keeps the address until the process ends, also after this module is taken apart.
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_handler))


def register(register_target: Callable[..., None], capsule: Callable[[Any], Any]) -> None:
    """With jax.ffi's functions of these names."""
    global _minor
    for _minor in _MINORS:
        try:
            return register_target(TARGET, capsule(_handler), platform="cpu")
        except RuntimeError as error:
            refusal = error
    raise NotImplementedError(
        "tessera.attention for values that JAX traces (jit, grad, vmap) needs version 0.1 to 0.3 of XLA's foreign "
        f"function interface, which this jaxlib does not take: {refusal}"
    )
