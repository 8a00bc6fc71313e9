"""The arguments of calls: keywords, mappings, prompts that are too long, and refusals in one line.

Values of wrong types are tried in a separate process, because the tests' hook would refuse them first.
"""

import json
import re
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from infer import LLM, InvalidRequestError, SamplingParams, load_tokenizer
from infer.compute.sampling.keywords import params_of, split_keywords
from infer.engine.requests.prompt_encoding import fitted
from infer.errors import ContextLengthError
from infer.sampling_params import UnknownParameterError
from programs import Programs
from refusals import check_refused
from test_session import CONTEXT, check_turn

GREEDY = SamplingParams(temperature=0, max_new_tokens=6, ignore_eos=True)
QUESTION = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder, capture=False)


# Sampling of an answer


def test_keywords_and_mappings_say_how_every_call_samples(llm: LLM) -> None:
    values: dict[str, Any] = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
    text, chat = llm.generate("ab", GREEDY).token_ids, llm.chat(QUESTION, GREEDY).token_ids
    session = llm.session()
    session.append("ab")
    found = [llm.generate("ab", **values), llm.generate("ab", values), session.generate(**values)]
    found += [llm.stream("ab", **values).result, llm.stream("ab", values).result]
    found += [*llm.generate_all(["ab"] * 2, **values), *llm.generate_all(["ab"] * 2, [values, GREEDY])]
    assert [result.token_ids for result in found] == [text] * 9
    found = [llm.chat(QUESTION, **values), llm.chat(QUESTION, values), llm.session().answer(QUESTION, **values)]
    found += [llm.session().send("hello", **values), llm.session().stream("hello", values).result]
    assert [result.token_ids for result in found] == [chat] * 5
    assert llm.sample_trace("ab", temperature=0).token_id == text[0]


def test_keywords_are_over_the_models_own_defaults_and_params_are_exact() -> None:
    defaults = {"temperature": 0.6, "top_k": 20}
    assert params_of(None, {"top_k": 5}, defaults, is_chat=False).temperature == 0.6
    assert params_of({"top_k": -1}, {}, defaults, is_chat=False).top_k is None
    assert params_of(None, {}, {}, is_chat=True).temperature == 0.7
    assert params_of(SamplingParams(), {}, defaults, is_chat=True) == SamplingParams()


def test_params_and_keywords_together_are_refused(llm: LLM) -> None:
    check_refused(lambda: llm.generate("ab", GREEDY, temperature=0), "params and temperature= are both given")


MEANT = {"temprature": "temperature", "max_token": "max_new_tokens", "on_tokens": "on_token", "overflw": "overflow"}


@pytest.mark.parametrize(("name", "meant"), MEANT.items())
def test_an_unknown_keyword_says_what_was_meant(llm: LLM, name: str, meant: str) -> None:
    calls = [llm.generate, llm.stream, lambda prompt, **given: llm.session().send(prompt, **given)]
    for call in [*calls, lambda prompt, **given: llm.chat(QUESTION, **given)]:
        with pytest.raises(UnknownParameterError, match=f"unknown keyword '{name}': did you mean {meant}"):
            call("ab", **{name: 1})


def test_variables_of_a_template_are_distinguished_from_misspelt_keywords() -> None:
    template, keywords = "{% if temprature %}{{ tone }}{% endif %}", {"temprature": 1, "seed": 2, "anything": 3}
    assert split_keywords(keywords, [template]) == ({"seed": 2}, {"temprature": 1, "anything": 3})


def test_a_session_takes_no_sampling_for_all_turns(llm: LLM) -> None:
    check_refused(lambda: llm.session(temperature=0), r"temperature .*pass it to send\(\)", UnknownParameterError)


# Prompts


def test_arrays_of_ids_are_prompts(llm: LLM) -> None:
    expected = llm.generate([97, 98], GREEDY).token_ids
    for prompt in (np.array([97, 98]), np.array([97, 98], ">i2"), torch.tensor([97, 98]), (97, 98)):
        result = llm.generate(prompt, GREEDY)
        assert result.token_ids == expected
        json.dumps(result.to_json())


# Truncation of a long prompt


def test_a_long_text_keeps_its_last_tokens_and_the_answer_its_room(llm: LLM) -> None:
    prompt = [65 + index % 26 for index in range(CONTEXT + 50)]
    check_refused(lambda: llm.generate(prompt, GREEDY), "overflow='truncate_left'", ContextLengthError)
    result = llm.generate(prompt, GREEDY, overflow="truncate_left")
    kept = prompt[-(CONTEXT - 6) :]
    assert result.token_ids == llm.generate(kept, GREEDY).token_ids
    assert (result.prompt_tokens, result.truncated_tokens, result.generated_tokens) == (len(kept), 56, 6)
    assert result.to_json()["truncated_tokens"] == 56
    assert llm.stream(prompt, GREEDY, overflow="truncate_left").result.token_ids == result.token_ids
    assert llm.generate_all([prompt, [65]], GREEDY, overflow="truncate_left")[0].token_ids == result.token_ids
    assert llm.generate([65] * 50, GREEDY, overflow="truncate_left").truncated_tokens == 0


@pytest.mark.parametrize(("limit", "room"), [(6, 6), (10_000, CONTEXT // 2), (None, CONTEXT // 2), (1, 1)])
def test_the_answers_room_is_its_limit_and_half_of_the_context_at_most(llm: LLM, limit: int | None, room: int) -> None:
    params = SamplingParams(max_new_tokens=limit)
    ids = list(range(10_000))
    for begins_with, kept in ((None, ids[-(CONTEXT - room) :]), (0, [0, *ids[len(ids) - (CONTEXT - room) + 1 :]])):
        limits = llm.host.requests.limits._replace(bos_token_id=begins_with)
        found = fitted(ids, list, limits, params, "truncate_left")
        assert found[:2] == (kept, 10_000 - len(kept)), "BOS stays"


def test_a_long_conversation_loses_its_oldest_turns_and_keeps_its_system_message(llm: LLM) -> None:
    system = {"role": "system", "content": "be brief"}
    messages = [system]
    for index in range(20):
        messages.append({"role": "user", "content": f"question {index:02} {'x' * 20}"})
        messages.append({"role": "assistant", "content": f"answer {index:02}"})
    messages.append({"role": "user", "content": "last"})
    with pytest.raises(ContextLengthError):
        llm.chat(messages, GREEDY)
    result = llm.chat(messages, GREEDY, overflow="truncate_left")
    shorter = [[system, *messages[start:]] for start in range(1, len(messages), 2)]
    whole, *counts = (len(llm.tokenizer.encode_chat(each)) for each in (messages, *shorter))
    kept = next(count for count in counts if count <= CONTEXT - 6)
    assert result.token_ids == llm.chat(shorter[counts.index(kept)], GREEDY).token_ids
    assert (result.prompt_tokens, result.truncated_tokens) == (kept, whole - kept)
    assert llm.generate(messages, GREEDY, overflow="truncate_left").token_ids == result.token_ids
    with pytest.raises(ContextLengthError, match="its last turn has"):
        llm.chat([system, {"role": "user", "content": "x" * CONTEXT}], GREEDY, overflow="truncate_left")


def test_a_session_forgets_its_oldest_turns_and_goes_on(llm: LLM) -> None:
    session = llm.session(system="be brief")
    system, lost = session.messages, 0
    for index in range(12):
        result = check_turn(llm, session, f"question {index:02} {'x' * 30}", GREEDY, overflow="truncate_left")
        assert result.prompt_tokens <= CONTEXT - 6
        lost += result.truncated_tokens > 0
    assert lost > 0
    roles = [message["role"] for message in session.messages]
    assert roles == ["system", *["user", "assistant"] * (len(roles) // 2)]
    assert "question 11" in session.messages[-2]["content"]
    session.rewind(len(result.token_ids) + 1)
    assert session.messages == system == [{"role": "system", "content": "be brief"}], "what was read again is one turn"


def test_ids_of_a_session_lose_their_beginning_too(llm: LLM) -> None:
    session = llm.session()
    session.append([65 + index % 26 for index in range(CONTEXT - 2)])
    before = session.token_ids
    result = session.generate(GREEDY, overflow="truncate_left")
    assert (result.truncated_tokens, session.token_ids) == (4, before[4:] + result.token_ids)
    assert result.token_ids == llm.generate(before[4:], GREEDY).token_ids


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infer.text.tokenizer.tokenizer.encode", Mock(side_effect=AssertionError("it was tokenized")))
    text = "ab e " * 1000
    for call in (lambda: llm.generate(text, GREEDY), lambda: llm.session().append(text)):
        with pytest.raises(ContextLengthError, match=rf"at least 500 tokens and .* context length is {CONTEXT} "):
            call()


def test_a_text_of_many_contexts_is_truncated_where_that_is_asked_for(llm: LLM) -> None:
    text = "ab e " * 1000
    ids = llm.tokenizer.encode(text)
    result = llm.generate(text, GREEDY, overflow="truncate_left")
    assert result.token_ids == llm.generate(ids, GREEDY, overflow="truncate_left").token_ids
    assert result.truncated_tokens == len(ids) - result.prompt_tokens > CONTEXT


def test_no_encoding_is_shorter_than_its_bound(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    for text in ("", "ab", "abababab", "e e e ", "<|im_end|>" * 9, "é世\u0301" * 5, "\0" * 7, "a  b\n"):
        assert tokenizer.least_num_tokens(text) <= len(tokenizer.encode(text))
    assert tokenizer.least_num_tokens("ab" * 1000) >= 200


# Settings


def test_a_model_is_shown_in_a_line(llm: LLM, folder: Path) -> None:
    size = f"{sum(weight.numel() for weight in load_file(folder / 'model.safetensors').values()) / 1e6:.1f}M"
    assert repr(llm) == f"LLM({folder.name}, llama {size}, F32, context {CONTEXT})"
    assert repr(llm.tokenizer) == "Tokenizer(260 tokens, adds no BOS, chat template)"


def test_a_dtype_is_the_same_by_name_and_by_object(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "saved"
    session = LLM(folder, capture=False, dtype="float32").session()
    session.append("ab")
    session.save(path)
    assert LLM(folder, capture=False, dtype=torch.float32).load_session(path).token_ids == session.token_ids


def test_threads_are_as_they_were_where_the_model_does_not_load(folder: Path, tmp_path: Path) -> None:
    from infer.compute import ops

    before = torch.get_num_threads(), ops.backend_of(torch.device("cpu")).num_threads()
    for values in ({"model": tmp_path / "none"}, {"model": folder, "max_seq_len": 10**6}):
        with pytest.raises(InvalidRequestError):
            LLM(threads=before[1] + 1, **values)
        assert (torch.get_num_threads(), ops.backend_of(torch.device("cpu")).num_threads()) == before


@pytest.mark.slow(cases=1)
@pytest.mark.parametrize("backend", ["xgrammar", "llguidance"])
def test_either_grammar_backend_holds_answers_and_sessions(folder: Path, backend: str) -> None:
    llm = LLM(folder, capture=False, grammar_backend=backend)  # type: ignore[arg-type]
    schema = {"properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
    for seed in range(3):
        values: dict[str, Any] = {"temperature": 1.0, "seed": seed, "max_tokens": 60}
        values["json_schema"] = {"type": "object", **schema}
        for result in (llm.generate("ab", **values), llm.session().send("ab", **values)):
            assert isinstance(json.loads(result.text)["a"], bool)
    assert llm.generate("ab", choice=["yes", "no"], max_tokens=9).text in ("yes", "no")
    assert llm.host.requests._compiler.backend == backend


# Refused calls, in a process without the tests' hook, and their one line

REFUSED = {
    "LLM(folder, n_ctx=5)": "unknown setting 'n_ctx' of LLM: did you mean max_seq_len",
    "LLM(folder, n_threads=5)": "did you mean threads",
    "LLM(folder, max_model_len=5)": "did you mean max_seq_len",
    "LLM(folder, weigths='q8')": "did you mean weights",
    "LLM(folder, temperature=1)": "not a setting of LLM: pass it to generate",
    "LLM(folder, trust_remote_code=True)": "never run",
    "LLM(folder, max_seq_len='5')": "max_seq_len must be a whole number from 2, got '5'",
    "LLM(folder, max_seq_len=256.0)": "max_seq_len must be a whole number",
    "LLM(folder, max_seq_len=True)": "max_seq_len must be a whole number",
    "LLM(folder, threads=True)": "threads must be a whole number",
    "LLM(folder, threads='2')": "threads must be a whole number",
    "LLM(folder, capture='no')": "capture must be True or False",
    "LLM(folder, chat_template=5)": "chat_template must be",
    "LLM(folder, kv_type=[1])": "kv_type must be one of",
    "LLM(folder, dtype=torch.int8)": "dtype must be one of",
    "LLM(folder, device=5.5)": "device must be",
    "LLM(folder, on_progress=5)": "on_progress must be a function",
    "LLM(folder, device='tpu')": "device must be",
    "LLM(folder, max_seq_len=100_000)": "max_seq_len must be",
    "LLM(folder, weights='q8', dtype='float32')": "contradict",
    "llm.generate('')": "empty",
    "llm.generate([1, 264])": "from 0 to 259, got 264",
    "llm.generate([-1])": "got -1",
    "llm.generate(chr(0xD800))": "surrogate",
    "llm.generate(b'hello')": "got bytes: decode them first",
    "llm.generate(bytearray(b'hello'))": "got bytes",
    "llm.generate(memoryview(b'hello'))": "got bytes",
    "llm.generate(['a', 5])": r"got a list with 'a': generate_all\(\) answers several",
    "llm.generate(['a', 'b'], on_token=print)": "on_token and on_prefill are for one prompt, got a list",
    "llm.generate('a', options={'prefill_chunk': 3})": "options must be RequestOptions or None, got",
    "llm.generate(message)": "got one message: put it into a list",
    "llm.generate(5)": "got int",
    "llm.generate(None)": "got NoneType",
    "llm.generate([1.0])": "whole numbers, got 1.0",
    "llm.generate([True])": "whole numbers, got True",
    "llm.generate([torch.tensor(1.5)])": "whole numbers",
    "llm.generate([np.int64(97), torch.tensor(1.5)])": "whole numbers",
    "llm.generate(torch.tensor([[1, 2]]))": r"one dimension, got shape \(1, 2\)",
    "llm.generate(torch.tensor([1.5]))": "array of torch.float32",
    "llm.generate(np.array([True]))": "array of bool",
    "llm.generate('a', 5)": "params must be SamplingParams or a mapping",
    "llm.generate('a', 'temperature=0')": "params must be SamplingParams or a mapping",
    "llm.generate('a', {1: 2})": "given by name, got 1",
    "llm.generate('a', {'temperature': 'hot'})": "temperature must be in",
    "llm.generate('a', overflow='drop')": "overflow must be 'error' or 'truncate_left'",
    "llm.generate('a', speculation='magic')": "speculation must be 'ngram' or 'draft' or 'off' or None",
    "llm.generate('a', num_draft_tokens='3')": "num_draft_tokens must be a whole number",
    "llm.generate('a', prefill_chunk='3')": "prefill_chunk must be a whole number",
    "llm.generate('a', prefill_chunk=513)": r"prefill_chunk must be a whole number in \[1, 512\], got 513",
    "llm.generate('a', cancel=5)": "cancel must be a threading.Event",
    "llm.generate('a', on_token=5)": "on_token must be a function",
    "llm.stream('a', on_prefill=5)": "on_prefill must be a function",
    "llm.generate_all('abc')": r"must be a list or an iterable of prompts, got str: generate\(\) answers one",
    "llm.generate_all(b'abc')": "must be a list or an iterable of prompts, got bytes",
    "llm.generate_all(5)": "must be a list or an iterable of prompts, got int",
    "llm.generate_all([b'abc'])": "prompt 0: .*got bytes",
    "llm.generate_all(['a'], batch_size=65)": r"batch_size must be a whole number in \[1, 64\], got 65",
    "llm.generate_all(['a'], batch_size='2')": "batch_size must be a whole number",
    "llm.generate_all(['a'], 5)": "params must be one, or a list with one per prompt, got 5",
    "llm.generate_all(['a', 'b'], [None])": "params must be one or one per prompt, got 1 for 2 prompts",
    "llm.chat('hello')": "must be a list of messages, got 'hello'",
    "llm.chat(None)": "must be a list of messages",
    "llm.chat([message], chat_template=5)": "chat_template must be",
    "llm.session().send(5)": "a message must be a text or a mapping",
    "llm.session().answer('hi')": "a message must be",
    "llm.session().append(b'x')": "got bytes",
    "llm.session().rewind('1')": "rewind takes",
    "llm.prompt_logprobs('ab', num='1')": "num must be a whole number",
    "llm.sample_trace('ab', step='1')": "step must be a whole number",
    "llm.logits(b'ab')": "got bytes",
}
CHILD = """
import json, sys
import numpy as np
import torch
from infer import LLM, InvalidRequestError
folder, message = sys.argv[1], {"role": "user", "content": "hello"}
llm = LLM(folder, capture=False)
found = {}
for call in json.loads(sys.argv[2]):
    try:
        found[call] = repr(eval(call))
    except Exception as error:
        found[call] = "refused: " + str(error) if isinstance(error, InvalidRequestError) else repr(error)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def refused(programs: Programs, folder: Path) -> dict[str, str]:
    done = programs.run(CHILD, folder, json.dumps(list(REFUSED)))
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("call", list(REFUSED))
def test_a_plain_mistake_is_refused_in_one_line(refused: dict[str, str], call: str) -> None:
    assert re.match(f"refused: .*{REFUSED[call]}", refused[call]), refused[call]
    assert "\n" not in refused[call]
    assert len(refused[call]) < 400
