"""Files → hyperparameters and named weights. Nothing above this package knows what format a model came in.

Opening reads headers only; weights are views of the mapped files, in the types in which they are stored. Names are
those of `names`, and what a format does to weights (GGUF's order of q's and k's rows, Gemma's w for 1 + w) is undone.
"""

import hashlib
import mmap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from infer.checkpoint.config import (
    config_from_folder,
    config_from_gguf,
    generation_config_from_folder,
    generation_config_from_gguf,
)
from infer.checkpoint.gguf import GGUFFile, read_gguf
from infer.checkpoint.mapped import release_pages
from infer.checkpoint.names import is_norm, names_from_gguf, names_from_hugging_face
from infer.checkpoint.resolve import resolve
from infer.checkpoint.safetensors import read_safetensors_folder
from infer.checkpoint.stored import LazyWeights, as_float32, in_half_order, rename
from infer.errors import ModelFormatError
from infer.weights import StoredWeight

__all__ = ["Checkpoint", "open_checkpoint", "resolve"]

_ROWS_IN_PAIRS = frozenset({"llama"})  # GGUF architectures whose converter reorders the rows of q and k
_NUM_SAMPLES, _SAMPLE_BYTES, _HEAD_BYTES = 1024, 64, 1 << 20  # of a file, to tell it from others
_NORMS_LESS_ONE = frozenset({"gemma", "gemma2", "gemma3", "gemma3_text"})  # Hugging Face's, not GGUF's


@dataclass(frozen=True)
class Checkpoint:
    """A model's files, open. `config` and `generation_config` are in the names of Hugging Face's JSON files."""

    path: Path  # the folder, or the .gguf file
    config: Mapping[str, Any]
    metadata: Mapping[str, Any] = field(repr=False)  # GGUF's key-values, for the tokenizer; {} for a folder
    weights: Mapping[str, StoredWeight] = field(repr=False)
    generation_config: Mapping[str, Any]  # {} if the model has none
    contents: tuple[mmap.mmap, ...] = field(default=(), repr=False)  # the mapped files of the weights

    def release_pages(self) -> None:
        """Give the memory of weights that were read back to the system; they can be read again at any time."""
        for content in self.contents:
            release_pages(content)

    def fingerprint(self) -> str:
        """Tells these weights from others without reading them all: sizes, headers, and samples all over the files."""
        digest = hashlib.blake2b(digest_size=16)
        for content in self.contents:
            size = len(content)
            digest.update(size.to_bytes(8, "little") + content[:_HEAD_BYTES])
            for index in range(_NUM_SAMPLES):
                start = size * index // _NUM_SAMPLES
                digest.update(content[start : start + _SAMPLE_BYTES])
        return digest.hexdigest()


def open_checkpoint(model_id: str | Path) -> Checkpoint:
    """The model that a folder, a .gguf file or the name of an installed package holds.

    InvalidRequestError if there is no such thing, ModelError (ModelFormatError, UnsupportedModelError) if it is no
    model that we can read.
    """
    path = resolve(model_id)
    return _open_folder(path) if path.is_dir() else _open_gguf(path)


def _open_folder(folder: Path) -> Checkpoint:
    config = config_from_folder(folder)
    tensors = read_safetensors_folder(folder)
    added = 1.0 if config.get("model_type") in _NORMS_LESS_ONE else 0.0
    makers: dict[str, Callable[[], StoredWeight]] = {}
    for name, stored in rename(folder, names_from_hugging_face(tensors)).items():
        tensor = tensors[stored]
        tensor.check_supported()
        makers[name] = partial(_plain, tensor.weight, len(tensor.shape), added if is_norm(name) else 0.0)
    contents = tuple({id(tensor.content): tensor.content for tensor in tensors.values()}.values())
    return Checkpoint(folder, config, {}, LazyWeights(makers), generation_config_from_folder(folder), contents)


def _open_gguf(path: Path) -> Checkpoint:
    file = read_gguf(path)
    config = config_from_gguf(file)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    makers: dict[str, Callable[[], StoredWeight]] = {}
    for name, stored in rename(path, names_from_gguf(file.tensors)).items():
        shape = file.tensors[stored].shape
        make = partial(_plain, partial(file.weight, stored), len(shape))
        projection = name.rpartition(".")[0].rpartition(".")[2]
        if projection in heads and file.metadata["general.architecture"] in _ROWS_IN_PAIRS:
            _check_heads(file, stored, heads[projection])
            make = partial(_in_half_order, make, heads[projection])
        makers[name] = make
    generation_config = generation_config_from_gguf(file)
    return Checkpoint(path, config, file.metadata, LazyWeights(makers), generation_config, (file.content,))


def _plain(make: Callable[[], StoredWeight], num_dimensions: int, added: float = 0.0) -> StoredWeight:
    return as_float32(make(), added) if num_dimensions == 1 else make()


def _in_half_order(make: Callable[[], StoredWeight], num_heads: int) -> StoredWeight:
    return in_half_order(make(), num_heads)


def _check_heads(file: GGUFFile, name: str, num_heads: int) -> None:
    shape = file.tensors[name].shape
    if len(shape) > 2 or shape[0] % (2 * num_heads):
        problem = f"expected rows for {num_heads} heads of even size, got the shape {shape}"
        raise ModelFormatError(file.path, f"tensor {name!r:.80}", problem)
