"""Claims about recordings of the sampler on a GPU: they belong to stages and sizes, not to the rows that take part.

The forward is a table of logits by token. So a step takes no time, and the answer can be computed token by token.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from infer import LLM
from infer.compute.operands.step import Chunk, Step
from infer.compute.ops import SampledStep
from infer.compute.sampling import sampler
from infer.compute.sampling.columns import SamplingColumns
from infer.compute.sampling.history import History
from infer.engine.runner.runner import Runner
from infer.sampling_params import SamplingParams
from path_cases import make_folder

pytest.importorskip("triton", reason="Triton is not installed")

from infer.compute.backends.cuda.capture import CapturedForward
from infer.compute.backends.cuda.graphs import Repeats

pytestmark = pytest.mark.usefixtures("quick_interpreter")
CPU = torch.device("cpu")
VOCAB_SIZE = 60
TABLE = 3 * torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=torch.manual_seed(0))
PARAMS = [
    *(SamplingParams(temperature=0), *(SamplingParams(temperature=0.9, seed=seed) for seed in (1, 2))),
    SamplingParams(temperature=0.8, seed=3, top_k=5),
    SamplingParams(temperature=0.8, seed=4, top_p=0.7, repetition_penalty=1.3),
    SamplingParams(temperature=0.8, seed=5, logit_bias={7: 4.0}, min_new_tokens=9),
    SamplingParams(temperature=0, allowed_token_ids=range(20, 40)),
    SamplingParams(temperature=0, frequency_penalty=1.5),
]


def look_up(step: Step) -> Tensor:
    """Return the logits after each token, and NaN for padding."""
    logits = TABLE[step.tokens.clamp(min=0)]
    logits[step.rows < 0] = torch.nan
    found = logits[step.logit_indices.clamp(min=0)]
    found[step.logit_indices < 0] = torch.nan
    return found


def make_captured(tokens: int = 16, logits: int = 16) -> tuple[CapturedForward, Mock]:
    """Return a forward, and its function that records, which counts its calls."""
    graphs = Repeats()
    record = Mock(wraps=graphs.record)
    graphs.record = record  # type: ignore[method-assign]
    return CapturedForward(look_up, tokens, logits, CPU, graphs), record


def make_columns() -> tuple[SamplingColumns, History]:
    columns, history = SamplingColumns(len(PARAMS), VOCAB_SIZE, end_ids=[9]), History(len(PARAMS), 64, VOCAB_SIZE)
    for slot, params in enumerate(PARAMS):
        columns.write(slot, params, 1)
        history.begin(slot, [slot], 1)
    return columns, history


def by_definition(slot: int, num_tokens: int) -> list[int]:
    """Return the slot's answer after the prompt [slot], sampled alone, one token after the other."""
    columns, history = make_columns()
    columns.select([slot])
    token_ids = [slot]
    for position in range(1, num_tokens + 1):
        logits = TABLE[token_ids[-1:]]
        found = sampler.choose_tokens(logits, columns, history, torch.tensor([position])).tolist()
        if columns.has_penalty:
            history.append(torch.tensor([slot]), torch.tensor(found))
        token_ids += found
    return token_ids[1:]


# The rows of each step. The last steps have the stages of the first.
SELECTIONS = [[0, 1, 2], [0, 1], [2, 1, 0], [3, 4, 5, 6, 7], [7, 6, 5, 4, 3], [4, 3, 5, 7, 6], [2, 0, 1]]


@pytest.mark.slow
def test_rows_that_join_and_leave_make_no_new_recording_and_the_tokens_are_the_same() -> None:
    captured, record = make_captured()
    columns, history = make_columns()
    said = {slot: list[int]() for slot in range(len(PARAMS))}
    counts = list[int]()
    for slots in SELECTIONS:
        columns.select(slots)
        chunks = [Chunk(slot, [(said[slot] or [slot])[-1]]) for slot in slots]
        starts = [len(said[slot]) for slot in slots]
        found = captured.run_multi_step(SampledStep(chunks, starts, columns, history), 3)
        for slot, token_ids in zip(slots, found.token_ids, strict=True):
            said[slot] += token_ids
        counts.append(record.call_count)
    for slot, token_ids in said.items():
        assert len(token_ids) >= 9
        assert token_ids == by_definition(slot, len(token_ids))
    # Forwards of 4 and 8 rows, of 2 rows for the second, and a sampler for each of them.
    assert counts == [2, 4, 4, 6, 6, 6, 6]


@pytest.mark.slow
def test_rows_that_join_and_leave_verify_drafts_without_a_new_recording() -> None:
    captured, record = make_captured()
    columns, history = make_columns()
    counts = list[int]()
    for slots in ([3, 4, 5, 6], [6, 5, 4, 3], [7, 4, 3, 5]):
        right = {slot: by_definition(slot, 2) for slot in slots}
        for slot in slots:
            history.begin(slot, [slot], 1)
        columns.select(slots)
        wrong = (right[slots[1]][0] + 1) % VOCAB_SIZE
        drafts = {slots[0]: right[slots[0]], slots[1]: [wrong, 0]}
        chunks = [Chunk(slot, [slot, *drafts.get(slot, [])], len(drafts.get(slot, []))) for slot in slots]
        found = captured.launch(SampledStep(chunks, [0] * len(slots), columns, history)).wait().token_ids
        assert (found[0][:2], [len(token_ids) for token_ids in found]) == (right[slots[0]], [3, 1, 1, 1])
        assert [token_ids[0] for token_ids in found] == [right[slot][0] for slot in slots]
        counts.append(record.call_count)
    assert counts == [2, 2, 2]


def test_a_larger_list_or_another_history_is_read_where_it_is() -> None:
    captured, _ = make_captured()
    biases = {token_id: -5.0 for token_id in range(VOCAB_SIZE) if token_id != 11}
    params = [SamplingParams(temperature=0, logit_bias=biases, presence_penalty=0.1) for _ in range(8)]
    for count in (1, 8):  # more biases than fit the first tables
        columns, history = SamplingColumns.of(params[:count], VOCAB_SIZE), History(8, 64, VOCAB_SIZE)
        for slot in range(count):
            history.begin(slot, [3], 1)
        chunks = [Chunk(slot, [3]) for slot in range(count)]
        biased = TABLE[3] + torch.tensor([biases.get(token_id, 0.0) for token_id in range(VOCAB_SIZE)])
        found = captured.run_multi_step(SampledStep(chunks, [0] * count, columns, history), 1).token_ids
        assert found == [[int(biased.argmax())]] * count
        assert history.lengths.tolist() == [2] * count + [0] * (8 - count)


def of_many(num_drafts: int) -> SampledStep:
    """Return a step of 70 rows of a token and drafts."""
    drafts = list(range(num_drafts))
    chunks = [Chunk(slot, [slot % VOCAB_SIZE, *drafts], num_drafts) for slot in range(70)]
    params = [SamplingParams(temperature=0.9, seed=slot) for slot in range(70)]
    return SampledStep(chunks, [5] * 70, SamplingColumns.of(params, VOCAB_SIZE))


def drawn(logits: Tensor, columns: SamplingColumns, position: int) -> list[int]:
    positions = torch.full((len(logits),), position)
    found: list[int] = sampler.choose_tokens(logits, columns, None, positions).tolist()
    return found


@pytest.mark.slow(rest=0)
def test_a_step_of_decoding_has_more_than_64_rows() -> None:
    captured, _ = make_captured(8192, 512)
    step = of_many(0)
    chunks, columns = step.chunks, step.columns
    last = [chunk.token_ids[0] for chunk in chunks]
    expected = [list[int]() for _ in chunks]
    for position in (6, 7):
        last = drawn(TABLE[last], columns, position)
        for mine, token_id in zip(expected, last, strict=True):
            mine.append(token_id)
    found = captured.run_multi_step(step, 2)
    assert found.token_ids == expected
    stops = captured.run_multi_step(step, 9, list({ids[0] for ids in expected}))
    assert stops.token_ids == [ids[:1] for ids in expected], "every row has met a stop id, also beyond the 64th"
    ended: Sequence[int] = sorted({ids[0] for ids in expected[:69]} - {expected[69][0]})
    assert len(captured.run_multi_step(step, 2, ended).ends) == 2


@pytest.mark.slow(rest=0)
def test_a_step_of_drafts_has_more_than_64_lines() -> None:
    captured, _ = make_captured(8192, 512)
    step = of_many(1)
    chunks, columns = step.chunks, step.columns
    first = drawn(TABLE[[chunk.token_ids[0] for chunk in chunks]], columns, 6)
    second = drawn(TABLE[[chunk.token_ids[1] for chunk in chunks]], columns, 7)
    found = captured.launch(step).wait().token_ids
    for mine, chunk, one, two in zip(found, chunks, first, second, strict=True):
        assert mine == ([one, two] if one == chunk.token_ids[1] else [one])


def test_one_replay_holds_more_than_512_tokens() -> None:
    captured, record = make_captured(8192, 512)
    token_ids = torch.randint(VOCAB_SIZE, (8192,), generator=torch.manual_seed(1)).tolist()
    indices = list(range(0, 8192, 20))
    logits = captured.run(Step.of(token_ids, logit_indices=indices))
    assert torch.equal(logits, TABLE[[token_ids[index] for index in indices]])
    assert record.call_count == 1


def test_a_load_logs_how_long_the_recordings_took(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = make_folder("llama", tmp_path / "model")
    with caplog.at_level("INFO", "infer.server"):
        for num_recorded in (5, 0):
            monkeypatch.setattr(Runner, "warm_up", lambda self, vocab_size, count=num_recorded: count)
            LLM(folder).close()
    assert len(caplog.messages) == 1
    assert re.fullmatch(r"recorded 5 steps for the device in \d+\.\d s", caplog.messages[0])
