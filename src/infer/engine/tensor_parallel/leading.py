"""Rank 0's runner and cache. The other ranks repeat each call that changes the cache or runs the model, in this order.

`led` records a call. A change is queued, and the other ranks apply it with the next step. A step starts on the other
ranks before it runs here. `reset` repairs any state that an exception left incomplete. If a rank has ended during a
step, the step raises InferError, and its logits are discarded.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar, final

import torch
from torch import Tensor

from infer.compute.kvcache.paged import PagedCache
from infer.compute.operands.step import Chunk
from infer.compute.ops import Captured, PendingStep, SampledStep
from infer.engine.runner.runner import Runner
from infer.engine.tensor_parallel.ranks import Ranks, digest_of
from infer.errors import InferError
from infer.models.transformer import Transformer

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")
_Test = Callable[..., bool]


def led(
    method: Callable[Concatenate[Any, _Parameters], _Result],
    *,
    is_step: bool = False,
    only_if: _Test = lambda *arguments: True,
    name: str = "",
    sent: Callable[..., tuple[Any, ...]] = lambda owner, *arguments: arguments,
) -> Callable[Concatenate[Any, _Parameters], _Result]:
    """Return the method, which also calls the method `name` of the other ranks, with `sent(...)`.

    By default these are the same name and the same arguments. A call within a led call is part of it, so it is not
    recorded again. If `only_if` returns False, the call changes nothing, and nothing is sent.
    """
    name = name or method.__name__

    @wraps(method)
    def run(self: "LeadingRunner | LeadingCache", /, *args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        assert not kwargs, "ranks are sent positional arguments"
        ranks = self.ranks
        if ranks.is_leading or not only_if(self, *args):
            return method(self, *args, **kwargs)
        arguments = [_copied(each) for each in sent(self, *args)]
        (ranks.lead if is_step else ranks.tell)(name, *arguments)
        ranks.is_leading = True
        try:
            result = method(self, *args, **kwargs)
            if isinstance(result, PendingStep):
                result.wait()  # the other ranks run whole steps
        finally:
            ranks.is_leading = False
        if is_step:
            ranks.has_led()
        return result

    return run


def _copied(argument: Any) -> Any:
    """Return a copy of a list, because a sequence's list of token ids grows before it is sent to the ranks."""
    return list(argument) if isinstance(argument, Sequence) and not isinstance(argument, bytes) else argument


def _chunks(runner: Runner, step: SampledStep, *others: object) -> tuple[Any, ...]:
    return step.chunks, step.starts


@final
class LeadingCache(PagedCache):
    """Takes the `ranks` and the arguments of `PagedCache`. It has rank 0's heads only."""

    def __init__(self, ranks: Ranks, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.ranks = ranks

    reserve = led(PagedCache.reserve)
    try_reserve = led(PagedCache.try_reserve)
    commit = led(PagedCache.commit)
    truncate = led(PagedCache.truncate)
    forget = led(PagedCache.forget)
    adopt = led(PagedCache.adopt)
    remember = led(PagedCache.remember, only_if=lambda cache, row, *_: cache.has_new_pages(row))
    end_answer = led(PagedCache.end_answer)
    give_back_free = led(PagedCache.give_back_free)
    copy_row = led(PagedCache.copy_row)

    def reset(self) -> None:
        self.ranks.begin_anew()
        super().reset()

    def import_row(self, row: int, tensors: Mapping[str, Tensor], length: int, *, is_long: bool = False) -> None:
        """Empty the row. Each rank stores its own heads, so the tokens are computed again."""
        self.truncate(row, 0)


@final
class LeadingRunner(Runner):
    """The runner of rank 0, which sends its calls to the other ranks.

    It takes the `ranks` and the arguments of `Runner`, with which the other ranks load, too.
    """

    def __init__(self, ranks: Ranks, model: Transformer, **arguments: Any) -> None:
        """Load the other ranks, then make this runner. Raises InferError if a rank cannot load."""
        ranks.load(arguments | {"limits": model.step_limits})
        self.ranks, self.cache_type = ranks, partial(LeadingCache, ranks)
        ranks.is_leading = True  # each rank makes its own cache
        super().__init__(model, **arguments)
        ranks.is_leading = False

    has_whole_rows = False

    forward = led(Runner.forward, is_step=True, sent=lambda runner, chunks: (chunks, runner.starts(chunks)))
    launch = led(Runner.launch, is_step=True, name="forward", sent=_chunks)
    multi_step = led(
        Runner.multi_step,
        is_step=True,
        only_if=lambda runner, step, *others: runner.captured_for(step) is not None,
        sent=lambda runner, step, count, *others: (step.chunks, step.starts, count),
    )
    extend = led(Runner.extend, is_step=True)
    append = led(Runner.append, is_step=True)
    after_prompt = led(Runner.after_prompt, is_step=True, only_if=lambda runner, *_: runner.compresses_prompts)
    choose_rope = led(Runner.choose_rope, only_if=lambda runner, *_: runner.model.rope_border is not None)

    def captured_for(self, step: SampledStep) -> Captured | None:
        captured = super().captured_for(step)
        return captured if captured is not None and captured.is_followed else None

    @torch.inference_mode()
    def check_logits(self) -> None:
        """Raise InferError if the ranks compute different logits."""
        self.cache.reserve(0, 1)
        logits = self.forward([Chunk(0, [0])])
        if set(self.ranks.digests()) != {digest_of(logits)}:
            raise InferError("the ranks of the model do not find the same logits: the memory or a build is faulty")
        self.cache.truncate(0, 0)
