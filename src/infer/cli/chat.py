"""The terminal chat: a conversation with a model, and the commands that look after it.

The conversation is what the user sees and changes; the model's session runs only what it has not run before. A turn
that fails, or that Ctrl-C stops before its first word, leaves the conversation as it was before.
"""

import difflib
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, final

import click

from infer.atomic import replacing
from infer.cli.lines import Lines
from infer.cli.model import Model
from infer.cli.terminal import TextWriter, cancel_on_signal
from infer.errors import ContextLengthError, InferError, InvalidRequestError
from infer.params import ALIASES, PARAMETER_NAMES, SamplingParams, unknown_parameter
from infer.results import GenerationResult

FORMAT = "infer-chat"
MAX_FILE_BYTES = 64 << 20
ROLES = ("system", "user", "assistant", "tool")
OFF = ("none", "off", "null")


@dataclass
class Statistics:
    """Sums over the answers of a session."""

    answers: int = 0
    generated_tokens: int = 0
    seconds: float = 0.0
    context_tokens: int = 0
    last: GenerationResult | None = None

    def add(self, result: GenerationResult) -> None:
        self.answers += 1
        self.generated_tokens += result.generated_tokens
        self.seconds += result.timing.total_time_s
        self.context_tokens = result.prompt_tokens + result.generated_tokens
        self.last = result


@final
class ChatSession:
    """A conversation, its parameters, and what came of it."""

    def __init__(self, model: Model, name: str, params: SamplingParams, *, system: str | None = None) -> None:
        self.model = model
        self.memory = model.session()
        self.name = name
        self.params = params
        self.statistics = Statistics()
        self.messages: list[dict[str, str]] = []
        self.set_system(system or "")

    def set_system(self, text: str) -> None:
        spoken = [message for message in self.messages if message["role"] != "system"]
        self.messages = [{"role": "system", "content": text}, *spoken] if text else spoken

    def reset(self) -> None:
        """Forget what was said; the system message stays."""
        self.messages = [message for message in self.messages if message["role"] == "system"]
        self.statistics.context_tokens = 0

    def undo(self) -> bool:
        """Forget the last question and its answer, if there is one."""
        asked = [index for index, message in enumerate(self.messages) if message["role"] == "user"]
        if asked:
            self.messages = self.messages[: asked[-1]]
        return bool(asked)

    def set_parameter(self, name: str, text: str) -> None:
        """Change one of `params`, from its JSON or from plain text. Raises InvalidRequestError, nothing changed."""
        field_name = ALIASES.get(name.replace("-", "_"), name.replace("-", "_"))
        if field_name not in PARAMETER_NAMES:
            raise InvalidRequestError(unknown_parameter(name))
        value: Any = text
        if text.lower() in OFF:
            value = None
        elif text:
            try:
                value = json.loads(text)
            except ValueError:
                value = {"true": True, "false": False}.get(text.lower(), text)
        self.params = SamplingParams.from_mapping(_params_to_json(self.params) | {field_name: value})

    def answer(self, text: str, on_text: Callable[[str], None]) -> GenerationResult:
        """Say something; the answer goes to `on_text` as it comes. Ctrl-C ends it and keeps what there is."""
        asked = [*self.messages, {"role": "user", "content": text}]
        with cancel_on_signal() as cancellation:
            result = self.memory.answer(
                asked, self.params, on_token=lambda token_id, piece: on_text(piece), cancel=cancellation.event
            )
        if result.error is not None:
            raise InvalidRequestError(f"the answer ended early: {result.error}")
        if result.text or result.finish_reason != "abort":
            self.messages = [*asked, {"role": "assistant", "content": result.text}]
        self.statistics.add(result)
        return result

    def save(self, path: Path) -> None:
        """Write the conversation, its parameters and what the model holds of it, or as JSON without the latter. The
        old file or the new one, never half of it.
        """
        record = self._record(self.messages)
        if not _is_json_name(path):
            self.memory.save(path, note=record)
            return
        content = (json.dumps(record, ensure_ascii=False, indent=2) + "\n").encode("utf-8", "surrogatepass")
        try:
            with replacing(path) as file:
                file.write(content)
        except OSError as error:
            raise InvalidRequestError(f"{path} cannot be written: {error.strerror}") from error

    def load(self, path: Path) -> None:
        """Take over a saved conversation. Raises InvalidRequestError, nothing changed but what the model holds."""
        if _holds_json(path):
            record = _read_json(path)
        else:  # one that was saved from Python has no note
            record = self.memory.load(path) or self._record(self.memory.messages)
        if record.get("format") != FORMAT or record.get("version") != 1:
            raise InvalidRequestError(f"{path} is no conversation saved by /save")
        messages, params = record.get("messages"), record.get("params")
        if not isinstance(messages, list) or not all(_is_message(message) for message in messages):
            raise InvalidRequestError(f"{path}: messages must be a list of role ({', '.join(ROLES)}) and content")
        if not isinstance(params, dict):
            raise InvalidRequestError(f"{path}: params must be an object")
        self.params = SamplingParams.from_mapping(params)
        self.messages = [{"role": message["role"], "content": message["content"]} for message in messages]
        self.statistics.context_tokens = 0

    def _record(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        params = _params_to_json(self.params)
        return {"format": FORMAT, "version": 1, "model": self.name, "messages": messages, "params": params}


@dataclass(frozen=True)
class Command:
    """One of the slash commands: how it is written, what it does, and the function that does it."""

    usage: str
    meaning: str
    run: Callable[[ChatSession, str], str]


@final
class Leave(Exception):  # noqa: N818
    """/quit was said."""


def converse(session: ChatSession, *, quiet: bool = False) -> int:
    """The whole session, from stdin to stdout; decorated only where both are terminals. Returns the exit status."""
    lines = Lines(sorted(COMMANDS))
    if lines.interactive:
        _note(f"{session.name}, context {session.model.max_seq_len} tokens. /help lists commands, Ctrl-D leaves.")
    while (message := lines.read()) is not None:
        try:
            _turn(session, message, lines.interactive and not quiet)
        except Leave:
            break
        except ContextLengthError as error:
            _note(f"infer: the conversation no longer fits: {error}. /reset begins a new one")
        except InferError as error:
            _note(f"infer: {error}")
    return 0


def _turn(session: ChatSession, message: str, with_numbers: bool) -> None:
    if message.startswith("/") and not message.startswith("//"):
        shown = run_command(session, message)
        if shown:
            _note(shown)
        return
    if not message.strip():
        return
    writer = TextWriter(sys.stdout)
    try:
        result = session.answer(message.removeprefix("/") if message.startswith("//") else message, writer.write)
    finally:
        writer.end_line()
    if result.finish_reason == "abort":
        _note("(stopped)")
    elif result.stop_reason == "context":
        _note("(the context is full: /reset begins a new conversation)")
    elif result.finish_reason == "length":
        _note("(cut at max_new_tokens: /set max_new_tokens N)")
    if with_numbers:
        timing = result.timing
        rate = f", {timing.decode_tokens_per_second:.1f} tokens/sec" if timing.decode_times_s else ""
        _note(f"{result.generated_tokens} tokens, TTFT {1000 * timing.ttft_s:.0f} ms{rate}")


def run_command(session: ChatSession, line: str) -> str:
    """Run a slash command; what it has to say. Raises InvalidRequestError for one that is unknown or fails."""
    name, _, argument = line.strip().partition(" ")
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        raise InvalidRequestError(f"no command {name}: " + (f"did you mean {near[0]}?" if near else "/help lists them"))
    return COMMANDS[name].run(session, argument.strip())


def _help(session: ChatSession, argument: str) -> str:
    lines = [f"  {command.usage:<20} {command.meaning}" for command in COMMANDS.values()]
    lines.append('  \\ at a line\'s end, or """ before and after: several lines.   // begins a message with /')
    return "\n".join(lines)


def _reset(session: ChatSession, argument: str) -> str:
    session.reset()
    return "(a new conversation)"


def _undo(session: ChatSession, argument: str) -> str:
    return "(forgot the last question and its answer)" if session.undo() else "(nothing was said)"


def _system(session: ChatSession, argument: str) -> str:
    if not argument:
        system = [message["content"] for message in session.messages if message["role"] == "system"]
        return system[0] if system else "(no system message; /system TEXT sets one, /system none removes it)"
    session.set_system("" if argument.lower() in OFF else argument)
    return "(system message set)" if session.messages[:1] and argument.lower() not in OFF else "(no system message)"


def _set(session: ChatSession, argument: str) -> str:
    name, _, text = argument.partition(" ")
    if not name:
        return "\n".join(f"  {name} = {value}" for name, value in _params_to_json(session.params).items())
    if not text.strip():
        raise InvalidRequestError(f"/set {name} needs a value, as in /set temperature 0.7")
    session.set_parameter(name, text.strip())
    return ""


def _save(session: ChatSession, argument: str) -> str:
    path = _path(argument, "/save")
    session.save(path)
    return f"(saved to {argument}{': the messages only' if _is_json_name(path) else ''})"


def _load(session: ChatSession, argument: str) -> str:
    session.load(_path(argument, "/load"))
    return f"(loaded {len(session.messages)} messages from {argument})"


def _stats(session: ChatSession, argument: str) -> str:
    statistics, last = session.statistics, session.statistics.last
    if last is None:
        return "(no answer yet)"
    used = f"{statistics.context_tokens} of {session.model.max_seq_len} tokens"
    return "\n".join(
        [
            f"  answers {statistics.answers}, {statistics.generated_tokens} tokens, {statistics.seconds:.1f} s",
            f"  context {used}, seed of the last answer {last.seed}",
            f"  last prompt {last.prompt_tokens} tokens, {last.reused_tokens} of them from before",
            f"  last answer {last.generated_tokens} tokens, TTFT {1000 * last.timing.ttft_s:.0f} ms, "
            f"{last.timing.decode_tokens_per_second:.1f} tokens/sec, ended by {last.finish_reason}",
        ]
    )


def _quit(session: ChatSession, argument: str) -> str:
    raise Leave


COMMANDS = {
    "/help": Command("/help", "this list", _help),
    "/reset": Command("/reset", "forget the conversation, keep the system message", _reset),
    "/undo": Command("/undo", "forget the last question and its answer", _undo),
    "/system": Command("/system TEXT", "set the system message; none removes it", _system),
    "/set": Command("/set NAME VALUE", "change a sampling parameter, as in /set temperature 0.7; /set lists", _set),
    "/save": Command("/save FILE", "write the conversation and the model's cache; FILE.json: the messages only", _save),
    "/load": Command("/load FILE", "go on with a saved conversation", _load),
    "/stats": Command("/stats", "tokens and times", _stats),
    "/quit": Command("/quit", "leave, as Ctrl-D does", _quit),
}


def _note(text: str) -> None:
    """What is not the model's text goes to stderr, dim where that is a terminal."""
    click.secho(text, err=True, dim=sys.stderr.isatty() and not os.environ.get("NO_COLOR"))


def _path(argument: str, command: str) -> Path:
    if not argument:
        raise InvalidRequestError(f"{command} needs a file name")
    return Path(argument).expanduser()


def _is_json_name(path: Path) -> bool:
    return path.suffix.lower() == ".json"


def _holds_json(path: Path) -> bool:
    """By its name, or as it does not begin as a session's file does: with a length of eight bytes, the last ones 0."""
    if _is_json_name(path) or not path.is_file():
        return True
    try:
        with path.open("rb") as file:
            return b"\0" not in file.read(8)
    except OSError as error:
        raise InvalidRequestError(f"{path} cannot be read: {error.strerror}") from error


def _params_to_json(params: SamplingParams) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for parameter in fields(params):
        value = getattr(params, parameter.name)
        if isinstance(value, Mapping):
            value = {str(token_id): bias for token_id, bias in value.items()}
        elif isinstance(value, frozenset | tuple):
            value = list(value)
        values[parameter.name] = value
    return values


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and message.get("role") in ROLES and isinstance(message.get("content"), str)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_FILE_BYTES or not path.is_file():
            raise InvalidRequestError(f"{path} is no conversation saved by /save")
        record = json.loads(path.read_bytes())
    except OSError as error:
        raise InvalidRequestError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{path} is no JSON: {error}") from error
    if not isinstance(record, dict):
        raise InvalidRequestError(f"{path} is no conversation saved by /save")
    return record
