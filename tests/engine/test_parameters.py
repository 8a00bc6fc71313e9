"""A parameter is declared once, and everything derived from the declarations agrees with them."""

import json
import pickle
import subprocess
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from cases import cases
from infer.compute.sampling.keywords import SamplingKeywords
from infer.engine.requests.request_options import OPTIONS, RequestKeywords
from infer.errors import InvalidRequestError
from infer.parameters import Count, Number, OneOf, Parameter
from infer.request_limits import MAX_STOPS
from infer.sampling_params import ALIASES, PARAMETERS, SamplingParams
from infer.serving.protocols.bodies import ChatBody, CompletionBody, ResponseBody
from infer.serving.protocols.chat_messages import complete_chat
from infer.serving.protocols.declared_fields import DECLARED
from infer.serving.protocols.params import refusal
from infer.serving.protocols.read_body import read_body
from infer.serving.protocols.refusals import refuse
from infer.serving.server.routes.page_parameters import page_parameters
from parameter_tables import written
from refusals import check_refused
from watched import python_command

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
        read_body(msgspec.json.encode(CHAT | body), ChatBody, complete_chat)
    assert (refused.value.param, str(refused.value)) == (param, message)


def test_numbers_that_stand_for_none_are_none() -> None:
    for name, declared in PARAMETERS.items():
        for number in declared.none:
            assert getattr(SamplingParams.from_mapping({name: number}), name) is None


def test_a_type_checker_sees_the_literals_of_the_declarations() -> None:
    assert SamplingKeywords.__annotations__["logprobs_mode"] == Literal["raw", "processed"]
    assert PARAMETERS["logprobs_mode"].kind.values == ("raw", "processed")


def test_the_page_gets_a_slider_inside_the_limits_of_each_number() -> None:
    found = json.loads(json.dumps(page_parameters()))
    sliders = {each["name"]: each for each in found["numbers"]}
    assert {"temperature", "top_k", "top_p", "min_p", "max_tokens"} <= set(sliders)
    for name, declared in PARAMETERS.items():
        if declared.slider is not None:
            slider = sliders[declared.body_name or name]
            for value in (slider["min"], slider["max"], slider["off"]):
                SamplingParams.from_mapping({name: value})


def test_declarations_load_neither_torch_nor_msgspec_and_help_neither_protocols() -> None:
    program = (
        "import sys, infer.parameters, infer.sampling_params, infer.outputs, infer.engine.requests.request_options\n"
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
