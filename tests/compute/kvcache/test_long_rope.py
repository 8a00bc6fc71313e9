"""Two sets of rope factors: a sequence has the set for its length, however it got its tokens, with any neighbours."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, Phi3Config

from byte_tokenizer import VOCAB_SIZE, write_byte_tokenizer
from extent import slow_except
from infer import LLM, SamplingParams
from infer.compute import ops
from infer.compute.kvcache.cache_settings import CacheSettings
from infer.compute.kvcache.paged import PagedCache
from infer.compute.operands.activation_values import Activations
from infer.compute.operands.step import Chunk, Step
from infer.compute.operands.weights import Heads, RopeTable
from infer.compute.ops import SampledStep
from infer.compute.quantization.kv_layout import LayerCache
from infer.compute.sampling.columns import SamplingColumns
from infer.engine.runner.runner import Runner
from infer.engine.step.steps import rope_room
from infer.models.transformer import Transformer
from layer_caches import make_layer
from path_cases import Always, Oracle
from refusals import check_refused
from steps import join
from test_families import expected_logits
from tiny import LONGROPE, Tiny, make_tiny

BEYOND = 64
PAGES = CacheSettings(page_tokens=16, reuse_prefixes=True)
GREEDY = SamplingParams(temperature=0, max_new_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("long")


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Any:
    config = Phi3Config(**LONGROPE.config.to_dict() | {"vocab_size": VOCAB_SIZE, "eos_token_id": 256})
    write_byte_tokenizer(folder)
    return make_tiny(Tiny("long", config), folder)


@pytest.fixture(scope="module")
def llm(oracle: Any, folder: Path) -> LLM:
    return LLM(folder, dtype="float32")


def random_ids(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def expected_greedy(oracle: Any, prompt: Sequence[int], count: int) -> list[int]:
    """Return the greedy tokens. Everything is computed again for each, as `transformers` does if factors change."""
    token_ids = list(prompt)
    for _ in range(count):
        token_ids.append(int(expected_logits(oracle, token_ids)[-1].argmax()))
    return token_ids[len(prompt) :]


@pytest.mark.parametrize("length", [1, 40, BEYOND, BEYOND + 1, 100])
def test_logits_have_the_factors_of_the_sequences_length(oracle: Any, llm: LLM, length: int) -> None:
    token_ids = random_ids(length)
    assert (llm.logits(token_ids) - expected_logits(oracle, token_ids)).abs().max() <= 1e-4


@pytest.mark.slow(cases=2)
@pytest.mark.parametrize("length", [30, BEYOND - 10, BEYOND - 1, BEYOND, BEYOND + 1, 90])
@pytest.mark.parametrize("speculation", [None, "ngram"])
def test_an_answer_that_passes_the_border_is_that_of_everything_computed_again(
    oracle: Any, llm: LLM, length: int, speculation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = random_ids(length)
    expected = expected_greedy(oracle, prompt, 24)
    monkeypatch.setattr("infer.engine.step.drafting.DraftPolicy", lambda most, priors: Always())
    monkeypatch.setattr("infer.engine.speculation.ngram.NgramDraft", partial(Oracle, "right", expected))
    result = llm.generate(prompt, GREEDY, speculation=speculation)
    assert result.token_ids == expected
    assert (result.stats.drafts_accepted > 0) == (speculation is not None)


def test_rows_on_both_sides_of_the_border_do_not_disturb_each_other(llm: LLM) -> None:
    prompts = [random_ids(length, seed=length) for length in (3, 50, 60, 64, 70, 100)]
    alone = [llm.generate(prompt, GREEDY).token_ids for prompt in prompts]
    together = llm.generate_all(prompts, GREEDY, batch_size=4)
    assert [result.token_ids for result in together] == alone


def test_a_prompt_beyond_the_border_takes_no_pages_of_one_before_it(llm: LLM) -> None:
    runner, token_ids = Runner(llm.model, 128, num_slots=2, settings=PAGES), random_ids(100)
    runner.choose_rope(0, 40)
    runner.extend(0, token_ids[:40])
    runner.cache.remember(0, token_ids[:40])
    runner.choose_rope(1, 100)
    assert runner.cache.adopt(1, token_ids) == 0
    runner.choose_rope(1, 50)
    assert runner.cache.adopt(1, token_ids[:50]) == 32


def runner_of(llm: LLM, lengths: Sequence[int], num_next: int = 0, **options: Any) -> Runner:
    """Return a runner with slots of these numbers of tokens, and room for some more."""
    runner = Runner(llm.model, 128, num_slots=len(lengths), **options)
    for slot, length in enumerate(lengths):
        runner.choose_rope(slot, length)
        runner.extend(slot, random_ids(length, seed=length))
        runner.cache.reserve(slot, num_next)
    return runner


@pytest.mark.parametrize("count", [1, 4])
def test_rows_on_both_sides_of_the_border_take_one_step(llm: LLM, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [Chunk(row, random_ids(count, seed=row), num_drafts=count - 1) for row in range(2)]
    alone = [
        runner_of(llm, [length], count).forward([part._replace(row=0)])
        for length, part in zip((10, 100), parts, strict=True)
    ]
    steps, forward = list[Step](), Transformer.forward

    def counted(model: Transformer, step: Step, cache: PagedCache) -> Tensor:
        steps.append(step)
        return forward(model, step, cache)

    monkeypatch.setattr(Transformer, "forward", counted)
    runner = runner_of(llm, [10, 100], count, capture=False)
    steps.clear()
    assert torch.equal(runner.forward(parts), torch.cat(alone))
    assert len(steps) == 1
    assert torch.equal(runner_of(llm, [10, 100], count).forward(parts), torch.cat(alone))


def test_slots_on_both_sides_of_the_border_take_steps_together_up_to_it(llm: LLM) -> None:

    def steps(lengths: Sequence[int], count: int) -> list[list[int]]:
        columns = SamplingColumns.of([GREEDY] * len(lengths), VOCAB_SIZE)
        chunks = [Chunk(slot, [5]) for slot in range(len(lengths))]
        runner = runner_of(llm, lengths, count)
        return runner.multi_step(SampledStep(chunks, runner.starts(chunks), columns), count).token_ids

    assert steps([BEYOND - 10, 100], 10) == steps([BEYOND - 10], 10) + steps([100], 10)
    runner = runner_of(llm, [BEYOND - 10, 100])
    assert [rope_room(runner, [Mock(slot=0, token_ids=[5] * length)]) for length in (BEYOND - 9, BEYOND)] == [9, 0]
    assert rope_room(runner, [Mock(slot=1, token_ids=[5] * (BEYOND + 1))]) > 1000


def test_only_an_empty_row_changes_its_factors(llm: LLM) -> None:
    cache = runner_of(llm, [3, 100]).cache
    check_refused(lambda: cache.set_rope(0, is_long=True), r"only an empty row .*, but row 0 has tokens")
    cache.copy_row(0, 1)
    assert cache.is_long(0)
    cache.truncate(0, 0)
    assert cache.is_long(0)
    cache.set_rope(0, is_long=False)
    assert not cache.is_long(0)
    assert cache.is_long(1)


@pytest.mark.slow
def test_a_session_goes_back_and_forth_over_the_border(oracle: Any, llm: LLM, tmp_path: Path) -> None:
    session = llm.session()
    session.append(random_ids(60))
    before = session.generate(GREEDY).token_ids
    assert before == expected_greedy(oracle, random_ids(60), 24)
    other = session.fork()
    session.save(tmp_path / "session")
    session.rewind(24)
    assert session.generate(GREEDY).token_ids == before
    longer = expected_greedy(oracle, [*random_ids(60), *before], 24)
    assert other.generate(GREEDY).token_ids == longer
    loaded = llm.load_session(tmp_path / "session")
    loaded.rewind(24)
    assert loaded.generate(GREEDY).token_ids == before


def test_log_probabilities_of_a_prompt_are_those_of_the_whole(oracle: Any, llm: LLM) -> None:
    token_ids = random_ids(100)
    expected = expected_logits(oracle, token_ids).log_softmax(-1)
    found = llm.prompt_logprobs(token_ids)
    for index, entry in enumerate(found[1:]):
        assert entry is not None
        assert abs(entry.logprob - float(expected[index, token_ids[index + 1]])) < 1e-4


def test_dynamic_theta_grows_with_the_context_that_is_asked_for(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 2}
    config = LlamaConfig(vocab_size=VOCAB_SIZE, max_position_embeddings=BEYOND, rope_parameters=rope, **sizes)
    oracle = make_tiny(Tiny("dynamic", config), tmp_path)
    write_byte_tokenizer(tmp_path)
    llm = LLM(tmp_path, dtype="float32", max_seq_len=100)
    for length in (BEYOND, 100):
        token_ids = random_ids(length)
        assert (llm.logits(token_ids) - expected_logits(oracle, token_ids)).abs().max() <= 1e-4
    assert LLM(tmp_path).max_seq_len == BEYOND
    check_refused(lambda: LLM(tmp_path, max_seq_len=257), "256")


NUM_HEADS, KV_HEADS, DIM, LENGTH = 6, 2, 48, 300
SETS = [0, 1, 1, 0]
CHUNKS = [200, 1, 3, 40, 1, 55]  # tokens of each row in a step: many, one, a few


def make_table(half: int) -> RopeTable:
    thetas = torch.stack([base ** -torch.linspace(0, 1, half) for base in (50.0, 900.0)])
    angles = torch.arange(LENGTH)[:, None] * thetas[:, None]
    return RopeTable(angles.cos(), angles.sin())


def heads_of(table: RopeTable) -> Heads:
    return Heads(NUM_HEADS, KV_HEADS, DIM, DIM**-0.5, table, None, None)


def only(table: RopeTable, index: int) -> RopeTable:
    return RopeTable(table.cos[index : index + 1].clone(), table.sin[index : index + 1].clone())


def layer_of(sets: list[int], last_position: int | None) -> LayerCache:
    layer = make_layer(heads_of(make_table(4)), len(sets), LENGTH, window=90)
    sinks = torch.full((len(sets),), 4)
    return replace(
        layer, pages=replace(layer.pages, sinks=sinks, rope_sets=torch.tensor(sets), last_position=last_position)
    )


def qkv_of(row: int) -> Tensor:
    return torch.randn(LENGTH, (NUM_HEADS + 2 * KV_HEADS) * DIM, generator=torch.manual_seed(row))


def attend_all(layer: LayerCache, heads: Heads, rows: list[int]) -> Tensor:
    """Return the attended values, [rows, tokens, out]. Row i of the layer gets the keys and values of `rows[i]`."""
    out, start = [], 0
    for size in CHUNKS:
        step = join([Step.of([1] * size, start, row=row) for row in range(len(rows))])
        qkv = torch.cat([qkv_of(row)[start : start + size] for row in rows])
        out.append(ops.attend(Activations(qkv), heads, layer, step).floats.unflatten(0, (len(rows), size)))
        start += size
    return torch.cat(out, dim=1)


@pytest.mark.parametrize(
    ("kernels", "half", "last_position"),
    slow_except([("cpu", 5, 99)], [("cpu", 16, None), ("cpu", 5, 99), ("reference", 5, None), ("reference", 16, 99)]),
)
def test_each_row_turns_by_its_own_set(kernels: str, half: int, last_position: int | None) -> None:
    table = make_table(half)
    with ops.using(kernels):
        found = attend_all(layer_of(SETS, last_position), heads_of(table), list(range(len(SETS))))
        for row, index in enumerate(SETS):
            alone = attend_all(layer_of([0], last_position), heads_of(only(table, index)), [row])[0]
            assert torch.allclose(found[row], alone, atol=1e-6)
            assert kernels == "reference" or torch.equal(found[row], alone)
            other = attend_all(layer_of([0], last_position), heads_of(only(table, 1 - index)), [row])[0]
            assert (found[row] - other).abs().max() > 1e-3


@pytest.mark.parametrize("kernels", ["cpu", "reference"])
def test_a_table_of_one_set_serves_every_row(kernels: str) -> None:
    heads = heads_of(only(make_table(16), 0))
    with ops.using(kernels):
        assert torch.equal(attend_all(layer_of([1], None), heads, [3]), attend_all(layer_of([0], None), heads, [3]))
