"""Rows of a cache at their last slot, at the first slot of a compressed row, after a reset and after a load."""

from contextlib import nullcontext

import pytest
from torch import Tensor

from infer.compute.kvcache.pages import PagePool
from infer.compute.operands.step import Step
from infer.errors import InvalidRequestError
from test_page_pool import CAPACITY, PAGE, SNAPKV, STEP, WHOLE, WINDOWED, adopted, grow, make, remembered

FIRST, OTHER = [1] * PAGE, [2] * PAGE


def test_a_row_can_be_filled_to_its_last_slot() -> None:
    cache = make(layers=(WHOLE,))
    grow(cache, 0, CAPACITY - 2)
    with pytest.raises(InvalidRequestError, match="a row has room for 200 tokens, got 201"):
        cache.reserve(0, 3)
    cache.reserve(0, 2)
    cache.commit(0, 2)
    cache.reserve(0, 0)
    with pytest.raises(InvalidRequestError, match="a row has room for 200 tokens, got 201"):
        cache.reserve(0, 1)


def test_a_second_reservation_takes_nothing_back() -> None:
    cache = make(layers=(WHOLE,))
    grow(cache, 0, 5)
    cache.reserve(0, 8)
    cache.reserve(0, 3)
    cache._check_reserved(Step.of([1] * 8, 5))
    with pytest.raises(InvalidRequestError, match=r"positions of row 0 must be in \[5, 13\), got 13"):
        cache._check_reserved(Step.of([1] * 9, 5))
    cache.commit(0, 3)
    cache.reserve(0, 1)
    cache._check_reserved(Step.of([1] * 5, 8))


def test_a_compressed_row_can_be_cut_only_to_its_kept_tokens() -> None:
    for length, expected in ((104, 104), (100, 100), (99, 0)):
        cache = make(SNAPKV, layers=(WHOLE,))
        grow(cache, 0, 100)
        for rows in cache.groups:
            rows.compress(0, 100, 40)
        grow(cache, 0, 8)
        cache.truncate(0, length)
        assert cache.lengths[0] == expected
        cache.check_integrity()


def test_after_a_reset_rows_have_the_keys_of_their_new_content() -> None:
    cache = remembered(FIRST + OTHER)
    cache.reset()
    assert cache.adopt(1, [*FIRST, *OTHER, 9]) == 0
    grow(cache, 0, 2 * PAGE)
    assert cache.has_new_pages(0)
    cache.remember(0, OTHER + FIRST)
    assert cache.adopt(1, [*OTHER, *FIRST, 9]) == 2 * PAGE
    assert adopted(cache, 1, [*FIRST, *OTHER, 9]) == 0
    cache.check_integrity()


@pytest.mark.parametrize(("first", "is_refused"), [(-1, True), (0, False), (50, False), (51, True), (1 << 40, True)])
def test_the_first_slot_of_a_saved_row_is_in_the_row(first: int, is_refused: bool) -> None:
    cache = make(layers=(WHOLE,))
    grow(cache, 0, 50)
    saved: dict[str, Tensor] = {name: tensor.clone() for name, tensor in cache.export_row(0)}
    saved["states"][:, -1] = first
    refusal = pytest.raises(InvalidRequestError, match="does not fit this model's cache: RowState")
    with refusal if is_refused else nullcontext():
        cache.import_row(1, saved, 50)
    assert cache.lengths[1] == (0 if is_refused else 50)
    cache.check_integrity()


def test_a_window_that_begins_within_a_page_has_the_pages_that_it_and_a_step_lie_in() -> None:
    """A row of a windowed layer grows past its window by whole steps, from every place in a page."""
    for start in range(PAGE):
        cache = make(layers=(WINDOWED,))
        grow(cache, 0, start)
        for _ in range((CAPACITY - start) // STEP):
            grow(cache, 0, STEP)
            cache.check_integrity()


def test_a_page_of_two_contents_is_found_by_the_first_until_it_is_forgotten() -> None:
    pool = PagePool(2)
    page = pool.take()
    pool.remember(page, b"one")
    pool.remember(page, b"two")
    assert (pool.find(b"one"), pool.find(b"two")) == (page, None)
    pool.release(page)
    pool.hold(page)
    assert (pool.num_available, pool.take()) == (1, 1)
    pool.check_integrity([page, 1])
    pool.forget(page)
    pool.remember(page, b"two")
    assert (pool.find(b"one"), pool.find(b"two")) == (None, page)
