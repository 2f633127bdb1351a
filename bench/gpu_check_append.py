"""Correctness of appends to caches of 8 bits on a GPU: random ones, bit for bit beside the same append on a CPU.

    gpu_check_append.py --library build/release/libtessera.so [--seed N] [--cases N]

All that an append may write is compared: the cache, its scales and the queries, poisoned before, with gaps between
rows. Queries are rotated as plain appends do it, which may differ from a CPU's in the last bit. Needs PyTorch.
"""

import argparse
import pathlib
import random
import sys

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "demo"))
import libtessera  # noqa: E402

DTYPES = {"f32": (0, torch.float32), "bf16": (1, torch.bfloat16), "f16": (2, torch.float16)}
KV = {"e4m3": 3, "i8": 4}
SCALES = {"tensor": 1, "head": 2, "token": 3}
FULL, AFTER, BEFORE = 1, 2, 3


class Case:
    """One append's fields and tensors on the CPU."""

    def __init__(self, seed):
        rng = self.rng = random.Random(seed)
        torch.manual_seed(seed)
        b, hk, d = rng.randint(1, 5), rng.randint(1, 9), rng.choice((2, 8, 16, 40, 64, 80, 96, 100, 128, 128, 192, 256))
        dv, h = rng.choice((d, d, 64, 5, 256)), hk * rng.randint(0, 3)
        name, kv = rng.choice(tuple(DTYPES)), rng.choice(tuple(KV))
        by = {x: rng.choice(("tensor", "head", "token", "token")) for x in "kv"}
        code, kind = DTYPES[name]
        gap, page, slots = rng.choice((0, 0, 16, 8, 3)), rng.choice((0, 1, 16, 5)), rng.choice((40, 700))
        capacity = slots if not page else -(-slots // page) * page
        columns = capacity // page if page else 0
        entries, of_entry = (b * columns, page) if page else (b, capacity)
        rotary = rng.choice((0, d // 2 * 2, max(2, d // 4 * 2))) if d > 1 else 0
        h = h if rotary else 0
        places = rng.choice(("before", "after", "slots"))
        new = rng.randint(0, min(capacity, 30 if slots == 40 else 300))
        counts = [rng.randint(0, new) for _ in range(b)]
        total = sum(counts)
        self.text = (f"seed={seed} {name} kv={kv} {by['k']}/{by['v']} b={b} h={h}/{hk} d={d}/{dv} page={page} "
                     f"new={counts} {places} rotary={rotary} gap={gap}")
        self.shape = dict(dtype=code, dtype_kv=KV[kv], scale_k=SCALES[by["k"]], scale_v=SCALES[by["v"]], batch=b,
                          num_heads=h, num_heads_k=hk, seqlen_q=capacity, seqlen_k=capacity, head_dim=d, head_dim_v=dv,
                          page_size=page, num_pages=b * columns, packed=1, packed_new=1, total_q=total if h else 0,
                          total_new=total, rotary_dim=rotary)
        # As models have them: heads of q, k and v of a token side by side.
        qkv = torch.randn(total, (h + hk) * d + hk * dv + gap)
        qkv[:, h * d:] *= rng.choice((1.0, 1.0, 1e-30, 1e4))
        for special in (float("nan"), float("inf"), 0.0):
            qkv[:, h * d:][torch.rand(total, qkv.shape[1] - h * d) < 0.002] = special
        qkv = qkv.to(kind)
        self.inputs = {"qkv": qkv}
        self.parts = {"q": (0, h, d), "k_new": (h * d, hk, d), "v_new": ((h + hk) * d, hk, dv)}
        self.outputs = {"q_out": torch.full((total, max(h, 1), d), 7.0).to(kind)}
        for x, dim in (("k", d), ("v", dv)):
            self.outputs[x] = torch.full((entries, of_entry, hk, dim + gap), 0x55, dtype=torch.uint8)
            if by[x] == "token":
                self.outputs[f"{x}_scale"] = torch.full((entries, of_entry, hk), 7.0)
            else:
                self.inputs[f"{x}_scale"] = torch.rand(1 if by[x] == "tensor" else (b, hk)) + 0.01
                if by[x] == "head" and places == "slots":
                    self.inputs[f"{x}_scale"] = torch.rand(1, hk) + 0.01
        starts = [rng.randint(0, capacity - count) for count in counts]
        table = torch.randperm(b * columns).int().view(b, columns) if page else None
        slots_of = [range(start, start + count) for start, count in zip(starts, counts, strict=True)]
        position = torch.tensor([slot for slots in slots_of for slot in slots], dtype=torch.int64)
        if places == "slots":
            sequence = torch.tensor([j for j, c in enumerate(counts) for _ in range(c)], dtype=torch.int64)
            entry = table[sequence, position // page].long() if page else sequence
            slot = entry * of_entry + position % of_entry
            slot[torch.rand(total) < 0.1] = -1
            self.shape |= dict(cache=FULL, slot_mapping=1)
            self.inputs["slot_mapping"] = slot
            if rotary:
                self.inputs["rotary_positions"] = position.int()
        else:
            self.shape |= dict(cache=BEFORE if places == "before" else AFTER, seqlen_new=new)
            lengths = [s if places == "before" else s + c for s, c in zip(starts, counts, strict=True)]
            cu = torch.tensor([0, *counts]).cumsum(0).int()
            self.inputs |= {"seqlens": torch.tensor(lengths, dtype=torch.int32), "cu_seqlens_new": cu}
            if h:
                self.inputs["cu_seqlens_q"] = cu
            if page:
                self.inputs["page_table"] = table
        if rotary:
            angles = torch.rand(capacity, rotary // 2) * 6.0
            self.shape |= dict(rotary_positions=capacity, rotary_interleaved=rng.randint(0, 1))
            self.inputs |= {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
        self.rotary, self.total, self.dims = rotary, total, {"k": d, "v": dv}

    def run(self, library, where):
        """What an append there makes of the outputs."""
        inputs = {name: x.to(where) for name, x in self.inputs.items()}
        outputs = {name: x.clone().to(where) for name, x in self.outputs.items()}
        tensors = {name: x for name, x in (inputs | outputs).items() if name != "qkv"}
        for name, (first, heads, dim) in self.parts.items():
            if heads:
                tensors[name] = inputs["qkv"][:, first:first + heads * dim].unflatten(1, (heads, dim))
        if not self.parts["q"][1]:
            del tensors["q_out"]
        for x, dim in self.dims.items():
            tensors[x] = outputs[x][..., :dim]
            if f"{x}_scale" in outputs:
                tensors[f"{x}_scale"] = libtessera.slot_scales(outputs[f"{x}_scale"])
        if self.rotary:
            tensors |= dict(stride_rotary_cos=self.rotary // 2, stride_rotary_sin=self.rotary // 2)
        append = libtessera.Append(library, self.shape, tensors)
        gpu = where == "cuda"
        append.enqueue(torch.cuda.current_stream().cuda_stream if gpu else None, "gpu" if gpu else "cpu")
        return {name: x.cpu() for name, x in outputs.items()}

    def difference(self, library):
        """A sentence, or nothing."""
        wanted, is_there = self.run(library, "cpu"), self.run(library, "cuda")
        for name, x in wanted.items():
            y = is_there[name]
            if name == "q_out":
                unit = torch.finfo(x.dtype).eps
                size = x.float().abs().amax(-1, keepdim=True).clamp(min=1e-30)
                if not torch.all((x.float() - y.float()).abs() <= 2 * unit * size):
                    return f"{name} differs"
            elif not torch.equal(x.view(torch.uint8), y.view(torch.uint8)):
                count = (x.view(torch.uint8) != y.view(torch.uint8)).sum().item()
                return f"{name}: {count} of {x.view(torch.uint8).numel()} bytes differ"
        return ""


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", required=True)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument("--cases", type=int, default=500)
    arguments = parser.parse_args()
    library = libtessera.Library(arguments.library)
    print(f"seed {arguments.seed}")
    wrong = 0
    for seed in range(arguments.seed, arguments.seed + arguments.cases):
        case = Case(seed)
        text = case.difference(library)
        if text:
            wrong += 1
            print(f"{case.text}: {text}", flush=True)
    print(f"{arguments.cases} appends, {wrong} wrong")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
