"""What a step takes of each row, over plans of every kind: never more than its chunk, and every row gets on."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from byte_tokenizer import write_byte_tokenizer
from infer import LLM
from infer.engine.decode import Batch
from infer.engine.generation import Generation
from infer.engine.running import Running
from infer.operands.step import Part
from infer.runner.context import MAX_LINES, Context
from infer.sampling_params import SamplingParams
from infer.speculation.policy import DraftPolicy
from infer.tokenizer import Tokenizer
from test_session import make_model

MOST_ROWS = 8


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("bytes")
    write_byte_tokenizer(folder)
    return Tokenizer.from_folder(folder)


class Rows(Context):
    """Counts what it is given, without a model."""

    def __init__(self, most_drafts: Sequence[int]) -> None:
        super().__init__(torch.device("cpu"))
        self._most_drafts = most_drafts

    @property
    def lengths(self) -> Sequence[int]:
        return [0] * MOST_ROWS

    def forward(self, parts: Sequence[Part]) -> Tensor:
        raise NotImplementedError

    def commit(self, row: int, count: int) -> None:
        return

    def truncate(self, row: int, length: int) -> None:
        return

    def max_drafts(self, row: int) -> int:
        return self._most_drafts[row]


class Eager:
    """A draft, and a policy, that always want as many tokens."""

    def __init__(self, count: int) -> None:
        self._count = count

    def match(self) -> int:
        return 4

    def propose(self, count: int) -> Sequence[int]:
        return [1] * min(count, self._count)

    def num_draft_tokens(self, *state: object) -> int:
        return self._count


@dataclass(frozen=True)
class Row:
    pending: int
    is_answering: bool
    num_drafts: int
    most_drafts: int
    room: int


ROWS = st.builds(
    Row,
    pending=st.one_of(st.just(1), st.integers(1, 40), st.integers(100, 5000)),
    is_answering=st.booleans(),
    num_drafts=st.sampled_from([0, 1, 8, 15]),
    most_drafts=st.sampled_from([MAX_LINES, 3, 0, -2]),
    room=st.sampled_from([1, 2, 20, 1000]),
)


def make_running(tokenizer: Tokenizer, index: int, row: Row) -> Running:
    params = SamplingParams(temperature=0, max_new_tokens=row.room + row.is_answering, seed=0)
    generation = Generation(tokenizer, [5] * row.pending, params, 10_000)
    if row.is_answering:
        generation.accept(65)
    running: Any = Running(generation, row=index)
    running.pending = [7] * row.pending
    if row.num_drafts:
        running._draft = running._policy = Eager(row.num_drafts)
    made: Running = running
    return made


def plan(tokenizer: Tokenizer, rows: Sequence[Row], chunk: int) -> tuple[list[Running], list[Part]]:
    batch = Batch(Rows([row.most_drafts for row in rows]), torch.device("cpu"), prefill_chunk=chunk)
    batch.active = [make_running(tokenizer, index, row) for index, row in enumerate(rows)]
    return batch.active, batch._plan()


@settings(max_examples=300, deadline=None)
@given(rows=st.lists(ROWS, min_size=1, max_size=MOST_ROWS), chunk=st.sampled_from([1, 2, 7, 16, 64, 512]))
def test_no_step_is_longer_than_its_chunk_and_every_row_gets_on(
    tokenizer: Tokenizer, rows: list[Row], chunk: int
) -> None:
    active, parts = plan(tokenizer, rows, chunk)
    decoding = [running.is_decoding for running in active]
    sizes = [len(part.token_ids) for part in parts]
    assert sum(sizes) <= max(chunk, sum(decoding) + (not all(decoding)))
    assert sum(part.num_lines for part in parts) <= MAX_LINES
    assert all(size >= 1 for size, decodes in zip(sizes, decoding, strict=True) if decodes)
    reading = [index for index, decodes in enumerate(decoding) if not decodes]
    assert not reading or sizes[reading[0]] >= 1  # the others follow when this one has been read
    for running, part, row in zip(active, parts, rows, strict=True):
        num_known = len(part.token_ids) - part.num_drafts
        assert part.token_ids[:num_known] == running.pending[:num_known]
        assert part.is_wanted == (num_known == row.pending)
        assert part.num_drafts <= max(0, min(row.num_drafts, row.most_drafts, row.room - 1))
        assert part.is_wanted or not part.num_drafts


def test_drafts_after_forced_tokens_leave_no_more_than_the_chunk_to_a_prompt(tokenizer: Tokenizer) -> None:
    """Five pending tokens of an answer, fifteen drafts after them, and a long prompt beside them."""
    answering = Row(pending=5, is_answering=True, num_drafts=15, most_drafts=MAX_LINES, room=100)
    reading = Row(pending=4000, is_answering=False, num_drafts=0, most_drafts=MAX_LINES, room=100)
    for rows in ([answering, reading], [reading, answering], [answering, reading, reading]):
        _, parts = plan(tokenizer, rows, 16)
        assert sum(len(part.token_ids) for part in parts) == 16


def test_forced_tokens_with_drafts_beside_a_long_prompt_are_as_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A grammar forces more than a step's chunk holds, its drafts want as much again, and a prompt is being read."""
    llm = LLM(make_model(tmp_path), eviction_policy="sliding", eviction_window=64)
    forcing = SamplingParams(regex='([{]"number": [0-9][}], ){4}', seed=1, max_new_tokens=80)
    answering = SamplingParams(temperature=0, max_new_tokens=40)
    prompts, params = ["{" * 9, "hello", "once " * 60], [forcing, answering, answering]
    alone = [llm.generate(prompt, own) for prompt, own in zip(prompts, params, strict=True)]
    sizes, plan_step = list[int](), Batch._plan

    def noting(batch: Batch) -> list[Part]:
        parts = plan_step(batch)
        sizes.append(sum(len(part.token_ids) for part in parts))
        return parts

    monkeypatch.setattr(DraftPolicy, "num_draft_tokens", lambda *state: 15)
    monkeypatch.setattr(Batch, "_plan", noting)
    together = llm.generate_all(
        prompts, params, batch_size=2, speculation="ngram", num_draft_tokens=15, prefill_chunk=16
    )
    assert [result.token_ids for result in together] == [result.token_ids for result in alone]
    assert max(sizes) == 16
    assert together[0].stats.tokens_forced > 16
    assert any(result.stats.drafts_proposed for result in together)
