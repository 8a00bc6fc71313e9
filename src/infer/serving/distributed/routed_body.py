"""A body in the process that clients talk to: its prompt for the router, and a seed if it has none."""

import secrets
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec

from infer.sampling_params import SEED_BITS
from infer.serving.distributed.router import RoutedPrompt, text_keys
from infer.serving.protocols.fields import check_body

# Fields with prompts in the bodies of all APIs.
_FIELDS = ("tools", "system", "instructions", "messages", "input_prefix", "prompt", "input")
_PROMPTS = ("prompt", "suffix", "messages", "input")
_BYTES_PER_TOKEN, _KEY_BYTES = 4, 16
_ANSWER_TOKENS, _ANSWER_COST = 150, 8.0  # tokens of a usual answer; cost of its token in tokens of a prompt
_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


class RoutedBody(NamedTuple):
    """A request's body. If it `is_repeatable`, a stream that is requested again has the same events.

    A body of Ollama that is `without_prompt` only loads its model, or unloads it if `keep_alive` is 0.
    """

    content: bytes
    prompt: RoutedPrompt
    is_repeatable: bool
    model: str | None = None  # None: the body names no model
    keep_alive: float | str | None = None
    without_prompt: bool = False


def read_routed(content: bytes, session: str, tenant: str, *, is_repeatable: bool) -> RoutedBody:
    """Return the body of a request. A repeatable one gets a random seed if it has none.

    Caches are shared only within one tenant. A body without a `session` may name one as its `prompt_cache_key`. Raises
    BodyError if the body exceeds the limits of bodies.
    """
    check_body(content)
    try:
        fields: Any = msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError):
        fields = None
    if not isinstance(fields, dict):  # unchanged, because the replica's refusal names its bytes
        return RoutedBody(content, RoutedPrompt(0), is_repeatable)
    if is_repeatable and fields.get("seed") is None:
        content = msgspec.json.encode({**_decoder.decode(content), "seed": secrets.randbits(SEED_BITS)})
    model, text = fields.get("model"), msgspec.json.encode([fields.get(name) for name in _FIELDS])
    named = session or str(fields.get("prompt_cache_key") or "")
    digest = blake2b(f"{tenant}\0{named}".encode(errors="surrogatepass"), digest_size=_KEY_BYTES)
    prompt = RoutedPrompt(
        num_tokens=len(text) // _BYTES_PER_TOKEN,
        keys=text_keys(text, tenant.encode()),
        session=digest.hexdigest() if named else "",  # hashed, because a client's name may be as long as a body
        answer=_ANSWER_TOKENS * _ANSWER_COST,
    )
    keep_alive = given if type(given := fields.get("keep_alive")) in (int, float, str) else None
    without_prompt = not any(fields.get(name) for name in _PROMPTS)
    return RoutedBody(
        content, prompt, is_repeatable, model if isinstance(model, str) else None, keep_alive, without_prompt
    )
