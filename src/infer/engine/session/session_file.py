"""A saved session: a safetensors file with the ids, their cached keys and values, and the messages.

The header's metadata name the format, its version and the fingerprint of the model. The tensors are, in this order:
`token_ids`, the cache's tensors, `record` (JSON), and `digests`, which has one line for the header and one for each
earlier tensor. A file is used only if all digests match.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from infer.errors import InvalidRequestError, ModelError, ModelFormatError
from infer.files.tensors.safetensors import read_with_metadata
from infer.files.tensors.tensor_bytes import NamedTensors, read_tensor, write_safetensors
from infer.files.tensors.tensor_info import TensorInfo
from infer.system.atomic import replacing
from infer.system.json_limits import parse_json

FORMAT, VERSION = "infer-session", "2"
DIGEST_BYTES = 32
MAX_OTHER_BYTES = 256 << 20  # limit of all tensors except the cache's
_CACHE = "cache."


@dataclass(frozen=True)
class Saved:
    """Content of a session file. `tensors` are the cache's, by the cache's names."""

    token_ids: list[int]
    record: dict[str, Any]
    tensors: Mapping[str, Tensor]


def write_session(
    path: Path,
    fingerprint: Mapping[str, str],
    token_ids: Sequence[int],
    record: Mapping[str, Any],
    cache_tensors: Callable[[], NamedTensors],
) -> None:
    """Write a session, replacing the file as a whole. Raises InvalidRequestError if it cannot be written."""
    try:
        text = json.dumps(record).encode()
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"a session can be saved only if its messages are JSON: {error}") from error
    digests: list[bytes] = []

    def tensors() -> Iterator[tuple[str, Tensor]]:
        num_blocks = 3  # the header, the ids and the record
        yield "token_ids", torch.tensor(token_ids, dtype=torch.int64)
        for name, tensor in cache_tensors():
            num_blocks += 1
            yield _CACHE + name, tensor
        yield "record", torch.frombuffer(bytearray(text), dtype=torch.uint8)
        known = b"".join(digests).ljust(num_blocks * DIGEST_BYTES, b"\0")
        yield "digests", torch.frombuffer(bytearray(known), dtype=torch.uint8).reshape(num_blocks, DIGEST_BYTES)

    metadata = {"format": FORMAT, "version": VERSION, "fingerprint": json.dumps(fingerprint, sort_keys=True)}
    try:
        with replacing(path) as file:
            write_safetensors(file, metadata, tensors, lambda block: digests.append(_digest(block)))
    except OSError as error:
        raise InvalidRequestError(f"the session cannot be saved to {path}: {error.strerror}") from error


def read_session(path: Path, fingerprint: Mapping[str, str], max_cache_bytes: int) -> Saved:
    """Return a saved session.

    Raises InvalidRequestError if the file is damaged, belongs to another model or version, or has more than
    `max_cache_bytes` of a cache.
    """
    try:
        return _read(path, fingerprint, max_cache_bytes)
    except ModelFormatError as error:
        raise InvalidRequestError(f"{path} is not a complete saved session: {error.field}: {error.problem}") from error
    except ModelError as error:
        raise InvalidRequestError(f"the session cannot be loaded: {error}") from error


def _read(path: Path, fingerprint: Mapping[str, str], max_cache_bytes: int) -> Saved:
    infos, metadata, head = read_with_metadata(path)
    if metadata.get("format") != FORMAT:
        raise ModelFormatError(path, "format", f"expected {FORMAT!r}, got {metadata.get('format')!r:.80}")
    if metadata.get("version") != VERSION:
        problem = (
            f"expected {VERSION}, got {metadata.get('version')!r:.80}: it was saved by another version of infer. "
            "Load it there and save its messages as JSON, or begin a new session"
        )
        raise ModelFormatError(path, "version", problem)
    blocks = sorted(infos.values(), key=lambda tensor: tensor.offset)
    _check_sizes(path, blocks, max_cache_bytes)
    digests = _read_digests(path, blocks)
    if _digest(head) != digests[0]:
        raise ModelFormatError(path, "header", "is damaged: its checksum differs")
    _check_fingerprint(path, metadata, fingerprint)
    tensors = {
        block.name: read_tensor(block, partial(_check_digest, block, digest))
        for block, digest in zip(blocks[:-1], digests[1:], strict=True)
    }
    return _interpret(path, tensors)


def _check_sizes(path: Path, blocks: Sequence[TensorInfo], max_cache_bytes: int) -> None:
    """Check the sizes before anything is allocated."""
    cache_bytes = sum(block.num_bytes for block in blocks if block.name.startswith(_CACHE))
    other_bytes = sum(block.num_bytes for block in blocks) - cache_bytes
    if cache_bytes > max_cache_bytes:
        problem = f"expected at most {max_cache_bytes} bytes, the size for this context length, got {cache_bytes}"
        raise ModelFormatError(path, "cache", problem)
    if other_bytes > MAX_OTHER_BYTES:
        raise ModelFormatError(path, "record", f"expected at most {MAX_OTHER_BYTES} bytes, got {other_bytes}")


def _check_digest(tensor: TensorInfo, digest: bytes, block: memoryview) -> None:
    if _digest(block) != digest:
        raise ModelFormatError(tensor.path, f"block {tensor.name!r:.80}", "is damaged: its checksum differs")


def _read_digests(path: Path, blocks: Sequence[TensorInfo]) -> list[bytes]:
    if not blocks or (blocks[-1].name, blocks[-1].type) != ("digests", "U8"):
        raise ModelFormatError(path, "digests", "are missing")
    if blocks[-1].shape != (len(blocks), DIGEST_BYTES):
        problem = f"expected {len(blocks)} of {DIGEST_BYTES} bytes, got the shape {blocks[-1].shape}"
        raise ModelFormatError(path, "digests", problem)
    return [bytes(line) for line in read_tensor(blocks[-1]).numpy()]


def _check_fingerprint(path: Path, metadata: Mapping[str, Any], fingerprint: Mapping[str, str]) -> None:
    saved = parse_json(path, str(metadata.get("fingerprint")).encode())
    names = sorted(name for name in {*saved, *fingerprint} if saved.get(name) != fingerprint.get(name))
    if names:
        problem = f"was saved with another {', '.join(names)}: load it with the model and settings that saved it"
        raise ModelFormatError(path, "model", problem)


def _interpret(path: Path, tensors: Mapping[str, Tensor]) -> Saved:
    ids, record = tensors.get("token_ids"), tensors.get("record")
    if ids is None or record is None or ids.dtype != torch.int64 or ids.dim() != 1 or record.dtype != torch.uint8:
        raise ModelFormatError(path, "token_ids", "or the record is missing, or has another type")
    return Saved(
        ids.tolist(),
        parse_json(path, record.numpy().tobytes()),
        {name.removeprefix(_CACHE): tensor for name, tensor in tensors.items() if name.startswith(_CACHE)},
    )


def _digest(block: bytes | memoryview) -> bytes:
    return hashlib.blake2b(block, digest_size=DIGEST_BYTES).digest()
