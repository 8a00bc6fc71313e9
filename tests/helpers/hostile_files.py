"""A small model as a folder and as a GGUF file, and hostile or careless changes of both."""

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from byte_tokenizer import write_byte_tokenizer
from gguf_files import HEAD_DIM, HEADS, HIDDEN, INTERMEDIATE, KV_HEADS, raw_file, tensor_entry, text
from infer import InvalidRequestError, SamplingParams, Tokenizer
from infer.files import Checkpoint, open_checkpoint
from infer.files.generation_config import sampling_defaults
from infer.files.tensors.lazy_weights import LazyWeights
from infer.models.families import make_architecture
from infer.models.from_checkpoint import load_tokenizer
from infer.models.tensors import check_tensors

NUM_TOKENS = 258  # tokens of the GGUF file: bytes, "ab" and the end of a turn; the folder has one more
VOCAB_SIZE = 262  # rows of the embedding
CONFIG: dict[str, Any] = {"model_type": "llama", "vocab_size": VOCAB_SIZE, "hidden_size": HIDDEN, "head_dim": HEAD_DIM}
CONFIG |= {"intermediate_size": INTERMEDIATE, "num_hidden_layers": 1, "num_attention_heads": HEADS}
CONFIG |= {"num_key_value_heads": KV_HEADS, "max_position_embeddings": 128, "rms_norm_eps": 1e-5}
CONFIG |= {"rope_theta": 10_000.0, "tie_word_embeddings": True}
LLAMA3 = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "original_max_position_embeddings": 64}
WRONG_KINDS: tuple[Any, ...] = (
    *(None, True, 0, -1, 1.5, 10**30, 10**400, float("inf"), float("nan"), "", "x", "\0", "\ud800"),
    *([], [1], ["a"], [[]], {}, {"a": 1}, {"content": 1}, [{"name": "default", "template": 1}], [None]),
)


_TENSORS = {  # Hugging Face's name: GGUF's name and the shape
    "model.embed_tokens": ("token_embd", (VOCAB_SIZE, HIDDEN)),
    "model.norm": ("output_norm", (HIDDEN,)),
    "model.layers.0.input_layernorm": ("blk.0.attn_norm", (HIDDEN,)),
    "model.layers.0.post_attention_layernorm": ("blk.0.ffn_norm", (HIDDEN,)),
    "model.layers.0.self_attn.q_proj": ("blk.0.attn_q", (HEADS * HEAD_DIM, HIDDEN)),
    "model.layers.0.self_attn.k_proj": ("blk.0.attn_k", (KV_HEADS * HEAD_DIM, HIDDEN)),
    "model.layers.0.self_attn.v_proj": ("blk.0.attn_v", (KV_HEADS * HEAD_DIM, HIDDEN)),
    "model.layers.0.self_attn.o_proj": ("blk.0.attn_output", (HIDDEN, HEADS * HEAD_DIM)),
    "model.layers.0.mlp.gate_proj": ("blk.0.ffn_gate", (INTERMEDIATE, HIDDEN)),
    "model.layers.0.mlp.up_proj": ("blk.0.ffn_up", (INTERMEDIATE, HIDDEN)),
    "model.layers.0.mlp.down_proj": ("blk.0.ffn_down", (HIDDEN, INTERMEDIATE)),
}


@cache
def tensors() -> dict[str, Tensor]:
    """Return one layer, under Hugging Face's names."""
    noise = torch.Generator().manual_seed(0)
    shapes = {f"{name}.weight": shape for name, (_, shape) in _TENSORS.items()}
    return {name: torch.randn(shape, generator=noise) * HIDDEN**-0.5 for name, shape in shapes.items()}


def write_folder(folder: Path, **files: Any) -> Path:
    """Write a folder in which `files` replace files of a good model.

    `config_json=…` is bytes, a value to dump as JSON, a path to link to, or None to leave out the file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_byte_tokenizer(folder, merges=[("a", "b")], chat_template="{{ messages[0].content }}")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "generation_config.json").write_text('{"eos_token_id": 256, "temperature": 0.5}')
    (folder / "model.safetensors").write_bytes(save(tensors(), {"format": "pt"}))
    for name, content in files.items():
        path = folder / ".".join(name.rsplit("_", 1))
        path.unlink(missing_ok=True)
        if isinstance(content, Path):
            path.symlink_to(content)
        elif content is not None:
            path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return folder


def write_gguf(path: Path, changes: Mapping[str, bytes | None] = {}) -> Path:
    """Return a byte tokenizer and one layer; `changes` are key-values by name, encoded, or None to leave one out."""
    kept = {key: value for key, value in {**_gguf_values(), **changes}.items() if value is not None}
    entries, data = [], b""
    for (name, _), tensor in zip(_TENSORS.values(), tensors().values(), strict=True):
        entries.append(tensor_entry(f"{name}.weight", tuple(tensor.shape[::-1]), 0, len(data)))
        data += tensor.numpy().tobytes()
    path.write_bytes(raw_file(tuple(text(key) + value for key, value in kept.items()), tuple(entries), data))
    return path


@cache
def _gguf_values() -> dict[str, bytes]:
    with TemporaryDirectory() as folder:
        write_byte_tokenizer(Path(folder), merges=[("a", "b")])
        vocab = json.loads((Path(folder) / "tokenizer.json").read_text())["model"]["vocab"]
    return {
        "general.architecture": gguf_text("llama"),
        **{f"llama.{key}": gguf_number(value) for key, value in GGUF_COUNTS.items()},
        "llama.attention.layer_norm_rms_epsilon": gguf_real(1e-5),
        "tokenizer.ggml.model": gguf_text("gpt2"),
        "tokenizer.ggml.pre": gguf_text("smollm"),
        "tokenizer.ggml.tokens": gguf_texts([*sorted(vocab, key=vocab.__getitem__), "<|im_end|>"]),
        "tokenizer.ggml.merges": gguf_texts(["a b"]),
        "tokenizer.ggml.token_type": gguf_numbers([1] * (NUM_TOKENS - 1) + [3]),
        "tokenizer.ggml.eos_token_id": gguf_number(NUM_TOKENS - 1),
        "tokenizer.chat_template": gguf_text("{{ messages[0].content }}"),
    }


GGUF_COUNTS = {
    "block_count": 1, "context_length": 128, "embedding_length": HIDDEN, "feed_forward_length": INTERMEDIATE,
    "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS, "attention.key_length": HEAD_DIM,
}  # fmt: skip


def gguf_text(value: str) -> bytes:
    return _little(8, 4) + text(value)


def gguf_number(value: int) -> bytes:
    return _little(11, 4) + value.to_bytes(8, "little", signed=True)


def gguf_real(value: float) -> bytes:
    return _little(12, 4) + torch.tensor(value, dtype=torch.float64).numpy().tobytes()


def gguf_flag(value: bool) -> bytes:
    return _little(7, 4) + bytes([value])


def gguf_texts(values: list[str]) -> bytes:
    return _little(9, 4) + _little(8, 4) + _little(len(values), 8) + b"".join(map(text, values))


def gguf_numbers(values: list[int]) -> bytes:
    return _little(9, 4) + _little(5, 4) + _little(len(values), 8) + b"".join(_little(each, 4) for each in values)


def _little(value: int, size: int) -> bytes:
    return value.to_bytes(size, "little", signed=value < 0)


# A header that is short enough to change each byte.
SMALL_VOCABULARY = {
    "tokenizer.ggml.tokens": gguf_texts(["a", "b", "ab", "<e>"]),
    "tokenizer.ggml.token_type": gguf_numbers([1, 1, 1, 3]),
    "tokenizer.ggml.eos_token_id": gguf_number(3),
}
GGUF_KINDS = {"a text": gguf_text("x"), "an empty text": gguf_text(""), "a number": gguf_number(7)}
GGUF_KINDS |= {"zero": gguf_number(0)}
GGUF_KINDS |= {"a negative number": gguf_number(-1), "the largest number": gguf_number(2**63 - 1)}
GGUF_KINDS |= {"NaN": gguf_real(float("nan")), "infinity": gguf_real(float("inf")), "a flag": gguf_flag(True)}
GGUF_KINDS |= {"a list of texts": gguf_texts(["x", "a a", ""]), "an empty list": gguf_texts([])}
GGUF_KINDS |= {"a list of numbers": gguf_numbers([1, -1])}
GGUF_KINDS |= {"a list of a number for each token": gguf_numbers([3] * NUM_TOKENS)}
GGUF_KINDS |= {"a list of one text for each token": gguf_texts(["a"] * NUM_TOKENS)}


def read_everything(path: Path) -> Tokenizer:
    """Read and check a model as loading does before it packs a weight, and encode and decode a text."""
    checkpoint = read_network(path)
    tokenizer = load_tokenizer(checkpoint)
    use(tokenizer)
    return tokenizer


def read_network(path: Path) -> Checkpoint:
    checkpoint = open_checkpoint(path)
    SamplingParams(**sampling_defaults(checkpoint.generation_config))
    weights = LazyWeights(checkpoint.tensors)
    check_tensors(make_architecture(checkpoint.config), weights)
    for name in weights:
        assert weights[name].data.numel() > 0
    return checkpoint


def use(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("Hello, 12 世界 <eos>\0")
    tokenizer.decode(ids)
    with suppress(InvalidRequestError):  # few tokenizers have a format for pairs
        tokenizer.encode_pair("Hello", "12 世界")
    detokenizer = tokenizer.make_detokenizer()
    for token_id in ids:
        detokenizer.push(token_id)
    if tokenizer.chat_template is not None:
        tokenizer.encode_chat([{"role": "user", "content": "hi <|im_end|>"}])


def places(value: Any, *before: Any) -> Iterator[tuple[Any, ...]]:
    """Yield the places of replacements: every key, two keys of a vocabulary, and the first two items of every list."""
    if isinstance(value, dict):
        for key in list(value)[: 2 if len(value) > 200 else None]:
            yield (*before, key)
            yield from places(value[key], *before, key)
    elif isinstance(value, list):
        for index in range(min(2, len(value))):
            yield (*before, index)
            yield from places(value[index], *before, index)


def replaced(value: Any, place: tuple[Any, ...], new: Any) -> Any:
    """Return a copy with another value in that place."""
    if not place:
        return new
    copy = value.copy()
    copy[place[0]] = replaced(value[place[0]], place[1:], new)
    return copy
