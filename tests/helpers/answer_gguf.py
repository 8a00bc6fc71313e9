"""A tiny GGUF file for stored answers, in which each matrix has another type: blocks of raw bits with plain scales."""

import json
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

from answer_models import CONTEXT, ROWS, bits, integers
from block_scales import put_halves
from byte_tokenizer import write_byte_tokenizer
from infer.compute.quantization.ggml_types import BLOCK_TYPES

HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 256, 4, 2, 64
# Exponents of the scales that give each type's weights a spread of about 1/16.
_EXPONENTS = {
    "Q4_0": -6, "Q4_1": -7, "Q5_0": -7, "Q5_1": -8, "Q8_0": -10, "Q2_K": -8, "Q3_K": -9, "Q4_K": -12, "Q5_K": -13,
    "Q6_K": -14, "IQ4_NL": -10, "IQ4_XS": -14, "MXFP4": -6,
}  # fmt: skip
_TYPES = {
    "token_embd": "Q6_K", "output": "Q8_0",
    "blk.0.attn_q": "Q4_K", "blk.0.attn_k": "Q5_K", "blk.0.attn_v": "Q6_K", "blk.0.attn_output": "Q4_0",
    "blk.0.ffn_gate": "Q3_K", "blk.0.ffn_up": "Q3_K", "blk.0.ffn_down": "Q2_K",
    "blk.1.attn_q": "IQ4_NL", "blk.1.attn_k": "IQ4_XS", "blk.1.attn_v": "Q5_0", "blk.1.attn_output": "MXFP4",
    "blk.1.ffn_gate": "Q4_1", "blk.1.ffn_up": "Q5_1", "blk.1.ffn_down": "F16",
}  # fmt: skip
_NUM_ROWS = {"token_embd": ROWS, "output": ROWS, "attn_k": KV_HEADS * HEAD_DIM, "attn_v": KV_HEADS * HEAD_DIM}
_NORMS = ("output_norm", *(f"blk.{at}.{part}_norm" for at in range(2) for part in ("attn", "ffn")))


def write_mixed_gguf(path: Path) -> Path:
    """Write a Llama of two layers, and return its path."""
    writer = gguf.GGUFWriter(path, "llama")
    sizes = {"block_count": 2, "context_length": CONTEXT, "embedding_length": HIDDEN, "feed_forward_length": HIDDEN}
    heads = {"head_count": HEADS, "head_count_kv": KV_HEADS, "key_length": HEAD_DIM}
    for name, value in {**sizes, **heads, "layer_norm_rms_eps": 1e-5, "rope_freq_base": 10_000.0}.items():
        getattr(writer, f"add_{name}")(value)
    _add_tokenizer(writer, path.parent)
    for name in _NORMS:
        writer.add_tensor(f"{name}.weight", (integers(name, (HIDDEN,)) / 128 + 1).astype(np.float32))
    for name, type_ in _TYPES.items():
        kind = gguf.GGMLQuantizationType[type_]
        writer.add_tensor(f"{name}.weight", _matrix(name, type_), raw_dtype=None if type_ == "F16" else kind)
    for part in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{part}_to_file")()
    writer.close()
    return path


def _add_tokenizer(writer: gguf.GGUFWriter, folder: Path) -> None:
    write_byte_tokenizer(folder, merges=[("a", "b")])
    vocab = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    tokens = [*sorted(vocab, key=vocab.__getitem__), "<eos>"]
    tokens += [f"<unused{at}>" for at in range(ROWS - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_merges(["a b"])
    writer.add_token_types([1] * len(vocab) + [3] * (ROWS - len(vocab)))
    writer.add_eos_token_id(len(vocab))


def _matrix(name: str, type_: str) -> NDArray[np.generic]:
    rows = _NUM_ROWS.get(name.split(".")[-1], HIDDEN)
    if type_ == "F16":
        return (integers(name, (rows, HIDDEN)) / 1024).astype(np.float16)
    block = BLOCK_TYPES[type_]
    shape = (rows, HIDDEN // block.block_size, block.block_bytes)
    blocks = (bits(name, shape) & np.uint64(255)).astype(np.uint8)
    steps = 1 + integers(f"{name} scales", (*shape[:2], 1)) / 128
    put_halves(blocks, type_, lambda: (steps * 2.0 ** _EXPONENTS[type_]).astype(np.float16))
    if type_ == "MXFP4":
        blocks[..., 0] = 127 + _EXPONENTS[type_]
    return blocks.reshape(rows, -1)
