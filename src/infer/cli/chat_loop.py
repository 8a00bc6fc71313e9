"""The terminal chat: read messages, show answers while they are generated, and run commands that begin with a slash.

At a terminal, the input is an editor; elsewhere, it is plain lines. SIGTERM always ends the chat. Ctrl-C stops an
answer at a terminal, and ends the chat if there is no terminal.
"""

import errno
import os
import select
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from importlib import import_module
from threading import Thread
from typing import Any, final

import click

import infer
from infer.cli.chat_commands import ChatInput, Edit, Leave, Question, Table, calls_shown, completions, run_message
from infer.cli.chat_session import ChatSession
from infer.cli.command_options import ChatOptions
from infer.cli.commands.generate_command import rate_text
from infer.cli.model_loading import check_options, q8_context
from infer.cli.process_streams import Terminated, cancel_on_signal, keys_hidden, waking_on_signals
from infer.cli.prompts import merge_params, model_defaults
from infer.cli.streamed_text import MarkdownStyle, WordWrap
from infer.cli.terminal import (
    PrefillLine,
    TextWriter,
    columns_of,
    experts_remark,
    has_cursor,
    has_styles,
    note,
    q8_remark,
)
from infer.compute.sampling.keywords import default_params
from infer.errors import ContextLengthError, InferError, InvalidRequestError
from infer.outputs import GenerationResult
from infer.sampling_params import SamplingParams

PASTE_SECONDS = 0.05  # lines that arrive within this time were pasted, because nobody types so fast


def is_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def _editor() -> Any:
    """Return the class `ChatPrompt`, an editor, if this is a terminal and the extra `chat` is installed, else None."""
    if not (is_terminal() and has_cursor(sys.stdout)):
        return None
    try:
        return import_module("infer.cli.chat_prompt").ChatPrompt
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("prompt_toolkit"):
            raise
        return None


@final
class PlainInput(ChatInput):
    """Reads lines from stdin without an editor."""

    def __init__(self) -> None:
        self.is_interactive = is_terminal()
        self._unread, self._is_at_end = b"", False

    def discard(self) -> bool:
        self._unread = b""
        click.echo(err=True)
        return True

    def message(self, begin: str) -> str | None:
        text = self._line("> ")
        if text is None:
            if self.is_interactive:
                click.echo(err=True)
            return None
        if self.is_interactive and not text.startswith("/") and self._is_ready(PASTE_SECONDS):
            while self._is_ready(PASTE_SECONDS) and (following := self._line("")) is not None:
                text = f"{text}\n{following}"
            return text.strip("\n")
        while self.is_open_block(text) or text.endswith("\\"):
            following = self._line("| ")
            text = text if self.is_open_block(text) else text.removesuffix("\\")
            if following is None:
                break
            text = f"{text}\n{following}"
        return self.message_of(text)

    def _line(self, prompt: str) -> str | None:
        """Return the next line without its end, or None at the end of input."""
        if self.is_interactive:
            click.echo(prompt, nl=False)
        while b"\n" not in self._unread and not self._is_at_end:
            if self._is_ready():
                self._take()
        if not self._unread:
            return None
        line, _, self._unread = self._unread.partition(b"\n")
        try:
            return line.decode()
        except UnicodeDecodeError as error:
            raise click.UsageError(f"stdin is not UTF-8: byte {error.start} of a line is invalid") from error

    def _is_ready(self, seconds: float | None = None) -> bool:
        """Return True if there is input within the time. A signal ends the wait, after its handler has run."""
        if b"\n" in self._unread:
            return True
        try:
            with waking_on_signals() as woken:
                ready, _, _ = select.select([sys.stdin, woken], [], [], seconds)
        except (OSError, ValueError):  # no descriptor: the caller replaced the stream
            return True
        return sys.stdin in ready

    def _take(self) -> None:
        """Append the available input to the unread bytes."""
        try:
            taken = os.read(sys.stdin.fileno(), 65536)
        except ValueError:
            taken, self._is_at_end = sys.stdin.read().encode(), True
        except OSError as error:
            if error.errno != errno.EIO:  # EIO: the terminal is gone
                raise click.UsageError(f"stdin cannot be read: {error.strerror}") from error
            taken = b""
        self._unread += taken
        self._is_at_end |= not taken


def run_chat(options: ChatOptions, given: Mapping[str, Any], load: Callable[[ChatOptions], "infer.LLM"]) -> int:
    """Run the chat and return the exit status. `given` are the parameters of the command line."""
    quiet = options.quiet
    Thread(target=_editor, daemon=True).start()  # imports the packages of the extra `chat` ahead

    def open_model(name: str) -> "tuple[infer.LLM, SamplingParams]":
        own = replace(options, model=name)
        check_options(own, [default_params({}, given, is_chat=True)])
        model = load(own)
        if not model.can_chat or model.architecture.reads_whole_texts:
            model.close()
            template = "has no chat template: use infer generate for plain text, or an instruct version of the model"
            encoder = "is an encoder and generates no text: use infer embed, rerank or classify"
            problem = encoder if model.architecture.reads_whole_texts else template
            raise InvalidRequestError(f"the model {name} {problem}")
        return model, merge_params(model_defaults(model, vars(own)), given, is_chat=True, quiet=quiet)

    model, params = open_model(options.model)
    session = ChatSession(model, options.model, params, system=options.system, open_model=open_model)
    return converse(session, quiet=quiet, plain=options.plain)


def converse(session: ChatSession, *, quiet: bool = False, plain: bool = False) -> int:
    """Run a session from stdin to stdout and return the exit status. Output is styled only if both are terminals."""
    editor = _editor()
    typed: ChatInput = PlainInput() if editor is None else editor(completions)
    if typed.is_interactive and not quiet:
        note(f"{session.name}, context {session.model.max_seq_len} tokens. /help lists commands, Ctrl-D leaves.")
        if context := q8_context(session.model):
            note(q8_remark(context))
        if (experts := session.model.host.model.experts) is not None:
            note(experts_remark(experts.memory_bytes, experts.path))
    while (message := typed.read("/result " * bool(session.open_calls()))) is not None:
        try:
            _turn(session, message, typed, quiet=quiet, plain=plain)
        except Leave:
            break
        except ContextLengthError as error:
            note(f"infer: the conversation no longer fits: {error}. /reset begins a new one")
        except InferError as error:
            note(f"infer: {error}")
    return 0


def _turn(session: ChatSession, message: str, typed: ChatInput, *, quiet: bool, plain: bool) -> None:
    asked = _asked(session, message, typed)
    if isinstance(asked, str):
        note(asked)
    elif isinstance(asked, Table):
        click.echo("\n".join(asked.lines), err=True, color=has_styles(sys.stderr))
    else:
        note(asked.remark)
        result = _answer(session, asked, interactive=typed.is_interactive, plain=plain)
        note(calls_shown(session))
        if not quiet:
            _tell_end(result, interactive=typed.is_interactive)


def _asked(session: ChatSession, message: str, typed: ChatInput) -> str | Question | Table:
    if not message.strip():
        return ""
    asked = run_message(session, message)
    if not isinstance(asked, Edit):
        return asked
    text = _edited(asked.text, typed)
    return Question([*asked.before, {"role": "user", "content": text}]) if text else "(no question)"


def _edited(text: str, typed: ChatInput) -> str:
    """Return the text from the user's editor or from the prompt, or "" if the user entered nothing.

    Raises InvalidRequestError.
    """
    if not typed.is_interactive:
        raise InvalidRequestError("/edit needs a text if there is no terminal: /edit TEXT")
    if not (os.environ.get("VISUAL") or os.environ.get("EDITOR")):
        return (typed.read(text) or "").strip()
    try:
        return (click.edit(text, extension=".md") or "").strip()
    except click.ClickException as error:
        raise InvalidRequestError(error.format_message()) from error


def _tell_end(result: GenerationResult, *, interactive: bool) -> None:
    if result.finish_reason == "abort":
        note("(stopped)")
    elif result.stop_reason == "context":
        note("(the context is full: /reset begins a new conversation)")
    elif result.finish_reason == "length":
        note("(cut at max_new_tokens: /set max_new_tokens N)")
    if result.reasoning:
        note(f"(thought for {result.reasoning_tokens} tokens: /reasoning shows it)")
    if interactive:
        timing = result.timing
        rate = "" if timing.decode_tokens_per_second is None else f", {rate_text(timing)}"
        note(f"{result.generated_tokens} tokens, first token after {1000 * timing.ttft_s:.0f} ms{rate}")


def _answer(session: ChatSession, asked: Question, *, interactive: bool, plain: bool) -> GenerationResult:
    is_styled = interactive and not plain and has_styles(sys.stdout)
    wrap = WordWrap(lambda: columns_of(sys.stdout)) if interactive else None
    writer = TextWriter(sys.stdout, wrap, MarkdownStyle() if is_styled else None)
    sign = PrefillLine(shown=interactive, is_chat=True)

    def on_text(text: str) -> None:
        if text:
            sign.close()
            writer.write(text)
        else:
            sign.count_token()

    with keys_hidden() if interactive else nullcontext(), cancel_on_signal() as cancellation:
        try:
            result = session.ask(
                asked.messages, on_text, params=asked.params, on_prefill=sign.show, cancel=cancellation.event
            )
        finally:
            sign.close()
            writer.end_line()
            if cancellation.signal_number == signal.SIGTERM:
                raise Terminated
    if cancellation.signal_number == signal.SIGTERM:  # it arrived after the last check
        raise Terminated
    if cancellation.signal_number is not None and not interactive:
        raise KeyboardInterrupt
    return result
