"""What can be typed in a chat beside messages: commands that begin with a slash."""

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from infer.cli.chat_session import OFF, ChatSession, Messages, is_json_name, params_to_json
from infer.cli.report import rate_text
from infer.cli.words import shortened
from infer.errors import InvalidRequestError

TURNS_AFTER_LOAD = 2
SHORT = 160  # columns of a message that is shown as a reminder


@dataclass(frozen=True)
class Question:
    """What a command asks of the model, and what to say before."""

    messages: Messages
    remark: str = ""


@dataclass(frozen=True)
class Command:
    """How it is written, what it does, the function that does it, and its other names."""

    usage: str
    meaning: str
    run: Callable[[ChatSession, str], str | Question]
    aliases: tuple[str, ...] = ()


class Leave(Exception):  # noqa: N818
    """/quit was typed."""


def is_command(message: str) -> bool:
    """One line that begins with one slash. Two slashes begin a message, and so does a slash in a pasted block."""
    return message.startswith("/") and not message.startswith("//") and "\n" not in message


def run_command(session: ChatSession, line: str) -> str | Question:
    """Run a slash command; what it shows, or asks. Raises InvalidRequestError for one that is unknown or fails."""
    typed, _, argument = line.strip().partition(" ")
    command = BY_NAME.get(typed)
    if command is None:
        near = difflib.get_close_matches(typed, BY_NAME, n=1)
        raise InvalidRequestError(
            f"no command {typed}: " + (f"did you mean {near[0]}?" if near else "/help lists them")
        )
    return command.run(session, argument.strip())


def _help(session: ChatSession, argument: str) -> str:
    lines = []
    for command in COMMANDS:
        also = f" (also {', '.join(command.aliases)})" if command.aliases else ""
        lines.append(f"  {command.usage:<16} {command.meaning}{also}")
    lines.append('  \\ at a line\'s end, or """ before and after: several lines; so is what you paste')
    lines.append("  // begins a message with /; Ctrl-C stops an answer, Ctrl-D leaves")
    return "\n".join(lines)


def _retry(session: ChatSession, argument: str) -> Question:
    asked = session.last_question()
    if session.params.is_greedy:
        return Question(asked, "(temperature is 0, so the answer is the same: /set temperature 0.7)")
    if session.params.seed is not None:
        return Question(asked, f"(seed {session.params.seed} is set, so the answer is the same: /set seed off)")
    return Question(asked)


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
        return "\n".join(f"  {name} = {value}" for name, value in params_to_json(session.params).items())
    if not text.strip():
        raise InvalidRequestError(f"/set {name} needs a value, as in /set temperature 0.7")
    session.set_parameter(name, text.strip())
    return ""


def _save(session: ChatSession, argument: str) -> str:
    path = _path(argument, "/save")
    session.save(path)
    return f"(saved to {argument}{': the messages only' if is_json_name(path) else ''})"


def _load(session: ChatSession, argument: str) -> str:
    session.load(_path(argument, "/load"))
    asked = [index for index, message in enumerate(session.messages) if message["role"] == "user"]
    last = session.messages[asked[-TURNS_AFTER_LOAD:][0] :] if asked else []
    reminder = [shortened(" ".join(_shown(message).split())[: 2 * SHORT], SHORT) for message in last]
    return "\n".join([f"(loaded {len(session.messages)} messages from {argument})", *reminder])


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
            f"{rate_text(last.timing)}, ended by {last.finish_reason}",
        ]
    )


def _quit(session: ChatSession, argument: str) -> str:
    raise Leave


def _shown(message: dict[str, str]) -> str:
    """As it looked when it was typed or answered."""
    sign = {"user": "> ", "assistant": ""}.get(message["role"], f"[{message['role']}] ")
    return sign + message["content"]


def _path(argument: str, command: str) -> Path:
    if not argument:
        raise InvalidRequestError(f"{command} needs a file name")
    try:
        return Path(argument).expanduser()
    except RuntimeError as error:
        raise InvalidRequestError(f"{argument}: {error}") from error


COMMANDS = (
    Command("/help", "this list", _help, ("/?",)),
    Command("/retry", "answer the last question again, with another seed", _retry, ("/regenerate",)),
    Command("/undo", "forget the last question and its answer", _undo),
    Command("/reset", "forget the conversation, keep the system message", _reset, ("/clear", "/new")),
    Command("/history", "show the conversation", _history),
    Command("/system TEXT", "set the system message; none removes it", _system),
    Command("/set NAME VALUE", "change a sampling parameter, as in /set temperature 0.7; /set lists", _set),
    Command("/save FILE", "write the conversation and the model's cache; FILE.json: the messages only", _save),
    Command("/load FILE", "go on with a saved conversation", _load),
    Command("/stats", "tokens and times", _stats),
    Command("/quit", "leave, as Ctrl-D does", _quit, ("/exit", "/bye", "/q")),
)
BY_NAME = {name: command for command in COMMANDS for name in (command.usage.split()[0], *command.aliases)}
