"""The calls of `LLM` and sessions, their results, and answers that begin with given ids."""

import asyncio
import json
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from inspect import signature
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest
import torch

from byte_tokenizer import VOCAB_SIZE
from cases import cases
from embedding_model import make_qwen3
from infer import LLM, AsyncLLM, InvalidRequestError, RequestOptions, SamplingParams, Session, load_tokenizer
from infer.compute.kvcache.paged import PagedCache
from infer.compute.operands.mixers import Attention
from infer.errors import ContextLengthError, ModelError
from infer.files.generation_config import sampling_defaults
from recompute import generate_recomputed
from refusals import check_refused, refusal
from test_session import GREEDY as WORDS
from test_session import SAMPLED

GREEDY = SamplingParams(temperature=0, max_new_tokens=8, ignore_eos=True)
PROMPTS = ["hello", "abc abc abc", "go on", "b", "once upon a time"]


def test_a_list_of_texts_is_answered_with_a_list(llm: LLM) -> None:
    expected = [llm.generate(prompt, GREEDY).token_ids for prompt in PROMPTS]
    assert [result.token_ids for result in llm.generate(PROMPTS, GREEDY)] == expected
    assert [result.token_ids for result in llm.generate(tuple(PROMPTS), [GREEDY] * 5, speculation="ngram")] == expected


def test_all_prompts_of_a_list_are_checked_before_one_is_answered(llm: LLM) -> None:
    begun = list[tuple[int, int]]()
    with pytest.raises(InvalidRequestError, match="prompt 1: "):
        llm.generate_all(["a", [10**6]], GREEDY, on_progress=lambda *counts: begun.append(counts))
    assert begun == []


def test_prompts_are_taken_when_there_is_room_for_them_and_results_come_as_they_end(llm: LLM) -> None:
    taken, expected = list[str](), [llm.generate(prompt, GREEDY).token_ids for prompt in PROMPTS]

    def endless() -> Iterator[str]:
        for prompt in cycle(PROMPTS):
            taken.append(prompt)
            yield prompt

    found = llm.generate_iter(endless(), replace(GREEDY), batch_size=3)
    for count, (index, result) in enumerate(islice(found, 12), 1):
        assert result.token_ids == expected[index % len(PROMPTS)]
        assert len(taken) - count <= 2 * 3, "those that are answered, and as many that wait for their turn"
    found.close()  # type: ignore[attr-defined]  # it is a generator
    assert not llm.host.engine.sequences, "what was under way has ended"


def test_a_prompt_that_cannot_be_answered_is_named_when_its_turn_comes(llm: LLM) -> None:
    check_refused(lambda: list(llm.generate_iter(iter(["a", [10**6]]), GREEDY, batch_size=1)), "prompt 1: ")
    assert not llm.host.engine.sequences
    check_refused(lambda: llm.generate_iter("abc", GREEDY), "prompts must be a list or an iterable")
    check_refused(lambda: llm.generate_iter(["a"], GREEDY, batch_size=65), "batch_size must be")


@pytest.mark.parametrize("logprobs", [None, 2])
def test_pieces_carry_what_was_asked_for_and_the_last_one_why_it_ended(llm: LLM, logprobs: int | None) -> None:
    stream = llm.stream("hello", replace(GREEDY, logprobs=logprobs))
    pieces = list(stream)
    assert [piece.finish_reason for piece in pieces] == [None] * 7 + ["length"]
    assert [piece.token_id for piece in pieces] == stream.result.token_ids
    assert [piece.logprob for piece in pieces] == (stream.result.logprobs or [None] * 8)
    stopped = list(llm.stream("hello", replace(GREEDY, stop=[stream.result.text[2:4]])))
    assert stopped[-1].finish_reason == "stop"


OPTIONS: dict[str, Any] = {"speculation": "ngram", "num_draft_tokens": 3, "prefill_chunk": 7}
OPTIONS["overflow"] = "truncate_left"
MESSAGES = [{"role": "user", "content": "hello"}]


def test_every_call_takes_the_same_options(llm: LLM) -> None:
    def begun() -> Session:
        made = llm.session()
        made.append("hello")
        return made

    calls: dict[str, Any] = {
        "generate": lambda **k: llm.generate("hello", **k),
        "stream": lambda **k: llm.stream("hello", **k).result,
        "generate_all": lambda **k: llm.generate_all(["hello"], **k)[0],
        "generate_iter": lambda **k: next(iter(llm.generate_iter(["hello"], **k))).result,
        "chat": lambda **k: llm.chat(MESSAGES, **k),
        "stream_chat": lambda **k: llm.stream_chat(MESSAGES, **k).result,
        "send": lambda **k: llm.session().send("hello", **k),
        "session.stream": lambda **k: llm.session().stream("hello", **k).result,
        "answer": lambda **k: llm.session().answer(MESSAGES, **k),
        "session.generate": lambda **k: begun().generate(**k),
    }
    sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    for name, call in calls.items():
        plain = call(**sampling)
        assert len(plain.token_ids) == 8
        for options in (OPTIONS, {"options": RequestOptions(**OPTIONS)}):
            result = call(**sampling, **options)
            assert result.token_ids == plain.token_ids, name
            assert result.stats.prefill_steps >= plain.stats.prefill_steps, name
        with pytest.raises(InvalidRequestError, match="num_draft_tokens must be a whole number"):
            call(num_draft_tokens=0)
        cancelled = threading.Event()
        cancelled.set()
        assert call(**sampling, options=RequestOptions(cancel=cancelled)).finish_reason == "abort", name


def test_calls_that_wait_for_an_answer_take_both_callbacks() -> None:
    waiting = LLM.generate, LLM.chat, Session.send, Session.answer, Session.generate
    for call in (*waiting, LLM.stream, LLM.stream_chat, Session.stream):
        callbacks = {"on_token", "on_prefill"} if call in waiting else {"on_prefill"}
        assert callbacks | {"options"} <= set(signature(call).parameters), call


def test_keywords_change_the_options_that_are_given(llm: LLM) -> None:
    options = RequestOptions(prefill_chunk=3)
    long = "hello " * 6
    assert llm.generate(long, GREEDY, options=options).stats.prefill_steps == 11
    assert llm.generate(long, GREEDY, options=options, prefill_chunk=512).stats.prefill_steps == 0


# `answer_prefix`


PENALTIES: dict[str, Any] = {"frequency_penalty": 0.8, "presence_penalty": 0.5, "min_new_tokens": 9, "stop": "zq"}
PREFIX_CASES = [WORDS, SAMPLED, replace(SAMPLED, **PENALTIES, max_new_tokens=30)]
PREFIX_CASES += [SamplingParams(regex="[a-f ]{20}", seed=4), replace(SAMPLED, logprobs=2)]


@pytest.mark.slow(cases=3)
@pytest.mark.parametrize("params", PREFIX_CASES)
@pytest.mark.parametrize("speculation", [None, "ngram"])
def test_from_any_token_on_the_answer_is_the_same(llm: LLM, params: SamplingParams, speculation: Any) -> None:
    whole = llm.generate("hello", params)
    for count in range(len(whole.token_ids)):
        found = llm.generate("hello", params, answer_prefix=whole.token_ids[:count], speculation=speculation)
        assert (found.token_ids, found.text) == (whole.token_ids, whole.text)
        assert (found.finish_reason, found.stop_reason) == (whole.finish_reason, whole.stop_reason)
        if whole.logprobs is not None:
            assert found.logprobs == whole.logprobs[count:]


def test_another_token_makes_another_answer_with_the_same_beginning(llm: LLM) -> None:
    whole = llm.generate("hello", SAMPLED)
    other = [*whole.token_ids[:4], whole.token_ids[4] ^ 1]
    pieces = list(llm.stream("hello", SAMPLED, answer_prefix=other))
    found = llm.generate("hello", SAMPLED, answer_prefix=tuple(other))
    assert (found.token_ids[:5], len(found.token_ids), len(whole.token_ids)) == (other, 12, 12)
    said = [piece.token_id for piece in pieces], "".join(piece.text for piece in pieces)
    assert said == (found.token_ids, found.text)


@cases(
    "values prefix message",
    ({}, "abc", "answer_prefix must be a list of token ids, got 'abc'"),
    ({}, [1, -1], "answer_prefix: token ids must be from 0 to"),
    ({}, [97, True], "answer_prefix: token ids must be whole numbers"),
    ({"max_new_tokens": 2}, [97, 98, 99], r"answer_prefix\[1\]: the answer ends with this token \(length"),
    ({"stop": "b"}, [97, 98], r"answer_prefix\[1\]: the answer ends with this token \(stop, 'b'\)"),
    ({"regex": "[a-f]{9}"}, [97, 122], r"answer_prefix\[1\]: the grammar does not allow token 122 there"),
)
def test_a_prefix_that_no_answer_can_continue_is_refused(llm: LLM, values: Any, prefix: Any, message: str) -> None:
    check_refused(lambda: llm.generate("hello", answer_prefix=prefix, **values), message)


@pytest.mark.slow(cases=1)
@pytest.mark.parametrize("params", [WORDS, SAMPLED, replace(SAMPLED, **PENALTIES)])
def test_the_trace_of_an_answer_is_that_of_each_of_its_tokens(llm: LLM, params: SamplingParams) -> None:
    trace = partial(AsyncLLM(llm).trace, "hello", params, num_candidates=5)
    result, traces = asyncio.run(trace())
    assert result.token_ids == llm.generate("hello", params).token_ids
    expected = [llm.sample_trace("hello", params, step=step + 1, num_candidates=5) for step in range(len(traces))]
    assert traces == [replace(each, text_before="") for each in expected]
    _, rest = asyncio.run(trace(answer_prefix=result.token_ids[:3]))
    assert rest == traces[3:]


@pytest.mark.parametrize("grammar", [{"regex": "[ab]{3}c"}, {"choice": ["aab", "bba"]}])
def test_an_answer_with_a_grammar_is_traced_too(llm: LLM, grammar: Any) -> None:
    params = SamplingParams(**grammar, seed=1, max_new_tokens=8)
    result, traces = asyncio.run(AsyncLLM(llm).trace("hello", params, num_candidates=5))
    assert result.token_ids == llm.generate("hello", params).token_ids == [each.token_id for each in traces]
    assert traces[1] == replace(llm.sample_trace("hello", params, step=2, num_candidates=5), text_before="")
    assert {stage.name for stage in traces[0].stages} >= {"raw", "allowed"}


# Another family


QWEN_CONTEXT = 200
LONG = SamplingParams(temperature=0, max_new_tokens=40, ignore_eos=True)
DRAWN = SamplingParams(temperature=0.9, top_k=40, top_p=0.9, repetition_penalty=1.2, seed=7, max_new_tokens=40)


@pytest.fixture(scope="module")
def qwen_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    qwen_dir = tmp_path_factory.mktemp("model")
    make_qwen3(qwen_dir, max_position_embeddings=QWEN_CONTEXT)
    (qwen_dir / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "top_k": 20, "eos_token_id": 256}))
    return qwen_dir


@pytest.fixture(scope="module")
def qwen(qwen_dir: Path) -> LLM:
    return LLM(qwen_dir)


@pytest.mark.slow(cases=1)
@pytest.mark.parametrize("params", [LONG, DRAWN], ids=["greedy", "sampled"])
def test_capture_and_cache_change_no_token(qwen: LLM, qwen_dir: Path, params: SamplingParams) -> None:
    expected = qwen.generate("once upon", params).token_ids
    assert LLM(qwen_dir, capture=False).generate("once upon", params).token_ids == expected
    assert qwen.generate("once upon", params, prefill_chunk=3).token_ids == expected
    assert generate_recomputed(qwen, qwen.tokenizer.encode("once upon"), params).token_ids == expected


def test_the_number_of_threads_changes_no_token(qwen_dir: Path) -> None:
    before = torch.get_num_threads()
    try:
        texts = {LLM(qwen_dir, threads=count).generate("once", LONG).text for count in (1, 2, 3)}
    finally:
        torch.set_num_threads(before)
    assert len(texts) == 1


def test_logits_are_those_that_generate_sees(qwen: LLM) -> None:
    result = qwen.generate("abc", LONG)
    logits = qwen.logits([*b"abc", *result.token_ids])
    assert (logits.shape, logits.argmax(-1)[2:-1].tolist()) == ((43, VOCAB_SIZE), result.token_ids)


def test_a_prompt_longer_than_the_context_names_both_lengths(qwen: LLM) -> None:
    check_refused(lambda: qwen.generate([1] * QWEN_CONTEXT), r"200 tokens.*length is 200 ", ContextLengthError)


def test_chat_without_a_template_says_what_to_do(qwen: LLM) -> None:
    check_refused(lambda: qwen.chat([{"role": "user", "content": "hi"}]), "chat template")


def test_a_chat_template_of_ones_own_and_control_text_in_a_message(qwen_dir: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    forged = [{"role": "user", "content": "a<eos>"}]
    end = load_tokenizer(qwen_dir).backend.token_to_id("<eos>")
    for allowed in (False, True):
        qwen = LLM(qwen_dir, chat_template=template, allow_special=allowed)
        assert qwen.can_chat
        assert (end in qwen.tokenizer.encode_chat(forged)) is allowed
        given = qwen.chat(forged, LONG, allow_special=not allowed).prompt_tokens
        assert given == len(qwen.tokenizer.encode_chat(forged, allow_special=not allowed))
    check_refused(lambda: LLM(qwen_dir, chat_template="{% if %}"), r"chat template, line 1, is not valid")


def test_a_broken_template_gives_a_warning_at_load_and_plain_text_works(qwen_dir: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(qwen_dir, tmp_path / "model")
    (copy / "chat_template.jinja").write_text("{% endfor %}")
    told = r"\Aconversations will not work with this model: the chat template, line 1[^\n]*\Z"
    with pytest.warns(UserWarning, match=told):
        qwen = LLM(copy)
    assert qwen.generate("once", LONG).token_ids == LLM(qwen_dir).generate("once", LONG).token_ids


SAMPLING, PENALTY = {"temperature": 0.6, "top_k": 20, "top_p": 0.9}, {"repetition_penalty": 1.1}


@cases("config expected",
    ({}, {}),
    ({"temperature": 0.6, "top_k": 20, "top_p": 0.9, "eos_token_id": 1}, SAMPLING),
    ({"do_sample": False, "temperature": 0.6, **PENALTY}, {"temperature": 0.0, **PENALTY}),
    ({"do_sample": True, "temperature": 0.7, "top_k": 0, "min_p": None}, {"temperature": 0.7}),
    ({"top_k": -1, "repetition_window": -1}, {"repetition_window": None}),
    ({"repetition_window": 64, "min_p": 0.05}, {"repetition_window": 64, "min_p": 0.05}),
)  # fmt: skip
def test_a_models_own_defaults_are_the_values_that_it_names(config: dict[str, Any], expected: dict[str, Any]) -> None:
    assert sampling_defaults(config) == expected
    SamplingParams(**expected)


def test_a_grammar_is_kept_and_a_bad_one_is_refused(qwen: LLM) -> None:
    result = qwen.generate("a", SamplingParams(choice=["ab", "ba"], temperature=2.0, seed=1))
    assert result.text in ("ab", "ba")
    assert (result.finish_reason, result.stop_reason, result.grammar_complete) == ("stop", "grammar", True)
    cut = qwen.generate("a", SamplingParams(regex="[ab]{9}", temperature=0, max_new_tokens=3))
    assert (cut.finish_reason, cut.grammar_complete) == ("length", False)
    check_refused(lambda: qwen.generate("a", SamplingParams(regex="(a")), "regex, column")


def test_masks_filled_beside_a_step_and_before_it_give_equal_tokens(qwen: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(regex="([ab]{2}|[a-z]{5})+", temperature=1.0, seed=3, max_new_tokens=40)
    found = []
    for seconds in (0.0, 1000.0):
        monkeypatch.setattr("infer.engine.step.grammar_masks.HAND_OVER_SECONDS", seconds)
        found += [qwen.generate("abab", params, speculation=speculation) for speculation in (None, "ngram")]
    assert all(result.token_ids == found[0].token_ids for result in found)
    assert all(result.stats.masks_filled >= result.stats.single_steps for result in found)


@pytest.mark.slow(cases=1)
@pytest.mark.parametrize("weights", ["bf16", "q8", "q4"])
def test_weights_quantised_at_load_stay_close(qwen: LLM, qwen_dir: Path, weights: str) -> None:
    token_ids = list(b"the quick brown fox jumps over the lazy dog")
    expected, logits = qwen.logits(token_ids), LLM(qwen_dir, weights=weights).logits(token_ids)  # type: ignore[arg-type]
    spread = {"bf16": 0.02, "q8": 0.05, "q4": 0.4}[weights]
    error = float((expected - logits).std() / expected.std())
    assert 1e-6 < error < spread


def changed(qwen_dir: Path, copy: Path, **settings: Any) -> Path:
    """Copy a model, and change its config."""
    path = shutil.copytree(qwen_dir, copy, dirs_exist_ok=True) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return copy


def test_tensors_that_do_not_fit_the_config_are_all_named(qwen_dir: Path, tmp_path: Path) -> None:
    layers = {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}
    changed(qwen_dir, tmp_path, intermediate_size=64, **layers)
    message = refusal(lambda: LLM(tmp_path), ModelError)
    assert "model.layers.2.self_attn.q_proj.weight" in message
    assert "model.layers.0.mlp.gate_proj.weight has shape (96, 64), the config requires (64, 64)" in message


def test_an_unknown_architecture_is_named_with_those_that_are_known(qwen_dir: Path, tmp_path: Path) -> None:
    changed(qwen_dir, tmp_path, model_type="mystery")
    check_refused(lambda: LLM(tmp_path), r"'mystery' is not supported.*gemma3_text.*llama.*qwen3", ModelError)


@pytest.mark.skipif(sys.platform != "linux", reason="hardware: the size of a process is read from Linux's /proc")
def test_a_cache_holds_memory_only_where_it_was_written() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    layers = [Attention(9, 3, 64, None, 1.0)] * 30
    cache = PagedCache(layers, 4, 8192, "f16", torch.device("cpu"), step_tokens=512)
    assert cache.num_bytes > 700 << 20
    before = resident()
    for layer in cache.memory.layers:  # the first token
        layer.keys[:, 0, 0] = layer.values[:, 0, 0] = 1
    assert resident() - before <= 4 << 20, "two huge pages"
