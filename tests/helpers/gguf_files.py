"""GGUF files for tests: small models from the `gguf` package's writer, and files put together byte by byte."""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from infer.files.gguf.gguf import GGUFFile, read_gguf

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INTERMEDIATE, VOCAB = 4, 2, 16, 64, 96, 40
Q4_0 = gguf.GGMLQuantizationType.Q4_0


def permuted(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Permute q and k of a Llama as llama.cpp's convert_hf_to_gguf.py does."""
    shape = weight.shape
    return weight.reshape(num_heads, 2, shape[0] // num_heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def random_tensors(architecture: str, seed: int = 0) -> dict[str, np.ndarray]:
    """Return the tensors of one layer in Hugging Face's layout, under GGUF's names."""
    noise = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return noise.standard_normal((rows, columns), dtype=np.float32)

    tensors = {
        "token_embd.weight": matrix(VOCAB, HIDDEN),
        "output_norm.weight": matrix(1, HIDDEN)[0],
        "blk.0.attn_norm.weight": matrix(1, HIDDEN)[0],
        "blk.0.ffn_norm.weight": matrix(1, HIDDEN)[0],
        "blk.0.attn_q.weight": matrix(HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_k.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_v.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_output.weight": matrix(HIDDEN, HEADS * HEAD_DIM),
        "blk.0.ffn_gate.weight": matrix(INTERMEDIATE, HIDDEN),
        "blk.0.ffn_up.weight": matrix(INTERMEDIATE, HIDDEN),
        "blk.0.ffn_down.weight": matrix(HIDDEN, INTERMEDIATE),
    }
    if architecture == "gemma3":
        for name in ("post_attention_norm", "post_ffw_norm"):
            tensors[f"blk.0.{name}.weight"] = matrix(1, HIDDEN)[0]
    if architecture in ("gemma3", "qwen3"):
        for name in ("attn_q_norm", "attn_k_norm"):
            tensors[f"blk.0.{name}.weight"] = matrix(1, HEAD_DIM)[0]
    return tensors


def write_model(
    path: Path,
    architecture: str = "llama",
    tensors: dict[str, np.ndarray] | None = None,
    quantise: frozenset[str] = frozenset(),
    extend: Callable[[gguf.GGUFWriter], Any] | None = None,
    split_tensors: int = 0,
    rope_base: float | None = 50_000.0,
    kv_heads: int | None = KV_HEADS,
    num_layers: int = 1,
) -> Path:
    """Write a model. With `split_tensors`, it has several files of that many tensors, with the package's names."""
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=split_tensors)
    writer.add_block_count(num_layers)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    if kv_heads is not None:
        writer.add_head_count_kv(kv_heads)
    writer.add_key_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    if rope_base is not None:
        writer.add_rope_freq_base(rope_base)
    if extend:
        extend(writer)
    for name, values in (random_tensors(architecture) if tensors is None else tensors).items():
        if name in quantise:
            writer.add_tensor(name, gguf.quants.quantize(values, Q4_0), raw_dtype=Q4_0)
        else:
            writer.add_tensor(name, values)
    return write_file(writer, path)


def write_file(writer: gguf.GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def text(value: bytes | str) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def key_value(key: bytes | str, type_id: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", type_id) + value


def tensor_entry(name: bytes | str, shape: tuple[int, ...], type_id: int, offset: int) -> bytes:
    """Return a tensor's entry in the header. `shape` is in the order of the file: columns first."""
    sizes = struct.pack(f"<{len(shape)}Q", *shape)
    return text(name) + struct.pack("<I", len(shape)) + sizes + struct.pack("<IQ", type_id, offset)


def raw_file(
    values: tuple[bytes, ...] = (),
    tensors: tuple[bytes, ...] = (),
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: bytes = struct.pack("<I", 3),
    num_tensors: int | None = None,
    num_values: int | None = None,
    alignment: int = 32,
) -> bytes:
    counts = (len(tensors) if num_tensors is None else num_tensors, len(values) if num_values is None else num_values)
    header = magic + version + struct.pack("<QQ", *counts) + b"".join(values) + b"".join(tensors)
    return header + bytes(-len(header) % alignment) + data if tensors else header


def read_bytes(folder: Path, content: bytes) -> GGUFFile:
    path = folder / "model.gguf"
    path.write_bytes(content)
    return read_gguf(path)


ONE = tensor_entry("a", (8,), 0, 0)  # eight float32 values
TWO = tensor_entry("b", (8,), 0, 32)
U32 = struct.pack("<I", 7)
