"""Rank 0's runner. The other ranks repeat each call that changes its cache or runs its model, in the same order.

`led` records a call. A change is queued, and the other ranks apply it with the next step. A step starts on the other
ranks before it runs here. `reset` repairs any state that an exception left incomplete. If a rank has ended during a
step, the step raises InferError, and its logits are discarded.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar, final

import torch
from torch import Tensor

from infer.compute.operands.step import Chunk
from infer.compute.ops import Captured, PendingStep
from infer.compute.sampling.columns import SamplingColumns
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
    sent: Callable[..., tuple[Any, ...]] = lambda runner, *arguments: arguments,
) -> Callable[Concatenate["LeadingRunner", _Parameters], _Result]:
    """Return the method, which also calls the method `name` of the other ranks' runners, with `sent(...)`.

    By default these are the same name and the same arguments. A call within a led call is part of it, so it is not
    recorded again. If `only_if` returns False, the call changes nothing, and nothing is sent.
    """
    name = name or method.__name__

    @wraps(method)
    def run(self: "LeadingRunner", /, *args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        assert not kwargs, "ranks are sent positional arguments"
        if self.is_leading or not only_if(self, *args):
            return method(self, *args, **kwargs)
        arguments = [_copied(each) for each in sent(self, *args)]
        if not is_step:
            self.ranks.tell(name, *arguments)
            return method(self, *args, **kwargs)
        self.ranks.lead(name, *arguments)
        self.is_leading = True
        try:
            found = method(self, *args, **kwargs)
            if isinstance(found, PendingStep):
                found.wait()  # the other ranks run whole steps
        finally:
            self.is_leading = False
        self.ranks.has_led()
        return found

    return run


def _copied(argument: Any) -> Any:
    """Return a copy of a list, because a sequence's list of token ids grows before it is sent to the ranks."""
    return list(argument) if isinstance(argument, Sequence) and not isinstance(argument, bytes) else argument


def _chunks(runner: Runner, chunks: Sequence[Chunk], *others: object) -> tuple[Any, ...]:
    return chunks, runner.starts(chunks)


@final
class LeadingRunner(Runner):
    """Takes the `ranks` and the arguments of `Runner`, with which they load, too. `cache` has rank 0's heads only."""

    def __init__(self, ranks: Ranks, model: Transformer, **arguments: Any) -> None:
        """Load the other ranks, then make this runner. Raises InferError if a rank cannot load."""
        ranks.load(arguments | {"limits": model.step_limits})
        super().__init__(model, **arguments)
        self.ranks, self.is_leading = ranks, False

    has_whole_slots = False

    forward = led(Runner.forward, is_step=True, sent=_chunks)
    launch = led(Runner.launch, is_step=True, name="forward", sent=_chunks)
    multi_step = led(
        Runner.multi_step,
        is_step=True,
        only_if=lambda runner, chunks, count, columns, *others: runner.takes(chunks, columns),
        sent=lambda runner, chunks, count, *others: (chunks, runner.starts(chunks), count),
    )
    extend = led(Runner.extend, is_step=True)
    append = led(Runner.append, is_step=True)
    after_prompt = led(Runner.after_prompt, is_step=True, only_if=lambda runner, *_: runner.compresses_prompts)

    reserve = led(Runner.reserve)
    try_reserve = led(Runner.try_reserve)
    commit = led(Runner.commit)
    truncate = led(Runner.truncate)
    forget = led(Runner.forget)
    adopt = led(Runner.adopt)
    remember = led(Runner.remember, only_if=lambda runner, slot, *_: runner.cache.has_new_pages(slot))
    choose_rope = led(Runner.choose_rope, only_if=lambda runner, *_: runner.model.rope_border is not None)
    after_answer = led(Runner.after_answer)
    give_back_free = led(Runner.give_back_free)
    copy_slot = led(Runner.copy_slot)

    def _captured_for(self, chunks: Sequence[Chunk], columns: SamplingColumns) -> Captured | None:
        captured = super()._captured_for(chunks, columns)
        return captured if captured is not None and captured.is_followed else None

    def reset(self) -> None:
        self.ranks.begin_anew()
        super().reset()

    def import_slot(self, slot: int, tensors: Mapping[str, Tensor], length: int) -> None:
        """Empty the slot. Each rank stores its own heads, so the tokens are computed again."""
        self.truncate(slot, 0)

    @torch.inference_mode()
    def check_logits(self) -> None:
        """Raise InferError if the ranks compute different logits."""
        self.reserve(0, 1)
        logits = self.forward([Chunk(0, [0])])
        if set(self.ranks.digests()) != {digest_of(logits)}:
            raise InferError("the ranks of the model do not find the same logits: the memory or a build is faulty")
        self.truncate(0, 0)
