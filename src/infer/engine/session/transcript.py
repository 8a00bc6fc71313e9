"""The conversation of a session: ids, messages, and the ends of its turns. Every change creates a new value.

A conversation has two spellings: its own ids, and the ids that the template and the tokenizer make.
"""

from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self, final

from infer.engine.step.sequence import common_length
from infer.errors import InvalidRequestError


class Turn(NamedTuple):
    """End of a turn: the number of messages and of tokens at that point."""

    num_messages: int
    num_tokens: int


@final
@dataclass(frozen=True)
class Transcript:
    """A session's conversation, as token ids and as messages.

    Ids after the last turn are raw text, and belong to no message. `template` has the chat template's variables.
    """

    token_ids: list[int] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    template: dict[str, Any] = field(default_factory=dict)
    num_given: int = 0  # messages before the first turn, which `rewind` never forgets

    @property
    def num_raw_tokens(self) -> int:
        """Number of tokens after the last turn."""
        return len(self.token_ids) - (self.turns[-1].num_tokens if self.turns else 0)

    def asked(self, message: str | Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the messages and another one; a text is the user's. Raises InvalidRequestError after raw tokens."""
        if num_raw := self.num_raw_tokens:
            raise InvalidRequestError(
                f"the last {num_raw} tokens belong to no message and would be forgotten: call rewind({num_raw}), or "
                "continue with generate()"
            )
        return [*self.messages, {"role": "user", "content": message} if isinstance(message, str) else copied(message)]

    def with_tokens(self, token_ids: list[int]) -> Self:
        """Return the conversation with other ids. From the first difference on, they belong to no message."""
        num_same = common_length(self.token_ids, token_ids)
        return replace(self.shortened(num_same) if num_same < len(self.token_ids) else self, token_ids=token_ids)

    def shortened(self, length: int) -> Self:
        """Return the first `length` tokens, and the turns that end within them."""
        turns = [turn for turn in self.turns if turn.num_tokens <= length]
        num_messages = turns[-1].num_messages if turns else self.num_given
        return replace(self, token_ids=self.token_ids[:length], messages=self.messages[:num_messages], turns=turns)

    def answered(self, token_ids: list[int], messages: list[dict[str, Any]]) -> Self:
        """Return the conversation after a turn with these ids and messages. Earlier ids may differ."""
        num_same = common_length(self.token_ids, token_ids)

        def is_kept(num_messages: int) -> bool:
            return self.messages[:num_messages] == messages[:num_messages]

        turns = [turn for turn in self.turns if turn.num_tokens <= num_same and is_kept(turn.num_messages)]
        turns.append(Turn(len(messages), len(token_ids)))
        num_given = self.num_given if is_kept(self.num_given) else 0
        return replace(self, token_ids=token_ids, messages=messages, turns=turns, num_given=num_given)

    def to_record(self) -> dict[str, Any]:
        """Return everything except the ids, as JSON."""
        turns = list(map(list, self.turns))
        return {"messages": self.messages, "turns": turns, "template": self.template, "num_given": self.num_given}

    @classmethod
    def from_record(cls, token_ids: list[int], record: Mapping[str, Any]) -> Self:
        """Return the conversation of a record. Raises InvalidRequestError if `to_record` cannot have written it."""
        messages, template = typed(record, "messages", list), typed(record, "template", dict)
        if not all(isinstance(message, dict) for message in messages):
            raise InvalidRequestError("messages must be objects")
        turns = [Turn(0, 0)]
        for pair in typed(record, "turns", list):
            if not isinstance(pair, list) or list(map(type, pair)) != [int, int]:
                raise InvalidRequestError("turns must be pairs of counts")
            turns.append(Turn(*pair))
            if pair[0] < turns[-2].num_messages or pair[1] < turns[-2].num_tokens:
                raise InvalidRequestError("turns must be in increasing order")
        num_given = typed(record, "num_given", int)
        if turns[-1].num_messages > len(messages) or turns[-1].num_tokens > len(token_ids):
            raise InvalidRequestError("turns must end within the messages and tokens")
        if not 0 <= num_given <= len(messages):
            raise InvalidRequestError(f"num_given must be in [0, {len(messages)}], got {num_given}")
        return cls(token_ids, messages, turns[1:], template, num_given)


def typed(record: Mapping[str, Any], name: str, kind: type) -> Any:
    """Return a value of a record. Raises InvalidRequestError if it is not of this type."""
    if type(record.get(name)) is not kind:
        raise InvalidRequestError(f"{name} must be of type {kind.__name__}, got {record.get(name)!r:.80}")
    return record[name]


def copied(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a message. Raises InvalidRequestError if it is not a mapping."""
    if not isinstance(message, Mapping):
        raise InvalidRequestError(f"a message must be a text or a mapping with role and content, got {message!r:.80}")
    return deepcopy(dict(message))


def keep_spelling(
    kept: Sequence[int], rendered: Sequence[int], token_bytes: Sequence[bytes], control_ids: Collection[int]
) -> list[int]:
    """Return `rendered` with the spelling of `kept`, as long as both have the same bytes and the same control tokens.

    A model may spell its own answer differently from the tokenizer. If the two texts differ, the spelling changes at
    the last common border between tokens.
    """
    num_kept, num_rendered = 0, 0
    while num_kept < len(kept) and num_rendered < len(rendered):
        if kept[num_kept] == rendered[num_rendered]:
            num_kept, num_rendered = num_kept + 1, num_rendered + 1
            continue
        border = _next_border((kept, rendered), (num_kept, num_rendered), token_bytes, control_ids)
        if border is None:
            break
        num_kept, num_rendered = border
    return [*kept[:num_kept], *rendered[num_rendered:]]


def _next_border(
    spellings: tuple[Sequence[int], Sequence[int]],
    starts: tuple[int, int],
    token_bytes: Sequence[bytes],
    control_ids: Collection[int],
) -> tuple[int, int] | None:
    """Return where both spellings have written the same text since their starts; None if their texts differ."""
    written, ends = [b"", b""], list(starts)  # bytes that only one spelling has written so far
    while True:
        shorter = 0 if len(written[0]) <= len(written[1]) else 1
        if ends[shorter] == len(spellings[shorter]):
            return None
        token_id = spellings[shorter][ends[shorter]]
        text = b"" if token_id in control_ids or token_id >= len(token_bytes) else token_bytes[token_id]
        if not text:
            return None
        written[shorter] += text
        ends[shorter] += 1
        same = min(map(len, written))
        if written[0][:same] != written[1][:same]:
            return None
        written = [rest[same:] for rest in written]
        if not any(written):
            return ends[0], ends[1]
