"""The messages that are typed in a chat, and its commands: lines that begin with a slash.

A backslash at a line's end continues the message on the next line. A line that begins with three double quotes opens a
block that three more end. Text that is pasted at a terminal is one message, however many lines it has.
"""

import difflib
import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from glob import escape, glob
from pathlib import Path
from typing import Any

from infer.cli.chat_session import OFF, ChatSession, Messages, is_json_name, is_saved_chat, params_to_json
from infer.cli.commands.generate_command import rate_text, trace_lines
from infer.cli.option_files import MAX_GRAMMAR_BYTES, read_text
from infer.cli.streamed_text import shortened
from infer.cli.terminal import columns_of, note, text_of_rows
from infer.errors import InvalidRequestError
from infer.models.catalog.models_at_hand import models_at_hand
from infer.sampling_params import PARAMETER_NAMES, SamplingParams
from infer.text.toolcalls.tools import read_tools

BLOCK = '"""'
TURNS_AFTER_LOAD = 2
SHORT = 160  # columns of a message that is shown to remind the user
KEYS = [
    ('\\ or """', 'a message of several lines: \\ at a line\'s end, or """ around it, or paste it'),
    ("//", "begin a message with /"),
    ("Tab, Ctrl-R", "complete a command, search earlier messages"),
    ("Ctrl-C, Ctrl-D", "stop an answer, leave"),
]


class ChatInput(ABC):
    """Reads one message after the other. `is_interactive` is True if a person types them and reads the answers."""

    is_interactive = True

    @abstractmethod
    def message(self, begin: str) -> str | None:
        """Return the next message, or None at the end. An editor shows `begin` as its beginning."""

    @abstractmethod
    def discard(self) -> bool:
        """Discard the typed text, and return False if an editor had any."""

    @staticmethod
    def is_open_block(text: str) -> bool:
        """Return True if the text begins a block that is not closed yet."""
        block = text.lstrip()
        return block.startswith(BLOCK) and not block.removeprefix(BLOCK).rstrip().endswith(BLOCK)

    @staticmethod
    def message_of(text: str) -> str:
        """Return the message without the marks of a block."""
        block = text.lstrip()
        return block.removeprefix(BLOCK).rstrip().removesuffix(BLOCK).strip("\n") if block.startswith(BLOCK) else text

    def read(self, begin: str = "") -> str | None:
        """Return the next message as `message` does.

        At a terminal, Ctrl-C discards the typed text. If nothing is typed, a second Ctrl-C ends the input.
        """
        is_second = False
        while True:
            try:
                return self.message(begin)
            except KeyboardInterrupt:
                if not self.is_interactive:
                    raise
            if self.discard() and is_second:
                return None
            note("(Ctrl-C again, Ctrl-D or /quit leaves)")
            begin, is_second = "", True


def complete_file(typed: str, is_meant: Callable[[Path], bool] = Path.is_file) -> Iterator[str]:
    """Yield the paths that begin with the typed text. Folders end in a slash.

    Hidden paths are included only if their dot was typed.
    """
    folder, slash, begin = typed.rpartition("/")
    try:
        root = Path(folder + slash or ".").expanduser()
        names = sorted(glob(f"{escape(begin)}*", root_dir=root))
    except (RuntimeError, ValueError):  # the home folder is unknown, or the name has a zero byte
        return
    for name in names:
        if (root / name).is_dir():
            yield f"{folder}{slash}{name}/"
        elif is_meant(root / name):
            yield folder + slash + name


def complete_model(typed: str) -> Iterator[str]:
    """Yield the names of available models, or paths if no name matches."""
    names = [name for name in _model_names() if name.startswith(typed)]
    yield from names or complete_file(typed, lambda path: path.suffix == ".gguf")


def complete_parameter(typed: str) -> Iterator[str]:
    name, space, value = typed.partition(" ")
    if space:
        yield from [f"{name} {OFF[1]}"] * OFF[1].startswith(value)
    else:
        yield from (f"{each} " for each in PARAMETER_NAMES if each.startswith(name))


@cache
def _model_names() -> list[str]:
    return [model.name for model in models_at_hand() if model.problem is None]


@dataclass(frozen=True)
class Question:
    """The messages with which a command asks the model.

    `params` replace the session's parameters; `remark` is shown before the answer.
    """

    messages: Messages
    remark: str = ""
    params: SamplingParams | None = None


@dataclass(frozen=True)
class Edit:
    """A question that the user can rephrase. It is asked after the messages before it."""

    before: Messages
    text: str


@dataclass(frozen=True)
class Table:
    """Lines that have their own styles."""

    lines: list[str]


Told = str | Question | Edit | Table


@dataclass(frozen=True)
class ChatCommand:
    """A command: its usage, its meaning, the function that runs it, and its other names.

    `complete` returns the arguments that a typed beginning can be completed to.
    """

    usage: str
    meaning: str
    run: Callable[[ChatSession, str], Told]
    aliases: tuple[str, ...] = ()
    complete: Callable[[str], Iterable[str]] = lambda typed: ()


class Leave(Exception):  # noqa: N818
    """Raised when /quit is typed."""


def run_message(session: ChatSession, message: str) -> Told:
    """Return the question of a message, or what its command returns: a single line that begins with one slash.

    Two slashes begin an ordinary message, and so does a slash in a pasted block.
    """
    if message.startswith("/") and not message.startswith("//") and "\n" not in message:
        return run_command(session, message)
    return Question(session.question(message.removeprefix("/") if message.startswith("//") else message))


def completions(line: str) -> list[str]:
    """Return the completions of the beginning of a line."""
    name, space, argument = line.partition(" ")
    if not line.startswith("/"):
        return []
    if not space:
        return sorted(each for each in BY_NAME if each.startswith(name))
    return [f"{name} {each}" for each in BY_NAME[name].complete(argument)] if name in BY_NAME else []


def run_command(session: ChatSession, line: str) -> Told:
    """Run a slash command, and return its output or its question to the model.

    Raises InvalidRequestError for a command that is unknown or fails.
    """
    typed, _, argument = line.strip().partition(" ")
    command = BY_NAME.get(typed)
    if command is None:
        near = difflib.get_close_matches(typed, BY_NAME, n=1)
        raise InvalidRequestError(
            f"there is no command {typed}: " + (f"did you mean {near[0]}?" if near else "/help lists them")
        )
    return command.run(session, argument.strip())


def _help(session: ChatSession, argument: str) -> str:
    aliases = [f" (also {', '.join(each.aliases)})" if each.aliases else "" for each in COMMANDS]
    commands = [(each.usage, each.meaning + also) for each, also in zip(COMMANDS, aliases, strict=True)]
    return text_of_rows([*commands, *KEYS])


def _regenerate(session: ChatSession, argument: str) -> Question:
    asked = session.last_question()
    params = replace(session.params, seed=_whole_number(argument, "/regenerate SEED") if argument else None)
    is_same = session.params.is_greedy
    return Question(asked, "(temperature is 0, so the answer is the same: /set temperature 0.7)" * is_same, params)


def _edit(session: ChatSession, argument: str) -> Question | Edit:
    *before, question = session.last_question()
    if argument:
        return Question([*before, {**question, "content": argument}])
    return Edit(before, question["content"])


def _reset(session: ChatSession, argument: str) -> str:
    session.reset()
    return "(a new conversation)"


def _undo(session: ChatSession, argument: str) -> str:
    return "(forgot the last question and its answer)" if session.undo() else "(nothing was asked)"


def _history(session: ChatSession, argument: str) -> str:
    return "\n".join(map(_shown, session.messages)) or "(no messages yet)"


def _system(session: ChatSession, argument: str) -> str:
    if not argument:
        system = [message["content"] for message in session.messages if message["role"] == "system"]
        return system[0] if system else "(no system message; /system TEXT sets one, /system none removes it)"
    session.set_system("" if argument.lower() in OFF else argument)
    return "(system message set)" if session.messages[:1] and argument.lower() not in OFF else "(no system message)"


def _set(session: ChatSession, argument: str) -> str:
    name, _, text = argument.partition(" ")
    if not name:
        return text_of_rows([(name, f"{value}") for name, value in params_to_json(session.params).items()])
    if not text.strip():
        raise InvalidRequestError(f"/set {name} needs a value, as in /set temperature 0.7")
    session.set_parameter(name, text.strip())
    return ""


def _model(session: ChatSession, argument: str) -> str:
    if not argument:
        return "\n".join([f"  {session.name}; available models:", *(f"  {name}" for name in complete_model(""))])
    session.switch_model(argument)
    return f"({session.name}, context {session.model.max_seq_len} tokens)"


def _tools(session: ChatSession, argument: str) -> str:
    if argument.lower() in OFF:
        session.tools = []
    elif argument:
        session.tools = _tools_in(_path(argument, "/tools"))
    names = [tool["function"]["name"] for tool in session.tools]
    return f"(the model may call {', '.join(names)})" if names else "(no tools; /tools FILE.json adds tools)"


def _tools_in(path: Path) -> list[dict[str, Any]]:
    """Return the schemas in a file, in the format of OpenAI's requests. Raises InvalidRequestError."""
    text = read_text(path, "the file of tools", MAX_GRAMMAR_BYTES)
    try:
        return [tool.as_given() for tool in read_tools(json.loads(text))]
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{path} must contain a JSON list of functions: {error}") from error


def _result(session: ChatSession, argument: str) -> str | Question:
    if not argument:
        raise InvalidRequestError("/result needs a text, the result of the call; a message continues without it")
    session.add_result(argument)
    return calls_shown(session) if session.open_calls() else Question(session.messages)


def calls_shown(session: ChatSession) -> str:
    """Return the calls that wait for results, one line per call."""
    lines = [shortened(f"call {_call(each)}", SHORT) for each in session.open_calls()]
    return "\n".join([*lines, "(/result TEXT answers the first call, a message continues without)"] if lines else [])


def _reasoning(session: ChatSession, argument: str) -> str:
    return session.last_answer().result.reasoning or "(the last answer has no reasoning)"


def _trace(session: ChatSession, argument: str) -> Table:
    """Return the table of `infer sample-trace`."""
    trace = session.trace(_whole_number(argument, "/trace N") if argument else 1)
    return Table(list(trace_lines(trace, columns_of(sys.stderr) or None)))


def _link(session: ChatSession, argument: str) -> Table:
    return Table([session.permalink()])


def _save(session: ChatSession, argument: str) -> str:
    path = _path(argument, "/save")
    session.save(path)
    return f"(saved to {argument}{': the messages only' if is_json_name(path) else ''})"


def _load(session: ChatSession, argument: str) -> str:
    session.load(_path(argument, "/load"))
    asked = session.question_indices()[-TURNS_AFTER_LOAD:]
    last = session.messages[asked[0] :] if asked else []
    reminder = [shortened(" ".join(_shown(message).split())[: 2 * SHORT], SHORT) for message in last]
    return "\n".join([f"(loaded {len(session.messages)} messages from {argument})", *reminder])


def _stats(session: ChatSession, argument: str) -> str:
    if session.last is None:
        return "(no answer yet)"
    last = session.last.result
    from_disk = f", {last.disk_tokens} of these from disk" if last.disk_tokens else ""
    used = f"{session.context_tokens} of {session.model.max_seq_len} tokens"
    return "\n".join(
        [
            f"  answers {session.num_answers}, {session.num_tokens} tokens, {session.seconds:.1f} s",
            f"  context {used}, seed of the last answer {last.seed}",
            f"  last prompt {last.prompt_tokens} tokens, {last.reused_tokens} of them reused{from_disk}",
            f"  last answer {last.generated_tokens} tokens, first token after {1000 * last.timing.ttft_s:.0f} ms, "
            f"{rate_text(last.timing)}, ended by {last.finish_reason}",
        ]
    )


def _quit(session: ChatSession, argument: str) -> str:
    raise Leave


def _shown(message: dict[str, Any]) -> str:
    """Return a message as it was shown when it was typed or answered."""
    sign = {"user": "> ", "assistant": ""}.get(message["role"], f"[{message['role']}] ")
    calls = [f"call {_call(each)}" for each in message.get("tool_calls", [])]
    return "\n".join([sign + message["content"]] * bool(message["content"] or not calls) + calls)


def _call(call: dict[str, Any]) -> str:
    return f"{call['function']['name']} {' '.join(call['function']['arguments'].split())}"


def _whole_number(text: str, usage: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise InvalidRequestError(f"{usage} needs a whole number, got {text!r:.40}") from None


def _path(argument: str, command: str) -> Path:
    if not argument:
        raise InvalidRequestError(f"{command} needs a file name")
    try:
        return Path(argument).expanduser()
    except RuntimeError as error:
        raise InvalidRequestError(f"{argument}: {error}") from error


COMMANDS = (
    ChatCommand("/help", "this list", _help, ("/?",)),
    ChatCommand("/regenerate [SEED]", "answer the last question again, with another seed or this one", _regenerate,
            ("/retry",)),
    ChatCommand("/edit [TEXT]", "rephrase the last question: as TEXT, in $EDITOR, or at the prompt", _edit),
    ChatCommand("/undo", "forget the last question and its answer", _undo),
    ChatCommand("/reset", "forget the conversation, keep the system message", _reset, ("/clear", "/new")),
    ChatCommand("/history", "show the conversation", _history),
    ChatCommand("/system TEXT", "set the system message; /system none removes it", _system,
            complete=lambda typed: [OFF[0]] * OFF[0].startswith(typed)),
    ChatCommand("/set NAME VALUE", "change a sampling parameter, as in /set temperature 0.7; /set lists all", _set,
            complete=complete_parameter),
    ChatCommand("/model NAME", "continue with another model; /model lists them", _model, complete=complete_model),
    ChatCommand("/tools FILE.json", "let the model call functions, in OpenAI's format; /tools off removes them", _tools,
            complete=partial(complete_file, is_meant=is_json_name)),
    ChatCommand("/result TEXT", "give the result of a call, because nothing is run", _result),
    ChatCommand("/reasoning", "show the reasoning before the last answer", _reasoning),
    ChatCommand("/trace [N]", "show how the N-th token of the last answer was chosen", _trace),
    ChatCommand("/link", "show a permalink of the last answer, for infer replay and the server's page", _link),
    ChatCommand("/save FILE", "save the conversation and the model's cache; FILE.json: only the messages", _save,
            complete=complete_file),
    ChatCommand("/load FILE", "continue a saved conversation", _load,
            complete=partial(complete_file, is_meant=is_saved_chat)),
    ChatCommand("/stats", "show tokens and times", _stats),
    ChatCommand("/quit", "leave the chat, like Ctrl-D", _quit, ("/exit", "/bye", "/q")),
)  # fmt: skip
BY_NAME = {name: command for command in COMMANDS for name in (command.usage.split()[0], *command.aliases)}
