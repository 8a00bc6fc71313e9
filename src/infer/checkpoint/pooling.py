"""Pooling of an embedding model: how the states of a text's tokens become one vector, as the model's files say."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infer.outputs import Pooling
from infer.system.json_file import MAX_BYTES, inside, parse_json, read_json_file, read_whole

_PREFIX = "pooling_mode_"
# Of sentence-transformers: names of its flags, and of its newer `pooling_mode`.
_POOLING_BY_MODE: dict[str, Pooling] = {"mean_tokens": "mean", "mean": "mean", "lasttoken": "last"}
_POOLING_BY_NUMBER: dict[int, Pooling] = {1: "mean", 3: "last"}  # llama.cpp's enum llama_pooling_type
_COMPUTED = {"Transformer", "Pooling", "Normalize"}  # of sentence-transformers' modules: others have weights


def pooling_from_folder(folder: Path) -> Pooling | None:
    """Return the pooling of an embedding model, or None.

    None means that the model was not made for embeddings, or that its pooling or modules are not supported here.
    """
    if not (path := folder / "modules.json").exists():
        return None
    text = read_whole(inside(folder, path.name), MAX_BYTES)
    modules = parse_json(path, b'{"modules": ' + text + b"}")["modules"]  # the file is a list
    if not (isinstance(modules, list) and all(isinstance(each, dict) for each in modules)):
        return None
    path_by_kind = {str(each.get("type")).rpartition(".")[2]: str(each.get("path")) for each in modules}
    if "Pooling" not in path_by_kind or not path_by_kind.keys() <= _COMPUTED:
        return None
    config = read_json_file(inside(folder, f"{path_by_kind['Pooling']}/config.json"))
    modes = [name.removeprefix(_PREFIX) for name, value in config.items() if name.startswith(_PREFIX) and value]
    if (named := config.get("pooling_mode")) is not None:
        modes = named if isinstance(named, list) else [named]
    pooling = _POOLING_BY_MODE.get(str(modes[0])) if len(modes) == 1 else None
    is_partial = config.get("include_prompt") is False  # the mean is of the tokens after a prompt
    return None if pooling == "mean" and is_partial else pooling


def pooling_from_gguf(metadata: Mapping[str, Any]) -> Pooling | None:
    number = metadata.get(f"{metadata['general.architecture']}.pooling_type")
    return _POOLING_BY_NUMBER.get(number) if isinstance(number, int) else None
