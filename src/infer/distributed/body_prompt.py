"""The facts about a request's body that a router needs: roughly how long its prompt is, and how it begins."""

from hashlib import blake2b
from typing import Any

import msgspec

from infer.distributed.router import RoutedPrompt, text_keys

_FIELDS = ("tools", "system", "instructions", "messages", "prompt", "input")  # of OpenAI's and Anthropic's bodies
_BYTES_PER_TOKEN, _KEY_BYTES = 4, 16
_ANSWER_TOKENS, _ANSWER_COST = 150, 8.0  # of a usual answer; what a token of it costs in tokens of a prompt


def prompt_of_body(body: bytes, session: str, tenant: str) -> RoutedPrompt:
    """Return the prompt for the router. Caches are shared only within one tenant.

    A body without a `session` may name one as its `prompt_cache_key`.
    """
    try:
        fields: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        fields = None  # the replica refuses the body
    if not isinstance(fields, dict):
        return RoutedPrompt(0)
    text = msgspec.json.encode([fields.get(name) for name in _FIELDS])
    named = session or str(fields.get("prompt_cache_key") or "")
    digest = blake2b(f"{tenant}\0{named}".encode(errors="surrogatepass"), digest_size=_KEY_BYTES)
    return RoutedPrompt(
        num_tokens=len(text) // _BYTES_PER_TOKEN,
        keys=text_keys(text, tenant.encode()),
        session=digest.hexdigest() if named else "",  # a client's name may be as long as a body
        answer=_ANSWER_TOKENS * _ANSWER_COST,
    )
