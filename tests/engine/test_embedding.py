"""`LLM.embed` and the same for event loops: pooled states of a text, whose bits depend only on the text."""

import asyncio
import threading
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, get_args
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from idle import in_event_loop
from infer import LLM, AsyncLLM, SamplingParams
from infer.compute import ops
from infer.compute.operands.step import Step
from infer.engine.requests.answer import Work, once
from infer.engine.runner.hidden_states import STEP_TOKENS, HiddenStates
from infer.engine.runner.runner import make_cache
from infer.engine.texts import text_states
from infer.engine.texts.text_ids import VectorOptions
from infer.engine.texts.text_states import PooledStates
from infer.engine.texts.text_tasks import embed
from infer.outputs import Pooling
from test_session import make_model

TEXTS = ["hello", "a", "once upon a time " * 12, "b", "the same", "longer than the others " * 9, "the same"]
GREEDY = SamplingParams(temperature=0, max_new_tokens=40, ignore_eos=True)


@torch.inference_mode()
def states_of(llm: LLM, text: str) -> Tensor:
    """Return the vectors, computed in one batch."""
    token_ids = llm.tokenizer.encode(text)
    cache = make_cache(llm.model, len(token_ids), step_tokens=len(token_ids))
    cache.reserve(0, len(token_ids))
    return ops.normalize(llm.model.residual(Step.of(token_ids), cache), llm.model.norm).double()


@pytest.mark.parametrize("normalize", [True, False])
def test_the_mean_and_the_last_are_those_of_the_hidden_states(llm: LLM, normalize: bool) -> None:
    means, lasts = (llm.embed(TEXTS, pooling, normalize=normalize) for pooling in ("mean", "last"))
    for text, mean, last in zip(TEXTS, means, lasts, strict=True):
        states = states_of(llm, text)
        expected = torch.stack([states.mean(0), states[-1]])
        expected = torch.nn.functional.normalize(expected) if normalize else expected
        assert torch.allclose(torch.stack([mean, last]).double(), expected, atol=1e-6)
        assert torch.equal(last, expected[1].float())


@pytest.mark.parametrize("pooling", get_args(Pooling))
def test_the_bits_of_a_vector_depend_on_its_text_alone(llm: LLM, pooling: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    together = llm.embed(TEXTS, pooling)
    assert (llm.embed([]).shape, together.dtype) == ((0, together.shape[1]), torch.float32)
    assert torch.equal(together, torch.cat([llm.embed([text], pooling) for text in TEXTS]))
    assert torch.equal(together.flip(0), llm.embed(TEXTS[::-1], pooling))
    assert torch.equal(together, llm.embed([llm.tokenizer.encode(text) for text in TEXTS], pooling))
    for step_tokens in (1, 7, 100):
        monkeypatch.setattr(text_states, "step_tokens", lambda host, count=step_tokens: count)
        assert torch.equal(llm.embed(TEXTS, pooling), together)


def test_a_model_without_captures_gives_the_same_bits(folder: Path, llm: LLM) -> None:
    assert torch.equal(LLM(folder, capture=False).embed(TEXTS), llm.embed(TEXTS))


def test_steps_are_as_short_as_the_engine_s_while_it_answers(llm: LLM) -> None:
    host = llm.host
    assert text_states.step_tokens(host) == STEP_TOKENS
    with llm.stream("hello", GREEDY) as stream:
        next(stream)
        assert 16 <= text_states.step_tokens(host) <= STEP_TOKENS


CALLS: dict[str, Callable[[Any], Any]] = {
    "embedder": lambda llm: llm.embed(TEXTS, prompt_name="query", dimensions=8),
    "labeller": lambda llm: llm.classify(TEXTS),
    "judge": lambda llm: llm.rerank("a", TEXTS, 2, "find"),
}


@pytest.mark.parametrize("kind", CALLS)
def test_a_task_gets_what_a_call_returns(kind: str, request: pytest.FixtureRequest) -> None:
    async def ask() -> Any:
        return await CALLS[kind](AsyncLLM(llm))

    llm = request.getfixturevalue(kind)
    assert [str(each) for each in asyncio.run(ask())] == [str(each) for each in CALLS[kind](llm)]


def test_answers_and_embeddings_of_tasks_run_concurrently(llm: LLM) -> None:
    async def ask() -> list[Any]:
        shared = AsyncLLM(llm)
        return await asyncio.gather(shared.generate("go on", GREEDY), *(shared.embed(TEXTS) for _ in range(3)))

    answer, *found = asyncio.run(ask())
    assert all(torch.equal(each, llm.embed(TEXTS)) for each in found)
    assert answer.token_ids == llm.generate("go on", GREEDY).token_ids


@in_event_loop
async def test_a_task_that_is_cancelled_ends_before_the_next_step(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    shared, began, may_go_on, run = AsyncLLM(llm), threading.Event(), threading.Event(), HiddenStates._run

    def held(*arguments: Any) -> Tensor:
        began.set()
        may_go_on.wait()
        return run(*arguments)

    held_run = Mock(side_effect=held)
    monkeypatch.setattr(HiddenStates, "_run", lambda *arguments: held_run(*arguments))
    task = asyncio.create_task(shared.embed(TEXTS))
    await asyncio.to_thread(began.wait)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    may_go_on.set()
    await shared.host.loop.run_as_task(bool)
    assert held_run.call_count == 1


@pytest.mark.slow
def test_a_call_that_was_abandoned_holds_no_memory_of_the_next(tmp_path: Path) -> None:
    """A full context needs all pages but one. The common beginning of texts needs pages in addition to the texts'."""
    folder = make_model(tmp_path, context=6400)
    many, one = [f"{'begin ' * 200}{number}" for number in range(3)], ["y" * 6400]
    with LLM(folder) as llm:
        host, expected = llm.host, {len(texts): llm.embed(texts, "last") for texts in (many, one)}

        def begun(texts: list[str], num_steps: int) -> Work[None]:
            task = embed(host, texts, VectorOptions("last"))
            work = task.work(task.prepare(lambda: None))
            for _ in range(num_steps):
                yield next(work)
            work.close()

        for abandoned, num_steps, texts in ((many, 4, one), (one, 25, many)):
            host.loop.call(begun(abandoned, num_steps)).get()
            assert torch.equal(llm.embed(texts, "last"), expected[len(texts)])


@pytest.mark.parametrize("pooling", ["mean", "last"])  # with the last state, calls share the beginning of their texts
def test_a_call_of_many_texts_lets_others_continue(llm: LLM, pooling: Any) -> None:
    host, gate, ended = llm.host, threading.Event(), list[str]()
    texts = {"many": [f"{'go on ' * 40}{number}" for number in range(40)]}
    texts["few"] = [f"{'go in ' * 40}{end}" for end in "ab"]
    expected = {name: torch.cat([llm.embed([text], pooling) for text in given]) for name, given in texts.items()}

    def recorded(name: str) -> Work[Tensor]:
        task = embed(host, texts[name], VectorOptions(pooling))
        values = yield from task.work(task.prepare(lambda: None))
        ended.append(name)
        return task.finish(values)

    waiting = host.loop.call(once(gate.wait))
    replies = {name: host.loop.call(recorded(name)) for name in texts}
    gate.set()
    assert waiting.get()
    assert all(torch.equal(reply.get(), expected[name]) for name, reply in replies.items())
    assert ended == ["few", "many"]


# The formulas of pooling


FORMULAS: dict[Pooling, Callable[[Tensor, int], Tensor]] = {
    "mean": lambda states, skipped: states[skipped:].mean(0),
    "mean_sqrt_len": lambda states, skipped: states[skipped:].sum(0) / (len(states) - skipped) ** 0.5,
    "max": lambda states, skipped: states[skipped:].amax(0),
    "weightedmean": lambda states, skipped: _weighted(states, torch.arange(1, len(states) + 1), skipped),
    "cls": lambda states, skipped: states[skipped],
    "last": lambda states, skipped: states[-1],
}
LENGTHS = (1, 7, 12)


def _weighted(states: Tensor, weights: Tensor, skipped: int) -> Tensor:
    return (states * weights[:, None])[skipped:].sum(0) / weights[skipped:].sum()


@pytest.mark.parametrize("pooling", get_args(Pooling))
@pytest.mark.parametrize("skipped", [(0, 0, 0), (0, 3, 11)])
def test_a_vector_has_its_formula_and_the_same_bits_in_any_parts(pooling: Pooling, skipped: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    texts = [torch.randn(length, 8) for length in LENGTHS]
    whole = PooledStates(pooling, len(texts), 8, skipped)
    for index, states in enumerate(texts):
        whole.add(index, states)
    expected = [FORMULAS[pooling](states.double(), skipped[at]) for at, states in enumerate(texts)]
    torch.testing.assert_close(whole.vectors(), torch.stack(expected))
    for length in (1, 2, 5):
        parts = PooledStates(pooling, len(texts), 8, skipped)
        for start, (index, states) in product(range(0, max(LENGTHS), length), enumerate(texts)):
            if start < len(states):
                parts.add(index, states[start : start + length])
        assert torch.equal(parts.vectors(), whole.vectors())
