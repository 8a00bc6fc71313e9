"""Many prompts, of which a few are answered at a time: the loop takes the next one whenever a slot is free."""

from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from itertools import repeat
from typing import Any, NamedTuple, final

from infer.compute.sampling.keywords import Params
from infer.engine.requests.answer import Answer, Backlog, Waiters
from infer.engine.requests.host import Host
from infer.engine.requests.loop import Loop
from infer.engine.requests.prompt_encoding import Prompt
from infer.engine.step.request import Request
from infer.engine.step.sequence import Sequence
from infer.errors import InvalidRequestError
from infer.outputs import GenerationResult
from infer.parameters import Count
from infer.sampling_params import SamplingParams

OnProgress = Callable[[int, int], None]
OnResult = Callable[[int, GenerationResult], None]
BATCH_SIZE = 8  # prompts answered together


def is_list_of_texts(prompt: Any) -> bool:
    return isinstance(prompt, list | tuple) and len(prompt) > 0 and all(isinstance(each, str) for each in prompt)


def pairs_of(prompts: Iterable[Prompt], params: Any) -> list[tuple[Prompt, Params | None]]:
    """Return each prompt with its parameters: the same for all, or one per prompt. Raises InvalidRequestError."""
    pairs_as_needed(prompts, params)  # checks both
    given = list(prompts)
    if params is None or isinstance(params, SamplingParams | Mapping):
        return [(prompt, params) for prompt in given]
    each = list(params)
    if len(each) != len(given):
        raise InvalidRequestError(f"params must be one or one per prompt, got {len(each)} for {len(given)} prompts")
    return list(zip(given, each, strict=True))


def pairs_as_needed(prompts: Iterable[Prompt], params: Any) -> Iterator[tuple[Prompt, Params | None]]:
    """Return an iterator of such pairs, for any number of prompts. Raises InvalidRequestError."""
    if isinstance(prompts, str | bytes | bytearray | memoryview | Mapping) or not isinstance(prompts, Iterable):
        raise InvalidRequestError(
            f"prompts must be a list or an iterable of prompts, got {type(prompts).__name__}: generate() answers one "
            "prompt"
        )
    if params is None or isinstance(params, SamplingParams | Mapping):
        return zip(prompts, repeat(params))
    if isinstance(params, str | bytes) or not isinstance(params, Iterable):
        raise InvalidRequestError(f"params must be one, or a list with one per prompt, got {params!r:.80}")
    return zip(prompts, params, strict=True)


def check_batch_size(host: Host, value: object) -> None:
    """Raise InvalidRequestError for a batch size that the model's device does not allow."""
    Count(1, host.model.step_limits.logits).check("batch_size", value)


class Ended(NamedTuple):
    """The answer to prompt number `number`."""

    number: int
    result: GenerationResult


@final
class Results:
    """The results of a batch, by the numbers of their prompts. Callbacks hear of each."""

    def __init__(self, num_all: int, on_progress: OnProgress, on_result: OnResult | None) -> None:
        """Begin without results, of which there will be `num_all`."""
        self.by_number: dict[int, GenerationResult] = {}
        self._num_all, self._on_progress, self._on_result = num_all, on_progress, on_result

    def add(self, number: int, result: GenerationResult) -> None:
        self.by_number[number] = result
        if self._on_result is not None:
            self._on_result(number, result)
        self._on_progress(len(self.by_number), self._num_all)


def begun(requests: Iterable[tuple[int, Request]]) -> Iterator[tuple[int, Sequence]]:
    """Create each sequence only when it is needed, because a sequence uses more memory than its request."""
    return ((number, Sequence(request)) for number, request in requests)


def answer_all(loop: Loop, sequences: Iterator[tuple[int, Sequence]], batch_size: int) -> Iterator[Ended]:
    """Yield each answer when it ends. `batch_size` answers are computed together.

    Sequences are taken from the iterator, each with its prompt's number. Up to `batch_size` more wait for their turn.
    If the iterator is closed early, or an exception ends it, all active sequences end.
    """
    batch = _Batch(loop, sequences, batch_size, Waiters())
    try:
        while batch.fill():
            batch.waiters.wait(batch.has_ended)
            yield from batch.take()
    finally:
        batch.cancel()
        if loop.can_be_awaited:
            batch.waiters.wait(batch.have_all_ended)


async def answer_all_as_task(
    loop: Loop, requests: Iterable[tuple[int, Request]], batch_size: int
) -> AsyncGenerator[Ended, None]:
    """Yield each answer when it ends, as `answer_all` does, for a task."""
    batch = _Batch(loop, begun(requests), batch_size, Waiters(loop.relay()))
    try:
        while await loop.prepare(lambda check: batch.fill()):
            await batch.waiters.wait_as_task(batch.has_ended)
            for ended in batch.take():
                yield ended
    finally:
        batch.cancel()
        await batch.waiters.wait_as_task(batch.have_all_ended)


@final
class _Batch:
    """A view of answers with one reader, active or waiting for their turn."""

    def __init__(
        self, loop: Loop, sequences: Iterator[tuple[int, Sequence]], batch_size: int, waiters: Waiters
    ) -> None:
        self.waiters, self._is_cancelled = waiters, False
        self._loop, self._sequences, self._backlog = loop, sequences, Backlog(batch_size)
        self._open = list[tuple[int, Answer]]()  # each with its prompt's number

    def fill(self) -> bool:
        """Take sequences until there is no room. Return False if none is left."""
        while len(self._open) < 2 * self._backlog.most_running:
            if (following := next(self._sequences, None)) is None:
                break
            number, sequence = following
            answer = Answer(self._loop, sequence, self.waiters, backlog=self._backlog)
            self._open.append((number, answer))  # first: Ctrl-C between the two leaves nothing that nobody ends
            if self._is_cancelled:  # by another thread
                answer.cancel()
                break
            answer.begin(only_end=True)
        return bool(self._open)

    def cancel(self) -> None:
        """End the open answers, and one that another thread adds meanwhile. Never blocks and never raises."""
        self._is_cancelled = True
        for _, answer in tuple(self._open):
            answer.cancel()

    def has_ended(self) -> bool:
        return any(answer.has_ended for _, answer in self._open)

    def have_all_ended(self) -> bool:
        return all(answer.has_ended for _, answer in self._open)

    def take(self) -> Iterator[Ended]:
        """Yield the answers that have ended. Raises EngineFailedError if the engine's failure ended one."""
        for each in [(number, answer) for number, answer in self._open if answer.has_ended]:
            self._open.remove(each)
            yield Ended(each[0], each[1].result())
