"""The text of a session: ids, messages, and where its turns end. Values only; every change makes a new one."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, Self, final

from infer.engine.place import common_length
from infer.errors import InvalidRequestError


@final
@dataclass(frozen=True)
class Turn:
    """End of a turn: the numbers of messages and tokens at that point."""

    num_messages: int
    num_tokens: int


@final
@dataclass(frozen=True)
class Transcript:
    """Ids after the last turn belong to no message. `template` are further variables of the chat template."""

    token_ids: list[int] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    template: dict[str, Any] = field(default_factory=dict)
    num_given: int = 0  # messages before the first turn: no rewinding forgets them

    @property
    def num_raw_tokens(self) -> int:
        """Tokens after the last turn."""
        return len(self.token_ids) - (self.turns[-1].num_tokens if self.turns else 0)

    def asked(self, message: str | Mapping[str, Any]) -> list[dict[str, Any]]:
        """The messages and a further one; a text is the user's. Raises InvalidRequestError after raw tokens."""
        if num_raw := self.num_raw_tokens:
            raise InvalidRequestError(
                f"the last {num_raw} tokens belong to no message and would be forgotten: rewind({num_raw}), or go on "
                "with generate()"
            )
        return [*self.messages, {"role": "user", "content": message} if isinstance(message, str) else copied(message)]

    def with_tokens(self, token_ids: list[int]) -> Self:
        """Other ids, which belong to no message from where they differ; a turn that they cut is forgotten."""
        num_same = common_length(self.token_ids, token_ids)
        return replace(self.shortened(num_same) if num_same < len(self.token_ids) else self, token_ids=token_ids)

    def shortened(self, length: int) -> Self:
        """The first `length` tokens, and the turns that lie in them whole."""
        turns = [turn for turn in self.turns if turn.num_tokens <= length]
        num_messages = turns[-1].num_messages if turns else self.num_given
        return replace(self, token_ids=self.token_ids[:length], messages=self.messages[:num_messages], turns=turns)

    def answered(self, token_ids: list[int], messages: list[dict[str, Any]]) -> Self:
        """After a turn that ends in these ids and messages, which may have changed earlier ones."""
        num_same = common_length(self.token_ids, token_ids)

        def is_kept(num_messages: int) -> bool:
            return self.messages[:num_messages] == messages[:num_messages]

        turns = [turn for turn in self.turns if turn.num_tokens <= num_same and is_kept(turn.num_messages)]
        turns.append(Turn(len(messages), len(token_ids)))
        num_given = self.num_given if is_kept(self.num_given) else 0
        return replace(self, token_ids=token_ids, messages=messages, turns=turns, num_given=num_given)

    def to_record(self) -> dict[str, Any]:
        """All but the ids, as JSON has it."""
        turns = [[turn.num_messages, turn.num_tokens] for turn in self.turns]
        return {"messages": self.messages, "turns": turns, "template": self.template, "num_given": self.num_given}

    @classmethod
    def from_record(cls, token_ids: list[int], record: Mapping[str, Any]) -> Self:
        """Raises InvalidRequestError for what `to_record` cannot have given, whoever wrote it."""
        messages, template = _typed(record, "messages", list), _typed(record, "template", dict)
        if not all(isinstance(message, dict) for message in messages):
            raise InvalidRequestError("messages must be objects")
        turns = [Turn(0, 0)]
        for pair in _typed(record, "turns", list):
            if not isinstance(pair, list) or list(map(type, pair)) != [int, int]:
                raise InvalidRequestError("turns must be pairs of counts")
            turns.append(Turn(*pair))
            if pair[0] < turns[-2].num_messages or pair[1] < turns[-2].num_tokens:
                raise InvalidRequestError("turns must follow one another")
        num_given = _typed(record, "num_given", int)
        if turns[-1].num_messages > len(messages) or turns[-1].num_tokens > len(token_ids):
            raise InvalidRequestError("turns must end within the messages and tokens")
        if not 0 <= num_given <= len(messages):
            raise InvalidRequestError(f"num_given must be in [0, {len(messages)}], got {num_given}")
        return cls(token_ids, messages, turns[1:], template, num_given)


def _typed(record: Mapping[str, Any], name: str, kind: type) -> Any:
    if type(record.get(name)) is not kind:
        raise InvalidRequestError(f"{name} must be of type {kind.__name__}, got {record.get(name)!r:.80}")
    return record[name]


def copied(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message of the caller's, who may change it afterwards. Raises InvalidRequestError."""
    if not isinstance(message, Mapping):
        raise InvalidRequestError(f"a message must be a text or a mapping with role and content, got {message!r:.80}")
    return deepcopy(dict(message))
