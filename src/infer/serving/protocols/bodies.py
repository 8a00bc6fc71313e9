"""The parts of bodies that several protocols share: messages and tools, prompts, parameters and efforts.

The server, `infer batch` and `infer replay` convert a body to plain values of the library. Clients send back the
answers of any server, and their users cannot change these answers. So an earlier message is never refused, except for
an image or a file in the user's last message, which the answer would need.
"""

import hashlib
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, final

import msgspec
from msgspec import Meta, Struct

from infer.compute.sampling.keywords import default_params
from infer.errors import ClosedError, ContextLengthError, InvalidRequestError
from infer.sampling_params import SEED_BITS, SamplingParams, UnknownParameterError, without_zeros
from infer.serving.protocols.fields import DECLARED, BodyError, Reading, refuse, shown
from infer.serving.server_settings import AgentPrompts
from infer.text.toolcalls.answer_format import reasoning_of
from infer.text.toolcalls.tools import past_arguments as read_past_arguments
from infer.text.toolcalls.tools import with_objects

# Names of a body's fields for parameters and options with another name there; for /v1/responses if they differ.
_BODY_NAMES = {name: declared.body_name for name, declared in DECLARED.items() if declared.body_name}
_BODY_NAMES["json_schema"] = "response_format.json_schema.schema"
_NAMES_OF_RESPONSES = _BODY_NAMES | {"max_new_tokens": "max_output_tokens", "json_schema": "text.format.schema"}
_KEPT_NAMES = DECLARED.keys() | {"dimensions", "prompt_name", "query", "instruction", "top_n"}  # these of texts
_WORDS = ("image", "audio", "video", "file", "document")
Arguments = Annotated[Any, Meta(extra_json_schema={"type": "string"})]  # `past_arguments` made an object of it
_TEXT_TYPES = frozenset({"text", "input_text", "output_text"})


@final
@dataclass(frozen=True)
class Served:
    """The model that a body is for, and the request that sent it. `reading` has the warnings about the body.

    A body that sets no seed or a parameter gets `seed`, and those of `values`, which a command sets.
    """

    llm: Any  # an `infer.LLM`
    id: str = ""  # of the request
    model: str = ""  # the name that the client used
    created: int = 0
    load_seconds: float = 0.0
    seconds: Callable[[], float] = time.perf_counter  # since the request was received
    reading: Reading = field(default_factory=Reading)
    agent_prompts: AgentPrompts = "adapt"
    values: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None

    def params(
        self, values: Mapping[str, Any], seed: int | None, prompt_name: str, num_choices: int = 1, **otherwise: Any
    ) -> list[SamplingParams]:
        """Return the parameters of a body's choices, from its values, the command's, `otherwise` and the model's.

        If `prompt_name` is "prompt", the defaults for texts apply, else the defaults for chats. The seed of the first
        choice is `seed` modulo 2⁶⁴, or random if it is None. The other seeds are hashes of the first one and the
        choice's index. Raises BodyError.
        """
        given = {**otherwise, **self.values, **without_zeros(values)}
        if "json_schema" in given:
            given["json_schema"] = with_objects(given["json_schema"])
        with refusing(prompt_name):
            params = default_params(self.llm.sampling_defaults, given, is_chat=prompt_name != "prompt")
        seed = self.seed if seed is None else seed
        first = secrets.randbits(SEED_BITS) if seed is None else seed % 2**64
        others = [seed_of(first, str(index)) >> (64 - SEED_BITS) for index in range(1, num_choices)]
        return [replace(params, seed=each) for each in (first, *others)]


def refuse_unless_neutral(body: msgspec.Struct, neutral: Mapping[str, tuple[object, ...]]) -> None:
    """Raise BodyError for a field that has no meaning here, unless its value is neutral."""
    for name, values in neutral.items():
        if (value := getattr(body, name, None)) is not None and value not in values:
            raise refuse(f"{name} must not be {shown(value)} here: leave it out", name, "unsupported_value")


def effort_variables(effort: str | None, template: str | None) -> dict[str, Any]:
    """Return the template's variables for an effort, which is a hint.

    A template without reasoning has no such variable, unless the effort is "none".
    """
    reasoning = reasoning_of(template or "")
    if effort is None or (effort != "none" and reasoning is None):
        return {}
    known = effort if reasoning is None else reasoning.nearest_effort(effort)
    return {"enable_thinking": effort != "none", "reasoning_effort": known}


def seed_of(seed: int, name: str) -> int:
    """Return the seed of a row or a choice: 64 bits of a hash, which is the same in every process."""
    return int.from_bytes(hashlib.blake2b(f"{seed}\0{name}".encode(), digest_size=8).digest(), "little")


def refusal(error: InvalidRequestError, prompt_name: str, query_name: str = "query") -> BodyError:
    """Return the library's error with the names of a body's fields.

    `prompt_name` is the field with the prompt, or with the texts; `query_name` is the field with their query.
    """
    if isinstance(error, BodyError):
        return error
    message, param = str(error), error.param or ""
    if isinstance(error, ContextLengthError):
        if param == "query":
            return refuse(message.replace(param, query_name), query_name, "context_length_exceeded")
        return refuse(message, prompt_name, "context_length_exceeded")
    if isinstance(error, UnknownParameterError):
        return refuse(message, "chat_template_kwargs")
    names = _NAMES_OF_RESPONSES if prompt_name == "input" else _BODY_NAMES
    if param in names and param != "json_schema" and message.startswith(param):
        message = names[param] + message[len(param) :]
    return refuse(message, names.get(param, param if param in _KEPT_NAMES else prompt_name))


@contextmanager
def refusing(prompt_name: str, query_name: str = "query") -> Iterator[None]:
    """Raise the library's refusals with the names of a body's fields, as `refusal` returns them."""
    try:
        yield
    except ClosedError:
        raise
    except InvalidRequestError as error:
        raise refusal(error, prompt_name, query_name) from error


def prompts_of(prompt: str | Sequence[Any], name: str = "prompt") -> list[Any]:
    """Return the prompts of a body's field as texts or lists of ids. Raises BodyError."""
    if isinstance(prompt, str) or set(map(type, prompt)) == {int}:
        return [prompt]
    for index, each in enumerate(prompt):
        if not isinstance(each, type(prompt[0])) or not isinstance(each, str | list) or each == []:
            raise _no_prompt(name, f"{name}[{index}]", each)
        if isinstance(each, list):
            for place, token_id in enumerate(each):
                if type(token_id) is not int:
                    raise _no_prompt(name, f"{name}[{index}][{place}]", token_id)
    if not prompt:
        raise _no_prompt(name, name, prompt)
    return list(prompt)


def _no_prompt(name: str, path: str, value: object) -> BodyError:
    message = f"{name} must be a text, token ids, or a list of texts or of token ids, got {shown(value)} at {path}"
    return refuse(message, path, "invalid_type")


# Messages and tools


@final
class OutputRefusal(Struct, tag_field="type", tag="refusal", kw_only=True):
    refusal: str


def complete_each(messages: list[Any], reading: Reading, complete: Callable[..., dict[str, Any]]) -> list[Any]:
    """Return the messages that `complete` makes. For the user's last message, it is called with `is_last`."""
    messages, last = with_roles(messages)
    return [
        complete(each, f"messages[{index}]", reading, is_last=index == last) if isinstance(each, dict) else each
        for index, each in enumerate(messages)
    ]


def with_roles(messages: list[Any]) -> tuple[list[Any], int]:
    """Return messages with roles in small letters, and the index of the user's last message, or -1 if there is none.

    Clients in Java write roles in capitals.
    """
    found, last = list(messages), -1
    for index, each in enumerate(messages):
        if isinstance(each, dict) and isinstance(role := each.get("role"), str):
            found[index] = {**each, "role": role.lower()}
            last = index if role.lower() == "user" else last
    return found, last


def own_tools(
    tools: list[Any],
    reading: Reading,
    own_kind: str = "function",
    expand: Callable[[Any, str], list[Any]] = lambda tool, path: [tool],
) -> list[Any]:
    """Return the tools that the client runs; a tool of another kind is left out with a warning.

    `expand` returns the tools that replace a tool, which it receives with its path.
    """
    found = list[Any]()
    for index, given in enumerate(with_objects(tools)):
        path = f"tools[{index}]"
        for tool in expand(given, path):
            kind = tool.get("type") if isinstance(tool, dict) else None
            if isinstance(kind, str) and kind != own_kind:
                reading.warn(f"{path} was left out: tools of type {kind!r:.40} cannot be run here")
            else:
                found.append(tool)
    return found


def text_parts(parts: list[Any], path: str, reading: Reading, text_type: str, *, is_last: bool) -> list[Any]:
    """Return the parts with this type for texts, and with a placeholder for each part that has no text.

    Raises BodyError for a part that has no text if `is_last`.
    """
    found = list[Any]()
    for index, part in enumerate(parts):
        if isinstance(part, str):
            found.append({"type": text_type, "text": part})
        elif not isinstance(part, dict) or not isinstance(kind := part.get("type", "text"), str):
            found.append(part)
        elif kind in _TEXT_TYPES:
            own = {name: value for name, value in part.items() if name not in ("type", "text")}
            kept = {**part, "type": text_type} if "type" in part or "text" in part else part
            found.append(kept | {"own": own} if own else kept)
        elif kind == "refusal":
            found.append(part)
        else:
            text = placeholder(kind, f"{path}[{index}]", reading, is_refused=is_last)
            found.append({"type": text_type, "text": text})
    return found


def placeholder(kind: str, path: str, reading: Reading, *, is_refused: bool) -> str:
    """Return the text that replaces a part that has no text, and warn about it. Raises BodyError if `is_refused`."""
    word = next((each for each in _WORDS if each in kind), "part")
    if is_refused:
        raise refuse(f"{path} is of type {kind!r:.40}: the model reads only text, leave the {word} out", path)
    reading.warn(f"{path} is of type {kind!r:.40} and was replaced by [{word}]: the model reads only text")
    return f"[{word}]"


def past_arguments(given: Any, path: str, reading: Reading) -> dict[str, Any]:
    """Return the arguments of an earlier call as an object, and warn if they are not one.

    Templates serialize them themselves.
    """
    values, warning = read_past_arguments(given)
    if warning is not None:
        reading.warn(f"{path}: {warning}")
    return values


def call_of_message(call_id: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return a past call as chat templates expect it."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def text_of(content: Any) -> str:
    """Return the text of a content. The texts of parts are joined; without a content, the text is empty."""
    if not isinstance(content, list):
        return content or ""
    return "".join(part.refusal if isinstance(part, OutputRefusal) else part.text for part in content)
