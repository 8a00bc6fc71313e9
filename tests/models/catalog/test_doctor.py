"""Claims about `infer doctor`: it names each planted fault in a line, and finds none in healthy files."""

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from commands import refused, run
from converted_encoders import write_gguf
from encoder_models import BY_NAME, make_encoder
from encoder_tokenizers import as_bert_gguf, as_xlmr_gguf, make_bert_folder, make_xlmr_folder
from gguf_files import random_tensors, write_model
from hostile_child import gguf_of_any_kind
from infer.cli import main
from infer.compute.quantization.ggml_blocks import numbers_of, scales_of
from infer.compute.quantization.ggml_types import BLOCK_FIELDS, BLOCK_TYPES
from infer.errors import InferError
from infer.files import open_checkpoint
from infer.models.catalog import doctor
from infer.models.catalog.doctor import examine, far_from_median
from quantised_folders import by_name, save, write_quantised
from tiny import TINY, make_tiny

NUM_LAYERS = 6
DOWN, EMBEDDING = "blk.3.ffn_down.weight", "token_embd.weight"
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}:{{ m.content }}<|im_end|>{% endfor %}"
LETTERS = [*"<|>_abcdefghijklmnopqrstuvwxyz:HAé"]
TOKENS = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "ab", *LETTERS]
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
KEYS: dict[str, Any] = {"model": "gpt2", "pre": "smollm", "tokens": TOKENS, "merges": ["a b"], "add_bos_token": False}
KEYS |= {"token_type": [CONTROL] * 5 + [NORMAL] * 35, "bos_token_id": 1, "eos_token_id": 4, "padding_token_id": 0}


def all_tensors() -> dict[str, np.ndarray]:
    layers = {layer: random_tensors("llama", layer) for layer in range(NUM_LAYERS)}
    return {name.replace("blk.0.", f"blk.{at}."): x for at, own in layers.items() for name, x in own.items()}


def write_file(
    folder: Path,
    keys: Mapping[str, Any] | None = None,
    change: Callable[[dict[str, np.ndarray]], object] = lambda tensors: None,
    template: str | None = TEMPLATE,
    quantise: frozenset[str] = frozenset(),
    name: str = "Tiny",
) -> Path:
    """Write a model of six layers. A key of None is left out."""

    def extend(writer: gguf.GGUFWriter) -> None:
        writer.add_name(name)
        add = {list: writer.add_array, str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32}
        for key, value in (KEYS | dict(keys or {})).items():
            if value is not None:
                add[type(value)](f"tokenizer.ggml.{key}", value)
        if template is not None:
            writer.add_chat_template(template)

    tensors = all_tensors()
    change(tensors)
    return write_model(folder / "m.gguf", tensors=tensors, extend=extend, num_layers=NUM_LAYERS, quantise=quantise)


def make_folder(folder: Path, **generation: Any) -> Path:
    make_tiny(next(tiny for tiny in TINY if tiny.name == "llama"), folder)
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    texts = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
    tokenizer = {
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []},
        "added_tokens": [{"id": 2 + index, "content": text, **special} for index, text in enumerate(texts)],
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "chat_template": TEMPLATE}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 5], **generation}))
    return folder


def lines_of(path: Path) -> list[str]:
    """Return the lines about a file with faults."""
    return run("doctor", path, status=1).out.splitlines()


def findings_of(path: Path) -> tuple[Any, ...]:
    return examine(path, lambda done, total: None).findings


def write_bytes(path: Path, name: str, offset: int, content: bytes) -> None:
    """Overwrite bytes of a tensor in a file."""
    (info,) = (info for info in open_checkpoint(path).tensors.values() if info.name == name)
    with path.open("r+b") as file:
        file.seek(info.offset + offset)
        file.write(content)


def test_healthy_files_have_no_faults(tmp_path: Path) -> None:
    """Markers that may be text may be user-defined. Rows of padding and of unwritten control tokens may be zero."""
    file, folder = write_file(tmp_path, quantise=frozenset({DOWN})), make_folder(tmp_path / "folder")
    for model in (file, folder, "smollm2"):
        assert run("doctor", model).out.startswith("no faults found in ")
    found = run("doctor", file, "--json").json()
    assert (found["findings"], found["requantise"]) == ([], [])
    assert (found["num_tokens"], found["num_tensors"]) == (40, len(all_tensors()))
    keys = {"token_type": [CONTROL] * 3 + [USER_DEFINED, CONTROL] + [NORMAL] * 35}
    assert findings_of(write_file(tmp_path, keys, change=_fill(EMBEDDING, 0.0, slice(0, 3)))) == ()


TOKENIZER_FAULTS = [
    ({"eos_token_id": 99}, "tokenizer.ggml.eos_token_id: 99 is outside the vocabulary of 40 tokens"),
    ({"bos_token_id": 40, "add_bos_token": True}, "tokenizer.ggml.bos_token_id: 40 is outside the vocabulary"),
    ({"eot_token_id": 41}, "tokenizer.ggml.eot_token_id: 41 is outside the vocabulary"),
    ({"eos_token_id": None}, "tokenizer.ggml.eos_token_id: it is missing, so no token ends an answer"),
    ({"bos_token_id": None, "add_bos_token": True}, "tokenizer.ggml.bos_token_id: it is missing"),
    ({"tokens": [*TOKENS, "more"], "token_type": [*KEYS["token_type"], NORMAL]},
     "tokenizer.ggml.tokens: 41 tokens, but the embedding has 40 rows; every token must have one"),
    ({"tokens": TOKENS[:-1], "token_type": KEYS["token_type"][:-1]},
     "tokenizer.ggml.tokens: 39 tokens, but the embedding has 40 rows; every row must have a token"),
    ({"eos_token_id": 2},
     "tokenizer.chat_template: it ends a turn with '<|im_end|>' (4), but the ids that end an answer are 2: add 4 "),
    ({"token_type": [CONTROL] * 4 + [USER_DEFINED] + [NORMAL] * 35},
     "tokenizer.chat_template: it writes '<|im_end|>', whose token 4 is user-defined; a marker must be one"),
    ({"token_type": [CONTROL] * 3 + [NORMAL, CONTROL] + [NORMAL] * 35},
     "tokenizer.chat_template: it writes '<|im_start|>', whose token 3 is plain text; a marker must be one"),
    ({"tokens": [text.replace("<|im_start|>", "<y>") for text in TOKENS]},
     "tokenizer.chat_template: it writes '<|im_start|>', which is 12 tokens; a marker must be one"),
]  # fmt: skip


@pytest.mark.parametrize(("keys", "expected"), TOKENIZER_FAULTS)
def test_a_fault_of_the_tokenizer_is_one_line(keys: dict[str, Any], expected: str, tmp_path: Path) -> None:
    (line,) = lines_of(write_file(tmp_path, keys))
    assert line.startswith(expected)


def test_a_broken_template_is_one_line(tmp_path: Path) -> None:
    (line,) = lines_of(write_file(tmp_path, template="{% for m in %}"))
    assert re.fullmatch(r"tokenizer\.chat_template: .*: take the template of the original model", line)


def test_files_of_old_converters_are_known(tmp_path: Path) -> None:
    (line,) = lines_of(write_file(tmp_path, name="Qwen3 Embedding 0.6B"))
    assert line.startswith("tokenizer.ggml.add_eos_token: it is not true, because an old converter wrote the file")
    assert findings_of(write_file(tmp_path, {"add_eos_token": True}, name="Qwen3 Embedding 0.6B")) == ()


@pytest.mark.parametrize("name", ["bert", "xlm-roberta"])
def test_encoders_are_examined_too(name: str, tmp_path: Path) -> None:
    is_xlmr, folder = name == "xlm-roberta", tmp_path / "folder"
    folder.mkdir()
    tokenizer = (make_xlmr_folder if is_xlmr else make_bert_folder)(folder)
    model = make_encoder(BY_NAME[name], folder, vocab_size=len(tokenizer) + is_xlmr)
    assert findings_of(folder) == ()
    as_gguf, path = as_xlmr_gguf if is_xlmr else as_bert_gguf, tmp_path / "model.gguf"
    write_gguf(model, path, as_gguf(folder), 2)
    assert findings_of(path) == ()
    if is_xlmr:
        write_gguf(model, path, as_gguf(folder, add_eos_token=None), 2)
        (line,) = lines_of(path)
        assert line.startswith("tokenizer.ggml.add_eos_token: it is not true, because an old converter wrote the file")


def test_faults_of_a_folders_tokenizer_are_lines(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, eos_token_id=[3, 96])
    assert lines_of(folder) == [
        "generation_config.json eos_token_id: 96 is outside the vocabulary of 6 tokens: set it to the id of such a "
        "token, or remove it",
        "chat_template: it ends a turn with '<|im_end|>' (5), but the ids that end an answer are 2, 3: add 5 as "
        "generation_config.json eos_token_id",
    ]


Change = Callable[[dict[str, np.ndarray]], object]


def _fill(name: str, value: float, rows: slice = slice(None)) -> Change:
    return lambda tensors: tensors[name].__setitem__(rows, value)


def _scale(name: str, factor: float) -> Change:
    return lambda tensors: tensors[name].__imul__(np.float32(factor))


TENSOR_FAULTS = [
    (_fill(DOWN, np.nan, slice(2)), f"{DOWN}: 192 of 6,144 values are NaN and 0 are infinite; every value must be"),
    (_fill(DOWN, -np.inf, slice(1)), f"{DOWN}: 0 of 6,144 values are NaN and 96 are infinite; every value must be"),
    (_fill("blk.2.attn_norm.weight", np.nan, slice(1)), "blk.2.attn_norm.weight: 1 of 64 values are NaN"),
    (_fill(DOWN, 0.0, slice(3)), f"{DOWN}: 9 of 192 blocks (4.7%) have only zeros; at most 1% may"),
    (_fill(EMBEDDING, 0.0, slice(30, 32)), f"{EMBEDDING}: 2 rows are all zero (ids 30, 31); a used token must"),
    (_fill(EMBEDDING, 0.0, slice(4, 5)), f"{EMBEDDING}: 1 row is all zero (ids 4); a used token must"),
    (_scale(DOWN, 10), f"{DOWN}: the root mean square is 10.1, and 0.997 is the median over layers; it may"),
    (_fill(DOWN, 200.0, slice(0, 1)), f"{DOWN}: the root mean square is "),
    (lambda tensors: tensors[DOWN].__setitem__((0, 0), 500.0), f"{DOWN}: the largest value is 500, and "),
    (lambda tensors: tensors.pop(DOWN), "m.gguf: config and tensors disagree: missing model.layers.3.mlp.down_pr"),
]


@pytest.mark.parametrize(("change", "expected"), TENSOR_FAULTS)
def test_a_fault_of_a_tensor_is_one_line(change: Change, expected: str, tmp_path: Path) -> None:
    (line,) = lines_of(write_file(tmp_path, change=change))
    assert line.startswith(expected)


@pytest.mark.parametrize(("content", "values"), [(b"\x00\x7e", "32 of 6,144 values are NaN and 0"), (b"\x00\x7c", "")])
def test_a_bad_scale_names_the_tensor_to_quantise_again(content: bytes, values: str, tmp_path: Path) -> None:
    path = write_file(tmp_path, quantise=frozenset({DOWN}))
    codes = b"\x11" * 16  # no code stands for 0, because 0 times infinity is NaN
    write_bytes(path, DOWN, 2 * 18, content + codes)
    line, last = lines_of(path)
    assert line.startswith(f"{DOWN}: {values}")
    assert " are infinite, because 1 of 192 blocks have a scale like that" in line
    assert line.endswith("quantise it again from the original: it is Q4_0")
    assert last == f"quantise again: {DOWN}"


def test_pieces_count_as_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_file(tmp_path, change=_fill(EMBEDDING, 0.0, slice(30, 32)))
    seen = list[tuple[int, int]]()
    whole = examine(path, lambda done, total: None)
    monkeypatch.setattr(doctor, "_VALUES_PER_PIECE", 100)  # one row
    assert examine(path, lambda done, total: seen.append((done, total))) == whole
    assert "ids 30, 31" in str(whole.findings[0])
    total = sum(values.size for values in all_tensors().values())
    assert (seen, seen[-1]) == (sorted(seen), (total, total))


def test_at_most_twenty_lines_of_a_kind_are_shown(tmp_path: Path) -> None:
    path = write_file(tmp_path, change=lambda tensors: [values.put(0, np.nan) for values in tensors.values()])
    count = len(all_tensors())
    lines = lines_of(path)
    assert (len(lines), lines[-1]) == (21, f"and {count - 20} more of this kind: not finite (--json lists all)")
    found = run("doctor", path, "--json", status=1).json()["findings"]
    assert (len(found), {finding["kind"] for finding in found}) == (count, {"not finite"})


def test_a_float_beyond_half_precision_is_named(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    tensors = {name: values.half() for name, values in load_file(folder / "model.safetensors").items()}
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = torch.inf
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (line,) = lines_of(folder)
    assert line.startswith("model.layers.1.mlp.up_proj.weight: 0 of 6,144 values are NaN and 1 are infinite")
    assert line.endswith("convert it again from the original as BF16 or F32: F16 ends at 65,504")


def test_scales_of_a_quantised_folder_are_checked(tmp_path: Path) -> None:
    method, name = by_name("gptq symmetric"), "model.layers.1.mlp.up_proj"
    floats, folder = make_folder(tmp_path / "floats"), tmp_path / "packed"
    write_quantised(floats, folder, method.pack, method.config, method.key)
    run("doctor", folder)
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{name}.scales"] *= torch.inf
    save(folder, tensors)
    line, last = lines_of(folder)
    assert line.startswith(f"{name}.")
    assert "expected finite scales of at most" in line
    assert last.startswith(f"quantise again: {name}.")


WRONG_TYPES = [
    ("tokenizer_config.json", {"added_tokens_decoder": {"x": {"content": "<y>"}, "1": {"content": "b"}}}),
    ("tokenizer_config.json", {"added_tokens_decoder": [1]}),
    ("tokenizer_config.json", {"eos_token": 7}),
    ("tokenizer_config.json", []),
    ("generation_config.json", {"eos_token_id": "2"}),
    ("generation_config.json", {"eos_token_id": [3, 5], "bos_token_id": {"a": 1}}),
    ("tokenizer.json", {"model": 3}),
]


@pytest.mark.parametrize(("file", "settings"), WRONG_TYPES)
def test_wrong_types_in_a_folder_are_no_failure_of_ours(file: str, settings: Any, tmp_path: Path, capsys: Any) -> None:
    (make_folder(tmp_path) / file).write_text(json.dumps(settings))
    capsys.readouterr()
    status, written = main(["doctor", str(tmp_path)]), capsys.readouterr()
    assert "our own failure" not in written.err
    assert (bool(written.out), bool(written.err)) == (status < 2, status >= 2)


@pytest.mark.filterwarnings("ignore:pre-tokenizer 'x' is not known")
def test_wrong_values_in_a_file_are_refused_or_found(tmp_path: Path) -> None:
    counts = Counter[bool | None]()
    for _, path in islice(gguf_of_any_kind(tmp_path), 0, None, 2):
        try:
            counts[bool(findings_of(path))] += 1
        except InferError:
            counts[None] += 1
    assert min(counts[True], counts[None]) > 3


def test_a_model_that_cannot_be_read_has_the_status_of_other_commands(tmp_path: Path) -> None:
    refused("doctor", tmp_path / "none.gguf")
    path = write_file(tmp_path)
    path.write_bytes(path.read_bytes()[:-100])
    assert "m.gguf" in refused("doctor", path, status=3)


def test_outliers_need_five_layers_and_both_distances() -> None:
    assert [index for index, _ in far_from_median([1.0, 1.0, 1.1, 1.2, 100.0, 0.01], 8.0)] == [4, 5]
    for values in ([1.0, 1.0, 1.0, 100.0], [1.0, 1.0, 1.0, 1.0, 7.9], [1.0, 4.0, 16.0, 64.0, 256.0]):
        assert list(far_from_median(values, 8.0)) == []


@pytest.mark.parametrize("type_", BLOCK_FIELDS)
def test_scales_of_blocks_are_those_of_their_numbers(type_: str) -> None:
    size, noise = (64, BLOCK_TYPES[type_].block_bytes), torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, size, dtype=torch.uint8, generator=noise)
    numbers, rows = numbers_of(blocks, type_), torch.nn.functional.pad(blocks, (0, BLOCK_TYPES[type_].tail_bytes))
    parts = [numbers.scales] if numbers.minima is None else [numbers.scales, numbers.minima]
    expected = numbers.supers if numbers.supers is not None else torch.cat(parts, dim=1)
    assert torch.equal(scales_of(rows, type_).nan_to_num(), expected.nan_to_num())
