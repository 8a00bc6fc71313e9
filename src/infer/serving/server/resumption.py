"""Continue a stream in a process other than the one that began it.

Tokens depend only on the prompt, the parameters, the seed and their positions. So the events of a stream are equal byte
by byte if its parts are divided as before. Only counts of cached tokens may differ. A comment before the events of each
part notes its tokens (`note_of`). The process that asks again sends all these tokens with the request (`pack`). They
are then given, not sampled, and cost as much as tokens of a prompt.
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
    """A part of a stream that was sent. Parts are kept in the order in which they were sent.

    No tokens mean the end of the choice. `logprobs` has one entry per token, or is empty.
    """

    choice: int
    token_ids: list[int]
    logprobs: tuple[TokenLogprob, ...] = ()


class Given(NamedTuple):
    """The tokens with which a choice begins."""

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
    """Return all tokens of a choice except the last one.

    The last token is sampled again, because it may be the one that ends the answer.
    """
    own = [part for part in parts if part.choice == choice]
    token_ids = [token_id for part in own for token_id in part.token_ids]
    return Given(token_ids[:-1], [logprob for part in own for logprob in part.logprobs][: max(0, len(token_ids) - 1)])
