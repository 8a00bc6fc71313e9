"""A model of Llama-3.2-1B's shape with random weights: a large file that needs no download. Needs the package gguf."""

from pathlib import Path

import gguf
import numpy as np

HIDDEN, MLP, LAYERS, HEADS, KV_HEADS, VOCAB = 2048, 8192, 16, 32, 8, 128_256  # Llama-3.2-1B
WEIGHT_DEVIATION = 0.02
STEP_BY_TYPE = {"Q4_0": WEIGHT_DEVIATION / 4.6, "Q8_0": WEIGHT_DEVIATION / 74}  # uniform integers deviate by that much


def write_random_llama(path: Path, type_name: str) -> None:
    """Random blocks of one type in every matrix, with a vocabulary that is only as large as the real one."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(8192)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(MLP)
    writer.add_block_count(LAYERS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(500_000)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCAB)
    add_vocabulary(writer)
    random = np.random.default_rng(42)
    for tensor, (rows, columns) in matrix_shapes().items():
        kind = gguf.GGMLQuantizationType[type_name]
        writer.add_tensor(tensor, random_blocks(random, rows, columns, kind), raw_dtype=kind)
    for tensor in norm_names():
        writer.add_tensor(tensor, np.ones(HIDDEN, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def matrix_shapes() -> dict[str, tuple[int, int]]:
    kv = HIDDEN * KV_HEADS // HEADS
    layer = {
        "attn_q": (HIDDEN, HIDDEN),
        "attn_k": (kv, HIDDEN),
        "attn_v": (kv, HIDDEN),
        "attn_output": (HIDDEN, HIDDEN),
        "ffn_gate": (MLP, HIDDEN),
        "ffn_up": (MLP, HIDDEN),
        "ffn_down": (HIDDEN, MLP),
    }
    layers = {f"blk.{i}.{part}.weight": shape for i in range(LAYERS) for part, shape in layer.items()}
    return {"token_embd.weight": (VOCAB, HIDDEN)} | layers


def norm_names() -> list[str]:
    return [*(f"blk.{i}.{part}_norm.weight" for i in range(LAYERS) for part in ("attn", "ffn")), "output_norm.weight"]


def random_blocks(random: np.random.Generator, rows: int, columns: int, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Both types begin a block with its scale in 16 bits; every other byte may be anything."""
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (rows, columns // block_size, block_bytes), dtype=np.uint8)
    blocks[..., :2] = np.frombuffer(np.float16(STEP_BY_TYPE[kind.name]).tobytes(), np.uint8)
    return blocks.reshape(rows, -1)


def add_vocabulary(writer: gguf.GGUFWriter) -> None:
    """A byte-level vocabulary of single bytes, one merge, and fillers."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = [chr(byte) for byte in printable] + [chr(256 + i) for i in range(len(others))]
    tokens = [*characters, "Ġt"]
    num_fillers = VOCAB - len(tokens) - 2
    tokens += [f"<filler {i}>" for i in range(num_fillers)] + ["<|begin_of_text|>", "<|end_of_text|>"]
    normal, control = gguf.TokenType.NORMAL, gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(tokens)
    writer.add_token_types([normal] * (VOCAB - 2) + [control] * 2)
    writer.add_token_merges(["Ġ t"])
    writer.add_bos_token_id(VOCAB - 2)
    writer.add_eos_token_id(VOCAB - 1)
