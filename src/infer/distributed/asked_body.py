"""A body in the process that clients talk to: its prompt, for the router, and a seed if it has none."""

import secrets
from typing import NamedTuple

import msgspec

from infer.distributed.body_prompt import prompt_of_body
from infer.distributed.router import RoutedPrompt
from infer.sampling_params import SEED_BITS

_NULL = msgspec.Raw(b"null")
_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


class AskedBody(NamedTuple):
    """A request's body. If it `is_repeatable`, a stream that is requested again has the same events."""

    content: bytes
    prompt: RoutedPrompt
    is_repeatable: bool


def read_asked(content: bytes, session: str, tenant: str, *, is_repeatable: bool) -> AskedBody:
    prompt = prompt_of_body(content, session, tenant)
    is_object = prompt.num_tokens > 0  # any other body stays as it is: the replica's refusal names its bytes
    return AskedBody(with_seed(content) if is_repeatable and is_object else content, prompt, is_repeatable)


def with_seed(content: bytes) -> bytes:
    """Return the body with a random seed if it has none.

    Content that is not a JSON object stays as it is, because the replica refuses it.
    """
    try:
        fields = _decoder.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return content
    if bytes(fields.get("seed", _NULL)) != bytes(_NULL):
        return content
    return msgspec.json.encode({**fields, "seed": secrets.randbits(SEED_BITS)})
