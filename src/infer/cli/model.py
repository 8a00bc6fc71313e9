"""What the command line needs of a model: `infer.llm.LLM` has it, and loading that is what takes long."""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from infer.params import SamplingParams
from infer.results import GenerationResult, SampleTrace

OnToken = Callable[[int, str], bool | None]


@runtime_checkable
class Conversation(Protocol):
    """`infer.session.Session`."""

    def answer(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        on_token: OnToken | None = None,
        cancel: threading.Event | None = None,
    ) -> GenerationResult: ...


@runtime_checkable
class Model(Protocol):
    """A loaded model."""

    sampling_defaults: dict[str, Any]

    @property
    def max_seq_len(self) -> int: ...

    @property
    def can_chat(self) -> bool: ...

    def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        on_token: OnToken | None = None,
        cancel: threading.Event | None = None,
    ) -> GenerationResult: ...

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        on_token: OnToken | None = None,
        cancel: threading.Event | None = None,
        **template_variables: Any,
    ) -> GenerationResult: ...

    def session(self) -> Conversation: ...

    def sample_trace(
        self,
        prompt: str | Sequence[int] | Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        step: int = 1,
        num_candidates: int = 10,
    ) -> SampleTrace: ...
