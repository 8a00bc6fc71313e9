"""The loop at its edges: the end of the context, small vocabularies, rows that fail, cancelling and closing."""

import math
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from infer import LLM, InvalidRequestError, SamplingParams, load_model
from infer.compute.operands.step import Chunk, Clock, StepEnd
from infer.compute.sampling.columns import SamplingColumns
from infer.engine.engine import Engine
from infer.engine.runner.runner import Runner
from infer.engine.step.sequence import Sequence as Answering
from infer.errors import ConstraintError
from infer.text.grammar.constraint import Constraint
from looping import open_stream
from path_cases import (
    CONTEXT,
    EMBEDDING,
    EOS,
    VOCAB_SIZE,
    Case,
    Outcome,
    Place,
    Way,
    World,
    all_by_definition,
    by_definition,
    make_runner,
    make_sequence,
    make_world,
    run_all,
    run_alone,
    run_batch,
)

LONG = SamplingParams(temperature=0, max_new_tokens=60, ignore_eos=True)
WAYS = [
    Way("none", chain=64),
    Way("none", chain=1, capture=False),
    Way("right"),
    Way("half", 7, 1),
    Way("ends"),
    Way("random"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("llama")


@pytest.fixture(scope="module")
def world(folder: Path) -> World:
    return make_world("llama", folder)


@pytest.fixture
def llm(world: World, folder: Path) -> LLM:
    return LLM(folder)


def prompt_of(length: int) -> tuple[int, ...]:
    return tuple((b"abc abcab c" * 20)[:length])


# The end of the context

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
    Case(
        "a grammar shorter than the least",
        prompt_of(5),
        SamplingParams(regex="[ab]{2,4}", min_new_tokens=20, temperature=0.9, seed=3, presence_penalty=0.5),
    ),
    Case(
        "a grammar cut by length",
        prompt_of(5),
        SamplingParams(json_schema={"type": "array", "items": {"type": "integer"}}, seed=4, max_new_tokens=6),
    ),
    Case("only the end is allowed", prompt_of(4), SamplingParams(allowed_token_ids=[EOS], min_new_tokens=9, seed=5)),
]


@pytest.fixture(scope="module")
def at_the_end(world: World) -> list[Outcome]:
    return all_by_definition(world, AT_THE_END)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_every_way_ends_at_the_end(world: World, at_the_end: list[Outcome], way: Way) -> None:
    for case, expected in zip(AT_THE_END, at_the_end, strict=True):
        assert Outcome.of(run_alone(world, case, way, expected.token_ids)) == expected, case.name
    results = run_batch(world, AT_THE_END, way, 4, [outcome.token_ids for outcome in at_the_end])
    assert [Outcome.of(result) for result in results] == at_the_end


def test_the_edges_are_reached(at_the_end: list[Outcome]) -> None:
    by_name = {case.name: outcome for case, outcome in zip(AT_THE_END, at_the_end, strict=True)}
    assert [len(by_name[name].token_ids) for name in ("one token is left", "three are left", "one is asked")] == [
        1,
        3,
        1,
    ]
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
        results = run_batch(world, cases, Way("ngram"), num_rows, [[]] * len(cases))
        assert [Outcome.of(result) for result in results] == alone


def test_a_row_that_is_full_is_refused_before_anything_is_written(world: World) -> None:
    runner = Runner(world.model, 8)
    runner.reserve(0, 8)
    runner.sample([Chunk(0, prompt_of(8))], SamplingColumns.of([LONG], VOCAB_SIZE), None)
    runner.commit(0, 8)
    with pytest.raises(InvalidRequestError, match="a row has room for 8 tokens, got 9"):
        runner.reserve(0, 1)
    assert runner.lengths[0] == 8


# Vocabularies


def test_ids_that_no_token_has_are_refused_before_the_batch_begins(llm: LLM) -> None:
    for values in ({"logit_bias": {VOCAB_SIZE: 1.0}}, {"allowed_token_ids": [EMBEDDING - 1]}):
        with pytest.raises(InvalidRequestError, match=f"token ids must be from 0 to {VOCAB_SIZE - 1}"):
            llm.generate("ab", SamplingParams(**values))
    with pytest.raises(InvalidRequestError, match="the prompt: token ids"):
        llm.generate([1, VOCAB_SIZE], SamplingParams(repetition_penalty=1.2))


@pytest.mark.parametrize("grammar", [{}, {"regex": "[ab ]{5,9}"}], ids=["free", "grammar"])
def test_added_tokens_beyond_the_embedding_are_plain_text_and_never_sampled(
    world: World, folder: Path, tmp_path: Path, grammar: dict[str, Any]
) -> None:
    """Gemma's tokenizer has such a token for images. The text model has no row for it."""
    cut = VOCAB_SIZE - 1
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
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
    assert llm.tokenizer.encode_chat(
        [{"role": "user", "content": name}], chat_template="{{ messages[0].content }}"
    ) == list(name.encode())
    for values in ({"logit_bias": {cut: 1.0}}, {"stop_token_ids": [cut]}):
        with pytest.raises(InvalidRequestError, match=f"token ids must be from 0 to {cut - 1}, got {cut}"):
            llm.generate("ab", SamplingParams(**values))
    with pytest.raises(InvalidRequestError, match=rf"token id must be in \[0, {cut}\), got {cut}"):
        llm.tokenizer.decode([cut])
    params = SamplingParams(temperature=1.5, repetition_penalty=1.1, min_new_tokens=4, seed=1, max_new_tokens=40)
    results = [llm.generate("abc ab", replace(params, seed=seed, **grammar), speculation="ngram") for seed in range(4)]
    assert all(token_id < cut for result in results for token_id in result.token_ids)
    again = llm.generate_all(["abc ab"] * 4, [replace(params, seed=seed, **grammar) for seed in range(4)])
    assert [result.token_ids for result in again] == [result.token_ids for result in results]


# Rows that fail

POISON = 200


@pytest.fixture(scope="module")
def poisoned(folder: Path, tmp_path_factory: pytest.TempPathFactory, world: World) -> World:
    """Return the same model, but with NaN as the logits after one token."""
    copy = tmp_path_factory.mktemp("poisoned")
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    tensors = load_file(copy / "model.safetensors")
    tensors["model.embed_tokens.weight"][POISON] = torch.nan
    save_file(tensors, copy / "model.safetensors")
    return replace(world, model=load_model(copy)[0])


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_only_the_row_whose_logits_are_nan_fails(world: World, poisoned: World, way: Way) -> None:
    params = SamplingParams(temperature=0.8, max_new_tokens=24, logit_bias={POISON: -math.inf}, ignore_eos=True)
    cases = [Case(str(i), prompt_of(3 + i), replace(params, seed=i)) for i in range(4)]
    expected = all_by_definition(world, cases)
    said = [outcome.token_ids for outcome in expected]
    at_once = Case("at once", (POISON,), replace(params, seed=1))
    later = Case("later", prompt_of(9), replace(params, seed=2, logit_bias={POISON: 5.0}))
    results = run_batch(poisoned, [*cases[:2], at_once, later, *cases[2:]], way, 3, [*said[:2], [], [], *said[2:]])
    first, second = results.pop(2), results.pop(2)
    assert [Outcome.of(result) for result in results] == expected
    for failed in (first, second):
        assert (failed.finish_reason, failed.stop_reason) == ("error", "logits")
        assert failed.error is not None
        assert "NaN" in failed.error
    assert first.token_ids == []
    assert second.token_ids[-1] == POISON
    plain = replace(later, params=replace(later.params, max_new_tokens=len(second.token_ids)))
    assert by_definition(world, plain).token_ids == second.token_ids


@pytest.mark.parametrize("fault", ["fill", "accept", "rollback"])
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_grammar_that_cannot_continue_fails_only_its_row(world: World, way: Way, fault: str) -> None:
    free = [Case(str(i), prompt_of(3 + i), replace(LONG, max_new_tokens=24)) for i in range(2)]
    bound = Case("regex", prompt_of(7), SamplingParams(regex="[ab]{20}", temperature=0.9, seed=1))
    cases = [free[0], bound, bound, free[1]]
    expected = all_by_definition(world, cases)
    waiting = [
        make_sequence(world, case, way, outcome.token_ids) for case, outcome in zip(cases, expected, strict=True)
    ]
    grammar = waiting[1].grammar
    assert grammar is not None
    grammar.constraint = Brittle(grammar.constraint, num_tokens=5, fault=fault)
    results = run_all(world, waiting, way, 3)
    failed = results.pop(1)
    assert (failed.finish_reason, failed.stop_reason, failed.error) == ("error", "grammar", "too complex")
    said = expected.pop(1).token_ids[:5]
    assert failed.token_ids == (said[: len(failed.token_ids)] if fault == "rollback" else said)  # with drafts
    assert failed.grammar_complete is False
    assert [Outcome.of(result) for result in results] == expected


class Brittle(Constraint):
    """A constraint that raises after some tokens: at the next mask, at the next token, or at all further masks."""

    def __init__(self, constraint: Constraint, num_tokens: int, *, fault: str) -> None:
        self._constraint, self._left, self._fault = constraint, num_tokens, fault

    def _check(self, *faults: str) -> None:
        if self._left <= 0 and self._fault in faults:
            raise ConstraintError("too complex")

    def fill(self, mask: Any) -> None:
        self._check("fill", "rollback")
        self._constraint.fill(mask)

    def accept(self, token_ids: Sequence[int]) -> int:
        self._check("accept")
        count = self._constraint.accept(token_ids)
        self._left -= count
        return count

    def rollback(self, num_tokens: int) -> None:
        self._check("rollback")
        self._constraint.rollback(num_tokens)
        self._left += num_tokens

    @property
    def num_accepted(self) -> int:
        return self._constraint.num_accepted

    def forced(self) -> list[int]:
        return []

    @property
    def done(self) -> bool:
        return self._constraint.done


# Cancelling and closing


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("grammar", [{}, {"regex": "[ab ]{40}"}], ids=["free", "grammar"])
def test_a_cancel_from_another_thread_ends_a_row_within_a_token(
    world: World, way: Way, grammar: dict[str, Any]
) -> None:
    case = Case("long", prompt_of(20), replace(LONG, **grammar))
    said = by_definition(world, case).token_ids
    for count in (1, 2, 7, 20):
        cancel = threading.Event()
        running = make_sequence(world, case, way, said, cancel=cancel)
        stream = Place(world, way).stream(running)
        pieces = [next(stream) for _ in range(count)]
        thread = threading.Thread(target=cancel.set)
        thread.start()
        thread.join()
        assert list(stream) == []
        assert stream.result.token_ids == [piece.token_id for piece in pieces] == said[:count]
        assert (stream.result.finish_reason, stream.result.stop_reason) == ("abort", "cancelled")
        assert len(stream.result.timing.decode_times_s) <= count - 1


def test_a_cancel_during_a_long_prompt_is_seen_behind_the_chunk(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    cancel, seen = threading.Event(), list[int]()
    running = make_sequence(world, Case("", prompt_of(100), LONG), Way(chunk=7), cancel=cancel)
    place = Place(world, Way())
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


def test_a_stream_closed_in_the_middle_gives_everything_back(llm: LLM) -> None:
    before = llm.generate("abc ab", LONG).token_ids
    llm.generate("abc ab", replace(LONG, regex="[ab ]{40}"))  # another thread fills its masks
    num_threads = threading.active_count()
    for speculation in (None, "ngram"):
        for grammar in ({}, {"regex": "[ab ]{40}"}):
            stream = llm.stream("abc ab", replace(LONG, **grammar), speculation=speculation)
            for _ in range(11):
                next(stream)
            stream.close()
            assert list(stream) == []
            assert (stream.result.finish_reason, stream.result.stop_reason) == ("abort", "cancelled")
            assert stream.result.token_ids == before[:11] or grammar
            assert not llm._opened.engine.sequences, "its slot is there for the next"
            assert threading.active_count() == num_threads
            assert llm.generate("abc ab", LONG).token_ids == before


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
            assert stats.drafts_accepted - timing.decode_times_s.count(0.0) in (
                0,
                1,
            )  # the last may end it
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
    assert len(set(timing.decode_times_s)) > 2, "a mean would be the same for each of the two chains"
    assert len(set(timing.sampling_times_s)) > 2
    assert timing.total_time_s <= passed
    assert timing.arrival_times_s[-1] <= passed


def test_work_between_two_steps_counts_with_the_next_forward(world: World) -> None:
    running = make_sequence(world, Case("", prompt_of(3), LONG), Way())
    running.timer.stepped(1, Clock(0.0, [StepEnd(1.0, 1.5)], 1.75))
    running.timer.waited(4.0)
    running.timer.stepped(1, Clock(10.0, [StepEnd(11.0, 11.5)], 12.0))
    timing = running.result().timing
    assert (timing.ttft_s, timing.decode_times_s, timing.sampling_times_s) == (1.5, [0.25 + 4.0 + 1.0], [0.5])


@pytest.mark.parametrize("failing", ["nothing", "the sequence", "the step"])
def test_a_prompt_is_compressed_after_its_first_token_but_not_after_an_error(
    world: World, failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = list[int]()
    monkeypatch.setattr(Runner, "compresses_prompts", True)
    monkeypatch.setattr(Runner, "after_prompt", lambda runner, slot, token_ids: ended.append(len(token_ids)))
    engine, sequence = Engine(make_runner(world, Way())), make_sequence(world, Case("", prompt_of(3), LONG), Way())
    engine.submit(sequence)
    if failing == "the sequence":
        monkeypatch.setattr(sequence, "accept", Mock(side_effect=KeyError))
        assert engine.step() == [sequence]
        assert sequence.finish_reason == "error"
    elif failing == "the step":
        monkeypatch.setattr(sequence, "accept", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    else:
        engine.step()
    assert ended == ([3] if failing == "nothing" else [])
