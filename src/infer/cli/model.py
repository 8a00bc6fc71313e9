"""Protocols of the model that the command line uses.

`infer.llm.LLM` implements them. They are separate, because importing it takes long.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from infer.engine.model_settings import Overflow, Speculation
from infer.operands.limits import MAX_STEP_TOKENS
from infer.outputs import GenerationResult, SampleTrace
from infer.request_limits import NUM_DRAFT_TOKENS
from infer.sampling.defaults import SamplingDefaults
from infer.sampling_params import SamplingParams

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]  # a text, ids, or messages for the chat template
OnToken = Callable[[int, str], bool | None]
OnProgress = Callable[[int, int], None]
OnResult = Callable[[int, GenerationResult], None]


@runtime_checkable
class Conversation(Protocol):
    """The part of `infer.session.session.Session` that the command line uses."""

    @property
    def messages(self) -> list[dict[str, Any]]: ...

    @property
    def token_ids(self) -> list[int]: ...

    def answer(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        on_token: OnToken | None = None,
        cancel: threading.Event | None = None,
        on_prefill: OnProgress | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> GenerationResult: ...

    def save(self, path: str | Path, *, note: Mapping[str, Any] | None = None) -> None: ...

    def load(self, path: str | Path) -> dict[str, Any]: ...


@runtime_checkable
class Model(Protocol):
    """The part of a loaded model that the command line uses."""

    sampling_defaults: SamplingDefaults

    @property
    def max_seq_len(self) -> int: ...

    @property
    def can_chat(self) -> bool: ...

    @property
    def system_fingerprint(self) -> str: ...

    @property
    def tokenizer(self) -> Any: ...

    def close(self) -> None: ...

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        on_token: OnToken | None = None,
        cancel: threading.Event | None = None,
        speculation: Speculation | None = None,
        num_draft_tokens: int = NUM_DRAFT_TOKENS,
        prefill_chunk: int = MAX_STEP_TOKENS,
        on_prefill: OnProgress | None = None,
        overflow: Overflow = "error",
    ) -> GenerationResult: ...

    def generate_all(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        batch_size: int = 8,
        speculation: Speculation | None = None,
        num_draft_tokens: int = NUM_DRAFT_TOKENS,
        prefill_chunk: int = MAX_STEP_TOKENS,
        cancel: threading.Event | None = None,
        on_progress: OnProgress = ...,
        on_result: OnResult | None = None,
        overflow: Overflow = "error",
    ) -> list[GenerationResult]: ...

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
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        step: int = 1,
        num_candidates: int = 10,
        prompt_ids: Sequence[int] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> SampleTrace: ...
