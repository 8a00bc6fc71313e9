"""The models on this machine: installed packages, the hub's local cache, and the folder $INFER_MODELS."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Literal

from infer.compute.operands.architecture import Architecture
from infer.compute.quantization.file_types import FILE_TYPES
from infer.errors import InferError, ModelError
from infer.files import Checkpoint, open_checkpoint
from infer.files.config import config_from_gguf
from infer.files.gguf.gguf import read_gguf
from infer.files.hub.find import installed_models, models_folder
from infer.files.hub.hub import cached_repositories, find_cached, gguf_models, list_files
from infer.files.tensors.tensor_info import TensorInfo
from infer.models.families import make_architecture
from infer.models.memory.memory_estimate import weights_by_type
from infer.models.tensors import expected_shapes

Source = Literal["package", "hub", "folder"]

# Names of mixtures by `general.file_type`.
_FILE_TYPES = {each.number: name for name, each in FILE_TYPES.items()} | {38: "MXFP4", 39: "NVFP4"}


@dataclass(frozen=True)
class ModelAtHand:
    """A model on this machine. `name` is the value for `--model`.

    Values that are only in the file are None if the file cannot be opened.
    """

    name: str
    source: Source
    path: str
    num_bytes: int
    family: str | None = None
    weights: str | None = None  # the type, or the name of the mixture of types
    context: int | None = None
    problem: str | None = None
    generates: bool = True  # False for an encoder

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def models_at_hand() -> Iterator[ModelAtHand]:
    """Yield the models on this machine, sorted by source and name.

    Only headers are opened. Packages in parts are not assembled for this.
    """
    for found, parts in _unopened():
        yield _opened(found, parts)


def names_at_hand() -> Iterator[tuple[str, str]]:
    """Yield the name and the value for `--model` of each model on this machine, without reading its headers."""
    for found, _ in _unopened():
        yield found.name, found.name if found.source == "package" else found.path


def _unopened() -> Iterator[tuple[ModelAtHand, Sequence[Path]]]:
    """Yield each model without the values of its headers, and the parts of a package that are not assembled yet."""
    for name, paths, path in installed_models():
        num_bytes = sum(part.stat().st_size for part in paths)
        yield ModelAtHand(name, "package", str(path), num_bytes), () if path.is_file() else paths
    for name, path in _in_hub_cache():
        yield ModelAtHand(name, "hub", str(path), 0), ()
    own = models_folder()
    for name, place in () if own is None else folder_models(own):
        yield ModelAtHand(name, "folder", place, 0), ()


def _opened(found: ModelAtHand, parts: Sequence[Path]) -> ModelAtHand:
    """Return the model with the values of its headers.

    `parts` are those of a package that are not assembled yet. The first part contains the header of the whole.
    """
    config: Mapping[str, Any]
    try:
        if parts:
            file, num_bytes = read_gguf(parts[0], file_size=found.num_bytes), found.num_bytes
            config, weights = config_from_gguf(file), weights_name(file.metadata, file.tensors)
        else:
            checkpoint = open_checkpoint(Path(found.path))
            config, weights = checkpoint.config, weights_name(checkpoint.metadata, checkpoint.tensors)
            num_bytes = sum(file.size for file in checkpoint.files)
    except InferError as error:
        return replace(found, problem=" ".join(str(error).split()))
    return replace(
        found,
        num_bytes=num_bytes,
        family=str(config.get("model_type")),
        weights=weights,
        context=_context(config),
        generates=_generates(config),
    )


def _context(config: Mapping[str, Any]) -> int | None:
    limits = (config.get(name) for name in ("text_limit", "max_position_embeddings"))
    return min((limit for limit in limits if type(limit) is int and limit), default=None)


def _generates(config: Mapping[str, Any]) -> bool:
    try:
        return not make_architecture(config).reads_whole_texts
    except InferError:  # loading it reports the reason
        return True


def weights_name(metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> str:
    """Return the mixture in a GGUF file's metadata, or the type of most weights. Raises ModelError without weights."""
    number = metadata.get("general.file_type")
    named = _FILE_TYPES.get(number) if type(number) is int else None
    if named is None and not tensors:
        raise ModelError("the model has no tensors: its file may be cut, or hold only a vocabulary")
    return named or weights_by_type(tensors)[0].type


def shown_as(
    model: str | Path, checkpoint: Checkpoint, architecture: Architecture, forms: Sequence[str], max_seq_len: int
) -> str:
    """Return a loaded model in one line: `smollm2, llama 134.5M, Q4_1, context 8192`.

    The type of its weights is the first of `forms` that is not "auto".
    """
    count = sum(prod(shape) for shape in expected_shapes(architecture).values())
    size = f"{count / 1e6:.1f}M" if count < 1e9 else f"{count / 1e9:.2f}B"
    name = model if isinstance(model, str) and not Path(model).exists() else Path(model).name
    weights = next(form for form in forms if form != "auto")
    return f"{name}, {checkpoint.config.get('model_type')} {size}, {weights}, context {max_seq_len}"


def _in_hub_cache() -> Iterator[tuple[str, Path]]:
    for repository, files in cached_repositories():
        if (folder := find_cached(repository)) is not None and folder.is_dir():
            yield str(repository), folder
        for parts in gguf_models(files):
            name = replace(repository, variant=parts[0])
            if (path := find_cached(name)) is not None:
                yield str(name), path


def folder_models(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the name and the path of each model in a folder and in its subfolders."""
    files = list_files(folder)
    for file in files:
        if file.endswith("/config.json"):
            name = file.removesuffix("/config.json")
            yield name, str(folder / name)
    for parts in gguf_models(files):
        yield parts[0], str(folder / parts[0])
