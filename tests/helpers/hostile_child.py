"""Reads thousands of bad files in its own process, where checks of shapes need no time and no memory.

`python hostile_child.py FOLDER MODE…`: one line of JSON says for each mode how many files were read and how many
refused, what escaped, the largest CPU time of one file, and how much memory, how many threads, descriptors and maps of
files were added.
"""

import gc
import json
import random
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import Any

import hostile_files
from extent import IS_SHORT, usual_or_all
from hostile_files import GGUF_KINDS, WRONG_KINDS, places, read_everything, replaced, write_folder, write_gguf
from infer import LLM, InferError, SamplingParams
from infer.models.catalog.explanation import explain
from processor_time import least_processor_seconds

MAX_MESSAGE = 2000
SLOWEST = 0.1  # seconds of processor time for one file
NUM_FLIPS = usual_or_all(600, 10_000)
STEP = 11 if IS_SHORT else usual_or_all(3, 1)  # numbers of kinds are no multiples, so each kind is in some places
CUT = 29 if IS_SHORT else STEP  # bytes between two lengths of a truncated file


def json_of_any_kind(folder: Path, name: str) -> Iterator[tuple[str, Path]]:
    """Yield files of JSON: in each, one place has a value of a wrong kind."""
    write_folder(folder)
    good = json.loads((folder / name).read_text())
    for place, value in islice(product(places(good), WRONG_KINDS), 0, None, STEP):
        (folder / name).write_text(json.dumps(replaced(good, place, value)))
        yield f"{place} = {value!r:.30}", folder


def gguf_of_any_kind(folder: Path) -> Iterator[tuple[str, Path]]:
    keys = [f"llama.{name}" for name in (*hostile_files.GGUF_COUNTS, "rope.freq_base", "rope.scaling.type")]
    keys += ["general.architecture", "general.sampling.temp", "general.sampling.top_k", "tokenizer.chat_template.x"]
    keys += [f"tokenizer.ggml.{name}_token_id" for name in ("bos", "eos", "eot", "unknown", "padding")]
    keys += [f"tokenizer.ggml.add_{name}" for name in ("bos_token", "eos_token", "space_prefix")]
    keys += [f"tokenizer.ggml.{name}" for name in ("model", "pre", "tokens", "merges", "token_type", "scores")]
    for key, (kind, value) in islice(product(keys, GGUF_KINDS.items()), 0, None, STEP):
        yield f"{key} = {kind}", write_gguf(folder / "model.gguf", {key: value})


def _headers(folder: Path) -> list[tuple[Path, Path, int]]:
    """Return a model of each format, its file of weights, and the bytes of its header."""
    gguf, model = write_gguf(folder / "model.gguf", hostile_files.SMALL_VOCABULARY), write_folder(folder / "model")
    weights = model / "model.safetensors"
    of_folder = 8 + int.from_bytes(weights.read_bytes()[:8], "little")
    return [(gguf, gguf, gguf.read_bytes().index(b"\0" * 32)), (model, weights, of_folder)]


def truncated(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield files of both formats that are truncated, one for every byte or every few bytes of their headers."""
    for model, path, header_bytes in _headers(folder):
        with path.open("r+b") as file:
            for size in range(header_bytes, -1, -CUT):
                file.truncate(size)
                yield f"{path.name} of {size} bytes", model


def flipped(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield one to three random bits of a header, or of a file of JSON."""
    draw, targets, model = random.Random(0), _headers(folder), folder / "model"
    names = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")
    targets += [(model, model / name, (model / name).stat().st_size) for name in names]
    for index in range(NUM_FLIPS):
        opened, path, size = targets[index % len(targets)]
        good = path.read_bytes()
        bits = [draw.randrange(8 * size) for _ in range(draw.choice((1, 1, 2, 3)))]
        with path.open("r+b") as file:
            for bit in bits:
                file.seek(bit // 8)
                file.write(bytes([good[bit // 8] ^ 1 << bit % 8]))
        yield f"{path.name}, bits {bits}", opened
        path.write_bytes(good)


def refused_again_and_again(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the same few faults a thousand times, in every stage of loading."""
    faults: list[dict[str, Any]] = [{"config_json": b"{"}, {"tokenizer_json": b"{"}, {"model_safetensors": b"\0" * 100}]
    faults += [{"tokenizer_config_json": {"chat_template": 1}}]
    faults += [{"config_json": hostile_files.CONFIG | {"num_hidden_layers": 2}}]
    models = [write_folder(folder / str(index), **fault) for index, fault in enumerate(faults)]
    cut = write_gguf(folder / "cut.gguf")
    with cut.open("r+b") as file:
        file.truncate(cut.stat().st_size - 1)
    models += [cut, write_gguf(folder / "ends.gguf", {"tokenizer.ggml.merges": hostile_files.gguf_texts(["a"])})]
    for index in range(1000):
        yield f"{models[index % len(models)]}", models[index % len(models)]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def held(folder: Path) -> dict[str, int]:
    """Return the resources that a refused file must not keep."""
    gc.collect()
    own, kinds = Path("/proc/self"), {"threads": "task", "descriptors": "fd"}
    counts = {name: len(list((own / kind).iterdir())) for name, kind in kinds.items()}
    return counts | {"maps": (own / "maps").read_text().count(str(folder))}


def report(mode: str, folder: Path) -> dict[str, Any]:
    if mode == "prompts":
        return prompts_of_any_kind(folder)
    others = {"gguf": gguf_of_any_kind, "truncated": truncated, "flipped": flipped, "again": refused_again_and_again}
    folder.mkdir()
    cases = others[mode](folder) if mode in others else json_of_any_kind(folder, mode)
    before, memory = held(folder), resident_bytes()
    num_read, num_refused, escaped, slowest, largest = 0, 0, [], 0.0, 0
    for name, path in cases:
        start = time.process_time()
        try:
            explain_and_read(path)
            num_read += 1
        except InferError as error:
            num_refused += 1
            if "\n" in str(error) or len(str(error)) > MAX_MESSAGE:
                escaped.append(f"{name}: a message of {len(str(error))} characters: {error!r:.200}")
        except BaseException as error:
            escaped.append(f"{name}: {error!r:.200}")
        seconds = time.process_time() - start
        if seconds >= SLOWEST:
            seconds = least_processor_seconds(partial(try_again, path), SLOWEST)
        slowest = max(slowest, seconds)
        largest = max(largest, resident_bytes() - memory)
    after = held(folder)
    added = {what: after[what] - before[what] for what in before}
    return {"read": num_read, "refused": num_refused, "escaped": escaped, "slowest": slowest, "grown": largest, **added}


def explain_and_read(path: Path) -> None:
    with suppress(InferError):
        explain(path).to_json()
    read_everything(path)


def try_again(path: Path) -> None:
    with suppress(Exception):  # the caller has already checked the error
        explain_and_read(path)


def prompts_of_any_kind(folder: Path) -> dict[str, Any]:
    """Return the results of a small model for prompts that a program may pass by mistake."""
    llm = LLM(write_folder(folder))
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    endless: dict[str, Any] = {"role": "user"}
    endless["content"] = endless
    good = {"role": "user", "content": "a"}
    prompts: list[Any] = [
        *([None], ["x", 5], [1.5], [True], [[]], [-1], [10**30], [good, 5], [good, None], None, 5, "\ud800"),
        *([good | {(1, 2): 3}], [good | {"content": deep}], [endless], [good | {"content": 10**5000}]),
        *([good | {"content": "\ud800"}], [good | {"content": float("nan")}], [good | {1: 2, "1": 3}]),
        *("a", [1, 2], [good], (1, 2)),
    ]
    found: dict[str, Any] = {"escaped": [], "answered": 0, "refused": 0}
    for index, prompt in enumerate(prompts):
        try:
            assert llm.generate(prompt, SamplingParams(max_new_tokens=1, ignore_eos=True)).token_ids
            found["answered"] += 1
        except InferError:
            found["refused"] += 1
        except BaseException as error:
            found["escaped"].append(f"prompt {index}: {error!r:.200}")
    return found


if __name__ == "__main__":
    where = Path(sys.argv[1])
    read_everything(write_folder(where / "first"))
    print(json.dumps({mode: report(mode, where / mode) for mode in sys.argv[2:]}))
