"""A body in the process that clients talk to: its prompt for the router, and a seed if it has none."""

import secrets
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec

from infer.sampling_params import SEED_BITS
from infer.serving.distributed.router import RoutedPrompt, text_keys
from infer.serving.protocols.read_body import check_body

_FIELDS = (
    "tools",
    "system",
    "instructions",
    "messages",
    "input_prefix",
    "prompt",
    "input",
)  # fields with prompts in the bodies of all APIs
_BYTES_PER_TOKEN, _KEY_BYTES = 4, 16
_ANSWER_TOKENS, _ANSWER_COST = 150, 8.0  # tokens of a usual answer; cost of its token in tokens of a prompt
_NULL = msgspec.Raw(b"null")
_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


class _Named(msgspec.Struct):
    model: Any = None


_named_decoder = msgspec.json.Decoder(_Named)


class AskedBody(NamedTuple):
    """A request's body. If it `is_repeatable`, a stream that is requested again has the same events."""

    content: bytes
    prompt: RoutedPrompt
    is_repeatable: bool
    model: str | None = None  # None: the body names no model


def read_asked(content: bytes, session: str, tenant: str, *, is_repeatable: bool) -> AskedBody:
    """Return the body of a request. Raises BodyError if it exceeds the limits of bodies."""
    check_body(content)
    prompt = prompt_of_body(content, session, tenant)
    if not prompt.num_tokens:  # not a JSON object: unchanged, because the replica's refusal names its bytes
        return AskedBody(content, prompt, is_repeatable)
    model = _named_decoder.decode(content).model
    content = with_seed(content) if is_repeatable else content
    return AskedBody(content, prompt, is_repeatable, model if isinstance(model, str) else None)


def with_seed(content: bytes) -> bytes:
    """Return the body with a random seed if it has none.

    Content that is not a JSON object stays unchanged, because the replica refuses it.
    """
    try:
        fields = _decoder.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return content
    if bytes(fields.get("seed", _NULL)) != bytes(_NULL):
        return content
    return msgspec.json.encode({**fields, "seed": secrets.randbits(SEED_BITS)})


def prompt_of_body(body: bytes, session: str, tenant: str) -> RoutedPrompt:
    """Return the prompt for the router. Caches are shared only within one tenant.

    A body without a `session` may name one as its `prompt_cache_key`.
    """
    try:
        fields: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        fields = None  # the replica refuses the body
    if not isinstance(fields, dict):
        return RoutedPrompt(0)
    text = msgspec.json.encode([fields.get(name) for name in _FIELDS])
    named = session or str(fields.get("prompt_cache_key") or "")
    digest = blake2b(f"{tenant}\0{named}".encode(errors="surrogatepass"), digest_size=_KEY_BYTES)
    return RoutedPrompt(
        num_tokens=len(text) // _BYTES_PER_TOKEN,
        keys=text_keys(text, tenant.encode()),
        session=digest.hexdigest() if named else "",  # hashed, because a client's name may be as long as a body
        answer=_ANSWER_TOKENS * _ANSWER_COST,
    )
