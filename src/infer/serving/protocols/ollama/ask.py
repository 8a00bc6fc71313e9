"""The bodies of Ollama's API. They are converted to those of OpenAI's routes, and `keep_alive` to seconds.

Messages, tools and options stay as they were sent; the bodies of OpenAI's routes define their fields.
"""

import math
import re
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, final

from msgspec import Meta

from infer.engine.requests.ask import Ask
from infer.request_limits import MAX_TEXTS, MAX_TOKENS
from infer.serving.protocols.bodies import Served, refuse_unless_neutral
from infer.serving.protocols.fields import DECLARED, Parameters, as_given, body_from, refuse, shown, without_nulls
from infer.serving.protocols.foreign import HINT, Foreign
from infer.serving.protocols.ollama.events import (
    OllamaChat,
    OllamaGeneration,
    OllamaOutput,
    OllamaShape,
    without_prompt,
)
from infer.serving.protocols.openai.ask import (
    Alternatives,
    ChatBody,
    CompletionBody,
    ask_chat,
    ask_completion,
    complete_chat,
)

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


def ask_conversation(body: OllamaChatBody, served: Served) -> Ask | OllamaOutput:
    """Return what a body asks. Raises BodyError."""
    if not body.messages:
        return _load(body, served)
    return _ask_chat([_message(each) for each in body.messages or ()], body.tools, body, served)


def ask_generation(body: OllamaGenerateBody, served: Served) -> Ask | Callable[[], Ask] | OllamaOutput:
    """Return what a body asks: an answer to a user's message, or the continuation of a text. Raises BodyError."""
    if not (body.prompt or body.suffix):
        return _load(body, served)
    prompt = body.prompt or ""
    if served.llm.can_chat and not (body.raw or body.suffix):
        messages = [{"role": "system", "content": body.system}] if body.system else []
        return _ask_chat([*messages, {"role": "user", "content": prompt}], None, body, served)
    if body.system:
        raise refuse("system needs a chat template, which is not used here: put the text into prompt", "system")
    given = _sampling(body) | {"prompt": prompt, "suffix": body.suffix}
    if body.logprobs:
        given["logprobs"] = body.top_logprobs or 0
    meant = body_from(given, CompletionBody, as_given, served.reading)
    refuse_unless_neutral(meant, _ONE_ANSWER)
    return ask_completion(meant, served)


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
    meant = body_from(given, ChatBody, complete_chat, served.reading)
    refuse_unless_neutral(meant, _ONE_ANSWER)
    return ask_chat(meant, served)


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
    """Return a message in OpenAI's format. An image becomes a part without text, which `complete_chat` replaces."""
    found = {"content": ""} | {_NEW_NAMES.get(name, name): value for name, value in given.items() if name != "images"}
    if images := given.get("images"):
        parts = [{"type": "image"} for _ in images] if isinstance(images, list) else [{"type": "image"}]
        found["content"] = [{"type": "text", "text": given.get("content") or ""}, *parts]
    return found


@final
class OllamaChatShape(OllamaShape):
    body, answer, ask = OllamaChatBody, OllamaChat, ask_conversation


@final
class OllamaGenerateShape(OllamaShape):
    body, answer, ask = OllamaGenerateBody, OllamaGeneration, ask_generation
