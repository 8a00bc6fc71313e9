"""Claims about sampling parameters, their declarations and defaults, and about results: values and messages."""

import copy
import dataclasses
import inspect
import json
import math
import pickle
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal

import msgspec
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cases import cases
from gguf_files import write_model
from infer import LLM
from infer.compute.sampling.keywords import PRESETS, SamplingDefaults, SamplingKeywords, default_params
from infer.engine.step.request import Limits, checked_params
from infer.engine.step.request_options import OPTIONS, RequestKeywords
from infer.errors import InvalidRequestError
from infer.files import open_checkpoint, resolve
from infer.files.generation_config import defaults_of, sampling_defaults
from infer.files.hub.find import INSTALLED_MODELS
from infer.outputs import GenerationResult, GenerationStats, GenerationTiming, TokenLogprob, percentile
from infer.parameters import Count, Number, OneOf, Parameter
from infer.request_limits import MAX_STOPS
from infer.sampling_params import ALIASES, PARAMETER_NAMES, PARAMETERS, SamplingParams, UnknownParameterError
from infer.serving.protocols.bodies import refusal
from infer.serving.protocols.fields import DECLARED, read_body, refuse
from infer.serving.protocols.openai.ask import ChatBody, CompletionBody
from infer.serving.protocols.responses.ask import ResponseBody
from infer.serving.server.routes.web_files import page_parameters
from parameter_tables import written
from refusals import check_refused
from watched import python_command

INVALID: list[tuple[str, list[Any]]] = [
    ("temperature", [-1.0, -1e-9, 2.1, math.nan, math.inf, "1", None, True, 10**400]),
    ("top_k", [0, -1, 1.5, 2.0, "4", True, math.nan]),
    ("top_p", [0, 0.0, 1.5, -0.1, math.nan, math.inf, "0.9", None, True]),
    ("min_p", [-0.1, 1.0, 1, math.nan, None, "0"]),
    ("repetition_penalty", [0.0, -1.0, math.inf, math.nan, None, "1.1"]),
    ("repetition_window", [-1, 1.0, True, "64"]),
    ("frequency_penalty", [-2.1, 2.1, math.nan, None]),
    ("presence_penalty", [-2.1, 2.1, math.nan, None]),
    ("logit_bias", [[1], "x", "x\n" * 10_000, {"a": 1.0}, {-1: 1.0}, {1: math.nan}, {1: "2"}, {True: 1.0}, {1: None}]),
    ("allowed_token_ids", [[], 5, "12", [1.0], [-1], [True], {1: 2}]),
    ("max_new_tokens", [0, -1, 1.5, True, "10"]),
    ("min_new_tokens", [-1, 0.5, None, True]),
    ("stop", [[""], "", [1], 5, ["a", ""], b"x", {"a": 1}]),
    ("stop_token_ids", [5, [-1], ["a"], [True], "5"]),
    ("include_stop_str_in_output", [1, None, "yes"]),
    ("ignore_eos", [0, None]),
    ("seed", [-1, 2**64, 1.0, True, "7"]),
    ("logprobs", [-1, 21, True, 2.0]),
    ("logprobs_mode", ["other", None, 1]),
    ("temperature_last", [1, None]),
    ("json_schema", [5, "", {"a": object()}]),
    ("regex", ["", 5]),
    ("grammar", ["", 5]),
    ("choice", [[], "a", [""], [1], 5]),
]


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in INVALID for value in values])
def test_an_invalid_value_is_an_error_that_names_the_parameter(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^(?=.*{name}).{{,199}}\\Z") as raised:  # one line
        SamplingParams(**{name: value})
    assert isinstance(raised.value, InvalidRequestError)


def test_every_parameter_has_a_test_that_it_is_validated() -> None:
    assert {name for name, _ in INVALID} == set(PARAMETER_NAMES)


def test_the_message_gives_name_rule_and_value() -> None:
    with pytest.raises(ValueError, match=r"^top_p must be in \(0, 1\], got 1\.5$"):
        SamplingParams(top_p=1.5)


@cases("name meant", ("top_pp", "top_p"), ("temprature", "temperature"), ("max_token", "max_new_tokens"))
def test_an_unknown_name_says_what_was_meant(name: str, meant: str) -> None:
    assert issubclass(UnknownParameterError, TypeError)
    for make in (lambda given: SamplingParams(**given), SamplingParams.from_mapping):
        check_refused(partial(make, {name: 1}), f"did you mean {meant}", UnknownParameterError)
        check_refused(partial(make, {"zzzzzz": 1}), "use one of temperature, top_k")
    check_refused(lambda: default_params({}, {"is_chat": 1, "from_model": 1}, is_chat=True), "parameter 'is_chat'")
    with pytest.raises(TypeError, match="by name"):
        SamplingParams(0.5)  # type: ignore[misc]


def test_params_never_change() -> None:
    params = SamplingParams(logit_bias={1: 2.0})
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.top_p = 0.5  # type: ignore[misc]
    with pytest.raises(TypeError):
        params.logit_bias[1] = 3.0  # type: ignore[index]


def test_collections_are_copied() -> None:
    bias, stop, token_ids = {1: 2.0}, ["a"], [3]
    params = SamplingParams(logit_bias=bias, stop=stop, stop_token_ids=token_ids, allowed_token_ids=token_ids)
    bias[1], stop[0], token_ids[0] = 9.0, "b", 4
    assert params == SamplingParams(logit_bias={1: 2.0}, stop="a", stop_token_ids={3}, allowed_token_ids={3})


def test_one_stop_string_is_a_list_of_one_and_none_is_empty() -> None:
    assert SamplingParams(stop="\n\n").stop == ("\n\n",)
    assert SamplingParams(stop=None) == SamplingParams(stop=[]) == SamplingParams()
    assert SamplingParams().stop is SamplingParams(stop=()).stop is None
    assert SamplingParams(logit_bias={}) == SamplingParams()


def test_the_minimum_is_at_most_the_maximum() -> None:
    with pytest.raises(InvalidRequestError, match=r"min_new_tokens must be at most max_new_tokens \(5\), got 6"):
        SamplingParams(min_new_tokens=6, max_new_tokens=5)
    assert SamplingParams(min_new_tokens=600, max_new_tokens=None).min_new_tokens == 600


@pytest.mark.parametrize("alias", ["max_tokens", "num_tokens", "max_completion_tokens"])
def test_the_constructor_knows_aliases(alias: str) -> None:
    params = SamplingParams(**{alias: 7})
    assert (params, dataclasses.replace(params, seed=1).max_new_tokens) == (SamplingParams(max_new_tokens=7), 7)
    twice = f"max_new_tokens is given twice, as {alias} and as max_new_tokens"
    check_refused(lambda: SamplingParams(**{alias: 7, "max_new_tokens": 7}), twice)
    check_refused(lambda: SamplingParams(**{alias: 0}), r"^max_new_tokens must be")


def test_the_constructors_help_names_every_parameter() -> None:
    assert list(inspect.signature(SamplingParams).parameters) == list(PARAMETER_NAMES)


def test_params_are_shown_by_their_differences_from_the_defaults() -> None:
    assert repr(SamplingParams()) == "SamplingParams()"
    assert repr(SamplingParams(temperature=0, stop="a", top_p=1.0)) == "SamplingParams(temperature=0.0, stop=('a',))"
    long = SamplingParams(regex="ab\n" * 1000, seed=0)
    assert "\n" not in repr(long)
    assert len(repr(long)) < 150
    assert eval(repr(SamplingParams(logit_bias={3: 1.5}, seed=0))) == SamplingParams(logit_bias={3: 1.5}, seed=0)


def test_a_schema_is_a_mapping_or_a_class_of_pydantic_and_the_only_constraint() -> None:
    assert SamplingParams(json_schema={"type": "object"}).json_schema == '{"type": "object"}'
    check_refused(lambda: SamplingParams(regex="a", choice=["b"]), "at most one of")

    class Person(pydantic.BaseModel):
        name: str
        age: int | None = None

    params = SamplingParams(json_schema=Person)
    assert json.loads(str(params.json_schema)) == Person.model_json_schema()
    assert pickle.loads(pickle.dumps(params)) == params

    class Odd(pydantic.BaseModel):
        value: Callable[[], int]

    for wrong in (pydantic.BaseModel, Odd):
        check_refused(partial(SamplingParams, json_schema=wrong), r"^json_schema: model_json_schema\(\) fails: ")


def test_a_schema_that_json_cannot_write_is_one_clear_line() -> None:
    deep, cyclic = dict[str, Any](), dict[str, Any]()
    for _ in range(100_000):
        deep = {"items": deep}
    cyclic["self"] = cyclic
    for wrong, message in ((deep, "nested too deep"), (cyclic, "must be JSON: Circular reference")):
        check_refused(partial(SamplingParams, json_schema=wrong), f"^json_schema .*{message}")


@pytest.mark.parametrize("name", ["stop", "choice", "regex", "grammar", "json_schema"])
def test_text_that_no_model_can_write_is_refused(name: str) -> None:
    for text in ("\ud800", "a\udfff"):
        given, rule = {name: [text] if name in ("stop", "choice") else text}, "Unicode text without the lone surrogate"
        check_refused(partial(SamplingParams, **given), f"^{name} must be {rule} U\\+D")


def test_edges_accept_top_k_off_and_bias_ids_as_text() -> None:
    for off in (0, -1, None):
        assert SamplingParams.from_mapping({"top_k": off}).top_k is None
    for wrong in (-2, False, 0.0):
        check_refused(partial(SamplingParams.from_mapping, {"top_k": wrong}), "top_k")
    assert SamplingParams.from_mapping({"logit_bias": {"12": -5}}).logit_bias == {12: -5.0}


def test_params_survive_copy_replace_and_pickle_and_are_hashable() -> None:
    params = SamplingParams(temperature=0, logit_bias={1: -math.inf}, stop="a", stop_token_ids=[1], seed=2**64 - 1)
    assert params == copy.deepcopy(params) == pickle.loads(pickle.dumps(params)) == dataclasses.replace(params)
    assert len({params, copy.deepcopy(params)}) == 1
    with pytest.raises(InvalidRequestError):
        dataclasses.replace(params, top_p=7)


def test_numbers_of_other_libraries_are_numbers() -> None:
    import numpy as np

    params = SamplingParams(temperature=np.float32(0.5), top_k=np.int64(3), logit_bias={np.int32(1): np.float16(1)})  # type: ignore[arg-type]
    assert (params.temperature, params.top_k, params.logit_bias) == (0.5, 3, {1: 1.0})
    assert type(params.top_k) is int


@pytest.mark.slow
@settings(max_examples=50)
@given(st.dictionaries(st.sampled_from(PARAMETER_NAMES), st.one_of(st.floats(), st.integers(), st.text(), st.none())))
def test_any_values_give_params_or_one_clear_line(values: dict[str, Any]) -> None:
    message = ""
    try:
        params = SamplingParams.from_mapping(values)
    except InvalidRequestError as error:
        message = str(error)
    else:
        assert dataclasses.replace(params) == params
    assert not message or any(name in message for name in values)


def test_timing_adds_up() -> None:
    timing = GenerationTiming(prefill_time_s=0.5, decode_times_s=[0.1, 0.3], sampling_times_s=[0.05, 0.05])
    assert (timing.ttft_s, timing.decode_time_s) == (0.5, pytest.approx(0.4))
    assert timing.total_time_s == pytest.approx(1.0)
    assert timing.total_time_s >= timing.prefill_time_s + timing.decode_time_s
    assert timing.decode_tokens_per_second == pytest.approx(2 / 0.5)
    assert timing.inter_token_times_s == pytest.approx([0.15, 0.35])
    assert timing.inter_token_p50_s == pytest.approx(0.25)
    one = GenerationTiming(prefill_time_s=0.5)
    assert (one.decode_tokens_per_second, one.inter_token_p99_s, one.total_time_s) == (None, None, 0.5)
    assert one.to_json()["arrival_gap_p50_s"] is None
    streamed = GenerationTiming(0.5, [0.1, 0.1], [0.0, 0.0], [0.5, 0.75, 0.75])
    assert streamed.arrival_gaps_s == [0.25, 0.0]
    assert streamed.to_json()["arrival_gap_p50_s"] == pytest.approx(0.125)


def test_the_rate_leaves_out_the_first_two_steps_where_there_are_more() -> None:
    assert GenerationTiming(0.5, [4.0, 2.0], [0.0, 0.0]).decode_tokens_per_second == pytest.approx(1 / 3)
    settled = GenerationTiming(0.5, [4.0, 2.0, 0.1, 0.1, 0.2], [0.0, 0.0, 0.1, 0.1, 0.0])
    assert settled.decode_tokens_per_second == pytest.approx(3 / 0.6)
    drafted = GenerationTiming(0.5, [9.0, 0.0, 8.0, 0.0, 0.0, 0.5, 0.0], [0.1, 0.1, 0.1, 0.1, 0.1, 0.25, 0.25])
    assert drafted.decode_tokens_per_second == pytest.approx(2 / 1.0), "drafts count with the step that verified them"


@settings(max_examples=50)
@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0, 100))
def test_percentiles_are_those_of_numpy(values: list[float], percent: float) -> None:
    import numpy as np

    assert percentile(values, percent) == pytest.approx(float(np.percentile(values, percent)), rel=1e-9, abs=1e-9)


def test_a_result_is_json() -> None:
    timing, logprobs = GenerationTiming(0.5, [0.1]), [TokenLogprob(1, -math.inf, 9, ((2, -0.5),))]
    others = {"stop_reason": "\n", "seed": 2**64 - 1, "logprobs": logprobs}
    result = GenerationResult([1, 2], "é", "stop", 3, 2, timing, **others)  # type: ignore[arg-type]
    record = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert record["timing"]["ttft_s"] == 0.5
    top = [{"token_id": 2, "logprob": -0.5}]
    assert record["logprobs"][0] == {"token_id": 1, "logprob": None, "rank": 9, "top": top}
    assert (record["seed"], record["stop_reason"], record["text"]) == (2**64 - 1, "\n", "é")


def test_a_result_is_shown_in_one_readable_line() -> None:
    timing = GenerationTiming(0.1, [0.01] * 4, [0.0] * 4)
    result = GenerationResult([1] * 5, "one\ntwo", "eos", 3, 5, timing)
    assert repr(result) == "GenerationResult('one\\ntwo', eos, 5 tokens, 100.0 tok/s)"
    assert repr(timing) == "GenerationTiming(ttft 100.0 ms, 4 steps, 100.0 tok/s)"
    long = dataclasses.replace(result, text="word " * 1000, finish_reason="length", stop_reason="max_new_tokens")
    assert repr(long).endswith("…, length: max_new_tokens, 5 tokens, 100.0 tok/s)")
    assert len(repr(long)) < 160
    values = {"finish_reason": "error", "stop_reason": "logits", "error": "a row of NaN", "token_ids": []}
    failed = dataclasses.replace(result, **values)
    assert repr(failed) == "GenerationResult('one\\ntwo', error: a row of NaN, 0 tokens, 100.0 tok/s)"
    assert repr(GenerationTiming()) == "GenerationTiming(ttft 0.0 ms, 0 steps)"
    assert repr(GenerationStats(multi_steps=1, single_steps=2)) == "GenerationStats(single_steps=2, multi_steps=1)"


# The table of defaults


def test_files_go_before_the_card_and_the_card_before_neutral_values() -> None:
    found = SamplingDefaults({"temperature": 0.6}, {"temperature": 0.2, "top_p": 0.9})
    assert dict(found) == {"temperature": 0.6, "top_p": 0.9}
    assert (found.from_files, found.from_card) == ({"temperature": 0.6}, {"top_p": 0.9})
    assert default_params(found, {}, is_chat=True) == SamplingParams(temperature=0.6, top_p=0.9, max_new_tokens=512)
    assert default_params({}, {}, is_chat=True) == SamplingParams(temperature=0.7, top_p=0.95, max_new_tokens=512)
    assert default_params({}, {}, is_chat=False) == SamplingParams(max_new_tokens=512)
    assert default_params(found, {"temperature": 0, "max_tokens": 3}, is_chat=True).temperature == 0


def test_a_card_s_repetition_penalty_goes_with_the_card_s_temperature() -> None:
    found = SamplingDefaults({}, {"temperature": 0.0, "repetition_penalty": 1.1, "repetition_window": 64})
    params = default_params(found, {}, is_chat=True)
    assert (params.temperature, params.repetition_penalty, params.repetition_window) == (0, 1.1, 64)
    params = default_params(found, {"temperature": 0}, is_chat=True)
    assert (params.repetition_penalty, params.repetition_window) == (1.0, None)
    assert default_params(found, {"temperature": 0, "repetition_penalty": 1.2}, is_chat=True).repetition_penalty == 1.2
    of_files = SamplingDefaults({"temperature": 0.5, "repetition_penalty": 1.1})
    assert default_params(of_files, {"temperature": 0}, is_chat=True).repetition_penalty == 1.1


def test_only_the_card_that_needs_it_and_the_seeds_preset_penalise_repetition() -> None:
    tables = {"neutral": dict[str, Any]()} | {name: dict(each.sampling) for name, each in INSTALLED_MODELS.items()}
    penalised = set[str]()
    for (name, values), is_chat in product(tables.items(), (False, True)):
        penalised |= {name} if default_params(values, {}, is_chat=is_chat).repetition_penalty != 1.0 else set()
    assert (penalised, PRESETS["seed"]["repetition_penalty"]) == ({"smollm2"}, 1.1)


def test_a_top_p_of_0_in_a_models_file_keeps_one_token() -> None:
    assert 0 < default_params(sampling_defaults({"top_p": 0}), {}, is_chat=False).top_p < 1e-6


@cases("name value",
    ("temperature", "hot"), ("temperature", float("nan")), ("temperature", 3), ("top_p", -1), ("top_p", 1.5),
    ("top_k", -2), ("top_k", 1.5), ("min_p", 1), ("repetition_penalty", 0), ("repetition_penalty", [1]),
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


def test_a_call_without_params_takes_the_table(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = shutil.copytree(folder, tmp_path / "model")
    (copy / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "top_k": 20}))
    llm = LLM(copy, chat_template="{% for m in messages %}{{ m.content }}{% endfor %}")
    seen: list[SamplingParams] = []

    def watch(limits: Limits, params: SamplingParams) -> SamplingParams:
        seen.append(params)
        return checked_params(limits, params)

    monkeypatch.setattr("infer.engine.requests.request_maker.checked_params", watch)
    message = {"role": "user", "content": "ab"}
    for call, asked in ((llm.generate, "ab"), (llm.generate, [message]), (llm.chat, [message])):
        call(asked)
    for call, asked in ((llm.session().send, "ab"), (llm.session().answer, [message]), (llm.generate_all, ["ab"])):
        call(asked)
    llm.generate("ab", top_k=3)
    values = [(params.temperature, params.top_k, params.top_p, params.max_new_tokens) for params in seen]
    plain, chat = (0.6, 20, 1.0, 512), (0.6, 20, 0.95, 512)
    assert values == [plain, chat, chat, chat, chat, plain, (0.6, 3, 1.0, 512)]


def test_an_installed_models_card_is_found_by_its_file() -> None:
    found = defaults_of(open_checkpoint(resolve("smollm2")))
    assert found.from_card == {"temperature": 0.0, "top_p": 0.9, "repetition_penalty": 1.1, "repetition_window": 64}
    assert found.from_files == {}


# Declarations


CHAT = {"messages": [{"role": "user", "content": "a"}]}
IN_CHATS = {name: each for name, each in DECLARED.items() if each.bodies}


@pytest.mark.parametrize("path", list(written()), ids=lambda path: path.name)
def test_texts_written_from_the_declarations_are_up_to_date(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == written()[path], "run tests/helpers/parameter_tables.py"


def test_keywords_are_the_declared_parameters_and_options() -> None:
    assert set(SamplingKeywords.__annotations__) == {*PARAMETERS, *ALIASES}
    assert set(RequestKeywords.__annotations__) == {*PARAMETERS, *ALIASES, *OPTIONS}


@pytest.mark.parametrize("name", list(IN_CHATS))
def test_a_body_has_each_declared_field_and_null_is_absent(name: str) -> None:
    field = DECLARED[name].body_name or name
    assert getattr(read_body(msgspec.json.encode(CHAT | {field: None}), ChatBody), field) is None
    assert (field in CompletionBody.__struct_fields__) == (DECLARED[name].bodies != "conversations")
    assert (field in ResponseBody.__struct_fields__) == (DECLARED[name].bodies != "completions")


def values_beside(declared: Parameter) -> list[tuple[Any, bool]]:
    """Return values at the limits of a parameter and just outside, with whether they are allowed."""
    match declared.kind:
        case Number() as kind:
            found = [(kind.least, not kind.excludes_least), (kind.least - 0.5, False)]
            most = [(kind.most, not kind.excludes_most), (kind.most + 1, False)]
            return found + (most if kind.most < float("inf") else [])
        case Count() as kind:
            least = min(kind.least, *declared.none, kind.least)
            found = [(least, True), (least - 1, False), (1.5, False)]
            return found + ([] if kind.most is None else [(kind.most, True), (kind.most + 1, False)])
        case OneOf() as kind:
            return [*((value, True) for value in kind.values), ("neither", False)]
    return []


@pytest.mark.parametrize("name", [name for name in IN_CHATS if values_beside(DECLARED[name])])
def test_a_body_has_the_limits_of_the_declaration(name: str) -> None:
    field = DECLARED[name].body_name or name
    for value, is_allowed in values_beside(DECLARED[name]):
        content = msgspec.json.encode(CHAT | {field: value})
        if is_allowed:
            assert getattr(read_body(content, ChatBody), field) == value
            continue
        if value == 0 and DECLARED[name].zero is not None:  # other servers take it
            read_body(content, ChatBody)
            continue
        with pytest.raises(InvalidRequestError) as refused:
            read_body(content, ChatBody)
        assert refused.value.param == field, value


def test_a_body_has_as_many_stop_strings_as_the_limit_says() -> None:
    read_body(msgspec.json.encode(CHAT | {"stop": ["a"] * MAX_STOPS}), ChatBody)
    body = msgspec.json.encode(CHAT | {"stop": ["a"] * (MAX_STOPS + 1)})
    message = f"stop: expected `array` of length <= {MAX_STOPS}, got a list of 65"
    check_refused(lambda: read_body(body, ChatBody), message)


def test_an_error_of_the_library_is_renamed_without_a_change_of_the_user_s_text() -> None:
    error = InvalidRequestError("max_new_tokens must be at least 1, got 'max_new_tokens'", param="max_new_tokens")
    told = InvalidRequestError("regex: reasoning_budget is no pattern", param="regex")
    names = {"messages": "max_tokens", "prompt": "max_tokens", "input": "max_output_tokens"}
    for prompt_name, name in names.items():
        for one, text, param in (
            (error, f"{name} must be at least 1, got 'max_new_tokens'", name),
            (told, told, "regex"),
        ):
            found = refusal(one, prompt_name)
            assert (str(found), found.param) == (str(text), param)
    assert refusal(InvalidRequestError("regex is no parameter here"), "input").param == "input"


def test_a_refusal_survives_a_process() -> None:
    for made in (refuse("a is not b", "a", "invalid_type"), InvalidRequestError("a", param="b")):
        found = pickle.loads(pickle.dumps(made))
        assert (type(found), str(found), vars(found)) == (type(made), str(made), vars(made))


NAME = "tools[0].function.name"


@cases(
    "body param message",
    ({"n": "a"}, "n", "n: expected `int | null`, got 'a'"),
    ({"n": 0}, "n", "n: expected `int` >= 1, got 0"),
    ({"stop": [1]}, "stop[0]", "stop[0]: expected `str`, got 1"),
    ({"logit_bias": {" - at `$.n`": "x"}}, "logit_bias", "logit_bias: expected `float`"),
    ({"overflow": " - at `$.n`"}, "overflow", "overflow must be 'error' or 'truncate_left', got ' - at `$.n`'"),
    ({"tools": [{"function": {"name": 5}}]}, NAME, f"{NAME}: expected `str`, got 5"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "messages[0].content is missing: it is required"),
    ({"guided_regex": 3}, "guided_regex", "guided_regex is read as regex: expected `str | null`, got 3"),
)
def test_a_refusal_has_the_place_that_msgspec_names(body: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        read_body(msgspec.json.encode(CHAT | body), ChatBody)
    assert (refused.value.param, str(refused.value)) == (param, message)


def test_numbers_that_stand_for_none_are_none() -> None:
    for name, declared in PARAMETERS.items():
        for number in declared.none:
            assert getattr(SamplingParams.from_mapping({name: number}), name) is None


def test_a_type_checker_sees_the_literals_of_the_declarations() -> None:
    assert SamplingKeywords.__annotations__["logprobs_mode"] == Literal["raw", "processed"]
    assert PARAMETERS["logprobs_mode"].kind.values == ("raw", "processed")


def test_the_page_gets_a_slider_inside_the_limits_of_each_number() -> None:
    sliders = {each["name"]: each for each in json.loads(json.dumps(page_parameters()))["numbers"]}
    assert {"temperature", "top_k", "top_p", "min_p", "max_tokens"} <= set(sliders)
    for name, declared in PARAMETERS.items():
        if declared.slider is not None:
            slider = sliders[declared.body_name or name]
            for value in (slider["min"], slider["max"], slider["off"]):
                SamplingParams.from_mapping({name: value})


def test_declarations_load_neither_torch_nor_msgspec_and_help_neither_protocols() -> None:
    program = (
        "import sys, infer.parameters, infer.sampling_params, infer.outputs, infer.engine.step.request_options\n"
        "import infer.engine.speculation.policy\n"
        "print(*({'torch', 'msgspec', 'numpy', 'numba'} & set(sys.modules)))\n"
        "from infer.cli import main\n"
        "main(['generate', '--help'])\n"
        "print(*({'torch', 'msgspec', 'infer.serving.protocols'} & set(sys.modules)))"
    )
    done = subprocess.run(python_command(program), capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert (lines[0], lines[-1]) == ("", "")
    assert "--min-p" in done.stdout
