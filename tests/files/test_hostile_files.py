"""Files that break a rule or a library give one line that names the file and the rule, and have no other effect."""

import json
import os
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from tokenizers import Tokenizer as Backend
from tokenizers import normalizers
from tokenizers.processors import TemplateProcessing

from byte_tokenizer import write_byte_tokenizer
from extent import IS_SHORT
from hostile_child import CUT, NUM_FLIPS, SLOWEST, STEP
from hostile_files import (
    CONFIG,
    HIDDEN,
    NUM_TOKENS,
    VOCAB_SIZE,
    gguf_number,
    gguf_numbers,
    gguf_texts,
    read_everything,
    replaced,
    tensors,
    write_folder,
    write_gguf,
)
from infer import LLM, InvalidRequestError, ModelError, SamplingParams, load_tokenizer
from looping import until_freed
from refusals import refusal
from watched import python_command, script_command

Files = dict[str, Any]

LARGEST = 64 << 20  # bytes of growth over all files


def config(**changes: Any) -> Files:
    return {"config_json": CONFIG | changes}


def rope(**settings: Any) -> Files:
    return config(rope_scaling=settings)


def weights(**changes: Any) -> Files:
    """Return the weights with some tensors replaced. Names have `__` for a dot, and None leaves a tensor out."""
    named = {name.replace("__", "."): tensor for name, tensor in changes.items()}
    kept = {name: tensor for name, tensor in (tensors() | named).items() if tensor is not None}
    return {"model_safetensors": save(kept)}


FAULTS: dict[str, tuple[Files, str]] = {
    "no layers": (config(num_hidden_layers=0), "num_hidden_layers must be a whole number from 1"),
    "minus one layer": (config(num_hidden_layers=-1), "got -1"),
    "a billion layers": (config(num_hidden_layers=10**9), "got 1000000000"),
    "two layers of which one is there": (config(num_hidden_layers=2), "missing model.layers.1.attention_norm.weight"),
    "more heads than there are": (config(num_attention_heads=8), "the config requires (128, 64)"),
    "rope_theta beyond floats": (config(rope_theta=10**400), "rope_theta must be from 1e-32 to 1e+32, got 1000"),
    "rope_theta at the end of floats": (config(rope_theta=1e308), "rope_theta must be from 1e-32 to 1e+32, got 1e+308"),
    "eps at the end of floats": (config(rms_norm_eps=1e300), "rms_norm_eps must be from 1e-32 to 1e+32, got 1e+300"),
    "eps that vanishes": (config(rms_norm_eps=1e-320), "rms_norm_eps must be from 1e-32 to 1e+32, got 1e-320"),
    "yarn's factor at the end of floats": (rope(rope_type="yarn", factor=1e300), "factor must be from 1e-32 to 1e+32"),
    "a residual whose square makes eps vanish": (
        config(model_type="granite", residual_multiplier=1e30), "rms_norm_eps must be from 1e-32 to 1e+32, got 1e-65",
    ),
    "a residual whose square is 0": (
        config(model_type="granite", residual_multiplier=1e-200), "residual_multiplier must be from 1e-32 to 1e+32",
    ),
    "family that is a list": (config(model_type=["llama"]), "config.json: model_type: expected a name"),
    "family of a megabyte": (config(model_type="x" * 10**6), "model_type 'xxxx"),
    "rope type that is an object": (rope(rope_type={}), "rope_type {} is not supported"),
    "rope type that nobody knows": (rope(rope_type="x" * 999), "rope_type 'xxxx"),
    "rope factor of minus one": (rope(rope_type="linear", factor=-1), "factor must be a number above 0, got -1"),
    "rope of each layer type that is no object": (
        config(rope_parameters={"full_attention": 1}), "full_attention must be a mapping, got 1",
    ),
    "frequency factors that are none": (config(rope_frequency_factors=["a"] * 8), "a number above 0, got 'a'"),
    "a text part whose family is an object": (config(text_config={"model_type": {}}), "model_type: expected a name"),
    "a text part that is no object": (config(text_config=[1]), "text_config: expected an object"),
    "a tensor that is missing": (weights(model__norm__weight=None), "missing model.norm.weight (64,)"),
    "a tensor too many": (weights(extra=torch.ones(2)), "unexpected 'extra'"),
    "one whose name has two lines": (weights(**{"two\nlines": torch.ones(2)}), r"unexpected 'two\nlines'"),
    "a tensor of another shape": (weights(model__norm__weight=torch.ones(65)), "model.norm.weight has shape (65,)"),
    "a vocabulary larger than the embedding": (
        {**config(vocab_size=100), **weights(model__embed_tokens__weight=torch.ones(100, HIDDEN))},
        "the tokenizer has 257 tokens, the embedding only 100 rows",
    ),
    "a config that is a list": ({"config_json": [1]}, "config.json"),
    "UTF-16": ({"config_json": json.dumps(CONFIG).encode("utf-16")}, "config.json: JSON at byte 0: is not UTF-8"),
    "a byte order mark": ({"config_json": b"\xef\xbb\xbf{}"}, "config.json: JSON at byte 0: Unexpected UTF-8 BOM"),
    "a key twice": ({"config_json": b'{"a": 1, "a": 2}'}, "config.json: key 'a' at byte 0: appears twice"),
    "a number of 5,000 digits": ({"config_json": b'{"a": ' + b"1" * 5000 + b"}"}, "JSON at byte 0: cannot be read"),
    "65 lists in one another": ({"config_json": b'{"a": ' + b"[" * 65 + b"]" * 65 + b"}"}, "more than 64 deep"),
    "a million lists in one another": ({"config_json": b"[" * 10**6}, "nested more than 64 deep"),
    "a lone surrogate": ({"config_json": b'{"model_type": "\\ud800"}'}, "contains a lone surrogate"),
    "17 MB of spaces": ({"config_json": b" " * (17 << 20)}, "expected at most 16777216 bytes, got 17825792"),
    "tokenizer.json that is missing": ({"tokenizer_json": None}, "tokenizer.json: file: is missing"),
    "tokenizer.json that is no JSON": ({"tokenizer_json": b"{"}, "tokenizer: Cannot instantiate Tokenizer"),
    "tokenizer.json of a million lists": ({"tokenizer_json": b"[" * 10**6}, "tokenizer.json: tokenizer: "),
    "a token that is an odd name": ({"tokenizer_config_json": b'{"eos_token": "\\udfff"}'}, "a lone surrogate"),
    "a BOS that no token is": (
        {"tokenizer_config_json": {"bos_token": "<none>", "add_bos_token": True}},
        "'<none>' is not in the vocabulary",
    ),
    "a flag that is a list": ({"tokenizer_config_json": {"add_bos_token": [1]}}, "add_bos_token: expected true or fal"),
    "added tokens that are a list": (
        {"tokenizer_config_json": {"added_tokens_decoder": [1]}}, "added_tokens_decoder: expected an object of tokens",
    ),
    "an added token without text": (
        {"tokenizer_config_json": {"added_tokens_decoder": {"9": {"special": True}}}}, "expected an object of tokens",
    ),
    "an added token with odd options": (
        {"tokenizer_config_json": {"added_tokens_decoder": {"9": {"content": "a", "lstrip": "no"}}}},
        "expected an object of tokens",
    ),
    "a template that is a number": ({"tokenizer_config_json": {"chat_template": 1}}, "chat_template: expected a text"),
    "templates without names": (
        {"tokenizer_config_json": {"chat_template": [{"template": "x"}]}}, "chat_template: expected a text or a list",
    ),
    "a template file that is not UTF-8": ({"chat_template_jinja": b"\xff"}, "text at byte 0: is not UTF-8"),
    "a template file of 2 MB": ({"chat_template_jinja": b"x" * (2 << 20)}, "expected at most 1048576 bytes"),
    "an end that is a fraction": ({"generation_config_json": {"eos_token_id": 1.5}}, "eos_token_id: expected an id or"),
    "ends that are lists": ({"generation_config_json": {"eos_token_id": [[1]]}}, "eos_token_id: expected an id or"),
    "a file without tensors": ({"model_safetensors": b"\2" + bytes(7) + b"{}"}, "the model has no tensors"),
    "a config that is a device": ({"config_json": Path("/dev/zero")}, "it has no config.json"),
    "a generation config that is a device": ({"generation_config_json": Path("/dev/zero")}, "is outside the model's"),
    "a tokenizer that is a device": ({"tokenizer_json": Path("/dev/zero")}, "tokenizer.json: file: is not a regular"),
}  # fmt: skip


def refused(call: Callable[[], object]) -> str:
    return refusal(call, ModelError)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_folder_with_a_fault_is_refused_with_the_reason(tmp_path: Path, fault: str) -> None:
    files, reason = FAULTS[fault]
    folder = write_folder(tmp_path / "model", **files)
    assert reason in refused(lambda: LLM(folder))


def test_a_good_model_is_read(tmp_path: Path) -> None:
    assert read_everything(write_folder(tmp_path / "model")).vocab_size == 259
    assert read_everything(write_gguf(tmp_path / "model.gguf")).vocab_size == 258


def in_a_child(folder: Path, *modes: str) -> dict[str, dict[str, Any]]:
    child = Path(__file__).parents[1] / "helpers" / "hostile_child.py"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = script_command(child, folder, *modes)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "panicked" not in done.stderr
    reports: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return reports


KINDS = ("config.json", "tokenizer_config.json", "generation_config.json", "tokenizer.json", "gguf")


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Return the results of reading thousands of files."""
    return in_a_child(tmp_path_factory.mktemp("child"), *(() if IS_SHORT else KINDS), "truncated", "again", "prompts")


def check(report: dict[str, Any]) -> None:
    """Check that each file gives infer's error or a model, with little time and memory, and leaves nothing behind."""
    assert report["escaped"] == []
    assert report["slowest"] < SLOWEST
    assert report["grown"] < LARGEST
    assert (report["threads"], report["descriptors"], report["maps"]) == (0, 0, 0)


@pytest.mark.slow(rest=3)
@pytest.mark.parametrize("name", KINDS)
def test_a_value_of_any_kind_in_any_place_is_read_or_refused(reports: dict[str, dict[str, Any]], name: str) -> None:
    check(reports[name])
    assert reports[name]["read"] >= 5 // STEP
    assert reports[name]["refused"] >= 15 // STEP


def test_a_header_that_is_cut_anywhere_is_refused(reports: dict[str, dict[str, Any]]) -> None:
    check(reports["truncated"])
    assert (reports["truncated"]["read"], reports["truncated"]["refused"] > 2000 / CUT) == (0, True)


def test_a_thousand_refused_files_leave_nothing_behind(reports: dict[str, dict[str, Any]]) -> None:
    check(reports["again"])
    assert (reports["again"]["read"], reports["again"]["refused"]) == (0, 1000)


@pytest.mark.slow
def test_thousands_of_flips_of_random_bits_are_read_or_refused(tmp_path: Path) -> None:
    report = in_a_child(tmp_path, "flipped")["flipped"]
    check(report)
    assert report["read"] + report["refused"] == NUM_FLIPS
    assert min(report["read"], report["refused"]) > NUM_FLIPS / 10


SENSELESS = [
    ("tokenizer.ggml.eos_token_id", gguf_texts(["a"]), "eos_token_id: expected an id, got ['a']"),
    ("tokenizer.ggml.pre", gguf_number(1), "pre: expected a name, got 1"),
    ("tokenizer.ggml.tokens", gguf_number(1), "tokens: expected a list of texts, got 1"),
    ("tokenizer.ggml.tokens", None, "tokens: missing"),
    ("tokenizer.ggml.merges", gguf_texts(["a zebra"]), "merges: "),
    ("tokenizer.ggml.merges", gguf_texts(["a"]), "'a' is not two tokens"),
    ("tokenizer.ggml.token_type", gguf_texts(["a"]), "token_type: expected a list of integers"),
]


@pytest.mark.parametrize(("key", "value", "reason"), SENSELESS)
def test_a_senseless_tokenizer_in_a_gguf_is_refused(tmp_path: Path, key: str, value: bytes | None, reason: str) -> None:
    path = write_gguf(tmp_path / "model.gguf", {key: value})
    assert reason in refused(lambda: load_tokenizer(path))


# Files with which the tokenizers library panics or aborts the process, and values that it does not check.
TEMPLATE = {"type": "TemplateProcessing", "pair": [], "special_tokens": {}}
TRAPS: dict[str, tuple[tuple[str, ...], Any, str]] = {
    "a prefix longer than what it is cut off": (("model", "continuing_subword_prefix"), "ab", "expected null"),
    "a prefix of one character": (("model", "continuing_subword_prefix"), "é", "expected null"),
    "no map of characters": (("normalizer",), {"type": "Precompiled", "precompiled_charsmap": "AAAA"}, "not a map of"),
    "a map that is none": (("normalizer",), {"type": "Precompiled", "precompiled_charsmap": None}, "not a map of"),
    "a map of 4 GB": (("normalizer",), {"type": "Precompiled", "precompiled_charsmap": "/P///w=="}, "not a map of"),
    "a map that leads astray": (
        ("normalizer",), {"type": "Precompiled", "precompiled_charsmap": "BAAAAP////8="}, "tokenizer: ",
    ),
    "an empty pattern": (("normalizer",), {"type": "Replace", "pattern": {"String": ""}, "content": "x"}, "an empty"),
    "an empty pattern, deep inside": (
        ("normalizer",),
        {"type": "Sequence", "normalizers": [{"type": "Replace", "pattern": {"String": ""}, "content": "x"}]},
        "an empty pattern",
    ),
    "nothing to prepend": (("normalizer",), {"type": "Prepend", "prepend": ""}, "nothing to prepend"),
    "a template of tokens that nobody knows": (
        ("post_processor",), {**TEMPLATE, "single": [{"SpecialToken": {"id": "x", "type_id": 0}}]}, "'x', which",
    ),
    "a template of a second text": (
        ("post_processor",), {**TEMPLATE, "single": [{"Sequence": {"id": "B", "type_id": 0}}]}, "contains a second",
    ),
    "an id of 2³² − 1": (("model", "vocab", "!"), 2**32 - 1, "expected ids below 1000000, got 4294967295"),
    "an id twice": (("model", "vocab", "!"), 65, "two tokens have the same id"),
    "an id that is no number": (("model", "vocab", "!"), "0", "tokenizer: "),
    "a merge of tokens that nobody knows": (("model", "merges"), [["zz", "yy"]], "tokenizer: "),
    "a pattern that is no pattern": (
        ("normalizer",), {"type": "Replace", "pattern": {"Regex": "("}, "content": ""}, "tokenizer: ",
    ),
}  # fmt: skip

TEN = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}
REGEX = {"type": "Replace", "pattern": {"Regex": "a"}, "content": "aa"}
LIGATURE = {"type": "Replace", "pattern": {"String": "a"}, "content": "\ufdfa"}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
FUSE = {"type": "Fuse"}
MARK = {"type": "Prepend", "prepend": "▁"}
GROWING: dict[str, tuple[str, str, list[Any], list[Any]]] = {  # the part, the key of its list, steps that grow, and not
    "replacements": ("normalizer", "normalizers", [TEN, TEN, {**TEN, "content": "aa"}], [TEN, TEN]),
    "patterns": ("normalizer", "normalizers", [REGEX] * 5, [REGEX] * 4),
    "prefixes": ("normalizer", "normalizers", [MARK] * 7, [MARK] * 6),
    "ligatures": ("normalizer", "normalizers", [{"type": "NFKD"}, LIGATURE] * 3, [{"type": "NFKD"}, LIGATURE] * 2),
    "steps": ("normalizer", "normalizers", [{"type": "NFC"}] * 64, [{"type": "NFC"}] * 63),
    "spelt bytes": ("pre_tokenizer", "pretokenizers", [BYTES] * 8, [BYTES] * 7),
    "templates": (
        "post_processor", "processors", [{**TEMPLATE, "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 101}],
        [{**TEMPLATE, "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 100}],
    ),
    "decoded": ("decoder", "decoders", [TEN, TEN, FUSE, TEN], [TEN, FUSE, TEN]),
}  # fmt: skip


@pytest.mark.parametrize("kind", GROWING)
def test_a_tokenizer_that_lets_texts_grow_without_bound_is_refused(tmp_path: Path, kind: str) -> None:
    part, name, growing, good_steps = GROWING[kind]
    folder = write_folder(tmp_path / "model")
    good = json.loads((folder / "tokenizer.json").read_text())
    nested = [*growing[:1], {"type": "Sequence", name: growing}]
    for steps, is_refused in ((growing, True), (good_steps, False), (nested, True)):
        (folder / "tokenizer.json").write_text(json.dumps(good | {part: {"type": "Sequence", name: steps}}))
        if is_refused:
            assert re.search(r"at most (100 times is|64 are) supported", refused(lambda: load_tokenizer(folder)))
        else:
            tokenizer = load_tokenizer(folder)
            assert len(tokenizer.encode("aaaa")) <= 4 * 4 * 100
            assert len(tokenizer.decode([97] * 4)) <= 4 * 100


LOAD = """
import sys
from pathlib import Path
from infer.errors import ModelError
from infer.text.tokenizer import Tokenizer
for folder in sys.argv[1:]:
    try:
        Tokenizer.from_folder(Path(folder))
    except ModelError as error:
        print(error)
"""


@pytest.mark.parametrize("trap", TRAPS)
def test_files_that_break_the_tokenizers_library_are_refused(tmp_path: Path, trap: str) -> None:
    place, value, reason = TRAPS[trap]
    folder = write_folder(tmp_path / "model")
    good = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(replaced(good, place, value)))
    assert reason in refused(lambda: load_tokenizer(folder).vocab_size)


def test_a_trap_whose_name_is_spelt_with_escapes_is_found(tmp_path: Path) -> None:
    """The test runs in a separate process, because the library would end the process."""
    folder = write_folder(tmp_path / "model")
    content = (folder / "tokenizer.json").read_text()
    names = ("continuing_subword_prefix", "\\u0063ontinuing_subword_prefix", "continuing\\u005Fsubword_prefix")
    folders = [tmp_path / str(index) for index in range(len(names))]
    for name, each in zip(names, folders, strict=True):
        trapped = content.replace('"continuing_subword_prefix": null', f'"{name}" : "a"')
        assert trapped != content
        each.mkdir()
        (each / "tokenizer.json").write_text(trapped)
    done = subprocess.run(python_command(LOAD, *folders), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("continuing_subword_prefix: is not supported") == len(names)


def test_a_panic_of_the_library_on_a_text_is_an_error_of_the_request(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_folder(tmp_path / "model"))
    tokenizer.backend.normalizer = normalizers.Prepend("")
    with pytest.raises(InvalidRequestError, match=r"\Athe tokenizer fails on the text: [^\n]*index out of bounds"):
        tokenizer.encode("hello")
    tokenizer.backend.normalizer = None
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"


def test_rows_of_the_embedding_without_a_token_are_never_sampled(tmp_path: Path) -> None:
    """The tokenizer has 259 tokens, and the embedding has 262 rows, of which the last three would always win."""
    rows = torch.randn(VOCAB_SIZE, HIDDEN, generator=torch.Generator().manual_seed(0))
    rows[260:] = 1000 * torch.stack((rows[7], -rows[7]))
    llm = LLM(write_folder(tmp_path / "model", **weights(model__embed_tokens__weight=rows)))
    assert llm.logits(llm.tokenizer.encode("a"), last=1).argmax() >= 260
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, seed=1, max_new_tokens=20, ignore_eos=True)
        assert max(llm.generate("a", params).token_ids) < 259


def test_ends_that_the_vocabulary_does_not_have_are_no_ends(tmp_path: Path) -> None:
    ends = [256, -1, 10**30, 5000, 258]
    tokenizer = load_tokenizer(write_folder(tmp_path / "model", generation_config_json={"eos_token_id": ends}))
    assert tokenizer.eos_token_ids == {256, 257, 258}  # 257 and 258 are ends by their names
    changes = {f"tokenizer.ggml.{name}_token_id": gguf_number(2**63 - 1) for name in ("eos", "eot", "unknown")}
    assert load_tokenizer(write_gguf(tmp_path / "model.gguf", changes)).eos_token_ids == {257}


ENDS = [
    (None, {"eos_token_id": 97}, {97}),
    (None, {"eos_token_id": [97, 98]}, {97, 98}),
    (None, {"text_config": CONFIG | {"eos_token_id": [99]}}, {99}),
    (None, {"eos_token_id": 97, "text_config": CONFIG | {"eos_token_id": 99}}, {97}),
    ({"temperature": 0.5}, {"eos_token_id": 97}, {97}),
    ({"eos_token_id": 98}, {"eos_token_id": 97}, {98}),
    ({"eos_token_id": 98}, {"eos_token_id": "97"}, {98}),
    (None, {"eos_token_id": [97, -1, 262, 10**30]}, {97}),
    (None, {"eos_token_id": None}, set()),
]


@pytest.mark.parametrize(("generation_config", "config", "ends"), ENDS)
def test_ends_are_those_of_the_config_if_the_generation_config_names_none(
    tmp_path: Path, generation_config: Any, config: dict[str, Any], ends: set[int]
) -> None:
    """257 and 258 are ends by their names."""
    write_folder(tmp_path, generation_config_json=generation_config, config_json=CONFIG | config)
    with LLM(tmp_path) as llm:
        assert llm.tokenizer.eos_token_ids == ends | {257, 258}
        for end in ends:
            answer = llm.generate("a", allowed_token_ids=[end], max_new_tokens=4)
            assert (answer.token_ids, answer.finish_reason) == ([end], "eos")


@pytest.mark.parametrize("ends", ["97", [1.5], True, {}])
def test_ends_that_are_no_ids_are_refused(tmp_path: Path, ends: Any) -> None:
    for config in ({"eos_token_id": ends}, {"text_config": {"eos_token_id": ends}}):
        write_folder(tmp_path, generation_config_json=None, config_json=CONFIG | config)
        assert "config.json: eos_token_id: expected an id or a list of" in refused(lambda: load_tokenizer(tmp_path))


def test_a_gguf_may_list_its_ends(tmp_path: Path) -> None:
    changes = {f"tokenizer.ggml.{name}_token_id": gguf_number(end) for name, end in (("eot", 99), ("eom", 100))}
    changes["tokenizer.ggml.eos_token_ids"] = gguf_numbers([97, 98, 5000])
    tokenizer = load_tokenizer(write_gguf(tmp_path / "model.gguf", changes))
    ends = {97, 98, 99, 100, 257}  # a token that ends an answer is never text
    assert tokenizer.eos_token_ids == tokenizer.special_token_ids == ends
    path = write_gguf(tmp_path / "model.gguf", {"tokenizer.ggml.eos_token_ids": gguf_texts(["a"])})
    assert "eos_token_ids: expected a list of integers" in refused(lambda: load_tokenizer(path))


BEYOND = [f"<beyond {index}>" for index in range(5)]  # the last two have no row in a folder


def test_added_tokens_without_a_row_are_plain_text_in_a_folder(tmp_path: Path) -> None:
    write_byte_tokenizer(write_folder(tmp_path), merges=[("a", "b")], controls=BEYOND)
    named = {"added_tokens_decoder": {"264": {"content": "<missing>", "special": True}}, "pad_token": BEYOND[4]}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(named))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.vocab_size == VOCAB_SIZE
    assert [len(tokenizer.encode(text)) for text in (*BEYOND, "<missing>")] == [1, 1, 1, 10, 10, 9]
    with LLM(tmp_path) as llm:
        assert llm.generate(BEYOND[4], max_new_tokens=1).prompt_tokens == 10


def test_tokens_of_a_gguf_without_a_row_are_plain_text(tmp_path: Path) -> None:
    vocab = [*(f"a{index}" for index in range(4)), BEYOND[4]]
    good = load_tokenizer(write_gguf(tmp_path / "model.gguf"))
    tokens = [*(str(good.backend.id_to_token(index)) for index in range(NUM_TOKENS)), *vocab]
    for last, is_read in ((3, True), (4, True), (5, True), (1, False)):
        changes = {"tokens": gguf_texts(tokens), "token_type": gguf_numbers([1] * (NUM_TOKENS - 1) + [3] * 5 + [last])}
        path = write_gguf(tmp_path / "model.gguf", {f"tokenizer.ggml.{key}": value for key, value in changes.items()})
        if not is_read:
            assert "they belong to different models" in refused(lambda path=path: LLM(path))
            continue
        with LLM(path) as llm:
            assert (llm.tokenizer.vocab_size, len(llm.tokenizer.encode(BEYOND[4]))) == (VOCAB_SIZE, len(BEYOND[4]))
            assert llm.generate(BEYOND[4], max_new_tokens=1).prompt_tokens == len(BEYOND[4])


def test_a_post_processor_that_adds_a_token_without_a_row_is_refused(tmp_path: Path) -> None:
    write_byte_tokenizer(write_folder(tmp_path), merges=[("a", "b")], controls=BEYOND)
    backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
    backend.post_processor = TemplateProcessing(single=["<end>", "$A"], special_tokens=[("<end>", 263)])
    backend.save(str(tmp_path / "tokenizer.json"))
    assert "adds token 263, but the embedding has 262 rows" in refused(lambda: load_tokenizer(tmp_path))


def test_bad_files_disturb_no_other_request(tmp_path: Path) -> None:
    """One thread's answers stay the same while another's files are refused a hundred times. Nothing is left behind."""
    llm = LLM(write_folder(tmp_path / "good"))
    params = SamplingParams(temperature=1.0, seed=3, max_new_tokens=60, ignore_eos=True)
    expected = [llm.generate(text, params).token_ids for text in ("hello", "a")]
    until_freed()
    bad = [write_folder(tmp_path / str(index), **files) for index, (files, _) in enumerate(FAULTS.values())]
    before = threading.active_count(), len(os.listdir("/proc/self/fd"))
    is_done = threading.Event()

    def load_bad_files() -> int:
        num_refused = 0
        while not is_done.is_set() or num_refused < 100:
            for folder in bad:
                with pytest.raises(ModelError):
                    LLM(folder)
            num_refused += len(bad)
        return num_refused

    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(load_bad_files)
        results = [[llm.generate(text, params).token_ids for text in ("hello", "a")] for _ in range(5)]
        is_done.set()
        assert loading.result() >= 100
    assert results == [expected] * 5
    until_freed()
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == before


KILLED = """
import sys
from pathlib import Path
from infer.system.atomic import replacing
for number in range(10 ** 9):
    with replacing(Path(sys.argv[1])) as file:
        for _ in range(50):
            file.write(bytes([65 + number % 26]) * 20_000)
    print(number, flush=True)
"""


def test_a_process_that_is_killed_while_it_writes_leaves_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "saved"
    draw = random.Random(0)
    for _ in range(5):
        with subprocess.Popen(python_command(KILLED, path), stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(draw.random() / 50)
            process.kill()
        content = path.read_bytes()
        assert (len(content), len(set(content))) == (1_000_000, 1)


def test_prompts_and_messages_of_any_kind_are_answered_or_refused(reports: dict[str, dict[str, Any]]) -> None:
    assert reports["prompts"] == {"escaped": [], "answered": 6, "refused": 17}
