"""cuDNN's attention by its own graphs, for what PyTorch does not pass on to it: windows, packed sequences, and masks
that are aligned to the last key. Needs PyTorch and the package nvidia-cudnn-frontend.
"""

import functools
import math

import cudnn
import torch

DTYPES = {torch.bfloat16: cudnn.data_type.BFLOAT16, torch.float16: cudnn.data_type.HALF,
          torch.float32: cudnn.data_type.FLOAT, torch.int32: cudnn.data_type.INT32}


@functools.cache
def handle():
    return cudnn.create_handle()


class Graph:
    """A graph with the memory of its tensors: what was made a tensor of it is bound to that memory."""

    def __init__(self):
        self.graph = cudnn.pygraph(io_data_type=cudnn.data_type.BFLOAT16, compute_data_type=cudnn.data_type.FLOAT,
                                   intermediate_data_type=cudnn.data_type.FLOAT, handle=handle())
        self.memory = {}

    def tensor(self, memory, dim=None, stride=None, ragged=None):
        made = self.graph.tensor(name=f"t{len(self.memory)}", dim=list(dim or memory.shape),
                                 stride=list(stride or memory.stride()), data_type=DTYPES[memory.dtype])
        if ragged is not None:
            made.set_ragged_offset(ragged)
        self.memory[made] = memory
        return made

    def output(self, made, memory, dim=None, stride=None, ragged=None):
        made.set_output(True).set_dim(list(dim or memory.shape)).set_stride(list(stride or memory.stride()))
        made.set_data_type(DTYPES[memory.dtype])
        if ragged is not None:
            made.set_ragged_offset(ragged)
        self.memory[made] = memory

    def build(self):
        self.graph.validate()
        self.graph.build_operation_graph()
        self.graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        self.graph.check_support()
        self.graph.build_plans()
        self.workspace = torch.empty(max(1, self.graph.get_workspace_size()), dtype=torch.uint8, device="cuda")

    def __call__(self):
        cudnn.set_stream(handle=handle(), stream=torch.cuda.current_stream().cuda_stream)
        self.graph.execute(self.memory, self.workspace, handle=handle())


class Shape:
    """How a graph sees tensors: (batch, heads, seqlen, head_dim), or packed (total, heads, head_dim) by offsets."""

    def __init__(self, batch, seqlen, cu_seqlens=None):
        self.batch, self.seqlen, self.cu_seqlens = batch, seqlen, cu_seqlens

    def of(self, graph, x):
        """dim, stride and ragged offsets of x: (b, s, h, d), or (total, h, d) if packed."""
        heads, d = x.shape[-2:]
        dim = (self.batch, heads, self.seqlen, d)
        if self.cu_seqlens is None:
            return {"dim": dim, "stride": (x.stride(0), x.stride(2), x.stride(1), x.stride(3))}
        offsets = (self.cu_seqlens * x.stride(0)).int().view(-1, 1, 1, 1)
        return {"dim": dim, "stride": (self.seqlen * x.stride(0), x.stride(1), x.stride(0), x.stride(2)),
                "ragged": graph.tensor(offsets)}

    def lengths(self, graph):
        return graph.tensor(self.cu_seqlens.diff().int().view(-1, 1, 1, 1))


def both_passes(q, k, v, dout, *, causal=False, window=0, lengths=None, cu_seqlens=None):
    """Functions of the forward and the backward pass, the latter returns dq, dk, dv; window: keys, the query's own
    among them. Masks are aligned to the last key. Packed: lengths and cu_seqlens of queries and keys alike.
    """
    packed = cu_seqlens is not None
    batch, longest = (len(lengths), max(lengths)) if packed else (q.shape[0], q.shape[1])
    queries = Shape(batch, longest, cu_seqlens)
    keys = Shape(batch, longest if packed else k.shape[1], cu_seqlens)
    o = torch.empty(*q.shape[:-1], v.shape[-1], dtype=q.dtype, device="cuda")
    heads = q.shape[-2]
    stats = torch.empty(*q.shape[:-1], 1, device="cuda") if packed else torch.empty(
        batch, heads, longest, 1, device="cuda").transpose(1, 2)
    gradients = [torch.empty_like(x) for x in (q, k, v)]

    def options(graph):
        found = {"attn_scale": 1 / math.sqrt(q.shape[-1])}
        if causal or window:
            found |= {"diagonal_alignment": cudnn.diagonal_alignment.BOTTOM_RIGHT, "diagonal_band_right_bound": 0}
        if window:
            found["diagonal_band_left_bound"] = window
        if packed:
            found |= {"use_padding_mask": True, "seq_len_q": queries.lengths(graph), "seq_len_kv": keys.lengths(graph)}
        return found

    def inputs(graph):
        return {"q": graph.tensor(q, **queries.of(graph, q)), "k": graph.tensor(k, **keys.of(graph, k)),
                "v": graph.tensor(v, **keys.of(graph, v))}

    forward = Graph()
    made_o, made_stats = forward.graph.sdpa(**inputs(forward), generate_stats=True, **options(forward))
    forward.output(made_o, o, **queries.of(forward, o))
    forward.output(made_stats, stats, **queries.of(forward, stats))
    forward.build()
    forward()

    backward = Graph()
    more = {"max_total_seq_len_q": q.shape[0], "max_total_seq_len_kv": k.shape[0]} if packed else {}
    made = backward.graph.sdpa_backward(
        **inputs(backward), o=backward.tensor(o, **queries.of(backward, o)),
        dO=backward.tensor(dout, **queries.of(backward, dout)),
        stats=backward.tensor(stats, **queries.of(backward, stats)), **options(backward), **more)
    for one, memory, shape in zip(made, gradients, (queries, keys, keys)):
        backward.output(one, memory, **shape.of(backward, memory))
    backward.build()

    def run_backward():
        backward()
        return gradients

    return forward, run_backward
