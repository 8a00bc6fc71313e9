"""The terminal chat: read messages, show answers while they are generated, and run commands that begin with a slash.

SIGTERM always ends the chat. Ctrl-C stops an answer at a terminal, and ends the chat if there is no terminal.
"""

import os
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any

import click

from infer.cli.chat_commands import Edit, Leave, Question, Table, calls_shown, completions, is_command, run_command
from infer.cli.chat_session import ChatSession, Opened
from infer.cli.checks import check_options
from infer.cli.keyboard import keys_unseen
from infer.cli.lines import Lines
from infer.cli.markdown import MarkdownStyle
from infer.cli.model import Model
from infer.cli.report import rate_text
from infer.cli.sampling_options import merge_params, model_defaults
from infer.cli.terminal import Terminated, TextWriter, WaitingSign, cancel_on_signal, columns_of, has_cursor, note
from infer.cli.wrapping import WordWrap
from infer.errors import ContextLengthError, InferError, InvalidRequestError
from infer.outputs import GenerationResult
from infer.sampling.defaults import neutral_values
from infer.sampling_params import SamplingParams


def run_chat(options: Mapping[str, Any], given: Mapping[str, Any], load: Callable[[Mapping[str, Any]], Model]) -> int:
    """Run the chat and return the exit status. `given` are the parameters of the command line."""
    quiet = options["quiet"]

    def open_model(name: str) -> Opened:
        own = {**options, "model": name}
        check_options(own, [SamplingParams.from_mapping({**neutral_values(is_chat=True), **given})])
        model = load(own)
        if not model.can_chat:
            model.close()
            raise InvalidRequestError(
                f"the model {name} has no chat template: continue plain text with infer generate, or take an instruct "
                "version of the model"
            )
        return Opened(model, merge_params(model_defaults(model, own), given, is_chat=True, quiet=quiet))

    model, params = open_model(options["model"])
    session = ChatSession(model, options["model"], params, system=options["system"], open_model=open_model)
    return converse(session, quiet=quiet, plain=options["plain"])


def converse(session: ChatSession, *, quiet: bool = False, plain: bool = False) -> int:
    """Run a session from stdin to stdout and return the exit status. Output is styled only if both are terminals."""
    with Lines(completions) as lines:
        if lines.interactive and not quiet:
            note(f"{session.name}, context {session.model.max_seq_len} tokens. /help lists commands, Ctrl-D leaves.")
        while (message := lines.read("/result " * bool(session.open_calls()))) is not None:
            try:
                _turn(session, message, lines, quiet=quiet, plain=plain)
            except Leave:
                break
            except ContextLengthError as error:
                note(f"infer: the conversation no longer fits: {error}. /reset begins a new one")
            except InferError as error:
                note(f"infer: {error}")
    return 0


def _turn(session: ChatSession, message: str, lines: Lines, *, quiet: bool, plain: bool) -> None:
    asked = _asked(session, message, lines)
    if isinstance(asked, str):
        note(asked)
    elif isinstance(asked, Table):
        has_styles = has_cursor(sys.stderr) and not os.environ.get("NO_COLOR")
        click.echo("\n".join(asked.lines), err=True, color=has_styles)
    else:
        note(asked.remark)
        result = _answer(session, asked, interactive=lines.interactive, quiet=quiet, plain=plain)
        note(calls_shown(session))
        if not quiet:
            _tell_end(result, interactive=lines.interactive)


def _asked(session: ChatSession, message: str, lines: Lines) -> str | Question | Table:
    if not message.strip():
        return ""
    if not is_command(message):
        return Question(session.question(message.removeprefix("/") if message.startswith("//") else message))
    asked = run_command(session, message)
    if not isinstance(asked, Edit):
        return asked
    text = _edited(asked.text, lines)
    return Question([*asked.before, {"role": "user", "content": text}]) if text else "(nothing is asked)"


def _edited(text: str, lines: Lines) -> str:
    """Return the text from the user's editor or from the prompt, or "" if the user gave none.

    Raises InvalidRequestError.
    """
    if not lines.interactive:
        raise InvalidRequestError("/edit needs the new text where there is no terminal: /edit TEXT")
    if not (os.environ.get("VISUAL") or os.environ.get("EDITOR")):
        return (lines.read(text) or "").strip()
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


def _answer(session: ChatSession, asked: Question, *, interactive: bool, quiet: bool, plain: bool) -> GenerationResult:
    is_styled = interactive and not plain and has_cursor(sys.stdout) and not os.environ.get("NO_COLOR")
    wrap = WordWrap(lambda: columns_of(sys.stdout)) if interactive else None
    writer = TextWriter(sys.stdout, wrap, MarkdownStyle() if is_styled else None)
    sign = WaitingSign(shown=interactive and not quiet)

    def on_text(text: str) -> None:
        if text:
            sign.close()
            writer.write(text)
        else:
            sign.count_token()

    with keys_unseen(interactive), cancel_on_signal() as cancellation:
        try:
            result = session.ask(
                asked.messages, on_text, params=asked.params, on_prefill=sign.progress, cancel=cancellation.event
            )
        finally:
            sign.close()
            writer.end_line()
            if cancellation.signal_number == signal.SIGTERM:
                raise Terminated
    if cancellation.signal_number == signal.SIGTERM:  # it came after the last look
        raise Terminated
    if cancellation.signal_number is not None and not interactive:
        raise KeyboardInterrupt
    return result
