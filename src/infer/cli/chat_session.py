"""A conversation with a model: its messages, its parameters, its file.

The messages are the ones that the user sees and changes. The model's session computes only their uncached part. A turn
that fails, or that Ctrl-C stops before its first word, leaves the conversation unchanged.
"""

import json
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, final

import infer
from infer.cli.option_files import check_writable, read_bytes, refusing, write_whole
from infer.cli.prompts import json_value
from infer.errors import InvalidRequestError
from infer.outputs import GenerationResult, SampleTrace
from infer.sampling_params import ALIASES, PARAMETER_NAMES, SamplingParams, unknown_parameter, without_zeros
from infer.text.toolcalls.tools import read_tools

FORMAT = "infer-chat"
MAX_FILE_BYTES = 64 << 20
ROLES = ("system", "user", "assistant", "tool")
OFF = ("none", "off", "null")
Messages = list[dict[str, Any]]
# The fields of a message in a file.
_FIELDS = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name")


class LastTurn(NamedTuple):
    """An answer and the request that it belongs to."""

    messages: Messages
    prompt_ids: list[int]
    params: SamplingParams  # with the seed of the answer
    tools: list[dict[str, Any]]
    result: GenerationResult


@final
class ChatSession:
    """A conversation, its parameters, and sums over its answers."""

    def __init__(
        self,
        model: "infer.LLM",
        name: str,
        params: SamplingParams,
        *,
        system: str | None = None,
        open_model: "Callable[[str], tuple[infer.LLM, SamplingParams]] | None" = None,
    ) -> None:
        self.model = model
        self.memory = model.session()
        self.name = name
        self.params = params
        self.num_answers, self.num_tokens, self.seconds = 0, 0, 0.0  # sums over the answers
        self.context_tokens = 0
        self.last: LastTurn | None = None
        self.tools: list[dict[str, Any]] = []  # functions that the model may call; none is ever run
        self._open_model = open_model
        self._set: dict[str, Any] = {}  # the parameters that /set changed; another model keeps them
        self.messages: Messages = []
        self.set_system(system or "")

    def set_system(self, text: str) -> None:
        spoken = [message for message in self.messages if message["role"] != "system"]
        self.messages = [{"role": "system", "content": text}, *spoken] if text else spoken

    def reset(self) -> None:
        """Forget the conversation, but keep the system message."""
        self.messages = [message for message in self.messages if message["role"] == "system"]
        self.context_tokens = 0

    def undo(self) -> bool:
        """Forget the last question and its answer. Return False if there is none."""
        if asked := self.question_indices():
            self.messages = self.messages[: asked[-1]]
        return bool(asked)

    def set_parameter(self, name: str, text: str) -> None:
        """Change one of `params`, from JSON or plain text. If it raises InvalidRequestError, nothing was changed."""
        field_name = ALIASES.get(name.replace("-", "_"), name.replace("-", "_"))
        if field_name not in PARAMETER_NAMES:
            raise InvalidRequestError(unknown_parameter(name))
        named = {"true": True, "false": False} | dict.fromkeys(OFF)
        try:
            value = named[text.lower()] if text.lower() in named else json.loads(text)
        except ValueError:
            value = text
        self.params = SamplingParams.from_mapping(params_to_json(self.params) | {field_name: value})
        self._set[field_name] = value

    def switch_model(self, name: str) -> None:
        """Continue with another model. Changed parameters stay.

        If it raises InferError, nothing was changed.
        """
        if self._open_model is None:
            raise InvalidRequestError("the model of this conversation cannot be changed")
        model, params = self._open_model(name)
        params = SamplingParams.from_mapping(params_to_json(params) | self._set)
        former, self.model, self.memory = self.model, model, model.session()
        self.name, self.params, self.last = name, params, None
        former.close()

    def question(self, text: str) -> Messages:
        """Return the messages that ask `text` next."""
        return [*self.messages, {"role": "user", "content": text}]

    def last_question(self) -> Messages:
        """Return the messages that ask the last question again. Raises InvalidRequestError if nothing was asked."""
        if not (asked := self.question_indices()):
            raise InvalidRequestError("there is no question to answer again")
        return self.messages[: asked[-1] + 1]

    def question_indices(self) -> list[int]:
        return [index for index, message in enumerate(self.messages) if message["role"] == "user"]

    def ask(
        self,
        asked: Messages,
        on_text: Callable[[str], None],
        *,
        params: SamplingParams | None = None,
        on_prefill: Callable[[int, int], None] | None = None,
        cancel: threading.Event | None = None,
    ) -> GenerationResult:
        """Answer these messages, which become the conversation. The text is passed to `on_text` while it is generated.

        An answer that is cancelled after its first word is kept up to that point.
        """
        params = self.params if params is None else params
        result = self.memory.answer(
            asked,
            params,
            on_token=lambda token_id, piece: on_text(piece),
            cancel=cancel,
            on_prefill=on_prefill,
            tools=self.tools,
        )
        if result.error is not None:
            raise InvalidRequestError(f"the answer ended early: {result.error}")
        if result.text or result.finish_reason != "abort":
            self.messages = [*asked, result.to_message()]
            prompt_ids = self.memory.token_ids[: result.prompt_tokens]
            self.last = LastTurn(asked, prompt_ids, replace(params, seed=result.seed), self.tools, result)
        self.num_answers += 1
        self.num_tokens += result.generated_tokens
        self.seconds += result.timing.total_time_s
        self.context_tokens = result.prompt_tokens + result.generated_tokens
        return result

    def last_answer(self) -> LastTurn:
        """Return the last answer. Raises InvalidRequestError if there is none."""
        if self.last is None:
            raise InvalidRequestError("there is no answer yet")
        return self.last

    def trace(self, step: int) -> SampleTrace:
        """Return how the token at this step of the last answer was sampled.

        Raises InvalidRequestError if the answer ends before this step.
        """
        last = self.last_answer()
        tools = last.tools or None
        return self.model.sample_trace(last.messages, last.params, step=step, prompt_ids=last.prompt_ids, tools=tools)

    def permalink(self) -> str:
        """Return the permalink of the last answer, a URL.

        Its prompt is ids if the tokenizer encodes the conversation differently. Raises InvalidRequestError for an
        answer that was stopped, and for a request that no route of the server accepts.
        """
        from infer.cli.commands.replay_command import Permalink, body_of

        last = self.last_answer()
        if last.result.finish_reason == "abort":
            raise InvalidRequestError("the last answer was stopped: /regenerate gives one that has a permalink")
        is_same = bool(last.tools) or self.model.tokenizer.encode_chat(last.messages) == last.prompt_ids
        prompt = last.messages if is_same else last.prompt_ids
        body = body_of(prompt, last.params, self.name)
        body |= {"tools": last.tools} if last.tools else {}
        return Permalink.of(body, last.result, self.model.system_fingerprint).url

    def open_calls(self) -> list[dict[str, Any]]:
        """Return the functions that the last answer calls and that have no result yet, in OpenAI's form."""
        for num_results, message in enumerate(reversed(self.messages)):
            if message["role"] != "tool":
                calls: list[dict[str, Any]] = message.get("tool_calls", [])
                return calls[num_results:]
        return []

    def add_result(self, text: str) -> None:
        """Add the result of the first open call. Raises InvalidRequestError if there is none."""
        if not (calls := self.open_calls()):
            raise InvalidRequestError("there is no call that waits for a result")
        result = {"role": "tool", "tool_call_id": calls[0]["id"], "name": calls[0]["function"]["name"]}
        self.messages = [*self.messages, result | {"content": text}]

    def save(self, path: Path) -> None:
        """Write the conversation, its parameters and the model's cache. A JSON file has no cache.

        After a failure, the path has the old file or the new one, never a part of one.
        """
        check_writable(path)
        record = self._record(self.messages)
        if not is_json_name(path):
            self.memory.save(path, note=record)
            return
        content = json.dumps(record, ensure_ascii=False, indent=2) + "\n"
        write_whole(path, content.encode("utf-8", "surrogatepass"), mode=0o600)

    def load(self, path: Path) -> None:
        """Replace the conversation with a saved one.

        If it raises InvalidRequestError, nothing was changed except the model's cache.
        """
        if _holds_json(path):
            record = _read_json(path)
        else:  # a session that was saved from Python has no note
            record = self.memory.load(path) or self._record(self.memory.messages)
        if record.get("format") != FORMAT or record.get("version") != 1:
            raise InvalidRequestError(f"{path} is not a conversation saved by /save")
        messages, params = record.get("messages"), record.get("params")
        if not isinstance(messages, list) or not all(_is_message(message) for message in messages):
            raise InvalidRequestError(f"{path}: messages must be a list of role ({', '.join(ROLES)}) and content")
        if not isinstance(params, dict):
            raise InvalidRequestError(f"{path}: params must be an object")
        try:
            tools = [tool.as_given() for tool in read_tools(record.get("tools", []))]
            params = without_zeros(params)
            self.params = SamplingParams.from_mapping(params)
        except InvalidRequestError as error:
            raise InvalidRequestError(f"{path}: {error}") from error
        self.messages = [{name: message[name] for name in _FIELDS if name in message} for message in messages]
        self.tools = tools
        self._set, self.last = dict(params), None
        self.context_tokens = 0

    def _record(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        params = params_to_json(self.params)
        tools = {"tools": self.tools} if self.tools else {}
        return {"format": FORMAT, "version": 1, "model": self.name, "messages": messages, "params": params, **tools}


def is_json_name(path: Path) -> bool:
    return path.suffix.lower() == ".json"


def is_saved_chat(path: Path) -> bool:
    """Return True if a file's name and first bytes look like a saved chat."""
    try:
        return path.is_file() and (is_json_name(path) or not _holds_json(path))
    except InvalidRequestError:
        return False


def _holds_json(path: Path) -> bool:
    """Return True for a JSON name, a path without a file, and a file that does not begin like a session's file.

    A session's file begins with a length of eight bytes, of which the last ones are 0.
    """
    if is_json_name(path) or not path.is_file():
        return True
    with refusing(f"{path} cannot be read"), path.open("rb") as file:
        return b"\0" not in file.read(8)


def params_to_json(params: SamplingParams) -> dict[str, Any]:
    return {name: json_value(getattr(params, name)) for name in PARAMETER_NAMES}


def _is_message(message: Any) -> bool:
    match message:
        case {"role": role, "content": str()}:
            calls = message.get("tool_calls", [])
            return role in ROLES and isinstance(calls, list) and all(map(_is_call, calls))
    return False


def _is_call(call: Any) -> bool:
    match call:
        case {"id": str(), "function": {"name": str(), "arguments": str()}}:
            return True
    return False


def _read_json(path: Path) -> dict[str, Any]:
    content = read_bytes(path, "the conversation", MAX_FILE_BYTES)
    with suppress(ValueError, RecursionError):
        if isinstance(record := json.loads(content), dict):
            return record
    raise InvalidRequestError(f"{path} is not a conversation saved by /save")
