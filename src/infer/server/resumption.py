"""How a stream goes on in another process than the one that began it.

Tokens depend on the prompt, the parameters, the seed and their positions alone. So the events of a stream come again,
byte by byte, where its parts are cut as they were: before the events of a part a comment in the stream notes its tokens
(`note_of`), and who asks again sends all of them with the request (`pack`). The tokens are given then, not sampled:
they cost what tokens of a prompt cost.
"""

import base64
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from infer.outputs import Piece, TokenLogprob

NOTE = b": infer "
FAILED = b": infer-engine-failed\n\n"  # before the last event of a stream whose engine has failed
_END = b"\n\n"


class SentPart(NamedTuple):
    """Of a stream, in the order in which its parts were sent. No tokens: the end of the choice. `logprobs` has an entry
    for each token, or none.
    """

    choice: int
    token_ids: list[int]
    logprobs: tuple[TokenLogprob, ...] = ()


class Given(NamedTuple):
    """With what a choice begins."""

    token_ids: list[int]
    logprobs: list[TokenLogprob]


_note_decoder = msgspec.msgpack.Decoder(SentPart)
_parts_decoder = msgspec.msgpack.Decoder(list[SentPart])


def note_of(choice: int, pieces: Sequence[Piece]) -> bytes:
    logprobs = tuple(piece.logprob for piece in pieces if piece.logprob is not None)
    part = SentPart(choice, [piece.token_id for piece in pieces], logprobs)
    return NOTE + base64.b64encode(msgspec.msgpack.encode(part)) + _END


def read_note(event: bytes) -> SentPart:
    return _note_decoder.decode(base64.b64decode(event[len(NOTE) :]))


def pack(parts: Sequence[SentPart]) -> bytes:
    return msgspec.msgpack.encode(parts)


def unpack(packed: bytes) -> list[SentPart]:
    return _parts_decoder.decode(packed)


def given_to(choice: int, parts: Sequence[SentPart]) -> Given:
    """All of its tokens but the last, which is sampled again: it may be the one that ends the answer."""
    own = [part for part in parts if part.choice == choice]
    token_ids = [token_id for part in own for token_id in part.token_ids]
    return Given(token_ids[:-1], [logprob for part in own for logprob in part.logprobs][: max(0, len(token_ids) - 1)])
