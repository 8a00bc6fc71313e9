"""The `infer` command with a fake model of a few lines: `python fake_cli.py chat …`.

It answers word by word with what it was asked and how. A prompt that says "slow" takes a while per word, "long" does
not fit, "broken" fails. The file that $FAKE_BEGUN names appears with the first word.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from infer.__main__ import run
from infer.cli import model_loading
from infer.compute.sampling.keywords import SamplingDefaults
from infer.errors import ContextLengthError
from infer.outputs import (
    GenerationResult,
    GenerationStats,
    GenerationTiming,
    SampleTrace,
    ToolCall,
    TraceCandidate,
    TraceStage,
)
from infer.sampling_params import SamplingParams

OnProgress = Callable[[int, int], None]
OnResult = Callable[[int, GenerationResult], None]
OnToken = Callable[[int, str], bool | None]
Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
# If torch is loaded, calls are checked. Then the fake is registered as the class that annotations name.
LLM = sys.modules["infer.llm"].LLM if "shapes" in sys.modules and "infer.llm" in sys.modules else None


class FakeModel:
    """Answers `echo: PROMPT`, one word per token, and shows its parameters if the prompt contains "params"."""

    max_seq_len = 100
    can_chat = True
    architecture = SimpleNamespace(reads_whole_texts=False)
    system_fingerprint = "fp_fake"
    host = SimpleNamespace(model=SimpleNamespace(device=SimpleNamespace(type="none"), experts=None), settings=None)

    @property
    def __class__(self) -> Any:
        return LLM or FakeModel

    @property
    def tokenizer(self) -> "FakeModel":
        return self

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        return [len(messages)] * 3

    def close(self) -> None:
        pass

    def __init__(self, sampling_defaults: dict[str, Any] | None = None) -> None:
        self.sampling_defaults = SamplingDefaults(sampling_defaults or {})

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        on_token: OnToken | None = None,
        cancel: threading.Event | None = None,
        speculation: str | None = None,
        num_draft_tokens: int = 15,
        prefill_chunk: int | None = None,
        on_prefill: OnProgress | None = None,
        overflow: str = "error",
    ) -> GenerationResult:
        if not isinstance(prompt, str):
            return self.chat([x for x in prompt if not isinstance(x, int)], params, on_token=on_token, cancel=cancel)
        if on_prefill is not None and "read" in prompt:
            on_prefill(512, 1024)
        if "path" in prompt:
            prompt = f"{speculation} {num_draft_tokens} {prefill_chunk} {overflow}"
        if "long" in prompt:
            raise ContextLengthError("the prompt has 101 tokens and the context holds 100")
        if "broken" in prompt:
            raise RuntimeError("the model fell over")
        if "think" in prompt and on_token is not None:
            for token_id in range(3):
                on_token(token_id, "")
        answer = str(params) if "params" in prompt else f"echo: {prompt}"
        is_slow = "slow" in prompt
        words = [word + " " for word in answer.split(" ")] * (1000 if is_slow else 1)
        said: list[str] = []
        for token_id, word in enumerate(words):
            if cancel is not None and cancel.is_set():
                break
            if is_slow:
                time.sleep(0.02)
            said.append(word)
            if on_token is not None:
                on_token(token_id, word)
            if begun := os.environ.get("FAKE_BEGUN"):
                Path(begun).touch()
        stopped = cancel is not None and cancel.is_set()
        return GenerationResult(
            token_ids=list(range(len(said))),
            text="".join(said),
            finish_reason="abort" if stopped else "length",
            prompt_tokens=3,
            generated_tokens=len(said),
            timing=GenerationTiming(0.24532, [0.030, 0.040], [0.001, 0.002]),
            stop_reason="cancelled" if stopped else "max_new_tokens",
            seed=7,
            stats=GenerationStats(1, 2, 3, 18, 8, 4, 5, 6),
            reasoning="first this, then that" if "think" in prompt else None,
            reasoning_tokens=3 if "think" in prompt else 0,
        )

    def generate_all(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        batch_size: int = 8,
        speculation: str | None = None,
        num_draft_tokens: int = 15,
        prefill_chunk: int | None = None,
        cancel: threading.Event | None = None,
        on_progress: OnProgress = lambda done, total: None,
        on_result: OnResult | None = None,
        overflow: str = "error",
    ) -> list[GenerationResult]:
        assert isinstance(params, list)
        results = []
        for prompt, own in zip(prompts, params, strict=True):
            results.append(self.generate(prompt, own, cancel=cancel, speculation=speculation))
            on_progress(len(results), len(prompts))
            if on_result is not None:
                on_result(len(results) - 1, results[-1])
        return results

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        on_token: OnToken | None = None,
        cancel: threading.Event | None = None,
        on_prefill: OnProgress | None = None,
        **template_variables: Any,
    ) -> GenerationResult:
        system = "".join(f"[{message['content']}] " for message in messages if message["role"] == "system")
        prompt = f"{system}{len(messages)} {messages[-1]['content']}"
        return self.generate(prompt, params, on_token=on_token, cancel=cancel, on_prefill=on_prefill)

    def session(self) -> "FakeSession":
        return FakeSession(self)

    def sample_trace(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        step: int = 1,
        num_candidates: int = 10,
        prompt_ids: Sequence[int] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> SampleTrace:
        """Return a trace of three tokens, of which top-k drops one. Its text before shows prompt and parameters."""
        if "long" in prompt:
            raise ContextLengthError("the prompt has 101 tokens and the context holds 100")
        assert params is not None
        said = params if "params" in prompt else prompt_ids or prompt
        values = [("<b>&\n", (0.5, 0.625), 0.1), ("é\x1b[1m", (0.3, 0.375), 1.2), ("深い" * 20, (0.2, 0.0), None)]
        candidates = [
            TraceCandidate(
                token_id=10 + index,
                text=text,
                rank=index + 1,
                logits=(2.0 - index, None if noise is None else 2.0 - index),
                probabilities=shares,
                noise=noise,
                score=None if noise is None else 2.0 - index + noise,
                dropped_by="top_k" if noise is None else None,
            )
            for index, (text, shares, noise) in enumerate(values)
        ]
        stages = (TraceStage("raw", None, 3, 0.0, 0.0, 0.0), TraceStage("top_k", 2, 2, 0.2, 0.0, 0.0))
        return SampleTrace(stages, tuple(candidates), 11, 2 + step, step, 7, text_before=str(said))


class FakeSession:
    """Answers as its model does. Its file has only its note."""

    def __init__(self, model: FakeModel) -> None:
        self.model, self.messages, self.token_ids = model, list[dict[str, Any]](), list[int]()

    def answer(self, messages: Sequence[Mapping[str, Any]], params: SamplingParams, **others: Any) -> GenerationResult:
        tools = others.pop("tools", ())
        result = self.model.chat(messages, params, **others)
        if tools and messages[-1]["role"] == "user":
            names = [tool["function"]["name"] for tool in tools]
            calls = tuple(ToolCall(f"id{i}", name, '{"a":\n 1}') for i, name in enumerate(names))
            result = replace(result, text="", tool_calls=calls)
        self.token_ids = [*self.model.encode_chat(messages), *result.token_ids]
        return result

    def save(self, path: str | Path, *, note: Mapping[str, Any] | None = None) -> None:
        Path(path).write_bytes(bytes(8) + json.dumps(note).encode())

    def load(self, path: str | Path) -> dict[str, Any]:
        note: dict[str, Any] = json.loads(Path(path).read_bytes()[8:])
        return note


if __name__ == "__main__":
    model_loading.load_model = lambda options: FakeModel()
    run()
