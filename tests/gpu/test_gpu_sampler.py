"""Claims about the sampler's kernels for GPUs, in Triton's interpreter: exactly the tokens of `sampling.sampler`."""

import math
import random
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compiled_kernels import run_compiled
from extent import usual_or_all
from infer import InvalidRequestError, SamplingParams
from infer.compute import ops
from infer.compute.sampling import noise, sampler
from infer.compute.sampling.columns import SamplingColumns
from infer.compute.sampling.history import History
from infer.compute.sampling.masks import num_mask_words
from refusals import check_refused

triton = pytest.importorskip("triton", reason="Triton is not installed")

import triton.language as tl  # noqa: E402 - there may be no Triton

from infer.compute.backends import cuda  # noqa: E402
from infer.compute.backends.cuda.graphs import Repeats  # noqa: E402
from infer.compute.backends.cuda.sampling.kernel_arguments import Selection, Stages  # noqa: E402
from infer.compute.backends.cuda.sampling.logprobs import Logprobs  # noqa: E402
from infer.compute.backends.cuda.sampling.noise import ROUGH_ERROR, gumbel_of, key_of, logit_of, rough_gumbel, weights  # noqa: E402  # noqa: E402
from infer.compute.backends.cuda.sampling.recorded_sampler import SelectedRows  # noqa: E402
from infer.compute.backends.cuda.sampling.sampler import EXACT, Tiling, choose_by, choose_selected, tiling_of  # noqa: E402

HERE = Path(__file__).parent

EDGES = [0, 1, 2, 2**24 - 1, 2**24, 2**26 - 1, 2**26, 2**26 + 1, 2**31 - 1, 2**31, 2**32 - 257, 2**32 - 2, 2**32 - 1]
SQRT_HALF = round((1 - math.sqrt(0.5)) * 2**32)

# Small enough that rows of a few hundred words have several blocks, and more chunks than a tile holds.
SMALL = Tiling(block=256, chunk=4, capacity=32)
WIDE = Tiling(block=512, chunk=8, capacity=1024)
WHOLE = Tiling(block=512, chunk=256, capacity=256)  # two chunks do not fit, so nearly every filter reads the whole row
TILINGS = [SMALL, WIDE, WHOLE]
KEPT = [*({"top_k": count} for count in (1, 2, 3, 5, 8)), *({"top_p": share} for share in (0.2, 0.6, 0.8))]

Batch = tuple[Tensor, SamplingColumns, History, Tensor, Tensor | None]  # the arguments of `choose_tokens`

pytestmark = pytest.mark.usefixtures("quick_interpreter")


@triton.jit
def noise_kernel(hashes, exact, rough, SIZE: tl.constexpr):
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    h = tl.load(hashes + i).to(tl.uint32)
    tl.store(exact + i, gumbel_of(h))
    tl.store(rough + i, rough_gumbel(h))


@triton.jit
def weight_kernel(logits, largest, out, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(out + i, weights(tl.load(logits + i), tl.load(largest)))


@triton.jit
def key_kernel(logits, keys, back, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    key = key_of(tl.load(logits + i))
    tl.store(keys + i, key)
    tl.store(back + i, logit_of(key))


def test_noise_has_the_bits_of_the_definition_and_rough_noise_is_near() -> None:
    generator = random.Random(0)
    near = [*range(SQRT_HALF - 100, SQRT_HALF + 100), *range(2**26 - 50, 2**26 + 50)]
    hashes = torch.tensor(EDGES + near + [generator.getrandbits(32) for _ in range(2**15 - len(EDGES + near))])
    exact, rough = torch.empty(2, 2**15)
    noise_kernel[(8,)](hashes, exact, rough, SIZE=4096, **EXACT)
    assert torch.equal(exact, noise.gumbel_of(hashes.to(torch.int32)))
    assert float((rough - exact).abs().max()) < ROUGH_ERROR.value / 3


def test_weights_have_the_bits_of_the_definition() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.cat([-torch.rand(2000, generator=generator) * 40, torch.tensor([0.0, -0.0, -32.0, -31.99, -1e30])])
    logits = torch.cat([logits, torch.full((2048 - len(logits),), -math.inf)]) + 3.3
    out = torch.empty(2048, dtype=torch.int64)
    weight_kernel[(1,)](logits, logits.max(), out, SIZE=2048, **EXACT)
    assert torch.equal(out, noise.weights(logits, logits.max()))


def test_keys_are_in_the_order_of_the_logits() -> None:
    generator = torch.Generator().manual_seed(0)
    values = [-math.inf, math.inf, 0.0, -0.0, 1e-45, -1e-45, 3.4e38, -3.4e38, 1.0, -1.0]
    logits = torch.cat([torch.tensor(values), torch.randn(246, generator=generator) * 10])
    keys, back = torch.empty(256, dtype=torch.int32), torch.empty(256)
    key_kernel[(1,)](logits, keys, back, SIZE=256)
    assert torch.equal(back, logits)
    assert torch.equal(keys[:, None] < keys, logits[:, None] < logits)
    assert int(keys.min()) > -(2**31)


def drawn_params(generator: random.Random, vocab_size: int) -> SamplingParams:
    """Return parameters. Each is set in about a third of the rows."""

    def maybe(value: Any, off: Any) -> Any:
        return value if generator.random() < 0.35 else off

    def ids(most: int) -> list[int]:
        return [generator.randrange(vocab_size) for _ in range(generator.randint(1, most))]

    bias = {i: generator.choice([-math.inf, math.inf, 1e30, -3e38, 5.5, -2.25, 0.0]) for i in ids(5)}
    minimum = maybe(generator.randint(1, 40), 0)
    return SamplingParams(
        temperature=generator.choice([0.0, 1.0, 0.7, 0.01, 2.0, 1e-38]),
        top_k=maybe(generator.choice([1, 2, 5, 20, 50, 300, vocab_size]), None),
        top_p=maybe(generator.choice([1e-9, 0.1, 0.5, 0.8, 0.9, 0.999]), 1.0),
        min_p=maybe(generator.choice([1e-6, 0.05, 0.3, 0.99]), 0.0),
        repetition_penalty=maybe(generator.choice([0.5, 1.3, 1e-30, 1e30]), 1.0),
        repetition_window=maybe(generator.randint(0, 30), None),
        frequency_penalty=maybe(generator.uniform(-2, 2), 0.0),
        presence_penalty=maybe(generator.uniform(-2, 2), 0.0),
        logit_bias=maybe(bias, None),
        allowed_token_ids=maybe(sorted(set(ids(vocab_size))), None),
        max_new_tokens=100,
        min_new_tokens=minimum,
        stop_token_ids=maybe(ids(3), None),
        temperature_last=generator.random() < 0.3,
        seed=generator.getrandbits(64),
    )


def drawn_logits(generator: random.Random, num_rows: int, vocab_size: int) -> Tensor:
    """Return rows of every kind: smooth, peaked, flat, tied, extreme, banned, with zeros of both signs, faulty."""
    torch_generator = torch.Generator().manual_seed(generator.getrandbits(32))
    logits = torch.randn(num_rows, vocab_size, generator=torch_generator)
    for row in logits:
        kind = generator.randrange(10)
        row *= (2.0, 8.0, 0.01, 2.0, 1e37, 3.0, 1.0, 30.0, 2.0, 2.0)[kind]
        if kind == 3:
            row.copy_(row.round())
        elif kind == 5:
            row[torch.rand(vocab_size, generator=torch_generator) < 0.8] = -math.inf
        elif kind == 6:
            row.copy_(row.sign() * 0.0)
        elif kind == 8:
            row[generator.randrange(vocab_size)] = generator.choice([math.nan, math.inf, -math.inf, 3.4e38])
        elif kind == 9:
            row.copy_(row.bfloat16().float())
    return logits


def drawn_batch(seed: int, num_rows: int, vocab_size: int) -> Batch:
    generator = random.Random(seed)
    params = [drawn_params(generator, vocab_size) for _ in range(num_rows)]
    prompts = [generator.randint(0, 20) for _ in range(num_rows)]
    lengths = (prompt + generator.randint(0, 30) for prompt in prompts)
    contexts = [[generator.randrange(min(vocab_size, 60)) for _ in range(length)] for length in lengths]
    columns = SamplingColumns.of(params, vocab_size, num_prompt_tokens=prompts, end_ids=[0, vocab_size // 2])
    history = History(num_rows, 64, vocab_size)
    for slot, context, prompt in zip(columns.history_slot.tolist(), contexts, prompts, strict=True):
        if slot >= 0:
            history.begin(slot, context, prompt)
    positions = torch.tensor([len(context) for context in contexts])
    allowed = None
    if generator.random() < 0.5:
        are_free, count = (generator.random() < 0.5 for _ in range(num_rows)), num_mask_words(vocab_size)
        words = [[-1 if each else generator.randint(-(2**31), 2**31 - 1) for _ in range(count)] for each in are_free]
        allowed = torch.tensor(words, dtype=torch.int32)
    return drawn_logits(generator, num_rows, vocab_size), columns, history, positions, allowed


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([1, 2, 31, 33, 130, 257, 600]), st.sampled_from(TILINGS))
def test_tokens_are_those_of_the_definition(seed: int, vocab_size: int, tiling: Tiling) -> None:
    batch = drawn_batch(seed, 5, vocab_size)
    assert choose_by(tiling, *batch).tolist() == sampler.choose_tokens(*batch).tolist()


@pytest.mark.slow(rest=3)
@pytest.mark.parametrize("tiling", TILINGS, ids=["small", "wide", "whole"])
@pytest.mark.parametrize(("seed", "vocab_size"), [(3, 31), (4, 600)])
def test_log_probabilities_are_those_of_the_definition(seed: int, vocab_size: int, tiling: Tiling) -> None:
    """The logits are raw and processed, and the number of alternatives is the largest and 0."""
    modes: tuple[Any, ...] = ("raw", "processed", "processed")
    logits, drawn, _, positions, allowed = drawn_batch(seed, 9, vocab_size)
    generator = random.Random(seed)
    own = [{"logprobs": (None, 0, 3, 20)[i % 4], "logprobs_mode": modes[i % 3]} for i in range(9)]
    params = [replace(drawn_params(generator, vocab_size), **each) for each in own]
    prompts = drawn.num_prompt_tokens.tolist()
    columns = SamplingColumns.of(params, vocab_size, num_prompt_tokens=prompts, end_ids=[0, vocab_size // 2])
    history = History(9, 64, vocab_size)
    for row, slot in enumerate(columns.history_slot.tolist()):
        if slot >= 0:
            history.begin(slot, generator.choices(range(vocab_size), k=int(positions[row])), prompts[row])
    logprobs = Logprobs(torch.device("cpu"), Repeats())
    records = logprobs.records(columns, 9, torch.zeros(1, dtype=torch.int64))
    token_ids = choose_by(tiling, logits, columns, history, positions, allowed, None, records).tolist()
    fetched = logprobs.fetch(columns, 9)
    assert fetched is not None
    found = fetched.of([range(i, i + 1) for i in range(9)], [[token_id] for token_id in token_ids])
    expected = sampler.sample(logits, columns, history, positions, allowed)
    assert token_ids == expected.token_ids.tolist()
    for i, (count, token_id) in enumerate(zip(columns.num_logprobs, token_ids, strict=True)):
        assert found[i] == ([] if count is None or token_id < 0 else [expected.logprob_of(i, count)])
    assert sum(map(len, found)) > 3


@pytest.mark.slow(cases=1)
@pytest.mark.parametrize(("seed", "vocab_size"), [(1, 1000), (2, 5000), (4, 4097)])
def test_tokens_of_larger_vocabularies_are_those_of_the_definition(seed: int, vocab_size: int) -> None:
    batch = drawn_batch(seed, 8, vocab_size)
    with ops.using("cuda"):
        assert ops.choose_tokens(*batch).tolist() == sampler.choose_tokens(*batch).tolist()


@pytest.mark.slow(cases=1, rest=5)
@pytest.mark.parametrize(("kept", "tiling"), list(product(KEPT, TILINGS))[:: usual_or_all(2, 1)])
def test_kept_sets_end_at_the_smallest_ids_among_equals(kept: dict[str, Any], tiling: Tiling) -> None:
    """If a token were kept that the definition drops, or one were missing, the sampled tokens would differ."""
    logits = torch.full((12, 70), -3.0)
    logits[:, [3, 9, 33, 40, 69]] = 2.0
    logits[:, [4, 20, 50]] = 2.5
    columns = SamplingColumns.of([SamplingParams(seed=9, **kept)] * 12, 70)
    positions = torch.arange(12)
    expected = sampler.choose_tokens(logits, columns, None, positions)
    assert choose_by(tiling, logits, columns, None, positions).tolist() == expected.tolist()


def test_another_selection_is_read_where_the_first_one_was() -> None:
    generator = random.Random(5)
    columns, logits = SamplingColumns(6, 200), drawn_logits(generator, 6, 200)
    for slot in range(6):
        own = {"top_k": 5 if slot % 2 else None, "logit_bias": {slot: 3.0}}
        columns.write(slot, SamplingParams(seed=slot, allowed_token_ids=range(99), **own))
    rows = SelectedRows(8, torch.device("cpu"), Repeats())
    columns.select([3])
    rows.fill(columns)
    places = [each.data_ptr() for each in (rows.fields, *rows.lists[:3])]
    for slots in ([0, 1, 2, 3, 4, 5], [4, 1], [5, 0, 2]):
        columns.select(slots)
        rows.fill(columns)
        positions = torch.arange(8)
        expected = sampler.choose_tokens(logits[slots], columns, None, positions[: len(slots)])
        selection = Selection(200, Stages.of(columns, None), rows.fields, rows.lists, None)
        padded = torch.full((8, 200), torch.nan)
        padded[: len(slots)] = logits[slots]
        assert choose_selected(SMALL, padded, selection, positions)[: len(slots)].tolist() == expected.tolist()
        assert [each.data_ptr() for each in (rows.fields, *rows.lists[:3])] == places
    columns.select(range(6))
    with pytest.raises(InvalidRequestError, match="at most 5 rows are sampled in one step, got 6"):
        SelectedRows(5, torch.device("cpu"), Repeats()).fill(columns)


@pytest.mark.parametrize("name", ["repetition_penalty", "frequency_penalty", "presence_penalty"])
def test_penalties_decide_between_tokens_seen_never_once_and_twice(name: str) -> None:
    """Greedy sampling over near ties. Token 3 is in the prompt, 5 once and 9 twice in the output, 11 nowhere."""
    leads = [0.0, 0.5, 1.0, 1.2, 1.5, 2.0, 2.2, 3.0]
    logits = torch.full((len(leads) * 3, 40), -9.0)
    for row, (lead, token) in enumerate((lead, token) for lead in leads for token in (3, 5, 9)):
        logits[row, 11], logits[row, token] = 2.0, 2.0 + lead
    params = [SamplingParams(temperature=0.0, **{name: 1.5})] * len(logits)
    columns = SamplingColumns.of(params, 40, num_prompt_tokens=[2] * len(logits))
    history = History(len(logits), 8, 40)
    for slot in range(len(logits)):
        history.begin(slot, [3, 4, 5, 9, 9], num_prompt_tokens=2)
    positions = torch.full((len(logits),), 5)
    expected = sampler.choose_tokens(logits, columns, history, positions).tolist()
    assert set(expected) == {3, 5, 9, 11}
    assert choose_by(SMALL, logits, columns, history, positions).tolist() == expected


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_every_float_is_sampled_as_its_float32(dtype: torch.dtype) -> None:
    logits, columns, history, positions, allowed = drawn_batch(8, 6, 300)
    wide = torch.stack([logits, logits], dim=2).to(dtype)[:, :, 0]
    expected = sampler.choose_tokens(wide, columns, history, positions, allowed)
    assert choose_by(SMALL, wide, columns, history, positions, allowed).tolist() == expected.tolist()


@pytest.mark.slow(cases=1)
@pytest.mark.parametrize("filters", [{}, {"top_k": 4}, {"top_p": 0.5}, {"min_p": 0.1}], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_row_that_cannot_be_sampled_gets_its_code(filters: dict[str, Any], temperature: float) -> None:
    logits = torch.zeros(5, 200)
    logits[0, 150], logits[1, 3], logits[2] = math.nan, math.inf, -math.inf
    banned = dict.fromkeys(range(200), -math.inf)
    params = [SamplingParams(seed=i, temperature=temperature, **filters) for i in range(4)]
    params.append(SamplingParams(seed=4, temperature=temperature, logit_bias=banned, **filters))
    columns, positions = SamplingColumns.of(params, 200), torch.arange(5)
    tokens = choose_by(SMALL, logits, columns, None, positions).tolist()
    assert tokens == sampler.choose_tokens(logits, columns, None, positions).tolist()
    assert [min(token, 0) for token in tokens] == [-1, -1, -2, 0, -2]


@pytest.mark.slow(cases=1)
@pytest.mark.parametrize("filters", [{}, {"top_k": 2}, {"top_p": 0.5}], ids=str)
def test_the_end_is_chosen_below_the_minimum_length_where_nothing_else_is_allowed(filters: dict[str, Any]) -> None:
    ends = {"allowed_token_ids": [7, 150], "stop_token_ids": [7, 150], "min_new_tokens": 5, "max_new_tokens": 9}
    params = SamplingParams(seed=0, **ends, **filters)
    columns = SamplingColumns.of([params] * 8, 200)
    logits, positions = torch.randn(8, 200, generator=torch.Generator().manual_seed(2)), torch.arange(8)
    tokens = choose_by(SMALL, logits, columns, None, positions).tolist()
    assert tokens == sampler.choose_tokens(logits, columns, None, positions).tolist()
    assert set(tokens) <= {7, 150}


@pytest.mark.slow(cases=1)
@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.99}, {"min_p": 0.5}], ids=str)
def test_a_temperature_that_overflows_the_logits_shifts_them_first(filters: dict[str, Any], is_last: bool) -> None:
    logits = torch.randn(6, 200, generator=torch.Generator().manual_seed(3)) * 1e38
    logits[3:] = logits[3:].abs() * -1
    logits[5, 20:40] = logits[5].max()
    params = [SamplingParams(seed=i, temperature=0.1, temperature_last=is_last, **filters) for i in range(6)]
    columns, positions = SamplingColumns.of(params, 200), torch.arange(6)
    expected = sampler.choose_tokens(logits, columns, None, positions).tolist()
    assert choose_by(SMALL, logits, columns, None, positions).tolist() == expected


def test_scores_too_near_for_rough_noise_are_decided_by_exact_noise() -> None:
    """Only two tokens can win. The second is raised by the float32 that ties it with the first, or by a smaller one."""
    ids, rounds = torch.tensor([10, 90]), 40
    positions = torch.arange(rounds)
    logits = torch.full((rounds, 128), -1e4)
    for row in range(rounds):
        first, second = noise.gumbel_at(7, row, ids).tolist()
        logits[row, ids] = torch.tensor([1.0, 1.0 + first - second + (row - rounds // 2) * 1e-7])
    columns = SamplingColumns.of([SamplingParams(seed=7)] * rounds, 128)
    expected = sampler.choose_tokens(logits, columns, None, positions).tolist()
    assert (set(expected), choose_by(SMALL, logits, columns, None, positions).tolist()) == ({10, 90}, expected)


def test_wrong_shapes_are_an_error_before_a_kernel_reads_past_them() -> None:
    columns = SamplingColumns.of([SamplingParams(seed=1)], 50)
    logits, positions = torch.zeros(1, 50), torch.zeros(1, dtype=torch.int64)
    check_refused(lambda: cuda.choose_tokens(logits[:, :49], columns, None, positions), "logits")
    with pytest.raises(InvalidRequestError, match="allowed"):
        cuda.choose_tokens(logits, columns, None, positions, torch.zeros(1, 1, dtype=torch.int32))
    penalised = SamplingColumns.of([SamplingParams(seed=1, presence_penalty=1.0)], 50)
    check_refused(lambda: cuda.choose_tokens(logits, penalised, None, positions), "history")


def test_a_batch_of_no_rows_has_no_tokens() -> None:
    assert choose_by(SMALL, torch.zeros(0, 9), SamplingColumns.of([], 9), None, torch.zeros(0).long()).tolist() == []


@pytest.mark.parametrize("vocab_size", [1, 33, 49_152, 128_256, 262_144, 600_000])
def test_every_vocabulary_has_a_tiling_that_one_program_can_search(vocab_size: int) -> None:
    tiling = tiling_of(vocab_size)
    assert triton.cdiv(vocab_size, tiling.chunk) <= 16_384
    assert (tiling.block % tiling.chunk, tiling.capacity % tiling.chunk) == (0, 0)


def test_a_gpu_gives_the_tokens_of_torch(tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("hardware: there is no CUDA GPU")
    run_compiled(HERE.parents[1] / "benchmarks" / "check_gpu.py", "--sections", "sampler", cache=tmp_path)
