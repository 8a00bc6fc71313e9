"""Permalinks, and `infer replay`: an answer again, with the same bits if the model is the same.

A permalink is a request to the server with its seed, and the values that show if another answer to it is the same. It
is `http://host/#r=` and base64url of JSON, as the server's page reads and writes it. Browsers send the part after `#`
to no host. The body is read as the server's routes read it.
"""

import base64
import binascii
import hashlib
import json
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self, final, get_args

import msgspec

import infer
from infer.cli.process_streams import cancel_on_signal
from infer.cli.prompts import Prompt, json_value
from infer.cli.terminal import PrefillLine, TextWriter, json_text
from infer.engine.requests.ask import Ask
from infer.engine.requests.prompt_encoding import is_conversation
from infer.errors import InvalidRequestError
from infer.models.catalog.models_at_hand import models_at_hand
from infer.outputs import GenerationResult
from infer.parameters import Number
from infer.request_limits import MAX_BIAS, MAX_STOPS
from infer.sampling_params import PARAMETERS, SamplingParams, signed
from infer.serving.protocols.bodies import Served, refuse_unless_neutral
from infer.serving.protocols.fields import BodyError, read_body
from infer.serving.protocols.openai.ask import ChatBody, CompletionBody
from infer.system.status_line import write_notice

Route = Literal["/v1/chat/completions", "/v1/completions"]
VERSION = 1
HOST = "http://127.0.0.1:8000/"  # the default address of `infer serve`
DIFFERENT = 1  # exit status


@final
@dataclass(frozen=True)
class Permalink:
    """A permalink. `body` is the body for the route. `sha256` is the hash of the answer's text."""

    route: Route
    body: Mapping[str, Any]
    fingerprint: str | None = None
    sha256: str | None = None

    @classmethod
    def of(cls, body: Mapping[str, Any], result: GenerationResult, fingerprint: str) -> Self:
        """Return the permalink of an answer to this body."""
        route: Route = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        seed = None if result.seed is None else signed(result.seed)
        return cls(route, {**body, "seed": seed}, fingerprint, sha256_of(result.text))

    @property
    def url(self) -> str:
        given = {name: value for name, value in asdict(self).items() if value is not None}
        content = json.dumps({"v": VERSION, **given}, ensure_ascii=False, separators=(",", ":"))
        return f"{HOST}#r={base64.urlsafe_b64encode(content.encode('utf-8', 'replace')).decode().rstrip('=')}"


def read_permalink(text: str) -> Permalink:
    """Return the permalink in a whole URL, or in the part after its `#`. Raises InvalidRequestError."""
    fragment = re.fullmatch(r"(?:.*#)?r=([^=]+)=*", "".join(text.split()))
    if fragment is None:
        raise InvalidRequestError(f"a permalink must end in #r=…, got {text.strip()!r:.80}")
    encoded = fragment[1]
    try:
        found = json.loads(base64.b64decode(encoded + "=" * (-len(encoded) % 4), b"-_", validate=True))
    except (binascii.Error, ValueError, RecursionError):
        raise InvalidRequestError("the permalink is damaged: the part after r= must be base64url of JSON") from None
    given = found if isinstance(found, dict) else {}
    checks = {
        "v": (given.get("v") == VERSION, f"{VERSION}"),
        "route": (given.get("route") in get_args(Route), " or ".join(get_args(Route))),
        "body": (isinstance(given.get("body"), dict), "an object"),
        "fingerprint": (isinstance(given.get("fingerprint"), str | None), "a string"),
        "sha256": (isinstance(given.get("sha256"), str | None), "a string"),
    }
    for name, (is_right, rule) in checks.items():
        if not is_right:
            fix = ": a newer version of infer may read it" if name == "v" else ""
            raise InvalidRequestError(f"the permalink's {name} must be {rule}, got {given.get(name)!r:.80}{fix}")
    return Permalink(given["route"], given["body"], given.get("fingerprint"), given.get("sha256"))


def sha256_of(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()


def body_of(prompt: Prompt, params: SamplingParams, model: str) -> dict[str, Any]:
    """Return the route's body for this answer, without its seed.

    Numbers are always included, because another server's model may have other defaults. Values that are off are left
    out. Raises InvalidRequestError for parameters that no route accepts.
    """
    body: dict[str, Any] = {"model": Path(model).name if Path(model).exists() else model}
    field = "messages" if is_conversation(prompt) else "prompt"
    body[field] = prompt if isinstance(prompt, str) else list(prompt)
    for name, declared in PARAMETERS.items():
        if declared.bodies or declared.body_name:
            value = getattr(params, name)
            if isinstance(declared.kind, Number) or declared.none or value:
                body[declared.body_name or name] = declared.none[-1] if value is None else json_value(value)
    _check_limits(params)
    return body | _schema(params)


def _check_limits(params: SamplingParams) -> None:
    """Raise InvalidRequestError for values that no route accepts."""
    if (count := len(params.stop or ())) > MAX_STOPS:
        raise InvalidRequestError(f"stop must have at most {MAX_STOPS} strings in a permalink, got {count}")
    for token_id, bias in (params.logit_bias or {}).items():
        if not abs(bias) <= MAX_BIAS:
            rule = f"from -{MAX_BIAS} to {MAX_BIAS}"
            raise InvalidRequestError(f"logit_bias must be {rule} in a permalink, got {token_id}={bias:g}")


def _schema(params: SamplingParams) -> dict[str, Any]:
    if params.json_schema is None:
        return {}
    schema = json.loads(str(params.json_schema))
    if not isinstance(schema, dict):
        raise InvalidRequestError(f"json_schema must be an object in a permalink, got {params.json_schema!r:.80}")
    named = {"name": "answer", "schema": schema, "strict": True}  # a schema that is not strict has its own mark
    return {"response_format": {"type": "json_schema", "json_schema": named}}


def read_request(link: Permalink) -> ChatBody | CompletionBody:
    """Return the permalink's body, checked as far as possible without the model. Raises InvalidRequestError."""
    content = msgspec.json.encode(link.body)
    with _naming_the_body():
        if link.route == "/v1/chat/completions":
            return read_body(content, ChatBody)
        body = read_body(content, CompletionBody)
        refuse_unless_neutral(body, {"echo": (False,)})
        return body


@contextmanager
def _naming_the_body() -> Iterator[None]:
    try:
        yield
    except BodyError as error:
        raise InvalidRequestError(f"the permalink's body: {error}") from error


def model_of(link: Permalink, otherwise: str) -> str:
    """Return the link's own model if it is on this machine, else `otherwise`.

    A link never starts a download and never opens any other file.
    """
    name = link.body.get("model", otherwise)
    if any(model.name == name for model in models_at_hand()):
        return str(name)
    write_notice(
        f"the permalink's model {name!r:.80} is not on this machine: {otherwise} answers (-m names another model)"
    )
    return otherwise


def run_replay(llm: "infer.LLM", link: Permalink, body: ChatBody | CompletionBody) -> int:
    """Generate the answer again, and return the exit status: 0 if it is the same."""
    asked = _asked(llm, body)
    writer, line = TextWriter(sys.stdout), PrefillLine()

    def on_token(token_id: int, text: str) -> None:
        line.close()
        writer.write(text)

    host = llm.host
    with cancel_on_signal() as cancellation, closing(line):
        asked = replace(asked, options=replace(asked.options, cancel=cancellation.event))
        result = host.loop.stream(host.requests.sequence(asked), line.show).run(on_token)
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
    write_notice("\n".join(_verdict(llm, link, asked, has_same_text=has_same_text)))
    return 0 if has_same_text else DIFFERENT


def _asked(llm: "infer.LLM", body: ChatBody | CompletionBody) -> Ask:
    with _naming_the_body():
        asked = body.ask(Served(llm))
        if not isinstance(asked, Ask):  # the prompt gets the marks of a suffix
            asked = asked()
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
