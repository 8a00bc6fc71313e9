"""Many prompts, a few of them at a time: a closed queue before the engine."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from infer.engine.engine import Engine
from infer.engine.request import Request
from infer.engine.request_options import check_count
from infer.engine.sequence import Sequence
from infer.operands.limits import MAX_STEP_LOGITS
from infer.outputs import GenerationResult

OnResult = Callable[[int, GenerationResult], None]
BATCH_SIZE = 8  # prompts in one step


def check_batch_size(value: object) -> None:
    """Raises InvalidRequestError."""
    check_count("batch_size", value, 1, MAX_STEP_LOGITS)


class Ended(NamedTuple):
    """The answer to prompt number `number`."""

    number: int
    result: GenerationResult


def begun(requests: Iterable[tuple[int, Request]]) -> Iterator[tuple[int, Sequence]]:
    """As they are asked for: a sequence holds more than its request."""
    return ((number, Sequence(request)) for number, request in requests)


def results_of(
    engine: Engine,
    requests: list[tuple[int, Request]],
    batch_size: int,
    on_progress: Callable[[int, int], None],
    on_result: OnResult | None,
) -> list[GenerationResult]:
    """All answers, in the order of their prompts."""
    results: dict[int, GenerationResult] = {}

    def on_step(num_ended: int) -> None:
        on_progress(num_ended, len(requests))

    for number, result in answer_all(engine, begun(requests), batch_size, on_step):
        results[number] = result
        if on_result is not None:
            on_result(number, result)
    return [results[number] for number, _ in requests]


def answer_all(
    engine: Engine,
    sequences: Iterator[tuple[int, Sequence]],
    batch_size: int,
    on_step: Callable[[int], None] = lambda num_ended: None,
) -> Iterator[Ended]:
    """Each answer as it ends. Sequences are taken from the iterator, each with its prompt's number, when there is room
    for them, `batch_size` at once; `on_step` is called after each step. Closed early, or left by an exception, it ends
    all that go on.
    """
    active = deque[tuple[int, Sequence]]()
    num_ended = 0
    try:
        while True:
            while len(active) < batch_size and (following := next(sequences, None)) is not None:
                following[1].runs_ahead, following[1].is_streamed = True, False
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
