"""The terminal chat: reads messages, shows answers as they come, runs the commands that begin with a slash.

SIGTERM ends it always. Ctrl-C stops an answer at a terminal, and ends the chat where there is none.
"""

import signal
import sys

from infer.cli.chat_commands import BY_NAME, Leave, Question, is_command, run_command
from infer.cli.chat_session import ChatSession
from infer.cli.keyboard import keys_unseen
from infer.cli.lines import Lines
from infer.cli.report import rate_text
from infer.cli.terminal import Terminated, TextWriter, WaitingSign, cancel_on_signal, columns_of, note
from infer.cli.wrapping import WordWrap
from infer.errors import ContextLengthError, InferError
from infer.outputs import GenerationResult


def converse(session: ChatSession, *, quiet: bool = False) -> int:
    """The whole session, from stdin to stdout; decorated only where both are terminals. Returns the exit status."""
    with Lines(sorted(BY_NAME)) as lines:
        if lines.interactive and not quiet:
            note(f"{session.name}, context {session.model.max_seq_len} tokens. /help lists commands, Ctrl-D leaves.")
        while (message := lines.read()) is not None:
            try:
                _turn(session, message, interactive=lines.interactive, quiet=quiet)
            except Leave:
                break
            except ContextLengthError as error:
                note(f"infer: the conversation no longer fits: {error}. /reset begins a new one")
            except InferError as error:
                note(f"infer: {error}")
    return 0


def _turn(session: ChatSession, message: str, *, interactive: bool, quiet: bool) -> None:
    if is_command(message):
        asked = run_command(session, message)
    elif message.strip():
        asked = Question(session.question(message.removeprefix("/") if message.startswith("//") else message))
    else:
        return
    if isinstance(asked, str):
        note(asked)
        return
    note(asked.remark)
    result = _answer(session, asked, interactive=interactive, quiet=quiet)
    if quiet:
        return
    if result.finish_reason == "abort":
        note("(stopped)")
    elif result.stop_reason == "context":
        note("(the context is full: /reset begins a new conversation)")
    elif result.finish_reason == "length":
        note("(cut at max_new_tokens: /set max_new_tokens N)")
    if interactive:
        timing = result.timing
        rate = "" if timing.decode_tokens_per_second is None else f", {rate_text(timing)}"
        note(f"{result.generated_tokens} tokens, TTFT {1000 * timing.ttft_s:.0f} ms{rate}")


def _answer(session: ChatSession, asked: Question, *, interactive: bool, quiet: bool) -> GenerationResult:
    writer = TextWriter(sys.stdout, WordWrap(lambda: columns_of(sys.stdout)) if interactive else None)
    sign = WaitingSign(shown=interactive and not quiet)

    def on_text(text: str) -> None:
        if text:
            sign.close()
            writer.write(text)

    with keys_unseen(interactive), cancel_on_signal() as cancellation:
        try:
            result = session.ask(asked.messages, on_text, on_prefill=sign.progress, cancel=cancellation.event)
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
