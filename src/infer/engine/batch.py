"""Many prompts, a few of them at a time: a closed queue before the engine."""

from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from infer.engine.engine import Engine
from infer.engine.sequence import Sequence
from infer.outputs import GenerationResult


class Ended(NamedTuple):
    """The answer to prompt number `number`."""

    number: int
    result: GenerationResult


def results_of(
    engine: Engine,
    sequences: Iterator[Sequence],
    batch_size: int,
    total: int,
    on_progress: Callable[[int, int], None],
    on_result: Callable[[int, GenerationResult], None] | None,
) -> list[GenerationResult]:
    """All answers, in the order of their prompts."""
    results: dict[int, GenerationResult] = {}

    def on_step(num_ended: int) -> None:
        on_progress(num_ended, total)

    for number, result in answer_all(engine, sequences, batch_size, on_step):
        results[number] = result
        if on_result is not None:
            on_result(number, result)
    return [results[number] for number in range(total)]


def answer_all(
    engine: Engine,
    sequences: Iterator[Sequence],
    batch_size: int,
    on_step: Callable[[int], None] = lambda num_ended: None,
) -> Iterator[Ended]:
    """Each answer as it ends. Sequences are taken from the iterator when there is room for them, `batch_size` at once;
    `on_step` is called after each step. Closed early, or left by an exception, it ends all that go on.
    """
    active = deque[tuple[int, Sequence]]()
    numbered, num_ended = enumerate(sequences), 0
    try:
        while True:
            while len(active) < batch_size and (following := next(numbered, None)) is not None:
                following[1].runs_ahead = True
                active.append(following)
                engine.submit(following[1])
            if not active:
                return
            engine.advance(active[0][1])
            for index, sequence in list(active):
                if sequence.has_ended:
                    active.remove((index, sequence))
                    num_ended += 1
                    yield Ended(index, sequence.result())
            on_step(num_ended)
    finally:
        for _, sequence in active:
            engine.cancel(sequence)
