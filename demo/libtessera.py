"""libtessera from Python through its C ABI (include/tessera/tessera.h), with ctypes and nothing else.

Kept beside the package of python/ because bench/ times the library itself, by plans, kernels' names, workspaces and
peaks, which the package keeps to itself; and because demo/ needs nothing built but libtessera.so.

Problems are given in their one-line form ("fwd f32 b=1 h=8 q=1024 k=1024 d=64 causal"); tensors as
NumPy arrays, or as anything that has torch's data_ptr() and stride(). The structures below mirror the
header field by field.
"""

import ctypes
import os
import pathlib

import numpy as np

_int32, _int64, _float, _pointer = ctypes.c_int32, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p


class _Problem(ctypes.Structure):
    _fields_ = (
        [("size", ctypes.c_size_t), ("pass_", _int32), ("dtype", _int32)]
        + [(name, _int64) for name in ("batch", "num_heads", "num_heads_k", "seqlen_q", "seqlen_k",
                                       "head_dim", "head_dim_v")]
        + [("packed", _int32), ("alignment", _int32), ("total_q", _int64), ("total_k", _int64),
           ("softmax_scale", _float), ("softcap", _float),
           ("window_left", _int64), ("window_right", _int64), ("alibi", _int32),
           ("has_bias", _int32), ("bias_dims", ctypes.c_uint32), ("bias_dtype", _int32),
           ("sink", _int32), ("dropout_p", _float), ("deterministic", _int32),
           ("batch_invariant", _int32), ("unaligned", _int32), ("dtype_o", _int32),
           ("cache", _int32), ("page_ids", _int32)]
        + [(name, _int64) for name in ("seqlen_new", "page_size", "num_pages", "cache_rows", "chunk", "sink_tokens")]
        + [(name, _int32) for name in ("leftpad", "tree", "dtype_v", "scale_q", "scale_k", "scale_v")]
        + [("scale_block_k", _int64), ("scale_block_v", _int64), ("score_shift", _int32), ("v_shift", _int32),
           ("v_tiles", _int32), ("dtype_kv", _int32), ("qv", _int64), ("skip_pages", _int64),
           ("prefix_levels", _int64)]
    )


class _Tensor(ctypes.Structure):
    _fields_ = [("data", _pointer), ("stride_batch", _int64), ("stride_seqlen", _int64),
                ("stride_head", _int64)]


class _Bias(ctypes.Structure):
    _fields_ = [("data", _pointer), ("stride_batch", _int64), ("stride_head", _int64),
                ("stride_query", _int64), ("stride_key", _int64)]


class _Scales(ctypes.Structure):
    _fields_ = [("data", _pointer), ("stride_batch", _int64), ("stride_head", _int64), ("stride_seqlen", _int64)]


class _Cache(ctypes.Structure):
    _fields_ = [("seqlens", _pointer), ("cu_seqlens_new", _pointer), ("page_table", _pointer),
                ("stride_page_table", _int64), ("index", _pointer), ("leftpad", _pointer)]


class _Tensors(ctypes.Structure):
    _fields_ = (
        [("size", ctypes.c_size_t)]
        + [(name, _Tensor) for name in ("q", "k", "v", "o")]
        + [("softmax_lse", _pointer), ("bias", _Bias)]
        + [(name, _pointer) for name in ("alibi_slopes", "sink", "cu_seqlens_q", "cu_seqlens_k")]
        + [("philox_seed", ctypes.c_uint64), ("philox_offset", ctypes.c_uint64),
           ("dout", _Tensor), ("dsoftmax_lse", _pointer)]
        + [(name, _Tensor) for name in ("dq", "dk", "dv")]
        + [("dbias", _Bias), ("dsink", _pointer), ("cache", _Cache), ("tree_mask", _pointer)]
        + [(name, _Scales) for name in ("q_scale", "k_scale", "v_scale", "score_shift", "v_shift")]
        + [("qv", _Tensor)]
    )


class _AppendShape(ctypes.Structure):
    _fields_ = (
        [("size", ctypes.c_size_t), ("dtype", _int32), ("cache", _int32)]
        + [(name, _int64) for name in ("batch", "num_heads", "num_heads_k", "seqlen_q", "seqlen_k", "head_dim",
                                       "head_dim_v", "seqlen_new", "page_size", "num_pages", "cache_rows")]
        + [("page_ids", _int32), ("packed", _int32), ("total_q", _int64), ("total_new", _int64),
           ("packed_new", _int32), ("slot_mapping", _int32), ("rotary_dim", _int64), ("rotary_positions", _int64)]
        + [(name, _int32) for name in ("rotary_dtype", "rotary_interleaved", "rotary_constant_q",
                                       "rotary_position_type", "dtype_kv", "scale_k", "scale_v", "reserved")]
    )


class _AppendTensors(ctypes.Structure):
    _fields_ = (
        [("size", ctypes.c_size_t)]
        + [(name, _Tensor) for name in ("k_new", "v_new", "k", "v", "q", "q_out")]
        + [("cache", _Cache), ("cu_seqlens_q", _pointer), ("slot_mapping", _pointer),
           ("rotary_cos", _pointer), ("rotary_sin", _pointer),
           ("stride_rotary_cos", _int64), ("stride_rotary_sin", _int64),
           ("rotary_seqlens", _pointer), ("rotary_positions", _pointer)]
        + [(name, _Scales) for name in ("k_scale", "v_scale")]
    )


class _QuantizeShape(ctypes.Structure):
    _fields_ = (
        [("size", ctypes.c_size_t), ("problem", ctypes.POINTER(_Problem))]
        + [(name, _int32) for name in ("dtype", "hadamard", "signs", "rotary_dtype")]
        + [("rotary_dim", _int64), ("rotary_positions", _int64),
           ("rotary_interleaved", _int32), ("rotary_constant_q", _int32)]
    )


class _QuantizeTensors(ctypes.Structure):
    _fields_ = (
        [("size", ctypes.c_size_t)]
        + [(name, _Tensor) for name in ("q", "k", "v", "q_out", "k_out", "v_out")]
        + [(name, _Scales) for name in ("q_scale", "k_scale", "v_scale", "k_mean", "score_shift", "v_shift")]
        + [(name, _pointer) for name in ("signs", "cu_seqlens_q", "cu_seqlens_k", "rotary_cos", "rotary_sin")]
        + [("stride_rotary_cos", _int64), ("stride_rotary_sin", _int64), ("rotary_seqlens", _pointer)]
    )


class _Execution(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("executor", _pointer), ("progress", _pointer),
                ("progress_context", _pointer), ("stream", _pointer)]


class _Peaks(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("f32_flops", ctypes.c_double),
                ("bf16_flops", ctypes.c_double), ("read_bytes", ctypes.c_double)]


class TesseraError(RuntimeError):
    """What the library answered, in its own words."""


def _address(array):
    return array.data_ptr() if hasattr(array, "data_ptr") else array.ctypes.data


def _strides(array):
    """Strides in elements."""
    if hasattr(array, "data_ptr"):
        return tuple(array.stride())
    return tuple(s // array.itemsize for s in array.strides)


def _tensor(array):
    """(batch, seqlen, heads, head_dim), or packed (total, heads, head_dim)."""
    strides = _strides(array)
    if strides[-1] != 1:
        raise TesseraError(f"the last stride is {strides[-1]}; it must be 1")
    batch = strides[0] if len(strides) == 4 else 0
    return _Tensor(_address(array), batch, strides[-3], strides[-2])


def value_tiles(array):
    """v in tiles, (batch, heads, bytes), or packed (heads, bytes)."""
    strides = _strides(array)
    return _Tensor(_address(array), strides[0] if len(strides) == 3 else 0, 0, strides[-2])


def _scales(array):
    """One number, (batch, heads), (batch, heads, numbers), or packed (heads, numbers)."""
    strides = _strides(array)
    if len(strides) == 3 and array.shape[-1] > 1 and strides[-1] != 1:
        raise TesseraError(f"the last stride is {strides[-1]}; it must be 1")
    batch, head = {0: (0, 0), 1: (0, 0), 2: strides, 3: strides[:2]}[len(strides)]
    return _Scales(_address(array), batch, head)


def slot_scales(array):
    """One for every slot and head of a cache: (rows or pages, slots, heads)."""
    entry, slot, head = _strides(array)
    return _Scales(_address(array), entry, head, slot)


def parse_problem(library, text):
    """A problem's line as tessera_problem."""
    problem = _Problem()
    library.c.tessera_problem_init(ctypes.byref(problem), ctypes.sizeof(problem))
    library.call(library.c.tessera_problem_parse, text.encode(), ctypes.byref(problem))
    return problem


class Plan:
    """One planned problem with a workspace of its own; run() allocates nothing."""

    def __init__(self, library, text, device=None):
        self._c = library.c
        problem = parse_problem(library, text)
        self._plan = _pointer()
        library.call(self._c.tessera_plan_create, ctypes.byref(problem),
                     device.encode() if device else None, ctypes.byref(self._plan))
        self._library = library
        self.kernel = self._c.tessera_plan_kernel(self._plan).decode()
        self.workspace_bytes = self._c.tessera_plan_workspace_bytes(self._plan)
        memory = np.empty(self.workspace_bytes + 64, np.uint8)
        self._workspace = memory[-memory.ctypes.data % 64 :]

    def __del__(self):
        if getattr(self, "_plan", None):
            self._c.tessera_plan_destroy(self._plan)

    def run(self, **arrays):
        """Keywords are the fields of tessera_tensors; the arrays must stay alive during the call."""
        self._library.call(self._c.tessera_run, self._plan, ctypes.byref(self.tensors(**arrays)),
                           self._workspace.ctypes.data, self.workspace_bytes, None)

    def enqueue(self, tensors, stream, workspace=None):
        """A plan for a GPU: tensors() of device memory, a CUDA stream's handle, and workspace_bytes of device
        memory, if the plan needs any."""
        execution = _Execution(ctypes.sizeof(_Execution), stream=stream)
        self._library.call(self._c.tessera_run, self._plan, ctypes.byref(tensors),
                           None if workspace is None else _address(workspace), self.workspace_bytes,
                           ctypes.byref(execution))

    def tensors(self, **arrays):
        """Keywords are the fields of tessera_tensors; those of its cache are named by themselves."""
        tensors = _Tensors()
        self._c.tessera_tensors_init(ctypes.byref(tensors), ctypes.sizeof(tensors))
        _set_fields(tensors, arrays)
        return tensors


def _set_fields(structure, values):
    """Arrays become tensors or addresses, as the field is; numbers stay. Those of its cache are named by themselves."""
    kinds = dict(structure._fields_)
    for name, value in values.items():
        if name in dict(_Cache._fields_):
            setattr(structure.cache, name, _address(value))
            if name == "page_table":
                structure.cache.stride_page_table = _strides(value)[0]
            continue
        if kinds[name] is _Tensor and not isinstance(value, _Tensor):
            value = _tensor(value)
        elif kinds[name] is _Scales and not isinstance(value, _Scales):
            value = _scales(value)
        elif kinds[name] is _Bias:
            value = _Bias(_address(value), *_strides(value))
        elif not isinstance(value, (int, ctypes.Structure)):
            value = _address(value)
        setattr(structure, name, value)


class Append:
    """One append to a cache of device memory. shape and tensors: the fields of tessera_append_shape and
    tessera_append_tensors; the arrays must stay alive."""

    def __init__(self, library, shape, tensors):
        self._library, self._shape, self._tensors = library, _AppendShape(), _AppendTensors()
        library.c.tessera_append_shape_init(ctypes.byref(self._shape), ctypes.sizeof(self._shape))
        library.c.tessera_append_tensors_init(ctypes.byref(self._tensors), ctypes.sizeof(self._tensors))
        _set_fields(self._shape, shape)
        _set_fields(self._tensors, tensors)

    def enqueue(self, stream, device="gpu"):
        execution = _Execution(ctypes.sizeof(_Execution), stream=stream)
        self._library.call(self._library.c.tessera_append, ctypes.byref(self._shape), ctypes.byref(self._tensors),
                           device.encode(), ctypes.byref(execution))


class Quantize:
    """One pass that makes 8-bit tensors and scales. problem: the line of the problem that they are for; shape and
    tensors: the fields of tessera_quantize_shape and tessera_quantize_tensors; the arrays must stay alive."""

    def __init__(self, library, problem, shape, tensors):
        self._library, self._shape, self._tensors = library, _QuantizeShape(), _QuantizeTensors()
        self._problem = parse_problem(library, problem)
        library.c.tessera_quantize_shape_init(ctypes.byref(self._shape), ctypes.sizeof(self._shape))
        library.c.tessera_quantize_tensors_init(ctypes.byref(self._tensors), ctypes.sizeof(self._tensors))
        _set_fields(self._shape, shape)
        self._shape.problem = ctypes.pointer(self._problem)
        _set_fields(self._tensors, tensors)

    def run(self, device, stream=None):
        execution = _Execution(ctypes.sizeof(_Execution), stream=stream)
        self._library.call(self._library.c.tessera_quantize, ctypes.byref(self._shape), ctypes.byref(self._tensors),
                           device.encode(), ctypes.byref(execution))


class Library:
    def __init__(self, path=None):
        path = path or os.environ.get("TESSERA_LIBRARY") or _default_path()
        try:
            self.c = ctypes.CDLL(str(path))
        except OSError as error:
            raise SystemExit(f"cannot load libtessera: {error}; build it first (./dev demo does)")
        self.c.tessera_plan_kernel.restype = ctypes.c_char_p
        self.c.tessera_version.restype = ctypes.c_char_p
        self.c.tessera_plan_workspace_bytes.restype = ctypes.c_size_t
        size, pointer = ctypes.c_size_t, _pointer
        self.c.tessera_problem_init.argtypes = [pointer, size]
        self.c.tessera_tensors_init.argtypes = [pointer, size]
        self.c.tessera_append_shape_init.argtypes = [pointer, size]
        self.c.tessera_append_tensors_init.argtypes = [pointer, size]
        self.c.tessera_plan_destroy.argtypes = [pointer]
        self.c.tessera_plan_kernel.argtypes = [pointer]
        self.c.tessera_plan_workspace_bytes.argtypes = [pointer]
        error = [ctypes.c_char_p, size]
        self.c.tessera_problem_parse.argtypes = [ctypes.c_char_p, pointer, *error]
        self.c.tessera_plan_create.argtypes = [pointer, ctypes.c_char_p, pointer, *error]
        self.c.tessera_append.argtypes = [pointer, pointer, ctypes.c_char_p, pointer, *error]
        self.c.tessera_quantize_shape_init.argtypes = [pointer, size]
        self.c.tessera_quantize_tensors_init.argtypes = [pointer, size]
        self.c.tessera_quantize.argtypes = [pointer, pointer, ctypes.c_char_p, pointer, *error]
        self.c.tessera_run.argtypes = [pointer, pointer, pointer, size, pointer, *error]
        self.c.tessera_measure_peaks.argtypes = [ctypes.c_char_p, ctypes.c_double, pointer, pointer,
                                                 *error]

    @property
    def version(self):
        return self.c.tessera_version().decode()

    def call(self, function, *arguments):
        error = ctypes.create_string_buffer(4096)
        if function(*arguments, error, len(error)) != 0:
            raise TesseraError(error.value.decode(errors="replace"))

    def plan(self, text, device=None):
        return Plan(self, text, device)

    def peaks(self, seconds, device=None):
        """f32_flops, bf16_flops and read_bytes a second that this machine reaches right now."""
        peaks = _Peaks(ctypes.sizeof(_Peaks))
        self.call(self.c.tessera_measure_peaks, device.encode() if device else None, seconds, None, ctypes.byref(peaks))
        return peaks

    def attention(self, q, k, v, cu_seqlens):
        """Packed forward in float32: q, k, v (total_tokens, heads, head_dim) -> like v."""
        total, heads, head_dim = q.shape
        longest = int(np.diff(cu_seqlens).max())
        plan = self.plan(f"fwd f32 b={len(cu_seqlens) - 1} h={heads} q={longest} k={longest} "
                         f"d={head_dim} packed={total},{total}")
        out = np.empty_like(v)
        plan.run(q=q, k=k, v=v, o=out, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens)
        return out


def _default_path():
    root = pathlib.Path(__file__).resolve().parent.parent
    found = sorted(root.glob("build*/libtessera.so")) + sorted(root.glob("build/*/libtessera.so"))
    if not found:
        raise SystemExit("libtessera.so is not built; run ./dev demo, or set TESSERA_LIBRARY")
    return found[-1]
