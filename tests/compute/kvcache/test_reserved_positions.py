"""A user's own loop is refused if it reserves too few positions, because kernels do not check where they write."""

from collections.abc import Iterator

import pytest
import torch

from infer import InvalidRequestError
from infer.compute.kvcache.paged import PagedCache
from infer.compute.operands.step import Step
from infer.engine.runner.caches import make_cache
from path_cases import Case as Request
from path_cases import World, by_definition
from test_loop_edges import LONG, prompt_of

PROMPT = list(prompt_of(5))


@pytest.fixture
def cache(world: World) -> Iterator[PagedCache]:
    with torch.inference_mode():
        yield make_cache(world.model, 100, num_rows=2)


def run(world: World, cache: PagedCache, token_ids: list[int], start: int, row: int = 0) -> int:
    logits = world.model.forward(Step.of(token_ids, start, row=row), cache)
    return int(logits[0, : world.tokenizer.vocab_size].argmax())


def test_a_step_of_positions_that_are_not_reserved_is_refused_and_nothing_is_written(
    world: World, cache: PagedCache
) -> None:
    for num_reserved in (0, 4):
        cache.reserve(0, num_reserved)
        with pytest.raises(InvalidRequestError, match=r"of row 0 must be in \[0, \d\), got \d: call cache.res"):
            run(world, cache, PROMPT, 0)
    assert cache.lengths == [0, 0]


def test_a_position_reserved_for_one_row_is_not_reserved_for_another(world: World, cache: PagedCache) -> None:
    cache.reserve(0, 5)
    with pytest.raises(InvalidRequestError, match=r"positions of row 1 must be in \[0, 0\), got 0"):
        run(world, cache, PROMPT, 0, row=1)
    with pytest.raises(InvalidRequestError, match=r"a step's rows must be in \[0, 2\), got 2"):
        run(world, cache, PROMPT, 0, row=2)


def test_a_loop_that_forgets_to_reserve_or_to_commit_is_refused_immediately(world: World, cache: PagedCache) -> None:
    cache.reserve(0, 5)
    pending = run(world, cache, PROMPT, 0)
    cache.commit(0, 5)
    with pytest.raises(InvalidRequestError, match=r"\[5, 5\), got 5: call cache.reserve"):
        run(world, cache, [pending], 5)
    cache.reserve(0, 1)
    for position in (4, 6):
        with pytest.raises(InvalidRequestError, match=rf"\[5, 6\), got {position}"):
            run(world, cache, [pending], position)


def test_a_loop_that_reserves_has_the_tokens_of_generate(world: World, cache: PagedCache) -> None:
    expected = by_definition(world, Request("", tuple(PROMPT), LONG)).token_ids
    sampled, pending = list[int](), PROMPT
    while len(sampled) < len(expected):
        cache.reserve(0, len(pending))
        sampled.append(run(world, cache, pending, cache.lengths[0]))
        cache.commit(0, len(pending))
        pending = sampled[-1:]
    assert sampled == expected
