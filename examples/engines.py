"""What serves the requests of serve.py: a model and a cache, Tessera's in pages or a static one for PyTorch's SDPA."""

import argparse
import dataclasses
import heapq
import pathlib
import sys
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

import tessera

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import train_gpt


@dataclasses.dataclass(frozen=True)
class Request:
    arrival: float  # seconds from the beginning
    prompt: list[int]
    new_tokens: int
    uniforms: list[float]  # one in [0, 1) for each new token: what --temperature samples with


@dataclasses.dataclass(eq=False)
class Running:
    """A request on its way."""

    request: Request
    tokens: list[int]  # the prompt, then the answer so far
    cached: int = 0  # so many of them have their keys and values in the cache
    times: list[float] = dataclasses.field(default_factory=list)  # when each token of the answer was there
    margins: list[float] = dataclasses.field(default_factory=list)  # how much better its logit was than the next one
    pages: tessera.PagedSequence | None = None
    row: int | None = None
    preemptions: int = 0

    @property
    def answer(self) -> list[int]:
        return self.tokens[len(self.request.prompt) :]


@dataclasses.dataclass(frozen=True)
class Piece:
    """What a step computes of one request: its next `count` tokens."""

    running: Running
    count: int


@dataclasses.dataclass
class Batch:
    """The device's side of a step; `total` tokens of `rows` requests."""

    tokens: Tensor  # (total,)
    positions: Tensor  # (total,)
    uniforms: Tensor  # (rows,)
    last: Tensor | None = None  # (rows,): the last token of each; None: there is just one of each
    cu_seqlens: Tensor | None = None  # int32 (rows + 1,), where there is more than one
    pieces: Sequence[Piece] = ()
    longest: int = 1  # most tokens of a request


class Engine:
    """A model and a cache; what both ways of serving have in common."""

    label: str

    def __init__(self, model: train_gpt.GPT, options: argparse.Namespace, padded: bool | None = None):
        """padded: steps without prompts have a power of two of rows, as CUDA graphs need; None: on a GPU."""
        self.device, self.dtype = torch.device(options.device), getattr(torch, options.dtype)
        self.temperature, self.most, self.context = options.temperature, options.batch, len(model.cos)
        # One more position than the model has: where rows without a request are.
        half = model.cos.shape[-1]
        angles = torch.outer(torch.arange(self.context + 1), 10000.0 ** (-torch.arange(half) / half))
        self.cos, self.sin = angles.cos().to(self.device), angles.sin().to(self.device)
        self.model = model.to(self.device, self.dtype)
        self.layers, block = len(model.blocks), model.blocks[0]
        self.heads, self.kv_heads, self.head_dim = block.heads, block.kv_heads, block.head_dim
        self.padded = self.device.type == "cuda" if padded is None else padded
        self.numbers = torch.zeros(2, self.most, dtype=torch.long, device=self.device)
        self.uniforms = torch.zeros(self.most, device=self.device)
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    # What an engine decides itself.
    def refusal(self, request: Request) -> str | None:
        """Why a request can never be served."""
        return None

    def reserve(self, running: Running) -> bool:
        """Room for all of a request's tokens; False if there is none."""
        raise NotImplementedError

    def release(self, running: Running) -> None:
        raise NotImplementedError

    def place(self, pieces: Sequence[Piece]) -> list[int]:
        """Tells the device where the requests of a step lie; returns the row of each in a step without prompts."""
        raise NotImplementedError

    def attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        """(total, heads, head_dim) of q, k and v before rotation -> like q."""
        raise NotImplementedError

    def cache_bytes(self) -> int:
        raise NotImplementedError

    # What is the same.
    def forward(self, batch: Batch) -> Tensor:
        """(2, rows): the next token of each request, and its margin."""
        model = self.model
        x = model.embedding(batch.tokens)
        for layer, block in enumerate(model.blocks):
            qkv = block.qkv(block.attention_norm(x)).unflatten(-1, (-1, self.head_dim))
            o = self.attention(layer, *qkv.split((self.heads, self.kv_heads, self.kv_heads), 1), batch)
            x = x + block.out(o.flatten(1))
            x = x + block.down(F.gelu(block.up(block.mlp_norm(x))))
        x = x if batch.last is None else x[batch.last]
        logits = model.head(model.norm(x)).float()
        best = logits.topk(2)
        tokens = best.indices[:, 0]
        if self.temperature > 0:
            below = (logits / self.temperature).softmax(-1).cumsum(-1) <= batch.uniforms[:, None]
            tokens = below.sum(-1).clamp(max=train_gpt.VOCABULARY - 1)
        return torch.stack((tokens.float(), best.values[:, 0] - best.values[:, 1]))

    def to_device(self, x: Tensor) -> Tensor:
        return x.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else x

    def rows(self, count: int) -> int:
        return min(self.most, 1 << (count - 1).bit_length()) if self.padded else count

    def step(self, pieces: Sequence[Piece]) -> list[tuple[int, float]]:
        """(next token, margin) of each request; waits for the device."""
        at = self.place(pieces)
        next_uniforms = [piece.running.request.uniforms[len(piece.running.times)] for piece in pieces]
        if all(piece.count == 1 for piece in pieces):
            rows = self.rows(max(at) + 1)
            numbers, uniforms = torch.tensor([[0], [self.context]]).repeat(1, rows), torch.zeros(rows)
            numbers[:, at] = torch.tensor([(p.running.tokens[p.running.cached], p.running.cached) for p in pieces]).T
            uniforms[at] = torch.tensor(next_uniforms)
            self.numbers[:, :rows].copy_(self.to_device(numbers), non_blocking=True)
            self.uniforms[:rows].copy_(self.to_device(uniforms), non_blocking=True)
            results = self.single(rows, pieces)
        else:
            at, results = list(range(len(pieces))), self.forward(self.packed(pieces, next_uniforms))
        tokens, margins = results.tolist()
        return [(int(tokens[i]), margins[i]) for i in at]

    def packed(self, pieces: Sequence[Piece], uniforms: list[float]) -> Batch:
        tokens, positions, ends = [], [], [0]
        for piece in pieces:
            start, end = piece.running.cached, piece.running.cached + piece.count
            tokens += piece.running.tokens[start:end]
            positions += range(start, end)
            ends.append(len(tokens))
        numbers = self.to_device(torch.tensor([tokens, positions]))
        cu_seqlens = self.to_device(torch.tensor(ends, dtype=torch.int32))
        longest = max(piece.count for piece in pieces)
        last = cu_seqlens[1:].long() - 1
        return Batch(*numbers, self.to_device(torch.tensor(uniforms)), last, cu_seqlens, pieces, longest)

    def single(self, rows: int, pieces: Sequence[Piece] = ()) -> Tensor:
        """A step of one token a row, what `numbers` and `uniforms` hold."""
        # What is captured must not depend on lengths, which pieces have.
        batch = Batch(*self.numbers[:, :rows], self.uniforms[:rows], pieces=() if self.padded else pieces)
        if self.device.type != "cuda":
            return self.forward(batch)
        if rows not in self.graphs:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(2):
                    self.forward(batch)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                results = self.forward(batch)
            self.graphs[rows] = graph, results
        graph, results = self.graphs[rows]
        graph.replay()
        return results

    def capture(self) -> None:
        """All graphs, before the clock runs."""
        self.place(())
        self.numbers[0].zero_()
        self.numbers[1].fill_(self.context)
        for count in range(1, self.most + 1) if self.device.type == "cuda" else ():
            if self.rows(count) not in self.graphs:
                self.single(self.rows(count))


class Paged(Engine):
    label = "Tessera, pages"

    def __init__(self, model: train_gpt.GPT, options: argparse.Namespace, padded: bool | None = None):
        super().__init__(model, options, padded)
        self.pool = tessera.PagePool(options.pages, options.page_size)
        shape = (options.pages, 2, options.page_size, self.kv_heads, self.head_dim)
        self.caches = [
            tessera.KVCache(*torch.empty(shape, dtype=self.dtype, device=self.device).unbind(1))
            for _ in range(self.layers)
        ]
        most_pages = self.pool.pages_for(self.context)
        self.sequences = tessera.CachedSequences.paged(self.most, most_pages, device=self.device)

    def refusal(self, request: Request) -> str | None:
        # The last token of an answer never enters the cache.
        wanted = self.pool.pages_for(len(request.prompt) + request.new_tokens - 1)
        if wanted <= self.pool.num_pages:
            return None
        return f"{wanted} pages are wanted, the cache has {self.pool.num_pages}"

    def reserve(self, running: Running) -> bool:
        running.pages = running.pages or tessera.PagedSequence(self.pool)
        try:
            running.pages.extend(len(running.tokens) - running.pages.length)  # shares nothing: no page to copy
        except tessera.OutOfPages:
            return False
        return True

    def release(self, running: Running) -> None:
        assert running.pages is not None
        running.pages.free()

    def place(self, pieces: Sequence[Piece]) -> list[int]:
        self.sequences.assign(
            [piece.running.cached for piece in pieces],
            [piece.running.pages.pages for piece in pieces if piece.running.pages is not None],
        )
        return list(range(len(pieces)))

    def attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        cache, sequences = self.caches[layer], self.sequences.first(len(batch.uniforms))
        cu, longest = batch.cu_seqlens, batch.longest
        if cu is None:
            q, k, v, longest = q[:, None], k[:, None], v[:, None], None
        o = cache.attend(
            q, sequences, k_new=k, v_new=v, cu_seqlens_new=cu, max_seqlen_new=longest, cu_seqlens_q=cu,
            max_seqlen_q=longest, causal=True, rotary_cos=self.cos, rotary_sin=self.sin,
        )  # fmt: skip
        return o[:, 0] if cu is None else o

    def cache_bytes(self) -> int:
        return sum(x.nbytes for cache in self.caches for x in (cache.k, cache.v))


class Static(Engine):
    label = "PyTorch SDPA, static"

    def __init__(self, model: train_gpt.GPT, options: argparse.Namespace, padded: bool | None = None):
        super().__init__(model, options, padded)
        self.free = list(range(self.most))
        # The last slot is where rows without a request write.
        shape = (self.layers, 2, self.most, self.kv_heads, self.context + 1, self.head_dim)
        self.caches = torch.zeros(shape, dtype=self.dtype, device=self.device)
        self.slots = torch.arange(self.context + 1, device=self.device)
        self.all_rows = torch.arange(self.most, device=self.device)
        self.grouped = self.heads != self.kv_heads

    def reserve(self, running: Running) -> bool:
        if running.row is None and self.free:
            running.row = heapq.heappop(self.free)
        return running.row is not None

    def release(self, running: Running) -> None:
        assert running.row is not None
        heapq.heappush(self.free, running.row)
        running.row = None

    def place(self, pieces: Sequence[Piece]) -> list[int]:
        return [piece.running.row for piece in pieces if piece.running.row is not None]

    def packed(self, pieces: Sequence[Piece], uniforms: list[float]) -> Batch:
        """Also what every layer needs: the row of each token, masks of prompts, and who has one token."""
        batch = super().packed(pieces, uniforms)
        at = torch.tensor(self.place(pieces))
        self.step_rows = self.to_device(at.repeat_interleave(torch.tensor([piece.count for piece in pieces])))
        self.step_masks = [self.prompt_mask(piece) for piece in pieces]
        ones = torch.tensor([i for i, piece in enumerate(pieces) if piece.count == 1], dtype=torch.long)
        self.ones = [pieces[i] for i in ones]
        assert batch.last is not None
        self.ones_last = batch.last[self.to_device(ones)]
        self.ones_rows = self.to_device(at[ones])
        return batch

    def prompt_mask(self, piece: Piece) -> Tensor | None:
        start, count = piece.running.cached, piece.count
        if start == 0 or count == 1:
            return None
        return self.slots[: start + count] <= self.slots[start : start + count, None]

    def attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        cos, sin = (table[batch.positions][:, None] for table in (self.cos, self.sin))
        q, k = (train_gpt.rotate(x.float(), cos, sin).to(self.dtype) for x in (q, k))
        k_cache, v_cache = self.caches[layer]
        single = batch.cu_seqlens is None
        rows = self.all_rows[: len(batch.tokens)] if single else self.step_rows
        k_cache[rows, :, batch.positions] = k
        v_cache[rows, :, batch.positions] = v
        if single:
            return self.attend_rows(q, k_cache, v_cache, batch.positions, batch.pieces)
        o = torch.empty_like(q)
        if self.ones:
            # By row, so that the cache is read where it lies; rows in between are computed in vain.
            most = max(self.place(self.ones)) + 1
            all_q, positions = q.new_zeros(most, *q.shape[1:]), batch.positions.new_zeros(most)
            all_q[self.ones_rows], positions[self.ones_rows] = q[self.ones_last], batch.positions[self.ones_last]
            o[self.ones_last] = self.attend_rows(all_q, k_cache, v_cache, positions, self.ones)[self.ones_rows]
        start = 0
        for piece, mask in zip(batch.pieces, self.step_masks, strict=True):
            end, keys, row = start + piece.count, piece.running.cached + piece.count, piece.running.row
            if piece.count > 1:
                seen = (x[row, None, :, :keys] for x in (k_cache, v_cache))
                x = q[start:end].transpose(0, 1)[None]
                o[start:end] = F.scaled_dot_product_attention(
                    x, *seen, attn_mask=mask, is_causal=mask is None, enable_gqa=self.grouped
                )[0].transpose(0, 1)
            start = end
        return o

    def attend_rows(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, positions: Tensor, pieces: Sequence[Piece]
    ) -> Tensor:
        """One query of each of the first rows; without pieces, in a graph, over the whole context."""
        keys = max((piece.running.cached + 1 for piece in pieces), default=self.context + 1)
        k, v = (x[: len(q), :, :keys] for x in (k_cache, v_cache))
        mask = (self.slots[:keys] <= positions[:, None])[:, None, None]
        return F.scaled_dot_product_attention(q[:, :, None], k, v, attn_mask=mask, enable_gqa=self.grouped)[:, :, 0]

    def cache_bytes(self) -> int:
        return self.caches.nbytes
