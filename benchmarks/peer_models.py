"""The files that bench_peers compares on: two as packages ship them, the same requantised, one of random weights.

Files that are made lie in a cache folder outside the repository and are made once.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from infer.checkpoint import resolve
from infer.checkpoint.gguf import read_gguf
from infer.errors import InvalidRequestError

MODELS = (  # those first that most people have
    "smollm2-q4_k_m", "smollm2-q4_0", "smollm2-q8_0", "gemma3-270m-q4_k_m",
    "smollm2-q4_1", "smollm2-f16", "llama-1b-q4_0", "llama-1b-q8_0",
)  # fmt: skip
SHIPPED = {"smollm2-q4_1": "smollm2", "gemma3-270m-q4_k_m": "gemma3-270m"}

Requantise = Callable[[Path, str, Path], None]  # source, type, target


@dataclass(frozen=True)
class PeerModel:
    name: str
    path: Path
    weight_bytes: int  # read for every token
    layer_parameters: int  # multiplied for every token of a prompt
    kv_bytes: int  # for each token of context, with 16-bit keys and values


class MissingModelError(Exception):
    """Says what to install."""


def make_model(name: str, requantise: Requantise | None) -> PeerModel:
    """A model of `MODELS`. Raises MissingModelError where a package is missing; requantising is the peer's work."""
    base, _, type_name = name.rpartition("-")
    try:
        if name in SHIPPED:
            return describe(name, resolve(SHIPPED[name]))
        if base == "llama-1b":
            return describe(name, made(name, partial(write_random_llama, type_name.upper())))
        if requantise is None:
            raise MissingModelError("needs llama-cpp-python (--llama-python)")
        return describe(name, made(name, partial(requantise, resolve(base), type_name.upper())))
    except InvalidRequestError as error:
        raise MissingModelError(str(error)) from None


def write_random_llama(type_name: str, path: Path) -> None:
    try:
        from random_llama import write_random_llama
    except ModuleNotFoundError:
        raise MissingModelError("needs the package gguf: pip install gguf") from None
    write_random_llama(path, type_name)


def cache_folder() -> Path:
    folder = Path(os.environ.get("INFER_BENCH_MODELS") or Path.home() / ".cache" / "infer-bench")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def describe(name: str, path: Path) -> PeerModel:
    file = read_gguf(path)
    matrices = {name: info for name, info in file.tensors.items() if len(info.shape) == 2}
    is_tied = "output.weight" not in matrices
    read = [info for name, info in matrices.items() if is_tied or name != "token_embd.weight"]
    family = file.metadata["general.architecture"]

    def value(key: str, otherwise: int = 0) -> int:
        return file.metadata.get(f"{family}.{key}", otherwise)

    heads = value("attention.head_count")
    head_dim = value("attention.key_length", value("embedding_length") // heads)
    return PeerModel(
        name=name,
        path=path,
        weight_bytes=sum(info.num_bytes for info in read),
        layer_parameters=sum(
            info.shape[0] * info.shape[1] for name, info in matrices.items() if name.startswith("blk.")
        ),
        kv_bytes=value("block_count") * 2 * value("attention.head_count_kv", heads) * head_dim * 2,
    )


def made(name: str, write: Callable[[Path], None]) -> Path:
    path = cache_folder() / f"{name}.gguf"
    if not path.exists():
        unfinished = path.with_suffix(".part")
        write(unfinished)
        unfinished.rename(path)
    return path
