"""The terminal chat: read messages, show answers while they are generated, and run commands that begin with a slash.

SIGTERM always ends the chat. Ctrl-C stops an answer at a terminal, and ends the chat if there is no terminal.
"""

import os
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import click

import infer
from infer.cli.answers.answer_report import rate_text
from infer.cli.chat.chat_commands import (
    Edit,
    Leave,
    Question,
    Rows,
    Table,
    calls_shown,
    completions,
    is_command,
    run_command,
)
from infer.cli.chat.chat_input import ChatInput, chat_input, import_ahead
from infer.cli.chat.chat_session import ChatSession, Opened
from infer.cli.options.command_options import ChatOptions
from infer.cli.options.option_checks import check_options
from infer.cli.options.sampling_options import merge_params, model_defaults
from infer.cli.terminal.hidden_keys import keys_hidden
from infer.cli.terminal.markdown import MarkdownStyle
from infer.cli.terminal.signals import Terminated, cancel_on_signal
from infer.cli.terminal.terminal import PrefillLine, TextWriter, columns_of, has_cursor, note, note_rows
from infer.cli.terminal.wrapping import WordWrap
from infer.compute.sampling.defaults import neutral_values
from infer.errors import ContextLengthError, InferError, InvalidRequestError
from infer.outputs import GenerationResult
from infer.sampling_params import SamplingParams


def run_chat(options: ChatOptions, given: Mapping[str, Any], load: Callable[[ChatOptions], "infer.LLM"]) -> int:
    """Run the chat and return the exit status. `given` are the parameters of the command line."""
    quiet = options.quiet
    import_ahead()

    def open_model(name: str) -> Opened:
        own = replace(options, model=name)
        check_options(own, [SamplingParams.from_mapping({**neutral_values(is_chat=True), **given})])
        model = load(own)
        if model.architecture.reads_whole_texts:
            model.close()
            raise InvalidRequestError(
                f"the model {name} is an encoder and generates no text: use infer embed, rerank or classify"
            )
        if not model.can_chat:
            model.close()
            raise InvalidRequestError(
                f"the model {name} has no chat template: use infer generate for plain text, or an instruct "
                "version of the model"
            )
        return Opened(model, merge_params(model_defaults(model, vars(own)), given, is_chat=True, quiet=quiet))

    model, params = open_model(options.model)
    session = ChatSession(model, options.model, params, system=options.system, open_model=open_model)
    return converse(session, quiet=quiet, plain=options.plain)


def converse(session: ChatSession, *, quiet: bool = False, plain: bool = False) -> int:
    """Run a session from stdin to stdout and return the exit status. Output is styled only if both are terminals."""
    with chat_input(completions) as typed:
        if typed.is_interactive and not quiet:
            note(f"{session.name}, context {session.model.max_seq_len} tokens. /help lists commands, Ctrl-D leaves.")
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
    elif isinstance(asked, Rows):
        note_rows(asked.rows)
    elif isinstance(asked, Table):
        has_styles = has_cursor(sys.stderr) and not os.environ.get("NO_COLOR")
        click.echo("\n".join(asked.lines), err=True, color=has_styles)
    else:
        note(asked.remark)
        result = _answer(session, asked, interactive=typed.is_interactive, quiet=quiet, plain=plain)
        note(calls_shown(session))
        if not quiet:
            _tell_end(result, interactive=typed.is_interactive)


def _asked(session: ChatSession, message: str, typed: ChatInput) -> str | Question | Rows | Table:
    if not message.strip():
        return ""
    if not is_command(message):
        return Question(session.question(message.removeprefix("/") if message.startswith("//") else message))
    asked = run_command(session, message)
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


def _answer(session: ChatSession, asked: Question, *, interactive: bool, quiet: bool, plain: bool) -> GenerationResult:
    is_styled = interactive and not plain and has_cursor(sys.stdout) and not os.environ.get("NO_COLOR")
    wrap = WordWrap(lambda: columns_of(sys.stdout)) if interactive else None
    writer = TextWriter(sys.stdout, wrap, MarkdownStyle() if is_styled else None)
    sign = PrefillLine(shown=interactive and not quiet, is_chat=True)

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
