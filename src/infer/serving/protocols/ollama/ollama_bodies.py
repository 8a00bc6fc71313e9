"""The bodies of Ollama's API. `ollama_request` converts them to the bodies of OpenAI's routes.

Messages, tools and options stay as they were sent; the bodies of OpenAI's routes define their fields.
"""

from typing import Annotated, Any, final

from msgspec import Meta

from infer.request_limits import MAX_TEXTS, MAX_TOKENS
from infer.serving.protocols.bodies import Alternatives
from infer.serving.protocols.foreign import Foreign
from infer.serving.protocols.unknown_fields import Parameters

_HINT = Foreign(is_hint=True)
_FOREIGN = {
    "name": Foreign(same_as=("model",)),
    **dict.fromkeys(("shift", "insecure", "verbose", "width", "height", "steps", "user"), _HINT),
}
_WHOLE_PROMPT = "only the server's own template is used: send the whole prompt with raw: true"


class _OllamaBody(Parameters, kw_only=True):
    foreign = _FOREIGN

    model: str | None = None


class AnsweringBody(_OllamaBody, kw_only=True):
    """The fields of both routes that generate.

    `keep_alive` is for a server of several models. `seed` and `num_predict` are not in Ollama's API, but clients send
    them: they are used if `options` do not set them.
    """

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
class OllamaChatBody(AnsweringBody, kw_only=True):
    """A conversation. Without messages, the model is only loaded, or unloaded if `keep_alive` is 0."""

    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None


@final
class OllamaGenerateBody(AnsweringBody, kw_only=True):
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
    options: dict[str, Any] | None = None  # no option changes a vector
    keep_alive: float | str | None = None
    truncate: bool | None = None  # the default is true


@final
class OllamaEmbedBody(_EmbeddingBody, kw_only=True):
    """Texts to convert to vectors of length 1."""

    input: str | Annotated[list[str], Meta(min_length=1, max_length=MAX_TEXTS)]
    dimensions: Annotated[int, Meta(ge=1, le=MAX_TOKENS)] | None = None


@final
class OllamaEmbeddingsBody(_EmbeddingBody, kw_only=True):
    """A text to convert to a vector, in the older format."""

    prompt: str


@final
class OllamaModelBody(_OllamaBody, kw_only=True):
    """A model by its name."""

    stream: bool | None = None  # the default is true
