"""Ollama's API: its bodies, the answers of `/api/chat` and `/api/generate`, and its descriptions of models.

Bodies are converted to those of OpenAI's routes, and `keep_alive` to seconds. Messages, tools and options stay as they
were sent; the bodies of OpenAI's routes define their fields.
"""

import math
import re
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, final

from msgspec import UNSET, Meta, Struct, UnsetType

from infer.engine.requests.ask import Ask
from infer.models.catalog.model_facts import ModelFacts
from infer.outputs import GenerationResult, ToolCall
from infer.request_limits import MAX_TEXTS, MAX_TOKENS
from infer.sampling_params import PARAMETERS
from infer.serving.protocols.api_errors import ApiError
from infer.serving.protocols.bodies import Served, refuse_unless_neutral
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
    call_values,
)
from infer.serving.protocols.fields import DECLARED, Parameters, body_from, refuse, shown, without_nulls
from infer.serving.protocols.foreign import HINT, Foreign
from infer.serving.protocols.openai.ask import Alternatives, ChatBody, CompletionBody

_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = r"(?<![\d.])(\d++(?:\.\d*+)?|\.\d++)(ns|us|µs|ms|s|m|h)"
_DURATION, _PARTS = re.compile(f"(?:{_PART})+"), re.compile(_PART)
_MOST_CHARACTERS = 32  # of a duration
MOST_SECONDS = (2**63 - 1) / 1e9  # Go's durations are nanoseconds of 64 bits
_LENGTHS = {"max_tokens", *DECLARED["max_new_tokens"].other_names}
_NEW_NAMES = {"thinking": "reasoning_content", "tool_name": "name"}
_FOREIGN = {
    "name": Foreign(same_as=("model",)),
    "cache_salt": Foreign("leave it out", becomes=lambda value: {"options": {"cache_salt": value}}),
    **dict.fromkeys(("shift", "insecure", "verbose", "width", "height", "steps", "user"), HINT),
}
_WHOLE_PROMPT = "only the server's own template is used: send the whole prompt with raw: true"
_FILLS_IN = "{# .Suffix #}"  # a comment: Continue searches for this word to learn if the model can fill in text
FOREVER = "9999-12-31T23:59:59Z"  # the end of a model that is never unloaded for being idle


_ONE_ANSWER: dict[str, tuple[object, ...]] = dict.fromkeys(("prompt_logprobs", "return_token_ids", "echo"), ())
_ONE_ANSWER["n"] = (1,)


class _OllamaBody(Parameters, kw_only=True):
    foreign = _FOREIGN

    model: str | None = None


class _GeneratingBody(_OllamaBody, kw_only=True):
    """The fields of both routes that generate.

    `keep_alive` is for a server of several models. `seed` and `num_predict` are not in Ollama's API, but clients send
    them: they are used if `options` do not set them.
    """

    is_chat: ClassVar[bool] = False

    stream: bool | None = None  # the default is true
    format: str | dict[str, Any] | None = None
    think: bool | str | None = None
    options: dict[str, Any] | None = None
    keep_alive: float | str | None = None
    truncate: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    num_predict: Annotated[int, Meta(ge=-2, le=MAX_TOKENS)] | None = None


@final
class OllamaChatBody(_GeneratingBody, kw_only=True):
    """A conversation. Without messages, the model is only loaded, or unloaded if `keep_alive` is 0."""

    is_chat = True

    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None

    def ask(self, served: Served) -> "Ask | OllamaOutput":
        """Return what the body asks. Raises BodyError."""
        if not self.messages:
            return _load(self, served)
        return _ask_chat([_message(each) for each in self.messages or ()], self.tools, self, served)


@final
class OllamaGenerateBody(_GeneratingBody, kw_only=True):
    """A prompt: a user's message, or a text to continue if it is `raw`, has a `suffix`, or if there is no template.

    Without a prompt, the model is only loaded, or unloaded if `keep_alive` is 0.
    """

    foreign = _FOREIGN | {
        "images": Foreign("the model reads only text: leave the images out", ([],)),
        "context": Foreign("answers are not stored: send the earlier messages to /api/chat", ([],)),
        "template": Foreign(_WHOLE_PROMPT, ("",)),
    }

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None

    def ask(self, served: Served) -> "Ask | Callable[[], Ask] | OllamaOutput":
        """Return what the body asks: an answer to a user's message, or the continuation of a text. Raises BodyError."""
        if not (self.prompt or self.suffix):
            return _load(self, served)
        prompt = self.prompt or ""
        if served.llm.can_chat and not (self.raw or self.suffix):
            messages = [{"role": "system", "content": self.system}] if self.system else []
            return _ask_chat([*messages, {"role": "user", "content": prompt}], None, self, served)
        if self.system:
            raise refuse("system needs a chat template, which is not used here: put the text into prompt", "system")
        given = _sampling(self) | {"prompt": prompt, "suffix": self.suffix}
        if self.logprobs:
            given["logprobs"] = self.top_logprobs or 0
        meant = body_from(given, CompletionBody, served.reading)
        refuse_unless_neutral(meant, _ONE_ANSWER)
        return meant.ask(served)


class _EmbeddingBody(_OllamaBody, kw_only=True):
    foreign = _FOREIGN | {"input": Foreign(same_as=("prompt",)), "prompt": Foreign(same_as=("input",))}

    options: dict[str, Any] | None = None  # no option changes a vector
    keep_alive: float | str | None = None
    truncate: bool | None = None  # the default is true


@final
class OllamaEmbedBody(_EmbeddingBody, kw_only=True):
    """Texts to convert to vectors of length 1. Without texts, the model is only loaded."""

    input: str | Annotated[list[str], Meta(max_length=MAX_TEXTS)] | None = None
    dimensions: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] | None = None  # 0 is the vector's own size


@final
class OllamaEmbeddingsBody(_EmbeddingBody, kw_only=True):
    """A text to convert to a vector, in the older format. Without a text, the model is only loaded."""

    prompt: str = ""


@final
class OllamaModelBody(_OllamaBody, kw_only=True):
    """A model by its name."""

    stream: bool | None = None  # the default is true


# The answers


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


# From a body to its question


def _load(body: _GeneratingBody, served: Served) -> OllamaOutput:
    is_unloaded = seconds_of(body.keep_alive) == 0
    return without_prompt(served.model, served.created, is_chat=body.is_chat, is_unloaded=is_unloaded)


def seconds_of(keep_alive: float | str | None) -> float | None:
    """Return a `keep_alive` in seconds. It is a number, or Go's notation such as "5m"; below 0 it is infinite.

    A number is at most 292 years, as in Ollama. Raises BodyError.
    """
    if isinstance(keep_alive, str):
        keep_alive = _seconds_of_text(keep_alive)
    if keep_alive is None:
        return None
    return math.inf if keep_alive < 0 else min(keep_alive, MOST_SECONDS)


def _seconds_of_text(given: str) -> float:
    text = given.strip() if len(given) <= _MOST_CHARACTERS else ""
    duration = text.removeprefix("-")
    parts = _PARTS.findall(duration) if _DURATION.fullmatch(duration) else []
    if duration.isascii() and duration.replace(".", "", 1).isdecimal():
        parts = [(duration, "s")]
    seconds = sum(float(number) * _SECONDS[unit] for number, unit in parts)
    if not parts or seconds > MOST_SECONDS:
        rule = 'a number of seconds, or a duration such as "5m" of at most 292 years'
        raise refuse(f"keep_alive must be {rule}, got {shown(given)}", "keep_alive")
    return -seconds if text.startswith("-") else seconds


def _ask_chat(messages: list[Any], tools: list[Any] | None, body: _GeneratingBody, served: Served) -> Ask:
    given = _sampling(body) | {"messages": messages, "tools": tools}
    if body.logprobs or body.top_logprobs:
        given |= {"logprobs": body.logprobs, "top_logprobs": body.top_logprobs}
    match body.think:
        case True:
            given["enable_thinking"] = True
        case False:
            given["reasoning_effort"] = "none"
        case str():
            given["reasoning_effort"] = body.think
    meant = body_from(given, ChatBody, served.reading)
    refuse_unless_neutral(meant, _ONE_ANSWER)
    return meant.ask(served)


def _sampling(body: _GeneratingBody) -> dict[str, Any]:
    """Return the options of a body, with its seed and its format, as fields of an OpenAI body.

    An answer is as long as the context allows unless an option limits it.
    """
    found = without_nulls(body.options or {})
    if found.get("seed") in (None, -1):  # -1 means a random seed
        found["seed"] = body.seed
    if not found.keys() & _LENGTHS:
        found["num_predict"] = -1 if body.num_predict is None else body.num_predict
    if found.get("num_predict") in (0, -2):  # no limit, and until the context is full
        found["num_predict"] = -1
    if body.truncate:
        found["overflow"] = "truncate_left"
    if isinstance(body.format, dict):
        return found | {"json_schema": body.format}
    if body.format not in (None, "", "json"):
        raise refuse(f'format must be "json" or a schema, got {shown(body.format)}', "format")
    return found | ({"response_format": {"type": "json_object"}} if body.format else {})


def _message(given: dict[str, Any]) -> dict[str, Any]:
    """Return a message in OpenAI's format. An image becomes a part without text, which `ChatBody.complete` replaces."""
    found = {"content": ""} | {_NEW_NAMES.get(name, name): value for name, value in given.items() if name != "images"}
    if images := given.get("images"):
        parts = [{"type": "image"} for _ in images] if isinstance(images, list) else [{"type": "image"}]
        found["content"] = [{"type": "text", "text": given.get("content") or ""}, *parts]
    return found


class OllamaShape(Shape):
    """The answer as a message of a chat, or as the text of a generation.

    Every line except the last has a part of the text or of the reasoning. A call is whole, in a line of its own. With a
    `spelling`, the answer has log-probabilities.
    """

    error_type, media_type, last, is_stream_by_default = OllamaError, LINES, b"", True

    def __init__(self, accepted: Accepted, body: Any) -> None:
        self._served = served = accepted.served
        self._line = partial(_line, body.is_chat, _head(served.model, served.created))
        self._spelling = accepted.spelling if body.logprobs else None

    def whole(self, results: Sequence[GenerationResult]) -> OllamaOutput:
        (result,) = results
        fields = self._end(result) | {"logprobs": self._scored(result)}
        return self._line(result.text, result.reasoning or "", result.tool_calls, **fields)

    def chunks(self, part: Delta) -> list[OllamaOutput]:
        scored = self._scored(part) if part.pieces else UNSET
        found = list[OllamaOutput]()
        if part.text or part.reasoning or scored:
            found.append(self._line(part.text, part.reasoning, logprobs=scored))
        if (result := part.result) is not None:
            if result.tool_calls:
                found.append(self._line(calls=result.tool_calls))
            found.append(self._line(**self._end(result)))
        return found

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


def _line(
    is_chat: bool, head: Json, text: str = "", thinking: str = "", calls: Sequence[ToolCall] = (), **fields: Any
) -> OllamaOutput:
    fields = head | fields
    if not is_chat:
        return OllamaGeneration(response=text, thinking=thinking or UNSET, **fields)
    made = [OllamaCall(each.id, OllamaFunction(at, each.name, call_values(each))) for at, each in enumerate(calls)]
    return OllamaChat(message=OllamaMessage("assistant", text, thinking or UNSET, made or UNSET), **fields)


def _head(model: str, created: int) -> Json:
    return {"model": model, "created_at": time_text(float(created)), "done": False}


def without_prompt(model: str, created: int, *, is_chat: bool, is_unloaded: bool) -> OllamaOutput:
    """Return the answer to a body without a prompt, which only loads or unloads the model."""
    return _line(is_chat, _head(model, created), done=True, done_reason="unload" if is_unloaded else "load")


@final
class OllamaChatShape(OllamaShape):
    body, answer = OllamaChatBody, OllamaChat


@final
class OllamaGenerateShape(OllamaShape):
    body, answer = OllamaGenerateBody, OllamaGeneration


# Descriptions of models


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


def shown_model(name: str, facts: ModelFacts, context: int | None) -> ShownModel:
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
