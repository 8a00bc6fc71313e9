"""Claims about `SamplingParams` and results: valid values, messages, and fields that cannot be changed."""

import copy
import dataclasses
import inspect
import json
import math
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infer.errors import InvalidRequestError
from infer.outputs import GenerationResult, GenerationStats, GenerationTiming, TokenLogprob, percentile
from infer.sampling_params import PARAMETER_NAMES, SamplingParams, UnknownParameterError
from refusals import check_refused

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


@pytest.mark.parametrize(
    ("name", "meant"), [("top_pp", "top_p"), ("temprature", "temperature"), ("max_token", "max_new_tokens")]
)
def test_an_unknown_name_says_what_was_meant(name: str, meant: str) -> None:
    assert issubclass(UnknownParameterError, TypeError)
    for make in (lambda given: SamplingParams(**given), SamplingParams.from_mapping):
        check_refused(partial(make, {name: 1}), f"did you mean {meant}", UnknownParameterError)
        check_refused(partial(make, {"zzzzzz": 1}), "use one of temperature, top_k")
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
    assert params == SamplingParams(
        logit_bias={1: 2.0}, stop=("a",), stop_token_ids=frozenset({3}), allowed_token_ids={3}
    )


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
