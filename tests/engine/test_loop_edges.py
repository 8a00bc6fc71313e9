"""The loop at its edges: the end of the context, small vocabularies, rows that fail, cancelling, closing, and stops."""

import codecs
import math
import shutil
import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import path_cases
from extent import IS_SHORT, usual_or_all
from infer import LLM, InvalidRequestError, SamplingParams, load_model
from infer.compute.operands.step import Chunk, Clock, StepEnd
from infer.compute.ops import SampledStep
from infer.compute.sampling.columns import SamplingColumns
from infer.engine.engine import Engine
from infer.engine.runner.runner import Runner
from infer.engine.step.sequence import Sequence as Answering
from looping import in_threads, open_stream
from path_cases import CONTEXT, EMBEDDING, EOS, Case, Outcome, Way, World, by_definition, make_sequence, run_alone
from refusals import check_refused
from test_stop_strings import naive

LONG = SamplingParams(temperature=0, max_new_tokens=60, ignore_eos=True)
WAYS = [Way("none", chain=64), Way("none", chain=1, capture=False), Way("right"), Way("half", 7, 1)]
WAYS += [Way("ends"), Way("random")]


@pytest.fixture(scope="module")
def llm(world: World) -> LLM:
    return LLM(world.folder)


def prompt_of(length: int) -> tuple[int, ...]:
    return tuple((b"abc abcab c" * 20)[:length])


# The end of the context

SHORT_GRAMMAR = {"min_new_tokens": 20, "temperature": 0.9, "seed": 3, "presence_penalty": 0.5}
INTEGERS = {"type": "array", "items": {"type": "integer"}}
AT_THE_END = [
    Case("one token is left", prompt_of(CONTEXT - 1), replace(LONG, max_new_tokens=None)),
    Case("three are left", prompt_of(CONTEXT - 3), replace(LONG, max_new_tokens=None)),
    Case("more is asked than is left", prompt_of(CONTEXT - 20), replace(LONG, max_new_tokens=100, seed=1)),
    Case("one is asked", prompt_of(9), replace(LONG, max_new_tokens=1, temperature=1.0, seed=2)),
    Case("two are asked", prompt_of(9), replace(LONG, max_new_tokens=2, repetition_penalty=1.5)),
    Case("a prompt of one token", prompt_of(1), replace(LONG, frequency_penalty=1.0)),
    Case("penalties to the end", prompt_of(CONTEXT - 30), replace(LONG, max_new_tokens=None, repetition_penalty=1.3)),
    Case("forced to the end", prompt_of(CONTEXT - 5), SamplingParams(choice=["abc abc abc bar bar"], temperature=0)),
    Case("forced to the limit", prompt_of(5), SamplingParams(choice=["abc abc abc"], max_new_tokens=3, temperature=0)),
    Case("forced to its end", prompt_of(5), SamplingParams(choice=["abc abc bar"], max_new_tokens=5, temperature=0)),
    Case("a grammar shorter than the least", prompt_of(5), SamplingParams(regex="[ab]{2,4}", **SHORT_GRAMMAR)),
    Case("a grammar cut by length", prompt_of(5), SamplingParams(json_schema=INTEGERS, seed=4, max_new_tokens=6)),
    Case("only the end is allowed", prompt_of(4), SamplingParams(allowed_token_ids=[EOS], min_new_tokens=9, seed=5)),
]


@pytest.fixture(scope="module")
def at_the_end(world: World) -> list[Outcome]:
    return path_cases.all_by_definition(world, AT_THE_END)


@pytest.mark.slow(cases=2)
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_every_way_ends_at_the_end(world: World, at_the_end: list[Outcome], way: Way) -> None:
    for case, expected in zip(AT_THE_END, at_the_end, strict=True):
        assert Outcome.of(run_alone(world, case, way, expected.token_ids)) == expected, case.name
    results = path_cases.run_batch(world, AT_THE_END, way, 4, [outcome.token_ids for outcome in at_the_end])
    assert [Outcome.of(result) for result in results] == at_the_end


def test_the_edges_are_reached(at_the_end: list[Outcome]) -> None:
    by_name = {case.name: outcome for case, outcome in zip(AT_THE_END, at_the_end, strict=True)}
    names = "one token is left", "three are left", "one is asked"
    assert [len(by_name[name].token_ids) for name in names] == [1, 3, 1]
    assert by_name["forced to the end"].stop_reason == "context"
    assert by_name["forced to the limit"].grammar_complete is False
    assert by_name["a grammar shorter than the least"].grammar_complete
    assert len(by_name["a grammar shorter than the least"].token_ids) < 20
    assert by_name["only the end is allowed"].token_ids == [EOS]


def test_a_batch_wider_than_a_step_has_lines_gives_each_its_own(world: World) -> None:
    params = replace(LONG, max_new_tokens=4, temperature=0.7)
    cases = [Case(str(i), prompt_of(1 + i % 7), replace(params, seed=i)) for i in range(70)]
    alone = [Outcome.of(run_alone(world, case, Way())) for case in cases]
    for num_rows in (64, 70):
        results = path_cases.run_batch(world, cases, Way("ngram"), num_rows, [[]] * len(cases))
        assert [Outcome.of(result) for result in results] == alone


def test_a_row_that_is_full_is_refused_before_anything_is_written(world: World) -> None:
    runner = Runner(world.model, 8)
    runner.cache.reserve(0, 8)
    runner.launch(SampledStep([Chunk(0, prompt_of(8))], [0], SamplingColumns.of([LONG], path_cases.VOCAB_SIZE)))
    runner.commit(0, 8)
    check_refused(lambda: runner.cache.reserve(0, 1), "a row has room for 8 tokens, got 9")
    assert runner.lengths[0] == 8


# Vocabularies


def test_ids_that_no_token_has_are_refused_before_the_batch_begins(llm: LLM) -> None:
    for values in ({"logit_bias": {path_cases.VOCAB_SIZE: 1.0}}, {"allowed_token_ids": [EMBEDDING - 1]}):
        with pytest.raises(InvalidRequestError, match=f"token ids must be from 0 to {path_cases.VOCAB_SIZE - 1}"):
            llm.generate("ab", SamplingParams(**values))
    with pytest.raises(InvalidRequestError, match="the prompt: token ids"):
        llm.generate([1, path_cases.VOCAB_SIZE], SamplingParams(repetition_penalty=1.2))


@pytest.mark.parametrize("grammar", [{}, {"regex": "[ab ]{5,9}"}], ids=["free", "grammar"])
def test_tokens_beyond_the_embedding_are_never_sampled(world: World, tmp_path: Path, grammar: dict[str, Any]) -> None:
    """Gemma's tokenizer has such a token for images. The text model has no row for it."""
    cut = path_cases.VOCAB_SIZE - 1
    tensors = load_file(shutil.copytree(world.folder, tmp_path, dirs_exist_ok=True) / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors[name][:cut].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace(f'"vocab_size": {EMBEDDING}', f'"vocab_size": {cut}'))
    llm = LLM(tmp_path)
    assert llm.tokenizer.vocab_size == cut
    name = world.tokenizer.backend.id_to_token(cut)
    ids = llm.tokenizer.encode(f"a{name}b")
    assert (ids, llm.tokenizer.decode(ids)) == (llm.tokenizer.encode(f"a{name}b", parse_special=False), f"a{name}b")
    assert llm.generate(f"a{name}b", max_new_tokens=1).prompt_tokens == len(ids) > 3
    message = {"role": "user", "content": name}
    assert llm.tokenizer.encode_chat([message], chat_template="{{ messages[0].content }}") == list(name.encode())
    for values in ({"logit_bias": {cut: 1.0}}, {"stop_token_ids": [cut]}):
        with pytest.raises(InvalidRequestError, match=f"token ids must be from 0 to {cut - 1}, got {cut}"):
            llm.generate("ab", SamplingParams(**values))
    check_refused(lambda: llm.tokenizer.decode([cut]), rf"token id must be in \[0, {cut}\), got {cut}")
    params = SamplingParams(temperature=1.5, repetition_penalty=1.1, min_new_tokens=4, seed=1, max_new_tokens=40)
    results = [llm.generate("abc ab", replace(params, seed=seed, **grammar), speculation="ngram") for seed in range(4)]
    assert all(token_id < cut for result in results for token_id in result.token_ids)
    again = llm.generate_all(["abc ab"] * 4, [replace(params, seed=seed, **grammar) for seed in range(4)])
    assert [result.token_ids for result in again] == [result.token_ids for result in results]


# Rows that fail

POISON = 200


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory, world: World) -> World:
    """Return the same model, but with NaN as the logits after one token."""
    copy = shutil.copytree(world.folder, tmp_path_factory.mktemp("poisoned"), dirs_exist_ok=True)
    tensors = load_file(copy / "model.safetensors")
    tensors["model.embed_tokens.weight"][POISON] = torch.nan
    save_file(tensors, copy / "model.safetensors")
    return replace(world, model=load_model(copy)[0])


@pytest.mark.slow(cases=2)
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_only_the_row_whose_logits_are_nan_fails(world: World, poisoned: World, way: Way) -> None:
    params = SamplingParams(temperature=0.8, max_new_tokens=24, logit_bias={POISON: -math.inf}, ignore_eos=True)
    cases = [Case(str(i), prompt_of(3 + i), replace(params, seed=i)) for i in range(4)]
    expected = path_cases.all_by_definition(world, cases)
    said = [outcome.token_ids for outcome in expected]
    at_once = Case("at once", (POISON,), replace(params, seed=1))
    later = Case("later", prompt_of(9), replace(params, seed=2, logit_bias={POISON: 5.0}))
    asked, answers = [*cases[:2], at_once, later, *cases[2:]], [*said[:2], [], [], *said[2:]]
    results = path_cases.run_batch(poisoned, asked, way, 3, answers)
    first, second = results.pop(2), results.pop(2)
    assert [Outcome.of(result) for result in results] == expected
    for failed in (first, second):
        assert (failed.finish_reason, failed.stop_reason, "NaN" in failed.error) == ("error", "logits", True)
    assert (first.token_ids, second.token_ids[-1]) == ([], POISON)
    plain = replace(later, params=replace(later.params, max_new_tokens=len(second.token_ids)))
    assert by_definition(world, plain).token_ids == second.token_ids


# Cancelling and closing


@pytest.mark.slow(cases=2, rest=4)
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("grammar", [{}, {"regex": "[ab ]{40}"}], ids=["free", "grammar"])
def test_a_cancel_from_another_thread_ends_a_row_in_a_token(world: World, way: Way, grammar: dict[str, Any]) -> None:
    case = Case("long", prompt_of(20), replace(LONG, **grammar))
    said = by_definition(world, case).token_ids
    for count in (1, 2, 7, 20):
        cancel = threading.Event()
        stream = path_cases.Place(world, way).stream(make_sequence(world, case, way, said, cancel=cancel))
        pieces = [next(stream) for _ in range(count)]
        in_threads([cancel.set])
        assert list(stream) == []
        assert stream.result.token_ids == [piece.token_id for piece in pieces] == said[:count]
        assert (stream.result.finish_reason, stream.result.stop_reason) == ("abort", "cancelled")
        assert len(stream.result.timing.decode_times_s) <= count - 1


def test_a_cancel_during_a_long_prompt_is_seen_behind_the_chunk(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    cancel, seen = threading.Event(), list[int]()
    running = make_sequence(world, Case("", prompt_of(100), LONG), Way(chunk=7), cancel=cancel)
    place = path_cases.Place(world, Way())
    step = place.engine.step

    def on_prefill(done: int, total: int) -> None:
        seen.append(done)
        if done == 14:
            cancel.set()

    def step_when_told() -> list[Answering]:
        while seen[-1:] != [running.num_computed] != [0] and not cancel.is_set():
            time.sleep(0)
        return step()

    monkeypatch.setattr(place.engine, "step", step_when_told)
    result = open_stream(place.loop, running, on_prefill=on_prefill).run()
    assert (seen, result.token_ids, result.stop_reason) == ([7, 14], [], "cancelled")
    assert running.num_computed <= 21


@pytest.mark.slow(cases=2)
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_times_and_counts_are_those_of_the_answer(world: World, way: Way) -> None:
    schema = {"type": "object", "properties": {"bar": {"enum": ["abc", "ab c"]}}, "required": ["bar"]}
    stopped = SamplingParams(temperature=1.0, seed=1, allowed_token_ids=[*b"abc "], stop=["ab", "cc", " a"])
    for params in (stopped, SamplingParams(temperature=0, json_schema=schema), replace(LONG, max_new_tokens=21)):
        for length in (1, 13):
            case = Case("", prompt_of(length), params)
            result = run_alone(world, case, way, by_definition(world, case).token_ids)
            sampled = len(result.token_ids) - result.stats.tokens_forced
            timing, stats = result.timing, result.stats
            assert len(timing.decode_times_s) == len(timing.sampling_times_s) == sampled - 1
            assert stats.drafts_accepted - timing.decode_times_s.count(0.0) in (0, 1)  # the last may end it
            assert min(timing.sampling_times_s, default=1.0) > 0
            assert len(timing.arrival_times_s) == len(result.token_ids)
            assert timing.arrival_times_s == sorted(timing.arrival_times_s)
            assert 0 <= stats.drafts_accepted <= stats.drafts_proposed
            assert stats.single_steps + stats.drafts_accepted + stats.multi_step_tokens in (sampled, sampled + 1)


def test_each_step_of_a_chain_is_timed_by_itself(world: World) -> None:
    began = time.perf_counter()
    result = run_alone(world, Case("", prompt_of(13), replace(LONG, max_new_tokens=33)), Way(chain=16))
    passed, timing = time.perf_counter() - began, result.timing
    assert result.stats.multi_step_tokens == 32
    for times in (timing.decode_times_s, timing.sampling_times_s):
        assert len(set(times)) > 2, "a mean would be the same for each of the two chains"
    assert max(timing.total_time_s, timing.arrival_times_s[-1]) <= passed


def test_work_between_two_steps_counts_with_the_next_forward(world: World) -> None:
    running = make_sequence(world, Case("", prompt_of(3), LONG), Way())
    running.timer.stepped(1, Clock(0.0, [StepEnd(1.0, 1.5)], 1.75))
    running.timer.waited(4.0)
    running.timer.stepped(2, Clock(10.0, [StepEnd(11.0, 11.5), StepEnd(12.5, 13.0)], 13.0))
    timing = running.result().timing
    assert (timing.ttft_s, timing.decode_times_s, timing.sampling_times_s) == (1.5, [0.25 + 4.0 + 1.0, 1.0], [0.5, 0.5])


@pytest.mark.parametrize("failing", [None, KeyError, KeyboardInterrupt], ids=["nothing", "the sequence", "the step"])
def test_a_prompt_is_compressed_after_its_first_token_but_not_after_an_error(
    world: World, failing: type[BaseException] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = list[int]()
    monkeypatch.setattr(Runner, "after_prompt", lambda runner, slot, token_ids: ended.append(len(token_ids)))
    engine = Engine(path_cases.make_runner(world, Way()))
    engine.runner.compresses_prompts = True
    sequence = make_sequence(world, Case("", prompt_of(3), LONG), Way())
    engine.submit(sequence)
    if failing:
        monkeypatch.setattr(sequence, "accept", Mock(side_effect=failing))
    with pytest.raises(KeyboardInterrupt) if failing is KeyboardInterrupt else nullcontext():
        assert engine.step() == [sequence]
    assert sequence.finish_reason == ("error" if failing is KeyError else None)
    assert ended == ([] if failing else [3])


# Stop strings


# Letters, tokens of several letters, and the bytes of é, so that tokens can be parts of characters.
ALLOWED = [*b"ab c", *range(256, EOS), *"é".encode()]

SETTINGS = [path_cases.DRAFTS, (1, 7, 512), (1, 8, 64), (True, True, True, False)]  # of a way
ways = st.builds(Way, *map(st.sampled_from, SETTINGS))
stops = st.lists(st.text(alphabet='abc é"', min_size=1, max_size=4), min_size=1, max_size=4)


def expected_of(world: World, token_ids: list[int], stop: list[str], include: bool) -> Outcome:
    """Return the outcome up to the first token after which the decoded text contains a stop string."""
    decoder, text = codecs.getincrementaldecoder("utf-8")("replace"), ""
    for count, token_id in enumerate(token_ids, 1):
        text += decoder.decode(world.tokenizer.token_bytes[token_id], final=count == len(token_ids))
        shown, matched = naive(text, stop, include)
        if matched is not None:
            return Outcome(token_ids[:count], shown, "stop", matched, None, None, None)
    return Outcome(token_ids, text, "length", "max_new_tokens", None, None, None)


@settings(max_examples=15 if IS_SHORT else usual_or_all(30, 300), deadline=None)
@given(st.integers(0, 40), st.sampled_from([0.6, 1.0, 2.0]), stops, st.booleans(), ways)
def test_the_text_ends_where_a_search_of_the_decoded_text_says(
    world: World, seed: int, temperature: float, stop: list[str], include: bool, way: Way
) -> None:
    values = {"allowed_token_ids": ALLOWED, "max_new_tokens": 24, "frequency_penalty": 0.2}
    params = SamplingParams(temperature=temperature, seed=seed, **values)
    prompt = tuple(b"ab abc ab c"[: 1 + seed % 11])
    whole = run_alone(world, Case("whole", prompt, params), Way()).token_ids
    expected = expected_of(world, whole, stop, include)

    case = Case("stopped", prompt, replace(params, stop=stop, include_stop_str_in_output=include))
    place = path_cases.Place(world, way)
    stream = place.stream(make_sequence(world, case, way, whole))  # the drafts continue after the stop
    pieces = list(stream)
    assert Outcome.of(stream.result) == expected
    said = [piece.token_id for piece in pieces], "".join(piece.text for piece in pieces)
    assert said == (expected.token_ids, expected.text)

    # Tokens after the stop are in neither cache nor history, so the same context continues like a new one.
    then = Case("then", (*prompt, *expected.token_ids, ord("b")), replace(params, max_new_tokens=6))
    assert place.length == len(then.prompt) - 2
    assert run_alone(world, then, way, (), place).token_ids == run_alone(world, then, Way()).token_ids
