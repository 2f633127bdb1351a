"""Tensors of 8 bits for the scripts of this folder: made by the library's own pass, or drawn as they are."""

import math
import pathlib
import re
import sys

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "demo"))
import libtessera  # noqa: E402

E4M3 = torch.float8_e4m3fn
LARGEST = {E4M3: 448.0, torch.int8: 127.0}
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # tessera_dtype


def tile_columns(head_dim_v):
    """Columns that v's tiles have (docs/semantics.md, S14)."""
    return next(size for size in (64, 96, 128, 192, 256) if head_dim_v <= size)


def tile_bytes(head_dim_v):
    """Of 128 keys: a row of 128 bytes for each column, and eight of ones."""
    return 128 * (tile_columns(head_dim_v) + 8)


def scale_shape(scaling, b, h, hk, sq, sk, dv):
    """The shape of dense scales, as the problem's line names them."""
    block = int(scaling.partition(":")[2] or 0)
    kind = scaling.partition(":")[0]
    return {"tensor": (1,), "head": (b, hk), "token": (b, h, sq), "block": (b, hk, -(-sk // max(block, 1))),
            "channel": (b, hk, dv)}[kind]


class Quantized:
    """Dense q, k, v of 16 or 32 bits, (batch, seqlen, heads, head_dim), as the tensors of a problem of 8 bits.

    line: the problem, with its `scales=`, for tiles `v_tiles`, and `v=` if v stays as it is. Scales that the library
    does not write are the largest magnitude of the tensor, the head or the column over the type's largest.
    """

    def __init__(self, library, line, q, k, v, hadamard=0, signs=None, k_mean=None):
        (b, sq, h, d), (_, sk, hk, _), dv = q.shape, k.shape, v.shape[-1]
        self.line, scalings = line, re.search(r"scales=(\S+)", line)[1].split("/")
        self.dtype = torch.int8 if line.startswith("fwd i8 ") else E4M3
        empty = lambda x: torch.empty(x.shape, dtype=self.dtype, device=x.device)
        self.q, self.k = empty(q), empty(k)
        self.tiles = " v_tiles" in line
        if self.tiles:
            size = -(-sk // 128) * tile_bytes(dv)
            self.v = torch.zeros(b, hk, size, dtype=torch.uint8, device=v.device)
        elif scalings[2] == "none":
            self.v = v
        else:
            self.v = empty(v)
        names = ("q_scale", "k_scale", "v_scale")
        self.scales = {}
        for name, scaling, x in zip(names, scalings, (q, k, v)):
            if scaling == "none":
                continue
            scale = torch.ones(scale_shape(scaling, b, h, hk, sq, sk, dv), device=x.device)
            if scaling in ("tensor", "head", "channel"):
                most = self._given(scaling, x, hk)
                largest = LARGEST[self.dtype]
                scale.copy_(torch.where(most == 0, largest, most) / largest)
            self.scales[name] = scale
        shape = {"dtype": DTYPES[q.dtype], "hadamard": hadamard, "signs": int(signs is not None)}
        tensors = {"q": q, "k": k, "q_out": self.q, "k_out": self.k, **self.scales}
        if "v_scale" in self.scales:
            tensors |= {"v": v, "v_out": self._v()}
        if signs is not None:
            tensors["signs"] = signs
        if k_mean is not None:  # (batch, num_heads_k, head_dim); the line has score_shift
            self.scales["score_shift"] = torch.empty(b, h, sq, device=q.device)
            tensors |= {"k_mean": k_mean, "score_shift": self.scales["score_shift"]}
        self.kept = tensors
        self.run = libtessera.Quantize(library, line, shape, tensors).run

    @staticmethod
    def _given(scaling, x, heads_k):
        magnitude = x.float().abs()
        if scaling == "tensor":
            return magnitude.amax()
        by_head = magnitude.unflatten(2, (heads_k, -1)).transpose(1, 2)  # (batch, heads_k, seqlen, group, dim)
        return by_head.amax((2, 3) if scaling == "channel" else (2, 3, 4))

    def _v(self):
        return libtessera.value_tiles(self.v) if self.tiles else self.v

    def tensors(self):
        """Keywords for Plan.tensors."""
        return {"q": self.q, "k": self.k, "v": self._v(), **self.scales}

    def attend(self, library, device, o, lse=None, stream=None):
        """A plan, and a function that runs it."""
        plan = library.plan(self.line, device)
        arrays = self.tensors() | {"o": o} | ({} if lse is None else {"softmax_lse": lse})
        tensors = plan.tensors(**arrays)
        workspace = torch.empty(plan.workspace_bytes + 64, dtype=torch.uint8, device=o.device)
        start = -workspace.data_ptr() % 64
        workspace = workspace[start:]
        return plan, lambda: plan.enqueue(tensors, stream, workspace)


def values(x, scale, scaling, heads_k):
    """Elements times scales in double, of rows that are no tiles: (batch, seqlen, heads, dim)."""
    y = x.double()
    if scaling == "none":
        return y
    if scaling == "tensor":
        return y * scale.double()
    group = x.shape[2] // heads_k
    if scaling == "token":
        return y * scale.double().transpose(1, 2)[..., None]
    if scaling == "channel":
        return y * scale.double()[:, None]
    if scaling == "head":
        return y * scale.double().repeat_interleave(group, 1)[:, None, :, None]
    block = int(scaling.partition(":")[2])
    by_key = scale.double().repeat_interleave(block, 2)[:, :, :x.shape[1]]
    return y * by_key.transpose(1, 2)[..., None]


def cudnn_forward(q, k, v, causal, weight_scale=256.0):
    """cuDNN's forward of e4m3, (batch, seqlen, heads, head_dim), scales of 1 and an output of e4m3: a function that
    runs it, and the output. weight_scale: what weights are multiplied by before they are rounded. Needs the wheel
    nvidia-cudnn-frontend."""
    import cudnn

    handle = cudnn.create_handle()
    cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
    types = cudnn.data_type
    graph = cudnn.pygraph(io_data_type=types.FP8_E4M3, intermediate_data_type=types.FLOAT,
                          compute_data_type=types.FLOAT, handle=handle)
    memory = {}

    def given(x, dtype=types.FLOAT):
        node = graph.tensor(name=f"t{len(memory)}", dim=list(x.shape), stride=list(x.stride()), data_type=dtype)
        memory[node] = x
        return node

    number = lambda x: torch.full((1, 1, 1, 1), x, device="cuda")
    b, sq, h, _ = q.shape
    o = torch.empty(*q.shape[:-1], v.shape[-1], dtype=E4M3, device="cuda")
    results = graph.sdpa_fp8(
        **{name: given(x.transpose(1, 2), types.FP8_E4M3) for name, x in (("q", q), ("k", k), ("v", v))},
        **{f"descale_{name}": given(number(1.0)) for name in "qkv"},
        descale_s=given(number(1 / weight_scale)), scale_s=given(number(weight_scale)), scale_o=given(number(1.0)),
        is_inference=False, attn_scale=1 / math.sqrt(q.shape[-1]), use_causal_mask=causal)
    outputs = (o.transpose(1, 2), torch.empty(b, h, sq, 1, device="cuda"), number(0.0), number(0.0))
    for node, x in zip(results, outputs):
        kind = types.FP8_E4M3 if x.dtype == E4M3 else types.FLOAT
        node.set_output(True).set_dim(list(x.shape)).set_stride(list(x.stride())).set_data_type(kind)
        memory[node] = x
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A])
    graph.check_support()
    graph.build_plans()
    workspace = torch.empty(max(1, graph.get_workspace_size()), dtype=torch.uint8, device="cuda")
    return (lambda: graph.execute(memory, workspace, handle=handle)), o
