"""The numbers that describe the size of the project, each as the sum of what its files contribute."""

import ast
import json
import re
import statistics
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from syntax import nodes_of_types

from .source import Source, num_lines_of, num_text_lines

# The folders of src/infer in each room: those of the eight rooms, and those from before the move, for older commits.
ROOMS = {
    "top": {""},
    "cli": {"cli", "bench"},
    "serving": {"serving", "server", "protocols", "web_ui", "distributed", "batch_file"},
    "engine": {"engine", "session", "prepare", "runner", "tensor_parallel", "speculation"},
    "models and files": {"models", "files", "model", "catalog", "gguf_export", "checkpoint"},
    "text": {"text", "tokenizer", "grammar", "toolcalls"},
    "compute": {"compute", "ops", "operands", "kvcache", "sampling", "quantization", "backends"},
    "system": {"system"},
}
# Data of tests from before the limits, and records that only guard. All other data may be cases in another form.
UNCOUNTED_DATA = {"agent-requests.json", "ggml-quantiser-errors.json", "ggml-values.json", "hostile-grammars.json"}
UNCOUNTED_DATA |= {"json-schemas.json", "kubernetes-schemas.json", "llama-quantize-types.json", "openai-schemas.json"}
UNCOUNTED_DATA |= {"bad_requests.jsonl", "planted-faults.toml", "promises.toml", "said_answers.json", "surface.json"}
UNCOUNTED_DATA |= {"answers.json", "field-reports.toml"}
# Tables of names. Every other file outside the folder `families` should get what it needs from the row of a family.
FILES_OF_NAMES = {"formats.py", "forms.py", "pre_tokenizers.py", "supported.py", "hub_models.py", "reranker_files.py"}
GGUF_NAMES = ["gemma-embedding", "llama-embed", "mistral3"]  # all others are names of families, perhaps without "_"
NO_NAMES = {"gpt2"}  # families whose names mean more: GGUF files of every byte-level BPE say so
NO_FAMILIES = re.compile("llama[._ ]?cpp|llama-gguf-split|ollama", re.IGNORECASE)  # programs
SYNONYMS = re.compile("Reply|Replies|Query|Queries|Question|Inquiry|Respond")  # `Response…` is the name of OpenAI's API

# min_p stands for all filters: a new one needs a place in each file with this name, but for exports, keywords that are
# generated, the names of GGUF's keys, and a preset of the page.
NO_PLACES = {"__init__.py", "__init__.pyi", "keywords.py", "config.py", "state.js"}

Counts = dict[str, dict[str, int]]  # number → file → contribution


def count(root: Path) -> Counts:
    """Return every number of the repository in this folder."""
    counts: Counts = defaultdict(dict)
    sources = [Source.read(root, path) for path in _files(root / "src" / "infer") if path.suffix == ".py"]
    others = {
        folder: [Source.read(root, path) for path in _files(root / folder) if path.suffix == ".py"]
        for folder in ("tests", "benchmarks", "scripts", "examples")
    }
    for source in sources:
        _add(counts, source.path, numbers_of(source))
    counts["lines of the median file"] = {"": int(statistics.median(source.num_lines for source in sources))}
    for folder, its_sources in others.items():
        counts[f"lines of {folder}"] = {source.path: source.num_code_lines for source in its_sources}
    for source in [*sources, *(each for its_sources in others.values() for each in its_sources)]:
        comments = {f'comments "{words}"': source.num_comments(words) for words in ("noqa", "fmt:")}
        _add(counts, source.path, comments)
    counts["files that name families"] = dict.fromkeys(naming_families(sources), 1)
    _add_other_files(counts, root)
    for name, number in _growing_numbers(root, sources).items():
        counts[name] = {"": number}
    return counts


def totals(counts: Counts) -> dict[str, int]:
    """Return the sum of the contributions to each number."""
    return {name: sum(by_file.values()) for name, by_file in counts.items()}


def numbers_of(source: Source) -> dict[str, int]:
    """Return the contributions of a file of src/infer."""
    lengths = [num_lines_of(function) for function in source.functions]
    is_small = source.num_code_lines < 30 and not source.path.endswith("/__init__.py")
    return {
        f"lines of {room_of(source.path)}": source.num_code_lines,
        "lines of src/infer": source.num_code_lines,
        "statements": source.num_statements,
        "nodes of syntax trees": len(source.nodes),
        "files": 1,
        "files under 30 lines of code": int(is_small),
        "files above 400 lines": int(source.num_lines > 400),
        "files above 600 lines": int(source.num_lines > 600),
        "functions above 40 lines": sum(length > 40 for length in lengths),
        "functions above 50 lines": sum(length > 50 for length in lengths),
        "classes": len(source.class_names),
        'classes named "Answer" or "Ask"': sum(bool(re.search("Answer|Ask", name)) for name in source.class_names),
        "classes named by a synonym of Answer or Ask": sum(bool(SYNONYMS.search(name)) for name in source.class_names),
        "tuples of more than three in signatures": source.num_long_tuples,
        'comments "type: ignore" in src/infer': source.num_comments("type: ignore"),
        'variables named "found"': source.num_variables("found"),
        "places for a sampler filter": is_place(source.path, source.text),
    }


def is_place(path: str, text: str) -> int:
    """Return 1 if a new filter of the sampler needs a place in the file."""
    return int(path.rpartition("/")[2] not in NO_PLACES and "min_p" in text)


def room_of(path: str) -> str:
    """Return the room of a file below src/infer. Raises ValueError for a folder that belongs to none."""
    folder = path.removeprefix("src/infer/").rpartition("/")[0].partition("/")[0]
    for room, folders in ROOMS.items():
        if folder in folders:
            return room
    raise ValueError(f"src/infer/{folder} belongs to no room: add it to ROOMS in scripts/house/sizes.py")


def naming_families(sources: list[Source]) -> Iterator[str]:
    """Yield the files outside the tables that have a family's name in an identifier or in a string."""
    names = [*families(sources) - NO_NAMES, *GGUF_NAMES]
    alternatives = "|".join(re.escape(name).replace("_", "[_-]?") for name in sorted(names, key=len, reverse=True))
    joined = [name.replace("_", "").replace("-", "") for name in names]
    pattern = re.compile(f"(?<![A-Za-z0-9])(?:{alternatives})(?![A-Za-z0-9])", re.IGNORECASE)
    for source in sources:
        *folders, name = source.path.split("/")
        if "families" in folders or name in FILES_OF_NAMES:
            continue
        text = re.sub("[_-]", "", source.text.lower())
        if not any(each in text for each in joined):  # a search of all alternatives takes much longer
            continue
        if any(pattern.search(NO_FAMILIES.sub("", each)) for each in source.names_and_texts()):
            yield source.path


def families(sources: list[Source]) -> set[str]:
    """Return the keys of the table FAMILIES, and of the tables that it takes in."""
    tables = dict[str, ast.Dict]()
    for source in sources:
        for node in nodes_of_types(source.text, ast.AnnAssign):
            match node:
                case ast.AnnAssign(target=ast.Name(id=name), value=ast.Dict() as table):
                    tables[name] = table
    return set(_keys_of("FAMILIES", tables))


def _keys_of(name: str, tables: Mapping[str, ast.Dict]) -> Iterator[str]:
    for key, value in zip(tables[name].keys, tables[name].values, strict=True):
        match key, value:
            case ast.Constant(), _:
                yield str(key.value)
            case None, ast.Name(id=other) if other in tables:
                yield from _keys_of(other, tables)


def _add_other_files(counts: Counts, root: Path) -> None:
    for path in _files(root / "src" / "infer"):
        if path.suffix not in (".py", ".typed"):
            name, text = path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")
            _add(counts, name, {f"lines of {path.suffix} files": num_text_lines(text)})
            _add(counts, name, {"places for a sampler filter": is_place(name, text)})
    data = [path for path in _files(root / "tests" / "data") if path.suffix in (".json", ".jsonl", ".toml")]
    counts["lines of new test data"] = {
        path.relative_to(root).as_posix(): num_text_lines(path.read_text(encoding="utf-8"))
        for path in data
        if path.relative_to(root / "tests" / "data").as_posix() not in UNCOUNTED_DATA
    }


def _growing_numbers(root: Path, sources: list[Source]) -> dict[str, int]:
    """Return the numbers that only rise."""
    faults = tomllib.loads((root / "tests" / "data" / "planted-faults.toml").read_text(encoding="utf-8"))["fault"]
    page = (root / "docs" / "reference" / "models.md").read_text(encoding="utf-8")
    table = page.partition("<!-- what loads: ")[2].partition("<!-- end of what loads -->")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")][1:]
    return {
        "planted faults": len(faults),
        "families": len(families(sources)),
        "rows of docs/reference/models.md": len(rows),
        "settings proven in docs/reference/models.md": sum(len(row[-1].split(", ")) for row in rows),
        **_guarded(root / "tests" / "data"),
    }


def _guarded(data: Path) -> dict[str, int]:
    """Return the numbers of promises with a test and of public rows. Commits before them have none."""
    if not (data / "promises.toml").exists():
        return {}
    promises = tomllib.loads((data / "promises.toml").read_text(encoding="utf-8"))["promise"]
    surface = json.loads((data / "surface.json").read_text(encoding="utf-8"))
    rows = sum(len(rows) for section, rows in surface.items() if section != "removed")
    return {"promises with a test": len(promises), "rows of the public surface": rows}


def _add(counts: Counts, file: str, numbers: Mapping[str, int]) -> None:
    for name, number in numbers.items():
        counts[name][file] = number


def _files(folder: Path) -> list[Path]:
    """Return the files below a folder, without what Python and editors leave there."""
    paths = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return sorted(path for path in paths if not path.name.startswith("."))
