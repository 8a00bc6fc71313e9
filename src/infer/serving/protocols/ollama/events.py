"""Ollama's answers: those of `/api/chat` and `/api/generate`, descriptions of models, and errors.

Models are described in lists, with their headers, and while they are loaded.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple

from msgspec import UNSET, Struct, UnsetType

from infer.models.catalog.model_facts import ModelFacts
from infer.outputs import GenerationResult, ReasoningDelta, ToolCall
from infer.sampling_params import PARAMETERS
from infer.serving.protocols.api_errors import ApiError
from infer.serving.protocols.events import (
    FINISH_REASONS,
    LINES,
    Accepted,
    Count,
    Delta,
    Json,
    Output,
    Scored,
    ScoredChoice,
    Shape,
    Spelling,
    call_values,
)

_FILLS_IN = "{# .Suffix #}"  # a comment: Continue searches for this word to learn if the model can fill in text
FOREVER = "9999-12-31T23:59:59Z"  # the end of a model that is never unloaded for being idle


class OllamaFunction(Struct):
    index: Count
    name: str
    arguments: Json


class OllamaCall(Struct):
    id: str
    function: OllamaFunction


class OllamaMessage(Struct):
    role: Literal["assistant"]
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaCall] | UnsetType = UNSET


class OllamaOutput(Output, kw_only=True):
    """The fields of an answer and of each line of it. The last line has the counts, and times in nanoseconds."""

    model: str
    created_at: str
    done: bool
    done_reason: Literal["stop", "length", "load", "unload"] | UnsetType = UNSET
    logprobs: list[ScoredChoice] | UnsetType = UNSET
    total_duration: Count | UnsetType = UNSET
    load_duration: Count | UnsetType = UNSET
    prompt_eval_count: Count | UnsetType = UNSET
    prompt_eval_cached_count: Count | UnsetType = UNSET
    prompt_eval_duration: Count | UnsetType = UNSET
    eval_count: Count | UnsetType = UNSET
    eval_duration: Count | UnsetType = UNSET


class OllamaChat(OllamaOutput, kw_only=True):
    message: OllamaMessage


class OllamaGeneration(OllamaOutput, kw_only=True):
    response: str
    thinking: str | UnsetType = UNSET


class OllamaError(ApiError):
    """An error in Ollama's format, which is only a message. The code next to it is an addition of `infer`."""

    def to_json(self) -> dict[str, Any]:
        return {"error": self.message} | ({"code": self.code} if self.code else {})


def time_text(seconds: float) -> str:
    """Return a time since 1970 as Ollama writes it."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


class OllamaShape(Shape):
    """The answer as a message of a chat, or as the text of a generation.

    Every line except the last has a part of the text or of the reasoning. A call is whole, in a line of its own. With a
    `spelling`, the answer has log-probabilities.
    """

    error_type, media_type, last, is_stream_by_default = OllamaError, LINES, b"", True

    def __init__(self, accepted: Accepted, body: Any) -> None:
        self._served, self._is_chat = accepted.served, body.is_chat
        self._spelling = Spelling.of(accepted.served.llm.tokenizer) if body.logprobs else None

    def whole(self, results: Sequence[GenerationResult]) -> OllamaOutput:
        (result,) = results
        fields = self._end(result) | {"logprobs": self._scored(result)}
        return self._answer(result.text, result.reasoning or "", result.tool_calls, **fields)

    def chunks(self, part: Delta) -> list[OllamaOutput]:
        thinking = "".join(delta.text for delta in part.deltas if isinstance(delta, ReasoningDelta))
        scored = self._scored(part) if part.pieces else UNSET
        found = list[OllamaOutput]()
        if part.text or thinking or scored:
            found.append(self._answer(part.text, thinking, logprobs=scored))
        if (result := part.result) is not None:
            if result.tool_calls:
                found.append(self._answer("", "", result.tool_calls))
            found.append(self._answer(**self._end(result)))
        return found

    def _answer(
        self, text: str = "", thinking: str = "", calls: Sequence[ToolCall] = (), *, done: bool = False, **fields: Any
    ) -> OllamaOutput:
        served = self._served
        fields |= {"model": served.model, "created_at": time_text(float(served.created)), "done": done}
        if not self._is_chat:
            return OllamaGeneration(response=text, thinking=thinking or UNSET, **fields)
        made = [OllamaCall(each.id, OllamaFunction(at, each.name, call_values(each))) for at, each in enumerate(calls)]
        return OllamaChat(message=OllamaMessage("assistant", text, thinking or UNSET, made or UNSET), **fields)

    def _end(self, result: GenerationResult) -> dict[str, Any]:
        timing = result.timing
        return {
            "done": True,
            "done_reason": FINISH_REASONS[result.finish_reason],
            "total_duration": nanoseconds(self._served.seconds()),
            "load_duration": nanoseconds(self._served.load_seconds),
            "prompt_eval_count": result.prompt_tokens,
            "prompt_eval_cached_count": result.reused_tokens,
            "prompt_eval_duration": nanoseconds(timing.ttft_s),
            "eval_count": result.generated_tokens,
            "eval_duration": nanoseconds(timing.decode_time_s + timing.sampling_time_s),
        }

    def _scored(self, scored: Scored) -> Any:
        return UNSET if self._spelling is None else self._spelling.chat_entries(scored)  # dicts of the Struct's fields


def without_prompt(model: str, created: int, *, is_chat: bool, is_unloaded: bool) -> OllamaOutput:
    """Return the answer to a body without a prompt, which only loads or unloads the model."""
    end: Any = {"done": True, "done_reason": "unload" if is_unloaded else "load"}
    fields = {"model": model, "created_at": time_text(float(created)), **end}
    if is_chat:
        return OllamaChat(message=OllamaMessage("assistant", ""), **fields)
    return OllamaGeneration(response="", **fields)


class OllamaDetails(Struct):
    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModel(Struct):
    """A model of a list. The last three fields belong to a loaded model; no model has memory of a GPU."""

    name: str
    model: str
    modified_at: str
    size: Count
    digest: str
    details: OllamaDetails
    size_vram: Count | UnsetType = UNSET
    context_length: Count | UnsetType = UNSET
    expires_at: str | UnsetType = UNSET


class OllamaModels(Struct):
    models: list[OllamaModel]


class ShownModel(Struct):
    """The headers of a model. `template` is in Jinja, and `parameters` are the model's own defaults."""

    license: str
    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: Json
    capabilities: list[str]
    input_modalities: list[str]
    modified_at: str


class LoadedModel(NamedTuple):
    """Facts about a loaded model: its memory in bytes, the tokens of its context, and when it is unloaded if idle."""

    num_bytes: int
    context: int | None
    expires_at: str = FOREVER


def tagged(name: str) -> str:
    """Return the name as Ollama's clients expect it, with a tag."""
    return name if ":" in name else f"{name}:latest"


def listed(name: str, facts: ModelFacts | None, loaded: LoadedModel | None = None) -> OllamaModel:
    """Return the entry of a model. The facts are None if its headers cannot be read."""
    found = OllamaModel(
        name=tagged(name),
        model=tagged(name),
        modified_at=time_text(0.0 if facts is None else facts.modified_at),
        size=0 if facts is None else facts.num_bytes,
        digest="" if facts is None else facts.digest,
        details=_details(facts),
    )
    if loaded is not None:
        found.size, found.size_vram, found.expires_at = loaded.num_bytes, 0, loaded.expires_at
        found.context_length = UNSET if loaded.context is None else loaded.context
    return found


def shown(name: str, facts: ModelFacts, context: int | None) -> ShownModel:
    """Return the description of a model. `context` is the length that is served, if it is known."""
    info: dict[str, Any] = {
        "general.architecture": facts.family,
        "general.parameter_count": facts.num_parameters,
        f"{facts.family}.context_length": context or facts.context,
        f"{facts.family}.embedding_length": facts.embedding_size,
    }
    parameters = {"num_ctx": context or facts.context} | {
        next(iter(PARAMETERS[own].other_names), own): value for own, value in facts.sampling.items()
    }
    return ShownModel(
        license="",
        modelfile=f"FROM {name}\n",
        parameters="\n".join(f"{parameter:<30} {value}" for parameter, value in parameters.items()),
        template=facts.template + (_FILLS_IN if "insert" in facts.abilities else ""),
        details=_details(facts),
        model_info=info,
        capabilities=list(facts.abilities),
        input_modalities=["text"],
        modified_at=time_text(facts.modified_at),
    )


def _details(facts: ModelFacts | None) -> OllamaDetails:
    if facts is None:
        return OllamaDetails("", "", "", [], "", "")
    family, size = facts.family, facts.parameter_size
    return OllamaDetails("", facts.file_format, family, [family], size, facts.weights)
