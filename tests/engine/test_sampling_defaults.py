"""Claims about the table of defaults: which value wins, in the Python interface and on the command line."""

import json
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from gguf_files import write_model
from infer import LLM, SamplingParams
from infer.compute.sampling.defaults import PRESETS, SamplingDefaults, default_params
from infer.engine.step.request import make_request
from infer.files import open_checkpoint, resolve
from infer.files.generation_config import defaults_of, sampling_defaults
from infer.files.hub.find import INSTALLED_MODELS


def test_files_go_before_the_card_and_the_card_before_neutral_values() -> None:
    found = SamplingDefaults({"temperature": 0.6}, {"temperature": 0.2, "top_p": 0.9})
    assert dict(found) == {"temperature": 0.6, "top_p": 0.9}
    assert (found.from_files, found.from_card) == ({"temperature": 0.6}, {"top_p": 0.9})
    assert default_params(found, is_chat=True) == SamplingParams(temperature=0.6, top_p=0.9, max_new_tokens=512)
    assert default_params({}, is_chat=True) == SamplingParams(temperature=0.7, top_p=0.95, max_new_tokens=512)
    assert default_params({}, is_chat=False) == SamplingParams(max_new_tokens=512)
    assert default_params(found, is_chat=True, temperature=0, max_tokens=3).temperature == 0


def test_a_card_s_repetition_penalty_goes_with_the_card_s_temperature() -> None:
    found = SamplingDefaults({}, {"temperature": 0.0, "repetition_penalty": 1.1, "repetition_window": 64})
    params = default_params(found, is_chat=True)
    assert (params.temperature, params.repetition_penalty, params.repetition_window) == (0, 1.1, 64)
    params = default_params(found, is_chat=True, temperature=0)
    assert (params.repetition_penalty, params.repetition_window) == (1.0, None)
    assert default_params(found, is_chat=True, temperature=0, repetition_penalty=1.2).repetition_penalty == 1.2
    of_files = SamplingDefaults({"temperature": 0.5, "repetition_penalty": 1.1})
    assert default_params(of_files, is_chat=True, temperature=0).repetition_penalty == 1.1


def test_only_the_card_that_needs_it_and_the_seeds_preset_penalise_repetition() -> None:
    tables = {"neutral": dict[str, Any]()} | {name: dict(each.sampling) for name, each in INSTALLED_MODELS.items()}
    penalised = set[str]()
    for (name, values), is_chat in product(tables.items(), (False, True)):
        penalised |= {name} if default_params(values, is_chat=is_chat).repetition_penalty != 1.0 else set()
    assert (penalised, PRESETS["seed"]["repetition_penalty"]) == ({"smollm2"}, 1.1)


def test_a_top_p_of_0_in_a_models_file_keeps_one_token() -> None:
    assert 0 < default_params(sampling_defaults({"top_p": 0}), is_chat=False).top_p < 1e-6


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "hot"), ("temperature", float("nan")), ("temperature", 3), ("top_p", -1), ("top_p", 1.5),
        ("top_k", -2), ("top_k", 1.5), ("min_p", 1), ("repetition_penalty", 0), ("repetition_penalty", [1]),
    ],
)  # fmt: skip
def test_a_bad_value_in_a_models_file_is_named_and_ignored(name: str, value: Any, tmp_path: Path, folder: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "model")
    (copy / "generation_config.json").write_text(json.dumps({"min_p": 0.1, "top_k": 5} | {name: value}))
    with pytest.warns(UserWarning, match=rf"\Amodel/generation_config.json: {name} must be .*: ignored\Z"):
        found = defaults_of(open_checkpoint(copy))
    assert name not in found
    with pytest.warns(UserWarning, match=name):
        assert LLM(copy).generate("a").finish_reason in ("length", "eos")


def test_a_bad_value_in_a_gguf_file_is_named_with_its_key(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", extend=lambda writer: writer.add_string("general.sampling.temp", "hot"))
    with pytest.warns(UserWarning, match=r"m.gguf, general.sampling.temp: temperature must be in \[0, 2\], got 'hot'"):
        assert dict(defaults_of(open_checkpoint(path))) == {}


def test_a_call_without_parameters_takes_the_table(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = shutil.copytree(folder, tmp_path / "model")
    (copy / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "top_k": 20}))
    llm = LLM(copy, chat_template="{% for m in messages %}{{ m.content }}{% endfor %}")
    seen: list[SamplingParams] = []

    def watch(limits: Any, tokenizer: Any, prompt: Any, params: SamplingParams, *others: Any, **named: Any) -> Any:
        seen.append(params)
        return make_request(limits, tokenizer, prompt, params, *others, **named)

    monkeypatch.setattr("infer.engine.requests.request_maker.make_request", watch)
    message = {"role": "user", "content": "ab"}
    for call, given in ((llm.generate, "ab"), (llm.generate, [message]), (llm.chat, [message])):
        call(given)
    for call, given in ((llm.session().send, "ab"), (llm.session().answer, [message]), (llm.generate_all, ["ab"])):
        call(given)
    llm.generate("ab", top_k=3)
    values = [(params.temperature, params.top_k, params.top_p, params.max_new_tokens) for params in seen]
    plain, chat = (0.6, 20, 1.0, 512), (0.6, 20, 0.95, 512)
    assert values == [plain, chat, chat, chat, chat, plain, (0.6, 3, 1.0, 512)]


def test_an_installed_models_card_is_found_by_its_file() -> None:
    found = defaults_of(open_checkpoint(resolve("smollm2")))
    assert found.from_card == {
        "temperature": 0.0, "top_p": 0.9, "repetition_penalty": 1.1, "repetition_window": 64
    }  # fmt: skip
    assert found.from_files == {}
