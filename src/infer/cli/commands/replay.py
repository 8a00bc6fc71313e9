"""`infer replay`: generate a permalink's answer again, with the same bits if the model is the same.

The body is read as the server's routes read it.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import msgspec

import infer
from infer.cli.commands.permalink import Permalink, sha256_of
from infer.cli.terminal.process_streams import cancel_on_signal
from infer.cli.terminal.terminal import PrefillLine, TextWriter, json_text
from infer.engine.requests.ask import Ask
from infer.errors import InvalidRequestError
from infer.models.catalog.models_at_hand import models_at_hand
from infer.serving.protocols.fields import BodyError, read_body
from infer.serving.protocols.openai.ask import ChatBody, CompletionBody, ask_chat, ask_text, complete_chat
from infer.serving.protocols.params import Served, refuse_unless_neutral

DIFFERENT = 1  # exit status


def read_request(link: Permalink) -> ChatBody | CompletionBody:
    """Return the permalink's body, checked as far as possible without the model. Raises InvalidRequestError."""
    content = msgspec.json.encode(link.body)
    with _naming_the_body():
        if link.route == "/v1/chat/completions":
            return read_body(content, ChatBody, complete_chat)
        body = read_body(content, CompletionBody)
        refuse_unless_neutral(body, {"echo": (False,)})
        return body


@contextmanager
def _naming_the_body() -> Iterator[None]:
    try:
        yield
    except BodyError as error:
        raise InvalidRequestError(f"the permalink's body: {error}") from error


def model_of(link: Permalink, otherwise: str, *, quiet: bool) -> str:
    """Return the link's own model if it is on this machine, else `otherwise`.

    A link never starts a download and never opens any other file.
    """
    name = link.body.get("model", otherwise)
    if any(model.name == name for model in models_at_hand()):
        return str(name)
    if not quiet:
        print(
            f"the permalink's model {name!r:.80} is not on this machine: {otherwise} answers (-m names another model)",
            file=sys.stderr,
        )
    return otherwise


def run_replay(llm: "infer.LLM", link: Permalink, body: ChatBody | CompletionBody, *, quiet: bool) -> int:
    """Generate the answer again, and return the exit status: 0 if it is the same."""
    asked = _asked(llm, body)
    writer, line = TextWriter(sys.stdout), PrefillLine(shown=not quiet)

    def on_token(token_id: int, text: str) -> None:
        line.close()
        writer.write(text)

    host = llm._opened
    with cancel_on_signal() as cancellation:
        asked = replace(asked, options=replace(asked.options, cancel=cancellation.event))
        try:
            result = host.stream(host.requests.sequence(asked), line.show).run(on_token)
        finally:
            line.close()
    for call in result.tool_calls:
        writer.end_line()
        writer.write(json_text(call.to_json()))
    writer.end_line()
    if result.error is not None:
        raise InvalidRequestError(f"the answer ended early: {result.error}")
    if cancellation.exit_status:
        return cancellation.exit_status
    has_same_model = link.fingerprint in (None, llm.system_fingerprint)
    has_same_text = has_same_model if link.sha256 is None else link.sha256 == sha256_of(result.text)
    if not quiet:
        print("\n".join(_verdict(llm, link, asked, has_same_text=has_same_text)), file=sys.stderr)
    return 0 if has_same_text else DIFFERENT


def _asked(llm: "infer.LLM", body: ChatBody | CompletionBody) -> Ask:
    with _naming_the_body():
        served = Served(llm)
        asked = ask_chat(body, served) if isinstance(body, ChatBody) else ask_text(body, served)
    count = len(asked.prompts) * len(asked.params) if asked.is_answered else 0
    if count != 1:
        raise InvalidRequestError(f"the permalink's body must ask for one answer, got {count}")
    return asked


def _verdict(llm: "infer.LLM", link: Permalink, asked: Ask, *, has_same_text: bool) -> list[str]:
    ours = llm.system_fingerprint
    lines = ["the fingerprint is the same" if link.fingerprint == ours else
             f"the fingerprint is {ours}, the permalink's is {link.fingerprint or 'not there'}"]  # fmt: skip
    if link.sha256 is None:
        lines.append("the permalink has no hash of its answer")
    else:
        lines.append(f"the answer is {'the same' if has_same_text else 'another one'}")
    if link.body.get("seed") is None and not asked.params[0].is_greedy:
        lines.append("the permalink has no seed, so each answer is different")
    return lines
