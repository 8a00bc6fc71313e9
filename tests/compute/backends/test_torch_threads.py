"""In threads that generate, torch uses one thread while infer's threads work, and afterwards as many as before."""

import threading
from collections.abc import Generator

import pytest
import torch

from infer.compute import ops

CPU = torch.device("cpu")


@pytest.fixture
def two_threads() -> Generator[None, None, None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_every_thread_has_its_own_number_again_whichever_ends_last() -> None:
    entered, left = threading.Event(), threading.Event()
    seen = list[int]()

    def other() -> None:
        torch.set_num_threads(2)
        seen.append(torch.get_num_threads())
        with ops.backend_of(CPU).threads():
            seen.append(torch.get_num_threads())
            entered.set()
            left.wait()
        seen.append(torch.get_num_threads())

    thread = threading.Thread(target=other)
    with ops.backend_of(CPU).threads():
        assert torch.get_num_threads() == 1
        with ops.backend_of(CPU).threads():
            assert torch.get_num_threads() == 1
        thread.start()
        entered.wait()
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2
    left.set()
    thread.join()
    assert seen == [2, 1, 2]
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
def test_a_thread_that_begins_beside_a_generation_keeps_torchs_threads() -> None:
    """Torch itself gives a new thread the number that any thread set last."""
    seen = list[int]()

    def new() -> None:
        with ops.backend_of(CPU).threads():
            seen.append(torch.get_num_threads())
        seen.append(torch.get_num_threads())

    with ops.backend_of(CPU).threads():
        thread = threading.Thread(target=new)
        thread.start()
        thread.join()
    assert seen == [1, 2]


@pytest.mark.usefixtures("two_threads")
def test_an_exception_restores_the_number_of_threads() -> None:
    with pytest.raises(KeyError), ops.backend_of(CPU).threads():
        raise KeyError
    assert torch.get_num_threads() == 2
