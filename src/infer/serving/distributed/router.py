"""Choose the replica of the least cost for a request, from the prompt in its body. No clock, no I/O.

    cost of a replica = tokens queued there
                        + 8 × tokens of the prompt that its cache does not have (all later requests wait for them)
                        + 0.2 × tokens that were sent to it recently (idle replicas share new conversations)

The contents of a cache are estimated from the sent prompts, by the keys of their first pages. With token ids, these are
`kvcache.page_rows.page_keys`, which the cache itself uses. Without a tokenizer, they are `text_keys`. The replica of a
session is assumed to have the whole prompt.

        router = Router(num_pages=4096)            # pages of a replica's cache
        prompt = RoutedPrompt(num_tokens, keys, session)
        replica = router.choose(prompt, queued)    # queued: tokens by name, for the replicas that may be used now
        router.sent(prompt, replica)               # from now on it is assumed to have these pages
        router.forget(replica)                     # it was restarted or is gone, so its cache is empty
"""

import secrets
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple, TypeVar, final

import msgspec

from infer.sampling_params import SEED_BITS
from infer.serving.protocols.fields import check_body

# Fields with prompts in the bodies of all APIs.
_FIELDS = ("tools", "system", "instructions", "messages", "input_prefix", "prompt", "input")
_PROMPTS = ("prompt", "suffix", "messages", "input")
_BYTES_PER_TOKEN = 4
_ANSWER_TOKENS, _ANSWER_COST = 150, 8.0  # tokens of a usual answer; cost of its token in tokens of a prompt
_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_TEXT_BLOCK, _KEY_BYTES = 256, 16  # a page of 64 tokens is about 256 bytes of English
_MOST_SESSIONS = 1 << 16
NUM_PAGES = 1024  # that a replica is assumed to keep: the pages of 8 full contexts
_MISSING_COST, _SENT_COST = 8.0, 0.2  # per token; a queued token costs 1
_KEPT = 0.999  # factor of the sent tokens per request, so that about 1,000 requests are remembered
_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class RoutedPrompt(NamedTuple):
    """A prompt for the router. `keys` are the keys of its first pages; each covers a page and all pages before it.

    An empty `session` means no session. `answer` is the expected cost of the answer, in tokens of a prompt.
    """

    num_tokens: int
    keys: Sequence[bytes] = ()
    session: str = ""
    answer: float = 0.0

    @property
    def work(self) -> float:
        """Tokens that count as queued at a replica until it has answered."""
        return self.num_tokens + self.answer


def text_keys(text: bytes, salt: bytes = b"") -> list[bytes]:
    """Return one key per whole block of a text. It covers the block, all blocks before it, and the salt."""
    keys, last = list[bytes](), salt
    for start in range(0, len(text) - _TEXT_BLOCK + 1, _TEXT_BLOCK):
        last = blake2b(last + text[start : start + _TEXT_BLOCK], digest_size=_KEY_BYTES).digest()
        keys.append(last)
    return keys


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


@final
class ReplicaRouter:
    """Chooses replicas. Each is assumed to keep `num_pages` pages; the least recently sent pages are evicted first."""

    def __init__(self, num_pages: int) -> None:
        self._num_pages = num_pages
        self._pages: dict[str, dict[bytes, None]] = {}  # by replica, ordered by use
        self._replica_by_session: dict[str, str] = {}
        self._sent: dict[str, float] = {}

    def choose(self, prompt: RoutedPrompt, queued: Mapping[str, float]) -> str:
        """Return one of the names in `queued`, which must not be empty."""
        if new := queued.keys() - self._sent.keys():  # they begin with the smallest count of the others
            self._sent |= dict.fromkeys(new, min(self._sent.values(), default=0.0))

        def cost(name: str) -> float:
            return queued[name] + _MISSING_COST * self._missing(prompt, name) + _SENT_COST * self._sent[name]

        return min(queued, key=cost)

    def sent(self, prompt: RoutedPrompt, replica: str) -> None:
        sent = self._sent.get(replica, 0.0) + self._missing(prompt, replica) + prompt.answer
        self._sent = {name: _KEPT * tokens for name, tokens in (self._sent | {replica: sent}).items()}
        pages = self._pages.setdefault(replica, {})
        for key in reversed(prompt.keys):  # because a page is useless without the pages before it
            _put_last(pages, key, None, self._num_pages)
        if prompt.session:
            _put_last(self._replica_by_session, prompt.session, replica, _MOST_SESSIONS)

    def forget(self, replica: str) -> None:
        self._pages.pop(replica, None)
        self._sent.pop(replica, None)  # a new replica must not begin with this one's count, which decays towards 0
        self._replica_by_session = {
            session: name for session, name in self._replica_by_session.items() if name != replica
        }

    def _missing(self, prompt: RoutedPrompt, replica: str) -> float:
        """Return the number of tokens of the prompt that the replica would compute."""
        if prompt.session and self._replica_by_session.get(prompt.session) == replica:
            return 0.0
        pages, num_found = self._pages.get(replica, {}), 0
        for key in prompt.keys:
            if key not in pages:
                break
            num_found += 1
        return prompt.num_tokens * (1 - num_found / max(1, len(prompt.keys)))


def _put_last(found: dict[_Key, _Value], key: _Key, value: _Value, most: int) -> None:
    """Put the key last in the dict, and drop the oldest keys above `most`."""
    found.pop(key, None)
    found[key] = value
    while len(found) > most:
        del found[next(iter(found))]
